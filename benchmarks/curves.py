"""Reference learning curves: how they are recorded, and the band that fresh seeds must reach.

    python benchmarks/curves.py record grpo-sort --seeds 30       appends one row per seed to curves/grpo-sort.jsonl;
                                                                  --jobs 2: two seeds at a time
    python benchmarks/curves.py add sac-hopper-1m RUN             appends the row of a run that its script has finished
    python benchmarks/curves.py show                              bands, false-alarm rates, power; curves/*.png

A curve stands in its script's spec (tests/specs). A band is one-sided: with n recorded seeds of mean m and standard
deviation s, the mean of two fresh seeds falls below m - t s sqrt(1/2 + 1/n) with probability `alarm`, where t is that
quantile of Student's distribution with n - 1 degrees of freedom (a prediction interval; the values are treated as
normal). A test fails where this happens twice: below the band, two more fresh seeds are asked. For about one seed in a
hundred ends so badly as no normal distribution has it (10 %-BC at 458, where 100 recorded seeds have 736 to 1,438; IQL
at 444; a reward model that RLOO over-optimises within 8 steps), from code that repeats its recorded seeds bit for bit;
a bug is there again. A drop of (t + 1.64) s sqrt(1/2 + 1/n) is caught with 90 % probability, about.

All bands of one run of the tests fail together in less than one run of a hundred where nothing is wrong (BUDGET):
`alarm` is 1 % or, where a run uses so many bands that their false alarms add up to more, the first level of ALARMS at
which they do not. Today's default bands fit at 1 %. Of sixty scripts, about 80 bands of 15 to 30 seeds fit at 0.5 to
0.3 %, which makes a band 12 to 23 % wider, and only in a run that trains them all.

Proportions of right answers are taken as arcsin(sqrt(p)), which stabilises their variance: near 1 they are skewed.
Returns of sampled actions in MuJoCo are positive and skewed, and are compared as logarithms.

Which numbers are compared was fixed before the first recording, except for bc, iql, dt, ppo on Hopper and HalfCheetah
and sac on Hopper: there it was chosen after a first recording and before any band was used. The return of mean actions
varies two to five times as much between seeds as that of sampled ones; the slope of four targets from different start
states varied more than it was large; one of eight seeds of sac fell in its last evaluation alone.
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import torch
import tyro
from scipy.special import ndtr
from scipy.stats import t as student

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos import reward_model  # noqa: E402
from benchmarks.machine import environment  # noqa: E402
from benchmarks.seeds import side_by_side  # noqa: E402
from tests.specs import SPECS  # noqa: E402
from utils.eject import eject  # noqa: E402

FOLDER = Path(__file__).resolve().parent / "curves"
BUDGET = 0.01  # of false alarms in one run of the tests
ALARMS = (0.01, 0.007, 0.005, 0.004, 0.003, 0.002, 0.001, 0.0005)  # how often a pair of fresh seeds falls below a band
DRAWN = 240  # seconds of one core for changed curves in one run of the tests; the seven take 520
ENOUGH = 8  # seeds: of fewer, a band is so wide that a run that learns nothing may lie in it
SCALES = {  # on which numbers are compared, and back
    "plain": (float, float),
    "share": (lambda p: math.asin(math.sqrt(p)), lambda x: math.sin(max(x, 0)) ** 2),
    "log": (lambda x: math.log(max(x, 1e-9)), math.exp),
}
CURVES = {name: curve for spec in SPECS.values() for name, curve in spec.curves.items()}
SCRIPT_OF = {name: script for script, spec in SPECS.items() for name in spec.curves}
REWARD_MODEL = dict(task="sort", max_steps=20, eval_every=0)  # what a curve with label_noise trains before


@contextlib.contextmanager
def quiet_folder():
    """A temporary folder, while nothing is printed."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        yield folder


