r"""Supervised fine-tuning (SFT) on prompt/completion pairs.

Behaviour cloning of text, as in Ouyang et al. 2022, "Training language models to follow instructions with human
feedback" (arXiv 2203.02155, section 3.5 step 1).

The model imitates given completions token by token. It sees the prompt but is never trained to predict it. Minimises

    L(theta) = - 1/N  sum_i sum_t  log pi_theta(y_it | x_i, y_i,<t)

    x_i, y_i   a prompt and its completion; t runs over the tokens of y_i up to and including the first EOS
    N          number of completion tokens in the optimizer step

Run
    python algos/sft.py --threads 1                                 makes the embedded model from nothing
    python algos/sft.py --model ORG/NAME --task pairs.jsonl         a real model, columns prompt and completion
    python algos/sft.py --model ORG/NAME --task ORG/DATASET --lora-rank 32 --gradient-checkpointing
    python algos/sft.py --model ORG/NAME --task pairs.jsonl --max-steps 6500 --batch-size 32 \
        --learning-rate 9.65e-6 --lr-schedule cosine --warmup-steps 0
                                                                    the paper's recipe (appendix C.1, 1.3B model: 16
                                                                    epochs of 13,000 pairs), without its dropout of 0.2
                                                                    and with a decay to 0 instead of 10 %

Expect
    The default run makes the embedded model, in 3 to 5 minutes on one CPU core, 2 on two. Held out, greedy / pass@1 /
    pass@8 of the model that ships: countdown 0.01 / 0.08 / 0.43, sort 0.23 / 0.40 / 0.88. That is meant to be low:
    three in four demonstrations of both tasks are wrong (utils/tasks.py), so that RL has something to learn beyond
    sharpening.

Metrics
    loss            nats per completion token of the step's batch; falls, then flattens
    grad_norm       before clipping; steady, no spikes
    eval/*          as in grpo.py, for tasks that score answers; with several tasks eval/<task>/*
    eval/loss       of other tasks: nats per completion token of held-out rows; rises where rows are learnt by heart

Differences
    - N counts the tokens of the whole optimizer step, however it is split. Trainers that average the means of
      micro-batches weight tokens by the split.
    - Masking the prompt is today's convention; the paper does not mention it. TRL's SFTTrainer can train on prompts.
    - Dropout is what the model's own configuration says: none in most models of today, 0.1 in GPT-2.
    - Of a conversation (column messages) the last assistant's message is trained on, not the earlier ones.
    - Rows whose reasoning the chat template would drop (`</think>` in the completion) are dropped and counted. TRL
      trains on what is left of them.
    - Chat completions are cut after their first EOS, so that a template's trailing newline is not trained.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.checks import check_model
from utils.cli import main, prepare
from utils.distributed import clip_gradients, deal, total_numbers
from utils.errors import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UserError
from utils.evaluation import evaluate, show
from utils.lm import completion_logps, pad_left, split_rows
from utils.lora import for_training
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
    with_policy_flags,
)
from utils.run import Run
from utils.schedule import set_learning_rate
from utils.tasks import load_tasks
from utils.text import encode_prompt, encode_row, usable_task
from utils.tiny import new_tiny_model

NAME, TITLE = "sft", "SFT"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=2e-3, batch_size=128, micro_batch_size=128, max_length=64, precision="float32",
                 eval_max_new_tokens=32, sample_batch_size=512, micro_batch_tokens=0),
    "full": dict(learning_rate=1e-5, batch_size=32, micro_batch_size=32, max_length=2048, precision="bfloat16",
                 eval_max_new_tokens=512, sample_batch_size=64, micro_batch_tokens=8192),
    "lora": dict(learning_rate=1e-4, batch_size=32, micro_batch_size=32, max_length=2048, precision="bfloat16",
                 eval_max_new_tokens=512, sample_batch_size=64, micro_batch_tokens=8192),
}  # fmt: skip


@dataclass
class Args(PolicyArgs):  # and --model --precision --lora-rank --seed --device ...: utils/models.py, utils/cli.py
    model: str = "new"
    """folder or hub name of a causal language model; new: a tiny character model with random weights"""
    task: tuple[str, ...] = ("countdown", "countdown", "sort")
    """countdown, sort, gsm8k, .jsonl or .parquet files, hub datasets; several take turns row by row, and one named
    twice comes twice as often"""
    prompt_column: str = "prompt"
    """column of a dataset with the prompt: text or chat messages"""
    max_steps: PositiveInt = 800
    """optimizer steps"""
    batch_size: PositiveInt | None = None
    """pairs in one optimizer step"""
    micro_batch_size: PositiveInt | None = None
    """pairs in one forward and backward pass; changes memory, not the result"""
    max_length: PositiveInt | None = None
    """prompt and completion tokens at most; completions are cut there"""
    max_prompt_length: PositiveInt | None = None
    """longer prompts are dropped; None: those that leave no room in --max-length, and more than 5 % stop the run"""
    learning_rate: PositiveFloat | None = None
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """decay after the warm-up"""
    warmup_steps: NonNegativeInt = 20
    """steps of linear warm-up"""
    weight_decay: NonNegativeFloat = 0.0
    """decoupled weight decay"""
    max_grad_norm: PositiveFloat = 1.0
    """gradients are clipped to this norm"""
    eval_every: NonNegativeInt = 200
    """steps between evaluations; 0: at the end only"""
    eval_prompts: PositiveInt = 128
    """held-out prompts, or rows, per evaluation"""
    eval_samples: PositiveInt = 8
    """sampled answers per held-out prompt"""
    eval_max_new_tokens: PositiveInt | None = None
    """length limit of answers in evaluation"""
    sample_batch_size: PositiveInt | None = None
    """answers sampled at once in evaluation, rounded to whole prompts; limits the cache's memory"""


