"""GSPO, CISPO, DAPO, RLOO and GRPO with tools compute TRL's advantages, loss and gradient, and DAPO its penalty.

Against recorded numbers (benchmarks/make_trl_variants_fixtures.py) always, against the installed TRL where there is
one. CISPO's ratio has no lower bound in TRL, nor here by default.
"""

import json

import pytest
import torch
from safetensors import safe_open

from algos import cispo, dapo, grpo_multiturn, gspo, rloo
from benchmarks.make_trl_fixtures import MAX_LENGTH, G, P, make_inputs, own_tokens
from benchmarks.make_trl_variants_fixtures import BUFFER, CASES, PATH, results
from utils.lm import Samples

TOLERANCE = 1e-10  # float64


def ours(inputs: dict, case: dict) -> dict[str, torch.Tensor]:
    """Advantages (B,), loss () and gradient (B, T) as each `update` composes them from the functions of its script."""
    script = {module.NAME: module for module in (gspo, cispo, dapo, rloo, grpo_multiturn)}[case["algo"]]
    mask, old, ref = (inputs[name] for name in ("mask", "old_logps", "ref_logps"))
    logps, bounds = inputs["logps"].clone().requires_grad_(), (case["epsilon"], case["epsilon_high"])
    if script is rloo:
        samples = Samples(*[torch.zeros(0)] * 3, mask, old, inputs["ended"])
        batch = rloo.Batch(samples, inputs["rewards"].flatten(), ref if case["beta"] else None)
        advantage = rloo.advantages(rloo.penalised(batch, case["beta"]).view(P, G)).view(-1, 1)
        whole, old_whole = ((x * mask).sum(1, keepdim=True) for x in (logps, old))
        loss = rloo.policy_loss(whole, old_whole, advantage, *bounds)[0].mean()
    else:
        advantage = script.advantages(inputs["rewards"], case["scale"]).view(-1, 1)
        mask = mask & inputs["ended"][:, None] if case["truncated"] else mask
        if script is gspo:
            per_token = gspo.policy_loss(logps, old, advantage, mask, *bounds)[0]
            weights = mask.to(logps.dtype) / (len(mask) * mask.sum(1, keepdim=True))
        else:
            if script is cispo:
                args = cispo.Args(ratio_high=case["epsilon_high"])
                per_token = cispo.policy_loss(logps, old, advantage, args)[0]
            else:
                per_token = script.policy_loss(logps, old, advantage, *bounds)[0]
            mask, aggregation = (own_tokens(mask), "sequence") if script is grpo_multiturn else (mask, "token")
            weights = script.token_weights(mask.to(logps.dtype), aggregation, MAX_LENGTH)
        loss = ((per_token + case["beta"] * script.k3(logps, ref)) * weights).sum()
    (gradient,) = torch.autograd.grad(loss, logps)
    return dict(advantages=advantage[:, 0], loss=loss.detach(), gradient=gradient)


def compare(inputs: dict, theirs: dict) -> None:
    for i, case in enumerate(CASES):
        for name, mine in ours(inputs, case).items():
            gap = (mine - theirs[name][i]).abs().max().item()
            assert gap < TOLERANCE, f"{name} differs by {gap:.1e} from TRL's for {case}"
        assert theirs["gradient"][i].abs().max() > 1e-3
    lengths = torch.arange(MAX_LENGTH + 3, dtype=torch.float64)
    torch.testing.assert_close(dapo.overlong_penalty(lengths, MAX_LENGTH, BUFFER), theirs["penalties"])


def test_recorded():
    with safe_open(str(PATH), "pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    assert json.loads(about["cases"]) == CASES and about["trl"].startswith("1.16.")
    parts = [{k.partition("/")[2]: t for k, t in tensors.items() if k.startswith(part)} for part in ("input", "trl")]
    compare(*parts)
    gradients = parts[1]["gradient"].flatten(1)
    assert (torch.cdist(gradients, gradients) + torch.eye(len(CASES))).min() > 1e-4  # no setting does nothing


@pytest.mark.usefixtures("needs_trl")
def test_live():
    """On inputs other than the recorded ones."""
    inputs = make_inputs(seed=1)
    compare(inputs, results(inputs))
