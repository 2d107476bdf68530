"""The planted bugs of the specs fit the sources."""

from collections import Counter

import pytest

from benchmarks.planted_bugs import BUGS, SAME
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
