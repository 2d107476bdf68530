"""Preference data: pairs of the embedded tasks, files in every form that TRL reads, splits, and what is refused."""

import re

import pytest
from helpers import new_run, write_rows

from algos import dpo, orpo, simpo
from algos.kto import labelled, load_unpaired
from utils.core import UserError
from utils.data import RowFault, as_pair, encode_answers, load_pairs, load_task
from utils.lm import PolicyArgs, load_model

pytestmark = pytest.mark.usefixtures("own_cache")
USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "21"), ("assistant", "12"), ("assistant", "21")))
SYSTEM, NAMED = {"role": "system", "content": "Sort."}, USER | {"name": "x"}
CHAT = (
    "{% for m in messages %}{{ 'C' if m.role == 'user' else 'S' }}{{ m.content }}<eos>+{% endfor %}"
    "{% if add_generation_prompt %}S{% endif %}"
)


def pairs(n: int) -> list[dict]:
    return [dict(prompt=f"question {i}", chosen=f"good {i}", rejected=f"bad {i}") for i in range(n)]


def examples(n: int) -> list[dict]:
    return [dict(prompt=f"question {i // 2}", completion=f"answer {i}", label=i % 3 == 0) for i in range(n)]


both = pytest.mark.parametrize("load, rows", [(load_pairs, pairs), (load_unpaired, examples)])


@pytest.mark.parametrize("name", ["countdown", "sort"])
def test_embedded_pairs(name):
    """A right answer and the wrong one of the demonstrations; each demonstration is one of the two; held-out problems
    are those of the task, and never trained."""
    data, task = load_pairs(name, 300, 1), load_task(name)
    assert len(data.train) == 300 and len(data.heldout) > 150 and data.task.score is not None
    for row in data.train + data.heldout:
        assert task.score(row, row["chosen"]) == 1 and task.score(row, row["rejected"]) == 0
        assert row["completion"] in (row["chosen"], row["rejected"])
    shown = [row["completion"] == row["rejected"] for row in data.train]
    assert 0.6 < sum(shown) / len(shown) < 0.9
    key = lambda row: (sorted(row.get("digits", "")), sorted(row.get("numbers", [])), row.get("target"))  # noqa: E731
    held = [key(row) for row in task.heldout]
    assert all(key(row) in held for row in data.heldout) and not any(key(row) in held for row in data.train)


def test_embedded_pairs_depend_on_the_seed_alone():
    one, more, other = load_pairs("sort", 20, 1), load_pairs("sort", 40, 1), load_pairs("sort", 20, 2)
    assert [*one.train] == [*more.train[:20]] != [*other.train] and [*one.heldout] == [*other.heldout]


@both
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files(load, rows, kind, tmp_path, own_cache):
    """All rows arrive, as they are, in either split. A prompt is in one of the two only."""
    made, path = rows(40) + rows(4), tmp_path / f"rows.{kind}"
    write_rows(path, made) if kind == "jsonl" else own_cache.Dataset.from_list(made).to_parquet(path)
    data = load(str(path), 1, 1)
    assert data.name == "rows" and data.task is None and data.heldout
    assert sorted(map(str, [*data.train, *data.heldout])) == sorted(map(str, made))
    assert {row["prompt"] for row in data.train}.isdisjoint(row["prompt"] for row in data.heldout)


@both
def test_own_test_split(load, rows, monkeypatch, own_cache):
    splits = {name: own_cache.Dataset.from_list(rows(n)) for name, n in (("train", 19), ("test", 2))}
    monkeypatch.setattr("utils.data.read_splits", lambda spec: splits)
    data = load("org/name", 1, 1)
    assert [*data.heldout] == rows(2) and [*data.train] == rows(19)[2:]


