r"""Behaviour cloning (BC), and 10 %-BC.

Pomerleau 1991, "Efficient Training of Artificial Neural Networks for Autonomous Navigation", with a Gaussian policy, as
the supervised baseline of offline reinforcement learning.

The policy imitates a dataset of transitions, good and bad alike. 10 %-BC (Chen et al. 2021, arXiv 2106.01345, section
5.1; --top-fraction 0.1) imitates only the trajectories of highest return, as many as fit into that fraction of the
steps. Compare offline reinforcement learning with it, not with BC. On minibatches maximises

    J(phi) = E log pi_phi(a | s),        pi = N(mean_phi(s), diag(std^2))

    mean   tanh of a network's output: actions are stretched to [-1, 1]
    std    does not depend on the state

Run
    python algos/bc.py                                                           the collection that ships: Hopper-v5
    python algos/bc.py --top-fraction 0.1                                        10 %-BC
    python algos/bc.py --dataset hopper_medium_replay-v2.hdf5 --max-steps 1000000 --eval-every 5000
                                                                                 D4RL, as the papers train it
    python algos/bc.py --dataset mujoco/hopper/medium-v0                         Minari
    python algos/bc.py --evaluate RUN --eval-episodes 100 --capture-video        scores a saved agent

Expect
    The default run, Hopper-v5's collection: a return of 197, in half a minute on 2 CPU cores. With --top-fraction 0.1
    it is 937 (each: seed 1, mean actions, 10 episodes). The collection's best trajectory has 2,485.

Metrics
    nll                 mean of -log pi over the batch, nats of the [-1, 1] box; falls
    std                 mean of the policy's standard deviations
    eval/return         mean actions; eval/return_stochastic: sampled actions
    eval/score          100 (R - random) / (expert - random) with the returns recorded beside the data; R is eval/return
    eval/d4rl_score     the same with D4RL's constants: D4RL's files on its -v4 environments only
    eval/best_return    in the last row: the best of all evaluations. It is picked by test score; eval/return is not

Differences
    - The paper's %BC minimises the squared error of a deterministic policy. A Gaussian with state-independent std gives
      its mean the same gradient, but for a scale per action dimension, which std sets.
    - Network, policy and learning rate are iql.py's; so is the loss, at --temperature 0.
    - The learning rate is constant. Observations are not normalised.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.control import ReplayBuffer, evaluate, is_bounded, make_env, score_saved, to_env, to_unit, try_out
from utils.core import Run, UserError, main, prepare
from utils.offline import OfflineArgs, check_spaces, compared, load_dataset

NAME, TITLE = "bc", "BC"
LOG_STD_BOUNDS = (-5.0, 2.0)


@dataclass
class Args(OfflineArgs):
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs); env_kwargs, eval_every,
    # eval_episodes, evaluate, capture_video (EnvArgs); dataset, env_id (OfflineArgs)
    max_steps: int = 10_000
    """updates"""
    learning_rate: float = 3e-4
    """learning rate of Adam"""
    batch_size: int = 256
    """transitions per update"""
    hidden_size: int = 256
    """units of the two hidden layers"""
    dropout: float = 0.0
    """share of the actor's hidden units that is dropped in training"""
    top_fraction: float = 1.0
    """train on the trajectories of highest return, up to this fraction of all steps"""
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


class Agent(nn.Module):
    """What is saved."""

    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        self.actor = Actor(obs_size, action_size, args.hidden_size, args.dropout)


def actor_loss(actor: Actor, batch: Transitions) -> Tensor:
    """Negative log-likelihood."""
    return -actor.log_prob(batch.obs, batch.actions).mean()


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Transitions) -> dict[str, Tensor]:
    """One step. Returns metrics, as tensors: reading them would make the CPU wait for the device at every update."""
    loss = actor_loss(agent.actor, batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return {"nll": loss.detach(), "std": agent.actor.log_std.detach().exp().mean()}


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
    data = None if args.evaluate else load_dataset(args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape[0], env.action_space
    check(args, space)
    action_size = math.prod(space.shape)
    agent = Agent(obs_size, action_size, args).to(device)
    score_agent = partial(evaluate, eval_envs, lambda *x: to_env(act(agent.actor, space, *x), space), args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    check_spaces(data, obs_size, space)
    # IQL cannot use rows without a known next observation (time-outs in D4RL's files): left out here, too
    rows = data.known & data.top_rows(args.top_fraction)
    if not rows.any():
        raise UserError(f"--top-fraction {args.top_fraction} leaves no transition of {data.name}: raise it")
    replay = ReplayBuffer(rows.sum(), (obs_size, action_size, 1, 1, obs_size), device)
    replay.add(data.obs[rows], to_unit(data.actions[rows], space), data.rewards[rows, None],
               data.terminated[rows, None], data.next_obs[rows])  # fmt: skip
    optimizer = torch.optim.Adam(agent.actor.parameters(), lr=args.learning_rate, fused=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    run = Run(args, NAME, data.name, args.max_steps, ("nll", "eval/return"))
    run.print(f"{data.name}: {len(data.starts)} trajectories, {rows.sum()} transitions taken of {len(data.obs)}")
    parts = dict(agent=agent, optimizer=optimizer, generator=generator)
    run.restore(**parts)
    step = run.step
    while step < run.total:
        # update
        batch = Transitions(*replay.sample(args.batch_size, generator))
        metrics = update(agent, optimizer, batch)
        step += 1

        # evaluate
        due = run.due(step, args.eval_every)
        if due or run.due(step, args.log_every):
            columns = {name: value.item() for name, value in metrics.items()}
            columns["time/updates_per_second"] = run.speed(step)
            if due and eval_envs:
                columns |= compared(score_agent(), data, run, step)
            run.log(step, **columns)
        run.end_step(step, parts)

    curves = {"return": ("eval/return", "eval/return_stochastic"), "nll": ("nll",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {data.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
