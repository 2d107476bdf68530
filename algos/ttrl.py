r"""Test-Time Reinforcement Learning (TTRL): GRPO on the majority's answer.

Zuo et al. 2025, "TTRL: Test-Time Reinforcement Learning" (arXiv 2504.16084).

Parent: grpo.py. The label of a prompt is the answer that most of the policy's own samples give: nobody else says what
is right.

An answer is rewarded for being the label. Where most answers are right this teaches the policy to be right more often;
where most are wrong, to be wrong more often. Maximises the objective of grpo.py with the reward

    R_i = 1 if answer(y_i) = l(x), else 0,   i = 1..G
    l(x) = argmax_a  #{ j <= M : answer(y_j) = a }

    y_1..y_M      completions of the prompt x. All of them vote, the first G are trained
    answer(y)     what y says in the end, without how it got there; a completion without an answer has no vote
    l(x)          the label; of answers with as many votes, the one that was met first
    M, G          --num-votes, --num-generations

As M grows, the label becomes the mode of the policy's answers: the policy sharpens towards what it answers most.

Run
    python algos/ttrl.py                                    most answers are wrong: the reward rises, the accuracy falls
    python algos/grpo.py --task sort --max-steps 5          a model that is mostly right, in RUN/model; then
    python algos/ttrl.py --model RUN/model --seed 2         the reward rises, and the accuracy with it
    python algos/ttrl.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing
    The authors' run: algos/README.md.

Expect
    The default run, in about 30 seconds on a CPU: the reward rises from 0.79 to 0.93, and held-out pass@1 falls from
    0.40 to 0.21, pass@8 from 0.86 to 0.33. The shipped model's likeliest answer is wrong by design. From the model that
    grpo.py leaves after 5 steps, pass@1 rises by 0.07 to 0.12 in nine of ten seeds, and falls by 0.31 in one: there the
    majority went wrong on the way. With labels, grpo.py gains 0.48 to 0.55 (benchmarks/effects.py, ttrl-start).

Metrics
    reward         share of the trained answers that are the label: agreement. It rises whatever the label is
    label_accuracy share of the labels that are right; if it falls, the policy learns what is wrong
    majority_share share of the votes that the label got; 1 is unanimity. About 1 / M: answers cannot be compared
    reward/true    share of all M answers that are right, on the prompts that are trained
    label_accuracy and reward/true come from the task's own score or --reward, and nothing is trained on them.

Differences
    - The authors train on the very prompts that they evaluate. Here reward/true is the accuracy on the prompts that are
      trained, eval/* that on held-out ones. M = G unless --num-votes says more; theirs is twice G.
    - The authors' extractor reads \boxed{}, else the last number, else the empty text, which then has votes, too. Votes
      are counted by spelling, as here (gsm8k: as numbers), but rewards are by value.
    - On countdown the text votes, not the number at its end, which stands in the prompt.
"""

import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.builtin import answer_of, gsm8k_score, stated
from utils.core import Run, UserError, main, prepare
from utils.data import Task, encode_prompt, load_task, usable
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

NAME, TITLE = "ttrl", "TTRL"
LARGE = dict(learning_rate=1e-6, num_prompts=64, num_generations=8, sample_batch_size=32, micro_batch_size=64,
             micro_batch_tokens=4096, max_completion_length=512, beta=0.04, precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, num_prompts=32, num_generations=16, sample_batch_size=512, micro_batch_size=256,
                 micro_batch_tokens=0, max_completion_length=20, beta=0.0, precision="float32"),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=1e-5),
}  # fmt: skip
STD_EPSILON = 1e-4  # the paper names none; 1e-4 as in most code


@dataclass
class Args(PolicyArgs):  # and --model --precision --lora-rank --seed --device ...: utils/lm.py, utils/core.py
    task: str = "sort"
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
    max_steps: int = 10
    """steps: each samples, then updates"""
    num_prompts: int | None = None
    """prompts per step, of all processes"""
    num_generations: int | None = None
    """completions per prompt that are trained: G"""
    num_votes: int | None = None
    """completions per prompt that vote: M; None: --num-generations"""
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
    beta: float | None = None
    """weight of the KL penalty; 0 loads no reference model"""
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
    ref_logps: Tensor | None  # (B, T), None where beta is 0


