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
    python algos/orpo.py                                                  the embedded model learns countdown
    python algos/orpo.py --task sort --max-steps 40                       a smaller task
    python algos/orpo.py --model ORG/NAME --task argilla/ultrafeedback-binarized-preferences-cleaned \
        --beta 0.1 --batch-size 32 --max-length 2048 --learning-rate 5e-6 --warmup-steps 200 --max-steps 9500
                                                                          the authors' Mistral-ORPO-beta: a base model
                                                                          (Mistral-7B-v0.1, a chat template added), five
                                                                          epochs; here with a linear decay
    python algos/orpo.py --model ORG/NAME --task pairs.jsonl --lora-rank 32 --gradient-checkpointing

Expect
    The default run takes 20 seconds on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.08,
    pass@8 0.43 to greedy 0.50, pass@1 0.36, pass@8 0.85 (seed 1, 128 prompts).
    --task sort --max-steps 40: greedy 0.23 to 1.00, pass@1 0.40 to 0.97, pass@8 0.88 to 1.00, in about 15 seconds.
    Here the first term does the work, because every chosen answer is right: --beta 0, supervised fine-tuning alone,
    gets to 0.51, 0.35, 0.83 on countdown. The second term widens the held-out margin: 1.6 with --beta 0, 2.0
    with the default, 2.4 with --beta 1. Real models: not measured.

Metrics
    accuracy       share of the step's pairs with a larger l for y_w; ties count half; rises
    margin         mean of log odds(y_w) - log odds(y_l), in nats; rises
    chosen_logp, rejected_logp   means of l in nats per token: the chosen one rises towards 0, the rejected one falls
    eval/pair_accuracy, eval/pair_margin   the same on held-out pairs; far below the training ones is overfitting
    eval/greedy, eval/pass@1, eval/pass@8  as in grpo.py, for the embedded tasks
    grad_norm      before clipping; falls as chosen completions are learnt

Differences
    - l is a mean over each completion, and the loss a mean over pairs. The authors' code and TRL average the first term
      over all tokens of the micro-batch, the prompt's included (the authors have an option to leave them out).
    - The learning rate of the authors' Mistral script falls with the inverse square root of the step; appendix C has a
      cosine for their other models.
    - AdamW. Dropout is off, as in TRL.
    - Completions beyond --max-length are cut at the end and lose their EOS; their number is printed. Prompts beyond it
      are refused. TRL cuts, too.
    - Means are those of the whole optimizer step, so micro-batches do not change the result.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.checks import check_model
from utils.cli import main, prepare
from utils.distributed import clip_gradients, deal, share, total, unsharded
from utils.errors import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from utils.evaluation import evaluate, show
from utils.lm import completion_logps, pad_left, split_rows
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
from utils.preferences import Batches, encode_rows, load_preferences, usable
from utils.rows import Lazy
from utils.run import Run
from utils.schedule import set_learning_rate
from utils.text import encode_pair

NAME, TITLE = "orpo", "ORPO"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, batch_size=64, micro_batch_size=64, max_length=64, precision="float32",
                 eval_max_new_tokens=20, sample_batch_size=512, micro_batch_tokens=0),
    "full": dict(learning_rate=5e-6, batch_size=32, micro_batch_size=32, max_length=1024, precision="bfloat16",
                 eval_max_new_tokens=512, sample_batch_size=64, micro_batch_tokens=4096),
    "lora": dict(learning_rate=5e-5, batch_size=32, micro_batch_size=32, max_length=1024, precision="bfloat16",
                 eval_max_new_tokens=512, sample_batch_size=64, micro_batch_tokens=4096),
}  # fmt: skip


