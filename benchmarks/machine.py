"""What a run is made on: the cores that it may use, versions, commit, hardware."""

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from pathlib import Path

import torch


def cores() -> int:
    """The cores that this process may use: under taskset or a batch system, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> dict:
    """Where a number comes from: versions, commit, machine."""
    packages = ("torch", "transformers", "datasets", "numpy", "accelerate", "peft", "trl", "gymnasium", "mujoco")
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(name)}
    here = Path(__file__).resolve().parent
    try:
        git = subprocess.run(["git", "-C", here, "describe", "--always", "--dirty"], capture_output=True, text=True)
        commit = git.stdout.strip() or None
    except OSError:  # no git on this machine
        commit = None
    machine = {"system": platform.platform(), "cores": cores(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return {"versions": versions, "commit": commit, "machine": machine}
