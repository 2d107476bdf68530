"""kto.py against the paper's formulas, and through `update` against an optimum found by other means.

The formulas are numpy's, in float64. The reference is another table than the policy, so that no log-ratio is 0.
"""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from tabular import COMPLETIONS, OUTSIDE, PREFIXES, PROMPTS, TabularLM, log_probs, minimised, random_table, sigma, slope

from algos import kto
from utils.dist import as_samples
from utils.lm import load_model

pytestmark = pytest.mark.usefixtures("float64")
REF, TABLE = random_table(6), random_table(1)  # z is 1.05
SETTINGS = dict(beta=0.7, desirable_weight=1.3, undesirable_weight=0.6)
# (prompt, completion, desirable): both prompts, one and two tokens, both labels, one row twice; an odd number
ROWS = [(0, 0, True), (1, 4, False), (0, 5, False), (1, 6, True), (1, 2, True), (0, 5, False), (0, 3, True)]


def logp(table, prompt: int, completion: int) -> float:
    return log_probs(table, prompt, COMPLETIONS[completion]).sum()


def log_ratio(table, prompt: int, completion: int, ref=REF) -> float:
    return logp(table, prompt, completion) - logp(ref, prompt, completion)


def reference_point(table, rows, ref=REF) -> float:
    """max(0, mean of h(x_i, y_i-1)), in numpy; Python's rows[-1] is the last one."""
    return max(0.0, float(np.mean([log_ratio(table, rows[i][0], rows[i - 1][1], ref) for i in range(len(rows))])))


def objective(table, rows, z, beta, desirable_weight, undesirable_weight, ref=REF) -> float:
    """Mean of the formula for a given z, in numpy."""
    total = 0.0
    for p, i, desirable in rows:
        h = log_ratio(table, p, i, ref)
        if desirable:
            total += desirable_weight * (1 - sigma(beta * (h - z)))
        else:
            total += undesirable_weight * (1 - sigma(beta * (z - h)))
    return total / len(rows)


def batch_of(rows, ref=REF) -> kto.Batch:
    """Log-probabilities of the reference are numpy's; mismatched rows have the completion of the row before."""

    def scored(picks):
        tokens = [(PROMPTS[p], list(COMPLETIONS[i])) for p, i in picks]
        samples = as_samples(tokens, 64, "cpu")
        ref_logps = torch.zeros_like(samples.logps)
        for row, (p, i) in zip(ref_logps, picks):
            row[: len(COMPLETIONS[i])] = torch.tensor(log_probs(ref, p, COMPLETIONS[i]))
        return samples, ref_logps

    labels = torch.tensor([label for *_, label in rows])
    own, others = ([(p, rows[n - shift][1]) for n, (p, *_) in enumerate(rows)] for shift in (0, 1))
    return kto.Batch(*scored(own), labels, *scored(others))


def step(rows, table=TABLE, ref=REF, **settings) -> tuple[np.ndarray, dict]:
    """What one update by plain gradient descent with rate 1 subtracts from the table, and its metrics."""
    model = TabularLM(table)
    defaults = SETTINGS | dict(micro_batch_size=len(rows), max_length=64, max_grad_norm=1e9, precision="float32")
    args = kto.Args(**defaults | settings)
    metrics = kto.update(model, torch.optim.SGD(model.parameters(), 1.0), batch_of(rows, ref), args)
    return table - model.table.detach().numpy(), metrics


def movement(rows, **settings) -> np.ndarray:
    return step(rows, **settings)[0]


# the loss


@pytest.mark.parametrize("z", [0.0, 1.4])
def test_value_and_gradient(z):
    h = np.array([0.0, 1.7, -2.1, 6.0, 0.0, 1.7, -2.1, 6.0])
    labels = np.arange(8) < 4
    tensor = torch.tensor(h, requires_grad=True)
    loss = kto.kto_loss(tensor, torch.tensor(labels), torch.tensor(z), kto.Args(**SETTINGS))
    good, bad = sigma(0.7 * (h - z)), sigma(0.7 * (z - h))
    np.testing.assert_allclose(loss.detach(), np.where(labels, 1.3 * (1 - good), 0.6 * (1 - bad)), rtol=1e-12)
    loss.sum().backward()
    by_hand = np.where(labels, -1.3 * 0.7 * good * (1 - good), 0.6 * 0.7 * bad * (1 - bad))
    np.testing.assert_allclose(tensor.grad, by_hand, rtol=1e-12)


def test_large_log_ratios_stay_finite_in_float32():
    for far in (-500.0, 500.0):
        h = torch.tensor([far, far], dtype=torch.float32, requires_grad=True)
        loss = kto.kto_loss(h, torch.tensor([True, False]), torch.tensor(3.0, dtype=torch.float32), kto.Args(beta=1.0))
        loss.sum().backward()
        assert loss.isfinite().all() and h.grad.isfinite().all() and loss.sum().item() == pytest.approx(1)


