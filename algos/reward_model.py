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
data (Coste et al. 2023, arXiv 2310.02743). RUN/model, or RUN/model/member-1 and so on, are ordinary sequence
classifiers with one label, which the online scripts take as --reward, several with --combine.

Run
    python algos/reward_model.py                         the 0.8M-parameter model of utils/tiny_model, countdown
    python algos/reward_model.py --task sort --ensemble 4 --num-pairs 256 --label-noise 0.25
    python algos/reward_model.py --model Qwen/Qwen2.5-0.5B-Instruct --task trl-lib/ultrafeedback_binarized
    python algos/reward_model.py --model ORG/NAME --task pairs.jsonl --lora-rank 32 --gradient-checkpointing
    Llama 2's settings: algos/README.md.

Expect
    The default run takes 40 seconds on 2 CPU cores. Held-out pairs of countdown ranked right go from 0.54 to 1.00. The
    ensemble, with a quarter of 256 labels flipped: after 20 steps one member ranks 0.94 right and the mean of four
    0.95; after 100 steps 0.86 and 0.88. By then the members know the wrong labels by heart, and disagree most.

Metrics
    chosen_score, rejected_score   means of r; centred round 0. An online script's --beta is relative to their scale
    eval/log_likelihood, eval/brier   means of log p and (1 - p)^2, p = sigmoid(r(x, y_w) - r(x, y_l)). Knowing nothing
                   is -0.69 and 0.25; log p falls again if a model is overconfident
    eval/ece       expected calibration error (Guo et al. 2017, arXiv 1706.04599): the higher score is predicted to be
                   preferred with max(p, 1 - p); mean gap to how often it is, over ten equal bins from 0.5 to 1
    eval/ensemble_accuracy, eval/disagreement   accuracy of the mean score; deviation of the margin over members

Differences
    - c is 0.01 as in Eisenstein et al.; TRL's default is none. Without it each member of an ensemble has a constant of
      its own for each prompt, so their scores could not be compared. Ziegler et al. (2019) normalise scores instead.
    - The sequence of a text is prompt, completion and EOS; online, TRL scores text without EOS. That of a conversation
      is all that the chat template makes of it. Beyond --max-length it is cut, but keeps its last token.
    - Pooling is the model's own: at the last token that is not padding. So padding that is EOS is replaced by another
      special token. GPT-2 has none: it is read one token before EOS.
"""

import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.core import Run, UserError, choose_precision, main, prepare
from utils.data import RowFault, epochs, keep, load_pairs
from utils.dist import (
    Means,
    Trained,
    averaged,
    clip_gradients,
    equal_passes,
    full_weights,
    gathered,
    rank,
    set_rate,
    shard,
    share,
    split_rows,
    start,
    total,
)
from utils.lm import (
    TINY_MODEL,
    UNREADABLE,
    ModelArgs,
    autocast,
    check_whole,
    fingerprint,
    resolve,
    save_model,
    with_adapters,
)
from utils.rewards import encode_scored, sequence_scores, set_padding

NAME, TITLE = "reward_model", "reward model"
LARGE = dict(learning_rate=1e-5, micro_batch_size=32, micro_batch_tokens=4096, max_length=1024,
             precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=3e-4, micro_batch_size=64, micro_batch_tokens=0, max_length=64, precision="float32"),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=1e-4),
}  # fmt: skip
BINS = 10  # of the calibration error


@dataclass
class Args(ModelArgs):  # and --model --precision --lora-rank --seed --device ...: utils/lm.py, utils/core.py
    model: str = TINY_MODEL
    """folder or hub name: a causal language model gets a new head, a reward model is trained further"""
    task: str = "countdown"
    """countdown, sort, a .jsonl or .parquet file, or a hub dataset; columns prompt (or none), chosen, rejected"""
    prompt_column: str = "prompt"
    """column of a dataset with the prompt: text or chat messages"""
    num_pairs: int = 2048
    """pairs that countdown and sort make for training; a dataset brings its own"""
    max_steps: int = 100
    """optimizer steps"""
    ensemble: int = 1
    """models trained, each with its own head and order of the data: K"""
    batch_size: int = 64
    """pairs in one optimizer step, of all processes"""
    micro_batch_size: int | None = None
    """pairs in one forward and backward pass; changes memory, not the result"""
    max_length: int | None = None
    """prompt and completion tokens at most; longer sequences are cut, but keep their last token"""
    use_margin: bool = False
    """subtract the data's column margin from the difference of scores"""
    center_coef: float = 0.01
    """weight of the squared sum of a pair's scores: c"""
    label_noise: float = 0.0
    """share of the training pairs whose labels are flipped, for studies of over-optimisation (0.25 in arXiv
    2310.02743); held-out pairs keep theirs"""
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
    eval_prompts: int = 256
    """held-out pairs per evaluation"""


class Pair(NamedTuple):
    """Token ids of prompt and completion."""

    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


