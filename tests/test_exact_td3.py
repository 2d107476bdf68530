"""TD3's three ideas, each through `update`, and TD3 without them. What it shares with DDPG is in test_exact_ddpg.py."""

import math

import numpy as np
import pytest
import torch
from control import WALK, adam, close, float64, minibatch, mlp, named, randomise
from helpers import metrics, new_run, weights
from scipy import stats
from test_exact_ddpg import GAMMA, RATE, TAU, A, B, D, H, lag_all

from algos import ddpg, td3


def make(num_critics: int = 2) -> tuple[td3.Agent, td3.Optimizers]:
    agent = randomise(td3.Agent(D, A, H, num_critics), 7, 0.8, 0.1)
    return agent, td3.Optimizers(
        *(torch.optim.Adam(m.parameters(), RATE, fused=True) for m in (agent.actor, agent.critics))
    )


@float64()
@pytest.mark.parametrize("num_critics, policy_noise, frequency", [(2, 0.8, 2), (1, 0.8, 1), (2, 0.0, 1), (3, 0.8, 3)])
def test_update_equals_a_second_implementation(num_critics, policy_noise, frequency):
    """Six updates: all parameters and metrics. The target is the smallest critic's at the blurred, clipped action; the
    actor follows Q_1 alone; actor and targets move in every `frequency`th update and stand still between."""
    (agent, optimizers), names = make(num_critics), [f"q{i + 1}" for i in range(num_critics)]
    p, moments, generator, noises = named(agent), {}, torch.Generator().manual_seed(0), []
    smallest: set[int] = set()
    args = td3.Args(gamma=GAMMA, tau=TAU, num_critics=num_critics, policy_noise=policy_noise, noise_clip=0.5,
                    policy_frequency=frequency)  # fmt: skip

    def listening(agent, batch, noise, gamma):
        noises.append(noise)
        return td3.critic_loss(agent, batch, noise, gamma)

    unused = torch.get_rng_state()
    for number in range(1, 7):
        batch = minibatch(td3.Transitions, number)
        numbers = td3.update(agent, optimizers, batch, generator, args, number, listening)
        blurred = (torch.tanh(mlp(p, "target_actor.net", batch.next_obs)) + noises[-1]).detach()
        assert number > 1 or policy_noise == 0 or (blurred.abs() > 1).any()
        inputs = torch.hstack([batch.next_obs, blurred.where(blurred.abs() < 1, blurred.sign())])
        values = torch.hstack([mlp(p, f"target_critics.{name}", inputs) for name in names])
        smallest |= set(values.argmin(1).tolist())
        value = values.sort(1).values[:, :1]
        target = torch.where(batch.terminated == 1, batch.rewards, batch.rewards + GAMMA * value).detach()
        q = [mlp(p, f"critics.{name}", torch.hstack([batch.obs, batch.actions])) for name in names]
        wanted = {"q": q[0].mean(), "td_error": (q[0] - target).abs().mean()}
        gradients = adam(p, moments, "critics", sum(((x - target) ** 2).sum() / B for x in q), RATE)
        wanted["grad_norm"] = math.sqrt(sum((g**2).sum() for g in gradients.values()))
        if number % frequency == 0:
            actions = torch.tanh(mlp(p, "actor.net", batch.obs))
            wanted["q_policy"] = mlp(p, "critics.q1", torch.hstack([batch.obs, actions])).mean()
            adam(p, moments, "actor", -wanted["q_policy"], RATE)
            lag_all(p, TAU)
        for name, tensor in agent.state_dict().items():
            close(tensor, p[name].detach())
        assert numbers.keys() == wanted.keys()
        for name, value in wanted.items():
            close(numbers[name], value)
        assert all(x.requires_grad for x in [*agent.actor.parameters(), *agent.critics.parameters()])
    assert torch.equal(torch.get_rng_state(), unused) and smallest == set(range(num_critics))
    if policy_noise == 0:
        assert noises == [0.0] * 6 and torch.equal(generator.get_state(), torch.Generator().manual_seed(0).get_state())
        return
    drawn = torch.stack(noises).flatten().numpy()
    inside = drawn[abs(drawn) < 0.5]
    assert len(np.unique(inside)) == len(inside) > 50 and (abs(drawn) <= 0.5).all()
    assert stats.kstest(inside, stats.truncnorm(-0.5 / 0.8, 0.5 / 0.8, 0, 0.8).cdf).pvalue > 0.01
    share = 2 * stats.norm.cdf(-0.5 / 0.8)
    assert abs(np.mean(abs(drawn) == 0.5) - share) < 4 * math.sqrt(share * (1 - share) / len(drawn))


