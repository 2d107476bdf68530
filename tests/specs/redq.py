"""REDQ, and DroQ: algos/redq.py."""

from tests.specs import Curve, Effect, Recipe, Spec

BUGS = """
max-of-the-ensemble: Q-learning has a max there
- next_q[subset]).amin(0)
+ next_q[subset]).amax(0)

max-of-the-ensemble:actor: the actor maximises
- else q.amin(0)
+ else q.amax(0)

subset-of-all-critics: the draw is there, the cut is forgotten
- device=batch.obs.device)[: args.subset_size]
+ device=batch.obs.device)

subset-with-replacement: two draws of one critic are no minimum (zhouzypaul/wsrl draws so)
- torch.randperm(args.num_critics, generator
+ torch.randint(args.num_critics, (args.num_critics,), generator

actor-moves-in-the-other-updates: a delay that counts the wrong ones
- if number % args.policy_frequency == 0:
+ if number % args.policy_frequency != 0 or args.policy_frequency == 1:

updates-are-counted-anew-in-each-step: a delay longer than a step's updates would never end
- metrics |= update(agent, optimizers, batch, generator, args, number + 1, *losses)
+ metrics |= update(agent, optimizers, batch, generator, args, number % args.utd_ratio + 1, *losses)

actor-moves-in-every-update: SAC's own
- args.policy_frequency = args.utd_ratio
+ args.policy_frequency = 1

layer-norm-after-relu: both orders are in use
-         layers += [nn.LayerNorm(hidden_size)] if layer_norm else []
-         layers += [nn.ReLU()]
+         layers += [nn.ReLU()]
+         layers += [nn.LayerNorm(hidden_size)] if layer_norm else []

dropout-after-layer-norm: both orders are in use
-         layers += [nn.Dropout(dropout)] if dropout else []
-         layers += [nn.LayerNorm(hidden_size)] if layer_norm else []
+         layers += [nn.LayerNorm(hidden_size)] if layer_norm else []
+         layers += [nn.Dropout(dropout)] if dropout else []

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
"""
FAST = dict(total_timesteps=1500, learning_starts=400, learning_rate=0.002, tau=0.01, batch_size=64, hidden_size=64,
            eval_every=250, threads=1)  # fmt: skip

SPEC = Spec(
    "REDQ and DroQ, arXiv 2101.05982",
    aliases=("Randomized Ensembled Double Q-learning", "DroQ"),
    tests="exact_redq exact_sac command_line_control resume_control wiring",
    curves={
        "redq-pendulum": Curve(FAST, "eval/return", numbers={"mean eval/return": "plain"}),
    },
    effects={
        # chosen after one seed, 101; control has the ensemble and one update a step, many the updates and two critics
        "redq-pendulum": Effect(
            runs={
                "redq": ("redq", FAST),
                "sac": ("sac", FAST),
                "control": ("redq", FAST | dict(utd_ratio=1)),
                "many": ("redq", FAST | dict(num_critics=2, subset_size=None, actor_q="min", policy_frequency=1)),
            },
            statistic="late eval/return", seeds=5,
            claims={"redq > sac / 2": 5, "control < 2 * redq": 5},
        ),
    },
    recipes=(
        Recipe(
            "--num-critics 10", "watchernyu/REDQ, redq_sac.py and core.py (the paper's table was not read)",
            paper=dict(learning_rate=3e-4, gamma=0.99, tau=0.005, batch_size=256, buffer_size=1_000_000,
                       hidden_size=256, utd_ratio=20, policy_frequency=None, num_critics=10, subset_size=2,
                       actor_q="mean", learning_starts=5000, total_timesteps=125_000, target_entropy=-1.0, alpha=None,
                       layer_norm=False, dropout=0.0),
        ),
        Recipe(
            "--dropout 0.01", "TakuyaHiraoka/Dropout-Q-Functions..., KUCodebase (the paper's table was not read)",
            paper=dict(learning_rate=3e-4, gamma=0.99, tau=0.005, batch_size=256, buffer_size=1_000_000,
                       hidden_size=256, utd_ratio=20, policy_frequency=None, num_critics=2, subset_size=None,
                       actor_q="mean", learning_starts=5000, total_timesteps=100_000, target_entropy=-1.0, alpha=None,
                       layer_norm=True, dropout=0.01),
        ),
    ),
    special={"subset_size": ({}, 3)},
)  # fmt: skip
