"""rainbow.py: each part by hand or by a slow second implementation, written from the papers: windows of n steps, a tree
of sums for the priorities, noisy layers with their matrices written out, whole updates. Without parts it is c51.py."""

import itertools
import math

import numpy as np
import pytest
import torch
from control import adam, checkpoint, close, float64, named, randomise, stored_rows
from every_script import stand_in
from helpers import SMALL, metrics, new_run, weights
from scipy import stats
from test_exact_c51 import by_floor_and_ceiling
from test_exact_dqn import SETTINGS, rows

from algos import c51, rainbow

script = stand_in("rainbow", "update", "merge")
GAMMA, RATE, D, A, H, N, B = 0.9, 1e-2, 3, 4, 8, 7, 16
OFF = dict(double=False, dueling=False, noisy=False, n_step=1, prioritized=False)
FLAGS = [f"--no-{part}" for part in ("double", "dueling", "noisy", "prioritized")]


def test_without_its_parts_it_is_c51_bit_for_bit(tmp_path):
    """Two environments, past the point where the buffer is full."""
    more = [*SMALL["c51"], "--buffer-size", 100]
    ours = new_run(rainbow, tmp_path / "a", *more, *FLAGS, "--n-step", 1)
    theirs = new_run(c51, tmp_path / "b", *more)
    assert metrics(ours) == metrics(theirs) and "q" in metrics(ours)[-1]
    for name, tensor in weights(theirs).items():
        assert torch.equal(weights(ours)[name], tensor)


# --- windows of n steps


@float64()
def test_merge_by_hand():
    """Three steps: 1 + 0.5 * 2 + 0.25 * 4 = 3."""
    steps = [[t, 10 + t, t % 2, 2.0**t, t == 2, t + 1, 11 + t] for t in range(3)]
    close(rainbow.merge(np.array(steps), 0.5), [0, 10, 0, 3, 1, 3, 13, 3])
    close(rainbow.merge(np.array(steps[1:2]), 0.5), [1, 11, 1, 2, 0, 2, 12, 1])


@pytest.mark.parametrize("n", [1, 3, 4])
def test_train_stores_every_window_within_its_episode(n, tmp_path, monkeypatch):
    """Of episodes that terminate, are cut off, and both: against a walk through what the environments returned. No
    window crosses an end, and each step of an ended episode starts one, those near the end a shorter one."""
    taken, step_vector = [], rainbow.step_vector

    def recording(envs, actions):
        out = step_vector(envs, actions)
        taken.append((actions + 1, *(x.copy() for x in out[1:5])))
        return out

    monkeypatch.setattr(rainbow, "step_vector", recording)
    folder = new_run(rainbow, tmp_path, *SETTINGS, "--eval-every", 0, "--n-step", n, "--gamma", GAMMA)
    stored = stored_rows(folder)
    expected, kinds = [], set()
    for env in range(2):
        steps, before = [], None
        for actions, obs, rewards, terminated, truncated in taken:
            fresh = before is None or before[1]
            start = np.array([0, obs[env][1], 0, 0]) if fresh else before[0]
            steps.append(
                (start, actions[env], rewards[env], terminated[env], obs[env], terminated[env] | truncated[env])
            )
            before = obs[env], steps[-1][-1]
            kinds.add((bool(terminated[env]), bool(truncated[env])))
        for first in range(len(steps)):
            total = 0.0
            for m, (_, _, reward, end, then, done) in enumerate(steps[first : first + n], 1):
                total += GAMMA ** (m - 1) * reward
                if done or m == n:
                    expected.append([*steps[first][0], steps[first][1], total, end, *then, m])
                    break
    assert kinds == set(itertools.product((False, True), repeat=2))
    order = lambda table: np.array(sorted(np.round(table, 3).tolist()))  # noqa: E731
    close(order(stored.reshape(-1, 12)), order(expected), 2e-3)
    assert {row[-1] for row in expected} == set(range(1, n + 1))


# --- noisy layers


