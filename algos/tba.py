r"""Trajectory Balance with Asynchrony (TBA).

Bartoldson et al. 2025, "Trajectory Balance with Asynchrony: Decoupling Exploration and Learning for Fast, Scalable LLM
Post-Training" (arXiv 2503.18929).

Parent: rloo.py. A squared error takes the place of ratio and clip, and a buffer keeps the answers of earlier policies.

The best policy under a KL penalty is known up to a constant: pi_ref exp(R / beta) / Z. So log pi can be fitted to it by
least squares, on answers from anywhere: sampling need not wait for learning, nor learning for sampling. Minimises

    L(theta) = E  1/K sum_i ( log Z(x) + log pi_theta(y_i | x) - log pi_ref(y_i | x) - R_i / beta )^2

    x, y_i    a prompt, and the i-th of K completions that an earlier policy sampled for it: together a group
    R_i       its reward
    pi_ref    the policy before the first step
    log Z(x)  1/K sum_i [ R_i / beta - log pi_theta(y_i | x) + log pi_ref(y_i | x) ] of the same group (VarGrad). No
              gradient goes through it; one that did would sum to 0, as the errors of a group do
    K, beta   --num-generations, --beta

-beta / 2 times the gradient of L is 1/K sum_i B_i grad log pi_theta(y_i | x), where B_i is R_i - beta log(pi_theta /
pi_ref), minus its mean over the group. So this is REINFORCE with the group's mean as baseline and the KL penalty in the
reward. On samples of pi_theta it is (K - 1) / K times the update of rloo.py in every batch. On older samples there
is no ratio, and B_i has today's pi_theta, so an answer that has risen enough is pushed no more. Whatever the data, if
they hold every answer, the minimum is the policy above.

Run
    python algos/tba.py                                                             the embedded model learns countdown
    python algos/tba.py --task sort --max-steps 16                                  a smaller task
    python algos/tba.py --sync-every 10                                             most samples are 0 to 9 updates old
    python algos/tba.py --task sort --max-steps 20 --sync-every 20 --buffer-size 1280 --beta 0.2
                                                                                    all samples are of the first policy
    python algos/tba.py --model realtreetune/rho-1b-sft-GSM8K --task gsm8k --max-steps 700 --warmup-steps 50 \
        --temperature 0.7
                                                                                    the authors' hyper-parameters
                                                                                    (launch_training_gsm8k.sh)
    python algos/tba.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing

Expect
    The default run takes a minute and three quarters on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1
    0.08, pass@8 0.43 to greedy 0.52, pass@1 0.48, pass@8 0.69 (seed 1, 128 prompts). rloo.py, on fresh samples, ends at
    0.59, 0.51, 0.71.
    Twenty steps of sort on samples of the first policy alone, pass@1 from 0.40: TBA with beta 0.2 gets to 0.89. The
    same without the divergence (--beta 1e-6: REINFORCE, no ratio) falls to 0.10. grpo.py's clip on this data gets to
    0.80, rloo.py on fresh samples to 0.96 (10 seeds; benchmarks/effects.py, tba-stale).
    With beta 0.05 TBA fell to 0.05 after ten of forty steps, then rose to 0.32 (one seed). A likely reason: the wrong
    answers of old have to lose 1 / beta nats, and what takes their place is not in the data.

Metrics
    As in rloo.py, but
    reward         of the batch, and so of the policies that sampled it: it lags behind eval/*. So do reward_std,
                   frac_zero_std, length, truncated. Columns reward/... stand in the rows of steps that sample
    frac_zero_std  such groups still teach: their answers get the proportions that pi_ref gives them
    kl             nats per completion of the policies that sampled the batch, against the reference
    approx_kl, sampler_gap   how far the policy is from those that sampled the batch, nats per token: staleness. With
                   --sync-every 1 --on-policy-share 1 sampler_gap is 1e-6 in float32
    The loss is not logged: it grows with the spread of R / beta, and says little.

Differences
    - There is no asynchrony: one process samples and learns in turns. Every --sync-every steps the policy samples for
      all steps until the next time, so samples are as stale as in a system that renews its samplers so often. The
      authors' trainer gets samples of one interval before, which is staler by --sync-every.
    - A group stays as it was sampled. The authors (bbartoldson/TBA, src/buffer_utils.py) have a buffer of 100 answers
      for each prompt, drop an answer that is there already, sample 24 and draw 20 of them. Dropping would change
      on-policy gradients; the minimum is the same.
    - Here a prompt is new in each step while a task has new ones; one that comes again makes another group.
    - Older samples are drawn uniformly. The authors' code can draw them by reward, but for GSM8K it does not
      (src/tba_trainer_gsm8k.py, inv_temp 0). It tosses a coin for each prompt, as here.
    - beta is constant. The authors lower it from 0.014 to 0.004 over 500 steps. The authors' learning rate falls in the
      end; here it does with --lr-schedule alone.
    - The loss is L times beta / 2, and --max-grad-norm clips its gradient. The authors' is L, and is not clipped. Adam
      hides the factor, not the clip.
    - A sample whose reward functions all return None is left out of log Z and of the loss.
"""

