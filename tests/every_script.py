"""Every script with small arguments, for tests that all scripts must pass. A new one is a row of helpers.SMALL."""

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType

import pytest
from helpers import REPO, SMALL
from small_data import pendulum

ROWS = SMALL | {
    "ppo_atari": [*SMALL["ppo"], *"--total-timesteps 96 --hidden-size 8 --eval-episodes 1 --env-kwargs".split(),
                  "max_num_frames_per_episode=200"],
}  # fmt: skip
NAMES = sorted(path.stem for path in (REPO / "algos").glob("*.py"))
every_script = pytest.mark.parametrize("algo", NAMES)


def script(algo: str, folder: Path) -> tuple[ModuleType, list]:
    """The script's module and arguments of a run of about a second; `folder` gets the dataset where it needs one."""
    if algo == "ppo_atari":
        pytest.importorskip("ale_py", reason="not run: ale_py is not installed")
    assert algo in ROWS, f"give {algo} a row in helpers.SMALL"
    module = importlib.import_module(f"algos.{algo}")
    more = ["--dataset", pendulum(folder / "pendulum.hdf5")] if "dataset" in options(algo) else []
    return module, [*ROWS[algo], *more]


def options(algo: str) -> set[str]:
    return {field.name for field in dataclasses.fields(importlib.import_module(f"algos.{algo}").Args)}
