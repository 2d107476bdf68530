r"""REINFORCE Leave-One-Out (RLOO).

Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs"
(arXiv 2402.14740, sections 2.2 and 2.3, equations 3 and 6), after Kool, van Hoof and Welling 2019, "Buy 4 REINFORCE
Samples, Get a Baseline for Free!".

Parent: grpo.py. One ratio per completion, a baseline without the answer itself, and the KL penalty in the reward.

The policy answers each prompt several times. A whole answer is one action, reinforced by how much better its reward is
than the mean reward of the other answers. That gives an unbiased policy gradient. Maximises

    J(theta) = E  1/G sum_i min[ rho_i A_i, clip(rho_i, 1 - eps, 1 + eps_high) A_i ]

    x, y_i   a prompt, and the i-th of G completions that pi_old samples for it, with reward r(x, y_i)
    pi_ref   the policy before the first step; t runs over the tokens of y_i up to and including the first EOS
    R_i      = r(x, y_i) - beta sum_t log(pi_old(y_it | .) / pi_ref(y_it | .))    reward with KL penalty: a number
    A_i      = R_i - 1/(G - 1) sum_j!=i R_j                                       advantage
    rho_i    = pi_theta(y_i | x) / pi_old(y_i | x)                                ratio of whole completions
    G, eps, eps_high, beta   --num-generations, --epsilon, --epsilon-high, --beta

At rho = 1 the expected gradient is exactly that of E[r(x, y)] - beta KL(pi_theta || pi_ref) over whole completions: the
baseline does not depend on y_i, and nothing is divided by lengths or deviations.

Run
    python algos/rloo.py                                                            the embedded model learns countdown
    python algos/rloo.py --task sort --max-steps 40                                 a smaller task
    python algos/rloo.py --model ORG/NAME --task prompts.jsonl --num-prompts 128 --num-generations 4 --beta 0.03 \
        --learning-rate 1e-6 --warmup-steps 18 --max-steps 600 --reward rewards.py:accuracy
                                                                                    the paper's hyper-parameters
                                                                                    (appendix C, TL;DR: 600 batches of
                                                                                    512, taken as completions)
    python algos/rloo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --num-generations 4
                                                                                    a real model, on a GPU

Expect
    The default run takes a minute and a quarter on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.08,
    pass@8 0.43 to greedy 0.59, pass@1 0.51, pass@8 0.71 (seed 1, 128 prompts). grpo.py gets to 0.58, 0.53, 0.69.
    --task sort --max-steps 16: greedy 0.23 to 0.98, pass@1 0.40 to 0.96 (seed 1), in about 15 seconds on a CPU.

Metrics
    reward         mean over the batch, without the penalty; rises. reward_std: mean within groups
    frac_zero_std  share of groups with equal rewards, which teach nothing where beta is 0; below 0.9
    reward/task    the task's own score, where --reward is given. A fall while reward rises is over-optimisation
    eval/greedy, eval/pass@1, eval/pass@8   held-out accuracy: the likeliest answer, a sample, the best of eight. If
                   pass@1 rises and greedy stays, the policy only sharpens. A rise of greedy does not rule that out
    eval/distinct  different right texts among a prompt's --eval-samples; falls as the policy sharpens
    grad_norm      before clipping; steady
    kl             nats per completion against the reference (beta > 0 only); grows slowly
    approx_kl      mean over tokens of q - 1 - log q, q = pi_theta / pi_old, in the last epoch; near 0 with one epoch
    clip_fraction  share of completions whose gradient is cut; 0 in the first epoch, below 0.3
    sampler_gap    mean |log pi_theta - log pi_old| in the first epoch, old as sampled; 1e-6 in float32
    engine/weight, engine/above_2, engine/ess   with --sampler, over tokens: mean of pi_theta / pi_engine, its share
                   above 2, effective sample size over the number of tokens; about 1, 0 and 1
    entropy        nats per token; falls, should not reach 0. length: tokens. truncated: share without EOS; below 0.9
    The loss is not logged: at rho = 1 its value is 0 whatever its gradient.

Differences
    - The paper has neither ratio nor clip. They matter only with --num-iterations above 1. TRL's are the same; verl and
      others clip token by token.
    - The paper takes two gradient steps on each batch of samples, one on each half. Here it is one on all of it.
    - beta is 0.05, as in TRL. With --beta 0 no reference model is loaded.
    - TRL can also normalise advantages, which would bias the gradient.
    - Dropout is off, so that the updated policy is the one that sampled. TRL keeps the model's own.
    - Sampling and scoring both divide logits by --temperature. There is no top-k or top-p.
    - A completion without EOS keeps its reward and its place in the baseline.
    - A sample whose reward functions all return None has advantage 0, and does not count in the others' baseline.
"""

