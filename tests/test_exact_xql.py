"""xql.py: what its value is in closed form, and where its losses pull. Whole updates, and what it shares with iql.py:
test_exact_iql.py."""

import math

import pytest
import torch
from control import close, float64

from algos import xql

VALUES = torch.tensor([-3.0, 0.5, 1.0, 2.0, 2.5])


def pull(errors: torch.Tensor, **flags) -> torch.Tensor:
    """How each row moves V, times the number of rows: minus the loss's slope in V."""
    v = torch.zeros(len(errors), requires_grad=True)
    xql.value_loss(errors - v, xql.Args(**flags)).backward()
    return -v.grad * len(errors)


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


@float64()
def test_the_pull_of_f_dvl_by_hand():
    """Above V by lambda (1 + u / 2), and everywhere down by 1 - lambda; the parabola turns up again below V - 4."""
    errors = torch.tensor([-6.0, -3.0, -1.0, 1.0, 3.0])
    close(
        pull(errors, value_loss="chi2", dvl_lambda=0.6), [0.6 * -2 - 0.4, -0.4, -0.4, 0.6 * 1.5 - 0.4, 0.6 * 2.5 - 0.4]
    )
    close(pull(errors, value_loss="chi2", dvl_lambda=1.0)[1:3], [0.0, 0.0])  # nothing pulls V down there
