"""A run that was stopped, in whatever way, and resumed equals the run that was not, bit for bit on a CPU. Roots are
stopped in every way; a child resumes from the middle, where all of its own state is far from where it began."""

import errno
import fcntl
import importlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from helpers import (
    ONLINE,
    SMALL,
    Forked,
    assert_same_result,
    checkpoints,
    command_line,
    metrics,
    new_run,
    runs_in,
    start,
    stopped_after,
    user_error,
    wait_for,
)

from algos import grpo
from tests.specs import parent_of
from utils.checkpoint import load_newest
from utils.errors import UserError
from utils.machine import environment
from utils.run import saved_args

MODULES = {name: importlib.import_module(f"algos.{name}") for name in [*ONLINE, "sft"]}
# 11 steps, so that the last one is evaluated out of turn; all checkpoints kept, to resume from any of them
FLAGS = {name: [*SMALL[name], *"--max-steps 11 --keep 99".split()] for name in MODULES}
FLAGS["sft"] += "--batch-size 32 --lr-schedule constant --warmup-steps 3".split()
every_module = pytest.mark.parametrize("algo", MODULES)
every_root = pytest.mark.parametrize("algo", [name for name in MODULES if parent_of(name) is None])


class Started:
    """`start` with the manners of Forked."""

    def __init__(self, algo: str, *args, cwd: Path):
        self.process = start(algo, *args, cwd=cwd)
        self.pid, self.poll = self.process.pid, self.process.poll

    def communicate(self) -> tuple[str, int]:
        return "".join(self.process.communicate(timeout=100)), self.process.returncode


def begin(algo: str, folder: Path, *args) -> Started | Forked:
    """The command line in a process: from nothing for grpo.py, forked for the others, which saves most of the time."""
    if algo == "grpo":
        return Started(algo, *args, cwd=folder)
    return Forked(MODULES[algo], *args, log=folder / "log")


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """algo -> the folder of the run that nothing disturbed; made once, never to be changed."""
    made = {}

    def make(algo: str) -> Path:
        if algo not in made:
            made[algo] = new_run(MODULES[algo], tmp_path_factory.mktemp(algo), *FLAGS[algo])
        return made[algo]

    return make


@every_module
def test_from_a_checkpoint_in_the_middle(algo, uninterrupted, tmp_path):
    """Every state that trains on is far from where it began: optimizer, generators, critic, place in the data."""
    folder = stopped_after(6, uninterrupted(algo), tmp_path)
    command_line(MODULES[algo], "--resume", folder)
    assert_same_result(folder, uninterrupted(algo))


