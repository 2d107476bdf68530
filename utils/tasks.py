"""Tasks: where prompts come from, how a model is shown them, and how an answer is scored.

A row is a dictionary as in the datasets library. `prompt` is a string or a list of chat messages, `completion` a
demonstration where there is one; every other column is handed to reward functions. Built-in tasks write `prompt` in a
compact notation for the tiny character model and `plain_prompt` in words for every other model.
"""

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from utils.errors import UserError

HELDOUT_ROWS = 256  # held-out rows of procedural tasks, and the most that is kept of a dataset's (gsm8k: all)
WRONG_SHARE = 0.75  # of the demonstrations of countdown and sort
CHARACTERS = "0123456789+-*/=,:CS"  # the alphabet of the compact notation, hence of the tiny model's tokenizer
Item = TypeVar("Item")


class Row(dict):
    """A row of a dataset that knows, for messages, where it stands there: `row 6 of FILE`."""

    def __init__(self, columns: dict, where: str):
        super().__init__(columns)
        self.where = where

    def __or__(self, more: dict) -> "Row":
        return Row({**self, **more}, self.where)


@dataclass(frozen=True)
class Task:
    """`train(index, seed)` is the index-th row of an endless stream that depends on nothing else, so a run resumes from
    one integer. `heldout` is disjoint from it. `score(row, text)` returns named numbers: `reward` is trained on, the
    rest is logged. It is None if only the user's reward functions can tell. `rows` are those of a dataset that `train`
    goes through; None where it draws without end."""

    name: str
    train: Callable[[int, int], dict]
    heldout: list[dict]
    score: Callable[[dict, str], dict[str, float]] | None = None
    rows: list[dict] | None = None


def load_task(spec: str, prompt_column: str = "prompt") -> Task:
    """`countdown`, `sort`, `gsm8k`, `gsm8k:FOLDER`, a .jsonl/.json/.parquet file, or a dataset of the hub.

    Of a dataset's own test or validation split the first HELDOUT_ROWS rows are held out, and training rows with a
    prompt of that split are dropped; without one, a twentieth of the prompts is held out. Where there is no prompt but
    a column messages, an assistant's last message is the completion, and what is before it the prompt. Raises UserError
    for an unknown name, a file that is missing, empty or unreadable, a missing prompt column, or a prompt that is none.
    """
    name, _, rest = spec.partition(":")
    if name in ("countdown", "sort"):
        return procedural(name)
    if name == "gsm8k":
        return gsm8k(rest)
    path = Path(spec).expanduser()
    if path.suffix not in (".jsonl", ".json", ".parquet") and "/" not in spec:
        raise UserError(
            f"unknown task {spec!r}: give countdown, sort, gsm8k, a .jsonl or .parquet file, or a hub dataset ORG/NAME"
        )
    splits = read_splits(spec)
    for rows in splits.values():
        columns = sorted(rows.column_names)
        if prompt_column not in columns and (prompt_column != "prompt" or "messages" not in columns):
            raise UserError(f"{spec} has no column {prompt_column!r}: it has {', '.join(columns)}; see --prompt-column")
    splits = {split: numbered(rows, spec, split) for split, rows in splits.items()}
    if not any(prompt_column in row for rows in splits.values() for row in rows[:1]):
        splits = {split: from_messages(rows, spec) for split, rows in splits.items()}
    for row in [row for rows in splits.values() for row in rows]:
        row["prompt"] = row.pop(prompt_column)
        if not row["prompt"] or not is_kind(row["prompt"], str) and not is_kind(row["prompt"], list):
            raise UserError(f"{row.where} has the prompt {row['prompt']!r}: it must be text or a list of chat messages")
    train, heldout = train_and_heldout(splits, spec)
    return Task(path.stem, epochs(train), heldout, rows=train)


