"""Prompts and answers: where they come from, how a model is shown them, how both become tokens.

A row is a dictionary. `prompt` is text or a list of chat messages; every other column is handed to reward functions.
A pair is a row with the columns prompt, chosen and rejected; an unpaired one has prompt, completion, and label: true
where the completion is desirable.
"""

import hashlib
import importlib
import json
import linecache
import math
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from utils.builtin import LINE, TEXTS, RowFault, gsm8k_score, procedural, read_splits, restored, right_and_wrong
from utils.core import VERSION, RunArgs, UserError
from utils.dist import rank

HELDOUT = 256  # rows, at most
GSM8K = "Solve the problem step by step. End with one line that holds #### and the answer as a number."
OF_A_RUN = ("resume", "output_dir", "max_steps", "eval_every", "save_every")  # arguments that no row depends on


class Task(NamedTuple):
    """`train(index, seed)`: the index-th row of an endless stream that depends on nothing else, so a run resumes from
    one integer. `heldout` shares no prompt with it. `score(row, text)`: the reward, None if only the user's functions
    can tell. `rows`: the dataset that `train` goes through, None where it draws without end."""

    name: str
    train: Callable[[int, int], dict]
    heldout: Sequence[dict]
    score: Callable[[dict, str], float] | None = None
    rows: Any = None


def load_task(spec: str, prompt_column: str = "prompt") -> Task:
    """countdown, sort, gsm8k, gsm8k:FOLDER (of train.jsonl and test.jsonl), reasoning_gym:NAME?SETTING=VALUE&..., or
    what `load_rows` reads."""
    name, _, folder = spec.partition(":")
    if name == "reasoning_gym" and (Path(__file__).parent.parent / "algos/environments/reasoning_gym.py").is_file():
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
        try:
            row = restored(row, arrow, (*TEXTS, prompt_column))
            if prompt_column != "prompt":
                check(row, prompt_column)
            # a plain_prompt would be shown in the prompt's place
            return shaped({"prompt" if name == prompt_column else name: x for name, x in row.items()
                           if name == prompt_column or name not in ("prompt", "plain_prompt")})  # fmt: skip
        except ValueError as error:
            what = "messages or arguments of a call that are no JSON, or tools that are none"
            raise RowFault(row, f"has {what} ({error})") from error

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
        kept, keys = sift(rows, prompt_hash, source(sift), source(restored), source(shaped))
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


def sift(rows, look: Callable[[dict], str], *key) -> tuple[list[int], list[str]]:
    """Numbers of the rows that `look` takes, and what it says of each. The others, for which it raises RowFault, are
    counted by kind, and the first of each is shown. Of a dataset this is kept on the disk, for the next start. key: all
    that `look` goes by besides the row."""

    def judged(row: dict, read: Callable[[dict], dict] = lambda row: row) -> list[str]:
        try:
            return [look(read(row)), "", ""]
        except RowFault as fault:
            return ["", fault.kind, str(fault)]

    def shaped(row: dict) -> dict:
        return {name: x for name, (x,) in transform({name: [x] for name, x in row.items()}).items()}

    if isinstance(rows, list):
        each = [judged(row) for row in rows]
    else:
        from datasets import config

        transform, plain = rows.format["format_kwargs"]["transform"], rows.with_format(None)
        digest = hashlib.blake2b(repr((rows._fingerprint, VERSION, key)).encode(), digest_size=16).hexdigest()
        looked = lambda batch: {"each": [judged(dict(zip(batch, row)), shaped) for row in zip(*batch.values())]}  # noqa: E731
        found = plain.map(looked, batched=True, batch_size=100, remove_columns=plain.column_names,
                          new_fingerprint=digest,
                          cache_file_name=f"{config.HF_DATASETS_CACHE}/plainrl-{digest}.arrow")  # fmt: skip
        each = found.data.column("each").to_pylist()
    kept, kinds = [i for i, (_, kind, _) in enumerate(each) if not kind], [kind for _, kind, _ in each if kind]
    firsts = {kind: fault for _, kind, fault in reversed(each) if kind}
    if kinds and not kept:
        raise UserError(f"no row can be used, the first because {firsts[kinds[0]]}")
    if kinds and rank() == 0:
        print(f"{len(kinds)} of {len(each)} rows cannot be used and are dropped, the first because {firsts[kinds[0]]}")
        for kind in dict.fromkeys(kinds) if len(firsts) > 1 else ():
            print(f"  {kinds.count(kind)} of them: {firsts[kind]}")
    return kept, [each[i][0] for i in kept]


