r"""Proximal Policy Optimization (PPO).

Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv 1707.06347, equations 7 and 9), with generalised
advantages (arXiv 1506.02438, equation 16) and the details of OpenAI's baselines that make it work (Huang et al. 2022,
"The 37 Implementation Details of PPO").

The policy acts for T steps in N environments, then learns from them in several epochs of minibatches. A sample gets no
gradient once its ratio has moved past 1 +- eps in the direction in which it is pushed. Maximises

    J(theta) = E { min[ rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t ] + c_ent H_t - c_vf (V(s_t) - R_t)^2 / 2 }

    rho_t   = pi_theta(a_t | s_t) / pi_old(a_t | s_t)            probability ratio; pi_old drew the steps
    delta_t = r_t + gamma V(s'_t) (1 - terminated_t) - V(s_t)    r_t: reward; s'_t: true next observation, not a reset's
    A_t     = delta_t + gamma lambda (1 - done_t) A_t+1          done = terminated or truncated
    R_t     = A_t + V(s_t)                                       target of the critic
    H_t     = entropy of pi_theta(. | s_t)
    T, N, gamma, lambda   --num-steps, --num-envs, --gamma, --gae-lambda
    eps, c_ent, c_vf      --clip-coef, --ent-coef, --vf-coef

Run
    python algos/ppo.py                                                          CartPole-v1
    python algos/ppo.py --env-id Pendulum-v1 --num-envs 8 --num-steps 256 --learning-rate 1e-3 --gamma 0.9 \
        --total-timesteps 61440                                                  continuous actions, truncated episodes
    python algos/ppo.py --env-id HalfCheetah-v5 --threads 1                      the paper's recipe (table 3), annealed
    python algos/ppo.py --env-id HalfCheetah-v5 --threads 1 --num-steps 512 --num-minibatches 8 --update-epochs 20 \
        --gamma 0.98 --gae-lambda 0.92 --clip-coef 0.1 --learning-rate 2.0633e-5 --no-anneal-lr --log-std-init -2 \
        --hidden-size 256 --max-grad-norm 0.8 --vf-coef 0.58 --ent-coef 0.0004   a tuned recipe
    python algos/ppo.py --env-id package.module:Name-v0 --env-kwargs size=5      your own environment
    python algos/ppo.py --env-id Hopper-v5 --num-envs 8 --num-steps 256 --vector async
                                                                                 async: for steps slower than 1 ms
    python algos/ppo.py --vector native --num-envs 64 --num-steps 32             CartPole's own vector of environments
    python algos/ppo.py --evaluate RUN --eval-episodes 100 --capture-video       scores a saved agent

Expect
    CartPole-v1: 500, the maximum, from about 20,000 steps on, in less than 15 seconds on a CPU. With --total-timesteps
    24576 all of 30 seeds reach 475, and 27 end at 500.
    Pendulum-v1: from -1,200 to -240 (30 seeds, standard deviation 95), in about 10 seconds.
    Hopper-v5 and HalfCheetah-v5, 204,800 steps: 1,408 and 1,257 (8 seeds, standard deviations 745 and 643), in one to
    two minutes. Sampled actions get 1,084 and 875 (standard deviations 218 and 286).
    HalfCheetah-v5, 1M steps with CleanRL's settings (--clip-vloss), in 5 to 7 minutes: 2,260 over about the last 100
    episodes of training (10 seeds: eight at 1,514 to 2,328, and 3,787 and 4,174). CleanRL publishes 1,443 for v4. The
    likeliest actions get 2,492.
    Five MuJoCo tasks, 1M steps with these settings: an interquartile mean of 1.05 over 10 seeds of each (95 %:
    1.00 to 1.11), where random actions score 0 and the paper 1; benchmarks/README.md has each task.
    HalfCheetah-v5, 1M steps with the tuned recipe, in 21 to 37 minutes on one core: 5,108 (4,686, 5,452 and 5,185),
    4,237 with sampled actions. RL Baselines3 Zoo and Tianshou publish about 5,800, the latter +- 1,244 over ten seeds.

Metrics
    return, length      of the training episodes that ended in the iteration; absent if none did
    eval/return         mean over --eval-episodes, likeliest action; eval/return_stochastic: sampled actions
    eval/success        share of these episodes that reach a success; where the environment reports it
    explained_variance  of R_t by V(s_t); rises towards 1, below 0 is worse than a constant
    approx_kl           mean of rho - 1 - log rho in the last epoch; 0.001 to 0.03
    clip_fraction       share of samples outside the clip in the last epoch; 0.05 to 0.3
    entropy             nats; falls slowly
    grad_norm           before clipping, mean over the minibatches
    epochs              run in the iteration; fewer than --update-epochs if --target-kl stopped them

Differences
    - The tuned recipe is RL Baselines3 Zoo's with three changes: tanh for its ReLU, orthogonal weights for its
      ortho_init=False, and half the value loss, which SB3 does not halve.
    - Policy and value share no parameters, as in the paper for MuJoCo, in CleanRL and in SB3.
    - Not in the paper: advantages are normalised in each minibatch, gradients are clipped at a norm of 0.5, and the
      learning rate falls to 0 on all tasks, not on Atari alone. All three are in baselines and CleanRL.
    - Observations and rewards are normalised by running statistics. Baselines do so for MuJoCo only. Without it
      CartPole had not settled at 500 after 100,000 steps.
    - Images are bytes with three dimensions, channels first or last. They go through the convolutions of Mnih et al.
      2015 or, below 36 pixels, two small ones, which policy and value share. They are divided by 255, not normalised.
      All other observations are flattened.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.checkpoint import rng_state
from utils.cli import main, prepare, resolve
from utils.envs import (
    EnvArgs,
    Vector,
    episode_columns,
    make_env,
    make_vector,
    open_env,
    reset_vector,
    restore_vector,
    step_vector,
)
from utils.errors import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval, UserError
from utils.normalize import RunningMeanStd
from utils.rollouts import evaluate, score_saved
from utils.run import Run

NAME, TITLE = "ppo", "PPO"
PRESETS = {  # defaults that depend on the kind of actions and observations, for arguments left at None
    "discrete": dict(total_timesteps=100_000, num_envs=8, num_steps=128, learning_rate=1e-3, num_minibatches=4,
                     update_epochs=8, ent_coef=0.0, hidden_size=64),
    "continuous": dict(total_timesteps=1_000_000, num_envs=1, num_steps=2048, learning_rate=3e-4, num_minibatches=32,
                       update_epochs=10, ent_coef=0.0, hidden_size=64),
    "images": dict(total_timesteps=10_000_000, num_envs=8, num_steps=128, learning_rate=2.5e-4, num_minibatches=4,
                   update_epochs=4, ent_coef=0.01, hidden_size=512),
}  # fmt: skip
CLIP_NORMALIZED = 10.0  # bounds of normalised observations and rewards, as in baselines


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, output_dir, keep, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "CartPole-v1"
    """a Gymnasium environment, or MODULE:NAME of one that MODULE registers"""
    total_timesteps: PositiveInt | None = None
    """environment steps, over all environments"""
    num_envs: PositiveInt | None = None
    """environments that are stepped together: N"""
    num_steps: PositiveInt | None = None
    """steps of each environment between updates: T"""
    vector: Literal["sync", "async", "native"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms. native: the
    environment's own vector (gym.make_vec), where it has one"""
    learning_rate: PositiveFloat | None = None
    """learning rate of Adam, at the start"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0"""
    gamma: UnitInterval = 0.99
    """discount"""
    gae_lambda: UnitInterval = 0.95
    """lambda of the advantages"""
    num_minibatches: PositiveInt | None = None
    """minibatches per epoch"""
    update_epochs: PositiveInt | None = None
    """epochs over each rollout"""
    clip_coef: PositiveFloat = 0.2
    """clip of the ratio: epsilon"""
    clip_vloss: bool = False
    """clip the change of the value by clip_coef, too"""
    ent_coef: NonNegativeFloat | None = None
    """weight of the entropy bonus: c_ent"""
    vf_coef: NonNegativeFloat = 0.5
    """weight of the value loss: c_vf"""
    max_grad_norm: PositiveFloat = 0.5
    """gradients are clipped to this norm"""
    target_kl: PositiveFloat | None = None
    """end the epochs of a rollout when approx_kl exceeds this"""
    normalize: bool = True
    """normalise observations and rewards by running statistics"""
    normalize_advantages: bool = True
    """normalise advantages in every minibatch"""
    hidden_size: PositiveInt | None = None
    """units of the two hidden layers of policy and value network; of images: of the layer that both share"""
    log_std_init: float = 0.0
    """log of the standard deviation of Gaussian actions at the start"""
    compile: bool = False
    """compile the loss (half a minute at the start)"""
    threads: NonNegativeInt = 1
    """CPU threads: a second makes networks this small a tenth faster; 0: OMP_NUM_THREADS where set, else two"""
    save_every: PositiveInt = 20_000
    """environment steps between checkpoints"""


