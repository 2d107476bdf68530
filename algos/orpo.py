r"""Odds Ratio Preference Optimization (ORPO).

Hong, Lee and Thorne 2024, "ORPO: Monolithic Preference Optimization without Reference Model" (arXiv 2403.07691,
equations 3, 4, 6 and 7).

Parent: dpo.py. ORPO compares odds, not log-ratios, of two answers and adds supervised fine-tuning on the better.

Learns from pairs of a preferred and a dispreferred answer. It fine-tunes on the preferred one and pushes the other one
down. One stage of training replaces two, and no reference model is needed. Minimises

    L(theta) = E_(x, y_w, y_l)  - l(x, y_w) - beta log sigmoid( log odds(x, y_w) - log odds(x, y_l) )

    x, y_w, y_l   a prompt, its preferred and its dispreferred completion, chosen before training
    l(x, y) = 1/|y| log pi_theta(y | x)   mean log-probability of the tokens of y up to and including the first EOS
    odds(x, y) = p / (1 - p)   with p = exp l(x, y), the geometric mean of the tokens' probabilities
    beta     --beta: weight of the second term; the paper's lambda, the authors' --alpha, TRL's beta

Run
    python algos/orpo.py                                     the 0.8M-parameter model of utils/tiny_model, countdown
    python algos/orpo.py --task sort --max-steps 40          a smaller task
    python algos/orpo.py --model ORG/NAME --task pairs.jsonl --lora-rank 32 --gradient-checkpointing
    The authors' own run: algos/README.md.

Expect
    The default run takes 40 seconds on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.09, pass@8 0.45
    to greedy 0.50, pass@1 0.37, pass@8 0.85. --task sort --max-steps 40: greedy 0.23 to 1.00. Every chosen answer is
    right here, so the first term does the work: --beta 0, supervised fine-tuning alone, gets to 0.51, 0.35, 0.83.

Metrics
    margin         mean of log odds(y_w) - log odds(y_l), in nats; rises
    chosen_logp, rejected_logp   means of l in nats per token: the chosen one rises towards 0, the rejected one falls
    The others are those of dpo.py, with l for h.

Differences
    - l is a mean over each completion, and the loss a mean over pairs. The authors' code and TRL average the first term
      over all tokens of the micro-batch, the prompt's included (the authors have an option to leave them out).
    - The learning rate of the authors' Mistral script falls with the inverse square root of the step; appendix C has a
      cosine for their other models.
    - AdamW. Dropout is off, as in TRL.
    - Completions beyond --max-length are cut at the end and lose their EOS, as in TRL. Longer prompts are dropped.
"""

import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.core import Run, main, prepare
from utils.data import encode_answers, epochs, keep, load_pairs
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
from utils.rewards import evaluate, shown

NAME, TITLE = "orpo", "ORPO"
LARGE = dict(learning_rate=5e-6, micro_batch_size=64, micro_batch_tokens=4096, max_length=1024, sample_batch_size=64,
             eval_max_new_tokens=512, precision="bfloat16", batch_size=32)  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, micro_batch_size=128, micro_batch_tokens=0, max_length=64, sample_batch_size=512,
                 eval_max_new_tokens=20, precision="float32", batch_size=64),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=5e-5),
}  # fmt: skip


@dataclass
class Args(PolicyArgs):  # and --model --precision --lora-rank --seed --device ...: utils/lm.py, utils/core.py
    task: str = "countdown"
    """countdown, sort, a .jsonl or .parquet file, or a hub dataset; columns prompt (or none), chosen, rejected"""
    prompt_column: str = "prompt"
    """column of a dataset with the prompt: text or chat messages"""
    num_pairs: int = 2048
    """pairs that countdown and sort make for training; a dataset brings its own"""
    max_steps: int = 100
    """optimizer steps"""
    batch_size: int | None = None
    """pairs in one optimizer step, of all processes"""
    micro_batch_size: int | None = None
    """completions in one forward and backward pass; changes memory, not the result"""
    max_length: int | None = None
    """prompt and completion tokens at most; completions are cut there"""
    max_prompt_length: int | None = None
    """longer prompts are dropped; None: those that leave a completion no room in --max-length"""
    beta: float = 0.1
    """weight of the odds ratio beside the likelihood of chosen completions: the paper's lambda"""
    learning_rate: float | None = None
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """decay after the warm-up"""
    warmup_steps: int = 0
    """steps of linear warm-up"""
    weight_decay: float = 0.0
    """decoupled weight decay"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this norm"""
    eval_every: int = 20
    """steps between evaluations; 0: at the start and the end only"""
    eval_prompts: int = 128
    """held-out prompts and pairs per evaluation"""
    eval_samples: int = 8
    """sampled answers per held-out prompt"""
    eval_max_new_tokens: int | None = None
    """length limit of answers in evaluation"""
    sample_batch_size: int | None = None
    """answers sampled at once in evaluation, rounded to whole prompts; limits the cache's memory"""


def log_odds(logps: Tensor) -> Tensor:
    """log(p / (1 - p)) from l = log p, averaged over tokens, (P,). arXiv 2403.07691 equation 4."""
    logps = logps.clamp(max=-torch.finfo(logps.dtype).eps)  # at p = 1 the odds are infinite and TRL's gradient is NaN
    return logps - torch.log(-torch.expm1(logps))


