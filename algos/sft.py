r"""Supervised fine-tuning (SFT) on prompt/completion pairs.

Behaviour cloning of text, as in Ouyang et al. 2022, "Training language models to follow instructions with human
feedback" (arXiv 2203.02155, section 3.5 step 1).

The model imitates given completions token by token. It sees the prompt but is never trained to predict it. Minimises

    L(theta) = - 1/N  sum_i sum_t  log pi_theta(y_it | x_i, y_i,<t)

    x_i, y_i   a prompt and its completion; t runs over the tokens of y_i up to and including the first EOS
    N          number of completion tokens in the optimizer step

Run
    python algos/sft.py --threads 1                             makes a model like utils/tiny_model from nothing
    python algos/sft.py --model ORG/NAME --task pairs.jsonl     a real model, columns prompt and completion, or messages
    python algos/sft.py --model ORG/NAME --task ORG/DATASET --lora-rank 32 --gradient-checkpointing
    The paper's own run: algos/README.md.

Expect
    The default run makes a model like the tiny one, in 2.1 minutes on 2 CPU cores: pass@1 0.10 on countdown, 0.40 on
    sort. Held out, greedy / pass@1 / pass@8 of the one that ships: countdown 0.01 / 0.09 / 0.45, sort 0.23 / 0.40 /
    0.88. That is meant to be low: three
    in four demonstrations of both tasks are wrong (utils/data.py), so that RL has something to learn beyond sharpening.

Metrics
    loss            nats per completion token of the step's batch; falls, then flattens
    truncated       share of completions that --max-length cuts, and that lose their EOS; 0 is best
    eval/*          as in grpo.py, for tasks that score answers; with several tasks eval/<task>/*
    eval/loss       of other tasks: nats per completion token of held-out rows; rises where rows are learnt by heart

Differences
    - N counts the tokens of the whole optimizer step, however it is split. Trainers that average the means of
      micro-batches weight tokens by the split.
    - Masking the prompt is today's convention; the paper does not mention it. TRL's SFTTrainer can train on prompts.
    - Dropout is off, as for most models of today; the paper's is 0.2.
    - Of a conversation (column messages) the last assistant's message is trained on, not the earlier ones. Chat
      completions are cut after their first EOS, so that a template's trailing newline is not trained.
    - Rows whose reasoning the chat template would drop (`</think>` in the completion) are dropped and counted. TRL
      trains on what is left of them.
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.core import Run, UserError, main, prepare
from utils.data import RowFault, Task, check, encode_answers, epochs, keep_rows, load_rows, load_task
from utils.dist import (
    Means,
    Samples,
    Trained,
    as_samples,
    averaged,
    clip_gradients,
    micro_batches,
    set_rate,
    share,
    start,
    total,
)
from utils.lm import PolicyArgs, autocast, completion_logps, load_model, resolve, save_model
from utils.rewards import evaluate

NAME, TITLE = "sft", "SFT"
LARGE = dict(learning_rate=1e-5, batch_size=32, micro_batch_size=32, micro_batch_tokens=8192, max_length=2048,
             sample_batch_size=64, eval_max_new_tokens=512, precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=2e-3, batch_size=128, micro_batch_size=128, micro_batch_tokens=0, max_length=64,
                 sample_batch_size=512, eval_max_new_tokens=32, precision="float32"),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=1e-4),
}  # fmt: skip
CHARACTERS = "0123456789+-*/=,:CS"  # of the prompts and answers of countdown and sort


@dataclass
class Args(PolicyArgs):  # and --model --precision --lora-rank --seed --device ...: utils/lm.py, utils/core.py
    model: str = "new"
    """folder or hub name of a causal language model; new: a tiny character model with random weights"""
    task: tuple[str, ...] = ("countdown", "countdown", "sort")
    """countdown, sort, gsm8k, reasoning_gym:NAME, .jsonl or .parquet files, hub datasets; several take turns row by
    row, and one named twice comes twice as often"""
    prompt_column: str = "prompt"
    """column of a dataset with the prompt: text or chat messages"""
    max_steps: int = 800
    """optimizer steps"""
    batch_size: int | None = None
    """pairs in one optimizer step, of all processes"""
    micro_batch_size: int | None = None
    """pairs in one forward and backward pass; changes memory, not the result"""
    max_length: int | None = None
    """prompt and completion tokens at most; completions are cut there"""
    max_prompt_length: int | None = None
    """longer prompts are dropped; None: those that leave a completion no room in --max-length"""
    learning_rate: float | None = None
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """decay after the warm-up"""
    warmup_steps: int = 20
    """steps of linear warm-up"""
    weight_decay: float = 0.0
    """decoupled weight decay"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this norm"""
    eval_every: int = 200
    """steps between evaluations; 0: at the end only"""
    eval_prompts: int = 128
    """held-out prompts, or rows, per evaluation"""
    eval_samples: int = 8
    """sampled answers per held-out prompt"""
    eval_max_new_tokens: int | None = None
    """length limit of answers in evaluation"""
    sample_batch_size: int | None = None
    """answers sampled at once in evaluation, rounded to whole prompts; limits the cache's memory"""