class Agent(nn.Module):
    """Vectors (`obs_size` numbers): separate networks for policy and value, two tanh layers. Images (`obs_size` their
    C, H, W): one encoder for both. Orthogonal weights (gain sqrt 2; policy head 0.01, value head 1), zero biases. Box
    actions: diagonal Gaussian with a state-independent log_std. Discrete, multi-discrete and multi-binary actions:
    categorical, `parts` the number of choices of each."""

    def __init__(self, obs_size, space, hidden_size: int, log_std_init: float = 0.0):
        super().__init__()
        self.space, self.continuous = space, isinstance(space, gym.spaces.Box)
        if self.continuous:
            self.parts = [int(np.prod(space.shape))]
            self.log_std = nn.Parameter(torch.full((self.parts[0],), log_std_init))
        elif isinstance(space, gym.spaces.MultiBinary):
            self.parts = [2] * int(np.prod(space.shape))
        else:
            self.parts = [int(space.n)] if isinstance(space, gym.spaces.Discrete) else space.nvec.flatten().tolist()
        self.encoder: nn.Module | None = None
        if isinstance(obs_size, tuple):
            self.actor, self.critic, self.encoder = image_networks(obs_size, hidden_size, sum(self.parts))
        else:
            self.actor = network(obs_size, hidden_size, sum(self.parts), 0.01)
            self.critic = network(obs_size, hidden_size, 1, 1.0)

    def features(self, obs: Tensor) -> Tensor:
        """What the heads take: images (..., C, H, W) uint8 -> (..., hidden_size); vectors (..., D) as they are."""
        if self.encoder is None:
            return obs
        flat = self.encoder(obs.flatten(0, -4).float() / 255)
        return flat.view(*obs.shape[:-3], -1)

    def value(self, obs: Tensor) -> Tensor:
        """(..., D) or (..., C, H, W) -> (...)"""
        return self.critic(self.features(obs))[..., 0]

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """What makes `act` a sample: normal noise for Gaussian actions, Gumbel noise for categorical ones (the largest
        of logits plus Gumbel noise is a draw from the softmax). With noise 0, `act` gives the likeliest action."""
        # drawn for a whole rollout at once: Categorical.sample() at each step takes twice the time of the network
        noise = torch.empty(*shape, sum(self.parts), device=generator.device)
        return noise.normal_(generator=generator) if self.continuous else -noise.exponential_(generator=generator).log()

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Actions (N, A) of observations (N, ...): floats, or the index of each choice."""
        out = self.actor(self.features(obs))
        if self.continuous:
            return out + self.log_std.exp() * noise
        return torch.stack([part.argmax(-1) for part in (out + noise).split(self.parts, -1)], -1)

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, entropy and value, each (...)."""
        features = self.features(obs)
        return *self.log_prob(features, actions), self.critic(features)[..., 0]

    def log_prob(self, features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability (of continuous actions: density) of actions (..., A), and entropy in nats, each (...)."""
        out = self.actor(features)
        if self.continuous:
            z = (actions - out) * (-self.log_std).exp()
            log_norm = self.log_std + 0.5 * np.log(2 * np.pi)
            return -(0.5 * z * z + log_norm).sum(-1), (0.5 + log_norm).sum().expand(out.shape[:-1])
        logp = entropy = out.new_zeros(())
        for i, part in enumerate(out.split(self.parts, -1)):
            logps = part.log_softmax(-1)
            logp = logp + logps.gather(-1, actions[..., i : i + 1].long())[..., 0]
            entropy = entropy - (logps.exp() * logps).sum(-1)
        return logp, entropy

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Actions (N, A) as the vector environment takes them: Gaussian ones clipped to the bounds, but only when they
        are executed. Their log-probability is that of the action before clipping."""
        if self.continuous:
            return actions.reshape(-1, *self.space.shape).clip(self.space.low, self.space.high)
        return actions.reshape(-1, *self.space.shape) + getattr(self.space, "start", 0)


def orthogonal(layers: list, gains: list[float]) -> None:
    for layer, gain in zip(layers, gains):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)


