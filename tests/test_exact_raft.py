"""RAFT, RAFT++ and Reinforce-Rej: selections by hand, and updates against the reference.

test_expected_gradients.py has their expectations.
"""

import math

import numpy as np
import pytest
import torch
from groups import RIGHT, close, stale, twice
from reference.grpo import Rule, clipped

from algos import raft

pytestmark = pytest.mark.usefixtures("float64")


def imitated(d, a, s):
    return clipped(d, a, s) if s.plusplus else (np.full(len(d), a), np.zeros(len(d)))


def selected(rows, s):
    return np.nan_to_num([row.reward if s.select == "right" else 2 * row.reward - 1 for row in rows])


@pytest.mark.parametrize("plusplus", [False, True])
@pytest.mark.parametrize("select", ["right", "all"])
@stale
def test_updates_equal_the_reference_s(case, select, plusplus):
    """Means count all completions, kept or not. RAFT knows no ratio."""
    metrics = twice(raft, Rule(selected, imitated), case, rewards=RIGHT, select=select, plusplus=plusplus, beta=0.1)
    assert (0 < metrics["clip_fraction"] < 1) == plusplus


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
