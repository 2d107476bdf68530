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
    python algos/gspo.py                                                            the embedded model learns countdown
    python algos/gspo.py --task sort --max-steps 16                                 a smaller task
    python algos/gspo.py --task sort --max-steps 10 --num-iterations 8 --num-minibatches 1      very stale data
    python algos/gspo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing

Expect
    The default run: held-out countdown goes from greedy 0.01, pass@1 0.08 to greedy 0.53, pass@1 0.43 after 20 steps of
    four updates, and to 0.51 to 0.54 and 0.50 to 0.52 after 100 (seed 1, 128 prompts, two threads and one), in 2.5
    minutes on two CPU cores. pi_old costs one more forward pass a step.
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
    - beta is 0 for the embedded model, as in the paper, and 0.04 for others, as in grpo.py: then the loss has beta
      k3_it, too.
    - verl caps the log-ratio of a completion at 10. Here nothing is capped.
    - The paper's second form, GSPO-token, has the same gradient where all tokens of a completion share one advantage.
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

NAME, TITLE = "gspo", "GSPO"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=512,
                 micro_batch_size=256, micro_batch_tokens=0, max_completion_length=20, beta=0.0, precision="float32"),
    "full": dict(learning_rate=1e-6, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, beta=0.04,
                 precision="bfloat16"),
    "lora": dict(learning_rate=1e-5, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, beta=0.04,
                 precision="bfloat16"),
}  # fmt: skip
STD_EPSILON = 1e-4  # the paper names none; 1e-4 as in most code


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
    epsilon: PositiveFloat = 3e-4
    """lower clip of a completion's ratio: 1 - epsilon"""
    epsilon_high: PositiveFloat = 4e-4
    """upper clip of a completion's ratio: 1 + epsilon_high"""
    beta: NonNegativeFloat | None = None
    """weight of the KL penalty; 0 loads no reference model"""
    reset_reference_every: NonNegativeInt = 0
    """steps after which the reference becomes the policy, and the optimizer begins anew (ProRL); 0: never"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """divide advantages by the standard deviation of their group or of the batch, or not at all"""
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


def advantages(rewards: Tensor, scale: str) -> Tensor:
    """Rewards minus their group's mean, divided by the group's or batch's std + STD_EPSILON. (P, G) -> (P, G).

    NaN rewards are left out of means and deviations and get 0. A group of equal rewards gets 0, too, even if rounding
    moves its mean. DeepSeekMath section 4.1.2; "none": arXiv 2503.20783.
    """

    def std(values: Tensor) -> Tensor:
        known = values[~values.isnan()]
        # the paper does not say which deviation: the unbiased one here, as in most code
        return known.std(correction=1) if len(known) > 1 else values.new_zeros(())

    centred = rewards - rewards.nanmean(1, keepdim=True)
    if scale == "group":
        centred = centred / (torch.stack([std(group) for group in rewards])[:, None] + STD_EPSILON)
    elif scale == "batch":
        centred = centred / (std(rewards) + STD_EPSILON)
    return centred.nan_to_num(0.0).masked_fill(zero_std(rewards)[:, None], 0.0)


def policy_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, low: float,
                high: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Clipped surrogate per completion, to be minimised, and where the clip cuts the gradient. arXiv 2507.18071,
    equations 5 and 7. logps, old_logps, mask (B, T), advantages (B, 1) -> (B, 1), (B, 1) bool. No tokens: ratio 1."""
    ratio = (((logps - old_logps) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.min(unclipped, clipped), clipped < unclipped


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
    advantage = advantages(groups, args.scale_rewards).view(-1, 1)
    mask = samples.completion_mask
    if args.mask_truncated_completions:
        mask = mask & samples.ended[:, None]
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    weights = mask * args.num_minibatches / (len(mask) * lengths)  # means over a completion, and over a minibatch
    old_logps = reference_logps(model, model, batch, args)
    norms: list[Tensor] = []
    for _ in range(args.num_iterations):
        means, clips = Means(mask.sum().clamp(min=1)), Means(len(mask))
        for minibatch, here in minibatches(samples, args.num_minibatches):
            optimizer.zero_grad(set_to_none=True)
            parts = micro_batches(minibatch, args.micro_batch_size, args.micro_batch_tokens)
            for (part, inputs), counts in deal(parts, model):  # to this process, of perhaps several
                with autocast(model.device, args.precision):
                    logps, entropy = completion_logps(model, *inputs, args.temperature)
                rows, width = part + here.start, logps.shape[1]
                old, valid = old_logps[rows, :width], counts * mask[rows, :width]
                loss, clipped = policy_loss(logps, old, advantage[rows], valid, args.epsilon, args.epsilon_high)
                if batch.ref_logps is not None:
                    kl = k3(logps, batch.ref_logps[rows, :width])
                    loss = loss + args.beta * kl
                    means.add(valid, kl=kl)
                (counts * loss * weights[rows, :width]).sum().backward()
                clips.add(counts, clip_fraction=clipped)
                means.add(valid, approx_kl=k3(old, logps.detach()), entropy=entropy)
            norms.append(clip_gradients(model.parameters(), args.max_grad_norm))
            optimizer.step()
    gap = ((old_logps - samples.logps).abs() * mask).sum() / mask.sum().clamp(min=1)
    metrics = clips.read() | means.read() | {"grad_norm": torch.stack(norms).mean().item()}
    return metrics | {"sampler_gap": gap.item()}


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


def zero_std(groups: Tensor) -> Tensor:
    """Which groups have equal rewards, or none that is known. NaN is left out. (P, G) -> (P,) bool."""
    low, high = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
    return ~(high > low)


@torch.no_grad()
def reference_logps(model, ref_model, batch: Batch, args: Args) -> Tensor:
    """Log-probabilities (B, T) under `ref_model`, or under the policy without its LoRA adapters."""
    out = torch.zeros_like(batch.samples.logps)
    with autocast(model.device, args.precision), nullcontext() if ref_model else model.disable_adapter():
        with unsharded(model, ref_model):
            for rows, inputs in share(micro_batches(batch.samples, args.micro_batch_size, args.micro_batch_tokens)):
                logps, _ = completion_logps(ref_model or model, *inputs, args.temperature)
                out[rows, : logps.shape[1]] = logps
    return total(out)


def check_groups(args: Args) -> None:
    """Raises UserError for groups that cannot be compared or split, and for a reference that cannot be reset."""
    if args.num_generations < 2:
        raise UserError("--num-generations must be at least 2: a group of one has no other reward to compare with")
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
            "frac_zero_std": zero_std(groups).float().mean().item(),
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
