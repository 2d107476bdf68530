r"""Clipped IS-weight Policy Optimization (CISPO), and Gradient-Preserving clipping Policy Optimization (GPPO).

CISPO: MiniMax 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention" (arXiv 2506.13585,
equations 4 and 5). GPPO: Su et al. 2025, "Klear-Reasoner" (arXiv 2508.07629).

Parent: grpo.py. The ratio weighs the gradient of a token within bounds, where GRPO's clip drops tokens.

A step makes several updates on its completions, so all but the first learn from stale data. GRPO's clip then gives
nothing to tokens whose probability has moved far, which are often the rare ones that an answer turns on. Here each
token keeps a gradient. Maximises

    J(theta) = E  1/(sum_i T_i) sum_i sum_t  sg[w_it] A_i log pi_theta(y_it | x, y_i,<t)

    w_it     cispo: clip(rho_it, low, high)
             gppo: min(rho_it, high) where A_i > 0, max(rho_it, low) where A_i < 0: what GRPO's clip lets through, and
             its bound where the clip cuts
    sg       no gradient goes through
    x, y_i, A_i, T_i, rho_it   as in grpo.py; i runs over all completions of the update
    low, high                  --ratio-low, --ratio-high: ratios, not distances from 1

gppo's weight of a wrong answer never falls below `low`, however unlikely the answer has become; cispo's falls with the
ratio.

Run
    python algos/cispo.py                                                            the tiny model learns countdown
    python algos/cispo.py --bounds gppo                                              GPPO
    python algos/cispo.py --task sort --max-steps 10 --num-iterations 8 --num-minibatches 1      very stale data
    python algos/cispo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing

Expect
    The default run: held-out countdown goes from greedy 0.01, pass@1 0.09 to greedy 0.52, pass@1 0.51 (seed 1, 128
    prompts; 100 steps of four updates), in 3.2 minutes on two CPU cores.
    --task sort --max-steps 6 --learning-rate 1e-4: greedy 0.95 (30 seeds).
    Eight epochs on each batch of sort, pass@1 after ten steps: CISPO 0.86 +- 0.05, GRPO's clip 0.94 +- 0.02, no bounds
    0.81 +- 0.05, GPPO 0.00 (10 seeds, standard deviations; benchmarks/effects.py, cispo-stale). So on very stale data
    the clip that drops tokens is the safer one here. A likely reason for GPPO: the weight of a wrong answer never falls
    below 0.8, so it is pushed down without end. CISPO's weight falls with the ratio. benchmarks/README.md, "Stale
    data", compares five rules at 1 to 16 updates: at its best learning rate CISPO is at most 0.03 below the clip.

Metrics
    As in grpo.py, but
    clip_fraction  share of tokens whose weight a bound holds; they keep a gradient

Differences
    - The authors of CISPO set no lower bound in effect, and do not print the upper one. Here they are 0 and 5.
    - The same name has other bounds elsewhere. TRL: min(rho, epsilon_high), a ratio as here; verl:
      1 - epsilon to 1 + epsilon_high, both from its configuration; open-instruct: at most 1 + clip_higher.
    - The authors of GPPO add 0.1 times a likelihood loss of right answers, and drop wrong tokens with a ratio above 10.
    - beta is 0 for the tiny model, as in both papers, and 0.04 for others, as in grpo.py.
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
    moments,
    set_rate,
    share,
    start,
    total,
)
from utils.lm import PolicyArgs, alarm, autocast, completion_logps, load_model, resolve, sample_all, save_model
from utils.rewards import decode, evaluate, make_scorer, sample_rows, shown

NAME, TITLE = "cispo", "CISPO"
LARGE = dict(learning_rate=1e-6, sample_batch_size=32, micro_batch_size=64, micro_batch_tokens=4096,
             max_completion_length=512, beta=0.04, precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, sample_batch_size=512, micro_batch_size=256, micro_batch_tokens=0,
                 max_completion_length=20, beta=0.0, precision="float32"),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=1e-5),
}  # fmt: skip
STD_EPSILON = 1e-4  # the paper names none; 1e-4 as in most code


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
    num_minibatches: int = 4
    """optimizer steps per update epoch, each on a share of the prompts: from the second on, pi_old is stale"""
    bounds: Literal["cispo", "gppo"] = "cispo"
    """cispo: the weight of a token is its ratio within both bounds; gppo: within the upper bound where the advantage is
    positive, the lower where it is negative"""
    ratio_low: float | None = None
    """lower bound of a weight; None: 0 for cispo, 0.8 for gppo"""
    ratio_high: float | None = None
    """upper bound of a weight; None: 5 for cispo, 1.28 for gppo"""
    beta: float | None = None
    """weight of the KL penalty; 0 loads no reference model"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """divide advantages by the standard deviation of their group or of the batch, or not at all"""
    aggregation: Literal["sequence", "token", "constant"] = "token"
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


def advantages(rewards: Tensor, scale: str) -> Tensor:
    """Rewards minus their group's mean, divided by the group's or batch's std + STD_EPSILON. (P, G) -> (P, G).

    NaN rewards are left out of means and deviations and get 0. DeepSeekMath section 4.1.2; "none": arXiv 2503.20783.
    """
    above_least = rewards - rewards.nan_to_num(torch.inf).amin(1, keepdim=True)  # equal rewards get 0, not a rounding
    centred = above_least - above_least.nanmean(1, keepdim=True)
    if scale == "group":  # the paper does not say which deviation: the unbiased one here, as in most code
        known = (~rewards.isnan()).sum(1, keepdim=True)
        variance = centred.square().nansum(1, keepdim=True) / (known - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPSILON)
    elif scale == "batch":
        centred = centred / (moments(rewards)[1] + STD_EPSILON)
    return centred.nan_to_num(0.0)


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


def policy_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """-weight * advantage * log pi per token, to be minimised, and where a bound holds the weight. arXiv 2506.13585,
    equations 4 and 5; gppo: arXiv 2508.07629. logps, old_logps (B, T), advantages (B, 1) -> (B, T), (B, T) bool."""
    low, high = {"cispo": (0.0, 5.0), "gppo": (0.8, 1.28)}[args.bounds]
    low = low if args.ratio_low is None else args.ratio_low
    high = high if args.ratio_high is None else args.ratio_high
    ratio = (logps.detach() - old_logps).exp()
    weight = ratio.clamp(low, high)
    if args.bounds == "gppo":
        weight = torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low))
    return -weight * advantages * logps, weight != ratio


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Estimate of KL(pi_theta || pi_ref) at tokens of pi_theta: non-negative, unbiased in value. Its gradient is that
    of KL(pi_ref || pi_theta) instead. arXiv 2402.03300, equation 4."""
    difference = ref_logps - logps
    return difference.exp() - difference - 1


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of completions. Returns metrics."""
    samples, groups = batch.samples, batch.rewards.view(-1, args.num_generations)
    advantage = advantages(groups, args.scale_rewards).view(-1, 1)
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
                loss, clipped = policy_loss(logps, old_logps, advantage[rows], args)
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
        each = {"reward": rewards, "advantage": advantages(groups, args.scale_rewards).flatten(), **score.each}
        run.keep(sample_rows(args.log_samples, samples, tokenizer, each))
        columns |= {
            "reward": rewards.nanmean().item(),
            "reward_std": (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean().item(),
            "frac_zero_std": (advantages(groups, "none") == 0).all(1).float().mean().item(),
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
