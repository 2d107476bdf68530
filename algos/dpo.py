r"""Direct Preference Optimization (DPO), and other losses on the same reference-relative log-ratios.

Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward Model" (arXiv
2305.18290, section 4, equation 7).

Learns from pairs of a preferred and a dispreferred answer. Relative to the starting policy, it makes the preferred one
more likely than the other. That solves the KL-constrained reward problem without a reward model. Minimises

    L(theta) = - E_(x, y_w, y_l)  log sigmoid( beta [ h(x, y_w) - h(x, y_l) ] )

    x, y_w, y_l   a prompt, its preferred and its dispreferred completion, chosen before training
    h(x, y) = log pi_theta(y | x) - log pi_ref(y | x)   log-ratio; each term sums over the tokens of y up to and
                                                        including the first EOS
    beta     --beta: how strongly the policy is held to pi_ref
    pi_ref   the policy before the first step

If the labels follow the Bradley-Terry model of a reward r(x, y), the policy pi that minimises L also maximises
E r(x, y) - beta KL(pi || pi_ref). It is pi_ref exp(r / beta) / Z(x), where Z normalises; beta h is the implicit reward.
If the labels never contradict each other, there is no minimum, and margins grow for ever. LOSSES has the other values
of --loss, each with formula and paper.

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
    The default run takes 20 seconds on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.08,
    pass@8 0.43 to greedy 0.41, pass@1 0.24, pass@8 0.75 (seed 1, 128 prompts); with --sft-coef 1 --learning-rate 5e-5
    to 0.52, 0.34, 0.83. GRPO gets to 0.58, 0.53, 0.69 there.
    --task sort --max-steps 40: greedy 0.23 to 0.92, pass@1 0.40 to 0.73, pass@8 0.88 to 0.99, in about half a minute.
    All these runs rank every held-out pair right. That says little about answers: sort with --learning-rate 1e-4
    --lr-schedule constant also does, yet ends at greedy 0.13, pass@1 0.14, pass@8 0.27. Its chosen answers became e^9
    times less likely. Real models: not measured.

Metrics
    accuracy       share of the step's pairs with a larger h for y_w; ties count half, so 0.5 at the start; rises
    margin         mean of beta [h(y_w) - h(y_l)]; 0 at the start, rises
    chosen_logratio, rejected_logratio   means of h in nats. Only their difference is trained, so both may fall. If the
                   chosen one falls far, probability goes to answers in neither: see --loss dpop, --sft-coef
    eval/pair_accuracy, eval/pair_margin   the same on held-out pairs; far below the training ones is overfitting
    eval/greedy, eval/pass@1, eval/pass@8  as in grpo.py, for the embedded tasks
    grad_norm      before clipping; falls as pairs are told apart
    There is no kl column: an estimate needs samples of the policy, scored by the reference.

Differences
    - Every loss sums log-probabilities over tokens, as the papers write. --average-logps divides h by the number of
      tokens. With ipo that is what the paper's results were made with, and the IPO of TRL's DPOTrainer and HALOs; with
      sigmoid and --beta 5 it is the length-normalised DPO of Tulu 3.
    - The reference's log-probabilities are computed once, before training, and kept in the checkpoints; until then
      they are saved once a minute, and --resume goes on from there. No second model is loaded. TRL keeps one unless
      precompute_ref_log_probs is set.
    - AdamW, as TRL and most code of today; the paper uses RMSprop.
    - Dropout is off, as in TRL, so that the first margins are 0.
    - Completions beyond --max-length are cut at the end and lose their EOS; their number is printed. Prompts beyond it
      are refused. TRL cuts, too.
    - Means are those of the whole optimizer step, so micro-batches do not change the result.
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
from utils.checks import check_model
from utils.cli import main, prepare
from utils.distributed import clip_gradients, deal, share, total, unsharded
from utils.errors import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UserError
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

NAME, TITLE = "dpo", "DPO"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-5, batch_size=64, micro_batch_size=64, max_length=64, precision="float32",
                 eval_max_new_tokens=20, sample_batch_size=512, micro_batch_tokens=0),
    "full": dict(learning_rate=1e-6, batch_size=64, micro_batch_size=32, max_length=1024, precision="bfloat16",
                 eval_max_new_tokens=512, sample_batch_size=64, micro_batch_tokens=4096),
    "lora": dict(learning_rate=1e-5, batch_size=64, micro_batch_size=32, max_length=1024, precision="bfloat16",
                 eval_max_new_tokens=512, sample_batch_size=64, micro_batch_tokens=4096),
}  # fmt: skip
SMOOTHED = ("sigmoid", "robust", "exo")  # the losses that --label-smoothing changes


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
    loss: Literal["sigmoid", "robust", "ipo", "hinge", "apo-zero", "apo-down", "sppo-hard", "dpop", "nca", "exo",
                  "discopop"] = "sigmoid"  # fmt: skip
    """what is minimised; sigmoid is DPO"""
    beta: PositiveFloat = 0.1
    """how strongly the policy is held to the reference"""
    label_smoothing: NonNegativeFloat = 0.0
    """probability that a label is wrong, below 0.5: for sigmoid (then cDPO), robust, and exo, which needs it above 0"""
    dpop_lambda: NonNegativeFloat = 50.0
    """weight of dpop's penalty on chosen completions that became less likely"""
    discopop_tau: PositiveFloat = 0.05
    """temperature of discopop's mixture"""
    average_logps: bool = False
    """divide each log-ratio by its completion's number of tokens"""
    sft_coef: NonNegativeFloat = 0.0
    """weight of the negative log-likelihood per token of chosen completions (iterative RPO, arXiv 2404.19733)"""
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
    ref_logps: tuple[float, float] = (0.0, 0.0)  # log pi_ref of chosen and of rejected, each summed over its tokens