def network(size_in: int, hidden_size: int, size_out: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(size_in, hidden_size), nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, size_out)]
    orthogonal(layers, [2**0.5, 2**0.5, gain])
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def image_networks(shape: tuple[int, int, int], hidden_size: int, actions: int) -> tuple:
    """The heads of policy and value, and the encoder of images (B, C, H, W). From 36 pixels on, the convolutions of
    Mnih et al. 2015 (channels, kernel, stride); below, as for boards, two of 3 x 3 that reach over the border."""
    large, channels = min(shape[1:]) >= 36, shape[0]
    body: list[nn.Module] = []
    for size, kernel, stride in [(32, 8, 4), (64, 4, 2), (64, 3, 1)] if large else [(32, 3, 1), (64, 3, 2)]:
        body += [nn.Conv2d(channels, size, kernel, stride, padding=0 if large else 1), nn.ReLU()]
        channels = size
    body.append(nn.Flatten())
    units = nn.Sequential(*body)(torch.zeros(1, *shape)).shape[1]
    last, actor, critic = nn.Linear(units, hidden_size), nn.Linear(hidden_size, actions), nn.Linear(hidden_size, 1)
    hidden = [*body[:-1:2], last]
    orthogonal([*hidden, actor, critic], [2**0.5] * len(hidden) + [0.01, 1.0])
    return actor, critic, nn.Sequential(*body, last, nn.ReLU())


