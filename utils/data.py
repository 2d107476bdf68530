"""Prompts and answers: where they come from, how a model is shown them, how built-in tasks score an answer.

A row is a dictionary. `prompt` is text or a list of chat messages; every other column is handed to reward functions.
Built-in tasks write `prompt` in a compact notation for the tiny character model and `plain_prompt` in words for others.
The demonstrations (`completion`) of countdown and sort are mostly wrong; their `solution` is right. A pair is a row with
the columns prompt, chosen and rejected, an unpaired row has prompt, completion, and label: true where it is desirable.
"""

import json
import math
import random
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

from utils.core import UserError
from utils.dist import rank

HELDOUT = 256  # rows, at most
FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}  # formats of the datasets library
GSM8K = "Solve the problem step by step. End with one line that holds #### and the answer as a number."
WRONG_SHARE = 0.75  # of the demonstrations of countdown and sort


class Task(NamedTuple):
    """`train(index, seed)`: the index-th row of an endless stream that depends on nothing else, so a run resumes from one
    integer. `heldout` shares no prompt with it. `score(row, text)`: the reward, None if only the user's functions can
    tell. `rows`: the dataset that `train` goes through, None where it draws without end."""

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
    """countdown, sort, gsm8k, gsm8k:FOLDER (of train.jsonl and test.jsonl), or what `load_rows` reads."""
    name, _, folder = spec.partition(":")
    if name in ("countdown", "sort"):
        return procedural(name, *{"countdown": (countdown_row, countdown_score), "sort": (sort_row, sort_score)}[name])

    def shaped(row: dict) -> dict:
        row = row | {"prompt": column(row, prompt_column, "see --prompt-column")}
        check(row, "prompt")  # plain_prompt would be shown in its place
        return {name: row[name] for name in row if name not in {prompt_column, "plain_prompt"} - {"prompt"}}

    def problem(row: dict) -> dict:
        question = column(row, "question", "gsm8k needs it")
        return row | {"prompt": f"{question}\n\n{GSM8K}", "completion": column(row, "answer", "gsm8k needs it")}

    if name == "gsm8k":
        train, heldout = load_rows(folder or "openai/gsm8k:main", problem, most=10**6)
        return Task(name, epochs(train), list(heldout), gsm8k_score, train)
    train, heldout = load_rows(spec, shaped)
    return Task(Path(spec).stem, epochs(train), list(heldout), None, train)


