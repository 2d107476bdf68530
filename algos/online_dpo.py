r"""Online Direct Preference Optimization (Online DPO, OAIF), and Exploratory Preference Optimization (XPO).

Guo et al. 2024, "Direct Language Model Alignment from Online AI Feedback" (arXiv 2402.04792, section 3, algorithm 1).
XPO: Xie et al. 2024, "Exploratory Preference Optimization" (arXiv 2405.21046, algorithm 1).

Parent: grpo.py. DPO's loss on pairs of answers replaces the policy gradient.

The policy answers each prompt twice, y_1 and y_2. The answer with the higher reward is preferred. After one optimizer
step on DPO's loss (arXiv 2305.18290, equation 7) it answers anew. Minimises

    L(theta) = - mean over pairs  log sigmoid( beta [ h(x, y_w) - h(x, y_l) ] )

    y_w, y_l  of y_1 and y_2, the preferred and the other answer to the prompt x
    h(x, y)   = log pi_theta(y | x) - log pi_ref(y | x)   sums over the tokens of y up to and including the first EOS
    pi_ref    the policy as it was before the first step
    beta      --beta: how strongly the policy is held to pi_ref

--loss ipo has (h(x, y_w) - h(x, y_l) - 1/(2 beta))^2 instead. XPO (alpha = --xpo-alpha above 0) samples y_2 from the
reference and adds alpha mean over pairs log pi_theta(y_2 | x): a bonus of alpha KL(pi_ref || pi_theta).
At pi_theta = pi_ref the expected gradient of L is -2 beta times the policy gradient of P(y beats y'), y' a sample, ties
half. For rewards 0 and 1 that is -beta times the policy gradient of the mean reward: the first step is REINFORCE.

Run
    python algos/online_dpo.py                                    the tiny model learns countdown
    python algos/online_dpo.py --task sort --max-steps 16         a smaller task
    python algos/online_dpo.py --xpo-alpha 1e-3                   XPO
    python algos/online_dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k      a real model, on a GPU

Expect
    The default run takes 90 seconds on 2 cores. Held-out countdown goes from greedy 0.01, pass@1 0.09, pass@8 0.45 to
    0.49, 0.48, 0.70 (seed 1); grpo.py: 0.56, 0.51, 0.69. --task sort --max-steps 16, 12 seconds: greedy 0.23 to 0.99,
    --loss ipo 1.00, --xpo-alpha 1e-3 0.90: half of XPO's completions are the reference's, and sort needs none.

Metrics
    reward      mean over the policy's completions. Columns of single functions include the reference's completions
    accuracy    share of pairs with a preference whose y_w has the larger h, before the step; equal h count half. It
                stays below 1: samples are new. margin: mean of beta [h(y_w) - h(y_l)]
    frac_ties   share of pairs without a preference, which teach nothing; below 0.9. frac_zero_std: share of prompts
                whose rewards are all equal. kl: mean of h over the policy's completions, nats; grows

Differences
    - OAIF asks a language model which answer is better. Here rewards decide; only their order counts.
    - More than two completions a prompt are G/2 disjoint pairs.
    - Pairs without a preference give no gradient, but count in L's denominator. TRL prefers the first of equal ones,
      so noise counts as a preference. XPO's term counts every pair, as in the paper.
    - The reference stays the starting policy. XPO minimises over all pairs so far; here one step, as in oat.
    - Sampling and scoring both divide logits by --temperature. TRL scores at temperature 1.
"""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.core import Run, UserError, main, prepare
from utils.data import encode_prompt, load_task, usable
from utils.dist import (
    Means,
    Samples,
    Trained,
    averaged,
    clip_gradients,
    join,
    micro_batches,
    set_rate,
    share,
    start,
    total,
)
from utils.lm import PolicyArgs, alarm, autocast, completion_logps, load_model, resolve, sample_all, save_model
from utils.rewards import decode, evaluate, make_scorer, sample_rows, shown

NAME, TITLE = "online_dpo", "Online DPO"
LARGE = dict(learning_rate=5e-7, num_prompts=256, sample_batch_size=32, micro_batch_size=64, micro_batch_tokens=4096,
             max_completion_length=512, precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, num_prompts=128, sample_batch_size=512, micro_batch_size=256, micro_batch_tokens=0,
                 max_completion_length=20, precision="float32"),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=5e-6),
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
    num_generations: int = 2
    """completions per prompt, G, an even number: the first is compared with the second, the third with the fourth"""
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
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """what is minimised: DPO's loss or IPO's"""
    beta: float = 0.1
    """how strongly the policy is held to the reference"""
    xpo_alpha: float = 0.0
    """alpha of XPO, the weight of log pi_theta(y_2 | x); above 0 every second completion is the reference's"""
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
    ref_logps: Tensor  # (B, T)


def preferences(rewards: Tensor) -> Tensor:
    """Which completion of each pair has the higher reward: 1 the first, -1 the second, 0 neither (they are equal,
    or one is NaN). (B,) -> (B/2,)."""
    first, second = rewards.view(-1, 2).unbind(1)
    return (first - second).nan_to_num(0.0).sign()


def preference_loss(difference: Tensor, args: Args) -> Tensor:
    """Loss of h(y_w) - h(y_l), to be minimised: -log sigmoid(beta D) (arXiv 2305.18290, equation 7), or with ipo
    (D - 1 / (2 beta))^2 (arXiv 2310.12036, equation 17); of sums over tokens. (B/2,) -> (B/2,)."""
    if args.loss == "ipo":
        return (difference - 1 / (2 * args.beta)) ** 2
    return -logsigmoid(args.beta * difference)


