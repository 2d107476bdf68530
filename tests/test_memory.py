"""benchmarks/memory.py: what two layers say of a whole model, and bytes that can be counted."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.memory import measure, sizes_of, some_layers
from utils.lm import with_adapters

CONFIG = dict(num_hidden_layers=4, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
              vocab_size=3000)  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind, rank", [("qwen2", 0), ("qwen2", 8), ("llama", 0)])
def test_two_layers_stand_for_all(kind, rank, tied):
    config = AutoConfig.for_model(model_type=kind, tie_word_embeddings=tied, **CONFIG)
    sizes, whole = sizes_of(config, rank), measure(some_layers(config, 4, rank))
    for name in ("trained", "cast", "token", "square"):
        own = 4 * 64 * 3000 * (1 if tied else 2) if name == "trained" and not rank else 0
        own = 2 * 64 * 3000 if name == "cast" and not rank else own
        assert getattr(sizes, name) == pytest.approx(whole[name] + own)
    # layers, keys and values, heads, their width, bytes: autocast keeps keys in float32, and values with them
    assert sizes.cache == 4 * 2 * 2 * 16 * (2 if rank else 4) and sizes.row == 0
    model = AutoModelForCausalLM.from_config(config)
    count = sum(p.numel() for p in model.parameters())
    adapters = 0
    if rank:
        from algos import grpo

        model = with_adapters(model, grpo.Args(lora_rank=rank))
        adapters = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert sizes.weights == (2 * count + 4 * adapters if rank else 4 * count) and sizes.frozen >= 2 * count
