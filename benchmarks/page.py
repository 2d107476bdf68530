"""README's two tables of algorithms: what each script is and does by default, and what is proven of it.

    RESULTS=benchmarks/results/tests.json pytest      counts of what passed and what did not run, per file and script
    python benchmarks/page.py measure grpo sac        default runs of scripts, one thread -> results/default_runs.json
    python benchmarks/page.py write                   both tables into README, from these files, the curves, the planted
                                                      bugs (planted_bugs.py) and the sources

Nothing in the tables is typed: a test fails when README differs from what `write` would write, and when the tests that
are there are not those that were counted.
"""

import ast
import difflib
import functools
import importlib
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.curves import CURVES, ENOUGH, band, recorded  # noqa: E402
from utils.machine import environment  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
SCRIPTS = {  # in the order of the table -> the name of the algorithm
    "sft": "supervised fine-tuning, arXiv 2203.02155",
    "grpo": "GRPO, arXiv 2402.03300; Dr. GRPO and DAPO by flags",
    "rloo": "RLOO, arXiv 2402.14740",
    "ppo_lm": "PPO for language models, arXiv 1909.08593",
    "reward_model": "reward model (Bradley-Terry), single or ensemble, arXiv 2009.01325 and 2310.02743",
    "dpo": "DPO, arXiv 2305.18290, and ten other losses on the same log-ratios",
    "simpo": "SimPO, arXiv 2405.14734",
    "orpo": "ORPO, arXiv 2403.07691",
    "kto": "KTO, arXiv 2402.01306",
    "online_dpo": "online DPO, arXiv 2402.04792, and XPO, arXiv 2405.21046",
    "ppo": "PPO, arXiv 1707.06347, discrete and continuous actions",
    "ppo_atari": "PPO on Atari",
    "sac": "SAC, arXiv 1812.05905",
    "bc": "behaviour cloning and 10 %-BC",
    "iql": "IQL, arXiv 2110.06169, offline and on to online",
    "dt": "Decision Transformer, arXiv 2106.01345",
}
SHOWN = {  # column of the metrics -> how the table calls it
    "eval/greedy": "greedy",
    "eval/pass@1": "pass@1",
    "eval/pass@8": "pass@8",
    "eval/countdown/pass@1": "countdown pass@1",
    "eval/sort/pass@1": "sort pass@1",
    "eval/pair_accuracy": "pairs ranked right",
    "eval/return": "return",
}
KINDS = {  # column of the second table -> the files of tests that count for it
    "exact": r"test_(exact_\w+|atari|recipes)",
    "parity": r"test_parity_\w+",
    "invariance": r"test_(invariance|envs|properties|determinism)",
    "learning": r"test_learning",
    "resume": r"test_(resume\w*|faults)",
    "copied": r"test_eject",
}


def code_of(path: Path) -> list[str]:
    """Lines of code: without docstrings, comments and the Args class."""
    tree, source = ast.parse(path.read_text()), path.read_text().splitlines()
    dropped = set()
    for node in ast.walk(tree):
        docstring = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if docstring or (isinstance(node, ast.ClassDef) and node.name == "Args"):
            dropped |= set(range(node.lineno, node.end_lineno + 1))
    kept = [line for number, line in enumerate(source, 1) if number not in dropped]
    return [line for line in kept if line.strip() and not line.strip().startswith("#")]


