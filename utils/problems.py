"""Small environments with known values, each for one idea. utils/envs.py finds them by name: `--env-id BitFlip-v0`."""

from typing import Any

import gymnasium as gym
import numpy as np


class NoiseMDP(gym.Env):
    """Rewards are standard normal and the next observation is uniform in [-1, 1]^2, whatever is done. So every policy's
    Q is 0 everywhere, and the mean of an estimate is its bias. 100 steps, then the episode is cut off.

    actions: how many; 0: numbers in [-1, 1].
    """

    observation_space = gym.spaces.Box(-1, 1, (2,))

    def __init__(self, actions: int = 5):
        self.action_space = gym.spaces.Discrete(actions) if actions else gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        self.time += 1
        obs = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return obs, self.np_random.normal(), False, self.time == 100, {}


class BitFlip(gym.Env):
    """Action i flips bit i of n; the goal is another pattern of bits (Andrychowicz et al. 2017, section 3.1). The
    reward is -1, and 0 where the goal is reached, which ends the episode; n steps cut it off. At Hamming distance h
    from the goal the best return is 1 - h, undiscounted.
    """

    def __init__(self, n: int = 12):
        bits, self.n = gym.spaces.Box(0, 1, (n,)), n
        names = "achieved_goal", "desired_goal", "observation"
        self.observation_space, self.action_space = gym.spaces.Dict(dict.fromkeys(names, bits)), gym.spaces.Discrete(n)

    def observe(self) -> dict[str, np.ndarray]:
        return {"achieved_goal": self.bits.copy(), "desired_goal": self.goal, "observation": self.bits.copy()}

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info) -> np.ndarray:
        """Of goals (..., n), as Gymnasium-Robotics names it."""
        return self.compute_terminated(achieved_goal, desired_goal, info) - 1.0

    def compute_terminated(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info) -> np.ndarray:
        return (achieved_goal == desired_goal).all(-1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.goal = 0, self.np_random.integers(2, size=self.n).astype(np.float32)
        self.bits = self.goal.copy()
        while (self.bits == self.goal).all():
            self.bits = self.np_random.integers(2, size=self.n).astype(np.float32)
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        self.bits[action] = 1 - self.bits[action]
        reward = float(self.compute_reward(self.bits, self.goal, {}))
        return self.observe(), reward, reward == 0, self.time == self.n, {"is_success": reward == 0}


PROBLEMS: dict[str, Any] = {"NoiseMDP-v0": NoiseMDP, "BitFlip-v0": BitFlip}
