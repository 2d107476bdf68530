"""reinforce.py against enumeration: every pair of episodes of a small MDP, with its probability, gives the expected
gradient of `update`; the gradient of the expected return comes from the table of the policy alone."""

import itertools
import math

import numpy as np
import pytest
import torch
from control import close, float64
from environments import Probe
from helpers import metrics, new_run
from torch import nn

from algos import reinforce
from utils.core import UserError

# Two states, two actions, at most three steps. Action 1 of the first state ends the episode; all else goes on.
LOGITS = np.array([[0.3, -0.4], [-0.2, 0.9]])
REWARDS = np.array([[1.0, 2.5], [-0.5, 3.0]])
STEPS = 3


def episodes() -> list[list[tuple[int, int, float]]]:
    """All episodes as (state, action, reward). The state after an action is its number; episodes begin in state 0."""
    found = []

    def go(state: int, past: list) -> None:
        for action in (0, 1):
            now = [*past, (state, action, REWARDS[state, action])]
            over = (state, action) == (0, 1) and len(now) > 1 or len(now) == STEPS
            found.append(now) if over else go(action, now)

    go(0, [])
    return found


def table() -> np.ndarray:
    weights = np.exp(LOGITS)
    return weights / weights.sum(1, keepdims=True)


def probability(episode) -> float:
    return math.prod(table()[state, action] for state, action, _ in episode)


def slopes(episode, weigh) -> np.ndarray:
    """sum_t weigh(t) grad log pi(a_t | s_t) with respect to the logits."""
    total = np.zeros((2, 2))
    for t, (state, action, _) in enumerate(episode):
        total[state] += weigh(t) * (np.eye(2)[action] - table()[state])
    return total


def expected_gradient(gamma: float) -> np.ndarray:
    """At gamma 1 that of the expected return: sum over episodes of p R grad log p, without any return to go. Below 1,
    what the docstring says."""
    if gamma == 1:
        return sum(probability(e) * sum(r for *_, r in e) * slopes(e, lambda t: 1.0) for e in episodes())
    togo = lambda e, t: sum(gamma**k * r for k, (*_, r) in enumerate(e[t:]))  # noqa: E731
    return sum(probability(e) * slopes(e, lambda t, e=e: togo(e, t)) for e in episodes())


def batch_of(*several) -> reinforce.Batch:
    longest = max(map(len, several))
    obs, actions = torch.zeros(len(several), longest, 2), torch.zeros(len(several), longest, dtype=torch.long)
    rewards, mask = torch.zeros(2, len(several), longest)
    for i, episode in enumerate(several):
        obs[i, len(episode) :, 0] = 3  # an observation from which something could be learnt
        for t, (state, action, reward) in enumerate(episode):
            obs[i, t, state], actions[i, t], rewards[i, t], mask[i, t] = 1, action, reward, 1
    return reinforce.Batch(obs, actions, rewards, mask.bool())


def policy() -> nn.Module:
    module = nn.Linear(2, 2, bias=False)
    module.weight.data = torch.tensor(LOGITS.T.copy())
    return module


def step_of(batch: reinforce.Batch, **settings) -> tuple[np.ndarray, dict]:
    """How far `update` moves the logits, by plain descent at rate 1, and its metrics."""
    module = policy()
    numbers = reinforce.update(module, torch.optim.SGD(module.parameters(), 1.0), batch, reinforce.Args(**settings))
    return module.weight.detach().numpy().T - LOGITS, numbers


@float64()
@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("baseline", [True, False])
def test_the_expected_gradient_of_update_is_the_enumerated_one(gamma, baseline):
    """Over all pairs of episodes, of one to three steps. The baseline leaves it as it is."""
    assert {len(episode) for episode in episodes()} == {2, 3}
    close(sum(map(probability, episodes())), 1.0)
    moved = sum(
        probability(a) * probability(b) * step_of(batch_of(a, b), gamma=gamma, baseline=baseline)[0]
        for a, b in itertools.product(episodes(), repeat=2)
    )
    close(moved, expected_gradient(gamma))


