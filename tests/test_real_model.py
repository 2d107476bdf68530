"""benchmarks/real_model.py on a model of two layers with a chat template and files shaped as GSM8K."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks import page, real_model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_small_chat_model(folder) -> None:
    """Bytes as tokens, as Qwen2 with two layers."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   additional_special_tokens=["<|im_start|>"], chat_template=CHATML)  # fmt: skip
    config = Qwen2Config(vocab_size=len(fast), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, eos_token_id=fast.eos_token_id)  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def test_the_command_for_a_gpu_runs_on_a_small_model(tmp_path, monkeypatch):
    pytest.importorskip("peft", reason="not run: peft is not installed")
    save_small_chat_model(tmp_path / "model")
    for name, count in (("train", 12), ("test", 5)):
        rows = [{"question": f"{name} {i}?", "answer": f"It is {i}.\n#### {i}"} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "real_model.json"
    real_model.main(str(tmp_path / "model"), f"gsm8k:{tmp_path}", smoke=True, output=output)
    result = json.loads(output.read_text())
    assert [row["step"] for row in result["curve"]] == [0, 1, 2]
    assert {"eval/greedy", "eval/pass@1"} <= result["curve"][0].keys()
    assert result["sampling"].keys() == {"tokens_per_second", "share"} and result["seconds"]["step"] > 0
    monkeypatch.setattr(page, "read", lambda name: result | {"smoke": False, "gpu": "NVIDIA X", "hours": 2})
    assert "NVIDIA X" in page.real_models() and "never run by us.**" not in page.real_models()
    monkeypatch.setattr(page, "read", lambda name: result)
    assert "never run by us.**" in page.real_models()  # a try without a GPU is no run
