"""TRL's RLOOTrainer and DPOTrainer beside algos/rloo.py and algos/dpo.py on the embedded model, as trl_grpo.py has
GRPO: speed and learning curves. Needs trl==1.16.0.

    python benchmarks/peers/trl_family.py speed --threads 2    -> results/speed_rloo.json, results/speed_dpo.json
    python benchmarks/peers/trl_family.py curve --seeds 3      -> curves/trl-rloo-sort.jsonl, curves/trl-dpo-sort.jsonl
    python benchmarks/peers/trl_family.py compare              -> results/learning_trl.json

speed, on the CPU in float32: fresh processes that take turns, the ratio within each pair, as in trl_grpo.py. Logging,
saving, evaluation, gradient checkpointing and bfloat16 are off in TRL, AdamW is fused, the data loader has no workers.
    rloo   32 prompts x 8 completions, 12 + 16 tokens, beta 0.05, one update. Both score the samples with a frozen
           reference model. TRL also scores them with the policy once more; ours takes the sampler's log-probabilities.
    dpo    one update on 64 pairs of 16 + 16 tokens, beta 0.1. Both have the reference's log-probabilities before the
           clock starts (precompute_ref_log_probs, TRL's faster way), and tokens as well. Timed are in ours `update`
           (padding, forward, backward, clipping, AdamW, metrics), in TRL from one on_step_end to the next (data loader,
           padding, its metrics and the same). Ours runs a prompt once for both completions of a pair, TRL twice.

curve. Both learn `sort` from the same model with the settings of the curves rloo-sort and dpo-sort (curves.py): the
same prompts or pairs in the same order, schedule, clipping and final evaluation (utils.rewards.evaluate, 256
held-out prompts). Seeds count from 1, as ours do. RLOO's samples are drawn by TRL, so distributions are to be compared;
DPO draws nothing while it trains, so equal seeds must have equal margins but for rounding. `seconds` spans what it
spans in ours: loading, an evaluation before training, training, and the last evaluation. Ours were recorded on one
thread (OMP_NUM_THREADS=1).

compare. Means over all recorded seeds, and their difference with a 95 % percentile bootstrap interval over seeds, the
two sides resampled independently. Few seeds make such an interval too narrow.
"""

import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.peers.trl_grpo import (  # noqa: E402
    GROUP,
    HERE,
    NEW_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    machine,
    measure,
    record,
    time_ours,
    time_trl,
    train_trl,
    versions,
)

Case = Literal["rloo", "dpo"]
CASES = ("rloo", "dpo")
PAIRS, PAIR_TOKENS, DPO_BETA, RLOO_BETA = 64, 16, 0.1, 0.05  # of the speed comparison; tokens: prompt, and completion
QUIET = dict(report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False,
             gradient_checkpointing=False, dataloader_pin_memory=False, optim="adamw_torch_fused", warmup_steps=0,
             adam_beta1=0.9, adam_beta2=0.999)  # fmt: skip


def rloo_trainer(rows: list[dict], reward, prompts: int, group: int, directory: str, **settings):
    """RLOOTrainer on the embedded model: `prompts` x `group` completions and one update per step, all quiet."""
    import datasets
    from trl import RLOOConfig, RLOOTrainer

    from algos import rloo
    from utils.lm import load_model

    model, tokenizer = load_model(rloo.Args())
    defaults = dict(weight_decay=0.0, max_grad_norm=1.0, lr_scheduler_type="constant")
    config = RLOOConfig(
        output_dir=directory, per_device_train_batch_size=prompts * group, num_generations=group, num_iterations=1,
        temperature=1.0, top_k=0, top_p=1.0, shuffle_dataset=False, logging_strategy="no",
        **QUIET | defaults | settings,
    )  # fmt: skip
    return RLOOTrainer(model, reward, config, datasets.Dataset.from_list(rows), processing_class=tokenizer)


