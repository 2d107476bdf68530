"""Language models: sampling, and the log-probabilities of completions.

Shapes: P prompts, G completions of each, B = P * G rows (the G completions of a prompt stand together), L prompt tokens
(padded on the left), T completion tokens (padded on the right), V vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from utils.errors import UserError

CHUNK_ELEMENTS = 2**25  # float32 logits that are normalised at once: 128 MiB
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # of `completion_logps`, after the model


class Samples(NamedTuple):
    """Completions of a batch of prompts. A completion's mask covers its first EOS and nothing after."""

    prompt_ids: Tensor  # (P, L) int64
    prompt_mask: Tensor  # (P, L) bool
    completion_ids: Tensor  # (B, T) int64
    completion_mask: Tensor  # (B, T) bool
    logps: Tensor  # (B, T) float32: log-probability of each token when it was sampled, at the sampling temperature
    ended: Tensor  # (B,) bool: whether EOS was reached; False where the length limit cut the completion off


def positions(mask: Tensor) -> Tensor:
    """Position ids that count real tokens only, so that left padding shifts nothing. (B, L) -> (B, L)."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def pad_left(prompts: list[list[int]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Token lists -> ids and mask (P, L). Padding is id 0: the mask, never the id, tells what is padding."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[False] * (length - len(p)) + [True] * len(p) for p in prompts], device=device)
    return ids, mask


def rope_limit(config) -> float:
    """The length beyond which rotary embeddings of all tokens change (rope types longrope and dynamic): cached keys no
    longer fit, and neither do shorter rows of the same batch. Infinite for others."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}  # of the model, or of each kind of layers
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    limits = [kind["original_max_position_embeddings"] for kind in kinds if kind["rope_type"] == "longrope"]
    return min(limits + [config.max_position_embeddings for kind in kinds if kind["rope_type"] == "dynamic"],
               default=math.inf)  # fmt: skip


def shares_cache(model) -> bool:
    """Whether a cached prompt can be scored on with several tokens at once: where every layer that looks back is
    attention. Recurrent states, as in Jamba or Qwen3.5, go on one token at a time, as the sampler does."""
    from transformers import DynamicCache

    layers = DynamicCache(config=model.config).layers if hasattr(model.config, "num_hidden_layers") else []
    return not any(hasattr(layer, "recurrent_states") for layer in layers)


def prefill(model, prompt_ids: Tensor, prompt_mask: Tensor, repeats: int):
    """Runs each prompt once and repeats its cache for the completions of its group.

    Returns the cache of B = P * repeats rows and the logits of the first completion token, (B, 1, V). Under bfloat16
    autocast most architectures' caches are float32 all the same, because rotary position embeddings are.
    """
    out = model(input_ids=prompt_ids, attention_mask=prompt_mask.long(), position_ids=positions(prompt_mask),
                use_cache=True, logits_to_keep=1)  # fmt: skip
    rows = torch.arange(len(prompt_ids), device=prompt_ids.device).repeat_interleave(repeats)
    out.past_key_values.reorder_cache(rows)  # recurrent layers have this, and no batch_repeat_interleave
    return out.past_key_values, out.logits.repeat_interleave(repeats, 0)


