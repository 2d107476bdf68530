"""Datasets larger than the memory: rows stay on the disk, are looked at one by one, and keep their numbers."""

import json
import subprocess
import sys

import pytest
from helpers import REPO, command_line, runs_in, user_error, write_rows

from algos import kto
from utils.errors import UserError
from utils.models import TINY_MODEL, load_model
from utils.preferences import load_preferences, load_unpaired
from utils.rows import hold_out, keys_of, remembered
from utils.tasks import load_task
from utils.text import RowFault, encode_row, usable_rows

MEASURE = """
import sys, threading
sys.path.insert(0, sys.argv[1])
import datasets
from types import SimpleNamespace
from utils.preferences import encode_rows, load_unpaired, usable
from utils.rows import read_splits
from utils.tasks import load_task
from utils.text import usable_task

datasets.config.HF_DATASETS_CACHE = sys.argv[3]
encode = lambda row, *_: ([0] * (len(row["prompt"]) // 8), [1], [2])  # how long does not matter here
args = SimpleNamespace(eval_prompts=8, max_length=9000, max_prompt_length=None)

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
    task = usable_task(load_task(sys.argv[2]), encode, 9000, None, "")
    rows = [len(task.rows)] + [task.train(i, 1)["number"] for i in range(3)]
    data, _ = usable(load_unpaired(sys.argv[2], 1, 1), encode, None, None, args)
    rows.append(len(encode_rows(data.train + data.heldout, encode, None, None, 9000)[0][0]))

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
    reading, passing, rows, *_ = done.stdout.splitlines()[-1].split()
    assert int(rows) == 10_000 - 256 and int(reading) < 0.6 * size and int(passing) < size / 10, done.stdout


def test_rows_keep_their_numbers(tmp_path, own_cache, capsys):
    """Behind rows that were left out before, in another split, and where a pair is two rows."""
    talk = lambda i: [{"role": "user", "content": f"S{i}:"}, {"role": "assistant", "content": f"{i}"}]  # noqa: E731
    rows = [{"messages": talk(i) if i not in (0, 3) else talk(i)[:1]} for i in range(40)]
    task = load_task(write_rows(tmp_path / "talk.jsonl", rows))
    assert "2 of 40 rows" in capsys.readouterr().out

    def encode(row):
        if row["prompt"][0]["content"] in ("S7:", "S9:"):
            raise RowFault(row, "is no good")
        return [1], [2]

    train, heldout, cut = usable_rows(task.rows, task.heldout, encode, 9)
    assert f"2 of 38 rows cannot be used and are dropped, the first because row 7 of {tmp_path}" in (
        capsys.readouterr().out
    )
    left = {row["prompt"][0]["content"] for row in [*train, *heldout]}
    assert left == {f"S{i}:" for i in range(40)} - {"S0:", "S3:", "S7:", "S9:"} and cut == 0
    pairs = [{"prompt": f"S{i}:", "chosen": "1", "rejected": "2"} for i in range(30)]
    data = load_unpaired(write_rows(tmp_path / "pairs.jsonl", pairs), 1, 1)
    for i, row in enumerate(data.train):
        assert row.where == f"row {row['prompt'][1:-1]} of {tmp_path / 'pairs.jsonl'}" and row["label"] == (i % 2 == 0)


def test_every_row_is_encoded_once_before_the_first_step_and_none_is_kept(tmp_path, own_cache):
    tokenizer = load_model(TINY_MODEL)[1]
    rows = [{"prompt": f"S{i}:", "completion": f"{i}", "chosen": f"{i}", "rejected": "3"} for i in range(50)]
    data, seen = load_preferences(write_rows(tmp_path / "rows.jsonl", rows), 1, 1), []

    def encode(row):
        seen.append(row["prompt"])
        return encode_row(row, tokenizer, [1])

    train, heldout, _ = usable_rows(data.train, data.heldout, encode, 99)
    assert sorted(seen) == sorted(row["prompt"] for row in rows) and len(train) + len(heldout) == 50
    kept = remembered(train)
    assert kept[3] is kept[3] and train[3] is not train[3]  # made anew


def test_a_held_out_part_without_a_usable_row(capsys):
    """A twentieth of the others takes its place; where training has none, the run ends."""
    good, bad = ([{"prompt": f"{kind}{i}"} for i in range(40)] for kind in ("S", "X"))

    def encode(row):
        if row["prompt"].startswith("X"):
            raise RowFault(row, "is no good")
        return [1], [2]

    train, heldout, _ = usable_rows(good, bad, encode, 9)
    assert "held out" in capsys.readouterr().out and len(heldout) == 2 and len(train) == 38
    assert {row["prompt"] for row in [*train, *heldout]} == {row["prompt"] for row in good}
    train, heldout, _ = usable_rows(good, [], encode, 9)
    assert len(train) == 40 and len(heldout) == 0  # nothing was to be held out
    with pytest.raises(UserError, match="no row is left to train on: .* is no good"):
        usable_rows(bad, good, encode, 9)


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
def test_which_rows_are_held_out_has_nothing_to_do_with_their_text(form):
    """50 x 50 prompts that differ in two numbers, of which 125 are held out: each number about 2.5 times. Chi-squared
    with 49 degrees of freedom exceeds 102 once in 100,000; a checksum, which is linear, gives far more."""
    rows = [{"prompt": form.format(i // 50, i % 50), "numbers": (i // 50, i % 50)} for i in range(2500)]
    _, heldout = hold_out(rows, keys_of(rows), "mine")
    assert len(heldout) == 125
    for which in (0, 1):
        counts = [sum(row["numbers"][which] == i for row in heldout) for i in range(50)]
        assert sum((count - 2.5) ** 2 / 2.5 for count in counts) < 102
