"""A control or offline run that was stopped, in whatever way, and resumed. Its environments begin new episodes: where
they would do so anyway (environments.Fixed), it equals the run that was not stopped, bit for bit. Elsewhere nothing
that spans steps joins two episodes."""

import os
import shutil
import signal
import time
from unittest import mock

import numpy as np
import pytest
from control import CONTROL, OFFLINE, WALK, checkpoint, stored_rows, walk
from every_script import options, script
from helpers import SMALL, assert_same_result, command_line, copied_at, metrics, new_run, runs_in, start, wait_for
from small_data import pendulum

from algos import her, ppo, ppo_lstm
from utils.core import Run

CASES = {  # name: SCRIPT or SCRIPT-... -> arguments. Every run has 160 steps or updates
    **{algo: () for algo in CONTROL},
    "ppo_atari": ("--total-timesteps", 160),
    "ppo-raw": ("--no-normalize", "--no-anneal-lr", "--target-kl", 1e-4, "--clip-vloss"),
    "redq-droq": ("--policy-frequency", 7, "--dropout", 0.2, "--log-every", 2),
    "sac-small-buffer": ("--buffer-size", 50, "--vector", "async"),
    "dqn-double": ("--double", "--log-every", 2),
    "gsde": ("--sde-sample-freq", 8),
    "ppo-noisy": (), "sac-noisy": (), "dqn-noisy": (),  # rewards of NumPy's global generator
    "rainbow-plain": ("--no-noisy", "--no-prioritized", "--n-step", 1),
    **{f"{algo}-online": ("--max-steps", 64, "--online-steps", 96, "--log-every", 20)  # episodes wait for their row
       for algo in ("iql", "awac", "xql", "riql")},
}  # fmt: skip


def arguments(case: str, folder) -> list:
    algo = case.partition("-")[0]
    data = ["--dataset", pendulum(folder / "data.hdf5")] if algo in OFFLINE else []
    own = dict.fromkeys(OFFLINE, "Pendulum-v1")
    own |= {"ppo_mask": "environments:Toll-v0", "ppo_atari": "environments:Pixels-v0"}
    env = ["--env-id", "environments:Fixed-v0", "--env-kwargs", f"of={own.get(algo, walk(algo)[1])}"]
    env += ["label=noisy"] if case.endswith("noisy") else []
    return [*SMALL[algo], *data, *env, "--save-every", 32, "--eval-every", 0, *CASES[case]]


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_the_uninterrupted_one(case, tmp_path):
    """From the checkpoint in the middle, with rows behind it, the last one cut off as a kill leaves it."""
    module, end_step = CONTROL[case.partition("-")[0]], Run.end_step

    def copying(run, step, parts):
        end_step(run, step, parts)
        if run.step >= 96 and not (tmp_path / "stopped").exists() and checkpoint(run.dir)["step"] == run.step:
            shutil.copytree(run.dir, tmp_path / "stopped")

    with mock.patch.object(Run, "end_step", copying):
        whole = new_run(module, tmp_path / "runs", *arguments(case, tmp_path))
    assert checkpoint(tmp_path / "stopped")["step"] < checkpoint(whole)["step"]
    with open(tmp_path / "stopped/metrics.jsonl", "a") as file:
        file.write('{"step": 97, "return": 5}\n{"step": 98, "ret')
    command_line(module, "--resume", tmp_path / "stopped")
    assert_same_result(tmp_path / "stopped", whole)
    one, other = (checkpoint(folder) for folder in (tmp_path / "stopped", whole))
    assert one.keys() == other.keys() and one["step"] == other["step"]


def test_iql_resumes_before_its_first_episode(tmp_path):
    """Then it plays the episodes of the uninterrupted run, which begin differently for each seed."""
    args = [*SMALL["iql"], "--dataset", pendulum(tmp_path / "data.hdf5", WALK[1]), *WALK]
    args += "--max-steps 64 --online-steps 96 --save-every 32".split()
    with copied_at(32, tmp_path / "stopped"):
        whole = new_run(CONTROL["iql"], tmp_path / "runs", *args)
    command_line(CONTROL["iql"], "--resume", tmp_path / "stopped")
    assert_same_result(tmp_path / "stopped", whole)


@pytest.mark.parametrize("algo", [algo for algo in CONTROL if {"log_every", "num_envs"} <= options(algo)])
def test_what_waits_for_the_next_row_comes_back(algo, tmp_path, monkeypatch):
    """Each episode is in one row, also where a run was stopped between two, and so is the newest update that moved the
    actor."""
    (module, args), ended, given, end_step = script(algo, tmp_path), [], [], Run.end_step

    def stepping(*inputs, function=module.step_vector):
        found = function(*inputs)
        ended.extend(found[-1])
        return found

    def stopping(run, step, parts):
        run.signal = 15 if step == 94 else 0
        end_step(run, step, parts)

    monkeypatch.setattr(Run, "end_step", stopping)
    monkeypatch.setattr(module, "step_vector", stepping)
    monkeypatch.setattr(module, "episode_columns", lambda episodes: given.append(episodes) or {})
    args += ["--env-kwargs", "max_episode_steps=10", "--log-every", 48, "--eval-every", 0]
    args += ["--policy-frequency", 40] if "policy_frequency" in options(algo) else []
    with pytest.raises(SystemExit, match="143"):
        new_run(module, tmp_path / "runs", *args)
    (folder,) = runs_in(tmp_path / "runs")
    command_line(module, "--resume", folder)
    assert len(given) == 4 and [tuple(x) for episodes in given for x in episodes] == [tuple(x) for x in ended] != []
    moved = {"ddpg": "q_policy", "td3": "q_policy"}.get(algo, "q" if "exploration" in dir(module) else "entropy")
    assert [row["step"] for row in metrics(folder) if moved in row] == [48, 96, 144, 160]


