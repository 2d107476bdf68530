r"""Decoupled Clip and Dynamic sAmpling Policy Optimization (DAPO).

Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (arXiv 2503.14476, section 3,
equations 8 and 13).

Parent: grpo.py. New groups replace those that teach nothing, and answers near the length limit lose reward.

A group with equal rewards has no advantage, so prompts are drawn until enough groups have different rewards, at most
--max-sampling-rounds times. The loss is a mean over all tokens of the batch, the upper clip is wider, and there is no
KL penalty. Maximises

    J(theta) = E  1/sum_i T_i  sum_i sum_t min[ rho_it A_i, clip(rho_it, 1 - eps, 1 + eps_high) A_i ]
               over groups in which not all R_i are equal

    x, y_i   a prompt, and the i-th of G completions that pi_old samples for it, with reward R_i
    R'_i     = R_i + max(-1, min(0, (L_max - L_cache - T_i) / L_cache))   reward with the overlong penalty
    A_i      = (R'_i - mean(R'_1..R'_G)) / std(R'_1..R'_G)            advantage, the same for every token of y_i
    rho_it   = pi_theta(y_it | x, y_i,<t) / pi_old(y_it | x, y_i,<t)  probability ratio
    T_i      number of tokens of y_i up to and including the first EOS
    G, eps, eps_high   --num-generations, --epsilon, --epsilon-high
    L_max, L_cache     --max-completion-length, --overlong-buffer

With --scale-rewards none, --aggregation constant and no penalty, refilling divides the expected gradient by the share
of all groups that are kept: one number for all prompts. A hard prompt's group teaches more once it is kept, and is kept
less often. So the direction stays. The gain is a larger batch where answers are mostly all right or all wrong. The
price is more samples.

Run
    python algos/dapo.py                                                            the embedded model learns countdown
    python algos/dapo.py --task sort --max-steps 16                                 a smaller task
    python algos/dapo.py --max-completion-length 14 --overlong-buffer 2             long answers lose reward
    python algos/dapo.py --task sort --keep-accuracy 0.2 0.8                        neither easy nor hard prompts
                                                                                    (Bae et al., arXiv 2504.03380)
    python algos/dapo.py --model Qwen/Qwen2.5-32B --task prompts.jsonl --reward rewards.py:accuracy \
        --num-prompts 512 --num-generations 16 --max-completion-length 20480 --overlong-buffer 4096 \
        --num-minibatches 16 --learning-rate 1e-6 --warmup-steps 20
                                                                                    the paper's hyper-parameters
                                                                                    (section 4.1)
    python algos/dapo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing

Expect
    The default run takes 1.5 minutes on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.08, pass@8
    0.43 to greedy 0.55, pass@1 0.52, pass@8 0.66 (seed 1, 128 prompts). grpo.py ends at 0.50-0.58, 0.47-0.53, 0.65-0.67
    (8 seeds, 256 prompts).
    At equal steps it is a little better: all trained groups teach. The reward of steps 41 to 50 is 0.57 and 0.58 (seeds
    1 and 2), with grpo.py 0.52 to 0.56 (8 seeds). Control: --max-sampling-rounds 1 replaces nothing. Then 0.69 of the
    groups teach, and the reward of steps 31 to 40 is 0.51, as with grpo.py, not 0.54 (seed 1).
    At equal completions nothing is gained. It samples 126,000 in 100 steps, grpo.py 51,200. After 51,200 (step 50 here)
    greedy is 0.56 and 0.51, pass@1 0.48 and 0.48 (seeds 1 and 2): no more than grpo.py has at its end.
    Clip and penalty do next to nothing here: rho is 1, and few answers have more than 16 of the 20 tokens allowed.
    --max-completion-length 14 --overlong-buffer 2 shows the penalty: 0.25 of the answers are cut off in step 1, 0.17 in
    steps 6 to 10. Control, --overlong-buffer 0: 0.25, then 0.34, but more right answers (seed 1).
    --task sort --max-steps 16: greedy 0.23 to 1.00, pass@1 0.40 to 0.97, pass@8 0.88 to 1.00 (seeds 1 and 2).

Metrics
    reward         mean over all sampled completions, without the penalty; rises
    sampled        completions sampled in the step; num_prompts * num_generations of them are trained on
    frac_zero_std  share of trained groups with equal rewards: 0 if --max-sampling-rounds were enough
    reward_std     mean within the trained groups
    overlong_penalty  mean over the trained completions, also of groups where it is left out; towards 0
    reward/task    the task's own score, where --reward is given. A fall while reward rises is over-optimisation
    eval/greedy, eval/pass@1, eval/pass@8   held-out accuracy: the likeliest answer, a sample, the best of eight. If
                   pass@1 rises and greedy stays, the policy only sharpens. A rise of greedy does not rule that out
    eval/distinct  different right texts among a prompt's --eval-samples; falls as the policy sharpens
    grad_norm      before clipping, mean over the step's updates; steady
    kl             as in grpo.py (beta > 0 only); grows slowly
    approx_kl      mean of rho - 1 - log rho in the last update epoch; near 0 with one epoch
    clip_fraction  share of tokens whose gradient is cut; below 0.3. In the first epoch 0 in float32; in bfloat16 the
                   sampler's rounding alone can take a few tokens beyond the clip
    sampler_gap    mean |log pi_theta - log pi_old| before the first update; 1e-6 in float32, more means a bug
    engine/weight, engine/above_2, engine/ess   with --sampler, over tokens: mean of pi_theta / pi_engine, its share
                   above 2, effective sample size over the number of tokens; about 1, 0 and 1
    entropy        nats per token; falls, should not reach 0. length: tokens. truncated: share without EOS; below 0.9
    length, truncated, entropy describe the trained completions. The loss is not logged: at rho = 1 its value says
    nothing about its gradient.

Differences
    - The paper takes 16 optimizer steps on each batch; here it is one. The clip needs --num-minibatches or
      --num-iterations above 1. Advantages are those of the whole batch, denominators those of a minibatch.
    - The paper samples until the batch is full. Here it is at most --max-sampling-rounds times; groups with equal
      rewards fill the rest. They have no penalty, so they teach nothing.
    - Groups are judged by their rewards before the penalty: the paper asks for right and wrong answers in each group.
    - The paper's rewards are 1 and -1. The tasks' own are 1 and 0, so the penalty weighs twice as much.
    - The formula divides by the tokens of each group; this script, TRL and verl by those of a minibatch.
    - beta is 0, as in the paper. --beta above 0 adds GRPO's penalty.
    - pi_old is the sampler's own log-probability. That corrects a gap between sampler and scorer (bfloat16), as far as
      the clip lets it, and saves a forward pass. TRL recomputes it, or takes rho = 1.
    - Dropout is off, so that the updated policy is the one that sampled. TRL keeps the model's own.
    - Sampling and scoring both divide logits by --temperature. There is no top-k or top-p.
    - --mask-truncated-completions is the paper's overlong filtering. Masked completions still count in their group.
    - A sample whose reward functions all return None has advantage 0, and does not count in its group's mean and std.
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
from utils.evaluation import advice, decode, evaluate, mean, show_samples
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

NAME, TITLE = "dapo", "DAPO"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=512,
                 micro_batch_size=256, micro_batch_tokens=0, max_completion_length=20, overlong_buffer=4,
                 precision="float32"),
    "full": dict(learning_rate=1e-6, adam_beta2=0.999, num_prompts=32, num_generations=16, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, overlong_buffer=102,
                 precision="bfloat16"),
    "lora": dict(learning_rate=1e-5, adam_beta2=0.999, num_prompts=32, num_generations=16, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, overlong_buffer=102,
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
    num_minibatches: PositiveInt = 1
    """optimizer steps per update epoch, each on an equal share of the prompts: from the second on, pi_old is stale"""
    epsilon: PositiveFloat = 0.2
    """lower clip of the ratio: 1 - epsilon"""
    epsilon_high: PositiveFloat = 0.28
    """upper clip of the ratio: 1 + epsilon_high"""
    beta: NonNegativeFloat = 0.0
    """weight of the KL penalty; 0 loads no reference model"""
    reset_reference_every: NonNegativeInt = 0
    """steps after which the reference becomes the policy, and the optimizer begins anew (ProRL); 0: never"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """divide advantages by the standard deviation of their group or of the batch, or not at all"""
    aggregation: Literal["sequence", "token", "constant"] = "token"
    """mean over each completion's tokens, then completions; mean over all tokens; sum over B * max_completion_length"""
    mask_truncated_completions: bool = False
    """leave truncated completions out of the loss"""
    overlong_buffer: NonNegativeInt | None = None
    """tokens before the length limit over which the penalty grows from 0 to 1: L_cache; 0: no penalty"""
    max_sampling_rounds: PositiveInt = 4
    """most sampling rounds per step; each after the first replaces groups with equal rewards"""
    keep_accuracy: tuple[float, float] | None = None
    """LOW HIGH: groups are kept where LOW <= mean reward <= HIGH; None: where rewards differ (arXiv 2504.03380)"""
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


