r"""Reward model on preference pairs (Bradley-Terry), or an ensemble of them.

Ouyang et al. 2022, "Training language models to follow instructions with human feedback" (arXiv 2203.02155, equation 1
with two answers per prompt), after Stiennon et al. 2020 (arXiv 2009.01325).

Parent: dpo.py. It learns to score answers, from DPO's pairs with DPO's loss.

A transformer with a scalar head in place of its output layer reads a prompt with its answer. The head's output at the
last token, EOS, is the score. The preferred answer of each pair is to score higher. Minimises

    L(theta) = E_(x, y_w, y_l)  - log sigmoid( r(x, y_w) - r(x, y_l) - m )  +  c [ r(x, y_w) + r(x, y_l) ]^2

    x, y_w, y_l   a prompt, its preferred and its dispreferred completion, chosen before training
    r(x, y)  the score
    m        margin: how much better y_w is said to be (--use-margin; Touvron et al. 2023, arXiv 2307.09288, equation 2)
    c        --center-coef: keeps scores near 0 (Eisenstein et al. 2023, arXiv 2312.09244)

If the labels follow the Bradley-Terry model of a reward r*, the minimum at m = 0, c = 0 is r* plus any function of x.
Centring picks one of these. --ensemble K trains K models on the same pairs, each with its own head and order of the
data (Coste et al. 2023, arXiv 2310.02743).

RUN/model is an ordinary AutoModelForSequenceClassification with one label. An ensemble's members are RUN/model/member-1
and so on. The online scripts take it as --reward RUN/model, and an ensemble as RUN/model:mean, RUN/model:worst-case or
RUN/model:uncertainty=0.5 (utils/reward_models.py).

Run
    python algos/reward_model.py                                        pairs of countdown, from the embedded model
    python algos/reward_model.py --task sort --ensemble 4 --num-pairs 256 --label-noise 0.25
                                                                        members that can be wrong in different ways
    python algos/reward_model.py --model meta-llama/Llama-2-7b-chat-hf --task ORG/PAIRS --batch-size 512 \
        --learning-rate 1e-5 --lr-schedule cosine --warmup-steps 30 --weight-decay 0.1 --max-steps 1000 --center-coef 0
                                                                        Llama 2's hyper-parameters (section 3.2.2), one
                                                                        epoch; --use-margin if the data has margins
    python algos/reward_model.py --model Qwen/Qwen2.5-0.5B-Instruct --task trl-lib/ultrafeedback_binarized
    python algos/reward_model.py --model ORG/NAME --task pairs.jsonl --lora-rank 32 --gradient-checkpointing

Expect
    The default run takes 20 seconds on 2 CPU cores. Held-out pairs of countdown ranked right go from 0.54 to
    1.00, and the calibration error to 0.005 (seed 1, 256 pairs).
    The ensemble on sort, with a quarter of 256 labels flipped, takes one and a half minutes. After 20 steps one member
    ranks 0.94 right and the mean of four 0.95; after 100 steps 0.86 and 0.88. By then the members know the wrong labels
    by heart (0.98 of the training pairs ranked as labelled) and disagree most. Real models: not measured.
    benchmarks/overoptimisation.py shows what policies trained on such models come to.

Metrics
    accuracy       share of the step's pairs ranked right; ties count half; rises. An ensemble's: mean over members
    margin         mean of r(x, y_w) - r(x, y_l); rises, without end on labels that are never wrong
    chosen_score, rejected_score   means of r; centred round 0. An online script's --beta is relative to their scale
    eval/pair_accuracy, eval/pair_margin, ...   the same on held-out pairs; far below the training ones is overfitting
    eval/log_likelihood, eval/brier   means of log p and of (1 - p)^2, p = sigmoid(r(x, y_w) - r(x, y_l)). A model that
                   knows nothing has -0.69 and 0.25; log p falls again if a model is overconfident
    eval/ece       expected calibration error (Guo et al. 2017, arXiv 1706.04599). The higher-scored answer is
                   predicted to be preferred with max(p, 1 - p). In ten equal bins from 0.5 to 1: mean absolute gap to
                   how often it is preferred, weighted by pairs
    eval/ensemble_accuracy, eval/disagreement   (ensembles) accuracy of the mean score; the standard deviation over
                   members of r(x, y_w) - r(x, y_l), mean over pairs
    grad_norm      before clipping

Differences
    - c is 0.01 as in Eisenstein et al.; TRL's default is none. Without it each member of an ensemble has a constant of
      its own for each prompt, so their scores could not be compared.
    - Scores are not brought to mean 0 and standard deviation 1 on a reference set, as Ziegler et al. (2019) do: heads
      of today's decoders have no bias to fold the shift into. --center-coef centres them.
    - The sequence of a text is prompt, completion and EOS. That of a conversation is all that the chat template makes
      of it, so plain from_pretrained and apply_chat_template score the same. Online, TRL scores text without EOS.
    - Pooling is the model's own. Decoders are read at the last token that is not padding, so padding that is EOS is
      replaced by another special token. GPT-2 has none: it is read one token before EOS.
    - Sequences beyond --max-length are cut but keep their last token, where scores are read. TRL drops them.
    - Margins need --use-margin; TRL uses them if the column is there. Llama 2's grades are 0 to 1, or 0 to 3.
    - Dropout is off. The cosine decays to 0; Llama 2's to a tenth.
    - Means are those of the whole optimizer step, so micro-batches do not change the result.
"""

