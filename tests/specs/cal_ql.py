"""Cal-QL: algos/cal_ql.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
maximum-after-the-density: the two lines can be exchanged without an error
- ratios.append(values.clamp(min=floor[:, None]) - logps)
+ ratios.append((values - logps).clamp(min=floor[:, None]))

minimum-for-the-maximum: a bound from above
- values.clamp(min=floor[:, None])
+ values.clamp(max=floor[:, None])

uniform-actions-held-up-too: all samples are in one list
- ratios.append(values.clamp(min=floor[:, None]) - logps)
+ ratios = [x.clamp(min=floor[:, None]) for x in ratios] + [values.clamp(min=floor[:, None]) - logps]

gradient-where-the-return-holds: straight through
- ratios.append(values.clamp(min=floor[:, None]) - logps)
+ ratios.append(values + (values.clamp(min=floor[:, None]) - values).detach() - logps)

only-the-states-own-samples: the paper writes one policy
- ratios.append(values.clamp(min=floor[:, None]) - logps)
+ ratios.append((values.clamp(min=floor[:, None]) if states is obs else values) - logps)

returns-across-trajectories: one loop over all rows
- if row + 1 not in starts:
+ if True:

returns-of-other-rows: the rows that are taken come later
- returns_to_go(data, args.gamma)[rows, None])
+ returns_to_go(data, args.gamma)[: rows.sum(), None])

flag-turned-around: --no-calibrate is CQL
- if args.calibrate else
+ if not args.calibrate else

excess-of-the-data-s-actions: two values at hand
- (q_policy - batch.returns)
+ (q - batch.returns)
"""
SHORT = dict(gamma=0.9, tau=0.02, batch_size=64, max_steps=1500, eval_episodes=0, log_every=100)  # values settle

SPEC = Spec(
    "Cal-QL, arXiv 2303.05479", no_recipe="the authors' tasks go on online: not here",
    special={"calibrate": (dict(dataset="@walk.hdf5", gamma=0.0), False)},  # rewards near 0
    tests="exact_cal_ql exact_cql exact_td3_bc parity_cql command_line_control resume_control wiring",
    curves={"cal_ql-hopper": Curve(dict(max_steps=1500, eval_every=300, batch_size=64, threads=1), "eval/return",
                                   numbers={"mean eval/return": "log"})},
    effects={"cal_ql-excess": Effect(  # of the policy's values over returns-to-go
        runs={"cal_ql": ("cal_ql", SHORT), "cql": ("cal_ql", SHORT | dict(calibrate=False)),
              "sac": ("cal_ql", SHORT | dict(cql_weight=0.0))},
        statistic="late excess", claims={"cql < -5": 5, "abs(cal_ql) < 3": 5, "sac > 20": 5}, seeds=5)})  # fmt: skip
