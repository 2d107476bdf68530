"""The tables of the pages are what benchmarks/page.py makes of the specs, the sources, the curves and the results."""

import pytest

from benchmarks.page import ROOT, page, pages
from tests.specs import SPECS


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_tables_are_fresh(path):
    assert page(path.read_text()) == path.read_text(), "run: python benchmarks/page.py write"


def test_every_comparison_with_a_peer_is_on_a_script_s_page():
    listed = {name.partition("::")[0] for spec in SPECS.values() for name in spec.tests.split()}
    assert {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_parity_*.py")} <= listed