def begun(settings: dict, common: dict) -> dict:
    """The settings. Where their model, or a run that they need, is (script, settings), such a run is trained
    before, and the model is its own. It has another seed, so that it has seen other prompts."""
    key = next((key for key in ("init", "critic") if key in settings), "model")
    if not isinstance(settings.get(key), tuple):
        return settings
    script, earlier = settings[key]
    module, known = importlib.import_module(f"algos.{script}"), set(Path(common["output_dir"]).glob("*"))
    common = {name: value for name, value in common.items() if name in module.Args.__dataclass_fields__}
    module.train(module.Args(**earlier | common | {"seed": common["seed"] + 10**6}))
    (made,) = set(Path(common["output_dir"]).glob("*")) - known
    return settings | {key: str(made / "model" if key == "model" else made)}


def run_once(name: str, seed: int, **changes) -> dict:
    """Trains curve `name` with `seed` in a temporary folder, in this process; returns one row of its file."""
    curve = CURVES[name]
    column, module = curve.column, importlib.import_module(f"algos.{SCRIPT_OF[name]}")
    start = time.perf_counter()
    with quiet_folder() as folder:
        common = {"seed": seed, "output_dir": folder, "save_every": 10**6}
        if curve.label_noise is not None:
            reward_model.train(reward_model.Args(**REWARD_MODEL | common, label_noise=curve.label_noise))
            changes = {"reward": tuple(map(str, Path(folder).glob("*/model")))} | changes
        history = module.train(module.Args(**begun(curve.settings, common | changes) | common | changes))
    return row_of(column, seed, history) | {"seconds": round(time.perf_counter() - start, 1)}


