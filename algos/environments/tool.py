"""What search.py and python.py share: one tool, and answers that are compared with the row's. Copy one to change it.

A turn ends behind a call or behind an answer: `<search>..</search>`, `<python>..</python>`, `<answer>..</answer>`. Rows
have a column `answer`, a text or several; the reward is 1 for one of them (`exact_match`). An answer ends the episode,
and so does a turn without a call, with 0. Say in the prompts how to call.
"""

import re
import string

from utils.builtin import answer_of
from utils.core import UserError

# punctuation but in numbers: that of -3, .5 and 1/2, not of F-16
NO_SIGN = re.compile(rf"(?!(?<![^\W\d_])[-.]\d|(?<=\d)/\d)[{re.escape(string.punctuation)}]")


def exact_match(row: dict, text: str) -> float:
    """1 if the text between the last answer tags equals row["answer"], or one of them, but for case, punctuation,
    articles and white space (the rule of SQuAD, arXiv 1606.05250). Unlike there, -3, 3.5 and 1/2 keep their signs, and
    an answer that is nothing but an article or punctuation, such as the choice A, stays."""

    def plain(text: str) -> list[str]:
        words = NO_SIGN.sub("", text.lower()).split()
        return [word for word in words if word not in ("a", "an", "the")] or words or text.split()

    golds = [row["answer"]] if isinstance(row["answer"], str) else row["answer"]
    return float("</answer>" in text and plain(answer_of(text)) in [plain(str(gold)) for gold in golds])


class Tool:
    """One tool: a turn `<tag>call</tag>` is answered with `<shown>what use(call) returns</shown>`."""

    tag: str
    shown: str
    stop: tuple[str, ...]

    def reset(self, row: dict, seed: int) -> None:
        if not isinstance(row.get("answer"), (str, list)):
            raise UserError("--environment needs rows with a column answer, a text or a list of texts: look at --task")
        self.row = row

    def step(self, text: str) -> tuple[str, float, bool]:
        calls = re.findall(f"<{self.tag}>(.*?)</{self.tag}>", text, re.DOTALL)
        if not calls or "</answer>" in text:
            return "", exact_match(self.row, text), True
        return f"\n<{self.shown}>{self.use(calls[-1])}</{self.shown}>\n", 0.0, False

    def use(self, call: str) -> str:
        raise NotImplementedError
