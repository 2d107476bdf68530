"""RLPD: algos/rlpd.py."""

from tests.specs import Curve, Effect, Recipe, Spec

BUGS = """
no-data: the buffers are exchanged nowhere, one is forgotten
- for buffer, rows in ((replay, args.batch_size - count), (offline, count))]
+ for buffer, rows in ((replay, args.batch_size - count), (replay, count))]

all-data: and the other one
- for buffer, rows in ((replay, args.batch_size - count), (offline, count))]
+ for buffer, rows in ((offline, args.batch_size - count), (offline, count))]

shares-exchanged: only at a half it is the same
- for buffer, rows in ((replay, args.batch_size - count), (offline, count))]
+ for buffer, rows in ((replay, count), (offline, args.batch_size - count))]

share-of-the-new: the quotient of the other part
- share = offline / (offline + online)
+ share = online / (offline + online)

uneven-halves: a batch of odd size is rounded
-     if abs(rows - round(rows)) > 1e-6 or
+     if abs(rows - round(rows)) > 1 or

unknown-next-observations: rows at a time-out whose next observation is of another episode
- rows, sizes = data.known,
+ rows, sizes = data.known | True,

time-outs-terminate: the dataset has two kinds of ends
- data.terminated[rows, None], data.next_obs[rows]
+ data.terminated[rows, None] | True, data.next_obs[rows]

target-entropy-of-sac: the authors' code has half of it
- args.target_entropy = -action_size / 2
+ args.target_entropy = -float(action_size)

values-of-another-discount: weights alone fit
- for name in ("env_id", "env_kwargs", "gamma"):
+ for name in ("env_id", "env_kwargs"):

scaled-observations: taken for raw ones
- if (saved.pop("obs_mean", torch.zeros(1)) != 0).any():
+ if saved.pop("obs_mean", torch.zeros(1)).isnan().any():
"""
RECORDED = dict(total_timesteps=4000, learning_starts=500, learning_rate=0.002, tau=0.01, batch_size=64, hidden_size=64,
                eval_every=2000, record_steps=10, threads=1)  # fmt: skip
FAST = dict(dataset="full-replay.hdf5", learning_rate=0.001, tau=0.01, batch_size=64, hidden_size=64, utd_ratio=8,
            learning_starts=200, total_timesteps=700, eval_every=100, log_every=100, threads=1)  # fmt: skip
START = dict(init=("cql", dict(normalize=False, max_steps=2000, hidden_size=128, batch_size=128, eval_episodes=0)),
             layer_norm=False, actor_q="min", hidden_size=128, batch_size=128, total_timesteps=6000, eval_every=1000,
             offline_ratio=0.0)  # fmt: skip

SPEC = Spec(
    "RLPD, arXiv 2302.02948",
    tests="exact_rlpd exact_redq parity_updates "
          "command_line_control resume_control wiring",
    curves={"rlpd-hopper": Curve(
        dict(total_timesteps=1500, learning_starts=500, learning_rate=0.001, tau=0.01, batch_size=128,
        hidden_size=128, eval_every=500), "eval/return",
        numbers={"mean eval/return": "plain"},
    )},
    effects={
        # chosen after one seed, 101, in which merged was as good as rlpd; none is sac.py, and the control
        "rlpd-pendulum": Effect(
            data=("sac", RECORDED),
            runs={
                "rlpd": ("rlpd", FAST),
                "none": ("rlpd", FAST | dict(offline_ratio=0.0)),
                "merged": ("rlpd", FAST | dict(offline_ratio=None)),
                "no_norm": ("rlpd", FAST | dict(layer_norm=False)),
            },
            statistic="late eval/return",
            claims={"rlpd > none": 9},
        ),
        # WSRL's warm-up alone: 6,000 steps after cql.py without its data; the first 3,000 are it. In four pilots, seeds
        # from 101, two of them at a larger size, warm had 1.3 to 2.3 times the return of none
        "rlpd-warm-up": Effect(
            runs={
                "warm": ("rlpd", START | dict(learning_starts=3000)),
                "none": ("rlpd", START | dict(learning_starts=0)),
                "kept": ("rlpd", START | dict(learning_starts=0, offline_ratio=0.5)),
                "scratch": ("rlpd", START | dict(learning_starts=3000, init="")),
            },
            statistic="late eval/return", seeds=5,
            claims={"warm > 1.2 * none": 4, "kept > none": 4, "warm > scratch": 4},
        ),
    },
    recipes=(Recipe(
        "hopper_medium_replay-v2.hdf5",
        "ikostrikov/rlpd, README.md, configs/ and sac_learner.py (the paper's table was not read)",
        paper=dict(learning_rate=3e-4, gamma=0.99, tau=0.005, batch_size=256, hidden_size=256, num_critics=10,
                   subset_size=2, layer_norm=True, actor_q="mean", utd_ratio=20, policy_frequency=None,
                   learning_starts=5000, total_timesteps=250_000, offline_ratio=0.5, target_entropy=None,
                   alpha=None),
    ),),
    flags=dict(dataset="@pendulum.hdf5"),
    noise=dict(dataset="@walk.hdf5"),
    special={"offline_ratio": ({}, 0.25), "env_id": ({}, "Heavy-v0"), "subset_size": ({"num_critics": 3}, 2)},
)  # fmt: skip
