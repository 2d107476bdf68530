"""utils/control.py: any environment as a vector, and evaluated without a trace."""

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import BANDIT, CONTROL, OFFLINE, WALK, env_of, score, write_project
from environments import OBSERVATIONS
from every_script import options
from helpers import REPO, SMALL, assert_one_sentence, command_line, metrics, new_run, runs_in, start, user_error
from small_data import pendulum

from algos import ppo
from tests.specs import SPECS
from utils import control
from utils.control import evaluate, is_bounded, make_vector, seed_of, step_vector
from utils.core import UserError, rng_state

CPU = torch.device("cpu")
REFUSED = {"text", "sequence", "graph", "dict of a sequence", "dict of another kind"}

pytestmark = pytest.mark.usefixtures("imports_as_they_were")


def vector(env_id, *kwargs, num_envs=3, seed=7, kind="sync", step=0):
    args = SimpleNamespace(num_envs=num_envs, seed=seed, vector=kind)
    return make_vector(lambda: env_of(env_id, *kwargs), args, step)


def played(envs, steps: int, seed: int = 0) -> list:
    rng, rows, space = np.random.default_rng(seed), [], envs.single_action_space
    for _ in range(steps):
        if isinstance(space, gym.spaces.Box):
            actions = rng.uniform(-1, 1, (envs.num_envs, *space.shape)).astype(np.float32)
        else:
            actions = rng.integers(space.n, size=envs.num_envs) + space.start
        *arrays, episodes = step_vector(envs, actions)
        rows.append([x.tolist() for x in arrays] + [np.array(episodes).tolist()])
    return rows


# --- making one ---


@pytest.mark.parametrize("how, words", [
    ("no seed", "takes no seed"), ("bare", "(observation, info)"), ("four", "truncated, info)"),
    ("shape", "observation of Box(-inf, inf, (2,)"),
])  # fmt: skip
def test_mistakes_of_beginners(how, words, tmp_path, capsys):
    args = "--env-id", "environments:Mistaken-v0", "--env-kwargs", f"how={how}"
    with user_error(capsys, "Mistaken-v0", words):
        command_line(ppo, *args, "--output-dir", tmp_path)
    assert not any(tmp_path.iterdir())


def odd(algo: str, how: str, data) -> list:
    """Arguments of a short run on the script's environment, as Odd has it."""
    of = "environments:Toll-v0" if algo == "ppo_mask" else SPECS[algo].walk
    args = ["--env-id", "environments:Odd-v0", "--env-kwargs", f"of={of}", f"how={how}"]
    args += ["gives=method"] if algo == "ppo_mask" else []
    more = {"dataset": data, "online_steps": 32, "max_steps": 4} if algo in OFFLINE else {}
    more = {"eval_every": 0} | {name: value for name, value in more.items() if name in options(algo)}
    return [*SMALL[algo], *(x for name, value in more.items() for x in (f"--{name.replace('_', '-')}", value)), *args]


@pytest.mark.parametrize("algo", CONTROL)
def test_what_an_environment_returns_is_read_alike(algo, tmp_path, capsys):
    """In training and in evaluation: whole numbers first, lists, arrays of one number, infos that are None, no
    numbers. What cannot be read is refused in both."""
    data = pendulum(tmp_path / "data.hdf5", "environments:Walk-v0")
    one, other = (new_run(CONTROL[algo], tmp_path / how, *odd(algo, how, data)) for how in ("plain", "odd"))
    assert metrics(one) == metrics(other)
    with pytest.raises(SystemExit, match="2"):
        command_line(CONTROL[algo], *odd(algo, "no reward", data), "--output-dir", tmp_path)
    assert "\nerror: Odd-v0 returned (" in (err := "\n" + capsys.readouterr().err) and "number as reward" in err


@pytest.mark.parametrize("how, words", [("fraction", "(2,), int32)"), ("shape", "Box(-inf, inf, (2,)"), ("whole", ""),
                                        ("words", "'left'"), ("no end", "terminated, truncated, info)")])  # fmt: skip
