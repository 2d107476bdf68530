r"""Direct Preference Optimization (DPO), and other losses on the same reference-relative log-ratios.

Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward Model" (arXiv
2305.18290, section 4, equation 7).

Learns from pairs of a preferred and a dispreferred answer. Relative to the starting policy, it makes the preferred one
more likely than the other, which solves the KL-constrained reward problem without a reward model. Minimises

    L(theta) = - E_(x, y_w, y_l)  log sigmoid( beta [ h(x, y_w) - h(x, y_l) ] )

    x, y_w, y_l   a prompt, its preferred and its dispreferred completion, chosen before training
    h(x, y) = log pi_theta(y | x) - log pi_ref(y | x)   log-ratio; each term sums over the tokens of y up to and
                                                        including the first EOS
    beta     --beta: how strongly the policy is held to pi_ref
    pi_ref   the policy before the first step

If labels follow the Bradley-Terry model of a reward r(x, y), the policy that minimises L also maximises
E r(x, y) - beta KL(pi || pi_ref): it is pi_ref exp(r / beta) / Z(x), and beta h is the implicit reward. If labels never
contradict each other, there is no minimum, and margins grow for ever. LOSSES has the other values of --loss.

Run
    python algos/dpo.py                                      the 0.8M-parameter model of utils/tiny_model, countdown
    python algos/dpo.py --task sort --max-steps 40           a smaller task
    python algos/dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --task trl-lib/ultrafeedback_binarized --max-steps 1000
    python algos/dpo.py --model ORG/NAME --task pairs.jsonl --lora-rank 32 --gradient-checkpointing
    The paper's own run and other losses: algos/README.md.

Expect
    The default run takes 40 seconds on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.09, pass@8 0.45
    to greedy 0.41, pass@1 0.25, pass@8 0.73. --task sort --max-steps 40: greedy 0.23 to 0.92. Both rank every held-out
    pair right. That says little about answers: sort with --learning-rate 1e-4 also does, and ends at greedy 0.13.

Metrics
    accuracy       share of the step's pairs with a larger h for y_w; ties count half, so 0.5 at the start; rises
    margin         mean of beta [h(y_w) - h(y_l)]; 0 at the start, rises
    chosen_logratio, rejected_logratio   means of h in nats. Only their difference is trained, so both may fall. If the
                   chosen one falls far, probability goes to answers in neither: see --loss dpop, --sft-coef
    eval/pair_accuracy, eval/pair_margin   the same on held-out pairs; far below the training ones is overfitting

Differences
    - Every loss sums log-probabilities over tokens, as the papers write. --average-logps divides h by the number of
      tokens: with ipo as in the paper's results and in TRL; with sigmoid and --beta 5 as in Tulu 3.
    - AdamW, as in most code of today; the paper uses RMSprop. Dropout is off: in float32 the first margins are 0.
    - Completions beyond --max-length are cut at the end and lose their EOS, as in TRL; `truncated` is their share.
      Longer prompts are dropped.
"""

import math
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, sigmoid

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.core import Run, UserError, main, prepare
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

NAME, TITLE = "dpo", "DPO"
LARGE = dict(learning_rate=1e-6, micro_batch_size=64, micro_batch_tokens=4096, max_length=1024, sample_batch_size=64,
             eval_max_new_tokens=512, precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-5, micro_batch_size=128, micro_batch_tokens=0, max_length=64, sample_batch_size=512,
                 eval_max_new_tokens=20, precision="float32"),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=1e-5),
}  # fmt: skip
SMOOTHED = ("sigmoid", "robust", "exo")  # the losses that --label-smoothing changes


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
    batch_size: int = 64
    """pairs in one optimizer step, of all processes"""
    micro_batch_size: int | None = None
    """completions in one forward and backward pass; changes memory, not the result"""
    max_length: int | None = None
    """prompt and completion tokens at most; completions are cut there"""
    max_prompt_length: int | None = None
    """longer prompts are dropped; None: those that leave a completion no room in --max-length"""
    loss: Literal["sigmoid", "robust", "ipo", "hinge", "apo-zero", "apo-down", "sppo-hard", "dpop", "nca", "exo",
                  "discopop"] = "sigmoid"  # fmt: skip
    """what is minimised; sigmoid is DPO"""
    beta: float = 0.1
    """how strongly the policy is held to the reference"""
    label_smoothing: float = 0.0
    """probability that a label is wrong, below 0.5: for sigmoid (then cDPO), robust, and exo, which needs it above 0"""
    dpop_lambda: float = 50.0
    """weight of dpop's penalty on chosen completions that became less likely"""
    discopop_tau: float = 0.05
    """temperature of discopop's mixture"""
    average_logps: bool = False
    """divide each log-ratio by its completion's number of tokens"""
    sft_coef: float = 0.0
    """weight of the negative log-likelihood per token of chosen completions (iterative RPO, arXiv 2404.19733)"""
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


