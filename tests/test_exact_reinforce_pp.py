"""REINFORCE++: updates against the reference, with returns and whitening computed a second time."""

import math

import numpy as np
import pytest
from groups import GROUPS, REWARDS, TABLE, P, close, make_batch, rewards_of, stale, stepping, twice
from reference.grpo import Rule
from tabular import COMPLETIONS, EOS, gradients, probability

from algos import grpo, reinforce_pp
from utils.core import UserError

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


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("baseline", ["none", "group"])
@stale
def test_updates_equal_the_reference_s(case, baseline, whiten):
    """The penalty is in the reward, of the sampler's log-probabilities, or k2 in the loss. Mean and deviation leave out
    what is cut off or unknown."""
    rule = Rule(whitened, penalty=lambda d, s: -d * (s.baseline == "group"))
    metrics = twice(reinforce_pp, rule, case, baseline=baseline, whiten_advantages=whiten, beta=BETA)  # fmt: skip
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


def test_one_completion_learns_where_grpo_refuses():
    alone = dict(task="sort", num_generations=1, device="cpu")
    with pytest.raises(UserError, match="--num-generations must be at least 2"):
        grpo.train(grpo.Args(**alone))
    with pytest.raises(UserError, match="--baseline group needs --num-generations of at least 2"):
        reinforce_pp.train(reinforce_pp.Args(**alone, baseline="group"))
    for group in ([(1,)], [(0, 2)]), ([(2, 1)], [(2, 1)]):
        assert abs(run_update(make_batch(group, [[1.0], [0.0]]))[0]).max() > 1e-3
