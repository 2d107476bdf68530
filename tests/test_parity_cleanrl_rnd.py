"""Updates of RND compute what CleanRL's ppo_rnd_envpool.py does, from the same weights, rollouts and random numbers:
all parameters after each, and the novelty and its discounted sums before.

Against recorded numbers (peers/make_cleanrl_rnd_fixtures.py). CleanRL differs in what follows. Each difference is
put into ours here, or into its inputs there, and then the numbers are the same. CleanRL

- takes half the sum over features for the novelty that it hands out, and the mean for the one that it learns;
- sums it over environments; in the fixture its own class sums over time;
- teaches the predictor the observation before the step; in the fixture that is the one after it;
- clips the change of the value of rewards alone, where we clip both with --clip-vloss;
- takes a cut-off for a termination; there is none in the fixture.
"""

from dataclasses import replace

import gymnasium as gym
import pytest
import torch
from parity import EXACT, below, recorded

from algos import rnd
from benchmarks.peers import make_cleanrl_rnd_fixtures as cleanrl
from benchmarks.peers.make_cleanrl_rnd_fixtures import CASES, FEATURES, SETTINGS, A, D, H, N

INPUTS, RESULTS = recorded(cleanrl)

pytestmark = pytest.mark.usefixtures("float64")


def clips_rewards_alone(agent, obs, actions, next_obs, old_logps, advantages, returns, old_values, chosen, args):
    """Our loss, with the clip of CleanRL's."""
    rows = obs, actions, next_obs, old_logps, advantages, returns, old_values, chosen
    loss, metrics = rnd.ppo_loss(agent, *rows, replace(args, clip_vloss=False))
    if args.clip_vloss:
        values, old, target = (x[:, 0] for x in (agent.value(obs), old_values, returns))
        near = old + (values - old).clamp(-args.clip_coef, args.clip_coef)
        errors = (values - target) ** 2
        loss = loss + args.vf_coef * 0.5 * (torch.max(errors, (near - target) ** 2) - errors).mean()
    return loss, metrics


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=EXACT)


@pytest.mark.parametrize("case", CASES)
def test_updates(case, monkeypatch):
    theirs = below(f"{case}/", RESULTS)
    monkeypatch.setattr(rnd, "FEATURES", FEATURES)
    orders, uniform = iter(INPUTS["orders"]), iter(INPUTS["uniform"])
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: next(orders))
    monkeypatch.setattr(torch, "rand", lambda *_, **__: next(uniform))
    settings = dict(clip_vloss=CASES[case]["clip_vloss"], normalize_advantages=CASES[case]["norm_adv"])
    args, agent = rnd.Args(**SETTINGS, **settings), rnd.Agent(D, gym.spaces.Discrete(A), H)
    agent.load_state_dict(below("weights/", INPUTS))
    optimizer = torch.optim.Adam(agent.parameters(), cleanrl.RATE, eps=1e-5, fused=True)
    statistics, sums = rnd.Statistics(D, N, args.int_gamma, True), []
    monkeypatch.setattr(statistics.returns, "update", sums.append)
    for i in range(cleanrl.UPDATES):
        columns = {name: INPUTS[name][i] for name in ("rewards", "next_obs", "terminated", "bonus")}
        with torch.no_grad():
            novelty = agent.novelty(columns["next_obs"]) * FEATURES / 2
        close(novelty, theirs["novelty"][i])
        statistics.bonus(novelty.numpy())
        close(torch.from_numpy(sums[i]), theirs["sums"][i].flatten())
        batch = rnd.Batch(INPUTS["obs"][i, :-1], INPUTS["actions"][i, ..., None], **columns,
                          truncated=torch.zeros_like(columns["terminated"]), last_obs=INPUTS["obs"][i, -1])  # fmt: skip
        before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
        rnd.update(agent, optimizer, batch, torch.Generator(), args, clips_rewards_alone)
        for name, tensor in agent.state_dict().items():
            close(tensor, theirs[name][i])
            moved = (tensor - before[name]).abs().max() > 1e4 * EXACT
            assert moved != name.startswith("target"), name