class Batch(NamedTuple):
    """What this process learns from in one step. P pairs, B = 2 P completions: chosen and rejected of each pair."""

    samples: Samples
    ref_logps: Tensor  # (B, T)


# Losses: log-ratios h of chosen and rejected, (P,) each -> (P,), to be minimised. D = chosen - rejected below.


def dpo_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """-(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D), e = label_smoothing: DPO, arXiv 2305.18290 equation 7, and
    with e > 0 conservative DPO (Mitchell 2023), with its minimum at sigmoid(beta D) = 1 - e. TRL has dropped e here."""
    logits, e = args.beta * (chosen - rejected), args.label_smoothing
    return -(1 - e) * logsigmoid(logits) - e * logsigmoid(-logits)


def robust_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """[-(1 - e) log sigmoid(beta D) + e log sigmoid(-beta D)] / (1 - 2 e): its mean over labels flipped
    with probability e is DPO's loss on the true labels (Chowdhury et al. 2024, arXiv 2403.00409)."""
    logits, e = args.beta * (chosen - rejected), args.label_smoothing
    return (-(1 - e) * logsigmoid(logits) + e * logsigmoid(-logits)) / (1 - 2 * e)


def ipo_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """(D - 1 / (2 beta))^2, beta being the paper's tau: Azar et al. 2023, arXiv 2310.12036 equation 17. The paper does
    not say that its results are of h divided by the number of tokens (--average-logps); its authors confirmed it to
    TRL's (comment in TRL's DPOTrainer)."""
    return (chosen - rejected - 1 / (2 * args.beta)) ** 2


def hinge_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """max(0, 1 - beta D): SLiC's hinge on log-ratios, Liu et al. 2023 (RSO), arXiv 2309.06657."""
    return relu(1 - args.beta * (chosen - rejected))


def apo_zero_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """1 - sigmoid(beta h_w) + sigmoid(beta h_l): chosen up, rejected down; for a policy worse than the chosen ones.
    D'Oosterlinck et al. 2024, arXiv 2408.06266 equation 7, plus a constant 1."""
    return 1 - sigmoid(args.beta * chosen) + sigmoid(args.beta * rejected)


def apo_down_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """sigmoid(beta h_w) + 1 - sigmoid(beta D): both down, rejected more; for a policy better than the chosen ones.
    arXiv 2408.06266 equation 8, plus a constant 1."""
    return sigmoid(args.beta * chosen) + 1 - sigmoid(args.beta * (chosen - rejected))


def sppo_hard_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """(h_w - 1 / (2 beta))^2 + (h_l + 1 / (2 beta))^2: Wu et al. 2024, arXiv 2405.00675 equation 4.7, with the
    probability to win, which the paper estimates, set to 1 and 0."""
    target = 1 / (2 * args.beta)
    return (chosen - target) ** 2 + (rejected + target) ** 2


def dpop_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """-log sigmoid(beta (D - lambda max(0, -h_w))): DPO that does not gain by making both less likely. Pal et al. 2024
    (DPO-Positive), arXiv 2402.13228. TRL lacks it."""
    return -logsigmoid(args.beta * (chosen - rejected - args.dpop_lambda * relu(-chosen)))


def nca_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """-log sigmoid(beta h_w) - 1/2 log sigmoid(-beta h_w) - 1/2 log sigmoid(-beta h_l): noise contrastive alignment
    with two completions, Chen et al. 2024, arXiv 2402.05369. TRL's nca_pair."""
    chosen, rejected = args.beta * chosen, args.beta * rejected
    return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2


def exo_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """q log(q / (1 - e)) + (1 - q) log((1 - q) / e), q = sigmoid(beta D): KL(q || smoothed label), where cDPO has
    KL(smoothed label || q). Ji et al. 2024, arXiv 2402.00856 equation 16. TRL's exo_pair."""
    logits, e = args.beta * (chosen - rejected), args.label_smoothing
    right, wrong = logsigmoid(logits), logsigmoid(-logits)
    return right.exp() * (right - math.log1p(-e)) + wrong.exp() * (wrong - math.log(e))


def discopop_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """-(1 - m) log sigmoid(beta D) + m exp(-beta D), m = sigmoid(beta D / tau): found by a language model's search.
    Lu et al. 2024, arXiv 2406.08414 equation 5. Not convex: at tau below 0.102, such as the paper's 0.05, it
    rises at D = 0, so training begins by ranking pairs the wrong way."""
    logits = args.beta * (chosen - rejected)
    mixed = logits / args.discopop_tau
    exponential = (logsigmoid(mixed) - logits).exp()  # in one exponent: m is 0 where exp(-beta D) overflows
    return -sigmoid(-mixed) * logsigmoid(logits) + exponential


LOSSES = {
    "sigmoid": dpo_loss,
    "robust": robust_loss,
    "ipo": ipo_loss,
    "hinge": hinge_loss,
    "apo-zero": apo_zero_loss,
    "apo-down": apo_down_loss,
    "sppo-hard": sppo_hard_loss,
    "dpop": dpop_loss,
    "nca": nca_loss,
    "exo": exo_loss,
    "discopop": discopop_loss,
}


