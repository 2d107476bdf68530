"""README's tables are what benchmarks/page.py makes of the sources, the curves and the counted tests of today."""

from pathlib import Path

import pytest

from benchmarks.page import SCRIPTS, count, page, read, scripts_of

ROOT = Path(__file__).resolve().parents[1]


def test_the_tables_are_fresh():
    text = (ROOT / "README.md").read_text()
    assert page(text) == text, "run: python benchmarks/page.py write"


def test_every_script_is_listed():
    assert set(SCRIPTS) == {path.stem for path in (ROOT / "algos").glob("*.py")}


def test_the_counted_tests_are_those_that_are_there(request):
    """Whether they passed is known when they have run; that none was added, renamed or lost since, is known here."""
    items = [item.nodeid for item in request.session.items]
    if {Path(nodeid.partition("::")[0]).name for nodeid in items} != {p.name for p in ROOT.glob("tests/test_*.py")}:
        pytest.skip("not run: only a part of the tests is")

    def totals(counts):
        return {file: {s: sum(c.values()) for s, c in by_script.items()} for file, by_script in counts.items()}

    there, counted = totals(count(dict.fromkeys(items, "there"))), totals(read("tests"))
    stale = [file for file in there.keys() | counted.keys() if there.get(file) != counted.get(file)]
    assert not stale, f"run: RESULTS=benchmarks/results/tests.json pytest, for {sorted(stale)} changed"


@pytest.mark.parametrize(
    "nodeid, scripts",
    [
        ("tests/test_resume.py::test_x[ppo_lm-1]", ["ppo_lm"]),
        ("tests/test_learning.py::test_x[ppo-cartpole]", ["ppo"]),
        ("tests/test_learning.py::test_x[bc10-hopper]", ["bc"]),
        ("tests/test_exact_rloo.py::test_x", ["rloo"]),
        ("tests/test_learning.py::test_online_dpo_does_not", ["online_dpo"]),
    ],
)
def test_tests_count_for_the_scripts_that_they_name_or_import(nodeid, scripts):
    assert scripts_of(nodeid) == scripts
