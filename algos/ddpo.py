r"""Denoising Diffusion Policy Optimization (DDPO), and LOOP.

Black et al. 2023, "Training Diffusion Models with Reinforcement Learning" (arXiv 2305.13301), the estimator with
importance sampling. With --advantage loo the leave-one-out baseline of Gupta et al. 2025, "A Simple and Effective
Reinforcement Learning Method for Text-to-Image Diffusion Fine-tuning" (LOOP, arXiv 2503.00897).

A generator turns noise into a sample in K steps. Each step is an action with a Gaussian density, so PPO can train the
generator from a reward of the last point, without a gradient of the reward. The generator is small: flow matching
teaches it a ring of 8 Gaussians, whatever the prompt is; then the reward teaches it to draw the mode that the prompt
names. Maximises

    J(theta) = E sum_k min[ rho_k A, clip(rho_k, 1 - eps, 1 + eps) A ]

    x_0     ~ N(0, 1);   x_k+1 = x_k + v_theta(x_k, t_k, c) / K + sigma n_k,   n_k ~ N(0, 1),   t_k = k / K
    rho_k   = p_theta(x_k+1 | x_k, c) / p_old(x_k+1 | x_k, c)     p = N(x_k + v_theta(x_k, t_k, c) / K, sigma^2)
    A       of the sample x_K with reward r, in a group of G samples of its prompt c (--advantage):
    prompt  (r - mean of the group) / std of the group        DDPO
    loo     r - mean of the others in the group               LOOP
    batch   (r - mean of the batch) / std of the batch        the authors' code without statistics of prompts
    K, sigma, G, eps      --num-steps, --noise, --num-generations, --clip-coef

Run
    python algos/ddpo.py                                           the ring: pretraining, then the reward
    python algos/ddpo.py --advantage loo                           LOOP's baseline
    python algos/ddpo.py --advantage batch --reward-offset 5       prompts of unequal rewards: the batch's mean fails
    python algos/ddpo.py --reward rewards.py:inside                your reward; your points in the plane: `draw_data`

Expect
    The reward rises from 0.19 to 0.71 in 80 updates (5 seeds). The default run takes 5 seconds of one CPU core. The
    noise of the last step stays, so no generator gets above 1 / (1 + 4 sigma^2), here 0.735: updates 101 to 200 reach
    0.719, with --noise 0.15 0.909 of 0.917. With --reward-offset 5 prompt and loo give the same curves to rounding, and
    batch has 0.17 in updates 41 to 80. Without it all three have 0.63 to 0.64 there.

Metrics
    reward              of the batch, before the update and without --reward-offset
    reward_std          mean over groups of the standard deviation of rewards; at 0 nothing can be learnt
    radius              mean distance of samples to 0; 1 on the ring. A reward without a bound drives it away
    approx_kl           mean of rho - 1 - log rho in the last epoch
    clip_fraction       share of steps outside the clip in the last epoch
    grad_norm           mean over the epochs

Differences
    - The authors train Stable Diffusion by DDIM steps of a noise-predicting network; here Euler steps of a flow.
    - The log-density is a sum over dimensions. The authors' code (kvablack/ddpo-pytorch) averages over them. Its ratio
      is ours to the power of 1 / dimensions, and its clip of 1e-4 belongs to that scale.
    - The loss is a sum over steps, that of the authors' code a mean: Adam hardly tells them apart.
    - The authors' statistics of a prompt are of its last 16 or 32 rewards, also of earlier updates, and of the batch
      until there are 16. Ours are of the group, which is drawn at once.
    - Left out: clips of advantages at 5 and of gradients at 1, and weight decay.
"""

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Normal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.core import Run, RunArgs, UserError, main, prepare
from utils.rewards import load_function

NAME, TITLE = "ddpo", "DDPO"
MODES = 8  # of the ring, and different prompts
DATA_STD = 0.1  # of each mode
PRETRAIN_BATCH, PRETRAIN_RATE = 256, 1e-3


@dataclass
class Args(RunArgs):
    # inherited: seed, device, threads, output_dir, save_every, resume, track (RunArgs)
    most_threads = 1  # more make a network this small no faster
    max_steps: int = 120
    """updates from rewards"""
    pretrain_steps: int = 2_000
    """updates of flow matching before"""
    num_steps: int = 4
    """denoising steps: K"""
    noise: float = 0.3
    """standard deviation of the noise in each step: sigma"""
    num_prompts: int = 16
    """prompts per update, drawn at random"""
    num_generations: int = 8
    """samples of each prompt: G"""
    advantage: Literal["prompt", "loo", "batch"] = "prompt"
    """what a reward is compared with"""
    update_epochs: int = 2
    """gradient steps on each batch"""
    clip_coef: float = 0.2
    """clip of the ratio of a step: epsilon"""
    learning_rate: float = 1e-3
    """learning rate of Adam"""
    hidden_size: int = 64
    """units of the two hidden layers"""
    reward: str = ""
    """FILE.py:FUNCTION, called with samples (B, 2) and prompts (B,), returns B numbers; empty: `closeness`"""
    reward_offset: float = 0.0
    """a constant is added to all rewards of a prompt, drawn once for each with this deviation: it changes no optimum"""


