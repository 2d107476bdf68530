"""NFT: algos/nft.py."""

from tests.specs import Effect, Recipe, Spec
from tests.specs.grpo import SORT
from tests.specs.gspo import STALE

BUGS = """
bound-cuts-the-gradient: a clamp does two things; here it is to do one
- bounded = implied + (implied.clamp(min=args.epsilon) - implied).detach()
+ bounded = implied.clamp(min=args.epsilon)

share-of-wrong-answers: r and 1 - r are exchanged
- implied = (1 - rate * (logps - old_logps).exp()) / (1 - rate)
+ implied = (1 - (1 - rate) * (logps - old_logps).exp()) / rate

wrong-answers-are-pushed-twice: their logarithm has a sign of its own
- args.neg_weight * (1 - right) * bounded.log())
+ -args.neg_weight * (1 - right) * bounded.log())

weight-of-all-answers: neg_weight stands before the wrong ones alone
- -omega * (right * (logps - old_logps) + args.neg_weight * (1 - right) * bounded.log())
+ -omega * args.neg_weight * (right * (logps - old_logps) + (1 - right) * bounded.log())

skipped-reward-is-wrong: NaN is silenced before the mean
- right = rewards.clamp(min=0)
+ right = rewards.nan_to_num(0.0).clamp(min=0)

share-of-the-batch: r of all prompts
- rate = right.nanmean(1, keepdim=True).expand_as(right)
+ rate = right.nanmean().expand_as(right)
"""
DR_GRPO = dict(scale_rewards="none", aggregation="constant")  # whose first gradient is NFT's

SPEC = Spec(
    "NFT, arXiv 2505.18116",
    small="--num-minibatches 2",
    tests="exact_nft exact_grpo parity_verl wiring",
    curves={"nft-sort": SORT.but(max_steps=6, learning_rate=1e-4)},
    effects={"nft-stale": Effect(  # eight epochs on each batch: a logarithm holds what GRPO needs its clip for
        {"nft": ("nft", STALE), "positives": ("nft", STALE | dict(neg_weight=0.0)),
         "grpo": ("grpo", STALE | DR_GRPO),
         "unclipped": ("grpo", STALE | DR_GRPO | dict(epsilon=1.0, epsilon_high=1e9))},
        "mean reward", {"nft > unclipped + 0.03": 9, "nft > grpo - 0.05": 9, "abs(nft - positives) < 0.05": 9},
    )},
    recipes=(Recipe(
        "Qwen/Qwen2.5-Math-7B", "NVlabs/NFT, train_7B.sh", preset="full",
        paper=dict(num_prompts=512, num_generations=16, num_minibatches=16, learning_rate=1e-6, warmup_steps=10,
                   weight_decay=0.1, max_grad_norm=1.0, beta=0.0, epsilon=1.0, neg_weight=1.0, omega="linear",
                   max_completion_length=3584, num_iterations=1),
    ),),
    flags=dict(num_minibatches=2),
    special={"num_minibatches": ({}, 1), "omega": ({}, "sqrt")},
    noise=dict(reward_weights=(0.3,)),
)  # fmt: skip
