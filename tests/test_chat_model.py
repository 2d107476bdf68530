"""A real chat model, SmolLM2-135M-Instruct: what the small ones prove holds with its template, tokenizer and sizes."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from helpers import assert_same_result, command_line, copied_at, metrics, new_run, weights, write_rows
from safetensors.torch import load_file

from algos import dpo, grpo, sft
from benchmarks.chat_model import FOLDER, ROOT
from utils.data import encode_answers, encode_prompt
from utils.dist import as_samples, pad_left
from utils.eject import eject
from utils.lm import completion_logps, load_model, sample

pytestmark = pytest.mark.skipif(
    not FOLDER.exists(), reason="not run: python benchmarks/chat_model.py fetches the model"
)
QUESTIONS = [
    "What is 2 + 3?", "Name a colour.", "Is water wet? Answer yes or no.", "Spell the word cat.", "Say hello.",
    "What is the capital of France? Answer with one word.", "Count to five.", "7 - 4 =",
]  # fmt: skip
SYSTEM = "You answer with one word."
TURNS = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello!"}]


def graded(completions, **_) -> list[float]:
    return [len(completion[0]["content"]) % 3 / 2 for completion in completions]


@pytest.fixture(scope="module")
def chat():
    return load_model(grpo.Args(model=str(FOLDER)))


@pytest.fixture(scope="module")
def prompts(chat) -> list[list[int]]:
    return [encode_prompt({"prompt": question}, chat[1]) for question in QUESTIONS]


@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_greedy_answers_are_those_of_transformers(count, chat, prompts):
    """Token by token, of so many prompts in one batch that is padded on the left."""
    model, tokenizer = chat
    more = [encode_prompt({"prompt": f"{7 * i} + {i} = ?"}, tokenizer) for i in range(count - 8)]
    ids, mask = pad_left(prompts + more, "cpu")
    assert len({len(prompt) for prompt in prompts}) > 4
    eos = model.generation_config.eos_token_id
    ours = sample(model, ids, mask, 1, 12, eos, 0.0)
    theirs = model.generate(ids, attention_mask=mask.long(), do_sample=False, max_new_tokens=12, eos_token_id=eos,
                            pad_token_id=tokenizer.pad_token_id)[:, ids.shape[1] :]  # fmt: skip
    for tokens, keep, answer in zip(ours.completion_ids, ours.completion_mask, theirs):
        assert tokens[keep].tolist() == answer[: keep.sum()].tolist()
    assert ours.ended.any() and not ours.ended.all()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampler_and_scorer_agree(chat, prompts, temperature):
    model, _ = chat
    samples = sample(model, *pad_left(prompts[:4], "cpu"), 2, 12, model.generation_config.eos_token_id, temperature,
                     torch.Generator().manual_seed(0))  # fmt: skip
    with torch.no_grad():
        logps, _ = completion_logps(model, *samples[:4], temperature)
    torch.testing.assert_close(samples.logps, logps, rtol=0, atol=2e-3)


@pytest.mark.parametrize("system", ["", SYSTEM])
def test_prompts_are_what_the_template_makes(system):
    _, tokenizer = load_model(grpo.Args(model=str(FOLDER), system_prompt=system))
    for prompt in QUESTIONS[0], [*TURNS, {"role": "user", "content": QUESTIONS[0]}]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [{"role": "system", "content": system}, *messages] if system else messages
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(encode_prompt({"prompt": prompt}, tokenizer)) == text


@pytest.mark.parametrize("prompt", [QUESTIONS[0], [*TURNS, {"role": "user", "content": QUESTIONS[0]}]])
def test_what_is_trained_is_the_whole_conversation(chat, prompt):
    """Prompt and answers, of sft.py and dpo.py, are the template's tokens up to the answer's <|im_end|>, which is
    trained."""
    model, tokenizer = chat
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    first, *rest = encode_answers({"prompt": prompt}, ["5", "Five."], tokenizer, model.generation_config.eos_token_id)
    for answer, ids in zip(("5", "Five."), rest):
        conversation = [*turns, {"role": "assistant", "content": answer}]
        whole = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=True)["input_ids"]
        assert first + ids == whole[: len(whole) - whole[::-1].index(end)]
    samples = as_samples([(first, *rest)], 512, "cpu")
    assert samples.ended.all() and [ids[mask][-1] for ids, mask in zip(*samples[2:4])] == [end, end]


@pytest.mark.parametrize("module", [grpo, sft, dpo], ids=["grpo", "sft", "dpo"])
def test_a_step_with_lora(module, tmp_path):
    """The adapters move, the sampler's numbers are the scorer's, and the merged model is whole."""
    rows = [{"prompt": question, "chosen": "Yes.", "rejected": "No.", "completion": "Yes."} for question in QUESTIONS]
    task = write_rows(tmp_path / "rows.jsonl", rows)
    more = {
        "grpo": "--reward test_chat_model:graded --num-prompts 2 --num-generations 2 --max-completion-length 6",
        "sft": "--batch-size 2",
        "dpo": "--batch-size 2",
    }[module.NAME]
    flags = "--device cpu --max-steps 1 --lora-rank 4 --precision float32 --learning-rate 1e-2 --eval-prompts 1"
    run = new_run(module, tmp_path / "runs", "--model", FOLDER, "--task", task, *flags.split(), *more.split())
    (row,) = [row for row in metrics(run) if "grad_norm" in row]
    assert row["grad_norm"] > 0 and row.get("sampler_gap", 0.0) < 1e-4
    before, after = load_file(FOLDER / "model.safetensors"), weights(run)
    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])


ONLINE = (f"--model {FOLDER} --device cpu --num-prompts 2 --num-generations 2 --max-completion-length 6 --beta 0 "
          "--eval-prompts 1 --eval-samples 1 --max-steps 2 --save-every 1 --precision float32")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("precision, near", [("float32", 1e-4), ("bfloat16", 0.1)])
def test_micro_batches_change_nothing(precision, near, chat, prompts):
    """The whole gradient, of rows one by one and by tokens, beside that of one float32 batch; in bfloat16 roughly."""
    samples = sample(chat[0], *pad_left(prompts[:4], "cpu"), 2, 12, chat[0].generation_config.eos_token_id, 1.0,
                     torch.Generator().manual_seed(0))  # fmt: skip
    found = []
    for size, tokens, how in ((8, 0, "float32"), (2, 0, precision), (8, 90, precision)):
        model = copy.deepcopy(chat[0])
        args = grpo.Args(num_generations=2, micro_batch_size=size, micro_batch_tokens=tokens, precision=how, beta=0.0)
        grpo.update(model, torch.optim.SGD(model.parameters(), 0.0), grpo.Batch(samples, torch.arange(8.0), None), args)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert found[0].norm() > 0.9 and all((other - found[0]).norm() < near for other in found[1:])  # clipped to 1


@pytest.mark.slow
def test_resumed_ejected_and_in_two_processes(tmp_path):
    """A run of two steps, resumed after the first one, and of the ejected script, is the same bit for bit. Two
    processes train, and their sampler's numbers are the scorer's."""
    reward = "def graded(completions, **_): return [len(str(x)) % 3 / 2 for x in completions]"
    (tmp_path / "rewards.py").write_text(reward)
    task = write_rows(tmp_path / "rows.jsonl", [{"prompt": question} for question in QUESTIONS * 4])
    flags = [*ONLINE.split(), "--task", task, "--reward", f"{tmp_path}/rewards.py:graded"]
    with copied_at(1, tmp_path / "stopped"):
        whole = new_run(grpo, tmp_path / "runs", *flags)
    command_line(grpo, "--resume", tmp_path / "stopped")
    assert_same_result(tmp_path / "stopped", whole)
    (tmp_path / "mine.py").write_text(eject(ROOT / "algos/grpo.py"))
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", 2, ROOT / "algos/grpo.py"]
    for name, words in (("mine", [tmp_path / "mine.py"]), ("two", torchrun)):
        command = [sys.executable, *words, *flags, "--threads", 1, "--output-dir", tmp_path / name]
        subprocess.run(list(map(str, command)), check=True, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"})
    (mine,), (two,) = (list((tmp_path / name).iterdir()) for name in ("mine", "two"))
    assert_same_result(mine, whole)
    assert max(row.get("sampler_gap", 0.0) for row in metrics(two)) < 1e-4
    assert not torch.equal(weights(two)["model.norm.weight"], weights(mine)["model.norm.weight"])
