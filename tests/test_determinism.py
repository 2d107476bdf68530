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
from every_script import every_script, options, script
from helpers import metrics, new_run, weights


def trained(folder) -> list[dict]:
    """The rows without evaluations, which are all that a row may lack."""
    rows = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in metrics(folder)]
    return [row for row in rows if row.keys() != {"step"}]


@every_script
def test_what_is_looked_at_does_not_change_the_run(algo, tmp_path, monkeypatch):
    """Evaluations and checkpoints at every opportunity, or none before the end; in another folder, after other uses of
    the process's random numbers."""
    module, args = script(algo, tmp_path)
    there, step = options(algo), 48
    if "log_every" not in there and "total_timesteps" not in there:
        args, step = [*args, "--max-steps", 3], 1
    for name, value in {"eval_samples": 2, "eval_episodes": 1, "dropout": 0.1, "online_steps": 48}.items():
        args += [f"--{name.replace('_', '-')}", value] if name in there else []
    monkeypatch.chdir(tmp_path)
    often = new_run(module, tmp_path / "often", *args, "--eval-every", step, "--save-every", step)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    never = new_run(module, tmp_path / "never", *args, "--eval-every", 0, "--save-every", 10**9)
    ours, theirs = trained(often), trained(never)
    shared = {row["step"] for row in theirs}
    assert [row for row in ours if row["step"] in shared] == theirs and len(theirs) > 1
    ours, theirs = weights(often), weights(never)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
