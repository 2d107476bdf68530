r"""Kahneman-Tversky Optimization (KTO).

Parent: dpo.py. Changed: PRESETS, RANGES, Args (new: desirable_weight, undesirable_weight; gone: loss, label_smoothing,
dpop_lambda, discopop_tau, average_logps, sft_coef), update, train (the reference of mismatched pairs; no pairs). Gone:
LOSSES and its functions (dpo_loss, robust_loss, ipo_loss, hinge_loss, apo_zero_loss, apo_down_loss, sppo_hard_loss,
dpop_loss, nca_loss, exo_loss, discopop_loss), SMOOTHED, check_loss, log_ratios. Pair, pair_logps, preference_metrics
and score_pairs became Example, example_logps, label_metrics and score_examples. Added: kto_loss, mismatched.

Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv 2402.01306, section 4). From
single completions y of prompts x, each with a label, desirable or undesirable, and chosen before training, minimises

    L(theta) = E_(x, y)  w_D [ 1 - sigmoid( beta [ h(x, y) - z ] ) ]    where y is desirable
                         w_U [ 1 - sigmoid( beta [ z - h(x, y) ] ) ]    where it is not

    h(x, y)   = log pi_theta(y | x) - log pi_ref(y | x)   log-ratio, each log-probability the sum over the tokens of y
                                                          up to and including the first EOS
    z         = max(0, mean_i h(x_i, y_i-1))   reference point, no gradient: an estimate of KL(pi_theta || pi_ref) from
                the step's prompts, each with the completion of the row before it, the first with that of the last
    beta      how fast gains and losses saturate, and so how strongly the policy is held to the reference
    w_D, w_U  weights, the paper's lambda_D and lambda_U
    pi_ref    the policy as it was before the first step

A row's gradient is that of h times beta w s (1 - s), s being its sigmoid: one far from z on either side teaches little,
be it because it has been learnt or because it never will be.

Differences
    - z is a mean over the whole optimizer step. TRL and HALOs take it over each micro-batch, so there the result
      depends on the split, and a micro-batch of one row is compared with itself.
    - log pi_ref is computed before training and kept in the checkpoints: for rows as in dpo.py, for mismatched ones
      step by step, because every epoch mismatches anew. That is one forward pass for every batch of the run, which
      others spend during it, on a second model in memory. TRL mismatches once, in the order of the dataset, and
      therefore does not shuffle it.
    - z is no unbiased estimate of that KL: y_i-1 is no sample of the policy, and z is cut at 0. Two rows of one prompt
      that stand side by side are no mismatch; the paper and others let them, too.
    - The paper advises weights with n_D w_D / (n_U w_U) from 1 to 3/2 (equation 9), where n_D and n_U count the rows.
      That number is printed; nothing is balanced unasked. Both weights are 1 unless set.
    - A dataset of pairs is taken as two rows each, as TRL does. countdown and sort give a right and a wrong answer to
      each of --num-pairs problems.
    - AdamW; dropout is off, as in TRL, so that the first z and margin are 0.
    - Completions longer than --max-length permits are cut at the end and lose their EOS; their number is printed.
      Longer prompts are refused. TRL cuts, too.

Metrics
    accuracy       share of the step's rows on the right side of z: h above it where desirable, below where not; ties
                   count half, so 0.5 at the start; rises
    margin         beta times the difference of the means of h of desirable and of undesirable rows; 0 at the start
    z              the reference point in nats (TRL's kl); 0 at the start, and for good where mismatched completions
                   become less likely
    desirable_logratio, undesirable_logratio   means of h in nats: the first should rise and the second fall
    eval/margin, eval/desirable_logratio, eval/undesirable_logratio   the same on held-out rows
    eval/greedy, eval/pass@1, eval/pass@8  as in grpo.py, for the embedded tasks
    grad_norm      before clipping; falls as rows saturate

Run
    python algos/kto.py                                                   the embedded model learns countdown
    python algos/kto.py --task sort --max-steps 40                        a smaller task
    python algos/kto.py --model ORG/SFT-MODEL --task trl-lib/ultrafeedback_binarized --beta 0.1 --batch-size 32 \
        --learning-rate 5e-6 --max-length 2048 --max-steps 3880           the authors' beta, batch and rate; one epoch
    python algos/kto.py --model ORG/NAME --task trl-lib/kto-mix-14k --max-steps 420
    python algos/kto.py --model ORG/NAME --task rows.jsonl --undesirable-weight 2 --lora-rank 32

Expect
    The default run: held-out countdown goes from greedy 0.01, pass@1 0.07, pass@8 0.42 to greedy 0.36, pass@1 0.19,
    pass@8 0.70 (seed 1, 128 prompts), in half a minute of one CPU core. dpo.py, whose 64 pairs a step are twice the
    completions, gets to 0.41, 0.21, 0.73; so does this with --batch-size 128 --num-pairs 4096, about: 0.39, 0.19, 0.69.
    --task sort --max-steps 40: greedy 0.23 to 0.92, pass@1 0.41 to 0.73, pass@8 0.91 to 1.00, in a quarter of a minute;
    with --learning-rate 3e-5 it ends at 0.30, for all answers have become less likely. A real model: not measured.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.errors import UserError, check_numbers
from utils.evaluation import evaluate, show
from utils.lm import (
    TINY_MODEL,
    autocast,
    check_cache,
    completion_logps,
    eos_ids,
    load_model,
    pad_left,
    save_model,
    trained_state,
    without_dropout,
)
from utils.preferences import load_unpaired
from utils.run import Run, RunArgs, main, prepare
from utils.schedule import learning_rate
from utils.tasks import encode_completion, epochs

PRESETS = {  # what depends on the model: taken for every argument that is left at None
    "tiny": dict(learning_rate=1e-5, batch_size=64, micro_batch_size=64, max_length=64, precision="float32",
                 eval_max_new_tokens=20, sample_batch_size=512),
    "full": dict(learning_rate=1e-6, batch_size=32, micro_batch_size=2, max_length=1024, precision="bfloat16",
                 eval_max_new_tokens=512, sample_batch_size=64),
    "lora": dict(learning_rate=5e-6, batch_size=32, micro_batch_size=2, max_length=1024, precision="bfloat16",
                 eval_max_new_tokens=512, sample_batch_size=64),
}  # fmt: skip
RANGES = {  # what numbers must be
    "at least 1": "num_pairs max_steps batch_size micro_batch_size max_length eval_prompts eval_samples "
    "eval_max_new_tokens sample_batch_size",
    "at least 0": "warmup_steps weight_decay lora_rank eval_every",
    "above 0": "beta desirable_weight undesirable_weight learning_rate max_grad_norm",
}


@dataclass
class Args(RunArgs):
    model: str = TINY_MODEL
    """folder or hub name of a causal language model; also the reference"""
    task: str = "countdown"
    """countdown, sort, a .jsonl or .parquet file, or a hub dataset; columns prompt, completion, label, or of pairs"""
    num_pairs: int = 2048
    """problems of countdown and sort to train on, two rows each; a dataset brings its own"""
    max_steps: int = 100
    """optimizer steps"""
    batch_size: int | None = None
    """rows in one optimizer step, at least 2"""
    micro_batch_size: int | None = None
    """rows in one forward and backward pass; changes memory, not the result"""
    max_length: int | None = None
    """prompt and completion tokens at most; completions are cut there, and longer prompts refused"""
    beta: float = 0.1
    """how strongly the policy is held to the reference"""
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
    precision: Literal["float32", "bfloat16", "pure-bfloat16"] | None = None
    """bfloat16: autocast over float32 weights; pure-bfloat16: bfloat16 weights, in which small updates round away"""
    lora_rank: int = 0
    """train LoRA adapters of this rank instead of all weights (needs peft)"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    trust_remote_code: bool = False
    """run code that comes with the model"""
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


