"""reward_model.py against its formula in numpy, and through `update` against what it is proven to converge to.

The scorer is a table with one number for each prompt and completion, so every reward function is one that it can be.
"""

import math
from functools import partial
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pairs import descends
from reference.dpo import preferences
from reference.dpo import update as second_update
from scipy.optimize import minimize
from tabular import COMPLETIONS, PROMPTS, minimised, sigma

from algos import reward_model
from algos.reward_model import Pair

pytestmark = pytest.mark.usefixtures("float64")
P, N, PAD = len(PROMPTS), len(COMPLETIONS), 99
TABLE = np.random.default_rng(0).normal(size=(P, N))
STRENGTHS = np.array([[1, 3, 2, 1, 4, 2, 1], [2, 1, 1, 4, 1, 3, 2]])  # exp of the true reward


class Table(torch.nn.Module):
    """Stands where a sequence classifier stands. Reads what the mask covers, and checks what it does not."""

    def __init__(self, table: np.ndarray):
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(table))
        self.device = self.table.device
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(pad_token_id=PAD))
        self.index = {(*p, *c): (i, j) for i, p in enumerate(PROMPTS) for j, c in enumerate(COMPLETIONS)}

    def forward(self, input_ids, attention_mask):
        assert (attention_mask.diff(dim=1) <= 0).all(), "padding belongs on the right"
        assert ((input_ids == PAD) == (attention_mask == 0)).all()
        places = [self.index[tuple(i[m.bool()].tolist())] for i, m in zip(input_ids, attention_mask)]
        rows, columns = zip(*places)
        return SimpleNamespace(logits=self.table[list(rows), list(columns)][:, None])


def loss(w, l, m, c):  # noqa: E741
    return -np.log(sigma(w - l - m)) + c * (w + l) ** 2


def pair(p: int, i: int, j: int, margin: float = 0.0) -> Pair:
    return Pair(PROMPTS[p] + list(COMPLETIONS[i]), PROMPTS[p] + list(COMPLETIONS[j]), margin)


PICKS = [(0, 0, 3, 0.0), (1, 4, 0, 1.0), (0, 5, 2, 0.3), (1, 6, 1, 0.0), (1, 2, 2, 0.5), (0, 5, 2, 0.3), (0, 3, 6, 2.0)]
SOME = [pair(*pick) for pick in PICKS]  # both prompts, several lengths, one pair of equal ones, one twice


def one_number(table, p, j) -> tuple[float, np.ndarray]:
    """Stands where the log-ratio does: the table's entry, and its gradient."""
    gradient = np.zeros_like(table)
    gradient[p, j] = 1
    return table[p, j], gradient


def by_reference(table, picks, c: float):
    return second_update(table, [(p, (i, j), m) for p, i, j, m in picks], partial(loss, c=c), one_number)


@pytest.mark.parametrize("far", [-500.0, 500.0])
def test_far_scores_stay_finite_in_float32(far):
    scores = torch.tensor([[far, -far]], dtype=torch.float32, requires_grad=True)
    value = reward_model.reward_loss(scores, torch.ones(1, dtype=torch.float32), 0.01)
    value.sum().backward()
    assert value.isfinite().all() and scores.grad.isfinite().all()


@pytest.mark.parametrize("c", [0.0, 0.05, 1.0])
def test_update_descends_the_formula(c):
    """Sign, margin, centring, mean over pairs; which sequence is which."""
    expected, _, scores = by_reference(TABLE, PICKS, c)
    metrics = descends(reward_model, SOME, expected, lambda: Table(TABLE), center_coef=c)
    found = preferences(scores, scores @ [1, -1], "score")
    assert {key: metrics[key] for key in found} == pytest.approx(found)


# what it converges to


def population() -> list[tuple]:
    """i is preferred to j STRENGTHS[i] times and j to i STRENGTHS[j] times, over a ring of pairs with two chords."""
    linked = [(i, (i + 1) % N) for i in range(N)] + [(0, 3), (2, 5)]
    ordered = [pair for i, j in linked for pair in ((i, j), (j, i))]
    return [(p, i, j, 0.0) for p in range(P) for i, j in ordered for _ in range(STRENGTHS[p, i])]


def trained(picks, start: np.ndarray, c: float) -> np.ndarray:
    args = reward_model.Args(micro_batch_size=len(picks), micro_batch_tokens=0, max_grad_norm=1e9, precision="float32",
                             center_coef=c)  # fmt: skip
    return minimised(reward_model.update, Table(start), [pair(*pick) for pick in picks], args, 500, 0.1)


