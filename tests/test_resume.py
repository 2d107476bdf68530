"""A run that was stopped, in whatever way, and resumed equals the run that was not, bit for bit on a CPU. Roots are
stopped in every way; a child resumes from the middle, where all of its own state is far from where it began."""

import errno
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
    LANGUAGE,
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

import utils.run
from algos import grpo
from tests.specs import parent_of
from utils.checkpoint import load_newest
from utils.cli import saved_args
from utils.errors import UserError
from utils.machine import environment

MODULES = {name: importlib.import_module(f"algos.{name}") for name in LANGUAGE}
# 11 steps, so that the last one is evaluated out of turn; all checkpoints kept, to resume from any of them; pairs that
# only a larger budget reaches
FLAGS = {name: [*SMALL[name], *"--max-steps 11 --keep 99".split()] for name in MODULES}
FLAGS["sft"] += "--batch-size 32 --lr-schedule constant --warmup-steps 3".split()
PAIRS = [name for name in MODULES if "--num-pairs" in FLAGS[name]]
for name in PAIRS:
    FLAGS[name] += "--lr-schedule constant --num-pairs 100".split()
FLAGS["reward_model"] += "--ensemble 2 --label-noise 0.25".split()
every_module = pytest.mark.parametrize("algo", MODULES)
every_root = pytest.mark.parametrize("algo", [name for name in MODULES if parent_of(name) is None])


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
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the moments: {seed}")
    moments = random.Random(seed)
    folder, output_dir = None, tmp_path / "runs"
    for _ in range(kills):
        began = time.time_ns()
        args = ["--resume", folder] if folder else FLAGS[algo]
        process = Forked(MODULES[algo], *args, "--output-dir", output_dir, log=tmp_path / "log")
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
        process = Forked(MODULES[algo], *args, log=tmp_path / "log")
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


