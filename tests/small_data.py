"""Small datasets, in the formats that people have, that the tests of offline scripts write and train on."""

from pathlib import Path

import gymnasium as gym
import numpy as np

from utils.collection import save_collection


def pendulum(path: Path, episodes: int = 6, length: int = 40, seed: int = 0) -> Path:
    """Episodes of Pendulum-v1 with random actions, all cut off by time, as one of our collections."""
    env, generator = gym.make("Pendulum-v1", max_episode_steps=length), np.random.default_rng(seed)
    columns = [[] for _ in range(5)]
    for episode in range(episodes):
        obs, truncated = env.reset(seed=seed + episode)[0], False
        while not truncated:
            action = generator.uniform(-2, 2, 1).astype(np.float32)
            next_obs, reward, terminated, truncated, _ = env.step(action)
            for column, value in zip(columns, (obs, action, reward, terminated, next_obs)):
                column.append(value)
            obs = next_obs
    obs, actions, rewards, terminals, next_obs = (np.array(column) for column in columns)
    about = {"env_id": "Pendulum-v1", "env_kwargs": f'["max_episode_steps={length}"]', "random_return": -300.0,
             "expert_return": -50.0}  # fmt: skip
    save_collection(path, obs, actions, rewards.astype(np.float32), terminals, next_obs, about)
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
