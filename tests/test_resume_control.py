"""A control or offline run that was stopped, in whatever way, and resumed equals the one that was not, bit for bit:
also inside its episodes, and in the online phase of an offline run."""

import json
import os
import random
import shutil
import signal
import time
from unittest import mock

import pytest
from control import BANDIT, OFFLINE, OTHERS, SCRIPTS, WALK, scripts, walk, without
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
from small_data import pendulum

from algos import ppo_atari, ppo_lstm, ppo_mask, rnd
from utils import run as run_module
from utils.checkpoint import load_newest

PPO = {"ppo_atari": ppo_atari, "ppo_mask": ppo_mask, "ppo_lstm": ppo_lstm, "rnd": rnd}
MODULES = SCRIPTS | OTHERS | OFFLINE | PPO
SHORT = "--env-kwargs max_episode_steps=50"
CASES = {  # name: SCRIPT-... -> arguments. Every run has 160 steps; episodes are longer than the steps between saves
    "ppo-cartpole": "",
    "ppo-pendulum": f"--env-id Pendulum-v1 {SHORT}",
    "ppo-cheetah": f"--env-id HalfCheetah-v5 {SHORT}",
    "ppo-walk-async": f"{' '.join(WALK)} --vector async",
    "ppo-raw": f"{' '.join(WALK)} --no-normalize --no-anneal-lr --target-kl 1e-4 --clip-vloss",
    "ppo-pixels": "--env-id environments:Pixels-v0 --hidden-size 8",
    "sac-pendulum": SHORT,
    "sac-ensemble": f"{SHORT} --num-critics 3 --subset-size 2 --actor-q mean --policy-frequency 7 --layer-norm "
    "--dropout 0.2 --log-every 2",
    "sac-sde": f"{' '.join(WALK)} --sde 5",
    "sac-her": "--env-id environments:Reach-v0 --her-k 3",
    "sac-cheetah": f"--env-id HalfCheetah-v5 {SHORT}",
    "sac-walk-async": f"{' '.join(WALK)} --vector async --buffer-size 100",
    "crossq-pendulum": f"{SHORT} --renorm-warmup 20 --policy-frequency 50 --log-every 48 --eval-every 0",
    "ddpg-pendulum": f"{SHORT} --log-every 48 --eval-every 0",
    "td3-pendulum": f"{SHORT} --policy-frequency 7 --log-every 2",
    "td3-walk-async": f"{' '.join(WALK)} --vector async --buffer-size 100 --num-critics 3",
    "reinforce-cartpole": "--total-timesteps 600",
    "reinforce-hop": f"{' '.join(walk('reinforce'))} --env-kwargs size=5",
    "dqn-cartpole": "--double --log-every 2",
    "dqn-hop-async": f"{' '.join(walk('dqn'))} --env-kwargs size=30 --vector async --buffer-size 100",
    "c51-cartpole": "--log-every 2",
    "rainbow-cartpole": "--log-every 2",
    "rainbow-hop-async": f"{' '.join(walk('rainbow'))} --env-kwargs size=30 --vector async --buffer-size 99 --n-step 5",
    "her-bitflip": "--env-kwargs n=40 --log-every 2",
    "ppo_atari-breakout": "--env-id ALE/Breakout-v5 --env-kwargs max_num_frames_per_episode=320 --hidden-size 8",
    "ppo_mask-toll": "--env-id environments:Toll-v0 --env-kwargs action=multidiscrete --vector async",
    "ppo_lstm-hidden": "",
    "rnd-walk": f"{' '.join(WALK)} --target-kl 1e-4",
    "ppo_lstm-pixels": "--env-id environments:Pixels-v0 --vector async --no-anneal-lr",
    "bc-best": "--top-fraction 0.5",
    "bc-dropout": "--dropout 0.2",
    "iql": "",
    "iql-online": "--max-steps 80 --online-steps 80",
    "iql-online-constant": "--max-steps 64 --online-steps 96 --no-anneal-actor --dropout 0.1 --normalize",
    "dt": "",
    "rlpd": "--num-critics 3 --subset-size 2 --policy-frequency 240 --log-every 112 --eval-every 0",
}
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="session")
def flags(tmp_path_factory):
    """case -> the script's module and its arguments; all checkpoints are kept, to resume from any."""
    dataset = pendulum(tmp_path_factory.mktemp("data") / "pendulum.hdf5")

    def make(case: str) -> tuple:
        algo = case.partition("-")[0]
        if package := {"cheetah": "mujoco", "breakout": "ale_py"}.get(case.rpartition("-")[2]):
            pytest.importorskip(package, reason=f"not run: {package} is not installed")
        more = ["--dataset", dataset] if algo in OFFLINE else ["--eval-episodes", 1]
        return MODULES[algo], [*SMALL[algo.removesuffix("_atari")], "--keep", 99, *more, *CASES[case].split()]

    return make


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory, flags):
    """case -> the folder of the run that nothing disturbed; made once, never to be changed."""
    made = {}

    def make(case: str):
        if case not in made:
            module, args = flags(case)
            made[case] = new_run(module, tmp_path_factory.mktemp(case), *args)
            (made[case] / "curve.png").touch()
        return made[case]

    return make


