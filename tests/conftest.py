"""What all tests share: one thread per worker and subprocess, no network, which tests run, and the ledger of times.

    pytest --script X           the tests of one script: those of its spec, and all that are parametrised with its name
    pytest --learning all       every default curve learns; known: one of each of the seven best-known scripts; none

Tests run on all cores, one thread each.
"""

import os
import re
import sys
import time
from collections import defaultdict
from functools import cache

import pytest

for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}.items():
    os.environ[name] = value  # before torch is imported, and inherited by every subprocess of a test
os.environ.setdefault("HF_DATASETS_CACHE", os.path.join("/tmp", f"plainrl-datasets-{os.getuid()}-{os.getpid()}"))

START = time.time()
LONG = ("test_learning.py", "test_the_chain_runs", "test_ejected_scripts_give_the_same_curves")


def pytest_addoption(parser):
    parser.addoption("--no-products", action="store_true", help="as on a processor without products in bfloat16")
    parser.addoption("--script", action="append", default=[], metavar="X", help="only the tests of algos/X.py")
    parser.addoption("--learning", choices=("changed", "all", "known", "none"), default="changed",
                     help="which curves learn on fresh seeds: one of each of the seven best-known scripts, and some of "
                     "the others and all controls that have changed since their last green run (default), all, the "
                     "seven only, none")  # fmt: skip


@pytest.hookimpl(optionalhook=True)  # xdist may be off
def pytest_xdist_auto_num_workers():
    from benchmarks.machine import cores

    return cores()


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    if scripts := config.getoption("--script"):
        kept = [item for item in items if any(concerns(item, script) for script in scripts)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    skip_learning(config, items)
    in_order(items, getattr(config, "workerinput", {}).get("workercount", 1))


def concerns(item, script: str) -> bool:
    """Whether a test is one of a script's: its parameters name the script or, where they name none, the spec has it."""
    from tests.specs import SPECS, parent_of

    if script not in SPECS:
        raise pytest.UsageError(f"--script {script}: there is no algos/{script}.py; choose from {', '.join(SPECS)}")
    if named := scripts_in(item.nodeid.partition("[")[2]):
        return script in named
    shared = [name for name in SPECS[parent_of(script) or script].tests.split() if name.startswith("invariance")]
    names = {tuple(name.partition("::")[::2]) for name in [*SPECS[script].tests.split(), *shared]}
    file = item.path.stem.removeprefix("test_")
    return (file, "") in names or (file, item.originalname) in names


def scripts_in(parameters: str) -> set[str]:
    from benchmarks.curves import SCRIPT_OF
    from tests.specs import SPECS

    curve = SCRIPT_OF.get(parameters.removesuffix("]"))
    return {curve} if curve else {s for s in SPECS if re.search(rf"(?<![a-z0-9_]){s}(?![a-z0-9_])", parameters)}


def skip_learning(config, items) -> None:
    """Marks the curves that need not learn, and sets the level at which those that do stay within the budget."""
    mode, seeds = config.getoption("--learning"), []
    items = [item for item in items if item.get_closest_marker("learns")]
    if items:
        from benchmarks.curves import CURVES, ENOUGH, drawn, learns_always, recorded, unchanged_since

        chosen = drawn({item.get_closest_marker("learns").args[0] for item in items}) if mode == "changed" else set()
    for item in items:
        (curve,) = item.get_closest_marker("learns").args
        known, reason = learns_always(curve), ""
        control = not item.originalname.startswith("test_fresh_seeds")
        if len(recorded(curve)) < ENOUGH:
            reason = f"not run: {len(recorded(curve))} seeds of {curve} are recorded; of so few a band says nothing"
        elif mode == "none" or (mode == "known" and not known):
            reason = f"not run: --learning {mode}"
        elif mode == "changed" and not CURVES[curve].slow:
            if commit := (control or not known) and unchanged_since(curve):
                reason = f"unchanged since {commit}"
            elif not known and curve not in chosen:
                reason = "not run: others that have changed were drawn (--learning all)"
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif not control:
            seeds += [len(recorded(curve))] * len(CURVES[curve].numbers)
    if seeds:
        from benchmarks.curves import alarm_level

        config.alarm = alarm_level(seeds)


def in_order(items, workers: int) -> None:
    """The long tests first for each worker, the longest before all: worksteal hands out equal parts in order, and at
    the end short tests are left to share."""
    from benchmarks.curves import recorded

    def seconds(item) -> float:
        rows = recorded(marker.args[0]) if (marker := item.get_closest_marker("learns")) else []
        return 0 if item.get_closest_marker("skip") else sum(row["seconds"] for row in rows) / max(len(rows), 1)

    is_long = {item: item.path.name in LONG or item.originalname in LONG for item in items}
    long = sorted((item for item in items if is_long[item]), key=seconds, reverse=True)
    short = [item for item in items if not is_long[item]]
    ordered, left = [], len(items)
    for worker in range(workers):
        first = long[worker::workers]
        count = max(left // (workers - worker) - len(first), 0)
        ordered += first + short[:count]
        short, left = short[count:], len(items) - len(ordered)
    items[:] = ordered + short


@pytest.fixture(autouse=True, scope="session")
def without_what_takes_long():
    """Curves are empty files in this process (helpers.py can draw them). Held-out rows and versions are looked up once.
    Files are not flushed to the disk."""
    from unittest import mock

    from utils import core, data

    def touch(history, curves, title, unit, path):
        path.touch()

    cached = {owner: mock.patch.object(owner, name, cache(getattr(owner, name)))
              for owner, name in ((core, "version"), (data, "procedural"))}  # fmt: skip
    with mock.patch.object(core, "plot", touch), cached[core], cached[data], mock.patch("os.fsync"):
        yield


@pytest.fixture
def processor(monkeypatch):
    """A function: from its call on the processor has products in bfloat16, or none."""
    import torch

    return lambda products: monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": products})


@pytest.fixture(autouse=True)
def same_processor(processor, request):
    """No test depends on that of the machine."""
    processor(not request.config.getoption("--no-products"))


@pytest.fixture
def alarm(request) -> float:
    """How often a pair of fresh seeds may fall below a band in this run (benchmarks/curves.py)."""
    return request.config.alarm


@pytest.fixture
def float64():
    """New tensors are of this type."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """What the datasets library keeps of a file stays with the test."""
    datasets = pytest.importorskip("datasets", reason="not run: datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return datasets


def needs(name: str, version: str) -> None:
    module = pytest.importorskip(name, reason=f"not run: pip install {name}=={version}0", exc_type=ImportError)
    if not module.__version__.startswith(version):
        pytest.skip(f"not run: {name} is {module.__version__}: the comparison is with {version}0")


@pytest.fixture
def needs_trl(monkeypatch):
    """Skips without this TRL, and silences its remarks on experimental arguments."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    needs("trl", "1.16.")


@pytest.fixture
def needs_sb3():
    needs("stable_baselines3", "2.9.")


@pytest.fixture
def needs_contrib():
    needs("sb3_contrib", "2.9.")


@pytest.fixture
def imports_as_they_were(monkeypatch):
    """A user's project may take the name `utils`: give it back afterwards, and forget control.write_project's own."""
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "utils"}
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("utils", "project")]:
        del sys.modules[name]
    sys.modules.update(ours)
    if "gymnasium" in sys.modules:
        sys.modules["gymnasium"].registry.pop("Mine-v0", None)


