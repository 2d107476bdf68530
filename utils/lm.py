"""Language models: sampling, and the log-probabilities of completions.

Shapes: P prompts, G completions of each, B = P * G rows (the G completions of a prompt stand together), L prompt tokens
(padded on the left), T completion tokens (padded on the right), V vocabulary.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from utils.decode import StaticDecoder, can_be_static
from utils.distributed import is_sharded, on_rank_0, share, together, total_numbers, unsharded
from utils.errors import UserError
from utils.head import CHUNK_ELEMENTS, body_and_head, token_logps

LOOK_EVERY = 16  # tokens between looks at which rows have ended, on a GPU, where each look makes the CPU wait


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
def sample(model, prompt_ids: Tensor, prompt_mask: Tensor, num_samples: int, max_new_tokens: int | list[int],
           eos: list[int], temperature: float = 1.0, generator: torch.Generator | None = None) -> Samples:  # fmt: skip
    """`num_samples` completions of each prompt: plain temperature sampling (no top-k, no top-p); temperature 0 is
    greedy, and its log-probabilities are those at temperature 1. max_new_tokens: of all prompts, or of each.

    Each prompt is run once. Rows that have ended leave the batch when they are half of it, so that one long completion
    does not keep the others busy. Raises UserError where prompt and completion can be longer than the model's context
    or `rope_limit`.
    """
    device, width, rows = prompt_ids.device, prompt_ids.shape[1], prompt_ids.shape[0] * num_samples
    most = torch.tensor(max_new_tokens, device=device).expand(len(prompt_ids))
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    limit = min(context, rope_limit(model.config))
    prompt, new = max(zip(prompt_mask.sum(1).tolist(), most.tolist()), key=sum)
    if prompt + new > limit:
        raise UserError(f"a prompt has {prompt} tokens, its completion up to {new}, --model takes {limit} in all: "
                        "allow fewer new tokens, or drop long prompts")  # fmt: skip
    max_new_tokens = int(most.max())
    training = model.training
    model.eval()
    cache, logits = prefill(model, prompt_ids, prompt_mask, num_samples)
    mask = torch.ones(rows, width + max_new_tokens, dtype=torch.long, device=device)
    mask[:, :width] = prompt_mask.repeat_interleave(num_samples, 0)
    position = mask[:, :width].sum(1, keepdim=True)
    ids = torch.zeros(rows, max_new_tokens, dtype=torch.long, device=device)
    logps = torch.zeros(rows, max_new_tokens, device=device, dtype=torch.promote_types(logits.dtype, torch.float32))
    lengths = most.repeat_interleave(num_samples)  # a row goes on up to there
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    alive = torch.arange(rows, device=device)  # the rows of the batch that is being run
    ends = torch.tensor(eos, device=device)
    wanted = getattr(model, "cuda_graphs", False) and can_be_static(model, cache)
    static = StaticDecoder(model, cache, mask, position) if wanted else None
    for t in range(max_new_tokens):
        logp = (logits[:, -1].to(logps.dtype) / (temperature or 1.0)).log_softmax(-1)
        token = logp.argmax(-1, True) if temperature == 0 else pick(logp, generator)
        going = t < lengths[alive]
        ids[alive, t] = torch.where(going, token[:, 0], 0)
        logps[alive, t] = torch.where(going, logp.gather(1, token)[:, 0], 0.0)
        ends_now = going & (token == ends).any(1)
        lengths[alive] = torch.where(ends_now, t + 1, lengths[alive])
        ended[alive] |= ends_now
        if t + 1 == max_new_tokens:
            break
        if device.type == "cpu" or (t + 1) % LOOK_EVERY == 0:
            going = (t + 1 < lengths[alive]).nonzero()[:, 0]
            if len(going) == 0:
                break
            if 2 * len(going) <= len(alive):
                (static.keep if static else cache.reorder_cache)(going)
                alive, token, mask, position = alive[going], token[going], mask[going], position[going]
        if static:
            logits = static(token)
        else:
            logits = model(input_ids=token, attention_mask=mask[:, : width + t + 1], position_ids=position + t,
                           past_key_values=cache, use_cache=True, logits_to_keep=1).logits  # fmt: skip
    model.train(training)
    length = int(lengths.max())
    completion_mask = torch.arange(length, device=device) < lengths[:, None]
    return Samples(prompt_ids, prompt_mask, ids[:, :length], completion_mask, logps[:, :length], ended)


def pick(logp: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token for each row of log-probabilities (B, V), (B, 1): where p / E is largest, E exponential (the Gumbel-max
    trick). Draws what torch.multinomial draws, but never makes the CPU wait for a GPU."""
    noise = torch.empty_like(logp).exponential_(generator=generator)
    return (logp.exp() / noise).argmax(-1, keepdim=True)


