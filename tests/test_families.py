"""A script with a `Parent:` is its parent outside of what its docstring names, as syntax trees; README prints the difference."""

import ast
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
    """Name -> syntax tree, without docstrings, of every top-level function, class and constant, and of each option."""
    found = {}
    for node in TREES[name].body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            options = [n for n in node.body if isinstance(n, ast.AnnAssign)]
            found |= {f"Args.{option.target.id}": ast.dump(option) for option in options}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for inner in ast.walk(node):
                if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(inner) is not None:
                    inner.body = inner.body[1:] or [ast.Pass()]
            found[node.name] = ast.dump(node)
        elif isinstance(node, ast.Assign):
            found[node.targets[0].id] = ast.dump(node)
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
