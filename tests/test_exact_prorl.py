"""ProRL: the update is grpo.py's; what is its own, the resets, is read from whole runs."""

import pytest
import torch
from helpers import SMALL, metrics, new_run

from algos import grpo, prorl
from utils.core import UserError

RUN = (*SMALL["grpo"], "--num-prompts", 12, "--max-steps", 7, "--max-completion-length", 12, "--eval-every", 0,
       "--beta", 0.5, "--learning-rate", 1e-4, "--save-every", 1)  # fmt: skip


@pytest.fixture
def seen(monkeypatch) -> list[dict]:
    """Of each step: how far policy and reference are from the start, and from each other, when it is scored; and the
    moments of Adam and their count of steps before the update."""
    steps, inner, update = [], prorl.reference_logps, prorl.update

    def vector(model):
        return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()

    def watched(model, reference, samples, args):
        steps.append({"policy": vector(model), "reference": vector(reference)})
        return inner(model, reference, samples, args)

    def updated(model, optimizer, batch, args):
        state = list(optimizer.state.values())
        steps[-1]["count"] = {float(one["step"]) for one in state}
        steps[-1]["moments"] = sum(one["exp_avg"].norm() + one["exp_avg_sq"].norm() for one in state)
        return update(model, optimizer, batch, args)

    monkeypatch.setattr(prorl, "reference_logps", watched)
    monkeypatch.setattr(prorl, "update", updated)
    return steps


def test_the_reference_becomes_the_policy_and_adam_begins_anew(seen, tmp_path):
    """Every three steps, after the update; between resets the reference stands still, and Adam's count goes on."""
    rows = metrics(new_run(prorl, tmp_path, *RUN, "--reset-reference-every", 3))
    last_reset = [0, 0, 0, 3, 3, 3, 6]
    for step, at in enumerate(last_reset):
        assert torch.equal(seen[step]["reference"], seen[at]["policy"])
        assert torch.equal(seen[step]["policy"], seen[step]["reference"]) == (step == at)
        assert seen[step]["count"] == ({step - at} if step else set())
        assert step == 0 or (seen[step]["moments"] == 0) == (step == at)
        assert (abs(rows[step + 1]["kl"]) < 1e-9) == (step == at)


def test_without_a_reset_it_is_grpo(tmp_path):
    one, other = (metrics(new_run(module, tmp_path / module.NAME, *RUN, *more))
                  for module, more in ((prorl, ("--reset-reference-every", 8)), (grpo, ())))  # fmt: skip
    assert one == other


@pytest.mark.parametrize("wrong", [dict(lora_rank=2), dict(beta=0.0), dict(reset_reference_every=0)])
def test_a_reference_that_cannot_be_reset_is_refused(wrong, tmp_path):
    with pytest.raises(UserError, match="give --reset-reference-every, --beta and no --lora-rank"):
        prorl.train(prorl.Args(task="sort", output_dir=str(tmp_path), device="cpu", **wrong))
