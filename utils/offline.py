"""Datasets for offline scripts: D4RL's HDF5 files, Minari's datasets, and what benchmarks/record_suite.py records.

Shapes: n rows, D observation numbers, A action numbers; rows follow each other, one trajectory after the other.
"""

import json
import re
from dataclasses import dataclass, fields
from pathlib import Path

import gymnasium as gym
import numpy as np

from utils.control import EnvArgs
from utils.core import Run, UserError

SHIPPED = Path(__file__).resolve().parent / "hopper.hdf5"
D4RL = {  # family -> environment, return of a random and of an expert policy (D4RL's infos.py); Ant observes less today
    "halfcheetah": ("HalfCheetah-v4", (-280.178953, 12135.0)),
    "hopper": ("Hopper-v4", (-20.272305, 3234.3)),
    "walker2d": ("Walker2d-v4", (1.629008, 4592.3)),
}
D4RL_NAME = rf"({'|'.join(D4RL)})[-_](random|expert|full[-_]replay|medium([-_](replay|expert))?)(-v\d)?.hdf5"
KEYS = ("observations", "actions", "rewards", "terminals", "timeouts")


@dataclass
class OfflineArgs(EnvArgs):
    dataset: str = ""
    """an HDF5 file of D4RL's locomotion or of benchmarks/record_suite.py, a Minari folder or id (also for D4RL's
    AntMaze, kitchen and Adroit: D4RL/antmaze/umaze-v1); "": the collection that ships"""
    env_id: str | None = None
    """environment that scores the policy, or MODULE:NAME; None: the dataset's own, with its wrappers and arguments"""


@dataclass
class Dataset:
    obs: np.ndarray  # (n, D) float32
    actions: np.ndarray  # (n, A) float32, in the environment's units
    rewards: np.ndarray  # (n,) float32
    terminated: np.ndarray  # (n,) bool: the episode ended here by itself
    next_obs: np.ndarray  # (n, D) float32; meaningless where not `known`
    known: np.ndarray  # (n,) bool: whether the next observation is known; not at D4RL's time-outs
    starts: np.ndarray  # (k,) first row of each trajectory; starts[0] = 0
    cut_off: bool = False  # whether the file ends within the last trajectory
    env_id: str | None = None
    env_kwargs: tuple[str, ...] = ()
    d4rl: bool = False
    returns: tuple[float, ...] = ()  # of a random and of an expert policy, where known
    name: str = "the collection that ships"
    in_order: bool = True  # else a row within an episode leads to another one than the next: there are no trajectories

    def lengths(self) -> np.ndarray:
        """(k,): rows of each trajectory. Raises UserError where there are none."""
        if not self.in_order:
            wrong = f"--dataset {self.name} has no trajectories: its next_observations are not the next rows"
            raise UserError(f"{wrong}; what needs none is --top-fraction 1, --rewards raw")
        return np.diff(self.starts, append=len(self.obs))

    def trajectory_returns(self, rows: np.ndarray | None = None) -> np.ndarray:
        """(k,): undiscounted returns. With `rows` (n,) bool, only rewards of these rows count."""
        rewards, lengths = self.rewards.astype(np.float64), self.lengths()
        return np.add.reduceat(rewards if rows is None else rewards * rows, lengths.cumsum() - lengths)

    def top_rows(self, fraction: float) -> np.ndarray:
        """(n,) bool: rows of the best trajectory, and of the next ones while the total stays below this fraction of all
        rows, as in the paper's code (of BC10 %); CORL takes a fraction of the trajectories."""
        if fraction == 1:
            return np.ones(len(self.obs), bool)
        best_first = np.argsort(-self.trajectory_returns(), kind="stable")
        count = max(1, (np.cumsum(self.lengths()[best_first]) < fraction * len(self.obs)).sum())
        return np.repeat(np.isin(np.arange(len(self.starts)), best_first[:count]), self.lengths())

    def score(self, mean_return: float) -> dict[str, float]:
        """eval/d4rl_score: D4RL's, only for its files on its environments. eval/score: the same formula with the
        random and expert returns that were recorded with the data; not to be compared with published scores."""
        if len(self.returns) != 2 or not self.returns[0] < self.returns[1]:
            return {}
        low, high = self.returns
        return {"eval/d4rl_score" if self.d4rl else "eval/score": 100 * (mean_return - low) / (high - low)}


