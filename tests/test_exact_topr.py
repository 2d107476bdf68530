"""TOPR: weights by hand, identities with REINFORCE and RAFT, and steps of `update` against numpy.

test_expected_gradients.py has the expectation on fresh data.
"""

import math

import numpy as np
import pytest
import torch
from groups import EVERY as GROUPS
from groups import OTHER, RIGHT, TABLE, P, close, make_batch, stepping
from tabular import COMPLETIONS, gradients, log_probs, random_table

from algos import raft, topr
from utils.core import UserError

pytestmark = pytest.mark.usefixtures("float64")
L_MAX = 5
run_update = stepping(topr)


def own_step(p, baseline, table, old, aggregation) -> tuple[np.ndarray, list[float]]:
    """Movement of one plain step on the group of prompt p in numpy; and the weights of its wrong answers."""
    rows, tokens = len(GROUPS[p]), sum(map(len, GROUPS[p]))
    result, wrong = np.zeros_like(table), []
    for right, c in zip(RIGHT[p], GROUPS[p]):
        reward, weight = (1.0 if right else -1.0) - baseline, 1.0
        if reward < 0:
            weight = min(math.exp(sum(log_probs(table, p, c)) - sum(log_probs(old, p, c))), 1.0)
            wrong.append(weight)
        size = {"sequence": rows * len(c), "token": tokens, "constant": rows * L_MAX}[aggregation]
        penalty = np.exp(np.array(log_probs(OTHER, p, c)) - log_probs(table, p, c)) - 1  # the slope of -k3
        result += np.tensordot(weight * reward + 0.3 * penalty, gradients(table, p, c), 1) / size
    return result, wrong


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("baseline", [0.0, 0.6, 1.0, -1.0])  # at 1 right answers have the advantage 0
def test_steps_of_minibatches_and_epochs(baseline, aggregation):
    """Two epochs of a step for each prompt, on what another policy sampled."""
    rate, old, now, wrong = 2.0, TABLE + 0.5 * random_table(6), TABLE, []
    for p in [*range(P)] * 2:
        step, weights = own_step(p, baseline, now, old, aggregation)
        now, wrong = now + rate * step, [*wrong, weights]
    moved, metrics = run_update(make_batch(GROUPS, RIGHT, old=old, ref=OTHER), rate=rate, num_iterations=2, beta=0.3,
                                num_minibatches=P, baseline=baseline, aggregation=aggregation,
                                micro_batch_size=7)  # fmt: skip
    close(TABLE + rate * moved, now)
    if last := sum(wrong[P:], []):
        close(metrics["wrong_weight"], np.mean(last))
        assert min(last) < 0.9 and max(last) == 1.0


def test_on_fresh_data_it_is_reinforce():
    batch = make_batch(GROUPS, RIGHT)
    ours, metrics = run_update(batch)
    close(ours, run_update(batch, raft, select="all", aggregation="constant")[0])
    close(metrics["wrong_weight"], 1.0)


def test_right_answers_are_imitated_however_old_they_are():
    """A baseline of -1 drops the wrong ones: RAFT with rewards of 2."""
    batch = make_batch(GROUPS, RIGHT, old=OTHER)
    theirs, _ = run_update(batch, raft, select="right", aggregation="constant", num_iterations=3)
    ours, _ = run_update(batch, baseline=-1.0, num_iterations=3, rate=0.5)
    close(ours, 2 * theirs)
    assert abs(ours).max() > 0.01


def test_a_wrong_answer_is_not_pushed_without_bound():
    """One answer, wrong and stale. Along the line on which its logit falls, TOPR's slope times the distance goes to 0,
    REINFORCE's without a ratio grows for ever."""
    c = max(COMPLETIONS, key=len)
    slopes = []
    for depth in (0.0, 10.0, 20.0):
        logps = torch.tensor([[-1.0 - depth] * len(c)], requires_grad=True)
        loss, _ = topr.policy_loss(logps, torch.full_like(logps, -1.0), torch.tensor([[-1.0]]), torch.ones_like(logps))
        loss.sum().backward()
        slopes.append(logps.grad[0, 0].item())
    close(slopes, [1.0, math.exp(-10 * len(c)), math.exp(-20 * len(c))])


def test_weights_by_hand():
    """Long completions have ratios that no number holds."""
    logps, old = torch.tensor([[-2.0, -1.0], [-1.0, -1.0], [-2.0, -1.0], [-2.0, -9.0]]), torch.full((4, 2), -1.5)
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    _, weight = topr.policy_loss(logps, old, torch.tensor([[-1.0], [-1.0], [1.0], [-0.5]]), mask)
    close(weight[:, 0], [1.0, 1.0, 1.0, math.exp(-0.5)])
    for gap, expected in ((1.0, 1.0), (-1.0, 0.0)):
        loss, weight = topr.policy_loss(torch.full((1, 2000), -2.0 + gap), torch.full((1, 2000), -2.0),
                                        torch.tensor([[-1.0]]), torch.ones(1, 2000))  # fmt: skip
        assert weight.item() == expected and loss.isfinite().all()


def test_rewards_by_hand():
    rewards = torch.tensor([[1.0, 0.0, math.nan], [0.75, 0.0, 1.0]])
    close(topr.advantages(rewards, 0.0), [[1.0, -1.0, 0.0], [0.5, -1.0, 1.0]])
    close(topr.advantages(rewards, 0.5), [[0.5, -1.5, 0.0], [0.0, -1.5, 0.5]])
    with pytest.raises(UserError, match="--baseline is 1.5: it must be from -1 to 1"):
        topr.train(topr.Args(task="sort", baseline=1.5, device="cpu"))
