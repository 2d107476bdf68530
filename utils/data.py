"""Prompts and answers: where they come from, how a model is shown them, how both become tokens.

A row is a dictionary. `prompt` is text or a list of chat messages; every other column is handed to reward functions.
A pair is a row with the columns prompt, chosen and rejected; an unpaired one has prompt, completion, and label: true
where the completion is desirable.
"""

import hashlib
import importlib
import json
import math
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from utils.builtin import CONVERT, GSM8K, gsm8k_score, procedural, restored, right_and_wrong, tell_changes
from utils.core import UserError
from utils.dist import rank

HELDOUT = 256  # rows, at most
FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}  # formats of the datasets library


class Task(NamedTuple):
    """`train(index, seed)`: the index-th row of an endless stream that depends on nothing else, so a run resumes from
    one integer. `heldout` shares no prompt with it. `score(row, text)`: the reward, None if only the user's functions
    can tell. `rows`: the dataset that `train` goes through, None where it draws without end."""

    name: str
    train: Callable[[int, int], dict]
    heldout: Sequence[dict]
    score: Callable[[dict, str], float] | None = None
    rows: Any = None


class RowFault(UserError):
    """Why a row cannot be used: it is dropped and counted, and the run goes on."""

    def __init__(self, row: dict, why: str):
        super().__init__(f"a row {why} (it begins {str(row)[:100]})")


def load_task(spec: str, prompt_column: str = "prompt") -> Task:
    """countdown, sort, gsm8k, gsm8k:FOLDER (of train.jsonl and test.jsonl), reasoning_gym:NAME?SETTING=VALUE&..., or
    what `load_rows` reads."""
    name, _, folder = spec.partition(":")
    if name == "reasoning_gym" and (Path(__file__).parents[1] / "algos/environments/reasoning_gym.py").is_file():
        return importlib.import_module("algos.environments.reasoning_gym").load_task(folder)
    if name in ("countdown", "sort"):
        return Task(name, *procedural(name))

    def shaped(row: dict) -> dict:
        check(row, prompt_column)  # a plain_prompt would be shown in its place
        row = row | {"prompt": row[prompt_column]}
        return {name: row[name] for name in row if name not in {prompt_column, "plain_prompt"} - {"prompt"}}

    def problem(row: dict) -> dict:
        check(row, "question", "answer")
        return row | {"prompt": f"{row['question']}\n\n{GSM8K}", "completion": row["answer"]}

    if name == "gsm8k":
        train, heldout = load_rows(folder or "openai/gsm8k:main", problem, most=10**6)
        return Task(name, epochs(train), list(heldout), gsm8k_score, train)
    train, heldout = load_rows(spec, shaped)
    return Task(Path(spec).stem, epochs(train), list(heldout), None, train)


