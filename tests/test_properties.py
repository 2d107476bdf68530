"""Properties of the pure functions that hold for every input: finite results, invariances that mathematics demands, or
an error that names what is wrong. A function is found by its name and parameters in all scripts, and equal copies are
tested once, so that a new script needs no row here. Values are compared with closed forms in test_exact_*.py.

Hypothesis draws the same examples in every run and keeps no database.
"""

import ast
import importlib
import inspect
import json
import math
import random
import tempfile
from collections import Counter
from dataclasses import make_dataclass
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import REPO
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.extra import numpy as hnp
from torch import Tensor
from torch.testing import assert_close

from algos import dpo, dt, iql, ppo, ppo_lm, rloo, sac
from utils import tasks
from utils.errors import BOUNDS, UserError, check_numbers
from utils.evaluation import mean, pass_at_k
from utils.lm import Means, Samples, join, pad_left, positions, token_logps
from utils.normalize import RunningMeanStd
from utils.offline import Dataset
from utils.preferences import Batches, shared_prefix
from utils.replay import ReplayBuffer
from utils.rewards import Scored, make_scorer
from utils.run import Run, crosses
from utils.schedule import learning_rate
from utils.spaces import to_env, to_unit

set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "plainrl-hypothesis")  # not into the repository
quick = settings(
    derandomize=True, database=None, deadline=None, max_examples=25, suppress_health_check=list(HealthCheck)
)
MODULES = [importlib.import_module(f"algos.{path.stem}") for path in sorted((REPO / "algos").glob("*.py"))]
NAN = float("nan")


def every(name: str, *parameters: str):
    """Parametrises a test over the functions of this name and parameters in algos/, one of each that are equal."""
    found = {}
    for module in MODULES:
        function = getattr(module, name, None)
        if function is None or function.__module__ != module.__name__:
            continue
        if tuple(inspect.signature(function).parameters) == parameters:
            tree = ast.parse(inspect.getsource(function)).body[0]
            tree.body = tree.body[ast.get_docstring(tree) is not None :]
            found.setdefault(ast.dump(tree), pytest.param(function, id=module.__name__.removeprefix("algos.")))
    assert found, f"no script has a function {name}({', '.join(parameters)})"
    return pytest.mark.parametrize(name, found.values())


# --- what is drawn ---


def floats(low: float, high: float):
    return st.floats(low, high, allow_subnormal=False)


@st.composite
def tensors(draw, *shape: int, low: float = -100.0, high: float = 100.0, dtype=torch.float64):
    return torch.from_numpy(draw(hnp.arrays(np.float64, shape, elements=floats(low, high)))).to(dtype)


@st.composite
def groups(draw, low: float = -1e3, high: float = 1e3, unknown: bool = True, at_least: int = 2):
    """Rewards (P, G): one prompt or several, often equal, some unknown."""
    shape = draw(st.integers(1, 4)), draw(st.integers(at_least, 6))
    values = [floats(low, high), st.sampled_from([0.0, 1.0])] + [st.just(NAN)] * unknown
    return torch.from_numpy(draw(hnp.arrays(np.float64, shape, elements=st.one_of(values))))


@st.composite
def masks(draw, empty: bool = True):
    """Completions (B, T) that end somewhere: no token, one, or more."""
    width = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0 if empty else 1, width), min_size=1, max_size=5))
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def permutation(draw, n: int) -> Tensor:
    return torch.tensor(draw(st.permutations(range(n))))


data = st.data()


# --- rewards and advantages of groups ---

SCALES = st.sampled_from(["group", "batch", "none"])


@every("advantages", "rewards", "scale")
@quick
@given(groups(), SCALES, data)
def test_group_advantages(advantages, rewards, scale, data):
    """Finite, 0 where unknown, 0 on average in every group, equivariant to the order of groups and within them,
    unchanged by a constant that is added to a group; unknown rewards are as if they had not been there."""
    out = advantages(rewards, scale)
    assert out.shape == rewards.shape and out.isfinite().all() and not out[rewards.isnan()].any()
    assert_close(out.sum(1), torch.zeros(len(out)).double(), rtol=0, atol=1e-6)
    rows, columns = (permutation(data.draw, n) for n in rewards.shape)
    assert_close(advantages(rewards[rows][:, columns], scale), out[rows][:, columns], rtol=1e-6, atol=1e-6)
    shift = data.draw(tensors(len(rewards), 1)) if scale != "batch" else 7.0
    assert_close(advantages(rewards + shift, scale), out, rtol=1e-6, atol=1e-6)
    if scale == "none":
        assert_close(advantages(-3 * rewards, scale), -3 * out)
    if scale == "group":
        known = ~rewards[0].isnan()
        assert_close(advantages(rewards[:1, known], scale)[0] if known.any() else out[0, known], out[0, known])
        assert out.abs().max() <= (rewards.shape[1] - 1) / rewards.shape[1] ** 0.5


@every("advantages", "rewards", "scale")
@quick
@given(st.integers(1, 9), floats(-1e30, 1e30), SCALES)
def test_equal_rewards_teach_nothing(advantages, size, value, scale):
    """Exactly nothing, in the precision of training, however large they are."""
    rewards = torch.full((2, size), value, dtype=torch.float32)
    rewards[1, 0] = NAN
    assert not advantages(rewards, scale).any()


@every("advantages", "rewards", "scale")
@quick
@given(groups(-1e15, 1e15), SCALES)
def test_large_rewards_stay_finite(advantages, rewards, scale):
    assert advantages(rewards.float(), scale).isfinite().all()


@every("advantages", "rewards")
@quick
@given(groups(), data)
def test_leave_one_out_advantages(advantages, rewards, data):
    """A baseline does not depend on the completion's own reward; 0 where unknown or alone, 0 on average; equivariant
    to order, shift and scale; unknown rewards are as if they had not been there."""
    out, known = advantages(rewards), ~rewards.isnan()
    assert out.shape == rewards.shape and out.isfinite().all()
    assert not out[~known].any() and not out[known.sum(1) == 1].any()
    assert_close(out.sum(1), torch.zeros(len(out)).double(), rtol=0, atol=1e-8)
    rows, columns = (permutation(data.draw, n) for n in rewards.shape)
    assert_close(advantages(rewards[rows][:, columns]), out[rows][:, columns])
    assert_close(advantages(-2 * rewards + data.draw(tensors(len(rewards), 1))), -2 * out, rtol=1e-7, atol=1e-7)
    for i in known[0].nonzero()[:1, 0] if known[0].sum() > 1 else []:
        other = rewards.clone()
        other[0, i] += 5
        assert_close(other[0, i] - advantages(other)[0, i], rewards[0, i] - out[0, i])
    assert_close(advantages(rewards[:1, known[0]])[0], out[0, known[0]])


@every("zero_std", "groups")
@quick
@given(groups(), data)
def test_zero_std(zero_std, groups, data):
    """As many values as there are different known rewards; order does not matter."""
    expected = [len({x for x in group if not math.isnan(x)}) < 2 for group in groups.tolist()]
    assert zero_std(groups).tolist() == expected
    assert zero_std(groups[:, permutation(data.draw, groups.shape[1])]).tolist() == expected


