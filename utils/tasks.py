"""Tasks: where prompts come from, how a model is shown them, and how an answer is scored.

A row is a dictionary as in the datasets library. `prompt` is a string or a list of chat messages, `completion` a
demonstration where there is one; every other column is handed to reward functions. Built-in tasks write `prompt` in a
compact notation for the tiny character model and `plain_prompt` in words for every other model. The demonstrations of
countdown and sort are mostly wrong; their `solution` is right.
"""

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from utils.rows import (
    HELDOUT_ROWS,
    Lazy,
    Row,
    RowFault,
    check_columns,
    check_kind,
    epochs,
    is_kind,
    keys_of,
    load_rows,
    numbered,
    read_splits,
    without,
)

WRONG_SHARE = 0.75  # of the demonstrations of countdown and sort
CHARACTERS = "0123456789+-*/=,:CS"  # the alphabet of the compact notation, hence of the tiny model's tokenizer


@dataclass(frozen=True)
class Task:
    """`train(index, seed)` is the index-th row of an endless stream that depends on nothing else, so a run resumes from
    one integer. `heldout` is disjoint from it. `score(row, text)` returns named numbers: `reward` is trained on, the
    rest is logged. It is None if only the user's reward functions can tell. `rows` are those of a dataset that `train`
    goes through; None where it draws without end. `answer(text)` is equal for texts that give the same answer, whether
    it is right or not; None where a text gives none."""

    name: str
    train: Callable[[int, int], dict]
    heldout: Sequence[dict]
    score: Callable[[dict, str], dict[str, float]] | None = None
    rows: Sequence[dict] | None = None
    answer: Callable[[str], object] = lambda text: answer_of(text) or None


def load_task(spec: str, prompt_column: str = "prompt", completions: bool = False) -> Task:
    """`countdown`, `sort`, `gsm8k`, `gsm8k:FOLDER`, or what `load_rows` reads.

    Where there is no prompt but a column messages, an assistant's last message is the completion, and what is before it
    the prompt. So it is where the run needs `completions` and there is no column completion. Raises UserError as
    `load_rows` does.
    """
    name, _, rest = spec.partition(":")
    if name in ("countdown", "sort"):
        return procedural(name)
    if name == "gsm8k":
        return gsm8k(rest)

    def with_prompt(row: Row) -> Row:
        prompt = row.pop(prompt_column)
        check_kind(prompt, "the prompt", row)
        row.pop("plain_prompt", None)  # which built-in tasks show in place of the prompt
        return row | {"prompt": prompt}

    def parse(rows: Lazy, columns: set[str]) -> Lazy:
        lacks = "prompt" not in columns or (completions and "completion" not in columns)
        if prompt_column == "prompt" and "messages" in columns and lacks:
            return Lazy(from_messages, rows)
        check_columns(columns, {prompt_column}, spec, "see --prompt-column")
        return Lazy(with_prompt, rows)

    train, heldout = load_rows(spec, "countdown, sort, gsm8k", parse)
    return Task(Path(spec).stem, epochs(train), list(heldout), rows=train, answer=final_answer)


def load_tasks(specs: Sequence[str], prompt_column: str) -> list[Task]:
    """Tasks that take turns in a run that needs completions. Those of different files have different names, and what
    one of them holds out none of them trains on."""
    loaded: dict[str, Task] = {}
    for spec in dict.fromkeys(specs):
        task, names = load_task(spec, prompt_column, completions=True), {other.name for other in loaded.values()}
        loaded[spec] = replace(task, name=f"{task.name}_{len(names) + 1}") if task.name in names else task
    if len(loaded) > 1:
        held = {key for task in loaded.values() for key in keys_of(task.heldout)}
        for spec, task in loaded.items():
            if task.rows is not None:
                rows = without(held, task.rows, keys_of(task.rows), spec)
                loaded[spec] = replace(task, rows=rows, train=epochs(rows))
    return [loaded[spec] for spec in specs]


