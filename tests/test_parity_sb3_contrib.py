"""PPO with masks computes what sb3-contrib's MaskablePPO computes: rollout, advantages, and trained weights.

As test_parity_sb3.py, whose differences stay; benchmarks/make_sb3_contrib_fixtures.py recorded the numbers. One more:
sb3-contrib sets logits to -1e8 where we have minus infinity, which no number here shows.
"""

import json

import pytest
import torch
from test_parity_sb3 import assert_same

from algos import ppo_mask
from benchmarks.make_sb3_contrib_fixtures import CASES, PARTS, PATH, PlayedWithMasks, run_contrib, with_masks
from benchmarks.make_sb3_fixtures import make_stream

IDS = [f"{case['space']}-{i % 3}" for i, case in enumerate(CASES)]


def compare(stream: dict, case: dict, theirs: dict[str, torch.Tensor]) -> None:
    make = lambda *args: ppo_mask.Masked(PlayedWithMasks(*args))  # noqa: E731
    assert_same(stream, case, theirs, ppo_mask, make, sum(PARTS[case["space"]]))


def test_recorded():
    from safetensors import safe_open

    with safe_open(str(PATH), "pt") as file:
        recorded, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    assert json.loads(about["cases"]) == CASES and about["sb3_contrib"].startswith("2.9.")
    stream = {name.removeprefix("stream/"): t.numpy() for name, t in recorded.items() if name.startswith("stream/")}
    for i, case in enumerate(CASES):
        start = f"case{i}/"
        theirs = {name.removeprefix(start): t for name, t in recorded.items() if name.startswith(start)}
        compare(stream, case, theirs)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_live(case):
    why = "sb3-contrib cannot be imported: pip install sb3-contrib==2.9.0"
    contrib = pytest.importorskip("sb3_contrib", reason=f"not run: {why}", exc_type=ImportError)
    if not contrib.__version__.startswith("2.9."):
        pytest.skip(f"not run: sb3-contrib is {contrib.__version__}: the comparison is with 2.9")
    stream = with_masks(make_stream(seed=1), seed=1)
    with torch.random.fork_rng():
        theirs = run_contrib(stream, case, hidden_size=16)
    compare(stream, case, theirs)
