"""What ppo_atari.py adds to ppo.py: images and their network, games, lives. tests/test_families.py: the rest is
ppo.py's."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from control import close
from helpers import SMALL, assert_same_result, command_line, metrics, new_run, user_error, weights

from algos import ppo, ppo_atari, ppo_lstm
from utils.control import make_env, make_vector

pytest.importorskip("ale_py", reason="not run: ale-py is not installed")
PIXELS = ["--env-id", "environments:Pixels-v0", "--hidden-size", 8]
FOUR = gym.spaces.Discrete(4)
SHAPES = pytest.mark.parametrize("shape", [(3, 8, 10), (4, 84, 84), (2, 36, 40), (5, 35, 90), (1, 1, 3)], ids=str)


def settings(env_id: str, *pairs: str, **more) -> ppo_atari.Args:
    return ppo_atari.Args(env_id=env_id, env_kwargs=pairs, **more)


# images


both = pytest.mark.parametrize("module", [ppo_atari, ppo_lstm], ids=["ppo_atari", "ppo_lstm"])


@both
@pytest.mark.parametrize("layout", ["last", "first"])
def test_channels_come_first(module, layout):
    ours = module.make_image_env(settings("environments:Pixels-v0", f"layout={layout}"))
    plain = gym.make("Pixels-v0")
    assert ours.observation_space == gym.spaces.Box(0, 255, (3, 8, 10), np.uint8)
    expected = np.moveaxis(plain.reset(seed=3)[0], -1, 0)
    assert np.array_equal(ours.reset(seed=3)[0], expected) and expected[0].any() and not expected[1].any()
    for action in (0, 1):
        assert np.array_equal(ours.step(action)[0], np.moveaxis(plain.step(action)[0], -1, 0))


@both
@pytest.mark.parametrize("name, shape", [("image", (3, 4, 4)), ("matrix", (6,)), ("dict", (5,)), ("box", (3,))])
def test_only_bytes_with_three_dimensions_are_images(module, name, shape):
    args = settings("environments:Bandit-v0", f"observation={name}")
    assert module.make_image_env(args).observation_space.shape == shape
    assert len(make_env(args).observation_space.shape) == 1


def test_both_layouts_give_the_same_run(tmp_path):
    first, last = (new_run(ppo_atari, tmp_path, *SMALL["ppo"], *PIXELS, "--env-kwargs", f"layout={layout}")
                   for layout in ("first", "last"))  # fmt: skip
    assert_same_result(first, last)
    assert not [name for name in weights(first) if name.startswith("obs_")]  # bytes have no statistics


def encoded(agent: ppo_atari.Agent, obs: torch.Tensor) -> torch.Tensor:
    """Images (B, C, H, W) through the agent's weights, in plain functions."""
    large, p = min(obs.shape[-2:]) >= 36, dict(agent.encoder.named_parameters())
    steps, padding = ({0: 4, 2: 2, 4: 1}, 0) if large else ({0: 1, 2: 2}, 1)
    x = obs / 255.0
    for layer, stride in steps.items():
        x = F.conv2d(x, p[f"{layer}.weight"], p[f"{layer}.bias"], stride, padding).relu()
    last = 2 * len(steps) + 1
    return (x.flatten(1) @ p[f"{last}.weight"].T + p[f"{last}.bias"]).relu()


def make_agent(shape, space=FOUR, hidden_size=16) -> ppo_atari.Agent:
    torch.manual_seed(0)
    return ppo_atari.Agent(shape, space, hidden_size)


def images(*shape) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@SHAPES
def test_policy_and_value_share_the_encoder(shape):
    """Log-probability, entropy, value and action against a second forward pass; with any leading dimensions. All three
    move the encoder."""
    agent, obs = make_agent(shape), images(2, 3, *shape)
    torch.nn.init.normal_(agent.actor.weight)
    x, weights = encoded(agent, obs.flatten(0, 1)), list(agent.encoder.parameters())
    policy = torch.distributions.Categorical(logits=x @ agent.actor.weight.T + agent.actor.bias)
    actions = policy.sample()
    found = agent(obs, actions.view(2, 3, 1))
    wanted = policy.log_prob(actions), policy.entropy(), (x @ agent.critic.weight.T + agent.critic.bias)[:, 0]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == (2, 3)
        close(ours.flatten(), theirs, 1e-5)
        slopes = [torch.autograd.grad(part.sum(), weights, retain_graph=True) for part in (ours, theirs)]
        torch.testing.assert_close(*slopes, rtol=1e-3, atol=1e-4)
        assert all(slope.abs().max() > 1e-2 for slope in slopes[0])
    close(agent.value(obs), found[2], 1e-6)
    assert torch.equal(agent.act(obs[0], torch.zeros(3, 4))[:, 0], policy.logits.view(2, 3, 4)[0].argmax(-1))


