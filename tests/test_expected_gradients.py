"""Many rules, one table: the expected on-policy gradient of a prompt is w(p) times that of p, its chance to be right.

For 0/1 rewards and denominators that count all completions of a step, by enumeration of every group of the tabular
model. The rule is a script's own `update`, or one line here where no script has it; w(p) is written down on its own.
"""

import importlib
import math

import numpy as np
import pytest
import torch
from groups import TABLE, P, batches, close, make_batch, rewards_of
from tabular import COMPLETIONS, OUTSIDE, TabularLM, gradients, probability

pytestmark = pytest.mark.usefixtures("float64")
L_MAX = 5
BINARY = [{c: float((i + p) % 3 == 0) for i, c in enumerate(COMPLETIONS)} for p in range(P)]
CHANCE = [sum(probability(TABLE, p, c) * BINARY[p][c] for c in COMPLETIONS) for p in range(P)]


def updated(name: str, tokens: float = L_MAX, **settings):
    """A script's update of one group per prompt: P times what a plain step of rate 1 adds to the table."""
    module = importlib.import_module(f"algos.{name}")
    common = dict(max_completion_length=L_MAX, precision="float32", max_grad_norm=1e9, beta=0.0, num_minibatches=1,
                  aggregation="constant")  # fmt: skip

    def rule(groups) -> np.ndarray:
        model, size = TabularLM(TABLE), len(groups[0])
        own = {key: value for key, value in common.items() if key in module.Args.__dataclass_fields__}
        args = module.Args(**own | settings, num_generations=size, micro_batch_size=P * size)
        batch = make_batch(groups, rewards_of(groups, BINARY))
        module.update(model, torch.optim.SGD(model.parameters(), 1.0), batch, args)
        return (model.table.detach().numpy() - TABLE) * P * tokens

    return rule


def weighed(advantage):
    """A rule that no script has: 1/G sum_i advantage(R_i, p) grad log pi(y_i), p the prompt's chance."""

    def rule(groups) -> np.ndarray:
        return sum(
            advantage(BINARY[p][c], CHANCE[p]) * gradients(TABLE, p, c).sum(0) / len(group)
            for p, group in enumerate(groups)
            for c in group
        )

    return rule


def mixed(rights: int, size: int) -> bool:
    return 0 < rights < size


def halved(rights: int, size: int) -> bool:
    return 2 * rights == size


def over_groups(function):
    """w(p) where k of G answers are right: E[q (1 - q) / function(q)] / (p (1 - p)), q = k / G.

    Given k, the right answers' mean gradient of log pi is grad p / p, the wrong ones' -grad p / (1 - p), and their
    advantages are (1 - q) / function(q) and -q / function(q).
    """

    def weight(p: float, size: int) -> float:
        total = 0.0
        for k in range(1, size):
            log_chance = math.lgamma(size + 1) - math.lgamma(k + 1) - math.lgamma(size - k + 1)
            log_chance += k * math.log(p) + (size - k) * math.log(1 - p)
            total += math.exp(log_chance) * k / size * (1 - k / size) / function(k / size, size)
        return total / (p * (1 - p))

    return weight


grpo = over_groups(lambda q, size: math.sqrt(q * (1 - q) * size / (size - 1)) + 1e-4)
population = over_groups(lambda q, size: math.sqrt(q * (1 - q)))

ROWS = {  # name: rule, w(p) for groups of G; and which groups are kept, where not all are
    "RLOO": (updated("rloo", 1), lambda p, n: 1),
    "Dr. GRPO": (updated("grpo", scale_rewards="none"), lambda p, n: (n - 1) / n),
    "GRPO": (updated("grpo", scale_rewards="group"), grpo),
    "NFT": (updated("nft", omega="linear"), lambda p, n: (n - 1) / n),
    "NFT, omega sqrt": (updated("nft", omega="sqrt"), population),
    "NFT, right answers": (updated("nft", neg_weight=0.0), lambda p, n: (n - 1) / n * (1 - p)),
    "DAPO": (updated("dapo", scale_rewards="none"),
             lambda p, n: (n - 1) / n / np.mean([1 - q**n - (1 - q) ** n for q in CHANCE]), mixed),
    "RAFT": (updated("raft"), lambda p, n: 1),
    "RAFT++": (updated("raft", plusplus=True), lambda p, n: 1),
    "RAFT, best": (updated("raft", select="best"), lambda p, n: (1 - (1 - p) ** n) / p),
    "REINFORCE, -1 and 1": (updated("raft", select="all"), lambda p, n: 2),
    "Reinforce-Rej": (updated("raft", select="all", reject=True), lambda p, n: 2 - p ** (n - 1) - (1 - p) ** (n - 1)),
    "Reinforce-Rej, published": (updated("raft", reject=True), lambda p, n: 1 - p ** (n - 1)),
    "REINFORCE++, not whitened": (updated("reinforce_pp", whiten_advantages=False), lambda p, n: 1),
    "REINFORCE++, group": (updated("reinforce_pp", baseline="group", whiten_advantages=False),
                            lambda p, n: (n - 1) / n),
    "PSR": (updated("nsr", positive_weight=1.0, negative_weight=0.0), lambda p, n: 1),
    "NSR": (updated("nsr", positive_weight=0.0), lambda p, n: 1),
    "W-REINFORCE": (updated("nsr"), lambda p, n: 1.1),
    "TOPR": (updated("topr"), lambda p, n: 2),
    "TOPR, baseline": (updated("topr", baseline=0.7), lambda p, n: 2),
    "PSR, subset": (updated("nsr", L_MAX / P, num_minibatches=P, denominator="subset", positive_weight=1.0,
                            negative_weight=0.0), lambda p, n: (1 - (1 - p) ** n) / p),
    "NSR, subset": (updated("nsr", L_MAX / P, num_minibatches=P, denominator="subset", positive_weight=0.0),
                    lambda p, n: (1 - p**n) / (1 - p)),
    "Reinforce-Ada, balanced": (weighed(lambda r, p: r - p), lambda p, n: ((1 - p) ** 2 + p**2) / (2 * p * (1 - p)),
                                halved),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_expected_gradient(name):
    rule, weight, *kept = ROWS[name]
    size = 4 if kept == [halved] else 3
    total, mass = np.zeros_like(TABLE), np.zeros((P, 1, 1))
    for groups, chance in batches(size, joint=False):
        rights = [int(sum(rewards)) for rewards in rewards_of(groups, BINARY)]
        chance = chance * np.array([not kept or kept[0](k, size) for k in rights])[:, None, None]
        total, mass = total + chance * rule(groups), mass + chance
    if kept == [mixed]:  # new prompts take the place of those whose groups go
        mass[:] = mass.mean()
    for p, chance in enumerate(CHANCE):
        slope = sum(probability(TABLE, p, c) * BINARY[p][c] * gradients(TABLE, p, c).sum(0) for c in COMPLETIONS)
        close((total / mass)[p], weight(chance, size) * slope[p])
    close(total[:, OUTSIDE], 0.0)
    assert 0.1 < min(CHANCE) < max(CHANCE) < 0.9 and max(CHANCE) - min(CHANCE) > 0.05


@pytest.mark.parametrize("weight", [grpo, population])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_the_limit_of_grpo(weight, p):
    """1 / sqrt(p (1 - p)) as G grows; with groups of 4 the rarest answers weigh less than that."""
    limit = 1 / math.sqrt(p * (1 - p))
    far, near = (abs(weight(p, size) / limit - 1) for size in (200, 2000))
    assert near < far < 0.01 and near < 0.002
    assert weight(0.1, 4) < weight(0.1, 2000)