class Statistics:
    """Running statistics of observations and of discounted returns, one set for all environments, frozen in
    evaluation. Without --normalize they change nothing; images stay bytes in any case."""

    def __init__(self, obs_size, num_envs: int, gamma: float, enabled: bool):
        self.images = isinstance(obs_size, tuple)
        self.obs, self.returns = RunningMeanStd(() if self.images else (obs_size,)), RunningMeanStd()
        self.enabled, self.gamma, self.discounted = enabled, gamma, np.zeros(num_envs)

    def observe(self, obs: np.ndarray, count: bool = False) -> np.ndarray:
        """Normalises observations (N, D). Only training counts them, and only those that it acts on."""
        if self.images:
            return obs
        if not self.enabled:
            return obs.astype(np.float32)
        if count:
            self.obs.update(obs)
        scaled = (obs - self.obs.mean) / np.sqrt(self.obs.var + 1e-8)
        return scaled.clip(-CLIP_NORMALIZED, CLIP_NORMALIZED).astype(np.float32)

    def reward(self, rewards: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Counts rewards (N,) and divides them by the standard deviation of the discounted return so far."""
        if not self.enabled:
            return rewards
        self.discounted = self.discounted * self.gamma + rewards
        self.returns.update(self.discounted)
        self.discounted = self.discounted * ~done
        return np.clip(rewards / np.sqrt(self.returns.var + 1e-8), -CLIP_NORMALIZED, CLIP_NORMALIZED)

    def weights(self) -> dict[str, Tensor]:
        """For RUN/model: the networks take (obs - obs_mean) / sqrt(obs_var + 1e-8), clipped."""
        used = self.enabled and not self.images
        return {f"obs_{name}": self.obs.state_dict()[name] for name in ("mean", "var")} if used else {}

    def state_dict(self) -> dict:
        discounted = torch.tensor(self.discounted)
        return {"obs": self.obs.state_dict(), "returns": self.returns.state_dict(), "discounted": discounted}

    def load_state_dict(self, state: dict) -> None:
        self.obs.load_state_dict(state["obs"])
        self.returns.load_state_dict(state["returns"])
        self.discounted = state["discounted"].numpy()


class Batch(NamedTuple):
    """What one iteration learns from: T steps of N environments."""

    obs: Tensor  # (T, N, D), normalised; images (T, N, C, H, W), uint8
    actions: Tensor  # (T, N, A), before clipping
    rewards: Tensor  # (T, N) float32, normalised
    next_obs: Tensor  # like obs: what the step led to, before any reset
    terminated: Tensor  # (T, N) bool
    truncated: Tensor  # (T, N) bool
    idle: Tensor | None = None  # (T, N) bool: steps of a native vector that only begin an episode; nothing to learn


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


def ppo_loss(agent: Agent, obs: Tensor, actions: Tensor, old_logps: Tensor, advantages: Tensor, returns: Tensor,
             old_values: Tensor, args: Args) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss of one minibatch, to be minimised (equation 9 with the sign turned), and (approx_kl, clip_fraction,
    entropy). obs (B, ...), actions (B, A), the others (B,)."""
    logps, entropy, values = agent(obs, actions)
    log_ratio = logps - old_logps
    ratio = log_ratio.exp()
    if args.normalize_advantages:  # per minibatch, as CleanRL and SB3; the paper does not, and gradients scale with it
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    errors = (values - returns) ** 2
    if args.clip_vloss:  # as baselines; arXiv 2006.05990 found that it hurts
        near = old_values + (values - old_values).clamp(-args.clip_coef, args.clip_coef)
        errors = torch.max(errors, (near - returns) ** 2)
    loss = policy_loss - args.ent_coef * entropy.mean() + args.vf_coef * 0.5 * errors.mean()
    with torch.no_grad():
        outside = ((ratio - 1).abs() > args.clip_coef).float()
        metrics = torch.stack([(ratio - 1 - log_ratio).mean(), outside.mean(), entropy.mean()])
    return loss, metrics


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Batch, generator: torch.Generator, args: Args,
           loss_function: Callable = ppo_loss) -> dict[str, float]:  # fmt: skip
    """`update_epochs` passes over one rollout in minibatches. Returns metrics."""
    with torch.no_grad():  # of the whole rollout at once, before the first epoch
        old_logps, _, values = agent(batch.obs, batch.actions)
        next_values = agent.value(batch.next_obs)  # truncated episodes, too; CleanRL treats truncation as termination
        done = batch.terminated | batch.truncated
        advantages = gae(batch.rewards, values, next_values, batch.terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + values
    used = slice(None) if batch.idle is None else ~batch.idle.flatten()
    rows = [x.flatten(0, 1)[used] for x in (batch.obs, batch.actions, old_logps, advantages, returns, values)]
    norms, epochs = [], 0
    while epochs < args.update_epochs:
        epochs += 1
        order, metrics = torch.randperm(len(rows[0]), generator=generator, device=rows[0].device), []
        for minibatch in zip(*(x[order].tensor_split(args.num_minibatches) for x in rows)):
            loss, numbers = loss_function(agent, *minibatch, args)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm))
            optimizer.step()
            metrics.append(numbers)
        approx_kl, clip_fraction, entropy = torch.stack(metrics).mean(0).tolist()
        if args.target_kl is not None and approx_kl > args.target_kl:
            break  # SB3 stops between minibatches, at 1.5 times --target-kl
    *_, returns, values = rows
    unexplained = ((returns - values).var() / returns.var().clamp(min=1e-12)).item()
    return {"explained_variance": 1 - unexplained, "approx_kl": approx_kl, "clip_fraction": clip_fraction,
            "entropy": entropy, "grad_norm": torch.stack(norms).mean().item(), "epochs": epochs}  # fmt: skip


