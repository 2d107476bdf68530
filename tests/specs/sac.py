"""SAC: algos/sac.py."""

from tests.flags import WALK
from tests.specs import Curve, Recipe, Spec

BUGS = """
bootstrap-through-termination:sac: the mask is forgotten: the end of an episode costs nothing
- gamma * (1 - batch.terminated) * soft_value
+ gamma * soft_value

next-observation-of-the-reset:sac: what a vector returns is the first observation of the next episode
(google-deepmind/mujoco_playground#305, google/brax#641)
- replay.add(obs, actions, rewards[:, None], terminated[:, None], true_obs)
+ replay.add(obs, actions, rewards[:, None], terminated[:, None], next_obs)

max-of-the-twins: Q-learning has a max there
- next_q[subset]).amin(0)
+ next_q[subset]).amax(0)

max-of-the-twins:actor: the actor maximises
- else q.amin(0)
+ else q.amax(0)

target-of-the-online-critics: two networks of one kind
- next_q = agent.targets(batch.next_obs, next_actions)
+ next_q = agent.critics(batch.next_obs, next_actions)

target-of-old-actions: the action of the batch is at hand, and of the same shape
- agent.targets(batch.next_obs, next_actions)
+ agent.targets(batch.next_obs, batch.actions)

entropy-left-out-of-the-target: TD3's target, with an actor that is rewarded for entropy
-  - agent.log_alpha.exp() * next_logps

entropy-punished-in-the-target: entropy is minus a log-probability
-  - agent.log_alpha.exp() * next_logps
+  + agent.log_alpha.exp() * next_logps

entropy-punished-in-the-actor: entropy is minus a log-probability
- (agent.log_alpha.detach().exp() * logps - q)
+ (-agent.log_alpha.detach().exp() * logps - q)

subset-of-all-critics: the draw is there, the cut is forgotten
- device=batch.obs.device)[: args.subset_size]
+ device=batch.obs.device)

subset-with-replacement: two draws of one critic are no minimum (zhouzypaul/wsrl draws so)
- torch.randperm(args.num_critics, generator
+ torch.randint(args.num_critics, (args.num_critics,), generator

actor-maximises-the-sum: REDQ's mean over critics, without its denominator
- q = q.mean(0) if actor_q
+ q = q.sum(0) if actor_q

actor-moves-in-the-other-updates: a delay that counts the wrong ones
- if number % args.policy_frequency == 0:
+ if number % args.policy_frequency != 0 or args.policy_frequency == 1:

updates-are-counted-anew-in-each-step: a delay longer than a step's updates would never end
- metrics |= update(agent, optimizers, batch, generator, args, number + 1, *losses)
+ metrics |= update(agent, optimizers, batch, generator, args, number % args.utd_ratio + 1, *losses)

layer-norm-after-relu: both orders are in use
-         if layer_norm:
-             layers.append(nn.LayerNorm(hidden_size))
-         layers.append(nn.ReLU())
+         layers.append(nn.ReLU())
+         if layer_norm:
+             layers.append(nn.LayerNorm(hidden_size))

dropout-after-layer-norm: both orders are in use
-         if dropout:
-             layers.append(nn.Dropout(dropout))
-         if layer_norm:
-             layers.append(nn.LayerNorm(hidden_size))
+         if layer_norm:
+             layers.append(nn.LayerNorm(hidden_size))
+         if dropout:
+             layers.append(nn.Dropout(dropout))

target-critics-without-dropout: target networks are put into evaluation mode by habit
- hidden_size, **critics)
-         self.targets = copy.deepcopy(self.critics).requires_grad_(False)
+ hidden_size, **critics)
+         self.targets = copy.deepcopy(self.critics).requires_grad_(False).eval()

metrics-not-restored: an update that does not move the actor says nothing of entropy and alpha
-     parts |= dict(agent=agent, generator=generator, replay=replay)
-     run.restore(**parts)
-     step, episodes, metrics = run.step, run.state.get("episodes", []), run.state.get("metrics", {})
+     parts |= dict(agent=agent, generator=generator, replay=replay)
+     run.restore(**parts)
+     step, episodes, metrics = run.step, run.state.get("episodes", []), {}

episodes-not-restored: those that ended before the checkpoint and wait for the next row of metrics
- run.state.get("episodes", []), run.state.get("metrics", {})
+ [], run.state.get("metrics", {})

temperature-falls-when-it-should-rise: the sign of a loss whose value means nothing
- return -(log_alpha.exp() * (logps + target_entropy)).mean()
+ return (log_alpha.exp() * (logps + target_entropy)).mean()

target-entropy-positive: entropies of discrete actions are positive
- args.target_entropy = -float(action_size)
+ args.target_entropy = float(action_size)

tanh-forgotten-in-the-density: the density of what is squashed is taken for that of the action
- return u.tanh(), (log_normal - log_slope).sum(-1, keepdim=True)
+ return u.tanh(), log_normal.sum(-1, keepdim=True)

tanh-correction-of-the-wrong-sign: the stable form of the correction is copied from memory; at u = 0 nothing shows
- F.softplus(-2 * u)
+ F.softplus(2 * u)

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

evaluation-with-training-noise:sac: one function acts in both
- .to(generator.device), noise * scale)[0]
+ .to(generator.device), noise)[0]

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
                       hidden_size=256, utd_ratio=1, target_entropy=None, alpha=None),
        ),
        Recipe(
            "--num-critics 10", "watchernyu/REDQ, redq_sac.py and core.py (the paper's table was not read)",
            paper=dict(learning_rate=3e-4, gamma=0.99, tau=0.005, batch_size=256, buffer_size=1_000_000,
                       hidden_size=256, utd_ratio=20, policy_frequency=20, num_critics=10, subset_size=2,
                       actor_q="mean", learning_starts=5000, total_timesteps=125_000, target_entropy=-1.0, alpha=None,
                       layer_norm=False, dropout=0.0),
        ),
        Recipe(
            "--dropout 0.01", "TakuyaHiraoka/Dropout-Q-Functions..., KUCodebase (the paper's table was not read)",
            paper=dict(learning_rate=3e-4, gamma=0.99, tau=0.005, batch_size=256, buffer_size=1_000_000,
                       hidden_size=256, utd_ratio=20, policy_frequency=20, num_critics=2, subset_size=None,
                       actor_q="mean", learning_starts=5000, total_timesteps=100_000, target_entropy=-1.0, alpha=None,
                       layer_norm=True, dropout=0.01),
        ),
    ),
    flags=dict(env_kwargs=("max_episode_steps=20",), num_envs=2, total_timesteps=48, learning_starts=16, batch_size=8,
               hidden_size=8, buffer_size=1000, log_every=16, eval_every=0, eval_episodes=1),
    noise=WALK,
    special={"alpha": ({}, 0.5), "buffer_size": ({}, 16), "subset_size": ({"num_critics": 3}, 2)},
)  # fmt: skip
