"""One CrossQ update computes what sb3-contrib's CrossQ computes, from the same weights, minibatches and random numbers.

Against recorded numbers (peers/make_sb3_crossq_fixtures.py) always, against the installed sb3-contrib where there
is one. The differences that remain:
    - Its batch variance divides by n - 1. After the warm-up it adds its epsilon to variance / r^2, we, as the paper, to
      the variance. Without both the updates are equal to 1e-8; with both they are near, and not equal. A unit that is 0
      in the whole batch, whose d is lost there, does not occur in these inputs.
    - It is warm after one pass more.
    - Those of SAC: test_parity_sb3_sac.py.
"""

import json

import pytest
import torch
from control import float64
from helpers import recorded

from algos import crossq
from benchmarks.peers import make_sb3_crossq_fixtures as sb3

EXACT = 1e-8  # float64, three steps of Adam


def ours(inputs: dict, case: dict, monkeypatch) -> dict[str, torch.Tensor]:
    """All parameters and statistics after each of our updates. The noise is given through the losses."""
    monkeypatch.setattr(crossq, "EPSILON", case["epsilon"])
    args = crossq.Args(hidden_size=sb3.H, critic_size=sb3.H, alpha=sb3.ALPHA, gamma=sb3.GAMMA, policy_frequency=2,
                       renorm_warmup=case["warmup"] + 1)  # fmt: skip
    agent, states = crossq.Agent(sb3.D, sb3.A, args), []
    weights = {name.removeprefix("weights/"): x for name, x in inputs.items() if name.startswith("weights/")}
    agent.load_state_dict(agent.state_dict() | weights)
    parts = agent.actor.parameters(), agent.critics.parameters()
    adam = [torch.optim.Adam(part, sb3.RATE, betas=crossq.BETAS, fused=True) for part in parts]
    for i in range(sb3.UPDATES):
        batch = crossq.Transitions(*(inputs[name][i] for name in crossq.Transitions._fields))
        noise, next_noise = inputs["noise"][i], inputs["next_noise"][i]
        losses = (lambda agent, batch, _, gamma, noise=next_noise: crossq.critic_loss(agent, batch, noise, gamma),
                  lambda agent, obs, _, noise=noise: crossq.actor_loss(agent, obs, noise))  # fmt: skip
        crossq.update(agent, crossq.Optimizers(*adam, None), batch, torch.Generator(), args, i + 1, *losses)
        states.append({name: torch.atleast_1d(x.detach().clone()) for name, x in agent.state_dict().items()})
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def compare(inputs: dict, theirs: dict, monkeypatch) -> None:
    for i, case in enumerate(sb3.CASES):
        mine, start = ours(inputs, case, monkeypatch), f"update/{i}/"
        expected = {name.removeprefix(start): x for name, x in theirs.items() if name.startswith(start)}
        assert mine.keys() - {"log_alpha"} == expected.keys()
        gaps = {name: (mine[name] - x).abs().max().item() for name, x in expected.items()}
        if case["correction"] == 0:
            assert max(gaps.values()) < EXACT, (case, max(gaps, key=gaps.get))
        else:  # the differences are real
            statistics = [gap for name, gap in gaps.items() if name.endswith("variance")]
            assert 1e-4 < max(statistics) < 0.01 and max(gaps.values()) < 4 * sb3.UPDATES * sb3.RATE
        for name, x in inputs.items():  # an update that does nothing cannot pass
            if name.startswith("weights/") and x.dim() == 2:
                assert (expected[name.removeprefix("weights/")][-1] - x).abs().max() > 1e-3


@float64()
def test_recorded(monkeypatch):
    inputs, theirs, about = recorded(sb3.PATH)
    assert json.loads(about["cases"]) == sb3.CASES and about["sb3_contrib"].startswith("2.9.")
    compare(inputs, theirs, monkeypatch)


@float64()
def test_live(monkeypatch):
    why = "sb3-contrib cannot be imported: pip install sb3-contrib==2.9.0"
    contrib = pytest.importorskip("sb3_contrib", reason=f"not run: {why}", exc_type=ImportError)
    if not contrib.__version__.startswith("2.9."):
        pytest.skip(f"not run: sb3-contrib is {contrib.__version__}: the comparison is with 2.9")
    inputs = sb3.make_inputs(seed=2)
    compare(inputs, sb3.results(inputs), monkeypatch)
