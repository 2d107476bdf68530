"""Datasets for offline scripts: D4RL's HDF5 files, Minari's datasets, and the collections that sac.py records.

Shapes: n rows, D observation numbers, A action numbers; rows follow each other, one trajectory after the other.
"""

import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from utils.envs import EnvArgs
from utils.errors import UserError
from utils.run import Run
from utils.spaces import is_bounded

SHIPPED = Path(__file__).resolve().parent / "hopper.hdf5"
D4RL = {  # family -> environment, return of a random and of an expert policy (D4RL's infos.py); Ant observes less today
    "halfcheetah": ("HalfCheetah-v4", (-280.178953, 12135.0)),
    "hopper": ("Hopper-v4", (-20.272305, 3234.3)),
    "walker2d": ("Walker2d-v4", (1.629008, 4592.3)),
}
D4RL_KINDS = "(random|medium|expert|medium[-_]replay|medium[-_]expert|full[-_]replay)"
KEYS = ("observations", "actions", "rewards", "terminals", "timeouts")


@dataclass
class OfflineArgs(EnvArgs):
    dataset: str = ""
    """an HDF5 file of D4RL's locomotion or of sac.py --record-dataset, a Minari folder or id (also for D4RL's AntMaze,
    kitchen and Adroit: D4RL/antmaze/umaze-v1); "": the collection that ships"""
    env_id: str | None = None
    """environment that scores the policy, or MODULE:NAME; None: the dataset's own, with its wrappers and arguments"""
    env_spec: str = ""
    """filled in from a Minari dataset: its environment, as Gymnasium's EnvSpec.to_json writes it"""


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
    env_spec: str = ""
    d4rl: bool = False
    returns: tuple[float, ...] = ()  # of a random and of an expert policy, where known
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

    def whole(self) -> "Dataset":
        """Without a last trajectory that the file cuts off. Raises UserError where nothing is left."""
        if not self.cut_off:
            return self
        if len(self.starts) == 1:
            raise UserError(f"--dataset {self.name} has no trajectory that ends: there must be terminals or timeouts")
        columns = ("obs", "actions", "rewards", "terminated", "next_obs", "known")
        rows = {name: getattr(self, name)[: self.starts[-1]] for name in columns}
        return replace(self, **rows, starts=self.starts[:-1], cut_off=False)

    def score(self, mean_return: float) -> dict[str, float]:
        """eval/d4rl_score: D4RL's, only for its files on its environments. eval/score: the same formula with the
        random and expert returns that were recorded with the data; not to be compared with published scores."""
        if len(self.returns) != 2 or not self.returns[0] < self.returns[1]:
            return {}
        low, high = self.returns
        return {"eval/d4rl_score" if self.d4rl else "eval/score": 100 * (mean_return - low) / (high - low)}


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
    is_file = os.path.isfile(path)  # unlike Path.is_file, False for what no file system takes as a name
    name, how = args.dataset or str(path), "as HDF5" if is_file else "by Minari"
    if not (is_file or os.path.isdir(path) or re.fullmatch(r"([-\w]+/)*[-\w]+-v\d+", name)):
        raise UserError(f"--dataset {name} is neither a file or folder nor a Minari id (mujoco/hopper/medium-v0)")
    try:
        data = read_hdf5(path) if is_file else read_minari(path)
        check_rows(observations=data.obs, actions=data.actions, rewards=data.rewards, next_observations=data.next_obs)
        if not data.known.any():
            raise UserError("has no step with a known next observation: it is too short")
    except UserError as error:
        raise UserError(f"--dataset {name} {error}") from error
    except ImportError as error:
        raise UserError(f'--dataset {name} needs {error.name}: pip install h5py "minari[hdf5]"') from error
    except Exception as error:  # of disk, network, format: libraries raise what they like
        wrong = f"--dataset {name} cannot be read {how} ({type(error).__name__}: {error})"
        raise UserError(f"{wrong}: it is cut off, out of reach, or of another kind") from error
    data.name = args.dataset or "the collection that ships"
    if args.env_id is None:
        if data.env_id is None:
            raise UserError(f"--dataset {name} does not say which environment it is of: name it with --env-id")
        args.env_id, args.env_spec = data.env_id, data.env_spec
        args.env_kwargs = args.env_kwargs or data.env_kwargs
    if (data.env_id, data.env_kwargs, data.env_spec) != (args.env_id, args.env_kwargs, args.env_spec):
        data.env_id, data.returns = args.env_id, ()  # the returns are of another environment
    return data


