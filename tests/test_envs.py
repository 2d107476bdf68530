"""utils/envs.py and utils/rollouts.py: any environment as a vector, restored inside its episodes, evaluated without a
trace."""

import contextlib
import importlib
import json
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import BANDIT, WALK, score, write_project
from environments import OBSERVATIONS
from helpers import REPO, SMALL, command_line, metrics, new_run, runs_in, start, user_error

from algos import ppo
from utils import envs as envs_module
from utils import rollouts as rollouts_module
from utils.checkpoint import rng_state
from utils.cli import saved_args
from utils.envs import Episode, check_finite, make_env, make_vector, reset_vector, restore_vector, step_vector
from utils.errors import UserError, parse_pairs
from utils.rollouts import evaluate, rollouts
from utils.run import Run
from utils.spaces import is_bounded

CPU = torch.device("cpu")
REFUSED = {"sequence", "graph", "dict of a sequence"}


pytestmark = pytest.mark.usefixtures("imports_as_they_were")


def vector(env_id, *kwargs, num_envs=3, seed=7, kind="sync"):
    return make_vector(lambda: make_env(env_id, kwargs), num_envs, seed, kind)


def played(envs, steps: int, seed: int = 0) -> list:
    rng, rows = np.random.default_rng(seed), []
    space = envs.single_action_space
    for step in range(steps):
        if isinstance(space, gym.spaces.Box):
            actions = rng.uniform(-1, 1, (envs.num_envs, *space.shape)).astype(np.float32)
        else:
            actions = rng.integers(space.n, size=envs.num_envs) + space.start
        obs, true_obs, rewards, terminated, truncated, episodes = step_vector(envs, actions, step)
        rows.append(
            [x.tolist() for x in (obs, true_obs, rewards, terminated, truncated)] + [np.array(episodes).tolist()]
        )
    return rows


# --- making one ---


@pytest.mark.parametrize(
    "env_id, kwargs, words",
    [
        ("CartPole-v77", (), "CartPole"),
        ("environments:Absent-v0", (), "Absent.*registers"),
        ("nowhere.at.all:Name-v0", (), "nowhere.*folder"),
        ('{"id": "Pendulum-v1", "entry', (), "Pendulum-v1 of the dataset"),
        ("{", (), "registered"),
        ("CartPole-v1", ("=5",), "=5 is not NAME=VALUE"),
        ("CartPole-v1", ("a b=5",), "a b=5 is not NAME=VALUE"),
    ],
)
def test_what_cannot_be_made(env_id, kwargs, words):
    with pytest.raises(UserError, match=words):
        make_env(env_id, kwargs)


def test_arguments_of_the_environment():
    """JSON where it is JSON, text where it is not; the last of two counts; Gymnasium's own are taken, too."""
    pairs = ("size=5", "size=2.5", "label=[1, null]", "broken=a=b c", "at=-3", "max_episode_steps=9")
    env = make_env("environments:Walk-v0", pairs)
    walk = env.unwrapped
    assert (walk.size, walk.label, walk.broken, walk.at, env.spec.max_episode_steps) == (2.5, [1, None], "a=b c", -3, 9)


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_become_vectors(name):
    pair, space = f"observation={name}", OBSERVATIONS[name]
    if name in REFUSED:
        with pytest.raises(UserError, match="observation space .* fixed number"):
            make_env("environments:Bandit-v0", (pair,))
        return
    env = make_env("environments:Bandit-v0", (pair,))
    assert env.observation_space == gym.spaces.flatten_space(space) and len(env.observation_space.shape) == 1
    raw = gym.make("environments:Bandit-v0", observation=name, disable_env_checker=True)
    expected = gym.spaces.flatten(space, raw.reset(seed=3)[0])
    assert env.reset(seed=3)[0].tolist() == expected.tolist()
    envs = vector("environments:Bandit-v0", pair)
    first = reset_vector(envs)
    rows = played(envs, 12)
    again = vector("environments:Bandit-v0", pair)
    assert reset_vector(again).tolist() == first.tolist() and played(again, 12) == rows
    assert np.asarray(rows[-1][0]).shape == (3, gym.spaces.flatdim(space))


@pytest.mark.parametrize("action", ["discrete", "multidiscrete", "multibinary", "grid", "box", "unit"])
def test_the_environment_gets_members_of_its_own_action_space(action, tmp_path):
    """Bandit asserts so. Spaces that are refused: test_command_line_control.py."""
    new_run(ppo, tmp_path, *SMALL["ppo"], *BANDIT.split(), f"action={action}", "observation=image")


