"""A run that was stopped, in whatever way, and resumed equals the run that was not, bit for bit on a CPU. Roots are
stopped in every way here; test_wiring.py resumes every script from the middle."""

import importlib  # noqa: I001
import os
import random
import shutil
import signal
import time
from functools import cache

import pytest
from helpers import (
    GENERATORS, LANGUAGE, SMALL, Forked, assert_same_result, checkpoint, command_line, copied_at, metrics, new_run,
    runs_in, start, user_error, wait_for,
)  # fmt: skip

from algos import grpo
from tests.specs import parent_of

MODULES = {x: importlib.import_module(f"algos.{x}") for x in [*LANGUAGE, *GENERATORS] if parent_of(x) is None}
# 11 steps, so that the last one is evaluated out of turn
FLAGS = {name: [*SMALL[name], *"--max-steps 11 --save-every 1".split()] for name in MODULES}
FLAGS["grpo"] += "--log-samples 2".split()
FLAGS["ddpo"] += "--num-generations 4096".split()  # else it is over before a signal comes
FLAGS["sft"] += "--batch-size 32 --lr-schedule constant --warmup-steps 3".split()
for name in MODULES:
    FLAGS[name] += "--lr-schedule constant --num-pairs 100".split() if "--num-pairs" in FLAGS[name] else []
every_root = pytest.mark.parametrize("algo", MODULES)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """algo -> a run that nothing disturbed. Never to be changed."""
    return cache(lambda algo: new_run(MODULES[algo], tmp_path_factory.mktemp(algo), *FLAGS[algo]))


@every_root
def test_killed_at_any_moment(algo, runs, tmp_path):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the moment: {seed}")
    process = Forked(MODULES[algo], *FLAGS[algo], "--output-dir", tmp_path / "runs", log=tmp_path / "log")
    folder = wait_for(process, tmp_path / "runs", lambda run: (run / "config.json").exists())
    time.sleep(random.Random(seed).uniform(0, 0.6))
    os.kill(process.pid, signal.SIGKILL)
    out, code = process.communicate()
    assert code in (0, -signal.SIGKILL), out
    if (folder / "checkpoint.pt").exists():
        command_line(MODULES[algo], "--resume", folder)
        assert_same_result(folder, runs(algo))
    else:  # nothing to continue from: the user is told to start afresh
        with pytest.raises(SystemExit, match="2"):
            command_line(MODULES[algo], "--resume", folder)


@every_root
def test_signals(algo, runs, tmp_path):
    """SIGTERM and Ctrl-C end the step, save, say how to go on, and exit with 128 + signal; here both in one run."""
    args, rows = [*FLAGS[algo], "--output-dir", tmp_path / "runs", "--save-every", 99], 0
    for number in (signal.SIGTERM, signal.SIGINT):
        process = Forked(MODULES[algo], *args, log=tmp_path / "log")
        new_row = lambda run: (run / "metrics.jsonl").exists() and len(metrics(run)) > rows  # noqa: B023, E731
        folder = wait_for(process, tmp_path / "runs", new_row)
        os.kill(process.pid, number)
        out, code = process.communicate()
        assert code == 128 + number, out
        assert f"--resume {folder}" in out and "Traceback" not in out
        assert checkpoint(folder)["step"] == metrics(folder)[-1]["step"], "the step that was finished was not saved"
        args, rows = ["--resume", folder], len(metrics(folder))
    command_line(MODULES[algo], "--resume", folder)
    assert_same_result(folder, runs(algo))


@pytest.mark.parametrize("algo", ["grpo", "sft", "dpo"])
def test_longer_budget(algo, runs, tmp_path, capsys):
    """With a constant learning rate --max-steps may grow: the run equals one that had the larger budget from the start,
    but for the evaluation that the old last step got. The run says what was changed."""
    longer = new_run(MODULES[algo], tmp_path / "longer", *FLAGS[algo], "--max-steps", 14)
    extended = shutil.copytree(runs(algo), tmp_path / "extended")
    capsys.readouterr()
    command_line(MODULES[algo], "--resume", extended, "--max-steps", 14)
    assert "changed on --resume: {'max_steps': 14}" in capsys.readouterr().out
    rows = metrics(extended)
    (old_last,) = [row for row in rows if row["step"] == 11]
    assert any(name.startswith("eval/") for name in old_last)
    rows[rows.index(old_last)] = {name: value for name, value in old_last.items() if not name.startswith("eval/")}
    (extended / "metrics.jsonl").write_text("".join(str(row).replace("'", '"') + "\n" for row in rows))
    if (path := extended / "samples.jsonl").exists():
        kept = [row for row in path.read_text().splitlines(True) if '"step": 11,' not in row or "score" not in row]
        path.write_text("".join(kept))
    assert_same_result(extended, longer)


def test_fewer_steps_than_there_were(runs, tmp_path, capsys):
    """Are refused, as is a run that came to its end (test_faults.py). One that was killed before that comes to it."""
    folder = shutil.copytree(runs("grpo"), tmp_path / "copy")
    (folder / "curve.png").unlink()
    with user_error(capsys, "is at its end, step 11: raise --max-steps"):
        command_line(grpo, "--resume", folder, "--max-steps", 9)
    shutil.rmtree(folder / "model")
    command_line(grpo, "--resume", folder)
    assert_same_result(folder, runs("grpo"))


REWARD = """
import random
from pathlib import Path

def deep(text):
    return 1 / len(text[:0])

def noisy(completions, trainer_state, **columns):
    if trainer_state.global_step == 4 and Path(__file__).with_name("broken").exists():
        deep(completions[0])
    return [len(text) + random.random() for text in completions]
"""


def test_failing_reward_function(tmp_path):
    """An exception of the user's own shows their frames and exits with 1; the mended run goes on from the last save and
    equals one that never failed, the random numbers that the function draws included."""
    (tmp_path / "rewards.py").write_text(REWARD)
    flags = [*SMALL["grpo"], "--save-every", "1", "--reward", tmp_path / "rewards.py:noisy"]
    reference = new_run(grpo, tmp_path / "reference", *flags)
    (tmp_path / "broken").touch()
    process = start("grpo", *flags, "--output-dir", "runs", cwd=tmp_path)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "ZeroDivisionError" in err and f'"{tmp_path / "rewards.py"}", line 6, in deep' in err, err
    (folder,) = runs_in(tmp_path / "runs")
    assert checkpoint(folder)["step"] == 3
    (tmp_path / "broken").unlink()
    command_line(grpo, "--resume", folder)
    assert_same_result(folder, reference)


def test_a_lora_run_resumes_from_its_adapters_alone(tmp_path):
    """The checkpoint holds what is trained, not the frozen model, and the resumed run equals the uninterrupted one."""
    pytest.importorskip("peft", reason="not run: peft is not installed")
    flags = [*FLAGS["grpo"], "--lora-rank", 4, "--beta", 0.1, "--precision", "float32", "--max-completion-length", 20]
    with copied_at(6, tmp_path / "stopped"):
        whole = new_run(grpo, tmp_path / "whole", *flags)
    command_line(grpo, "--resume", tmp_path / "stopped")
    assert_same_result(tmp_path / "stopped", whole)
    assert (whole / "checkpoint.pt").stat().st_size < 2**20 < (whole / "model/model.safetensors").stat().st_size
