"""Reading datasets: every format gives the transitions that were stored, and a wrong file is named in one sentence."""

import json
import pickle
import shutil
import sys
from collections import OrderedDict
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import h5py
import minari
import numpy as np
import pytest
from control import BANDIT, CONTROL, OFFLINE
from every_script import options
from gymnasium.spaces import Box, Dict, Discrete, Tuple, flatten
from helpers import SMALL, command_line, metrics, new_run, runs_in, user_error
from minari.data_collector import EpisodeBuffer
from small_data import pendulum

from algos import bc
from algos.dt import whole
from benchmarks.record_suite import save
from utils.control import make_env
from utils.core import UserError
from utils.offline import KEYS, Dataset, OfflineArgs, check_spaces, compared, load_dataset

WALK = {"env_id": "environments:Walk-v0", "random_return": -30.0, "expert_return": -10.0}
D4RL_CONSTANTS = {"Hopper-v4": (-20.272305, 3234.3), "HalfCheetah-v4": (-280.178953, 12135.0),
                  "Walker2d-v4": (1.629008, 4592.3)}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari", "ignore:.*env_spec is None.*")


def write(path, about=None, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            file[name] = column
        file.attrs.update(about or {})
    return path


def load(path, **args) -> Dataset:
    return load_dataset(OfflineArgs(dataset=str(path), **args))


def refused(path, *words, **args) -> None:
    with pytest.raises(UserError) as error:
        load(path, **args)
    message = str(error.value)
    assert str(path) in message and not [word for word in words if word not in message], message


def d4rl_columns(seed=0, n=60, last="cut", flags=bool, sizes=(2, 1)) -> dict:
    """Random rows; row 4 terminates when time is up, row 5 is an episode of one step; `last`: what ends the last."""
    rng = np.random.default_rng(seed)
    terminals, timeouts = rng.random((2, n)) < 0.15
    terminals[4] = timeouts[4] = terminals[5] = True
    terminals[-1], timeouts[-1] = last in ("terminal", "both"), last in ("timeout", "both")
    return {"observations": rng.normal(size=(n, sizes[0])).astype(np.float32),
            "actions": rng.uniform(-1, 1, (n, sizes[1])).astype(np.float32),
            "rewards": rng.normal(size=n).astype(np.float32),
            "terminals": terminals.astype(flags), "timeouts": timeouts.astype(flags)}  # fmt: skip


def collection(path, seed=0, about=WALK, episodes=12) -> dict:
    """Of each two episodes one terminates and one is cut off. Returns what a reader must find."""
    rng, rows, starts = np.random.default_rng(seed), [], []
    for k in range(episodes):
        starts.append(len(rows))
        places = rng.normal(size=(rng.integers(1, 8) + 1, 2)).astype(np.float32)
        actions = rng.uniform(-1, 1, (len(places), 1)).astype(np.float32)
        rows += [(place, action, np.float32(rng.normal()), False, False, next_place)
                 for place, action, next_place in zip(places, actions, places[1:])]  # fmt: skip
        rows[-1] = (*rows[-1][:3], k % 2 > 0, k % 2 == 0, rows[-1][5])
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path, about, rows)
    obs, actions, rewards, terminated, _, next_obs = map(np.array, zip(*rows))
    return dict(obs=obs, actions=actions, rewards=rewards, terminated=terminated, next_obs=next_obs,
                starts=np.array(starts))  # fmt: skip


def assert_holds(data: Dataset, expected: dict) -> None:
    for name, column in expected.items():
        ours = getattr(data, name)
        assert ours.dtype == (bool if name == "terminated" else int if name == "starts" else np.float32), name
        np.testing.assert_array_equal(ours, column, name)


# --- D4RL ---


def qlearning_dataset(columns: dict) -> dict:
    """What d4rl.qlearning_dataset does with a file that has timeouts, one row after the other."""
    rows = {"obs": [], "actions": [], "rewards": [], "terminated": [], "next_obs": []}
    for i in range(len(columns["rewards"]) - 1):
        if columns["timeouts"][i]:
            continue
        rows["obs"].append(columns["observations"][i].astype(np.float32))
        rows["next_obs"].append(columns["observations"][i + 1].astype(np.float32))
        rows["actions"].append(columns["actions"][i].astype(np.float32))
        rows["rewards"].append(columns["rewards"][i].astype(np.float32))
        rows["terminated"].append(bool(columns["terminals"][i]))
    return {name: np.array(column) for name, column in rows.items()}


