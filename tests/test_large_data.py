"""Datasets larger than the memory: rows stay on the disk, and are looked at one by one. Which of them are held out."""

import json
import subprocess
import sys

import pytest
from helpers import REPO, command_line, runs_in, user_error, write_rows

from algos import kto
from utils.core import UserError
from utils.data import RowFault, Task, epochs, keep, keep_rows, load_pairs, load_task

MEASURE = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import datasets
from utils.data import keep, keep_rows, load_pairs, load_task, read_splits

datasets.config.HF_DATASETS_CACHE = sys.argv[3]
encode = lambda row, *_: ([0] * (len(row["prompt"]) // 8), [1], [2])  # how long does not matter here

def held() -> int:  # without the pages of mapped files, which the system takes back when it needs them
    status = open("/proc/self/status").read()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024

def most_held(work) -> int:  # at any moment of the work, more than before it
    samples, done = [held()], threading.Event()

    def watch():
        while not done.wait(0.005):
            samples.append(held())

    thread = threading.Thread(target=watch)
    thread.start()
    work()
    done.set()
    thread.join()
    return max(samples) - samples[0]

def passes():
    global rows
    task = keep_rows(load_task(sys.argv[2]), encode, "", 9000, None)
    rows = [len(task.rows)] + [task.train(i, 1)["number"] for i in range(3)]
    rows.append(len(keep(load_pairs(sys.argv[2], 1, 1).train, encode, 9000, None)))

datasets.load_dataset("json", data_files=sys.argv[4])  # what libraries load once
reading = most_held(lambda: read_splits(sys.argv[2]))  # the file becomes Arrow, chunk by chunk
print(reading, most_held(passes), *rows)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not run: /proc is Linux's")
def test_a_file_is_not_loaded_into_memory(tmp_path):
    """200 MB of rows, through the loaders and the passes that look for faults: these hold nearly nothing. To make Arrow
    of the JSON takes 110 MB, as much for 100 as for 300 MB of rows."""
    path, text = tmp_path / "rows.jsonl", "x" * 10_000
    with open(path, "w") as file:
        for i in range(10_000):
            row = {"number": i, "prompt": f"{i} {text}", "chosen": f"{i}" + text[:5_000], "rejected": text[:5_000]}
            file.write(json.dumps(row) + "\n")
    size = path.stat().st_size
    assert size > 200e6
    small = write_rows(tmp_path / "small.jsonl", [{"prompt": "1"}, {"prompt": "2"}])
    command = [sys.executable, "-c", MEASURE, REPO, path, tmp_path / "cache", small]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reading, passing, rows, *_, pairs = done.stdout.splitlines()[-1].split()
    assert int(rows) == int(pairs) == 10_000 - 256, done.stdout
    assert int(reading) < 0.6 * size and int(passing) < size / 10, done.stdout


@pytest.mark.parametrize("kind", ["list", "dataset"])
def test_rows_that_are_refused_or_too_long_are_dropped(kind, tmp_path, own_cache, capsys):
    """Counted, the first of them shown; each row is encoded once, and only its number is kept."""
    rows, seen = [{"prompt": f"S{i}:", "chosen": f"{i}", "rejected": "3"} for i in range(40)], []
    if kind == "dataset":
        rows = load_pairs(write_rows(tmp_path / "rows.jsonl", rows), 1, 1).train

    def encode(row):
        seen.append(row["prompt"])
        if row["prompt"] in ("S7:", "S9:"):
            raise RowFault(row, "is no good")
        return [1] * (9 if row["prompt"] == "S8:" else 8), [2]

    there = [row["prompt"] for row in rows]
    kept = keep(rows, encode, 8, None)
    assert seen == there and [row["prompt"] for row in kept] == [p for p in there if p not in ("S7:", "S8:", "S9:")]
    lost = len(there) - len(kept)
    out, ill = capsys.readouterr().out, sum(prompt in ("S7:", "S9:") for prompt in there)
    assert f"{lost} of {len(there)} rows cannot be used and are dropped, the first because a row" in out
    if lost > ill > 0:
        assert f"  {ill} of them: a row is no good" in out and f"  {lost - ill} of them: a row has a prompt of 9" in out
    task = keep_rows(Task("mine", epochs(rows), list(rows), None, rows), encode, "", 8, None)
    assert list(task.rows) == task.heldout == list(kept)
    assert {task.train(i, 1)["prompt"] for i in range(len(kept))} == {row["prompt"] for row in kept}
    with pytest.raises(UserError, match="no row can be used, the first because a row .*8 tokens, and 7 are allowed"):
        keep(rows, encode, 7, None)


def test_rows_of_one_label_that_others_leave_behind(tmp_path, own_cache, capsys):
    """kto.py's balance divides by the other label's number."""
    rows = [{"prompt": f"S{'1' * 30 if i % 2 else i}{i:02}:", "completion": "1", "label": i % 2 == 0}
            for i in range(40)]  # fmt: skip
    path = write_rows(tmp_path / "rows.jsonl", rows)
    flags = ["--task", path, "--device", "cpu", "--max-steps", 2, "--batch-size", 4, "--max-length", 20]
    with user_error(capsys, "all labels of", "True"):
        command_line(kto, *flags, "--max-prompt-length", 19, "--output-dir", tmp_path / "runs")
    assert runs_in(tmp_path / "runs") == []


@pytest.mark.parametrize("form", ["What is {} + {}?", "Q {:03}{:03}"])
def test_which_rows_are_held_out_has_nothing_to_do_with_their_text(form, tmp_path, own_cache):
    """50 x 50 prompts that differ in two numbers, of which 125 are held out: each number about 2.5 times. Chi-squared
    with 49 degrees of freedom exceeds 102 once in 100,000; a checksum, which is linear, gives far more."""
    rows = [{"prompt": form.format(i // 50, i % 50), "numbers": (i // 50, i % 50)} for i in range(2500)]
    heldout = load_task(write_rows(tmp_path / "rows.jsonl", rows)).heldout
    assert len(heldout) == 125
    for which in (0, 1):
        counts = [sum(row["numbers"][which] == i for row in heldout) for i in range(50)]
        assert sum((count - 2.5) ** 2 / 2.5 for count in counts) < 102
