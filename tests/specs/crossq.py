"""CrossQ: algos/crossq.py."""

from tests.specs import Curve, Effect, Recipe, Spec

BUGS = """
two-passes: naive batch norm in SAC: each kind of rows has statistics of its own
- q, next_q = agent.critics(obs, actions).chunk(2, 1)
+ q, next_q = agent.critics(batch.obs, batch.actions), agent.critics(batch.next_obs, next_actions)

gradient-through-the-target: the pass that both share cannot be under no_grad
-     with torch.no_grad():
-         soft_value = next_q.amin(0)
+     with torch.enable_grad():
+         soft_value = next_q.amin(0)

bootstrap-from-the-old-pairs: the halves are exchanged
- q, next_q = agent.critics(obs, actions).chunk(2, 1)
+ next_q, q = agent.critics(obs, actions).chunk(2, 1)

critics-stay-in-training-mode: the actor's pass then moves their statistics, and has those of its own actions
-     loss, q, target = critic_loss(agent, batch, next_noise, args.gamma)
-     agent.critics.eval()
+     loss, q, target = critic_loss(agent, batch, next_noise, args.gamma)

critics-never-in-training-mode: the mode is left as it is, as in SAC
-     agent.critics.train()
-     loss, q,
+     loss, q,

actor-stays-in-training-mode: the policy then depends on the rows it is asked about, and one row has no variance
-         loss, logps = actor_loss(agent, batch.obs, noise)
-         agent.actor.eval()
+         loss, logps = actor_loss(agent, batch.obs, noise)

actor-never-in-training-mode: its statistics stay those of no data
-         agent.actor.train()
-         loss, logps
+         loss, logps

new-agent-in-training-mode: modules are made in it; random actions hide it until the first evaluation
-         self.log_alpha = nn.Parameter(torch.tensor(1.0 if args.alpha is None else args.alpha).log())
-         self.eval()
+         self.log_alpha = nn.Parameter(torch.tensor(1.0 if args.alpha is None else args.alpha).log())

momentum-of-the-old: the authors' momentum, 0.99, is that of the old statistics
- self.mean.lerp_(mean, MOMENTUM)
+ self.mean.lerp_(mean, 1 - MOMENTUM)

running-variance-stands-still: one of two lines that look alike
-             self.variance.lerp_(variance, MOMENTUM)
-             self.passes.add_(1)
+             self.passes.add_(1)

warm-up-never-ends: the counter is not counted
-             self.variance.lerp_(variance, MOMENTUM)
-             self.passes.add_(1)
+             self.variance.lerp_(variance, MOMENTUM)

warm-up-forgotten: batch renormalisation from the first pass on
- warm = self.passes >= self.warmup
+ warm = self.passes >= 0

r-not-clipped-below: clamp with one bound
- clamp(1 / R_MAX, R_MAX)
+ clamp(max=R_MAX)

d-of-the-batch-s-spread: a quotient of the wrong standard deviation
- ((mean - self.mean) / std)
+ ((mean - self.mean) / batch_std)

gradient-through-r-and-d: no_grad is only needed for the statistics
-         with torch.no_grad():  # r and d
+         with torch.enable_grad():  # r and d

no-norm-before-the-output: layers are normalised in pairs with their ReLU
- layers += [BatchRenorm(size, args.renorm_warmup)] if args.batch_norm else []
+ layers += [BatchRenorm(size, args.renorm_warmup)] if args.batch_norm and after == hidden_size else []
"""
FAST = dict(total_timesteps=4000, learning_starts=500, learning_rate=0.002, batch_size=64, hidden_size=64,
            policy_frequency=2, eval_every=500, threads=1)  # fmt: skip
CROSSQ = FAST | dict(critic_size=64)

SPEC = Spec(
    "CrossQ, arXiv 1902.05605",
    small="--critic-size 16",
    tests="exact_crossq exact_sac parity_sb3_crossq command_line_control resume_control wiring",
    curves={
        "crossq-pendulum": Curve(CROSSQ | dict(eval_every=1000), "eval/return",
                                 numbers={"mean eval/return": "plain", "last eval/return": "plain"}),
    },
    effects={
        # chosen after two seeds, 101 and 102
        "crossq-pendulum": Effect(
            runs={
                "crossq": ("crossq", CROSSQ),
                "sac": ("sac", FAST),
                "control": ("crossq", CROSSQ | dict(batch_norm=False)),
            },
            statistic="mean eval/return",
            claims={"crossq > sac": 9, "crossq > control": 9},
        ),
    },
    recipes=(Recipe(
        "HalfCheetah-v5 --total-timesteps 5000000", "adityab/CrossQ, train.py (the paper's table was not read)",
        paper=dict(learning_rate=1e-3, gamma=0.99, batch_size=256, buffer_size=1_000_000, hidden_size=256,
                   critic_size=2048, utd_ratio=1, policy_frequency=3, learning_starts=5000, renorm_warmup=100_000,
                   total_timesteps=5_000_000, target_entropy=None, alpha=None, batch_norm=True),
    ),),
    flags=dict(critic_size=8),
    special={"renorm_warmup": ({}, 3)},
)  # fmt: skip
