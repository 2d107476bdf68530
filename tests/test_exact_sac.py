"""sac.py against numbers computed another way: densities and expectations by quadrature, one update by a second
implementation of the step, the replay buffer and what train() puts into it by environments that tell what happened.

The second implementation takes tensors by name and uses its own forward pass, density (Normal.log_prob and
log(1 - a^2)), losses and Adam; only derivatives are left to autograd.
"""

import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import metrics, new_run, weights
from scipy import integrate, stats
from torch import nn

from algos import sac
from utils.checkpoint import load_newest
from utils.replay import ReplayBuffer

D, A, H, B = 3, 2, 8, 16  # observations, actions, hidden units, rows of a minibatch
GAMMA, TAU, RATE, ENTROPY = 0.9, 0.1, 1e-2, -1.5
NODES = np.arange(
    -9, 9.1, 0.2
)  # of standard normal noise: equal steps are exact to 1e-12 for what is as smooth as tanh
WEIGHTS = 0.2 * stats.norm.pdf(NODES)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


double = pytest.mark.usefixtures("float64")


def close(actual, expected, atol=1e-10) -> None:
    actual = actual.detach() if isinstance(actual, torch.Tensor) else actual
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=0, atol=atol)


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


def density(actor: sac.Actor, mean, log_std, actions: np.ndarray) -> np.ndarray:
    """exp(log pi) at actions (n, A)."""
    reached, logps = act(actor, (np.arctanh(actions) - mean) / np.exp(log_std))
    close(reached, actions)
    return logps.detach().exp().numpy()[:, 0]


@double
@pytest.mark.parametrize("mean, std", [(0.0, 1.0), (0.3, 0.2), (-1.0, 2.0), (2.5, 0.5), (-4.0, 0.3), (0.0, 7.0)])
def test_density_integrates_to_one(mean, std):
    """Over a in (-1, 1), also where nearly all of it lies at a bound; u = atanh(a) spreads the points there. The share
    below a point is that of the normal u."""
    actor = constant_actor([mean], [math.log(std)])
    u = np.linspace(max(mean - 9 * std, -16), min(mean + 9 * std, 16), 40_001)
    a, slope = np.tanh(u), np.cosh(u) ** -2.0
    noise = ((u - mean) / std)[:, None]  # not from atanh(a), which has few digits at the bounds
    reached, logps = act(actor, noise)
    close(reached[:, 0], a)
    below = integrate.cumulative_trapezoid(logps.detach().exp().numpy()[:, 0] * slope, u, initial=0)
    close(below, stats.norm.cdf(u, mean, std) - stats.norm.cdf(u[0], mean, std), 1e-5)


@double
def test_density_of_two_actions_is_a_product():
    """It integrates to 1 over the square, and is the product of the densities of one action each."""
    mean, log_std = [0.2, -0.5], [-0.7, -0.2]
    nodes, node_weights = np.polynomial.legendre.leggauss(80)
    a = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2)
    values = density(constant_actor(mean, log_std), mean, log_std, a).reshape(80, 80)
    close(node_weights @ values @ node_weights, 1.0, 1e-6)
    rows = [density(constant_actor([m], [s]), m, s, nodes[:, None]) for m, s in zip(mean, log_std)]
    close(values, np.outer(rows[1], rows[0]), 1e-9)


@double
def test_density_is_the_change_of_variables():
    """log N(u) - log |da/du| with da/du by finite difference."""
    mean, std, h = 0.4, 0.8, 1e-5
    noise = np.linspace(-3, 3, 25)[:, None]
    actor = constant_actor([mean], [math.log(std)])
    _, logps = act(actor, noise)
    slope = (act(actor, noise + h / std)[0] - act(actor, noise - h / std)[0]).detach().numpy() / (2 * h)
    close(logps, stats.norm.logpdf(mean + std * noise, mean, std) - np.log(slope), 1e-7)


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


