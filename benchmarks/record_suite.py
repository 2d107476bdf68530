"""Records D4RL's collections of an environment with sac.py, by D4RL's protocol (arXiv 2004.07219, appendix C).

    python benchmarks/record_suite.py --env-id Hopper-v5 --output data/Hopper-v5
    python benchmarks/record_suite.py --env-id Hopper-v5 --output data/small --total-timesteps 2000 --record-steps 500

The first takes about three hours on one core.

    random, expert     sampled actions of the untrained and of the last agent
    medium             of the first one whose return had come a third of the way between theirs
    medium-replay      all that training had seen by then; full-replay: all that it saw
    medium-expert      medium followed by expert

Each is one HDF5 file with D4RL's keys. n steps, one episode after the other, e episodes:

    observations (n, D), actions (n, A) in the environment's units, rewards (n,)      float32
    terminals, timeouts (n,)      bool: the episode ended here by itself; it was cut off here
    last_observations (e, D)      what the last step of each episode led to, which D4RL leaves out

Attributes: the environment, and the returns of the random and the expert agent. A run that was stopped starts anew.
(Minari's DataCollector is not used: it needs jax, and its resets do not follow --seed.)
"""

import copy
import json
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import gymnasium as gym
import h5py
import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from algos import sac  # noqa: E402
from utils.control import evaluate, make_env, seed_of, to_env, try_out  # noqa: E402
from utils.core import Run  # noqa: E402


class Recorder(gym.Wrapper):
    """Keeps every step: observation, action, reward, terminated, truncated, next observation."""

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.rows: list[tuple] = []

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        self.obs = obs.astype(np.float32)  # a copy: environments may write into the same memory
        return obs, info

    def step(self, action):
        row = self.obs, action.astype(np.float32).ravel()
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.obs = obs.astype(np.float32)
        self.rows.append((*row, reward, terminated, truncated, self.obs))
        return obs, reward, terminated, truncated, info


def save(path: Path, about: dict, *parts: list[tuple]) -> None:
    """Writes parts of a Recorder's rows as one collection; the last row of a part is a cut where no episode ends.
    about: attributes."""
    obs, actions, rewards, terminals, timeouts, next_obs = (np.array(column) for column in zip(*sum(parts, [])))
    last = np.cumsum([len(part) for part in parts]) - 1
    timeouts[last] |= ~terminals[last]
    columns = {"observations": obs, "actions": actions, "rewards": rewards.astype(np.float32), "terminals": terminals,
               "timeouts": timeouts, "last_observations": next_obs[terminals | timeouts]}  # fmt: skip
    with h5py.File(path, "w") as file:
        for name, column in columns.items():
            file.create_dataset(name, data=column, compression="gzip", shuffle=True)
        file.attrs.update(about)


def train(args: sac.Args) -> tuple[list[tuple], list[tuple[int, float, sac.Agent]]]:
    """Trains sac.py. Returns the rows of all that it saw, and (step, return, agent) of each evaluation."""
    recorders, agents = [], []

    def make_vector(make, *rest):
        recorders.append(Recorder(make()))
        return vector(lambda: recorders[0], *rest)

    class Kept(Run):
        def end_step(self, step, parts):
            if not agents:
                agents.append((0, -np.inf, copy.deepcopy(parts["agent"])))  # before the first update
            if self.history and self.history[-1]["step"] == step and "eval/return" in self.history[-1]:
                agents.append((step, self.history[-1]["eval/return"], copy.deepcopy(parts["agent"])))
            super().end_step(step, parts)

    vector = sac.make_vector
    with mock.patch.multiple(sac, Run=Kept, make_vector=make_vector):
        sac.train(args)
    return recorders[0].rows, agents


def play(agent: sac.Agent, args: sac.Args, steps: int) -> list[tuple]:
    """The rows of that many steps with sampled actions."""
    env, generator = Recorder(make_env(args)), torch.Generator(args.device).manual_seed(args.seed)
    obs, _ = env.reset(seed=seed_of(args.seed, 2**30))
    while len(env.rows) < steps:
        action = to_env(sac.act(agent.actor, env.action_space, obs[None], 1.0, generator), env.action_space)[0]
        obs, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            obs, _ = env.reset()
    return env.rows


def record(args: sac.Args, output: Path, record_steps: int) -> None:
    """Writes the six collections of one run of sac.py with one environment."""
    seen, (untrained, *agents) = train(args)
    make, actor = partial(make_env, args), untrained[2].actor
    env, eval_envs = try_out(make, args)
    space, device = env.action_space, torch.device(args.device)
    low = evaluate(eval_envs, lambda *x: to_env(sac.act(actor, space, *x), space), args, device)["eval/return"]
    high = agents[-1][1]
    medium = next((one for one in agents if one[1] >= low + (high - low) / 3), agents[-1])
    random, medium_rows, expert = (play(one[2], args, record_steps) for one in (untrained, medium, agents[-1]))
    about = {"env_id": args.env_id, "env_kwargs": json.dumps(args.env_kwargs), "seed": args.seed,
             "medium_step": medium[0], "random_return": low, "expert_return": high}  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    collections = {"random": [random], "full-replay": [seen], "medium-replay": [seen[: medium[0]]],
                   "medium": [medium_rows], "medium-expert": [medium_rows, expert], "expert": [expert]}  # fmt: skip
    kept = list(collections) if high > low else ["random", "full-replay"]  # who has learned nothing is no expert
    for name in kept:
        save(output / f"{name}.hdf5", about, *collections[name])
    print(f"collections: {output}: {', '.join(kept)}; returns of {low:.4g} and {high:.4g}", flush=True)


def main(env_id: str, output: Path, total_timesteps: int = 1_000_000, record_steps: int = 1_000_000, seed: int = 1):
    """record_steps: of each of random, medium and expert."""
    args = sac.Args(env_id=env_id, total_timesteps=total_timesteps, seed=seed, output_dir=str(output / "runs"),
                    learning_starts=min(10_000, total_timesteps // 10),
                    eval_every=max(total_timesteps // 50, 1))  # fmt: skip
    record(args, output, record_steps)


if __name__ == "__main__":
    tyro.cli(main)