def source(function: Callable) -> list:
    """The text of the function's file, and the plain values and arguments that it goes by."""
    values = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    plain = [x for x in values if isinstance(x, (str, int, list))]
    plain += [[x for x in vars(args).items() if x[0] not in OF_A_RUN] for args in values if isinstance(args, RunArgs)]
    return [linecache.getlines(function.__code__.co_filename), plain]


def keep(rows, encode: Callable[[dict], Sequence], limit: float, tokenizer, answers: Sequence[str] | None = None,
         most: float = math.inf):  # fmt: skip
    """The rows that `encode` makes into tokens, the prompt's first, which are at most `limit`; others are dropped.
    answers: the columns with the completions that it encodes, where it does nothing but `encode_answers` with `most`:
    then texts whose tokens need not be counted are not encoded."""

    def look(row: dict) -> str:
        if answers is None or not fits(row, answers, tokenizer, limit, most):
            if (length := len(encode(row)[0])) > limit:
                raise RowFault(row, f"has a prompt of {length} tokens, and {limit} are allowed")
        return ""

    inner = getattr(tokenizer, "backend_tokenizer", None)
    names = ("chat_template", "system_prompt", "raw_prompt", "template_kwargs")
    told = [inner.to_str() if inner else repr(tokenizer), *(getattr(tokenizer, name, None) for name in names)]
    kept, _ = sift(rows, look, source(sift), source(encode), told, limit, answers, most)
    return [rows[i] for i in kept] if isinstance(rows, list) else rows.select(kept)


def fits(row: dict, answers: Sequence[str], tokenizer, limit: float, most: float) -> bool:
    """Whether it is sure without tokens that the row can be used: few bytes, and a special token behind some text of
    the prompt, so that nothing of it depends on what the completion is."""
    prompt, plain = rendered(row, tokenizer)
    if most_tokens(prompt, tokenizer) > limit:
        return False
    check_answers(row, given := [row.get(name) for name in answers])
    wholes = [rendered(row, tokenizer, answer)[0] for answer in given]
    special = tokenizer.all_special_tokens
    begin = prompt[: max(map(prompt.rfind, special))] if given and not plain else ""
    for token in special:
        begin = begin.replace(token, "")
    return not given or bool(begin.strip()) and len({*wholes}) == len(wholes) and all(
        len(prompt) < len(whole) and whole.startswith(prompt) and "</think>" not in whole[len(prompt) :]
        and most_tokens(whole, tokenizer) <= most for whole in wholes)  # fmt: skip


def usable(task: Task, model, tokenizer, args) -> Task:
    """The task with the prompts that leave room for --max-completion-length in the model's context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if (room := context - args.max_completion_length) < 1:
        raise UserError(f"the model's {context} tokens leave no room for prompts: lower --max-completion-length")
    limit = min(n for n in (room, args.max_prompt_length) if n is not None)
    how = dict(limit=limit, tokenizer=tokenizer, answers=())
    return keep_rows(task, lambda row: [encode_prompt(row, tokenizer)], "lower --max-completion-length", **how)


def keep_rows(task: Task, encode: Callable[[dict], Sequence], remedy: str, limit: float, tokenizer,
              answers: Sequence[str] | None = None) -> Task:  # fmt: skip
    """The task with the rows that `keep` keeps. Raises UserError for an endless one of which some cannot be used."""
    heldout, rows = (rows and keep(rows, encode, limit, tokenizer, answers) for rows in (task.heldout, task.rows))
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


def rendered(row: dict, tokenizer, answer: str | list[dict] | None = None) -> tuple[str, bool]:
    """The row's prompt as text, up to where the completion begins: behind the template's generation prompt, or behind
    a last message of the assistant's, which the completion continues; or prompt and `answer`. And whether it is plain
    text, which gets the tokenizer's special tokens: a template brings its own."""
    prompt = present(row, tokenizer)
    if isinstance(prompt, str):
        if isinstance(answer, list):
            raise RowFault(row, "has a text as prompt and chat messages as its answer")
        return prompt + (answer or ""), True
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
        return tokenizer.apply_chat_template(prompt, tokenize=False, **how), False
    except Exception as error:  # a template raises what it likes
        raise RowFault(row, f"cannot be rendered by the chat template ({error})") from error


