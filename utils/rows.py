"""Rows of datasets: files, folders and hub names, what of them is held out, and their order in training.

A row is a dictionary as in the datasets library, and knows where it stands there. Rows stay on the disk: each is made
when it is asked for.
"""

import hashlib
import random
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from utils.errors import UserError

HELDOUT_ROWS = 256  # held-out rows of procedural tasks, and the most that is kept of a dataset's (gsm8k: all)
FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}  # formats of the datasets library
KEPT = 4096  # encoded rows that are kept in memory; others are encoded anew
KINDS: dict[type, str] = {str: "text", list: "a list of chat messages"}  # of prompts and completions
Item = TypeVar("Item")


class Lazy(Sequence):
    """`function` of each of `items`, called whenever that one is asked for. So rows stay on the disk, from where Arrow
    maps them into memory, and a dataset may be larger than the memory."""

    def __init__(self, function: Callable, items: Sequence):
        self.function, self.items = function, items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i):
        return Lazy(self.function, self.items[i]) if isinstance(i, slice) else self.function(self.items[i])

    def __add__(self, more: Sequence) -> "Lazy":
        return Lazy(lambda i: self[i] if i < len(self) else more[i - len(self)], range(len(self) + len(more)))


def remembered(rows: Sequence) -> Lazy:
    """The same, of which the newest are kept in memory."""
    return Lazy(lru_cache(KEPT)(rows.__getitem__), range(len(rows)))


def selected(rows: Sequence[Item], condition: Callable[[Item], bool]) -> Lazy:
    """The rows for which the condition holds; only their numbers are kept."""
    return Lazy(rows.__getitem__, array("q", (i for i, row in enumerate(rows) if condition(row))))


class Row(dict):
    """A row of a dataset that knows, for messages, where it stands there: `row 6 of FILE`."""

    def __init__(self, columns: dict, where: str):
        super().__init__(columns)
        self.where = where

    def __or__(self, more: dict) -> "Row":
        return Row({**self, **more}, self.where)


class RowFault(UserError):
    """Why a row cannot be used: it is dropped and counted, and the run goes on."""

    def __init__(self, row: dict, why: str):
        super().__init__(f"{getattr(row, 'where', 'a row')} {why}")


def load_rows(spec: str, names: str, parse: Callable[[Lazy, set[str]], Lazy]) -> tuple[Lazy, Lazy]:
    """Rows to train on and at most HELDOUT_ROWS held-out ones of a local file, a local folder or a hub dataset.
    `parse(rows, columns)` makes prompts of a split's rows; those for which it raises RowFault are dropped.

    Of a dataset's own test or validation split the first rows are held out, and training rows with a prompt of that
    split are dropped; without one, a twentieth of the prompts is held out. Raises UserError for a source that is
    neither file nor hub name nor one of `names`, and for a file that is missing, empty or unreadable.
    """
    if Path(spec).suffix.lower() not in FILES and "/" not in spec and not Path(spec).is_dir():
        there = f"{names}, a {', '.join(FILES)} file, a folder of save_to_disk, or a hub dataset ORG/NAME"
        raise UserError(f"unknown source of rows {spec!r}: give {there}")
    tables = read_splits(spec).items()
    splits = {split: parse(numbered(table, spec, split), set(table.column_names)) for split, table in tables}
    train = named(splits, "train") or next(iter(splits.values()))
    heldout = named(splits, "test", "valid")
    if heldout is None or heldout is train:
        train, heldout = hold_out(*sound(train, spec), spec)
    else:
        heldout, others = sound(heldout, spec)
        train = without(set(others), *sound(train, spec), spec)
    return train, heldout[:HELDOUT_ROWS]


def sound(rows: Lazy, spec: str) -> tuple[Lazy, array]:
    """The rows without a RowFault, and their keys: each row is made once. The others are counted, the first of them
    shown. Raises UserError where none is left."""
    kept, keys, faults = array("q"), array("Q"), []
    for i in range(len(rows)):
        try:
            keys.append(key_of(rows[i]))
            kept.append(i)
        except RowFault as fault:
            faults.append(str(fault))
    if faults and not kept:
        raise UserError(f"no row of {spec} can be used: {faults[0]}")
    if faults:
        lost = f"{len(faults)} of {len(rows)} rows of {spec} cannot be used and are dropped"
        print(f"{lost}, the first because {faults[0]}")
    return Lazy(rows.__getitem__, kept) if faults else rows, keys


def read_splits(spec: str) -> dict:
    """The splits of a local file, a local folder or a hub dataset, each a non-empty datasets.Dataset."""
    import datasets  # slow to import, and the built-in tasks do without

    datasets.disable_progress_bars()
    path = Path(spec).expanduser()
    is_file = path.suffix.lower() in FILES and not path.is_dir()
    if not path.exists() and (is_file or spec.startswith((".", "/", "~"))):
        raise UserError(f"there is no file {path}: --task names a dataset file that exists")
    if path.is_file() and not is_file:
        raise UserError(f"{path} is no {', '.join(FILES)} file: save the dataset as one of these")
    name, _, config = spec.partition(":")
    try:
        if is_file:
            kind = FILES[path.suffix.lower()]
            splits = datasets.load_dataset(kind, data_files=str(path)) if path.stat().st_size else {}
        elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            splits = datasets.load_from_disk(str(path))
            splits = splits if isinstance(splits, dict) else {"train": splits}
        else:
            splits = datasets.load_dataset(str(path) if path.is_dir() else name, config or None)
    except Exception as error:  # the library raises dozens of kinds, all of which mean the same to the user
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"cannot read the dataset {spec} ({reason[0]}): give a readable file or hub name") from error
    splits = {name: rows for name, rows in splits.items() if len(rows)}
    if not splits:
        raise UserError(f"the dataset {spec} is empty: it needs at least two rows")
    return splits


