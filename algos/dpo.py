r"""Direct Preference Optimization (DPO), and other losses on the same reference-relative log-ratios.

Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward Model" (arXiv
2305.18290, section 4, equation 7). From pairs of a preferred completion y_w and a dispreferred one y_l of a prompt x,
chosen before training, minimises

    L(theta) = - E_(x, y_w, y_l)  log sigmoid( beta [ h(x, y_w) - h(x, y_l) ] )

    h(x, y) = log pi_theta(y | x) - log pi_ref(y | x)   log-ratio, each log-probability the sum over the tokens of y up
                                                        to and including the first EOS
    beta    strength of the KL constraint of the problem that this solves: maximise E r(x, y) - beta KL(pi || pi_ref)
    pi_ref  the policy as it was before the first step

beta h is the implicit reward. With labels drawn from the Bradley-Terry model of a reward r, the minimum over all
policies is pi_ref exp(r / beta) / Z; with labels that are always the same there is none, and margins grow for ever
(tests/test_exact_dpo.py). The other values of --loss stand in LOSSES, each with its formula and paper.

Differences
    - Log-probabilities are summed over tokens in every loss, as in the papers. TRL's DPOTrainer and HALOs average them
      over tokens in IPO; OpenRLHF, oat and TRL's OnlineDPO sum there. --average-logps divides h by the number of tokens
      in any loss: with ipo that is TRL's, with sigmoid and --beta 5 the length-normalised DPO of Tulu 3.
    - The reference is the starting policy. Its log-probabilities are computed once, before training, and kept in the
      checkpoints: no second model is loaded. TRL keeps one unless precompute_ref_log_probs.
    - AdamW, as TRL and most code of today; the paper uses RMSprop.
    - Dropout is off, as in TRL, so that the first margins are 0.
    - --sft-coef adds the negative log-likelihood of y_w per token, averaged over each completion, then over pairs
      (iterative RPO, arXiv 2404.19733). RPO (arXiv 2405.16436) writes the sum over tokens; TRL's "sft" averages over
      all tokens of the batch.
    - Completions longer than --max-length permits are cut at the end and lose their EOS; their number is printed.
      Longer prompts are refused. TRL cuts, too.
    - Means are those of the whole optimizer step, so micro-batches do not change the result.

Metrics
    accuracy       share of the step's pairs with a larger h for y_w; ties count half, so 0.5 at the start; rises
    margin         mean of beta [h(y_w) - h(y_l)]; 0 at the start, rises
    chosen_logratio, rejected_logratio   means of h in nats. Both may fall, for only their difference is trained: a
                   chosen one that falls far means likelihood goes to answers in neither; see --loss dpop, --sft-coef
    eval/pair_accuracy, eval/pair_margin   the same on held-out pairs: far below the training ones is overfitting
    eval/greedy, eval/pass@1, eval/pass@8  as in grpo.py, for the embedded tasks
    grad_norm      before clipping; falls as pairs are told apart
    There is no kl column: an estimate needs samples of the policy, scored by the reference.

Run
    python algos/dpo.py                                                 the embedded model learns countdown
    python algos/dpo.py --task sort --max-steps 40                      a smaller task
    python algos/dpo.py --loss ipo --average-logps                      another loss
    python algos/dpo.py --model ORG/SFT-MODEL --task Anthropic/hh-rlhf --beta 0.1 --batch-size 64 --max-steps 2500 \
        --learning-rate 1e-6 --lr-schedule constant --warmup-steps 150
                                                                        the paper's hyper-parameters (appendix B), one
                                                                        epoch, from a model tuned on the chosen answers
    python algos/dpo.py --model Qwen/Qwen2.5-0.5B-Instruct --task trl-lib/ultrafeedback_binarized --max-steps 1000
    python algos/dpo.py --model ORG/NAME --task pairs.jsonl --lora-rank 32 --gradient-checkpointing

Expect
    The default run: held-out countdown goes from greedy 0.01, pass@1 0.07, pass@8 0.42 to greedy 0.41, pass@1 0.21,
    pass@8 0.73 (seed 1, 128 prompts), in about 50 seconds on one CPU core; with --sft-coef 1 --learning-rate 5e-5 to
    0.52, 0.34, 0.83. GRPO gets to 0.52, 0.48, 0.66 there.
    --task sort --max-steps 40: greedy 0.23 to 0.92, pass@1 0.41 to 0.73, pass@8 0.91 to 0.99, in about half a minute.
    Held-out pairs are all ranked right in every one of these runs, and that is no measure of answers: with
    --learning-rate 1e-4 --lr-schedule constant they are, too, but sort ends at greedy 0.13, pass@1 0.14, pass@8 0.27,
    for chosen answers have become e^9 times less likely. A real model: not measured.
"""

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, sigmoid

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
    "full": dict(learning_rate=1e-6, batch_size=64, micro_batch_size=2, max_length=1024, precision="bfloat16",
                 eval_max_new_tokens=512, sample_batch_size=64),
    "lora": dict(learning_rate=1e-5, batch_size=64, micro_batch_size=2, max_length=1024, precision="bfloat16",
                 eval_max_new_tokens=512, sample_batch_size=64),
}  # fmt: skip
RANGES = {  # what numbers must be
    "at least 1": "num_pairs max_steps batch_size micro_batch_size max_length eval_prompts eval_samples "
    "eval_max_new_tokens sample_batch_size",
    "at least 0": "label_smoothing dpop_lambda sft_coef warmup_steps weight_decay lora_rank eval_every",
    "above 0": "beta discopop_tau learning_rate max_grad_norm",
}
SMOOTHED = ("sigmoid", "robust", "exo")  # the losses that --label-smoothing changes


