r"""Diffusion Policy Policy Optimization (DPPO): PPO improves a policy that denoises plans of actions.

Ren et al. 2024, "Diffusion Policy Policy Optimization" (arXiv 2409.00588).

Parent: ppo.py. The policy is the denoiser of a diffusion_policy.py run, and the ratio is that of a denoising step.

The density of a plan is not known, but that of each denoising step is: it is a Gaussian. So the last K' steps are the
actions of PPO, and each has the advantage of its plan. Maximises

    J(theta) = E { 1/K' sum_k min[ rho_k A_k, clip(rho_k, 1 - eps, 1 + eps) A_k ] - c_vf (V(s_t) - R_t)^2 / 2 }

    rho_k   = pi_theta(x_k-1 | x_k, s_t) / pi_old(x_k-1 | x_k, s_t)     of denoising step k = K' .. 1
    pi_theta  N(mean, max(std, sigma_min)^2), mean and std of DDPM's step; x_0 is the plan
    A_k     = gamma_d^(k - 1) A_t     A_t: as in ppo.py, of plan t, whose reward is the sum over its executed actions
    s_t     the last T_o observations (--n-obs-steps) when plan t is made; V sees nothing of the denoising
    K, K'   --diffusion-steps, --num-finetuned-steps; the steps before the last K' stay as in the run that --init names
    gamma_d, sigma_min   --gamma-denoising, --min-std
    eps, c_vf, V, R_t    as in ppo.py

Run
    python algos/dppo.py --init RUN                             a finished run of diffusion_policy.py
    python algos/dppo.py                                        from untrained plans: a way around a wall
    python algos/dppo.py --evaluate RUN --eval-episodes 100     scores a saved agent
    RUN: python algos/diffusion_policy.py --dataset algos/environments/detour.hdf5 --diffusion-steps 20 --max-steps 600

Expect
    Of the walks around a wall 0.41 +- 0.05 arrive by a diffusion_policy.py run of 600 updates, and 0.97 +- 0.02 after
    100,000 steps of this script, in 15 to 30 seconds. Where only the last of the 20 denoising steps learns it is
    0.51 +- 0.09, from untrained plans (the default run) 0.49 +- 0.13, and by ppo.py, one action at a time, 0.29 +- 0.10
    (5 seeds; benchmarks/effects.py, dppo-detour). No task of the paper was run.

Metrics
    return, length      of the training episodes that ended; length counts plans. Absent if none did
    eval/return         plans with DDPM's own deviations; eval/return_stochastic: with sigma_min, as in training.
                        A video has one frame per plan
    explained_variance, approx_kl, clip_fraction: as in ppo.py, of denoising steps

Differences
    - Log-densities are sums over the whole plan. The authors' code (cc7234a) takes means over the executed actions, and
      clamps each number's to [-5, 2]. So their clip is smaller: 0.01 for Hopper's plans of 12 numbers; ours is 0.2.
      Their clip can shrink towards the noise.
    - They clip the noise of sampling at 3, but not the density. We do not clip it.
    - Their advantages run on over a time limit into the next episode. Their clip is NaN where K' is 1.
    - A minibatch holds whole plans, theirs single denoising steps. One learning rate; in Gym they have 1e-4 for the
      denoiser and 1e-3 for V. Their code can also add a loss that imitates the start, clip advantages, and
      sample by DDIM.
    - V sees observations as they are; theirs are scaled by the data. Adam, gradient clip and annealing are ppo.py's.
"""

import copy
import math
import sys
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributions import Normal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.control import (
    EnvArgs,
    episode_columns,
    evaluate,
    is_bounded,
    make_env,
    make_vector,
    number,
    score_saved,
    step_vector,
    to_env,
    try_out,
)
from utils.core import Run, UserError, main, prepare, preset, saved_args

