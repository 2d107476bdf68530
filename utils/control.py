"""Environments: one or a vector of them, evaluation in others, actions in [-1, 1], a replay buffer.

Shapes: N environments, D observation numbers, A action numbers.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torch import Tensor

from utils.core import RunArgs, UserError, as_kwargs, find_users_code, load, read_checkpoint, rng_state, set_rng_state

LONGEST = 50_000  # steps after which an evaluation episode counts as it stands
PLAIN = {float, bool, np.float64, np.bool}  # types of rewards and ends that need no reading


@dataclass
class EnvArgs(RunArgs):
    most_threads = 2  # more make networks this small no faster
    env_kwargs: tuple[str, ...] = ()
    """NAME=VALUE pairs for the environment; a VALUE is read as JSON where it is JSON, else as text"""
    eval_every: int | None = None
    """steps between evaluations; 0: at the end only; None: a fifth of the run, 50,000 at most"""
    eval_episodes: int = 10
    """evaluation episodes, once with the likeliest action and once with sampled ones; 0: no evaluation, also for
    environments of which there can be only one"""
    evaluate: str = ""
    """folder of a run: score its agent instead of training one"""
    capture_video: bool = False
    """with --evaluate: write RUN/video/ of the first episode"""


def make_env(args, flatten: bool = True) -> gym.Env:
    """The environment of --env-id, its observations flattened where they are no vector. Raises UserError where there is
    none, or one that takes no seed, or whose observations have no fixed size."""
    find_users_code(Path.cwd())
    how = as_kwargs(args.env_kwargs) | ({"render_mode": "rgb_array"} if args.capture_video and args.evaluate else {})
    try:
        spec = EnvSpec.from_json(args.env_id) if args.env_id.startswith("{") else args.env_id  # JSON: of Minari
        env = gym.make(spec, disable_env_checker=True, **how)
    except (gym.error.Error, ModuleNotFoundError, TypeError) as error:
        right = "give a registered Gymnasium name, or MODULE:NAME of a module that registers it, and its --env-kwargs"
        right = "it cannot draw, so leave out --capture-video" if "'render_mode'" in str(error) else right
        raise UserError(f"cannot make --env-id {args.env_id} ({error}): {right}") from error
    layer = env = env if isinstance(env, gym.Wrapper) else gym.wrappers.OrderEnforcing(env)
    while isinstance(layer.env, gym.wrappers.TimeLimit | gym.wrappers.OrderEnforcing):  # of gym.make: they unpack
        layer = layer.env
    takes, layer.env = inspect.signature(layer.env.reset).parameters, Plain(layer.env)
    if "seed" not in takes and not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        raise UserError(f"--env-id {args.env_id} must have reset(self, *, seed=None, options=None), and takes no seed")
    space = env.observation_space
    if not flatten or isinstance(space, gym.spaces.Box) and len(space.shape) == 1:
        return env
    try:
        typed(space, space.sample())
    except (AttributeError, NotImplementedError) as error:  # text, graphs, sequences, other libraries' kinds
        right = "it must have a fixed size, so register it with a wrapper such as minigrid's ImgObsWrapper"
        raise UserError(f"--env-id {args.env_id} has the observation space {space}: {right}") from error
    return gym.wrappers.FlattenObservation(env)


class Plain(gym.Wrapper):
    """What an environment returns, as scripts read it, in training and in evaluation: observations in the dtypes of
    their space, of its own memory, numbers, and an info that is a dictionary; of it only `names`, or all of it as
    "whole": a vector takes longer to gather the rest than to step. Raises UserError where it cannot be read so."""

    names: tuple[str, ...] | None = None

    def read(self, came: tuple, count: int, right: str) -> tuple:
        try:
            obs, *numbers, info = came
            if len(numbers) != count:
                raise ValueError
            if not {*map(type, numbers)} <= PLAIN:
                reward, *ends = [float(np.asarray(x).item()) for x in numbers]
                numbers = [reward, *map(bool, ends)]
            obs = typed(self.observation_space, obs)
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            right = f"({right}) with an observation of {self.observation_space}"
            raise UserError(f"{self.spec.id} returned {came!r:.200}, and must return {right}") from error
        info = info if isinstance(info, dict) and self.names != () else {}
        if self.names:  # a vector takes dictionaries apart
            info = {"whole": (dict(info),)} if "whole" in self.names else {k: info[k] for k in self.names if k in info}
        return obs, *numbers, info

    def reset(self, *, seed=None, options=None):
        return self.read(self.env.reset(seed=seed), 0, "observation, info")  # not all take options

    def step(self, action):
        return self.read(self.env.step(action), 3, "observation, number as reward, terminated, truncated, info")


def typed(space: gym.Space, obs):
    """The observation in the dtypes of its space. Raises ValueError for another shape and where a fraction would be
    lost, and what NumPy raises for what is no number."""
    if space.shape is None:
        if isinstance(space, gym.spaces.Tuple):
            return tuple(typed(part, one) for part, one in zip(space, obs, strict=True))
        return {name: typed(part, obs[name]) for name, part in space.items()}
    cast, came = np.array(obs, space.dtype), getattr(obs, "dtype", None)  # a copy: environments write into theirs again
    if cast.shape != space.shape or cast.dtype.kind != "f" and came != cast.dtype and not np.array_equal(cast, obs):
        raise ValueError
    return cast


def number(value) -> float:
    """Of an info: a number, or an array of one; NaN for all else."""
    try:
        return float(np.asarray(value).item())
    except (TypeError, ValueError):
        return np.nan


def try_out(make: Callable, args, count: int | None = None) -> tuple[gym.Env, list[gym.Env]]:
    """Makes the environments of evaluation: `count`, or two for each of --eval-episodes. Tries the first one. Returns
    it, closed where there are none (some environments can only be one), and all of them."""
    before = rng_state()  # an environment may draw from the global generators, which are the training's
    count, env = 2 * args.eval_episodes if count is None else count, make()
    space, limit = env.unwrapped.observation_space, env.spec.max_episode_steps
    _, info = env.reset(seed=args.seed)
    env.action_space.seed(args.seed)
    if not (hasattr(env.unwrapped, "action_masks") or "action_mask" in info):  # else an action may be forbidden
        env.step(env.action_space.sample())
    if not args.evaluate:
        seen = f"{type(space).__name__}{space.shape or ''} seen as {env.observation_space.shape}"
        print(f"observations: {seen}; steps in an episode: {limit or 'no limit'} (--env-kwargs max_episode_steps=N)")
    envs = [env, *(make() for _ in range(count - 1))]
    if not count:
        envs.pop().close()
    set_rng_state(before)
    return env, envs


def seed_of(*numbers: int) -> int:
    """A seed for an environment: close `numbers` give seeds that have nothing in common."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0] // 2)


