"""diffusion_policy.py does what its authors' code does, commit 5ba07ac, and the scheduler of diffusers that it takes:
denoising steps, the averages' decay, windows. Recorded by benchmarks/peers/make_diffusion_fixtures.py."""

import numpy as np
import pytest
import torch
from control import close
from safetensors.numpy import load_file

from algos import diffusion_policy
from benchmarks.peers import make_diffusion_fixtures as authors
from utils.offline import Dataset


@pytest.mark.parametrize("steps", authors.LEVELS)
def test_denoising_steps(steps, monkeypatch):
    """A step back from their prediction and noise, and plans with noise."""
    recorded = {name: column for name, column in load_file(authors.PATH).items() if name.endswith(f"_{steps}")}
    for name, column in authors.make_inputs(steps).items():
        assert (recorded[f"{name}_{steps}"] == column).all(), "the fixture is of other inputs"
    args, asked = diffusion_policy.Args(diffusion_steps=steps, horizon=2, n_obs_steps=1), []
    actor, obs = diffusion_policy.Actor(3, authors.SIZE // 2, args), torch.zeros(authors.B, 3)
    for i, t in enumerate(authors.LEVELS[steps]):
        columns = {name.partition("_")[0]: torch.from_numpy(column[i]) for name, column in recorded.items()}
        monkeypatch.setattr(actor, "forward", lambda obs, x, k, p=columns["predicted"]: asked.append((x, k)) or p)
        k = torch.full((authors.B, 1), t + 1)
        mean, std = actor.step(obs, columns["x"], k)
        close(mean + std * columns["noise"], columns["before"], 1e-5)
        loss = diffusion_policy.noise_loss(actor, diffusion_policy.Windows(obs, columns["plan"]), columns["noise"], k)
        close(asked[-1][0], columns["noisy"], 1e-6)
        close(loss, ((columns["predicted"] - columns["noise"]) ** 2).mean(), 1e-6)
        assert asked[-1][1] is k


def test_decay_of_the_average():
    close([diffusion_policy.ema_decay(n, 0.75) for n in range(40)], load_file(authors.PATH)["decays"], 1e-12)


def test_windows():
    """Theirs are ours but for the rows of which T_a or more actions would be repeated at the end."""
    rows = np.zeros((sum(authors.LENGTHS), 1), np.float32)
    flags = rows[:, 0] > 0
    data = Dataset(rows, rows, rows[:, 0], flags, rows, ~flags, np.cumsum([0, *authors.LENGTHS[:-1]]))
    ours = diffusion_policy.windows(data, authors.T_O, authors.H)
    ends = np.repeat(np.cumsum(authors.LENGTHS), authors.LENGTHS)
    repeated = np.arange(len(rows)) + authors.H - authors.T_O - (ends - 1)
    assert ours[repeated < authors.T_A].tolist() == load_file(authors.PATH)["windows"].tolist()
    assert 10 < (repeated < authors.T_A).sum() < len(rows)
