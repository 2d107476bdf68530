"""REINFORCE++: returns and whitening by hand, steps of `update` against numpy, expectations over whole batches."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from groups import GROUPS, OTHER, REWARDS, TABLE, P, close, make_batch, rewards_of, stepping
from tabular import COMPLETIONS, EOS, OUTSIDE, PREFIXES, gradients, log_probs, probability, random_table

from algos import grpo, reinforce_pp
from utils.core import UserError
from utils.dist import Samples

pytestmark = pytest.mark.usefixtures("float64")
BETA = 0.7
run_update = stepping(reinforce_pp)


def own_advantages(groups, rewards, old, beta=0.0, baseline="none", ref=OTHER, kept=lambda c: True) -> list[np.ndarray]:
    """Of each completion, one number per token: from the formulas, token by token. NaN for what counts nowhere."""
    values = []
    for p, group in enumerate(groups):
        for i, c in enumerate(group):
            reward = rewards[p][i] - (np.nanmean(rewards[p]) if baseline == "group" else 0.0)
            penalties = log_probs(old, p, c) - log_probs(ref, p, c)
            values.append(np.array([reward - (baseline == "none") * beta * sum(penalties[t:]) for t in range(len(c))]))
            values[-1] = values[-1] if kept(c) else np.full(len(c), np.nan)
    tokens = [x for row in values for x in row if not math.isnan(x)]
    mean = sum(tokens) / len(tokens)
    std = math.sqrt(sum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1) + 1e-8)
    return [(row - mean) / std for row in values]


def own_step(groups, advantages, table, old, rows, beta=0.0, low=0.2, high=0.2, denominator=None) -> tuple:
    """Movement of one plain step on `rows` in numpy, with clip and k2 penalty; and which of its tokens are cut."""
    every = [(p, c) for p, group in enumerate(groups) for c in group]
    kept = [i for i in rows if not np.isnan(advantages[i]).any()]
    tokens = denominator or sum(len(every[i][1]) for i in kept)
    movement, cuts = np.zeros_like(table), []
    for i in kept:
        (p, c), a = every[i], advantages[i]
        logps = log_probs(table, p, c)
        ratio = np.exp(logps - log_probs(old, p, c))
        cut = np.where(a > 0, ratio > 1 + high, ratio < 1 - low)
        slope = np.where(cut, 0.0, ratio * a) - beta * (logps - log_probs(OTHER, p, c))
        movement += np.einsum("t,tprv->prv", slope, gradients(table, p, c)) / tokens
        cuts += list(cut)
    return movement, cuts


def test_returns_by_hand():
    """Three completions of 3, 1 and 2 tokens, the last of which is cut off."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)
    logps = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 9.0, 9.0], [-1.0, -1.0, 9.0]])
    ref = torch.tensor([[-2.0, -2.5, -3.25], [-3.0, 5.0, 5.0], [-1.0, -3.0, 5.0]])
    close(reinforce_pp.kl_to_go(logps, ref, mask)[mask], [1.75, 0.75, 0.25, -1.0, 2.0, 2.0])
    none = torch.zeros(0)
    batch = reinforce_pp.Batch(Samples(none, none, none, mask, logps, none), torch.tensor([1.0, 0.0, 2.0]), ref)
    args = reinforce_pp.Args(num_generations=1, beta=0.4, whiten_advantages=False)
    close(reinforce_pp.advantages(batch, mask, args), [[0.3, 0.7, 0.9], [0.4, 0, 0], [1.2, 1.2, 0]])
    free = reinforce_pp.advantages(batch._replace(ref_logps=None), mask, args)
    close(free, [[1, 1, 1], [0, 0, 0], [2, 2, 0]])
    trained = mask & torch.tensor([[True], [True], [False]])  # the penalty is none the less of all tokens
    close(reinforce_pp.advantages(batch, trained, args), [[0.3, 0.7, 0.9], [0.4, 0, 0], [0, 0, 0]])