@torch.no_grad()
def collect(agent: Agent, envs: Vector, obs: np.ndarray, statistics: Statistics,
            generator: torch.Generator, step: int, args: Args) -> tuple[Batch, np.ndarray, list]:  # fmt: skip
    """T steps of N environments from observations `obs` (N, ...), which the statistics have counted.

    Returns a Batch, the observations to go on from, and (return, length) of the episodes that ended.
    """
    device, shape = generator.device, (args.num_steps, args.num_envs)
    noise = agent.noise(shape, generator)
    actions, episodes, current = [], [], statistics.observe(obs)
    seen, next_obs = (np.empty((args.num_steps, *current.shape), current.dtype) for _ in range(2))
    rewards, (terminated, truncated, idle) = np.empty(shape, np.float32), np.empty((3, *shape), bool)
    for t in range(args.num_steps):
        seen[t], idle[t] = current, envs.log.idle
        actions.append(agent.act(torch.from_numpy(seen[t]).to(device), noise[t]))
        executed, now = agent.to_env(actions[t].cpu().numpy()), step + (t + 1) * args.num_envs
        obs, true_obs, reward, terminated[t], truncated[t], ended = step_vector(envs, executed, now)
        rewards[t] = statistics.reward(reward, terminated[t] | truncated[t])
        current = statistics.observe(obs, count=True)
        next_obs[t] = statistics.observe(true_obs) if ended else current
        episodes += ended
    arrays = (seen, rewards, next_obs, terminated, truncated, idle)
    seen, *others = (torch.from_numpy(array).to(device) for array in arrays)
    return Batch(seen, torch.stack(actions), *others), obs.copy(), episodes


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    kinds = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
    if not isinstance(space, kinds) or isinstance(space, gym.spaces.Box) and space.dtype.kind != "f":
        wanted = "a Box of floats, Discrete, MultiDiscrete or MultiBinary"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: PPO needs {wanted}")
    rows = args.num_envs * args.num_steps
    least = 4 if args.vector == "native" else 2  # up to half of its rows are idle
    if rows % args.num_minibatches or rows // args.num_minibatches < least:
        parts = f"the {rows} rows of a rollout (num_envs * num_steps) into parts of at least {least}"
        raise UserError(f"--num-minibatches {args.num_minibatches} must divide {parts}")
    if args.total_timesteps < rows:
        raise UserError(f"--total-timesteps {args.total_timesteps} is less than one rollout of {rows} steps")


