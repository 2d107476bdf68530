"""What DAPO changes in GRPO: refilled groups, the overlong penalty, and its defaults, by hand and by enumeration."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from groups import TABLE, P, make_batch, rewards_of, stale, stepping, twice
from reference.grpo import Rule
from tabular import COMPLETIONS, gradients, probability, random_table
from tiny_runs import result

from algos import dapo
from tests.specs import SPECS
from utils.data import load_task
from utils.dist import Samples

G, L_MAX, OLD = 2, 5, TABLE + 0.7 * random_table(2)
REWARDS = [{c: float((i + p) % 3 == 0) for i, c in enumerate(COMPLETIONS)} for p in range(P)]


def batch_of(groups, old=TABLE) -> dapo.Batch:
    """One group of completions per prompt, scored by REWARDS; `old` is the table that sampled."""
    return make_batch(groups, rewards_of(groups, REWARDS), old)


run_update = stepping(dapo)


@stale
def test_updates_equal_the_reference_s(float64, case):
    """Update is grpo.py's; what its defaults are."""
    twice(dapo, Rule(), case, old=TABLE + 0.7 * random_table(2))
    args = dapo.Args()
    assert (args.aggregation, args.epsilon, args.epsilon_high, args.beta) == ("token", 0.2, 0.28, 0.0)


def test_kept_groups_scale_the_policy_gradient(float64):
    """Without std and with a constant denominator, the expected gradient over the groups that are kept is the policy
    gradient times (G - 1) / G / (1 - p^G - (1 - p)^G) / L_max, where p is the prompt's chance of a right answer."""
    for p in range(P):
        total = slope = 0.0
        chance = sum(probability(TABLE, p, c) * REWARDS[p][c] for c in COMPLETIONS)
        for c in COMPLETIONS:
            slope = slope + probability(TABLE, p, c) * REWARDS[p][c] * gradients(TABLE, p, c).sum(0)
        for group in product(COMPLETIONS, repeat=G):
            groups = [group if q == p else (COMPLETIONS[0],) * G for q in range(P)]  # of the others no gradient
            batch = batch_of(groups)
            if dapo.advantages(batch.rewards.view(P, G), "none")[p].any():
                weight = math.prod(probability(TABLE, p, c) for c in group)
                total += weight * P * run_update(batch, aggregation="constant", scale_rewards="none")[0]
        kept = 1 - chance**G - (1 - chance) ** G
        np.testing.assert_allclose(total / kept, (G - 1) / G / kept / L_MAX * slope, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "buffer, penalties",
    [
        (4, {1: 0, 15: 0, 16: 0, 17: -0.25, 18: -0.5, 19: -0.75, 20: -1, 21: -1}),
        (1, {19: 0, 20: -1}),
        (20, {1: -0.05, 10: -0.5, 20: -1}),
        (0, {1: 0, 20: 0}),
    ],
)
def test_overlong_penalty_by_hand(buffer, penalties):
    """Equation 13 at its corners, with L_max 20. A buffer of 0 turns it off."""
    lengths = torch.tensor([float(n) for n in penalties])
    assert dapo.overlong_penalty(lengths, 20, buffer).tolist() == pytest.approx(list(penalties.values()), abs=1e-6)