@float64()
def test_the_baseline_takes_away_what_all_episodes_share():
    """Every reward is 10 larger, and episodes have one length: with a baseline no gradient changes."""
    whole = [episode for episode in episodes() if len(episode) == STEPS]
    for a, b in itertools.combinations(whole, 2):
        raised = batch_of(a, b)._replace(rewards=batch_of(a, b).rewards + 10)
        close(step_of(raised)[0], step_of(batch_of(a, b))[0])
        assert np.abs(step_of(raised, baseline=False)[0] - step_of(batch_of(a, b), baseline=False)[0]).max() > 0.1


@float64()
def test_numbers_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 0.0], [0.0, 6.0, 0.0]])
    returns = reinforce.returns_to_go(rewards, 0.5)
    close(returns, [[3.0, 4.0, 4.0], [3.0, 0.0, 0.0], [3.0, 6.0, 0.0]])
    close(reinforce.advantages(returns, True), [[0.0, 1.0, 4.0], [0.0, -5.0, -2.0], [0.0, 4.0, -2.0]])
    assert reinforce.advantages(returns, False) is returns


@float64()
def test_the_metrics_are_of_real_steps():
    short, long = [next(e for e in episodes() if len(e) == n) for n in (2, 3)]
    moved, numbers = step_of(batch_of(short, long), gamma=1.0)
    pi = table()
    entropy = [-(pi[s] * np.log(pi[s])).sum() for s, *_ in short + long]
    togo = [[sum(r for *_, r in e[t:]) for t in range(STEPS)] for e in (short, long)]
    differences = [togo[0][t] - togo[1][t] for t in range(2)]
    gaps = [*differences, *(-x for x in differences), togo[1][2]]
    close([numbers["entropy"], numbers["advantage_std"]], [np.mean(entropy), np.std(gaps, ddof=1)])
    close(numbers["grad_norm"], np.linalg.norm(moved))


@float64()
def test_actions_are_drawn_from_the_softmax():
    """10,000 draws in each state, within five standard errors; scale 0 takes the likeliest."""
    generator = torch.Generator().manual_seed(0)
    module = policy().float()
    for state in (0, 1):
        obs = np.tile(np.eye(2)[state], (10_000, 1))
        share = reinforce.act(module, obs, 1.0, generator).mean()
        p = table()[state, 1]
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / 10_000)
        assert set(reinforce.act(module, obs, 0.0, generator)) == {LOGITS[state].argmax()}


SETTINGS = ("--device cpu --env-id environments:Steps-v0 --num-episodes 5 --hidden-size 8 --eval-every 0 "
            "--eval-episodes 2").split()  # fmt: skip


def test_train_learns_from_whole_episodes(tmp_path, monkeypatch):
    """Each row is what happened: Probe shows the step, the episode's length and the action that arrived before."""
    batches, update = [], reinforce.update
    monkeypatch.setattr(reinforce, "update", lambda *args: batches.append(args[2]) or update(*args))
    folder = new_run(reinforce, tmp_path, *SETTINGS, "--total-timesteps", 150)
    lengths = set()
    for obs, actions, rewards, mask in batches:
        assert len(mask) == 5 and mask.shape[1] == mask.sum(1).max()
        for o, a, r, m in zip(obs, actions, rewards, mask):
            n = int(m.sum())
            lengths.add(n)
            assert m[:n].all() and not o[n:].any() and not r[n:].any()
            assert n == min(o[0, 1], Probe.LIMIT)
            close(o[:n, 0], np.arange(n))
            close(o[1:n, 2], a[: n - 1] - 1)
            close(r[:n], 100 + a[:n] - 1)
    assert lengths == {2, 3, 4, 5}
    rows = metrics(folder)
    close([row["length"] for row in rows], [int(mask.sum()) / 5 for *_, mask in batches])
    close([row["return"] for row in rows], [float(rewards.sum()) / 5 for _, _, rewards, _ in batches], 1e-4)
    steps = np.cumsum([int(mask.sum()) for *_, mask in batches])
    assert [row["step"] for row in rows] == np.minimum(steps, 150).tolist()


def test_an_episode_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reinforce, "LONGEST", 3)
    more = dict(output_dir=str(tmp_path), device="cpu", num_episodes=9)
    with pytest.raises(UserError, match="has not ended after 3 steps: --env-kwargs max_episode_steps"):
        reinforce.train(reinforce.Args(env_id="environments:Steps-v0", **more))