def read_hdf5(path: Path) -> Dataset:
    """The columns KEYS, one row a step; of a collection also last_observations, and attributes."""
    import h5py

    with h5py.File(path) as file:
        if missing := [key for key in KEYS if key not in file]:
            raise UserError(f"lacks {', '.join(missing)}: it must have the keys of D4RL's v2 files ({', '.join(KEYS)})")
        obs, actions, *flags = (np.asarray(file[key][()], np.float32) for key in KEYS)
        last = np.asarray(file["last_observations"][()], np.float32) if "last_observations" in file else None
        about = dict(file.attrs)
    for key, column in zip(KEYS[2:], flags):
        if column.size != len(column):
            raise UserError(f"has {key} of shape {column.shape}: there must be one number for each step")
    rewards, terminals, timeouts = (column.ravel() for column in flags)
    for key, table in {"observations": obs, "actions": actions, "last_observations": last}.items():
        if table is not None and table.ndim != 2:
            raise UserError(f"has {key} of shape {table.shape}: there must be a row of numbers for each step")
    rows = dict(zip(KEYS, map(len, (obs, actions, rewards, terminals, timeouts))))
    if len(set(rows.values())) > 1 or not len(obs):
        raise UserError(f"must have as many rows in each column, and one at least: it has {rows}")
    check_rows(terminals=terminals, timeouts=timeouts)
    ends = (terminals > 0) | (timeouts > 0)
    cut_off, ends[-1] = not ends[-1], True
    known = timeouts <= 0  # the row after a time-out is not the next one, and a terminal row needs none
    known[-1] &= terminals[-1] > 0
    data = Dataset(obs, actions, rewards, terminals > 0, np.roll(obs, -1, 0), known,
                   np.append(0, np.flatnonzero(ends[:-1]) + 1), cut_off)  # fmt: skip
    if last is not None:
        check_rows(last_observations=last)
        if last.shape != (wanted := (len(data.starts), obs.shape[1])):
            raise UserError(f"has last_observations {last.shape}: its {wanted[0]} trajectories end in {wanted}")
        data.next_obs[ends] = last
        data.known[:], data.cut_off = True, False
        data.env_id, data.env_kwargs = about.get("env_id"), tuple(json.loads(about.get("env_kwargs", "[]")))
        data.returns = tuple(float(about[key]) for key in ("random_return", "expert_return") if key in about)
    elif family := re.fullmatch(f"({'|'.join(D4RL)})[-_]{D4RL_KINDS}(-v\\d)?.hdf5", path.name.lower()):
        data.d4rl, (data.env_id, data.returns) = True, D4RL[family[1]]
        data.known[-1] = False  # as D4RL's qlearning_dataset leaves it out
    elif re.match(r"ant_?maze|(mini_)?kitchen|(pen|door|hammer|relocate)[-_]", path.name.lower()):
        right = "use Minari's data of the new one (D4RL/antmaze/umaze-v1, D4RL/kitchen/mixed-v2, D4RL/door/human-v2)"
        raise UserError(f"is of an environment that D4RL had and Gymnasium has made anew: {right}")
    return data


def read_minari(path: Path) -> Dataset:
    """A local folder (that of the dataset, or its data/), or the id of a dataset that is here or can be downloaded. The
    environment is the one that the dataset names for evaluation, if any, else that of the recording."""
    import minari

    folder = path / "data" if (path / "data").is_dir() else path
    dataset = minari.MinariDataset(folder) if path.is_dir() else minari.load_dataset(str(path), download=True)
    about = dataset.storage.read_raw_metadata(dataset.storage.data_path)
    spec = about.get("eval_env_spec") or about.get("env_spec") or ""
    spaces = [json.loads(about[f"{which}_space"]) for which in ("observation", "action")]
    parts = []
    for episode in dataset:
        if steps := len(episode.rewards):
            obs, actions = flat(spaces[0], episode.observations), flat(spaces[1], episode.actions)
            parts.append((obs[:-1], actions, episode.rewards, episode.terminations, obs[1:]))
            if {np.shape(part)[0] for part in parts[-1]} != {steps} or np.ndim(episode.rewards) != 1:
                has = f"{len(obs)} observations, {len(actions)} actions and rewards {np.shape(episode.rewards)}"
                right = "there must be one observation more than actions, rewards and terminations"
                raise UserError(f"has an episode of {has}: {right}")
    if not parts:
        raise UserError("has no steps")
    obs, actions, rewards, terminated, next_obs = (np.concatenate(part).astype(np.float32) for part in zip(*parts))
    return Dataset(obs, actions, rewards, terminated > 0, next_obs, np.ones(len(obs), bool),
                   np.cumsum([0, *(len(part[2]) for part in parts[:-1])]),
                   env_id=json.loads(spec)["id"] if spec else None, env_spec=spec,
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
        raise UserError(f"has a space {space['type']}: offline scripts need Box, or Dict and Tuple of Box")
    return np.asarray(values).reshape(len(values), int(np.prod(space["shape"])))


def check_rows(**columns: np.ndarray) -> None:
    for key, column in columns.items():
        for row in np.argwhere(~np.isfinite(column))[:1, 0]:
            raise UserError(f"has {column[row].tolist()} in row {row} of {key}: all numbers must be finite")


def check_spaces(data: Dataset, obs_size: int, action_space) -> None:
    """Raises UserError where the dataset cannot be of an environment with `obs_size` numbers in a flattened observation
    and this action space."""
    if not is_bounded(action_space) or (action_space.low >= action_space.high).any():
        right = "it must be a Box of floats with finite bounds, the upper above the lower"
        raise UserError(f"the environment has the action space {action_space}: {right}")
    sizes, wanted = (data.obs.shape[1], data.actions.shape[1]), (obs_size, int(np.prod(action_space.shape)))
    if sizes != wanted:
        wrong = f"--dataset {data.name} has {sizes[0]} observation and {sizes[1]} action numbers a step"
        raise UserError(f"{wrong}, but the environment has {wanted[0]} and {wanted[1]}: name its own with --env-id")
    low, high = action_space.low.ravel(), action_space.high.ravel()
    for row in np.argwhere((data.actions < low - 1e-4) | (data.actions > high + 1e-4))[:1, 0]:
        wrong = f"--dataset {data.name} has the action {data.actions[row].tolist()} in row {row}"
        raise UserError(f"{wrong}: the environment's bounds are {low.tolist()} and {high.tolist()}")