def from_messages(row: Row) -> Row:
    """The row with prompt and completion made of the column messages. Raises RowFault where that cannot be."""
    messages = row.pop("messages")
    roles = [message["role"] for message in messages] if is_kind(messages, list) else []
    last = max((i for i, role in enumerate(roles) if role == "assistant"), default=0)
    if not last:
        raise RowFault(row, "has no assistant's message behind another one in its column messages, which is the prompt "
                            "as it is with --prompt-column messages")  # fmt: skip
    return row | {"prompt": messages[:last], "completion": messages[last : last + 1]}


def procedural(name: str) -> Task:
    """Rows are drawn afresh; those whose key hashes to 0 mod 10 are held out, whatever their order of digits."""
    make, score = {"countdown": (countdown_row, countdown_score), "sort": (sort_row, sort_score)}[name]

    def draw(rng: random.Random, want_heldout: bool) -> dict:
        while True:
            row, key = make(rng)
            if (zlib.crc32(f"{name} {key}".encode()) % 10 == 0) == want_heldout:
                return row

    heldout, rng = {}, random.Random(name)
    while len(heldout) < HELDOUT_ROWS:
        row = draw(rng, True)
        heldout[row["prompt"]] = row
    return Task(name, lambda i, seed: draw(random.Random(f"{name}/{seed}/{i}"), False), list(heldout.values()), score)


