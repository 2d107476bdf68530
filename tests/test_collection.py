"""What sac.py --record-dataset writes: whole transitions of the environment, in order, of the policies D4RL names."""

import h5py
import numpy as np
import pytest
from helpers import new_run, user_error

from algos import sac
from utils.collection import save_collection

FLAGS = (
    "--device cpu --total-timesteps 1200 --learning-starts 300 --hidden-size 32 --batch-size 32 --learning-rate 3e-3 "
    "--tau 0.02 --eval-every 300 --eval-episodes 2 --record-steps 1000 --num-envs 2".split()
)


@pytest.fixture(scope="module")
def collections(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record")
    new_run(sac, folder / "runs", *FLAGS, "--record-dataset", folder / "data")
    return {path.stem: h5py.File(path) for path in sorted((folder / "data").glob("*.hdf5"))}


def test_the_five_of_d4rl(collections):
    """1000 transitions of each policy, and all that the buffer held: when the medium policy was reached, at the end."""
    assert set(collections) == {"random", "medium-replay", "medium", "full-replay", "expert"}
    about = {name: dict(file.attrs) for name, file in collections.items()}
    low, high = about["random"]["policy_return"], about["expert"]["policy_return"]
    assert about["random"]["policy_step"] == 0 and about["expert"]["policy_step"] == 1200
    assert about["medium"]["policy_return"] >= low + (high - low) / 3 or high < low
    assert about["medium"]["policy_step"] == about["medium-replay"]["policy_step"]
    sizes = {name: len(file["rewards"]) for name, file in collections.items()}
    replays = {"medium-replay": about["medium"]["policy_step"], "full-replay": 1200}
    assert sizes == {"random": 1000, "medium": 1000, "expert": 1000} | replays


@pytest.mark.parametrize("name", ["random", "medium-replay", "medium", "full-replay", "expert"])
def test_transitions_are_the_environment_s(collections, name):
    """Pendulum's equations lead from each observation and action to the reward, and to the next observation that a
    reader reconstructs: the row after, or the episode's last observation."""
    data = {key: column[:].astype(np.float64) for key, column in collections[name].items()}
    obs, action, ends = data["observations"], data["actions"][:, 0], data["timeouts"] > 0
    assert not data["terminals"].any() and ends.sum() == len(data["last_observations"]) and ends[-1]
    assert np.abs(action).max() <= 2 and np.abs(action).max() > 1  # the environment's units
    lengths = np.diff(np.flatnonzero(np.append(True, ends)))
    assert lengths.max() <= 200
    next_obs = np.roll(obs, -1, 0)
    next_obs[ends] = data["last_observations"]
    angle, speed = np.arctan2(obs[:, 1], obs[:, 0]), obs[:, 2]
    np.testing.assert_allclose(data["rewards"], -(angle**2 + 0.1 * speed**2 + 0.001 * action**2), atol=1e-4)
    new_speed = np.clip(speed + (15 * np.sin(angle) + 3 * action) * 0.05, -8, 8)
    expected = np.stack([np.cos(angle + new_speed * 0.05), np.sin(angle + new_speed * 0.05), new_speed], 1)
    np.testing.assert_allclose(next_obs, expected, atol=1e-4)


def test_ends_are_told_apart(tmp_path):
    """Row 1 terminates, row 3 is cut off, row 4 is the last there is."""
    obs = np.array([[0], [1], [5], [6], [9]], np.float32)
    next_obs = np.array([[1], [2], [6], [7], [10]], np.float32)
    save_collection(
        tmp_path / "a.hdf5", obs, obs, obs[:, 0], np.array([0, 1, 0, 0, 0], bool), next_obs, {"env_id": "x"}
    )
    with h5py.File(tmp_path / "a.hdf5") as file:
        assert file["terminals"][:].tolist() == [False, True, False, False, False]
        assert file["timeouts"][:].tolist() == [False, False, False, True, True]
        assert file["last_observations"][:, 0].tolist() == [2, 7, 10] and file.attrs["env_id"] == "x"


def test_what_cannot_be_recorded(tmp_path, capsys):
    for words in (["--buffer-size", "1000"], ["--record-steps", "15"]):
        with user_error(capsys, "--record-dataset needs"):
            new_run(sac, tmp_path, *FLAGS, "--record-dataset", tmp_path / "data", *words)
    (tmp_path / "file").write_text("")
    with user_error(capsys, "name a writable folder"):
        new_run(sac, tmp_path, *FLAGS, "--record-dataset", tmp_path / "file")