def final_answer(task: Task, text: str) -> object:
    r"""What the text states as its answer, None where it has none. gsm8k: the number after ####. Files: between the
    last pair of answer tags, else in the last \boxed{}. countdown and sort: without tags all of the text."""
    if task.score is gsm8k_score:
        return stated(text)
    if task.rows is None or "</answer>" in text:
        return answer_of(text) or None
    depth, rest = 1, text.rpartition("\\boxed{")[2] if "\\boxed{" in text else ""
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:i].strip() or None
    return None


def vote(answers: list) -> tuple[object, int]:
    """The most frequent answer and its count; of several the first. None is no vote."""
    (winner,) = Counter(answer for answer in answers if answer is not None).most_common(1) or [(None, 0)]
    return winner


def judged(answers: list, truth: Tensor, votes: int, size: int) -> tuple[Tensor, dict[str, float]]:
    """Rewards (P * size,) for being the majority's answer, and columns of how right it is. truth (P * votes,)."""
    rewards, right, counts = [], [], []
    for i in range(0, len(answers), votes):
        group = answers[i : i + votes]
        label, count = vote(group)
        rewards += [float(answer is not None and answer == label) for answer in group[:size]]
        right.append(truth[i + group.index(label)])
        counts.append(count)
    return torch.tensor(rewards), {"label_accuracy": torch.stack(right).nanmean().item(),
                                   "majority_share": sum(counts) / len(answers),
                                   "reward/true": truth.nanmean().item()}  # fmt: skip


def first_votes(samples: Samples, votes: int, size: int) -> Samples:
    """The first `size` of each prompt's `votes` completions."""
    rows = (x.unflatten(0, (-1, votes))[:, :size].flatten(0, 1) for x in samples[2:])
    return Samples(*samples[:2], *rows)


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


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of completions. Returns metrics."""
    samples, groups = batch.samples, batch.rewards.view(-1, args.num_generations)
    advantage = advantages(groups, args.scale_rewards).view(-1, 1)
    mask = samples.completion_mask
    if args.mask_truncated_completions:
        mask = mask & samples.ended[:, None]
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
                loss, clipped = policy_loss(logps, old_logps, advantage[rows], args.epsilon, high)
                if batch.ref_logps is not None:
                    kl = k3(logps, batch.ref_logps[rows, :width])
                    loss = loss + args.beta * kl
                    means.add(valid, kl=kl)
                (loss * weights[rows, :width]).sum().backward()
                logps = logps.detach()
                means.add(valid, clip_fraction=clipped, approx_kl=k3(old_logps, logps), entropy=entropy)
                if not norms:  # before the first optimizer step
                    gap.add(valid, sampler_gap=(logps - old_logps).abs())
            norms.append(clip_gradients(model, args.max_grad_norm))
            optimizer.step()
    return gap.read() | means.read() | {"grad_norm": torch.stack(norms).mean().item()}


def collect(model, tokenizer, task, score, step: int, args: Args) -> tuple[Samples, Tensor, dict[str, float]]:
    """Samples M completions for each of this process's prompts of the step, which vote. Returns the first G of them,
    their rewards, and columns."""
    rows = [task.train(i, args.seed) for i in share(range((step - 1) * args.num_prompts, step * args.num_prompts))]
    prompts = [encode_prompt(row, tokenizer) for row in rows]
    size = args.num_generations
    votes = size if args.num_votes is None else args.num_votes
    samples = sample_all(model, prompts, votes, args, args.temperature, "train", step)
    rows, (texts, ids) = [row for row in rows for _ in range(votes)], decode(samples, tokenizer)
    truth, columns = score(rows, texts, ids, step)
    rewards, more = judged([final_answer(task, text) for text in texts], truth, votes, size)
    samples = first_votes(samples, votes, size)
    return samples, rewards - args.missing_eos_penalty * ~samples.ended.cpu(), columns | more


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
    if args.num_votes and args.num_votes < args.num_generations:
        wanted = f"must be at least --num-generations {args.num_generations}: what is trained has voted"
        raise UserError(f"--num-votes {args.num_votes} {wanted}")
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
        each = {"reward": rewards, "advantage": advantages(groups, args.scale_rewards).flatten()}  # not all are trained
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

    curves: dict = {"reward": ("reward", "reward/true"), "held-out": ("eval/*",), "entropy per token": ("entropy",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
