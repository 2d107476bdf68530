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

from algos import cal_ql, cql, sac

D, A, H, B, K, TAU, RATE = 3, 2, 8, 16, 3, 0.1, 1e-2
both = pytest.mark.parametrize("script", [cql, cal_ql], ids=["cql", "cal_ql"])


def parts_of(agent) -> tuple:
    return agent.actor.parameters(), agent.critics.parameters(), [agent.log_alpha]


def step(optimizer, loss) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def agent_of(**flags) -> tuple[cql.Agent, cql.Args, cql.Optimizers]:
    args = cql.Args(**dict(hidden_size=H, tau=TAU, gamma=0.9, num_samples=K) | flags)
    agent = randomise(cql.Agent(D, A, args), 111, 1.0, 0.5)
    agent.log_alpha.data.fill_(math.log(0.3))
    return agent, args, cql.Optimizers(*(torch.optim.Adam(part, RATE) for part in parts_of(agent)))


@float64()
def test_the_penalty_is_the_log_of_the_integral():
    """Over actions of one number, of noise at 20,000 quantiles in place of draws; Q depends on state and action."""
    values = lambda x, a: torch.stack([i * x - 2 * i * (a - 0.3 * x) ** 2 for i in (1, 2)])  # noqa: E731
    agent = SimpleNamespace(actor=constant_actor([0.4], [0.7]), critics=values)
    states, data = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.9], [-0.2]])
    batch = cql.Transitions(states, data, states, states, states + 5)
    places = (torch.arange(20_000) + 0.5) / 20_000
    uniform = (2 * places - 1).view(1, -1, 1).expand(2, -1, 1)
    noise = torch.from_numpy(stats.norm.ppf(places)).view(1, 1, -1, 1).expand(2, 2, -1, 1)
    found = cql.conservative_penalty(agent, batch, values(states, data), uniform, noise)
    exps = lambda b: values(states, torch.as_tensor(b))[..., 0].exp().numpy()  # noqa: E731
    close(
        found, (np.log(integrate.quad_vec(exps, -1, 1)[0]) - values(states, data)[..., 0].numpy()).mean(1).sum(), 1e-4
    )


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
        loss, q, target = critics(other, batch, *given[-2], args)
        gap = q - other.critics(batch.obs, given[-2][1][:, 0])[0]
        expected = {"q": q.mean(), "gap": gap.mean(), "td_error": (q - target).abs().mean()}
        plain = critics(other, batch, *given[-2], replace(args, diversity=0.0))[0]
        close(loss - plain, 0.7 * cql.diversity(other.critics, batch.obs, batch.actions))
        step(others.critics, loss)
        loss, logps = actor(other, batch.obs, *given[-1])
        step(others.actor, loss)
        other.log_alpha.grad = -other.log_alpha.detach().exp() * (logps.mean() - A)
        others.alpha.step()
        for name, x in other.targets.state_dict().items():
            x.copy_((1 - TAU) * old[name] + TAU * other.critics.state_dict()[name])
        expected |= {"entropy": -logps.mean(), "alpha": other.log_alpha.exp()} | other.state_dict()
        assert all(x.requires_grad for x in agent.critics.parameters())
        for name, x in (numbers | agent.state_dict()).items():
            close(x, expected[name].detach())
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
            module.update(agent, optimizers, batch, generator, settings)
    assert all(torch.equal(x, ours.state_dict()[name]) for name, x in theirs.state_dict().items())


@float64()
@pytest.mark.parametrize("slopes, expected", [([[1.0, 0.0], [0.0, 2.0]], 0.0), ([[3.0, 4.0]] * 5, 5.0),
                                              ([[1.0, 2.0], [-0.5, -1.0]], -2.0)])  # fmt: skip
@both
def test_diversity_in_closed_form(script, slopes, expected):
    """Orthogonal slopes 0, equal ones N, two opposite ones -2, whatever their lengths."""
    critics = {i: lambda both, x=x: both[:, D:] @ torch.tensor(x) for i, x in enumerate(slopes)}
    close(script.diversity(critics, torch.zeros(B, D), torch.rand(B, 2)), expected)


@float64()
@both
def test_diversity_passes_each_network_once(script):
    """For N slopes, not all N networks for each. The value and its gradients are those of slopes taken one by one."""
    critics, batch, passed = agent_of(num_critics=4)[0].critics, minibatch(cql.Transitions), []
    hooks = [q.register_full_backward_hook(lambda q, *_: passed.append(q)) for q in critics.values()]
    found = script.diversity(critics, batch.obs, batch.actions)
    assert len(passed) == len(set(passed)) == 4
    for hook in hooks:
        hook.remove()
    actions = batch.actions.requires_grad_()
    slopes = [torch.autograd.grad(q.sum(), actions, create_graph=True)[0] for q in critics(batch.obs, actions)]
    expected = sum(torch.cosine_similarity(x, y).mean() for x in slopes for y in slopes if x is not y) / 3
    close(found, expected)
    weights = [x for name, x in critics.named_parameters() if name[-6:] != "4.bias"]  # a constant has no slope
    for ours, theirs in zip(*(torch.autograd.grad(x, weights) for x in (found, expected))):
        close(ours, theirs)


@both
def test_act_normalises_and_scales_the_noise(script):
    agent, space, obs = agent_of()[0], SimpleNamespace(shape=(A,)), np.random.default_rng(0).normal(size=(5, D))
    agent.load_state_dict({"obs_mean": torch.full((D,), 2.0), "obs_std": torch.full((D,), 4.0)}, strict=False)
    scale, (one, other) = torch.arange(5)[:, None] / 4, (torch.Generator().manual_seed(0) for _ in range(2))
    noise = torch.randn(5, A, generator=other) * scale
    close(
        script.act(agent, space, obs, scale, one), agent.actor(torch.from_numpy((obs - 2) / 4).float(), noise)[0], 1e-6
    )


@both
def test_train_hands_each_part_its_rate(script, tmp_path, monkeypatch):
    seen, real = [], script.update
    monkeypatch.setattr(script, "update", lambda *given: seen.append(given) or real(*given))
    flags = "--dataset", pendulum(tmp_path / "d.hdf5"), "--policy-learning-rate", 0.001
    new_run(script, tmp_path, *SMALL[script.NAME], *flags)
    agent, optimizers = seen[0][:2]
    for optimizer, part, rate in zip(optimizers, parts_of(agent), (0.001, 3e-4, 0.001), strict=True):
        (group,) = optimizer.param_groups
        assert [id(x) for x in group["params"]] == [id(x) for x in part] and group["lr"] == rate
