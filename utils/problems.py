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


class Board(gym.Env):
    """A piece on a board of n x n cells is to go to the last cell, in a corner. An action names a cell and a direction,
    4 n^2 in all; 2 to 4 are valid: those that name the piece's cell and keep it on the board. The others do nothing. So
    do orders to units in a game of strategy (Huang and Ontanon 2020). The reward is -1; the corner ends the episode,
    100 steps cut it off. The best return is minus the distance, rows and columns together.

    mask: what action_masks() allows, the valid actions or all.
    """

    MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])

    def __init__(self, n: int = 5, mask: bool = True):
        self.n, self.mask, self.action_space = n, mask, gym.spaces.Discrete(4 * n * n)
        self.observation_space = gym.spaces.Box(0, 1, (n * n,))

    def targets(self) -> np.ndarray:
        """The cells beside the piece in the four directions, (4,); -1 for those that are not there."""
        cells = np.array(divmod(self.piece, self.n)) + self.MOVES
        return np.where(((cells >= 0) & (cells < self.n)).all(1), cells @ [self.n, 1], -1)

    def action_masks(self) -> np.ndarray:
        valid = np.full((self.n**2, 4), not self.mask)
        valid[self.piece] |= self.targets() >= 0
        return valid.flatten()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.piece = 0, int(self.np_random.integers(self.n**2 - 1))
        return np.eye(self.n**2, dtype=np.float32)[self.piece], {}

    def step(self, action):
        cell, direction = divmod(int(action), 4)
        if cell == self.piece and self.targets()[direction] >= 0:
            self.piece = int(self.targets()[direction])
        self.time += 1
        obs = np.eye(self.n**2, dtype=np.float32)[self.piece]
        return obs, -1.0, self.piece == self.n**2 - 1, self.time == 100, {}


def cartpole_without_velocities(**kwargs) -> gym.Env:
    """CartPole-v1 of which place and angle are seen, but not where they go: that must be remembered."""
    env = gym.make("CartPole-v1", disable_env_checker=True, **kwargs)
    low, high = (getattr(env.observation_space, bound)[[0, 2]] for bound in ("low", "high"))
    return gym.wrappers.TransformObservation(env, lambda obs: obs[[0, 2]], gym.spaces.Box(low, high))


PROBLEMS: dict[str, Any] = {
    "NoiseMDP-v0": NoiseMDP,
    "BitFlip-v0": BitFlip,
    "Board-v0": Board,
    "CartPoleNoVelocity-v0": cartpole_without_velocities,
}
