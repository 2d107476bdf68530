"""redq.py: whole updates, of rlpd.py too, by the second implementation of sac.py with an ensemble; the draw of subsets;
DroQ's networks by hand. What its train() shares with sac.py is tested in test_exact_sac.py."""

import itertools

import numpy as np
import pytest
import torch
from control import assert_update_is, close, float64, minibatch, named, randomise
from reference.sac import Sac
from scipy import stats
from test_exact_sac import ENTROPY, GAMMA, RATE, TAU, A, B, D, H
from tiny_runs import result, same
from torch import nn

from algos import redq, rlpd
from tests.specs import SPECS


class Redq(Sac):
    """An ensemble; with LayerNorm between Linear and ReLU."""

    def __init__(self, state, args, *others):
        super().__init__(state, args, *others)
        self.names = [f"q{i + 1}" for i in range(args.num_critics)]

    def network(self, name, x, layers=()):
        self.layers = (0, 1, 3, 4, 6) if self.args.layer_norm and not name.startswith("actor") else (0, 2, 4)
        return super().network(name, x, layers)

    def norm(self, name, x):
        centred = x - x.mean(1)[:, None]
        return centred / np.sqrt((centred**2).mean(1)[:, None] + 1e-5)

    def target(self, batch, noise, subset=None):
        actions, logps = self.policy(batch.next_obs, noise)
        q = np.stack(self.q("targets", batch.next_obs, actions))
        return self.backup(batch, self.lowest("targets", q if subset is None else q[subset]), logps)

    def climbed(self, q):
        return sum(q) / len(q) if self.args.actor_q == "mean" else super().climbed(q)

    def moves(self, number):
        return number % self.args.policy_frequency == 0


ENSEMBLE = dict(num_critics=4, subset_size=2, actor_q="mean", policy_frequency=2)
TWINS = dict(num_critics=2, subset_size=None, actor_q="min", policy_frequency=1)


@float64()
@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize("flags", [ENSEMBLE, TWINS], ids=["ensemble", "twins"])
@pytest.mark.parametrize("module", [redq, rlpd], ids=["redq", "rlpd"])
def test_update_is_that_of_the_reference(module, flags, layer_norm):
    """The minimum of two drawn critics of four; the actor maximises the mean of all, every second update. Critics and
    targets move in each, actor and temperature in those alone whose number is even."""
    agent = module.Agent(D, A, H, 0.3, count=flags["num_critics"], layer_norm=layer_norm)
    args = module.Args(gamma=GAMMA, tau=TAU, target_entropy=ENTROPY, layer_norm=layer_norm, **flags)
    given, _ = assert_update_is(Redq, module, randomise(agent, 111, 0.6, 0.3), args, RATE)
    assert len(given) == 4 + 4 // flags["policy_frequency"]
    drawn = [x["subset"] for x in given if "subset" in x]
    assert [x if x is None else len(set(x)) for x in drawn] == 4 * [flags["subset_size"]]


def test_subsets_are_drawn_uniformly_and_anew():
    """Each of the ten pairs of five critics equally often, never one critic twice, independent of the draw before."""
    agent, batch, pairs = redq.Agent(D, A, 4, 0.3, count=5), minibatch(redq.Transitions, rows=4), []

    def critics(agent, batch, noise, gamma, subset):
        pairs.append(tuple(sorted(subset.tolist())))
        return redq.critic_loss(agent, batch, noise, gamma, subset)

    args = redq.Args(num_critics=5, subset_size=2, policy_frequency=10**9, target_entropy=ENTROPY)
    optimizers = redq.Optimizers(*(torch.optim.Adam(part.parameters()) for part in (agent.actor, agent.critics)), None)
    generator, unused = torch.Generator().manual_seed(0), torch.get_rng_state()
    for _ in range(500):
        redq.update(agent, optimizers, batch, generator, args, 1, critics)
    every = list(itertools.combinations(range(5), 2))
    assert set(pairs) == set(every)
    assert stats.chisquare([pairs.count(pair) for pair in every]).pvalue > 1e-3
    table = [[sum(a == x and b == y for a, b in zip(pairs, pairs[1:])) for y in every] for x in every]
    assert stats.chi2_contingency(table).pvalue > 1e-3
    assert torch.equal(torch.get_rng_state(), unused)


def test_with_two_critics_a_run_is_that_of_sac():
    """--num-critics 2 --subset-size 2 draws nothing: weights and metrics are equal, bit for bit."""
    flags, off = SPECS["sac"].flags, dict(num_critics=2, subset_size=2, actor_q="min", utd_ratio=1)
    expected = result("sac", flags)
    for idea in ({}, {"num_critics": 3}, {"actor_q": "mean"}, {"utd_ratio": 2}):
        assert same(result("redq", flags | off | idea), expected) == (not idea)


@float64()
def test_droq_drops_out_before_layer_norm():
    """Linear, dropout, LayerNorm, ReLU: half of the units are left out of what LayerNorm sees, in online and target
    critics alike, at random each time. The output layer and the actor have neither."""
    agent = randomise(redq.Agent(D, A, H, 0.3, count=2, layer_norm=True, dropout=0.5), 111, 0.6, 0.5)
    p, batch = named(agent), minibatch(redq.Transitions)
    assert not any(isinstance(module, nn.Dropout | nn.LayerNorm) for module in agent.actor.modules())
    for part in ("critics", "targets"):
        torch.manual_seed(3)
        found = getattr(agent, part)(batch.obs, batch.actions)
        torch.manual_seed(3)
        masks = [nn.functional.dropout(torch.ones(B, H), 0.5) for _ in range(4)]
        assert sorted(masks[0].unique().tolist()) == [0, 2]
        for i, name in enumerate((f"{part}.q1", f"{part}.q2")):
            x = torch.hstack([batch.obs, batch.actions])
            for layer, mask in ((0, masks[2 * i]), (4, masks[2 * i + 1])):  # 0 to 3: Linear, dropout, LayerNorm, ReLU
                x = (x @ p[f"{name}.{layer}.weight"].T + p[f"{name}.{layer}.bias"]) * mask
                x = (x - x.mean(1)[:, None]) / torch.sqrt(x.var(1, correction=0)[:, None] + 1e-5)
                x = x * p[f"{name}.{layer + 2}.weight"] + p[f"{name}.{layer + 2}.bias"]
                x = x * (x > 0)
            close(found[i], x @ p[f"{name}.8.weight"].T + p[f"{name}.8.bias"])
        assert not torch.equal(getattr(agent, part)(batch.obs, batch.actions), found)
