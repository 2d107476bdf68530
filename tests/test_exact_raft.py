"""RAFT, RAFT++ and Reinforce-Rej: selections by hand, and steps of `update` against numpy.

test_expected_gradients.py has their expectations.
"""

import math

import numpy as np
import pytest
import torch
from groups import EVERY as GROUPS
from groups import OTHER, RIGHT, TABLE, P, close, make_batch, stepping
from tabular import gradients, log_probs, random_table

from algos import grpo, raft

pytestmark = pytest.mark.usefixtures("float64")
LOW, HIGH = 0.1, 0.3
run_update = stepping(raft)


def own_step(p, counts, table, old, plusplus) -> tuple[np.ndarray, list[bool]]:
    """Movement of one plain step on the group of prompt p in numpy, means over tokens; and which tokens were cut."""
    result, cuts = np.zeros_like(table), []
    for count, c in zip(counts, GROUPS[p]):
        ratio = np.exp(log_probs(table, p, c) - log_probs(old, p, c))
        cut = ratio > 1 + HIGH if count > 0 else (ratio < 1 - LOW) & (count < 0)
        cuts += [bool(x) and plusplus for x in cut]
        slope = np.where(cut, 0.0, ratio * count) if plusplus else np.full(len(c), count)
        result += np.einsum("t,tprv->prv", slope, gradients(table, p, c)) / (len(counts) * len(c))
    return result, cuts


@pytest.mark.parametrize("plusplus", [False, True])
@pytest.mark.parametrize("select", ["right", "all"])
def test_steps_of_minibatches_and_epochs(select, plusplus):
    """Two epochs of a step for each prompt. Means count all completions, kept or not; ratios are to what the sampler
    said, and RAFT knows none."""
    rate, old = 2.0, TABLE + 0.5 * random_table(6)
    now, cuts = TABLE, []
    for p in [*range(P)] * 2:
        counts = RIGHT[p] if select == "right" else [2 * r - 1 for r in RIGHT[p]]
        step, cut = own_step(p, counts, now, old, plusplus)
        now, cuts = now + rate * step, [*cuts, cut]
    moved, metrics = run_update(make_batch(GROUPS, RIGHT, old=old), rate=rate, num_iterations=2, num_minibatches=P,
                                select=select, plusplus=plusplus, epsilon=LOW, epsilon_high=HIGH,
                                micro_batch_size=7)  # fmt: skip
    close(TABLE + rate * moved, now)
    last = sum(cuts[P:], [])
    assert (0 < sum(last) < len(last)) == plusplus
    close(metrics["clip_fraction"], np.mean(last))


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
def test_plusplus_is_grpo_with_other_advantages(aggregation, monkeypatch):
    """Off-policy, with all else of grpo.py: clip, penalty, means."""
    batch = make_batch(GROUPS, RIGHT, old=OTHER, ref=random_table(3))
    settings = dict(num_iterations=2, aggregation=aggregation, beta=0.1, epsilon=0.2)
    ours, metrics = run_update(batch, plusplus=True, **settings)
    monkeypatch.setattr(grpo, "advantages", lambda rewards, scale: rewards)
    theirs, expected = run_update(batch, grpo, **settings)
    close(ours, theirs)
    assert metrics == pytest.approx(expected, abs=1e-12) and abs(ours).max() > 0.001


@pytest.mark.parametrize("select", ["right", "best", "all"])
def test_the_first_step_of_raft_is_that_of_plusplus(select):
    batch = make_batch(GROUPS, RIGHT)
    close(run_update(batch, select=select)[0], run_update(batch, select=select, plusplus=True)[0])


NAN = math.nan
REWARDS = [
    [1.0, 0.0, 0.0, 1.0],
    [0.0, 0.0, 0.0, NAN],  # nothing is right: no vote
    [1.0, 1.0, 1.0, NAN],  # all are
    [-0.5, 0.25, NAN, 0.75],
    [NAN, NAN, NAN, NAN],
    [-2.0, -1.0, -3.0, -1.0],  # of a reward model: the best, though below 0
]


@pytest.mark.parametrize(
    "select, reject, expected",
    [
        ("right", False, [[1, 0, 0, 1], [0] * 4, [1, 1, 1, 0], [0, 0.25, 0, 0.75], [0] * 4, [0] * 4]),
        ("right", True, [[1, 0, 0, 1], [0] * 4, [0] * 4, [0, 0.25, 0, 0.75], [0] * 4, [0] * 4]),
        ("best", False, [[2, 0, 0, 2], [0] * 4, [4 / 3, 4 / 3, 4 / 3, 0], [0, 0, 0, 4], [0] * 4, [0, 2, 0, 2]]),
        ("best", True, [[2, 0, 0, 2], [0] * 4, [0] * 4, [0, 0, 0, 4], [0] * 4, [0, 2, 0, 2]]),
        ("all", False, [[1, -1, -1, 1], [-1, -1, -1, 0], [1, 1, 1, 0], [-2, -0.5, 0, 0.5], [0] * 4, [-5, -3, -7, -3]]),
        ("all", True, [[1, -1, -1, 1], [0] * 4, [0] * 4, [-2, -0.5, 0, 0.5], [0] * 4, [-5, -3, -7, -3]]),
    ],
)
def test_selections_by_hand(select, reject, expected):
    close(raft.advantages(torch.tensor(REWARDS), select, reject), expected)


@pytest.mark.parametrize(
    "advantage, ratio, slope", [(2.0, 1.5, 0.0), (2.0, 0.5, -1.0), (-2.0, 0.5, 0.0), (-2.0, 1.5, 3.0)]
)
def test_slopes_by_hand(advantage, ratio, slope):
    """In log pi: RAFT's is its weight, however far the policy has moved; RAFT++'s is GRPO's."""
    old = torch.tensor([[math.log(0.4)]])
    for plusplus, expected in ((False, -advantage), (True, slope)):
        logps = torch.tensor([[math.log(0.4 * ratio)]], requires_grad=True)
        loss, cut = raft.policy_loss(logps, old, torch.tensor([[advantage]]), 0.2, 0.28, plusplus)
        loss.sum().backward()
        close(logps.grad.item(), expected)
        assert cut.item() == (expected == 0)
