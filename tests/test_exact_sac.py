"""sac.py against numbers computed another way: densities and expectations by quadrature, updates by a second
implementation (tests/reference/sac.py), the replay buffer and what train() puts into it by environments that tell what
happened."""

import inspect  # noqa: I001
import itertools
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from control import (
    BACKENDS, CONTROL, assert_compiled_is_equal, assert_in_order, assert_probed, assert_update_is, checkpoint, close,
    float64, minibatch, randomise, stored_rows,
)  # fmt: skip
from environments import Probe
from every_script import options, script
from helpers import metrics, new_run, weights
from reference.sac import Sac
from scipy import integrate, stats
from torch import nn

from algos import her_sac, sac
from utils.control import ReplayBuffer

D, A, H, B = 3, 2, 8, 16  # observations, actions, hidden units, rows of a minibatch
GAMMA, TAU, RATE, ENTROPY = 0.9, 0.1, 1e-2, -1.5
NODES = np.arange(-9, 9.1, 0.2)  # of standard normal noise: equal steps are exact to 1e-12 where all is smooth
WEIGHTS = 0.2 * stats.norm.pdf(NODES)


# --- the density


def constant_actor(mean, log_std) -> sac.Actor:
    """Whose mean and log std do not depend on the observation (of one number)."""
    actor = sac.Actor(1, len(mean), 4)
    with torch.no_grad():
        actor.net[-1].weight.zero_()
        actor.net[-1].bias.copy_(torch.tensor([*mean, *log_std]))
    return actor


