r"""Tapered Off-Policy REINFORCE (TOPR).

Le Roux et al. 2025, "Tapered Off-Policy REINFORCE: Stable and Efficient Reinforcement Learning for LLMs" (arXiv
2503.14286, equations 7 and 8).

Parent: grpo.py. No clip and no group baseline: wrong answers count as far as the policy still gives them.

Samples are dear, so each batch serves several updates, and the policy moves away from the one that sampled. Right
answers can be imitated however old they are. Wrong ones cannot be pushed away for ever: their log-probability has no
lower bound, and the model breaks. So a wrong answer's weight falls with its probability. Each update follows

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
    python algos/topr.py                                                            the embedded model learns countdown
    python algos/topr.py --task sort --max-steps 16                                 a smaller task
    python algos/topr.py --num-minibatches 1 --num-iterations 8                     eight epochs on each batch
    python algos/topr.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing
    python algos/topr.py --model meta-llama/Meta-Llama-3-8B-Instruct --task gsm8k --num-prompts 7424 \
        --num-generations 16 --num-minibatches 58 --learning-rate 5e-7 --aggregation sequence --max-steps 1
                                                                                the authors' hyper-parameters, but for
                                                                                the size of a minibatch: one epoch on
                                                                                answers to 7,424 training questions

Expect
    The default run takes about a minute on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.08, pass@8
    0.43 to greedy 0.52, pass@1 0.50, pass@8 0.62 (seed 1, 128 prompts; 100 steps of four updates).
    Sort, 64 updates on one batch of 2,048 samples, pass@1 from 0.40 (10 seeds; benchmarks/effects.py, topr-stale): TOPR
    gets to 0.92, right answers alone to 0.90. REINFORCE with the same rewards and no ratio falls to 0.01. PPO's clip
    ends between 0.11 and 0.79, at 0.64 on average; TOPR is ahead of it by 0.2 in 5 seeds, where 9 were asked.

Metrics
    As in grpo.py, but
    reward         the share of right answers. There is no frac_zero_std: groups of equal rewards teach, too
    wrong_weight   mean w_i of the wrong answers in the last epoch, there being no clip_fraction: 1 on fresh data, falls
                   as updates follow. Near 0, wrong answers teach nothing

Differences
    - The paper's optimizer is Adafactor, ours AdamW. Its samples are cut to the 500 likeliest tokens, ours are not.
    - Others who use the name take something else: ROLL (_compute_topr_loss) and Trinity-RFT (topr_policy_loss.py) a
      ratio per token, with advantages of the group; a pull request to verl (6986, not merged in August 2026) a ratio
      per completion divided by length.
    - pi_old is the sampler's own log-probability, as in grpo.py. Its rounding (bfloat16) adds up over a completion.
    - beta is 0 for all models: the paper has no KL penalty. Rewards should be from 0 to 1.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.checkpoint import rng_state
from utils.checks import check_model
from utils.cli import main, prepare
from utils.distributed import clip_gradients, deal, share, total, unsharded
from utils.errors import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UserError
from utils.evaluation import advice, decode, evaluate, show_samples
from utils.lm import Means, Samples, completion_logps, micro_batches, sample_all
from utils.memory import check_memory
from utils.models import (
    PolicyArgs,
    autocast,
    eos_ids,
    load_policy,
    load_reference,
    resolve_for,
    save_model,
    trained_parameters,
    trained_state,
    without_dropout,
)
from utils.rewards import Scored, lowered, make_scorer
from utils.run import Run
from utils.schedule import set_learning_rate
from utils.tasks import Task, load_task
from utils.text import encode_prompt, present, usable_prompts

NAME, TITLE = "topr", "TOPR"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=512,
                 micro_batch_size=256, micro_batch_tokens=0, max_completion_length=20, beta=0.0, precision="float32"),
    "full": dict(learning_rate=1e-6, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, beta=0.0,
                 precision="bfloat16"),
    "lora": dict(learning_rate=1e-5, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, beta=0.0,
                 precision="bfloat16"),
}  # fmt: skip


@dataclass
class Args(PolicyArgs):  # and --model --precision --lora-rank --seed --device ...: utils/models.py, utils/cli.py
    task: str = "countdown"
    """countdown, sort, gsm8k, a .jsonl or .parquet file, or a hub dataset"""
    prompt_column: str = "prompt"
    """column of a dataset with the prompt: text or chat messages"""
    reward: tuple[str, ...] = ()
    """reward functions (FILE.py:NAME or PACKAGE.MODULE:NAME, called as by TRL) and reward models (folder or hub name;
    ensembles: append :mean, :worst-case or :uncertainty=L); none: the task's own score"""
    reward_weights: tuple[float, ...] = ()
    """one weight per reward function; none: all 1"""
    combine: Literal["sum", "min", "mean-std"] = "sum"
    """several reward models as one: the least of their raw scores, or mean minus deviation. It has no weight"""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """subtracted from the reward of a completion that was cut off, in training"""
    max_steps: PositiveInt = 100
    """steps: each samples, then updates"""
    num_prompts: PositiveInt | None = None
    """prompts per step"""
    num_generations: PositiveInt | None = None
    """completions per prompt: G"""
    sample_batch_size: PositiveInt | None = None
    """completions sampled at once, in training and evaluation, rounded to whole prompts; limits the cache's memory"""
    max_completion_length: PositiveInt | None = None
    """most new tokens per completion"""
    max_prompt_length: PositiveInt | None = None
    """longer prompts are dropped; None: those that leave --max-completion-length no room in the model's context, and
    more than 5 % stop the run"""
    temperature: PositiveFloat = 1.0
    """divides the logits, in sampling and in training"""
    micro_batch_size: PositiveInt | None = None
    """completions in one forward and backward pass: a multiple or a divisor of G; changes memory, not the result"""
    num_iterations: PositiveInt = 1
    """update epochs per batch of completions (mu in the paper)"""
    num_minibatches: PositiveInt = 4
    """optimizer steps per update epoch, each on an equal share of the prompts: from the second on, pi_old is stale"""
    baseline: Annotated[float, "from -1 to 1"] = 0.0
    """subtracted from rewards of 1, right, and -1, wrong: c"""
    beta: NonNegativeFloat | None = None
    """weight of the KL penalty; 0 loads no reference model"""
    reset_reference_every: NonNegativeInt = 0
    """steps after which the reference becomes the policy, and the optimizer begins anew (ProRL); 0: never"""
    aggregation: Literal["sequence", "token", "constant"] = "constant"
    """mean over each completion's tokens, then completions; mean over all tokens; sum over B * max_completion_length"""
    mask_truncated_completions: bool = False
    """leave truncated completions out of the loss"""
    learning_rate: PositiveFloat | None = None
    """peak learning rate of AdamW"""
    adam_beta2: Annotated[float, "at least 0 and below 1"] | None = None
    """second-moment decay of AdamW (the first is 0.9)"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """decay after the warm-up"""
    warmup_steps: NonNegativeInt = 0
    """steps of linear warm-up"""
    weight_decay: NonNegativeFloat = 0.0
    """decoupled weight decay"""
    max_grad_norm: PositiveFloat = 1.0
    """gradients are clipped to this norm"""
    eval_every: NonNegativeInt = 20
    """steps between evaluations; 0: at the start and the end only"""
    eval_prompts: PositiveInt = 128
    """held-out prompts per evaluation"""
    eval_samples: PositiveInt = 8
    """sampled answers per held-out prompt"""


class Batch(NamedTuple):
    """What one step learns from. P prompts, G completions of each, B = P * G rows."""

    samples: Samples
    rewards: Tensor  # (B,) float32, NaN: skipped
    ref_logps: Tensor | None  # (B, T), None where beta is 0


def advantages(rewards: Tensor, baseline: float) -> Tensor:
    """Rewards from 0 to 1 become -1 to 1, less the baseline; NaN becomes 0. (P, G) -> (P, G)."""
    return (2 * rewards - 1 - baseline).nan_to_num(0.0)


def token_weights(mask: Tensor, aggregation: str, max_completion_length: int) -> Tensor:
    """Weight of each token's loss in the step's loss, over all B rows. mask (B, T) of 0 and 1 -> (B, T).

    sequence: 1 / (B T_i), as the authors. Not the policy gradient: tokens of long completions count less than others.
    token: 1 / sum of all T_i of the step, as TRL and verl; DAPO's formula takes each group's own sum.
    constant: 1 / (B L_max), Dr. GRPO: all tokens count alike, so lengths bias nothing.
    """
    if aggregation == "sequence":
        return mask / (len(mask) * mask.sum(1, keepdim=True).clamp(min=1))
    if aggregation == "token":
        return mask / mask.sum().clamp(min=1)
    return mask / (len(mask) * max_completion_length)


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


def minibatches(samples: Samples, number: int) -> Iterator[tuple[Samples, slice]]:
    """Equal shares of the prompts with their completions, and the rows of these."""
    prompts, size = len(samples.prompt_ids) // number, len(samples.completion_ids) // number
    for i in range(number):
        these, rows = slice(i * prompts, (i + 1) * prompts), slice(i * size, (i + 1) * size)
        yield Samples(*(x[these] for x in samples[:2]), *(x[rows] for x in samples[2:])), rows


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of completions. Returns metrics."""
    samples, groups = batch.samples, batch.rewards.view(-1, args.num_generations)
    advantage = advantages(groups, args.baseline).view(-1, 1)
    mask, wrong = samples.completion_mask, advantage < 0
    if args.mask_truncated_completions:
        mask = mask & samples.ended[:, None]
    norms: list[Tensor] = []
    for _ in range(args.num_iterations):
        means, wrongs = Means(mask.sum().clamp(min=1)), Means(wrong.sum().clamp(min=1))
        for minibatch, here in minibatches(samples, args.num_minibatches):
            if not norms:
                first = Means(mask[here].sum().clamp(min=1))
            weights = token_weights(mask[here].to(samples.logps.dtype), args.aggregation, args.max_completion_length)
            optimizer.zero_grad(set_to_none=True)
            parts = micro_batches(minibatch, args.micro_batch_size, args.micro_batch_tokens)
            for (part, inputs), counts in deal(parts, model):  # to this process, of perhaps several
                with autocast(model.device, args.precision):
                    logps, entropy = completion_logps(model, *inputs, args.temperature)
                rows, width = part + here.start, logps.shape[1]
                old_logps, valid = samples.logps[rows, :width], counts * mask[rows, :width]
                loss, weight = policy_loss(logps, old_logps, advantage[rows], valid)
                wrongs.add(counts * wrong[rows], wrong_weight=weight)
                if batch.ref_logps is not None:
                    kl = k3(logps, batch.ref_logps[rows, :width])
                    loss = loss + args.beta * kl
                    means.add(valid, kl=kl)
                (counts * loss * weights[part, :width]).sum().backward()
                logps = logps.detach()
                means.add(valid, approx_kl=k3(old_logps, logps), entropy=entropy)
                if not norms:
                    first.add(valid, sampler_gap=(logps - old_logps).abs())
            norms.append(clip_gradients(model.parameters(), args.max_grad_norm))
            optimizer.step()
    return first.read() | means.read() | wrongs.read() | {"grad_norm": torch.stack(norms).mean().item()}


