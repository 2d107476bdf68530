"""Environments: making one or a vector of them, going on inside an episode after a resume, and evaluation.

Shapes: N environments, D observation numbers, A action numbers.
"""

import contextlib
import importlib
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from utils.checkpoint import load_newest, rng_state, set_rng_state
from utils.errors import UserError
from utils.imports import users_imports
from utils.run import LOGGING_FLAGS, RunArgs, saved_args

LONGEST_LOG = 200_000  # actions of one episode that are kept for a resume; a longer episode starts anew
EVALUATION_FLAGS = ("evaluate", "resume", "seed", "device", "threads", "eval_episodes", "capture_video", *LOGGING_FLAGS)
LONGEST_EVALUATION = 50_000  # steps after which an evaluation episode counts as it stands


@dataclass
class EnvArgs(RunArgs):
    env_kwargs: tuple[str, ...] = ()
    """NAME=VALUE pairs for the environment; a VALUE is read as JSON where it is JSON, else as text"""
    eval_every: int = 10_000
    """environment steps between evaluations; 0: at the end only"""
    eval_episodes: int = 10
    """evaluation episodes, once with the likeliest action and once with sampled ones"""
    evaluate: str = ""
    """folder of a run whose agent is scored instead of training one, with the statistics that it was trained with"""
    capture_video: bool = False
    """with --evaluate: write RUN/video/ of the first episode"""


class Episode(gym.Wrapper):
    """Outermost wrapper of every environment. Episode k of environment i always starts from the seed that (seed, i, k)
    gives, so the seed and the actions since are all that a resume needs to be inside the same episode again, in any
    environment that keeps Gymnasium's promise that a seed determines what follows. Passes on info["life_lost"] and
    drops every other info: vectors are slow to gather it."""

    def __init__(self, env: gym.Env, seed: int, index: int):
        super().__init__(env)
        self.origin, self.episode, self.saved = (seed % 2**64, index), -1, None

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        return self.start()

    def start(self):
        seed = np.random.SeedSequence([*self.origin, self.episode]).generate_state(1)[0]
        self.obs, _ = self.env.reset(seed=int(seed))
        return self.obs, {}

    def step(self, action):
        self.obs, reward, terminated, truncated, theirs = self.env.step(action)
        if terminated or truncated:
            self.obs = np.array(self.obs)  # a copy: the reset that follows may write into the same array
        return self.obs, reward, terminated, truncated, {"life_lost": True} if theirs.get("life_lost") else {}

    def restore(self) -> bool:
        """Replays the episode in `saved` (set_attr is how a vector hands each environment its own). False where that
        does not lead to the observation that was saved: then a new episode has begun."""
        saved, self.saved = self.saved, None
        self.episode, obs = saved["episode"], saved["obs"].numpy()
        self.start()
        if len(saved["actions"]) <= LONGEST_LOG:
            actions = saved["actions"].numpy().copy()  # the log goes on from them, and step may change its own in place
            ended = any(any(self.step(action)[2:4]) for action in actions)
            if not ended and np.array_equal(np.asarray(self.obs).astype(obs.dtype), obs):
                return True
        self.reset()
        return False


class Log:
    """What each environment of a vector has done since its episode began. The training process keeps it: when a step
    fails, some environments have taken it, and the process of the one that failed answers no more."""

    def __init__(self, num_envs: int):
        self.episode, self.length = np.zeros((2, num_envs), int)
        self.total, self.actions = np.zeros(num_envs), [np.array([]) for _ in range(num_envs)]

    def begin(self, index: int, episode: int, total: float = 0.0, actions=()) -> None:
        self.episode[index], self.total[index] = episode, total
        self.length[index], self.actions[index] = len(actions), np.array(actions)

    def step(self, actions: np.ndarray, rewards: np.ndarray, done: np.ndarray) -> list[tuple[float, int]]:
        """Adds a step that all have taken. Returns (return, length) of the episodes that it ended."""
        for i, kept in enumerate(self.length.tolist()):
            if kept == len(self.actions[i]) <= LONGEST_LOG:  # doubles: a list would be converted by every `state`
                self.actions[i] = np.resize(self.actions[i] if kept else actions, (2 * kept + 8, *actions.shape[1:]))
            if kept <= LONGEST_LOG:
                self.actions[i][kept] = actions[i]
        self.total += rewards
        self.length += 1
        ended = np.flatnonzero(done)
        episodes = [(self.total[i].item(), self.length[i].item()) for i in ended]
        for i in ended:
            self.begin(i, self.episode[i] + 1)
        return episodes

    def state(self, obs: np.ndarray) -> list[dict]:
        """What `restore_vector` needs of each environment, as weights_only loading accepts it. obs (N, D): the next."""
        return [{"episode": self.episode[i].item(), "total": self.total[i].item(), "obs": torch.tensor(obs[i]),
                 "actions": torch.tensor(kept[: min(self.length[i], LONGEST_LOG + 1)])}
                for i, kept in enumerate(self.actions)]  # fmt: skip