@dataclass
class Args(PolicyArgs):  # and --model --precision --lora-rank --seed --device ...: utils/models.py, utils/cli.py
    task: str = "countdown"
    """countdown, sort, a .jsonl or .parquet file, or a hub dataset; columns prompt (or none), chosen, rejected"""
    num_pairs: PositiveInt = 2048
    """pairs that countdown and sort make for training; a dataset brings its own"""
    max_steps: PositiveInt = 100
    """optimizer steps"""
    batch_size: PositiveInt | None = None
    """pairs in one optimizer step"""
    micro_batch_size: PositiveInt | None = None
    """pairs in one forward and backward pass; changes memory, not the result"""
    max_length: PositiveInt | None = None
    """prompt and completion tokens at most; completions are cut there"""
    max_prompt_length: PositiveInt | None = None
    """longer prompts are dropped; None: those that leave no room in --max-length, and more than 5 % stop the run"""
    beta: NonNegativeFloat = 0.1
    """weight of the odds ratio beside the likelihood of chosen completions: the paper's lambda"""
    learning_rate: PositiveFloat | None = None
    """peak learning rate of AdamW"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
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
    """held-out prompts and pairs per evaluation"""
    eval_samples: PositiveInt = 8
    """sampled answers per held-out prompt"""
    eval_max_new_tokens: PositiveInt | None = None
    """length limit of answers in evaluation"""
    sample_batch_size: PositiveInt | None = None
    """answers sampled at once in evaluation, rounded to whole prompts; limits the cache's memory"""


