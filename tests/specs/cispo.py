"""CISPO and GPPO: algos/cispo.py."""

from tests.specs import Effect, Spec
from tests.specs.grpo import SORT
from tests.specs.gspo import STALE

BUGS = """
distances-for-ratios: the bounds of everybody else are distances from 1
- weight = ratio.clamp(low, high)
+ weight = ratio.clamp(1 - low, 1 + high)

both-bounds-for-both-signs: gppo without its case
- weight = torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low))
+ weight = ratio.clamp(low, high)

signs-exchanged: which bound holds which sign
- weight = torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low))
+ weight = torch.where(advantages < 0, ratio.clamp(max=high), ratio.clamp(min=low))

held-tokens-are-dropped: the clip of PPO again
- return -weight * advantages * logps, weight != ratio
+ return -weight * (weight == ratio) * advantages * logps, weight != ratio

weight-without-the-logarithm: the surrogate of PPO, whose gradient here is none
- return -weight * advantages * logps, weight != ratio
+ return -weight * advantages + 0 * logps, weight != ratio

high-is-not-taken: one of two lines that look alike
- high = high if args.ratio_high is None else args.ratio_high
+ high = high if args.ratio_low is None else args.ratio_high or high
"""

SPEC = Spec(
    "CISPO, arXiv 2506.13585; GPPO, arXiv 2508.07629",
    tests="exact_cispo parity_trl_variants exact_grpo wiring",
    curves={"cispo-sort": SORT.but(max_steps=6, learning_rate=1e-4)},
    effects={"cispo-stale": Effect(  # eight epochs on each batch; in "free" no weight is bounded
        {"cispo": ("cispo", STALE), "grpo": ("grpo", STALE | dict(aggregation="token")),
         "gppo": ("cispo", STALE | dict(bounds="gppo")),
         "free": ("cispo", STALE | dict(ratio_low=0.0, ratio_high=1e9))},
        "last eval/pass@1", {"cispo > gppo + 0.2": 9, "cispo < grpo": 9},
    )},
    no_recipe="neither paper prints a whole table, and the authors' upper bound of CISPO is unknown",
    flags=dict(num_minibatches=2),
    special={"ratio_low": [({"num_iterations": 3, "bounds": name}, 1.5) for name in ("cispo", "gppo")],
             "ratio_high": ({"num_iterations": 3}, 0.5),
             "bounds": ({"num_iterations": 3, "ratio_low": 1.5, "ratio_high": 2.0}, "gppo"),
             "num_minibatches": ({}, 1)},
)  # fmt: skip