def sequences(columns: dict) -> list[list[int]]:
    """Rows of each trajectory, as d4rl.sequence_dataset yields them, and the one that the file's end cuts off."""
    found, rows = [], []
    for i in range(len(columns["rewards"])):
        rows.append(i)
        if columns["terminals"][i] or columns["timeouts"][i]:
            found.append(rows)
            rows = []
    return found + [rows] if rows else found


@pytest.mark.parametrize("last", ["cut", "terminal", "timeout", "both"])
@pytest.mark.parametrize("flags", [np.float32, bool, np.uint8])
def test_d4rl_transitions(last, flags, tmp_path):
    """The rows whose next observation is known are those of D4RL's own function; trajectories end where its do."""
    for seed in range(3):
        columns = d4rl_columns(seed, last=last, flags=flags)
        extra = {"infos/qpos": np.zeros((60, 1)), "metadata/algorithm": "SAC"}
        data = load(write(tmp_path / "hopper_medium-v2.hdf5", **columns, **extra))
        expected = qlearning_dataset(columns)
        assert 0 < expected["terminated"].sum() and len(expected["obs"]) < 59 and data.d4rl
        for name, column in expected.items():
            np.testing.assert_array_equal(getattr(data, name)[data.known], column, name)
        rows = sequences(columns)
        assert data.starts.tolist() == [trajectory[0] for trajectory in rows]


def test_a_file_s_own_last_row(tmp_path):
    """Where it is terminal it needs no next observation: a demonstration may be rewarded there alone. D4RL's reader
    leaves it out all the same. A name alone does not make a file D4RL's."""
    for last, used in (("terminal", True), ("timeout", False), ("both", False), ("cut", False)):
        columns = d4rl_columns(last=last)
        own = load(write(tmp_path / "hopper-mine.hdf5", **columns), env_id="Hopper-v5")
        assert own.known[-1] == used and not own.d4rl and own.score(1.0) == {}
        d4rl = load(write(tmp_path / "hopper_medium-v2.hdf5", **columns))
        assert not d4rl.known[-1] and d4rl.d4rl and (own.known[:-1] == d4rl.known[:-1]).all()
    refused(tmp_path / "hopper-mine.hdf5", "--env-id")


def test_d4rl_s_last_trajectory_may_be_cut_off(tmp_path):
    """dt.py leaves it out, as the authors' download script: its returns-to-go would be too small."""
    for last in ("cut", "timeout", "terminal"):
        columns = d4rl_columns(last=last)
        data = whole(load(write(tmp_path / "hopper_medium.hdf5", **columns)))
        rows = sequences(columns)
        kept = rows[:-1] if last == "cut" else rows
        assert data.starts.tolist() == [trajectory[0] for trajectory in kept]
        for name, column in {"obs": "observations", "actions": "actions", "rewards": "rewards"}.items():
            np.testing.assert_array_equal(getattr(data, name), columns[column][: sum(map(len, kept))])
        assert len(data.known) == len(data.terminated) == len(data.next_obs) == len(data.obs)
        assert whole(data) is data
    columns |= {key: np.zeros(60, bool) for key in ("terminals", "timeouts")}
    with pytest.raises(UserError, match="hopper_medium.hdf5 has no trajectory that ends"):
        whole(load(write(tmp_path / "hopper_medium.hdf5", **columns)))
    collection(tmp_path / "b.hdf5")
    found = load(tmp_path / "b.hdf5")
    assert whole(found) is found


@pytest.mark.parametrize("name, env_id", [("hopper_medium-v2", "Hopper-v4"), ("walker2d-random-v2", "Walker2d-v4"),
                                          ("HalfCheetah_Medium_Expert-v2", "HalfCheetah-v4"), ("ant_medium-v2", None),
                                          ("hopperbullet-v0", None)])  # fmt: skip
