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
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from utils.builtin import GSM8K, LINE, TEXTS, as_lines, gsm8k_score, procedural, restored, right_and_wrong
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
        self.kind = re.sub(r"\d+|\(.*", "", why)


def load_task(spec: str, prompt_column: str = "prompt") -> Task:
    """countdown, sort, gsm8k, gsm8k:FOLDER (of train.jsonl and test.jsonl), reasoning_gym:NAME?SETTING=VALUE&..., or
    what `load_rows` reads."""
    name, _, folder = spec.partition(":")
    if name == "reasoning_gym" and (Path(__file__).parents[1] / "algos/environments/reasoning_gym.py").is_file():
        return importlib.import_module("algos.environments.reasoning_gym").load_task(folder)
    if name in ("countdown", "sort"):
        return Task(name, *procedural(name))

    def shaped(row: dict) -> dict:
        check(row, "prompt")
        return row

    def problem(row: dict) -> dict:
        check(row, "question", "answer")
        return row | {"prompt": f"{row['question']}\n\n{GSM8K}", "completion": row["answer"]}

    if name == "gsm8k":
        train, heldout = load_rows(folder or "openai/gsm8k:main", problem, most=10**6)
        return Task(name, epochs(train), list(heldout), gsm8k_score, train)
    train, heldout = load_rows(spec, shaped, prompt_column)
    return Task(Path(spec).stem, epochs(train), list(heldout), None, train)


def load_rows(spec: str, shaped: Callable[[dict], dict] = lambda row: row, prompt_column: str = "prompt",
              most: int = HELDOUT):  # fmt: skip
    """Rows to train on and at most `most` held-out ones, each a datasets.Dataset that stays on the disk. spec: a
    .jsonl, .json, .parquet or .csv file, a folder of such or of save_to_disk, or a hub name, perhaps with :CONFIG.
    `shaped(row)` makes the row's prompt, whenever the row is read; where it raises RowFault, the row is dropped.

    The dataset's own test or validation split is held out, else a twentieth of the prompts. Training rows whose prompt
    is held out are dropped.
    """
    splits = read_splits(spec, *{prompt_column}.difference(TEXTS))

    def named(*prefixes: str) -> str | None:
        """The split of that name, else the first whose name begins so (train_sft); earlier prefixes win."""
        return next((n for prefix in prefixes for n in (prefix, *splits) if n in splits and n.startswith(prefix)), None)

    def made(row: dict, arrow: bool) -> dict:
        if prompt_column != "prompt":
            if prompt_column not in row:
                check(row, prompt_column)
            row["prompt"] = row.pop(prompt_column)
        row.pop("plain_prompt", None)  # it would be shown in the prompt's place
        try:
            row = restored(row, arrow)
        except ValueError as error:
            what = "messages or arguments of a call that are no JSON, or tools that are none"
            raise RowFault(row, f"has {what} ({error})") from error
        if prompt_column != "prompt":
            check(row, "prompt")
        return shaped(row)

    def transform(batch: dict) -> dict:
        lines = batch.get(LINE)
        rows = map(json.loads, lines) if lines else (dict(zip(batch, row)) for row in zip(*batch.values()))
        rows = [made(row, not lines) for row in rows]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def prompt_hash(row: dict) -> str:
        prompt = json.dumps(row["prompt"], sort_keys=True, default=str).encode()
        return hashlib.blake2b(prompt, digest_size=8).hexdigest()

    def read(name: str) -> tuple[Any, list[str]]:
        """The rows of a split that can be used, and a hash of each prompt."""
        rows = splits[name].with_transform(transform)
        kept, keys = sift(rows, prompt_hash, shaped)
        return rows.select(kept), keys

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


