"""PSR, NSR and W-REINFORCE: algos/nsr.py."""

from tests.specs import Effect, Recipe, Spec
from tests.specs.grpo import SORT

BUGS = """
wrong-answers-count-nothing:nsr: rewards of 0 and 1 are taken as they are
- (positive * rewards - negative * (1 - rewards)).nan_to_num(0.0)
+ (positive * rewards - negative * 0 * (1 - rewards)).nan_to_num(0.0)

skipped-answers-are-wrong: NaN turns to 0 too early
- (positive * rewards - negative * (1 - rewards)).nan_to_num(0.0)
+ (positive * rewards.nan_to_num(0.0) - negative * (1 - rewards.nan_to_num(0.0)))

subset-of-right-answers: PSR's subset
- (advantage != 0) | (args.denominator == "all")
+ (advantage > 0) | (args.denominator == "all")

rows-of-the-whole-step: right while there is one minibatch
- counted[within].sum()
+ counted.sum()

rows-of-the-minibatch: what grpo.py counts
- rows = total(rows).clamp(min=1)
+ rows = total(torch.tensor(len(mask)))
"""
COUNTDOWN = dict(max_steps=40, num_prompts=16, eval_every=0, eval_samples=32)

SPEC = Spec(
    "PSR, NSR and W-REINFORCE, arXiv 2506.01347",
    tests="exact_nsr exact_grpo expected_gradients parity_verl wiring",
    curves={"nsr-sort": SORT.but(max_steps=16)},
    effects={"nsr-distinct": Effect(  # wrong answers alone leave more right texts, at equal steps
        {"nsr": ("nsr", COUNTDOWN | dict(positive_weight=0.0)),
         "psr": ("nsr", COUNTDOWN | dict(positive_weight=1.0, negative_weight=0.0)),
         "grpo": ("grpo", COUNTDOWN | dict(scale_rewards="none", aggregation="constant"))},
        "last eval/distinct", {"nsr > psr": 9, "nsr > grpo": 9},
    )},
    recipes=(Recipe(
        "Qwen/Qwen2.5-Math-7B", "RLVR-Decomposed, run_qwen2.5-math-7b_psr_nsr.sh", preset="full",
        paper=dict(num_prompts=1024, num_generations=8, num_minibatches=4, max_completion_length=3072,
                   learning_rate=1e-6, beta=0.0, aggregation="token", denominator="subset", positive_weight=0.0,
                   epsilon=0.2, temperature=1.0),
    ),),
    flags=dict(reward=("@rewards.py:sparse",)),
    special={
        "denominator": ({"positive_weight": 0.0}, "subset"), "reward": ({}, ()), "reward_weights": ({}, (0.0,)),
        "combine": [],  # scores are not 0 and 1
    },
    noise=dict(reward=("@rewards.py:coins",)),
)  # fmt: skip
