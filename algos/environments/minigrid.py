"""MiniGrid's environments for all scripts: what the agent sees, without the text of its mission.

pip install minigrid
python algos/ppo.py --env-id algos.environments.minigrid:Grid-v0 --env-kwargs name=MiniGrid-DoorKey-5x5-v0
"""

import gymnasium as gym


def make(name: str = "MiniGrid-Empty-5x5-v0", **kwargs) -> gym.Env:
    from minigrid.wrappers import ImgObsWrapper  # which registers them

    # flat: its image holds numbers of things, colours and states, and is no picture
    return gym.wrappers.FlattenObservation(ImgObsWrapper(gym.make(name, **kwargs)))


gym.register("Grid-v0", make)
