"""Sampler, scorer and gradient of many architectures against plain forward passes: benchmarks/architectures.py."""

import pytest

from benchmarks.architectures import ARCHITECTURES, make, measure


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sampler_scorer_and_gradient_are_those_of_plain_forward_passes(name):
    for column, value in measure(make(name)).items():
        assert value < 1e-4, column
