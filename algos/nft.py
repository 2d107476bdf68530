r"""Negative-aware Fine-Tuning (NFT).

Chen et al. 2025, "Bridging Supervised Learning and Reinforcement Learning in Math Reasoning" (arXiv 2505.18116).

Parent: grpo.py. A supervised loss, of right and of wrong answers, in place of the clipped surrogate.

Right answers are trained by maximum likelihood. Wrong ones are, too, under the policy that they imply: pi_old is the
mixture r pi+ + (1 - r) pi- of a policy of right answers and one of wrong ones, so the policy pi_theta that is to become
pi+ determines pi-. Minimises

    L(theta) = - E omega sum_t { R log rho_t + w (1 - R) log max[ (1 - r rho_t) / (1 - r), eps ] }

    R        reward of the completion: 1 right, 0 wrong, or between
    r        share of right answers in its group: mean(R_1..R_G)
    omega    weight of the prompt: 1 - r, or sqrt((1 - r) / r)      --omega linear, sqrt
    max      its value is bounded, its gradient is not: it is that of the first argument, over the value
    w, eps   --neg-weight, --epsilon
    rho_t, G as in grpo.py

At rho = 1 the gradient is exactly that of Dr. GRPO (omega 1 - r), or with rewards of 0 and 1 of GRPO with the
population's standard deviation (sqrt). Off-policy nothing is cut: a right answer is pushed up by omega, a wrong one
down by omega w r/(1-r) rho / max[(1 - r rho) / (1 - r), eps], which falls to 0 with rho.

Run
    python algos/nft.py                                                            the tiny model learns countdown
    python algos/nft.py --neg-weight 0                                             right answers alone
    python algos/nft.py --task sort --max-steps 10 --num-iterations 8 --num-minibatches 1      very stale data
    python algos/nft.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing
    The authors' settings: algos/README.md.

Expect
    The default run takes 1.1 minutes on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.09 to greedy
    0.53, pass@1 0.48 (seed 1, 128 prompts).
    With --task sort and eight epochs on each batch NFT's mean reward over 10 steps is 0.86, that of grpo.py with the
    same first gradient 0.88 and, without its clip, 0.79 (10 seeds; benchmarks/effects.py, nft-stale). Right answers
    alone reach 0.89: that wrong answers teach, as the paper finds, does not show in so few steps.

Metrics
    As in grpo.py, but
    clip_fraction  share of tokens, of wrong answers with r rho >= 1: eps alone keeps the logarithm finite; near 0
    frac_zero_std  groups that are all right or all wrong, which teach nothing

Differences
    - Rewards must be at most 1; below 0 counts as 0. The authors' code (NVlabs/NFT) draws prompts until enough groups
      have right and wrong answers, as dapo.py does. Here the other groups have omega 0.
    - Their dp_actor.py holds r within 0.02 and 0.98, and log rho below 10. Here neither is held.
    - It sums over tokens and completions and divides by 1000. Here the sum is divided by B * max_completion_length, as
      for Dr. GRPO; --aggregation has grpo.py's other means.
    - Models above 10 million parameters take the authors' 16 minibatches a step, the tiny one 4. beta is 0, as there.
"""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.core import Run, UserError, main, prepare
from utils.data import encode_prompt, load_task, usable
from utils.dist import (
    Means,
    Samples,
    Trained,
    averaged,
    clip_gradients,
    micro_batches,
    set_rate,
    share,
    start,
    total,
)
from utils.lm import PolicyArgs, alarm, autocast, completion_logps, load_model, resolve, sample_all, save_model
from utils.rewards import decode, evaluate, make_scorer, sample_rows, shown

NAME, TITLE = "nft", "NFT"
LARGE = dict(learning_rate=1e-6, sample_batch_size=32, micro_batch_size=64, micro_batch_tokens=4096,
             max_completion_length=512, num_minibatches=16, precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, sample_batch_size=512, micro_batch_size=256, micro_batch_tokens=0,
                 max_completion_length=20, num_minibatches=4, precision="float32"),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=1e-5),
}  # fmt: skip


