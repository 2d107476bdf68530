"""Preference data: pairs of a chosen and a rejected completion of the same prompt, or single completions with a label.

A pair is a row (utils/rows.py) with the columns prompt, chosen and rejected, TRL's names: all three are text, or all
three are lists of chat messages. Where prompt is missing, the common beginning of chosen and rejected is the prompt.
Messages that both begin with belong to the prompt in any case, and may repeat it. Beside messages a prompt may be text.
An unpaired row has the columns prompt, completion, and label, which is true where the completion is desirable.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path

from utils.errors import UserError
from utils.rows import Lazy, RowFault, check_columns, check_kind, epochs, is_kind, load_rows, remembered
from utils.tasks import Task, procedural
from utils.text import shared, usable_rows


@dataclass(frozen=True)
class Preferences:
    """`heldout` shares no prompt with `train`. `task` scores answers of the model's own; None for a dataset."""

    name: str
    train: Lazy
    heldout: Lazy
    task: Task | None = None


def load_preferences(spec: str, num_pairs: int, seed: int) -> Preferences:
    """`countdown` or `sort`: `num_pairs` pairs to train on, drawn with `seed`, and the task's held-out problems. A
    .jsonl/.json/.parquet file or a dataset of the hub: all of its pairs, split as utils/rows.py splits prompts.

    Raises UserError for an unknown name, a file that is missing, empty or unreadable, and rows that are no pairs.
    """
    if spec in ("countdown", "sort"):
        task = procedural(spec)
        made = (right_and_wrong(spec, task.train(i, seed)) for i in count())
        train = list(islice((row for row in made if row["chosen"] != row["rejected"]), num_pairs))
        heldout = [right_and_wrong(spec, row) for row in task.heldout]
        heldout = [row for row in heldout if row["chosen"] != row["rejected"]]
        return Preferences(spec, Lazy(dict, train), Lazy(dict, heldout), task)
    train, heldout = load_rows(spec, "countdown, sort", partial(as_pairs, spec))
    if equal := sum(row["chosen"] == row["rejected"] for row in train):
        print(f"{spec}: in {equal} of {len(train)} pairs chosen equals rejected: they teach nothing about preference")
    return Preferences(Path(spec).stem, train, heldout)


def load_unpaired(spec: str, num_pairs: int, seed: int) -> Preferences:
    """Unpaired rows from the same sources. A dataset may have them as they are. A pair, also of `countdown` and `sort`,
    makes two: its chosen completion is desirable, its rejected one is not. Raises UserError as load_preferences does,
    and where all rows to train on have the same label."""

    def parse(rows: Lazy, columns: set[str]) -> Lazy:
        if {"chosen", "rejected"} <= columns:
            return unpair(as_pairs(spec, rows, columns))
        wanted = {"prompt", "completion", "label"}
        check_columns(columns, wanted, spec, "unpaired rows need these three, and pairs chosen and rejected")
        return Lazy(as_example, rows)

    if spec in ("countdown", "sort"):
        data = load_preferences(spec, num_pairs, seed)
        data = replace(data, train=unpair(data.train), heldout=unpair(data.heldout))
    else:
        data = Preferences(Path(spec).stem, *load_rows(spec, "countdown, sort", parse))
    check_labels(data)
    return data


def check_labels(data: Preferences) -> int:
    """The number of desirable rows to train on. Raises UserError where that is all of them or none."""
    desirable = sum(row["label"] for row in data.train)
    if desirable in (0, len(data.train)):
        needed = "desirable and undesirable completions are needed, some of each"
        raise UserError(f"all labels of {data.name} are {desirable > 0}: {needed}")
    return desirable


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


def as_pairs(spec: str, rows: Lazy, columns: set[str]) -> Lazy:
    """The rows of a dataset as pairs. Raises UserError for missing columns."""
    remedy = "pairs need chosen and rejected, and prompt where those two do not hold it"
    check_columns(columns, {"chosen", "rejected"}, spec, remedy)
    return Lazy(as_pair, rows)


