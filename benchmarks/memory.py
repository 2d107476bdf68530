"""The memory that grpo.py needs with a model, computed before anything is downloaded but its config.json.

    python benchmarks/memory.py --model Qwen/Qwen2.5-0.5B        folder or hub name
    python benchmarks/memory.py --table                          the table in benchmarks/README.md

What depends on the architecture, activations and cache, has no formula. So one and two layers of the real width with
few words run on this machine, the bytes that autograd keeps for their tokens are counted, and the rest is extrapolated.
Settings are grpo.py's own for such models, with prompts of 200 tokens. Left out: the CUDA context and fragmentation (1
to 2 GB). GB = 1e9 bytes.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import tyro
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos import grpo  # noqa: E402
from utils.lm import CHUNK, autocast, body, with_adapters  # noqa: E402

PROMPT, RANK = 200, 32  # tokens; of the adapters
# Peaks of `completion_logps` and `sample` under autocast, by the sizes of all tensors that lived.
LOGIT_BYTES = 20  # for each logit of a sampled row
CHUNK_BYTES, HEAD_BYTES = 10, 12  # for each logit of a chunk, and for each trained weight of the output layer
QWEN = dict(model_type="qwen2", num_key_value_heads=2, tie_word_embeddings=True, vocab_size=151_936)
MODELS = {  # from their config.json
    "Qwen2.5-0.5B": QWEN | dict(num_hidden_layers=24, hidden_size=896, intermediate_size=4864, num_attention_heads=14),
    "Qwen2.5-1.5B": QWEN | dict(num_hidden_layers=28, hidden_size=1536, intermediate_size=8960, num_attention_heads=12),
    "Qwen2.5-3B": QWEN | dict(num_hidden_layers=36, hidden_size=2048, intermediate_size=11_008, num_attention_heads=16),
    "Qwen2.5-7B": dict(model_type="qwen2", num_hidden_layers=28, hidden_size=3584, intermediate_size=18_944,
                       num_attention_heads=28, num_key_value_heads=4, vocab_size=152_064),
    "Llama-3.1-8B": dict(model_type="llama", num_hidden_layers=32, hidden_size=4096, intermediate_size=14_336,
                         num_attention_heads=32, num_key_value_heads=8, vocab_size=128_256),
}  # fmt: skip
README = ROOT / "benchmarks/README.md"
START, END = "<!-- memory: python benchmarks/memory.py --table -->\n", "<!-- end of memory -->"


def some_layers(config, layers: int, rank: int):
    """A model of so many layers with few words, as it would be trained."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    settings = config.to_dict() | dict(num_hidden_layers=layers, vocab_size=128, pad_token_id=None, bos_token_id=None)
    if settings.get("layer_types"):
        settings["layer_types"] = settings["layer_types"][:layers]
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(type(config)(**settings), dtype=torch.float32)
    for p in model.parameters():
        p.data.fill_(0.01)
    if rank:
        model = with_adapters(model.requires_grad_(False).to(torch.bfloat16), grpo.Args(lora_rank=rank))
        for p in model.parameters():
            p.data = p.data.float() if p.requires_grad else p.data
    return model


def measure(model) -> dict[str, Any]:
    """Bytes of weights, of a token's activations and of its cache, by 112 tokens, all alike, so that experts do not
    change with their number."""

    def run(tokens: int, **how) -> tuple[int, Tensor, Any]:
        """The bytes that autograd keeps, the hidden states, the cache."""
        kept = {}

        def pack(tensor: Tensor) -> Any:  # to return the tensor would tie it to its own graph, for ever
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage

        ids = torch.zeros(1, tokens, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed), autocast(model, "bfloat16"):
            hidden, cache = body(model, input_ids=ids, **how)
        return sum(storage.nbytes() for storage in kept.values()), hidden, cache

    def held(layer) -> int:
        return sum(value.nbytes for value in vars(layer).values() if isinstance(value, Tensor))

    model.eval()
    (short, _, _), (middle, _, _), (long, hidden, _) = (run(tokens, use_cache=False) for tokens in (16, 32, 64))
    with torch.no_grad():
        less, more = (run(tokens, use_cache=True)[2].layers[-1] for tokens in (16, 32))
    square, slope = ((long - middle) / 32 - (middle - short) / 16) / 48, (held(more) - held(less)) / 16
    parameters = {p.data_ptr(): p for p in model.parameters()}.values()  # some are shared
    own = {p.data_ptr() for layer in (model.get_input_embeddings(), model.get_output_embeddings())
           for p in layer.parameters()}  # fmt: skip
    cast = [p for p in parameters if p.dim() > 1 and p.dtype == torch.float32 and p.data_ptr() not in own]
    return {
        "weights": sum(p.nbytes for p in parameters if p.data_ptr() not in own),
        "trained": sum(p.nbytes for p in parameters if p.requires_grad and p.data_ptr() not in own),
        "frozen": 2 * sum(p.numel() for p in parameters if p.data_ptr() not in own),  # as a reference in bfloat16
        "cast": 2 * sum(p.numel() for p in cast),  # copies in bfloat16, which autocast keeps for the backward pass
        "token": (middle - short) / 16 - 48 * square, "square": square,  # square: for each pair of tokens of a row
        "cache": slope, "row": held(less) - 16 * slope, "hidden": hidden.element_size() * hidden.shape[-1],
    }  # fmt: skip


