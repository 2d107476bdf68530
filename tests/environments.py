"""Environments as users write them: `--env-id environments:Walk-v0`."""

from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Walk(gym.Env):
    """A noisy walk on a line, until it leaves [-size, size] or 40 steps are over. It has the habits that break a log of
    its actions or a view of its observations: one array for all observations, of another type than the space says, one
    dictionary for all infos, and actions that are changed in place. Observes (place, time).

    broken: a file; while it exists, step `at` of the process fails as `how` says.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-2, 2, (1,), np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, size: float = 3, label: str = "", broken: str = "", at: int = 0, how: str = "raise",
                 render_mode: str | None = None):  # fmt: skip
        self.size, self.label, self.broken, self.at, self.how, self.steps = size, label, broken, at, how, 0
        self.render_mode, self.state, self.info = render_mode, np.zeros(2), {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state[:] = self.np_random.normal(), 0
        return self.state, {}

    def step(self, action):
        action *= 0.5
        self.steps += 1
        self.state += (float(action[0]) + 0.3 * self.np_random.normal(), 1 / 7)
        reward = -abs(self.state[0]) + (np.random.normal() if self.label == "noisy" else 0)
        if self.broken and self.steps == self.at and Path(self.broken).exists():
            if self.how == "raise":
                deep(self.state)
            reward = {"reward": np.nan}.get(self.how, reward)
            self.state[1] = {"observation": np.inf}.get(self.how, self.state[1])
        self.info |= {"place": self.state[0]} | ({"life_lost": True} if self.label == "lives" else {})
        if self.label in ("success", "is_success"):
            self.info[self.label] = bool(0 < self.state[0] < 0.5)
        return self.state, reward, bool(abs(self.state[0]) > self.size), False, self.info

    def render(self):
        return np.full((32, 32, 3), 100, np.uint8)


class Hop(Walk):
    """Walk with numbered actions: to the left, none, to the right."""

    action_space = spaces.Discrete(3, start=-1)

    def step(self, action):
        return super().step(np.array([2.0 * action]))


class Goal(Hop):
    """Hop whose goal is a place, reached where both round to the same number."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = spaces.Dict(achieved_goal=box, desired_goal=box, observation=Walk.observation_space)

    def observe(self):
        return {"observation": self.state, "achieved_goal": self.state[:1].round(), "desired_goal": self.goal}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal = self.np_random.normal(size=1).round()
        return self.observe(), {}

    def step(self, action):
        _, reward, terminated, truncated, info = super().step(action)
        obs = self.observe()
        reward += self.compute_reward(obs["achieved_goal"], self.goal, info)
        return obs, float(reward), terminated, truncated, info

    def compute_reward(self, achieved_goal, desired_goal, info):
        assert achieved_goal == np.round(info["place"]), "the info of another step"
        return (achieved_goal == desired_goal).all(-1) - 1.0

    def compute_terminated(self, achieved_goal, desired_goal, info):
        assert achieved_goal.shape == desired_goal.shape == (1,), "of one pair, as in Gymnasium-Robotics' PointMaze"
        return False


class Reach(Goal):
    """Goal with Walk's actions."""

    action_space = Walk.action_space

    def step(self, action):
        return super().step(action[0] / 2)


class Only(Hop):
    """Of which there can be `most` at a time, until they are closed. `made` counts them."""

    most, made, alive = 1, 0, 0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        Only.made, Only.alive = Only.made + 1, Only.alive + 1
        assert Only.alive <= Only.most

    def close(self):
        Only.alive -= 1


class Mistaken(Hop):
    """What beginners write. how: no seed, anything (is taken by reset), bare (only the observation comes from reset),
    four (values from step), shape (of the observation is not the space's)."""

    def __init__(self, how: str = "", **kwargs):
        super().__init__(**kwargs)
        self.mistake = how
        if how == "no seed":
            self.reset = lambda: (self.state, {})
        if how == "anything":
            self.reset = lambda reset=self.reset, **anything: reset(**anything)

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs if self.mistake == "bare" else (obs, info)

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if self.mistake == "four":
            return obs, reward, terminated, info
        return obs[:1] if self.mistake == "shape" else obs, reward, terminated, truncated, info


def deep(state):
    return state[0] / 0 if state is None else 1 // 0


