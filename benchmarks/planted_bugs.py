"""How many classic mistakes the tests catch: each planted bug of tests/specs, one at a time, in a copy of the project.

    python benchmarks/planted_bugs.py run --jobs 2     what has not run yet on these sources, on two cores
    python benchmarks/planted_bugs.py run --only NAME ... --no-unedited     these alone, without all tests before
    python benchmarks/planted_bugs.py same             the edits that change nothing, all at once
    python benchmarks/planted_bugs.py show             the score, and benchmarks/results/planted_bugs.json
    python benchmarks/planted_bugs.py operators ppo --number 25 --seed 1    mutants of one script (tests/operators.py)

A bug is planted in every script and every file of utils/ that holds its text, one file at a time. It is caught there
when a fast test fails, in LIMIT seconds, of those that the script's spec names (of utils/: tests/specs/utils_bugs.py);
learning curves, slow tests, and tests that compare sources or stored pages are not among them. Before the bugs, the
copy must pass unedited; the edits that change nothing must pass all of those tests. Results are appended to
benchmarks/results/planted_bugs.jsonl; the last row of a bug in a file counts. Limits are in seconds of one core's work,
so that a busy machine changes no outcome. "late": the limit came before a failure, which does not count as caught.

A mutant's tests are those of its script. "hangs": one of them takes five seconds and ten times what it takes unedited,
which counts as caught. Its rows stand in benchmarks/results/operators.jsonl.
"""

import hashlib
import importlib
import json
import linecache
import multiprocessing
import os
import re
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, fields
from itertools import groupby
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.operators import Mutant, drawn, is_argued  # noqa: E402
from tests.specs import SPECS, Bug, sources  # noqa: E402
from tests.specs.utils_bugs import BUGS as UTILS_BUGS  # noqa: E402
from tests.specs.utils_bugs import SAME, TESTS  # noqa: E402

LATE = "late: no test had failed when the time was up, so it counts as not caught; try again on an idle machine"
RESULTS = ROOT / "benchmarks" / "results" / "planted_bugs.jsonl"
MUTANTS = ROOT / "benchmarks" / "results" / "operators.jsonl"
LIMIT = 120  # seconds of one bug in one file
MUTANT_LIMIT = 28
CAUGHT = ("failed", "hangs")
BUGS = [bug for spec in SPECS.values() for bug in spec.bugs] + list(UTILS_BUGS)
TESTS = TESTS | {f"algos/{script}.py": f"{spec.tests} flags" for script, spec in SPECS.items()}
STORED = ("test_the_shipped_model_is_what_readme_says",)  # tests that compare with what we have written down ourselves
IGNORED = shutil.ignore_patterns("runs", ".git", ".venv", "__pycache__", ".*_cache", "wandb", "curves")


def fast_check(*files: str) -> list[str]:
    """What pytest is to run for edits of these files, each once, those of the first file first."""
    names = dict.fromkeys(name for file in files for name in TESTS[file].split())
    return [f"tests/test_{file}.py{mark}{test}" for file, mark, test in (name.partition("::") for name in names)]


class Recorder:
    """A pytest plugin: keeps the first failure, and the seconds of each file. Cases of a parametrised test that name
    other scripts than the edited ones are left out."""

    def __init__(self, files: list[str]):
        scripts = {Path(file).stem for file in files if file.startswith("algos/")}
        self.others = set(SPECS) - scripts if scripts and len(scripts) == len(files) else set()
        self.result, self.seconds, self.passed = {}, defaultdict(float), 0

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if item.name not in STORED and not self.is_of_another(item.nodeid)]

    def is_of_another(self, nodeid: str) -> bool:
        named = SPECS.keys() & set(re.split(r"[-\[\]]", nodeid.partition("[")[2]))
        return bool(named) and named <= self.others

    def pytest_runtest_logstart(self, nodeid):
        Path("../now.json").write_text(json.dumps([nodeid, time.process_time()]))

    def pytest_collectreport(self, report):
        if report.failed:
            self.result = {"broken": str(report.longrepr)[-2000:]}

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid.partition("::")[0]] += report.duration
        self.passed += report.when == "call" and report.passed
        if report.failed and "test" not in self.result:
            self.result |= {"test": report.nodeid, **where(report.longrepr)}


def where(failure) -> dict[str, str]:
    """The line of the test that failed, and what was raised."""
    crash = getattr(failure, "reprcrash", None)
    if crash is None:
        return {"line": "", "raised": str(failure)[-200:]}
    places = [entry.reprfileloc for entry in failure.reprtraceback.reprentries if getattr(entry, "reprfileloc", None)]
    place = next((p for p in reversed(places) if Path(p.path).name.startswith("test_")), crash)
    line = linecache.getline(os.path.abspath(place.path), place.lineno).strip()
    return {"line": f"{Path(place.path).name}:{place.lineno}: {line}", "raised": crash.message.splitlines()[0][:200]}