@dataclass
class Args(RunArgs):
    model: str = TINY_MODEL
    """folder or hub name of a causal language model; also the reference"""
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
    loss: Literal["sigmoid", "robust", "ipo", "hinge", "apo-zero", "apo-down", "sppo-hard", "dpop", "nca", "exo",
                  "discopop"] = "sigmoid"  # fmt: skip
    """what is minimised; sigmoid is DPO"""
    beta: float = 0.1
    """how strongly the policy is held to the reference"""
    label_smoothing: float = 0.0
    """probability that a label is wrong, below 0.5: cDPO with sigmoid; robust; exo, which needs it above 0"""
    dpop_lambda: float = 50.0
    """weight of dpop's penalty on chosen completions that became less likely"""
    discopop_tau: float = 0.05
    """temperature of discopop's mixture"""
    average_logps: bool = False
    """divide each log-ratio by its completion's number of tokens"""
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
    ref_logps: tuple[float, float] = (0.0, 0.0)  # log pi_ref of chosen and of rejected, each summed over its tokens


# Losses: log-ratios h of chosen and rejected, (B,) each -> (B,), to be minimised. D = chosen - rejected below.


def dpo_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """-(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D), e = label_smoothing: DPO, arXiv 2305.18290 equation 7, and
    with e > 0 Mitchell's conservative DPO (2023), whose minimum is where sigmoid(beta D) = 1 - e. Sums; open-instruct
    and TRL's sigmoid_norm have a mean over tokens. TRL has dropped e here."""
    logits, e = args.beta * (chosen - rejected), args.label_smoothing
    return -(1 - e) * logsigmoid(logits) - e * logsigmoid(-logits)


def robust_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """[-(1 - e) log sigmoid(beta D) + e log sigmoid(-beta D)] / (1 - 2 e): over labels that are flipped with
    probability e, its mean is DPO on the true ones (Chowdhury et al. 2024, arXiv 2403.00409). Sums, as TRL."""
    logits, e = args.beta * (chosen - rejected), args.label_smoothing
    return (-(1 - e) * logsigmoid(logits) + e * logsigmoid(-logits)) / (1 - 2 * e)


def ipo_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """(D - 1 / (2 beta))^2, beta being the paper's tau: Azar et al. 2023, arXiv 2310.12036 equation 17. Sums, as
    OpenRLHF, oat and the DPO authors' code; TRL's DPOTrainer and HALOs have means over tokens (--average-logps)."""
    return (chosen - rejected - 1 / (2 * args.beta)) ** 2