def load_rows(spec: str, shaped: Callable[[dict], dict] = lambda row: row, most: int = HELDOUT):
    """Rows to train on and at most `most` held-out ones, each a datasets.Dataset that stays on the disk. spec: a
    .jsonl, .json, .parquet or .csv file, a folder of such or of save_to_disk, or a hub name, perhaps with :CONFIG.
    `shaped(row)` makes the row's prompt, whenever the row is read; where it raises RowFault, the row is dropped.

    The dataset's own test or validation split is held out, else a twentieth of the prompts. Training rows whose prompt
    is held out are dropped.
    """
    splits = read_splits(spec)

    def named(*prefixes: str) -> str | None:
        """The split of that name, else the first whose name begins so (train_sft); earlier prefixes win."""
        return next((n for prefix in prefixes for n in (prefix, *splits) if n in splits and n.startswith(prefix)), None)

    def transform(batch: dict) -> dict:
        rows = [dict(zip(batch, row)) for row in zip(*batch.values())]
        try:
            rows = [shaped(restored(row)) for row in rows]
        except ValueError as error:
            raise RowFault(rows[0], f"has messages or arguments of a call that are no JSON ({error})") from error
        return {name: [row[name] for row in rows] for name in rows[0]}

    def read(name: str) -> tuple[Any, list[int]]:
        """The rows of a split that can be used, and a hash of each prompt."""
        keys: list[int] = []

        def add(row: dict) -> list[list[int]]:
            prompt = json.dumps(row["prompt"], sort_keys=True, default=str).encode()
            keys.append(int.from_bytes(hashlib.blake2b(prompt, digest_size=8).digest()))
            return [[]]

        return keep(splits[name].with_transform(transform), add), keys

    name, other = named("train") or next(iter(splits)), named("test", "valid")
    train, keys = read(name)
    if other in (None, name):
        held = set(sorted(set(keys))[: min(max(1, len(set(keys)) // 20), most)])
        heldout = train.select([i for i, key in enumerate(keys) if key in held])
    else:
        heldout, others = read(other)
        held = set(others)
    kept = [i for i, key in enumerate(keys) if key not in held]
    if not kept:
        raise UserError(f"the dataset {spec} has no prompt to train on that is not held out: give it more prompts")
    if rank() == 0 and len(kept) < len(keys):
        print(f"{spec}: {len(kept)} rows to train on, {len(keys) - len(kept)} whose prompt is held out are left out")
    return train.select(kept), heldout.select(range(min(most, len(heldout))))


def read_splits(spec: str) -> dict:
    """The splits that are not empty, each a datasets.Dataset."""
    import datasets  # slow to import, and the built-in tasks do without

    datasets.disable_progress_bars()
    path, (name, _, config) = Path(spec).expanduser(), spec.partition(":")
    kind = None if path.is_dir() else FILES.get(path.suffix.lower())
    if not path.exists() and (kind or "/" not in spec or spec[0] in "./~"):
        raise UserError(f"there is no task and no file {path}: give one that exists, or a hub dataset ORG/NAME")
    try:
        if kind:
            found = datasets.load_dataset(kind, data_files=str(path))
        elif any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path) if path.exists() else name, config or None)
        splits = found if isinstance(found, dict) else {"train": found}
        splits = {name: rows for name, rows in splits.items() if len(rows)}
        if not splits:
            raise ValueError("it is empty")
        if kind == "json" and rank() == 0:
            tell_changes(path, splits["train"])
        return splits
    except Exception as error:  # the library raises dozens of kinds, all of which mean the same to the user
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise UserError(f"cannot read the dataset {spec} ({reason}): give a readable file or hub name") from error


def keep(rows, encode: Callable[[dict], Sequence], limit: float = math.inf):
    """The rows that `encode` makes into tokens, the prompt's first, which are at most `limit`. The others, refused by a
    RowFault or too long, are dropped and counted, the first of them shown."""
    kept, faults = [], []
    for i in range(len(rows)):
        try:
            if (length := len(encode(rows[i])[0])) > limit:
                raise RowFault(rows[i], f"has a prompt of {length} tokens, and {limit} are allowed")
            kept.append(i)
        except RowFault as fault:
            faults.append(str(fault))
    if faults and not kept:
        raise UserError(f"no row can be used, the first because {faults[0]}")
    if faults and rank() == 0:
        print(f"{len(faults)} of {len(rows)} rows cannot be used and are dropped, the first because {faults[0]}")
    return [rows[i] for i in kept] if isinstance(rows, list) else rows.select(kept)


def usable(task: Task, model, tokenizer, args) -> Task:
    """The task with the prompts that leave room for --max-completion-length in the model's context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if (room := context - args.max_completion_length) < 1:
        raise UserError(f"the model's {context} tokens leave no room for prompts: lower --max-completion-length")
    limit = min(n for n in (room, args.max_prompt_length) if n is not None)
    return keep_rows(task, lambda row: [encode_prompt(row, tokenizer)], limit, "lower --max-completion-length")


def keep_rows(task: Task, encode: Callable[[dict], Sequence], limit: float, remedy: str) -> Task:
    """The task with the rows that `keep` keeps. Raises UserError for an endless one of which some cannot be used."""
    heldout, rows = (rows and keep(rows, encode, limit) for rows in (task.heldout, task.rows))
    if rows is not None:
        return task._replace(rows=rows, train=epochs(rows), heldout=heldout)
    if len(heldout) < len(task.heldout):  # nothing can be dropped of what is drawn without end
        raise UserError(f"some prompts of {task.name} have more than {limit} tokens: {remedy}")
    return task


def epochs(rows: Sequence) -> Callable[[int, int], dict]:
    """The stream that goes through all rows in a new order every epoch."""

    @lru_cache(1)
    def order(epoch: int, seed: int) -> list[int]:
        return random.Random(f"{seed}/{epoch}").sample(range(len(rows)), len(rows))

    return lambda index, seed: rows[order(index // len(rows), seed)[index % len(rows)]]


def check(row: dict, *names: str) -> None:
    """Raises RowFault unless these columns are all text or all lists of chat messages, and none is empty."""
    if missing := [name for name in names if name not in row]:
        how = [f"; `{CONVERT[x]}` and `rows.map(convert).to_json('rows.jsonl')` make it" for x in CONVERT if x in row]
        raise UserError(f"the dataset has no column {missing[0]!r}: there are {', '.join(sorted(row))}{''.join(how)}")
    values = [row[name] for name in names]
    messages = [message for value in values if isinstance(value, list) for message in value]
    right = all(isinstance(m, dict) and "role" in m and {"content", "tool_calls"} & m.keys() for m in messages)
    if not (right and all(values) and {type(value) for value in values} in ({str}, {list})):
        raise RowFault(row, f"needs {' and '.join(names)} as text, or all as chat messages, not empty")


def present(row: dict, tokenizer) -> str | list[dict]:
    """The prompt as this model gets it: messages for a model with a chat template, else text; compact notation for the
    tiny character model alone. A reward model's tokenizer knows none of the policy's flags: a score must not depend on
    who asks."""
    prompt, system = row["prompt"], getattr(tokenizer, "system_prompt", "")
    if isinstance(prompt, str):
        prompt = prompt if len(tokenizer) < 100 else row.get("plain_prompt", prompt)
        if tokenizer.chat_template is None or getattr(tokenizer, "raw_prompt", False):
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if tokenizer.chat_template is None:
        raise UserError("the prompts are chat messages and the model has no chat template: give an instruct model")
    if system and all(message["role"] != "system" for message in prompt):
        prompt = [{"role": "system", "content": system}, *prompt]
    return prompt


def template_kwargs(row: dict, tokenizer) -> dict:
    """What the chat template is told besides the messages: the flag's settings, over them the row's columns
    chat_template_kwargs and tools, as they are or as JSON."""
    own, tools = (json.loads(x) if isinstance(x := row.get(name) or {}, str) else x
                  for name in ("chat_template_kwargs", "tools"))  # fmt: skip
    own = {name: value for name, value in own.items() if value is not None}
    return getattr(tokenizer, "template_kwargs", {}) | ({"tools": tools} if tools else {}) | own


def encode_prompt(row: dict, tokenizer, answer: str | list[dict] | None = None) -> list[int]:
    """Token ids of the row's prompt, up to where the completion begins: behind the template's generation prompt, or
    behind a last message of the assistant's, which the completion continues. A template brings its own special tokens;
    plain text gets the tokenizer's, and one BOS where it was rendered before.

    Or those of prompt and `answer`, encoded together: alone, an answer could get a space or other tokens in front
    (SentencePiece puts a space before every text).
    """
    prompt = present(row, tokenizer)
    if isinstance(prompt, str):
        if isinstance(answer, list):
            raise RowFault(row, "has a text as prompt and chat messages as its answer")
        ids = tokenizer(prompt + (answer or ""))["input_ids"]
        return ids[1:] if ids[:2] == [tokenizer.bos_token_id] * 2 else ids
    begun = prompt[-1]["role"] == "assistant"
    how = dict(add_generation_prompt=not begun, continue_final_message=begun) if answer is None else {}
    if answer is not None:
        answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        if begun and answer[0]["role"] == "assistant":
            content = f"{prompt[-1].get('content') or ''}{answer[0].get('content') or ''}"
            prompt, answer = prompt[:-1], [prompt[-1] | answer[0] | {"content": content}, *answer[1:]]
        prompt = prompt + answer
    try:
        how |= template_kwargs(row, tokenizer)
        return tokenizer.apply_chat_template(prompt, tokenize=True, return_dict=True, **how)["input_ids"]
    except Exception as error:  # a template raises what it likes
        raise RowFault(row, f"cannot be rendered by the chat template ({error})") from error


def encode_answers(row: dict, answers: Sequence, tokenizer, eos: list[int]) -> tuple[list[int], ...]:
    """Token ids of the row's prompt, and of each answer up to and including its first EOS, which is added where there
    is none. An answer begins where the prompt with it differs from the prompt alone, and all begin where the first of
    them does: a token across the seam, or what a template puts behind the prompt alone (`<think>`), belongs to the
    answers."""
    for answer in answers:
        if isinstance(answer, list):
            last = answer[0] if [message["role"] for message in answer] == ["assistant"] else {}
            answer = last.get("content") or last.get("tool_calls")
        if not answer:
            raise RowFault(row, "needs a completion: text, or one message of the assistant's, all before it the prompt")
    prompt, wholes = encode_prompt(row, tokenizer), [encode_prompt(row, tokenizer, answer) for answer in answers]
    cut, ends = min(shared(prompt, whole) for whole in wholes), []
    if set(prompt[:cut]) <= set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}:
        raise RowFault(row, "is rendered differently with its completion than without: the two cannot be told apart")
    for answer, whole in zip(answers, wholes):
        ends.append(until_eos(whole[cut:], tokenizer, eos))
        if len(whole) == cut or "</think>" in str(answer) and "</think>" not in tokenizer.decode(ends[-1]):
            raise RowFault(row, "has a completion of which the chat template leaves nothing, or drops the reasoning")
    return prompt[:cut], *ends


def until_eos(tokens: list[int], tokenizer, eos: list[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[:end] + (tokens[end : end + 1] or [tokenizer.eos_token_id])


def shared(first: Sequence, second: Sequence) -> int:
    """How many tokens, characters or messages both begin with."""
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


class Pairs(NamedTuple):
    """Rows with prompt, chosen and rejected, or prompt, completion and label. `task` scores answers of the model's own;
    None for a dataset."""

    name: str
    train: Sequence[dict]
    heldout: Sequence[dict]
    task: Task | None = None


def load_pairs(spec: str, num_pairs: int, seed: int, shaped: Callable[[dict], dict] | None = None) -> Pairs:
    """countdown or sort: `num_pairs` pairs to train on, drawn with `seed`. Else all pairs of what `load_rows` reads."""
    if spec not in ("countdown", "sort"):
        return Pairs(Path(spec).stem, *load_rows(spec, shaped or as_pair))
    task = load_task(spec)
    made = right_and_wrong(task.train(i, seed) for i in count())
    return Pairs(spec, list(islice(made, num_pairs)), list(right_and_wrong(task.heldout)), task)


def as_pair(row: dict) -> dict:
    """The row with prompt, chosen and rejected of one kind. What two conversations have in common belongs to the
    prompt: turns of it are no choice between them. Where texts have no prompt, what both begin with is it."""
    check(row, "chosen", "rejected")
    chosen, rejected, prompt = row["chosen"], row["rejected"], row.get("prompt")
    if isinstance(chosen, list):
        chosen, rejected = behind(prompt or "", chosen, row), behind(prompt or "", rejected, row)
        size = min(shared(said(chosen), said(rejected)), len(chosen) - 1, len(rejected) - 1)
    elif prompt is None:  # cut before the space in front of the first word that differs: half a word has other tokens
        size = min(shared(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        size = next((i for i in range(size, 0, -1) if chosen[i].isspace() and chosen[i] == rejected[i]), 0)
    else:
        check(row, "prompt", "chosen")
        return row
    row = row | {"prompt": chosen[:size], "chosen": chosen[size:], "rejected": rejected[size:]}
    check(row, "prompt")
    return row


def behind(prompt: str | list[dict], answer: list[dict], row: dict) -> list[dict]:
    """The conversation of a prompt (a text is a user's message) and an answer, which may hold the prompt, or repeat
    the end of it."""
    begin = [{"role": "user", "content": prompt}] if prompt and isinstance(prompt, str) else [*prompt]
    again = next((k for k in range(len(begin), 0, -1) if said(begin[-k:]) == said(answer[:k])), 0)
    if again or not begin or answer[0]["role"] == "assistant":
        return begin + answer[again:]
    if all(message["role"] != "user" for message in answer):
        raise RowFault(row, "has a prompt with which chosen and rejected do not go on")
    return answer


def said(messages: list[dict]) -> list[tuple]:
    """What of messages is compared: their other names, such as a score, say nothing of what they say."""
    return [(message["role"], message.get("content"), message.get("tool_calls")) for message in messages]
