"""dppo.py: densities of chains from the noise that made them, one denoising step against ppo.py, whole updates by a
second implementation, and what plans see, execute and earn. The authors' formulas: test_parity_diffusion_policy.py."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import checkpoint, close, float64, mlp, named, randomise
from helpers import SMALL, command_line, metrics, new_run, user_error
from small_data import pendulum
from test_exact_diffusion_policy import shares
from test_exact_ppo import own_advantages

from algos import diffusion_policy, dppo, ppo
from utils.control import make_vector

D, A, H, K, LEARNED, T, N = 3, 2, 3, 4, 3, 4, 6
SIZES = dict(horizon=H, n_obs_steps=1, n_action_steps=2, diffusion_steps=K, num_finetuned_steps=LEARNED,
             denoiser_size=8, min_std=0.15, num_minibatches=1, max_grad_norm=1e9)  # fmt: skip


def make_agent(args, seed: int = 0) -> dppo.Agent:
    """In which the steps before the last K' are another's, and values are linear."""
    agent = dppo.Agent(D, A, args)
    agent.critic = torch.nn.Linear(D, 1)
    return randomise(agent, seed, 0.3, 0.1)


def own_step(p: dict, part: str, obs, x, k: int, steps: int = K) -> tuple[torch.Tensor, float]:
    """Bayes' rule: x_k-1 has a prior around the predicted plan and is seen through x_k; the precisions add up."""
    now, before = shares(steps)[k], shares(steps)[k - 1]
    noise = mlp(p, f"{part}.net", torch.cat([obs, x, torch.full((len(x), 1), k / steps)], -1))
    plan, kept = ((x - (1 - now) ** 0.5 * noise) / now**0.5).clip(-1, 1), now / before
    if k == 1:
        return plan, 0.0
    variance = 1 / (1 / (1 - before) + kept / (1 - kept))
    return variance * (before**0.5 * plan / (1 - before) + kept**0.5 * x / (1 - kept)), variance.item() ** 0.5


def own_logps(p: dict, obs, chains, min_std: float) -> torch.Tensor:
    steps = [own_step(p, "actor", obs, chains[:, LEARNED - k], k) for k in range(LEARNED, 0, -1)]
    z = [((x - mean) / max(std, min_std), max(std, min_std)) for x, (mean, std) in zip(chains[:, 1:].unbind(1), steps)]
    return torch.stack([(-(z**2) / 2 - np.log(std * (2 * np.pi) ** 0.5)).sum(1) for z, std in z], 1)


@float64()
@pytest.mark.parametrize("steps, learned, min_std", [(4, 3, 0.01), (4, 3, 0.15), (4, 4, 0.5), (1, 1, 0.1)])
def test_chains_and_their_densities_come_from_the_noise(steps, learned, min_std):
    """The chain is the second implementation's of the same noise; its log-densities, computed anew, are those of the
    noise: so the first ratio is 1. K' steps are kept, those before are the start's. The floor is in both. With one step
    it is PPO's Gaussian of a fixed deviation, around the plan."""
    args = dppo.Args(**SIZES | dict(diffusion_steps=steps, num_finetuned_steps=learned, min_std=min_std))
    agent, obs = make_agent(args), torch.randn(N, D)
    chains, twin = agent.sample(obs, min_std, torch.Generator().manual_seed(2)), torch.Generator().manual_seed(2)
    p, kept, logps = named(agent), [torch.randn(N, H * A, generator=twin)], []
    for k in range(steps, 0, -1):
        mean, std = own_step(p, "actor" if k <= learned else "start", obs, kept[-1], k, steps)
        noise, std = torch.randn(N, H * A, generator=twin), max(std, min_std)
        kept.append(mean + std * noise)
        logps.append((-(noise**2) / 2 - np.log(std * (2 * np.pi) ** 0.5)).sum(1))
    close(chains, torch.stack(kept[-learned - 1 :], 1))
    close(agent.log_prob(obs, chains), torch.stack(logps[-learned:], 1))


@float64()
@pytest.mark.parametrize("changes", [
    dict(update_epochs=3, gamma_denoising=0.6),
    dict(update_epochs=2, num_minibatches=3, gamma_denoising=1.0, clip_coef=0.05, gamma=0.7, gae_lambda=0.6),
    dict(update_epochs=2, normalize_advantages=False, max_grad_norm=1.0, clip_vloss=True, clip_coef=0.02),
    dict(update_epochs=9, target_kl=1e-6, vf_coef=0.8)])  # fmt: skip
