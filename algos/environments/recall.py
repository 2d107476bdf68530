"""An environment where an agent must remember.

python algos/ppo_lstm.py --env-id algos.environments.recall:Recall-v0
"""

import gymnasium as gym
import numpy as np


class Recall(gym.Env):
    """A cue, one of `cues`, is shown at the start. After `delay` steps in which nothing is shown, and nothing done
    matters, a sign asks for it: reward 1 for the action that names it, else 0, and the episode ends. The best return is
    1; without memory it is 1 / cues.
    """

    def __init__(self, cues: int = 4, delay: int = 10):
        self.cues, self.delay, self.action_space = cues, delay, gym.spaces.Discrete(cues)
        self.observation_space = gym.spaces.Box(0, 1, (cues + 1,))

    def observe(self, shown: int | None = None) -> np.ndarray:
        """One-hot: the cue, or the sign."""
        return np.array([float(shown == place) for place in range(self.cues + 1)], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.cue = 0, int(self.np_random.integers(self.cues))
        return self.observe(self.cue), {}

    def step(self, action):
        self.time += 1
        asked, over = self.time == self.delay + 1, self.time == self.delay + 2
        return self.observe(self.cues if asked else None), float(over and action == self.cue), over, False, {}


gym.register("Recall-v0", Recall)
