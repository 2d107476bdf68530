"""simpo.py and orpo.py against their papers' formulas, and through `update` against an optimum found by other means.

The formulas are numpy's, in float64, written from the papers with probabilities, not with what makes them stable.
"""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from tabular import COMPLETIONS, OUTSIDE, PREFIXES, PROMPTS, TabularLM, log_probs, minimised, random_table, sigma, slope

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


def samples_of(module, picks):
    pairs = [(PROMPTS[p], list(COMPLETIONS[i]), list(COMPLETIONS[j])) for p, i, j in picks]
    return as_samples(pairs, 64, "cpu")


# both prompts, completions of one and of two tokens on either side, one pair of equal ones, one pair twice
PICKS = [(0, 0, 3), (1, 4, 0), (0, 5, 2), (1, 6, 1), (1, 2, 2), (0, 5, 2), (0, 3, 6)]


def movement(module, table=None, **settings) -> np.ndarray:
    """What one update by plain gradient descent with rate 1 subtracts from the table."""
    table = random_table(1) if table is None else table
    model = TabularLM(table)
    name = module.__name__.rpartition(".")[2]
    defaults = SETTINGS[name] | dict(micro_batch_size=2 * len(PICKS), max_grad_norm=1e9, precision="float32")
    args = module.Args(**defaults | settings)
    module.update(model, torch.optim.SGD(model.parameters(), 1.0), samples_of(module, PICKS), args)
    return table - model.table.detach().numpy()


def average(table, prompt: int, completion: int) -> float:
    return log_probs(table, prompt, COMPLETIONS[completion]).mean()


def objective(name, table, picks=PICKS, sft_coef=0.0, **settings) -> float:
    """Mean over pairs of the formula, in numpy."""
    losses = []
    for p, i, j in picks:
        w, l = average(table, p, i), average(table, p, j)  # noqa: E741
        losses.append(by_formula(name, w, l, **settings) - sft_coef * w)
    return float(np.mean(losses))


@pytest.mark.parametrize("name, settings", [("simpo", {}), ("simpo", dict(sft_coef=0.7)), ("orpo", {})])
def test_update_descends_the_formula(name, settings):
    """The wiring: shift, mask, averages over tokens with the EOS, sign, mean over pairs, SFT term."""
    expected = slope(lambda table: objective(name, table, **settings), random_table(1))
    ours = movement(MODULES[name], **settings)
    assert np.abs(expected).max() > 1e-2
    np.testing.assert_allclose(ours, expected, atol=1e-8)
    assert not ours[:, OUTSIDE].any(), "something after an EOS was trained"


@both
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 100])
def test_micro_batches_change_nothing(name, size):
    module, settings = MODULES[name], dict(sft_coef=0.5) if name == "simpo" else {}
    ours = movement(module, micro_batch_size=size, micro_batch_tokens=size % 3 * 8, **settings)
    np.testing.assert_allclose(ours, movement(module, **settings), atol=1e-10)


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


def test_metrics_by_hand():
    logps = torch.tensor([[0.75, 0.5], [0.5, 0.75], [0.5, 0.5], [0.2, 0.1]]).log()
    log = math.log
    chosen, rejected = (log(0.75) + 2 * log(0.5) + log(0.2)) / 4, (2 * log(0.5) + log(0.75) + log(0.1)) / 4
    common = {"accuracy": 2.5 / 4, "chosen_logp": pytest.approx(chosen), "rejected_logp": pytest.approx(rejected)}
    mean = lambda columns: {name: values.mean().item() for name, values in columns.items()}  # noqa: E731
    ours = mean(simpo.preference_metrics(logps, 2.0))
    assert ours == common | {"margin": pytest.approx(2 * (chosen - rejected))}
    # odds 3, 1, 1, 1/4 against 1, 3, 1, 1/9
    assert mean(orpo.preference_metrics(logps)) == common | {"margin": pytest.approx(log(9 / 4) / 4)}


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

    def value(x):
        table = start.copy()
        table[:, : len(PREFIXES)] = x.reshape(free)
        return objective(name, table, picks, **settings)

    found = minimize(value, start[:, : len(PREFIXES)].ravel(), method="BFGS", options=dict(gtol=1e-7, maxiter=400))
    args = module.Args(**SETTINGS[name], **settings, micro_batch_size=2 * len(picks), max_grad_norm=1e9,
                       precision="float32")  # fmt: skip
    table = minimised(module.update, TabularLM(start), samples_of(module, picks), args, 400, 0.1)
    assert value(start[:, : len(PREFIXES)].ravel()) - found.fun > 0.02, "there was nothing to learn"
    assert objective(name, table, picks, **settings) == pytest.approx(found.fun, abs=1e-6)
    ours = np.exp([[log_probs(table, p, c).sum() for c in COMPLETIONS] for p in range(len(PROMPTS))])
    table = start.copy()
    table[:, : len(PREFIXES)] = found.x.reshape(free)
    theirs = np.exp([[log_probs(table, p, c).sum() for c in COMPLETIONS] for p in range(len(PROMPTS))])
    np.testing.assert_allclose(ours, theirs, atol=2e-3)


@pytest.mark.parametrize("distance", [1e-2, 1e-4, 1e-6, 0.5, 70.0])
def test_odds_keep_their_digits(distance):
    """1 - p from p has one digit left in float32 where p is 1e-6 from 1. Probabilities of 1e-30 have odds, too."""
    ours = orpo.log_odds(torch.tensor([-distance], dtype=torch.float32)).item()
    assert ours == pytest.approx(-distance - math.log(-math.expm1(-distance)), rel=1e-6, abs=1e-5)
