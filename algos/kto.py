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
    w_D, w_U  --desirable-weight, --undesirable-weight: the paper's lambda_D and lambda_U
    pi_ref    the policy before the first step

With s for its sigmoid, a row's gradient is beta w s (1 - s) times that of h, with a minus where y is desirable. It is
small for rows that are learnt and for hopeless ones. The paper advises weights with n_D w_D / (n_U w_U) from 1 to 3/2
(equation 9; an older version and TRL have 4/3); n_D and n_U count the rows. The script prints this ratio and balances
nothing by itself.

Run
    python algos/kto.py                                                   the embedded model learns countdown
    python algos/kto.py --task sort --max-steps 40                        a smaller task
    python algos/kto.py --model ORG/SFT-MODEL --task trl-lib/ultrafeedback_binarized --beta 0.1 --batch-size 32 \
        --learning-rate 5e-6 --max-length 2048 --max-steps 3880           the authors' beta, batch and rate; one epoch
    python algos/kto.py --model ORG/NAME --task trl-lib/kto-mix-14k --max-steps 420
    python algos/kto.py --model ORG/NAME --task rows.jsonl --undesirable-weight 2 --lora-rank 32

Expect
    The default run takes 20 seconds on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.08,
    pass@8 0.43 to greedy 0.36, pass@1 0.21, pass@8 0.75 (seed 1, 128 prompts). dpo.py gets to 0.41, 0.24, 0.75, but its
    64 pairs a step are twice the completions. With --batch-size 128 --num-pairs 4096 kto.py gets to 0.39, 0.19, 0.69.
    --task sort --max-steps 40: greedy 0.23 to 0.92, pass@1 0.40 to 0.73, pass@8 0.88 to 1.00, in about 15 seconds. With
    --learning-rate 3e-5 greedy ends at 0.30, because all answers have become less likely. Real models: not measured.

Metrics
    accuracy       share of the step's rows with h on the right side of z: above if desirable, below if not; ties count
                   half, so 0.5 at the start; rises
    margin         beta (mean h of desirable rows - mean h of undesirable rows); 0 at the start
    z              the reference point in nats (TRL's kl): 0 at the start; stays 0 if mismatched completions become less
                   likely
    desirable_logratio, undesirable_logratio   means of h in nats: the first should rise and the second fall
    eval/margin, eval/desirable_logratio, eval/undesirable_logratio   the same on held-out rows
    eval/greedy, eval/pass@1, eval/pass@8  as in grpo.py, for the embedded tasks
    grad_norm      before clipping; falls as rows saturate

Differences
    - z is a mean over the whole optimizer step. TRL and HALOs take it over each micro-batch. There the result depends
      on the split. HALOs compares a micro-batch of one row with itself; TRL refuses it.
    - z is a biased estimate of that KL: y_i-1 is no sample of the policy, and z is cut at 0. A row may follow
      one of the same prompt, so that nothing is mismatched; the paper and others allow that, too.
    - The reference's log-probabilities are computed before training and kept in the checkpoints: once for each row, as
      in dpo.py, and once for each mismatched row of each step, because every epoch mismatches anew. Others compute them
      during training, with a second model in memory; TRL can do it before. TRL mismatches once, in the dataset's
      order, so it does not shuffle.
    - A dataset of pairs is taken as two rows each, as TRL does. countdown and sort give a right and a wrong answer to
      each of --num-pairs problems.
    - AdamW; dropout is off, as in TRL, so that the first z and margin are 0.
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
from torch.nn.functional import sigmoid

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
from utils.preferences import Batches, check_labels, encode_rows, load_unpaired, usable
from utils.rows import Lazy
from utils.run import Run
from utils.schedule import set_learning_rate
from utils.text import encode_row

NAME, TITLE = "kto", "KTO"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-5, batch_size=64, micro_batch_size=64, max_length=64, precision="float32",
                 eval_max_new_tokens=20, sample_batch_size=512, micro_batch_tokens=0),
    "full": dict(learning_rate=1e-6, batch_size=32, micro_batch_size=32, max_length=1024, precision="bfloat16",
                 eval_max_new_tokens=512, sample_batch_size=64, micro_batch_tokens=4096),
    "lora": dict(learning_rate=5e-6, batch_size=32, micro_batch_size=32, max_length=1024, precision="bfloat16",
                 eval_max_new_tokens=512, sample_batch_size=64, micro_batch_tokens=4096),
}  # fmt: skip


