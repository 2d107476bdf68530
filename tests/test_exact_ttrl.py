"""TTRL: votes by hand, and what vote and update make together by enumeration. All else is grpo.py's."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from groups import TABLE, P, close, make_batch, stepping
from tabular import COMPLETIONS, gradients, probability
from tiny_runs import result_of, same

from algos import grpo, ttrl
from tests.specs import SPECS
from utils.core import UserError
from utils.data import Task, load_task

ANSWERS = {(1,): "a", (0, 1): "b", (2, 1): "b", (0, 0): "a", (0, 2): "c", (2, 0): None, (2, 2): None}  # of texts


def test_rewards_and_metrics_by_hand():
    """Three prompts of four votes, of which two are trained. The label of the first comes from votes that are not; the
    second has a tie; nobody votes for the third, so nobody is right there."""
    answers = ["a", "b", "b", "b", *["c", "d", "d", "c"], *[None] * 4]
    truth = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, *[0.0] * 4])
    rewards, columns = ttrl.judged(answers, truth, 4, 2)
    close(rewards, [0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    assert columns == pytest.approx({"label_accuracy": 2 / 3, "majority_share": 5 / 12, "reward/true": 5 / 12})


def test_unknown_truth_is_left_out():
    nan = math.nan
    rewards, columns = ttrl.judged(["a", "a", "b", "b"], torch.tensor([1.0, nan, nan, nan]), 2, 2)
    close(rewards, 1.0)
    close([columns["label_accuracy"], columns["reward/true"]], 1.0)


def test_the_first_completions_are_trained():
    """With their own tokens, masks and log-probabilities."""
    samples = make_batch([COMPLETIONS] * P, [[0.0] * len(COMPLETIONS)] * P).samples
    kept = ttrl.first_votes(samples, len(COMPLETIONS), 3)
    expected = make_batch([COMPLETIONS[:3]] * P, [[0.0] * 3] * P).samples
    width = expected.completion_ids.shape[1]
    for name, ours, theirs in zip(samples._fields, kept, expected):
        assert torch.equal(ours[:, :width] if ours.dim() == 2 else ours, theirs), name
        assert ours.dim() == 1 or "completion" not in name or not ours[:, width:].any()


def moved(votes: list[tuple], size: int) -> np.ndarray:
    """What the votes for every prompt (P tuples of completions) add to the table: judged, then one plain step."""
    answers = [ANSWERS[c] for group in votes for c in group]
    rewards, _ = ttrl.judged(answers, torch.zeros(len(answers)), len(votes[0]), size)
    batch = make_batch(votes, [[0.0] * len(votes[0])] * P)
    batch = grpo.Batch(ttrl.first_votes(batch.samples, len(votes[0]), size), rewards.double(), None)
    return stepping(ttrl)(batch, scale_rewards="none", aggregation="constant")[0]


def weight(votes: list[tuple]) -> np.ndarray:
    """The probability of each prompt's votes, for its part of the table."""
    return np.array([math.prod(probability(TABLE, p, c) for c in group) for p, group in enumerate(votes)])[
        :, None, None
    ]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("votes, size", [(2, 2), (3, 2)])
def test_the_expected_update_by_enumeration(votes, size):
    """Over all votes in their order, ties and silence among them; labels found by sorting."""
    total, expected, ties = np.zeros_like(TABLE), np.zeros_like(TABLE), 0
    for group in product(COMPLETIONS, repeat=votes):
        both = [group, group[::-1]]
        total += weight(both) * moved(both, size)
        for p, one in enumerate(both):
            said = [ANSWERS[c] for c in one]
            cast = sorted((-said.count(a), said.index(a)) for a in set(said) - {None})
            ties += len(cast) > 1 and cast[0][0] == cast[1][0]
            rewards = [float(bool(cast) and said[i] == said[cast[0][1]]) for i in range(size)]
            chance = math.prod(probability(TABLE, p, c) for c in one)
            for c, reward in zip(one, rewards):
                expected += chance * (reward - np.mean(rewards)) * gradients(TABLE, p, c).sum(0) / (P * size * 5)
    assert ties and abs(expected).max() > 1e-3
    close(total, expected)


