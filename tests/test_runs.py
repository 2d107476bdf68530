"""What a run leaves behind, that it can be made again, and that each of its settings does something."""

import builtins
import dataclasses
import importlib
import json
import os
import random
import re
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ONLINE, SMALL, command_line, metrics, new_run, runs_in, start, weights
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

import utils.cli
import utils.lm
import utils.run
from algos import grpo, ppo_lm, sft
from utils.checkpoint import restore, rng_state, set_rng_state
from utils.core import plot
from utils.errors import UserError
from utils.evaluation import advice, evaluate, show
from utils.lm import completion_logps, sample
from utils.models import TINY_MODEL, load_model, resolve_for
from utils.rewards import Scored, make_scorer
from utils.run import Run
from utils.tasks import load_task


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A small run of grpo.py that has ended."""
    return new_run(grpo, tmp_path_factory.mktemp("finished"), *SMALL["grpo"], picture=True)


@pytest.fixture(autouse=True)
def one_thread():
    """As `command_line` has it: results are equal at equal thread counts."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_folder(finished):
    """The name says algorithm, task and seed; the folder has exactly what it should."""
    assert re.fullmatch(r"grpo-sort-1-\d{8}-\d{6}-\d+", finished.name)
    names = {path.name for path in finished.iterdir()} - {".lock"}
    assert names == {"config.json", "metrics.jsonl", "checkpoints", "curve.png", "model"}
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert not list(finished.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["NAME:CONFIG", "a b", "../up", "two+three"])
def test_folder_of_any_task(name, tmp_path, monkeypatch):
    """Whatever a task is called, one folder is made in --output-dir, with a name that wandb takes as an id."""
    task = dataclasses.replace(load_task("sort"), name=name)
    monkeypatch.setattr(grpo, "load_task", lambda *_: task)
    run = new_run(grpo, tmp_path, *SMALL["grpo"], "--max-steps", 1)
    assert re.fullmatch(r"grpo-[A-Za-z0-9_.]+-1-\d{8}-\d{6}-\d+", run.name)


