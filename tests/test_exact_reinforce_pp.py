"""REINFORCE++: returns and whitening by hand, updates against the reference."""

import math

import numpy as np
import pytest
import torch
from groups import GROUPS, REWARDS, TABLE, P, close, make_batch, rewards_of, stale, stepping, twice
from reference.grpo import Rule
from tabular import COMPLETIONS, EOS, gradients, probability

from algos import grpo, reinforce_pp
from utils.core import UserError
from utils.dist import Samples

pytestmark = pytest.mark.usefixtures("float64")
BETA = 0.7
run_update = stepping(reinforce_pp)


def whitened(rows, s) -> list[np.ndarray]:
    """One number per token: reward and penalties from it on, or reward less the group's mean; then whitened."""
    values = []
    for row in rows:
        same = [other.reward for other in rows if other.p == row.p]
        reward = row.reward - (np.nanmean(same) if s.baseline == "group" else 0.0)
        penalties = (s.baseline == "none") * s.beta * (row.sampler - row.ref)
        values.append(np.array([reward - sum(penalties[t:]) for t in range(len(row.c))]))
    tokens = np.concatenate([x[row.own] for row, x in zip(rows, values)])
    tokens = tokens[~np.isnan(tokens)]
    mean, scale = (tokens.mean(), math.sqrt(tokens.var(ddof=1) + 1e-8)) if s.whiten_advantages else (0, 1)
    return [np.nan_to_num((x - mean) / scale) for x in values]


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


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("baseline", ["none", "group"])
@stale
def test_updates_equal_the_reference_s(case, baseline, whiten):
    """The penalty is in the reward, of the sampler's log-probabilities, or k2 in the loss. Mean and deviation leave out
    what is cut off or unknown."""
    rule = Rule(whitened, penalty=lambda d, s: -d * (s.baseline == "group"))
    metrics = twice(reinforce_pp, rule, case, baseline=baseline, whiten_advantages=whiten, epsilon=0.1,
                    epsilon_high=0.3, beta=BETA)  # fmt: skip
    assert 0 < metrics["clip_fraction"] < 1


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


def test_a_step_without_rewards_moves_nothing():
    for baseline in "none", "group":
        close(run_update(make_batch(GROUPS, [[math.nan] * 3] * 2), baseline=baseline)[0], 0.0)


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
