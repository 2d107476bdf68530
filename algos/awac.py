r"""Advantage-weighted actor-critic (AWAC), and critic-regularised regression (CRR).

Nair, Gupta, Dalal and Levine 2020, "AWAC: Accelerating Online Reinforcement Learning with Offline Datasets" (arXiv
2006.09359). Wang et al. 2020, "Critic Regularized Regression" (arXiv 2006.15134): --weights binary.

Parent: iql.py. The values are those of the policy that is trained, at its own actions; there is no value network.

The policy clones the data's actions, each with a weight that grows with its advantage over the policy. The critics are
an ordinary actor-critic's, so the same update goes on online. On minibatches minimises

    L_Q   = E sum_i (r + gamma (1 - terminated) min_i Qbar_i(s', a') - Q_i(s, a))^2,     a' ~ pi(. | s')
    L_pi  = -E w log pi(a | s),    A = min_i Q_i(s, a) - V(s),    V(s) = 1/K sum_k min_i Q_i(s, a_k),    a_k ~ pi(. | s)
    w     = min(exp(A / lambda), 100)   exp: AWAC, and CRR exp with another bound
            1 if A > 0, else 0          binary: CRR
            B softmax(A / lambda)       softmax over the B rows of the minibatch: the code of AWAC's authors
    Qbar  target critics: after each update Qbar <- (1 - tau) Qbar + tau Q

    lambda   --temperature. Infinite: bc.py; the smaller, the more the best actions count. K: --num-action-samples

The order is CORL's: the critics first, then the policy with the new critics, then the targets. With --online-steps
training goes on in the environment: each step samples one action and makes one update on the dataset and new data.

Run
    python algos/awac.py                                                         the collection that ships: Hopper-v5
    python algos/awac.py --weights binary --num-action-samples 4                 CRR
    python algos/awac.py --online-steps 10000                                    offline, then online
    python algos/awac.py --dataset hopper_medium_replay-v2.hdf5 --normalize --temperature 0.3333 --max-steps 1000000 \
        --eval-every 5000                                                        CORL's settings: never run by us
    python algos/awac.py --evaluate RUN --eval-episodes 100 --capture-video      scores a saved agent

Expect
    The default run, Hopper-v5's collection: a return of 651 (seed 1), from 217 after 1,200 updates, in a minute of one
    core. With smaller networks, over the last half of 6,000 updates (5 seeds; benchmarks/effects.py, awac-hopper):
    588 +- 240, and bc.py 311 +- 59. We had claimed a gain of 150 in every seed, and found it in three of five. An
    infinite lambda gains nothing: 255 +- 12. CRR (binary, K = 4) got 691 +- 180.

Metrics
    q, v                means of min Q(s, a) and V(s); q - v is the mean advantage. weight, largest: of w
    clipped             share of weights at 100. nll: mean of -log pi over the batch, unweighted
    eval/score, eval/d4rl_score and eval/best_return: as in bc.py

Differences
    - The policy is iql.py's. CORL's awac.py has no tanh on the mean; rlkit has it, with std in (exp(-6), 1).
    - The authors' code, rlkit, computes all losses before the first step, does not clip sampled actions, decays the
      policy's weights by 1e-4, and has minibatches of 1,024 and lambda 0.5 or 2. Its examples with a robot hand take
      the mean action's value for V. CORL has networks of 3 layers and normalises observations.
    - d3rlpy's awac_impl.py sums the policy's loss over the minibatch, and SAC's entropy term stays in its target.
    - CRR: d3rlpy's crr_impl.py and acme's crr/losses.py have one critic, a target policy, targets copied every 100
      updates, K = 4 and the bound 20. d3rlpy acts by choosing among sampled actions by their values.
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
from utils.core import Run, UserError, main, prepare
from utils.offline import OfflineArgs, check_spaces, compared, load_dataset

NAME, TITLE = "awac", "AWAC"
LOG_STD_BOUNDS = (-5.0, 2.0)
MAX_WEIGHT = 100.0  # of exp(A / lambda)


@dataclass
class Args(OfflineArgs):
    num_envs = 1  # online
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs); env_kwargs, eval_every,
    # eval_episodes, evaluate, capture_video (EnvArgs); dataset, env_id (OfflineArgs)
    max_steps: int = 6_000
    """updates on the dataset"""
    online_steps: int = 0
    """environment steps after max_steps, one update each"""
    learning_rate: float = 3e-4
    """learning rate of Adam, for policy and critics"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.005
    """step of the target critics towards the critics"""
    weights: Literal["exp", "binary", "softmax"] = "exp"
    """weights of the policy: AWAC's, CRR's or AWAC's over the batch"""
    temperature: float = 1.0
    """lambda: advantages are divided by it"""
    num_action_samples: int = 1
    """actions of the policy whose mean value is V: K"""
    normalize: bool = False
    """subtract the dataset's mean from observations and divide them by its standard deviation"""
    batch_size: int = 256
    """transitions per update"""
    hidden_size: int = 256
    """units of the two hidden layers"""
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


