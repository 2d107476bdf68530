"""Decoding with buffers that stay in place: a static cache, and on a GPU one step as a CUDA graph."""

from typing import Any

import torch
from torch import Tensor


def can_be_static(model, cache) -> bool:
    """Whether all layers of the cache are plain attention over everything before, in the form that takes a 4-D mask of
    bools: sliding windows and recurrent states are not."""
    from transformers.cache_utils import DynamicLayer

    return model.config._attn_implementation == "sdpa" and all(type(layer) is DynamicLayer for layer in cache.layers)


class StaticDecoder:
    """One decoding step of B rows at a time. `cache` holds their prompts, `mask` (B, L + T) tells padding among the
    first L columns, `position` (B, 1) is that of the next token.

    On a GPU the first step runs as it is and the second is captured; all later ones replay it, which spares the CPU a
    thousand launches a token. Under autocast linear layers get copies of their weights that are made once, here: a
    graph would cast float32 weights in every step.
    """

    def __init__(self, model, cache, mask: Tensor, position: Tensor):
        from transformers.cache_utils import Cache, StaticLayer

        class Layer(StaticLayer):
            def update(self, key_states, value_states, *args, **kwargs):
                """Under autocast the values are bfloat16 and the cache is float32."""
                return super().update(key_states.to(self.dtype), value_states.to(self.dtype))

        width, length = cache.get_seq_length(), mask.shape[1]
        self.model, self.cache = model, Cache(layers=[Layer(length) for _ in cache.layers])
        for layer, filled in zip(self.cache.layers, cache.layers):
            layer.lazy_initialization(filled.keys, filled.values)
            layer.keys[:, :, :width] = filled.keys[:, :, :width]
            layer.values[:, :, :width] = filled.values[:, :, :width]
            layer.cumulative_length.fill_(width)
        device = mask.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        self.weights = {f"{name}.{part}": p.to(low) for name, layer in model.named_modules()
                        if type(layer) is torch.nn.Linear and "forward" not in vars(layer)
                        for part, p in layer.named_parameters() if p.dtype == torch.float32 != low}  # fmt: skip
        self.start(mask[:, None, None].bool(), position, torch.tensor([width], device=mask.device))

    def start(self, mask: Tensor, position: Tensor, column: Tensor) -> None:
        self.open = mask & (torch.arange(mask.shape[-1], device=mask.device) < column)  # (B, 1, 1, L + T)
        self.token, self.position, self.column = torch.zeros_like(position), position.clone(), column
        self.steps = 0
        self.graph: Any = None

    def run(self) -> Tensor:
        self.open.index_fill_(3, self.column, True)
        inputs = dict(input_ids=self.token, attention_mask=self.open, position_ids=self.position,
                      past_key_values=self.cache, use_cache=True, logits_to_keep=1)  # fmt: skip
        # an embedding that is tied to a layer keeps its own dtype
        logits = torch.func.functional_call(self.model, self.weights, kwargs=inputs, tie_weights=False).logits
        self.column += 1
        self.position += 1
        return logits

    def __call__(self, token: Tensor) -> Tensor:
        """The logits (B, 1, V) behind the next tokens (B, 1)."""
        self.token.copy_(token)
        self.steps += 1
        if self.steps == 1 or token.device.type != "cuda":
            return self.run()
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            dtype = torch.get_autocast_dtype("cuda")
            with torch.autocast("cuda", dtype, torch.is_autocast_enabled("cuda"), cache_enabled=False):
                with torch.cuda.graph(self.graph):  # records the step and does not run it
                    self.logits = self.run()
        self.graph.replay()
        return self.logits

    def keep(self, rows: Tensor) -> None:
        """Goes on with these rows alone, with a graph of their own."""
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        self.start(self.open[rows], self.position[rows], self.column)