@quick
@given(
    st.lists(st.sampled_from([None, 0.0, 1, 2.5, 1e39, 3e38, NAN, math.inf, -math.inf]), min_size=1, max_size=4),
    st.sampled_from([1.0, -1.0, 1e5]),
)
def test_rewards_are_finite_unknown_or_refused(values, weight):
    """Whatever a function returns, in the float32 that advantages are computed in."""
    task = SimpleNamespace(name="any", score=None)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.py").write_text(f"inf, nan = float('inf'), float('nan')\ndef f(**_): return {values!r}\n")
        score = make_scorer(task, (f"{folder}/mine.py:f",), (weight,), 1)
    inputs = [{}] * len(values), ["p"] * len(values), ["t"] * len(values), [[1]] * len(values), 1
    if all(x is None or math.isfinite(x) and abs(x * weight) < 3.4e38 for x in values):
        rewards = score(*inputs).rewards
        assert [None if math.isnan(x) else x for x in rewards.tolist()] == [
            None if x is None else pytest.approx(x * weight) for x in values
        ]
    else:
        with pytest.raises(UserError, match="reward"):
            score(*inputs)


# --- losses of tokens ---


@every("token_weights", "mask", "aggregation", "max_completion_length")
@quick
@given(masks(), st.sampled_from(["sequence", "token", "constant"]), data)
def test_token_weights(token_weights, mask, aggregation, data):
    """Finite also without any token; what they sum to; 0 outside the mask; more padding and another order change
    nothing."""
    mask = mask.double()
    weights = token_weights(mask, aggregation, 7)
    total = {
        "sequence": mask.any(1).double().mean(),
        "token": mask.any().double(),
        "constant": mask.sum() / (7 * len(mask)),
    }[aggregation]
    assert weights.isfinite().all() and not weights[mask == 0].any()
    assert_close(weights.sum(), total)
    assert_close(token_weights(torch.nn.functional.pad(mask, (0, 3)), aggregation, 7)[:, :-3], weights)
    order = permutation(data.draw, len(mask))
    assert_close(token_weights(mask[order], aggregation, 7), weights[order])


CLIPS = st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.01, 1.0)])


@every("policy_loss", "logps", "old_logps", "advantages", "low", "high")
@quick
@given(tensors(3, 4, low=-80, high=80), tensors(3, 1), CLIPS)
def test_clipped_surrogate(policy_loss, ratios, advantages, clips):
    """Finite for ratios up to e^80 in float32; never better than the ratio itself nor than its clip; the gradient is
    that of the ratio, and 0 exactly where the clip is said to cut it; -A at ratio 1."""
    logps = ratios.clone().requires_grad_()
    loss, clipped = policy_loss(logps, torch.zeros(3, 4).double(), advantages, *clips)
    (gradient,) = torch.autograd.grad(loss.sum(), logps)
    plain = -ratios.exp() * advantages
    assert ((loss >= plain) | torch.isclose(loss, plain)).all()
    assert_close(gradient, torch.where(clipped, 0.0, plain))
    assert not clipped[(ratios > math.log1p(-clips[0])) & (ratios < math.log1p(clips[1]))].any()
    loss, clipped = policy_loss(ratios.float(), ratios.float(), advantages.float(), *clips)
    assert torch.equal(loss, -advantages.float().expand(3, 4)) and not clipped.any()
    loss, _ = policy_loss(ratios.float(), torch.zeros(3, 4), advantages.float(), *clips)
    assert loss.isfinite().all()


@every("k3", "logps", "ref_logps")
@quick
@given(tensors(3, 4, low=-40, high=0), tensors(3, 4, low=-40, high=0), floats(-20, 20))
def test_k3(k3, logps, ref_logps, shift):
    """Never negative, 0 for equals alone, a function of the difference, and of gradient 1 - pi_ref / pi."""
    value = k3(logps.requires_grad_(), ref_logps)
    assert (value >= 0).all() and not k3(logps, logps).any() and k3(logps.float(), ref_logps.float()).isfinite().all()
    assert (value[(logps - ref_logps).abs() > 1e-3] > 0).all()
    assert_close(k3(logps + shift, ref_logps + shift), value, rtol=1e-9, atol=1e-9)
    (gradient,) = torch.autograd.grad(value.sum(), logps)
    assert_close(gradient, 1 - (ref_logps - logps).exp())


@every("sft_loss", "logps", "mask", "total")
@quick
@given(masks(), data)
def test_sft_loss(sft_loss, mask, data):
    """The mean over tokens however the batch is split; what is under the mask counts, and nothing else."""
    logps = data.draw(tensors(*mask.shape, low=-50, high=0))
    total = max(1, int(mask.sum()))
    loss = sft_loss(logps, mask, total)
    assert loss.isfinite() and loss >= 0
    assert_close(loss, sum(sft_loss(logps[i : i + 1], mask[i : i + 1], total) for i in range(len(mask))))
    assert torch.equal(loss, sft_loss(torch.where(mask, logps, -1e30), mask, total))
    assert_close(sft_loss(logps - 2, mask, total), loss + 2 * mask.sum() / total)


@every("penalised", "batch", "beta")
@quick
@given(masks(), data)
def test_penalised_rewards(penalised, mask, data):
    """Unknown ones stay unknown; equal models cost nothing; tokens behind the end do not count."""
    logps, ref = (data.draw(tensors(*mask.shape, low=-50, high=0)) for _ in range(2))
    rewards = data.draw(tensors(len(mask)))
    rewards[0] = NAN
    samples = Samples(None, None, None, mask, logps, None)
    batch = rloo.Batch(samples, rewards, ref)
    out = penalised(batch, 0.1)
    assert out[0].isnan() and out[1:].isfinite().all()
    other = batch._replace(samples=samples._replace(logps=torch.where(mask, logps, 1e9)))
    assert torch.equal(penalised(other, 0.1)[1:], out[1:])
    for same in (batch._replace(ref_logps=None), batch._replace(ref_logps=logps)):
        assert torch.equal(penalised(same, 0.1)[1:], rewards[1:])
    assert_close((rewards - out)[1:] * 3, (rewards - penalised(batch, 0.3))[1:], rtol=1e-6, atol=1e-8)


@every("token_rewards", "batch", "beta")
@quick
@given(masks(empty=False), data)
def test_token_rewards(token_rewards, mask, data):
    """Their sum is the reward less beta times the sampled KL; nothing behind the end; unknown rewards count 0."""
    logps, ref = (data.draw(tensors(*mask.shape, low=-50, high=0)) * mask for _ in range(2))
    rewards = data.draw(tensors(len(mask)))
    rewards[0] = NAN
    batch = ppo_lm.Batch(Samples(None, None, None, mask, logps, None), rewards, ref, None)
    out = token_rewards(batch, 0.1)
    assert out.isfinite().all() and not out[~mask].any()
    assert_close(out.sum(1), rewards.nan_to_num(0.0) - 0.1 * (logps - ref).sum(1))
    sparse = token_rewards(batch._replace(ref_logps=None), 0.1)
    assert_close(sparse.sum(1), rewards.nan_to_num(0.0)) and ((sparse != 0).sum(1) <= 1).all()


