r"""Trajectory Balance with Asynchrony (TBA).

Bartoldson et al. 2025, "Trajectory Balance with Asynchrony: Decoupling Exploration and Learning for Fast, Scalable LLM
Post-Training" (arXiv 2503.18929).

Parent: rloo.py. A squared error takes the place of ratio and clip, and a buffer keeps the answers of earlier policies.

The best policy under a KL penalty is known up to a constant: pi_ref exp(R / beta) / Z. So log pi can be fitted to it by
least squares, on answers from anywhere: sampling need not wait for learning, nor learning for sampling. Minimises

    L(theta) = E  1/K sum_i ( log Z(x) + log pi_theta(y_i | x) - log pi_ref(y_i | x) - R_i / beta )^2

    x, y_i    a prompt, and the i-th of K completions that an earlier policy sampled for it: together a group
    log Z(x)  1/K sum_i [ R_i / beta - log pi_theta(y_i | x) + log pi_ref(y_i | x) ] of the same group (VarGrad). No
              gradient goes through it; one that did would sum to 0, as the errors of a group do
    R_i, pi_ref, K, beta   reward; the policy before the first step; --num-generations, --beta

-beta / 2 times the gradient of L is 1/K sum_i B_i grad log pi_theta(y_i | x), where B_i is R_i - beta log(pi_theta /
pi_ref), minus its mean over the group. On samples of pi_theta that is (K - 1) / K times the update of rloo.py. On older
ones there is no ratio: an answer that has risen enough is pushed no more. If the data hold every answer, the minimum is
the policy above.

Run
    python algos/tba.py                                                             the tiny model learns countdown
    python algos/tba.py --sync-every 10                                             most samples are 0 to 9 updates old
    python algos/tba.py --task sort --max-steps 20 --sync-every 20 --buffer-size 1280 --beta 0.2   first policy's alone
    The authors' run on GSM8K: algos/README.md.

Expect
    The default run takes 1.3 minutes on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.09, pass@8 0.45
    to 0.53, 0.49, 0.66; rloo.py, on fresh samples, ends at 0.58, 0.51, 0.71. Sort on samples of the
    first policy alone, as above: pass@1 from 0.40 to 0.89, without the divergence (--beta 1e-6) 0.10, grpo.py's clip
    0.80, rloo.py on fresh samples 0.96 (10 seeds; benchmarks/effects.py, tba-stale). With beta 0.05 it falls to 0.05.

Metrics
    As in rloo.py, but all of the batch, and so of the policies that sampled it: reward lags behind eval/*. reward/...
                   stand in the rows of steps that sample. Groups of equal rewards still teach
    approx_kl, sampler_gap   how far the policy is from those that sampled the batch, nats per token: staleness

Differences
    - There is no asynchrony: sampling and learning take turns, every --sync-every steps. The authors' trainer gets
      samples of one interval before, which is staler by --sync-every.
    - A group stays as it was sampled. The authors (bbartoldson/TBA) keep 100 answers of each prompt, drop one that is
      there already, sample 24 and draw 20 of them; for other tasks than GSM8K by reward. The minimum is the same.
    - beta is constant. The authors lower it from 0.014 to 0.004 over 500 steps. Their learning rate falls in the end.
    - The loss is L times beta / 2, and --max-grad-norm clips its gradient. The authors' is L, and is not clipped.
"""

import random
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
    gathered,
    join,
    micro_batches,
    set_rate,
    share,
    start,
    total,
)
from utils.lm import PolicyArgs, autocast, completion_logps, load_model, resolve, sample_all, save_model
from utils.rewards import decode, evaluate, make_scorer, sample_rows, shown