@pytest.mark.parametrize("algo", ["grpo", "sft", "dpo", "kto", "reward_model"])
def test_longer_budget(algo, uninterrupted, tmp_path):
    """With a constant learning rate --max-steps may grow: the run equals one that had the larger budget from the start,
    but for the evaluation that the old last step got. New pairs get the reference of the model that the run began with.
    """
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
        ("dpo", "--beta 0.2"),
        ("reward_model", "--center-coef 0.2"),
    ],
)
def test_changed_arguments_are_refused(algo, change, uninterrupted, tmp_path, capsys):
    """What changes the result cannot change on --resume; the sentence names it, and the run is left as it was."""
    folder = stopped_after(4, uninterrupted(algo), tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with user_error(capsys, change.split()[0], "--resume"):
        command_line(MODULES[algo], "--resume", folder, *change.split())
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("algo", ["grpo", "dpo", "sft"])
def test_budget_of_a_decaying_schedule_is_refused(algo, tmp_path, capsys):
    flags = SMALL[algo] + "--max-steps 2 --lr-schedule linear --eval-every 0".split()
    folder = new_run(MODULES[algo], tmp_path / "runs", *flags)
    with user_error(capsys, "--max-steps", "schedule"):
        command_line(MODULES[algo], "--resume", folder, "--max-steps", 4)


@pytest.mark.parametrize("algo", ["dpo", "kto"])
def test_reference_log_probabilities_come_from_the_checkpoint(algo, uninterrupted, tmp_path, monkeypatch):
    """They are still there after --model's folder has changed."""
    folder, load = stopped_after(2, uninterrupted(algo), tmp_path), MODULES[algo].load_policy

    def changed(*args):
        model, tokenizer = load(*args)
        for p in model.parameters():
            p.data.mul_(0.5)
        return model, tokenizer

    monkeypatch.setattr(MODULES[algo], "load_policy", changed)
    command_line(MODULES[algo], "--resume", folder)
    assert_same_result(folder, uninterrupted(algo))


@pytest.mark.parametrize("algo", ["dpo", "kto", "reward_model"])
def test_a_dataset_that_changed_is_refused(algo, uninterrupted, tmp_path, monkeypatch, capsys):
    """Rows are known by their position."""
    folder = stopped_after(2, uninterrupted(algo), tmp_path)
    loader = "load_unpaired" if algo == "kto" else "load_preferences"
    load = getattr(MODULES[algo], loader)
    monkeypatch.setattr(MODULES[algo], loader, lambda spec, num_pairs, seed: load(spec, num_pairs + 1, seed))
    with user_error(capsys, "other rows"):
        command_line(MODULES[algo], "--resume", folder)


@pytest.mark.parametrize("algo", ["dpo", "kto"])
def test_a_signal_ends_the_reference_pass(algo, uninterrupted, tmp_path, monkeypatch):
    """It can take long, so the run ends at its next batch, and saves what it has."""
    name, calls = "score_examples" if algo == "kto" else "score_pairs", []
    score = getattr(MODULES[algo], name)

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 1:  # a second one would stop at once, whatever the script does
            os.kill(os.getpid(), signal.SIGTERM)
        return score(*args)

    monkeypatch.setattr(MODULES[algo], name, interrupted)
    with pytest.raises(SystemExit, match=f"^{128 + signal.SIGTERM}$"):  # kept, it would hold the folder's lock
        command_line(MODULES[algo], *FLAGS[algo], "--output-dir", tmp_path)
    assert len(calls) == 1
    (folder,) = runs_in(tmp_path)
    command_line(MODULES[algo], "--resume", folder)
    assert calls[0][1] not in [rows for _, rows, _ in calls[1:]], "scored twice"
    assert_same_result(folder, uninterrupted(algo))


def test_logging_flags_may_change(uninterrupted, tmp_path):
    folder = stopped_after(4, uninterrupted("grpo"), tmp_path)
    command_line(grpo, "--resume", folder, "--save-every", 3, "--keep", 2)
    assert checkpoints(folder) == [9, 11]
    assert_same_result(folder, uninterrupted("grpo"))


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
    folder = shutil.copytree(uninterrupted("grpo"), tmp_path / "copy")
    command_line(grpo, "--resume", folder)
    assert_same_result(folder, uninterrupted("grpo"))


def test_run_of_another_script_is_refused(uninterrupted, capsys):
    with user_error(capsys, "a run of sft.py, not of grpo.py"):
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


def test_a_reference_that_was_reset_is_part_of_the_run(tmp_path):
    """ProRL: after a reset the reference is the policy (no divergence in the next step, where it was none before the
    first), and AdamW has forgotten its moments. A run that is resumed between two resets equals the whole one."""
    settings = dict(task="sort", beta=0.1, reset_reference_every=3, num_prompts=4, num_generations=4, save_every=1,
                    keep=9, max_completion_length=12, eval_prompts=4, eval_every=0, precision="float32")  # fmt: skip
    grpo.train(grpo.Args(max_steps=6, output_dir=str(tmp_path / "whole"), **settings))
    grpo.train(grpo.Args(max_steps=5, output_dir=str(tmp_path / "parts"), **settings))
    [whole], [run] = (tmp_path / "whole").iterdir(), (tmp_path / "parts").iterdir()
    rows = metrics(whole)
    assert [abs(row["kl"]) < 1e-9 for row in rows[1:]] == [True, False, False, True, False, False]
    for step, count in (2, 2), (3, None), (4, 1), (5, 2):
        kept = torch.load(whole / f"checkpoints/step-{step:08d}.pt", weights_only=True)["optimizer"]["state"]
        assert {int(moments["step"]) for moments in kept.values()} == ({count} if count else set())
    grpo.train(grpo.Args(**saved_args(run) | {"resume": str(run), "max_steps": 6}))
    resumed = metrics(run)
    assert rows[:5] == resumed[:5] and rows[6] == resumed[6]


@pytest.mark.parametrize(
    "wrong, right", [(dict(beta=0.0), "--beta above 0"), (dict(lora_rank=2, beta=0.1), "leave out")]
)
def test_a_reference_that_cannot_be_reset_is_refused(wrong, right, tmp_path):
    with pytest.raises(UserError, match=f"--reset-reference-every needs a reference model of its own: .*{right}"):
        grpo.train(grpo.Args(task="sort", reset_reference_every=2, output_dir=str(tmp_path), **wrong))


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


class Killed(BaseException):
    """As a kill: nothing handles it."""


@pytest.mark.parametrize("algo, function", [("dpo", "score_pairs"), ("kto", "score_examples")])
def test_a_kill_while_the_reference_is_computed(algo, function, uninterrupted, tmp_path, monkeypatch):
    """Killed in the middle, the pass goes on where it was saved, and nothing is scored twice but the chunk that was
    lost; killed again, it goes on again. The run then equals the one that nothing disturbed."""
    monkeypatch.setattr(utils.run, "EARLY", 0)
    module, scored, calls = MODULES[algo], [], 5
    score = getattr(module, function)

    def killed(model, rows, args):
        if len(scored) == calls:
            raise Killed
        scored.append(rows)
        return score(model, rows, args)

    monkeypatch.setattr(module, function, killed)
    with pytest.raises(Killed):
        command_line(module, *FLAGS[algo], "--output-dir", tmp_path)
    (folder,) = runs_in(tmp_path)
    first, calls = list(scored), 10
    with pytest.raises(Killed):
        command_line(module, "--resume", folder)
    assert load_newest(folder / "checkpoints")["early"]
    prompts = [[(row.prompt, row[1]) for row in rows] for rows in scored]
    assert not any(chunk in prompts[: len(first)] for chunk in prompts[len(first) :]), "scored twice"
    calls = 10**9
    command_line(module, "--resume", folder)
    assert_same_result(folder, uninterrupted(algo))