@pytest.mark.parametrize(
    "register, marker, where",
    [("class", True, "cwd"), ("text", False, "cwd"), ("text", True, "path"), ("text", True, "inserted")],
)
def test_a_project_with_its_own_utils(register, marker, where, tmp_path, monkeypatch):
    """Its `utils` is what it gets, at the top and later, found from the working directory, on PYTHONPATH, or in a
    folder that the project puts on sys.path itself; and it is loaded once."""
    write_project(tmp_path, register, marker)
    monkeypatch.chdir("/" if where == "path" else tmp_path)
    if where == "path":
        sys.path.append(str(tmp_path))
    elif where == "inserted":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "utils").rename(tmp_path / "elsewhere/utils")
        source = (tmp_path / "project/envs.py").read_text()
        (tmp_path / "project/envs.py").write_text(f"import sys\nsys.path.insert(0, 'elsewhere')\n{source}")
    assert make_env("project:Mine-v0").reset(seed=1)[0].shape == (4,)
    late = sys.modules["utils.late"]
    assert Path(late.__file__).resolve().is_relative_to(tmp_path) and late.__file__.endswith("utils/late.py")
    assert make_env("project:Mine-v0").reset(seed=1)[0].shape == (4,)
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


def test_episodes_are_functions_of_seed_environment_and_number():

    def starts(seed, index, episodes=3):
        env = Episode(make_env("environments:Walk-v0"), seed, index)
        found = []
        for _ in range(episodes):
            found.append(env.reset()[0][0])
            env.step(np.zeros(1, np.float32))
        return found

    assert starts(1, 0) == starts(1, 0) and starts(-1, 0) == starts(-1, 0)
    several = [x for seed in (-1, 1, 2) for index in (0, 1) for x in starts(seed, index)]
    assert len(set(several)) == len(several)


def test_what_a_step_gives():
    """In the step that ends an episode: its own last observation for the bootstrap, the next one's first to act on, its
    return and length; although the environment writes all observations into one array, of another type."""
    envs = vector("environments:Walk-v0", "size=1.5", num_envs=2)
    first = reset_vector(envs)
    alone = [Episode(make_env("environments:Walk-v0", ("size=1.5",)), 7, i) for i in range(2)]
    assert first.tolist() == [np.float32(env.reset()[0]).tolist() for env in alone]
    rng, ended, totals = np.random.default_rng(0), 0, [[], []]
    for step in range(100):
        actions = rng.uniform(-2, 2, (2, 1)).astype(np.float32)
        obs, true_obs, rewards, terminated, truncated, episodes = step_vector(envs, actions.copy(), step)
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
    assert ended > 10 and (terminated.dtype, truncated.dtype) == (bool, bool)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_lost_life_ends_the_bootstrap_only_where_asked(kind):
    """An environment may report what it likes: `terminated` is its own word, but for a script that asks for lives."""
    for lives in (False, True):
        envs = vector("environments:Walk-v0", "label=lives", kind=kind)
        reset_vector(envs)
        for step in range(6):
            *_, terminated, truncated, episodes = step_vector(envs, np.zeros((3, 1), np.float32), step, lives)
            assert terminated.tolist() == [lives] * 3 and not truncated.any() and not episodes
        envs.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "HalfCheetah-v5", "environments:Walk-v0"])
def test_going_on_inside_an_episode(env_id, kind, tmp_path, capsys):
    """Snapshots, through a checkpoint's file and into new environments, continue as if nothing had been; the episode's
    return and length as well. Into sync and async ones from both."""
    if env_id == "HalfCheetah-v5":
        pytest.importorskip("mujoco", reason="not run: mujoco is not installed")
    envs = vector(env_id, "max_episode_steps=30", kind=kind)
    reset_vector(envs)
    obs = played(envs, 50)[-1][0]  # 20 steps into the second episode at the most
    torch.save(envs.log.state(np.array(obs, envs.single_observation_space.dtype)), tmp_path / "x.pt")
    states = torch.load(tmp_path / "x.pt", weights_only=True)
    assert all(0 < len(state["actions"]) for state in states) and len({state["episode"] for state in states} - {0}) > 0
    kinds = [{"sync": "async", "async": "sync"}[kind], kind]
    others = [vector(env_id, "max_episode_steps=30", kind=kind) for kind in kinds]
    for other in others:
        seen = restore_vector(other, states)
        assert seen.tolist() == obs and seen.dtype == envs.single_observation_space.dtype
        states = other.log.state(seen)  # restored, and restored again
    rows = played(envs, 40, seed=1)
    assert any(row[-1] for row in rows)
    assert all(played(other, 40, seed=1) == rows for other in others)
    assert capsys.readouterr().out == ""
    for vectors in (envs, *others):
        vectors.close()


