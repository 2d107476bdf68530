"""dqn.py against numbers computed another way: backups of a small MDP by hand, the bias of a maximum in closed form,
updates by a second implementation, and what train() does by an environment that tells what happened. What a child
shares with dqn.py runs on it, too.

The second implementation takes tensors by name and uses its own forward pass, loss and Adam; derivatives are
autograd's.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from control import adam, checkpoint, close, float64, minibatch, mlp, named, randomise, stored_rows
from environments import Probe
from every_script import sharing, stand_in, with_function
from helpers import metrics, new_run, weights
from scipy import stats
from torch import nn

from algos import dqn
from tests.specs import SPECS

script = stand_in("dqn", "exploration", "update")
D, A, H, B = 3, 4, 8, 16  # observations, actions, hidden units, rows of a minibatch
GAMMA, RATE = 0.9, 1e-2
alone = with_function("dqn", "network", "q_loss")  # where Q is a plain network
without_goals = pytest.mark.parametrize(
    "script", [one for one in sharing("dqn", "exploration", "update") if "Goal" not in SPECS[one].walk], indirect=True
)  # where any environment will do


# --- the loss and the update


def rows(count: int, seed: int = 0) -> dqn.Transitions:
    batch = minibatch(dqn.Transitions, seed, count, D, 1)
    actions = torch.randint(A, (count, 1), generator=torch.Generator().manual_seed(seed))
    return batch._replace(actions=actions.to(batch.obs.dtype))


def own_target(p: dict, batch, double: bool) -> torch.Tensor:
    kept = mlp(p, "target", batch.next_obs)
    best = [int(row.argmax()) for row in (mlp(p, "q", batch.next_obs) if double else kept)]
    values = torch.stack([row[i] for row, i in zip(kept, best)])[:, None]
    return torch.where(batch.terminated == 1, batch.rewards, batch.rewards + GAMMA * values).detach()


def own_loss(p: dict, batch, target, huber: bool) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.stack([row[int(a)] for row, a in zip(mlp(p, "q", batch.obs), batch.actions)])[:, None]
    gap = (q - target).abs()
    losses = torch.where(gap < 1, gap**2 / 2, gap - 0.5) if huber else gap**2
    return losses.sum() / len(q), q.detach()


@alone
@float64()
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("huber", [True, False])
@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_update_equals_a_second_implementation(double, huber, tau):
    """Seven updates: all parameters and metrics. The target network moves after the third and the sixth, and no
    gradient reaches it."""
    args = dqn.Args(gamma=GAMMA, double=double, huber=huber, hidden_size=H, target_network_frequency=3, tau=tau)
    agent = randomise(dqn.Agent(D, A, args), 5, 0.6, 0.1)
    optimizer, p, moments = torch.optim.Adam(agent.q.parameters(), RATE, fused=True), named(agent), {}
    far, differs = 0, 0
    for count in range(1, 8):
        batch = rows(B, count)
        numbers = dqn.metrics(agent, *dqn.update(agent, optimizer, batch, count, args))
        target = own_target(p, batch, double)
        differs += (own_target(p, batch, not double) != target).sum()
        loss, q = own_loss(p, batch, target, huber)
        far += ((q - target).abs() > 1).sum()
        gradients = adam(p, moments, "q", loss, RATE)
        if count in (3, 6):
            for name in [name for name in p if name.startswith("target")]:
                p[name] = ((1 - tau) * p[name] + tau * p[name.replace("target", "q", 1)]).detach()
        for name, tensor in agent.state_dict().items():
            close(tensor, p[name].detach())
        close(numbers["q"], q.mean())
        close(numbers["td_error"], (q - target).abs().mean())
        close(numbers["grad_norm"], math.sqrt(sum((g**2).sum() for g in gradients.values())))
        assert not any(x.requires_grad or x.grad is not None for x in agent.target.parameters())
    assert far and differs, "the loss is quadratic everywhere, or both targets are equal"


# --- a small MDP


CHAIN = [  # (state, action, reward, terminated, next state); the last one was cut off and goes on in state 1
    (0, 0, 0.2, 0, 1), (0, 1, -0.1, 0, 2), (1, 0, 0.0, 0, 2), (1, 1, 0.3, 1, 0), (2, 0, -0.2, 0, 0), (2, 1, 0.4, 0, 1),
]  # fmt: skip


def one_hot(states, size: int) -> torch.Tensor:
    return torch.eye(size)[list(states)]


def table(values) -> nn.Linear:
    """A network that is a table of Q over one-hot states."""
    values = torch.as_tensor(values)
    layer = nn.Linear(len(values), values.shape[1], bias=False)
    with torch.no_grad():
        layer.weight.copy_(values.T)
    return layer


@alone
@float64()
@pytest.mark.parametrize("double", [False, True])
def test_updates_of_a_table_are_value_iteration(double):
    """Plain gradient descent with a rate of one per row, and a target network that is copied every time: each update is
    one sweep, and the sweeps end at the Q that solves Bellman's equation. The terminated row ends at its reward, the
    one that was cut off does not."""
    s, a, r, end, then = map(list, zip(*CHAIN))
    batch = dqn.Transitions(one_hot(s, 3), torch.tensor(a)[:, None].double(), torch.tensor(r)[:, None],
                            torch.tensor(end)[:, None].double(), one_hot(then, 3))  # fmt: skip
    args = dqn.Args(gamma=GAMMA, double=double, target_network_frequency=1)
    agent = SimpleNamespace(q=table(np.zeros((3, 2))), target=table(np.zeros((3, 2))).requires_grad_(False))
    optimizer, expected = torch.optim.SGD(agent.q.parameters(), lr=len(CHAIN)), np.zeros((3, 2))
    for count in range(1, 400):
        dqn.update(agent, optimizer, batch, count, args)
        swept = expected.copy()
        for state, action, reward, ends, following in CHAIN:
            swept[state, action] = reward + GAMMA * (1 - ends) * expected[following].max()
        expected = swept
        close(agent.q.weight.T, expected)
    close(expected[1, 1], 0.3)
    # best from 2: 0.4, on to 1: there 0 (back to 2) or 0.3 and the end; by hand: v1 = 0.9 v2, v2 = 0.4 + 0.9 v1
    v2 = 0.4 / (1 - 0.81)
    close(expected[2, 1], v2)
    close(expected[1, 0], 0.9 * v2)


@alone
@float64()
@pytest.mark.parametrize("count, factor", [(2, 1 / math.sqrt(math.pi)), (5, 1.16296), (10, 1.53875)])
def test_the_maximum_of_noise_is_biased_and_the_double_estimate_is_not(count, factor):
    """Where both networks are the truth, 0, and independent errors: the mean target is the expected maximum of `count`
    normal numbers, which is known, and 0 for Double DQN."""
    n, s, g = 40_000, 0.7, torch.Generator().manual_seed(count)
    errors = s * torch.randn(2, n, count, generator=g)
    agent = SimpleNamespace(q=lambda obs: errors[0], target=lambda obs: errors[1])
    batch = dqn.Transitions(torch.zeros(n, 1), torch.zeros(n, 1), torch.zeros(n, 1), torch.zeros(n, 1), None)
    for double, expected in ((False, s * factor), (True, 0.0)):
        _, _, target = dqn.q_loss(agent, batch, dqn.Args(gamma=1.0, double=double))
        assert target.mean().item() == pytest.approx(expected, abs=4 * s / math.sqrt(n))


# --- acting


def test_exploration_by_hand():
    args = dqn.Args(total_timesteps=1000, learning_starts=50, start_e=0.9, end_e=0.1, exploration_fraction=0.4)
    steps = {0: 1.0, 49: 1.0, 50: 0.8, 200: 0.5, 399: 0.102, 400: 0.1, 1000: 0.1}
    assert {step: pytest.approx(dqn.exploration(step, args)) for step in steps} == steps
    none = dqn.Args(learning_starts=0, exploration_fraction=0.0, end_e=0.1)
    assert dqn.exploration(0, none) == 1.0 and dqn.exploration(1, none) == pytest.approx(0.1)


@with_function("dqn", "act")
def test_act_is_greedy_but_for_a_share_of_uniform_actions():
    """Of 20,000 equal observations, each with its own coin. The target network, whose best action is another, has no
    say."""
    tables = dict(q=table([[0.0, 3.0, 1.0]]), target=table([[9.0, 0.0, 0.0]]))
    agent, g = SimpleNamespace(num_actions=3, **tables), torch.Generator()
    obs = np.ones((20_000, 1))  # float64, as MuJoCo's
    assert (dqn.act(agent, obs, 0.0, g) == 1).all() and dqn.act(agent, obs, 0.0, g).shape == (20_000, 1)
    for epsilon in (1.0, 0.3):
        found = np.bincount(dqn.act(agent, obs, epsilon, g)[:, 0], minlength=3)
        expected = 20_000 * (np.array([epsilon / 3] * 3) + [0, 1 - epsilon, 0])
        assert stats.chisquare(found, expected).pvalue > 1e-3
    half = dqn.act(agent, obs, np.tile([[0.0], [1.0]], (10_000, 1)), g)[:, 0]
    assert (half[::2] == 1).all() and 0.6 < (half[1::2] != 1).mean() < 0.73


# --- train()


SETTINGS = ("--device cpu --env-id environments:Steps-v0 --total-timesteps 160 --num-envs 2 --learning-starts 41 "
            "--hidden-size 8 --batch-size 16 --eval-episodes 2 --eval-every 0 --train-frequency 6 --gradient-steps 3"
            ).split()  # fmt: skip


def rows_of(folder) -> list[np.ndarray]:
    return np.split(stored_rows(folder), [4, 5, 6, 7], 1)


def assert_true(obs, actions, rewards, terminated, next_obs) -> None:
    """Each row is a transition of Steps: its own true end, and the action that arrived, which counts from -1."""
    assert set(np.unique(actions)) <= {0, 1, 2}
    close(next_obs[:, 2], actions[:, 0] - 1)
    close(rewards[:, 0], 100 + actions[:, 0] - 1)
    close(next_obs[:, 0], obs[:, 0] + 1)  # a reset's would be 0
    close(next_obs[:, 1], obs[:, 1])
    close(terminated[:, 0], next_obs[:, 0] == next_obs[:, 1])


@pytest.fixture
def a_run(tmp_path, monkeypatch):
    """A short run: its folder, and what `update` was called with each time."""
    calls, update = [], dqn.update

    def recording(*args):
        calls.append(args)
        return update(*args)

    monkeypatch.setattr(dqn, "update", recording)
    return new_run(dqn, tmp_path, *SETTINGS, "--target-network-frequency", 1000), calls


@without_goals
def test_train_stores_true_transitions_and_learns_from_them(a_run):
    """Also of the episodes that terminate, are cut off, and both. Minibatches are rows of the buffer as it was, in the
    columns that `update` takes them for."""
    folder, calls = a_run
    columns = rows_of(folder)
    assert_true(*columns)
    ends = {(bool(end), time == Probe.LIMIT) for end, time in zip(columns[3][:, 0], columns[4][:, 0])}
    assert ends == {(False, False), (True, False), (False, True), (True, True)}
    stored = {tuple(row): i for i, row in reversed([*enumerate(np.concatenate(columns, 1))])}  # the first of equal ones
    for number, (_, _, batch, *_) in enumerate(calls):
        assert [x.shape for x in batch] == [(16, 4), (16, 1), (16, 1), (16, 1), (16, 4)]
        assert_true(*(x.numpy() for x in batch))
        first = [stored[tuple(row)] for row in torch.cat(batch, 1).numpy()]
        assert max(first) < 42 + 6 * (number // 3)


@without_goals
def test_train_takes_every_update(a_run):
    """Three at each multiple of six steps after learning_starts, counted from step 0 on, by Adam for exactly Q."""
    folder, calls = a_run
    assert [call[3] for call in calls] == list(range(1 + 3 * 6, 1 + 3 * len(range(6, 161, 6))))
    agent, optimizer = calls[0][:2]
    (group,) = optimizer.param_groups
    assert type(optimizer) is torch.optim.Adam
    assert [id(x) for x in group["params"]] == [id(x) for x in agent.q.parameters()]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 0)
    saved, moved = checkpoint(folder), dict(agent.named_parameters())
    assert len(calls) == {x["step"].item() for x in saved["optimizer"]["state"].values()}.pop()
    for name, tensor in weights(folder).items():
        if name.startswith("q.") and name in moved:  # the target network was not renewed: it is what Q was at first
            assert not torch.equal(tensor, weights(folder)[name.replace("q.", "target.", 1)])


@without_goals
def test_train_explores_less_and_less_and_evaluates_greedily(tmp_path, monkeypatch):
    """What `act` is given: epsilon by the schedule and the observation that is stored with its action; in evaluation
    --end-e for half of the episodes, 0 for the others."""
    given = []

    def second(agent, obs, epsilon, generator):
        given.append((obs.copy(), epsilon))
        return np.full((len(obs), 1), 2)

    monkeypatch.setattr(dqn, "act", second)
    folder = new_run(dqn, tmp_path, *SETTINGS, "--end-e", 0.2, "--exploration-fraction", 0.5)
    obs, actions = rows_of(folder)[:2]
    assert (actions == 2).all()
    close(np.concatenate([x for x, _ in given[:80]]), obs)
    epsilons = [1.0] * 21 + [1 - 0.8 * min(1, step / 80) for step in range(42, 160, 2)]
    assert [epsilon for _, epsilon in given[:80]] == pytest.approx(epsilons)
    assert all(epsilon.flatten().tolist() == pytest.approx([0, 0, 0.2, 0.2]) for _, epsilon in given[80:])
    (row,) = metrics(folder)
    close(row["eval/return"], 101 * row["eval/length"], 1e-3)
    assert row["epsilon"] == pytest.approx(0.2)