@dataclass
class Args(PolicyArgs):  # and --model --precision --lora-rank --seed --device ...: utils/lm.py, utils/core.py
    task: str = "countdown"
    """countdown, sort, gsm8k, reasoning_gym:NAME, a .jsonl or .parquet file, or a hub dataset"""
    prompt_column: str = "prompt"
    """column of a dataset with the prompt: text or chat messages"""
    reward: tuple[str, ...] = ()
    """FILE.py:NAME or PACKAGE.MODULE:NAME, called as by TRL, and reward models; none: the task's own score"""
    reward_weights: tuple[float, ...] = ()
    """one weight per reward function; none: all 1"""
    combine: Literal["sum", "min", "mean-std"] = "sum"
    """several reward models as one: the least of their raw scores, or mean minus deviation. It has no weight"""
    missing_eos_penalty: float = 0.0
    """subtracted from the reward of a completion that was cut off, in training"""
    max_steps: int = 100
    """steps: each samples, then updates"""
    num_prompts: int = 64
    """prompts per step, of all processes"""
    num_generations: int = 8
    """completions per prompt: G"""
    sample_batch_size: int | None = None
    """completions sampled at once, rounded to whole prompts; limits the cache's memory"""
    log_samples: int = 0
    """prompts per step whose completions RUN/samples.jsonl keeps, besides those of evaluations"""
    max_completion_length: int | None = None
    """most new tokens per completion"""
    max_prompt_length: int | None = None
    """longer prompts are dropped; None: those that leave --max-completion-length no room in the model's context"""
    temperature: float = 1.0
    """divides the logits, in sampling and in training"""
    micro_batch_size: int | None = None
    """completions in one forward and backward pass; changes memory, not the result"""
    num_iterations: int = 1
    """update epochs per batch of completions (mu in the paper)"""
    num_minibatches: int | None = None
    """optimizer steps per update epoch, each on a share of the prompts: from the second on, pi_old is stale"""
    epsilon: float = 1.0
    """lowest value of a wrong answer's implied ratio (1 - r rho) / (1 - r), under the logarithm"""
    neg_weight: float = 1.0
    """weight of wrong answers; 0: right ones alone, which is rejection fine-tuning"""
    omega: Literal["linear", "sqrt"] = "linear"
    """weight of a prompt with a share of r right answers: 1 - r or sqrt((1 - r) / r)"""
    beta: float = 0.0
    """weight of the KL penalty; 0 loads no reference model"""
    aggregation: Literal["sequence", "token", "constant"] = "constant"
    """mean over each completion's tokens, then completions; mean over all tokens; sum over B * max_completion_length"""
    mask_truncated_completions: bool = False
    """leave truncated completions out of the loss"""
    learning_rate: float | None = None
    """peak learning rate of AdamW"""
    adam_beta2: float = 0.999
    """second-moment decay of AdamW (the first is 0.9)"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """decay after the warm-up"""
    warmup_steps: int = 0
    """steps of linear warm-up"""
    weight_decay: float = 0.0
    """decoupled weight decay"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this norm"""
    eval_every: int = 20
    """steps between evaluations; 0: at the start and the end only"""
    eval_prompts: int = 128
    """held-out prompts per evaluation"""
    eval_samples: int = 8
    """sampled answers per held-out prompt"""


class Batch(NamedTuple):
    """What this process learns from in one step. P prompts, G completions of each, B = P * G rows."""

    samples: Samples
    rewards: Tensor  # (B,) float32, NaN: skipped
    ref_logps: Tensor | None  # (B, T), None where beta is 0


