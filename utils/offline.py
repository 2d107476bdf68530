"""Datasets for offline scripts: D4RL's HDF5 files, Minari's datasets, and the collections that sac.py records.

Shapes: n rows, D observation numbers, A action numbers; rows follow each other, one trajectory after the other.
"""

import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import gymnasium as gym
import numpy as np

from utils.envs import EnvArgs
from utils.errors import UserError
from utils.run import Run

SHIPPED = Path(__file__).resolve().parent / "hopper.hdf5"
D4RL = {  # family -> environment, return of a random and of an expert policy (D4RL's infos.py); Ant observes less today
    "halfcheetah": ("HalfCheetah-v4", (-280.178953, 12135.0)),
    "hopper": ("Hopper-v4", (-20.272305, 3234.3)),
    "walker2d": ("Walker2d-v4", (1.629008, 4592.3)),
}
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
        args.env_id, args.env_spec = data.env_id, data.env_spec
        args.env_kwargs = args.env_kwargs or data.env_kwargs
    if (data.env_id, data.env_kwargs, data.env_spec) != (args.env_id, args.env_kwargs, args.env_spec):
        data.returns = ()  # those of another environment
    data.env_id = args.env_id
    if not data.known.any():
        raise UserError(f"--dataset {data.name} has no step with a known next observation: it is too short")
    return data


def check_finite(name: str, columns: dict[str, np.ndarray]) -> None:
    for key, column in columns.items():
        for row in np.argwhere(~np.isfinite(column))[:1, 0]:
            wrong = f"--dataset {name} has {column[row].tolist()} in row {row} of {key}"
            raise UserError(f"{wrong}: all numbers must be finite")


def read_hdf5(path: Path) -> Dataset:
    try:
        import h5py
    except ImportError as error:
        raise UserError(f"--dataset {path} needs h5py: pip install h5py") from error
    try:
        with h5py.File(path) as file:
            if missing := [key for key in KEYS if key not in file]:
                right = f"it must have the keys of D4RL's v2 files ({', '.join(KEYS)})"
                raise UserError(f"--dataset {path} lacks {', '.join(missing)}: {right}")
            names = [key for key in (*KEYS, "last_observations") if key in file]
            columns = {key: np.asarray(file[key][()], np.float32) for key in names}
            about = dict(file.attrs)
    except (OSError, RuntimeError, KeyError, AttributeError, TypeError, ValueError) as error:  # all that h5py raises
        raise UserError(f"--dataset {path} cannot be read as HDF5 ({error}): it is cut off or another kind") from error
    for key, column in columns.items():
        if key in ("rewards", "terminals", "timeouts"):
            columns[key] = column.ravel()
        elif column.ndim != 2:
            wrong = f"--dataset {path} has {key} of shape {column.shape}"
            raise UserError(f"{wrong}: there must be a row of numbers for each step")
    rows = {key: len(columns[key]) for key in KEYS}
    if len(set(rows.values())) > 1 or not rows["rewards"]:
        raise UserError(f"--dataset {path} must have as many rows in each column, and one at least: it has {rows}")
    check_finite(str(path), columns)
    obs, actions, rewards, terminals, timeouts = (columns[key] for key in KEYS)
    ends = (terminals > 0) | (timeouts > 0)
    cut_off, ends[-1] = not ends[-1], True
    known = timeouts <= 0  # as D4RL's qlearning_dataset: the row after a time-out, and that after the last, is not next
    known[-1] = False
    data = Dataset(obs, actions, rewards, terminals > 0, np.roll(obs, -1, 0), known,
                   np.append(0, np.flatnonzero(ends[:-1]) + 1), cut_off)  # fmt: skip
    if "last_observations" not in columns:
        if re.match(r"ant_?maze|(mini_)?kitchen|(pen|door|hammer|relocate)[-_]", path.name.lower()):
            wrong = f"--dataset {path} is of an environment of D4RL's that Gymnasium has made anew"
            raise UserError(f"{wrong}: use Minari's data of the new one (D4RL/antmaze/umaze-v1, D4RL/kitchen/mixed-v2)")
        if family := re.match(f"({'|'.join(D4RL)})[-_]", path.name.lower()):
            data.d4rl, (data.env_id, data.returns) = True, D4RL[family[1]]
        return data
    wanted = (int(ends.sum()), obs.shape[1])
    if (found := columns["last_observations"].shape) != wanted:
        wrong = f"--dataset {path} has last_observations {found}"
        raise UserError(f"{wrong}: its {wanted[0]} trajectories end in {wanted}")
    data.next_obs[ends], data.known[:], data.cut_off = columns["last_observations"], True, False
    try:
        data.env_id, data.env_kwargs = about.get("env_id"), tuple(json.loads(about.get("env_kwargs", "[]")))
        data.returns = tuple(float(about[key]) for key in ("random_return", "expert_return") if key in about)
    except (TypeError, ValueError) as error:
        wrong = f"--dataset {path} has attributes that are not those of a collection ({error})"
        raise UserError(f"{wrong}: record it with sac.py --record-dataset") from error
    return data


def read_minari(name: str) -> Dataset:
    """A local folder (that of the dataset, or its data/), or the id of a dataset that is here or can be downloaded. The
    environment is the one that the dataset names for evaluation, if any, else that of the recording."""
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
        spec = about.get("eval_env_spec") or about.get("env_spec") or ""
        spaces = [json.loads(about[f"{which}_space"]) for which in ("observation", "action")]
        parts = []
        for episode in dataset:
            if steps := len(episode.rewards):
                obs, actions = flat(spaces[0], episode.observations), flat(spaces[1], episode.actions)
                parts.append((obs[:-1], actions, episode.rewards, episode.terminations, obs[1:]))
                if {np.shape(part)[0] for part in parts[-1]} != {steps} or np.ndim(episode.rewards) != 1:
                    wrong = f"--dataset {name} has an episode of {len(obs)} observations, {len(actions)} actions and"
                    right = "there must be one observation more than actions, rewards and terminations"
                    raise UserError(f"{wrong} rewards {np.shape(episode.rewards)}: {right}")
        if not parts:
            raise UserError(f"--dataset {name} has no steps")
        obs, actions, rewards, terminated, next_obs = (np.concatenate(part).astype(np.float32) for part in zip(*parts))
        starts = np.cumsum([0, *(len(part[2]) for part in parts[:-1])])
        returns = tuple(float(about[key]) for key in ("ref_min_score", "ref_max_score") if about.get(key) is not None)
        env_id = json.loads(spec)["id"] if spec else None
    except UserError:
        raise
    except Exception as error:  # of disk, network, format: Minari raises what its libraries do
        raise UserError(f"--dataset {name} cannot be read by Minari ({type(error).__name__}: {error})") from error
    check_finite(name, {"observations": obs, "actions": actions, "rewards": rewards, "next observations": next_obs})
    return Dataset(obs, actions, rewards, terminated > 0, next_obs, np.ones(len(obs), bool), starts, env_id=env_id,
                   env_spec=spec, returns=returns)  # fmt: skip


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
