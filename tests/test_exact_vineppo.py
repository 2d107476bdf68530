"""VinePPO against enumeration: every completion of a tabular model, with every draw of the continuations of its states.

A draw goes through `state_values` and `update`, in place of what the sampler would have drawn. Expected values come
from numpy.
"""

import math
from collections import Counter
from itertools import combinations_with_replacement, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from groups import REWARDS, TABLE, P, close, expectation, make_batch, rewards_of, stale, stepping, twice
from reference.grpo import Rule
from tabular import COMPLETIONS, EOS, OUTSIDE, PROMPTS, T_MAX, TabularLM, gradients, probability

from algos import vineppo
from utils.core import UserError
from utils.dist import Samples, pad_left

pytestmark = pytest.mark.usefixtures("float64")
TOKENIZER = SimpleNamespace(batch_decode=lambda rows, **_: ["".join(map(str, ids)) for ids in rows])
STEP = 3


run_update = stepping(vineppo)


def score(rows, texts, token_lists, step) -> tuple:
    assert texts == ["".join(map(str, ids)) for ids in token_lists] and step == STEP
    return torch.tensor([REWARDS[row["p"]][tuple(ids)] for row, ids in zip(rows, token_lists)]), {}


def sampled(rest: tuple) -> tuple:
    """What the sampler draws of a continuation that its limit cut off: it goes on, for it has another limit."""
    return rest if EOS in rest else (*rest, 0, EOS)


@pytest.fixture
def values_of(monkeypatch):
    """state_values of a batch, where `drawn` holds the continuations of each state (prompt, prefix)."""
    monkeypatch.setattr(vineppo, "encode_prompt", lambda row, _: PROMPTS[row["p"]])
    task = SimpleNamespace(train=lambda i, seed: {"p": i - (STEP - 1) * P})

    def values(samples, ends, drawn, score=score, **settings) -> tuple[torch.Tensor, dict]:
        own = dict(num_prompts=P, num_generations=len(samples.ended) // P, sample_batch_size=8,
                   max_completion_length=T_MAX, num_continuations=len(next(iter(drawn.values()))))  # fmt: skip
        args = vineppo.Args(**own | settings)

        def sample_all(model, contexts, kept, given, temperature, *key):
            assert key == ("values", STEP) and given is args and temperature == args.temperature
            rows = []
            for context in contexts:
                p = next(p for p, prompt in enumerate(PROMPTS) if context[: len(prompt)] == prompt)
                prefix = tuple(context[len(PROMPTS[p]) :])
                assert len(drawn[p, prefix]) == kept
                rows += map(sampled, drawn[p, prefix])
            lists = [torch.tensor(row) for row in rows]
            ids = torch.nn.utils.rnn.pad_sequence(lists, True)
            mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
            return Samples(*pad_left(contexts, "cpu"), ids, mask, torch.zeros(ids.shape),
                           torch.tensor([EOS in row for row in rows]))  # fmt: skip

        monkeypatch.setattr(vineppo, "sample_all", sample_all)
        return vineppo.state_values(TabularLM(TABLE), TOKENIZER, task, score, samples, ends, STEP, args)

    return values


def with_values(groups, drawn, values_of, separators, **settings) -> vineppo.Batch:
    batch = make_batch(groups, rewards_of(groups, REWARDS), **settings)
    ends = vineppo.step_ends(batch.samples.completion_ids, batch.samples.completion_mask, torch.tensor(separators))
    return vineppo.Batch(*batch, ends, values_of(batch.samples, ends, drawn)[0])


def states_of(c, separators) -> list[tuple]:
    return [(), *(c[: t + 1] for t in range(len(c) - 1) if c[t] in separators)]


def draws_of(p, prefix, count):
    """Every multiset of continuations of a state, with its probability."""
    inside = {c[len(prefix) :]: probability(TABLE, p, c) for c in COMPLETIONS if c[: len(prefix)] == prefix}
    whole = sum(inside.values())
    for draw in combinations_with_replacement(inside, count):
        orders = math.factorial(count) / math.prod(math.factorial(n) for n in Counter(draw).values())
        yield draw, orders * math.prod(inside[c] / whole for c in draw)


