"""One update of ddpg.py and td3.py computes what Stable-Baselines3's DDPG and TD3 compute, from the same weights,
minibatches and random numbers: every parameter after each of four updates, to 1e-9 in float64.

Against recorded numbers (peers/make_sb3_td3_fixtures.py) always, against the installed SB3 where there is one.
"""

import json

import pytest
import torch
from helpers import recorded

from algos import ddpg, td3
from benchmarks.peers import make_sb3_td3_fixtures as sb3

EXACT = 1e-9


pytestmark = pytest.mark.usefixtures("float64")


def ours(module, inputs: dict, case: dict) -> dict[str, torch.Tensor]:
    """The parameters after each of our updates, by td3.py's names. The noise is given through the loss."""
    single = module is ddpg
    agent = ddpg.Agent(sb3.D, sb3.A, sb3.H) if single else td3.Agent(sb3.D, sb3.A, sb3.H, case["num_critics"])
    names = {name: name.replace("critic.net", "critics.q1") for name in agent.state_dict()}
    agent.load_state_dict({name: inputs[f"weights/{theirs}"] for name, theirs in names.items()})
    critics = agent.critic if single else agent.critics
    optimizers = module.Optimizers(
        *(torch.optim.Adam(m.parameters(), sb3.RATE, fused=True) for m in (agent.actor, critics))
    )
    ideas = {} if single else {name: value for name, value in case.items() if name != "algo"}
    args, states = module.Args(gamma=sb3.GAMMA, tau=sb3.TAU, **ideas), []
    for i in range(sb3.UPDATES):
        batch = module.Transitions(*(inputs[name][i] for name in module.Transitions._fields))

        def with_noise(agent, batch, noise, gamma, given=inputs["noise"][i]):
            given = (case["policy_noise"] * given).clamp(-case["noise_clip"], case["noise_clip"])
            assert isinstance(noise, float) == (case["policy_noise"] == 0)
            return td3.critic_loss(agent, batch, given, gamma)

        if single:
            ddpg.update(agent, optimizers, batch, args)
        else:
            td3.update(agent, optimizers, batch, torch.Generator(), args, i + 1, with_noise)
        states.append({names[name]: tensor.clone() for name, tensor in agent.state_dict().items()})
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def compare(inputs: dict, theirs: dict) -> None:
    for i, case in enumerate(sb3.CASES):
        for module in (ddpg, td3) if case["algo"] == "DDPG" else (td3,):
            mine = ours(module, inputs, case)
            start = f"update/{i}/"
            wanted = {name.removeprefix(start): t for name, t in theirs.items() if name.startswith(start)}
            assert mine.keys() == wanted.keys() and len(mine) == 12 + 12 * case["num_critics"]
            for name, tensor in mine.items():
                gap = (tensor - wanted[name]).abs().max()
                assert gap < EXACT, f"{name} of {module.NAME} differs by {gap:.1e}, {case}"


def test_recorded():
    inputs, theirs, about = recorded(sb3.PATH)
    assert json.loads(about["cases"]) == sb3.CASES and about["stable_baselines3"].startswith("2.9.")
    compare(inputs, theirs)


def test_recorded_updates_move():
    """Each parameter moves by far more than the tolerance where it is to move, and stands still where it is not."""
    inputs, theirs, _ = recorded(sb3.PATH)
    for i, case in enumerate(sb3.CASES):
        for name, after in (
            (n.removeprefix(f"update/{i}/"), t) for n, t in theirs.items() if n.startswith(f"update/{i}")
        ):
            path = torch.cat([inputs[f"weights/{name}"][None], after])
            for update in range(sb3.UPDATES):
                moved = (path[update + 1] - path[update]).abs().max()
                moves = name.startswith("critics") or (update + 1) % case["policy_frequency"] == 0
                assert moved > 1e4 * EXACT if moves else moved == 0, f"{name} moved by {moved:.1e}, {case}"


def test_live(needs_sb3):
    """The same against the installed SB3, on inputs other than the recorded ones."""
    inputs = sb3.make_inputs(seed=1)
    compare(inputs, sb3.results(inputs))