def read_splits(spec: str, *texts: str) -> dict:
    """The splits that are not empty, each a datasets.Dataset; of JSON and CSV files one of lines. texts: names of
    columns that are text in a CSV, besides TEXTS."""
    import datasets  # slow to import, and the built-in tasks do without

    datasets.disable_progress_bars()
    try:
        Path(datasets.config.HF_DATASETS_CACHE).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=datasets.config.HF_DATASETS_CACHE).close()
    except OSError:  # it cannot be written
        datasets.config.HF_DATASETS_CACHE = tempfile.mkdtemp()
    path, (name, _, config) = Path(spec).expanduser(), spec.partition(":")
    kind = None if path.is_dir() else FILES.get(path.suffix.lower())
    if not path.exists() and (kind or "/" not in spec or spec[0] in "./~"):
        raise UserError(f"there is no task and no file {path}: give one that exists, or a hub dataset ORG/NAME")
    try:
        saved = any((path / file).is_file() for file in ("dataset_dict.json", "state.json"))
        folder = path.is_dir() and not saved
        files = datasets.load_dataset_builder(str(path)).config.data_files if folder else {"train": [path]}
        if saved:
            found = datasets.load_from_disk(str(path))
        elif all(FILES.get(Path(file).suffix.lower()) in ("json", "csv") for part in files.values() for file in part):
            found = {str(name): tuple((str(x), Path(x).stat().st_size, Path(x).stat().st_mtime_ns) for x in part)
                     for name, part in files.items()}  # fmt: skip
            given = [{"files": part, "texts": (*TEXTS, *texts)} for part in found.values()]
            found = dict(zip(found, (datasets.Dataset.from_generator(as_lines, gen_kwargs=one) for one in given)))
        elif kind:
            found = datasets.load_dataset(kind, data_files=str(path))
        else:
            found = datasets.load_dataset(str(path) if folder else name, config or None)
        splits = found if isinstance(found, dict) else {"train": found}
        splits = {name: rows for name, rows in splits.items() if len(rows)}
        if not splits:
            raise ValueError("it is empty")
        return splits
    except Exception as error:  # the library raises dozens of kinds, all of which mean the same to the user
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise UserError(f"cannot read the dataset {spec} ({reason}): give a readable file or hub name") from error


def sift(rows, look: Callable[[dict], str], rule: Callable) -> tuple[list[int], list[str]]:
    """Numbers of the rows that `look` takes, and what it says of each. The others, for which it raises RowFault, are
    counted by kind, and the first of each is shown. Of a dataset this stays in the library's cache: its key is rows,
    tokenizer and template, limits, and the source of `rule`, by which `look` goes, and of this file."""
    transform = (lambda one: one) if isinstance(rows, list) else rows.format["format_kwargs"]["transform"]
    files = [Path(function.__code__.co_filename) for function in (sift, restored, rule)]
    source = [file.read_bytes() for file in files if file.is_file()]

    def judged(cells: dict) -> tuple[str, str, str]:
        try:
            return look({name: x for name, (x,) in transform(cells).items()}), "", ""
        except RowFault as fault:
            return "", fault.kind, str(fault)

    def looked(batch: dict) -> dict:
        each = [judged({name: [x] for name, x in zip(batch, row)}) for row in zip(*batch.values())]
        return dict(zip(("said", "kind", "fault", *source[:0]), map(list, zip(*each))))

    if isinstance(rows, list):
        said, kinds, faults = zip(*(judged({name: [x] for name, x in row.items()}) for row in rows))
    else:
        import datasets

        plain = rows.with_format(None)
        how = dict(batched=True, batch_size=100, remove_columns=plain.column_names)
        try:
            found = plain.map(looked, **how)
        except OSError:  # a folder of save_to_disk that cannot be written
            datasets.disable_caching()
            found = plain.map(looked, **how)
        said, kinds, faults = (found.data.column(name).to_pylist() for name in ("said", "kind", "fault"))
    kept = [i for i, kind in enumerate(kinds) if not kind]
    firsts = {kind: fault for kind, fault in zip(reversed(kinds), reversed(faults)) if kind}
    firsts = {kind: firsts[kind] for kind in dict.fromkeys(kinds) if kind}
    first = next(iter(firsts.values()), "")
    if first and not kept:
        raise UserError(f"no row can be used, the first because {first}")
    if first and rank() == 0:
        print(f"{len(rows) - len(kept)} of {len(rows)} rows cannot be used and are dropped, the first because {first}")
        for kind in firsts if len(firsts) > 1 else ():
            print(f"  {kinds.count(kind)} of them: {firsts[kind]}")
    return kept, [said[i] for i in kept]