def numbered(table, spec: str, split: str) -> Lazy:
    """The rows of a datasets.Dataset, each a Row, counted from 0."""
    of = spec if split == "train" else f"{spec}, split {split}"

    def row(i: int) -> Row:
        return Row({name: without_none(x) if is_structs(x) else x for name, x in table[i].items()}, f"row {i} of {of}")

    def is_structs(value) -> bool:
        return isinstance(value, list) and bool(value) and isinstance(value[0], dict)

    return Lazy(row, range(len(table)))


def without_none(value):
    """Without None for names in dictionaries, content apart: where rows differ, Arrow writes it for what one lacks."""
    if isinstance(value, dict):
        return {name: without_none(part) for name, part in value.items() if part is not None or name == "content"}
    return [without_none(part) for part in value] if isinstance(value, list) else value


def is_kind(value, kind: type) -> bool:
    """Whether it is text (str), or a list of chat messages (list). A call of tools may have no content."""
    if kind is list and isinstance(value, list):
        return all(isinstance(m, dict) and isinstance(m.get("role"), str) and {"content", "tool_calls"} & m.keys()
                   for m in value)  # fmt: skip
    return kind is str and isinstance(value, str)


def check_kind(value, name: str, row: dict, kinds: Sequence[type] = (str, list)) -> None:
    """Raises RowFault where a value of the row, called `name`, is empty or of none of these kinds."""
    if not value or not any(is_kind(value, kind) for kind in kinds):
        raise RowFault(row, f"has {name} {value!r}: it must be {' or '.join(KINDS[k] for k in kinds)}, not empty")


def check_columns(columns: set[str], wanted: set[str], spec: str, remedy: str) -> None:
    """Raises UserError where a dataset lacks some of the columns that are wanted."""
    if missing := [repr(name) for name in sorted(wanted - columns)]:
        there = ", ".join(sorted(columns))
        raise UserError(f"{spec} has no column {' and no column '.join(missing)}: {remedy}; there are {there}")


def named(splits: dict, *prefixes: str) -> Lazy | None:
    """The split of that name, else the first whose name begins so (train_sft); earlier prefixes win."""
    names = [name for prefix in prefixes for name in (prefix, *splits) if name in splits and name.startswith(prefix)]
    return splits[names[0]] if names else None


def key_of(row: dict) -> int:
    """Equal for equal prompts; whatever they have in common, others are as far apart as random numbers."""
    prompt = row["prompt"]
    text = repr(prompt if isinstance(prompt, str) else [sorted(message.items()) for message in prompt])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def keys_of(rows: Sequence[dict]) -> array:
    return array("Q", map(key_of, rows))


def without(heldout: set[int], rows: Sequence[dict], keys: Sequence[int], spec: str) -> Lazy:
    """The rows whose keys are not in `heldout`."""
    kept = array("q", (i for i, key in enumerate(keys) if key not in heldout))
    if not kept:
        raise UserError(
            f"the dataset {spec} trains on nothing but held-out prompts (of a test split): they must differ"
        )
    if len(kept) < len(rows):
        print(f"{spec}: {len(rows) - len(kept)} training rows are dropped because their prompts are held out")
    return Lazy(rows.__getitem__, kept)


def hold_out(rows: Sequence[dict], keys: Sequence[int], spec: str) -> tuple[Lazy, Lazy]:
    """Splits off one row in twenty by a hash of the prompt, its key, so that equal prompts stay on one side."""
    unique = sorted(set(keys))
    if len(unique) < 2:
        raise UserError(f"the dataset {spec} has one prompt only: one to train on and one to hold out are needed")
    last = unique[min(max(1, len(unique) // 20), HELDOUT_ROWS) - 1]
    train, heldout = ([i for i, key in enumerate(keys) if (key <= last) == held] for held in (False, True))
    return Lazy(rows.__getitem__, array("q", train)), Lazy(rows.__getitem__, array("q", heldout))


def epochs(rows: Sequence[Item]) -> Callable[[int, int], Item]:
    """The stream that goes through all rows in a new order every epoch."""

    @lru_cache(1)  # one epoch's order at a time; each is a function of seed and epoch alone
    def order(epoch: int, seed: int) -> list[int]:
        return random.Random(f"{seed}/{epoch}").sample(range(len(rows)), len(rows))

    def train(index: int, seed: int) -> Item:
        epoch, position = divmod(index, len(rows))
        return rows[order(epoch, seed)[position]]

    return train
