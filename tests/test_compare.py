"""benchmarks/compare.py: which runs are one setting and what it is called, what its numbers are, what it writes."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import trim_mean

from benchmarks import compare
from utils.core import UserError


def run(folder: Path, rows: list[dict], script: str = "algos/ppo.py", typed: str = "", **args) -> Path:
    folder.mkdir(parents=True)
    args = {"seed": 1, "total_timesteps": 10, "clip": 0.2, "rate": 0.1, "output_dir": str(folder)} | args
    config = {"args": args, "command": [script, *typed.split()], "task": "CartPole-v1"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def returns(*values: float) -> list[dict]:
    return [
        {"step": 5 * i, "return": value, "episodes": 2, "time/steps_per_second": 10.0} for i, value in enumerate(values)
    ]


def test_a_setting_is_named_after_what_tells_it_apart(tmp_path):
    """Seeds, places and saves do not; a flag that was typed does, before one that follows from it."""
    for seed in 1, 2:
        run(tmp_path / f"a{seed}", returns(0, 1), seed=seed, save_every=seed)
        run(tmp_path / f"b{seed}", returns(0, 2), seed=seed, clip=1e9, rate=0.3, typed="--clip 1e9")
    two = compare.settings_of((tmp_path,), "step")
    assert [(s.name, list(s.seeds)) for s in two] == [("--clip 0.2", ["1", "2"]), ("--clip 1e+09", ["1", "2"])]
    run(tmp_path / "again", returns(0, 1, 5), seed=2)
    longer = compare.settings_of((tmp_path,), "step")[0].seeds
    assert longer.keys() == {"1", "2"} and longer["2"]["return"][1].tolist() == [0, 1, 5]
    run(tmp_path / "untyped", returns(0, 2), clip=1e9, rate=0.7)
    assert compare.settings_of((tmp_path,), "step")[2].name == "--clip 1e+09 --rate 0.7"
    mine = run(tmp_path / "copy" / "c", returns(0, 3), script="mine.py")
    assert [s.name for s in compare.settings_of((tmp_path / "a1", mine), "step")] == ["ppo", "mine"]


@pytest.mark.parametrize("x, expected", [("step", [5, 10, 15]), ("time", [0.5, 1, 1.5]), ("episodes", [2, 4, 6])])
def test_axes(x, expected, tmp_path):
    """A language run begins with an evaluation at step 0, which took none."""
    rows = [row | {"step": row["step"] + 5} for row in returns(0, 1, 2)]
    assert compare.columns_of(run(tmp_path / "a", rows), x)["return"][0].tolist() == expected
    rows = [{"step": 0, "reward": 0.5}]
    rows += [{"step": i, "reward": 0.5, "time/step": 2.0, "time/tokens_per_second": 50.0} for i in (1, 2)]
    language = run(tmp_path / "b", rows)
    found = {axis: compare.columns_of(language, axis)["reward"][0].tolist() for axis in ("time", "tokens")}
    assert found == {"time": [0, 2, 4], "tokens": [0, 100, 200]}


def test_seeds_meet_where_all_have_been(tmp_path):
    """Seed 2 has not logged step 5, and lies between its neighbours there; seed 1 has not reached step 15."""
    one, two = returns(0, 4, 8), returns(2, 0, 4, 9)
    del two[1]["return"]
    settings = compare.settings_of((run(tmp_path / "1", one), run(tmp_path / "2", two, seed=2)), "step")
    assert not len(compare.together(settings[0], "reward")[0])
    grid, values = compare.together(settings[0], "return")
    assert grid.tolist() == [0, 5, 10] and values.tolist() == [[0, 4, 8], [2, 3, 4]]


def test_intervals_and_improvement():
    """The interval of a mean by all 27 equally likely draws of three seeds; it never leaves what was seen."""
    values = np.array([[0.0], [1.0], [5.0]])
    low, high = compare.interval(values, np.mean)
    means = np.sort([np.mean(draw) for draw in np.stack(np.meshgrid(*[values[:, 0]] * 3), -1).reshape(-1, 3)])
    assert (low, high) == (means[0], means[-1]) == (0, 5)
    scores = np.arange(8.0)
    assert compare.centre_of("iqm")(scores, axis=0) == trim_mean(scores, 0.25) == 3.5
    assert compare.improvement(np.array([1.0, 3.0]), np.array([2.0, 3.0])).startswith("0.38 (")  # 1.5 of 4 pairs
    assert compare.improvement(np.array([1.0]), np.array([0.0])) == "1.00"


def test_what_is_written(tmp_path, capsys):
    """Pictures in three formats, rows that csv reads, a recorded curve beside a run."""
    run(tmp_path / "a", [{"step": 4096 * i, "eval/return": 100.0 * i, "approx_kl": 0.1} for i in range(1, 4)])
    columns, output = ("eval/return", "approx_kl"), tmp_path / "out"
    compare.main(compare.Args((tmp_path / "a",), columns, reference=("ppo-cartpole",), output=output))
    for kind, head in {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}.items():
        assert output.with_name(f"out.{kind}").read_bytes().startswith(head)
    svg = output.with_name("out.svg").read_text()
    texts = "environment steps", "approx_kl (nats)", "cartpole, recorded, 30 seeds", "ppo on CartPole-v1: mean of"
    assert all(text in svg for text in texts)
    assert output.with_name("out.csv").read_text().splitlines()[1] == "ppo,ppo,1,eval/return,4096.0,100.0"
    assert "P(1 ends higher than 2) = 0.0" in capsys.readouterr().out


WRONG = {
    "holds no run": lambda folder: dict(runs=(folder / "empty",)),
    "its config.json cannot be read": lambda folder: dict(runs=(folder / "broken",)),
    "has no row of metrics yet": lambda folder: dict(runs=(run(folder / "new", []),)),
    "has no column that tells of tokens": lambda folder: dict(x="tokens"),
    "the runs have logged return": lambda folder: dict(columns=("rewards",)),
    "no recorded curve ppo-mars": lambda folder: dict(reference=("ppo-mars",)),
    "so leave --x out": lambda folder: dict(reference=("ppo-cartpole",), x="time"),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_input(words, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{}")
    settings = dict(runs=(run(tmp_path / "a", returns(0, 1)),), output=tmp_path / "out")
    with pytest.raises(UserError, match=words):
        compare.main(compare.Args(**settings | WRONG[words](tmp_path)))