def test_what_cannot_be_read_is_shown(how, words, tmp_path, capsys):
    if how == "whole":
        new_run(ppo, tmp_path, *odd("ppo", how, None))
        return
    with user_error(capsys, "Odd-v0 returned", words):
        command_line(ppo, *odd("ppo", how, None), "--output-dir", tmp_path)


def test_a_reset_may_take_anything():
    env = env_of("environments:Mistaken-v0", "how=anything")
    assert env.reset(seed=3)[0].tolist() == env_of("environments:Hop-v0").reset(seed=3)[0].tolist()


@pytest.mark.parametrize("value, read", [(True, 1), (np.array([True]), 1), (np.float32(0.5), 0.5), (2, 2)] + [
    (value, np.nan) for value in (None, "yes", {}, np.zeros(2), [1, [2]], 1j)])  # fmt: skip
def test_what_an_info_says(value, read):
    np.testing.assert_equal(control.number(value), read)


@pytest.mark.parametrize("kind, value", [("f2", 300), ("f4", 3.4e38), ("f4", 1e19), ("f8", 1e300), ("i2", 300)])
def test_large_numbers_are_finite(kind, value):
    control.check_finite(large := np.full((2, 9), value, kind), np.array([value, 0.0]))
    for wrong in (np.inf, np.nan):
        with pytest.raises(UserError, match="finite"):
            control.check_finite(large, np.array([0, wrong]))


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_environments_are_made_once(algo, tmp_path, capsys):
    """Four of evaluation, those of training, and none for a look. Without evaluation there is one at a time."""
    only = importlib.import_module("environments").Only
    args = [*SMALL[algo], "--env-id", "environments:Only-v0", "--eval-every", 32, "--num-envs", 1]
    only.most, only.made, only.alive = 5, 0, 0
    run = new_run(CONTROL[algo], tmp_path / "a", *args, "--eval-episodes", 2)
    assert only.made == 5 and sum("eval/return" in row for row in metrics(run)) > 2
    only.most, only.alive = 1, 0
    run = new_run(CONTROL[algo], tmp_path / "b", *args, "--eval-episodes", 0)
    assert (run / "model").is_dir() and not any("eval/return" in row for row in metrics(run))
    assert "Box(2,) seen as (2,); steps in an episode: 40 (--env-kwargs" in capsys.readouterr().out


