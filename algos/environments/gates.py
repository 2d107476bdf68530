"""A task with two right answers, for policies that imitate, and a dataset of our own: throws through one of two gates.

    python algos/environments/gates.py gates.hdf5                     records 2,000 throws: gates.hdf5 in this folder
    python algos/flow_bc.py --dataset algos/environments/gates.hdf5 --max-steps 2000 --eval-every 500
    python algos/bc.py --dataset algos/environments/gates.hdf5 --max-steps 2000 --eval-every 500

Each throw goes through either gate, so their mean hits the wall between. The commands need the current folder to be
this project's.
"""

import sys

import gymnasium as gym
import h5py
import numpy as np


class Gates(gym.Env):
    """An episode is one throw. Observes h, from 0.4 to 0.8: the gates stand at -h and h."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.gate = self.np_random.uniform(0.4, 0.8, 1).astype(np.float32)
        return self.gate, {}

    def step(self, action):
        """The action is where the ball arrives. Reward: 1 within 0.1 of a gate, else 0."""
        hit = bool(abs(abs(float(action[0])) - self.gate[0]) < 0.1)
        return self.gate, float(hit), True, False, {"is_success": hit}


def record(path: str, throws: int = 2_000) -> None:
    """Throws at either gate, with a deviation of 0.03, as a file that offline scripts read."""
    rng, env = np.random.default_rng(0), Gates()
    obs = np.stack([env.reset(seed=i)[0] for i in range(throws)])
    side = rng.choice([-1, 1], (throws, 1))
    actions = (side * obs + 0.03 * rng.standard_normal((throws, 1))).astype(np.float32)
    hit = (abs(abs(actions) - obs) < 0.1)[:, 0]
    over = np.ones(throws, bool)  # each row ends an episode, by itself and not by a time limit
    columns = {"observations": obs, "actions": actions, "rewards": hit.astype(np.float32), "terminals": over,
               "timeouts": ~over, "last_observations": obs}  # fmt: skip
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            file.create_dataset(name, data=column, compression="gzip")
        file.attrs["env_id"] = "algos.environments.gates:Gates-v0"  # scores the policy


gym.register("Gates-v0", Gates)

if __name__ == "__main__":
    record(sys.argv[1])
