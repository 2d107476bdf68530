"""ddpo.py: the density of a chain by a change of variables, gradients in closed form, flows of Gaussian data, and what
train() hands on. Nothing here uses the functions under test to derive what is expected."""

import math

import numpy as np
import pytest
import torch
from control import close, float64
from helpers import SMALL, new_run, user_error
from tiny_runs import train

from algos import ddpo
from tests.specs import SPECS

SIGMA = 0.3


class Table(torch.nn.Module):
    """A velocity that depends on the prompt and on the step alone: one parameter for each."""

    def __init__(self, num_steps: int, seed: int = 0):
        super().__init__()
        numbers = torch.randn(ddpo.MODES, num_steps, 2, generator=torch.Generator().manual_seed(seed))
        self.table = torch.nn.Parameter(numbers)

    def forward(self, x, t, prompts):
        return self.table[prompts, (t * self.table.shape[1]).round().long()]


def batch_of(model, args, seed: int = 1) -> ddpo.Batch:
    g = torch.Generator().manual_seed(seed)
    prompts = torch.randint(ddpo.MODES, (args.num_prompts,), generator=g).repeat_interleave(args.num_generations)
    chains = ddpo.sample(model, prompts, torch.randn(len(prompts), args.num_steps + 1, 2, generator=g), args)
    return ddpo.Batch(chains, prompts, torch.randn(len(prompts), generator=g))


@float64()
@pytest.mark.parametrize("num_steps", [1, 3, 4])
def test_the_density_of_a_chain_by_a_change_of_variables(num_steps):
    """A chain is a function of its noise: its log-density is that of the noise less the log of the Jacobian's
    determinant. All chains of a batch at once, each with its own prompt and times."""
    torch.manual_seed(0)
    model, args = ddpo.Velocity(8), ddpo.Args(num_steps=num_steps, noise=SIGMA)
    normals, prompts = torch.randn(5, num_steps + 1, 2), torch.tensor([0, 3, 7, 3, 1])
    chains = ddpo.sample(model, prompts, normals, args)
    close(chains[:, 0], normals[:, 0])
    found = ddpo.step_logps(model, ddpo.Batch(chains, prompts, torch.zeros(5)), args)
    for i in range(5):

        def chain(noise, i=i):
            everything = torch.cat([normals[i, :1], noise])[None]
            return ddpo.sample.__wrapped__(model, prompts[i : i + 1], everything, args)[0, 1:]

        jacobian = torch.autograd.functional.jacobian(chain, normals[i, 1:]).view(2 * num_steps, 2 * num_steps)
        of_noise = -(normals[i, 1:].square() + math.log(2 * math.pi)).sum() / 2
        close(found[i].sum(), of_noise - torch.linalg.slogdet(jacobian).logabsdet)
        of_steps = -(normals[i, 1:].square() / 2 + math.log(SIGMA * math.sqrt(2 * math.pi))).sum(1)
        close(found[i], of_steps)


def exact_velocity(mean, std: float):
    """Of the flow from N(0, 1) to N(mean, std^2): E[data - noise | x_t]."""

    def velocity(x, t, prompts):
        t = t[:, None]
        return mean + (t * std**2 - (1 - t)) / ((1 - t) ** 2 + t**2 * std**2) * (x - t * mean)

    return velocity


def euler_std(times, std: float) -> float:
    """Of the last point, where steps of length 1 / K are taken with the velocities of these times."""
    return np.prod([1 + (t * std**2 - (1 - t)) / ((1 - t) ** 2 + t**2 * std**2) / len(times) for t in times])


