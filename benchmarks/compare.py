"""Runs and folders of seeds in one picture and one table.

    python benchmarks/compare.py runs/RUN runs/ANOTHER-RUN
    python benchmarks/compare.py runs/seeds-ppo --columns eval/return approx_kl --x time --centre iqm
    python benchmarks/compare.py runs/seeds-mine --reference ppo-cartpole      beside a curve of benchmarks/curves

A folder is a run, or holds runs (seeds.py makes such folders). Runs that differ in their seed alone are one setting.
A setting is named after its script, or after the flags in which it differs from the others.

compare.png, .pdf, .svg     a panel for each column: the mean of a setting's seeds (or their interquartile mean), its
                            95 % interval, and every seed as a thin line
compare.csv                 a row for each setting, seed, column and step: pandas.read_csv(...) reads it

The interval is a percentile bootstrap over seeds, so it never leaves what was seen. Of three seeds it says little.
Printed, with 95 % intervals: the mean over seeds of each column's first, highest and last value; and with what
probability a seed of one setting ends higher than one of another (Agarwal et al. 2021, arXiv 2108.13264, section 4).
The interquartile mean is the mean of the middle half. Of a seed that ran twice the longer run counts.
"""

import csv
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from scipy.stats import bootstrap, trim_mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from utils.core import COLOURS, UserError  # noqa: E402

