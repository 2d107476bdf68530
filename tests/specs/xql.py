"""XQL and f-DVL: algos/xql.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
sign-of-the-error:xql: V - Q and Q - V look alike in a squared error
- z = (errors / args.gumbel_scale)
+ z = (-errors / args.gumbel_scale)

clipped-below-too: a clip has two ends
- .clamp(max=args.max_clip)
+ .clamp(-args.max_clip, args.max_clip)

chi2-weights-exchanged: lambda and 1 - lambda
- args.dvl_lambda * above - (1 - args.dvl_lambda) * errors
+ (1 - args.dvl_lambda) * above - args.dvl_lambda * errors
"""
SHORT = dict(max_steps=5000, hidden_size=128, batch_size=128, learning_rate=0.002, tau=0.02, eval_every=0)

SPEC = Spec(
    "XQL, arXiv 2301.02328; f-DVL, arXiv 2302.08560",
    tests="exact_xql exact_iql command_line_control resume_control wiring",
    curves={
        "xql-hopper": Curve(SHORT | dict(eval_episodes=20), "eval/return", numbers={"eval/return_stochastic": "log"}),
    },
    effects={"xql-scale": Effect(  # V over the data's values: a soft maximum of a small, middle and large scale
        runs={str(name): ("xql", SHORT | dict(eval_episodes=0, gumbel_scale=scale))
              for name, scale in {"small": 0.5, "idea": 2.0, "mean": 1000.0}.items()},
        statistic="late lift", claims={"small > idea + 0.1": 5, "idea > mean + 0.3": 5}, seeds=5,
    )},
    no_recipe="the authors' commands have other minibatches and losses of Q",
    special={"max_clip": ({"gumbel_scale": 0.01}, 1.0), "dvl_lambda": ({"value_loss": "chi2"}, 0.3)},
)  # fmt: skip
