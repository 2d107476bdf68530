"""Text to tokens: how a row's prompt is shown to a model, and how it and its completions become token ids."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from utils.errors import UserError
from utils.rows import Lazy, RowFault, check_kind, epochs, hold_out, keys_of, selected, without_none
from utils.tasks import CHARACTERS, Task

TOO_MANY = 0.05  # of a dataset's prompts: where more are too long, the run goes on only if the user asked for it
ENDLESS = 32  # rows of an endless task that are looked at
THINKING = "</think>"  # ends the reasoning of most reasoning models


@dataclass(frozen=True)
class ChatSettings:
    """How the policy's flags want rows to be shown. The policy's tokenizer has them as `chat_settings`; a reward model
    that scores knows none of them, only the row's own chat_template_kwargs: a score must not depend on who asks."""

    system_prompt: str = ""
    template_kwargs: dict = field(default_factory=dict)
    raw_prompt: bool = False
    embeddings: float = math.inf  # of the model: a tokenizer may have more tokens


def settings_of(tokenizer) -> ChatSettings:
    return getattr(tokenizer, "chat_settings", ChatSettings())


def present(row: dict, tokenizer) -> str | list[dict]:
    """The prompt as this model gets it: messages for a model with a chat template, else text; compact notation for the
    tiny character model alone. Raises UserError for messages without a template."""
    prompt, settings = row["prompt"], settings_of(tokenizer)
    if isinstance(prompt, str):
        compact = len(tokenizer) < 100 and set(tokenizer.get_vocab()) >= set(CHARACTERS)  # get_vocab is slow
        text = prompt if compact else row.get("plain_prompt", prompt)
        if tokenizer.chat_template is None or settings.raw_prompt:
            return text
        prompt = [{"role": "user", "content": text}]
    elif tokenizer.chat_template is None:
        wrong = f"the prompts are chat messages but {tokenizer.name_or_path or 'the model'} has no chat template"
        raise UserError(f"{wrong}: give a model that has one, such as an instruct model")
    if settings.system_prompt and not any(message["role"] == "system" for message in prompt):
        prompt = [{"role": "system", "content": settings.system_prompt}, *prompt]
    return prompt


def encode_prompt(row: dict, tokenizer) -> list[int]:
    """Token ids of the row's prompt, up to where the completion begins: behind the template's generation prompt, or
    behind a last message of the assistant's, which the completion continues. A template brings its own special tokens;
    plain text gets the tokenizer's."""
    prompt = present(row, tokenizer)
    if isinstance(prompt, str):
        return encode_text(prompt, row, tokenizer)
    continued = prompt[-1]["role"] == "assistant"
    return render(prompt, row, tokenizer, add_generation_prompt=not continued, continue_final_message=continued)


def encode_text(text: str, row: dict, tokenizer) -> list[int]:
    """Token ids of a text. One that was rendered before brings its BOS: there is one, not two."""
    ids = tokenizer(text)["input_ids"]
    twice = tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2
    return known(ids[1:] if twice else ids, row, tokenizer)


def known(ids: list[int], row: dict, tokenizer) -> list[int]:
    """The ids. Raises RowFault where the model has no embedding for one of them."""
    if max(ids, default=0) >= settings_of(tokenizer).embeddings:
        raise RowFault(row, f"holds {tokenizer.decode([max(ids)])!r}, a token for which --model has no embedding")
    return ids


def template_kwargs(row: dict, tokenizer) -> dict:
    """What the chat template is told besides the messages: the policy's settings, before them the row's columns
    chat_template_kwargs and tools, as they are or as JSON."""
    own, tools = row.get("chat_template_kwargs") or {}, row.get("tools") or None
    try:
        own, tools = (json.loads(value) if isinstance(value, str) else value for value in (own, tools))
    except ValueError as error:
        raise RowFault(row, f"has tools or chat_template_kwargs that are no JSON ({error})") from error
    return settings_of(tokenizer).template_kwargs | ({"tools": tools} if tools else {}) | without_none(own)