def test_it_learns(tmp_path):
    """Which column is red: 7 of 7, where chance gives 1.75."""
    args = "--device cpu --num-envs 8 --num-steps 32 --total-timesteps 4096 --eval-every 0 --eval-episodes 20 "
    args += "--learning-rate 2e-3 --env-id environments:Pixels-v0 --hidden-size 32"
    assert metrics(new_run(ppo_atari, tmp_path, *args.split()))[-1]["eval/return"] > 6.5


# games


def game(name: str = "Breakout", *pairs: str) -> gym.Env:
    return ppo_atari.make_game(settings(f"ALE/{name}-v5", *pairs))


def play(env, seed: int, steps: int) -> list:
    """(observation, reward, terminated, life lost, lives) of random actions that depend on the seed alone."""
    rng, rows = np.random.default_rng(0), []
    env.reset(seed=seed)
    for _ in range(steps):
        obs, reward, terminated, _, info = env.step(int(rng.integers(env.action_space.n)))
        rows.append((np.array(obs), reward, terminated, info.get("life_lost", False), env.unwrapped.ale.lives()))
        if terminated:
            env.reset(seed=seed)
    return rows


def test_a_seed_determines_the_game():
    first, again, other = (play(game(), seed, 40) for seed in (1, 1, 2))
    assert all(np.array_equal(a[0], b[0]) and a[1:] == b[1:] for a, b in zip(first, again))
    assert any(not np.array_equal(a[0], b[0]) for a, b in zip(first, other))
    assert first[0][0].shape == (4, 84, 84) and first[0][0].dtype == np.uint8


def test_frames_are_gymnasium_s():
    """The newest frame of a stack equals that of Gymnasium's own preprocessing on the plain game, and the older ones
    are the frames before."""
    ours = game()
    plain = gym.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0)
    theirs = gym.wrappers.AtariPreprocessing(plain)
    obs, _ = ours.reset(seed=5)
    frame, _ = theirs.reset(seed=5)
    frame, *_ = theirs.step(1)  # FIRE
    frames = [frame]
    assert np.array_equal(obs[-1], frame)
    for action in (2, 3, 0, 2, 2):
        frames.append(theirs.step(action)[0])
        obs = ours.step(action)[0]
        assert np.array_equal(obs[-min(4, len(frames)) :], frames[-4:])


@pytest.mark.parametrize("probability", [None, 0.25, 0.9])
def test_sticky_actions(probability):
    """The share of frames that repeat the action before is the one that was asked for, 0 by default; the seed
    determines them, in a game that has been played before as in a new one."""
    pairs = () if probability is None else (f"repeat_action_probability={probability}",)
    env = game("Breakout", *pairs)
    assert env.unwrapped.ale.getFloat("repeat_action_probability") == pytest.approx(probability or 0)
    first, again, new = play(env, 3, 60), play(env, 3, 60), play(game("Breakout", *pairs), 3, 60)
    for other in (again, new):
        assert all(np.array_equal(a[0], b[0]) and a[1:] == b[1:] for a, b in zip(first, other))
    plain = play(game(), 3, 60)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(first, plain)) == (probability is None)


@pytest.mark.parametrize("frameskip", [1, 2, 4, 7])
def test_frames_of_an_action(frameskip):
    env = game() if frameskip == 4 else game("Breakout", f"frameskip={frameskip}")
    env.reset(seed=1)
    before = env.unwrapped.ale.getEpisodeFrameNumber()
    for action in (0, 2, 3, 0):
        env.step(action)
    assert env.unwrapped.ale.getEpisodeFrameNumber() - before == 4 * frameskip