@every("gae", "rewards", "values", "mask", "gamma", "gae_lambda")
@quick
@given(masks(), floats(0, 1), floats(0, 1), data)
def test_gae_of_tokens(gae, mask, gamma, lam, data):
    """Finite; 0 behind the end, also of one token or none, and for skipped completions; linear in rewards and values;
    rows apart; more padding changes nothing. lambda 1: the return less the value; lambda 0: the error of one step."""
    rewards, values = (data.draw(tensors(*mask.shape)) * mask for _ in range(2))
    mask = mask & torch.from_numpy(data.draw(hnp.arrays(bool, (len(mask), 1))))
    out = gae(rewards, values, mask, gamma, lam)
    assert out.isfinite().all() and not out[~mask].any()
    assert_close(gae(-2 * rewards, -2 * values, mask, gamma, lam), -2 * out)
    wide = [torch.nn.functional.pad(x, (0, 2)) for x in (rewards, values, mask)]
    assert_close(gae(*wide, gamma, lam)[:, :-2], out)
    alone = [x[:1] for x in (rewards, values, mask)]
    assert torch.equal(gae(*alone, gamma, lam)[0], out[0])
    width = mask.shape[1]
    returns = torch.stack(
        [(rewards[:, t:] * gamma ** torch.arange(width - t).double()).sum(1) for t in range(width)], 1
    )
    assert_close(gae(rewards, values, mask, gamma, 1.0), (returns - values) * mask, rtol=1e-7, atol=1e-7)
    following = torch.nn.functional.pad(values, (0, 1))[:, 1:]
    assert_close(gae(rewards, values, mask, gamma, 0.0), (rewards + gamma * following - values) * mask)


@every("whiten", "values", "mask")
@quick
@given(masks(), data)
def test_whiten(whiten, mask, data):
    """Mean 0 and deviation 1 over the tokens, 0 elsewhere; unchanged by shift, positive scale, and what lies elsewhere;
    0 where there are fewer than two tokens."""
    values = data.draw(tensors(*mask.shape))
    out, kept = whiten(values, mask), values[mask]
    assert out.isfinite().all() and not out[~mask].any() and (len(kept) > 1 or not out.any())
    if len(kept) > 1:
        assert abs(out[mask].mean()) < 1e-6
        assert torch.equal(whiten(torch.where(mask, values, 1e9), mask), out)
        assert_close(whiten(values + 5, mask), out, rtol=1e-5, atol=1e-5)
    if len(kept) > 1 and kept.std() > 0.1:
        assert_close(out[mask].std(), torch.tensor(1.0).double(), rtol=1e-5, atol=0)
        assert_close(whiten(3 * values, mask), out, rtol=1e-5, atol=1e-5)


@every("value_loss", "values", "old_values", "returns", "clip")
@quick
@given(tensors(3, 4), tensors(3, 4), tensors(3, 4), st.sampled_from([0.2, 5.0, math.inf]))
def test_value_loss(value_loss, values, old, returns, clip):
    """At least half the squared error, and that itself where the value has moved less than the clip; shift changes
    nothing; moving all signs neither."""
    loss, plain = value_loss(values, old, returns, clip), 0.5 * (values - returns).square()
    assert loss.isfinite().all() and (loss >= plain).all()
    near = (values - old).abs() < clip - 1e-9
    assert_close(loss[near], plain[near], rtol=1e-6, atol=1e-6)
    assert_close(value_loss(values + 9, old + 9, returns + 9, clip), loss, rtol=1e-6, atol=1e-6)
    assert_close(value_loss(-values, -old, -returns, clip), loss)


# --- what language models work on ---


@quick
@given(tensors(4, 5), floats(-100, 100), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([1.0, 1e4]))
def test_token_logps(logits, shift, temperature, scale):
    """Log-probabilities of all tokens sum to 1; a constant on the logits changes nothing; the entropy lies between 0
    and that of the uniform distribution; finite also for logits of 1e6."""
    each = [token_logps(scale * logits, torch.full((4,), i), temperature) for i in range(5)]
    logps, entropy = torch.stack([logp for logp, _ in each]), each[0][1]
    assert logps.isfinite().all() and (logps <= 0).all()
    assert_close(logps.exp().sum(0), torch.ones(4).double())
    rounding = 1e-15 * (100 * scale / temperature) ** 2
    assert (entropy > -rounding).all() and (entropy < math.log(5) + rounding).all()
    assert_close(
        token_logps(scale * logits + shift, torch.zeros(4).long(), temperature)[0], logps[0], rtol=0, atol=1e-7
    )
    assert all(x.isfinite().all() for x in token_logps(scale * logits.float(), torch.zeros(4).long(), temperature))


TOKENS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=4)


@quick
@given(TOKENS)
def test_padding_on_the_left(prompts):
    """The mask gives every prompt back, token 0 included, and positions count its tokens from 0."""
    ids, mask = pad_left(prompts, "cpu")
    assert [row[kept].tolist() for row, kept in zip(ids, mask)] == prompts
    assert [row[kept].tolist() for row, kept in zip(positions(mask), mask)] == [list(range(len(p))) for p in prompts]
    assert ids.shape[1] == max(map(len, prompts)) and mask[:, -1].all()


@st.composite
def sampled(draw, size: int = 2):
    """Samples of one to three prompts with `size` completions each, of at least one token."""
    prompts = draw(TOKENS)
    completions = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=size * len(prompts),
                                max_size=size * len(prompts)))  # fmt: skip
    width = max(map(len, completions))
    ids = torch.tensor([c + [0] * (width - len(c)) for c in completions])
    mask = torch.arange(width) < torch.tensor([len(c) for c in completions])[:, None]
    logps = -torch.arange(1.0, ids.numel() + 1).view(ids.shape) * mask
    return Samples(*pad_left(prompts, "cpu"), ids, mask, logps, mask[:, -1].clone())


def content(samples: Samples, rewards: Tensor, size: int = 2) -> list:
    """What every group holds, without its padding."""
    rows = list(zip(samples.completion_ids, samples.completion_mask, samples.logps, samples.ended, rewards))
    rows = [(ids[m].tolist(), logps[m].tolist(), bool(ended), float(r)) for ids, m, logps, ended, r in rows]
    prompts = [ids[mask].tolist() for ids, mask in zip(samples.prompt_ids, samples.prompt_mask)]
    return [(prompt, rows[i * size : (i + 1) * size]) for i, prompt in enumerate(prompts)]