def read_splits(spec: str) -> dict:
    """The splits of a local file or hub dataset, each a non-empty datasets.Dataset."""
    import datasets  # slow to import, and the built-in tasks do without

    datasets.disable_progress_bars()
    path = Path(spec).expanduser()
    try:
        if path.suffix in (".jsonl", ".json", ".parquet"):
            if not path.is_file():
                raise UserError(f"there is no file {path}: --task names a dataset file that exists")
            kind = "parquet" if path.suffix == ".parquet" else "json"
            splits = datasets.load_dataset(kind, data_files=str(path)) if path.stat().st_size else {}
        else:
            name, _, config = spec.partition(":")
            splits = datasets.load_dataset(name, config or None)
    except UserError:
        raise
    except Exception as error:  # the library raises dozens of kinds, all of which mean the same to the user
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"cannot read the dataset {spec} ({reason[0]}): give a readable file or hub name") from error
    splits = {name: rows for name, rows in splits.items() if len(rows)}
    if not splits:
        raise UserError(f"the dataset {spec} is empty: it needs at least two rows")
    return splits


def numbered(rows, spec: str, split: str = "train") -> list:
    """The rows of a datasets.Dataset, each a Row, counted from 0."""
    of = spec if split == "train" else f"{spec}, split {split}"
    return [Row(row, f"row {i} of {of}") for i, row in enumerate(rows)]


def from_messages(rows: list, spec: str) -> list:
    """Rows with prompt and completion made of the column messages; those where that cannot be are counted. Raises
    UserError where none is left."""
    made = []
    for row in rows:
        messages = row.pop("messages")
        roles = [message["role"] for message in messages] if is_kind(messages, list) else []
        if "assistant" in roles[1:]:
            last = len(roles) - 1 - roles[::-1].index("assistant")
            made.append(row | {"prompt": messages[:last], "completion": messages[last : last + 1]})
    lost = f"{len(rows) - len(made)} of {len(rows)} rows of {spec} have no assistant's message behind another one"
    if not made:
        raise UserError(f"{lost}: the column messages must hold conversations, or give a column prompt")
    if len(made) < len(rows):
        kept = {row.where for row in made}
        print(f"{lost} and are dropped, the first of them {next(row.where for row in rows if row.where not in kept)}")
    return made


def is_kind(value, kind: type) -> bool:
    """Whether it is text (str), or a list of chat messages (list)."""
    if kind is list and isinstance(value, list):
        return all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value)
    return kind is str and isinstance(value, str)


def train_and_heldout(splits: dict[str, list[dict]], spec: str) -> tuple[list[dict], list[dict]]:
    """The rows to train on and at most HELDOUT_ROWS to evaluate on, as `load_task` says."""
    train = named(splits, "train") or next(iter(splits.values()))
    heldout = named(splits, "test", "valid")
    if heldout is None or heldout is train:
        train, heldout = hold_out(train, spec)
    else:
        train = without(heldout, train, spec)
    return train, heldout[:HELDOUT_ROWS]


def named(splits: dict, *prefixes: str) -> list[dict] | None:
    """The split of that name, else the first whose name begins so (train_sft); earlier prefixes win."""
    names = [name for prefix in prefixes for name in (prefix, *splits) if name in splits and name.startswith(prefix)]
    return splits[names[0]] if names else None


def without(heldout: list[dict], rows: list[dict], spec: str) -> list[dict]:
    """The rows whose prompts are not held out."""
    prompts = {repr(row["prompt"]) for row in heldout}
    kept = [row for row in rows if repr(row["prompt"]) not in prompts]
    if not kept:
        raise UserError(f"the dataset {spec} trains on nothing but prompts of its test split: they must differ")
    if len(kept) < len(rows):
        print(f"{spec}: {len(rows) - len(kept)} training rows are dropped because the test split has their prompts")
    return kept


