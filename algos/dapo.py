r"""Decoupled Clip and Dynamic sAmpling Policy Optimization (DAPO).

Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv 2503.14476, section 3,
equations 8 and 13).

Parent: grpo.py. New groups replace those that teach nothing, and answers near the length limit lose reward.

A group with equal rewards has no advantage, so prompts are drawn until enough groups have different rewards, at most
--max-sampling-rounds times. The loss is a mean over all tokens of the batch, the upper clip is wider, and there is no
KL penalty. Maximises

    J(theta) = E  1/sum_i T_i  sum_i sum_t min[ rho_it A_i, clip(rho_it, 1 - eps, 1 + eps_high) A_i ]
               over groups in which not all R_i are equal

    R'_i     = R_i + max(-1, min(0, (L_max - L_cache - T_i) / L_cache))   reward with the overlong penalty
    A_i      = (R'_i - mean(R'_1..R'_G)) / std(R'_1..R'_G)            advantage, the same for every token of y_i
    L_max, L_cache     --max-completion-length, --overlong-buffer
    x, y_i, R_i, rho_it, T_i, G, eps, eps_high   as in grpo.py

With --scale-rewards none, --aggregation constant and no penalty, refilling divides the expected gradient by the share
of groups that are kept, so its direction stays.

Run
    python algos/dapo.py                                                            the tiny model learns countdown
    python algos/dapo.py --task sort --keep-accuracy 0.2 0.8        neither easy nor hard prompts (arXiv 2504.03380)
    python algos/dapo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing
    The paper's settings: algos/README.md.

Expect
    The default run takes 1.7 minutes on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.09, pass@8
    0.45 to greedy 0.55, pass@1 0.53, pass@8 0.66 (seed 1, 128 prompts). grpo.py ends at 0.50-0.58, 0.47-0.53, 0.65-0.67
    (8 seeds, 256 prompts), with 51,200 completions where this samples 126,000: at equal ones nothing is gained.
    --max-completion-length 14 --overlong-buffer 2 shows the penalty: 0.25 of the answers are cut off in step 1, 0.17 in
    steps 6 to 10; with --overlong-buffer 0 0.25, then 0.34 (seed 1).

Metrics
    As in grpo.py, but
    reward         mean over all sampled completions, without the penalty
    sampled        completions sampled in the step; num_prompts * num_generations of them are trained on
    frac_zero_std  share of trained groups with equal rewards: 0 if --max-sampling-rounds were enough
    overlong_penalty  mean over the trained completions; towards 0

Differences
    - The paper takes 16 optimizer steps on each batch; here it is one, with --num-minibatches more: then the clip acts.
    - The paper samples until the batch is full. Here it is at most --max-sampling-rounds times; groups with equal
      rewards fill the rest. They have no penalty, so they teach nothing.
    - Groups are judged by rewards without the penalty. The paper's are 1 and -1, the tasks' 1 and 0: the penalty weighs
      twice as much.
    - The formula divides by the tokens of each group; this script, TRL and verl by those of a minibatch.
"""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
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
    gathered,
    join,
    mean,
    micro_batches,
    moments,
    rank,
    set_rate,
    share,
    start,
    total,
)
from utils.lm import PolicyArgs, alarm, autocast, completion_logps, load_model, resolve, sample_all, save_model
from utils.rewards import decode, evaluate, make_scorer, sample_rows, shown

