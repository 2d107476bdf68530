"""How a row becomes tokens: the seam between prompt and completion, under the rules of real tokenizers."""

import csv
import itertools
import json
from types import SimpleNamespace

import pytest
from helpers import command_line, metrics, new_run, write_rows
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import utils.lm
from algos import dpo, grpo, sft
from algos.sft import from_messages, load_demonstrations
from utils import data
from utils.core import UserError
from utils.data import RowFault, encode_answers, encode_prompt, load_rows, load_task, most_tokens, usable
from utils.lm import TINY_MODEL, PolicyArgs, save_model, tell_ends, with_flags
from utils.rewards import encode_scored

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")  # as DeepSeek-R1's: history has none
USER = [{"role": "user", "content": "2+2?"}]
ANSWER = {"role": "assistant", "content": "4"}


def sentencepiece() -> PreTrainedTokenizerFast:
    """Llama-2's normalizer and decoder: a space is a mark, and every text begins with one."""
    vocabulary = ["<unk>", "<s>", "</s>", "\u2581", *"Captil?Pars"]
    vocabulary += ["\u2581Paris", "\u2581Pa", "\u2581Rome", "\u2581Capital"]
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


def encode_row(row, tokenizer, eos):
    return encode_answers(row, [row["completion"]], tokenizer, eos)


def encode_pair(row, tokenizer, eos):
    return encode_answers(row, [row["chosen"], row["rejected"]], tokenizer, eos)


def words(tokenizer, tokens: list[list[int]]) -> list[str]:
    return [" ".join(tokenizer.convert_ids_to_tokens(ids)) for ids in tokens]


