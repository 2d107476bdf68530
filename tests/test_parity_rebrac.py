"""Updates of rebrac.py are those of the authors' code, commit 694385b, from the same weights, rows and noise: networks,
losses and Adam. Recorded by benchmarks/peers/make_rebrac_fixtures.py."""

import pytest
import torch
from safetensors.torch import load_file

from algos import rebrac
from benchmarks.peers import make_rebrac_fixtures as authors

pytestmark = pytest.mark.usefixtures("float64")


def test_updates(monkeypatch):
    recorded = load_file(authors.PATH)
    for name, column in authors.make_inputs().items():
        assert (recorded[name].numpy() == column).all(), "the fixture is of other inputs"
    args = rebrac.Args(hidden_size=authors.H, **authors.SETTINGS)
    agent = rebrac.Agent(authors.D, authors.A, args)
    optimizers = rebrac.Optimizers(*(torch.optim.Adam(x.parameters(), 1e-2) for x in (agent.actor, agent.critics)))
    names = [name for name in agent.state_dict() if "obs_" not in name]
    agent.load_state_dict({name: recorded[name][0] for name in names}, strict=False)
    for i in range(authors.UPDATES):
        monkeypatch.setattr(torch, "randn", lambda *_, i=i, **__: recorded["noise"][i])
        columns = [recorded[name][i] for name in rebrac.Transitions._fields[:-1]]
        batch = rebrac.Transitions(*columns, followed=torch.ones(authors.B, 1))
        rebrac.update(agent, optimizers, batch, torch.Generator(), args, i + 1)
        for name in names:
            torch.testing.assert_close(agent.state_dict()[name], recorded[name][i + 1], rtol=0, atol=1e-9)
            assert (recorded[name][-1] - recorded[name][0]).abs().max() > 1e-6
