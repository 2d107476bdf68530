"""DQN: algos/dqn.py."""

from tests.flags import HOP
from tests.specs import Curve, Effect, Recipe, Spec

BUGS = """
next-observation-of-the-reset:dqn: what a vector returns is the first observation of the next episode
(google-deepmind/mujoco_playground#305, google/brax#641)
- replay.add(obs, actions, rewards[:, None], terminated[:, None], true_obs)
+ replay.add(obs, actions, rewards[:, None], terminated[:, None], next_obs)

target-of-the-online-network: two networks of one kind
- next_values = agent.target(batch.next_obs)
+ next_values = agent.q(batch.next_obs)

double-turned-round: which of the two chooses is easy to mix up: this is DQN again, with the networks exchanged
- next_values.gather(1, chosen)
+ (agent.q(batch.next_obs) if args.double else next_values).gather(1, next_values.argmax(1, keepdim=True))

smallest-next-value: a cost is minimised, a reward is not
- else next_values).argmax(1, keepdim=True)
+ else next_values).argmin(1, keepdim=True)

squared-error: CleanRL's loss
- loss = F.huber_loss(q, target) if
+ loss = F.mse_loss(q, target) if

huber-whatever-the-flag-says: the second branch is a copy of the first
- else F.mse_loss(q, target)
+ else F.huber_loss(q, target)

target-network-stands-still: the copy is forgotten
- list(agent.q.parameters()), args.tau)
+ list(agent.q.parameters()), 0.0)

target-network-renewed-always: the condition is lost, and with it the idea
-     if number % args.target_network_frequency == 0:
+     if True:

episodes-lost-on-resume:dqn: nothing is learnt from them, so they look like no state
- step, episodes = run.step, run.state.get("episodes", [])
+ step, episodes = run.step, []

explores-as-if-at-the-end: the share is of the run and not of the steps so far
- return args.start_e + share * (args.end_e - args.start_e)
+ return args.end_e + share * (args.start_e - args.end_e)

explores-with-the-probability-of-not-exploring: the comparison is turned round
- explore < epsilon
+ explore > epsilon

acts-by-the-target-network: two networks of one kind
- values = agent.q(torch.from_numpy(
+ values = agent.target(torch.from_numpy(

generator-not-restored:dqn: weights and optimizer are what people think of (Stable-Baselines3#1526, open)
- optimizer=optimizer, generator=generator, replay
+ optimizer=optimizer, replay

updates-by-iterations: one environment is what one thinks of
- for n in (before, step))
+ for n in (before, before + 1))
"""
NOISE = dict(env_id="algos.environments.noise_mdp:NoiseMDP-v0", total_timesteps=192_000, num_envs=32,
             train_frequency=32, gradient_steps=1,
             buffer_size=32, batch_size=32, learning_starts=32, gamma=0.95, start_e=1.0, end_e=1.0, learning_rate=1e-3,
             target_network_frequency=500, hidden_size=64, log_every=3200, eval_every=0, eval_episodes=1)  # fmt: skip
SHARED = dict(total_timesteps=500_000, learning_rate=2.5e-4, batch_size=128, buffer_size=10_000, learning_starts=10_000,
              train_frequency=10, gradient_steps=1, exploration_fraction=0.5)  # fmt: skip
CLEANRL = SHARED | dict(env_id="CartPole-v1", target_network_frequency=500, tau=1.0, gamma=0.99, start_e=1.0,
                        end_e=0.05, hidden_size=(120, 84), double=False, num_envs=1)  # its arguments  # fmt: skip
LIKE_CLEANRL = SHARED | dict(target_network_frequency=50, hidden_size=120, eval_every=0)  # ours

SPEC = Spec(
    "DQN, arXiv 1312.5602; Double DQN, arXiv 1509.06461",
    "Control",
    small="--device cpu --num-envs 2 --total-timesteps 160 --learning-starts 32 --batch-size 8 --hidden-size 16 "
          "--target-network-frequency 5 --log-every 32 --eval-every 64 --eval-episodes 2 --save-every 32",
    aliases=("Q-learning",),
    tests="exact_dqn parity_updates environments command_line_control resume_control wiring",
    curves={
        "dqn-cartpole": Curve(
            # at gamma 0.99 returns fall back after a peak, and seeds differ by a third of the mean
            dict(total_timesteps=20_000, learning_starts=500, hidden_size=64, gamma=0.95, target_network_frequency=50,
            eval_every=2000), "eval/return",
            numbers={"mean eval/return": "plain"},
        ),
        "dqn-cartpole-500k": Curve(  # benchmarks/published.py
            LIKE_CLEANRL | dict(huber=False), "return",
            numbers={"late return": "plain"}, slow=True,
        ),
        "dqn-lunarlander": Curve(  # RL Baselines3 Zoo's settings
            dict(env_id="LunarLander-v3", total_timesteps=100_000, learning_rate=6.3e-4, batch_size=128,
            target_network_frequency=250, gradient_steps=4, exploration_fraction=0.12, end_e=0.1, hidden_size=256,
            eval_every=20_000), "eval/return", numbers={}, slow=True,
        ),
    },
    effects={"dqn-bias": Effect(  # every Q is 0: the mean of an estimate is its bias
        {"double": ("dqn", NOISE | dict(double=True)), "dqn": ("dqn", NOISE),
         "one_action": ("dqn", NOISE | dict(env_kwargs=("actions=1",)))},
        "late q", {"abs(double) < dqn / 3": 9, "abs(one_action) < dqn / 3": 9},
    )},
    recipes=(Recipe(
        "--total-timesteps 500000", "CleanRL, cleanrl/dqn.py (its arguments)",
        paper=CLEANRL | dict(huber=False),
        differs=dict(target_network_frequency=(50, "renewed by counting updates"),
                     hidden_size=(120, "layers of 120 and 84")),
    ),),
    flags=dict(env_kwargs=("max_episode_steps=20",), num_envs=2, total_timesteps=48, learning_starts=16, batch_size=8,
               hidden_size=8, buffer_size=1000, log_every=16, eval_every=0, eval_episodes=1, train_frequency=2,
               gradient_steps=2, target_network_frequency=3, learning_rate=0.03, exploration_fraction=0.8),
    noise=HOP,
    walk=HOP["env_id"],
    special={"buffer_size": ({}, 16), "env_id": ({}, "environments:Hop-v0"), "tau": ({}, 0.5),
             "double": ({"target_network_frequency": 20, "total_timesteps": 96}, True),
             "start_e": ({"learning_starts": 2}, 0.5)},
)  # fmt: skip