def test_update_equals_a_second_implementation(changes):
    """Weights after plain gradient descent over several epochs and minibatches of plans, and every metric."""
    args, rows, twin = dppo.Args(**SIZES | changes), torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)
    agent, own, norms, eps = make_agent(args), make_agent(args), [], args.clip_coef
    obs, next_obs = torch.randn(2, T, N, D, generator=rows)
    chains = agent.sample(obs.flatten(0, 1), args.min_std, rows).detach()
    rewards, (ended, cut) = torch.randn(T, N, generator=rows), torch.rand(2, T, N, generator=rows) < 0.2
    batch = dppo.Batch(obs, chains.unflatten(0, (T, N)), rewards, next_obs, ended, cut)
    numbers = dppo.update(agent, torch.optim.SGD(agent.parameters(), 0.05), batch, twin.clone_state(), args)
    p, optimizer = dict(own.named_parameters()), torch.optim.SGD(own.parameters(), 0.05)
    value = lambda obs: obs @ p["critic.weight"][0] + p["critic.bias"][0]  # noqa: E731
    inputs = [x.detach().numpy() for x in (rewards, value(obs), value(next_obs), ended, cut)]
    advantages = torch.tensor(own_advantages(*inputs, args.gamma, args.gae_lambda)).flatten()
    obs, values = obs.flatten(0, 1), torch.tensor(inputs[1]).flatten()
    returns, old = advantages + values, own_logps(p, obs, chains, args.min_std).detach()
    for _ in range(epochs := 2 if args.target_kl else args.update_epochs):
        found = []
        for i in torch.randperm(T * N, generator=twin).split(T * N // args.num_minibatches):
            ratio, a = (own_logps(p, obs[i], chains[i], args.min_std) - old[i]).exp(), advantages[i]
            a = (a - a.mean()) / (a.std() + 1e-8) if args.normalize_advantages else a
            a = torch.stack([a * args.gamma_denoising ** (k - 1) for k in range(LEARNED, 0, -1)], 1)
            errors, moved = (value(obs[i]) - returns[i]) ** 2, value(obs[i]) - values[i]
            if args.clip_vloss:
                errors = torch.maximum(errors, (values[i] + moved.clip(-eps, eps) - returns[i]) ** 2)
            gain = torch.minimum(ratio * a, ratio.clip(1 - eps, 1 + eps) * a)
            optimizer.zero_grad()
            (args.vf_coef / 2 * errors.mean() - gain.mean()).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(own.parameters(), args.max_grad_norm))
            optimizer.step()
            found.append([(ratio - 1 - ratio.log()).mean().item(), ((ratio - 1).abs() > eps).double().mean().item()])
    close(torch.nn.utils.parameters_to_vector(agent.parameters()), torch.cat([w.flatten() for w in p.values()]), 1e-9)
    expected = [1 - (advantages.var() / returns.var()).item(), *np.mean(found, 0), np.mean(norms), epochs]
    assert list(numbers.values()) == pytest.approx(expected, abs=1e-7) and (eps > 0.1 or expected[2] > 0)


class Count(gym.Env):
    """Observes how many steps were taken in this episode of five, and earns twice the action. In the second step there
    is a success. It writes into one array."""

    action_space, observation_space = (gym.spaces.Box(-x, x, (1,), np.float32) for x in (2, 9))

    def reset(self, *, seed=None, options=None):
        self.obs = np.zeros(1, np.float32)
        return self.obs, {}

    def step(self, action):
        self.obs += 1
        return self.obs, 2 * float(action[0]), bool(self.obs == 5), False, {"success": bool(self.obs == 2)}


