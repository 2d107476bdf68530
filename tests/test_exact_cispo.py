"""CISPO and GPPO: values by hand, and steps of `update` against numpy. At ratio 1, test_exact_grpo.py tests it."""

import math

import numpy as np
import pytest
import torch
from groups import REWARDS, TABLE, P, close, make_batch, rewards_of, stepping
from tabular import COMPLETIONS, gradients, log_probs, random_table

from algos import cispo, grpo

pytestmark = pytest.mark.usefixtures("float64")
LOW, HIGH = 0.9, 1.15
run_update = stepping(cispo, aggregation="token")


def own_step(groups, rewards, table, old, bounds) -> tuple[np.ndarray, np.ndarray]:
    """Movement of one plain step in numpy, from the formulas; and which tokens' weights a bound holds."""
    tokens, result, held = sum(len(c) for group in groups for c in group), np.zeros_like(table), []
    for p, group in enumerate(groups):
        for i, c in enumerate(group):
            advantage = (rewards[p][i] - np.mean(rewards[p])) / (np.std(rewards[p], ddof=1) + 1e-4)
            ratio = np.exp(log_probs(table, p, c) - log_probs(old, p, c))
            high = math.inf if bounds == "gppo" and advantage < 0 else HIGH
            low = 0.0 if bounds == "gppo" and advantage > 0 else LOW
            weight = np.minimum(np.maximum(ratio, low), high)
            held.append(weight != ratio)
            result += np.einsum("t,tprv->prv", weight * advantage, gradients(table, p, c)) / tokens
    return result, np.concatenate(held)


@pytest.mark.parametrize("bounds", ["cispo", "gppo"])
def test_steps_of_minibatches_and_epochs(bounds):
    """Two epochs of a step for each prompt, with ratios to what the sampler said."""
    groups, rate = [COMPLETIONS] * P, 2.0
    rewards, old = rewards_of(groups, REWARDS), TABLE + 0.3 * random_table(6)
    now, held = TABLE, []
    for p in [*range(P)] * 2:
        step, bound = own_step([groups[q] if q == p else () for q in range(P)], rewards, now, old, bounds)
        now, held = now + rate * step, [*held, bound]
    moved, metrics = run_update(make_batch(groups, rewards, old=old), rate=rate, num_iterations=2, num_minibatches=P,
                                bounds=bounds, ratio_low=LOW, ratio_high=HIGH, micro_batch_size=7)  # fmt: skip
    close(TABLE + rate * moved, now)
    last = np.concatenate(held[P:])
    assert 0 < last.sum() < len(last)
    close(metrics["clip_fraction"], last.mean())


def test_the_first_step_is_grpo_s():
    batch = make_batch([COMPLETIONS] * P, rewards_of([COMPLETIONS] * P, REWARDS))
    close(run_update(batch)[0], run_update(batch, grpo)[0])


@pytest.mark.parametrize("given", [{}, {"ratio_low": 0.3}, {"ratio_high": 3.0}], ids=str)
@pytest.mark.parametrize("bounds, low, high", [("cispo", 0.0, 5.0), ("gppo", 0.8, 1.28)])
def test_bounds_by_default(bounds, low, high, given):
    """Each stands where it is not given itself."""
    low, high = given.get("ratio_low", low), given.get("ratio_high", high)
    logps, sign = torch.tensor([[-9.0], [9.0]], requires_grad=True), torch.tensor([[-1.0], [1.0]])
    loss, _ = cispo.policy_loss(logps, torch.zeros(2, 1), sign, cispo.Args(bounds=bounds, **given))
    loss.sum().backward()
    close(logps.grad, [[max(low, math.exp(-9.0))], [-high]])


def test_inside_the_clip_gppo_is_grpo():
    """And where neither bound holds, cispo's gradient is that of the ratio itself."""
    generator = torch.Generator().manual_seed(0)
    logps, old, advantages = torch.randn(3, 200, 1, generator=generator).unbind()
    slopes = {}
    for name in ("cispo", "gppo", "grpo", "free"):
        leaf = logps.clone().requires_grad_()
        if name == "grpo":
            loss, cut = grpo.policy_loss(leaf, old, advantages, 0.2, 0.28)
        else:
            bounds = dict(ratio_low=0.0, ratio_high=1e9) if name == "free" else dict(ratio_low=0.8, ratio_high=1.28)
            bounds["bounds"] = "gppo" if name == "gppo" else "cispo"
            loss, _ = cispo.policy_loss(leaf, old, advantages, cispo.Args(**bounds))
        loss.sum().backward()
        slopes[name] = leaf.grad
    assert 0 < cut.sum() < 200
    close(slopes["gppo"][~cut], slopes["grpo"][~cut])
    assert not slopes["grpo"][cut].any() and (slopes["gppo"][cut] != 0).all()
    close(slopes["free"], -(logps - old).exp() * advantages)
