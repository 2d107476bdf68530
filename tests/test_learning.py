"""Learning: fresh seeds, derived from the commit, reach the recorded band; controls that must not learn do not.

benchmarks/curves.py says how the bands were recorded and what they catch.
"""

import importlib
import statistics
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from algos import dt, grpo, iql, online_dpo, ppo, ppo_lm, rloo, sft
from benchmarks.curves import CURVES, ENOUGH, LEARNED, LONG, band, false_alarm, reached, recorded, run_once

ROOT = Path(__file__).resolve().parents[1]


def script_of(module) -> str:
    return module.__name__.removeprefix("algos.")


def fresh_seeds() -> list[int]:
    """Four seeds that no recording used and nobody chose: functions of the commit, or of the sources outside of git."""
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    source = git or "".join(path.read_text() for path in sorted((ROOT / "algos").glob("*.py")))
    first = 1000 + zlib.crc32(source.encode()) % 10**6
    return list(range(first, first + 4))


@pytest.mark.parametrize("name", [n for n in CURVES if n not in LONG])
def test_fresh_seeds_reach_the_band(name):
    """The mean of two or, where that lies below, of two more (benchmarks/curves.py says why). All such tests together
    fail in less than one run of a hundred where nothing is wrong."""
    numbers = [(n, number) for n in CURVES if n not in LONG for number in CURVES[n][3]]
    assert sum(false_alarm(len(recorded(n))) for n, _ in numbers) < 0.01
    missed = set(CURVES[name][3])
    for seeds in (fresh_seeds()[:2], fresh_seeds()[2:]):
        rows = [run_once(name, seed) for seed in seeds]
        for number in sorted(missed):
            mean, limits = reached(number, rows), band(name, number)
            print(f"{name} {number}: seeds {seeds} reach {mean:.4f}, band from {limits['lower']:.4f}; false alarm "
                  f"{false_alarm(limits['n']):.3%}; a drop of {limits['power']:.4f} is caught with 90 % "
                  "probability")  # fmt: skip
            missed -= {number} if mean >= limits["lower"] else set()
        if not missed:
            return
    raise AssertionError(f"{name}: {', '.join(missed)} below the band twice")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in LONG if CURVES[n][3]])
def test_fresh_seeds_of_long_runs_reach_the_band(name):
    if len(recorded(name)) < ENOUGH:
        pytest.skip(f"not run: {len(recorded(name))} seeds of {name} are recorded yet; of so few a band says nothing")
    test_fresh_seeds_reach_the_band(name)


def misses_all_bands(name: str) -> None:
    row = run_once(name, fresh_seeds()[0])
    for number in CURVES[name][3]:
        assert row[number] < band(name, number)["lower"], f"{number} is {row[number]}"


def with_rewards(monkeypatch, change, module=grpo) -> None:
    """Every batch's rewards become change(samples, rewards)."""
    collect = module.collect

    def changed(*args):
        samples, scored, *rest = collect(*args)
        return samples, scored._replace(rewards=change(samples, scored.rewards)), *rest

    monkeypatch.setattr(module, "collect", changed)


@pytest.mark.parametrize("module", [grpo, rloo, ppo_lm, online_dpo], ids=script_of)
def test_shuffled_rewards_teach_nothing(module, monkeypatch):
    with_rewards(monkeypatch, lambda samples, rewards: rewards[torch.randperm(len(rewards))], module)
    misses_all_bands(f"{script_of(module)}-sort")


@pytest.mark.parametrize("name", ["grpo-sort", pytest.param("grpo-countdown", marks=pytest.mark.slow)])
def test_minimising_entropy_does_not_pass_for_learning(name, monkeypatch):
    """The reward is the completion's own log-probability: pure sharpening of what the warm start does, which is mostly
    wrong. Neither its true reward nor its greedy accuracy comes near the band."""
    true = []

    def sharpen(samples, rewards):
        true.append(rewards.mean().item())
        return (samples.logps * samples.completion_mask).sum(1)

    with_rewards(monkeypatch, sharpen)
    row = run_once(name, fresh_seeds()[0])
    assert statistics.mean(true) < band(name, "mean reward")["lower"] / 2
    assert row["eval/greedy"] < band(name, "eval/greedy")["lower"] / 2


@pytest.mark.parametrize("module", [grpo, rloo], ids=script_of)
def test_flipped_advantages_do_not_learn(module, monkeypatch):
    advantages = module.advantages
    monkeypatch.setattr(module, "advantages", lambda *args: -advantages(*args))
    misses_all_bands(f"{script_of(module)}-sort")


