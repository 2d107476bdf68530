r"""Kahneman-Tversky Optimization (KTO).

Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv 2402.01306, section 4).

Parent: dpo.py. There are no pairs: each answer is compared with the mean of mismatched ones.

Learns from single answers, each labelled desirable or undesirable. It raises the log-ratio of desirable answers above a
reference point and lowers the others below it. An answer far from that point on either side teaches little. Minimises

    L(theta) = E_(x, y)  w_D [ 1 - sigmoid( beta [ h(x, y) - z ] ) ]    where y is desirable
                         w_U [ 1 - sigmoid( beta [ z - h(x, y) ] ) ]    where it is not

    x, y      a prompt and its completion, chosen before training
    h(x, y) = log pi_theta(y | x) - log pi_ref(y | x)   log-ratio; each term sums over the tokens of y up to and
                                                        including the first EOS
    z = max(0, mean_i h(x_i, y_i-1))   reference point, no gradient: an estimate of KL(pi_theta || pi_ref) over the rows
                                       i of the step, each prompt with the completion of the row before
    beta      --beta: how fast gains and losses saturate, and so how strongly the policy is held to the reference
    w_D, w_U  --desirable-weight, --undesirable-weight: the paper's lambda_D and lambda_U. It advises n_D w_D / (n_U
              w_U) from 1 to 3/2 (equation 9), for n_D and n_U rows; the script prints both
    pi_ref    the policy before the first step

Run
    python algos/kto.py                                      the 0.8M-parameter model of utils/tiny_model, countdown
    python algos/kto.py --task sort --max-steps 40           a smaller task
    python algos/kto.py --model ORG/NAME --task trl-lib/kto-mix-14k --max-steps 420
    python algos/kto.py --model ORG/NAME --task rows.jsonl --undesirable-weight 2 --lora-rank 32
    The authors' own run: algos/README.md.

Expect
    The default run takes 40 seconds on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.09, pass@8 0.45
    to greedy 0.36, pass@1 0.20, pass@8 0.69; dpo.py: 0.41, 0.25, 0.73, with twice the completions a step. --task sort
    --max-steps 40: greedy 0.23 to 0.92; with --learning-rate 3e-5 to 0.30, for all answers become less likely.

Metrics
    accuracy       share of the step's rows with h on the right side of z: above if desirable, below if not; ties count
                   half, so 0.5 at the start; rises. margin: beta times the difference of the mean h of both kinds
    z              in nats (TRL's kl): 0 at the start; stays 0 if mismatched completions become less likely
    desirable_logratio, undesirable_logratio   means of h in nats: the first should rise and the second fall

Differences
    - z is a mean over the whole optimizer step. TRL and HALOs take it over each micro-batch: there the result depends
      on the split. TRL mismatches once, in the dataset's order, so it does not shuffle.
    - z is a biased estimate of that KL: y_i-1 is no sample of the policy, and z is cut at 0. A row may follow one of
      the same prompt, so that nothing is mismatched; the paper and others allow that, too.
    - A dataset of pairs is taken as two rows each, as TRL does; also the --num-pairs of countdown and sort.
"""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import sigmoid

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.core import Run, UserError, main, prepare
from utils.data import Pairs, RowFault, as_pair, check, encode_answers, epochs, keep, load_pairs
from utils.dist import (
    Means,
    Samples,
    Trained,
    as_samples,
    averaged,
    clip_gradients,
    micro_batches,
    moments,
    set_rate,
    share,
    start,
    total,
)
from utils.lm import PolicyArgs, autocast, completion_logps, load_model, resolve, save_model
from utils.rewards import evaluate, shown

NAME, TITLE = "kto", "KTO"
LARGE = dict(learning_rate=1e-6, micro_batch_size=32, micro_batch_tokens=4096, max_length=1024, sample_batch_size=64,
             eval_max_new_tokens=512, precision="bfloat16", batch_size=32)  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-5, micro_batch_size=64, micro_batch_tokens=0, max_length=64, sample_batch_size=512,
                 eval_max_new_tokens=20, precision="float32", batch_size=64),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=5e-6),
}  # fmt: skip


