r"""Group Relative Policy Optimization (GRPO).

Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models" (arXiv
2402.03300, section 4.1, equations 3 and 4).

The policy answers each prompt several times. An answer is reinforced by how much better its reward is than the rewards
of the other answers to the same prompt, so no value network is needed. Maximises

    J(theta) = E  1/G sum_i 1/T_i sum_t { min[ rho_it A_i, clip(rho_it, 1 - eps, 1 + eps_high) A_i ] - beta k3_it }

    x, y_i   a prompt, and the i-th of G completions that pi_old samples for it, with reward R_i
    pi_ref   the policy before the first step
    A_i      = (R_i - mean(R_1..R_G)) / std(R_1..R_G)                 advantage, the same for every token of y_i
    rho_it   = pi_theta(y_it | x, y_i,<t) / pi_old(y_it | x, y_i,<t)  probability ratio
    k3_it    = pi_ref / pi_theta - log(pi_ref / pi_theta) - 1         estimate of KL(pi_theta || pi_ref) at the token
    T_i      number of tokens of y_i up to and including the first EOS
    G, eps, eps_high, beta   --num-generations, --epsilon, --epsilon-high, --beta

Run
    python algos/grpo.py                                                            the embedded model learns countdown
    python algos/grpo.py --task sort --max-steps 40                                 a smaller task
    python algos/grpo.py --model deepseek-ai/deepseek-math-7b-instruct --task gsm8k --num-prompts 16 \
        --num-generations 64 --max-completion-length 1024 --learning-rate 1e-6 --beta 0.04 --lora-rank 32
                                                                                the paper's hyper-parameters (section
                                                                                4.2; it used a learned reward model and
                                                                                trained all weights); about 55 GB of GPU
                                                                                memory, 40 of them the cache
    python algos/grpo.py --aggregation constant --scale-rewards none --beta 0       Dr. GRPO (arXiv 2503.20783)
    python algos/grpo.py --scale-rewards batch --aggregation token --beta 0         Lite PPO (arXiv 2508.08221)
    python algos/grpo.py --task sort --beta 1 --reset-reference-every 4             ProRL's resets (arXiv 2505.24864)
    python algos/grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing
    torchrun --nproc-per-node=8 algos/grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --task gsm8k
                                                                                eight GPUs, the same numbers; --fsdp for
                                                                                models that one GPU cannot hold
    python algos/grpo.py --model ORG/NAME --task prompts.jsonl --reward rewards.py:accuracy rewards.py:format \
        --reward-weights 1 0.2

Expect
    The default run takes 1 to 3 minutes on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.08, pass@8
    0.43 to greedy 0.58, pass@1 0.53, pass@8 0.69 (seed 1, 128 prompts; greedy 0.50 to 0.58 over 8 seeds, 256 prompts).
    Most of it comes in the first 20 steps: the embedded model has mostly seen answers that are one too high,
    and unlearns that. Then pass@1 approaches greedy and pass@8 falls: the policy sharpens. Sharpening alone (minimising
    entropy) ends at greedy 0.00.
    --task sort --max-steps 16: greedy 0.23 to 1.00, pass@1 0.40 to 0.97, pass@8 0.88 to 1.00, in about 10 seconds.
    A strong penalty holds learning back, and ProRL's resets let it go on: 40 steps of sort with 32 prompts and --beta 1
    end at pass@1 0.69, with --reset-reference-every 10 at 0.92, with --beta 0 at 0.97. The resets gain more than 0.1 in
    all of 10 seeds; they come within 0.1 of no penalty in 8, where 9 were asked (benchmarks/effects.py, grpo-reset).

Metrics
    reward         mean over the batch; rises. reward_std: mean within groups
    frac_zero_std  share of groups with equal rewards, which teach nothing; below 0.9
    reward/task    the task's own score, where --reward is given. A fall while reward rises is over-optimisation
    eval/greedy, eval/pass@1, eval/pass@8   held-out accuracy: the likeliest answer, a sample, the best of eight. If
                   pass@1 rises and greedy stays, the policy only sharpens. A rise of greedy does not rule that out
    eval/distinct  different right texts among a prompt's --eval-samples; falls as the policy sharpens
    grad_norm      before clipping, mean over the step's updates; steady
    kl             mean k3 (beta > 0 only); grows slowly
    approx_kl      mean of rho - 1 - log rho in the last update epoch; near 0 with one epoch
    clip_fraction  share of tokens whose gradient is cut; below 0.3. In the first epoch 0 in float32; in bfloat16 the
                   sampler's rounding alone can take a few tokens beyond the clip. What the clip does to stale data:
                   benchmarks/README.md
    sampler_gap    mean |log pi_theta - log pi_old| before the first update; 1e-6 in float32, more means a bug
    engine/weight, engine/above_2, engine/ess   with --sampler, over tokens: mean of pi_theta / pi_engine, its share
                   above 2, effective sample size over the number of tokens; about 1, 0 and 1
    entropy        nats per token; falls, should not reach 0. length: tokens. truncated: share without EOS; below 0.9
    The loss is not logged: at rho = 1 its first term is 0 whatever the gradient.

Differences
    - beta is 0 for the embedded model (no reference is loaded), 0.04 as in the paper for others. TRL: 0.
    - pi_old is the sampler's own log-probability. That corrects a gap between sampler and scorer (bfloat16), as far as
      the clip lets it, and saves a forward pass. TRL recomputes it, or takes rho = 1.
    - Dropout is off, so that the updated policy is the one that sampled. TRL keeps the model's own.
    - Sampling and scoring both divide logits by --temperature. There is no top-k or top-p.
    - A minibatch is one optimizer step, and denominators are those of a minibatch, so micro-batches do not change the
      result. Advantages are those of the whole batch. Minibatches keep the order of the prompts, which is random.
    - Completions without EOS are trained on unless --mask-truncated-completions. Masked ones still count in the number
      of completions, as in TRL.
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

NAME, TITLE = "grpo", "GRPO"
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
