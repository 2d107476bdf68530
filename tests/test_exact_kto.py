"""kto.py against the paper's formulas, and through `update` against an optimum found by other means.

The formulas are numpy's, in float64. The reference is another table than the policy, so that no log-ratio is 0.
"""

import numpy as np
import pytest
import torch
from pairs import TABLE, descends, items_of, logps_of, probabilities, samples_of
from reference.dpo import log_ratio
from reference.dpo import update as second_update
from scipy.optimize import minimize
from tabular import COMPLETIONS, PREFIXES, PROMPTS, TabularLM, minimised, random_table, sigma, slope

from algos import kto
from utils.dist import as_samples
from utils.lm import load_model

pytestmark = pytest.mark.usefixtures("float64")
REF = random_table(6)  # z is 1.05
SETTINGS = dict(beta=0.7, desirable_weight=1.3, undesirable_weight=0.6)
# (prompt, completion, desirable): both prompts, one and two tokens, both labels, one row twice; an odd number
ROWS = [(0, 0, True), (1, 4, False), (0, 5, False), (1, 6, True), (1, 2, True), (0, 5, False), (0, 3, True)]


def log_ratio_of(table, prompt: int, completion: int, ref=REF) -> float:
    return log_ratio(ref)(table, prompt, COMPLETIONS[completion])[0]


def reference_point(table, rows, ref=REF) -> float:
    """max(0, mean of h(x_i, y_i-1)), in numpy; Python's rows[-1] is the last one."""
    return max(0.0, float(np.mean([log_ratio_of(table, rows[i][0], rows[i - 1][1], ref) for i in range(len(rows))])))


def by_reference(table, rows, z, ref=REF):
    """Gradient and mean of the formula for a given z."""

    def loss(h, desirable) -> float:
        sign, weight = (1, "desirable_weight") if desirable else (-1, "undesirable_weight")
        return SETTINGS[weight] * (1 - sigma(sign * SETTINGS["beta"] * (h - z)))

    return second_update(table, items_of(rows, 1), loss, log_ratio(ref))


def batch_of(rows, ref=REF) -> kto.Batch:
    """Mismatched rows have the completion of the row before."""
    others = [(p, rows[n - 1][1]) for n, (p, *_) in enumerate(rows)]
    scored = [(samples_of(picks, 1), logps_of(picks, ref, 1)) for picks in (rows, others)]
    return kto.Batch(*scored[0], torch.tensor([label for *_, label in rows]), *scored[1])


# the loss


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
    assert np.mean([log_ratio_of(REF, ROWS[i][0], ROWS[i - 1][1], TABLE) for i in range(len(ROWS))]) < -0.2


@pytest.mark.parametrize("table, ref", [(TABLE, REF), (REF, TABLE)])
def test_update_descends_the_formula(table, ref):
    """The wiring: shift, mask, sums over tokens with the EOS, reference, z, sign, weights, mean over rows. And z has no
    gradient: one that had would move the table elsewhere."""
    z = reference_point(table, ROWS, ref)
    expected = by_reference(table, ROWS, z, ref)[0]
    metrics = descends(kto, batch_of(ROWS, ref), expected, lambda: TabularLM(table), max_length=64, **SETTINGS)
    moving = slope(lambda t: by_reference(t, ROWS, reference_point(t, ROWS, ref), ref)[1], table)
    assert (np.abs(moving - expected).max() > 1e-2) == (z > 0)
    h, labels = np.array([log_ratio_of(table, p, i, ref) for p, i, _ in ROWS]), np.array([label for *_, label in ROWS])
    margin = SETTINGS["beta"] * (h[labels].mean() - h[~labels].mean())
    own = {"z": z, "accuracy": np.mean((h > z) == labels), "margin": margin,
           "desirable_logratio": h[labels].mean(), "undesirable_logratio": h[~labels].mean()}  # fmt: skip
    assert {key: metrics[key] for key in own} == pytest.approx(own)


@pytest.mark.parametrize("size, tokens", [(1, 0), (4, 0), (2, 8), (50, 0)])
def test_the_reference_scores_every_token(size, tokens):
    samples, expected, *_ = batch_of(ROWS)
    args = kto.Args(micro_batch_size=size, micro_batch_tokens=tokens, precision="float32")
    torch.testing.assert_close(kto.reference_logps(None, TabularLM(REF), samples, args), expected)


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

    def value(x):
        gradient, loss, _ = by_reference(with_free(x), rows, 0.4)
        return loss, gradient[:, : len(PREFIXES)].ravel()

    start = REF[:, : len(PREFIXES)].ravel()
    found = minimize(value, start, jac=True, method="BFGS", options=dict(gtol=1e-7, maxiter=100))
    args = kto.Args(**SETTINGS, micro_batch_size=len(rows), max_length=64, max_grad_norm=1e9, precision="float32")
    table = minimised(kto.update, TabularLM(REF), batch_of(rows), args, 400, 0.1)
    pi, best, ref = (probabilities(t) for t in (table, with_free(found.x), REF))
    np.testing.assert_allclose(pi, best, atol=1e-3)
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