class Velocity(nn.Module):
    """v(x, t, c). What is saved."""

    def __init__(self, hidden_size: int):
        super().__init__()
        layers = [nn.Linear(2 + 1 + MODES, hidden_size), nn.ReLU(), nn.Linear(hidden_size, hidden_size), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(hidden_size, 2))

    def forward(self, x: Tensor, t: Tensor, prompts: Tensor) -> Tensor:
        """Velocity (B, 2) of points (B, 2) at times (B,) in [0, 1], 0 being noise, for prompts (B,)."""
        return self.net(torch.cat([x, t[:, None], nn.functional.one_hot(prompts, MODES)], 1))


def ring(numbers: Tensor) -> Tensor:
    """Centres (B, 2) of the modes with these numbers (B,), on the circle of radius 1."""
    angles = 2 * math.pi / MODES * numbers
    return torch.stack([angles.cos(), angles.sin()], 1)


def draw_data(count: int, generator: torch.Generator) -> Tensor:
    """Points (count, 2) of the whole ring."""
    numbers = torch.randint(MODES, (count,), generator=generator, device=generator.device)
    return ring(numbers) + DATA_STD * torch.randn(count, 2, generator=generator, device=generator.device)


def closeness(samples: Tensor, prompts: Tensor) -> Tensor:
    """The default reward: 1 at the centre of the prompt's mode. Samples blurred by sigma have at most
    1 / (1 + 4 sigma^2) on average."""
    return (-2 * (samples - ring(prompts)).square().sum(1)).exp()


def flow_loss(model: nn.Module, start: Tensor, data: Tensor, t: Tensor, prompts: Tensor) -> Tensor:
    """Flow matching: on the line from noise `start` to `data`, both (B, 2), the velocity is their difference."""
    x = (1 - t[:, None]) * start + t[:, None] * data
    return (model(x, t, prompts) - (data - start)).square().sum(1).mean()


def pretrain(model: nn.Module, generator: torch.Generator, args: Args) -> None:
    """Prompts are drawn apart from the data, so the model learns that they say nothing."""
    count = PRETRAIN_BATCH
    how: dict[str, Any] = dict(generator=generator, device=generator.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=PRETRAIN_RATE, fused=True)
    for _ in range(args.pretrain_steps):
        start, data, t = torch.randn(count, 2, **how), draw_data(count, generator), torch.rand(count, **how)
        loss = flow_loss(model, start, data, t, torch.randint(MODES, (count,), **how))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


class Batch(NamedTuple):
    """B samples, those of a prompt one after the other."""

    chains: Tensor  # (B, K + 1, 2), from noise to sample
    prompts: Tensor  # (B,) from 0 to 7
    rewards: Tensor  # (B,)


def next_point(model: nn.Module, x: Tensor, t: Tensor, prompts: Tensor, args: Args) -> Normal:
    """p(x_k+1 | x_k, c) of points (B, 2) at times (B,): an Euler step with noise."""
    return Normal(x + model(x, t, prompts) / args.num_steps, args.noise)


@torch.no_grad()
def sample(model: nn.Module, prompts: Tensor, normals: Tensor, args: Args) -> Tensor:
    """Chains (B, K + 1, 2) of prompts (B,). normals (B, K + 1, 2): x_0 and the noise of each step."""
    chain = [normals[:, 0]]
    for k in range(args.num_steps):
        # linspace(0, 1, K) would end at t = 1, and make steps that are too long
        t = torch.full_like(normals[:, 0, 0], k / args.num_steps)
        step = next_point(model, chain[-1], t, prompts, args)
        chain.append(step.mean + step.stddev * normals[:, k + 1])
    return torch.stack(chain, 1)


def step_logps(model: nn.Module, batch: Batch, args: Args) -> Tensor:
    """Log-density (B, K) of each step of the chains: a sum over dimensions."""
    before, after = batch.chains[:, :-1], batch.chains[:, 1:]
    t = torch.arange(args.num_steps, dtype=before.dtype, device=before.device) / args.num_steps
    prompts = batch.prompts.repeat_interleave(args.num_steps)
    step = next_point(model, before.flatten(0, 1), t.repeat(len(before)), prompts, args)
    return step.log_prob(after.flatten(0, 1)).sum(1).view(len(before), args.num_steps)


