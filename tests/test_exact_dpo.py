"""dpo.py against the papers' formulas, and through `update` against what its losses are proven to converge to.

The formulas are numpy's, in float64, written from the papers. A tabular model small enough to hold every completion
learns from all pairs, repeated so often that labels have the probabilities of a known model of preference.
"""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from tabular import COMPLETIONS, OUTSIDE, PROMPTS, TabularLM, gradients, log_probs, minimised, random_table, sigma

from algos import dpo
from algos.dpo import LOSSES
from utils.dist import as_samples
from utils.lm import load_model

pytestmark = pytest.mark.usefixtures("float64")
P, N = len(PROMPTS), len(COMPLETIONS)
REF = random_table(0)
SETTINGS = dict(beta=0.3, label_smoothing=0.1, dpop_lambda=5.0, discopop_tau=0.4)
# log-ratios of both signs, so that every branch of every loss is taken
CHOSEN = np.array([0.0, 1.7, -2.1, -0.4, 6.0, -5.0, 3.0])
REJECTED = np.array([0.0, -0.9, -3.3, 1.5, 1.0, 4.0, 3.0])


def formulas(w, l, beta, e, dpop_lambda, tau) -> dict[str, np.ndarray]:  # noqa: E741
    """Every loss from its paper: no function of ours, no shared sub-expression, no rearrangement for stability."""
    q = sigma(beta * (w - l))
    fallen = np.maximum(0, -w)
    return {
        "sigmoid": -(1 - e) * np.log(sigma(beta * (w - l))) - e * np.log(sigma(beta * (l - w))),
        "robust": ((1 - e) * -np.log(sigma(beta * (w - l))) - e * -np.log(sigma(beta * (l - w)))) / (1 - 2 * e),
        "ipo": ((w - l) - 0.5 / beta) ** 2,
        "hinge": np.maximum(0, 1 - beta * (w - l)),
        "apo-zero": 1 - sigma(beta * w) + sigma(beta * l),
        "apo-down": 1 + sigma(beta * w) - sigma(beta * (w - l)),
        "sppo-hard": (w - (1 - 0.5) / beta) ** 2 + (l - (0 - 0.5) / beta) ** 2,
        "dpop": -np.log(sigma(beta * ((w - l) - dpop_lambda * fallen))),
        "nca": -np.log(sigma(beta * w)) - 0.5 * np.log(sigma(-beta * w)) - 0.5 * np.log(sigma(-beta * l)),
        "exo": q * np.log(q / (1 - e)) + (1 - q) * np.log((1 - q) / e),
        "discopop": (1 - sigma(beta * (w - l) / tau)) * np.log(1 + np.exp(-beta * (w - l)))
        + sigma(beta * (w - l) / tau) * np.exp(-beta * (w - l)),
    }


def by_formula(name, w, l, **settings):  # noqa: E741
    s = SETTINGS | settings
    return formulas(w, l, s["beta"], s["label_smoothing"], s["dpop_lambda"], s["discopop_tau"])[name]


def by_script(name, w, l, **settings):  # noqa: E741
    return LOSSES[name](torch.tensor(w), torch.tensor(l), dpo.Args(**SETTINGS | settings)).numpy()


def test_every_loss_has_a_name_and_a_formula():
    assert set(LOSSES) == set(formulas(CHOSEN, REJECTED, 1.0, 0.1, 1.0, 1.0))
    assert set(LOSSES) == set(dpo.Args.__dataclass_fields__["loss"].type.__args__)


@pytest.mark.parametrize("settings", [{}, dict(beta=1.1, label_smoothing=0.3, dpop_lambda=0.7, discopop_tau=0.05)])
@pytest.mark.parametrize("name", LOSSES)
def test_value(name, settings):
    np.testing.assert_allclose(by_script(name, CHOSEN, REJECTED, **settings),
                               by_formula(name, CHOSEN, REJECTED, **settings), rtol=1e-12, atol=1e-14)  # fmt: skip


def test_discopop_begins_the_wrong_way():
    for tau in (0.05, 0.2):
        d = torch.zeros(1, requires_grad=True)
        LOSSES["discopop"](d, torch.zeros(1), dpo.Args(beta=1.0, discopop_tau=tau)).backward()
        assert d.grad.item() == pytest.approx((1 - math.log(2)) / (4 * tau) - 3 / 4)
        assert (d.grad.item() > 0) == (tau == 0.05)