@double
def test_noise_0_is_the_likeliest_u_and_log_std_is_bounded():
    """tanh(mean); and a log std beyond [-20, 2] counts as the bound, inside of it as itself."""
    for raw, log_std in [(-30.0, -20.0), (-19.9, -19.9), (0.5, 0.5), (1.9, 1.9), (7.0, 2.0)]:
        actor = constant_actor([0.7, -0.2], [raw, raw])
        actions, logps = act(actor, np.zeros((1, 2)))
        close(actions[0], np.tanh([0.7, -0.2]), 1e-15)
        peak = -2 * log_std - math.log(2 * math.pi)
        close(logps[0, 0], peak - np.log(1 - np.tanh([0.7, -0.2]) ** 2).sum())
        close(act(actor, np.full((1, 2), 0.1))[0][0], np.tanh(np.array([0.7, -0.2]) + 0.1 * math.exp(log_std)), 1e-15)


# --- a second implementation of the step


def mlp(p: dict, name: str, x: torch.Tensor) -> torch.Tensor:
    for layer in (0, 2, 4):
        x = x @ p[f"{name}.{layer}.weight"].T + p[f"{name}.{layer}.bias"]
        x = x * (x > 0) if layer < 4 else x
    return x


def own_policy(p: dict, obs, noise):
    mean, log_std = mlp(p, "actor.net", obs).split(A, 1)
    u = mean + torch.exp(log_std) * noise
    logps = torch.distributions.Normal(mean, torch.exp(log_std)).log_prob(u) - torch.log(1 - torch.tanh(u) ** 2)
    return torch.tanh(u), logps.sum(1)[:, None]


def own_q(p: dict, name: str, obs, actions):
    return [mlp(p, f"{name}.{q}", torch.hstack([obs, actions])) for q in ("q1", "q2")]


def own_smaller_q(p: dict, name: str, obs, actions):
    q1, q2 = own_q(p, name, obs, actions)
    return torch.where(q1 < q2, q1, q2)


def own_target(p: dict, batch, next_noise):
    actions, logps = own_policy(p, batch.next_obs, next_noise)
    value = own_smaller_q(p, "targets", batch.next_obs, actions) - p["log_alpha"].exp().item() * logps
    return torch.where(batch.terminated == 1, batch.rewards, batch.rewards + GAMMA * value)


def own_critic_loss(p: dict, batch, target):
    return sum(((q - target) ** 2).sum() / (2 * len(q)) for q in own_q(p, "critics", batch.obs, batch.actions))


def own_actor_loss(p: dict, obs, noise):
    actions, logps = own_policy(p, obs, noise)
    return (p["log_alpha"].exp().item() * logps - own_smaller_q(p, "critics", obs, actions)).sum() / len(obs), logps


def own_adam(p: dict, moments: dict, part: str, loss) -> dict:
    """The parameters after a step of those whose names start with `part`; their gradients, by name."""
    names = [name for name in p if name.startswith(part)]
    gradients = dict(zip(names, torch.autograd.grad(loss, [p[name] for name in names])))
    for name, g in gradients.items():
        m, v, t = moments.get(name, (0.0, 0.0, 0))
        m, v, t = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2, t + 1
        moments[name] = m, v, t
        p[name] = (p[name] - RATE * m / (1 - 0.9**t) / (torch.sqrt(v / (1 - 0.999**t)) + 1e-8)).detach()
        p[name].requires_grad_()
    return gradients


def own_update(p: dict, moments: dict, batch, noise, next_noise, learned: bool) -> dict:
    """Changes `p` and `moments`; returns the metrics."""
    target = own_target(p, batch, next_noise).detach()
    q = own_q(p, "critics", batch.obs, batch.actions)[0].detach()
    gradients = own_adam(p, moments, "critics", own_critic_loss(p, batch, target))
    loss, logps = own_actor_loss(p, batch.obs, noise)
    metrics = {"q": q.mean(), "td_error": (q - target).abs().mean(), "entropy": -logps.detach().mean(),
               "grad_norm": math.sqrt(sum((g**2).sum() for g in gradients.values()))}  # fmt: skip
    own_adam(p, moments, "actor", loss)
    if learned:
        own_adam(p, moments, "log_alpha", -torch.exp(p["log_alpha"]) * (logps.detach() + ENTROPY).mean())
    for name in p:
        if name.startswith("targets"):
            p[name] = ((1 - TAU) * p[name] + TAU * p[name.replace("targets", "critics")]).detach()
    return metrics | {"alpha": p["log_alpha"].exp().item()}