@torch.no_grad()
def act_in_evaluation(agent: Agent, statistics: Statistics, obs: np.ndarray, scale: Tensor,
                      generator: torch.Generator) -> np.ndarray:  # fmt: skip
    """What utils.rollouts.evaluate calls: actions (N, A) of raw observations (N, ...)."""
    normalized = torch.from_numpy(statistics.observe(obs)).to(generator.device)
    return agent.to_env(agent.act(normalized, agent.noise((len(obs),), generator) * scale).cpu().numpy())


def train(args: Args) -> list[dict]:
    device = prepare(args)
    make, obs_size, space = open_env(args, partial(make_env, images=True))
    kind = "continuous" if isinstance(space, gym.spaces.Box) else "discrete"
    settings = resolve(args, PRESETS, "images" if isinstance(obs_size, tuple) else kind)
    check(args, space)
    agent = Agent(obs_size, space, args.hidden_size, args.log_std_init).to(device)
    statistics = Statistics(obs_size, args.num_envs, args.gamma, args.normalize)
    act = partial(act_in_evaluation, agent, statistics)
    score_agent = partial(evaluate, make, act, args.eval_episodes, args.seed, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent, statistics=statistics)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    loss_function = torch.compile(ppo_loss) if args.compile else ppo_loss
    rollout = args.num_envs * args.num_steps
    total = args.total_timesteps // rollout * rollout
    run = Run(args, NAME, args.env_id, total, ("return", "eval/return", "explained_variance"), "total_timesteps",
              schedule_depends_on_budget=args.anneal_lr)  # fmt: skip
    run.print(settings)
    envs = make_vector(make, args.num_envs, args.seed, args.vector)

    def state() -> dict:
        return {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "envs": envs.log.state(obs),
                "statistics": statistics.state_dict(), "generator": generator.get_state()}  # fmt: skip

    step, obs = run.step, restore_vector(envs, run.state["envs"]) if run.state else reset_vector(envs)
    if not run.restore(agent=agent, optimizer=optimizer, statistics=statistics, generator=generator):
        statistics.observe(obs, count=True)
    while step < run.total:
        start = time.perf_counter()
        if args.anneal_lr:  # everywhere; the paper anneals for Atari only
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / run.total)

        # collect
        with run.saving(step, state(), rng_state()):
            batch, obs, episodes = collect(agent, envs, obs, statistics, generator, step, args)
        collected, step = time.perf_counter(), step + rollout

        # update
        columns = update(agent, optimizer, batch, generator, args, loss_function) | episode_columns(episodes)
        columns |= {"learning_rate": optimizer.param_groups[0]["lr"], "time/steps_per_second": run.speed(step),
                    "time/collect": collected - start, "time/iteration": time.perf_counter() - start}  # fmt: skip

        # evaluate
        if run.due(step, args.eval_every):
            with run.saving(step, state, columns=columns):
                columns |= score_agent()
        run.log(step, **columns)
        run.end_step(step, state)

    envs.close()
    curves = {"return": ("return", "eval/return"), "explained variance": ("explained_variance",),
              "entropy": ("entropy",)}  # fmt: skip
    return run.finish(agent.state_dict() | statistics.weights(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train)