@dataclass
class Args(PolicyArgs):  # and --model --precision --lora-rank --seed --device ...: utils/models.py, utils/cli.py
    task: str = "countdown"
    """countdown, sort, a .jsonl or .parquet file, or a hub dataset; columns prompt, completion, label; or pairs"""
    num_pairs: PositiveInt = 2048
    """problems of countdown and sort to train on, two rows each; a dataset brings its own"""
    max_steps: PositiveInt = 100
    """optimizer steps"""
    batch_size: PositiveInt | None = None
    """rows in one optimizer step, at least 2"""
    micro_batch_size: PositiveInt | None = None
    """rows in one forward and backward pass; changes memory, not the result"""
    max_length: PositiveInt | None = None
    """prompt and completion tokens at most; completions are cut there"""
    max_prompt_length: PositiveInt | None = None
    """longer prompts are dropped; None: those that leave no room in --max-length, and more than 5 % stop the run"""
    beta: PositiveFloat = 0.1
    """how strongly the policy is held to the reference"""
    desirable_weight: PositiveFloat = 1.0
    """weight of desirable rows"""
    undesirable_weight: PositiveFloat = 1.0
    """weight of undesirable rows"""
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
    """held-out prompts and rows per evaluation"""
    eval_samples: PositiveInt = 8
    """sampled answers per held-out prompt"""
    eval_max_new_tokens: PositiveInt | None = None
    """length limit of answers in evaluation"""
    sample_batch_size: PositiveInt | None = None
    """answers sampled at once in evaluation, rounded to whole prompts; limits the cache's memory"""


class Example(NamedTuple):
    """Token ids; the completion includes its EOS."""

    prompt: list[int]
    completion: list[int]
    label: bool  # whether the completion is desirable
    ref_logp: float = 0.0  # log pi_ref of the completion, summed over its tokens
    mismatched_ref_logp: float = 0.0  # the same of the completion that `mismatched` gives this prompt


def kto_loss(ratios: Tensor, labels: Tensor, z: Tensor, args: Args) -> Tensor:
    """w [1 - sigmoid(+-beta (h - z))]: + and desirable_weight for true labels, - and undesirable_weight for false ones.
    Log-ratios h (B,), labels (B,) bool, z () -> (B,). arXiv 2402.01306, section 4."""
    value = sigmoid(args.beta * torch.where(labels, ratios - z, z - ratios))
    return torch.where(labels, args.desirable_weight, args.undesirable_weight) * (1 - value)


def mismatched(batch: list[Example], args: Args) -> list[Example]:
    """Each prompt with the completion of the row before it, the first with that of the last row; cut at max_length."""
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
    """Columns from log-ratios and labels, (N,), of a step or an evaluation; NaN for a label that no row has."""
    desirable, undesirable = ratios[labels].mean().item(), ratios[~labels].mean().item()
    return {
        "margin": beta * (desirable - undesirable),
        "desirable_logratio": desirable,
        "undesirable_logratio": undesirable,
    }


def micro_batches(examples: list[Example], args: Args) -> list[list[int]]:
    """The numbers of the rows in each."""
    lengths = [len(example.prompt) + len(example.completion) for example in examples]
    return split_rows(lengths, args.micro_batch_size, args.micro_batch_tokens)


def update(model, optimizer, batch: list[Example], args: Args) -> dict[str, float]:
    """One optimizer step on rows whose reference log-probabilities are known. Returns metrics."""
    z = score_examples(model, mismatched(batch, args), args)[1].mean().clamp(min=0)
    labels = torch.tensor([example.label for example in batch], device=model.device)
    ratios = torch.zeros(len(batch), device=model.device)
    optimizer.zero_grad(set_to_none=True)
    for rows, counts in deal(micro_batches(batch, args), model):  # to this process, of perhaps several
        examples = [batch[row] for row in rows]
        logps = example_logps(model, examples, args)
        some = logps - logps.new_tensor([example.ref_logp for example in examples])
        loss = kto_loss(some, labels[rows], z, args)
        (counts * loss.sum() / len(batch)).backward()
        ratios[rows] += counts * some.detach()
    grad_norm = clip_gradients(model.parameters(), args.max_grad_norm)
    optimizer.step()
    ratios = total(ratios)
    gains = torch.where(labels, ratios - z, z - ratios)
    accuracy = (gains > 0).to(gains.dtype) + (gains == 0) / 2
    return {"accuracy": accuracy.mean().item(), **label_metrics(ratios, labels, args.beta), "z": z.item(),
            "grad_norm": grad_norm.item()}  # fmt: skip


