r"""Simple Preference Optimization (SimPO).

Parent: dpo.py. Changed: PRESETS, RANGES, Args (beta; new: gamma; gone: loss, label_smoothing, dpop_lambda,
discopop_tau, average_logps), Pair, pair_logps, preference_metrics, update, score_pairs, train (no reference). Gone:
LOSSES and its functions (dpo_loss, robust_loss, ipo_loss, hinge_loss, apo_zero_loss, apo_down_loss, sppo_hard_loss,
dpop_loss, nca_loss, exo_loss, discopop_loss), SMOOTHED, check_loss, log_ratios. Added: simpo_loss.

Meng, Xia and Chen 2024, "SimPO: Simple Preference Optimization with a Reference-Free Reward" (arXiv 2405.14734,
equation 6). From pairs of a preferred completion y_w and a dispreferred one y_l of a prompt x, minimises

    L(theta) = - E_(x, y_w, y_l)  log sigmoid( beta [ l(x, y_w) - l(x, y_l) ] - gamma )

    l(x, y) = 1/|y| log pi_theta(y | x)    log-probability averaged over the tokens of y up to and including the first
                                           EOS, as in the ranking of answers by a beam search
    beta    scale of the reward beta l
    gamma   target margin: by how much the reward of y_w is to be larger than that of y_l

There is no reference, so nothing but a small learning rate holds the policy to where it began, and there is no
minimum where all labels agree: margins grow for ever, more slowly once they are above gamma.

Differences
    - gamma is the paper's, as is TRL's simpo_gamma (CPOTrainer, loss_type "simpo"). The authors' code now asks for
      gamma_beta_ratio, which is gamma / beta; some call that ratio gamma.
    - Defaults are beta 2 and gamma 1, where the authors advise to begin (ratio 0.5). Theirs are, for Mistral-Base 2 and
      1.6, Mistral-Instruct 2.5 and 0.25, Llama3-Base 2 and 1, Llama3-Instruct 2.5 and 1.375; later they name beta 10.
      TRL's, 0.1 and 0.5, are far from all of these: gamma / beta is 5 nats per token there.
    - --sft-coef adds the negative log-likelihood of y_w per token, averaged over each completion, then over pairs
      (CPO-SimPO). TRL's cpo_alpha, which is 1 unless set, and the authors' sft_weight average over all tokens of the
      micro-batch.
    - No label smoothing, which the authors' code and TRL offer and the paper does not use.
    - AdamW and no dropout, as in the authors' code.
    - Completions longer than --max-length permits are cut at the end and lose their EOS; their number is printed.
      Longer prompts are refused. The authors' code cuts prompts, too.
    - Means are those of the whole optimizer step, so micro-batches do not change the result.

Metrics
    accuracy       share of the step's pairs with a larger l for y_w; ties count half; rises
    margin         mean of beta [l(y_w) - l(y_l)], without gamma; rises above gamma
    chosen_logp, rejected_logp   means of l in nats per token. Both may fall, for only their difference is trained: a
                   chosen one that falls far means likelihood goes to answers in neither; see --sft-coef
    eval/pair_accuracy, eval/pair_margin   the same on held-out pairs: far below the training ones is overfitting
    eval/greedy, eval/pass@1, eval/pass@8  as in grpo.py, for the embedded tasks
    grad_norm      before clipping; falls as pairs are told apart

Run
    python algos/simpo.py                                                 the embedded model learns countdown
    python algos/simpo.py --task sort --max-steps 40                      a smaller task
    python algos/simpo.py --sft-coef 1                                    CPO-SimPO
    python algos/simpo.py --model ORG/INSTRUCT-MODEL --task princeton-nlp/llama3-ultrafeedback --beta 2.5 \
        --gamma 1.375 --batch-size 128 --max-length 2048 --learning-rate 1e-6 --lr-schedule cosine \
        --warmup-steps 46 --max-steps 460                                 the paper's Llama3-Instruct, one epoch
    python algos/simpo.py --model ORG/NAME --task pairs.jsonl --lora-rank 32 --gradient-checkpointing

Expect
    The default run: held-out countdown goes from greedy 0.01, pass@1 0.07, pass@8 0.42 to greedy 0.41, pass@1 0.20,
    pass@8 0.70 (seed 1, 128 prompts), as with dpo.py, in half a minute of one CPU core; with --sft-coef 1
    --learning-rate 3e-5 to 0.45, 0.27, 0.73.
    --task sort --max-steps 40: greedy 0.23 to 0.92, pass@1 0.41 to 0.72, pass@8 0.91 to 0.99, in a quarter of a minute.
    With --learning-rate 3e-5 all held-out pairs of sort are ranked right, but greedy ends at 0.10, for chosen answers
    have become less likely, too; beside --sft-coef 1 it ends at 0.88. A real model: not measured.
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
from utils.preferences import encode_pair, load_preferences
from utils.run import Run, RunArgs, main, prepare
from utils.schedule import learning_rate
from utils.tasks import epochs

PRESETS = {  # what depends on the model: taken for every argument that is left at None
    "tiny": dict(learning_rate=1e-5, batch_size=64, micro_batch_size=64, max_length=64, precision="float32",
                 eval_max_new_tokens=20, sample_batch_size=512),
    "full": dict(learning_rate=1e-6, batch_size=128, micro_batch_size=2, max_length=1024, precision="bfloat16",
                 eval_max_new_tokens=512, sample_batch_size=64),
    "lora": dict(learning_rate=1e-5, batch_size=128, micro_batch_size=2, max_length=1024, precision="bfloat16",
                 eval_max_new_tokens=512, sample_batch_size=64),
}  # fmt: skip
RANGES = {  # what numbers must be
    "at least 1": "num_pairs max_steps batch_size micro_batch_size max_length eval_prompts eval_samples "
    "eval_max_new_tokens sample_batch_size",
    "at least 0": "gamma sft_coef warmup_steps weight_decay lora_rank eval_every",
    "above 0": "beta learning_rate max_grad_norm",
}


@dataclass
class Args(RunArgs):
    model: str = TINY_MODEL
    """folder or hub name of a causal language model"""
    task: str = "countdown"
    """countdown, sort, a .jsonl or .parquet file, or a hub dataset; columns prompt (or none), chosen, rejected"""
    num_pairs: int = 2048
    """pairs that countdown and sort make for training; a dataset brings its own"""
    max_steps: int = 100
    """optimizer steps"""
    batch_size: int | None = None
    """pairs in one optimizer step"""
    micro_batch_size: int | None = None
    """pairs in one forward and backward pass; changes memory, not the result"""
    max_length: int | None = None
    """prompt and completion tokens at most; completions are cut there, and longer prompts refused"""
    beta: float = 2.0
    """scale of the rewards, which are log-probabilities per token"""
    gamma: float = 1.0
    """by how much the reward of the chosen completion is to be larger; others give the ratio gamma / beta"""
    sft_coef: float = 0.0
    """weight of the negative log-likelihood per token of chosen completions"""
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
    """held-out prompts and pairs per evaluation"""
    eval_samples: int = 8
    """sampled answers per held-out prompt"""
    eval_max_new_tokens: int | None = None
    """length limit of answers in evaluation"""
    sample_batch_size: int | None = None
    """answers sampled at once in evaluation, rounded to whole prompts; limits the cache's memory"""