# Losses: log-ratios h of chosen and rejected, (B,) each -> (B,), to be minimised. D = chosen - rejected below.


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


def micro_batches(pairs: list[Pair], args: Args) -> list[list[int]]:
    """The numbers of the pairs in each."""
    lengths = [2 * (len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))) for pair in pairs]
    return split_rows(lengths, args.micro_batch_size, args.micro_batch_tokens)


def update(model, optimizer, batch: list[Pair], args: Args) -> dict[str, float]:
    """One optimizer step on pairs whose reference log-probabilities are known. Returns metrics."""
    ratios = torch.zeros(len(batch), 2, device=model.device)
    optimizer.zero_grad(set_to_none=True)
    for rows, counts in deal(micro_batches(batch, args), model):  # to this process, of perhaps several
        pairs = [batch[row] for row in rows]
        logps, lengths = pair_logps(model, pairs, args)
        some = log_ratios(logps, pairs, lengths, args)
        chosen, rejected = some.unbind(1)
        loss = LOSSES[args.loss](chosen, rejected, args)
        if args.sft_coef:  # per token of each completion; RPO (arXiv 2405.16436) sums, TRL's "sft" averages over all
            loss = loss - args.sft_coef * logps[:, 0] / lengths[:, 0]
        (counts * loss.sum() / len(batch)).backward()
        ratios[rows] += counts * some.detach()
    grad_norm = clip_gradients(model.parameters(), args.max_grad_norm)
    optimizer.step()
    return preference_metrics(total(ratios), args.beta) | {"grad_norm": grad_norm.item()}


@torch.no_grad()
def score_pairs(model, pairs: list[Pair], args: Args) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities and log-ratios of all pairs, (N, 2) each, in micro-batches as `update` makes them."""
    logps, ratios = torch.zeros(2, len(pairs), 2, device=model.device)
    with unsharded(model):
        for rows in share(micro_batches(pairs, args)):
            some = [pairs[row] for row in rows]
            logps[rows], lengths = pair_logps(model, some, args)
            ratios[rows] = log_ratios(logps[rows], some, lengths, args)
    return total(logps), total(ratios)


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
    check_loss(args)
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

    # reference log-probabilities, while the policy still is the reference; a resumed run only lacks those of pairs that
    # it had not come to, or that a larger budget adds
    reference = torch.full((len(rows), 2), torch.nan) if run.state is None else run.state["reference"]
    if len(reference) != len(rows):
        raise UserError(f"{args.task} has other rows than when the run began: resume with the dataset as it was")
    for some in (heldout, *batches.first_epoch(args.max_steps)):
        run.save_early({"reference": reference})
        if reference[some].isnan().any():
            reference[some] = score_pairs(model, [pairs[row] for row in some], args)[0].cpu()

    def with_reference(some: list[int]) -> list[Pair]:
        return [pairs[row]._replace(ref_logps=tuple(reference[row].tolist())) for row in some]

    def evaluation() -> dict[str, float]:
        ratios = score_pairs(model, with_reference(heldout), args)[1]
        columns = {f"eval/pair_{name}": value for name, value in preference_metrics(ratios, args.beta).items()}
        if data.task is not None:
            columns |= evaluate(model, tokenizer, data.task, None, args.eval_prompts, args.eval_samples,
                                args.eval_max_new_tokens, 1.0, args.seed, rows_at_once=args.sample_batch_size,
                                precision=args.precision)  # fmt: skip
        return columns

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict(), "reference": reference}

    if not run.restore(model=model, optimizer=optimizer):
        run.log(0, **evaluation())
        run.save(0, state())
    while run.step < args.max_steps:
        step, start = run.step + 1, time.perf_counter()
        rate = set_learning_rate(optimizer, step, args)

        # update
        columns = update(model, optimizer, with_reference(batches(step)), args)
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
