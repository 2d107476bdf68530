"""benchmarks/compare_runs.py: what stands beside what."""

import json

import pytest

from benchmarks.compare_runs import Settings, compare
from utils.core import UserError


def write(folder, rows: list[dict], **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"algo": "grpo", "args": config}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_equal_steps_samples_and_pass_at_1(tmp_path, capsys):
    """The slow run reaches 0.4 in its last evaluation, the fast one halfway between two; the first has 8 completions a
    step, the other says how many it drew."""
    slow = [{"step": 0, "eval/pass@1": 0.2, "eval/pass@8": 1.0}, {"step": 1}, {"step": 2},
            {"step": 3, "eval/pass@1": 0.4, "eval/pass@8": 3.0}]  # fmt: skip
    fast = [{"step": 0, "eval/pass@1": 0.2, "eval/pass@8": 1.0}, {"step": 1, "sampled": 20}, {"step": 2,
             "sampled": 30, "eval/pass@1": 0.6, "eval/pass@8": 2.0}]  # fmt: skip
    runs = (write(tmp_path / "slow", slow, num_prompts=4, num_generations=2),
            write(tmp_path / "fast", fast, num_prompts=4, num_generations=2))  # fmt: skip
    compare(Settings(runs, ("eval/pass@8",)))
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    a, b = "step {} samples {} eval/pass@1 {} eval/pass@8 {}".format, [" ".join(line[1:]) for line in shown]
    assert [" ".join(line) for line in shown[::3]] == ["at step 2", "at samples 24", "at eval/pass@1 0.4"]
    assert b[1:3] == [a(2, 16, 0.3333, 2.333), a(2, 50, 0.6, 2)]
    assert b[4:6] == [a(3, 24, 0.4, 3), a(0.96, 24, 0.392, 1.48)]
    assert b[7:9] == [a(3, 24, 0.4, 3), a(1, 25, 0.4, 1.5)]


def test_what_is_no_run(tmp_path):
    with pytest.raises(UserError, match="no metrics.jsonl"):
        compare(Settings((tmp_path,)))
    with pytest.raises(UserError, match="no column eval/pass@1"):
        compare(Settings((write(tmp_path / "control", [{"step": 0, "eval/return": 1.0}]),)))
