"""sft.py: what is trained and what is not, and the split into micro-batches. The loss: test_parity_transformers.py."""

import re

import pytest
import torch
from helpers import metrics, new_run, write_rows
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from algos import sft
from utils.models import TINY_MODEL, load_model
from utils.tasks import load_task, load_tasks
from utils.text import encode_row

CHAT = (
    "{% for m in messages %}{{ 'C' if m.role == 'user' else 'S' }}{{ m.content }}<eos>+{% endfor %}"
    "{% if add_generation_prompt %}S{% endif %}"
)
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
    args = sft.Args(micro_batch_size=micro_batch_size, max_grad_norm=1e9, precision="float32")
    metrics = sft.update(model, torch.optim.SGD(model.parameters(), lr=1.0), batch, args)
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}, metrics


@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_and_order_do_not_change_the_gradient(size):
    whole, _ = gradients(PAIRS, 4)
    split, _ = gradients(PAIRS[::-1], size)
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], rtol=1e-10, atol=1e-12)


def test_sft_loss_by_hand():
    logps = torch.tensor([[-1.0, -2.0, -4.0], [-8.0, -16.0, -32.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert sft.sft_loss(logps, mask, 5).item() == pytest.approx((1 + 2 + 8) / 5)


def test_completions_end_with_their_first_eos():
    """Plain text gets one EOS; a template's tokens after its EOS are dropped; a chat prompt is not part of it."""
    _, tokenizer = load_model(TINY_MODEL)
    eos = tokenizer.eos_token_id
    prompt, completion = encode_row({"prompt": "S21:", "completion": "12"}, tokenizer, [eos])
    assert tokenizer.decode(prompt) == "S21:" and tokenizer.decode(completion) == "12<eos>"
    tokenizer.chat_template = CHAT
    prompt, completion = encode_row({"prompt": "21", "completion": "12"}, tokenizer, [eos])
    assert tokenizer.decode(prompt) == "C21<eos>+S" and tokenizer.decode(completion) == "12<eos>"
    messages = [{"role": "user", "content": "21"}]
    answer = [{"role": "assistant", "content": "12"}]
    assert encode_row({"prompt": messages, "completion": answer}, tokenizer, [eos]) == (prompt, completion)


@pytest.mark.parametrize("lora_rank, limit", [(0, 32), (2, 512)])
def test_answers_in_evaluation_are_as_long_as_the_model_needs(lora_rank, limit, tmp_path, monkeypatch):
    """The embedded model's limit would cut off nearly every answer of a real model."""
    if lora_rank:
        pytest.importorskip("peft", reason="not run: peft is not installed")
    limits = []
    monkeypatch.setattr(sft, "evaluate", lambda *args, **_: limits.append(args[6]) or {})
    sft.train(sft.Args(model=TINY_MODEL, task=("sort",), max_steps=1, batch_size=2, lora_rank=lora_rank,
                       output_dir=str(tmp_path)))  # fmt: skip
    assert limits == [limit]


def test_a_dataset_without_scores_is_evaluated_by_its_loss(tmp_path, own_cache, capsys):
    """Of held-out rows, without dropout, per token of them all; a row is shown, and how many were cut."""
    rows = [{"prompt": f"S{i}:", "completion": "12" if i % 2 else "1" * 60} for i in range(10, 90)]
    path = write_rows(tmp_path / "mine.jsonl", rows)
    flags = "--max-steps 2 --max-length 20 --eval-every 1 --batch-size 4 --device cpu --learning-rate 1e-9".split()
    folder = new_run(sft, tmp_path / "runs", "--model", TINY_MODEL, "--task", path, *flags)
    out = capsys.readouterr().out
    assert "mine: 76 rows, 4 held-out ones; 40 completions are cut off" in out
    assert re.search(r"prompt +'S\d\d:'\ncompletion +'(12<eos>|1{16})'\n", out)
    (model, tokenizer), task = load_model(str(folder / "model")), load_task(path)
    logps, count = 0.0, 0
    for row in task.heldout:
        prompt, completion = encode_row(row, tokenizer, [tokenizer.eos_token_id])
        completion = completion[: 20 - len(prompt)]
        with torch.no_grad():
            logits = model.eval()(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logps += logits.log_softmax(-1)[range(len(completion)), completion].sum().item()
        count += len(completion)
    assert [row["eval/loss"] for row in metrics(folder)] == pytest.approx([-logps / count] * 2, rel=1e-4)


def test_files_of_one_name_are_two_tasks_that_hold_out_for_each_other(tmp_path, own_cache):
    paths = []
    for name, last in (("one", 40), ("two", 200)):
        (tmp_path / name).mkdir()
        rows = [{"prompt": f"S{i}:", "completion": "1"} for i in range(last)]
        paths.append(write_rows(tmp_path / name / "data.jsonl", rows))
    tasks = load_tasks([*paths, paths[0]], "prompt")
    assert [task.name for task in tasks] == ["data", "data_2", "data"]
    held = {row["prompt"] for task in tasks for row in task.heldout}
    assert len(tasks[0].heldout) == 2 and len(tasks[1].heldout) == 10
    seen = [{row["prompt"] for row in task.rows} for task in tasks]
    assert not held & set.union(*seen) and held | set.union(*seen) == {f"S{i}:" for i in range(200)}
    assert {tasks[1].train(i, 1)["prompt"] for i in range(len(seen[1]))} == seen[1]


def test_the_loss_in_evaluation_is_without_dropout():
    config = GPT2Config(vocab_size=16, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.5)
    model = GPT2LMHeadModel(config).train()
    args = sft.Args(micro_batch_size=2, precision="float32")
    assert sft.heldout_loss(model, PAIRS, args) == sft.heldout_loss(model, PAIRS, args) and model.training


def test_the_shipped_model_is_what_readme_says():
    """Small, ordinary, and a warm start with room above it: what it thinks likeliest is mostly wrong, what it samples
    is right more often (on countdown half of the prompts in eight samples)."""
    from utils.evaluation import evaluate

    model, tokenizer = load_model(TINY_MODEL)
    assert 0.7e6 < sum(p.numel() for p in model.parameters()) < 0.9e6
    for name, greedy, low, high, best in (("countdown", 0.05, 0.04, 0.2, 0.35), ("sort", 0.35, 0.3, 0.5, 0.8)):
        scores = evaluate(model, tokenizer, load_task(name), None, 128, 8, 20, 1.0, 1)
        assert scores["eval/greedy"] < greedy and low < scores["eval/pass@1"] < high and scores["eval/pass@8"] > best
        assert scores["eval/greedy"] < scores["eval/pass@1"]


def test_a_new_model_takes_the_flags_of_memory(tmp_path):
    """--model new trains adapters, too: the weights under them stay."""
    pytest.importorskip("peft", reason="not run: peft is not installed")
    args = dict(model="new", task=("sort",), max_steps=1, batch_size=4, eval_prompts=2, eval_max_new_tokens=2,
                device="cpu", threads=1, output_dir=str(tmp_path))  # fmt: skip
    sft.train(sft.Args(lora_rank=2, **args))
    (checkpoint,) = tmp_path.glob("*/checkpoints/step-00000001.pt")
    saved = torch.load(checkpoint, weights_only=True)["model"]
    assert saved and all("lora_" in name for name in saved)