@float64()
def test_the_smoothed_target_is_an_integral_over_actions():
    """The mean of y over the noise is r + gamma times the integral of Q over a', with what lies beyond the bounds of
    the noise, and then of the actions, put on them: by quadrature. The critic is quadratic in the action."""
    sigma, clip, mu, curvature, centre, rows = 0.6, 0.5, math.tanh(0.7), 1.5, -0.2, 200_000

    class Quadratic(torch.nn.Module):
        def forward(self, obs, actions):
            return (-curvature * (actions - centre) ** 2)[None]

    agent, optimizers = make(1)
    agent.critics, agent.target_critics = td3.Critics(1, 1, 4, 1), Quadratic()
    agent.actor = agent.target_actor = td3.Actor(1, 1, 4)
    with torch.no_grad():
        agent.actor.net[-1].weight.zero_()
        agent.actor.net[-1].bias.fill_(0.7)
    optimizers = td3.Optimizers(*(torch.optim.SGD(m.parameters(), 0.0) for m in (agent.actor, agent.critics)))
    found = []

    def listening(agent, batch, noise, gamma):
        found.append(td3.critic_loss(agent, batch, noise, gamma))
        return found[-1]

    batch = td3.Transitions(*(torch.full((rows, 1), x) for x in (0.0, 0.0, 2.0, 0.0, 0.0)))
    args = td3.Args(gamma=GAMMA, num_critics=1, policy_noise=sigma, noise_clip=clip)
    td3.update(agent, optimizers, batch, torch.Generator().manual_seed(0), args, 1, listening)
    nodes = np.linspace(-6, 6, 200_001) * sigma
    density = stats.norm.pdf(nodes, 0, sigma) * (nodes[1] - nodes[0])
    values = -curvature * (np.clip(mu + np.clip(nodes, -clip, clip), -1, 1) - centre) ** 2
    mean, second = (density * values).sum(), (density * values**2).sum()
    error = GAMMA * math.sqrt((second - mean**2) / rows)
    assert abs(found[0][2].mean().item() - (2 + GAMMA * mean)) < 4 * error
    sharp = -curvature * (mu - centre) ** 2
    assert abs(mean - sharp) * GAMMA > 40 * error  # without noise it would be another number


def test_without_its_ideas_td3_is_ddpg_bit_for_bit(tmp_path):
    """All rows of metrics and all weights of a run; with any one of the ideas they are others."""
    settings = ("--device cpu --num-envs 2 --total-timesteps 120 --learning-starts 40 --batch-size 16 --hidden-size 8 "
                "--log-every 20 --eval-every 40 --eval-episodes 2").split() + WALK  # fmt: skip
    folder = new_run(ddpg, tmp_path / "ddpg", *settings)

    def rows(run):
        return [{name: x for name, x in row.items() if not name.startswith("time/")} for row in metrics(run)]

    off = {"--num-critics": 1, "--policy-frequency": 1, "--policy-noise": 0}
    for idea, value in {"none": None, "--num-critics": 2, "--policy-frequency": 2, "--policy-noise": 0.2}.items():
        flags = off if value is None else off | {idea: value}
        run = new_run(td3, tmp_path / idea, *settings, *(word for flag in flags.items() for word in flag))
        assert (rows(run) == rows(folder)) == (value is None)
        if value is None:
            ours = {name.replace("critics.q1", "critic.net"): x for name, x in weights(run).items()}
            theirs = weights(folder)
            assert ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())