def outcomes(rewards: Tensor, omega: str) -> Tensor:
    """R, r and omega of each completion; omega is 0 where groups are all right or all wrong, and where the reward is
    NaN, which does not count in r. (P, G) -> (B, 3). Raises UserError for rewards above 1."""
    if (rewards > 1).any():
        raise UserError(f"nft.py needs rewards of at most 1, right: here is {rewards.nan_to_num(0.0).max().item():g}")
    right = rewards.clamp(min=0)
    rate = right.nanmean(1, keepdim=True).expand_as(right)
    weight = 1 - rate if omega == "linear" else ((1 - rate) / rate).sqrt()
    low, high = right.nan_to_num(torch.inf).amin(1, keepdim=True), right.nan_to_num(-torch.inf).amax(1, keepdim=True)
    flat = ~(high > low) | right.isnan()
    return torch.stack([x.masked_fill(flat, 0.0).flatten() for x in (right, rate, weight)], 1)


def token_weights(mask: Tensor, aggregation: str, max_completion_length: int) -> Tensor:
    """Weight of each token's loss in the step's loss, over the B rows of all processes. mask of 0 and 1, (B, T).

    sequence: 1 / (B T_i), the paper's. Not the policy gradient: tokens of long completions count less than others.
    token: 1 / sum of all T_i of the step, as TRL and verl; DAPO's formula takes each group's own sum.
    constant: 1 / (B L_max), Dr. GRPO: all tokens count alike, so lengths bias nothing.
    """
    rows = total(torch.tensor(len(mask), device=mask.device))
    if aggregation == "sequence":
        return mask / (rows * mask.sum(1, keepdim=True).clamp(min=1))
    if aggregation == "token":
        return mask / total(mask.sum()).clamp(min=1)
    return mask / (rows * max_completion_length)


