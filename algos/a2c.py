r"""Advantage Actor-Critic (A2C), the synchronous A3C.

Mnih et al. 2016, "Asynchronous Methods for Deep Reinforcement Learning" (arXiv 1602.01783, section 4 and algorithm S3).

Parent: ppo.py. One gradient step on each rollout, which is then thrown away: no ratio, clip, epochs or minibatches.

The policy acts for T steps in N environments. An action becomes likelier if the rewards that followed, with the value
of where the rollout ended, are more than the critic had expected. Maximises

    J(theta) = E { A_t log pi_theta(a_t | s_t) + c_ent H_t - c_vf (V(s_t) - R_t)^2 / 2 }

    R_t   = r_t + gamma r_t+1 + ... + gamma^n V(s_t+n)    to the end of the rollout or episode; V is 0 if it terminated
    A_t   = R_t - V(s_t)                                  advantage, without a gradient; of GAE if lambda is below 1
    H_t   = entropy of pi_theta(. | s_t)
    T, N, gamma, lambda   --num-steps, --num-envs, --gamma, --gae-lambda
    c_ent, c_vf           --ent-coef, --vf-coef

The gradient of PPO's objective is this one where the policy is still the one that acted. So ppo.py with one epoch, one
minibatch and RMSprop is A2C to the digit (Huang et al. 2022, arXiv 2205.09123).

Run
    python algos/a2c.py                                                          CartPole-v1
    python algos/a2c.py --env-id package.module:Name-v0 --env-kwargs size=5      your own environment
    python algos/a2c.py --evaluate RUN --eval-episodes 100 --capture-video       scores a saved agent

Expect
    CartPole-v1: 500, the maximum, from 20,000 steps on (2 seeds), in less than half a minute on a CPU. In runs of
    24,560 steps 475 is reached after 8,200, 14,360 and not at all (3 seeds), by ppo.py after 4,096, 6,144 and 8,192.
    With one epoch and one minibatch of its 1,024 rows ppo.py does not reach it.

Metrics
    return, length      of the training episodes that ended in the iteration; absent if none did
    eval/return         likeliest action; eval/return_stochastic: sampled actions
    explained_variance  of R_t by V(s_t), in one small rollout: noisy
    entropy             nats; falls slowly
    grad_norm           before it is clipped; in CartPole a median of 0.02, so that few are

Differences
    - The paper's workers update one network without waiting for each other. Here all wait, as in baselines and SB3.
    - Defaults are those of SB3 and the zoo's CartPole, but a fifth of the steps, and the learning rate falls to 0, as
      in the paper. SB3's value loss is not halved: its 0.5 is our 1.0.
    - Observations and rewards are normalised by running statistics. SB3 does not.
    - Policy and value share no parameters. The paper's networks of Atari share all layers but the last.
    - All observations are flattened.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.control import (
    EnvArgs,
    episode_columns,
    evaluate,
    make_env,
    make_vector,
    score_saved,
    step_vector,
    try_out,
)
from utils.core import Run, UserError, main, prepare

NAME, TITLE = "a2c", "A2C"
CLIP_NORMALIZED = 10.0  # bounds of normalised observations and rewards, as in baselines


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "CartPole-v1"
    """a Gymnasium environment, or MODULE:NAME of one that MODULE registers"""
    total_timesteps: int = 100_000
    """environment steps, over all environments"""
    num_envs: int = 8
    """environments that are stepped together: N"""
    num_steps: int = 5
    """steps of each environment between updates: T"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: float = 7e-4
    """learning rate of RMSprop, at the start"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 1.0
    """lambda of the advantages; 1: returns up to the end of the rollout, and the value there"""
    ent_coef: float = 0.0
    """weight of the entropy bonus: c_ent"""
    vf_coef: float = 0.5
    """weight of the value loss: c_vf"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""
    normalize: bool = True
    """normalise observations and rewards by running statistics"""
    normalize_advantages: bool = False
    """normalise the advantages of a rollout"""
    hidden_size: int = 64
    """units of the two hidden layers of policy and value network"""
    log_std_init: float = 0.0
    """log of the standard deviation of Gaussian actions at the start"""
    threads: int = 1
    """CPU threads: a second makes networks this small a tenth faster; 0: OMP_NUM_THREADS where set, else two"""
    save_every: int = 20_000
    """environment steps between checkpoints"""