@dataclass
class Args(PolicyArgs):  # and --model --precision --lora-rank --seed --device ...: utils/lm.py, utils/core.py
    task: str = "countdown"
    """countdown, sort, a .jsonl or .parquet file, or a hub dataset; columns prompt, completion, label; or pairs"""
    prompt_column: str = "prompt"
    """column of a dataset with the prompt: text or chat messages"""
    num_pairs: int = 2048
    """problems of countdown and sort to train on, two rows each; a dataset brings its own"""
    max_steps: int = 100
    """optimizer steps"""
    batch_size: int | None = None
    """rows in one optimizer step, of all processes"""
    micro_batch_size: int | None = None
    """completions in one forward and backward pass; changes memory, not the result"""
    max_length: int | None = None
    """prompt and completion tokens at most; completions are cut there"""
    max_prompt_length: int | None = None
    """longer prompts are dropped; None: those that leave a completion no room in --max-length"""
    beta: float = 0.1
    """how fast gains and losses saturate"""
    desirable_weight: float = 1.0
    """weight of desirable rows"""
    undesirable_weight: float = 1.0
    """weight of undesirable rows"""
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
    """held-out prompts and rows per evaluation"""
    eval_samples: int = 8
    """sampled answers per held-out prompt"""
    eval_max_new_tokens: int | None = None
    """length limit of answers in evaluation"""
    sample_batch_size: int | None = None
    """answers sampled at once in evaluation, rounded to whole prompts; limits the cache's memory"""


class Batch(NamedTuple):
    """What this process learns from in one step. B rows."""

    samples: Samples
    ref_logps: Tensor  # (B, T)
    labels: Tensor  # (B,) bool: desirable
    mismatched: Samples  # each prompt with the completion of the row before
    mismatched_ref_logps: Tensor


def labelled(row: dict) -> dict:
    """The row with its label as bool; 0 and 1 are taken for labels too."""
    check(row, "prompt", "completion")
    if row.get("label") not in (False, True):
        raise RowFault(row, f"has the label {row.get('label')!r}: it must be true (desirable) or false, or 1 or 0")
    return row | {"label": bool(row["label"])}


def load_unpaired(spec: str, num_pairs: int, seed: int, prompt_column: str = "prompt") -> Pairs:
    """Rows with a label from the same sources. A pair makes two: its chosen completion is desirable, the other not."""
    shaped = lambda row: as_pair(row) if "chosen" in row else labelled(row)  # noqa: E731
    data = load_pairs(spec, num_pairs, seed, prompt_column, shaped)
    sides = (("chosen", True), ("rejected", False))
    parts = ([row | {"completion": row[side], "label": label} for row in rows for side, label in sides]
             if "chosen" in rows[0] else rows for rows in (data.train, data.heldout))  # fmt: skip
    return Pairs(data.name, *parts, data.task)  # type: ignore[call-arg, arg-type]


def kto_loss(ratios: Tensor, labels: Tensor, z: Tensor, args: Args) -> Tensor:
    """w [1 - sigmoid(+-beta (h - z))]: + and desirable_weight for true labels, - and undesirable_weight for false ones.
    Log-ratios h (B,), labels (B,) bool, z () -> (B,). arXiv 2402.01306, section 4."""
    value = sigmoid(args.beta * torch.where(labels, ratios - z, z - ratios))
    return torch.where(labels, args.desirable_weight, args.undesirable_weight) * (1 - value)


def log_ratios(model, inputs: tuple, ref_logps: Tensor, args: Args) -> Tensor:
    """h of completions, (B,): sums over tokens. inputs: what completion_logps takes."""
    with autocast(model, args.precision):
        logps, _ = completion_logps(model, *inputs)
    rows, width = len(ref_logps), logps.shape[1]
    return (logps[:rows] - ref_logps[:, :width]).sum(1)  # no rows: an empty pass, which --fsdp may need


def label_metrics(ratios: Tensor, labels: Tensor, beta: float) -> dict[str, float]:
    """Columns from the log-ratios (B,) of each process. A kind of which there is no row is left out."""
    means = Means()
    means.add(labels, desirable_logratio=ratios)
    means.add(~labels, undesirable_logratio=ratios)
    columns = means.read()
    if len(columns) == 2:
        columns["margin"] = beta * (columns["desirable_logratio"] - columns["undesirable_logratio"])
    return columns


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """One optimizer step. Returns metrics."""
    samples, ref_logps, labels, *mismatched = batch
    z = moments(score_examples(model, *mismatched, args))[0].clamp(min=0)  # type: ignore[call-arg, arg-type]
    count, ratios = total(torch.tensor(len(labels))), torch.zeros_like(ref_logps[:, 0])
    optimizer.zero_grad(set_to_none=True)
    for rows, inputs in micro_batches(samples, args):
        some = log_ratios(model, inputs, ref_logps[rows], args)
        loss = kto_loss(some, labels[rows], z, args)
        (loss.sum() / count).backward()
        ratios[rows] = some.detach()
    grad_norm = clip_gradients(model, args.max_grad_norm)
    optimizer.step()
    gains = torch.where(labels, ratios - z, z - ratios)
    accuracy = moments((gains > 0).to(gains.dtype) + (gains == 0) / 2)[0].item()
    metrics = label_metrics(ratios, labels, args.beta)
    truncated = 1 - samples.ended.float().mean().item()
    return {"accuracy": accuracy, **metrics, "z": z.item(), "grad_norm": grad_norm.item(), "truncated": truncated}