def keep(rows, encode: Callable[[dict], Sequence], limit: float = math.inf):
    """The rows that `encode` makes into tokens, the prompt's first, which are at most `limit`; others are dropped."""

    def look(row: dict) -> str:
        if (length := len(encode(row)[0])) > limit:
            raise RowFault(row, f"has a prompt of {length} tokens, and {limit} are allowed")
        return ""

    kept, _ = sift(rows, look, encode)
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
        raise UserError(f"the dataset has no column {missing[0]!r}: there are {', '.join(sorted(row))}")
    values = [row[name] for name in names]
    messages = [message for value in values if isinstance(value, list) for message in value]
    right = all(isinstance(m, dict) and isinstance(m.get("role"), str) and
                (isinstance(m.get("content"), str) or m.get("content") is None and m.get("tool_calls"))
                and isinstance(m.get("tool_calls") or [], list) for m in messages)  # fmt: skip
    if not (right and all(values) and {type(value) for value in values} in ({str}, {list})):
        raise RowFault(row, f"needs {' and '.join(names)} as text, or all as chat messages of text, not empty")


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
    plain text gets the tokenizer's, but no EOS, and one BOS where it was rendered before.

    Or those of prompt and `answer`, encoded together: alone, an answer could get a space or other tokens in front
    (SentencePiece puts a space before every text).
    """
    prompt = present(row, tokenizer)
    if isinstance(prompt, str):
        if isinstance(answer, list):
            raise RowFault(row, "has a text as prompt and chat messages as its answer")
        ids = tokenizer(prompt + (answer or ""))["input_ids"]
        if ids and ids[-1] in tokenizer.all_special_ids:  # of the text, or an EOS that is added to every text
            added, plain = (tokenizer("a", add_special_tokens=x)["input_ids"] for x in (True, False))
            ids = ids[: len(ids) - (added[-1:] != plain[-1:])]
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


def encode_answers(row: dict, answers: Sequence, tokenizer, eos: list[int], most: int | None = None) -> tuple:
    """Token ids of the row's prompt, and of each answer up to and including its first EOS, which is added where there
    is none. An answer begins where the prompt with it differs from the prompt alone, and all begin where the first of
    them does: a token across the seam, or what a template puts behind the prompt alone (`<think>`), belongs to the
    answers. Raises RowFault where two are equal in what `most` tokens leave of them."""
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
    if len(ends) == 2 and ends[0][: most and most - cut] == ends[1][: most and most - cut]:
        raise RowFault(row, f"has answers that are equal in their first {most} tokens, the prompt's included")
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


def load_pairs(spec: str, num_pairs: int, seed: int, prompt_column: str = "prompt",
               shaped: Callable[[dict], dict] | None = None) -> Pairs:  # fmt: skip
    """countdown or sort: `num_pairs` pairs to train on, drawn with `seed`. Else all pairs of what `load_rows` reads."""
    if spec not in ("countdown", "sort"):
        return Pairs(Path(spec).stem, *load_rows(spec, shaped or as_pair, prompt_column))
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
    if prompt is None and (isinstance(chosen, str) or not size):  # a question or an instruction is no label
        begin = str(chosen[:size])
        texts = [name for name, x in row.items() if name not in TEXTS and isinstance(x, str) and " " in x.strip()]
        if other := [name for name in texts if row[name].strip() not in begin]:
            raise UserError("the dataset has no column 'prompt': give --prompt-column with the one that is it, of "
                            f"{', '.join(other)}, or leave these out")  # fmt: skip
    if not size:
        raise RowFault(row, "needs prompt, not empty: chosen and rejected begin differently, so nothing of them is it")
    return row | {"prompt": chosen[:size], "chosen": chosen[size:], "rejected": rejected[size:]}


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
