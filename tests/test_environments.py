"""Our small environments are what their docstrings say, and a user can run them by name with any script."""

import importlib
import itertools
import shutil
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from control import CONTROL, env_of, score
from helpers import REPO, SMALL, command_line, metrics, new_run
from scipy import stats

from algos.environments.recall import Recall
from algos.her import BitFlip
from algos.her_sac import PointReach
from algos.rnd import DeepSea
from benchmarks import record_suite, seeds
from utils.control import make_vector

NAMES = (
    "algos.her:BitFlip-v0", "algos.her_sac:PointReach-v0", "algos.ppo_mask:Board-v0", "algos.rnd:DeepSea-v0",
    "algos.ppo_lstm:CartPoleNoVelocity-v0", "algos.environments.recall:Recall-v0",
    "algos.environments.noise_mdp:NoiseMDP-v0", "algos.environments.room:Room-v0", "algos.environments.gates:Gates-v0",
    "algos.environments.detour:Detour-v0",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("vector", ["sync", "async"])
def test_they_are_found_by_name(name, vector):
    """Also by processes of a vector, and again."""
    for _ in range(2):
        envs, obs = make_vector(lambda: env_of(name), SimpleNamespace(vector=vector, num_envs=2, seed=0), 0)
        assert obs.shape == (2, env_of(name).observation_space.shape[0])
        envs.close()


@pytest.mark.parametrize("actions", [5, 0])
def test_nothing_matters_in_the_noise(actions):
    """Rewards are standard normal, observations uniform, both independent of action and observation; the episode is cut
    off after 100 steps and never ends by itself."""
    env = env_of("algos.environments.noise_mdp:NoiseMDP-v0", f"actions={actions}")
    assert env.action_space == (gym.spaces.Discrete(5) if actions else gym.spaces.Box(-1, 1, (1,)))
    env.action_space.seed(0)
    rows, obs = [], env.reset(seed=0)[0]
    for step in range(1, 3001):
        action = env.action_space.sample()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        rows.append([*obs, float(np.ravel(action)[0]), reward, *next_obs])
        assert not terminated and truncated == (step % 100 == 0)
        obs = env.reset()[0] if truncated else next_obs
    columns = np.array(rows).T
    assert stats.kstest(columns[3], "norm").pvalue > 1e-3
    for column in columns[4:]:
        assert stats.kstest(column, stats.uniform(-1, 2).cdf).pvalue > 1e-3
    between = np.corrcoef(columns)[3:, :3]
    assert np.abs(between).max() < 4 / np.sqrt(len(rows))


def test_a_point_moves_to_its_goal():
    """Straight to it, in steps of at most 0.2 in each direction that walls stop. The reward is 0 within 0.1 of it, and
    the episode goes on."""
    env, rewards = PointReach(), []
    obs, _ = env.reset(seed=3)
    for time in range(1, 21):
        before, way = obs["achieved_goal"], (obs["desired_goal"] - obs["achieved_goal"]) * 5
        obs, reward, terminated, truncated, info = env.step(way)
        np.testing.assert_allclose(obs["achieved_goal"], before + 0.2 * way.clip(-1, 1), atol=1e-6)
        assert obs["observation"] is obs["achieved_goal"] and not terminated and truncated == (time == 20)
        near = np.linalg.norm(obs["achieved_goal"] - obs["desired_goal"]) < 0.1
        assert reward == near - 1 and info["is_success"] == near
        rewards.append(reward)
    assert rewards[0] == -1 and rewards[-1] == 0
    for _ in range(20):
        obs, *_ = env.step(np.array([-1.0, 1.0], np.float32))
    assert obs["achieved_goal"].tolist() == [-1, 1]
    pairs = np.array([[[0.0, 0.0], [0.06, 0.06]], [[0.0, 0.0], [0.08, 0.08]]])
    assert env.compute_reward(pairs[:, 0], pairs[:, 1], {}).tolist() == [0, -1]


def test_bitflip_flips_rewards_and_ends():
    env, lengths = BitFlip(3), set()
    for seed in range(40):
        obs, _ = env.reset(seed=seed)
        bits, goal = obs["observation"], obs["desired_goal"]
        assert not np.array_equal(bits, goal)
        for time, action in enumerate(np.random.default_rng(seed).integers(3, size=3), 1):
            obs, reward, terminated, truncated, info = env.step(action)
            flipped = np.arange(3) == action
            assert np.array_equal(obs["observation"], np.where(flipped, 1 - bits, bits))
            assert np.array_equal(obs["achieved_goal"], obs["observation"]) and (obs["desired_goal"] == goal).all()
            bits, there = obs["observation"], np.array_equal(obs["observation"], goal)
            assert (reward, terminated, truncated, info["is_success"]) == (there - 1, there, time == 3, there)
            if terminated:
                break
        lengths.add((time, there))
    assert lengths == {(1, True), (2, True), (3, True), (3, False)}


def test_the_deep_sea_has_one_way_to_its_treasure():
    """All 2^n ways of n = 4: a row a step, the column of (steps to the right and to the left) between the walls; only
    four steps to the right find the treasure. Which action is right depends on the cell, and not on the episode."""
    env, returns = DeepSea(4), {}
    assert {DeepSea(4, seed).right.tobytes() for seed in range(9)} != {env.right.tobytes()}
    assert 0 < DeepSea(30).right.mean() < 1
    for way in itertools.product([False, True], repeat=4):
        (obs, _), column, returns[way] = env.reset(seed=len(returns)), 0, 0.0
        for row, right in enumerate(way):
            assert np.array_equal(obs.reshape(4, 4), np.outer(np.eye(4)[row], np.eye(4)[column]))
            action = env.right[row, column] if right else 1 - env.right[row, column]
            obs, reward, terminated, truncated, _ = env.step(action)
            assert reward == pytest.approx((column == 3 and right) - 0.0025 * right)
            column, returns[way] = min(max(column + 2 * right - 1, 0), 3), returns[way] + reward
            assert (terminated, truncated) == (row == 3, False)
        assert not obs.any()
    assert returns.pop((True,) * 4) == pytest.approx(0.99) and max(returns.values()) == 0


@pytest.mark.parametrize("delay", [0, 1, 10])
def test_what_must_be_recalled_is_shown_once(delay):
    """The cue at the start, then nothing for `delay` steps, then the sign, whose answer is all that is paid for and
    ends the episode. All cues are as likely, whatever is done before the sign."""
    env, cues, rng = Recall(3, delay), [], np.random.default_rng(0)
    for seed in range(300):
        obs, _ = env.reset(seed=seed)
        assert obs[:3].sum() == 1 and obs[3] == 0
        cues.append(int(obs.argmax()))
        for _ in range(delay):
            obs, reward, terminated, truncated, _ = env.step(rng.integers(3))
            assert not obs.any() and not (reward or terminated or truncated)
        obs, reward, terminated, truncated, _ = env.step(cues[-1])
        assert obs.tolist() == [0, 0, 0, 1] and not (reward or terminated or truncated)
        answer = int(rng.integers(3))
        obs, reward, terminated, truncated, _ = env.step(answer)
        assert not obs.any() and reward == (answer == cues[-1]) and terminated and not truncated
    assert stats.chisquare(np.bincount(cues)).pvalue > 1e-3


def test_the_room_to_copy(tmp_path, monkeypatch, capsys, imports_as_they_were):
    """As a user's own file: trained, scored and drawn, with several seeds, and recorded."""
    shutil.copy(REPO / "algos/environments/room.py", tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    for algo in ("ppo", "sac"):
        args = [*SMALL[algo], "--env-id", "mine:Room-v0"]
        run = new_run(CONTROL[algo], tmp_path / algo, *args, "--env-kwargs", "cold=-5")
        assert "eval/success" in capsys.readouterr().out
        assert score(CONTROL[algo], run, capsys) == {k: v for k, v in metrics(run)[-1].items() if k.startswith("eval/")}
    if importlib.util.find_spec("moviepy"):
        command_line(CONTROL["sac"], "--evaluate", run, "--capture-video")
        assert list((run / "video").glob("*.mp4"))
    seeds.main(seeds.Args((REPO / "algos/sac.py",), 2, 2, tmp_path / "seeds"), args)
    record_suite.main("mine:Room-v0", tmp_path / "data", 100, 50)
    assert (tmp_path / "seeds/seeds.csv").exists() and (tmp_path / "data/full-replay.hdf5").exists()