def outcomes(p, group, count, separators):
    """Every group of completions of a prompt with every draw at the states that it passes, and the probability."""
    for completions in combinations_with_replacement(COMPLETIONS, group):
        orders = math.factorial(group) / math.prod(math.factorial(n) for n in Counter(completions).values())
        states = sorted({(p, prefix) for c in completions for prefix in states_of(c, separators)})
        for draws in product(*(draws_of(*state, count) for state in states)):
            chance = orders * math.prod(probability(TABLE, p, c) for c in completions)
            drawn = {state: draw for state, (draw, _) in zip(states, draws)}
            yield completions, drawn, chance * math.prod(weight for _, weight in draws)


@pytest.mark.parametrize(
    "group, count, separators",
    [(1, 1, [0]), (1, 2, [0]), (1, 1, [0, 2]), (1, 2, []), (2, 1, [0])],
)
def test_expected_update_is_the_policy_gradient(values_of, group, count, separators):
    """For every number of continuations, also where completions of a group share the estimate of a state."""
    total = np.zeros_like(TABLE)
    one, two = (list(outcomes(p, group, count, separators)) for p in range(P))
    close([sum(chance for *_, chance in some) for some in (one, two)], 1.0)
    for (a, drawn, chance), (b, more, other) in zip(one, reversed(two), strict=True):
        batch = with_values([a, b], drawn | more, values_of, separators)
        total += np.array([chance, other])[:, None, None] * run_update(batch, aggregation="constant")[0]
    close(total, expectation(lambda p, c: REWARDS[p][c] * gradients(TABLE, p, c).sum(0)) / 5)
    close(total[:, OUTSIDE], 0.0)


def own_advantages(p, c, drawn, separators) -> np.ndarray:
    """A of each token of a completion, (T,), from the formula."""
    states = states_of(c, separators)
    values = [np.mean([REWARDS[p][prefix + rest] for rest in drawn[p, prefix]]) for prefix in states]
    values += [REWARDS[p][c]]
    lengths = np.diff([len(prefix) for prefix in states] + [len(c)])
    return np.repeat(np.diff(values), lengths)


GROUPS, SEPARATORS = [((0, 1), (2, 1), (0, 2)), ((1,), (0, 0), (0, 1))], (0, 2)
DRAWN = {(0, ()): ((1,), (2, 0)), (0, (0,)): ((1,), (2,)), (0, (2,)): ((0,), (0,)), (1, ()): ((0, 2), (0, 2)),
         (1, (0,)): ((0,), (1,))}  # fmt: skip


def from_values(rows, s) -> list[np.ndarray]:
    """Of each token that of its step; whitened, where asked, over trained tokens of which all is known."""
    found = [own_advantages(row.p, row.c, DRAWN, SEPARATORS) + 0 * row.reward for row in rows]
    if s.whiten_advantages:
        tokens = np.concatenate([x[row.own] for row, x in zip(rows, found)])
        tokens = tokens[~np.isnan(tokens)]
        found = [(x - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8) for x in found]
    return [np.nan_to_num(x) for x in found]


@pytest.mark.parametrize("whiten", [False, True])
@stale
def test_updates_equal_the_reference_s(values_of, case, whiten):
    """The clip takes single tokens."""

    def with_values(batch, args) -> vineppo.Batch:
        ends = vineppo.step_ends(batch.samples.completion_ids, batch.samples.completion_mask, torch.tensor(SEPARATORS))
        values = values_of(batch.samples, ends, DRAWN)[0]
        values[batch.rewards.isnan()] = math.nan  # of all its steps
        return vineppo.Batch(*batch, ends, values)

    metrics = twice(vineppo, Rule(from_values), case, GROUPS, made=with_values, epsilon=0.1, epsilon_high=0.15,
                    beta=0.3, whiten_advantages=whiten, rate=4.0)  # fmt: skip
    assert 0 < metrics["clip_fraction"] < 1