def test_whitening_by_hand():
    """Of 2, 4, 4 and 6, whose mean is 4 and whose unbiased variance 8/3; nothing outside of the mask."""
    mask = torch.tensor([[True, True], [True, False], [True, False]])
    white = reinforce_pp.whiten(torch.tensor([[2.0, 4.0], [4.0, 99.0], [6.0, -7.0]]), mask)
    np.testing.assert_allclose(white, [[-math.sqrt(1.5), 0], [0, 0], [math.sqrt(1.5), 0]], atol=1e-8)
    assert not reinforce_pp.whiten(torch.full((2, 2), 0.3), mask[:2]).any()
    assert not reinforce_pp.whiten(torch.tensor([[5.0]]), torch.tensor([[True]])).any()
    assert not reinforce_pp.whiten(torch.tensor([[5.0]]), torch.tensor([[False]])).any()


@pytest.mark.parametrize("baseline", ["none", "group"])
@pytest.mark.parametrize("masked", [False, True])
def test_steps_of_minibatches_and_epochs(baseline, masked):
    """Two epochs of a step for each prompt: advantages of the whole batch and of the sampler's log-probabilities,
    denominators of the minibatch. The penalty is in the reward, or k2 in the loss; truncated completions in neither."""
    groups, rate, size = [COMPLETIONS] * P, 2.0, len(COMPLETIONS)
    rewards, old = rewards_of(groups, REWARDS), TABLE + 0.3 * random_table(6)
    kept = (lambda c: EOS in c) if masked else (lambda c: True)
    advantages = own_advantages(groups, rewards, old, BETA, baseline, kept=kept)
    now, norms, cuts = TABLE, [], []
    for p in [*range(P)] * 2:
        step, cut = own_step(groups, advantages, now, old, range(p * size, (p + 1) * size),
                             BETA if baseline == "group" else 0.0, 0.1, 0.3)  # fmt: skip
        now, norms, cuts = now + rate * step, [*norms, np.linalg.norm(step)], [*cuts, *cut]
    batch = make_batch(groups, rewards, old=old, ref=OTHER)
    moved, metrics = run_update(batch, rate=rate, num_iterations=2, num_minibatches=P, epsilon=0.1, epsilon_high=0.3,
                                beta=BETA, baseline=baseline, mask_truncated_completions=masked,
                                micro_batch_size=size)  # fmt: skip
    close(TABLE + rate * moved, now)
    close(metrics["grad_norm"], np.mean(norms))
    last = cuts[len(cuts) // 2 :]
    assert 0 < sum(last) < len(last)
    close(metrics["clip_fraction"], np.mean(last))


@pytest.mark.parametrize("baseline, size", [("none", 1), ("none", 2), ("group", 2)])
def test_the_expected_update_by_enumeration(baseline, size):
    """Over all batches of two prompts, whose completions share mean and deviation: a finite batch is biased, so its own
    expectation is what is compared. Groups of two are made of four of the completions, as if there were no others."""
    total, expected = np.zeros_like(TABLE), np.zeros_like(TABLE)
    some = COMPLETIONS if size == 1 else COMPLETIONS[:4]
    for groups in product(product(some, repeat=size), repeat=P):
        chance = math.prod(probability(TABLE, p, c) for p, group in enumerate(groups) for c in group)
        rewards = rewards_of(groups, REWARDS)
        total += chance * run_update(make_batch(groups, rewards, ref=OTHER), beta=BETA, baseline=baseline)[0]
        advantages, beta = own_advantages(groups, rewards, TABLE, BETA, baseline), BETA * (baseline == "group")
        expected += chance * own_step(groups, advantages, TABLE, TABLE, range(P * size), beta)[0]
    assert abs(expected).max() > 1e-3
    close(total, expected)
    close(total[:, OUTSIDE], 0.0)


def test_a_large_batch_climbs_the_policy_gradient_over_one_deviation():
    """A batch that holds each completion as often as it is likely is a batch without end: then the update is the policy
    gradient of all prompts over one number, the deviation over tokens, whatever the baseline. GRPO's is not."""
    table = np.log(np.where(np.arange(3) == EOS, 0.5, 0.25)) + np.zeros_like(TABLE)
    groups = [[c for c in COMPLETIONS for _ in range(round(16 * probability(table, p, c)))] for p in range(P)]
    assert all(len(group) == 16 for group in groups)
    rewards = rewards_of(groups, [REWARDS[0], {c: 5 + 9 * r for c, r in REWARDS[1].items()}])
    batch = make_batch(groups, rewards, old=table)
    tokens = np.concatenate([[rewards[p][i]] * len(c) for p in range(P) for i, c in enumerate(groups[p])])
    slope = sum(rewards[p][i] * gradients(table, p, c).sum(0) for p in range(P) for i, c in enumerate(groups[p]))
    moved, _ = run_update(batch, table=table, aggregation="constant")
    close(moved, slope / (P * 16 * 5) / math.sqrt(tokens.var(ddof=1) + 1e-8))
    theirs, _ = run_update(batch, grpo, table=table, aggregation="constant")
    along = (theirs * slope).sum() / (slope**2).sum() * slope
    assert np.linalg.norm(theirs - along) > 0.1 * np.linalg.norm(theirs)


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
def test_groups_without_whitening_are_dr_grpo(aggregation):
    """With constant aggregation; and GRPO without scaling for the others."""
    batch = make_batch(GROUPS, rewards_of(GROUPS, REWARDS), old=TABLE + 0.1 * random_table(3))
    ours, metrics = run_update(batch, aggregation=aggregation, baseline="group", whiten_advantages=False)
    theirs, other = run_update(batch, grpo, aggregation=aggregation, scale_rewards="none")
    close(ours, theirs)
    close(list(metrics.values()), [other[name] for name in metrics])
    assert metrics.keys() == other.keys() and abs(ours).max() > 1e-3


@pytest.mark.parametrize("pad", [0, EOS])
def test_first_eos_is_trained_and_nothing_after_it(pad):
    groups, rewards = [((1,), (0, 2)), ((2, 1), (1,))], [[1.0, 0.0], [0.0, 1.0]]
    moved, _ = run_update(make_batch(groups, rewards, pad=pad))
    close(moved, own_step(groups, own_advantages(groups, rewards, TABLE), TABLE, TABLE, range(4))[0])
    close(moved[:, OUTSIDE], 0.0)
    assert moved[0, 0, EOS] > 0.01 and moved[1, PREFIXES.index((2,)), EOS] < -0.001


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_skipped_rewards_count_nowhere(baseline):
    """They are in no mean and no deviation; their tokens stay in the denominator, as in grpo.py."""
    nan = math.nan
    rewards = [[0.3, nan, 1.0], [nan, 0.2, nan]]
    advantages = own_advantages(GROUPS, rewards, TABLE, BETA, baseline)
    tokens = sum(len(c) for group in GROUPS for c in group)
    batch = make_batch(GROUPS, rewards, ref=OTHER if baseline == "none" else None)
    moved, _ = run_update(batch, beta=BETA, baseline=baseline)
    close(moved, own_step(GROUPS, advantages, TABLE, TABLE, range(6), denominator=tokens)[0])
    assert np.isfinite(moved).all() and abs(moved).max() > 1e-3
    still, _ = run_update(make_batch(GROUPS, [[nan] * 3] * 2), baseline=baseline)
    close(still, 0.0)


def test_k2_by_hand():
    """Its slope under the policy is that of KL(pi_theta || pi_ref), token by token."""
    theta = torch.tensor([0.3, -1.0, 0.8], requires_grad=True)
    logp, ref = theta.log_softmax(0), torch.tensor([1.0, 0.2, -0.5]).log_softmax(0)
    ours = torch.autograd.grad((logp.exp().detach() * reinforce_pp.k2(logp, ref)).sum(), theta, retain_graph=True)[0]
    close(ours, torch.autograd.grad((logp.exp() * (logp - ref)).sum(), theta)[0])
    close(reinforce_pp.k2(torch.tensor(-1.0), torch.tensor(-3.0)).item(), 2.0)


def test_one_completion_learns_where_grpo_refuses():
    alone = dict(task="sort", num_generations=1, device="cpu")
    with pytest.raises(UserError, match="--num-generations must be at least 2"):
        grpo.train(grpo.Args(**alone))
    with pytest.raises(UserError, match="--baseline group needs --num-generations of at least 2"):
        reinforce_pp.train(reinforce_pp.Args(**alone, baseline="group"))
    for group in ([(1,)], [(0, 2)]), ([(2, 1)], [(2, 1)]):
        assert abs(run_update(make_batch(group, [[1.0], [0.0]]))[0]).max() > 1e-3
