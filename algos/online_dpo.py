r"""Online Direct Preference Optimization (Online DPO, OAIF), and Exploratory Preference Optimization (XPO).

Guo et al. 2024, "Direct Language Model Alignment from Online AI Feedback" (arXiv 2402.04792, section 3, algorithm 1).
XPO: Xie et al. 2024, "Exploratory Preference Optimization" (arXiv 2405.21046, algorithm 1).

Parent: grpo.py. DPO's loss on pairs of answers replaces the policy gradient.

The policy answers each prompt twice, y_1 and y_2. The answer with the higher reward is preferred. After one optimizer
step on DPO's loss (arXiv 2305.18290, equation 7) it answers anew. Minimises

    L(theta) = - mean over pairs  log sigmoid( beta [ h(x, y_w) - h(x, y_l) ] )

    y_w, y_l  of y_1 and y_2, the preferred and the other answer to the prompt x
    h(x, y)   = log pi_theta(y | x) - log pi_ref(y | x)   log-ratio, each log-probability the sum over the tokens of y
                                                          up to and including the first EOS
    pi_ref    the policy as it was before the first step
    beta      --beta: how strongly the policy is held to pi_ref

--loss ipo has (h(x, y_w) - h(x, y_l) - 1/(2 beta))^2 instead. XPO (alpha = --xpo-alpha above 0) samples y_2 from the
reference, and its loss is

    L(theta) + alpha mean over pairs  log pi_theta(y_2 | x)

The added term makes the reference's answers less likely. It is -alpha E_x KL(pi_ref || pi_theta) plus a constant: a
bonus for leaving the reference, with gradient 0 where the two are equal.

Where pi_theta = pi_ref the expected gradient of L is -2 beta (ipo: -4/beta) times the policy gradient of P(y beats y'),
y' an independent sample, ties half. For rewards 0 and 1 that is -beta (ipo: -2/beta) times the policy gradient of the
mean reward: the first step is REINFORCE.

Run
    python algos/online_dpo.py                                                      the embedded model learns countdown
    python algos/online_dpo.py --task sort --max-steps 16                           a smaller task
    python algos/online_dpo.py --xpo-alpha 1e-3                                     XPO
    python algos/online_dpo.py --model ORG/NAME --task prompts.jsonl --reward rewards.py:accuracy --num-prompts 128 \
        --learning-rate 5e-7 --warmup-steps 150 --temperature 0.9
                                                                                    the paper's hyper-parameters
    python algos/online_dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k      a real model, on a GPU

Expect
    The default run takes a minute on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.08, pass@8 0.43 to
    greedy 0.54, pass@1 0.47, pass@8 0.70 (seed 1, 128 prompts). Most of it comes in the first 20 steps. After that the
    policy sharpens. --num-prompts 256, in twice the time: 0.55, 0.47, 0.67. grpo.py, also with 512 completions a step:
    0.58, 0.53, 0.69.
    --task sort --max-steps 16: greedy 0.23 to 0.99, pass@1 0.40 to 0.94, pass@8 0.88 to 1.00, in about 12 seconds.
    --loss ipo: 1.00, 0.95, 1.00. --xpo-alpha 1e-3: 0.90, 0.77, 0.98; 1e-2: 0.66, 0.56, 0.84. Half of XPO's
    completions are the reference's, and sort needs no exploration. A real model: not measured.

Metrics
    reward         mean over the policy's completions; rises. Columns of single functions include the reference's
                   completions where there are any
    accuracy       share of pairs with a preference whose y_w has the larger h, before the step; equal h count
                   half. The first step's is rounding. It does not go to 1 as in dpo.py: samples are new, and it
                   measures what the policy still gets wrong. margin: mean of beta [h(y_w) - h(y_l)]
    frac_ties      share of pairs without a preference, which teach nothing; below 0.9. frac_zero_std: share of prompts
                   whose rewards are all equal, the same for two completions a prompt
    kl             mean of h over the policy's completions, nats; grows
    reward/task    the task's own score, where --reward is given. A fall while reward rises is over-optimisation
    eval/greedy, eval/pass@1, eval/pass@8   held-out accuracy: the likeliest answer, a sample, the best of eight. If
                   pass@1 rises and greedy stays, the policy only sharpens. A rise of greedy does not rule that out
    eval/distinct  different right texts among a prompt's --eval-samples; falls as the policy sharpens
    grad_norm      before clipping; falls as frac_ties rises. ipo's is 1/beta in size, so always clipped
    sampler_gap    mean |log pi_theta - log pi_old|, old as sampled; 1e-6 in float32, more means a bug
    engine/weight, engine/above_2, engine/ess   with --sampler, over tokens: mean of pi_theta / pi_engine, its share
                   above 2, effective sample size over the number of tokens; about 1, 0 and 1
    entropy        nats per token; falls, should not reach 0. length: tokens. truncated: share without EOS; below 0.9

Differences
    - OAIF asks a language model which answer is better. Here rewards decide: functions, reward models or the task's
      score. Only their order counts.
    - Two completions a prompt by default. More are G/2 disjoint pairs. open-instruct compared the best of G with
      the worst, until it dropped this script.
    - Pairs without a preference (equal rewards, or None from all functions) give no gradient, but count in L's
      denominator. accuracy and margin leave them out. TRL prefers the first of equal ones, so noise counts as a
      preference; unknown rewards count as 0. XPO's term counts every pair, as in the paper.
    - The reference stays the starting policy. One optimizer step on each batch. XPO's algorithm 1 minimises over all
      pairs so far, and its guarantee is for that. oat takes one step, too.
    - Sampling and scoring both divide logits by --temperature. TRL scores at temperature 1.
    - TRL's positions count padding. That matters for learned positions (GPT-2), not for rotary ones.
    - Dropout is off, as in TRL. AdamW, as in TRL; the paper uses Adafactor.
"""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.checkpoint import rng_state
from utils.checks import check_model
from utils.cli import main, prepare
from utils.distributed import clip_gradients, deal, share, total, unsharded
from utils.errors import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UserError
from utils.evaluation import advice, decode, evaluate, show_samples
from utils.lm import Means, Samples, completion_logps, join, micro_batches, sample_all
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

