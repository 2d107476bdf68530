"""Preference data: pairs of a chosen and a rejected completion of the same prompt, or single completions with a label.

A pair is a row as in utils/tasks.py with the columns prompt, chosen and rejected, TRL's names: all three are text, or
all three are lists of chat messages. Where chosen and rejected are whole conversations or whole texts, and prompt is
missing (or is text beside conversations), their common beginning is the prompt. An unpaired row has the columns prompt,
completion, and label, which is true where the completion is desirable.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

from utils.errors import UserError
from utils.tasks import Task, epochs, is_kind, numbered, procedural, read_splits, train_and_heldout
from utils.text import usable_rows

Tokens = TypeVar("Tokens", bound=tuple)  # token ids of a prompt and of its completions


@dataclass(frozen=True)
class Preferences:
    """`heldout` shares no prompt with `train`. `task` scores answers of the model's own; None for a dataset."""

    name: str
    train: list[dict]
    heldout: list[dict]
    task: Task | None = None


def load_preferences(spec: str, num_pairs: int, seed: int) -> Preferences:
    """`countdown` or `sort`: `num_pairs` pairs to train on, drawn with `seed`, and the task's held-out problems. A
    .jsonl/.json/.parquet file or a dataset of the hub: all of its pairs, split as utils/tasks.py splits prompts.

    Raises UserError for an unknown name, a file that is missing, empty or unreadable, and rows that are no pairs.
    """
    if spec in ("countdown", "sort"):
        task = procedural(spec)
        made = (right_and_wrong(spec, task.train(i, seed)) for i in count())
        train = list(islice((row for row in made if row["chosen"] != row["rejected"]), num_pairs))
        heldout = [right_and_wrong(spec, row) for row in task.heldout]
        return Preferences(spec, train, [row for row in heldout if row["chosen"] != row["rejected"]], task)
    data = load_rows(spec, as_pairs)
    if equal := sum(row["chosen"] == row["rejected"] for row in data.train):
        print(
            f"{spec}: in {equal} of {len(data.train)} pairs chosen equals rejected: they teach nothing about preference"
        )
    return data


def load_unpaired(spec: str, num_pairs: int, seed: int) -> Preferences:
    """Unpaired rows from the same sources. A dataset may have them as they are. A pair, also of `countdown` and `sort`,
    makes two: its chosen completion is desirable, its rejected one is not. Raises UserError as load_preferences does,
    and where all rows to train on have the same label."""
    if spec in ("countdown", "sort"):
        data = load_preferences(spec, num_pairs, seed)
        data = replace(data, train=unpair(data.train), heldout=unpair(data.heldout))
    else:
        data = load_rows(spec, as_examples)
    if len(kinds := {row["label"] for row in data.train}) < 2:
        raise UserError(
            f"all labels of {spec} are {kinds.pop()}: desirable and undesirable completions are needed, some of each"
        )
    return data


def load_rows(spec: str, parse: Callable) -> Preferences:
    """The rows of a dataset, turned into pairs or unpaired rows by `parse(rows, spec, split)`. Raises UserError."""
    path = Path(spec).expanduser()
    if path.suffix not in (".jsonl", ".json", ".parquet") and "/" not in spec:
        raise UserError(
            f"unknown source of preferences {spec!r}: give countdown, sort, a .jsonl or .parquet file, or a hub "
            "dataset ORG/NAME"
        )
    splits = {split: parse(rows, spec, split) for split, rows in read_splits(spec).items()}
    return Preferences(path.stem, *train_and_heldout(splits, spec))


def right_and_wrong(name: str, row: dict) -> dict:
    """The row with a right answer as chosen and a wrong one as rejected. The wrong one errs as three in four
    demonstrations do (utils/tasks.py). For sort both are equal if the two smallest digits are."""
    if name == "sort":
        right = "".join(sorted(row["digits"]))
        wrong = right[1] + right[0] + right[2:]
    else:
        steps = row["completion"].rpartition("=")[0]
        right, wrong = f"{steps}={row['target']}", f"{steps}={row['target'] + 1}"
    return row | {"chosen": right, "rejected": wrong}


def as_pairs(rows, spec: str, split: str) -> list[dict]:
    """The rows of a datasets.Dataset as pairs. Raises UserError for missing columns and rows that are no pairs."""
    if missing := {"chosen", "rejected"} - set(rows.column_names):
        raise UserError(
            f"{spec} has no column {' and no column '.join(sorted(missing))}: pairs need chosen and rejected, and "
            f"prompt where those two do not hold it; there are {', '.join(sorted(rows.column_names))}"
        )
    return [as_pair(row, row.where) for row in numbered(rows, spec, split)]


def as_examples(rows, spec: str, split: str) -> list[dict]:
    """The same as unpaired rows; a dataset of pairs gives two for each."""
    columns = set(rows.column_names)
    if {"chosen", "rejected"} <= columns:
        return unpair(as_pairs(rows, spec, split))
    if missing := {"prompt", "completion", "label"} - columns:
        raise UserError(
            f"{spec} has no column {' and no column '.join(sorted(missing))}: unpaired rows need prompt, completion "
            f"and label, and pairs chosen and rejected; there are {', '.join(sorted(columns))}"
        )
    return [as_example(row, row.where) for row in numbered(rows, spec, split)]


