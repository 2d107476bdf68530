r"""Reward model on preference pairs (Bradley-Terry), or an ensemble of them.

Parent: dpo.py. Changed: PRESETS, RANGES, Args (new: use_margin, center_coef, label_noise, ensemble; gone: loss, beta,
label_smoothing, dpop_lambda, discopop_tau, average_logps, sft_coef, eval_samples, eval_max_new_tokens,
sample_batch_size; eval_prompts is 256), Pair, update, score_pairs, preference_metrics, train. Gone: SMOOTHED, LOSSES
and the losses in it (dpo_loss, robust_loss, ipo_loss, hinge_loss, apo_zero_loss, apo_down_loss, sppo_hard_loss,
dpop_loss, nca_loss, exo_loss, discopop_loss), pair_logps, log_ratios, check_loss. Added: pair_scores, reward_loss,
calibration, ensemble_metrics, with_noise, margin_of, load_member, in_float32, save_members, BINS.

Ouyang et al. 2022, "Training language models to follow instructions with human feedback" (arXiv 2203.02155, equation 1
with two answers per prompt), after Stiennon et al. 2020 (arXiv 2009.01325). A transformer with a scalar head in place
of its output layer gives a prompt x and a completion y the score r(x, y), read at the last token, EOS. From pairs of a
preferred y_w and a dispreferred y_l, minimises

    L = E_(x, y_w, y_l)  - log sigmoid( r(x, y_w) - r(x, y_l) - m )  +  c [ r(x, y_w) + r(x, y_l) ]^2

    m    margin: how much better y_w is said to be (--use-margin; Touvron et al. 2023, arXiv 2307.09288, equation 2)
    c    --center-coef: keeps scores near 0 (Eisenstein et al. 2023, arXiv 2312.09244)

If labels are drawn with probability sigmoid(r*(x, y_w) - r*(x, y_l)), the minimum at m = 0, c = 0 is r* plus anything
that depends on x alone, and centring picks one of these (tests/test_exact_reward_model.py). --ensemble K trains K
models on the same pairs, which differ in the seed of the head and in the order of the data (Coste et al. 2023, arXiv
2310.02743).

RUN/model is an ordinary AutoModelForSequenceClassification with one label; of an ensemble, RUN/model/member-1 and so on
are. It is what --reward of the online scripts takes: RUN/model, and for an ensemble RUN/model:mean,
RUN/model:worst-case or RUN/model:uncertainty=0.5 (utils/reward_models.py).

Differences
    - c is 0.01 as in Eisenstein et al.; TRL's default is none. Members of an ensemble can be compared score by score
      only because of it: without, each has a constant of its own for each prompt.
    - The new head is drawn from N(0, 1 / (d + 1)), d the size of the hidden states, as in Stiennon et al.
    - Scores are not brought to mean 0 and standard deviation 1 on a reference set, as Ziegler et al. (2019) do: heads
      of today's decoders have no bias to fold the shift into. --center-coef sees to the mean.
    - A text's sequence is prompt, completion and EOS; a conversation's all that the chat template makes of it, so that
      anyone's from_pretrained and apply_chat_template score the same. TRL's trainers score text without EOS online.
    - Pooling is the model's own, and that of decoders finds the last token by its id not being padding: where padding
      is EOS, another special token takes its place. GPT-2 has none, and is read at the token before EOS.
    - Sequences longer than --max-length are cut and keep their last token, at which scores are read. TRL drops them.
    - Margins are on if --use-margin says so; TRL: if there is such a column. Llama 2's grades are 0 to 1, or 0 to 3.
    - Dropout is off. The cosine decays to 0; Llama 2's to a tenth.

Metrics
    accuracy       share of the step's pairs ranked right; ties count half; rises. An ensemble's: mean over members
    margin         mean of r(x, y_w) - r(x, y_l); rises, without end on labels that are never wrong
    chosen_score, rejected_score   means of r; centred round 0. The scale is what --beta of an online script works on
    eval/pair_accuracy, eval/pair_margin, ...   the same on held-out pairs: far below the training ones is overfitting
    eval/log_likelihood, eval/brier   means of log p and of (1 - p)^2, p = sigmoid(r(x, y_w) - r(x, y_l)); -0.69 and
                   0.25 know nothing; the first falls again where a model is too sure of itself
    eval/ece       expected calibration error (Guo et al. 2017, arXiv 1706.04599). Which of a pair stands first means
                   nothing, so the answer that scores higher does: its predicted probability to be preferred, max(p,
                   1 - p), in ten bins of equal width from 0.5 to 1, against how often it is; the bins' mean absolute
                   difference, weighted by their pairs. Twenty bins on p with each pair in both orders give the same
    eval/ensemble_accuracy, eval/disagreement   (ensembles) accuracy of the mean score; the standard deviation over
                   members of r(x, y_w) - r(x, y_l), mean over pairs
    grad_norm      before clipping

Run
    python algos/reward_model.py                                        pairs of countdown, from the embedded model
    python algos/reward_model.py --task sort --ensemble 4 --num-pairs 256 --label-noise 0.25
                                                                        members that can be wrong in different ways
    python algos/reward_model.py --model meta-llama/Llama-2-7b-chat-hf --task ORG/PAIRS --batch-size 512 \
        --learning-rate 1e-5 --lr-schedule cosine --warmup-steps 30 --weight-decay 0.1 --max-steps 1000 --center-coef 0
                                                                        Llama 2's hyper-parameters (section 3.2.2), one
                                                                        epoch; with --use-margin where there are some
    python algos/reward_model.py --model Qwen/Qwen2.5-0.5B-Instruct --task trl-lib/ultrafeedback_binarized
    python algos/reward_model.py --model ORG/NAME --task pairs.jsonl --lora-rank 32 --gradient-checkpointing

Expect
    The default run: held-out pairs of countdown ranked right go from 0.54 to 1.00, the calibration error to 0.005 (seed
    1, 256 pairs), in half a minute on one thread of a CPU.
    The ensemble on sort, a quarter of 256 labels flipped: 0.94 for one member and 0.95 for the mean of four after 20
    steps, 0.86 and 0.88 after 100, when wrong labels have been learnt by heart (0.98 of the training pairs ranked as
    labelled) and the members disagree most; in one and a half minutes. A real model: not measured.
    What policies trained on such models come to: benchmarks/overoptimisation.py.
"""

