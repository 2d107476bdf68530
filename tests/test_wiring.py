"""Lines that a script needs and whose loss no curve shows, in whole runs of every script that has them."""

import contextlib
import importlib
import inspect
import json
import math
from statistics import mean, pstdev, stdev
from typing import get_args
from unittest import mock

import numpy as np
import pytest
import torch
from every_script import NAMES, options, sharing
from helpers import GENERATORS, ONLINE, assert_same_result, checkpoint, copied_at, weights
from safetensors.torch import load_file
from tiny_runs import TOLD, paired, result, rows_asked_for, same, train, world
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoTokenizer

import utils.lm
from tests.specs import SPECS
from utils.core import Run
from utils.dist import Samples, stream
from utils.lm import TINY_MODEL, load_model, sample
from utils.rewards import decode

LANGUAGE = [algo for algo in NAMES if "lora_rank" in options(algo)]
MODULES = {algo: importlib.import_module(f"algos.{algo}") for algo in NAMES}
WITH_ENVIRONMENTS = [algo for algo in NAMES if hasattr(MODULES[algo], "step_vector")]


@pytest.mark.parametrize("algo", LANGUAGE)
def test_dropout_of_the_model_is_off(algo):
    """A model with dropout trains as one without it that has the same weights."""
    with_dropout = result(algo, SPECS[algo].flags | {"model": "@dropout"})
    assert same(with_dropout, result(algo, SPECS[algo].flags))


@pytest.mark.parametrize("algo", [*LANGUAGE, *GENERATORS])
def test_a_resumed_run_equals_the_uninterrupted_one(algo, tmp_path):
    """From the middle, where all state is far from where it began; also where rewards, environments and models of the
    user draw from the global generators."""
    assert SPECS[algo].noise, f"tests/specs/{algo}.py: give Spec(noise=...)"
    settings = SPECS[algo].flags | SPECS[algo].noise | {"save_every": 1, "max_steps": 5}
    settings |= {"label_noise": 0.25, "ensemble": 2, "sync_every": 2, "on_policy_share": 0.5}
    with copied_at(3, tmp_path / "stopped"):
        train(algo, settings, tmp_path / "runs")
    (whole,) = (tmp_path / "runs").iterdir()
    states = [str([checkpoint(path)["rng"][0][1], checkpoint(path)["rng"][2].tolist()])
              for path in (tmp_path / "stopped", whole)]  # fmt: skip
    assert states[0] != states[1], f"tests/specs/{algo}.py: noise must draw from a global generator after step 3"
    train(algo, settings | {"resume": str(tmp_path / "stopped")}, tmp_path / "runs")
    assert_same_result(tmp_path / "stopped", whole)


@pytest.mark.parametrize("algo", [algo for algo in NAMES if "max_grad_norm" in options(algo)])
def test_no_step_takes_a_longer_gradient(algo):
    """What the optimizer finds is at most --max-grad-norm long."""
    norms = []

    def measure(optimizer, *_):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    with register_optimizer_step_pre_hook(measure):
        result(algo, SPECS[algo].flags | {"max_grad_norm": 0.001})
    assert norms and max(norms) == pytest.approx(0.001, rel=1e-2)


@pytest.mark.parametrize("algo", [algo for algo in LANGUAGE if "lr_schedule" in options(algo)])
def test_every_optimizer_follows_the_schedule(algo, tmp_path):
    """And every group of parameters."""
    rates = {}

    def note(optimizer, *_):
        for number, group in enumerate(optimizer.param_groups):
            rates.setdefault((id(optimizer), number), []).append(group["lr"])

    settings = SPECS[algo].flags | {"lr_schedule": "linear", "warmup_steps": 0, "max_steps": 4}
    with register_optimizer_step_pre_hook(note):
        train(algo, settings, tmp_path)
    for found in rates.values():
        shares = torch.tensor(found) / found[0]
        torch.testing.assert_close(shares.view(4, -1)[:, 0], torch.tensor([1, 0.75, 0.5, 0.25]))


RATES = {  # a flag -> the share of the rate that update k of n has, from 0 on
    "anneal_lr": lambda k, n: 1 - k / n,
    "anneal_actor": lambda k, n: (1 + math.cos(math.pi * k / n)) / 2,
    "rtg_scale": lambda k, n: min((k + 1) / 3, 1),  # --warmup-steps 3
}


