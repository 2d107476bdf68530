"""Every script in algos/ with its small arguments, for tests that all scripts must pass."""

import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest
from small_data import pendulum

from tests.specs import SPECS, line_of, options

NAMES = list(SPECS)
every_script = pytest.mark.parametrize("algo", NAMES)


def script(algo: str, folder: Path) -> tuple[ModuleType, list]:
    """The script's module and arguments of a run of about a second; `folder` gets the dataset where it needs one."""
    if package := SPECS[algo].needs:
        pytest.importorskip(package, reason=f"not run: {package} is not installed")
    more = ["--dataset", pendulum(folder / "pendulum.hdf5")] if "dataset" in options(algo) else []
    return importlib.import_module(f"algos.{algo}"), [*SPECS[algo].small.split(), *more]


def sharing(root: str, *functions: str) -> list[str]:
    """The script and its descendants that have functions of these names and parameters, whatever stands in them."""

    def parameters(algo: str) -> list:
        found = [vars(importlib.import_module(f"algos.{algo}")).get(name) for name in functions]
        return [f and tuple(inspect.signature(f).parameters) for f in found]

    return [algo for algo in NAMES if root in line_of(algo) and parameters(algo) == parameters(root)]


def stand_in(root: str, *functions: str):
    """Fixture `script`: the module under the root's name is in turn each script that a test runs on. A test says which
    by `with_function`; else it is each of `sharing(root, *functions)`, and the root alone where none is named."""

    @pytest.fixture(autouse=True, params=sharing(root, *functions) if functions else [root])
    def script(request, monkeypatch) -> str:
        if package := SPECS[request.param].needs:
            pytest.importorskip(package, reason=f"not run: {package} is not installed")
        monkeypatch.setattr(request.module, root, importlib.import_module(f"algos.{request.param}"))
        return request.param

    return script


def with_function(root: str, *names: str):
    """For a test of a file with `stand_in`: it tests these functions, and runs on each of `sharing(root, *names)`."""
    return pytest.mark.parametrize("script", sharing(root, *names), indirect=True)
