"""How many classic mistakes the tests catch: each planted bug of tests/specs, one at a time, in a copy of the project.

    python benchmarks/planted_bugs.py run --jobs 2     what has not run yet on these sources, on two cores
    python benchmarks/planted_bugs.py run --only NAME ... --no-unedited     these alone, without all tests before
    python benchmarks/planted_bugs.py same             the edits that change nothing, all at once
    python benchmarks/planted_bugs.py show             the score, and benchmarks/results/planted_bugs.json

A bug is planted in every script and every file of utils/ that holds its text, one file at a time. It is caught there
when a fast test fails, in LIMIT seconds, of those that the script's spec names (of utils/: tests/specs/utils_bugs.py);
learning curves, slow tests, and tests that compare sources or stored pages are not among them. Before the bugs, the
copy must pass unedited; the edits that change nothing must pass all of those tests. Results are appended to
benchmarks/results/planted_bugs.jsonl; the last row of a bug in a file counts.
"""

import hashlib
import json
import linecache
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from multiprocessing.connection import wait
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.specs import SPECS, Bug, sources  # noqa: E402
from tests.specs.utils_bugs import BUGS as UTILS_BUGS  # noqa: E402
from tests.specs.utils_bugs import SAME, TESTS  # noqa: E402

LATE = "late: no test had failed when the time was up, so it counts as not caught; try again on an idle machine"
RESULTS = ROOT / "benchmarks" / "results" / "planted_bugs.jsonl"
LIMIT = 120  # seconds of one bug in one file
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


def run_tests(copy: Path, files: list[str], tests: list[str], first: str) -> None:
    """In a process of its own, forked from one that has imported what is slow to import: pytest in `copy`. The test
    `first` runs alone before the others are collected, which takes long. Writes what happened to result.json."""
    import pytest

    os.setsid()  # so that a limit also ends what the tests have started
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
    for chosen in ([first], tests) if first else (tests,):
        recorder = Recorder(files)
        code = pytest.main([*flags, f"--basetemp={copy.parent / 'tmp'}", *chosen], plugins=[recorder])
        if "test" in recorder.result:  # else all run: it passed, or has another name today
            break
    result = recorder.result | {"exit": int(code), "passed": recorder.passed, "files": dict(recorder.seconds)}
    (copy.parent / "result.json").write_text(json.dumps(result))


class Copy:
    """A copy of the repository, in which one edit at a time is tested."""

    def __init__(self, folder: Path):
        self.folder, self.root = folder, folder / "plainrl"
        shutil.copytree(ROOT, self.root, ignore=IGNORED)

    def start(self, edited: dict[str, str], tests: list[str], limit: float, first: str = "") -> None:
        """edited: file -> its text while the tests run."""
        self.files, self.begun, self.limit = list(edited), time.time(), limit
        for file, text in edited.items():
            (self.root / file).write_text(text)
        (self.folder / "result.json").unlink(missing_ok=True)
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=run_tests, args=(self.root, self.files, tests, first))
        self.process.start()

    def is_over(self) -> bool:
        return not self.process.is_alive() or time.time() - self.begun > self.limit

    def finish(self) -> dict:
        """The row of results, with the files as they were."""
        late = self.process.is_alive()
        if late:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        for file in self.files:
            (self.root / file).write_text(sources()[file])
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)
        path = self.folder / "result.json"
        found = json.loads(path.read_text()) if path.exists() else {"exit": -1}
        if late:
            outcome = "late"
        elif "broken" in found or found["exit"] not in (0, 1):
            outcome = "broken"
        else:
            outcome = "failed" if found["exit"] else "passed"
        seconds = round(time.time() - self.begun, 1)
        return {"outcome": outcome, "seconds": seconds} | {k: v for k, v in found.items() if k not in ("files", "exit")}


def planted(bugs: list[Bug]) -> list[tuple[Bug, str]]:
    """Each bug with each file that holds its text."""
    return [(bug, file) for bug in bugs for file in bug.files()]


def key_of(bug: Bug, file: str) -> str:
    """Of all that the outcome depends on."""
    patterns = ("algos/**/*.py", "utils/*.py", "tests/*.py", "benchmarks/peers/make_*.py")
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
    import gymnasium  # noqa: F401
    import h5py  # noqa: F401
    import pytest  # noqa: F401
    import scipy.integrate  # noqa: F401
    import scipy.optimize  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401
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
                copy.start({file: bug.apply(sources()[file])}, fast_check(file), LIMIT, first)
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
        copy = Copy(Path(folder))
        copy.start(edited, fast_check(*edited), 3600)
        copy.process.join()
        result = copy.finish()
    for edit, file in planted(list(SAME)):
        append({"bug": edit.name, "file": file, "key": key_of(edit, file)} | result, output)


def try_unedited(copy: Copy) -> None:
    """Ends the program where a test fails in the copy as it is; prints the seconds of each test file."""
    copy.start({}, fast_check(*TESTS), 3600)
    copy.process.join()
    seconds = json.loads((copy.folder / "result.json").read_text())["files"]
    row = copy.finish()
    if row["outcome"] != "passed":
        print((copy.folder / "log.txt").read_text()[-6000:])
        sys.exit(f"error: the unedited copy does not pass: {row}")
    for file in sorted(seconds, key=seconds.get, reverse=True):
        print(f"{seconds[file]:7.1f} s  {file}")


def score(rows: dict[tuple[str, str], dict]) -> dict[str, dict[str, int]]:
    """File -> how many mistakes ran in it and how many were caught; "all" -> in all files that hold them."""
    by_file, mistakes = defaultdict(lambda: defaultdict(list)), defaultdict(list)
    for bug, file in planted(BUGS):
        if row := rows.get((bug.name, file)):
            by_file[file][bug.mistake].append(row["outcome"] == "failed")
            mistakes[bug.mistake].append(row["outcome"] == "failed")
    return {file: {"caught": sum(map(all, found.values())), "run": len(found), "planted": sum(map(len, found.values()))}
            for file, found in {"all": mistakes, **dict(sorted(by_file.items()))}.items()}  # fmt: skip


def show(path: Path = RESULTS) -> None:
    """Prints the score, and writes it beside the rows as .json."""
    rows = read_rows(path)
    found = score(rows)
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    for file, numbers in found.items():
        print(f"{numbers['caught']:4d} of {numbers['run']:4d} mistakes caught  {file}")
    for bugs, wanted in ((BUGS, "failed"), (SAME, "passed")):
        for bug, file in planted(list(bugs)):
            if (outcome := rows.get((bug.name, file), {}).get("outcome", "not run")) != wanted:
                print(f"  {LATE if outcome == 'late' else outcome}: {bug.name} in {file}")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "same": same, "show": show})
