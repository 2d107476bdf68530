"""What the enumerations of grpo.py and its children share: every group of completions of the tabular model."""

import inspect
import math
from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch
from reference.grpo import Rule
from reference.grpo import update as second_update
from tabular import COMPLETIONS, EOS, OUTSIDE, PROMPTS, TabularLM, log_probs, probability, random_table

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
    return grpo.Batch(samples, torch.tensor(np.array(rewards)).flatten(), None if ref is None else logps(ref))


def args_of(module, size: int, **settings):
    """Of a script: settings that tests of updates have, those that it does not know left out, and those given."""
    defaults = dict(num_generations=size, micro_batch_size=P * size, num_minibatches=1, max_completion_length=5,
                    precision="float32", max_grad_norm=1e9, beta=0.0)  # fmt: skip
    return module.Args(**{k: x for k, x in defaults.items() if k in module.Args.__dataclass_fields__} | settings)


def stepping(script, **own):
    """`run_update` for the tests of a script, or of another that is named. own: settings that all of its calls have."""

    def run_update(batch, module=script, rate=1.0, table=TABLE, given=None, **settings) -> tuple[np.ndarray, dict]:
        """The table's change in one call of update by plain gradient ascent, over `rate`; and its metrics. given:
        what else a script's `update` takes, by name."""
        model = TabularLM(table)
        inputs = dict(model=model, optimizer=torch.optim.SGD(model.parameters(), rate), batch=batch,
                      args=args_of(module, len(batch.rewards) // P, **own | settings))  # fmt: skip
        names = inspect.signature(module.update).parameters
        metrics = module.update(**{name: (inputs | (given or {}))[name] for name in names})
        return (model.table.detach().numpy() - table) / rate, metrics

    return run_update


STALE, NAN = TABLE + 0.3 * random_table(6), math.nan
CASES = {  # of steps on what another policy sampled; what a script does not know is left out
    "minibatches": dict(aggregation="sequence", num_iterations=2, num_minibatches=P),
    "masked": dict(aggregation="token", num_iterations=2, num_minibatches=P, mask_truncated_completions=True),
    "unknown": dict(aggregation="token", num_iterations=2, pad=EOS, unknown=[[2, 3], [0, 1, 2, 3, 4, 6]]),
    "temperature": dict(aggregation="constant", num_iterations=3, temperature=0.7, max_grad_norm=0.05,
                        unknown=[[], list(range(7))]),
}  # fmt: skip
stale = pytest.mark.parametrize("case", CASES)


def twice(module, rule: Rule, case: str, groups=EVERY, rewards=None, old=STALE, ref=OTHER, table=TABLE, rate=2.0,
          made=lambda batch, args: batch, given=None, **settings) -> dict[str, float]:  # fmt: skip
    """`update` and the reference's end at the same table with the same metrics, which are returned. The clip's bounds
    differ.

    case: of CASES. made: of a grpo.Batch and the arguments, the script's own.
    """
    known = dict(epsilon=0.1, epsilon_high=0.3) | CASES[case]
    known = {k: x for k, x in known.items() if k in module.Args.__dataclass_fields__}
    args = args_of(module, len(groups[0]), **known | settings)
    rewards = np.array(rewards_of(groups, REWARDS) if rewards is None else rewards)
    for values, places in zip(rewards, CASES[case].get("unknown", [])):
        values[[i for i in places if i < len(values)]] = NAN
    scale = getattr(args, "temperature", 1.0)
    batch = make_batch(groups, rewards, old, ref, scale, CASES[case].get("pad", 0))
    moved, metrics = stepping(module)(made(batch, args), rate=rate, table=table, given=given,
                                      **known | dict(micro_batch_size=5) | settings)  # fmt: skip
    end, expected = second_update(rule, groups, rewards, table, args, old, ref, rate)
    close(table + rate * moved, end)
    assert abs(end - table).max() > 1e-3 and not moved[:, OUTSIDE].any()
    compared = sorted(expected.keys() - set(rule.different))
    found, own = ({name: one[name] for name in compared} for one in (metrics, expected))
    assert found == pytest.approx(own, abs=1e-10), (found, own)
    return metrics


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
