"""Small datasets, in the formats that people have, that the tests of offline scripts write and train on."""

from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np

from benchmarks.record_suite import Recorder, save
from utils.control import make_env


def pendulum(path: Path, env_id: str = "Pendulum-v1", length: int = 40) -> Path:
    """Six episodes with random actions, of Pendulum all cut off by time, as one of our collections."""
    args = SimpleNamespace(env_id=env_id, env_kwargs=(f"max_episode_steps={length}",), capture_video=False)
    env, generator = Recorder(make_env(args)), np.random.default_rng(0)
    for episode in range(6):
        env.reset(seed=episode)
        ended = False
        while not ended:
            env.step(generator.uniform(env.action_space.low, env.action_space.high).astype(np.float32))
            ended = any(env.rows[-1][3:5])
    about = {"env_id": env_id, "env_kwargs": f'["max_episode_steps={length}"]', "random_return": -300.0,
             "expert_return": -50.0}  # fmt: skip
    save(path, about, env.rows)
    return path


def write_minari(folder: Path, env_id: str, episodes: list[dict], **metadata) -> None:
    """A Minari dataset in `folder`/data, whose name ends the path; episodes: columns, one more row of observations."""
    import minari
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    env = gym.make(env_id)
    (folder / "data").mkdir(parents=True)
    storage = MinariStorage.new(folder / "data", observation_space=env.observation_space,
                                action_space=env.action_space, env_spec=env.spec, data_format="hdf5")  # fmt: skip
    storage.update_metadata({"dataset_id": folder.name, "minari_version": minari.__version__} | metadata)
    storage.update_episodes(EpisodeBuffer(**columns) for columns in episodes)
