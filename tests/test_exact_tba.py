"""tba.py: its gradient and its minimum by enumeration, updates against the reference, and the buffer by hand."""

import math
from collections import Counter
from itertools import count

import numpy as np
import pytest
import torch
from groups import OTHER, REWARDS, STALE, TABLE, P, batches, close, make_batch, rewards_of, stale, stepping, twice
from helpers import SMALL, metrics, new_run
from reference.grpo import Rule
from tabular import COMPLETIONS, OUTSIDE, TabularLM, log_probs, minimised, probability, slope

from algos import rloo, tba

pytestmark = pytest.mark.usefixtures("float64")
BETA = 0.7
NAN = math.nan


def whole(table: np.ndarray, p: int, c: tuple) -> float:
    return float(log_probs(table, p, c).sum())


def make(groups, rewards, old=TABLE, ref=OTHER, **more) -> tba.Batch:
    made = make_batch(groups, rewards, old=old, ref=ref, **more)
    return tba.Batch(made.samples, made.rewards, made.ref_logps.sum(1))


run_update = stepping(tba, beta=BETA)


def balanced(rows, s) -> list[float]:
    """-beta / 2 times the slope of the squared error, log Z a constant in it; of the policy before its one step."""
    errors = [(row.start - row.ref).sum() - row.reward / s.beta for row in rows]
    groups = [[e for e, other in zip(errors, rows) if other.p == row.p] for row in rows]
    return np.nan_to_num([-s.beta * (e - np.nanmean(group)) for e, group in zip(errors, groups)])


@stale
def test_updates_equal_the_reference_s(case):
    """Without a ratio: what the sampler said is in metrics only. Micro-batches keep groups whole."""
    rule = Rule(balanced, lambda d, a, s: (np.full(len(d), a), []), lambda d, s: 0 * d, different=("kl",),
                fixed=dict(aggregation="row"))  # fmt: skip
    for sizes in dict(micro_batch_size=7), dict(micro_batch_tokens=14, micro_batch_size=8), {}:
        found = twice(tba, rule, case, made=lambda b, _: b._replace(ref_logps=b.ref_logps.sum(1)), beta=BETA, **sizes)
    hot = STALE / (0.7 if case == "temperature" else 1), OTHER / (0.7 if case == "temperature" else 1)
    close(found["kl"], np.mean([whole(hot[0], p, c) - whole(hot[1], p, c) for p in range(P) for c in COMPLETIONS]))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("beta", [0.1, BETA])
def test_expected_update_on_policy(size, beta):
    """(K - 1) / K times the gradient of E[R] - beta KL(pi || pi_ref), by central differences of the enumerated
    objective: L itself has -2 / beta times as much."""

    def objective(table):
        return sum(probability(table, p, c) * (REWARDS[p][c] - beta * (whole(table, p, c) - whole(OTHER, p, c)))
                   for p in range(P) for c in COMPLETIONS) / P  # fmt: skip

    total = np.zeros_like(TABLE)
    for groups, weight in batches(size, joint=False):
        total += weight * run_update(make(groups, rewards_of(groups, REWARDS)), beta=beta)[0]
    np.testing.assert_allclose(total, (size - 1) / size * slope(objective, TABLE), rtol=0, atol=1e-8)
    close(total[:, OUTSIDE], 0.0)


def distance(table: np.ndarray, beta: float) -> float:
    """Largest difference of a probability from pi_ref exp(R / beta) / Z."""
    gaps = []
    for p in range(P):
        target = np.array([probability(OTHER, p, c) * math.exp(REWARDS[p][c] / beta) for c in COMPLETIONS])
        gaps += [*(np.array([probability(table, p, c) for c in COMPLETIONS]) - target / target.sum())]
    return max(map(abs, gaps))