def losses(model, batch: list[tuple[list[int], list[int]]], args: Args) -> Iterator[Tensor]:
    """The parts of the loss of (prompt tokens, completion tokens) pairs, a scalar for each micro-batch."""
    device = model.device
    total = sum(len(completion) for _, completion in batch)  # N: over all micro-batches
    lengths = [len(prompt) + len(completion) for prompt, completion in batch]
    parts = split_rows(lengths, args.micro_batch_size, args.micro_batch_tokens)
    for rows, counts in deal(parts, model):  # to this process, of perhaps several
        pairs = [batch[row] for row in rows]
        prompt_ids, prompt_mask = pad_left([prompt for prompt, _ in pairs], device)
        length = max(len(completion) for _, completion in pairs)
        ids = torch.tensor([c + [0] * (length - len(c)) for _, c in pairs], device=device)
        mask = torch.tensor([[True] * len(c) + [False] * (length - len(c)) for _, c in pairs], device=device)
        with autocast(device, args.precision):
            logps, _ = completion_logps(model, prompt_ids, prompt_mask, ids, mask)
        yield counts * sft_loss(logps, mask, total)


def update(model, optimizer, batch: list[tuple[list[int], list[int]]], args: Args) -> dict[str, float]:
    """One optimizer step on (prompt tokens, completion tokens) pairs. Returns metrics."""
    loss_sum = 0.0
    optimizer.zero_grad(set_to_none=True)
    for loss in losses(model, batch, args):
        loss.backward()
        loss_sum += loss.item()
    grad_norm = clip_gradients(model.parameters(), args.max_grad_norm)
    optimizer.step()
    tokens = sum(len(completion) for _, completion in batch)
    return total_numbers({"loss": loss_sum}) | {"grad_norm": grad_norm.item(), "tokens": tokens}


@torch.no_grad()
def heldout_loss(model, pairs: list[tuple[list[int], list[int]]], args: Args) -> float:
    """Nats per completion token, without dropout."""
    model.eval()
    loss = total_numbers({"loss": sum(part.item() for part in losses(model, pairs, args))})["loss"]
    model.train()
    return loss


def sft_loss(logps: Tensor, mask: Tensor, total: int) -> Tensor:
    """Negative log-likelihood of the completion tokens of one micro-batch, divided by the step's `total` of them.
    logps, mask (B, T) -> scalar, nats."""
    return -(logps * mask).sum() / total


