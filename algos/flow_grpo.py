r"""Flow-GRPO.

Liu et al. 2025, "Flow-GRPO: Training Flow Matching Models via Online RL" (arXiv 2505.05470).

Parent: ddpo.py. The steps are those of an SDE that keeps the flow's distribution; inference adds no noise.

A flow draws samples by an ODE: only its start is random, and its steps have no density. An SDE has the same
distribution at each time if its steps are small. They are Gaussian, so PPO can train the flow. Training takes few of
them, and inference many steps of the ODE. Maximises

    J(theta) = E sum_k { min[ rho_k A, clip(rho_k, 1 - eps, 1 + eps) A ] - beta KL_k }

    x_0     ~ N(0, 1);   x_k+1 = m_theta(x_k, t_k, c) + s_k sqrt(h) n_k,   n_k ~ N(0, 1),   t_k = k / K,   h = 1 / K
    m       = x + h (v_theta(x, t, c) + s_k^2 / 2 * (t v_theta(x, t, c) - x) / (1 - t))    the fraction is the score
    s_k     = a sqrt((1 - t_k) / max(t_k, h))
    KL_k    of N(m_theta, s_k^2 h) to N(m_ref, s_k^2 h): |m_theta - m_ref|^2 / (2 s_k^2 h), ref the pretrained flow
    rho_k   = p_theta(x_k+1 | x_k, c) / p_old(x_k+1 | x_k, c)
    A       = (r - mean of the group) / std of the group, of the sample x_K with reward r; --advantage as in ddpo.py
    K, a, beta, eps       --num-steps, --noise-level, --beta, --clip-coef

Run
    python algos/flow_grpo.py                                      the ring: pretraining, then the reward
    python algos/flow_grpo.py --beta 0.1                           stays closer to the pretrained flow
    python algos/flow_grpo.py --reward rewards.py:inside           your reward; your points in the plane: `draw_data`

Expect
    eval/reward rises from 0.23 to 0.98 in 80 updates (5 seeds). It stays below 0.3 with --noise-level 0.05, and below
    0.37 with --beta 1, which keeps kl at 0.15 instead of 5.9. The default run takes 5 seconds of one CPU core. ddpo.py
    gets no more than 0.735, for its noise stays in the sample. The ODE brings that gain, not the SDE: flows that were
    trained with ddpo.py's noise have 0.97 to 0.99 by the ODE, too (3 other seeds). The SDE's own samples get 0.86.

Metrics
    reward              of the batch, with the SDE's noise, before the update and without --reward-offset
    eval/reward         of the ODE in --eval-steps steps, after the update
    kl                  sum of KL_k in the last epoch, also with --beta 0. To draw one of 8 modes takes log 8 = 2.08
    approx_kl, clip_fraction, grad_norm, reward_std, radius        as in ddpo.py

Differences
    - Time runs from noise to data, as in ddpo.py, and the paper's runs back. Our steps are equal.
    - Densities and KL are sums over dimensions and steps. The authors' code (yifan123/flow_grpo) has means, and its KL
      lacks the division by h: its clip of 1e-4 and its beta of 0.01 to 0.04 belong to those scales.
    - Their settings subtract the group's mean, but divide by the deviation of the batch, and leave out the last step.
    - Left out: clips of advantages at 5 and of gradients at 1, weight decay, the moving average of the weights,
      guidance while training, and that samples of advantage 0 are dropped.
"""

import copy
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.core import Run, RunArgs, UserError, main, prepare
from utils.rewards import load_function

NAME, TITLE = "flow_grpo", "Flow-GRPO"
MODES = 8  # of the ring, and different prompts
DATA_STD = 0.1  # of each mode
PRETRAIN_BATCH, PRETRAIN_RATE = 256, 1e-3
EVAL_SAMPLES = 64  # of each prompt


@dataclass
class Args(RunArgs):
    # inherited: seed, device, threads, output_dir, save_every, resume, track (RunArgs)
    most_threads = 1  # more make a network this small no faster
    max_steps: int = 120
    """updates from rewards"""
    pretrain_steps: int = 2_000
    """updates of flow matching before"""
    num_steps: int = 4
    """denoising steps in training: K"""
    noise_level: float = 0.7
    """noise of the SDE: a"""
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
    beta: float = 0.0
    """weight of the KL penalty towards the pretrained flow"""
    eval_every: int = 10
    """updates between evaluations; 0: at the end only"""
    eval_steps: int = 40
    """steps of the ODE in an evaluation"""
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
    """p(x_k+1 | x_k, c) of points (B, 2) at times (B,): an Euler step of the SDE with the marginals of the flow."""
    v, t = model(x, t, prompts), t[:, None]
    score = (t * v - x) / (1 - t)  # gradient of the log-density of x_t
    # at t = 0 the authors' code, too, divides by the next step's t
    variance = args.noise_level**2 * (1 - t) / t.clamp(min=1 / args.num_steps)
    return Normal(x + (v + variance / 2 * score) / args.num_steps, (variance / args.num_steps).sqrt())


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


