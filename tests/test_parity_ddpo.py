"""The loss of ddpo.py against that of the authors' code in NumPy: kvablack/ddpo-pytorch at commit 1958463,
scripts/train.py and diffusers_patch/ddim_with_logprob.py."""

import numpy as np
import torch
from control import close, float64

from algos import ddpo


@float64()
def test_the_loss_and_its_gradient():
    """Theirs has means over dimensions, and means over the steps where ours has sums: at densities that are divided by
    the dimensions it is ours over the steps."""
    rng, clip = np.random.default_rng(0), 0.05
    old, a = rng.normal(size=(32, 5, 2)), rng.normal(size=32)
    logps = torch.tensor(old + 0.1 * rng.normal(size=old.shape), requires_grad=True)
    ratio, minus = np.exp(logps.detach().numpy().mean(2) - old.mean(2)), -np.clip(a, -5, 5)[:, None]
    kept, bounded = minus * ratio, minus * np.clip(ratio, 1 - clip, 1 + clip)
    loss, (_, clip_fraction) = ddpo.ddpo_loss(logps.sum(2) / 2, torch.tensor(old.sum(2) / 2), torch.tensor(a), clip)
    close(loss / 5, np.maximum(kept, bounded).mean(), 1e-12)
    gradient = np.where(kept >= bounded, kept, 0)[:, :, None] / 2 / ratio.size
    close(torch.autograd.grad(loss / 5, logps)[0], np.broadcast_to(gradient, old.shape), 1e-12)
    close(clip_fraction, (abs(ratio - 1) > clip).mean(), 1e-7)
    assert 0.1 < clip_fraction < 0.9
