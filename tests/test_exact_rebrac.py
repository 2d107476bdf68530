"""rebrac.py: the actor's gradient and the target in closed form, td3_bc.py's where it has no idea of its own, the bound
of LayerNorm, and which rows have a next action. Whole updates are those of the authors' code: test_parity_updates.py;
what an update moves and when, and what else train() stores: test_exact_td3_bc.py."""

import h5py
import numpy as np
import pytest
import torch
from control import close, float64, randomise
from helpers import SMALL, metrics, new_run
from small_data import pendulum
from test_exact_td3_bc import A, B, D, agent_of, batch_of

from algos import rebrac, td3_bc
from utils.offline import OfflineArgs, load_dataset


def smaller(actions: np.ndarray, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """The smaller critic of agent_of and its slope: (B, 1), (B, A)."""
    values = np.stack([scale * (i / 4 - ((actions - i / 4) ** 2).sum(1, keepdims=True)) for i in (1, 2)])
    centres = np.array([0.25, 0.5])[values.argmin(0)]
    assert len(np.unique(centres)) == 2
    return values.min(0), -2 * scale * (actions - centres)


def twins(layer_norm: bool = False) -> rebrac.Agent:
    """Random parameters, the second critics equal to the first ones."""
    agent = randomise(rebrac.Agent(D, A, rebrac.Args(hidden_size=8, layer_norm=layer_norm)), 7, 0.8, 0.3)
    for critics in (agent.critics, agent.target_critics):
        critics.q2.load_state_dict(critics.q1.state_dict())
    return agent


@float64()
@pytest.mark.parametrize("actor_bc, scale", [(0.0, 1.0), (0.1, 10.0), (3.0, 1.0)])
def test_the_actor_s_gradient_in_closed_form(actor_bc, scale):
    """The same whatever the scale of the values; squared errors are summed over the numbers of an action."""
    agent, batch = agent_of(scale), batch_of(rebrac, 1)
    agent.table.data *= 2
    loss, actions, q = rebrac.actor_loss(agent, batch, actor_bc)
    loss.backward()
    table = agent.table.detach().numpy()
    own, slope = smaller(table, scale)
    error = table - batch.actions.numpy()
    close(loss, actor_bc * (error**2).sum() / B - own.mean() / abs(own).mean())
    close(agent.table.grad, (2 * actor_bc * error - slope / abs(own).mean()) / B)
    close(q, own)
    assert own.min() < 0 < own.max() and not q.requires_grad and not actions.requires_grad
    close(actions, table)


@float64()
def test_without_its_parts_it_is_td3_bc():
    """With equal critics, no penalty in the target and b1 = 1 / (2.5 A): the actor's gradient is td3_bc.py's divided by
    2.5, loss and target of the critics are the same."""
    agent, batch, noise = twins(), batch_of(rebrac, 1), torch.full((B, A), 0.3)
    losses = rebrac.actor_loss(agent, batch, 1 / (2.5 * A))[0], td3_bc.actor_loss(agent, batch, 2.5, 1.0)[0] / 2.5
    gradients = [torch.autograd.grad(loss, list(agent.actor.parameters())) for loss in losses]
    found = rebrac.critic_loss(agent, batch, noise, 0.9, 0.0), td3_bc.critic_loss(agent, batch, noise, 0.9)
    for ours, theirs in [*zip(*gradients), *zip(*found)]:
        close(ours, theirs, 1e-14)
        assert ours.abs().max() > 1e-3


@float64()
def test_the_target_by_hand():
    """The distance to the data's next action comes off the discounted value: not in the last row of a trajectory, which
    has none, and nothing of both behind a terminal state."""
    agent, batch = agent_of(), batch_of(rebrac, 2)
    noise = 0.5 * torch.randn(B, A, generator=torch.Generator().manual_seed(3))
    loss, q, target = rebrac.critic_loss(agent, batch, noise, 0.9, 0.7)
    rewards, ends, followed = (x.numpy()[:, 0] for x in (batch.rewards, batch.terminated, batch.followed))
    blurred = (batch.next_obs[:, :A] + noise).numpy().clip(-1, 1)
    distances = ((blurred - batch.next_actions.numpy()) ** 2).sum(1)
    later = smaller(blurred)[0][:, 0] - np.where(followed, 0.7 * distances, 0)
    expected = np.where(ends, rewards, rewards + 0.9 * later)
    assert len({*zip(ends, followed)}) == 4 and (abs(blurred) == 1).any() and (abs(blurred) < 1).any()
    close(target[:, 0], expected)
    both = [x.numpy()[:, 0] for x in agent.critics(batch.obs, batch.actions)]
    close(loss, sum(((x - expected) ** 2).mean() for x in both))
    close(q[:, 0], np.minimum(*both))


@float64()
def test_the_gap_by_hand():
    """Of rows with a next action; of the critics and actor themselves; 0 where no row has one."""
    agent, batch = agent_of(), batch_of(rebrac, 4)
    own, data = (smaller(actions.detach().numpy())[0] for actions in (agent.table, batch.next_actions))
    rows = batch.followed.numpy() == 1
    agent.target_critics = agent.target_actor = None
    close(rebrac.gap_of(agent, batch), (own - data)[rows].mean())
    assert rebrac.gap_of(agent, batch._replace(followed=0 * batch.followed)) == 0


@float64()
def test_layer_norm_bounds_the_values_of_all_actions():
    """|Q| <= |w g| sqrt(H) + |w b + c| with the last layer's weights w, c and the last LayerNorm's g, b. Without
    LayerNorm Q grows with the action."""
    inputs = torch.randn(500, D + A, generator=torch.Generator().manual_seed(1))
    bounded, free = (twins(layer_norm).critics.q1 for layer_norm in (True, False))
    w, c, g, b = bounded[-1].weight[0], bounded[-1].bias[0], bounded[-2].weight, bounded[-2].bias
    bound = (w * g).norm() * 8**0.5 + ((w * b).sum() + c).abs()
    assert 0.3 * bound < bounded(1e6 * inputs).abs().max() < bound
    assert free(1e6 * inputs).abs().max() > 1e4 * free(inputs).abs().max()


@pytest.mark.parametrize("time_outs_known", [True, False])
def test_train_stores_the_next_actions(time_outs_known, tmp_path, monkeypatch):
    """Brought to [-1, 1], of the trajectory's own next row, also where that one itself is left out for its next
    observation is unknown (D4RL's time-outs); none for the last row. The gap is logged."""
    stored, seen, real = [], [], rebrac.ReplayBuffer
    monkeypatch.setattr(rebrac, "ReplayBuffer", lambda *given: stored.append(real(*given)) or stored[0])
    monkeypatch.setattr(rebrac, "gap_of", lambda agent, batch: seen.append(batch) or torch.tensor(7.0))
    path = pendulum(tmp_path / "d.hdf5")
    with h5py.File(path, "r+") as file:
        file["terminals"][39], file["timeouts"][39] = True, False  # the first of six trajectories ends by itself
        if not time_outs_known:
            del file["last_observations"]
    run = new_run(rebrac, tmp_path, *SMALL["rebrac"], "--dataset", path, "--env-id", "Pendulum-v1")
    data = load_dataset(OfflineArgs(dataset=str(path), env_id="Pendulum-v1"))
    followers = [[x / 2, 1] for x in data.actions[1:, 0]] + [[0, 0]]
    for end in data.starts[1:]:
        followers[end - 1] = [0, 0]
    expected = np.column_stack([data.actions / 2, followers])[data.known]
    _, actions, _, terminated, _, next_actions, followed = stored[0].rows.split(stored[0].sizes, 1)
    close(torch.hstack([actions, next_actions * followed, followed]), expected, 1e-6)
    assert len(expected) == (240 if time_outs_known else 235) and terminated.sum() == 1
    assert {row["gap"] for row in metrics(run) if "q" in row} == {7.0} and seen[0].followed.mean() > 0.5
