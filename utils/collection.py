"""Collections of transitions in one HDF5 file with D4RL's keys, so that anything that reads D4RL's files reads ours.

    observations (n, D), actions (n, A) in the environment's units, rewards (n,)      float32
    terminals (n,), timeouts (n,)      bool: the episode ended here by itself; it was cut off here
    last_observations (e, D)           what the last step of each of the e episodes led to, which D4RL leaves out

Next observations are not stored: they are the row after, or the episode's last observation. Attributes say where the
data comes from.
"""

from pathlib import Path

import numpy as np

from utils.checkpoint import write_atomically


def save_collection(path: Path, obs, actions, rewards, terminals, next_obs, about: dict) -> None:
    """Writes transitions that follow each other: (n, D), (n, A), (n,), (n,) bool, (n, D). An episode was cut off where
    it did not end but the next row does not begin where this one led to. `about`: attributes, numbers or text."""
    import h5py  # only collections need it

    follows = np.append((next_obs[:-1] == obs[1:]).all(1), False)
    columns = {"observations": obs, "actions": actions, "rewards": rewards, "terminals": terminals,
               "timeouts": ~follows & ~terminals, "last_observations": next_obs[terminals | ~follows]}  # fmt: skip

    def write(temporary: Path) -> None:
        with h5py.File(temporary, "w") as file:
            for name, column in columns.items():
                file.create_dataset(name, data=column, compression="gzip", compression_opts=9, shuffle=True)
            file.attrs.update(about)

    write_atomically(path, write)
