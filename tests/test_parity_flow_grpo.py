"""The step of flow_grpo.py and its KL against the authors' formulas in NumPy: yifan123/flow_grpo at commit ac4c86e,
flow_grpo/diffusers_patch/sd3_sde_with_logprob.py and scripts/train_sd3.py."""

import numpy as np
import pytest
import torch
from control import close, float64
from torch.distributions import kl_divergence

from algos import flow_grpo


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
def test_the_step_its_density_and_its_kl(num_steps, level):
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