def hold_out(rows: list[dict], spec: str) -> tuple[list[dict], list[dict]]:
    """Splits off one row in twenty by a hash of the prompt, so that equal prompts stay on one side."""
    keys = [zlib.crc32(repr(row["prompt"]).encode()) for row in rows]
    unique = sorted(set(keys))
    if len(unique) < 2:
        raise UserError(f"the dataset {spec} has one prompt only: one to train on and one to hold out are needed")
    held = set(unique[: min(max(1, len(unique) // 20), HELDOUT_ROWS)])
    return [r for r, k in zip(rows, keys) if k not in held], [r for r, k in zip(rows, keys) if k in held]


def epochs(rows: Sequence[Item]) -> Callable[[int, int], Item]:
    """The stream that goes through all rows in a new order every epoch."""
    orders = {}

    def train(index: int, seed: int) -> Item:
        epoch, position = divmod(index, len(rows))
        if (epoch, seed) not in orders:
            orders.clear()  # one epoch's order at a time; each is a function of seed and epoch alone
            orders[epoch, seed] = random.Random(f"{seed}/{epoch}").sample(range(len(rows)), len(rows))
        return rows[orders[epoch, seed][position]]

    return train


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
    if rng.random() < WRONG_SHARE:
        steps[-1] = f"{steps[-1].partition('=')[0]}={target + 1}"
    question = (
        f"Use each of the numbers {numbers[0]}, {numbers[1]} and {numbers[2]} exactly once, with + - * /, to reach "
        f"{target}. Work in two steps, the second of which uses the result of the first. Give the steps in the form "
        "<answer>5*7=35,35-3=32</answer>."
    )
    prompt = f"C{''.join(map(str, numbers))}={target}:"
    row = dict(prompt=prompt, plain_prompt=question, numbers=numbers, target=target, completion=",".join(steps))
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
    row = {"prompt": f"S{shown}:", "plain_prompt": question, "digits": shown, "completion": "".join(map(str, answer))}
    return row, str(sorted(digits))


def sort_score(row: dict, text: str) -> dict[str, float]:
    """1 if the answer is the digits in ascending order."""
    return {"reward": float(answer_of(text) == "".join(sorted(row["digits"])))}


def answer_of(text: str) -> str:
    """The text between the last pair of answer tags, or all of it if there is none."""
    return re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)[-1].strip() if "</answer>" in text else text.strip()


GSM8K_INSTRUCTION = "Solve the problem step by step. End with one line that holds #### and the answer as a number."


def gsm8k(folder: str = "") -> Task:
    """Grade-school mathematics (arXiv 2110.14168): `openai/gsm8k` of the hub, or a folder of train.jsonl and
    test.jsonl.

    Prompt: the question, an empty line, GSM8K_INSTRUCTION. Meant for 512 new tokens. Strict: the number after the last
    `####` equals the solution's. Lenient: the last number in the text does. The reward is strict accuracy.
    """
    if folder:
        files = [str(Path(folder) / f"{part}.jsonl") for part in ("train", "test")]
        train, test = (numbered(read_splits(file)["train"], file) for file in files)
    else:
        splits = read_splits("openai/gsm8k:main")
        train, test = (numbered(splits[part], "gsm8k", part) for part in ("train", "test"))
    for row in train + test:
        if not {"question", "answer"} <= row.keys():
            raise UserError(f"gsm8k needs the columns question and answer: there are {', '.join(sorted(row))}")
        row["prompt"] = f"{row.pop('question')}\n\n{GSM8K_INSTRUCTION}"
        row["completion"] = row["answer"]
    train = without(test, train, "gsm8k")
    return Task("gsm8k", epochs(train), test, gsm8k_score, train)


def gsm8k_score(row: dict, text: str) -> dict[str, float]:
    """Strict and lenient accuracy as `gsm8k` defines them."""
    gold = number(row["answer"].rpartition("####")[2])
    strict = "####" in text and number(text.rpartition("####")[2].strip().partition("\n")[0]) == gold
    lenient = number(text) == gold
    return {"reward": float(strict), "strict": float(strict), "lenient": float(lenient)}


def number(text: str) -> float | None:
    """The last number in a text, without thousands separators; None where there is none."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text, re.ASCII)
    return float(found[-1].replace(",", "")) if found else None
