r"""Generalised Knowledge Distillation (GKD): on-policy distillation, and KDRL.

Agarwal et al. 2023, "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes" (arXiv
2306.13649, equation 1 and algorithm 1). KDRL: Xu et al. 2025 (arXiv 2506.02208).

Parent: grpo.py. A teacher's whole distribution at every token takes the place of the reward.

The student answers, and a teacher says at every token of that answer what it would have written. So the student learns
from states that it meets itself, its mistakes among them, and one answer teaches as much as its tokens do: a reward is
one number. Minimises

    L(theta) = E  1/T sum_t D( q(. | x, y_<t), p_theta(. | x, y_<t) )  -  w J_GRPO(theta)

    x, y       a prompt, and with chance lambda the student's own answer, else the dataset's, for a whole step
    p, q       student and teacher, both at --temperature; T counts the tokens up to and including the first EOS
    D          reverse: KL(p || q);  forward: KL(q || p);  jsd: b KL(q || m) + (1 - b) KL(p || m), m = b q + (1 - b) p
    lambda, b  --student-share, --jsd-beta. D has the weight --teacher-beta
    w          --reward-weight: 0 is GKD; above 0 is KDRL, where the teacher's weight falls to --teacher-beta-end

No gradient goes through the sampling: what a token does to later states is left out. --estimator sampled looks at the
student's token alone. Its loss, k2 = (log p - log q)^2 / 2, has the same expected gradient as the reverse divergence of
every state, and more noise. It needs no logits of the whole vocabulary.

Run
    python algos/gkd.py                                                             the embedded model learns countdown
    python algos/gkd.py --task sort --max-steps 15 --num-prompts 8 --num-generations 2          16 answers a step
    python algos/gkd.py --task sort --estimator sampled --max-steps 15              on the student's tokens alone
    python algos/gkd.py --task sort --student-share 0.5 --divergence jsd            half of the steps on demonstrations
    python algos/gkd.py --task sort --teacher-steps 3 --reward-weight 1 --teacher-beta-end 0 --max-steps 30 \
        --num-prompts 8 --num-generations 2
                                                                                    KDRL: past a teacher half trained
    python algos/gkd.py --model Qwen/Qwen2.5-0.5B-Instruct --teacher Qwen/Qwen2.5-7B-Instruct --task gsm8k
                                                                                    real models, on a GPU

    Without --teacher the run first makes one of the shipped model, by SFT on right answers (column `solution`), in a
    few seconds. RUN/model of grpo.py does as well.

Expect
    The default run takes 143 CPU seconds. Its teacher has greedy 0.46, pass@1 0.36, pass@8 0.87 on held-out countdown.
    The student goes from 0.01, 0.08, 0.43 to 0.45, 0.34, 0.84 (seed 1, 128 prompts; about there after 20 steps).
    grpo.py ends at 0.58, 0.53, 0.69: it goes on past this teacher, and loses in pass@8 what the student keeps.
    With 512 answers a step grpo.py is as fast in the first ten steps. With 16 on sort the student has pass@1 0.94 +-
    0.01 after 20 steps, grpo.py 0.86 +- 0.05 after 60, behind it in 9 of 10 seeds (10 seeds, 95 % intervals;
    benchmarks/effects.py, gkd-sort). Wrong demonstrations do no harm: 0.95 with --student-share 0, because a right
    teacher corrects each state of a wrong answer. A teacher that is the start itself (--teacher-steps 0) teaches
    nothing: 0.40.
    With a teacher that is better than the start but not good (--teacher-steps 3) the student ends at 0.72 after 30 of
    these steps, KDRL at 0.85 and grpo.py alone at 0.85 (10 seeds; kdrl-sort): KDRL passes this student in
    all ten, and the teacher has not helped.

Metrics
    As in grpo.py, but
    teacher/*      the teacher's own scores on the held-out prompts, at step 0. The student rarely passes them
    divergence     mean of D over tokens, in nats; of log p - log q with --estimator sampled. Falls towards 0
    reward         not trained on, unless --reward-weight is above 0
    frac_zero_std  with --reward-weight only
    On a step whose answers are the dataset's, reward, length and entropy are those of these answers, and approx_kl,
    clip_fraction and sampler_gap are 0: nobody sampled them.

Differences
    - jsd goes to 0 where b goes to 0 or 1, so both are refused. TRL's GKDTrainer takes the forward divergence at 0 and
      the reverse one at 1 (trl/experimental/gkd/gkd_trainer.py). Its b is `beta`, 0.5, and lambda is 0.5.
    - Student and teacher are compared at the temperature that samples. TRL's GKDTrainer samples at 0.9, compares at 1.
    - The mean is over each answer's tokens, then answers, as in the paper. TRL's is that of --aggregation token.
    - tinker-cookbook (tinker_cookbook/distillation/train_on_policy.py) makes an advantage of log q - log p of the
      sampled token and multiplies it by a ratio to the sampling policy. At its first update that is --estimator
      sampled. Its discount, with which a token also answers for later ones, is 0 by default; here there is none.
    - KDRL here has one schedule and no masks on right answers. k2 has no ratio to the sampling policy on stale data.
    - The teacher gets the student's tokens, chat template included. Its vocabulary must hold the student's, and logits
      beyond the narrower of the two, which pad a vocabulary, are cut.
    - A reward or a task that scores is needed all the same, for evaluation. beta and the reference of grpo.py are gone.
"""