import math
import random
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
from utils.lm import TINY_MODEL, autocast, save_model, trained_state, without_dropout
from utils.preferences import load_preferences
from utils.reward_models import encode_answer, load_reward_model, sequence_scores
from utils.run import Run, RunArgs, main, prepare
from utils.schedule import learning_rate
from utils.tasks import epochs

PRESETS = {  # what depends on the model: taken for every argument that is left at None
    "tiny": dict(learning_rate=3e-4, batch_size=64, micro_batch_size=64, max_length=64, precision="float32"),
    "full": dict(learning_rate=1e-5, batch_size=64, micro_batch_size=2, max_length=1024, precision="bfloat16"),
    "lora": dict(learning_rate=1e-4, batch_size=64, micro_batch_size=2, max_length=1024, precision="bfloat16"),
}
RANGES = {  # what numbers must be
    "at least 1": "num_pairs max_steps ensemble batch_size micro_batch_size max_length eval_prompts",
    "at least 0": "center_coef warmup_steps weight_decay lora_rank eval_every",
    "above 0": "learning_rate max_grad_norm",
    "from 0 to 1": "label_noise",
}
BINS = 10  # of the calibration error


@dataclass
class Args(RunArgs):
    model: str = TINY_MODEL
    """folder or hub name of a causal language model, which gets a new head, or of a reward model to train further"""
    task: str = "countdown"
    """countdown, sort, a .jsonl or .parquet file, or a hub dataset; columns prompt (or none), chosen, rejected"""
    num_pairs: int = 2048
    """pairs that countdown and sort make for training; a dataset brings its own"""
    max_steps: int = 100
    """optimizer steps"""
    ensemble: int = 1
    """models trained, each with its own head and order of the data: K"""
    batch_size: int | None = None
    """pairs in one optimizer step"""
    micro_batch_size: int | None = None
    """pairs in one forward and backward pass; changes memory, not the result"""
    max_length: int | None = None
    """prompt and completion tokens at most; what is longer is cut before its last token"""
    use_margin: bool = False
    """subtract the data's column margin from the difference of scores"""
    center_coef: float = 0.01
    """weight of the squared sum of a pair's scores: c"""
    label_noise: float = 0.0
    """share of the training pairs whose labels are flipped, drawn with the seed: for controls, and studies of
    over-optimisation (0.25 in arXiv 2310.02743); held-out pairs keep theirs"""
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
    """train LoRA adapters of this rank and the head instead of all weights (needs peft)"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    trust_remote_code: bool = False
    """run code that comes with the model"""
    eval_every: int = 20
    """steps between evaluations; 0: at the start and the end only"""
    eval_prompts: int = 256
    """held-out pairs per evaluation"""


class Pair(NamedTuple):
    """Token ids of prompt and completion."""

    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


def pair_scores(model, pairs: list[Pair], args: Args) -> Tensor:
    """r of chosen and rejected, (B, 2)."""
    with autocast(model.device, args.precision):
        return sequence_scores(model, [ids for pair in pairs for ids in (pair.chosen, pair.rejected)]).view(-1, 2)


def reward_loss(scores: Tensor, margins: Tensor, center_coef: float) -> Tensor:
    """-log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2, to be minimised (arXiv 2307.09288, equation 2; the second term
    arXiv 2312.09244). Scores (B, 2), margins (B,) -> (B,)."""
    chosen, rejected = scores.unbind(1)
    return -logsigmoid(chosen - rejected - margins) + center_coef * (chosen + rejected) ** 2


def preference_metrics(scores: Tensor) -> dict[str, float]:
    """Columns from the scores (N, 2) of the pairs of a step or an evaluation."""
    chosen, rejected = scores.unbind(1)
    right = (chosen > rejected).to(scores.dtype) + (chosen == rejected) / 2
    return {
        "accuracy": right.mean().item(),
        "margin": (chosen - rejected).mean().item(),
        "chosen_score": chosen.mean().item(),
        "rejected_score": rejected.mean().item(),
    }


def calibration(scores: Tensor) -> dict[str, float]:
    """How far sigmoid(r_w - r_l) is from how often y_w is preferred, which in these pairs (N, 2) is always: see Metrics
    for what that leaves to measure."""
    differences = scores[:, 0] - scores[:, 1]
    confidence = differences.abs().sigmoid()  # predicted probability that the higher score is preferred
    right = (differences > 0).to(scores.dtype) + (differences == 0) / 2
    bins = ((confidence - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=scores.dtype, device=scores.device).index_add(0, bins, confidence - right)
    return {
        "log_likelihood": logsigmoid(differences).mean().item(),
        "brier": (-differences).sigmoid().square().mean().item(),
        "ece": gaps.abs().sum().item() / len(scores),
    }


def ensemble_metrics(scores: Tensor) -> dict[str, float]:
    """Columns of an evaluation, from the scores (K, N, 2) of K members: their means, and what only several have."""
    columns = [
        {f"eval/pair_{name}": value for name, value in preference_metrics(some).items()}
        | {f"eval/{name}": value for name, value in calibration(some).items()}
        for some in scores
    ]
    means = {name: sum(c[name] for c in columns) / len(columns) for name in columns[0]}
    if len(scores) == 1:
        return means
    return means | {
        "eval/ensemble_accuracy": preference_metrics(scores.mean(0))["accuracy"],
        "eval/disagreement": (scores[..., 0] - scores[..., 1]).std(0, correction=0).mean().item(),
    }


def update(model, optimizer, batch: list[Pair], args: Args) -> dict[str, float]:
    """One optimizer step of one model. Returns metrics."""
    scores = []
    optimizer.zero_grad(set_to_none=True)
    for start in range(0, len(batch), args.micro_batch_size):
        pairs = batch[start : start + args.micro_batch_size]
        scores.append(pair_scores(model, pairs, args))
        margins = scores[-1].new_tensor([pair.margin for pair in pairs])
        loss = reward_loss(scores[-1], margins, args.center_coef)
        (loss.sum() / len(batch)).backward()
        scores[-1] = scores[-1].detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    return preference_metrics(torch.cat(scores)) | {"grad_norm": grad_norm.item()}


@torch.no_grad()
def score_pairs(model, pairs: list[Pair], args: Args) -> Tensor:
    """Scores of all pairs, (N, 2), in micro-batches as `update` makes them."""
    size = args.micro_batch_size
    return torch.cat([pair_scores(model, pairs[i : i + size], args) for i in range(0, len(pairs), size)])


def with_noise(rows: list[dict], share: float, seed: int) -> list[dict]:
    """The rows with chosen and rejected exchanged in exactly that share of them, which the seed chooses."""
    flipped = set(random.Random(f"label noise/{seed}").sample(range(len(rows)), round(share * len(rows))))
    swapped = lambda row: row | {"chosen": row["rejected"], "rejected": row["chosen"]}  # noqa: E731
    return [swapped(row) if i in flipped else row for i, row in enumerate(rows)]


def margin_of(row: dict, args: Args) -> float:
    """The row's margin, 0 without --use-margin. Raises UserError where it has none."""
    if not args.use_margin:
        return 0.0
    margin = row.get("margin")
    if not isinstance(margin, (int, float)) or not math.isfinite(margin):
        raise UserError(f"a pair of {args.task} has the margin {margin}: --use-margin needs a column margin of numbers")
    return float(margin)


