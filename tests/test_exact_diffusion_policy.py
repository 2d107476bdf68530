"""diffusion_policy.py: the schedule, a denoising step by Bayes' rule, the chain of Gaussian data, whole updates by a
second implementation, and which action of which plan is executed when. What it shares with bc.py: test_exact_iql.py."""

from pathlib import Path

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from control import adam, close, float64, mlp, named, randomise
from helpers import SMALL, new_run
from small_data import pendulum

from algos import diffusion_policy
from algos.environments import detour
from utils.offline import Dataset, OfflineArgs, load_dataset

D, A, H, B, K = 3, 2, 4, 16, 7
MEAN, STD = 0.3, 0.2  # of the actions
ARGS = diffusion_policy.Args(hidden_size=8, horizon=H, n_obs_steps=2, n_action_steps=2, diffusion_steps=K)


def shares(steps: int) -> np.ndarray:
    """abar_0 .. abar_K: cos^2 at k / K over that at 0, but for the last step, which keeps a thousandth."""
    f = np.array([np.cos((k / steps + 0.008) / 1.008 * np.pi / 2) ** 2 for k in range(steps)])
    return np.append(f / f[0], f[-1] / f[0] / 1000)


def test_the_schedule():
    """Equation 17 of Nichol and Dhariwal. With one step a thousandth is left of the plan."""
    for steps in (1, K, 100):
        close(diffusion_policy.alpha_bars(steps), shares(steps), 1e-6)
    close(diffusion_policy.alpha_bars(1), [1, 0.001], 1e-9)
    assert diffusion_policy.alpha_bars(100)[50].item() == pytest.approx(0.4938, abs=1e-3)


def agent_of(seed: int = 3):
    return randomise(diffusion_policy.Agent(D, A, ARGS), seed, 0.5, 0.2)


@float64()
def test_a_step_is_bayes_rule():
    """x_k-1 before it is seen: N(sqrt(abar_k-1) plan, 1 - abar_k-1); seen by x_k ~ N(sqrt(1 - beta) x_k-1, beta)."""
    actor, bars, generator = agent_of().actor, shares(K), torch.Generator().manual_seed(0)
    obs, x = torch.randn(B, 2 * D, generator=generator), torch.randn(B, H * A, generator=generator)
    k = torch.arange(B)[:, None] % K + 1
    mean, std = actor.step(obs, x, k)
    now, before = bars[k], bars[k - 1]
    noise = mlp(named(actor), "net", torch.hstack([obs, x, k / K])).detach().numpy()
    plan = (x.numpy() - np.sqrt(1 - now) * noise) / np.sqrt(now)
    assert 0.2 < (abs(plan) > 1).mean() < 0.8
    with np.errstate(divide="ignore"):
        weights = 1 / (1 - before), now / before / (1 - now / before)  # precisions of x_k-1: before it is seen, by x_k
    guesses = np.sqrt(before) * plan.clip(-1, 1), x.numpy() / np.sqrt(now / before)
    with np.errstate(invalid="ignore"):
        expected = (weights[0] * guesses[0] + weights[1] * guesses[1]) / sum(weights)
    expected = np.where(k == 1, plan.clip(-1, 1), expected)  # the last step: nothing is left to draw
    close(mean, expected, 1e-9)
    close(std, 1 / np.sqrt(sum(weights)), 1e-9)
    assert std.shape == (B, 1) and (std[k == 1] == 0).all()


@pytest.mark.parametrize("steps, std, atol", [(1, 0.00127, 5e-4), (10, 0.1292, 0.002), (100, 0.1854, 0.003)])
def test_the_chain_of_gaussian_data(steps, std, atol, monkeypatch):
    """With the best prediction of the noise, samples have the data's mean, and a deviation that the exact recursion of
    the affine steps gives: with many steps the data's 0.2, with one almost none."""
    actor = diffusion_policy.Actor(D, 1, diffusion_policy.Args(diffusion_steps=steps, horizon=2, n_obs_steps=1))

    def best(obs, x, k):
        kept = torch.tensor(shares(steps)).float()[k]
        return (1 - kept).sqrt() * (x - kept.sqrt() * MEAN) / (kept * STD**2 + 1 - kept)

    monkeypatch.setattr(actor, "forward", best)
    plans = actor.sample(torch.zeros(20_000, D), torch.Generator().manual_seed(0))
    assert plans.shape == (20_000, 2)
    close(plans.mean(0), [MEAN] * 2, 0.005)
    close(plans.std(0), [std] * 2, atol)
    close(plans.T.corrcoef()[0, 1], 0, 0.03)


