"""Updates of awac.py are those of CORL's AWAC, commit eeeeef2, from the same weights, rows and noise. Recorded by
benchmarks/peers/make_awac_fixtures.py."""

import pytest
import torch
from safetensors.torch import load_file

from algos import awac
from benchmarks.peers import make_awac_fixtures as corl

pytestmark = pytest.mark.usefixtures("float64")


def test_updates(monkeypatch):
    recorded, largest = load_file(corl.PATH), []
    for name, column in corl.make_inputs().items():
        assert (recorded[name].numpy() == column).all(), "the fixture is of other inputs"
    args = awac.Args(hidden_size=corl.H, **corl.SETTINGS)
    agent = awac.Agent(corl.D, corl.A, args)
    optimizers = awac.Optimizers(*(torch.optim.Adam(x.parameters(), 1e-2) for x in (agent.actor, agent.critics)))
    names = agent.state_dict().keys() - {"obs_mean", "obs_std"}
    agent.load_state_dict({name: recorded[name][0] for name in names}, strict=False)
    for i in range(corl.UPDATES):
        noise = iter(recorded["noise"][i].unbind(1))
        monkeypatch.setattr(torch, "randn", lambda *_, noise=noise, **__: next(noise))
        batch = awac.Transitions(*(recorded[name][i] for name in awac.Transitions._fields))
        largest.append(awac.update(agent, optimizers, batch, torch.Generator(), args)["largest"].item())
        for name in names:
            torch.testing.assert_close(agent.state_dict()[name], recorded[name][i + 1], rtol=0, atol=1e-9)
            assert (recorded[name][-1] - recorded[name][0]).abs().max() > 1e-6
    assert min(largest) < max(largest) == 100
