"""Several seeds of one script side by side, or of several settings, and their mean.

    python benchmarks/seeds.py algos/ppo.py --seeds 8 --jobs 4 -- --env-id CartPole-v1 --total-timesteps 100000
    python benchmarks/seeds.py algos/ppo.py --seeds 4 --vary clip-coef=0.2,1e9
    python benchmarks/seeds.py algos/ppo.py algos/a2c.py --seeds 4

Flags behind `--` go to the script. It may be ours, a copy, or your own if it takes --seed, --output-dir and --resume.
Seeds 1 to 8 run, four at a time, one thread each. Ctrl-C and SIGTERM let each finish its step and save; after
them, or after a kill, the same command goes on: finished seeds stay, the others continue from their checkpoints. More
seeds may be asked for later.

FOLDER/seed-1/                the run of seed 1, as the script makes it. FOLDER/seed-1.log: what it printed
FOLDER/clip-coef=0.2/seed-1/  the same where there are several settings
FOLDER/seeds.csv              a row for each setting, seed, column and step
FOLDER/seeds.png, .pdf, .svg  mean and interval over steps, as benchmarks/compare.py draws and explains them
"""

import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import compare  # noqa: E402
from benchmarks.machine import cores  # noqa: E402
from utils.core import UserError  # noqa: E402

OURS = ("seed", "output-dir", "resume")  # set for each seed, so not to be given


@dataclass
class Args:
    scripts: tyro.conf.Positional[tuple[Path, ...]]
    """for example algos/ppo.py; their own flags stand behind --"""
    seeds: int = 8
    """seeds 1 to this"""
    jobs: int = cores()
    """runs at a time, one thread each"""
    folder: Path | None = None
    """where runs and results go; None: runs/seeds-SCRIPT-FLAGS"""
    vary: tuple[str, ...] = ()
    """FLAG=VALUE,VALUE,...: each value is a setting, of several flags each combination"""
    columns: tuple[str, ...] = compare.COLUMNS
    """columns of metrics.jsonl to draw, as patterns; seeds.csv has all"""


def side_by_side(commands: dict[str, list], jobs: int, logs: Path) -> Iterator[tuple[str, int, Path]]:
    """Runs one command for each name, `jobs` at a time on one thread each. Yields name, exit code and log as each ends.
    When the caller stops, those that run get SIGTERM, on which a script saves, and are waited for."""
    waiting, running = dict(commands), {}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = next(iter(waiting))
                with open(logs / f"{name}.log", "w") as log:
                    # A session of its own: a terminal's Ctrl-C must reach it once, through the SIGTERM below.
                    running[name] = subprocess.Popen(
                        list(map(str, waiting.pop(name))), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True, env=environment,
                    )  # fmt: skip
            for name in [name for name, process in running.items() if process.poll() is not None]:
                yield name, running.pop(name).returncode, logs / f"{name}.log"
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def settings_of(args: Args, flags: list[str]) -> dict[str, tuple[Path, list[str]]]:
    """Name of a setting -> its script and flags. One alone has the name ""."""
    values = []
    for text in args.vary:
        flag, _, rest = text.lstrip("-").partition("=")
        if not rest:
            raise UserError(f"--vary {text}: give FLAG=VALUE,VALUE, as in --vary clip-coef=0.2,1e9")
        values.append([(flag, value) for value in rest.split(",")])
    found = {}
    for script, *varied in itertools.product(args.scripts, *values):
        several = [script.stem] * (len(args.scripts) > 1) + [f"{flag}={value}" for flag, value in varied]
        found[" ".join(several).replace("/", "_")] = script, [*flags, *(f"--{flag}={value}" for flag, value in varied)]
    return found


