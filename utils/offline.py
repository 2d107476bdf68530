"""Datasets for offline scripts: D4RL's HDF5 files, Minari's datasets, and the collections that sac.py records.

Shapes: n rows, D observation numbers, A action numbers; rows follow each other, one trajectory after the other.
"""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from utils.envs import EnvArgs
from utils.errors import UserError
from utils.run import Run

SHIPPED = Path(__file__).resolve().parent / "hopper.hdf5"
D4RL_ENVIRONMENTS = {"halfcheetah": "HalfCheetah-v4", "hopper": "Hopper-v4", "walker2d": "Walker2d-v4"}
D4RL_RETURNS = {  # of a random and of an expert policy, by D4RL's infos.py
    "HalfCheetah-v4": (-280.178953, 12135.0),
    "Hopper-v4": (-20.272305, 3234.3),
    "Walker2d-v4": (1.629008, 4592.3),
}
KEYS = ("observations", "actions", "rewards", "terminals", "timeouts")


@dataclass
class OfflineArgs(EnvArgs):
    dataset: str = ""
    """an HDF5 file of D4RL's or of sac.py --record-dataset, a Minari folder or id; "": the collection that ships"""
    env_id: str | None = None
    """environment that scores the policy, or MODULE:NAME; None: the dataset's own"""


@dataclass
class Dataset:
    obs: np.ndarray  # (n, D) float32
    actions: np.ndarray  # (n, A) float32, in the environment's units
    rewards: np.ndarray  # (n,) float32
    terminated: np.ndarray  # (n,) bool: the episode ended here by itself
    next_obs: np.ndarray  # (n, D) float32; meaningless where not `known`
    known: np.ndarray  # (n,) bool: whether the next observation is known; not at D4RL's time-outs
    starts: np.ndarray  # (k,) first row of each trajectory; starts[0] = 0
    env_id: str | None = None
    env_kwargs: tuple[str, ...] = ()
    d4rl: bool = False
    returns: tuple[float, float] | None = None  # of a random and of an expert policy, where recorded
    name: str = field(default="", repr=False)

    def lengths(self) -> np.ndarray:
        """(k,): rows of each trajectory."""
        return np.diff(self.starts, append=len(self.obs))

    def trajectory(self) -> np.ndarray:
        """(n,): the number of each row's trajectory."""
        return np.repeat(np.arange(len(self.starts)), self.lengths())

    def trajectory_returns(self, rows: np.ndarray | None = None) -> np.ndarray:
        """(k,): undiscounted returns. With `rows` (n,) bool, only rewards of these rows count."""
        rewards = self.rewards.astype(np.float64)
        return np.add.reduceat(rewards if rows is None else rewards * rows, self.starts)

    def score(self, mean_return: float) -> dict[str, float]:
        """eval/d4rl_score: D4RL's, only for its files on its environments. eval/score: the same formula with the
        random and expert returns that were recorded with the data; not to be compared with published scores."""
        if self.d4rl and self.env_id in D4RL_RETURNS:
            name, (low, high) = "eval/d4rl_score", D4RL_RETURNS[self.env_id]
        elif not self.d4rl and self.returns is not None and self.returns[0] < self.returns[1]:
            name, (low, high) = "eval/score", self.returns
        else:
            return {}
        return {name: 100 * (mean_return - low) / (high - low)}


def compared(columns: dict[str, float], data: Dataset, run: Run, step: int) -> dict[str, float]:
    """Further columns of an evaluation: the dataset's score and, in the last row, the best of all evaluations."""
    last, more = columns["eval/return"], data.score(columns["eval/return"])
    if step == run.total:
        more["eval/best_return"] = best = max([last, *(row.get("eval/return", last) for row in run.history)])
        run.print(f"return: {last:.1f} at the end, {best:.1f} at best, of {run.args.eval_episodes} episodes, "
                  f"seed {run.args.seed}")  # fmt: skip
    return more


def load_dataset(args: OfflineArgs) -> Dataset:
    """Reads --dataset and chooses the environment for evaluation: --env-id if given, else the dataset's own. That one's
    name and arguments are written to `args`. Raises UserError where it is not a whole and finite dataset."""
    path = Path(args.dataset).expanduser() if args.dataset else SHIPPED
    if os.path.isfile(path):  # unlike Path.is_file, False for what no file system takes as a name
        data = read_hdf5(path)
    elif os.path.isdir(path) or re.fullmatch(r"([-\w]+/)*[-\w]+-v\d+", args.dataset):
        data = read_minari(str(path))
    else:
        wrong = f"--dataset {args.dataset or path} is neither a file or folder nor a Minari id"
        raise UserError(f"{wrong} (mujoco/hopper/medium-v0)")
    data.name = args.dataset or "the collection that ships"
    if args.env_id is None:
        if data.env_id is None:
            raise UserError(f"--dataset {data.name} does not say which environment it is of: name it with --env-id")
        args.env_id, args.env_kwargs = data.env_id, args.env_kwargs or data.env_kwargs
    named, wanted = (data.env_id, data.env_kwargs), (args.env_id, args.env_kwargs)
    if data.d4rl and (args.env_kwargs or data.env_id not in (None, args.env_id)) or not data.d4rl and named != wanted:
        data.d4rl, data.returns = False, None  # the returns that a score divides by are those of another environment
    data.env_id, data.env_kwargs = wanted
    check_dataset(data)
    return data