@float64()
@pytest.mark.parametrize("num_steps, expected", [(4, 0.341), (400, 0.498)])
def test_the_flow_of_gaussian_data_in_closed_form(num_steps, expected):
    """Without noise in its steps. A grid that ends at t = 1 would give 0.526 in four steps, and the right mean."""
    mean, normals = torch.tensor([1.0, -2.0]), torch.zeros(3, num_steps + 1, 2)
    normals[1:, 0, 0], normals[2, 0, 1] = 1.0, 1.0
    last = ddpo.sample(exact_velocity(mean, 0.5), torch.zeros(3).long(), normals, ddpo.Args(num_steps=num_steps))[:, -1]
    close(last[0], mean)
    close(last[2] - last[0], [euler_std(np.arange(num_steps) / num_steps, 0.5)] * 2)
    assert last[1, 0] - last[0, 0] == pytest.approx(expected, abs=5e-4)
    assert euler_std(np.linspace(0, 1, 4), 0.5) == pytest.approx(0.526, abs=5e-4)


def test_pretraining_finds_the_flow_of_its_data(monkeypatch):
    """Of Gaussian data, whatever the prompt."""
    mean, args = torch.tensor([0.6, -0.4]), ddpo.Args(pretrain_steps=1500, hidden_size=32)
    monkeypatch.setattr(ddpo, "draw_data", lambda count, g: mean + 0.5 * torch.randn(count, 2, generator=g))
    torch.manual_seed(0)
    model, generator = ddpo.Velocity(32), torch.Generator().manual_seed(0)
    ddpo.pretrain(model, generator, args)
    prompts, t = torch.arange(800) % ddpo.MODES, torch.rand(800, generator=generator)
    x = t[:, None] * mean + torch.randn(800, 2, generator=generator) * ((1 - t) ** 2 + t**2 / 4).sqrt()[:, None]
    errors = (model(x, t, prompts) - exact_velocity(mean, 0.5)(x, t, prompts)).square().mean().sqrt()
    assert errors < 0.15
    chains = ddpo.sample(model, prompts, torch.randn(800, 5, 2, generator=generator) * torch.eye(5)[0][:, None], args)
    close(chains[:, -1].std(0), [0.341] * 2, 0.05)


def test_flow_matching_by_hand():
    rng = np.random.default_rng(0)
    start, data, t = rng.normal(size=(6, 2)), rng.normal(size=(6, 2)), rng.random(6)
    prompts = np.arange(6)
    model = lambda x, t, c: x * t[:, None] + c[:, None]  # noqa: E731
    found = ddpo.flow_loss(model, *map(torch.tensor, (start, data, t, prompts)))
    x = start + t[:, None] * (data - start)
    close(found, ((x * t[:, None] + prompts[:, None] - data + start) ** 2).sum(1).mean())


def test_the_ring_and_the_ceiling_of_its_reward():
    """Eight points a turn, data around all of them; a blurred sample's expected reward by quadrature."""
    angles = np.exp(2j * np.pi * np.arange(8) / 8)
    close(ddpo.ring(torch.arange(8)), np.stack([angles.real, angles.imag], 1), 1e-6)
    data = ddpo.draw_data(4000, torch.Generator().manual_seed(0))
    nearest = torch.cdist(data, ddpo.ring(torch.arange(8))).min(1)
    assert (nearest.indices.bincount(minlength=8) / 4000 - 1 / 8).abs().max() < 0.02
    assert nearest.values.square().mean() == pytest.approx(2 * 0.1**2, rel=0.1)
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    grid = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2)
    weights = np.outer(weights, weights).ravel() / (2 * np.pi)
    for prompt in 0, 3:
        samples = ddpo.ring(torch.tensor([prompt])) + SIGMA * torch.tensor(grid)
        rewards = ddpo.closeness(samples, torch.full((len(grid),), prompt))
        assert (weights * rewards.numpy()).sum() == pytest.approx(1 / (1 + 4 * SIGMA**2), abs=1e-6)