import sys
import time
from collections.abc import Callable
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

NAME, TITLE = "rloo", "RLOO"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=512,
                 micro_batch_size=256, micro_batch_tokens=0, max_completion_length=20, beta=0.05, precision="float32"),
    "full": dict(learning_rate=1e-6, adam_beta2=0.999, num_prompts=128, num_generations=4, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, beta=0.05,
                 precision="bfloat16"),
    "lora": dict(learning_rate=1e-5, adam_beta2=0.999, num_prompts=128, num_generations=4, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, beta=0.05,
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
    epsilon: PositiveFloat = 0.2
    """lower clip of the ratio: 1 - epsilon"""
    epsilon_high: PositiveFloat | None = None
    """upper clip of the ratio: 1 + epsilon_high; None: epsilon"""
    beta: NonNegativeFloat | None = None
    """weight of the KL penalty in the reward; 0 loads no reference model"""
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


def penalised(batch: Batch, beta: float) -> Tensor:
    """Rewards minus beta times log pi_old - log pi_ref of the whole completion (equation 3). (B,)"""
    if batch.ref_logps is None:
        return batch.rewards
    return batch.rewards - beta * ((batch.samples.logps - batch.ref_logps) * batch.samples.completion_mask).sum(1)


def advantages(rewards: Tensor) -> Tensor:
    """Each reward minus the mean of the other rewards of its group (section 2.3). (P, G) -> (P, G).

    NaN rewards are left out of the others' means and get 0. A reward without others gets 0, too.
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


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`num_iterations` optimizer steps on one batch of completions. Returns metrics."""
    samples, groups = batch.samples, penalised(batch, args.beta).view(-1, args.num_generations)
    advantage = advantages(groups).view(-1, 1)
    mask = samples.completion_mask
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    tokens = mask.sum().clamp(min=1)
    first, scorer_logps = Means(tokens), torch.zeros_like(samples.logps)
    for epoch in range(args.num_iterations):
        means, clips = Means(tokens), Means(len(mask))
        optimizer.zero_grad(set_to_none=True)
        parts = micro_batches(batch.samples, args.micro_batch_size, args.micro_batch_tokens)
        for (rows, inputs), counts in deal(parts, model):  # to this process, of perhaps several
            with autocast(model.device, args.precision):
                logps, entropy = completion_logps(model, *inputs, args.temperature)
            width = logps.shape[1]
            old_logps, valid = samples.logps[rows, :width], counts * mask[rows, :width]
            if epoch == 0:
                scorer_logps[rows, :width] = logps.detach()
            # pi_old is the scorer's, as in TRL. In bfloat16 the sampler's differs by about 0.01 nats a token: a long
            # completion would reach the clip before anything is learnt
            whole, old_whole = ((x * valid).sum(1, keepdim=True) for x in (logps, scorer_logps[rows, :width]))
            loss, clipped = policy_loss(whole, old_whole, advantage[rows], args.epsilon, high)
            (counts * loss.sum() / len(mask)).backward()
            logps = logps.detach()
            clips.add(counts, clip_fraction=clipped)
            means.add(valid, approx_kl=k3(old_logps, logps), entropy=entropy)
            if epoch == 0:
                first.add(valid, sampler_gap=(logps - old_logps).abs())
        grad_norm = clip_gradients(model.parameters(), args.max_grad_norm)
        optimizer.step()
    metrics = first.read() | clips.read() | means.read() | {"grad_norm": grad_norm.item()}
    if batch.ref_logps is not None:
        metrics["kl"] = ((samples.logps - batch.ref_logps) * mask).sum(1).mean().item()
    return metrics


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
    """Raises UserError for groups that cannot be compared or split."""
    if args.num_generations < 2:
        raise UserError("--num-generations must be at least 2: a group of one has no other reward to compare with")
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
        return {"model": trained_state(model), "optimizer": optimizer.state_dict()}

    if not run.restore(model=model, optimizer=optimizer):
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