def make_agent(seed: int = 111) -> sac.Agent:
    """Random weights, other ones in the target critics, alpha 0.3."""
    generator = torch.Generator().manual_seed(seed)
    agent = sac.Agent(D, A, H, 0.3)
    with torch.no_grad():
        for parameter in (p for p in agent.parameters() if p.dim()):
            parameter.copy_((0.4 if parameter.dim() > 1 else 0.1) * torch.randn(parameter.shape, generator=generator))
    return agent


def named(agent: sac.Agent) -> dict:
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in agent.state_dict().items()}


def make_batch(seed: int = 0) -> sac.Transitions:
    g = torch.Generator().manual_seed(seed)
    terminated = (torch.arange(B) % 3 == 0).view(B, 1).to(torch.get_default_dtype())
    return sac.Transitions(torch.randn(B, D, generator=g), torch.rand(B, A, generator=g) * 2 - 1,
                           3 * torch.randn(B, 1, generator=g), terminated, torch.randn(B, D, generator=g))  # fmt: skip


def make_noise(seed: int) -> torch.Tensor:
    return torch.randn(B, A, generator=torch.Generator().manual_seed(seed))


def make_optimizers(agent: sac.Agent, learned: bool = True) -> sac.Optimizers:
    def adam(parameters):
        return torch.optim.Adam(parameters, lr=RATE, fused=True)

    return sac.Optimizers(adam(agent.actor.parameters()), adam(agent.critics.parameters()),
                          adam([agent.log_alpha]) if learned else None)  # fmt: skip


# --- the losses


@double
def test_losses_equal_the_formulas():
    """Values, and every gradient: nothing reaches the target, the actor in the critics' loss, or alpha in either."""
    agent, batch, noise = make_agent(), make_batch(), make_noise(1)
    p = named(agent)
    for name in ("critics", "targets"):  # each of the two is the smaller one somewhere
        assert 0 < torch.lt(*own_q(p, name, batch.obs, batch.actions)).sum() < B
    loss, q, target = sac.critic_loss(agent, batch, noise, GAMMA)
    own = own_target(p, batch, noise).detach()
    close(target, own)
    close(q, own_q(p, "critics", batch.obs, batch.actions)[0].detach())
    close(loss, own_critic_loss(p, batch, own).detach())
    assert not target.requires_grad and not q.requires_grad
    assert_gradients(agent, loss, p, own_critic_loss(p, batch, own), "critics")

    loss, logps = sac.actor_loss(agent, batch.obs, noise)
    own, own_logps = own_actor_loss(p, batch.obs, noise)
    close(loss, own.detach())
    close(logps, own_logps.detach())
    assert not logps.requires_grad
    agent.critics.requires_grad_(False)  # as in update
    assert_gradients(agent, sac.actor_loss(agent, batch.obs, noise)[0], p, own, "actor")


def assert_gradients(agent, loss, p, own, part: str) -> None:
    """Those of `part` are those of the second implementation, and no other parameter has one."""
    agent.zero_grad()
    loss.backward()
    names = [name for name in p if name.startswith(part)]
    own_gradients = dict(zip(names, torch.autograd.grad(own, [p[name] for name in names])))
    for name, parameter in agent.named_parameters():
        if name in own_gradients:
            close(parameter.grad, own_gradients[name])
        else:
            assert parameter.grad is None or not parameter.grad.any(), name


@double
def test_losses_by_hand():
    """One row with known critics and log-densities; the bootstrap is cut where terminated is 1."""

    def fixed(*values):
        return lambda *_: tuple(torch.tensor([[v]] * 2, requires_grad=True) for v in values)

    agent = SimpleNamespace(actor=fixed(0.0, -2.0), critics=fixed(1.0, 4.0), targets=fixed(5.0, 3.0),
                            log_alpha=torch.tensor(0.5).log())  # fmt: skip
    batch = sac.Transitions(None, None, torch.tensor([[10.0], [10.0]]), torch.tensor([[0.0], [1.0]]), None)
    loss, q, target = sac.critic_loss(agent, batch, None, 0.9)
    close(target[:, 0], [10 + 0.9 * (3 + 0.5 * 2), 10])  # 13.6, 10
    close(q[:, 0], [1, 1])
    close(loss, 0.5 * ((12.6**2 + 9**2) / 2 + (9.6**2 + 6**2) / 2))
    loss, logps = sac.actor_loss(agent, None, None)
    close(loss, 0.5 * -2 - 1)
    close(logps[:, 0], [-2, -2])


