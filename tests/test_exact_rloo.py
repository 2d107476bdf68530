"""rloo.update against enumeration: every group of completions of a tabular model, weighted by its probability.

As tests/test_exact_grpo.py; expected values come from numpy.
"""

import math

import numpy as np
import pytest
import torch
from groups import GROUPS, OTHER, REWARDS, TABLE, P, batches, close, expectation, make_batch, rewards_of, stepping
from tabular import COMPLETIONS, EOS, OUTSIDE, PREFIXES, gradients, log_probs, probability
from tabular import random_table as random_logits

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
    slopes = np.zeros_like(TABLE)
    for index in np.ndindex(TABLE.shape):
        step = np.zeros_like(TABLE)
        step[index] = 1e-6
        slopes[index] = (objective(TABLE + step, beta) - objective(TABLE - step, beta)) / 2e-6
    np.testing.assert_allclose(total, slopes, rtol=0, atol=1e-8)
    close(total[:, OUTSIDE], 0.0)


def test_the_penalty_counts_every_token():
    """On two completions of different lengths, one cut off, by hand: a per-token or masked penalty is another one."""
    batch = make_batch([((1,), (0, 2)), ((2, 1), (0, 1))], [[1.0, 0.0], [0.5, 0.25]], ref=OTHER)
    pairs = [(0, (1,)), (0, (0, 2)), (1, (2, 1)), (1, (0, 1))]
    divergence = [(log_probs(TABLE, p, c) - log_probs(OTHER, p, c)).sum() for p, c in pairs]
    close(rloo.penalised(batch, BETA), np.array([1.0, 0.0, 0.5, 0.25]) - BETA * np.array(divergence))
    close(rloo.penalised(batch._replace(ref_logps=None), 0.0), [1.0, 0.0, 0.5, 0.25])
    close(run_update(batch, beta=BETA)[1]["kl"], np.mean(divergence))
    assert "kl" not in run_update(batch._replace(ref_logps=None))[1]


def test_advantages_by_hand():
    """Reward minus the mean of the others; NaN left out and 0; a reward that is alone teaches nothing."""
    nan = math.nan
    rewards = torch.tensor([[1.0, 0.0, 0.0, 3.0], [2.0, nan, 4.0, nan], [5.0] * 4, [nan, 7.0, nan, nan], [nan] * 4])
    expected = [[0.0, -4 / 3, -4 / 3, 8 / 3], [-2.0, 0.0, 2.0, 0.0], [0.0] * 4, [0.0] * 4, [0.0] * 4]
    close(rloo.advantages(rewards), expected)


def own_step(groups, rewards, table, old, low=0.2, high=0.2) -> tuple[np.ndarray, list[bool]]:
    """Movement of one plain step in numpy, with the ratio of whole completions; and which were cut."""
    size, result, cuts = len(groups[0]), np.zeros_like(table), []
    for p, group in enumerate(groups):
        for i, c in enumerate(group):
            advantage = rewards[p][i] - (sum(rewards[p]) - rewards[p][i]) / (size - 1)
            ratio = np.exp(log_probs(table, p, c).sum() - log_probs(old, p, c).sum())
            cuts.append(ratio > 1 + high if advantage > 0 else ratio < 1 - low)
            result += (0 if cuts[-1] else ratio * advantage) * gradients(table, p, c).sum(0) / (P * size)
    return result, cuts


def test_second_epoch_clips_whole_completions():
    """Two epochs equal two numpy steps with ratios to the policy before the first, and a lower and a wider upper clip.
    What the sampler said, rounded otherwise in bfloat16, is in metrics only: the first ratio is 1, nothing is cut."""
    groups, rate = [COMPLETIONS] * P, 2.0
    rewards, old = rewards_of(groups, REWARDS), TABLE + 0.3 * random_logits(6)
    first, _ = own_step(groups, rewards, TABLE, TABLE, 0.1, 0.3)
    second, cuts = own_step(groups, rewards, TABLE + rate * first, TABLE, 0.1, 0.3)
    moved, metrics = run_update(make_batch(groups, rewards, old=old), rate=rate, num_iterations=2, epsilon=0.1,
                                epsilon_high=0.3)  # fmt: skip
    close(moved, first + second)
    assert 0 < sum(cuts) < len(cuts)
    close(metrics["clip_fraction"], np.mean(cuts))
    close(metrics["grad_norm"], np.linalg.norm(second))
    rows = [(p, c) for p in range(P) for c in COMPLETIONS]
    now, then, before = (np.concatenate([log_probs(t, p, c) for p, c in rows])
                         for t in (TABLE + rate * first, TABLE, old))  # fmt: skip
    close(metrics["approx_kl"], (np.exp(now - before) - (now - before) - 1).mean())
    close(metrics["sampler_gap"], abs(then - before).mean())


@pytest.mark.parametrize("pad", [0, EOS])
def test_first_eos_is_trained_and_nothing_after_it(pad):
    """Also where padding is the EOS id."""
    groups, rewards = [((1,), (0, 2)), ((2, 1), (1,))], [[1.0, 0.0], [0.0, 1.0]]
    moved, _ = run_update(make_batch(groups, rewards, pad=pad))
    close(moved, own_step(groups, rewards, TABLE, TABLE)[0])
    close(moved[:, OUTSIDE], 0.0)
    assert moved[0, 0, EOS] > 0.01 and moved[1, PREFIXES.index((2,)), EOS] < -0.001


def test_skipped_rewards_teach_nothing():
    rewards = [[0.3, math.nan, 1.0], [math.nan, 0.2, math.nan]]
    moved, _ = run_update(make_batch(GROUPS, rewards, ref=OTHER), beta=0.0)
    a, _, b = GROUPS[0]
    close(moved, (0.3 - 1.0) / 6 * gradients(TABLE, 0, a).sum(0) + (1.0 - 0.3) / 6 * gradients(TABLE, 0, b).sum(0))
