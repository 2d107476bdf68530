"""GSPO: values by hand, and steps of `update` against numpy."""

import numpy as np
import pytest
import torch
from groups import GROUPS, OTHER, REWARDS, TABLE, P, close, make_batch, rewards_of, stepping
from tabular import COMPLETIONS, EOS, gradients, log_probs, probability, random_table

from algos import grpo, gspo

pytestmark = pytest.mark.usefixtures("float64")
run_update = stepping(gspo)


def own_step(groups, rewards, table, low, high, beta=0.0, kept=lambda c: True) -> tuple[np.ndarray, list[bool]]:
    """Movement of one plain step in numpy from the formulas, with ratios to TABLE; and which of the kept completions
    were cut."""
    rows = [(p, i, c) for p, group in enumerate(groups) for i, c in enumerate(group)]
    result, cuts = np.zeros_like(table), []
    for p, i, c in rows:
        advantage = (rewards[p][i] - np.mean(rewards[p])) / (np.std(rewards[p], ddof=1) + 1e-4)
        now = log_probs(table, p, c)
        ratio = np.exp((now - log_probs(TABLE, p, c)).mean()) if kept(c) else 1.0
        cut = ratio > 1 + high if advantage > 0 else ratio < 1 - low
        cuts += [cut] if kept(c) else []
        per_token = np.full(len(c), 0.0 if cut else ratio * advantage)
        per_token += beta * (np.exp(log_probs(OTHER, p, c) - now) - 1)
        result += kept(c) * np.einsum("t,tprv->prv", per_token, gradients(table, p, c)) / (len(c) * len(rows))
    return result, cuts


@pytest.mark.parametrize("masked", [False, True])
def test_steps_of_minibatches_and_epochs(masked):
    """Two epochs of a step for each prompt: one ratio per completion, to the policy before the first step and not to
    the sampler; the clip takes whole completions; the penalty is per token, as in grpo.py."""
    groups, rate, low, high = [COMPLETIONS] * P, 2.0, 0.02, 0.06
    rewards = rewards_of(groups, REWARDS)
    kept = (lambda c: EOS in c) if masked else (lambda c: True)
    now, norms, cuts = TABLE, [], []
    for p in [*range(P)] * 2:
        one = [groups[q] if q == p else () for q in range(P)]
        step, cut = own_step(one, rewards, now, low, high, 0.05, kept)
        now, norms, cuts = now + rate * step, [*norms, np.linalg.norm(step)], [*cuts, *cut]
    batch = make_batch(groups, rewards, old=TABLE + 0.3 * random_table(6), ref=OTHER)
    moved, metrics = run_update(batch, rate=rate, num_iterations=2, num_minibatches=P, epsilon=low, epsilon_high=high,
                                beta=0.05, mask_truncated_completions=masked, micro_batch_size=7)  # fmt: skip
    close(TABLE + rate * moved, now)
    last = cuts[len(cuts) // 2 :]
    assert 0 < sum(last) < len(last) and not any(cuts[: sum(map(kept, COMPLETIONS))])
    close(metrics["clip_fraction"], np.mean(last))
    close(metrics["grad_norm"], np.mean(norms))


def test_the_gap_is_that_of_sampler_and_scorer():
    groups, old = [COMPLETIONS] * P, TABLE + 0.3 * random_table(6)
    _, metrics = run_update(make_batch(groups, rewards_of(groups, REWARDS), old=old), rate=5.0, num_iterations=2)
    gaps = [abs(log_probs(TABLE, p, c) - log_probs(old, p, c)) for p in range(P) for c in COMPLETIONS]
    close(metrics["sampler_gap"], np.concatenate(gaps).mean())


def test_the_first_step_is_grpo_s():
    """At ratio 1 the gradient is that of grpo.py with means over completions."""
    batch = make_batch(GROUPS, rewards_of(GROUPS, REWARDS), ref=OTHER)
    ours, theirs = run_update(batch, beta=0.1)[0], run_update(batch, grpo, beta=0.1, aggregation="sequence")[0]
    close(ours, theirs)
    assert abs(ours).max() > 0.01


def test_one_token_is_grpo_s():
    """Where completions have one token, value, gradient and clip are those of grpo.py."""
    generator = torch.Generator().manual_seed(0)
    logps, old, advantages = torch.randn(3, 40, 1, generator=generator).unbind()
    found = []
    for loss in (lambda x: gspo.policy_loss(x, old, advantages, torch.ones_like(x), 0.2, 0.3),
                 lambda x: grpo.policy_loss(x, old, advantages, 0.2, 0.3)):  # fmt: skip
        leaf = logps.clone().requires_grad_()
        value, cut = loss(leaf)
        value.sum().backward()
        found.append((value.detach(), cut, leaf.grad))
    for ours, theirs in zip(*found):
        assert torch.equal(ours, theirs)
    assert 0 < found[0][1].sum() < 40


@pytest.mark.parametrize("advantage, cut", [(2.0, True), (-2.0, False)])
def test_the_ratio_of_a_completion_by_hand(advantage, cut):
    """Three tokens, of which two are trained, with ratios 2 and 0.72: the geometric mean is 1.2. What a masked token
    says is nothing."""
    old = torch.tensor([[0.25, 0.5, 0.1]]).log()
    logps = torch.tensor([[0.5, 0.36, 0.9]]).log().requires_grad_()
    loss, clipped = gspo.policy_loss(logps, old, torch.tensor([[advantage]]), torch.tensor([[1, 1, 0]]), 0.05, 0.1)
    loss.sum().backward()
    close(loss.item(), -(1.1 if cut else 1.2) * advantage)
    close(logps.grad, [[0.0] * 3 if cut else [-1.2 * advantage / 2] * 2 + [0.0]])
    assert clipped.item() == cut


def test_the_ratio_is_no_importance_weight():
    """Its mean under the old policy is not 1, as that of the product of ratios is: over all completions."""
    for p in range(P):
        mean = product = 0.0
        for c in COMPLETIONS:
            now, old = (torch.tensor(log_probs(table, p, c))[None] for table in (OTHER, TABLE))
            loss, _ = gspo.policy_loss(now, old, torch.tensor([[-1.0]]), torch.ones_like(now), 1.0, 1e9)
            close(loss.item(), np.exp((log_probs(OTHER, p, c) - log_probs(TABLE, p, c)).mean()))
            mean += probability(TABLE, p, c) * loss.item()
            product += probability(TABLE, p, c) * (now - old).sum().exp().item()
        close(product, 1.0)
        assert abs(mean - 1) > 0.01
