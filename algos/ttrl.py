r"""Test-Time Reinforcement Learning (TTRL): GRPO on the majority's answer.

Zuo et al. 2025, "TTRL: Test-Time Reinforcement Learning" (arXiv 2504.16084).

Parent: grpo.py. The label of a prompt is the answer that most of the policy's own samples give: nobody else says what
is right.

The policy answers each prompt M times, and the most frequent answer becomes the label. An answer is rewarded for being
the label. Where most answers are right this teaches the policy to be right more often; where most are wrong, to be
wrong more often. Maximises the objective of grpo.py with the reward

    R_i = 1 if answer(y_i) = l(x), else 0,   i = 1..G
    l(x) = argmax_a  #{ j <= M : answer(y_j) = a }

    y_1..y_M      completions of the prompt x. All of them vote, the first G are trained
    answer(y)     what y says in the end, without how it got there; a completion without an answer has no vote
    l(x)          the label; of answers with as many votes, the one that was met first
    M, G          --num-votes, --num-generations

As M grows, the label becomes the mode of the policy's answers, and J the chance of giving it: the policy sharpens
towards the answer that it gives most.

Run
    python algos/ttrl.py                                    most answers are wrong: the reward rises, the accuracy falls
    python algos/grpo.py --task sort --max-steps 5          a model that is mostly right, in RUN/model; then
    python algos/ttrl.py --model RUN/model --seed 2         the reward rises, and the accuracy with it
    python algos/ttrl.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing
                                                            a real model, on a GPU; no solution is looked at
    python algos/ttrl.py --model Qwen/Qwen2.5-Math-1.5B --task aime.jsonl --reward rewards.py:accuracy --num-prompts 8 \
        --num-votes 64 --num-generations 32 --num-minibatches 8 --max-completion-length 3072 --learning-rate 5e-7 \
        --lr-schedule cosine --max-steps 240 --warmup-steps 7 --beta 0.001 --aggregation token
                                                            the authors' settings (PRIME-RL/TTRL,
                                                            verl/examples/ttrl/aime.sh)

Expect
    The default run, in about 30 seconds on a CPU: the reward rises from 0.79 to 0.93, and the held-out accuracy falls,
    pass@1 from 0.40 to 0.20, pass@8 from 0.88 to 0.30, greedy from 0.23 to 0.19 (seed 1). The shipped model's likeliest
    answer is wrong by design, and 0.22 of the first step's labels are right.
    From the model that grpo.py leaves after 5 steps (greedy 0.99, pass@1 0.89, seed 1) pass@1 rises by 0.07 to
    0.12 in 10 steps in nine of ten seeds, and falls by 0.31 in one: there the majority went wrong on the way. From the
    shipped model it falls by 0.15 to 0.21 in all ten. With labels, grpo.py gains 0.48 to 0.55 (10 seeds;
    benchmarks/effects.py, ttrl-start).

Metrics
    As in grpo.py, but
    reward         share of the trained answers that are the label: agreement. It rises whatever the label is
    label_accuracy share of the labels that are right; if it falls, the policy learns what is wrong
    majority_share share of the votes that the label got; 1 is unanimity. About 1 / M where no two answers are equal:
                   then answers cannot be compared as they are
    reward/true    share of all M answers that are right, on the prompts that are trained
    label_accuracy and reward/true come from the task's own score or --reward, and nothing is trained on them.

Differences
    - The authors train on the very prompts that they evaluate: train.json and test.json of PRIME-RL/TTRL are one file.
      Here reward/true is the accuracy on the prompts that are trained, eval/* that on held-out ones.
    - answer(y) of a file or a hub dataset is the text between the last pair of answer tags, else in the last \boxed{},
      else none; that of gsm8k is the number after ####. The authors' extractor reads \boxed{}, else the last number,
      else the empty text, which then has votes, too. Votes are counted by spelling, as here, but rewards are by value.
    - On countdown the text votes, not the number at its end. The target stands in the prompt: answers that end there
      would agree whatever stands before. Right answers are many, so votes are split.
    - M = G unless --num-votes says more. The authors take twice G.
    - PRIME-RL/TTRL (verl/workers/reward_manager/ttrl.py) writes each reward at the token where the prompt's last answer
      ends. GRPO sums rewards over tokens, so nothing changes there; per-token returns would be wrong.
    - Without a single vote in a group all its rewards are 0, so it teaches nothing.
"""

import sys
import time
from collections import Counter
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