import random
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
from utils.errors import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval, UserError
from utils.evaluation import advice, decode, evaluate, show_samples
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

NAME, TITLE = "tba", "TBA"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=512,
                 micro_batch_size=256, micro_batch_tokens=0, max_completion_length=20, beta=0.05, precision="float32"),
    "full": dict(learning_rate=1e-5, adam_beta2=0.999, num_prompts=7, num_generations=20, sample_batch_size=40,
                 micro_batch_size=40, micro_batch_tokens=8192, max_completion_length=512, beta=0.014,
                 precision="bfloat16"),
    "lora": dict(learning_rate=1e-4, adam_beta2=0.999, num_prompts=7, num_generations=20, sample_batch_size=40,
                 micro_batch_size=40, micro_batch_tokens=8192, max_completion_length=512, beta=0.014,
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
    """completions per prompt: K"""
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
    """completions in one forward and backward pass: a multiple of K; changes memory, not the result"""
    sync_every: PositiveInt = 2
    """steps from one renewal of the sampling policy to the next; at each it samples for all these steps"""
    on_policy_share: UnitInterval = 0.95
    """chance of each group of a batch to come from the newest samples; the others come from the whole buffer"""
    buffer_size: PositiveInt = 1024
    """groups (a prompt with its K completions) that are kept: the newest"""
    beta: PositiveFloat | None = None
    """temperature of the target pi_ref exp(R / beta): smaller goes further from the reference"""
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
    """Groups: of one step, or the whole buffer, oldest first. P prompts, K completions of each, B = P * K rows."""

    samples: Samples
    rewards: Tensor  # (B,) float32, NaN: skipped
    ref_logps: Tensor  # (B,) log pi_ref of whole completions


def balance_loss(logps: Tensor, ref_logps: Tensor, rewards: Tensor, beta: float) -> Tensor:
    """Squared error of trajectory balance, with VarGrad's estimate of log Z, times beta / 2. logps and ref_logps are of
    whole completions, in nats. Where the reward is NaN: 0, and no part in log Z. (P, K) each -> (P, K)."""
    error = logps - ref_logps - rewards / beta
    log_z = -error.detach().nanmean(1, keepdim=True)
    # beta / 2 makes the gradient as long as rloo.py's. Without it, it would be 2 / beta times as long, and every beta
    # would need another --max-grad-norm
    return beta / 2 * (log_z + error).masked_fill(rewards.isnan(), 0.0).square()


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Estimate of KL(pi_theta || pi_ref) at tokens of pi_theta: non-negative, unbiased in value. A metric here."""
    difference = ref_logps - logps
    return difference.exp() - difference - 1


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """One optimizer step on the groups of a batch. Returns metrics."""
    samples, size = batch.samples, args.num_generations
    mask = samples.completion_mask
    means = Means(mask.sum().clamp(min=1))
    optimizer.zero_grad(set_to_none=True)
    parts = micro_batches(samples, args.micro_batch_size, args.micro_batch_tokens, size)  # whole groups, for log Z
    for (rows, inputs), counts in deal(parts, model):  # to this process, of perhaps several
        with autocast(model.device, args.precision):
            logps, entropy = completion_logps(model, *inputs, args.temperature)
        width = logps.shape[1]
        old_logps, valid = samples.logps[rows, :width], counts * mask[rows, :width]
        columns = (logps * valid).sum(1), batch.ref_logps[rows], batch.rewards[rows]
        whole, ref_whole, rewards = (x.view(-1, size) for x in columns)
        loss = balance_loss(whole, ref_whole, rewards, args.beta)
        (counts * loss.sum() / len(mask)).backward()
        logps = logps.detach()
        means.add(valid, approx_kl=k3(old_logps, logps), entropy=entropy, sampler_gap=(logps - old_logps).abs())
    grad_norm = clip_gradients(model.parameters(), args.max_grad_norm)
    optimizer.step()
    kl = ((samples.logps * mask).sum(1) - batch.ref_logps).mean()
    return means.read() | {"grad_norm": grad_norm.item(), "kl": kl.item()}


def these_groups(batch: Batch, groups: list[int]) -> Batch:
    """The groups of these numbers, in their order."""
    at = torch.tensor(groups, device=batch.rewards.device)
    samples, size = batch.samples, len(batch.rewards) // len(batch.samples.prompt_ids)
    rows = (at[:, None] * size + torch.arange(size, device=at.device)).flatten()
    samples = Samples(*(x[at] for x in samples[:2]), *(x[rows] for x in samples[2:]))
    return Batch(samples, batch.rewards[rows], batch.ref_logps[rows])


def store(buffer: Batch | None, new: Batch, most: int) -> Batch:
    """The buffer with new groups behind the old ones. The oldest go where there are more than `most`."""
    if buffer is not None:
        rest = (torch.cat(pair) for pair in zip(buffer[1:], new[1:]))
        new = Batch(join([buffer.samples, new.samples]), *rest)
    count = len(new.samples.prompt_ids)
    return these_groups(new, list(range(max(0, count - most), count)))


def draw(buffer: Batch, step: int, args: Args) -> Batch:
    """The groups of one step, none of them twice: each with the chance --on-policy-share one that the newest policy has
    sampled, else any one. A function of seed and step, so no generator has to be saved."""
    generator, count = random.Random(f"{args.seed}/{step}"), len(buffer.samples.prompt_ids)
    newest = range(count - args.num_prompts * args.sync_every, count)
    number = sum(generator.random() < args.on_policy_share for _ in range(args.num_prompts))
    chosen = generator.sample(newest, number)
    others = [group for group in range(count) if group not in chosen]
    return these_groups(buffer, chosen + generator.sample(others, args.num_prompts - number))


def collect(model, tokenizer, task: Task, score: Callable, step: int, args: Args) -> tuple[Samples, Scored]:
    """Samples and scores K completions for each of the prompts of the next --sync-every steps."""
    first = (step - 1) * args.num_prompts
    rows = [task.train(first + i, args.seed) for i in range(args.num_prompts * args.sync_every)]
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
    """Raises UserError for groups that cannot be compared, split or kept."""
    if args.num_generations < 2:
        raise UserError("--num-generations must be at least 2: a group of one says nothing about log Z")
    size, group = args.micro_batch_size, args.num_generations
    if size % group and (not args.micro_batch_tokens or size < group):
        raise UserError(f"--micro-batch-size {size} must be a multiple of --num-generations {group}: groups stay whole")
    if args.buffer_size < (new := args.num_prompts * args.sync_every):
        raise UserError(f"--buffer-size {args.buffer_size} must hold what is sampled at once: give at least {new}, "
                        "that is --num-prompts times --sync-every")  # fmt: skip


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
    ref_model = load_reference(args, device)
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
    held = run.state["buffer"] if run.state else None
    buffer = held and Batch(Samples(*(x.to(device) for x in held[:-2])), *(x.to(device) for x in held[-2:]))

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict(),
                "buffer": buffer and (*buffer.samples, *buffer[1:])}  # fmt: skip

    if not run.restore(model=model, optimizer=optimizer):
        run.log(0, **evaluation())
        run.save(0, state())
    model.train()
    while run.step < args.max_steps:
        start, before = time.perf_counter(), (run.step, state, rng_state())
        step = run.step + 1
        rate = set_learning_rate(optimizer, step, args)

        # collect
        found, due = {}, run.due(step, args.eval_every)
        if (step - 1) % args.sync_every == 0:  # the policy of now samples, and all steps until the next time learn
            with run.saving(*before):
                samples, scored = collect(model, tokenizer, task, score, step, args)
            if step == 1 or run.due(step + args.sync_every - 1, args.eval_every):
                run.print(show_samples(tokenizer, samples, scored.rewards.tolist(), scored.extra))
            new = Batch(samples, scored.rewards.to(device), torch.empty(0))
            new = new._replace(ref_logps=reference_logps(model, ref_model, new, args).sum(1))
            buffer, found = store(buffer, new, args.buffer_size), scored.columns | model.sampler_columns
        sampled = time.perf_counter()
        batch = draw(buffer, step, args)

        # update
        columns = update(model, optimizer, batch, args)

        # evaluate
        groups, lengths = batch.rewards.view(-1, args.num_generations), batch.samples.completion_mask.sum(1).float()
        columns |= {
            "reward": batch.rewards.nanmean().item(),
            "reward_std": (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean().item(),
            "frac_zero_std": zero_std(groups).float().mean().item(),
            "length": lengths.mean().item(),
            "truncated": 1 - batch.samples.ended.float().mean().item(),
            "learning_rate": rate,
            **found,
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
