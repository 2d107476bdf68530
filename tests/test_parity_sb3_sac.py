"""One SAC update computes what Stable-Baselines3's SAC computes, from the same weights, minibatches and random numbers.

Against recorded numbers (peers/make_sb3_sac_fixtures.py) always, against the installed SB3 where there is one. The
differences that remain:
    - SB3 adds 1e-6 inside log(1 - a^2). Without it the updates are equal to 1e-9, with it to 1e-5.
    - SB3 minimises -log(alpha) (log pi + H), we equation 18: our gradient of log alpha is alpha times its. Adam's first
      step is the same, later ones are not.
    - SB3 moves alpha first and draws the actor's noise before the target's. Both losses use the alpha from before the
      step and the actor's is of the new critics, as here, so neither changes a number.
"""

import math

import numpy as np
import pytest
import torch
from parity import EXACT, below, follow, given_noise, recorded, states, updates

from algos import sac
from benchmarks.peers import make_sb3_sac_fixtures as sb3

STEP = 1e-5  # of SB3's epsilon, beside steps of RATE = 1e-2


pytestmark = pytest.mark.usefixtures("float64")


def compare(inputs: dict, theirs: dict) -> None:
    """As many updates as there are before a difference grows. The noise is given through the losses."""
    for number, case in enumerate(sb3.CASES):
        agent, learned = sac.Agent(sb3.D, sb3.A, sb3.H, sb3.ALPHA), case["learned"]
        adam = [torch.optim.Adam(part, sb3.RATE, fused=True)
                for part in (agent.actor.parameters(), agent.critics.parameters(), [agent.log_alpha])]  # fmt: skip

        args = sac.Args(gamma=sb3.GAMMA, tau=sb3.TAU, target_entropy=-float(sb3.A))
        optimizers = sac.Optimizers(*adam[:2], adam[2] if learned else None)
        update, start = updates(sac, inputs, agent, optimizers, args, given_noise(sac, inputs)), f"update/{number}/"
        slopes = theirs.get(f"{start}log_alpha_gradient")
        rest = {name: x for name, x in theirs.items() if not name.endswith("gradient")}
        expected = states(inputs, rest, start)
        expected.setdefault("log_alpha", inputs["weights/log_alpha"].expand(sb3.UPDATES + 1))
        comparable = 1 if learned or case["epsilon"] else sb3.UPDATES
        follow(agent, {name: x[: comparable + 1] for name, x in expected.items()}, update,
               () if learned else ("log_alpha",), STEP if case["epsilon"] else EXACT)  # fmt: skip
        if learned and not case["epsilon"]:
            assert math.isclose(agent.log_alpha.grad / slopes[0], sb3.ALPHA, rel_tol=EXACT)
            for i in range(1, sb3.UPDATES):
                update(i)
            assert (agent.log_alpha - expected["log_alpha"][-1]).abs() > 100 * EXACT  # the difference is real

    log_std, actions, logps = density(sb3.widened(inputs), 0.1)
    assert actions.abs().max() < 1 - 1e-6  # beyond that SB3's form without epsilon has lost its digits
    for outside in (log_std[..., 0] > 2, log_std[..., 1] < -20):  # so the bounds are compared
        assert outside.any() and not outside.all()
    assert (actions - theirs["density/actions"]).abs().max() < EXACT
    assert (logps - theirs["density/logps"]).abs().max() < 1e-6


@torch.no_grad()
def density(inputs: dict, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The network's log std before its bounds, our actions and their log-densities for `scale` times the noise."""
    agent = sac.Agent(sb3.D, sb3.A, sb3.H, sb3.ALPHA)
    agent.load_state_dict(below("weights/", inputs))
    return agent.actor.net(inputs["obs"])[..., sb3.A :], *agent.actor(inputs["obs"], scale * inputs["noise"])


def test_recorded():
    """Critics, actor, targets and alpha after each update, and the density, against SB3's recorded numbers."""
    compare(*recorded(sb3))


def test_live(needs_sb3):
    """The same against the installed SB3, on inputs other than the recorded ones."""
    compare(inputs := sb3.make_inputs(seed=1), sb3.results(inputs))


def test_epsilon_of_sb3(needs_sb3):
    """SB3's log-density with its own 1e-6 is ours minus log(1 + 1e-6 cosh(u)^2) per action: nothing at moderate u, and
    in the tails its correction stays below log 1e6, which ours passes at |u| = 7.6."""
    inputs = sb3.make_inputs()
    _, actions, logps = density(inputs, 4.0)
    difference = torch.log1p(1e-6 * actions.atanh().cosh() ** 2).sum(-1, keepdim=True)
    assert difference.min() < 1e-5 and difference.max() > 0.01
    theirs = sb3.run_density(inputs, 4.0, sb3.make_model().actor.action_dist.epsilon)
    assert (logps - difference - theirs["logps"]).abs().max() < 1e-6


def test_actions_reach_the_environment_as_in_sb3(needs_sb3):
    """[-1, 1] is stretched to the environment's bounds in the same way."""
    actions = np.random.default_rng(0).uniform(-1, 1, (32, sb3.A))
    model = sb3.make_model()
    stretched = sac.to_env(actions, model.action_space)
    np.testing.assert_allclose(stretched, model.policy.unscale_action(actions), rtol=1e-6)
    np.testing.assert_allclose(model.policy.scale_action(stretched), actions, atol=1e-6)
