"""What the enumerations of grpo.py and its children share: every group of completions of the tabular model."""

import math
from itertools import combinations_with_replacement

import numpy as np
import torch
from tabular import COMPLETIONS, EOS, PROMPTS, TabularLM, log_probs, probability, random_table

from algos import grpo
from utils.lm import Samples, pad_left

P = len(PROMPTS)
TABLE, OTHER = random_table(0), random_table(1)
REWARDS = [dict(zip(COMPLETIONS, row)) for row in np.random.default_rng(2).normal(size=(P, len(COMPLETIONS)))]
GROUPS = [((1,), (0, 2), (2, 1)), ((0, 1), (2, 0), (1,))]
EVERY = [COMPLETIONS, COMPLETIONS[::-1]]  # RIGHT: rewards of them
RIGHT = [[float(i % 3 == 0) for i in range(len(COMPLETIONS))], [float(i < 5) for i in range(len(COMPLETIONS))]]


def rewards_of(groups, table) -> list[list[float]]:
    return [[table[p][c] for c in group] for p, group in enumerate(groups)]


def make_batch(groups, rewards, old=TABLE, ref=None, temperature=1.0, pad=0) -> grpo.Batch:
    """One group of completions per prompt, as update takes it; `old` and `ref` are tables of logits."""
    rows = [(p, c) for p, group in enumerate(groups) for c in group]
    width = max(len(c) for _, c in rows)

    def padded(values, fill):
        return torch.tensor(np.array([[*v, *[fill] * (width - len(v))] for v in values]))

    def logps(table):
        return padded([log_probs(table / temperature, p, c) for p, c in rows], 0.0)

    samples = Samples(*pad_left(PROMPTS, "cpu"), padded([c for _, c in rows], pad),
                      padded([[True] * len(c) for _, c in rows], False), logps(old),
                      torch.tensor([EOS in c for _, c in rows]))  # fmt: skip
    return grpo.Batch(samples, torch.tensor(rewards).flatten(), None if ref is None else logps(ref))


def stepping(script, **own):
    """`run_update` for the tests of a script, or of another that is named. own: settings that all of its calls have."""

    def run_update(batch, module=script, rate=1.0, table=TABLE, **settings) -> tuple[np.ndarray, dict]:
        """The table's change in one call of update by plain gradient ascent, over `rate`; and its metrics."""
        model = TabularLM(table)
        defaults = dict(num_generations=len(batch.rewards) // P, micro_batch_size=len(batch.rewards), num_minibatches=1,
                        max_completion_length=5, precision="float32", max_grad_norm=1e9, beta=0.0)  # fmt: skip
        known = {name: x for name, x in defaults.items() if name in module.Args.__dataclass_fields__}
        args = module.Args(**known | own | settings)
        metrics = module.update(model, torch.optim.SGD(model.parameters(), rate), batch, args)
        return (model.table.detach().numpy() - table) / rate, metrics

    return run_update


def batches(group_size: int, joint: bool, table=TABLE):
    """Yields every batch of one group per prompt (as multisets, with multinomial weights) and its probability.

    Where groups do not interact, `joint=False` pairs the k-th group of one prompt with another of the other, and the
    weight (P, 1, 1) holds each group's own probability for that prompt's part of the table.
    """

    def groups(p):
        for group in combinations_with_replacement(COMPLETIONS, group_size):
            orders = math.factorial(group_size) / math.prod(math.factorial(group.count(c)) for c in set(group))
            yield group, orders * math.prod(probability(table, p, c) for c in group)

    first, second = list(groups(0)), list(groups(1))
    pairs = [(a, b) for a in first for b in second] if joint else zip(first, reversed(second))
    for (a, weight_a), (b, weight_b) in pairs:
        weight = [weight_a * weight_b] * 2 if joint else [weight_a, weight_b]
        yield (a, b), np.array(weight)[:, None, None]


def expectation(function, table=TABLE) -> np.ndarray:
    """Mean over prompts of E[function(prompt, completion)]."""
    return sum(probability(table, p, c) * function(p, c) for p in range(P) for c in COMPLETIONS) / P


def close(actual, expected) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10)
