"""sft.py: what is trained and what is not, and the split into micro-batches. The loss: test_parity_transformers.py."""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers import metrics, new_run, write_rows
from transformers import LlamaConfig, LlamaForCausalLM

from algos import grpo, sft
from utils.data import encode_answers, load_task
from utils.dist import as_samples
from utils.lm import TINY_MODEL, load_model
from utils.rewards import evaluate

PAIRS = [([3, 4, 5], [6, 7, 1]), ([8], [9, 1]), ([5, 5, 5, 5, 2], [4, 4, 4, 4, 1]), ([7, 2], [1])]


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).double()


def gradients(batch, micro_batch_size: int) -> tuple[dict, dict]:
    """What one `update` by plain gradient descent with rate 1 subtracts from the weights, and its metrics."""
    model = small_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    args = sft.Args(micro_batch_size=micro_batch_size, micro_batch_tokens=0, max_grad_norm=1e9, precision="float32")
    samples = as_samples(batch, 64, "cpu")
    metrics = sft.update(model, torch.optim.SGD(model.parameters(), lr=1.0), samples, args)
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}, metrics


@pytest.mark.parametrize("lora_rank, limit", [(0, 32), (2, 512)])
def test_answers_in_evaluation_are_as_long_as_the_model_needs(lora_rank, limit, tmp_path, monkeypatch):
    """The embedded model's limit would cut off nearly every answer of a real model."""
    if lora_rank:
        pytest.importorskip("peft", reason="not run: peft is not installed")
    limits = []
    monkeypatch.setattr(sft, "evaluate", lambda *args, **_: limits.append(args[4].eval_max_new_tokens) or {})
    sft.train(sft.Args(model=TINY_MODEL, task=("sort",), max_steps=1, batch_size=2, lora_rank=lora_rank,
                       output_dir=str(tmp_path)))  # fmt: skip
    assert limits == [limit]