NAME, TITLE = "tba", "TBA"
LARGE = dict(learning_rate=1e-5, num_prompts=7, num_generations=20, sample_batch_size=40, micro_batch_size=40,
             micro_batch_tokens=8192, max_completion_length=512, beta=0.014, precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, num_prompts=64, num_generations=8, sample_batch_size=512, micro_batch_size=256,
                 micro_batch_tokens=0, max_completion_length=20, beta=0.05, precision="float32"),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=1e-4),
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
    """completions per prompt: K"""
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
    """completions in one forward and backward pass, in whole groups; changes memory, not the result"""
    sync_every: int = 2
    """steps from one renewal of the sampling policy to the next; at each it samples for all these steps"""
    on_policy_share: float = 0.95
    """chance of each group of a batch to come from the newest samples; the others come from the whole buffer"""
    buffer_size: int = 1024
    """groups (a prompt with its K completions) that are kept: the newest"""
    beta: float | None = None
    """temperature of the target pi_ref exp(R / beta): smaller goes further from the reference"""
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
    """Groups: of one step, or the whole buffer, oldest first. P prompts, K completions of each, B = P * K rows."""

    samples: Samples
    rewards: Tensor  # (B,) float32, NaN: skipped
    ref_logps: Tensor  # (B,) log pi_ref of whole completions


