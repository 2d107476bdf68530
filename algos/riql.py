r"""Robust IQL (RIQL).

Yang et al. 2024, "Towards Robust Offline Reinforcement Learning under Diverse Data Corruption" (arXiv 2310.12955).

Parent: iql.py. Huber's loss for the critics, a quantile of K target critics for the minimum of two.

Where next observations are spoilt, V(s') is a guess, and a squared error follows the wildest guesses. Huber's loss
pulls no harder on a large error than on one of size delta; a low quantile is careful. On minibatches minimises

    L_Q   = E sum_k h(r + gamma (1 - terminated) V(s') - Q_k(s, a)),    k = 1 .. K
            h(x) = x^2 / (2 delta) where |x| < delta, |x| - delta / 2 elsewhere
    L_V   = E |tau - 1(u < 0)| u^2,    u = Q_alpha(s, a) - V(s)
    L_pi  = -E min(exp(beta A), 100) log pi(a | s),    A = Q_alpha(s, a) - V(s)
    Q_alpha    alpha-quantile of Qbar_1(s, a) .. Qbar_K(s, a), between two of them in proportion; Qbar as in iql.py

    delta, alpha, K     --huber-delta, in units of rewards (the authors' 1 / sigma^2), --quantile, --num-critics
    tau, beta, gamma    as in iql.py, whose update is --num-critics 2 --quantile 0 --huber-delta 0
    s, s'      scaled by the mean and standard deviation of the data (--no-normalize)

--corruption spoils a share of the rows before training, as the authors do at random. A next observation gets noise, in
each number uniform up to --corruption-scale standard deviations. A reward is replaced: uniform up to 30 times that.

Run
    python algos/riql.py                                                    the collection that ships: Hopper-v5
    python algos/riql.py --corruption next-observations                     30 % of the next observations are spoilt
    python algos/riql.py --corruption next-observations --num-critics 2 --quantile 0 --huber-delta 0     IQL on them
    python algos/riql.py --dataset hopper_medium_replay-v2.hdf5 --max-steps 3000000 --corruption next-observations \
        --quantile 0.5 --learning-rate 3e-4 --tau 0.005 --batch-size 256 --hidden-size 256 --eval-every 10000
                                                                            the authors' settings: never run by us
    python algos/riql.py --evaluate RUN --eval-episodes 100 --capture-video     scores a saved agent

Expect
    Hopper-v5's collection with 30 % of a column spoilt, the default settings (5 seeds; benchmarks/effects.py):
    - Next observations give IQL's targets a heavier tail: kurtosis 4.2 +- 0.3, clean 2.9 +- 0.2, rewards 3.1 +- 0.1.
    - They move the mean Q of the data's actions from 119 to 145 in IQL, from 120 to 94 in IQL on unscaled observations,
      and from 123 to 133 here (riql-values).
    - Spoilt rewards are 0 on average, so they lower values: IQL's to 83. Here they are 120.
    The default run takes 20 seconds. It returns 347 (seed 1), on one thread 541: we claim nothing of returns.

Metrics
    q, v                means of Q_alpha(s, a) and V(s); in units of rewards; near the discounted sums of rewards
    kurtosis            of a minibatch's targets of Q: 3 for a normal distribution, more for heavier tails
    weight, clipped, td_error, nll, std, eval/...: as in iql.py

Differences
    - The authors' code (cc07d81) takes advantages and targets from V as it was before the update, clips targets to
      [-100, 1000], and divides L_Q by K. Observations are scaled by statistics of s and s' together.
    - Its policy is deterministic by default. Delta (1/9 to 100), alpha and K (3 or 5) depend on task and corruption,
      which may also be of observations and actions, or by gradients. Domains but mujoco are IQL's.
"""

import copy
import math
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
    ReplayBuffer,
    episode_columns,
    evaluate,
    is_bounded,
    make_env,
    make_vector,
    score_saved,
    step_vector,
    to_env,
    to_unit,
    try_out,
)
from utils.core import Run, UserError, main, prepare, preset
from utils.offline import Dataset, OfflineArgs, check_spaces, compared, load_dataset

NAME, TITLE = "riql", "RIQL"
LOG_STD_BOUNDS = (-5.0, 2.0)
MAX_WEIGHT = 100.0  # of exp(beta A)
PRESETS = {  # mujoco: the authors' settings, where rewards are not scaled. The others are IQL's
    "mujoco": dict(expectile=0.7, temperature=3.0, dropout=0.0, rewards="raw"),
    "antmaze": dict(expectile=0.9, temperature=10.0, dropout=0.0, rewards="minus-one"),
    "kitchen": dict(expectile=0.7, temperature=0.5, dropout=0.1, rewards="raw"),
    "adroit": dict(expectile=0.7, temperature=0.5, dropout=0.1, rewards="raw"),
}