def test_a_dataset_without_scores_is_evaluated_by_its_loss(tmp_path, own_cache, capsys):
    """Of held-out rows, per token of them all; a row is shown as it is trained on: cut, if need be."""
    rows = [{"prompt": f"S{i}:", "completion": "12" if i % 2 else "1" * 60} for i in range(10, 90)]
    path = write_rows(tmp_path / "mine.jsonl", rows)
    flags = "--max-steps 2 --max-length 20 --eval-every 1 --batch-size 4 --device cpu --learning-rate 1e-9".split()
    folder = new_run(sft, tmp_path / "runs", "--model", TINY_MODEL, "--task", path, *flags)
    out = capsys.readouterr().out
    assert "mine: 76 rows, 4 held-out ones" in out
    assert re.search(r"prompt +'S\d\d:'\ncompletion +'(12<eos>|1{16})'\n", out)
    (model, tokenizer), task = load_model(grpo.Args(model=str(folder / "model"))), load_task(path)
    logps, count = 0.0, 0
    for row in task.heldout:
        prompt, completion = encode_answers(row, [row["completion"]], tokenizer, [tokenizer.eos_token_id])
        completion = completion[: 20 - len(prompt)]
        with torch.no_grad():
            logits = model.eval()(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logps += logits.log_softmax(-1)[range(len(completion)), completion].sum().item()
        count += len(completion)
    assert all(0 < row["truncated"] <= 1 for row in metrics(folder))
    assert [row["eval/loss"] for row in metrics(folder)] == pytest.approx([-logps / count] * 2, rel=1e-4)


def test_tasks_take_turns_row_by_row(tmp_path, own_cache, monkeypatch):
    """One that is named twice comes twice as often; each has columns of its own."""
    path = write_rows(tmp_path / "mine.jsonl", [{"prompt": f"C{i}:", "completion": "1"} for i in range(40)])
    seen, update = [], sft.update
    monkeypatch.setattr(sft, "update", lambda *args: seen.append(args[2].prompt_ids) or update(*args))
    flags = "--max-steps 2 --batch-size 6 --eval-prompts 2 --eval-every 0 --device cpu".split()
    folder = new_run(sft, tmp_path / "runs", "--task", "sort", "sort", path, *flags)
    tokenizer = load_model(grpo.Args())[1]
    sort, other = map(tokenizer.convert_tokens_to_ids, "SC")
    prompts = [tokenizer.decode(row, skip_special_tokens=True) for ids in seen for row in ids if sort in row]
    assert prompts == [load_task("sort").train(i, 1)["prompt"] for i in range(8)]
    for ids in seen:
        assert [sort if sort in row else other for row in ids.tolist()] == [sort, sort, other] * 2
        assert len(ids.unique(dim=0)) == 6  # and each time with another row
    assert {"eval/sort/greedy", "eval/sort/pass@8", "eval/mine/loss"} <= metrics(folder)[-1].keys()


def test_files_of_one_name_are_two_tasks_that_hold_out_for_each_other(tmp_path, own_cache):
    paths = []
    for name, last in (("one", 40), ("two", 200)):
        (tmp_path / name).mkdir()
        rows = [{"prompt": f"S{i}:", "completion": "1"} for i in range(last)]
        paths.append(write_rows(tmp_path / name / "data.jsonl", rows))
    tasks = sft.load_tasks([*paths, paths[0]], "prompt")
    assert list(tasks) == paths
    one, two = tasks.values()
    assert one.name == "data" and two.name == "data_2"
    held = {row["prompt"] for task in (one, two) for row in task.heldout}
    assert len(one.heldout) == 2 and len(two.heldout) == 10
    seen = [{row["prompt"] for row in task.rows} for task in (one, two)]
    assert not held & set.union(*seen) and held | set.union(*seen) == {f"S{i}:" for i in range(200)}
    assert {two.train(i, 1)["prompt"] for i in range(len(seen[1]))} == seen[1]


def test_long_prompts_are_dropped_and_what_is_left_is_counted(tmp_path, own_cache, capsys):
    rows = [{"prompt": f"S{'1' * (i if i < 30 else 1)}{i}:", "completion": "1"} for i in range(60)]
    flags = ["--max-prompt-length", 9, "--max-steps", 1, "--batch-size", 2, "--eval-prompts", 1, "--device", "cpu"]
    new_run(sft, tmp_path / "runs", *flags, "--task", write_rows(tmp_path / "rows.jsonl", rows))
    out = capsys.readouterr().out
    dropped = int(re.search(r"(\d+) of 57 rows cannot be used", out)[1])
    assert 15 < dropped < 25 and f"rows: {57 - dropped} rows, " in out, out


def test_the_shipped_model_is_what_readme_says():
    """Small, ordinary, and a warm start with room above it: what it thinks likeliest is mostly wrong, what it samples
    is right more often (on countdown half of the prompts in eight samples)."""
    args = grpo.Args(sample_batch_size=512, max_completion_length=20)
    model, tokenizer = load_model(args)
    assert 0.7e6 < sum(p.numel() for p in model.parameters()) < 0.9e6
    for name, greedy, low, high, best in (("countdown", 0.05, 0.04, 0.2, 0.35), ("sort", 0.35, 0.3, 0.5, 0.8)):
        scores = evaluate(model, tokenizer, load_task(name), None, args)
        assert scores["eval/greedy"] < greedy and low < scores["eval/pass@1"] < high and scores["eval/pass@8"] > best
        assert scores["eval/greedy"] < scores["eval/pass@1"]


def test_the_new_model_is_the_shipped_one_with_random_weights(tmp_path):
    """The seed's; files of configuration and tokenizer are equal."""
    heads = []
    for seed in (1, 1, 2):
        sft.new_tiny_model(seed, str(tmp_path))
        heads.append(load_model(grpo.Args(), path=str(tmp_path))[0].lm_head.weight)
        for path in Path(TINY_MODEL).glob("*.json"):
            ours, theirs = (json.loads((folder / path.name).read_text()) for folder in (tmp_path, path.parent))
            for setting in (ours, theirs):
                setting.pop("transformers_version", None)
            assert ours == theirs
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_a_new_model_takes_the_flags_of_memory(tmp_path):
    """--model new trains adapters, too: the weights under them stay."""
    pytest.importorskip("peft", reason="not run: peft is not installed")
    args = dict(model="new", task=("sort",), max_steps=1, batch_size=4, eval_prompts=2, eval_max_new_tokens=2,
                device="cpu", threads=1, output_dir=str(tmp_path))  # fmt: skip
    sft.train(sft.Args(lora_rank=2, **args))
    (checkpoint,) = tmp_path.glob("*/checkpoint.pt")
    saved = torch.load(checkpoint, weights_only=True)["trained"]["model"]
    assert saved and all("lora_" in name for name in saved)