def collect(model, tokenizer, task: Task, score: Callable, step: int, args: Args) -> tuple[Samples, Scored]:
    """Samples and scores G completions for each of the step's P prompts."""
    first = (step - 1) * args.num_prompts
    rows = [task.train(first + i, args.seed) for i in range(args.num_prompts)]
    prompts = [present(row, tokenizer) for row in rows]
    tokens = [encode_prompt(row, tokenizer) for row in rows]
    with autocast(model.device, args.precision):
        samples = sample_all(model, tokens, args.num_generations, args.max_completion_length,
                             eos_ids(model, tokenizer), args.temperature, args.sample_batch_size,
                             (args.seed, "train", step))  # fmt: skip
    texts, token_lists = decode(samples, tokenizer)
    repeated, shown = ([x for x in xs for _ in range(args.num_generations)] for xs in (rows, prompts))
    return samples, lowered(score(repeated, shown, texts, token_lists, step), samples.ended, args.missing_eos_penalty)


@torch.no_grad()
def reference_logps(model, ref_model, batch: Batch, args: Args) -> Tensor:
    """Log-probabilities (B, T) under the reference: `ref_model`, or the policy without its LoRA adapters."""
    out = torch.zeros_like(batch.samples.logps)
    with autocast(model.device, args.precision), nullcontext() if ref_model else model.disable_adapter():
        with unsharded(model, ref_model):
            for rows, inputs in share(micro_batches(batch.samples, args.micro_batch_size, args.micro_batch_tokens)):
                logps, _ = completion_logps(ref_model or model, *inputs, args.temperature)
                out[rows, : logps.shape[1]] = logps
    return total(out)


