"""her.py: goals drawn from the future of an episode, steps relabelled by hand, what train() stores, and the values of a
small BitFlip in closed form. The loss, acting and the rest are those of dqn.py, whose tests of them run on it, too."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import close, env_of, stored_rows
from helpers import new_run
from scipy import stats
from test_exact_dqn import table

from algos import her
from utils.core import UserError

N = 4  # bits
GOALS = her.find_goals("BitFlip-v0", lambda: env_of("BitFlip-v0", f"n={N}"))


# --- drawing and relabelling


def test_goals_are_of_the_future_uniformly():
    """Of each step's own and all later ones of the episode, equally often; successive draws are independent."""
    length, drawn = 5, her.future(5, 20_000, torch.Generator().manual_seed(0))
    assert drawn.shape == (20_000, length)
    for t in range(length):
        counts = torch.bincount(drawn[:, t], minlength=length)
        assert (counts[:t] == 0).all()
        assert t == length - 1 or stats.chisquare(counts[t:]).pvalue > 1e-3
    pairs = drawn[::2, 1] * length + drawn[1::2, 1]
    assert stats.chisquare(torch.bincount(pairs)[torch.bincount(pairs) > 0]).pvalue > 1e-3
    assert her.future(3, 0, torch.Generator()).shape == (0, 3)


def test_relabelling_by_hand():
    """Three steps of two bits: 00 -> 10 -> 11 -> 01 for the goal 00. Achieved goal, goal, observation."""
    goals = her.find_goals("BitFlip-v0", lambda: env_of("BitFlip-v0", "n=2"))
    places = torch.tensor([[0.0, 0], [1, 0], [1, 1], [0, 1]])
    seen = torch.cat([places, torch.zeros(4, 2), places], 1)
    actions = torch.tensor([[0.0], [1], [0]])
    episode = her.Transitions(seen[:-1], actions, -torch.ones(3, 1), torch.zeros(3, 1), seen[1:])
    before = [part.clone() for part in episode]
    infos = [{"scale": 1}, {"scale": 2}, {"scale": 3}]
    found = her.relabel(episode, infos, torch.tensor([1, 1, 2]), goals)
    wanted = torch.tensor([[1.0, 1], [1, 1], [0, 1]])
    close(found.obs, torch.cat([places[:-1], wanted, places[:-1]], 1))
    close(found.next_obs, torch.cat([places[1:], wanted, places[1:]], 1))
    close(found.actions, episode.actions)
    close(found.rewards, [[-1.0], [0.0], [0.0]])
    close(found.terminated, [[0.0], [1.0], [1.0]])
    assert all(torch.equal(part, old) for part, old in zip(episode, before)), "the episode itself was changed"
    beyond = lambda achieved, goal, info: (achieved > goal).any() * info["scale"]  # noqa: E731  # achieved stands first
    found = her.relabel(episode, infos, torch.tensor([2, 2, 2]), goals._replace(reward=beyond, terminated=beyond))
    close(found.rewards, [[1.0], [2.0], [0.0]])
    close(found.terminated, [[1.0], [1.0], [0.0]])
    ended = episode._replace(terminated=torch.tensor([[0.0], [0.0], [1.0]]))
    found = her.relabel(ended, infos, torch.tensor([1, 1, 2]), goals._replace(terminated=None))
    close(found.terminated, ended.terminated)


def test_where_goals_are():
    assert (GOALS.achieved, GOALS.desired) == (slice(0, N), slice(N, 2 * N))
    goal = her.find_goals("environments:Goal-v0", lambda: env_of("environments:Goal-v0"))
    assert (goal.achieved, goal.desired) == (slice(0, 1), slice(1, 2))
    with pytest.raises(UserError, match="CartPole-v1 has no goals: HER needs a dictionary"):
        her.find_goals("CartPole-v1", lambda: env_of("CartPole-v1"))


def test_goals_that_cannot_be_relabelled_are_told(capsys):
    class Matrix(gym.ObservationWrapper):
        def __init__(self, env):
            super().__init__(env)
            env.unwrapped.observation_space = gym.spaces.Dict({
                name: gym.spaces.Box(0, 1, (2, 2)) for name in ("achieved_goal", "desired_goal", "observation")
            })  # fmt: skip

    with pytest.raises(UserError, match=r"goals of shape \(2, 2\): HER needs vectors"):
        her.find_goals("Mine-v0", lambda: Matrix(gym.make("BitFlip-v0")))
    assert "warning" not in capsys.readouterr().err
    ten = lambda: gym.wrappers.TransformReward(env_of("BitFlip-v0"), lambda reward: 10 * reward)  # noqa: E731
    her.find_goals("BitFlip-v0", ten)
    assert "gave the reward -10.0 where compute_reward says -1.0" in capsys.readouterr().err


# --- values in closed form