def sizes_of(config, rank: int) -> SimpleNamespace:
    one, two = (measure(some_layers(config, layers, rank)) for layers in (1, 2))
    layers, words = config.num_hidden_layers, config.hidden_size * config.vocab_size
    both = words * (1 if config.tie_word_embeddings else 2)  # embeddings and output layer
    sizes = {name: one[name] + (layers - 1) * (two[name] - one[name]) for name in one}
    sizes |= {"cache": layers * two["cache"], "row": layers * two["row"], "hidden": two["hidden"]}
    sizes["weights"] += (2 if rank else 4) * both
    sizes["frozen"] += 2 * both
    if not rank:
        sizes["trained"], sizes["cast"] = sizes["trained"] + 4 * both, sizes["cast"] + 2 * words
    return SimpleNamespace(**sizes, layers=layers, words=words, vocab=config.vocab_size)


def predict(config, rank: int = 0, checkpointing: bool = False) -> dict[str, float]:
    """GB of each part, `all` at the most, and a checkpoint on `disk`."""
    sizes, args = sizes_of(config, rank), SimpleNamespace(**grpo.PRESETS["lora" if rank else "full"])
    width, tokens = PROMPT + args.max_completion_length, max(PROMPT, args.micro_batch_tokens)
    token = sizes.token + sizes.square * width
    if checkpointing:
        token = token / sizes.layers + (sizes.layers + 3) * sizes.hidden
    needs = {
        "weights": sizes.weights, "gradients": sizes.trained, "Adam": 2 * sizes.trained,
        "reference": 0 if rank else sizes.frozen, "copies in bfloat16": sizes.cast,
        "activations": tokens * (token + sizes.hidden),
        "output layer": CHUNK_BYTES * min(CHUNK, tokens * sizes.vocab) + HEAD_BYTES * (0 if rank else sizes.words),
        "cache": args.sample_batch_size * (sizes.row + sizes.cache * width),
        "sampled logits": LOGIT_BYTES * args.sample_batch_size * sizes.vocab,
    }  # fmt: skip
    parts = list(needs.values())
    needs |= {"all": sum(parts[:5]) + max(sum(parts[5:7]), sum(parts[7:])), "disk": 3 * sizes.trained}
    return {name: size / 1e9 for name, size in needs.items()}


def draw(models: dict[str, Any]) -> str:
    names = "all weights | with `--gradient-checkpointing` | `--lora-rank 32` | both | on disk, all weights, LoRA"
    lines = [f"| | {names} |", "|---" * 6 + "|"]
    for name, config in models.items():
        needs = [predict(config, rank, checkpointing) for rank in (0, RANK) for checkpointing in (False, True)]
        cells = [f"{found['all']:.0f}" for found in needs] + [f"{needs[0]['disk']:.1f}, {needs[2]['disk']:.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(model: str = "", table: bool = False) -> None:
    """Prints GB.

    Args:
        model: folder or hub name
        table: write the table of benchmarks/README.md
    """
    from transformers import AutoConfig

    if model:
        config = AutoConfig.from_pretrained(model)
        for how, rank in (("all weights", 0), (f"--lora-rank {RANK}", RANK)):
            needs = predict(config, rank)
            print(f"{how}: " + ", ".join(f"{name} {size:.1f}" for name, size in needs.items() if size))
        print(draw({model: config}))
    if table:
        lines = draw({name: AutoConfig.for_model(**settings) for name, settings in MODELS.items()})
        before, _, rest = README.read_text().partition(START)
        README.write_text(before + START + lines + "\n" + END + rest.partition(END)[2])
        print(lines)


if __name__ == "__main__":
    tyro.cli(main)