def row_of(column: str, seed: int, history: list[dict]) -> dict:
    """What a curve's file keeps of a run, from the rows of its metrics."""
    steps = [row[column] for row in history if column in row]
    row = {"seed": seed, column: [round(x, 5) for x in steps]}
    row |= {key: value for key, value in history[-1].items() if key.startswith("eval/") and key != column}
    tenth = steps[-max(1, len(steps) // 10) :]
    row |= {f"mean {column}": statistics.mean(steps), f"last {column}": steps[-1]}
    row |= {"negative final loss": -statistics.mean(tenth)} if column == "loss" else {}
    row |= {"late return": statistics.mean(tenth)} if column == "return" else {}
    row |= {"negative mean reward/task": -statistics.mean(steps)} if column == "reward/task" else {}
    return row


def recorded(name: str) -> list[dict]:
    path = FOLDER / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def peers(name: str) -> dict[str, list[dict]]:
    """The peers' rows for this curve, from the same start; empty where there are none."""
    return {"TRL 1.16": recorded(f"trl-{name}"), "SB3 2.9": recorded(f"sb3-{name}")}


def band(name: str, number: str, alarm: float = ALARMS[0]) -> dict[str, float]:
    """lower: what the mean of two fresh seeds must reach, once in two pairs; power: the drop from the recorded mean
    that is caught with 90 % probability; mean, sd, n of the recorded seeds."""
    to, back = SCALES[CURVES[name].numbers[number]]
    values = [to(row[number]) for row in recorded(name)]
    n, mean, sd = len(values), statistics.mean(values), statistics.stdev(values)
    width = sd * math.sqrt(1 / 2 + 1 / n)
    quantile = student.ppf(1 - alarm, n - 1)
    levels = [mean, mean - quantile * width, mean - (quantile + 1.6352) * width]  # 0.949 for each pair
    middle, lower, caught = (back(level) for level in levels)
    return {"lower": lower, "mean": middle, "sd": sd, "n": n, "power": middle - caught}


@functools.cache
def false_alarm(n: int, alarm: float = ALARMS[0]) -> float:
    """How often two pairs of normal seeds both fall below the band of n others, by simulation of the bands."""
    rng, draws = np.random.default_rng(0), 100_000
    sd = np.sqrt(rng.chisquare(n - 1, draws) / (n - 1))
    lower = rng.normal(0, n**-0.5, draws) - student.ppf(1 - alarm, n - 1) * sd * math.sqrt(1 / 2 + 1 / n)
    return float((ndtr(lower * 2**0.5) ** 2).mean())


def alarm_level(seeds: list[int]) -> float:
    """The largest of ALARMS at which bands of so many recorded seeds stay within BUDGET together."""
    return next(alarm for alarm in ALARMS if sum(false_alarm(n, alarm) for n in seeds) <= BUDGET)


def reached(name: str, number: str, rows: list[dict]) -> float:
    """The mean of fresh seeds' numbers, taken on the scale of the band."""
    to, back = SCALES[CURVES[name].numbers[number]]
    return back(statistics.mean(to(row[number]) for row in rows))


def fresh_seeds() -> list[int]:
    """Four seeds that no recording used and nobody chose: functions of the commit, or of the sources outside of git."""
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    source = git or "".join(path.read_text() for path in sorted((ROOT / "algos").glob("*.py")))
    first = 1000 + zlib.crc32(source.encode()) % 10**6
    return list(range(first, first + 4))


def without_docstrings(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [n for n in body if not isinstance(n, ast.Expr) or not isinstance(n.value, ast.Constant)]
    return ast.unparse(tree)


@functools.cache
def hash_of(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


@functools.cache
def closure(script: str) -> str:
    """Hash of what eject.py writes for it, without comments and docstrings."""
    return hashlib.sha256(without_docstrings(eject(ROOT / f"algos/{script}.py")).encode()).hexdigest()[:16]


def proven(name: str) -> dict[str, str]:
    """Hashes of all that a curve depends on."""
    curve = CURVES[name]
    scripts = [SCRIPT_OF[name]] + ["reward_model"] * (curve.label_noise is not None)
    return {
        "closure": " ".join(closure(script) for script in scripts),
        "model": hash_of(*sorted((ROOT / "utils/tiny_model").iterdir())),
        "data": hash_of(ROOT / "utils/hopper.hdf5"),
        "curve": hashlib.sha256(repr(curve).encode()).hexdigest()[:16],
    }


def green(name: str) -> dict:
    """The record of the last run of the tests in which fresh seeds reached the bands; empty where there is none."""
    path = FOLDER / f"green/{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def learns_always(name: str) -> bool:
    """Whether it is the first short curve of one of the best-known scripts."""
    spec = SPECS[SCRIPT_OF[name]]
    return spec.known and name == next(key for key, curve in spec.curves.items() if not curve.slow)


def unchanged_since(name: str) -> str:
    """The commit of the last green run, where nothing has changed that the curve depends on; else empty."""
    record = green(name)
    return record["commit"] or "an unknown commit" if record.get("proven") == proven(name) else ""


def drawn(names: set[str]) -> set[str]:
    """Of the curves whose code has changed, besides the best-known scripts', as many as learn in DRAWN seconds, in an
    order that the commit draws: a change of utils/ would have all of them learn."""
    rows = {name: found for name in sorted(names) if len(found := recorded(name)) >= ENOUGH}
    changed = [name for name in rows
               if not (learns_always(name) or CURVES[name].slow or unchanged_since(name))]  # fmt: skip
    chosen, left = set(), DRAWN
    for name in random.Random(fresh_seeds()[0]).sample(changed, len(changed)):
        cost = 2 * statistics.mean(row["seconds"] for row in rows[name])
        if cost <= left:
            chosen, left = chosen | {name}, left - cost
    return chosen


def write_green(curves: dict[str, list[dict]]) -> None:
    """Called by the tests alone, in one process, with the fresh seeds' rows of each curve that reached its bands."""
    about = environment()  # once: the first record that is written makes the tree differ from its commit
    for name, rows in curves.items():
        values = [{key: row[key] for key in ("seed", *CURVES[name].numbers)} for row in rows]
        record = {"commit": about["commit"], "versions": about["versions"], "proven": proven(name), "rows": values}
        path = FOLDER / f"green/{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".new").write_text(json.dumps(record, indent=1) + "\n")
        path.with_suffix(".new").replace(path)


def one(name: tyro.conf.Positional[str], seed: tyro.conf.Positional[int]) -> None:
    """Trains one seed of a curve and prints its row; `record` calls it."""
    row = run_once(name, seed)
    print(json.dumps(row | {"settings": CURVES[name].settings, **environment()}), flush=True)


def record(name: tyro.conf.Positional[str], seeds: int = 30, jobs: int = 1) -> None:
    """Trains seeds 1 to `seeds` of a curve, those that its file lacks, `jobs` at a time on one thread each."""
    FOLDER.mkdir(exist_ok=True)
    rows, settings = recorded(name), json.loads(json.dumps(CURVES[name].settings))
    if any(row["settings"] != settings for row in rows):
        sys.exit(f"{name}.jsonl was recorded with other settings: move it away, and draw the old curve beside the new")
    known = {row["seed"] for row in rows}
    print(f"{name}: seeds {sorted(known)} are recorded already")
    todo = [seed for seed in range(1, seeds + 1) if seed not in known]
    commands = {str(seed): [sys.executable, __file__, "one", name, seed] for seed in todo}
    with tempfile.TemporaryDirectory() as logs:
        for seed, code, log in side_by_side(commands, jobs, Path(logs)):
            (line,) = [line for line in log.read_text().splitlines() if line.startswith('{"seed": ')] or [""]
            if code or not line:
                sys.exit(f"seed {seed} ended with exit code {code}:\n{log.read_text()[-3000:]}")
            with open(FOLDER / f"{name}.jsonl", "a") as file:
                file.write(line + "\n")
            numbers = {key: json.loads(line)[key] for key in (*CURVES[name].numbers, "seconds")}
            print(name, {"seed": seed} | numbers, flush=True)


def add(name: tyro.conf.Positional[str], run: tyro.conf.Positional[Path]) -> None:
    """Appends the row of a finished run: hours of training are a command of its script, which can be resumed. The
    seconds are its steps at the median of its speeds: breaks, evaluations and saves are left out."""
    config, settings = json.loads((run / "config.json").read_text()), json.loads(json.dumps(CURVES[name].settings))
    history = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    args, last = config["args"], history[-1]["step"]
    if config["algo"] != SCRIPT_OF[name] or args | settings != args:
        sys.exit(f"{run} has other settings than the curve {name}: {settings}")
    if last != (args.get("total_timesteps") or args["max_steps"]):
        sys.exit(f"{run} is not finished: --resume {run}")
    if args["seed"] in {row["seed"] for row in recorded(name)}:
        sys.exit(f"{name} has seed {args['seed']} already")
    speeds = [row["time/steps_per_second"] for row in history if "time/steps_per_second" in row]
    row = row_of(CURVES[name].column, args["seed"], history) | {"seconds": round(last / statistics.median(speeds), 1)}
    with open(FOLDER / f"{name}.jsonl", "a") as file:
        about = {key: config.get(key, value) for key, value in environment().items()}
        file.write(json.dumps(row | {"settings": settings} | about) + "\n")


def show() -> None:
    """Prints every band and draws each curve with the peers' beside it."""
    from matplotlib.figure import Figure

    for name, curve in CURVES.items():
        column = curve.column
        if len(recorded(name)) < 2:
            continue
        for number in curve.numbers:
            about = "  ".join(f"{key} {value:.4g}" for key, value in band(name, number).items())
            print(f"{name:16} {number:20} {about}  false alarm {false_alarm(len(recorded(name))):.3%}")
        figure = Figure(figsize=(6, 4))
        axis = figure.subplots()
        for label, rows in {"plainrl": recorded(name), **peers(name)}.items():
            if rows:
                columns = zip(*(row[column] for row in rows), strict=False)  # episodes end: some have more rows
                values = torch.tensor(list(columns)).T.double()
                steps = range(1, values.shape[1] + 1)
                low, middle, high = values.quantile(torch.tensor([0.1, 0.5, 0.9]).double(), 0)
                axis.plot(steps, middle, label=f"{label}, median of {len(rows)} seeds")
                axis.fill_between(steps, low, high, alpha=0.2)
        axis.set(title=name, xlabel="evaluation" if column.startswith("eval/") else "step", ylabel=column)
        axis.legend()
        figure.savefig(FOLDER / f"{name}.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"record": record, "one": one, "add": add, "show": show})