NAME, TITLE = "ttrl", "TTRL"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, adam_beta2=0.999, num_prompts=32, num_generations=16, sample_batch_size=512,
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
    task: str = "sort"
    """sort, countdown, gsm8k, a .jsonl or .parquet file, or a hub dataset"""
    prompt_column: str = "prompt"
    """column of a dataset with the prompt: text or chat messages"""
    reward: tuple[str, ...] = ()
    """reward functions (FILE.py:NAME or PACKAGE.MODULE:NAME, called as by TRL) and reward models (folder or hub name;
    ensembles: append :mean, :worst-case or :uncertainty=L); none: the task's own score. Nothing is trained on
    them: they tell how often the label is right"""
    reward_weights: tuple[float, ...] = ()
    """one weight per reward function; none: all 1"""
    combine: Literal["sum", "min", "mean-std"] = "sum"
    """several reward models as one: the least of their raw scores, or mean minus deviation. It has no weight"""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """subtracted from the reward of a completion that was cut off, in training"""
    max_steps: PositiveInt = 10
    """steps: each samples, then updates"""
    num_prompts: PositiveInt | None = None
    """prompts per step"""
    num_generations: PositiveInt | None = None
    """completions per prompt that are trained: G"""
    num_votes: PositiveInt | None = None
    """completions per prompt that vote, of which the first G are trained: M; None: G"""
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
    epsilon_high: PositiveFloat | None = None
    """upper clip of the ratio: 1 + epsilon_high; None: epsilon"""
    beta: NonNegativeFloat | None = None
    """weight of the KL penalty; 0 loads no reference model"""
    reset_reference_every: NonNegativeInt = 0
    """steps after which the reference becomes the policy, and the optimizer begins anew (ProRL); 0: never"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """divide advantages by the standard deviation of their group or of the batch, or not at all"""
    aggregation: Literal["sequence", "token", "constant"] = "sequence"
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


def vote(answers: list) -> tuple[object, int]:
    """The most frequent answer, of equally frequent ones the first, and how many give it. None is no vote; where nobody
    votes, (None, 0)."""
    (winner,) = Counter(answer for answer in answers if answer is not None).most_common(1) or [(None, 0)]
    return winner


def judged(answers: list, truth: Scored, votes: int, size: int) -> Scored:
    """P * M answers -> rewards (P * G,): of the first G = `size` of each prompt's M = `votes`, 1 for those that are its
    label and 0 for the others. `truth`, the true rewards (P * M,), goes to the metrics alone."""
    rewards, right, counts = [], [], []
    for i in range(0, len(answers), votes):
        group = answers[i : i + votes]
        label, count = vote(group)
        rewards += [float(answer is not None and answer == label) for answer in group[:size]]
        right.append(truth.rewards[i + group.index(label)])
        counts.append(count)
    columns = {"label_accuracy": torch.stack(right).nanmean().item(), "majority_share": sum(counts) / len(answers),
               "reward/true": truth.rewards.nanmean().item()}  # fmt: skip
    return Scored(torch.tensor(rewards), truth.columns | columns, truth.extra)


def first_votes(samples: Samples, votes: int, size: int) -> Samples:
    """The first G = `size` of each prompt's M = `votes` completions."""
    rows = (x.unflatten(0, (-1, votes))[:, :size].flatten(0, 1) for x in samples[2:])
    return Samples(*samples[:2], *rows)


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


def token_weights(mask: Tensor, aggregation: str, max_completion_length: int) -> Tensor:
    """Weight of each token's loss in the step's loss, over all B rows. mask (B, T) of 0 and 1 -> (B, T).

    sequence: 1 / (B T_i), the paper's. Not the policy gradient: tokens of long completions count less than others.
    token: 1 / sum of all T_i of the step, as TRL and verl; DAPO's formula takes each group's own sum.
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
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
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
                loss, clipped = policy_loss(logps, old_logps, advantage[rows], args.epsilon, high)
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


def collect(model, tokenizer, task: Task, score: Callable, step: int, args: Args) -> tuple[Samples, Scored]:
    """Samples M completions for each of the step's P prompts, and scores the first G by what all of them say."""
    first = (step - 1) * args.num_prompts
    rows = [task.train(first + i, args.seed) for i in range(args.num_prompts)]
    prompts = [present(row, tokenizer) for row in rows]
    tokens = [encode_prompt(row, tokenizer) for row in rows]
    votes = args.num_votes or args.num_generations
    with autocast(model.device, args.precision):
        samples = sample_all(model, tokens, votes, args.max_completion_length,
                             eos_ids(model, tokenizer), args.temperature, args.sample_batch_size,
                             (args.seed, "train", step))  # fmt: skip
    texts, token_lists = decode(samples, tokenizer)
    repeated, shown = ([x for x in xs for _ in range(votes)] for xs in (rows, prompts))
    truth = score(repeated, shown, texts, token_lists, step)
    scored = judged([task.answer(text) for text in texts], truth, votes, args.num_generations)
    samples = first_votes(samples, votes, args.num_generations)
    return samples, lowered(scored, samples.ended, args.missing_eos_penalty)


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
    if (args.num_votes or args.num_generations) < args.num_generations:
        wanted = f"must be at least --num-generations {args.num_generations}: what is trained has voted"
        raise UserError(f"--num-votes {args.num_votes} {wanted}")
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

    curves = {"reward": ("reward", "reward/true"), "held-out": ("eval/[!d]*",), "entropy per token": ("entropy",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train)