def test_d4rl_names_tell_the_environment(name, env_id, tmp_path):
    path = write(tmp_path / f"{name}.hdf5", **d4rl_columns())
    if env_id is None:
        refused(path, "--env-id")
        assert not load(path, env_id="Any-v0").d4rl
    else:
        args = OfflineArgs(dataset=str(path))
        assert load_dataset(args).env_id == args.env_id == env_id


# --- next_observations ---


def linked(shuffled: bool) -> dict:
    """D4RL's columns with next_observations; `shuffled`: single transitions."""
    columns = d4rl_columns(last="terminal")
    ends = columns["terminals"] | columns["timeouts"]
    following = np.roll(columns["observations"], -1, 0)
    following[ends] = 7 + np.arange(ends.sum())[:, None]
    order = np.random.default_rng(1).permutation(60) if shuffled else np.arange(60)
    return {name: column[order] for name, column in (columns | {"next_observations": following}).items()}


@pytest.mark.parametrize("name", ["mine", "hopper_medium-v2"])
def test_next_observations_are_used(name, tmp_path):
    """Also those of time-outs and of rows that do not follow each other, which are no trajectories. Of D4RL's own files
    they are left out; a name alone does not make shuffled rows D4RL's."""
    for shuffled in (False, True):
        columns = linked(shuffled)
        data = load(write(tmp_path / f"{name}.hdf5", **columns), env_id="Hopper-v4")
        if data.d4rl:
            expected = qlearning_dataset(columns)
            np.testing.assert_array_equal(data.next_obs[data.known], expected["next_obs"])
        else:
            assert data.known.all()
            np.testing.assert_array_equal(data.next_obs, columns["next_observations"])
        assert data.d4rl == (name != "mine" and not shuffled) and data.in_order != shuffled
        if shuffled:
            for asked in (data.lengths, data.trajectory_returns):
                with pytest.raises(UserError, match="has no trajectories"):
                    asked()
        else:
            assert data.starts.tolist() == [rows[0] for rows in sequences(columns)]


@pytest.mark.parametrize("algo", OFFLINE)
def test_shuffled_transitions(algo, tmp_path, capsys):
    """Scripts take them, but where they need trajectories."""
    path, more = pendulum(tmp_path / "d.hdf5"), ["--max-steps", 4, "--eval-episodes", 0, "--env-id", "Pendulum-v1"]
    with h5py.File(path, "a") as file:
        obs, ends, order = file["observations"][:], file["timeouts"][:], np.random.default_rng(0).permutation(240)
        following = np.roll(obs, -1, 0)
        following[ends] = file["last_observations"][:]
        del file["last_observations"]
        for name, column in {"next_observations": following, **{key: file[key][:] for key in KEYS}}.items():
            file[name][:] = column[order] if name in file else file.create_dataset(name, data=column[order])[:]
    more = [x for x in more if algo != "rlpd" or x not in ("--max-steps", 4)]
    more = [*SMALL[algo], *more, "--dataset", path, "--output-dir", tmp_path]
    if algo in ("dt", "cal_ql", "diffusion_policy"):
        with user_error(capsys, "has no trajectories"):
            command_line(CONTROL[algo], *more)
        return
    flags = {"--top-fraction": (1, 0.5), "--rewards": ("raw", "return-range")}
    flags = {flag: values for flag, values in flags.items() if flag[2:].replace("-", "_") in options(algo)}
    command_line(CONTROL[algo], *more, *(x for flag, values in flags.items() for x in (flag, values[0])))
    assert " 240 transitions taken of 240" in capsys.readouterr().out
    for flag, (none, some) in flags.items():
        with user_error(capsys, "has no trajectories", f"{flag} {none}"):
            command_line(CONTROL[algo], *more, flag, some)


# --- our collections ---


@pytest.mark.parametrize("seed", range(3))
def test_collections_are_read_as_saved(seed, tmp_path):
    """Each row's next observation, also at ends, what terminated, and where it comes from. The name tells nothing."""
    about = WALK | {"env_kwargs": '["size=5", "label=a b"]'}
    saved = collection(tmp_path / "hopper_medium-v2.hdf5", seed, about)
    args = OfflineArgs(dataset=str(tmp_path / "hopper_medium-v2.hdf5"))
    data = load_dataset(args)
    assert_holds(data, saved)
    assert data.known.all() and not data.d4rl and data.returns == (-30.0, -10.0)
    assert args.env_id == data.env_id == "environments:Walk-v0" and args.env_kwargs == ("size=5", "label=a b")
    assert 0 < saved["terminated"].sum() < len(saved["starts"])


