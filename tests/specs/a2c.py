"""A2C: algos/a2c.py."""

from tests.specs import Curve, Effect, Spec

SHORT = dict(total_timesteps=24_560, eval_every=2048)
LONG = dict(total_timesteps=24_576, eval_every=2048)
ONE = dict(num_minibatches=1, update_epochs=1, normalize_advantages=False, gae_lambda=1.0)

SPEC = Spec(
    "A2C, arXiv 1602.01783",
    aliases=("Advantage Actor-Critic", "A3C"),
    tests="exact_a2c exact_ppo parity_sb3 command_line_control envs resume_control wiring",
    curves={"a2c-cartpole": Curve(  # of 24,560 steps, three seeds had 97 to 446: no band
        dict(total_timesteps=60_000, eval_every=12_000), "eval/return", numbers={"mean eval/return": "plain"}
    )},
    effects={
        # two runs of 100,000 steps, seeds 101 and 102, came before, in which a2c had 475 and 338 after 10,000. `long`
        # is ppo.py at its own rollouts of 1,024 rows without the reuse, `short` at a2c.py's of 40: A2C with Adam
        "a2c-reuse": Effect(
            runs={
                "a2c": ("a2c", SHORT),
                "ppo": ("ppo", LONG),
                "long": ("ppo", LONG | ONE),
                "short": ("ppo", SHORT | ONE | dict(num_steps=5, learning_rate=7e-4)),
            },
            statistic="until eval/return 475", seeds=5,
            claims={"a2c > ppo": 5, "long > ppo": 5, "long > a2c": 5},
        ),
    },
    no_recipe="the paper's experiments are of Atari's frames and a2c.py takes vectors",
)  # fmt: skip
