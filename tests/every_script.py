"""Every script in algos/ with its small arguments, for tests that all scripts must pass."""

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType

import pytest
from small_data import pendulum

from tests.specs import SPECS

NAMES = list(SPECS)
every_script = pytest.mark.parametrize("algo", NAMES)


def script(algo: str, folder: Path) -> tuple[ModuleType, list]:
    """The script's module and arguments of a run of about a second; `folder` gets the dataset where it needs one."""
    if package := SPECS[algo].needs:
        pytest.importorskip(package, reason=f"not run: {package} is not installed")
    more = ["--dataset", pendulum(folder / "pendulum.hdf5")] if "dataset" in options(algo) else []
    return importlib.import_module(f"algos.{algo}"), [*SPECS[algo].small.split(), *more]


def options(algo: str) -> set[str]:
    return {field.name for field in dataclasses.fields(importlib.import_module(f"algos.{algo}").Args)}
