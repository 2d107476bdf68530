r"""Group Sequence Policy Optimization (GSPO).

Zheng et al. 2025, "Group Sequence Policy Optimization" (arXiv 2507.18071, equations 5 to 7).

Parent: grpo.py. One ratio for a whole completion, the geometric mean of its tokens' ratios, so the clip takes or leaves
it whole.

A step makes several updates on its completions, so all but the first learn from stale data. GRPO's ratio of a single
token is a noisy weight, and its clip cuts some tokens of an answer and leaves others; the reward is of the whole
answer. Maximises

    J(theta) = E  1/G sum_i min[ s_i A_i, clip(s_i, 1 - eps, 1 + eps_high) A_i ]

    s_i      = exp( 1/T_i sum_t log(pi_theta(y_it | x, y_i,<t) / pi_old(y_it | x, y_i,<t)) )
    x, y_i, A_i, T_i, G, eps, eps_high   as in grpo.py; T_i counts the tokens that are trained

Inside the clip, the gradient is 1/G sum_i s_i A_i 1/T_i sum_t grad log pi_theta(y_it). s_i varies far less than the
ratio of a token, so the paper's clip is almost 700 times tighter. s_i is no importance weight: its mean under pi_old is
not 1.

Run
    python algos/gspo.py                                                            the tiny model learns countdown
    python algos/gspo.py --task sort --max-steps 10 --num-iterations 8 --num-minibatches 1      very stale data
    python algos/gspo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing

Expect
    The default run takes 1.3 minutes on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.09 to greedy
    0.50, pass@1 0.46 (seed 1, 128 prompts). pi_old costs one more forward pass a step.
    --task sort --max-steps 6 --learning-rate 1e-4: greedy 0.98 (30 seeds, four updates a step).
    Eight epochs on each batch of sort, pass@1 after ten steps: GSPO 0.94 +- 0.02, GRPO 0.93 +- 0.02, GSPO without clip
    0.63 +- 0.11, GSPO with one epoch 0.93 +- 0.02 (10 seeds, standard deviations; benchmarks/effects.py, gspo-stale).
    At that learning rate the clip makes stale data usable. That GSPO beats GRPO does not show: it does so in 8 of 10
    seeds, where 9 were asked before. It keeps within 0.03 of one epoch in 8. benchmarks/README.md, "Stale data",
    compares five rules.

Metrics
    As in grpo.py, but
    clip_fraction  share of completions whose gradient is cut, in the last update epoch; 0 in the first minibatch
    sampler_gap    mean |log pi_old - what the sampler said|; 1e-6 in float32, more means a bug

Differences
    - pi_old is the scorer's, by a forward pass before the first update, as in verl. In bfloat16 the sampler's differs
      so much that a completion would begin beyond this tight clip.
    - There is no --aggregation: the mean over completions is the paper's. TRL's importance_sampling_level="sequence" is
      GSPO with loss_type "grpo"; with bnpo, dr_grpo, dapo and cispo, long completions weigh more.
    - beta is 0 for the tiny model, as in the paper, and 0.04 for others, as in grpo.py: then the loss has beta
      k3_it, too.
    - The paper's second form, GSPO-token, has the same gradient where all tokens of a completion share one advantage.
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

NAME, TITLE = "gspo", "GSPO"
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
    epsilon: float = 3e-4
    """lower clip of the completion's ratio: 1 - epsilon"""
    epsilon_high: float = 4e-4
    """upper clip of the completion's ratio: 1 + epsilon_high"""
    beta: float | None = None
    """weight of the KL penalty; 0 loads no reference model"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """divide advantages by the standard deviation of their group or of the batch, or not at all"""
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


def policy_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, low: float,
                high: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Clipped surrogate per completion, to be minimised, and where the clip cuts the gradient. arXiv 2507.18071,
    equations 5 and 7. logps, old_logps, mask (B, T), advantages (B, 1) -> (B, 1), (B, 1) bool."""
    ratio = (((logps - old_logps) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()
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
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    old_logps = reference_logps(model, model, samples, args)  # the scorer's: the sampler's can begin beyond the clip
    numbers = torch.arange(len(mask)).view(-1, args.num_generations)  # of the rows
    norms: list[Tensor] = []
    for _ in range(args.num_iterations):
        means = Means()
        for minibatch in numbers.tensor_split(args.num_minibatches):  # the order of the prompts is random
            within = minibatch.flatten()
            weights = mask / (lengths * total(torch.tensor(len(within), device=mask.device)))
            optimizer.zero_grad(set_to_none=True)
            for rows, inputs in micro_batches(samples, args, within):
                with autocast(model, args.precision):
                    logps, entropy = completion_logps(model, *inputs, args.temperature)
                width = logps.shape[1]
                old, valid = old_logps[rows, :width], mask[rows, :width]
                loss, clipped = policy_loss(logps, old, advantage[rows], valid, args.epsilon, args.epsilon_high)
                if batch.ref_logps is not None:
                    kl = k3(logps, batch.ref_logps[rows, :width])
                    loss = loss + args.beta * kl
                    means.add(valid, kl=kl)
                (loss * weights[rows, :width]).sum().backward()
                means.add(valid.any(1, keepdim=True), clip_fraction=clipped)
                means.add(valid, approx_kl=k3(old, logps.detach()), entropy=entropy)
            norms.append(clip_gradients(model, args.max_grad_norm))
            optimizer.step()
    gap = Means()
    gap.add(mask, sampler_gap=(old_logps - samples.logps).abs())
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
