"""DQN's updates compute what Stable-Baselines3's compute, from the same weights and minibatches.

Against recorded numbers (peers/make_sb3_dqn_fixtures.py) always, against the installed SB3 where there is one. SB3
clips gradients at norm 10, which none of these reaches, and it has no Double DQN.
"""

import json
from itertools import pairwise

import pytest
import torch
from helpers import recorded

from algos import dqn
from benchmarks.peers import make_sb3_dqn_fixtures as sb3

EXACT = 1e-9  # float64, five steps of Adam

pytestmark = pytest.mark.usefixtures("float64")


def ours(inputs: dict, tau: float, script) -> list[dict[str, torch.Tensor]]:
    """The parameters after each of our updates, whose gradients SB3 would not clip."""
    args = script.Args(gamma=sb3.GAMMA, tau=tau, target_network_frequency=sb3.EVERY, hidden_size=sb3.H)
    agent, states = script.Agent(sb3.D, sb3.A, args), []
    agent.load_state_dict({k.removeprefix("weights/"): t for k, t in inputs.items() if k.startswith("weights/")})
    optimizer = torch.optim.Adam(agent.q.parameters(), sb3.RATE, fused=True)
    for i in range(sb3.UPDATES):
        batch = script.Transitions(*(inputs[name][i] for name in script.Transitions._fields))
        found = script.update(agent, optimizer, batch, i + 1, args)
        assert script.metrics(agent, *found)["grad_norm"] < 10
        states.append({name: t.detach().clone() for name, t in agent.state_dict().items()})
    return states


def compare(inputs: dict, theirs: dict, script=dqn) -> None:
    """All of them against SB3's results."""
    for i, case in enumerate(sb3.CASES):
        for update, state in enumerate(ours(inputs, case["tau"], script)):
            gaps = {name: (t - theirs[f"update/{i}/{name}"][update]).abs().max() for name, t in state.items()}
            assert len(gaps) == 12 and max(gaps.values()) < EXACT, f"after update {update + 1}, {case}: {gaps}"


def test_recorded():
    inputs, theirs, about = recorded(sb3.PATH)
    assert json.loads(about["cases"]) == sb3.CASES and about["stable_baselines3"].startswith("2.9.")
    compare(inputs, theirs)


def test_recorded_updates_move():
    """By far more than the tolerance, the target network at every second one and not at the others: an update that does
    nothing cannot pass."""
    inputs, theirs, _ = recorded(sb3.PATH)
    for name, start in [(name.removeprefix("weights/"), t) for name, t in inputs.items() if "weights/" in name]:
        moved = [(b - a).abs().max() > 1e4 * EXACT for a, b in pairwise([start, *theirs[f"update/0/{name}"]])]
        assert moved == [False, True, False, True, False] if name.startswith("target") else all(moved), name


def test_live(needs_sb3):
    """The same against the installed SB3, on inputs other than the recorded ones."""
    inputs = sb3.make_inputs(seed=1)
    compare(inputs, sb3.results(inputs))