@torch.no_grad()
def score_examples(model, samples: Samples, ref_logps: Tensor, args: Args) -> Tensor:
    """Log-ratios, (B,)."""
    ratios = torch.zeros_like(ref_logps[:, 0])
    for rows, inputs in micro_batches(samples, args):
        ratios[rows] = log_ratios(model, inputs, ref_logps[rows], args)
    return ratios


@torch.no_grad()
def reference_logps(model, reference, samples: Samples, args: Args) -> Tensor:
    """Log-probabilities (B, T) under the reference: a model, or the policy without its LoRA adapters."""
    out, scorer = torch.zeros_like(samples.logps), reference or model
    without_adapters = nullcontext() if reference else model.disable_adapter()
    with without_adapters, autocast(model, args.precision):
        for rows, inputs in micro_batches(samples, args):
            logps, _ = completion_logps(scorer, *inputs)
            out[rows, : logps.shape[1]] = logps
    return out


def train(args: Args) -> list[dict]:
    device = start(prepare(args))
    if args.batch_size == 1:
        raise UserError("--batch-size is 1: z needs at least 2 rows, each prompt with the completion of another")
    data = load_unpaired(args.task, args.num_pairs, args.seed, args.prompt_column)
    model, tokenizer = load_model(args, device)
    settings = resolve(model, args, PRESETS)
    reference = None if args.lora_rank else load_model(args, device, frozen=True)[0]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  weight_decay=args.weight_decay, fused=True)  # fmt: skip
    eos = model.generation_config.eos_token_id

    def encode(row: dict) -> tuple[list[int], ...]:
        return encode_answers(row, [row["completion"]], tokenizer, eos)

    def make_batch(rows: list[dict], before: list[dict]) -> Batch:
        labels = torch.tensor([row["label"] for row in rows], device=device)
        samples = as_samples([encode(row) for row in rows], args.max_length, device)
        pairs = [(encode(row)[0], encode(other)[1]) for row, other in zip(rows, before)]
        mismatched = as_samples(pairs, args.max_length, device)
        ref_logps, other_logps = (reference_logps(model, reference, x, args) for x in (samples, mismatched))
        return Batch(samples, ref_logps, labels, mismatched, other_logps)

    longest = min(n for n in (args.max_prompt_length, args.max_length - 1) if n is not None)
    examples, heldout = (keep(rows, encode, longest, tokenizer, ["completion"]) for rows in (data.train, data.heldout))
    stream, heldout = epochs(examples), list(islice(heldout, args.eval_prompts))
    desirable = sum(row["label"] for row in examples)
    if desirable in (0, len(examples)):
        raise UserError(f"all labels of {data.name} are {desirable > 0}: give desirable and undesirable completions")
    run = Run(args, NAME, data.name, args.max_steps, ("accuracy", "margin", "z", "eval/margin", "eval/greedy"))
    weights = desirable * args.desirable_weight, (len(examples) - desirable) * args.undesirable_weight
    run.print(f"{settings}\n{len(examples)} rows, {desirable} of them desirable, {len(heldout)} held-out ones")
    run.print("desirable rows weigh {:g}, undesirable ones {:g}; 1 to 1.5 times as much is advised".format(*weights))
    some = share(heldout) or heldout[:1]
    heldout_batch = make_batch(some, some)

    def evaluation() -> dict[str, float]:
        samples, ref_logps, labels, *_ = heldout_batch
        metrics = label_metrics(score_examples(model, samples, ref_logps, args), labels, args.beta)
        columns = {f"eval/{name}": value for name, value in metrics.items()}
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
        numbers = range((step - 1) * args.batch_size, step * args.batch_size)
        rows = [stream(number, args.seed) for number in numbers]
        batch = make_batch(share(rows), share(rows[-1:] + rows[:-1]))
        if step == 1:
            run.print(shown(batch.samples, tokenizer, batch.labels.tolist()[:1]))
        columns = update(model, optimizer, batch, args)
        columns |= {"learning_rate": rate, "time/step": time.perf_counter() - begun}

        # evaluate
        if run.due(step, args.eval_every):
            columns |= evaluation()
        run.log(step, **averaged(columns))
        run.end_step(step, parts)

    curves = {"margin": ("margin", "eval/margin"), "log-ratios": ("desirable_logratio", "undesirable_logratio", "z"),
              "held-out accuracy": ("eval/greedy*", "eval/pass*")}  # fmt: skip
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {data.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