def fake_rounds(*rounds):
    """`more` for refill: each round a list of groups of two rewards; the completion of row i of all is (i,)."""
    calls, rows = [], 0
    parts = []
    for groups in rounds:
        n = len(groups)
        ids = torch.arange(rows, rows + 2 * n)
        rows += 2 * n
        mask = torch.ones(2 * n, 1, dtype=torch.bool)
        samples = Samples(ids[::2, None] // 2, mask[::2], ids[:, None], mask, -ids[:, None].float(), ids % 3 == 0)
        columns = {"reward/f": float(len(parts))} | ({"reward/late": 7.0} if len(parts) == len(rounds) - 1 else {})
        parts.append((samples, torch.tensor(groups).flatten(), columns))
    return lambda first: calls.append(first) or parts[len(calls) - 1], calls


@pytest.mark.parametrize(
    "rounds, kept, calls",
    [
        ([[[0.0, 1.0], [1.0, 0.0]]], [0, 1], [6]),  # nothing to refill
        ([[[0.0, 0.0], [1.0, 0.0]], [[1.0, 1.0], [0.0, 1.0]]], [1, 3], [6, 8]),
        ([[[0.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]], [1, 2], [6, 8]),  # one too many: the first are kept
        ([[[0.0, 0.0], [1.0, 1.0]], [[1.0, 1.0], [0.0, 1.0]], [[1.0, 1.0], [0.0, 0.0]]], [3, 0], [6, 8, 10]),  # missing
        ([[[0.0, 0.0], [1.0, 1.0]]] + [[[1.0, 1.0], [0.0, 0.0]]] * 2, [0, 1], [6, 8, 10]),  # none at all
        ([[[torch.nan, 1.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]], [1, 2], [6, 8]),  # one known reward has no equal
    ],
)  # fmt: skip
def test_refill_by_hand(rounds, kept, calls):
    """Two groups wanted, at most three rounds, from row 6 on: which groups are kept, and which row is next."""
    more, asked = fake_rounds(*rounds)
    args = dapo.Args(num_prompts=2, num_generations=2, max_sampling_rounds=3)
    samples, kept_rewards, columns, rewards, following = dapo.refill(more, 6, args)
    assert asked == calls and following == calls[-1] + 2
    assert samples.prompt_ids.flatten().tolist() == kept
    rows = [2 * group + i for group in kept for i in range(2)]
    assert samples.completion_ids.flatten().tolist() == rows
    assert samples.logps.flatten().tolist() == [-row for row in rows]
    assert samples.ended.tolist() == [row % 3 == 0 for row in rows]
    everything = torch.tensor(rounds).flatten()
    assert rewards.equal(everything) or rewards.isnan().any()
    assert kept_rewards.nan_to_num(9.0).tolist() == everything[rows].nan_to_num(9.0).tolist()
    assert columns == {"reward/f": (len(rounds) - 1) / 2, "reward/late": 7.0}  # means over rounds that have it


def test_groups_outside_the_band_are_replaced_and_teach_nothing(float64):
    """Rewards may be fractions. Two groups are wanted; the band's ends belong to it. One outside fills the rest."""
    args = dapo.Args(num_prompts=2, num_generations=2, max_sampling_rounds=2, keep_accuracy=(0.25, 0.75))
    more, _ = fake_rounds([[0.0, 1.0], [1.0, 0.75]], [[0.5, 0.0], [0.5, 0.5]])
    samples, kept, _, rewards, _ = dapo.refill(more, 0, args)
    assert samples.prompt_ids.flatten().tolist() == [0, 2] and kept.tolist() == [0.0, 1.0, 0.5, 0.0]
    more, _ = fake_rounds([[0.0, 0.0], [1.0, 0.75]], [[0.75, 0.75], [1.0, 1.0]])
    samples, kept, _, rewards, _ = dapo.refill(more, 0, args)
    assert samples.prompt_ids.flatten().tolist() == [2, 0]
    assert kept[:2].tolist() == [0.75, 0.75] and kept[2:].isnan().all()
    assert not rewards.isnan().any() and not dapo.advantages(kept.view(2, 2), "group").any()
    more, _ = fake_rounds([[torch.nan, torch.nan], [1.0, 0.0]], [[0.5, 0.5], [0.5, 0.5]])  # skipped: no mean at all
    assert dapo.refill(more, 0, args)[0].prompt_ids.flatten().tolist() == [1, 2]


def train(folder, **settings) -> list[dict]:
    defaults = dict(task="sort", num_prompts=4, num_generations=4, sample_batch_size=64, max_steps=3, eval_every=0,
                    eval_prompts=2, output_dir=str(folder), device="cpu")  # fmt: skip
    return dapo.train(dapo.Args(**defaults | settings))


def test_rows_are_used_once_and_a_resumed_run_goes_on_behind_them(tmp_path, monkeypatch):
    task, rows = load_task("sort"), []
    spied = task._replace(train=lambda index, seed: rows.append(index) or task.train(index, seed))
    monkeypatch.setattr(dapo, "load_task", lambda *_: spied)
    history = train(tmp_path)
    assert rows == list(range(len(rows)))
    sampled = [row["sampled"] for row in history[1:]]
    assert sum(sampled) == 4 * len(rows) and max(sampled) > 16  # a round has 16 completions
    assert all(row["frac_zero_std"] == 0.0 for row, n in zip(history[1:], sampled) if n < 64)
    following = len(rows)
    (folder,) = tmp_path.iterdir()
    rows.clear()
    resumed = train(tmp_path, resume=str(folder), max_steps=4)
    assert rows[0] == following
    ours, straight = (
        {name: value for name, value in history[-1].items() if not name.startswith("time/")}
        for history in (resumed, train(tmp_path / "straight", max_steps=4))
    )
    assert ours == straight


def test_the_penalty_is_learnt_from_but_does_not_count_elsewhere(tmp_path, monkeypatch):
    """Neither in which groups are replaced nor in the reward that is logged. Groups with equal rewards have none: their
    lengths alone teach nothing."""
    update, batches = dapo.update, []
    monkeypatch.setattr(dapo, "update", lambda model, optimizer, batch, args: batches.append(batch) or
                        update(model, optimizer, batch, args))  # fmt: skip
    (tmp_path / "rewards.py").write_text(
        "def half(completions, **kwargs):\n    return ([0.25] * 4 + [0.5, 0.25] * 2) * (len(completions) // 8)\n"
    )
    settings = dict(max_steps=1, reward=(f"{tmp_path / 'rewards.py'}:half",), max_completion_length=20,
                    max_sampling_rounds=1, temperature=3.0)  # fmt: skip
    row = train(tmp_path / "runs", overlong_buffer=20, **settings)[1]
    lengths = batches[0].samples.completion_mask.sum(1)
    assert len(set(lengths[8:].tolist())) > 1  # of the groups with equal rewards, which come last
    torch.testing.assert_close(batches[0].rewards[:8], torch.tensor([0.5, 0.25] * 4) - lengths[:8] / 20)
    assert batches[0].rewards[8:].eq(0.25).all()
    assert row["reward"] == 0.3125 and row["frac_zero_std"] == 0.5
    assert row["overlong_penalty"] == pytest.approx(-(lengths / 20).mean().item())


def test_the_logged_reward_is_of_all_that_was_sampled():
    rows = result("dapo", SPECS["dapo"].flags | {"reward": ("@rewards.py:sparse",), "max_steps": 5}).rows[1:]
    assert max(row["sampled"] for row in rows) > min(row["sampled"] for row in rows)
    assert [row["reward"] for row in rows] == pytest.approx([row["reward/sparse"] for row in rows])