@pytest.mark.parametrize("row, prompt, chosen, rejected", [
    (dict(prompt=[USER], chosen=[GOOD], rejected=[BAD]), [USER], [GOOD], [BAD]),
    (dict(chosen=[USER, GOOD], rejected=[USER, BAD]), [USER], [GOOD], [BAD]),
    (dict(prompt="21", chosen=[USER, GOOD], rejected=[USER, BAD]), [USER], [GOOD], [BAD]),
    (dict(chosen=[USER, GOOD], rejected=[USER, GOOD]), [USER], [GOOD], [GOOD]),
    (dict(chosen=[USER, BAD, USER, GOOD], rejected=[USER, BAD, USER, BAD]), [USER, BAD, USER], [GOOD], [BAD]),
    (dict(prompt=[USER], chosen=[BAD, USER, GOOD], rejected=[BAD, USER, BAD]), [USER, BAD, USER], [GOOD], [BAD]),
    (dict(prompt=[USER], chosen=[USER, GOOD], rejected=[USER, BAD]), [USER], [GOOD], [BAD]),
    (dict(prompt="21", chosen=[GOOD], rejected=[BAD]), [USER], [GOOD], [BAD]),
    (dict(prompt=[USER], chosen=[SYSTEM, USER, GOOD], rejected=[SYSTEM, USER, BAD]), [SYSTEM, USER], [GOOD], [BAD]),
    (dict(prompt=[SYSTEM, USER], chosen=[USER, GOOD], rejected=[USER, BAD]), [SYSTEM, USER], [GOOD], [BAD]),
    (dict(prompt=[NAMED], chosen=[USER, GOOD], rejected=[USER, BAD]), [NAMED], [GOOD], [BAD]),
    (dict(chosen=[USER | {"score": 1}, GOOD], rejected=[USER, BAD]), [USER | {"score": 1}], [GOOD], [BAD]),
    (dict(chosen="Q: sky? A: blue", rejected="Q: sky? A: black"), "Q: sky? A:", " blue", " black"),
    (dict(chosen="Q: sky? A: blue", rejected="Q: sky? A: blueish"), "Q: sky? A:", " blue", " blueish"),
    (dict(chosen="Q: a\nb", rejected="Q: a b"), "Q:", " a\nb", " a b"),
    (dict(prompt="", chosen="Q 1", rejected="Q 2") | dict(prompt=None), "Q", " 1", " 2"),
])  # fmt: skip
def test_forms(row, prompt, chosen, rejected):
    assert as_pair(row | {"score": 5}) == dict(prompt=prompt, chosen=chosen, rejected=rejected, score=5)


BOTH = "needs chosen and rejected as text chat messages not empty"
NO_PAIRS = [
    (dict(prompt=[BAD | {"role": "user"}, GOOD], chosen=[SYSTEM, GOOD], rejected=[SYSTEM, BAD]), "do not go on"),
    (dict(prompt="21", chosen=[SYSTEM, GOOD], rejected=[SYSTEM, BAD]), "do not go on"),
    *((dict(prompt="p", chosen=chosen, rejected=rejected), BOTH)
      for chosen, rejected in (("", "r"), ("c", None), (3, 4), ("c", [GOOD]), (["c"], ["r"]))),
    (dict(prompt=[USER], chosen="c", rejected="r"), "needs prompt text"),
    *((prompt | dict(chosen=[GOOD], rejected=[BAD]), "needs prompt not empty")
      for prompt in (dict(prompt=[]), dict(prompt=""), {})),
    *((prompt | dict(chosen="c", rejected="r"), "needs prompt not empty") for prompt in (dict(prompt=""), {})),
]  # fmt: skip
EITHER = "needs prompt and completion as text chat messages not empty"
NO_EXAMPLES = [
    (dict(prompt="p", completion="c", label="good"), "the label 'good' true false 1 0"),
    *((dict(prompt="p", completion="c", label=label), f"label {label}") for label in (None, 2, -1, 0.5, [True])),
    *((dict(prompt=prompt, completion=completion, label=True), EITHER)
      for prompt, completion in (("p", ""), ("p", None), ("", "c"), ([USER], "c"), ("p", [GOOD]))),
]  # fmt: skip


def assert_refused(words: list[str], function, *args) -> None:
    """One sentence that holds all words."""
    with pytest.raises(UserError) as error:
        function(*args)
    assert not [word for word in words if word not in str(error.value)], error.value
    assert str(error.value).count(". ") == 0


WRONG = [(as_pair, *case) for case in NO_PAIRS] + [(labelled, *case) for case in NO_EXAMPLES]


@pytest.mark.parametrize("read, row, words", WRONG)
def test_wrong_rows(read, row, words):
    assert_refused(words.split(), read, row)


@pytest.mark.parametrize("load, columns, words", [
    (load_pairs, "prompt completion", "column chosen"),
    (load_pairs, "prompt chosen", "rejected"),
    (load_unpaired, "prompt completion", "label"),
    (load_unpaired, "label", "column prompt"),
    (load_unpaired, "prompt chosen", "column rejected"),
])  # fmt: skip
def test_missing_columns(load, columns, words, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [dict.fromkeys(columns.split(), "x")] * 2)
    assert_refused([*words.split(), *columns.split()], load, path, 1, 1)