class Example(NamedTuple):
    """Token ids; the completion includes its EOS."""

    prompt: list[int]
    completion: list[int]
    label: bool  # whether the completion is desirable
    ref_logp: float = 0.0  # log pi_ref of the completion, summed over its tokens
    mismatched_ref_logp: float = 0.0  # the same of the completion that `mismatched` gives this prompt


def kto_loss(ratios: Tensor, labels: Tensor, z: Tensor, args: Args) -> Tensor:
    """w [1 - sigmoid(+-beta (h - z))], + and desirable_weight where the label is true, - and undesirable_weight where
    not: log-ratios h (B,), labels (B,) bool, z () -> (B,). arXiv 2402.01306, section 4."""
    value = torch.sigmoid(args.beta * torch.where(labels, ratios - z, z - ratios))
    return torch.where(labels, args.desirable_weight, args.undesirable_weight) * (1 - value)


def mismatched(batch: list[Example], args: Args) -> list[Example]:
    """Each prompt with the completion of the row before it, the first with that of the last, cut at max_length."""
    return [
        row._replace(
            completion=before.completion[: args.max_length - len(row.prompt)], ref_logp=row.mismatched_ref_logp
        )
        for row, before in zip(batch, batch[-1:] + batch[:-1])
    ]


def example_logps(model, examples: list[Example], args: Args) -> Tensor:
    """Log-probabilities summed over completion tokens, (B,)."""
    prompt_ids, prompt_mask = pad_left([example.prompt for example in examples], model.device)
    completions = [example.completion for example in examples]
    width = max(map(len, completions))
    ids = torch.tensor([c + [0] * (width - len(c)) for c in completions], device=model.device)
    lengths = torch.tensor([len(c) for c in completions], device=model.device)
    mask = torch.arange(width, device=model.device) < lengths[:, None]
    with autocast(model.device, args.precision):
        logps, _ = completion_logps(model, prompt_ids, prompt_mask, ids, mask)
    return logps.sum(1)


