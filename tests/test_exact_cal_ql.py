"""cal_ql.py: the penalty and its slopes in closed form, CQL as the limit bit for bit, metrics, and the return that
train() stores with each row. CORL's losses, and returns by hand: test_parity_cql.py; the rest is cql.py's."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from control import close, float64, minibatch, randomise
from helpers import SMALL, new_run
from scipy.special import logsumexp, softmax
from small_data import pendulum
from test_exact_cql import A, B, D, K, parts_of

from algos import cal_ql, cql
from utils.offline import OfflineArgs, load_dataset


@float64()
@pytest.mark.parametrize("height", [-math.inf, 0.0, 1e3])
def test_the_penalty_and_its_slopes_in_closed_form(height):
    """The values of samples are parameters. Returns far above all let no gradient through the policy's samples."""
    draw = torch.Generator().manual_seed(0)
    values, logps = torch.randn(3, 2, B, K, 1, generator=draw), torch.randn(2, B, K, 1, generator=draw)
    q, floor = torch.randn(2, B, 1, generator=draw), height + torch.randn(B, 1, generator=draw)
    first, second, noise = iter(values.requires_grad_()), iter(logps), torch.zeros(2, B, K, A)
    agent = SimpleNamespace(critics=lambda *_: next(first), actor=lambda *_: (None, next(second)))
    (loss := cal_ql.calibrated_penalty(agent, minibatch(cql.Transitions), q, noise[0], noise, floor)).backward()
    v, bound = values.detach().numpy(), floor.numpy()[:, None]
    logs = np.concatenate([v[0] + A * math.log(2), *(np.maximum(v[1:], bound) - logps.numpy()[:, None])], 2)
    close(loss, (logsumexp(logs, 2) - math.log(3 * K) - q.numpy()).mean(1).sum())
    moves = np.concatenate([v[0] == v[0], *(v[1:] > bound)], 2)
    close(torch.cat(list(values.grad), 2), softmax(logs, 2) * moves / B)
    assert moves.mean() == {-math.inf: 1, 1e3: 1 / 3}[height] if height else 0.4 < moves.mean() < 1


@float64()
@pytest.mark.parametrize("case", ["flag", "returns of -inf", "returns"])
def test_update_is_cql_s_unless_a_return_is_in_play(case):
    """Three updates, bit for bit, with all metrics of cql.py; its own by hand, before the critics move."""
    returns = torch.randn(B, 1, generator=torch.Generator().manual_seed(9)) - (math.inf if "inf" in case else 0)
    agents, numbers, flag = [], {}, {cal_ql: dict(calibrate=case != "flag"), cql: {}}
    for script, more in ((cal_ql, (returns,)), (cql, ())):
        args = script.Args(gamma=0.9, tau=0.1, num_samples=K, backup_entropy=True, diversity=0.7, **flag[script])
        agents.append(agent := randomise(script.Agent(D, A, args), 5, 0.5, 0.5))
        optimizers = script.Optimizers(*(torch.optim.Adam(part, 1e-2) for part in parts_of(agent)))
        for seed in range(3):
            batch = minibatch(lambda *columns: script.Transitions(*columns, *more), seed)  # noqa: B023
            noise, drawn = torch.randn(2, B, A, generator=torch.Generator().manual_seed(seed)), torch.Generator()
            values = agent.critics(batch.obs, agent.actor(batch.obs, noise[0])[0])[0].detach()
            numbers[script] = script.update(agent, optimizers, batch, drawn.manual_seed(seed), args)
            own = {"q_policy": values, "excess": values - returns, "below": (values < returns).double()}
            for name in own if script is cal_ql else ():
                close(numbers[script][name], own[name].mean(), 1e-7)
    mine, theirs = (numbers[script] | agent.state_dict() for script, agent in zip(numbers, agents))
    assert all(torch.equal(x, mine[name]) for name, x in theirs.items()) == (case != "returns")


def test_train_stores_each_row_with_its_own_return(tmp_path, monkeypatch):
    """Of the trajectories that are taken, discounted by --gamma."""
    stored, replay, path = [], cal_ql.ReplayBuffer, pendulum(tmp_path / "d.hdf5")
    monkeypatch.setattr(cal_ql, "ReplayBuffer", lambda *sizes: stored.append(replay(*sizes)) or stored[0])
    new_run(cal_ql, tmp_path, *SMALL["cal_ql"], "--dataset", path, "--gamma", 0.5, "--top-fraction", 0.9)
    data = load_dataset(OfflineArgs(dataset=str(path)))
    close(stored[0].rows[:, -1], cal_ql.returns_to_go(data, 0.5)[rows := data.top_rows(0.9)], 1e-5)
    assert 0 < rows.mean() < 1 and rows[-1]