def test_what_plans_see_execute_and_earn(monkeypatch):
    """The first T_o - 1 actions of a plan are past; an episode's end ends the plan. Observations before the first are
    the first again, and a new episode sees nothing of the last one. Actions in [-1, 1] are stretched to the bounds.
    Evaluation has no floor where scale is 0. The five actions of plan n are here n/100, n/100 + 0.1, ..."""
    args = dppo.Args(**SIZES | dict(horizon=5, n_obs_steps=2, n_action_steps=3, num_envs=2, num_steps=3))
    agent, given = dppo.Agent(2, 1, args), []
    plan = lambda obs: (len(given) / 100 + torch.arange(5.0) / 10).expand(len(obs), 2, 5)  # noqa: E731
    monkeypatch.setattr(agent, "sample", lambda *x: given.append((x[0].tolist(), x[1])) or plan(x[0]))
    envs, obs = make_vector(lambda: dppo.Plans(Count(), args), args, 0)
    batch, obs, episodes = dppo.collect(agent, envs, obs, torch.Generator(), dppo.Statistics(2, 0.9, False), args)
    assert batch.obs[:, 1].tolist() == [[0, 0], [2, 3], [0, 0]] and obs[1].tolist() == [2, 3]
    assert batch.next_obs[:, 0].tolist() == [[2, 3], [4, 5], [2, 3]] and episodes[1] == (pytest.approx(4 * 0.97), 2)
    assert batch.terminated[:, 0].tolist() == [False, True, False] and not batch.truncated.any()
    close(batch.rewards[:, 0] + batch.chains[:, 0, 1, 0], [4 * 0.63 + 0.01, 4 * 0.34 + 0.02, 4 * 0.69 + 0.03], 1e-6)
    assert [seen for seen, _ in given] == batch.obs.tolist() and {std for _, std in given} == {0.15}
    (env := dppo.Plans(Count(), args)).reset()
    assert [env.step(np.zeros((3, 1)))[4]["success"] for _ in range(2)] == [1, 0]
    inputs = np.ones((2, 4), np.float32), torch.tensor([[0.0], [1.0]]), torch.Generator()
    close(dppo.act_in_evaluation(agent, *inputs)[:, 1, 0], [0.24] * 2, 1e-6)
    close(given[-1][1], [[0.0], [0.15]], 1e-6)
    ours, theirs, rows = dppo.Statistics(2, 0.9, True), ppo.Statistics(1, 2, 0.9, True), np.random.default_rng(0)
    for reward, done in zip(rows.normal(5, 1, (9, 2)), rows.random((9, 2)) < 0.3):
        close(ours.reward(reward, done), theirs.reward(reward, done))


def test_a_run_begins_with_the_averaged_denoiser_of_another(tmp_path, monkeypatch, capsys):
    """Of Pendulum, and with its sizes. Only the copy that learns moves. A resumed run does not need the other any more.
    What does not fit is said before anything is written."""
    how, ours = (*SMALL["diffusion_policy"], "--dataset", pendulum(tmp_path / "d.hdf5")), SMALL["dppo"][:-10]
    start, before, update = new_run(diffusion_policy, tmp_path, *how), [], dppo.update
    monkeypatch.setattr(dppo, "update", lambda agent, *x: before.append(named(agent)) or update(agent, *x))
    run = new_run(dppo, tmp_path / "runs", *ours, "--init", start)
    close([row["learning_rate"] for row in metrics(run)], [0.001 * (1 - i / 5) for i in range(5)])
    command_line(dppo, "--resume", run, "--total-timesteps", 192, "--init", "gone")
    theirs, now = (checkpoint(folder)["agent"] for folder in (start, run))
    for name in [name.removeprefix("average") for name in theirs if name.startswith("average")]:
        average = theirs[f"average{name}"]
        same = before[0][f"actor{name}"], before[0][f"start{name}"], now[f"start{name}"]
        assert all(torch.equal(weight, average) for weight in same)
        assert not torch.equal(now[f"actor{name}"], average) and not torch.equal(theirs[f"actor{name}"], average)
    wrong = {"nowhere is not": ["nowhere"], "a run of dppo.py, not of diffusion_policy.py": [run],
             "other observations": [start, "--env-id", "MountainCarContinuous-v0"], "has 4": [start, "--horizon", 9],
             "has 3": [start, "--diffusion-steps", 9], "has no model": [start]}  # fmt: skip
    for words, args in wrong.items():
        if "model" in words:
            (start / "model/model.safetensors").unlink()
        with user_error(capsys, words):
            command_line(dppo, *ours, "--output-dir", tmp_path / "no", "--init", *args)
    assert not (tmp_path / "no").exists()
