"""Recording collections by D4RL's protocol, each in one HDF5 file with D4RL's keys, so that what reads D4RL reads ours.

    observations (n, D), actions (n, A) in the environment's units, rewards (n,)      float32
    terminals (n,), timeouts (n,)      bool: the episode ended here by itself; it was cut off here
    last_observations (e, D)           what the last step of each of the e episodes led to, which D4RL leaves out

Next observations are not stored: they are the row after, or the episode's last observation. Attributes say where the
data comes from.
"""

import json
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from utils.checkpoint import write_atomically
from utils.envs import make_vector, reset_vector, step_vector
from utils.errors import UserError
from utils.replay import ReplayBuffer
from utils.spaces import to_env


def check_recording(args) -> None:
    """Raises UserError where --record-dataset cannot be done."""
    sizes = (args.buffer_size, args.record_steps)
    if min(sizes) < 10 or args.buffer_size < args.total_timesteps or args.record_steps % 10:
        raise UserError("--record-dataset needs a --buffer-size of --total-timesteps, and --record-steps in tens")
    try:
        Path(args.record_dataset).mkdir(parents=True, exist_ok=True)
        import h5py  # noqa: F401
    except (OSError, ImportError) as error:
        right = "name a writable folder, and install h5py"
        raise UserError(f"cannot record to --record-dataset {args.record_dataset} ({error}): {right}") from error


def snapshot(step: int, columns: dict[str, float], actor: torch.nn.Module) -> tuple[int, float, dict]:
    """The step, its eval/return and a copy of the weights."""
    return step, columns["eval/return"], {name: value.clone() for name, value in actor.state_dict().items()}


def record(args, actor: torch.nn.Module, act: Callable, snapshots: list, replay: ReplayBuffer, make: Callable,
           space: gym.spaces.Box) -> None:  # fmt: skip
    """Writes D4RL's five collections (arXiv 2004.07219, appendix C) to --record-dataset. `snapshots` are those of all
    evaluations, from before the first update on; act(actor, space, obs): actions in [-1, 1].

    random, expert: sampled actions of the first and of the last actor. medium: of the first actor that had come a third
    of the way between their returns. medium-replay: all that had been in the replay buffer by then. full-replay: all
    that is in it at the end. Time-outs are inferred: see save_collection."""
    (_, low, _), (_, high, _) = snapshots[0], snapshots[-1]
    medium = next((one for one in snapshots[1:] if one[1] >= low + (high - low) / 3), snapshots[-1])
    for name, (step, score, weights) in {"random": snapshots[0], "medium-replay": medium, "medium": medium,
                                         "full-replay": snapshots[-1], "expert": snapshots[-1]}.items():  # fmt: skip
        if name.endswith("-replay"):
            rows, count = replay.newest(replay.total)[:step], args.num_envs
        else:
            actor.load_state_dict(weights)
            envs, count = make_vector(make, 10, args.seed + 2**30), 10
            sampled, obs = ReplayBuffer(args.record_steps, replay.sizes, torch.device("cpu")), reset_vector(envs)
            while sampled.total < args.record_steps:
                actions = act(actor, space, obs)
                next_obs, true_obs, rewards, ends, *_ = step_vector(envs, to_env(actions, space), sampled.total)
                sampled.add(obs, actions, rewards[:, None], ends[:, None], true_obs)
                obs = next_obs.copy()
            rows = sampled.newest(args.record_steps)
        rows = torch.cat([rows[i::count] for i in range(count)])  # each environment's episodes one after the other
        obs, actions, rewards, terminals, next_obs = (part.numpy() for part in rows.split(replay.sizes, 1))
        about = {"env_id": args.env_id, "env_kwargs": json.dumps(args.env_kwargs), "seed": args.seed,
                 "policy_step": step, "policy_return": score, "random_return": low, "expert_return": high}  # fmt: skip
        save_collection(Path(args.record_dataset) / f"{name}.hdf5", obs, to_env(actions, space).reshape(len(obs), -1),
                        rewards[:, 0], terminals[:, 0] > 0, next_obs, about)  # fmt: skip
    print(f"collections: {args.record_dataset}", flush=True)


def save_collection(path: Path, obs, actions, rewards, terminals, next_obs, about: dict) -> None:
    """Writes transitions that follow each other: (n, D), (n, A), (n,), (n,) bool, (n, D). They do not store time-outs:
    one is inferred where an observation differs from the preceding next observation. A cut between two equal
    observations is missed. `about`: attributes, numbers or text."""
    import h5py  # only collections need it

    follows = np.append((next_obs[:-1] == obs[1:]).all(1), False)
    columns = {"observations": obs, "actions": actions, "rewards": rewards, "terminals": terminals,
               "timeouts": ~follows & ~terminals, "last_observations": next_obs[terminals | ~follows]}  # fmt: skip

    def write(temporary: Path) -> None:
        with h5py.File(temporary, "w") as file:
            for name, column in columns.items():
                file.create_dataset(name, data=column, compression="gzip", compression_opts=9, shuffle=True)
            file.attrs.update(about)

    write_atomically(path, write)