@double
def test_temperature_moves_entropy_to_its_target():
    """Value and gradient of equation 18: alpha grows where the entropy -log pi is below the target, else falls."""
    logps = torch.tensor([[1.0], [4.0]])
    for target_entropy, slope in [(-1.0, -1.5 * 0.3), (-4.0, 1.5 * 0.3)]:  # mean log pi + H is 1.5, then -1.5
        log_alpha = torch.tensor(0.3).log().requires_grad_()
        loss = sac.alpha_loss(log_alpha, logps, target_entropy)
        loss.backward()
        close(loss, slope)
        close(log_alpha.grad, slope)


# --- update


@double
@pytest.mark.parametrize("learned", [True, False])
def test_update_equals_a_second_implementation(learned):
    """Four updates: all parameters and metrics. Critics move first, the actor by the new critics, alpha by the actor's
    log-densities, the targets last; a fixed alpha stays."""
    agent, generator = make_agent(), torch.Generator().manual_seed(0)
    optimizers, p, moments, noises = make_optimizers(agent, learned), named(agent), {}, []
    args = sac.Args(gamma=GAMMA, tau=TAU, target_entropy=ENTROPY)

    def listened(loss, position):
        def listening(*inputs):
            noises.append(inputs[position].clone())
            return loss(*inputs)

        return listening

    losses = listened(sac.critic_loss, 2), listened(sac.actor_loss, 2)
    for step in range(4):
        batch = make_batch(step)
        numbers = sac.update(agent, optimizers, batch, generator, args, *losses)
        next_noise, noise = noises[-2:]
        own = own_update(p, moments, batch, noise, next_noise, learned)
        for name, tensor in agent.state_dict().items():
            close(tensor, p[name].detach())
        assert numbers.keys() == own.keys()
        for name, value in own.items():
            close(numbers[name], value)
        assert all(x.requires_grad for x in [*agent.actor.parameters(), *agent.critics.parameters()])
        close(
            torch.cat([x.grad.flatten() for x in agent.critics.parameters()]).norm(), own["grad_norm"]
        )  # not the actor's
        assert not any(x.requires_grad or x.grad is not None for x in agent.targets.parameters())
    assert learned == (agent.log_alpha.item() != pytest.approx(math.log(0.3)))
    assert learned or agent.log_alpha.grad is None
    everything = torch.stack(noises).flatten()
    assert len(everything) == 8 * B * A == len(everything.unique())  # no number is used twice
    assert stats.kstest(everything.numpy(), "norm").pvalue > 0.01


@double
def test_update_uses_its_generator_only():
    """Equal generators, equal updates, whatever the global one does; another generator, another update."""
    results = []
    for global_seed, seed in [(1, 5), (2, 5), (1, 6)]:
        torch.manual_seed(global_seed)
        agent = make_agent()
        args = sac.Args(gamma=GAMMA, tau=TAU, target_entropy=ENTROPY)
        sac.update(agent, make_optimizers(agent), make_batch(), torch.Generator().manual_seed(seed), args)
        results.append(torch.cat([x.flatten() for x in agent.state_dict().values()]))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def compiled_equals_eager(tolerance: float, **options) -> None:
    """Values and gradients of both losses, float32."""
    batch, noise = make_batch(), make_noise(1)
    for loss, inputs in [(sac.critic_loss, (batch, noise, GAMMA)), (sac.actor_loss, (batch.obs, noise))]:
        results = []
        for function in (loss, torch.compile(loss, fullgraph=True, **options)):
            agent = make_agent()
            outputs = function(agent, *inputs)
            outputs[0].backward()
            gradients = [x.grad for x in agent.parameters() if x.grad is not None]
            results.append(torch.cat([x.detach().flatten() for x in [*outputs, *gradients]]))
        assert (results[0] - results[1]).abs().max() < tolerance * results[0].abs().max()


def test_losses_are_one_graph():
    """torch.compile can take them whole; its graph, run without code generation, gives the same numbers."""
    compiled_equals_eager(1e-6, backend="eager")


@pytest.mark.slow
def test_compiled_equals_eager():
    compiled_equals_eager(1e-5)


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
        return (q, q + self.gap)[:: -1 if self.smaller else 1]


@double
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


