"""Wrong input of the user's: the exception that says so in one sentence, and the check of numbers."""

import math

RULES = {
    "finite": math.isfinite,
    "at least 0": lambda x: x >= 0,
    "at least 1": lambda x: x >= 1,
    "above 0": lambda x: x > 0,
    "from 0 to 1": lambda x: 0 <= x <= 1,
    "at least 0 and below 1": lambda x: 0 <= x < 1,
    "above 0 and at most 1": lambda x: 0 < x <= 1,
    "above 0 and below 1": lambda x: 0 < x < 1,
}


class UserError(Exception):
    """Wrong input. The message is one sentence: what was wrong and what would be right (exit code 2, no traceback)."""


def check_numbers(args, names: dict[str, str]) -> None:
    """Raises UserError where an argument is not finite or breaks its rule; None, a default still open, breaks none.
    names: key of RULES -> arguments, separated by spaces."""
    for rule, arguments in names.items():
        for name in arguments.split():
            value = getattr(args, name)
            if value is not None and not (math.isfinite(value) and RULES[rule](value)):
                right = rule if rule == "finite" or math.isfinite(value) else f"finite and {rule}"
                raise UserError(f"--{name.replace('_', '-')} is {value}: it must be {right}")