class Watch:
    """A pytest plugin: the lines of `file` that each test executes in this process, and its seconds."""

    def __init__(self, file: str):
        self.file, self.lines, self.seconds = file, {}, defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        seen = self.lines[item.nodeid] = set()

        def called(frame, event, _):
            if not frame.f_code.co_filename.endswith(self.file):
                return None
            seen.add(frame.f_lineno)
            return called

        sys.settrace(called)
        try:
            return (yield)
        finally:
            sys.settrace(None)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration


def run_tests(copy: Path, files: list[str], rounds: list[list[str]], limit: float, watched: str) -> None:
    """In a process of its own, forked from one that has imported what is slow to import: pytest in `copy`, on each list
    of tests until one fails. Writes what happened to result.json, with what Watch saw."""
    os.setsid()  # so that a limit also ends what the tests have started
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
    os.chdir(copy)
    sys.path[:] = [path for path in sys.path if path not in {str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")}]
    sys.dont_write_bytecode = True  # an edit that keeps the size within the same second would go unseen
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    with open(copy.parent / "log.txt", "w") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "benchmarks", "algos", "utils")]:
        del sys.modules[name]
    flags = ["-o", "addopts=", "-m", "not slow", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    watch = Watch(watched)
    for tests in rounds:
        recorder = Recorder(files)
        plugins = [recorder, watch] if watched else [recorder]
        code = pytest.main([*flags, f"--basetemp={copy.parent / 'tmp'}", *tests], plugins=plugins)
        if "test" in recorder.result:  # else all run: it passed, or has another name today
            break
    seen = {test: {"lines": sorted(lines), "seconds": watch.seconds[test]} for test, lines in watch.lines.items()}
    found = {"exit": int(code), "passed": recorder.passed, "files": dict(recorder.seconds), "seen": seen}
    (copy.parent / "result.json").write_text(json.dumps(recorder.result | found))


class Copy:
    """A copy of the repository, in which one edit at a time is tested."""

    def __init__(self, folder: Path):
        self.folder, self.root = folder, folder / "plainrl"
        shutil.copytree(ROOT, self.root, ignore=IGNORED)

    def start(self, edited: dict[str, str], rounds: list[list[str]], limit: float, watched: str = "") -> None:
        """edited: file -> its text while the tests run. limit: seconds of work of one core."""
        self.files, self.begun, self.limit = list(edited), time.time(), limit
        for file, text in edited.items():
            (self.root / file).write_text(text)
        (self.folder / "result.json").unlink(missing_ok=True)
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=run_tests, args=(self.root, self.files, rounds, limit, watched))
        self.process.start()

    def is_over(self) -> bool:
        late = time.time() - self.begun > 6 * self.limit  # it may wait for other programs
        return late or not self.process.is_alive()

    def found(self) -> dict:
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else {"exit": -1}

    def finish(self) -> dict:
        """The row of results, with the files as they were."""
        late = self.process.is_alive()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        for file in self.files:
            (self.root / file).write_text(sources()[file])
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)
        found = self.found()
        if late or self.process.exitcode == -signal.SIGXCPU:
            outcome = "late"
        elif "broken" in found or found["exit"] not in (0, 1):
            outcome = "broken"
        else:
            outcome = "failed" if found["exit"] else "passed"
        seconds = round(time.time() - self.begun, 1)
        kept = {name: value for name, value in found.items() if name not in ("files", "exit", "seen")}
        return {"outcome": outcome, "seconds": seconds} | kept

    def test(self, edited: dict[str, str], rounds: list[list[str]], limit: float, watched: str = "") -> dict:
        """The row of one edit, once its tests are over."""
        self.start(edited, rounds, limit, watched)
        while not self.is_over():
            self.process.join(1)
        return self.finish()


def planted(bugs: list[Bug]) -> list[tuple[Bug, str]]:
    """Each bug with each file that holds its text."""
    return [(bug, file) for bug in bugs for file in bug.files()]


def key_of(bug: Bug, file: str) -> str:
    """Of all that the outcome depends on."""
    patterns = ("algos/**/*.py", "utils/*.py", "tests/*.py", "tests/reference/*.py", "benchmarks/peers/make_*.py")
    texts = [path.read_text() for path in sorted(path for pattern in patterns for path in ROOT.glob(pattern))]
    return hashlib.sha256("\0".join([*texts, bug.old, bug.new, *fast_check(file)]).encode()).hexdigest()[:16]