def pair_scores(model, pairs: list[Pair], args: Args) -> Tensor:
    """r of chosen and rejected, (P, 2)."""
    sequences = [ids for pair in pairs for ids in (pair.chosen, pair.rejected)]
    with autocast(model, args.precision):
        scores = sequence_scores(model, sequences or [[0]])  # no pairs: an empty pass, which --fsdp may need
    return scores[: len(sequences)].view(-1, 2)


def reward_loss(scores: Tensor, margins: Tensor, center_coef: float) -> Tensor:
    """-log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2, to be minimised (arXiv 2307.09288, equation 2; the second term
    arXiv 2312.09244). Scores (P, 2), margins (P,) -> (P,)."""
    chosen, rejected = scores.unbind(1)
    return -logsigmoid(chosen - rejected - margins) + center_coef * (chosen + rejected) ** 2


def preference_metrics(scores: Tensor) -> dict[str, Tensor]:
    """Columns for each pair, (P,), from the scores (P, 2)."""
    chosen, rejected = scores.unbind(1)
    right = (chosen > rejected).to(scores.dtype) + (chosen == rejected) / 2
    return {"accuracy": right, "margin": chosen - rejected, "chosen_score": chosen, "rejected_score": rejected}


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
        {f"eval/pair_{name}": values.mean().item() for name, values in preference_metrics(some).items()}
        | {f"eval/{name}": value for name, value in calibration(some).items()}
        for some in scores
    ]
    means = {name: sum(c[name] for c in columns) / len(columns) for name in columns[0]}
    if len(scores) == 1:
        return means
    return means | {
        "eval/ensemble_accuracy": preference_metrics(scores.mean(0))["accuracy"].mean().item(),
        "eval/disagreement": (scores[..., 0] - scores[..., 1]).std(0, correction=0).mean().item(),
    }


def micro_batches(pairs: list[Pair], args: Args) -> list[list[int]]:
    """The numbers of the pairs in each."""
    lengths = [2 * max(len(pair.chosen), len(pair.rejected)) for pair in pairs]
    return equal_passes(split_rows(lengths, args.micro_batch_size, args.micro_batch_tokens), args)


def update(model, optimizer, batch: list[Pair], args: Args) -> dict[str, float]:
    """One optimizer step of one model. Returns metrics."""
    count, means = total(torch.tensor(len(batch))), Means()
    optimizer.zero_grad(set_to_none=True)
    for rows in micro_batches(batch, args):
        scores = pair_scores(model, [batch[row] for row in rows], args)
        margins = scores.new_tensor([batch[row].margin for row in rows])
        loss = reward_loss(scores, margins, args.center_coef)
        (loss.sum() / count).backward()
        means.add(torch.ones_like(margins), **preference_metrics(scores))
    grad_norm = clip_gradients(model, args.max_grad_norm)
    optimizer.step()
    return means.read() | {"grad_norm": grad_norm.item()}


@torch.no_grad()
def score_pairs(model, pairs: list[Pair], args: Args) -> Tensor:
    """Scores of pairs that are not trained on, those of all processes, (N, 2)."""
    scores = torch.zeros(len(pairs), 2, device=model.device)
    for rows in micro_batches(pairs, args):
        scores[rows] = pair_scores(model, [pairs[row] for row in rows], args)
    return torch.tensor(gathered(scores.tolist()))


def with_noise(rows: Sequence[dict], share: float, seed: int) -> Callable[[int], dict]:
    """The i-th row, with chosen and rejected exchanged in exactly this share of them; the seed chooses which."""
    flipped = set(random.Random(f"label noise/{seed}").sample(range(len(rows)), round(share * len(rows))))

    def labelled(i: int) -> dict:
        row = rows[i]
        return row | ({"chosen": row["rejected"], "rejected": row["chosen"]} if i in flipped else {})

    return labelled


def cut_to(ids: list[int], max_length: int) -> list[int]:
    """The last token, where the score is read, stays."""
    return ids[: max_length - 1] + ids[-1:] if len(ids) > max_length > 0 else ids[:max_length]


def encode_pair(row: dict, tokenizer, args: Args) -> Pair:
    """Raises RowFault where the two are equal in what --max-length leaves of them, UserError where a margin is wanted
    and is none."""
    whole = [encode_scored(row, row[side], tokenizer) for side in ("chosen", "rejected")]
    chosen, rejected = (cut_to(ids, args.max_length) for ids in whole)
    if chosen == rejected:
        raise RowFault(row, f"has answers that are equal in their first {args.max_length} tokens")
    margin = row.get("margin") if args.use_margin else 0.0
    if not isinstance(margin, (int, float)) or not math.isfinite(margin):
        raise UserError(f"a pair of {args.task} has the margin {margin}: --use-margin needs a column margin of numbers")
    return Pair(chosen, rejected, float(margin))


def in_float32(head: torch.nn.Linear):
    """Its forward pass, in float32 under autocast too: bfloat16 scores between 2 and 4 would be 1/64 apart."""

    def forward(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.to(head.weight.dtype), head.weight, head.bias)

    return forward


