"""A replay buffer on the device, and on the disk in files of what was new at each save."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.checkpoint import write_atomically
from utils.errors import UserError


class ReplayBuffer:
    """A ring of the newest `capacity` rows, each a tuple of float32 vectors of `sizes` numbers, side by side in memory.

    `save` writes the rows since the last save to a file of `folder`, which is named after the first one's number, and
    returns how many rows there have been in all. The checkpoint keeps this number, and `load` needs no more. Files that
    none of the newest `keep` checkpoints and the one to come needs are deleted: the folder holds `capacity` rows and
    those of `keep` + 2 saves at most.
    """

    def __init__(self, capacity: int, sizes: tuple[int, ...], device: torch.device):
        self.capacity, self.sizes, self.total, self.saves = capacity, sizes, 0, [0]
        try:
            self.rows = torch.empty(capacity, sum(sizes), device=device)
        except RuntimeError as error:
            needed = f"--buffer-size {capacity} needs {capacity * sum(sizes) * 4e-9:,.1f} GB of memory"
            raise UserError(f"{needed}, more than {device} has: give a smaller one") from error

    def add(self, *parts: np.ndarray) -> None:
        """Appends rows: one (N, size) array for each of `sizes`."""
        rows: Any = np.concatenate(parts, 1, dtype=np.float32)
        memory: Any = self.rows
        count = len(rows)
        if memory.is_cpu:  # NumPy copies one row three times as fast as torch
            memory = memory.numpy()
        else:
            rows = torch.from_numpy(rows)
        if count > self.capacity:  # the newest stay
            self.total += count - self.capacity
            rows, count = rows[-self.capacity :], self.capacity
        start = self.total % self.capacity
        first = min(count, self.capacity - start)
        memory[start : start + first] = rows[:first]
        if first < count:
            memory[: count - first] = rows[first:]
        self.total += count

    def sample(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Uniform with replacement: one (batch_size, size) tensor for each of `sizes`."""
        held = min(self.total, self.capacity)
        index = torch.randint(held, (batch_size,), generator=generator, device=self.rows.device)
        return self.rows[index].split(self.sizes, 1)

    def newest(self, count: int) -> Tensor:
        """The newest `count` rows, oldest first, on the CPU."""
        index = torch.arange(self.total - count, self.total, device=self.rows.device) % self.capacity
        return self.rows[index].cpu()

    def save(self, folder: Path, keep: int) -> int:
        folder.mkdir(exist_ok=True)
        if new := min(self.total - self.saves[-1], self.capacity):
            rows = self.newest(new).numpy().data
            write_atomically(folder / f"{self.total - new:012d}.rows", lambda path: path.write_bytes(rows))
            self.saves = [*self.saves, self.total][-keep - 1 :]
        for path, after in pairwise(sorted(folder.glob("*.rows"))):
            if len(self.saves) > keep and int(after.stem) <= self.saves[0] - self.capacity:
                path.unlink()
        return self.total

    def load(self, folder: Path, total: int) -> None:
        """Raises UserError where rows are missing."""
        width, needed, parts, first = self.rows.shape[1], max(0, total - self.capacity), [], total
        for path in sorted(folder.glob("*.rows"), reverse=True):
            if (start := int(path.stem)) >= total:  # of a killed run
                path.unlink()
            elif first > needed and path.stat().st_size == (first - start) * width * 4:
                parts.append(np.fromfile(path, np.float32).reshape(-1, width))
                first = start
        if first > needed:
            lost = f"{folder} has lost transitions that the checkpoint counts"
            raise UserError(f"{lost}: put it back as it was, or start afresh without --resume")
        self.total = first
        for rows in reversed(parts):
            self.add(rows)
        self.saves = [total]
