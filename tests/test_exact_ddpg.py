"""ddpg.py and its child td3.py against numbers computed another way: updates by a second implementation, and noise.
What train() shares with sac.py is tested in test_exact_sac.py, what TD3 adds in test_exact_td3.py."""

import math

import numpy as np
import pytest
import torch
from control import BACKENDS, assert_compiled_is_equal, assert_update_is, close, float64, minibatch, randomise
from reference.sac import Ddpg
from scipy import stats
from torch import nn

from algos import ddpg, td3

D, A, H, B = 3, 2, 8, 16  # observations, actions, hidden units, rows of a minibatch
GAMMA, TAU, RATE = 0.9, 0.1, 1e-2
MODULES = {"ddpg": ddpg, "td3": td3}
both = pytest.mark.parametrize("algo", MODULES)


@float64()
def test_update_is_that_of_the_reference():
    """The critic moves first, the actor by the new critic, the targets last; a third of the rows terminate."""
    agent = randomise(ddpg.Agent(D, A, H), 7, 0.4, 0.1)
    assert_update_is(Ddpg, ddpg, agent, ddpg.Args(gamma=GAMMA, tau=TAU), RATE)


@both
@BACKENDS
def test_the_compiled_losses_are_one_graph_with_equal_gradients(algo, backend, tolerance):
    module, batch = MODULES[algo], minibatch(MODULES[algo].Transitions)
    extra = {"ddpg": [[]], "td3": [[0.1 * torch.ones(B, A)], [0.0]]}[algo]
    for loss, inputs in [*((module.critic_loss, (batch, *e, GAMMA)) for e in extra), (module.actor_loss, (batch.obs,))]:
        make = lambda: randomise(module.Agent(D, A, H, *[2] * (algo == "td3")), 7, 0.4, 0.1)  # noqa: E731
        assert_compiled_is_equal(make, loss, inputs, backend, tolerance)


def constant_actor(module, u) -> nn.Module:
    """tanh(u), whatever is observed."""
    actor = module.Actor(1, len(u), 4)
    with torch.no_grad():
        actor.net[-1].weight.zero_()
        actor.net[-1].bias.copy_(torch.tensor(u))
    return actor


@both
def test_act_adds_normal_noise_and_clips(algo):
    """Each row and each action has noise of its own."""
    module = MODULES[algo]
    actor, generator = constant_actor(module, [0.3, -2.5]), torch.Generator().manual_seed(0)
    obs, mu = np.zeros((4000, 1)), np.tanh([0.3, -2.5])  # float64, as MuJoCo's
    close(module.act(actor, obs, 0.0, generator)[:3], [mu] * 3, 1e-6)
    actions = module.act(actor, obs, 0.1, generator)
    assert stats.kstest(actions[:, 0], stats.norm(mu[0], 0.1).cdf).pvalue > 0.01
    inside = actions[actions[:, 1] > -1, 1]
    assert stats.kstest(inside, stats.truncnorm((-1 - mu[1]) / 0.1, 9, mu[1], 0.1).cdf).pvalue > 0.01
    at_the_bound = stats.norm(mu[1], 0.1).cdf(-1)
    assert abs((actions[:, 1] == -1).mean() - at_the_bound) < 4 * math.sqrt(at_the_bound / 4000)
    assert abs(actions).max() == 1
    assert abs(np.corrcoef(actions.T)[0, 1]) < 0.07 and abs(np.corrcoef(actions[::2, 0], actions[1::2, 0])[0, 1]) < 0.09
    half = module.act(actor, obs[:2], torch.tensor([[0.0], [1.0]]), generator)
    close(half[0], mu, 1e-6)
    assert abs(half[1] - half[0]).max() > 1e-3