def policy_loss(logps: Tensor, old_logps: Tensor, outcomes: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood per token, under the policy for right answers and the implied one for wrong answers, and
    where the latter would be no probability. logps, old_logps (B, T), outcomes (B, 3) -> (B, T), (B, T) bool."""
    right, rate, omega = outcomes.T[:, :, None]
    implied = (1 - rate * (logps - old_logps).exp()) / (1 - rate)
    # its own gradient at a bounded value: the logarithm stays finite where r rho > 1
    bounded = implied + (implied.clamp(min=args.epsilon) - implied).detach()
    loss = -omega * (right * (logps - old_logps) + args.neg_weight * (1 - right) * bounded.log())
    return loss, (implied <= 0) & (right < 1)


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Estimate of KL(pi_theta || pi_ref) at tokens of pi_theta: non-negative, unbiased in value. Its gradient is that
    of KL(pi_ref || pi_theta) instead. arXiv 2402.03300, equation 4."""
    difference = ref_logps - logps
    return difference.exp() - difference - 1


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of completions. Returns metrics."""
    samples, groups = batch.samples, batch.rewards.view(-1, args.num_generations)
    outcome = outcomes(groups, args.omega)
    mask = samples.completion_mask
    if args.mask_truncated_completions:
        mask = mask & samples.ended[:, None]
    numbers = torch.arange(len(mask)).view(-1, args.num_generations)  # of the rows
    gap, norms = Means(), []
    for _ in range(args.num_iterations):
        means = Means()
        for minibatch in numbers.tensor_split(args.num_minibatches):  # the order of the prompts is random
            within, weights = minibatch.flatten(), torch.zeros_like(samples.logps)
            weights[within] = token_weights(mask[within], args.aggregation, args.max_completion_length)
            optimizer.zero_grad(set_to_none=True)
            for rows, inputs in micro_batches(samples, args, within):
                with autocast(model, args.precision):
                    logps, entropy = completion_logps(model, *inputs, args.temperature)
                width = logps.shape[1]
                old_logps, valid = samples.logps[rows, :width], mask[rows, :width]
                loss, clipped = policy_loss(logps, old_logps, outcome[rows], args)
                if batch.ref_logps is not None:
                    kl = k3(logps, batch.ref_logps[rows, :width])
                    loss = loss + args.beta * kl
                    means.add(valid, kl=kl)
                (loss * weights[rows, :width]).sum().backward()
                logps = logps.detach()
                means.add(valid, clip_fraction=clipped, approx_kl=k3(old_logps, logps), entropy=entropy)
                if not norms:  # before the first optimizer step
                    gap.add(valid, sampler_gap=(logps - old_logps).abs())
            norms.append(clip_gradients(model, args.max_grad_norm))
            optimizer.step()
    return gap.read() | means.read() | {"grad_norm": torch.stack(norms).mean().item()}


def collect(model, tokenizer, task, score, step: int, args: Args) -> tuple[Samples, Tensor, dict[str, float]]:
    """Samples and scores G completions for each of this process's prompts of the step. Returns rewards and columns."""
    rows = [task.train(i, args.seed) for i in share(range((step - 1) * args.num_prompts, step * args.num_prompts))]
    prompts = [encode_prompt(row, tokenizer) for row in rows]
    samples = sample_all(model, prompts, args.num_generations, args, args.temperature, "train", step)
    rows = [row for row in rows for _ in range(args.num_generations)]
    rewards, columns = score(rows, *decode(samples, tokenizer), step)
    return samples, rewards - args.missing_eos_penalty * ~samples.ended.cpu(), columns


@torch.no_grad()
def reference_logps(model, reference, samples: Samples, args: Args) -> Tensor:
    """Log-probabilities (B, T) under the reference: a model, or the policy without its LoRA adapters."""
    out, scorer = torch.zeros_like(samples.logps), reference or model
    without_adapters = nullcontext() if reference else model.disable_adapter()
    with without_adapters, autocast(model, args.precision):
        for rows, inputs in micro_batches(samples, args):
            logps, _ = completion_logps(scorer, *inputs, args.temperature)
            out[rows, : logps.shape[1]] = logps
    return out


def train(args: Args) -> list[dict]:
    device = start(prepare(args))
    task = load_task(args.task, args.prompt_column)
    model, tokenizer = load_model(args, device)
    settings = resolve(model, args, PRESETS)
    if args.num_generations < 2:
        raise UserError("--num-generations must be at least 2: a group of one has no other reward to compare with")
    task = usable(task, model, tokenizer, args)
    score = make_scorer(task, args, tokenizer, device)
    reference = load_model(args, device, frozen=True)[0] if args.beta and not args.lora_rank else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  betas=(0.9, args.adam_beta2), weight_decay=args.weight_decay, fused=True)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"))
    run.print(settings)
    parts = {"trained": Trained(model, optimizer)}
    if not run.restore(**parts):
        run.log(0, **evaluate(model, tokenizer, task, score, args, 0, run.keep))
    model.train()
    while run.step < args.max_steps:
        step, begun = run.step + 1, time.perf_counter()
        rate = set_rate(optimizer, step, args)

        # collect
        samples, rewards, columns = collect(model, tokenizer, task, score, step, args)
        sampled, due = time.perf_counter(), run.due(step, args.eval_every)
        if step == 1:
            run.print(shown(samples, tokenizer, rewards.tolist()))
        ref_logps = reference_logps(model, reference, samples, args) if args.beta else None

        # update
        columns |= update(model, optimizer, Batch(samples, rewards.to(device), ref_logps), args)
        alarm(columns.get("sampler_gap"), run, args)

        # evaluate
        groups, lengths = rewards.view(-1, args.num_generations), samples.completion_mask.sum(1).float()
        run.keep(sample_rows(args.log_samples, samples, tokenizer, {"reward": rewards, **score.each}))
        columns |= {
            "reward": rewards.nanmean().item(),
            "reward_std": (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean().item(),
            "frac_zero_std": (outcomes(groups, args.omega)[:, 2].view_as(groups) == 0).all(1).float().mean().item(),
            "length": lengths.mean().item(),
            "truncated": 1 - samples.ended.float().mean().item(),
            "learning_rate": rate,
            "time/sample": sampled - begun,
            "time/step": time.perf_counter() - begun,
        }
        columns["time/tokens_per_second"] = total(lengths.sum()).item() / columns["time/step"]
        if due:
            columns |= evaluate(model, tokenizer, task, score, args, step, run.keep)
        run.log(step, **averaged(columns))
        run.end_step(step, parts)

    curves: dict = {"reward": ("reward",), "held-out": ("eval/*",), "entropy per token": ("entropy",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