NAME, TITLE = "dppo", "DPPO"
PRESETS = {  # for arguments left at None: without --init; with it they are the run's
    "untrained plans": dict(env_id="algos.environments.detour:Detour-v0", diffusion_steps=20, horizon=16, n_obs_steps=2,
                            n_action_steps=8, denoiser_size=256),
}  # fmt: skip
CLIP_NORMALIZED = 10.0  # bounds of normalised rewards, as in baselines


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, evaluate, capture_video (EnvArgs)
    limits = EnvArgs.limits | dict.fromkeys(("diffusion_steps", "n_obs_steps", "n_action_steps"), (1, math.inf))
    limits |= {"gamma_denoising": (0, 1)}
    init: str = ""
    """folder of a finished run of diffusion_policy.py, whose plans are improved; empty: from untrained plans"""
    env_id: str | None = None
    """a Gymnasium environment, or MODULE:NAME of one that MODULE registers; None: the run's, or a way around a wall"""
    diffusion_steps: int | None = None
    """denoising steps from noise to a plan: K; None: the run's, or 20"""
    num_finetuned_steps: int | None = None
    """the last denoising steps, which learn: K'; None: 10, or all where there are fewer"""
    horizon: int | None = None
    """actions of a plan, of which the first n_obs_steps - 1 are past: H; None: the run's, or 16"""
    n_obs_steps: int | None = None
    """observations that a plan is made from, the newest last: T_o; None: the run's, or 2"""
    n_action_steps: int | None = None
    """actions that are executed before the next plan: T_a; None: the run's, or 8"""
    denoiser_size: int | None = None
    """units of the two hidden layers of the denoiser; None: the run's, or 256"""
    min_std: float = 0.1
    """a denoising step has at least this standard deviation: sigma_min"""
    gamma_denoising: float = 0.99
    """discount of the advantage for each denoising step before the last: gamma_d"""
    total_timesteps: int = 100_000
    """environment steps, over all environments"""
    num_envs: int = 32
    """environments that are stepped together: N"""
    num_steps: int = 8
    """plans of each environment between updates: T"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: float = 1e-3
    """learning rate of Adam, at the start"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0"""
    gamma: float = 0.99
    """discount, once a plan"""
    gae_lambda: float = 0.95
    """lambda of the advantages"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 5
    """epochs over each rollout"""
    clip_coef: float = 0.2
    """clip of the ratio: epsilon"""
    clip_vloss: bool = False
    """clip the change of the value by clip_coef, too"""
    vf_coef: float = 0.5
    """weight of the value loss: c_vf"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""
    target_kl: float | None = None
    """end the epochs of a rollout when approx_kl exceeds this"""
    scale_rewards: bool = True
    """divide rewards by the running standard deviation of returns"""
    normalize_advantages: bool = True
    """normalise advantages in every minibatch"""
    hidden_size: int = 64
    """units of the two hidden layers of the value network"""
    threads: int = 1
    """CPU threads: a second makes networks this small a tenth faster; 0: OMP_NUM_THREADS where set, else two"""
    eval_episodes: int = 100
    """evaluation episodes, once with DDPM's own deviations and once with sigma_min; 0: no evaluation"""
    save_every: int = 20_000
    """environment steps between checkpoints"""


class Plans(gym.Wrapper):
    """An environment whose action is T_a actions (T_a, A) in [-1, 1], executed until the episode ends. It observes the
    last T_o observations, the oldest first; in an episode's first steps its first one is repeated."""

    def __init__(self, env: gym.Env, args: Args):
        super().__init__(env)
        if not is_bounded(env.action_space):
            wanted = "a Box of floats with finite bounds"
            raise UserError(f"--env-id {args.env_id} has the action space {env.action_space}: {TITLE} needs {wanted}")
        size, self.past = args.n_obs_steps * env.observation_space.shape[0], deque(maxlen=args.n_obs_steps)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = gym.spaces.Box(-1, 1, (args.n_action_steps, math.prod(env.action_space.shape)), np.float32)

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        self.past.extend([obs.copy()] * self.past.maxlen)
        return np.concatenate(self.past, dtype=np.float32), info

    def step(self, actions: np.ndarray):
        """Rewards are summed without a discount. A success in any step counts."""
        total, success = 0.0, {}
        for action in to_env(actions, self.env.action_space):
            obs, reward, terminated, truncated, info = self.env.step(action)
            self.past.append(obs.copy())
            total += float(reward)
            for name in {"success", "is_success"} & info.keys():
                success[name] = np.fmax(number(info[name]), success.get(name, np.nan))
            if terminated or truncated:
                break
        return np.concatenate(self.past, dtype=np.float32), total, terminated, truncated, info | success


