"""The bug hunt of the site: planted bugs of the specs, and the curves that their scripts then have.

`python benchmarks/site.py hunt` calls `record`. Rows are appended to results/bug_hunt.jsonl; what is there is skipped.
"""

import importlib.util
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.curves import CURVES, ROOT, SCRIPT_OF, band, run_once
from benchmarks.curves import recorded as right_rows
from benchmarks.machine import environment
from tests.specs import SPECS, Bug, sources

RESULTS = ROOT / "benchmarks/results/bug_hunt.jsonl"
SEEDS = (1, 2, 3)
UNSEEN, BETTER = "The curve does not show it.", "The curve is better than the right one."


@dataclass(frozen=True)
class Hunt:
    bug: str
    """its name in the specs"""
    curve: str
    """the recorded curve whose settings it is trained with"""


HUNTS = (  # from the plain to the hard
    Hunt("ratio-turned-round", "grpo-sort"),
    Hunt("bootstrap-through-termination", "ppo-cartpole"),
    Hunt("smallest-next-value", "dqn-cartpole"),
    Hunt("mean-for-sum-of-log-probabilities", "dpo-sort"),
    Hunt("original-goals-not-stored", "her-bitflip"),
    Hunt("no-gradient-through-the-action", "sac-pendulum"),
    Hunt("no-bootstrap-at-truncation", "ppo-pendulum"),
    Hunt("expectile-turned-round", "iql-hopper"),
    Hunt("groups-interleaved", "grpo-sort"),
    Hunt("divergence-rewarded:rloo", "rloo-sort"),
    Hunt("reward-on-padding", "ppo_lm-sort"),
)


@cache
def bug_of(hunt: Hunt) -> Bug:
    (bug,) = {bug for spec in SPECS.values() for bug in spec.bugs if bug.name == hunt.bug}
    return bug


def planted(hunt: Hunt) -> str:
    """The script's text with the bug."""
    file = f"algos/{SCRIPT_OF[hunt.curve]}.py"
    assert file in bug_of(hunt).files(), f"{file} does not hold the text of {hunt.bug}"
    return bug_of(hunt).apply(sources()[file])


def recorded() -> list[dict]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def rows_of(hunt: Hunt) -> list[dict]:
    """Those that were recorded with the settings and the edit of today."""
    now = [hunt.bug, hunt.curve, bug_of(hunt).new, json.loads(json.dumps(CURVES[hunt.curve].settings))]
    return [row for row in recorded() if [row["bug"], row["curve"], row["new"], row["settings"]] == now]


def verdict(hunt: Hunt) -> str:
    """What the curve says beside the right one: below the band of fresh seeds in some number or drawn below the ends of
    all right seeds, above all right seeds, or nothing. Empty where it is not recorded."""
    if not (rows := rows_of(hunt)):
        return ""
    column, right = CURVES[hunt.curve].column, right_rows(hunt.curve)
    ends, right_ends = ([statistics.mean(row[column][-max(1, len(row[column]) // 10) :]) for row in found]
                        for found in (rows, right))  # fmt: skip
    means = {number: statistics.mean(row[number] for row in rows) for number in CURVES[hunt.curve].numbers}
    if max(ends) < min(right_ends) or any(mean < band(hunt.curve, n)["lower"] for n, mean in means.items()):
        return "The curve shows it."
    if any(mean > max(row[number] for row in right) for number, mean in means.items()):
        return BETTER
    return UNSEEN


def train(hunt: Hunt, seed: int) -> dict:
    """run_once imports the script by its name, and finds the copy with the bug."""
    name = f"algos.{SCRIPT_OF[hunt.curve]}"
    right = sys.modules.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{SCRIPT_OF[hunt.curve]}.py"
        path.write_text(planted(hunt))
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
            return run_once(hunt.curve, seed)
        finally:
            del sys.modules[name]
            if right:
                sys.modules[name] = right


def record(only: tuple[str, ...] = ()) -> None:
    for hunt in [hunt for hunt in HUNTS if not only or hunt.bug in only]:
        for seed in sorted(set(SEEDS) - {row["seed"] for row in rows_of(hunt)}):
            row = {"bug": hunt.bug, "curve": hunt.curve, "new": bug_of(hunt).new} | train(hunt, seed)
            row |= {"settings": CURVES[hunt.curve].settings, **environment()}
            with open(RESULTS, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(hunt.bug, hunt.curve, {"seed": seed, "seconds": row["seconds"]}, flush=True)