def test_what_is_typed_goes_before_what_is_recorded(tmp_path):
    collection(tmp_path / "a.hdf5", about=WALK | {"env_kwargs": '["size=5"]'})
    args = OfflineArgs(dataset=str(tmp_path / "a.hdf5"), env_kwargs=("size=7",))
    load_dataset(args)
    assert args.env_kwargs == ("size=7",) and args.env_id == "environments:Walk-v0"
    args = OfflineArgs(dataset=str(tmp_path / "a.hdf5"), env_id="Other-v0")
    load_dataset(args)
    assert args.env_id == "Other-v0" and args.env_kwargs == ()


# --- Minari ---

FORCE = Box(-2, 2, (1,))
PART = Box(-1, 1, (2, 2), np.float64)
SPACES = {
    "box": Box(-1, 1, (3,), np.float32),
    "matrix": PART,
    "dict": Dict({"desired": Box(-1, 1, (2,), np.float64), "achieved": PART, "z": Box(-1, 1, (), np.float32)}),
    "nested": Dict(a=Tuple([PART, Box(-1, 1, (1,))]), b=Dict(c=Box(-1, 1, (2,)))),
    "ordered": Dict(OrderedDict(b=Box(-1, 1, (2,)), a=Box(-1, 1, (1,)))),  # FlattenObservation keeps its order
    "keywords": Dict(b=Box(-1, 1, (2,)), a=Box(-1, 1, (1,))),
}
ACTIONS = {"vector": FORCE, "matrix": PART, "dict": Dict(a=Box(-1, 1, (2,)), b=Tuple([FORCE, PART]))}


def stacked(space, values: list):
    """Samples of a space as Minari's buffers hold them."""
    if isinstance(space, Dict):
        return {key: stacked(part, [value[key] for value in values]) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(stacked(part, [value[k] for value in values]) for k, part in enumerate(space.spaces))
    return np.stack(values)


def minari_dataset(name="lines/test-v0", space=SPACES["box"], action=FORCE, lengths=(3, 1, 4), **about):
    """Writes a dataset, its last episode truncated, under MINARI_DATASETS_PATH. Returns its folder and what it holds:
    flat rows by gymnasium's own function."""
    space.seed(0)
    action.seed(0)
    rng = np.random.default_rng(0)
    buffers, rows = [], {"obs": [], "actions": [], "rewards": [], "terminated": [], "next_obs": []}
    for k, length in enumerate(lengths):
        obs, actions = [space.sample() for _ in range(length + 1)], [action.sample() for _ in range(length)]
        rewards, ends = rng.normal(size=length), np.arange(length) == length - 1
        last = k == len(lengths) - 1
        buffers.append(EpisodeBuffer(
            observations=stacked(space, obs), actions=stacked(action, actions), rewards=list(rewards),
            terminations=list(ends & (not last)), truncations=list(ends & last)))  # fmt: skip
        flat = np.array([flatten(space, x) for x in obs], np.float32)
        rows["obs"].append(flat[:-1])
        rows["next_obs"].append(flat[1:])
        rows["actions"].append(np.array([flatten(action, x) for x in actions], np.float32))
        rows["rewards"].append(rewards.astype(np.float32))
        rows["terminated"].append(ends & (not last))
    minari.create_dataset_from_buffers(name, buffers, observation_space=space, action_space=action, **about)
    expected = {key: np.concatenate(parts) for key, parts in rows.items()}
    return minari.storage.get_dataset_path(name), expected | {"starts": np.cumsum((0, *lengths[:-1]))}


@pytest.fixture
def minari_home(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))

    def download(name, *_, **__):
        raise ValueError("it doesn't exist in the remote Farama server")

    monkeypatch.setattr(minari.storage.hosting, "download_dataset", download)
    return tmp_path / "minari"


