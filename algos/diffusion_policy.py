r"""Diffusion Policy: behaviour cloning of several actions at once, denoised step by step.

Chi et al. 2023, "Diffusion Policy: Visuomotor Policy Learning via Action Diffusion" (arXiv 2303.04137). The denoising
is that of DDPM (Ho et al. 2020, arXiv 2006.11239) with the schedule of Nichol and Dhariwal 2021 (arXiv 2102.09672).

Parent: flow_bc.py. A plan of several actions is made from the last observations, by DDPM instead of a flow.

A policy that draws one action at a time can go left, then right, where the data always goes on as it began. Here one
draw is a plan: some of its actions are executed before the next one is made. On minibatches minimises

    L(phi) = E |eps - eps_phi(s, x_k, k)|^2 / (H A),    x_k = sqrt(abar_k) x_0 + sqrt(1 - abar_k) eps,    k ~ U{1 .. K}
    act:     x_K ~ N(0, I);    x_k-1 ~ N(mean, std^2) of DDPM, from x_k and the plan clip((x_k - sqrt(1 - abar_k)
             eps_phi) / sqrt(abar_k), -1, 1);    k = K .. 1; T_a actions of x_0 are executed

    s       the last T_o observations (--n-obs-steps); in an episode's first steps its first one is repeated
    x_0     H actions (--horizon) of A numbers in [-1, 1]. The first T_o - 1 are past, the next T_a (--n-action-steps)
            are executed. At the end of a trajectory its last action is repeated
    eps     noise, N(0, I)
    abar_k  share of the plan that is left after k of K steps (--diffusion-steps), f(k / K) / f(0) with
            f(u) = cos^2((u + 0.008) / 1.008 pi / 2). A step keeps 0.001 or more: with K = 1 hardly anything of the plan
            is left, and the best answer is the mean plan
    phi     acts as its average over updates, which after n of them keeps 1 - n^-0.75 of itself (--ema-power)

Run
    python algos/diffusion_policy.py                                             the collection that ships: Hopper-v5
    python algos/diffusion_policy.py --dataset algos/environments/detour.hdf5 --max-steps 3000 --eval-every 500
                                                                                 two ways around a wall
    python algos/diffusion_policy.py --dataset mujoco/hopper/medium-v0           Minari
    python algos/diffusion_policy.py --evaluate RUN --n-action-steps 1           a saved agent plans at each step

Expect
    Of the walks around a wall 0.97 +- 0.02 arrive. With a new plan after half of the way it is 0.50 +- 0.05, for two
    plans agree half of the time; with one at each step 0.02 +- 0.02; with single actions (H, T_o and T_a 1) 0.01 +-
    0.01. With one denoising step it is 0.06 +- 0.03, with bc.py 0.03 +- 0.03 (5 seeds; benchmarks/effects.py,
    diffusion_policy-modes, diffusion_policy-plans; ten seconds each). Where the place on the way is seen
    (detour_place.hdf5) plans are not needed: single actions get 0.96 +- 0.01, a new plan at each step 0.41 +- 0.04.
    On Hopper-v5's collection the default run's return is 117, and 296 was seen with a new plan at each step (seed 1, 10
    episodes), in half a minute. We claim nothing there: flow_bc.py gets 235. What T_o gives was not measured.

Metrics
    loss                L; it does not fall to 0, for noise and plan are not known from x_k
    eval/return         of sampled plans; eval/return_stochastic: the same from other starts
    eval/score, eval/d4rl_score and eval/best_return: as in bc.py

Differences
    - A small MLP that sees k / K. The authors' code (5ba07ac) has a U-Net or a transformer, and images.
    - Adam with a constant rate; they have AdamW, warm-up and cosine. Observations are not normalised, and actions are
      stretched from the environment's bounds, not from the data's.
    - Each row of the data has a plan. They leave out those in which T_a or more actions are repeated at the end.
"""

import copy
import math
import sys
from collections.abc import Callable
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
from utils.offline import Dataset, OfflineArgs, check_spaces, compared, load_dataset

NAME, TITLE = "diffusion_policy", "Diffusion Policy"


