"""The second number beside the planted bugs: how many mutations, drawn at random by a tool, the tests kill.

    pip install -e ".[test,peers]"
    python benchmarks/mutations.py draw                 the sample, written down before anything runs
    python benchmarks/mutations.py run --jobs 2         what of it has not run yet, on two cores
    python benchmarks/mutations.py run --only NAME ...  these once more, after a test was written for them
    python benchmarks/mutations.py show                 the scores, and benchmarks/results/mutations.json

A mutant is one change that one of cosmic-ray's operators makes to a function or method of algos/*.py: a number plus or
minus one, another operator or comparison, a condition turned round, a loop that never runs. What a child script has
from its parent is mutated in the parent only; LEFT_OUT names what is not mutated. Changes of annotations alone, and
what does not parse, are no mutants. The sample is uniform over all others.

A mutant runs through the same tests as a planted bug in the same file (planted_bugs.py). It survives where all pass. It
is killed where one fails, where the script cannot be imported ("broken"), and where LIMIT seconds do not suffice
("late": an endless loop). Many die of an exception of their own, `tensor << tensor`, which says little about tests:
their number is shown apart. benchmarks/results/mutations.jsonl is appended to, never rewritten: of a mutant, the first
row is its first result, the last one counts. benchmarks/results/mutations_judged.json says of a survivor, by name,
"equivalent: WHY" (no input shows a difference that the function promises) or "caught by TEST, written for it".
"""

import ast
import difflib
import hashlib
import importlib.metadata
import json
import random
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from planted import Edit  # noqa: E402

from benchmarks import planted_bugs  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "mutations.jsonl"
JUDGED = ROOT / "benchmarks" / "results" / "mutations_judged.json"
SEED = 20_260_101  # of the sample
LIMIT = 300  # seconds; the slowest script's tests take 110 where all pass
LEFT_OUT = {  # why they are not mutated -> functions and classes at the top level
    "the loop: flags, files, logging; whole runs test it, and curves that are not among these tests": "train",
    "carries observations to the network and actions to the environment": "act act_in_evaluation",
    "messages for wrong input": "check check_loss check_groups",
    "the game, not the algorithm": "make_atari SeededGame Lives",
    "files and pictures": "load_member save_members record plot_targets",
}
IN_CLASS = "class _:\n"  # so that a method's source parses by itself


@dataclass(frozen=True)
class Mutant(Edit):
    facts: dict = field(default_factory=dict)  # columns of its row


def functions(script: str) -> dict[str, tuple[int, str]]:
    """Name -> first line and source of every function and method, decorators included."""
    text, found = (ROOT / f"algos/{script}.py").read_text(), {}
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        for part in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(part, ast.FunctionDef):
                first = min(x.lineno for x in (part, *part.decorator_list))
                name = part.name if part is node else f"{node.name}.{part.name}"
                source = "".join(lines[first - 1 : part.end_lineno])
                found[name] = (first, source) if part is node else (first - 1, IN_CLASS + source)
    return found


def program(source: str) -> str:
    """What a function does: its syntax tree without docstrings and annotations. Raises SyntaxError."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
            node.body = node.body[ast.get_docstring(node) is not None :]
    return ast.dump(tree)


def places() -> list[tuple[str, str, str, int]]:
    """(script, function, operator, occurrence) of all that cosmic-ray can change in the functions that are mutated."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    from benchmarks.page import parent_of

    operators = {name: get_operator(name) for name in operator_names()}
    operators = {name: operator() for name, operator in operators.items() if not operator.arguments()}
    found, left_out = [], " ".join(LEFT_OUT.values()).split()
    for script in sorted(planted_bugs.SCRIPTS):
        parent = parent_of(script)
        inherited = {(name, program(source)) for name, (_, source) in (functions(parent) if parent else {}).items()}
        for function, (_, source) in functions(script).items():
            if (function, program(source)) in inherited or function.partition(".")[0] in left_out:
                continue
            nodes = list(ast_nodes(get_ast(source)))
            for operator in operators:
                positions = [p for node in nodes for p in operators[operator].mutation_positions(node)]
                found += [(script, function, operator, occurrence) for occurrence in range(len(positions))]
    return found