def test_robust_is_unbiased_under_flipped_labels():
    e = SETTINGS["label_smoothing"]
    mean = (1 - e) * by_script("robust", CHOSEN, REJECTED) + e * by_script("robust", REJECTED, CHOSEN)
    q = sigma(SETTINGS["beta"] * (CHOSEN - REJECTED))
    np.testing.assert_allclose(mean, -np.log(q), rtol=1e-12)


# through update


def pair(prompt: int, chosen: tuple, rejected: tuple) -> tuple:
    return PROMPTS[prompt], list(chosen), list(rejected)


def batch_of(pairs: list[tuple], ref=REF) -> dpo.Batch:
    """Log-probabilities of the reference are numpy's."""
    samples = as_samples(pairs, 64, "cpu")
    ref_logps = torch.zeros_like(samples.logps)
    rows = [(PROMPTS.index(prompt), tuple(tokens)) for prompt, *both in pairs for tokens in both]
    for row, (prompt, tokens) in zip(ref_logps, rows):
        row[: len(tokens)] = torch.tensor(log_probs(ref, prompt, tokens))
    return dpo.Batch(samples, ref_logps)


def some_pairs() -> list[tuple]:
    """Both prompts, completions of one and of two tokens on either side, one pair of equal ones, one pair twice."""
    picks = [(0, 0, 3), (1, 4, 0), (0, 5, 2), (1, 6, 1), (1, 2, 2), (0, 5, 2), (0, 3, 6)]
    return [pair(p, COMPLETIONS[i], COMPLETIONS[j]) for p, i, j in picks]


def movement(batch, table=None, **settings) -> np.ndarray:
    """What one update by plain gradient descent with rate 1 subtracts from the table."""
    table = random_table(1) if table is None else table
    model = TabularLM(table)
    defaults = SETTINGS | dict(
        micro_batch_size=2 * len(batch), micro_batch_tokens=0, max_grad_norm=1e9, precision="float32"
    )
    dpo.update(model, torch.optim.SGD(model.parameters(), 1.0), batch_of(batch), dpo.Args(**defaults | settings))
    return table - model.table.detach().numpy()


def own_gradient(batch, table, name, sft_coef=0.0, average=False, **settings) -> np.ndarray:
    """The same in numpy: derivative of the formula by central differences times the gradient of log pi by hand."""
    total = np.zeros_like(table)
    for prompt, *completions in batch:
        p, sides, h = PROMPTS.index(prompt), [], []
        for completion in map(tuple, completions):
            size = len(completion) if average else 1
            sides.append(gradients(table, p, completion).sum(0) / size)
            h.append((log_probs(table, p, completion).sum() - log_probs(REF, p, completion).sum()) / size)
        step = 1e-5
        for side, (dw, dl) in zip(sides, ((step, 0), (0, step))):
            up, down = (by_formula(name, h[0] + s * dw, h[1] + s * dl, **settings) for s in (1, -1))
            total += (up - down) / (2 * step) * side / len(batch)
        chosen = tuple(completions[0])
        total -= sft_coef * gradients(table, p, chosen).sum(0) / len(chosen) / len(batch)
    return total


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_update_descends_the_formula(name, average):
    """The wiring: shift, mask, reference, sums or means over tokens with the EOS, sign, mean over pairs, SFT term."""
    batch, table = some_pairs(), random_table(1)
    for sft_coef in (0.0, 0.7):
        expected = own_gradient(batch, table, name, sft_coef, average)
        ours = movement(batch, loss=name, sft_coef=sft_coef, average_logps=average)
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(ours, expected, atol=1e-7)
        assert not ours[:, OUTSIDE].any(), "something after an EOS was trained"


