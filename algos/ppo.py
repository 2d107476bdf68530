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
    python algos/ppo.py --env-id HalfCheetah-v5                                  the paper's recipe (table 3), annealed
    python algos/ppo.py --env-id package.module:Name-v0 --env-kwargs size=5      your own environment
    python algos/ppo.py --evaluate RUN --eval-episodes 100 --capture-video       scores a saved agent
    algos/README.md has commands for Pendulum, Hopper and a tuned recipe.

Expect
    CartPole-v1: 500, the maximum, from about 20,000 steps on, in less than 15 seconds on a CPU; reinforce.py needs more
    steps for it. Hopper-v5 and HalfCheetah-v5, 204,800 steps: 1,408 and 1,257 in one to two minutes (8 seeds). Five
    MuJoCo tasks, 1M steps: an interquartile mean of 1.05, where random actions score 0 and the paper 1.

Metrics
    return, length      of the training episodes that ended in the iteration; absent if none did
    eval/return         likeliest action; eval/return_stochastic: sampled actions
    explained_variance  of R_t by V(s_t); rises towards 1, below 0 is worse than a constant. Where all returns are equal
                        (CartPole at 500) it divides by almost 0 and falls to -40: nothing is wrong
    approx_kl           mean of rho - 1 - log rho in the last epoch; 0.001 to 0.03
    clip_fraction       share of samples outside the clip in the last epoch; 0.05 to 0.3
    entropy             nats; falls slowly

Differences
    - Policy and value share no parameters, as in the paper for MuJoCo, in CleanRL and in SB3.
    - Not in the paper: advantages are normalised in each minibatch, gradients are clipped at a norm of 0.5, and the
      learning rate falls to 0 on all tasks, not on Atari alone. All three are in baselines and CleanRL.
    - Observations and rewards are normalised by running statistics. Baselines do so for MuJoCo only. Without it
      CartPole had not settled at 500 after 100,000 steps.
    - All observations are flattened. ppo_atari.py is for images.
    - Where half of N(0, 1) or more lies outside the bounds, [-1, 1] is stretched to them. SB3 stays at their edge.
"""

import sys
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
from utils.core import Run, UserError, main, prepare, preset

NAME, TITLE = "ppo", "PPO"
PRESETS = {  # defaults that depend on the kind of actions, for arguments left at None
    "discrete": dict(total_timesteps=100_000, num_envs=8, num_steps=128, learning_rate=1e-3, num_minibatches=4,
                     update_epochs=8),
    "continuous": dict(total_timesteps=1_000_000, num_envs=1, num_steps=2048, learning_rate=3e-4, num_minibatches=32,
                       update_epochs=10),
}  # fmt: skip
CLIP_NORMALIZED = 10.0  # bounds of normalised observations and rewards, as in baselines


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "CartPole-v1"
    """a Gymnasium environment, or MODULE:NAME of one that MODULE registers"""
    total_timesteps: int | None = None
    """environment steps, over all environments"""
    num_envs: int | None = None
    """environments that are stepped together: N"""
    num_steps: int | None = None
    """steps of each environment between updates: T"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: float | None = None
    """learning rate of Adam, at the start"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of the advantages"""
    num_minibatches: int | None = None
    """minibatches per epoch"""
    update_epochs: int | None = None
    """epochs over each rollout"""
    clip_coef: float = 0.2
    """clip of the ratio: epsilon"""
    clip_vloss: bool = False
    """clip the change of the value by clip_coef, too"""
    ent_coef: float = 0.0
    """weight of the entropy bonus: c_ent"""
    vf_coef: float = 0.5
    """weight of the value loss: c_vf"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""
    target_kl: float | None = None
    """end the epochs of a rollout when approx_kl exceeds this"""
    normalize: bool = True
    """normalise observations and rewards by running statistics"""
    normalize_advantages: bool = True
    """normalise advantages in every minibatch"""
    hidden_size: int = 64
    """units of the two hidden layers of policy and value network"""
    log_std_init: float = 0.0
    """log of the standard deviation of Gaussian actions at the start"""
    compile: bool = False
    """compile the loss (half a minute at the start)"""
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


def ppo_loss(agent: Agent, obs: Tensor, actions: Tensor, old_logps: Tensor, advantages: Tensor, returns: Tensor,
             old_values: Tensor, args: Args) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss of one minibatch, to be minimised (equation 9 with the sign turned), and (approx_kl, clip_fraction,
    entropy). obs (B, D), actions (B, A), the others (B,)."""
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
    rows = [x.flatten(0, 1) for x in (batch.obs, batch.actions, old_logps, advantages, returns, values)]
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
        raise UserError(f"--env-id {args.env_id} has the action space {space}: PPO needs {wanted}")
    rows = args.num_envs * args.num_steps
    if rows % args.num_minibatches or rows // args.num_minibatches < 2:
        parts = f"the {rows} rows of a rollout (num_envs * num_steps) into parts of at least 2"
        raise UserError(f"--num-minibatches {args.num_minibatches} must divide {parts}")
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
    settings = preset(args, PRESETS, "continuous" if isinstance(space, gym.spaces.Box) else "discrete")
    check(args, space)
    agent = Agent(obs_size, space, args.hidden_size, args.log_std_init).to(device)
    statistics = Statistics(obs_size, args.num_envs, args.gamma, args.normalize)
    score_agent = partial(evaluate, eval_envs, partial(act_in_evaluation, agent, statistics), args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent, statistics=statistics)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    loss_function = torch.compile(ppo_loss) if args.compile else ppo_loss
    rollout = args.num_envs * args.num_steps
    run = Run(args, NAME, args.env_id, args.total_timesteps // rollout * rollout, ("return", "eval/return"))
    run.print(settings)
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
        columns = update(agent, optimizer, batch, generator, args, loss_function) | episode_columns(episodes)
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