@pytest.mark.parametrize("space, action", [*((one, "vector") for one in SPACES), ("box", "matrix"), ("box", "dict")])
def test_minari_episodes(space, action, minari_home, tmp_path):
    """Observations flat as FlattenObservation has them; the last one is what the last step led to; time running out is
    no termination. By the folder, its data/, and the id."""
    folder, expected = minari_dataset(space=SPACES[space], action=ACTIONS[action])
    shutil.copytree(folder, tmp_path / "elsewhere")
    for name in ("lines/test-v0", folder, folder / "data", tmp_path / "elsewhere"):
        data = load(name, env_id="Any-v0")
        assert_holds(data, expected)
        assert data.known.all() and not data.d4rl and not data.returns
    assert expected["terminated"].tolist() == [False, False, True, True, False, False, False, False]


def test_minari_episodes_without_steps_are_left_out(minari_home):
    folder, expected = minari_dataset()
    with h5py.File(folder / "data" / "main_data.hdf5", "r+") as file:
        for name, column in file["episode_1"].items():
            column.resize(int(name == "observations"), 0)
    rows = np.arange(8) != 3  # the one step of episode 1
    expected = {name: column if name == "starts" else column[rows] for name, column in expected.items()}
    assert_holds(load(folder, env_id="Any-v0"), expected | {"starts": np.array([0, 3])})


@pytest.mark.parametrize("limit, evaluated", [(200, None), (50, None), (50, 200), (200, 70)])
def test_minari_s_environment_for_evaluation(limit, evaluated, minari_home):
    """It is scored in the one that the dataset names for evaluation, where it does, and with its time limit."""
    env = gym.make("Pendulum-v1", g=9.0, max_episode_steps=limit)
    for_evaluation = evaluated and gym.make("Pendulum-v1", g=8.0, max_episode_steps=evaluated)
    folder, expected = minari_dataset(space=env.observation_space, action=env.action_space, env=env,
                                      eval_env=for_evaluation, ref_min_score=-1500.0, ref_max_score=-100.0)  # fmt: skip
    args = OfflineArgs(dataset=str(folder))
    data = load_dataset(args)
    assert_holds(data, expected)
    assert data.returns == (-1500.0, -100.0) and data.score(-800) == {"eval/score": pytest.approx(50)}
    run = SimpleNamespace(total=9, history=[{"eval/return": -900.0}, {"step": 5}])  # no 0 where none was
    assert compared({"eval/return": -950.0}, data, run, 9)["eval/best_return"] == -900
    assert json.loads(args.env_id)["id"] == "Pendulum-v1" and args.env_kwargs == ()
    assert make_env(args).spec.max_episode_steps == (evaluated or limit)
    assert make_env(args).unwrapped.g == (8 if evaluated else 9)
    args = OfflineArgs(dataset=str(folder), env_kwargs=("g=7", "max_episode_steps=30"))  # typed ones go before
    assert load_dataset(args).score(-800) == {}
    assert (make_env(args).unwrapped.g, make_env(args).spec.max_episode_steps) == (7, 30)
    args = OfflineArgs(dataset=str(folder), env_id="Pendulum-v1")
    assert load_dataset(args).score(-800) == {} and make_env(args).unwrapped.g == 10


def test_minari_s_environment_need_not_be_registered(minari_home):
    """Its entry point is imported, also from the working directory; and specifications of Gymnasium 0.29 are read. A
    package that is not installed is named."""
    env = gym.make("environments:Probe-v0")
    folder, _ = minari_dataset(space=env.observation_space, action=env.action_space, env=env)
    change_spec(folder, id="Elsewhere-v0", apply_api_compatibility=False)
    args = OfflineArgs(dataset=str(folder))
    load_dataset(args)
    assert make_env(args).unwrapped.LIMIT == 5
    change_spec(folder, entry_point="gymnasium_robotics.nowhere:Maze")
    args = OfflineArgs(dataset=str(folder))
    load_dataset(args)
    with pytest.raises(UserError, match="gymnasium_robotics"):
        make_env(args)