import math
import random
import sys
import time
from collections.abc import Callable, Iterator
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
from utils.distributed import clip_gradients, deal
from utils.errors import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval, UserError
from utils.evaluation import advice, decode, evaluate, show_samples
from utils.lm import Means, Samples, compare, completion_logps, micro_batches, pad_left, sample_all
from utils.memory import check_memory
from utils.models import (
    TINY_MODEL,
    PolicyArgs,
    autocast,
    eos_ids,
    load_frozen,
    load_model,
    load_policy,
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
from utils.text import encode_prompt, encode_row, present, usable_prompts, usable_task

NAME, TITLE = "gkd", "GKD"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=512,
                 micro_batch_size=256, micro_batch_tokens=0, max_completion_length=20, precision="float32"),
    "full": dict(learning_rate=1e-6, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, precision="bfloat16"),
    "lora": dict(learning_rate=1e-5, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, precision="bfloat16"),
}  # fmt: skip
STD_EPSILON = 1e-4  # the paper names none; 1e-4 as in most code
TEACHER_RATE, TEACHER_BATCH = 3e-4, 128  # of the teacher that the default run makes


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
    max_steps: PositiveInt = 40
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
    epsilon_high: PositiveFloat | None = None
    """upper clip of the ratio: 1 + epsilon_high; None: epsilon"""
    teacher: str = ""
    """folder or hub name of the teacher, with the tokenizer of --model; none: the shipped model, trained here on right
    answers (countdown and sort only)"""
    teacher_steps: NonNegativeInt = 40
    """optimizer steps of that training: fewer make a worse teacher"""
    divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    """KL(student || teacher), KL(teacher || student), or the generalised Jensen-Shannon divergence"""
    jsd_beta: Annotated[float, "above 0 and below 1"] = 0.5
    """share b of the teacher in the mixture that jsd compares with"""
    estimator: Literal["full", "sampled"] = "full"
    """full: the divergence over the whole vocabulary; sampled: from the student's token alone (reverse only)"""
    student_share: UnitInterval = 1.0
    """chance that a step's answers are the student's own; else they are the dataset's completions (lambda)"""
    teacher_beta: NonNegativeFloat = 1.0
    """weight of the divergence; 0 throughout loads no teacher"""
    teacher_beta_end: NonNegativeFloat | None = None
    """its weight in the last step, reached linearly; None: --teacher-beta"""
    reward_weight: NonNegativeFloat = 0.0
    """weight of GRPO's loss beside it; above 0: KDRL"""
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

    samples: Samples  # logps NaN: from the dataset
    rewards: Tensor  # (B,) float32, NaN: skipped
    beta: float  # weight of the divergence in this step


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


def kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of distributions given by their log-probabilities. (N, V), (N, V) -> (N,)."""
    return (first.exp() * (first - second)).sum(-1)


def divergence(logps: Tensor, teacher_logps: Tensor, kind: str, b: float) -> Tensor:
    """Of student p and teacher q at N states, in nats. (N, V), (N, V) -> (N,). arXiv 2306.13649, equation 1 for jsd:
    b KL(q || m) + (1 - b) KL(p || m) with m = b q + (1 - b) p. It goes to 0 where b goes to 0 or 1."""
    if kind == "jsd":
        mixture = torch.logaddexp(teacher_logps + math.log(b), logps + math.log1p(-b))
        return b * kl(teacher_logps, mixture) + (1 - b) * kl(logps, mixture)
    return kl(teacher_logps, logps) if kind == "forward" else kl(logps, teacher_logps)


def at_tokens(ids: Tensor, logits: Tensor, teacher_logits: Tensor, args: Args) -> tuple[Tensor, Tensor, Tensor]:
    """The student's log-probability of each token, its entropy without gradient, and the divergence at the state
    before. (N,), (N, V), (N, V) -> (N,), (N,), (N,). Widths may differ by the padding of a vocabulary: that is cut."""
    width = min(logits.shape[1], teacher_logits.shape[1])
    logps, teacher_logps = (
        (x[:, :width].to(torch.promote_types(x.dtype, torch.float32)) / args.temperature).log_softmax(-1)
        for x in (logits, teacher_logits)
    )
    entropy = -(logps.detach().exp() * logps.detach()).sum(-1)
    return (
        logps.gather(1, ids[:, None])[:, 0],
        entropy,
        divergence(logps, teacher_logps, args.divergence, args.jsd_beta),
    )


def k2(logps: Tensor, teacher_logps: Tensor) -> Tensor:
    """(log p - log q)^2 / 2 at tokens of the student p. The mean of its gradient, (log p - log q) grad log p, over the
    tokens at a state is that of KL(p || q) there; the one of k3 is not. arXiv 2506.02208."""
    return (logps - teacher_logps) ** 2 / 2


def minibatches(samples: Samples, number: int) -> Iterator[tuple[Samples, slice]]:
    """Equal shares of the prompts with their completions, and the rows of these."""
    prompts, size = len(samples.prompt_ids) // number, len(samples.completion_ids) // number
    for i in range(number):
        these, rows = slice(i * prompts, (i + 1) * prompts), slice(i * size, (i + 1) * size)
        yield Samples(*(x[these] for x in samples[:2]), *(x[rows] for x in samples[2:])), rows


def update(model, teacher, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of completions. Returns metrics.
    teacher: None where beta is 0."""
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
                    if teacher and args.estimator == "full":
                        logps, entropy, gap = compare(partial(at_tokens, args=args), (model, teacher), *inputs)
                    else:
                        logps, entropy = completion_logps(model, *inputs, args.temperature)
                        teacher_logps = teacher and completion_logps(teacher, *inputs, args.temperature)[0]
                rows, width = part + here.start, logps.shape[1]
                old_logps, valid = samples.logps[rows, :width], counts * mask[rows, :width]
                old_logps = torch.where(old_logps.isnan(), logps.detach(), old_logps)
                loss, clipped = policy_loss(logps, old_logps, advantage[rows], args.epsilon, high)
                loss = args.reward_weight * loss
                if teacher:
                    loss = loss + batch.beta * (gap if args.estimator == "full" else k2(logps, teacher_logps))
                    means.add(valid, divergence=gap if args.estimator == "full" else logps - teacher_logps)
                (counts * loss * weights[part, :width]).sum().backward()
                logps = logps.detach()
                means.add(valid, clip_fraction=clipped, approx_kl=k3(old_logps, logps), entropy=entropy)
                if not norms:
                    first.add(valid, sampler_gap=(logps - old_logps).abs())
            norms.append(clip_gradients(model.parameters(), args.max_grad_norm))
            optimizer.step()
    return first.read() | means.read() | {"grad_norm": torch.stack(norms).mean().item()}