def train(args: Args) -> list[dict]:
    device = prepare(args)
    tasks = load_tasks(args.task, args.prompt_column)
    if args.model == "new":
        if args.fsdp:
            raise UserError("--fsdp shards a model that is loaded: give --model a folder or a hub name")
        model, tokenizer = new_tiny_model(args.seed)
        model = for_training(model.to(device), args.lora_rank, args.gradient_checkpointing, "CAUSAL_LM",
                             args.lora_modules)  # fmt: skip
        tokenizer = with_policy_flags(model, tokenizer, args)
    else:
        model, tokenizer = load_policy(args, device)
    settings = resolve_for(model, args, PRESETS)
    eos = eos_ids(model, tokenizer)
    tasks = [
        usable_task(task, lambda row: encode_row(row, tokenizer, eos), args.max_length - 1, args.max_prompt_length,
                    "raise --max-length")
        for task in tasks
    ]  # fmt: skip
    names = list(dict.fromkeys(task.name for task in tasks))
    scored = {task.name: task for task in tasks if task.score is not None}
    unscored = {task.name: task for task in tasks if task.score is None}
    if scored:
        check_model(model, args.precision, noise_allowed=True)
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=args.learning_rate, weight_decay=args.weight_decay,
                                  fused=True)  # fmt: skip

    def encoded(rows: Sequence[dict]) -> list[tuple[list[int], list[int]]]:
        tokens = [encode_row(row, tokenizer, eos) for row in rows]
        return [(prompt, completion[: args.max_length - len(prompt)]) for prompt, completion in tokens]

    def pairs(step: int) -> list[tuple[list[int], list[int]]]:
        first = (step - 1) * args.batch_size
        rows = range(first, first + args.batch_size)
        return encoded([tasks[i % len(tasks)].train(i // len(tasks), args.seed) for i in rows])

    prompts = [encode_prompt(row, tokenizer) for task in scored.values() for row in task.heldout]
    settings += check_memory(model, args, prompt=max(map(len, prompts), default=None))
    shown = ("loss", "eval/loss", "eval/pass@1", "eval/sort/pass@1")
    run = Run(args, NAME, "+".join(names), args.max_steps, shown,
              schedule_depends_on_budget=args.lr_schedule != "constant")  # fmt: skip
    run.print(settings)
    ((prompt, completion),) = encoded([tasks[0].train(0, args.seed)])
    run.print(show(tokenizer, prompt, [completion]))
    heldout = {name: encoded(task.heldout[: args.eval_prompts]) for name, task in unscored.items()}
    prefixes = {name: f"eval/{name}/" if len(names) > 1 else "eval/" for name in names}

    def evaluation() -> dict[str, float]:
        columns = {f"{prefixes[name]}loss": heldout_loss(model, rows, args) for name, rows in heldout.items()}
        for task in scored.values():
            scores = evaluate(model, tokenizer, task, None, args.eval_prompts, args.eval_samples,
                              args.eval_max_new_tokens, 1.0, args.seed, rows_at_once=args.sample_batch_size,
                              precision=args.precision)  # fmt: skip
            columns |= {name.replace("eval/", prefixes[task.name], 1): value for name, value in scores.items()}
        return columns

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict()}

    run.restore(model=model, optimizer=optimizer)
    model.train()
    while run.step < args.max_steps:
        step, start = run.step + 1, time.perf_counter()
        rate = set_learning_rate(optimizer, step, args)

        # update
        with run.saving(run.step, state):
            batch = pairs(step)
        columns = update(model, optimizer, batch, args)
        columns |= {"learning_rate": rate, "time/step": time.perf_counter() - start}

        # evaluate
        if run.due(step, args.eval_every):
            columns |= evaluation()
        run.log(step, **columns)
        run.end_step(step, state)

    curves = {"loss": ("loss", "eval/*loss"), "held-out accuracy": ("eval/*greedy*", "eval/*pass@*")}
    title = f"{TITLE} on {', '.join(names)}"
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, title)


if __name__ == "__main__":
    main(Args, train)
