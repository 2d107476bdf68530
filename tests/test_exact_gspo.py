"""GSPO: values by hand, and updates against the reference."""

import numpy as np
import pytest
import torch
from groups import OTHER, TABLE, P, close, stale, twice
from reference.grpo import Rule, clipped
from tabular import COMPLETIONS, log_probs, probability

from algos import gspo

pytestmark = pytest.mark.usefixtures("float64")


def whole(d, a, s):
    """One ratio for a completion, the geometric mean; the clip takes it whole."""
    slope, cut = clipped(d.mean(keepdims=True), a, s)
    return slope.repeat(len(d)), cut


@stale
def test_updates_equal_the_reference_s(case):
    """Ratios are to the policy before the first step and not to the sampler; the penalty is per token."""
    rule = Rule(slope=whole, fixed=dict(aggregation="sequence"), ratio_to="start", kl_to="start")
    assert 0 < twice(gspo, rule, case, epsilon=0.02, epsilon_high=0.06, beta=0.05)["clip_fraction"] < 1


@pytest.mark.parametrize("advantage, cut", [(2.0, True), (-2.0, False)])
def test_the_ratio_of_a_completion_by_hand(advantage, cut):
    """Three tokens, of which two are trained, with ratios 2 and 0.72: the geometric mean is 1.2. What a masked token
    says is nothing."""
    old = torch.tensor([[0.25, 0.5, 0.1]]).log()
    logps = torch.tensor([[0.5, 0.36, 0.9]]).log().requires_grad_()
    loss, clipped = gspo.policy_loss(logps, old, torch.tensor([[advantage]]), torch.tensor([[1, 1, 0]]), 0.05, 0.1)
    loss.sum().backward()
    close(loss.item(), -(1.1 if cut else 1.2) * advantage)
    close(logps.grad, [[0.0] * 3 if cut else [-1.2 * advantage / 2] * 2 + [0.0]])
    assert clipped.item() == cut


def test_the_ratio_is_no_importance_weight():
    """Its mean under the old policy is not 1, as that of the product of ratios is: over all completions."""
    for p in range(P):
        mean = product = 0.0
        for c in COMPLETIONS:
            now, old = (torch.tensor(log_probs(table, p, c))[None] for table in (OTHER, TABLE))
            loss, _ = gspo.policy_loss(now, old, torch.tensor([[-1.0]]), torch.ones_like(now), 1.0, 1e9)
            close(loss.item(), np.exp((log_probs(OTHER, p, c) - log_probs(TABLE, p, c)).mean()))
            mean += probability(TABLE, p, c) * loss.item()
            product += probability(TABLE, p, c) * (now - old).sum().exp().item()
        close(product, 1.0)
        assert abs(mean - 1) > 0.01
