"""Learning: fresh seeds, derived from the commit, reach the recorded band; controls that must not learn do not.

benchmarks/curves.py says how the bands were recorded and what they catch. The first curve of each of the seven
best-known scripts learns in every run; another one, and the controls of all, where something that they depend on has
changed since the last green run (`pytest --learning all` trains all of them).
"""

import importlib  # noqa: I001
import statistics

import numpy as np
import pytest
import torch

from algos import dt, grpo, iql, online_dpo, ppo, sft
from benchmarks.curves import (
    CURVES, SCRIPT_OF, band, false_alarm, fresh_seeds, reached, recorded, run_once, unchanged_since,
)  # fmt: skip


def curves(*names: str):
    return pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.learns(name)) for name in names])


def module_of(name: str):
    return importlib.import_module(f"algos.{SCRIPT_OF[name]}")


@curves(*(name for name, curve in CURVES.items() if not curve.slow))
def test_fresh_seeds_reach_the_band(name, alarm, record_property):
    """The mean of two or, where that lies below, of two more (benchmarks/curves.py says why)."""
    missed = set(CURVES[name].numbers)
    record_property("false alarm", false_alarm(len(recorded(name)), alarm) * len(missed))
    for seeds in (fresh_seeds()[:2], fresh_seeds()[2:]):
        rows = [run_once(name, seed) for seed in seeds]
        for number in sorted(missed):
            mean, limits = reached(name, number, rows), band(name, number, alarm)
            print(f"{name} {number}: seeds {seeds} reach {mean:.4f}, band from {limits['lower']:.4f}; false alarm "
                  f"{false_alarm(limits['n'], alarm):.3%}; a drop of {limits['power']:.4f} is caught with 90 % "
                  "probability")  # fmt: skip
            missed -= {number} if mean >= limits["lower"] else set()
        if not missed:
            if not (CURVES[name].slow or unchanged_since(name)):
                record_property("green", rows)  # tests/conftest.py writes it down
            return
    raise AssertionError(f"{name}: {', '.join(missed)} below the band twice")


@pytest.mark.slow
@curves(*(name for name, curve in CURVES.items() if curve.slow and curve.numbers))
def test_fresh_seeds_of_long_runs_reach_the_band(name, alarm, record_property):
    test_fresh_seeds_reach_the_band(name, alarm, record_property)


def misses_all_bands(name: str, **changes) -> None:
    """A first seed or, where it gets there by chance, a second one stays below every band.

    False alarm: CartPole has the widest tail. Of 41 seeds without termination or with noise for rewards one reached
    the band (397, others up to 342; the band starts at 382); both do so in one run of 1,700. Power: runs that learn as
    recorded fall below that band in 4 % of seeds, so in 7 % with two chances."""
    rows = []
    for seed in fresh_seeds()[:2]:
        rows.append(run_once(name, seed, **changes))
        if all(rows[-1][number] < band(name, number)["lower"] for number in CURVES[name].numbers):
            return
    raise AssertionError(f"{name}: both seeds reach it: {[[row[n] for n in CURVES[name].numbers] for row in rows]}")


def with_rewards(monkeypatch, change, module=grpo) -> None:
    """Every batch's rewards become change(samples, rewards)."""
    collect = module.collect

    def changed(*args):
        samples, rewards, *rest = collect(*args)
        return samples, change(samples, rewards), *rest

    monkeypatch.setattr(module, "collect", changed)


RL = "grpo gspo cispo rloo ppo_lm online_dpo reinforce_pp nft raft topr ttrl tba"


@curves(*(f"{script}-sort" for script in RL.split()))
def test_shuffled_rewards_teach_nothing(name, monkeypatch):
    with_rewards(monkeypatch, lambda samples, rewards: rewards[torch.randperm(len(rewards))], module_of(name))
    misses_all_bands(name)


@pytest.mark.learns("grpo-sort")
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


@curves("grpo-sort", "rloo-sort")
def test_flipped_advantages_do_not_learn(name, monkeypatch):
    module = module_of(name)
    advantages = module.advantages
    monkeypatch.setattr(module, "advantages", lambda *args: -advantages(*args))
    misses_all_bands(name)


@pytest.mark.learns("online_dpo-sort")
def test_online_dpo_does_not_learn_from_flipped_rewards(monkeypatch):
    with_rewards(monkeypatch, lambda samples, rewards: -rewards, online_dpo)
    misses_all_bands("online_dpo-sort")


def test_a_reward_model_of_flipped_labels_hurts():
    """And one of right labels helps: where RLOO starts lies between the bands of both, which fresh seeds reach."""
    names = [name for name, curve in CURVES.items() if curve.label_noise is not None]
    starts = [row["reward/task"][0] for name in names for row in recorded(name)]
    helped = band("rloo-sort-learned", "mean reward/task")["lower"]
    hurt = -band("rloo-sort-flipped", "negative mean reward/task")["lower"]
    assert hurt < statistics.mean(starts) < helped