@float64()
def test_advantages():
    """In NumPy; a constant added to a prompt's rewards changes nothing but with the batch's statistics."""
    rewards = np.random.default_rng(0).normal(size=(3, 4)) * [[1], [5], [0.1]]
    group = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
    others = [[r - np.mean(np.delete(row, i)) for i, r in enumerate(row)] for row in rewards]
    batch = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    for kind, expected in {"prompt": group, "loo": others, "batch": batch}.items():
        found = ddpo.advantages(torch.tensor(rewards), kind)
        close(found, expected)
        moved = ddpo.advantages(torch.tensor(rewards + [[5], [-8], [0]]), kind)
        assert torch.allclose(moved, found, atol=1e-9) == (kind != "batch")
    halves = torch.tensor([[0.5, 1.0, 0.25], [2.0, 0.0, 0.5]])
    assert torch.equal(ddpo.advantages(halves + torch.tensor([[8.0], [-4.0]]), "loo"), ddpo.advantages(halves, "loo"))
    assert not ddpo.advantages(torch.ones(2, 3), "prompt").any()


@float64()
@pytest.mark.parametrize("kind", ["prompt", "loo", "batch"])
@pytest.mark.parametrize("num_steps", [1, 3])  # 1: PPO of a bandit with Gaussian actions
def test_updates_in_closed_form(num_steps, kind):
    """Three steps of plain gradient descent on a table, of which the later ones clip, against NumPy."""
    args = ddpo.Args(num_steps=num_steps, noise=SIGMA, num_prompts=5, num_generations=3, update_epochs=3,
                     advantage=kind)  # fmt: skip
    model, rate = Table(num_steps), 0.02 * num_steps**2
    batch = batch_of(model, args)
    table, c, chains, rewards = (x.detach().numpy().copy() for x in (model.table, batch.prompts, *batch[::2]))
    found = ddpo.update(model, torch.optim.SGD(model.parameters(), rate), batch, args)
    groups = rewards.reshape(5, 3)
    a = {"prompt": (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-6),
         "loo": (groups - groups.mean(1, keepdims=True)) * 3 / 2,
         "batch": (groups - groups.mean()) / (groups.std() + 1e-8)}[kind].reshape(15, 1)  # fmt: skip

    def z(table):  # the noise that leads from each point to the next
        return (np.diff(chains, axis=1) - table[c] / num_steps) / SIGMA

    old, norms = z(table), []
    for _ in range(3):
        ratio = np.exp((old**2 - z(table) ** 2).sum(2) / 2)
        clipped = ((ratio > 1.2) & (a > 0)) | ((ratio < 0.8) & (a < 0))
        weight = np.where(clipped, 0, ratio * a) / 15
        gradient = np.zeros_like(table)
        np.add.at(gradient, c, -weight[:, :, None] * z(table) / SIGMA / num_steps)
        table = table - rate * gradient
        norms.append(np.sqrt((gradient**2).sum()))
    close(model.table, table)
    outside = abs(ratio - 1) > 0.2
    assert found == pytest.approx({"approx_kl": (ratio - 1 - np.log(ratio)).mean(), "clip_fraction": outside.mean(),
                                   "grad_norm": np.mean(norms)})  # fmt: skip
    assert clipped.any() and not outside.all()


@float64()
def test_the_expected_gradient_is_that_of_the_expected_reward():
    """With the leave-one-out baseline, which adds no bias. From 0 the last point is Gaussian: its reward is known."""
    args = ddpo.Args(num_steps=2, noise=SIGMA, num_generations=2, num_prompts=300_000, update_epochs=1, advantage="loo")
    model, g = Table(2), torch.Generator().manual_seed(3)
    prompts = torch.randint(ddpo.MODES, (args.num_prompts,), generator=g).repeat_interleave(2)
    from_zero = torch.tensor([[0.0], [1.0], [1.0]])
    chains = ddpo.sample(model, prompts, torch.randn(len(prompts), 3, 2, generator=g) * from_zero, args)
    batch = ddpo.Batch(chains, prompts, ddpo.closeness(chains[:, -1], prompts))
    before = model.table.detach().clone().requires_grad_()
    ddpo.update(model, torch.optim.SGD(model.parameters(), 1.0), batch, args)
    wide = 1 + 4 * 2 * SIGMA**2
    expected = (-2 / wide * (before.mean(1) - ddpo.ring(torch.arange(8))).square().sum(1)).exp() / wide
    expected.mean().backward()
    close(model.table.detach() - before.detach(), before.grad, 1e-3)
    assert before.grad.abs().max() > 0.01