def balance_loss(logps: Tensor, ref_logps: Tensor, rewards: Tensor, beta: float) -> Tensor:
    """Squared error of trajectory balance, with VarGrad's estimate of log Z, times beta / 2. logps and ref_logps are of
    whole completions, in nats. Where the reward is NaN: 0, and no part in log Z. (P, K) each -> (P, K)."""
    error = logps - ref_logps - rewards / beta
    log_z = -error.detach().nanmean(1, keepdim=True)
    # beta / 2 makes the gradient as long as rloo.py's. Without it, it would be 2 / beta times as long, and every beta
    # would need another --max-grad-norm
    return beta / 2 * (log_z + error).masked_fill(rewards.isnan(), 0.0).square()


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Estimate of KL(pi_theta || pi_ref) at tokens of pi_theta: non-negative, unbiased in value. A metric here."""
    difference = ref_logps - logps
    return difference.exp() - difference - 1


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """One optimizer step on the groups of a batch. Returns metrics."""
    samples, size = batch.samples, args.num_generations
    mask = samples.completion_mask
    completions = total(torch.tensor(len(mask), device=mask.device))
    means = Means()
    optimizer.zero_grad(set_to_none=True)
    for rows, inputs in micro_batches(samples, args, together=size):  # whole groups, for log Z
        with autocast(model, args.precision):
            logps, entropy = completion_logps(model, *inputs, args.temperature)
        width = logps.shape[1]
        old_logps, valid = samples.logps[rows, :width], mask[rows, :width]
        columns = (logps * valid).sum(1), batch.ref_logps[rows], batch.rewards[rows]
        whole, ref_whole, rewards = (x.view(len(rows) // size, size) for x in columns)
        loss = balance_loss(whole, ref_whole, rewards, args.beta)
        (loss.sum() / completions).backward()
        logps = logps.detach()
        means.add(valid, approx_kl=k3(old_logps, logps), entropy=entropy, sampler_gap=(logps - old_logps).abs())
    grad_norm = clip_gradients(model, args.max_grad_norm)
    optimizer.step()
    kl = (samples.logps * mask).sum(1) - batch.ref_logps
    means.add(torch.ones_like(kl), kl=kl)
    return means.read() | {"grad_norm": grad_norm.item()}


def moved(batch: Batch, device) -> Batch:
    """On another device."""
    return Batch(Samples(*(x.to(device) for x in batch.samples)), *(x.to(device) for x in batch[1:]))


def these_groups(batch: Batch, groups: list[int]) -> Batch:
    """The groups of these numbers, in their order."""
    samples, size = batch.samples, len(batch.rewards) // len(batch.samples.prompt_ids)
    at = torch.tensor(groups)
    rows = (at[:, None] * size + torch.arange(size)).flatten()
    samples = Samples(*(x[at] for x in samples[:2]), *(x[rows] for x in samples[2:]))
    return Batch(samples, batch.rewards[rows], batch.ref_logps[rows])


def store(buffer: Batch | None, new: Batch, most: int) -> Batch:
    """The buffer with new groups behind the old ones. The oldest go where there are more than `most`."""
    if buffer is not None:
        rest = (torch.cat(pair) for pair in zip(buffer[1:], new[1:]))
        new = Batch(join([buffer.samples, new.samples]), *rest)
    count = len(new.samples.prompt_ids)
    return these_groups(new, list(range(max(0, count - most), count)))


def draw(buffer: Batch, step: int, args: Args) -> Batch:
    """This process's groups of one step, none of them twice: each with the chance --on-policy-share one that the newest
    policy has sampled, else any one. A function of seed and step, so no generator has to be saved."""
    generator, count = random.Random(f"{args.seed}/{step}"), len(buffer.samples.prompt_ids)
    newest = range(count - args.num_prompts * args.sync_every, count)
    number = sum(generator.random() < args.on_policy_share for _ in range(args.num_prompts))
    chosen = generator.sample(newest, number)
    others = [group for group in range(count) if group not in chosen]
    return these_groups(buffer, share(chosen + generator.sample(others, args.num_prompts - number)))


def collect(model, tokenizer, task, score, step: int, args: Args) -> tuple[Samples, Tensor, dict[str, float]]:
    """Samples and scores K completions for each of this process's prompts of the next --sync-every steps. Returns
    rewards and columns."""
    first, number = (step - 1) * args.num_prompts, args.num_prompts * args.sync_every
    rows = [task.train(i, args.seed) for i in share(range(first, first + number))]
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
        raise UserError("--num-generations must be at least 2: a group of one says nothing about log Z")
    if args.buffer_size < (new := args.num_prompts * args.sync_every):
        raise UserError(f"--buffer-size {args.buffer_size} must hold what is sampled at once: give at least {new}, "
                        "that is --num-prompts times --sync-every")  # fmt: skip
    if not args.beta:
        raise UserError("--beta must be above 0: rewards are divided by it")
    task = usable(task, model, tokenizer, args)
    score = make_scorer(task, args, tokenizer, device)
    reference = load_model(args, device, frozen=True)[0] if not args.lora_rank else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  betas=(0.9, args.adam_beta2), weight_decay=args.weight_decay, fused=True)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"))
    run.print(settings)
    held, parts = run.state.get("buffer"), {"trained": Trained(model, optimizer)}
    buffer = held and Batch(Samples(*held[:-2]), *held[-2:])  # on the CPU, the same in all processes
    if not run.restore(**parts):
        run.log(0, **evaluate(model, tokenizer, task, score, args, 0, run.keep))
    model.train()
    while run.step < args.max_steps:
        step, begun = run.step + 1, time.perf_counter()
        rate = set_rate(optimizer, step, args)

        # collect
        found, due = {}, run.due(step, args.eval_every)
        if (step - 1) % args.sync_every == 0:  # the policy of now samples, and all steps until the next time learn
            samples, rewards, found = collect(model, tokenizer, task, score, step, args)
            if step == 1:
                run.print(shown(samples, tokenizer, rewards.tolist()))
            run.keep(sample_rows(args.log_samples, samples, tokenizer, {"reward": rewards, **score.each}))
            new = Batch(samples, rewards, reference_logps(model, reference, samples, args).sum(1))
            for part in gathered([moved(new, "cpu")]):
                buffer = store(buffer, part, args.buffer_size)
        sampled = time.perf_counter()
        batch = moved(draw(buffer, step, args), device)

        # update
        columns = found | update(model, optimizer, batch, args)

        # evaluate
        groups, lengths = batch.rewards.view(-1, args.num_generations), batch.samples.completion_mask.sum(1).float()
        lowest, highest = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
        columns |= {
            "reward": batch.rewards.nanmean().item(),
            "reward_std": (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean().item(),
            "frac_zero_std": (lowest >= highest).float().mean().item(),
            "length": lengths.mean().item(),
            "truncated": 1 - batch.samples.ended.float().mean().item(),
            "learning_rate": rate,
            "time/sample": sampled - begun,
            "time/step": time.perf_counter() - begun,
        }
        columns["time/tokens_per_second"] = total(lengths.sum()).item() / columns["time/step"]
        if due:
            columns |= evaluate(model, tokenizer, task, score, args, step, run.keep)
        run.log(step, **averaged(columns))
        run.end_step(step, parts | {"buffer": (*buffer.samples, *buffer[1:])})

    curves: dict = {"reward": ("reward",), "held-out": ("eval/*",), "entropy per token": ("entropy",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
