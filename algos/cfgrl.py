r"""Classifier-free guidance reinforcement learning (CFGRL).

Frans, Park, Abbeel and Levine 2025, "Diffusion Guidance Is a Controllable Policy Improvement Operator" (arXiv
2505.23458).

Parent: flow_bc.py. The flow is told which actions were good, and is guided towards them beyond what the data shows.

A label o says whether an action was good. One network learns the flow of all actions and that of the good ones. The
difference of their velocities is a direction, and guidance goes further along it. Training is cloning. On minibatches
minimises

    L(phi) = E |v_phi(s, x_t, t, o) - (a - x_0)|^2 / A    x_t, x_0, t as in flow_bc.py; o is dropped with probability p
    act:     x_{k+1} = x_k + [v(none) + w (v(good) - v(none))] / K,    v(o) = v_phi(s, x_k, k / K, o)

    o      --label top: the row is of the trajectories of highest return, --top-fraction of all steps
           --label advantage: A(s, a) >= 0 by the critics of an iql.py run, --critic
    w      --guidance: 0 clones all rows, 1 the good ones. More goes further, towards a policy in proportion to
           pi(a | s) p(good | s, a)^w. Only roughly: guided velocities are not exactly the flow of that policy
    p      --label-dropout

Run
    python algos/cfgrl.py                                                        the collection that ships: Hopper-v5
    python algos/cfgrl.py --guidance 1                                           without the idea: clones the good ones
    python algos/cfgrl.py --evaluate RUN --guidance 3                            another guidance of the same network

Expect
    Hopper-v5's collection, of which half is labelled good: 719 +- 120 in the second half of the run, 582 +- 62 at
    --guidance 1, which clones the good half, and 323 +- 32 at 0, which clones all (5 seeds; benchmarks/effects.py,
    cfgrl-hopper). It takes half a minute on one core. At guidance 5 returns fall again (pilots of 2 seeds: 440 to 640):
    the flow leaves the data. With the paper's label, --label advantage, by critics of iql.py --expectile 0.9, it gets
    993 +- 150, and 908 +- 160 at --guidance 1 (5 seeds; cfgrl-advantage). Critics of 5,000 updates helped little or
    not at all (pilots of 2 seeds, one at the default expectile).

Metrics
    loss                L. good: share of the rows that are labelled good
    eval/return         of sampled actions; eval/return_stochastic: the same from other starts
    eval/score, eval/d4rl_score and eval/best_return: as in bc.py

Differences
    - Network and settings are flow_bc.py's, and the critics a finished run's. The authors (kvfrans/cfgrl_submit,
      545677e) train IQL's critics beside the flow, with expectile 0.9. Their flow of OGBench is ours; that of ExORL
      learns v(good) from good rows alone, with no label bad, and v(none) from all rows with weight 0.1.
    - --label top is ours: it needs no critics.
    - The label has two inputs, good and bad. Both are 0 where it is dropped.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.control import ReplayBuffer, evaluate, is_bounded, make_env, score_saved, to_env, to_unit, try_out
from utils.core import Run, UserError, main, prepare
from utils.offline import Dataset, OfflineArgs, check_spaces, compared, load_dataset

NAME, TITLE = "cfgrl", "CFGRL"


@dataclass
class Args(OfflineArgs):
    limits = OfflineArgs.limits | {"label_dropout": (0, 1)}
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
    label: Literal["top", "advantage"] = "top"
    """what makes an action good: its trajectory's return, or its advantage"""
    top_fraction: float = 0.5
    """of --label top: the trajectories of highest return are good, up to this fraction of all steps"""
    critic: str = ""
    """of --label advantage: the folder of an iql.py run on the same dataset"""
    label_dropout: float = 0.1
    """probability that a label is dropped: p"""
    guidance: float = 2.0
    """weight of the way from all actions to the good ones: w"""
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
    labels: Tensor  # (B, 2): 1, 0 for a good action, 0, 1 for another


def network(size_in: int, hidden_size: int, size_out: int) -> nn.Sequential:
    layers = [nn.Linear(size_in, hidden_size), nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, size_out)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


