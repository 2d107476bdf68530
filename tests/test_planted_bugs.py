"""The planted bugs of the specs fit the sources, and a sample of them, drawn by the commit, is caught."""

import ast
import json
import random
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import CodeType

import pytest

from benchmarks.curves import fresh_seeds
from benchmarks.planted_bugs import BUGS, SAME, planted, read_rows
from tests.specs import SPECS, parent_of, sources
from tests.specs.utils_bugs import BUGS as UTILS_BUGS
from tests.specs.utils_bugs import TESTS

ROOT = Path(__file__).resolve().parents[1]
AT_HOME = [(script, bug) for script, spec in SPECS.items() for bug in spec.bugs]


def changed_lines(before: str, after: str) -> int:
    """How many lines an edit takes away, or adds where that is more; a line that moves is none."""
    old, new = (Counter(line for line in text.splitlines() if line.strip()) for text in (before, after))
    return max((old - new).total(), (new - old).total())


@cache
def blocks(text: str) -> list[tuple[int, int]]:
    """First and last line of each statement at the top of a file."""
    return [(node.lineno - 1, node.end_lineno) for node in ast.parse(text).body]


def around(text: str, edit) -> str:
    """The top-level statement that an edit lies in, without decorators; the file where it lies in no single one."""
    start = text.index(edit.old)
    first, last = text.count("\n", 0, start), text.count("\n", 0, start + len(edit.old))
    lines = text.splitlines(keepends=True)
    return next(("".join(lines[a:b]) for a, b in blocks(text) if a <= first and last < b), text)


@cache
def program(text: str) -> list:
    """What code does, without comments, docstrings and places of lines. Raises SyntaxError."""

    def parts(code: CodeType) -> list:
        inner = [parts(const) if isinstance(const, CodeType) else repr(const) for const in code.co_consts]
        return [code.co_code, code.co_names, code.co_varnames, inner]

    return parts(compile(text, "", "exec", optimize=2))


@pytest.mark.parametrize("edit", [*BUGS, *SAME], ids=lambda edit: edit.name)
def test_it_changes_the_program_in_one_line(edit):
    assert edit.files(), "its text stands nowhere once"
    for file in edit.files():
        before = around(sources()[file], edit)
        after = edit.apply(before)
        assert program(after) != program(before), f"{file} stays the same program"
        assert changed_lines(before, after) <= 1 or edit in SAME, "a planted bug is one line"


@pytest.mark.parametrize("script, bug", AT_HOME, ids=lambda x: x if isinstance(x, str) else x.name)
def test_it_stands_in_a_line_that_the_parent_lacks(script, bug):
    assert f"algos/{script}.py" in bug.files()
    assert parent_of(script) is None or f"algos/{parent_of(script)}.py" not in bug.files()


def test_names_are_unique_and_say_why():
    names = [bug.name for bug in BUGS + list(SAME)]
    assert len(set(names)) == len(names) and all(bug.why for bug in BUGS)
    assert all(any(file in TESTS for file in bug.files()) for bug in UTILS_BUGS)


@pytest.mark.slow
def test_a_sample_is_caught(tmp_path):
    """Of the half that was caught fastest: two, and an edit that changes nothing and must not be."""
    there = {(bug.name, file) for bug, file in planted(BUGS)}
    rows = {key: row for key, row in read_rows().items() if key in there and row["outcome"] == "failed"}
    fastest = sorted(rows, key=lambda key: rows[key]["seconds"])[: len(rows) // 2]
    chosen = random.Random(fresh_seeds()[0]).sample(fastest, 2)
    sample = [*map("@".join, chosen), "same:independent-lines-of-statistics"]
    output = tmp_path / "rows.jsonl"
    print(f"sample: {', '.join(sample)}")
    subprocess.run([sys.executable, ROOT / "benchmarks/planted_bugs.py", "run", "--no-unedited", "--output", output,
                    "--only", *sample], check=True, cwd=tmp_path)  # fmt: skip
    outcomes = {(row["bug"], row["file"]): row for row in map(json.loads, output.read_text().splitlines())}
    assert [outcomes[key]["outcome"] for key in chosen] == ["failed", "failed"], outcomes
    assert {row["outcome"] for (bug, _), row in outcomes.items() if bug.startswith("same:")} == {"passed"}, outcomes
    assert all("::test_" in outcomes[key]["test"] for key in chosen)