def alpha_bars(steps: int) -> Tensor:
    """(K + 1,): abar_0 = 1 .. abar_K, the squared-cosine schedule of Nichol and Dhariwal 2021 (equation 17)."""
    cosines = np.cos((np.arange(steps + 1) / steps + 0.008) / 1.008 * np.pi / 2) ** 2
    kept = (cosines[1:] / cosines[:-1]).clip(min=0.001)  # the last would be 0: no plan is found in pure noise
    return torch.tensor([1.0, *np.cumprod(kept).tolist()])


class Denoiser(nn.Module):
    """As Actor in diffusion_policy.py."""

    alpha_bar: Tensor

    def __init__(self, obs_size: int, size: int, args: Args):
        super().__init__()
        hidden, self.steps = args.denoiser_size, args.diffusion_steps
        layers = [nn.Linear(obs_size + size + 1, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, size)]
        orthogonal(layers, [2**0.5] * 3)
        self.net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        self.register_buffer("alpha_bar", alpha_bars(self.steps), persistent=False)

    def forward(self, obs: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (..., H A) and standard deviation (..., 1) of DDPM's x_k-1, given x_k = x. k (..., 1): 1 to K. At k = 1
        the deviation is 0."""
        now, before = self.alpha_bar[k], self.alpha_bar[k - 1]
        beta = 1 - now / before
        noise = self.net(torch.cat([obs, x, k / self.steps], -1))
        # clipped: where abar_k is small, the division magnifies errors
        plan = ((x - (1 - now).sqrt() * noise) / now.sqrt()).clamp(-1, 1)
        mean = (before.sqrt() * beta * plan + (1 - beta).sqrt() * (1 - before) * x) / (1 - now)
        return mean, (beta * (1 - before) / (1 - now)).sqrt()


class Agent(nn.Module):
    """What is saved: `actor` makes the last K' denoising steps and learns, `start` makes those before."""

    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        self.horizon, self.size = args.horizon, args.horizon * action_size
        self.learned, self.min_std = args.num_finetuned_steps, args.min_std
        self.executed = slice(args.n_obs_steps - 1, args.n_obs_steps - 1 + args.n_action_steps)
        self.actor = Denoiser(obs_size, self.size, args)
        self.start = copy.deepcopy(self.actor).requires_grad_(False)
        self.critic = network(obs_size, args.hidden_size, 1, 1.0)

    def value(self, obs: Tensor) -> Tensor:
        """(..., T_o D) -> (...)"""
        return self.critic(obs)[..., 0]

    def sample(self, obs: Tensor, min_std: Tensor | float, generator: torch.Generator) -> Tensor:
        """Chains (N, K' + 1, H A): x_K' .. x_0, of observations (N, T_o D)."""
        x = torch.randn(len(obs), self.size, generator=generator, device=obs.device)
        chain = [x]
        for k in range(self.actor.steps, 0, -1):
            denoiser = self.actor if k <= self.learned else self.start
            mean, std = denoiser(obs, x, torch.full((len(obs), 1), k, device=obs.device))
            x = mean + std.clamp(min=min_std) * torch.randn(x.shape, generator=generator, device=obs.device)
            chain.append(x)
        return torch.stack(chain[-self.learned - 1 :], 1)

    def log_prob(self, obs: Tensor, chains: Tensor) -> Tensor:
        """Log-densities (..., K') of the steps of chains (..., K' + 1, H A), the noisiest first."""
        k = torch.arange(self.learned, 0, -1, device=obs.device).expand(*chains.shape[:-2], -1)[..., None]
        obs = obs[..., None, :].expand(*k.shape[:-1], -1)
        mean, std = self.actor(obs, chains[..., :-1, :], k)
        return Normal(mean, std.clamp(min=self.min_std)).log_prob(chains[..., 1:, :]).sum(-1)

    def to_env(self, chains: Tensor) -> np.ndarray:
        """The actions (N, T_a, A) of the plans x_0 that are executed. `Plans` clips them."""
        return chains[:, -1].unflatten(1, (self.horizon, -1)).cpu().numpy()[:, self.executed]


def orthogonal(layers: list, gains: list[float]) -> None:
    for layer, gain in zip(layers, gains):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)


