"""python algos/grpo.py --task reasoning_gym:leg_counting --model ORG/NAME
python algos/grpo.py --task "reasoning_gym:basic_arithmetic?max_terms=2&max_digits=1" --model ORG/NAME

The hundred procedural tasks of the package reasoning-gym, with settings of theirs: pip install reasoning-gym.
"""

import random
import re
import zlib
from itertools import count

from utils.builtin import answer_of
from utils.core import UserError, as_kwargs
from utils.data import Task

HELDOUT, TRIES = 128, 10_000  # questions, and how many are drawn to find them: a small task has fewer
DRAWS = 2**31
NUMBER = re.compile(r"[-\u2212]?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def stated(text: str, right: str) -> str:
    """What `text` gives as its answer: what stands within its last answer tags. Without tags: its last number, where
    the right answer is a number, else all of it but quotes and a full stop at its end."""
    answer = answer_of(text)
    if "answer>" in text or not NUMBER.fullmatch(right):
        return answer.strip("\"'`.* ")
    numbers = NUMBER.findall(answer)
    return numbers[-1].rstrip(",").replace(",", "").replace("\u2212", "-") if numbers else ""


def load_task(spec: str) -> Task:
    """NAME or NAME?SETTING=VALUE&..., a VALUE read as JSON where it is JSON. Questions whose hash is 0 mod 10 are held
    out, so none of them is trained on. The reward is the package's `score_answer`, from 0 to 1, of what is `stated`."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError("--task reasoning_gym needs its package: pip install reasoning-gym") from error
    name, _, given = spec.partition("?")
    try:
        questions = reasoning_gym.create_dataset(name, seed=0, **as_kwargs(filter(None, given.split("&"))))
        questions[DRAWS - 1]  # acre has a short list
    except (ValueError, TypeError, AssertionError, IndexError) as error:  # an unknown name, setting, or value
        raise UserError(f"cannot make --task reasoning_gym:{spec} ({error}): give what it has") from error

    def draw(number: int, heldout: bool) -> dict | None:
        entry = questions[number]
        if (zlib.crc32(entry["question"].encode()) % 10 == 0) != heldout:
            return None
        return {"prompt": entry["question"], "completion": entry["answer"], **entry}

    def train(index: int, seed: int) -> dict:
        rng = random.Random(f"{seed}/{index}")
        return next(row for _ in count() if (row := draw(rng.randrange(DRAWS), False)))

    def score(row: dict, text: str) -> float:
        return float(questions.score_answer(stated(text, row["answer"]), row))

    heldout: dict[str, dict] = {}
    others = 0
    for number in range(TRIES):
        if row := draw(number, True):
            heldout[row["prompt"]] = row
        others += row is None
        if len(heldout) == HELDOUT:
            break
    if not heldout or not others:
        raise UserError(f"--task reasoning_gym:{spec} has so few questions that none can be held out: make it larger")
    return Task(name, train, list(heldout.values()), score)