def test_a_lost_life_is_said_and_does_not_end_the_game():
    rows, lives, lost = play(game(), 1, 900), 5, 0
    for _, _, terminated, life_lost, left in rows:
        assert life_lost == (left < lives and not terminated)
        assert terminated == (left == 0)
        lost, lives = lost + life_lost, 5 if terminated else left
    assert lost >= 6, "more than the first game's lives were lost"


def test_fire_is_pressed_for_the_agent():
    """At the start and after every lost life: a policy that never presses it loses all of its lives."""
    env = game()
    env.reset(seed=1)
    assert any(env.step(0)[2] for _ in range(2000))
    assert "FIRE" not in gym.make("ALE/Freeway-v5").unwrapped.get_action_meanings()
    assert not ppo_atari.Lives(gym.make("ALE/Freeway-v5")).fire


def test_bootstrap_ends_with_a_life_and_the_game_goes_on():
    """In a rollout the row of a lost life is terminated, and its next observation is that of the same game."""
    args, agent, lives = settings("ALE/Breakout-v5", num_envs=1, num_steps=400), make_agent((4, 84, 84)), []
    envs, obs = make_vector(game, args, 0, infos=("life_lost",))

    def act(obs, noise):
        lives.append(envs.envs[0].unwrapped.ale.lives())
        return torch.zeros(1, 1, dtype=torch.long)

    agent.act = act
    statistics = ppo_atari.Statistics(True, 1, 0.99, True)
    batch, _, episodes = ppo_atari.collect(agent, envs, obs, statistics, torch.Generator(), args)
    lost, new = np.diff(lives) != 0, np.diff(lives) > 0
    assert np.array_equal(batch.terminated[:-1, 0], lost) and lost.sum() >= 6 and len(episodes) >= new.sum() >= 1
    for t in range(399):
        assert torch.equal(batch.next_obs[t], batch.obs[t + 1]) != new[t]


def test_rewards_of_games_are_signs_and_scores_are_not():
    """Other rewards are scaled as in ppo.py. The environment, hence the logged return, has the score itself."""
    statistics = ppo_atari.Statistics(True, 1, 0.99, True)
    assert statistics.reward(np.array([-3.0, 0.0, 7.0]), np.zeros(3, bool)).tolist() == [-1, 0, 1]
    off = ppo_atari.Statistics(True, 1, 0.99, False)
    assert off.reward(np.array([-3.0, 7.0]), np.zeros(2, bool)).tolist() == [-3, 7]
    ours, theirs = ppo_atari.Statistics(False, 3, 0.9, True), ppo.Statistics(2, 3, 0.9, True)
    rng = np.random.default_rng(0)
    for rewards, done in zip(rng.normal(2, 3, (50, 3)), rng.random((50, 3)) < 0.2):
        assert np.array_equal(ours.reward(rewards, done), theirs.reward(rewards, done))
    assert max(row[1] for row in play(game("Qbert"), 1, 200)) > 1


class Game(gym.Env):
    """Pays 1, 2, 3, ... for its steps and takes a life at the second."""

    observation_space, action_space = gym.spaces.Box(0, 1, (1,)), gym.spaces.Discrete(2)

    def get_action_meanings(self):
        return ["NOOP", "FIRE"]

    def reset(self, *, seed=None, options=None):
        self.steps, self.ale = 0, SimpleNamespace(lives=lambda: 3 - (self.steps >= 3))
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, np.float32), float(self.steps), False, False, {}


def test_rewards_of_the_pressed_button_count():
    """After a reset and after a lost life FIRE is one more step; only the second one is within an episode."""
    env = ppo_atari.Lives(Game())
    assert env.reset()[0] == 1
    assert env.step(0)[:2] == (np.full(1, 2.0), 2.0)
    obs, reward, *_, info = env.step(0)
    assert obs == 4 and reward == 3 + 4 and info["life_lost"]


@pytest.mark.parametrize("env_id, words", [("CartPole-v1", "no images"), ("ALE/Nope-v5", "MODULE:NAME")])
def test_what_has_no_images(env_id, words, tmp_path, capsys):
    with user_error(capsys, env_id, words):
        command_line(ppo_atari, "--env-id", env_id, "--output-dir", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