def countdown_row(rng: random.Random) -> tuple[dict, str]:
    """Three numbers from 1 to 9 and a target from 1 to 99 that two steps reach, larger operand first. Three in four
    demonstrations end one too high, so the warm start's likeliest answer is wrong, and sharpening keeps it wrong."""
    target = 100
    while target > 99:
        numbers = [rng.randint(1, 9) for _ in range(3)]
        left, steps = list(numbers), []
        while len(left) > 1:
            a, b = sorted((left.pop(rng.randrange(len(left))) for _ in range(2)), reverse=True)
            options = [("+", a + b), ("*", a * b)] + [("-", a - b)] * (a > b) + [("/", a // b)] * (a % b == 0)
            operator, result = rng.choice(options)
            steps.append(f"{a}{operator}{b}={result}")
            left.append(result)
        target = left[0]
    solution = ",".join(steps)
    if rng.random() < WRONG_SHARE:
        steps[-1] = f"{steps[-1].partition('=')[0]}={target + 1}"
    question = (
        f"Use each of the numbers {numbers[0]}, {numbers[1]} and {numbers[2]} exactly once, with + - * /, to reach "
        f"{target}. Work in two steps, the second of which uses the result of the first. Give the steps in the form "
        "<answer>5*7=35,35-3=32</answer>."
    )
    prompt = f"C{''.join(map(str, numbers))}={target}:"
    row = dict(prompt=prompt, plain_prompt=question, numbers=numbers, target=target, completion=",".join(steps),
               solution=solution)  # fmt: skip
    return row, f"{sorted(numbers)} {target}"


def countdown_score(row: dict, text: str) -> dict[str, float]:
    """1 if the steps use each number once, are right, and end at the target. A parser, never `eval`."""
    steps = answer_of(text).replace(" ", "").split(",")
    left = list(row["numbers"])
    for step in steps:
        match = re.fullmatch(r"(\d{1,4})([-+*/])(\d{1,4})=(\d{1,5})", step, re.ASCII)
        if match is None:
            return {"reward": 0.0}
        a, b, result = (int(match[i]) for i in (1, 3, 4))
        right = {"+": a + b == result, "-": a - b == result, "*": a * b == result, "/": b > 0 and b * result == a}
        if not right[match[2]] or a not in left or b not in [n for i, n in enumerate(left) if i != left.index(a)]:
            return {"reward": 0.0}
        left.remove(a)
        left.remove(b)
        left.append(result)
    return {"reward": float(left == [row["target"]])}


def sort_row(rng: random.Random) -> tuple[dict, str]:
    """Three to eight digits. Three in four demonstrations swap the first two of the sorted digits, so the warm
    start's likeliest answer is wrong (unless those two are equal), and sharpening keeps it wrong."""
    digits = [rng.randint(0, 9) for _ in range(rng.randint(3, 8))]
    answer = sorted(digits)
    if rng.random() < WRONG_SHARE:
        answer[0], answer[1] = answer[1], answer[0]
    shown = "".join(map(str, digits))
    question = f"Sort the digits {shown} in ascending order and give them in the form <answer>0123</answer>."
    row = {"prompt": f"S{shown}:", "plain_prompt": question, "digits": shown, "completion": "".join(map(str, answer)),
           "solution": "".join(map(str, sorted(digits)))}  # fmt: skip
    return row, str(sorted(digits))


def sort_score(row: dict, text: str) -> dict[str, float]:
    """1 if the answer is the digits in ascending order."""
    return {"reward": float(answer_of(text) == "".join(sorted(row["digits"])))}


def answer_of(text: str) -> str:
    """The text between the last pair of answer tags; without a pair what stands before a closing tag, else all: a
    prompt may hold the opening tag."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return (found[-1] if found else text.partition("</answer>")[0]).strip()


def final_answer(text: str) -> str | None:
    """What a text states as its answer: between the last pair of answer tags, else in the last \\boxed{}; None where
    there is neither."""
    if "</answer>" in text:
        return answer_of(text) or None
    depth, rest = 1, text.rpartition("\\boxed{")[2] if "\\boxed{" in text else ""
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:i].strip() or None
    return None


GSM8K_INSTRUCTION = "Solve the problem step by step. End with one line that holds #### and the answer as a number."


def gsm8k(folder: str = "") -> Task:
    """Grade-school mathematics (arXiv 2110.14168): `openai/gsm8k` of the hub, or a folder of train.jsonl and
    test.jsonl.

    Prompt: the question, an empty line, GSM8K_INSTRUCTION. Meant for 512 new tokens. Strict: the number after the last
    `####` equals the solution's. Lenient: the last number in the text does. The reward is strict accuracy.
    """
    if folder:
        splits = {part: read_splits(str(Path(folder) / f"{part}.jsonl"))["train"] for part in ("train", "test")}
    else:
        splits = read_splits("openai/gsm8k:main")

    def problem(row: Row) -> Row:
        return row | {"prompt": f"{row.pop('question')}\n\n{GSM8K_INSTRUCTION}", "completion": row["answer"]}

    for table in splits.values():
        check_columns(set(table.column_names), {"question", "answer"}, "gsm8k", "it needs both")
    train, test = (Lazy(problem, numbered(splits[part], "gsm8k", part)) for part in ("train", "test"))
    train = without(set(keys_of(test)), train, keys_of(train), "gsm8k")
    return Task("gsm8k", epochs(train), list(test), gsm8k_score, train, stated)


def gsm8k_score(row: dict, text: str) -> dict[str, float]:
    """Strict and lenient accuracy as `gsm8k` defines them."""
    gold = number(row["answer"].rpartition("####")[2])
    strict = "####" in text and stated(text) == gold
    lenient = number(text) == gold
    return {"reward": float(strict), "strict": float(strict), "lenient": float(lenient)}


def stated(text: str) -> float | None:
    """The first number in the line of the last `####`; None where there is none."""
    return number(text.rpartition("####")[2].strip().partition("\n")[0], 0) if "####" in text else None


def number(text: str, which: int = -1) -> float | None:
    """The last number in a text, or another one, without thousands separators; None where there is none."""
    found = re.findall(r"[-\u2212]?(?:\d[\d,]*(?:\.\d+)?|(?<!\w)\.\d+)", text, re.ASCII)
    return float(found[which].replace(",", "").replace("\u2212", "-")) if found else None