def definitions(path: Path) -> dict[str, str]:
    """Name -> code without docstrings and comments, of every function, class, constant and option at the top level."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            options = [n for n in node.body if isinstance(n, ast.AnnAssign)]
            found |= {f"Args.{option.target.id}": ast.unparse(option) for option in options}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            for inner in ast.walk(node):
                if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(inner) is not None:
                    inner.body = inner.body[1:] or [ast.Pass()]
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0]).strip("()")] = ast.unparse(node)
    return found


def parent_of(script: str) -> str | None:
    docstring = ast.get_docstring(ast.parse((ROOT / f"algos/{script}.py").read_text()))
    match = re.search(r"^Parent: (\w+)\.py\.", docstring, re.MULTILINE)
    return match and match[1]


def own_lines(script: str) -> int:
    """Lines of code that the parent does not have, without docstrings and the Args class."""
    code = []
    for name in (parent_of(script), script):
        parts = definitions(ROOT / f"algos/{name}.py")
        code.append([line for key in parts if not key.startswith("Args.") for line in parts[key].splitlines()])
    return sum(line.startswith("+ ") for line in difflib.ndiff(*code))


def scripts_of(nodeid: str) -> list[str]:
    """The scripts that a test is about: those that its parameters name, else those of the ones that its file imports
    that its own name has, else all that the file imports."""
    file, _, rest = nodeid.partition("::")
    function, _, parameters = rest.partition("[")
    if named := [s for s in SCRIPTS if re.search(rf"(?<![a-z_]){s}(?![a-z_])", parameters)]:
        return named
    imported = imports(file)
    names = "|".join(sorted(imported, key=len, reverse=True))
    words = set(re.findall(rf"(?<![a-z])(?:{names})(?![a-z])", function))
    return [s for s in SCRIPTS if s in (words & imported or imported)]


@functools.cache
def imports(file: str) -> frozenset[str]:
    """The scripts that a file of tests imports."""
    text = (ROOT / file).read_text()
    imported = set(re.findall(r"algos\.(\w+)", text))
    for names in re.findall(r"^from algos import (.+)$", text, re.MULTILINE):
        imported |= set(re.findall(r"\w+", names))
    return frozenset(imported & set(SCRIPTS))


def count(outcomes: dict[str, str]) -> dict[str, dict[str, dict[str, int]]]:
    """Outcomes of tests by node id -> file -> script ("utils" where a test is about none) -> outcome -> number."""
    counts = {}
    for nodeid, outcome in outcomes.items():
        for script in scripts_of(nodeid) or ["utils"]:
            there = counts.setdefault(nodeid.partition("::")[0], {}).setdefault(script, {})
            there[outcome] = there.get(outcome, 0) + 1
    return {file: {s: dict(sorted(c.items())) for s, c in sorted(counts[file].items())} for file in sorted(counts)}


def read(name: str) -> dict:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def measure(scripts: tyro.conf.Positional[tuple[str, ...]]) -> None:
    """Runs scripts without arguments but --threads 1, one after the other."""
    for script in scripts:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            subprocess.run([sys.executable, ROOT / f"algos/{script}.py", "--threads", "1", "--output-dir", folder],
                           check=True)  # fmt: skip
            seconds = time.perf_counter() - start
            (metrics,) = Path(folder).glob("*/metrics.jsonl")
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        rows = [{k: v for k, v in row.items() if k in SHOWN} for row in rows]
        rows = [row for row in rows if row]
        known = read("default_runs") | {
            script: {"first": rows[0] if len(rows) > 1 else {}, "last": rows[-1], "seconds": round(seconds),
                     **{key: environment()[key] for key in ("versions", "commit", "machine")}}}  # fmt: skip
        (RESULTS / "default_runs.json").write_text(json.dumps(known, indent=1) + "\n")
        print(script, known[script]["first"], known[script]["last"], known[script]["seconds"])


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.2f}"


def default_run(script: str) -> str:
    """The cell of a default run: task, first and last evaluation, seconds."""
    run = read("default_runs").get(script)
    if run is None:
        return "not run"
    args = importlib.import_module(f"algos.{script}").Args()
    task = getattr(args, "env_id", None) or getattr(args, "task", None) or "Hopper-v5 collection"
    parts = [
        f"{SHOWN[key]} " + (f"{number(run['first'][key])} to " if key in run["first"] else "") + number(value)
        for key, value in run["last"].items()
    ]
    task = "" if isinstance(task, tuple) else f"{task}: "
    return f"{task}{', '.join(parts)}; {run['seconds']} s"


def algorithms() -> str:
    rows = [
        "| script | algorithm | lines of code | default run, seed 1, one thread, not idle: first to last evaluation |",
        "|---|---|---|---|",
    ]
    for script, name in SCRIPTS.items():
        parent = parent_of(script)
        name += f": `{parent}.py` with {own_lines(script)} lines of its own" if parent else ""
        lines = len(code_of(ROOT / f"algos/{script}.py"))
        rows.append(f"| [`algos/{script}.py`](algos/{script}.py) | {name} | {lines} | {default_run(script)} |")
    return "\n".join(rows)


def bands(script: str) -> str:
    """What two fresh seeds must reach, and on how many seeds that rests."""
    cells = []
    for name, (of, _, _, numbers) in CURVES.items():
        if of == script and numbers and len(recorded(name)) >= ENOUGH:
            task = name.removeprefix(f"{script}-")
            limits = [f"{key.removeprefix('eval/')} from {number(band(name, key)['lower'])}" for key in numbers]
            cells.append(f"{task}: {', '.join(limits)} ({len(recorded(name))} seeds)")
    return "<br>".join(cells) or "not run"


def proofs() -> str:
    """The table of what is proven. A number is of tests that passed; what did not run is named so."""
    tests, planted = read("tests"), read("planted_bugs").get("scripts", {})
    rows = [f"| script | {' | '.join(KINDS)} | planted bugs caught | band of the curve |"]
    rows.append("|" + "---|" * (len(KINDS) + 3))
    for script in SCRIPTS:
        cells = []
        for pattern in KINDS.values():
            found = [counts[script] for file, counts in tests.items()
                     if script in counts and re.fullmatch(rf"tests/{pattern}\.py", file)]  # fmt: skip
            totals = {o: sum(c.get(o, 0) for c in found) for o in ("passed", "failed", "not run")}
            words = [str(totals["passed"])] if totals["passed"] else []
            words += [f"{totals[o]} {o}" for o in ("failed", "not run") if totals[o]]
            cells.append(", ".join(words) or "none")
        caught = planted.get(script)
        cells.append(f"{caught['killed']} of {caught['run']}" if caught else "not run")
        rows.append(f"| `{script}.py` | {' | '.join(cells)} | {bands(script)} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """README's text with both tables renewed."""
    for name, table in {"algorithms": algorithms(), "proofs": proofs()}.items():
        begin, end = f"<!-- {name}: python benchmarks/page.py write -->\n", f"\n<!-- end of {name} -->"
        head, rest = text.split(begin)
        text = head + begin + table + end + rest.split(end)[1]
    return text


def write() -> None:
    path = ROOT / "README.md"
    path.write_text(page(path.read_text()))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"measure": measure, "write": write})