@float64()
def test_sampling_draws_from_its_generator_alone():
    actor, obs = agent_of().actor, torch.randn(B, 2 * D, generator=torch.Generator().manual_seed(1))
    twin, before = torch.Generator().manual_seed(5), torch.get_rng_state()
    plans = actor.sample(obs, torch.Generator().manual_seed(5))
    x = torch.randn(B, H * A, generator=twin)
    for k in range(K, 0, -1):
        mean, std = actor.step(obs, x, torch.full((B, 1), k))
        x = mean + std * torch.randn(B, H * A, generator=twin)
    close(plans, x)
    assert torch.equal(torch.get_rng_state(), before)


@float64()
def test_updates_equal_a_second_implementation():
    """Three updates. Noise and levels, one a row, come from the generator alone. The average follows."""
    agent, bars = agent_of(), torch.tensor(shares(K))
    agent.average.load_state_dict(agent.actor.state_dict())
    optimizer = torch.optim.Adam(agent.actor.parameters(), 1e-2)
    p, moments, generator, twin = named(agent), {}, torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    before, levels = torch.get_rng_state(), []
    for step in range(3):
        rows = torch.Generator().manual_seed(step)
        shapes = (B, 2 * D), (B, H * A)
        batch = diffusion_policy.Windows(*(torch.rand(shape, generator=rows) * 2 - 1 for shape in shapes))
        numbers = diffusion_policy.update(agent, optimizer, batch, generator, 0.25 * step)
        noise, k = torch.randn(B, H * A, generator=twin), torch.randint(1, K + 1, (B, 1), generator=twin)
        x = bars[k] ** 0.5 * batch.actions + (1 - bars[k]) ** 0.5 * noise
        loss = ((mlp(p, "actor.net", torch.hstack([batch.obs, x, k / K])) - noise) ** 2).sum() / (B * H * A)
        adam(p, moments, "actor", loss, 1e-2)
        close(numbers["loss"], loss)
        for name in [name for name in p if name.startswith("average")]:
            p[name] = 0.25 * step * p[name] + (1 - 0.25 * step) * p[name.replace("average", "actor")]
        for name, tensor in agent.state_dict().items():
            close(tensor, p[name])
        levels += k.flatten().tolist()
    assert torch.equal(torch.get_rng_state(), before) and set(levels) == set(range(1, K + 1))


def test_windows_by_hand():
    """Trajectories of 3 and 2 rows. Plans stay within their own: its first or last row is repeated."""
    rows, flags = np.zeros((5, 1), np.float32), np.zeros(5, bool)
    data = Dataset(rows, rows, rows[:, 0], flags, rows, ~flags, np.array([0, 3]))
    by_hand = [[0, 0, 1, 2], [0, 1, 2, 2], [1, 2, 2, 2], [3, 3, 4, 4], [3, 4, 4, 4]]
    assert diffusion_policy.windows(data, 2, 4).tolist() == by_hand
    assert diffusion_policy.windows(data, 1, 1).tolist() == [[0], [1], [2], [3], [4]]