@torch.no_grad()
def solve(model: nn.Module, x: Tensor, prompts: Tensor, num_steps: int) -> Tensor:
    """Samples (B, 2) of the flow's ODE from noise (B, 2): inference adds no noise, and may take more steps."""
    for k in range(num_steps):
        x = x + model(x, torch.full_like(x[:, 0], k / num_steps), prompts) / num_steps
    return x


def chain_steps(model: nn.Module, batch: Batch, args: Args) -> Normal:
    """Distributions (B, K, 2) of each step of the chains."""
    before = batch.chains[:, :-1]
    t = torch.arange(args.num_steps, dtype=before.dtype, device=before.device) / args.num_steps
    prompts = batch.prompts.repeat_interleave(args.num_steps)
    step = next_point(model, before.flatten(0, 1), t.repeat(len(before)), prompts, args)
    return Normal(step.mean.view(before.shape), step.stddev.view(before.shape))


def logps_of(steps: Normal, batch: Batch) -> Tensor:
    """Log-density (B, K) of each step of the chains: a sum over dimensions."""
    return steps.log_prob(batch.chains[:, 1:]).sum(2)


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


def update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, args: Args,
           reference: nn.Module) -> dict[str, float]:  # fmt: skip
    """`update_epochs` gradient steps on one batch. Returns metrics."""
    scores = advantages(batch.rewards.view(-1, args.num_generations), args.advantage).flatten()
    with torch.no_grad():
        old_logps = logps_of(chain_steps(model, batch, args), batch)
        reference_steps = chain_steps(reference, batch, args)
    norms = []
    for _ in range(args.update_epochs):
        steps = chain_steps(model, batch, args)
        kl = kl_divergence(steps, reference_steps).sum((1, 2)).mean()
        loss, numbers = ddpo_loss(logps_of(steps, batch), old_logps, scores, args.clip_coef)
        optimizer.zero_grad(set_to_none=True)
        (loss + args.beta * kl).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        optimizer.step()
    approx_kl, clip_fraction = numbers.tolist()
    return {"approx_kl": approx_kl, "clip_fraction": clip_fraction, "kl": kl.item(),
            "grad_norm": torch.stack(norms).mean().item()}  # fmt: skip


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


def evaluate(model: nn.Module, reward: Callable, device: torch.device, args: Args) -> float:
    """Mean reward of the ODE's samples. Prompts and noise are always the same."""
    prompts = torch.arange(MODES, device=device).repeat(EVAL_SAMPLES)
    noise = torch.randn(len(prompts), 2, generator=torch.Generator(device).manual_seed(0), device=device)
    return rewards_of(reward, solve(model, noise, prompts, args.eval_steps), prompts).mean().item()


def check(args: Args) -> None:
    """Raises UserError for impossible settings."""
    least = dict(num_steps=1, num_prompts=1, num_generations=2, update_epochs=1, hidden_size=1, eval_steps=1)
    for name, number in least.items():
        if getattr(args, name) < number:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}: it must be at least {number}")
    if args.noise_level <= 0:
        raise UserError(f"--noise-level is {args.noise_level}: it must be above 0, for an ODE's step has no density")


def train(args: Args) -> list[dict]:
    device = prepare(args)
    check(args)
    reward = load_function(args.reward) if args.reward else closeness
    model = Velocity(args.hidden_size).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate, fused=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    offsets = args.reward_offset * torch.randn(MODES, generator=generator, device=device)
    run = Run(args, NAME, "ring", args.max_steps, ("reward", "eval/reward"))
    reference = copy.deepcopy(model).requires_grad_(False)
    parts = dict(model=model, optimizer=optimizer, generator=generator, reference=reference)
    if not run.restore(**parts):
        run.print(f"{args.pretrain_steps} updates of flow matching come first")
        pretrain(model, generator, args)
        reference.load_state_dict(model.state_dict())
    step = run.step
    while step < run.total:
        # sample
        batch = collect(model, reward, generator, args)
        groups, radius = batch.rewards.view(-1, args.num_generations), batch.chains[:, -1].norm(dim=1).mean()
        columns = {"reward": groups.mean().item(), "reward_std": groups.std(1, correction=0).mean().item(),
                   "radius": radius.item()}  # fmt: skip

        # update
        shifted = batch._replace(rewards=batch.rewards + offsets[batch.prompts])
        columns |= update(model, optimizer, shifted, args, reference)
        step += 1

        # evaluate
        if run.due(step, args.eval_every):
            columns["eval/reward"] = evaluate(model, reward, device, args)
        run.log(step, **columns, **{"time/steps_per_second": run.speed(step)})
        run.end_step(step, parts)

    curves = {"reward": ("reward", "eval/reward"), "radius": ("radius",), "clip fraction": ("clip_fraction",)}
    return run.finish(model.state_dict(), curves, f"{TITLE} on a ring of {MODES} Gaussians")


if __name__ == "__main__":
    main(Args, train, NAME)
