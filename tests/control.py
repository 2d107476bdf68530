"""What the tests of the control scripts share. Another script is one more row of SCRIPTS, and of helpers.SMALL."""

import pytest

from algos import ppo, sac

SCRIPTS = {"ppo": ppo, "sac": sac}
scripts = pytest.mark.parametrize("algo", SCRIPTS)
WALK = ["--env-id", "environments:Walk-v0"]

PROJECT = """
import gymnasium as gym
from utils.shapes import SIZE  # the project's, not ours

class Mine(gym.Env):
    observation_space, action_space = gym.spaces.Box(-9, 9, (SIZE,)), gym.spaces.Box(-1, 1, (2,))

    def reset(self, seed=None, options=None):
        from utils.late import start  # also when it is imported later
        super().reset(seed=seed)
        return start(self), {}

    def step(self, action):
        return self.np_random.normal(size=SIZE), float(action.sum()), bool(self.np_random.random() < 0.1), False, {}
"""
REGISTER = {
    "class": "import gymnasium\nfrom project.envs import Mine\ngymnasium.register('Mine-v0', Mine)\n",
    "text": "import gymnasium\ngymnasium.register('Mine-v0', 'project.envs:Mine')\n",  # imported when it is made
}


def write_project(folder, register="class", marker=True):
    """A project with a package of environments and, beside it, one called utils."""
    for name, text in {
        "project/__init__.py": REGISTER[register],
        "project/envs.py": PROJECT,
        "utils/shapes.py": "SIZE = 4\n",
        "utils/late.py": "def start(env):\n    return env.np_random.normal(size=env.observation_space.shape)\n",
        **({"utils/__init__.py": ""} if marker else {}),
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
