"""An environment of one's own, to copy: a room to be kept at 20 degrees by a heater of up to 2,000 watts.

    python algos/sac.py --env-id algos.environments.room:Room-v0 --total-timesteps 5000
    python algos/sac.py --evaluate RUN --capture-video

The two commands need the current folder to be this project's. For a file of yours: `--env-id FILE:NAME`, without `.py`.
"""

import gymnasium as gym
import numpy as np


class Room(gym.Env):
    """A step is a quarter of an hour. Observes the temperatures inside and outside, in degrees Celsius."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}

    def __init__(self, cold: float = 0.0, render_mode: str | None = None):
        """cold: degrees outside, on average; --env-kwargs cold=-5 changes it."""
        self.cold, self.render_mode = cold, render_mode
        self.observation_space = gym.spaces.Box(-50, 100, (2,), np.float32)
        self.action_space = gym.spaces.Box(0, 2000, (1,), np.float32)

    def observe(self) -> np.ndarray:
        return np.array([self.inside, self.outside], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)  # makes self.np_random, the only source of random numbers to be used
        self.inside, self.outside = 15.0, self.cold + 5 * self.np_random.standard_normal()
        return self.observe(), {}

    def step(self, action):
        self.inside += 0.05 * (self.outside - self.inside) + 0.002 * float(action[0])
        error = abs(self.inside - 20)
        terminated = error > 30  # the window breaks; what a time limit ends is `truncated`, by gym.register below
        return self.observe(), -min(error, 10) / 10, terminated, False, {"is_success": error < 1}

    def render(self) -> np.ndarray:
        """For --capture-video: a thermometer, 0 to 40 degrees."""
        picture = np.full((128, 64, 3), 255, np.uint8)
        picture[128 - int(np.clip(self.inside, 0, 40) * 3.2) :, 24:40] = (200, 40, 40)
        return picture


def make(**kwargs) -> gym.Env:
    """Wrappers stand here: this one brings observations to [-1, 1]."""
    return gym.wrappers.RescaleObservation(Room(**kwargs), np.float32(-1), np.float32(1))


gym.register("Room-v0", make, max_episode_steps=96)