def test_the_first_ratio_is_one(monkeypatch):
    """Bit for bit, in float32. Later epochs have the same old density."""
    seen, real = [], ddpo.ddpo_loss
    monkeypatch.setattr(ddpo, "ddpo_loss", lambda *given: seen.append(given[:2]) or real(*given))
    torch.manual_seed(0)
    args, model = ddpo.Args(num_prompts=3, hidden_size=16, update_epochs=3), ddpo.Velocity(16)
    ddpo.update(model, torch.optim.Adam(model.parameters(), 1e-2), batch_of(model, args), args)
    assert torch.equal(*seen[0]) and not torch.equal(*seen[1])
    assert all(torch.equal(old, seen[0][1]) and not old.requires_grad for _, old in seen)


def inside(samples, prompts):
    """A reward of a user, who also writes into what he is given."""
    rewards = (1.0 - samples.square().sum(1)).tolist()
    samples.zero_()
    prompts.zero_()
    return rewards


@pytest.mark.parametrize("reward", ["", "test_exact_ddpo:inside"])
def test_what_is_sampled_is_trained(reward, tmp_path, monkeypatch):
    """Each update has groups of one prompt, fresh chains of the model as it is, and rewards of their last points plus
    a constant for each prompt, which the row of metrics does not show."""
    updates, drawn, real, sample = [], [], ddpo.update, ddpo.sample
    monkeypatch.setattr(ddpo, "update", lambda *given: updates.append(given[2]) or real(*given))
    monkeypatch.setattr(ddpo, "sample", lambda *given: drawn.append((given[1:3], sample(*given))) or drawn[-1][1])
    settings = SPECS["ddpo"].flags | dict(reward=reward, reward_offset=5.0, num_prompts=20, max_steps=4)
    rows, constants = train("ddpo", settings, tmp_path)[0], {}
    for row, batch, ((prompts, normals), chains) in zip(rows, updates, drawn, strict=True):
        assert torch.equal(batch.chains, chains) and torch.equal(batch.prompts, prompts)
        assert torch.equal(chains[:, 0], normals[:, 0])
        groups, last = batch.prompts.view(20, 4), batch.chains[:, -1]
        assert (groups == groups[:, :1]).all() and len(groups[:, 0].unique()) > 3
        rewards = ddpo.closeness(last, batch.prompts) if not reward else 1.0 - last.square().sum(1)
        for prompt, constant in zip(batch.prompts.tolist(), (batch.rewards - rewards).tolist()):
            assert constant == pytest.approx(constants.setdefault(prompt, constant), abs=1e-4)
        wanted = {"reward": rewards.mean(), "reward_std": rewards.view(20, 4).std(1, correction=0).mean(),
                  "radius": last.square().sum(1).sqrt().mean()}  # fmt: skip
        close([row[name] for name in wanted], [*wanted.values()], 1e-5)
    assert len(constants) == 8 and 2 < np.std([*constants.values()]) < 9
    normals = torch.cat([normals.flatten() for (_, normals), _ in drawn])
    assert len(normals.unique()) > 0.99 * len(normals) and normals.std() == pytest.approx(1, abs=0.05)
    assert len({tuple(prompts.tolist()) for (prompts, _), _ in drawn}) == 4


@pytest.mark.parametrize("answer", ["prompts[:3]", "samples", "0 * prompts / 0"])
def test_a_reward_that_is_no_number_a_sample_ends_in_a_sentence(answer, tmp_path, capsys):
    (tmp_path / "rewards.py").write_text(f"def mine(samples, prompts):\n    return {answer}\n")
    with user_error(capsys, "the reward function", "16 samples"):
        new_run(ddpo, tmp_path / "runs", *SMALL["ddpo"], "--reward", tmp_path / "rewards.py:mine")
