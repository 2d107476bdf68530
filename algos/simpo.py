r"""Simple Preference Optimization (SimPO).

Meng, Xia and Chen 2024, "SimPO: Simple Preference Optimization with a Reference-Free Reward" (arXiv 2405.14734,
equation 6).

Parent: dpo.py. The reward needs no reference model, and the rewards of a pair are to differ by a margin.

Learns from pairs of a preferred and a dispreferred answer. The reward of an answer is its average log-probability per
token, which also guides generation. Minimises

    L(theta) = - E_(x, y_w, y_l)  log sigmoid( beta [ l(x, y_w) - l(x, y_l) ] - gamma )

    x, y_w, y_l   a prompt, its preferred and its dispreferred completion, chosen before training
    l(x, y) = 1/|y| log pi_theta(y | x)   mean log-probability of the tokens of y up to and including the first EOS
    beta     --beta: scale of the reward beta l
    gamma    --gamma: target margin between the rewards of y_w and y_l

Only a small learning rate keeps the policy near its start. If the labels never contradict each other there is no
minimum: margins grow for ever, but more slowly above gamma.

Run
    python algos/simpo.py                                    the 0.8M-parameter model of utils/tiny_model, countdown
    python algos/simpo.py --task sort --max-steps 40         a smaller task
    python algos/simpo.py --sft-coef 1                       CPO-SimPO
    python algos/simpo.py --model ORG/NAME --task pairs.jsonl --lora-rank 32 --gradient-checkpointing
    The paper's own run: algos/README.md.

Expect
    The default run takes 40 seconds on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.09, pass@8 0.45
    to greedy 0.41, pass@1 0.22, pass@8 0.70; dpo.py: 0.41, 0.25, 0.73. --task sort --max-steps 40: greedy 0.23 to 0.92.
    With --learning-rate 3e-5 greedy sort ends at 0.10, for chosen answers become less likely; --sft-coef 1: 0.88.

Metrics
    margin         mean of beta [l(y_w) - l(y_l)], without gamma; rises above gamma
    chosen_logp, rejected_logp   means of l in nats per token. Only their difference is trained, so both may fall. If
                   the chosen one falls far, probability goes to answers in neither: see --sft-coef
    The others are those of dpo.py, with l for h.

Differences
    - gamma is the paper's, and TRL's simpo_gamma. The authors' code now has gamma_beta_ratio = gamma / beta; some call
      that ratio gamma.
    - The defaults are beta 2 and gamma 1, where the authors advise to begin. TRL's defaults 0.1 and 0.5 are far from
      all of theirs: gamma / beta is 5 nats there.
    - No label smoothing: the authors' code and TRL offer it, the paper does not use it.
    - Completions beyond --max-length are cut at the end and lose their EOS. The authors' code cuts prompts, too.
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

NAME, TITLE = "simpo", "SimPO"
LARGE = dict(learning_rate=1e-6, micro_batch_size=64, micro_batch_tokens=4096, max_length=1024, sample_batch_size=64,
             eval_max_new_tokens=512, precision="bfloat16", batch_size=128)  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-5, micro_batch_size=128, micro_batch_tokens=0, max_length=64, sample_batch_size=512,
                 eval_max_new_tokens=20, precision="float32", batch_size=64),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=1e-5),
}  # fmt: skip


@dataclass
class Args(PolicyArgs):  # and --model --precision --lora-rank --seed --device ...: utils/lm.py, utils/core.py
    limits = PolicyArgs.limits | {"gamma": (0, None)}  # here it is no discount
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
    beta: float = 2.0
    """scale of the reward, a mean log-probability"""
    gamma: float = 1.0
    """margin by which the reward of the chosen completion is to be larger; others set the ratio gamma / beta"""
    sft_coef: float = 0.0
    """weight of the negative log-likelihood per token of chosen completions (CPO-SimPO)"""
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


def simpo_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """-log sigmoid(beta (chosen - rejected) - gamma), from log-probabilities averaged over tokens: (P,), (P,) -> (P,).
    arXiv 2405.14734 equation 6."""
    return -logsigmoid(args.beta * (chosen - rejected) - args.gamma)


def pair_logps(model, inputs: tuple, rows: int, args: Args) -> Tensor:
    """Mean log-probability of a token of chosen and rejected completions, (P, 2). inputs: what completion_logps takes;
    rows: how many completions."""
    with autocast(model, args.precision):
        logps, _ = completion_logps(model, *inputs)
    logps, lengths = logps[:rows], inputs[-1][:rows].sum(1)  # no rows: an empty pass, which --fsdp may need
    return (logps.sum(1) / lengths).view(-1, 2)


def preference_metrics(logps: Tensor, beta: float) -> dict[str, Tensor]:
    """Columns for each pair, (P,), from the mean log-probabilities (P, 2)."""
    chosen, rejected = logps.unbind(1)
    right = (chosen > rejected).to(logps.dtype) + (chosen == rejected) / 2
    margin = beta * (chosen - rejected)
    return {"accuracy": right, "margin": margin, "chosen_logp": chosen, "rejected_logp": rejected}


def update(model, optimizer, samples: Samples, args: Args) -> dict[str, float]:
    """One optimizer step. Returns metrics."""
    count, means = total(torch.tensor(len(samples.prompt_ids))), Means()
    optimizer.zero_grad(set_to_none=True)
    for rows, inputs in micro_batches(samples, args, together=2):
        logps = pair_logps(model, inputs, len(rows), args)
        chosen, rejected = logps.unbind(1)
        loss = simpo_loss(chosen, rejected, args)
        if args.sft_coef:  # per token of each completion; TRL and the authors average over all tokens
            loss = loss - args.sft_coef * logps[:, 0]
        (loss.sum() / count).backward()
        means.add(torch.ones_like(chosen), **preference_metrics(logps, args.beta))
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
        means.add(torch.ones_like(logps[:, 0]), **preference_metrics(logps, args.beta))
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