import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.cli import main, prepare
from utils.distributed import clip_gradients, deal, keep_shards, placed, shard_settings, share, total, unsharded
from utils.errors import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval, UserError
from utils.lm import split_rows
from utils.lora import for_training
from utils.memory import check_memory
from utils.models import (
    TINY_MODEL,
    ModelArgs,
    autocast,
    resolve_for,
    save_model,
    trained_parameters,
    trained_state,
    weights_dtype,
    without_dropout,
)
from utils.preferences import Batches, load_preferences
from utils.reward_models import encode_answer, load_reward_model, sequence_scores
from utils.rows import Lazy, remembered
from utils.run import Run
from utils.schedule import set_learning_rate
from utils.text import usable_rows

NAME, TITLE = "reward_model", "reward model"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=3e-4, batch_size=64, micro_batch_size=64, micro_batch_tokens=0, max_length=64,
                 precision="float32"),
    "full": dict(learning_rate=1e-5, batch_size=64, micro_batch_size=32, micro_batch_tokens=4096, max_length=1024,
                 precision="bfloat16"),
    "lora": dict(learning_rate=1e-4, batch_size=64, micro_batch_size=32, micro_batch_tokens=4096, max_length=1024,
                 precision="bfloat16"),
}  # fmt: skip
BINS = 10  # of the calibration error


@dataclass
class Args(ModelArgs):  # and --model --precision --lora-rank --seed --device ...: utils/models.py, utils/cli.py
    model: str = TINY_MODEL
    """folder or hub name: a causal language model gets a new head, a reward model is trained further"""
    task: str = "countdown"
    """countdown, sort, a .jsonl or .parquet file, or a hub dataset; columns prompt (or none), chosen, rejected"""
    num_pairs: PositiveInt = 2048
    """pairs that countdown and sort make for training; a dataset brings its own"""
    max_steps: PositiveInt = 100
    """optimizer steps"""
    ensemble: PositiveInt = 1
    """models trained, each with its own head and order of the data: K"""
    batch_size: PositiveInt | None = None
    """pairs in one optimizer step"""
    micro_batch_size: PositiveInt | None = None
    """pairs in one forward and backward pass; changes memory, not the result"""
    max_length: PositiveInt | None = None
    """prompt and completion tokens at most; longer sequences are cut, but keep their last token"""
    use_margin: bool = False
    """subtract the data's column margin from the difference of scores"""
    center_coef: NonNegativeFloat = 0.01
    """weight of the squared sum of a pair's scores: c"""
    label_noise: UnitInterval = 0.0
    """share of the training pairs whose labels are flipped, drawn with the seed: for controls, and studies of
    over-optimisation (0.25 in arXiv 2310.02743); held-out pairs keep theirs"""
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
    eval_prompts: PositiveInt = 256
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
    """Log-likelihood, Brier score and calibration error of sigmoid(r_w - r_l) on pairs (N, 2): see Metrics. y_w is
    always the preferred one, so the calibration error looks at the higher-scored answer instead."""
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
    """Columns of an evaluation from the scores (K, N, 2) of K members: means over members, and columns of ensembles."""
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


