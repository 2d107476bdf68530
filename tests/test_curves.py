"""benchmarks/curves.py: a run that was trained by its script gives the row that `record` would have given."""

import json
import statistics

import pytest

from algos import ddpg
from benchmarks import curves
from tests.specs import Curve

SETTINGS = dict(env_kwargs=("max_episode_steps=20",), total_timesteps=96, learning_starts=16, batch_size=8,
                hidden_size=8, log_every=16, eval_every=32, eval_episodes=2)  # fmt: skip


@pytest.fixture
def finished(monkeypatch, tmp_path):
    monkeypatch.setattr(curves, "FOLDER", tmp_path / "curves")
    (tmp_path / "curves").mkdir()
    monkeypatch.setitem(curves.CURVES, "short", Curve(SETTINGS, "eval/return", {}))
    monkeypatch.setitem(curves.SCRIPT_OF, "short", "ddpg")
    ddpg.train(ddpg.Args(**SETTINGS, seed=3, output_dir=str(tmp_path)))
    (config,) = tmp_path.glob("*/config.json")
    return config.parent


def test_a_finished_run_gives_the_row_of_record(finished):
    curves.add("short", finished)
    (row,) = curves.recorded("short")
    settings = json.loads(json.dumps(SETTINGS))
    assert row["settings"] == settings and row["commit"] and row.pop("seconds") > 0 and row["machine"]["threads"]
    recorded = curves.run_once("short", 3)
    assert {name: row[name] for name in recorded if name != "seconds"} == {
        name: value for name, value in recorded.items() if name != "seconds"
    }
    with pytest.raises(SystemExit, match="has seed 3 already"):
        curves.add("short", finished)


def test_other_settings_and_unfinished_runs_are_refused(finished, monkeypatch):
    metrics = finished / "metrics.jsonl"
    rows = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(row for row in rows if json.loads(row)["step"] < SETTINGS["total_timesteps"]))
    with pytest.raises(SystemExit, match="is not finished"):
        curves.add("short", finished)
    monkeypatch.setitem(curves.CURVES, "short", Curve(SETTINGS | {"batch_size": 16}, "eval/return", {}))
    with pytest.raises(SystemExit, match="has other settings"):
        curves.add("short", finished)
    assert not curves.recorded("short")


def test_a_change_of_utils_has_some_curves_learn(monkeypatch):
    """As many as fit; another commit draws others, and over commits all have their turn."""
    monkeypatch.setattr(curves, "unchanged_since", lambda name: "abc" if name == "kto-sort" else "")
    short = {name for name in curves.CURVES if not curves.CURVES[name].slow and len(curves.recorded(name)) >= 8}
    eligible = {name for name in short if not curves.learns_always(name)} - {"kto-sort"}
    seconds = {name: 2 * statistics.mean(row["seconds"] for row in curves.recorded(name)) for name in eligible}
    turns = []
    for commit in range(300):
        monkeypatch.setattr(curves, "fresh_seeds", lambda commit=commit: [commit])
        turns.append(curves.drawn(set(curves.CURVES)))
        assert turns[-1] <= eligible and curves.DRAWN / 2 < sum(seconds[name] for name in turns[-1]) <= curves.DRAWN
    assert set().union(*turns) == eligible and turns[0] != turns[1]
