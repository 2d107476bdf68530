"""One SAC update computes what Stable-Baselines3's SAC computes, from the same weights, minibatches and random numbers.

Against recorded numbers (peers/make_sb3_sac_fixtures.py) always, against the installed SB3 where there is one. The
differences that remain:
    - SB3 adds 1e-6 inside log(1 - a^2). Without it the updates are equal to 1e-9, with it to 1e-5.
    - SB3 minimises -log(alpha) (log pi + H), we equation 18: our gradient of log alpha is alpha times its. Adam's first
      step is the same, later ones are not.
    - SB3 moves alpha first and draws the actor's noise before the target's. Both losses use the alpha from before the
      step and the actor's is of the new critics, as here, so neither changes a number.
"""

import json
import math

import numpy as np
import pytest
import torch
from helpers import recorded

from algos import sac
from benchmarks.peers import make_sb3_sac_fixtures as sb3

EXACT = 1e-9  # float64, three steps of Adam; SB3's log(1 - tanh(u)^2) loses digits that our form keeps
STEP = 1e-5  # of SB3's epsilon, beside steps of RATE = 1e-2


pytestmark = pytest.mark.usefixtures("float64")


def make_agent(inputs: dict) -> sac.Agent:
    agent = sac.Agent(sb3.D, sb3.A, sb3.H, 1.0)
    agent.load_state_dict({k.removeprefix("weights/"): t for k, t in inputs.items() if k.startswith("weights/")})
    return agent


def ours(inputs: dict, learned: bool) -> dict[str, torch.Tensor]:
    """The parameters after each of our updates, and log alpha's gradients. The noise is given through the losses."""
    agent, states = make_agent(inputs), []
    adam = [torch.optim.Adam(part, sb3.RATE, fused=True)
            for part in (agent.actor.parameters(), agent.critics.parameters(), [agent.log_alpha])]  # fmt: skip
    args = sac.Args(gamma=sb3.GAMMA, tau=sb3.TAU, target_entropy=-float(sb3.A))
    for i in range(sb3.UPDATES):
        batch = sac.Transitions(*(inputs[name][i] for name in sac.Transitions._fields))
        noise, next_noise = inputs["noise"][i], inputs["next_noise"][i]
        losses = (lambda agent, batch, _, gamma, noise=next_noise: sac.critic_loss(agent, batch, noise, gamma),
                  lambda agent, obs, _, noise=noise: sac.actor_loss(agent, obs, noise))  # fmt: skip
        optimizers = sac.Optimizers(*adam[:2], adam[2] if learned else None)
        sac.update(agent, optimizers, batch, torch.Generator(), args, *losses)
        state = {name: t.detach().clone() for name, t in agent.state_dict().items()}
        states.append(state | ({"log_alpha_gradient": agent.log_alpha.grad.clone()} if learned else {}))
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def gaps(mine: dict, theirs: dict, case: int, update: int) -> dict[str, float]:
    """Largest difference of each parameter after one update."""
    theirs = {
        name.removeprefix(f"update/{case}/"): t for name, t in theirs.items() if name.startswith(f"update/{case}/")
    }
    theirs.pop("log_alpha_gradient", None)
    assert len(theirs) >= 30
    return {name: (mine[name][update] - t[update]).abs().max().item() for name, t in theirs.items()}


def compare(inputs: dict, theirs: dict) -> None:
    """All of them against SB3's results."""
    for i, case in enumerate(sb3.CASES):
        mine = ours(inputs, case["learned"])
        tolerance = STEP if case["epsilon"] else EXACT
        comparable = 1 if case["learned"] or case["epsilon"] else sb3.UPDATES  # steps before a difference grows
        for update in range(comparable):
            for name, gap in gaps(mine, theirs, i, update).items():
                assert gap < tolerance, f"{name} differs by {gap:.1e} after update {update + 1}, {case}"
        if case["learned"] and not case["epsilon"]:
            ratio = mine["log_alpha_gradient"][0] / theirs[f"update/{i}/log_alpha_gradient"][0]
            assert math.isclose(ratio, sb3.ALPHA, rel_tol=EXACT)
            assert gaps(mine, theirs, i, 2)["log_alpha"] > 100 * EXACT  # the difference is real

    log_std, actions, logps = density(sb3.widened(inputs), 0.1)
    assert actions.abs().max() < 1 - 1e-6  # beyond that SB3's form without epsilon has lost its digits
    for outside in (log_std[..., 0] > 2, log_std[..., 1] < -20):  # so the bounds are compared
        assert outside.any() and not outside.all()
    assert (actions - theirs["density/actions"]).abs().max() < EXACT
    assert (logps - theirs["density/logps"]).abs().max() < 1e-6


@torch.no_grad()
def density(inputs: dict, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The network's log std before its bounds, our actions and their log-densities for `scale` times the noise."""
    actor = make_agent(inputs).actor
    return actor.net(inputs["obs"])[..., sb3.A :], *actor(inputs["obs"], scale * inputs["noise"])


def test_recorded():
    """Critics, actor, targets and alpha after each update, and the density, against SB3's recorded numbers."""
    inputs, theirs, about = recorded(sb3.PATH)
    assert json.loads(about["cases"]) == sb3.CASES and about["stable_baselines3"].startswith("2.9.")
    compare(inputs, theirs)


def test_recorded_updates_move():
    """Every recorded parameter moved by far more than the tolerance: an update that does nothing cannot pass."""
    inputs, theirs, _ = recorded(sb3.PATH)
    for name in make_agent(inputs).state_dict():
        case = 2 if name == "log_alpha" else 0
        moved = (theirs[f"update/{case}/{name}"][0] - inputs[f"weights/{name}"]).abs().max()
        assert moved > 100 * STEP, f"{name} moved by {moved:.1e}"


def test_live(needs_sb3):
    """The same against the installed SB3, on inputs other than the recorded ones."""
    inputs = sb3.make_inputs(seed=1)
    compare(inputs, sb3.results(inputs))


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
