r"""Generalised Knowledge Distillation (GKD): on-policy distillation, and KDRL.

Agarwal et al. 2023, "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes" (arXiv
2306.13649, equation 1 and algorithm 1). KDRL: Xu et al. 2025 (arXiv 2506.02208).

Parent: grpo.py. A teacher's whole distribution at every token takes the place of the reward.

The student answers, and a teacher says at every token of that answer what it would have written. So the student learns
from states that it meets itself, its mistakes among them, and every token teaches. Minimises

    L(theta) = E  1/T sum_t D( q(. | x, y_<t), p_theta(. | x, y_<t) )  -  w J_GRPO(theta)

    x, y       a prompt, and with chance lambda the student's own answer, else the dataset's, for a whole step
    p, q       student and teacher, both at --temperature; T counts the tokens up to and including the first EOS
    D          reverse: KL(p || q);  forward: KL(q || p);  jsd: b KL(q || m) + (1 - b) KL(p || m), m = b q + (1 - b) p
    lambda, b  --student-share, --jsd-beta. D has the weight --teacher-beta
    w          --reward-weight: 0 is GKD; above 0 is KDRL, where the teacher's weight falls to --teacher-beta-end

No gradient goes through the sampling. --estimator sampled looks at the student's token alone: its loss, k2 = (log p -
log q)^2 / 2, has the same expected gradient as the reverse divergence of every state, and more noise.

Run
    python algos/gkd.py                                                     the tiny model learns countdown
    python algos/gkd.py --task sort --estimator sampled --max-steps 15      on the student's tokens alone
    python algos/gkd.py --task sort --student-share 0.5 --divergence jsd    half of the steps on demonstrations
    python algos/gkd.py --model Qwen/Qwen2.5-0.5B-Instruct --teacher Qwen/Qwen2.5-7B-Instruct --task gsm8k
    Without --teacher the run first makes one of the tiny model, by SFT on right answers. KDRL: algos/README.md.

Expect
    The default run takes 143 CPU seconds. Its teacher has greedy 0.46, pass@1 0.36, pass@8 0.87 on held-out countdown.
    The student goes from 0.01, 0.09, 0.45 to 0.45, 0.34, 0.81; grpo.py ends at 0.56, 0.51, 0.69: past this teacher, but
    without the pass@8 that the student keeps. With 16 answers a step on sort the student has pass@1 0.94 +- 0.01 after
    20 steps, grpo.py 0.86 +- 0.05 after 60 (benchmarks/effects.py, gkd-sort). With a teacher half trained, 30 of these
    steps end at 0.72, KDRL at 0.85 and grpo.py alone at 0.85 (kdrl-sort).

Metrics
    teacher/*      the teacher's own scores on the held-out prompts, at step 0. The student rarely passes them
    divergence     mean of D over tokens, in nats; of log p - log q with --estimator sampled. Falls towards 0
    reward         not trained on, unless --reward-weight is above 0; frac_zero_std only then
    A step on the dataset's answers has their reward, length and entropy, and nothing about the sampler.

Differences
    - jsd goes to 0 where b goes to 0 or 1. TRL takes the forward divergence at 0 and the reverse one at 1.
    - Student and teacher are compared at the temperature that samples. TRL samples at 0.9 and compares at 1.
    - The mean is over each answer's tokens, then answers, as in the paper. TRL's is that of --aggregation token.
    - The teacher gets the student's tokens, chat template included. Logits beyond the narrower vocabulary are cut.
    - KDRL has one schedule and no masks on right answers. k2 has no ratio to the sampling policy.
"""

import math
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.core import Run, UserError, main, prepare
from utils.data import encode_answers, encode_prompt, keep_rows, load_task, usable
from utils.dist import (
    Means,
    Samples,
    Trained,
    as_samples,
    averaged,
    clip_gradients,
    micro_batches,
    moments,
    set_rate,
    share,
    start,
    total,
)
from utils.lm import (
    CHUNK,
    TINY_MODEL,
    PolicyArgs,
    alarm,
    autocast,
    completion_logps,
    completion_states,
    head,
    load_model,
    resolve,
    sample_all,
    save_model,
)
from utils.rewards import decode, evaluate, make_scorer, sample_rows, shown

