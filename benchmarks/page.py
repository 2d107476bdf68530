"""The tables of the READMEs: what each script is and reaches, what proves it, and which effects showed.

    python benchmarks/page.py measure grpo sac        default runs on an idle machine -> results/default_runs.json
    python benchmarks/page.py write                   the tables, from the specs, the sources, the curves and results/

Nothing in the tables is typed: a test fails when a page differs from what `write` would write.
"""

import importlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import effects, published  # noqa: E402
from benchmarks.curves import ENOUGH, band, recorded  # noqa: E402
from benchmarks.machine import environment  # noqa: E402
from benchmarks.peers.offline_corl import offline_table  # noqa: E402
from tests import family  # noqa: E402
from tests.specs import FAMILIES, SPECS, line_of, parent_of  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
SHOWN = {  # column of the metrics -> how the table calls it
    "eval/greedy": "greedy",
    "eval/pass@1": "pass@1",
    "eval/pass@8": "pass@8",
    "eval/countdown/pass@1": "countdown pass@1",
    "eval/sort/pass@1": "sort pass@1",
    "eval/pair_accuracy": "pairs ranked right",
    "eval/return": "return",
    "eval/reward": "reward",
    "reward": "reward",
}


def own_lines(script: str) -> int:
    """Lines of code, of a child those that its parent does not have, without docstrings and the Args class."""
    return family.own_lines(script) if parent_of(script) else lines_of(script)


def lines_of(script: str) -> int:
    return len(family.without_args(family.code_of(ROOT / f"algos/{script}.py")))


def read(name: str) -> dict:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def measure(scripts: tyro.conf.Positional[tuple[str, ...]]) -> None:
    """Runs scripts without arguments, one after the other, on all cores."""
    for script in scripts:
        with tempfile.TemporaryDirectory() as folder:
            start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, ROOT / f"algos/{script}.py", "--output-dir", folder], check=True)
            seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
            (metrics,) = Path(folder).glob("*/metrics.jsonl")
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        training = next((row["return"] for row in rows if "return" in row), None)  # before the first evaluation
        rows = [{k: v for k, v in row.items() if k in SHOWN} for row in rows]
        rows = [row for row in rows if row.keys() - {"reward"}] or [row for row in rows if row]
        rows = [{"eval/return": training}] * (training is not None) + rows
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        run = {"first": rows[0] if len(rows) > 1 else {}, "last": rows[-1], "seconds": round(seconds),
               "cpu_seconds": round(cpu), **environment()}  # fmt: skip
        (RESULTS / "default_runs.json").write_text(json.dumps(read("default_runs") | {script: run}, indent=1) + "\n")
        print(script, {key: run[key] for key in ("first", "last", "seconds", "cpu_seconds")})


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2f}"


def default_run(script: str) -> str:
    """The cell of a default run: task, first and last value of the headline number."""
    run = read("default_runs").get(script)
    if run is None:
        return "not run"
    args = importlib.import_module(f"algos.{script}").Args()
    tasks = (getattr(args, name, None) for name in ("env_id", "environment", "task"))
    task = next(filter(None, tasks), "Hopper-v5" if hasattr(args, "dataset") else "")
    key = next(key for key in SHOWN if key in run["last"])
    first = f"{number(run['first'][key])} to " if key in run["first"] else ""
    return f"{'' if isinstance(task, tuple) else task} {SHOWN[key]} {first}{number(run['last'][key])}".strip()


def algorithms() -> str:
    """By family, for README.md: scripts without a parent, each with its descendants and their own lines."""
    rows = ["| script | algorithm | default run | its children, and lines of their own |", "|---|---|---|---|"]
    for field in FAMILIES:
        roots = {s: spec for s, spec in SPECS.items() if spec.family == field and not parent_of(s)}
        if roots:
            rows.append(f"| **{field}** | | | |")
        for script, spec in roots.items():
            below = [s for s in SPECS if s != script and script in line_of(s)]
            children = ", ".join(f"[`{s}`](algos/{s}.py) {own_lines(s)}" for s in below)
            cells = [f"[`{script}.py`](algos/{script}.py)", spec.title, default_run(script), children]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def catalogue() -> str:
    """For algos/README.md."""
    rows = ["| script | algorithm | lines | own lines | default run, seed 1: start to end | seconds |"]
    rows.append("|---|---|---|---|---|---|")
    for script, spec in SPECS.items():
        cells = [f"[`{script}.py`]({script}.py)", spec.title, lines_of(script), own_lines(script)]
        cells += [default_run(script), read("default_runs").get(script, {}).get("seconds", "")]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def limit(name: str, column: str) -> str:
    lower = band(name, column)["lower"]
    if column.startswith("negative "):
        return f"{column.removeprefix('negative ')} at most {number(-lower)}"
    return f"{column.removeprefix('eval/')} from {number(lower)}"