@dataclass
class Args(OfflineArgs):
    limits = OfflineArgs.limits | {"quantile": (0, 1), "huber_delta": (0, math.inf), "corruption_rate": (0, 1)}
    num_envs = 1  # online
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs); env_kwargs, eval_every,
    # eval_episodes, evaluate, capture_video (EnvArgs); dataset, env_id (OfflineArgs)
    max_steps: int = 5_000
    """updates on the dataset"""
    online_steps: int = 0
    """environment steps after max_steps, one update each"""
    domain: Literal["mujoco", "antmaze", "kitchen", "adroit"] = "mujoco"
    """use the expectile, temperature, dropout and rewards for this domain"""
    learning_rate: float = 2e-3
    """learning rate of Adam, for policy, critics and value"""
    anneal_actor: bool = True
    """let the policy's learning rate fall by a cosine to 0 over max_steps"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.02
    """step of the target critics towards the critics"""
    expectile: float | None = None
    """expectile of the value"""
    value_loss: Literal["expectile", "quantile"] = "expectile"
    """quantile: f-DVL with total variation, its lambda 1 / (2 - expectile) (arXiv 2302.08560)"""
    temperature: float | None = None
    """inverse temperature of the policy's weights: beta"""
    rewards: Literal["raw", "return-range", "minus-one"] | None = None
    """treatment of rewards: none, times 1,000 / (highest - lowest return of the dataset), or minus 1"""
    num_critics: int = 5
    """critics: K"""
    quantile: float = 0.25
    """what the value and the advantages take of the K target critics: alpha; 0: the minimum, as in iql.py"""
    huber_delta: float = 1.0
    """where the critics' loss turns from a parabola into lines, in units of rewards: delta. 0: squared errors, as in
    iql.py"""
    corruption: Literal["none", "next-observations", "rewards"] = "none"
    """what is spoilt in the dataset before training"""
    corruption_rate: float = 0.3
    """share of the rows that are spoilt"""
    corruption_scale: float = 1.0
    """size of the noise: uniform, up to so many standard deviations of each number of an observation, or up to 30 times
    this as the reward"""
    normalize: bool = True
    """subtract the dataset's mean from observations and divide them by its standard deviation"""
    batch_size: int = 128
    """transitions per update"""
    hidden_size: int = 128
    """units of the two hidden layers"""
    dropout: float | None = None
    """share of the actor's hidden units that is dropped in training"""
    log_every: int = 500
    """updates between rows of metrics"""
    save_every: int = 5_000
    """updates between checkpoints"""


class Transitions(NamedTuple):
    """A minibatch of B rows, all float32."""

    obs: Tensor  # (B, D)
    actions: Tensor  # (B, A) in [-1, 1]
    rewards: Tensor  # (B, 1)
    terminated: Tensor  # (B, 1), 0 or 1; 0 where an episode was only cut off
    next_obs: Tensor  # (B, D)