@pytest.mark.parametrize("data", [COMPLETIONS, COMPLETIONS + [(0, 2)] * 2 + [(1,)] * 5], ids=["uniform", "lopsided"])
def test_the_minimum_from_any_data_is_the_target(data):
    """All that the data must do is to hold every completion. rloo.py has another minimum on the same data."""
    groups = [data] * P
    rewards, size = rewards_of(groups, REWARDS), len(data)
    common = dict(num_generations=size, micro_batch_size=P * size, beta=BETA, precision="float32", max_grad_norm=1e9)
    found = minimised(tba.update, TabularLM(TABLE), make(groups, rewards), tba.Args(**common), 300, 0.2)
    assert distance(found, BETA) < 1e-6 < 0.1 < distance(TABLE, BETA)
    batch = make_batch(groups, rewards, ref=OTHER)
    other = minimised(rloo.update, TabularLM(TABLE), batch, rloo.Args(**common), 200, 0.2)
    assert distance(other, BETA) > 0.1


def numbered(first: int, number: int, size: int = 2) -> tba.Batch:
    """Groups whose prompt, tokens, rewards and reference say their number; prompts and completions grow with it."""
    names = range(first, first + number)
    groups = [make_group(name, size) for name in names]
    parts = [torch.cat([group.rewards for group in groups]), torch.cat([group.ref_logps for group in groups])]
    return tba.Batch(tba.join([group.samples for group in groups]), *parts)


def make_group(name: int, size: int) -> tba.Batch:
    prompt, ids = torch.full((1, 1 + name), name), torch.full((size, 2 + name), name)
    places = torch.arange(size)
    samples = tba.Samples(prompt, prompt >= 0, ids, ids >= 0, -0.1 * ids, places == 0)
    return tba.Batch(samples, name + 0.1 * places, -name - 0.1 * places)


def names_of(batch: tba.Batch, size: int = 2) -> list[int]:
    """The numbers of the groups of a batch; all of its columns must agree on them."""
    samples, names = batch.samples, batch.rewards[::size].long().tolist()
    for i, name in enumerate(names):
        rows, own = slice(i * size, (i + 1) * size), make_group(name, size)
        assert samples.prompt_ids[i][samples.prompt_mask[i]].tolist() == own.samples.prompt_ids[0].tolist()
        for found, expected in zip((*samples[2:], *batch[1:]), (*own.samples[2:], *own[1:])):
            values = found[rows] if found.dim() == 1 else found[rows][samples.completion_mask[rows]]
            close(values, expected.flatten())
    return names


def test_the_buffer_keeps_the_newest_groups_in_their_order():
    buffer = tba.store(None, numbered(0, 3), 5)
    assert names_of(buffer) == [0, 1, 2]
    buffer = tba.store(buffer, numbered(3, 2), 5)
    assert names_of(buffer) == [0, 1, 2, 3, 4]
    buffer = tba.store(buffer, numbered(5, 3), 5)
    assert names_of(buffer) == [3, 4, 5, 6, 7]
    assert names_of(tba.store(buffer, numbered(8, 6), 5)) == [9, 10, 11, 12, 13]
    assert names_of(tba.these_groups(buffer, [4, 0])) == [7, 3]


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_what_is_drawn(share):
    """Of ten groups four are new (two steps of two prompts). No group twice; a new one first with the chance of the
    share, else any one that is left, all alike."""
    buffer, drawn, steps = numbered(0, 10), Counter(), 4000
    args = tba.Args(num_prompts=2, num_generations=2, sync_every=2, on_policy_share=share, seed=5)
    assert names_of(tba.draw(buffer, 3, args)) == names_of(tba.draw(buffer, 3, args))
    for step in range(1, steps + 1):
        names = (tba.draw(buffer, step, args).rewards[::2]).long().tolist()
        assert len(set(names)) == 2
        drawn.update(names)
    # of two draws: both new; one, and one of the other nine; any two of ten
    old = [0, 2 * share * (1 - share) / 9, (1 - share) ** 2 * 2 / 10]
    new = [share**2 * 2 / 4, 2 * share * (1 - share) * (1 / 4 + 3 / 4 / 9), (1 - share) ** 2 * 2 / 10]
    for name in range(10):
        chance = sum(new if name >= 6 else old)
        assert abs(drawn[name] / steps - chance) < 4.5 * math.sqrt(chance * (1 - chance) / steps) + 1e-9
    other = tba.Args(num_prompts=2, num_generations=2, sync_every=2, on_policy_share=share, seed=6)
    several = range(1, 30)
    assert any(names_of(tba.draw(buffer, s, args)) != names_of(tba.draw(buffer, s, other)) for s in several)
    assert len({str(names_of(tba.draw(buffer, s, args))) for s in several}) > 3


