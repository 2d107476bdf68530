"""td3_bc.py: the actor's gradient and the target in closed form, what an update moves and when, and what train() shows
the networks. Whole updates are those of the authors' code: test_parity_updates.py. `both`: rebrac.py, too."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from control import close, float64, minibatch, randomise
from helpers import SMALL, new_run, weights
from small_data import pendulum
from torch import nn

from algos import cal_ql, cql, rebrac, td3_bc
from utils.offline import OfflineArgs, load_dataset

D, A, B = 3, 2, 16
both = pytest.mark.parametrize("script", [td3_bc, rebrac], ids=["td3_bc", "rebrac"])


def agent_of(scale: float = 1.0) -> SimpleNamespace:
    """The actor's outputs are parameters; Q_i(s, a) is scale times i / 4 - |a - i / 4|^2, whose slope is known."""
    table = nn.Parameter(torch.rand(B, A, generator=torch.Generator().manual_seed(1)) - 0.5)
    critics = lambda obs, a: tuple(scale * (i / 4 - (a - i / 4).square().sum(1, keepdim=True)) for i in (1, 2))  # noqa: E731
    return SimpleNamespace(actor=lambda obs: table, table=table, critics=critics, target_critics=critics,
                           target_actor=lambda obs: obs[:, :A])  # fmt: skip


def batch_of(script, seed: int):
    """Random transitions, of rebrac.py with random next actions, which every other row has."""
    actions = torch.rand(B, A, generator=torch.Generator().manual_seed(seed + 99)) * 2 - 1
    more = (actions, (torch.arange(B).view(B, 1) % 2).to(actions))[: len(script.Transitions._fields) - 5]
    return minibatch(lambda *given: script.Transitions(*given, *more), seed)


@float64()
@pytest.mark.parametrize("alpha, weight", [(2.5, 1.0), (0.0, 1.0), (2.5, 0.0), (1.0, 3.0)])
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_the_actor_s_gradient_in_closed_form(alpha, weight, scale):
    """Of alpha 0 that of the squared error alone; the same whatever the scale of the values."""
    agent, batch = agent_of(scale), minibatch(td3_bc.Transitions, 1)
    loss, actions, q = td3_bc.actor_loss(agent, batch, alpha, weight)
    loss.backward()
    own = 1 / 4 - (agent.table.detach() - 0.25).square().sum(1, keepdim=True)
    slope = -2 * (agent.table.detach() - 0.25)
    expected = -alpha / own.abs().mean() * slope / B + weight * 2 * (agent.table.detach() - batch.actions) / (B * A)
    close(agent.table.grad, expected)
    close(q, scale * own)
    assert own.min() < 0 < own.max()
    close(actions, agent.table)
    assert not q.requires_grad and not actions.requires_grad


@float64()
def test_the_target_by_hand():
    """The smaller target critic at the target's own action, blurred and clipped; nothing behind an end."""
    agent, batch = agent_of(), minibatch(td3_bc.Transitions, 2)
    noise = 0.5 * torch.randn(B, A, generator=torch.Generator().manual_seed(3))
    loss, q, target = td3_bc.critic_loss(agent, batch, noise, 0.9)
    blurred = (batch.next_obs[:, :A] + noise).numpy().clip(-1, 1)
    smaller = np.minimum(*(i / 4 - ((blurred - i / 4) ** 2).sum(1) for i in (1, 2)))[:, None]
    ends, rewards = batch.terminated.numpy(), batch.rewards.numpy()
    expected = np.where(ends == 1, rewards, rewards + 0.9 * smaller)
    close(target, expected)
    values = [x.numpy() for x in agent.critics(batch.obs, batch.actions)]
    close(q, values[0])
    close(loss, sum(((x - expected) ** 2).mean() for x in values))
    assert 0 < ends.mean() < 1 and (abs(blurred) == 1).any()