def read_rows(path: Path = RESULTS) -> dict[tuple[str, str], dict]:
    """(bug, file) -> its last row."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(row["bug"], row["file"]): row for row in map(json.loads, lines)}


def append(row: dict, output: Path) -> None:
    with open(output, "a") as file:
        file.write(json.dumps(row) + "\n")
    words = [row.get("test", ""), row.get("line", "")]
    print(f"{row['outcome']:7} {row['seconds']:6.1f} s  {row['bug']} in {row['file']}  "
          f"{'  '.join(filter(None, words))}", flush=True)  # fmt: skip
    if row["outcome"] == "late":
        print(f"  {LATE}", flush=True)


def warm_up() -> None:
    """What tests import and takes long, and nothing of ours. Threads and the network as tests/conftest.py has them."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    for name in ("gymnasium", "h5py", "scipy.integrate", "scipy.optimize", "scipy.stats", "torch"):
        importlib.import_module(name)
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401


def run(only: tuple[str, ...] = (), jobs: int = 1, unedited: bool = True, output: Path = RESULTS) -> None:
    """Tests every bug in every file that has no row in `output` for these sources. The test that caught it last time
    runs first, and alone.

    Args:
        only: BUG, or BUG@FILE for one file; none: all.
        jobs: bugs at a time, a copy and a core each.
        unedited: test the copy as it is first.
        output: the file that rows are appended to.
    """
    known, done = read_rows(), read_rows(output)
    chosen = planted(BUGS + list(SAME))
    if unknown := set(only) - {word for bug, file in chosen for word in (bug.name, f"{bug.name}@{file}")}:
        sys.exit(f"error: there is no bug {', '.join(sorted(unknown))}")
    if only:
        chosen = [(bug, file) for bug, file in chosen if bug.name in only or f"{bug.name}@{file}" in only]
    keys = {(bug, file): key_of(bug, file) for bug, file in chosen}
    todo = [(bug, file) for bug, file in chosen if done.get((bug.name, file), {}).get("key") != keys[bug, file]]
    warm_up()
    busy = {}
    with tempfile.TemporaryDirectory() as folder:
        free = [Copy(Path(folder) / str(i)) for i in range(jobs)]
        if unedited and todo:
            try_unedited(free[0])
        while todo or busy:
            while todo and free:
                copy, (bug, file) = free.pop(), todo.pop(0)
                first = known.get((bug.name, file), {}).get("test", "").partition("[")[0]
                rounds = [[first], fast_check(file)] if first else [fast_check(file)]  # to collect all takes long
                copy.start({file: bug.apply(sources()[file])}, rounds, LIMIT)
                busy[copy] = bug, file
            wait([copy.process.sentinel for copy in busy], timeout=1)
            for copy in [copy for copy in busy if copy.is_over()]:
                bug, file = busy.pop(copy)
                append({"bug": bug.name, "file": file, "key": keys[bug, file]} | copy.finish(), output)
                free.append(copy)


def same(output: Path = RESULTS) -> None:
    """Tests all edits that change nothing at once, in one copy, which is many times faster than one after the other.
    Where that fails, `run --only` tells which of them it is."""
    warm_up()
    edited = {}
    for edit, file in planted(list(SAME)):
        edited[file] = edit.apply(edited.get(file, sources()[file]))
    with tempfile.TemporaryDirectory() as folder:
        result = Copy(Path(folder)).test(edited, [fast_check(*edited)], 3600)
    for edit, file in planted(list(SAME)):
        append({"bug": edit.name, "file": file, "key": key_of(edit, file)} | result, output)


def try_unedited(copy: Copy) -> None:
    """Ends the program where a test fails in the copy as it is; prints the seconds of each test file."""
    row = copy.test({}, [fast_check(*TESTS)], 3600)
    if row["outcome"] != "passed":
        print((copy.folder / "log.txt").read_text()[-6000:])
        sys.exit(f"error: the unedited copy does not pass: {row}")
    seconds = copy.found()["files"]
    for file in sorted(seconds, key=seconds.get, reverse=True):
        print(f"{seconds[file]:7.1f} s  {file}")