@every("refill", "more", "first", "args")
@quick
@given(st.lists(sampled(), min_size=1, max_size=4), data)
def test_refilled_groups_keep_what_they_hold(refill, rounds, data):
    """Whatever the widths of the rounds that they come from: in the order of sampling, groups without variance last."""
    wanted, rewards, varies = data.draw(st.integers(1, 4)), [], []
    for i, samples in enumerate(rounds):
        different = torch.tensor([data.draw(st.booleans()) for _ in samples.prompt_ids])
        rewards.append(torch.stack([different * 1.0, torch.zeros(len(different))], 1).flatten() + 100.0 * i)
        varies += different.tolist()
    parts = [(samples, Scored(r, {}, {})) for samples, r in zip(rounds, rewards)]
    args = SimpleNamespace(num_prompts=wanted, num_generations=2, max_sampling_rounds=len(parts))
    chosen, scored, seen, following = refill(lambda first: parts[first // wanted], 0, args)
    used = following // wanted
    assert torch.equal(seen, torch.cat(rewards[:used]))
    held = sum([content(s, r) for s, r in zip(rounds[:used], rewards)], [])
    order = [i for i in range(len(held)) if varies[i]] + [i for i in range(len(held)) if not varies[i]]
    assert content(chosen, scored.rewards) == [held[i] for i in order[:wanted]]
    whole = join(rounds)
    assert content(whole, torch.cat(rewards)) == sum([content(s, r) for s, r in zip(rounds, rewards)], [])


@every("select", "batch", "prompts", "group_size")
@quick
@given(sampled(), data)
def test_selected_prompts_keep_what_they_hold(select, samples, data):
    rows = torch.arange(len(samples.completion_ids)).float()
    batch = ppo_lm.Batch(samples, rows, None, rows[:, None].expand(samples.logps.shape))
    chosen = permutation(data.draw, len(samples.prompt_ids))[: data.draw(st.integers(1, len(samples.prompt_ids)))]
    part, at = select(batch, chosen, 2)
    held = content(samples, rows)
    assert content(part.samples, part.rewards) == [held[i] for i in chosen.tolist()]
    assert torch.equal(part.rewards, at.float()) and torch.equal(part.values[:, 0], at.float())


@every("micro_batches", "batch", "group_size", "size")
@quick
@given(sampled(size=4), st.sampled_from([1, 2, 4, 8, 12]))
def test_micro_batches(micro_batches, samples, size):
    """Every row once and in order, every real token of it, its own prompt, and no column that is all padding."""
    rows = []
    for part, (prompts, prompt_mask, ids, mask) in micro_batches(SimpleNamespace(samples=samples), 4, size):
        some = list(range(len(samples.completion_ids)))[part]
        rows += some
        assert mask.any(0).all() and prompt_mask.any(0).all() and len(some) <= max(size, 1)
        for i, row in enumerate(some):
            home = i // (len(some) // len(prompts))
            assert torch.equal(ids[i][mask[i]], samples.completion_ids[row][samples.completion_mask[row]])
            assert torch.equal(
                prompts[home][prompt_mask[home]], samples.prompt_ids[row // 4][samples.prompt_mask[row // 4]]
            )
    assert rows == list(range(len(samples.completion_ids)))


# --- preferences ---

OF_THE_MARGIN = ("sigmoid", "robust", "ipo", "hinge", "exo", "discopop")


@pytest.mark.parametrize("loss", dpo.LOSSES)
@quick
@given(tensors(2, 5, low=-1e3, high=1e3), floats(0.01, 2), data)
def test_preference_losses(loss, ratios, beta, data):
    """Finite values and gradients for log-ratios of 1,000 nats; each pair by itself; those of the margin do not see
    what both log-ratios share; beta and the log-ratios matter by their product (squared ones: but for a factor)."""

    def losses(ratios: Tensor, beta: float) -> Tensor:
        return dpo.LOSSES[loss](*ratios, dpo.Args(loss=loss, beta=beta, label_smoothing=0.1))

    inputs = ratios.clone().requires_grad_()
    value = losses(inputs, beta)
    (gradient,) = torch.autograd.grad(value.sum(), inputs)
    assert value.shape == (5,) and value.isfinite().all() and gradient.isfinite().all()
    assert losses(ratios.float(), beta).isfinite().all()
    order = permutation(data.draw, 5)
    assert_close(losses(ratios[:, order], beta), value[order])
    if loss in OF_THE_MARGIN:
        assert_close(losses(ratios + data.draw(tensors(5)), beta), value, rtol=1e-6, atol=1e-6)
        assert_close(gradient.sum(0), torch.zeros(5).double(), rtol=0, atol=1e-6)
    factor = 4 if loss in ("ipo", "sppo-hard") else 1
    assert_close(losses(ratios * 2, beta / 2), value * factor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [name for name in dpo.LOSSES if name != "discopop"])
@quick
@given(floats(-20, 20), floats(-20, 20), floats(0.05, 0.3))
def test_preference_losses_fall_with_the_margin_at_the_start(loss, chosen, rejected, beta):
    """Where policy and reference are equal, the gradient raises the margin; in robust, sigmoid, hinge and apo-zero
    nowhere, without smoothing, does it lower it."""
    smoothing = 0.01 if loss == "exo" else 0.0
    everywhere = loss in ("robust", "sigmoid", "hinge", "apo-zero")
    inputs = torch.tensor([chosen, rejected] if everywhere else [0.0, 0.0], dtype=torch.float64, requires_grad=True)
    value = dpo.LOSSES[loss](*inputs[:, None], dpo.Args(loss=loss, beta=beta, label_smoothing=smoothing))
    (gradient,) = torch.autograd.grad(value.sum(), inputs)
    assert gradient[0] <= gradient[1] and (everywhere or gradient[0] < gradient[1])


@quick
@given(tensors(4, 2, low=-5, high=5), data)
def test_preference_metrics(ratios, data):
    """Shares between 0 and 1; with labels swapped the accuracy is the rest and the margin turns round; ties count half;
    order does not matter."""
    ratios[0, 1] = ratios[0, 0]
    ours, swapped = dpo.preference_metrics(ratios, 0.1), dpo.preference_metrics(ratios.flip(1), 0.1)
    assert 0 <= ours["accuracy"] <= 1 and ours["accuracy"] + swapped["accuracy"] == pytest.approx(1)
    assert ours["margin"] == pytest.approx(-swapped["margin"], abs=1e-12)
    assert ours["margin"] == pytest.approx(0.1 * (ours["chosen_logratio"] - ours["rejected_logratio"]), abs=1e-9)
    assert dpo.preference_metrics(ratios[permutation(data.draw, 4)], 0.1) == pytest.approx(ours)
    assert dpo.preference_metrics(ratios[:1], 0.1)["accuracy"] == 0.5


@quick
@given(st.text("ab ", min_size=1, max_size=8), st.text("ab ", min_size=1, max_size=8))
def test_shared_prefix(chosen, rejected):
    """What both begin with, whichever comes first; something is left of each; words stay whole."""
    size = shared_prefix(chosen, rejected)
    assert size == shared_prefix(rejected, chosen) and 0 <= size < min(len(chosen), len(rejected))
    assert chosen[:size] == rejected[:size] and (size == 0 or chosen[size] == " ")
    messages = [[{"role": "user", "content": c} for c in text] for text in (chosen, rejected)]
    size = shared_prefix(*messages)
    assert size < min(map(len, messages)) and messages[0][:size] == messages[1][:size]


# --- control ---


@st.composite
def rollout(draw):
    """(T, N) rewards, values, next values, terminated, done."""
    shape = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    numbers = [draw(tensors(*shape)) for _ in range(3)]
    terminated, truncated = (torch.from_numpy(draw(hnp.arrays(bool, shape))) for _ in range(2))
    return *numbers, terminated, terminated | truncated


@every("gae", "rewards", "values", "next_values", "terminated", "done", "gamma", "gae_lambda")
@quick
@given(rollout(), floats(0, 1), floats(0, 1), data)
def test_gae_of_steps(gae, rollout, gamma, lam, data):
    """Finite; environments apart; linear; nothing of an episode reaches the one before; what a terminated step led to
    does not count. lambda 0: the error of one step."""
    rewards, values, next_values, terminated, done = rollout
    out = gae(*rollout, gamma, lam)
    assert out.shape == rewards.shape and out.isfinite().all()
    order = permutation(data.draw, rewards.shape[1])
    assert torch.equal(gae(*(x[:, order] for x in rollout), gamma, lam), out[:, order])
    assert_close(gae(-2 * rewards, -2 * values, -2 * next_values, terminated, done, gamma, lam), -2 * out)
    other = gae(rewards, values, torch.where(terminated, 1e6, next_values), terminated, done, gamma, lam)
    assert torch.equal(other, out)
    step = data.draw(st.integers(0, len(rewards) - 1))
    later = torch.arange(len(rewards))[:, None] > step
    changed = gae(*(torch.where(later, x + 9, x) for x in (rewards, values, next_values)), terminated, done, gamma, lam)
    assert torch.equal(changed[: step + 1, done[step]], out[: step + 1, done[step]])
    errors = rewards + gamma * next_values * ~terminated - values
    assert_close(gae(*rollout, gamma, 0.0), errors)
    assert torch.equal(out[done], errors[done])


@quick
@given(st.lists(hnp.arrays(np.float64, st.tuples(st.integers(1, 4), st.just(2)), elements=floats(-1e6, 1e6)),
                min_size=1, max_size=5), data)  # fmt: skip
def test_running_statistics(batches, data):
    """Mean and variance of all rows however they are split and ordered, and none ever negative."""
    rows = np.concatenate(batches)
    shuffled = rows[list(data.draw(st.permutations(range(len(rows)))))]
    split, whole = RunningMeanStd((2,)), RunningMeanStd((2,))
    for batch in batches:
        split.update(batch)
        assert (split.var >= 0).all() and np.isfinite(split.mean).all()
    whole.update(shuffled)
    scale = 1 + np.abs(rows).max()
    for name in ("mean", "var"):
        order = {"mean": 1, "var": 2}[name]
        np.testing.assert_allclose(
            getattr(split, name), getattr(whole, name), rtol=1e-7, atol=1e-10 * scale**order, err_msg=name
        )
    np.testing.assert_allclose(split.mean, rows.mean(0), rtol=0, atol=1.1e-4 / len(rows) * scale)
    again = RunningMeanStd((2,))
    again.load_state_dict(split.state_dict())
    assert again.count == split.count and (again.mean == split.mean).all() and (again.var == split.var).all()


@quick
@given(st.lists(hnp.arrays(np.float64, (2, 3), elements=floats(-1e8, 1e8)), min_size=1, max_size=4), st.booleans())
def test_normalised_observations_and_rewards(observations, enabled):
    """Finite and within the clip, whatever comes; looking does not count."""
    statistics = ppo.Statistics(3, 2, 0.99, enabled)
    for obs in observations:
        shown = statistics.observe(obs, count=True)
        reward = statistics.reward(obs[:, 0], obs[:, 1] > 0)
        assert np.isfinite(shown).all() and np.isfinite(reward).all()
        assert not enabled or max(np.abs(shown).max(), np.abs(reward).max()) <= ppo.CLIP_NORMALIZED
        assert enabled or (np.array_equal(reward, obs[:, 0]) and np.array_equal(shown, obs.astype(np.float32)))
    before = json.dumps(statistics.state_dict(), default=Tensor.tolist)
    statistics.observe(observations[0] * 2)
    assert json.dumps(statistics.state_dict(), default=Tensor.tolist) == before


SPACES = {
    "box": gym.spaces.Box(-1, 1, (2,)),
    "discrete": gym.spaces.Discrete(4),
    "multidiscrete": gym.spaces.MultiDiscrete([2, 3]),
}


@pytest.mark.parametrize("space", SPACES)
@quick
@given(tensors(3, 2, low=-1e3, high=1e3, dtype=torch.float32), st.integers(0, 99), floats(1, 100))
def test_policies_of_ppo(space, obs, seed, scale):
    """Finite for large observations and weights; categorical probabilities sum to 1, and their entropy lies between 0
    and that of the uniform distribution; without noise the likeliest action is taken."""
    torch.manual_seed(seed)
    agent = ppo.Agent(2, SPACES[space], 8)
    with torch.no_grad():
        agent.actor[-1].weight.mul_(scale)
        likeliest = agent.act(obs, agent.noise((3,), torch.Generator()) * 0)
        logp, entropy = agent.log_prob(obs, likeliest)
        assert logp.isfinite().all() and entropy.isfinite().all() and agent.value(obs).isfinite().all()
        noisy = agent.act(obs, agent.noise((3,), torch.Generator().manual_seed(seed)))
        assert (agent.log_prob(obs, noisy)[0] <= logp + 1e-4).all()
        if space != "box":
            choices = torch.cartesian_prod(*(torch.arange(n) for n in agent.parts)).view(-1, len(agent.parts))
            each = torch.stack([agent.log_prob(obs, choice.expand(3, -1))[0] for choice in choices])
            assert_close(each.exp().sum(0), torch.ones(3))
            assert (entropy >= -1e-5).all() and (entropy <= math.log(len(choices)) + 1e-5).all()


@every("ppo_loss", "agent", "obs", "actions", "old_logps", "advantages", "returns", "old_values", "args")
@quick
@given(tensors(5, low=-80, high=80, dtype=torch.float32), tensors(5, dtype=torch.float32), st.booleans(), data)
def test_ppo_loss(ppo_loss, ratios, advantages, normalize, data):
    """Finite for ratios up to e^80; the order of the minibatch does not matter; with normalisation neither does a
    constant in the advantages; clip_fraction is a share, approx_kl is never negative."""
    args = ppo.Args(normalize_advantages=normalize, ent_coef=0.01, clip_vloss=True)
    logps = torch.linspace(-3, 0, 5)
    agent = lambda obs, actions: (obs[:, 0], obs[:, 1].abs(), obs[:, 2])  # noqa: E731

    def loss(order, shift=0.0):
        columns = torch.stack([logps, ratios, ratios.flip(0)], 1)
        inputs = (columns, ratios[:, None], logps - ratios, advantages + shift, ratios, advantages)
        return ppo_loss(agent, *(x[order] for x in inputs), args)

    value, metrics = loss(torch.arange(5))
    assert value.isfinite() and metrics.isfinite().all() and 0 <= metrics[1] <= 1 and metrics[0] > -1e-5
    other, others = loss(permutation(data.draw, 5))
    assert_close(other, value, rtol=1e-3, atol=1e-3)
    assert_close(others, metrics, rtol=1e-3, atol=1e-3)
    if normalize and advantages.std() > 1 and ratios.abs().max() < 2:
        assert_close(loss(torch.arange(5), 8.0)[0], value, rtol=1e-3, atol=1e-2)


@quick
@given(tensors(6, 2, low=-6, high=6), tensors(6, 2, low=-8, high=8), st.sampled_from([1.0, 1e3]))
def test_log_densities_of_sac(means, noise, scale):
    """Finite and in [-1, 1] however far out; where tanh has not saturated, by the change of variables."""
    log_std = means.flip(0)
    actor = SimpleNamespace(net=lambda obs: torch.cat([scale * means, scale * log_std], 1))
    actions, logps = sac.Actor.forward(actor, means, noise)
    assert logps.shape == (6, 1) and logps.isfinite().all() and (actions.abs() <= 1).all()
    single = SimpleNamespace(net=lambda obs: actor.net(obs).float())
    assert all(x.isfinite().all() for x in sac.Actor.forward(single, means.float(), noise.float()))
    std = (scale * log_std).clamp(*sac.LOG_STD_BOUNDS).exp()
    u = scale * means + std * noise
    normal = torch.distributions.Normal(scale * means, std).log_prob(u)
    inside = (u.abs() < 5).all(1)
    expected = (normal - (1 - u.tanh().square()).log()).sum(1, keepdim=True)
    assert_close(logps[inside], expected[inside], rtol=1e-6, atol=1e-6)


@quick
@given(floats(-5, 5), tensors(5, 1, low=-50, high=50), floats(-10, 10))
def test_target_entropy(log_alpha, logps, target):
    """The temperature rises where the entropy is below its target and falls where it is above."""
    parameter = torch.tensor(log_alpha, dtype=torch.float64, requires_grad=True)
    sac.alpha_loss(parameter, logps, target).backward()
    missing = target - (-logps.mean())
    assert_close(-parameter.grad, math.exp(log_alpha) * missing)


@quick
@given(st.data())
def test_actions_reach_the_bounds_and_never_leave_them(data):
    """Of the environment, in the precision that it checks them in; and back again."""
    size = data.draw(st.integers(1, 3))
    bounds = data.draw(hnp.arrays(np.float32, (2, size), elements=st.floats(-1e3, 1e3, width=32)))
    space = gym.spaces.Box(bounds.min(0), bounds.max(0) + np.float32(0.1), dtype=np.float32)
    width = (space.high - space.low).min()
    units = st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-1, 1, width=32))
    actions = data.draw(hnp.arrays(np.float32, (4, size), elements=units))
    stretched = to_env(actions, space)
    assert stretched.shape == (4, size) and all(space.contains(action) for action in stretched)
    np.testing.assert_allclose(to_unit(stretched, space), actions, rtol=0, atol=1e-6 + 4e-7 * 2e3 / width)
    ends = to_env(np.array([[-1.0] * size, [1.0] * size], np.float32), space)
    np.testing.assert_allclose(ends, [space.low, space.high], rtol=1e-6, atol=1e-4)
    assert (np.abs(to_unit(3 * stretched, space)) <= 1).all()


@quick
@given(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=6))
def test_replay_buffer(capacity, adds):
    """As a list of which the newest rows are kept, through saves, kills and loads at any time."""
    device, kept = torch.device("cpu"), []
    replay, count = ReplayBuffer(capacity, (1, 2), device), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replay.bin"
        for rows, is_saved in adds:
            new = np.arange(count, count + rows, dtype=np.float32)[:, None]
            replay.add(new, np.concatenate([-new, new * 2], 1))
            count += rows
            kept = (kept + new[:, 0].tolist())[-capacity:]
            assert replay.total == count and replay.newest(len(kept))[:, 0].tolist() == kept
            if kept:
                a, b = replay.sample(5, torch.Generator().manual_seed(count))
                assert (
                    a.shape == (5, 1)
                    and set(a[:, 0].tolist()) <= set(kept)
                    and torch.equal(b, a * torch.tensor([-1, 2]))
                )
            if is_saved:
                total = replay.save(path)
                with open(path, "ab") as file:
                    file.write(b"rows that a killed run had begun to write")
                replay = ReplayBuffer(capacity, (1, 2), device)
                replay.load(path, total)
        total = replay.save(path)
        with pytest.raises(UserError, match="replay.bin"):
            replay.load(path, total + 1)