def in_float32(head: torch.nn.Linear):
    """Its forward pass, in float32 under autocast too: bfloat16 scores between 2 and 4 would be 1/64 apart."""

    def forward(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.to(head.weight.dtype), head.weight, head.bias)

    return forward


def load_member(seed: int, device: torch.device, args: Args):
    """The model of --model, with a head drawn from `seed` if it has none, and its tokenizer."""
    dtype = torch.bfloat16 if args.precision == "pure-bfloat16" else torch.float32
    model, tokenizer, is_new = load_reward_model(args.model, device, "--model", dtype, new_head=True,
                                                 trust_remote_code=args.trust_remote_code)  # fmt: skip
    head = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 1][-1]
    if is_new:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(head.weight.shape, generator=generator) / math.sqrt(head.in_features + 1)
        head.weight.data.copy_(weight)
    if args.lora_rank:
        try:
            import peft
        except ImportError as error:
            raise UserError("--lora-rank needs peft: pip install peft") from error
        rank = args.lora_rank
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="SEQ_CLS")
        model = peft.get_peft_model(model, config)
    for module in model.modules():  # with LoRA the head that is trained is a copy
        if isinstance(module, torch.nn.Linear) and module.out_features == 1:
            module.forward = in_float32(module)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if args.lora_rank:
            model.enable_input_require_grads()
    without_dropout(model)
    return model, tokenizer


