"""fql.py: the policy's gradient and the target in closed form, whole updates by a second implementation, which has the
formulas of the authors' agents/fql.py (719d044), and what alpha does at its two ends. The flow's own loss and path:
test_exact_flow_bc.py. What it shares with bc.py: test_exact_iql.py."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import adam, close, float64, minibatch, mlp, named, randomise
from torch import nn

from algos import fql

D, A, H, B, K = 3, 2, 8, 16, 3


def noise_of(seed: int, rows: int = B) -> torch.Tensor:
    return 1.5 * torch.randn(rows, A, generator=torch.Generator().manual_seed(seed))


def agent_of() -> SimpleNamespace:
    """The policy's outputs are parameters, some outside [-1, 1]; the flow doubles its noise; Q_i(s, a) is
    i - i |a - i / 4|^2, whose slope is known. Targets have ten times as much."""
    table = nn.Parameter(noise_of(1))
    critics = lambda obs, a: tuple(i - i * (a - i / 4).square().sum(1, keepdim=True) for i in (1, 2))  # noqa: E731
    return SimpleNamespace(policy=lambda obs, z: table, table=table, critics=critics,
                           target_critics=lambda obs, a: tuple(10 * q for q in critics(obs, a)),
                           actor=SimpleNamespace(flow=lambda obs, z, steps: z * 2 * steps / K))  # fmt: skip


@float64()
@pytest.mark.parametrize("alpha, normalize", [(10.0, False), (0.0, False), (0.3, True)])
def test_the_policy_s_gradient_in_closed_form(alpha, normalize):
    """The distance is to the flow's clipped action of the same noise. No value pulls a number beyond the box."""
    agent, batch, noise = agent_of(), minibatch(fql.Transitions, 1), noise_of(2)
    args = fql.Args(alpha=alpha, normalize_q=normalize, flow_steps=K)
    loss, distill, q = fql.policy_loss(agent, batch, noise, args)
    loss.backward()
    mu, flow = agent.table.detach().numpy(), (2 * noise).numpy().clip(-1, 1)
    inside = abs(mu) < 1
    values = [i - i * ((mu.clip(-1, 1) - i / 4) ** 2).sum(1, keepdims=True) for i in (1, 2)]
    slope = sum(-i * (mu - i / 4) for i in (1, 2)) * inside  # of the mean of both
    mean = (values[0] + values[1]) / 2
    scale = 1 / abs(mean).mean() if normalize else 1
    close(agent.table.grad, alpha * 2 * (mu - flow) / (B * A) - scale * slope / B)
    close(q, mean)
    close(distill, ((mu - flow) ** 2).mean())
    assert 0.2 < inside.mean() < 0.9 and mean.min() < 0 < mean.max() and not q.requires_grad


@float64()
def test_the_target_by_hand():
    """The mean of the target critics at the policy's clipped action; nothing behind an end; both critics learn it."""
    agent, batch = agent_of(), minibatch(fql.Transitions, 2)
    agent.policy = lambda obs, z: obs[:, :A] + z
    loss, q, target = fql.critic_loss(agent, batch, noise_of(3), 0.9)
    action = (batch.next_obs[:, :A] + noise_of(3)).numpy().clip(-1, 1)
    mean = sum(10 * (i - i * ((action - i / 4) ** 2).sum(1)) for i in (1, 2))[:, None] / 2
    expected = batch.rewards.numpy() + 0.9 * mean * (1 - batch.terminated.numpy())
    values = [x.numpy() for x in agent.critics(batch.obs, batch.actions)]
    close(target, expected)
    close(q, (values[0] + values[1]) / 2)
    close(loss, sum(((x - expected) ** 2).mean() for x in values) / 2)
    assert 0 < batch.terminated.mean() < 1 and (abs(action) == 1).any()


def value(p: dict, name: str, obs, actions) -> torch.Tensor:
    """A critic's network by hand: LayerNorm behind each hidden layer's ReLU."""
    x = torch.hstack([obs, actions])
    for layer in (0, 3):
        x = (x @ p[f"{name}.{layer}.weight"].T + p[f"{name}.{layer}.bias"]).clamp(min=0)
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-6).sqrt()
        x = x * p[f"{name}.{layer + 2}.weight"] + p[f"{name}.{layer + 2}.bias"]
    return x @ p[f"{name}.6.weight"].T + p[f"{name}.6.bias"]


