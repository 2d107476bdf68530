"""A script with a `Parent:` is its parent but for what its docstring names, by syntax trees; README has the size."""

import ast
import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TREES = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "algos").glob("*.py")}
CHILDREN = {
    name: match[1]
    for name, tree in TREES.items()
    if (match := re.search(r"^Parent: (\w+)\.py\.", ast.get_docstring(tree), re.MULTILINE))
}


def definitions(name: str) -> dict[str, str]:
    """Name -> code without docstrings and comments, of every function, class, constant and option at the top level."""
    found = {}
    for node in TREES[name].body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            options = [n for n in node.body if isinstance(n, ast.AnnAssign)]
            found |= {f"Args.{option.target.id}": ast.unparse(option) for option in options}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for inner in ast.walk(node):
                if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(inner) is not None:
                    inner.body = inner.body[1:] or [ast.Pass()]
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0]).strip("()")] = ast.unparse(node)
    return found


def test_there_are_families():
    assert CHILDREN["ppo_atari"] == "ppo"


@pytest.mark.parametrize("child", sorted(CHILDREN))
def test_a_child_changes_only_what_its_docstring_names(child):
    ours, theirs = definitions(child), definitions(CHILDREN[child])
    changed = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    docstring = ast.get_docstring(TREES[child])
    named = docstring[docstring.index("Parent:") :].split("\n\n")[0]
    unnamed = [name for name in changed if not re.search(rf"\b{name.removeprefix('Args.')}\b", named)]
    assert not unnamed, f"{child}.py differs from {CHILDREN[child]}.py in {unnamed}"
    assert ours["update"] == theirs["update"] or "update" in named


@pytest.mark.parametrize("child", sorted(CHILDREN))
def test_readme_has_the_size_of_the_difference(child):
    """Lines of code that the parent does not have, without docstrings and the Args class."""
    code = {}
    for name in (child, CHILDREN[child]):
        parts = definitions(name)
        code[name] = [line for key in parts if not key.startswith("Args.") for line in parts[key].splitlines()]
    new = [line for line in difflib.ndiff(code[CHILDREN[child]], code[child]) if line.startswith("+ ")]
    readme = (ROOT / "README.md").read_text()
    row = next(line for line in readme.splitlines() if f"`algos/{child}.py`" in line and line.startswith("|"))
    assert f"`{CHILDREN[child]}.py` with {len(new)} lines of its own" in row
