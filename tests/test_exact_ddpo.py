"""ddpo.py and flow_grpo.py: the density of a chain by a change of variables, updates in closed form, the flow of
Gaussian data, and what train() hands on. Nothing here uses the functions under test to derive what is expected."""

import copy

import numpy as np
import pytest
import torch
from control import close, float64
from tiny_runs import train

from algos import ddpo, flow_grpo

SIGMA, MEAN = 0.3, torch.tensor([0.6, -0.4])
A = 0.7  # noise level of flow_grpo.py


@pytest.fixture(params=[ddpo, flow_grpo], ids=["ddpo", "flow_grpo"])
def module(request):
    return request.param


def factors(module, num_steps: int):
    """Of x, of the velocity and of the noise in each step."""
    if module is ddpo:
        return np.ones(num_steps), np.full(num_steps, 1 / num_steps), np.full(num_steps, SIGMA)
    k = np.arange(1, num_steps)
    of_x, of_v, of_noise = 1 - A**2 / (2 * k), (1 + A**2 / 2) / num_steps + 0 * k, A * np.sqrt(1 / k - 1 / num_steps)
    return np.append(1 - A**2 / 2, of_x), np.append(1 / num_steps, of_v), np.append(A, of_noise)


def logps(module, model, batch, args):
    if module is ddpo:
        return ddpo.step_logps(model, batch, args)
    return flow_grpo.logps_of(flow_grpo.chain_steps(model, batch, args), batch)


def references(module, reference) -> list:
    """What `update` of flow_grpo.py takes besides."""
    return [reference] if module is flow_grpo else []


class Table(torch.nn.Module):
    """A velocity that depends on the prompt and on the step alone: one parameter for each."""

    def __init__(self, num_steps: int):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(8, num_steps, 2, generator=torch.Generator().manual_seed(0)))

    def forward(self, x, t, prompts):
        return self.table[prompts, (t * self.table.shape[1]).round().long()]


@float64()
@pytest.mark.parametrize("num_steps", [1, 4])
def test_the_density_of_a_chain_by_a_change_of_variables(module, num_steps):
    """A chain is a function of its noise: its log-density is that of the noise less the log of the Jacobian's
    determinant. All chains of a batch at once, each with its own prompt and times."""
    torch.manual_seed(0)
    model, args, prompts = module.Velocity(8), module.Args(num_steps=num_steps), torch.tensor([0, 3, 7])
    normals = torch.randn(3, num_steps + 1, 2)
    batch = module.Batch(module.sample(model, prompts, normals, args), prompts, prompts)
    found, std = logps(module, model, batch, args), torch.tensor(factors(module, num_steps)[2])
    draw = lambda noise: module.sample.__wrapped__(model, prompts, torch.cat([normals[:, :1], noise], 1), args)[:, 1:]  # noqa: E731
    jacobian = torch.autograd.functional.jacobian(draw, normals[:, 1:]).view(6 * num_steps, 6 * num_steps)
    of_noise = -(normals[:, 1:].square() + np.log(2 * np.pi)).sum(2) / 2
    close(found.sum(), of_noise.sum() - torch.linalg.slogdet(jacobian).logabsdet)
    close(found, of_noise - 2 * std.log())


def exact_velocity(x, t, prompts):
    """Of the flow from N(0, 1) to N(MEAN, 1/4): E[data - noise | x_t]."""
    t = t[:, None]
    return MEAN + (t / 4 - (1 - t)) / ((1 - t) ** 2 + t**2 / 4) * (x - t * MEAN)


def test_the_flow_of_gaussian_data_in_closed_form():
    """Without noise in its steps. A grid that ends at t = 1 would give 0.526, and the right mean."""
    std = lambda times: np.prod([1 + (t / 4 - 1 + t) / ((1 - t) ** 2 + t * t / 4) / 4 for t in times])  # noqa: E731
    normals = torch.eye(5)[[0, 0]][:, :, None] * torch.tensor([1.0, 0.0])[:, None, None]
    last = ddpo.sample(exact_velocity, torch.zeros(2), normals.expand(2, 5, 2), ddpo.Args())[:, -1]
    close(last, MEAN + std([0, 0.25, 0.5, 0.75]) * torch.tensor([[1.0], [0.0]]), 1e-5)
    assert [round(std(times), 3) for times in ([0, 0.25, 0.5, 0.75], np.linspace(0, 1, 4))] == [0.341, 0.526]