@dataclass
class Args(OfflineArgs):
    limits = OfflineArgs.limits | dict.fromkeys(("diffusion_steps", "n_obs_steps", "n_action_steps"), (1, math.inf))
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs); env_kwargs, eval_every,
    # eval_episodes, evaluate, capture_video (EnvArgs); dataset, env_id (OfflineArgs)
    max_steps: int = 10_000
    """updates"""
    learning_rate: float = 3e-4
    """learning rate of Adam"""
    batch_size: int = 256
    """plans per update"""
    hidden_size: int = 256
    """units of the two hidden layers"""
    diffusion_steps: int = 100
    """denoising steps from noise to a plan: K"""
    horizon: int = 16
    """actions of a plan, of which the first n_obs_steps - 1 are past: H"""
    n_obs_steps: int = 2
    """observations that a plan is made from, the newest last: T_o"""
    n_action_steps: int = 8
    """actions that are executed before the next plan: T_a"""
    ema_power: float = 0.75
    """after n updates the average of the weights keeps 1 - n^-ema_power of itself"""
    top_fraction: float = 1.0
    """train on the trajectories of highest return, up to this fraction of all steps"""
    log_every: int = 500
    """updates between rows of metrics"""
    save_every: int = 5_000
    """updates between checkpoints"""


class Windows(NamedTuple):
    """A minibatch of B rows, all float32."""

    obs: Tensor  # (B, T_o D), the oldest first
    actions: Tensor  # (B, H A) in [-1, 1]; x_0


def network(size_in: int, hidden_size: int, size_out: int) -> nn.Sequential:
    layers = [nn.Linear(size_in, hidden_size), nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, size_out)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def alpha_bars(steps: int) -> Tensor:
    """(K + 1,): abar_0 = 1 .. abar_K, the squared-cosine schedule of Nichol and Dhariwal 2021 (equation 17)."""
    cosines = np.cos((np.arange(steps + 1) / steps + 0.008) / 1.008 * np.pi / 2) ** 2
    kept = (cosines[1:] / cosines[:-1]).clip(min=0.001)  # the last would be 0: no plan is found in pure noise
    return torch.tensor([1.0, *np.cumprod(kept).tolist()])


