"""ppo_atari.py computes what Stable-Baselines3's PPO with a CnnPolicy computes, and sees what its AtariWrapper shows.

Live, against the installed SB3. It differs in two points. SB3

- ends an episode at a lost life, and begins the next with a no-op, FIRE and the third action, without their rewards;
- computes grey from a frame's colours, where Gymnasium asks the emulator: single pixels differ a little.
"""

import gymnasium as gym
import numpy as np
import pytest
import torch

from algos import ppo_atari
from utils.control import make_vector

pytest.importorskip("ale_py", reason="not run: ale-py is not installed")
WHY = "stable-baselines3 cannot be imported: pip install stable-baselines3==2.9.0"
sb3 = pytest.importorskip("stable_baselines3", reason=WHY, exc_type=ImportError)
T, N, H, ROUNDS = 8, 2, 16, 2
NAMES = {f"features_extractor.cnn.{i}": f"encoder.{i}" for i in (0, 2, 4)}
NAMES |= {"features_extractor.linear.0": "encoder.7", "action_net": "actor", "value_net": "critic"}


class Played(gym.Env):
    """Images, rewards, lost lives and ends of games, whatever the actions are. `lives`: a lost life is an end, too."""

    observation_space, action_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), gym.spaces.Discrete(4)

    def __init__(self, n: int, lives: bool):
        rng = np.random.default_rng(n)
        self.images = rng.integers(256, size=(ROUNDS * T + 1, 4, 84, 84), dtype=np.uint8)
        self.rewards, self.events = rng.integers(-3, 4, ROUNDS * T), rng.random((2, ROUNDS * T)) < 0.15
        self.t, self.lives = 0, lives

    def reset(self, *, seed=None, options=None):
        return self.images[self.t], {}

    def step(self, action):
        reward, (lost, over) = self.rewards[self.t], self.events[:, self.t]
        self.t += 1
        return self.images[self.t], float(reward), bool(over or lost and self.lives), False, {"life_lost": bool(lost)}


def theirs_of(model) -> dict[str, torch.Tensor]:
    """SB3's weights under our names."""
    modules = dict(model.policy.named_modules())
    return {f"{ours}.{kind}": getattr(modules[name], kind).detach().clone()
            for name, ours in NAMES.items() for kind in ("weight", "bias")}  # fmt: skip


def test_rollouts_and_updates():
    """Values, log-probabilities, advantages and, after each of two rounds, all weights."""
    from stable_baselines3.common.atari_wrappers import ClipRewardEnv
    from stable_baselines3.common.logger import configure
    from stable_baselines3.common.vec_env import DummyVecEnv

    args = ppo_atari.Args(num_envs=N, num_steps=T, num_minibatches=1, update_epochs=3, ent_coef=0.01, hidden_size=H,
                          learning_rate=1e-3)  # fmt: skip
    model = sb3.PPO("CnnPolicy", DummyVecEnv([lambda n=n: ClipRewardEnv(Played(n, True)) for n in range(N)]),
                    args.learning_rate, T, N * T, args.update_epochs, clip_range=args.clip_coef,
                    ent_coef=args.ent_coef, vf_coef=args.vf_coef / 2, max_grad_norm=args.max_grad_norm, seed=0,
                    policy_kwargs=dict(features_extractor_kwargs=dict(features_dim=H)), device="cpu")  # fmt: skip
    model.set_logger(configure(None, []))
    with torch.no_grad():
        model.policy.action_net.weight *= 100  # from 0.01 every action would be as likely as the next
        model.policy.value_net.bias += 3  # so that the critic's error has one sign, and its bias moves
    agent, before = ppo_atari.Agent((4, 84, 84), Played.action_space, H), theirs_of(model)
    agent.load_state_dict(before)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    generator, statistics = torch.Generator().manual_seed(0), ppo_atari.Statistics(True, N, args.gamma, True)
    columns = iter(range(N))
    envs, obs = make_vector(lambda: Played(next(columns), False), args, 0, infos=("life_lost",))
    _, callback = model._setup_learn(ROUNDS * T * N)
    for _ in range(ROUNDS):
        model.collect_rollouts(model.env, callback, model.rollout_buffer, T)
        batch, obs, _ = ppo_atari.collect(agent, envs, obs, statistics, generator, args)
        theirs = {name: torch.tensor(getattr(model.rollout_buffer, name)) for name in
                  ("observations", "actions", "rewards", "log_probs", "values", "advantages")}  # fmt: skip
        batch = batch._replace(actions=theirs["actions"].long())
        assert torch.equal(batch.obs, theirs["observations"]) and torch.equal(batch.rewards, theirs["rewards"])
        with torch.no_grad():
            logps, _, values = agent(batch.obs, batch.actions)
            advantages = ppo_atari.gae(batch.rewards, values, agent.value(batch.next_obs), batch.terminated,
                                       batch.terminated, args.gamma, args.gae_lambda)  # fmt: skip
        for ours, name in ((logps, "log_probs"), (values, "values"), (advantages, "advantages")):
            torch.testing.assert_close(ours, theirs[name], rtol=0, atol=1e-5)
        model.train()
        ppo_atari.update(agent, optimizer, batch, generator, args)
        for name, weight in theirs_of(model).items():
            torch.testing.assert_close(agent.state_dict()[name], weight, rtol=0, atol=5e-6)
            assert (weight - before[name]).abs().max() > 5e-4  # a hundred tolerances


@pytest.mark.parametrize("game, gap", [("Breakout", 0.0), ("SpaceInvaders", 0.0), ("Freeway", 0.1), ("Qbert", 0.1)])
def test_frames(game, gap):
    """Up to the first lost life: frames, signs of rewards, and when it is lost. `gap`: between frames, in the mean."""
    from stable_baselines3.common.atari_wrappers import AtariWrapper

    ours = ppo_atari.make_game(ppo_atari.Args(env_id=f"ALE/{game}-v5"))
    theirs = AtariWrapper(gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0))
    frame, obs = theirs.reset(seed=3)[0], ours.reset(seed=3)[0]
    if "FIRE" in ours.unwrapped.get_action_meanings():
        obs = ours.step(2)[0]  # as SB3 did behind FIRE
    rng, done, total = np.random.default_rng(0), False, 0.0
    for _ in range(200):
        assert np.abs(obs[-1] - frame[..., 0].astype(float)).mean() <= gap
        action = int(rng.integers(ours.action_space.n))
        frame, sign, done, *_ = theirs.step(action)
        obs, reward, terminated, _, info = ours.step(action)
        assert np.sign(reward) == sign and done == info.get("life_lost", terminated)
        total += abs(reward)
        if done:
            break
    assert done == (game != "Freeway") and (gap or total > 0)