NAME, TITLE = "gkd", "GKD"
LARGE = dict(learning_rate=1e-6, sample_batch_size=32, micro_batch_size=64, micro_batch_tokens=4096,
             max_completion_length=512, precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, sample_batch_size=512, micro_batch_size=256, micro_batch_tokens=0,
                 max_completion_length=20, precision="float32"),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=1e-5),
}  # fmt: skip
STD_EPSILON = 1e-4  # the paper names none; 1e-4 as in most code
TEACHER_RATE, TEACHER_BATCH = 3e-4, 128  # of the teacher that the default run makes


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
    max_steps: int = 40
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
    num_minibatches: int = 1
    """optimizer steps per update epoch, each on a share of the prompts: from the second on, pi_old is stale"""
    epsilon: float = 0.2
    """lower clip of the ratio: 1 - epsilon"""
    epsilon_high: float | None = None
    """upper clip of the ratio: 1 + epsilon_high; None: epsilon"""
    teacher: str = ""
    """folder or hub name of the teacher, with the tokenizer of --model; none: the tiny model, trained here on right
    answers (countdown and sort only)"""
    teacher_steps: int = 40
    """optimizer steps of that training: fewer make a worse teacher"""
    divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    """KL(student || teacher), KL(teacher || student), or the generalised Jensen-Shannon divergence"""
    jsd_beta: float = 0.5
    """share b of the teacher in the mixture that jsd compares with"""
    estimator: Literal["full", "sampled"] = "full"
    """full: the divergence over the whole vocabulary; sampled: from the student's token alone (reverse only)"""
    student_share: float = 1.0
    """chance that a step's answers are the student's own; else they are the dataset's completions (lambda)"""
    teacher_beta: float = 1.0
    """weight of the divergence; 0 throughout loads no teacher"""
    teacher_beta_end: float | None = None
    """its weight in the last step, reached linearly; None: --teacher-beta"""
    reward_weight: float = 0.0
    """weight of GRPO's loss beside it; above 0: KDRL"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """divide advantages by the standard deviation of their group or of the batch, or not at all"""
    aggregation: Literal["sequence", "token", "constant"] = "sequence"
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
    beta: float  # the weight of the divergence


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


def compare(model, teacher, inputs: tuple, args: Args) -> tuple[Tensor, ...]:
    """`at_tokens` for all completion tokens, (B, T) each; 0 in padding. inputs: as of completion_logps.

    It runs on a chunk of hidden states, and once more in the backward pass: logits of CHUNK / 4 are held at a time, of
    each model and in each copy."""
    ids, mask = inputs[2:]
    columns = [ids[mask], *(completion_states(part, *inputs) for part in (model, teacher))]
    kind = ids.device.type
    how = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def run(ids: Tensor, own: Tensor, others: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(*how, cache_enabled=False):  # so chunks add their gradients in float32
            return at_tokens(ids, head(model, own), head(teacher, others), args)

    size = max(1, CHUNK // 4 // max(part.config.get_text_config().vocab_size for part in (model, teacher)))
    parts = [checkpoint(run, *chunk, use_reentrant=False, preserve_rng_state=False)
             for chunk in zip(*(column.split(size) for column in columns))]  # fmt: skip
    found = [torch.cat(values) for values in zip(*parts)]
    return tuple(values.new_zeros(ids.shape).masked_scatter(mask, values) for values in found)


def update(model, teacher, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of completions. Returns metrics.
    teacher: None where beta is 0."""
    samples, groups = batch.samples, batch.rewards.view(-1, args.num_generations)
    advantage = advantages(groups, args.scale_rewards).view(-1, 1)
    mask = samples.completion_mask
    if args.mask_truncated_completions:
        mask = mask & samples.ended[:, None]
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    numbers = torch.arange(len(mask)).view(-1, args.num_generations)  # of the rows
    first, norms = Means(), []
    for _ in range(args.num_iterations):
        means = Means()
        for minibatch in numbers.tensor_split(args.num_minibatches):  # the order of the prompts is random
            within, weights = minibatch.flatten(), torch.zeros_like(samples.logps)
            weights[within] = token_weights(mask[within], args.aggregation, args.max_completion_length)
            optimizer.zero_grad(set_to_none=True)
            for rows, inputs in micro_batches(samples, args, within):
                with autocast(model, args.precision):
                    if teacher and args.estimator == "full":
                        logps, entropy, gap = compare(model, teacher, inputs, args)
                    else:
                        logps, entropy = completion_logps(model, *inputs, args.temperature)
                        teacher_logps = teacher and completion_logps(teacher, *inputs, args.temperature)[0]
                width = logps.shape[1]
                old_logps, valid = samples.logps[rows, :width], mask[rows, :width]
                old_logps = torch.where(old_logps.isnan(), logps.detach(), old_logps)
                loss, clipped = policy_loss(logps, old_logps, advantage[rows], args.epsilon, high)
                loss = args.reward_weight * loss
                if teacher:
                    loss = loss + batch.beta * (gap if args.estimator == "full" else k2(logps, teacher_logps))
                    means.add(valid, divergence=gap if args.estimator == "full" else logps - teacher_logps)
                (loss * weights[rows, :width]).sum().backward()
                logps = logps.detach()
                means.add(valid, clip_fraction=clipped, approx_kl=k3(old_logps, logps), entropy=entropy)
                if not norms:  # before the first optimizer step
                    first.add(valid, sampler_gap=(logps - old_logps).abs())
            norms.append(clip_gradients(model, args.max_grad_norm))
            optimizer.step()
    return first.read() | means.read() | {"grad_norm": torch.stack(norms).mean().item()}


