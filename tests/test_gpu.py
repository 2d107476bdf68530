"""benchmarks/gpu.py on a CPU: its items, and what is recorded of them."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("part", [pytest.param(part, marks=pytest.mark.slow) for part in ("check", "speed", "learn")])
def test_a_part_runs_with_tiny_sizes(part, tmp_path):
    command = [sys.executable, ROOT / "benchmarks/gpu.py", part, "--out", tmp_path, "--smoke"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    items = json.loads((tmp_path / f"{part}.json").read_text())["items"]
    assert len(items) > 5 and not any({"error", "not run"} & found.keys() for found in items.values())
    assert part != "check" or items["gradients, sac"]["largest difference"] == 0, "both sides are this machine's"


def test_an_item_that_fails_is_recorded_and_the_next_one_runs(tmp_path):
    record = gpu.Record("check", tmp_path, smoke=True)
    read = lambda: json.loads((tmp_path / "check.json").read_text())["items"]  # noqa: E731
    assert record.item("wrong", 9, lambda limit: {"x": 1 / 0}) == {}
    assert "ZeroDivisionError" in read()["wrong"]["error"]
    assert record.item("right", 9, lambda limit: {"limit": limit})["limit"] == 9
    record.deadline = time.monotonic()
    assert record.item("late", 9, lambda limit: {}) == {} and "not run" in read()["late"]
    assert list(read()) == ["wrong", "right", "late"] and read()["right"]["limit"] == 9


def test_what_others_wrote_is_named_by_a_flag(tmp_path, monkeypatch):
    """A copy of CleanRL's scripts runs, which on a GPU no longer ask for --cuda."""
    assert "not run" in gpu.cleanrl_sac(None, "cpu", 9)
    for part, flags, words in ("learn", {}, "needs --chat-model"), ("speed", {"cleanrl": tmp_path}, "no cleanrl/sac"):
        with pytest.raises(SystemExit, match=words):
            gpu.main(part, tmp_path, **flags)
    asks = "torch.cuda.is_available() and args.cuda"
    for name in ("cleanrl/sac_continuous_action.py", "cleanrl_utils/buffers.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(asks)
    monkeypatch.setattr(gpu, "call", lambda words, _: json.dumps({"rate": [
        path.read_text() for path in sorted(Path(words[-1]).rglob("*.py"))]}))  # fmt: skip
    found = [gpu.cleanrl_sac(tmp_path, where, 9)["environment steps/s"] for where in ("cpu", "cuda")]
    assert found == [[asks, asks], ["torch.cuda.is_available()", asks]]


def test_a_second_run_does_what_is_left(tmp_path):
    """On the same card alone: figures of two are not mixed."""
    record = gpu.Record("check", tmp_path, smoke=True)
    record.item("machine", 9, lambda limit: {"gpu": "A", "commit": "old"})
    record.item("right", 9, lambda limit: {"x": 1})
    record.item("wrong", 9, lambda limit: {"x": 1 / 0})
    for card, expected in ("A", {"right": 1, "wrong": 2}), ("B", {"right": 2, "wrong": 2}):
        again = gpu.Record("check", tmp_path, smoke=True)
        again.on(again.item("machine", 9, lambda limit, card=card: {"gpu": card, "commit": "new"}))
        assert {name: again.item(name, 9, lambda limit: {"x": 2})["x"] for name in expected} == expected
        assert again.data["items"]["right"].get("commit") == ("old" if card == "A" else None)


def test_a_command_that_takes_too_long_ends_with_what_it_started(tmp_path):
    script = f"import subprocess, time; subprocess.Popen(['sh', '-c', 'sleep 2; touch {tmp_path}/late']); time.sleep(9)"
    with pytest.raises(RuntimeError, match="longer than 1 s"):
        gpu.call([sys.executable, "-c", script], 1)
    time.sleep(2.5)
    assert not (tmp_path / "late").exists()
