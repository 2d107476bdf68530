"""Where a number comes from: versions, commit, machine."""

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch


def cores() -> int:
    """The cores that this process may use: under taskset or a batch system, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> dict:
    packages = ("torch", "transformers", "datasets", "numpy", "peft", "gymnasium")
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(name)}
    here = Path(__file__).resolve().parent
    git = subprocess.run(["git", "-C", here, "describe", "--always", "--dirty"], capture_output=True, text=True)
    machine = {"system": platform.platform(), "cores": cores(), "threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return {"versions": versions, "commit": git.stdout.strip() or None, "machine": machine, "command": sys.argv}
