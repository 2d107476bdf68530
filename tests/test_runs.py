"""What a run leaves behind, that it can be made again, and that each of its settings does something."""

import builtins
import itertools
import json
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import REPO, SMALL, checkpoint, command_line, metrics, new_run, runs_in, start, weights, write_rows
from tiny_runs import rows_asked_for
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

import utils.lm
import utils.rewards
from algos import grpo, ppo_lm, sac, sft, vineppo
from utils.core import Run, choose_precision, plot, preset
from utils.data import load_task
from utils.lm import TINY_MODEL, completion_logps, load_model, resolve, sample
from utils.rewards import evaluate


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
    names = {path.name for path in finished.iterdir()}
    assert names == {"config.json", "metrics.jsonl", "samples.jsonl", "checkpoint.pt", "curve.png", "model"}
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert not list(finished.rglob("*.tmp"))


@pytest.mark.parametrize("name", ["NAME:CONFIG", "a b", "../up", "two+three", "x" * 300])
def test_folder_of_any_task(name, tmp_path, monkeypatch):
    """Whatever a task is called, one folder is made in --output-dir, with a name that wandb takes as an id."""
    task = load_task("sort")._replace(name=name)
    monkeypatch.setattr(grpo, "load_task", lambda *_: task)
    run = new_run(grpo, tmp_path, *SMALL["grpo"], "--max-steps", 1)
    assert re.fullmatch(r"grpo-[A-Za-z0-9_.]+-1-\d{8}-\d{6}-\d+", run.name)


def test_config(finished):
    """Arguments as resolved, none left open, and what a reader needs to repeat the run."""
    config = json.loads((finished / "config.json").read_text())
    assert config["algo"] == "grpo" and config["task"] == "sort"
    expected = dict(num_prompts=4, max_steps=6, seed=1, threads=1, device="cpu", learning_rate=1e-4, beta=0.0)
    assert expected.items() <= config["args"].items() and config["args"]["precision"] == "float32"
    assert {"torch", "transformers", "numpy"} <= config["versions"].keys()
    assert config["versions"]["torch"] == torch.__version__


def test_metrics(finished):
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(7))
    evaluated = {"eval/greedy", "eval/pass@1", "eval/pass@8"}
    assert [row["step"] for row in rows if evaluated <= row.keys()] == [0, 2, 4, 6]
    columns = "reward reward_std frac_zero_std grad_norm approx_kl clip_fraction sampler_gap entropy length truncated"
    for row in rows[1:]:
        assert {*columns.split(), "learning_rate", "time/step", "time/sample"} <= row.keys()
        assert all(torch.tensor(value).isfinite() for value in row.values())
        assert 0 <= row["reward"] <= 1 and row["sampler_gap"] < 1e-5 and row["clip_fraction"] == 0
        assert 1 <= row["length"] <= 20 and row["grad_norm"] >= 0 and "loss" not in row
    plain = {"reward", "grad_norm", "length"}  # explain themselves
    assert all(name in grpo.__doc__ for name in {*columns.split()} - plain)


def test_saved_model_is_the_evaluated_one(finished):
    """RUN/model loads with anyone's classes, has the last checkpoint's weights bit for bit, and scores exactly what the
    last row says."""
    model = AutoModelForCausalLM.from_pretrained(finished / "model")
    AutoTokenizer.from_pretrained(finished / "model")
    state = checkpoint(finished)["trained"]["model"]
    assert state.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    assert all(torch.equal(value, state[name]) for name, value in model.named_parameters())
    last = metrics(finished)[-1]
    args = grpo.Args(**json.loads((finished / "config.json").read_text())["args"])
    scores = evaluate(*load_model(args, path=str(finished / "model")), load_task("sort"), None, args)
    assert scores == {name: value for name, value in last.items() if name.startswith("eval/")}
    start, _ = load_model(grpo.Args())
    assert any(not torch.equal(value, state[name]) for name, value in start.named_parameters())


