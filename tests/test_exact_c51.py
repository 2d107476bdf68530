"""c51.py: the projection against an independent one and in closed form, targets by hand, and distributions that it must
find. Whole updates: test_exact_rainbow.py. Acting and train() are those of dqn.py, whose tests run on it, too."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from control import CONTROL, close, float64, walk
from helpers import SMALL, new_run
from test_exact_dqn import one_hot
from torch import nn

from algos import c51


def by_floor_and_ceiling(probs, values, low: float, high: float) -> np.ndarray:
    """The paper's algorithm 1, one value at a time; on an atom both indices are equal, and it gets everything."""
    found, gap = np.zeros_like(probs), (high - low) / (probs.shape[1] - 1)
    for row in range(len(probs)):
        for prob, value in zip(probs[row], values[row]):
            b = (min(max(value, low), high) - low) / gap
            below, above = math.floor(b), math.ceil(b)
            if below == above:
                found[row, below] += prob
            else:
                found[row, below] += prob * (above - b)
                found[row, above] += prob * (b - below)
    return found


@float64()
@pytest.mark.parametrize("low, high, n", [(-2.0, 2.0, 5), (0.0, 1.0, 2), (-1.0, 10.0, 51)])
def test_the_projection_is_the_one_by_floor_and_ceiling(low, high, n):
    """Of values inside, outside, at the bounds and on atoms. Nothing is lost; where nothing is clipped, the mean
    stays."""
    g, atoms = torch.Generator().manual_seed(n), torch.linspace(low, high, n)
    probs = torch.rand(40, n, generator=g).softmax(1)
    values = low + (high - low) * (1.6 * torch.rand(40, n, generator=g) - 0.3)
    values[:5], values[5] = atoms, atoms.flip(0)
    found = c51.project(probs, values, atoms)
    close(found, by_floor_and_ceiling(probs.numpy(), values.numpy(), low, high))
    close(found.sum(1), np.ones(40))
    close(found[:5], probs[:5])
    close(found[5], probs[5].flip(0))
    close(found @ atoms, (probs * values.clamp(low, high)).sum(1))


@float64()
def test_targets_by_hand():
    """Atoms 0, 1, 2. The best next action is the one of the larger mean, not of the likeliest return. The end leaves
    the reward alone, on one atom or shared by two."""
    probs = torch.tensor([[[0.0, 1.0, 0.0], [0.45, 0.0, 0.55]]])  # means 1 and 1.1
    other = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])  # means 0.5 and 0: chooses the first with --double
    atoms = torch.arange(3.0)
    net = lambda p: SimpleNamespace(atoms=atoms, log_probs=lambda obs: (p.expand(len(obs), 2, 3)).log())  # noqa: E731

    class Net(SimpleNamespace):
        def __call__(self, obs):
            return self.log_probs(obs).exp() @ atoms

    agent = SimpleNamespace(q=Net(**vars(net(other))), target=Net(**vars(net(probs))))
    rewards, terminated = torch.tensor([[0.2], [1.0], [0.2], [9.0]]), torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    batch = c51.Transitions(torch.zeros(4, 1), torch.zeros(4, 1), rewards, terminated, torch.zeros(4, 1))
    for double, first, last in ((False, 0.45 * 0.2 + 0.55 * 1.2, 9.55), (True, 0.7, 9.5)):
        _, q, target = c51.c51_loss(agent, batch, c51.Args(gamma=0.5, double=double))
        close(q, np.full((4, 1), 0.5))
        close(target, [[first], [1.0], [0.2], [last]])


class Table(nn.Module):
    """Logits of each state's action, of one-hot states."""

    def __init__(self, states: int, actions: int, atoms: torch.Tensor):
        super().__init__()
        self.net, self.atoms = nn.Linear(states, actions * len(atoms), bias=False), atoms
        nn.init.zeros_(self.net.weight)

    log_probs, forward = c51.QNetwork.log_probs, c51.QNetwork.forward


@float64()
def test_update_finds_the_distribution_and_not_only_its_mean():
    """State 0 leads to state 1 with reward 1; there the last step pays 0 in three of ten cases, else 2. The returns of
    the second step are these two, discounted those of the first are 1 and 2: all on atoms."""
    atoms = torch.linspace(0.0, 2.0, 5)
    agent = SimpleNamespace(q=Table(2, 1, atoms), target=Table(2, 1, atoms).requires_grad_(False))
    states, rewards = [0] * 10 + [1] * 10, [1.0] * 10 + [0.0] * 3 + [2.0] * 7
    batch = c51.Transitions(one_hot(states, 2), torch.zeros(20, 1), torch.tensor(rewards)[:, None],
                            torch.tensor([0.0] * 10 + [1.0] * 10)[:, None], one_hot([1] * 20, 2))  # fmt: skip
    optimizer, args = torch.optim.Adam(agent.q.parameters(), 0.3), c51.Args(gamma=0.5, target_network_frequency=10)
    for count in range(1, 401):
        c51.update(agent, optimizer, batch, count, args)
    found = agent.q.log_probs(one_hot([0, 1], 2)).exp()[:, 0]
    close(found, [[0, 0, 0.3, 0, 0.7], [0.3, 0, 0, 0, 0.7]], 2e-3)


@pytest.mark.parametrize("algo", ["c51", "rainbow"])
def test_targets_beyond_the_atoms_are_told_once(algo, tmp_path, capsys):
    """Hop's rewards are below 0, and the atoms begin there by default."""
    new_run(CONTROL[algo], tmp_path, *SMALL[algo], *walk(algo), "--learning-rate", 0.1, "--log-every", 16)
    assert capsys.readouterr().out.count("of the targets lie outside --v-min 0 and --v-max 100") == 1