def make_env(
    env_id: str, env_kwargs: tuple[str, ...] = (), render_mode: str | None = None, flatten: bool = True
) -> gym.Env:
    """One environment, with `flatten` its observations flattened to a vector where they are not one: images,
    dictionaries, tuples, discrete numbers (one-hot). `module:Name-v0` imports `module` first, also from the working
    directory.

    Raises UserError for an unknown name, arguments that it does not take, and spaces that have no vector form.
    """
    module, _, name = env_id.rpartition(":")
    kwargs = parse_kwargs(env_kwargs) | ({"render_mode": render_mode} if render_mode else {})
    try:
        with users_imports(Path.cwd()) if module else contextlib.nullcontext():  # as with python -m
            if module:
                importlib.import_module(module)
            env = gym.make(name, disable_env_checker=True, **kwargs)
    except ModuleNotFoundError as error:
        raise UserError(f"cannot make --env-id {env_id} ({error}): install it, or start in the folder that it lies "
                        "in") from error  # fmt: skip
    except (gym.error.Error, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot make --env-id {env_id} ({reason}): give a registered Gymnasium name, or MODULE:NAME "
                        "of a module that registers it") from error  # fmt: skip
    space = env.observation_space
    if flatten and (not isinstance(space, gym.spaces.Box) or len(space.shape) != 1):
        if not space.is_np_flattenable:
            raise UserError(f"--env-id {env_id} has the observation space {space}: it must have a fixed number of "
                            "values")  # fmt: skip
        env = gym.wrappers.FlattenObservation(env)
    return env


def parse_kwargs(pairs: tuple[str, ...]) -> dict:
    kwargs = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--env-kwargs {pair} is not NAME=VALUE")
        kwargs[name] = value
        with contextlib.suppress(ValueError):
            kwargs[name] = json.loads(value)
    return kwargs