def test_sft_run(tmp_path, monkeypatch):
    asked = rows_asked_for(sft, monkeypatch)
    run = new_run(sft, tmp_path, *SMALL["sft"])
    assert asked == [0, *range(48)]  # the first one is shown
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 7)) and rows[-1]["loss"] < rows[0]["loss"]
    args = sft.Args(**json.loads((run / "config.json").read_text())["args"])
    scores = evaluate(*load_model(args, path=str(run / "model")), load_task("sort"), None, args)
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
    assert f"next: python {REPO}/algos/grpo.py --resume runs/{run.name} --max-steps 2" in out
    assert f"next: python benchmarks/compare.py runs/{run.name} ANOTHER-RUN" in out


def test_samples_are_kept(tmp_path, monkeypatch, capsys):
    """Of each evaluation all, of each step those of the first prompts: with the reward, what each function gave, what
    it noted, and the advantage. W&B gets the same as a table, in the project that its variable names."""
    logged = []
    log = SimpleNamespace(log=lambda row, **_: logged.append(row))
    wandb = SimpleNamespace(Table=lambda names, rows: (names, rows), init=lambda **how: logged.append(how) or log)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("utils.core.find_spec", lambda name: name)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    (tmp_path / "rewards.py").write_text("def even(completions, log_extra, **rest):\n"
        "    log_extra('letters', [len(text) for text in completions])\n"
        "    return [None if '7' in text else float(len(text) % 2 == 0) for text in completions]\n")  # fmt: skip
    flags = ["--max-steps", 2, "--eval-every", 2, "--eval-prompts", 3, "--log-samples", 1, "--track"]
    run = new_run(grpo, tmp_path, *SMALL["grpo"], *flags, "--reward", f"{tmp_path}/rewards.py:even")
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    of = lambda step, greedy: [r for r in rows if r["step"] == step and r.get("greedy") is greedy]  # noqa: E731
    assert {(step, greedy): len(of(step, greedy)) for step in range(3) for greedy in (True, False, None)} == {
        (0, True): 3, (0, False): 24, (0, None): 0, (1, True): 0, (1, False): 0, (1, None): 4,
        (2, True): 3, (2, False): 24, (2, None): 4}  # fmt: skip
    for step in 1, 2:
        group = of(step, None)
        assert len({row["prompt"] for row in group}) == 1
        rewards = torch.tensor([[math.nan if row["reward"] is None else row["reward"] for row in group]])
        found = torch.tensor([row["advantage"] for row in group])
        torch.testing.assert_close(found, grpo.advantages(rewards, "group")[0])
        assert all(row["reward"] == row["reward/even"] and row["letters"] == len(row["completion"]) for row in group)
    assert logged[0]["project"] == "mine"
    (names, sent), *_ = [row["samples"] for row in logged[1:] if "samples" in row]
    assert [dict(zip(names, row)) for row in sent] == of(0, True) + of(0, False)
    text = capsys.readouterr().out
    assert re.search(r"S\d+: means:\n  Sort the digits", text) and max(map(len, text.splitlines())) < 400
    assert text.count("held-out 'S") == 4 and text.count("held-out") == 4


def test_without_track(tmp_path, monkeypatch):
    asked, real = set(), builtins.__import__
    spy = lambda name, *rest, **named: asked.add(name) or real(name, *rest, **named)  # noqa: E731
    monkeypatch.setattr(builtins, "__import__", spy)
    new_run(grpo, tmp_path, *SMALL["grpo"], "--max-steps", 1)
    assert "tqdm" in asked and not [name for name in asked if name.partition(".")[0] == "wandb"]


