"""GSPO, CISPO, DAPO, RLOO and GRPO with tools compute TRL's advantages and gradient, and DAPO TRL's penalty of length.

Whole updates run on a table of log-probabilities. They are compared with recorded numbers always
(peers/make_trl_variants_fixtures.py), and with the installed TRL where there is one. GSPO and RLOO get the old
log-probabilities from the model, not from the sampler: here from what it said before.
"""

import pytest
import torch
from parity import below, recorded
from table import updated

from algos import cispo, dapo, grpo_multiturn, gspo, rloo
from benchmarks.peers import make_trl_variants_fixtures as peer
from benchmarks.peers.make_trl_fixtures import MAX_LENGTH, G, P, make_inputs, own_tokens

TOLERANCE = 1e-10
SCRIPTS = {module.NAME: module for module in (gspo, cispo, dapo, rloo, grpo_multiturn)}

pytestmark = pytest.mark.usefixtures("float64")


def ours(monkeypatch, inputs: dict, case: dict) -> dict[str, torch.Tensor]:
    """Advantages (B,), and the gradient (B, T) of `update`."""
    script, old, ref = SCRIPTS[case["algo"]], inputs["old_logps"], inputs["ref_logps"] if case["beta"] else None
    batch = script.Batch(None, inputs["rewards"].flatten(), ref)
    settings = dict(beta=case["beta"], epsilon=case["epsilon"], epsilon_high=case["epsilon_high"], group=G,
                    max_completion_length=MAX_LENGTH,
                    mask_truncated_completions=case.get("truncated", False))  # fmt: skip
    if script is cispo:
        settings["ratio_high"] = case["epsilon_high"]
    elif script is rloo:
        settings["first"] = old
    elif script is gspo:
        monkeypatch.setattr(gspo, "reference_logps", lambda *_: old)
    elif script is grpo_multiturn:
        own = own_tokens(inputs["mask"])
        settings["call"] = lambda table, optimizer, batch, args: script.update(table, optimizer, batch, own, args)
    table = updated(monkeypatch, script, inputs | {"old": old}, *batch[1:], **settings)
    groups = batch.rewards.view(P, G)
    if script is rloo:
        sampled = rloo.Samples(*[None] * 3, inputs["mask"], old, None)
        advantages = rloo.advantages(rloo.penalised(batch._replace(samples=sampled), case["beta"]).view(P, G))
    else:
        advantages = script.advantages(groups, case["scale"])
    return {"advantages": advantages.flatten(), "gradient": table.logps.grad}


def compare(monkeypatch, inputs: dict, theirs: dict) -> None:
    for i, case in enumerate(peer.CASES):
        for name, mine in ours(monkeypatch, inputs, case).items():
            gap = (mine - theirs[name][i]).abs().max().item()
            assert gap < TOLERANCE, f"{name} differs by {gap:.1e} from TRL's for {case}"
        assert theirs["gradient"][i].abs().max() > 1e-3
    lengths = torch.arange(MAX_LENGTH + 3.0)
    torch.testing.assert_close(dapo.overlong_penalty(lengths, MAX_LENGTH, peer.BUFFER), theirs["penalties"])


def test_recorded(monkeypatch):
    inputs, results = recorded(peer)
    theirs = below("trl/", results)
    compare(monkeypatch, inputs, theirs)
    gradients = theirs["gradient"].flatten(1)
    assert (torch.cdist(gradients, gradients) + torch.eye(len(peer.CASES))).min() > 1e-4  # no setting does nothing


@pytest.mark.usefixtures("needs_trl")
def test_live(monkeypatch):
    """On inputs other than the recorded ones."""
    inputs = make_inputs(seed=1)
    torch.set_default_dtype(torch.float32)  # TRL's own, while its trainers are made
    theirs = peer.results(inputs)
    torch.set_default_dtype(torch.float64)
    compare(monkeypatch, inputs, theirs)
