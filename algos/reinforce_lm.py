r"""REINFORCE with a language model.

Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning" (Machine
Learning 8, pages 229-256), on whole completions, as in section 2.2 of Ahmadian et al. 2024 (arXiv 2402.14740).

The policy answers each prompt once. Answers with more reward than the others of the batch become likelier, the rest
less likely. This is reinforce.py: a prompt is the first observation, a token is an action, and the only reward comes at
the end. Maximises

    J(theta)      = E  r(x, y)
    grad J(theta) = E  1/B sum_i (r_i - b_i) sum_t grad log pi_theta(y_it | x_i, y_i,<t)

    x_i, y_i, r_i   prompt, sampled completion and its reward, of B: --num-prompts
    t       the tokens of y_i up to and including the first EOS
    b_i     mean of the other rewards of the batch; 0 with --no-baseline

b_i does not depend on y_i, so the gradient's mean stays as it is. Its noise falls where rewards have much in common. An
answer is compared with answers to other prompts, so on an easy prompt most answers look good. rloo.py answers each
prompt several times and compares those. grpo.py also divides by their spread and clips.

Run
    python algos/reinforce_lm.py                                        the embedded model learns countdown
    python algos/reinforce_lm.py --task sort --max-steps 30             a smaller task
    python algos/reinforce_lm.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k
                                                                        a real model, on a GPU; never run

Expect
    The default run takes two minutes on 2 CPU cores: held-out countdown goes from greedy 0.01, pass@1 0.08, pass@8 0.43
    to greedy 0.55, pass@1 0.52, pass@8 0.66 after 100 steps (seed 1, 128 prompts), as far as rloo.py and grpo.py get
    with as many answers.
    --no-baseline learns from right answers alone where rewards are 0 or 1, as raft.py does. It is ahead early: with 64
    answers a step the mean reward of countdown's steps 31 to 60 is 0.48 without a baseline, 0.45 with the batch's mean,
    0.40 with rloo.py's (10 seeds; benchmarks/effects.py, reinforce_lm-baseline).

Metrics
    reward         mean over the batch; rises. reward_std: its deviation
    eval/greedy, eval/pass@1, eval/pass@8   held-out accuracy: the likeliest answer, a sample, the best of eight. If
                   pass@1 rises and greedy stays, the policy only sharpens. A rise of greedy does not rule that out
    eval/distinct  different right texts among a prompt's --eval-samples; falls as the policy sharpens
    grad_norm      before clipping; steady
    sampler_gap    mean |log pi_theta - log pi_sampler|; 1e-6 in float32
    engine/weight, engine/above_2, engine/ess   with --sampler, over tokens: mean of pi_theta / pi_engine, its share
                   above 2, effective sample size over the number of tokens; about 1, 0 and 1
    entropy        nats per token; falls, should not reach 0. length: tokens. truncated: share without EOS; below 0.9

Differences
    - AdamW for plain gradient ascent, and gradients clipped by norm.
    - The paper's example of a baseline is a running mean of rewards. This one needs no state.
    - No KL penalty. rloo.py has one.
    - A sample whose reward functions all return None has advantage 0, and does not count in the baseline.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.checkpoint import rng_state
from utils.checks import check_model
from utils.cli import main, prepare
from utils.distributed import clip_gradients, deal
from utils.errors import NonNegativeInt, PositiveFloat, PositiveInt, UserError
from utils.evaluation import advice, decode, evaluate, show_samples
from utils.lm import Means, Samples, completion_logps, micro_batches, sample_all
from utils.memory import check_memory
from utils.models import (
    PolicyArgs,
    autocast,
    eos_ids,
    load_policy,
    resolve_for,
    save_model,
    trained_parameters,
    trained_state,
    without_dropout,
)
from utils.rewards import Scored, make_scorer
from utils.run import Run
from utils.tasks import Task, load_task
from utils.text import encode_prompt, present, usable_prompts

NAME, TITLE = "reinforce_lm", "REINFORCE"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, num_prompts=512, sample_batch_size=512, micro_batch_size=256,
                 micro_batch_tokens=0, max_completion_length=20, precision="float32"),
    "full": dict(learning_rate=1e-6, num_prompts=512, sample_batch_size=32, micro_batch_size=64,
                 micro_batch_tokens=4096, max_completion_length=512, precision="bfloat16"),
    "lora": dict(learning_rate=1e-5, num_prompts=512, sample_batch_size=32, micro_batch_size=64,
                 micro_batch_tokens=4096, max_completion_length=512, precision="bfloat16"),
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
    max_steps: PositiveInt = 100
    """steps: each samples, then updates"""
    num_prompts: PositiveInt | None = None
    """prompts per step, each answered once: B"""
    sample_batch_size: PositiveInt | None = None
    """completions sampled at once, in training and evaluation; limits the cache's memory"""
    max_completion_length: PositiveInt | None = None
    """most new tokens per completion"""
    max_prompt_length: PositiveInt | None = None
    """longer prompts are dropped; None: those that leave --max-completion-length no room in the model's context, and
    more than 5 % stop the run"""
    temperature: PositiveFloat = 1.0
    """divides the logits, in sampling and in training"""
    baseline: bool = True
    """subtract the mean of the other rewards of the batch"""
    micro_batch_size: PositiveInt | None = None
    """completions in one forward and backward pass; changes memory, not the result"""
    learning_rate: PositiveFloat | None = None
    """learning rate of AdamW"""
    max_grad_norm: PositiveFloat = 1.0
    """gradients are clipped to this norm"""
    eval_every: NonNegativeInt = 20
    """steps between evaluations; 0: at the start and the end only"""
    eval_prompts: PositiveInt = 128
    """held-out prompts per evaluation"""
    eval_samples: PositiveInt = 8
    """sampled answers per held-out prompt"""