def network(size_in: int, hidden_size: int, size_out: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(size_in, hidden_size), nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, size_out)]
    orthogonal(layers, [2**0.5, 2**0.5, gain])
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class RunningMeanStd:
    """Mean and (population) variance over all rows seen so far, in float64 (Chan et al. 1979, parallel variance). The
    first rows weigh as if 1e-4 rows of mean 0 and variance 1 had come before, as in OpenAI's baselines."""

    def __init__(self, shape: tuple[int, ...] = ()):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, batch: np.ndarray) -> None:
        """batch: (rows, *shape)."""
        rows = len(batch)
        mean = np.add.reduce(batch, 0, dtype=np.float64) / rows
        deviations = batch - mean
        squares, delta, total = np.add.reduce(deviations * deviations, 0), mean - self.mean, self.count + rows
        self.var = (self.var * self.count + squares + delta * delta * (self.count * rows / total)) / total
        self.mean = self.mean + delta * (rows / total)
        self.count = total

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mean, self.var, self.count = state["mean"].numpy(), state["var"].numpy(), state["count"].item()


class Statistics:
    """Running statistics of discounted returns, one set for all environments. Without --scale-rewards they change
    nothing."""

    def __init__(self, num_envs: int, gamma: float, enabled: bool):
        self.returns = RunningMeanStd()
        self.enabled, self.gamma, self.discounted = enabled, gamma, np.zeros(num_envs)

    def reward(self, rewards: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Counts rewards (N,) and divides them by the standard deviation of the discounted return so far."""
        if not self.enabled:
            return rewards
        self.discounted = self.discounted * self.gamma + rewards
        self.returns.update(self.discounted)
        self.discounted = self.discounted * ~done
        return np.clip(rewards / np.sqrt(self.returns.var + 1e-8), -CLIP_NORMALIZED, CLIP_NORMALIZED)

    def state_dict(self) -> dict:
        """Without the discounted returns so far: a resumed run begins new episodes."""
        return {"returns": self.returns.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.returns.load_state_dict(state["returns"])


class Batch(NamedTuple):
    """What one iteration learns from: T plans of N environments."""

    obs: Tensor  # (T, N, T_o D)
    chains: Tensor  # (T, N, K' + 1, H A): x_K' .. x_0
    rewards: Tensor  # (T, N) float32: sums over the executed actions, scaled
    next_obs: Tensor  # like obs: what the plan led to, before any reset
    terminated: Tensor  # (T, N) bool
    truncated: Tensor  # (T, N) bool


def gae(rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, gamma: float,
        gae_lambda: float) -> Tensor:  # fmt: skip
    """Generalised advantages (arXiv 1506.02438, equation 16), all (T, N). Termination ends the bootstrap from
    `next_values`, truncation does not; the recursion ends at both, because the next row is another episode."""
    deltas = rewards + gamma * next_values * ~terminated - values
    decay = gamma * gae_lambda * (~done).to(deltas)
    advantages, last = torch.empty_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = last = deltas[t] + decay[t] * last
    return advantages


def dppo_loss(agent: Agent, args: Args, obs: Tensor, chains: Tensor, old_logps: Tensor, advantages: Tensor,
              returns: Tensor, old_values: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss of one minibatch of plans, to be minimised, and (approx_kl, clip_fraction). obs (B, T_o D), chains
    (B, K' + 1, H A), old_logps (B, K'), the others (B,)."""
    logps, values = agent.log_prob(obs, chains), agent.value(obs)
    log_ratio = logps - old_logps
    ratio = log_ratio.exp()
    if args.normalize_advantages:  # per minibatch, before the discount, as in the authors' code
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    later = torch.arange(agent.learned - 1, -1, -1, device=obs.device)  # denoising steps that follow
    advantages = advantages[:, None] * args.gamma_denoising**later
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    errors = (values - returns) ** 2
    if args.clip_vloss:  # as baselines; arXiv 2006.05990 found that it hurts
        near = old_values + (values - old_values).clamp(-args.clip_coef, args.clip_coef)
        errors = torch.max(errors, (near - returns) ** 2)
    loss = policy_loss + args.vf_coef * 0.5 * errors.mean()
    with torch.no_grad():
        outside = ((ratio - 1).abs() > args.clip_coef).float()
        metrics = torch.stack([(ratio - 1 - log_ratio).mean(), outside.mean()])
    return loss, metrics


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Batch, generator: torch.Generator,
           args: Args) -> dict[str, float]:  # fmt: skip
    """`update_epochs` passes over one rollout in minibatches. Returns metrics."""
    with torch.no_grad():  # of the whole rollout at once, before the first epoch
        old_logps, values = agent.log_prob(batch.obs, batch.chains), agent.value(batch.obs)
        next_values = agent.value(batch.next_obs)  # truncated episodes, too; CleanRL treats truncation as termination
        done = batch.terminated | batch.truncated
        advantages = gae(batch.rewards, values, next_values, batch.terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + values
    rows = [x.flatten(0, 1) for x in (batch.obs, batch.chains, old_logps, advantages, returns, values)]
    norms, epochs = [], 0
    while epochs < args.update_epochs:
        epochs += 1
        order, metrics = torch.randperm(len(rows[0]), generator=generator, device=rows[0].device), []
        for minibatch in zip(*(x[order].tensor_split(args.num_minibatches) for x in rows)):
            loss, numbers = dppo_loss(agent, args, *minibatch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm))
            optimizer.step()
            metrics.append(numbers)
        approx_kl, clip_fraction = torch.stack(metrics).mean(0).tolist()
        if args.target_kl is not None and approx_kl > args.target_kl:
            break  # SB3 stops between minibatches, at 1.5 times --target-kl
    *_, returns, values = rows
    unexplained = ((returns - values).var() / returns.var().clamp(min=1e-12)).item()
    return {"explained_variance": 1 - unexplained, "approx_kl": approx_kl, "clip_fraction": clip_fraction,
            "grad_norm": torch.stack(norms).mean().item(), "epochs": epochs}  # fmt: skip


