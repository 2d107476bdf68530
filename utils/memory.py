"""The memory that training a language model needs, predicted before the first step.

What depends on the architecture, activations and cache, has no formula: a few tokens run through the model itself, and
the bytes that autograd keeps for them, and their cache, are counted. Left out: the CUDA context and fragmentation (1 to
2 GB), and the pass over the prompts in sampling.
"""

import os
from dataclasses import replace
from itertools import chain, combinations
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from utils.errors import UserError
from utils.head import CHUNK_ELEMENTS, body_and_head
from utils.models import autocast

SMALL = 10e6  # weights of models that fit everywhere, of which nothing is said
ADAPTERS = 32  # rank of the adapters that are proposed
# Peaks of `completion_logps` and `sample` in float32 and under autocast, by the sizes of all tensors that lived.
LOGIT_BYTES = 20  # for each logit of a sampled row
HEAD_BYTES = {"float32": (14, 8), "bfloat16": (10, 12)}  # for each logit of a chunk, and for each weight of the head

TOTALS = ("fixed", "all", "disk")


def measure(model, precision: str, others: list | tuple = ()) -> SimpleNamespace:
    """What `predict` knows of the models in memory. Runs 112 tokens through the model, all alike, so that experts do
    not change with their number. others: what else is trained."""
    body, _, _ = body_and_head(model)
    config, training = model.config.get_text_config(), model.training
    parameters = {p.data_ptr(): p for part in (model, *others) for p in part.parameters()}  # some are shared
    layer = getattr(model, "get_output_embeddings", lambda: None)()
    head = {p.data_ptr(): p for p in layer.parameters()} if layer else {}
    looked_up = {p.data_ptr() for p in model.get_input_embeddings().parameters()} - head.keys()

    def run(tokens: int, **how) -> tuple[int, Tensor, Any]:
        """The bytes that autograd keeps, the hidden states, the cache."""
        kept = {}

        def pack(tensor: Tensor) -> Any:  # to return the tensor would tie it to its own graph, for ever
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage

        ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed), autocast(model.device, precision):
            hidden, cache = body(input_ids=ids, **how)
        return sum(storage.nbytes() for storage in kept.values()), hidden, cache

    def held(layer) -> int:
        return sum(value.nbytes for value in vars(layer).values() if isinstance(value, Tensor))

    model.eval()  # nothing is drawn, and nothing is checkpointed
    (short, _, _), (middle, _, _), (long, hidden, _) = (run(tokens, use_cache=False) for tokens in (16, 32, 64))
    with torch.no_grad():
        caches = [getattr(run(tokens, use_cache=True)[2], "layers", ()) for tokens in (16, 32)]
    model.train(training)
    square = ((long - middle) / 32 - (middle - short) / 16) / 48
    slopes = [(held(more) - held(less)) / 16 for less, more in zip(*caches)]
    matrices = [p for ptr, p in parameters.items() if p.dim() > 1 and p.dtype == torch.float32 and ptr not in looked_up]
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not layer]
    return SimpleNamespace(
        precision=precision,  # at which it was measured
        weights=sum(p.nbytes for p in parameters.values()),
        trained=sum(p.nbytes for p in parameters.values() if p.requires_grad),
        others=sum(p.nbytes for p in parameters.values()) - sum(p.nbytes for p in model.parameters()),
        count=sum(p.numel() for p in model.parameters()),
        adapters=sum(m.in_features + m.out_features for m in linear),  # numbers that LoRA of rank 1 would add
        # bfloat16 copies of weights, which autocast keeps for the backward pass
        cast=2 * sum(p.numel() for p in matrices) if precision == "bfloat16" else 0,
        head=sum(p.numel() for p in head.values()), head_trained=any(p.requires_grad for p in head.values()),
        # bytes of activations for each token, and for each pair of tokens of a row, where attention's probabilities are
        # kept; of the residual stream, for each token
        token=(middle - short) / 16 - 48 * square, square=square, hidden=hidden.element_size() * config.hidden_size,
        layers=config.num_hidden_layers, vocab=config.vocab_size if layer else 0,
        # of each layer: bytes of a row, of each of its tokens, and the most tokens
        cache=[(held(part) - 16 * slope, slope, getattr(part, "sliding_window", None) or torch.inf)
               for part, slope in zip(caches[0], slopes)],
    )  # fmt: skip