NAME, TITLE = "online_dpo", "Online DPO"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, num_prompts=128, sample_batch_size=512, micro_batch_size=256,
                 micro_batch_tokens=0, max_completion_length=20, precision="float32"),
    "full": dict(learning_rate=5e-7, num_prompts=256, sample_batch_size=32, micro_batch_size=64,
                 micro_batch_tokens=4096, max_completion_length=512, precision="bfloat16"),
    "lora": dict(learning_rate=5e-6, num_prompts=256, sample_batch_size=32, micro_batch_size=64,
                 micro_batch_tokens=4096, max_completion_length=512, precision="bfloat16"),
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
    num_generations: PositiveInt = 2
    """completions per prompt, G, an even number: the first is compared with the second, the third with the fourth"""
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
    """completions in one forward and backward pass: an even multiple or divisor of G; changes memory, not the result"""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """what is minimised: DPO's loss or IPO's"""
    beta: PositiveFloat = 0.1
    """how strongly the policy is held to the reference"""
    xpo_alpha: NonNegativeFloat = 0.0
    """alpha of XPO, the weight of log pi_theta(y_2 | x); above 0 every second completion is the reference's"""
    learning_rate: PositiveFloat | None = None
    """peak learning rate of AdamW"""
    adam_beta2: Annotated[float, "at least 0 and below 1"] = 0.999
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
    ref_logps: Tensor | None  # (B, T), None until they are known


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
    mask, decided = samples.completion_mask, label.abs()
    tokens = from_policy(mask, args).sum().clamp(min=1)
    means, log_ratios = Means(tokens), torch.zeros_like(samples.logps[:, 0])
    optimizer.zero_grad(set_to_none=True)
    parts = micro_batches(batch.samples, args.micro_batch_size, args.micro_batch_tokens, together=2)
    for (rows, inputs), counts in deal(parts, model):  # to this process, of perhaps several
        with autocast(model.device, args.precision):
            logps, entropy = completion_logps(model, *inputs, args.temperature)
        width, pairs = logps.shape[1], rows[::2] // 2
        valid = counts * mask[rows, :width]
        log_ratio = ((logps - batch.ref_logps[rows, :width]) * valid).sum(1)
        first, second = log_ratio.view(-1, 2).unbind(1)
        loss = preference_loss(label[pairs] * (first - second), args)  # constant where there is no preference
        if args.xpo_alpha:
            loss = loss + args.xpo_alpha * (logps * valid).sum(1)[1::2]
        (counts * loss.sum() / len(label)).backward()
        log_ratios[rows] += log_ratio.detach()
        gap = (logps.detach() - samples.logps[rows, :width]).abs()
        means.add(from_policy(valid, args), sampler_gap=from_policy(gap, args), entropy=from_policy(entropy, args))
    grad_norm = clip_gradients(model.parameters(), args.max_grad_norm)
    optimizer.step()
    first, second = total(log_ratios).view(-1, 2).unbind(1)
    margin = (label * (first - second))[decided > 0]
    return means.read() | {
        "accuracy": ((margin > 0).to(margin.dtype) + (margin == 0) / 2).mean().item(),
        "margin": args.beta * margin.mean().item(),
        "kl": from_policy(log_ratios, args).mean().item(),
        "frac_ties": 1 - decided.mean().item(),
        "grad_norm": grad_norm.item(),
    }