@float64()
def test_updates_equal_a_second_implementation():
    """Three updates. All losses are of the networks before the step; the values' gradient reaches the policy alone, and
    the distance's as well. Three noises and the times come from the generator alone."""
    args = fql.Args(hidden_size=H, flow_steps=K, alpha=2.0, gamma=0.9, tau=0.2)
    agent = randomise(fql.Agent(D, A, args), 3, 0.5, 0.2)
    optimizer = torch.optim.Adam((p for p in agent.parameters() if p.requires_grad), 1e-2)
    p, moments, generator, twin = named(agent), {}, torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    before = torch.get_rng_state()
    for step in range(3):
        batch = minibatch(fql.Transitions, step)
        numbers = fql.update(agent, optimizer, batch, generator, args)
        z1, x0, z = (torch.randn(B, A, generator=twin) for _ in range(3))
        t = torch.rand(B, 1, generator=twin)
        policy = lambda obs, noise: mlp(p, "policy.net", torch.hstack([obs, noise]))  # noqa: E731, B023
        q_of = lambda name, obs, a: [value(p, f"{name}.q{i}", obs, a) for i in (1, 2)]  # noqa: E731, B023
        velocity = lambda x, t: mlp(p, "actor.net", torch.hstack([batch.obs, x, t]))  # noqa: E731, B023
        next_q = sum(q_of("target_critics", batch.next_obs, policy(batch.next_obs, z1).clamp(-1, 1))) / 2
        y = (batch.rewards + 0.9 * (1 - batch.terminated) * next_q).detach()
        both = q_of("critics", batch.obs, batch.actions)
        flow_loss = ((velocity(x0 + t * (batch.actions - x0), t) - batch.actions + x0) ** 2).mean()
        x = z
        for k in range(K):
            x = x + velocity(x, torch.full((B, 1), k / K)) / K
        mu = policy(batch.obs, z)
        q_policy = sum(q_of("critics", batch.obs, mu.clamp(-1, 1))) / 2
        distill = ((mu - x.detach().clamp(-1, 1)) ** 2).mean()
        losses = {"actor": flow_loss, "policy": 2.0 * distill - q_policy.mean(),
                  "critics": sum(((q - y) ** 2).mean() for q in both) / 2}  # fmt: skip
        moved = {name: dict(p) for name in losses}
        for name, loss in losses.items():
            adam(moved[name], moments, name, loss, 1e-2)
        for name in p:
            p[name] = moved[name.split(".")[0]][name] if name.split(".")[0] in moved else p[name]
        for name in p:
            if name.startswith("target"):
                p[name] = (0.8 * p[name] + 0.2 * p[name.replace("target_", "")]).detach()
        expected = {"loss": flow_loss, "distill": distill, "q": sum(both).mean() / 2, "q_policy": q_policy.mean(),
                    "td_error": (sum(both) / 2 - y).abs().mean()}  # fmt: skip
        assert numbers.keys() == expected.keys()
        for name, number in expected.items():
            close(numbers[name], number)
        for name, tensor in agent.state_dict().items():
            close(tensor, p[name])
    assert torch.equal(torch.get_rng_state(), before)


def trained(alpha: float, kinds: bool) -> tuple[fql.Agent, torch.Generator]:
    """One state; actions of -0.8 and 0.8, or all in [-1, 1]. The best one is 0.5."""
    torch.manual_seed(0)
    args = fql.Args(hidden_size=64, learning_rate=3e-3, alpha=alpha)
    agent, generator = fql.Agent(1, 1, args), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam((p for p in agent.parameters() if p.requires_grad), args.learning_rate)
    empty = torch.zeros(256, 1)
    for _ in range(600):
        actions = torch.rand(256, 1, generator=generator) * 2 - 1
        actions = 0.8 * actions.sign() if kinds else actions
        batch = fql.Transitions(empty, actions, 1 - (actions - 0.5).abs(), empty + 1, empty)
        fql.update(agent, optimizer, batch, generator, args)
    return agent, generator


def test_a_large_alpha_is_the_flow_in_one_step():
    """Of the same noise the same action; so there are both kinds of actions, half of each."""
    agent, generator = trained(1000.0, kinds=True)
    z, obs = torch.randn(2000, 1, generator=generator), torch.zeros(2000, 1)
    with torch.no_grad():
        assert (agent.policy(obs, z) - agent.actor.flow(obs, z, 10).clamp(-1, 1)).abs().mean() < 0.1
    actions = fql.act(agent.policy, gym.spaces.Box(-1, 1, (1,)), obs.numpy(), 1.0, generator)
    assert 0.35 < (actions > 0.6).mean() < 0.65 and 0.35 < (actions < -0.6).mean() < 0.65


def test_without_the_flow_the_policy_finds_the_best_action():
    """Where the data has all actions."""
    agent, generator = trained(0.0, kinds=False)
    actions = fql.act(agent.policy, gym.spaces.Box(-1, 1, (1,)), np.zeros((2000, 1)), 1.0, generator)
    assert abs(actions - 0.5).max() < 0.1


def test_act_is_the_policy_of_fresh_noise():
    """Whatever the scale, in one step, clipped."""
    policy, obs = fql.Policy(D, A, H), np.random.default_rng(0).normal(size=(500, D))
    scale, space = torch.arange(500)[:, None] % 2, gym.spaces.Box(-1, 1, (1, A))
    actions = fql.act(policy, space, obs, scale, torch.Generator().manual_seed(1))
    z = torch.randn(500, A, generator=torch.Generator().manual_seed(1))
    expected = mlp(named(policy), "net", torch.hstack([torch.tensor(obs).float(), z]))
    close(actions, expected.detach().numpy().clip(-1, 1), 1e-5)
    assert actions.dtype == np.float32 and 0.01 < (abs(actions) == 1).mean() < 0.95
