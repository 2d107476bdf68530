"""An environment where every value is 0, to see the bias of an estimate.

python algos/dqn.py --env-id algos.environments.noise_mdp:NoiseMDP-v0
"""

import gymnasium as gym
import numpy as np


class NoiseMDP(gym.Env):
    """Rewards are standard normal and the next observation is uniform in [-1, 1]^2, whatever is done. So every policy's
    Q is 0 everywhere, and the mean of an estimate is its bias. 100 steps, then the episode is cut off.

    actions: how many; 0: numbers in [-1, 1].
    """

    observation_space = gym.spaces.Box(-1, 1, (2,))

    def __init__(self, actions: int = 5):
        self.action_space = gym.spaces.Discrete(actions) if actions else gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        self.time += 1
        obs = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return obs, self.np_random.normal(), False, self.time == 100, {}


gym.register("NoiseMDP-v0", NoiseMDP)
