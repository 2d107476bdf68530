"""gsde.py: the noise's covariance and the log-density by hand and by Monte-Carlo, against Stable-Baselines3, whole
updates by the second implementation of sac.py, and how long train() keeps a matrix. What it shares with sac.py is in
test_exact_sac.py."""

import numpy as np
import pytest
import torch
from control import WALK, assert_update_is, close, float64, randomise
from helpers import command_line, new_run
from reference.sac import Sac
from scipy import stats

from algos import gsde

D, A, H, B = 3, 2, 8, 16


def make_actor() -> gsde.Actor:
    return randomise(gsde.Actor(D, A, H, -1.0), 5, 0.6, 0.3)


def by_hand(actor: gsde.Actor, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """phi (B, F), the mean of u (B, A) and sigma (F, A), in NumPy."""
    p = {name: tensor.numpy() for name, tensor in actor.state_dict().items()}
    x = obs
    for i in (0, 2):
        x = np.maximum(x @ p[f"net.{i}.weight"].T + p[f"net.{i}.bias"], 0)
    return x, x @ p["net.4.weight"].T + p["net.4.bias"], np.exp(p["log_sigma"])


def observations(rows: int = B) -> torch.Tensor:
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(1))


class Gsde(Sac):
    def normal(self, obs):
        features = self.network("actor.net", obs, (0, 2))
        variance = features**2 @ np.exp(self.p["actor.log_sigma"]) ** 2 + 1e-6
        return self.network("actor.net", obs), np.log(variance) / 2


@float64()
def test_update_is_that_of_the_reference():
    """Gradients reach mean, deviations and features."""
    agent = randomise(gsde.Agent(D, A, H, 0.3, -1.0), 111, 0.4, 0.1)
    args = gsde.Args(gamma=0.9, tau=0.1, target_entropy=-1.5)
    _, own = assert_update_is(Gsde, gsde, agent, args)
    assert len(own.smallest) == 4


@float64()
def test_features_of_zero_leave_a_finite_density():
    actor = make_actor()
    with torch.no_grad():
        actor.net[2].bias.fill_(-100)
    actions, logps = actor(observations(), torch.ones(B, A))
    logps.sum().backward()
    close(actions, torch.tanh(actor.net[4].bias + 1e-3).expand(B, A))
    assert all(x.grad is None or x.grad.isfinite().all() for x in actor.parameters())


@float64()
def test_kept_noise_is_a_linear_function_of_the_features():
    """u - mean = theta^T phi, theta = sigma times the matrix; actions then are tanh(mean + theta^T phi)."""
    actor, obs = make_actor(), observations()
    matrices = torch.randn(B, H, A, generator=torch.Generator().manual_seed(3))
    phi, mean, sigma = by_hand(actor, obs.numpy())
    theta = matrices.numpy() * sigma
    wanted = np.stack([theta[i].T @ phi[i] for i in range(B)])
    close(actor(obs, actor.kept_noise(obs, matrices))[0], np.tanh(mean + wanted), 1e-9)


@float64()
def test_covariance_of_the_noise_between_states():
    """Over matrices, theta^T phi(s) and theta^T phi(s') have covariance phi(s)^T diag(sigma_k^2) phi(s') in action k,
    and none between actions: states that look alike get noise that is alike. In one state it never changes."""
    actor, draws = make_actor(), 40_000
    obs = observations(3)
    phi, mean, sigma = by_hand(actor, obs.numpy())
    matrices = torch.randn(draws, H, A, generator=torch.Generator().manual_seed(4))
    noise = []
    for state in obs:
        repeated = state.expand(draws, D)
        _, log_std, _ = actor.normal(repeated)
        noise.append((actor.kept_noise(repeated, matrices) * log_std.exp()).detach().numpy())
    found = np.cov(np.concatenate(noise, 1).T)
    wanted = np.zeros((3 * A, 3 * A))
    for i in range(3):
        for j in range(3):
            for k in range(A):
                wanted[A * i + k, A * j + k] = (phi[i] * sigma[:, k] ** 2 * phi[j]).sum()
    error = np.sqrt((np.outer(np.diag(wanted), np.diag(wanted)) + wanted**2) / draws)  # of a normal covariance
    assert (abs(found - wanted) < 5 * error + 1e-9).all()
    assert abs(wanted[0, A]) > 20 * error[0, A]  # two states do share noise