def act(actor: sac.Actor, noise) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.as_tensor(noise)
    return actor(torch.zeros(len(noise), 1, dtype=noise.dtype), noise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("u", [-50.0, -20.0, -5.0, 5.0, 20.0, 50.0])
def test_density_is_finite_far_out(u, dtype):
    """Value, and gradients with respect to mean and log std, where tanh(u) is 1 in floating point: log(1 - tanh(u)^2)
    is 2 (log 2 - |u|) there, with slope -2 tanh(u)."""
    actor = constant_actor([u], [0.0]).to(dtype)
    _, logps = act(actor, torch.ones(1, 1, dtype=dtype))  # u + 1
    logps.sum().backward()
    u += 1
    log_slope = 2 * (math.log(2) - abs(u) - math.log1p(math.exp(-2 * abs(u))))
    close(logps[0, 0].double(), -0.5 - 0.5 * math.log(2 * math.pi) - log_slope, 1e-5)
    close(actor.net[-1].bias.grad.double(), [2 * math.tanh(u), 2 * math.tanh(u) - 1], 1e-5)


@float64()
def test_noise_0_is_the_likeliest_u_and_log_std_is_bounded():
    for raw, log_std in [(-30.0, -20.0), (-19.9, -19.9), (0.5, 0.5), (1.9, 1.9), (7.0, 2.0)]:
        actor = constant_actor([0.7, -0.2], [raw, raw])
        actions, logps = act(actor, np.zeros((1, 2)))
        close(actions[0], np.tanh([0.7, -0.2]), 1e-15)
        peak = -2 * log_std - math.log(2 * math.pi)
        close(logps[0, 0], peak - np.log(1 - np.tanh([0.7, -0.2]) ** 2).sum())
        close(act(actor, np.full((1, 2), 0.1))[0][0], np.tanh(np.array([0.7, -0.2]) + 0.1 * math.exp(log_std)), 1e-15)


# --- a second implementation of the step


def make_agent(module=sac, weight: float = 0.4, bias: float = 0.1, **more):
    return randomise(module.Agent(D, A, H, 0.3, **more), 111, weight, bias)


@float64()
@pytest.mark.parametrize("learned, log_std", [(True, 0.0), (False, 0.0), (True, 2.0), (True, -20.0)])
@pytest.mark.parametrize("module", [sac, her_sac], ids=["sac", "her_sac"])
def test_update_is_that_of_the_reference(module, learned, log_std):
    """Critics move first, the actor by the new critics, alpha by the actor's log-densities, the targets last; a fixed
    alpha stays. Each critic is the smaller one somewhere. Log stds lie on both sides of a bound."""
    agent, args = make_agent(module), module.Args(gamma=GAMMA, tau=TAU, target_entropy=ENTROPY)
    with torch.no_grad():
        agent.actor.net[-1].bias[A:] = log_std
    given, own = assert_update_is(Sac, module, agent, args, RATE, learned)
    assert own.smallest == set(itertools.product(("critics", "targets"), (0, 1)))
    assert learned == (agent.log_alpha.item() != pytest.approx(math.log(0.3))) == (agent.log_alpha.grad is not None)
    noises = np.stack([drawn["noise"] for drawn in given]).flatten()
    assert len(noises) == 8 * B * A == len(np.unique(noises)) and stats.kstest(noises, "norm").pvalue > 0.01


@BACKENDS
def test_the_compiled_losses_are_one_graph_with_equal_gradients(backend, tolerance):
    batch, noise = minibatch(sac.Transitions), torch.randn(B, A, generator=torch.Generator().manual_seed(1))
    for loss, inputs in [(sac.critic_loss, (batch, noise, GAMMA)), (sac.actor_loss, (batch.obs, noise))]:
        assert_compiled_is_equal(make_agent, loss, inputs, backend, tolerance)


# --- expectations by quadrature


class Quadratic(nn.Module):
    """Q(s, a) = height of s - curvature (a - centre of s)^2 for states 0 and 1, and the same with a gap above it."""

    def __init__(self, heights, centres, curvature=1.5, gap=0.7, smaller=0):
        super().__init__()
        self.heights = nn.Parameter(torch.tensor(heights))
        self.centres, self.curvature, self.gap, self.smaller = torch.tensor(centres), curvature, gap, smaller

    def forward(self, obs, actions):
        state = obs[:, 0].long()
        q = self.heights[state, None] - self.curvature * (actions - self.centres[state, None]) ** 2
        return torch.stack((q, q + self.gap)[:: -1 if self.smaller else 1])


@float64()
@pytest.mark.parametrize("alpha, smaller", [(0.5, 0), (0.5, 1), (1e-9, 0)])
def test_expected_gradient_of_the_actor_is_that_of_the_objective(alpha, smaller):
    """A bandit with known Q: the gradient's mean over the noise is d/d(mean, log std) of the integral of
    pi(a) (alpha log pi(a) - Q(a)) over (-1, 1)."""
    mean, log_std, centre, curvature = 0.3, -0.4, 0.6, 1.5

    def objective(mean, log_std):
        def integrand(u):  # da = (1 - a^2) du, which turns pi(a) da into the normal density of u
            a = np.tanh(u)
            logp = stats.norm.logpdf(u, mean, np.exp(log_std)) - np.log(1 - a**2)
            return stats.norm.pdf(u, mean, np.exp(log_std)) * (alpha * logp - (2.0 - curvature * (a - centre) ** 2))

        return integrate.quad(integrand, mean - 9, mean + 9, epsabs=1e-12, limit=200)[0]

    agent = SimpleNamespace(actor=constant_actor([mean], [log_std]), log_alpha=torch.tensor(alpha).log(),
                            critics=Quadratic([2.0], [centre], curvature, smaller=smaller))  # fmt: skip
    value = 0.0
    for node, weight in zip(NODES, WEIGHTS):
        loss, _ = sac.actor_loss(agent, torch.zeros(1, 1), torch.full((1, 1), node))
        (weight * loss).backward()
        value += weight * loss.item()
    h = 1e-4
    slopes = [(objective(mean + h, log_std) - objective(mean - h, log_std)) / (2 * h),
              (objective(mean, log_std + h) - objective(mean, log_std - h)) / (2 * h)]  # fmt: skip
    close(value, objective(mean, log_std), 1e-7)
    close(agent.actor.net[-1].bias.grad, slopes, 1e-6)
    assert min(map(abs, slopes)) > 0.05


# --- the replay buffer


def make_replay(capacity: int) -> ReplayBuffer:
    """Of rows of two and one numbers, filled with NaN, so that no row that was never written can pass unseen."""
    replay = ReplayBuffer(capacity, (2, 1), torch.device("cpu"))
    replay.rows.fill_(math.nan)
    return replay


def add(replay: ReplayBuffer, first: int, count: int) -> None:
    """Rows whose three numbers are all the row's number; float64, as some environments have it."""
    numbers = np.arange(first, first + count)[:, None].astype(np.float64)
    replay.add(np.hstack([numbers, numbers]), numbers)


@pytest.mark.parametrize("total", [7, 10, 23])
def test_replay_samples_uniformly(total):
    """Every row that is held equally often, also the first and the last; successive draws are independent."""
    replay = make_replay(10)
    for row in range(total):
        add(replay, row, 1)
    numbers = replay.sample(20_000, torch.Generator().manual_seed(0))[1][:, 0].long()
    rows = min(total, 10)
    assert stats.chisquare(torch.bincount(numbers - (total - rows), minlength=rows)).pvalue > 1e-3
    pairs = (numbers[::2] - (total - rows)) * rows + numbers[1::2] - (total - rows)
    assert stats.chisquare(torch.bincount(pairs, minlength=rows**2)).pvalue > 1e-3


# --- train()


SETTINGS = ("--device cpu --env-id environments:Probe-v0 --total-timesteps 160 --num-envs 2 --learning-starts 41 "
            "--hidden-size 8 --batch-size 16 --eval-episodes 2 --eval-every 0").split()  # fmt: skip


def rows_of(folder):
    return np.split(stored_rows(folder), [4, 6, 7, 8], 1)


MODULES = {algo: CONTROL[algo] for algo in ("sac", "crossq", "gsde", "redq", "ddpg", "td3")}
each = pytest.mark.parametrize("algo", MODULES)


def recorded_run(module, folder, *flags) -> tuple:
    """A short run: its folder, what `update` was called with each time, and the agent's state before the first."""
    calls, untrained, update = [], {}, module.update

    def recording(agent, *others):
        if not calls:
            untrained.update({name: tensor.clone() for name, tensor in agent.state_dict().items()})
        calls.append((agent, *others))
        return update(agent, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "update", recording)
        more = ["--utd-ratio", 3] if "utd_ratio" in options(module.NAME) else []
        return new_run(module, folder, *SETTINGS, *more, *flags), calls, untrained


@pytest.fixture(scope="module", params=MODULES)
def probe_run(request, tmp_path_factory):
    return recorded_run(MODULES[request.param], tmp_path_factory.mktemp("probe"))


def test_train_stores_true_transitions(probe_run):
    columns = rows_of(probe_run[0])
    assert_probed(*columns)
    for i in range(2):
        assert len(assert_in_order(*(column[i::2] for column in columns))) == 3  # also both at once


def test_train_updates_on_what_it_stored(probe_run):
    """Minibatches are rows of the buffer as it was, in the columns that `update` takes them for, of all ages."""
    folder, calls, _ = probe_run
    stored = {tuple(row): i for i, row in enumerate(np.concatenate(rows_of(folder), 1))}
    seen = []
    for number, (_, _, batch, *_) in enumerate(calls):
        assert [x.shape for x in batch] == [(16, 4), (16, 2), (16, 1), (16, 1), (16, 4)]
        assert_probed(*(x.numpy() for x in batch))
        indices = [stored[tuple(row)] for row in torch.cat(batch, 1).numpy()]
        assert max(indices) < 42 + 2 * (60 * number // len(calls))  # 60 steps of both environments, the first to 42
        seen += indices
    assert len(set(seen)) > 150 and len({tuple(x[2].obs.flatten().tolist()) for x in calls}) == len(calls)


OWN = {"crossq": (1e-3, 0.5, 3), "redq": (3e-4, 0.9, 3), "ddpg": (1e-3, 0.9, 1), "td3": (1e-3, 0.9, 2)}


def test_train_takes_every_update(probe_run):
    """One or utd-ratio updates for each step of an environment after learning_starts, by Adam at the learning rate for
    exactly the parts that are named; all of them, targets and statistics moved; target entropy is -(number of actions).
    CrossQ's Adam forgets sooner, but for the temperature's; some actors move in every second or third update."""
    folder, calls, untrained = probe_run
    agent, optimizers = calls[0][:2]
    module = sys.modules[type(agent).__module__]
    names = list(inspect.signature(module.update).parameters)
    args, updates = calls[0][names.index("args")], (360 if "utd_ratio" in options(module.NAME) else 120)
    assert len(calls) == updates and calls[0][-2:] == (module.critic_loss, module.actor_loss)
    if "number" in names:  # of all that the steps so far have had
        assert [call[names.index("number")] for call in calls] == list(range(121, 481))
    rate, beta, every = OWN.get(module.NAME, (3e-4, 0.9, 1))
    assert getattr(args, "target_entropy", -2) == -2
    for name, optimizer in optimizers._asdict().items():
        part = [agent.log_alpha] if name == "alpha" else getattr(agent, name).parameters()
        (group,), beta1 = optimizer.param_groups, 0.9 if name == "alpha" else beta
        assert [id(x) for x in group["params"]] == [id(x) for x in part]
        assert type(optimizer) is torch.optim.Adam
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (rate, (beta1, 0.999), 1e-8, 0)
        count = updates if name.startswith("critic") else updates // every
        assert {x["step"].item() for x in checkpoint(folder)[name]["state"].values()} == {count}
    for name, tensor in (saved := weights(folder)).items():
        assert not torch.equal(tensor, untrained[name]), name
        if name.startswith("target"):  # they lag, and began as copies
            follows = name.removeprefix("target_").replace("targets", "critics")
            assert torch.equal(untrained[name], untrained[follows]) and not torch.equal(tensor, saved[follows])


@each
def test_train_explores_uniformly_then_acts(algo, tmp_path, monkeypatch):
    """The first learning_starts steps are uniform in [-1, 1], later ones the policy's, which is given full noise, or
    DDPG's standard deviation of it, and the observation that is stored with its action. Evaluation stretches actions,
    too; half of its episodes get no noise."""
    module, given, deterministic = MODULES[algo], [], algo in ("ddpg", "td3")
    names, noise = list(inspect.signature(module.act).parameters), 0.3 if deterministic else 1.0

    def quarter(*inputs):
        given.append((inputs[names.index("obs")].copy(), inputs[names.index("scale")]))
        return np.full((len(given[-1][0]), 2), 0.25, np.float32)

    monkeypatch.setattr(module, "act", quarter)
    flags = ["--exploration-noise", noise] if deterministic else ["--alpha", 0.2]
    folder = new_run(module, tmp_path, *SETTINGS, "--learning-starts", 120, *flags)
    obs, actions = rows_of(folder)[:2]
    assert stats.kstest(actions[:120].flatten(), stats.uniform(-1, 2).cdf).pvalue > 0.01
    assert len(np.unique(actions[:120])) == 240 and (actions[120:] == 0.25).all()
    close(np.concatenate([x for x, _ in given[:20]]), obs[120:])
    assert all(scale == noise for _, scale in given[:20])
    assert all(scale.flatten().tolist() == pytest.approx([0, 0, noise, noise]) for _, scale in given[20:])
    (row,) = metrics(folder)
    close(row["eval/return"], row["eval/length"] * (100 - 1 + 1.25 / 2 * 4), 1e-3)
    assert deterministic or weights(folder)["log_alpha"].item() == pytest.approx(math.log(0.2))
    assert deterministic or row["alpha"] == pytest.approx(0.2) and "alpha" not in checkpoint(folder)


@pytest.mark.parametrize("algo", ["sac", "crossq", "gsde", "redq", "her_sac", "rlpd"])
def test_a_temperature_of_zero_is_no_other(algo, tmp_path):
    module, args = script(algo, tmp_path)
    rows = metrics(new_run(module, tmp_path / "runs", *args, "--alpha", 0))
    assert {row["alpha"] for row in rows if "alpha" in row} == {0.0}


def test_act_samples_the_policy():
    space = Probe.action_space
    actor, generator = constant_actor([0.3, -0.2], [-0.5, 0.2]), torch.Generator().manual_seed(0)
    obs = np.zeros((4000, 1))  # float64, as MuJoCo's
    close(sac.act(actor, space, obs, 0.0, generator)[:3], [np.tanh([0.3, -0.2])] * 3, 1e-6)
    u = np.arctanh(sac.act(actor, space, obs, 1.0, generator))
    for i, (mean, std) in enumerate([(0.3, math.exp(-0.5)), (-0.2, math.exp(0.2))]):
        assert stats.kstest(u[:, i], stats.norm(mean, std).cdf).pvalue > 0.01
    half = sac.act(actor, space, obs[:2], torch.tensor([[0.0], [1.0]]), generator)
    close(half[0], np.tanh([0.3, -0.2]), 1e-6)
    assert abs(half[1] - half[0]).min() > 1e-3