@double
def test_soft_bellman_backup_and_its_fixed_point():
    """Two states that lead to each other, one of them sometimes to the end. The mean of y over the noise is the backup
    by quadrature, and at the exact soft value the critics' expected gradient is 0."""
    alpha, centres, means, log_stds, curvature = 0.4, [0.5, -0.3], [0.2, -0.6], [-0.5, 0.1], 1.5
    ends = [0.0, 0.25]  # probability that the step from a state is the last

    def soft_reward(s):
        """Mean over pi(. | s) of -curvature (a - centre)^2 - alpha log pi(a | s)."""

        def integrand(u):
            density = stats.norm(means[s], np.exp(log_stds[s]))
            a = np.tanh(u)
            logp = density.logpdf(u) - np.log(1 - a**2)
            return density.pdf(u) * (-curvature * (a - centres[s]) ** 2 - alpha * logp)

        return integrate.quad(integrand, means[s] - 9, means[s] + 9, epsabs=1e-12, limit=200)[0]

    soft, bonus = np.array([soft_reward(0), soft_reward(1)]), np.array([1.0, -0.5])
    # Q(s, a) = height(s) - curvature (a - centre)^2, height(s) = bonus(s) + gamma (1 - ends(s)) (height(s') + soft(s'))
    kept = GAMMA * (1 - np.array(ends))
    heights = np.linalg.solve([[1, -kept[0]], [-kept[1], 1]], bonus + kept * soft[::-1])

    actor = sac.Actor(1, 1, 4)  # mean and log std are linear in the state through one hidden unit
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.zero_()
        actor.net[0].weight[0, 0] = actor.net[2].weight[0, 0] = 1.0
        actor.net[4].bias.copy_(torch.tensor([means[0], log_stds[0]]))
        actor.net[4].weight[:, 0] = torch.tensor([means[1] - means[0], log_stds[1] - log_stds[0]])

    def expected(heights, s, a):
        """Means of y and of the critics' gradient with respect to their heights, at state s and action a."""
        agent = SimpleNamespace(actor=actor, log_alpha=torch.tensor(alpha).log(),
                                targets=Quadratic(heights, centres, curvature, smaller=1),
                                critics=Quadratic(heights, centres, curvature, gap=0.0))  # fmt: skip
        reward, mean = bonus[s] - curvature * (a - centres[s]) ** 2, 0.0
        for terminated, chance in ((0.0, 1 - ends[s]), (1.0, ends[s])):
            batch = sac.Transitions(*(torch.full((1, 1), float(x)) for x in (s, a, reward, terminated, 1 - s)))
            for node, weight in zip(NODES, chance * WEIGHTS):
                loss, _, y = sac.critic_loss(agent, batch, torch.full((1, 1), node), GAMMA)
                mean += weight * y.item()
                (weight * loss).backward()
        return mean, agent.critics.heights.grad

    for s in (0, 1):
        for a in (-0.9, 0.1, 0.8):
            y, gradient = expected(heights.tolist(), s, a)
            close(y, heights[s] - curvature * (a - centres[s]) ** 2, 1e-9)
            close(gradient, 0.0, 1e-9)
        others = [3.0, -7.0]  # any other values: their backup, which they are not a fixed point of
        y, gradient = expected(others, s, 0.1)
        backup = bonus[s] - curvature * (0.1 - centres[s]) ** 2 + kept[s] * (others[1 - s] + soft[1 - s])
        close(y, backup, 1e-9)
        close(gradient[s], 2 * (others[s] - curvature * (0.1 - centres[s]) ** 2 - backup), 1e-9)  # two critics
        close(gradient[1 - s], 0.0, 1e-12)


# --- the replay buffer

CPU = torch.device("cpu")


def make_replay(capacity: int) -> ReplayBuffer:
    """Of rows of two and one numbers, filled with NaN, so that no row that was never written can pass unseen."""
    replay = ReplayBuffer(capacity, (2, 1), CPU)
    replay.rows.fill_(math.nan)
    return replay


def add(replay: ReplayBuffer, first: int, count: int) -> None:
    """Rows whose three numbers are all the row's number; float64, as some environments have it."""
    numbers = np.arange(first, first + count)[:, None].astype(np.float64)
    replay.add(np.hstack([numbers, numbers]), numbers)


