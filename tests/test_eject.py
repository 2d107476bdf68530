"""utils/eject.py: the one-file copy runs where nothing of ours can be imported and gives the same curve bit for bit."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from control import write_project
from helpers import SMALL, assert_same_result, metrics, new_run
from small_data import pendulum

from utils.eject import EjectError, eject
from utils.lm import TINY_MODEL

ROOT = Path(__file__).resolve().parents[1]
MINE = ["--env-id", "project:Mine-v0"]  # of a package in the current folder, beside one called utils
DATA = ["--dataset", "pendulum.hdf5"]
LANGUAGE = ["--model", TINY_MODEL, *"--task sort --max-steps 3 --eval-prompts 4".split()]
SHORT = {
    "grpo": [*LANGUAGE, *"--num-prompts 4 --num-generations 4 --micro-batch-size 16".split()],
    "rloo": [*LANGUAGE, *"--num-prompts 4 --num-generations 4 --micro-batch-size 16".split()],
    "online_dpo": [*LANGUAGE, *"--num-prompts 8 --micro-batch-size 16 --xpo-alpha 1e-3".split()],
    "ppo_lm": [*LANGUAGE, *"--num-prompts 4 --micro-batch-size 16".split()],
    "dpo": [*LANGUAGE, *"--num-pairs 20 --batch-size 8".split()],
    **dict.fromkeys(("simpo", "orpo", "kto"), [*LANGUAGE, *"--num-pairs 20 --batch-size 8".split()]),
    "reward_model": [*LANGUAGE, *"--num-pairs 20 --batch-size 8".split()],
    "sft": [*LANGUAGE, "--batch-size", "8"],
    "bc": [*SMALL["bc"], *DATA],
    "iql": [*SMALL["iql"], *DATA, "--online-steps", "16"],
    "dt": [*SMALL["dt"], *DATA],
    "ppo": [*SMALL["ppo"], *MINE],
    "sac": [*SMALL["sac"], *MINE],
    "ppo_atari": [
        *SMALL["ppo"],
        *"--total-timesteps 96 --hidden-size 16 --eval-every 0 --eval-episodes 1 --env-kwargs "
        "max_num_frames_per_episode=200".split(),
    ],
}


@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "algos").glob("*.py")))
def test_an_ejected_script_gives_the_same_curve(script, tmp_path, monkeypatch, imports_as_they_were):
    if script == "ppo_atari":
        pytest.importorskip("ale_py", reason="not run: ale_py is not installed")
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        write_project(tmp_path / name)
        pendulum(tmp_path / name / "pendulum.hdf5")
    ejected = subprocess.run(
        [sys.executable, ROOT / "utils/eject.py", ROOT / f"algos/{script}.py"], capture_output=True
    )
    assert ejected.returncode == 0, ejected.stderr
    (tmp_path / "theirs/scripts").mkdir()
    (tmp_path / "theirs/scripts/mine.py").write_bytes(ejected.stdout)
    # -I: neither the current folder nor PYTHONPATH is searched, so nothing of ours can be found
    command = [sys.executable, "-I", "scripts/mine.py", *SHORT[script], "--output-dir", "out"]
    done = subprocess.run(command, cwd=tmp_path / "theirs", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [theirs] = (tmp_path / "theirs/out").iterdir()
    monkeypatch.chdir(tmp_path / "ours")
    ours = new_run(importlib.import_module(f"algos.{script}"), tmp_path / "ours/out", *SHORT[script])
    assert len(metrics(ours)) >= 3
    assert_same_result(theirs, ours)


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
