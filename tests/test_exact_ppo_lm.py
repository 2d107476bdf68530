"""ppo_lm.update against enumeration: every completion of a tabular model with a tabular critic, by its probability.

As tests/test_exact_grpo.py; expected values come from numpy.
"""

import math

import numpy as np
import pytest
import torch
from groups import OTHER, REWARDS, TABLE, P, batches, close, expectation, make_batch, rewards_of
from groups import args_of as common_args
from reference.grpo import Rule
from reference.grpo import update as second_update
from tabular import COMPLETIONS, EOS, OUTSIDE, PREFIXES, PROMPTS, VOCAB, TabularLM, gradients, log_probs, probability
from tabular import random_table as random_logits

from algos import ppo_lm
from utils.dist import pad_left
from utils.lm import load_model

pytestmark = pytest.mark.usefixtures("float64")
BETA, L_MAX, LAMBDA = 0.7, 5, 0.6
VALUES = np.random.default_rng(5).normal(size=(P, len(PREFIXES)))  # a critic that knows nothing


class TabularCritic(torch.nn.Module):
    """V is looked up by (prompt, completion so far)."""

    def __init__(self, table: np.ndarray):
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(table))

    def forward(self, prompt_ids, prompt_mask, completion_ids, completion_mask):
        prompts = [PROMPTS.index(ids[mask].tolist()) for ids, mask in zip(prompt_ids, prompt_mask)]
        repeats, rows = len(completion_ids) // len(prompts), []
        for i, (ids, mask) in enumerate(zip(completion_ids.tolist(), completion_mask.tolist())):
            seen = [self.table[prompts[i // repeats], PREFIXES.index(tuple(ids[:t]))] * mask[t] if mask[t]
                    else self.table.new_zeros(()) for t in range(len(ids))]  # fmt: skip
            rows.append(torch.stack(seen))
        return torch.stack(rows)


def make(groups, rewards, old=TABLE, ref=OTHER, values=VALUES, **settings) -> ppo_lm.Batch:
    samples, rewards, ref_logps = make_batch(groups, rewards, old=old, ref=ref, **settings)
    rows = [(p, c) for p, group in enumerate(groups) for c in group]
    width = samples.completion_ids.shape[1]
    seen = [[values[p][PREFIXES.index(c[:t])] if t < len(c) else 0.0 for t in range(width)] for p, c in rows]
    return ppo_lm.Batch(samples, rewards, ref_logps, torch.tensor(np.array(seen)))


def args_of(size: int, **settings) -> ppo_lm.Args:
    own = dict(num_iterations=1, beta=BETA, gae_lambda=LAMBDA, whiten_advantages=False, aggregation="constant")
    return common_args(ppo_lm, size, **own | settings)


def run_update(batch, table=TABLE, values=VALUES, rate=1.0, seed=0, **settings):
    """The changes of both tables in one call of update, over `rate`; and its metrics."""
    model, critic = TabularLM(table), TabularCritic(values)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": critic.parameters()}], rate)
    metrics = ppo_lm.update(model, critic, optimizer, batch, torch.Generator().manual_seed(seed),
                            args_of(len(batch.rewards) // P, **settings))  # fmt: skip
    moved = ((part.table.detach().numpy() - old) / rate for part, old in ((model, table), (critic, values)))
    return *moved, metrics


def own_rewards(p, c, reward, beta=BETA, old=TABLE) -> np.ndarray:
    """(T,)"""
    rewards = -beta * (log_probs(old, p, c) - log_probs(OTHER, p, c))
    rewards[-1] += reward
    return rewards


def own_advantages(rewards, values, gae_lambda, gamma=1.0) -> np.ndarray:
    """(T,): the sum over k of (gamma lambda)^k delta_t+k, by its definition."""
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    return np.array([sum((gamma * gae_lambda) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))])


def values_of(table, p, c) -> np.ndarray:
    return np.array([table[p][PREFIXES.index(c[:t])] for t in range(len(c))])


def exact_values(beta: float) -> np.ndarray:
    """What the penalised rewards from a prefix on sum to, on average, under the policy that samples."""
    result = np.zeros((P, len(PREFIXES)))
    for p in range(P):
        for i, prefix in enumerate(PREFIXES):
            for c in COMPLETIONS:
                if c[: len(prefix)] == prefix and len(c) > len(prefix):
                    chance = np.exp(log_probs(TABLE, p, c)[len(prefix) :].sum())
                    result[p, i] += chance * own_rewards(p, c, REWARDS[p][c], beta)[len(prefix) :].sum()
    return result


def objective_gradient(beta: float) -> np.ndarray:
    """Of E[reward] - beta KL(pi || pi_ref) of whole completions, by the score function; checked by differences."""

    def objective(table):
        parts = [(probability(table, p, c), REWARDS[p][c], log_probs(table, p, c) - log_probs(OTHER, p, c))
                 for p in range(P) for c in COMPLETIONS]  # fmt: skip
        return sum(chance * (reward - beta * ratio.sum()) for chance, reward, ratio in parts) / P

    exact = expectation(lambda p, c: own_rewards(p, c, REWARDS[p][c], beta).sum() * gradients(TABLE, p, c).sum(0))
    index = (1, 0, 2)
    step = np.zeros_like(TABLE)
    step[index] = 1e-6
    np.testing.assert_allclose((objective(TABLE + step) - objective(TABLE - step)) / 2e-6, exact[index], atol=1e-8)
    return exact


def expected_movement(joint=False, values=VALUES, group_size=1, **settings) -> np.ndarray:
    total = np.zeros_like(TABLE)
    for groups, weight in batches(group_size, joint):
        batch = make(groups, rewards_of(groups, REWARDS), values=values)
        total += weight * run_update(batch, values=values, **settings)[0]
    return total


@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize("case", ["lambda 1, any critic", "any lambda, exact critic"])
def test_expected_update_is_the_gradient_of_the_regularised_objective(case, beta):
    """1 / L_max times it, with k1 in the reward of each token and returns-to-go: the full divergence of sequences."""
    exact = "exact" in case
    moved = expected_movement(values=exact_values(beta) if exact else VALUES, beta=beta,
                              gae_lambda=LAMBDA if exact else 1.0)  # fmt: skip
    close(moved, objective_gradient(beta) / L_MAX)
    close(moved[:, OUTSIDE], 0.0)


def of_critic(rows, s) -> list[np.ndarray]:
    """One number per token; whitened over all that have a reward."""
    for row in rows:
        rewards = -s.beta * (row.sampler - row.ref)
        rewards[-1] += row.reward
        row.old_values = values_of(VALUES, row.p, row.c)
        row.raw = own_advantages(rewards, row.old_values, s.gae_lambda)
    tokens = np.concatenate([row.raw for row in rows])
    tokens = tokens[~np.isnan(tokens)]
    mean, scale = (tokens.mean(), np.sqrt(tokens.var(ddof=1) + 1e-8)) if s.whiten_advantages else (0, 1)
    return [(row.raw - mean) / scale for row in rows]


def of_values(row, table, s) -> np.ndarray:
    """Minus vf_coef times the slope of the larger error; values are the column behind the policy's."""
    gradient = np.zeros((len(row.c), *table.shape))
    for t, (old, target) in enumerate(zip(row.old_values, row.old_values + row.raw)):
        place = row.p, PREFIXES.index(row.c[:t]), VOCAB
        value = table[place]
        near = old + np.clip(value - old, -s.clip_value, s.clip_value)
        gradient[t][place] = -s.vf_coef * (value - target) * ((value - target) ** 2 >= (near - target) ** 2)
    return gradient


@pytest.mark.parametrize("whiten, clip", [(True, 0.15), (False, 9.0)])
@pytest.mark.parametrize("aggregation", ["token", "constant"])
@pytest.mark.parametrize("unknown", [[], [1, 4, 9]])
def test_updates_equal_the_reference_s(unknown, aggregation, whiten, clip):
    """Both tables after two epochs of two minibatches in the order that the generator draws; advantages and returns are
    of the old values. A row without a reward teaches nothing and has no part in whitening."""
    groups, old, values = [COMPLETIONS] * P, TABLE + 0.3 * random_logits(6), VALUES + 0.3
    rewards = np.array(rewards_of(groups, REWARDS))
    rewards.reshape(-1)[unknown] = math.nan
    settings = dict(num_iterations=2, num_minibatches=2, whiten_advantages=whiten, aggregation=aggregation,
                    vf_coef=0.4, clip_value=clip, max_grad_norm=0.2, epsilon=0.1, epsilon_high=0.3)  # fmt: skip
    moved, valued, metrics = run_update(make(groups, rewards, old=old, pad=EOS), values=values, rate=1.5, seed=3,
                                        micro_batch_size=3, **settings)  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    order = [[[p] for p in torch.randperm(P, generator=generator).tolist()] for _ in range(2)]
    rule = Rule(of_critic, penalty=lambda d, s: 0 * d, extra=of_values,
                own=lambda row, s: np.full(len(row.c), not math.isnan(row.reward)))  # fmt: skip
    both = np.concatenate([TABLE, np.pad(values, ((0, 0), (0, 1)))[..., None]], 2)
    end, expected = second_update(rule, groups, rewards, both, args_of(len(COMPLETIONS), **settings), old, OTHER, 1.5,
                                  order)  # fmt: skip
    close(TABLE + 1.5 * moved, end[..., :VOCAB])
    close(values + 1.5 * valued, end[:, :-1, VOCAB])
    assert not moved[:, OUTSIDE].any() and 0 < metrics["clip_fraction"] < 1
    for name in expected.keys() - {"kl"}:
        close(metrics[name], expected[name])


def test_advantages_by_hand():
    """Nothing behind the end."""
    rewards = torch.tensor([[1.0, 2.0, 4.0], [3.0, 9.0, 9.0]])
    values = torch.tensor([[0.5, 1.0, -1.0], [2.0, 0.0, 0.0]])
    mask = torch.tensor([[True] * 3, [True, False, False]])
    last = 4.0 + 1.0
    middle = 2.0 + 0.9 * -1.0 - 1.0 + 0.9 * 0.5 * last
    first = 1.0 + 0.9 * 1.0 - 0.5 + 0.9 * 0.5 * middle
    close(ppo_lm.gae(rewards, values, mask, 0.9, 0.5), [[first, middle, last], [1.0, 0.0, 0.0]])


@pytest.mark.parametrize("whiten", [True, False])
def test_explained_variance_by_hand(whiten):
    """Of the returns by the values, over the tokens of all completions that have a reward; returns that vary little.
    Whitened advantages change nothing in it."""
    groups = [COMPLETIONS] * P
    rewards = [[0.01 * reward for reward in row] for row in rewards_of(groups, REWARDS)]
    *_, metrics = run_update(make(groups, rewards), beta=0.01, whiten_advantages=whiten)
    values, returns = [], []
    for p in range(P):
        for c, reward in zip(COMPLETIONS, rewards[p]):
            values.append(values_of(VALUES, p, c))
            returns.append(own_advantages(own_rewards(p, c, reward, 0.01), values[-1], LAMBDA) + values[-1])
    values, returns = np.concatenate(values), np.concatenate(returns)
    assert returns.var(ddof=1) < 0.9
    close(metrics["explained_variance"], 1 - (returns - values).var(ddof=1) / returns.var(ddof=1))


def test_a_step_without_rewards_teaches_nothing():
    moved, valued, _ = run_update(make([((1,), (0, 2)), ((2, 1), (1,))], [[math.nan] * 2] * 2), whiten_advantages=True)
    close(moved, 0.0)
    close(valued, 0.0)


def test_the_critic_of_a_real_model():
    """Values stand before their tokens: V_t depends on the prompt and y_<t, and on nothing from y_t on; padding on the
    left changes nothing; the shared one moves the policy, the separate one does not."""
    torch.set_default_dtype(torch.float32)
    model, _ = load_model(ppo_lm.Args())
    ids, mask = torch.tensor([[5, 6, 7, 8], [9, 5, 5, 5]]), torch.tensor([[True] * 4, [True, True, False, False]])
    for shared in (True, False):
        critic = ppo_lm.load_critic(model, ppo_lm.Args(critic="shared" if shared else "separate"))
        torch.nn.init.normal_(critic.head.weight)
        values = critic(*pad_left([[4, 5, 6], [7]], "cpu"), ids, mask)
        assert (values[1, 2:] == 0).all() and (values[0] != 0).all() and values[0].unique().numel() == 4
        changed = ids.clone()
        changed[0, 2] = 11
        again = critic(*pad_left([[4, 5, 6], [7]], "cpu"), changed, mask)
        torch.testing.assert_close(again[0, :3], values[0, :3])
        assert (again[0, 3] - values[0, 3]).abs() > 1e-4
        alone = critic(*pad_left([[7]], "cpu"), ids[1:], mask[1:])
        torch.testing.assert_close(alone, values[1:], atol=1e-5, rtol=1e-4)
        model.zero_grad()
        values.sum().backward()
        moves = any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
        assert moves == shared and (len(list(critic.parameters())) == 2) == shared


def test_policy_and_critic_have_learning_rates_of_their_own(tmp_path):
    torch.set_default_dtype(torch.float32)
    args = ppo_lm.Args(task="sort", max_steps=2, num_prompts=8, max_completion_length=8, eval_prompts=2, eval_every=0,
                       learning_rate=1e-12, critic_learning_rate=0.1, output_dir=str(tmp_path))  # fmt: skip
    history = ppo_lm.train(args)
    assert [row["learning_rate"] for row in history[1:]] == [1e-12, 1e-12]
    assert abs(history[2]["approx_kl"]) < 1e-6 and history[2]["explained_variance"] != 0


def test_minibatches_are_drawn_afresh_in_every_epoch(monkeypatch):
    """Two prompts, one in each minibatch: every epoch has both, and over seeds both orders come in each epoch."""
    batch = make([[COMPLETIONS[0]], [COMPLETIONS[1]]], [1.0, -1.0])
    inner, orders = ppo_lm.micro_batches, []

    def spy(samples, args, within):
        orders[-1].extend(within.tolist())
        return inner(samples, args, within)

    monkeypatch.setattr(ppo_lm, "micro_batches", spy)
    for seed in range(12):
        orders.append([])
        run_update(batch, seed=seed, num_minibatches=2, num_iterations=2)
    assert {tuple(order) for order in orders} == {(0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0, 1), (1, 0, 1, 0)}