def test_no_folder_where_the_machine_cannot_be_described(tmp_path, monkeypatch):
    """Everything that config.json says is known before the folder is made."""
    monkeypatch.setattr(utils.run, "environment", lambda: {"not": {"json"}})
    with pytest.raises(TypeError, match="JSON"):
        command_line(grpo, *SMALL["grpo"], "--output-dir", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_threads_are_the_cores_that_may_be_used(monkeypatch):
    """As many as taskset or a batch system leaves to the process, not as the machine has."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 6}, raising=False)
    for args, threads in (utils.cli.RunArgs(), 3), (utils.cli.RunArgs(threads=5), 5):
        utils.cli.prepare(args)
        assert args.threads == threads == torch.get_num_threads()


def test_config(finished):
    """Arguments as resolved, none left open, and what a reader needs to repeat the run."""
    config = json.loads((finished / "config.json").read_text())
    assert config["algo"] == "grpo" and config["task"] == "sort"
    expected = dict(num_prompts=4, max_steps=6, seed=1, threads=1, device="cpu", learning_rate=1e-4, beta=0.0)
    assert expected.items() <= config["args"].items() and config["args"]["precision"] == "float32"
    assert {"torch", "transformers", "numpy", "python"} <= config["versions"].keys()
    assert config["versions"]["torch"] == torch.__version__
    git = subprocess.run(
        ["git", "-C", os.path.dirname(__file__), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    assert git.returncode or config["commit"].startswith(git.stdout.strip()[:7])
    assert {"system", "cores", "threads"} <= config["machine"].keys()


def test_metrics(finished):
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(7))
    evaluated = {"eval/greedy", "eval/pass@1", "eval/pass@8", "eval/distinct"}
    assert [row["step"] for row in rows if evaluated <= row.keys()] == [0, 2, 4, 6]
    columns = "reward reward_std frac_zero_std grad_norm approx_kl clip_fraction sampler_gap entropy length truncated"
    for row in rows[1:]:
        assert {*columns.split(), "learning_rate", "time/step", "time/sample"} <= row.keys()
        assert all(torch.tensor(value).isfinite() for value in row.values())
        assert 0 <= row["reward"] <= 1 and row["sampler_gap"] < 1e-5 and row["clip_fraction"] == 0
        assert 1 <= row["length"] <= 20 and row["grad_norm"] >= 0 and "loss" not in row
    assert all(name in grpo.__doc__ for name in columns.split())


def test_saved_model_is_the_evaluated_one(finished):
    """RUN/model loads with anyone's classes, has the last checkpoint's weights bit for bit, and scores exactly what the
    last row says."""
    model = AutoModelForCausalLM.from_pretrained(finished / "model")
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    state = torch.load(finished / "checkpoints" / "step-00000006.pt", weights_only=True)["model"]
    assert state.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(value, state[name]) for name, value in model.named_parameters())
    last = metrics(finished)[-1]
    scores = evaluate(model, tokenizer, load_task("sort"), None, 4, 8, 20, 1.0, 1)
    assert scores == {name: value for name, value in last.items() if name.startswith("eval/")}
    assert any(not torch.equal(value, state[name]) for name, value in load_model(TINY_MODEL)[0].named_parameters())


def test_evaluation_leaves_no_trace():
    """The global generators go on as if it had not been there, also where a score draws from them. Equal seeds give
    equal numbers. Another seed samples other answers beside the same greedy ones."""
    model, tokenizer = load_model(TINY_MODEL)
    task, numbers = load_task("sort"), lambda: (random.random(), np.random.random(), torch.rand(()).item())
    noisy = dataclasses.replace(task, score=lambda *_: {"reward": sum(numbers())})
    before, expected = rng_state(), numbers()
    set_rng_state(before)
    evaluate(model, tokenizer, noisy, None, 3, 2, 6, 1.0, seed=5)
    assert numbers() == expected
    first, again, other = (evaluate(model, tokenizer, task, None, 16, 4, 20, 1.0, seed) for seed in (1, 1, 2))
    assert again == first and other["eval/greedy"] == first["eval/greedy"]
    assert other["eval/pass@1"] != first["eval/pass@1"]


@pytest.mark.parametrize("algo", ONLINE)
def test_each_batch_of_samples_has_a_stream_of_its_own(algo, monkeypatch):
    """It depends on the seed, the step and the place in the step, and on nothing that was drawn before."""
    module, seen = importlib.import_module(f"algos.{algo}"), []
    monkeypatch.setattr(utils.lm, "sample", lambda *inputs: seen.append(inputs[-1].initial_seed()) or sample(*inputs))
    model, tokenizer = load_model(TINY_MODEL)
    task, more, first = load_task("sort"), (None,) * (algo == "online_dpo"), (0,) * (algo == "dapo")
    score = make_scorer(task, (), (), 1)
    own = {"tba": dict(sync_every=1)}.get(algo, {})  # else it samples for two steps
    for seed, step in (1, 1), (1, 2), (2, 1), (1, 1):
        group = {"num_generations": 2} if hasattr(module.Args, "num_generations") else {}
        args = module.Args(num_prompts=4, sample_batch_size=4 if group else 2, max_completion_length=2, seed=seed,
                           precision="float32", **group, **own)  # fmt: skip
        module.collect(model, *more, tokenizer, task, score, step, args, *first)
    assert len(seen) == 8 and len(set(seen[:6])) == 6 and seen[6:] == seen[:2]


def test_sft_run(tmp_path, monkeypatch):
    asked = rows_asked_for(sft, monkeypatch)
    run = new_run(sft, tmp_path, *SMALL["sft"])
    assert asked == [0, 0, *range(48)]  # the first one is looked at before there is a run, and shown
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 7)) and rows[-1]["loss"] < rows[0]["loss"]
    scores = evaluate(*load_model(str(run / "model")), load_task("sort"), None, 4, 8, 32, 1.0, 1)
    assert {"eval/greedy", "eval/pass@1", "eval/pass@8", "eval/distinct"} == scores.keys()
    assert scores == {name: value for name, value in rows[-1].items() if name.startswith("eval/")}
    new_run(grpo, tmp_path, *SMALL["grpo"], "--max-steps", 1, "--model", run / "model")


def test_track(tmp_path):
    """With --track, and WANDB_MODE=offline, wandb's files lie in the run's folder and nowhere else."""
    pytest.importorskip("wandb", reason="not run: wandb is not installed")
    flags = "--max-steps 1 --eval-every 0 --track --output-dir runs".split()
    process = start("grpo", *SMALL["grpo"], *flags, cwd=tmp_path)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    (run,) = runs_in(tmp_path / "runs")
    assert list((run / "wandb").glob("offline-run-*")) and not (tmp_path / "wandb").exists()


def test_without_track(tmp_path, monkeypatch):
    asked, real = set(), builtins.__import__
    spy = lambda name, *rest, **named: asked.add(name) or real(name, *rest, **named)  # noqa: E731
    monkeypatch.setattr(builtins, "__import__", spy)
    new_run(grpo, tmp_path, *SMALL["grpo"], "--max-steps", 1)
    assert "tqdm" in asked and not [name for name in asked if name.partition(".")[0] == "wandb"]


LITTLE, CUT_OFF, CONSTANT = "equal rewards", "cut off", "reward has not changed"


@pytest.mark.parametrize(
    "change, line, begins",
    [
        (lambda i: {"frac_zero_std": 0.95 if i in (3, 4, 6) else 0.2}, LITTLE, 3),
        (lambda i: {"truncated": 1.0 if i >= 2 else 0.9}, CUT_OFF, 2),
        (lambda i: {"reward": 0.5 if i >= 4 else i / 10}, CONSTANT, 8),
        (lambda i: {"reward": None} if i >= 4 else {}, CONSTANT, 8),
        (lambda i: {}, None, None),
    ],
)
def test_advice(change, line, begins):
    """Each condition is named once, at the step where it begins; a healthy run gets none. None: no reward is known."""
    healthy = {"frac_zero_std": 0.5, "truncated": 0.1}
    history = [{"step": 0, "eval/greedy": 0.1}] + [
        {"step": i, "reward": i / 100, **healthy, **change(i)} for i in range(1, 12)
    ]
    history = [{name: value for name, value in row.items() if value is not None} for row in history]
    said = {i: text for i in range(1, 12) if (text := advice(history[: i + 1]))}
    assert list(said) == ([] if line is None else [begins])
    assert line is None or line in said[begins]


def test_show():
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    text = show(tokenizer, [0, *tokenizer("S21:")["input_ids"]], [[4, 5, 1], [5]], [1.0, 0.25], {"note": ["x", "y"]})
    prompt, first, second = text.splitlines()
    assert "<pad>S21:" in prompt and "12<eos>" in first and "reward 1" in first and "'x'" in first
    assert "<eos>" not in second and "reward 0.25" in second and "'y'" in second


def test_lora(tmp_path):
    """Adapters learn, base weights do not move, the reference is the base, and the next script loads what is saved."""
    pytest.importorskip("peft", reason="not run: peft is not installed")
    flags = "--lora-rank 4 --beta 0.1 --max-steps 2 --learning-rate 1e-2 --precision float32 --max-completion-length 20"
    run = new_run(grpo, tmp_path, *SMALL["grpo"], *flags.split(), "--micro-batch-size", 16)
    state = torch.load(run / "checkpoints" / "step-00000002.pt", weights_only=True)["model"]
    assert all("lora_" in name for name in state)
    base, saved = (dict(load_model(str(path))[0].named_parameters()) for path in (TINY_MODEL, run / "model"))
    for name, value in saved.items():  # the base as it was, plus alpha / rank B A where there are adapters
        lora = [state.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.default.weight") for x in "BA"]
        expected = base[name] if lora[0] is None else base[name] + 2 * lora[0] @ lora[1]
        torch.testing.assert_close(value, expected, rtol=0, atol=0 if lora[0] is None else 1e-6)
    assert all(value.any() for name, value in state.items() if "lora_B" in name)
    first, second = metrics(run)[1:]
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 1e-6
    command_line(grpo, *SMALL["grpo"], "--max-steps", 1, "--model", run / "model", "--output-dir", tmp_path)


def rows_asked_for(module, monkeypatch) -> list[int]:
    """Where a run of `module` on sort will write the number of each row that it takes."""
    task, rows = load_task("sort"), []
    train = lambda index, seed: rows.append(index) or task.train(index, seed)  # noqa: E731
    asked = dataclasses.replace(task, train=train)
    if module is sft:
        monkeypatch.setattr(module, "load_tasks", lambda *_: [asked])
    else:
        monkeypatch.setattr(module, "load_task", lambda *_, **__: asked)
    return rows


@pytest.mark.parametrize("algo", [algo for algo in ONLINE if algo != "dapo"])  # which draws on until groups differ
def test_every_step_has_the_next_prompts(algo, tmp_path, monkeypatch):
    module = importlib.import_module(f"algos.{algo}")
    rows = rows_asked_for(module, monkeypatch)
    # gkd's teacher asks for rows, too; tba.py would take those of two steps at once
    alone = {"gkd": ["--teacher-beta", 0, "--reward-weight", 1], "tba": ["--sync-every", 1]}.get(algo, [])
    new_run(module, tmp_path, *SMALL[algo], "--num-prompts", 4, "--max-steps", 3, *alone)
    times = 2 if algo == "vineppo" else 1  # whose states begin with the same prompts
    wanted = [i for step in range(3) for i in [*range(4 * step, 4 * step + 4)] * times]
    assert rows == [0, *wanted]  # the first one is looked at before there is a run


def test_gradient_checkpointing_reaches_the_critic(tmp_path, monkeypatch):
    """transformers does it in layers that are in training mode, and loads models in evaluation mode."""
    update, modes = ppo_lm.update, []

    def watched(model, critic, *rest):
        modes.append([m.training and m.gradient_checkpointing for part in (model, critic) for m in part.modules()
                      if hasattr(m, "gradient_checkpointing")])  # fmt: skip
        return update(model, critic, *rest)

    monkeypatch.setattr(ppo_lm, "update", watched)
    new_run(ppo_lm, tmp_path, *SMALL["ppo_lm"], "--gradient-checkpointing", "--max-steps", 1)
    assert len(modes[0]) >= 4 and all(modes[0])


def test_dropout_stays_in_the_configuration(tmp_path):
    """It is off in training, and saved for whoever trains the model next."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=22, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(tmp_path / "model")
    run = new_run(grpo, tmp_path / "runs", *SMALL["grpo"], "--max-steps", 1, "--model", tmp_path / "model")
    assert metrics(run)[1]["sampler_gap"] < 1e-5
    assert json.loads((run / "model" / "config.json").read_text())["resid_pdrop"] == 0.1


def test_bfloat16_trains_float32_weights(finished, tmp_path):
    """--precision bfloat16 is autocast: numbers close to those in float32, and float32 weights most of which move."""
    run = new_run(grpo, tmp_path, *SMALL["grpo"], "--precision", "bfloat16", "--max-steps", 2)
    ours, plain = metrics(run)[1], metrics(finished)[1]
    assert ours["entropy"] != plain["entropy"] and ours["entropy"] == pytest.approx(plain["entropy"], rel=0.05)
    assert 1e-9 < abs(ours["grad_norm"] - plain["grad_norm"]) and ours["sampler_gap"] < 0.05
    base = load_model(TINY_MODEL)[0].state_dict()
    assert all(value.dtype == torch.float32 for value in weights(run).values())
    moved = [(value != base[name]).float().mean().item() for name, value in weights(run).items()]
    assert sum(moved) / len(moved) > 0.5


def test_a_diverged_run_is_seen(tmp_path, monkeypatch, capsys):
    """A number that is not finite is named in the terminal and left out of metrics.jsonl, which stays JSON."""
    update = grpo.update
    monkeypatch.setattr(grpo, "update", lambda *args: update(*args) | {"grad_norm": float("inf")})
    rows = metrics(new_run(grpo, tmp_path, *SMALL["grpo"], "--max-steps", 1))
    assert "grad_norm" not in rows[1] and "entropy" in rows[1]
    assert "step 1: not finite, so not logged: grad_norm" in capsys.readouterr().out


def test_sampling_in_parts(monkeypatch):
    """--sample-batch-size rounded to whole prompts, at least one: the parts are put together in order, whatever their
    widths, each token with its own log-probability."""
    model, tokenizer = load_model(TINY_MODEL)
    settings = dict(task="sort", num_prompts=5, num_generations=4, max_completion_length=12, precision="float32")
    score = lambda *columns: Scored(torch.zeros(20), {}, {})  # noqa: E731
    monkeypatch.setattr(utils.lm, "sample", lambda *inputs: parts.append(sample(*inputs)) or parts[-1])
    task = load_task("sort")
    for limit, prompts in ((11, [2, 2, 1]), (1, [1] * 5), (20, [5])):
        args, parts = grpo.Args(sample_batch_size=limit, **settings), []
        samples, _ = grpo.collect(model, tokenizer, task, score, 1, args)
        assert [len(part.prompt_ids) for part in parts] == prompts
        assert len({part.prompt_ids.shape[1] for part in parts}) > 1 or prompts == [5]
        texts = [tokenizer.decode(ids[mask]) for ids, mask in zip(samples.prompt_ids, samples.prompt_mask)]
        assert texts == [task.train(i, 1)["prompt"] for i in range(5)]
        with torch.no_grad():
            logps, _ = completion_logps(model, *samples[:4])
        mask = samples.completion_mask
        torch.testing.assert_close(samples.logps[mask], logps[mask], rtol=0, atol=1e-5)
        assert samples.ended.tolist() == sum((part.ended.tolist() for part in parts), [])


@pytest.mark.parametrize("algo", [algo for algo in ONLINE if algo != "grpo"])
def test_its_siblings_sample_in_parts_too(algo, tmp_path, monkeypatch):
    module, sizes = importlib.import_module(f"algos.{algo}"), []
    spy = lambda *inputs: sizes.append(len(inputs[1]) * inputs[3]) or sample(*inputs)  # noqa: E731
    monkeypatch.setattr(utils.lm, "sample", spy)
    group = ["--num-generations", 2] if hasattr(module.Args, "num_generations") else []
    new_run(module, tmp_path, *SMALL[algo], "--max-steps", 1, "--num-prompts", 8, *group, "--sample-batch-size", 4,
            "--eval-samples", 2)  # fmt: skip
    assert max(sizes) <= 4 and len(sizes) > 1


@pytest.mark.parametrize("algo", ["grpo", "sft"])
def test_evaluation_samples_in_parts_too(algo, tmp_path, monkeypatch):
    rows, found, sample_all = [], [], utils.evaluation.sample_all
    spy = lambda *inputs: rows.append(len(inputs[1]) * inputs[3]) or sample(*inputs)  # noqa: E731

    def noted(*inputs):
        rows.clear()
        samples = sample_all(*inputs)
        found.extend(rows)
        return samples

    monkeypatch.setattr(utils.lm, "sample", spy)
    monkeypatch.setattr(utils.evaluation, "sample_all", noted)
    flags = [*SMALL[algo], *"--max-steps 1 --eval-samples 3 --sample-batch-size 8".split()]
    new_run(importlib.import_module(f"algos.{algo}"), tmp_path, *flags)
    assert set(found) == {4, 6}  # four greedy answers at once; three samples of two prompts


def test_plot_draws_what_is_there(tmp_path):
    """A column that no row has, and rows without a column, are no reason to fail at the end of a run."""
    plot([{"step": 0, "a": 1.0}, {"step": 1}], {"one": ("a", "absent"), "two": ()}, "title", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


@pytest.mark.parametrize("size, lora_rank, row", [(9_999_999, 0, "tiny"), (10_000_000, 0, "full"), (9, 4, "lora")])
@pytest.mark.parametrize("precision", ["bfloat16", "pure-bfloat16"])
def test_settings_that_depend_on_the_model(size, lora_rank, row, precision):
    """What was left at None comes from the model's row and is printed; what was given stays."""
    presets = {name: dict(learning_rate=float(i), batch_size=i) for i, name in enumerate(("tiny", "full", "lora"), 1)}
    args = SimpleNamespace(learning_rate=None, batch_size=0, lora_rank=lora_rank, precision=precision)
    model = torch.nn.Linear(size, 1, bias=False, device="meta")
    model.config = GPT2Config()
    text = resolve_for(model, args, presets)
    assert args.learning_rate == presets[row]["learning_rate"] and args.batch_size == 0
    assert f"{size / 1e6:.2f}M parameters" in text and f"{row}: {{'learning_rate': {args.learning_rate}}}" in text
    assert ("warning" in text) == (precision == "pure-bfloat16" and not lora_rank)  # adapters are float32


@pytest.mark.parametrize("columns", [None, {"reward": 1.0}])
def test_what_a_failure_leaves_behind(columns):
    """Where the user's code raises, the state is saved, after the step's columns if there are any, and the error goes
    on. Where it does not, nothing is saved."""
    done = []
    run = SimpleNamespace(log=lambda step, **c: done.append((step, c)), save=lambda *given: done.append(given))
    with Run.saving(run, 3, {"weights": 1}, {"python": 2}, columns):
        pass
    assert done == []
    for state in ({"weights": 1}, lambda: {"weights": 1}):
        with pytest.raises(ZeroDivisionError), Run.saving(run, 3, state, {"python": 2}, columns):
            raise ZeroDivisionError
        assert done == [(3, columns)] * bool(columns) + [(3, {"weights": 1}, {"python": 2})]
        done.clear()


def test_restore():
    """Modules, optimizers and generators, also several under one name, of which some may be missing. Weights that were
    not saved stay; weights that do not fit the model are an error."""

    def parts(seed: int) -> dict:
        torch.manual_seed(seed)
        model, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=seed)
        model(torch.ones(2)).backward()
        optimizer.step()
        generator = torch.Generator().manual_seed(seed)
        return {"model": model, "optimizer": optimizer, "generator": generator, "members": (second, None)}

    saved, ours = parts(1), parts(2)
    bias = ours["model"].bias.item()
    state = {name: saved[name].state_dict() for name in ("model", "optimizer")}
    del state["model"]["bias"]
    state |= {"generator": saved["generator"].get_state(), "members": [saved["members"][0].state_dict()]}
    restore(state, **ours)
    assert torch.equal(ours["model"].weight, saved["model"].weight) and ours["model"].bias.item() == bias
    assert torch.equal(ours["members"][0].weight, saved["members"][0].weight)
    assert ours["optimizer"].param_groups[0]["lr"] == 1 and ours["generator"].initial_seed() == 1
    for name, shape in (("unknown", (1,)), ("bias", (2,))):
        with pytest.raises(UserError, match=f"{name} do not fit: is --model another one"):
            restore({"model": {name: torch.ones(shape)}}, model=ours["model"])
    with pytest.raises(ValueError):
        restore({"members": []}, members=ours["members"])