def hinge_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """max(0, 1 - beta D): SLiC's hinge on log-ratios, Liu et al. 2023 (RSO), arXiv 2309.06657. Sums, as TRL."""
    return relu(1 - args.beta * (chosen - rejected))


def apo_zero_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """1 - sigmoid(beta h_w) + sigmoid(beta h_l): chosen up, rejected down; for a policy worse than the chosen ones.
    D'Oosterlinck et al. 2024, arXiv 2408.06266 equation 7, plus a constant 1. Sums, as TRL."""
    return 1 - sigmoid(args.beta * chosen) + sigmoid(args.beta * rejected)


def apo_down_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """sigmoid(beta h_w) + 1 - sigmoid(beta D): both down, rejected more; for a policy better than the chosen ones.
    arXiv 2408.06266 equation 8, plus a constant 1. Sums, as TRL."""
    return sigmoid(args.beta * chosen) + 1 - sigmoid(args.beta * (chosen - rejected))


def sppo_hard_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """(h_w - 1 / (2 beta))^2 + (h_l + 1 / (2 beta))^2: Wu et al. 2024, arXiv 2405.00675 equation 4.7, with the
    probability to win, which the paper estimates, set to 1 and 0. Sums, as TRL."""
    target = 1 / (2 * args.beta)
    return (chosen - target) ** 2 + (rejected + target) ** 2


def dpop_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """-log sigmoid(beta (D - lambda max(0, -h_w))): DPO that does not gain by making both less likely. Pal et al. 2024
    (DPO-Positive), arXiv 2402.13228. Sums, as oat; not in TRL."""
    return -logsigmoid(args.beta * (chosen - rejected - args.dpop_lambda * relu(-chosen)))


def nca_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """-log sigmoid(beta h_w) - 1/2 log sigmoid(-beta h_w) - 1/2 log sigmoid(-beta h_l): noise contrastive alignment
    with two completions, Chen et al. 2024, arXiv 2402.05369. Sums, as TRL's nca_pair."""
    chosen, rejected = args.beta * chosen, args.beta * rejected
    return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2


def exo_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """q log(q / (1 - e)) + (1 - q) log((1 - q) / e), q = sigmoid(beta D): KL between the policy's preference and the
    smoothed label, cDPO's turned round. Ji et al. 2024, arXiv 2402.00856 equation 16. Sums, as TRL's exo_pair."""
    logits, e = args.beta * (chosen - rejected), args.label_smoothing
    right, wrong = logsigmoid(logits), logsigmoid(-logits)
    return right.exp() * (right - math.log1p(-e)) + wrong.exp() * (wrong - math.log(e))


def discopop_loss(chosen: Tensor, rejected: Tensor, args: Args) -> Tensor:
    """-(1 - m) log sigmoid(beta D) + m exp(-beta D), m = sigmoid(beta D / tau): found by a language model's search.
    Lu et al. 2024, arXiv 2406.08414 equation 5. Sums, as TRL. Not convex: for tau below 0.102, as the paper's 0.05
    is, it rises at D = 0, so training begins by ranking pairs the wrong way."""
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


def pair_logps(model, pairs: list[Pair], args: Args) -> tuple[Tensor, Tensor]:
    """Log-probabilities summed over completion tokens, and numbers of tokens, (B, 2) each: chosen, rejected. A prompt
    is run once for both."""
    prompt_ids, prompt_mask = pad_left([pair.prompt for pair in pairs], model.device)
    completions = [completion for pair in pairs for completion in (pair.chosen, pair.rejected)]
    width = max(map(len, completions))
    ids = torch.tensor([c + [0] * (width - len(c)) for c in completions], device=model.device)
    lengths = torch.tensor([len(c) for c in completions], device=model.device)
    mask = torch.arange(width, device=model.device) < lengths[:, None]
    with autocast(model.device, args.precision):
        logps, _ = completion_logps(model, prompt_ids, prompt_mask, ids, mask)
    return logps.sum(1).view(-1, 2), lengths.view(-1, 2)