def test_it_converges_to_the_true_rewards_up_to_a_constant_for_each_prompt():
    found, true = trained(population(), TABLE, 0.0), np.log(STRENGTHS)
    constants = (found - true).mean(1, keepdims=True)
    assert np.abs(TABLE - true - (TABLE - true).mean(1, keepdims=True)).max() > 1
    np.testing.assert_allclose(found, true + constants, atol=1e-4)
    other = trained(population(), TABLE + 2, 0.0)
    assert np.abs(other - found).max() > 1, "without centring nothing fixes the constants"


def test_centring_fixes_the_constants():
    """The minimum is one table, wherever training starts: that of the numpy objective, by another optimiser. Its
    differences are those of the true rewards but for a little, and its pairs' mean sums are near 0."""
    c, picks = 0.01, population()

    def value(x):
        gradient, mean, _ = by_reference(x.reshape(P, N), picks, c)
        return mean, gradient.ravel()

    by_scipy = minimize(value, np.zeros(P * N), jac=True, tol=1e-10).x.reshape(P, N)
    for start in (TABLE, TABLE + 2):
        np.testing.assert_allclose(trained(picks, start, c), by_scipy, atol=1e-3)
    true = np.log(STRENGTHS)
    assert np.abs(by_scipy - true - (by_scipy - true).mean(1, keepdims=True)).max() < 0.2
    sums = [[by_scipy[q, i] + by_scipy[q, j] for q, i, j, _ in picks if q == p] for p in range(P)]
    assert max(abs(np.mean(s)) for s in sums) < 1e-5


# what is logged


def test_calibration_by_hand():
    """Four pairs that predict 0.88, 0.88 (both in the bin from 0.85 to 0.9), 0.62 and a tie; one of the 0.88 is
    wrong."""
    q, p = math.log(0.88 / 0.12), math.log(0.62 / 0.38)
    ours = reward_model.calibration(torch.tensor([[q, 0.0], [0.0, q], [1.0, 1.0 - p], [3.0, 3.0]]))
    gaps = [abs(2 * 0.88 - 1), abs(0.62 - 1), abs(0.5 - 0.5)]
    assert ours["ece"] == pytest.approx(sum(gaps) / 4)
    assert ours["brier"] == pytest.approx((0.12**2 + 0.88**2 + 0.38**2 + 0.5**2) / 4)
    assert ours["log_likelihood"] == pytest.approx(sum(map(math.log, (0.88, 0.12, 0.62, 0.5))) / 4)


def test_calibration_error_is_that_of_both_orders_in_twenty_bins():
    """As the docstring of the script says: nothing depends on which of a pair is shown first."""
    scores = np.random.default_rng(5).normal(size=(400, 2)) * 2
    p = sigma(scores[:, 0] - scores[:, 1])
    predicted, outcome = np.concatenate([p, 1 - p]), np.repeat([1.0, 0.0], 400)
    bins = np.digitize(predicted, np.linspace(0, 1, 21)[1:-1])
    error = sum(abs((predicted - outcome)[bins == b].sum()) for b in range(20)) / 800
    assert reward_model.calibration(torch.tensor(scores))["ece"] == pytest.approx(error, rel=1e-9)


def test_ensemble_metrics_by_hand():
    """Two members that are right on one pair each, and together on both."""
    scores = torch.tensor([[[3.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [5.0, 0.0]]])
    ours = reward_model.ensemble_metrics(scores)
    assert ours["eval/pair_accuracy"] == 0.5 and ours["eval/ensemble_accuracy"] == 1.0
    assert ours["eval/disagreement"] == pytest.approx((2 + 3) / 2)  # of 3 and -1, of -1 and 5
    both = [reward_model.calibration(some)["brier"] for some in scores]
    assert ours["eval/brier"] == pytest.approx(sum(both) / 2)
    assert not {"eval/disagreement", "eval/ensemble_accuracy"} & reward_model.ensemble_metrics(scores[:1]).keys()


def test_label_noise_flips_exactly_a_share():
    rows = [{"prompt": str(i), "chosen": f"{i}+", "rejected": f"{i}-", "more": i} for i in range(40)]
    flipped = {}
    for seed, share in ((1, 0.25), (1, 0.25), (2, 0.25), (1, 0.0), (1, 1.0)):
        noisy = list(map(reward_model.with_noise(rows, share, seed), range(40)))
        wrong = [i for i, row in enumerate(noisy) if row["chosen"] != f"{i}+"]
        assert len(wrong) == 40 * share and all(noisy[i]["rejected"] == f"{i}+" for i in wrong)
        assert [row["more"] for row in noisy] == list(range(40))
        assert flipped.setdefault((seed, share), wrong) == wrong
    assert all(flipped[a] != flipped[b] for a, b in combinations([(1, 0.25), (2, 0.25)], 2))
    assert rows[0]["chosen"] == "0+"
