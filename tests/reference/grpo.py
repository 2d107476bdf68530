"""A second implementation of grpo.py's `update`, in NumPy, on the tabular policy of tests/tabular.py.

It knows nothing of algos/ and utils/. A script of the family says in a `Rule` what it changes of grpo.py, in 5 to 15
lines. `twice` in tests/groups.py compares the two.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from tabular import EOS, PREFIXES, VOCAB, gradients, log_probs, log_softmax


def deviation(values) -> float:
    """The unbiased one of what is known; 0 of one value."""
    known = [x for x in values if not math.isnan(x)]
    return math.sqrt(sum((x - sum(known) / len(known)) ** 2 for x in known) / max(len(known) - 1, 1))


def of_groups(rows, s) -> list[float]:
    """Rewards less the mean of their group, over a deviation. Unknown ones get 0."""
    scale = getattr(s, "scale_rewards", "none")
    found = []
    for row in rows:
        group = [other.reward for other in rows if other.p == row.p]
        spread = {"none": [], "group": group, "batch": [other.reward for other in rows]}[scale]
        divisor = deviation(spread) + 1e-4 if spread else 1.0
        found.append(0.0 if math.isnan(row.reward) else (row.reward - np.nanmean(group)) / divisor)
    return found


def clipped(d, a, s) -> tuple[np.ndarray, np.ndarray]:
    """Slope of min[rho A, clip(rho) A], where d = log rho; and where the clip cuts it."""
    ratio, high = np.exp(d), s.epsilon if s.epsilon_high is None else s.epsilon_high
    cut = np.where(np.asarray(a) > 0, ratio > 1 + high, (np.asarray(a) < 0) & (ratio < 1 - s.epsilon))
    return np.where(cut, 0.0, ratio * a), cut


def all_tokens(row, s) -> np.ndarray:
    return np.full(len(row.c), EOS in row.c or not getattr(s, "mask_truncated_completions", False))


@dataclass
class Rule:
    """What `update` maximises: slopes are those of the objective in the log-probability of each trained token, (T,).

    s: the script's arguments. A row has p, c, reward; logps of the sampler, of the policy before the first step (start)
    and of the reference (ref, or None); its advantage (a); which tokens are trained (own).
    """

    advantages: Callable = of_groups  # rows, s -> for each row a number, or one for each token
    slope: Callable = clipped  # log-ratio, a, s -> slope (T,) or (1,), and what `counts` is the mean of
    penalty: Callable = lambda d, s: np.exp(-d) - 1  # log pi - log pi_ref, s -> slope of what beta weighs; k3 here
    own: Callable = all_tokens  # row, s -> (T,) bool
    counted: Callable = lambda row, s: True  # row, s -> whether denominators count the row; else it moves nothing
    extra: Callable | None = None  # row, table, s -> gradient of further terms of each token, (T, *table.shape)
    fixed: dict = field(default_factory=dict)  # settings of grpo.py that the script does not have
    ratio_to: str = "sampler"  # or "start"
    kl_to: str = "sampler"
    counts: str = "clip_fraction"
    norm: Callable = np.mean  # of the norms of all steps
    different: tuple = ()  # metrics that mean something else


def update(rule, groups, rewards, table, s, old, ref=None, rate=1.0, order=None) -> tuple[np.ndarray, dict]:
    """The table after all steps of plain gradient ascent, and metrics. old, ref: tables of sampler and reference.
    order: for each epoch the prompts of its minibatches. Columns of the table behind VOCAB are not the policy's."""
    s = SimpleNamespace(**vars(s) | rule.fixed)
    divisor = getattr(s, "temperature", 1.0)
    rows = [SimpleNamespace(p=p, c=c, reward=r) for p, group in enumerate(groups) for c, r in zip(group, rewards[p])]
    for row in rows:
        tables = old, table, ref
        row.sampler, row.start, row.ref = (
            None if t is None else log_probs(t[..., :VOCAB] / divisor, row.p, row.c) for t in tables
        )
        row.own = rule.own(row, s)
    for row, advantage in zip(rows, rule.advantages(rows, s)):
        row.a = advantage
    one = np.array_split(np.arange(len(groups)), getattr(s, "num_minibatches", 1))
    table, norms, gaps = table.copy(), [], []
    for epoch in order or [one] * getattr(s, "num_iterations", 1):
        seen = {name: [] for name in (rule.counts, "approx_kl", "entropy", "kl")}
        for prompts in epoch:
            step, some = np.zeros_like(table), [row for row in rows if row.p in prompts]
            counted = [row for row in some if rule.counted(row, s)]
            tokens = sum(row.own.sum() for row in counted)
            for row in [row for row in some if row.own.any()]:
                policy, own = table[..., :VOCAB] / divisor, row.own
                now = log_probs(policy, row.p, row.c)
                slope, cut = rule.slope((now - getattr(row, rule.ratio_to))[own], row.a, s)
                if row.ref is not None:
                    slope = slope + s.beta * rule.penalty((now - row.ref)[own], s)
                    seen["kl"] += list((np.exp(row.ref - now) - (row.ref - now) - 1)[own])
                gradient = np.zeros((own.sum(), *table.shape))
                gradient[..., :VOCAB] = slope[:, None, None, None] * gradients(policy, row.p, row.c)[own] / divisor
                if rule.extra:
                    gradient += rule.extra(row, table, s)
                sizes = {"sequence": len(counted) * own.sum(), "token": tokens, "row": len(counted)}
                weight = 1 / max(1, sizes.get(s.aggregation, len(counted) * s.max_completion_length))
                step += weight * rule.counted(row, s) * gradient.sum(0)
                logp = log_softmax(policy[row.p, [PREFIXES.index(row.c[:t]) for t in np.flatnonzero(own)]])
                gap = (now - getattr(row, rule.kl_to))[own]
                seen[rule.counts] += list(cut)
                seen["approx_kl"] += list(np.exp(gap) - gap - 1)
                seen["entropy"] += list(-(np.exp(logp) * logp).sum(1))
            if not norms:
                first = rows if rule.ratio_to == "start" else some
                gaps = np.concatenate([abs(row.start - row.sampler)[row.own] for row in first])
            norms.append(np.linalg.norm(step))
            table += rate * min(1, s.max_grad_norm / (norms[-1] + 1e-6)) * step
    means = {name: np.mean(values) for name, values in seen.items() if values}
    return table, means | {"sampler_gap": gaps.mean(), "grad_norm": rule.norm(norms)}
