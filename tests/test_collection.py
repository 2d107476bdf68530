"""What benchmarks/record_suite.py writes: whole steps of the environment, in order, of the agents that D4RL names, and
where each episode ended."""

from dataclasses import replace

import h5py
import numpy as np
import pytest

from algos import sac
from benchmarks.record_suite import Recorder, record, save
from utils.control import make_env
from utils.offline import OfflineArgs, load_dataset

NAMES = ["random", "medium", "medium-replay", "medium-expert", "full-replay", "expert"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record")
    args = sac.Args(device="cpu", threads=1, env_kwargs=("max_episode_steps=70",), total_timesteps=1000,
                    learning_starts=100, hidden_size=16, batch_size=64, learning_rate=6e-3, eval_every=250,
                    eval_episodes=2, output_dir=str(folder / "runs"))  # fmt: skip
    record(args, folder, 300)
    record(replace(args, learning_starts=1000), folder / "nothing", 10)
    return folder


def columns(path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {key: column[:].astype(np.float64) for key, column in file.items()}


def test_the_six_of_d4rl(folder):
    data = {path.stem: columns(path) for path in folder.glob("*.hdf5")}
    with h5py.File(folder / "medium.hdf5") as file:
        about = dict(file.attrs)
    sizes = dict(zip(NAMES, [300, 300, about["medium_step"], 600, 1000, 300]))
    assert {name: len(file["rewards"]) for name, file in data.items()} == sizes
    assert about["medium_step"] in (250, 500, 750, 1000) and about["env_id"] == "Pendulum-v1"
    for key in data["medium"]:  # joined
        both = np.concatenate([data["medium"][key], data["expert"][key]])
        assert (both == data["medium-expert"][key]).all()
    for key in ("observations", "actions", "rewards"):  # the beginning of the same
        part = data["medium-replay"][key]
        assert (part == data["full-replay"][key][: len(part)]).all()
    assert len({data[name]["actions"].std() for name in ("random", "expert")}) == 2


def test_who_has_learned_nothing_is_no_expert(folder):
    assert {path.stem for path in (folder / "nothing").glob("*.hdf5")} == {"random", "full-replay"}


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_the_environment_s(folder, name):
    """Pendulum's equations lead from each observation and action to the reward and to the next observation, which is
    the row after, or the episode's last one. Episodes have 70 steps, but for the last of a recording."""
    data = columns(folder / f"{name}.hdf5")
    obs, action = data["observations"], data["actions"][:, 0]
    read = load_dataset(OfflineArgs(dataset=str(folder / f"{name}.hdf5")))
    assert np.abs(action).max() <= 2 and np.abs(action).max() > 1  # the environment's units
    assert read.known.all() and not read.terminated.any()
    parts = [300, 300] if name == "medium-expert" else [len(obs)]
    lengths = [length for part in parts for length in [70] * (part // 70) + [part % 70] * (part % 70 > 0)]
    assert np.diff(read.starts, append=len(obs)).tolist() == lengths
    angle, speed = np.arctan2(obs[:, 1], obs[:, 0]), obs[:, 2]
    np.testing.assert_allclose(data["rewards"], -(angle**2 + 0.1 * speed**2 + 0.001 * action**2), atol=1e-4)
    new_speed = np.clip(speed + (15 * np.sin(angle) + 3 * action) * 0.05, -8, 8)
    expected = np.stack([np.cos(angle + new_speed * 0.05), np.sin(angle + new_speed * 0.05), new_speed], 1)
    np.testing.assert_allclose(read.next_obs, expected, atol=1e-4)


def test_ends_are_the_environment_s(tmp_path):
    """Walk ends by itself, by time or both; it writes all observations into one array and changes actions in place. A
    cut is known also where the next episode begins where the last one ended, and where a recording stops."""
    args = sac.Args(env_id="environments:Walk-v0", env_kwargs=("max_episode_steps=4", "size=2"))
    env, steps = Recorder(make_env(args)), []
    while len(steps) < 100:
        obs, ends = env.reset(seed=len(steps) % 9)[0].copy(), [False]
        while not any(ends):
            next_obs, reward, *ends, _ = env.step(np.float32([1]))
            steps.append((obs, np.float32(1), np.float32(reward), *ends, next_obs.copy()))
            obs = next_obs.copy()
    assert {step[3:5] for step in steps} == {(False, False), (True, False), (False, True), (True, True)}
    stop = next(i for i in range(50, 100) if not any(steps[i][3:5])) + 1
    save(tmp_path / "a.hdf5", {"env_id": args.env_id}, env.rows[:stop], env.rows)
    obs, actions, rewards, terminals, timeouts, next_obs = map(np.array, zip(*steps[:stop], *steps))
    data, timeouts[stop - 1] = load_dataset(OfflineArgs(dataset=str(tmp_path / "a.hdf5"))), True
    assert (columns(tmp_path / "a.hdf5")["timeouts"] == timeouts).all() and data.known.all()
    assert data.starts.tolist() == [0, *np.flatnonzero((terminals | timeouts)[:-1]) + 1]
    for ours, column in {"obs": obs, "actions": actions[:, None], "rewards": rewards, "terminated": terminals,
                         "next_obs": next_obs}.items():  # fmt: skip
        np.testing.assert_array_equal(getattr(data, ours), column.astype(getattr(data, ours).dtype))