def test_prompt_is_not_trained():
    """On a real model the last hidden states have no gradient at positions before the last of the prompt."""
    model = load_model(dpo.Args())[0].double()
    seen = []
    inner = model.model.norm.forward

    def noted(x):
        seen.append(inner(x))
        if seen[-1].requires_grad:
            seen[-1].retain_grad()
        return seen[-1]

    model.model.norm.forward = noted
    args = dpo.Args(micro_batch_size=2, micro_batch_tokens=0, max_length=64, precision="float32")
    samples = as_samples([([5, 6, 7, 8], [9, 10, 1], [11, 1])], args.max_length, "cpu")
    batch = dpo.Batch(samples, torch.full_like(samples.logps, -1.0))
    dpo.update(model, torch.optim.SGD(model.parameters(), 0.0), batch, args)
    trained = [hidden.grad.abs().sum(-1) > 0 for hidden in seen if hidden.requires_grad]
    # the prompt, once for both (the cache repeats it), then the positions of all tokens but the last
    assert [t.tolist() for t in trained] == [[[False, False, False, True]], [[True, True], [True, False]]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 14, 100])
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_change_nothing(name, size):
    """Pairs stay together, also where rows are sorted by length."""
    settings = dict(loss=name, sft_coef=0.5)
    np.testing.assert_allclose(movement(some_pairs(), micro_batch_size=size, micro_batch_tokens=size % 3 * 8,
                                        **settings),
                               movement(some_pairs(), **settings), atol=1e-10)  # fmt: skip


def test_metrics_by_hand():
    ratios = torch.tensor([[2.0, 1.0], [0.0, 3.0], [-1.0, -1.0], [-2.0, -6.0]])
    columns = dpo.preference_metrics(ratios, 0.5)
    assert {name: values.mean().item() for name, values in columns.items()} == {
        "accuracy": (1 + 0 + 0.5 + 1) / 4, "margin": 0.5 * (1 - 3 + 0 + 4) / 4, "chosen_logratio": -0.25,
        "rejected_logratio": -0.75,
    }  # fmt: skip


# what the losses converge to


def all_pairs(wins) -> list[tuple]:
    """wins(p, i, j) copies of each ordered pair, i preferred."""
    return [item for p in range(P) for i in range(N) for j in range(N) if i != j
            for item in [pair(p, COMPLETIONS[i], COMPLETIONS[j])] * wins(p, i, j)]  # fmt: skip


def trained(batch, steps: int, **settings) -> np.ndarray:
    """The table that training from the reference ends at."""
    args = dpo.Args(micro_batch_size=2 * len(batch), micro_batch_tokens=0, max_grad_norm=1e9, precision="float32",
                    **settings)  # fmt: skip
    return minimised(dpo.update, TabularLM(REF), batch_of(batch), args, steps, 0.05)


def distributions(table) -> np.ndarray:
    """pi(y | x) of every completion, (P, N)."""
    return np.exp([[log_probs(table, p, c).sum() for c in COMPLETIONS] for p in range(P)])


def tilted(scores: np.ndarray) -> np.ndarray:
    """pi_ref exp(scores) / Z for each prompt, (P, N)."""
    weights = distributions(REF) * np.exp(scores)
    return weights / weights.sum(1, keepdims=True)


def total_variation(a, b) -> float:
    return np.abs(a - b).sum(1).max() / 2


STRENGTHS = np.array([[1, 3, 2, 1, 4, 2, 1], [2, 1, 1, 4, 1, 3, 2]])  # exp of the reward: i beats j in i : j cases


def test_dpo_converges_to_the_tilted_reference():
    """On Bradley-Terry labels of the reward log(STRENGTHS): i is preferred to j strength(i) times, j to i strength(j)
    times; a ring with a few chords of all pairs, which is enough, for they connect all completions."""
    linked = {(i, (i + 1) % N) for i in range(N)} | {(0, 3), (2, 5)}
    wins = lambda p, i, j: int(STRENGTHS[p, i]) if (i, j) in linked or (j, i) in linked else 0  # noqa: E731
    beta = 0.5
    table = trained(all_pairs(wins), 500, beta=beta)
    target = tilted(np.log(STRENGTHS) / beta)
    assert total_variation(distributions(REF), target) > 0.1
    assert total_variation(distributions(table), target) < 1e-4