def test_pretraining_finds_the_flow_of_its_data(module, monkeypatch):
    """Of Gaussian data, whatever the prompt."""
    monkeypatch.setattr(module, "draw_data", lambda count, g: MEAN + 0.5 * torch.randn(count, 2, generator=g))
    torch.manual_seed(0)
    model, generator, t = module.Velocity(32), torch.Generator().manual_seed(0), torch.rand(800)
    module.pretrain(model, generator, module.Args(pretrain_steps=1500))
    x = t[:, None] * MEAN + torch.randn(800, 2) * ((1 - t) ** 2 + t**2 / 4).sqrt()[:, None]
    assert (model(x, t, torch.arange(800) % 8) - exact_velocity(x, t, 0)).square().mean().sqrt() < 0.15


def test_the_ring_and_the_ceiling_of_its_reward(module):
    """Eight points a turn, data around all of them. Along a line through a mode a blurred sample's expected reward is
    the root of the ceiling."""
    angles, prompts = np.exp(2j * np.pi * np.arange(8) / 8), torch.full((40,), 3)
    data, ring = module.draw_data(4000, torch.Generator().manual_seed(0)), module.ring(torch.arange(8))
    close(ring, np.stack([angles.real, angles.imag], 1), 1e-6)
    assert (torch.cdist(data, ring).argmin(1).bincount(minlength=8) / 4000 - 1 / 8).abs().max() < 0.02
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    rewards = module.closeness(module.ring(prompts) + SIGMA * torch.tensor(np.stack([nodes, 0 * nodes], 1)), prompts)
    assert weights @ rewards.numpy() / np.sqrt(2 * np.pi) == pytest.approx((1 + 4 * SIGMA**2) ** -0.5, abs=1e-6)


@float64()
def test_a_constant_of_a_prompt_changes_nothing(module):
    """Exactly for loo, to rounding for prompt. With the batch's statistics it does."""
    rewards, constants = torch.tensor([[0.5, 1.0, 0.25], [2.0, 0.0, 0.5]]), torch.tensor([[8.0], [-4.0]])
    for kind, least, most in ("loo", 0, 0), ("prompt", 0, 1e-6), ("batch", 0.01, 9):
        changes = (module.advantages(rewards + constants, kind) - module.advantages(rewards, kind)).abs()
        assert least <= changes.min() and changes.max() <= most


@float64()
@pytest.mark.parametrize("kind", ["prompt", "loo", "batch"])
@pytest.mark.parametrize("num_steps", [1, 3])  # 1: PPO of a bandit with Gaussian actions
def test_updates_in_closed_form(module, num_steps, kind):
    """Three steps of plain gradient descent on a table, of which the later ones clip, against NumPy."""
    args = module.Args(num_steps=num_steps, num_prompts=5, num_generations=3, update_epochs=3, advantage=kind)
    of_x, of_v, std = (factor[:, None] for factor in factors(module, num_steps))
    model, reference, rate = Table(num_steps), Table(num_steps), 0.04 * (num_steps * std.min() / SIGMA) ** 2
    torch.nn.init.normal_(reference.table, generator=torch.Generator().manual_seed(2))
    args.beta = 0.3 if module is flow_grpo else 0.0
    batch = module.collect(model, lambda x, c: x.sum(1) + c, torch.Generator().manual_seed(1), args)
    table, chains, c, rewards = (x.detach().numpy().copy() for x in (model.table, *batch))
    optimizer, rewards = torch.optim.SGD(model.parameters(), rate), rewards.reshape(5, 3)
    found = module.update(model, optimizer, batch, args, *references(module, reference))
    centred = rewards - rewards.mean(1, keepdims=True)
    a = {"prompt": centred / (rewards.std(1, keepdims=True) + 1e-6), "loo": centred * 3 / 2,
         "batch": (rewards - rewards.mean()) / (rewards.std() + 1e-8)}[kind].reshape(15, 1)  # fmt: skip
    z = lambda table: (chains[:, 1:] - of_x * chains[:, :-1] - of_v * table[c]) / std  # noqa: E731  the noise
    away = lambda table: of_v / std * (table - reference.table.detach().numpy())[c]  # noqa: E731
    old, norms = z(table), []
    for _ in range(3):
        ratio = np.exp((old**2 - z(table) ** 2).sum(2) / 2)
        clipped, gradient = np.where(a > 0, ratio > 1.2, ratio < 0.8), np.zeros_like(table)
        of_noise = (args.beta * away(table) - (~clipped * ratio * a)[:, :, None] * z(table)) / 15
        np.add.at(gradient, c, of_noise * of_v / std)
        kl = (away(table) ** 2).sum((1, 2)).mean() / 2
        table = table - rate * gradient
        norms.append(np.sqrt((gradient**2).sum()))
    close(model.table, table)
    expected = [(ratio - 1 - np.log(ratio)).mean(), (abs(ratio - 1) > 0.2).mean(), np.mean(norms)]
    close([found[name] for name in ("approx_kl", "clip_fraction", "grad_norm")], expected, 1e-6)
    assert clipped.any() and expected[1] < 1 and found.get("kl", kl) == pytest.approx(kl)