# through update


def test_the_reference_point_is_positive_here():
    """So that the tests below say something about it, and is cut at 0 where the roles are exchanged."""
    assert reference_point(TABLE, ROWS) > 0.2
    assert reference_point(REF, ROWS, TABLE) == 0.0
    assert np.mean([log_ratio(REF, ROWS[i][0], ROWS[i - 1][1], TABLE) for i in range(len(ROWS))]) < -0.2


@pytest.mark.parametrize("table, ref", [(TABLE, REF), (REF, TABLE)])
def test_update_descends_the_formula(table, ref):
    """The wiring: shift, mask, sums over tokens with the EOS, reference, z, sign, weights, mean over rows. And z has no
    gradient: one that had would move the table elsewhere."""
    z = reference_point(table, ROWS, ref)
    expected = slope(lambda t: objective(t, ROWS, z, **SETTINGS, ref=ref), table)
    ours, metrics = step(ROWS, table, ref)
    assert metrics["z"] == pytest.approx(z, abs=1e-12)
    assert np.abs(expected).max() > 1e-2
    np.testing.assert_allclose(ours, expected, atol=1e-8)
    assert not ours[:, OUTSIDE].any(), "something after an EOS was trained"
    moving = slope(lambda t: objective(t, ROWS, reference_point(t, ROWS, ref), **SETTINGS, ref=ref), table)
    assert (np.abs(moving - expected).max() > 1e-2) == (z > 0)


@pytest.mark.parametrize("tokens", [0, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 50])
def test_micro_batches_change_nothing(size, tokens):
    """Seven rows: no size but 1 divides them, and with 2, 3 and 6 the last one holds a single row."""
    samples, expected, *_ = batch_of(ROWS)
    args = kto.Args(micro_batch_size=size, micro_batch_tokens=tokens, precision="float32")
    torch.testing.assert_close(kto.reference_logps(None, TabularLM(REF), samples, args), expected)
    ours, metrics = step(ROWS, micro_batch_size=size, micro_batch_tokens=tokens)
    whole, expected = step(ROWS)
    np.testing.assert_allclose(ours, whole, atol=1e-12)
    assert metrics == pytest.approx(expected, abs=1e-12)


@pytest.fixture
def z_fixed(monkeypatch):
    """z is 0.4 whatever the batch."""
    monkeypatch.setattr(kto, "score_examples", lambda *_: torch.tensor([0.4]))


def test_training_reaches_the_optimum(z_fixed):
    """With z fixed: the same policies as scipy finds for the formula over the free entries of the table, and at them
    the first-order condition, by hand: where a completion is desirable d and undesirable u times,
    (w_D d - w_U u) beta s (1 - s) / pi is the same for all completions of a prompt, s = sigmoid(beta (h - z))."""
    generator = np.random.default_rng(4)
    counts = generator.integers(1, 4, size=(len(PROMPTS), len(COMPLETIONS), 2))
    counts[..., 0] += 2 * counts[..., 1]  # all pull upwards, some more, so that no probability goes to 0
    rows = [(p, i, label) for p in range(len(PROMPTS)) for i in range(len(COMPLETIONS))
            for label, n in zip((True, False), counts[p, i]) for _ in range(n)]  # fmt: skip
    free = REF[:, : len(PREFIXES)].shape

    def with_free(x):
        table = REF.copy()
        table[:, : len(PREFIXES)] = x.reshape(free)
        return table

    def value(x):  # each completion once, for speed
        sums = [objective(with_free(x), [(p, i, label)], 0.4, **SETTINGS) * counts[p, i, int(not label)]
                for p in range(len(PROMPTS)) for i in range(len(COMPLETIONS)) for label in (True, False)]  # fmt: skip
        return sum(sums) / len(rows)

    start = REF[:, : len(PREFIXES)].ravel()
    found = minimize(value, start, method="BFGS", options=dict(gtol=1e-7, maxiter=100))
    args = kto.Args(**SETTINGS, micro_batch_size=len(rows), max_length=64, max_grad_norm=1e9, precision="float32")
    table = minimised(kto.update, TabularLM(REF), batch_of(rows), args, 400, 0.1)
    pi, best = (
        np.exp([[logp(t, p, i) for i in range(len(COMPLETIONS))] for p in range(len(PROMPTS))])
        for t in (table, with_free(found.x))
    )
    np.testing.assert_allclose(pi, best, atol=1e-3)
    ref = np.exp([[logp(REF, p, i) for i in range(len(COMPLETIONS))] for p in range(len(PROMPTS))])
    assert np.abs(pi - ref).max() > 0.02
    s = sigma(SETTINGS["beta"] * (np.log(pi / ref) - 0.4))
    pull = (
        (SETTINGS["desirable_weight"] * counts[..., 0] - SETTINGS["undesirable_weight"] * counts[..., 1]) * s * (1 - s)
    )
    np.testing.assert_allclose(pull / pi / (pull / pi).mean(1, keepdims=True), 1, atol=0.01)


