"""TD3's three ideas, each through `update`, and TD3 without them. What it shares with DDPG is in test_exact_ddpg.py."""

import math

import numpy as np
import pytest
import torch
from control import WALK, assert_update_is, float64, randomise
from helpers import metrics, new_run, weights
from reference.sac import Ddpg, Sac
from scipy import stats
from test_exact_ddpg import GAMMA, RATE, TAU, A, D, H

from algos import ddpg, td3


def make(num_critics: int = 2) -> tuple[td3.Agent, td3.Optimizers]:
    agent = randomise(td3.Agent(D, A, H, num_critics), 7, 0.8, 0.1)
    return agent, td3.Optimizers(
        *(torch.optim.Adam(m.parameters(), RATE, fused=True) for m in (agent.actor, agent.critics))
    )


class Td3(Ddpg):
    critics, targets, always_lags = "critics", "target_critics", False

    def __init__(self, state, args, *others):
        super().__init__(state, args, *others)
        self.names = [f"q{i + 1}" for i in range(args.num_critics)]

    def q(self, part, obs, actions):
        return Sac.q(self, part, obs, actions)

    def target(self, batch, noise):
        blurred = self.policy(batch.next_obs, "target_actor") + noise
        inside = np.where(np.abs(blurred) < 1, blurred, np.sign(blurred))
        return self.backup(batch, self.lowest("targets", self.q(self.targets, batch.next_obs, inside)), 0)

    def moves(self, number):
        return number % self.args.policy_frequency == 0


@float64()
@pytest.mark.parametrize("num_critics, policy_noise, frequency", [(2, 0.8, 2), (1, 0.8, 1), (2, 0.0, 1), (3, 0.8, 3)])
def test_update_is_that_of_the_reference(num_critics, policy_noise, frequency):
    """The target is the smallest critic's at the blurred, clipped action; the actor follows Q_1 alone; actor and
    targets move in every `frequency`th update and stand still between."""
    args = td3.Args(gamma=GAMMA, tau=TAU, num_critics=num_critics, policy_noise=policy_noise, noise_clip=0.5,
                    policy_frequency=frequency)  # fmt: skip
    given, own = assert_update_is(Td3, td3, make(num_critics)[0], args, RATE, updates=6)
    noises = [drawn["noise"] for drawn in given if drawn]
    assert len(noises) == 6 and {number for _, number in own.smallest} == set(range(num_critics))
    if policy_noise == 0:
        assert noises == [0.0] * 6 and torch.equal(
            own.generator.get_state(), torch.Generator().manual_seed(0).get_state()
        )
        return
    drawn = np.stack(noises).flatten()
    inside = drawn[abs(drawn) < 0.5]
    assert len(np.unique(inside)) == len(inside) > 50 and (abs(drawn) <= 0.5).all()
    assert stats.kstest(inside, stats.truncnorm(-0.5 / 0.8, 0.5 / 0.8, 0, 0.8).cdf).pvalue > 0.01
    share = 2 * stats.norm.cdf(-0.5 / 0.8)
    assert abs(np.mean(abs(drawn) == 0.5) - share) < 4 * math.sqrt(share * (1 - share) / len(drawn))


def test_without_its_ideas_td3_is_ddpg_bit_for_bit(tmp_path):
    """All rows of metrics and all weights of a run; with any one of the ideas they are others."""
    settings = ("--device cpu --num-envs 2 --total-timesteps 120 --learning-starts 40 --batch-size 16 --hidden-size 8 "
                "--log-every 20 --eval-every 40 --eval-episodes 2").split() + WALK  # fmt: skip
    folder = new_run(ddpg, tmp_path / "ddpg", *settings)

    def rows(run):
        return [{name: x for name, x in row.items() if not name.startswith("time/")} for row in metrics(run)]

    off = {"--num-critics": 1, "--policy-frequency": 1, "--policy-noise": 0}
    for idea, value in {"none": None, "--num-critics": 2, "--policy-frequency": 2, "--policy-noise": 0.2}.items():
        flags = off if value is None else off | {idea: value}
        run = new_run(td3, tmp_path / idea, *settings, *(word for flag in flags.items() for word in flag))
        assert (rows(run) == rows(folder)) == (value is None)
        if value is None:
            ours = {name.replace("critics.q1", "critic.net"): x for name, x in weights(run).items()}
            theirs = weights(folder)
            assert ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())