def unpair(pairs: list[dict]) -> list[dict]:
    """Two rows for each pair: chosen with the label True, then rejected with False."""
    sides = (("chosen", True), ("rejected", False))
    return [row | {"completion": row[side], "label": label} for row in pairs for side, label in sides]


def as_pair(row: dict, where: str) -> dict:
    """The row with prompt, chosen and rejected of one kind. Raises UserError, which names the row as `where`."""
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    for name in ("chosen", "rejected"):
        check_completion(row, name, where)
    kind = type(chosen)
    if not is_kind(rejected, kind):
        raise UserError(f"{where} has text beside chat messages: chosen and rejected must be of one kind")
    if prompt is None or kind is list and isinstance(prompt, str):
        size = shared_prefix(chosen, rejected)
        prompt, chosen, rejected = chosen[:size], chosen[size:], rejected[size:]
        if not prompt:
            raise UserError(f"{where} has no prompt, and chosen and rejected do not begin alike: give a column prompt")
    check_prompt(prompt, kind, where)
    return row | {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def as_example(row: dict, where: str) -> dict:
    """The row with its label as bool; 0 and 1 are taken for labels too. Raises UserError."""
    check_completion(row, "completion", where)
    check_prompt(row["prompt"], type(row["completion"]), where)
    if row["label"] not in (False, True):
        raise UserError(f"{where} has the label {row['label']!r}: it must be true (desirable) or false, or 1 or 0")
    return row | {"label": bool(row["label"])}


def check_completion(row: dict, name: str, where: str) -> None:
    if not row[name] or not is_kind(row[name], str) and not is_kind(row[name], list):
        raise UserError(f"{where} has {name} {row[name]!r}: it must be text or a list of chat messages, not empty")


def check_prompt(prompt, kind: type, where: str) -> None:
    if not prompt or not is_kind(prompt, kind):
        wanted = "text" if kind is str else "a list of chat messages"
        raise UserError(f"{where} has the prompt {prompt!r}: beside its completions it must be {wanted}, not empty")


def shared_prefix(chosen: str | list[dict], rejected: str | list[dict]) -> int:
    """Length of the prompt that both begin with. Something is left of each. Texts are cut before the space in front of
    the first word that differs: half a word has other tokens."""
    most = min(len(chosen), len(rejected)) - 1
    size = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    if isinstance(chosen, list):
        return size
    return next((i for i in range(size, 0, -1) if chosen[i].isspace() and chosen[i] == rejected[i]), 0)


class Batches:
    """Which rows each optimizer step takes. Every epoch goes through all rows in a new order, a function of `seed`."""

    def __init__(self, rows: int, batch_size: int, seed: int):
        self.rows, self.batch_size, self.seed, self.order = rows, batch_size, seed, epochs(range(rows))

    def __call__(self, step: int) -> list[int]:
        """The rows of a step, which counts from 1."""
        first = (step - 1) * self.batch_size
        return [self.order(i, self.seed) for i in range(first, first + self.batch_size)]

    def first_epoch(self, max_steps: int) -> list[list[int]]:
        """The rows of the first epoch, step by step, as far as the run comes: all rows that it will see."""
        steps = range(1, 1 + min(max_steps, -(-self.rows // self.batch_size)))
        left = self.rows - (len(steps) - 1) * self.batch_size  # of the last step
        return [self(step)[: left if step == steps[-1] else None] for step in steps]


def usable(data: Preferences, encode: Callable[..., Tokens], tokenizer, eos: list[int], args) -> Preferences:
    """The rows that `encode` (`encode_pair` or `encode_row` of utils/text.py) can make into tokens and whose prompts
    leave room for a completion, as `usable_rows` says."""
    parts = [data.train, data.heldout[: args.eval_prompts]]
    train, heldout = usable_rows(parts, lambda row: encode(row, tokenizer, eos), args.max_length - 1,
                                 args.max_prompt_length, "raise --max-length")  # fmt: skip
    return replace(data, train=train, heldout=heldout)


def encode_rows(rows: list[dict], wanted: list[list[int]], encode: Callable[..., Tokens], tokenizer,
                eos: list[int], max_length: int) -> tuple[dict[int, Tokens], int]:  # fmt: skip
    """Row number -> token ids of its prompt and its completions, for the rows in `wanted`, which are usable; and in how
    many of them a completion was cut. A completion and its prompt may have `max_length` tokens together."""
    tokens: dict[int, Any] = {}
    cut = 0
    for row in dict.fromkeys(row for some in wanted for row in some):
        prompt, *completions = encode(rows[row], tokenizer, eos)
        room = max_length - len(prompt)
        cut += any(len(completion) > room for completion in completions)
        tokens[row] = (prompt, *(completion[:room] for completion in completions))
    return tokens, cut