@every_root
@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_killed_at_any_moment(algo, kills, uninterrupted, tmp_path):
    """SIGKILL at random moments loses no row, repeats none, and changes no weight."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the moments: {seed}")
    moments = random.Random(seed)
    folder, output_dir = None, tmp_path / "runs"
    for _ in range(kills):
        began = time.time_ns()
        process = begin(algo, tmp_path, *(["--resume", folder] if folder else FLAGS[algo]), "--output-dir", output_dir)
        started = lambda run: (c := run / "config.json").exists() and c.stat().st_mtime_ns > began  # noqa: B023, E731
        folder = wait_for(process, output_dir, started)
        time.sleep(moments.uniform(0, 0.6))
        os.kill(process.pid, signal.SIGKILL)
        out, code = process.communicate()
        assert code in (0, -signal.SIGKILL), out
        if not checkpoints(folder):  # nothing to continue from: the user is told to start afresh
            with pytest.raises(SystemExit, match="2"):
                command_line(MODULES[algo], "--resume", folder)
            shutil.rmtree(folder)
            folder = None
    if folder is None:
        folder = new_run(MODULES[algo], output_dir, *FLAGS[algo])
    else:
        command_line(MODULES[algo], "--resume", folder)
    assert_same_result(folder, uninterrupted(algo))


@every_root
def test_signals(algo, uninterrupted, tmp_path):
    """SIGTERM and Ctrl-C end the step, save, say how to go on, and exit with 128 + signal; here both in one run."""
    args, rows = [*FLAGS[algo], "--output-dir", tmp_path / "runs", "--save-every", 99], 0
    for number in (signal.SIGTERM, signal.SIGINT):
        process = begin(algo, tmp_path, *args)
        new_row = lambda run: (run / "metrics.jsonl").exists() and len(metrics(run)) > rows  # noqa: B023, E731
        folder = wait_for(process, tmp_path / "runs", new_row)
        os.kill(process.pid, number)
        out, code = process.communicate()
        assert code == 128 + number, out
        assert f"--resume {folder}" in out and "Traceback" not in out
        assert checkpoints(folder)[-1] == metrics(folder)[-1]["step"], "the step that was finished was not saved"
        args, rows = ["--resume", folder], len(metrics(folder))
    command_line(MODULES[algo], "--resume", folder)
    assert_same_result(folder, uninterrupted(algo))


@every_root
def test_longer_budget(algo, uninterrupted, tmp_path):
    """With a constant learning rate --max-steps may grow: the run equals one that had the larger budget from the start,
    but for the evaluation that the old last step got."""
    longer = new_run(MODULES[algo], tmp_path / "longer", *FLAGS[algo], "--max-steps", 14)
    extended = shutil.copytree(uninterrupted(algo), tmp_path / "extended")
    command_line(MODULES[algo], "--resume", extended, "--max-steps", 14)
    rows = metrics(extended)
    (old_last,) = [row for row in rows if row["step"] == 11]
    assert any(name.startswith("eval/") for name in old_last)
    rows[rows.index(old_last)] = {name: value for name, value in old_last.items() if not name.startswith("eval/")}
    (extended / "metrics.jsonl").write_text("".join(str(row).replace("'", '"') + "\n" for row in rows))
    assert_same_result(extended, longer)


@pytest.mark.parametrize(
    "algo, change",
    [
        ("grpo", "--learning-rate 0.5"),
        ("grpo", "--task countdown"),
        ("grpo", "--seed 2"),
        ("grpo", "--beta 0.1"),
        ("sft", "--seed 2"),
        ("sft", "--task sort countdown"),
    ],
)
def test_changed_arguments_are_refused(algo, change, uninterrupted, tmp_path, capsys):
    """What changes the result cannot change on --resume; the sentence names it, and the run is left as it was."""
    folder = stopped_after(4, uninterrupted(algo), tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with user_error(capsys, change.split()[0], "--resume"):
        command_line(MODULES[algo], "--resume", folder, *change.split())
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@every_root
def test_budget_of_a_decaying_schedule_is_refused(algo, tmp_path, capsys):
    """A learning rate that decays towards the budget ties the run to it."""
    flags = SMALL[algo] + "--max-steps 2 --lr-schedule linear --eval-every 0".split()
    folder = new_run(MODULES[algo], tmp_path / "runs", *flags)
    with user_error(capsys, "--max-steps", "schedule"):
        command_line(MODULES[algo], "--resume", folder, "--max-steps", 4)


def test_logging_flags_may_change(uninterrupted, tmp_path):
    """--save-every and --keep change what lies on the disk, not what is computed."""
    folder = stopped_after(4, uninterrupted("grpo"), tmp_path)
    command_line(grpo, "--resume", folder, "--save-every", 3, "--keep", 2)
    assert checkpoints(folder) == [9, 11]
    assert_same_result(folder, uninterrupted("grpo"))


@pytest.mark.parametrize("algo, share", [("grpo", 0), ("grpo", 0.99), ("sft", 0.5)])
def test_damaged_checkpoint(algo, share, uninterrupted, tmp_path, capsys):
    """A newest checkpoint of which only a part is left is named, and the one before it is continued from."""
    folder = stopped_after(6, uninterrupted(algo), tmp_path)
    newest = folder / "checkpoints" / "step-00000006.pt"
    newest.write_bytes(newest.read_bytes()[: int(share * newest.stat().st_size)])
    command_line(MODULES[algo], "--resume", folder)
    assert f"{newest} cannot be read" in capsys.readouterr().out
    assert newest.with_suffix(".damaged").exists()
    assert_same_result(folder, uninterrupted(algo))


def test_no_readable_checkpoint(uninterrupted, tmp_path, capsys):
    """Where nothing can be read, the user is told so, and the only checkpoint keeps its name."""
    folder = stopped_after(0, uninterrupted("grpo"), tmp_path)
    (folder / "checkpoints" / "step-00000000.pt").write_bytes(b"")
    with user_error(capsys, "no readable checkpoint"):
        command_line(grpo, "--resume", folder)
    assert checkpoints(folder) == [0]


def test_a_small_damaged_checkpoint(tmp_path):
    """torch says EINVAL of an archive of a few kilobytes that is cut: damage, although it is an OSError."""
    for step in (1, 2):
        torch.save({"step": step, "weights": torch.zeros(1000)}, tmp_path / f"step-{step}.pt")
    whole = (tmp_path / "step-2.pt").read_bytes()
    (tmp_path / "step-2.pt").write_bytes(whole[:-100])
    with pytest.raises(OSError):
        torch.load(tmp_path / "step-2.pt", weights_only=True)
    assert load_newest(tmp_path)["step"] == 1


@pytest.mark.parametrize("error", [OSError(errno.EIO, "input/output error"), MemoryError()], ids=repr)
def test_a_disk_that_fails_for_a_moment_costs_no_checkpoint(error, uninterrupted, tmp_path, monkeypatch):
    """The file may be whole: no older one is taken in its place, and none is set aside."""
    folder = shutil.copytree(uninterrupted("grpo") / "checkpoints", tmp_path / "checkpoints")
    names = sorted(folder.iterdir())

    def load(path, **_):
        if path == names[-1]:
            raise error
        return {"step": 0}

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(torch, "load", load)
        load_newest(folder)
    assert sorted(folder.iterdir()) == names and load_newest(folder)["step"] == 11


def test_finished_run(uninterrupted, tmp_path):
    """Resuming a run that is over changes nothing in it."""
    folder = shutil.copytree(uninterrupted("grpo"), tmp_path / "copy")
    command_line(grpo, "--resume", folder)
    assert_same_result(folder, uninterrupted("grpo"))


def test_second_process_is_refused(uninterrupted, tmp_path, capsys):
    """Two processes never write into one run; the refused one changes nothing."""
    folder = stopped_after(4, uninterrupted("grpo"), tmp_path)
    before = (folder / "metrics.jsonl").read_bytes()
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with user_error(capsys, "another process", str(folder)):
            command_line(grpo, "--resume", folder)
        assert (folder / "metrics.jsonl").read_bytes() == before
    command_line(grpo, "--resume", folder)
    assert_same_result(folder, uninterrupted("grpo"))


def test_run_of_another_script_is_refused(uninterrupted, capsys):
    """A folder that another script made is no run to continue, nor is a folder that none made."""
    with user_error(capsys, "another script"):
        command_line(grpo, "--resume", uninterrupted("sft"))
    with user_error(capsys, "config.json"):
        command_line(grpo, "--resume", uninterrupted("sft") / "checkpoints")


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
    """An exception of the user's own shows their frames and exits with 1; the last finished step has been saved, and
    the mended run equals one that never failed, the random numbers that the function draws included."""
    (tmp_path / "rewards.py").write_text(REWARD)
    flags = [*SMALL["grpo"], "--save-every", "99", "--reward", tmp_path / "rewards.py:noisy"]
    reference = new_run(grpo, tmp_path / "reference", *flags)
    (tmp_path / "broken").touch()
    process = start("grpo", *flags, "--output-dir", "runs", cwd=tmp_path)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "ZeroDivisionError" in err and f'"{tmp_path / "rewards.py"}", line 6, in deep' in err, err
    (folder,) = runs_in(tmp_path / "runs")
    assert checkpoints(folder) == [0, 3]
    (tmp_path / "broken").unlink()
    command_line(grpo, "--resume", folder)
    assert_same_result(folder, reference)


def test_a_lora_run_resumes_from_its_adapters_alone(tmp_path):
    """The checkpoint holds what is trained, not the frozen model, and the resumed run equals the uninterrupted one."""
    settings = dict(task="sort", lora_rank=4, beta=0.1, num_prompts=4, num_generations=4, micro_batch_size=8,
                    max_completion_length=12, eval_prompts=4, eval_every=0, precision="float32")  # fmt: skip
    grpo.train(grpo.Args(max_steps=4, output_dir=str(tmp_path / "whole"), **settings))
    grpo.train(grpo.Args(max_steps=2, output_dir=str(tmp_path / "parts"), **settings))
    [whole], [run] = (tmp_path / "whole").iterdir(), (tmp_path / "parts").iterdir()
    grpo.train(grpo.Args(**saved_args(run) | {"resume": str(run), "max_steps": 4}))
    rows, resumed = metrics(whole), metrics(run)
    assert rows[:2] + rows[3:] == resumed[:2] + resumed[3:]  # but for the evaluation where the first part ended
    assert (
        (run / "checkpoints/step-00000004.pt").stat().st_size < 2**20 < (run / "model/model.safetensors").stat().st_size
    )


def test_a_budget_below_the_saved_step_is_refused(uninterrupted, tmp_path):
    """Nothing would be trained, and the finished model would be replaced by itself under another budget."""
    run = shutil.copytree(uninterrupted("grpo"), tmp_path / "run")
    config = (run / "config.json").read_bytes()
    with pytest.raises(UserError, match="max-steps"):
        grpo.train(grpo.Args(**saved_args(run) | {"resume": str(run), "max_steps": 5}))
    assert (run / "config.json").read_bytes() == config


def test_a_machine_without_git_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment()["commit"] is None
