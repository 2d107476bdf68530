"""Sampler, scorer and gradient of many architectures against plain forward passes: tests/architectures.py."""

import pytest
from architectures import ARCHITECTURES, RECURRENT, make, measure


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sampler_scorer_and_gradient_are_those_of_plain_forward_passes(name):
    for shared in (False,) if name in RECURRENT else (False, True):
        for column, value in measure(make(name), shared).items():
            assert value < 1e-4, (column, shared)
