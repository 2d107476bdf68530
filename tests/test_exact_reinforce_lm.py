"""reinforce_lm.update against enumeration: every answer to every prompt of a tabular model, with its probability.
Expected values come from numpy."""

import itertools
import math

import numpy as np
import pytest
import torch
from groups import GROUPS, REWARDS, TABLE, P, close, expectation, make_batch, rewards_of
from tabular import COMPLETIONS, EOS, OUTSIDE, TabularLM, gradients, log_probs, probability, random_table

from algos import reinforce_lm, rloo
from utils.core import UserError

pytestmark = pytest.mark.usefixtures("float64")


def run_update(groups, rewards, old=TABLE, pad=0, **settings) -> tuple[np.ndarray, dict]:
    """The table's change in one call of update at rate 1, and its metrics. groups: answers to each prompt."""
    model, batch = TabularLM(TABLE), make_batch(groups, rewards, old=old, pad=pad)
    args = dict(micro_batch_size=len(batch.rewards), micro_batch_tokens=0, precision="float32", max_grad_norm=1e9)
    metrics = reinforce_lm.update(model, torch.optim.SGD(model.parameters(), 1.0),
                                  reinforce_lm.Batch(batch.samples, batch.rewards),
                                  reinforce_lm.Args(**args | settings))  # fmt: skip
    return model.table.detach().numpy() - TABLE, metrics


@pytest.mark.parametrize("baseline", [True, False])
def test_the_expected_update_is_the_gradient_of_the_expected_reward(baseline):
    """Over all answers to both prompts, each answered once: the baseline of one is the other's reward."""
    total = np.zeros_like(TABLE)
    for answers in itertools.product(COMPLETIONS, repeat=P):
        groups = [(c,) for c in answers]
        weight = math.prod(probability(TABLE, p, c) for p, c in enumerate(answers))
        total += weight * run_update(groups, rewards_of(groups, REWARDS), baseline=baseline)[0]
    close(total, expectation(lambda p, c: gradients(TABLE, p, c).sum(0) * REWARDS[p][c]))
    close(total[:, OUTSIDE], 0.0)


def own_step(groups, rewards) -> np.ndarray:
    """In numpy, with the mean of the other known rewards."""
    rows = [(p, c, r) for p, group in enumerate(groups) for c, r in zip(group, rewards[p])]
    known, result = [r for *_, r in rows if not math.isnan(r)], np.zeros_like(TABLE)
    for p, c, r in rows:
        if not math.isnan(r):
            advantage = r - (sum(known) - r) / (len(known) - 1)
            result += advantage * gradients(TABLE, p, c).sum(0) / len(rows)
    return result


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("pad", [0, EOS])
@pytest.mark.parametrize("skipped", [False, True])
def test_one_step_equals_numpy(size, pad, skipped):
    """In micro-batches of any size; the first EOS is trained and nothing after it; an unknown reward is left out."""
    rewards = rewards_of(GROUPS, REWARDS)
    if skipped:
        rewards[0][1] = math.nan
    old = TABLE + 0.1 * random_table(3)
    moved, metrics = run_update(GROUPS, rewards, old, pad, micro_batch_size=size)
    close(moved, own_step(GROUPS, rewards))
    rows = [(p, c) for p, group in enumerate(GROUPS) for c in group]
    now, then = (np.concatenate([log_probs(table, p, c) for p, c in rows]) for table in (TABLE, old))
    close(metrics["sampler_gap"], abs(now - then).mean())
    close(metrics["grad_norm"], np.linalg.norm(moved))


def test_answers_to_one_prompt_are_rloo_s():
    rewards = rewards_of([COMPLETIONS], REWARDS)
    close(reinforce_lm.advantages(torch.tensor(rewards[0]), True), rloo.advantages(torch.tensor(rewards))[0])
    close(reinforce_lm.advantages(torch.tensor([2.0, math.nan, 5.0]), False), [2.0, 0.0, 5.0])
    close(reinforce_lm.advantages(torch.tensor([2.0, math.nan]), False), [2.0, 0.0])
    close(reinforce_lm.advantages(torch.tensor([2.0, math.nan]), True), [0.0, 0.0])


def test_one_answer_has_no_others(tmp_path):
    with pytest.raises(UserError, match="--num-prompts must be at least 2"):
        reinforce_lm.train(reinforce_lm.Args(num_prompts=1, output_dir=str(tmp_path)))
    assert not list(tmp_path.iterdir())
