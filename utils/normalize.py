"""Running mean and variance of a stream of batches."""

import numpy as np
import torch


class RunningMeanStd:
    """Mean and (population) variance over all rows seen so far, in float64 (Chan et al. 1979, parallel variance).

    The first rows weigh as if 1e-4 rows of mean 0 and variance 1 had come before, as in OpenAI's baselines.
    """

    def __init__(self, shape: tuple[int, ...] = ()):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, batch: np.ndarray) -> None:
        """batch: (rows, *shape)."""
        rows = len(batch)
        mean = np.add.reduce(batch, 0, dtype=np.float64) / rows
        deviations = batch - mean
        squares, delta, total = np.add.reduce(deviations * deviations, 0), mean - self.mean, self.count + rows
        # new arrays, never in place: a state taken before stays what it was
        self.var = (self.var * self.count + squares + delta * delta * (self.count * rows / total)) / total
        self.mean = self.mean + delta * (rows / total)
        self.count = total

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in ("mean", "var", "count")}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.mean, self.var, self.count = state["mean"].numpy(), state["var"].numpy(), state["count"].item()
