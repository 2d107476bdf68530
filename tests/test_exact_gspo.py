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
