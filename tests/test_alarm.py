"""The one alarm: a run whose tokens are not scored as they were sampled stops with a sentence. Models of which that is
true are in test_reproductions_language.py."""

import math
from types import SimpleNamespace

import pytest

from algos import grpo
from utils.core import UserError
from utils.lm import LARGEST_GAP, alarm


def trained(folder, **settings) -> list[dict]:
    """Two steps on sort."""
    how = dict(task="sort", max_steps=2, num_prompts=4, num_generations=4, max_completion_length=8, eval_prompts=2,
               eval_samples=2, learning_rate=1e-4, output_dir=str(folder / "runs"), device="cpu")  # fmt: skip
    return grpo.train(grpo.Args(**how | settings))


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "pure-bfloat16"])
def test_sound_runs_are_far_from_the_limit(precision, tmp_path):
    gaps = [row["sampler_gap"] for row in trained(tmp_path, precision=precision)[1:]]
    assert len(gaps) == 2 and 0 < max(gaps) < LARGEST_GAP[precision] / 3


def test_a_step_without_a_trained_token_has_no_gap(tmp_path):
    """Nor an alarm."""
    rows = trained(tmp_path, max_completion_length=1, mask_truncated_completions=True, temperature=0.01)
    assert rows[1]["truncated"] == 1 and not any("sampler_gap" in row for row in rows)


class Run(SimpleNamespace):
    """A run, whose steps have the gaps that the alarm heard of."""

    def __init__(self):
        super().__init__(history=[{"step": 0}], said=[])

    def print(self, text: str) -> None:
        self.said.append(text)

    def hears(self, gap: float | None, **args) -> None:
        try:
            alarm(gap, self, SimpleNamespace(**{"sampler": "", "precision": "float32"} | args))
        finally:
            more = {} if gap is None or math.isnan(gap) else {"sampler_gap": gap}
            self.history.append({"step": len(self.history), **more})


@pytest.mark.parametrize("gap", [0.002, math.nan, math.inf])
def test_our_own_sampler_may_not_be_wrong_once(gap):
    run = Run()
    run.hears(1e-6)
    run.hears(None)
    run.hears(0.002, precision="bfloat16")
    with pytest.raises(UserError, match="sampler_gap is .* 0.001 is the limit"):
        run.hears(gap)


@pytest.mark.parametrize("gap", [0.5, math.nan])
def test_a_server_is_warned_of_and_stops_the_third_step_running(gap):
    run = Run()
    for ok in (0.01, gap, gap, 0.01, gap, gap):
        run.hears(ok, sampler="http://x")
    assert len(run.said) == 4 and "old weights" in run.said[0]
    with pytest.raises(UserError, match="http://x does not follow the model"):
        run.hears(gap, sampler="http://x")


def test_a_server_that_is_wrong_from_the_first_step_on():
    run = Run()
    run.hears(0.5, sampler="http://x")
    run.hears(0.5, sampler="http://x")
    with pytest.raises(UserError, match="http://x"):
        run.hears(0.5, sampler="http://x")
    assert len(run.said) == 2
