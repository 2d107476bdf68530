"""Records D4RL's locomotion suite with sac.py, by D4RL's protocol.

    python benchmarks/record_suite.py --folder data
    python benchmarks/record_suite.py --folder data --envs Hopper-v5 --total-timesteps 2000 --record-steps 500

Of each environment: random, medium, medium-replay, full-replay, expert, and medium-expert, which is medium followed by
expert. About three hours per million steps on two cores. A run that was stopped goes on where it was.
"""

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("observations", "actions", "rewards", "terminals", "timeouts", "last_observations")


def join(parts: list[Path], path: Path) -> None:
    """One collection after the other; the attributes are the last one's."""
    with h5py.File(path, "w") as file:
        for key in KEYS:
            columns = []
            for part in parts:
                with h5py.File(part) as source:
                    columns.append(source[key][:])
            file.create_dataset(key, data=np.concatenate(columns), compression="gzip", shuffle=True)
        with h5py.File(parts[-1]) as source:
            file.attrs.update(source.attrs)


def main(
    folder: Path,
    envs: tuple[str, ...] = ("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5"),
    total_timesteps: int = 1_000_000,
    record_steps: int = 1_000_000,
    seed: int = 1,
) -> None:
    for env_id in envs:
        target = folder / env_id
        if not (target / "expert.hdf5").exists():
            runs = sorted((target / "runs").glob("*/checkpoints"))
            flags = {"env-id": env_id, "total-timesteps": total_timesteps, "record-dataset": target, "seed": seed,
                     "learning-starts": min(10_000, total_timesteps // 10), "eval-every": max(total_timesteps // 50, 1),
                     "record-steps": record_steps, "output-dir": target / "runs"}  # fmt: skip
            flags = {"resume": runs[-1].parent} if runs else flags
            words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
            subprocess.run([sys.executable, ROOT / "algos/sac.py", *words], check=True)
        join([target / "medium.hdf5", target / "expert.hdf5"], target / "medium-expert.hdf5")
        print(f"{env_id}: {', '.join(sorted(path.name for path in target.glob('*.hdf5')))}")


if __name__ == "__main__":
    tyro.cli(main)
