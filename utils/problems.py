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


class PointReach(gym.Env):
    """A point in the square [-1, 1]^2 moves by up to 0.2 a step in each direction, to within 0.1 of a goal; both places
    are uniform at the start. As in Fetch's environments the reward is -1, and 0 at the goal, which does not end the
    episode; 20 steps cut it off.
    """

    action_space = gym.spaces.Box(-1, 1, (2,))
    observation_space = gym.spaces.Dict(dict.fromkeys(("achieved_goal", "desired_goal", "observation"), action_space))

    def observe(self) -> dict[str, np.ndarray]:
        return {"achieved_goal": self.place, "desired_goal": self.goal, "observation": self.place}

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info) -> np.ndarray:
        """Of goals (..., 2)."""
        return (np.linalg.norm(achieved_goal - desired_goal, axis=-1) < 0.1) - 1.0

    def compute_terminated(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info) -> bool:
        return False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.place, self.goal = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        self.place = (self.place + 0.2 * np.clip(action, -1, 1)).clip(-1, 1).astype(np.float32)
        reward = float(self.compute_reward(self.place, self.goal, {}))
        return self.observe(), reward, False, self.time == 20, {"is_success": reward == 0}


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


class DeepSea(gym.Env):
    """A diver falls through n x n cells, one row a step, from the first column to the left or to the right (Osband et
    al. 2019, bsuite). Each step to the right costs 0.01 / n; right in the last column finds the treasure, 1. That takes
    n steps to the right, which a random walk takes once in 2^n episodes, and everything before says: go left. The best
    return is 0.99, undiscounted. Which action is right differs from cell to cell.

    mapping_seed: decides that.
    """

    def __init__(self, n: int = 10, mapping_seed: int = 0):
        self.n, self.right = n, np.random.default_rng(mapping_seed).integers(2, size=(n, n))
        self.observation_space, self.action_space = gym.spaces.Box(0, 1, (n * n,)), gym.spaces.Discrete(2)

    def observe(self) -> np.ndarray:
        """One-hot; all zeros below the last row, where the episode ends."""
        cells = np.zeros((self.n + 1, self.n), np.float32)
        cells[self.row, self.column] = 1
        return cells[:-1].flatten()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row = self.column = 0
        return self.observe(), {}

    def step(self, action):
        right = action == self.right[self.row, self.column]
        found = right and self.column == self.n - 1
        self.row, self.column = self.row + 1, min(max(self.column + (1 if right else -1), 0), self.n - 1)
        return self.observe(), float(found - right * 0.01 / self.n), self.row == self.n, False, {}


class Recall(gym.Env):
    """A cue, one of `cues`, is shown at the start. After `delay` steps in which nothing is shown, and nothing done
    matters, a sign asks for it: reward 1 for the action that names it, else 0, and the episode ends. The best return is
    1; without memory it is 1 / cues.
    """

    def __init__(self, cues: int = 4, delay: int = 10):
        self.cues, self.delay, self.action_space = cues, delay, gym.spaces.Discrete(cues)
        self.observation_space = gym.spaces.Box(0, 1, (cues + 1,))

    def observe(self, shown: int | None = None) -> np.ndarray:
        """One-hot: the cue, or the sign."""
        return np.array([float(shown == place) for place in range(self.cues + 1)], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.cue = 0, int(self.np_random.integers(self.cues))
        return self.observe(self.cue), {}

    def step(self, action):
        self.time += 1
        asked, over = self.time == self.delay + 1, self.time == self.delay + 2
        return self.observe(self.cues if asked else None), float(over and action == self.cue), over, False, {}


def cartpole_without_velocities(**kwargs) -> gym.Env:
    """CartPole-v1 of which place and angle are seen, but not where they go: that must be remembered."""
    env = gym.make("CartPole-v1", disable_env_checker=True, **kwargs)
    low, high = (getattr(env.observation_space, bound)[[0, 2]] for bound in ("low", "high"))
    return gym.wrappers.TransformObservation(env, lambda obs: obs[[0, 2]], gym.spaces.Box(low, high))


PROBLEMS: dict[str, Any] = {
    "NoiseMDP-v0": NoiseMDP,
    "BitFlip-v0": BitFlip,
    "PointReach-v0": PointReach,
    "Board-v0": Board,
    "DeepSea-v0": DeepSea,
    "Recall-v0": Recall,
    "CartPoleNoVelocity-v0": cartpole_without_velocities,
}
