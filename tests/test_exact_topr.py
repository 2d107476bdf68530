"""TOPR: weights by hand, and updates against the reference.

test_expected_gradients.py has the expectation on fresh data.
"""

import math

import numpy as np
import pytest
import torch
from groups import RIGHT, close, stale, twice
from reference.grpo import Rule

from algos import topr
from utils.core import UserError

pytestmark = pytest.mark.usefixtures("float64")


def tapered(d, a, s):
    """No ratio for right answers; wrong ones have that of the whole, at most 1, as their weight."""
    weight = min(math.exp(d.sum()), 1.0) if a < 0 else 1.0
    return np.full(len(d), weight * a), [weight] * int(a < 0 and len(d) > 0)


def signed(rows, s):
    return np.nan_to_num([2 * row.reward - 1 - s.baseline for row in rows])


@pytest.mark.parametrize("baseline", [0.0, 0.6, 1.0, -1.0])  # at 1 right answers have the advantage 0
@stale
def test_updates_equal_the_reference_s(case, baseline):
    metrics = twice(
        topr, Rule(signed, tapered, counts="wrong_weight"), case, rewards=RIGHT, baseline=baseline, beta=0.3
    )
    assert baseline == -1 or case == "unknown" or metrics["wrong_weight"] < 0.99


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
