"""How a row becomes tokens: the seam between prompt and completion, under the rules of real tokenizers."""

import re

import pytest
from helpers import checkpoints, command_line, metrics, new_run, runs_in, user_error, write_rows
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from algos import dpo, grpo, kto, sft
from utils.models import TINY_MODEL
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


# which rows a run can use


def dataset(tmp_path, lengths: list[int], **columns) -> str:
    """Rows whose prompts have that many characters, which are the tiny model's tokens."""
    rows = [{"prompt": f"S{i:0{length - 2}}:", "completion": "1", **columns} for i, length in enumerate(lengths)]
    return write_rows(tmp_path / "rows.jsonl", rows)


ONLINE = ["--device", "cpu", "--num-prompts", 15, "--num-generations", 2,
          "--micro-batch-size", 2, "--eval-every", 0, "--eval-prompts", 8, "--eval-samples", 1]  # fmt: skip


def online(tmp_path, *more) -> list[str]:
    path = tmp_path / "length.py"
    path.write_text("def length(completions, **_): return [float(len(text)) for text in completions]")
    return [*ONLINE, "--reward", f"{path}:length", *more]


def test_long_prompts_are_left_out_before_the_first_step(tmp_path, own_cache, capsys, monkeypatch):
    """Training and held-out ones, and all others come; a resumed run sees the same rows."""
    seen, sample = [], grpo.sample
    path = dataset(tmp_path, [9] * 56 + [110, 120] + [9] * 2)

    def spy(model, ids, mask, *rest):
        seen.append(mask.sum(1).tolist())
        return sample(model, ids, mask, *rest)

    monkeypatch.setattr(grpo, "sample", spy)
    monkeypatch.setattr("utils.evaluation.sample", spy)
    flags = online(tmp_path, "--task", path, "--max-completion-length", 20, "--output-dir", tmp_path / "runs")
    folder = new_run(grpo, tmp_path / "runs", *flags, "--max-steps", 4)
    assert re.search(r"2 of 60 prompts have more than 108 tokens \(the first: row 5[67] of", capsys.readouterr().out)
    assert {length for lengths in seen for length in lengths} == {9} and sum(map(len, seen)) >= 58
    half = new_run(grpo, tmp_path / "half", *flags, "--max-steps", 2)
    command_line(grpo, "--resume", half, "--max-steps", 4)
    rewards = [[row["reward"] for row in metrics(run)[1:]] for run in (half, folder)]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 4


@pytest.mark.parametrize("long, more, words", [
    (2, [], None),
    (4, [], "4 of 60 prompts have more than 108 tokens row --max-completion-length --max-prompt-length 108"),
    (4, ["--max-prompt-length", 108], None),
    (60, ["--max-prompt-length", 108], "no row is left"),
])  # fmt: skip
def test_many_long_prompts_stop_the_run_unless_asked_to_go_on(long, more, words, tmp_path, own_cache, capsys):
    path = dataset(tmp_path, [9] * (60 - long) + [110 + 7 * i for i in range(long)])
    flags = online(tmp_path, "--task", path, "--max-completion-length", 20, "--max-steps", 1, *more)
    if words is None:
        return new_run(grpo, tmp_path / "runs", *flags)
    with user_error(capsys, *words.split()):
        command_line(grpo, *flags, "--output-dir", tmp_path / "runs")
    assert runs_in(tmp_path / "runs") == []


def test_an_endless_task_drops_nothing(tmp_path, capsys):
    with user_error(capsys, "prompts of sort", "5 are allowed"):
        command_line(grpo, "--task", "sort", "--max-prompt-length", 5, "--output-dir", tmp_path)


def test_rows_that_cannot_be_used_are_dropped_and_counted(tmp_path, own_cache, capsys):
    """In sft.py before the first step; only where none is left does the run end."""
    rows = [{"prompt": f"S{i}:", "completion": "1" if i % 20 else None} for i in range(60)]
    flags = ["--device", "cpu", "--model", TINY_MODEL, "--batch-size", 30, "--max-steps", 2]
    new_run(sft, tmp_path / "runs", *flags, "--task", write_rows(tmp_path / "rows.jsonl", rows))
    out = capsys.readouterr().out
    assert re.search(
        r"\d of 5\d rows cannot be used and are dropped, the first because row \d+ of .* no completion", out
    )
    rows = [row | {"completion": None} for row in rows]
    with user_error(capsys, "no row is left", "row ", "column completion"):
        command_line(
            sft, *flags, "--task", write_rows(tmp_path / "none.jsonl", rows), "--output-dir", tmp_path / "none"
        )
    assert runs_in(tmp_path / "none") == []


def test_a_fault_that_comes_later_loses_no_step(tmp_path, own_cache, monkeypatch):
    """sft.py saves what it has done."""
    calls, encode = [], sft.encode_row

    def fails(*args):
        calls.append(1)
        return encode(*args) if len(calls) < 80 else 1 / 0

    monkeypatch.setattr(sft, "encode_row", fails)
    flags = ["--device", "cpu", "--model", TINY_MODEL, "--batch-size", 4, "--max-steps", 20, "--save-every", 100]
    with pytest.raises(ZeroDivisionError):
        command_line(sft, *flags, "--task", dataset(tmp_path, [9] * 60), "--output-dir", tmp_path / "runs")
    (folder,) = runs_in(tmp_path / "runs")
    assert checkpoints(folder) == [len(metrics(folder))] and checkpoints(folder)[0] > 2


@pytest.mark.parametrize("script", [dpo, kto], ids=["dpo", "kto"])
def test_preferences_whose_prompts_leave_no_room_are_dropped(script, tmp_path, own_cache, capsys):
    path = dataset(tmp_path, [9] * 59 + [20], chosen="12", rejected="21")
    flags = ["--device", "cpu", "--task", path, "--batch-size", 4, "--max-steps", 2, "--max-length", 20]
    new_run(script, tmp_path / "runs", *flags)
    assert "have more than 19 tokens (the first: row 59 of" in capsys.readouterr().out
    with user_error(capsys, "prompts have more than 8 tokens", "--max-length"):
        command_line(script, *flags, "--max-length", 9, "--output-dir", tmp_path / "none")
