"""RLOO: algos/rloo.py."""

from tests.specs import Curve, Recipe, Spec
from tests.specs.grpo import SORT

BUGS = """
ratio-of-mean-tokens: a mean keeps the ratio of long completions near 1, but it is another policy's (OpenRLHF#515 and
#553 are about RLOO that differs from TRL's)
- ((x * valid).sum(1, keepdim=True) for x in (logps, scorer_logps[rows, :width]))
+ ((x * valid).mean(1, keepdim=True) for x in (logps, scorer_logps[rows, :width]))

divergence-rewarded:rloo: log pi - log pi_ref and its negative are both called the log-ratio (rlhf-book
apply_reward_kl with kl1 rewards drift)
- return batch.rewards - beta * ((
+ return batch.rewards + beta * ((

own-reward-in-the-baseline: the mean of the group is at hand, and differs by a factor only
- (rewards - (rewards.nansum(1, keepdim=True) - rewards) / others)
+ (rewards - rewards.nanmean(1, keepdim=True))

micro-batch-mean:rloo: the mean at hand is right while there is one micro-batch (huggingface/trl#2617)
- (loss.sum() / completions).backward()
+ loss.mean().backward()
"""

CLIPPED = dict(epsilon=0.9, num_prompts=4, num_iterations=3)  # ratios of whole answers: beyond after one step

SPEC = Spec(
    "RLOO, arXiv 2402.14740",
    tests="exact_rloo parity_trl_variants exact_grpo wiring",
    known=True,
    curves={
        "rloo-sort": SORT.but(max_steps=16),
        "rloo-sort-learned": Curve(
            dict(task="sort", max_steps=8, eval_every=0, eval_prompts=16), "reward/task",
            numbers={"mean reward/task": "plain"}, label_noise=0.0,
        ),
        "rloo-sort-flipped": Curve(
            dict(task="sort", max_steps=8, eval_every=0, eval_prompts=16), "reward/task",
            numbers={"negative mean reward/task": "plain"}, label_noise=1.0,
        ),
    },
    recipes=(Recipe(
        "--beta 0.03", "arXiv 2402.14740, appendix C (TL;DR)", preset="full",
        paper=dict(learning_rate=1e-6, lr_schedule="constant", warmup_steps=18, max_steps=600, beta=0.03,
                   num_generations=4, num_prompts=128, num_iterations=1),
    ),),
    special={"epsilon": (CLIPPED, 0.01), "epsilon_high": (CLIPPED, 0.001)},
)  # fmt: skip