@torch.no_grad()
def collect(agent: Agent, envs, obs: np.ndarray, generator: torch.Generator, statistics: Statistics,
            args: Args) -> tuple[Batch, np.ndarray, list]:  # fmt: skip
    """T plans of N environments from observations `obs` (N, T_o D).

    Returns a Batch, the observations to go on from, and (return, length) of the episodes that ended.
    """
    device, shape = generator.device, (args.num_steps, args.num_envs)
    chains, episodes = [], []
    seen, next_obs = (np.empty((args.num_steps, *obs.shape), obs.dtype) for _ in range(2))
    rewards, (terminated, truncated) = np.empty(shape, np.float32), np.empty((2, *shape), bool)
    for t in range(args.num_steps):
        seen[t] = obs
        chains.append(agent.sample(torch.from_numpy(seen[t]).to(device), args.min_std, generator))
        obs, next_obs[t], reward, terminated[t], truncated[t], ended = step_vector(envs, agent.to_env(chains[t]))
        rewards[t] = statistics.reward(reward, terminated[t] | truncated[t])
        episodes += ended
    arrays = (seen, rewards, next_obs, terminated, truncated)
    seen, *others = (torch.from_numpy(array).to(device) for array in arrays)
    return Batch(seen, torch.stack(chains), *others), obs, episodes


def take_over(args: Args) -> dict[str, Tensor]:
    """The averaged denoiser of the run --init, whose settings fill in what `args` leave at None. Raises UserError where
    there is no finished run of diffusion_policy.py, or `args` ask for another denoiser."""
    saved, path = saved_args(args.init, "diffusion_policy"), Path(args.init) / "model" / "model.safetensors"
    if not path.is_file():
        raise UserError(f"--init {args.init} has no model: give a run of diffusion_policy.py that is finished")
    saved |= {"denoiser_size": saved["hidden_size"]}
    args.env_kwargs = args.env_kwargs or (() if args.env_id else saved["env_kwargs"])
    preset(args, {"the run": {name: saved[name] for name in PRESETS["untrained plans"]}}, "the run")
    for name in ("diffusion_steps", "horizon", "n_obs_steps", "denoiser_size"):
        if (asked := vars(args)[name]) != saved[name]:
            raise UserError(f"--{name.replace('_', '-')} {asked}: the run --init {args.init} has {saved[name]}")
    return {name[8:]: weight for name, weight in load_file(path).items() if name.startswith("average.")}


