"""The one exception that means: the user's input was wrong, and this sentence says how."""


class UserError(Exception):
    """Wrong input. The message is one sentence: what was wrong and what would be right (exit code 2, no traceback)."""