def dpo_trainer(rows: list[dict], directory: str, **settings):
    """DPOTrainer on the embedded model, on the pairs `rows` in their order, all quiet."""
    import datasets
    from transformers import PrinterCallback
    from trl import DPOConfig, DPOTrainer

    from algos import dpo
    from utils.lm import load_model

    datasets.disable_progress_bars()
    model, tokenizer = load_model(dpo.Args())
    rows = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows]
    config = DPOConfig(output_dir=directory, loss_type="sigmoid", precompute_ref_log_probs=True,
                       train_sampling_strategy="sequential", **QUIET | settings)  # fmt: skip
    trainer = DPOTrainer(model, None, config, train_dataset=datasets.Dataset.from_list(rows),
                         processing_class=tokenizer)  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def speed_pairs(steps: int) -> list[dict]:
    """Pairs of PAIR_TOKENS characters, less one for EOS in completions: the tokenizer is one of characters."""
    digits = PAIR_TOKENS - 2
    rows = []
    for i in range(PAIRS * steps):
        shown = f"{i * 7919 % 10**digits:0{digits}d}"
        rows.append({"prompt": f"S{shown}:", "chosen": "0" + shown, "rejected": "1" + shown})
    return rows


def time_our_dpo(warmup: int, steps: int) -> dict:
    """Seconds of each timed step."""
    import torch

    from algos import dpo
    from utils.data import encode_answers
    from utils.dist import as_samples
    from utils.lm import load_model

    args = dpo.Args(batch_size=PAIRS, micro_batch_size=2 * PAIRS, max_length=2 * PAIR_TOKENS, beta=DPO_BETA,
                    precision="float32")  # fmt: skip
    model, tokenizer = load_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    model.train()
    eos = model.generation_config.eos_token_id
    rows = speed_pairs(warmup + steps)
    pairs = [encode_answers(row, [row["chosen"], row["rejected"]], tokenizer, eos) for row in rows]
    assert {len(ids) for pair in pairs for ids in pair} == {PAIR_TOKENS}
    parts = [as_samples(pairs[i : i + PAIRS], args.max_length, "cpu") for i in range(0, len(pairs), PAIRS)]
    batches = [dpo.Batch(samples, dpo.reference_logps(model, model, samples, args)) for samples in parts]
    ends = [time.perf_counter()]
    for batch in batches:
        dpo.update(model, optimizer, batch, args)
        ends.append(time.perf_counter())
    return {"seconds": [b - a for a, b in zip(ends, ends[1:])][-steps:]}


def time_trl_dpo(warmup: int, steps: int) -> dict:
    """Seconds of each timed step."""
    from transformers import TrainerCallback

    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as directory:
        trainer = dpo_trainer(
            speed_pairs(warmup + steps), directory, per_device_train_batch_size=PAIRS, max_steps=warmup + steps,
            beta=DPO_BETA, max_length=2 * PAIR_TOKENS, learning_rate=1e-5, lr_scheduler_type="constant",
            weight_decay=0.0, max_grad_norm=1.0, logging_strategy="no",
        )  # fmt: skip
        lengths = {
            len(row[f"{name}_ids"]) for row in trainer.train_dataset for name in ("prompt", "chosen", "rejected")
        }
        assert lengths == {PAIR_TOKENS}, f"texts of {lengths} tokens"
        trainer.add_callback(Clock)
        trainer.train()
    return {"seconds": [b - a for a, b in zip(ends, ends[1:])][-steps:]}


def speed_worker(case: Case, side: Literal["ours", "trl"], warmup: int, steps: int) -> None:
    """One side in this process; prints one line of JSON. For `speed`."""
    sides = {
        "rloo": {"ours": partial(time_ours, script="rloo", beta=RLOO_BETA),
                 "trl": partial(time_trl, make=partial(rloo_trainer, beta=RLOO_BETA))},
        "dpo": {"ours": time_our_dpo, "trl": time_trl_dpo},
    }  # fmt: skip
    print(json.dumps(sides[case][side](warmup, steps)))


