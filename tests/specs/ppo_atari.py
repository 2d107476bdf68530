"""PPO on Atari: algos/ppo_atari.py."""

from tests.specs import Curve, Recipe, Spec

BUGS = """
images-reshaped: channels last and channels first hold as many numbers
- lambda obs: np.moveaxis(obs, 2, 0)
+ lambda obs: obs.reshape(moved.shape)

frames-not-stacked: networks take whatever number of channels comes
- frame_skip=frameskip)), 4
+ frame_skip=frameskip)), 1

sticky-actions: ALE's v5 environments are sticky by default: other numbers than in the literature
- asked.get("repeat_action_probability", 0)
+ asked.get("repeat_action_probability", 0.25)

stickiness-ignored: the wrapper's own settings come last
- "frameskip=1", f"repeat_action_probability={sticky}"
+ "frameskip=1", "repeat_action_probability=0.00"

sticky-actions-not-seeded: Gymnasium's generator is seeded, and the emulator has one of its own
-         if self.sticky:
+         if False:

a-life-ends-the-game: episodic life without its second half: scores of one life, also in evaluation
-         return obs, reward, terminated, truncated, info
+         return obs, reward, terminated or lives < before, truncated, info

fire-never-pressed: agents learn to press it, or stand still until the time limit
- self.fire = "FIRE" in env.unwrapped.get_action_meanings()[1:2]
+ self.fire = False

reward-of-the-pressed-button-lost: a wrapper that steps takes a reward with it
-                 reward += more

lost-life-is-bootstrapped: the wrapper says it, and nobody asks
-         terminated[t] |= [number(lost) > 0 for lost in envs.infos.get("life_lost", [False] * args.num_envs)]

policy-head-of-gain-1:images: two heads, in an order that is written down elsewhere
- [2**0.5] * len(hidden) + [0.01, 1.0]
+ [2**0.5] * len(hidden) + [1.0, 0.01]

image-policy-learns-alone: two networks as for vectors, of which the critic's then sees features that it cannot move
- return *self.log_prob(features, actions), self.critic(features)[..., 0]
+ return *self.log_prob(features, actions), self.critic(features.detach())[..., 0]
"""

SPEC = Spec(
    "Atari PPO",
    small="--device cpu --num-envs 2 --num-steps 16 --total-timesteps 96 --num-minibatches 2 --update-epochs 2 "
          "--hidden-size 8 --eval-every 64 --eval-episodes 1 --save-every 32 --env-kwargs "
          "max_num_frames_per_episode=200",
    tests="atari exact_ppo parity_sb3_atari wiring resume_control",
    needs="ale_py",
    walk="environments:Pixels-v0",
    curves={"ppo_atari-kungfumaster": Curve(
        dict(env_id="ALE/KungFuMaster-v5", total_timesteps=61_440, eval_every=30_720, eval_episodes=5),
        "eval/return_stochastic",
        numbers={"mean eval/return_stochastic": "plain"}, slow=True,
    )},
    recipes=(Recipe(
        "algos/ppo_atari.py  ", "arXiv 1707.06347, table 5",
        paper=dict(num_steps=128, learning_rate=2.5e-4, update_epochs=3, num_minibatches=8 * 128 // 256,
                   gamma=0.99, gae_lambda=0.95, num_envs=8, clip_coef=0.1, vf_coef=1.0, ent_coef=0.01,
                   anneal_lr=True, total_timesteps=10_000_000),
        differs=dict(update_epochs=(4, "makes 3 epochs"), vf_coef=(0.5, "weighs the value loss by 1")),
    ),),
    flags=dict(env_id="ALE/NoisyPong-v0", env_kwargs=("max_num_frames_per_episode=80",), num_steps=4,
               total_timesteps=16, learning_rate=1e-3),
    only=("seed", "env_id", "env_kwargs", "clip_coef", "normalize", "hidden_size", "compile"),
    special={
        "env_id": ({}, "ALE/Breakout-v5"),
        "env_kwargs": ({}, ("max_num_frames_per_episode=40",)),
        "clip_coef": ({"clip_coef": 0.01}, 0.005),
    },
    noise=dict(env_id="ALE/NoisyPong-v0", env_kwargs=("max_num_frames_per_episode=40",), total_timesteps=32),
)  # fmt: skip