@pytest.mark.parametrize("load, rows, bad", [
    (load_pairs, pairs(6), dict(prompt="p", chosen="", rejected="r")),
    (load_unpaired, examples(6), dict(prompt="p", completion="c", label=7)),
])  # fmt: skip
def test_a_bad_row_of_a_file_is_dropped_and_named(load, rows, bad, tmp_path, capsys):
    """Only where none is left, the run ends."""
    data = load(write_rows(tmp_path / "rows.jsonl", [*rows, bad]), 1, 1)
    assert len(data.train) + len(data.heldout) == len(rows)
    assert re.search(f"1 of 7 rows .* dropped, the first because .*{re.escape(str(bad)[:20])}", capsys.readouterr().out)
    assert_refused(["no row can be used", str(bad)[:20]], load, write_rows(tmp_path / "bad.jsonl", [bad] * 3), 1, 1)


def test_tokens():
    """Prompt, completions each up to the first EOS; a chat prompt and what its template adds are no completion."""
    _, tokenizer = load_model(PolicyArgs())
    eos = tokenizer.eos_token_id
    encode = lambda row: encode_answers(row, [row["chosen"], row["rejected"]], tokenizer, [eos])  # noqa: E731
    decoded = lambda row: tuple(map(tokenizer.decode, encode(row)))  # noqa: E731
    assert decoded(dict(prompt="S21:", chosen="12", rejected="2")) == ("S21:", "12<eos>", "2<eos>")
    assert decoded(dict(prompt="S21:", chosen="1<eos>2", rejected="2")) == ("S21:", "1<eos>", "2<eos>")
    tokenizer.chat_template = CHAT
    expected = ("C21<eos>+S", "12<eos>", "21<eos>")
    assert decoded(dict(prompt="21", chosen="12", rejected="21")) == expected
    assert decoded(dict(prompt=[USER], chosen=[GOOD], rejected=[BAD])) == expected
    for answer in ([GOOD, USER, GOOD], [USER], [GOOD | {"content": ""}]):  # EOS ends the first message
        with pytest.raises(RowFault, match="completion"):
            encode(dict(prompt=[USER], chosen=answer, rejected=[BAD]))
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="told apart"):
        encode(dict(prompt="21", chosen="12", rejected="21"))


@pytest.mark.parametrize("column", ["question", "ask"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_column_of_another_name(column, chat, tmp_path):
    """Without the flag it is named, and no beginning of two answers is taken for a prompt."""
    answers = dict(chosen=[GOOD], rejected=[BAD]) if chat else dict(chosen="The sum is 4", rejected="The sum is 5")
    rows = [{column: f"What is {i} + 1?", "source": "web", "system": "", **answers} for i in range(20)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert_refused(["no column 'prompt'", column, "--prompt-column"], load_pairs, path, 1, 1)
    for load in (load_pairs, load_unpaired):
        data = load(path, 1, 1, column)
        found = [row["prompt"][0]["content"] if chat else row["prompt"] for row in [*data.train, *data.heldout]]
        assert {*found} == {row[column] for row in rows}
    assert_refused(["no column 'other'", column], load_pairs, path, 1, 1, "other")


def test_texts_that_begin_alike_need_no_prompt_column(tmp_path):
    """As in hh-rlhf, with labels and words of the prompt beside them."""
    rows = [{"chosen": f"Human: {i} or two?\n\nAssistant: Yes.", "rejected": f"Human: {i} or two?\n\nAssistant: No.",
             "source": "base", "topic": "or two?"} for i in range(20)]  # fmt: skip
    data = load_pairs(write_rows(tmp_path / "rows.jsonl", rows), 1, 1)
    assert len(data.train) == 19 and data.train[0]["prompt"].endswith("\n\nAssistant:")


def test_answers_that_are_equal_after_the_cut_are_no_pair(tmp_path, capsys):
    """In every script of pairs; the prompt counts."""
    _, tokenizer = load_model(PolicyArgs())
    encode = lambda most, **row: encode_answers(  # noqa: E731
        row, [row["chosen"], row["rejected"]], tokenizer, [tokenizer.eos_token_id], most
    )
    row = dict(prompt="S21:", chosen="1234", rejected="1235")
    assert len(encode(8, **row)) == len(encode(None, **row)) == 3
    for most, more in ((7, {}), (None, {"rejected": "1234"}), (64, {"rejected": "1234<eos>5"})):
        with pytest.raises(RowFault, match="equal"):
            encode(most, **row | more)
    rows = [row | {"prompt": f"S{i}:", "rejected": "1235" if i % 2 else "2345"} for i in range(10, 40)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    for script in (dpo, simpo, orpo):
        flags = ["--task", path, "--max-length", 7, "--max-steps", 1, "--batch-size", 2, "--device", "cpu"]
        new_run(script, tmp_path / script.NAME, *flags)
        out = capsys.readouterr().out
        assert "rows cannot be used and are dropped, the first because a row has answers that are equal" in out