def assert_lost(other, states, obs, lost: list[int], capsys) -> None:
    """Restoring says how many were lost; those begin the next episode, the others are where they were; all go on."""
    seen = restore_vector(other, states)
    assert f"{len(lost)} of 3 environments could not be brought back" in capsys.readouterr().out
    assert [i for i in range(3) if seen[i].tolist() != obs[i]] == lost
    assert [e - s["episode"] for e, s in zip(other.get_attr("episode"), states)] == [int(i in lost) for i in range(3)]
    assert other.log.episode.tolist() == list(other.get_attr("episode"))
    assert [len(a) for a in other.log.actions] == [0 if i in lost else len(s["actions"]) for i, s in enumerate(states)]
    played(other, 20)


def test_an_environment_that_does_not_repeat_itself(capsys):
    """It draws from elsewhere than its seed: a new episode, also where the replay ends before the log does."""
    np.random.seed(0)
    args = ["environments:Bandit-v0", "draws=start"]
    envs = vector(*args)
    reset_vector(envs)
    while envs.log.length.max() < 4:
        obs = played(envs, 1)[-1][0]
    states = envs.log.state(np.array(obs, np.float32))
    for seed in range(1, 6):
        np.random.seed(seed)
        assert_lost(vector(*args), states, obs, [0, 1, 2], capsys)


def test_an_episode_that_is_too_long_to_replay(monkeypatch, capsys):
    monkeypatch.setattr(envs_module, "LONGEST_LOG", 2)
    envs, lost = vector("environments:Bandit-v0"), []
    reset_vector(envs)
    while not 0 < len(lost) < 3:
        obs = played(envs, 1)[-1][0]
        lost = [i for i in range(3) if envs.log.length[i] > 2]
    assert_lost(vector("environments:Bandit-v0"), envs.log.state(np.array(obs, np.float32)), obs, lost, capsys)


def test_a_long_episode_keeps_its_length(monkeypatch):
    """What is kept for a resume is limited, what is reported is not."""
    monkeypatch.setattr(envs_module, "LONGEST_LOG", 3)
    envs = vector("environments:Walk-v0", "size=100")
    reset_vector(envs)
    played(envs, 39)
    saved = envs.log.state(np.zeros((3, 2)))
    assert {len(state["actions"]) for state in saved} == {4}  # one more than can be replayed tells that it cannot
    assert [length for _, length in played(envs, 1)[0][-1]] == [40] * 3


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("how, size", [("reward", 3), ("observation", 3), ("observation", -1)])
def test_numbers_that_are_not_finite(how, size, kind, tmp_path):
    envs = vector("environments:Walk-v0", f"how={how}", f"broken={tmp_path}", "at=4", f"size={size}", kind=kind)
    reset_vector(envs)
    played(envs, 3)
    with pytest.raises(UserError, match="environment 0 .*(nan|inf).* at step 77: .* finite"):
        step_vector(envs, np.zeros((3, 1), np.float32), 77)
    envs.close()


@pytest.mark.parametrize("obs, reward", [(1e39, 0.0), (0.0, -1e39), (np.nan, 0.0), (0.0, np.inf)])
def test_numbers_that_float32_cannot_hold(obs, reward):
    """They would be infinite in the buffer. The largest that it can hold pass."""
    check_finite(np.array([[3e38]]), np.array([-3e38]), 1)
    for obs_dtype in (np.float16, np.float32, np.int64):
        largest = np.iinfo(obs_dtype).max if obs_dtype is np.int64 else np.finfo(obs_dtype).max
        check_finite(np.array([[largest], [0]], obs_dtype), np.zeros(2), 1)
    with pytest.raises(UserError, match="environment 1 .* finite in float32"):
        check_finite(np.array([[0.0], [obs]]), np.array([0.0, reward]), 1)


@pytest.mark.parametrize("high, bounded", [(2.0, True), (3e38, False), (np.inf, False), (3, False)])
def test_bounds_that_actions_can_be_stretched_to(high, bounded):
    """3e38 - -3e38 is beyond float32: actions would be NaN."""
    kind = np.int64 if high == 3 else np.float32
    assert is_bounded(gym.spaces.Box(-np.array([high], kind), np.array([high], kind), dtype=kind)) == bounded
    assert not is_bounded(gym.spaces.Discrete(2))


