"""Checkpoints: written whole or not at all, read back without pickles, with every generator of random numbers."""

import errno
import os
import random
import zipfile
from pathlib import Path

import numpy as np
import torch

from utils.distributed import load_module, load_optimizer
from utils.errors import UserError


def write_atomically(path: Path, write) -> None:
    """`write(temporary_path)`, flushed to the disk, then renamed: a kill leaves the old file or the new."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_checkpoint(folder: Path, step: int, state: dict, keep: int) -> Path:
    """Writes `folder/step-<step>.pt` and deletes all but the newest `keep`. Raises UserError where the disk is full."""
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:08d}.pt"

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:  # given a path, torch would not say what the disk answered
            torch.save(state, file)

    try:
        write_atomically(path, write)
    except (OSError, RuntimeError) as error:
        reason = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(reason, OSError):
            raise
        right = f"make room, then continue with --resume {folder.parent}"
        raise UserError(f"cannot write the checkpoint {path} ({reason.strerror}): {right}") from error
    for old in by_step(folder)[:-keep]:
        old.unlink()
    return path


def by_step(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first, sorted as numbers: as text, step-100000000 precedes step-99999999."""
    return sorted(folder.glob("step-*.pt"), key=lambda path: (len(path.name), path.name))


def restore(state: dict, **parts) -> None:
    """Brings modules, optimizers and generators back to what `state` holds under their names. A tuple of parts, some of
    them perhaps None, is held as a list. Weights that were not saved (frozen ones of --model) stay as they are. Of many
    ranks only rank 0 has the states of modules and optimizers."""
    for name, part in parts.items():
        if isinstance(part, torch.Generator):
            part.set_state(state[name].cpu())
        elif isinstance(part, torch.nn.Module):
            load_module(part, state.get(name, {}))
        elif isinstance(part, tuple):
            there = [one for one in part if one is not None]
            for one, saved in zip(there, state.get(name, [{}] * len(there)), strict=True):
                restore({name: saved}, **{name: one})
        elif isinstance(part, torch.optim.Optimizer):
            load_optimizer(part, state.get(name, {}))
        else:
            part.load_state_dict(state[name])


def load_newest(folder: Path) -> dict:
    """The newest checkpoint that can be read. Damaged newer ones are printed, and renamed once an older one has
    loaded, so that a run never loses its only file.

    Raises UserError where there is none. Errors of disk and memory are raised as they are: the file may be whole.
    """
    damaged = []
    for path in reversed(by_step(folder)):
        try:
            with zipfile.ZipFile(path) as archive:  # torch.load does not compare checksums
                if archive.testzip() is not None:
                    raise zipfile.BadZipFile("a checksum is wrong")
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged archive fails in many ways, a small one with EINVAL
            if isinstance(error, (OSError, MemoryError)) and getattr(error, "errno", None) != errno.EINVAL:
                raise
            print(f"{path} cannot be read ({type(error).__name__}); falling back to the checkpoint before it")
            damaged.append(path)
            continue
        for newer in damaged:
            newer.rename(newer.with_suffix(".damaged"))
        return state
    raise UserError(f"{folder.parent} has no readable checkpoint: start afresh without --resume")


def rng_state() -> dict:
    """The states of Python's, NumPy's and torch's global generators, in types that weights_only loading accepts."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    }


def set_rng_state(state: dict) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    if state["mps"] is not None and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"].cpu())