def read_hdf5(path: Path) -> Dataset:
    try:
        import h5py
    except ImportError as error:
        raise UserError(f"--dataset {path} needs h5py: pip install h5py") from error
    try:
        with h5py.File(path) as file:
            if missing := [key for key in KEYS if key not in file]:
                raise UserError(f"--dataset {path} lacks {', '.join(missing)}: it must have the keys of D4RL's v2 "
                                f"files ({', '.join(KEYS)})")  # fmt: skip
            columns = {key: np.asarray(file[key][()]) for key in (*KEYS, "last_observations") if key in file}
            about = dict(file.attrs)
    except (OSError, RuntimeError, KeyError, AttributeError, TypeError, ValueError) as error:  # all that h5py raises
        raise UserError(f"--dataset {path} cannot be read as HDF5 ({error}): it is cut off or another kind") from error
    for key, column in columns.items():
        table = key in ("observations", "actions", "last_observations")
        if column.dtype.kind not in "bfiu" or column.ndim < 1 or (column.ndim != 2 if table else column[:1].size > 1):
            raise UserError(f"--dataset {path} has {key} of shape {column.shape} and type {column.dtype}: there "
                            f"must be {'a row of numbers' if table else 'one number'} for each step")  # fmt: skip
        if not np.isfinite(column).all():
            row = np.argwhere(~np.isfinite(column))[0][0]
            raise UserError(f"--dataset {path} has {column[row].tolist()} in row {row} of {key}: all numbers must "
                            "be finite")  # fmt: skip
    rows = {key: len(columns[key]) for key in KEYS}
    if len(set(rows.values())) > 1 or not rows["rewards"]:
        raise UserError(f"--dataset {path} must have as many rows in each column, and one at least: it has {rows}")
    obs, actions, rewards = (columns[key].astype(np.float32) for key in KEYS[:3])
    terminals, timeouts = (columns[key].reshape(-1) > 0 for key in KEYS[3:])
    ends = terminals | timeouts
    ends[-1] = True
    next_obs = np.roll(obs, -1, 0)
    shared: dict[str, Any] = dict(obs=obs, actions=actions, rewards=rewards.reshape(-1), terminated=terminals,
                  starts=np.append(0, np.flatnonzero(ends[:-1]) + 1))  # fmt: skip
    if "last_observations" in columns:
        last = columns["last_observations"]
        if last.shape != (ends.sum(), obs.shape[1]):
            raise UserError(f"--dataset {path} has last_observations {last.shape}: its {ends.sum()} trajectories end "
                            f"in {(int(ends.sum()), obs.shape[1])}")  # fmt: skip
        next_obs[ends] = last
        try:
            env_kwargs = tuple(json.loads(about.get("env_kwargs", "[]")))
            returns = tuple(float(about[key]) for key in ("random_return", "expert_return") if key in about)
        except (TypeError, ValueError) as error:
            raise UserError(f"--dataset {path} has attributes that are not those of a collection ({error}): record it "
                            "with sac.py --record-dataset") from error  # fmt: skip
        return Dataset(**shared, next_obs=next_obs, known=np.ones(len(obs), bool), env_id=about.get("env_id"),
                       env_kwargs=env_kwargs, returns=returns if len(returns) == 2 else None)  # fmt: skip
    known = ~timeouts  # as D4RL's qlearning_dataset: the row after a time-out, and that after the last one, is not next
    known[-1] = False
    family = re.match(r"(halfcheetah|hopper|walker2d)[-_]", path.name.lower())
    return Dataset(**shared, next_obs=next_obs, known=known, d4rl=True,
                   env_id=D4RL_ENVIRONMENTS[family[1]] if family else None)  # fmt: skip