def given(rows: list[dict], column: str, tokenizer, eos: list[int], limit: int, device) -> Samples:
    """Answers of a dataset as if they had been sampled, one for each prompt, cut at `limit` tokens; logps are NaN."""
    pairs = [encode_answers(row, [row[column]], tokenizer, eos) for row in rows]
    longest = max(len(prompt) for prompt, _ in pairs) + limit
    samples = as_samples([(prompt, answer[:limit]) for prompt, answer in pairs], longest, device)
    ended = torch.tensor([len(answer) <= limit for _, answer in pairs], device=device)
    return samples._replace(logps=torch.full_like(samples.logps, torch.nan), ended=ended)


def collect(model, tokenizer, task, score, step: int, args: Args) -> tuple[Samples, Tensor, dict[str, float]]:
    """With the chance --student-share samples and scores G completions for each of this process's prompts of the step,
    else takes those of G rows in place of each. Returns rewards and columns."""
    numbers, group = share(range((step - 1) * args.num_prompts, step * args.num_prompts)), args.num_generations
    if random.Random(f"{args.seed}/{step}").random() < args.student_share:
        rows = [task.train(i, args.seed) for i in numbers]
        prompts = [encode_prompt(row, tokenizer) for row in rows]
        samples = sample_all(model, prompts, group, args, args.temperature, "train", step)
        rows = [row for row in rows for _ in range(group)]
    else:
        rows = [task.train(i * group + j, args.seed) for i in numbers for j in range(group)]
        eos = model.generation_config.eos_token_id
        samples = given(rows, "completion", tokenizer, eos, args.max_completion_length, model.device)
    rewards, columns = score(rows, *decode(samples, tokenizer), step)
    return samples, rewards - args.missing_eos_penalty * ~samples.ended.cpu(), columns


