"""Wrong input of the user's: the exception that says so in one sentence, the bounds of numbers, NAME=VALUE pairs.

A bound stands in the type of its field: `max_steps: PositiveInt = 100`, `tau: Annotated[float, "above 0"] = 0.005`.
"""

import contextlib
import json
import math
from typing import Annotated, get_args, get_type_hints

BOUNDS = {
    "at least 0": lambda x: x >= 0,
    "at least 1": lambda x: x >= 1,
    "above 0": lambda x: x > 0,
    "from 0 to 1": lambda x: 0 <= x <= 1,
    "at least 0 and below 2**63": lambda x: 0 <= x < 2**63,
    "at least 0 and below 1": lambda x: 0 <= x < 1,
    "above 0 and at most 1": lambda x: 0 < x <= 1,
    "above 0 and below 1": lambda x: 0 < x < 1,
    "from -1 to 1": lambda x: -1 <= x <= 1,
}
PositiveInt = Annotated[int, "at least 1"]
NonNegativeInt = Annotated[int, "at least 0"]
Seed = Annotated[int, "at least 0 and below 2**63"]
PositiveFloat = Annotated[float, "above 0"]
NonNegativeFloat = Annotated[float, "at least 0"]
UnitInterval = Annotated[float, "from 0 to 1"]


class UserError(Exception):
    """Wrong input. The message is one sentence: what was wrong and what would be right (exit code 2, no traceback)."""


def check_numbers(args) -> None:
    """Raises UserError where a number among the fields of `args` is not finite or breaks the bound of its type. None is
    a default that is still open."""
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        bounds = [text for kind in (hint, *get_args(hint)) for text in getattr(kind, "__metadata__", ())]
        for number in value if isinstance(value, tuple) else (value,):
            numeric = isinstance(number, (int, float))
            if numeric and not (math.isfinite(number) and all(BOUNDS[b](number) for b in bounds)):
                right = " and ".join(bounds if math.isfinite(number) else ["finite", *bounds])
                raise UserError(f"--{name.replace('_', '-')} is {value}: it must be {right}")


def parse_pairs(pairs: tuple[str, ...], flag: str) -> dict:
    """NAME=VALUE pairs; a VALUE is read as JSON where it is JSON, or True, False and None as Python's, else as text.
    Raises UserError that names `flag`."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"{flag} {pair} is not NAME=VALUE")
        values[name] = {"True": True, "False": False, "None": None}.get(value, value)
        with contextlib.suppress(ValueError):
            values[name] = json.loads(value)
    return values
