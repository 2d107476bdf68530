"""diffusion_policy.py: the chain of Gaussian data, whole updates by a second implementation, and which action of which
plan is executed when. One denoising step, and the windows: test_parity_diffusion_policy.py."""

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
from utils.offline import OfflineArgs, load_dataset

D, A, H, B, K = 3, 2, 4, 16, 7
MEAN, STD = 0.3, 0.2  # of the actions
ARGS = diffusion_policy.Args(hidden_size=8, horizon=H, n_obs_steps=2, n_action_steps=2, diffusion_steps=K)


def shares(steps: int) -> torch.Tensor:
    """abar_0 .. abar_K: cos^2 at k / K over that at 0, but for the last step, which keeps a thousandth."""
    f = [np.cos((k / steps + 0.008) / 1.008 * np.pi / 2) ** 2 for k in range(steps)]
    return torch.tensor([*f, f[-1] / 1000], dtype=torch.get_default_dtype()) / f[0]


@pytest.mark.parametrize("steps, std, atol", [(1, 0.00127, 5e-4), (10, 0.1292, 0.002), (100, 0.1854, 0.003)])
def test_the_chain_of_gaussian_data(steps, std, atol, monkeypatch):
    """With the best prediction of the noise, samples have the data's mean, and a deviation that the exact recursion of
    the affine steps gives: with many steps the data's 0.2, with one almost none."""
    actor = diffusion_policy.Actor(D, 1, diffusion_policy.Args(diffusion_steps=steps, horizon=2, n_obs_steps=1))

    def best(obs, x, k):
        kept = shares(steps)[k]
        return (1 - kept).sqrt() * (x - kept.sqrt() * MEAN) / (kept * STD**2 + 1 - kept)

    monkeypatch.setattr(actor, "forward", best)
    plans = actor.sample(torch.zeros(20_000, D), torch.Generator().manual_seed(0))
    close(plans.mean(0), [MEAN] * 2, 0.005)
    close(plans.std(0), [std] * 2, atol)


@float64()
def test_updates_equal_a_second_implementation():
    """Three updates. Noise and levels, one a row, come from the generator alone. The average follows."""
    agent, levels, moments = randomise(diffusion_policy.Agent(D, A, ARGS), 3, 0.5, 0.2), set(), {}
    optimizer = torch.optim.Adam(agent.actor.parameters(), 1e-2)
    p, generator, twin, rows = named(agent), *(torch.Generator().manual_seed(seed) for seed in (4, 4, 5))
    for step in range(3):
        shapes = (B, 2 * D), (B, H * A)
        batch = diffusion_policy.Windows(*(torch.rand(shape, generator=rows) * 2 - 1 for shape in shapes))
        numbers = diffusion_policy.update(agent, optimizer, batch, generator, 0.25 * step)
        noise, k = torch.randn(B, H * A, generator=twin), torch.randint(1, K + 1, (B, 1), generator=twin)
        x = shares(K)[k] ** 0.5 * batch.actions + (1 - shares(K)[k]) ** 0.5 * noise
        loss = ((mlp(p, "actor.net", torch.hstack([batch.obs, x, k / K])) - noise) ** 2).sum() / (B * H * A)
        adam(p, moments, "actor", loss, 1e-2)
        close(numbers["loss"], loss)
        for name, tensor in agent.state_dict().items():
            if name.startswith("average"):
                p[name] = 0.25 * step * p[name] + (1 - 0.25 * step) * p[name.replace("average", "actor")]
            close(tensor, p[name])
        levels |= set(k.flatten().tolist())
    assert levels == set(range(1, K + 1))


@pytest.mark.parametrize("n_obs_steps, n_action_steps", [(1, 1), (2, 3), (3, 2)])
def test_which_action_is_executed_when(n_obs_steps, n_action_steps):
    """Action i of plan p is (p + i / 10) / 8. A new plan sees the last observations, at the start the first one again.
    The environments write into one array."""
    args = diffusion_policy.Args(n_obs_steps=n_obs_steps, n_action_steps=n_action_steps)
    seen, obs = [], np.zeros((2, D))

    class Fake:
        def sample(self, given, generator):
            seen.append(given.tolist())
            return ((len(seen) + torch.arange(16.0) / 10) / 8).repeat_interleave(A).expand(2, 16 * A)

    act = diffusion_policy.act_in_evaluation(Fake(), gym.spaces.Box(-2, 2, (A,)), args)
    for step in range(7):
        obs[:] = [[step], [step + 100]]
        plan, i = divmod(step, n_action_steps)
        close(act(obs, 1.0, torch.Generator()), [[(plan + 1 + (n_obs_steps - 1 + i) / 10) / 4] * A] * 2, 1e-6)
        steps = np.arange(step + 1 - n_obs_steps, step + 1).clip(0).repeat(D)
        assert len(seen) == plan + 1 and (i > 0 or seen[-1] == [steps.tolist(), (steps + 100).tolist()])


def test_what_train_hands_on(tmp_path, monkeypatch):
    """The rows of the best trajectory, actions in [-1, 1]; the average acts, with the warm-up of its decay."""
    calls = {name: [] for name in ("ReplayBuffer", "update", "act_in_evaluation")}
    for name, kept in calls.items():
        spy = lambda *x, kept=kept, real=vars(diffusion_policy)[name]: kept.append((x, real(*x))) or kept[-1][1]  # noqa
        monkeypatch.setattr(diffusion_policy, name, spy)
    path = pendulum(tmp_path / "d.hdf5")
    new_run(diffusion_policy, tmp_path / "runs", *SMALL["diffusion_policy"], "--dataset", path, "--top-fraction", 0.2)
    data, [(_, replay)] = load_dataset(OfflineArgs(dataset=str(path))), calls["ReplayBuffer"]
    rows = diffusion_policy.plan_rows(data, 2, 4)[40:80]  # of the second trajectory, the best one
    close(replay.rows, np.hstack([data.obs[rows[:, 0]], data.obs[rows[:, 1]], data.actions[rows][:, :, 0] / 2]), 1e-6)
    assert all(given[0] is calls["update"][0][0][0].average for given, _ in calls["act_in_evaluation"])
    assert [given[-1] for given, _ in calls["update"][:3]] == pytest.approx([0.0, 0.0, 1 - 2**-0.75])
    assert diffusion_policy.ema_decay(10**9, 0.75) == 0.9999


@pytest.mark.parametrize("place", [False, True])
def test_the_shipped_walks(place, tmp_path):
    """They are what detour.py records, and all arrive; who turns back ends at the wall."""
    detour.record(tmp_path / "new.hdf5", place)
    path = Path(detour.__file__).with_name("detour_place.hdf5" if place else "detour.hdf5")
    with h5py.File(tmp_path / "new.hdf5") as new, h5py.File(path) as shipped:
        assert new.keys() == shipped.keys() and dict(new.attrs) == dict(shipped.attrs)
        assert all((new[key][:] == shipped[key][:]).all() for key in new)
        assert new["rewards"][:].sum() == 500 and abs(new["actions"][:].mean()) < 0.1
    env = detour.Detour(place)
    gate = env.reset(seed=0)[0][0]
    steps = [env.step(np.array([-gate if i == 0 else gate])) for i in range(8)]
    assert [step[1:3] for step in steps] == [(0, False)] * 7 + [(0, True)]
    assert steps[-1][0].tolist() == pytest.approx([gate, 1, 0.75 * gate][: 2 + place])
