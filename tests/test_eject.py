"""utils/eject.py: the one-file copy runs where nothing of ours can be imported and gives the same curve bit for bit."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from utils.eject import EjectError, eject
from utils.lm import TINY_MODEL

ROOT = Path(__file__).resolve().parents[1]
SHORT = {
    "grpo": "--task sort --num-prompts 4 --num-generations 4 --micro-batch-size 16 --max-steps 3 --eval-prompts 4",
    "sft": "--task sort --batch-size 8 --max-steps 3 --eval-prompts 4",
}


def curve(command: list[str], folder: Path) -> list[dict]:
    """Metrics of a run in a foreign folder, without the columns that measure time."""
    done = subprocess.run(command + ["--output-dir", "out"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [path] = folder.glob("out/*/metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "algos").glob("*.py")))
def test_an_ejected_script_gives_the_same_curve(script, tmp_path):
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    ejected = subprocess.run(
        [sys.executable, ROOT / "utils/eject.py", ROOT / f"algos/{script}.py"], capture_output=True
    )
    assert ejected.returncode == 0, ejected.stderr
    (tmp_path / "theirs/mine.py").write_bytes(ejected.stdout)
    arguments = ["--model", TINY_MODEL, *SHORT[script].split()]
    # -I: neither the current folder nor PYTHONPATH is searched, so nothing of ours can be found
    theirs = curve([sys.executable, "-I", "mine.py", *arguments], tmp_path / "theirs")
    assert theirs == curve([sys.executable, str(ROOT / f"algos/{script}.py"), *arguments], tmp_path / "ours")
    assert len(theirs) >= 3


def test_only_what_is_used_is_inlined():
    text = eject(ROOT / "algos/sft.py")
    names = {node.name for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert {"completion_logps", "Run", "UserError", "update"} <= names
    assert not {"k3", "advice", "show", "collect"} & names
    assert "\nfrom utils" not in text and "sys.path.insert(0, str(Path(__file__)" not in text


def test_two_meanings_of_one_name_are_refused(tmp_path):
    script = tmp_path / "x.py"
    script.write_text("from utils.lm import sample\n\n\ndef positions():\n    return sample\n")
    with pytest.raises(EjectError, match="positions"):
        eject(script)
