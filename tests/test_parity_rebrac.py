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
    agent = rebrac.Agent(authors.D, authors.A, rebrac.Args(hidden_size=authors.H))
    optimizers = rebrac.Optimizers(*(torch.optim.Adam(x.parameters(), 1e-2) for x in (agent.actor, agent.critics)))

    def theirs(name: str, number: int) -> torch.Tensor:
        """The authors' parameter that is called `name` here."""
        part, net, place, kind = name.split(".")
        layer = f"Dense_{int(place) // (2 if net == 'net' else 3)}"
        if net != "net" and int(place) % 3 == 2:
            layer = f"LayerNorm_{int(place) // 3}"
        kind = {"weight": "kernel" if "Dense" in layer else "scale", "bias": "bias"}[kind]
        found = recorded[f"{part}/params/{'' if net == 'net' else 'VmapCritic_0/'}{layer}/{kind}"][number]
        found = found if net == "net" else found[int(net[1]) - 1]
        return found.T.contiguous() if kind == "kernel" else found

    names = [name for name in agent.state_dict() if "obs_" not in name]
    agent.load_state_dict({name: theirs(name, 0) for name in names}, strict=False)
    args = rebrac.Args(**authors.SETTINGS)
    for i in range(authors.UPDATES):
        monkeypatch.setattr(torch, "randn", lambda *_, i=i, **__: recorded["noise"][i])
        batch = rebrac.Transitions(*(recorded[name][i] for name in rebrac.Transitions._fields[:-1]),
                                   followed=torch.ones(authors.B, 1))  # fmt: skip
        rebrac.update(agent, optimizers, batch, torch.Generator(), args, i + 1)
        for name in names:
            torch.testing.assert_close(agent.state_dict()[name], theirs(name, i + 1), rtol=0, atol=1e-9)
            assert (theirs(name, -1) - theirs(name, 0)).abs().max() > 1e-6
