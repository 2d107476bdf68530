"""Every flag of every script matters: changed alone, from settings in which it acts, it changes the metrics or the
final weights. config.json does not count. Flags of memory leave the results equal, and are seen to act. The settings
stand in the specs. A child's flag that only statements of its parent read is tried there, and here by
`pytest -m inherited` and with planted bugs.
"""

import ast
import dataclasses
import importlib
import typing
from collections import Counter, defaultdict
from functools import cache

import pytest
import torch
from every_script import NAMES
from tiny_runs import Result, result, same

from tests.flags import DEFAULT, EXEMPT, MEMORY, SPECIAL
from tests.specs import SPECS, parent_of, sources

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


@cache
def readers(algo: str) -> dict[str, Counter]:
    """Flag -> the statements that read it, without places: an `if` whole, of a loop or `with` its first line alone."""
    found = defaultdict(Counter)
    for node in ast.walk(ast.parse(sources()[f"algos/{algo}.py"])):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        first_line = [part for part in ast.iter_child_nodes(node) if not isinstance(part, ast.stmt)]
        code = ast.dump(node) if isinstance(node, ast.If) else str([ast.dump(part) for part in first_line])
        for part in (part for expression in first_line for part in ast.walk(expression)):
            if isinstance(part, ast.Attribute):
                found[part.attr][code] += 1
    return found


def asked(node: ast.AST) -> list:
    """The expressions whose truth a piece of code asks for: there 0 is taken for None."""
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return [node.test]
    return node.ifs if isinstance(node, ast.comprehension) else [node.operand] if isinstance(node, ast.UnaryOp) else []


@cache
def asked_for(algo: str) -> set[str]:
    tree = ast.walk(ast.parse(sources()[f"algos/{algo}.py"]))
    return {part.attr for node in tree for part in asked(node) if isinstance(part, ast.Attribute)}


def cases(algo: str):
    """(script, flag), inherited where the statements that read the flag are the parent's, but for micro-batches, into
    which each update is split. Of a spec with `only` those flags, and the ones whose truth the script asks for."""
    args, parent = importlib.import_module(f"algos.{algo}").Args, parent_of(algo)
    flags = [f.name for f in dataclasses.fields(args) if f.name not in EXEMPT]
    for name in flags:
        if name in (SPECS[algo].only or (name,)) or name in asked_for(algo):
            inherited = parent and hasattr(importlib.import_module(f"algos.{parent}").Args, name)
            inherited = inherited and readers(algo)[name] == readers(parent)[name] and "micro_batch" not in name
            yield pytest.param(algo, name, marks=pytest.mark.inherited if inherited else ())


CASES = [case for algo in NAMES for case in cases(algo)]


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


def numbers(algo: str, flag: str) -> bool:
    """Whether its values are numbers, and the script itself fills in None (not PRESETS or the run's length) or asks
    whether it is true."""
    module = importlib.import_module(f"algos.{algo}")
    kind = typing.get_type_hints(module.Args)[flag]
    parts = typing.get_args(kind) or (kind,)
    filled = flag == "eval_every" or any(flag in row for row in getattr(module, "PRESETS", {}).values())
    empty = not filled and (type(None) in parts or ... in parts)
    return bool({int, float} & {*parts}) and (empty or flag in asked_for(algo))


NUMBERS = [case for case in CASES if numbers(*case.values)]


def settings_of(algo: str, flag: str) -> list[dict]:
    """In which the flag acts."""
    return [settings for settings, _ in changes(algo, flag)] or [SPECS[algo].flags]


def written_out(run: Result, flag: str):
    """The flag's value in a run, also where it was None."""
    return DEFAULT[flag](run.args) if run.args[flag] is None and flag in DEFAULT else run.args[flag]


@pytest.mark.parametrize("algo, flag", NUMBERS)
def test_zero_is_not_the_default(algo, flag):
    """A flag at 0 does something else than left alone, or is refused."""
    default = importlib.import_module(f"algos.{algo}").Args.__dataclass_fields__[flag].default
    zero = (0.0,) if isinstance(default, tuple) else 0
    for base in settings_of(algo, flag):
        alone = result(algo, base | {flag: default})
        if written_out(alone, flag) == zero:
            continue
        try:
            at_zero = result(algo, base | {flag: zero})
        except Exception:  # whoever raises it, nobody takes that for a result
            continue
        assert not same(at_zero, alone), f"--{flag} {zero} does what {default} does"


@pytest.mark.parametrize("algo, flag", NUMBERS)
def test_a_default_may_be_written_out(algo, flag):
    """What None stands for changes nothing where it is given as a number."""
    for base in settings_of(algo, flag):
        settings = {name: value for name, value in base.items() if name != flag}
        default = result(algo, settings)
        if (value := written_out(default, flag)) is not None:
            assert same(default, result(algo, settings | {flag: value}))


@pytest.mark.parametrize("algo", NAMES)
def test_the_same_settings_give_the_same_results(algo):
    """Else every flag would seem to matter."""
    assert same(result(algo, SPECS[algo].flags), result(algo, SPECS[algo].flags | {"save_every": 2}))
