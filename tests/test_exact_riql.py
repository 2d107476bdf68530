"""RIQL: values by hand, and the expected gradient of `update` by enumeration."""

import pytest

from algos import riql


def test_the_gradient_of_update_is_the_enumerated_one():
    pytest.fail("write this test of riql.update first: tests/test_exact_iql.py shows how")
