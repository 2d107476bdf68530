"""Losses, gradients and returns-to-go of cal_ql.py are those of CORL's Cal-QL, commit eeeeef2, from the same weights,
rows and noise. Recorded by benchmarks/peers/make_cal_ql_fixtures.py."""

import math

import torch
from control import close, float64
from safetensors.torch import load_file

from algos import cal_ql
from benchmarks.peers import make_cal_ql_fixtures as corl
from benchmarks.peers.make_cql_fixtures import PATH, SETTINGS, A, D, K


@float64()
def test_loss_and_gradients():
    """But for the logarithm of the number of samples, which CORL leaves in for each of two critics. Without the maximum
    CORL's are those of cql.py, and so are ours: test_exact_cal_ql.py."""
    recorded, x = load_file(corl.PATH), load_file(PATH)
    agent = cal_ql.Agent(D, A, args := cal_ql.Args(**SETTINGS))
    agent.load_state_dict({name: x[name] for name in agent.state_dict()})
    x["returns"] = torch.from_numpy(corl.make_returns())
    batch = cal_ql.Transitions(*(x[name] for name in cal_ql.Transitions._fields))
    loss = cal_ql.critic_loss(agent, batch, *(x[name] for name in ("next_noise", "uniform", "policy_noise")), args)[0]
    loss.backward()
    close(loss + 2 * args.cql_weight * math.log(3 * K), recorded["loss"])
    for name, parameter in agent.critics.named_parameters():
        close(parameter.grad, recorded[name])


def test_returns_to_go_by_hand():
    """Trajectories of one row, two and three, of which time cut the second one off: what follows counts as nothing."""
    assert list(cal_ql.returns_to_go(corl.SMALL, 0.5)) == list(load_file(corl.PATH)["returns"]) == [5, 2, 2, 4, 2, 4]
