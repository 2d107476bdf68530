"""A replay buffer on the device, whose file grows by what is new instead of being written again."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from utils.errors import UserError


class ReplayBuffer:
    """A ring of the newest `capacity` rows, each a tuple of float32 vectors of `sizes` numbers, side by side in memory.

    `save` appends the rows since the last save to a file and returns how many rows there have been in all. The
    checkpoint keeps this number, and `load` needs no more: it cuts off later rows, of a killed run.
    """

    def __init__(self, capacity: int, sizes: tuple[int, ...], device: torch.device):
        self.capacity, self.sizes, self.total, self.saved = capacity, sizes, 0, 0
        try:
            self.rows = torch.empty(capacity, sum(sizes), device=device)
        except RuntimeError as error:
            needed = f"--buffer-size {capacity} needs {capacity * sum(sizes) * 4e-9:,.1f} GB of memory"
            raise UserError(f"{needed}, more than {device} has: give a smaller one") from error

    def add(self, *parts: np.ndarray) -> None:
        """Appends rows: one (N, size) array for each of `sizes`."""
        rows = torch.from_numpy(np.concatenate(parts, 1, dtype=np.float32))
        self.total += max(0, len(rows) - self.capacity)  # more rows at once than it holds: the newest stay
        rows = rows[-self.capacity :]
        start = self.total % self.capacity
        first = min(len(rows), self.capacity - start)
        self.rows[start : start + first] = rows[:first]
        self.rows[: len(rows) - first] = rows[first:]
        self.total += len(rows)

    def sample(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Uniform with replacement: one (batch_size, size) tensor for each of `sizes`."""
        held = min(self.total, self.capacity)
        index = torch.randint(held, (batch_size,), generator=generator, device=self.rows.device)
        return self.rows[index].split(self.sizes, 1)

    def newest(self, count: int) -> Tensor:
        """The newest `count` rows, oldest first, on the CPU."""
        index = torch.arange(self.total - count, self.total, device=self.rows.device) % self.capacity
        return self.rows[index].cpu()

    def save(self, path: Path) -> int:
        new, width = min(self.total - self.saved, self.capacity), self.rows.shape[1]
        with open(path, "r+b" if path.exists() else "w+b") as file:
            file.seek((self.total - new) * width * 4)  # beyond the end where more than `capacity` rows are new
            file.write(self.newest(new).numpy().data)
            file.truncate()
            os.fsync(file.fileno())
        self.saved = self.total
        return self.total

    def load(self, path: Path, total: int) -> None:
        """Raises UserError where the file is not there or too short."""
        held, width = min(total, self.capacity), self.rows.shape[1]
        if not path.is_file() or path.stat().st_size < total * width * 4:
            lost = f"{path} has lost transitions that the checkpoint counts"
            raise UserError(f"{lost}: put it back as it was, or start afresh without --resume")
        rows = np.fromfile(path, np.float32, held * width, offset=(total - held) * width * 4).reshape(held, width)
        self.total = total - held
        self.add(rows)
        self.saved = total
