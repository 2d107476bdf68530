"""riql.py: iql.py as the limit, Huber's loss and the quantile in closed form, and what is spoilt in the data. Whole
updates: test_parity_updates.py; what it shares with iql.py: test_exact_iql.py."""

import numpy as np
import pytest
import torch
from control import close, float64, minibatch, mlp, named, randomise
from scipy import stats
from test_exact_iql import ONLINE, A, D, H, recorded, trained  # noqa: F401

from algos import iql, riql
from utils.offline import Dataset


def agent_of(module, **flags):
    args = module.Args(hidden_size=H, dropout=0.0, expectile=0.8, temperature=3.0, gamma=0.9, tau=0.1, **flags)
    agent = randomise(module.Agent(D, A, args), 50, 0.5, 0.2)
    parts = (agent.actor, agent.critics, agent.value)
    return agent, module.Optimizers(*(torch.optim.Adam(part.parameters(), 1e-2, fused=True) for part in parts)), args


@float64()
def test_with_two_critics_their_minimum_and_squared_errors_it_is_iql():
    """Bit for bit, with weights on both sides of 100."""
    plain, robust, clipped = agent_of(iql), agent_of(riql, num_critics=2, quantile=0.0, huber_delta=0.0), []
    for step in range(5):
        batch = minibatch(iql.Transitions, step)
        theirs, ours = iql.update(*plain[:2], batch, plain[2]), riql.update(*robust[:2], batch, robust[2])
        assert theirs == {name: ours[name] for name in theirs}
        clipped.append(ours["clipped"])
    assert 0 < sum(clipped) < 5
    assert all(torch.equal(robust[0].state_dict()[name], x) for name, x in plain[0].state_dict().items())


@float64()
@pytest.mark.parametrize("delta", [0.5, 2.0])
def test_the_critics_loss_by_hand(delta):
    """A parabola up to delta, lines of slope 1 beyond: the pull on Q is the error over delta, clipped at 1. The loss is
    the sum over critics of means over rows."""
    errors = torch.tensor([[-7.0, -1.0, -0.2], [0.0, 0.6, 9.0]])
    q = (errors + 3.0)[..., None].requires_grad_()
    batch = riql.Transitions(*[torch.zeros(3, 1)] * 2, torch.full((3, 1), 3.0), torch.ones(3, 1), torch.zeros(3, 1))
    args = riql.Args(huber_delta=delta)
    loss, td_errors, targets = riql.critic_loss(lambda *_: q, batch, torch.full((3, 1), 50.0), args)
    loss.backward()
    close(q.grad[..., 0], (errors / delta).clamp(-1, 1) / 3)
    size = errors.abs().numpy()
    close(loss, np.where(size < delta, size**2 / 2 / delta, size - delta / 2).sum() / 3)
    close(td_errors[:, 0], size[0])
    close(targets, 3.0)


@float64()
def test_metrics_are_those_of_the_quantile_and_of_the_targets():
    agent, optimizers, args = agent_of(riql, num_critics=4, quantile=0.3)
    p, batch = named(agent), minibatch(riql.Transitions)
    both = torch.hstack([batch.obs, batch.actions])
    q = np.quantile([mlp(p, f"targets.q{i}", both).detach() for i in range(1, 5)], 0.3, axis=0)
    numbers = riql.update(agent, optimizers, batch, args)
    close(numbers["q"], q.mean())
    y = batch.rewards + 0.9 * (1 - batch.terminated) * mlp(named(agent), "value", batch.next_obs).detach()
    close(numbers["kurtosis"], stats.kurtosis(y, fisher=False)[0])
    close(riql.kurtosis(torch.tensor(stats.norm.ppf((np.arange(100_000) + 0.5) / 100_000))), 3.0, 0.01)


def small_data(n: int = 20_000) -> Dataset:
    """Observations of unlike spread; every fourth row has no next one, but a large number in its place."""
    rng = np.random.default_rng(0)
    obs, next_obs = (rng.normal(5, [1, 10], (n, 2)).astype(np.float32) for _ in range(2))
    known = np.arange(n) % 4 > 0
    next_obs[~known] = 1e4
    return Dataset(obs, obs[:, :1], obs[:, 0].copy(), obs[:, 0] > 5, next_obs, known, np.array([0]))


@pytest.mark.parametrize("corruption", ["none", "next-observations", "rewards"])
def test_corruption_changes_one_column_of_a_share_of_the_rows(corruption):
    """Next observations move by uniform noise, up to 0.5 deviations of the known ones either way, on its own in each
    number; rewards become uniform between -15 and 15. Another seed takes other rows."""
    data, before = small_data(), small_data()
    riql.corrupt(data, args := riql.Args(corruption=corruption, corruption_rate=0.2, corruption_scale=0.5, seed=3))
    spoilt = {"none": [], "next-observations": ["next_obs"], "rewards": ["rewards"]}[corruption]
    for name in ("obs", "actions", "rewards", "terminated", "next_obs", "known"):
        assert np.array_equal(getattr(data, name), getattr(before, name)) == (name not in spoilt)
    for name in spoilt:
        old, new = (getattr(x, name).reshape(len(data.obs), -1) for x in (before, data))
        rows = (old != new).any(1)
        assert abs(rows.mean() - 0.2) < 0.01
        noise = new[rows] / 15 if name == "rewards" else (new - old)[rows] / before.next_obs[before.known].std(0) / 0.5
        for column in noise[before.known[rows]].T:
            assert stats.kstest(column, stats.uniform(-1, 2).cdf).pvalue > 0.01
        assert noise.shape[1] == 1 or abs(np.corrcoef(noise[before.known[rows]].T)[0, 1]) < 0.1
        args.seed, again = 4, small_data()
        riql.corrupt(again, args)
        assert ((getattr(again, name).reshape(old.shape) != old).any(1) != rows).any()


def test_train_takes_the_spoilt_data(recorded, tmp_path, monkeypatch):  # noqa: F811
    """Before observations are scaled, and not what comes online. As many critics as were asked for."""
    path, columns = recorded
    run = trained(riql, tmp_path, path, "--corruption", "next-observations", "--corruption-rate", 1, "--num-critics", 3,
                  "--normalize", "--online-steps", ONLINE)  # fmt: skip
    mean, std = columns[0].mean(0), columns[0].std(0) + 1e-3
    close(run.added[0][0], (columns[0] - mean) / std, 1e-5)
    moved = np.abs(run.added[0][4] * std + mean - columns[4])
    assert (moved.max(0) > 0.5 * columns[4].std(0)).all() and (moved <= columns[4].std(0) * 1.001 + 1e-5).all()
    online = np.concatenate([part[4] for part in run.added[1:]])[:, 0] * std[0] + mean[0]
    close(online, online.round(), 1e-5)
    assert list(run.calls[0][0].critics) == ["q1", "q2", "q3"]
