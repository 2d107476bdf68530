"""online_dpo.update against enumeration: every pair of completions of a tabular model, weighted by its probability.

As tests/test_exact_grpo.py; `movement` is what one update by plain gradient descent at rate 1
adds to the table, so its expectation is minus the gradient of the loss. Expected values come from numpy: own
probabilities, ranks, derivatives of the losses and gradients of log pi.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch
from groups import OTHER, REWARDS, TABLE, P, close, make_batch, rewards_of, stale, stepping, twice
from reference.grpo import Rule
from tabular import COMPLETIONS, EOS, PREFIXES, PROMPTS, TabularLM, log_probs, probability, sigma, slope
from tabular import random_table as random_logits

from algos import online_dpo
from utils.lm import load_model

pytestmark = pytest.mark.usefixtures("float64")
BETA, ALPHA = 0.7, 0.3
TIED = [{c: round(2 * r) / 2 for c, r in rewards.items()} for rewards in REWARDS]  # real rewards, some of them equal
BINARY = [{c: float((i + p) % 3 == 0) for i, c in enumerate(COMPLETIONS)} for p in range(P)]


def movement(batch, table=TABLE, **settings) -> tuple[np.ndarray, dict]:
    """The table's change in one call of update, and its metrics."""
    return stepping(online_dpo, beta=BETA)(batch, table=table, **settings)


def log_ratio(p, c, table=TABLE, ref=OTHER) -> float:
    return (log_probs(table, p, c) - log_probs(ref, p, c)).sum()


def ranked(rows, s) -> list[float]:
    """Minus the slope of a pair's loss, mean over pairs, in the log-probability of each completion. Of two neighbours
    the better one has the sign +; where there is none, both have 0."""
    found = []
    for one, two in zip(rows[::2], rows[1::2]):
        sign = np.nan_to_num(np.sign(one.reward - two.reward))
        d = sign * ((one.start - one.ref).sum() - (two.start - two.ref).sum())
        slope = s.beta * (1 - sigma(s.beta * d)) if s.loss == "sigmoid" else -2 * (d - 1 / (2 * s.beta))
        found += [2 * sign * slope, -2 * sign * slope - 2 * s.xpo_alpha]  # 2: half as many pairs as rows
    return found


OTHERS = ("kl", "sampler_gap", "entropy", "approx_kl")  # metrics of the policy's own completions
RULE = Rule(ranked, lambda d, a, s: (np.full(len(d), a), []), lambda d, s: 0 * d, fixed=dict(aggregation="row"),
            different=OTHERS)  # fmt: skip


PAIRS = list(product(COMPLETIONS, repeat=2))


def expected(reward_table, table=TABLE, ref=OTHER, second=None, **settings) -> np.ndarray:
    """E[movement] over pairs whose first completion is of `table`, the second of `second` (None: of `table`, too)."""
    total = np.zeros_like(table)
    for a, b in zip(PAIRS, reversed(PAIRS)):  # the k-th pair of one prompt beside another of the other
        batch = make_batch((a, b), rewards_of((a, b), reward_table), old=table, ref=ref)
        moved, _ = movement(batch, table, **settings)
        for p, pair in enumerate((a, b)):
            of = (table, table if second is None else second)
            total[p] += math.prod(probability(t, p, c) for t, c in zip(of, pair)) * moved[p]
    return total


def wins(table, against, reward_table) -> float:
    """Probability that a completion of `table` has a higher reward than one of `against`; equal rewards count half."""
    return sum(
        probability(table, p, a) * probability(against, p, b)
        * (1.0 if reward_table[p][a] > reward_table[p][b] else 0.5 if reward_table[p][a] == reward_table[p][b] else 0.0)
        for p in range(P) for a, b in PAIRS
    ) / P  # fmt: skip


def mean_reward(table, reward_table) -> float:
    return sum(probability(table, p, c) * reward_table[p][c] for p in range(P) for c in COMPLETIONS) / P


@pytest.mark.parametrize("loss, factor", [("sigmoid", 2 * BETA), ("ipo", 4 / BETA)])
def test_at_the_reference_it_is_a_policy_gradient_of_the_probability_to_win(loss, factor):
    """Slopes of the enumerated win rate against a frozen copy, times 2 beta or 4 / beta."""
    moved = expected(TIED, ref=TABLE, loss=loss)
    np.testing.assert_allclose(moved, factor * slope(lambda t: wins(t, TABLE, TIED), TABLE, 1e-5), rtol=0, atol=1e-8)