@pytest.mark.parametrize("algo, flag", [(algo, flag) for flag in RATES for algo in NAMES if flag in options(algo)])
def test_the_rate_follows_the_run(algo, flag, tmp_path, monkeypatch):
    """Of the policy alone, where it has an optimizer of its own; online and without the flag it is constant. Adam of
    ppo.py and its children has baselines' epsilon. Rows tell the rate."""
    module, groups = importlib.import_module(f"algos.{algo}"), []

    def noted(agent, optimizers, *rest, function=module.update):
        several = optimizers if isinstance(optimizers, tuple) else [optimizers]
        groups.append([{**optimizer.param_groups[0]} for optimizer in several])
        return function(agent, optimizers, *rest)

    monkeypatch.setattr(module, "update", noted)
    settings = {"learning_rate": 0.01, "warmup_steps": 3, "max_steps": 5, "online_steps": 2, "num_steps": 4}
    settings |= {"total_timesteps": 97, "num_envs": 2}
    for shares in [RATES[flag]] + [lambda k, n: 1] * flag.startswith("anneal"):
        groups.clear()
        more = {flag: shares is RATES[flag]} if flag.startswith("anneal") else {}
        history, args, _ = train(algo, SPECS[algo].flags | settings | more, tmp_path)
        online = args.get("online_steps", 0)
        n = len(groups) - online
        wanted = [0.01 * shares(k, n) for k in range(n)] + [0.01] * online
        assert [first["lr"] for first, *_ in groups] == pytest.approx(wanted) and n >= 5
        assert {group["lr"] for _, *others in groups for group in others} <= {0.01}
        assert flag != "anneal_lr" or {first["eps"] for first, *_ in groups} == {1e-5}
        told = [row["learning_rate"] for row in history if "learning_rate" in row]
        assert told == ([first["lr"] for first, *_ in groups] if told else [])


@pytest.mark.parametrize("algo, name", [(algo, name) for name in ("exploration", "weight_at", "ema_decay")
                                        for algo in NAMES if hasattr(MODULES[algo], name)])  # fmt: skip
def test_schedules_are_handed_the_step(algo, name, tmp_path, monkeypatch):
    """Of the environment, or the number of updates before: from 0 on. gkd.py counts its steps from 1 on."""
    module, steps = importlib.import_module(f"algos.{algo}"), []
    schedule = getattr(module, name)
    monkeypatch.setattr(module, name, lambda step, *rest: steps.append(step) or schedule(step, *rest))
    _, args, _ = train(algo, SPECS[algo].flags | {"num_envs": 2, "max_steps": 4}, tmp_path)
    total, each = (args["total_timesteps"], 2) if name == "exploration" else (4, 1)
    assert steps == [*range(algo == "gkd", total + (algo == "gkd"), each)]


@pytest.mark.parametrize("algo", ONLINE)
def test_rewards_are_told_the_step(algo, tmp_path):
    """In training and, where the task scores nothing, in the evaluation behind it."""
    TOLD.clear()
    settings = {"task": "@rows.jsonl", "reward": ("tiny_runs:told",), "max_steps": 3, "eval_every": 2}
    train(algo, SPECS[algo].flags | settings | {"reward_weight": 1.0}, tmp_path)  # without which gkd.py asks nobody
    steps = [step for step, _ in TOLD]
    assert steps == sorted(steps)
    calls = [steps.count(step) for step in range(4)]
    assert calls[0] == 2 + 2 * (algo == "gkd")  # whose teacher is evaluated, too
    assert algo == "dapo" or calls[1:] == [calls[1], calls[1] + 2, calls[1] + 2]  # dapo asks until groups differ