def check(args: Args) -> None:
    """Raises UserError for impossible settings."""
    if not 1 <= args.num_finetuned_steps <= args.diffusion_steps:
        bounds = f"1 to --diffusion-steps {args.diffusion_steps}"
        raise UserError(f"--num-finetuned-steps {args.num_finetuned_steps}: it must be from {bounds}")
    if args.min_std <= 0:  # the last step has no deviation of its own
        raise UserError(f"--min-std {args.min_std}: it must be above 0")
    if args.horizon < (least := args.n_obs_steps + args.n_action_steps - 1):
        raise UserError(f"--horizon {args.horizon} is below --n-obs-steps + --n-action-steps - 1 = {least}")
    rows = args.num_envs * args.num_steps
    if rows % args.num_minibatches or rows // args.num_minibatches < 2:
        parts = f"the {rows} rows of a rollout (num_envs * num_steps) into parts of at least 2"
        raise UserError(f"--num-minibatches {args.num_minibatches} must divide {parts}")
    if args.total_timesteps < (steps := rows * args.n_action_steps):
        raise UserError(f"--total-timesteps {args.total_timesteps} is less than one rollout of {steps} steps")


@torch.no_grad()
def act_in_evaluation(agent: Agent, obs: np.ndarray, scale: Tensor, generator: torch.Generator) -> np.ndarray:
    """What `evaluate` calls: actions (N, T_a, A) of observations (N, T_o D). Where `scale` is 0, the denoising steps
    keep DDPM's own deviations."""
    return agent.to_env(agent.sample(torch.from_numpy(obs).to(generator.device), scale * agent.min_std, generator))


def train(args: Args) -> list[dict]:
    device, make = prepare(args), lambda: Plans(make_env(args), args)
    start = take_over(args) if args.init and not (args.resume or args.evaluate) else {}
    settings = preset(args, PRESETS, "untrained plans")
    if args.num_finetuned_steps is None:
        args.num_finetuned_steps = min(10, args.diffusion_steps)
    check(args)
    env, eval_envs = try_out(make, args)
    agent = Agent(env.observation_space.shape[0], env.action_space.shape[1], args).to(device)
    score_agent = partial(evaluate, eval_envs, partial(act_in_evaluation, agent), args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    if start:
        wanted = {name: w.shape for name, w in agent.actor.state_dict().items()}
        if wanted != {name: w.shape for name, w in start.items()}:
            raise UserError(f"--init {args.init} has other observations or actions than --env-id {args.env_id}")
        agent.actor.load_state_dict(start)
        agent.start.load_state_dict(start)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    rollout = args.num_envs * args.num_steps * args.n_action_steps
    run = Run(args, NAME, args.env_id, args.total_timesteps // rollout * rollout, ("return", "eval/return"))
    run.print(settings)
    envs, obs = make_vector(make, args, run.step)
    statistics = Statistics(args.num_envs, args.gamma, args.scale_rewards)
    parts = dict(agent=agent, optimizer=optimizer, statistics=statistics, generator=generator)
    run.restore(**parts)
    step = run.step
    while step < run.total:
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / run.total)

        # collect
        batch, obs, episodes = collect(agent, envs, obs, generator, statistics, args)
        step += rollout

        # update
        columns = update(agent, optimizer, batch, generator, args) | episode_columns(episodes)
        columns |= {"learning_rate": optimizer.param_groups[0]["lr"], "time/steps_per_second": run.speed(step)}

        # evaluate
        if run.due(step, args.eval_every):
            columns |= score_agent()
        run.log(step, **columns)
        run.end_step(step, parts)

    envs.close()
    curves = {"return": ("return", "eval/return"), "explained variance": ("explained_variance",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train, NAME)