def change_spec(folder, **changes) -> None:
    metadata = folder / "data" / "metadata.json"
    about = json.loads(metadata.read_text())
    about["env_spec"] = json.dumps(changes | json.loads(about["env_spec"]) | changes)
    metadata.write_text(json.dumps(about))


# --- scores ---


@pytest.mark.parametrize("name, env_id", [("hopper", "Hopper-v4"), ("halfcheetah", "HalfCheetah-v4"),
                                          ("walker2d", "Walker2d-v4")])  # fmt: skip
def test_published_scores(name, env_id, tmp_path):
    """D4RL's files on its environments only: a random policy has 0, an expert 100."""
    path = write(tmp_path / f"{name}_medium-v2.hdf5", **d4rl_columns())
    low, high = D4RL_CONSTANTS[env_id]
    for args in ({}, {"env_id": env_id}):
        data = load(path, **args)
        for mean_return, wanted in ((low, 0), (high, 100), (low + 0.25 * (high - low), 25), (2 * low - high, -100)):
            assert data.score(mean_return) == {"eval/d4rl_score": pytest.approx(wanted, abs=1e-9)}
    for other in ({"env_id": env_id.replace("4", "5")}, {"env_kwargs": ("forward_reward_weight=9",)}):
        assert load(path, **other).score(100) == {}


def test_recorded_scores(tmp_path):
    """Only on the environment of the recording, with its arguments, also where that is one of D4RL's."""
    for env_id in ("environments:Walk-v0", "Hopper-v4"):
        path = tmp_path / "hopper_medium.hdf5"
        collection(path, about=WALK | {"env_id": env_id, "env_kwargs": '["size=3"]'})
        assert load(path).score(-15) == {"eval/score": pytest.approx(75)}
        assert load(path, env_id=env_id, env_kwargs=("size=3",)).score(-35) == {"eval/score": pytest.approx(-25)}
        for other in ({"env_id": "Hopper-v5"}, {"env_id": env_id}, {"env_kwargs": ("size=9",)}):
            assert load(path, **other).score(-15) == {}


@pytest.mark.parametrize(
    "about", [{}, {"random_return": 1.0}, {"expert_return": 1.0}, {"random_return": 2.0, "expert_return": 1.0},
              {"random_return": 1.0, "expert_return": 1.0}, {"random_return": np.nan, "expert_return": 1.0}]
)  # fmt: skip
def test_no_score_without_two_returns_in_order(about, tmp_path):
    collection(tmp_path / "a.hdf5", about={"env_id": "Hopper-v4"} | about)
    assert load(tmp_path / "a.hdf5").score(5) == {}


# --- trajectories, actions ---


def trajectories(rewards) -> Dataset:
    rewards = np.array(rewards, np.float32)
    zeros = np.zeros((len(rewards), 1), np.float32)
    return Dataset(zeros, zeros, rewards, zeros[:, 0] > 0, zeros, zeros[:, 0] == 0, np.array([0, 2, 5]))


def test_trajectories_by_hand():
    data = trajectories([1, 2, 4, 8, 16, 32])
    assert data.trajectory_returns().tolist() == [3, 28, 32]
    rows = np.array([True, False, False, True, True, False])
    assert data.trajectory_returns(rows).tolist() == [1, 24, 0]
    assert data.rewards.tolist() == [1, 2, 4, 8, 16, 32]
    # in double precision
    assert trajectories([0, 0, 1e8, 1, -1e8, 0]).trajectory_returns().tolist() == [0, 1, 0]


# --- wrong input ---


def test_no_file_and_no_id(tmp_path):
    for name in (tmp_path / "absent.hdf5", "absent", "mujoco/hopper/medium", "a b-v0"):
        refused(name, "give --dataset a file, a folder or a Minari id")


def test_what_cannot_be_read(tmp_path, minari_home):
    """A file that is cut off, another kind of file, a folder without a dataset, an id that nobody has."""
    collection(tmp_path / "a.hdf5")
    (tmp_path / "a.hdf5").write_bytes((tmp_path / "a.hdf5").read_bytes()[:-500])
    (tmp_path / "b.hdf5").write_text("observations,actions")
    (tmp_path / "c").mkdir()
    np.savez(tmp_path / "d.npz", **d4rl_columns())
    (tmp_path / "e.pkl").write_bytes(pickle.dumps(d4rl_columns()))
    for name in (*(tmp_path / part for part in ("a.hdf5", "b.hdf5", "c", "d.npz", "e.pkl")), "mujoco/absent/medium-v0"):
        refused(name, "cannot be read", "must be HDF5")