def forget_evaluations(folder, step: int | None = None) -> None:
    """Drops them from the rows of metrics, of one step or of all, and the best one, which depends on them."""
    rows = [row if step not in (None, row["step"]) else without([row])[0] for row in metrics(folder)]
    rows = without(rows, "eval/best")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@every_case
@pytest.mark.parametrize("kills", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_killed_at_any_moment(case, kills, flags, uninterrupted, tmp_path):
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
def test_from_every_checkpoint(case, flags, uninterrupted, tmp_path):
    reference = uninterrupted(case)
    steps, whole = checkpoints(reference), case.startswith("reinforce")
    assert len(steps) > 3 if whole else steps == [32, 64, 96, 128, 160]
    offline = {"iql-online": 80, "iql-online-constant": 64}.get(case, 160 if case[:2] in ("bc", "iq", "dt") else 0)
    for step in steps[:-1]:
        folder = stopped_after(step, reference, tmp_path / str(step))
        envs = load_newest(folder / "checkpoints").get("envs")  # inside an episode, but for those that play whole ones
        assert any(len(env["actions"]) > 0 for env in envs) != whole if step > offline else envs is None
        command_line(flags(case)[0], "--resume", folder)
        assert_same_result(folder, reference)


@pytest.mark.parametrize("case", ["ppo-cartpole", "ppo-walk-async", "sac-walk-async"])
def test_signals(case, flags, tmp_path):
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


BUDGETS = {
    "ppo-raw": ["--total-timesteps", 224],
    "sac-pendulum": ["--total-timesteps", 224],
    "td3-pendulum": ["--total-timesteps", 224],
    "bc-best": ["--max-steps", 224],
    "dt": ["--max-steps", 224],
    "iql": ["--online-steps", 64],
}


@pytest.mark.parametrize("case", BUDGETS)
def test_a_longer_budget(case, flags, uninterrupted, tmp_path):
    """Where the learning rate does not depend on it, it may grow, and an offline run may go on online: the run equals
    one that had the larger budget from the start, but for the evaluation that the old last step got."""
    module, args = flags(case)
    longer = new_run(module, tmp_path / "longer", *args, *BUDGETS[case])
    extended = shutil.copytree(uninterrupted(case), tmp_path / "extended")
    command_line(module, "--resume", extended, *BUDGETS[case])
    old_last, same = (next(row for row in metrics(run) if row["step"] == 160) for run in (extended, longer))
    assert {name[:5] for name in old_last.keys() - same.keys()} == {"eval/"}
    for run in (extended, longer):
        forget_evaluations(run, 160)
    assert metrics(extended)[-1]["step"] == 224
    assert_same_result(extended, longer)


@pytest.mark.parametrize(
    "case, change, words",
    [
        ("ppo-cartpole", "--total-timesteps 320", "schedule"),
        ("ppo-cartpole", "--env-id Pendulum-v1", "CartPole-v1"),
        ("ppo-cartpole", "--env-kwargs max_episode_steps=9", "max_episode_steps"),
        ("ppo-cartpole", "--num-envs 4", "2"),
        ("ppo-cartpole", "--gamma 0.5", "0.99"),
        ("ppo-cartpole", "--seed 2", "1"),
        ("ppo-cartpole", "--no-normalize", "True"),
        ("ppo-cartpole", "--eval-episodes 3", "1"),
        ("ppo-raw", "--total-timesteps 96", "128"),
        ("sac-pendulum", "--tau 0.5", "0.005"),
        ("sac-pendulum", "--total-timesteps 96", "128"),
        ("td3-pendulum", "--policy-frequency 2", "7"),
        ("dqn-cartpole", "--total-timesteps 320", "schedule"),
        ("dqn-cartpole", "--no-double", "True"),
        ("iql", "--max-steps 224", "cannot change on --resume"),
        ("iql", "--expectile 0.9", "cannot change on --resume"),
        ("iql", "--rewards raw", "cannot change on --resume"),
        ("bc-best", "--top-fraction 0.4", "cannot change on --resume"),
        ("dt", "--context-length 3", "cannot change on --resume"),
        ("dt", "--target-returns 5", "cannot change on --resume"),
    ],
)
def test_changed_arguments_are_refused(case, change, words, flags, uninterrupted, tmp_path, capsys):
    """The sentence names what cannot change, and the run is left as it was."""
    folder = stopped_after(128, uninterrupted(case), tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with user_error(capsys, change.split()[0].replace("--no-", "--"), words):
        command_line(flags(case)[0], "--resume", folder, *change.split())
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fails_then_goes_on(algo: str, args: list, tmp_path, exit_code: int, saved: int, real: bool = False) -> str:
    """Runs with an environment that fails while a file exists, mends it, resumes, and compares with a run in which it
    never failed. Returns what the failed run printed."""
    reference = new_run(MODULES[algo], tmp_path / f"reference-{real}", *args)
    (tmp_path / "broken").touch()
    args = [*args, "--output-dir", tmp_path / f"runs-{real}"]
    if real:
        process = start(algo, *args, cwd=tmp_path, PYTHONPATH=os.path.dirname(__file__))
        out, code = "".join(process.communicate(timeout=200)), process.returncode
    else:
        out, code = Forked(MODULES[algo], *args, log=tmp_path / "log").communicate()
    (folder,) = runs_in(tmp_path / f"runs-{real}")
    assert code == exit_code and "NaN" not in (folder / "metrics.jsonl").read_text(), out
    assert checkpoints(folder)[-1] == saved, "not the last moment before it"
    (tmp_path / "broken").unlink()
    command_line(MODULES[algo], "--resume", folder)
    assert_same_result(folder, reference)
    return out


@scripts
@pytest.mark.parametrize("vector", ["sync", "async"])
@pytest.mark.parametrize("how", ["raise", "reward"])
def test_an_environment_that_fails(algo, vector, how, tmp_path):
    """In step 40, inside a rollout. An exception shows the user's own frames and exits with 1; a number that is not
    finite is one sentence. What had been finished before is saved."""
    kwargs = [f"broken={tmp_path / 'broken'}", "at=40", f"how={how}"]
    if (algo, vector) == ("ppo", "sync"):  # draws from the global generator, too, which the failed rollout has moved on
        kwargs.append("label=noisy")
    args = [*SMALL[algo], "--keep", 99, *walk(algo), "--env-kwargs", *kwargs, "--vector", vector, "--eval-every", 0,
            "--eval-episodes", 1, "--save-every", 48]  # fmt: skip
    saved = {"ppo": 64}.get(algo, 78)
    out = fails_then_goes_on(algo, args, tmp_path, 1 if how == "raise" else 2, saved)
    if how == "raise":
        assert "ZeroDivisionError" in out and "environments.py" in out and "in deep" in out
    else:  # with two environments, step 40 is the run's step 80
        assert_one_sentence(out[out.index("error: ") :], "environment 0", "reward nan", "step 80", "finite")
    if (algo, vector, how) == ("ppo", "sync", "raise"):  # in the first iteration, in a real process
        args += ["--num-steps", 64, "--total-timesteps", 256]
        out = fails_then_goes_on(algo, args, tmp_path, 1, 0, real=True)
        assert "environments.py" in out and "in deep" in out


def test_an_environment_that_fails_inside_whole_episodes(tmp_path):
    """The first three have been learnt from; the resumed run plays the next three again, with the same draws."""
    kwargs = [f"broken={tmp_path / 'broken'}", "at=100", "label=noisy"]
    args = [*SMALL["reinforce"], "--keep", 99, *walk("reinforce"), "--env-kwargs", *kwargs, "--eval-every", 0]
    assert "in deep" in fails_then_goes_on("reinforce", args, tmp_path, 1, 92)


@pytest.mark.parametrize(
    "case", ["ppo-raw", "sac-pendulum", "td3-pendulum", "dqn-cartpole", "bc-best", "iql-online", "dt"]
)
def test_an_exception_in_evaluation(case, flags, uninterrupted, tmp_path, monkeypatch):
    """The training up to it is saved. The resumed run goes on after it, and all else is as if nothing had failed."""
    module, args = flags(case)
    name = "rollouts" if case == "dt" else "evaluate"
    whole = getattr(module, name)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda make, act, *rest: whole(make, lambda *_: 1 // 0, *rest))
        args = [*args, "--output-dir", tmp_path / "runs", "--save-every", 10**6]
        out, code = Forked(module, *args, log=tmp_path / "log").communicate()
    assert code == 1 and "ZeroDivisionError" in out, out
    (folder,) = runs_in(tmp_path / "runs")
    assert checkpoints(folder) == [64]
    command_line(module, "--resume", folder)
    reference = shutil.copytree(uninterrupted(case), tmp_path / "reference")
    assert [row for row in metrics(folder) if "eval/return" in row and row["step"] != 64]
    for run in (folder, reference):
        forget_evaluations(run)
    assert_same_result(folder, reference)


@scripts
def test_an_environment_that_cannot_be_restored(algo, tmp_path, capsys):
    """It is said, and training goes on in new episodes."""
    args = [*SMALL[algo], "--keep", 99, *BANDIT.split(), "draws=start"]
    args += ["action=unit"] if walk(algo) == WALK else []
    reference = new_run(SCRIPTS[algo], tmp_path / "runs", *args)
    (reference / "curve.png").touch()
    folder = stopped_after(96, reference, tmp_path)
    command_line(SCRIPTS[algo], "--resume", folder)
    assert "2 of 2 environments could not be brought back" in capsys.readouterr().out
    assert metrics(folder)[-1]["step"] == 160