def label_metrics(ratios: Tensor, labels: Tensor, beta: float) -> dict[str, float]:
    """Columns from log-ratios and labels, (N,), of the rows of a step or an evaluation; NaN where it has one label."""
    desirable, undesirable = ratios[labels].mean().item(), ratios[~labels].mean().item()
    return {
        "margin": beta * (desirable - undesirable),
        "desirable_logratio": desirable,
        "undesirable_logratio": undesirable,
    }


def update(model, optimizer, batch: list[Example], args: Args) -> dict[str, float]:
    """One optimizer step on rows whose reference log-probabilities are known. Returns metrics."""
    z = score_examples(model, mismatched(batch, args), args)[1].mean().clamp(min=0)
    labels = torch.tensor([example.label for example in batch], device=model.device)
    ratios = []
    optimizer.zero_grad(set_to_none=True)
    for start in range(0, len(batch), args.micro_batch_size):
        rows = slice(start, start + args.micro_batch_size)
        logps = example_logps(model, batch[rows], args)
        ratios.append(logps - logps.new_tensor([example.ref_logp for example in batch[rows]]))
        loss = kto_loss(ratios[-1], labels[rows], z, args)
        (loss.sum() / len(batch)).backward()
        ratios[-1] = ratios[-1].detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    ratios = torch.cat(ratios)
    gains = torch.where(labels, ratios - z, z - ratios)
    accuracy = (gains > 0).to(gains.dtype) + (gains == 0) / 2
    return {"accuracy": accuracy.mean().item(), **label_metrics(ratios, labels, args.beta), "z": z.item(),
            "grad_norm": grad_norm.item()}  # fmt: skip