# --- offline ---


@st.composite
def trajectories(draw):
    """Rewards (n,) and the first rows of trajectories, of one step or more."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    rewards = draw(hnp.arrays(np.float32, sum(lengths), elements=st.floats(-1e3, 1e3, width=32)))
    return rewards, np.cumsum([0, *lengths[:-1]])


def dataset(rewards: np.ndarray, starts: np.ndarray) -> Dataset:
    rows = np.arange(len(rewards), dtype=np.float32)[:, None]
    return Dataset(rows, np.tanh(rows), rewards, np.zeros(len(rows), bool), rows + 1, np.ones(len(rows), bool), starts)


@every("returns_to_go", "rewards", "starts")
@quick
@given(trajectories(), floats(-5, 5))
def test_returns_to_go(returns_to_go, trajectories, shift):
    """The reward and what follows it: the reward alone at the end, the whole return at the start."""
    rewards, starts = trajectories
    out = returns_to_go(rewards, starts)
    ends = np.append(starts[1:], len(rewards)) - 1
    assert out.shape == rewards.shape and np.isfinite(out).all()
    np.testing.assert_allclose(out[ends], rewards[ends])
    np.testing.assert_allclose(out[starts], dataset(*trajectories).trajectory_returns(), rtol=1e-9, atol=1e-9)
    inner = np.setdiff1d(np.arange(len(rewards)), ends)
    np.testing.assert_allclose(out[inner], rewards[inner] + out[inner + 1], rtol=1e-9, atol=1e-9)
    other = np.where(np.arange(len(rewards)) < ends[0] + 1, rewards + shift, rewards)
    assert np.array_equal(returns_to_go(other, starts)[ends[0] + 1 :], out[ends[0] + 1 :])


@every("windows", "data", "rows", "length")
@quick
@given(trajectories(), st.integers(1, 7))
def test_windows(windows, trajectories, length):
    """The steps from a row on, of its own trajectory alone, in order, as many as there are up to the length, at the
    right; zeros under the padding."""
    rewards, starts = trajectories
    n = len(rewards)
    model = SimpleNamespace(obs_mean=torch.zeros(1), obs_std=torch.ones(1))
    space = gym.spaces.Box(-1, 1, (1,))
    rows = dt.sequences(dataset(*trajectories), space, model, 1.0, "cpu")
    batch = windows(rows, torch.arange(n), length)
    ends = np.append(starts[1:], n)
    for row in range(n):
        end = min(ends[ends > row][0], row + length)
        kept = batch.mask[row]
        assert kept.tolist() == [False] * (length - (end - row)) + [True] * (end - row)
        assert batch.obs[row, kept, 0].tolist() == list(range(row, end))
        assert all(torch.equal(shown[row, kept], held[row:end]) for shown, held in zip(batch[:3], rows[:3]))
        first = starts[starts <= row][-1]
        assert batch.timesteps[row, kept].tolist() == list(range(row - first, end - first))
        assert not any(x[row][~kept].any() for x in (batch.obs, batch.actions, batch.rtg, batch.timesteps))


@every("dt_loss", "predicted", "batch")
@quick
@given(masks(empty=False), data)
def test_dt_loss(dt_loss, mask, data):
    """The mean over real steps: padding, whatever is predicted there, and order do not matter."""
    predicted, actions = (data.draw(tensors(*mask.shape, 2, low=-1, high=1)) for _ in range(2))
    loss = lambda predicted, actions, mask: dt_loss(predicted, dt.Windows(None, actions, None, None, mask))  # noqa: E731
    value = loss(predicted, actions, mask)
    assert value.isfinite() and 0 <= value <= 4 and loss(actions, actions, mask) == 0
    assert_close(loss(torch.where(mask[..., None], predicted, 1e3), actions, mask), value)
    order = permutation(data.draw, len(mask))
    assert_close(loss(predicted[order], actions[order], mask[order]), value)
    wide = [torch.nn.functional.pad(x, (0, 0, 3, 0)) for x in (predicted, actions)]
    assert_close(loss(*wide, torch.nn.functional.pad(mask, (3, 0))), value)


@every("top_rows", "data", "fraction")
@quick
@given(trajectories(), floats(0.01, 1))
def test_top_rows(top_rows, trajectories, fraction):
    """Whole trajectories, none of a lower return than one that is left out but for size, the best one always."""
    data = dataset(*trajectories)
    rows, home, returns = top_rows(data, fraction), data.trajectory(), data.trajectory_returns()
    kept = {k for k in range(len(returns)) if rows[home == k].any()}
    assert all(rows[home == k].all() for k in kept) and returns.argmax() in kept
    assert len(kept) == 1 or fraction == 1 or rows.sum() < fraction * len(rows)
    assert all(returns[k] <= min(returns[list(kept)]) for k in set(range(len(returns))) - kept)
    assert top_rows(data, 1.0).all()


@every("expectile_loss", "errors", "expectile")
@quick
@given(tensors(6, 1), floats(0.05, 0.95), data)
def test_expectile_loss(expectile_loss, errors, expectile, data):
    """Half the mean square at 1/2; never negative; quadratic in scale; turned round for the opposite expectile."""
    loss = expectile_loss(errors, expectile)
    assert loss.isfinite() and loss >= 0
    assert_close(expectile_loss(errors, 0.5), errors.square().mean() / 2)
    assert_close(expectile_loss(3 * errors, expectile), 9 * loss)
    assert_close(expectile_loss(-errors, 1 - expectile), loss)
    assert_close(expectile_loss(errors[permutation(data.draw, 6)], expectile), loss)
    assert expectile_loss(errors.abs(), 0.9) >= expectile_loss(-errors.abs(), 0.9)


@quick
@given(tensors(4, 1, low=-1e6, high=1e6, dtype=torch.float32), floats(0, 10))
def test_weights_of_iql(advantages, temperature):
    """Positive or 0, at most the clip, 1 where the advantage is 0, higher for higher advantages; finite for any."""
    args = iql.Args(hidden_size=4, dropout=0.0)
    actor = iql.Actor(2, 1, args.hidden_size, args.dropout)
    batch = iql.Transitions(torch.ones(4, 2), torch.full((4, 1), 0.5), None, None, None)
    advantages[0] = 0.0
    loss, weights, logps = iql.actor_loss(actor, batch, advantages, temperature)
    assert loss.isfinite() and (weights >= 0).all() and (weights <= iql.MAX_WEIGHT).all() and weights[0] == 1
    order = advantages[:, 0].argsort()
    assert (weights[order].diff(dim=0) >= 0).all()
    assert_close(loss, -(weights * logps).mean())


@quick
@given(trajectories(), st.sampled_from(["raw", "return-range", "minus-one"]))
def test_treatment_of_rewards(trajectories, treatment):
    """return-range: returns then span 1,000, or an error where they do not differ."""
    data = dataset(*trajectories)
    returns = data.trajectory_returns()
    if treatment == "return-range" and np.ptp(returns) == 0:
        with pytest.raises(UserError, match="--rewards return-range"):
            iql.reward_map(data, treatment)
        return
    factor, summand = iql.reward_map(data, treatment)
    assert (
        (factor, summand) == (1.0, {"raw": 0.0, "minus-one": -1.0}[treatment])
        if treatment != "return-range"
        else (summand == 0 and np.ptp(factor * returns) == pytest.approx(1000))
    )


# --- datasets, tasks, evaluation, runs ---

ROWS = st.lists(st.integers(0, 30).map(lambda i: {"prompt": f"prompt {i}"}), min_size=1, max_size=40)


@quick
@given(ROWS, data)
def test_held_out_rows(rows, data):
    """Each row on one side, in its order; equal prompts together; which, is a matter of the prompts alone; one prompt
    is an error."""
    rows = [row | {"number": i} for i, row in enumerate(rows)]
    prompts = {row["prompt"] for row in rows}
    if len(prompts) < 2:
        with pytest.raises(UserError, match="one prompt"):
            tasks.hold_out(rows, "mine.jsonl")
        return
    train, heldout = tasks.hold_out(rows, "mine.jsonl")
    assert train and heldout and sorted(train + heldout, key=lambda row: row["number"]) == rows
    assert all(part == sorted(part, key=lambda row: row["number"]) for part in (train, heldout))
    held = {row["prompt"] for row in heldout}
    assert not held & {row["prompt"] for row in train} and len(held) == max(1, len(prompts) // 20)
    again = tasks.hold_out(data.draw(st.permutations(rows)), "mine.jsonl")[1]
    assert {row["prompt"] for row in again} == held
    assert tasks.without(heldout, rows, "mine.jsonl") == train
    with pytest.raises(UserError, match="test split"):
        tasks.without(rows, rows, "mine.jsonl")


@quick
@given(st.integers(1, 9), st.integers(0, 5), st.lists(st.integers(0, 50), max_size=6))
def test_epochs(n, seed, asked):
    """Every row once an epoch; a row is a function of index and seed, whatever was asked for before."""
    rows = [{"prompt": str(i)} for i in range(n)]
    stream = tasks.epochs(rows)
    for epoch in range(3):
        assert Counter(stream(epoch * n + i, seed)["prompt"] for i in range(n)) == Counter(map(str, range(n)))
    assert [stream(i, seed) for i in asked] == [tasks.epochs(rows)(i, seed) for i in asked]


@pytest.mark.parametrize("name", ["countdown", "sort"])
@quick
@given(st.text("0123456789+-*/=, <answer>\n#٣", max_size=25), st.integers(0, 999))
def test_any_text_has_a_score(name, text, seed):
    """0 or 1, never an exception; a right answer stays right within answer tags and blanks."""
    row, _ = getattr(tasks, f"{name}_row")(random.Random(seed))
    score = getattr(tasks, f"{name}_score")
    assert score(row, text)["reward"] in (0.0, 1.0)
    right = row["completion"]
    right = "".join(sorted(row["digits"])) if name == "sort" else f"{right.rpartition('=')[0]}={row['target']}"
    assert score(row, right)["reward"] == 1 == score(row, f"{text}<answer> {right} </answer>")["reward"]
    numbers = tasks.gsm8k_score({"answer": "so\n#### 7"}, text)
    assert all(value in (0.0, 1.0) for value in numbers.values())
    assert tasks.gsm8k_score({"answer": "so\n#### 1,234"}, f"{text}\n#### 1234")["reward"] == 1


@quick
@given(st.integers(1, 7), data)
def test_pass_at_k(n, data):
    """The share of all choices of k samples that hold a right one: by counting them."""
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    choices = list(combinations(range(n), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(min(c) < correct for c in choices) / len(choices))


@quick
@given(st.lists(st.one_of(st.just(NAN), floats(-1e3, 1e3)), max_size=6))
def test_mean_of_known_values(values):
    known = [value for value in values if not math.isnan(value)]
    assert mean(values) == pytest.approx(sum(known) / len(known) if known else NAN, nan_ok=True)


@quick
@given(st.integers(1, 20), st.integers(0, 25), st.sampled_from(["constant", "linear", "cosine"]), floats(1e-8, 1))
def test_learning_rates(total, warmup, schedule, base):
    """Above 0, never above the peak, which the warm-up's last step or the first after it reaches; rising, then not;
    proportional to the peak."""
    rates = [learning_rate(step, base, schedule, warmup, total) for step in range(1, total + 1)]
    assert all(0 < rate <= base * (1 + 1e-12) for rate in rates)
    before, after = rates[:warmup], rates[warmup:]
    assert before == sorted(before) and after == sorted(after, reverse=True)
    assert total < warmup or max(rates) == pytest.approx(base)
    assert schedule != "constant" or all(rate == base for rate in after)
    assert rates == pytest.approx([base * learning_rate(i + 1, 1.0, schedule, warmup, total) for i in range(total)])


INTERVALS = {"": (-math.inf, math.inf, "()"), "at least 0": (0, math.inf, "[)"), "at least 1": (1, math.inf, "[)"),
             "above 0": (0, math.inf, "()"), "from 0 to 1": (0, 1, "[]"), "at least 0 and below 1": (0, 1, "[)"),
             "above 0 and at most 1": (0, 1, "(]"), "above 0 and below 1": (0, 1, "()")}  # fmt: skip


@pytest.mark.parametrize("kind", ["one", "or None", "several"])
@pytest.mark.parametrize("bound", ["", *BOUNDS])
def test_check_numbers(bound, kind):
    """A number that is not finite never passes, and one outside its bound does not either, also where the field may be
    None or holds several numbers. The sentence names flag, value and bound."""
    low, high, ends = INTERVALS[bound]
    hint = Annotated[float, bound] if bound else float
    hint = {"one": hint, "or None": hint | None, "several": tuple[hint, ...]}[kind]
    args_class = make_dataclass("Args", [("some_number", hint), ("name", str)])
    check_numbers(args_class(None, "x"))
    for number in (-math.inf, -2, -1e-9, 0, 1e-9, 0.5, 1 - 1e-9, 1, 1 + 1e-9, 2, 1e9, math.inf, NAN):
        value = (number, number) if kind == "several" else number
        right = low < number < high or number == low and ends[0] == "[" or number == high and ends[1] == "]"
        if right and math.isfinite(number):
            check_numbers(args_class(value, "x"))
            continue
        with pytest.raises(UserError) as error:
            check_numbers(args_class(value, "x"))
        assert f"--some-number is {value}" in str(error.value) and bound in str(error.value)
        assert math.isfinite(number) or "finite" in str(error.value)


@quick
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 25))
def test_crosses(iterations, every):
    """It tells of every multiple, once for each iteration that passes one or more, whatever the iterations' sizes."""
    before, told = 0, 0
    for size in iterations:
        passed = any(multiple % every == 0 for multiple in range(before + 1, before + size + 1))
        assert crosses(before + size, before, every) == passed
        before, told = before + size, told + passed


