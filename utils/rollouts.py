"""Evaluation in environments: episodes of its own, apart from training, and what --evaluate does.

Shapes: N environments, D observation numbers, A action numbers.
"""

import json
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from utils.checkpoint import load_newest, restore, rng_state, set_rng_state
from utils.cli import LOGGING_FLAGS, check_unchanged
from utils.envs import EnvArgs, Episode
from utils.errors import UserError

LONGEST = 50_000  # steps after which an evaluation episode counts as it stands
FREE_FLAGS = ("evaluate", "resume", "seed", "device", "threads", "eval_episodes", "capture_video", *LOGGING_FLAGS)


def evaluate(make: Callable, act: Callable, episodes: int, seed: int, device: torch.device,
             video: Path | None = None) -> dict[str, float]:  # fmt: skip
    """One episode in each of 2 x `episodes` environments of its own: half with the likeliest action, half sampled.

    act(obs (N, D), scale (N, 1), generator) -> actions; `scale` 0 or 1 multiplies the noise of a row. Start states are
    functions of `seed`, hence the same at every evaluation. Returns eval/return, eval/return_stochastic, eval/length,
    and eval/success where the environment reports it: the share of episodes with a success in any step.
    """
    generator = torch.Generator(device).manual_seed(seed)
    scale = torch.cat([torch.zeros(episodes, 1), torch.ones(episodes, 1)]).to(device)
    returns, lengths, success = rollouts(make, lambda obs, *_: act(obs, scale, generator), 2 * episodes, seed, video)
    columns = {"eval/return": returns[:episodes], "eval/return_stochastic": returns[episodes:],
               "eval/length": lengths[:episodes]}  # fmt: skip
    columns |= {} if np.isnan(success).any() else {"eval/success": success[:episodes]}
    return {name: column.mean().item() for name, column in columns.items()}


def rollouts(make: Callable, act: Callable, episodes: int, seed: int, video: Path | None = None,
             starts: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """One episode in each of N = `episodes` environments of its own: returns (N,), lengths (N,), success (N,), which
    is 0 or 1, NaN where the environment's info has neither "success" nor "is_success". Environments whose numbers are
    equal modulo `starts` start alike.

    act(obs (N, D), rewards (N,) of the step before, running (N,) bool) -> actions; rows whose episode is over keep
    their last observation, and their actions are ignored. No random numbers of the training's are used.
    """
    before = rng_state()  # an environment may draw from the global generators, which are the training's
    try:
        made = [recorded(make, video) if video and i == 0 else make() for i in range(episodes)]
        envs = [Episode(env, seed + 2**31, i % (starts or episodes)) for i, env in enumerate(made)]
        obs = np.stack([env.reset()[0] for env in envs]).astype(envs[0].observation_space.dtype)
        (rewards, returns, lengths), success = np.zeros((3, episodes)), np.full(episodes, np.nan)
        running = np.ones(episodes, bool)
        while running.any() and lengths.max() < LONGEST:
            actions = act(obs, rewards, running)
            for i in np.flatnonzero(running):
                obs[i], rewards[i], terminated, truncated, _ = envs[i].step(actions[i])
                if (reported := envs[i].info.get("success", envs[i].info.get("is_success"))) is not None:
                    success[i] = np.fmax(success[i], float(reported))
                running[i] = not (terminated or truncated)
                returns[i] += rewards[i]
                lengths[i] += 1
        if running.any():
            print(f"{running.sum()} of {episodes} evaluation episodes were cut off after {LONGEST} steps: "
                  "--env-kwargs max_episode_steps=1000 sets a limit")  # fmt: skip
        for env in envs:
            env.close()
    finally:
        set_rng_state(before)
    return returns, lengths, success


def recorded(make: Callable, video: Path) -> gym.Env:
    """An environment whose first episode becomes a file in `video`. Raises UserError where it cannot be drawn."""
    try:
        env = make(render_mode="rgb_array")
        env.reset()
        env.render()  # what is missing on this machine shows here
        return gym.wrappers.RecordVideo(env, str(video), lambda n: n == 0)
    except Exception as error:
        raise UserError(f"--capture-video cannot draw this environment here ({error}): leave it out") from error


def score_saved(args: EnvArgs, score_agent: Callable, free: tuple[str, ...] = (), **parts) -> list[dict]:
    """What --evaluate does: `parts` get their state from the newest checkpoint of that run, and the score is printed as
    JSON. Raises UserError where an argument differs from the run's, other than those of evaluation and `free`."""
    folder = Path(args.evaluate)
    check_unchanged(args, folder, (*FREE_FLAGS, *free), "with --evaluate")
    restore(load_newest(folder / "checkpoints"), **parts)
    print(json.dumps(score_agent(folder / "video" if args.capture_video else None)))
    return []
