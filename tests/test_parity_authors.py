"""Updates of iql.py, bc.py and rlpd.py compute what the authors' code of IQL and RLPD computes, from the same weights
and minibatches.

Recorded by peers/make_authors_fixtures.py from the JAX code of IQL (commit 09d7002), whose actor clones behaviour
at temperature 0, and of RLPD (c90fd4b). RLPD's critics minimise a mean over them where ours minimise half a sum, a
factor that Adam's epsilon alone sees, and its LayerNorm has flax's epsilon of 1e-6 where ours has PyTorch's 1e-5: here
both are as theirs.
"""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from algos import bc, iql, rlpd
from benchmarks.peers import make_authors_fixtures as authors

EXACT = 1e-9  # float64, four steps of Adam
DENSE = [f"MLP_0/Dense_{i}" for i in range(3)]
IQL = {"actor.net": [f"actor/{place}" for place in (*DENSE[:2], "Dense_0")], "value": [f"value/{d}" for d in DENSE]}
IQL |= {f"{ours}.q{i + 1}": [f"{theirs}/Critic_{i}/{place}" for place in DENSE]
        for ours, theirs in (("critics", "critic"), ("targets", "target_critic")) for i in range(2)}  # fmt: skip
NORMED = DENSE[0], "MLP_0/LayerNorm_0", DENSE[1], "MLP_0/LayerNorm_1", "Dense_0"
RLPD = {"actor.net": [f"actor/{place}" for place in (*DENSE[:2], "OutputDenseMean OutputDenseLogStd")]}
RLPD |= {f"{ours}.q{i + 1}": [f"{theirs}/VmapStateActionValue_0/{place}#{i}" for place in NORMED]
         for ours, theirs in (("critics", "critic"), ("targets", "target_critic"))
         for i in range(authors.CRITICS)}  # fmt: skip

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    tensors = load_file(str(authors.PATH))
    for name, made in authors.make_inputs().items():
        assert (tensors[name].numpy() == made).all(), "the fixture is of other inputs"
    return tensors


def layer(recorded: dict, place: str, kind: str) -> Tensor:
    """The authors' weight or bias, ours in shape, at the start and after each update: (UPDATES + 1, ...). `#i`: of the
    ensemble's member i. Two names: the two halves of one layer of ours."""
    first, *second = place.split()
    first, _, member = first.partition("#")
    kinds = {"bias": ["bias"], "weight": ["kernel", "scale"]}[kind]
    (name,) = [name for k in kinds if (name := f"{first}/{k}") in recorded]
    found = recorded[name][:, int(member)] if member else recorded[name]
    found = found.mT if name.endswith("kernel") else found
    other = [layer(recorded, f"{first.rpartition('/')[0]}/{name}", kind) for name in second]
    return torch.cat([found, *other], 1)


def theirs(recorded: dict, agent: nn.Module, table: dict[str, list[str]]) -> dict[str, Tensor]:
    """Under our names."""
    found = {}
    for prefix, places in table.items():
        names = [name for name in agent.state_dict() if name.startswith(f"{prefix}.")]
        layers = sorted({int(name.split(".")[-2]) for name in names})
        assert len(layers) == len(places)
        for number, place in zip(layers, places):
            for kind in ("weight", "bias"):
                found[f"{prefix}.{number}.{kind}"] = layer(recorded, place, kind)
    return found


def follow(agent: nn.Module, states: dict[str, Tensor], update) -> None:
    """The agent goes through UPDATES updates as the authors' parameters did, of which every one moves."""
    moved = {name: (x[1:] - x[:-1]).abs().amax(tuple(range(1, x.dim()))).min() for name, x in states.items()}
    assert min(moved.values()) > 1e4 * EXACT, moved
    agent.load_state_dict({name: x[0] for name, x in states.items()}, strict=False)
    for i in range(authors.UPDATES):
        update(i)
        gaps = {name: (agent.state_dict()[name] - x[i + 1]).abs().max() for name, x in states.items()}
        assert max(gaps.values()) < EXACT, f"after update {i + 1}: {gaps}"


