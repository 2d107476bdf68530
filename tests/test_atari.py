"""What ppo_atari.py adds to ppo.py: frames, lives, the shared network. tests/test_families.py: the rest is ppo.py's."""

from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import command_line, user_error

from algos import ppo_atari
from utils.envs import make_vector, reset_vector, restore_vector, step_vector

pytest.importorskip("ale_py", reason="not run: ale-py is not installed")
BREAKOUT = partial(ppo_atari.make_atari, "ALE/Breakout-v5")


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
    first, again, other = (play(BREAKOUT(), seed, 40) for seed in (1, 1, 2))
    assert all(np.array_equal(a[0], b[0]) and a[1:] == b[1:] for a, b in zip(first, again))
    assert any(not np.array_equal(a[0], b[0]) for a, b in zip(first, other))
    assert first[0][0].shape == (4, 84, 84) and first[0][0].dtype == np.uint8


def test_frames_are_gymnasium_s():
    """The newest frame of a stack equals that of Gymnasium's own preprocessing on the plain game, and the older ones
    are the frames before."""
    ours = BREAKOUT()
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
    kwargs = () if probability is None else (f"repeat_action_probability={probability}",)
    env = BREAKOUT(kwargs)
    assert env.unwrapped.ale.getFloat("repeat_action_probability") == pytest.approx(probability or 0)
    first, again, new = play(env, 3, 60), play(env, 3, 60), play(BREAKOUT(kwargs), 3, 60)
    for other in (again, new):
        assert all(np.array_equal(a[0], b[0]) and a[1:] == b[1:] for a, b in zip(first, other))
    plain = play(BREAKOUT(), 3, 60)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(first, plain)) == (probability is None)


@pytest.mark.parametrize("frameskip", [1, 2, 4, 7])
def test_frames_of_an_action(frameskip):
    env = BREAKOUT(() if frameskip == 4 else (f"frameskip={frameskip}",))
    env.reset(seed=1)
    before = env.unwrapped.ale.getEpisodeFrameNumber()
    for action in (0, 2, 3, 0):
        env.step(action)
    assert env.unwrapped.ale.getEpisodeFrameNumber() - before == 4 * frameskip


def test_going_on_inside_a_sticky_game():
    """As in tests/test_envs.py: the replay repeats what the emulator drew, and so does what follows."""
    make = partial(BREAKOUT, ("repeat_action_probability=0.5",))

    def played(envs, rng, steps):
        return [step_vector(envs, rng.integers(4, size=2), step)[0].copy() for step in range(steps)]

    envs, other = make_vector(make, 2, 1), make_vector(make, 2, 1)
    reset_vector(envs)
    obs = played(envs, np.random.default_rng(0), 50)[-1]
    assert np.array_equal(restore_vector(other, envs.log.state(obs)), obs)
    ours, theirs = (played(vector, np.random.default_rng(1), 50) for vector in (envs, other))
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("pair", ["frameskip=0", "frameskip=[2, 5]", "frameskip=2.5", "frameskip=true",
                                  "repeat_action_probability=1", "repeat_action_probability=-0.1",
                                  "repeat_action_probability=often"])  # fmt: skip