@pytest.mark.parametrize("algo", [algo for algo in ONLINE if algo not in ("dapo", "grpo_multiturn")])
def test_a_row_tells_of_what_was_sampled(algo, tmp_path, monkeypatch):
    """Reward, its deviation, equal groups, length and cut completions, from what the sampler and the reward gave: none
    for the first prompt. dapo.py tells of the groups that it keeps, grpo_multiturn.py of turns."""
    module, batches = importlib.import_module(f"algos.{algo}"), []

    def noted(*inputs, function=module.sample_all):
        batches.append(function(*inputs))
        return batches[-1]

    monkeypatch.setattr(module, "sample_all", noted)
    TOLD.clear()
    settings = {"reward": ("tiny_runs:told",), "max_steps": 3, "num_prompts": 4, "reward_weight": 1.0, "num_votes": 4}
    history, args, _ = train(algo, SPECS[algo].flags | settings, tmp_path)
    per_step = len(batches) // 3
    for row in history[1:]:
        samples = batches[per_step * (row["step"] - 1)]
        assert row["length"] == pytest.approx(samples.completion_mask.sum(1).float().mean().item())
        assert row["truncated"] == pytest.approx(1 - samples.ended.float().mean().item())
        answer = next(answer for step, answer in TOLD if step == row["step"])
        groups = torch.tensor([math.nan if x is None else x for x in answer]).view(-1, args.get("num_generations", 4))
        if algo == "ttrl":  # its rewards are votes
            continue
        assert row["reward"] == pytest.approx(groups.nanmean().item())
        known = [[x for x in group if not math.isnan(x)] for group in groups.tolist()]
        of_batch = dict.fromkeys(("ppo_lm", "vineppo", "reinforce_lm"), stdev) | {"reinforce_pp": pstdev}
        found = of_batch[algo](sum(known, [])) if algo in of_batch else mean(map(pstdev, filter(None, known)))
        wanted = {"reward_std": found, "frac_zero_std": mean(len({*group}) <= 1 for group in known)}
        wanted = {name: value for name, value in wanted.items() if f'"{name}":' in inspect.getsource(module)}
        assert {name: row.get(name) for name in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize("algo", [algo for algo in ONLINE if algo != "dapo"])  # which draws on until groups differ
def test_every_step_has_the_next_prompts(algo, tmp_path, monkeypatch):
    rows = rows_asked_for(importlib.import_module(f"algos.{algo}"), monkeypatch)
    # gkd's teacher asks for rows, too; tba.py would take those of two steps at once
    alone = {"teacher_beta": 0.0, "teacher_beta_end": 0.0, "reward_weight": 1.0, "sync_every": 1}
    train(algo, SPECS[algo].flags | {"num_prompts": 4, "max_steps": 3} | alone, tmp_path)
    times = 2 if algo == "vineppo" else 1  # whose states begin with the same prompts
    assert rows == [i for step in range(3) for i in [*range(4 * step, 4 * step + 4)] * times]


@pytest.mark.parametrize("algo", ONLINE)
def test_sampling_is_split(algo, tmp_path, monkeypatch):
    """Into batches of --sample-batch-size completions."""
    sizes = []
    spy = lambda *inputs: sizes.append(len(inputs[1]) * inputs[3]) or sample(*inputs)  # noqa: E731
    monkeypatch.setattr(utils.lm, "sample", spy)
    settings = {"max_steps": 1, "num_prompts": 8, "num_generations": 2, "sample_batch_size": 4, "eval_samples": 2}
    train(algo, SPECS[algo].flags | settings, tmp_path)
    assert max(sizes) <= 4 and len(sizes) > 1


@pytest.mark.parametrize("algo", [algo for algo in ONLINE if algo not in ("ttrl", "grpo_multiturn")])
def test_an_update_has_what_belongs_together(algo, tmp_path, monkeypatch):
    """Prompts, completions, their rewards, and the reference's log-probabilities: at first it is the policy. So have
    the samples that are kept."""
    module, tokenizer, batches = importlib.import_module(f"algos.{algo}"), AutoTokenizer.from_pretrained(TINY_MODEL), []

    def noted(*inputs, function=module.update):
        batches.append(next(part for part in inputs if isinstance(part, module.Batch)))
        return function(*inputs)

    monkeypatch.setattr(module, "update", noted)
    gaps, settings = [], {"reward": ("tiny_runs:paired",), "num_prompts": 4, "max_steps": 3, "overlong_buffer": 0}
    monkeypatch.setattr(module, "alarm", lambda gap, *_: gaps.append(gap), raising=False)
    settings |= {"reward_weight": 1.0, "missing_eos_penalty": 0.5, "log_samples": 3}
    cost = 0.5 * ("missing_eos_penalty" in options(algo))
    train(algo, SPECS[algo].flags | settings, tmp_path)
    for batch in batches:
        samples, each = batch.samples, len(batch.rewards) // len(batch.samples.prompt_ids)
        prompts = [tokenizer.decode(ids[mask]) for ids, mask in zip(samples.prompt_ids, samples.prompt_mask)]
        rewards = paired([prompt for prompt in prompts for _ in range(each)], decode(samples, tokenizer)[0])
        assert batch.rewards.tolist() == [r - cost * (not end) for r, end in zip(rewards, samples.ended.tolist())]
    assert {*batches[0].samples.ended.tolist()} == {True, False}
    (path,) = tmp_path.glob("*/samples.jsonl")
    for row in filter(lambda row: "score" not in row, map(json.loads, path.read_text().splitlines())):
        (reward,) = paired([row["prompt"]], [row["completion"]])
        assert row["reward"] in (reward, reward - cost) and row.get("reward/paired", reward) == reward
    assert None not in gaps and (len(gaps) == 3 or algo == "tba"), "asked before the update, the alarm is silent"
    if (reference := getattr(batches[0], "ref_logps", None)) is not None:
        logps = batches[0].samples.logps
        torch.testing.assert_close(reference, logps if reference.ndim == 2 else logps.sum(1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("algo", ["dpo", "simpo", "orpo", "kto", "sft"])
def test_every_row_is_trained_once_an_epoch(algo, tmp_path, monkeypatch):
    """With its own answers and label; in another order in the next epoch."""
    module, tokenizer, seen = importlib.import_module(f"algos.{algo}"), AutoTokenizer.from_pretrained(TINY_MODEL), []

    def noted(model, optimizer, batch, args, function=module.update):
        samples = getattr(batch, "samples", batch)
        texts, each = decode(samples, tokenizer)[0], len(samples.completion_ids) // len(samples.prompt_ids)
        labels = getattr(batch, "labels", torch.tensor([True, False] if each == 2 else [True]).repeat(len(texts)))
        for i, text in enumerate(texts):
            prompt = tokenizer.decode(samples.prompt_ids[i // each][samples.prompt_mask[i // each]])
            assert int(text) == int(prompt[1:-1]) + (not labels[i])
            seen.append(f"{prompt}{text}")
        return function(model, optimizer, batch, args)

    monkeypatch.setattr(module, "update", noted)
    task = {"task": ("@rows.jsonl",), "batch_size": 8} if algo == "sft" else {"task": "@margins.jsonl", "batch_size": 4}
    train(algo, SPECS[algo].flags | task | {"max_steps": 20 if algo == "kto" else 10, "max_length": 64}, tmp_path)
    rows = 19 if algo == "sft" else 38
    first, second = seen[:rows], seen[rows : 2 * rows]
    assert len(set(first)) == rows and {*first} == {*second} and first != second


@pytest.mark.parametrize("algo", [algo for algo in LANGUAGE if algo not in ("dapo", "tba", "reward_model")])
def test_a_process_has_its_share_of_a_step(algo, tmp_path, monkeypatch):
    """The second one of two: every second row, and of kto.py the completion of the row before in the whole step."""
    module, tokenizer, steps = importlib.import_module(f"algos.{algo}"), AutoTokenizer.from_pretrained(TINY_MODEL), []
    parts = 2 if algo == "kto" else 1

    def noted(*inputs, function=module.update):
        batch = next(part for part in inputs if isinstance(part, tuple))
        found = [batch] if isinstance(batch, Samples) else [part for part in batch if isinstance(part, Samples)]
        steps.append([])
        for samples in found:
            texts = [tokenizer.decode(ids[mask]) for ids, mask in zip(samples.prompt_ids, samples.prompt_mask)]
            if "num_prompts" not in options(algo):  # else the model answers
                answers, each = decode(samples, tokenizer)[0], len(samples.completion_ids) // len(texts)
                texts = [f"{text}{answers[each * i : each * (i + 1)]}" for i, text in enumerate(texts)]
            steps[-1].append(texts)
        return function(*inputs)

    monkeypatch.setattr(module, "update", noted)
    settings = SPECS[algo].flags | {"max_steps": 1, "num_prompts": 8, "batch_size": 8, "student_share": 1.0}
    for own in lambda items: items, lambda items: items[1::2]:
        monkeypatch.setattr(module, "share", own)
        train(algo, settings, tmp_path)
    whole, second = steps[0], steps[-1]
    assert len(whole) == parts and [texts[1::2] for texts in whole] == second


@pytest.mark.parametrize("algo", [algo for algo in LANGUAGE if algo != "reinforce_lm"])  # its baseline sums, too
def test_denominators_are_those_of_all_processes(algo, tmp_path, monkeypatch):
    """Where another process has as much, a batch has half of its gradient, however the loss is aggregated."""
    settings = SPECS[algo].flags | {"max_steps": 1, "num_iterations": 1, "num_minibatches": 1, "max_sampling_rounds": 1}
    module = importlib.import_module(f"algos.{algo}")
    for kind in get_args(module.Args.__annotations__.get("aggregation")) or [""]:
        norms = []
        for times in 1, 2:
            monkeypatch.setattr(module, "total", lambda sums, *_, times=times: times * sums)
            norms.append(train(algo, settings | {"aggregation": kind}, tmp_path)[0][-1]["grad_norm"])
        assert norms[0] == pytest.approx(2 * norms[1], rel=1e-4) != 0


@pytest.mark.parametrize("algo", [algo for algo in LANGUAGE if "num_minibatches" in options(algo)])
def test_a_row_is_in_one_minibatch(algo, tmp_path, monkeypatch):
    module, seen = importlib.import_module(f"algos.{algo}"), []

    def noted(*inputs, function=module.micro_batches):
        for rows, arguments in function(*inputs):
            seen[-1] += rows.tolist()
            yield rows, arguments

    monkeypatch.setattr(module, "micro_batches", noted)
    for parts in 1, 2:
        seen.append([])
        train(algo, SPECS[algo].flags | {"max_steps": 1, "num_minibatches": parts, "num_iterations": 1}, tmp_path)
    assert sorted(seen[0]) == sorted(seen[1]) and len(seen[0]) >= 8


@pytest.mark.parametrize("algo", ONLINE)
def test_each_batch_is_sampled_with_numbers_of_its_own(algo, tmp_path, monkeypatch):
    """The seed's, but for evaluations, which all draw alike. dapo.py draws again for groups of equal rewards."""
    keys, seeds = [], []

    def noted(device, *key):
        generator = stream(device, *key)
        keys.append(key)
        seeds.append((generator.initial_seed(), "evaluation" in key))
        return generator

    for owner in utils.lm, importlib.import_module(f"algos.{algo}"):
        monkeypatch.setattr(owner, "stream", noted, raising=False)
    more = {"max_steps": 3, "num_prompts": 4, "num_generations": 2, "sample_batch_size": 4, "seed": 5}
    more |= {"reward": ("tiny_runs:paired",), "reward_weight": 1.0}
    train(algo, SPECS[algo].flags | more, tmp_path)
    training = [seed for seed, evaluation in seeds if not evaluation]
    assert len(training) >= 2 and len(set(training)) == len(training) and len(set(seeds)) < len(seeds)
    assert {key[0] for key in keys} == {5}


@pytest.mark.parametrize("algo", ONLINE)
def test_the_update_scores_as_the_sampler_did(algo):
    """At the temperature of the settings, which is not 1."""
    rows = result(algo, SPECS[algo].flags).rows[1:]
    assert rows and max(row["sampler_gap"] for row in rows) < 1e-5


@pytest.mark.parametrize("algo", [algo for root in ("grpo", "dpo") for algo in sharing(root, "reference_logps")
                                  if algo != "prorl"])  # fmt: skip
def test_without_its_adapters_the_policy_is_the_reference(algo, tmp_path, monkeypatch):
    """Under --lora-rank, which prorl.py refuses. The frozen model is loaded here for comparison."""
    pytest.importorskip("peft", reason="not run: peft is not installed")
    module, apart = importlib.import_module(f"algos.{algo}"), []

    def compared(model, reference, samples, args, function=module.reference_logps):
        if reference is not None:  # gspo.py scores the policy so
            return function(model, reference, samples, args)
        found, scores = (function(model, x, samples, args) for x in (None, load_model(args, frozen=True)[0]))
        torch.testing.assert_close(found, scores)
        with mock.patch.object(type(model), "disable_adapter", contextlib.nullcontext):
            apart.append((found - function(model, None, samples, args)).abs().max().item())
        return found

    monkeypatch.setattr(module, "reference_logps", compared)
    train(algo, SPECS[algo].flags | {"lora_rank": 2, "precision": "float32"}, tmp_path)
    assert apart[-1] > 1e-4  # after a step


@pytest.mark.parametrize("algo", [algo for algo in NAMES if "mask_truncated_completions" in options(algo)
                                  if algo != "grpo_multiturn"])  # fmt: skip
def test_cut_completions_teach_nothing(algo, tmp_path, monkeypatch):
    """With --mask-truncated-completions: where all are cut, no weight moves, and no column tells of their tokens."""
    module = importlib.import_module(f"algos.{algo}")

    def cut(*inputs, function=module.sample_all):
        samples = function(*inputs)
        return samples._replace(ended=torch.zeros_like(samples.ended))

    monkeypatch.setattr(module, "sample_all", cut)
    settings = {"mask_truncated_completions": True, "weight_decay": 0.0}
    _, *rows = train(algo, SPECS[algo].flags | settings, tmp_path)[0]
    assert not {"entropy", "approx_kl", "clip_fraction", "kl", "sampler_gap"} & {name for row in rows for name in row}
    for name, tensor in weights(next(tmp_path.iterdir())).items():
        assert torch.equal(tensor, load_file(world() / "model/model.safetensors")[name])


@pytest.mark.parametrize("algo", sharing("ppo", "collect"))
def test_statistics_are_given_back(algo, tmp_path, monkeypatch):
    """To a run that goes on and to an evaluation, whatever a script keeps in them."""
    module, loaded = importlib.import_module(f"algos.{algo}"), []
    train(algo, SPECS[algo].flags, tmp_path)
    (folder,) = map(str, tmp_path.iterdir())
    monkeypatch.setattr(module.Statistics, "load_state_dict", lambda self, state: loaded.append(state))
    (tmp_path.joinpath(folder) / "curve.png").unlink()  # as if it had not come to its end
    for purpose in "resume", "evaluate":
        train(algo, SPECS[algo].flags | {purpose: folder}, tmp_path)
    assert len(loaded) == 2


@pytest.mark.parametrize("algo", [algo for algo in LANGUAGE if "max_length" in options(algo)])
def test_long_completions_are_cut_at_the_end(algo):
    """What stands beyond --max-length changes nothing; what stands before it does."""
    task = lambda name: {"task": (name,) if algo == "sft" else name}  # noqa: E731
    long, other_end, other_start = (
        result(algo, SPECS[algo].flags | {"max_length": 8} | task(f"@{name}.jsonl"))
        for name in ("long", "other-end", "other-start")
    )
    assert same(long, other_end) and not same(long, other_start)


@pytest.mark.parametrize("algo", [algo for algo in WITH_ENVIRONMENTS if algo != "ppo_atari"])  # whose games are long
def test_a_row_tells_of_the_episodes_that_ended(algo, tmp_path, monkeypatch):
    """Since the row before, in all environments; an evaluation in between leaves them to the row that is due."""
    module, ended, rows = importlib.import_module(f"algos.{algo}"), [], []

    def noted(*inputs, function=module.step_vector):
        found = function(*inputs)
        ended.extend(found[-1])
        return found

    def logged(run, step, function=Run.log, **columns):
        due = run.due(step, getattr(run.args, "log_every", 1))
        told = {name: columns[name] for name in ("return", "length", "episodes") if name in columns}
        expected = dict(zip(told, [*np.mean(ended, 0), len(ended)])) if due and ended else {}
        assert told == pytest.approx(expected)
        rows.extend(ended if due else [])
        ended[:] = [] if due else ended
        function(run, step, **columns)

    monkeypatch.setattr(module, "step_vector", noted)
    monkeypatch.setattr(Run, "log", logged)
    settings = {"num_envs": 2, "online_steps": 160, "total_timesteps": 160, "eval_every": 20}
    train(algo, SPECS[algo].flags | settings, tmp_path)
    assert len(rows) > 1 and not ended


@pytest.mark.parametrize("algo", ["dqn", "c51", "rainbow", "her"])
def test_updates_are_numbered_from_one(algo, tmp_path, monkeypatch):
    """By their number the target network is renewed; rounds of three before learning starts are counted, too."""
    module, numbers = importlib.import_module(f"algos.{algo}"), []

    def noted(agent, optimizer, batch, number, *rest, function=module.update):
        numbers.append(number)
        return function(agent, optimizer, batch, number, *rest)

    monkeypatch.setattr(module, "update", noted)
    train(algo, SPECS[algo].flags | {"gradient_steps": 3, "train_frequency": 6, "num_envs": 2}, tmp_path)
    assert numbers[0] % 3 == 1 and numbers == [*range(numbers[0], numbers[-1] + 1)] and len(numbers) >= 6


@pytest.mark.parametrize("algo", [algo for algo in WITH_ENVIRONMENTS if algo != "ppo_atari"])
def test_a_resumed_run_begins_other_episodes(algo, tmp_path, monkeypatch):
    """Their seeds follow from the environment's steps so far."""
    module, steps = importlib.import_module(f"algos.{algo}"), []

    def noted(make, args, step, *rest, function=module.make_vector, **more):
        steps.append(step)
        return function(make, args, step, *rest, **more)

    monkeypatch.setattr(module, "make_vector", noted)
    settings = SPECS[algo].flags | {"online_steps": 48}
    _, args, _ = train(algo, settings, tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "curve.png").unlink()  # as if it had not come to its end
    train(algo, settings | {"resume": str(folder)}, tmp_path)
    assert steps[0] == 0 < steps[1] == args.get("total_timesteps", 48)


@pytest.mark.parametrize("algo", NAMES)
def test_a_row_tells_rate_speed_and_shares(algo):
    """The rate where there is a schedule, seconds of this step alone, shares between 0 and 1."""
    run = result(algo, SPECS[algo].flags)
    rows = [row for row in run.told if row["step"]]
    told = {name for row in rows for name in row}
    assert told & {"time/step", "time/steps_per_second", "time/updates_per_second"}
    assert "learning_rate" in told or not {"lr_schedule", "anneal_lr"} & options(algo)
    for row in rows:
        assert all(0 < row[name] < 60 for name in ("time/step", "time/sample") if name in row)
        assert all(0 <= row[name] <= 1 for name in ("truncated", "clip_fraction", "frac_zero_std") if name in row)
        if "time/tokens_per_second" in row and algo not in ("dapo", "vineppo"):  # they sample more than they train on
            count = run.args["num_prompts"] * run.args.get("num_generations", 1)
            tokens = row["time/tokens_per_second"] * row["time/step"]
            assert tokens == pytest.approx(count * row["length"], rel=1e-4)


@pytest.mark.parametrize("algo", [algo for algo in NAMES if {"log_every", "max_steps"} <= options(algo)])
def test_an_evaluation_is_a_row_of_its_own(algo):
    """Also at a step at which --log-every asks for none."""
    rows = result(algo, SPECS[algo].flags | {"eval_every": 3, "log_every": 2, "max_steps": 7, "online_steps": 0}).rows
    evaluated = {row["step"] for row in rows if any(name.startswith("eval/") for name in row)}
    assert {3, 6} <= evaluated


@pytest.mark.parametrize("algo", ["dpo", "simpo", "orpo"])
def test_held_out_pairs_are_as_many_as_asked(algo, tmp_path, capsys):
    train(algo, SPECS[algo].flags | {"eval_prompts": 3, "max_steps": 1}, tmp_path)
    assert ", 3 held-out ones" in capsys.readouterr().out


@pytest.mark.parametrize("algo", sharing("bc", "network"))
def test_networks_begin_orthogonal(algo):
    """Each layer's weights times sqrt(1/2) have orthonormal rows, or columns where they are fewer; biases are 0."""
    for layer in importlib.import_module(f"algos.{algo}").network(5, 8, 3).modules():
        if isinstance(layer, torch.nn.Linear):
            short = layer.weight if len(layer.weight) <= layer.in_features else layer.weight.T
            torch.testing.assert_close(short @ short.T, 2 * torch.eye(len(short)))
            assert not layer.bias.any()
