"""Three faults that reviews found in control and offline scripts, as the command lines that showed them."""

import gymnasium as gym
import minari
import numpy as np
import pytest
from control import score
from gymnasium.wrappers import RescaleAction
from helpers import SMALL, metrics, new_run
from minari.data_collector import EpisodeBuffer

from algos import bc, ppo, sac

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari", "ignore::UserWarning:gymnasium")
BC = "--device cpu --max-steps 4 --batch-size 8 --hidden-size 8 --eval-episodes 2 --dataset".split()


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """The folder of a Minari dataset of one episode in an environment."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))

    def record(env: gym.Env, **about):
        env.action_space.seed(0)
        obs, actions, ends, rewards = [env.reset(seed=0)[0].copy()], [], [], []
        while not ends or not any(ends[-1]):
            actions.append(env.action_space.sample())
            next_obs, reward, *end, _ = env.step(actions[-1].copy())
            obs.append(next_obs.copy())
            rewards.append(float(reward))
            ends.append(end)
        terminations, truncations = (list(column) for column in zip(*ends))
        episode = EpisodeBuffer(observations=np.array(obs), actions=np.array(actions), rewards=rewards,
                                terminations=terminations, truncations=truncations)  # fmt: skip
        minari.create_dataset_from_buffers("tests/one-v0", [episode], env=env, **about)
        return minari.storage.get_dataset_path("tests/one-v0")

    return record


def rescaled() -> gym.Env:
    return RescaleAction(gym.make("Pendulum-v1"), -1.0, 1.0)


def test_a_minari_dataset_is_scored_behind_its_wrappers(recorded, tmp_path, capsys):
    """They were dropped: the policy then acted at half its strength. --evaluate and --resume make the same one."""
    gym.register("Rescaled-v0", rescaled)
    try:
        folder = recorded(rescaled())
        run = new_run(bc, tmp_path / "own", *BC, folder)
        ours = metrics(run)[-1]["eval/return"]
        rows = metrics(new_run(bc, tmp_path / "same", *BC, folder, "--env-id", "Rescaled-v0"))
        assert ours == rows[-1]["eval/return"]
        rows = metrics(new_run(bc, tmp_path / "bare", *BC, folder, "--env-id", "Pendulum-v1"))
        assert ours != rows[-1]["eval/return"]
        assert score(bc, run, capsys)["eval/return"] == ours
    finally:
        del gym.registry["Rescaled-v0"]


def test_a_minari_dataset_brings_its_environment(recorded, tmp_path):
    """AntMaze's arguments and reference returns were dropped with --env-id, and without it the environment was unknown:
    nobody had imported the package that registers it. Its success was not shown."""
    gym.register("Elsewhere-v0", "environments:Walk", max_episode_steps=17, kwargs={"size": 1e6, "label": "success"})
    folder = recorded(gym.make("Elsewhere-v0"), ref_min_score=-100.0, ref_max_score=0.0)
    del gym.registry["Elsewhere-v0"]
    row = metrics(new_run(bc, tmp_path / "runs", *BC, folder))[-1]
    assert row["eval/length"] == 17
    assert row["eval/score"] == pytest.approx(row["eval/return"] + 100) and 0 <= row["eval/success"] <= 1


@pytest.mark.parametrize("module, words", [(ppo, SMALL["ppo"]), (sac, SMALL["sac"])], ids=["ppo", "sac"])
def test_a_lost_life_of_the_user_s_ends_nothing(module, words, tmp_path):
    """info["life_lost"], a name of Atari's alone, was taken for a termination in any environment."""
    words = [*words, "--env-id", "environments:Walk-v0", "--env-kwargs"]
    runs = [new_run(module, tmp_path, *words, f"label={label}") for label in ("lives", "other")]
    assert metrics(runs[0]) == metrics(runs[1])