def bands(script: str) -> str:
    """What two fresh seeds must reach, and on how many recorded seeds that rests."""
    cells = []
    for name, curve in SPECS[script].curves.items():
        if curve.numbers and len(recorded(name)) >= ENOUGH:
            limits = [limit(name, column) for column in curve.numbers]
            slow = ", slow" if curve.slow else ""
            cells.append(f"{name.removeprefix(f'{script}-')}: {', '.join(limits)} ({len(recorded(name))} seeds{slow})")
    return "<br>".join(cells) or "none"


def proofs() -> str:
    """For tests/README.md: the fast tests that guard a script, planted mistakes that they caught, and its bands."""
    planted = read("planted_bugs")
    rows = ["| script | fast tests: `tests/test_*.py` | planted bugs caught | what two fresh seeds must reach |"]
    rows.append("|---|---|---|---|")
    for script, spec in SPECS.items():
        files = dict.fromkeys(name.partition("::")[0] for name in spec.tests.split())
        caught = planted.get(f"algos/{script}.py")
        cell = f"{caught['caught']} of {caught['run']}" if caught else "not run"
        if counts := (caught or {}).get("operators"):
            cell += "; operators: {caught} of {run}, {argued} argued".format(**counts)
        rows.append(f"| `{script}.py` | {', '.join(files)} | {cell} | {bands(script)} |")
    return "\n".join(rows)


def effect_verdicts() -> str:
    """For benchmarks/README.md: in how many seeds each claim held."""
    rows = ["| effect, statistic | seeds in which it holds |", "|---|---|"]
    for name, effect in effects.EFFECTS.items():
        values = effects.by_run(name)
        if min(map(len, values.values())) < effect.seeds:
            rows.append(f"| {name}, `{effect.statistic}` | not run |")
            continue
        claims = [
            f"`{claim}`: {yes} of {n}" + f", {needed} asked: **does not hold**" * (yes < needed)
            for claim, (yes, n) in effects.holds(effect, values).items()
            for needed in [effect.claims[claim]]
        ]
        rows.append(f"| [{name}](effects/{name}.png), `{effect.statistic}` | {'<br>'.join(claims)} |")
    return "\n".join(rows)


def speeds() -> str:
    """For benchmarks/README.md: the recorded comparisons of speed, ours first; a ratio above 1: ours is faster."""

    def ratio(row: dict[str, float]) -> str:
        return "**{median:.2f}** ({min:.2f} to {max:.2f})".format(**row)

    rows = ["| | threads | plainrl | peers: rate, our speed over theirs (range) | what takes our time | measured |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    for path in sorted(RESULTS.glob("speed_*.json")):
        found, lines = read(path.stem), []
        for case in found.get("results", ()):  # control_speed.py
            rates, over = case["steps_per_second"], case["ours_over"]
            peers = [f"{side} {rates[side]:,.0f}: {ratio(over[side])}" for side in over]
            lines.append((f"{found['case']}, steps/s", case["threads"], f"{rates['ours']:,.0f}", peers,
                          case["shares_of_ours"]))  # fmt: skip
        if seconds := found.get("seconds_per_step"):  # trl_grpo.py, trl_family.py
            pairs = found["trl_over_ours"]["pairs"]
            over = {"median": found["trl_over_ours"]["median"], "min": min(pairs), "max": max(pairs)}
            peers = [f"TRL {seconds['trl']:.3f}: {ratio(over)}"]
            name = f"{path.stem.removeprefix('speed_')}, seconds per step: {found['work']}"
            lines.append((name, found["threads"], f"{seconds['ours']:.3f}", peers, found["share_in_ours"]))
        for algo in ("iql", "td3_bc", "cql", "rebrac", "dt"):  # offline_corl.py
            if algo in found:
                rates, over = found[algo]["updates_per_second"], found[algo]["over_corl"]
                texts = [ratio(row) + ("" if side == "ours" else f" in {side}") for side, row in over.items()]
                peers = [f"CORL {rates['corl']:.1f}: {', '.join(texts)}"]
                lines.append((f"{algo}, updates/s", found["threads"], f"{rates['ours']:.1f}", peers, {}))
        machine = found["machine"]
        when = f"{machine.get('date', 'before 23 November 2026')}, {machine['processor']}"
        for name, threads, ours, peers, shares in lines:
            parts = ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share < 1)
            rows.append(f"| {name} | {threads} | {ours} | {'<br>'.join(peers)} | {parts} | {when} |")
    return "\n".join(rows)