def micro_batches(pairs: list[Pair], args: Args) -> list[list[int]]:
    """The numbers of the pairs in each."""
    lengths = [2 * max(len(pair.chosen), len(pair.rejected)) for pair in pairs]
    return split_rows(lengths, args.micro_batch_size, args.micro_batch_tokens)


def update(model, optimizer, batch: list[Pair], args: Args) -> dict[str, float]:
    """One optimizer step of one model. Returns metrics."""
    scores = torch.zeros(len(batch), 2, device=model.device)
    optimizer.zero_grad(set_to_none=True)
    for rows, counts in deal(micro_batches(batch, args), model):  # to this process, of perhaps several
        pairs = [batch[row] for row in rows]
        some = pair_scores(model, pairs, args)
        margins = some.new_tensor([pair.margin for pair in pairs])
        loss = reward_loss(some, margins, args.center_coef)
        (counts * loss.sum() / len(batch)).backward()
        scores[rows] += counts * some.detach()
    grad_norm = clip_gradients(model.parameters(), args.max_grad_norm)
    optimizer.step()
    return preference_metrics(total(scores)) | {"grad_norm": grad_norm.item()}


@torch.no_grad()
def score_pairs(model, pairs: list[Pair], args: Args) -> Tensor:
    """Scores of all pairs, (N, 2), in micro-batches as `update` makes them."""
    scores = torch.zeros(len(pairs), 2, device=model.device)
    with unsharded(model):
        for rows in share(micro_batches(pairs, args)):
            scores[rows] = pair_scores(model, [pairs[row] for row in rows], args)
    return total(scores)


def with_noise(rows: Sequence[dict], share: float, seed: int) -> Lazy:
    """The rows, with chosen and rejected exchanged in exactly this share of them; the seed chooses which."""
    flipped = set(random.Random(f"label noise/{seed}").sample(range(len(rows)), round(share * len(rows))))

    def labelled(i: int) -> dict:
        return rows[i] | ({"chosen": rows[i]["rejected"], "rejected": rows[i]["chosen"]} if i in flipped else {})

    return Lazy(labelled, range(len(rows)))


def cut_to(ids: list[int], max_length: int) -> list[int]:
    """The last token, where the score is read, stays."""
    return ids[: max_length - 1] + ids[-1:] if len(ids) > max_length else ids


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
    dtype = weights_dtype(args.precision, args.lora_rank)
    shards = shard_settings(device, args.precision or "bfloat16") if args.fsdp else {}
    if args.fsdp and args.lora_rank:
        raise UserError("--fsdp shards a head that --lora-rank would train whole: give one of the two")
    model, tokenizer, is_new = load_reward_model(args.model, device, "--model", dtype, True, args.trust_remote_code,
                                                 args.attn_implementation, **shards)  # fmt: skip
    keep_shards(model)
    head = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 1][-1]
    if is_new:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(head.weight.shape, generator=generator) / math.sqrt(head.in_features + 1)  # as Stiennon
        head.weight.data.copy_(placed(weight, head.weight))
    if args.lora_rank:
        head.float()  # it is trained beside the adapters
    model = for_training(model, args.lora_rank, args.gradient_checkpointing, "SEQ_CLS", args.lora_modules)
    for module in model.modules():  # with LoRA the head that is trained is a copy
        if isinstance(module, torch.nn.Linear) and module.out_features == 1:
            module.forward = in_float32(module)  # type: ignore[method-assign]
    without_dropout(model)
    return model, tokenizer


def save_members(members: list, tokenizer, folder: Path, args: Args) -> None:
    """One model in `folder`, several in member-1, member-2, ... there."""
    for k, model in enumerate(members, 1):
        save_model(model, tokenizer, folder / f"member-{k}" if len(members) > 1 else folder, args)


