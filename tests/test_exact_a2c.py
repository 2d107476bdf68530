"""a2c.py: whole updates by PPO's second implementation with another slope, one update by hand, and runs of ppo.py that
are A2C. Advantages, rollouts and the agent are ppo.py's, whose tests run on it, too."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from control import close, float64
from every_script import script
from helpers import metrics, new_run, weights
from test_exact_ppo import DISCRETE, SPACES, linear_agent, make_batch, one_row, random_batch, tables

from algos import a2c, ppo
from tests.reference import ppo as reference
from utils.core import UserError

SCRIPT = SimpleNamespace(update=lambda agent, optimizer, batch, _, args: a2c.update(agent, optimizer, batch, args))


@float64()
@SPACES
@pytest.mark.parametrize("changes", [
    {}, dict(ent_coef=0.3, vf_coef=2.0, gae_lambda=0.6, gamma=0.8), dict(normalize_advantages=True),
    dict(max_grad_norm=0.05)])  # fmt: skip
def test_update_is_the_reference_s(space, changes):
    """The slope of the loss in log pi is the advantage."""
    agent, args = linear_agent(48, space, 8), a2c.Args(**dict(max_grad_norm=1e9) | changes)
    batch = random_batch(agent)
    reference.check(SCRIPT, agent, batch, args, 50.0, *tables(agent, batch), slope=lambda ratio, a, args: a)


@float64()
def test_an_update_by_hand():
    """Rewards 1, 2, 4, discount 1/2. The second row is cut at a state of value 6, the third ends: returns 3.5, 5 and 4
    and, beside values 0, 2 and -2, advantages 3.5, 3 and 6. Of three equal chances the gradient is A (e_a - 1/3)."""
    agent = linear_agent(4, DISCRETE)
    agent.actor.weight.data.zero_()
    agent.critic.weight.data = torch.tensor([[0.0, 2, -2, 6]])
    rows = [one_row(0, [0], 1.0, 1, 4, False), one_row(1, [2], 2.0, 3, 4, False, True), one_row(2, [1], 4.0, 0, 4)]
    args = a2c.Args(gamma=0.5, vf_coef=0.5, max_grad_norm=1e9)
    found = a2c.update(agent, torch.optim.SGD(agent.parameters(), 3.0), make_batch(rows), args)
    close(3 * agent.actor.weight.T[:3], [[7, -3.5, -3.5], [-3, -3, 6], [-6, 12, -6]])
    close(agent.critic.weight[0], [1.75, 3.5, 1, 6])
    close(found["entropy"], np.log(3))


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_run_of_ppo_with_one_epoch_and_one_minibatch_is_a_run_of_a2c(env_id, tmp_path, monkeypatch):
    """Huang et al. 2022, arXiv 2205.09123: all weights and all metrics, bit for bit. With a second epoch, others."""
    module, args = script("a2c", tmp_path)
    args += ["--env-id", env_id, "--log-std-init=-0.5"]
    expected = new_run(module, tmp_path / "a2c", *args)
    monkeypatch.setattr(torch.optim, "Adam", lambda p, lr, eps, fused: torch.optim.RMSprop(p, lr, 0.99, eps))
    monkeypatch.setattr(torch, "randperm", lambda rows, **_: torch.arange(rows))  # draws nothing
    off = "--learning-rate 7e-4 --gae-lambda 1 --no-normalize-advantages --num-minibatches 1 --update-epochs"
    for epochs in (1, 2):
        run = new_run(ppo, tmp_path / f"ppo{epochs}", *args, *off.split(), epochs)
        rows, same = zip(metrics(expected), metrics(run), strict=True), weights(expected)
        alike = all(torch.equal(w, same[name]) for name, w in weights(run).items())
        assert [all(a.items() <= b.items() for a, b in rows), alike] == 2 * [epochs == 1]


def test_the_smallest_rollout_and_the_shortest_run():
    a2c.check(args := a2c.Args(num_envs=1, num_steps=2, total_timesteps=2), DISCRETE)
    for changes, message in ((dict(num_steps=1), "1 row"), (dict(total_timesteps=1), "less than one rollout of 2")):
        with pytest.raises(UserError, match=message):
            a2c.check(replace(args, **changes), DISCRETE)
