"""diffusion_policy.py and dppo.py do what their authors' code does, commits 5ba07ac and cc7234a: denoising steps by the
scheduler of diffusers, the averages' decay, windows; log-densities and loss of chains of steps.

Recorded by benchmarks/peers/make_diffusion_fixtures.py and make_dppo_fixtures.py.
"""

import numpy as np
import pytest
import torch
from control import close
from parity import recorded

from algos import diffusion_policy, dppo
from benchmarks.peers import make_diffusion_fixtures as authors
from benchmarks.peers import make_dppo_fixtures as of_dppo
from utils.offline import Dataset


@pytest.mark.parametrize("steps", authors.LEVELS)
@pytest.mark.parametrize("script", ["diffusion_policy"])
def test_denoising_steps(script, steps, monkeypatch):
    """A step back from their prediction and noise, and plans with noise. Their levels begin with 0."""
    args, asked = diffusion_policy.Args(diffusion_steps=steps, horizon=2), []
    inputs, theirs = recorded(authors, steps)
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


@pytest.mark.parametrize("script", ["diffusion_policy"])
def test_decay_of_the_average_and_windows(script):
    """Theirs are ours but for the rows of which T_a or more actions would be repeated at the end."""
    theirs = recorded(authors, 1)[1]
    close([diffusion_policy.ema_decay(n, 0.75) for n in range(40)], theirs["decays"], 1e-12)
    rows, ends = np.zeros((sum(authors.LENGTHS), 1), np.float32), np.cumsum(authors.LENGTHS)
    data = Dataset(rows, rows, rows, rows, rows, rows, ends - authors.LENGTHS)
    repeated = np.arange(len(rows)) + authors.H - authors.T_O - (np.repeat(ends, authors.LENGTHS) - 1)
    ours = diffusion_policy.plan_rows(data, authors.T_O, authors.H)
    assert ours[repeated < authors.T_A].tolist() == theirs["windows"].tolist()
    assert ours[[20, 34]].tolist() == [[20, *range(20, 30), *[29] * 5], [33, *[34] * 15]]


@pytest.mark.parametrize("size", of_dppo.SIZES)
@pytest.mark.parametrize("script", ["dppo"])
def test_log_densities_and_loss(script, size, monkeypatch):
    """Their means over the numbers of a plan are our sums."""
    inputs, found = recorded(of_dppo, size)
    weight, obs, chains, old_logps, *others = inputs.values()
    args = dppo.Args(diffusion_steps=of_dppo.K, num_finetuned_steps=of_dppo.LEARNED, min_std=of_dppo.MIN_STD,
                     horizon=size, n_obs_steps=1, n_action_steps=1, denoiser_size=4, gamma_denoising=of_dppo.GAMMA,
                     clip_coef=of_dppo.CLIP, vf_coef=1.0, normalize_advantages=False)  # fmt: skip
    agent = dppo.Agent(of_dppo.D, 1, args)
    monkeypatch.setattr(agent.actor, "net", torch.nn.Identity())
    monkeypatch.setattr(agent.actor.net, "forward", lambda x: (x @ weight.T).tanh())
    monkeypatch.setattr(agent, "value", lambda obs: others[2])
    logps = agent.log_prob(obs, chains)
    close(logps, found[f"logps_{size}"].sum(-1), 2e-5)
    if size == 1:  # of each plan once, of theirs once for each denoising step: both are means
        loss, numbers = dppo.dppo_loss(agent, args, obs, chains, logps + old_logps, *others)
        theirs = [found[f"{name}_1"] for name in ("policy_loss", "value_loss", "approx_kl", "clip_fraction")]
        close([loss.item(), *numbers], [theirs[0] + theirs[1], *theirs[2:]], 1e-5)
