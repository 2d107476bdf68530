"""reinflow.py: densities of chains from the noise that made them, whole updates by tests/reference/ppo.py, and what is
seen, executed and evaluated. Deviations by the formula of the authors' code, aed2819, model/flow/mlp_flow.py. What it
shares with dppo.py: test_exact_dppo.py."""

import gymnasium as gym
import numpy as np
import pytest
import test_exact_dppo
import torch
from control import close, float64, mlp, named, randomise
from test_exact_dppo import CHANGES, updated

from algos import flow_bc, reinflow
from utils.control import make_vector

D, A, K, N = 3, 2, 3, 6
SIZES = dict(flow_steps=K, actor_size=8, hidden_size=5, min_std=0.1, max_std=0.4, num_minibatches=1, max_grad_norm=1e9)
SPACE = gym.spaces.Box(np.float32([-1, -3]), np.float32([2, 5]))


def make_agent(args, seed: int = 0) -> reinflow.Agent:
    """In which values are linear."""
    agent = reinflow.Agent(D, SPACE, args)
    agent.critic = torch.nn.Linear(D, 1)
    return randomise(agent, seed, 0.3, 0.1)


def own_step(p: dict, obs, x, k: int, args) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation: an Euler step, and the logarithm of a variance between two bounds."""
    time, low, high = torch.full((len(x), 1), k / args.flow_steps), 2 * np.log(args.min_std), 2 * np.log(args.max_std)
    hidden = torch.cat([obs, time], -1)
    for layer in (0, 2, 4):
        hidden = hidden @ p[f"noise.{layer}.weight"].T + p[f"noise.{layer}.bias"]
        hidden = hidden.tanh()  # of the output, too: it has bounds
    variance = (low + (high - low) * (hidden + 1) / 2).exp()
    return x + mlp(p, "actor.net", torch.cat([obs, x, time], -1)) / args.flow_steps, variance**0.5


def own_logps(p: dict, obs, chains, args) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each chain, and its entropy."""
    logps, entropy = 0.0, 0.0
    for k in range(args.flow_steps):
        mean, std = own_step(p, obs, chains[:, k], k, args)
        logps = logps - (((chains[:, k + 1] - mean) / std) ** 2 / 2 + (std * (2 * np.pi) ** 0.5).log()).sum(1)
        entropy = entropy + (std * (2 * np.pi * np.e) ** 0.5).log().sum(1)
    return logps, entropy


@float64()
@pytest.mark.parametrize("steps, bounds, scale", [(3, (0.1, 0.4), 1.0), (3, (0.2, 0.2), 1.0), (1, (0.1, 3.0), 1.0),
                                                  (3, (0.1, 0.4), 0.0)])  # fmt: skip
def test_chains_and_their_densities_come_from_the_noise(steps, bounds, scale):
    """The chain is the second implementation's of the same noise; its log-density, computed anew, is that of the noise:
    so the first ratio is 1. With scale 0 it is the flow of flow_bc.py. With one step it is PPO's Gaussian around
    x_0 + v(x_0)."""
    args = reinflow.Args(**SIZES | dict(flow_steps=steps, min_std=bounds[0], max_std=bounds[1]))
    agent, obs = make_agent(args), torch.randn(N, D)
    chains, noise = agent.sample(obs, scale, torch.Generator().manual_seed(2)), torch.randn(
        steps + 1, N, A, generator=torch.Generator().manual_seed(2))  # fmt: skip
    own, logps = [noise[0]], 0.0
    for k, z in enumerate(noise[1:]):
        mean, std = own_step(named(agent), obs, own[-1], k, args)
        own.append(mean + scale * std * z)
        logps = logps - (z**2 / 2 + (std * (2 * np.pi) ** 0.5).log()).sum(1)
    close(chains, torch.stack(own, 1))
    if scale:
        close(
            torch.stack(agent.log_prob(obs, chains)),
            torch.stack([logps, own_logps(named(agent), obs, chains, args)[1]]),
        )
    else:
        flow = flow_bc.Actor(D, A, 8)
        flow.load_state_dict(agent.actor.state_dict())
        close(chains[:, -1], flow.flow(obs, noise[0], steps))


@float64()
@CHANGES
@pytest.mark.parametrize("ent_coef", [0.0, 0.3])
def test_update_is_the_reference_s(changes, ent_coef):
    changes = SIZES | changes | {"ent_coef": ent_coef}
    args = reinflow.Args(**changes)
    updated(reinflow, make_agent(args), lambda p, *x: own_logps(p, *x, args), 0.05, changes)


class Count(test_exact_dppo.Count):
    """Of three steps, observed as float64."""

    action_space, observation_space = gym.spaces.Box(0, 4, (1,), np.float32), gym.spaces.Box(-9, 9, (1,), np.float64)
    length = 3


def test_what_is_seen_executed_and_evaluated(monkeypatch):
    """x_K is executed, clipped to [-1, 1] and stretched to the bounds; it is stored as it was. Steps have noise in
    training, and in evaluation where scale is not 0."""
    args, given = reinflow.Args(**SIZES | dict(num_envs=2, num_steps=4)), []
    agent, space = reinflow.Agent(1, Count.action_space, args), Count.action_space
    ends = torch.tensor([0.5, 1.5, -0.5, 0.0])
    chain = lambda obs: torch.stack([torch.zeros(len(obs)), ends[len(given) % 4 - 1].repeat(len(obs))], 1)  # noqa: E731
    monkeypatch.setattr(agent, "sample", lambda *x: given.append(x[:2]) or chain(x[0])[..., None])
    envs, obs = make_vector(lambda: reinflow.make_env(reinflow.Args(env_id="test_exact_reinflow:Count-v0")), args, 0)
    batch, obs, episodes = reinflow.collect(
        agent, envs, obs, torch.Generator(), reinflow.Statistics(2, 0.9, False), args
    )
    assert batch.obs[:, 1].tolist() == [[0], [1], [2], [0]] and obs.tolist() == [[1], [1]]
    assert batch.next_obs[:, 0].tolist() == [[1], [2], [3], [1]] and batch.obs.dtype == torch.float32
    assert batch.terminated[:, 0].tolist() == [False, False, True, False] and not batch.truncated.any()
    close(batch.rewards[:, 0], [6, 8, 2, 4]), close(batch.chains[:, 0, 1, 0], ends)
    assert episodes == [(16, 3)] * 2 and {scale for _, scale in given} == {1.0}
    scale = torch.tensor([[0.0], [1.0]])
    close(reinflow.act_in_evaluation(agent, np.ones((2, 1)), scale, torch.Generator()), [[3.0]] * 2)
    assert given[-1][1] is scale and space.contains(agent.to_env(torch.full((1, 2, 1), -9.0))[0])


gym.register("Count-v0", Count)
