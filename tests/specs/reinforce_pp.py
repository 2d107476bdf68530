"""REINFORCE++: algos/reinforce_pp.py."""

import random

from tests.specs import Curve, Effect, Recipe, Spec

BUGS = """
penalty-so-far: a cumulative sum runs forward
- ((logps - ref_logps) * mask).flip(1).cumsum(1).flip(1)
+ ((logps - ref_logps) * mask).cumsum(1)

penalty-of-its-own-token: a penalty per token, added to a reward per completion
- ((logps - ref_logps) * mask).flip(1).cumsum(1).flip(1)
+ (logps - ref_logps) * mask

no-penalty-in-the-loss: the baseline variant as verl has it
- if args.baseline == "group":
-                         loss = loss
+ if args.baseline == "never":
+                         loss = loss

k3-for-k2: all estimators of a divergence look alike
- loss = loss + args.beta * k2(logps, ref_logps)
+ loss = loss + args.beta * k3(logps, ref_logps)

padding-is-whitened-too: a mean of the whole tensor
- moments(values[mask])
+ moments(values.flatten())

moments-of-one-process: each process whitens its own tokens
- mean, std = moments(values[mask])
+ mean, std = values[mask].mean(), values[mask].std()

variance-for-the-deviation: the root is lost
- return (values - mean) * (std.square() + 1e-8).rsqrt() * mask
+ return (values - mean) / (std.square() + 1e-8) * mask

completions-are-whitened: the mean over rewards, as GRPO's batch scaling has it
- return whiten(values, known) if args.whiten_advantages else values
+ return whiten(values, known & (torch.arange(known.shape[1]) == 0)) * known if args.whiten_advantages else values

groups-against-the-batch: the mean over all axes is the default of every library
- groups = groups - groups.nanmean(1, keepdim=True)
+ groups = groups - groups.nanmean()

truncated-are-in-the-mean: a second mask is made, and the first goes on being used
- advantage = advantages(batch, mask, args)
+ advantage = advantages(batch, samples.completion_mask, args)

advantages-of-the-first-rows: rows are counted within the minibatch there and within the batch here
- advantage[rows, :width], args.epsilon
+ advantage[: len(rows), :width], args.epsilon

deviation-of-known-rewards-only: a skipped reward makes all of it NaN
- (rewards - rewards.nanmean()).square().nanmean()
+ (rewards - rewards.nanmean()).square().mean()
"""
SORT = dict(task="sort", max_steps=8, eval_every=0, eval_prompts=128)


def noise(completions: list, **_) -> list[float]:
    """The control's rewards: coins."""
    return [float(random.random() < 0.5) for _ in completions]


SPEC = Spec(
    "REINFORCE++, arXiv 2501.03262",
    tests="exact_reinforce_pp exact_grpo parity_verl wiring",
    curves={"reinforce_pp-sort": Curve(
        SORT | dict(eval_prompts=256), "reward", numbers={"mean reward": "plain", "eval/greedy": "share"},
    )},
    effects={"reinforce_pp-alone": Effect(  # one completion of 512 prompts; 64 groups of 8; no whitening; coins
        {"one": ("reinforce_pp", SORT), "grpo": ("grpo", SORT),
         "plain": ("reinforce_pp", SORT | dict(whiten_advantages=False)),
         "noise": ("reinforce_pp", SORT | dict(reward=("tests.specs.reinforce_pp:noise",)))},
        "last eval/pass@1", {"one > grpo - 0.03": 9, "one > noise + 0.3": 10},
    )},
    recipes=(Recipe(
        "prompts.jsonl", "OpenRLHF examples/scripts/train_prorlv2_math_hybrid_engine.sh", preset="full",
        paper=dict(baseline="group", num_prompts=512, num_generations=16, num_minibatches=8, epsilon=0.2,
                   epsilon_high=0.27, beta=1e-4, learning_rate=1e-6, max_completion_length=8192, temperature=1.0,
                   aggregation="token", num_iterations=1),
    ),),
    special={"baseline": ({}, "group"), "num_generations": ({}, 2)},
)  # fmt: skip
