"""simpo.py and orpo.py against their papers' formulas, and through `update` against an optimum found by other means.

The formulas are numpy's, in float64, written from the papers with probabilities, not with what makes them stable.
"""

import math

import numpy as np
import pytest
import torch
from pairs import PICKS, TABLE, descends, items_of, probabilities, samples_of
from reference.dpo import log_ratio, preferences
from reference.dpo import update as second_update
from scipy.optimize import minimize
from tabular import COMPLETIONS, PREFIXES, PROMPTS, TabularLM, minimised, random_table, sigma

from algos import orpo, simpo
from utils.dist import as_samples
from utils.lm import load_model

pytestmark = pytest.mark.usefixtures("float64")
SIMPO, ORPO = dict(beta=1.7, gamma=0.6), dict(beta=0.8)
SETTINGS = {"simpo": SIMPO, "orpo": ORPO}
MODULES = {"simpo": simpo, "orpo": orpo}
both = pytest.mark.parametrize("name", MODULES)
# averages of log-probabilities, on either side of log 1/2
CHOSEN = np.array([-0.7, -0.01, -3.0, -0.4, -6.0, -1e-4, -2.0])
REJECTED = np.array([-0.7, -2.9, -0.2, -0.5, -1.0, -4.0, -2.0])


def by_formula(name, w, l, **settings):  # noqa: E741
    """From the papers; w, l are averages of log-probabilities over tokens."""
    s = SETTINGS[name] | settings
    if name == "simpo":
        return -np.log(sigma(s["beta"] * w - s["beta"] * l - s["gamma"]))
    p, q = np.exp(w), np.exp(l)
    odds_ratio = (p / (1 - p)) / (q / (1 - q))
    return -w + s["beta"] * -np.log(sigma(np.log(odds_ratio)))


def by_script(name, w, l, **settings):  # noqa: E741
    loss = {"simpo": simpo.simpo_loss, "orpo": orpo.orpo_loss}[name]
    return loss(torch.as_tensor(w), torch.as_tensor(l), MODULES[name].Args(**SETTINGS[name] | settings))


@both
@pytest.mark.parametrize("settings", [{}, dict(beta=3.1)])
def test_value(name, settings):
    np.testing.assert_allclose(by_script(name, CHOSEN, REJECTED, **settings).numpy(),
                               by_formula(name, CHOSEN, REJECTED, **settings), rtol=1e-9)  # fmt: skip


@both
@pytest.mark.parametrize("w, l", [(0.0, -300.0), (-300.0, 0.0), (0.0, 0.0), (-1e-8, -1e-8), (-300.0, -300.0)])
def test_certain_and_impossible_completions_stay_finite_in_float32(name, w, l):  # noqa: E741
    """Averages of 0 are what float32 gives to a completion that has been learnt."""
    w, l = (torch.tensor([x], dtype=torch.float32, requires_grad=True) for x in (w, l))  # noqa: E741
    loss = by_script(name, w, l)
    loss.sum().backward()
    assert loss.isfinite().all() and w.grad.isfinite().all() and l.grad.isfinite().all()
    assert loss.item() >= 0


# through update


def by_reference(name, table, picks=PICKS, sft_coef=0.0, **settings):
    """Gradient and mean of the formula, and the scores, which are averages over tokens."""
    loss = lambda w, l: by_formula(name, w, l, **settings) - sft_coef * w  # noqa: E731, E741
    return second_update(table, items_of(picks), loss, log_ratio(average=True))


@pytest.mark.parametrize("name, settings", [("simpo", {}), ("simpo", dict(sft_coef=0.7)), ("orpo", {})])
def test_update_descends_the_formula(name, settings):
    """The wiring: shift, mask, averages over tokens with the EOS, sign, mean over pairs, SFT term."""
    expected, _, scores = by_reference(name, TABLE, **settings)
    metrics = descends(MODULES[name], samples_of(PICKS), expected, **SETTINGS[name], **settings)
    margins = (scores if name == "simpo" else np.log(np.exp(scores) / (1 - np.exp(scores)))) @ [1, -1]
    found = preferences(scores, margins * (SIMPO["beta"] if name == "simpo" else 1), "logp")
    assert {key: metrics[key] for key in found} == pytest.approx(found)