def operators(script: tyro.conf.Positional[str], number: int = 25, seed: int = 1, again: bool = False,
              output: Path = MUTANTS) -> None:  # fmt: skip
    """Runs the fast tests of a script on mutants of it, first those that execute the edited line.

    Args:
        script: its name.
        number: how many mutants are drawn.
        seed: of the draw.
        again: in place of a draw the mutants that have a row in `output`.
        output: the file that rows are appended to.
    """
    file, rows = f"algos/{script}.py", read_mutants(output)
    mutants = [mutant for mutant in rows if mutant.script == script] if again else drawn(script, number, seed)
    todo = [mutant for mutant in mutants if again or mutant not in rows]
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        row = copy.test({file: sources()[file]}, [fast_check(file)], 3600, watched=file)
        if row["outcome"] != "passed":
            sys.exit(f"error: the unedited copy does not pass: {row}")
        seen = copy.found()["seen"]
        for mutant in todo:
            lines = mutant.lines(sources()[file])
            if lines is None:
                print(f"gone: {mutant.function}: {mutant.name}")
                continue
            tests = in_order(seen, mutant, set(lines))
            row = copy.test({file: mutant.apply(sources()[file])}, tests, MUTANT_LIMIT)
            if row["outcome"] == "late":
                test, begun = json.loads((Path(folder) / "now.json").read_text())
                hangs = MUTANT_LIMIT - begun > max(5, 10 * seen[test]["seconds"])
                row |= {"outcome": "hangs", "test": test} if hangs else {}
            append({"bug": mutant.name, "file": file, "seed": seed} | asdict(mutant) | row, output)


def in_order(seen: dict[str, dict], mutant: Mutant, lines: set[int]) -> list[list[str]]:
    """The tests of a file together. First those that execute one of the lines and are named after a word of them, then
    others that execute one, exact ones and quick files first; then all others, for what one does once may serve
    another."""
    words, seconds = set(re.findall(r"\w{4,}", mutant.old + mutant.new)), defaultdict(list)
    covering = {test for test, found in seen.items() if not lines.isdisjoint(found["lines"])}
    for test in covering:
        seconds[file_of(test)].append(seen[test]["seconds"])

    def rank(test: str) -> tuple[int, bool, float, str]:
        file = file_of(test)
        if test not in covering:
            return 2, True, 0.0, file
        named = words & set(re.findall(r"\w+", test.partition("[")[2]))
        return not named, "test_exact" not in file, statistics.mean(seconds[file]), file

    return [list(tests) for _, tests in groupby(sorted(seen, key=rank), key=rank)]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def read_mutants(path: Path = MUTANTS) -> dict[Mutant, dict]:
    """Mutant -> its last row."""
    names, lines = [field.name for field in fields(Mutant)], path.read_text().splitlines() if path.exists() else []
    return {Mutant(*(row[name] for name in names)): row for row in map(json.loads, lines)}


def score(rows: dict[tuple[str, str], dict]) -> dict[str, dict[str, int]]:
    """File -> how many mistakes ran in it and how many were caught; "all" -> in all files that hold them."""
    by_file, mistakes = defaultdict(lambda: defaultdict(list)), defaultdict(list)
    for bug, file in planted(BUGS):
        if row := rows.get((bug.name, file)):
            by_file[file][bug.mistake].append(row["outcome"] == "failed")
            mistakes[bug.mistake].append(row["outcome"] == "failed")
    return {file: {"caught": sum(map(all, found.values())), "run": len(found), "planted": sum(map(len, found.values()))}
            for file, found in {"all": mistakes, **dict(sorted(by_file.items()))}.items()}  # fmt: skip


def score_of_mutants(rows: dict[Mutant, dict]) -> dict[str, dict[str, int]]:
    """File -> how many mutants of it ran, and what became of them."""
    found = defaultdict(lambda: {"caught": 0, "argued": 0, "run": 0})
    for mutant, row in rows.items():
        counts = found[f"algos/{mutant.script}.py"]
        counts["run"] += 1
        counts["caught"] += row["outcome"] in CAUGHT
        counts["argued"] += row["outcome"] not in CAUGHT and is_argued(mutant)
    return found


def show(path: Path = RESULTS, mutants: Path = MUTANTS) -> None:
    """Prints the score, and writes it beside the rows as .json."""
    rows, of_operators = read_rows(path), read_mutants(mutants)
    found, by_file = score(rows), score_of_mutants(of_operators)
    for file, numbers in found.items():
        print(f"{numbers['caught']:4d} of {numbers['run']:4d} mistakes caught  {file}")
        if counts := by_file.get(file):
            numbers["operators"] = counts
            print("{caught:4d} of {run:4d} mutants caught, {argued} argued".format(**counts))
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    for bugs, wanted in ((BUGS, "failed"), (SAME, "passed")):
        for bug, file in planted(list(bugs)):
            if (outcome := rows.get((bug.name, file), {}).get("outcome", "not run")) != wanted:
                print(f"  {LATE if outcome == 'late' else outcome}: {bug.name} in {file}")
    for mutant, row in of_operators.items():
        if row["outcome"] not in CAUGHT and not is_argued(mutant):
            print(f"  {row['outcome']}: {mutant.script} {mutant.function}: {mutant.name}")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "same": same, "show": show, "operators": operators})
