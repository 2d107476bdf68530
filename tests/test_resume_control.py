"""A control run that was stopped inside its episodes and resumed equals the one that was not, bit for bit."""

import json
import os
import random
import shutil
import signal
import time
from unittest import mock

import pytest
from control import SCRIPTS, WALK, scripts
from helpers import (
    SMALL,
    Forked,
    assert_one_sentence,
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

from algos import ppo_atari
from utils import run as run_module
from utils.checkpoint import load_newest

# All checkpoints kept, to resume from any. Rollouts (of 16 steps) are shorter than episodes, and evaluations are, too.
FLAGS = {
    "ppo": [*SMALL["ppo"], "--keep", 99, "--eval-episodes", 1],
    "sac": [*SMALL["sac"], "--keep", 99, "--eval-episodes", 1],
    "ppo_atari": [*SMALL["ppo"], "--keep", 99, "--eval-episodes", 1, "--hidden-size", 8],
}
CASES = {
    "ppo-cartpole": ("ppo", []),
    "ppo-pendulum": ("ppo", ["--env-id", "Pendulum-v1", "--env-kwargs", "max_episode_steps=50"]),
    "ppo-cheetah": ("ppo", ["--env-id", "HalfCheetah-v5", "--env-kwargs", "max_episode_steps=50"]),
    "ppo-walk-async": ("ppo", [*WALK, "--vector", "async"]),
    "ppo-raw": ("ppo", [*WALK, "--no-normalize", "--no-anneal-lr", "--target-kl", 1e-4, "--clip-vloss"]),
    "sac-pendulum": ("sac", ["--env-kwargs", "max_episode_steps=50"]),
    "sac-cheetah": ("sac", ["--env-id", "HalfCheetah-v5", "--env-kwargs", "max_episode_steps=50"]),
    "atari": ("ppo_atari", ["--env-id", "ALE/Breakout-v5", "--env-kwargs", "max_num_frames_per_episode=320"]),
    "sac-walk-async": ("sac", [*WALK, "--vector", "async", "--buffer-size", 100]),
}
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """No picture is drawn of these runs: it would take most of their time."""
    monkeypatch.setattr(run_module, "plot", lambda *_: None)


def flags(case: str) -> tuple:
    """The script's module and its arguments."""
    if "cheetah" in case:
        pytest.importorskip("mujoco", reason="not run: mujoco is not installed")
    algo, more = CASES[case]
    return (SCRIPTS | {"ppo_atari": ppo_atari})[algo], [*FLAGS[algo], *more]


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    """case -> the folder of the run that nothing disturbed; made once, never to be changed."""
    made = {}

    def make(case: str):
        if case not in made:
            module, args = flags(case)
            made[case] = new_run(module, tmp_path_factory.mktemp(case), *args)
            (made[case] / "curve.png").touch()
        return made[case]

    return make


@every_case
@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_killed_at_any_moment(case, kills, uninterrupted, tmp_path):
    """SIGKILL at random moments loses no row, repeats none, and changes no weight."""
    module, args = flags(case)
    reference = uninterrupted(case)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed of the moments: {seed}")
    moments = random.Random(seed)
    folder, output_dir = None, tmp_path / "runs"
    for _ in range(kills):
        began = time.time_ns()
        now = ["--resume", folder] if folder else args
        process = Forked(module, *now, "--output-dir", output_dir, log=tmp_path / "log")
        started = lambda run: (c := run / "config.json").exists() and c.stat().st_mtime_ns > began  # noqa: B023, E731
        folder = wait_for(process, output_dir, started)
        time.sleep(moments.uniform(0, 0.3))
        os.kill(process.pid, signal.SIGKILL)
        out, code = process.communicate()
        assert code in (0, -signal.SIGKILL), out
        if not checkpoints(folder):  # nothing to continue from: the user is told to start afresh
            with pytest.raises(SystemExit, match="2"):
                command_line(module, "--resume", folder)
            shutil.rmtree(folder)
            folder = None
    if folder is None:
        folder = new_run(module, output_dir, *args)
    else:
        command_line(module, "--resume", folder)
    assert_same_result(folder, reference)


@every_case
def test_from_every_checkpoint(case, uninterrupted, tmp_path):
    """Each is a place to go on from, inside an episode."""
    reference = uninterrupted(case)
    steps = checkpoints(reference)
    assert steps == [32, 64, 96, 128, 160]
    for step in steps[:4]:
        folder = stopped_after(step, reference, tmp_path / str(step))
        assert any(len(env["actions"]) > 0 for env in load_newest(folder / "checkpoints")["envs"])
        command_line(flags(case)[0], "--resume", folder)
        assert_same_result(folder, reference)


@pytest.mark.parametrize("case", ["ppo-cartpole", "ppo-walk-async", "sac-walk-async"])
def test_signals(case, tmp_path):
    """SIGTERM, and Ctrl-C, which a terminal sends to environments in processes of their own as well, end the iteration,
    save, say so once, and exit with 128 + signal; here both in the life of a run that would not end by itself."""
    module, args = flags(case)
    args = [*args, "--eval-every", 0, "--save-every", 10**9, *(["--no-anneal-lr"] if "ppo" in case else [])]
    now, rows = [*args, "--total-timesteps", 10**8, "--output-dir", tmp_path / "runs"], 0
    for number, send in ((signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg)):
        process = Forked(module, *now, log=tmp_path / "log")
        new_row = lambda run: (run / "metrics.jsonl").exists() and len(metrics(run)) > rows  # noqa: B023, E731
        folder = wait_for(process, tmp_path / "runs", new_row)
        send(process.pid, number)
        out, code = process.communicate()
        assert code == 128 + number, out
        assert f"--resume {folder}" in out and "Traceback" not in out
        assert out.count(signal.Signals(number).name) <= 1, "said by every process"
        stopped = int(out[out.index("stopped after step ") :].split()[3][:-1])
        assert checkpoints(folder)[-1] == stopped >= metrics(folder)[-1]["step"]
        now, rows = ["--resume", folder], len(metrics(folder))
    total = stopped // 32 * 32 + 64
    command_line(module, "--resume", folder, "--total-timesteps", total)
    assert_same_result(folder, new_run(module, tmp_path / "reference", *args, "--total-timesteps", total))


def test_a_signal_in_the_middle_of_a_print():
    """Python cannot print there (RuntimeError): the message is lost, the signal is not."""
    run = object.__new__(run_module.Run)
    run.signal, run.print = None, mock.Mock(side_effect=RuntimeError("reentrant call"))
    run.on_signal(signal.SIGTERM, None)
    assert run.signal == signal.SIGTERM


@pytest.mark.parametrize("case", ["ppo-raw", "sac-pendulum"])
def test_longer_budget(case, uninterrupted, tmp_path):
    """Where the learning rate does not depend on it, --total-timesteps may grow: the run equals one that had the larger
    budget from the start, but for the evaluation that the old last step got."""
    module, args = flags(case)
    longer = new_run(module, tmp_path / "longer", *args, "--total-timesteps", 224)
    extended = shutil.copytree(uninterrupted(case), tmp_path / "extended")
    command_line(module, "--resume", extended, "--total-timesteps", 224)
    rows = metrics(extended)
    (old_last,) = [row for row in rows if row["step"] == 160]
    assert "eval/return" in old_last and "eval/return" not in metrics(longer)[rows.index(old_last)]
    rows[rows.index(old_last)] = {name: value for name, value in old_last.items() if not name.startswith("eval/")}
    (extended / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_same_result(extended, longer)


@pytest.mark.parametrize(
    "case, change, words",
    [
        ("ppo-cartpole", "--total-timesteps 320", ["schedule"]),
        ("ppo-cartpole", "--env-id Pendulum-v1", ["CartPole-v1"]),
        ("ppo-cartpole", "--env-kwargs max_episode_steps=9", ["max_episode_steps"]),
        ("ppo-cartpole", "--num-envs 4", ["2"]),
        ("ppo-cartpole", "--gamma 0.5", ["0.99"]),
        ("ppo-cartpole", "--seed 2", ["1"]),
        ("ppo-cartpole", "--no-normalize", ["True"]),
        ("ppo-cartpole", "--eval-episodes 3", ["1"]),
        ("ppo-raw", "--total-timesteps 96", ["128"]),
        ("sac-pendulum", "--tau 0.5", ["0.005"]),
        ("sac-pendulum", "--total-timesteps 96", ["128"]),
    ],
)
def test_changed_arguments_are_refused(case, change, words, uninterrupted, tmp_path, capsys):
    """What changes the result cannot change on --resume; the sentence names it, and the run is left as it was."""
    folder = stopped_after(128, uninterrupted(case), tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with user_error(capsys, change.split()[0].replace("--no-", "--"), *words):
        command_line(flags(case)[0], "--resume", folder, *change.split())
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


BROKEN = [("ppo", "sync"), ("ppo", "async"), ("sac", "sync"), ("sac", "async")]


def walk_that_breaks(tmp_path, algo: str, vector: str, how: str) -> list:
    """Arguments of a run whose environments fail in step 40 of each, inside a rollout, while a file exists."""
    kwargs = [f"broken={tmp_path / 'broken'}", "at=40", f"how={how}"]
    if (algo, vector) == ("ppo", "sync"):  # draws from the global generator, too, which the failed rollout has moved on
        kwargs.append("label=noisy")
    # with two environments, step 40 is the run's step 80
    return [*FLAGS[algo], *WALK, "--env-kwargs", *kwargs, "--vector", vector, "--eval-every", 0, "--save-every", 48]


@pytest.mark.parametrize("algo, vector", BROKEN)
def test_an_exception_of_the_environment(algo, vector, tmp_path):
    """It shows the user's own frames and exits with 1; what had been finished before it is saved, and the mended run
    equals one that never failed."""
    module, args = SCRIPTS[algo], walk_that_breaks(tmp_path, algo, vector, "raise")
    reference = new_run(module, tmp_path / "reference", *args)
    (tmp_path / "broken").touch()
    process = Forked(module, *args, "--output-dir", tmp_path / "runs", log=tmp_path / "log")
    out, code = process.communicate()
    assert code == 1 and "ZeroDivisionError" in out and "environments.py" in out and "in deep" in out, out
    (folder,) = runs_in(tmp_path / "runs")
    assert checkpoints(folder)[-1] == {"ppo": 64, "sac": 78}[algo], "not the last moment before it"
    (tmp_path / "broken").unlink()
    command_line(module, "--resume", folder)
    assert_same_result(folder, reference)


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_an_exception_in_evaluation(algo, tmp_path, monkeypatch):
    """The training up to it is saved. The resumed run goes on after it, and all else is as if nothing had failed."""
    module, args, whole = SCRIPTS[algo], [*FLAGS[algo], *WALK, "--save-every", 10**6], SCRIPTS[algo].evaluate
    reference = new_run(module, tmp_path / "reference", *args)
    with monkeypatch.context() as patch:
        patch.setattr(module, "evaluate", lambda make, act, *rest: whole(make, lambda *_: 1 // 0, *rest))
        out, code = Forked(module, *args, "--output-dir", tmp_path / "runs", log=tmp_path / "log").communicate()
    assert code == 1 and "ZeroDivisionError" in out, out
    (folder,) = runs_in(tmp_path / "runs")
    assert checkpoints(folder) == [64]
    command_line(module, "--resume", folder)
    rows = metrics(reference)
    rows = [{k: v for k, v in row.items() if row["step"] != 64 or not k.startswith("eval/")} for row in rows]
    (reference / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_same_result(folder, reference)


def test_an_exception_in_a_real_process(tmp_path):
    """As above, in the first iteration, and without a checkpoint so far."""
    args = walk_that_breaks(tmp_path, "ppo", "sync", "raise")
    reference = new_run(SCRIPTS["ppo"], tmp_path / "reference", *args, "--num-steps", 64, "--total-timesteps", 256)
    (tmp_path / "broken").touch()
    process = start("ppo", *args, "--num-steps", 64, "--total-timesteps", 256, "--output-dir", "runs", cwd=tmp_path,
                    PYTHONPATH=os.path.dirname(__file__))  # fmt: skip
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1 and "environments.py" in err and "in deep" in err, err
    (folder,) = runs_in(tmp_path / "runs")
    assert checkpoints(folder) == [0]
    (tmp_path / "broken").unlink()
    command_line(SCRIPTS["ppo"], "--resume", folder)
    assert_same_result(folder, reference)


@pytest.mark.parametrize("algo, vector", BROKEN)
def test_numbers_that_are_not_finite(algo, vector, tmp_path):
    """One sentence, exit code 2, a checkpoint from before the step; with the environment mended, the run goes on."""
    module, args = SCRIPTS[algo], walk_that_breaks(tmp_path, algo, vector, "reward")
    reference = new_run(module, tmp_path / "reference", *args)
    (tmp_path / "broken").touch()
    process = Forked(module, *args, "--output-dir", tmp_path / "runs", log=tmp_path / "log")
    out, code = process.communicate()
    assert code == 2, out
    assert_one_sentence(out[out.index("error: ") :], "environment 0", "reward nan", "step 80", "finite")
    (folder,) = runs_in(tmp_path / "runs")
    assert checkpoints(folder)[-1] == {"ppo": 64, "sac": 78}[algo]
    assert "NaN" not in (folder / "metrics.jsonl").read_text()
    (tmp_path / "broken").unlink()
    command_line(module, "--resume", folder)
    assert_same_result(folder, reference)


@scripts
def test_an_environment_that_cannot_be_restored(algo, tmp_path, capsys):
    """It is said, and training goes on in new episodes."""
    args = ["--env-id", "environments:Bandit-v0", "--env-kwargs", "draws=start", "action=unit"]
    reference = new_run(SCRIPTS[algo], tmp_path / "runs", *FLAGS[algo], *args)
    (reference / "curve.png").touch()
    folder = stopped_after(96, reference, tmp_path)
    command_line(SCRIPTS[algo], "--resume", folder)
    assert "2 of 2 environments could not be brought back" in capsys.readouterr().out
    assert metrics(folder)[-1]["step"] == 160


@scripts
def test_rewards_from_a_global_generator(algo, tmp_path):
    """A common habit, and no obstacle: the checkpoint has the generators, and the return so far."""
    args = ["--env-id", "environments:Bandit-v0", "--env-kwargs", "draws=reward", "action=unit"]
    reference = new_run(SCRIPTS[algo], tmp_path / "runs", *FLAGS[algo], *args)
    (reference / "curve.png").touch()
    folder = stopped_after(96, reference, tmp_path)
    command_line(SCRIPTS[algo], "--resume", folder)
    assert_same_result(folder, reference)