def test_a_large_replay_buffer_is_told(capsys):
    control.ReplayBuffer(2**28 // 3, (2, 1), CPU)
    assert capsys.readouterr().out == ""
    control.ReplayBuffer(2**28 // 3 + 1, (2, 1), CPU)
    assert "1.1 GB" in capsys.readouterr().out


def test_arguments_of_the_environment():
    """JSON where it is JSON, Python's names, else text; the last of two counts; Gymnasium's own are taken, too."""
    pairs = ("size=5", "size=2.5", "label=[1, null]", "broken=a=b c", "at=-3", "max_episode_steps=9")
    walk = (env := env_of("environments:Walk-v0", *pairs)).unwrapped
    assert (walk.size, walk.label, walk.broken, walk.at, env.spec.max_episode_steps) == (2.5, [1, None], "a=b c", -3, 9)
    assert env_of("environments:Walk-v0", "size=False", "label=None").unwrapped.size is False


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_become_vectors(name):
    pair, space = f"observation={name}", OBSERVATIONS[name]
    if name in REFUSED:
        with pytest.raises(UserError, match="observation space .* fixed size"):
            env_of("environments:Bandit-v0", pair)
        return
    env = env_of("environments:Bandit-v0", pair)
    assert env.observation_space == gym.spaces.flatten_space(space) and len(env.observation_space.shape) == 1
    raw = gym.make("environments:Bandit-v0", observation=name, disable_env_checker=True)
    assert env.reset(seed=3)[0].tolist() == gym.spaces.flatten(space, raw.reset(seed=3)[0]).tolist()
    (envs, first), (again, equal) = (vector("environments:Bandit-v0", pair) for _ in "ab")
    rows = played(envs, 12)
    assert first.tolist() == equal.tolist() and played(again, 12) == rows
    assert np.asarray(rows[-1][0]).shape == (3, gym.spaces.flatdim(space))


@pytest.mark.parametrize("action", ["discrete", "multidiscrete", "multibinary", "grid", "box", "unit"])
def test_the_environment_gets_members_of_its_own_action_space(action, tmp_path):
    """Bandit asserts so. Spaces that are refused: test_command_line_control.py."""
    new_run(ppo, tmp_path, *SMALL["ppo"], *BANDIT.split(), f"action={action}", "observation=matrix")


@pytest.mark.parametrize("register, marker", [("class", True), ("text", False)])
def test_a_project_with_its_own_utils(register, marker, tmp_path, monkeypatch):
    """Its `utils`, found from the working directory, is what it gets, at the top and later; and it is loaded once."""
    write_project(tmp_path, register, marker)
    monkeypatch.chdir(tmp_path)
    assert env_of("project:Mine-v0").reset(seed=1)[0].shape == (4,)
    late = sys.modules["utils.late"]
    assert Path(late.__file__).resolve().is_relative_to(tmp_path)
    assert env_of("project:Mine-v0").reset(seed=1)[0].shape == (4,)
    assert sys.modules["utils.late"] is late


def test_a_project_in_a_real_process(tmp_path, monkeypatch, capsys):
    """From the project's folder, with environments in processes of their own; then scored from the run alone."""
    write_project(tmp_path, "text")
    args = ["--env-id", "project:Mine-v0", "--vector", "async", "--output-dir", "runs"]
    out, err = start("ppo", *SMALL["ppo"], *args, cwd=tmp_path).communicate(timeout=200)
    assert "model: " in out and err == "", err
    (run,) = runs_in(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert score(ppo, run, capsys)["eval/return"] == metrics(run)[-1]["eval/return"]


def test_language_models_do_without_gymnasium():
    code = "import sys; sys.modules['gymnasium'] = None; sys.path.insert(0, sys.argv[1]); from algos import grpo, sft"
    done = subprocess.run([sys.executable, "-c", code, REPO], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- vectors and episodes ---


def test_close_seeds_have_nothing_in_common():
    first = lambda **key: vector("environments:Walk-v0", **key)[1].tolist()  # noqa: E731
    several = [row[0] for seed in range(3) for step in range(2) for row in first(seed=seed, step=step)]
    assert len(set(several)) == len(several) == 18
    assert first(step=5) == first(step=5)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_a_step_gives(kind):
    """In the step that ends an episode: its own last observation for the bootstrap, the next one's first to act on, its
    return and length; although the environment writes all observations into one array, of another type."""
    envs, first = vector("environments:Walk-v0", "size=1.5", num_envs=2, kind=kind)
    alone, seed = [env_of("environments:Walk-v0", "size=1.5") for _ in range(2)], seed_of(7, 0)
    assert first.tolist() == [np.float32(env.reset(seed=seed + i)[0]).tolist() for i, env in enumerate(alone)]
    rng, ended, totals = np.random.default_rng(0), 0, [[], []]
    for _ in range(100):
        actions = rng.uniform(-2, 2, (2, 1)).astype(np.float32)
        obs, true_obs, rewards, terminated, truncated, episodes = step_vector(envs, actions.copy())
        for i, env in enumerate(alone):
            last, reward, end, cut, _ = env.step(actions[i].copy())
            totals[i].append(reward)
            assert true_obs[i].tolist() == np.float32(last).tolist()
            assert (rewards[i], terminated[i], truncated[i]) == (reward, end, cut)
            if end or cut:
                last, _ = env.reset()
                ended += 1
                assert tuple(episodes.pop(0)) == (pytest.approx(sum(totals[i])), len(totals[i]))
                totals[i] = []
            assert obs[i].tolist() == np.float32(last).tolist()
        assert not episodes and obs.dtype == np.float32
    envs.close()
    assert ended > 10 and (terminated.dtype, truncated.dtype) == (bool, bool)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("how, size", [("reward", 3), ("observation", 3), ("observation", -1)])
def test_numbers_that_are_not_finite(how, size, kind, tmp_path):
    envs, _ = vector("environments:Walk-v0", f"how={how}", f"broken={tmp_path}", "at=4", f"size={size}", kind=kind)
    played(envs, 3)
    with pytest.raises(UserError, match="(nan|inf).* finite"):
        step_vector(envs, np.zeros((3, 1), np.float32))
    envs.close()
    with pytest.raises(UserError, match="(nan|inf).* finite"):
        pairs = f"how={how}", f"broken={tmp_path}", "at=4"
        scored(lambda: env_of("environments:Walk-v0", *pairs), lambda obs, *_: np.zeros((2, 1), np.float32), 1)


@pytest.mark.parametrize("number", [1, 3])
def test_first_observations_that_are_not_finite(number):
    """Nobody steps to them, but they are acted on: those of reset, too, and of the reset inside a step."""
    with pytest.raises(UserError, match="nan.* finite"):
        envs, _ = vector("environments:Bandit-v0", f"nan=reset {number}")
        assert number > 1
        played(envs, 30)


@pytest.mark.parametrize("high, bounded", [(2.0, True), (3e38, False), (np.inf, False), (3, False)])
def test_bounds_that_actions_can_be_stretched_to(high, bounded):
    """3e38 - -3e38 is beyond float32: actions would be NaN."""
    kind = np.int64 if high == 3 else np.float32
    assert is_bounded(gym.spaces.Box(-np.array([high], kind), np.array([high], kind), dtype=kind)) == bounded
    assert not is_bounded(gym.spaces.Discrete(2))


# --- evaluation ---


def scored(make, act, episodes=4, seed=5):
    return evaluate([make() for _ in range(2 * episodes)], act, SimpleNamespace(seed=seed, evaluate=""), CPU)


def test_evaluation_is_one_episode_of_each_environment():
    """Half of them with the likeliest action, half with samples; recomputed one by one. None is stepped when over."""
    seen, envs = [], []

    def act(obs, scale, generator):
        seen.append(obs.copy())
        return (obs[:, :1] * -0.3 + scale.numpy()).astype(np.float32)

    def make():
        envs.append(env_of("environments:Walk-v0", "size=1"))
        return envs[-1]

    numbers, starts, returns, lengths = scored(make, act), [], [], []
    for i in range(8):
        env, done, total, length = env_of("environments:Walk-v0", "size=1"), False, 0.0, 0
        obs = np.float32(env.reset(seed=seed_of(5, 2**31, i))[0])
        starts.append(obs)
        while not done:
            obs, reward, end, cut, _ = env.step(np.float32(obs[:1] * -0.3 + (i >= 4)))
            obs, done, total, length = np.float32(obs), end or cut, total + reward, length + 1
        returns.append(total)
        lengths.append(length)
    assert np.array_equal(np.float32(seen[0]), starts) and len(set(lengths)) > 2
    assert [env.unwrapped.steps for env in envs] == lengths
    assert numbers["eval/return"] == pytest.approx(np.mean(returns[:4]), rel=1e-5)
    assert numbers["eval/return_stochastic"] == pytest.approx(np.mean(returns[4:]), rel=1e-5)
    assert numbers["eval/length"] == np.mean(lengths[:4])
    asked = evaluate([make() for _ in range(8)], act, SimpleNamespace(seed=5, evaluate="RUN"), CPU)
    deviation = np.sqrt(np.mean((np.array(returns[:4]) - np.mean(returns[:4])) ** 2))
    assert asked == numbers | {"episodes": 4, "eval/return_std": pytest.approx(deviation, rel=1e-5)}
    assert scored(make, act) == numbers != scored(make, act, seed=6)
    training = vector("environments:Walk-v0", num_envs=8, seed=5)[1]
    assert not np.isin(training[:, 0], np.array(starts)[:, 0]).any(), "evaluation starts where training does"


@pytest.mark.parametrize("name", ["success", "is_success", ""])
def test_success_is_that_of_any_step(name):
    """The share of episodes, of the likeliest actions, whose info reported one at some time; no column where none is
    ever reported."""
    make = lambda: env_of("environments:Walk-v0", "size=1", f"label={name}")  # noqa: E731
    numbers = scored(make, lambda obs, *_: np.zeros((12, 1), np.float32), 6)
    if not name:
        assert "eval/success" not in numbers
        return
    expected, last = [], []
    for i in range(6):
        env, done, reported = make(), False, []
        env.reset(seed=seed_of(5, 2**31, i))
        while not done:
            *_, end, cut, info = env.step(np.zeros(1, np.float32))
            done = end or cut
            reported.append(info[name])
        expected.append(any(reported))
        last.append(reported[-1])
    assert numbers["eval/success"] == np.mean(expected) != np.mean(last)
    assert 0 < numbers["eval/success"] < 1


def test_evaluation_and_what_is_tried_leave_the_generators_as_they_were():
    """Even where the environment draws from the global ones, as it should not."""
    before = json.dumps(rng_state(), default=lambda x: x.tolist())
    make = lambda: env_of("environments:Bandit-v0", "draws=start")  # noqa: E731
    scored(make, lambda obs, *_: np.zeros(len(obs), np.int64) + random.randrange(2), 2, 1)
    control.try_out(make, SimpleNamespace(seed=1, evaluate="", env_id=""), 2)
    assert json.dumps(rng_state(), default=lambda x: x.tolist()) == before


def test_video(tmp_path, capsys):
    pytest.importorskip("moviepy", reason="not run: moviepy is not installed")
    run = new_run(ppo, tmp_path / "runs", *SMALL["ppo"], *WALK)
    expected = score(ppo, run, capsys)
    command_line(ppo, "--evaluate", run, "--capture-video")
    assert expected.items() <= json.loads(capsys.readouterr().out.splitlines()[-1]).items()
    (video,) = (run / "video").iterdir()
    assert video.suffix == ".mp4" and video.stat().st_size > 100


def test_videos_go_to_the_run_s_page_at_wandb(tmp_path, monkeypatch):
    run, sent = new_run(ppo, tmp_path, *SMALL["ppo"], *WALK), []
    (run / "video").mkdir()
    (run / "video/episode.mp4").touch()
    begin = lambda **how: SimpleNamespace(log=lambda row: sent.append((how["id"], row)))  # noqa: E731
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Video=str, init=begin))
    monkeypatch.setattr(gym.wrappers, "RecordVideo", lambda env, *_, **__: env)
    command_line(ppo, "--evaluate", run, "--track")
    assert not sent
    command_line(ppo, "--evaluate", run, "--track", "--capture-video")
    assert sent == [(run.name, {"episode": f"{run}/video/episode.mp4"})]


@pytest.mark.parametrize("env_id, words", [("Bandit", "it cannot draw"), ("Walk", "no video (no MoviePy)"),
                                           ("Odd", "no video (Render mode is None")])  # fmt: skip
def test_without_a_video_there_is_the_score(env_id, words, tmp_path, monkeypatch, capsys):
    """Where the environment draws with no MoviePy, or does not draw. Where it takes no such argument, at once."""
    args = odd("ppo", "plain", None) if env_id == "Odd" else [*SMALL["ppo"], "--env-id", f"environments:{env_id}-v0"]
    run = new_run(ppo, tmp_path, *args)
    expected = score(ppo, run, capsys)
    if env_id == "Walk":
        monkeypatch.setattr(gym.wrappers, "RecordVideo", mock.Mock(side_effect=gym.error.Error("no MoviePy")))
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        command_line(ppo, "--evaluate", run, "--capture-video")
    out, err = capsys.readouterr()
    assert_one_sentence(err, words, "leave out --capture-video")
    assert out == "" if env_id == "Bandit" else expected.items() <= json.loads(out).items()


def test_an_evaluation_without_end_says_so(monkeypatch, capsys):
    """What it names sets a limit, and then nothing is said."""
    monkeypatch.setattr(control, "LONGEST", 30)
    act = lambda obs, *_: np.zeros((len(obs), 1), np.float32)  # noqa: E731
    assert scored(lambda: env_of("environments:Endless-v0"), act, 2, 1)["eval/length"] == 30
    said = capsys.readouterr().out
    assert "4 evaluation episodes were cut off after 30 steps" in said and said.count("\n") == 1
    named = said.split("--env-kwargs ")[1].split()[0].replace("1000", "7")
    assert scored(lambda: env_of("environments:Endless-v0", named), act, 2, 1)["eval/length"] == 7
    assert capsys.readouterr().out == ""
