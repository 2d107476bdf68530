"""Updates of td3_bc.py are those of the authors' code, commit 76cdd14, from the same weights, rows and noise.
Recorded by benchmarks/peers/make_td3_bc_fixtures.py."""

import pytest
import torch
from safetensors.torch import load_file

from algos import td3_bc
from benchmarks.peers import make_td3_bc_fixtures as authors

pytestmark = pytest.mark.usefixtures("float64")


def test_updates(monkeypatch):
    recorded = load_file(authors.PATH)
    for name, column in authors.make_inputs().items():
        assert (recorded[name].numpy() == column).all(), "the fixture is of other inputs"
    agent = td3_bc.Agent(authors.D, authors.A, td3_bc.Args(hidden_size=authors.H))
    optimizers = td3_bc.Optimizers(*(torch.optim.Adam(x.parameters(), 1e-2) for x in (agent.actor, agent.critics)))
    parts = {"actor": "actor", "target_actor": "actor_target", "critics": "critic", "target_critics": "critic_target"}
    layers = {"net": "l1 l2 l3", "q1": "l1 l2 l3", "q2": "l4 l5 l6"}
    names = {f"{ours}.{net}.{2 * i}.{kind}": f"{parts[ours]}.{layer}.{kind}"
             for ours in parts for net in (["net"] if "actor" in ours else ["q1", "q2"])
             for i, layer in enumerate(layers[net].split()) for kind in ("weight", "bias")}  # fmt: skip
    agent.load_state_dict({ours: recorded[theirs][0] for ours, theirs in names.items()}, strict=False)
    args = td3_bc.Args(**authors.SETTINGS)
    for i in range(authors.UPDATES):
        monkeypatch.setattr(torch, "randn", lambda *_, i=i, **__: recorded["noise"][i])
        batch = td3_bc.Transitions(*(recorded[name][i] for name in td3_bc.Transitions._fields))
        td3_bc.update(agent, optimizers, batch, torch.Generator(), args, i + 1)
        for ours, theirs in names.items():
            torch.testing.assert_close(agent.state_dict()[ours], recorded[theirs][i + 1], rtol=0, atol=1e-9)
            assert (recorded[theirs][-1] - recorded[theirs][0]).abs().max() > 1e-6