def orpo_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """-chosen - beta log sigmoid(log odds(chosen) - log odds(rejected)), from log-probabilities averaged over tokens:
    (P,), (P,) -> (P,). arXiv 2403.07691 equations 6 and 7."""
    return -chosen - args.beta * logsigmoid(log_odds(chosen) - log_odds(rejected))


def pair_logps(model, inputs: tuple, rows: int, args: Args) -> Tensor:
    """Mean log-probability of a token of chosen and rejected completions, (P, 2). inputs: what completion_logps takes;
    rows: how many completions."""
    with autocast(model, args.precision):
        logps, _ = completion_logps(model, *inputs)
    logps, lengths = logps[:rows], inputs[-1][:rows].sum(1)  # no rows: an empty pass, which --fsdp may need
    return (logps.sum(1) / lengths).view(-1, 2)


def preference_metrics(logps: Tensor) -> dict[str, Tensor]:
    """Columns for each pair, (P,), from the mean log-probabilities (P, 2)."""
    chosen, rejected = logps.unbind(1)
    right = (chosen > rejected).to(logps.dtype) + (chosen == rejected) / 2
    margin = log_odds(chosen) - log_odds(rejected)
    return {"accuracy": right, "margin": margin, "chosen_logp": chosen, "rejected_logp": rejected}


def update(model, optimizer, samples: Samples, args: Args) -> dict[str, float]:
    """One optimizer step. Returns metrics."""
    count, means = total(torch.tensor(len(samples.prompt_ids))), Means()
    optimizer.zero_grad(set_to_none=True)
    for rows, inputs in micro_batches(samples, args, together=2):
        logps = pair_logps(model, inputs, len(rows), args)
        chosen, rejected = logps.unbind(1)
        loss = orpo_loss(chosen, rejected, args)
        (loss.sum() / count).backward()
        means.add(torch.ones_like(chosen), **preference_metrics(logps))
    grad_norm = clip_gradients(model, args.max_grad_norm)
    optimizer.step()
    truncated = 1 - samples.ended.float().mean().item()
    return means.read() | {"grad_norm": grad_norm.item(), "truncated": truncated}


@torch.no_grad()
def score_pairs(model, samples: Samples, args: Args) -> dict[str, float]:
    """The metrics of pairs that are not trained on."""
    means = Means()
    for rows, inputs in micro_batches(samples, args, together=2):
        logps = pair_logps(model, inputs, len(rows), args)
        means.add(torch.ones_like(logps[:, 0]), **preference_metrics(logps))
    return means.read()


def train(args: Args) -> list[dict]:
    device = start(prepare(args))
    data = load_pairs(args.task, args.num_pairs, args.seed, args.prompt_column)
    model, tokenizer = load_model(args, device)
    settings = resolve(model, args, PRESETS)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  weight_decay=args.weight_decay, fused=True)  # fmt: skip
    eos = model.generation_config.eos_token_id

    def encode(row: dict) -> tuple[list[int], ...]:
        return encode_answers(row, [row["chosen"], row["rejected"]], tokenizer, eos, args.max_length)

    def make_batch(rows: list[dict]) -> Samples:
        return as_samples([encode(row) for row in rows], args.max_length, device)

    longest = min(n for n in (args.max_prompt_length, args.max_length - 1) if n is not None)
    both = dict(limit=longest, tokenizer=tokenizer, answers=("chosen", "rejected"), most=args.max_length)
    pairs, heldout = (keep(rows, encode, **both) for rows in (data.train, data.heldout))
    stream, heldout = epochs(pairs), list(islice(heldout, args.eval_prompts))
    run = Run(args, NAME, data.name, args.max_steps, ("accuracy", "margin", "eval/pair_accuracy", "eval/greedy"))
    run.print(f"{settings}\n{len(pairs)} pairs, {len(heldout)} held-out ones")
    heldout_batch = make_batch(share(heldout) or heldout[:1])

    def evaluation() -> dict[str, float]:
        columns = {f"eval/pair_{name}": value for name, value in score_pairs(model, heldout_batch, args).items()}
        if data.task:
            columns |= evaluate(model, tokenizer, data.task, None, args, run.step, run.keep)
        return columns

    parts = {"trained": Trained(model, optimizer)}
    if not run.restore(**parts):
        run.log(0, **averaged(evaluation()))
    model.train()
    while run.step < args.max_steps:
        step, begun = run.step + 1, time.perf_counter()
        rate = set_rate(optimizer, step, args)

        # update
        numbers = share(range((step - 1) * args.batch_size, step * args.batch_size))
        batch = make_batch([stream(number, args.seed) for number in numbers])
        if step == 1:
            run.print(shown(batch, tokenizer, [1, 0]))
        columns = update(model, optimizer, batch, args)
        columns |= {"learning_rate": rate, "time/step": time.perf_counter() - begun}

        # evaluate
        if run.due(step, args.eval_every):
            columns |= evaluation()
        run.log(step, **averaged(columns))
        run.end_step(step, parts)

    curves = {"pairs ranked right": ("accuracy", "eval/pair_accuracy"), "margin": ("margin", "eval/pair_margin"),
              "held-out accuracy": ("eval/greedy*", "eval/pass*")}  # fmt: skip
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {data.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
