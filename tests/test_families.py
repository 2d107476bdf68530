"""A script with a `Parent:` is its parent but for what its docstring names, by syntax trees."""

import ast
import re
from pathlib import Path

import pytest

from benchmarks.page import definitions
from tests.specs import parent_of

ALGOS = Path(__file__).resolve().parents[1] / "algos"
CHILDREN = {path.stem: parent for path in ALGOS.glob("*.py") if (parent := parent_of(path.stem))}


def test_there_are_families():
    assert CHILDREN["ppo_atari"] == "ppo"


@pytest.mark.parametrize("child", sorted(CHILDREN))
def test_a_child_changes_only_what_its_docstring_names(child):
    ours, theirs = (definitions(ALGOS / f"{name}.py") for name in (child, CHILDREN[child]))
    changed = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    docstring = ast.get_docstring(ast.parse((ALGOS / f"{child}.py").read_text()))
    named = docstring[docstring.index("Parent:") :].split("\n\n")[0]
    unnamed = [name for name in changed if not re.search(rf"\b{name.removeprefix('Args.')}\b", named)]
    assert not unnamed, f"{child}.py differs from {CHILDREN[child]}.py in {unnamed}"
    assert ours["update"] == theirs["update"] or "update" in named