class Pair(NamedTuple):
    """Token ids; completions include their EOS."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def simpo_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """-log sigmoid(beta (chosen - rejected) - gamma), from log-probabilities averaged over tokens: (B,), (B,) -> (B,).
    arXiv 2405.14734 equation 6."""
    return -logsigmoid(args.beta * (chosen - rejected) - args.gamma)


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


def preference_metrics(logps: Tensor, beta: float) -> dict[str, float]:
    """Columns from the averaged log-probabilities (N, 2) of the pairs of a step or an evaluation."""
    chosen, rejected = logps.unbind(1)
    right = (chosen > rejected).to(logps.dtype) + (chosen == rejected) / 2
    return {
        "accuracy": right.mean().item(),
        "margin": beta * (chosen - rejected).mean().item(),
        "chosen_logp": chosen.mean().item(),
        "rejected_logp": rejected.mean().item(),
    }


def update(model, optimizer, batch: list[Pair], args: Args) -> dict[str, float]:
    """One optimizer step on pairs. Returns metrics."""
    logps = []
    optimizer.zero_grad(set_to_none=True)
    for start in range(0, len(batch), args.micro_batch_size):
        logps.append(pair_logps(model, batch[start : start + args.micro_batch_size], args))
        loss = simpo_loss(*logps[-1].unbind(1), args)
        if args.sft_coef:
            loss = loss - args.sft_coef * logps[-1][:, 0]
        (loss.sum() / len(batch)).backward()
        logps[-1] = logps[-1].detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    return preference_metrics(torch.cat(logps), args.beta) | {"grad_norm": grad_norm.item()}


@torch.no_grad()
def score_pairs(model, pairs: list[Pair], args: Args) -> Tensor:
    """Averaged log-probabilities of all pairs, (N, 2), in micro-batches as `update` makes them."""
    starts = range(0, len(pairs), args.micro_batch_size)
    return torch.cat([pair_logps(model, pairs[start : start + args.micro_batch_size], args) for start in starts])


def train(args: Args) -> list[dict]:
    device = prepare(args)
    check_numbers(args, RANGES)
    data = load_preferences(args.task, args.num_pairs, args.seed)
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

    # tokens of every pair that the run will see: those of the first epoch, as far as it comes, and the held-out ones
    first_epoch, left = [], len(data.train)
    for step in range(1, args.max_steps + 1):
        first_epoch.append(batch_rows(step)[:left])
        left -= len(first_epoch[-1])
        if left == 0:
            break
    pairs, cut, too_long = {}, 0, []
    for row in [row for some in (heldout, *first_epoch) for row in some]:
        prompt, *completions = encode_pair(rows[row], tokenizer, eos)
        if (room := args.max_length - len(prompt)) < 1:
            too_long.append(len(prompt))
            continue
        cut += any(len(completion) > room for completion in completions)
        pairs[row] = Pair(prompt, *(completion[:room] for completion in completions))
    if too_long:
        raise UserError(
            f"{len(too_long)} prompts have {args.max_length} tokens or more, up to {max(too_long)}: raise --max-length "
            "above that, or drop them from the dataset"
        )
    run = Run(args, "simpo", data.name, args.max_steps, ("accuracy", "margin", "eval/pair_accuracy", "eval/greedy"),
              schedule_depends_on_budget=args.lr_schedule != "constant")  # fmt: skip
    run.print(f"{size / 1e6:.2f}M parameters, settings for a {preset} model: {resolved}")
    run.print(f"{len(data.train)} pairs, {len(heldout)} held-out ones; {cut} pairs have a completion cut off")
    shown = pairs[first_epoch[0][0]]
    run.print(show(tokenizer, shown.prompt, [shown.chosen, shown.rejected], [1, 0], {}))
    if args.precision == "pure-bfloat16" and not args.lora_rank:  # adapters are float32
        run.print(
            "warning: bfloat16 weights round small updates away; raise the learning rate or use --precision bfloat16"
        )
    model.train()

    def evaluation() -> dict[str, float]:
        logps = score_pairs(model, [pairs[row] for row in heldout], args)
        columns = {f"eval/pair_{name}": value for name, value in preference_metrics(logps, args.beta).items()}
        if data.task is not None:
            with autocast(device, args.precision):
                columns |= evaluate(model, tokenizer, data.task, None, args.eval_prompts, args.eval_samples,
                                    args.eval_max_new_tokens, 1.0, args.seed,
                                    rows_at_once=args.sample_batch_size)  # fmt: skip
        return columns

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict()}

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
        columns = update(model, optimizer, [pairs[row] for row in batch_rows(step)], args)
        columns |= {"learning_rate": optimizer.param_groups[0]["lr"], "time/step": time.perf_counter() - start}

        # evaluate
        if step == args.max_steps or (args.eval_every and step % args.eval_every == 0):
            columns |= evaluation()
        run.log(step, **columns)
        run.end_step(step, state)

    answers = tuple(name for name in run.history[-1] if name.startswith("eval/") and "pair" not in name)
    curves = {"pairs ranked right": ("accuracy", "eval/pair_accuracy"), "margin": ("margin", "eval/pair_margin")}
    curves |= {"held-out accuracy": answers} if answers else {}
    return run.finish(lambda folder: save_model(model, tokenizer, folder), curves, f"SimPO on {data.name}")


if __name__ == "__main__":
    main(Args, train)