def test_sentencepiece_puts_one_space_between_prompt_and_completion():
    tokenizer = sentencepiece()
    row = {"prompt": "Capital?", "completion": " Paris"}
    prompt, completion = encode_row(row, tokenizer, [tokenizer.eos_token_id])
    assert words(tokenizer, [prompt, completion]) == ["\u2581Capital ?", "\u2581Paris </s>"]
    assert prompt == encode_prompt(row, tokenizer) and tokenizer.decode(prompt + completion[:-1]) == "Capital? Paris"
    assert tokenizer.decode(encode_scored(row, " Paris", tokenizer), skip_special_tokens=True) == "Capital? Paris"
    assert encode_scored(row, "", tokenizer) == [*prompt, tokenizer.eos_token_id]  # a model may answer nothing
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
def test_what_is_carried_across_the_seam_belongs_to_the_completion(template, answer, ends, completion):
    """By a token or by the template."""
    tokenizer = qwen(template)
    row = {"prompt": USER, "completion": answer}
    prompt, tokens = encode_row(row, tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    assert tokenizer.decode(prompt).endswith(ends) and tokenizer.decode(tokens) == completion
    said = [*USER, {"role": "assistant", "content": answer}]
    whole = tokenizer.apply_chat_template(said, return_dict=True)["input_ids"]
    assert prompt + tokens == whole[: len(prompt + tokens)]


@pytest.mark.parametrize("template, answer, words", [
    ("<|im_start|>{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", "Yes.", "told apart"),
    (CHATML, "", "needs a completion"),
    (CHATML, None, "needs a completion"),
    (CHATML, [*USER, ANSWER], "needs a completion"),
    ("{{ messages[0].content }}", "Yes.", "leaves nothing"),
    (CHATML + "{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}", "Y", "alternate"),
])  # fmt: skip
def test_rows_that_cannot_be_used_say_why(template, answer, words):
    with pytest.raises(RowFault, match=words):
        encode_row({"prompt": USER, "completion": answer}, qwen(template), [0])


def test_unknown_words_are_words():
    """A prompt of nothing else has something in common with itself: <unk> is a special token, too."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    assert len(encode_row({"prompt": "hello", "completion": "12"}, tokenizer, [1])[0]) == len("hello")


# the policy's flags


def shown(tokenizer, model=None, **flags):
    """The tokenizer with the flags of a policy."""
    model = model or SimpleNamespace(generation_config=GenerationConfig())
    return with_flags(tokenizer, model, PolicyArgs(**flags))


def decoded(tokenizer, row) -> list[str]:
    return [tokenizer.decode(ids) for ids in encode_row({"completion": "4"} | row, tokenizer, [tokenizer.eos_token_id])]


def test_a_system_prompt_comes_where_there_is_none():
    tokenizer = shown(qwen(CHATML), system_prompt="Be brief.")
    ours = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert decoded(tokenizer, {"prompt": "2+2?"})[0] == decoded(tokenizer, {"prompt": USER})[0]
    assert decoded(tokenizer, {"prompt": USER})[0].startswith(ours + "<|im_start|>user\n2+2?")
    assert ours not in decoded(tokenizer, {"prompt": [{"role": "system", "content": "Be long."}, *USER]})[0]
    assert encode_scored({"prompt": USER}, "4", qwen(CHATML)) != encode_scored({"prompt": USER}, "4", tokenizer)
    with pytest.raises(UserError, match="--system-prompt needs a chat template"):
        shown(qwen(), system_prompt="Be brief.")


def test_settings_of_the_template_and_a_row_before_those_of_all():
    """Of columns, too, in which Arrow writes None where other rows have a name that this one lacks."""
    settings = "enable_thinking=false", "n=3"
    tokenizer = shown(qwen("{{ enable_thinking }} {{ n }} " + CHATML), chat_template_kwargs=settings)
    assert decoded(tokenizer, {"prompt": "2+2?"})[0].startswith("False 3 ")
    row = {"prompt": "2+2?", "chat_template_kwargs": {"n": 4, "enable_thinking": None}}
    assert decoded(tokenizer, row)[0].startswith("False 4 ")


def test_text_stays_text_and_messages_stay_messages():
    tokenizer = shown(qwen(CHATML), raw_prompt=True)
    assert decoded(tokenizer, {"prompt": "2+2?", "completion": " 4"}) == ["2+2?", " 4<|endoftext|>"]
    assert decoded(tokenizer, {"prompt": USER})[0].startswith("<|im_start|>user")


def test_tools_of_a_row_are_shown_to_the_template():
    """A list or JSON. The row's own template arguments come first."""
    tokenizer = qwen("{{ tools | tojson }} " + CHATML)
    tools = [{"name": "add", "parameters": {"x": {"type": "int"}, "y": None}}]
    expected = '[{"name": "add", "parameters": {"x": {"type": "int"}, "y": null}}] '
    for given in (tools, json.dumps(tools)):
        assert decoded(tokenizer, {"prompt": USER, "tools": given})[0].startswith(expected)
    own = {"prompt": USER, "tools": tools, "chat_template_kwargs": {"tools": [{"name": "own"}]}}
    assert decoded(tokenizer, own)[0].startswith('[{"name": "own"}] ')
    as_text = {"prompt": USER, "chat_template_kwargs": '{"tools": [{"name": "own"}]}'}
    assert decoded(tokenizer, as_text)[0].startswith('[{"name": "own"}] ')
    with pytest.raises(RowFault, match="rendered by the chat template"):
        encode_prompt({"prompt": USER, "tools": "add(x)"}, tokenizer)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize("write", [lambda x: x, json.dumps], ids=["object", "text"])
def test_messages_of_files(write, kind, tmp_path, own_cache):
    """Arguments of a call, also as OpenAI writes them, are objects and those of their row alone; content in parts is
    text; a CSV's messages are messages."""
    rows = []
    for arguments in ({"x": 1}, {"y": "two"}):
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": write(arguments)}}]}
        parts = [{"type": "text", "text": text} for text in ("Call ", f"{arguments}")]
        rows.append({"messages": [{"role": "user", "content": parts}, call], "note": json.dumps(arguments)})
    path = write_rows(tmp_path / "rows.jsonl", rows)
    if kind == "csv":
        rows = [row | {"messages": json.dumps(row["messages"])} for row in rows]
    if kind != "jsonl":
        path, table = tmp_path / f"rows.{kind}", own_cache.Dataset.from_list(rows)
        table.to_csv(path) if kind == "csv" else table.to_parquet(path)
    for row in (row for rows in load_rows(str(path), from_messages) for row in rows):
        arguments = row["completion"][0]["tool_calls"][0]["function"]["arguments"]
        assert arguments in ({"x": 1}, {"y": "two"}) and row["note"] == json.dumps(arguments)  # which stays text
        assert row["prompt"][0]["content"] == f"Call {arguments}" and row["completion"][0]["content"] is None


@pytest.mark.parametrize("messages", ["[{'role': 'user', 'content': 'Hi'}]", [
    *USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "x=1"}}]}
]])  # fmt: skip
def test_messages_that_are_no_json(messages, tmp_path, own_cache):
    with pytest.raises(UserError, match="no row can be used.* has messages or arguments of a call that are no JSON"):
        load_rows(write_rows(tmp_path / "rows.jsonl", [{"messages": messages}] * 3), from_messages)