def load_member(seed: int, device: torch.device | str, args: Args):
    """The model of --model, with a head drawn from `seed` if it has none, and its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

    logging.disable_progress_bar()
    path = str(Path(args.model).expanduser())
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=torch.bfloat16 if choose_precision(args, device) else torch.float32, num_labels=1,
            output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=args.trust_remote_code,
            attn_implementation=args.attn_implementation)  # fmt: skip
    except UNREADABLE as error:
        why = "there is none" if Path(path).is_absolute() and not Path(path).exists() else str(error).split("\n")[0]
        raise UserError(f"cannot load the model {path} ({why}): give one, as in --model FOLDER or ORG/NAME") from error
    set_padding(model, tokenizer)
    for module in model.modules():  # no dropout
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or isinstance(module, torch.nn.Dropout)):
                setattr(module, name, 0.0)
    head = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 1][-1]
    check_whole(path, model, found, may_lack=1)
    if found["missing_keys"]:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(head.weight.shape, generator=generator) / math.sqrt(head.in_features + 1)  # as Stiennon
        head.weight.data.copy_(weight)
    model.fingerprint = fingerprint(model)
    if args.lora_rank:
        head.float()  # it is trained beside the adapters
        model = with_adapters(model, args, "SEQ_CLS")
    for module in model.modules():  # with LoRA the head that is trained is a copy
        if isinstance(module, torch.nn.Linear) and module.out_features == 1:
            module.forward = in_float32(module)  # type: ignore[method-assign]
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = model.to(device)
    return shard(model, args.precision == "bfloat16") if args.fsdp else model, tokenizer


def save_members(members: list, tokenizer, folder: Path, args: Args) -> None:
    """One model in `folder`, several in member-1, member-2, ... there."""
    for k, model in enumerate(members, 1):
        state = full_weights(model) if args.fsdp else None
        if state and rank() == 0:
            model = load_member(args.seed, "cpu", replace(args, fsdp=False))[0]
            model.load_state_dict(state)
        if rank() == 0:
            save_model(model, tokenizer, folder / f"member-{k}" if len(members) > 1 else folder, args)


def train(args: Args) -> list[dict]:
    device = start(prepare(args))
    data = load_pairs(args.task, args.num_pairs, args.seed, args.prompt_column)
    seeds = [args.seed + 1_000_003 * k for k in range(args.ensemble)]
    loaded = [load_member(seed, device, args) for seed in seeds]
    members, tokenizer = [model for model, _ in loaded], loaded[0][1]
    settings = resolve(members[0], args, PRESETS)
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                          weight_decay=args.weight_decay, fused=True) for model in members
    ]  # fmt: skip

    def encode(row: dict) -> Pair:
        return encode_pair(row, tokenizer, args)

    pairs, heldout = (keep(rows, encode, math.inf, tokenizer) for rows in (data.train, data.heldout))
    labelled = with_noise(pairs, args.label_noise, args.seed)
    streams = [epochs(range(len(pairs))) for _ in seeds]
    heldout_pairs = [encode(heldout[i]) for i in share(range(min(len(heldout), args.eval_prompts)))]
    run = Run(args, NAME, data.name, args.max_steps, ("accuracy", "margin", "eval/pair_accuracy", "eval/ece"))
    run.print(f"{settings}\n{len(pairs)} pairs, {len(heldout)} held-out ones")
    for name, ids in zip(("chosen", "rejected"), encode(labelled(0))):
        run.print(f"{name:8} {tokenizer.decode(ids)!r}")
    if tokenizer.pad_token == tokenizer.eos_token:
        run.print("the tokenizer pads with EOS: scores are read at the last token before it")

    def evaluation() -> dict[str, float]:
        return ensemble_metrics(torch.stack([score_pairs(model, heldout_pairs, args) for model in members]))

    parts = {f"member_{k}": Trained(*member) for k, member in enumerate(zip(members, optimizers))}
    if not run.restore(**parts):
        run.log(0, **evaluation())
    for model in members:
        model.train()
    while run.step < args.max_steps:
        step, begun = run.step + 1, time.perf_counter()

        # update
        numbers = share(range((step - 1) * args.batch_size, step * args.batch_size))
        updated = []
        for model, optimizer, stream, seed in zip(members, optimizers, streams, seeds):
            rate = set_rate(optimizer, step, args)
            batch = [encode(labelled(stream(number, seed))) for number in numbers]  # type: ignore[arg-type]
            updated.append(update(model, optimizer, batch, args))
        columns = {name: sum(some[name] for some in updated) / len(updated) for name in updated[0]}
        columns |= {"learning_rate": rate, "time/step": time.perf_counter() - begun}

        # evaluate
        if run.due(step, args.eval_every):
            columns |= evaluation()
        run.log(step, **averaged(columns))
        run.end_step(step, parts)

    curves = {"pairs ranked right": ("accuracy", "eval/pair_accuracy", "eval/ensemble_accuracy"),
              "margin": ("margin", "eval/pair_margin"), "calibration": ("eval/ece", "eval/brier")}  # fmt: skip
    return run.finish(lambda folder: save_members(members, tokenizer, folder, args), curves, f"{TITLE} on {data.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