def given(rows: list[dict], column: str, tokenizer, eos: list[int], limit: int, device) -> Samples:
    """Answers of a dataset as if they had been sampled, one for each prompt, cut at `limit` tokens; logps are NaN."""
    prompts, answers = zip(*(encode_row(row | {"completion": row[column]}, tokenizer, eos) for row in rows))
    ended = torch.tensor([len(answer) <= limit for answer in answers], device=device)
    ids, mask = (x.flip(1) for x in pad_left([answer[:limit][::-1] for answer in answers], device))
    return Samples(*pad_left(list(prompts), device), ids, mask, torch.full(ids.shape, torch.nan, device=device), ended)


def collect(model, tokenizer, task: Task, score: Callable, step: int, args: Args) -> tuple[Samples, Scored]:
    """With the chance --student-share samples and scores G completions for each of the step's P prompts, else takes
    those of P G rows."""
    own, number, group = True, args.num_prompts, args.num_generations
    if random.Random(f"{args.seed}/{step}").random() >= args.student_share:
        own, number, group = False, number * group, 1
    first = (step - 1) * number
    rows = [task.train(first + i, args.seed) for i in range(number)]
    prompts = [present(row, tokenizer) for row in rows]
    tokens = [encode_prompt(row, tokenizer) for row in rows]
    if own:
        with autocast(model.device, args.precision):
            samples = sample_all(model, tokens, args.num_generations, args.max_completion_length,
                                 eos_ids(model, tokenizer), args.temperature, args.sample_batch_size,
                                 (args.seed, "train", step))  # fmt: skip
    else:
        samples = given(rows, "completion", tokenizer, eos_ids(model, tokenizer), args.max_completion_length,
                        model.device)  # fmt: skip
    texts, token_lists = decode(samples, tokenizer)
    repeated, shown = ([x for x in xs for _ in range(group)] for xs in (rows, prompts))
    return samples, lowered(score(repeated, shown, texts, token_lists, step), samples.ended, args.missing_eos_penalty)


def zero_std(groups: Tensor) -> Tensor:
    """Which groups have equal rewards, or none that is known. NaN is left out. (P, G) -> (P,) bool."""
    low, high = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
    return ~(high > low)


def load_teacher(tokenizer, task: Task, args: Args, device: torch.device):
    """--teacher, or the shipped model after SFT on right answers, which --seed decides: a resumed run makes it again.
    None where its weight is 0. Raises UserError for another tokenizer, and where there are no right answers."""
    if not (args.teacher_beta or args.teacher_beta_end):
        return None
    if args.teacher:
        teacher, its_tokenizer = load_frozen(args.teacher, "--teacher", args, device)
        if not tokenizer.get_vocab().items() <= its_tokenizer.get_vocab().items():
            wrong = f"--teacher {args.teacher} has other tokens than --model, and their probabilities are compared"
            raise UserError(f"{wrong}: give a teacher with the same tokenizer")
        return teacher
    if args.model != TINY_MODEL or "solution" not in task.heldout[0]:
        raise UserError("--teacher is missing: give a folder or a hub name (only the shipped model has one of its own, "
                        "for countdown and sort)")  # fmt: skip
    teacher, _ = load_model(args.model, device)
    eos = eos_ids(teacher, tokenizer)
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=TEACHER_RATE, fused=True)
    for step in range(args.teacher_steps):
        rows = [task.train(step * TEACHER_BATCH + i, args.seed) for i in range(TEACHER_BATCH)]
        samples = given(rows, "solution", tokenizer, eos, args.max_completion_length, device)
        logps, _ = completion_logps(teacher, *samples[:4])
        optimizer.zero_grad()
        (-logps.sum() / samples.completion_mask.sum()).backward()
        optimizer.step()
    return teacher.eval().requires_grad_(False)


def weight_at(step: int, args: Args) -> float:
    """Of the divergence: linear from --teacher-beta in the first step to --teacher-beta-end in the last."""
    end = args.teacher_beta if args.teacher_beta_end is None else args.teacher_beta_end
    return args.teacher_beta + (end - args.teacher_beta) * (step - 1) / max(1, args.max_steps - 1)