@torch.no_grad()
def score_examples(model, examples: list[Example], args: Args) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities and log-ratios of all rows, (N,) each, in micro-batches as `update` makes them."""
    starts = range(0, len(examples), args.micro_batch_size)
    logps = torch.cat([example_logps(model, examples[start : start + args.micro_batch_size], args) for start in starts])
    return logps, logps - logps.new_tensor([example.ref_logp for example in examples])


def train(args: Args) -> list[dict]:
    device = prepare(args)
    check_numbers(args, RANGES)
    if args.batch_size == 1:
        raise UserError("--batch-size is 1: z needs at least 2 rows, each prompt with the completion of another")
    data = load_unpaired(args.task, args.num_pairs, args.seed)
    model, tokenizer = load_model(args.model, device, args.precision or "float32", args.lora_rank,
                                  args.gradient_checkpointing, args.trust_remote_code)  # fmt: skip
    without_dropout(model)
    size = sum(p.numel() for p in model.parameters())
    preset = "lora" if args.lora_rank else "tiny" if size < 10e6 else "full"
    resolved = {name: value for name, value in PRESETS[preset].items() if getattr(args, name) is None}
    for name, value in resolved.items():
        setattr(args, name, value)
    check_cache(model)
    eos = eos_ids(model, tokenizer)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)

    rows, order = data.train + data.heldout[: args.eval_prompts], epochs(range(len(data.train)))
    heldout = list(range(len(data.train), len(rows)))

    def batch_rows(step: int) -> list[int]:
        first = (step - 1) * args.batch_size
        return [order(i, args.seed) for i in range(first, first + args.batch_size)]

    # tokens of every row that the run will see: those of the first epoch, as far as it comes, and the held-out ones
    first_epoch, left = [], len(data.train)
    for step in range(1, args.max_steps + 1):
        first_epoch.append(batch_rows(step)[:left])
        left -= len(first_epoch[-1])
        if left == 0:
            break
    examples, cut, too_long = {}, 0, []
    for row in [row for some in (heldout, *first_epoch) for row in some]:
        prompt, completion = encode_completion(rows[row], rows[row]["completion"], tokenizer, eos)
        if (room := args.max_length - len(prompt)) < 1:
            too_long.append(len(prompt))
            continue
        cut += len(completion) > room
        examples[row] = Example(prompt, completion[:room], rows[row]["label"])
    if too_long:
        raise UserError(
            f"{len(too_long)} prompts have {args.max_length} tokens or more, up to {max(too_long)}: raise --max-length "
            "above that, or drop them from the dataset"
        )
    run = Run(args, "kto", data.name, args.max_steps, ("accuracy", "margin", "z", "eval/margin", "eval/greedy"),
              schedule_depends_on_budget=args.lr_schedule != "constant")  # fmt: skip
    run.print(f"{size / 1e6:.2f}M parameters, settings for a {preset} model: {resolved}")
    desirable = sum(row["label"] for row in data.train)
    balance = desirable * args.desirable_weight / ((len(data.train) - desirable) * args.undesirable_weight)
    run.print(f"{len(data.train)} rows, {desirable} of them desirable, {len(heldout)} held-out ones; {cut} are cut off")
    run.print(f"desirable rows weigh {balance:.2f} times as much as undesirable ones in all; 1 to 1.5 is advised")
    shown = examples[first_epoch[0][0]]
    run.print(show(tokenizer, shown.prompt, [shown.completion], [shown.label], {}))
    if args.precision == "pure-bfloat16" and not args.lora_rank:  # adapters are float32
        run.print(
            "warning: bfloat16 weights round small updates away; raise the learning rate or use --precision bfloat16"
        )
    model.train()

    # reference log-probabilities, while the policy still is the reference; a resumed run has them, but for rows and
    # steps that only a larger budget reaches
    reference = torch.full((len(rows),), torch.nan) if run.state is None else run.state["reference"]
    if len(reference) != len(rows):
        raise UserError(f"{args.task} has other rows than when the run began: resume with the dataset as it was")
    for some in (heldout, *first_epoch):
        run.leave_if_asked()
        if reference[some].isnan().any():
            reference[some] = score_examples(model, [examples[row] for row in some], args)[0].cpu()
    for row in examples:
        examples[row] = examples[row]._replace(ref_logp=reference[row].item())
    by_step = torch.full((args.max_steps, args.batch_size), torch.nan)
    if run.state is not None:
        by_step[: len(run.state["by_step"])] = run.state["by_step"][: args.max_steps]
    for step in range(1, args.max_steps + 1):
        run.leave_if_asked()
        if by_step[step - 1].isnan().any():
            batch = mismatched([examples[row] for row in batch_rows(step)], args)
            by_step[step - 1] = score_examples(model, batch, args)[0].cpu()

    def evaluation() -> dict[str, float]:
        some = [examples[row] for row in heldout]
        labels = torch.tensor([example.label for example in some], device=device)
        columns = label_metrics(score_examples(model, some, args)[1], labels, args.beta)
        columns = {f"eval/{name}": value for name, value in columns.items()}
        if data.task is not None:
            with autocast(device, args.precision):
                columns |= evaluate(model, tokenizer, data.task, None, args.eval_prompts, args.eval_samples,
                                    args.eval_max_new_tokens, 1.0, args.seed,
                                    rows_at_once=args.sample_batch_size)  # fmt: skip
        return columns

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict(), "reference": reference,
                "by_step": by_step}  # fmt: skip

    step = 0
    if run.state is not None:
        model.load_state_dict(run.state["model"], strict=False)
        optimizer.load_state_dict(run.state["optimizer"])
        step = run.state["step"]
    else:
        run.log(0, **evaluation())
        run.save(0, state())
    run.restore_rng()
    while step < args.max_steps:
        step, start = step + 1, time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.learning_rate, args.lr_schedule, args.warmup_steps, args.max_steps)

        # update
        some = zip(batch_rows(step), by_step[step - 1].tolist())
        batch = [examples[row]._replace(mismatched_ref_logp=logp) for row, logp in some]
        columns = update(model, optimizer, batch, args)
        columns |= {"learning_rate": optimizer.param_groups[0]["lr"], "time/step": time.perf_counter() - start}

        # evaluate
        if step == args.max_steps or (args.eval_every and step % args.eval_every == 0):
            columns |= evaluation()
        run.log(step, **columns)
        run.end_step(step, state)

    answers = tuple(name for name in run.history[-1] if name.startswith(("eval/greedy", "eval/pass")))
    curves = {"margin": ("margin", "eval/margin"), "log-ratios": ("desirable_logratio", "undesirable_logratio", "z")}
    curves |= {"held-out accuracy": answers} if answers else {}
    return run.finish(lambda folder: save_model(model, tokenizer, folder), curves, f"KTO on {data.name}")


if __name__ == "__main__":
    main(Args, train)
