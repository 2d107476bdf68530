"""Several seeds of one script side by side, and their mean.

    python benchmarks/seeds.py algos/ppo.py --seeds 8 --jobs 4 -- --env-id CartPole-v1 --total-timesteps 100000

What stands behind `--` goes to the script: one of ours, a copy or your own, if it takes --seed, --output-dir and
--resume. Seeds 1 to 8 run, four at a time, one thread each. Ctrl-C and SIGTERM let each finish its step and save; after
them, or after a kill, the same command goes on: finished seeds stay, the others continue from their checkpoints. More
seeds may be asked for later.

FOLDER/seed-1/            the run of seed 1, as the script makes it. FOLDER/seed-1.log: what it printed
FOLDER/seeds.csv          a row for each column and step that all seeds have logged: mean, interval, each seed's value
FOLDER/seeds.png          mean and interval over steps

The interval is Student's: mean +- t s / sqrt(n), with the 97.5 % quantile t of n - 1 degrees of freedom and the
standard deviation s of the n seeds. It covers the mean over all seeds with 95 % probability, at each step on its own,
if the values are about normal. It says nothing of where a single seed may lie.
"""

import csv
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import tyro
from scipy.stats import t as student

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import cores  # noqa: E402
from utils.core import UserError  # noqa: E402

SHARES = ("eval/success", "eval/pass@*", "*fraction", "*accuracy*")  # their intervals end at 0 and 1
OURS = ("seed", "output-dir", "resume")  # set for each seed, so not to be given


@dataclass
class Args:
    script: tyro.conf.Positional[Path]
    """for example algos/ppo.py; its own flags stand behind --"""
    seeds: int = 8
    """seeds 1 to this"""
    jobs: int = cores()
    """runs at a time, one thread each"""
    folder: Path | None = None
    """where runs and results go; None: runs/seeds-SCRIPT-FLAGS"""
    columns: tuple[str, ...] = ("return", "reward", "eval/*")
    """columns of metrics.jsonl to draw; seeds.csv has all"""


def side_by_side(commands: dict[int, list], jobs: int, logs: Path) -> Iterator[tuple[int, int, Path]]:
    """Runs one command for each seed, `jobs` at a time on one thread each. Yields seed, exit code and log as each ends.
    When the caller stops, those that run get SIGTERM, on which a script saves, and are waited for."""
    waiting, running = dict(commands), {}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                seed = next(iter(waiting))
                with open(logs / f"seed-{seed}.log", "w") as log:
                    # A session of its own: a terminal's Ctrl-C must reach it once, through the SIGTERM below.
                    running[seed] = subprocess.Popen(
                        list(map(str, waiting.pop(seed))), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True, env=environment,
                    )  # fmt: skip
            for seed in [seed for seed, process in running.items() if process.poll() is not None]:
                yield seed, running.pop(seed).returncode, logs / f"seed-{seed}.log"
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def command(args: Args, flags: list[str], seed: int) -> list:
    """What begins or continues a seed; empty where it has finished."""
    runs = sorted(path.parent for path in (args.folder / f"seed-{seed}").glob("*/config.json"))
    if any((run / "model").is_dir() for run in runs):
        return []
    begun = [run for run in runs if (run / "checkpoint.pt").exists()]
    more = ["--resume", begun[-1]] if begun else [*flags, "--seed", seed, "--output-dir", args.folder / f"seed-{seed}"]
    return [sys.executable, args.script, *more]


def history(folder: Path) -> list[dict]:
    """The rows of a seed's finished run."""
    (metrics,) = (path.parent / "metrics.jsonl" for path in folder.glob("*/model"))
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def summary(histories: list[list[dict]]) -> dict[str, list[list[float]]]:
    """Column -> [step, mean, low, high, each seed's value] at each step at which all seeds have logged it."""
    table, count = {}, len(histories)
    logged = [{(name, row["step"]): row[name] for row in rows for name in row} for rows in histories]
    for name, step in (key for key in logged[0] if all(key in seed for seed in logged)):
        if name == "step" or name.startswith("time/"):
            continue
        values = [seed[name, step] for seed in logged]
        mean, width = np.mean(values), student.ppf(0.975, count - 1) * np.std(values, ddof=1) / count**0.5
        low, high = (0, 1) if any(fnmatch(name, share) for share in SHARES) else (-np.inf, np.inf)
        table.setdefault(name, []).append([step, mean, *np.clip([mean - width, mean + width], low, high), *values])
    return table


