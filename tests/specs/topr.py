"""TOPR: algos/topr.py."""

from tests.specs import Effect, Recipe, Spec
from tests.specs.grpo import SORT

BUGS = """
ratio-by-length: what verl does
- log_ratio = ((logps.detach() - old_logps) * mask).sum(1, keepdim=True)
+ log_ratio = ((logps.detach() - old_logps) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)

all-answers-are-tapered: truncated importance sampling
- torch.where(advantages < 0, log_ratio.clamp(max=0).exp(), 1.0)
+ log_ratio.clamp(max=0).exp()

right-answers-are-tapered: which sign it is for
- torch.where(advantages < 0, log_ratio.clamp(max=0).exp(), 1.0)
+ torch.where(advantages > 0, log_ratio.clamp(max=0).exp(), 1.0)

wrong-answers-are-nothing: rewards of 0 and 1 are taken as they are
- return (2 * rewards - 1 - baseline).nan_to_num(0.0)
+ return (rewards - baseline).nan_to_num(0.0)

skipped-answers-are-wrong:topr: NaN turns to 0 too early
- return (2 * rewards - 1 - baseline).nan_to_num(0.0)
+ return 2 * rewards.nan_to_num(0.0) - 1 - baseline

right-answers-in-the-metric: the mean of all weights hides those that matter
- means.add(wrong[rows] & valid.any(1, keepdim=True), wrong_weight=weight)
+ means.add(torch.ones_like(weight), wrong_weight=weight)
"""
# one collection of 2,048 answers of the first policy, 64 updates
ONCE = dict(task="sort", max_steps=1, num_prompts=256, num_minibatches=64, aggregation="constant", eval_every=0,
            eval_prompts=128)  # fmt: skip

SPEC = Spec(
    "TOPR, arXiv 2503.14286",
    tests="exact_topr exact_grpo expected_gradients parity_verl wiring",
    curves={"topr-sort": SORT.but(max_steps=6, learning_rate=1e-4)},
    effects={"topr-stale": Effect(
        {"topr": ("topr", ONCE), "reinforce": ("raft", ONCE | dict(select="all")),
         "clipped": ("raft", ONCE | dict(select="all", plusplus=True)), "positives": ("raft", ONCE)},
        "last eval/pass@1",
        {"topr > reinforce + 0.5": 10, "topr > clipped + 0.2": 9, "topr > positives - 0.05": 9},
    )},
    recipes=(Recipe(
        "meta-llama/Meta-Llama-3-8B-Instruct", "arXiv 2503.14286", preset="full",
        paper=dict(num_generations=16, learning_rate=5e-7, aggregation="sequence", beta=0.0, num_iterations=1,
                   max_grad_norm=1.0, temperature=1.0, baseline=0.0),
    ),),
    flags=dict(num_minibatches=2),
    special={"num_minibatches": ({}, 1)},
)  # fmt: skip