NAME, TITLE = "dapo", "DAPO"
LARGE = dict(learning_rate=1e-6, sample_batch_size=32, micro_batch_size=64, micro_batch_tokens=4096,
             max_completion_length=512, overlong_buffer=102, num_prompts=32, num_generations=16,
             precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, sample_batch_size=512, micro_batch_size=256, micro_batch_tokens=0,
                 max_completion_length=20, overlong_buffer=4, num_prompts=64, num_generations=8, precision="float32"),
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
    num_prompts: int | None = None
    """prompts per step, of all processes"""
    num_generations: int | None = None
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
    num_minibatches: int = 1
    """optimizer steps per update epoch, each on a share of the prompts: from the second on, pi_old is stale"""
    epsilon: float = 0.2
    """lower clip of the ratio: 1 - epsilon"""
    epsilon_high: float = 0.28
    """upper clip of the ratio: 1 + epsilon_high"""
    beta: float = 0.0
    """weight of the KL penalty; 0 loads no reference model"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """divide advantages by the standard deviation of their group or of the batch, or not at all"""
    aggregation: Literal["sequence", "token", "constant"] = "token"
    """mean over each completion's tokens, then completions; mean over all tokens; sum over B * max_completion_length"""
    mask_truncated_completions: bool = False
    """leave truncated completions out of the loss"""
    overlong_buffer: int | None = None
    """tokens before the length limit over which the penalty grows from 0 to 1: L_cache; 0: no penalty"""
    max_sampling_rounds: int = 4
    """most sampling rounds per step; each after the first replaces groups with equal rewards"""
    keep_accuracy: tuple[float, float] | None = None
    """LOW HIGH: groups are kept where LOW <= mean reward <= HIGH; None: where rewards differ (arXiv 2504.03380)"""
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


def overlong_penalty(lengths: Tensor, max_completion_length: int, buffer: int) -> Tensor:
    """Added to the reward of a long completion: 0, then linearly down to -1 over the last `buffer` tokens before the
    limit. Equation 13. (B,) -> (B,)."""
    return ((max_completion_length - buffer - lengths) / max(1, buffer)).clamp(-1, 0)


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


