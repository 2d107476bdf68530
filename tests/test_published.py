"""The interquartile mean and its interval, by hand."""

import numpy as np
import pytest

from benchmarks.published import iqm, late_returns


def test_the_middle_half_of_all_scores():
    """Of eight scores the four in the middle, wherever they come from."""
    middle, low, high = iqm([np.array([0.0, 1.0, 2.0, 9.0]), np.array([3.0, 4.0, 5.0, -9.0])], draws=200)
    assert middle == pytest.approx((1 + 2 + 3 + 4) / 4) and low < middle < high


def test_the_last_tenth_of_the_steps():
    """30 evaluations in 300,000 steps: the last three; of the first 100,000 the tenth."""
    rows = [{"eval/return": [float(k) for k in range(1, 31)]}, {"eval/return": [1.0] * 30}]
    assert late_returns(rows, 300_000, 10_000) == [29.0, 1.0]
    assert late_returns(rows, 100_000, 10_000) == [10.0, 1.0]