def new_tiny_model(seed: int, folder: str) -> None:
    """Saves a Llama of 0.8 million random parameters and its character tokenizer, both of ordinary classes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, logging

    logging.disable_progress_bar()
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def from_messages(row: dict) -> dict:
    """The row with prompt and completion made of the column messages. Raises RowFault where that cannot be."""
    check(row, "messages")
    messages = row["messages"]
    roles = [message["role"] for message in messages] if isinstance(messages, list) else []
    last = max((i for i, role in enumerate(roles) if role == "assistant"), default=0)
    if last == 0:
        raise RowFault(row, "has no assistant's message behind another one in its column messages")
    return row | {"prompt": messages[:last], "completion": messages[last : last + 1]}


def load_demonstrations(spec: str, prompt_column: str) -> Task:
    """A built-in task, or a dataset's rows with prompt and completion, in columns of their own or in messages."""
    if spec.partition(":")[0] in ("countdown", "sort", "gsm8k", "reasoning_gym"):
        return load_task(spec)

    def shaped(row: dict) -> dict:
        if prompt_column == "prompt" and "messages" in row and not {"prompt", "completion"} <= row.keys():
            return from_messages(row)
        check(row, "prompt")
        check(row, "completion")
        return row

    train, heldout = load_rows(spec, shaped, prompt_column)
    return Task(Path(spec).stem, epochs(train), list(heldout), None, train)


def load_tasks(specs: Sequence[str], prompt_column: str) -> dict[str, Task]:
    """The tasks by their specs. Those of different files have different names, and what one of them holds out none
    trains on."""
    tasks: dict[str, Task] = {}
    for spec in dict.fromkeys(specs):
        task, names = load_demonstrations(spec, prompt_column), [task.name for task in tasks.values()]
        tasks[spec] = task._replace(name=f"{task.name}_{len(names) + 1}") if task.name in names else task

    def prompt(row: dict) -> str:
        return json.dumps(row["prompt"], sort_keys=True)

    held = {prompt(row) for task in tasks.values() for row in task.heldout}
    for spec, task in tasks.items():
        if len(tasks) > 1 and task.rows is not None:
            rows = task.rows.select([i for i, row in enumerate(task.rows) if prompt(row) not in held])
            tasks[spec] = task._replace(rows=rows, train=epochs(rows))
    return tasks


