"""Text to tokens: how a row's prompt is shown to a model, and how it and its completions become token ids."""

from utils.errors import UserError
from utils.tasks import CHARACTERS


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
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]


def encode_completion(row: dict, completion: str | list[dict], tokenizer,
                      eos: list[int]) -> tuple[list[int], list[int]]:  # fmt: skip
    """Token ids of the row's prompt, and of its completion up to and including the first EOS, which is added where
    there is none. Raises UserError where the chat template does not continue its own prompt."""
    prompt = present(row, tokenizer)
    prompt_tokens = encode_prompt(row, tokenizer)
    if isinstance(prompt, str):
        tokens = tokenizer(completion, add_special_tokens=False)["input_ids"]
    else:
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        whole = tokenizer.apply_chat_template(prompt + answer, tokenize=True, return_dict=True)["input_ids"]
        if whole[: len(prompt_tokens)] != prompt_tokens:
            raise UserError(
                "the chat template renders the conversation differently from its prompt: the two cannot be told apart"
            )
        tokens = whole[len(prompt_tokens) :]
    end = next((i for i, token in enumerate(tokens) if token in eos), len(tokens))
    return prompt_tokens, tokens[:end] + (tokens[end : end + 1] or [tokenizer.eos_token_id])


def encode_row(row: dict, tokenizer, eos: list[int]) -> tuple[list[int], list[int]]:
    """`encode_completion` of the row's own completion. Raises UserError where it has none."""
    if not row.get("completion"):
        columns = ", ".join(sorted(row))
        raise UserError(f"a row has no completion (its columns are {columns}): give each one in a column completion")
    return encode_completion(row, row["completion"], tokenizer, eos)


def encode_pair(row: dict, tokenizer, eos: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Token ids of prompt, chosen and rejected; each completion ends with its first EOS. Raises UserError where the
    chat template does not continue its own prompt."""
    (prompt, chosen), (_, rejected) = (encode_completion(row, row[c], tokenizer, eos) for c in ("chosen", "rejected"))
    return prompt, chosen, rejected