def render(messages: list[dict], row: dict, tokenizer, **more) -> list[int]:
    """Token ids of what the chat template makes of the row's messages. Raises RowFault where it refuses them."""
    kwargs = template_kwargs(row, tokenizer) | more
    try:
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **kwargs)["input_ids"]
    except Exception as error:  # a template raises what it likes
        raise RowFault(row, f"cannot be rendered by the chat template ({error})") from error
    return known(ids, row, tokenizer)


def encode_whole(row: dict, answer: str | list[dict], tokenizer) -> list[int]:
    """Token ids of the row's prompt and an answer to it, encoded together: alone, an answer could get a space or other
    tokens in front (SentencePiece puts a space before every text)."""
    prompt = present(row, tokenizer)
    if isinstance(prompt, str):
        if not isinstance(answer, str):
            raise RowFault(row, "has a text as prompt and chat messages as its answer")
        return encode_text(prompt + answer, row, tokenizer)
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    texts = isinstance(prompt[-1].get("content"), str) and isinstance(messages[0].get("content"), str)
    if texts and prompt[-1]["role"] == messages[0]["role"] == "assistant":
        begun = prompt[-1] | {"content": prompt[-1]["content"] + messages[0]["content"]}
        prompt, messages = prompt[:-1], [begun, *messages[1:]]
    return render(prompt + messages, row, tokenizer)


def shared(first: Sequence, second: Sequence) -> int:
    """How many tokens, characters or messages both begin with."""
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def until_eos(tokens: list[int], start: int, tokenizer, eos: list[int]) -> list[int]:
    """What stands from `start` on up to and including the first EOS, which is added where there is none."""
    end = next((i for i in range(start, len(tokens)) if tokens[i] in eos), len(tokens))
    return tokens[start:end] + (tokens[end : end + 1] or [tokenizer.eos_token_id])


def encode_answers(row: dict, answers: list, tokenizer, eos: list[int]) -> tuple[list[int], ...]:
    """Token ids of the row's prompt, and of each answer up to and including its first EOS.

    An answer begins where the prompt with it differs from the prompt alone, and all begin where the first of them does:
    a token across the seam, or what a template puts behind the prompt alone (`<think>`), belongs to the answers (as in
    TRL). Raises RowFault where the two have nothing but special tokens in common, nothing of an answer is left, an
    answer has several messages, of which not all are the model's, or the template drops its reasoning.
    """
    for answer in answers:
        if isinstance(answer, list) and [message["role"] for message in answer] != ["assistant"]:
            roles = ", ".join(message["role"] for message in answer)
            raise RowFault(row, f"has a completion with the messages {roles}: it must be the assistant's last one, and "
                                "all before it the prompt")  # fmt: skip
        if isinstance(answer, list) and not (answer[0].get("content") or answer[0].get("tool_calls")):
            raise RowFault(row, "has an empty message as its completion")
    prompt = encode_prompt(row, tokenizer)
    wholes = [encode_whole(row, answer, tokenizer) for answer in answers]
    cut = min(shared(prompt, whole) for whole in wholes)
    if set(prompt[:cut]) <= set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}:
        raise RowFault(row, "is rendered differently with its completion than without: the two cannot be told apart")
    if any(len(whole) == cut for whole in wholes):
        raise RowFault(row, "has a completion of which no token is left")
    ends = [until_eos(whole, cut, tokenizer, eos) for whole in wholes]
    for answer, tokens in zip(answers, ends):
        if wanted := thoughts(answer):
            text = "".join(tokenizer.decode(tokens).split())
            if any(thought not in text for thought in wanted):
                raise RowFault(row, "has a completion whose reasoning the chat template drops: give all as text with "
                                    "--raw-prompt, or a model whose template keeps it")  # fmt: skip
    return prompt[:cut], *ends


def thoughts(answer: str | list[dict]) -> list[str]:
    """What shows that a rendered answer still has its reasoning; nothing where it has none. Without spaces, which
    templates and tokenizers change."""
    message = {"content": answer} if isinstance(answer, str) else answer[0]
    own = ["".join(str(message[name]).split())[:20] for name in ("reasoning_content", "thinking") if message.get(name)]
    return own + [THINKING] * (THINKING in str(message.get("content")))