def make_vector(make: Callable[[], gym.Env], args, step: int, infos: tuple[str, ...] = ()):
    """--num-envs environments that begin their next episode in the step that ends one (SAME_STEP), and their first
    observations (N, D). step: from where the run goes on; a resumed run begins other episodes."""
    kind = AsyncVectorEnv if getattr(args, "vector", "") == "async" else partial(SyncVectorEnv, copy=False)
    envs = kind([make] * args.num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.set_attr("names", [infos] * args.num_envs)
    envs.returns, envs.lengths = np.zeros((2, args.num_envs))
    if step:
        print("the environments begin new episodes")
    obs = envs.reset(seed=seed_of(args.seed, step))[0].copy()
    check_finite(obs)
    return envs, obs


def step_vector(envs, actions: np.ndarray) -> tuple:
    """(observations to act on next, true next observations, rewards, terminated, truncated, (return, length) of the
    episodes that ended). Where one ended, a bootstrap needs the true ones. Raises UserError for a number not finite."""
    obs, rewards, terminated, truncated, envs.infos = envs.step(actions)
    obs, true_obs, episodes = obs.copy(), obs, []  # the vector writes its next observations into the same memory
    envs.returns += rewards
    envs.lengths += 1
    for i in (terminated | truncated).nonzero()[0]:
        true_obs[i] = envs.infos["final_obs"][i]
        check_finite(true_obs[i])
        episodes.append((envs.returns[i].item(), int(envs.lengths[i])))
        envs.returns[i] = envs.lengths[i] = 0
    check_finite(obs, rewards)
    return obs, true_obs, rewards, terminated, truncated, episodes


def check_finite(obs: np.ndarray, rewards: np.ndarray | float = 0.0) -> None:
    """The sum of squares is faster than a look at each number, at each step, but large ones overflow."""
    if not (np.isfinite(np.vdot(obs, obs) + np.vdot(rewards, rewards)) or np.isfinite(np.append(obs, rewards)).all()):
        raise UserError(f"the environment returned the observations {obs} and rewards {rewards}: all must be finite")


def episode_columns(episodes: list[tuple[float, int]]) -> dict[str, float]:
    """Means over the episodes (return, length) that ended, and their number; no columns where none did."""
    if not episodes:
        return {}
    return_, length = np.mean(episodes, 0).tolist()
    return {"return": return_, "length": length, "episodes": len(episodes)}


def evaluate(envs: list, act: Callable, args, device: torch.device, video: Path | None = None) -> dict[str, float]:
    """One episode in each of `envs`, half of them with the likeliest action, half with sampled ones: act(obs (N, D),
    scale (N, 1), generator), where `scale` 0 or 1 multiplies the noise of a row. Each evaluation has the same starts.
    eval/success: share of the likeliest action's episodes with a success in any step. With --evaluate also the number
    of episodes in eval/return, and their standard deviation (np.std). No columns where there are no environments."""
    n, generator = len(envs) // 2, torch.Generator(device).manual_seed(args.seed)
    if not envs:
        return {}
    scale = (torch.arange(2 * n, device=device) >= n).float()[:, None]
    returns, lengths, success = rollouts(envs, lambda obs, *_: act(obs, scale, generator), args.seed, video)
    columns = {"return": returns[:n], "return_stochastic": returns[n:], "length": lengths[:n], "success": success[:n]}
    found = {f"eval/{name}": column.mean().item() for name, column in columns.items() if not np.isnan(column).any()}
    return found | ({"episodes": n, "eval/return_std": returns[:n].std().item()} if args.evaluate else {})


def rollouts(envs: list[gym.Env], act: Callable, seed: int, video: Path | None = None, starts: int | None = None
             ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """One episode in each of N environments: returns (N,), lengths (N,), success (N,), which is NaN where the
    environment's info has neither "success" nor "is_success". Environments whose numbers are equal modulo `starts`
    start alike. act(obs (N, D), rewards (N,) of the step before, running (N,) bool) -> actions (N, ...)."""
    before, episodes = rng_state(), len(envs)
    if video:
        envs = [gym.wrappers.RecordVideo(envs[0], str(video)), *envs[1:]]
    seeds = [seed_of(seed, 2**31, i % (starts or episodes)) for i in range(episodes)]
    check_finite(obs := np.stack([env.reset(seed=seed)[0] for env, seed in zip(envs, seeds)]))
    (rewards, returns, lengths), success = np.zeros((3, episodes)), np.full(episodes, np.nan)
    running = np.ones(episodes, bool)
    while running.any() and lengths.max() < LONGEST:
        actions = act(obs, rewards, running)
        for i in running.nonzero()[0]:
            obs[i], rewards[i], terminated, truncated, info = envs[i].step(actions[i])
            success[i] = np.fmax(success[i], number(info.get("success", info.get("is_success"))))
            running[i] = not (terminated or truncated)
            returns[i] += rewards[i]
            lengths[i] += 1
        check_finite(obs, rewards)
    if running.any():
        print(f"{running.sum()} evaluation episodes were cut off after {LONGEST} steps; --env-kwargs "
              "max_episode_steps=1000 sets a limit")  # fmt: skip
    if video:
        envs[0].close()
    set_rng_state(before)
    return returns, lengths, success


def score_saved(args, score_agent: Callable, **parts) -> list[dict]:
    """What --evaluate does: `parts` get their state from that run's checkpoint, and the score is printed as JSON."""
    folder = Path(args.evaluate)
    load(folder, read_checkpoint(folder), parts)
    try:
        print(json.dumps(score_agent(video=folder / "video" if args.capture_video else None)))
    except (gym.error.Error, NotImplementedError, OSError, ValueError) as error:  # the environment's own come again
        print(json.dumps(score_agent()))
        raise UserError(f"there is the score, but no video ({error}): leave out --capture-video") from error
    return []


def is_bounded(space: gym.Space) -> bool:
    """Whether it is a Box of floats that [-1, 1] can be stretched to: its bounds and their difference are finite."""
    with np.errstate(over="ignore"):
        floats = isinstance(space, gym.spaces.Box) and space.dtype.kind == "f"
        return floats and bool(np.isfinite(space.high - space.low).all())


def to_env(actions: np.ndarray, space: gym.spaces.Box) -> np.ndarray:
    """Actions (N, A) in [-1, 1] stretched to the bounds of the environment."""
    stretched = space.low + (actions.reshape(-1, *space.shape) + 1) / 2 * (space.high - space.low)
    return stretched.clip(space.low, space.high)  # rounding can lead one unit in the last place outside


def to_unit(actions: np.ndarray, space: gym.spaces.Box) -> np.ndarray:
    """Actions (n, A) in the bounds of the environment, brought to [-1, 1]."""
    low, high = np.ravel(space.low), np.ravel(space.high)
    return (2 * (actions - low) / (high - low) - 1).clip(-1, 1)


class ReplayBuffer:
    """A ring of the newest `capacity` rows on the device, each a tuple of float32 vectors of `sizes` numbers."""

    def __init__(self, capacity: int, sizes: tuple[int, ...], device: torch.device):
        self.capacity, self.sizes, self.total = capacity, sizes, 0
        self.rows = torch.empty(capacity, sum(sizes), device=device)
        if self.rows.nbytes > 2**30:
            print(f"the replay buffer will take {self.rows.nbytes / 1e9:.1f} GB when it is full: see --buffer-size")

    def add(self, *parts: np.ndarray) -> None:
        """Appends rows: one (n, size) array for each of `sizes`."""
        rows = np.concatenate(parts, 1, dtype=np.float32)
        on_cpu = self.rows.is_cpu  # there NumPy copies one row three times as fast as torch
        memory, rows = (self.rows.numpy(), rows) if on_cpu else (self.rows, torch.from_numpy(rows))
        self.total += max(0, len(rows) - self.capacity)
        rows, start = rows[-self.capacity :], self.total % self.capacity
        first = min(len(rows), self.capacity - start)
        memory[start : start + first] = rows[:first]  # type: ignore
        memory[: len(rows) - first] = rows[first:]  # type: ignore
        self.total += len(rows)

    def sample(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Uniform with replacement: one (batch_size, size) tensor for each of `sizes`."""
        held = min(self.total, self.capacity)
        index = torch.randint(held, (batch_size,), generator=generator, device=self.rows.device)
        return self.rows[index].split(self.sizes, 1)

    def state_dict(self) -> dict:
        return {"rows": self.rows[: self.total].clone(), "total": self.total}  # a view would be saved with the rest

    def load_state_dict(self, state: dict) -> None:
        self.total = state["total"]
        self.rows[: len(state["rows"])] = state["rows"]