def test_without_a_network(minari_home, monkeypatch):
    """Whatever the download raises."""
    monkeypatch.setattr(minari.storage.hosting, "download_dataset", mock.Mock(side_effect=RuntimeError("no\nnetwork")))
    refused("mujoco/hopper/medium-v0", "cannot be read (no\nnetwork)")


@pytest.mark.parametrize("key", KEYS)
def test_a_wrong_column(key, tmp_path):
    columns = d4rl_columns()
    refused(write(tmp_path / "a.hdf5", **{name: column for name, column in columns.items() if name != key}), key)
    refused(write(tmp_path / "b.hdf5", **columns | {key: columns[key][:-1]}), "as many rows in each column")


IMAGES = np.arange(60 * 12).reshape(60, 2, 2, 3) % 256


@pytest.mark.parametrize("changes, words", [
    ({"observations": IMAGES.astype(np.uint8), "actions": np.zeros(60), "rewards": np.zeros((60, 1))}, ""),
    ({"observations": np.array([[b"left", b"right"]] * 60)}, "could not convert"),
    ({"observations": np.zeros((0, 2))}, "differ in length"), ({"observations": np.zeros((30, 4))}, "differ in length"),
    ({"observations": None, "observations/a": np.zeros((60, 2))}, "lacks observations"),
    ({key: [] for key in KEYS}, "empty"),
    ({"rewards": np.zeros((60, 2))}, "reshape"), ({"next_observations": np.zeros((59, 2))}, "differ in length"),
    ({"last_observations": np.zeros((1, 2))}, "reshape"), ({"rewards": 1.0}, "unsized"),
])  # fmt: skip
def test_columns_of_other_kinds(changes, words, tmp_path):
    """Images and numbers become vectors. What is wrong is said, and what would be right."""
    columns = {name: column for name, column in (d4rl_columns() | changes).items() if column is not None}
    path = write(tmp_path / "a.hdf5", **columns)
    if words:
        return refused(path, words, "must be HDF5")
    data = load(path, env_id="Any-v0")
    np.testing.assert_array_equal(data.obs, IMAGES.reshape(60, 12))
    assert (data.obs.dtype, data.actions.shape, data.rewards.shape) == (np.float32, (60, 1), (60,))


@pytest.mark.parametrize("column", ["observations", "rewards", "actions"])
def test_minari_columns_that_differ_in_length(column, minari_home):
    folder, _ = minari_dataset()
    with h5py.File(folder / "data" / "main_data.hdf5", "r+") as file:
        file["episode_2"][column].resize(len(file["episode_2"][column]) - 1, 0)
    refused(folder, "episode 2 must have one observation more")


@pytest.mark.parametrize("key", ["observations", "actions", "rewards", "last_observations"])
def test_numbers_that_are_not_finite(key, tmp_path):
    collection(tmp_path / "a.hdf5")
    for value in (np.nan, np.inf, -np.inf):
        with h5py.File(tmp_path / "a.hdf5", "r+") as file:
            column = file[key][:]
            column[7] = value
            file[key][:] = column
        refused(tmp_path / "a.hdf5", "not finite")


@pytest.mark.parametrize("name", ["h5py", "minari"])
def test_what_is_not_installed(name, tmp_path, minari_home, monkeypatch):
    path = write(tmp_path / "hopper_medium.hdf5", **d4rl_columns()) if name == "h5py" else minari_dataset()[0]
    monkeypatch.setitem(sys.modules, name, None)
    refused(path, f"needs {name}", "pip install")


def test_minari_spaces_that_are_no_numbers(minari_home):
    for name, spaces in (("action-v0", {"action": Discrete(3)}), ("part-v0", {"space": Dict(a=Discrete(3), b=PART)})):
        folder, _ = minari_dataset(name, **spaces)
        with pytest.raises(UserError, match="space Discrete: .* need Box"):
            load(folder, env_id="x")