@torch.no_grad()
def score_examples(model, examples: list[Example], args: Args) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities and log-ratios of all rows, (N,) each, in micro-batches as `update` makes them."""
    logps = torch.zeros(len(examples), device=model.device)
    with unsharded(model):
        for rows in share(micro_batches(examples, args)):
            logps[rows] = example_logps(model, [examples[row] for row in rows], args)
    logps = total(logps)
    return logps, logps - logps.new_tensor([example.ref_logp for example in examples])


def train(args: Args) -> list[dict]:
    device = prepare(args)
    if args.batch_size == 1:
        raise UserError("--batch-size is 1: z needs at least 2 rows, each prompt with the completion of another")
    data = load_unpaired(args.task, args.num_pairs, args.seed)
    model, tokenizer = load_policy(args, device)
    settings = resolve_for(model, args, PRESETS)
    without_dropout(model)
    check_model(model, args.precision)
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=args.learning_rate, weight_decay=args.weight_decay,
                                  fused=True)  # fmt: skip
    eos = eos_ids(model, tokenizer)
    data, cut = usable(data, encode_row, tokenizer, eos, args)
    desirable = check_labels(data)
    settings += check_memory(model, args, prompt=0 if data.task else None)
    rows, batches = data.train + data.heldout, Batches(len(data.train), args.batch_size, args.seed)
    heldout = list(range(len(data.train), len(rows)))
    tokens = encode_rows(rows, encode_row, tokenizer, eos, args.max_length)

    def example(row: int) -> Example:
        prompt, completion = tokens[row]
        return Example(prompt, completion, rows[row]["label"])

    examples = Lazy(example, range(len(rows)))
    run = Run(args, NAME, data.name, args.max_steps, ("accuracy", "margin", "z", "eval/margin", "eval/greedy"),
              schedule_depends_on_budget=args.lr_schedule != "constant")  # fmt: skip
    run.print(settings)
    balance = desirable * args.desirable_weight / ((len(data.train) - desirable) * args.undesirable_weight)
    run.print(f"{len(data.train)} rows, {desirable} of them desirable, {len(heldout)} held-out ones; {cut} are cut off")
    run.print(f"desirable rows weigh {balance:.2f} times as much as undesirable ones in all; 1 to 1.5 is advised")
    shown = examples[batches(1)[0]]
    run.print(show(tokenizer, shown.prompt, [shown.completion], [shown.label], {}))
    model.train()

    # reference log-probabilities, while the policy still is the reference; a resumed run only lacks those of
    # rows and steps that a larger budget adds
    reference = torch.full((len(rows),), torch.nan) if run.state is None else run.state["reference"]
    if len(reference) != len(rows):
        raise UserError(f"{args.task} has other rows than when the run began: resume with the dataset as it was")
    by_step = torch.full((args.max_steps, args.batch_size), torch.nan)
    if run.state is not None:
        by_step[: len(run.state["by_step"])] = run.state["by_step"][: args.max_steps]
    for some in (heldout, *batches.first_epoch(args.max_steps)):
        run.save_early({"reference": reference, "by_step": by_step})
        if reference[some].isnan().any():
            reference[some] = score_examples(model, [examples[row] for row in some], args)[0].cpu()
    for step in range(1, args.max_steps + 1):
        run.save_early({"reference": reference, "by_step": by_step})
        if by_step[step - 1].isnan().any():
            batch = mismatched([examples[row] for row in batches(step)], args)
            by_step[step - 1] = score_examples(model, batch, args)[0].cpu()

    def with_reference(some: list[int]) -> list[Example]:
        return [examples[row]._replace(ref_logp=reference[row].item()) for row in some]

    def evaluation() -> dict[str, float]:
        some = with_reference(heldout)
        labels = torch.tensor([example.label for example in some], device=device)
        ratios = score_examples(model, some, args)[1]
        columns = {f"eval/{name}": value for name, value in label_metrics(ratios, labels, args.beta).items()}
        if data.task is not None:
            columns |= evaluate(model, tokenizer, data.task, None, args.eval_prompts, args.eval_samples,
                                args.eval_max_new_tokens, 1.0, args.seed, rows_at_once=args.sample_batch_size,
                                precision=args.precision)  # fmt: skip
        return columns

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict(), "reference": reference,
                "by_step": by_step}  # fmt: skip

    if not run.restore(model=model, optimizer=optimizer):
        run.log(0, **evaluation())
        run.save(0, state())
    while run.step < args.max_steps:
        step, start = run.step + 1, time.perf_counter()
        rate = set_learning_rate(optimizer, step, args)

        # update
        some = zip(with_reference(batches(step)), by_step[step - 1].tolist())
        batch = [example._replace(mismatched_ref_logp=logp) for example, logp in some]
        columns = update(model, optimizer, batch, args)
        columns |= {"learning_rate": rate, "time/step": time.perf_counter() - start}

        # evaluate
        if run.due(step, args.eval_every):
            columns |= evaluation()
        run.log(step, **columns)
        run.end_step(step, state)

    curves = {"margin": ("margin", "eval/margin"), "log-ratios": ("desirable_logratio", "undesirable_logratio", "z"),
              "held-out accuracy": ("eval/greedy*", "eval/pass*")}  # fmt: skip
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {data.name}")


if __name__ == "__main__":
    main(Args, train)