def pytest_terminal_summary(terminalreporter):
    """The ledger: seconds per file, by name what did not run, and what the learning tests proved."""
    if hasattr(terminalreporter.config, "workerinput"):  # workers make summaries that nobody sees
        return
    seconds, counts = defaultdict(float), defaultdict(int)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration") and hasattr(report, "when"):
                file = report.nodeid.partition("::")[0]
                seconds[file] += report.duration
                counts[file] += report.when == "call"
    terminalreporter.section("ledger of times")
    for file in sorted(seconds, key=seconds.get, reverse=True):
        terminalreporter.line(f"{seconds[file]:7.1f} s  {counts[file]:4d} tests  {file}")
    terminalreporter.line(f"{sum(seconds.values()):7.1f} s of tests in {time.time() - START:.1f} s of wall time")
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.line(f"{report.nodeid}: {str(reason).removeprefix('Skipped: ')}")
    learnt(terminalreporter)


def learnt(terminalreporter) -> None:
    """The bands' false alarms, and the records of curves that are not trained in every run: one process writes them."""
    tests = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    properties = [dict(report.user_properties) for report in tests if report.when == "call"]
    if alarms := [found["false alarm"] for found in properties if "false alarm" in found]:
        terminalreporter.line(f"learning: {len(alarms)} curves were trained on fresh seeds; where nothing is wrong, "
                              f"one fails in {sum(alarms):.2%} of such runs (at most 1 % is allowed)")  # fmt: skip
    green = {}
    for report in terminalreporter.stats.get("passed", []):
        if rows := dict(report.user_properties).get("green"):
            (curve,) = re.findall(r"\[(.+)\]", report.nodeid)
            green[curve] = rows
            terminalreporter.line(f"recorded: benchmarks/curves/green/{curve}.json; commit it")
    if green:
        from benchmarks.curves import write_green

        write_green(green)