def policy_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Clipped surrogate per token, to be minimised, and where the clip cuts the gradient. arXiv 2402.03300,
    equation 3, first term. logps, old_logps (B, T), advantages (B, 1) or (B, T) -> (B, T), (B, T) bool."""
    ratio = (logps - old_logps).exp()
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.min(unclipped, clipped), clipped < unclipped


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
                loss, clipped = policy_loss(logps, old_logps, advantage[rows], args.epsilon, args.epsilon_high)
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


def collect(model, tokenizer, task, score, step: int, args: Args,
            first: int) -> tuple[Samples, Tensor, dict[str, float]]:  # fmt: skip
    """Samples and scores G completions for each of this process's prompts of a round, which begins at row `first`.
    Returns rewards and columns."""
    rows = [task.train(i, args.seed) for i in share(range(first, first + args.num_prompts))]
    prompts = [encode_prompt(row, tokenizer) for row in rows]
    samples = sample_all(model, prompts, args.num_generations, args, args.temperature, "train", step, first)
    rows = [row for row in rows for _ in range(args.num_generations)]
    rewards, columns = score(rows, *decode(samples, tokenizer), step)
    return samples, rewards - args.missing_eos_penalty * ~samples.ended.cpu(), columns


def refill(more: Callable, first: int, args: Args) -> tuple[Samples, Tensor, dict[str, float], Tensor, int]:
    """P groups whose rewards are not all equal (the constraint of equation 8), or whose mean lies in --keep-accuracy.
    Samples rounds of P prompts until there are P such groups, at most --max-sampling-rounds times. Groups that teach
    nothing fill the rest: with equal rewards, or outside --keep-accuracy and so with the reward NaN.

    All counts are over processes, which sample their rounds together and may end with different numbers of groups.
    Returns this process's groups, their rewards, columns (means over rounds), all sampled rewards, and the next row.
    """
    rounds, flat = [], torch.empty(0, dtype=torch.bool)
    while len(rounds) < args.max_sampling_rounds and total((~flat).sum()) < args.num_prompts:
        rounds.append(more(first))
        first += args.num_prompts
        rewards = torch.cat([rewards for _, rewards, _ in rounds])
        answers = rewards.view(-1, args.num_generations)
        flat = (advantages(answers, "none") == 0).all(1)
        if args.keep_accuracy:
            low, high = args.keep_accuracy
            flat = ~((answers.nanmean(1) >= low) & (answers.nanmean(1) <= high))
    samples = join([samples for samples, _, _ in rounds])
    places = [(no, i, rank()) for i, no in enumerate(flat.tolist())]  # in the order of sampling, flat ones last
    kept = set(sorted(gathered(places))[: args.num_prompts])
    groups = torch.tensor([place[1] for place in sorted(places) if place in kept], dtype=torch.long)
    rows = (groups[:, None] * args.num_generations + torch.arange(args.num_generations)).flatten()
    samples = Samples(*(x[groups] for x in samples[:2]), *(x[rows] for x in samples[2:]))
    logged = [columns for _, _, columns in rounds]
    columns = {name: mean([row[name] for row in logged if name in row]) for row in logged for name in row}
    answers = answers[groups].masked_fill(flat[groups, None], torch.nan) if args.keep_accuracy else answers[groups]
    return samples, answers.flatten(), columns, rewards, first


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
    if args.overlong_buffer > args.max_completion_length:
        raise UserError(f"--overlong-buffer {args.overlong_buffer} must be at most --max-completion-length "
                        f"{args.max_completion_length}: it is the last part of it")  # fmt: skip
    low, high = args.keep_accuracy or (0, 1)
    if not 0 <= low <= high <= 1:
        raise UserError(f"--keep-accuracy {low:g} {high:g} must be LOW HIGH with 0 <= LOW <= HIGH <= 1")
    task = usable(task, model, tokenizer, args)
    score = make_scorer(task, args, tokenizer, device)
    reference = load_model(args, device, frozen=True)[0] if args.beta and not args.lora_rank else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  betas=(0.9, args.adam_beta2), weight_decay=args.weight_decay, fused=True)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"))
    run.print(settings)
    parts = {"trained": Trained(model, optimizer)}
    next_row = run.state.get("next_row", 0)
    if not run.restore(**parts):
        run.log(0, **evaluate(model, tokenizer, task, score, args, 0, run.keep))
    model.train()
    while run.step < args.max_steps:
        step, begun = run.step + 1, time.perf_counter()
        rate = set_rate(optimizer, step, args)

        # collect
        more = partial(collect, model, tokenizer, task, score, step, args)
        samples, rewards, columns, sampled_rewards, next_row = refill(more, next_row, args)
        sampled, due = time.perf_counter(), run.due(step, args.eval_every)
        if step == 1:
            run.print(shown(samples, tokenizer, rewards.tolist()))
        groups, lengths = rewards.view(-1, args.num_generations), samples.completion_mask.sum(1).float()
        penalty = overlong_penalty(lengths, args.max_completion_length, args.overlong_buffer)
        teaches = (advantages(groups, "none") != 0).any(1).repeat_interleave(args.num_generations).to(device)
        ref_logps = reference_logps(model, reference, samples, args) if args.beta else None

        # update
        columns |= update(model, optimizer, Batch(samples, rewards.to(device) + penalty * teaches, ref_logps), args)
        alarm(columns.get("sampler_gap"), run, args)

        # evaluate
        each = {"reward": rewards, "advantage": advantages(groups, args.scale_rewards).flatten()}
        run.keep(sample_rows(args.log_samples, samples, tokenizer, each))
        columns |= {
            "reward": sampled_rewards.nanmean().item(),
            "reward_std": (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean().item(),
            "frac_zero_std": (advantages(groups, "none") == 0).all(1).float().mean().item(),
            "sampled": total(torch.tensor(len(sampled_rewards))).item(),
            "overlong_penalty": penalty.mean().item(),
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
        run.end_step(step, parts | {"next_row": next_row})

    curves: dict = {"reward": ("reward",), "held-out": ("eval/*",), "entropy per token": ("entropy",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
