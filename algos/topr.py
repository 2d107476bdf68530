r"""Tapered Off-Policy REINFORCE (TOPR).

Le Roux et al. 2025, "Tapered Off-Policy REINFORCE: Stable and Efficient Reinforcement Learning for LLMs" (arXiv
2503.14286, equations 7 and 8).

Parent: grpo.py. No clip and no group baseline: wrong answers count as far as the policy still gives them.

Right answers can be imitated however old they are. Wrong ones cannot be pushed away for ever: their log-probability has
no lower bound, and the model breaks. So a wrong answer's weight falls with its probability. Each update follows

    g = 1/B sum_i w_i R_i 1/L sum_t grad log pi_theta(y_it | x, y_i,<t)

    R_i      = 2 r_i - 1 - c     the task's reward r_i, 0 or 1, as -1 or 1, less a baseline
    w_i      = 1 where R_i >= 0, else min(rho_i, 1)     a number: it has no gradient
    rho_i    = pi_theta(y_i | x) / pi_old(y_i | x)   ratio of whole completions; pi_old sampled them
    B, L     completions of the optimizer step; --max-completion-length, or as --aggregation says
    c        --baseline

On fresh data every w_i is 1: that is REINFORCE, and c changes no expectation. On stale data c sets which answers rule.
If p is the share of right answers, their share of the weights |R_i| is p (1 - c) / (1 + c (1 - 2 p)). The paper finds a
share of 0.1 to 0.2 best, and more than 0.5 harmful. As w_i falls, the share grows. c = -1 drops the wrong answers.

Run
    python algos/topr.py                                              the tiny model learns countdown
    python algos/topr.py --num-minibatches 1 --num-iterations 8       eight epochs on each batch
    python algos/topr.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing
    python algos/topr.py --model meta-llama/Meta-Llama-3-8B-Instruct --task gsm8k --num-prompts 7424 \
        --num-generations 16 --num-minibatches 58 --learning-rate 5e-7 --aggregation sequence --max-steps 1
                       the authors' settings, but for the size of a minibatch: one epoch on 7,424 training questions

Expect
    The default run takes 1.1 minutes on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.09, pass@8
    0.45 to greedy 0.54, pass@1 0.50, pass@8 0.62. Sort, 64 updates on one batch of 2,048 samples, pass@1 from 0.40:
    TOPR gets to 0.92, right answers alone to 0.90, PPO's clip to 0.64 on average, REINFORCE with the same rewards and
    no ratio to 0.01 (10 seeds; benchmarks/effects.py, topr-stale: TOPR is ahead of the clip by 0.2 in 5, 9 were asked).

Metrics
    As in grpo.py, but
    reward         the share of right answers. There is no frac_zero_std: groups of equal rewards teach, too
    wrong_weight   mean w_i of the wrong answers in the last epoch, there being no clip_fraction: 1 on fresh data, falls
                   as updates follow. Near 0, wrong answers teach nothing

Differences
    - The paper's optimizer is Adafactor, ours AdamW. Its samples are cut to the 500 likeliest tokens, ours are not.
    - ROLL and Trinity-RFT call TOPR a ratio per token with advantages of the group; a pull request to verl (6986) a
      ratio per completion divided by length.
    - pi_old is the sampler's own log-probability, as in grpo.py. Its rounding (bfloat16) adds up over a completion.
    - beta is 0 for all models: the paper has no KL penalty. Rewards should be from 0 to 1.
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

NAME, TITLE = "topr", "TOPR"
LARGE = dict(learning_rate=1e-6, sample_batch_size=32, micro_batch_size=64, micro_batch_tokens=4096,
             max_completion_length=512, precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, sample_batch_size=512, micro_batch_size=256, micro_batch_tokens=0,
                 max_completion_length=20, precision="float32"),
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
    num_minibatches: int = 4
    """optimizer steps per update epoch, each on a share of the prompts: from the second on, pi_old is stale"""
    baseline: float = 0.0
    """subtracted from rewards of 1, right, and -1, wrong: c, from -1 to 1"""
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


def advantages(rewards: Tensor, baseline: float) -> Tensor:
    """Rewards from 0 to 1 become -1 to 1, less the baseline; NaN becomes 0. (P, G) -> (P, G)."""
    return (2 * rewards - 1 - baseline).nan_to_num(0.0)


def token_weights(mask: Tensor, aggregation: str, max_completion_length: int) -> Tensor:
    """Weight of each token's loss in the step's loss, over the B rows of all processes. mask of 0 and 1, (B, T).

    sequence: 1 / (B T_i), as the authors. Not the policy gradient: tokens of long completions count less than others.
    token: 1 / sum of all T_i of the step, as TRL and verl; DAPO's formula takes each group's own sum.
    constant: 1 / (B L_max), Dr. GRPO: all tokens count alike, so lengths bias nothing.
    """
    rows = total(torch.tensor(len(mask), device=mask.device))
    if aggregation == "sequence":
        return mask / (rows * mask.sum(1, keepdim=True).clamp(min=1))
    if aggregation == "token":
        return mask / total(mask.sum()).clamp(min=1)
    return mask / (rows * max_completion_length)


def policy_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Loss per token, to be minimised, and the weights of the completions. arXiv 2503.14286, equation 8.
    logps, old_logps, mask (B, T), advantages (B, 1) -> (B, T), (B, 1)."""
    log_ratio = ((logps.detach() - old_logps) * mask).sum(1, keepdim=True)
    weight = torch.where(advantages < 0, log_ratio.clamp(max=0).exp(), 1.0)  # clamped first: exp may overflow
    return -weight * advantages * logps, weight


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Estimate of KL(pi_theta || pi_ref) at tokens of pi_theta: non-negative, unbiased in value. Its gradient is that
    of KL(pi_ref || pi_theta) instead. arXiv 2402.03300, equation 4."""
    difference = ref_logps - logps
    return difference.exp() - difference - 1


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of completions. Returns metrics."""
    samples, groups = batch.samples, batch.rewards.view(-1, args.num_generations)
    advantage = advantages(groups, args.baseline).view(-1, 1)
    mask, wrong = samples.completion_mask, advantage < 0
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
                loss, weight = policy_loss(logps, old_logps, advantage[rows], valid)
                means.add(wrong[rows] & valid.any(1, keepdim=True), wrong_weight=weight)
                if batch.ref_logps is not None:
                    kl = k3(logps, batch.ref_logps[rows, :width])
                    loss = loss + args.beta * kl
                    means.add(valid, kl=kl)
                (loss * weights[rows, :width]).sum().backward()
                logps = logps.detach()
                means.add(valid, approx_kl=k3(old_logps, logps), entropy=entropy)
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
    if not -1 <= args.baseline <= 1:
        raise UserError(f"--baseline is {args.baseline}: it must be from -1 to 1, as the rewards are")
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
        each = {"reward": rewards, "advantage": advantages(groups, args.baseline).flatten(), **score.each}
        run.keep(sample_rows(args.log_samples, samples, tokenizer, each))
        columns |= {
            "reward": rewards.nanmean().item(),
            "reward_std": (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean().item(),
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