def log_ratios(logps: Tensor, pairs: list[Pair], lengths: Tensor, args: Args) -> Tensor:
    """h of chosen and rejected, (B, 2): sums over tokens, or means with --average-logps."""
    ratios = logps - torch.tensor([pair.ref_logps for pair in pairs], dtype=logps.dtype, device=logps.device)
    return ratios / lengths if args.average_logps else ratios


def preference_metrics(ratios: Tensor, beta: float) -> dict[str, float]:
    """Columns from the log-ratios (N, 2) of the pairs of a step or an evaluation."""
    chosen, rejected = ratios.unbind(1)
    right = (chosen > rejected).to(ratios.dtype) + (chosen == rejected) / 2
    return {
        "accuracy": right.mean().item(),
        "margin": beta * (chosen - rejected).mean().item(),
        "chosen_logratio": chosen.mean().item(),
        "rejected_logratio": rejected.mean().item(),
    }


def update(model, optimizer, batch: list[Pair], args: Args) -> dict[str, float]:
    """One optimizer step on pairs whose reference log-probabilities are known. Returns metrics."""
    ratios = []
    optimizer.zero_grad(set_to_none=True)
    for start in range(0, len(batch), args.micro_batch_size):
        pairs = batch[start : start + args.micro_batch_size]
        logps, lengths = pair_logps(model, pairs, args)
        ratios.append(log_ratios(logps, pairs, lengths, args))
        loss = LOSSES[args.loss](*ratios[-1].unbind(1), args)
        if args.sft_coef:
            loss = loss - args.sft_coef * logps[:, 0] / lengths[:, 0]
        (loss.sum() / len(batch)).backward()
        ratios[-1] = ratios[-1].detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    return preference_metrics(torch.cat(ratios), args.beta) | {"grad_norm": grad_norm.item()}


@torch.no_grad()
def score_pairs(model, pairs: list[Pair], args: Args) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities and log-ratios of all pairs, (N, 2) each, in micro-batches as `update` makes them."""
    logps, ratios = [], []
    for start in range(0, len(pairs), args.micro_batch_size):
        some = pairs[start : start + args.micro_batch_size]
        sums, lengths = pair_logps(model, some, args)
        logps.append(sums)
        ratios.append(log_ratios(sums, some, lengths, args))
    return torch.cat(logps), torch.cat(ratios)


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
    device = prepare(args)
    check_numbers(args, RANGES)
    check_loss(args)
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
    run = Run(args, "dpo", data.name, args.max_steps, ("accuracy", "margin", "eval/pair_accuracy", "eval/greedy"),
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

    # reference log-probabilities, while the policy still is the reference; a resumed run has them, but for pairs that
    # only a larger budget reaches
    reference = torch.full((len(rows), 2), torch.nan) if run.state is None else run.state["reference"]
    if len(reference) != len(rows):
        raise UserError(f"{args.task} has other rows than when the run began: resume with the dataset as it was")
    for some in (heldout, *first_epoch):
        run.leave_if_asked()
        if reference[some].isnan().any():
            reference[some] = score_pairs(model, [pairs[row] for row in some], args)[0].cpu()
    for row in pairs:
        pairs[row] = pairs[row]._replace(ref_logps=tuple(reference[row].tolist()))

    def evaluation() -> dict[str, float]:
        ratios = score_pairs(model, [pairs[row] for row in heldout], args)[1]
        columns = {f"eval/pair_{name}": value for name, value in preference_metrics(ratios, args.beta).items()}
        if data.task is not None:
            with autocast(device, args.precision):
                columns |= evaluate(model, tokenizer, data.task, None, args.eval_prompts, args.eval_samples,
                                    args.eval_max_new_tokens, 1.0, args.seed,
                                    rows_at_once=args.sample_batch_size)  # fmt: skip
        return columns

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict(), "reference": reference}

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
    return run.finish(lambda folder: save_model(model, tokenizer, folder), curves, f"DPO on {data.name}")


if __name__ == "__main__":
    main(Args, train)
