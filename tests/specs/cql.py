"""CQL, SAC-N and EDAC: algos/cql.py."""

from tests.specs import Curve, Effect, Recipe, Spec

BUGS = """
density-of-the-uniform-forgotten: in a box from 0 to 1 it is 1
- agent.critics(obs, uniform) + action_size * math.log(2)
+ agent.critics(obs, uniform)

densities-added: importance weights divide by them
- ratios.append(agent.critics(obs, actions) - logps)
+ ratios.append(agent.critics(obs, actions) + logps)

next-actions-at-the-next-state: the other samples are judged where they were drawn
- ratios.append(agent.critics(obs, actions) - logps)
+ ratios.append(agent.critics(states, actions) - logps)

samples-of-one-state-alone: two loops over states that look alike
- zip((obs, next_obs), noise)
+ zip((obs, obs), noise)

sum-for-the-mean-of-samples: public codes leave it out; no gradient shows it
- .logsumexp(2) - math.log(3 * samples)
+ .logsumexp(2)

data-detached-in-the-penalty: targets are detached
- (integral - q).mean((1, 2))
+ (integral - q.detach()).mean((1, 2))

cosines-with-themselves: the sum over all pairs is easier to write
- .square().sum(1) - normals.square().sum((0, 2))
+ .square().sum(1)

slopes-of-the-sum: a list of one leaf N times
- copies = [actions.detach().requires_grad_() for _ in critics]
+ copies = [actions.detach().requires_grad_()] * len(critics)

slopes-of-any-length: cosines need unit vectors
- F.normalize(torch.stack(slopes), dim=2)
+ torch.stack(slopes)

target-entropy-positive:cql: entropies of discrete actions are positive
- logps, -float(size)
+ logps, float(size)

rates-exchanged: two learning rates
- adam(agent.critics.parameters(), args.learning_rate)
+ adam(agent.critics.parameters(), rate)

max-of-the-critics:actor: the actor maximises
- q = agent.critics(obs, actions).amin(0)
+ q = agent.critics(obs, actions).amax(0)

evaluation-with-training-noise:cql: one function acts in both
- return agent.actor(states, noise * scale)
+ return agent.actor(states, noise)
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
