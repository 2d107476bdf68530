r"""Group Relative Policy Optimization (GRPO).

Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models" (arXiv
2402.03300, section 4.1, equations 3 and 4). For each prompt x the policy pi_old samples a group of G completions
y_1..y_G with rewards R_1..R_G. Maximises

    J(theta) = E  1/G sum_i 1/T_i sum_t { min[ rho_it A_i, clip(rho_it, 1 - eps, 1 + eps_high) A_i ] - beta k3_it }

    A_i    = (R_i - mean(R_1..R_G)) / std(R_1..R_G)                 advantage, the same for every token of y_i
    rho_it = pi_theta(y_it | x, y_i,<t) / pi_old(y_it | x, y_i,<t)  probability ratio, old = as sampled
    k3_it  = pi_ref / pi_theta - log(pi_ref / pi_theta) - 1         estimates KL(pi_theta || pi_ref) at the token
    T_i    = number of tokens of y_i up to and including the first EOS

Differences
    - The paper does not say which standard deviation: here the unbiased one (ddof 1) plus 1e-4, as in most code.
    - Sequence aggregation (the paper's 1/G 1/T_i) is biased by design: at rho = 1, beta = 0 and --scale-rewards none
      its expected gradient is (G-1)/G E[(R - J)/T grad log pi], which is no policy gradient; group scaling adds a bias
      of its own. Constant aggregation without scaling gives (G-1)/(G L_max) times the policy gradient
      (tests/test_exact_grpo.py).
    - Token aggregation divides by the tokens of the whole step, as TRL and verl do; DAPO's formula by each group's.
    - With --dynamic-sampling, reward, reward_std, length and entropy describe the groups that were kept.
    - beta is 0 for the embedded model (no reference is loaded then), 0.04 as in the paper otherwise. TRL: 0.
    - The gradient of k3 is that of KL(pi_ref || pi_theta) per token, not of the KL that its value estimates.
    - pi_old is the sampler's own log-probability, so a difference between sampler and scorer (bfloat16) is corrected,
      and no extra forward pass is needed. TRL recomputes it or takes rho = 1.
    - Dropout is off, so that the policy that is updated is the one that sampled. TRL keeps the model's own.
    - Sampling and scoring both divide logits by --temperature; there is no top-k or top-p.
    - One optimizer step per update epoch on the whole batch. Denominators are those of the whole step, so micro-batches
      do not change the result. Completions cut off by the length limit are trained unless --mask-truncated-completions;
      masked ones still count in the number of completions, as in TRL.
    - A sample for which every reward function returns None has advantage 0 and is left out of its group's mean and std.
    - --dynamic-sampling draws further prompts in place of groups whose rewards are all equal (DAPO), at most
      --max-sampling-rounds times; groups still missing then are filled with such groups.

Metrics
    reward         mean over the batch; rises. reward_std: mean within groups
    frac_zero_std  share of groups with equal rewards, which teach nothing; below 0.9
    reward/task    the task's own score, where --reward is given: falling while reward rises it is over-optimised
    eval/greedy, eval/pass@1, eval/pass@8   held-out accuracy: likeliest answer, a sample, the best of eight. pass@1
                   that rises towards a flat greedy is sharpening; greedy that rises may still be
    grad_norm      before clipping; steady
    kl             k3 against the reference (beta > 0 only); grows slowly
    approx_kl      k3 of new against old in the last update epoch; near 0 with one epoch
    clip_fraction  share of tokens whose gradient is cut; 0 in the first epoch, below 0.3
    sampler_gap    mean |log pi_theta - log pi_old| in the first epoch; 1e-6 in float32, more means a bug
    entropy        nats per token; falls, should not hit 0. length: tokens. truncated: share without EOS; below 0.9
    The loss is not logged: at rho = 1 its value is 0 whatever its gradient.

Run
    python algos/grpo.py                                                            the embedded model learns countdown
    python algos/grpo.py --task sort --max-steps 40                                 the small task of the tests
    python algos/grpo.py --model deepseek-ai/deepseek-math-7b-instruct --task gsm8k --num-prompts 16 \
        --num-generations 64 --max-completion-length 1024 --learning-rate 1e-6 --beta 0.04
                                                                                the paper's hyper-parameters (section
                                                                                4.2; it used a learned reward model)
    python algos/grpo.py --aggregation constant --scale-rewards none --beta 0       Dr. GRPO (arXiv 2503.20783)
    python algos/grpo.py --aggregation token --epsilon-high 0.28 --beta 0 --dynamic-sampling
                                                                                DAPO (arXiv 2503.14476); its soft
                                                                                overlong penalty is a reward function
    python algos/grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing
    python algos/grpo.py --model ORG/NAME --task prompts.jsonl --reward rewards.py:accuracy rewards.py:format \
        --reward-weights 1 0.2

Expect
    The default run: held-out countdown goes from greedy 0.01, pass@1 0.07, pass@8 0.42 to greedy 0.52, pass@1 0.48,
    pass@8 0.66 (seed 1, 128 prompts; greedy 0.50 to 0.58 over 8 seeds and 256 prompts), in about 1 minute on 2 CPU
    cores. Most of it comes in the first 20 steps (0.49, 0.38, 0.73): most answers that the embedded model was shown are
    one too high, and it unlearns that. From then on pass@1 closes up to greedy and pass@8 falls, which is sharpening.
    Sharpening alone (minimising entropy) ends at greedy 0.00.
    --task sort --max-steps 16: greedy 0.23 to 1.00, pass@1 0.41 to 0.97, pass@8 0.91 to 1.00, in about 10 seconds.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.checkpoint import rng_state
from utils.errors import UserError, check_numbers
from utils.evaluation import advice, decode, evaluate, show
from utils.lm import (
    TINY_MODEL,
    Samples,
    autocast,
    check_cache,
    completion_logps,
    eos_ids,
    join,
    load_model,
    pad_left,
    sample,
    save_model,
    trained_state,
    without_dropout,
)
from utils.rewards import Scored, make_scorer
from utils.run import Run, RunArgs, main, prepare
from utils.schedule import learning_rate
from utils.tasks import Task, encode_prompt, load_task, present

PRESETS = {  # what depends on the model: taken for every argument that is left at None
    "tiny": dict(learning_rate=1e-4, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=512,
                 micro_batch_size=256, max_completion_length=20, beta=0.0, precision="float32"),
    "full": dict(learning_rate=1e-6, adam_beta2=0.999, num_prompts=16, num_generations=8, sample_batch_size=64,
                 micro_batch_size=4, max_completion_length=512, beta=0.04, precision="bfloat16"),
    "lora": dict(learning_rate=1e-5, adam_beta2=0.999, num_prompts=16, num_generations=8, sample_batch_size=64,
                 micro_batch_size=4, max_completion_length=512, beta=0.04, precision="bfloat16"),
}  # fmt: skip
RANGES = {  # what numbers must be
    "at least 1": "max_steps num_prompts sample_batch_size max_completion_length micro_batch_size num_iterations "
    "max_sampling_rounds eval_prompts eval_samples",
    "at least 0": "beta warmup_steps weight_decay lora_rank eval_every",
    "above 0": "temperature epsilon epsilon_high learning_rate max_grad_norm",
    "at least 0 and below 1": "adam_beta2",
}
STD_DDOF, STD_EPSILON = 1, 1e-4  # advantage = (reward - mean) / (std + STD_EPSILON)


@dataclass
class Args(RunArgs):
    model: str = TINY_MODEL
    """folder or hub name of a causal language model"""
    task: str = "countdown"
    """countdown, sort, gsm8k, a .jsonl or .parquet file, or a hub dataset"""
    prompt_column: str = "prompt"
    """column of a dataset with the prompt: text or chat messages"""
    reward: tuple[str, ...] = ()
    """reward functions, FILE.py:NAME or PACKAGE.MODULE:NAME, called as TRL calls them, and reward models, by folder or
    hub name (an ensemble's with :mean, :worst-case or :uncertainty=L behind it); none: the task's own score"""
    reward_weights: tuple[float, ...] = ()
    """one weight per reward function; none: all 1"""
    max_steps: int = 100
    """steps, each of which samples and updates"""
    num_prompts: int | None = None
    """prompts per step"""
    num_generations: int | None = None
    """completions per prompt: G"""
    sample_batch_size: int | None = None
    """completions sampled at once, in training and evaluation, rounded to whole prompts; limits the cache's memory"""
    max_completion_length: int | None = None
    """new tokens at most"""
    temperature: float = 1.0
    """of sampling and of the policy that is trained"""
    micro_batch_size: int | None = None
    """completions in one forward and backward pass: a multiple or a divisor of G; changes memory, not the result"""
    num_iterations: int = 1
    """update epochs per batch of completions (mu in the paper)"""
    epsilon: float = 0.2
    """lower clip of the ratio: 1 - epsilon"""
    epsilon_high: float | None = None
    """upper clip of the ratio: 1 + epsilon_high; None: epsilon"""
    beta: float | None = None
    """weight of the KL penalty; 0 loads no reference model"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """divide advantages by the standard deviation of their group, of the batch, or not"""
    aggregation: Literal["sequence", "token", "constant"] = "sequence"
    """mean over each completion's tokens, then completions; mean over all tokens; sum over B * max_completion_length"""
    mask_truncated_completions: bool = False
    """leave completions that were cut off out of the loss"""
    dynamic_sampling: bool = False
    """replace groups without variance by groups of further prompts"""
    max_sampling_rounds: int = 4
    """rounds of sampling per step at most, with --dynamic-sampling"""
    learning_rate: float | None = None
    """peak learning rate of AdamW"""
    adam_beta2: float | None = None
    """second-moment decay of AdamW (the first is 0.9)"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """decay after the warm-up"""
    warmup_steps: int = 0
    """steps of linear warm-up"""
    weight_decay: float = 0.0
    """decoupled weight decay"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this norm"""
    precision: Literal["float32", "bfloat16", "pure-bfloat16"] | None = None
    """bfloat16: autocast over float32 weights; pure-bfloat16: bfloat16 weights, in which small updates round away"""
    lora_rank: int = 0
    """train LoRA adapters of this rank instead of all weights (needs peft)"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    trust_remote_code: bool = False
    """run code that comes with the model, and with models of --reward"""
    eval_every: int = 20
    """steps between evaluations; 0: at the start and the end only"""
    eval_prompts: int = 128
    """held-out prompts per evaluation"""
    eval_samples: int = 8
    """sampled answers per held-out prompt"""


class Batch(NamedTuple):
    """What one step learns from. P prompts, G completions of each, B = P * G rows."""

    samples: Samples
    rewards: Tensor  # (B,) float32, NaN: skipped
    ref_logps: Tensor | None  # (B, T), None where beta is 0


def advantages(rewards: Tensor, scale: str) -> Tensor:
    """Rewards minus their group's mean, over (std + STD_EPSILON) of the group or batch. (P, G) -> (P, G).

    NaN rewards are left out of means and deviations and get 0; so do all of a group of equal ones, whose mean may be
    rounded. DeepSeekMath section 4.1.2; "none": arXiv 2503.20783.
    """

    def std(values: Tensor) -> Tensor:
        known = values[~values.isnan()]
        return known.std(correction=STD_DDOF) if len(known) > STD_DDOF else values.new_zeros(())

    centred = rewards - rewards.nanmean(1, keepdim=True)
    if scale == "group":
        centred = centred / (torch.stack([std(group) for group in rewards])[:, None] + STD_EPSILON)
    elif scale == "batch":
        centred = centred / (std(rewards) + STD_EPSILON)
    return centred.nan_to_num(0.0).masked_fill(zero_std(rewards)[:, None], 0.0)


def token_weights(mask: Tensor, aggregation: str, max_completion_length: int) -> Tensor:
    """What each token's loss counts in the step's loss: the denominator over all B rows. (B, T) of 0 and 1 -> (B, T).

    sequence: 1 / (B T_i) (DeepSeekMath); token: 1 / sum T_i (DAPO); constant: 1 / (B L_max) (Dr. GRPO).
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
    """Estimate of KL(pi_theta || pi_ref) at tokens of pi_theta: non-negative, unbiased in value. arXiv 2402.03300,
    equation 4."""
    difference = ref_logps - logps
    return difference.exp() - difference - 1


def micro_batches(batch: Batch, group_size: int, size: int):
    """Yields (rows, arguments of completion_logps) of `size` completions each, trimmed to their own longest."""
    prompt_ids, prompt_mask, ids, mask, _, _ = batch.samples
    for start in range(0, len(ids), size):
        rows = slice(start, start + size)
        prompts = slice(start // group_size, -(-min(start + size, len(ids)) // group_size))
        left = prompt_mask.shape[1] - int(prompt_mask[prompts].sum(1).max())
        right = int(mask[rows].sum(1).max())
        yield rows, (prompt_ids[prompts, left:], prompt_mask[prompts, left:], ids[rows, :right], mask[rows, :right])


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`num_iterations` optimizer steps on one batch of completions. Returns metrics."""
    samples, groups = batch.samples, batch.rewards.view(-1, args.num_generations)
    advantage = advantages(groups, args.scale_rewards).view(-1, 1)
    mask = samples.completion_mask
    if args.mask_truncated_completions:
        mask = mask & samples.ended[:, None]
    weights = token_weights(mask.to(samples.logps.dtype), args.aggregation, args.max_completion_length)
    tokens = mask.sum().clamp(min=1)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    metrics = {}
    for epoch in range(args.num_iterations):
        sums = dict.fromkeys(
            ("clip_fraction", "approx_kl", "entropy", "kl", "gap"), torch.zeros((), device=mask.device)
        )
        optimizer.zero_grad(set_to_none=True)
        for rows, inputs in micro_batches(batch, args.num_generations, args.micro_batch_size):
            with autocast(model.device, args.precision):
                logps, entropy = completion_logps(model, *inputs, args.temperature)
            width = logps.shape[1]
            old_logps, valid = samples.logps[rows, :width], mask[rows, :width]
            loss, clipped = policy_loss(logps, old_logps, advantage[rows], args.epsilon, high)
            sizes = {"clip_fraction": clipped, "approx_kl": k3(old_logps, logps), "entropy": entropy}
            if batch.ref_logps is not None:
                kl = k3(logps, batch.ref_logps[rows, :width])
                loss, sizes["kl"] = loss + args.beta * kl, kl
            (loss * weights[rows, :width]).sum().backward()
            with torch.no_grad():
                sizes["gap"] = (logps - old_logps).abs()
                for name, size in sizes.items():
                    sums[name] = sums[name] + (size * valid).sum() / tokens
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        if epoch == 0:
            metrics["sampler_gap"] = sums["gap"].item()
    del sums["gap"]
    if batch.ref_logps is None:
        del sums["kl"]
    return metrics | {name: value.item() for name, value in sums.items()} | {"grad_norm": grad_norm.item()}


def collect(model, tokenizer, task: Task, score: Callable, first: int, step: int, generator, args: Args):
    """Samples and scores G completions for each of P prompts, from row `first` of the task on.

    Returns samples, what `score` said, the next row, and the share of groups without variance among all sampled ones.
    """
    kept, without_variance, seen = [], [], 0
    at_once = max(1, args.sample_batch_size // args.num_generations)
    for _ in range(args.max_sampling_rounds if args.dynamic_sampling else 1):
        rows = [task.train(first + i, args.seed) for i in range(args.num_prompts)]
        first += args.num_prompts
        prompts = [present(row, tokenizer) for row in rows]
        tokens = [encode_prompt(prompt, tokenizer) for prompt in prompts]
        with autocast(model.device, args.precision):
            samples = join([
                sample(model, *pad_left(tokens[i : i + at_once], model.device), args.num_generations,
                       args.max_completion_length, eos_ids(model, tokenizer), args.temperature, generator)
                for i in range(0, len(tokens), at_once)
            ])  # fmt: skip
        texts, token_lists = decode(samples, tokenizer)
        repeated, shown = ([x for x in xs for _ in range(args.num_generations)] for xs in (rows, prompts))
        scored = score(repeated, shown, texts, token_lists, step)
        flat = zero_std(scored.rewards.view(-1, args.num_generations))
        seen += len(flat)
        if not args.dynamic_sampling:
            return samples, scored, first, flat.float().mean().item()
        for group in range(len(flat)):
            (without_variance if flat[group] else kept).append((samples, scored, group))
        if len(kept) >= args.num_prompts:
            break
    samples, scored = merge((kept + without_variance)[: args.num_prompts], args.num_generations)
    return samples, scored, first, len(without_variance) / seen


def zero_std(groups: Tensor) -> Tensor:
    """Groups whose known rewards are all equal, or unknown. (P, G) -> (P,) bool."""
    low, high = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
    return ~(high > low)


def merge(groups: list[tuple[Samples, Scored, int]], size: int) -> tuple[Samples, Scored]:
    """One Samples and one Scored of the chosen groups. The logged columns of reward functions are those of the last
    round of sampling, discarded groups included."""
    parts = [
        Samples(*(x[g : g + 1] for x in samples[:2]), *(x[g * size : (g + 1) * size] for x in samples[2:]))
        for samples, _, g in groups
    ]
    rewards = torch.cat([scored.rewards[g * size : (g + 1) * size] for _, scored, g in groups])
    return join(parts), Scored(rewards, groups[-1][1].columns, {})


@torch.no_grad()
def reference_logps(model, ref_model, batch: Batch, args: Args) -> Tensor:
    """Log-probabilities (B, T) under the reference: `ref_model`, or the policy without its LoRA adapters."""
    out = torch.zeros_like(batch.samples.logps)
    with autocast(model.device, args.precision):
        for rows, inputs in micro_batches(batch, args.num_generations, args.micro_batch_size):
            if ref_model is None:
                with model.disable_adapter():
                    logps, _ = completion_logps(model, *inputs, args.temperature)
            else:
                logps, _ = completion_logps(ref_model, *inputs, args.temperature)
            out[rows, : logps.shape[1]] = logps
    return out


def check_groups(args: Args) -> None:
    """Raises UserError for groups that cannot be compared or split."""
    if args.num_generations < 2:
        raise UserError("--num-generations must be at least 2: a group of one has no other reward to compare with")
    if args.micro_batch_size % args.num_generations and args.num_generations % args.micro_batch_size:
        raise UserError(
            f"--micro-batch-size {args.micro_batch_size} must be a multiple or a divisor of --num-generations "
            f"{args.num_generations}"
        )


def train(args: Args) -> list[dict]:
    device = prepare(args)
    check_numbers(args, RANGES)
    task = load_task(args.task, args.prompt_column)
    score = make_scorer(task, args.reward, args.reward_weights, args.max_steps, device, args.trust_remote_code)
    model, tokenizer = load_model(args.model, device, args.precision or "float32", args.lora_rank,
                                  args.gradient_checkpointing, args.trust_remote_code)  # fmt: skip
    without_dropout(model)
    size = sum(p.numel() for p in model.parameters())
    preset = "lora" if args.lora_rank else "tiny" if size < 10e6 else "full"
    resolved = {name: value for name, value in PRESETS[preset].items() if getattr(args, name) is None}
    for name, value in resolved.items():
        setattr(args, name, value)
    check_groups(args)
    check_cache(model)
    encode_prompt(present(task.train(0, args.seed), tokenizer), tokenizer)  # prompts that cannot be rendered fail here
    ref_model = None
    if args.beta > 0 and not args.lora_rank:
        ref_model = load_model(args.model, device, args.precision, trust_remote_code=args.trust_remote_code)[0].eval()
        ref_model.requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, betas=(0.9, args.adam_beta2),
                                  weight_decay=args.weight_decay, fused=True)  # fmt: skip
    generator = torch.Generator(device).manual_seed(args.seed)
    run = Run(args, "grpo", task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"),
              schedule_depends_on_budget=args.lr_schedule != "constant")  # fmt: skip
    run.print(f"{size / 1e6:.2f}M parameters, settings for a {preset} model: {resolved}")
    if args.precision == "pure-bfloat16" and not args.lora_rank:  # adapters are float32
        run.print(
            "warning: bfloat16 weights round small updates away; raise the learning rate or use --precision bfloat16"
        )

    def evaluation(step: int) -> dict[str, float]:
        with autocast(device, args.precision):
            return evaluate(model, tokenizer, task, score, args.eval_prompts, args.eval_samples,
                            args.max_completion_length, args.temperature, args.seed, step,
                            args.sample_batch_size)  # fmt: skip

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict(), "next_row": next_row,
                "generator": generator.get_state()}  # fmt: skip

    step, next_row = 0, 0
    if run.state is not None:
        model.load_state_dict(run.state["model"], strict=False)
        optimizer.load_state_dict(run.state["optimizer"])
        generator.set_state(run.state["generator"].cpu())
        step, next_row = run.state["step"], run.state["next_row"]
    else:
        run.log(0, **evaluation(0))
        run.save(0, state())
    run.restore_rng()
    model.train()
    while step < args.max_steps:
        start, before = time.perf_counter(), (step, state(), rng_state())
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.learning_rate, args.lr_schedule, args.warmup_steps, args.max_steps)

        # collect
        try:
            samples, scored, next_row, frac_zero_std = collect(
                model, tokenizer, task, score, next_row, step, generator, args
            )
        except Exception:
            run.save(*before)  # nothing has been trained in this step: a resumed run repeats it
            raise
        sampled = time.perf_counter()
        due = step == args.max_steps or (args.eval_every and step % args.eval_every == 0)
        if step == 1 or due:
            shown = [ids[mask].tolist() for ids, mask in zip(samples.completion_ids[:2], samples.completion_mask[:2])]
            prompt = samples.prompt_ids[0][samples.prompt_mask[0]].tolist()
            run.print(show(tokenizer, prompt, shown, scored.rewards.tolist(), scored.extra))
        batch = Batch(samples, scored.rewards.to(device), None)
        if args.beta > 0:
            batch = batch._replace(ref_logps=reference_logps(model, ref_model, batch, args))

        # update
        columns = update(model, optimizer, batch, args)

        # evaluate
        groups, lengths = batch.rewards.view(-1, args.num_generations), samples.completion_mask.sum(1).float()
        columns |= {
            "reward": batch.rewards.nanmean().item(),
            "reward_std": (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean().item(),
            "frac_zero_std": frac_zero_std,
            "length": lengths.mean().item(),
            "truncated": 1 - samples.ended.float().mean().item(),
            "learning_rate": optimizer.param_groups[0]["lr"],
            **scored.columns,
            "time/sample": sampled - start,
            "time/step": time.perf_counter() - start,
        }
        columns["time/tokens_per_second"] = lengths.sum().item() / columns["time/step"]
        if due:
            try:
                columns |= evaluation(step)
            except Exception:  # a reward function of the user's: the update is done, only its evaluation is lost
                run.log(step, **columns)
                run.save(step, state())
                raise
        run.log(step, **columns)
        if line := advice(run.history):
            run.print(f"step {step}: {line}")
        run.end_step(step, state)

    evals = tuple(name for name in run.history[-1] if name.startswith("eval/"))
    curves = {"reward": ("reward",), "held-out": evals, "entropy per token": ("entropy",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder), curves, f"GRPO on {task.name}")


if __name__ == "__main__":
    main(Args, train)