def load_rows(spec: str, shaped: Callable[[dict], dict] = lambda row: row, most: int = HELDOUT):
    """Rows to train on and at most `most` held-out ones, each a datasets.Dataset that stays on the disk. spec: a .jsonl,
    .json, .parquet or .csv file, a folder of such or of save_to_disk, or a hub name, perhaps with :CONFIG.
    `shaped(row)` makes the row's prompt, whenever the row is read; where it raises RowFault, the row is dropped.

    The dataset's own test or validation split is held out, else a twentieth of the prompts. Training rows whose prompt
    is held out are dropped.
    """
    splits = read_splits(spec)

    def named(*prefixes: str) -> str | None:
        """The split of that name, else the first whose name begins so (train_sft); earlier prefixes win."""
        return next((n for prefix in prefixes for n in (prefix, *splits) if n in splits and n.startswith(prefix)), None)

    def readable(name: str) -> tuple[Any, list[int]]:
        """The usable rows of a split, and of each a number that is equal for equal prompts."""
        keys: list[int] = []

        def key(row: dict) -> tuple[list[int], ...]:
            prompt = json.dumps(shaped(cleaned(row)).get("prompt"), sort_keys=True, default=str)
            keys.append(zlib.crc32(prompt.encode()))
            return ([],)

        def transform(batch: dict) -> dict:
            rows = [shaped(cleaned(dict(zip(batch, values)))) for values in zip(*batch.values())]
            return {name: [row[name] for row in rows] for name in rows[0]}

        return keep(splits[name], key).with_transform(transform), keys

    name, other = named("train") or next(iter(splits)), named("test", "valid")
    train, keys = readable(name)
    if other is None or other == name:
        unique = sorted(set(keys))
        held = set(unique[: min(max(1, len(unique) // 20), most)])
        heldout = train.select([i for i, key in enumerate(keys) if key in held])
    else:
        heldout, others = readable(other)
        held = set(others)
    kept = [i for i, key in enumerate(keys) if key not in held]
    if not kept:
        raise UserError(f"the dataset {spec} has no prompt to train on that is not held out: give it more prompts")
    if rank() == 0 and other not in (None, name) and len(kept) < len(keys):
        print(f"{spec}: {len(keys) - len(kept)} training rows are dropped because their prompts are held out")
    return train.select(kept), heldout.select(range(min(most, len(heldout))))


def read_splits(spec: str) -> dict:
    """The splits that are not empty, each a datasets.Dataset."""
    import datasets  # slow to import, and the built-in tasks do without

    datasets.disable_progress_bars()
    path, (name, _, config) = Path(spec).expanduser(), spec.partition(":")
    kind = None if path.is_dir() else FILES.get(path.suffix.lower())
    if not path.exists() and (kind or "/" not in spec or spec.startswith((".", "/", "~"))):
        raise UserError(f"there is no task and no file {path}: give one that exists, or a hub dataset ORG/NAME")
    if path.is_file() and not kind:
        raise UserError(f"{path} is no {', '.join(FILES)} file: save the dataset as one of these")
    try:
        if kind:
            splits = datasets.load_dataset(kind, data_files=str(path)) if path.stat().st_size else {}
        elif any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
            splits = datasets.load_from_disk(str(path))
        else:
            splits = datasets.load_dataset(str(path) if path.is_dir() else name, config or None)
    except Exception as error:  # the library raises dozens of kinds, all of which mean the same to the user
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise UserError(f"cannot read the dataset {spec} ({reason}): give a readable file or hub name") from error
    splits = splits if isinstance(splits, dict) else {"train": splits}
    if not any(map(len, splits.values())):
        raise UserError(f"the dataset {spec} is empty: it needs at least two rows")
    return {name: rows for name, rows in splits.items() if len(rows)}


def cleaned(row: dict) -> dict:
    """Without the None that Arrow writes into messages and tools for names that others have and this one lacks."""
    return {name: without_none(value) if isinstance(value, list) else value for name, value in row.items()}


def without_none(value):
    if isinstance(value, dict):
        return {name: without_none(part) for name, part in value.items() if part is not None or name == "content"}
    return [without_none(part) for part in value] if isinstance(value, list) else value


def keep(rows, encode: Callable[[dict], Sequence], limit: float = math.inf):
    """The rows that `encode` makes into tokens, the prompt's first, which are at most `limit`. The others, refused by a
    RowFault or too long, are dropped and counted, the first of them shown."""
    kept, faults = [], []
    for i, row in enumerate(rows):
        try:
            if (length := len(encode(row)[0])) > limit:
                raise RowFault(row, f"has a prompt of {length} tokens, and {limit} are allowed")
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
    limit = min(context - args.max_completion_length, args.max_prompt_length or math.inf)

    def encode(row: dict) -> tuple[list[int], ...]:
        return (encode_prompt(row, tokenizer),)

    heldout = keep(task.heldout, encode, limit)
    if task.rows is not None:
        rows = keep(task.rows, encode, limit)
        return task._replace(rows=rows, train=epochs(rows), heldout=heldout)
    if len(heldout) < len(task.heldout):  # nothing can be dropped of what is drawn without end
        raise UserError(f"some prompts of {task.name} have more than {limit} tokens: lower --max-completion-length")
    return task


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


def column(row: dict, name: str, remedy: str) -> Any:
    if name not in row:
        raise UserError(f"the dataset has no column {name!r} ({remedy}); there are {', '.join(sorted(row))}")
    return row[name]


def check(row: dict, *names: str) -> None:
    """Raises RowFault unless these columns are all text or all lists of chat messages, and none is empty."""

    def kind(value) -> str:
        if isinstance(value, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str)
                                           and {"content", "tool_calls"} & m.keys() for m in value):  # fmt: skip
            return "messages" if value else ""
        return "text" if isinstance(value, str) and value else ""

    if len(kinds := {kind(row.get(name)) for name in names}) > 1 or "" in kinds:
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
    elif tokenizer.chat_template is None:
        raise UserError("the prompts are chat messages and the model has no chat template: give one that has it, such as "
                        "an instruct model")  # fmt: skip
    if system and all(message["role"] != "system" for message in prompt):
        prompt = [{"role": "system", "content": system}, *prompt]
    return prompt


def template_kwargs(row: dict, tokenizer) -> dict:
    """What the chat template is told besides the messages: the flag's settings, over them the row's columns
    chat_template_kwargs and tools, as they are or as JSON."""
    try:
        own, tools = (json.loads(x) if isinstance(x := row.get(name) or {}, str) else x
                      for name in ("chat_template_kwargs", "tools"))  # fmt: skip
    except ValueError as error:
        raise RowFault(row, f"has tools or chat_template_kwargs that are no JSON ({error})") from error
    return getattr(tokenizer, "template_kwargs", {}) | ({"tools": tools} if tools else {}) | without_none(own)


def encode_prompt(row: dict, tokenizer) -> list[int]:
    """Token ids of the row's prompt, up to where the completion begins: behind the template's generation prompt, or
    behind a last message of the assistant's, which the completion continues."""
    return encode(present(row, tokenizer), row, tokenizer)


def encode(prompt: str | list[dict], row: dict, tokenizer, whole: bool = False) -> list[int]:
    """Token ids of a prompt, or of one with its answer (`whole`). A template brings its own special tokens; plain text
    gets the tokenizer's, and one BOS where it was rendered before."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
        twice = tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2
        return ids[1:] if twice else ids
    continued = not whole and prompt[-1]["role"] == "assistant"
    how = dict(add_generation_prompt=not whole and not continued, continue_final_message=continued, return_dict=True)
    try:
        return tokenizer.apply_chat_template(prompt, **template_kwargs(row, tokenizer), **how)["input_ids"]
    except RowFault:
        raise
    except Exception as error:  # a template raises what it likes
        raise RowFault(row, f"cannot be rendered by the chat template ({error})") from error


def encode_whole(row: dict, answer: str | list[dict], tokenizer) -> list[int]:
    """Token ids of the row's prompt and an answer to it, encoded together: alone, an answer could get a space or other
    tokens in front (SentencePiece puts a space before every text)."""
    prompt = present(row, tokenizer)
    if isinstance(prompt, str):
        if not isinstance(answer, str):
            raise RowFault(row, "has a text as prompt and chat messages as its answer")
        return encode(prompt + answer, row, tokenizer)
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if prompt[-1]["role"] == messages[0]["role"] == "assistant":  # it goes on with a message that is begun
        begun = f"{prompt[-1].get('content') or ''}{messages[0].get('content') or ''}"
        prompt, messages = prompt[:-1], [prompt[-1] | messages[0] | {"content": begun}, *messages[1:]]
    return encode(prompt + messages, row, tokenizer, whole=True)


def encode_answers(row: dict, answers: Sequence, tokenizer, eos: list[int]) -> tuple[list[int], ...]:
    """Token ids of the row's prompt, and of each answer up to and including its first EOS, which is added where there is
    none. An answer begins where the prompt with it differs from the prompt alone, and all begin where the first of them
    does: a token across the seam, or what a template puts behind the prompt alone (`<think>`), belongs to the answers.
    """
    for answer in answers:
        if not answer or isinstance(answer, list) and [m["role"] for m in answer] != ["assistant"]:
            raise RowFault(row, "needs a completion: text, or one message of the assistant's, all before it the prompt")
    prompt, wholes = encode_prompt(row, tokenizer), [encode_whole(row, answer, tokenizer) for answer in answers]
    cut = min(shared(prompt, whole) for whole in wholes)
    if set(prompt[:cut]) <= set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}:
        raise RowFault(row, "is rendered differently with its completion than without: the two cannot be told apart")
    ends = []
    for answer, whole in zip(answers, wholes):
        end = next((i for i in range(cut, len(whole)) if whole[i] in eos), len(whole))
        ends.append(whole[cut:end] + (whole[end : end + 1] or [tokenizer.eos_token_id]))
        text = answer if isinstance(answer, str) else f"{answer[0].get('content')}"
        if len(whole) == cut or "</think>" in text and "</think>" not in tokenizer.decode(ends[-1]):
            raise RowFault(row, "has a completion of which the chat template leaves nothing, or drops the reasoning")
    return prompt[:cut], *ends


def shared(first: Sequence, second: Sequence) -> int:
    """How many tokens, characters or messages both begin with."""
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


class Pairs(NamedTuple):
    """Rows with the columns prompt, chosen and rejected, or prompt, completion and label. `task` scores answers of the
    model's own; None for a dataset."""

    name: str
    train: Sequence[dict]
    heldout: Sequence[dict]
    task: Task | None = None


def load_pairs(spec: str, num_pairs: int, seed: int) -> Pairs:
    """countdown or sort: `num_pairs` pairs to train on, drawn with `seed`. Else all pairs of what `load_rows` reads."""
    if spec not in ("countdown", "sort"):
        return Pairs(Path(spec).stem, *load_rows(spec, as_pair))
    task = load_task(spec)
    made = (task.train(i, seed) for i in count())
    return Pairs(spec, list(islice(right_and_wrong(made), num_pairs)), list(right_and_wrong(task.heldout)), task)


def load_unpaired(spec: str, num_pairs: int, seed: int) -> Pairs:
    """Rows with a label from the same sources. A pair makes two: its chosen completion is desirable, the other not."""
    if spec in ("countdown", "sort"):
        data = load_pairs(spec, num_pairs, seed)
        return data._replace(train=unpaired(data.train), heldout=unpaired(data.heldout))
    train, heldout = load_rows(
        spec, lambda row: as_pair(row) if {"chosen", "rejected"} <= row.keys() else labelled(row)
    )
    if "chosen" in train.column_names:
        train, heldout = unpaired(train), unpaired(heldout)
    return Pairs(Path(spec).stem, train, heldout)


def right_and_wrong(rows: Iterable[dict]) -> Iterator[dict]:
    """Pairs of a right and a wrong answer, which errs as three in four demonstrations do. Sort has none where the two
    smallest digits are equal."""
    for row in rows:
        right = row["solution"]
        if "digits" in row:
            wrong = right[1] + right[0] + right[2:]
        else:
            wrong = f"{right.rpartition('=')[0]}={row['target'] + 1}"
        if right != wrong:
            yield row | {"chosen": right, "rejected": wrong}


def unpaired(pairs: Iterable[dict]) -> list[dict]:
    sides = (("chosen", True), ("rejected", False))
    return [pair | {"completion": pair[side], "label": label} for pair in pairs for side, label in sides]


def labelled(row: dict) -> dict:
    """The row with its label as bool; 0 and 1 are taken for labels too."""
    for name in ("prompt", "completion", "label"):
        column(row, name, "rows need prompt, completion and label, or chosen and rejected")
    check(row, "prompt", "completion")
    if row["label"] not in (False, True):
        raise RowFault(row, f"has the label {row['label']!r}: it must be true (desirable) or false, or 1 or 0")
    return row | {"label": bool(row["label"])}


def as_pair(row: dict) -> dict:
    """The row with prompt, chosen and rejected of one kind. What two conversations have in common belongs to the
    prompt: turns of it are no choice between them. Where there is no prompt, what both begin with is it."""
    chosen, rejected = (column(row, name, "pairs need chosen and rejected") for name in ("chosen", "rejected"))
    check(row, "chosen", "rejected")
    prompt, most = row.get("prompt"), min(len(chosen), len(rejected)) - 1  # something is left of each
    if isinstance(chosen, list):
        size = min(shared(*([said(message) for message in side] for side in (chosen, rejected))), most)
        prompt = joined(prompt or [], chosen[:size], row)
    elif prompt is None:  # cut before the space in front of the first word that differs: half a word has other tokens
        size = min(shared(chosen, rejected), most)
        size = next((i for i in range(size, 0, -1) if chosen[i].isspace() and chosen[i] == rejected[i]), 0)
        prompt = chosen[:size]
    else:
        size = 0
    row = row | {"prompt": prompt, "chosen": chosen[size:], "rejected": rejected[size:]}
    check(row, "prompt", "chosen", "rejected")
    return row


def joined(prompt: str | list[dict], begin: list[dict], row: dict) -> list[dict]:
    """A prompt, and messages that both answers begin with, of which it may be a part. A text is a user's message."""
    if isinstance(prompt, str):
        if any(message["role"] == "user" for message in begin):
            return begin  # whole conversations hold the prompt
        system = sum(message["role"] == "system" for message in begin)
        return [*begin[:system], {"role": "user", "content": prompt}, *begin[system:]]
    first, second = [said(message) for message in prompt], [said(message) for message in begin]
    if first[max(0, len(first) - len(second)) :] == second:
        return prompt
    if begin[0]["role"] == "assistant":
        return prompt + begin
    if first not in (second[: len(first)], second[len(second) - len(first) :]):
        raise RowFault(row, "has a prompt with which chosen and rejected do not go on, though they begin alike")
    return begin


def said(message: dict) -> tuple:
    """What of messages is compared: their other names, such as a score, say nothing of what they say."""
    return message["role"], message.get("content"), message.get("tool_calls")


def procedural(name: str, make: Callable, score: Callable) -> Task:
    """Rows are drawn afresh; those whose key hashes to 0 mod 10 are held out, whatever their order of digits."""

    def draw(rng: random.Random, want_heldout: bool) -> dict:
        while True:
            row, key = make(rng)
            if (zlib.crc32(f"{name} {key}".encode()) % 10 == 0) == want_heldout:
                return row

    heldout, rng = {}, random.Random(name)
    while len(heldout) < HELDOUT:
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
    """1 if the first number in the line of the last #### is the solution's."""
    return float((found := stated(text)) is not None and found == stated(row["answer"]))


def stated(text: str) -> float | None:
    """Without thousands separators; None where there is no such line or no number in it."""
    line = text.rpartition("####")[2].strip().partition("\n")[0] if "####" in text else ""
    found = re.search(r"[-\u2212]?(?:\d[\d,]*(?:\.\d+)?|(?<!\w)\.\d+)", line, re.ASCII)
    return float(found[0].replace(",", "").replace("\u2212", "-")) if found else None
