"""cfgrl.py: guidance between Gaussians in closed form, whole updates by a second implementation, and where labels come
from. What it shares with flow_bc.py and bc.py: their tests."""

import h5py
import numpy as np
import pytest
import torch
from control import close, float64, minibatch, randomise
from helpers import SMALL, new_run
from safetensors.torch import save_file
from small_data import pendulum
from test_exact_flow_bc import best_velocity, updated

from algos import cfgrl, iql
from utils.core import UserError
from utils.offline import OfflineArgs, load_dataset

D, A, H, B = 3, 2, 8, 16


@float64()
@pytest.mark.parametrize("guidance", [0.0, 0.5, 1.0, 2.5])
def test_guidance_between_gaussians(guidance, monkeypatch):
    """All actions have mean -0.2, good ones 0.4, bad ones 7: guided ones have -0.2 + 0.6 w, and the same deviation."""
    actor = cfgrl.Actor(D, 1, H)
    mean = lambda labels: labels @ torch.tensor([[0.6], [7.2]]) - 0.2  # noqa: E731
    monkeypatch.setattr(actor, "forward", lambda obs, x, time, labels: best_velocity(x, time, mean(labels)))
    low, middle, high = actor.flow(torch.zeros(3, D), torch.tensor([[-1.0], [0.0], [1.0]]), 4, guidance)
    assert [middle.item(), (high - low).item() / 2] == pytest.approx([-0.2 + 0.6 * guidance, 0.341], abs=1e-3)


@pytest.mark.parametrize("guidance, label", [(0.0, [0.0, 0.0]), (1.0, [1.0, 0.0])])
def test_guidance_0_clones_all_and_1_the_good_ones(guidance, label):
    """Bit for bit the plain flow under that label."""
    torch.manual_seed(0)
    actor, obs, start = cfgrl.Actor(D, A, H), torch.randn(B, D), torch.randn(B, A)
    x, labels = start, torch.tensor([label]).expand(B, 2)
    for k in range(3):
        x = x + actor(obs, x, torch.full((B, 1), k / 3), labels) / 3
    assert torch.equal(actor.flow(obs, start, 3, guidance), x)


@float64()
def test_updates_equal_a_second_implementation():
    """Labels are dropped row by row."""
    labels, dropped = torch.eye(2)[torch.arange(B) % 3 % 2], []

    def kept(batch, twin):
        dropped.append(torch.rand(B, 1, generator=twin) < 0.3)
        return [torch.where(dropped[-1], 0.0, labels)]

    batches = [cfgrl.Transitions(*minibatch(iql.Transitions, step), labels) for step in range(3)]
    for numbers in updated(cfgrl, batches, 0.3, more=kept):
        close(numbers["good"], labels[:, 0].mean())
    assert 0.15 < torch.cat(dropped).double().mean() < 0.45


def test_guided_actions():
    """Left or right, right being good: without guidance half are right, with the good flow all, and beyond no more are
    in the wall."""
    torch.manual_seed(0)
    agent, generator = cfgrl.Agent(1, 1, cfgrl.Args(hidden_size=64)), torch.Generator().manual_seed(0)
    optimizer, empty = torch.optim.Adam(agent.parameters(), 3e-3), torch.zeros(256, 1)
    for _ in range(600):
        right = torch.randint(0, 2, (256,), generator=generator)
        batch = cfgrl.Transitions(empty, right[:, None] * 1.6 - 0.8, empty, empty, empty, torch.eye(2)[1 - right])
        cfgrl.update(agent, optimizer, batch, generator, 0.2)
    noise = torch.randn(2000, 1, generator=generator)
    shares = [(agent.actor.flow(torch.zeros(2000, 1), noise, 10, w) > 0.4).float().mean() for w in (0.0, 1.0, 2.0)]
    assert 0.35 < shares[0] < 0.6 and min(shares[1:]) > 0.95


def critic_run(folder, size: int = 3):
    """What --critic reads of an iql.py run, for Pendulum: the agent."""
    agent = randomise(iql.Agent(size, 1, iql.Args(hidden_size=H, dropout=0.0)), 5, 0.5, 0.2)
    agent.obs_mean.fill_(0.3)
    agent.obs_std.fill_(2.0)
    (folder / "model").mkdir(parents=True)
    save_file(agent.state_dict(), folder / "model" / "model.safetensors")
    return agent


@pytest.mark.parametrize("label", ["top", "advantage"])
def test_train_labels_the_rows_that_it_takes(label, tmp_path, monkeypatch):
    """Those with a known next observation, by returns of whole trajectories or by iql.py's own networks."""
    stored, real = [], cfgrl.ReplayBuffer
    monkeypatch.setattr(cfgrl, "ReplayBuffer", lambda *given: stored.append(real(*given)) or stored[0])
    path, agent = pendulum(tmp_path / "d.hdf5"), critic_run(tmp_path / "iql")
    with h5py.File(path, "a") as file:
        del file["last_observations"]
    flags = ["--env-id", "Pendulum-v1", "--label", label, "--critic", tmp_path / "iql", "--top-fraction", 0.4]
    new_run(cfgrl, tmp_path / "runs", *SMALL["cfgrl"], "--dataset", path, *flags)
    data = load_dataset(OfflineArgs(dataset=str(path), env_id="Pendulum-v1"))
    obs = torch.from_numpy(agent.normalized(data.obs)).float()
    q = torch.min(*agent.targets(obs, torch.from_numpy(data.actions / 2)))
    good = {"top": data.top_rows(0.4), "advantage": (q >= agent.value(obs)).numpy()[:, 0]}[label][data.known]
    obs, actions, *_, labels = stored[0].rows.split(stored[0].sizes, 1)
    close(obs, data.obs[data.known])
    close(actions, data.actions[data.known] / 2, 1e-6)
    close(labels, np.stack([good, ~good], 1))
    assert 0.1 < good.mean() < 0.9 and len(good) == 234


@pytest.mark.parametrize("size", [0, 5])
def test_critics_of_something_else(size, tmp_path):
    if size:
        critic_run(tmp_path, size)
    data, space = load_dataset(OfflineArgs(dataset=str(pendulum(tmp_path / "d.hdf5")))), iql.gym.spaces.Box(-2, 2, (1,))
    with pytest.raises(UserError, match="finished iql.py run on the same dataset"):
        cfgrl.better_rows(data, space, str(tmp_path))
