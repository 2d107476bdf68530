"""flow_bc.py: the loss and its minimiser in closed form, whole updates by a second implementation, the flow of Gaussian
data, and what a Gaussian policy cannot do: actions of two kinds. What it shares with bc.py: test_exact_iql.py."""

from pathlib import Path

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from control import adam, close, float64, minibatch, mlp, named, randomise
from torch import nn

from algos import flow_bc
from algos.environments import gates

D, A, H, B = 3, 2, 8, 16
MEAN, STD = 0.3, 0.5  # of the actions


def best_velocity(x, t, mean=MEAN):
    """E[a - x_0 | x_t = x] for a ~ N(mean, STD^2): the regression of one Gaussian on another."""
    return mean + (t * STD**2 - (1 - t)) / ((1 - t) ** 2 + t**2 * STD**2) * (x - t * mean)


class Line(nn.Module):
    """An actor with v(x) = constant + slope x, whatever the state and the time."""

    def __init__(self, slope: float, constant: float):
        super().__init__()
        self.slope, self.constant = nn.Parameter(torch.tensor(slope)), nn.Parameter(torch.tensor(constant))

    def forward(self, obs, x, time):
        return self.constant + self.slope * x


@float64()
@pytest.mark.parametrize("t", [0.0, 0.2, 0.5, 0.9])
def test_the_loss_is_least_at_the_conditional_mean(t):
    """At each time. Four rows with the moments of the Gaussians: a line's squared error depends on nothing else."""
    signs = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
    noise, actions = signs[:, :1], MEAN + STD * signs[:, 1:]
    batch = flow_bc.Transitions(torch.zeros(4, D), actions, *[torch.zeros(4, 1)] * 2, torch.zeros(4, D))
    constant = best_velocity(0.0, t)
    line = Line(best_velocity(1.0, t) - constant, constant)
    loss = flow_bc.flow_loss(line, batch, noise, torch.full((4, 1), t))
    loss.backward()
    close(torch.stack([line.slope.grad, line.constant.grad]), [0, 0], 1e-12)
    close(loss, STD**2 / ((1 - t) ** 2 + t**2 * STD**2))  # what x_t does not tell of a - x_0
    off = Line(line.slope.item() + 0.1, constant)
    assert flow_bc.flow_loss(off, batch, noise, torch.full((4, 1), t)) > loss


def updated(module, batches, *settings, more=lambda batch, twin: ()) -> list[dict]:
    """Asserts that updates are those of a second implementation. Noise and times, one a row, and what `more` draws and
    gives the network come from the generator alone. Returns the metrics, of which one is the loss."""
    agent, found = randomise(module.Agent(D, A, module.Args(hidden_size=H)), 3, 0.5, 0.2), []
    optimizer = torch.optim.Adam(agent.parameters(), 1e-2)
    p, moments, generator, twin = named(agent), {}, torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    before, times = torch.get_rng_state(), []
    for batch in batches:
        found.append(module.update(agent, optimizer, batch, generator, *settings))
        x0, t = torch.randn(B, A, generator=twin), torch.rand(B, 1, generator=twin)
        inputs = batch.obs, x0 + t * (batch.actions - x0), t, *more(batch, twin)
        loss = ((mlp(p, "actor.net", torch.hstack(inputs)) - batch.actions + x0) ** 2).sum() / (B * A)
        adam(p, moments, "actor", loss, 1e-2)
        close(found[-1]["loss"], loss)
        for name, tensor in agent.state_dict().items():
            close(tensor, p[name])
        times += t.flatten().tolist()
    assert torch.equal(torch.get_rng_state(), before) and 0 < min(times) < 0.1 and 0.9 < max(times) < 1
    return found


@float64()
def test_updates_equal_a_second_implementation():
    updated(flow_bc, [minibatch(flow_bc.Transitions, step) for step in range(3)])


@float64()
@pytest.mark.parametrize("steps, std", [(1, 0.0), (4, 0.341), (400, 0.498)])
def test_the_flow_of_gaussian_data(steps, std, monkeypatch):
    """An affine map with the right mean at any number of steps, and the right deviation with many. With one step every
    sample is the mean. A grid that reaches t = 1 gives 0.526 with 4."""
    actor = flow_bc.Actor(D, 1, H)
    monkeypatch.setattr(actor, "forward", lambda obs, x, time: best_velocity(x, time))
    x = torch.tensor([[-1.0], [0.0], [1.0]])
    low, middle, high = actor.flow(torch.zeros(3, D), x, steps).flatten().tolist()
    assert [middle, (high - low) / 2] == pytest.approx([MEAN, std], abs=1e-3)
    assert high - middle == pytest.approx(middle - low)


@pytest.mark.parametrize("steps", [1, 3])
def test_act_follows_the_flow(steps):
    """From the generator's noise, whatever the scale, to [-1, 1]."""
    actor, obs = flow_bc.Actor(D, A, H), np.random.default_rng(0).normal(size=(500, D))
    scale, space = torch.arange(500)[:, None] % 2, gym.spaces.Box(-1, 1, (1, A))
    actions = flow_bc.act(actor, space, obs, scale, torch.Generator().manual_seed(1), steps)
    x, p = torch.randn(500, A, generator=torch.Generator().manual_seed(1)), named(actor)
    for k in range(steps):
        time = torch.full((500, 1), k / steps)
        x = x + mlp(p, "net", torch.hstack([torch.tensor(obs).float(), x, time])) / steps
    close(actions, x.detach().numpy().clip(-1, 1), 1e-5)
    assert actions.dtype == np.float32 and 0.05 < (abs(actions) == 1).mean() < 0.95


def test_actions_of_two_kinds():
    """Of a state in which half of the actions are left and half are right, no mean is any good: with ten steps few
    samples lie between, with one all do."""
    torch.manual_seed(0)
    agent, generator = flow_bc.Agent(1, 1, flow_bc.Args(hidden_size=64)), torch.Generator().manual_seed(0)
    optimizer, empty = torch.optim.Adam(agent.parameters(), 3e-3), torch.zeros(256, 1)
    for _ in range(600):
        actions = torch.randint(0, 2, (256, 1), generator=generator) * 1.6 - 0.8
        flow_bc.update(agent, optimizer, flow_bc.Transitions(empty, actions, empty, empty, empty), generator)

    def between(steps: int) -> float:
        obs, space = np.zeros((2000, 1)), gym.spaces.Box(-1, 1, (1,))
        return (abs(flow_bc.act(agent.actor, space, obs, 1.0, generator, steps)) < 0.4).mean()

    assert between(10) < 0.1 and between(1) > 0.95


def test_the_shipped_throws(tmp_path):
    """gates.hdf5 is what gates.py records: at either gate alike, and close to it."""
    gates.record(tmp_path / "new.hdf5")
    with h5py.File(tmp_path / "new.hdf5") as new, h5py.File(Path(gates.__file__).with_suffix(".hdf5")) as shipped:
        assert new.keys() == shipped.keys() and dict(new.attrs) == dict(shipped.attrs)
        assert all((new[key][:] == shipped[key][:]).all() for key in new)
        sides = np.sign(new["actions"][:])
        assert abs(sides.mean()) < 0.1 and abs(new["actions"][:] - sides * new["observations"][:]).std() < 0.05
