"""NFT: slopes by hand, steps of `update` against numpy, and its identities with grpo.py at ratio 1."""

import math

import numpy as np
import pytest
import torch
from groups import EVERY as GROUPS
from groups import OTHER, RIGHT, TABLE, P, close, make_batch, stepping
from tabular import COMPLETIONS, gradients, log_probs, random_table

from algos import grpo, nft
from utils.core import UserError

pytestmark = pytest.mark.usefixtures("float64")
OMEGAS = [("linear", lambda r: 1 - r), ("sqrt", lambda r: math.sqrt((1 - r) / r))]
run_update = stepping(nft, aggregation="constant")


def own_step(p, right, table, old, omega, neg_weight, epsilon) -> tuple[np.ndarray, list[bool]]:
    """Movement of one plain step on the group of prompt p in numpy, from the slopes; and where log wants the bound."""
    r, result, held = np.nanmean(right), np.zeros_like(table), []
    for reward, c in zip(right, GROUPS[p]):
        ratio = np.exp(log_probs(table, p, c) - log_probs(old, p, c))
        implied = (1 - r * ratio) / (1 - r)
        wrong = r / (1 - r) * ratio / np.maximum(implied, epsilon)
        held += [bool(x <= 0 and reward < 1) for x in implied]
        slope = 0 if math.isnan(reward) else omega(r) * (reward - neg_weight * (1 - reward) * wrong)
        result += np.einsum("t,tprv->prv", slope * np.ones(len(c)), gradients(table, p, c)) / (len(right) * 5)
    return result, held


@pytest.mark.parametrize("name, omega", OMEGAS)
@pytest.mark.parametrize("neg_weight, epsilon", [(1.0, 1.0), (0.5, 0.7), (0.0, 1.0)])
def test_steps_of_minibatches_and_epochs(name, omega, neg_weight, epsilon):
    """Two epochs of a step for each prompt, with ratios to what the sampler said."""
    rate, old = 2.0, TABLE + 1.5 * random_table(6)
    now, held = TABLE, []
    for p in [*range(P)] * 2:
        step, bound = own_step(p, RIGHT[p], now, old, omega, neg_weight, epsilon)
        now, held = now + rate * step, [*held, bound]
    moved, metrics = run_update(make_batch(GROUPS, RIGHT, old=old), rate=rate, num_iterations=2, num_minibatches=P,
                                omega=name, neg_weight=neg_weight, epsilon=epsilon, micro_batch_size=7)  # fmt: skip
    close(TABLE + rate * moved, now)
    last = sum(held[P:], [])
    assert 0 < sum(last) < len(last)
    close(metrics["clip_fraction"], np.mean(last))


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
def test_the_first_step_is_dr_grpo_s(aggregation):
    """At ratio 1 and omega 1 - r: grpo.py without a deviation, whatever is right, also in part."""
    for rewards in (RIGHT, [[0.0, 0.25, 1.0] * 3, [0.5] * 9]):
        groups = [group[: len(rewards[0])] for group in [COMPLETIONS * 2, COMPLETIONS * 2]]
        batch = make_batch(groups, rewards, ref=OTHER)
        settings = dict(aggregation=aggregation, beta=0.1)
        ours, theirs = run_update(batch, **settings)[0], run_update(batch, grpo, scale_rewards="none", **settings)[0]
        close(ours, theirs)
        assert abs(ours).max() > 0.001


def test_the_first_step_by_the_root_is_grpo_s(monkeypatch):
    """At ratio 1 and omega sqrt((1 - r) / r): grpo.py with the population's deviation and nothing added to it."""
    monkeypatch.setattr(grpo, "STD_EPSILON", 0.0)
    batch = make_batch(GROUPS, RIGHT)
    ours = run_update(batch, omega="sqrt")[0]
    size = len(GROUPS[0])  # grpo.py's deviation is the unbiased one
    close(ours, (size / (size - 1)) ** 0.5 * run_update(batch, grpo, scale_rewards="group")[0])
    assert abs(ours - run_update(batch)[0]).max() > 0.001


@pytest.mark.parametrize(
    "right, rate, ratio, epsilon, value, slope",
    [
        (1.0, 0.25, 0.5, 1.0, 0.75 * math.log(2), -0.75),  # a right answer: its own slope, however far
        (1.0, 0.25, 1.5, 1.0, -0.75 * math.log(1.5), -0.75),
        (0.0, 0.25, 0.5, 1.0, -0.75 * math.log(0.875 / 0.75), 0.75 * 0.125 / 0.875),
        (0.0, 0.25, 1.0, 1.0, 0.0, 0.25),
        (0.0, 0.25, 1.5, 1.0, 0.0, 0.375),  # held at 1: the value is 0, the slope is not
        (0.0, 0.25, 1.5, 0.5, -0.75 * math.log(0.625 / 0.75), 0.75 * 0.375 / 0.625),
        (0.0, 0.8, 1.5, 1.0, 0.0, 0.2 * 4 * 1.5),  # r rho > 1: without the bound a logarithm of -1
        (0.0, 0.8, 1.5, 0.5, -0.2 * math.log(0.5), 0.2 * 4 * 1.5 / 0.5),
        (0.0, 0.8, 0.5, 1.0, -0.2 * math.log(3), 0.2 * 4 * 0.5 / 3),
    ],
)
def test_slopes_by_hand(right, rate, ratio, epsilon, value, slope):
    """Value and slope in log pi, with omega 1 - r."""
    logps = torch.tensor([[math.log(0.4 * ratio)]], requires_grad=True)
    outcome = torch.tensor([[right, rate, 1 - rate]])
    loss, negative = nft.policy_loss(logps, torch.tensor([[math.log(0.4)]]), outcome, nft.Args(epsilon=epsilon))
    loss.sum().backward()
    close([loss.item(), logps.grad.item()], [value, slope])
    assert negative.item() == (right == 0 and rate * ratio > 1)


def test_outcomes_by_hand():
    """R, r and omega; NaN does not count; below 0 is wrong; groups that are all right, all wrong or unknown weigh 0."""
    nan = math.nan
    rewards = torch.tensor([[1.0, 0.0, -1.0, nan], [1.0, 1.0, 1.0, nan], [-1.0, 0.0, 0.0, 0.0], [nan, 1.0, nan, nan]])
    found = nft.outcomes(rewards, "linear").view(4, 4, 3)
    close(found[0], [[1, 1 / 3, 2 / 3], [0, 1 / 3, 2 / 3], [0, 1 / 3, 2 / 3], [0, 0, 0]])
    close(found[1:, :, 2], 0.0)
    close(nft.outcomes(rewards, "sqrt").view(4, 4, 3)[0, :, 2], [math.sqrt(2)] * 3 + [0])
    assert nft.outcomes(rewards, "sqrt").isfinite().all()
    with pytest.raises(UserError, match="rewards of at most 1, right: here is 1.5"):
        nft.outcomes(torch.tensor([[nan, 1.5, 0.0]]), "linear")


@pytest.mark.parametrize("name, omega", OMEGAS)
def test_what_teaches_nothing(name, omega):
    """Groups of one outcome, and skipped rewards, also where the policy is another one than that which sampled."""
    rewards = [[1.0] * len(COMPLETIONS), [math.nan, 0.0, math.nan] + [1.0] * (len(COMPLETIONS) - 3)]
    moved, _ = run_update(make_batch(GROUPS, rewards, old=OTHER), omega=name)
    close(moved[0], 0.0)
    close(moved, own_step(1, rewards[1], TABLE, OTHER, omega, 1.0, 1.0)[0] / P)
    assert abs(moved[1]).max() > 0.001