def test_without_its_environment(minari_home, tmp_path):
    refused(minari_dataset()[0], "--env-id")
    collection(tmp_path / "hopper_medium.hdf5", about={})
    refused(tmp_path / "hopper_medium.hdf5", "--env-id")
    assert load(tmp_path / "hopper_medium.hdf5", env_id="Any-v0").env_id is None


# --- the environment ---

OBS, ACTION = Box(-np.inf, np.inf, (2,)), Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32))


def with_actions(*actions) -> Dataset:
    zeros = np.zeros((len(actions), 2), np.float32)
    flags = zeros[:, 0] > 0
    return Dataset(zeros, np.array(actions, np.float32), zeros[:, 0], flags, zeros, ~flags, np.array([0]), name="data")


def test_actions_reach_the_bounds_and_no_farther():
    square = Box(ACTION.low[:, None], ACTION.high[:, None])  # (2, 1)
    for space in (ACTION, square):
        check_spaces(with_actions([-1, 0], [1, 5]), 2, space)
        for wrong in ([-1.01, 1], [1.01, 1], [0, -0.01], [0, 5.01]):
            with pytest.raises(UserError, match="beyond the environment's bounds"):
                check_spaces(with_actions([0, 0], wrong, [0, 0]), 2, space)


def test_an_action_of_one_value():
    """It has no place in [-1, 1]."""
    with pytest.raises(UserError, match="upper bounds must be above the lower"):
        check_spaces(with_actions([0, 0]), 2, Box(np.array([0, -1], np.float32), np.array([0, 1], np.float32)))


def test_sizes_of_another_environment():
    for obs, action in ((Box(-1, 1, (3,)), ACTION), (Box(-1, 1, (1,)), ACTION), (OBS, Box(-1, 1, (1,)))):
        with pytest.raises(UserError, match=r"has 2 observation and 2 action numbers a step.*--env-id"):
            check_spaces(with_actions([0, 0]), obs.shape[0], action)


# --- the command line ---

FLAGS = "--device cpu --max-steps 4 --batch-size 8 --hidden-size 8 --eval-episodes 2".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a good file and one with an action out of bounds."""
    monkeypatch.chdir(tmp_path)
    collection(tmp_path / "walk.hdf5")
    collection(tmp_path / "far.hdf5")
    with h5py.File(tmp_path / "far.hdf5", "r+") as file:
        file["actions"][3] = -2.5
    return tmp_path


@pytest.mark.parametrize("args, words", [("far.hdf5", "bounds"), (f"walk.hdf5 {BANDIT} action=box", "finite bounds"),
                                         ("walk.hdf5 --env-id Pendulum-v1", "name its own with --env-id"),
                                         ("absent.hdf5", "absent.hdf5")])  # fmt: skip
def test_seen_before_the_run(args, words, folder, capsys):
    with user_error(capsys, words):
        command_line(bc, *FLAGS, "--dataset", *args.split(), "--output-dir", "made")
    assert runs_in(folder / "made") == []


def test_a_run_scores_by_the_recorded_returns(folder):
    """-30 is 0 and -10 is 100 in the dataset's own environment, which config.json names. Elsewhere there is none. The
    last row has the best of all evaluations."""
    run = new_run(bc, folder / "runs", *FLAGS, "--dataset", "walk.hdf5", "--eval-every", "1", "--learning-rate", "0.1")
    *rows, row = metrics(run)
    assert row["eval/best_return"] == max(r["eval/return"] for r in [*rows, row])
    assert len(rows) == 3 and not [r for r in rows if "eval/best_return" in r]
    assert row["eval/score"] == pytest.approx(5 * (row["eval/return"] + 30)) and "eval/d4rl_score" not in row
    assert json.loads((run / "config.json").read_text())["args"]["env_id"] == WALK["env_id"]
    collection(folder / "other.hdf5", about=WALK | {"env_id": "Other-v0"})
    run = new_run(bc, folder / "runs", *FLAGS, "--dataset", "other.hdf5", "--env-id", WALK["env_id"])
    assert not [name for name in metrics(run)[-1] if "score" in name]
