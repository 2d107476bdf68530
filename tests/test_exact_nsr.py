"""PSR, NSR and W-REINFORCE: weights by hand, and steps of `update` against numpy.

test_expected_gradients.py has their expectations, which are the same up to a factor.
"""

import math

import numpy as np
import pytest
import torch
from groups import EVERY as GROUPS
from groups import OTHER, RIGHT, TABLE, P, close, make_batch, stepping
from tabular import COMPLETIONS, gradients, log_probs, random_table

from algos import grpo, nsr
from utils.core import UserError

pytestmark = pytest.mark.usefixtures("float64")
LOW, HIGH, L_MAX = 0.1, 0.3, 5
RULES = {"PSR": (1.0, 0.0), "NSR": (0.0, 1.0), "W-REINFORCE": (0.1, 1.0)}
run_update = stepping(nsr)


def own_step(p, rule, table, old, aggregation, subset) -> np.ndarray:
    """Movement of one plain step on the group of prompt p in numpy."""
    positive, negative = RULES[rule]
    weights = [positive if r else -negative for r in RIGHT[p]]
    rows = [(a, c) for a, c in zip(weights, GROUPS[p]) if a or not subset]
    tokens, result = sum(len(c) for _, c in rows), np.zeros_like(table)
    for a, c in rows:
        ratio = np.exp(log_probs(table, p, c) - log_probs(old, p, c))
        cut = ratio > 1 + HIGH if a > 0 else ratio < 1 - LOW
        size = {"sequence": len(rows) * len(c), "token": tokens, "constant": len(rows) * L_MAX}[aggregation]
        result += np.einsum("t,tprv->prv", np.where(cut, 0.0, ratio * a), gradients(table, p, c)) / size
    return result


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("denominator", ["all", "subset"])
@pytest.mark.parametrize("rule", RULES)
def test_steps_of_minibatches_and_epochs(rule, denominator, aggregation):
    """Two epochs of a step for each prompt, whose means count its own answers alone: all of them, or those with a
    weight."""
    rate, old, now = 2.0, TABLE + 0.5 * random_table(6), TABLE
    for p in [*range(P)] * 2:
        now = now + rate * own_step(p, rule, now, old, aggregation, denominator == "subset")
    positive, negative = RULES[rule]
    moved, _ = run_update(make_batch(GROUPS, RIGHT, old=old), rate=rate, num_iterations=2, num_minibatches=P,
                          positive_weight=positive, negative_weight=negative, denominator=denominator,
                          aggregation=aggregation, epsilon=LOW, epsilon_high=HIGH, micro_batch_size=7)  # fmt: skip
    close(TABLE + rate * moved, now)


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
def test_it_is_grpo_with_other_advantages(aggregation, monkeypatch):
    """Off-policy, with all else of grpo.py: clip, penalty, means."""
    batch = make_batch(GROUPS, RIGHT, old=OTHER, ref=random_table(3))
    settings = dict(num_iterations=2, aggregation=aggregation, beta=0.1, epsilon=0.2)
    ours, metrics = run_update(batch, positive_weight=0.3, **settings)
    monkeypatch.setattr(grpo, "advantages", lambda rewards, scale: 0.3 * rewards - (1 - rewards))
    theirs, expected = run_update(batch, grpo, **settings)
    close(ours, theirs)
    assert metrics == pytest.approx(expected, abs=1e-12) and abs(ours).max() > 0.001


def test_weights_by_hand():
    rewards = torch.tensor([[1.0, 0.0, math.nan], [1.0, 1.0, 0.0]])
    close(nsr.advantages(rewards, 0.1, 1.0), [[0.1, -1.0, 0.0], [0.1, 0.1, -1.0]])
    with pytest.raises(UserError, match="rewards of 0, wrong, and 1, right: here is 0.5"):
        nsr.advantages(torch.tensor([[1.0, 0.5]]), 0.1, 1.0)


def test_a_step_without_any_weight_moves_nothing():
    """NSR where all answers are right."""
    right = [[1.0] * len(COMPLETIONS)] * P
    for denominator in ("all", "subset"):
        moved, _ = run_update(make_batch(GROUPS, right), positive_weight=0.0, denominator=denominator)
        close(moved, np.zeros_like(TABLE))
