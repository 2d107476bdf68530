r"""REINFORCE++: a baseline and a scale from the whole batch, so that one completion per prompt is enough.

Hu, Liu, Xu and Shen 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage
Normalization" (arXiv 2501.03262, equations 8 to 10).

Parent: grpo.py. Advantages are whitened over all tokens of the batch, not within a group, and the KL penalty is in the
reward, token by token.

Every token is reinforced by what follows it: the completion's reward, less the penalty for what is still to come. These
numbers are whitened over all tokens of the step, so prompts share one baseline and one scale, and a prompt needs no
group. Maximises

    J(theta) = E  1/(sum_i T_i) sum_i sum_t  min[ rho_it A_it, clip(rho_it, 1 - eps, 1 + eps_high) A_it ]

    R_it     = R_i - beta sum_s>=t log(pi_old(y_is | .) / pi_ref(y_is | .))    return from token t on
    A_it     = (R_it - mean) / std                       mean and std of R over all tokens of all completions
    x, y_i, R_i, T_i, rho_it, pi_old, pi_ref             as in grpo.py; i runs over all completions of the update
    eps, eps_high, beta                                  --epsilon, --epsilon-high, --beta

--baseline group is "REINFORCE++ with baseline": R_it is R_i less the mean reward of its group, and the penalty moves to
the loss, beta k2_it with k2 = log(pi_theta / pi_ref)^2 / 2.

The baseline does not know the prompt. GRPO tells an answer from the others to the same prompt; here an easy prompt's
right answer looks better than average, and a hard prompt's wrong one is hardly to blame. That costs variance, not
bias, but for the completion's own part in mean and std, which vanishes as the batch grows. One scale for all prompts
keeps the policy gradient's direction, which GRPO's std of each group does not.

Run
    python algos/reinforce_pp.py                                    the embedded model learns countdown, 512 prompts x 1
    python algos/reinforce_pp.py --task sort --max-steps 16         a smaller task
    python algos/reinforce_pp.py --baseline group --num-prompts 64 --num-generations 8       with groups of 8
    python algos/reinforce_pp.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing
                                                                    a real model, on a GPU
    python algos/reinforce_pp.py --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --task prompts.jsonl \
        --reward rewards.py:accuracy --baseline group --num-prompts 512 --num-generations 16 --num-minibatches 8 \
        --epsilon-high 0.27 --beta 1e-4 --learning-rate 1e-6 --max-completion-length 8192
                                                                    ProRL v2, as in OpenRLHF's examples/scripts/
                                                                    train_prorlv2_math_hybrid_engine.sh, without its
                                                                    filter of groups, its weights for the sampler,
                                                                    and its reward of 0 for truncated answers

Expect
    The default run takes 250 CPU seconds. Held-out countdown goes from greedy 0.01, pass@1 0.08, pass@8 0.43 to greedy
    0.53, pass@1 0.53, pass@8 0.68 (seed 1, 128 prompts); grpo.py gets to 0.58, 0.53, 0.69.
    --task sort --max-steps 8: greedy 0.23 to 1.00, pass@1 0.40 to 0.95; grpo.py with 64 prompts x 8 the same (seed 1).
    With 512 completions a step whitening changes nothing: without it greedy is 0.99 and pass@1 0.94 there (seed 1).
    With 64 it was behind: pass@1 0.94 and 0.88 after 30 steps at beta 0, without it 0.99 and 0.98 (seeds 1 and 2;
    grpo.py with 8 x 8: 0.93 and 0.86). Where most answers are right, dividing by a small deviation makes the few wrong
    ones loud.
    Sort, 8 steps, pass@1 over ten seeds: 0.93 with one completion per prompt, grpo.py 0.93, not whitened 0.93. With
    coins as rewards 0.45; one seed there drifted to 0.63 by chance (benchmarks/effects.py, reinforce_pp-alone).

Metrics
    As in grpo.py, but
    reward_std     over the batch, not within groups. There is no frac_zero_std: flat groups teach, too
    kl             mean k3 (beta > 0 only), whichever penalty is taken; grows slowly

Differences
    - Whitening is over the step's batch, whatever the micro-batches, minibatches and processes. The mean counts tokens,
      so long completions own the baseline.
    - The variance is unbiased, plus 1e-8, as in verl. OpenRLHF's is biased, with a floor of 1e-8: larger advantages by
      the factor sqrt(n / (n - 1)) for n tokens.
    - The same name is several algorithms. The baseline variant of verl has no penalty of its own; that of ms-swift has
      it in the reward; that of OpenRLHF (--algo.advantage.estimator reinforce_baseline) there or, by
      --algo.kl.use_loss and --algo.kl.estimator k2, in the loss, as here. OpenRLHF cuts its estimates at -10 and 10.
    - gamma is 1: equation 8 has none.
    - beta is 0.01, OpenRLHF's default. The paper advises rewards of -1 and 1 for one completion per prompt: after
      whitening they are those of 0 and 1, but for beta, which then weighs half as much.
    - pi_old is the sampler's own log-probability, as in grpo.py, in the penalty, too.
    - A sample whose reward functions all return None is in no mean and no std, and has advantage 0.
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

NAME, TITLE = "reinforce_pp", "REINFORCE++"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, adam_beta2=0.999, num_prompts=512, num_generations=1, sample_batch_size=512,
                 micro_batch_size=256, micro_batch_tokens=0, max_completion_length=20, beta=0.01, precision="float32"),
    "full": dict(learning_rate=1e-6, adam_beta2=0.999, num_prompts=512, num_generations=1, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, beta=0.01,
                 precision="bfloat16"),
    "lora": dict(learning_rate=1e-5, adam_beta2=0.999, num_prompts=512, num_generations=1, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, beta=0.01,
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
    num_minibatches: PositiveInt = 1
    """optimizer steps per update epoch, each on an equal share of the prompts: from the second on, pi_old is stale"""
    epsilon: PositiveFloat = 0.2
    """lower clip of the ratio: 1 - epsilon"""
    epsilon_high: PositiveFloat | None = None
    """upper clip of the ratio: 1 + epsilon_high; None: epsilon"""
    beta: NonNegativeFloat | None = None
    """weight of the KL penalty, which is in the reward or, with --baseline group, in the loss; 0 loads no reference"""
    reset_reference_every: NonNegativeInt = 0
    """steps after which the reference becomes the policy, and the optimizer begins anew (ProRL); 0: never"""
    baseline: Literal["none", "group"] = "none"
    """none: the batch's mean alone; group: the group's mean reward is subtracted before (REINFORCE++ with baseline)"""
    whiten_advantages: bool = True
    """subtract the mean of all tokens of the batch, and divide by their standard deviation"""
    aggregation: Literal["sequence", "token", "constant"] = "token"
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


def kl_to_go(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """log pi_old - log pi_ref, summed from each token to the completion's last one. All (B, T)."""
    return ((logps - ref_logps) * mask).flip(1).cumsum(1).flip(1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and unbiased standard deviation 1 over the tokens of `mask`, 0 elsewhere (equation 10)."""
    kept = values[mask]
    if len(kept) < 2:  # all rewards were skipped
        return torch.zeros_like(values)
    return (values - kept.mean()) * (kept.var() + 1e-8).rsqrt() * mask


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


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Half the squared log-ratio at tokens of pi_theta. Its gradient is that of KL(pi_theta || pi_ref), token by token;
    that of k3 is not."""
    return 0.5 * (logps - ref_logps).square()


def minibatches(samples: Samples, number: int) -> Iterator[tuple[Samples, slice]]:
    """Equal shares of the prompts with their completions, and the rows of these."""
    prompts, size = len(samples.prompt_ids) // number, len(samples.completion_ids) // number
    for i in range(number):
        these, rows = slice(i * prompts, (i + 1) * prompts), slice(i * size, (i + 1) * size)
        yield Samples(*(x[these] for x in samples[:2]), *(x[rows] for x in samples[2:])), rows


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of completions. Returns metrics."""
    samples, mask = batch.samples, batch.samples.completion_mask
    if args.mask_truncated_completions:
        mask = mask & samples.ended[:, None]
    advantage = advantages(batch, mask, args)
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
                loss, clipped = policy_loss(logps, old_logps, advantage[rows, :width], args.epsilon, high)
                if batch.ref_logps is not None:
                    ref_logps = batch.ref_logps[rows, :width]
                    if args.baseline == "group":
                        loss = loss + args.beta * k2(logps, ref_logps)
                    means.add(valid, kl=k3(logps, ref_logps))
                (counts * loss * weights[part, :width]).sum().backward()
                logps = logps.detach()
                means.add(valid, clip_fraction=clipped, approx_kl=k3(old_logps, logps), entropy=entropy)
                if not norms:
                    first.add(valid, sampler_gap=(logps - old_logps).abs())
            norms.append(clip_gradients(model.parameters(), args.max_grad_norm))
            optimizer.step()
    return first.read() | means.read() | {"grad_norm": torch.stack(norms).mean().item()}


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
    """Raises UserError for groups that cannot be compared or split, and for a reference that cannot be reset."""
    if args.num_generations < 2 and args.baseline == "group":
        raise UserError("--baseline group needs --num-generations of at least 2: one reward is its group's mean")
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
        lengths = samples.completion_mask.sum(1).float()
        columns |= {
            "reward": batch.rewards.nanmean().item(),
            "reward_std": (batch.rewards - batch.rewards.nanmean()).square().nanmean().sqrt().item(),
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