def test_arguments_of_an_environment():
    """JSON, and Python's names, which would be true as texts."""
    pairs = ("a=False", "b=false", "c=None", "d=[1]", "e=no", "f=True")
    assert parse_pairs(pairs, "--env-kwargs") == dict(a=False, b=False, c=None, d=[1], e="no", f=True)


def test_a_type_error_of_the_user_s_own_constructor_keeps_its_line():
    def broken(size=5):
        return "a" + size

    gym.register("Broken-v0", broken)
    with pytest.raises(TypeError, match="can only concatenate"):
        make_env("Broken-v0")
    with pytest.raises(UserError, match="cannot make --env-id Broken-v0 .*unexpected keyword"):
        make_env("Broken-v0", ("length=5",))


@pytest.mark.parametrize("number", [1, 3])
def test_first_observations_that_are_not_finite(number):
    """Nobody steps to them, but they are acted on: those of reset, too, and of the reset inside a step."""
    envs = vector("environments:Bandit-v0", f"nan=reset {number}")
    with pytest.raises(UserError, match="environment 0 .*nan.* finite"):
        reset_vector(envs)
        assert number > 1
        played(envs, 30)


# --- evaluation ---


def test_evaluation_is_one_episode_of_each_environment():
    """Half of them with the likeliest action, half with samples; recomputed one by one."""
    seen = []

    def act(obs, scale, generator):
        seen.append(obs.copy())
        return (obs[:, :1] * -0.3 + scale.numpy()).astype(np.float32)

    make = lambda: make_env("environments:Walk-v0", ("size=1",))  # noqa: E731
    numbers = evaluate(make, act, 4, 5, CPU)
    starts, returns, lengths = [], [], []
    for i in range(8):
        env = Episode(make(), 5 + 2**31, i)
        obs, done, total, length = np.float32(env.reset()[0]), False, 0.0, 0
        starts.append(obs)
        while not done:
            obs, reward, end, cut, _ = env.step(np.float32(obs[:1] * -0.3 + (i >= 4)))
            obs, done, total, length = np.float32(obs), end or cut, total + reward, length + 1
        returns.append(total)
        lengths.append(length)
    assert np.array_equal(seen[0], starts) and len(set(lengths)) > 2
    assert numbers["eval/return"] == pytest.approx(np.mean(returns[:4]))
    assert numbers["eval/return_stochastic"] == pytest.approx(np.mean(returns[4:]))
    assert numbers["eval/length"] == np.mean(lengths[:4])
    again = len(seen)
    assert evaluate(make, act, 4, 5, CPU) == numbers and np.array_equal(seen[again], starts)
    assert evaluate(make, act, 4, 6, CPU) != numbers
    training = reset_vector(make_vector(make, 8, 5))
    assert not np.isin(training[:, 0], np.array(starts)[:, 0]).any(), "evaluation starts where training does"


def test_episodes_that_are_over_are_not_stepped():
    """Long and short ones: the environments take as many steps as the episodes have, and `running` says which."""
    envs, seen = [], []

    def make():
        envs.append(make_env("environments:Walk-v0", ("size=1",)))
        return envs[-1]

    def act(obs, rewards, running):
        seen.append(running.copy())
        return obs[:, :1] * -0.3

    _, lengths, _ = rollouts(make, act, 6, 1)
    assert [env.unwrapped.steps for env in envs] == lengths.tolist() == np.sum(seen, 0).tolist()
    assert len(set(lengths)) > 2


@pytest.mark.parametrize("name", ["success", "is_success", ""])
def test_success_is_that_of_any_step(name):
    """The share of episodes, of the likeliest actions, whose info reported one at some time; no column where none is
    ever reported."""
    make = lambda: make_env("environments:Walk-v0", ("size=1", f"label={name}"))  # noqa: E731
    numbers = evaluate(make, lambda obs, *_: np.zeros((12, 1), np.float32), 6, 5, CPU)
    if not name:
        assert "eval/success" not in numbers
        return
    expected, last = [], []
    for i in range(6):
        env, done, reported = Episode(make(), 5 + 2**31, i), False, []
        env.reset()
        while not done:
            *_, end, cut, _ = env.step(np.zeros(1, np.float32))
            done = end or cut
            reported.append(env.info[name])
        expected.append(any(reported))
        last.append(reported[-1])
    assert numbers["eval/success"] == np.mean(expected) != np.mean(last)
    assert 0 < numbers["eval/success"] < 1