def encode_prompt(row: dict, tokenizer, answer: str | list[dict] | None = None) -> list[int]:
    """Token ids of the row's prompt. Plain text gets the tokenizer's special tokens, but no EOS, and one BOS where it
    was rendered before. Or those of prompt and `answer`, encoded together: alone, an answer could get a space or other
    tokens in front (SentencePiece puts a space before every text)."""
    text, plain = rendered(row, tokenizer, answer)
    ids = tokenizer(text, add_special_tokens=plain)["input_ids"]
    if plain and ids and ids[-1] in tokenizer.all_special_ids:  # of the text, or an EOS that is added to every text
        added, bare = (tokenizer("a", add_special_tokens=x)["input_ids"][-1:] for x in (True, False))
        ids = ids[: len(ids) - (added != bare)]
    return ids[1:] if plain and ids[:2] == [tokenizer.bos_token_id] * 2 else ids


def most_tokens(text: str, tokenizer) -> float:
    """At least as many as the text has, without counting: a token is a byte at least of what the normalizer leaves, or
    was added by it as a mark in front. Tokenizers in Python may do anything."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        return math.inf
    normal = inner.normalizer.normalize_str(text) if inner.normalizer else text
    return len(normal.encode()) + 3 + inner.num_special_tokens_to_add(False)


def encode_answers(row: dict, answers: Sequence, tokenizer, eos: list[int], most: int | None = None) -> tuple:
    """Token ids of the row's prompt, and of each answer up to and including its first EOS, which is added where there
    is none. An answer begins where the prompt with it differs from the prompt alone, and all begin where the first of
    them does: a token across the seam, or what a template puts behind the prompt alone (`<think>`), belongs to the
    answers. Raises RowFault where two are equal in what `most` tokens leave of them."""
    check_answers(row, answers)
    prompt, wholes = encode_prompt(row, tokenizer), [encode_prompt(row, tokenizer, answer) for answer in answers]
    cut, ends = min(shared(prompt, whole) for whole in wholes), []
    if set(prompt[:cut]) <= set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}:
        raise RowFault(row, "is rendered differently with its completion than without: the two cannot be told apart")
    for answer, whole in zip(answers, wholes):
        ends.append(until_eos(whole[cut:], tokenizer, eos))
        if len(whole) == cut or "</think>" in str(answer) and "</think>" not in tokenizer.decode(ends[-1]):
            raise RowFault(row, "has a completion of which the chat template leaves nothing, or drops the reasoning")
    room = most and max(0, most - cut)
    if len(ends) == 2 and room != 0 and ends[0][:room] == ends[1][:room]:
        raise RowFault(row, f"has answers that are equal in their first {most} tokens, the prompt's included")
    return prompt[:cut], *ends


def check_answers(row: dict, answers: Sequence) -> None:
    for answer in answers:
        if isinstance(answer, list):
            last = answer[0] if [message["role"] for message in answer] == ["assistant"] else {}
            answer = last.get("content") or last.get("tool_calls")
        if not answer:
            raise RowFault(row, "needs a completion: text, or one message of the assistant's, all before it the prompt")


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
