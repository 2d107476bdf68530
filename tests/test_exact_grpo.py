"""grpo.update against enumeration: every group of completions of a tabular model, weighted by its probability.

`movement` is what one update with plain gradient ascent at rate 1 adds to the table, so its expectation is the gradient
of the objective. Expected values come from numpy: own probabilities, advantages, weights and gradients of log pi.
Children that have the same functions are tested as `grpo`, too.
"""

import math
from itertools import combinations
from typing import get_args

import numpy as np
import pytest
import torch
from every_script import stand_in, with_function
from groups import OTHER, REWARDS, TABLE, P, batches, close, expectation, make_batch, rewards_of, stale, stepping, twice
from reference.grpo import Rule
from reference.grpo import update as second_update
from tabular import COMPLETIONS, EOS, PREFIXES, TabularLM, gradients, log_probs, log_softmax, probability

from algos import grpo
from utils.dist import set_rate
from utils.lm import completion_logps
from utils.rewards import pass_at_k

pytestmark = pytest.mark.usefixtures("float64")
script = stand_in("grpo", "update", "advantages", "token_weights")
L_MAX = 5  # what Args say, longer than any completion
BINARY = [{c: float((i + p) % 3 == 0) for i, c in enumerate(COMPLETIONS)} for p in range(P)]


def run_update(batch, **settings) -> tuple[np.ndarray, dict]:
    """The table's change in one call of update, over the rate; and its metrics."""
    return stepping(grpo, scale_rewards="none", aggregation="constant")(batch, **settings)


def expected_movement(group_size, joint, reward_table, ref=None, temperature=1.0, **settings) -> np.ndarray:
    total = np.zeros_like(TABLE)
    for groups, weight in batches(group_size, joint, TABLE / temperature):
        batch = make_batch(groups, rewards_of(groups, reward_table), ref=ref, temperature=temperature)
        total += weight * run_update(batch, temperature=temperature, **settings)[0]
    return total


def mean_reward(p: int, table=TABLE) -> float:
    return sum(probability(table, p, c) * REWARDS[p][c] for c in COMPLETIONS)


def test_table_model_equals_numpy():
    """Log-probabilities and gradients of the torch model are those of numpy; probabilities sum to 1."""
    assert {len(c) for c in COMPLETIONS} == {1, 2} and {EOS in c for c in COMPLETIONS} == {True, False}
    batch = make_batch([COMPLETIONS] * P, [[0.0] * len(COMPLETIONS)] * P)
    model, samples = TabularLM(TABLE), batch.samples
    logps, entropies = completion_logps(model, *samples[:4])
    rows = [(p, c) for p in range(P) for c in COMPLETIONS]
    for row, (p, c) in enumerate(rows):
        close(logps[row, : len(c)].detach(), log_probs(TABLE, p, c))
        for t, expected in enumerate(gradients(TABLE, p, c)):
            close(torch.autograd.grad(logps[row, t], model.table, retain_graph=True)[0], expected)
            logp = log_softmax(TABLE[p, PREFIXES.index(c[:t])])
            close(entropies[row, t], -(np.exp(logp) * logp).sum())
    for p in range(P):
        close(sum(probability(TABLE, p, c) for c in COMPLETIONS), 1.0)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_constant_aggregation_is_the_policy_gradient(temperature):
    """Without std: (G - 1) / (G L_max) times the gradient of the expected reward, at the sampling temperature."""
    hot = TABLE / temperature
    policy_gradient = expectation(lambda p, c: REWARDS[p][c] * gradients(hot, p, c).sum(0) / temperature, hot)
    close(expected_movement(3, False, REWARDS, temperature=temperature), 2 / 3 / L_MAX * policy_gradient)


def test_sequence_aggregation_has_its_own_closed_form():
    """Without std: (G - 1) / G E[(R - J) / T grad log pi], which does not point along the policy gradient."""
    moved = expected_movement(3, False, REWARDS, aggregation="sequence")
    score = {(p, c): gradients(TABLE, p, c).sum(0) for p in range(P) for c in COMPLETIONS}
    close(moved, 2 / 3 * expectation(lambda p, c: (REWARDS[p][c] - mean_reward(p)) / len(c) * score[p, c]))
    policy_gradient = expectation(lambda p, c: REWARDS[p][c] * score[p, c])
    along = (moved * policy_gradient).sum() / (policy_gradient**2).sum() * policy_gradient
    assert np.linalg.norm(moved - along) > 0.05 * np.linalg.norm(moved)


@with_function("grpo", "update", "advantages", "token_weights", "policy_loss")
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@stale
def test_updates_equal_the_reference_s(case, scale):
    """The advantages are those of the whole batch, denominators those of a minibatch, and all ratios are to the policy
    that sampled. Completions that are cut off or have no reward stay in the number of completions."""
    metrics = twice(grpo, Rule(), case, scale_rewards=scale, beta=0.05)
    assert 0 < metrics["clip_fraction"] < 1


@pytest.mark.parametrize("script", ["grpo"], indirect=True)  # seconds
@pytest.mark.parametrize("aggregation, scale", [("sequence", "group"), ("token", "batch"), ("constant", "group")])
def test_every_group_equals_the_reference_s(aggregation, scale):
    """Also groups of equal completions, without a deviation."""
    args = grpo.Args(aggregation=aggregation, scale_rewards=scale, max_completion_length=L_MAX, beta=0.0)
    for groups, _ in batches(3, False):
        rewards = rewards_of(groups, REWARDS)
        expected = second_update(Rule(), groups, rewards, TABLE, args, TABLE)[0] - TABLE
        close(run_update(make_batch(groups, rewards), aggregation=aggregation, scale_rewards=scale)[0], expected)


