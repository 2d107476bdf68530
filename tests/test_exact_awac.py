"""awac.py: weights by the public codes' formulas, and whole updates by tests/reference/iql.py. CORL's
updates: test_parity_updates.py; what it shares with iql.py: test_exact_iql.py."""

import numpy as np
import pytest
import torch
from control import close, float64
from scipy import special
from test_exact_iql import updated

from algos import awac
from tests.reference import iql as reference

D, A, H, B = 3, 2, 8, 16


def peers_weights(advantages: np.ndarray, temperature: float) -> dict[str, np.ndarray]:
    """exp: CORL's awac.py, eeeeef2; with 20 for 100 it is min(exp(A / beta), 20) of acme's crr/losses.py, 770bc75, and
    of d3rlpy's crr_impl.py, 38c34b6. binary: heaviside(A, 0) and A > 0 there. softmax: the softmax over the batch of
    rlkit's awac_trainer.py, ac45a9d, times the rows by which its loss multiplies; so too in d3rlpy's awac_impl.py."""
    return {"exp": np.minimum(np.exp(advantages / temperature), 100), "binary": np.heaviside(advantages, 0.0),
            "softmax": special.softmax(advantages / temperature, axis=0) * len(advantages)}  # fmt: skip


@float64()
@pytest.mark.parametrize("temperature", [1e-9, 0.2, 1.0, 5.0])
def test_weights_are_those_of_the_public_codes(temperature):
    """Clipped or not. An advantage of 0 has the binary weight 0; weights of a softmax have the mean 1."""
    advantages = torch.arange(-20, 21)[:, None] / 10
    weights = {kind: awac.policy_weights(advantages, kind, temperature) for kind in ("exp", "binary", "softmax")}
    for kind, expected in peers_weights(advantages.numpy(), temperature).items():
        close(weights[kind], expected)
    assert advantages[20] == weights["binary"][20] == 0 and weights["binary"].sum() == 20
    close(weights["softmax"].mean(), 1.0)


def own(p: dict, batch, args, rate: float, generator) -> tuple[dict, dict]:
    """The critics move first, then the actor by the new critics less the mean over K of its actions, with the noise of
    the generator alone."""

    def value(kind, obs, count):
        pi = reference.policy(p, obs.expand(count, -1, -1))
        noise = torch.randn(count * len(obs), A, generator=generator).view(count, -1, A)
        return smaller(kind, obs.expand(count, -1, -1), (pi.mean + pi.stddev * noise).clamp(-1, 1)).mean(0)

    def smaller(kind, *inputs):
        return torch.stack(reference.critics(p, kind, *inputs)).min(0)[0].detach().numpy()

    p, told = reference.td_step(p, batch, value("targets", batch.next_obs, 1), args, rate)
    q, v = smaller("critics", batch.obs, batch.actions), value("critics", batch.obs, args.num_action_samples)
    weights = lambda a, args: peers_weights(a, args.temperature)[args.weights]  # noqa: E731
    p, more = reference.policy_step(p, batch, q, v, args, rate, weights)
    return reference.lag(p, args), told | more


@float64()
@pytest.mark.parametrize("kind", ["exp", "binary", "softmax"])
def test_update_is_the_reference_s(kind):
    args = awac.Args(gamma=0.9, tau=0.1, hidden_size=H, weights=kind, temperature=0.03, num_action_samples=3)
    ours, theirs = torch.Generator(), torch.Generator()
    clipped = updated(awac, args, ours, own=own, generator=theirs)[-1]["clipped"]
    assert torch.equal(ours.get_state(), theirs.get_state()) and (clipped > 0) == (kind == "exp")
