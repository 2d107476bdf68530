"""PPO on images: what is taken for one, what the network computes of it, a whole update, and that it learns."""

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from control import close
from helpers import SMALL, assert_same_result, metrics, new_run, weights

from algos import ppo
from utils.envs import make_env

PIXELS = ["--env-id", "environments:Pixels-v0", "--hidden-size", 8]
SHAPES = pytest.mark.parametrize("shape", [(3, 8, 10), (4, 84, 84), (2, 36, 40), (5, 35, 90), (1, 1, 3)], ids=str)


def encoded(agent: ppo.Agent, obs: torch.Tensor) -> torch.Tensor:
    """Images (B, C, H, W) through the agent's weights, in plain functions."""
    large, p = min(obs.shape[-2:]) >= 36, dict(agent.encoder.named_parameters())
    steps, padding = ({0: 4, 2: 2, 4: 1}, 0) if large else ({0: 1, 2: 2}, 1)
    x = obs / 255.0
    for layer, stride in steps.items():
        x = F.conv2d(x, p[f"{layer}.weight"], p[f"{layer}.bias"], stride, padding).relu()
    last = 2 * len(steps) + 1
    return (x.flatten(1) @ p[f"{last}.weight"].T + p[f"{last}.bias"]).relu()


def make_agent(shape, actions=4, hidden_size=16) -> ppo.Agent:
    torch.manual_seed(0)
    return ppo.Agent(shape, gym.spaces.Discrete(actions), hidden_size)


def images(*shape) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("layout", ["last", "first"])
def test_channels_come_first(layout):
    ours = make_env("environments:Pixels-v0", (f"layout={layout}",), images=True)
    plain = gym.make("Pixels-v0")
    assert ours.observation_space == gym.spaces.Box(0, 255, (3, 8, 10), np.uint8)
    expected = np.moveaxis(plain.reset(seed=3)[0], -1, 0)
    assert np.array_equal(ours.reset(seed=3)[0], expected) and expected[0].any() and not expected[1].any()
    for action in (0, 1):
        assert np.array_equal(ours.step(action)[0], np.moveaxis(plain.step(action)[0], -1, 0))


@pytest.mark.parametrize("name, shape", [("image", (3, 4, 4)), ("matrix", (6,)), ("dict", (5,)), ("box", (3,))])
def test_only_bytes_with_three_dimensions_are_images(name, shape):
    assert make_env("environments:Bandit-v0", (f"observation={name}",), images=True).observation_space.shape == shape
    assert len(make_env("environments:Bandit-v0", (f"observation={name}",)).observation_space.shape) == 1


def test_both_layouts_give_the_same_run(tmp_path):
    first, last = (new_run(ppo, tmp_path, *SMALL["ppo"], *PIXELS, "--env-kwargs", f"layout={layout}")
                   for layout in ("first", "last"))  # fmt: skip
    assert_same_result(first, last)
    assert not [name for name in weights(first) if name.startswith("obs_")]  # bytes have no statistics


@SHAPES
def test_policy_and_value_share_the_encoder(shape):
    """Log-probability, entropy, value and action against a second forward pass; with any leading dimensions."""
    agent, obs = make_agent(shape), images(2, 3, *shape)
    x = encoded(agent, obs.flatten(0, 1))
    policy = torch.distributions.Categorical(logits=x @ agent.actor.weight.T + agent.actor.bias)
    actions = policy.sample()
    logps, entropy, values = agent(obs, actions.view(2, 3, 1))
    assert logps.shape == entropy.shape == values.shape == (2, 3)
    close(logps.flatten(), policy.log_prob(actions).detach(), 1e-5)
    close(entropy.flatten(), policy.entropy().detach(), 1e-5)
    close(values.flatten(), (x @ agent.critic.weight.T + agent.critic.bias)[:, 0].detach(), 1e-5)
    close(agent.value(obs), values.detach(), 1e-6)
    assert torch.equal(agent.act(obs[0], torch.zeros(3, 4))[:, 0], policy.logits.view(2, 3, 4)[0].argmax(-1))