def check_objective(args: Args) -> None:
    """Raises UserError for settings in which nothing is learned, or not what they say."""
    if not (args.reward_weight or args.teacher_beta or args.teacher_beta_end):
        raise UserError("--teacher-beta 0 and --reward-weight 0 leave nothing to learn: raise one of them")
    if args.student_share < 1 and (args.reward_weight or args.estimator == "sampled"):
        flag = "--reward-weight above 0" if args.reward_weight else "--estimator sampled"
        raise UserError(f"{flag} needs answers of the student's own: give --student-share 1")
    if args.estimator == "sampled" and args.divergence != "reverse":
        raise UserError(f"--estimator sampled knows the reverse divergence only: not --divergence {args.divergence}")


def check_groups(args: Args) -> None:
    """Raises UserError for groups that cannot be compared or split."""
    if args.num_generations < 2 and args.reward_weight:
        raise UserError("--num-generations must be at least 2: a group of one has no other reward to compare with")
    if args.num_prompts % args.num_minibatches:
        raise UserError(f"--num-minibatches {args.num_minibatches} must divide --num-prompts {args.num_prompts}")
    size, group = args.micro_batch_size, args.num_generations
    if not args.micro_batch_tokens and size % group and group % size:
        raise UserError(f"--micro-batch-size {size} must be a multiple or a divisor of --num-generations {group}")


def train(args: Args) -> list[dict]:
    device = prepare(args)
    task = load_task(args.task, args.prompt_column, completions=args.student_share < 1)
    score = make_scorer(task, args.reward, args.reward_weights, args.max_steps, device, args.trust_remote_code)
    model, tokenizer = load_policy(args, device)
    settings = resolve_for(model, args, PRESETS)
    without_dropout(model)
    check_groups(args)
    check_objective(args)
    check_model(model, args.precision)
    if args.student_share < 1:  # prompts without a completion are of no use
        eos = eos_ids(model, tokenizer)
        task = usable_task(task, lambda row: encode_row(row, tokenizer, eos)[:1], math.inf, None, "")
    task = usable_prompts(task, model, tokenizer, args)
    teacher = load_teacher(tokenizer, task, args, device)
    if teacher:  # its context may be shorter
        task = usable_prompts(task, teacher, tokenizer, args)
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=args.learning_rate, betas=(0.9, args.adam_beta2),
                                  weight_decay=args.weight_decay, fused=True)  # fmt: skip
    prompts = [encode_prompt(row, tokenizer) for row in task.heldout]
    settings += check_memory(model, args, [teacher] if teacher else [], prompt=max(map(len, prompts)))
    evaluation = partial(evaluate, model, tokenizer, task, score, args.eval_prompts, args.eval_samples,
                         args.max_completion_length, args.temperature, args.seed,
                         rows_at_once=args.sample_batch_size, precision=args.precision)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"),
              schedule_depends_on_budget=(args.lr_schedule != "constant"
                                          or args.teacher_beta_end is not None))  # fmt: skip
    run.print(settings)

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict()}

    if not run.restore(model=model, optimizer=optimizer):
        its_own = evaluate(teacher, *evaluation.args[1:], **evaluation.keywords) if teacher else {}
        run.log(0, **evaluation(), **{name.replace("eval", "teacher"): value for name, value in its_own.items()})
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
        batch = Batch(samples, scored.rewards.to(device), weight_at(step, args))

        # update
        columns = update(model, teacher, optimizer, batch, args)

        # evaluate
        groups, lengths = batch.rewards.view(-1, args.num_generations), samples.completion_mask.sum(1).float()
        columns |= {
            "reward": batch.rewards.nanmean().item(),
            "reward_std": (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean().item(),
            "length": lengths.mean().item(),
            "truncated": 1 - samples.ended.float().mean().item(),
            "learning_rate": rate,
            **({"frac_zero_std": zero_std(groups).float().mean().item()} if args.reward_weight else {}),
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
