"""How many classic mistakes the tests catch: each bug of tests/planted.py, one at a time, in a copy of the repository.

    python benchmarks/planted_bugs.py run --jobs 2     what has not run yet on these sources, on two cores
    python benchmarks/planted_bugs.py run --only NAME ...
    python benchmarks/planted_bugs.py same             the edits that change nothing, all at once
    python benchmarks/planted_bugs.py control          the unedited copy alone, with the seconds of each test file
    python benchmarks/planted_bugs.py show             the score, and benchmarks/results/planted_bugs.json

Before the bugs, the copy must pass unedited. A bug is caught when a test of the files that TESTS names for the edited
ones fails, in LIMIT seconds; learning curves, slow tests, and tests that compare sources or stored pages are not among
them. Edits that change nothing must pass all of those tests. benchmarks/results/planted_bugs.jsonl is appended to,
never rewritten: of an entry, the first row is its first result, the last one counts.
"""

import ast
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
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from planted import BUGS, SAME, Edit  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "planted_bugs.jsonl"
LIMIT = 120  # seconds of one edit
RESUME = "resume::test_from_a_checkpoint_in_the_middle"
DROPOUT = "invariance::test_the_model_that_is_updated_has_no_dropout"
SAMPLING = (
    "invariance::test_reference_logps_are_the_scorers "
    "invariance::test_completions_are_sampled_at_the_temperature_that_scores_them "
    "runs::test_every_step_has_the_next_prompts runs::test_its_siblings_sample_in_parts_too "
) + DROPOUT
TESTS = {  # the test files that exercise a file, exact ones first; FILE::TEST where the rest would take too long
    "algos/grpo.py": f"exact_grpo parity_trl invariance {RESUME} rewards runs resume::test_killed_at_any_moment",
    "algos/rloo.py": f"exact_rloo {SAMPLING} {RESUME} resume::test_killed_at_any_moment",
    "algos/ppo_lm.py": f"exact_ppo_lm {SAMPLING} {RESUME} resume::test_killed_at_any_moment",
    "algos/dpo.py": f"exact_dpo parity_trl_dpo {DROPOUT} dpo_runs",
    "algos/simpo.py": f"exact_simpo_orpo parity_trl_preferences {DROPOUT} dpo_runs",
    "algos/orpo.py": f"exact_simpo_orpo parity_trl_preferences {DROPOUT} dpo_runs",
    "algos/kto.py": f"exact_kto parity_trl_preferences {DROPOUT} dpo_runs",
    "algos/online_dpo.py": f"exact_online_dpo parity_trl_online_dpo {SAMPLING} {RESUME}",
    "algos/reward_model.py": f"exact_reward_model {DROPOUT} reward_models",
    "algos/sft.py": f"sft runs {RESUME} resume::test_killed_at_any_moment",
    "algos/ppo.py": "exact_ppo parity_sb3 command_line_control envs resume_control",
    "algos/ppo_atari.py": "atari resume_control",
    "algos/sac.py": "exact_sac parity_sb3_sac collection command_line_control envs resume_control",
    "algos/bc.py": "exact_iql command_line_offline offline_data resume_offline",
    "algos/iql.py": "exact_iql command_line_offline resume_offline",
    "algos/dt.py": "exact_dt command_line_offline resume_offline",
    "utils/checkpoint.py": "resume_offline runs",
    "utils/envs.py": "exact_ppo exact_sac envs atari command_line_control resume_control",
    "utils/evaluation.py": "exact_grpo runs rewards",
    "utils/lm.py": "exact_grpo parity_trl invariance sft exact_dpo runs",
    "utils/normalize.py": "exact_ppo parity_sb3",
    "utils/offline.py": "offline_data exact_iql exact_dt command_line_offline",
    "utils/preferences.py": "preferences unpaired parity_trl_dpo dpo_runs",
    "utils/replay.py": "exact_sac exact_iql resume_control",
    "utils/reward_models.py": "reward_models exact_reward_model",
    "utils/rewards.py": "rewards runs reward_models",
    "utils/run.py": "resume_offline runs resume::test_killed_at_any_moment",
    "utils/schedule.py": "exact_grpo runs",
    "utils/spaces.py": "exact_sac offline_data exact_iql exact_dt",
    "utils/tasks.py": "tasks sft preferences runs",
}
STORED = ("test_the_shipped_model_is_what_readme_says",)  # tests that compare with what we have written down ourselves
SCRIPTS = {path.stem for path in (ROOT / "algos").glob("*.py")}
IGNORED = shutil.ignore_patterns("runs", ".git", ".venv", "__pycache__", ".*_cache", "wandb", "curves")


def fast_check(files: tuple[str, ...]) -> list[str]:
    """What pytest is to run for edits of these files, each once, those of the first file first."""
    names = dict.fromkeys(name for file in files for name in TESTS[file].split())
    return [f"tests/test_{file}.py{mark}{test}" for file, mark, test in (name.partition("::") for name in names)]


