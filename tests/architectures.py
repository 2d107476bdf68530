"""Models of many architectures with random weights, and how far sampler and scorer are from plain forward passes.

Models of two layers, of transformers' own classes, in float32. Windows and chunks of attention are shorter than the
sequences. Prompts of 9, 4 and 1 tokens, padded on the left; 3 completions of each, of up to 12 tokens, that end at
different lengths. Plain: every row alone, unpadded, no cache.
"""

import torch
import transformers

from utils.dist import Samples, pad_left
from utils.lm import completion_logps, sample

PROMPTS, G, T, WINDOW = (9, 4, 1), 3, 12, 6
COMMON = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=1,
              tie_word_embeddings=False, initializer_range=0.2)  # fmt: skip
HEADS = COMMON | dict(head_dim=8)
OLD = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
           initializer_range=0.2)  # fmt: skip
GPT = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
SLIDING = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
               shared_expert_intermediate_size=16)  # fmt: skip
GROUPS = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1,
              first_k_dense_replace=1)  # fmt: skip
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=4, mamba_expand=2)
DELTA = dict(layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4, linear_num_key_heads=2,
             linear_key_head_dim=8, linear_value_head_dim=8)  # fmt: skip
NOISY = {"PhiMoE": ("Phimoe", COMMON | dict(num_local_experts=16))}  # draws in training
GEMMA = HEADS | SLIDING | dict(vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, num_kv_shared_layers=0)
ARCHITECTURES = {  # name -> class, settings; "...Config" where it is not the class's own
    "Llama": ("Llama", COMMON | dict(tie_word_embeddings=True)),
    "Mistral": ("Mistral", HEADS | dict(sliding_window=WINDOW)),
    "Ministral": ("Ministral", HEADS | SLIDING),
    "Mixtral": ("Mixtral", COMMON | dict(num_local_experts=4, sliding_window=WINDOW)),
    "Qwen2": ("Qwen2", COMMON | dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)),
    "Qwen2-MoE": ("Qwen2Moe", COMMON | EXPERTS),
    "Qwen3": ("Qwen3", HEADS),
    "Qwen3-MoE": ("Qwen3Moe", HEADS | EXPERTS),
    "Gemma": ("Gemma", HEADS),
    "Gemma 2": ("Gemma2", HEADS | SLIDING | dict(final_logit_softcapping=2.0)),
    "Gemma 3": ("Gemma3", HEADS | SLIDING, "Gemma3TextConfig"),
    # we pad with id 0, and the square root of a zero embedding, which a random padding token has, has no gradient
    "Gemma 3n": ("Gemma3n", GEMMA | dict(pad_token_id=63, laurel_rank=4, altup_num_inputs=2, intermediate_size=[48, 48],
                                         activation_sparsity_pattern=[0.5, 0.0]), "Gemma3nTextConfig"),
    "Gemma 4": ("Gemma4", GEMMA | dict(global_head_dim=8), "Gemma4TextConfig"),
    "Phi": ("Phi", COMMON),
    "Phi 3": ("Phi3", COMMON | dict(sliding_window=WINDOW)),
    "OLMo 2": ("Olmo2", COMMON),
    "OLMo 3": ("Olmo3", COMMON | SLIDING),
    "OLMoE": ("Olmoe", COMMON | EXPERTS),
    "GPT-NeoX": ("GPTNeoX", OLD | dict(intermediate_size=48)),
    "GPT-2": ("GPT2", GPT),
    "GPT-J": ("GPTJ", GPT | dict(rotary_dim=4)),
    "GPT-Neo": ("GPTNeo", dict(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64,
                               attention_types=[[["global", "local"], 1]], window_size=WINDOW, initializer_range=0.2)),
    "OPT": ("OPT", OLD | dict(ffn_dim=48, word_embed_proj_dim=32, init_std=0.2)),
    "BLOOM": ("Bloom", dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2)),
    "Falcon, rotary": ("Falcon", OLD),
    "Falcon, ALiBi": ("Falcon", OLD | dict(alibi=True, multi_query=False)),
    "MPT": ("Mpt", dict(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, initializer_range=0.2)),
    "SmolLM 3": ("SmolLM3", COMMON | dict(no_rope_layers=[1, 0])),
    "Cohere 2": ("Cohere2", COMMON | SLIDING | dict(logit_scale=0.3)),
    "GLM 4": ("Glm4", HEADS),
    "GLM 4 MoE": ("Glm4Moe", HEADS | GROUPS),
    "Granite": ("Granite", COMMON | dict(logits_scaling=4.0)),
    "StarCoder 2": ("Starcoder2", COMMON | dict(sliding_window=WINDOW)),
    "StableLM": ("StableLm", COMMON),
    "Nemotron": ("Nemotron", COMMON),
    "EXAONE 4": ("Exaone4", HEADS | SLIDING | dict(sliding_window_pattern=2)),
    "gpt-oss": ("GptOss", HEADS | SLIDING | dict(num_local_experts=4, num_experts_per_tok=2)),
    "DeepSeek-V3": ("DeepseekV3", COMMON | GROUPS | dict(num_key_value_heads=4, kv_lora_rank=8, q_lora_rank=8,
                                                         qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)),
    "MiniMax, attention": ("MiniMax", HEADS | EXPERTS | dict(layer_types=["full_attention", "full_attention"])),
    # of attention and recurrence, whose caches do not go on from a prompt with several tokens at once
    "Qwen3.5": ("Qwen3_5", HEADS | DELTA, "Qwen3_5TextConfig"),
    "Qwen3.5-MoE": ("Qwen3_5Moe", HEADS | DELTA | EXPERTS, "Qwen3_5MoeTextConfig"),
    "Qwen3-Next": ("Qwen3Next", HEADS | DELTA | EXPERTS),
    "OLMo-Hybrid": ("OlmoHybrid", HEADS | DELTA),
    "LFM2": ("Lfm2", COMMON | dict(layer_types=["conv", "full_attention"])),
    "LFM2-MoE": ("Lfm2Moe", COMMON | EXPERTS | dict(layer_types=["conv", "full_attention"], num_dense_layers=1)),
    "Granite 4 H": ("GraniteMoeHybrid", COMMON | MAMBA | EXPERTS | dict(layer_types=["mamba", "attention"],
                                                                        shared_intermediate_size=16)),
    "Falcon-H1": ("FalconH1", HEADS | MAMBA | dict(mamba_d_ssm=64)),
    "Jamba": ("Jamba", COMMON | dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, num_experts=4,
                                     expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False)),
    "Bamba": ("Bamba", COMMON | MAMBA | dict(attn_layer_indices=[1])),
    "Zamba": ("Zamba", HEADS | dict(layers_block_type=["mamba", "hybrid"], mamba_d_state=8, n_mamba_heads=2,
                                    mamba_dt_rank=4, use_mamba_kernels=False, attention_head_dim=16)),
}  # fmt: skip