def overlong_penalty(lengths: Tensor, max_completion_length: int, buffer: int) -> Tensor:
    """Added to the reward of a long completion: 0, then linearly down to -1 over the last `buffer` tokens before the
    limit. Equation 13. (B,) -> (B,)."""
    return ((max_completion_length - buffer - lengths) / max(1, buffer)).clamp(-1, 0)


def token_weights(mask: Tensor, aggregation: str, max_completion_length: int) -> Tensor:
    """Weight of each token's loss in the step's loss, over all B rows. mask (B, T) of 0 and 1 -> (B, T).

    sequence: 1 / (B T_i), the paper's. Not the policy gradient: tokens of long completions count less than others.
    token: 1 / sum of all T_i of the step, as TRL and verl; equation 8 divides by each group's.
    constant: 1 / (B L_max), Dr. GRPO: all tokens count alike, so lengths bias nothing.
    """
    if aggregation == "sequence":
        return mask / (len(mask) * mask.sum(1, keepdim=True).clamp(min=1))
    if aggregation == "token":
        return mask / mask.sum().clamp(min=1)
    return mask / (len(mask) * max_completion_length)


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
    norms: list[Tensor] = []
    for _ in range(args.num_iterations):
        means = Means(mask.sum().clamp(min=1))
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
                loss, clipped = policy_loss(logps, old_logps, advantage[rows], args.epsilon, args.epsilon_high)
                if batch.ref_logps is not None:
                    kl = k3(logps, batch.ref_logps[rows, :width])
                    loss = loss + args.beta * kl
                    means.add(valid, kl=kl)
                (counts * loss * weights[part, :width]).sum().backward()
                logps = logps.detach()
                means.add(valid, clip_fraction=clipped, approx_kl=k3(old_logps, logps), entropy=entropy)
                if not norms:
                    first.add(valid, sampler_gap=(logps - old_logps).abs())
            norms.append(clip_gradients(model.parameters(), args.max_grad_norm))
            optimizer.step()
    return first.read() | means.read() | {"grad_norm": torch.stack(norms).mean().item()}


