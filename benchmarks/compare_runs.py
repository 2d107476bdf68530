"""Runs of language models side by side: at equal steps, at equal samples, and where they are equally good.

    python benchmarks/compare_runs.py RUN RUN ... --columns eval/pass@8 entropy

Equal steps favour whoever samples more in a step, and equal samples whoever updates more often. At equal pass@1 one
sees what it cost: how many samples, and how much of pass@k. Each comparison takes the highest steps, samples or pass@1
that all runs reach; between two evaluations numbers are interpolated.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from utils.core import UserError  # noqa: E402


@dataclass
class Settings:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs"""
    columns: tuple[str, ...] = ("eval/greedy", "eval/pass@8", "entropy")
    """what is shown beside steps, samples and pass@1"""


@dataclass
class Evaluated:
    """The evaluations of a run, one after the other."""

    name: str
    columns: dict[str, list[float]] = field(default_factory=dict)

    def at(self, wanted: str, level: float) -> dict[str, float]:
        """Every column where `wanted` first reaches the level."""
        values = self.columns[wanted]
        i = next(i for i, value in enumerate(values) if value >= level)
        share = 0.0 if i == 0 else (level - values[i - 1]) / (values[i] - values[i - 1])
        return {name: x[i] if i == 0 else x[i - 1] + share * (x[i] - x[i - 1]) for name, x in self.columns.items()}


def read(folder: Path, columns: tuple[str, ...]) -> Evaluated:
    """Raises UserError where there is no run, or it was never evaluated. Samples are completions that were drawn: the
    column `sampled` of each step, where a script has it."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{folder} is no run's folder: it has no metrics.jsonl")
    args = json.loads((folder / "config.json").read_text())["args"]
    samples, run = 0.0, Evaluated(folder.name)
    a_step = args.get("num_prompts", 0) * (args.get("num_votes") or args.get("num_generations") or 0)
    seen: dict[str, float] = {}  # training columns as they last were
    for row in map(json.loads, path.read_text().splitlines()):
        samples += row.get("sampled", a_step) if row["step"] else 0
        seen |= row
        if "eval/pass@1" in row:
            for name in ("step", "samples", "eval/pass@1", *columns):
                run.columns.setdefault(name, []).append((seen | {"samples": samples}).get(name, np.nan))
    if not run.columns:
        raise UserError(f"{folder} has no column eval/pass@1: give runs of language models that were evaluated")
    return run


def compare(settings: Settings) -> None:
    runs = [read(folder, settings.columns) for folder in settings.runs]
    width = max(len(run.name) for run in runs)
    for equal in ("step", "samples", "eval/pass@1"):
        level = min(max(run.columns[equal]) for run in runs)
        print(f"\nat {equal} {level:g}")
        for run in runs:
            print(f"  {run.name:{width}}  " + "  ".join(f"{k} {v:.4g}" for k, v in run.at(equal, level).items()))


if __name__ == "__main__":
    try:
        compare(tyro.cli(Settings))
    except UserError as error:
        sys.exit(f"error: {error}")