def speed(cases: Sequence[Case] = CASES, threads: int = 2, rounds: int = 5, steps: int = 20, warmup: int = 3,
          folder: Path = HERE / "results") -> None:  # fmt: skip
    """Times both sides in turn, `rounds` times each; writes medians and the ratio of each pair."""
    work = {
        "rloo": (f"{PROMPTS} prompts x {GROUP} completions, {PROMPT_TOKENS} + {NEW_TOKENS} tokens, beta {RLOO_BETA}, "
                 "one update, float32", PROMPTS * GROUP * NEW_TOKENS),
        "dpo": (f"{PAIRS} pairs, {PAIR_TOKENS} + {PAIR_TOKENS} tokens, beta {DPO_BETA}, reference log-probabilities "
                "precomputed on both sides, one update, float32", 2 * PAIRS * PAIR_TOKENS),
    }  # fmt: skip
    for case in cases:
        measure([__file__, "speed-worker", "--case", case], *work[case], folder / f"speed_{case}.json", threads, rounds,
                steps, warmup)  # fmt: skip


def settings(case: Case):
    """The script's arguments in our curve, those of the embedded model filled in."""
    from benchmarks.curves import CURVES

    module = importlib.import_module(f"algos.{case}")
    args = module.Args(**CURVES[f"{case}-sort"].settings)
    for name, value in module.PRESETS["tiny"].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def train_rloo(seed: int, steps: int, args) -> dict:
    """One run of RLOOTrainer: rewards by step, and the last evaluation."""
    make = partial(
        rloo_trainer, beta=args.beta, epsilon=args.epsilon, adam_beta2=args.adam_beta2, weight_decay=args.weight_decay,
        max_grad_norm=args.max_grad_norm, lr_scheduler_type=args.lr_schedule,
    )  # fmt: skip
    row = train_trl(seed, steps, make, args.num_prompts, args.num_generations, args.max_completion_length,
                    args.learning_rate, args.eval_prompts)  # fmt: skip
    return {"reward": row["reward"]} | row["final"]


def train_dpo(seed: int, steps: int, args) -> dict:
    """One run of DPOTrainer: margins by step, and the last evaluation."""
    from utils.data import encode_answers, epochs, load_pairs
    from utils.lm import load_model
    from utils.rewards import evaluate

    data = load_pairs(args.task, args.num_pairs, seed)
    order = epochs(data.train)
    rows = [order(i, seed) for i in range(args.batch_size * steps)]
    model, tokenizer = load_model(args)
    with tempfile.TemporaryDirectory() as directory:
        trainer = dpo_trainer(
            rows, directory, per_device_train_batch_size=args.batch_size, max_steps=steps, beta=args.beta,
            max_length=args.max_length, learning_rate=args.learning_rate, lr_scheduler_type=args.lr_schedule,
            weight_decay=args.weight_decay, max_grad_norm=args.max_grad_norm, logging_strategy="steps",
            logging_steps=1, seed=seed,
        )  # fmt: skip
        for row, seen in zip(rows, trainer.train_dataset, strict=True):
            answers = [row["chosen"], row["rejected"]]
            ours = encode_answers(row, answers, tokenizer, model.generation_config.eos_token_id)
            assert ours == (seen["prompt_ids"], seen["chosen_ids"], seen["rejected_ids"])
        trainer.train()
    margins = [entry["rewards/margins"] for entry in trainer.state.log_history if "rewards/margins" in entry]
    assert len(margins) == steps
    model.load_state_dict(trainer.model.state_dict())  # not TRL's own model: it patches the forward pass
    return {"margin": margins} | evaluate(model, tokenizer, data.task, None, args)


def curve_row(case: Case, seed: int, steps: int | None) -> dict:
    """One run as benchmarks/curves.py writes ours."""
    import torch

    from utils.data import load_task
    from utils.lm import load_model
    from utils.rewards import evaluate

    args, about = settings(case), versions()
    args.seed = seed
    steps = steps or args.max_steps
    start = time.perf_counter()
    evaluate(*load_model(args), load_task(args.task), None, args)
    row = (train_rloo if case == "rloo" else train_dpo)(seed, steps, args)
    seconds, column = time.perf_counter() - start, next(iter(row))
    row |= {f"mean {column}": statistics.mean(row[column]), f"last {column}": row[column][-1]}
    row[column] = [round(x, 5) for x in row[column]]
    return {"seed": seed} | row | {"seconds": round(seconds, 1), "versions": about,
                                   "machine": machine() | {"threads": torch.get_num_threads()}}  # fmt: skip


