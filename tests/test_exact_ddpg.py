"""ddpg.py and its child td3.py against numbers computed another way: one update by a second implementation of the step,
the policy gradient and the fixed point by hand, what train() stores and draws by environments that tell what happened.

The second implementation takes tensors by name and uses its own forward pass, losses and Adam; only derivatives are
left to autograd. What TD3 adds is in test_exact_td3.py.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from control import (
    adam,
    checkpoint,
    close,
    float64,
    minibatch,
    mlp,
    named,
    randomise,
)
from helpers import metrics, new_run, weights
from scipy import stats
from test_exact_sac import (  # noqa: F401  # the tests run here with ddpg.py and td3.py
    SETTINGS,
    recorded_run,
    rows_of,
    test_train_stores_true_transitions,
    test_train_updates_on_what_it_stored,
)
from torch import nn

from algos import ddpg, td3

D, A, H, B = 3, 2, 8, 16  # observations, actions, hidden units, rows of a minibatch
GAMMA, TAU, RATE = 0.9, 0.1, 1e-2
MODULES = {"ddpg": ddpg, "td3": td3}
both = pytest.mark.parametrize("algo", MODULES)


def lag_all(p: dict, tau: float) -> None:
    """Moves all targets."""
    for name in p:
        if name.startswith("target_"):
            p[name] = ((1 - tau) * p[name] + tau * p[name.removeprefix("target_")]).detach()


@float64()
def test_update_equals_a_second_implementation():
    """Four updates: all parameters and metrics. The critic moves first, the actor by the new critic, the targets last;
    a third of the rows terminate."""
    agent = randomise(ddpg.Agent(D, A, H), 7, 0.4, 0.1)
    optimizers = ddpg.Optimizers(
        *(torch.optim.Adam(m.parameters(), RATE, fused=True) for m in (agent.actor, agent.critic))
    )
    p, moments, args, unused = named(agent), {}, ddpg.Args(gamma=GAMMA, tau=TAU), torch.get_rng_state()
    for step in range(4):
        batch = minibatch(ddpg.Transitions, step)
        numbers = ddpg.update(agent, optimizers, batch, args)
        next_actions = torch.tanh(mlp(p, "target_actor.net", batch.next_obs))
        value = mlp(p, "target_critic.net", torch.hstack([batch.next_obs, next_actions]))
        target = torch.where(batch.terminated == 1, batch.rewards, batch.rewards + GAMMA * value).detach()
        q = mlp(p, "critic.net", torch.hstack([batch.obs, batch.actions]))
        wanted = {"q": q.mean(), "td_error": (q - target).abs().mean()}
        gradients = adam(p, moments, "critic", ((q - target) ** 2).sum() / B, RATE)
        wanted["grad_norm"] = math.sqrt(sum((g**2).sum() for g in gradients.values()))
        actions = torch.tanh(mlp(p, "actor.net", batch.obs))
        of_policy = mlp(p, "critic.net", torch.hstack([batch.obs, actions])).mean()
        wanted["q_policy"] = of_policy
        adam(p, moments, "actor", -of_policy, RATE)
        lag_all(p, TAU)
        for name, tensor in agent.state_dict().items():
            close(tensor, p[name].detach())
        assert numbers.keys() == wanted.keys()
        for name, value in wanted.items():
            close(numbers[name], value)
        assert all(x.requires_grad for x in [*agent.actor.parameters(), *agent.critic.parameters()])
        lagging = [*agent.target_actor.parameters(), *agent.target_critic.parameters()]
        assert not any(x.requires_grad or x.grad is not None for x in lagging)
    assert torch.equal(torch.get_rng_state(), unused)


SLOW = pytest.param("inductor", 1e-5, marks=pytest.mark.slow)


@both
@pytest.mark.parametrize("backend, tolerance", [("eager", 1e-6), SLOW])
def test_the_compiled_losses_are_one_graph_with_equal_gradients(algo, backend, tolerance):
    module, batch = MODULES[algo], minibatch(MODULES[algo].Transitions)
    extra = {"ddpg": [[]], "td3": [[0.1 * torch.ones(B, A)], [0.0]]}[algo]
    for loss, inputs in [*((module.critic_loss, (batch, *e, GAMMA)) for e in extra), (module.actor_loss, (batch.obs,))]:
        results = []
        for function in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
            agent = randomise(module.Agent(D, A, H, *[2] * (algo == "td3")), 7, 0.4, 0.1)
            outputs = function(agent, *inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            outputs[0].backward()
            gradients = [x.grad for x in agent.parameters() if x.grad is not None]
            results.append(torch.cat([x.detach().flatten() for x in [*outputs, *gradients]]))
        assert (results[0] - results[1]).abs().max() < tolerance * results[0].abs().max()


class Slope(nn.Module):
    """Q(s, a) = height - curvature sum_k (a_k - centre_k)^2."""

    def __init__(self, centres, height=0.0, curvature=1.5):
        super().__init__()
        self.centres, self.curvature = torch.tensor(centres), curvature
        self.height = nn.Parameter(torch.tensor(height))

    def forward(self, obs, actions=None):
        actions = obs[:, 1:] if actions is None else actions  # both side by side
        return self.height - self.curvature * ((actions - self.centres) ** 2).sum(1, keepdim=True)


def constant_actor(module, u) -> nn.Module:
    """tanh(u), whatever is observed."""
    actor = module.Actor(1, len(u), 4)
    with torch.no_grad():
        actor.net[-1].weight.zero_()
        actor.net[-1].bias.copy_(torch.tensor(u))
    return actor


@both
@float64()
def test_the_gradient_of_the_actor_is_the_deterministic_policy_gradient(algo):
    """dQ/da times dmu/du at a = tanh(u), by hand; in TD3 of the first critic, also where the other one is smaller."""
    centres, u = [0.6, -0.2], [0.3, 0.9]
    agent = SimpleNamespace(actor=constant_actor(MODULES[algo], u), critic=Slope(centres),
                            critics={"q1": Slope(centres), "q2": Slope([-0.5, -0.9], -3.0)})  # fmt: skip
    MODULES[algo].actor_loss(agent, torch.zeros(5, 1)).backward()
    mu = np.tanh(u)
    close(agent.actor.net[-1].bias.grad, 2 * 1.5 * (mu - centres) * (1 - mu**2))


@float64()
def test_bellman_backup_and_its_fixed_point():
    """A state that ends with probability 1/4 and else leads to itself: Q(s, a) = height - curvature (a - centre)^2 with
    height = bonus + gamma 3/4 (height - curvature (mu - centre)^2). At the exact height the critic's expected gradient
    is 0; elsewhere it is 2 (Q - backup)."""
    centre, u, bonus, curvature, ends = [0.4], [-0.3], 1.7, 1.5, 0.25
    at_mu = -curvature * (math.tanh(u[0]) - centre[0]) ** 2
    exact = (bonus + GAMMA * (1 - ends) * at_mu) / (1 - GAMMA * (1 - ends))
    for height, wanted in ((exact, 0.0), (3.0, 2 * (3.0 - bonus - GAMMA * (1 - ends) * (3.0 + at_mu)))):
        agent = SimpleNamespace(target_actor=constant_actor(ddpg, u), target_critic=Slope(centre, height),
                                critic=Slope(centre, height))  # fmt: skip
        for a in (-0.9, 0.1):
            agent.critic.height.grad = None
            for terminated, chance in ((0.0, 1 - ends), (1.0, ends)):
                reward = bonus - curvature * (a - centre[0]) ** 2
                batch = ddpg.Transitions(*(torch.full((1, 1), float(x)) for x in (0, a, reward, terminated, 0)))
                (chance * ddpg.critic_loss(agent, batch, GAMMA)[0]).backward()
            close(agent.critic.height.grad, wanted)


# --- train()


@pytest.fixture(scope="module", params=MODULES)
def probe_run(request, tmp_path_factory):
    return recorded_run(MODULES[request.param], tmp_path_factory.mktemp("probe"))


def test_train_takes_every_update(probe_run):
    """utd-ratio updates for each step of an environment after learning_starts, by Adam at the learning rate for exactly
    actor and critics, which all moved, and the targets with them."""
    folder, calls, untrained = probe_run
    updates = 3 * (160 - 40)  # steps 42, 44, .. 160, twice each
    assert len(calls) == updates
    agent, optimizers = calls[0][:2]
    algo = type(agent).__module__.removeprefix("algos.")
    if algo == "td3":  # whose delay counts all updates that the steps so far have had
        assert [call[5] for call in calls] == list(range(121, 481))
    for optimizer, part in zip(
        optimizers, (agent.actor, agent.critic if algo == "ddpg" else agent.critics), strict=True
    ):
        (group,) = optimizer.param_groups
        assert [id(x) for x in group["params"]] == [id(x) for x in part.parameters()]
        assert type(optimizer) is torch.optim.Adam
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 1e-8, 0)
    names = "actor", "critic" if algo == "ddpg" else "critics"
    counts = [{x["step"].item() for x in checkpoint(folder)[name]["state"].values()} for name in names]
    assert counts == [{updates // (2 if algo == "td3" else 1)}, {updates}]
    saved = weights(folder)
    for name, tensor in saved.items():
        assert not torch.equal(tensor, untrained[name]), name
        if name.startswith("target_"):  # they lag, and began as copies
            assert torch.equal(untrained[name], untrained[name.removeprefix("target_")])
            assert not torch.equal(tensor, saved[name.removeprefix("target_")])


@both
def test_train_explores_uniformly_then_by_noise(algo, tmp_path, monkeypatch):
    """The first learning_starts steps are uniform in [-1, 1], later ones the actor's, which is given the standard
    deviation of the noise and the observation that is stored with its action. In evaluation half of the episodes get no
    noise, half that of exploration; actions are stretched there, too."""
    given = []

    def quarter(actor, obs, scale, generator):
        given.append((obs.copy(), scale))
        return np.full((len(obs), 2), 0.25, np.float32)

    monkeypatch.setattr(MODULES[algo], "act", quarter)
    settings = [*SETTINGS, "--learning-starts", 120, "--exploration-noise", 0.3]
    folder = new_run(MODULES[algo], tmp_path, *settings)
    obs, actions = rows_of(folder)[:2]
    assert stats.kstest(actions[:120].flatten(), stats.uniform(-1, 2).cdf).pvalue > 0.01
    assert len(np.unique(actions[:120])) == 240 and (actions[120:] == 0.25).all()
    close(np.concatenate([x for x, _ in given[:20]]), obs[120:])
    assert all(scale == 0.3 for _, scale in given[:20])
    assert all(scale.flatten().tolist() == pytest.approx([0, 0, 0.3, 0.3]) for _, scale in given[20:])
    (row,) = metrics(folder)
    close(row["eval/return"], row["eval/length"] * (100 - 1 + 1.25 / 2 * 4), 1e-3)


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