def test_metrics_by_hand():
    ratios, labels = torch.tensor([2.0, 0.0, -1.0, -2.0]), torch.tensor([True, True, False, False])
    assert kto.label_metrics(ratios, labels, 0.5) == {"margin": 0.5 * (1 + 1.5), "desirable_logratio": 1.0,
                                                      "undesirable_logratio": -1.5}  # fmt: skip
    _, metrics = step(ROWS)
    h, z = [log_ratio(TABLE, p, i) for p, i, _ in ROWS], reference_point(TABLE, ROWS)
    right = [(ratio > z) == label for ratio, (*_, label) in zip(h, ROWS)]
    assert metrics["accuracy"] == pytest.approx(np.mean(right))
    good, bad = (np.mean([r for r, (*_, d) in zip(h, ROWS) if d == label]) for label in (True, False))
    assert metrics["margin"] == pytest.approx(0.7 * (good - bad))


# on a real model


def test_padding_and_length():
    """Log-probabilities beside a longer row are those of a row alone; what would be too long is cut."""
    model, args = load_model(kto.Args())[0].double(), kto.Args(micro_batch_size=8, max_length=14, precision="float32")
    rows = [([5, 6], [9, 1]), ([7], [4, 4, 4, 1]), ([3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 10, 11, 12, 1])]
    samples = as_samples(rows, args.max_length, "cpu")
    logps = kto.score_examples(model, samples, torch.zeros_like(samples.logps), args)
    by_hand = []
    for prompt, completion in rows:
        all_logps = model(input_ids=torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        by_hand.append(sum(all_logps[len(prompt) - 1 + i, token].item() for i, token in enumerate(completion)))
    np.testing.assert_allclose(logps.numpy(), by_hand, atol=1e-5)  # its norms are float32
    args.max_length = 9
    samples = as_samples(rows, args.max_length, "cpu")
    cut = [ids[mask].tolist() for ids, mask in zip(samples.completion_ids, samples.completion_mask)]
    assert cut == [[9, 1], [4, 4, 4, 1], [10, 11]]


def test_a_run_mismatches_rows_and_keeps_its_reference(tmp_path, monkeypatch):
    """The references are what the model itself says, bit for bit, of matched and of mismatched rows; those of the
    third step, in the second epoch, are still of the model that was loaded. Labels are those of the task."""
    torch.set_default_dtype(torch.float32)
    batches, update = [], kto.update
    monkeypatch.setattr(kto, "update", lambda *args: batches.append(args[2]) or update(*args))
    history = kto.train(kto.Args(task="sort", num_pairs=10, batch_size=9, micro_batch_size=4, max_steps=5, eval_every=0,
                                 eval_prompts=6, eval_samples=1, threads=1, device="cpu", learning_rate=1e-4,
                                 output_dir=str(tmp_path)))  # fmt: skip
    assert history[0]["eval/margin"] == 0.0
    assert history[1]["margin"] == history[1]["z"] == 0.0 and history[1]["accuracy"] == 0.5
    assert history[1]["desirable_logratio"] == 0.0 < history[3]["margin"]
    model, tokenizer = load_model(kto.Args())

    def tokens(samples) -> list[tuple]:
        prompts = [ids[mask] for ids, mask in zip(samples.prompt_ids, samples.prompt_mask)]
        return [(p, ids[m]) for p, ids, m in zip(prompts, samples.completion_ids, samples.completion_mask)]

    for samples, ref_logps, labels, mismatched, other_logps in (batches[0], batches[2], batches[4]):
        rows, others = tokens(samples), tokens(mismatched)
        for i, (prompt, completion) in enumerate(rows):
            digits, answer = tokenizer.decode(prompt)[1:-1], tokenizer.decode(completion[:-1])
            assert labels[i] == (answer == "".join(sorted(digits)))
            assert others[i][0].equal(prompt) and others[i][1].equal(rows[i - 1][1])
        for found, expected in ((rows, ref_logps), (others, other_logps)):
            for (prompt, completion), own in zip(found, expected):
                ids = torch.cat([prompt, completion])
                with torch.no_grad():
                    logps = model(input_ids=ids[None]).logits[0].log_softmax(-1)
                by_hand = logps[len(prompt) - 1 : -1].gather(1, completion[:, None])[:, 0]
                torch.testing.assert_close(own[: len(completion)], by_hand, rtol=0, atol=1e-3)