def read_minari(name: str) -> Dataset:
    """A local folder (that of the dataset, or its data/), or the id of a dataset that is here or can be downloaded. The
    environment is the one that the dataset names for evaluation, if any, with its time limit."""
    try:
        import minari
    except ImportError as error:
        raise UserError(f'--dataset {name} needs minari: pip install "minari[hdf5]"') from error
    try:
        if os.path.isdir(name):
            folder = Path(name) / "data" if (Path(name) / "data").is_dir() else Path(name)
            dataset = minari.MinariDataset(folder)
        else:
            dataset = minari.load_dataset(name, download=True)
        about = dataset.storage.read_raw_metadata(dataset.storage.data_path)
        spec = json.loads(about.get("eval_env_spec") or about.get("env_spec") or "{}")
        registered = gym.registry.get(spec.get("id"))
        if (limit := spec.get("max_episode_steps")) and not (registered and registered.max_episode_steps == limit):
            spec["kwargs"]["max_episode_steps"] = limit
        spaces = [json.loads(about[f"{which}_space"]) for which in ("observation", "action")]
        parts = []
        for episode in dataset:
            steps = len(episode.rewards)
            if steps:
                obs, actions = flat(spaces[0], episode.observations), flat(spaces[1], episode.actions)
                parts.append((obs[:-1], actions, episode.rewards, episode.terminations, obs[1:]))
                if {np.shape(part)[0] for part in parts[-1]} != {steps} or np.ndim(episode.rewards) != 1:
                    raise UserError(f"--dataset {name} has an episode of {len(obs)} observations, {len(actions)} "
                                    f"actions and rewards {np.shape(episode.rewards)}: there must be one observation "
                                    "more than actions, rewards and terminations")  # fmt: skip
        if not parts:
            raise UserError(f"--dataset {name} has no steps")
        columns = [np.concatenate(column).astype(np.float32) for column in zip(*parts)]
        returns = tuple(float(about[key]) for key in ("ref_min_score", "ref_max_score") if about.get(key) is not None)
    except UserError:
        raise
    except Exception as error:  # of disk, network, format: Minari raises what its libraries do
        raise UserError(f"--dataset {name} cannot be read by Minari ({type(error).__name__}: {error})") from error
    obs, actions, rewards, terminated, next_obs = columns
    return Dataset(obs, actions, rewards, terminated > 0, next_obs, np.ones(len(obs), bool),
                   np.cumsum([0, *(len(part[2]) for part in parts[:-1])]), spec.get("id"),
                   tuple(f"{key}={json.dumps(value)}" for key, value in spec.get("kwargs", {}).items()),
                   returns=returns if len(returns) == 2 else None)  # fmt: skip


def flat(space: dict, values) -> np.ndarray:
    """Values of many steps as a table, as gymnasium's FlattenObservation does it for one. `space` as Minari writes it:
    read back as a gymnasium space, a Dict's keys would come in another order."""
    if space["type"] == "Dict":
        return np.concatenate([flat(part, values[key]) for key, part in space["subspaces"].items()], 1)
    if space["type"] == "Tuple":
        return np.concatenate([flat(part, value) for part, value in zip(space["subspaces"], values)], 1)
    if space["type"] != "Box":
        raise UserError(f"--dataset has a space {space['type']}: offline scripts need Box, or Dict and Tuple of Box")
    return np.asarray(values).reshape(len(values), int(np.prod(space["shape"])))


def check_dataset(data: Dataset) -> None:
    """Raises UserError where a number is not finite, or no transition is whole."""
    for name, column in {"observations": data.obs, "actions": data.actions, "rewards": data.rewards[:, None],
                         "next observations": data.next_obs}.items():  # fmt: skip
        if not (finite := np.isfinite(column).all(1)).all():
            row = np.flatnonzero(~finite)[0]
            raise UserError(f"--dataset {data.name} has {column[row].tolist()} in row {row} of its {name}: all numbers "
                            "must be finite")  # fmt: skip
    if not data.known.any():
        raise UserError(f"--dataset {data.name} has no step with a known next observation: it is too short")


def check_spaces(data: Dataset, obs_size: int, action_space) -> None:
    """Raises UserError where the dataset cannot be of an environment with `obs_size` numbers in a flattened observation
    and this action space."""
    bounded = isinstance(action_space, gym.spaces.Box) and action_space.is_bounded() and action_space.dtype.kind == "f"
    if not bounded or (action_space.low >= action_space.high).any():
        raise UserError(f"the environment has the action space {action_space}: it must be a Box of floats with finite "
                        "bounds, the upper above the lower")  # fmt: skip
    sizes, wanted = (data.obs.shape[1], data.actions.shape[1]), (obs_size, int(np.prod(action_space.shape)))
    if sizes != wanted:
        raise UserError(f"--dataset {data.name} has {sizes[0]} observation and {sizes[1]} action numbers a step, but "
                        f"the environment has {wanted[0]} and {wanted[1]}: name its own with --env-id")  # fmt: skip
    low, high = (np.broadcast_to(bound, action_space.shape).ravel() for bound in (action_space.low, action_space.high))
    outside = ((data.actions < low - 1e-4) | (data.actions > high + 1e-4)).any(1)
    if outside.any():
        row = np.flatnonzero(outside)[0]
        raise UserError(f"--dataset {data.name} has the action {data.actions[row].tolist()} in row {row}: the "
                        f"environment's bounds are {low.tolist()} and {high.tolist()}")  # fmt: skip