OURS = ("seed", "output_dir", "save_every", "resume", "device", "threads", "track", "log_samples")  # change no result
COLUMNS = ("return", "reward", "eval/return", "eval/success", "eval/greedy", "eval/pass@*", "approx_kl", "kl")
UNITS = {"*kl": "nats", "entropy": "nats a token or action", "length": "steps or tokens", "time/*": "s"}
STYLES = ("-", "--", ":", "-.")  # beyond seven settings, and for whoever prints in grey
POINTS = 200  # of a line


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs, or folders that hold some"""
    columns: tuple[str, ...] = COLUMNS
    """columns of metrics.jsonl to draw, as patterns; compare.csv has all"""
    x: Literal["step", "time", "episodes", "tokens"] = "step"
    """time: seconds of training, without evaluations; episodes: that ended; tokens: that were sampled"""
    centre: Literal["mean", "iqm"] = "mean"
    """mean of the seeds, or interquartile mean"""
    reference: tuple[str, ...] = ()
    """recorded curves to draw beside, such as ppo-cartpole: benchmarks/curves"""
    output: Path = Path("runs/compare")
    """what is written: OUTPUT.png, .pdf, .svg, .csv"""


@dataclass
class Setting:
    script: str
    task: str
    args: dict
    typed: str
    """the command line"""
    seeds: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]
    """seed -> column -> x (n,) and values (n,)"""
    name: str = ""


def read(run: Path) -> dict:
    """A run's config.json."""
    try:
        config = json.loads((run / "config.json").read_text())
        return {"args": config["args"], "command": config["command"], "task": config["task"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{run} is not the folder of a run: its config.json cannot be read") from error


def size(columns: dict) -> int:
    return sum(len(x) for x, _ in columns.values())


def places(rows: list[dict], x: str, run: Path) -> list[float]:
    """Where each row stands on the axis."""
    if x == "step":
        return [row["step"] for row in rows]
    amounts = []
    for before, row in itertools.pairwise([{"step": 0}, *rows]):
        speeds = [row[name] for name in row if name in ("time/steps_per_second", "time/updates_per_second")]
        seconds = row.get("time/step") or sum((row["step"] - before["step"]) / speed for speed in speeds[:1])
        tokens = row.get("time/tokens_per_second", 0.0) * seconds
        amounts.append({"time": seconds, "tokens": tokens, "episodes": row.get("episodes", 0)}[x])
    if not any(amounts):
        raise UserError(f"{run} has no column that tells of {x}: give another --x")
    return list(np.cumsum(amounts))


def columns_of(run: Path, x: str = "step") -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Column of metrics.jsonl -> x (n,) and values (n,), where it was logged."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if not rows:
        raise UserError(f"{run} has no row of metrics yet: wait, or leave it out")
    at, found = places(rows, x, run), {}
    for name in dict.fromkeys(name for row in rows for name in row if name != "step"):
        pairs = [(place, row[name]) for place, row in zip(at, rows) if name in row]
        found[name] = tuple(np.array(pairs, float).T)
    return found


def settings_of(folders: tuple[Path, ...], x: str) -> list[Setting]:
    """All runs in the folders, those that differ in their seed alone as one."""
    found: dict[tuple, Setting] = {}
    for folder in folders:
        runs = [folder] if (folder / "config.json").exists() else [p.parent for p in folder.glob("**/metrics.jsonl")]
        if not runs:
            raise UserError(f"{folder} holds no run: give the folder of a run, or one that holds some")
        for run in sorted(runs):
            config = read(run)
            args = {name: value for name, value in config["args"].items() if name not in OURS}
            script = Path(config["command"][0]).stem  # a copy has the NAME of what it was copied from
            key = (script, json.dumps(args, sort_keys=True))
            setting = found.setdefault(key, Setting(script, config["task"], args, " ".join(config["command"]), {}))
            seed, columns = str(config["args"].get("seed", 0)), columns_of(run, x)
            if seed in setting.seeds:  # it would count twice
                print(f"{run}: another run has its settings and its seed; the longer one counts")
            if size(columns) > size(setting.seeds.get(seed, {})):
                setting.seeds[seed] = columns
    name_them(settings := list(found.values()))
    return settings


def name_them(settings: list[Setting]) -> None:
    """By the script where each has its own, else by as few flags as tell them apart, typed ones first."""
    scripts = {setting.script for setting in settings}
    for script in scripts:
        alike = [setting for setting in settings if setting.script == script]
        differ = [name for name in alike[0].args if len({str(s.args.get(name)) for s in alike}) > 1]
        typed = [name for name in differ if any(f"--{name.replace('_', '-')}" in s.typed for s in alike)]
        parts: list = [[] for _ in alike]
        for name in dict.fromkeys([*typed, *differ]):
            more = [[*part, spelled(name.replace("_", "-"), s.args.get(name))] for part, s in zip(parts, alike)]
            parts = more if len(set(map(str, more))) > len(set(map(str, parts))) else parts
        for setting, part in zip(alike, parts):
            setting.name = " ".join([setting.script] * (len(scripts) > 1 or not part) + part)
        if hidden := [name for name in differ if name not in str(parts).replace("-", "_")]:
            print(f"runs of {script}.py differ in these flags, too: {', '.join(hidden)}")


def spelled(flag: str, value) -> str:
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value:g}" if isinstance(value, float) else f"--{flag} {value}"


def recorded(name: str) -> tuple[str, Setting]:
    """A curve of benchmarks/curves, and its column."""
    from benchmarks import curves, site

    if name not in curves.CURVES or not curves.recorded(name):
        raise UserError(f"there is no recorded curve {name}: benchmarks/README.md lists them")
    column, (every, unit) = curves.CURVES[name].column, site.axis(name)
    if unit == "iterations":
        raise UserError(f"the curve {name} has no steps, for an iteration without an ended episode has no point")
    seeds = {str(row["seed"]): {column: (every * np.arange(1, len(row[column]) + 1), np.array(row[column]))}
             for row in curves.recorded(name)}  # fmt: skip
    return column, Setting("", "", {}, "", seeds, f"{name}, recorded")


def centre_of(kind: str) -> Callable:
    return np.mean if kind == "mean" else lambda values, axis: trim_mean(values, 0.25, axis=axis)


def interval(values: np.ndarray, statistic: Callable) -> tuple[np.ndarray, np.ndarray]:
    """Of seeds (n, ...): the percentile bootstrap's 95 %; of one seed itself."""
    if len(values) < 2:
        return values[0], values[0]
    found = bootstrap((values,), statistic, axis=0, method="percentile", n_resamples=2000, batch=100, rng=0)
    return found.confidence_interval.low, found.confidence_interval.high


def together(setting: Setting, column: str) -> tuple[np.ndarray, np.ndarray]:
    """x (m,) that all seeds have reached, and each seed's values there (n, m), interpolated where it logged none."""
    seeds = [seed[column] for seed in setting.seeds.values() if column in seed]
    grid = np.unique([place for x, _ in seeds for place in x])
    grid = grid[[all(x[0] <= place <= x[-1] for x, _ in seeds) for place in grid]] if len(grid) else grid
    grid = grid[np.unique(np.linspace(0, len(grid) - 1, min(POINTS, len(grid))).astype(int))]
    return grid, np.array([np.interp(grid, x, values) for x, values in seeds])


def drawn(settings: list[Setting], patterns: tuple[str, ...]) -> list[str]:
    """The columns, in the order of the patterns, that some setting has."""
    logged = list(dict.fromkeys(name for s in settings for seed in s.seeds.values() for name in seed))
    found = list(dict.fromkeys(name for pattern in patterns for name in logged if fnmatch(name, pattern)))
    if not found:
        raise UserError(f"--columns {' '.join(patterns)}: the runs have logged {', '.join(logged)} instead")
    return found


def picture(settings: list[Setting], columns: list[str], xlabel: str, centre: str, output: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    wide = min(len(columns), 3)
    high = -(-len(columns) // wide)
    figure = Figure(figsize=(4.2 * wide, 3.2 * high + 0.3 * -(-len(settings) // wide)), layout="constrained")
    axes = list(figure.subplots(high, wide, squeeze=False).flat)
    lines = {}
    for axis, column in zip(axes, columns):
        for k, setting in enumerate(settings):
            look = dict(color=COLOURS[k % len(COLOURS)], linestyle=STYLES[k // len(COLOURS) % len(STYLES)])
            x, values = together(setting, column)
            if not len(x):
                continue
            mark = "." if len(x) < 30 else ""
            for seed in values if len(values) > 1 else ():
                axis.plot(x, seed, linewidth=0.6, alpha=0.35, **look)
            (lines[setting.name],) = axis.plot(x, centre_of(centre)(values, axis=0), linewidth=1.8, marker=mark, **look)
            axis.fill_between(x, *interval(values, centre_of(centre)), alpha=0.2, linewidth=0, color=look["color"])
        unit = next((unit for pattern, unit in UNITS.items() if fnmatch(column, pattern)), "")
        axis.set(xlabel=xlabel, ylabel=f"{column} ({unit})" if unit else column)
        axis.locator_params(axis="x", nbins=5, integer=True)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.grid(alpha=0.3)
    for axis in axes[len(columns) :]:
        axis.set_axis_off()
    tasks = dict.fromkeys(f"{s.script} on {s.task}" for s in settings if s.task)
    several = [f"{centre} of seeds, 95 % interval"] if max(len(s.seeds) for s in settings) > 1 else []
    figure.suptitle(": ".join([", ".join(tasks)] * bool(tasks) + several), fontsize=10)
    count = {s.name: f", {len(s.seeds)} seeds" for s in settings if len(s.seeds) > 1}
    figure.legend(list(lines.values()), [f"{name}{count.get(name, '')}" for name in lines],
                  loc="outside lower center", ncols=wide, frameon=False)  # fmt: skip
    with rc_context({"svg.fonttype": "none", "pdf.fonttype": 42}):  # text stays text
        for kind in ("png", "pdf", "svg"):
            figure.savefig(output.with_name(f"{output.name}.{kind}"), dpi=200)


def shown(values: np.ndarray, statistic: Callable) -> str:
    """The centre of seeds (n,), and its interval."""
    low, high = interval(values, statistic)
    around = f" ({low:.3g} to {high:.3g})" if len(values) > 1 else ""
    return f"{statistic(values, axis=0):.3g}{around}"


def improvement(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Probability that a seed of the first ends higher than one of the second, ties as half of one."""

    def share(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        wins = np.sign(np.expand_dims(a, -1) - np.expand_dims(b, -2))
        return (wins.mean((-1, -2)) + 1) / 2

    if min(len(ours), len(theirs)) < 2:
        return f"{share(ours, theirs):.2f}"
    found = bootstrap((ours, theirs), share, method="percentile", n_resamples=2000, batch=100, rng=0, vectorized=True)
    return f"{share(ours, theirs):.2f} ({found.confidence_interval.low:.2f} to {found.confidence_interval.high:.2f})"


def table(settings: list[Setting], columns: list[str], centre: str) -> str:
    """Of each column: first, highest and last values of each setting; who ends higher."""
    lines, statistic = [], centre_of(centre)
    for column in columns:
        held = {s.name: [seed[column][1] for seed in s.seeds.values() if column in seed] for s in settings}
        held = {name: seeds for name, seeds in held.items() if seeds}
        rows = [[column, "first", "highest", "last", "seeds"]]
        for number, (name, seeds) in enumerate(held.items(), 1):
            numbers = [[v[0] for v in seeds], [v.max() for v in seeds], [v[-1] for v in seeds]]
            rows.append([f"{number} {name}", *(shown(np.array(x), statistic) for x in numbers), str(len(seeds))])
        widths = [max(map(len, cells)) for cells in zip(*rows)]
        lines += ["", *("  ".join(f"{x:{n}}" for x, n in zip(row, widths)).rstrip() for row in rows)]
        last = [np.array([values[-1] for values in seeds]) for seeds in held.values()]
        for i, j in itertools.combinations(range(len(last)), 2):
            lines.append(f"  P({i + 1} ends higher than {j + 1}) = {improvement(last[i], last[j])}")
    return "\n".join(lines)


def write_csv(settings: list[Setting], x: str, path: Path) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["setting", "script", "seed", "column", x, "value"])
        for setting in settings:
            for seed, columns in setting.seeds.items():
                for column, (at, values) in columns.items():
                    writer.writerows([setting.name, setting.script, seed, column, *pair] for pair in zip(at, values))


def report(settings: list[Setting], patterns: tuple, output: Path, x: str = "step", centre: str = "mean") -> None:
    """Writes the pictures and the rows, and prints the table."""
    columns = drawn(settings, patterns)
    units = {"environment steps" if "total_timesteps" in s.args else "training steps" for s in settings if s.args}
    steps = "steps" if len(units) > 1 else "".join(units)
    names = {"step": steps, "time": "seconds of training", "tokens": "sampled tokens"}
    output.parent.mkdir(parents=True, exist_ok=True)
    write_csv(settings, x, output.with_name(f"{output.name}.csv"))
    picture(settings, columns, names.get(x, x), centre, output)
    print(f"{table(settings, columns, centre)}\n\npicture: {output}.png, .pdf, .svg\nrows: {output}.csv")


def main(args: Args) -> None:
    settings, patterns = settings_of(args.runs, args.x), args.columns
    if args.reference and args.x != "step":
        raise UserError("--reference: recorded curves have steps alone, so leave --x out")
    for name in args.reference:
        column, setting = recorded(name)
        settings.append(setting)
        patterns = (*patterns, column)
    report(settings, patterns, args.output, args.x, args.centre)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__.partition("\n")[0]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