class Agent(nn.Module):
    """Separate networks for policy and value, two tanh layers each. Orthogonal weights (gain sqrt 2; policy head 0.01,
    value head 1), zero biases. Box actions: diagonal Gaussian with a state-independent log_std. Other actions:
    categorical, `parts` the number of choices of each."""

    def __init__(self, obs_size: int, space: gym.Space, hidden_size: int, log_std_init: float = 0.0):
        super().__init__()
        self.space, self.continuous = space, isinstance(space, gym.spaces.Box)
        if self.continuous:
            self.parts = [int(np.prod(space.shape))]
            low, high = torch.from_numpy(np.stack([space.low, space.high])).double()
            far = (torch.special.ndtr(high) - torch.special.ndtr(low) <= 0.5) & (high - low).isfinite()
            self.middle = torch.where(far, (low + high) / 2, 0.0).numpy().astype(space.dtype)
            self.half_width = torch.where(far, (high - low) / 2, 1.0).numpy().astype(space.dtype)
            if far.any():
                print("half of N(0, 1) lies outside the bounds of actions: it is stretched to them", file=sys.stderr)
            self.log_std = nn.Parameter(torch.full((self.parts[0],), log_std_init))
        elif isinstance(space, gym.spaces.MultiBinary):
            self.parts = [2] * int(np.prod(space.shape))
        else:
            self.parts = [int(space.n)] if isinstance(space, gym.spaces.Discrete) else space.nvec.flatten().tolist()
        self.actor = network(obs_size, hidden_size, sum(self.parts), 0.01)
        self.critic = network(obs_size, hidden_size, 1, 1.0)

    def value(self, obs: Tensor) -> Tensor:
        """(..., D) -> (...)"""
        return self.critic(obs)[..., 0]

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """What makes `act` a sample. It is drawn for a whole rollout at once, which is twice as fast as at each step.
        Normal noise for Gaussian actions, Gumbel noise for categorical ones (the largest of logits plus Gumbel noise is
        a draw from the softmax). With noise 0, `act` gives the likeliest action."""
        noise = torch.empty(*shape, sum(self.parts), device=generator.device)
        return noise.normal_(generator=generator) if self.continuous else -noise.exponential_(generator=generator).log()

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Actions (N, A) of observations (N, D): floats, or the index of each choice."""
        out = self.actor(obs)
        if self.continuous:
            return out + self.log_std.exp() * noise
        return torch.stack([part.argmax(-1) for part in (out + noise).split(self.parts, -1)], -1)

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, entropy and value, each (...)."""
        return *self.log_prob(obs, actions), self.value(obs)

    def log_prob(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability (of continuous actions: density) of actions (..., A), and entropy in nats, each (...)."""
        out = self.actor(obs)
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
        are executed. Their log-probability is that of the action before clipping. Where half of N(0, 1) or more
        lies outside the bounds, [-1, 1] is stretched to them: else it would begin at an edge, and see no difference."""
        if self.continuous:
            actions = self.middle + self.half_width * actions.reshape(-1, *self.space.shape)
            return actions.clip(self.space.low, self.space.high)
        return actions.reshape(-1, *self.space.shape) + getattr(self.space, "start", 0)


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
    """Running statistics of observations and of discounted returns, one set for all environments, frozen in
    evaluation. Without --normalize they change nothing."""

    def __init__(self, obs_size: int, num_envs: int, gamma: float, enabled: bool):
        self.obs, self.returns = RunningMeanStd((obs_size,)), RunningMeanStd()
        self.enabled, self.gamma, self.discounted = enabled, gamma, np.zeros(num_envs)

    def observe(self, obs: np.ndarray, count: bool = False) -> np.ndarray:
        """Normalises observations (N, D). Only training counts them, and only those that it acts on."""
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
        return {f"obs_{name}": self.obs.state_dict()[name] for name in ("mean", "var")} if self.enabled else {}

    def state_dict(self) -> dict:
        """Without the discounted returns so far: a resumed run begins new episodes."""
        return {"obs": self.obs.state_dict(), "returns": self.returns.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.obs.load_state_dict(state["obs"])
        self.returns.load_state_dict(state["returns"])


class Batch(NamedTuple):
    """What one iteration learns from: T steps of N environments."""

    obs: Tensor  # (T, N, D), normalised
    actions: Tensor  # (T, N, A), before clipping
    rewards: Tensor  # (T, N) float32, normalised
    next_obs: Tensor  # like obs: what the step led to, before any reset
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


def a2c_loss(agent: Agent, obs: Tensor, actions: Tensor, advantages: Tensor, returns: Tensor,
             args: Args) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss of one rollout, to be minimised, and the mean entropy. obs (B, D), actions (B, A), the others (B,)."""
    logps, entropy, values = agent(obs, actions)
    if args.normalize_advantages:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = -(logps * advantages).mean()
    errors = (values - returns) ** 2
    loss = policy_loss - args.ent_coef * entropy.mean() + args.vf_coef * 0.5 * errors.mean()
    return loss, entropy.mean()


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """One step on a whole rollout. Returns metrics."""
    with torch.no_grad():
        values, next_values = agent.value(batch.obs), agent.value(batch.next_obs)
        done = batch.terminated | batch.truncated
        advantages = gae(batch.rewards, values, next_values, batch.terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + values
    obs, actions, weights, targets = (x.flatten(0, 1) for x in (batch.obs, batch.actions, advantages, returns))
    loss, entropy = a2c_loss(agent, obs, actions, weights, targets, args)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()
    unexplained = ((returns - values).var() / returns.var().clamp(min=1e-12)).item()
    return {"explained_variance": 1 - unexplained, "entropy": entropy.item(), "grad_norm": norm.item()}


@torch.no_grad()
def collect(agent: Agent, envs, obs: np.ndarray, statistics: Statistics,
            generator: torch.Generator, args: Args) -> tuple[Batch, np.ndarray, list]:  # fmt: skip
    """T steps of N environments from observations `obs` (N, D), which the statistics have counted.

    Returns a Batch, the observations to go on from, and (return, length) of the episodes that ended.
    """
    device, shape = generator.device, (args.num_steps, args.num_envs)
    noise = agent.noise(shape, generator)
    actions, episodes, current = [], [], statistics.observe(obs)
    seen, next_obs = (np.empty((args.num_steps, *current.shape), current.dtype) for _ in range(2))
    rewards, (terminated, truncated) = np.empty(shape, np.float32), np.empty((2, *shape), bool)
    for t in range(args.num_steps):
        seen[t] = current
        actions.append(agent.act(torch.from_numpy(seen[t]).to(device), noise[t]))
        executed = agent.to_env(actions[t].cpu().numpy())
        obs, true_obs, reward, terminated[t], truncated[t], ended = step_vector(envs, executed)
        rewards[t] = statistics.reward(reward, terminated[t] | truncated[t])
        current = statistics.observe(obs, count=True)
        next_obs[t] = statistics.observe(true_obs) if ended else current
        episodes += ended
    arrays = (seen, rewards, next_obs, terminated, truncated)
    seen, *others = (torch.from_numpy(array).to(device) for array in arrays)
    return Batch(seen, torch.stack(actions), *others), obs, episodes


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    kinds = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
    if not isinstance(space, kinds) or isinstance(space, gym.spaces.Box) and space.dtype.kind != "f":
        wanted = "a Box of floats, Discrete, MultiDiscrete or MultiBinary"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: A2C needs {wanted}")
    rows = args.num_envs * args.num_steps
    if rows < 2:
        raise UserError("a rollout of 1 row has no variance: raise --num-envs or --num-steps")
    if args.total_timesteps < rows:
        raise UserError(f"--total-timesteps {args.total_timesteps} is less than one rollout of {rows} steps")


@torch.no_grad()
def act_in_evaluation(agent: Agent, statistics: Statistics, obs: np.ndarray, scale: Tensor,
                      generator: torch.Generator) -> np.ndarray:  # fmt: skip
    """What `evaluate` calls: actions (N, A) of raw observations (N, D)."""
    normalized = torch.from_numpy(statistics.observe(obs)).to(generator.device)
    return agent.to_env(agent.act(normalized, agent.noise((len(obs),), generator) * scale).cpu().numpy())


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape[0], env.action_space
    check(args, space)
    agent = Agent(obs_size, space, args.hidden_size, args.log_std_init).to(device)
    statistics = Statistics(obs_size, args.num_envs, args.gamma, args.normalize)
    score_agent = partial(evaluate, eval_envs, partial(act_in_evaluation, agent, statistics), args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent, statistics=statistics)
    # the epsilon stands outside the root; in TensorFlow 1's RMSprop, of the authors' time, inside: a larger one
    optimizer = torch.optim.RMSprop(agent.parameters(), lr=args.learning_rate, alpha=0.99, eps=1e-5)
    generator = torch.Generator(device).manual_seed(args.seed)
    rollout = args.num_envs * args.num_steps
    run = Run(args, NAME, args.env_id, args.total_timesteps // rollout * rollout, ("return", "eval/return"))
    envs, obs = make_vector(make, args, run.step)
    parts = dict(agent=agent, optimizer=optimizer, statistics=statistics, generator=generator)
    if not run.restore(**parts):
        statistics.observe(obs, count=True)
    step = run.step
    while step < run.total:
        if args.anneal_lr:  # everywhere; the paper anneals for Atari only
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / run.total)

        # collect
        batch, obs, episodes = collect(agent, envs, obs, statistics, generator, args)
        step += rollout

        # update
        columns = update(agent, optimizer, batch, args) | episode_columns(episodes)
        columns |= {"learning_rate": optimizer.param_groups[0]["lr"], "time/steps_per_second": run.speed(step)}

        # evaluate
        if run.due(step, args.eval_every):
            columns |= score_agent()
        run.log(step, **columns)
        run.end_step(step, parts)

    envs.close()
    curves = {"return": ("return", "eval/return"), "explained variance": ("explained_variance",),
              "entropy": ("entropy",)}  # fmt: skip
    return run.finish(agent.state_dict() | statistics.weights(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train, NAME)