def runs_of(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/config.json"))


def command(script: Path, flags: list[str], folder: Path) -> list:
    """What begins or continues a seed; empty where it has finished."""
    runs = runs_of(folder)
    if any((run / "model").is_dir() for run in runs):
        return []
    begun = [run for run in runs if (run / "checkpoint.pt").exists()]
    seed = folder.name.removeprefix("seed-")
    more = ["--resume", begun[-1]] if begun else [*flags, "--seed", seed, "--output-dir", folder]
    return [sys.executable, script, *more]


def write(settings: dict[str, tuple[Path, list[str]]], args: Args) -> None:
    found = []
    for name, (script, flags) in settings.items():
        folders = {seed: args.folder / name / f"seed-{seed}" for seed in range(1, args.seeds + 1)}
        finished = {str(seed): next(run for run in runs_of(folder) if (run / "model").is_dir())
                    for seed, folder in folders.items()}  # fmt: skip
        seeds = {seed: compare.columns_of(run) for seed, run in finished.items()}
        own = json.loads((finished["1"] / "config.json").read_text() or "{}")
        title = name or " ".join([script.name, *flags])
        found.append(compare.Setting(script.stem, own.get("task", ""), own.get("args", {}), "", seeds, title))
    compare.report(found, args.columns, args.folder / "seeds")


def main(args: Args, flags: list[str]) -> None:
    if args.jobs < 1:
        raise UserError(f"--jobs is {args.jobs}: it must be at least 1")
    if args.seeds < 2:
        raise UserError("--seeds 1: one seed has no interval; give at least 2, or run the script itself")
    if missing := [script for script in args.scripts if not script.is_file()]:
        raise UserError(f"{missing[0]} is not a file: give the path of a script, as in algos/ppo.py")
    settings = settings_of(args, flags)
    all_flags = [flag.partition("=")[0].replace("_", "-") for _, own in settings.values() for flag in own]
    if given := [flag for flag in all_flags if flag in [f"--{name}" for name in OURS]]:
        raise UserError(f"{given[0]} is set for each seed: leave it out")
    words = [*(script.stem for script in args.scripts), *flags, *args.vary]
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(words)).strip("-")
    args.folder = (args.folder or Path("runs") / f"seeds-{slug[:80]}").resolve()
    # Of the scripts alone, not of utils/: enough to notice that one's own script was edited between two seeds.
    texts = b"".join(script.read_bytes() for script in args.scripts)
    about = {"flags": flags, "script": hashlib.sha256(texts).hexdigest()}
    known = args.folder / "seeds.json"
    begun = any(args.folder.glob("**/config.json"))
    if begun and json.loads(known.read_text()) != about:
        raise UserError(f"{args.folder} holds seeds of another script, version or flags: give another --folder")
    for name in settings:
        (args.folder / name).mkdir(parents=True, exist_ok=True)
    known.write_text(json.dumps(about, indent=1))

    commands = {}
    for seed, (name, (script, own)) in itertools.product(range(1, args.seeds + 1), settings.items()):
        if line := command(script, own, args.folder / name / f"seed-{seed}"):
            commands[str(Path(name) / f"seed-{seed}")] = line
    number, began = args.seeds * len(settings), time.time()
    failed, ended, done = [], 0, number - len(commands)
    print(f"{args.folder}: {done} of {number} seeds have finished", flush=True)
    for name, code, log in side_by_side(commands, args.jobs, args.folder):
        done, ended = done + (code == 0), ended + 1
        says = (log.read_text().splitlines() or [""])[-1]
        if code == 2 and says.startswith("error: "):  # wrong input, which the other seeds have, too
            raise UserError(f"{name}: {says.removeprefix('error: ')}")
        if code == 2:  # a flag that the script does not have: tyro's own picture
            print(log.read_text(), file=sys.stderr)
            sys.exit(2)
        failed += [name] if code else []
        left = timedelta(seconds=round((time.time() - began) / ended * (len(commands) - ended)))
        how = f"ended with exit code {code}: {says}" if code else f"finished ({done} of {number})"
        print(f"{name} {how}, about {left} to go", flush=True)
    if failed:  # no mean without them: seeds that crash are not a random choice
        print(f"error: {', '.join(failed)} did not finish, so no mean is drawn: read {failed[0]}.log in {args.folder}; "
              "the same command tries again", file=sys.stderr)  # fmt: skip
        sys.exit(1)
    write(settings, args)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C does, so that the runs are told
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    try:
        main(tyro.cli(Args, description=__doc__.partition("\n")[0], args=sys.argv[1:split]), sys.argv[split + 1 :])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