def draw(model, ref_model, prompts: list[list[int]], eos: list[int], step: int, args: Args) -> Samples:
    """G completions of each prompt, from the policy; with --xpo-alpha, every second one is from the reference."""

    def some(of, count: int, purpose: str) -> Samples:
        rows_at_once = args.sample_batch_size * count // args.num_generations
        return sample_all(of, prompts, count, args.max_completion_length, eos, args.temperature, rows_at_once,
                          (args.seed, purpose, step))  # fmt: skip

    if not args.xpo_alpha:
        return some(model, args.num_generations, "train")
    ours = some(model, args.num_generations // 2, "train")
    with nullcontext() if ref_model else model.disable_adapter():
        theirs = some(ref_model or model, args.num_generations // 2, "reference")
    both = join([ours, theirs])
    in_turn = torch.arange(len(both.ended), device=model.device).view(2, -1).T.flatten()
    return Samples(*ours[:2], *(x[in_turn] for x in both[2:]))


def collect(model, ref_model, tokenizer, task: Task, score: Callable, step: int,
            args: Args) -> tuple[Samples, Scored]:  # fmt: skip
    """Samples and scores G completions for each of the step's P prompts."""
    first = (step - 1) * args.num_prompts
    rows = [task.train(first + i, args.seed) for i in range(args.num_prompts)]
    prompts = [present(row, tokenizer) for row in rows]
    tokens = [encode_prompt(row, tokenizer) for row in rows]
    with autocast(model.device, args.precision):
        samples = draw(model, ref_model, tokens, eos_ids(model, tokenizer), step, args)
    texts, token_lists = decode(samples, tokenizer)
    repeated, shown = ([x for x in xs for _ in range(args.num_generations)] for xs in (rows, prompts))
    return samples, lowered(score(repeated, shown, texts, token_lists, step), samples.ended, args.missing_eos_penalty)


def zero_std(groups: Tensor) -> Tensor:
    """Which groups have equal rewards, or none that is known. NaN is left out. (P, G) -> (P,) bool."""
    low, high = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
    return ~(high > low)


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
    """Raises UserError for completions that cannot be paired or split."""
    if args.num_generations < 2 or args.num_generations % 2:
        raise UserError(f"--num-generations is {args.num_generations}: it must be even, for completions come in pairs")
    size, group = args.micro_batch_size, args.num_generations
    if size % 2 or (not args.micro_batch_tokens and size % group and group % size):
        raise UserError(
            f"--micro-batch-size {size} must be even and a multiple or a divisor of --num-generations {group}"
        )


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
    ref_model = load_reference(args, device)
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=args.learning_rate, betas=(0.9, args.adam_beta2),
                                  weight_decay=args.weight_decay, fused=True)  # fmt: skip
    prompts = [encode_prompt(row, tokenizer) for row in task.heldout]
    settings += check_memory(model, args, prompt=max(map(len, prompts)), reference=True)
    evaluation = partial(evaluate, model, tokenizer, task, score, args.eval_prompts, args.eval_samples,
                         args.max_completion_length, args.temperature, args.seed,
                         rows_at_once=args.sample_batch_size, precision=args.precision)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "accuracy", "eval/greedy", "eval/pass@1"),
              schedule_depends_on_budget=args.lr_schedule != "constant")  # fmt: skip
    run.print(settings)

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict()}

    if not run.restore(model=model, optimizer=optimizer):
        run.log(0, **evaluation())
        run.save(0, state())
    model.train()
    while run.step < args.max_steps:
        start, before = time.perf_counter(), (run.step, state, rng_state())
        step = run.step + 1
        rate = set_learning_rate(optimizer, step, args)

        # collect
        with run.saving(*before):
            samples, scored = collect(model, ref_model, tokenizer, task, score, step, args)
        sampled, due = time.perf_counter(), run.due(step, args.eval_every)
        if step == 1 or due:
            run.print(show_samples(tokenizer, samples, scored.rewards.tolist(), scored.extra))
        batch = Batch(samples, scored.rewards.to(device), None)
        batch = batch._replace(ref_logps=reference_logps(model, ref_model, batch, args))

        # update
        columns = update(model, optimizer, batch, args)

        # evaluate
        groups, lengths = batch.rewards.view(-1, args.num_generations), samples.completion_mask.sum(1).float()
        columns |= {
            "reward": from_policy(batch.rewards, args).nanmean().item(),
            "frac_zero_std": zero_std(groups).float().mean().item(),
            "length": from_policy(lengths, args).mean().item(),
            "truncated": 1 - from_policy(samples.ended, args).float().mean().item(),
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

    curves = {"reward": ("reward",), "held-out": ("eval/[!d]*",), "nats from the reference": ("kl",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train)