@float64()
def test_a_noisy_layer_is_one_with_these_weights():
    layer, generator = rainbow.NoisyLinear(3, 2), torch.Generator().manual_seed(1)
    close(layer.sigma, np.full((2, 3), 0.5 / math.sqrt(3)))
    close(layer.sigma_bias, np.full(2, 0.5 / math.sqrt(3)))
    assert layer.weight.abs().max() < 1 / math.sqrt(3)
    torch.nn.init.normal_(layer.sigma)
    torch.nn.init.normal_(layer.sigma_bias)
    x = torch.randn(5, 3)
    close(layer(x), x @ layer.weight.T + layer.bias)
    scale = torch.tensor([[1.0], [0.0], [1.0], [2.0], [1.0]])
    for count, scales in ((1, 1.0), (5, scale)):
        layer.draw(count, generator, scales)
        again = torch.Generator().manual_seed(1)
        if count == 5:
            torch.randn(1, 3, generator=again), torch.randn(1, 2, generator=again)
        f_in, f_out = (
            np.array([[math.copysign(math.sqrt(abs(e)), e) for e in row] for row in draws.tolist()])
            for draws in (torch.randn(count, 3, generator=again), torch.randn(count, 2, generator=again))
        )
        for i in range(5):
            e_in, e_out = f_in[i % count], f_out[i % count] * (scale[i].item() if count == 5 else 1)
            w = layer.weight.detach().numpy() + layer.sigma.detach().numpy() * np.outer(e_out, e_in)
            b = layer.bias.detach().numpy() + layer.sigma_bias.detach().numpy() * e_out
            close(layer(x)[i], w @ x[i].numpy() + b)


def test_noise_of_an_action_is_new_for_each_row_and_absent_where_it_is_scaled_away():
    """Of 4,000 equal observations; the greedy action is that of the mean weights."""
    args, g = rainbow.Args(hidden_size=H, num_atoms=N, noisy=True), torch.Generator().manual_seed(0)
    agent, obs = randomise(rainbow.Agent(D, A, args), 3, 0.5, 0.3), np.ones((4000, D))
    best = agent.q(torch.ones(1, D)).argmax().item()
    half = rainbow.act(agent, obs, 0.0, g, torch.tensor([[0.0], [1.0]]).repeat(2000, 1))[:, 0]
    assert (half[::2] == best).all() and 0.05 < (half[1::2] != best).mean() < 0.95
    assert len(set(rainbow.act(agent, obs, 1.0, g, 0.0)[:, 0])) == A
    first, second = (rainbow.act(agent, obs, 0.0, g) for _ in range(2))
    assert (first != second).any()


# --- dueling


# --- priorities


class SumTree:
    """As in Schaul et al., appendix B.2.1: leaves are priorities, each node is the sum of its two children."""

    def __init__(self, leaves: list[float]):
        self.levels = [leaves + [0.0] * (2 ** math.ceil(math.log2(len(leaves))) - len(leaves))]
        while len(self.levels[-1]) > 1:
            self.levels.append([sum(pair) for pair in zip(self.levels[-1][::2], self.levels[-1][1::2])])

    def find(self, mass: float) -> int:
        index = 0
        for level in reversed(self.levels[:-1]):
            index *= 2
            if mass >= level[index]:
                mass, index = mass - level[index], index + 1
        return index


def test_drawing_equals_a_tree_of_sums():
    """Rows and weights, of a buffer that is not full."""
    held, capacity, beta = 37, 50, 0.6
    priorities = rainbow.Priorities(capacity, torch.device("cpu"))
    values = torch.rand(held, generator=torch.Generator().manual_seed(4), dtype=torch.float64) ** 3 + 1e-3
    priorities.values[:held] = values
    index, weights = priorities.draw(B, beta, torch.Generator().manual_seed(5))
    uniform = torch.rand(B, generator=torch.Generator().manual_seed(5), dtype=torch.float64).tolist()
    tree = SumTree(values.tolist())
    total = tree.levels[-1][0]
    assert index.tolist() == [tree.find((i + u) / B * total) for i, u in enumerate(uniform)]
    raw = np.array([(held * values[i].item() / total) ** -beta for i in index])
    close(weights, (raw / raw.max())[:, None], 1e-6)
    assert weights.shape == (B, 1) and weights.dtype == torch.float32


def test_priorities_by_hand():
    """The first rows have 1, later ones the largest there is, also over the end of the ring. A row that was learned
    from has its divergence's; alpha 0 makes all equal."""
    priorities = rainbow.Priorities(4, torch.device("cpu"))
    priorities.add(2, 2)
    close(priorities.values, [1, 1, 0, 0])
    priorities.renew(torch.tensor([1, 0]), torch.tensor([4.0, 0.25]), 0.5)
    close(priorities.values, [0.5, 2, 0, 0], 1e-5)
    priorities.add(1, 3)
    close(priorities.values, [0.5, 2, 2, 0], 1e-5)
    priorities.renew(torch.tensor([2, 1]), torch.tensor([0.0, 1.0]), 0.5)
    close(priorities.values, [0.5, 1, 1e-3, 0], 1e-5)
    priorities.add(2, 5)
    close(priorities.values, [1, 1, 1e-3, 1], 1e-5)
    priorities.renew(torch.arange(4), torch.tensor([0.0, 1.0, 2.0, 3.0]), 0.0)
    close(priorities.values, np.ones(4))