def offline_scores() -> str:
    """For benchmarks/README.md: returns at the end beside CORL's on the same data, seed by seed."""

    def returns(row: dict, side: str) -> str:
        return ", ".join(f"{value:,.0f}" for value in row.get(side, ()))

    def over(row: dict, side: str) -> str:
        if side not in row["over_corl"]:
            return ""
        low, high = row["over_corl"][side]["t_95_percent"]
        return f"{row['over_corl'][side]['mean']:,.0f} ({low:,.0f} to {high:,.0f})"

    rows = ["| | updates | plainrl | `--normalize` | CORL | 10 %-BC | plainrl less CORL | `--normalize` less CORL |",
            "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in read("score_offline")["results"]:
        data = f"{row['dataset']}, {row['steps']:,} steps" if "steps" in row else row["dataset"]
        columns = [*(returns(row, side) for side in ("ours", "normalized", "corl", "cloning")),
                   *(over(row, side) for side in ("ours", "normalized"))]  # fmt: skip
        rows.append(f"| {row['algo'].upper()}, {data} | {row['updates']:,} | {' | '.join(columns)} |")
    return "\n".join(rows)


def published_budget() -> str:
    """For benchmarks/README.md."""
    return f"{published.table()}\n\n{published.off_policy()}\n\n{published.discrete()}"


def chat() -> str:
    """For algos/README.md: what chat_curves.py has recorded, a row for each side."""
    rows = ["| curve | seeds | greedy | sampled | seconds a step | peak, GB |", "|---" * 6 + "|"]
    speeds = [json.loads(line) for line in (RESULTS / "speed_smollm2.jsonl").read_text().splitlines()]
    paths = (ROOT / "benchmarks/curves").glob("*-smollm2-*.jsonl")
    for name in sorted((path.stem for path in paths), key=lambda name: (name.removeprefix("trl-"), name)):
        cells = [", ".join(f"{row[x]:.2g}" for row in recorded(name)) for x in ("seed", "eval/greedy", "eval/sampled")]
        timed = [row for row in speeds if name.startswith(f"{'trl-' * (row['side'] == 'trl')}{row['case']}-")]
        cells += [f"{sorted(row[x] for row in timed)[len(timed) // 2]:.3g}" for x in ("step, s", "peak, GB")]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def gpu() -> str:
    """For README.md: what benchmarks/gpu.py has found on a GPU."""
    parts = ("check", "speed", "learn")
    ran = {part: data for part in parts if (data := read(f"gpu/{part}")) and not data["smoke"]}
    real = "\n- a real language model for more than 150 steps (algos/README.md);"
    lines = []
    for part, data in ran.items():
        items = {name: found for name, found in data["items"].items() if name != "end"}
        wrong = [name for name, found in items.items() if "error" in found or not found.get("ok", True)]
        idle = sum("not run" in found for found in items.values())
        ratios = "".join(f", `{name}` {value:.2f}" for name, value in data["ratios"].items())
        failed = f", failed: `{'`, `'.join(wrong)}`" if wrong else ""
        failed += "" if "end" in data["items"] else ", stopped before the others"
        well = len(items) - len(wrong) - idle
        lines.append(f"  `{part}`: {well} of {len(items)} items{ratios}{failed};")
    cards = " and ".join(sorted({data["machine"]["gpu"] for data in ran.values()}))
    return "\n".join([f"- a GPU, but for `benchmarks/gpu.py` on one {cards}, and never Apple's MPS:", *lines]) + real


def page(text: str) -> str:
    """A page's text with its tables renewed."""
    for table in (algorithms, catalogue, proofs, effect_verdicts, speeds, published_budget, offline_scores,
                  offline_table, gpu, chat):  # fmt: skip
        begin = f"<!-- {table.__name__}: python benchmarks/page.py write -->\n"
        if begin in text:
            head, rest = text.split(begin)
            end = f"\n<!-- end of {table.__name__} -->"
            text = head + begin + table() + end + rest.split(end, 1)[1]
    return text


def pages() -> list[Path]:
    return [path for name in ("", "algos/", "tests/", "benchmarks/") if (path := ROOT / f"{name}README.md").exists()]


def write() -> None:
    """Renews the tables of the pages, and says which pages changed."""
    for path in pages():
        old, new = path.read_text(), page(path.read_text())
        path.write_text(new)
        print(f"{path.relative_to(ROOT)}: {'written' if new != old else 'as it was'}")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"measure": measure, "write": write})
