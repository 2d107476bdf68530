"""Environments: making one or a vector of them, going on inside an episode after a resume, and evaluation.

Shapes: N environments, D observation numbers, A action numbers.
"""

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from utils.checkpoint import load_newest
from utils.errors import UserError
from utils.run import RunArgs, saved_args

LONGEST_LOG = 200_000  # actions of one episode that are kept for a resume; a longer episode starts anew
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
    environment that keeps Gymnasium's promise that a seed determines what follows. Reports return and length of ended
    episodes as info["episode"], passes on info["life_lost"], and drops every other info: vectors are slow to gather it."""

    def __init__(self, env: gym.Env, seed: int, index: int):
        super().__init__(env)
        self.origin, self.episode, self.saved = (seed, index), -1, None

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        return self.start()

    def start(self):
        seed = np.random.SeedSequence([*self.origin, self.episode]).generate_state(1)[0]
        self.actions, self.total = [], 0.0
        self.obs, _ = self.env.reset(seed=int(seed))
        return self.obs, {}

    def step(self, action):
        self.obs, reward, terminated, truncated, theirs = self.env.step(action)
        self.actions.append(np.array(action))  # a copy: a vector may reuse the array
        self.total += float(reward)
        done = terminated or truncated
        info = {"life_lost": True} if theirs.get("life_lost") else {}
        if done:
            self.obs = np.array(self.obs)  # a copy: many environments reuse their array when they are reset
            info["episode"] = (self.total, len(self.actions))
        return self.obs, reward, terminated, truncated, info

    def snapshot(self) -> dict:
        """What `restore` needs, in types that weights_only loading accepts."""
        actions = np.array(self.actions[: LONGEST_LOG + 1])
        return {"episode": self.episode, "actions": torch.tensor(actions), "obs": torch.tensor(np.array(self.obs))}

    def restore(self) -> bool:
        """Replays the snapshot in `saved` (set_attr is how a vector hands each environment its own). False where that
        does not lead to the observation that was saved: then a new episode has begun."""
        self.episode, actions, obs = self.saved["episode"], self.saved["actions"].numpy(), self.saved["obs"].numpy()
        self.saved = None
        self.start()
        if len(actions) <= LONGEST_LOG:
            for action in actions:
                self.step(action)
            if np.array_equal(self.obs, obs):
                return True
        self.reset()
        return False


def make_env(
    env_id: str, env_kwargs: tuple[str, ...] = (), render_mode: str | None = None, flatten: bool = True
) -> gym.Env:
    """One environment, with `flatten` its observations flattened to a vector where they are not one: images, dictionaries, tuples,
    discrete numbers (one-hot). `module:Name-v0` imports `module` first, also from the working directory.

    Raises UserError for an unknown name, arguments that it does not take, and spaces that have no vector form.
    """
    module, _, name = env_id.rpartition(":")
    kwargs = parse_kwargs(env_kwargs) | ({"render_mode": render_mode} if render_mode else {})
    if module:
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # where the user's own package is, as with python -m
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise UserError(f"--env-id {env_id}: there is no module {module} ({error})") from error
    try:
        env = gym.make(name, disable_env_checker=True, **kwargs)
    except (gym.error.Error, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot make --env-id {env_id} ({reason}): give a registered Gymnasium name, or MODULE:NAME "
                        "of a module that registers it") from error  # fmt: skip
    space = env.observation_space
    if flatten and (not isinstance(space, gym.spaces.Box) or len(space.shape) != 1):
        if not space.is_np_flattenable:
            raise UserError(
                f"--env-id {env_id} has the observation space {space}: it must have a fixed number of values"
            )
        env = gym.wrappers.FlattenObservation(env)
    return env


def parse_kwargs(pairs: tuple[str, ...]) -> dict:
    kwargs = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"--env-kwargs {pair} is not NAME=VALUE")
        try:
            kwargs[name] = json.loads(value)
        except ValueError:
            kwargs[name] = value
    return kwargs


def make_vector(make: Callable[[], gym.Env], num_envs: int, seed: int, kind: str = "sync") -> gym.vector.VectorEnv:
    """`num_envs` environments that start their next episode in the step that ends one (SAME_STEP): the observation that
    comes back is the new episode's first, and infos["final_obs"] holds the old one's last. async: a process each."""
    thunks = [lambda i=i: Episode(make(), seed, i) for i in range(num_envs)]
    if kind == "async":
        return AsyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP)
    return SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP, copy=False)


def step_vector(envs, actions: np.ndarray, step: int):
    """One step of a SAME_STEP vector: (observations to act on next, true next observations, rewards, terminated,
    truncated, episodes that ended as (return, length)). The two observations differ where an episode ended: there the
    second is the last one of the old episode, which a bootstrap needs. info["life_lost"] counts as terminated, too,
    though the episode goes on.

    Raises UserError where the environment returns NaN or infinity, with `step` and what it returned.
    """
    obs, rewards, terminated, truncated, infos = envs.step(actions)
    true_obs, episodes = obs, []
    if "life_lost" in infos:
        terminated = terminated | infos["life_lost"]
    if "final_obs" in infos:
        true_obs = obs.copy()
        for i in np.flatnonzero(infos["_final_obs"]):
            true_obs[i] = infos["final_obs"][i]
            episodes.append(infos["final_info"]["episode"][i])
    if not (np.isfinite(rewards).all() and np.isfinite(true_obs).all()):
        bad = int(np.flatnonzero(~np.isfinite(rewards) | ~np.isfinite(true_obs.reshape(len(obs), -1)).all(1))[0])
        raise UserError(
            f"environment {bad} returned reward {rewards[bad]} and observation {true_obs[bad].tolist()} at step {step}: "
            "both must be finite; the last checkpoint is kept"
        )
    return obs, true_obs, rewards, terminated, truncated, episodes


def restore_vector(envs, states: list[dict]) -> np.ndarray:
    """Brings every environment back into the episode of its snapshot; says so where one could not be and began a new
    episode. Returns the observations (N, D) to act on."""
    envs.set_attr("saved", states)
    if lost := sum(not restored for restored in envs.call("restore")):
        print(
            f"{lost} of {len(states)} environments could not be brought back inside their episode: they begin a new one"
        )
    return np.stack(envs.get_attr("obs"))


def evaluate(
    make: Callable, act: Callable, episodes: int, seed: int, device, video: Path | None = None
) -> dict[str, float]:
    """One episode in each of 2 x `episodes` environments of its own: half with the likeliest action, half sampled.

    act(obs (N, D), scale (N, 1), generator) -> actions; `scale` 0 or 1 multiplies the noise of a row. The start states are
    functions of `seed`, hence the same at every evaluation. Returns eval/return, eval/return_stochastic, eval/length.
    """
    thunks = [lambda i=i: Episode(make(), seed + 2**31, i) for i in range(2 * episodes)]
    if video is not None:
        thunks[0] = lambda: Episode(gym.wrappers.RecordVideo(make(render_mode="rgb_array"), str(video), lambda n: n == 0),
                                    seed + 2**31, 0)  # fmt: skip
    envs = SyncVectorEnv(thunks, autoreset_mode=AutoresetMode.SAME_STEP, copy=False)
    generator = torch.Generator(device).manual_seed(seed)
    scale = torch.cat([torch.zeros(episodes, 1), torch.ones(episodes, 1)]).to(device)
    returns, lengths, first = np.zeros(2 * episodes), np.zeros(2 * episodes), np.ones(2 * episodes, bool)
    obs, _ = envs.reset()
    for _ in range(LONGEST_EVALUATION):
        obs, rewards, terminated, truncated, _ = envs.step(act(obs, scale, generator))
        returns += rewards * first
        lengths += first
        first &= ~(terminated | truncated)
        if not first.any():
            break
    envs.close()
    return {"eval/return": returns[:episodes].mean().item(), "eval/return_stochastic": returns[episodes:].mean().item(),
            "eval/length": lengths[:episodes].mean().item()}  # fmt: skip


def saved_agent(folder: Path) -> dict:
    """The state that the newest checkpoint of a run holds, for --evaluate."""
    saved_args(folder)  # says what is wrong where it is no run's folder
    return load_newest(folder / "checkpoints")
