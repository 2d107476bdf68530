"""The output layer of a language model, run on chunks of hidden states: logits of all tokens are never held at once.

Shapes: N tokens, D numbers in a hidden state, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from utils.distributed import is_sharded

CHUNK_ELEMENTS = 2**25  # logits that are held at once: 128 MiB in float32


def same(logits: Tensor) -> Tensor:
    return logits


PARTS: WeakKeyDictionary = WeakKeyDictionary()  # model -> its body and head


def body_and_head(model) -> tuple[Callable, Callable, Any]:
    """body(**inputs) -> hidden states and cache; head(hidden states) -> logits; the layer that the head applies. Where
    the model does something to its logits that `head` does not know, the body computes them, the head does nothing, and
    the layer is None."""
    if model not in PARTS:
        PARTS[model] = find_parts(model)
    return PARTS[model]


@torch.no_grad()
def find_parts(model) -> tuple[Callable, Callable, Any]:
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    layer: Any = getattr(model, "get_output_embeddings", lambda: None)()
    decoder: Any = getattr(model, "get_decoder", lambda: None)()
    sharded = is_sharded(model)

    def body(**inputs) -> tuple[Tensor, Any]:
        if sharded:  # FSDP gathers what the whole model's own forward pass needs
            out = model(**inputs, output_hidden_states=True, logits_to_keep=1)
            return out.hidden_states[-1], out.past_key_values
        out = decoder(**inputs)
        return out.last_hidden_state, out.past_key_values

    def head(hidden: Tensor) -> Tensor:
        logits = layer.forward(hidden) if sharded else layer(hidden)  # FSDP's hooks there end the pass of the whole
        logits = logits if scale == 1 else logits * scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def whole(**inputs) -> tuple[Tensor, Any]:
        out = model(**inputs)
        return out.logits, out.past_key_values

    if layer is not None and decoder is not None and decoder is not model:
        training, ids = model.training, torch.tensor([[1, 0, 2]], device=model.device)
        model.eval()  # where nothing is drawn
        expected, ours = model(input_ids=ids, use_cache=False).logits, head(body(input_ids=ids, use_cache=False)[0])
        model.train(training)
        if ours.shape == expected.shape and (ours - expected).abs().max() <= 1e-3 * expected.abs().max():
            return body, head, layer
    return whole, same, None


def token_logps(hidden: Tensor, ids: Tensor, temperature: float, head: Callable = same, size: int | None = None,
                weights: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:  # fmt: skip
    """log softmax(head(hidden) / temperature) at `ids`, and the entropy (no gradient). (N, D), (N,) -> (N,), (N,).

    size: tokens whose logits are held at once. weights: what the head applies, where it is trained."""
    return TokenLogps.apply(hidden, ids, temperature, head, size or max(1, len(ids)), *weights)


def chunks(
    hidden: Tensor, temperature: float, head: Callable, size: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yields rows, their hidden states, their logits, and these over `temperature` in a buffer that all chunks share:
    float32, or float64 where the logits are."""
    buffer = None
    for start in range(0, max(1, len(hidden)), size):
        rows = slice(start, start + size)
        states = hidden[rows].detach().requires_grad_()
        logits = head(states)
        if buffer is None:
            dtype = torch.promote_types(logits.dtype, torch.float32)
            buffer = torch.empty(min(size, len(hidden)), logits.shape[1], dtype=dtype, device=logits.device)
        scaled = buffer[: len(logits)].copy_(logits.detach())
        yield rows, states, logits, scaled if temperature == 1 else scaled.div_(temperature)


class TokenLogps(torch.autograd.Function):
    """What `token_logps` does. Autograd alone would keep several copies of a chunk, and allocate each anew. Chunks add
    their gradients of the weights in float32, where autocast or weights are bfloat16, too."""

    @staticmethod
    def forward(ctx, hidden, ids, temperature, head, size, *weights):
        device, results, spare = hidden.device.type, [], None
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        with torch.autocast(*ctx.autocast, cache_enabled=False):  # no gradient could go through what is kept here
            for rows, _, _, logits in chunks(hidden, temperature, head, size):
                spare = torch.empty_like(logits) if spare is None else spare
                chosen, top = logits.gather(1, ids[rows, None])[:, 0], logits.amax(1, keepdim=True)
                odds = torch.sub(logits, top, out=spare[: len(logits)]).exp_()
                total = odds.sum(1)
                normaliser = total.log() + top[:, 0]
                entropy = normaliser - odds.mul_(logits).sum(1) / total
                results.append((chosen - normaliser, entropy, normaliser))
        logps, entropies, normalisers = (torch.cat(parts) for parts in zip(*results))
        ctx.save_for_backward(hidden, ids, normalisers, *weights)
        ctx.mark_non_differentiable(entropies)
        ctx.settings = temperature, head, size
        return logps, entropies

    @staticmethod
    def backward(ctx, gradient, _):
        hidden, ids, normalisers, *weights = ctx.saved_tensors
        grad_hidden, sums = torch.empty_like(hidden), [None] * len(weights)
        with torch.autocast(*ctx.autocast), torch.enable_grad():
            for rows, states, logits, work in chunks(hidden, *ctx.settings):
                slope = gradient[rows, None].to(work.dtype) / ctx.settings[0]  # times one-hot minus softmax
                work.sub_(normalisers[rows, None]).exp_().mul_(-slope).scatter_add_(1, ids[rows, None], slope)
                grad_hidden[rows], *grads = torch.autograd.grad(logits, [states, *weights], work.to(logits.dtype))
                grads = [grad if grad.dtype == torch.float64 else grad.float() for grad in grads]
                sums = [grad if so_far is None else so_far.add_(grad) for so_far, grad in zip(sums, grads)]
        return grad_hidden, None, None, None, None, *(total.to(w.dtype) for total, w in zip(sums, weights))