class Batch(NamedTuple):
    """What one step learns from: B completions of as many prompts."""

    samples: Samples
    rewards: Tensor  # (B,) float32, NaN: skipped


def advantages(rewards: Tensor, baseline: bool) -> Tensor:
    """Each reward minus the mean of the others. (B,) -> (B,). NaN rewards are left out of the mean and get 0. So does a
    reward without others, if there is a baseline."""
    others = (~rewards.isnan()).sum() - 1
    return (rewards - (rewards.nansum() - rewards) / others if baseline else rewards).nan_to_num(0.0)


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """One optimizer step. Returns metrics."""
    samples, advantage = batch.samples, advantages(batch.rewards, args.baseline)[:, None]
    mask = samples.completion_mask
    means = Means(mask.sum().clamp(min=1))
    optimizer.zero_grad(set_to_none=True)
    for (rows, inputs), counts in deal(micro_batches(samples, args.micro_batch_size, args.micro_batch_tokens), model):
        with autocast(model.device, args.precision):
            logps, entropy = completion_logps(model, *inputs, args.temperature)
        sampled, valid = samples.logps[rows, : logps.shape[1]], counts * mask[rows, : logps.shape[1]]
        loss = -(valid * advantage[rows] * logps).sum() / len(mask)  # a sum over tokens, a mean over the whole batch
        loss.backward()
        means.add(valid, entropy=entropy, sampler_gap=(logps.detach() - sampled).abs())
    grad_norm = clip_gradients(model.parameters(), args.max_grad_norm)
    optimizer.step()
    return means.read() | {"grad_norm": grad_norm.item()}


def collect(model, tokenizer, task: Task, score: Callable, step: int, args: Args) -> tuple[Samples, Scored]:
    """Samples and scores one completion for each of the step's B prompts."""
    first = (step - 1) * args.num_prompts
    rows = [task.train(first + i, args.seed) for i in range(args.num_prompts)]
    tokens = [encode_prompt(row, tokenizer) for row in rows]
    with autocast(model.device, args.precision):
        samples = sample_all(model, tokens, 1, args.max_completion_length, eos_ids(model, tokenizer), args.temperature,
                             args.sample_batch_size, (args.seed, "train", step))  # fmt: skip
    texts, token_lists = decode(samples, tokenizer)
    return samples, score(rows, [present(row, tokenizer) for row in rows], texts, token_lists, step)


def train(args: Args) -> list[dict]:
    device = prepare(args)
    task = load_task(args.task, args.prompt_column)
    score = make_scorer(task, args.reward, args.reward_weights, args.max_steps, device, args.trust_remote_code)
    model, tokenizer = load_policy(args, device)
    settings = resolve_for(model, args, PRESETS)
    without_dropout(model)
    if args.baseline and args.num_prompts < 2:
        raise UserError("--num-prompts must be at least 2: the baseline of an answer is the mean of the others")
    check_model(model, args.precision)
    task = usable_prompts(task, model, tokenizer, args)
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=args.learning_rate, weight_decay=0.0, fused=True)
    settings += check_memory(model, args, prompt=max(len(encode_prompt(row, tokenizer)) for row in task.heldout))
    evaluation = partial(evaluate, model, tokenizer, task, score, args.eval_prompts, args.eval_samples,
                         args.max_completion_length, args.temperature, args.seed,
                         rows_at_once=args.sample_batch_size, precision=args.precision)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"))
    run.print(settings)

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict()}

    if not run.restore(model=model, optimizer=optimizer):
        run.log(0, **evaluation())
        run.save(0, state())
    model.train()
    while run.step < args.max_steps:
        start, step, before = time.perf_counter(), run.step + 1, (run.step, state, rng_state())

        # collect
        with run.saving(*before):
            samples, scored = collect(model, tokenizer, task, score, step, args)
        due, rewards = run.due(step, args.eval_every), scored.rewards.to(device)
        if step == 1 or due:
            run.print(show_samples(tokenizer, samples, scored.rewards.tolist(), scored.extra))

        # update
        columns = update(model, optimizer, Batch(samples, rewards), args)

        # evaluate
        lengths = samples.completion_mask.sum(1).float()
        columns |= {"reward": rewards.nanmean().item(), "reward_std": rewards[~rewards.isnan()].std().item(),
                    "length": lengths.mean().item(), "truncated": 1 - samples.ended.float().mean().item(),
                    **scored.columns, **model.sampler_columns, "time/step": time.perf_counter() - start}  # fmt: skip
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
