"""The planted bugs of the specs fit the sources; the operators."""

import ast
from collections import Counter

import pytest

from benchmarks.planted_bugs import BUGS, SAME
from tests.family import numbered_code_of, script_of
from tests.operators import ARGUED, KINDS, drawn, edits, own
from tests.specs import SPECS, parent_of, sources
from tests.specs.utils_bugs import BUGS as UTILS_BUGS
from tests.specs.utils_bugs import TESTS

AT_HOME = [(script, bug) for script, spec in SPECS.items() for bug in spec.bugs]


@pytest.mark.parametrize("edit", [*BUGS, *SAME], ids=lambda edit: edit.name)
def test_it_changes_the_program_in_one_line(edit):
    """More than a comment, in each file that holds its text; a line that moves is none."""
    assert edit.files(), "its text stands nowhere once"
    for file in edit.files():
        after = edit.apply(sources()[file])
        compile(after, file, "exec")
        old, new = ([line.partition("  #")[0].strip() for line in text.splitlines() if line.strip()]
                    for text in (sources()[file], after))  # fmt: skip
        assert old != new, f"{file} stays the same program"
        gone, come = Counter(old) - Counter(new), Counter(new) - Counter(old)
        assert max(gone.total(), come.total()) <= 1 or edit in SAME, "a planted bug is one line"


@pytest.mark.parametrize("script, bug", AT_HOME, ids=lambda x: x if isinstance(x, str) else x.name)
def test_it_stands_in_a_line_that_the_parent_lacks(script, bug):
    assert f"algos/{script}.py" in bug.files()
    assert parent_of(script) is None or f"algos/{parent_of(script)}.py" not in bug.files()


def test_names_are_unique_and_say_why():
    names = [bug.name for bug in BUGS + list(SAME)]
    assert len(set(names)) == len(names) and all(bug.why for bug in BUGS)
    assert all(any(file in TESTS for file in bug.files()) for bug in UTILS_BUGS)


EDITS = """
x.detach() -> detach: x
x.sum(1) -> call: x
f(x, 1) -> call: x
f(x, y) -> exchange: f(y, x)
f(x, a=y) -> keyword: f(x)
x.mean() -> swap: x.sum()
min(x, y) -> swap: max(x, y)
x * y -> swap: x / y
x and y -> swap: x or y
x + y -> sign: x - y
-x -> sign: x
x - y -> exchange: y - x
x / y -> operand: x
~x -> invert: x
not x -> invert: x
x < y -> compare: x <= y
3 -> constant: 4
3 -> constant: 0
0.5 -> constant: 1.0
args.one -> field: args.other
a if b else c -> exchange: c if b else a
""".strip().splitlines()


@pytest.mark.parametrize("line", EDITS)
def test_an_operator_makes_the_edit(line):
    old, new = line.split(" -> ")
    found = edits(ast.parse(old, mode="eval").body, {"one": ["other"]})
    assert new in [f"{operator}: {ast.unparse(node)}" for operator, node in found]


def test_a_draw_of_mutants():
    """Programs, each with one edit in a function that the parent has otherwise, half of them in own lines."""
    text, (names, lines) = sources()["algos/simpo.py"], own("simpo")
    mutants = drawn("simpo", 40, seed=1)
    assert mutants == drawn("simpo", 40, seed=1) != drawn("simpo", 40, seed=2) and len(set(mutants)) == 40
    assert sum(not lines.isdisjoint(mutant.lines(text)) for mutant in mutants) >= 20
    assert lines < {number for number, _ in numbered_code_of(script_of("simpo"))} and "main" not in names
    kinds = Counter(mutant.operator for mutant in mutants)
    assert {"delete", "order"} < kinds.keys() and max(kinds.values()) <= 6
    for mutant in mutants:
        after, at = mutant.apply(text), mutant.lines(text)
        assert mutant.function in names and ast.dump(ast.parse(after)) != ast.dump(ast.parse(text))
        assert after.split("\n")[: at[0] - 1] == text.split("\n")[: at[0] - 1]


@pytest.mark.parametrize("bug", ARGUED, ids=lambda bug: bug.name)
def test_an_argument_fits_its_script(bug):
    assert bug.why.startswith(KINDS) and bug.old in sources()[f"algos/{bug.name.split()[0]}.py"]