# --- the update


def factors(generator: torch.Generator, sizes) -> list[tuple[np.ndarray, np.ndarray]]:
    draws = [[torch.randn(1, n, generator=generator)[0].numpy() for n in pair] for pair in sizes]
    return [tuple(np.sign(e) * np.sqrt(np.abs(e)) for e in pair) for pair in draws]


@float64()
@pytest.mark.parametrize("algo, without", [
    *[("rainbow", [*part]) for part in ((), ("double",), ("dueling",), ("noisy",))],
    ("c51", ["dueling", "noisy"]), ("c51", ["dueling", "noisy", "double"])], ids=str)  # fmt: skip
def test_update_equals_a_second_implementation(algo, without):
    """Four updates of rows with 1 to 3 steps and weights: all parameters, metrics and divergences. Both networks have
    noise of their own, new in each update. In c51.py rows have one step and no weight."""
    module, whole = (rainbow, True) if algo == "rainbow" else (c51, False)
    parts = dict.fromkeys(("double", "dueling", "noisy"), True) | dict.fromkeys(without, False)
    args = module.Args(gamma=GAMMA, hidden_size=H, num_atoms=N, v_min=-2.0, v_max=2.0, target_network_frequency=3,
                       **(parts if whole else {"double": parts["double"]}))  # fmt: skip
    agent = randomise(module.Agent(D, A, args), 3, 0.6, 0.1)
    optimizer, moments, atoms, differs = torch.optim.Adam(agent.q.parameters(), RATE, fused=True), {}, agent.q.atoms, 0
    p = {name: tensor for name, tensor in named(agent).items() if "atoms" not in name}
    generator, same = (torch.Generator().manual_seed(9) for _ in range(2))
    layers = ["net.2", "net.4", *(["value.2", "value.4"] if parts["dueling"] else [])]
    sizes = [(H, H), (H, A * N), (H, H), (H, N)][: len(layers)]

    def layer(name, x, noise):
        weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
        if noise is not None:
            e_in, e_out = map(torch.from_numpy, noise)
            weight = weight + p[f"{name}.sigma"] * e_out[:, None] * e_in
            bias = bias + p[f"{name}.sigma_bias"] * e_out
        return torch.stack([weight @ row + bias for row in x])

    def own_probs(net, obs, noise):
        noise = dict(zip(layers, noise)) if noise else {}
        hidden = layer(f"{net}.net.0", obs, None).clamp(min=0)
        out = [
            layer(f"{net}.{b}", layer(f"{net}.{a}", hidden, noise.get(a)).clamp(min=0), noise.get(b))
            for a, b in zip(layers[::2], layers[1::2])
        ]
        logits = out[0].view(-1, A, N)
        if parts["dueling"]:
            logits = logits - logits.sum(1, keepdim=True) / A + out[1][:, None]
        return logits.exp() / logits.exp().sum(2, keepdim=True)

    for count in range(1, 5):
        plain, g = rows(B, count), torch.Generator().manual_seed(count)
        steps, w = torch.randint(1, 4, (B, 1), generator=g).double(), torch.rand(B, 1, generator=g)
        steps, w = (steps, w) if whole else (torch.ones(B, 1), torch.ones(B, 1))
        batch = module.Transitions(*plain, *[steps, w] * whole)
        found = module.update(agent, optimizer, batch, count, args, *[generator] * whole)
        numbers = module.metrics(agent, *found[:2])
        divergences = found[2:]
        noises = {net: factors(same, sizes) if parts["noisy"] else None for net in ("q", "target")}
        chosen, other = (
            [int((row * atoms).sum(1).argmax()) for row in own_probs(net, batch.next_obs, noises[net])]
            for net in (("q", "target") if parts["double"] else ("target", "q"))
        )
        differs += chosen != other
        kept = own_probs("target", batch.next_obs, noises["target"])
        kept = torch.stack([row[i] for row, i in zip(kept, chosen)]).detach().numpy()
        values = batch.rewards.numpy() + GAMMA ** steps.numpy() * (1 - batch.terminated.numpy()) * atoms.numpy()
        target, means = by_floor_and_ceiling(kept, values, -2.0, 2.0), (kept * values).sum(1)
        found = own_probs("q", batch.obs, noises["q"])
        found = torch.stack([row[int(a)] for row, a in zip(found, batch.actions)])
        loss = -(w * torch.from_numpy(target) * found.log()).sum() / B
        own = stats.entropy(target, found.detach().numpy(), axis=1)  # Kullback-Leibler
        q = (found * atoms).sum(1).detach()
        gradients = adam(p, moments, "q", loss, RATE)
        if count == 3:
            for name in [name for name in p if name.startswith("target")]:
                p[name] = p[name.replace("target", "q", 1)].detach().clone()
        for name, tensor in p.items():
            close(agent.state_dict()[name], tensor.detach())
        assert len(divergences) == whole
        for divergence in divergences:
            close(divergence, own)
        close(numbers["q"], q.mean())
        close(numbers["td_error"], np.abs(q.numpy() - means).mean())
        close(numbers["clipped"], (np.abs(means) > 2.001).mean())
        close(numbers["grad_norm"], math.sqrt(sum((x**2).sum() for x in gradients.values())))
    assert differs, "both networks choose alike, so --double is not tested"


