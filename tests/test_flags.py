"""Every flag of every script matters: changed alone, from settings in which it acts, it changes the metrics or the
final weights. config.json does not count. Flags of memory leave the results equal, and are seen to act. The settings
stand in the specs."""

import dataclasses
import importlib
import typing

import pytest
import torch
from every_script import NAMES
from tiny_runs import Result, result, same

from tests.flags import EXEMPT, MEMORY, SPECIAL
from tests.specs import SPECS

ROUNDED = 1e-3, 1e-4  # how far a flag of memory may change results, relative and absolute: sums in another order
# before the first update policy and reference are equal, and the signs of their margins are those of rounding errors
DECIDED_BY_ROUNDING = ("accuracy",)


def choices(algo: str, flag: str) -> list:
    """The values that a Literal allows."""
    kind = typing.get_type_hints(importlib.import_module(f"algos.{algo}").Args)[flag]
    literals = [part for part in (kind, *typing.get_args(kind)) if typing.get_origin(part) is typing.Literal]
    return [choice for part in literals for choice in typing.get_args(part)]


def changes(algo: str, flag: str) -> list[tuple[dict, list]]:
    """(settings, changed values) of a flag: what the spec or flags.py says, else another value of the same type."""
    base = SPECS[algo].flags
    assert base, f"tests/specs/{algo}.py: give Spec(flags=...)"
    special = (SPECIAL | SPECS[algo].special).get(flag)
    if special is not None:
        pairs = special if isinstance(special, list) else [special]
        return [(base | more, value if isinstance(value, list) else [value]) for more, value in pairs]
    value = result(algo, base).args[flag]
    if isinstance(value, bool):
        others = [not value]
    elif literals := choices(algo, flag):
        others = [choice for choice in literals if choice != value]
    elif isinstance(value, int):
        others = [2 * value or 1]
    elif isinstance(value, float):
        others = [0.7 * value or 0.3]
    else:
        raise AssertionError(f"tests/specs/{algo}.py: say in special how --{flag} is changed, for it is {value!r}")
    return [(base, others)]


def assert_only_rounded(one: Result, other: Result) -> None:
    for row, there in zip(one.rows, other.rows, strict=True):
        for name in DECIDED_BY_ROUNDING:
            row, there = ({k: v for k, v in x.items() if k != name} for x in (row, there))
        assert row == pytest.approx(there, rel=ROUNDED[0], abs=ROUNDED[1])
    torch.testing.assert_close(one.weights, other.weights, rtol=ROUNDED[0], atol=ROUNDED[1])


CASES = [
    (algo, field.name)
    for algo in NAMES
    for field in dataclasses.fields(importlib.import_module(f"algos.{algo}").Args)
    if field.name not in EXEMPT and field.name in (SPECS[algo].only or (field.name,))
]


@pytest.mark.parametrize("algo, flag", CASES)
def test_every_flag_matters(algo, flag):
    for settings, values in changes(algo, flag):
        before = result(algo, settings)
        for value in values:
            after = result(algo, settings | {flag: value})
            if flag in MEMORY:
                acts = MEMORY[flag]
                assert before.counts[acts] != after.counts[acts], f"--{flag} {value} of {algo}: as many {acts}"
                assert_only_rounded(before, after)
            else:
                assert not same(before, after), f"--{flag} {value} of {algo} changes neither metrics nor weights"


@pytest.mark.parametrize("algo", NAMES)
def test_the_same_settings_give_the_same_results(algo):
    """Else every flag would seem to matter."""
    assert same(result(algo, SPECS[algo].flags), result(algo, SPECS[algo].flags | {"save_every": 2, "keep": 1}))
