"""Preference data: pairs of the embedded tasks, files in every form that TRL reads, splits, and what is refused."""

import json

import pytest

from utils.errors import UserError
from utils.lm import TINY_MODEL, load_model
from utils.preferences import as_pair, encode_pair, encode_rows, load_preferences
from utils.tasks import load_task

pytestmark = pytest.mark.usefixtures("own_cache")
USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "21"), ("assistant", "12"), ("assistant", "21")))
CHAT = (
    "{% for m in messages %}{{ 'C' if m.role == 'user' else 'S' }}{{ m.content }}<eos>+{% endfor %}"
    "{% if add_generation_prompt %}S{% endif %}"
)


def file_of(tmp_path, rows: list[dict]) -> str:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def text_rows(n: int) -> list[dict]:
    return [dict(prompt=f"question {i}", chosen=f"good {i}", rejected=f"bad {i}") for i in range(n)]


@pytest.mark.parametrize("name", ["countdown", "sort"])
def test_embedded_pairs(name):
    """A right answer and the wrong one of the demonstrations; each demonstration is one of the two; held-out problems
    are those of the task, and never trained."""
    data, task = load_preferences(name, 300, 1), load_task(name)
    assert len(data.train) == 300 and len(data.heldout) > 150 and data.task.score is not None
    for row in data.train + data.heldout:
        assert task.score(row, row["chosen"])["reward"] == 1 and task.score(row, row["rejected"])["reward"] == 0
        assert row["completion"] in (row["chosen"], row["rejected"])
    shown = [row["completion"] == row["rejected"] for row in data.train]
    assert 0.6 < sum(shown) / len(shown) < 0.9
    key = lambda row: (sorted(row.get("digits", "")), sorted(row.get("numbers", [])), row.get("target"))  # noqa: E731
    held = [key(row) for row in task.heldout]
    assert all(key(row) in held for row in data.heldout) and not any(key(row) in held for row in data.train)


def test_embedded_pairs_depend_on_the_seed_alone():
    one, more, other = load_preferences("sort", 20, 1), load_preferences("sort", 40, 1), load_preferences("sort", 20, 2)
    assert one.train == more.train[:20] != other.train and one.heldout == other.heldout


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_of_text(kind, tmp_path):
    """All pairs arrive, as they are, in either split; a prompt is in one of the two only."""
    rows = text_rows(40) + text_rows(3)
    path = file_of(tmp_path, rows)
    if kind == "parquet":
        import datasets

        path = str(tmp_path / "pairs.parquet")
        datasets.Dataset.from_list(rows).to_parquet(path)
    data = load_preferences(path, 1, 1)
    assert data.name == "pairs" and data.task is None and data.heldout
    assert sorted(map(str, data.train + data.heldout)) == sorted(map(str, rows))
    assert {row["prompt"] for row in data.train}.isdisjoint(row["prompt"] for row in data.heldout)


def test_own_test_split(monkeypatch):
    """A dataset's test split is what is held out, and its prompts are not trained."""
    import datasets

    splits = {"train": datasets.Dataset.from_list(text_rows(9)), "test": datasets.Dataset.from_list(text_rows(2))}
    monkeypatch.setattr("utils.preferences.read_splits", lambda spec: splits)
    data = load_preferences("org/name", 1, 1)
    assert data.heldout == text_rows(2) and data.train == text_rows(9)[2:]


@pytest.mark.parametrize(
    "row, prompt, chosen, rejected",
    [
        (dict(prompt=[USER], chosen=[GOOD], rejected=[BAD]), [USER], [GOOD], [BAD]),
        (dict(chosen=[USER, GOOD], rejected=[USER, BAD]), [USER], [GOOD], [BAD]),
        (dict(prompt="21", chosen=[USER, GOOD], rejected=[USER, BAD]), [USER], [GOOD], [BAD]),
        (dict(chosen=[USER, GOOD], rejected=[USER, GOOD]), [USER], [GOOD], [GOOD]),
        (dict(chosen=[USER, BAD, USER, GOOD], rejected=[USER, BAD, USER, BAD]), [USER, BAD, USER], [GOOD], [BAD]),
        (dict(chosen="Q: sky? A: blue", rejected="Q: sky? A: black"), "Q: sky? A:", " blue", " black"),
        (dict(chosen="Q: sky? A: blue", rejected="Q: sky? A: blueish"), "Q: sky? A:", " blue", " blueish"),
        (dict(chosen="Q: a\nb", rejected="Q: a b"), "Q:", " a\nb", " a b"),
        (dict(prompt="", chosen="Q 1", rejected="Q 2") | dict(prompt=None), "Q", " 1", " 2"),
    ],
)
def test_forms(row, prompt, chosen, rejected):
    assert as_pair(row | {"score": 5}, "row") == dict(prompt=prompt, chosen=chosen, rejected=rejected, score=5)