def encode_row(row: dict, tokenizer, eos: list[int]) -> tuple[list[int], ...]:
    """Token ids of prompt and completion. Raises RowFault where there is no completion or it cannot be told apart."""
    if row.get("completion") is None:
        columns = ", ".join(sorted(row))
        raise RowFault(row, f"has no completion (its columns are {columns}): give each row one in a column completion")
    check_kind(row["completion"], "the completion", row)
    return encode_answers(row, [row["completion"]], tokenizer, eos)


def encode_pair(row: dict, tokenizer, eos: list[int]) -> tuple[list[int], ...]:
    """Token ids of prompt, chosen and rejected. Raises RowFault where they cannot be told apart."""
    return encode_answers(row, [row["chosen"], row["rejected"]], tokenizer, eos)


def usable_rows(train: Sequence[dict], heldout: Sequence[dict], encode: Callable[[dict], tuple], room: float,
                longest: int | None = None, remedy: str = "") -> tuple[Lazy, Lazy, int]:  # fmt: skip
    """The rows to train and to evaluate on that a run can use: `encode` makes them into tokens, the prompt's first, and
    the prompt has at most `longest` (--max-prompt-length) and `room`. The others are counted, the first of them shown.
    And in how many of them a prompt and its completion have more than room + 1 tokens. Each row is encoded once, and
    only its number is kept.

    Where no row to evaluate on is left, a twentieth of the others is held out in their place. Raises UserError where
    nothing is left to train on, and where more than TOO_MANY of the prompts are too long, unless the user gave
    --max-prompt-length, which asks to go on without them. `remedy`: what gives prompts more room.
    """
    faults, long, cut, limit, total = [], [], 0, min(room, longest or room), len(train) + len(heldout)

    def can_be_used(row: dict) -> bool:
        nonlocal cut
        try:
            prompt, *completions = encode(row)
        except RowFault as fault:
            faults.append(str(fault))
            return False
        if len(prompt) > limit:
            long.append(str(RowFault(row, f"has {len(prompt)}")))
        elif any(len(prompt) + len(completion) > room + 1 for completion in completions):
            cut += 1
        return len(prompt) <= limit

    train, wanted, heldout = selected(train, can_be_used), len(heldout), selected(heldout, can_be_used)
    if faults:
        print(f"{len(faults)} of {total} rows cannot be used and are dropped, the first because {faults[0]}")
    if long:
        too_long = f"{len(long)} of {total} prompts have more than {limit} tokens (the first: {long[0]})"
        if longest is None and len(long) > max(1, TOO_MANY * total):
            raise UserError(f"{too_long}: {remedy}, or give --max-prompt-length {limit} to go on without them")
        print(f"{too_long} and are dropped")
    if not train:
        raise UserError(f"no row is left to train on: {(faults + long)[0]}")
    if wanted and not heldout:
        print("no row is left to evaluate on: a twentieth of the prompts to train on is held out")
        train, heldout = hold_out(train, keys_of(train), "with what can be used")
    return train, heldout, cut


def usable_task(task: Task, encode: Callable[[dict], tuple], room: float, longest: int | None, remedy: str) -> Task:
    """The task with what `usable_rows` leaves of its rows. Of an endless task a few are looked at, and nothing can be
    dropped: raises UserError where one of them is too long."""
    if task.rows is None:
        most = max(len(encode(row)[0]) for row in [task.train(0, 0), *task.heldout[:ENDLESS]])
        if most > (limit := min(room, longest or room)):
            raise UserError(f"prompts of {task.name} have up to {most} tokens, and {limit} are allowed: {remedy}")
        return task
    train, heldout, cut = usable_rows(task.rows, task.heldout, encode, room, longest, remedy)
    more = f"; {cut} completions are cut off" if cut else ""
    print(f"{task.name}: {len(train)} rows, {len(heldout)} held-out ones{more}")
    return replace(task, train=epochs(train), heldout=list(heldout), rows=train)


def usable_prompts(task: Task, model, tokenizer, args) -> Task:
    """The task with the prompts that leave room for --max-completion-length in the model's context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    return usable_task(task, lambda row: (encode_prompt(row, tokenizer),), context - args.max_completion_length,
                       args.max_prompt_length, "lower --max-completion-length")  # fmt: skip
