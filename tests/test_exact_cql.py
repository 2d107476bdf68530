"""cql.py: the penalty against the integral by quadrature, what an update moves and when, EDAC's term in closed
form, SAC as the limit, and what train() hands on. Losses of CORL's code: test_parity_cql.py; what train()
stores: test_exact_td3_bc.py."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from control import close, float64, minibatch, randomise
from helpers import SMALL, new_run
from scipy import integrate, stats
from small_data import pendulum
from test_exact_sac import constant_actor

from algos import cql, sac

D, A, H, B, K, TAU, RATE = 3, 2, 8, 16, 3, 0.1, 1e-2


def parts_of(agent) -> tuple:
    return agent.actor.parameters(), agent.critics.parameters(), [agent.log_alpha]


def agent_of(**flags) -> tuple[cql.Agent, cql.Args, cql.Optimizers]:
    args = cql.Args(**dict(hidden_size=H, tau=TAU, gamma=0.9, num_samples=K) | flags)
    agent = randomise(cql.Agent(D, A, args), 111, 0.4, 0.6)
    agent.log_alpha.data.fill_(math.log(0.3))
    return agent, args, cql.Optimizers(*(torch.optim.Adam(part, RATE) for part in parts_of(agent)))


@float64()
def test_the_penalty_is_the_log_of_the_integral():
    """Over actions of one number, of noise at 20,000 quantiles in place of draws; Q depends on state and action."""
    heights, centres, data = torch.tensor([[1.0], [-0.5]]), torch.tensor([[0.3], [-0.6]]), torch.tensor([[0.9], [-0.2]])
    values = lambda x, a: torch.stack([height * x - 2 * i * (a - centres[0] * x) ** 2 for i, height in  # noqa: E731
                                       enumerate(heights, 1)])  # fmt: skip
    agent = SimpleNamespace(actor=constant_actor([0.4], [0.7]), critics=values)
    states, others = torch.tensor([[1.0], [2.0]]), torch.tensor([[5.0], [7.0]])
    batch = cql.Transitions(states, data, states, states, others)
    places = (torch.arange(20_000) + 0.5) / 20_000
    uniform = (2 * places - 1).view(1, -1, 1).expand(2, -1, 1)
    noise = torch.from_numpy(stats.norm.ppf(places)).view(1, 1, -1, 1).expand(2, 2, -1, 1)
    found = cql.conservative_penalty(agent, batch, values(states, data), uniform, noise)
    integrals = [[integrate.quad(lambda b, i=i, x=x: values(x, torch.as_tensor(b))[i].exp(), -1, 1)[0] for x in states]
                 for i in range(2)]  # fmt: skip
    expected = (np.log(integrals) - values(states, data)[..., 0].numpy()).mean(1).sum()
    close(found, expected, 1e-4)


@float64()
def test_update_takes_the_steps_of_its_losses_in_order(monkeypatch):
    """Three updates with three critics, taken again from what the losses were given: critics, actor by the new critics,
    temperature by hand, targets last; all parameters and metrics. Numbers are drawn from the generator alone."""
    (agent, args, optimizers), given = agent_of(num_critics=3, diversity=0.7), []
    generator, critics, actor = torch.Generator().manual_seed(0), cql.critic_loss, cql.actor_loss
    (other, _, others), unused = agent_of(num_critics=3), torch.get_rng_state()
    monkeypatch.setattr(cql, "critic_loss", lambda *inputs: given.append(inputs[2:5]) or critics(*inputs))
    monkeypatch.setattr(cql, "actor_loss", lambda *inputs: given.append(inputs[2:]) or actor(*inputs))
    for number in range(3):
        batch, old = minibatch(cql.Transitions, number), {n: x.clone() for n, x in other.targets.state_dict().items()}
        numbers = cql.update(agent, optimizers, batch, generator, args)
        uniform = given[-2][1]
        loss, q, target = critics(other, batch, *given[-2], args)
        gap = q - other.critics(batch.obs, uniform[:, 0])[0]
        expected = {"q": q.mean(), "gap": gap.mean(), "td_error": (q - target).abs().mean()}
        close(loss - critics(other, batch, *given[-2], replace(args, diversity=0.0))[0],
              0.7 * cql.diversity(other.critics, batch.obs, batch.actions))  # fmt: skip
        others.critics.zero_grad()
        loss.backward()
        others.critics.step()
        loss, logps = actor(other, batch.obs, *given[-1])
        others.actor.zero_grad()
        loss.backward()
        others.actor.step()
        other.log_alpha.grad = -other.log_alpha.detach().exp() * (logps.mean() - A)
        others.alpha.step()
        for name, x in other.targets.state_dict().items():
            x.copy_((1 - TAU) * old[name] + TAU * other.critics.state_dict()[name])
        expected |= {"entropy": -logps.mean(), "alpha": other.log_alpha.exp()}
        assert numbers.keys() == expected.keys() and all(x.requires_grad for x in agent.critics.parameters())
        for name, x in expected.items():
            close(numbers[name], x)
        for name, x in agent.state_dict().items():
            close(x, other.state_dict()[name])
    normal = torch.cat([x.flatten() for (*noises,) in given for x in noises if x.dim() != 3])
    uniform = torch.cat([inputs[1].flatten() for inputs in given[::2]])
    assert stats.kstest(normal, "norm").pvalue > 0.01 and stats.kstest(uniform, stats.uniform(-1, 2).cdf).pvalue > 0.01
    assert len(normal.unique()) == len(normal) == 3 * (2 + 2 * K) * B * A and torch.equal(torch.get_rng_state(), unused)


@float64()
def test_without_its_terms_it_is_sac():
    """Bit for bit, on a dataset: the squared error is twice SAC's, so Adam has twice the constant below its root."""
    ours, args, _ = agent_of(cql_weight=0.0)
    theirs = sac.Agent(D, A, H, None)
    theirs.load_state_dict({name: x for name, x in ours.state_dict().items() if "obs_" not in name})
    for module, agent, settings, eps in ((cql, ours, args, 2e-8), (sac, theirs, sac.Args(tau=TAU, gamma=0.9), 1e-8)):
        settings.target_entropy = -float(A)
        optimizers = module.Optimizers(*(torch.optim.Adam(part, RATE) for part in parts_of(agent)))
        optimizers.critics.param_groups[0]["eps"] = eps
        for number in (1, 2, 3):
            batch, generator = minibatch(module.Transitions, number), torch.Generator().manual_seed(number)
            module.update(agent, optimizers, batch, generator, settings, *[number][: module is sac])
    assert all(torch.equal(x, ours.state_dict()[name]) for name, x in theirs.state_dict().items())


