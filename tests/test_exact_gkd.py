"""GKD and KDRL: divergences by hand, and the expected gradient of `update` by enumeration.

p is the student, q the teacher. At rate 1 an update adds minus the gradient of the loss to the student's table.
"""

import dataclasses
import math
import weakref

import numpy as np
import pytest
import torch
from groups import CASES, GROUPS, OTHER, TABLE, P, batches, close, make_batch, stale, stepping, twice
from helpers import command_line, metrics, new_run, user_error, write_rows
from reference.grpo import Rule, clipped
from tabular import PREFIXES, TabularLM, gradients, log_probs, log_softmax, probability
from test_invariance import llama
from tiny_runs import result
from torch.utils._python_dispatch import TorchDispatchMode

from algos import gkd
from tests.specs import SPECS
from utils.data import load_task
from utils.dist import pad_left
from utils.lm import TINY_MODEL, load_model, positions

L_MAX, B = 5, 0.3
KINDS = ["reverse", "forward", "jsd"]
PAIR = [torch.tensor([[0.5, 0.4, 0.1]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()]  # student, teacher
float64 = pytest.mark.usefixtures("float64")


def run_update(batch, beta=1.0, teacher=OTHER, **settings) -> tuple[np.ndarray, dict]:
    """The table's change in one call of update, over the rate; and its metrics."""
    given = dict(teacher=TabularLM(teacher).requires_grad_(False))
    return stepping(gkd, aggregation="constant", jsd_beta=B)(gkd.Batch(*batch[:2], beta), given=given, **settings)


def kl(first: np.ndarray, second: np.ndarray) -> float:
    return (np.exp(first) * (first - second)).sum()


def slope_at(logits: np.ndarray, teacher: np.ndarray, kind: str) -> tuple[float, np.ndarray]:
    """Divergence at one state and its gradient in the student's logits: dJ/dp = (1 - b) log(p / m), and so on."""
    p, q = log_softmax(logits), log_softmax(teacher)
    if kind == "forward":
        return kl(q, p), np.exp(p) - np.exp(q)
    mixture = q if kind == "reverse" else np.log(B * np.exp(q) + (1 - B) * np.exp(p))
    value = kl(p, q) if kind == "reverse" else B * kl(q, mixture) + (1 - B) * kl(p, mixture)
    per_token = (p - mixture) * (1 if kind == "reverse" else 1 - B)
    return value, np.exp(p) * (per_token - (np.exp(p) * per_token).sum())


def distilled(beta: float, values: list) -> Rule:
    """Minus beta times the divergence of the states before each token up to and including EOS, and of no others.
    `values` gets its values, or those of its estimate."""

    def extra(row, table, s) -> np.ndarray:
        gradient, (hot, other) = np.zeros((len(row.c), *table.shape)), (t / s.temperature for t in (table, OTHER))
        gaps = log_probs(hot, row.p, row.c) - log_probs(other, row.p, row.c)
        for t, score in enumerate(gradients(hot, row.p, row.c)):
            place = row.p, PREFIXES.index(row.c[:t])
            full = slope_at(hot[place], other[place], s.divergence)
            value, gradient[t][place] = full if s.estimator == "full" else (gaps[t], gaps[t] * score[place])
            values.append(value)

        return -beta * gradient / s.temperature

    return Rule(slope=lambda d, a, s: [s.reward_weight * clipped(d, a, s)[0], clipped(d, a, s)[1]], extra=extra)


@float64
@pytest.mark.parametrize("kind, estimator", [*((kind, "full") for kind in KINDS), ("reverse", "sampled")])
@pytest.mark.parametrize("reward_weight", [0.0, 2.0])
@stale
def test_updates_equal_the_reference_s(case, reward_weight, kind, estimator):
    """Both at the temperature; KDRL is the sum of both."""
    values, teacher = [], TabularLM(OTHER).requires_grad_(False)
    metrics = twice(gkd, distilled(0.7, values), case, ref=None, made=lambda batch, _: gkd.Batch(*batch[:2], 0.7),
                    given=dict(teacher=teacher), divergence=kind, estimator=estimator, jsd_beta=B,
                    reward_weight=reward_weight)  # fmt: skip
    close(metrics["divergence"], np.mean(values[-len(values) // CASES[case]["num_iterations"] :]))


def of_states(kind: str) -> np.ndarray:
    """sum over states of P(state) grad D, as a movement: what is left out is how the states come about."""
    moved = np.zeros_like(TABLE)
    for p in range(P):
        for i, prefix in enumerate(PREFIXES):
            slope = slope_at(TABLE[p, i], OTHER[p, i], kind)[1]
            moved[p, i] = -probability(TABLE, p, prefix) * slope / (P * L_MAX)
    return moved


def expected_movement(**settings) -> np.ndarray:
    zero = [[0.0]] * P
    return sum(weight * run_update(make_batch(groups, zero), **settings)[0] for groups, weight in batches(1, False))


@float64
@pytest.mark.parametrize("kind", KINDS)
def test_the_expected_gradient_is_that_of_each_state_s_divergence(kind):
    close(expected_movement(divergence=kind), of_states(kind))


@float64
def test_the_sampled_estimator_has_the_same_expectation():
    """And single answers do not: it is noisy where the full one is exact."""
    close(expected_movement(estimator="sampled"), of_states("reverse"))
    batch = make_batch(GROUPS, [[0.0] * 3] * P)
    assert abs(run_update(batch, estimator="sampled")[0] - run_update(batch)[0]).max() > 0.01


def test_divergences_by_hand():
    """The generalised Jensen-Shannon divergence goes to 0 at both ends. Over b or 1 - b it goes to a KL, which TRL has
    there."""
    forward = 0.25 * math.log(0.25 / 0.5) + 0.25 * math.log(0.25 / 0.4) + 0.5 * math.log(0.5 / 0.1)
    reverse = 0.5 * math.log(0.5 / 0.25) + 0.4 * math.log(0.4 / 0.25) + 0.1 * math.log(0.1 / 0.5)
    student, teacher = (x.double() for x in PAIR)

    def value(kind: str, b: float = 0.5) -> float:
        return gkd.divergence(student, teacher, kind, b).item()

    assert value("forward") == pytest.approx(forward) and value("reverse") == pytest.approx(reverse)
    for b in (1e-6, 1 - 1e-6):
        assert 0 < value("jsd", b) < 2e-6
    assert value("jsd", 1e-6) / 1e-6 == pytest.approx(forward, rel=1e-4)
    assert value("jsd", 1 - 1e-6) / 1e-6 == pytest.approx(reverse, rel=1e-4)


@float64
def test_at_tokens_cuts_a_padded_vocabulary():
    """What stands beyond the narrower of the two is no token. Entropy has no gradient."""
    generator, args = torch.Generator().manual_seed(0), gkd.Args(temperature=0.7)
    ids, logits, teacher = torch.tensor([0, 2, 3, 1]), *torch.randn(2, 4, 6, generator=generator)
    logits.requires_grad_()
    expected = gkd.at_tokens(ids, logits[:, :4], teacher[:, :4], args)
    for one, other in (logits[:, :4], teacher), (logits, teacher[:, :4]):
        close(torch.stack(gkd.at_tokens(ids, one, other, args)).detach(), torch.stack(expected).detach())
    logps = (logits[:, :4] / 0.7).log_softmax(-1)
    close(expected[0].detach(), logps[range(4), ids].detach())
    close(expected[1], -(logps.exp() * logps).sum(-1).detach())
    assert not expected[1].requires_grad


@float64
@stale
def test_without_a_teacher_it_is_grpo(case):
    twice(gkd, Rule(), case, ref=None, made=lambda batch, _: gkd.Batch(*batch[:2], 0.0), given=dict(teacher=None),
          reward_weight=1.0)  # fmt: skip


@float64
def test_answers_that_were_not_sampled_have_no_old_policy():
    """NaN in their log-probabilities: the divergence is the same, and nothing else becomes NaN."""
    batch = make_batch(GROUPS, [[0.0] * 3] * P)
    unknown = batch._replace(samples=batch.samples._replace(logps=batch.samples.logps * math.nan))
    moved, found = run_update(unknown, num_iterations=2)
    close(moved, run_update(batch, num_iterations=2)[0])
    assert found["sampler_gap"] == found["approx_kl"] == 0 and all(map(math.isfinite, found.values()))


COMPARED = dict(temperature=0.7, divergence="jsd", jsd_beta=B, precision="float32")


@float64
@pytest.mark.parametrize("elements", [1, 10**6])
def test_compared_logits_are_those_of_whole_passes(elements, monkeypatch):
    """Of student and teacher, in chunks of one token or in one: values at each token, and the student's gradient."""
    monkeypatch.setattr(gkd, "CHUNK", elements)
    student, teacher = llama(), llama()
    with torch.no_grad():
        teacher.lm_head.weight.mul_(-2)
    teacher.requires_grad_(False)
    args, own = gkd.Args(**COMPARED), torch.tensor([[True] * 3, [True, False, False], [True, True, False], [True] * 3])
    inputs = *pad_left([[2, 3, 4], [5]], "cpu"), torch.arange(12).view(4, 3) + 2, own
    ids, mask = (torch.cat([a.repeat_interleave(2, 0), b], 1) for a, b in zip(inputs[:2], inputs[2:]))

    def whole(model):
        return model(ids, attention_mask=mask.long(), position_ids=positions(mask)).logits[:, -4:-1][own]

    weights, slopes, values = torch.linspace(-1, 1, 3 * own.sum()).view(3, -1), [], []
    for found in ([x[own] for x in gkd.compare(student, teacher, inputs, args)],
                  gkd.at_tokens(inputs[2][own], whole(student), whole(teacher), args)):  # fmt: skip
        student.zero_grad()
        (torch.stack(found) * weights).sum().backward()
        slopes.append(torch.cat([p.grad.flatten() for p in student.parameters()]))
        values.append(torch.stack(found).detach())
    torch.testing.assert_close(*values, rtol=0, atol=1e-10)
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-10)
    assert slopes[0].abs().max() > 1e-3
    assert not gkd.compare(student, teacher, inputs, args)[2][~own].any()


class Logits(TorchDispatchMode):
    """Counts the elements of the living tensors as wide as a vocabulary, but for weights, which have `other` rows."""

    def __init__(self, width: int, other: int):
        super().__init__()
        self.width, self.other, self.now, self.most, self.seen = width, other, 0, 0, set()

    def drop(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            shape = tuple(getattr(tensor, "shape", ()))
            if len(shape) == 2 and shape[1] == self.width and shape[0] != self.other:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen.add(storage._cdata)
                    self.now += tensor.numel()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self.drop, storage._cdata, tensor.numel())
        return out


def test_compared_logits_are_held_in_chunks(monkeypatch):
    """However many tokens there are: CHUNK / 4 of each model, times the copies that `at_tokens` makes."""
    config = llama().config
    config.vocab_size = 1000
    student, teacher, peaks = type(llama())(config), type(llama())(config).requires_grad_(False), []
    monkeypatch.setattr(gkd, "CHUNK", 16 * 1000)  # four tokens
    for length in 8, 64:
        ids = torch.zeros(2, length, dtype=torch.long)
        with Logits(1000, config.hidden_size) as counted:
            inputs = *pad_left([[1, 2], [3]], "cpu"), ids, ids == 0
            gkd.compare(student, teacher, inputs, gkd.Args(**COMPARED))[2].sum().backward()
        peaks.append(counted.most)
    assert 2 * 4 * 1000 <= peaks[0] == peaks[1] <= 24 * 4 * 1000


def test_the_whole_run_without_a_teacher_is_grpo_s():
    """KDRL with --teacher-beta 0; rows, weights, evaluation."""
    flags = SPECS["gkd"].flags | dict(beta=0.0)
    ours = result("gkd", flags | dict(teacher_beta=0.0, teacher_beta_end=None, reward_weight=1.0))
    theirs = result("grpo", flags)
    assert ours.rows == theirs.rows and all(torch.equal(w, theirs.weights[name]) for name, w in ours.weights.items())


def test_the_weight_falls_linearly():
    args = gkd.Args(teacher_beta=5e-3, teacher_beta_end=1e-3, max_steps=5)
    close([gkd.weight_at(step, args) for step in (1, 2, 3, 5)], [5e-3, 4e-3, 3e-3, 1e-3])
    assert {gkd.weight_at(step, gkd.Args(max_steps=9)) for step in range(1, 10)} == {1.0}
    assert gkd.weight_at(1, gkd.Args(teacher_beta_end=0.0, max_steps=1)) == 1.0


def test_given_answers_are_laid_out_like_sampled_ones():
    """Prompts padded on the left, answers on the right, EOS behind them unless they are cut."""
    _, tokenizer = load_model(gkd.Args())
    rows = [{"prompt": "S21:", "solution": "12"}, {"prompt": "S4321:", "solution": "1234"},
            {"prompt": "S21:", "solution": "123456"}]  # fmt: skip
    samples = gkd.given(rows, "solution", tokenizer, [1], 4, "cpu")
    ids = tokenizer.get_vocab()
    cut = [ids[x] for x in "1234"]
    assert samples.completion_ids.tolist() == [[ids["1"], ids["2"], 1, 0], cut, cut]
    assert samples.completion_mask.tolist() == [[True, True, True, False], [True] * 4, [True] * 4]
    assert samples.prompt_mask.tolist() == [[False] * 2 + [True] * 4, [True] * 6, [False] * 2 + [True] * 4]
    assert samples.prompt_ids[0, 2:].tolist() == [ids[x] for x in "S21:"]
    assert samples.ended.tolist() == [True, False, False] and samples.logps.isnan().all()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_whose_answers_a_step_has(share):
    """A coin for each step, tossed by seed and step alone. A step of the dataset's has as many rows as completions, and
    the next such step other ones."""
    model, tokenizer = load_model(gkd.Args())
    task, own, seen = load_task("sort"), [], []

    def score(rows, texts, *_) -> tuple[torch.Tensor, dict]:
        return torch.tensor([float(t == row["completion"]) for row, t in zip(rows, texts)]), {}

    args = gkd.Args(task="sort", num_prompts=2, num_generations=3, max_completion_length=9, student_share=share,
                    sample_batch_size=6, precision="float32")  # fmt: skip
    for step in range(1, 41):
        samples, rewards, _ = gkd.collect(model, tokenizer, task, score, step, args)
        own.append(not samples.logps.isnan().any())
        assert len(samples.prompt_ids) == (2 if own[-1] else 6) and len(samples.completion_ids) == 6
        assert own[-1] or rewards.tolist() == [1.0] * 6
        prompts = [tokenizer.decode(ids[mask]) for ids, mask in zip(samples.prompt_ids, samples.prompt_mask)]
        seen += [] if own[-1] else prompts
    assert abs(sum(own) / 40 - share) < 0.25 * (share == 0.5) + 1e-9
    assert len(set(seen)) >= 0.9 * len(seen)


def test_a_step_on_data_learns_from_the_dataset(tmp_path):
    """lambda 0: completions of the file, which the student would hardly write."""
    rows = [{"prompt": f"S{i}:", "completion": "====CCCC"} for i in range(10, 50)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    flags = SPECS["gkd"].flags | dict(task=path, student_share=0.0, reward_weight=0.0, max_completion_length=12)
    rows = result("gkd", flags).rows
    assert [row["length"] for row in rows[1:]] == [9.0] * len(rows[1:])


def test_the_default_teacher_is_right_and_made_again():
    """SFT on solutions: more right than the start, and a function of the seed alone."""
    args = gkd.Args(task="sort", teacher_steps=8, max_completion_length=20, precision="float32")
    _, tokenizer = load_model(gkd.Args())
    task = load_task("sort")
    one, two = (gkd.load_teacher(tokenizer, task, args, torch.device("cpu")) for _ in range(2))
    assert all(torch.equal(p, q) and not p.requires_grad for p, q in zip(one.parameters(), two.parameters()))
    other = gkd.load_teacher(tokenizer, task, dataclasses.replace(args, seed=2), torch.device("cpu"))
    assert any(not torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters()))
    samples = gkd.given(task.heldout[:64], "solution", tokenizer, [1], 20, "cpu")
    start, _ = load_model(gkd.Args())
    with torch.no_grad():
        before, after = (gkd.completion_logps(m, *samples[:4])[0].sum(1).exp().mean().item() for m in (start, one))
    assert after > before + 0.2


SHORT = ["--task", "sort", "--device", "cpu", "--max-steps", "1", "--num-prompts", "2", "--num-generations", "2",
         "--eval-prompts", "2", "--eval-samples", "2", "--teacher-steps", "1"]  # fmt: skip


def test_the_teacher_is_evaluated_beside_the_start(tmp_path):
    first, last = metrics(new_run(gkd, tmp_path, *SHORT))
    assert {"teacher/greedy", "teacher/pass@1", "teacher/pass@2", "eval/pass@1"} <= first.keys()
    assert "divergence" in last and "frac_zero_std" not in last  # groups are not compared


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--teacher-beta", "0"], ["--teacher-beta 0", "--reward-weight 0"]),
        (["--student-share", "0.5", "--reward-weight", "1"], ["--reward-weight", "--student-share 1"]),
        (["--student-share", "0.5", "--estimator", "sampled"], ["--estimator sampled", "--student-share 1"]),
        (["--estimator", "sampled", "--divergence", "jsd"], ["--estimator sampled", "jsd"]),
        (["--reward-weight", "1", "--num-generations", "1"], ["--num-generations"]),
        (["--teacher", "/nowhere/model"], ["cannot load the model /nowhere/model"]),
        (["--teacher", "OTHER"], ["--teacher", "other tokens than --model", "same tokenizer"]),
        (["--teacher", "NARROW"], ["has a prompt of 6 tokens, and 3 are allowed"]),
        (["--model", "COPY"], ["--teacher is missing"]),
        (["--task", "rows.jsonl", "--reward", "r.py:one"], ["--teacher is missing"]),
        (["--task", "rows.jsonl", "--reward", "r.py:one", "--student-share", "0"], ["needs a completion"]),
    ],
)
def test_wrong_input_is_one_sentence(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"S{i}:"} for i in range(10, 30)])
    (tmp_path / "r.py").write_text("def one(completions, **_):\n    return [1.0] * len(completions)\n")
    model, tokenizer = load_model(gkd.Args())
    if "OTHER" in arguments:
        text = tokenizer.backend_tokenizer.to_str().replace('"7"', '"@"').replace('"3"', '"7"').replace('"@"', '"3"')
        tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(text)
    if "NARROW" in arguments:
        model.config.max_position_embeddings = 23
    for part in model, tokenizer:
        part.save_pretrained("made")
    given = [f"{tmp_path}/made" if word in ("COPY", "OTHER", "NARROW") else word for word in arguments]
    with user_error(capsys, *words):
        command_line(gkd, *SHORT, *given, "--output-dir", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_one_generation_is_enough_without_rewards(tmp_path):
    command_line(gkd, *SHORT, "--num-generations", "1", "--output-dir", tmp_path)


def test_own_prompts_need_no_reward(tmp_path, own_cache, capsys):
    """The teacher alone teaches, and no reward is logged; with a weight of rewards one is asked for."""
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"S{i}:"} for i in range(10, 40)])
    flags = ["--task", path, "--teacher", TINY_MODEL, "--max-steps", 2, "--num-prompts", 2, "--num-generations", 2,
             "--device", "cpu", "--student-share", 1]  # fmt: skip
    run = new_run(gkd, tmp_path / "runs", *flags, "--eval-every", 1)
    rows = metrics(run)
    assert rows[-1]["step"] == 2 and not [name for row in rows for name in row if "reward" in name or "eval" in name]
    with user_error(capsys, "cannot score answers itself: give --reward"):
        command_line(gkd, *flags, "--reward-weight", 1, "--output-dir", tmp_path / "none")