@SHAPES
def test_first_weights(shape):
    """Orthogonal: sqrt 2 in the encoder, 0.01 for the policy, 1 for the value. The first policy is nearly uniform."""
    agent = make_agent(shape)
    hidden = [(layer, 2**0.5) for layer in agent.encoder if hasattr(layer, "weight")]
    for layer, gain in [*hidden, (agent.actor, 0.01), (agent.critic, 1.0)]:
        weight = layer.weight.detach().flatten(1)
        close(torch.linalg.svdvals(weight), [gain] * min(weight.shape), 1e-4)
        assert not layer.bias.any()
    assert agent(images(8, *shape), torch.zeros(8, 1))[1].min() > np.log(4) - 1e-3


def test_one_update_by_hand():
    """Plain gradient descent on a loss written out again: ratios, clip, values, entropy. Policy and value both move the
    encoder."""
    agent, args = make_agent((3, 8, 10)), ppo.Args(num_minibatches=1, update_epochs=2, ent_coef=0.1, max_grad_norm=1e9)
    torch.nn.init.normal_(agent.actor.weight, 0, 0.5)
    before = {name: p.detach().clone().requires_grad_() for name, p in agent.named_parameters()}
    obs, next_obs = images(4, 3, 3, 8, 10), images(4, 3, 3, 8, 10).flip(0)
    generator = torch.Generator().manual_seed(2)
    actions, rewards = torch.randint(0, 4, (4, 3, 1), generator=generator), torch.randn(4, 3, generator=generator)
    terminated = torch.rand(4, 3, generator=generator) < 0.3
    batch = ppo.Batch(obs, actions, rewards, next_obs, terminated, torch.zeros(4, 3, dtype=torch.bool))

    def forward(x):
        features = encoded(agent, x.flatten(0, 1))  # the agent's own weights
        logits = features @ agent.actor.weight.T + agent.actor.bias
        return torch.distributions.Categorical(logits=logits), (features @ agent.critic.weight.T + agent.critic.bias)[
            :, 0
        ]

    with torch.no_grad():
        policy, values = forward(obs)
        old, next_values = policy.log_prob(actions.flatten()), forward(next_obs)[1].view(4, 3)
        advantages = ppo.gae(rewards, values.view(4, 3), next_values, terminated, terminated, 0.99, 0.95).flatten()
        returns, scaled = advantages + values, (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    for _ in range(2):
        policy, now = forward(obs)
        ratio = (policy.log_prob(actions.flatten()) - old).exp()
        gain = torch.minimum(ratio * scaled, ratio.clamp(0.8, 1.2) * scaled)
        loss = -(gain + 0.1 * policy.entropy()).mean() + 0.25 * ((now - returns) ** 2).mean()
        gradients = torch.autograd.grad(loss, list(agent.parameters()))
        with torch.no_grad():
            for p, g in zip(agent.parameters(), gradients):
                p -= 0.05 * g
    expected = {name: p.detach().clone() for name, p in agent.named_parameters()}
    agent.load_state_dict(before)
    ppo.update(agent, torch.optim.SGD(agent.parameters(), 0.05), batch, torch.Generator(), args)
    for name, p in agent.named_parameters():
        close(p, expected[name], 1e-5)
        assert (p - before[name]).abs().max() > 1e-4, f"{name} did not move"


def test_the_value_trains_the_encoder():
    agent = make_agent((3, 8, 10))
    logps, _, values = agent(images(5, 3, 8, 10), torch.zeros(5, 1))
    for number in (logps.sum(), values.sum()):
        (gradient,) = torch.autograd.grad(number, agent.encoder[0].weight, retain_graph=True)
        assert gradient.abs().sum() > 0


def test_it_learns(tmp_path):
    """Which column is red: 7 of 7, where chance gives 1.75."""
    args = "--device cpu --num-envs 8 --num-steps 32 --num-minibatches 4 --update-epochs 4 --total-timesteps 4096 "
    args += "--eval-every 0 --eval-episodes 20 --learning-rate 2e-3 --env-id environments:Pixels-v0 --hidden-size 32"
    assert metrics(new_run(ppo, tmp_path, *args.split()))[-1]["eval/return"] > 6.5