class Bandit(gym.Env):
    """Anything may be observed, done and drawn from: what the arguments say.

    draws: "seed" (as Gymnasium wants it), "reward" or "start" (that from NumPy's global generator).
    """

    def __init__(self, observation: str = "box", action: str = "discrete", draws: str = "seed", nan: str = ""):
        self.observation_space, self.action_space = OBSERVATIONS[observation], ACTIONS[action]
        self.draws, self.nan, self.resets = draws, nan, 0

    def observe(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=np.random.randint(2**31) if self.draws == "start" else seed)
        self.time, self.over, self.resets = 0, False, self.resets + 1
        obs = self.observe()
        return (obs * np.nan if self.nan == f"reset {self.resets}" else obs), {}

    def step(self, action):
        assert not self.over, "a step of an episode that is over"
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.time += 1
        reward = np.random.normal() if self.draws == "reward" else self.np_random.normal()
        terminated, truncated = bool(self.np_random.random() < 0.2), self.time == 5
        self.over = terminated or truncated
        return self.observe(), reward, terminated, truncated, {}


class Pixels(gym.Env):
    """An image of 8 x 10 pixels and 3 colours, of which one column is red; the action that names it pays 1. Seven
    columns an episode. layout: whether the channels come last or first."""

    action_space = spaces.Discrete(4)

    def __init__(self, layout: str = "last"):
        self.layout = layout
        self.observation_space = spaces.Box(0, 255, (8, 10, 3) if layout == "last" else (3, 8, 10), np.uint8)

    def observe(self):
        self.column, image = int(self.np_random.integers(4)), np.zeros((8, 10, 3), np.uint8)
        image[:, 2 * self.column, 0] = 255
        image[0, 0, 2] = 20 * self.time
        return image if self.layout == "last" else np.moveaxis(image, 2, 0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        reward = float(action == self.column)
        self.time += 1
        return self.observe(), reward, self.time == 7, False, {}


class Toll(gym.Env):
    """In each of 40 steps some of the actions are allowed, half of them; others end the test. The reward is the number
    of the first choice. It observes what it draws, and the step. At its end nothing is allowed.

    gives: where the mask is, "info", "method", "both" (the method's is wrong), or "none"; or what is wrong with it:
    "short", or "empty" at the third step.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, action: str = "discrete", gives: str = "info", label: str = ""):
        self.action_space, self.gives, self.label = ACTIONS[action], gives, label
        self.sizes = {"discrete": [3], "multidiscrete": [2, 3], "multibinary": [2, 2]}[action]
        if gives in ("method", "both"):
            self.action_masks = lambda: np.concatenate(self.masks if gives == "method" else [~m for m in self.masks])

    def observe(self):
        draws = [self.np_random.random(size) < 0.5 for size in self.sizes]
        self.masks = [draw | (np.arange(len(draw)) == self.np_random.integers(len(draw))) for draw in draws]
        if self.time == 40 or (self.gives == "empty" and self.time == 3):
            self.masks[-1] = np.zeros(self.sizes[-1], bool)
        info = {"short": np.ones(1), "none": None, "method": None}.get(self.gives, tuple(self.masks))
        return np.array([self.np_random.normal(), self.time], np.float32), {} if info is None else {"action_mask": info}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.observe()

    def step(self, action):
        chosen = np.ravel(action) - np.ravel(getattr(self.action_space, "start", 0))
        assert all(mask[number] for mask, number in zip(self.masks, chosen)), f"{action} is not allowed: {self.masks}"
        self.time += 1
        noise = np.random.normal() if self.label == "noisy" else 0
        obs, info = self.observe()
        return obs, float(chosen[0]) + noise, self.time == 40, False, info


class Mission(spaces.Space):
    """A kind of space of another library."""


class Probe(gym.Env):
    """Observes the step in the episode, the length at which it ends by itself, the action as it arrived. Lengths of 2
    to 7 under a time limit of 5: episodes terminate, are cut off, and both in one step."""

    LIMIT = 5
    observation_space = spaces.Box(-np.inf, np.inf, (4,))
    action_space = spaces.Box(np.array([-1, 2], np.float32), np.array([3, 2.5], np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.length = 0, int(self.np_random.integers(2, 8))
        return np.array([0, self.length, 0, 0], np.float32), {}

    def step(self, action):
        self.time += 1
        obs = np.array([self.time, self.length, *action], np.float32)
        return obs, 100.0 + action[0], self.time == self.length, False, {}


class Steps(Probe):
    """Probe with actions -1, 0, 1."""

    action_space = spaces.Discrete(3, start=-1)

    def step(self, action):
        assert self.action_space.contains(action)
        return super().step([action, 0.0])


class Fixed(gym.Wrapper):
    """Episodes of 8 steps that all begin alike, whatever the seed. So a run whose environments begin new episodes at a
    multiple of 8 steps is the run that goes on there. They terminate, or are cut off."""

    def __init__(self, of: str = "environments:Walk-v0", ends: bool = False, **kwargs):
        super().__init__(gym.make(of, disable_env_checker=True, **kwargs))
        self.ends = ends

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.env.reset(seed=1)

    def step(self, action):
        obs, reward, _, _, info = self.env.step(action)
        self.time += 1
        return obs, reward, self.ends and self.time == 8, not self.ends and self.time == 8, info


class Odd(gym.Wrapper):
    """Another environment that begins at whole numbers. how: "plain"; "odd", the same numbers in other types and
    unreadable infos; "whole", floats in a space of whole numbers; or what is wrong from the third step on: "fraction"
    (in such a space), "shape", "words", "no reward", "no end". It cannot draw."""

    def __init__(self, of: str, how: str, render_mode=None, **kwargs):
        super().__init__(gym.make(of, disable_env_checker=True, **kwargs))
        self.how, self.time, self.needs_info = how, 0, isinstance(self.env.observation_space, spaces.Dict)
        if how in ("whole", "fraction"):
            self.observation_space = spaces.Box(-9, 9, self.env.observation_space.shape, np.int32)

    def each(self, obs, change):
        return {name: change(part) for name, part in obs.items()} if isinstance(obs, dict) else change(obs)

    def reset(self, seed=None):
        obs, info = self.env.reset(seed=seed)
        obs, self.time = self.each(obs, np.round), 0
        return (self.each(obs, lambda part: part.astype(int)), None) if self.how == "odd" else (obs, info)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.time += 1
        if self.how in ("whole", "fraction"):
            obs = self.each(obs, np.round) + (0.5 if self.how == "fraction" and self.time > 2 else 0)
        if self.how == "odd":
            odd = {"success": None, "is_success": "no", "life_lost": [None, 1]} if self.time % 2 else None
            info = info if self.needs_info else odd
            return self.each(obs, np.ndarray.tolist), np.array([reward]), int(terminated), np.bool(truncated), info
        if self.time > 2:
            obs = {"shape": [1], "words": "left"}.get(self.how, obs)
            reward = None if self.how == "no reward" else reward
            terminated = None if self.how == "no end" else terminated
        return obs, reward, terminated, truncated, info


BOX = spaces.Box(-1, 1, (3,), np.float32)
OBSERVATIONS = {
    "box": BOX,
    "matrix": spaces.Box(-1, 1, (2, 3), np.float64),
    "number": spaces.Box(-1, 1, (), np.float32),
    "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "discrete": spaces.Discrete(4, start=2),
    "multidiscrete": spaces.MultiDiscrete([2, 3]),
    "multibinary": spaces.MultiBinary(5),
    "dict": spaces.Dict(b=BOX, a=spaces.Dict(c=spaces.Discrete(2))),
    "tuple": spaces.Tuple([BOX, spaces.MultiBinary(2)]),
    "text": spaces.Text(6),
    "sequence": spaces.Sequence(BOX),
    "graph": spaces.Graph(BOX, None),
    "dict of a sequence": spaces.Dict(a=BOX, b=spaces.Sequence(BOX)),
    "dict of another kind": spaces.Dict(a=BOX, b=spaces.Tuple([Mission()])),
}
ACTIONS = {
    "discrete": spaces.Discrete(3, start=-1),
    "multidiscrete": spaces.MultiDiscrete([2, 3]),
    "grid": spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, -2]]),
    "box": spaces.Box(np.array([[0, -1]], np.float32), np.array([[5, np.inf]], np.float32)),
    "unit": BOX,
    "integers": spaces.Box(0, 3, (2,), np.int64),
    "multibinary": spaces.MultiBinary(2),
    "dict": spaces.Dict(a=BOX),
    "tuple": spaces.Tuple([BOX]),
}

LIMITS = dict.fromkeys("Walk Hop Goal Reach Only Mistaken".split(), 40) | dict.fromkeys(("Probe", "Steps"), Probe.LIMIT)
for name in (*LIMITS, "Bandit", "Toll", "Pixels"):
    gym.register(f"{name}-v0", f"environments:{name}", max_episode_steps=LIMITS.get(name))
gym.register("Endless-v0", "environments:Walk", kwargs={"size": 1_000})
gym.register("Fixed-v0", Fixed)
gym.register("Odd-v0", Odd)
