"""Environments of others: the table of algos/README.md, row by row, where the package is installed."""

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from control import CONTROL
from helpers import SMALL, command_line, new_run, user_error

PAGE = (Path(__file__).resolve().parents[1] / "algos/README.md").read_text()
CELLS = re.findall(r"^\|(.*?)\| `(\w+)\.py (.*?)` \| (works|refused: `(.*?)`)", PAGE, re.MULTILINE)
INSTALLED = [next(cells[0] for cells in CELLS[i::-1] if cells[0].strip()) for i in range(len(CELLS))]


@pytest.mark.slow
@pytest.mark.parametrize("install, algo, args, _, words", [(x, *cells[1:]) for x, cells in zip(INSTALLED, CELLS)])
def test_a_row(install, algo, args, _, words, tmp_path, capsys, imports_as_they_were):
    for package in re.findall(r"`([\w-]+)==", install):
        try:
            version(package)
        except PackageNotFoundError:
            pytest.skip(f"not run: {package} is not installed")
    args = [*SMALL[algo], *args.split(), "--eval-episodes", 1, "--eval-every", 0]
    if not words:
        assert (new_run(CONTROL[algo], tmp_path, *args) / "model").is_dir()
        return
    with user_error(capsys, words):
        command_line(CONTROL[algo], *args, "--output-dir", tmp_path)