@pytest.mark.parametrize(
    "row, words",
    [
        (dict(prompt="p", chosen="", rejected="r"), "row 0 chosen '' not empty"),
        (dict(prompt="p", chosen="c", rejected=None), "row 0 rejected None"),
        (dict(prompt="p", chosen=3, rejected=4), "chosen 3 text or a list"),
        (dict(prompt="p", chosen="c", rejected=[GOOD]), "one kind"),
        (dict(prompt="p", chosen=["c"], rejected=["r"]), "chosen ['c'] list of chat messages"),
        (dict(prompt=[USER], chosen="c", rejected="r"), "prompt text"),
        (dict(prompt="", chosen="c", rejected="r"), "the prompt '' text"),
        (dict(prompt=[], chosen=[GOOD], rejected=[BAD]), "the prompt [] list of chat messages"),
        (dict(chosen="c", rejected="r"), "no prompt column prompt"),
        (dict(chosen=[GOOD], rejected=[BAD]), "no prompt column prompt"),
    ],
)
def test_rows_that_are_no_pairs(row, words):
    with pytest.raises(UserError) as error:
        as_pair(row, "row 0 of f")
    assert not [word for word in words.split() if word not in str(error.value)], error.value
    assert str(error.value).count(". ") == 0


@pytest.mark.parametrize("spec, words", [("gsm8k", "unknown source countdown"), ("none.jsonl", "no file none.jsonl")])
def test_sources_that_are_none(spec, words):
    with pytest.raises(UserError) as error:
        load_preferences(spec, 1, 1)
    assert not [word for word in words.split() if word not in str(error.value)], error.value


@pytest.mark.parametrize("columns, words", [("prompt completion", "chosen rejected"), ("prompt chosen", "rejected")])
def test_missing_columns(columns, words, tmp_path):
    path = file_of(tmp_path, [dict.fromkeys(columns.split(), "x")] * 2)
    with pytest.raises(UserError) as error:
        load_preferences(path, 1, 1)
    assert not [word for word in (*words.split(), *columns.split()) if word not in str(error.value)], error.value


def test_a_bad_row_of_a_file_is_named(tmp_path):
    with pytest.raises(UserError, match="row 2 of .*pairs.jsonl"):
        load_preferences(file_of(tmp_path, [*text_rows(2), dict(prompt="p", chosen="", rejected="r")]), 1, 1)


def test_equal_completions_are_counted(tmp_path, capsys):
    rows = [row | {"rejected": row["chosen"]} if i % 2 else row for i, row in enumerate(text_rows(30))]
    data = load_preferences(file_of(tmp_path, rows), 1, 1)
    equal = sum(row["chosen"] == row["rejected"] for row in data.train)
    assert f"in {equal} of {len(data.train)} pairs chosen equals rejected" in capsys.readouterr().out


def test_tokens():
    """Prompt, completions each up to the first EOS; a chat prompt and what its template adds are no completion."""
    _, tokenizer = load_model(TINY_MODEL)
    eos = tokenizer.eos_token_id
    decoded = lambda row: tuple(map(tokenizer.decode, encode_pair(row, tokenizer, [eos])))  # noqa: E731
    assert decoded(dict(prompt="S21:", chosen="12", rejected="2")) == ("S21:", "12<eos>", "2<eos>")
    assert decoded(dict(prompt="S21:", chosen="1<eos>2", rejected="2")) == ("S21:", "1<eos>", "2<eos>")
    tokenizer.chat_template = CHAT
    expected = ("C21<eos>+S", "12<eos>", "21<eos>")
    assert decoded(dict(prompt="21", chosen="12", rejected="21")) == expected
    assert decoded(dict(prompt=[USER], chosen=[GOOD], rejected=[BAD])) == expected
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(UserError, match="template"):
        encode_pair(dict(prompt="21", chosen="12", rejected="21"), tokenizer, [eos])


def test_rows_are_cut_at_their_end():
    """Prompt and completion together hold max_length tokens. A row counts once as cut, and a wanted row comes once."""
    rows = [([1], [2, 3, 4], [5]), ([6, 7], [2, 3, 4], [5, 6, 7]), ([9] * 9, [1], [1]), ([1, 2, 3], [4], [5, 6])]
    encode = lambda row, tokenizer, eos: row  # noqa: E731
    tokens, cut = encode_rows(rows, [[3], [1, 0], [3]], encode, None, [], 4)
    assert tokens == {3: ([1, 2, 3], [4], [5]), 1: ([6, 7], [2, 3], [5, 6]), 0: rows[0]} and cut == 2


def test_prompts_that_leave_no_room_are_counted():
    rows = [([1] * length, [2], [3]) for length in (3, 4, 5, 9)]
    with pytest.raises(UserError, match="2 prompts have 4 tokens or more, up to 5: raise --max-length"):
        encode_rows(rows, [[0, 1], [2]], lambda row, tokenizer, eos: row, None, [], 4)
