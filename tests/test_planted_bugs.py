"""The catalogue of planted bugs fits the sources, and a sample of it, drawn by the commit, is caught."""

import json
import random
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from types import CodeType, SimpleNamespace

import pytest
from planted import BUGS, SAME
from test_learning import fresh_seeds

from benchmarks import mutations
from benchmarks.planted_bugs import RESULTS, TESTS, Recorder, fast_check, read_rows, score

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = "grpo rloo ppo_lm dpo simpo orpo kto reward_model online_dpo sft ppo ppo_atari sac bc iql dt".split()


def changed_lines(before: str, after: str) -> int:
    """How many lines an edit takes away, or adds where that is more; a line that moves is none."""
    old, new = (Counter(text.splitlines()) for text in (before, after))
    return max((old - new).total(), (new - old).total())


@cache
def program(text: str) -> list:
    """What a file does, without comments, docstrings and places of lines. Raises SyntaxError."""

    def parts(code: CodeType) -> list:
        inner = [parts(const) if isinstance(const, CodeType) else repr(const) for const in code.co_consts]
        return [code.co_code, code.co_names, code.co_varnames, inner]

    return parts(compile(text, "", "exec", optimize=2))


@pytest.mark.parametrize("edit", BUGS + SAME, ids=lambda edit: edit.name)
def test_it_applies(edit):
    for file in edit.files:
        before = (ROOT / file).read_text()
        after = edit.apply(before, file)
        assert program(after) != program(before), f"{file} stays the same program"
        if edit in BUGS:
            assert changed_lines(before, after) <= 1, "a planted bug is one line"


def test_an_edit_that_no_longer_applies_is_an_error():
    with pytest.raises(ValueError, match="finds its text 0 times"):
        BUGS[0].apply("", "algos/grpo.py")
    with pytest.raises(ValueError, match="finds its text 2 times"):
        BUGS[0].apply(2 * BUGS[0].old, "algos/grpo.py")


def test_the_catalogue_is_large_enough():
    names = [edit.name for edit in BUGS + SAME]
    assert len(set(names)) == len(names)
    mistakes = defaultdict(set)
    for edit in BUGS:
        for file in edit.files:
            mistakes[Path(file).stem].add(edit.mistake)
    assert len({edit.mistake for edit in BUGS}) >= 80 and len(SAME) >= 20
    assert all(len(mistakes[script]) >= 6 for script in SCRIPTS)
    assert all(edit.why for edit in BUGS)


def test_every_edited_file_has_tests():
    for edit in BUGS + SAME:
        for test in fast_check(edit.files):
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / file).read_text()
    left_out = ("learning", "families", "readme", "page", "eject", "recipes")  # they compare what is written down
    assert not any(name.partition("::")[0] in left_out for names in TESTS.values() for name in names.split())


@pytest.mark.parametrize(
    "files, kept",
    [
        ((), "grpo-1 sft plain"),
        (("algos/sft.py",), "sft plain"),
        (("algos/grpo.py", "algos/rloo.py"), "grpo-1 plain"),
        (("algos/sft.py", "utils/tasks.py"), "grpo-1 sft plain"),
    ],
)
def test_cases_of_other_scripts_are_left_out(files, kept):
    cases = [
        SimpleNamespace(name=case, nodeid=f"tests/test_dt.py::test_sac[{case}]") for case in ("grpo-1", "sft", "plain")
    ]
    Recorder(files).pytest_collection_modifyitems(cases)
    assert " ".join(case.name for case in cases) == kept


def test_a_mistake_is_caught_where_each_of_its_entries_is():
    rows = {edit.name: {"outcome": "failed"} for edit in BUGS}
    whole = score(rows)
    assert whole["caught"] == whole["mistakes"] and whole["entries_caught"] == whole["entries"] == len(BUGS)
    one = next(edit for edit in BUGS if sum(other.mistake == edit.mistake for other in BUGS) > 1)
    for outcome in ("passed", "late", "broken"):
        less = score(rows | {one.name: {"outcome": outcome}})
        assert less["caught"] == whole["caught"] - 1 and less["entries_caught"] == whole["entries"] - 1


def test_the_scores_of_random_mutations():
    """Ten mutants: two survive, one of them equivalent; of eight killed, one is late, one broken, two raise."""
    outcomes = [("passed", "")] * 2 + [("late", ""), ("broken", "")] + [("failed", "TypeError: <<")] * 2
    outcomes += [("failed", "AssertionError: 1 != 2"), ("failed", "assert 1 == 2")] * 2
    rows = [{"name": str(i), "outcome": outcome, "raised": why} for i, (outcome, why) in enumerate(outcomes)]
    found = mutations.score(rows, {"0": "equivalent: nobody can tell", "1": "caught by a test, written for it"})
    assert [found[name] for name in ("killed", "late", "broken", "raised", "equivalent")] == [8, 1, 1, 2, 1]
    assert found["score"] == 0.8 and found["score_without_equivalent"] == 0.8889
    assert found["score_of_assertions"] == 0.8


def test_annotations_and_docstrings_are_no_mutations():
    before = mutations.program('def f(x: int | None = None) -> int:\n    "A sum."\n    return x + 1')
    assert mutations.program('def f(x: int - None = None) -> str:\n    "None."\n    return x + 1') == before
    assert mutations.program('def f(x: int | None = None) -> int:\n    "A sum."\n    return x + 2') != before


def test_a_sample_is_caught(tmp_path):
    """Of the half that was caught fastest: two, and an edit that changes nothing and must not be."""
    bugs = {edit.name for edit in BUGS}
    rows = {row["name"]: row for row in read_rows(RESULTS) if row["name"] in bugs}
    caught = sorted((row["seconds"], name) for name, row in rows.items() if row["outcome"] == "failed")
    if len(caught) < 4:
        pytest.skip("not run: benchmarks/planted_bugs.py run has not been run")
    names = [name for _, name in caught[: len(caught) // 2]]
    sample = [*random.Random(fresh_seeds()[0]).sample(names, 2), "same:independent-lines-of-statistics"]
    output = tmp_path / "rows.jsonl"
    print(f"sample: {', '.join(sample)}")
    subprocess.run([sys.executable, ROOT / "benchmarks/planted_bugs.py", "run", "--no-unedited", "--output", output,
                    "--only", *sample], check=True, cwd=tmp_path)  # fmt: skip
    rows = {row["name"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert [rows[name]["outcome"] for name in sample] == ["failed", "failed", "passed"], rows
    assert all("::test_" in rows[name]["test"] for name in sample[:2])