def log_ratios(model, inputs: tuple, ref_logps: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """h of chosen and rejected completions, (P, 2): sums over tokens, or means with --average-logps. And the mean
    log-probability of a token of each, (P, 2). inputs: what completion_logps takes."""
    with autocast(model, args.precision):
        logps, _ = completion_logps(model, *inputs)
    rows, width = len(ref_logps), logps.shape[1]
    logps, lengths = logps[:rows], inputs[-1][:rows].sum(1)  # no rows: an empty pass, which --fsdp may need
    ratios = (logps - ref_logps[:, :width]).sum(1)
    if args.average_logps:
        ratios = ratios / lengths
    return ratios.view(-1, 2), (logps.sum(1) / lengths).view(-1, 2)


def preference_metrics(ratios: Tensor, beta: float) -> dict[str, Tensor]:
    """Columns for each pair, (P,), from the log-ratios (P, 2)."""
    chosen, rejected = ratios.unbind(1)
    right = (chosen > rejected).to(ratios.dtype) + (chosen == rejected) / 2
    margin = beta * (chosen - rejected)
    return {"accuracy": right, "margin": margin, "chosen_logratio": chosen, "rejected_logratio": rejected}


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """One optimizer step. Returns metrics."""
    samples, ref_logps = batch
    count, means = total(torch.tensor(len(samples.prompt_ids))), Means()
    optimizer.zero_grad(set_to_none=True)
    for rows, inputs in micro_batches(samples, args, together=2):
        ratios, likelihood = log_ratios(model, inputs, ref_logps[rows], args)
        chosen, rejected = ratios.unbind(1)
        loss = LOSSES[args.loss](chosen, rejected, args)
        if args.sft_coef:  # per token of each completion; RPO (arXiv 2405.16436) sums, TRL's "sft" averages over all
            loss = loss - args.sft_coef * likelihood[:, 0]
        (loss.sum() / count).backward()
        means.add(torch.ones_like(chosen), **preference_metrics(ratios, args.beta))
    grad_norm = clip_gradients(model, args.max_grad_norm)
    optimizer.step()
    truncated = 1 - samples.ended.float().mean().item()
    return means.read() | {"grad_norm": grad_norm.item(), "truncated": truncated}


@torch.no_grad()
def score_pairs(model, batch: Batch, args: Args) -> dict[str, float]:
    """The metrics of pairs that are not trained on."""
    samples, ref_logps = batch
    means = Means()
    for rows, inputs in micro_batches(samples, args, together=2):
        ratios, _ = log_ratios(model, inputs, ref_logps[rows], args)
        means.add(torch.ones_like(ratios[:, 0]), **preference_metrics(ratios, args.beta))
    return means.read()


@torch.no_grad()
def reference_logps(model, reference, samples: Samples, args: Args) -> Tensor:
    """Log-probabilities (B, T) under the reference: a model, or the policy without its LoRA adapters."""
    out, scorer = torch.zeros_like(samples.logps), reference or model
    without_adapters = nullcontext() if reference else model.disable_adapter()
    with without_adapters, autocast(model, args.precision):
        for rows, inputs in micro_batches(samples, args, together=2):
            logps, _ = completion_logps(scorer, *inputs)
            out[rows, : logps.shape[1]] = logps
    return out


def check_loss(args: Args) -> None:
    """Raises UserError where --label-smoothing does not fit --loss."""
    if args.label_smoothing >= 0.5:
        raise UserError(f"--label-smoothing is {args.label_smoothing}: it must be below 0.5, or labels mean nothing")
    if args.label_smoothing and args.loss not in SMOOTHED:
        raise UserError(
            f"--label-smoothing does nothing to --loss {args.loss}, but to {', '.join(SMOOTHED)}: leave it at 0"
        )
    if args.loss == "exo" and not args.label_smoothing:
        raise UserError("--loss exo needs --label-smoothing above 0, such as 0.001: its target is infinite without")


def train(args: Args) -> list[dict]:
    device = start(prepare(args))
    check_loss(args)
    data = load_pairs(args.task, args.num_pairs, args.seed, args.prompt_column)
    model, tokenizer = load_model(args, device)
    settings = resolve(model, args, PRESETS)
    reference = None if args.lora_rank else load_model(args, device, frozen=True)[0]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  weight_decay=args.weight_decay, fused=True)  # fmt: skip
    eos = model.generation_config.eos_token_id

    def encode(row: dict) -> tuple[list[int], ...]:
        return encode_answers(row, [row["chosen"], row["rejected"]], tokenizer, eos, args.max_length)

    def make_batch(rows: list[dict]) -> Batch:
        samples = as_samples([encode(row) for row in rows], args.max_length, device)
        return Batch(samples, reference_logps(model, reference, samples, args))

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
            run.print(shown(batch.samples, tokenizer, [1, 0]))
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