# --- train()


def test_train_draws_by_divergence_and_renews_what_it_drew(tmp_path, monkeypatch):
    """Beta rises to 1. What is learned from are the rows that were drawn, with their weights; their priorities are
    renewed with what the update returns, before the next draw."""
    drawn, calls, renewed = [], [], []
    draw, update, renew = rainbow.Priorities.draw, rainbow.update, rainbow.Priorities.renew

    def recording_draw(self, size, beta, generator):
        drawn.append((beta, *draw(self, size, beta, generator)))
        return drawn[-1][1:]

    def recording_update(*args):
        calls.append((args[2], update(*args)))
        return calls[-1][1]

    def recording_renew(self, index, divergence, alpha):
        renewed.append((index, divergence, alpha, len(drawn)))
        renew(self, index, divergence, alpha)

    monkeypatch.setattr(rainbow.Priorities, "draw", recording_draw)
    monkeypatch.setattr(rainbow, "update", recording_update)
    monkeypatch.setattr(rainbow.Priorities, "renew", recording_renew)
    folder = new_run(rainbow, tmp_path, *SETTINGS, "--prioritized-replay-alpha", 0.7)
    stored = stored_rows(folder)
    assert (checkpoint(folder)["priorities"]["values"] > 0).sum() == len(stored), "a row was given no priority"
    assert [beta for beta, *_ in drawn] == pytest.approx(
        [0.4 + 0.6 * s / 160 for s in range(42, 161, 6) for _ in "abc"]
    )
    for number, ((_, index, weight), (batch, (*_, divergence)), (again, given, alpha, before)) in enumerate(
        zip(drawn, calls, renewed, strict=True), 1
    ):
        close(torch.cat(batch[:6], 1), stored[index])
        assert batch.weights is weight and again is index and given is divergence
        assert (alpha, before) == (0.7, number)


def test_train_explores_by_noise_alone(tmp_path, monkeypatch):
    """Random actions before learning starts; then epsilon 0 and noise of scale 1. Half of the evaluation has none."""
    given = []

    def second(agent, obs, epsilon, generator, scale=1.0):
        given.append((epsilon, scale))
        return np.full((len(obs), 1), 2)

    monkeypatch.setattr(rainbow, "act", second)
    new_run(rainbow, tmp_path, *SETTINGS)
    assert [epsilon for epsilon, _ in given[:80]] == [1.0] * 21 + [0.0] * 59
    assert {scale for _, scale in given[:80]} == {1.0}
    for epsilon, scale in given[80:]:
        assert (torch.as_tensor(epsilon) == 0).all() and scale.flatten().tolist() == [0, 0, 1, 1]
    given.clear()
    new_run(rainbow, tmp_path, *SETTINGS, "--no-noisy", "--end-e", 0.2, "--exploration-fraction", 0.5)
    expected = [1.0] * 21 + [1 - 0.8 * min(1, step / 80) for step in range(42, 160, 2)]
    assert [epsilon for epsilon, _ in given[:80]] == pytest.approx(expected)
    assert all(epsilon.flatten().tolist() == pytest.approx([0, 0, 0.2, 0.2]) for epsilon, _ in given[80:])