@both
def test_padding_changes_nothing(name):
    """Beside a pair with a longer prompt and longer completions, on a real model in float64."""
    module, model = MODULES[name], load_model(MODULES[name].Args())[0].double()
    short = [([5, 6], [9, 1], [10, 1]), ([7], [4, 4, 4, 1], [1])]
    long = ([3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 10, 11, 12, 1], [13, 1])
    args = module.Args(max_length=64, precision="float32")

    def scored(pairs) -> torch.Tensor:
        with torch.no_grad():
            return module.pair_logps(model, as_samples(pairs, args.max_length, "cpu")[:4], 2 * len(pairs), args)

    alone, beside = scored(short), scored([*short, long])
    torch.testing.assert_close(beside[:2], alone, rtol=0, atol=1e-6)  # its norms are float32
    by_hand = []
    for p, *completions in short:
        for c in completions:
            logps = model(input_ids=torch.tensor([p + c])).logits[0].log_softmax(-1)
            by_hand.append(np.mean([logps[len(p) - 1 + i, token].item() for i, token in enumerate(c)]))
    np.testing.assert_allclose(alone.flatten().numpy(), by_hand, atol=1e-6)


# what they converge to

WINS = np.array([[3, 1], [1, 2], [2, 1], [1, 3], [2, 1], [1, 1], [4, 1]])  # i over j, and j over i, in a ring


def labels() -> list[tuple[int, int, int]]:
    """Labels that disagree, so that there is a minimum: (prompt, chosen, rejected), both ways round."""
    picks = []
    for p in range(len(PROMPTS)):
        for i, (wins, losses) in enumerate(WINS):
            j = (i + 1 + p) % len(COMPLETIONS)
            picks += [(p, i, j)] * int(wins) + [(p, j, i)] * int(losses)
    return picks


@both
def test_training_reaches_the_optimum(name):
    """The same minimum as scipy finds of the formula over the free entries of the table, from where it found it."""
    module, picks, start = MODULES[name], labels(), random_table(0)
    settings = dict(sft_coef=0.2) if name == "simpo" else {}
    free = start[:, : len(PREFIXES)].shape

    def with_free(x):
        table = start.copy()
        table[:, : len(PREFIXES)] = x.reshape(free)
        return table

    def value(x):
        gradient, loss, _ = by_reference(name, with_free(x), picks, **settings)
        return loss, gradient[:, : len(PREFIXES)].ravel()

    begun = start[:, : len(PREFIXES)].ravel()
    found = minimize(value, begun, jac=True, method="BFGS", options=dict(gtol=1e-7, maxiter=400))
    args = module.Args(**SETTINGS[name], **settings, micro_batch_size=2 * len(picks), max_grad_norm=1e9,
                       precision="float32")  # fmt: skip
    table = minimised(module.update, TabularLM(start), samples_of(picks), args, 400, 0.1)
    assert value(begun)[0] - found.fun > 0.02, "there was nothing to learn"
    assert by_reference(name, table, picks, **settings)[1] == pytest.approx(found.fun, abs=1e-6)
    np.testing.assert_allclose(probabilities(table), probabilities(with_free(found.x)), atol=2e-3)


@pytest.mark.parametrize("distance", [1e-2, 1e-4, 1e-6, 0.5, 70.0])
def test_odds_keep_their_digits(distance):
    """1 - p from p has one digit left in float32 where p is 1e-6 from 1. Probabilities of 1e-30 have odds, too."""
    ours = orpo.log_odds(torch.tensor([-distance], dtype=torch.float32)).item()
    assert ours == pytest.approx(-distance - math.log(-math.expm1(-distance)), rel=1e-6, abs=1e-5)