def make_vector(make: Callable[[], gym.Env], num_envs: int, seed: int, kind: str = "sync") -> gym.vector.VectorEnv:
    """`num_envs` environments that start their next episode in the step that ends one (SAME_STEP): the observation that
    comes back is the new episode's first, and infos["final_obs"] holds the old one's last. async: a process each."""
    trainer = os.getpid()

    def start(index: int) -> Episode:
        if os.getpid() != trainer:  # Ctrl-C reaches every process of a terminal, but only the run may answer
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return Episode(make(), seed, index)

    thunks = [partial(start, index) for index in range(num_envs)]
    vector = AsyncVectorEnv if kind == "async" else partial(SyncVectorEnv, copy=False)
    envs = vector(thunks, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.log = Log(num_envs)
    return envs


def step_vector(envs, actions: np.ndarray, step: int):
    """One step of a SAME_STEP vector: (observations to act on next, true next observations, rewards, terminated,
    truncated, episodes that ended as (return, length)). The two observations differ where an episode ended: there the
    second is the last one of the old episode, which a bootstrap needs. info["life_lost"] counts as terminated, too,
    though the episode goes on.

    Raises UserError where the environment returns NaN or infinity, with `step` and what it returned.
    """
    taken = actions.copy()  # an environment may change its own in place
    obs, rewards, terminated, truncated, infos = envs.step(actions)
    true_obs, done = obs, terminated | truncated
    if "life_lost" in infos:
        terminated = terminated | infos["life_lost"]
    if done.any():
        true_obs = obs.copy()
        for i in np.flatnonzero(done):
            true_obs[i] = infos["final_obs"][i]
        check_finite(obs, rewards, step)
    check_finite(true_obs, rewards, step)
    return obs, true_obs, rewards, terminated, truncated, envs.log.step(taken, rewards, done)


def check_finite(obs: np.ndarray, rewards: np.ndarray, step: int) -> None:
    finite = np.isfinite(rewards) & np.isfinite(obs).reshape(len(obs), -1).all(1)
    if not finite.all():
        bad = int(np.flatnonzero(~finite)[0])
        raise UserError(f"environment {bad} returned reward {rewards[bad]} and observation {obs[bad].tolist()} at step "
                        f"{step}: both must be finite; the last checkpoint is kept")  # fmt: skip


def reset_vector(envs) -> np.ndarray:
    """The first observations (N, D), a copy. Raises UserError where they are not finite."""
    obs = envs.reset()[0].copy()
    check_finite(obs, np.zeros(len(obs)), 0)
    return obs


def restore_vector(envs, states: list[dict]) -> np.ndarray:
    """Brings every environment back into the episode of its state; says so where one could not be and began a new
    episode. Returns the observations (N, D) to act on."""
    envs.set_attr("saved", states)
    restored = envs.call("restore")
    for i, state in enumerate(states):
        if restored[i]:
            envs.log.begin(i, state["episode"], state["total"], state["actions"].numpy())
        else:
            envs.log.begin(i, state["episode"] + 1)
    if lost := restored.count(False):
        print(f"{lost} of {len(states)} environments could not be brought back inside their episode and begin new ones")
    return np.stack(envs.get_attr("obs")).astype(envs.single_observation_space.dtype)


def evaluate(
    make: Callable, act: Callable, episodes: int, seed: int, device, video: Path | None = None
) -> dict[str, float]:
    """One episode in each of 2 x `episodes` environments of its own: half with the likeliest action, half sampled.

    act(obs (N, D), scale (N, 1), generator) -> actions; `scale` 0 or 1 multiplies the noise of a row. Start states are
    functions of `seed`, hence the same at every evaluation. Returns eval/return, eval/return_stochastic, eval/length.
    """
    generator = torch.Generator(device).manual_seed(seed)
    scale = torch.cat([torch.zeros(episodes, 1), torch.ones(episodes, 1)]).to(device)
    returns, lengths = rollouts(make, lambda obs, *_: act(obs, scale, generator), 2 * episodes, seed, video)
    return {"eval/return": returns[:episodes].mean().item(), "eval/return_stochastic": returns[episodes:].mean().item(),
            "eval/length": lengths[:episodes].mean().item()}  # fmt: skip


def rollouts(
    make: Callable, act: Callable, episodes: int, seed: int, video: Path | None = None, starts: int | None = None
):
    """One episode in each of N = `episodes` environments of its own, stepped together: returns (N,), lengths (N,).
    Environments whose numbers are equal modulo `starts` start alike.

    act(obs (N, D), rewards (N,) of the step before, running (N,) bool) -> actions; rows whose episode is over are
    ignored. No random numbers of the training's are used.
    """
    thunks = [lambda i=i: Episode(make(), seed + 2**31, i % (starts or episodes)) for i in range(episodes)]
    if video is not None:
        thunks[0] = lambda: Episode(recorded(make, video), seed + 2**31, 0)
    before = rng_state()  # an environment may draw from the global generators, which are the training's
    returns, lengths, first = np.zeros(episodes), np.zeros(episodes), np.ones(episodes, bool)
    try:
        envs = SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP, copy=False)
        obs, rewards = envs.reset()[0], np.zeros(episodes)
        for _ in range(LONGEST_EVALUATION):
            obs, rewards, terminated, truncated, _ = envs.step(act(obs, rewards, first))
            returns += rewards * first
            lengths += first
            first &= ~(terminated | truncated)
            if not first.any():
                break
        else:
            print(f"{first.sum()} of {episodes} evaluation episodes were cut off after {LONGEST_EVALUATION} steps: "
                  "--env-kwargs max_episode_steps=1000 sets a limit")  # fmt: skip
        envs.close()
    finally:
        set_rng_state(before)
    return returns, lengths


def recorded(make: Callable, video: Path) -> gym.Env:
    """An environment whose first episode becomes a file in `video`. Raises UserError where it cannot be drawn."""
    try:
        env = make(render_mode="rgb_array")
        env.reset()
        env.render()  # what is missing on this machine shows here
        return gym.wrappers.RecordVideo(env, str(video), lambda n: n == 0)
    except Exception as error:
        raise UserError(f"--capture-video cannot draw this environment here ({error}): leave it out") from error


def saved_agent(args: EnvArgs, free: tuple[str, ...] = ()) -> dict:
    """The state in the newest checkpoint of the run that --evaluate names. Raises UserError where the folder is no
    run's, or where an argument, other than those of evaluation and `free`, is not the one it was trained with."""
    folder = Path(args.evaluate)
    for name, value in saved_args(folder).items():
        if getattr(args, name) != value and name not in (*EVALUATION_FLAGS, *free):
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)} but the run in {folder} has {value}: "
                            "it cannot change with --evaluate")  # fmt: skip
    return load_newest(folder / "checkpoints")
