r"""Behaviour cloning (BC), and 10 %-BC.

Pomerleau 1991, "Efficient Training of Artificial Neural Networks for Autonomous Navigation", with a Gaussian policy, as
the supervised baseline of offline reinforcement learning. On minibatches of a dataset maximises

    J(phi) = E log pi_phi(a | s),        pi = N(mean_phi(s), diag(std^2))

    mean   tanh of a network's output: actions are stretched to [-1, 1]
    std    does not depend on the state

--top-fraction 0.1 is %BC (Chen et al. 2021, arXiv 2106.01345, section 5.1): only the trajectories of highest return, as
many as fit into that fraction of the steps. What offline reinforcement learning adds shows beside it, not beside BC.

Differences
    - The fraction is of steps, as in the paper's code. CORL keeps a fraction of the trajectories.
    - The paper's %BC minimises the squared error of a deterministic policy. The mean of a Gaussian whose std does not
      depend on the state has the same gradient, but for the scale of each action, which std sets.
    - Network, policy and learning rate are those of iql.py, whose loss at temperature 0 this is. Transitions are the
      same, too: the last step before a time-out of D4RL's files, which lack its next observation, is left out.
    - The learning rate is constant. Observations are not normalised.

Metrics
    nll                 mean of -log pi over the batch, nats of the [-1, 1] box; falls
    std                 mean of the policy's standard deviations
    eval/return         mean over --eval-episodes, mean actions; eval/return_stochastic: sampled actions
    eval/score          100 (R - random) / (expert - random) with the returns recorded beside the data
    eval/d4rl_score     the same with D4RL's constants: D4RL's files on its -v4 environments only
    eval/best_return    in the last row: the best of all evaluations, which is selection on the test; the last is not

Run
    python algos/bc.py                                                           the collection that ships: Hopper-v5
    python algos/bc.py --top-fraction 0.1                                        10 %-BC
    python algos/bc.py --dataset hopper_medium_replay-v2.hdf5 --max-steps 1000000 --eval-every 5000
                                                                                 D4RL, as the papers train it
    python algos/bc.py --dataset mujoco/hopper/medium-v0                         Minari
    python algos/bc.py --evaluate RUN --eval-episodes 100 --capture-video        scores a saved agent

Expect
    The default run, Hopper-v5's collection, in less than a minute on a CPU: 210 (seed 1, mean actions, 10 episodes; the
    best trajectory has 2,485); with --top-fraction 0.1 it is 937, and 1,147 at best.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.checkpoint import saving
from utils.envs import evaluate, make_env, saved_agent
from utils.errors import UserError, check_numbers
from utils.offline import Dataset, OfflineArgs, check_spaces, load_dataset
from utils.replay import ReplayBuffer
from utils.run import Run, main, prepare
from utils.spaces import to_env, to_unit

LOG_STD_BOUNDS = (-5.0, 2.0)
RANGES = {  # what numbers must be
    "at least 1": "max_steps batch_size hidden_size log_every eval_episodes",
    "at least 0": "eval_every",
    "above 0": "learning_rate",
    "above 0 and at most 1": "top_fraction",
    "at least 0 and below 1": "dropout",
}


@dataclass
class Args(OfflineArgs):
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


def top_rows(data: Dataset, fraction: float) -> np.ndarray:
    """(n,) bool: rows of the trajectories of highest return, the best one and as many more, in order, as stay below
    this fraction of all rows."""
    lengths = np.diff(data.starts, append=len(data.obs))
    best_first = np.argsort(-data.trajectory_returns(), kind="stable")
    below = np.cumsum(lengths[best_first]) < fraction * len(data.obs)
    below[0] = True
    kept = best_first if fraction == 1 else best_first[below]
    return np.isin(data.trajectory(), kept)


def check(args: Args) -> None:
    """Raises UserError for settings that no run can have."""
    check_numbers(args, RANGES)
    if args.capture_video and not args.evaluate:
        raise UserError("--capture-video works with --evaluate RUN: it records a saved agent")


@torch.no_grad()
def act(actor: Actor, space: gym.spaces.Box, obs: np.ndarray, scale: Tensor | float, generator) -> np.ndarray:
    """Actions (N, A) in [-1, 1] of observations (N, D); `scale` 0: the mean, 1: samples, clipped."""
    mean, log_std = actor.eval()(torch.from_numpy(obs.astype(np.float32)).to(generator.device))
    actor.train()
    noise = torch.randn(mean.shape, generator=generator, device=generator.device)
    return (mean + log_std.exp() * noise * scale).clamp(-1, 1).cpu().numpy()


def train(args: Args) -> list[dict]:
    device = prepare(args)
    check(args)
    data = None if args.evaluate else load_dataset(args)
    make = partial(make_env, args.env_id, args.env_kwargs)
    env = make()
    obs_size, space = env.observation_space.shape[0], env.action_space
    env.close()
    action_size = math.prod(space.shape or ())
    if data is not None:
        check_spaces(data, obs_size, space)
    agent = Agent(obs_size, action_size, args).to(device)
    scored = partial(evaluate, make, lambda *inputs: to_env(act(agent.actor, space, *inputs), space),
                     args.eval_episodes, args.seed, device)  # fmt: skip
    if args.evaluate:
        agent.load_state_dict(saved_agent(args)["agent"])
        print(json.dumps(scored(Path(args.evaluate) / "video" if args.capture_video else None)))
        return []
    rows = data.known & top_rows(data, args.top_fraction)
    if not rows.any():
        raise UserError(f"--top-fraction {args.top_fraction} leaves no transition of {data.name}: raise it")
    replay = ReplayBuffer(rows.sum(), (obs_size, action_size, 1, 1, obs_size), device)
    replay.add(data.obs[rows], to_unit(data.actions[rows], space), data.rewards[rows, None],
               data.terminated[rows, None], data.next_obs[rows])  # fmt: skip
    optimizer = torch.optim.Adam(agent.actor.parameters(), lr=args.learning_rate, fused=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    run = Run(args, "bc", args.env_id, args.max_steps, ("nll", "eval/return"))
    run.print(f"{data.name}: {len(data.starts)} trajectories, {rows.sum()} transitions taken of {len(data.obs)}")

    def state() -> dict:
        return {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "generator": generator.get_state(),
                "best": best}  # fmt: skip

    step, best = 0, -math.inf
    if run.state is not None:
        agent.load_state_dict(run.state["agent"])
        optimizer.load_state_dict(run.state["optimizer"])
        generator.set_state(run.state["generator"].cpu())
        step, best = run.state["step"], run.state["best"]
    run.restore_rng()
    logged, begun = step, time.perf_counter()
    while step < run.total:
        # update
        batch = Transitions(*replay.sample(args.batch_size, generator))
        columns = update(agent, optimizer, batch)
        step += 1

        # evaluate
        due = step == run.total or (args.eval_every and step % args.eval_every == 0)
        if due or step % args.log_every == 0:
            now = time.perf_counter()
            numbers = {name: value.item() for name, value in columns.items()}
            if due:
                with saving(run, step, state, numbers):
                    numbers |= scored()
                numbers |= data.score(numbers["eval/return"])
                best = max(best, numbers["eval/return"])
                if step == run.total:
                    numbers["eval/best_return"] = best
                    run.print(f"return: {numbers['eval/return']:.1f} at the end, {best:.1f} at best, of "
                              f"{args.eval_episodes} episodes with mean actions, seed {args.seed}")  # fmt: skip
            run.log(step, **numbers, **{"time/updates_per_second": (step - logged) / (now - begun)})
            logged, begun = step, time.perf_counter()
        run.end_step(step, state)

    curves = {"return": ("eval/return", "eval/return_stochastic"), "nll": ("nll",)}
    return run.finish(lambda folder: save_file(agent.state_dict(), folder / "model.safetensors"), curves,
                      f"BC on {data.name}")  # fmt: skip


if __name__ == "__main__":
    main(Args, train)