def check_groups(args: Args) -> None:
    """Raises UserError for groups that cannot be split, and for a reference that cannot be reset."""
    if args.num_prompts % args.num_minibatches:
        raise UserError(f"--num-minibatches {args.num_minibatches} must divide --num-prompts {args.num_prompts}")
    if args.reset_reference_every and (args.lora_rank or args.beta == 0):
        right = "leave out --lora-rank" if args.lora_rank else "give a --beta above 0"
        raise UserError(f"--reset-reference-every needs a reference model of its own: {right}")
    size, group = args.micro_batch_size, args.num_generations
    if not args.micro_batch_tokens and size % group and group % size:
        raise UserError(f"--micro-batch-size {size} must be a multiple or a divisor of --num-generations {group}")


def train(args: Args) -> list[dict]:
    device = prepare(args)
    task = load_task(args.task, args.prompt_column)
    score = make_scorer(task, args.reward, args.reward_weights, args.max_steps, device, args.trust_remote_code)
    model, tokenizer = load_policy(args, device)
    settings = resolve_for(model, args, PRESETS)
    without_dropout(model)
    check_groups(args)
    check_model(model, args.precision)
    task = usable_prompts(task, model, tokenizer, args)
    ref_model = load_reference(args, device) if args.beta > 0 else None
    moving = ref_model if args.reset_reference_every else None  # is reset below, and so belongs to the run's state
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=args.learning_rate, betas=(0.9, args.adam_beta2),
                                  weight_decay=args.weight_decay, fused=True)  # fmt: skip
    prompts = [encode_prompt(row, tokenizer) for row in task.heldout]
    settings += check_memory(model, args, prompt=max(map(len, prompts)), reference=True)
    evaluation = partial(evaluate, model, tokenizer, task, score, args.eval_prompts, args.eval_samples,
                         args.max_completion_length, args.temperature, args.seed,
                         rows_at_once=args.sample_batch_size, precision=args.precision)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"),
              schedule_depends_on_budget=args.lr_schedule != "constant")  # fmt: skip
    run.print(settings)

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict(),
                "reference": [moving.state_dict()] if moving else []}  # fmt: skip

    if not run.restore(model=model, optimizer=optimizer, reference=(moving,)):
        run.log(0, **evaluation())
        run.save(0, state())
    model.train()
    while run.step < args.max_steps:
        start, before = time.perf_counter(), (run.step, state, rng_state())
        step = run.step + 1
        rate = set_learning_rate(optimizer, step, args)

        # collect
        with run.saving(*before):
            samples, scored = collect(model, tokenizer, task, score, step, args)
        sampled, due = time.perf_counter(), run.due(step, args.eval_every)
        if step == 1 or due:
            run.print(show_samples(tokenizer, samples, scored.rewards.tolist(), scored.extra))
        batch = Batch(samples, scored.rewards.to(device), None)
        if args.beta > 0:
            batch = batch._replace(ref_logps=reference_logps(model, ref_model, batch, args))

        # update
        columns = update(model, optimizer, batch, args)
        if moving and step % args.reset_reference_every == 0:
            moving.load_state_dict(trained_state(model), strict=False)  # not strict: tied weights have one name
            optimizer.state.clear()

        # evaluate
        groups, lengths = batch.rewards.view(-1, args.num_generations), samples.completion_mask.sum(1).float()
        columns |= {
            "reward": batch.rewards.nanmean().item(),
            "reward_std": (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean().item(),
            "length": lengths.mean().item(),
            "truncated": 1 - samples.ended.float().mean().item(),
            "learning_rate": rate,
            **scored.columns,
            **model.sampler_columns,
            "time/sample": sampled - start,
            "time/step": time.perf_counter() - start,
        }
        columns["time/tokens_per_second"] = lengths.sum().item() / columns["time/step"]
        if due:
            with run.saving(step, state, columns=columns):
                columns |= evaluation(step=step)
        run.log(step, **columns)
        if line := advice(run.history):
            run.print(f"step {step}: {line}")
        run.end_step(step, state)

    curves = {"reward": ("reward",), "held-out": ("eval/[!d]*",), "entropy per token": ("entropy",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train)