def compared(columns: dict[str, float], data: Dataset, run: Run, step: int) -> dict[str, float]:
    """An evaluation's columns with the dataset's score and, in the last row, the best of all evaluations."""
    columns = columns | data.score(last := columns["eval/return"])
    if step == run.total:
        columns["eval/best_return"] = max([last, *(row.get("eval/return", last) for row in run.history)])
    return columns


def load_dataset(args: OfflineArgs) -> Dataset:
    """Reads --dataset and chooses the environment for evaluation: --env-id if given, else the dataset's own, whose name
    and arguments are written to `args`. Raises UserError where there is none, or numbers that are not finite."""
    path = Path(args.dataset).expanduser() if args.dataset else SHIPPED
    is_id = re.fullmatch(r"([-\w]+/)*[-\w]+-v\d+", args.dataset)
    if not path.exists() and not is_id:
        raise UserError(f"there is no {path}: give --dataset a file, a folder or a Minari id (mujoco/hopper/medium-v0)")
    try:
        data = read_hdf5(path) if path.is_file() else read_minari(path)
    except ImportError as error:
        raise UserError(f'--dataset {path} needs {error.name}: pip install h5py "minari[hdf5]"') from error
    except Exception as error:  # of ours, h5py, Minari, and whatever Minari downloads with
        wanted = "HDF5 with D4RL's columns and as many rows in each column, or one of Minari's, here or on line"
        raise UserError(f"--dataset {path} cannot be read ({error or repr(error)}): it must be {wanted}") from error
    if not all(np.isfinite(column).all() for column in (data.obs, data.actions, data.rewards, data.next_obs)):
        raise UserError(f"--dataset {path} has numbers that are not finite")
    data.name = args.dataset or data.name
    if args.env_id is None:
        if data.env_id is None:
            raise UserError(f"--dataset {path} does not say which environment it is of: name it with --env-id")
        args.env_id, args.env_kwargs = data.env_id, args.env_kwargs or data.env_kwargs
    if (data.env_id, data.env_kwargs) != (args.env_id, args.env_kwargs):
        data.returns = ()  # they are of another environment
    return data


def read_hdf5(path: Path) -> Dataset:
    """The columns KEYS, one row a step, and next_observations where there are, but not of D4RL's own files, as its
    qlearning_dataset has it; of a collection also last_observations, and attributes."""
    import h5py

    with h5py.File(path) as file:
        if missing := [key for key in KEYS if not isinstance(file.get(key), h5py.Dataset)]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        keys = (*KEYS, "next_observations", "last_observations")
        found = {key: np.asarray(file[key][()], np.float32) for key in keys if key in file}
        about = dict(file.attrs)
    if not (rows := len(found["rewards"])) or {len(found.get(key, range(rows))) for key in keys[:-1]} != {rows}:
        raise ValueError("its columns are empty, or differ in length")
    obs, actions = (found[key].reshape(rows, -1) for key in KEYS[:2])  # of images, too
    rewards, terminals, timeouts = (found[key].reshape(rows) for key in KEYS[2:])
    ends = (terminals > 0) | (timeouts > 0)
    cut_off, ends[-1] = not ends[-1], True
    known = timeouts <= 0  # the row after a time-out is not the next one, and a terminal row needs none
    known[-1] &= terminals[-1] > 0
    data = Dataset(obs, actions, rewards, terminals > 0, np.roll(obs, -1, 0), known,
                   np.append(0, np.flatnonzero(ends[:-1]) + 1), cut_off)  # fmt: skip
    next_obs = found.get("next_observations", data.next_obs).reshape(obs.shape)
    follows = ends | np.isclose(next_obs, data.next_obs, 1e-4, 1e-5).all(1)
    if "last_observations" in found:
        data.next_obs[ends] = found["last_observations"].reshape(ends.sum(), obs.shape[1])
        data.known[:], data.cut_off = True, False
        data.env_id, data.env_kwargs = about.get("env_id"), tuple(json.loads(about.get("env_kwargs", "[]")))
        data.returns = tuple(float(about[key]) for key in ("random_return", "expert_return") if key in about)
    elif (family := re.fullmatch(D4RL_NAME, path.name.lower())) and follows.mean() > 0.5:
        data.d4rl, (data.env_id, data.returns) = True, D4RL[family[1]]
        data.known[-1] = False  # as D4RL's qlearning_dataset leaves it out
    elif "next_observations" in found:
        data.next_obs, data.known[:], data.in_order = next_obs, True, bool(follows.all())
        data.starts = np.append(0, np.flatnonzero(ends[:-1] | ~follows[:-1]) + 1)
    return data


