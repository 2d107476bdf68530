"""REINFORCE with a language model: algos/reinforce_lm.py."""

from tests.flags import NOISY_REWARD, ONLINE
from tests.specs import Effect, Spec
from tests.specs.grpo import SORT

BUGS = """
own-reward-in-the-baseline:batch: the mean of the batch is at hand, and differs by a factor only
- (rewards - (amount - rewards) / others if baseline else rewards)
+ (rewards - rewards.nanmean() if baseline else rewards)

skipped-counts-as-wrong: a reward that nobody knows is a bad one
- if baseline else rewards).nan_to_num(0.0)
+ if baseline else rewards).nan_to_num(-1.0)

baseline-times-zero: a flag is a number, but 0 times NaN is NaN, and a single answer would teach nothing
- (rewards - (amount - rewards) / others if baseline else rewards)
+ (rewards - baseline * (amount - rewards) / others)

mean-over-tokens: what a loss usually is; long answers then count less for each token
- loss = -(valid * advantage[rows] * logps).sum() / count
+ loss = -(valid * advantage[rows] * logps).sum() / mask.sum()

mean-over-the-micro-batch: right while there is one
- loss = -(valid * advantage[rows] * logps).sum() / count
+ loss = -(valid * advantage[rows] * logps).sum() / len(rows)

advantages-of-the-first-rows:reinforce_lm: right while there is one micro-batch
- (valid * advantage[rows] * logps)
+ (valid * advantage[: len(rows)] * logps)
"""
COUNTDOWN = dict(max_steps=60, learning_rate=1e-4, eval_every=0)
ONE = COUNTDOWN | dict(num_prompts=64)

SPEC = Spec(
    "REINFORCE with a language model, Machine Learning 8 (1992)",
    "Language models: rewards",
    small="--device cpu --task sort --num-prompts 16 --sample-batch-size 4 --max-steps 6 --eval-prompts 4 "
          "--eval-every 2 --save-every 2",
    tests="exact_reinforce_lm parity_verl wiring",
    curves={"reinforce_lm-sort": SORT.but(max_steps=8)},
    effects={"reinforce_lm-baseline": Effect(  # rewards are 0 or 1: without a baseline only right answers teach
        {"baseline": ("reinforce_lm", ONE), "none": ("reinforce_lm", ONE | dict(baseline=False)),
         "rloo": ("rloo", COUNTDOWN | dict(num_prompts=8, num_generations=8, beta=0.0))},
        "late reward", {"none > baseline": 9, "baseline > rloo - 0.05": 9},
    )},
    no_recipe="the paper of 1992 has no table of settings",
    flags=ONLINE | dict(num_prompts=8), noise=NOISY_REWARD,
    special={"baseline": ({}, False)},
)  # fmt: skip
