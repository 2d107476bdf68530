"""TTRL: algos/ttrl.py."""

from tests.specs import Curve, Effect, Recipe, Spec

BUGS = """
silence-is-an-answer: a counter counts None like everything else
- Counter(answer for answer in answers if answer is not None).most_common(1)
+ Counter(answers).most_common(1)

last-of-the-most-frequent: a maximum over sorted counts has its ties at the end
- (winner,) = Counter(answer for answer in answers if answer is not None).most_common(1) or
+ (winner,) = Counter(answer for answer in answers[::-1] if answer is not None).most_common(1) or

only-the-trained-vote: the slice stands one line too early
- group = answers[i : i + votes]
+ group = answers[i : i + size]

rewards-of-the-last: the votes that are not trained come first
- for answer in group[:size]]
+ for answer in group[-size:]]

samples-of-the-last: the rewards are those of the first
- (-1, votes))[:, :size].flatten(0, 1)
+ (-1, votes))[:, -size:].flatten(0, 1)

groups-of-the-wrong-size: a view of any shape with as many rows
- (-1, votes))[:, :size].flatten(0, 1)
+ (votes, -1))[:size].flatten(0, 1)

trained-on-the-truth: the true rewards are at hand, and look better
- return torch.tensor(rewards), {
+ return truth.unflatten(0, (-1, votes))[:, :size].flatten(), {

texts-vote: which is the same where an answer is all that a text says
- judged([final_answer(task, text) for text in texts], truth
+ judged(texts, truth

share-of-those-that-vote: silence is left out of the denominator, too
- sum(counts) / len(answers)
+ sum(counts) / max(1, len(answers) - answers.count(None))

as-many-as-are-trained: the votes are sampled nowhere
- samples = sample_all(model, prompts, votes, args,
+ samples = sample_all(model, prompts, args.num_generations, args,
"""
SORT = dict(task="sort", max_steps=10, eval_every=0)
RIGHT = ("grpo", dict(task="sort", max_steps=5, eval_every=0, eval_prompts=4))  # a start that is mostly right

SPEC = Spec(
    "TTRL, arXiv 2504.16084",
    small="--num-votes 4",
    tests="exact_ttrl exact_grpo parity_verl wiring",
    curves={"ttrl-sort": Curve(SORT | dict(model=RIGHT, eval_prompts=256), "reward/true", {"eval/pass@1": "share"})},
    effects={"ttrl-start": Effect(  # the start decides: most of its answers are right, or wrong (the shipped model)
        {"right": ("ttrl", SORT | dict(model=RIGHT)), "wrong": ("ttrl", SORT), "labels": ("grpo", SORT)},
        "rise eval/pass@1", {"right > 0.03": 9, "wrong < -0.1": 9, "labels > 0.3": 9},
    )},
    recipes=(Recipe(
        "aime.jsonl", "PRIME-RL/TTRL, verl/examples/ttrl/aime.sh and verl's defaults of that commit",
        preset="full",
        paper=dict(num_prompts=8, num_votes=64, num_generations=32, num_minibatches=8, max_completion_length=3072,
                   learning_rate=5e-7, lr_schedule="cosine", max_steps=240, warmup_steps=7, beta=0.001,
                   epsilon=0.2, temperature=1.0, aggregation="token", num_iterations=1),
    ),),
    special={"num_votes": ({}, 8)},
)  # fmt: skip
