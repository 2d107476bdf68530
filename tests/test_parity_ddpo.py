"""ddpo.py and flow_grpo.py against their authors' formulas in NumPy.

ddpo: the loss of kvablack/ddpo-pytorch at commit 1958463, scripts/train.py and diffusers_patch/ddim_with_logprob.py.
flow_grpo: step and KL of yifan123/flow_grpo at commit ac4c86e, flow_grpo/diffusers_patch/sd3_sde_with_logprob.py and
scripts/train_sd3.py.
"""

import numpy as np
import pytest
import torch
from control import close, float64
from torch.distributions import kl_divergence

from algos import ddpo, flow_grpo


@float64()
@pytest.mark.parametrize("script", ["ddpo"])
def test_the_loss_and_its_gradient(script):
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


def authors(velocity, sigmas, index: int, x, after, level: float):
    """Mean, standard deviation of the step and log-density of `after`. Their time is 1 at the noise, and their velocity
    points to it. The log-density is a mean over dimensions."""
    sigma, dt = sigmas[index], sigmas[index + 1] - sigmas[index]
    std = np.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma))) * level
    mean = x * (1 + std**2 / (2 * sigma) * dt) + velocity * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
    scale = std * np.sqrt(-dt)
    logps = -((after - mean) ** 2) / (2 * scale**2) - np.log(scale) - np.log(np.sqrt(2 * np.pi))
    return mean, std, scale, logps.mean(1)


@float64()
@pytest.mark.parametrize("num_steps", [1, 4, 10])
@pytest.mark.parametrize("level", [0.3, 0.7, 1.2])
@pytest.mark.parametrize("script", ["flow_grpo"])
def test_the_step_its_density_and_its_kl(script, num_steps, level):
    """Their KL lacks the length of the step, and is a mean over dimensions."""
    rng, sigmas = np.random.default_rng(0), np.linspace(1, 0, num_steps + 1)
    args, prompts = flow_grpo.Args(num_steps=num_steps, noise_level=level), torch.zeros(8, dtype=torch.long)
    for index in range(num_steps):
        x, after, v, v_ref = rng.normal(size=(4, 8, 2))
        ours, reference = (
            flow_grpo.next_point(lambda *_, v=v: torch.tensor(v), torch.tensor(x), torch.full((8,), index / num_steps),
                                 prompts, args)
            for v in (v, v_ref)
        )  # fmt: skip
        mean, std, scale, logps = authors(-v, sigmas, index, x, after, level)
        mean_ref = authors(-v_ref, sigmas, index, x, after, level)[0]
        close(ours.mean, mean, 1e-12)
        close(ours.stddev, np.full((8, 2), scale), 1e-12)
        close(ours.log_prob(torch.tensor(after)).sum(1) / 2, logps, 1e-9)
        kl = ((mean - mean_ref) ** 2).mean(1) / (2 * std**2)
        close(kl_divergence(ours, reference).sum(1) / num_steps / 2, kl, 1e-12)
