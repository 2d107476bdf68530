"""RIQL: algos/riql.py."""

from tests.specs import Curve, Effect, Recipe, Spec

BUGS = """
minimum-of-the-ensemble: IQL's pessimism, with more critics
- .quantile(args.quantile, 0)
+ .amin(0)

quantile-from-above: alpha or 1 - alpha
- .quantile(args.quantile, 0)
+ .quantile(1 - args.quantile, 0)

mean-over-critics: the authors' scale of the loss; Adam hardly notices
- sizes.mean(1).sum()
+ sizes.mean()

spoils-nothing: training runs on
-     corrupt(data, args)

spread-of-all-numbers: one deviation for observations that differ in scale
- data.next_obs[data.known].std(0)
+ data.next_obs[data.known].std()

spread-of-unknown-rows: what follows a time-out is another episode's
- data.next_obs[data.known].std(0)
+ data.next_obs.std(0)

rewards-moved: the authors add noise to observations, and replace rewards
- data.rewards[rows] = 30 * noise[:, 0]
+ data.rewards[rows] += 30 * noise[:, 0]

noise-of-one-sign: rng.uniform begins at 0
- rng.uniform(-1, 1, (
+ rng.uniform(0, 1, (

rows-of-every-seed: a constant seed
- rng = np.random.default_rng(args.seed)
+ rng = np.random.default_rng(0)
"""
SHORT = dict(max_steps=5000, hidden_size=128, batch_size=128, learning_rate=0.002, tau=0.02, eval_every=0)
LEARNS = SHORT | dict(eval_episodes=0)
IQL = dict(num_critics=2, quantile=0.0, huber_delta=0.0)  # its update, on scaled observations
SPOILT = {"clean": "none", "next": "next-observations", "rewards": "rewards"}

SPEC = Spec(
    "RIQL, arXiv 2310.12955",
    tests="exact_riql parity_updates exact_iql command_line_control resume_control wiring",
    curves={
        "riql-hopper": Curve(SHORT | dict(max_steps=3000, eval_episodes=20), "eval/return",
                             numbers={"eval/return_stochastic": "log"}),
    },
    effects={
        "riql-tail": Effect(  # of the targets of Q, of IQL
            runs={name: ("riql", LEARNS | IQL | dict(corruption=what)) for name, what in SPOILT.items()},
            statistic="late kurtosis", claims={"next > clean + 0.5": 5, "rewards < clean + 0.5": 5}, seeds=5,
        ),
        "riql-values": Effect(  # Q of the data's actions; unscaled: iql.py as it is
            runs={f"{arm}_{name}": ("riql", LEARNS | settings | dict(corruption=what))
                  for arm, settings in {"iql": IQL, "riql": {}, "unscaled": IQL | dict(normalize=False)}.items()
                  for name, what in SPOILT.items() if (arm, name) != ("unscaled", "rewards")},
            statistic="late q",
            claims={
                "abs(riql_next - riql_clean) < abs(iql_next - iql_clean) / 1.5": 5,
                "abs(riql_next - riql_clean) < abs(unscaled_next - unscaled_clean) / 1.5": 5,
                "iql_rewards < 0.8 * iql_clean": 5, "riql_rewards > 0.9 * riql_clean": 5,
            },
            seeds=5,
        ),
    },
    recipes=(Recipe(
        "hopper_medium_replay-v2.hdf5 --max-steps 3000000",
        "YangRui2015/RIQL, RIQL.py and RIQL_config.py, random corruption of dynamics", preset="mujoco",
        paper=dict(learning_rate=3e-4, batch_size=256, hidden_size=256, tau=0.005, gamma=0.99, max_steps=3_000_000,
                   expectile=0.7, temperature=3.0, rewards="raw", normalize=True, num_critics=5, quantile=0.5,
                   huber_delta=1.0, corruption="next-observations", corruption_rate=0.3, corruption_scale=1.0),
    ),),
    special={"corruption": ({"max_steps": 16}, ["next-observations", "rewards"]),
             "corruption_rate": ({"corruption": "rewards"}, 0.9),
             "corruption_scale": ({"corruption": "rewards"}, 0.1)},
)  # fmt: skip
