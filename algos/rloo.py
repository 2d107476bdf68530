r"""REINFORCE Leave-One-Out (RLOO).

Parent: grpo.py. Changed: PRESETS, RANGES, Args (gone: scale_rewards, aggregation, mask_truncated_completions),
advantages, update, train (the names of the run and its curves). Gone: token_weights, STD_DDOF, STD_EPSILON. Added:
penalised.

Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs"
(arXiv 2402.14740, sections 2.2 and 2.3, equations 3 and 6), after Kool, van Hoof and Welling 2019, "Buy 4 REINFORCE
Samples, Get a Baseline for Free!". The whole completion is one action. For each prompt x the policy samples y_1..y_G.
Maximises

    J(theta) = E  1/G sum_i min[ rho_i A_i, clip(rho_i, 1 - eps, 1 + eps_high) A_i ]

    R_i   = r(x, y_i) - beta sum_t log(pi_old(y_it | .) / pi_ref(y_it | .))    KL penalty, part of the reward: a number
    A_i   = R_i - 1/(G - 1) sum_j!=i R_j                                       the other completions are the baseline
    rho_i = pi_theta(y_i | x) / pi_old(y_i | x)                                ratio of whole completions

At rho = 1 the expected gradient is exactly that of E[r(x, y)] - beta KL(pi_theta || pi_ref), the divergence of whole
completions (tests/test_exact_rloo.py): the baseline does not depend on y_i, no token is left out, nothing is divided by
lengths or deviations.

Differences
    - The paper has neither ratio nor clip, and takes two gradient steps on each batch of samples, half of it each; here
      it is one on all of it, and the clip matters with --num-iterations above 1 only. TRL's ratio and clip are the
      same; verl and others clip token by token.
    - TRL also normalises advantages on request; here nothing does, for it would bias the gradient.
    - A completion that was cut off is a completion: it keeps its reward and its place in the baseline.
    - pi_old is the scorer's in the ratio, as in TRL, and the sampler's in the penalty. In bfloat16 the two differ by
      about 0.01 nats in a token, which over a long completion would reach the clip before anything is learnt.
    - Dropout is off, so that the policy that is updated is the one that sampled. TRL keeps the model's own.
    - Sampling and scoring both divide logits by --temperature; there is no top-k or top-p.
    - A sample for which every reward function returns None has advantage 0 and is left out of the others' baseline.
    - beta is 0.05, as in TRL. With --beta 0 no reference model is loaded.
    - --dynamic-sampling (DAPO) looks at rewards without the penalty.

Metrics
    reward         mean over the batch, without the penalty; rises. reward_std: mean within groups
    frac_zero_std  share of groups with equal rewards, which teach nothing where beta is 0; below 0.9
    reward/task    the task's own score, where --reward is given: falling while reward rises it is over-optimised
    eval/greedy, eval/pass@1, eval/pass@8   held-out accuracy: likeliest answer, a sample, the best of eight. pass@1
                   that rises towards a flat greedy is sharpening; greedy that rises may still be
    grad_norm      before clipping; steady
    kl             nats per completion against the reference (beta > 0 only); grows slowly
    approx_kl      k3 of new against old per token in the last update epoch; near 0 with one epoch
    clip_fraction  share of completions whose gradient is cut; 0 in the first epoch, below 0.3
    sampler_gap    mean |log pi_theta - log pi_old|, the sampler's, in epoch one; 1e-6 in float32, more means a bug
    entropy        nats per token; falls, should not hit 0. length: tokens. truncated: share without EOS; below 0.9
    The loss is not logged: at rho = 1 its value is that of the mean advantage whatever its gradient.

Run
    python algos/rloo.py                                                            the embedded model learns countdown
    python algos/rloo.py --task sort --max-steps 40                                 the small task of the tests
    python algos/rloo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --num-generations 4
                                                                                    a real model, on a GPU
    python algos/rloo.py --model ORG/NAME --task prompts.jsonl --num-prompts 128 --num-generations 4 --beta 0.03 \
        --learning-rate 1e-6 --warmup-steps 18 --max-steps 600 --reward rewards.py:accuracy
                                                                                    the paper's hyper-parameters
                                                                                    (appendix C, TL;DR: 600 batches of
                                                                                    512, read as completions)

Expect
    The default run: held-out countdown goes from greedy 0.01, pass@1 0.07, pass@8 0.42 to greedy 0.53, pass@1 0.47,
    pass@8 0.70 (seed 1, 128 prompts), in 6 minutes on one thread of a busy CPU.
    --task sort --max-steps 16: greedy 0.23 to 0.98, pass@1 0.41 to 0.96 (seed 1), in about 15 seconds on a CPU.
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
                 micro_batch_size=256, max_completion_length=20, beta=0.05, precision="float32"),
    "full": dict(learning_rate=1e-6, adam_beta2=0.999, num_prompts=32, num_generations=4, sample_batch_size=64,
                 micro_batch_size=4, max_completion_length=512, beta=0.05, precision="bfloat16"),
    "lora": dict(learning_rate=1e-5, adam_beta2=0.999, num_prompts=32, num_generations=4, sample_batch_size=64,
                 micro_batch_size=4, max_completion_length=512, beta=0.05, precision="bfloat16"),
}  # fmt: skip
RANGES = {  # what numbers must be
    "at least 1": "max_steps num_prompts sample_batch_size max_completion_length micro_batch_size num_iterations "
    "max_sampling_rounds eval_prompts eval_samples",
    "at least 0": "beta warmup_steps weight_decay lora_rank eval_every",
    "above 0": "temperature epsilon epsilon_high learning_rate max_grad_norm",
    "at least 0 and below 1": "adam_beta2",
}


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
    """weight of the KL penalty in the reward; 0 loads no reference model"""
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


def penalised(batch: Batch, beta: float) -> Tensor:
    """Rewards minus beta times log pi_old - log pi_ref of the whole completion (equation 3). (B,)"""
    if batch.ref_logps is None:
        return batch.rewards
    return batch.rewards - beta * ((batch.samples.logps - batch.ref_logps) * batch.samples.completion_mask).sum(1)


def advantages(rewards: Tensor) -> Tensor:
    """Each reward minus the mean of the other rewards of its group (section 2.3). (P, G) -> (P, G).

    NaN rewards are left out of the others' means and get 0; so does a reward that is alone.
    """
    others = (~rewards.isnan()).sum(1, keepdim=True) - 1
    return (rewards - (rewards.nansum(1, keepdim=True) - rewards) / others).nan_to_num(0.0)


def policy_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Clipped surrogate per completion, to be minimised, and where the clip cuts the gradient. logps, old_logps of
    whole completions and advantages (B, 1) -> (B, 1), (B, 1) bool."""
    ratio = (logps - old_logps).exp()
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.min(unclipped, clipped), clipped < unclipped


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Estimate of KL(pi_theta || pi_ref) at tokens of pi_theta: non-negative, unbiased in value. A metric here."""
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
    samples, rewards = batch.samples, penalised(batch, args.beta)
    advantage = advantages(rewards.view(-1, args.num_generations)).view(-1, 1)
    mask = samples.completion_mask
    tokens = mask.sum().clamp(min=1)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    metrics, scored = {}, torch.zeros_like(samples.logps)
    for epoch in range(args.num_iterations):
        sums = dict.fromkeys(("clip_fraction", "approx_kl", "entropy", "gap"), torch.zeros((), device=mask.device))
        optimizer.zero_grad(set_to_none=True)
        for rows, inputs in micro_batches(batch, args.num_generations, args.micro_batch_size):
            with autocast(model.device, args.precision):
                logps, entropy = completion_logps(model, *inputs, args.temperature)
            width = logps.shape[1]
            old_logps, valid = samples.logps[rows, :width], mask[rows, :width]
            if epoch == 0:  # pi_old of the ratio
                scored[rows, :width] = logps.detach()
            whole, old_whole = ((x * valid).sum(1, keepdim=True) for x in (logps, scored[rows, :width]))
            loss, clipped = policy_loss(whole, old_whole, advantage[rows], args.epsilon, high)
            (loss.sum() / len(mask)).backward()
            with torch.no_grad():
                sizes = {"approx_kl": k3(old_logps, logps), "entropy": entropy, "gap": (logps - old_logps).abs()}
                for name, size in sizes.items():
                    sums[name] = sums[name] + (size * valid).sum() / tokens
                sums["clip_fraction"] = sums["clip_fraction"] + clipped.sum() / len(mask)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        if epoch == 0:
            metrics["sampler_gap"] = sums["gap"].item()
    del sums["gap"]
    if batch.ref_logps is not None:
        metrics["kl"] = ((samples.logps - batch.ref_logps) * mask).sum(1).mean().item()
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
    run = Run(args, "rloo", task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"),
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
    return run.finish(lambda folder: save_model(model, tokenizer, folder), curves, f"RLOO on {task.name}")


if __name__ == "__main__":
    main(Args, train)