class Recorder:
    """A pytest plugin: keeps the first failure, and the seconds of each file. Cases of a parametrised test that name
    other scripts than the edited ones are left out; the test `first` runs first."""

    def __init__(self, files: tuple[str, ...], first: str = ""):
        self.first = first
        scripts = {Path(file).stem for file in files if file.startswith("algos/")}
        self.others = SCRIPTS - scripts if scripts and len(scripts) == len(files) else set()
        self.result, self.seconds, self.passed = {}, defaultdict(float), 0

    def pytest_collection_modifyitems(self, items):
        kept = [item for item in items if item.name not in STORED and not self.is_of_another(item.nodeid)]
        items[:] = sorted(kept, key=lambda item: item.nodeid.partition("[")[0] != self.first)

    def is_of_another(self, nodeid: str) -> bool:
        named = SCRIPTS & set(re.split(r"[-\[\]]", nodeid.partition("[")[2]))
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


def run_tests(copy: Path, files: tuple[str, ...], tests: list[str], first: str) -> None:
    """In a process of its own, forked from one that has imported what is slow to import: pytest in `copy`. Writes what
    happened to result.json beside it, at its end."""
    import pytest

    os.setsid()  # so that a limit also ends what the tests have started
    os.chdir(copy)
    ours = {str(folder) for folder in (ROOT, ROOT / "tests", ROOT / "benchmarks")}
    sys.path[:] = [path for path in sys.path if path not in ours]
    sys.dont_write_bytecode = True  # an edit that keeps the size within the same second would go unseen
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    with open(copy.parent / "log.txt", "w") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("planted", "benchmarks", "algos", "utils")]:
        del sys.modules[name]
    recorder = Recorder(files, first)
    flags = ["-o", "addopts=", "-m", "not slow", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    code = pytest.main([*flags, f"--basetemp={copy.parent / 'tmp'}", *tests], plugins=[recorder])
    result = recorder.result | {"exit": int(code), "passed": recorder.passed, "files": dict(recorder.seconds)}
    (copy.parent / "result.json").write_text(json.dumps(result))


class Copy:
    """A copy of the repository, in which one edit at a time is tested."""

    def __init__(self, folder: Path):
        self.folder, self.root = folder, folder / "plainrl"
        shutil.copytree(ROOT, self.root, ignore=IGNORED)

    def start(self, edit: Edit | None, tests: list[str], limit: float, first: str = "") -> None:
        self.edit, self.begun, self.limit = edit, time.time(), limit
        self.files = edit.files if edit else ()
        self.originals = {file: (self.root / file).read_text() for file in self.files}
        for file, text in self.originals.items():
            (self.root / file).write_text(edit.apply(text, file))
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
        for file, text in self.originals.items():
            (self.root / file).write_text(text)
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


def source_hash() -> str:
    """Of all that the outcome of an entry depends on but the entry."""
    patterns = ("algos/*.py", "utils/*.py", "tests/*.py", "benchmarks/make_*.py")
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    texts = [path.read_text() for path in sorted(paths) if "planted" not in path.name]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def key_of(edit: Edit) -> str:
    """Of an entry's edit."""
    text = repr((edit.files, edit.old, edit.new, edit.count, fast_check(edit.files)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_edits(edits: list[Edit]) -> None:
    """Raises ValueError for an edit that does not fit its files, or leaves one that is not Python."""
    for edit in edits:
        for file in edit.files:
            ast.parse(edit.apply((ROOT / file).read_text(), file))


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
    """Tests every entry that has no row in `output` for these sources. The test that caught it last time runs first.

    Args:
        only: names of entries; none: all.
        jobs: entries at a time, a copy and a core each.
        unedited: test the copy as it is first.
        output: the file that rows are appended to.
    """
    edits = BUGS + SAME
    if unknown := set(only) - {edit.name for edit in edits}:
        sys.exit(f"error: there is no entry {', '.join(sorted(unknown))}")
    check_edits(edits)
    sources = source_hash()
    done = {(row["name"], row["key"]) for row in read_rows(output) if row["sources"] == sources}
    todo = [edit for edit in edits if (not only or edit.name in only) and (edit.name, key_of(edit)) not in done]
    todo.sort(key=lambda edit: edit in SAME)
    caught_by = {row["name"]: row.get("test", "").partition("[")[0] for row in read_rows(RESULTS)}
    warm_up()
    output.parent.mkdir(parents=True, exist_ok=True)
    before = output if unedited and ("control", "") not in done else None
    for edit, row in tested(todo, jobs, LIMIT, before, caught_by):
        append({"name": edit.name, "key": key_of(edit), "sources": sources} | row, output)


def tested(
    edits: list[Edit], jobs: int, limit: float, unedited: Path | None, first: dict[str, str]
) -> Iterator[tuple[Edit, dict]]:
    """Yields each edit with its row of results as it ends, tested in `jobs` copies of the repository. The unedited copy
    is tested before, where `unedited` is a file for its row, and in each the test that `first` names for the edit."""
    todo, busy = list(edits), []
    with tempfile.TemporaryDirectory() as folder:
        free = [Copy(Path(folder) / str(i)) for i in range(jobs)]
        if unedited:
            try_unedited(free[0], source_hash(), unedited)
        while todo or busy:
            while todo and free:
                copy, edit = free.pop(), todo.pop(0)
                copy.start(edit, fast_check(edit.files), limit, first.get(edit.name, ""))
                busy.append(copy)
            wait([copy.process.sentinel for copy in busy], timeout=1)
            for copy in [copy for copy in busy if copy.is_over()]:
                busy.remove(copy)
                row = copy.finish()
                free.append(copy)
                yield copy.edit, row


class Together:
    """Several edits as one: what `Copy` needs of an edit."""

    def __init__(self, edits: list[Edit]):
        self.edits, self.files = edits, tuple(dict.fromkeys(file for edit in edits for file in edit.files))

    def apply(self, text: str, path: str) -> str:
        for edit in self.edits:
            text = edit.apply(text, path) if path in edit.files else text
        return text


def same(output: Path = RESULTS) -> None:
    """Tests all edits that change nothing at once, in one copy, which is many times faster than one after the other.
    Where that fails, `run --only` tells which of them it is."""
    warm_up()
    together = Together(SAME)
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        copy.start(together, fast_check(together.files), 3600)
        copy.process.join()
        result = copy.finish() | {"together": len(SAME)}
    for edit in SAME:
        append({"name": edit.name, "key": key_of(edit), "sources": source_hash()} | result, output)


def control(output: Path = RESULTS) -> None:
    """Tests the unedited copy, and prints the seconds of each test file."""
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        try_unedited(Copy(Path(folder)), source_hash(), output)


def try_unedited(copy: Copy, sources: str, output: Path) -> None:
    """Ends the program where a test fails in the copy as it is."""
    files = tuple(TESTS)
    copy.start(None, fast_check(files), 3600)
    copy.process.join()
    seconds = json.loads((copy.folder / "result.json").read_text())["files"]
    row = {"name": "control", "key": "", "sources": sources} | copy.finish()
    if row["outcome"] != "passed":
        print((copy.folder / "log.txt").read_text()[-6000:])
        sys.exit(f"error: the unedited copy does not pass: {row}")
    for file in sorted(seconds, key=seconds.get, reverse=True):
        print(f"{seconds[file]:7.1f} s  {file}")
    append(row, output)


def append(row: dict, output: Path) -> None:
    with open(output, "a") as file:
        file.write(json.dumps(row) + "\n")
    words = [row.get("test", ""), row.get("line", "")]
    print(f"{row['outcome']:7} {row['seconds']:6.1f} s  {row['name']}  {'  '.join(filter(None, words))}", flush=True)


def is_caught(row: dict) -> bool:
    return row["outcome"] == "failed"


def score(rows: dict[str, dict]) -> dict:
    """Of rows by name: what was caught and what not. A mistake is caught where each of its entries is."""
    mistakes = defaultdict(list)
    for edit in BUGS:
        if edit.name in rows:
            mistakes[edit.mistake].append(is_caught(rows[edit.name]))
    caught, entries = sum(map(all, mistakes.values())), sum(mistakes.values(), [])
    return {"mistakes": len(mistakes), "caught": caught, "entries": len(entries), "entries_caught": sum(entries)}


def show(path: Path = RESULTS) -> None:
    """Prints the score, and writes it beside the rows as .json."""
    first, last = {}, {}
    for row in read_rows(path):
        first.setdefault(row["name"], row)
        last[row["name"]] = row
    scripts = {}
    for script in sorted(SCRIPTS):
        of_script = defaultdict(list)
        for edit in BUGS:
            if f"algos/{script}.py" in edit.files and edit.name in last:
                of_script[edit.mistake].append(is_caught(last[edit.name]))
        if of_script:
            scripts[script] = {"killed": sum(map(all, of_script.values())), "run": len(of_script)}
    entries = {
        edit.name: {"files": list(edit.files), "why": edit.why, "public": edit.public}
        | {name: last[edit.name][name] for name in ("outcome", "test", "line", "raised") if name in last[edit.name]}
        for edit in BUGS
        if edit.name in last
    }
    same = {edit.name: last[edit.name]["outcome"] for edit in SAME if edit.name in last}
    sources = sorted({row["sources"] for row in last.values()})
    summary = {"score": score(last), "first_score": score(first), "sources": sources, "scripts": scripts, "same": same,
               "bugs": entries}  # fmt: skip
    path.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
    for name, numbers in (("last", score(last)), ("first", score(first))):
        print(f"{name} results: {numbers['caught']} of {numbers['mistakes']} mistakes caught, "
              f"{numbers['entries_caught']} of {numbers['entries']} entries")  # fmt: skip
    print(f"{sum(outcome == 'passed' for outcome in same.values())} of {len(same)} edits that change nothing pass")
    for script, numbers in scripts.items():
        print(f"  {script:10} {numbers['killed']} of {numbers['run']}")
    for name, entry in entries.items():
        if entry["outcome"] != "failed":
            print(f"  not caught ({entry['outcome']}): {name} in {', '.join(entry['files'])}")
    for name, outcome in same.items():
        if outcome != "passed":
            print(f"  not let pass ({outcome}): {name}")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "same": same, "control": control, "show": show})
