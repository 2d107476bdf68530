r"""Flow-matching behaviour cloning: a policy that samples an action by following a learned flow.

Lipman et al. 2022, "Flow Matching for Generative Modeling" (arXiv 2210.02747), along the straight paths of Liu et al.
2022 (arXiv 2209.03003). As a policy: the cloning part of Flow Q-Learning (Park et al. 2025, arXiv 2502.02538).

Parent: bc.py. The policy is no Gaussian: it moves noise to an action along a learned velocity.

A Gaussian around one mean cannot imitate data in which some go left and others right: its mean hits the obstacle. A
flow can have any number of modes. On minibatches minimises

    L(phi) = E |v_phi(s, x_t, t) - (a - x_0)|^2 / A,    x_t = (1 - t) x_0 + t a,    x_0 ~ N(0, I),    t ~ U(0, 1)
    act:     x_{k+1} = x_k + v_phi(s, x_k, k / K) / K,    k = 0 .. K - 1;    the action is x_K, clipped to [-1, 1]

    v      velocity; t = 0 is noise and t = 1 an action, of A numbers in [-1, 1]
    K      --flow-steps, Euler steps. With one step the noise cancels: the best v(s, x_0, 0) is E[a | s] - x_0, so every
           sample is the mean action

Run
    python algos/flow_bc.py                                                      the collection that ships: Hopper-v5
    python algos/flow_bc.py --dataset algos/environments/gates.hdf5 --max-steps 2000 --eval-every 500
                                                                                 two right answers: what flows are for
    python algos/flow_bc.py --flow-steps 1                                       without the idea: the mean action
    python algos/flow_bc.py --dataset mujoco/hopper/medium-v0                    Minari
    python algos/flow_bc.py --evaluate RUN --eval-episodes 100 --capture-video   scores a saved agent

Expect
    Of throws through one of two gates 0.86 +- 0.05 hit. With one step it is 0.00 +- 0.01, for the mean of the throws
    hits the wall; of bc.py's samples 0.16 +- 0.05 (5 seeds; benchmarks/effects.py, flow_bc-gates; ten seconds each).
    On Hopper-v5's collection the default run's return is 235 (seed 1, 10 episodes), in a quarter of a minute. We
    claim nothing there: one step and bc.py, which gets 197, do as well in some seeds.

Metrics
    loss                L; it does not fall to 0, for noise and action are not known from x_t
    eval/return         of sampled actions; eval/return_stochastic: the same from other starts
    eval/score, eval/d4rl_score and eval/best_return: as in bc.py

Differences
    - In the loss and the flow none to the authors' code of Flow Q-Learning (719d044), but for the network: they have
      four layers of 512 units without orthogonal weights, and train critics and a one-step policy beside it.
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

NAME, TITLE = "flow_bc", "flow-matching BC"


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
    flow_steps: int = 10
    """Euler steps from noise to an action: K"""
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


def network(size_in: int, hidden_size: int, size_out: int) -> nn.Sequential:
    layers = [nn.Linear(size_in, hidden_size), nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, size_out)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


class Actor(nn.Module):
    def __init__(self, obs_size: int, action_size: int, hidden_size: int):
        super().__init__()
        self.net = network(obs_size + action_size + 1, hidden_size, action_size)

    def forward(self, obs: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """The velocity v(s, x, t): (B, A). time (B, 1)."""
        return self.net(torch.cat([obs, x, time], -1))

    def flow(self, obs: Tensor, x: Tensor, steps: int) -> Tensor:
        """x_K (B, A), not clipped, of x_0 = x (B, A)."""
        for k in range(steps):  # never at t = 1: the last step begins at 1 - 1 / K
            x = x + self(obs, x, torch.full_like(x[:, :1], k / steps)) / steps
        return x


class Agent(nn.Module):
    """What is saved."""

    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        self.actor = Actor(obs_size, action_size, args.hidden_size)


def flow_loss(actor: Actor, batch: Transitions, noise: Tensor, time: Tensor) -> Tensor:
    """L(phi). noise (B, A): x_0; time (B, 1): t."""
    x = (1 - time) * noise + time * batch.actions
    return (actor(batch.obs, x, time) - (batch.actions - noise)).square().mean()


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Transitions,
           generator: torch.Generator) -> dict[str, Tensor]:  # fmt: skip
    """One step. Returns metrics, as tensors: reading them would make the CPU wait for the device at every update."""
    noise = torch.randn(batch.actions.shape, generator=generator, device=batch.obs.device)
    time = torch.rand(batch.rewards.shape, generator=generator, device=batch.obs.device)
    loss = flow_loss(agent.actor, batch, noise, time)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return {"loss": loss.detach()}


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    if not is_bounded(space):
        wanted = "a Box of floats with finite bounds"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: {TITLE} needs {wanted}")


@torch.no_grad()
def act(actor: Actor, space: gym.spaces.Box, obs: np.ndarray, scale: Tensor | float, generator: torch.Generator,
        steps: int) -> np.ndarray:  # fmt: skip
    """Samples: actions (N, A) in [-1, 1] of observations (N, D). Whatever `scale`: a flow from 0 may end between
    modes."""
    noise = torch.randn(len(obs), math.prod(space.shape), generator=generator, device=generator.device)
    obs = torch.from_numpy(obs.astype(np.float32)).to(generator.device)
    return actor.flow(obs, noise, steps).clamp(-1, 1).cpu().numpy()


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
    data = None if args.evaluate else load_dataset(args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape[0], env.action_space
    check(args, space)
    action_size = math.prod(space.shape)
    agent = Agent(obs_size, action_size, args).to(device)
    policy = partial(act, agent.actor, space, steps=args.flow_steps)
    score_agent = partial(evaluate, eval_envs, lambda *x: to_env(policy(*x), space), args, device)
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
    run = Run(args, NAME, data.name, args.max_steps, ("loss", "eval/return"))
    run.print(f"{data.name}: {len(data.starts)} trajectories, {rows.sum()} transitions taken of {len(data.obs)}")
    parts = dict(agent=agent, optimizer=optimizer, generator=generator)
    run.restore(**parts)
    step = run.step
    while step < run.total:
        # update
        batch = Transitions(*replay.sample(args.batch_size, generator))
        metrics = update(agent, optimizer, batch, generator)
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

    curves = {"return": ("eval/return", "eval/return_stochastic"), "loss": ("loss",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {data.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
