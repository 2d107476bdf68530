"""xql.py: what its value is in closed form, and where its losses pull. What it shares with iql.py:
test_exact_iql.py."""

import math

import numpy as np
import pytest
import torch
from control import close, float64
from test_exact_iql import SETTINGS, updated

from algos import xql

VALUES = torch.tensor([-3.0, 0.5, 1.0, 2.0, 2.5])


def pull(errors: torch.Tensor, **flags) -> torch.Tensor:
    """How each row moves V, times the number of rows: minus the loss's slope in V."""
    v = torch.zeros(len(errors), requires_grad=True)
    xql.value_loss(errors - v, xql.Args(**flags)).backward()
    return -v.grad * len(errors)


def gumbel(errors, args) -> np.ndarray:
    """The slope of exp(z) - z - 1 over the largest exp(z), of z up to --max-clip."""
    z = errors / args.gumbel_scale
    largest = max(min(z.max(), args.max_clip), -1)
    return np.where(z < args.max_clip, np.exp(z) - 1, 0.0) / np.exp(largest) / args.gumbel_scale


def chi2(errors, args) -> np.ndarray:
    above = np.where((errors > 0) | (errors < -4), 1 + errors / 2, 0.0)
    return args.dvl_lambda * above - (1 - args.dvl_lambda)


@float64()
@pytest.mark.parametrize("slope", [gumbel, chi2], ids=["gumbel", "chi2"])
def test_update_is_the_reference_s(slope):
    updated(xql, xql.Args(**SETTINGS, value_loss=slope.__name__, max_clip=1.0, dvl_lambda=0.6), value=slope)


@float64()
@pytest.mark.parametrize("scale", [0.2, 2.0, 1e4])
def test_the_value_of_xql_is_a_soft_maximum(scale):
    """b log mean exp(Q / b): near the largest value for a small b, the mean for a large one."""
    soft = scale * math.log((VALUES.double() / scale).exp().mean())
    close(pull(VALUES.double() - soft, gumbel_scale=scale, max_clip=30).sum(), 0.0)
    assert pull(VALUES.double() - soft - 0.1, gumbel_scale=scale, max_clip=30).sum() < 0
    assert soft == pytest.approx({0.2: 2.194, 1e4: 0.6}.get(scale, soft), abs=0.01)


@float64()
def test_what_is_clipped_does_not_pull():
    """The others pull by exp(z) - 1 over b, and over the largest exp(z), at least 1 / e. No error overflows."""
    errors = torch.tensor([-4.0, 1.0, 3.0, 1e5])
    close(pull(errors, gumbel_scale=2.0, max_clip=1.0), [*((errors[:2] / 2).exp() - 1) / 2 / math.e, 0.0, 0.0])
    below = torch.tensor([-8.0, -4.0])
    close(pull(below, gumbel_scale=2.0), ((below / 2).exp() - 1) / 2 * math.e)
