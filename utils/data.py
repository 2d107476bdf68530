"""Prompts and answers: where they come from, how a model is shown them, how an answer is scored.

A row is a dictionary. `prompt` is text or a list of chat messages; every other column is handed to reward functions.
Built-in tasks write `prompt` in a compact notation for the tiny character model and `plain_prompt` in words for others.
"""

import random
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from utils.core import UserError

FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
GSM8K = "Solve the problem step by step. End with one line that holds #### and the answer as a number."


class Task(NamedTuple):
    """`train(index, seed)`: the index-th row of an endless stream that depends on nothing else, so a run resumes from one
    integer. `score(row, text)`: the reward, None if only the user's functions can tell."""

    name: str
    train: Callable[[int, int], dict]
    heldout: Sequence[dict]
    score: Callable[[dict, str], float] | None = None


def load_task(spec: str, prompt_column: str = "prompt") -> Task:
    """countdown, sort, gsm8k, or what `load_rows` reads."""
    if spec in ("countdown", "sort"):
        return procedural(spec, *{"countdown": (countdown_row, countdown_score), "sort": (sort_row, sort_score)}[spec])
    train, heldout = load_rows("openai/gsm8k:main" if spec == "gsm8k" else spec)
    if spec == "gsm8k":
        train, heldout = (rows.map(lambda row: {"prompt": f"{row['question']}\n\n{GSM8K}"}) for rows in (train, heldout))
    elif prompt_column != "prompt":
        train, heldout = (rows.rename_column(prompt_column, "prompt") for rows in (train, heldout))
    return Task(Path(spec).stem, epochs(train), heldout.to_list(), gsm8k_score if spec == "gsm8k" else None)


def load_rows(spec: str):
    """Rows to train on, and held-out ones: the first 256 of the dataset's own test or validation split, else a twentieth.
    spec: a .jsonl, .json, .parquet or .csv file, a folder of save_to_disk, or a hub name, perhaps with :CONFIG."""
    import datasets  # slow to import, and the built-in tasks do without

    name, _, config = spec.partition(":")
    if kind := FILES.get(Path(spec).suffix.lower()):
        splits = datasets.load_dataset(kind, data_files=spec)
    elif Path(spec).is_dir():
        splits = datasets.load_from_disk(spec)
    else:
        splits = datasets.load_dataset(name, config or None)
    splits = splits if isinstance(splits, dict) else {"train": splits}
    named = {part: next((n for n in splits if n.startswith(part)), None) for part in ("train", "test", "valid")}
    train, heldout = splits[named["train"] or next(iter(splits))], named["test"] or named["valid"]
    if heldout is None:
        parts = train.train_test_split(min(256, max(1, len(train) // 20)), seed=0)
        return parts["train"], parts["test"]
    return train, splits[heldout].select(range(min(256, len(splits[heldout]))))


def epochs(rows: Sequence) -> Callable[[int, int], dict]:
    """The stream that goes through all rows in a new order every epoch."""
    orders: dict = {}

    def train(index: int, seed: int) -> dict:
        epoch, place = divmod(index, len(rows))
        if (epoch, seed) not in orders:
            orders.clear()
            orders[epoch, seed] = random.Random(f"{seed}/{epoch}").sample(range(len(rows)), len(rows))
        return rows[orders[epoch, seed][place]]

    return train


def present(row: dict, tokenizer) -> str | list[dict]:
    """The prompt as this model gets it: messages for a model with a chat template, else text; compact notation for the
    tiny character model alone."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        prompt = prompt if len(tokenizer) < 100 else row.get("plain_prompt", prompt)
        if tokenizer.chat_template is None or tokenizer.raw_prompt:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if tokenizer.system_prompt and prompt[0]["role"] != "system":
        prompt = [{"role": "system", "content": tokenizer.system_prompt}, *prompt]
    return prompt


def encode_prompt(row: dict, tokenizer) -> list[int]:
    """Token ids of the row's prompt, up to where the completion begins. A template brings its own special tokens."""
    prompt = present(row, tokenizer)
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    kwargs = row.get("chat_template_kwargs") or {}
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, **kwargs)["input_ids"]


def procedural(name: str, make: Callable, score: Callable) -> Task:
    """Rows are drawn afresh; those whose key hashes to 0 mod 10 are held out, whatever their order of digits."""

    def draw(rng: random.Random, want_heldout: bool) -> dict:
        while True:
            row, key = make(rng)
            if (zlib.crc32(f"{name} {key}".encode()) % 10 == 0) == want_heldout:
                return row

    heldout, rng = {}, random.Random(name)
    while len(heldout) < 256:
        row = draw(rng, True)
        heldout[row["prompt"]] = row
    return Task(name, lambda i, seed: draw(random.Random(f"{name}/{seed}/{i}"), False), list(heldout.values()), score)


WRONG_SHARE = 0.75  # of the demonstrations of countdown and sort


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


def countdown_score(row: dict, text: str) -> float:
    """1 if the steps use each number once, are right, and end at the target. A parser, never `eval`."""
    steps = answer_of(text).replace(" ", "").split(",")
    left = list(row["numbers"])
    for step in steps:
        match = re.fullmatch(r"(\d{1,4})([-+*/])(\d{1,4})=(\d{1,5})", step, re.ASCII)
        if match is None:
            return 0.0
        a, b, result = (int(match[i]) for i in (1, 3, 4))
        right = {"+": a + b == result, "-": a - b == result, "*": a * b == result, "/": b > 0 and b * result == a}
        if not right[match[2]] or a not in left or b not in [n for i, n in enumerate(left) if i != left.index(a)]:
            return 0.0
        left.remove(a)
        left.remove(b)
        left.append(result)
    return float(left == [row["target"]])


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


def sort_score(row: dict, text: str) -> float:
    """1 if the answer is the digits in ascending order."""
    return float(answer_of(text) == "".join(sorted(row["digits"])))


def answer_of(text: str) -> str:
    """The text between the last pair of answer tags; without a pair what stands before a closing tag, else all: a
    prompt may hold the opening tag."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return (found[-1] if found else text.partition("</answer>")[0]).strip()


def gsm8k_score(row: dict, text: str) -> float:
    """1 if the number after the last #### is the solution's."""
    return float("####" in text and number(text) == number(row["answer"]))


def number(text: str) -> float | None:
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text.rpartition("####")[2], re.ASCII)
    return float(found[0].replace(",", "")) if found else None


def usable(task: Task, model, tokenizer, args) -> Task:
    """PLACEHOLDER"""
    return task