def collect(model, tokenizer, task: Task, score: Callable, step: int, args: Args,
            first: int) -> tuple[Samples, Scored]:  # fmt: skip
    """Samples and scores G completions for each of P prompts, from row `first` of the task on."""
    rows = [task.train(first + i, args.seed) for i in range(args.num_prompts)]
    prompts = [present(row, tokenizer) for row in rows]
    tokens = [encode_prompt(row, tokenizer) for row in rows]
    with autocast(model.device, args.precision):
        samples = sample_all(model, tokens, args.num_generations, args.max_completion_length,
                             eos_ids(model, tokenizer), args.temperature, args.sample_batch_size,
                             (args.seed, "train", step), first)  # fmt: skip
    texts, token_lists = decode(samples, tokenizer)
    repeated, shown = ([x for x in xs for _ in range(args.num_generations)] for xs in (rows, prompts))
    return samples, lowered(score(repeated, shown, texts, token_lists, step), samples.ended, args.missing_eos_penalty)


def refill(more: Callable[[int], tuple[Samples, Scored]], first: int,
           args: Args) -> tuple[Samples, Scored, Tensor, int]:  # fmt: skip
    """P groups whose rewards are not all equal (the constraint of equation 8), or whose mean lies in --keep-accuracy.
    Samples rounds of P prompts until there are P such groups, at most --max-sampling-rounds times. Groups that teach
    nothing fill the rest: with equal rewards, or outside --keep-accuracy and so with the reward NaN.

    Returns the groups (columns of reward functions: means over rounds), all sampled rewards, and the next row of the
    task.
    """
    rounds, rewards, flat = [], torch.empty(0), torch.empty(0, dtype=torch.bool)
    while len(rounds) < args.max_sampling_rounds and (~flat).sum() < args.num_prompts:
        rounds.append(more(first))
        first += args.num_prompts
        rewards = torch.cat([scored.rewards for _, scored in rounds])
        answers = rewards.view(-1, args.num_generations)
        flat = zero_std(answers)
        if args.keep_accuracy:
            low, high = args.keep_accuracy
            flat = ~((answers.nanmean(1) >= low) & (answers.nanmean(1) <= high))
    samples = join([samples for samples, _ in rounds])
    groups = flat.int().argsort(stable=True)[: args.num_prompts]  # in the order of sampling, flat ones last
    rows = (groups[:, None] * args.num_generations + torch.arange(args.num_generations)).flatten()
    samples = Samples(*(x[groups] for x in samples[:2]), *(x[rows] for x in samples[2:]))
    logged = [scored.columns for _, scored in rounds]
    columns = {name: mean([row[name] for row in logged if name in row]) for row in logged for name in row}
    kept = answers[groups].masked_fill(flat[groups, None], torch.nan) if args.keep_accuracy else answers[groups]
    return samples, Scored(kept.flatten(), columns, {}), rewards, first


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
    if args.overlong_buffer > args.max_completion_length:
        raise UserError(
            f"--overlong-buffer {args.overlong_buffer} must be at most --max-completion-length "
            f"{args.max_completion_length}: it is the last part of it"
        )
    low, high = args.keep_accuracy or (0, 1)
    if not 0 <= low <= high <= 1:
        raise UserError(f"--keep-accuracy {low:g} {high:g} must be LOW HIGH with 0 <= LOW <= HIGH <= 1")


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
        return {"model": trained_state(model), "optimizer": optimizer.state_dict(), "next_row": next_row,
                "reference": [moving.state_dict()] if moving else []}  # fmt: skip

    next_row = run.state["next_row"] if run.state else 0
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
            more = partial(collect, model, tokenizer, task, score, step, args)
            samples, scored, rewards, next_row = refill(more, next_row, args)
        sampled, due = time.perf_counter(), run.due(step, args.eval_every)
        if step == 1 or due:
            run.print(show_samples(tokenizer, samples, scored.rewards.tolist(), scored.extra))
        lengths = samples.completion_mask.sum(1).float()
        penalty = overlong_penalty(lengths, args.max_completion_length, args.overlong_buffer)
        groups = scored.rewards.view(-1, args.num_generations)
        teaches = ~zero_std(groups).repeat_interleave(args.num_generations).to(device)  # equation 8 asks for these
        batch = Batch(samples, scored.rewards.to(device) + penalty * teaches, None)
        if args.beta > 0:
            batch = batch._replace(ref_logps=reference_logps(model, ref_model, batch, args))

        # update
        columns = update(model, optimizer, batch, args)
        if moving and step % args.reset_reference_every == 0:
            moving.load_state_dict(trained_state(model), strict=False)  # not strict: tied weights have one name
            optimizer.state.clear()

        # evaluate
        columns |= {
            "reward": rewards.nanmean().item(),
            "reward_std": (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean().item(),
            "frac_zero_std": zero_std(groups).float().mean().item(),
            "sampled": len(rewards),
            "overlong_penalty": penalty.mean().item(),
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
