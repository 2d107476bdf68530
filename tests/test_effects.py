"""benchmarks/effects.py: what it counts, and that every effect of the specs claims what it recorded."""

from dataclasses import replace

import pytest

from benchmarks import effects
from benchmarks.curves import begun
from benchmarks.effects import EFFECTS
from tests.specs import Effect
from utils.core import saved_args


def test_a_claim_is_counted_over_the_seeds_that_all_runs_have():
    effect = Effect({"a": ("x", {}), "b": ("x", {})}, "last q", {"a < b / 2": 2, "abs(a) < 5": 1})
    values = {"a": {1: 1.0, 2: 6.0, 3: 1.0, 4: 0.0}, "b": {1: 4.0, 2: 7.0, 3: 1.5}}
    assert effects.holds(effect, values) == {"a < b / 2": (1, 3), "abs(a) < 5": (2, 3)}


def test_the_statistic_of_a_run():
    rows = [{"q": 9.0}, {"q": 1.0, "r": 5.0}, {"step": 3}, {"q": 2.0}, {"q": 4.0}]
    reached = [{"step": 1}, {"step": 2, "q": 1.0}, {"step": 3, "q": 5.0}, {"step": 4, "q": 6.0}, {"step": 5}]
    assert [effects.number(reached, f"until q {bound}") for bound in (1, 4.9, 5, 6, 7)] == [2, 3, 3, 4, 4]
    assert [effects.number(rows, f"{kind} q") for kind in ("last", "mean", "late", "rise")] == [4.0, 4.0, 3.0, -5.0]


def test_a_run_begins_with_the_model_of_another(tmp_path):
    """Which is trained before, with another seed."""
    small = dict(device="cpu", num_prompts=4, num_generations=4, eval_prompts=2, eval_every=0)
    settings = dict(task="sort", max_steps=2, model=("grpo", dict(task="sort", max_steps=1)))
    found = begun(settings, dict(seed=3, output_dir=str(tmp_path), num_votes=4, **small))
    (run,) = tmp_path.iterdir()
    args = saved_args(run, "grpo")
    assert found == settings | {"model": str(run / "model")} and (run / "model" / "model.safetensors").exists()
    assert run.name.startswith("grpo-sort") and args["seed"] != 3 and args["max_steps"] == 1
    assert begun(dict(model="ORG/NAME"), {}) == dict(model="ORG/NAME")


def test_a_verdict_says_what_does_not_hold(tmp_path, monkeypatch):
    """And resumes: what is recorded is not trained again, and other settings are refused."""
    runs = {"idea": ("x", {"flag": (1, 2)}), "parent": ("x", {})}
    effect, trained = Effect(runs, "last q", {"idea < parent": 2, "parent < idea": 2}, seeds=2), []
    monkeypatch.setattr(effects, "FOLDER", tmp_path)
    monkeypatch.setattr(effects, "EFFECTS", {"new": effect})
    monkeypatch.setattr(effects, "train", lambda _, run, seed: trained.append((run, seed)) or len(run) + seed / 9)
    effects.run("new", seeds=1)
    assert "too few seeds" in effects.verdict("new")
    effects.run("new")
    assert trained == [("idea", 1), ("parent", 1), ("idea", 2), ("parent", 2)]
    first, second = effects.verdict("new").splitlines()[-2:]
    assert first.endswith("in 2 of 2 seeds, 2 were asked: holds") and second.endswith("DOES NOT HOLD")
    monkeypatch.setattr(effects, "EFFECTS", {"new": Effect(runs | {"parent": ("x", {"a": 1})}, "last q", {})})
    with pytest.raises(SystemExit, match="other settings of parent"):
        effects.verdict("new")
    monkeypatch.setattr(effects, "EFFECTS", {"new": replace(effect, data=("x", {}))})
    with pytest.raises(SystemExit, match="other settings of idea"):
        effects.verdict("new")


@pytest.mark.parametrize("name", EFFECTS)
def test_what_is_recorded_is_of_today_s_settings(name):
    """Else by_run leaves. So few seeds as the claims are not about are reported as not run."""
    fewest = min(len(found) for found in effects.by_run(name).values())
    if fewest < EFFECTS[name].seeds:
        pytest.skip(f"not run: {fewest} seeds of every run are recorded, {EFFECTS[name].seeds} are claimed")