def test_what_the_emulator_cannot_do(pair, tmp_path, capsys):
    with user_error(capsys, "--env-kwargs", "must be"):
        command_line(ppo_atari, "--env-kwargs", pair, "--output-dir", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_lost_life_is_said_and_does_not_end_the_game():
    rows, lives, lost = play(BREAKOUT(), 1, 900), 5, 0
    for _, _, terminated, life_lost, left in rows:
        assert life_lost == (left < lives and not terminated)
        assert terminated == (left == 0)
        lost, lives = lost + life_lost, 5 if terminated else left
    assert lost >= 6, "more than the first game's lives were lost"


def test_fire_is_pressed_for_the_agent():
    """At the start and after every lost life: a policy that never presses it loses all of its lives."""
    env = BREAKOUT()
    env.reset(seed=1)
    assert any(env.step(0)[2] for _ in range(2000))
    assert "FIRE" not in gym.make("ALE/Freeway-v5").unwrapped.get_action_meanings()
    assert not ppo_atari.Lives(gym.make("ALE/Freeway-v5")).fire


def test_bootstrap_ends_with_a_life_and_the_game_goes_on():
    """In a rollout the row of a lost life is terminated, and its next observation is that of the same game."""
    envs = make_vector(BREAKOUT, 1, 1)
    obs, seen = reset_vector(envs), 0
    for step in range(400):
        obs, true_obs, _, terminated, _, ended = step_vector(envs, np.array([0]), step, lives=True)
        lives = envs.envs[0].unwrapped.ale.lives()
        if terminated[0]:
            seen += 1
            assert np.array_equal(obs, true_obs) != bool(ended)
            assert lives == 5 - seen % 5
    assert seen >= 5


def test_the_network_is_shared_and_right():
    """Policy, entropy and value against a second forward pass in plain functions; both heads train the convolutions."""
    torch.manual_seed(0)
    agent = ppo_atari.Agent((4, 84, 84), gym.spaces.Discrete(6), 16).double()
    obs = torch.randint(0, 256, (2, 3, 4, 84, 84), dtype=torch.uint8)
    agent.features = lambda x: agent.encoder(x.flatten(0, -4).double() / 255).view(*x.shape[:-3], -1)
    actions = torch.randint(0, 6, (2, 3, 1))
    logps, entropy, values = agent(obs, actions)
    x = obs.flatten(0, 1).double() / 255
    for i, stride in ((0, 4), (2, 2), (4, 1)):
        x = torch.conv2d(x, agent.encoder[i].weight, agent.encoder[i].bias, stride).relu()
    x = (x.flatten(1) @ agent.encoder[7].weight.T + agent.encoder[7].bias).relu()
    policy = torch.distributions.Categorical(logits=x @ agent.actor.weight.T + agent.actor.bias)
    torch.testing.assert_close(logps.flatten(), policy.log_prob(actions.flatten()))
    torch.testing.assert_close(entropy.flatten(), policy.entropy())
    torch.testing.assert_close(values.flatten(), (x @ agent.critic.weight.T + agent.critic.bias)[:, 0])
    torch.testing.assert_close(agent.value(obs), values)
    assert torch.equal(agent.act(obs[0], torch.zeros(3, 6))[:, 0], policy.logits.view(2, 3, 6)[0].argmax(-1))
    for number in (logps.sum(), values.sum()):
        (gradient,) = torch.autograd.grad(number, agent.encoder[0].weight, retain_graph=True)
        assert gradient.abs().sum() > 0


def test_uint8_observations_are_divided_once():
    agent = ppo_atari.Agent((4, 84, 84), gym.spaces.Discrete(2), 8)
    ones = agent.encoder(torch.ones(1, 4, 84, 84))
    torch.testing.assert_close(agent.features(torch.full((1, 4, 84, 84), 255, dtype=torch.uint8)), ones)


def test_rewards_are_signs_and_scores_are_not():
    """What is trained on is -1, 0 or 1; the environment, hence the logged return, has the score itself."""
    statistics = ppo_atari.Statistics((4, 84, 84), 1, 0.99, True)
    assert statistics.reward(np.array([-3.0, 0.0, 7.0]), np.zeros(3, bool)).tolist() == [-1, 0, 1]
    off = ppo_atari.Statistics((4, 84, 84), 1, 0.99, False)
    assert off.reward(np.array([-3.0, 7.0]), np.zeros(2, bool)).tolist() == [-3, 7]
    assert max(row[1] for row in play(partial(ppo_atari.make_atari, "ALE/Qbert-v5")(), 1, 200)) > 1


def test_the_first_policy_is_nearly_uniform_and_the_first_values_are_not_all_equal():
    torch.manual_seed(0)
    agent = ppo_atari.Agent((4, 84, 84), gym.spaces.Discrete(6), 64)
    obs = torch.randint(0, 256, (8, 4, 84, 84), dtype=torch.uint8)
    _, entropy, values = agent(obs, torch.zeros(8, 1, dtype=torch.long))
    assert entropy.min() > np.log(6) - 1e-4
    hidden = [(layer, 2**0.5) for layer in agent.encoder if hasattr(layer, "weight")]
    for layer, gain in [*hidden, (agent.actor, 0.01), (agent.critic, 1.0)]:
        weight = layer.weight.detach().flatten(1)
        assert torch.linalg.svdvals(weight).tolist() == pytest.approx([gain] * min(weight.shape), rel=1e-4)


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


@pytest.mark.parametrize("env_id", ["CartPole-v1", "ALE/Nope-v5"])
def test_what_is_no_game(env_id, tmp_path, capsys):
    with user_error(capsys, env_id):
        command_line(ppo_atari, "--env-id", env_id, "--output-dir", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
