"""Losses and gradients of cql.py are those of CORL's CQL, commit eeeeef2, and its diversity that of EDAC there, from
the same weights, rows and noise. Recorded by benchmarks/peers/make_cql_fixtures.py."""

import math

import pytest
from control import close
from safetensors.torch import load_file

from algos import cql
from benchmarks.peers import make_cql_fixtures as corl

pytestmark = pytest.mark.usefixtures("float64")
CASES = {f"q {entropy} {weight}": dict(backup_entropy=entropy, cql_weight=weight, num_critics=2)
         for entropy in (False, True) for weight in (0.0, 5.0)}  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, "policy", "diversity"])
def test_loss_and_gradients(case):
    """But for the logarithm of the number of samples, which CORL leaves in for each of two critics, and for the 1e-10
    that it adds to the length of a slope."""
    recorded, atol = load_file(corl.PATH), 1e-7 if case == "diversity" else 1e-10
    for name, column in corl.make_inputs().items():
        assert (recorded[name].numpy() == column).all(), "the fixture is of other inputs"
    args = cql.Args(**corl.SETTINGS | CASES.get(case, dict(num_critics=corl.N if case == "diversity" else 2)))
    agent, batch = cql.Agent(corl.D, corl.A, args), cql.Transitions(*(recorded[x] for x in cql.Transitions._fields))
    agent.load_state_dict({name: recorded[name] for name in agent.state_dict()})
    if case in CASES:
        noises = (recorded[name] for name in ("next_noise", "uniform", "policy_noise"))
        loss = cql.critic_loss(agent, batch, *noises, args)[0] + 2 * args.cql_weight * math.log(3 * corl.K)
    else:
        loss = (cql.actor_loss(agent, batch.obs, recorded["noise"])[0] if case == "policy"
                else cql.diversity(agent.critics, batch.obs, batch.actions))  # fmt: skip
    loss.backward()
    close(loss, recorded[f"{case}/loss"], atol)
    parameters = (agent.actor if case == "policy" else agent.critics).named_parameters()
    found = {name: x.grad for name, x in parameters if x.grad is not None}
    assert {f"{case}/{name}" for name in [*found, "loss"]} == {name for name in recorded if name.startswith(f"{case}/")}
    assert case == "policy" or all(x.grad is None for x in [*agent.actor.parameters(), agent.log_alpha])
    for name, slope in found.items():
        close(slope, recorded[f"{case}/{name}"], atol)
