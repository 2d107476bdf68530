"""awac.py: weights and values in closed form, its limits (cloning, the best action), what update() and train() hand on.
Whole updates are those of CORL's code: test_parity_updates.py."""

import math

import numpy as np
import pytest
import torch
from control import assert_in_order, assert_probed, close, float64, minibatch, randomise
from scipy import special
from test_exact_iql import ONLINE, recorded, trained  # noqa: F401  # a fixture

from algos import awac, bc

D, A, H, B = 3, 2, 8, 16


def peers_weights(advantages: np.ndarray, temperature: float) -> dict[str, np.ndarray]:
    """exp: CORL's awac.py, eeeeef2; with 20 for 100 it is min(exp(A / beta), 20) of acme's crr/losses.py, 770bc75, and
    of d3rlpy's crr_impl.py, 38c34b6. binary: heaviside(A, 0) and A > 0 there. softmax: the softmax over the batch of
    rlkit's awac_trainer.py, ac45a9d, times the rows by which its loss multiplies; so too in d3rlpy's awac_impl.py."""
    return {"exp": np.minimum(np.exp(advantages / temperature), 100), "binary": np.heaviside(advantages, 0.0),
            "softmax": special.softmax(advantages / temperature, axis=0) * len(advantages)}  # fmt: skip


@float64()
@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_weights_are_those_of_the_public_codes(temperature):
    """Clipped or not. An advantage of 0 has the binary weight 0; weights of a softmax have the mean 1."""
    advantages = torch.arange(-20, 21)[:, None] / 10
    weights = {kind: awac.policy_weights(advantages, kind, temperature) for kind in ("exp", "binary", "softmax")}
    for kind, expected in peers_weights(advantages.numpy(), temperature).items():
        close(weights[kind], expected)
    assert advantages[20] == weights["binary"][20] == 0 and weights["binary"].sum() == 20
    close(weights["softmax"].mean(), 1.0)


@float64()
def test_limits_of_lambda():
    """Of 0 a softmax takes the best action alone, as a gradient, too; exp takes those better than the policy."""
    actor, batch = randomise(awac.Actor(D, A, H), 3, 0.5, 0.2), minibatch(awac.Transitions)
    advantages = torch.randn(B, 1, generator=torch.Generator().manual_seed(0))
    close(awac.policy_weights(advantages, "exp", 1e-9), 100.0 * (advantages > 0))
    loss, _ = awac.actor_loss(actor, batch, awac.policy_weights(advantages, "softmax", 1e-9))
    best = advantages.argmax().item()
    expected = -actor.log_prob(batch.obs[[best]], batch.actions[[best]]).sum()
    for ours, own in zip(*(torch.autograd.grad(x, [*actor.parameters()]) for x in (loss, expected))):
        close(ours, own)


@float64()
def test_the_value_is_the_policy_s():
    """The smaller critic is s_0 - |a - s|^2 in the other coordinates: its mean over the policy is known."""
    actor, obs = randomise(awac.Actor(D, A, H), 3, 0.1, 0.2), minibatch(awac.Transitions).obs[:4]
    actor.log_std.data.fill_(-2.5)

    def critics(obs, actions):
        smaller = obs[:, :1] - (actions - obs[:, 1:]).square().sum(1, keepdim=True)
        return smaller + (obs[:, :1] > 0), smaller + (obs[:, :1] <= 0)

    mean = actor(obs)[0].detach()
    expected = obs[:, :1] - (mean - obs[:, 1:]).square().sum(1, keepdim=True) - A * math.exp(-5)
    assert mean.abs().max() < 0.6  # four deviations from the bounds
    close(awac.policy_value(critics, actor, obs, 200000, torch.Generator().manual_seed(2)), expected, 0.005)


def updated(args: awac.Args, steps: int) -> tuple[awac.Agent, dict, torch.Generator]:
    agent, generator = randomise(awac.Agent(D, A, awac.Args(hidden_size=H)), 50, 0.5, 0.2), torch.Generator()
    adam = [torch.optim.Adam(x.parameters(), 1e-2, fused=True) for x in (agent.actor, agent.critics)]
    for step in range(steps):
        batch = minibatch(awac.Transitions, step)
        numbers = awac.update(agent, awac.Optimizers(*adam), batch, generator.manual_seed(4), args)
    return agent, numbers if steps else {}, generator