class Pair(NamedTuple):
    """Token ids; completions include their EOS."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def log_odds(logps: Tensor) -> Tensor:
    """log(p / (1 - p)) from l = log p, averaged over tokens, (B,). arXiv 2403.07691 equation 4."""
    logps = logps.clamp(max=-torch.finfo(logps.dtype).eps)  # at p = 1 the odds are infinite and TRL's gradient is NaN
    return logps - torch.log(-torch.expm1(logps))


def orpo_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """-chosen - beta log sigmoid(log odds(chosen) - log odds(rejected)), from log-probabilities averaged over tokens:
    (B,), (B,) -> (B,). arXiv 2403.07691 equations 6 and 7."""
    return -chosen - args.beta * logsigmoid(log_odds(chosen) - log_odds(rejected))


def pair_logps(model, pairs: list[Pair], args: Args) -> Tensor:
    """Log-probabilities averaged over completion tokens, (B, 2): chosen, rejected. A prompt is run once for both."""
    prompt_ids, prompt_mask = pad_left([pair.prompt for pair in pairs], model.device)
    completions = [completion for pair in pairs for completion in (pair.chosen, pair.rejected)]
    width = max(map(len, completions))
    ids = torch.tensor([c + [0] * (width - len(c)) for c in completions], device=model.device)
    lengths = torch.tensor([len(c) for c in completions], device=model.device)
    mask = torch.arange(width, device=model.device) < lengths[:, None]
    with autocast(model.device, args.precision):
        logps, _ = completion_logps(model, prompt_ids, prompt_mask, ids, mask)
    return (logps.sum(1) / lengths).view(-1, 2)


def preference_metrics(logps: Tensor) -> dict[str, float]:
    """Columns from the averaged log-probabilities (N, 2) of the pairs of a step or an evaluation."""
    chosen, rejected = logps.unbind(1)
    right = (chosen > rejected).to(logps.dtype) + (chosen == rejected) / 2
    return {
        "accuracy": right.mean().item(),
        "margin": (log_odds(chosen) - log_odds(rejected)).mean().item(),
        "chosen_logp": chosen.mean().item(),
        "rejected_logp": rejected.mean().item(),
    }


def micro_batches(pairs: list[Pair], args: Args) -> list[list[int]]:
    """The numbers of the pairs in each."""
    lengths = [2 * (len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))) for pair in pairs]
    return split_rows(lengths, args.micro_batch_size, args.micro_batch_tokens)


def update(model, optimizer, batch: list[Pair], args: Args) -> dict[str, float]:
    """One optimizer step on pairs. Returns metrics."""
    logps = torch.zeros(len(batch), 2, device=model.device)
    optimizer.zero_grad(set_to_none=True)
    for rows, counts in deal(micro_batches(batch, args), model):  # to this process, of perhaps several
        pairs = [batch[row] for row in rows]
        some = pair_logps(model, pairs, args)
        chosen, rejected = some.unbind(1)
        loss = orpo_loss(chosen, rejected, args)
        (counts * loss.sum() / len(batch)).backward()
        logps[rows] += counts * some.detach()
    grad_norm = clip_gradients(model.parameters(), args.max_grad_norm)
    optimizer.step()
    return preference_metrics(total(logps)) | {"grad_norm": grad_norm.item()}


@torch.no_grad()
def score_pairs(model, pairs: list[Pair], args: Args) -> Tensor:
    """Averaged log-probabilities of all pairs, (N, 2), in micro-batches as `update` makes them."""
    logps = torch.zeros(len(pairs), 2, device=model.device)
    with unsharded(model):
        for rows in share(micro_batches(pairs, args)):
            logps[rows] = pair_logps(model, [pairs[row] for row in rows], args)
    return total(logps)


def train(args: Args) -> list[dict]:
    device = prepare(args)
    data = load_preferences(args.task, args.num_pairs, args.seed)
    model, tokenizer = load_policy(args, device)
    settings = resolve_for(model, args, PRESETS)
    without_dropout(model)
    check_model(model, args.precision)
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=args.learning_rate, weight_decay=args.weight_decay,
                                  fused=True)  # fmt: skip
    eos = eos_ids(model, tokenizer)
    data, cut = usable(data, encode_pair, tokenizer, eos, args)
    settings += check_memory(model, args, prompt=0 if data.task else None, pairs=2)
    rows, batches = data.train + data.heldout, Batches(len(data.train), args.batch_size, args.seed)
    heldout = list(range(len(data.train), len(rows)))
    pairs = Lazy(lambda ids: Pair(*ids), encode_rows(rows, encode_pair, tokenizer, eos, args.max_length))
    run = Run(args, NAME, data.name, args.max_steps, ("accuracy", "margin", "eval/pair_accuracy", "eval/greedy"),
              schedule_depends_on_budget=args.lr_schedule != "constant")  # fmt: skip
    run.print(settings)
    run.print(f"{len(data.train)} pairs, {len(heldout)} held-out ones; {cut} pairs have a completion cut off")
    shown = pairs[batches(1)[0]]
    run.print(show(tokenizer, shown.prompt, [shown.chosen, shown.rejected], [1, 0], {}))
    model.train()

    def evaluation() -> dict[str, float]:
        logps = score_pairs(model, [pairs[row] for row in heldout], args)
        columns = {f"eval/pair_{name}": value for name, value in preference_metrics(logps).items()}
        if data.task is not None:
            columns |= evaluate(model, tokenizer, data.task, None, args.eval_prompts, args.eval_samples,
                                args.eval_max_new_tokens, 1.0, args.seed, rows_at_once=args.sample_batch_size,
                                precision=args.precision)  # fmt: skip
        return columns

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict()}

    if not run.restore(model=model, optimizer=optimizer):
        run.log(0, **evaluation())
        run.save(0, state())
    while run.step < args.max_steps:
        step, start = run.step + 1, time.perf_counter()
        rate = set_learning_rate(optimizer, step, args)

        # update
        columns = update(model, optimizer, [pairs[row] for row in batches(step)], args)
        columns |= {"learning_rate": rate, "time/step": time.perf_counter() - start}

        # evaluate
        if run.due(step, args.eval_every):
            columns |= evaluation()
        run.log(step, **columns)
        run.end_step(step, state)

    curves = {"pairs ranked right": ("accuracy", "eval/pair_accuracy"), "margin": ("margin", "eval/pair_margin"),
              "held-out accuracy": ("eval/greedy*", "eval/pass*")}  # fmt: skip
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {data.name}")


if __name__ == "__main__":
    main(Args, train)