def test_updates_on_relabelled_steps_find_the_values_in_closed_form():
    """BitFlip of 3 bits: all pairs of a state and a goal, from the hindsight of random actions. A table is updated to
    the optimal values -(1 - gamma^(h - 1)) / (1 - gamma) at Hamming distance h; at the goal itself the way leads out
    and back, -1."""
    n, gamma, rows, generator = 3, 0.9, {}, torch.Generator().manual_seed(0)
    goals = her.find_goals("BitFlip-v0", lambda: env_of("BitFlip-v0", f"n={n}"))
    for _ in range(40):
        actions = torch.randint(n, (30, 1), generator=generator)  # longer than episodes are: whatever is reached
        flips = torch.eye(n)[actions[:, 0]].cumsum(0)
        bits = torch.cat([torch.zeros(1, n), flips]) % 2
        seen = torch.cat([bits, torch.zeros(31, n), bits], 1).double()
        episode = her.Transitions(seen[:-1], actions, torch.zeros(30, 1), torch.zeros(30, 1), seen[1:])
        for later in her.future(30, 4, generator):
            for row in zip(*(part.double() for part in her.relabel(episode, [{}] * 30, later, goals))):
                rows[tuple(torch.cat(row[:2]).tolist())] = row
    assert len(rows) == 8 * 8 * n
    batch = her.Transitions(*(torch.stack(part) for part in zip(*rows.values())))

    def one_hot(obs):  # of state and goal
        return torch.eye(64, dtype=torch.float64)[(obs[:, : 2 * n] @ 2.0 ** torch.arange(2 * n).double()).long()]

    tables = [table(torch.zeros(64, n)).double() for _ in range(2)]
    agent = SimpleNamespace(q=torch.nn.Sequential(OneHot(one_hot), tables[0]),
                            target=torch.nn.Sequential(OneHot(one_hot), tables[1]).requires_grad_(False))  # fmt: skip
    optimizer = torch.optim.SGD(agent.q.parameters(), lr=len(rows))
    for count in range(1, 40):
        her.update(agent, optimizer, batch, count, her.Args(gamma=gamma, target_network_frequency=1))
    h = (batch.obs[:, :n] != batch.obs[:, n : 2 * n]).sum(1)
    expected = torch.where(h == 0, torch.tensor(-1.0), -(1 - gamma ** (h.double() - 1)) / (1 - gamma))
    assert h.unique().tolist() == [0, 1, 2, 3]
    close(agent.q(batch.obs).amax(1), expected, 1e-6)


class OneHot(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


# --- train()


@pytest.mark.parametrize("k", [0, 3])
def test_train_stores_each_episode_and_its_hindsight(k, tmp_path, monkeypatch):
    """Two environments of 4 bits, whose actions begin at 5: the episodes one after the other, each followed by k copies
    whose goals were achieved later in it, with their own rewards and ends. Evaluation has no noise in half of it."""
    made, step, act, given = her.BitFlip.__init__, her.BitFlip.step, her.act, []
    later = lambda self, **n: made(self, **n) or vars(self).update(action_space=gym.spaces.Discrete(N, start=5))  # noqa: E731
    monkeypatch.setattr(her.BitFlip, "__init__", later)
    monkeypatch.setattr(her.BitFlip, "step", lambda self, action: step(self, action - 5))
    monkeypatch.setattr(her, "act", lambda *now: given.append(now[2]) or act(*now))
    settings = ("--device cpu --total-timesteps 120 --num-envs 2 --learning-starts 40 --hidden-size 8 --batch-size 8 "
                f"--end-e 1 --eval-every 0 --eval-episodes 1 --env-kwargs n={N} --her-k {k}").split()  # fmt: skip
    folder = new_run(her, tmp_path, *settings)
    assert given[-1].tolist() == [[0], [1]]
    rows = stored_rows(folder)
    waiting = 120 - len(rows) / (1 + k)
    assert waiting == int(waiting) and 0 <= waiting < 2 * N
    begin, ends, goals = 0, set(), set()
    while begin < len(rows):
        first, length = rows[begin], 1
        while not (rows[begin + length - 1][3 * N + 2] or length == N):
            length += 1
        episode = rows[begin : begin + length]
        obs, action, _, terminated, next_obs = np.split(episode, np.cumsum([3 * N, 1, 1, 1]), 1)
        close(obs[1:], next_obs[:-1])  # never a reset's
        assert (np.abs(next_obs - obs)[:, :N].argmax(1) == action[:, 0]).all() and (obs[:, :N] == obs[:, 2 * N :]).all()
        assert (obs[:, N : 2 * N] == first[N : 2 * N]).all()
        ends.add((length, bool(terminated[-1, 0])))
        for copy in range(k + 1):
            block = rows[begin + copy * length : begin + (copy + 1) * length]
            close(
                np.delete(block, [*range(N, 2 * N), 3 * N + 1, 3 * N + 2, *range(4 * N + 3, 5 * N + 3)], 1),
                np.delete(episode, [*range(N, 2 * N), 3 * N + 1, 3 * N + 2, *range(4 * N + 3, 5 * N + 3)], 1),
            )
            for t, row in enumerate(block):
                goal, reached = row[N : 2 * N], (row[N : 2 * N] == row[3 * N + 3 : 4 * N + 3]).all()
                assert (row[4 * N + 3 : 5 * N + 3] == goal).all()
                assert (row[3 * N + 1], row[3 * N + 2]) == (reached - 1, reached)
                if copy:
                    later = [j for j in range(length) if (next_obs[j, :N] == goal).all()]
                    assert later and later[-1] >= t
                    goals.add(later[-1] - t)
        begin += (k + 1) * length
    assert len(ends) >= 3 and (k == 0 or goals >= {0, 1, 2, 3})
