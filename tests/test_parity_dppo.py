"""dppo.py's log-densities and loss are those of its authors' code, commit cc7234a, where their means over the numbers
of a plan are our sums. Recorded by benchmarks/peers/make_dppo_fixtures.py."""

import pytest
import torch
from control import close
from parity import recorded

from algos import dppo
from benchmarks.peers import make_dppo_fixtures as authors


@pytest.mark.parametrize("size", authors.SIZES)
def test_log_densities_and_loss(size, monkeypatch):
    inputs, found = recorded(authors, size)
    weight, obs, chains, old_logps, *others = inputs.values()
    args = dppo.Args(diffusion_steps=authors.K, num_finetuned_steps=authors.LEARNED, min_std=authors.MIN_STD,
                     horizon=size, n_obs_steps=1, n_action_steps=1, denoiser_size=4, gamma_denoising=authors.GAMMA,
                     clip_coef=authors.CLIP, vf_coef=1.0, normalize_advantages=False)  # fmt: skip
    agent = dppo.Agent(authors.D, 1, args)
    monkeypatch.setattr(agent.actor, "net", torch.nn.Identity())
    monkeypatch.setattr(agent.actor.net, "forward", lambda x: (x @ weight.T).tanh())
    monkeypatch.setattr(agent, "value", lambda obs: others[2])
    logps = agent.log_prob(obs, chains)
    close(logps, found[f"logps_{size}"].sum(-1), 2e-5)
    if size == 1:  # of each plan once, of theirs once for each denoising step: both are means
        loss, numbers = dppo.dppo_loss(agent, args, obs, chains, logps + old_logps, *others)
        theirs = [found[f"{name}_1"] for name in ("policy_loss", "value_loss", "approx_kl", "clip_fraction")]
        close([loss.item(), *numbers], [theirs[0] + theirs[1], *theirs[2:]], 1e-5)