def load_teacher(tokenizer, task, args: Args, device: torch.device):
    """--teacher, or the tiny model after SFT on right answers, which --seed decides: a resumed run makes it again.
    None where its weight is 0. Raises UserError for another tokenizer, and where there are no right answers."""
    if not (args.teacher_beta or args.teacher_beta_end):
        return None
    if args.teacher:
        theirs = replace(args, system_prompt="")  # prompts are those of the student's template: it needs none
        teacher, its_tokenizer = load_model(theirs, device, args.teacher, frozen=True)
        if not tokenizer.get_vocab().items() <= its_tokenizer.get_vocab().items():
            wrong = f"--teacher {args.teacher} has other tokens than --model, and their probabilities are compared"
            raise UserError(f"{wrong}: give a teacher with the same tokenizer")
        return teacher
    if args.model != TINY_MODEL or "solution" not in task.heldout[0]:
        raise UserError("--teacher is missing: give a folder or a hub name (only the tiny model has one of its own, "
                        "for countdown and sort)")  # fmt: skip
    alone = replace(args, lora_rank=0, fsdp=False, precision="float32")
    teacher, _ = load_model(alone, device)
    eos = teacher.generation_config.eos_token_id
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


def train(args: Args) -> list[dict]:
    device = start(prepare(args))
    task = load_task(args.task, args.prompt_column)
    model, tokenizer = load_model(args, device)
    settings = resolve(model, args, PRESETS)
    check_objective(args)
    if args.num_generations < 2 and args.reward_weight:
        raise UserError("--num-generations must be at least 2: a group of one has no other reward to compare with")
    task = usable(task, model, tokenizer, args)
    scored = task.score or args.reward or args.reward_weight  # the teacher alone teaches without rewards
    score = make_scorer(task, args, tokenizer, device) if scored else lambda rows, *_: (torch.zeros(len(rows)), {})
    if args.student_share < 1:  # prompts without a completion are of no use
        eos = model.generation_config.eos_token_id
        encode = lambda row: encode_answers(row, [row.get("completion")], tokenizer, eos)  # noqa: E731
        task = keep_rows(task, encode, "", math.inf, tokenizer, ["completion"])
    teacher = load_teacher(tokenizer, task, args, device)
    if teacher:  # its context may be shorter
        task = usable(task, teacher, tokenizer, args)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  betas=(0.9, args.adam_beta2), weight_decay=args.weight_decay, fused=True)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"))
    run.print(settings)
    parts = {"trained": Trained(model, optimizer)}
    if not run.restore(**parts):
        its_own = evaluate(teacher, tokenizer, task, score, replace(args, sampler="")) if teacher and scored else {}
        its_own = {name.replace("eval", "teacher"): value for name, value in its_own.items()}
        run.log(0, **(evaluate(model, tokenizer, task, score, args, 0, run.keep) if scored else {}), **its_own)
    model.train()
    while run.step < args.max_steps:
        step, begun = run.step + 1, time.perf_counter()
        rate = set_rate(optimizer, step, args)

        # collect
        samples, rewards, columns = collect(model, tokenizer, task, score, step, args)
        sampled, due = time.perf_counter(), run.due(step, args.eval_every)
        if step == 1:
            run.print(shown(samples, tokenizer, rewards.tolist()))

        # update
        columns |= update(model, teacher, optimizer, Batch(samples, rewards.to(device), weight_at(step, args)), args)
        alarm(columns.get("sampler_gap"), run, args)

        # evaluate
        groups, lengths = rewards.view(-1, args.num_generations), samples.completion_mask.sum(1).float()
        each = {"reward": rewards, **score.each} if scored else {}
        run.keep(sample_rows(args.log_samples, samples, tokenizer, each))
        if scored:
            deviation = (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt()
            columns |= {"reward": rewards.nanmean().item(), "reward_std": deviation.nanmean().item()}
        columns |= {
            "length": lengths.mean().item(),
            "truncated": 1 - samples.ended.float().mean().item(),
            "learning_rate": rate,
            "time/sample": sampled - begun,
            "time/step": time.perf_counter() - begun,
        }
        if args.reward_weight:
            columns["frac_zero_std"] = (advantages(groups, "none") == 0).all(1).float().mean().item()
        columns["time/tokens_per_second"] = total(lengths.sum()).item() / columns["time/step"]
        if due and scored:
            columns |= evaluate(model, tokenizer, task, score, args, step, run.keep)
        run.log(step, **averaged(columns))
        run.end_step(step, parts)

    curves: dict = {"reward": ("reward",), "held-out": ("eval/*",), "entropy per token": ("entropy",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
