"""CQL, SAC-N and EDAC: algos/cql.py."""

from tests.specs import Curve, Effect, Recipe, Spec

BUGS = """
next-actions-at-the-next-state: the other samples are judged where they were drawn
- ratios.append(agent.critics(obs, actions) - logps)
+ ratios.append(agent.critics(states, actions) - logps)

samples-of-one-state-alone: two loops over states that look alike
- zip((obs, next_obs), noise)
+ zip((obs, obs), noise)

data-detached-in-the-penalty: targets are detached
- (integral - q).mean((1, 2))
+ (integral - q.detach()).mean((1, 2))

slopes-of-the-sum: a list of one leaf N times
- copies = [actions.detach().requires_grad_() for _ in critics]
+ copies = [actions.detach().requires_grad_()] * len(critics)

rates-exchanged: two learning rates
- adam(agent.critics.parameters(), args.learning_rate)
+ adam(agent.critics.parameters(), rate)
"""
SHORT = dict(max_steps=2000, eval_episodes=0, log_every=100)
FREE = SHORT | dict(max_steps=1000, cql_weight=0.0)

SPEC = Spec(
    "CQL, arXiv 2006.04779; SAC-N and EDAC, arXiv 2110.01548",
    tests="exact_cql exact_td3_bc parity_cql command_line_control resume_control wiring",
    curves={
        "cql-hopper": Curve(dict(max_steps=1000, eval_every=200, threads=1), "eval/return",
                            numbers={"mean eval/return": "log"}),
    },
    effects={
        "cql-gap": Effect(  # of the data's actions over uniform ones
            runs={"cql": ("cql", SHORT), "sac": ("cql", SHORT | dict(cql_weight=0.0))},
            statistic="late gap", claims={"cql >= 4 * sac": 5, "cql > 2": 5}, seeds=5,
        ),
        "cql-edac": Effect(  # of the data's actions: how pessimistic the least of the critics is
            runs={"two": ("cql", FREE), "four": ("cql", FREE | dict(num_critics=4)),
                  "ten": ("cql", FREE | dict(num_critics=10)),
                  "edac": ("cql", FREE | dict(num_critics=4, diversity=1.0))},
            statistic="late q", claims={"four < two": 5, "ten < four": 5, "edac < ten": 5}, seeds=5,
        ),
    },
    recipes=(Recipe(
        "hopper_medium_replay-v2.hdf5 --max-steps 1000000",
        "corl-team/CORL, configs/offline/cql/hopper/medium_replay_v2.yaml and algorithms/offline/cql.py",
        paper=dict(learning_rate=3e-4, policy_learning_rate=3e-5, batch_size=256, hidden_size=256, tau=0.005,
                   gamma=0.99, cql_weight=10.0, num_samples=10, num_critics=2, diversity=0.0, normalize=True,
                   backup_entropy=False, max_steps=1_000_000),
    ),),
)  # fmt: skip
