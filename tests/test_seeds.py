"""benchmarks/seeds.py: seeds side by side go on after a kill, and settings have folders of their own."""

import csv
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from helpers import assert_one_sentence, wait_for

from benchmarks import seeds
from utils.core import UserError

STUB = """
import argparse, json, pathlib, sys, time
parser = argparse.ArgumentParser()
for flag in ("--seed", "--output-dir", "--resume", "--broken", "--slope"):
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
rows = [{"step": step, "return": float(seed) * step * float(args.slope or 1)} for step in (0, 5, 10)]
rows[1].pop("return") if seed == "2" else None
(run / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
"""


def main(tmp_path, *flags, stub=STUB, **settings) -> None:
    script = tmp_path / "mine.py"
    script.write_text(stub)
    seeds.main(seeds.Args(**dict(scripts=(script,), seeds=2, jobs=1, folder=tmp_path / "out") | settings), list(flags))


def test_seeds_go_on_after_a_kill(tmp_path, capsys):
    """Killed while the second of two seeds is under way: the first is not run again, the second is resumed. More seeds
    may follow, of the same script and flags."""
    (tmp_path / "busy").touch()
    first = multiprocessing.get_context("fork").Process(target=main, args=(tmp_path,))
    first.start()
    first.poll, first.communicate = lambda: first.exitcode, lambda: first.exitcode
    wait_for(first, tmp_path / "out/seed-2", lambda run: (run / "checkpoint.pt").is_file())
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    for pid in [first.pid, *map(int, children)]:
        os.kill(pid, signal.SIGKILL)
    first.join()
    before = (tmp_path / "out/seed-1/run/metrics.jsonl").stat().st_mtime_ns
    assert not (tmp_path / "out/seeds.csv").exists()
    (tmp_path / "busy").unlink()
    main(tmp_path)
    stopped = tmp_path / "out/seed-2/run"
    assert (tmp_path / "out/seed-1/run/metrics.jsonl").stat().st_mtime_ns == before
    assert (stopped / "checkpoint.pt").read_text() == f"resumed: {stopped}"
    assert (tmp_path / "out/seeds.png").stat().st_size > 1000
    main(tmp_path, seeds=3)
    assert "2 of 3 seeds have finished" in capsys.readouterr().out
    rows = list(csv.DictReader(open(tmp_path / "out/seeds.csv")))
    assert [(row["seed"], row["step"], row["value"]) for row in rows] == [
        (str(seed), f"{step:.1f}", f"{seed * step:.1f}")
        for seed in (1, 2, 3) for step in (0, 5, 10) if (seed, step) != (2, 5)]  # fmt: skip
    for flags, text in ((["--broken", "9"], STUB), ([], STUB + "\n")):
        with pytest.raises(UserError, match="another --folder"):
            main(tmp_path, *flags, stub=text, seeds=3)


def test_settings_have_folders_of_their_own(tmp_path, capsys):
    main(tmp_path, vary=("slope=1,3",))
    out = capsys.readouterr().out
    assert "slope=3/seed-2 finished (4 of 4), about 0:00:00 to go" in out
    assert "P(1 ends higher than 2) = 0.00 (0.00 to 0.00)" in out
    rows = list(csv.DictReader(open(tmp_path / "out/seeds.csv")))
    assert {(row["setting"], row["seed"]) for row in rows} == {(f"slope={n}", seed) for n in (1, 3) for seed in "12"}
    assert max(float(row["value"]) for row in rows) == 60


def test_side_by_side(tmp_path, monkeypatch):
    """Each command once, at most `jobs` at a time, on one thread."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    says = "date +%s%N; echo $OMP_NUM_THREADS; sleep 0.4; date +%s%N"
    ended = list(seeds.side_by_side({f"n{n}": ["sh", "-c", f"{says}; exit {n}"] for n in range(5)}, 2, tmp_path))
    assert sorted((name, code) for name, code, _ in ended) == [(f"n{n}", n) for n in range(5)]
    lines = [log.read_text().split() for _, _, log in ended]
    assert {threads for _, threads, _ in lines} == {"1"}
    spans = [(int(start), int(end)) for start, _, end in lines]
    assert max(sum(start <= moment < end for start, end in spans) for moment, _ in spans) == 2


def test_a_seed_that_crashes_leaves_no_mean(tmp_path, capsys):
    """The mean of the others would be of a choice; and the same command tries it again."""
    with pytest.raises(SystemExit, match="1"):
        main(tmp_path, "--broken", "2", seeds=3)
    out = capsys.readouterr()
    assert "seed-2 ended with exit code 1: it broke" in out.out
    assert_one_sentence(out.err, "seed-2 did not finish", "seed-2.log")
    assert not (tmp_path / "out/seeds.csv").exists() and (tmp_path / "out/seed-3/run/model").exists()


WRONG = {  # what the sentence says -> settings and flags
    "--seeds 1": (dict(seeds=1),), "--jobs is 0": (dict(jobs=0),),
    "absent.py is not a file": (dict(scripts=(Path("absent.py"),)),),
    "^--seed is set for each seed": ({}, "--seed=3"), "--output-dir is set": ({}, "--output_dir", "x"),
    "--columns nothing: the runs have logged return": (dict(columns=("nothing",)),),
    "--vary slope: give FLAG=VALUE,VALUE": (dict(vary=("slope",)),),
    "--seed is set for each seed": (dict(vary=("seed=1,2",)),),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_wrong_input_of_seeds(words, tmp_path):
    settings, *flags = WRONG[words]
    with pytest.raises(UserError, match=words):
        main(tmp_path, *flags, **settings)