@pytest.mark.parametrize("algo", ["rainbow", "her", "her_sac"])
def test_nothing_joins_two_episodes(algo, tmp_path):
    """Stopped inside episodes of 40 steps, whose time is observed: a stored window of n steps is n steps long, and a
    stored episode goes from step to step."""
    module, end_step = CONTROL[algo], Run.end_step

    def stopping(run, step, parts):
        run.signal = 15 if step >= 70 and not run.args.resume else 0
        end_step(run, step, parts)

    args = [*SMALL[algo], *walk(algo), "--env-kwargs", "size=1000", "max_episode_steps=40", "--log-every", 160]
    with mock.patch.object(Run, "end_step", stopping), pytest.raises(SystemExit):
        new_run(module, tmp_path, *args)
    (folder,) = runs_in(tmp_path)
    command_line(module, "--resume", folder)
    rows, clock = stored_rows(folder), 1 if algo == "rainbow" else 3
    width = (rows.shape[1] - 4 if algo == "rainbow" else rows.shape[1] - 3) // 2
    steps = rows[:, -width + clock - (algo == "rainbow")] if algo == "rainbow" else rows[:, -width + clock]
    taken = np.rint(7 * (steps - rows[:, clock]))
    assert len(rows) > 80
    assert (taken == (rows[:, -1] if algo == "rainbow" else 1)).all()


def test_an_lstm_begins_empty(tmp_path, monkeypatch):
    given, collect = [], ppo_lstm.collect

    def recording(*args):
        given.append(args[3].clone())
        return collect(*args)

    monkeypatch.setattr(ppo_lstm, "collect", recording)
    folder = new_run(ppo_lstm, tmp_path, *SMALL["ppo_lstm"], *WALK, "--save-every", 32)
    assert not given[0].any() and all(state.any() for state in given[1:])
    given.clear()
    command_line(ppo_lstm, "--resume", folder, "--total-timesteps", 224)
    assert not given[0].any() and given[1].any()


def test_goals_of_an_unfinished_episode_are_forgotten(tmp_path):
    """Its steps were never stored, and those after a resume are another episode's."""
    folder = new_run(her, tmp_path, *SMALL["her"], *walk("her"), "--env-kwargs", "size=1000")
    assert not [name for name in checkpoint(folder) if "path" in name]


def test_sigterm_finishes_the_step_and_saves(tmp_path, capsys):
    """Exit code 143, and a sentence; a second signal ends at once."""
    end_step = Run.end_step

    def signalled(run, step, parts):
        if step == 64 and not run.args.resume:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        end_step(run, step, parts)

    args = arguments("ppo", tmp_path)
    whole = new_run(ppo, tmp_path / "whole", *args, "--save-every", 1000)
    with mock.patch.object(Run, "end_step", signalled), pytest.raises(SystemExit) as exit:
        command_line(ppo, *args, "--save-every", 1000, "--output-dir", tmp_path / "runs")
    (folder,) = runs_in(tmp_path / "runs")
    assert exit.value.code == 143 and checkpoint(folder)["step"] == 64
    assert f"stopped after step 64; continue with --resume {folder}" in capsys.readouterr().out
    command_line(ppo, "--resume", folder)
    assert_same_result(folder, whole)
    run = mock.Mock(signal=15)
    with pytest.raises(SystemExit):
        Run.on_signal(run, 15, None)


def test_a_kill_at_any_moment(tmp_path):
    """kill -9 of a process, with its children: what it leaves is resumed to the end."""
    args = arguments("ppo", tmp_path)
    whole = new_run(ppo, tmp_path / "whole", *args)
    process = start("ppo", *args, "--total-timesteps", 10_000_000, "--output-dir", tmp_path / "runs", cwd=tmp_path,
                    PYTHONPATH=os.path.dirname(__file__))  # fmt: skip
    folder = wait_for(process, tmp_path / "runs", lambda folder: (folder / "checkpoint.pt").exists())
    process.kill()
    process.communicate()
    step = checkpoint(folder)["step"]
    command_line(ppo, "--resume", folder, "--total-timesteps", step + 64)
    assert [row["step"] for row in metrics(folder)] == list(range(32, step + 65, 32))
    assert metrics(whole)[0].keys() <= set().union(*metrics(folder))


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_an_exception_of_the_environment_shows_its_frames(algo, tmp_path):
    """What is lost is the steps since the last checkpoint."""
    broken, module = tmp_path / "broken", CONTROL[algo]
    broken.touch()
    args = [*SMALL[algo], *WALK, "--env-kwargs", f"broken={broken}", "at=60", "--save-every", 32]
    with pytest.raises(ZeroDivisionError) as error:
        command_line(module, *args, "--output-dir", tmp_path / "runs")
    assert "deep" in [entry.name for entry in error.traceback]
    (folder,) = runs_in(tmp_path / "runs")
    assert 0 < checkpoint(folder)["step"] < 160
    broken.unlink()
    command_line(module, "--resume", folder)
    assert metrics(folder)[-1]["step"] == 160
