"""behaviour cloning and 10 %-BC: algos/bc.py."""

from tests.flags import OFFLINE
from tests.specs import Curve, Spec

BUGS = """
training-mode-lost:cloning: eval() before an evaluation, and no train() after it
-     actor.train()

variance-for-deviation:cloning: variances and deviations are both called sigma; at 1 nothing shows
- z = (actions - mean) * (-log_std).exp()
+ z = (actions - mean) * (-2 * log_std).exp()

log-std-without-bounds:cloning: SAC's bounds are taken for the authors' (CORL's IQL)
- LOG_STD_BOUNDS = (-5.0, 2.0)
+ LOG_STD_BOUNDS = (-20.0, 2.0)
"""

SPEC = Spec(
    "BC and 10 %-BC",
    "Offline",
    small="--device cpu --max-steps 160 --log-every 16 --eval-every 64 --eval-episodes 2 --save-every 32 "
          "--hidden-size 16 --batch-size 8",
    aliases=("imitation learning",),
    tests="exact_iql parity_updates command_line_control offline_data resume_control wiring",
    curves={
        "bc-hopper": Curve(
            dict(max_steps=3000, hidden_size=128, batch_size=128, learning_rate=0.001, eval_every=0,
            eval_episodes=20), "eval/return",
            numbers={"eval/return_stochastic": "log"},
        ),
        "bc10-hopper": Curve(
            dict(max_steps=3000, hidden_size=128, batch_size=128, learning_rate=0.001, eval_every=0,
            eval_episodes=20, top_fraction=0.1), "eval/return",
            numbers={"eval/return_stochastic": "log"},
        ),
    },
    no_recipe="its network and update are iql.py's at temperature 0, and 10 %-BC's paper gives no table",
    flags=OFFLINE | dict(hidden_size=8), noise=dict(dropout=0.5),
    special={"env_id": ({}, "Heavy-v0")},
)  # fmt: skip