@both
def test_actor_and_targets_move_every_third_time(script):
    """By tau; noise is drawn from the generator alone and is clipped."""
    args = script.Args(hidden_size=8, policy_frequency=3, tau=0.1, policy_noise=0.8)
    agent = randomise(script.Agent(D, A, args), 7, 0.8, 0.1)
    optimizers = script.Optimizers(*(torch.optim.Adam(x.parameters(), 1e-2) for x in (agent.actor, agent.critics)))
    generator, noises, before, real = torch.Generator().manual_seed(0), [], torch.get_rng_state(), script.critic_loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "critic_loss", lambda *given: noises.append(given[2]) or real(*given))
        for number in range(1, 7):
            batch, old = batch_of(script, number), {n: x.clone() for n, x in agent.state_dict().items()}
            numbers = script.update(agent, optimizers, batch, generator, args, number)
            for name, x in agent.state_dict().items():
                moves = name.startswith("critics") or number % 3 == 0
                assert torch.equal(x, old[name]) != moves or "obs_" in name, name
                if "target" in name and moves:
                    close(x, 0.9 * old[name] + 0.1 * agent.state_dict()[name.replace("target_", "")], 1e-6)
            assert ("q_policy" in numbers) == ("distance" in numbers) == (number % 3 == 0)
            assert number % 3 or numbers["distance"] > 0.1
    drawn = torch.stack(noises)
    assert torch.equal(torch.get_rng_state(), before) and drawn.abs().max() == 0.5 and len(drawn.unique()) > 50


@pytest.mark.parametrize("script", [td3_bc, rebrac, cql, cal_ql], ids=["td3_bc", "rebrac", "cql", "cal_ql"])
@pytest.mark.parametrize("flags", [[], ["--no-normalize"], ["--top-fraction", 0.5]])
def test_train_stores_normalised_rows_of_the_best_trajectories(script, flags, tmp_path, monkeypatch):
    """Of a dataset of one's own all, where nothing else is asked for. The statistics are those of the rows taken."""
    stored, real = [], script.ReplayBuffer
    monkeypatch.setattr(script, "ReplayBuffer", lambda *given: stored.append(real(*given)) or stored[0])
    path = pendulum(tmp_path / "d.hdf5")
    model = weights(new_run(script, tmp_path, *SMALL[script.NAME], "--dataset", path, *flags))
    data = load_dataset(OfflineArgs(dataset=str(path)))
    rows = data.top_rows(0.5 if len(flags) > 1 else 1.0)
    mean, std = data.obs[rows].mean(0), data.obs[rows].std(0) + 1e-3
    mean, std = (np.zeros_like(mean), np.ones_like(std)) if flags == ["--no-normalize"] else (mean, std)
    close(model["obs_mean"], mean, 1e-5)
    close(model["obs_std"], std, 1e-5)
    obs, actions, rewards, terminated, next_obs, *_ = stored[0].rows.split(stored[0].sizes, 1)
    close(obs, (data.obs[rows] - mean) / std, 1e-4)
    close(next_obs, (data.next_obs[rows] - mean) / std, 1e-4)
    close(actions, data.actions[rows] / 2, 1e-6)
    close(rewards[:, 0], data.rewards[rows], 1e-6)
    assert len(obs) == rows.sum() and (len(flags) < 2 or rows.mean() < 0.5)
    returns, kept = data.trajectory_returns(), rows[data.starts]
    assert kept.all() or returns[kept].min() > returns[~kept].max()


@both
def test_evaluation_acts_on_normalised_observations(script):
    agent = script.Agent(D, A, script.Args(hidden_size=8))
    agent.obs_mean.fill_(2.0)
    agent.obs_std.fill_(4.0)
    obs = np.random.default_rng(0).normal(size=(5, D))
    expected = agent.actor(torch.from_numpy((obs - 2) / 4).float()).detach()
    close(script.act(agent, obs, torch.device("cpu")), expected, 1e-6)