def network(size_in: int, hidden_size: int, size_out: int) -> nn.Sequential:
    layers = [nn.Linear(size_in, hidden_size), nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, size_out)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


class Actor(nn.Module):
    def __init__(self, obs_size: int, action_size: int, hidden_size: int):
        super().__init__()
        self.net = network(obs_size, hidden_size, action_size)
        self.log_std = nn.Parameter(torch.zeros(action_size))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (B, A) in [-1, 1] and log of the standard deviation (A,)."""
        return self.net(obs).tanh(), self.log_std.clamp(*LOG_STD_BOUNDS)

    def log_prob(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Log-density (B, 1) of actions (B, A)."""
        mean, log_std = self(obs)
        z = (actions - mean) * (-log_std).exp()
        return -(0.5 * z.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(-1, keepdim=True)


class Critics(nn.Module):
    def __init__(self, obs_size: int, action_size: int, hidden_size: int):
        super().__init__()
        self.q1, self.q2 = (network(obs_size + action_size, hidden_size, 1) for _ in range(2))

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Q_1 and Q_2, each (B, 1)."""
        both = torch.cat([obs, actions], -1)
        return self.q1(both), self.q2(both)


class Agent(nn.Module):
    """What is saved: actor, critics and target critics, and the statistics of --normalize."""

    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        self.actor = Actor(obs_size, action_size, args.hidden_size)
        self.critics = Critics(obs_size, action_size, args.hidden_size)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.obs_mean, self.obs_std = nn.Buffer(torch.zeros(obs_size)), nn.Buffer(torch.ones(obs_size))

    def normalized(self, obs: np.ndarray) -> np.ndarray:
        """Observations (N, D) as the networks see them: the same ones without --normalize."""
        return (obs - self.obs_mean.cpu().numpy()) / self.obs_std.cpu().numpy()


def sample(actor: Actor, obs: Tensor, scale: Tensor | float, generator: torch.Generator) -> Tensor:
    """Actions (B, A) in [-1, 1]; `scale` 0: the mean, 1: samples, clipped."""
    mean, log_std = actor(obs)
    noise = torch.randn(mean.shape, generator=generator, device=generator.device)
    return (mean + log_std.exp() * noise * scale).clamp(-1, 1)


@torch.no_grad()
def policy_value(critics: Critics, actor: Actor, obs: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """V (B, 1): the mean over `count` actions of the policy of the smaller critic."""
    obs = obs.expand(count, *obs.shape).flatten(0, 1)
    q = torch.min(*critics(obs, sample(actor, obs, 1.0, generator)))
    return q.view(count, -1, 1).mean(0)


def policy_weights(advantages: Tensor, kind: str, temperature: float) -> Tensor:
    """w (B, 1) of advantages (B, 1)."""
    if kind == "binary":
        return (advantages > 0).to(advantages.dtype)
    if kind == "softmax":
        return len(advantages) * (advantages / temperature).softmax(0)
    return (advantages / temperature).exp().clamp(max=MAX_WEIGHT)


def actor_loss(actor: Actor, batch: Transitions, weights: Tensor) -> tuple[Tensor, Tensor]:
    """L_pi, and the log-densities (B, 1) without gradient. weights (B, 1)."""
    logps = actor.log_prob(batch.obs, batch.actions)  # actions as they are: only a squashed density must clip them
    return -(weights * logps).mean(), logps.detach()


def critic_loss(critics: Critics, batch: Transitions, next_values: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """L_Q, and |Q_1 - target| (B, 1) without gradient. next_values (B, 1)."""
    target = batch.rewards + gamma * (1 - batch.terminated) * next_values
    q1, q2 = critics(batch.obs, batch.actions)
    return ((q1 - target).square() + (q2 - target).square()).mean(), (q1.detach() - target).abs()


class Optimizers(NamedTuple):
    actor: torch.optim.Optimizer
    critics: torch.optim.Optimizer


def update(agent: Agent, optimizers: Optimizers, batch: Transitions, generator: torch.Generator,
           args: Args) -> dict[str, Tensor]:  # fmt: skip
    """One step of critics, actor and target critics, in this order. Returns metrics, as tensors: reading them would
    make the CPU wait for the device at every update."""
    next_values = policy_value(agent.targets, agent.actor, batch.next_obs, 1, generator)
    loss, td_errors = critic_loss(agent.critics, batch, next_values, args.gamma)
    descend(optimizers.critics, loss)
    with torch.no_grad():
        q = torch.min(*agent.critics(batch.obs, batch.actions))
    v = policy_value(agent.critics, agent.actor, batch.obs, args.num_action_samples, generator)
    weights = policy_weights(q - v, args.weights, args.temperature)
    loss, logps = actor_loss(agent.actor, batch, weights)
    descend(optimizers.actor, loss)
    with torch.no_grad():
        torch._foreach_lerp_(list(agent.targets.parameters()), list(agent.critics.parameters()), args.tau)
    return {"q": q.mean(), "v": v.mean(), "weight": weights.mean(), "largest": weights.max(),
            "clipped": (weights == MAX_WEIGHT).float().mean(), "td_error": td_errors.mean(), "nll": -logps.mean(),
            "std": agent.actor.log_std.detach().exp().mean()}  # fmt: skip


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    if args.temperature <= 0 or args.num_action_samples == 0:
        wrong = f"--temperature is {args.temperature} and --num-action-samples {args.num_action_samples}"
        raise UserError(f"{wrong}: both must be above 0")
    if not is_bounded(space):
        wanted = "a Box of floats with finite bounds"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: {TITLE} needs {wanted}")


@torch.no_grad()
def act(actor: Actor, space: gym.spaces.Box, obs: np.ndarray, scale: Tensor | float,
        generator: torch.Generator) -> np.ndarray:  # fmt: skip
    """Actions (N, A) in [-1, 1] of observations (N, D); `scale` 0: the mean, 1: samples, clipped."""
    obs = torch.from_numpy(obs.astype(np.float32)).to(generator.device)
    return sample(actor, obs, scale, generator).cpu().numpy()


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
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
    rows = data.known
    if args.normalize:
        agent.obs_mean.copy_(torch.from_numpy(data.obs.mean(0, np.float64)))
        agent.obs_std.copy_(torch.from_numpy(data.obs.std(0, np.float64) + 1e-3))  # as TD3+BC and CORL
    replay = ReplayBuffer(rows.sum() + args.online_steps, (obs_size, action_size, 1, 1, obs_size), device)
    replay.add(agent.normalized(data.obs[rows]), to_unit(data.actions[rows], space), data.rewards[rows, None],
               data.terminated[rows, None], agent.normalized(data.next_obs[rows]))  # fmt: skip
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
    optimizers = Optimizers(*(adam(part.parameters()) for part in (agent.actor, agent.critics)))
    generator = torch.Generator(device).manual_seed(args.seed)
    run = Run(args, NAME, data.name, args.max_steps + args.online_steps, ("return", "eval/return", "weight"))
    run.print(f"{data.name}: {len(data.starts)} trajectories, {rows.sum()} transitions taken of {len(data.obs)}")
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
            replay.add(agent.normalized(obs), actions, rewards[:, None], terminated[:, None],
                       agent.normalized(true_obs))  # fmt: skip
            obs, episodes = next_obs, episodes + ended

        # update
        batch = Transitions(*replay.sample(args.batch_size, generator))
        metrics = update(agent, optimizers, batch, generator, args)
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
