"""Losses and gradients of cql.py are those of CORL's CQL, commit eeeeef2, and its diversity that of EDAC there, from
the same weights, rows and noise. Recorded by benchmarks/peers/make_cql_fixtures.py."""

import math

import pytest
from control import close
from safetensors.torch import load_file

from algos import cql
from benchmarks.peers import make_cql_fixtures as corl

pytestmark = pytest.mark.usefixtures("float64")


def loaded(count: int) -> tuple[cql.Agent, dict, cql.Transitions]:
    """An agent with this many critics of those recorded, what is recorded, and the minibatch."""
    recorded = load_file(corl.PATH)
    for name, column in corl.make_inputs().items():
        assert (recorded[name].numpy() == column).all(), "the fixture is of other inputs"
    agent = cql.Agent(corl.D, corl.A, cql.Args(num_critics=count, hidden_size=corl.H))
    agent.load_state_dict({name: recorded[name] for name in agent.state_dict()})
    return agent, recorded, cql.Transitions(*(recorded[name] for name in cql.Transitions._fields))


def assert_recorded(name: str, loss, part, recorded, atol: float = 1e-10) -> None:
    loss.backward()
    close(loss, recorded[f"{name}/loss"], atol)
    found = {key: parameter.grad for key, parameter in part.named_parameters() if parameter.grad is not None}
    assert len(found) >= 6 and {f"{name}/{key}" for key in [*found, "loss"]} == {
        key for key in recorded if key.startswith(f"{name}/")
    }
    for key, slope in found.items():
        close(slope, recorded[f"{name}/{key}"], atol)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("weight", [0.0, 5.0])
def test_the_critics_loss(entropy, weight):
    """But for the logarithm of the number of sampled actions, which CORL leaves in, for each of two critics."""
    agent, recorded, batch = loaded(2)
    args = cql.Args(**corl.SETTINGS | dict(backup_entropy=entropy, cql_weight=weight))
    noise = (recorded[name] for name in ("next_noise", "uniform", "policy_noise"))
    loss, *_ = cql.critic_loss(agent, batch, *noise, args)
    loss = loss + 2 * weight * math.log(3 * corl.K)
    assert_recorded(f"q {entropy} {weight}", loss, agent.critics, recorded)
    assert all(x.grad is None for x in [*agent.actor.parameters(), agent.log_alpha, *agent.targets.parameters()])


def test_the_policy_s_loss():
    agent, recorded, batch = loaded(2)
    assert_recorded("policy", cql.actor_loss(agent, batch.obs, recorded["noise"])[0], agent.actor, recorded)


def test_diversity_is_edac_s():
    """But for the 1e-10 that CORL adds to the length of a slope."""
    agent, recorded, batch = loaded(corl.N)
    assert_recorded("diversity", cql.diversity(agent.critics, batch.obs, batch.actions), agent.critics, recorded, 1e-7)