def test_states_are_estimated_once(values_of):
    """Completions that pass a state share its estimate. The columns count what was sampled."""
    samples = make_batch(GROUPS, [[0.0] * 3] * P).samples
    ends = vineppo.step_ends(samples.completion_ids, samples.completion_mask, torch.tensor([0]))
    assert ends.tolist() == [[True, False], [False] * 2, [True, False], [False] * 2, [True, False], [True, False]]
    values, columns = values_of(samples, ends, {k: v for k, v in DRAWN.items() if k != (0, (2,))})

    def mean(p, prefix):
        return np.mean([REWARDS[p][prefix + rest] for rest in DRAWN[p, prefix]])

    start, other = mean(0, ()), mean(1, ())
    later, last = mean(0, (0,)), mean(1, (0,))
    close(values, [[start, later], [start, 0], [start, later], [other, 0], [other, last], [other, last]])
    tokens = 11 + sum(len(sampled(rest)) for state, rests in DRAWN.items() if state != (0, (2,)) for rest in rests)
    assert columns == {"steps": 10 / 6, "sampled": 6 + 4 * 2, "sampled_tokens": tokens}


def test_cut_off_continuations_get_the_penalty(values_of):
    """As completions do. Those without a reward are left out of the mean; where none is left, V is unknown."""
    samples = make_batch(GROUPS, [[0.0] * 3] * P).samples
    ends = torch.zeros_like(samples.completion_mask)

    def some(rows, texts, token_lists, step) -> tuple:
        rewards = [math.nan if row["p"] or ids == [1] else 1.0 for row, ids in zip(rows, token_lists)]
        return torch.tensor(rewards), {}

    drawn = {(0, ()): ((1,), (2, 0), (2, 1)), (1, ()): ((1,),) * 3}
    values, _ = values_of(samples, ends, drawn, some, missing_eos_penalty=0.5, temperature=0.7)
    close(values, [[0.75]] * 3 + [[math.nan]] * 3)


def test_steps_by_hand():
    """Ends behind separators 4 and 5; the last token ends nothing, whether EOS (1) or where the limit cut it off."""
    ids = torch.tensor([[7, 4, 8, 1, 4, 4], [7, 4, 1, 0, 0, 0], [4, 5, 5, 7, 7, 4], [4, 0, 0, 0, 0, 0]])
    mask = torch.arange(6) < torch.tensor([4, 3, 6, 1])[:, None]
    ends = vineppo.step_ends(ids, mask, torch.tensor([4, 5]))
    found = [[t for t in range(6) if row[t]] for row in ends]
    assert found == [[1], [1], [0, 1, 2], []]
    values = torch.tensor([[0.25, 0.5, 0, 0], [0.125, 0.75, 0, 0], [0.5, 0.375, 0.875, 0.25], [1.0, 0, 0, 0]])
    found = vineppo.advantages(torch.tensor([1.0, 0.0, 1.0, -2.0]), values, ends)
    kept = [row[valid].tolist() for row, valid in zip(found, mask)]
    assert kept == [[0.25, 0.25, 0.5, 0.5], [0.625, 0.625, -0.75], [-0.125, 0.5, -0.625, 0.75, 0.75, 0.75], [-3.0]]


def test_what_is_unknown_teaches_nothing():
    nan, ends = math.nan, torch.tensor([[True, True, False]] * 2)
    found = vineppo.advantages(torch.tensor([nan, 1.0]), torch.tensor([[0.5, 0.25, 1.0], [0.5, nan, 0.75]]), ends)
    close(found, [[-0.25, 0.75, nan], [nan, nan, 0.25]])


class Pieces:
    """A tokenizer of these tokens."""

    def __init__(self, *texts: str):
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def batch_decode(self, rows) -> list[str]:
        return ["".join(self.texts[i] for i in ids) for ids in rows]


def test_which_tokens_end_a_step():
    """All that hold a line's end; the embedded tokenizer has none. A string that no token holds is refused."""
    args = vineppo.Args()
    assert vineppo.separator_ids(Pieces("a", ".\n", "=", "\n\n", ","), args) == [1, 3]
    assert args.step_separator == ("\n",)
    args = vineppo.Args()
    assert vineppo.separator_ids(Pieces("a", "=", "b", ","), args) == [1, 3] and args.step_separator == ("=", ",")
    with pytest.raises(UserError, match="--step-separator 'step'"):
        vineppo.separator_ids(Pieces("a", "="), vineppo.Args(step_separator=("=", "step")))