class Actor(nn.Module):
    def __init__(self, obs_size: int, action_size: int, hidden_size: int):
        super().__init__()
        self.net = network(obs_size + action_size + 1 + 2, hidden_size, action_size)

    def forward(self, obs: Tensor, x: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        """The velocity v(s, x, t, o): (B, A). time (B, 1); labels (B, 2), 0, 0 where there is none."""
        return self.net(torch.cat([obs, x, time, labels], -1))

    def flow(self, obs: Tensor, x: Tensor, steps: int, guidance: float) -> Tensor:
        """x_K (B, A), not clipped, of x_0 = x (B, A)."""
        none, good = obs.new_zeros(len(obs), 2), obs.new_tensor([[1.0, 0.0]]).expand(len(obs), 2)
        for k in range(steps):  # never at t = 1: the last step begins at 1 - 1 / K
            time = torch.full_like(x[:, :1], k / steps)
            x = x + torch.lerp(self(obs, x, time, none), self(obs, x, time, good), guidance) / steps
        return x


class Agent(nn.Module):
    """What is saved."""

    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        self.actor = Actor(obs_size, action_size, args.hidden_size)


def flow_loss(actor: Actor, batch: Transitions, noise: Tensor, time: Tensor, kept: Tensor) -> Tensor:
    """L(phi). noise (B, A): x_0; time (B, 1): t; kept (B, 1): 0 where the label is dropped, else 1."""
    x = (1 - time) * noise + time * batch.actions
    return (actor(batch.obs, x, time, kept * batch.labels) - (batch.actions - noise)).square().mean()


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Transitions, generator: torch.Generator,
           label_dropout: float) -> dict[str, Tensor]:  # fmt: skip
    """One step. Returns metrics, as tensors: reading them would make the CPU wait for the device at every update."""
    noise = torch.randn(batch.actions.shape, generator=generator, device=batch.obs.device)
    time = torch.rand(batch.rewards.shape, generator=generator, device=batch.obs.device)
    kept = torch.rand(batch.rewards.shape, generator=generator, device=batch.obs.device) >= label_dropout
    loss = flow_loss(agent.actor, batch, noise, time, kept)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return {"loss": loss.detach(), "good": batch.labels[:, 0].mean()}


def better_rows(data: Dataset, space: gym.spaces.Box, folder: str) -> np.ndarray:
    """(n,) bool: rows with min_i Qbar_i(s, a) - V(s) >= 0 by the iql.py run in `folder`. Raises UserError where there
    is none, or one of other observations or actions."""
    path, size = Path(folder) / "model" / "model.safetensors", data.obs.shape[1] + math.prod(space.shape)
    w = load_file(path) if path.is_file() else {}
    if "value.6.weight" not in w or w["targets.q1.0.weight"].shape[1] != size:
        wanted = "--label advantage needs the folder of a finished iql.py run on the same dataset"
        raise UserError(f"--critic {folder or '(none)'}: {wanted}")
    obs = (torch.from_numpy(data.obs) - w["obs_mean"]) / w["obs_std"]
    both = torch.cat([obs, torch.from_numpy(to_unit(data.actions, space)).float()], 1)

    def value(name: str, x: Tensor) -> Tensor:
        for layer in (0, 3, 6):
            x = nn.functional.linear(x.relu() if layer else x, w[f"{name}.{layer}.weight"], w[f"{name}.{layer}.bias"])
        return x[:, 0]

    q = torch.min(value("targets.q1", both), value("targets.q2", both))
    return (q >= value("value", obs)).numpy()


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    if not is_bounded(space):
        wanted = "a Box of floats with finite bounds"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: {TITLE} needs {wanted}")


@torch.no_grad()
def act(actor: Actor, space: gym.spaces.Box, obs: np.ndarray, scale: Tensor | float, generator: torch.Generator,
        steps: int, guidance: float) -> np.ndarray:  # fmt: skip
    """Samples: actions (N, A) in [-1, 1] of observations (N, D). Whatever `scale`: a flow from 0 may end between
    modes."""
    noise = torch.randn(len(obs), math.prod(space.shape), generator=generator, device=generator.device)
    obs = torch.from_numpy(obs.astype(np.float32)).to(generator.device)
    return actor.flow(obs, noise, steps, guidance).clamp(-1, 1).cpu().numpy()


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
    data = None if args.evaluate else load_dataset(args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape[0], env.action_space
    check(args, space)
    action_size = math.prod(space.shape)
    agent = Agent(obs_size, action_size, args).to(device)
    policy = partial(act, agent.actor, space, steps=args.flow_steps, guidance=args.guidance)
    score_agent = partial(evaluate, eval_envs, lambda *x: to_env(policy(*x), space), args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    check_spaces(data, obs_size, space)
    # IQL cannot use rows without a known next observation (time-outs in D4RL's files): left out here, too
    rows, top = data.known, args.label == "top"
    good = data.top_rows(args.top_fraction) if top else better_rows(data, space, args.critic)
    replay = ReplayBuffer(rows.sum(), (obs_size, action_size, 1, 1, obs_size, 2), device)
    replay.add(data.obs[rows], to_unit(data.actions[rows], space), data.rewards[rows, None],
               data.terminated[rows, None], data.next_obs[rows], np.stack([good, ~good], 1)[rows])  # fmt: skip
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
        metrics = update(agent, optimizer, batch, generator, args.label_dropout)
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