def test_densities_equal_stable_baselines3(tmp_path):
    """Its log_prob of our actions, from the same features, weights and deviations, but for its own 1e-6 in
    log(1 - a^2)."""
    distributions = pytest.importorskip("stable_baselines3.common.distributions", reason="not run: SB3 is missing")
    with float64():
        actor, obs = make_actor(), observations()
        theirs = distributions.StateDependentNoiseDistribution(A, learn_features=True, squash_output=True)
        theirs.proba_distribution_net(H, -1.0)
        noise = torch.randn(B, A, generator=torch.Generator().manual_seed(2)).clamp(-1, 1)
        mean, _, features = actor.normal(obs)
        actions, logps = actor(obs, noise)
        theirs.bijector.epsilon = 0.0
        theirs.proba_distribution(mean, actor.log_sigma, features)
        close(theirs.log_prob(actions), logps[:, 0], 1e-7)
        theirs.exploration_matrices = torch.randn(B, H, A) * actor.log_sigma.exp()
        matrices = theirs.exploration_matrices / actor.log_sigma.exp()
        close(theirs.sample(), actor(obs, actor.kept_noise(obs, matrices))[0], 1e-9)


@pytest.mark.parametrize("kept", [True, False])
def test_act_scales_the_noise(kept):
    """Of each row: 0 gives the likeliest action, 1 the noise of the matrices, or new noise."""
    actor, obs, generator = make_actor(), observations(), torch.Generator().manual_seed(0)
    space, matrices = gsde.gym.spaces.Box(-1, 1, (A,)), torch.randn(B, H, A, generator=generator) if kept else None
    likeliest = actor.normal(obs)[0].tanh().detach()
    scale = (torch.arange(B) % 2).float()[:, None]
    for given in (0.0, scale):
        actions = gsde.act(actor, space, obs.numpy(), given, generator, matrices)
        close(actions[::2], likeliest[::2], 1e-6)
    assert abs(actions[1::2] - likeliest[1::2].numpy()).min() > 1e-5
    if kept:
        close(actions[1::2], actor(obs, actor.kept_noise(obs, matrices))[0][1::2], 1e-6)


def test_a_matrix_is_kept_for_so_many_steps_of_each_environment(tmp_path, monkeypatch):
    """Each environment has its own; the random steps at the start count; evaluation draws new noise in each step."""
    given, whole = [], gsde.act

    def listening(actor, space, obs, scale, generator, matrices=None):
        given.append(matrices)
        return whole(actor, space, obs, scale, generator, matrices)

    monkeypatch.setattr(gsde, "act", listening)
    settings = ("--device cpu --total-timesteps 60 --num-envs 2 --learning-starts 10 --hidden-size 8 --batch-size 4 "
                "--eval-every 0 --eval-episodes 1 --sde-sample-freq 4").split() + WALK  # fmt: skip
    folder = new_run(gsde, tmp_path, *settings)
    command_line(gsde, "--resume", folder, "--total-timesteps", 64)
    kept, evaluated = given[:25], [x for x in given[25:] if x is None]  # steps 5, 6, .. 29 of each environment
    assert 0 < len(evaluated) == len(given) - 25 - 2  # a resumed run begins with a matrix
    changes = [step for step, (x, y) in enumerate(zip(kept, kept[1:]), 6) if not torch.equal(x, y)]
    assert changes == [8, 12, 16, 20, 24, 28]
    assert all(x.shape == (2, 8, 1) for x in kept)
    distinct = torch.stack(kept[::4]).flatten()
    assert len(distinct.unique()) == len(distinct) and stats.kstest(distinct.numpy(), "norm").pvalue > 0.01
