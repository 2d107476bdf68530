"""NFT: updates against the reference, outcomes by hand, and its identity with grpo.py at ratio 1."""

import math

import numpy as np
import pytest
import torch
from groups import OTHER, RIGHT, TABLE, close, make_batch, stale, stepping, twice
from reference.grpo import Rule
from tabular import COMPLETIONS, random_table

from algos import grpo, nft
from utils.core import UserError

pytestmark = pytest.mark.usefixtures("float64")
run_update = stepping(nft, aggregation="constant")


def outcomes(rows, s):
    """R, r and omega of each row; what teaches nothing has three zeros."""
    found = []
    for row in rows:
        group = [other.reward for other in rows if other.p == row.p]
        r, flat = np.nanmean(group), np.nanmin(group) == np.nanmax(group)
        omega = 1 - r if s.omega == "linear" or flat else math.sqrt((1 - r) / r)
        found.append((0, 0, 0) if flat or math.isnan(row.reward) else (row.reward, r, omega))
    return found


def likelihood(d, a, s):
    right, r, omega = a
    implied = (1 - r * np.exp(d)) / (1 - r)
    wrong = r / (1 - r) * np.exp(d) / np.maximum(implied, s.epsilon)
    return omega * (right - s.neg_weight * (1 - right) * wrong), (implied <= 0) & (right < 1)


@pytest.mark.parametrize("omega", ["linear", "sqrt"])
@pytest.mark.parametrize("neg_weight, epsilon", [(1.0, 1.0), (0.5, 0.7), (0.0, 1.0)])
@stale
def test_updates_equal_the_reference_s(case, omega, neg_weight, epsilon):
    """Also in part right answers."""
    part = [[0.0, 0.25, 1.0, 0.5, 0.0, 0.75, 0.0], [0.5] * 7]
    for rewards, old in (RIGHT, TABLE + 1.5 * random_table(6)), (part, TABLE + random_table(6)):
        metrics = twice(nft, Rule(outcomes, likelihood), case, rewards=rewards, old=old, rate=0.2, beta=0.1,
                        omega=omega, neg_weight=neg_weight, epsilon=epsilon)  # fmt: skip
        assert rewards == part or case != "minibatches" or 0 < metrics["clip_fraction"] < 1


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