@torch.no_grad()
def sample(model, prompt_ids: Tensor, prompt_mask: Tensor, num_samples: int, max_new_tokens: int, eos: list[int],
           temperature: float = 1.0, generator: torch.Generator | None = None) -> Samples:  # fmt: skip
    """`num_samples` completions of each prompt: plain temperature sampling (no top-k, no top-p); temperature 0 is
    greedy, and its log-probabilities are those at temperature 1.

    Each prompt is run once. Rows that have ended leave the batch when they are half of it, so that one long completion
    does not keep the others busy. Raises UserError where prompt and completion can be longer than the model's context
    or `rope_limit`.
    """
    device, width, rows = prompt_ids.device, prompt_ids.shape[1], prompt_ids.shape[0] * num_samples
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    limit = min(context, rope_limit(model.config))
    if width + max_new_tokens > limit:
        raise UserError(f"a prompt has {width} tokens, its completion up to {max_new_tokens}, --model takes {limit} in "
                        "all: allow fewer new tokens, or drop long prompts")  # fmt: skip
    training = model.training
    model.eval()
    cache, logits = prefill(model, prompt_ids, prompt_mask, num_samples)
    mask = torch.ones(rows, width + max_new_tokens, dtype=torch.long, device=device)
    mask[:, :width] = prompt_mask.repeat_interleave(num_samples, 0)
    position = mask[:, :width].sum(1, keepdim=True)
    ids = torch.zeros(rows, max_new_tokens, dtype=torch.long, device=device)
    logps = torch.zeros(
        rows, max_new_tokens, device=device, dtype=logits.dtype if logits.dtype == torch.float64 else None
    )
    lengths = torch.full((rows,), max_new_tokens, device=device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    alive = torch.arange(rows, device=device)  # the rows of the batch that is being run
    ends = torch.tensor(eos, device=device)
    for t in range(max_new_tokens):
        logp = (logits[:, -1].to(logps.dtype) / (temperature or 1.0)).log_softmax(-1)
        token = logp.argmax(-1, True) if temperature == 0 else torch.multinomial(logp.exp(), 1, generator=generator)
        open_rows = ~ended[alive]
        ids[alive, t] = torch.where(open_rows, token[:, 0], 0)
        logps[alive, t] = torch.where(open_rows, logp.gather(1, token)[:, 0], 0.0)
        ends_now = open_rows & torch.isin(token[:, 0], ends)
        lengths[alive[ends_now]] = t + 1
        ended[alive[ends_now]] = True
        going = (~ended[alive]).nonzero()[:, 0]
        if len(going) == 0 or t + 1 == max_new_tokens:
            break
        if 2 * len(going) <= len(alive):
            cache.reorder_cache(going)
            alive, token, mask, position = alive[going], token[going], mask[going], position[going]
        logits = model(input_ids=token, attention_mask=mask[:, : width + t + 1], position_ids=position + t,
                       past_key_values=cache, use_cache=True, logits_to_keep=1).logits  # fmt: skip
    model.train(training)
    length = int(lengths.max())
    completion_mask = torch.arange(length, device=device) < lengths[:, None]
    return Samples(prompt_ids, prompt_mask, ids[:, :length], completion_mask, logps[:, :length], ended)


def join(parts: list[Samples]) -> Samples:
    """The samples of several batches of prompts as one, prompts padded to the widest, completions to the longest."""

    def cat(field: str, at_left: bool = False) -> Tensor:
        tensors = [getattr(part, field) for part in parts]
        missing = [max(t.shape[1] for t in tensors) - t.shape[1] for t in tensors]
        return torch.cat([torch.nn.functional.pad(t, (m, 0) if at_left else (0, m)) for t, m in zip(tensors, missing)])

    prompts = cat("prompt_ids", at_left=True), cat("prompt_mask", at_left=True)
    completions = cat("completion_ids"), cat("completion_mask"), cat("logps")
    return Samples(*prompts, *completions, torch.cat([part.ended for part in parts]))


def completion_logps(model, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor,
                     temperature: float = 1.0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probabilities of completion tokens at `temperature`, (B, T) with gradient, and entropies, (B, T) without.

    P may be smaller than B: then row i completes prompt i // (B / P), each prompt is run once, and its cache, gradient
    included, is shared by its group. Prompts are repeated instead where `shares_cache` says no and with gradient
    checkpointing, which excludes a cache.
    Padded positions hold 0: what lies there could be large enough for a ratio to overflow, and infinity times 0 is NaN.
    """
    repeats, width = completion_ids.shape[0] // prompt_ids.shape[0], prompt_ids.shape[1]
    mask = torch.cat([prompt_mask.repeat_interleave(repeats, 0), completion_mask], 1)
    checkpointed = model.training and any(
        getattr(module, "gradient_checkpointing", False) for module in model.modules()
    )
    if repeats > 1 and not checkpointed and shares_cache(model):
        cache, first = prefill(model, prompt_ids, prompt_mask, repeats)
        logits = first
        if completion_ids.shape[1] > 1:
            rest = model(input_ids=completion_ids[:, :-1], attention_mask=mask[:, :-1].long(), past_key_values=cache,
                         position_ids=positions(mask)[:, width:-1], use_cache=True).logits  # fmt: skip
            logits = torch.cat([first, rest], 1)
    else:
        ids = torch.cat([prompt_ids.repeat_interleave(repeats, 0), completion_ids], 1)[:, :-1]
        logits = model(input_ids=ids, attention_mask=mask[:, :-1].long(), position_ids=positions(mask[:, :-1]),
                       use_cache=False, logits_to_keep=completion_ids.shape[1]).logits  # fmt: skip
    tokens = max(1, CHUNK_ELEMENTS // logits.shape[2])
    chunks = [
        checkpoint(token_logps, *chunk, temperature, use_reentrant=False)
        for chunk in zip(logits.flatten(0, 1).split(tokens), completion_ids.flatten().split(tokens))
    ]
    logps, entropies = (torch.cat(parts).view(completion_ids.shape) for parts in zip(*chunks))
    return logps.masked_fill(~completion_mask, 0.0), entropies.masked_fill(~completion_mask, 0.0)


def token_logps(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) at `ids`, and the entropy (no gradient). (N, V), (N,) -> (N,), (N,)."""
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    normaliser = logits.logsumexp(-1)
    with torch.no_grad():
        entropy = normaliser - ((logits - normaliser[..., None]).exp() * logits).sum(-1)
    return logits.gather(-1, ids[..., None])[..., 0] - normaliser, entropy


class Means:
    """Means of per-token values over the micro-batches of an optimizer step. They stay on the device until the end: to
    read them earlier would make the CPU wait."""

    def __init__(self, count: Tensor | int):
        """count: how many values the whole step has, over all its micro-batches."""
        self.count, self.sums = count, {}

    @torch.no_grad()
    def add(self, mask: Tensor | int, **values: Tensor) -> None:
        """The values of one micro-batch where `mask` is true, both (B, T)."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + (value * mask).sum() / self.count

    def read(self) -> dict[str, float]:
        return {name: total.item() for name, total in self.sums.items()}