def advantages(rewards: Tensor, kind: str) -> Tensor:
    """Of rewards (P, G): G samples for each of P prompts. Deviations are those of the population."""
    if kind == "loo":
        others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
        return rewards - others
    if kind == "batch":
        return (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-8)
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, correction=0, keepdim=True) + 1e-6)


def ddpo_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, clip_coef: float) -> tuple[Tensor, Tensor]:
    """-J, and (approx_kl, clip_fraction), of log-densities (B, K) and advantages (B,). Each step has its own ratio."""
    log_ratio = logps - old_logps
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    loss = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None]).sum(1).mean()
    with torch.no_grad():
        outside = ((ratio - 1).abs() > clip_coef).float()
        return loss, torch.stack([(ratio - 1 - log_ratio).mean(), outside.mean()])


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`update_epochs` gradient steps on one batch. Returns metrics."""
    scores = advantages(batch.rewards.view(-1, args.num_generations), args.advantage).flatten()
    with torch.no_grad():
        old_logps = step_logps(model, batch, args)
    norms = []
    for _ in range(args.update_epochs):
        loss, numbers = ddpo_loss(step_logps(model, batch, args), old_logps, scores, args.clip_coef)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        optimizer.step()
    approx_kl, clip_fraction = numbers.tolist()
    return {"approx_kl": approx_kl, "clip_fraction": clip_fraction, "grad_norm": torch.stack(norms).mean().item()}


def rewards_of(reward: Callable, samples: Tensor, prompts: Tensor) -> Tensor:
    """Rewards (B,). Raises UserError where the function returns something else."""
    returned = reward(samples.clone(), prompts.clone())  # copies: the function is the user's
    with suppress(TypeError, ValueError, RuntimeError):
        rewards = torch.as_tensor(returned, dtype=samples.dtype, device=samples.device)
        if rewards.shape == prompts.shape and rewards.isfinite().all():
            return rewards
    wanted = f"one finite number for each of the {len(prompts)} samples"
    raise UserError(f"the reward function returned {returned!r:.200}: it must return {wanted}")


def collect(model: nn.Module, reward: Callable, generator: torch.Generator, args: Args) -> Batch:
    """Draws prompts, samples and their rewards."""
    how: dict[str, Any] = dict(generator=generator, device=generator.device)
    prompts = torch.randint(MODES, (args.num_prompts,), **how).repeat_interleave(args.num_generations)
    chains = sample(model, prompts, torch.randn(len(prompts), args.num_steps + 1, 2, **how), args)
    return Batch(chains, prompts, rewards_of(reward, chains[:, -1], prompts))


def check(args: Args) -> None:
    """Raises UserError for impossible settings."""
    least = dict(num_steps=1, num_prompts=1, num_generations=2, update_epochs=1, hidden_size=1)
    for name, number in least.items():
        if getattr(args, name) < number:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be at least {number}")
    if args.noise <= 0:
        raise UserError(f"--noise is {args.noise}: it must be above 0, for a step without noise has no density")


def train(args: Args) -> list[dict]:
    device = prepare(args)
    check(args)
    reward = load_function(args.reward) if args.reward else closeness
    model = Velocity(args.hidden_size).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, fused=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    offsets = args.reward_offset * torch.randn(MODES, generator=generator, device=device)
    run = Run(args, NAME, "ring", args.max_steps, ("reward",))
    parts = dict(model=model, optimizer=optimizer, generator=generator)
    if not run.restore(**parts):
        run.print(f"{args.pretrain_steps} updates of flow matching come first")
        pretrain(model, generator, args)
    step = run.step
    while step < run.total:
        # sample
        batch = collect(model, reward, generator, args)
        groups, radius = batch.rewards.view(-1, args.num_generations), batch.chains[:, -1].norm(dim=1).mean()
        columns = {"reward": groups.mean().item(), "reward_std": groups.std(1, correction=0).mean().item(),
                   "radius": radius.item()}  # fmt: skip

        # update
        columns |= update(model, optimizer, batch._replace(rewards=batch.rewards + offsets[batch.prompts]), args)
        step += 1
        run.log(step, **columns, **{"time/steps_per_second": run.speed(step)})
        run.end_step(step, parts)

    curves = {"reward": ("reward",), "radius": ("radius",), "clip fraction": ("clip_fraction",)}
    return run.finish(model.state_dict(), curves, f"{TITLE} on a ring of {MODES} Gaussians")


if __name__ == "__main__":
    main(Args, train, NAME)