def test_lora(tmp_path):
    """Adapters learn, base weights do not move, the reference is the base, and the next script loads what is saved."""
    pytest.importorskip("peft", reason="not run: peft is not installed")
    flags = "--lora-rank 4 --beta 0.1 --max-steps 2 --learning-rate 1e-2 --precision float32 --max-completion-length 20"
    run = new_run(grpo, tmp_path, *SMALL["grpo"], *flags.split(), "--micro-batch-size", 16)
    state = checkpoint(run)["trained"]["model"]
    assert all("lora_" in name for name in state)
    paths = map(str, (TINY_MODEL, run / "model"))
    base, saved = (dict(load_model(grpo.Args(), path=path)[0].named_parameters()) for path in paths)
    for name, value in saved.items():  # the base as it was, plus alpha / rank B A where there are adapters
        lora = [state.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.default.weight") for x in "BA"]
        expected = base[name] if lora[0] is None else base[name] + 2 * lora[0] @ lora[1]
        torch.testing.assert_close(value, expected, rtol=0, atol=0 if lora[0] is None else 1e-6)
    assert all(value.any() for name, value in state.items() if "lora_B" in name)
    first, second = metrics(run)[1:]
    assert first["kl"] == pytest.approx(0, abs=1e-6) and second["kl"] > 1e-6
    command_line(grpo, *SMALL["grpo"], "--max-steps", 1, "--model", run / "model", "--output-dir", tmp_path)


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


def test_states_with_their_continuations_stay_in_the_context(tmp_path):
    """vineppo.py goes on from the end of a completion, which learned positions must reach."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=22, n_positions=24, n_embd=32, n_layer=2, n_head=2, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"S{i}:"} for i in [*range(10, 30), *range(10**9, 10**9 + 9)]]
    task = write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rewards.py").write_text("def one(completions, **_): return [1.0] * len(completions)")
    flags = "--max-steps 1 --max-completion-length 10 --step-separator 1 2 3 4 5 6 7 8 9 0".split()
    new_run(vineppo, tmp_path / "runs", *SMALL["vineppo"], *flags, "--model", tmp_path / "model", "--task", task,
            "--reward", tmp_path / "rewards.py:one")  # fmt: skip


def test_bfloat16_trains_float32_weights(finished, tmp_path):
    """--precision bfloat16 is autocast: numbers close to those in float32, and float32 weights most of which move."""
    run = new_run(grpo, tmp_path, *SMALL["grpo"], "--precision", "bfloat16", "--max-steps", 2)
    ours, plain = metrics(run)[1], metrics(finished)[1]
    assert ours["entropy"] != plain["entropy"] and ours["entropy"] == pytest.approx(plain["entropy"], rel=0.05)
    assert 1e-9 < abs(ours["grad_norm"] - plain["grad_norm"]) and ours["sampler_gap"] < 0.05
    base = load_model(grpo.Args())[0].state_dict()
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
    model, tokenizer = load_model(grpo.Args())
    settings = dict(task="sort", num_prompts=5, num_generations=4, max_completion_length=12, precision="float32")
    score = lambda *columns: (torch.zeros(20), {})  # noqa: E731
    monkeypatch.setattr(utils.lm, "sample", lambda *inputs: parts.append(sample(*inputs)) or parts[-1])
    task = load_task("sort")
    for limit, prompts in ((11, [2, 2, 1]), (1, [1] * 5), (20, [5])):
        args, parts = grpo.Args(sample_batch_size=limit, **settings), []
        samples, _, _ = grpo.collect(model, tokenizer, task, score, 1, args)
        assert [len(part.prompt_ids) for part in parts] == prompts
        assert len({part.prompt_ids.shape[1] for part in parts}) > 1 or prompts == [5]
        texts = [tokenizer.decode(ids[mask]) for ids, mask in zip(samples.prompt_ids, samples.prompt_mask)]
        assert texts == [task.train(i, 1)["prompt"] for i in range(5)]
        with torch.no_grad():
            logps, _ = completion_logps(model, *samples[:4])
        mask = samples.completion_mask
        torch.testing.assert_close(samples.logps[mask], logps[mask], rtol=0, atol=1e-5)
        assert samples.ended.tolist() == sum((part.ended.tolist() for part in parts), [])


def test_plot_draws_what_is_there(tmp_path):
    """A column that no row has, and rows without a column, are no reason to fail at the end of a run."""
    panels = {"one": ("a", "absent"), "two": ()}
    plot([{"step": 0, "a": 1.0}, {"step": 1}], panels, "title", "steps", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_a_preset_fills_in_what_is_none():
    """And leaves what was given, also 0, False and an empty text. It says what it has filled in."""
    given = dict(zero=0, fraction=0.0, no=False, empty="")
    args = SimpleNamespace(**given, asked=None, rest=None)
    row = dict.fromkeys(given, 7) | dict(asked=0.5)
    assert preset(args, {"other": dict(rest=1), "this": row}, "this") == "settings for this: {'asked': 0.5}"
    assert vars(args) == given | dict(asked=0.5, rest=None) and preset(args, {"this": row}, "this") == ""


@pytest.mark.parametrize("size, lora_rank, row", [(9_999_999, 0, "tiny"), (10_000_000, 0, "full"), (9, 4, "lora")])
@pytest.mark.parametrize("precision", ["bfloat16", "pure-bfloat16"])
def test_settings_that_depend_on_the_model(size, lora_rank, row, precision):
    """What was left at None comes from the model's row and is printed; what was given stays."""
    presets = {name: dict(learning_rate=float(i), batch_size=i) for i, name in enumerate(("tiny", "full", "lora"), 1)}
    args = SimpleNamespace(learning_rate=None, batch_size=4, lora_rank=lora_rank, precision=precision)
    model = torch.nn.Linear(size, 1, bias=False, device="meta")
    model.config = GPT2Config()
    text = resolve(model, args, presets)
    assert args.learning_rate == presets[row]["learning_rate"] and args.batch_size == 4
    assert text.startswith(f"{size / 1e6:.2f}M parameters in {precision}, settings for {row}: {{'learning_rate': ")
    assert ("warning" in text) == (precision == "pure-bfloat16" and not lora_rank)  # adapters are float32


@pytest.mark.parametrize("flags, device, frozen, precision, half", [
    ({}, "cpu", True, "float32", False), ({"avx512_bf16": True}, "cpu", False, None, False),
    ({"amx_bf16": True}, "cpu", True, None, True), ({}, "cuda", True, None, True),
])  # fmt: skip
def test_the_processor_decides_on_bfloat16(flags, device, frozen, precision, half, monkeypatch):
    """Where no precision is given: float32 without products in bfloat16, else the model's row decides."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True} | flags)
    args = SimpleNamespace(precision=None, fsdp=False, lora_rank=0)
    assert (choose_precision(args, device, frozen), args.precision) == (half, precision)
    args.precision = "pure-bfloat16"
    assert choose_precision(args, device) and args.precision == "pure-bfloat16"


def test_a_gguf_file_is_a_model(tmp_path, monkeypatch):
    """transformers reads it by its folder and name. Its weights are whole then, so the model can be saved."""
    asked, tiny = [], load_model(grpo.Args())
    tiny[0].hf_quantizer = GgufHfQuantizer.__new__(GgufHfQuantizer)
    tiny[0].config.quantization_config = {"quant_method": "gguf"}
    for kind, found in ((AutoTokenizer, tiny[1]), (AutoModelForCausalLM, (tiny[0], {"missing_keys": set()}))):
        give = lambda path, found=found, **how: asked.append((path, how["gguf_file"])) or found  # noqa: E731
        monkeypatch.setattr(kind, "from_pretrained", give)
    args = grpo.Args(model=str(tmp_path / "small.Q4.gguf"))
    utils.lm.save_model(*load_model(args), tmp_path / "model", args)
    assert asked == [(str(tmp_path), "small.Q4.gguf")] * 2 and (tmp_path / "model/model.safetensors").exists()
    assert "quantization_config" not in json.loads((tmp_path / "model/config.json").read_text())


@pytest.mark.parametrize("args, left, tick, speed", [
    (grpo.Args(), "00:15", 4, "2.5 steps a second"), (sac.Args(learning_starts=12), "00:07", 4, "2.5 steps a second"),
    (grpo.Args(), "00:00", 0.005, "2,000 steps a second"), (grpo.Args(), "02:32", 40, "4 s a step"),
])  # fmt: skip
def test_a_run_says_how_long_it_takes(args, left, tick, speed, tmp_path, monkeypatch, capsys):
    """Once, after its first steps, also into a file: from the second row of this process on at that row's speed, and
    from the second one on in which it learns."""
    clock = itertools.count(0, tick)  # each look at it takes so many seconds
    monkeypatch.setattr("utils.core.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    run = Run(replace(args, output_dir=str(tmp_path)), "grpo", "sort", 50, ("reward",))
    for step in (0, 2, 12, 22, 32):
        run.log(step, **{"time/tokens_per_second": 7.0})
    said = re.findall(".* to go", capsys.readouterr().out)
    assert said == [f"{speed}, 7 tokens a second, about 0:{left} to go"]
