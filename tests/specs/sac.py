"""SAC: algos/sac.py."""

from tests.flags import WALK
from tests.specs import Curve, Recipe, Spec

BUGS = """
next-observation-of-the-reset:sac: what a vector returns is the first observation of the next episode
(google-deepmind/mujoco_playground#305, google/brax#641)
- replay.add(obs, actions, rewards[:, None], terminated[:, None], true_obs)
+ replay.add(obs, actions, rewards[:, None], terminated[:, None], next_obs)

target-of-the-online-critics: two networks of one kind
- next_q = agent.targets(batch.next_obs, next_actions)
+ next_q = agent.critics(batch.next_obs, next_actions)

target-of-old-actions: the action of the batch is at hand, and of the same shape
- agent.targets(batch.next_obs, next_actions)
+ agent.targets(batch.next_obs, batch.actions)

entropy-punished-in-the-actor: entropy is minus a log-probability
- (agent.log_alpha.detach().exp() * logps - q)
+ (-agent.log_alpha.detach().exp() * logps - q)

episodes-not-restored: those that ended before the checkpoint and wait for the next row of metrics
- step, episodes, metrics = run.step, run.state.get("episodes", []),
+ step, episodes, metrics = run.step, [],

log-std-without-bounds: runs go well until a standard deviation overflows
- log_std = log_std.clamp(*LOG_STD_BOUNDS)
+ log_std = log_std + 0.0

no-gradient-through-the-action: sample() for rsample()
- u = mean + log_std.exp() * noise
+ u = (mean + log_std.exp() * noise).detach()

target-critics-stand-still: the update of the targets is forgotten
- list(agent.critics.parameters()), args.tau)
+ list(agent.critics.parameters()), 0.0)

target-critics-follow-at-once: tau is the share of the new in some papers and of the old in others
- list(agent.critics.parameters()), args.tau)
+ list(agent.critics.parameters()), 1 - args.tau)

explores-half-of-the-actions: uniform numbers are from 0 to 1
- .cpu().numpy() * 2 - 1
+ .cpu().numpy()

units-of-the-environment: what was executed is stored, and critics are asked about something else
- replay.add(obs, actions, rewards[:, None]
+ replay.add(obs, to_env(actions, space), rewards[:, None]

generator-not-restored:sac: weights and optimizer are what people think of (Stable-Baselines3#1526, open)
- dict(agent=agent, generator=generator, replay=replay)
+ dict(agent=agent, replay=replay)

optimizer-not-restored:sac: the weights are back, the moments of Adam are not
- parts = {name: optimizer for name, optimizer in optimizers._asdict().items() if optimizer}
+ parts = {}

replay-not-restored: buffers are large (nicklashansen/tdmpc2#28)
- dict(agent=agent, generator=generator, replay=replay)
+ dict(agent=agent, generator=generator)
"""
SPEC = Spec(
    "SAC, arXiv 1812.05905",
    "Control",
    small="--device cpu --num-envs 2 --total-timesteps 160 --learning-starts 32 --batch-size 8 --hidden-size 16 "
          "--log-every 32 --eval-every 64 --eval-episodes 2 --save-every 32",
    tests="exact_sac parity_sb3_sac command_line_control envs resume_control wiring",
    known=True,
    curves={
        "sac-pendulum": Curve(
            dict(total_timesteps=4000, learning_starts=500, learning_rate=0.002, tau=0.01, batch_size=64,
            hidden_size=64, eval_every=1000), "eval/return",
            numbers={"mean eval/return": "plain", "last eval/return": "plain"},
        ),
        "sac-hopper": Curve(
            dict(env_id="Hopper-v5", total_timesteps=20_000, learning_starts=1000, eval_every=5000,
            eval_episodes=20), "eval/return",
            numbers={"mean eval/return": "plain"}, slow=True,
        ),
        "sac-halfcheetah": Curve(
            dict(env_id="HalfCheetah-v5", total_timesteps=30_000, learning_starts=1000, eval_every=5000,
            eval_episodes=5), "eval/return",
            numbers={}, slow=True,
        ),
        "sac-hopper-1m": Curve(  # benchmarks/record_suite.py collects its data in these runs
            dict(env_id="Hopper-v5", total_timesteps=1_000_000, learning_starts=10_000, eval_every=20_000),
            "eval/return", numbers={}, slow=True,
        ),
        "sac-bipedalwalker": Curve(
            dict(env_id="BipedalWalker-v3", total_timesteps=300_000, learning_rate=7.3e-4, buffer_size=300_000,
            learning_starts=10_000, gamma=0.98, tau=0.02, eval_every=50_000), "eval/return", numbers={}, slow=True,
        ),
    },
    recipes=(
        Recipe(
            "HalfCheetah-v5 --total-timesteps 1000000", "arXiv 1812.05905, table 1",
            paper=dict(learning_rate=3e-4, gamma=0.99, tau=0.005, batch_size=256, buffer_size=1_000_000,
                       hidden_size=256, target_entropy=None, alpha=None),
        ),
    ),
    flags=dict(env_kwargs=("max_episode_steps=20",), num_envs=2, total_timesteps=48, learning_starts=16, batch_size=8,
               hidden_size=8, buffer_size=1000, log_every=16, eval_every=0, eval_episodes=1),
    noise=WALK,
    special={"alpha": ({}, 0.5), "buffer_size": ({}, 16)},
)  # fmt: skip