ODD = ["1", "007", "true", '{"city": "Rome"}', '"quoted"', "2024-01-02", "1.10", "null", "NA"]
KEPT = [7, 2.5, "2024-01-02", "007", None, [1, "a", None], {"b": None}, '{"a": 1}', [{"role": "x", "arguments": "{}"}]]


def write_table(path, rows: list[dict]) -> str:
    """As JSON Lines, JSON, CSV or a folder of JSON Lines."""
    if path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            (table := csv.DictWriter(file, rows[0])).writeheader()
            table.writerows(row | {name: json.dumps(x) for name, x in row.items() if isinstance(x, list)}
                            for row in rows)  # fmt: skip
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        (path / "data").mkdir(parents=True) if path.suffix == "" else None
        write_rows(path if path.suffix else path / "data" / "train.jsonl", rows)
    return str(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "folder"])
@pytest.mark.parametrize("column", ["prompt", "ask"])
@pytest.mark.parametrize("form", ["text", "chat", "mixed"])
def test_texts_are_read_as_they_stand_there(name, column, form, tmp_path, own_cache):
    """Whatever they look like, and where one message has parts and the others have text."""

    def message(text: str, i: int) -> list[dict]:
        parts = [{"type": "text", "text": text[:1]}, {"type": "text", "text": text[1:]}]
        return [{"role": "user", "content": parts if form == "mixed" and i == 4 else text}]

    rows = [{column: text if form == "text" else message(text, i), "gold": i} for i, text in enumerate(ODD)]
    task = load_task(write_table(tmp_path / name, rows), column)
    found = {row["gold"]: row["prompt"] for row in [*task.rows, *task.heldout]}
    assert [x if form == "text" else x[0]["content"] for _, x in sorted(found.items())] == ODD


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "folder"])
def test_other_columns_reach_a_reward_as_they_stand_there(name, tmp_path, own_cache):
    rows = [{"prompt": f"{i}?", "number": i, "calls": x, "also": x} for i, x in enumerate(KEPT)] + [{"prompt": "none"}]
    task = load_task(write_table(tmp_path / name, rows))
    found = {row["prompt"]: row for row in [*task.rows, *task.heldout]}
    assert found.pop("none") == {"prompt": "none", "number": None, "calls": None, "also": None}
    for row in rows[:-1]:
        assert str(found[row["prompt"]]) == str(row)  # 1 is no True, 2 no 2.0


def test_numbers_of_a_csv(tmp_path, own_cache):
    """Where every cell is written as its number would be; an empty one is None. A prompt is text."""
    columns = {"whole": [1, 20, None], "real": [0.5, None, 3.0], "zeros": ["007", "7", None],
               "flag": [True, False, None], "version": ["1.1", "1.10", "2"],
               "date": ["2024-01-02", None, "x"]}  # fmt: skip
    rows = [{"prompt": f"{i}"} | {name: values[i] for name, values in columns.items()} for i in range(3)]
    task = load_task(write_table(tmp_path / "rows.csv", rows))
    assert sorted(map(str, [*task.rows, *task.heldout])) == sorted(map(str, rows))
    for text in ("prompt,a\n1,2,3\n", 'prompt,a\n1,"2\n'):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(UserError, match="cannot read the dataset .*bad.csv"):
            load_task(str(tmp_path / "bad.csv"))


@pytest.mark.parametrize(
    "content", [5, True, {"a": 1}, ["a"], None, [{"type": "image", "url": "x"}], [{"type": "text"}]], ids=str
)
def test_a_content_that_is_neither_text_nor_parts_is_dropped(content, tmp_path, own_cache, capsys):
    rows = [{"prompt": [{"role": "user", "content": x}]} for x in ("a", "b", "c", content)]
    task = load_task(write_rows(tmp_path / "rows.jsonl", rows))
    assert len(task.rows) + len(task.heldout) == 3 and "1 of 4 rows cannot be used" in capsys.readouterr().out