def train(args: Args) -> list[dict]:
    device = prepare(args)
    data = load_preferences(args.task, args.num_pairs, args.seed)
    seeds = [args.seed + 1_000_003 * k for k in range(args.ensemble)]
    loaded = [load_member(seed, device, args) for seed in seeds]
    members, tokenizer = [model for model, _ in loaded], loaded[0][1]
    settings = resolve_for(members[0], args, PRESETS)
    optimizers = [
        torch.optim.AdamW(trained_parameters(model), lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)
        for model in members
    ]
    cut = equal = 0

    def encode(row: dict) -> tuple[list[int], list[int]]:
        return encode_answer(row, row["chosen"], tokenizer), encode_answer(row, row["rejected"], tokenizer)

    def pair(row: dict) -> Pair:
        chosen, rejected = (cut_to(ids, args.max_length) for ids in encode(row))
        return Pair(chosen, rejected, margin_of(row, args))

    def looked_at(row: dict) -> tuple[list[int]]:
        nonlocal cut, equal
        margin_of(row, args)
        whole = encode(row)
        chosen, rejected = (cut_to(ids, args.max_length) for ids in whole)
        cut += (chosen, rejected) != whole
        equal += chosen == rejected != whole[1]
        return ([],)  # no prompt is too long

    train, some, _ = usable_rows(data.train, data.heldout[: args.eval_prompts], looked_at, math.inf)
    settings += check_memory(members[0], args, members[1:], pairs=2)
    rows = with_noise(train, args.label_noise, args.seed) + some
    batches = [Batches(len(train), args.batch_size, seed) for seed in seeds]
    heldout, pairs = list(range(len(train), len(rows))), remembered(Lazy(pair, rows))
    if equal == len(rows):
        raise UserError(f"all pairs are equal in their first {args.max_length} tokens: raise --max-length")
    run = Run(args, NAME, data.name, args.max_steps, ("accuracy", "margin", "eval/pair_accuracy", "eval/ece"),
              schedule_depends_on_budget=args.lr_schedule != "constant")  # fmt: skip
    run.print(settings)
    run.print(f"{len(train)} pairs, {len(heldout)} held-out ones; {cut} pairs have a completion cut off")
    if equal:
        run.print(f"{equal} pairs are equal in what is left of them, and teach nothing: raise --max-length")
    for name, ids in zip(("chosen", "rejected"), pairs[batches[0](1)[0]]):
        run.print(f"{name:8} {tokenizer.decode(ids)!r}")
    if tokenizer.pad_token == tokenizer.eos_token:
        run.print("the tokenizer pads with EOS: scores are read at the last token before it")
    for model in members:
        model.train()

    def evaluation() -> dict[str, float]:
        some = [pairs[row] for row in heldout]
        return ensemble_metrics(torch.stack([score_pairs(model, some, args) for model in members]))

    def state() -> dict:
        return {"members": [trained_state(model) for model in members], "rows": len(rows),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers]}  # fmt: skip

    if run.state is not None and run.state["rows"] != len(rows):
        raise UserError(f"{args.task} has other rows than when the run began: resume with the dataset as it was")
    if not run.restore(members=tuple(members), optimizers=tuple(optimizers)):
        run.log(0, **evaluation())
        run.save(0, state())
    while run.step < args.max_steps:
        step, start = run.step + 1, time.perf_counter()

        # update
        updated = []
        for model, optimizer, batch in zip(members, optimizers, batches):
            rate = set_learning_rate(optimizer, step, args)
            updated.append(update(model, optimizer, [pairs[row] for row in batch(step)], args))
        columns = {name: sum(some[name] for some in updated) / len(updated) for name in updated[0]}
        columns |= {"learning_rate": rate, "time/step": time.perf_counter() - start}

        # evaluate
        if run.due(step, args.eval_every):
            columns |= evaluation()
        run.log(step, **columns)
        run.end_step(step, state)

    curves = {"pairs ranked right": ("accuracy", "eval/pair_accuracy", "eval/ensemble_accuracy"),
              "margin": ("margin", "eval/pair_margin"), "calibration": ("eval/ece", "eval/brier")}  # fmt: skip
    return run.finish(lambda folder: save_members(members, tokenizer, folder, args), curves, f"{TITLE} on {data.name}")


if __name__ == "__main__":
    main(Args, train)
