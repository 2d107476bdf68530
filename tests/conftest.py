"""What all tests share: one thread per worker and subprocess, no network, the ledger of times, and the counts of what
passed, written to the file that the environment variable RESULTS names (benchmarks/page.py); of a part of the tests,
the counts of its files are renewed there."""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}.items():
    os.environ[name] = value  # before torch is imported, and inherited by every subprocess of a test
os.environ.setdefault("HF_DATASETS_CACHE", os.path.join("/tmp", f"plainrl-datasets-{os.getuid()}-{os.getpid()}"))

START = time.time()


def pytest_collection_modifyitems(items):
    """The long tests first for each of two workers, which get a half each and, when done, the end of the other's rest:
    at the end there are short ones left, and neither waits for the other."""
    long = [item for item in items if item.path.name == "test_learning.py"]
    short = [item for item in items if item.path.name != "test_learning.py"]
    middle = len(short) // 2
    items[:] = long[::2] + short[:middle] + long[1::2] + short[middle:]


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
    """The ledger: seconds per file, and by name what did not run."""
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
        terminalreporter.line(f"not run: {report.nodeid}: {reason}")
    if path := os.environ.get("RESULTS"):
        from benchmarks.page import count

        kinds = {"passed": "passed", "failed": "failed", "error": "failed", "skipped": "not run"}
        outcomes = {
            report.nodeid: outcome
            for kind, outcome in kinds.items()
            for report in terminalreporter.stats.get(kind, [])
            if "::" in report.nodeid
        }
        known = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        Path(path).write_text(json.dumps(known | count(outcomes), indent=1, sort_keys=True) + "\n")
