r"""REINFORCE Leave-One-Out (RLOO).

Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs"
(arXiv 2402.14740, sections 2.2 and 2.3, equations 3 and 6), after Kool, van Hoof and Welling 2019, "Buy 4 REINFORCE
Samples, Get a Baseline for Free!".

Parent: grpo.py. One ratio per completion, a baseline without the answer itself, and the KL penalty in the reward.

The policy answers each prompt several times. A whole answer is one action, reinforced by how much better its reward is
than the mean reward of the other answers. That gives an unbiased policy gradient. Maximises

    J(theta) = E  1/G sum_i min[ rho_i A_i, clip(rho_i, 1 - eps, 1 + eps_high) A_i ]

    R_i      = r(x, y_i) - beta sum_t log(pi_old(y_it | .) / pi_ref(y_it | .))    reward with KL penalty: a number
    A_i      = R_i - 1/(G - 1) sum_j!=i R_j                                       advantage
    rho_i    = pi_theta(y_i | x) / pi_old(y_i | x)                                ratio of whole completions
    x, y_i, pi_ref, G, eps, eps_high, beta   as in grpo.py; t runs up to and including the first EOS

At rho = 1 the expected gradient is exactly that of E[r(x, y)] - beta KL(pi_theta || pi_ref) over whole completions: the
baseline does not depend on y_i, and nothing is divided by lengths or deviations.

Run
    python algos/rloo.py                                                            the tiny model learns countdown
    python algos/rloo.py --task sort --max-steps 16                                 a smaller task
    python algos/rloo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --num-generations 4
    python algos/rloo.py --model ORG/NAME --task prompts.jsonl --beta 0.03 --warmup-steps 18 --max-steps 600 \
        --reward rewards.py:accuracy            the paper's (appendix C, TL;DR: batches of 512, taken as completions)

Expect
    The default run takes less than two minutes on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.09,
    pass@8 0.45 to greedy 0.58, pass@1 0.51, pass@8 0.71. grpo.py gets to 0.56, 0.51, 0.69.
    --task sort --max-steps 16: greedy 0.23 to 0.98, pass@1 0.40 to 0.96, in about 15 seconds on a CPU.

Metrics
    reward         mean over the batch, without the penalty; rises
    kl             nats per completion against the reference (beta > 0 only); grows slowly
    clip_fraction  share of completions whose gradient is cut; 0 in the first epoch, below 0.3
    The others as in grpo.py. The loss is not logged: at rho = 1 its value is 0 whatever its gradient.

Differences
    - The paper has neither ratio nor clip. They matter only with --num-iterations above 1. TRL's are the same; verl and
      others clip token by token.
    - The paper takes two gradient steps on each batch of samples, one on each half. Here it is one on all of it.
    - beta is 0.05, as in TRL, which can also normalise advantages. That would bias the gradient.
    - A completion without EOS keeps its reward and its place in the baseline.
    - A sample whose reward functions all return None has advantage 0, and does not count in the others' baseline.
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

NAME, TITLE = "rloo", "RLOO"
LARGE = dict(learning_rate=1e-6, num_prompts=128, num_generations=4, sample_batch_size=32, micro_batch_size=64,
             micro_batch_tokens=4096, max_completion_length=512, precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, num_prompts=64, num_generations=8, sample_batch_size=512, micro_batch_size=256,
                 micro_batch_tokens=0, max_completion_length=20, precision="float32"),
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
    epsilon: float = 0.2
    """lower clip of the ratio: 1 - epsilon"""
    epsilon_high: float | None = None
    """upper clip of the ratio: 1 + epsilon_high; None: epsilon"""
    beta: float = 0.05
    """weight of the KL penalty in the reward; 0 loads no reference model"""
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


def penalised(batch: Batch, beta: float) -> Tensor:
    """Rewards minus beta times log pi_old - log pi_ref of the whole completion (equation 3). (B,)"""
    if batch.ref_logps is None:
        return batch.rewards
    return batch.rewards - beta * ((batch.samples.logps - batch.ref_logps) * batch.samples.completion_mask).sum(1)


def advantages(rewards: Tensor) -> Tensor:
    """Each reward minus the mean of the other rewards of its group (section 2.3). (P, G) -> (P, G).

    NaN rewards are left out of the others' means and get 0. A reward without others gets 0, too.
    """
    others = (~rewards.isnan()).sum(1, keepdim=True) - 1
    return (rewards - (rewards.nansum(1, keepdim=True) - rewards) / others).nan_to_num(0.0)


def policy_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Clipped surrogate per completion, to be minimised, and where the clip cuts the gradient. logps, old_logps of
    whole completions and advantages (B, 1) -> (B, 1), (B, 1) bool."""
    ratio = (logps - old_logps).exp()
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.min(unclipped, clipped), clipped < unclipped


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Estimate of KL(pi_theta || pi_ref) at tokens of pi_theta: non-negative, unbiased in value. A metric here."""
    difference = ref_logps - logps
    return difference.exp() - difference - 1


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`num_iterations` optimizer steps on one batch of completions. Returns metrics."""
    samples, groups = batch.samples, penalised(batch, args.beta).view(-1, args.num_generations)
    advantage = advantages(groups).view(-1, 1)
    mask = samples.completion_mask
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    completions = total(torch.tensor(len(mask), device=mask.device))
    gap, scorer_logps = Means(), torch.zeros_like(samples.logps)
    for epoch in range(args.num_iterations):
        means = Means()
        optimizer.zero_grad(set_to_none=True)
        for rows, inputs in micro_batches(samples, args):
            with autocast(model, args.precision):
                logps, entropy = completion_logps(model, *inputs, args.temperature)
            width = logps.shape[1]
            old_logps, valid = samples.logps[rows, :width], mask[rows, :width]
            if epoch == 0:
                scorer_logps[rows, :width] = logps.detach()
            # pi_old is the scorer's, as in TRL. In bfloat16 the sampler's differs by about 0.01 nats a token: a long
            # completion would reach the clip before anything is learnt
            whole, old_whole = ((x * valid).sum(1, keepdim=True) for x in (logps, scorer_logps[rows, :width]))
            loss, clipped = policy_loss(whole, old_whole, advantage[rows], args.epsilon, high)
            (loss.sum() / completions).backward()
            logps = logps.detach()
            means.add(torch.ones_like(clipped), clip_fraction=clipped)
            means.add(valid, approx_kl=k3(old_logps, logps), entropy=entropy)
            if epoch == 0:
                gap.add(valid, sampler_gap=(logps - old_logps).abs())
        grad_norm = clip_gradients(model, args.max_grad_norm)
        optimizer.step()
    if batch.ref_logps is not None:
        kl = ((samples.logps - batch.ref_logps) * mask).sum(1)
        gap.add(torch.ones_like(kl), kl=kl)
    return gap.read() | means.read() | {"grad_norm": grad_norm.item()}


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
        each = {"reward": rewards, "advantage": advantages(groups).flatten(), **score.each}
        run.keep(sample_rows(args.log_samples, samples, tokenizer, each))
        lowest, highest = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
        columns |= {
            "reward": rewards.nanmean().item(),
            "reward_std": (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean().item(),
            "frac_zero_std": (lowest >= highest).float().mean().item(),
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
