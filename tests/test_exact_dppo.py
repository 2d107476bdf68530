"""dppo.py: densities of chains from the noise that made them, one denoising step against ppo.py, whole updates by a
second implementation, and what plans see, execute and earn. The authors' formulas: test_parity_dppo.py."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import checkpoint, close, float64, mlp, named, randomise
from helpers import SMALL, command_line, new_run, user_error
from small_data import pendulum
from test_exact_diffusion_policy import shares
from test_exact_ppo import own_advantages
from torch.distributions import Normal

from algos import diffusion_policy, dppo, ppo
from utils.control import make_vector

D, A, H, K, LEARNED, T, N = 3, 2, 3, 4, 3, 4, 6
SIZES = dict(horizon=H, n_obs_steps=1, n_action_steps=2, diffusion_steps=K, num_finetuned_steps=LEARNED,
             denoiser_size=8, hidden_size=8)  # fmt: skip


def settings(**changes) -> dppo.Args:
    return dppo.Args(**SIZES | dict(min_std=0.15, num_minibatches=1, update_epochs=1, max_grad_norm=1e9) | changes)


def make_agent(args, seed: int = 0) -> dppo.Agent:
    """In which the steps before the last K' are another's."""
    agent = randomise(dppo.Agent(D, A, args), seed, 0.3, 0.1)
    randomise(agent.start, seed + 1, 0.3, 0.1)
    return agent


def own_step(p: dict, part: str, obs, x, k: int, steps: int = K) -> tuple[torch.Tensor, float]:
    """Bayes' rule: x_k-1 has a prior around the predicted plan and is seen through x_k; the precisions add up."""
    now, before = shares(steps)[k], shares(steps)[k - 1]
    noise = mlp(p, f"{part}.net", torch.cat([obs, x, torch.full((*x.shape[:-1], 1), k / steps)], -1))
    plan = ((x - (1 - now) ** 0.5 * noise) / now**0.5).clip(-1, 1)
    if k == 1:
        return plan, 0.0
    kept = now / before
    variance = 1 / (1 / (1 - before) + kept / (1 - kept))
    return variance * (before**0.5 * plan / (1 - before) + kept**0.5 * x / (1 - kept)), variance.item() ** 0.5


def own_values(p: dict, obs) -> torch.Tensor:
    for layer in 0, 2, 4:
        obs = obs @ p[f"critic.{layer}.weight"].T + p[f"critic.{layer}.bias"]
        obs = obs.tanh() if layer < 4 else obs
    return obs[..., 0]


def own_logps(p: dict, obs, chains, min_std: float) -> torch.Tensor:
    """(..., K')"""
    found = []
    for i, k in enumerate(range(LEARNED, 0, -1)):
        mean, std = own_step(p, "actor", obs, chains[..., i, :], k)
        std, errors = max(std, min_std), chains[..., i + 1, :] - mean
        found.append((-(errors**2) / (2 * std**2) - np.log(std * (2 * np.pi) ** 0.5)).sum(-1))
    return torch.stack(found, -1)


@float64()
@pytest.mark.parametrize("min_std", [0.01, 0.15, 0.5])
def test_chains_and_their_densities_come_from_the_noise(min_std):
    """The chain is the second implementation's of the same noise; its log-densities, computed anew, are those of the
    noise: so the first ratio is 1. K' steps are kept, those before are the start's. The floor is in both."""
    args = settings(min_std=min_std)
    agent, obs = make_agent(args), torch.randn(N, D, generator=torch.Generator().manual_seed(1))
    chains = agent.sample(obs, min_std, torch.Generator().manual_seed(2))
    p, twin, logps = named(agent), torch.Generator().manual_seed(2), []
    x = torch.randn(N, H * A, generator=twin)
    kept = [x]
    for k in range(K, 0, -1):
        mean, std = own_step(p, "actor" if k <= LEARNED else "start", obs, x, k)
        noise, std = torch.randn(N, H * A, generator=twin), max(std, min_std)
        x = mean + std * noise
        kept.append(x)
        logps.append((-(noise**2) / 2 - np.log(std * (2 * np.pi) ** 0.5)).sum(-1))
    assert chains.shape == (N, LEARNED + 1, H * A)
    close(chains, torch.stack(kept[-LEARNED - 1 :], 1))
    close(agent.log_prob(obs, chains), torch.stack(logps[-LEARNED:], 1))


