"""How a row becomes tokens: the seam between prompt and completion, under the rules of real tokenizers."""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from utils.reward_models import encode_answer
from utils.text import RowFault, encode_pair, encode_prompt, encode_row

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")  # as DeepSeek-R1's: history has none
USER = [{"role": "user", "content": "2+2?"}]


def sentencepiece() -> PreTrainedTokenizerFast:
    """Llama-2's normalizer and decoder: a space is a mark, and every text begins with one."""
    vocabulary = [
        "<unk>",
        "<s>",
        "</s>",
        "\u2581",
        *"Captil?Pars",
        "\u2581Paris",
        "\u2581Pa",
        "\u2581Rome",
        "\u2581Capital",
    ]
    inner = Tokenizer(models.Unigram([(token, -1.0) for token in dict.fromkeys(vocabulary)], unk_id=0))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def qwen(template: str | None = None) -> PreTrainedTokenizerFast:
    """Qwen's pre-tokenizer over bytes, with two line feeds merged."""
    newline = "\u010a"  # as the byte level writes it
    vocabulary = {c: i for i, c in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), 2 * newline])}
    inner = Tokenizer(models.BPE(vocabulary, [(newline, newline)]))
    words = r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+|[^\r\n\p{L}\p{N}]?\p{L}+"
    inner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)
    ])  # fmt: skip
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]})
    made.chat_template = template
    return made


def words(tokenizer, tokens: list[list[int]]) -> list[str]:
    return [" ".join(tokenizer.convert_ids_to_tokens(ids)) for ids in tokens]


def test_sentencepiece_puts_one_space_between_prompt_and_completion():
    tokenizer = sentencepiece()
    row = {"prompt": "Capital?", "completion": " Paris"}
    prompt, completion = encode_row(row, tokenizer, [tokenizer.eos_token_id])
    assert words(tokenizer, [prompt, completion]) == ["\u2581Capital ?", "\u2581Paris </s>"]
    assert prompt == encode_prompt(row, tokenizer) and tokenizer.decode(prompt + completion[:-1]) == "Capital? Paris"
    assert tokenizer.decode(encode_answer(row, " Paris", tokenizer), skip_special_tokens=True) == "Capital? Paris"
    assert encode_answer(row, "", tokenizer) == [*prompt, tokenizer.eos_token_id]  # a model may answer nothing
    _, chosen, rejected = encode_pair(row | {"chosen": " Paris", "rejected": "?"}, tokenizer, [tokenizer.eos_token_id])
    assert words(tokenizer, [chosen, rejected]) == ["\u2581Paris </s>", "? </s>"]


def test_a_pair_has_one_prompt():
    """One answer merges with the prompt's end, the other does not: both begin where the first of them does."""
    tokenizer = qwen()
    row = {"prompt": "Q\n", "chosen": "\nYes.", "rejected": "No."}
    prompt, chosen, rejected = encode_pair(row, tokenizer, [tokenizer.eos_token_id])
    assert [tokenizer.decode(ids) for ids in (prompt, chosen, rejected)] == [
        "Q", "\n\nYes.<|endoftext|>", "\nNo.<|endoftext|>"
    ]  # fmt: skip
    assert len(chosen) == 1 + len("Yes.") + 1


@pytest.mark.parametrize("template, answer, ends, completion", [
    (CHATML, "Yes.", "assistant\n", "Yes.<|im_end|>"),
    (CHATML, "\nYes.", "assistant", "\n\nYes.<|im_end|>"),
    (THINKING, "Yes.", "assistant\n", "Yes.<|im_end|>"),
])  # fmt: skip
def test_what_a_token_or_the_template_carries_across_the_seam_belongs_to_the_completion(
    template, answer, ends, completion
):
    tokenizer = qwen(template)
    row = {"prompt": USER, "completion": answer}
    prompt, tokens = encode_row(row, tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    assert tokenizer.decode(prompt).endswith(ends) and tokenizer.decode(tokens) == completion
    whole = tokenizer.apply_chat_template([*USER, {"role": "assistant", "content": answer}], return_dict=True)[
        "input_ids"
    ]
    assert prompt + tokens == whole[: len(prompt + tokens)]


@pytest.mark.parametrize("template, answer, words", [
    ("<|im_start|>{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "Yes.", "told apart"),
    (CHATML.replace("<|im_end|>\n{% endfor %}", "{% endfor %}"), "", "no completion"),
    ("{{ messages[0].content }}", "Yes.", "no token is left"),
    (CHATML + "{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}", "Y", "alternate"),
])  # fmt: skip
def test_rows_that_cannot_be_used_say_why(template, answer, words):
    with pytest.raises(RowFault, match=words):
        encode_row({"prompt": USER, "completion": answer}, qwen(template), [0])
