"""Environments: making one or a vector of them, and going on inside an episode after a resume.

Shapes: N environments, D observation numbers, A action numbers.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import re
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec, WrapperSpec, load_env_creator
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from utils.cli import RunArgs
from utils.errors import NonNegativeInt, PositiveInt, UserError, parse_pairs
from utils.imports import users_imports
from utils.problems import PROBLEMS

LARGEST = float(np.finfo(np.float32).max)
LONGEST_LOG = 200_000  # actions of one episode that are kept for a resume; a longer episode starts anew
RESETS_ITSELF = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP
Vector = Any  # a vector environment with a Log in its attribute `log`, which their types lack


@dataclass
class EnvArgs(RunArgs):
    longest_gap = 50_000  # steps between evaluations that --eval-every leaves open
    most_threads = 2
    threads: NonNegativeInt = 0
    """CPU threads; 0: OMP_NUM_THREADS where set, else at most two (Atari: one per core). The second makes small
    networks 1.1 to 1.3 times as fast. Results are bit for bit equal at equal counts"""
    env_kwargs: tuple[str, ...] = ()
    """NAME=VALUE pairs for the environment; a VALUE is read as JSON where it is JSON, else as text"""
    eval_every: NonNegativeInt | None = None
    """steps between evaluations; 0: at the end only; None: a fifth of the run, 50,000 at most (Atari: 250,000)"""
    eval_episodes: PositiveInt = 10
    """evaluation episodes, once with the likeliest action and once with sampled ones"""
    evaluate: str = ""
    """folder of a run: score its agent, with the statistics of its training, instead of training one"""
    capture_video: bool = False
    """with --evaluate: write RUN/video/ of the first episode"""


class Episode(gym.Wrapper):
    """Outermost wrapper of every environment. Episode k of environment i always starts from the seed that (seed, i, k)
    gives. With this seed and the actions since, a resume returns to the same episode, if the environment keeps
    Gymnasium's promise: a seed determines what follows. Keeps the newest info in `info`, and passes on none of it but
    "life_lost": vectors are slow to gather it."""

    def __init__(self, env: gym.Env, seed: int, index: int):
        super().__init__(env)
        self.origin, self.episode = (seed % 2**64, index), -1
        self.saved: Any = None
        self.info: dict = {}

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        return self.start()

    def start(self):
        seed = np.random.SeedSequence([*self.origin, self.episode]).generate_state(1)[0]
        self.obs, _ = self.env.reset(seed=int(seed))
        return self.obs, {}

    def step(self, action):
        self.obs, reward, terminated, truncated, self.info = self.env.step(action)
        if terminated or truncated:
            self.obs = np.array(self.obs)  # a copy: the reset that follows may write into the same array
        return self.obs, reward, terminated, truncated, {"life_lost": True} if self.info.get("life_lost") else {}

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
    """What each environment of a vector has done since its episode began. The training process keeps it: after a
    failed step some environments have moved, and the process of the failed one no longer answers.

    replay: actions are kept. next_step: an episode that ends begins anew only in the step after, which does nothing
    else; environments of which this is the next step are `idle` (N,).
    """

    def __init__(self, num_envs: int, seed: int, replay: bool = True, next_step: bool = False):
        self.seed, self.replay, self.next_step, self.idle = seed, replay, next_step, np.zeros(num_envs, bool)
        self.episode, self.length = np.zeros((2, num_envs), int)
        self.total, self.actions = np.zeros(num_envs), [np.array([]) for _ in range(num_envs)]

    def begin(self, index: int, episode: int, total: float = 0.0, actions: Sequence[np.ndarray] = ()) -> None:
        self.episode[index], self.total[index] = episode, total
        self.length[index], self.actions[index] = len(actions), np.array(actions)

    def step(self, actions: np.ndarray, rewards: np.ndarray, ended: list[int]) -> list[tuple[float, int]]:
        """Adds a step that all have taken and that ended the episodes of `ended`. Returns their (return, length)."""
        for i, kept in enumerate(self.length.tolist() if self.replay else ()):
            if kept > LONGEST_LOG:
                continue
            if kept == len(self.actions[i]):  # the array doubles; PPO asks for `state` every iteration: a list is slow
                self.actions[i] = np.resize(self.actions[i] if kept else actions, (2 * kept + 8, *actions.shape[1:]))
            self.actions[i][kept] = actions[i]
        self.total += rewards
        self.length += ~self.idle
        if self.next_step:
            self.idle = np.isin(np.arange(len(self.idle)), ended)
        episodes = [(self.total[i].item(), self.length[i].item()) for i in ended]
        for i in ended:
            self.begin(i, self.episode[i] + 1)
        return episodes

    def state(self, obs: np.ndarray) -> list[dict]:
        """What `restore_vector` needs of each environment, as weights_only loading accepts it. obs (N, D): the next."""
        kept = np.minimum(self.length, LONGEST_LOG + 1)
        return [{"episode": self.episode[i].item(), "total": self.total[i].item(), "obs": torch.tensor(obs[i]),
                 "actions": torch.tensor(actions[: kept[i]])} for i, actions in enumerate(self.actions)]  # fmt: skip


def make_env(
    env_id: str, env_kwargs: tuple[str, ...] = (), render_mode: str | None = None, flatten: bool = True,
    images: bool = False, num_envs: int = 0,
) -> Any:  # fmt: skip
    """One environment, with `flatten` its observations flattened to a vector where they are not one: images,
    dictionaries, tuples, discrete numbers (one-hot). With `images`, bytes with three dimensions are not flattened but
    come as C x H x W; the smaller one of the first and the last dimension is taken for the channels.
    `module:Name-v0` imports `module` first, also from the working directory. A specification in JSON (EnvSpec.to_json)
    stands for the environment with its arguments and wrappers. With `num_envs` it is the vector that its
    `vector_entry_point` makes, as it is.

    Raises UserError for an unknown name, arguments that it does not take, and spaces that have no vector form.
    """
    is_spec = re.match(r'{.*?"id": *"([^"]*)"', env_id)
    shown = f"{is_spec[1]} of the dataset" if is_spec else env_id
    module, _, name = ("", "", env_id) if is_spec else env_id.rpartition(":")
    kwargs = parse_pairs(env_kwargs, "--env-kwargs") | ({"render_mode": render_mode} if render_mode else {})
    try:
        with users_imports(Path.cwd()) if module or is_spec else contextlib.nullcontext():  # as with python -m
            if module:
                importlib.import_module(module)
            elif name in PROBLEMS and name not in gym.registry:
                gym.register(name, PROBLEMS[name])
            if num_envs:
                return gym.make_vec(name, num_envs, "vector_entry_point", **kwargs)
            env = gym.make(read_spec(name) if is_spec else name, disable_env_checker=True, **kwargs)
    except ModuleNotFoundError as error:
        right = "install it, or start in the folder that holds it"
        raise UserError(f"cannot make --env-id {shown} ({error}): {right}") from error
    except (gym.error.Error, TypeError) as error:
        innermost = traceback.extract_tb((error.__context__ or error).__traceback__)[-1].filename
        if isinstance(error, TypeError) and not is_spec and not innermost.startswith(str(Path(gym.__file__).parent)):
            raise  # inside the user's constructor: its line says more than we could
        right = "give a registered Gymnasium name, or MODULE:NAME of a module that registers it"
        right = "--vector sync takes environments that have no vector of their own" if num_envs else right
        raise UserError(f"cannot make --env-id {shown} ({str(error).strip().splitlines()[0]}): {right}") from error
    space = env.observation_space
    if not flatten or isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
        return env
    if images and isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3:
        if space.shape[0] < space.shape[2]:
            return env
        low, high = (np.moveaxis(bound, 2, 0) for bound in (space.low, space.high))
        moved = gym.spaces.Box(low, high, dtype=np.uint8)
        return gym.wrappers.TransformObservation(env, lambda obs: np.moveaxis(obs, 2, 0), moved)
    if not space.is_np_flattenable:
        raise UserError(f"--env-id {env_id} has the observation space {space}: it must have a fixed number of values")
    return gym.wrappers.FlattenObservation(env)


def read_spec(text: str) -> EnvSpec:
    """A specification of any version of Gymnasium. A dataset may name any function of any module in it, so what is no
    environment or wrapper is refused."""
    known = {field.name for field in dataclasses.fields(EnvSpec) if field.init}  # 0.29 had one more
    try:
        fields = json.loads(text)
        wrappers = tuple(WrapperSpec(**wrapper) for wrapper in fields.pop("additional_wrappers", ()))
        spec = EnvSpec(**{key: fields[key] for key in known & fields.keys()}, additional_wrappers=wrappers)
        parts: list[Any] = [spec, *wrappers]
        for part in parts:
            kind = gym.Env if part is spec else gym.Wrapper
            if kind not in getattr(load_env_creator(part.entry_point), "__mro__", ()) or part.kwargs is None:
                raise TypeError(f"{part.entry_point} is no {kind.__name__} whose arguments are recorded")
    except (AttributeError, TypeError, ValueError) as error:
        raise gym.error.Error(str(error)) from error
    return spec


def open_env(args, make: Callable = make_env) -> tuple[Callable, int, Any]:
    """How the run makes an environment, how many numbers one observes (of images: their C, H, W), and its actions.
    Raises UserError where there is no such environment, or no such vector of its own."""
    if args.capture_video and not args.evaluate:
        raise UserError("--capture-video works with --evaluate RUN: it records a saved agent")
    make = partial(make, getattr(args, "env_spec", "") or args.env_id, args.env_kwargs)
    env = make()
    env.close()
    if getattr(args, "vector", "") == "native":
        envs = make(num_envs=1)
        envs.close()
        spaces, mode = (envs.single_observation_space, envs.single_action_space), envs.metadata.get("autoreset_mode")
        if spaces != (env.observation_space, env.action_space) or mode not in RESETS_ITSELF:
            found = f"--vector native makes {spaces} with the autoreset mode {mode}"
            raise UserError(f"{found}: it must be as one environment, and reset itself; --vector sync takes that one")
    shape = env.observation_space.shape
    return make, shape if len(shape) == 3 else shape[0], env.action_space


def make_vector(make: Callable[..., Any], num_envs: int, seed: int, kind: str = "sync") -> Vector:
    """`num_envs` environments that start their next episode in the step that ends one (SAME_STEP): the observation that
    comes back is the new episode's first, and infos["final_obs"] holds the old one's last. async: a process each.
    native: one of the environment's own, which may also do so in the step after (NEXT_STEP)."""
    envs: Vector
    if kind == "native":
        envs = make(num_envs=num_envs)
        next_step = envs.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
        envs.log = Log(num_envs, seed, replay=False, next_step=next_step)
        return envs
    trainer = os.getpid()

    def start(index: int) -> Episode:
        if os.getpid() != trainer:  # Ctrl-C reaches every process of a terminal, but only the run may answer
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return Episode(make(), seed, index)

    thunks = [partial(start, index) for index in range(num_envs)]
    vector = AsyncVectorEnv if kind == "async" else partial(SyncVectorEnv, copy=False)
    envs = vector(thunks, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.log = Log(num_envs, seed)
    return envs


def step_vector(envs: Vector, actions: np.ndarray, step: int, lives: bool = False) -> tuple:
    """One step of a vector: (observations to act on next, true next observations, rewards, terminated,
    truncated, episodes that ended as (return, length)). The two observations differ where an episode ended: there the
    second is the last one of the old episode, which a bootstrap needs. (Of a NEXT_STEP vector both are that; the row
    after it, `idle` in the log, is no step to learn from.) With `lives`, info["life_lost"] counts as terminated, too,
    though the episode goes on.

    Raises UserError where the environment returns NaN or infinity, with `step` and what it returned.
    """
    taken = actions.copy()  # an environment may change its own in place
    obs, rewards, terminated, truncated, infos = envs.step(actions)
    true_obs, ended = obs, (terminated | truncated).nonzero()[0].tolist()
    if lives and "life_lost" in infos:
        terminated = terminated | infos["life_lost"]
    if ended and not envs.log.next_step:
        true_obs = obs.copy()
        for i in ended:
            true_obs[i] = infos["final_obs"][i]
        check_finite(obs, rewards, step)
    check_finite(true_obs, rewards, step)
    return obs, true_obs, rewards, terminated, truncated, envs.log.step(taken, rewards, ended)


def check_finite(obs: np.ndarray, rewards: np.ndarray, step: int) -> None:
    squares = np.vdot(rewards, rewards) + (np.vdot(obs, obs) if obs.dtype.kind == "f" else 0)
    if squares <= LARGEST:  # as nearly always: then each number is finite; one call is faster than a look at each
        return
    finite = (abs(rewards) <= LARGEST) & (abs(obs) <= LARGEST).reshape(len(obs), -1).all(1)
    for bad in np.flatnonzero(~finite):
        found = f"reward {rewards[bad]} and observation {obs[bad].tolist()}"
        raise UserError(f"environment {bad} returned {found} at step {step}: both must be finite in float32")


def episode_columns(episodes: list[tuple[float, int]]) -> dict[str, float]:
    """Means over the episodes (return, length) that ended; no columns where none did."""
    return dict(zip(("return", "length"), np.mean(episodes, 0).tolist())) if episodes else {}


def reset_vector(envs: Vector) -> np.ndarray:
    """The first observations (N, D), a copy. Raises UserError where they are not finite."""
    log = envs.log
    seed = np.random.SeedSequence([log.seed % 2**64, *log.episode]).generate_state(1)[0] // 2  # of a native vector
    obs = envs.reset(seed=int(seed))[0].copy()
    check_finite(obs, np.zeros(len(obs)), 0)
    return obs


def restore_vector(envs: Vector, states: list[dict]) -> np.ndarray:
    """Brings every environment back into the episode of its state. One that cannot be brought back begins a new
    episode, with a warning; so do all of a native vector. Returns the observations (N, D) to act on."""
    restored = [False] * len(states)
    if envs.log.replay:
        envs.set_attr("saved", states)
        restored = envs.call("restore")
    for i, state in enumerate(states):
        so_far = (state["episode"], state["total"], state["actions"].numpy())
        envs.log.begin(i, *(so_far if restored[i] else (state["episode"] + 1,)))
    if lost := restored.count(False):
        print(f"{lost} of {len(states)} environments could not be brought back inside their episode and begin new ones")
    if not envs.log.replay:
        return reset_vector(envs)
    return np.stack(envs.get_attr("obs")).astype(envs.single_observation_space.dtype)