RECURRENT = [*ARCHITECTURES][[*ARCHITECTURES].index("Qwen3.5") :]


def make(name: str, **more):
    """A model of random weights, seed 0; `more` settings of its configuration."""
    kind, settings, *config = (ARCHITECTURES | NOISY)[name]
    torch.manual_seed(0)
    made = getattr(transformers, config[0] if config else f"{kind}Config")(**settings | more)
    return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()


def plain_logps(model, samples: Samples) -> torch.Tensor:
    """(B, T): one row at a time, unpadded, through the model's own forward pass."""
    rows, repeats = [], len(samples.completion_ids) // len(samples.prompt_ids)
    for i, mask in enumerate(samples.completion_mask):
        prompt = samples.prompt_ids[i // repeats][samples.prompt_mask[i // repeats]]
        ids = torch.cat([prompt, samples.completion_ids[i][mask]])
        found = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])
        rows.append(torch.nn.functional.pad(found[len(prompt) - 1 :, 0], (0, int((~mask).sum()))))
    return torch.stack(rows)


def measure(model, shared: bool) -> dict[str, float]:
    """The largest |log-probability - plain one| over tokens, of sampler and scorer; of a weighted sum of the scorer's
    the gradient, |difference| / |plain one|. shared: whether the scorer runs each prompt once for its group."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 64, (n,), generator=generator).tolist() for n in PROMPTS]
    samples = sample(model, *pad_left(prompts, "cpu"), G, T, [*range(1, 8)], 1.0, generator)
    weights = torch.randn(samples.completion_ids.shape, generator=generator)
    own = samples[:2] if shared else [x.repeat_interleave(G, 0) for x in samples[:2]]
    scores, gradients = [], []
    for found in (completion_logps(model, *own, *samples[2:4])[0], plain_logps(model, samples)):
        model.zero_grad()
        (found * weights).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        scores.append(found.detach())
    (ours, plain), lengths = gradients, samples.completion_mask.sum(1)
    assert len(lengths.unique()) > 2 and plain.norm() > 0
    return {
        "sampler": (samples.logps - scores[1]).abs().max().item(),
        "scorer": (scores[0] - scores[1]).abs().max().item(),
        "gradient": ((ours - plain).norm() / plain.norm()).item(),
    }