def test_a_return_that_is_no_number_is_not_left_out(tmp_path):
    """The run names it in the terminal: utils/run.py."""
    (tmp_path / "broken").touch()
    make = partial(make_env, "environments:Walk-v0", (f"broken={tmp_path}/broken", "at=2", "how=reward"))
    numbers = evaluate(make, lambda obs, *_: np.zeros((4, 1), np.float32), 2, 1, CPU)
    assert np.isnan(numbers["eval/return"]) and np.isnan(numbers["eval/return_stochastic"])


@pytest.mark.parametrize("script", ["ppo", "ppo_atari", "sac", "bc", "iql", "dt"])
@pytest.mark.parametrize("total, wanted", [(3, 1), (160, 32), (200_000, 40_000), (10_000_000, 50_000)])
def test_a_run_is_evaluated_five_times_at_least(script, total, wanted, tmp_path, monkeypatch):
    """By default. A number that is given stays, and the one that was chosen is recorded, so resumes keep it."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    args_class = importlib.import_module(f"algos.{script}").Args
    for given in (None, 0, 7):
        args = args_class(eval_every=given, output_dir=str(tmp_path))
        run = Run(args, script, "task", total, ())
        if given is not None:
            assert args.eval_every == given
            continue
        if script == "ppo_atari" and total == 10_000_000:
            wanted = 250_000
        assert args.eval_every == wanted == saved_args(run.dir)["eval_every"]


@pytest.mark.parametrize("fails", [False, True])
def test_evaluation_leaves_the_generators_as_they_were(fails):
    """Even where the environment draws from the global ones, as it should not, and where it ends in an exception."""
    before = json.dumps(rng_state(), default=lambda x: x.tolist())
    make = lambda: make_env("environments:Bandit-v0", ("draws=start",))  # noqa: E731
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        evaluate(make, lambda obs, *_: np.zeros(len(obs), np.int64) + random.randrange(2) // (not fails), 2, 1, CPU)
    assert json.dumps(rng_state(), default=lambda x: x.tolist()) == before


def test_video(tmp_path, capsys):
    pytest.importorskip("moviepy", reason="not run: moviepy is not installed")
    run = new_run(ppo, tmp_path / "runs", *SMALL["ppo"], *WALK)
    expected = score(ppo, run, capsys)
    command_line(ppo, "--evaluate", run, "--capture-video")
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == expected
    (video,) = (run / "video").iterdir()
    assert video.suffix == ".mp4" and video.stat().st_size > 100


@pytest.mark.parametrize("lacks", ["moviepy", "pygame", "render_mode"])
def test_video_that_cannot_be_made(lacks, tmp_path, monkeypatch, capsys):
    """Without moviepy, without what the environment draws with, of one that cannot be drawn: one sentence."""
    kwargs = ["--env-kwargs", "label=cannot be drawn"] if lacks == "pygame" else []
    env = BANDIT.split()[:2] if lacks == "render_mode" else WALK
    run = new_run(ppo, tmp_path / "runs", *SMALL["ppo"], *env, *kwargs)
    if lacks == "moviepy":
        monkeypatch.setitem(sys.modules, "moviepy", None)
    with user_error(capsys, "--capture-video", {"moviepy": "not installed"}.get(lacks, lacks)):
        command_line(ppo, "--evaluate", run, "--capture-video")


def test_an_evaluation_without_end_says_so(monkeypatch, capsys):
    """What it names sets a limit, and then nothing is said."""
    monkeypatch.setattr(rollouts_module, "LONGEST", 30)
    act = lambda obs, *_: np.zeros((len(obs), 1), np.float32)  # noqa: E731
    make = lambda *more: make_env("environments:Endless-v0", more)  # noqa: E731
    assert evaluate(make, act, 2, 1, CPU)["eval/length"] == 30
    said = capsys.readouterr().out
    assert "4 of 4 evaluation episodes were cut off after 30 steps" in said and said.count("\n") == 1
    named = said.split("--env-kwargs ")[1].split()[0].replace("1000", "7")
    assert named == "max_episode_steps=7"
    assert evaluate(lambda: make(named), act, 2, 1, CPU)["eval/length"] == 7
    assert capsys.readouterr().out == ""


def test_rollouts_start_alike_where_asked():
    """Modulo `starts`, so that what they are asked for is all that differs; otherwise each has its own start."""
    for starts, equal in ((2, True), (None, False)):
        seen = []
        act = lambda obs, *_: (seen.append(obs.copy()), np.zeros((4, 1), np.float32))[1]  # noqa: B023, E731
        rollouts(lambda: make_env("environments:Walk-v0"), act, 4, 1, starts=starts)
        assert np.array_equal(seen[0][:2], seen[0][2:]) == equal and seen[0][0, 0] != seen[0][1, 0]
