"""HER: algos/her.py."""

from tests.specs import Curve, Effect, Spec, parse_bugs
from tests.specs.dqn import SPEC as PARENT

BUGS = """
original-goals-not-stored: only hindsight is learned from
- for rows in (episode, *others):
+ for rows in others:

episodes-mixed: the list of rows is not emptied: goals of another episode
-             paths[i] = []

next-observation-of-the-reset:her: what a vector returns is the first observation of the next episode
- terminated[:, None], true_obs], 1, dtype
+ terminated[:, None], next_obs], 1, dtype

unfinished-episodes-lost-on-resume: the buffer is restored, what is not yet in it is not
-         paths = [list(rows.numpy()) if envs.log.length[i] else [] for i, rows in enumerate(run.state["paths"])]
"""
FLIP = dict(env_id="BitFlip-v0", total_timesteps=6000, gamma=0.98, end_e=0.1, learning_starts=500, log_every=1200,
            buffer_size=100_000, eval_every=1200, eval_episodes=100)  # fmt: skip

SPEC = Spec(
    "HER, arXiv 1707.01495",
    PARENT.family,
    small=PARENT.small,
    tests="exact_her exact_dqn parity_sb3_her problems command_line_control resume_control",
    curves={
        "her-bitflip": Curve(FLIP, "eval/success", numbers={"mean eval/success": "share"}),
    },
    effects={
        "her-bitflip": Effect(
            {"her": ("her", FLIP), "dqn": ("dqn", FLIP), "no_hindsight": ("her", FLIP | dict(her_k=0))},
            "last eval/success", {"her > dqn + 0.5": 9, "no_hindsight < 0.2": 9},
        ),
    },
    no_recipe="the paper's table is of DDPG on a robot; of BitFlip it gives no table",
    flags=PARENT.flags | dict(env_kwargs=("n=4",)),
    special=PARENT.special | {"env_id": ({"env_kwargs": ()}, "environments:Goal-v0"), "env_kwargs": ({}, ("n=5",)),
                              "eval_episodes": ({}, 20)},
    walk="environments:Goal-v0",
    noise=dict(env_id="environments:Goal-v0", env_kwargs=("label=noisy",)),
    bugs=parse_bugs(BUGS),
)  # fmt: skip
