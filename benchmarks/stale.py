"""Stale data: how much each rule for the ratio takes out of one batch of samples, and when it breaks.

    python benchmarks/stale.py run       adds what is missing to results/stale.jsonl; stop and go on as you like
    python benchmarks/stale.py table     prints the means; writes curves/stale.png

The embedded model learns sort. In each step it samples one batch and takes 1, 4 or 16 optimizer steps on it: as
minibatches, each sample once, or as epochs, each sample as often. The last of these steps learns from data that a
policy sampled that many steps ago. All runs sample the same number of completions. The rules: GRPO's clip (grpo.py),
no clip, GSPO (gspo.py), CISPO and GPPO (cispo.py), with the bounds of their presets. A number is the held-out pass@1 at
the end; each rule is shown at its best learning rate of three, and at one that all have.
"""

import importlib
import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.curves import quiet_folder  # noqa: E402
from benchmarks.effects import half_width  # noqa: E402
from utils.errors import PositiveInt  # noqa: E402
from utils.machine import environment  # noqa: E402

RESULTS, PICTURE = ROOT / "benchmarks/results/stale.jsonl", ROOT / "benchmarks/curves/stale.png"
RULES = {
    "GRPO": ("grpo", {}),
    "no clip": ("grpo", dict(epsilon=1.0, epsilon_high=1e9)),
    "GSPO": ("gspo", {}),
    "CISPO": ("cispo", {}),
    "GPPO": ("cispo", dict(bounds="gppo")),
}
KINDS = {"minibatches": "num_minibatches", "epochs": "num_iterations"}
UPDATES, RATES, EQUAL, SEEDS = (1, 4, 16), (3e-5, 1e-4, 3e-4), 1e-4, 8
COMMON = dict(task="sort", max_steps=6, num_prompts=32, num_generations=8, num_minibatches=1, eval_every=0,
              eval_prompts=128, threads=1)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    rule: str
    kind: str
    updates: int
    learning_rate: float
    seed: int


def cells() -> list[Cell]:
    """Seed after seed. One update is the same run for minibatches and epochs."""
    every = itertools.product(range(1, SEEDS + 1), UPDATES, KINDS, RATES, RULES)
    return [Cell(rule, kind, n, rate, seed) for seed, n, kind, rate, rule in every if n > 1 or kind == "epochs"]


def recorded() -> dict[Cell, float]:
    rows = map(json.loads, RESULTS.read_text().splitlines()) if RESULTS.exists() else []
    return {Cell(**row["cell"]): row["value"] for row in rows}


def train(cell: Cell, **changes) -> float:
    """Held-out pass@1 at the end of one run."""
    script, settings = RULES[cell.rule]
    module = importlib.import_module(f"algos.{script}")
    with quiet_folder() as folder:
        own = {KINDS[cell.kind]: cell.updates, "learning_rate": cell.learning_rate, "seed": cell.seed}
        common = COMMON | own | settings | dict(output_dir=folder, save_every=10**6)
        return module.train(module.Args(**common | changes))[-1]["eval/pass@1"]


def run(of: PositiveInt = 1, part: int = 0) -> None:
    """Trains what is missing: all of it, or part 0, 1, .. of so many parts, each for a process of its own."""
    torch.set_num_threads(1)
    known = recorded()
    for cell in cells()[part::of]:
        if cell not in known:
            start = time.perf_counter()
            row = {"cell": asdict(cell), "value": train(cell), "seconds": round(time.perf_counter() - start, 1)}
            row |= {k: environment()[k] for k in ("versions", "commit", "machine")}
            with open(RESULTS, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(cell, round(row["value"], 3), row["seconds"], flush=True)


def table() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    values: dict[tuple, list[float]] = {}
    for cell, value in recorded().items():
        for kind in KINDS if cell.updates == 1 else (cell.kind,):
            values.setdefault((kind, cell.rule, cell.updates, cell.learning_rate), []).append(value)
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True, sharey=True, constrained_layout=True)
    for row, kind in zip(axes, KINDS):
        for axis, rates in zip(row, (RATES, (EQUAL,))):
            for rule in RULES:
                best = []
                for n in UPDATES:
                    at = {rate: values[kind, rule, n, rate] for rate in rates if (kind, rule, n, rate) in values}
                    rate = max(at, key=lambda rate: statistics.mean(at[rate]))
                    best.append((statistics.mean(at[rate]), half_width(at[rate]), rate, len(at[rate])))
                axis.errorbar(UPDATES, [b[0] for b in best], [b[1] for b in best], capsize=3, marker="o", label=rule)
                shown = ", ".join(f"{b[0]:.2f} +- {b[1]:.2f} ({b[2]:g})" for b in best)
                print(f"{kind:12} {'best' if len(rates) > 1 else 'equal':6} {rule:8} {shown}  {best[0][3]} seeds")
            axis.set_xscale("log", base=2)
            axis.set_xticks(UPDATES, [str(n) for n in UPDATES])
            axis.set_title("the best of three learning rates" if len(rates) > 1 else f"learning rate {EQUAL:g}")
            axis.set_xlabel(kind)
        row[0].set_ylabel("held-out pass@1")
    axes[0, 0].legend()
    figure.savefig(PICTURE, dpi=100)
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "table": table})
