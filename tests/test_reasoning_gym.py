"""Tasks of the package reasoning-gym: rows, held-out questions, and what counts as the answer of a text."""

import pytest

from utils.core import UserError
from utils.data import load_task

pytest.importorskip("reasoning_gym", reason="not run: reasoning-gym is not installed")
from algos.environments.reasoning_gym import stated  # noqa: E402

SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=2"


@pytest.mark.parametrize("spec", [SUMS, "reasoning_gym:syllogism", "reasoning_gym:spell_backward?max_word_len=4"])
def test_rows_and_rewards(spec):
    """Row 7 is row 7, seeds differ, no question that is held out is trained on, and the right answer alone gets 1."""
    task, other = load_task(spec), load_task(spec)
    rows = [task.train(i, 1) for i in range(300)]
    assert [other.train(i, 1)["prompt"] for i in (299, 7)] == [rows[i]["prompt"] for i in (299, 7)]
    assert [task.train(i, 2)["prompt"] for i in range(20)] != [row["prompt"] for row in rows[:20]]
    asked, heldout = ({row["prompt"] for row in some} for some in (rows, task.heldout))
    assert task.heldout == other.heldout and not asked & heldout
    assert len(heldout) == len(task.heldout) == 128 and len(asked) > 200
    for row in rows[:20]:
        assert task.score(row, row["completion"]) == task.score(row, f"So <answer>{row['answer']}</answer>.") == 1
        assert task.score(row, "<answer>?</answer>") < 0.1


def test_settings_reach_the_task():
    prompts = [load_task(SUMS).train(i, 1)["prompt"] for i in range(50)]
    assert all(prompt.count(" + ") + prompt.count(" - ") == 1 for prompt in prompts)
    assert max(len(word) for prompt in prompts for word in prompt.split() if word.isdigit()) == 2


@pytest.mark.parametrize("text, right, answer", [
    ("3 + 4 = 7.", "7", "7"), ("7, not 8", "15", "8"), ("It is \u22123.", "-3", "-3"), ("1,024!", "1024", "1024"),
    ("2/3 or 0.5", "0.5", "0.5"), ("none", "7", ""), ("7 <answer>8</answer> 9", "7", "8"), ("8</answer> 9", "7", "8"),
    ('"Pod."', "pod", "Pod"), ("No, 5 do not.", "No", "No, 5 do not"),
])  # fmt: skip
def test_what_a_text_states(text, right, answer):
    assert stated(text, right) == answer


@pytest.mark.parametrize("spec, words, rest", [
    ("none", "cannot make --task reasoning_gym:none", 1), ("acre", "list index", 1),
    ("chain_sum?digits=2", "cannot make --task .*digits", 1),
    ("chain_sum?min_terms=0", "cannot make .*min_terms", 1), ("syllogism", "so few", 1), ("syllogism", "so few", 0),
])  # fmt: skip
def test_what_there_is_not(spec, words, rest, monkeypatch):
    """rest: of each question's hash, by which none or all are held out."""
    monkeypatch.setattr("zlib.crc32", lambda _: rest)
    with pytest.raises(UserError, match=words):
        load_task(f"reasoning_gym:{spec}")