def test_kl_penalty_follows_the_reverse_divergence():
    """Equal rewards, beta > 0: by prefix -beta P(prefix) (pi_theta - pi_ref), the slope of KL(pi_ref || pi_theta)."""
    equal = [dict.fromkeys(COMPLETIONS, 0.5)] * P
    moved = expected_movement(2, False, equal, ref=OTHER, beta=0.7)
    expected = np.zeros_like(TABLE)
    for p in range(P):
        for i, prefix in enumerate(PREFIXES):
            difference = np.exp(log_softmax(TABLE[p, i])) - np.exp(log_softmax(OTHER[p, i]))
            expected[p, i] = -0.7 * probability(TABLE, p, prefix) * difference / (P * L_MAX)
    close(moved, expected)


@with_function("grpo", "advantages")
def test_advantages_by_hand():
    """Group mean; std with ddof 1 plus 1e-4 of group or batch; NaN left out and 0; equal rewards give 0."""
    nan = math.nan
    rewards = torch.tensor([[1.0, 0.0, 0.0, 3.0], [2.0, nan, 4.0, nan], [5.0, 5.0, 5.0, 5.0], [nan, 7.0, nan, nan]])
    centred = np.array([[0.0, -1.0, -1.0, 2.0], [-1.0, 0.0, 1.0, 0.0], [0.0] * 4, [0.0] * 4])
    close(grpo.advantages(rewards, "none"), centred)
    stds = np.array([[math.sqrt(2.0)], [math.sqrt(2.0)], [0.0], [0.0]])
    close(grpo.advantages(rewards, "group"), centred / (stds + 1e-4))
    known = [1.0, 0.0, 0.0, 3.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0, 7.0]
    variance = sum((r - sum(known) / 11) ** 2 for r in known) / 10
    close(grpo.advantages(rewards, "batch"), centred / (math.sqrt(variance) + 1e-4))
    close(grpo.advantages(torch.full((2, 2), nan), "batch"), 0.0)
    for scale in ("none", "group", "batch"):  # exactly, though a mean is rounded
        assert not grpo.advantages(torch.tensor([[0.1] * 3, [nan, 0.7, 0.7]]), scale).any()


@with_function("grpo", "token_weights")
def test_token_weights_by_hand(script, monkeypatch):
    """Each aggregation's weights, half of them where another process has as much; a row without tokens weighs nothing
    but counts as a completion. ppo_lm.py has two."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)
    if "sequence" in get_args(grpo.Args.__annotations__["aggregation"]):
        close(grpo.token_weights(mask, "sequence", 4), [[1 / 6, 1 / 6, 0], [1 / 9] * 3, [0] * 3])
    assert ("sequence" in get_args(grpo.Args.__annotations__["aggregation"])) == (script != "ppo_lm")
    close(grpo.token_weights(mask, "token", 4), [[1 / 5, 1 / 5, 0], [1 / 5] * 3, [0] * 3])
    close(grpo.token_weights(mask, "constant", 4), [[1 / 12, 1 / 12, 0], [1 / 12] * 3, [0] * 3])
    kinds = get_args(grpo.Args.__annotations__["aggregation"])
    weights = {kind: grpo.token_weights(mask, kind, 4) for kind in kinds}
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "total", lambda sums: 2 * sums)
        for kind in kinds:
            close(grpo.token_weights(mask, kind, 4), weights[kind] / 2)
    assert not grpo.token_weights(torch.zeros(2, 2, dtype=torch.bool), "token", 4).any()
    close(grpo.token_weights(mask[:1, 1:], "token", 4), [[1, 0]])


def test_pass_at_k_counts_subsets():
    for n in range(1, 7):
        for right in range(n + 1):
            for k in range(1, n + 1):
                hits = [min(subset) < right for subset in combinations(range(n), k)]  # samples 0..right-1 are right
                close(pass_at_k(n, right, k), sum(hits) / len(hits))


def test_learning_rate_by_hand():
    """Warm-up reaches the peak at its last step; decay would reach zero one step after the last."""

    def rates(schedule, warmup_steps, max_steps, steps) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
        args = grpo.Args(learning_rate=8.0, lr_schedule=schedule, warmup_steps=warmup_steps, max_steps=max_steps)
        found = [(set_rate(optimizer, step, args), optimizer.param_groups[0]["lr"]) for step in steps]
        assert all(told == used for told, used in found)
        return [used for _, used in found]

    close(rates("constant", 4, 9, (1, 2, 4, 5, 9)), [2.0, 4.0, 8.0, 8.0, 8.0])
    close(rates("linear", 0, 4, (1, 2, 3, 4)), [8.0, 6.0, 4.0, 2.0])
    close(rates("linear", 2, 6, (1, 2, 3, 4, 5, 6)), [4.0, 8.0, 8.0, 6.0, 4.0, 2.0])
    root = math.sqrt(2)
    close(rates("cosine", 0, 4, (1, 2, 3, 4)), [8.0, 4 + 2 * root, 4.0, 4 - 2 * root])