def from_policy(rows: Tensor, args: Args) -> Tensor:
    """The rows that the policy sampled: all, or with --xpo-alpha the first of each pair. (B, ...)."""
    return rows[::2] if args.xpo_alpha else rows


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """One optimizer step on a batch of pairs. Returns metrics."""
    samples, label = batch.samples, preferences(batch.rewards)
    mask, count, means = samples.completion_mask, total(torch.tensor(len(label))), Means()
    optimizer.zero_grad(set_to_none=True)
    for rows, inputs in micro_batches(samples, args, together=2):
        with autocast(model, args.precision):
            logps, entropy = completion_logps(model, *inputs, args.temperature)
        width, preferred = logps.shape[1], label[rows[::2] // 2]
        valid = mask[rows, :width]
        log_ratio = ((logps - batch.ref_logps[rows, :width]) * valid).sum(1)
        first, second = log_ratio.view(-1, 2).unbind(1)
        margin = preferred * (first - second)
        loss = preference_loss(margin, args)  # constant where there is no preference
        if args.xpo_alpha:
            loss = loss + args.xpo_alpha * (logps * valid).sum(1)[1::2]
        (loss.sum() / count).backward()
        gap, ties = (logps.detach() - samples.logps[rows, :width]).abs(), preferred == 0
        means.add(from_policy(valid, args), sampler_gap=from_policy(gap, args), entropy=from_policy(entropy, args))
        means.add(~ties, accuracy=(margin > 0) + (margin == 0) / 2, margin=args.beta * margin)
        means.add(torch.ones_like(margin), frac_ties=ties)
        means.add(torch.ones_like(from_policy(log_ratio, args)), kl=from_policy(log_ratio, args))
    grad_norm = clip_gradients(model, args.max_grad_norm)
    optimizer.step()
    return means.read() | {"grad_norm": grad_norm.item()}


def draw(model, reference, prompts: list[list[int]], step: int, args: Args) -> Samples:
    """G completions of each prompt, from the policy; with --xpo-alpha, every second one is from the reference."""
    if not args.xpo_alpha:
        return sample_all(model, prompts, args.num_generations, args, args.temperature, "train", step)
    half = args.num_generations // 2
    ours = sample_all(model, prompts, half, args, args.temperature, "train", step)
    with nullcontext() if reference else model.disable_adapter():
        theirs = sample_all(reference or model, prompts, half, replace(args, sampler=""), args.temperature,
                            "reference", step)  # fmt: skip
    both = join([ours, theirs])
    in_turn = torch.arange(len(both.ended), device=model.device).view(2, -1).T.flatten()
    return Samples(*ours[:2], *(x[in_turn] for x in both[2:]))


def collect(model, reference, tokenizer, task, score, step: int,
            args: Args) -> tuple[Samples, Tensor, dict[str, float]]:  # fmt: skip
    """Samples and scores G completions for each of this process's prompts of the step. Returns rewards and columns."""
    rows = [task.train(i, args.seed) for i in share(range((step - 1) * args.num_prompts, step * args.num_prompts))]
    samples = draw(model, reference, [encode_prompt(row, tokenizer) for row in rows], step, args)
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
    if args.num_generations < 2 or args.num_generations % 2:
        raise UserError(f"--num-generations is {args.num_generations}: it must be even, for completions come in pairs")
    if not args.beta:
        raise UserError("--beta is 0: it must be above 0, or the loss is the same for all policies")
    task = usable(task, model, tokenizer, args)
    score = make_scorer(task, args, tokenizer, device)
    reference = load_model(args, device, frozen=True)[0] if not args.lora_rank else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  betas=(0.9, args.adam_beta2), weight_decay=args.weight_decay, fused=True)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "accuracy", "eval/greedy", "eval/pass@1"))
    run.print(settings)
    parts = {"trained": Trained(model, optimizer)}
    if not run.restore(**parts):
        run.log(0, **evaluate(model, tokenizer, task, score, args, 0, run.keep))
    model.train()
    while run.step < args.max_steps:
        step, begun = run.step + 1, time.perf_counter()
        rate = set_rate(optimizer, step, args)

        # collect
        samples, rewards, columns = collect(model, reference, tokenizer, task, score, step, args)
        sampled, due = time.perf_counter(), run.due(step, args.eval_every)
        if step == 1:
            run.print(shown(samples, tokenizer, rewards.tolist()))
        ref_logps = reference_logps(model, reference, samples, args)

        # update
        columns |= update(model, optimizer, Batch(samples, rewards.to(device), ref_logps), args)
        alarm(columns.get("sampler_gap"), run, args)

        # evaluate
        groups, lengths = rewards.view(-1, args.num_generations), samples.completion_mask.sum(1).float()
        run.keep(sample_rows(args.log_samples, samples, tokenizer, {"reward": rewards, **score.each}))
        least, most = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
        columns |= {
            "reward": from_policy(rewards, args).nanmean().item(),
            "frac_zero_std": 1 - (most > least).float().mean().item(),
            "length": from_policy(lengths, args).mean().item(),
            "truncated": 1 - from_policy(samples.ended, args).float().mean().item(),
            "learning_rate": rate,
            "time/sample": sampled - begun,
            "time/step": time.perf_counter() - begun,
        }
        columns["time/tokens_per_second"] = total(lengths.sum()).item() / columns["time/step"]
        if due:
            columns |= evaluate(model, tokenizer, task, score, args, step, run.keep)
        run.log(step, **averaged(columns))
        run.end_step(step, parts)

    curves: dict = {"reward": ("reward",), "held-out": ("eval/*",), "nats from the reference": ("kl",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
