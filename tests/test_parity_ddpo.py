"""ddpo.py against the authors' code, kvablack/ddpo-pytorch at commit 1958463: the formulas of scripts/train.py,
diffusers_patch/ddim_with_logprob.py and stat_tracking.py, in NumPy."""

import numpy as np
import pytest
import torch
from control import close, float64

from algos import ddpo

B, K, D = 32, 5, 2


def theirs(logps, old_logps, advantages, clip_range) -> tuple[float, np.ndarray]:
    """Loss and its gradient by the log-probabilities (B, K), which are means over dimensions. Each of the K timesteps
    has a mean over samples; gradients are averaged over timesteps."""
    ratio, a = np.exp(logps - old_logps), np.clip(advantages, -5, 5)[:, None]
    kept, bounded = -a * ratio, -a * np.clip(ratio, 1 - clip_range, 1 + clip_range)
    return np.maximum(kept, bounded).mean(), np.where(kept >= bounded, kept, 0) / (B * K)


@float64()
@pytest.mark.parametrize("clip", [0.2, 1e-2])
def test_the_loss(clip):
    """Theirs is ours at densities averaged over dimensions, over K. Of sums ours has another ratio: theirs to the power
    of the dimensions, which is what a clip must be translated by."""
    rng = np.random.default_rng(0)
    z, old_z, a = rng.normal(size=(B, K, D)), rng.normal(size=(B, K, D)), rng.normal(size=B)
    z = old_z + 0.1 * z
    by_dimension, old = (-(x**2) / 2 - np.log(0.3) - np.log(2 * np.pi) / 2 for x in (z, old_z))
    expected, gradient = theirs(by_dimension.mean(2), old.mean(2), a, clip)
    logps = torch.tensor(by_dimension.sum(2), requires_grad=True)
    averaged, sums = logps / D, torch.tensor(old.sum(2))
    loss, (approx_kl, clip_fraction) = ddpo.ddpo_loss(averaged, sums / D, torch.tensor(a), clip)
    close(loss / K, expected, 1e-12)
    close(torch.autograd.grad(loss / K, logps)[0] * D, gradient, 1e-12)
    ratio = np.exp(by_dimension.mean(2) - old.mean(2))
    close(clip_fraction, (abs(ratio - 1) > clip).mean(), 1e-7)
    assert 0 < clip_fraction < 1
    close((logps - sums).exp(), ratio**D, 1e-12)
    at_one = torch.tensor(old.sum(2), requires_grad=True)
    ours = torch.autograd.grad(ddpo.ddpo_loss(at_one, sums, torch.tensor(a), clip)[0], at_one)[0]
    close(ours / K, theirs(old.mean(2), old.mean(2), a, clip)[1], 1e-12)


class Tracker:
    """Statistics of a prompt: of its last `buffer` rewards once there are as many, else of the batch."""

    def __init__(self, buffer: int):
        self.buffer, self.seen = buffer, {}

    def update(self, prompts, rewards):
        found = np.empty_like(rewards)
        for c in np.unique(prompts):
            own = rewards[prompts == c]
            self.seen[c] = [*self.seen.get(c, []), *own][-self.buffer :]
            of = rewards if len(self.seen[c]) < self.buffer else self.seen[c]
            found[prompts == c] = (own - np.mean(of)) / (np.std(of) + 1e-6)
        return found


@float64()
def test_the_advantages():
    """With groups as large as their buffer ours are theirs in each update; with smaller ones theirs are the batch's at
    first, but for a tiny constant, and then mix in earlier rewards. Their clip at 5 reaches no group of 26 or fewer."""
    rng = np.random.default_rng(1)
    whole, mixed = Tracker(16), Tracker(16)
    for step in range(2):
        rewards, prompts = rng.normal(size=(3, 16)) + [[0], [5], [-3]] + step, np.arange(3).repeat(16)
        ours = ddpo.advantages(torch.tensor(rewards), "prompt")
        close(ours, whole.update(prompts, rewards.ravel()).reshape(3, 16), 1e-12)
        half = rewards[:, :8]
        found = mixed.update(np.arange(3).repeat(8), half.ravel()).reshape(3, 8)
        assert abs(found - ddpo.advantages(torch.tensor(half), "prompt").numpy()).max() > 0.3
        if step == 0:
            close(found, ddpo.advantages(torch.tensor(half), "batch"), 1e-5)
    outlier = torch.eye(27)[:2]
    assert ddpo.advantages(outlier[:, :26], "prompt").max() < 5 < ddpo.advantages(outlier, "prompt").max()
