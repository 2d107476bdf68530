"""dpo.py against the papers' formulas, and through `update` against what its losses are proven to converge to.

The formulas are numpy's, in float64, written from the papers. A tabular model small enough to hold every completion
learns from all pairs, repeated so often that labels have the probabilities of a known model of preference.
"""

from functools import partial
from itertools import combinations, product

import numpy as np
import pytest
import torch
from pairs import PICKS, REF, TABLE, N, P, descends, items_of, logps_of, probabilities, samples_of
from reference.dpo import log_ratio, preferences
from reference.dpo import update as second_update
from tabular import TabularLM, minimised, sigma

from algos import dpo
from algos.dpo import LOSSES
from utils.dist import as_samples
from utils.lm import load_model

pytestmark = pytest.mark.usefixtures("float64")
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


# through update


def batch_of(picks) -> dpo.Batch:
    return dpo.Batch(samples_of(picks), logps_of(picks, REF))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_update_descends_the_formula(name, average):
    """The wiring: shift, mask, reference, sums or means over tokens with the EOS, sign, mean over pairs, SFT term."""
    items = items_of(PICKS)
    expected, _, scores = second_update(TABLE, items, partial(by_formula, name), log_ratio(REF, average))
    imitation, *_ = second_update(TABLE, [(p, c[:1]) for p, c in items], lambda w: -w, log_ratio(average=True))
    for sft_coef in (0.0, 0.7):
        metrics = descends(dpo, batch_of(PICKS), expected + sft_coef * imitation, loss=name, sft_coef=sft_coef,
                           average_logps=average, **SETTINGS)  # fmt: skip
        found = preferences(scores, SETTINGS["beta"] * (scores @ [1, -1]), "logratio")
        assert {key: metrics[key] for key in found} == pytest.approx(found)


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


# what the losses converge to


def all_pairs(wins) -> list[tuple]:
    """wins(p, i, j) copies of each ordered pair, i preferred."""
    return [pick for pick in product(range(P), range(N), range(N)) for _ in range(pick[1] != pick[2] and wins(*pick))]


def trained(batch, steps: int, **settings) -> np.ndarray:
    """The table that training from the reference ends at."""
    args = dpo.Args(micro_batch_size=2 * len(batch), micro_batch_tokens=0, max_grad_norm=1e9, precision="float32",
                    **settings)  # fmt: skip
    return minimised(dpo.update, TabularLM(REF), batch_of(batch), args, steps, 0.05)


def tilted(scores: np.ndarray) -> np.ndarray:
    """pi_ref exp(scores) / Z for each prompt, (P, N)."""
    weights = probabilities(REF) * np.exp(scores)
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
    assert total_variation(probabilities(REF), target) > 0.1
    assert total_variation(probabilities(table), target) < 1e-4


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
    assert total_variation(probabilities(REF), tilted(scores)) > 0.1
    assert total_variation(probabilities(table), tilted(scores)) < 1e-4


# the reference


@pytest.mark.parametrize("size, tokens", [(1, 0), (4, 0), (8, 20), (100, 0)])
def test_the_reference_scores_every_token(size, tokens):
    """In the order of the rows, whatever rows share a micro-batch with them."""
    samples, expected = batch_of(PICKS)
    args = dpo.Args(micro_batch_size=size, micro_batch_tokens=tokens, precision="float32")
    ours = dpo.reference_logps(TabularLM(TABLE), TabularLM(REF), samples, args)
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
