"""Effects: one command trains an algorithm with its idea, its parent and a control, and says whether the claims hold.

    python benchmarks/effects.py run NAME     trains what effects/NAME.jsonl lacks, then prints the verdict
    python benchmarks/effects.py show         verdicts of all that is recorded, and effects/*.png

An effect stands in its script's spec (tests/specs): the runs, the statistic and the claims, fixed before the first run.
A claim compares runs of equal seeds, so its verdict is a number of seeds: where a comparison is as likely as not, it
holds in 9 of 10 seeds once in a hundred times. Means come with Student's 95 % interval.
"""

import functools
import importlib
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import tyro
from scipy.stats import t as student

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.curves import begun, quiet_folder  # noqa: E402
from benchmarks.machine import environment  # noqa: E402
from tests.specs import SPECS, Effect  # noqa: E402

FOLDER = Path(__file__).resolve().parent / "effects"
EFFECTS = {name: effect for spec in SPECS.values() for name, effect in spec.effects.items()}


def number(history: list[dict], statistic: str) -> float:
    """Of the rows of a run: see Effect.statistic."""
    kind, column, *bound = statistic.split()
    values = [row[column] for row in history if column in row]
    if kind == "until":
        steps = [row["step"] for row in history if column in row]
        return next((step for step, value in zip(steps, values) if value >= float(*bound)), steps[-1])
    if kind == "rise":
        return values[-1] - values[0]
    first = {"last": len(values) - 1, "mean": 0, "late": len(values) // 2}[kind]
    return statistics.mean(values[first:])


@functools.lru_cache(1)
def record(data: str, seed: int) -> tempfile.TemporaryDirectory:
    """A folder with the collections of a seed; data: Effect.data as JSON."""
    from benchmarks import record_suite

    (_, settings), folder = json.loads(data), tempfile.TemporaryDirectory()
    steps = settings.pop("record_steps")
    with quiet_folder() as runs:
        args = record_suite.sac.Args(**settings, seed=seed, output_dir=runs)
        record_suite.record(args, Path(folder.name), steps)
    return folder


def train(effect: Effect, run: str, seed: int, **changes) -> float:
    """The statistic of one run, trained in this process, in a temporary folder."""
    script, settings = effect.runs[run]
    module = importlib.import_module(f"algos.{script}")
    if effect.data:
        changes["dataset"] = f"{record(json.dumps(effect.data), seed).name}/{settings['dataset']}"
    with quiet_folder() as folder:
        common = dict(seed=seed, output_dir=folder, save_every=10**9)
        settings = begun(settings, common | changes) | common | changes
        return number(module.train(module.Args(**settings)), effect.statistic)


def recorded(name: str) -> list[dict]:
    path = FOLDER / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def by_run(name: str) -> dict[str, dict[int, float]]:
    """Run -> seed -> statistic, of what is recorded. Exits where something was recorded with other settings."""
    effect, values = EFFECTS[name], {run: {} for run in EFFECTS[name].runs}
    for row in recorded(name):
        now = json.loads(json.dumps([*effect.runs.get(row["run"], ()), effect.statistic, effect.data]))
        if [row["script"], row["settings"], row["statistic"], row.get("data")] != now:
            sys.exit(f"{name}.jsonl was recorded with other settings of {row['run']}: move it away")
        values[row["run"]][row["seed"]] = row["value"]
    return values


def holds(effect: Effect, values: dict[str, dict[int, float]]) -> dict[str, tuple[int, int]]:
    """Claim -> in how many seeds it holds, of how many that all runs have."""
    seeds = sorted(set.intersection(*map(set, values.values())))
    rows = [{run: found[seed] for run, found in values.items()} for seed in seeds]
    return {claim: (sum(bool(eval(claim, {}, row)) for row in rows), len(rows)) for claim in effect.claims}


def half_width(values: list[float]) -> float:
    """Half of Student's 95 % interval of the mean; NaN for one value."""
    n = len(values)
    return student.ppf(0.975, n - 1) * statistics.stdev(values) / n**0.5 if n > 1 else math.nan


def verdict(name: str) -> str:
    effect, values, lines = EFFECTS[name], by_run(name), [f"{name}: {EFFECTS[name].statistic}"]
    for run, found in values.items():
        n = len(found)
        text = f"{min(found.values()):.3g} (1 seed)" if n else "not run"
        if n > 1:
            text = f"{statistics.mean(found.values()):.3g} +- {half_width([*found.values()]):.2g} ({n} seeds, "
            text += f"{min(found.values()):.3g} to {max(found.values()):.3g})"
        lines.append(f"  {run:20} {text}")
    for claim, (yes, n) in holds(effect, values).items():
        wanted = effect.claims[claim]
        said = "too few seeds" if n < effect.seeds else "holds" if yes >= wanted else "DOES NOT HOLD"
        lines.append(f"  {claim}: in {yes} of {n} seeds, {wanted} were asked: {said}")
    return "\n".join(lines)


def run(name: tyro.conf.Positional[str], seeds: int | None = None) -> None:
    """Trains the seeds that an effect's file lacks, all runs of a seed one after the other; default: its own number."""
    FOLDER.mkdir(exist_ok=True)
    effect, known = EFFECTS[name], by_run(name)
    for seed in range(1, (effect.seeds if seeds is None else seeds) + 1):
        for arm, (script, settings) in effect.runs.items():
            if seed in known[arm]:
                continue
            start = time.perf_counter()
            row = {"run": arm, "seed": seed, "value": train(effect, arm, seed)}
            row |= {"seconds": round(time.perf_counter() - start, 1), "statistic": effect.statistic, "script": script}
            row |= {"data": effect.data} if effect.data else {}
            row |= {"settings": settings, **environment()}
            with open(FOLDER / f"{name}.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            print(name, {key: row[key] for key in ("run", "seed", "value", "seconds")}, flush=True)
    print(verdict(name))


def show() -> None:
    """Prints the verdicts, and draws each run's seeds with their mean."""
    from matplotlib.figure import Figure

    for name in [name for name in EFFECTS if recorded(name)]:
        print(verdict(name))
        figure = Figure(figsize=(6, 3))
        axis = figure.subplots()
        for place, found in enumerate(by_run(name).values()):
            axis.plot([place] * len(found), list(found.values()), "o", alpha=0.5)
            if found:
                axis.hlines(statistics.mean(found.values()), place - 0.2, place + 0.2, colors="black")
        axis.set_xticks(range(len(EFFECTS[name].runs)), list(EFFECTS[name].runs))
        axis.set(title=name, ylabel=EFFECTS[name].statistic)
        axis.grid(alpha=0.3)
        figure.savefig(FOLDER / f"{name}.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "show": show})