def read_minari(path: Path) -> Dataset:
    """A local folder (that of the dataset, or its data/), or the id of a dataset that is here or can be downloaded. Its
    environment, as JSON, is the one that it names for evaluation, else that of the recording."""
    import minari

    folder = path / "data" if (path / "data").is_dir() else path
    dataset = minari.MinariDataset(folder) if path.is_dir() else minari.load_dataset(str(path), download=True)
    about = dataset.storage.read_raw_metadata(dataset.storage.data_path)
    spaces = [json.loads(about[f"{which}_space"]) for which in ("observation", "action")]
    parts = []
    for episode in (episode for episode in dataset if len(episode.rewards)):
        obs, actions = flat(spaces[0], episode.observations), flat(spaces[1], episode.actions)
        if not len(obs) - 1 == len(actions) == len(episode.rewards) == len(episode.terminations):
            raise ValueError(f"episode {episode.id} must have one observation more than it has steps")
        parts.append((obs[:-1], actions, episode.rewards, episode.terminations, obs[1:]))
    obs, actions, rewards, terminated, next_obs = (np.concatenate(part).astype(np.float32) for part in zip(*parts))
    spec = json.loads(about.get("eval_env_spec") or about.get("env_spec") or "{}")
    known = {field.name for field in fields(gym.envs.registration.EnvSpec) if field.init}  # 0.29 had one more
    known = {key: spec[key] for key in known & spec.keys()}
    return Dataset(obs, actions, rewards, terminated > 0, next_obs, np.ones(len(obs), bool),
                   np.cumsum([0, *(len(part[2]) for part in parts[:-1])]), env_id=json.dumps(known) if known else None,
                   returns=tuple(float(about[key]) for key in ("ref_min_score", "ref_max_score")
                                 if about.get(key) is not None))  # fmt: skip


def flat(space: dict, values) -> np.ndarray:
    """Values of many steps as a table, as gymnasium's FlattenObservation does it for one. `space` as Minari writes it:
    read back as a gymnasium space, a Dict's keys would come in another order."""
    if space["type"] in ("Dict", "Tuple"):
        parts = space["subspaces"]
        keys = parts if space["type"] == "Dict" else range(len(parts))
        return np.concatenate([flat(parts[key], values[key]) for key in keys], 1)
    if space["type"] != "Box":
        raise ValueError(f"it has a space {space['type']}: offline scripts need Box, or Dict and Tuple of Box")
    return np.asarray(values).reshape(len(values), int(np.prod(space["shape"])))


def check_spaces(data: Dataset, obs_size: int, action_space: gym.Space) -> None:
    """Raises UserError where the dataset cannot be of an environment with such flattened observations and actions."""
    sizes, wanted = (data.obs.shape[1], data.actions.shape[1]), (obs_size, int(np.prod(action_space.shape)))
    if sizes != wanted:
        wrong = f"--dataset {data.name} has {sizes[0]} observation and {sizes[1]} action numbers a step"
        raise UserError(f"{wrong}, but the environment has {wanted[0]} and {wanted[1]}: name its own with --env-id")
    low, high = action_space.low.ravel(), action_space.high.ravel()
    if (low == high).any():  # what [-1, 1] is brought from
        raise UserError(f"the environment has the action space {action_space}: upper bounds must be above the lower")
    if (data.actions < low - 1e-4).any() or (data.actions > high + 1e-4).any():
        raise UserError(f"--dataset {data.name} has actions beyond the environment's bounds, {low} and {high}")
