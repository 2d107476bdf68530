"""Text to tokens: how a row's prompt is shown to a model, and how it and its completions become token ids."""

from utils.errors import UserError
from utils.tasks import CHARACTERS


class RowFault(UserError):
    """Why a row of a dataset cannot be used."""


def present(row: dict, tokenizer) -> str | list[dict]:
    """The prompt as this model gets it: messages for a model with a chat template, else text; compact notation for the
    tiny character model alone. Raises UserError for messages without a template."""
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        if tokenizer.chat_template is None:
            raise UserError("the prompts are chat messages but the model has no chat template: give an instruct model")
        return prompt
    compact = len(tokenizer) < 100 and set(tokenizer.get_vocab()) >= set(CHARACTERS)  # get_vocab is slow
    text = prompt if compact else row.get("plain_prompt", prompt)
    return text if tokenizer.chat_template is None else [{"role": "user", "content": text}]


def encode_prompt(row: dict, tokenizer) -> list[int]:
    """Token ids of the row's prompt, up to where the completion begins. A template brings its own special tokens; plain
    text gets the tokenizer's."""
    prompt = present(row, tokenizer)
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return render(prompt, tokenizer, add_generation_prompt=True)


def render(messages: list[dict], tokenizer, **settings) -> list[int]:
    """Token ids of what the chat template makes of the messages. Raises RowFault where it refuses them."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **settings)["input_ids"]
    except Exception as error:  # a template raises what it likes
        raise RowFault(f"cannot be rendered by the chat template ({error})") from error


def encode_whole(row: dict, answer: str | list[dict], tokenizer) -> list[int]:
    """Token ids of the row's prompt and an answer to it, encoded together: alone, an answer could get a space or other
    tokens in front (SentencePiece puts a space before every text)."""
    prompt = present(row, tokenizer)
    if isinstance(prompt, str):
        if not isinstance(answer, str):
            raise RowFault("has a text as prompt and chat messages as its answer")
        return tokenizer(prompt + answer)["input_ids"]
    return render(
        prompt + ([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer), tokenizer
    )


def shared(first: list[int], second: list[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def until_eos(tokens: list[int], start: int, tokenizer, eos: list[int]) -> list[int]:
    """What stands from `start` on up to and including the first EOS, which is added where there is none."""
    end = next((i for i in range(start, len(tokens)) if tokens[i] in eos), len(tokens))
    return tokens[start:end] + (tokens[end : end + 1] or [tokenizer.eos_token_id])


def encode_answers(row: dict, answers: list, tokenizer, eos: list[int]) -> tuple[list[int], ...]:
    """Token ids of the row's prompt, and of each answer up to and including its first EOS.

    An answer begins where the prompt with it differs from the prompt alone, and all begin where the first of them does:
    a token across the seam, or what a template puts behind the prompt alone (`<think>`), belongs to the answers (as in
    TRL). Raises RowFault where the two have nothing but special tokens in common, or nothing of an answer is left.
    """
    prompt = encode_prompt(row, tokenizer)
    wholes = [encode_whole(row, answer, tokenizer) for answer in answers]
    cut = min(shared(prompt, whole) for whole in wholes)
    if set(prompt[:cut]) <= set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}:
        raise RowFault("is rendered differently with its completion than without: the two cannot be told apart")
    if any(len(whole) == cut for whole in wholes):
        raise RowFault("has a completion of which no token is left")
    return prompt[:cut], *(until_eos(whole, cut, tokenizer, eos) for whole in wholes)


def encode_row(row: dict, tokenizer, eos: list[int]) -> tuple[list[int], list[int]]:
    """Token ids of prompt and completion. Raises RowFault where there is no completion or it cannot be told apart."""
    if not row.get("completion"):
        raise RowFault(
            f"has no completion (its columns are {', '.join(sorted(row))}): give each one in a column completion"
        )
    prompt, completion = encode_answers(row, [row["completion"]], tokenizer, eos)
    return prompt, completion


def encode_pair(row: dict, tokenizer, eos: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Token ids of prompt, chosen and rejected. Raises RowFault where they cannot be told apart."""
    prompt, chosen, rejected = encode_answers(row, [row["chosen"], row["rejected"]], tokenizer, eos)
    return prompt, chosen, rejected