class Actor(nn.Module):
    alpha_bar: Tensor

    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        self.size, self.steps = args.horizon * action_size, args.diffusion_steps
        self.net = network(args.n_obs_steps * obs_size + self.size + 1, args.hidden_size, self.size)
        self.register_buffer("alpha_bar", alpha_bars(self.steps), persistent=False)

    def forward(self, obs: Tensor, x: Tensor, k: Tensor) -> Tensor:
        """The noise epsilon(s, x_k, k) in x_k: (B, H A). k (B, 1): integers from 1 to K."""
        return self.net(torch.cat([obs, x, k / self.steps], -1))

    def step(self, obs: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (B, H A) and standard deviation (B, 1) of x_k-1, given x_k = x. At k = 1 the deviation is 0."""
        now, before = self.alpha_bar[k], self.alpha_bar[k - 1]
        beta = 1 - now / before
        # clipped: where abar_k is small, the division magnifies errors
        plan = ((x - (1 - now).sqrt() * self(obs, x, k)) / now.sqrt()).clamp(-1, 1)
        mean = (before.sqrt() * beta * plan + (1 - beta).sqrt() * (1 - before) * x) / (1 - now)
        return mean, (beta * (1 - before) / (1 - now)).sqrt()

    def sample(self, obs: Tensor, generator: torch.Generator) -> Tensor:
        """Plans x_0 (B, H A)."""
        x = torch.randn(len(obs), self.size, generator=generator, device=obs.device)
        for k in range(self.steps, 0, -1):
            mean, std = self.step(obs, x, torch.full((len(obs), 1), k, device=obs.device))
            x = mean + std * torch.randn(x.shape, generator=generator, device=obs.device)
        return x


class Agent(nn.Module):
    """What is saved."""

    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        self.actor = Actor(obs_size, action_size, args)
        self.average = copy.deepcopy(self.actor).requires_grad_(False)  # acts


def noise_loss(actor: Actor, batch: Windows, noise: Tensor, k: Tensor) -> Tensor:
    """L(phi). noise (B, H A); k (B, 1): integers from 1 to K."""
    kept = actor.alpha_bar[k]
    x = kept.sqrt() * batch.actions + (1 - kept).sqrt() * noise
    return (actor(batch.obs, x, k) - noise).square().mean()


def ema_decay(updates: int, power: float) -> float:
    """What the average keeps of itself after `updates` updates and one more."""
    return min(1 - max(updates, 1) ** -power, 0.9999)


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Windows, generator: torch.Generator,
           decay: float) -> dict[str, Tensor]:  # fmt: skip
    """One step. Returns metrics, as tensors: reading them would make the CPU wait for the device at every update."""
    device, shape = batch.obs.device, (len(batch.obs), 1)
    noise = torch.randn(batch.actions.shape, generator=generator, device=device)
    k = torch.randint(1, agent.actor.steps + 1, shape, generator=generator, device=device)
    loss = noise_loss(agent.actor, batch, noise, k)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(agent.average.parameters()), list(agent.actor.parameters()), 1 - decay)
    return {"loss": loss.detach()}


def plan_rows(data: Dataset, n_obs_steps: int, horizon: int) -> np.ndarray:
    """(n, H): rows of the plan of each row, which is number T_o - 1 of it. Beyond its trajectory the first or last row
    is repeated, as in the authors' code."""
    first = np.repeat(data.starts, data.lengths())[:, None]
    last = np.repeat(data.starts + data.lengths() - 1, data.lengths())[:, None]
    return (np.arange(len(data.obs))[:, None] + np.arange(horizon) + 1 - n_obs_steps).clip(first, last)


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    if not is_bounded(space):
        wanted = "a Box of floats with finite bounds"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: {TITLE} needs {wanted}")
    if args.horizon < (least := args.n_obs_steps + args.n_action_steps - 1):
        raise UserError(f"--horizon {args.horizon} is below --n-obs-steps + --n-action-steps - 1 = {least}")


def act_in_evaluation(actor: Actor, space: gym.spaces.Box, args: Args) -> Callable:
    """What `evaluate` calls in one evaluation: actions (N, A) of observations (N, D). It remembers from call to call.
    The N episodes begin together, so new plans are made for all at once."""
    past, plans = [], []

    @torch.no_grad()
    def act(obs: np.ndarray, scale: Tensor, generator: torch.Generator) -> np.ndarray:
        """Whatever `scale`: a plan from 0 may lie between modes."""
        past[:] = ([*past, obs.copy()] if past else [obs.copy()] * args.n_obs_steps)[-args.n_obs_steps :]
        if not plans:
            seen = torch.from_numpy(np.concatenate(past, 1).astype(np.float32)).to(generator.device)
            plan = actor.sample(seen, generator).unflatten(1, (args.horizon, -1)).cpu().numpy()
            first = args.n_obs_steps - 1  # the action of the newest observation
            plans.extend(plan[:, i] for i in range(first, first + args.n_action_steps))
        return to_env(plans.pop(0), space)

    return act


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
    data = None if args.evaluate else load_dataset(args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape[0], env.action_space
    check(args, space)
    action_size = math.prod(space.shape)
    agent = Agent(obs_size, action_size, args).to(device)

    def score_agent(video: Path | None = None) -> dict[str, float]:
        return evaluate(eval_envs, act_in_evaluation(agent.average, space, args), args, device, video)

    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    check_spaces(data, obs_size, space)
    rows = data.top_rows(args.top_fraction)
    plans = plan_rows(data, args.n_obs_steps, args.horizon)[rows]
    replay = ReplayBuffer(rows.sum(), (args.n_obs_steps * obs_size, args.horizon * action_size), device)
    replay.add(data.obs[plans[:, : args.n_obs_steps]].reshape(len(plans), -1),
               to_unit(data.actions, space)[plans].reshape(len(plans), -1))  # fmt: skip
    optimizer = torch.optim.Adam(agent.actor.parameters(), lr=args.learning_rate, fused=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    run = Run(args, NAME, data.name, args.max_steps, ("loss", "eval/return"))
    run.print(f"{data.name}: {len(data.starts)} trajectories, {rows.sum()} transitions taken of {len(data.obs)}")
    parts = dict(agent=agent, optimizer=optimizer, generator=generator)
    run.restore(**parts)
    step = run.step
    while step < run.total:
        # update
        batch = Windows(*replay.sample(args.batch_size, generator))
        metrics = update(agent, optimizer, batch, generator, ema_decay(step, args.ema_power))
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
