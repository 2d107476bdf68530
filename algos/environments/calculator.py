"""python algos/grpo_multiturn.py --environment calculator --max-turns 2 --num-prompts 64 --num-generations 8"""

import re

from utils.builtin import countdown_score
from utils.core import UserError
from utils.data import Task, load_task


def load(_: str) -> type:
    return Calculator


class Calculator:
    """Countdown, where the environment writes the result behind `=`. Two steps; the reward is countdown's own. What
    cannot be calculated ends the episode with 0."""

    stop = ("=",)

    @staticmethod
    def task() -> Task:
        return load_task("countdown")

    def reset(self, row: dict, seed: int) -> None:
        if "numbers" not in row:
            raise UserError("--environment calculator needs the rows of countdown: leave --task out")
        self.row, self.text, self.steps = row, "", 0

    def step(self, text: str) -> tuple[str, float, bool]:
        match = re.search(r"(\d{1,4})([-+*/])(\d{1,4})=$", text, re.ASCII)
        if match is None or (match[2] == "/" and (int(match[3]) == 0 or int(match[1]) % int(match[3]))):
            return "", 0.0, True
        a, b = int(match[1]), int(match[3])
        result = str({"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[match[2]])
        self.text, self.steps = self.text + text + result, self.steps + 1
        if self.steps == 2:
            return result, countdown_score(self.row, self.text), True
        return result, 0.0, False