def held(replay: ReplayBuffer) -> list[int]:
    """The distinct rows that come out of many samples."""
    pair, one = replay.sample(4000, torch.Generator().manual_seed(0))
    assert pair.shape == (4000, 2) and one.shape == (4000, 1) and (pair == one).all() and pair.dtype == torch.float32
    return sorted(set(one[:, 0].int().tolist()))


@pytest.mark.parametrize(
    "capacity, sizes",
    [(10, [1] * 25), (10, [4] * 7), (10, [7, 10, 9, 3]), (3, [3, 2, 3, 1]), (1, [1, 1, 1]), (4, [3, 11, 2, 9, 5])],
)
def test_replay_holds_the_newest_rows(capacity, sizes):
    """After every addition, also across the end of the ring and of a whole ring or more at once: only the newest rows
    are sampled, all of them, and newest() gives them in order."""
    replay, total = make_replay(capacity), 0
    for size in sizes:
        add(replay, total, size)
        total += size
        rows = list(range(max(0, total - capacity), total))
        assert replay.total == total and held(replay) == rows
        for count in {1, len(rows) // 2, len(rows)}:
            assert replay.newest(count).tolist() == [[float(row)] * 3 for row in rows[len(rows) - count :]]


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


def in_file(path) -> list[float]:
    return np.fromfile(path, np.float32).reshape(-1, 3)[:, 0].tolist()


def mark(path, row: int) -> None:
    with open(path, "r+b") as file:
        file.seek(row * 3 * 4)
        file.write(np.float32(-99).tobytes())


def test_replay_file_grows_by_the_new_rows(tmp_path):
    """What is in the file is not written again, nor after a load: a mark put there stays, in the same file."""
    replay, path = make_replay(10), tmp_path / "replay.bin"
    add(replay, 0, 4)
    assert replay.save(path) == 4 and in_file(path) == [0, 1, 2, 3]
    inode = path.stat().st_ino
    mark(path, 0)
    for first, count in [(4, 3), (7, 0), (7, 6), (13, 10), (23, 2)]:  # across the end, nothing, a whole ring
        if count:
            add(replay, first, count)
        assert replay.save(path) == first + count
        assert in_file(path) == [-99, *range(1, first + count)]
    loaded = make_replay(10)
    loaded.load(path, 25)
    mark(path, 24)
    add(loaded, 25, 2)
    assert loaded.save(path) == 27 and in_file(path) == [-99, *range(1, 24), -99, 25, 26]
    assert path.stat().st_ino == inode


def assert_same(one: ReplayBuffer, other: ReplayBuffer) -> None:
    """Same rows in the same places: the same samples to come."""
    assert one.total == other.total
    rows = min(one.total, one.capacity)
    assert torch.equal(one.rows[:rows], other.rows[:rows])
    samples = [replay.sample(50, torch.Generator().manual_seed(1))[1] for replay in (one, other)]
    assert torch.equal(*samples)


@pytest.mark.parametrize("total", [0, 6, 10, 13, 20, 37])
def test_replay_loads_what_was_saved(total, tmp_path):
    """Bit for bit, saved every 3 rows or at the end only, and the two go on alike."""
    for every in (3, 100):
        replay, path = make_replay(10), tmp_path / f"{every}.bin"
        for row in range(total):
            add(replay, row, 1)
            if row % every == 0:
                replay.save(path)
        loaded = make_replay(10)
        loaded.load(path, replay.save(path))
        if total:
            assert_same(loaded, replay)
        for both in (replay, loaded):
            add(both, total, 4)
            both.save(path)
        assert_same(loaded, replay)
        assert in_file(path)[-4:] == list(range(total, total + 4)) and len(in_file(path)) == total + 4


def test_replay_with_more_new_rows_than_it_holds(tmp_path):
    """Rows that were overwritten before a save are lost, those around them keep their places."""
    replay, path = make_replay(10), tmp_path / "replay.bin"
    add(replay, 0, 5)
    replay.save(path)
    for row in range(5, 42):
        add(replay, row, 1)
    assert replay.save(path) == 42
    assert in_file(path)[:5] == list(range(5)) and in_file(path)[32:] == list(range(32, 42))
    loaded = make_replay(10)
    loaded.load(path, 42)
    assert_same(loaded, replay)


@pytest.mark.parametrize("older, newer", [(6, 9), (6, 30), (25, 28), (20, 60)])
def test_replay_goes_back_to_an_older_total(older, newer, tmp_path):
    """A run was killed after its file had grown past its checkpoint: the rows behind are not seen, and are gone from
    the file at the next save."""
    path = tmp_path / "replay.bin"
    replay, reference = make_replay(10), make_replay(10)
    for row in range(newer):
        add(replay, row, 1)
        if row < older:
            add(reference, row, 1)
        if row + 1 in (older, newer):
            replay.save(path)
    resumed = make_replay(10)
    resumed.load(path, older)
    assert_same(resumed, reference)
    for both in (resumed, reference):
        add(both, 1000, 2)
    assert resumed.save(path) == older + 2
    assert in_file(path)[-3:] == [older - 1, 1000, 1001] and len(in_file(path)) == older + 2
    assert_same(resumed, reference)
    again = make_replay(10)
    again.load(path, older + 2)
    assert_same(again, reference)


# --- train()

LIMIT = 5


class Probe(gym.Env):
    """Observation: step in the episode, length at which it ends by itself, the action as it arrived. Lengths of 2 to 7
    under a time limit of LIMIT make episodes that terminate, that are cut off, and that do both in one step."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,))
    action_space = gym.spaces.Box(np.array([-1, 2], np.float32), np.array([3, 2.5], np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_in_episode, self.length = 0, int(self.np_random.integers(2, 8))
        return np.array([0, self.length, 0, 0], np.float32), {}

    def step(self, action):
        self.step_in_episode += 1
        obs = np.array([self.step_in_episode, self.length, *action], np.float32)
        return obs, 100.0 + action[0], self.step_in_episode == self.length, False, {}


gym.register("PlainrlSacProbe-v0", Probe, max_episode_steps=LIMIT)
SETTINGS = ("--device cpu --env-id PlainrlSacProbe-v0 --total-timesteps 160 --num-envs 2 --learning-starts 41 "
            "--hidden-size 8 --batch-size 16 --eval-episodes 2 --eval-every 0").split()  # fmt: skip


def assert_transitions(obs, actions, rewards, terminated, next_obs) -> None:
    """Each row is a transition of Probe: its own true end, the action in [-1, 1] that arrived stretched to the bounds,
    and the reward as it was."""
    assert (np.abs(actions) <= 1).all()
    close(next_obs[:, 2:], [-1, 2] + (actions + 1) / 2 * [4, 0.5], 1e-5)
    close(rewards[:, 0], 100 + next_obs[:, 2], 1e-4)
    close(next_obs[:, 0], obs[:, 0] + 1)  # a reset's would be 0
    close(next_obs[:, 1], obs[:, 1])
    close(terminated[:, 0], next_obs[:, 0] == next_obs[:, 1])


def rows_of(folder, total: int = 160):
    rows = np.fromfile(folder / "replay.bin", np.float32).reshape(total, 12)
    return np.split(rows, [4, 6, 7, 8], 1)


@pytest.fixture(scope="module")
def probe_run(tmp_path_factory):
    """A short run: its folder, what `update` was called with each time, and the agent's state before the first."""
    calls, untrained, update = [], {}, sac.update

    def recording(agent, *others):
        if not calls:
            untrained.update({name: tensor.clone() for name, tensor in agent.state_dict().items()})
        calls.append((agent, *others))
        return update(agent, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sac, "update", recording)
        folder = new_run(sac, tmp_path_factory.mktemp("probe"), *SETTINGS, "--utd-ratio", 3)
    return folder, calls, untrained


def test_train_stores_true_transitions(probe_run):
    """In the file of the run: every row, every kind of end, and one episode after the other in each environment."""
    columns = rows_of(probe_run[0])
    assert_transitions(*columns)
    for i in range(2):
        obs, _, _, terminated, next_obs = (column[i::2] for column in columns)
        ended = (next_obs[:, 0] == next_obs[:, 1]) | (next_obs[:, 0] == LIMIT)
        kinds = set(zip(terminated[ended, 0], next_obs[ended, 0] == LIMIT))
        assert kinds == {(1, False), (1, True), (0, True)}  # terminated, both at once, cut off
        close(obs[1:][~ended[:-1]], next_obs[:-1][~ended[:-1]])
        close(obs[1:][ended[:-1]][:, [0, 2, 3]], 0.0)


def test_train_updates_on_what_it_stored(probe_run):
    """Minibatches are rows of the buffer as it was, in the columns that `update` takes them for, of all ages."""
    folder, calls, _ = probe_run
    stored = {tuple(row): i for i, row in enumerate(np.concatenate(rows_of(folder), 1))}
    seen = []
    for number, (_, _, batch, *_) in enumerate(calls):
        assert [x.shape for x in batch] == [(16, 4), (16, 2), (16, 1), (16, 1), (16, 4)]
        assert_transitions(*(x.numpy() for x in batch))
        indices = [stored[tuple(row)] for row in torch.cat(batch, 1).numpy()]
        assert max(indices) < 42 + 2 * (number // 6)  # 6 updates after each step of both environments, the first at 42
        seen += indices
    assert len(set(seen)) > 150 and len({tuple(x[2].obs.flatten().tolist()) for x in calls}) == len(calls)


def test_train_takes_every_update(probe_run):
    """utd-ratio updates for each step of an environment after learning_starts, by Adam at the learning rate for exactly
    actor, critics and temperature; all of them and the targets moved; target entropy is -(number of actions)."""
    folder, calls, untrained = probe_run
    updates = 3 * (160 - 40)  # steps 42, 44, .. 160, twice each
    assert len(calls) == updates
    agent, optimizers, _, _, args, *losses = calls[0]
    assert args.target_entropy == -2 and losses == [sac.critic_loss, sac.actor_loss]
    for optimizer, part in zip(optimizers, (agent.actor.parameters(), agent.critics.parameters(), [agent.log_alpha])):
        (group,) = optimizer.param_groups
        assert [id(x) for x in group["params"]] == [id(x) for x in part]
        assert type(optimizer) is torch.optim.Adam
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (3e-4, (0.9, 0.999), 1e-8, 0)
    saved = load_newest(folder / "checkpoints")
    for state in saved["optimizers"]:
        assert {x["step"].item() for x in state["state"].values()} == {updates}
    for name, tensor in weights(folder).items():
        assert not torch.equal(tensor, untrained[name]), name
        if name.startswith("targets"):  # they lag
            assert not torch.equal(tensor, weights(folder)[name.replace("targets", "critics")])


def test_train_explores_uniformly_then_acts(tmp_path, monkeypatch):
    """The first learning_starts steps are uniform in [-1, 1], later ones the policy's, which is given full noise and
    the observation that is stored with its action. Evaluation stretches actions too, likeliest ones without noise."""
    given = []

    def quarter(actor, space, obs, scale, generator):
        given.append((obs.copy(), scale))
        return np.full((len(obs), 2), 0.25, np.float32)

    monkeypatch.setattr(sac, "act", quarter)
    folder = new_run(sac, tmp_path, *SETTINGS, "--learning-starts", 120, "--alpha", 0.2)
    obs, actions = rows_of(folder)[:2]
    assert stats.kstest(actions[:120].flatten(), stats.uniform(-1, 2).cdf).pvalue > 0.01
    assert len(np.unique(actions[:120])) == 240 and (actions[120:] == 0.25).all()
    close(np.concatenate([x for x, _ in given[:20]]), obs[120:])
    assert all(scale == 1.0 for _, scale in given[:20])
    assert all(scale.flatten().tolist() == [0, 0, 1, 1] for _, scale in given[20:])
    (row,) = metrics(folder)
    close(row["eval/return"], row["eval/length"] * (100 - 1 + 1.25 / 2 * 4), 1e-3)
    assert weights(folder)["log_alpha"].item() == pytest.approx(math.log(0.2)) == pytest.approx(math.log(row["alpha"]))
    assert len(load_newest(folder / "checkpoints")["optimizers"]) == 2


def test_act_samples_the_policy():
    """`act` gives the actor's own actions: the likeliest for scale 0, for scale 1 those of the density."""
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


def test_to_env_stretches_to_the_bounds():
    """-1 and 1 are the bounds themselves, for bounds that are not symmetric and for actions that are not vectors."""
    space = gym.spaces.Box(np.array([[-1], [2]], np.float32), np.array([[3], [2.5]], np.float32))
    actions = np.array([[-1, -1], [1, 1], [0, 0.5]], np.float32)
    close(sac.to_env(actions, space)[:, :, 0], [[-1, 2], [3, 2.5], [1, 2.375]])