@pytest.mark.parametrize("n_obs_steps, n_action_steps", [(1, 1), (2, 3), (3, 2)])
def test_which_action_is_executed_when(n_obs_steps, n_action_steps):
    """Action i of plan p is (p + i / 10) / 8. A new plan sees the last observations, at the start the first one again.
    The environments write into one array."""
    args, seen, obs = (
        diffusion_policy.Args(n_obs_steps=n_obs_steps, n_action_steps=n_action_steps),
        [],
        np.zeros((2, D)),
    )

    class Fake:
        def sample(self, given, generator):
            seen.append(given.clone())
            return ((len(seen) + torch.arange(16.0) / 10) / 8).repeat_interleave(A).expand(2, 16 * A)

    space, generator = gym.spaces.Box(-2, 2, (A,)), torch.Generator()
    act = diffusion_policy.act_in_evaluation(Fake(), space, args)
    for step in range(7):
        obs[:] = [[step], [step + 100]]
        plan, i = divmod(step, n_action_steps)
        close(act(obs, 1.0, generator), np.full((2, A), (plan + 1 + (n_obs_steps - 1 + i) / 10) / 4), 1e-6)
        if i == 0:
            steps = np.arange(step + 1 - n_obs_steps, step + 1).clip(0).repeat(D)
            assert seen[-1].tolist() == [steps.tolist(), (steps + 100).tolist()]
    assert len(seen) == plan + 1


def test_what_train_hands_on(tmp_path, monkeypatch):
    """The rows of the best trajectories, actions in [-1, 1]; the average acts, with the warm-up of its decay."""
    stored, decays, acted, real, update = [], [], [], diffusion_policy.ReplayBuffer, diffusion_policy.update
    makes_actions = diffusion_policy.act_in_evaluation
    monkeypatch.setattr(diffusion_policy, "ReplayBuffer", lambda *given: stored.append(real(*given)) or stored[0])
    monkeypatch.setattr(diffusion_policy, "update", lambda agent, *given: (
        decays.append((agent, given[-1])), update(agent, *given))[1])  # fmt: skip
    monkeypatch.setattr(diffusion_policy, "act_in_evaluation", lambda *given: (
        acted.append(given[0]), makes_actions(*given))[1])  # fmt: skip
    path = pendulum(tmp_path / "d.hdf5")
    new_run(diffusion_policy, tmp_path / "runs", *SMALL["diffusion_policy"], "--dataset", path, "--top-fraction", 0.2)
    data = load_dataset(OfflineArgs(dataset=str(path)))
    taken = np.flatnonzero(diffusion_policy.top_rows(data, 0.2))
    rows = diffusion_policy.windows(data, 2, 4)[taken]
    obs, actions = stored[0].rows.split(stored[0].sizes, 1)
    close(obs, np.hstack([data.obs[rows[:, 0]], data.obs[rows[:, 1]]]))
    close(actions, data.actions[rows][:, :, 0] / 2, 1e-6)
    assert taken.tolist() == list(range(40, 80))
    agent = decays[0][0]
    assert len(acted) > 1 and all(actor is agent.average for actor in acted)
    by_hand = [0.0, 0.0, 1 - 2**-0.75, 1 - 3**-0.75]
    assert [decay for _, decay in decays[:4]] == pytest.approx(by_hand)
    assert diffusion_policy.ema_decay(10**9, 0.75) == 0.9999 and not torch.equal(
        agent.average.net[0].weight, agent.actor.net[0].weight)  # fmt: skip


@pytest.mark.parametrize("place", [False, True])
def test_the_shipped_walks(place, tmp_path):
    """They are what detour.py records. All arrive, at either gate; who turns back ends at the wall."""
    detour.record(tmp_path / "new.hdf5", place)
    path = Path(detour.__file__).with_name("detour_place.hdf5" if place else "detour.hdf5")
    with h5py.File(tmp_path / "new.hdf5") as new, h5py.File(path) as shipped:
        assert new.keys() == shipped.keys() and dict(new.attrs) == dict(shipped.attrs)
        assert all((new[key][:] == shipped[key][:]).all() for key in new)
        assert new["rewards"][:].sum() == 500 and abs(new["actions"][:].mean()) < 0.1
        assert new["observations"].shape == (4000, 3 if place else 2)
    for turns in (0, 1, 4):
        env, total = detour.Detour(place), 0.0
        (gate, *_), _ = env.reset(seed=0)
        for step in range(8):
            obs, reward, over, *_ = env.step(np.array([-gate if step < turns else gate]))
            assert over == (step == 7) and obs[1] == (step + 1) / 8
            total += reward
        assert total == (turns == 0)
        assert not place or obs[2] == pytest.approx(gate * (1 - turns / 4))
