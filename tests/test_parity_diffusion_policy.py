"""diffusion_policy.py does what its authors' code does, commit 5ba07ac, and the scheduler of diffusers that it takes:
denoising steps, the averages' decay, windows. Recorded by benchmarks/peers/make_diffusion_fixtures.py."""

import numpy as np
import pytest
import torch
from control import close
from parity import recorded

from algos import diffusion_policy
from benchmarks.peers import make_diffusion_fixtures as authors
from utils.offline import Dataset


@pytest.mark.parametrize("steps", authors.LEVELS)
def test_denoising_steps(steps, monkeypatch):
    """A step back from their prediction and noise, and plans with noise. Their levels begin with 0."""
    args, (inputs, theirs), asked = (
        diffusion_policy.Args(diffusion_steps=steps, horizon=2),
        recorded(authors, steps),
        [],
    )
    actor, obs = diffusion_policy.Actor(3, authors.SIZE // 2, args), torch.zeros(authors.B, 6)
    columns = [inputs[name] for name in ("x", "predicted", "noise", "plan")]
    columns += [theirs[f"{name}_{steps}"] for name in ("before", "noisy")]
    for t, x, predicted, noise, plan, before, noisy in zip(authors.LEVELS[steps], *columns):
        monkeypatch.setattr(actor, "forward", lambda obs, x, k, p=predicted: asked.append(x) or p)
        k = torch.full((authors.B, 1), t + 1)
        mean, std = actor.step(obs, x, k)
        close(mean + std * noise, before, 1e-5)
        diffusion_policy.noise_loss(actor, diffusion_policy.Windows(obs, plan), noise, k)
        close(asked[-1], noisy, 1e-6)


def test_decay_of_the_average_and_windows():
    """Theirs are ours but for the rows of which T_a or more actions would be repeated at the end."""
    theirs = recorded(authors, 1)[1]
    close([diffusion_policy.ema_decay(n, 0.75) for n in range(40)], theirs["decays"], 1e-12)
    rows, ends = np.zeros((sum(authors.LENGTHS), 1), np.float32), np.cumsum(authors.LENGTHS)
    data = Dataset(rows, rows, rows, rows, rows, rows, ends - authors.LENGTHS)
    repeated = np.arange(len(rows)) + authors.H - authors.T_O - (np.repeat(ends, authors.LENGTHS) - 1)
    ours = diffusion_policy.plan_rows(data, authors.T_O, authors.H)
    assert ours[repeated < authors.T_A].tolist() == theirs["windows"].tolist()
    assert ours[[20, 34]].tolist() == [[20, *range(20, 30), *[29] * 5], [33, *[34] * 15]]
