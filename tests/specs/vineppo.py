"""VinePPO: algos/vineppo.py."""

from tests.specs import Curve, Effect, Recipe, Spec

BUGS = """
reward-behind-the-longest: the last column is that of the completion with most steps
- .scatter(1, last, rewards[:, None].to(values))
+ .scatter(1, last.max().expand_as(last), rewards[:, None].to(values))

a-state-behind-the-end: the last token ends a step, too, and V there is asked for
- return torch.isin(ids, separators) & pad(mask[:, 1:], (0, 1))
+ return torch.isin(ids, separators) & mask

an-end-that-looks-ahead: of separators in a row the last one is enough; V before it is then no expected reward
- return torch.isin(ids, separators) & pad(mask[:, 1:], (0, 1))
+ return torch.isin(ids, separators) & pad(mask[:, 1:] & ~torch.isin(ids[:, 1:], separators), (0, 1))

continuations-are-not-fresh: the stream of the completions again, whose first draws are theirs
- args.temperature, "values", step)
+ args.temperature, "train", step)

continuations-at-another-temperature: the sampler has its own default
- kept, args, args.temperature, "values", step)
+ kept, args, 1.0, "values", step)

scored-without-what-was-there: what the sampler returns looks like an answer
- [[*prefix, *ids] for (_, prefix), ids in zip(repeated, decode(drawn, tokenizer)[1])]
+ decode(drawn, tokenizer)[1]

states-of-another-prompt: the row within its group for the number of the group
- passed = [[(i // group, tuple(ids[:t])) for t in starts[i]]
+ passed = [[(i % args.num_prompts, tuple(ids[:t])) for t in starts[i]]

unknown-is-whitened: it counts in the mean and gets what 0 becomes
- whiten(advantage, mask & ~advantage.isnan())
+ whiten(advantage.nan_to_num(0.0), mask)

unknown-spoils-the-state: a mean over what is there needs nanmean
- rewards.view(-1, kept).nanmean(1)
+ rewards.view(-1, kept).mean(1)

whitened-over-all-tokens: the mask of the completions for the one that is trained
- whiten(advantage, mask & ~advantage.isnan())
+ whiten(advantage, samples.completion_mask & ~advantage.isnan())

advantages-of-the-first-minibatch: rows are counted within the minibatch there and within the batch here
- advantage[rows, :width], args.epsilon, high)
+ advantage[torch.arange(len(rows)), :width], args.epsilon, high)
"""
SHORT = dict(task="countdown", max_steps=25, num_prompts=16, num_generations=8, eval_every=0, eval_prompts=64)
VINE = SHORT | dict(num_continuations=3)

SPEC = Spec(
    "VinePPO, arXiv 2410.01679",
    small="--task countdown --num-continuations 2",
    tests="exact_vineppo exact_grpo parity_verl wiring",
    curves={"vineppo-countdown": Curve(
        dict(task="countdown", max_steps=15, num_continuations=3, eval_every=0, eval_prompts=256), "reward",
        numbers={"mean reward": "plain", "eval/pass@1": "share"},
    )},
    effects={"vineppo-credit": Effect(
        # S is never sampled: one step, V(x) as baseline. 88 * 8: as many samples as vine
        {"vine": ("vineppo", VINE), "grpo": ("grpo", SHORT),
         "one_step": ("vineppo", VINE | dict(step_separator=("S",))),
         "equal_samples": ("grpo", SHORT | dict(num_prompts=88))},
        "late reward", {"vine > grpo": 9, "vine > one_step": 9, "vine < equal_samples": 9},
    )},
    recipes=(Recipe(
        "realtreetune/rho-1b-sft-GSM8K", "polIter_rho1bSft2_vineppo_GSM8K.jsonnet of McGill-NLP/VinePPO",
        preset="full",
        paper=dict(num_prompts=64, num_generations=8, num_continuations=9, num_iterations=2, num_minibatches=8,
                   learning_rate=1e-6, epsilon=0.2, beta=1e-4, temperature=0.6, max_completion_length=1024,
                   max_steps=650, warmup_steps=20, max_grad_norm=1.0, weight_decay=0.0, aggregation="token",
                   whiten_advantages=True),
    ),),
    flags=dict(num_continuations=2),
    special={"step_separator": ({}, ("1",))},
)  # fmt: skip
