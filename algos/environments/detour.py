"""A way around a wall in several steps, left or right, for policies that plan, and two datasets of our own.

    python algos/environments/detour.py detour.hdf5                   records 500 walks, as in this folder
    python algos/environments/detour.py detour_place.hdf5 place       the same walks; the place is seen

As gates.py, but the way to a gate takes eight steps, and nothing shows which way was taken so far. A policy that picks
a side anew at each step goes back and forth, and ends at the wall.
"""

import sys

import gymnasium as gym
import h5py
import numpy as np

STEPS = 8


class Detour(gym.Env):
    """One walk. Observes h, 0.4 to 0.8: gates are at -h and h; the share of the steps done; with `place` its place."""

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, place: bool = False):
        self.observation_space = gym.spaces.Box(-1, 1, (2 + place,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = np.array([self.np_random.uniform(0.4, 0.8), 0, 0], np.float32)
        return self.state[: self.observation_space.shape[0]], {}

    def step(self, action):
        """The action is the speed sideways: 1 in all steps leads to 1. Reward: 1 at the end, within 0.1 of a gate."""
        self.state = self.state + np.array([0, 1, float(action[0])], np.float32) / STEPS
        gate, time, place = self.state
        hit = bool(time == 1 and abs(abs(place) - gate) < 0.1)
        return self.state[: self.observation_space.shape[0]], float(hit), bool(time == 1), False, {"is_success": hit}


def record(path: str, place: bool, walks: int = 500) -> None:
    """Walks to either gate at an even pace, with a deviation of 0.03, as a file that offline scripts read."""
    rng, env, rows = np.random.default_rng(0), Detour(place), []
    for seed in range(walks):
        (obs, _), over, side = env.reset(seed=seed), False, rng.choice([-1, 1])
        while not over:
            action = (side * obs[:1] + 0.03 * rng.standard_normal(1)).astype(np.float32)
            before, (obs, reward, over, cut, _) = obs, env.step(action)
            rows.append((before, action, np.float32(reward), over, cut, obs))
    *columns, after = (np.array(column) for column in zip(*rows))
    with h5py.File(path, "w") as file:
        for name, column in zip(("observations", "actions", "rewards", "terminals", "timeouts"), columns):
            file.create_dataset(name, data=column, compression="gzip")
        file.create_dataset("last_observations", data=after[columns[3]], compression="gzip")
        file.attrs.update(env_id="algos.environments.detour:Detour-v0", env_kwargs=f'["place={str(place).lower()}"]')


gym.register("Detour-v0", Detour)

if __name__ == "__main__":
    record(sys.argv[1], sys.argv[2:] == ["place"])