def tokens_of(samples: tba.Samples, prompt: int, row: int) -> list[int]:
    ids, mask = samples.completion_ids[row], samples.completion_mask[row]
    return [*samples.prompt_ids[prompt][samples.prompt_mask[prompt]].tolist(), *ids[mask].tolist()]


@pytest.fixture(params=[1.0, 0.0], ids=["newest", "all"])
def seen(request, tmp_path, monkeypatch):
    """A run of seven steps, renewed every third: the numbers of the rows that it asked for, (step, samples) of each
    collection, the batches, the metrics, share."""
    torch.set_default_dtype(torch.float32)
    asked, collected, trained, numbers = [], [], [], count(1)
    collect, update = tba.collect, tba.update

    def noting_collect(model, tokenizer, task, score, step, args):
        watched = task._replace(train=lambda index, seed: asked.append(index) or task.train(index, seed))
        samples, rewards, columns = collect(model, tokenizer, watched, score, step, args)
        collected.append((step, samples))
        return samples, torch.arange(len(rewards)) + 1000.0 * step, columns

    def noting_update(model, optimizer, batch, args):
        trained.append((next(numbers), batch))
        return update(model, optimizer, batch, args)

    monkeypatch.setattr(tba, "collect", noting_collect)
    monkeypatch.setattr(tba, "update", noting_update)
    flags = f"--max-steps 7 --sync-every 3 --buffer-size 20 --on-policy-share {request.param} --beta 2 --eval-every 0"
    folder = new_run(tba, tmp_path, *SMALL["rloo"], *flags.split(), "--learning-rate", 1e-3)
    return asked, collected, trained, metrics(folder)[1:], request.param


def test_when_the_policy_samples_and_what_is_trained(seen):
    """Every third step for three steps; rewards and reference stay with their completions; the buffer forgets."""
    asked, collected, trained, rows, share = seen
    assert [step for step, _ in collected] == [1, 4, 7] and asked == [*range(3 * 12)]
    assert all(len(samples.prompt_ids) == 12 and len(samples.completion_ids) == 48 for _, samples in collected)
    samples_of, origins = dict(collected), []
    for step, batch in trained:
        sampled_at = (batch.rewards // 1000).long()  # the reward says when and where a completion was sampled
        origins.append(set(sampled_at.tolist()))
        for i, (when, place) in enumerate(zip(sampled_at.tolist(), (batch.rewards % 1000).long().tolist())):
            samples, group = samples_of[when], place // 4
            assert tokens_of(batch.samples, i // 4, i) == tokens_of(samples, group, place)
            if when == 1:  # the policy that sampled was the reference
                assert batch.ref_logps[i].item() == pytest.approx(samples.logps[place].sum().item(), abs=1e-4)
        assert len(batch.rewards) == 16 and len(set(batch.rewards.tolist())) == 16
        assert rows[step - 1]["reward"] == pytest.approx(batch.rewards.mean().item())
    if share:
        assert origins == [{1}, {1}, {1}, {4}, {4}, {4}, {7}]
        gaps = [row["sampler_gap"] for row in rows]
        assert max(gaps[::3]) < 1e-5 < 1e-3 < min(gaps[1], gaps[2], gaps[4], gaps[5])  # fresh in the first step only
    else:  # 20 of the last 24 groups
        assert origins[:3] == [{1}, {1}, {1}] and {1, 4} == set.union(*origins[3:6]) and origins[6] != {1}
