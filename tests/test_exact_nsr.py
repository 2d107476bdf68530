"""PSR, NSR and W-REINFORCE: weights by hand, and updates against the reference.

test_expected_gradients.py has their expectations, which are the same up to a factor.
"""

import math

import numpy as np
import pytest
import torch
from groups import EVERY as GROUPS
from groups import RIGHT, TABLE, P, close, make_batch, stale, stepping, twice
from reference.grpo import Rule
from tabular import COMPLETIONS

from algos import nsr
from utils.core import UserError

pytestmark = pytest.mark.usefixtures("float64")
RULES = {"PSR": (1.0, 0.0), "NSR": (0.0, 1.0), "W-REINFORCE": (0.1, 1.0)}


def weights(rows, s):
    return [{1: s.positive_weight, 0: -s.negative_weight}.get(row.reward, 0) for row in rows]


def counted(row, s) -> bool:
    return row.a != 0 or s.denominator == "all"


@pytest.mark.parametrize("denominator", ["all", "subset"])
@pytest.mark.parametrize("name", RULES)
@stale
def test_updates_equal_the_reference_s(case, name, denominator):
    """Means count the answers of a minibatch: all of them, or those with a weight."""
    positive, negative = RULES[name]
    twice(nsr, Rule(weights, counted=counted), case, rewards=RIGHT, positive_weight=positive, negative_weight=negative,
          denominator=denominator, beta=0.1)  # fmt: skip


def test_weights_by_hand():
    rewards = torch.tensor([[1.0, 0.0, math.nan], [1.0, 1.0, 0.0]])
    close(nsr.advantages(rewards, 0.1, 1.0), [[0.1, -1.0, 0.0], [0.1, 0.1, -1.0]])
    with pytest.raises(UserError, match="rewards of 0, wrong, and 1, right: here is 0.5"):
        nsr.advantages(torch.tensor([[1.0, 0.5]]), 0.1, 1.0)


def test_a_step_without_any_weight_moves_nothing():
    """NSR where all answers are right."""
    right = [[1.0] * len(COMPLETIONS)] * P
    for denominator in ("all", "subset"):
        moved, _ = stepping(nsr)(make_batch(GROUPS, right), positive_weight=0.0, denominator=denominator)
        close(moved, np.zeros_like(TABLE))
