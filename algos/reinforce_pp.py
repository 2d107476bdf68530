r"""REINFORCE++: a baseline and a scale from the whole batch, so that one completion per prompt is enough.

Hu, Liu, Xu and Shen 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage
Normalization" (arXiv 2501.03262, equations 8 to 10).

Parent: grpo.py. Advantages are whitened over all tokens of the batch, not within a group, and the KL penalty is in the
reward, token by token.

Every token is reinforced by what follows it: the completion's reward, less the penalty for what is still to come. All
prompts share one baseline and one scale, so a prompt needs no group. Maximises

    J(theta) = E  1/(sum_i T_i) sum_i sum_t  min[ rho_it A_it, clip(rho_it, 1 - eps, 1 + eps_high) A_it ]

    R_it     = R_i - beta sum_s>=t log(pi_old(y_is | .) / pi_ref(y_is | .))    return from token t on
    A_it     = (R_it - mean) / std                       mean and std of R over all tokens of all completions
    x, y_i, R_i, T_i, rho_it, pi_old, pi_ref, eps, eps_high, beta    as in grpo.py; i runs over all completions

--baseline group is "REINFORCE++ with baseline": R_it is R_i less the mean reward of its group, and the penalty moves to
the loss, beta k2_it with k2 = log(pi_theta / pi_ref)^2 / 2.

The baseline does not know the prompt: an easy prompt's right answer looks better than average. That costs variance, not
bias, but for the completion's own part in mean and std. One scale for all prompts does not turn the gradient.

Run
    python algos/reinforce_pp.py                              the tiny model learns countdown, 512 prompts x 1
    python algos/reinforce_pp.py --baseline group --num-prompts 64 --num-generations 8       with groups of 8
    python algos/reinforce_pp.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing
    ProRL v2's settings: algos/README.md.

Expect
    The default run takes 1.8 minutes on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.09, pass@8
    0.45 to greedy 0.56, pass@1 0.52, pass@8 0.68; grpo.py gets to 0.56, 0.51, 0.69. Sort, 8 steps, pass@1 over ten
    seeds: 0.93, as grpo.py and as not whitened. With 64 completions a step whitening was behind: where most answers
    are right, dividing by a small deviation makes the few wrong ones loud.

Metrics
    reward_std     over the batch, not within groups. There is no frac_zero_std: flat groups teach, too
    kl             mean k3 (beta > 0 only), whichever penalty is taken. The others as in grpo.py

Differences
    - The variance is unbiased, plus 1e-8, as in verl. OpenRLHF's is biased, with a floor of 1e-8. The mean counts
      tokens, so long completions own the baseline.
    - The baseline variant of verl has no penalty of its own; that of ms-swift has it in the reward; that of OpenRLHF
      there or, by --algo.kl.use_loss, in the loss, as here, cut at -10 and 10.
    - beta is 0.01, OpenRLHF's default. The paper advises rewards of -1 and 1 for one completion per prompt: after
      whitening they are those of 0 and 1, but for beta, which then weighs half as much.
    - A sample whose reward functions all return None is in no mean and no std, and has advantage 0.
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

NAME, TITLE = "reinforce_pp", "REINFORCE++"
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
    num_prompts: int = 512
    """prompts per step, of all processes"""
    num_generations: int = 1
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
    epsilon_high: float | None = None
    """upper clip of the ratio: 1 + epsilon_high; None: epsilon"""
    beta: float = 0.01
    """weight of the KL penalty; 0 loads no reference model"""
    baseline: Literal["none", "group"] = "none"
    """none: the batch's mean alone; group: the group's mean reward is subtracted before (REINFORCE++ with baseline)"""
    whiten_advantages: bool = True
    """subtract the mean of all tokens of the batch, and divide by their standard deviation"""
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


def kl_to_go(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """log pi_old - log pi_ref, summed from each token to the completion's last one. All (B, T)."""
    return ((logps - ref_logps) * mask).flip(1).cumsum(1).flip(1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and unbiased standard deviation 1 over the tokens of `mask`, 0 elsewhere (equation 10)."""
    mean, std = moments(values[mask])
    return (values - mean) * (std.square() + 1e-8).rsqrt() * mask


def advantages(batch: Batch, mask: Tensor, args: Args) -> Tensor:
    """What follows each token that is trained (mask): reward and, without a baseline of groups, KL penalty (equations 8
    and 9). Then whitened over all of these tokens. Skipped rewards (NaN) count nowhere and get 0. (B, T)."""
    samples, groups = batch.samples, batch.rewards.view(-1, args.num_generations).to(batch.samples.logps)
    if args.baseline == "group":
        groups = groups - groups.nanmean(1, keepdim=True)
    values = groups.view(-1, 1).expand_as(mask)
    if args.baseline == "none" and batch.ref_logps is not None:
        values = values - args.beta * kl_to_go(samples.logps, batch.ref_logps, samples.completion_mask)
    known = mask & ~values.isnan()
    values = values.masked_fill(~known, 0.0)
    return whiten(values, known) if args.whiten_advantages else values


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


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Half the squared log-ratio at tokens of pi_theta. Its gradient is that of KL(pi_theta || pi_ref), token by token;
    that of k3 is not."""
    return 0.5 * (logps - ref_logps).square()


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of completions. Returns metrics."""
    samples, mask = batch.samples, batch.samples.completion_mask
    if args.mask_truncated_completions:
        mask = mask & samples.ended[:, None]
    advantage = advantages(batch, mask, args)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
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
                loss, clipped = policy_loss(logps, old_logps, advantage[rows, :width], args.epsilon, high)
                if batch.ref_logps is not None:
                    ref_logps = batch.ref_logps[rows, :width]
                    if args.baseline == "group":
                        loss = loss + args.beta * k2(logps, ref_logps)
                    means.add(valid, kl=k3(logps, ref_logps))
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
    if args.num_generations < 2 and args.baseline == "group":
        raise UserError("--baseline group needs --num-generations of at least 2: one reward is its group's mean")
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
        run.keep(sample_rows(args.log_samples, samples, tokenizer, {"reward": rewards, **score.each}))
        lengths = samples.completion_mask.sum(1).float()
        columns |= {
            "reward": rewards.nanmean().item(),
            "reward_std": (rewards - rewards.nanmean()).square().nanmean().sqrt().item(),
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
