"""Equal arguments give equal runs, bit for bit, on the same machine: weights, and metrics but for time/*.

tests/test_eject.py compares two runs of every script, in two processes with random hash seeds of their own and from two
folders; tests/test_resume*.py compare interrupted and uninterrupted ones. Here is what they leave:
what is looked at and written during a run changes nothing in it, nor does what ran in the process before.

Exceptions, all of them:
    another --threads       sums are added in another order
    a GPU                   kernels that add atomically; a run on the CPU is exact
    --compile               the compiler may choose other kernels after an update of its own
    time/*                  columns of metrics.jsonl that measure time
    eval/best_return        the best of the evaluations that there were
    environments and reward functions that draw from generators that no seed reaches
"""

import random

import numpy as np
import torch
from every_script import every_script, options
from helpers import metrics, weights
from tiny_runs import train

from tests.specs import SPECS


def trained(folder) -> list[dict]:
    """The rows without evaluations, which are all that a row may lack."""
    rows = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in metrics(folder)]
    return [row for row in rows if row.keys() != {"step"}]


@every_script
def test_what_is_looked_at_does_not_change_the_run(algo, tmp_path, monkeypatch):
    """Evaluations and checkpoints at every opportunity, or none before the end; in another folder, after other uses of
    the process's random numbers."""
    step = 1 if {"log_every", "total_timesteps"}.isdisjoint(options(algo)) else 4
    settings = SPECS[algo].flags | {"eval_samples": 2, "eval_episodes": 1, "dropout": 0.1, "online_steps": 48}
    for name, every in ("often", (step, step)), ("never", (0, 10**9)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        random.seed(name)
        np.random.seed(len(name))
        torch.manual_seed(len(name))
        train(algo, settings | dict(zip(("eval_every", "save_every"), every)), tmp_path / name)
    (often,), (never,) = ((tmp_path / name).iterdir() for name in ("often", "never"))
    ours, theirs = trained(often), trained(never)
    shared = {row["step"] for row in theirs}
    assert [row for row in ours if row["step"] in shared] == theirs and len(theirs) > 1
    ours, theirs = weights(often), weights(never)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