def predict(sizes: SimpleNamespace, args, prompt: int | None = None, pairs: int = 1, reference: bool = False,
            passes: int = 1) -> dict[str, float]:  # fmt: skip
    """Bytes of each part, `fixed` (what stays all the time) and `all` at the most, and a checkpoint on `disk`.

    prompt: tokens of the longest one that is answered; None: nothing is sampled. pairs: completions in a row of the
    micro-batch. reference: whether a reference is loaded where beta > 0. passes: forward passes before one backward.
    """
    weights, trained, cast, head_trained = sizes.weights, sizes.trained, sizes.cast, sizes.head_trained
    frozen = (4 if args.precision == "float32" else 2) * sizes.count
    if args.lora_rank and trained == weights:  # proposed, not what was measured
        trained, cast, head_trained = 4 * args.lora_rank * sizes.adapters + sizes.others, 0, False
        weights = frozen + trained
    elif args.precision != sizes.precision:  # pure-bfloat16, proposed
        weights, trained, cast = 2 * sizes.count + sizes.others, 2 * sizes.count + sizes.others, 0
    new = getattr(args, "max_completion_length", None) or getattr(args, "eval_max_new_tokens", None) or 0
    width = args.max_length if hasattr(args, "max_length") else (prompt or 0) + new
    tokens = args.micro_batch_size * pairs * width
    if args.micro_batch_tokens:
        tokens = max(pairs * width, min(tokens, args.micro_batch_tokens))
    token = sizes.token + sizes.square * width
    if args.gradient_checkpointing:
        token = token / sizes.layers + (sizes.layers + 3) * sizes.hidden
    chunk, weight = HEAD_BYTES["float32" if args.precision == "float32" else "bfloat16"]
    rows = 0 if prompt is None else max(args.sample_batch_size, getattr(args, "num_generations", 1))
    needs = {
        "weights": weights, "gradients": trained, "Adam": 2 * trained,
        "reference": frozen if reference and args.beta and not args.lora_rank else 0,
        "copies in bfloat16": cast, "activations": passes * tokens * (token + sizes.hidden),
        "output layer": chunk * min(CHUNK_ELEMENTS, tokens * sizes.vocab) + weight * head_trained * sizes.head,
        "cache": rows * sum(c + slope * min((prompt or 0) + new, window) for c, slope, window in sizes.cache),
        "sampled logits": LOGIT_BYTES * rows * sizes.vocab,
    }  # fmt: skip
    parts = list(needs.values())
    return needs | {"fixed": sum(parts[:4]), "all": sum(parts[:5]) + max(sum(parts[5:7]), sum(parts[7:])),
                    "disk": 3 * trained}  # fmt: skip


def remedies(sizes: SimpleNamespace, args, memory: float, **shapes) -> dict[str, Any]:
    """The fewest arguments to change, the mildest first, so that the prediction fits into `memory`; none where nothing
    would do."""

    def lowered(name: str, default: int, least: int) -> list[tuple[str, int]]:
        now = getattr(args, name, None) or default
        return [(name, now >> halvings) for halvings in (1, 2, 4) if now >> halvings >= least]

    options = [
        ("gradient_checkpointing", True), *lowered("micro_batch_tokens", 8192, 256),
        *lowered("sample_batch_size", 1, 1), *[("lora_rank", ADAPTERS)] * (not args.lora_rank),
        ("precision", "pure-bfloat16"), *lowered("max_completion_length", 1, 64),
    ]  # fmt: skip
    options = [option for option in options if hasattr(args, option[0])]
    for some in chain.from_iterable(combinations(options, count) for count in range(1, 7)):
        if predict(sizes, replace(args, **dict(some)), **shapes)["all"] <= memory:
            return dict(some)
    return {}


def device_memory(device: torch.device) -> float:
    """Bytes that this process may use: of a GPU what is free and what it has already; else the machine's RAM."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(model, args, others: list | tuple = (), **shapes) -> str:
    """A line for the terminal on what the run needs (shapes: of `predict`), with a warning where that is more than the
    device has; nothing for a small model, or one of which each process holds a part. Raises UserError where the fixed
    part alone is more."""
    if args.fsdp or sum(p.numel() for p in model.parameters()) < SMALL:
        return ""
    sizes, memory = measure(model, args.precision, others), device_memory(model.device)
    needs = predict(sizes, args, **shapes)
    parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in needs.items() if size and name not in TOTALS)
    line = f"\nmemory in GB, predicted: {parts}; at most {needs['all'] / 1e9:.1f} at once, of {memory / 1e9:.1f}; a "
    line += f"checkpoint on disk {needs['disk'] / 1e9:.1f}"
    if needs["all"] <= memory:
        return line
    changes = remedies(sizes, args, memory, **shapes)
    how = f"{flags(changes)} would make it fit" if changes else "no flags make it fit: take a smaller model"
    if needs["fixed"] <= memory:
        return f"{line}\nwarning: that is more than there is: {how}"
    there = f"--device {args.device} has {memory / 1e9:.1f}"
    raise UserError(f"weights, gradients and optimizer need {needs['fixed'] / 1e9:.1f} GB, and {there}: {how}")


def flags(changes: dict[str, Any]) -> str:
    """As they are typed."""
    typed = (f"--{name.replace('_', '-')}" + f" {value}" * (value is not True) for name, value in changes.items())
    return " ".join(typed)