def labelled(script: str, monkeypatch, answer, score, **settings):
    """A run on a task whose answers and scores are these functions of the text."""
    module = {"ttrl": ttrl, "grpo": grpo}[script]
    task = load_task("sort")._replace(score=lambda row, text: score(text))
    monkeypatch.setattr(module, "load_task", lambda *_: task)
    if script == "ttrl":
        monkeypatch.setattr(module, "final_answer", lambda task, text: answer(text))
    settings = SPECS["grpo"].flags | dict(reward=(), eval_every=1) | settings
    return result_of.__wrapped__(script, tuple(sorted(settings.items())))  # a known run was on another task


def odd(text: str) -> float:
    return float(sum(map(ord, text)) % 2)


def test_labels_that_are_the_truth_give_grpo_bit_for_bit(monkeypatch):
    """Where only what is right is an answer, the majority is right, and silent where none is."""
    ours = labelled("ttrl", monkeypatch, lambda text: "right" if odd(text) else None, odd)
    theirs = labelled("grpo", monkeypatch, None, odd)
    own = {"label_accuracy", "majority_share", "reward/true"}
    assert all(row["reward"] == row["reward/true"] for row in ours.rows[1:])
    rows = [{name: value for name, value in row.items() if name not in own} for row in ours.rows]
    assert same(ours._replace(rows=rows), theirs) and any(0 < row["reward"] < 1 for row in rows[1:])


def test_nothing_is_trained_on_the_truth(monkeypatch):
    """Another truth gives the same weights, and other metrics."""
    ours = labelled("ttrl", monkeypatch, odd, odd, num_votes=6)
    other = labelled("ttrl", monkeypatch, odd, lambda text: 1 - odd(text), num_votes=6)
    assert same(ours._replace(rows=[]), other._replace(rows=[]))
    for row, there in zip(ours.rows[1:], other.rows[1:], strict=True):
        assert row["reward"] == there["reward"] and row["majority_share"] == there["majority_share"] > 0.4
        assert row["reward/true"] == pytest.approx(1 - there["reward/true"])
        assert row["label_accuracy"] == pytest.approx(1 - there["label_accuracy"])


def test_a_cut_off_completion_may_be_the_label_and_pays(monkeypatch):
    """--missing-eos-penalty comes after the vote."""
    free, paid = (labelled("ttrl", monkeypatch, odd, odd, missing_eos_penalty=penalty) for penalty in (0.0, 0.5))
    row, there = free.rows[1], paid.rows[1]
    assert row["truncated"] > 0 and there["reward"] == pytest.approx(row["reward"] - 0.5 * row["truncated"])
    assert there["majority_share"] == row["majority_share"]


def test_more_are_trained_than_vote(tmp_path):
    args = dict(task="sort", num_generations=8, max_steps=0, eval_prompts=1, output_dir=str(tmp_path), device="cpu")
    with pytest.raises(UserError, match="--num-votes 4 must be at least --num-generations 8"):
        ttrl.train(ttrl.Args(**args, num_votes=4))
    for votes in (8, None):
        ttrl.train(ttrl.Args(**args, num_votes=votes))


FILE = Task("file", None, [], rows=[])


@pytest.mark.parametrize("task, text, answer", [
    (load_task("sort"), "0123", "0123"),
    (load_task("countdown"), " 1+2=3 ", "1+2=3"),
    (load_task("sort"), "well <answer>01</answer>", "01"),
    (load_task("sort"), "  ", None),
    (FILE, "0123", None),
    (FILE, "<answer>7</answer> or <answer> 8 </answer>", "8"),
    (FILE, r"\boxed{1} so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (FILE, r"\boxed{\frac{1}{2", None),
    (FILE, r"\boxed{ }", None),
    (FILE._replace(score=ttrl.gsm8k_score), "3 and 4\n#### 1,050 apples", 1050.0),
    (FILE._replace(score=ttrl.gsm8k_score), "1050", None),
])  # fmt: skip
def test_what_a_text_answers(task, text, answer):
    assert ttrl.final_answer(task, text) == answer