def write(table: dict[str, list[list[float]]], seeds: int, title: str, args: Args) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(args.folder / "seeds.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["column", "step", "mean", "low", "high", *(f"seed {i + 1}" for i in range(seeds))])
        writer.writerows([name, *row] for name, rows in table.items() for row in rows)
    drawn = [name for name in table if any(fnmatch(name, pattern) for pattern in args.columns)]
    if not drawn:
        raise UserError(f"--columns {' '.join(args.columns)}: all seeds have logged {', '.join(table)} instead")
    figure, axes = plt.subplots(1, len(drawn), figsize=(4.5 * len(drawn), 3.6), squeeze=False)
    for axis, name in zip(axes[0], drawn):
        step, mean, low, high, *_ = zip(*table[name])
        axis.plot(step, mean, marker="o" if len(step) < 40 else None, markersize=3)
        axis.fill_between(step, low, high, alpha=0.2)
        axis.set(title=name, xlabel="step")
        print(f"{name} at step {step[-1]:,}: {mean[-1]:.4g}, 95 % interval {low[-1]:.4g} to {high[-1]:.4g}")
    figure.suptitle(f"{title}: mean of {seeds} seeds and its 95 % interval (Student's t)", fontsize=9)
    figure.tight_layout()
    figure.savefig(args.folder / "seeds.png", dpi=110)
    plt.close(figure)
    print(f"table: {args.folder / 'seeds.csv'}\ncurve: {args.folder / 'seeds.png'}")


def main(args: Args, flags: list[str]) -> None:
    if args.jobs < 1:
        raise UserError(f"--jobs is {args.jobs}: it must be at least 1")
    title = " ".join([args.script.name, *flags])
    if args.seeds < 2:
        raise UserError("--seeds 1: one seed has no interval; give at least 2, or run the script itself")
    if not args.script.is_file():
        raise UserError(f"{args.script} is not a file: give the path of a script, as in algos/ppo.py")
    if given := [flag for flag in flags if flag.partition("=")[0].replace("_", "-") in [f"--{name}" for name in OURS]]:
        raise UserError(f"{given[0]} is set for each seed: leave it out")
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", f"{args.script.stem} {' '.join(flags)}").strip("-")
    args.folder = (args.folder or Path("runs") / f"seeds-{slug[:80]}").resolve()
    # Of the script alone, not of utils/: enough to notice that one's own script was edited between two seeds.
    about = {"flags": flags, "script": hashlib.sha256(args.script.read_bytes()).hexdigest()}
    known = args.folder / "seeds.json"
    begun = any(args.folder.glob("seed-*/*/config.json"))
    if begun and json.loads(known.read_text()) != about:
        raise UserError(f"{args.folder} holds seeds of another script, version or flags: give another --folder")
    args.folder.mkdir(parents=True, exist_ok=True)
    known.write_text(json.dumps(about, indent=1))

    commands = {seed: line for seed in range(1, args.seeds + 1) if (line := command(args, flags, seed))}
    failed, done = [], args.seeds - len(commands)
    print(f"{args.folder}: {done} of {args.seeds} seeds have finished", flush=True)
    for seed, code, log in side_by_side(commands, args.jobs, args.folder):
        done += code == 0
        says = (log.read_text().splitlines() or [""])[-1]
        if code == 2 and says.startswith("error: "):  # wrong input, which the other seeds have, too
            raise UserError(f"seed {seed}: {says.removeprefix('error: ')}")
        if code == 2:  # a flag that the script does not have: tyro's own picture
            print(log.read_text(), file=sys.stderr)
            sys.exit(2)
        failed += [seed] if code else []
        print(f"seed {seed} {f'ended with exit code {code}: {says}' if code else f'finished ({done} of {args.seeds})'}",
              flush=True)  # fmt: skip
    if failed:  # no mean without them: seeds that crash are not a random choice
        print(f"error: seeds {failed} did not finish, so no mean is drawn: read seed-{failed[0]}.log in {args.folder}; "
              "the same command tries again", file=sys.stderr)  # fmt: skip
        sys.exit(1)
    write(summary([history(args.folder / f"seed-{i + 1}") for i in range(args.seeds)]), args.seeds, title, args)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C does, so that the runs are told
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    try:
        main(tyro.cli(Args, description=__doc__, args=sys.argv[1:split]), sys.argv[split + 1 :])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
