"""reinflow.py: densities of chains from the noise that made them, whole updates by a second implementation, and what is
seen, executed and evaluated. Deviations by the formula of the authors' code, aed2819, model/flow/mlp_flow.py."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import checkpoint, close, float64, mlp, named, randomise
from helpers import SMALL, command_line, metrics, new_run, user_error
from small_data import pendulum
from test_exact_ppo import own_advantages

from algos import flow_bc, ppo, reinflow
from utils.control import make_vector

D, A, K, T, N = 3, 2, 3, 4, 6
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
@pytest.mark.parametrize("changes", [
    dict(update_epochs=3, ent_coef=0.3),
    dict(update_epochs=2, num_minibatches=3, clip_coef=0.05, gamma=0.7, gae_lambda=0.6),
    dict(update_epochs=2, normalize_advantages=False, max_grad_norm=1.0, clip_vloss=True, clip_coef=0.02),
    dict(update_epochs=9, target_kl=1e-6, vf_coef=0.8)])  # fmt: skip
def test_update_equals_a_second_implementation(changes):
    """Weights after plain gradient descent over several epochs and minibatches, and every metric."""
    args, rows, twin = reinflow.Args(**SIZES | changes), torch.Generator().manual_seed(3), torch.Generator()
    agent, own, norms, eps = make_agent(args), make_agent(args), [], args.clip_coef
    obs, next_obs = torch.randn(2, T, N, D, generator=rows)
    chains = agent.sample(obs.flatten(0, 1), 1.0, rows).detach()
    rewards, (ended, cut) = torch.randn(T, N, generator=rows), torch.rand(2, T, N, generator=rows) < 0.2
    batch = reinflow.Batch(obs, chains.unflatten(0, (T, N)), rewards, next_obs, ended, cut)
    numbers = reinflow.update(agent, torch.optim.SGD(agent.parameters(), 0.05), batch, twin.clone_state(), args)
    p, optimizer = dict(own.named_parameters()), torch.optim.SGD(own.parameters(), 0.05)
    value = lambda obs: obs @ p["critic.weight"][0] + p["critic.bias"][0]  # noqa: E731
    inputs = [x.detach().numpy() for x in (rewards, value(obs), value(next_obs), ended, cut)]
    advantages = torch.tensor(own_advantages(*inputs, args.gamma, args.gae_lambda)).flatten()
    obs, values = obs.flatten(0, 1), torch.tensor(inputs[1]).flatten()
    returns, old = advantages + values, own_logps(p, obs, chains, args)[0].detach()
    for _ in range(epochs := numbers["epochs"] if args.target_kl else args.update_epochs):
        found = []
        for i in torch.randperm(T * N, generator=twin).split(T * N // args.num_minibatches):
            logps, entropy = own_logps(p, obs[i], chains[i], args)
            ratio, a = (logps - old[i]).exp(), advantages[i]
            a = (a - a.mean()) / (a.std() + 1e-8) if args.normalize_advantages else a
            errors, moved = (value(obs[i]) - returns[i]) ** 2, value(obs[i]) - values[i]
            if args.clip_vloss:
                errors = torch.maximum(errors, (values[i] + moved.clip(-eps, eps) - returns[i]) ** 2)
            gain = torch.minimum(ratio * a, ratio.clip(1 - eps, 1 + eps) * a).mean() + args.ent_coef * entropy.mean()
            optimizer.zero_grad()
            (args.vf_coef / 2 * errors.mean() - gain).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(own.parameters(), args.max_grad_norm))
            optimizer.step()
            outside = ((ratio - 1).abs() > eps).double().mean()
            found.append([x.item() for x in ((ratio - 1 - ratio.log()).mean(), outside, entropy.mean())])
    close(torch.nn.utils.parameters_to_vector(agent.parameters()), torch.cat([w.flatten() for w in p.values()]), 1e-9)
    expected = [1 - (advantages.var() / returns.var()).item(), *np.mean(found, 0), np.mean(norms), epochs]
    assert list(numbers.values()) == pytest.approx(expected, abs=1e-7) and (eps > 0.1 or expected[2] > 0)
    assert epochs == (2 if args.target_kl else args.update_epochs)


class Count(gym.Env):
    """Observes how many steps were taken in this episode of three, as float64, and earns the action. It writes into one
    array."""

    action_space, observation_space = gym.spaces.Box(0, 4, (1,), np.float32), gym.spaces.Box(-9, 9, (1,), np.float64)

    def reset(self, *, seed=None, options=None):
        self.obs = np.zeros(1)
        return self.obs, {}

    def step(self, action):
        self.obs += 1
        return self.obs, float(action[0]), bool(self.obs == 3), False, {}


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
    close(batch.rewards[:, 0], [3, 4, 1, 2]), close(batch.chains[:, 0, 1, 0], ends)
    assert episodes == [(8, 3)] * 2 and {scale for _, scale in given} == {1.0}
    scale = torch.tensor([[0.0], [1.0]])
    close(reinflow.act_in_evaluation(agent, np.ones((2, 1)), scale, torch.Generator()), [[3.0]] * 2)
    assert given[-1][1] is scale and space.contains(agent.to_env(torch.full((1, 2, 1), -9.0))[0])
    ours, theirs, rows = reinflow.Statistics(2, 0.9, True), ppo.Statistics(1, 2, 0.9, True), np.random.default_rng(0)
    for reward, done in zip(rows.normal(5, 1, (9, 2)), rows.random((9, 2)) < 0.3):
        close(ours.reward(reward, done), theirs.reward(reward, done))


gym.register("Count-v0", Count)


def test_a_run_begins_with_the_flow_of_another(tmp_path, monkeypatch, capsys):
    """Of Pendulum, with its sizes and another number of steps. A resumed run does not need the other any more. What
    does not fit is said before anything is written."""
    how, ours = (*SMALL["flow_bc"], "--dataset", pendulum(tmp_path / "d.hdf5")), SMALL["reinflow"][:-2]
    start, before, update = new_run(flow_bc, tmp_path, *how), [], reinflow.update
    monkeypatch.setattr(reinflow, "update", lambda agent, *x: before.append(named(agent)) or update(agent, *x))
    run = new_run(reinflow, tmp_path / "runs", *ours, "--init", start)
    rates = [row["learning_rate"] for row in metrics(run)]
    close(rates, [3e-4 * (1 - i / len(rates)) for i in range(len(rates))])
    command_line(reinflow, "--resume", run, "--init", "gone", "--total-timesteps", 192)
    theirs, now = (checkpoint(folder)["agent"] for folder in (start, run))
    assert theirs
    for name, weight in theirs.items():
        assert torch.equal(before[0][name], weight) and not torch.equal(now[name], weight)
    wrong = {"nowhere is not": ["nowhere"], "a run of reinflow.py, not of flow_bc.py": [run], "has 16": [
        start, "--actor-size", 9], "other observations": [start, "--env-id", "MountainCarContinuous-v0"],
        "has no model": [start]}  # fmt: skip
    for words, args in wrong.items():
        if "model" in words:
            (start / "model/model.safetensors").unlink()
        with user_error(capsys, words):
            command_line(reinflow, *ours, "--output-dir", tmp_path / "no", "--init", *args)
    assert not (tmp_path / "no").exists()