@float64()
def test_one_step_is_ppo_with_a_gaussian_of_a_fixed_deviation():
    args, rows = settings(diffusion_steps=1, num_finetuned_steps=1, clip_coef=0.1), torch.Generator().manual_seed(0)
    agent, old = make_agent(args), make_agent(args)
    randomise(agent.actor, 5, 0.3, 0.1)
    obs = torch.randn(N, D, generator=rows)
    chains = old.sample(obs, args.min_std, rows).detach()
    others = old.log_prob(obs, chains)[:, 0].detach(), *torch.randn(3, N, generator=rows)

    def gaussian(obs, actions):
        mean = own_step(named(agent), "actor", obs, chains[:, 0], 1, 1)[0]
        return Normal(mean, args.min_std).log_prob(actions).sum(-1), torch.zeros(N), agent.value(obs)

    theirs = ppo.ppo_loss(gaussian, obs, chains[:, 1], *others, ppo.Args(clip_coef=0.1, vf_coef=args.vf_coef))
    ours = dppo.dppo_loss(agent, obs, chains, others[0][:, None], *others[1:], args)
    close(ours[0], theirs[0])
    close(ours[1], theirs[1][:2])
    assert 0 < ours[1][1] < 1


@float64()
@pytest.mark.parametrize(
    "changes",
    [
        dict(update_epochs=3, gamma_denoising=0.6),
        dict(update_epochs=2, num_minibatches=3, gamma_denoising=1.0, clip_coef=0.05, gamma=0.7, gae_lambda=0.6),
        dict(update_epochs=2, normalize_advantages=False, max_grad_norm=1.0, clip_vloss=True, clip_coef=0.02),
        dict(update_epochs=9, target_kl=1e-6, vf_coef=0.8),
    ],
)
def test_update_equals_a_second_implementation(changes):
    """Weights after plain gradient descent over several epochs and minibatches of plans, and every metric."""
    args, rows, rate = settings(**changes), torch.Generator().manual_seed(3), 0.05
    agent = make_agent(args)
    obs, next_obs = torch.randn(2, T, N, D, generator=rows)
    chains = agent.sample(obs.flatten(0, 1), args.min_std, rows).detach().unflatten(0, (T, N))
    terminated, truncated = torch.rand(2, T, N, generator=rows) < 0.2
    batch = dppo.Batch(obs, chains, torch.randn(T, N, generator=rows), next_obs, terminated, truncated)
    p, norms, kls = named(agent), [], []
    learned = [name for name in p if not name.startswith("start")]
    optimizer, twin = torch.optim.SGD(agent.parameters(), rate), torch.Generator().manual_seed(4)
    numbers = dppo.update(agent, optimizer, batch, torch.Generator().manual_seed(4), args)
    with torch.no_grad():
        values, old = own_values(p, obs), own_logps(p, obs, chains, args.min_std).flatten(0, 1)
        inputs = batch.rewards, values, own_values(p, next_obs), terminated, truncated
    advantages = torch.tensor(own_advantages(*(x.numpy() for x in inputs), args.gamma, args.gae_lambda)).flatten()
    returns, values, eps = advantages + values.flatten(), values.flatten(), args.clip_coef
    obs, chains = obs.flatten(0, 1), chains.flatten(0, 1)
    for epoch in range(args.update_epochs):
        parts = torch.randperm(T * N, generator=twin).split(T * N // args.num_minibatches)
        found = []
        for i in parts:
            ratio = (own_logps(p, obs[i], chains[i], args.min_std) - old[i]).exp()
            a = advantages[i]
            a = (a - a.mean()) / (a.std() + 1e-8) if args.normalize_advantages else a
            a = torch.stack([a * args.gamma_denoising ** (k - 1) for k in range(LEARNED, 0, -1)], 1)
            gain = torch.minimum(ratio * a, ratio.clip(1 - eps, 1 + eps) * a)
            now = own_values(p, obs[i])
            errors = (now - returns[i]) ** 2
            if args.clip_vloss:
                near = values[i] + (now - values[i]).clip(-eps, eps)
                errors = torch.maximum(errors, (near - returns[i]) ** 2)
            loss = -gain.sum() / LEARNED / len(i) + args.vf_coef / 2 * errors.sum() / len(i)
            gradients = torch.autograd.grad(loss, [p[name] for name in learned])
            norms.append(sum((g**2).sum() for g in gradients).item() ** 0.5)
            shrink = min(1, args.max_grad_norm / (norms[-1] + 1e-6))
            for name, g in zip(learned, gradients):
                p[name] = (p[name] - rate * shrink * g).detach().requires_grad_()
            ratio = ratio.detach()
            found.append([(ratio - 1 - ratio.log()).mean().item(), ((ratio - 1).abs() > eps).double().mean().item()])
        kls, epochs = np.mean(found, 0), epoch + 1
        if args.target_kl and kls[0] > args.target_kl:
            break
    for name, tensor in agent.state_dict().items():
        close(tensor, p[name], 1e-9)
    unexplained = (returns - values).var() / returns.var()
    expected = dict(explained_variance=1 - unexplained, approx_kl=kls[0], clip_fraction=kls[1],
                    grad_norm=np.mean(norms), epochs=epochs)  # fmt: skip
    assert numbers == pytest.approx({name: float(value) for name, value in expected.items()}, abs=1e-7)
    assert (args.clip_coef > 0.1 or kls[1] > 0) and epochs == (args.update_epochs if not args.target_kl else 2)


class Count(gym.Env):
    """Observes how many steps were taken in this episode of five, and earns twice the action. In the second step there
    is a success. It writes into one array."""

    action_space = gym.spaces.Box(-2, 2, (1,), np.float32)
    observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.obs = np.zeros(1, np.float32)
        return self.obs, {}

    def step(self, action):
        self.obs += 1
        end, step = bool(self.obs == 5), int(self.obs[0])
        return self.obs, 2 * float(action[0]), end, False, {"is_success": step == 2, "step": step}


class Planner:
    """The five actions of plan number n are n/100, n/100 + 0.1, ...; it notes what it was given."""

    learned, min_std = 1, 0.3
    to_env = dppo.Agent.to_env

    def __init__(self, args):
        self.given, self.horizon = [], args.horizon
        self.executed = dppo.Agent(1, 1, args).executed

    def sample(self, obs, min_std, generator):
        self.given.append((obs.tolist(), min_std))
        return (len(self.given) / 100 + torch.arange(5.0) / 10).expand(len(obs), 2, 5)


def test_what_plans_see_execute_and_earn():
    """The first T_o - 1 actions of a plan are past; an episode's end ends the plan. Observations before the first are
    the first again, and a new episode sees nothing of the last one. Actions in [-1, 1] are stretched to the bounds."""
    args = settings(horizon=5, n_obs_steps=2, n_action_steps=3, num_envs=2, num_steps=3, scale_rewards=False)
    agent, statistics = Planner(args), dppo.Statistics(2, 0.9, False)
    envs, obs = make_vector(lambda: dppo.Plans(Count(), args), args, 0)
    batch, obs, episodes = dppo.collect(agent, envs, obs, torch.Generator(), statistics, args)
    assert batch.obs[:, 1].tolist() == [[0, 0], [2, 3], [0, 0]] and obs[1].tolist() == [2, 3]
    assert batch.next_obs[:, 0].tolist() == [[2, 3], [4, 5], [2, 3]]
    assert batch.terminated.tolist() == [[False] * 2, [True] * 2, [False] * 2] and not batch.truncated.any()
    close(batch.rewards[:, 0], [4 * (0.11 + 0.21 + 0.31), 4 * (0.12 + 0.22), 4 * (0.13 + 0.23 + 0.33)], 1e-6)
    close(batch.chains[:, 0, 1, 0], [0.01, 0.02, 0.03], 1e-6)
    assert [given for given, _ in agent.given] == batch.obs.tolist() and {std for _, std in agent.given} == {0.15}
    assert len(episodes) == 2 and episodes[0] == (pytest.approx(4 * 0.97), 2)
    env = dppo.Plans(Count(), args)
    env.reset()
    *_, info = env.step(np.array([[0.5], [3.0], [-3.0]]))
    assert info == {"is_success": True, "step": 3}
    scaled = dppo.Statistics(2, 0.5, True)
    close(scaled.reward(np.ones(2), np.array([True, False])), [10, 10])  # no deviation so far
    expected = np.array([1, 1, 1, 1.5])
    close(scaled.reward(np.ones(2), np.zeros(2, bool)), np.ones(2) / np.sqrt(expected.var()), 0.01)


def test_evaluation_without_and_with_the_floor():
    agent = Planner(args := settings(horizon=5, n_obs_steps=2, n_action_steps=3))
    scale = torch.tensor([[0.0], [1.0]])
    actions = dppo.act_in_evaluation(agent, np.zeros((2, 2), np.float32), scale, torch.Generator())
    close(actions, [[[0.11], [0.21], [0.31]]] * 2, 1e-6)
    close(agent.given[0][1], [[0.0], [0.3]], 1e-6)
    real = make_agent(args := settings())
    obs = torch.zeros(4000, D)
    spread = [
        real.sample(obs, torch.full((4000, 1), floor), torch.Generator().manual_seed(0))[:, -2:] for floor in (0, 0.15)
    ]
    last = [(chain[:, 1] - own_step(named(real), "actor", obs, chain[:, 0], 1)[0]).std().item() for chain in spread]
    close(last, [0, args.min_std], 0.002)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A run of diffusion_policy.py on Pendulum."""
    folder = tmp_path_factory.mktemp("start")
    return new_run(diffusion_policy, folder, *SMALL["diffusion_policy"], "--dataset", pendulum(folder / "d.hdf5"))


OURS = SMALL["dppo"][: SMALL["dppo"].index("--diffusion-steps")]  # without what is the run's


def test_a_run_begins_with_the_averaged_denoiser_of_another(start, tmp_path, monkeypatch):
    """And with its environment, sizes and number of executed actions. Only the copy that learns moves."""
    before, update = [], dppo.update
    monkeypatch.setattr(dppo, "update", lambda agent, *x: before.append(named(agent)) or update(agent, *x))
    run = new_run(dppo, tmp_path, *OURS, "--init", start, "--num-finetuned-steps", 2)
    average, now = (checkpoint(folder)["agent"] for folder in (start, run))
    for name in [name for name in average if name.startswith("average")]:
        for part in "actor", "start":
            assert torch.equal(before[0][name.replace("average", part)], average[name])
        assert torch.equal(now[name.replace("average", "start")], average[name])
        assert not torch.equal(now[name.replace("average", "actor")], average[name])
        assert not torch.equal(average[name.replace("average", "actor")], average[name])
    command_line(dppo, "--resume", run, "--total-timesteps", 96, "--init", "gone")
    monkeypatch.undo()
    args = dppo.saved_args(str(run), "dppo")
    theirs = dppo.saved_args(str(start), "diffusion_policy")
    for name in "env_id", "env_kwargs", "diffusion_steps", "horizon", "n_obs_steps", "n_action_steps":
        assert args[name] == theirs[name]
    assert args["denoiser_size"] == theirs["hidden_size"]


def test_a_run_to_begin_with_must_fit(start, tmp_path, capsys):
    ppo_run = new_run(ppo, tmp_path / "ppo", *SMALL["ppo"])
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text((start / "config.json").read_text())
    wrong = {
        "nowhere": ("nowhere is not the folder of a run",), str(ppo_run): ("a run of ppo.py, not of diffusion_policy",),
        str(tmp_path / "half"): ("no model", "finished"),
    }  # fmt: skip
    flags = {"--horizon 9": ("--horizon 9", "has 4"), "--diffusion-steps 9": ("--diffusion-steps 9", "has 3"),
             "--env-id MountainCarContinuous-v0": ("other observations or actions",)}  # fmt: skip
    for folder, words in wrong.items():
        with user_error(capsys, "--init" * (folder == str(tmp_path / "half")), *words):
            command_line(dppo, *OURS, "--init", folder, "--output-dir", tmp_path / "runs")
    for more, words in flags.items():
        with user_error(capsys, *words):
            command_line(dppo, *OURS, "--init", start, *more.split(), "--output-dir", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