def test_ipo_converges_to_its_own_target():
    """pi_ref exp(p(y) / tau) / Z, where p(y) is the probability that y is preferred to a draw from the distribution mu
    of which both completions of a pair come (arXiv 2310.12036). Preferences in quarters, not of any reward model; mu is
    not uniform: pair (i, j) comes mu_i mu_j times as often."""
    generator = np.random.default_rng(3)
    quarters, mu = np.zeros((P, N, N), int), generator.integers(1, 3, size=(P, N))
    for p in range(P):
        for i, j in combinations(range(N), 2):
            quarters[p, i, j] = generator.integers(0, 5)
            quarters[p, j, i] = 4 - quarters[p, i, j]
    tau = 0.4
    batch = all_pairs(lambda p, i, j: int(quarters[p, i, j] * mu[p, i] * mu[p, j]))
    table = trained(batch, 400, loss="ipo", beta=tau)
    preferred = quarters / 4 + np.eye(N) / 2
    scores = np.einsum("pij,pj->pi", preferred, mu / mu.sum(1, keepdims=True)) / tau
    assert total_variation(distributions(REF), tilted(scores)) > 0.1
    assert total_variation(distributions(table), tilted(scores)) < 1e-4


# the reference


@pytest.mark.parametrize("size, tokens", [(1, 0), (4, 0), (8, 20), (100, 0)])
def test_the_reference_scores_every_token(size, tokens):
    """In the order of the rows, whatever rows share a micro-batch with them."""
    samples, expected = batch_of(some_pairs())
    args = dpo.Args(micro_batch_size=size, micro_batch_tokens=tokens, precision="float32")
    ours = dpo.reference_logps(TabularLM(random_table(1)), TabularLM(REF), samples, args)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("lora, average", [(False, False), (True, False), (False, True)])
def test_first_margins_are_exactly_zero(lora, average, tmp_path, monkeypatch):
    """The reference is what the model itself says, bit for bit, for trained and for held-out pairs; and it stays the
    model that was loaded."""
    if lora:
        pytest.importorskip("peft", reason="not run: peft is not installed")
    torch.set_default_dtype(torch.float32)
    batches, update = [], dpo.update
    monkeypatch.setattr(dpo, "update", lambda *args: batches.append(args[2]) or update(*args))
    history = dpo.train(dpo.Args(task="sort", num_pairs=20, batch_size=8, micro_batch_size=6, max_steps=6,
                                 eval_prompts=6, eval_every=0, eval_samples=1, threads=1, device="cpu",
                                 average_logps=average, lora_rank=2 * lora, precision="float32",
                                 learning_rate=1e-3 if lora else 1e-5,
                                 micro_batch_tokens=0, eval_max_new_tokens=12, output_dir=str(tmp_path)))  # fmt: skip
    first, after = history[0], history[1]
    assert first["eval/pair_margin"] == 0.0 and first["eval/pair_accuracy"] == 0.5
    assert after["margin"] == 0.0 and after["chosen_logratio"] == 0.0 and after["accuracy"] == 0.5
    assert history[3]["margin"] > 0
    model = load_model(dpo.Args())[0]
    samples, ref_logps = batches[5]  # of the second epoch
    for row, own in enumerate(ref_logps):
        prompt = samples.prompt_ids[row // 2][samples.prompt_mask[row // 2]]
        completion = samples.completion_ids[row][samples.completion_mask[row]]
        ids = torch.cat([prompt, completion])
        with torch.no_grad():
            logps = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        by_hand = logps[len(prompt) - 1 : -1].gather(1, completion[:, None])[:, 0]
        torch.testing.assert_close(own[: len(completion)], by_hand, rtol=0, atol=1e-4)
        assert not own[len(completion) :].any()


def test_completions_are_cut_and_prompts_are_not():
    """Prompt and completion together hold max_length tokens."""
    pairs = [([1], [2, 3, 4, 5], [6]), ([7, 8], [2, 3, 4], [5, 6])]
    samples = as_samples(pairs, 4, "cpu")
    assert samples.prompt_ids.tolist() == [[0, 1], [7, 8]] and samples.prompt_mask.sum(1).tolist() == [1, 2]
    rows = [ids[mask].tolist() for ids, mask in zip(samples.completion_ids, samples.completion_mask)]
    assert rows == [[2, 3, 4], [6], [2, 3], [5, 6]] and samples.ended.tolist() == [False, True, False, True]
