"""gkd.py computes what TRL's GKDTrainer.generalized_jsd_loss computes: loss and gradient on the same logits.

Where its beta is 0 or 1 TRL takes the forward or reverse divergence itself, not the limit, which is 0: here these have
names. Its loss is a mean over tokens, --aggregation token.
"""

import pytest
import torch
from parity import recorded

from algos import gkd
from benchmarks.peers import make_trl_gkd_fixtures as peer


def by_script(data: dict, beta: float, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As `update` composes it."""
    kind = {0.0: "forward", 1.0: "reverse"}.get(beta, "jsd")
    args = gkd.Args(divergence=kind, jsd_beta=beta if kind == "jsd" else 0.5, temperature=temperature)
    student, mask = data["student"].clone().requires_grad_(), data["mask"]
    _, _, values = gkd.at_tokens(data["ids"][mask], student[mask], data["teacher"][mask], args)
    loss = (values * gkd.token_weights(mask.double(), "token", 9)[mask]).sum()
    return loss.detach(), torch.autograd.grad(loss, student)[0]


def assert_equal(ours: tuple, theirs: tuple) -> None:
    for mine, other in zip(ours, theirs):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", peer.CASES)
def test_recorded(case):
    inputs, theirs = recorded(peer)
    assert_equal(by_script(inputs, *case), (theirs[f"{case}.loss"], theirs[f"{case}.gradient"]))


@pytest.mark.parametrize("case", peer.CASES)
def test_live(needs_trl, case):
    assert_equal(by_script(peer.inputs(1), *case), peer.by_trl(peer.inputs(1), *case))