def network(size_in: int, hidden_size: int, size_out: int, dropout: float = 0.0) -> nn.Sequential:
    layers = [nn.Linear(size_in, hidden_size), nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, size_out)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
    between = [nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(layers[0], *between, layers[1], *between, layers[2])


class Actor(nn.Module):
    def __init__(self, obs_size: int, action_size: int, hidden_size: int, dropout: float):
        super().__init__()
        self.net = network(obs_size, hidden_size, action_size, dropout)
        self.log_std = nn.Parameter(torch.zeros(action_size))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (B, A) in [-1, 1] and log of the standard deviation (A,)."""
        return self.net(obs).tanh(), self.log_std.clamp(*LOG_STD_BOUNDS)

    def log_prob(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Log-density (B, 1) of actions (B, A)."""
        mean, log_std = self(obs)
        z = (actions - mean) * (-log_std).exp()
        return -(0.5 * z.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(-1, keepdim=True)


class Critics(nn.ModuleDict):
    """An ensemble: q1, q2, ..."""

    def __init__(self, obs_size: int, action_size: int, hidden_size: int, count: int):
        sizes = obs_size + action_size, hidden_size, 1
        super().__init__({f"q{i}": network(*sizes) for i in range(1, count + 1)})

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Q_1, ..., Q_K: (K, B, 1)."""
        both = torch.cat([obs, actions], -1)
        return torch.stack([q(both) for q in self.values()])


class Agent(nn.Module):
    """What is saved: actor, critics, target critics and value, and the statistics of --normalize."""

    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        self.actor = Actor(obs_size, action_size, args.hidden_size, args.dropout)
        self.critics = Critics(obs_size, action_size, args.hidden_size, args.num_critics)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.value = network(obs_size, args.hidden_size, 1)
        self.obs_mean, self.obs_std = nn.Buffer(torch.zeros(obs_size)), nn.Buffer(torch.ones(obs_size))

    def normalized(self, obs: np.ndarray) -> np.ndarray:
        """Observations (N, D) as the networks see them: the same ones without --normalize."""
        return (obs - self.obs_mean.cpu().numpy()) / self.obs_std.cpu().numpy()


def value_loss(errors: Tensor, expectile: float, kind: str) -> Tensor:
    """Mean of |expectile - 1(u < 0)| u^2 over errors u: equation 5 of IQL; with |u| for a quantile."""
    sizes = errors.square() if kind == "expectile" else errors.abs()
    return (torch.where(errors > 0, expectile, 1 - expectile) * sizes).mean()


def actor_loss(
    actor: Actor, batch: Transitions, advantages: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Equation 7 of IQL, the weights and the log-densities, without gradient (B, 1). advantages (B, 1)."""
    weights = (temperature * advantages).exp().clamp(max=MAX_WEIGHT)
    logps = actor.log_prob(batch.obs, batch.actions)  # actions as they are: only a squashed density must clip them
    return -(weights * logps).mean(), weights, logps.detach()


def critic_loss(critics: Critics, batch: Transitions, next_values: Tensor, args: Args) -> tuple[Tensor, ...]:
    """L_Q; without gradient |Q_1 - y| and the targets y. All (B, 1), next_values as well."""
    target = batch.rewards + args.gamma * (1 - batch.terminated) * next_values
    errors = critics(batch.obs, batch.actions) - target
    sizes, delta = errors.square(), args.huber_delta
    if delta:
        sizes = torch.where(errors.abs() < delta, sizes / (2 * delta), errors.abs() - delta / 2)
    return sizes.mean(1).sum(), errors[0].detach().abs(), target


class Optimizers(NamedTuple):
    actor: torch.optim.Optimizer
    critics: torch.optim.Optimizer
    value: torch.optim.Optimizer


def update(agent: Agent, optimizers: Optimizers, batch: Transitions, args: Args) -> dict[str, Tensor]:
    """One step of value, actor, critics and target critics, in this order. Returns metrics, as tensors: reading them
    would make the CPU wait for the device at every update."""
    with torch.no_grad():
        q = agent.targets(batch.obs, batch.actions).quantile(args.quantile, 0)
    descend(optimizers.value, value_loss(q - agent.value(batch.obs), args.expectile, args.value_loss))
    with torch.no_grad():
        values, next_values = agent.value(torch.cat([batch.obs, batch.next_obs])).chunk(2)
    loss, weights, logps = actor_loss(agent.actor, batch, q - values, args.temperature)
    descend(optimizers.actor, loss)
    loss, td_errors, targets = critic_loss(agent.critics, batch, next_values, args)
    descend(optimizers.critics, loss)
    with torch.no_grad():
        torch._foreach_lerp_(list(agent.targets.parameters()), list(agent.critics.parameters()), args.tau)
    return {"q": q.mean(), "v": values.mean(), "weight": weights.mean(),
            "clipped": (weights == MAX_WEIGHT).float().mean(), "td_error": td_errors.mean(), "nll": -logps.mean(),
            "kurtosis": kurtosis(targets), "std": agent.actor.log_std.detach().exp().mean()}  # fmt: skip


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def kurtosis(x: Tensor) -> Tensor:
    """Fourth moment of x over the square of its variance: 3 for a normal distribution, more for heavier tails."""
    return (x - x.mean()).pow(4).mean() / x.var(correction=0).square()


def corrupt(data: Dataset, args: Args) -> None:
    """Spoils --corruption-rate of the rows: the authors' random corruption. Rewards are replaced."""
    rng = np.random.default_rng(args.seed)
    rows = rng.random(len(data.obs)) < args.corruption_rate
    noise = args.corruption_scale * rng.uniform(-1, 1, (rows.sum(), data.obs.shape[1]))
    if args.corruption == "next-observations":
        data.next_obs[rows] += noise * data.next_obs[data.known].std(0)
    elif args.corruption == "rewards":
        data.rewards[rows] = 30 * noise[:, 0]


def reward_map(data: Dataset, treatment: str) -> tuple[float, float]:
    """(factor, summand) of the rewards, of the dataset and online alike. The authors leave online rewards of locomotion
    unscaled, beside scaled ones. Raises UserError if the range of returns is to divide and is 0."""
    if treatment == "return-range":
        returns = data.trajectory_returns(data.known)
        if returns.max() == returns.min():
            same = f"all returns of the dataset are {returns.max()}, and --rewards return-range divides by their range"
            raise UserError(f"{same}: use --rewards raw")
        return 1000 / (returns.max() - returns.min()), 0.0
    return 1.0, -1.0 if treatment == "minus-one" else 0.0


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    if not is_bounded(space):
        wanted = "a Box of floats with finite bounds"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: {TITLE} needs {wanted}")


@torch.no_grad()
def act(actor: Actor, space: gym.spaces.Box, obs: np.ndarray, scale: Tensor | float,
        generator: torch.Generator) -> np.ndarray:  # fmt: skip
    """Actions (N, A) in [-1, 1] of observations (N, D); `scale` 0: the mean, 1: samples, clipped."""
    mean, log_std = actor.eval()(torch.from_numpy(obs.astype(np.float32)).to(generator.device))
    actor.train()
    noise = torch.randn(mean.shape, generator=generator, device=generator.device)
    return (mean + log_std.exp() * noise * scale).clamp(-1, 1).cpu().numpy()


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
    settings = preset(args, PRESETS, args.domain)
    data = None if args.evaluate else load_dataset(args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape[0], env.action_space
    check(args, space)
    action_size = math.prod(space.shape)
    agent = Agent(obs_size, action_size, args).to(device)

    def policy(obs: np.ndarray, *noise) -> np.ndarray:
        return to_env(act(agent.actor, space, agent.normalized(obs), *noise), space)

    score_agent = partial(evaluate, eval_envs, policy, args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    check_spaces(data, obs_size, space)
    corrupt(data, args)
    rows, (factor, summand) = data.known, reward_map(data, args.rewards)
    if args.normalize:
        agent.obs_mean.copy_(torch.from_numpy(data.obs.mean(0, np.float64)))
        agent.obs_std.copy_(torch.from_numpy(data.obs.std(0, np.float64) + 1e-3))  # as TD3+BC and CORL
    replay = ReplayBuffer(rows.sum() + args.online_steps, (obs_size, action_size, 1, 1, obs_size), device)
    replay.add(agent.normalized(data.obs[rows]), to_unit(data.actions[rows], space),
               factor * data.rewards[rows, None] + summand, data.terminated[rows, None],
               agent.normalized(data.next_obs[rows]))  # fmt: skip
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
    optimizers = Optimizers(*(adam(part.parameters()) for part in (agent.actor, agent.critics, agent.value)))
    generator = torch.Generator(device).manual_seed(args.seed)
    run = Run(args, NAME, data.name, args.max_steps + args.online_steps, ("return", "eval/return", "weight"))
    run.print(f"{data.name}: {len(data.starts)} trajectories, {rows.sum()} transitions taken of {len(data.obs)}")
    run.print(settings)
    envs, obs = make_vector(make, args, max(0, run.step - args.max_steps))
    parts = optimizers._asdict() | dict(agent=agent, generator=generator)
    online = dict(replay=replay)  # before, it is the dataset
    run.restore(**parts | (online if run.step > args.max_steps else {}))
    step, episodes = run.step, run.state.get("episodes", [])
    while step < run.total:
        # collect
        if step >= args.max_steps:
            actions = act(agent.actor, space, agent.normalized(obs), 1.0, generator)
            next_obs, true_obs, rewards, terminated, _, ended = step_vector(envs, to_env(actions, space))
            replay.add(agent.normalized(obs), actions, factor * rewards[:, None] + summand, terminated[:, None],
                       agent.normalized(true_obs))  # fmt: skip
            obs, episodes = next_obs, episodes + ended

        # update
        learning_rate = args.learning_rate
        if args.anneal_actor and step < args.max_steps:  # online, the authors do not anneal at all
            learning_rate *= 0.5 + 0.5 * math.cos(math.pi * step / args.max_steps)
        optimizers.actor.param_groups[0]["lr"] = learning_rate
        batch = Transitions(*replay.sample(args.batch_size, generator))
        metrics = update(agent, optimizers, batch, args)
        step += 1

        # evaluate
        due = run.due(step, args.eval_every) or step == args.max_steps
        if due or run.due(step, args.log_every):
            columns = {name: value.item() for name, value in metrics.items()} | episode_columns(episodes)
            columns["time/updates_per_second"], episodes = run.speed(step), []
            if due and eval_envs:
                columns |= compared(score_agent(), data, run, step)
            run.log(step, **columns)
        run.end_step(step, parts | (online | dict(episodes=episodes) if step > args.max_steps else {}))

    envs.close()
    curves = {"return": ("eval/return", "eval/return_stochastic"), "value": ("q", "v"), "weight": ("weight",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {data.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