def test_with_binary_rewards_the_first_step_is_reinforce():
    moved = expected(BINARY, ref=TABLE)
    np.testing.assert_allclose(moved, BETA * slope(lambda t: mean_reward(t, BINARY), TABLE, 1e-5), rtol=0, atol=1e-8)


# XPO: the second completion is the reference's


def divergence(table) -> float:
    """Mean over prompts of KL(reference || table), of whole completions."""
    return -sum(probability(OTHER, p, c) * log_ratio(p, c, table) for p in range(P) for c in COMPLETIONS) / P


def test_the_bonus_is_the_divergence_from_the_reference():
    """With equal rewards nothing else is left: the step ascends alpha KL(pi_ref || pi), and where both are the same
    that is flat."""
    equal = [dict.fromkeys(COMPLETIONS, 1.0)] * P
    moved = expected(equal, second=OTHER, xpo_alpha=ALPHA)
    np.testing.assert_allclose(moved, ALPHA * slope(divergence, TABLE, 1e-5), rtol=0, atol=1e-8)
    assert np.abs(moved).max() > 1e-2
    close(expected(equal, ref=TABLE, second=TABLE, xpo_alpha=ALPHA), 0.0)


# one batch


GROUPS = [(COMPLETIONS[3], COMPLETIONS[0], COMPLETIONS[1], COMPLETIONS[5]),
          (COMPLETIONS[2], COMPLETIONS[6], COMPLETIONS[4], COMPLETIONS[4])]  # fmt: skip
RANKS = [[0.5, -0.2, 1.0, 3.0], [0.1, 0.4, 2.0, 1.5]]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
@pytest.mark.parametrize("alpha", [0.0, ALPHA])
@stale
def test_updates_equal_the_reference_s(case, alpha, loss):
    """The first completion against the second, the third against the fourth. Equal rewards and unknown ones teach
    nothing, and count in the denominator."""
    rewards = [[0.5, -0.2, 3.0, 3.0], [0.1, 0.4, 2.0, 1.5]]
    twice(online_dpo, RULE, case, GROUPS, rewards, beta=BETA, loss=loss, xpo_alpha=alpha, micro_batch_size=4)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_pairs_without_a_rank(loss):
    nan = math.nan
    _, metrics = movement(make_batch(GROUPS, [[0.5, 0.5, 1.0, 3.0], [nan, 0.4, 2.0, nan]], ref=OTHER), loss=loss)
    d = log_ratio(0, GROUPS[0][3]) - log_ratio(0, GROUPS[0][2])
    close([metrics["frac_ties"], metrics["margin"], metrics["accuracy"]], [0.75, BETA * d, d > 0])
    nothing, metrics = movement(make_batch(GROUPS, [[nan] * 4, [1.0] * 4], ref=OTHER), loss=loss)
    assert not nothing.any() and metrics["frac_ties"] == 1.0 and metrics["grad_norm"] == 0.0
    assert not {"accuracy", "margin"} & metrics.keys()
    assert math.isfinite(metrics["kl"])