def save_members(members: list, tokenizer, folder: Path) -> None:
    """One model in `folder`, several in member-1, member-2, ... there."""
    for k, model in enumerate(members, 1):
        save_model(model, tokenizer, folder / f"member-{k}" if len(members) > 1 else folder)


def train(args: Args) -> list[dict]:
    device = prepare(args)
    check_numbers(args, RANGES)
    data = load_preferences(args.task, args.num_pairs, args.seed)
    seeds = [args.seed + 1_000_003 * k for k in range(args.ensemble)]
    loaded = [load_member(seed, device, args) for seed in seeds]
    members, tokenizer = [model for model, _ in loaded], loaded[0][1]
    size = sum(p.numel() for p in members[0].parameters())
    preset = "lora" if args.lora_rank else "tiny" if size < 10e6 else "full"
    resolved = {name: value for name, value in PRESETS[preset].items() if getattr(args, name) is None}
    for name, value in resolved.items():
        setattr(args, name, value)
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                          weight_decay=args.weight_decay, fused=True)
        for model in members
    ]  # fmt: skip

    rows = with_noise(data.train, args.label_noise, args.seed) + data.heldout[: args.eval_prompts]
    orders = [epochs(range(len(data.train))) for _ in members]
    heldout = list(range(len(data.train), len(rows)))

    def batch_rows(step: int, member: int) -> list[int]:
        first = (step - 1) * args.batch_size
        return [orders[member](i, seeds[member]) for i in range(first, first + args.batch_size)]

    # tokens of every pair that the run will see: those of the first epochs, as far as they come, and the held-out ones
    steps = range(1, 1 + min(args.max_steps, -(-len(data.train) // args.batch_size)))
    seen = dict.fromkeys(row for member in range(args.ensemble) for step in steps for row in batch_rows(step, member))
    pairs, cut, equal = {}, 0, 0
    for row in [*seen, *heldout]:
        chosen, rejected = whole = [encode_answer(rows[row], rows[row][c], tokenizer) for c in ("chosen", "rejected")]
        if max(map(len, whole)) > args.max_length:
            cut += 1
            chosen, rejected = (s[: args.max_length - 1] + s[-1:] if len(s) > args.max_length else s for s in whole)
            equal += chosen == rejected != whole[1]
        pairs[row] = Pair(chosen, rejected, margin_of(rows[row], args))
    if equal == len(pairs):
        raise UserError(f"all pairs are equal in their first {args.max_length} tokens: raise --max-length")
    run = Run(args, "reward_model", data.name, args.max_steps,
              ("accuracy", "margin", "eval/pair_accuracy", "eval/ece"),
              schedule_depends_on_budget=args.lr_schedule != "constant")  # fmt: skip
    run.print(f"{size / 1e6:.2f}M parameters, settings for a {preset} model: {resolved}")
    run.print(f"{len(data.train)} pairs, {len(heldout)} held-out ones; {cut} pairs have a completion cut off")
    if equal:
        run.print(f"{equal} pairs are equal in what is left of them, and teach nothing: raise --max-length")
    for name, ids in zip(("chosen", "rejected"), pairs[next(iter(seen))]):
        run.print(f"{name:8} {tokenizer.decode(ids)!r}")
    if tokenizer.pad_token == tokenizer.eos_token:
        run.print("the tokenizer pads with EOS: scores are read at the last token before it")
    if args.precision == "pure-bfloat16" and not args.lora_rank:  # adapters are float32
        run.print(
            "warning: bfloat16 weights round small updates away; raise the learning rate or use --precision bfloat16"
        )
    for model in members:
        model.train()

    def evaluation() -> dict[str, float]:
        some = [pairs[row] for row in heldout]
        return ensemble_metrics(torch.stack([score_pairs(model, some, args) for model in members]))

    def state() -> dict:
        return {"members": [trained_state(model) for model in members], "rows": len(rows),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers]}  # fmt: skip

    step = 0
    if run.state is not None:
        if run.state["rows"] != len(rows):
            raise UserError(f"{args.task} has other rows than when the run began: resume with the dataset as it was")
        for model, weights in zip(members, run.state["members"]):
            model.load_state_dict(weights, strict=False)
        for optimizer, moments in zip(optimizers, run.state["optimizers"]):
            optimizer.load_state_dict(moments)
        step = run.state["step"]
    else:
        run.log(0, **evaluation())
        run.save(0, state())
    run.restore_rng()
    while step < args.max_steps:
        step, start = step + 1, time.perf_counter()
        rate = learning_rate(step, args.learning_rate, args.lr_schedule, args.warmup_steps, args.max_steps)

        # update
        updated = []
        for member, (model, optimizer) in enumerate(zip(members, optimizers)):
            for group in optimizer.param_groups:
                group["lr"] = rate
            updated.append(update(model, optimizer, [pairs[row] for row in batch_rows(step, member)], args))
        columns = {name: sum(some[name] for some in updated) / len(updated) for name in updated[0]}
        columns |= {"learning_rate": rate, "time/step": time.perf_counter() - start}

        # evaluate
        if step == args.max_steps or (args.eval_every and step % args.eval_every == 0):
            columns |= evaluation()
        run.log(step, **columns)
        run.end_step(step, state)

    curves = {"pairs ranked right": ("accuracy", "eval/pair_accuracy", "eval/ensemble_accuracy"),
              "margin": ("margin", "eval/pair_margin"), "calibration": ("eval/ece", "eval/brier")}  # fmt: skip
    return run.finish(lambda folder: save_members(members, tokenizer, folder), curves, f"reward model on {data.name}")


if __name__ == "__main__":
    main(Args, train)