@pytest.mark.parametrize("kind", ["exp", "softmax"])
def test_an_infinite_lambda_is_behaviour_cloning(kind):
    """The actor after three updates, bit for bit where no softmax rounds."""
    args, cloner = awac.Args(weights=kind, temperature=math.inf), bc.Agent(D, A, bc.Args(hidden_size=H))
    for own, other in zip(cloner.actor.parameters(), updated(args, 0)[0].actor.parameters()):
        own.data.copy_(other)
    optimizer = torch.optim.Adam(cloner.actor.parameters(), 1e-2, fused=True)
    for step in range(3):
        bc.update(cloner, optimizer, bc.Transitions(*minibatch(awac.Transitions, step)))
    for own, other in zip(cloner.actor.parameters(), updated(args, 3)[0].actor.parameters()):
        close(other, own, 0 if kind == "exp" else 1e-6)


@float64()
@pytest.mark.parametrize("kind", ["exp", "binary", "softmax"])
def test_the_weights_of_an_update(kind):
    """Of the critics that have moved and of the actor that has not, with K actions. Noise is the generator's alone."""
    args, batch = awac.Args(weights=kind, temperature=0.3, num_action_samples=3), minibatch(awac.Transitions)
    (agent, numbers, generator), (old, *_), same = updated(args, 1), updated(args, 0), torch.Generator().manual_seed(4)
    torch.randn(B, A, generator=same)  # of the target
    q = torch.min(*agent.critics(batch.obs, batch.actions)).detach()
    values = awac.policy_value(agent.critics, old.actor, batch.obs, 3, same)
    expected = peers_weights((q - values).numpy(), 0.3)[kind]
    found = [numbers[name].item() for name in ("q", "v", "weight", "largest", "clipped")]
    close(found, [q.mean(), values.mean(), expected.mean(), expected.max(), (expected == 100).mean()], 1e-6)
    assert torch.equal(generator.get_state(), same.get_state()) and all(
        x.grad is None for x in agent.targets.parameters()
    )


def test_act_samples_the_policy():
    """Scale 0: the mean; scale 1: mean + std x noise, clipped to [-1, 1]. The std is at least exp(-5)."""
    actor, generator = awac.Actor(D, A, H), torch.Generator().manual_seed(0)
    actor.log_std.data.copy_(torch.tensor([-9.0, 1.0]))
    obs = np.tile([[0.3, -0.2, 0.5]], (4000, 1))  # float64, as MuJoCo's
    means, actions = (awac.act(actor, None, obs, scale, generator) for scale in (0.0, 1.0))
    close(means, actor(torch.tensor(obs).float())[0], 1e-6)
    close((actions - means)[:, 0].std(), math.exp(-5), 3e-4)
    assert actions.dtype == np.float32 and np.abs(actions).max() == 1 and abs((actions - means)[:, 0].mean()) < 3e-4


@pytest.mark.parametrize("flags", [[], ["--normalize"]])
def test_train_stores_the_dataset_and_then_what_it_lives(recorded, tmp_path, monkeypatch, flags):  # noqa: F811
    """The dataset's rows, then one a step as the environment went; of the same scale as what is acted on."""
    (path, columns), acted, act = recorded, [], awac.act
    monkeypatch.setattr(awac, "act", lambda actor, space, *rest: acted.append(rest) or act(actor, space, *rest))
    run = trained(awac, tmp_path, path, "--online-steps", ONLINE, *flags)
    mean, std = (columns[0].mean(0), columns[0].std(0) + 1e-3) if flags else (np.zeros(4), np.ones(4))
    back = {4: lambda x: x * std + mean, 2: lambda x: [-1, 2] + (x + 1) / 2 * [4, 0.5], 1: lambda x: x}
    for part, column in zip(run.added[0], columns):
        close(back[part.shape[1]](part), column.reshape(part.shape), 1e-4)
    assert len(run.added) == 1 + ONLINE and len(run.calls) == 8 + ONLINE
    online = [np.concatenate(column) for column in zip(*run.added[1:])]
    close(np.concatenate([obs for obs, scale, _ in acted if np.ravel(scale).tolist() == [1.0]]), online[0], 1e-6)
    steps = np.concatenate([back[4](obs)[:, 0] for obs, *_ in acted])
    close(steps, steps.round(), 1e-5)
    assert_probed(back[4](online[0]).round(5), *online[1:4], back[4](online[4]).round(5))
    agent, optimizers, *_ = run.calls[0]
    for optimizer, part in zip(optimizers, (agent.actor, agent.critics), strict=True):
        assert optimizer.param_groups[0]["params"][0] is next(part.parameters())
    assert_in_order(back[4](online[0]).round(5), *online[1:4], back[4](online[4]).round(5))
