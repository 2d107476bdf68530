"""CISPO and GPPO: values by hand, and updates against the reference. At ratio 1, test_exact_grpo.py tests it."""

import math

import numpy as np
import pytest
import torch
from groups import close, stale, twice
from reference.grpo import Rule

from algos import cispo

pytestmark = pytest.mark.usefixtures("float64")


def held(d, a, s):
    """The slope is the ratio, held within the bounds; GPPO's hold on the side of the advantage only."""
    ratio = np.exp(d)
    low, high = (0.0 if a > 0 else s.ratio_low, s.ratio_high if a > 0 else math.inf)
    weight = np.clip(ratio, low, high) if s.bounds == "gppo" else np.clip(ratio, s.ratio_low, s.ratio_high)
    return weight * a, weight != ratio


@pytest.mark.parametrize("bounds", ["cispo", "gppo"])
@stale
def test_updates_equal_the_reference_s(case, bounds):
    metrics = twice(cispo, Rule(slope=held), case, bounds=bounds, ratio_low=0.9, ratio_high=1.15, beta=0.05)
    assert 0 < metrics["clip_fraction"] < 1


@pytest.mark.parametrize("given", [{}, {"ratio_low": 0.3}, {"ratio_high": 3.0}], ids=str)
@pytest.mark.parametrize("bounds, low, high", [("cispo", 0.0, 5.0), ("gppo", 0.8, 1.28)])
def test_bounds_by_default(bounds, low, high, given):
    """Each stands where it is not given itself."""
    low, high = given.get("ratio_low", low), given.get("ratio_high", high)
    logps, sign = torch.tensor([[-9.0], [9.0]], requires_grad=True), torch.tensor([[-1.0], [1.0]])
    loss, _ = cispo.policy_loss(logps, torch.zeros(2, 1), sign, cispo.Args(bounds=bounds, **given))
    loss.sum().backward()
    close(logps.grad, [[max(low, math.exp(-9.0))], [-high]])