@float64()
@pytest.mark.parametrize("slopes, expected", [
    ([[1.0, 0.0], [0.0, 2.0]], 0.0), ([[3.0, 4.0]] * 5, 5.0), ([[1.0, 2.0], [-0.5, -1.0]], -2.0),
    ([[1.0, 0.0], [1.0, 1.0], [0.0, 0.3]], math.sqrt(2)),
])  # fmt: skip
def test_diversity_in_closed_form(slopes, expected):
    """Orthogonal slopes 0, equal ones N, two opposite ones -2, whatever their lengths."""
    critics = lambda obs, actions: torch.stack([(actions * torch.tensor(x)).sum(1, keepdim=True) for x in slopes])  # noqa: E731
    close(cql.diversity(critics, torch.zeros(B, D), torch.rand(B, 2)), expected)


def test_act_normalises_and_scales_the_noise():
    agent, space, obs = agent_of()[0], SimpleNamespace(shape=(A,)), np.random.default_rng(0).normal(size=(5, D))
    agent.obs_mean.fill_(2.0)
    agent.obs_std.fill_(4.0)
    scale, generator = torch.tensor([[0.0], [0.0], [1.0], [1.0], [0.5]]), torch.Generator().manual_seed(0)
    noise = torch.randn(5, A, generator=torch.Generator().manual_seed(0))
    expected = agent.actor(torch.from_numpy((obs - 2) / 4).float(), noise * scale)[0]
    close(cql.act(agent, space, obs, scale, generator), expected, 1e-6)


def test_train_hands_each_part_its_rate(tmp_path, monkeypatch):
    seen, real = [], cql.update
    monkeypatch.setattr(cql, "update", lambda *given: seen.append(given) or real(*given))
    data = pendulum(tmp_path / "d.hdf5")
    new_run(cql, tmp_path, *SMALL["cql"], "--dataset", data, "--learning-rate", 0.002, "--policy-learning-rate", 0.001)
    agent, optimizers = seen[0][:2]
    for optimizer, part, rate in zip(optimizers, parts_of(agent), (0.001, 0.002, 0.001), strict=True):
        (group,) = optimizer.param_groups
        assert [id(x) for x in group["params"]] == [id(x) for x in part] and group["lr"] == rate