def test_preferences_by_hand():
    nan = math.nan
    rewards = torch.tensor([1.0, 0.0, 0.0, 1e-6, 2.0, 2.0, nan, 1.0, 1.0, nan, nan, nan, -3.0, -4.0])
    assert online_dpo.preferences(rewards).tolist() == [1, -1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("alpha", [0.0, ALPHA])
def test_metrics_by_hand(alpha):
    """With --xpo-alpha kl, entropy and sampler_gap are of the policy's completions alone, the first of each pair."""
    old = TABLE + 0.1 * random_logits(5)
    _, metrics = movement(make_batch(GROUPS, RANKS, old=old, ref=OTHER), xpo_alpha=alpha)
    h = np.array([[log_ratio(p, c) for c in GROUPS[p]] for p in range(P)]).reshape(-1, 2)
    signs = np.sign(np.array(RANKS).reshape(-1, 2) @ [1, -1])
    margins = signs * (h @ [1, -1])
    assert 0 < (margins > 0).sum() < 4
    close(metrics["accuracy"], (np.sign(margins) / 2 + 0.5).mean())  # the last pair is of equal texts: half
    close(metrics["margin"], BETA * margins.mean())
    close(metrics["kl"], h[:, 0].mean() if alpha else h.mean())
    rows = [(p, c) for p in range(P) for i, c in enumerate(GROUPS[p]) if not (alpha and i % 2)]
    gaps = np.concatenate([log_probs(TABLE, p, c) - log_probs(old, p, c) for p, c in rows])
    close(metrics["sampler_gap"], abs(gaps).mean())
    states = [(p, PREFIXES.index(c[:t])) for p, c in rows for t in range(len(c))]
    logits = np.array([TABLE[state] for state in states])
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    close(metrics["entropy"], -(probs * np.log(probs)).sum(1).mean())
    assert metrics["frac_ties"] == 0.0


@pytest.mark.parametrize("alpha", [0.0, ALPHA])
def test_padding_is_not_trained(alpha):
    """Whatever the reference says there."""
    batch = make_batch(GROUPS, RANKS, ref=OTHER)
    junk = batch._replace(ref_logps=torch.where(batch.samples.completion_mask, batch.ref_logps, -3.0))
    (moved, found), (expected, metrics) = (movement(one, xpo_alpha=alpha) for one in (junk, batch))
    close(moved, expected)
    assert found == pytest.approx(metrics)


# sampling


@pytest.mark.parametrize("generations", [2, 6])
def test_xpo_pairs_the_policy_s_with_the_reference_s(generations):
    """Two deterministic models, each of which always says its own completion: the policy's stand first in each pair,
    padded to the longer ones; without --xpo-alpha all are the policy's."""
    tables = [np.zeros_like(TABLE) for _ in range(2)]
    says = [[(1,), (0, 1)], [(0, 2), (2, 1)]]  # by model and prompt
    for table, completions in zip(tables, says):
        for p, completion in enumerate(completions):
            for t, token in enumerate(completion):
                table[p, PREFIXES.index(completion[:t]), token] = 1e3
    policy, reference = map(TabularLM, tables)
    for alpha in (0.1, 0.0):
        args = online_dpo.Args(num_generations=generations, xpo_alpha=alpha, max_completion_length=2,
                               sample_batch_size=64)  # fmt: skip
        samples = online_dpo.draw(policy, reference, PROMPTS, 1, args)
        rows = [tuple(i[m].tolist()) for i, m in zip(samples.completion_ids, samples.completion_mask)]
        assert rows == [says[i % 2 if alpha else 0][p] for p in range(P) for i in range(generations)]
        assert samples.ended.tolist() == [EOS in row for row in rows]
        assert samples.prompt_mask.sum(1).tolist() == [1, 2] and not samples.logps.any()


def test_the_reference_s_samples_have_the_reference_s_probabilities():
    """Sampled log-probabilities are those of the model that sampled, at the temperature, from one generator."""
    policy, reference = TabularLM(TABLE), TabularLM(OTHER)
    args = online_dpo.Args(num_generations=200, max_completion_length=2, temperature=0.5, sample_batch_size=512)
    for alpha, other in (0.0, TABLE), (0.1, OTHER):
        args.xpo_alpha = alpha
        samples = online_dpo.draw(policy, reference, PROMPTS, 1, args)
        for i, (ids, mask) in enumerate(zip(samples.completion_ids, samples.completion_mask)):
            completion = tuple(ids[mask].tolist())
            close(samples.logps[i][mask], log_probs((TABLE, other)[i % 2] / 0.5, i // 200, completion))
    for k, table in enumerate((TABLE, OTHER)):
        share = (samples.completion_ids[k:200:2, 0] == EOS).double().mean().item()
        p = np.exp(log_probs(table / 0.5, 0, (EOS,))).item()
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / 100)


def test_with_lora_the_reference_that_samples_has_no_adapters():
    """With adapters that changed the policy, its samples are those of the model alone."""
    pytest.importorskip("peft", reason="not run: peft is not installed")
    torch.set_default_dtype(torch.float32)
    base, model = (load_model(online_dpo.Args(lora_rank=rank, precision="float32"))[0] for rank in (0, 4))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.add_(0.3 * torch.randn_like(p))
    args = online_dpo.Args(num_generations=4, micro_batch_size=4, xpo_alpha=0.1, max_completion_length=8,
                           precision="float32", sample_batch_size=64)  # fmt: skip
    prompts = [[5, 6, 7], [8, 9]]
    ours = online_dpo.draw(model, None, prompts, 3, args)
    theirs = online_dpo.draw(model, base, prompts, 3, args)
    assert torch.equal(ours.completion_ids, theirs.completion_ids)
    gap = (ours.logps - online_dpo.reference_logps(model, base, ours, args)).abs() * ours.completion_mask
    assert gap[1::2].max() < 1e-4 < 0.1 < gap[::2].max()  # every second completion is the reference's


# whole runs


RUN = dict(task="sort", num_prompts=4, micro_batch_size=8, max_steps=3, eval_prompts=4, eval_every=0, eval_samples=1,
           device="cpu", threads=1)  # fmt: skip


def run(folder, **settings) -> list[dict]:
    torch.set_default_dtype(torch.float32)
    return online_dpo.train(online_dpo.Args(**RUN | dict(output_dir=str(folder)) | settings))


@pytest.mark.parametrize("alpha", [0.0, 1e-3])
def test_the_first_step_is_at_the_reference(alpha, tmp_path):
    """Up to rounding, for the reference is a model of its own: kl and margin are 0. Then they are not."""
    history = run(tmp_path, num_prompts=32, micro_batch_size=32, xpo_alpha=alpha)
    assert abs(history[1]["kl"]) < 1e-5 and abs(history[1]["margin"]) < 1e-6
    assert abs(history[3]["kl"]) > 1e-3 and abs(history[3]["margin"]) > 1e-3
    assert all(row["sampler_gap"] < 1e-5 for row in history[1:])
    for row in history[1:]:
        assert row["frac_ties"] == row["frac_zero_std"]
        columns = [name for name in row if name not in ("step", "learning_rate") and "/" not in name]
        assert len(columns) == 11


def test_with_xpo_the_logged_reward_is_the_policy_s(tmp_path, monkeypatch):
    """Rewards that tell the two apart: 1 for the policy's completions, 3 for the reference's."""
    (tmp_path / "rewards.py").write_text(
        "def turn(completions, **kwargs):\n    return [1.0 + 2 * (i % 2) for i in range(len(completions))]\n"
    )
    spec = (f"{tmp_path / 'rewards.py'}:turn",)
    xpo = run(tmp_path / "runs", reward=spec, xpo_alpha=1e-3)
    assert [row["reward"] for row in xpo[1:]] == [1.0] * 3 and xpo[1]["reward/turn"] == 2.0
    assert xpo[1]["frac_ties"] == 0.0
    assert run(tmp_path / "runs", reward=spec)[1]["reward"] == 2.0


def test_rewards_that_are_never_known(tmp_path):
    (tmp_path / "rewards.py").write_text("def none(completions, **kwargs):\n    return [None] * len(completions)\n")
    history = run(tmp_path / "runs", reward=(f"{tmp_path / 'rewards.py'}:none",))
    for row in history[1:]:
        assert row["frac_ties"] == 1.0 and row["grad_norm"] == 0.0 and abs(row["kl"]) < 1e-5
        assert not {"reward", "accuracy", "margin"} & row.keys()


def test_the_reference_stays_where_the_run_began(tmp_path, monkeypatch):
    """Its numbers for the last batch are those of the model that was loaded."""
    kept, update = [], online_dpo.update
    monkeypatch.setattr(online_dpo, "update", lambda *inputs: kept.append(inputs[2]) or update(*inputs))
    run(tmp_path, learning_rate=1e-2, precision="float32", max_completion_length=12, sample_batch_size=64)
    batch, start = kept[-1], load_model(online_dpo.Args())[0]
    with torch.no_grad():
        logps, _ = online_dpo.completion_logps(start, *batch.samples[:4])
    torch.testing.assert_close(batch.ref_logps, logps, rtol=0, atol=1e-5)
    assert ((batch.samples.logps - logps) * batch.samples.completion_mask).abs().max() > 1e-3