def curve(cases: Sequence[Case] = CASES, seeds: int = 3, steps: int | None = None,
          folder: Path = HERE / "curves") -> None:  # fmt: skip
    """Trains seeds 1 to `seeds` that a file does not hold yet and appends a row for each. steps: as in our curve."""
    for case in cases:
        train = partial(curve_row, case, steps=steps)
        for row in record(folder / f"trl-{case}-sort.jsonl", range(1, seeds + 1), train):
            print(case, {name: value for name, value in row.items() if isinstance(value, float | int)}, flush=True)


def compare(cases: Sequence[Case] = CASES, folder: Path = HERE / "curves",
            output: Path = HERE / "results" / "learning_trl.json") -> None:  # fmt: skip
    """Prints and writes the means of ours and of TRL's seeds and their differences. folder: of TRL's curves."""
    import numpy as np
    from scipy.stats import bootstrap

    from benchmarks.curves import CURVES, recorded

    results = {}
    for case in cases:
        column, path = CURVES[f"{case}-sort"].column, folder / f"trl-{case}-sort.jsonl"
        if not path.exists():
            sys.exit(f"there is no {path}: record it with python benchmarks/peers/trl_family.py curve --cases {case}")
        sides = {"ours": recorded(f"{case}-sort"), "trl": [json.loads(line) for line in path.read_text().splitlines()]}
        if len({len(row[column]) for rows in sides.values() for row in rows}) > 1:
            sys.exit(f"{path} has other numbers of steps than our curve")
        result = {"seeds": {side: [row["seed"] for row in rows] for side, rows in sides.items()}, "numbers": {}}
        for number in (f"mean {column}", f"last {column}", "eval/greedy", "eval/pass@1", "eval/pass@8", "seconds"):
            values = {side: np.array([row[number] for row in rows]) for side, rows in sides.items()}
            entry = {side: round(x.mean().item(), 5) for side, x in values.items()}
            entry["ours_minus_trl"] = round((values["ours"].mean() - values["trl"].mean()).item(), 5)
            if number != "seconds" and all(len(x) > 1 for x in values.values()):
                found = bootstrap(
                    (values["ours"], values["trl"]), lambda a, b, axis: a.mean(axis) - b.mean(axis),
                    method="percentile", rng=np.random.default_rng(0),
                )  # fmt: skip
                entry["bootstrap_95_percent"] = [round(x.item(), 5) for x in found.confidence_interval]
            result["numbers"][number] = entry
            interval = " to ".join(f"{x:.4f}" for x in entry.get("bootstrap_95_percent", ()))
            print(f"{case:5} {number:12} ours {entry['ours']:8.4f}  trl {entry['trl']:8.4f}  difference "
                  f"{entry['ours_minus_trl']:8.4f}  {interval}")  # fmt: skip
        if case == "dpo":  # nothing is drawn while it trains
            theirs = {row["seed"]: row[column] for row in sides["trl"]}
            gaps = [abs(a - b) for row in sides["ours"] if row["seed"] in theirs
                    for a, b in zip(row[column], theirs[row["seed"]])]  # fmt: skip
            result["largest_margin_gap_at_equal_seeds"] = max(gaps, default=None)
            print(f"{case:5} largest gap of a margin at equal seeds: {result['largest_margin_gap_at_equal_seeds']}")
        result["versions"] = {side: rows[0]["versions"] for side, rows in sides.items()}
        results[case] = result
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    commands = {"speed": speed, "curve": curve, "compare": compare, "speed-worker": speed_worker}
    tyro.extras.subcommand_cli_from_dict(commands)