@quick
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 25))
def test_due(iterations, every):
    """Where a multiple is crossed and in the last iteration, which need not be a multiple; never with every 0."""
    run = SimpleNamespace(step=0, total=sum(iterations))
    for size in iterations:
        step = run.step + size
        assert Run.due(run, step, every) == (step == run.total or every > 0 and crosses(step, run.step, every))
        run.step = step


@quick
@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 30), st.integers(0, 3))
def test_batches(rows, size, steps, seed):
    """Every epoch takes each row once, in an order of its own. first_epoch has what a run of so many steps sees of the
    first one, step by step. Any step can be asked for at any time, as a resumed run does."""
    batches = Batches(rows, size, seed)
    taken = [row for step in range(1, steps + 1) for row in batches(step)]
    whole = len(taken) // rows
    epochs = [taken[i * rows : (i + 1) * rows] for i in range(whole)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert rows < 10 or len({tuple(epoch) for epoch in epochs}) == whole
    assert Batches(rows, size, seed)(steps) == batches(steps) and len(batches(steps)) == size
    assert rows < 10 or Batches(rows, rows, seed + 1)(1) != Batches(rows, rows, seed)(1)
    first = batches.first_epoch(steps)
    assert sum(first, []) == taken[:rows] and all(first)
    assert all(batch == batches(step) for step, batch in enumerate(first[:-1], 1))


@quick
@given(tensors(6, 4), hnp.arrays(bool, (6, 4)), st.integers(1, 6))
def test_means(values, mask, size):
    """The mean of the values that count, however the step is split."""
    mask = torch.from_numpy(mask)
    means = Means(mask.sum().clamp(min=1))
    for start in range(0, 6, size):
        means.add(mask[start : start + size], x=values[start : start + size], twice=2 * values[start : start + size])
    expected = values[mask].mean().item() if mask.any() else 0.0
    assert means.read() == pytest.approx({"x": expected, "twice": 2 * expected})