def test_online_dpo_does_not_learn_from_flipped_rewards(monkeypatch):
    with_rewards(monkeypatch, lambda samples, rewards: -rewards, online_dpo)
    misses_all_bands("online_dpo-sort")


def test_a_reward_model_of_flipped_labels_hurts():
    """And one of right labels helps: where RLOO starts lies between the bands of both, which fresh seeds reach."""
    starts = [row["reward/task"][0] for name in LEARNED for row in recorded(name)]
    helped = band("rloo-sort-learned", "mean reward/task")["lower"]
    hurt = -band("rloo-sort-flipped", "negative mean reward/task")["lower"]
    assert hurt < statistics.mean(starts) < helped


def test_sft_learns_nothing_from_shuffled_completions(monkeypatch):
    update = sft.update

    def changed(model, optimizer, batch, args):
        completions = [completion for _, completion in batch]
        return update(model, optimizer, [(p, c) for (p, _), c in zip(batch, completions[1:] + completions[:1])], args)

    monkeypatch.setattr(sft, "update", changed)
    misses_all_bands("sft-sort")


def with_control_rewards(monkeypatch, module, change) -> None:
    """Every update learns from change(rewards)."""
    update = module.update
    monkeypatch.setattr(module, "update",
                        lambda agent, optimizer, batch, *rest: update(
                            agent, optimizer, batch._replace(rewards=change(batch.rewards)), *rest))  # fmt: skip


@pytest.mark.parametrize("name", ["ppo-cartpole", "ppo-pendulum", "sac-pendulum"])
def test_control_learns_nothing_from_shuffled_rewards(name, monkeypatch):
    """CartPole pays 1 in every step, so there the rewards are noise."""
    noise = (lambda r: torch.randn_like(r)) if name == "ppo-cartpole" else (
        lambda r: r.flatten()[torch.randperm(r.numel())].view_as(r))  # fmt: skip
    with_control_rewards(monkeypatch, importlib.import_module(f"algos.{CURVES[name][0]}"), noise)
    misses_all_bands(name)


def test_iql_gains_nothing_over_cloning_from_shuffled_rewards(monkeypatch):
    """Shuffled over all steps, and centred: Hopper pays for every step that it stands, so shuffled rewards that keep
    their mean still say not to fall, and IQL learns from them as from the true ones."""
    load = iql.load_dataset

    def shuffled(args):
        data = load(args)
        np.random.default_rng(args.seed).shuffle(data.rewards)
        data.rewards -= data.rewards.mean()
        return data

    monkeypatch.setattr(iql, "load_dataset", shuffled)
    gained = run_once("iql-hopper", fresh_seeds()[0])["eval/return_stochastic"]
    assert gained < max(row["eval/return_stochastic"] for row in recorded("bc-hopper"))


def test_dt_does_not_listen_to_shuffled_returns_to_go(monkeypatch):
    """Each trajectory gets the return of another one, less what it has collected so far. The slope is then nearer to 0
    than that of any recorded seed."""
    returns_to_go = dt.returns_to_go

    def shuffled(rewards, starts):
        totals = np.add.reduceat(rewards.astype(np.float64), starts)
        others = np.random.default_rng(len(starts)).permutation(totals)
        return returns_to_go(rewards, starts) + np.repeat(others - totals, np.diff(starts, append=len(rewards)))

    monkeypatch.setattr(dt, "returns_to_go", shuffled)
    slope = run_once("dt-hopper", fresh_seeds()[0])["mean eval/slope"]
    assert abs(slope) < min(row["mean eval/slope"] for row in recorded("dt-hopper"))


def test_iql_s_band_lies_above_cloning():
    """Of the same data, with the same network."""
    cloning = [row["eval/return_stochastic"] for row in recorded("bc-hopper")]
    assert band("iql-hopper", "eval/return_stochastic")["lower"] > 1.2 * max(cloning)


def test_ppo_with_flipped_advantages_does_not_learn(monkeypatch):
    gae = ppo.gae
    monkeypatch.setattr(ppo, "gae", lambda *args: -gae(*args))
    misses_all_bands("ppo-cartpole")


def test_ppo_that_bootstraps_through_termination_does_not_learn(monkeypatch):
    """Falling over costs nothing then: CartPole's reward is the same in every step."""
    update = ppo.update
    monkeypatch.setattr(ppo, "update",
                        lambda agent, optimizer, batch, *rest: update(
                            agent, optimizer, batch._replace(terminated=torch.zeros_like(batch.terminated)), *rest)
                        )  # fmt: skip
    misses_all_bands("ppo-cartpole")
