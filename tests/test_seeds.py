"""benchmarks/seeds.py: seeds side by side go on after a kill, and their mean has the interval that the page says."""

import csv
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_one_sentence, wait_for
from scipy.stats import t as student

from benchmarks import seeds
from utils.core import UserError

STUB = """
import argparse, json, pathlib, sys, time
parser = argparse.ArgumentParser()
for flag in ("--seed", "--output-dir", "--resume", "--broken"):
    parser.add_argument(flag)
args = parser.parse_args()
run = pathlib.Path(args.resume or pathlib.Path(args.output_dir, "run"))
seed = args.seed or run.parent.name[-1]
if seed == args.broken:
    sys.exit("it broke")
run.mkdir(parents=True, exist_ok=True)
(run / "config.json").touch()
(run / "checkpoint.pt").write_text(f"resumed: {args.resume}")
while seed == "2" and pathlib.Path(__file__).with_name("busy").exists():
    time.sleep(0.01)
(run / "model").mkdir()
rows = [{"step": step, "return": float(seed) * step, "time/x": 1.0} for step in (0, 5, 10)]
rows[1].pop("return") if seed == "2" else None
(run / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
"""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_seeds_go_on_after_a_kill(tmp_path):
    """Killed while the second of two seeds is under way: the first is not run again, the second is resumed."""
    (tmp_path / "busy").touch()
    args = seeds.Args(stub(tmp_path), seeds=2, jobs=1, folder=tmp_path / "seeds")
    first = multiprocessing.get_context("fork").Process(target=seeds.main, args=(args, []))
    first.start()
    first.poll, first.communicate = lambda: first.exitcode, lambda: first.exitcode
    wait_for(first, tmp_path / "seeds/seed-2", lambda run: (run / "checkpoint.pt").is_file())
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    for pid in [first.pid, *map(int, children)]:
        os.kill(pid, signal.SIGKILL)
    first.join()
    (finished,) = (tmp_path / "seeds/seed-1").glob("*/metrics.jsonl")
    before = finished.stat().st_mtime_ns
    assert not (tmp_path / "seeds/seeds.csv").exists()
    (tmp_path / "busy").unlink()
    seeds.main(args, [])
    assert finished.stat().st_mtime_ns == before
    stopped = tmp_path / "seeds/seed-2/run"
    assert (stopped / "checkpoint.pt").read_text() == f"resumed: {stopped}"
    assert (tmp_path / "seeds/seeds.png").stat().st_size > 1000 and (tmp_path / "seeds/seeds.csv").exists()


def test_the_interval_is_students():
    """By hand, and it covers the true mean in 95 of 100 experiments of four seeds."""
    low, high = 3 - 4.302653 * 1 / 3**0.5, 3 + 4.302653 * 1 / 3**0.5
    rows = [
        [{"step": 0, "a": x, "time/step": 1.0, "b": x}, {"step": 1, **({"a": x} if x > 2 else {})}] for x in (2, 3, 4)
    ]
    table = seeds.summary(rows)
    assert table.keys() == {"a", "b"} and len(table["a"]) == 1, "a step that one seed did not log has no mean of all"
    assert table["a"][0] == pytest.approx([0, 3, low, high, 2, 3, 4], abs=1e-5)
    rows = [[{"step": 0, "eval/success": x, "eval/return": x}] for x in (1.0, 1.0, 0.9)]
    found = {name: value[0][3] for name, value in seeds.summary(rows).items()}
    assert found["eval/success"] == 1 < found["eval/return"], "a share is at most 1"
    draws = np.random.default_rng(0).normal(size=(2000, 4))
    covered = [
        low < 0 < high for x in draws for _, _, low, high, *_ in seeds.summary([[{"step": 0, "a": y}] for y in x])["a"]
    ]
    assert abs(np.mean(covered) - 0.95) < 3 * (0.95 * 0.05 / 2000) ** 0.5
    assert student.ppf(0.975, 2) == pytest.approx(4.302653)


def test_side_by_side(tmp_path, monkeypatch):
    """Each command once, at most `jobs` at a time, on one thread."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    says = "date +%s%N; echo $OMP_NUM_THREADS; sleep 0.4; date +%s%N"
    ended = list(seeds.side_by_side({n: ["sh", "-c", f"{says}; exit {n}"] for n in range(5)}, 2, tmp_path))
    assert sorted((seed, code) for seed, code, _ in ended) == [(n, n) for n in range(5)]
    lines = [log.read_text().split() for _, _, log in ended]
    assert {threads for _, threads, _ in lines} == {"1"}
    spans = [(int(start), int(end)) for start, _, end in lines]
    together = [sum(start <= moment < end for start, end in spans) for moment, _ in spans]
    assert max(together) == 2


def stub(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(STUB)
    return path


def test_any_script_and_more_seeds_later(tmp_path, capsys):
    script = stub(tmp_path)
    seeds.main(seeds.Args(script, seeds=2, folder=tmp_path / "out"), [])
    seeds.main(seeds.Args(script, seeds=3, folder=tmp_path / "out"), [])
    assert "2 of 3 seeds have finished" in capsys.readouterr().out
    rows = list(csv.DictReader(open(tmp_path / "out/seeds.csv")))
    assert [(row["column"], row["step"], row["mean"]) for row in rows] == [
        ("return", "0", "0.0"),
        ("return", "10", "20.0"),
    ]
    with pytest.raises(UserError, match="another --folder"):
        seeds.main(seeds.Args(script, seeds=3, folder=tmp_path / "out"), ["--broken", "9"])
    script.write_text(STUB + "\n")
    with pytest.raises(UserError, match="another --folder"):
        seeds.main(seeds.Args(script, seeds=3, folder=tmp_path / "out"), [])


def test_a_seed_that_crashes_leaves_no_mean(tmp_path, capsys):
    """The mean of the others would be of a choice; and the same command tries it again."""
    with pytest.raises(SystemExit) as exit:
        seeds.main(seeds.Args(stub(tmp_path), seeds=3, folder=tmp_path / "out"), ["--broken", "2"])
    out = capsys.readouterr()
    assert exit.value.code == 1 and "seed 2 ended with exit code 1: it broke" in out.out
    assert_one_sentence(out.err, "seeds [2] did not finish", "seed-2.log")
    assert not (tmp_path / "out/seeds.csv").exists() and (tmp_path / "out/seed-3/run/model").exists()


@pytest.mark.parametrize(
    "settings, flags, words",
    [
        (dict(seeds=1), [], "--seeds 1"),
        (dict(jobs=0), [], "--jobs is 0"),
        (dict(script=Path("absent.py")), [], "absent.py is not a file"),
        ({}, ["--seed=3"], "--seed=3 is set for each seed"),
        ({}, ["--output_dir", "x"], "--output_dir is set"),
        (dict(columns=("nothing",)), [], "--columns nothing: all seeds have logged return"),
    ],
)
def test_wrong_input_of_seeds(settings, flags, words, tmp_path):
    with pytest.raises(UserError, match=words):
        seeds.main(seeds.Args(**dict(script=stub(tmp_path), seeds=2, folder=tmp_path / "out") | settings), flags)