def stream(device: torch.device, *key: int | str) -> torch.Generator:
    """The generator of one batch of samples: a function of `key` (seed, purpose, step, batch) alone. So a checkpoint
    keeps no state of it, and a batch has the same samples wherever it is drawn."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest))


def join(parts: list[Samples]) -> Samples:
    """The samples of several batches of prompts as one, prompts padded to the widest, completions to the longest."""

    def cat(field: str, at_left: bool = False) -> Tensor:
        tensors = [getattr(part, field) for part in parts]
        missing = [max(t.shape[1] for t in tensors) - t.shape[1] for t in tensors]
        return torch.cat([torch.nn.functional.pad(t, (m, 0) if at_left else (0, m)) for t, m in zip(tensors, missing)])

    prompts = cat("prompt_ids", at_left=True), cat("prompt_mask", at_left=True)
    completions = cat("completion_ids"), cat("completion_mask"), cat("logps")
    return Samples(*prompts, *completions, torch.cat([part.ended for part in parts]))


def sample_all(model, prompts: list[list[int]], num_samples: int, max_new_tokens: int | list[int], eos: list[int],
               temperature: float, rows_at_once: int, key: tuple, first: int = 0) -> Samples:  # fmt: skip
    """`num_samples` completions of each of P prompts, on every rank, of at most `max_new_tokens`: one number for all
    prompts, or one for each. They are sampled in batches of up to `rows_at_once` completions of whole prompts, each
    batch by one rank and with a stream of its own, `key` and the number of its first prompt (that of the first batch is
    `first`): so all ranks together draw what one would. Servers of --sampler get the model's weights and draw in its
    place; what they are found to do is then in model.sampler_columns."""
    at_once, engine = max(1, rows_at_once // num_samples), getattr(model, "engine", None)
    draw_batch = engine.sample if engine else partial(sample, model)

    def draw() -> dict[int, Samples]:
        parts = {}
        for i in share(range(0, len(prompts), at_once)):
            most = max_new_tokens if isinstance(max_new_tokens, int) else max_new_tokens[i : i + at_once]
            part = draw_batch(*pad_left(prompts[i : i + at_once], model.device), num_samples, most, eos, temperature,
                              stream(model.device, *key, first + i))  # fmt: skip
            parts[i] = Samples(*(x.cpu() for x in part))
        return parts

    with unsharded(model):
        if engine:
            engine.servers = on_rank_0(lambda: engine.load(model))
        parts = {i: part for found in together(draw) for i, part in found.items()}
        if engine and temperature > 0:
            model.sampler_columns = on_rank_0(lambda: engine.check(model, temperature))
    return Samples(*(x.to(model.device) for x in join([parts[i] for i in sorted(parts)])))


def completion_logps(model, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor,
                     temperature: float = 1.0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probabilities of completion tokens at `temperature`, (B, T) with gradient, and entropies, (B, T) without.

    Logits of CHUNK_ELEMENTS are held at a time: the output layer runs on a chunk of hidden states, and once more in the
    backward pass. Padded positions have no logits and hold 0.
    """
    _, head, layer = body_and_head(model)
    hidden = completion_states(model, prompt_ids, prompt_mask, completion_ids, completion_mask)
    weights = [] if layer is None else [p for p in layer.parameters() if p.requires_grad]
    size = max(1, CHUNK_ELEMENTS // model.config.get_text_config().vocab_size)
    found = token_logps(hidden, completion_ids[completion_mask], temperature, head, size, weights)
    empty = torch.zeros(completion_ids.shape, dtype=found[0].dtype, device=completion_ids.device)
    logps, entropies = (empty.masked_scatter(completion_mask, values) for values in found)
    return logps, entropies


def compare(function: Callable, models: Sequence, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor,
            completion_mask: Tensor) -> list[Tensor]:  # fmt: skip
    """`function(ids, *logits)` gets tokens (n,) and each model's logits (n, V) for them, and returns tensors (n,): here
    for all completion tokens, (B, T) with gradient. Padded positions hold 0.

    Logits of CHUNK_ELEMENTS / 4 are held at a time, of each model and in each copy that `function` makes of them: it
    runs on a chunk of hidden states, and once more in the backward pass.
    """
    inputs = prompt_ids, prompt_mask, completion_ids, completion_mask
    columns = [completion_ids[completion_mask], *(completion_states(model, *inputs) for model in models)]
    heads, device = [body_and_head(model)[1] for model in models], completion_ids.device.type

    def run(ids: Tensor, *states: Tensor) -> list[Tensor]:
        autocast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        with torch.autocast(device, *autocast, cache_enabled=False):  # so chunks add their gradients in float32
            return function(ids, *(head(chunk) for head, chunk in zip(heads, states)))

    size = max(1, CHUNK_ELEMENTS // 4 // max(model.config.get_text_config().vocab_size for model in models))
    chunks = zip(*(column.split(size) for column in columns))
    parts = [checkpoint(run, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    found = [torch.cat(values) for values in zip(*parts)]
    return [values.new_zeros(completion_ids.shape).masked_scatter(completion_mask, values) for values in found]


def completion_states(model, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor,
                      completion_mask: Tensor) -> Tensor:  # fmt: skip
    """The hidden states that predict the N completion tokens, (N, D).

    P may be smaller than B: then row i completes prompt i // (B / P), each prompt is run once, and its cache, gradient
    included, is shared by its group. Prompts are repeated instead where `shares_cache` says no, with gradient
    checkpointing, which excludes a cache, and under FSDP, where all ranks must run equally many passes.
    """
    body, _, _ = body_and_head(model)
    repeats = completion_ids.shape[0] // prompt_ids.shape[0]
    checkpointed = model.training and any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    if repeats > 1 and not checkpointed and not is_sharded(model) and shares_cache(model):
        return after_shared_prompts(body, prompt_ids, prompt_mask, completion_ids, completion_mask)
    prompts = prompt_ids.repeat_interleave(repeats, 0), prompt_mask.repeat_interleave(repeats, 0)
    return after_prompts(body, *prompts, completion_ids, completion_mask)


def after_shared_prompts(body: Callable, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor,
                         completion_mask: Tensor) -> Tensor:  # fmt: skip
    """The hidden states that predict the N completion tokens, (N, D). Each prompt is run once for its group."""
    repeats, width = completion_ids.shape[0] // prompt_ids.shape[0], prompt_ids.shape[1]
    mask = torch.cat([prompt_mask.repeat_interleave(repeats, 0), completion_mask], 1)
    hidden, cache = body(
        input_ids=prompt_ids, attention_mask=prompt_mask.long(), position_ids=positions(prompt_mask), use_cache=True
    )
    hidden = hidden[:, -1:].repeat_interleave(repeats, 0)
    if completion_ids.shape[1] > 1:
        cache.reorder_cache(torch.arange(len(prompt_ids), device=prompt_ids.device).repeat_interleave(repeats))
        rest, _ = body(input_ids=completion_ids[:, :-1], attention_mask=mask[:, :-1].long(), past_key_values=cache,
                       position_ids=positions(mask)[:, width:-1], use_cache=True)  # fmt: skip
        hidden = torch.cat([hidden, rest], 1)
    return hidden[completion_mask]


def after_prompts(body: Callable, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor,
                  completion_mask: Tensor) -> Tensor:  # fmt: skip
    """The same for prompts (B, L), one for each completion. Rows are moved to the left, so that all padding is on the
    right, where a causal model does not see it: no attention mask is needed, and fast kernels take no other."""
    starts = prompt_mask.sum(1, keepdim=True)
    width = int((starts + completion_mask.sum(1, keepdim=True)).max()) - 1
    ids = torch.cat([prompt_ids, completion_ids], 1)
    columns = torch.arange(width, device=ids.device) + prompt_ids.shape[1] - starts
    hidden, _ = body(input_ids=ids.gather(1, columns.clamp(max=ids.shape[1] - 1)), use_cache=False)
    rows, tokens = completion_mask.nonzero(as_tuple=True)
    return hidden[rows, starts[rows, 0] - 1 + tokens]


def split_rows(lengths: list[int], size: int, tokens: int | None) -> list[list[int]]:
    """Which rows make each micro-batch: `size` of them, in their order. Where `tokens` is given, rows are sorted by
    length, and a micro-batch has at most that many tokens with its padding (one row may have more). Then the longest
    come first, so that memory that is too small shows at once."""
    if not tokens:
        return [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        room = tokens // lengths[batches[-1][0]] if batches else 0
        if batches and len(batches[-1]) < min(size, room):
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def micro_batches(samples: Samples, size: int, tokens: int | None = None,
                  together: int = 1) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]]:  # fmt: skip
    """Yields (rows, arguments of completion_logps) of `size` completions each, trimmed to their own longest; whole
    groups share their prompt. With `tokens`: as `split_rows` has it, with a prompt for each completion, and `together`
    completions that stand together stay so."""
    prompt_ids, prompt_mask, ids, mask, _, _ = samples
    group = len(ids) // len(prompt_ids)
    lengths = (prompt_mask.sum(1).repeat_interleave(group) + mask.sum(1)).view(-1, together).amax(1)
    for units in split_rows(lengths.tolist(), size // together, tokens and tokens // together):
        rows = (torch.tensor(units)[:, None] * together + torch.arange(together)).flatten().to(ids.device)
        prompts = rows // group if tokens else (rows // group).unique_consecutive()
        left = prompt_mask.shape[1] - int(prompt_mask[prompts].sum(1).max())
        right = int(mask[rows].sum(1).max())
        yield rows, (prompt_ids[prompts, left:], prompt_mask[prompts, left:], ids[rows, :right], mask[rows, :right])


class Means:
    """Means of per-token values over the micro-batches of an optimizer step, on all ranks. They stay on the device
    until the end: to read them earlier would make the CPU wait."""

    def __init__(self, count: Tensor | int):
        """count: how many values the whole step has, over all its micro-batches."""
        self.count, self.sums = count, {}

    @torch.no_grad()
    def add(self, mask: Tensor | int, **values: Tensor) -> None:
        """The values of one micro-batch where `mask` is true, both (B, T)."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + (value * mask).sum() / self.count

    def read(self) -> dict[str, float]:
        return total_numbers({name: total.item() for name, total in self.sums.items()})