def unpair(pairs: Lazy) -> Lazy:
    """Two rows for each pair: chosen with the label True, then rejected with False."""
    sides = (("chosen", True), ("rejected", False))

    def half(i: int) -> dict:
        pair, (side, label) = pairs[i // 2], sides[i % 2]
        return pair | {"completion": pair[side], "label": label}

    return Lazy(half, range(2 * len(pairs)))


def as_pair(row: dict) -> dict:
    """The row with prompt, chosen and rejected of one kind. What two conversations have in common belongs to the
    prompt: turns of it are no choice between them. Raises RowFault."""
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    check_kind(chosen, "chosen", row)
    check_kind(rejected, "rejected", row)
    kind = type(chosen)
    if not is_kind(rejected, kind):
        raise RowFault(row, "has text beside chat messages: chosen and rejected must be of one kind")
    if prompt is None or kind is list:
        size = shared_prefix(chosen, rejected)
        begin, chosen, rejected = chosen[:size], chosen[size:], rejected[size:]
        prompt = begin if prompt is None else joined(prompt, begin, row)
        if not prompt:
            raise RowFault(row, "has no prompt, and chosen and rejected do not begin alike: give a column prompt")
    check_kind(prompt, "the prompt", row, [kind])
    return row | {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def joined(prompt: str | list[dict], begin: list[dict], row: dict) -> list[dict]:
    """A prompt, and messages that both answers begin with, of which it may be a part. A text is a user's message."""
    if isinstance(prompt, str):
        if not prompt or any(message["role"] == "user" for message in begin):
            return begin  # whole conversations hold the prompt
        system = sum(message["role"] == "system" for message in begin)
        return [*begin[:system], {"role": "user", "content": prompt}, *begin[system:]]
    check_kind(prompt, "the prompt", row, [list])
    first, second, size = alike(prompt), alike(begin), len(prompt)
    if first[max(0, size - len(begin)) :] == second:
        return prompt
    if begin[0]["role"] == "assistant":
        return prompt + begin
    if first not in (second[:size], second[-size:]):
        raise RowFault(row, "has a prompt with which chosen and rejected do not go on, though they begin alike")
    return begin


def alike(messages: list[dict]) -> list[tuple]:
    """What of messages is compared: others of their names, such as a score, say nothing of what they say."""
    return [(message["role"], message.get("content"), message.get("tool_calls")) for message in messages]


def as_example(row: dict) -> dict:
    """The row with its label as bool; 0 and 1 are taken for labels too. Raises RowFault."""
    check_kind(row["completion"], "completion", row)
    check_kind(row["prompt"], "the prompt", row, [type(row["completion"])])
    if row["label"] not in (False, True):
        raise RowFault(row, f"has the label {row['label']!r}: it must be true (desirable) or false, or 1 or 0")
    return row | {"label": bool(row["label"])}


def shared_prefix(chosen: str | list[dict], rejected: str | list[dict]) -> int:
    """Length of the prompt that both begin with. Something is left of each. Texts are cut before the space in front of
    the first word that differs: half a word has other tokens."""
    most = min(len(chosen), len(rejected)) - 1
    if isinstance(chosen, list) and isinstance(rejected, list):
        return min(shared(alike(chosen), alike(rejected)), most)
    size = min(shared(chosen, rejected), most)
    return next((i for i in range(size, 0, -1) if str(chosen[i]).isspace() and chosen[i] == rejected[i]), 0)


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


def usable(data: Preferences, encode: Callable[..., tuple], tokenizer, eos: list[int], args) -> tuple[Preferences, int]:
    """The rows that `encode` (`encode_pair` or `encode_row` of utils/text.py) can make into tokens and whose prompts
    leave room for a completion, as `usable_rows` says; and how many of them have a completion that will be cut."""
    train, heldout, cut = usable_rows(
        data.train, data.heldout[: args.eval_prompts], lambda row: encode(row, tokenizer, eos), args.max_length - 1,
        args.max_prompt_length, "raise --max-length",
    )  # fmt: skip
    return replace(data, train=train, heldout=heldout), cut


def encode_rows(rows: Lazy, encode: Callable[..., tuple], tokenizer, eos: list[int], max_length: int) -> Lazy:
    """Token ids of each row's prompt and its completions, made when they are asked for. A completion and its prompt may
    have `max_length` tokens together."""

    def tokens(row: dict) -> tuple:
        prompt, *completions = encode(row, tokenizer, eos)
        return prompt, *(completion[: max_length - len(prompt)] for completion in completions)

    return remembered(Lazy(tokens, rows))
