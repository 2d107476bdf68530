"""rloo.update against enumeration: every group of completions of a tabular model, weighted by its probability.

As tests/test_exact_grpo.py; expected values come from numpy.
"""

import math

import numpy as np
import pytest
import torch
from groups import OTHER, REWARDS, TABLE, P, batches, close, expectation, make_batch, rewards_of, stale, stepping, twice
from reference.grpo import Rule, clipped
from tabular import COMPLETIONS, OUTSIDE, gradients, log_probs, probability, slope

from algos import rloo

pytestmark = pytest.mark.usefixtures("float64")
BETA = 0.7
run_update = stepping(rloo)


def objective(table: np.ndarray, beta: float) -> float:
    """E[reward] - beta KL(pi || pi_ref) of whole completions, mean over prompts: by enumeration."""

    def value(p, c):
        return REWARDS[p][c] - beta * (log_probs(table, p, c) - log_probs(OTHER, p, c)).sum()

    return sum(probability(table, p, c) * value(p, c) for p in range(P) for c in COMPLETIONS) / P


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("beta", [0.0, BETA])
def test_expected_update_is_the_gradient_of_the_regularised_objective(group_size, beta):
    """Of no bound and no surrogate: it equals the central differences of the enumerated objective, and the score
    function's expectation."""
    total = np.zeros_like(TABLE)
    for groups, weight in batches(group_size, joint=False):
        batch = make_batch(groups, rewards_of(groups, REWARDS), ref=OTHER if beta else None)
        total += weight * run_update(batch, beta=beta)[0]
    close(total, expectation(lambda p, c: gradients(TABLE, p, c).sum(0) * (
        REWARDS[p][c] - beta * (log_probs(TABLE, p, c) - log_probs(OTHER, p, c)).sum())))  # fmt: skip
    slopes = slope(lambda table: objective(table, beta), TABLE)
    np.testing.assert_allclose(total, slopes, rtol=0, atol=1e-8)
    close(total[:, OUTSIDE], 0.0)


def test_advantages_by_hand():
    """Reward minus the mean of the others; NaN left out and 0; a reward that is alone teaches nothing."""
    nan = math.nan
    rewards = torch.tensor([[1.0, 0.0, 0.0, 3.0], [2.0, nan, 4.0, nan], [5.0] * 4, [nan, 7.0, nan, nan], [nan] * 4])
    expected = [[0.0, -4 / 3, -4 / 3, 8 / 3], [-2.0, 0.0, 2.0, 0.0], [0.0] * 4, [0.0] * 4, [0.0] * 4]
    close(rloo.advantages(rewards), expected)


def others(rows, s) -> list[float]:
    """Rewards less the divergence, less the mean of the others' of the group."""
    found, values = [], [row.reward - s.beta * (row.sampler - row.ref).sum() for row in rows]
    for i, row in enumerate(rows):
        rest = [x for j, x in enumerate(values) if j != i and rows[j].p == row.p and not math.isnan(x)]
        found.append(values[i] - np.mean(rest) if rest and not math.isnan(values[i]) else 0.0)
    return found


def whole(d, a, s):
    slope, cut = clipped(d.sum(keepdims=True), a, s)
    return slope.repeat(len(d)), cut


@stale
def test_updates_equal_the_reference_s(case):
    """Ratios of whole completions, to the policy before the first step. What the sampler said, rounded otherwise in
    bfloat16, is in the penalty and in metrics only."""
    rule = Rule(others, whole, lambda d, s: 0.0 * d, fixed=dict(aggregation="row"), ratio_to="start",
                norm=lambda norms: norms[-1], different=("kl",))  # fmt: skip
    assert 0 < twice(rloo, rule, case, beta=0.3)["clip_fraction"] < 1