def sft_loss(logps: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
    """Negative log-likelihood of the completion tokens of one micro-batch, divided by the step's number of them.
    logps, mask (B, T) -> scalar, nats."""
    return -(logps * mask).sum() / tokens


def update(model, optimizer, samples: Samples, args: Args) -> dict[str, float]:
    """One optimizer step on pairs of prompt and completion. Returns metrics."""
    tokens, means = total(samples.completion_mask.sum()), Means()  # N: of all micro-batches and processes
    optimizer.zero_grad(set_to_none=True)
    for _, inputs in micro_batches(samples, args):
        with autocast(model, args.precision):
            logps, _ = completion_logps(model, *inputs)
        sft_loss(logps, inputs[-1], tokens).backward()
        means.add(inputs[-1], loss=-logps)
    grad_norm = clip_gradients(model, args.max_grad_norm)
    optimizer.step()
    truncated = 1 - samples.ended.float().mean().item()
    return means.read() | {"grad_norm": grad_norm.item(), "tokens": tokens.item(), "truncated": truncated}


@torch.no_grad()
def heldout_loss(model, samples: Samples, args: Args) -> float:
    """Nats per completion token."""
    means = Means()
    for _, inputs in micro_batches(samples, args):
        with autocast(model, args.precision):
            logps, _ = completion_logps(model, *inputs)
        means.add(inputs[-1], loss=-logps)
    return means.read()["loss"]


def train(args: Args) -> list[dict]:
    device = start(prepare(args))
    tasks = load_tasks(args.task, args.prompt_column)
    with tempfile.TemporaryDirectory() as folder:
        if args.model == "new":
            if args.fsdp:
                raise UserError("--fsdp shards a model that is loaded: give --model a folder or a hub name")
            new_tiny_model(args.seed, folder)
        model, tokenizer = load_model(args, device, folder if args.model == "new" else args.model)
    settings = resolve(model, args, PRESETS)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  weight_decay=args.weight_decay, fused=True)  # fmt: skip
    eos = model.generation_config.eos_token_id
    longest = min(n for n in (args.max_prompt_length, args.max_length - 1) if n is not None)

    def encode(row: dict) -> tuple[list[int], ...]:
        return encode_answers(row, [row["completion"]], tokenizer, eos)

    def make_samples(rows: list[dict]) -> Samples:
        return as_samples([encode(row) for row in rows], args.max_length, device)

    for spec, task in tasks.items():
        tasks[spec] = keep_rows(task, encode, "raise --max-length", longest, tokenizer, ["completion"])
        if task.rows is not None:
            settings += f"\n{task.name}: {len(tasks[spec].rows)} rows, {len(tasks[spec].heldout)} held-out ones"

    def row(i: int) -> dict:
        turn, place = divmod(i, len(args.task))
        spec = args.task[place]  # one that is named twice gives two rows a turn
        return tasks[spec].train(turn * args.task.count(spec) + args.task[:place].count(spec), args.seed)

    name = "+".join(task.name for task in tasks.values())
    run = Run(args, NAME, name, args.max_steps, ("loss", "eval/loss", "eval/pass@1", "eval/sort/pass@1"))
    run.print(settings)
    first = make_samples([row(0)])
    for part, ids in ("prompt", first.prompt_ids[0]), ("completion", first.completion_ids[0]):
        run.print(f"{part:11} {tokenizer.decode(ids)!r}")
    heldout_samples = {}
    for task in tasks.values():
        if task.score is None:
            rows = task.heldout[: args.eval_prompts]
            heldout_samples[task.name] = make_samples(share(rows) or rows[:1])  # type: ignore[arg-type]

    def evaluation() -> dict[str, float]:
        columns = {}
        for task in tasks.values():
            if task.score is None:
                found = {"eval/loss": heldout_loss(model, heldout_samples[task.name], args)}
            else:
                found = evaluate(model, tokenizer, task, None, args, run.step, run.keep)
            prefix = f"eval/{task.name}/" if len(tasks) > 1 else "eval/"
            columns |= {prefix + name.removeprefix("eval/"): value for name, value in found.items()}
        return columns

    parts = {"trained": Trained(model, optimizer)}
    run.restore(**parts)
    model.train()
    while run.step < args.max_steps:
        step, begun = run.step + 1, time.perf_counter()
        rate = set_rate(optimizer, step, args)

        # update
        numbers = share(range((step - 1) * args.batch_size, step * args.batch_size))
        samples = make_samples([row(i) for i in numbers])
        columns = update(model, optimizer, samples, args)
        columns |= {"learning_rate": rate, "time/step": time.perf_counter() - begun}

        # evaluate
        if run.due(step, args.eval_every):
            columns |= evaluation()
        run.log(step, **averaged(columns))
        run.end_step(step, parts)

    curves = {"loss": ("loss", "eval/*loss"), "held-out accuracy": ("eval/*greedy*", "eval/*pass@*")}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {name}")


if __name__ == "__main__":
    main(Args, train, NAME)