def test_a_reward_must_be_a_finite_number_for_each_sample(module):
    for wrong in (lambda x, c: c[:3], lambda x, c: x, lambda x, c: c / 0, lambda x, c: None, lambda x, c: [[1], 2]):
        with pytest.raises(module.UserError, match="128 samples"):
            module.collect(module.Velocity(8), wrong, torch.Generator(), module.Args())


def test_the_first_ratio_is_one(module):
    """Bit for bit, in float32: none lies outside a clip of 0."""
    model, args = module.Velocity(16), module.Args(update_epochs=1, clip_coef=0.0)
    batch = module.collect(model, module.closeness, torch.Generator(), args)
    more = references(module, copy.deepcopy(model))
    found = module.update(model, torch.optim.Adam(model.parameters()), batch, args, *more)
    assert found["approx_kl"] == found["clip_fraction"] == 0


def test_what_is_sampled_is_trained(module, tmp_path, monkeypatch):
    """Each update has groups of one prompt, fresh chains, and rewards of their last points plus a constant for each
    prompt, which the row of metrics does not show. The reward function may write into what it is given."""
    updates, drawn, update, sample, constants = [], [], module.update, module.sample, {}
    monkeypatch.setattr(module, "update", lambda *given: updates.append(given[2]) or update(*given))
    monkeypatch.setattr(module, "sample", lambda *given: drawn.append(given[1:3]) or sample(*given))
    monkeypatch.setattr(module, "closeness", lambda x, c: 1 - x.square().sum(1) + 0 * (x.zero_()[:, 0] + c.zero_()))
    settings = dict(reward_offset=5.0, num_prompts=20, num_generations=4, max_steps=4, pretrain_steps=8)
    for row, batch, (prompts, normals) in zip(train(module.NAME, settings, tmp_path)[0], updates, drawn, strict=True):
        assert torch.equal(batch.prompts, prompts) and torch.equal(batch.chains[:, 0], normals[:, 0])
        assert (prompts.view(20, 4) == prompts[::4, None]).all() and len(prompts.unique()) > 3
        radii = batch.chains[:, -1].square().sum(1).sqrt()
        for prompt, constant in zip(prompts.tolist(), (batch.rewards - 1 + radii**2).tolist()):
            assert constant == pytest.approx(constants.setdefault(prompt, constant), abs=1e-4)
        wanted = [(1 - radii**2).mean(), (radii**2).view(20, 4).std(1, correction=0).mean(), radii.mean()]
        close([row[name] for name in ("reward", "reward_std", "radius")], wanted, 1e-5)
    assert 2 < np.std([*constants.values()]) < 9 and len({tuple(prompts.tolist()) for prompts, _ in drawn}) == 4
    assert len(torch.cat([normals for _, normals in drawn]).unique()) > 3000