@pytest.mark.learns("sft-sort")
def test_sft_learns_nothing_from_shuffled_completions(monkeypatch):
    update = sft.update

    def changed(model, optimizer, samples, args):
        others = {name: getattr(samples, name).roll(1, 0) for name in ("completion_ids", "completion_mask", "ended")}
        return update(model, optimizer, samples._replace(**others), args)

    monkeypatch.setattr(sft, "update", changed)
    misses_all_bands("sft-sort")


def with_control_rewards(monkeypatch, module, change) -> None:
    """Every update learns from change(rewards)."""
    update = module.update
    monkeypatch.setattr(module, "update",
                        lambda agent, optimizer, batch, *rest: update(
                            agent, optimizer, batch._replace(rewards=change(batch.rewards)), *rest))  # fmt: skip


@curves("ppo-cartpole", "ppo-pendulum", "sac-pendulum", "ddpg-pendulum", "td3-pendulum")
def test_control_learns_nothing_from_shuffled_rewards(name, monkeypatch):
    """CartPole pays 1 in every step, so there the rewards are noise."""
    noise = (lambda r: torch.randn_like(r)) if name == "ppo-cartpole" else (
        lambda r: r.flatten()[torch.randperm(r.numel())].view_as(r))  # fmt: skip
    with_control_rewards(monkeypatch, module_of(name), noise)
    misses_all_bands(name)


@curves("dqn-cartpole", "c51-cartpole")
def test_flipped_rewards_teach_dqn_to_fall(name, monkeypatch):
    """Noise would be no control: the maximum over noisy values is too large, so whatever does not end looks good, and
    DQN reaches returns of 97 to 197 in CartPole from noise alone (three seeds). C51 needs atoms at the flipped returns:
    where all of them are clipped to one atom no action is worse than another."""
    with_control_rewards(monkeypatch, module_of(name), torch.neg)
    args = module_of(name).Args(**CURVES[name].settings)
    misses_all_bands(name, **({"v_min": -args.v_max, "v_max": -args.v_min} if name == "c51-cartpole" else {}))


@pytest.mark.learns("iql-hopper")
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


@pytest.mark.learns("dt-hopper-small")
def test_dt_does_not_listen_to_shuffled_returns_to_go(monkeypatch):
    """Each trajectory gets the return of another one, less what it has collected so far. The slope is then nearer to 0
    than that of any recorded seed. Where the first seed's is not, a second one is asked, as for the bands.

    False alarm: of 20 such seeds on two machines 19 lie within 0.032 of 0 and one at -0.085, beyond the 0.067 of the
    recorded seeds; at one in 20, both miss in one run of 400 (outside of the bands' budget). Power: the limit is the
    lowest of 30 seeds that listen, so one that listens as they do stays below it in one case of 31, and passes this
    test, with two chances, in 6 %."""
    returns_to_go = dt.returns_to_go

    def shuffled(rewards, starts):
        totals = np.add.reduceat(rewards.astype(np.float64), starts)
        others = np.random.default_rng(len(starts)).permutation(totals)
        return returns_to_go(rewards, starts) + np.repeat(others - totals, np.diff(starts, append=len(rewards)))

    monkeypatch.setattr(dt, "returns_to_go", shuffled)
    limit, slopes = min(row["mean eval/slope"] for row in recorded("dt-hopper-small")), []
    for seed in fresh_seeds()[:2]:
        slopes.append(run_once("dt-hopper-small", seed)["mean eval/slope"])
        if abs(slopes[-1]) < limit:
            return
    raise AssertionError(f"slopes {slopes} of two seeds are both beyond {limit}")


def test_iql_s_band_lies_above_cloning():
    """Of the same data, with the same network."""
    cloning = [row["eval/return_stochastic"] for row in recorded("bc-hopper")]
    assert band("iql-hopper", "eval/return_stochastic")["lower"] > 1.2 * max(cloning)


@pytest.mark.learns("ppo-cartpole")
def test_ppo_with_flipped_advantages_does_not_learn(monkeypatch):
    gae = ppo.gae
    monkeypatch.setattr(ppo, "gae", lambda *args: -gae(*args))
    misses_all_bands("ppo-cartpole")


@pytest.mark.learns("ppo-cartpole")
def test_ppo_that_bootstraps_through_termination_does_not_learn(monkeypatch):
    """Falling over costs nothing then: CartPole's reward is the same in every step."""
    update = ppo.update
    monkeypatch.setattr(ppo, "update",
                        lambda agent, optimizer, batch, *rest: update(
                            agent, optimizer, batch._replace(terminated=torch.zeros_like(batch.terminated)), *rest)
                        )  # fmt: skip
    misses_all_bands("ppo-cartpole")
