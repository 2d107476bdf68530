"""Preference data: pairs of a chosen and a rejected completion of the same prompt.

A pair is a row as in utils/tasks.py with the columns prompt, chosen and rejected, TRL's names: all three are text, or
all three are lists of chat messages. Where chosen and rejected are whole conversations or whole texts, and prompt is
missing (or is text beside conversations), what both begin with is the prompt.
"""

from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from utils.errors import UserError
from utils.tasks import HELDOUT_ROWS, Task, encode_prompt, hold_out, load_task, named, present, read_splits, without


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
        task = load_task(spec)
        made = (right_and_wrong(spec, task.train(i, seed)) for i in count())
        train = list(islice((row for row in made if row["chosen"] != row["rejected"]), num_pairs))
        heldout = [right_and_wrong(spec, row) for row in task.heldout]
        return Preferences(spec, train, [row for row in heldout if row["chosen"] != row["rejected"]], task)
    path = Path(spec).expanduser()
    if path.suffix not in (".jsonl", ".json", ".parquet") and "/" not in spec:
        raise UserError(
            f"unknown source of pairs {spec!r}: give countdown, sort, a .jsonl or .parquet file, or a hub dataset "
            "ORG/NAME"
        )
    splits = {}
    for split, rows in read_splits(spec).items():
        if missing := {"chosen", "rejected"} - set(rows.column_names):
            raise UserError(
                f"{spec} has no column {' and no column '.join(sorted(missing))}: pairs need chosen and rejected, and "
                f"prompt where those two do not hold it; there are {', '.join(sorted(rows.column_names))}"
            )
        splits[split] = [as_pair(row, f"row {i} of {spec}") for i, row in enumerate(rows)]
    train = named(splits, "train") or next(iter(splits.values()))
    heldout = named(splits, "test", "valid")
    if heldout is None or heldout is train:
        train, heldout = hold_out(train, spec)
    else:
        train = without(heldout, train, spec)
    if equal := sum(row["chosen"] == row["rejected"] for row in train):
        print(f"{spec}: in {equal} of {len(train)} pairs chosen equals rejected: they teach nothing about preference")
    return Preferences(path.stem, train, heldout[:HELDOUT_ROWS])


def right_and_wrong(name: str, row: dict) -> dict:
    """The row with a right answer as chosen and as rejected the wrong one that its demonstration is, or could have been
    (utils/tasks.py): equal for sort where the two smallest digits are."""
    if name == "sort":
        right = "".join(sorted(row["digits"]))
        wrong = right[1] + right[0] + right[2:]
    else:
        steps = row["completion"].rpartition("=")[0]
        right, wrong = f"{steps}={row['target']}", f"{steps}={row['target'] + 1}"
    return row | {"chosen": right, "rejected": wrong}


def as_pair(row: dict, where: str) -> dict:
    """The row with prompt, chosen and rejected of one kind. Raises UserError, which names the row as `where`."""
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    for name in ("chosen", "rejected"):
        if not row[name] or not is_kind(row[name], str) and not is_kind(row[name], list):
            raise UserError(f"{where} has {name} {row[name]!r}: it must be text or a list of chat messages, not empty")
    kind = type(chosen)
    if not is_kind(rejected, kind):
        raise UserError(f"{where} has text beside chat messages: chosen and rejected must be of one kind")
    if prompt is None or kind is list and isinstance(prompt, str):
        size = shared_prefix(chosen, rejected)
        prompt, chosen, rejected = chosen[:size], chosen[size:], rejected[size:]
        if not prompt:
            raise UserError(f"{where} has no prompt, and chosen and rejected do not begin alike: give a column prompt")
    if not prompt or not is_kind(prompt, kind):
        wanted = "text" if kind is str else "a list of chat messages"
        raise UserError(f"{where} has the prompt {prompt!r}: beside its completions it must be {wanted}, not empty")
    return row | {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def is_kind(value, kind: type) -> bool:
    """Whether it is text (str), or a list of chat messages (list)."""
    if kind is list and isinstance(value, list):
        return all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value)
    return kind is str and isinstance(value, str)


def shared_prefix(chosen: str | list[dict], rejected: str | list[dict]) -> int:
    """How much of both is the prompt. Something is left of each; texts are cut before the space in front of the first
    word that differs, for a word cut in two is made of other tokens."""
    most = min(len(chosen), len(rejected)) - 1
    size = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    if isinstance(chosen, list):
        return size
    return next((i for i in range(size, 0, -1) if chosen[i].isspace() and chosen[i] == rejected[i]), 0)


def encode_pair(row: dict, tokenizer, eos: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Token ids of prompt, chosen and rejected; each completion ends with its first EOS. Raises UserError where the
    chat template does not continue its own prompt."""
    prompt = present(row, tokenizer)
    prompt_tokens = encode_prompt(prompt, tokenizer)
    completions = []
    for completion in (row["chosen"], row["rejected"]):
        if isinstance(prompt, str):
            tokens = tokenizer(completion, add_special_tokens=False)["input_ids"]
        else:
            answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
            whole = tokenizer.apply_chat_template(prompt + answer, tokenize=True, return_dict=True)["input_ids"]
            if whole[: len(prompt_tokens)] != prompt_tokens:
                raise UserError(
                    "the chat template renders the conversation differently from its prompt: the two cannot be told "
                    "apart"
                )
            tokens = whole[len(prompt_tokens) :]
        first_eos = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
        completions.append(tokens[:first_eos] + (tokens[first_eos : first_eos + 1] or [tokenizer.eos_token_id]))
    return prompt_tokens, *completions