def mutant(script: str, function: str, operator: str, occurrence: int) -> Mutant | None:
    """None where the program stays the same or is none."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    first, source = functions(script)[function]
    changed = mutate_code(source, get_operator(operator)(), occurrence)
    try:
        after = program(changed)
    except SyntaxError:
        return None
    if after == program(source):
        return None
    old, new = source.splitlines(), changed.splitlines()
    diff = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]
    line = first + next(i for i, (a, b) in enumerate(zip(old, new)) if a != b)
    name = f"{script}.{function}:{hashlib.sha256(after.encode()).hexdigest()[:8]}"
    facts = {"function": f"{script}.{function}", "at": line, "operator": operator.partition("/")[2],
             "diff": [line for line in diff if not line.startswith("@@")]}  # fmt: skip
    old, new = source.removeprefix(IN_CLASS), changed.removeprefix(IN_CLASS)
    return Mutant(name, (f"algos/{script}.py",), old, new, facts=facts)


def draw(number: int = 150, output: Path = RESULTS) -> list[Mutant]:
    """Draws the sample, and appends its list to `output` unless it is the last there. A smaller sample of the same
    sources is the beginning of a larger one."""
    possible, sample = places(), {}
    for place in random.Random(SEED).sample(possible, len(possible)):
        if len(sample) == number:
            break
        if found := mutant(*place):
            sample.setdefault(found.name, found)
    texts = [(ROOT / f"algos/{script}.py").read_text() for script in sorted(planted_bugs.SCRIPTS)]
    row = {"name": "sample", "seed": SEED, "possible": len(possible), "mutants": list(sample),
           "algos": hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16],
           "cosmic_ray": importlib.metadata.version("cosmic-ray")}  # fmt: skip
    if [row] != [old for old in planted_bugs.read_rows(output) if old["name"] == "sample"][-1:]:
        output.parent.mkdir(parents=True, exist_ok=True)
        with open(output, "a") as file:
            file.write(json.dumps(row) + "\n")
    print(f"{len(sample)} of at most {len(possible)} mutants, algos/*.py {row['algos']}, seed {SEED}")
    return list(sample.values())


def run(only: tuple[str, ...] = (), jobs: int = 1, number: int = 150, unedited: bool = True,
        output: Path = RESULTS) -> None:  # fmt: skip
    """Tests every mutant of the sample that has no row in `output`.

    Args:
        only: names of mutants, which run whether they have rows or not; none: all that have none.
        jobs: mutants at a time, a copy and a core each.
        number: size of the sample.
        unedited: test the copy as it is first, where neither this nor planted_bugs.py has on these sources.
        output: the file that rows are appended to.
    """
    planted_bugs.warm_up()
    sample, sources = draw(number, output), planted_bugs.source_hash()
    if unknown := set(only) - {edit.name for edit in sample}:
        sys.exit(f"error: the sample has no {', '.join(sorted(unknown))}")
    rows = planted_bugs.read_rows(output)
    controls = [row for row in rows + planted_bugs.read_rows(planted_bugs.RESULTS) if row["name"] == "control"]
    before = output if unedited and sources not in [row["sources"] for row in controls] else None
    done = {row["name"] for row in rows}
    todo = [edit for edit in sample if (edit.name in only if only else edit.name not in done)]
    for edit, row in planted_bugs.tested(todo, jobs, LIMIT, before, {}):
        planted_bugs.append({"name": edit.name, "sources": sources} | edit.facts | row, output)


def score(rows: list[dict], judged: dict[str, str]) -> dict:
    """Of results: how many were killed, and how. `raised`: by an exception, not by an assertion. The last score is that
    without all that needed no assertion to die, and without equivalent mutants."""
    outcomes = Counter(row["outcome"] for row in rows)
    killed = len(rows) - outcomes["passed"]
    equivalent = sum(row["outcome"] == "passed" and is_equivalent(row["name"], judged) for row in rows)
    words = ("assert", "AssertionError", "Failed")
    asserted = sum(row["outcome"] == "failed" and row.get("raised", "").startswith(words) for row in rows)
    return {"run": len(rows), "killed": killed, "late": outcomes["late"], "broken": outcomes["broken"],
            "raised": outcomes["failed"] - asserted, "equivalent": equivalent,
            "score": round(killed / max(len(rows), 1), 4),
            "score_without_equivalent": round(killed / max(len(rows) - equivalent, 1), 4),
            "score_of_assertions": round(asserted / max(asserted + outcomes["passed"] - equivalent, 1), 4)}  # fmt: skip


def is_equivalent(name: str, judged: dict[str, str]) -> bool:
    return judged.get(name, "").startswith("equivalent: ")


def show(path: Path = RESULTS, judged: Path = JUDGED) -> None:
    """Prints the scores of the last sample, and writes them beside the rows as .json."""
    rows, first, last = planted_bugs.read_rows(path), {}, {}
    sample = [row for row in rows if row["name"] == "sample"][-1]
    for row in rows:
        if row["name"] in sample["mutants"]:
            first.setdefault(row["name"], row)
            last[row["name"]] = row
    verdicts = json.loads(judged.read_text()) if judged.exists() else {}
    survivors = [name for name in sample["mutants"] if name in first and first[name]["outcome"] == "passed"]
    for name in verdicts:
        if name not in survivors or is_equivalent(name, verdicts) and last[name]["outcome"] != "passed":
            sys.exit(f"error: {judged.name} judges {name}, which is no survivor")
    scripts = defaultdict(list)
    for name in sorted(last):
        scripts[name.partition(".")[0]].append(last[name])
    summary = {
        "first_score": score(list(first.values()), verdicts),
        "score": score(list(last.values()), verdicts),
        "scripts": {script: score(of_script, verdicts) for script, of_script in scripts.items()},
        "sample": sample | {"mutants": len(sample["mutants"])},
        "sources": sorted({row["sources"] for row in last.values()}),
        "survivors": {
            name: {key: last[name][key] for key in ("at", "operator", "diff", "outcome")}
            | {"verdict": verdicts.get(name, "")}
            for name in survivors
        },
    }
    path.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
    for title, numbers in {"first": summary["first_score"], "last": summary["score"], **summary["scripts"]}.items():
        print(f"{title:12} {numbers['killed']} of {numbers['run']} killed, {numbers['score']:.1%} "
              f"({numbers['late']} late, {numbers['broken']} broken, {numbers['raised']} by an exception); "
              f"{numbers['score_without_equivalent']:.1%} without {numbers['equivalent']} equivalent; "
              f"{numbers['score_of_assertions']:.1%} without those, late, broken and exceptions")  # fmt: skip
    for name, survivor in summary["survivors"].items():
        print(f"\n{name}  line {survivor['at']}, {survivor['operator']}, {survivor['outcome']}: "
              f"{survivor['verdict'] or 'not judged'}", *survivor["diff"], sep="\n    ")  # fmt: skip


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"draw": draw, "run": run, "show": show})
