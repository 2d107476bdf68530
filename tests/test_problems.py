"""The small environments of utils/problems.py are what their docstrings say, and a user can run them by name."""

import gymnasium as gym
import numpy as np
import pytest
from scipy import stats

from utils.envs import make_env, make_vector, reset_vector
from utils.problems import PROBLEMS, BitFlip


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("vector", ["sync", "async"])
def test_they_are_found_by_name(name, vector):
    """Also by processes of a vector, and again."""
    for _ in range(2):
        envs = make_vector(lambda: make_env(name), 2, 0, vector)
        assert reset_vector(envs).shape == (2, make_env(name).observation_space.shape[0])
        envs.close()


@pytest.mark.parametrize("actions", [5, 0])
def test_nothing_matters_in_the_noise(actions):
    """Rewards are standard normal, observations uniform, both independent of action and observation; the episode is cut
    off after 100 steps and never ends by itself."""
    env = make_env("NoiseMDP-v0", (f"actions={actions}",))
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
