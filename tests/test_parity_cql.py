"""Losses and gradients of cql.py and cal_ql.py are those of CORL (commit eeeeef2), the diversity that of its EDAC,
from the same weights, rows and noise. Recorded by benchmarks/peers/make_cql_fixtures.py and make_cal_ql_fixtures.py."""

import math

import pytest
import torch
from control import close
from parity import below, recorded

from algos import cal_ql, cql
from benchmarks.peers import make_cal_ql_fixtures, make_cql_fixtures
from benchmarks.peers.make_cql_fixtures import SETTINGS, A, D, K, N

pytestmark = pytest.mark.usefixtures("float64")
CASES = {f"q {entropy} {weight}": dict(backup_entropy=entropy, cql_weight=weight, num_critics=2)
         for entropy in (False, True) for weight in (0.0, 5.0)}  # fmt: skip


@pytest.mark.parametrize("script, case", [*(("cql", case) for case in [*CASES, "policy", "diversity"]), ("cal_ql", "")])
def test_loss_and_gradients(script, case):
    """But for the logarithm of the number of samples, which CORL leaves in for each of two critics, and for the 1e-10
    that it adds to the length of a slope. Without its maximum Cal-QL is CQL: test_exact_cal_ql.py."""
    (inputs, theirs), atol, module = recorded(make_cql_fixtures), 1e-7 if case == "diversity" else 1e-10, cql
    inputs, weights, theirs = inputs, theirs, below(f"{case}/", theirs)
    args = cql.Args(**SETTINGS | CASES.get(case, dict(num_critics=N if case == "diversity" else 2)))
    if script == "cal_ql":
        inputs["returns"] = torch.from_numpy(make_cal_ql_fixtures.make_returns())
        module, args, (_, theirs) = cal_ql, cal_ql.Args(**SETTINGS), recorded(make_cal_ql_fixtures)
        theirs.pop("returns")
    agent, batch = module.Agent(D, A, args), module.Transitions(*(inputs[x] for x in module.Transitions._fields))
    agent.load_state_dict({name: weights[name] for name in agent.state_dict()})
    if case == "policy":
        loss = cql.actor_loss(agent, batch.obs, inputs["noise"])[0]
    elif case == "diversity":
        loss = cql.diversity(agent.critics, batch.obs, batch.actions)
    else:
        noises = (inputs[name] for name in ("next_noise", "uniform", "policy_noise"))
        loss = module.critic_loss(agent, batch, *noises, args)[0] + 2 * args.cql_weight * math.log(3 * K)
    loss.backward()
    close(loss, theirs["loss"], atol)
    parameters = (agent.actor if case == "policy" else agent.critics).named_parameters()
    found = {name: x.grad for name, x in parameters if x.grad is not None}
    assert {*found, "loss"} == theirs.keys()
    assert case == "policy" or all(x.grad is None for x in [*agent.actor.parameters(), agent.log_alpha])
    for name, slope in found.items():
        close(slope, theirs[name], atol)


@pytest.mark.parametrize("script", ["cal_ql"])
def test_returns_to_go_by_hand(script):
    """Trajectories of one row, two and three, of which time cut the second one off: what follows counts as nothing."""
    returns = recorded(make_cal_ql_fixtures)[1]["returns"]
    assert list(cal_ql.returns_to_go(make_cal_ql_fixtures.SMALL, 0.5)) == list(returns) == [5, 2, 2, 4, 2, 4]
