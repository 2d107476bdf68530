"""crossq.py against numbers computed another way: BatchRenorm by NumPy, whole updates by the
second implementation of sac.py. What its train() shares with sac.py is tested in test_exact_sac.py."""

import numpy as np
import pytest
import torch
from control import assert_compiled_is_equal, assert_update_is, close, float64, minibatch, randomise
from reference.sac import Sac
from test_exact_sac import ENTROPY, GAMMA, RATE, A, B, D, H

from algos import crossq

EPSILON, MOMENTUM = 1e-3, 0.01


def make_args(**flags) -> crossq.Args:
    settings = dict(gamma=GAMMA, target_entropy=ENTROPY, hidden_size=H, critic_size=H, alpha=0.3, policy_frequency=2)
    return crossq.Args(**settings | flags)


def make_agent(args: crossq.Args) -> crossq.Agent:
    return randomise(crossq.Agent(D, A, args), 4, 0.4, 0.1)


def buffers(module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.named_buffers()}


# --- the step


class CrossQ(Sac):
    """What trains has the statistics of its rows, which then move; the target shares the critics' pass."""

    training = ""

    def __init__(self, state, args, *others):
        super().__init__(state, args, *others)
        self.layers, self.rows, self.clipped = (0, 1, 3, 4, 6, 7) if args.batch_norm else (0, 2, 4), {}, set()

    def norm(self, name, x):
        if name.partition(".")[0] != self.training:
            return (x - self.p[f"{name}.mean"]) / np.sqrt(self.p[f"{name}.variance"] + EPSILON)
        mean, variance = x.sum(0) / len(x), (x**2).sum(0) / len(x) - (x.sum(0) / len(x)) ** 2
        self.rows |= {f"{name}.mean": mean.real, f"{name}.variance": variance.real}
        std, r, d = np.sqrt(self.p[f"{name}.variance"] + EPSILON), 1, 0
        if self.p[f"{name}.passes"] >= self.args.renorm_warmup:  # r and d are constants
            r, d = np.sqrt(variance.real + EPSILON) / std, (mean.real - self.p[f"{name}.mean"]) / std
            self.clipped |= {*np.sign(r[(r > 3) | (r < 1 / 3)] - 1), *2 * np.sign(d[abs(d) > 5])}
            r, d = np.minimum(np.maximum(r, 1 / 3), 3), np.minimum(np.maximum(d, -5), 5)
        return (x - mean) / np.sqrt(variance + EPSILON) * r + d

    def q(self, part, obs, actions):
        if self.training != "critics":
            return super().q(part, obs, actions)
        both = super().q(part, np.vstack([obs, self.next[0]]), np.vstack([actions, self.next[1]]))
        self.next_q = [x[len(obs) :] for x in both]
        return [x[: len(obs)] for x in both]

    def target(self, batch, noise):
        actions, logps = self.policy(batch.next_obs, noise)
        self.training, self.next = "critics", (batch.next_obs, actions)
        self.q("critics", batch.obs, batch.actions)
        return self.backup(batch, self.lowest("targets", self.next_q), logps)

    def step(self, part, loss):
        self.training = part
        slopes = super().step(part, loss)
        for name, x in self.rows.items():
            self.p[name] = (1 - MOMENTUM) * self.p[name] + MOMENTUM * x
            if name.endswith("mean"):
                self.p[name.replace("mean", "passes")] += 1
        self.training, self.rows = "", {}
        return slopes

    def moves(self, number):
        return number % self.args.policy_frequency == 0


@float64()
@pytest.mark.parametrize("batch_norm, warmup", [(False, 0), (True, 100), (True, 2), (True, 0)])
def test_update_is_that_of_the_reference(batch_norm, warmup):
    """Parameters, statistics and metrics. The critics' statistics are those of both kinds of rows, and the actor's pass
    leaves them; the actor's are those of its own pass, and the target leaves them. The target has no gradient, but the
    statistics that it shares with Q do. Behind the warm-up r is clipped at 3 and 1/3, d at 5 and -5."""
    agent = make_agent(args := make_args(batch_norm=batch_norm, renorm_warmup=warmup))
    extreme = batch_norm and warmup < 4
    for name, x in agent.named_buffers():  # some means are far off, some deviations too small or too large
        kind = {"mean": [0.0, 9.0, -9.0], "variance": [1.0, 0.01, 30.0, 1.0]}.get(name.rpartition(".")[2])
        x.copy_(torch.tensor(kind).repeat(9)[: len(x)] if kind and extreme else x)
    _, own = assert_update_is(CrossQ, crossq, agent, args, RATE, atol=1e-8)  # Adam magnifies small slopes
    assert extreme or {("targets", 0), ("targets", 1)} <= own.smallest and (batch_norm or len(own.smallest) == 4)
    assert own.clipped == ({-2, -1, 1, 2} if extreme else set())
    assert not any(module.training for module in agent.modules())
    passes = {x.item() for name, x in buffers(agent).items() if name.endswith("passes")}
    assert passes == ({2, 4} if batch_norm else set())


def test_an_action_does_not_depend_on_the_other_environments():
    """The policy acts by running statistics: a row alone gets the action that it gets among others."""
    agent, space = make_agent(make_args()), crossq.gym.spaces.Box(-1, 1, (A,))
    obs = np.random.default_rng(0).normal(size=(6, D))
    together = crossq.act(agent.actor, space, obs, 0.0, torch.Generator())
    alone = [crossq.act(agent.actor, space, row[None], 0.0, torch.Generator())[0] for row in obs]
    close(together, alone, 1e-6)


def test_the_compiled_losses_are_one_graph_with_equal_gradients():
    """In the modes in which `update` calls them, statistics too."""
    noise = torch.randn(B, A, generator=torch.Generator().manual_seed(1))
    batch = minibatch(crossq.Transitions)
    for part, loss, inputs in [("critics", crossq.critic_loss, (batch, noise, GAMMA)),
                               ("actor", crossq.actor_loss, (batch.obs, noise))]:  # fmt: skip

        def make(part=part):
            getattr(agent := make_agent(make_args()), part).train()
            return agent

        assert_compiled_is_equal(make, loss, inputs, "eager", 1e-6)