def test_iql(recorded):
    """Value, actor and critics, one after the other. Some weights are clipped, and one standard deviation is."""
    recorded = {name.removeprefix("iql/"): x for name, x in recorded.items()}
    args = iql.Args(gamma=authors.GAMMA, tau=authors.TAU, expectile=authors.EXPECTILE, hidden_size=authors.H,
                    temperature=authors.TEMPERATURE, dropout=0.0)  # fmt: skip
    agent = iql.Agent(authors.D, authors.A, args)
    optimizers = iql.Optimizers(*(torch.optim.Adam(part.parameters(), authors.RATE)
                                  for part in (agent.actor, agent.critics, agent.value)))  # fmt: skip
    clipped, log_stds = [], recorded["actor/log_stds"]

    def update(i: int) -> None:
        batch = iql.Transitions(*(recorded[name][i] for name in iql.Transitions._fields))
        clipped.append(iql.update(agent, optimizers, batch, args)["clipped"].item())
        assert (agent.actor.log_std - log_stds[i + 1]).abs().max() < EXACT

    agent.actor.log_std.data.copy_(log_stds[0])
    follow(agent, theirs(recorded, agent, IQL), update)
    assert 0 < max(clipped) < 1 and log_stds[-1, 0] != log_stds[0, 0] and log_stds[-1, 1] == log_stds[0, 1] < -5


def test_bc(recorded):
    """IQL's actor at temperature 0. One standard deviation is below its bound."""
    recorded = {name.removeprefix("bc/"): x for name, x in recorded.items()}
    agent = bc.Agent(authors.D, authors.A, bc.Args(hidden_size=authors.H))
    optimizer, log_stds = torch.optim.Adam(agent.actor.parameters(), authors.RATE), recorded["actor/log_stds"]

    def update(i: int) -> None:
        bc.update(agent, optimizer, bc.Transitions(*(recorded[name][i] for name in bc.Transitions._fields)))
        assert (agent.actor.log_std - log_stds[i + 1]).abs().max() < EXACT

    agent.actor.log_std.data.copy_(log_stds[0])
    follow(agent, theirs(recorded, agent, {"actor.net": IQL["actor.net"]}), update)
    assert log_stds[-1, 0] != log_stds[0, 0] and log_stds[-1, 1] == log_stds[0, 1] < -5


def test_rlpd(recorded, monkeypatch):
    """Critics with LayerNorm and a random subset of targets, then actor, temperature and targets."""
    recorded = {name.removeprefix("rlpd/"): x for name, x in recorded.items()}
    args = rlpd.Args(gamma=authors.GAMMA, tau=authors.TAU, num_critics=authors.CRITICS, subset_size=authors.SUBSET,
                     hidden_size=authors.H, target_entropy=-authors.A / 2, policy_frequency=1)  # fmt: skip
    agent = rlpd.Agent(authors.D, authors.A, authors.H, authors.ALPHA, count=authors.CRITICS, layer_norm=True)
    for module in agent.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-6
    adam, factor = torch.optim.Adam, authors.CRITICS / 2
    optimizers = rlpd.Optimizers(adam(agent.actor.parameters(), authors.RATE),
                                 adam(agent.critics.parameters(), authors.RATE, eps=1e-8 * factor),
                                 adam([agent.log_alpha], authors.RATE))  # fmt: skip
    temperatures = recorded["temp/log_temp"]

    def update(i: int) -> None:
        monkeypatch.setattr(torch, "randn", lambda *_, **__: recorded["noise"][i])
        monkeypatch.setattr(torch, "randperm", lambda *_, **__: recorded["subset"][i])
        batch = rlpd.Transitions(*(recorded[name][i] for name in rlpd.Transitions._fields))
        rlpd.update(agent, optimizers, batch, torch.Generator(), args, i + 1)
        assert (agent.log_alpha - temperatures[i + 1]).abs() < EXACT

    agent.log_alpha.data.copy_(temperatures[0])
    follow(agent, theirs(recorded, agent, RLPD), update)
    assert temperatures.unique().numel() == authors.UPDATES + 1
