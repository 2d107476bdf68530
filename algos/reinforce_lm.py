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
    python algos/reinforce_lm.py                                the 0.8M-parameter model of utils/tiny_model, countdown
    python algos/reinforce_lm.py --task sort --max-steps 30     a smaller task
    python algos/reinforce_lm.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k

Expect
    The default run takes 1.5 minutes on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.09, pass@8 0.45
    to greedy 0.56, pass@1 0.52, pass@8 0.66, as far as rloo.py and grpo.py get with as many answers.
    --no-baseline learns from right answers alone where rewards are 0 or 1, as raft.py does. It is ahead early: see
    reinforce_lm-baseline in benchmarks/README.md.

Metrics
    reward         mean over the batch; rises. reward_std: its deviation
    eval/greedy, eval/pass@1, eval/pass@8   held-out accuracy: the likeliest answer, a sample, the best of eight. If
                   pass@1 rises and greedy stays, the policy only sharpens. A rise of greedy does not rule that out
    sampler_gap    mean |log pi_theta - log pi_sampler|; 1e-6 in float32. Above its limit the run stops
    entropy        nats per token; falls, should not reach 0. truncated: share without EOS; below 0.9

Differences
    - AdamW for plain gradient ascent, and gradients clipped by norm.
    - The paper's example of a baseline is a running mean of rewards. This one needs no state.
    - No KL penalty. rloo.py has one.
    - A sample whose reward functions all return None has advantage 0, and does not count in the baseline.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.core import Run, UserError, main, prepare
from utils.data import encode_prompt, load_task, usable
from utils.dist import Means, Samples, Trained, averaged, clip_gradients, micro_batches, moments, share, start, total
from utils.lm import PolicyArgs, alarm, autocast, completion_logps, load_model, resolve, sample_all, save_model
from utils.rewards import decode, evaluate, make_scorer, sample_rows, shown

NAME, TITLE = "reinforce_lm", "REINFORCE"
LARGE = dict(learning_rate=1e-6, sample_batch_size=32, micro_batch_size=64, micro_batch_tokens=4096,
             max_completion_length=512, precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, sample_batch_size=512, micro_batch_size=256, micro_batch_tokens=0,
                 max_completion_length=20, precision="float32"),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=1e-5),
}  # fmt: skip


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
    max_steps: int = 100
    """steps: each samples, then updates"""
    num_prompts: int = 512
    """prompts per step, of all processes, each answered once: B"""
    sample_batch_size: int | None = None
    """completions sampled at once; limits the cache's memory"""
    log_samples: int = 0
    """prompts per step whose completions RUN/samples.jsonl keeps, besides those of evaluations"""
    max_completion_length: int | None = None
    """most new tokens per completion"""
    max_prompt_length: int | None = None
    """longer prompts are dropped; None: those that leave --max-completion-length no room in the model's context"""
    temperature: float = 1.0
    """divides the logits, in sampling and in training"""
    baseline: bool = True
    """subtract the mean of the other rewards of the batch"""
    micro_batch_size: int | None = None
    """completions in one forward and backward pass; changes memory, not the result"""
    learning_rate: float | None = None
    """learning rate of AdamW"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this norm"""
    eval_every: int = 20
    """steps between evaluations; 0: at the start and the end only"""
    eval_prompts: int = 128
    """held-out prompts per evaluation"""
    eval_samples: int = 8
    """sampled answers per held-out prompt"""


class Batch(NamedTuple):
    """What this process learns from in one step: completions of as many prompts."""

    samples: Samples
    rewards: Tensor  # (B,) float32, NaN: skipped


def advantages(rewards: Tensor, baseline: bool) -> Tensor:
    """Each reward minus the mean of the others, those of all processes. (B,) -> (B,). NaN rewards are left out of the
    mean and get 0. So does a reward without others, if there is a baseline."""
    known = ~rewards.isnan()
    others, amount = total(known.sum()) - 1, total(rewards.nansum())
    return (rewards - (amount - rewards) / others if baseline else rewards).nan_to_num(0.0)


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """One optimizer step. Returns metrics."""
    samples, advantage = batch.samples, advantages(batch.rewards, args.baseline)[:, None]
    mask, means = samples.completion_mask, Means()
    count = total(torch.tensor(len(mask)))  # B
    optimizer.zero_grad(set_to_none=True)
    for rows, inputs in micro_batches(samples, args):
        with autocast(model, args.precision):
            logps, entropy = completion_logps(model, *inputs, args.temperature)
        width = logps.shape[1]
        sampled, valid = samples.logps[rows, :width], mask[rows, :width]
        loss = -(valid * advantage[rows] * logps).sum() / count  # a sum over tokens, a mean over the whole batch
        loss.backward()
        means.add(valid, entropy=entropy, sampler_gap=(logps.detach() - sampled).abs())
    grad_norm = clip_gradients(model, args.max_grad_norm)
    optimizer.step()
    return means.read() | {"grad_norm": grad_norm.item()}


def collect(model, tokenizer, task, score, step: int, args: Args) -> tuple[Samples, Tensor, dict[str, float]]:
    """Samples and scores one completion for each of this process's prompts of the step. Returns rewards and columns."""
    rows = [task.train(i, args.seed) for i in share(range((step - 1) * args.num_prompts, step * args.num_prompts))]
    prompts = [encode_prompt(row, tokenizer) for row in rows]
    samples = sample_all(model, prompts, 1, args, args.temperature, "train", step)
    rewards, columns = score(rows, *decode(samples, tokenizer), step)
    return samples, rewards, columns


def train(args: Args) -> list[dict]:
    device = start(prepare(args))
    task = load_task(args.task, args.prompt_column)
    model, tokenizer = load_model(args, device)
    settings = resolve(model, args, PRESETS)
    if args.baseline and args.num_prompts < 2:
        raise UserError("--num-prompts must be at least 2: the baseline of an answer is the mean of the others")
    task = usable(task, model, tokenizer, args)
    score = make_scorer(task, args, tokenizer, device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  weight_decay=0.0, fused=True)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"))
    run.print(settings)
    parts = {"trained": Trained(model, optimizer)}
    if not run.restore(**parts):
        run.log(0, **evaluate(model, tokenizer, task, score, args, 0, run.keep))
    model.train()
    while run.step < args.max_steps:
        step, begun = run.step + 1, time.perf_counter()

        # collect
        samples, rewards, columns = collect(model, tokenizer, task, score, step, args)
        due = run.due(step, args.eval_every)
        if step == 1:
            run.print(shown(samples, tokenizer, rewards[:1].tolist()))

        # update
        columns |= update(model, optimizer, Batch(samples, rewards.to(device)), args)
        alarm(columns.get("sampler_gap"), run, args)

        # evaluate
        each = {"reward": rewards, "advantage": advantages(rewards, args.baseline), **score.each}
        run.keep(sample_rows(args.log_samples, samples, tokenizer, each))
        lengths = samples.completion_mask.sum(1).float()
        columns |= {
            "reward": rewards.nanmean().item(),
            "reward_std": moments(rewards)[1].item(),
            "length": lengths.mean().item(),
            "truncated": 1 - samples.ended.float().mean().item(),
            "time/step": time.perf_counter() - begun,
        }
        if due:
            columns |= evaluate(model, tokenizer, task, score, args, step, run.keep)
        run.log(step, **averaged(columns))
        run.end_step(step, parts)

    curves: dict = {"reward": ("reward",), "held-out": ("eval/*",), "entropy per token": ("entropy",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