def test_calls_and_tools_that_are_text(tmp_path, own_cache):
    """All calls as one text, tools as a list of texts; null is what a call says."""
    call, tool = {"function": {"name": "f", "arguments": {"x": None}}}, {"name": "f", "parameters": {"y": None}}
    row = {"prompt": USER, "completion": [{"role": "assistant", "tool_calls": json.dumps([call])}],
           "tools": [json.dumps(tool)]}  # fmt: skip
    task = load_demonstrations(write_rows(tmp_path / "rows.jsonl", [row, row | {"prompt": [ANSWER, *USER]}]), "prompt")
    assert task.rows[0]["completion"] == [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert task.rows[0]["tools"] == [tool]


def with_eos(tokenizer):
    """It adds its EOS to every text."""
    end = tokenizer.eos_token
    special = [(end, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"$A {end}", special_tokens=special)
    return tokenizer


def test_an_eos_that_is_added_to_every_text_ends_no_prompt():
    plain, added = sentencepiece(), with_eos(sentencepiece())
    for prompt in ("Capital?", "Capital?</s>"):
        row = {"prompt": prompt, "completion": " Paris"}
        assert encode_prompt(row, added) == encode_prompt(row, plain)
        assert encode_row(row, added, [2]) == encode_row(row, plain, [2])
        assert encode_scored(row, " Paris", added) == encode_scored(row, " Paris", plain)


@pytest.mark.parametrize("make", [qwen, sentencepiece, lambda: with_eos(sentencepiece()), lambda: nfkc()])
@pytest.mark.parametrize(
    "text", ["", "Capital? Paris", "\ufdfa" * 9, "\u0958\U0001d15e", "</s><s>", " " * 9, "\U0001f600"]
)
def test_a_text_has_no_more_tokens_than_its_bound(make, text):
    tokenizer = make()
    assert len(tokenizer(text)["input_ids"]) <= most_tokens(text, tokenizer)


def nfkc() -> PreTrainedTokenizerFast:
    """A normalizer that makes 18 characters of one."""
    made = qwen()
    made.backend_tokenizer.normalizer = normalizers.NFKC()
    return made


TEXTS = ("4", "\nYes.", " is 4", "\uff1a" * 9, "</think>4", "<|im_end|>", "  ", "a" * 50)


@pytest.mark.parametrize("template", [CHATML, THINKING, None, "{{ messages[0].content }}"])
@pytest.mark.parametrize("most", [30, 200])
def test_texts_that_are_not_encoded_would_have_been_taken(template, most):
    """Where `fits` says so, no token is over the limit, and none of the prompt's depends on what the completion is."""
    tokenizer, sure = qwen(template), 0
    for prompt, chosen, rejected in itertools.product(TEXTS, repeat=3):
        row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        if data.fits(row, ("chosen", "rejected"), tokenizer, 100, most):
            begun, *ends = encode_answers(row, [chosen, rejected], tokenizer, [tokenizer.eos_token_id], most)
            assert len(begun) <= 100 and all(len(begun) + len(end) <= most + 1 for end in ends)
            assert begun == encode_prompt(row, tokenizer)[: len(begun)]
            sure += 1
    assert (sure > 100) == (template == CHATML and most == 200)


def test_what_an_encoder_goes_by_is_in_the_key():
    """But not what only a run goes by: the next start and a resumed one find what was found."""

    def key(**changed):
        args = dpo.Args(**changed)
        return data.source(lambda row: args.max_length)

    assert key() == key(resume="run", max_steps=9) != key(max_length=7)


def test_what_was_found_in_rows_is_found_again_until_something_changes(tmp_path, own_cache, monkeypatch):
    """A second start encodes nothing; another template, limit or row is looked at; so is all without a cache."""
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}?"} for i in range(30)])
    seen, encoded = [], data.rendered
    monkeypatch.setattr(data, "rendered", lambda *given: seen.append(1) or encoded(*given))
    model = SimpleNamespace(config=LlamaConfig(max_position_embeddings=200))

    def looked(template: str = CHATML, limit: int = 90) -> tuple[int, int]:
        seen.clear()
        args = SimpleNamespace(max_completion_length=100, max_prompt_length=limit)
        task = usable(load_task(path), model, qwen(template), args)
        return len(seen) - len(task.heldout), len(task.rows)

    assert [looked() for _ in range(2)] == [(29, 29), (0, 29)]
    assert looked(CHATML + " ") == looked(limit=80) == (29, 29)
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{i}!" + "x" * 60 * (i == 7)} for i in range(30)])
    assert looked(limit=95)[1] < 30
    monkeypatch.setattr(own_cache.config, "HF_DATASETS_CACHE", "/dev/null/cache")
    assert looked(limit=95)[1] < 30
    own_cache.enable_caching()


def test_equal_prompts_stay_on_one_side(tmp_path, own_cache):
    """Also where Arrow writes None for a name that other messages have."""
    train = [{"prompt": [{"role": "user", "content": f"{i}", "name": "x"}]} for i in range(9)]
    train += [{"prompt": [message | {"name": None} for message in USER]}]
    test = [{"prompt": [{"content": "2+2?", "role": "user"}]}]
    table = own_cache.DatasetDict(train=own_cache.Dataset.from_list(train), test=own_cache.Dataset.from_list(test))
    table.save_to_disk(tmp_path / "saved")
    task = load_task(str(tmp_path / "saved"))
    assert len(task.heldout) == 1 and len(task.rows) == 9


def test_reasoning_that_a_template_drops_is_not_lost_in_silence():
    """DeepSeek-R1's template shows of an assistant's message what is behind </think>."""
    row = {"prompt": USER, "completion": "<think>two and two</think>4"}
    assert decoded(qwen(CHATML), row)[1] == "<think>two and two</think>4<|im_end|>\n<|endoftext|>"
    drops = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    with pytest.raises(RowFault, match="drops the reasoning"):
        decoded(qwen(drops), row)
    assert decoded(shown(qwen(drops), raw_prompt=True), row | {"prompt": "2+2?"})[1].startswith("<think>two and two")


def test_rendered_text_keeps_one_bos():
    tokenizer = sentencepiece()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    for prompt in ("Capital?", "<s>Capital?"):
        tokens = encode_row({"prompt": prompt, "completion": " Paris"}, tokenizer, [tokenizer.eos_token_id])
        assert [ids.count(1) for ids in tokens] == [1, 0] and tokens[0][0] == 1


def test_another_eos_ends_what_is_trained_and_is_saved(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=1, eos_token_id=7))  # fmt: skip
    tokenizer = shown(qwen(CHATML), model, eos_token="<|im_end|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    eos = model.generation_config.eos_token_id
    assert eos == sorted([7, end])
    assert tokenizer.decode(encode_row({"prompt": "2+2?", "completion": "4"}, tokenizer, eos)[1]) == "4<|im_end|>"
    tokenizer.chat_template = None
    assert tokenizer.decode(encode_row({"prompt": "2+2?", "completion": "4"}, tokenizer, eos)[1]) == "4<|im_end|>"
    save_model(model, tokenizer, tmp_path, PolicyArgs())
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"
    assert sorted(GenerationConfig.from_pretrained(tmp_path).eos_token_id) == eos
    with pytest.raises(UserError, match="could never end by <end>: give --eos-token"):
        shown(qwen(CHATML), eos_token="<end>")


@pytest.mark.parametrize("template, eos, more, warned", [
    (CHATML, "", None, True), (CHATML, "<|im_end|>", None, False), (CHATML, "", "<|im_end|>", False),
    (None, "", None, False), ("{{ messages[0].content }}", "", None, False),
    ("{{ raise_exception('one message') }}", "", None, False),
])  # fmt: skip
def test_a_template_that_ends_turns_by_another_token_is_warned_of(template, eos, more, warned, capsys):
    """A model would learn both tokens, and stop at the second alone."""
    tokenizer = qwen(template)
    model = SimpleNamespace(generation_config=GenerationConfig())
    model.generation_config.eos_token_id = more and tokenizer.convert_tokens_to_ids(more)
    tell_ends(shown(tokenizer, model, eos_token=eos), model.generation_config.eos_token_id)
    assert ("--eos-token '<|im_end|>'" in capsys.readouterr().out) == warned


@pytest.mark.parametrize("completion", [" is 4", [{"role": "assistant", "content": " is 4"}]], ids=["text", "chat"])
def test_a_last_message_of_the_assistant_is_continued(completion):
    """One header, and nothing between what is there and what comes."""
    tokenizer = qwen(CHATML)
    tokenizer.eos_token = "<|im_end|>"
    row = {"prompt": [*USER, {"role": "assistant", "content": "That"}], "completion": completion}
    assert tokenizer.decode(encode_prompt(row, tokenizer)).endswith("<|im_start|>assistant\nThat")
    prompt, tokens = decoded(tokenizer, row)
    assert prompt.endswith("<|im_start|>assistant\nThat") and tokens == " is 4<|im_end|>"
    assert tokenizer.decode(encode_scored(row, completion, tokenizer)) == f"{prompt}{tokens}\n"


def test_conversations(tmp_path, own_cache, capsys):
    """The last assistant's message is the completion; rows without one are counted, the first is shown."""
    talk = lambda *roles: {"messages": [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]}  # noqa: E731
    rows = [talk("system", "user", "assistant", "user", "assistant", "user")]
    for i in range(9):
        rows.append({"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]})
    path = write_rows(tmp_path / "rows.jsonl", [*rows, talk("user"), talk("assistant", "user")])
    task = load_demonstrations(path, "prompt")
    made = {row["completion"][0]["content"]: row for row in [*task.rows, *task.heldout]}
    assert len(made) == 10
    assert [m["content"] for m in made["assistant 4"]["prompt"]] == ["system 0", "user 1", "assistant 2", "user 3"]
    assert made["3!"]["prompt"] == [{"role": "user", "content": "3?"}]
    out = capsys.readouterr().out
    assert "2 of 12 rows cannot be used and are dropped, the first because a row has no assistant's message" in out
    for messages in (None, [], "1"):
        with pytest.raises(RowFault, match="messages"):
            from_messages({"messages": messages})
    with pytest.raises(UserError, match="no row can be used, .* no assistant's message"):
        load_demonstrations(write_rows(tmp_path / "none.jsonl", [talk("user")] * 2), "prompt")
    path = write_rows(tmp_path / "both.jsonl", [{"prompt": f"{i}?", **rows[i]} for i in range(1, 9)])  # as in ultrachat
    for row in load_demonstrations(path, "prompt").rows:
        assert row["completion"][0]["content"] == row["prompt"][0]["content"].replace("?", "!")
    assert {type(row["prompt"]) for row in load_task(path).rows} == {str}


@pytest.mark.parametrize("prompt", [None, "", [], 3, ["text"], [{"content": "no role"}]], ids=str)
def test_a_prompt_that_is_none_is_dropped_and_shown(prompt, tmp_path, own_cache, capsys):
    """Text beside another type, which JSON has and Arrow has not, is refused by the library."""
    good = [{"role": "user", "content": "a"}] if isinstance(prompt, list) else "a"
    other = [{"role": "user", "content": "b"}] if isinstance(prompt, list) else "b"
    if prompt in (3, ["text"]):
        good, other = prompt, prompt
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": p} for p in (good, other, prompt)])
    if prompt in (3, ["text"]):
        with pytest.raises(UserError, match="no row can be used, the first because a row needs prompt as text"):
            load_task(path)
        return
    task = load_task(path)
    assert sorted(map(str, (row["prompt"] for row in [*task.rows, *task.heldout]))) == sorted(map(str, (good, other)))
    out = capsys.readouterr().out
    assert "1 of 3 rows cannot be used and are dropped, the first because a row needs prompt as text" in out


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
    seen, sample = [], utils.lm.sample
    path = dataset(tmp_path, [9] * 56 + [110, 120] + [9] * 2)

    def spy(model, ids, mask, *rest):
        seen.append(mask.sum(1).tolist())
        return sample(model, ids, mask, *rest)

    monkeypatch.setattr(utils.lm, "sample", spy)
    flags = online(tmp_path, "--task", path, "--max-completion-length", 20, "--output-dir", tmp_path / "runs")
    folder = new_run(grpo, tmp_path / "runs", *flags, "--max-steps", 4)
    assert "has a prompt of 110 tokens, and 108 are allowed" in capsys.readouterr().out
    assert {length for lengths in seen for length in lengths} == {9} and sum(map(len, seen)) >= 58
    half = new_run(grpo, tmp_path / "half", *flags, "--max-steps", 2)
    command_line(grpo, "--resume", half, "--max-steps", 4)
    rewards = [[row["reward"] for row in metrics(run)[1:]] for run in (half, folder)]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 4


def test_rows_without_a_completion_are_dropped_and_counted(tmp_path, own_cache, capsys):
    """In sft.py before the first step."""
    rows = [{"prompt": f"S{i}:", "completion": "1" if i % 20 else None} for i in range(60)]
    flags = ["--device", "cpu", "--model", TINY_MODEL, "--batch-size", 30, "--max-steps", 2]
    new_run(sft, tmp_path / "runs", *flags, "--task", write_rows(tmp_path / "rows.jsonl", rows))
    out = capsys.readouterr().out
    assert "3 of 60 rows cannot be used and are dropped, the first because a row needs completion" in out
