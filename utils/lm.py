"""Language models: loading and saving, sampling, log-probabilities of completions.

Shapes: P prompts, G completions of each, B = P * G rows (the G completions of a prompt stand together), L prompt tokens
(padded on the left), T completion tokens (padded on the right), V vocabulary, N completion tokens without padding.
"""

import contextlib
import copy
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from utils.core import RunArgs, UserError, as_kwargs, choose_precision, preset
from utils.dist import Samples, full_weights, join, pad_left, positions, rank, shard, sharded, stream, unsharded, world

TINY_MODEL = str(Path(__file__).resolve().parent / "tiny_model")
CHUNK = 2**25  # logits that are held at once: 128 MiB in float32
LOOK_EVERY = 16  # tokens between looks at which rows have ended, on a GPU, where each look makes the CPU wait
UNREADABLE = (OSError, ValueError, ImportError, RuntimeError, SafetensorError)  # what from_pretrained raises
LARGEST_GAP = {"float32": 1e-3, "bfloat16": 0.1, "pure-bfloat16": 0.1, "server": 0.2}  # nats, mean over tokens


@dataclass
class ModelArgs(RunArgs):
    model: str = TINY_MODEL
    """folder, .gguf file or hub name of a causal language model"""
    precision: Literal["float32", "bfloat16", "pure-bfloat16"] | None = None
    """bfloat16: autocast over float32 weights, while weights that are not trained (of the reference, under LoRA) are
    bfloat16; pure-bfloat16: all weights are, and small updates round away; none: float32 for a tiny model and on a CPU
    that has no products in bfloat16, else bfloat16"""
    lora_rank: int = 0
    """train float32 LoRA adapters of this rank instead of all weights (needs peft)"""
    lora_modules: tuple[str, ...] = ()
    """names of the layers that get adapters, such as q_proj v_proj; none: all linear layers"""
    save_dtype: Literal["float32", "bfloat16"] | None = None
    """of the weights in RUN/model; none: as they were trained, merged LoRA in float32"""
    attn_implementation: str | None = None
    """sdpa, eager, flash_attention_2, ...; none: what transformers chooses"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    micro_batch_tokens: int | None = None
    """most tokens, with padding, in one forward and backward pass: rows are sorted by length; 0: micro_batch_size rows
    in their order. Changes memory and speed, not the result"""
    fsdp: bool = False
    """under torchrun: shard weights, gradients and optimizer over the processes; --precision then is bfloat16"""
    trust_remote_code: bool = False
    """run code that comes with the model, and with models of --reward"""


@dataclass
class PolicyArgs(ModelArgs):
    system_prompt: str = ""
    """system message of prompts that have none (needs a chat template)"""
    chat_template_kwargs: tuple[str, ...] = ()
    """NAME=VALUE pairs for the chat template, such as enable_thinking=false; a VALUE is read as JSON where it is JSON,
    else as text. A dataset's column chat_template_kwargs goes before them, row by row"""
    raw_prompt: bool = False
    """prompts that are text stay text, though there is a chat template: for base models"""
    eos_token: str = ""
    """what ends completions instead of the tokenizer's EOS, saved with the model: <|im_end|> for a base model that
    learns ChatML"""
    sampler: str = ""
    """http://HOST:PORT of a vLLM server that samples in place of the model: utils/vllm.py"""


def load_model(args, device: torch.device | str = "cpu", path: str = "", frozen: bool = False) -> tuple[Any, Any]:
    """--model, or the one at `path`, and its tokenizer: for training, with adapters where --lora-rank says so, or
    frozen, as a reference. Trained weights are float32, for small updates round away in bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    torch.backends.cuda.enable_cudnn_sdp(False)  # its attention plans anew for each new length, for 0.1 s
    path, gguf = str(Path(path or args.model).expanduser()), {}
    if path.endswith(".gguf"):
        path, gguf = str(Path(path).parent), {"gguf_file": Path(path).name}
    reports = logging.get_logger("transformers.modeling_utils")
    reports.addFilter(lambda record: "LOAD REPORT" not in record.getMessage())  # it would hide our own sentence
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code, **gguf)
        model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16 if choose_precision(args, device, frozen) else torch.float32,
            trust_remote_code=args.trust_remote_code, attn_implementation=args.attn_implementation,
            output_loading_info=True, ignore_mismatched_sizes=True, **gguf)  # fmt: skip
    except UNREADABLE as error:
        why = "there is none" if Path(path).is_absolute() and not Path(path).exists() else str(error).split("\n")[0]
        raise UserError(f"cannot load the model {path} ({why}): give one, as in --model FOLDER or ORG/NAME") from error
    check_whole(path, model, found)
    if gguf:  # its weights are whole now, and save_pretrained refuses those of a quantizer
        model.hf_quantizer = None
        del model.config.quantization_config
    for module in model.modules():  # no dropout: the policy that is updated is the one that sampled
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or isinstance(module, torch.nn.Dropout)):
                setattr(module, name, 0.0)
    model.fingerprint = fingerprint(model)
    if frozen:
        model.eval().requires_grad_(False)
    elif args.lora_rank:
        model = with_adapters(model, args)
    if args.gradient_checkpointing and not frozen:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = model.to(device)
    tokenizer = with_flags(tokenizer, model, args)
    if not frozen:
        tell_ends(tokenizer, model.generation_config.eos_token_id)
    return shard(model, args.precision == "bfloat16") if args.fsdp else model, tokenizer


def check_whole(path: str, model, found: dict, may_lack: int = 0) -> None:
    """Raises UserError where `path` did not hold all weights: transformers fills in random numbers."""
    lacking = sorted(found["missing_keys"])[may_lack:] + [name for name, *_ in found.get("mismatched_keys", ())]
    if lacking:
        raise UserError(f"the model {path} lacks weights of its sizes ({lacking[0]}, ...): give a whole one")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(f"{path} holds LoRA adapters: give a model that they are merged into, such as RUN/model")


def fingerprint(model) -> str:
    """Of the weights: names, sizes, and of each 64 numbers, as bfloat16, so that --precision changes nothing."""
    some = {name: (p.shape, p.detach().flatten()[:: p.numel() // 64 + 1].bfloat16().tolist())
            for name, p in model.named_parameters()}  # fmt: skip
    return hashlib.blake2b(repr(some).encode(), digest_size=8).hexdigest()


def with_adapters(model, args, kind: str = "CAUSAL_LM"):
    try:
        import peft
    except ImportError as error:
        raise UserError("--lora-rank needs peft: pip install peft") from error
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    if last is not None and first.weight is last.weight:  # merged, one's adapters would move the other, too
        ends = [name for name, module in model.named_modules() if module in (first, last)]
        if wrong := [x for x in args.lora_modules if any(f".{name}".endswith(f".{x}") for name in ends)]:
            raise UserError(
                f"the model has one weight for tokens that come and go: leave {wrong[0]} out of --lora-modules"
            )
    try:
        model = peft.get_peft_model(model, peft.LoraConfig(
            r=args.lora_rank, lora_alpha=2 * args.lora_rank, task_type=kind,
            target_modules=list(args.lora_modules) or "all-linear"))  # fmt: skip
    except ValueError as error:
        raise UserError(f"--lora-modules {' '.join(args.lora_modules)} does not fit the model ({error})") from error
    if args.gradient_checkpointing:
        model.enable_input_require_grads()
    return model


def with_flags(tokenizer, model, args):
    """The tokenizer with what utils/data.py reads there; model.generation_config gets all ids that end a completion."""
    tokenizer.system_prompt, tokenizer.raw_prompt = (getattr(args, x, "") for x in ("system_prompt", "raw_prompt"))
    tokenizer.template_kwargs = as_kwargs(getattr(args, "chat_template_kwargs", ()))
    if tokenizer.system_prompt and tokenizer.chat_template is None:
        raise UserError("--system-prompt needs a chat template, and the model has none: write it into the prompts")
    tokenizer.eos_token = getattr(args, "eos_token", "") or tokenizer.eos_token
    if (own := tokenizer.eos_token) not in tokenizer.get_vocab():
        raise UserError(f"completions of this model could never end by {own}: give --eos-token one of its tokens")
    more = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None}
    model.generation_config.eos_token_id = sorted(ends)
    return tokenizer


def tell_ends(tokenizer, eos: list[int]) -> None:
    """Warns where the chat template ends an answer by another token than those of `eos`."""
    with contextlib.suppress(Exception):  # without a template, or one that wants other messages
        said = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "9753"}]
        tail = tokenizer.apply_chat_template(said, tokenize=False).rpartition("9753")[2]
        behind = [token for token in tokenizer.tokenize(tail) if token in tokenizer.all_special_tokens]
        if behind and not {*eos} & {*tokenizer.convert_tokens_to_ids(behind)} and rank() == 0:
            print(f"warning: the chat template ends an answer by {behind[0]}, and this tokenizer by "
                  f"{tokenizer.eos_token}: --eos-token '{behind[0]}' if the model is to stop there")  # fmt: skip


def resolve(model, args, presets: dict[str, dict]) -> str:
    """Fills in every argument that was left at None from the row of `presets` for this model: lora, tiny (below 10
    million parameters) or full. Returns what to print. Raises UserError where a process would have no work."""
    size = sum(p.numel() for p in model.parameters())
    settings = preset(args, presets, "lora" if args.lora_rank else "tiny" if size < 10e6 else "full")
    steps, name = getattr(args, "num_minibatches", 1), "num_prompts" if hasattr(args, "num_prompts") else "batch_size"
    if (least := steps * world()) > getattr(args, name):
        raise UserError(f"--{name.replace('_', '-')} must be at least {least}: processes times minibatches")
    if args.precision == "pure-bfloat16" and not args.lora_rank:  # adapters are float32
        settings += "\nwarning: small updates round to nothing in bfloat16 weights: use --precision bfloat16"
    return f"{size / 1e6:.2f}M parameters in {args.precision}" + (settings and f", {settings}")


def save_model(model, tokenizer, folder: Path, args) -> None:
    """The folder that anyone's `from_pretrained` loads. LoRA: merged in float32, on the CPU, for in bfloat16 small
    changes would round away, and the adapters alone in folder/adapter. All processes call it."""
    state = full_weights(model) if sharded(model) else None
    if rank() > 0:
        return
    if args.lora_rank:
        model.save_pretrained(folder / "adapter", state_dict=state, save_embedding_layers=False)
    if state is not None:
        model, _ = load_model(replace(args, fsdp=False))
        model.load_state_dict(state)
    if args.lora_rank:
        model = copy.deepcopy(model).to("cpu", torch.float32).merge_and_unload()
    if args.save_dtype:
        model = copy.deepcopy(model).to(getattr(torch, args.save_dtype))
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def autocast(model, precision: str):
    """bfloat16 matrix products over float32 weights where `precision` is bfloat16, else nothing."""
    return torch.autocast(model.device.type, torch.bfloat16) if precision == "bfloat16" else contextlib.nullcontext()


@torch.no_grad()
def sample(model, prompt_ids: Tensor, prompt_mask: Tensor, num_samples: int, max_new_tokens: int, eos: list[int],
           temperature: float = 1.0, generator: torch.Generator | None = None) -> Samples:  # fmt: skip
    """`num_samples` completions of each prompt: plain temperature sampling (no top-k, no top-p); temperature 0 is
    greedy, and its log-probabilities are those at temperature 1.

    Each prompt is run once, and its cache repeated. Rows that have ended leave the batch when they are half of it, so
    that one long completion does not keep the others busy.
    """
    device, width, rows = prompt_ids.device, prompt_ids.shape[1], prompt_ids.shape[0] * num_samples
    training = model.training
    model.eval()
    out = model(input_ids=prompt_ids, attention_mask=prompt_mask.long(), position_ids=positions(prompt_mask),
                use_cache=True, logits_to_keep=1)  # fmt: skip
    group = torch.arange(rows, device=device) // num_samples
    cache, logits = out.past_key_values, out.logits[group]
    cache.reorder_cache(group)
    mask = torch.ones(rows, width + max_new_tokens, dtype=torch.long, device=device)
    mask[:, :width] = prompt_mask[group]
    position = mask[:, :width].sum(1, keepdim=True)
    ids = torch.zeros(rows, max_new_tokens, dtype=torch.long, device=device)
    logps = torch.zeros(rows, max_new_tokens, device=device, dtype=torch.promote_types(logits.dtype, torch.float32))
    lengths = torch.full((rows,), max_new_tokens, device=device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    alive = torch.arange(rows, device=device)  # the rows of the batch that is being run
    ends = torch.tensor(eos, device=device)
    for t in range(max_new_tokens):
        logp = (logits[:, -1].to(logps.dtype) / (temperature or 1.0)).log_softmax(-1)
        noise = torch.empty_like(logp).exponential_(generator=generator) if temperature else 1.0
        token = (logp.exp() / noise).argmax(-1, keepdim=True)  # the largest p / noise is a draw from p
        going = lengths[alive] > t
        ids[alive, t] = torch.where(going, token[:, 0], 0)
        logps[alive, t] = torch.where(going, logp.gather(1, token)[:, 0], 0.0)
        ends_now = going & torch.isin(token[:, 0], ends)
        lengths[alive] = torch.where(ends_now, t + 1, lengths[alive])
        ended[alive] |= ends_now
        if t + 1 == max_new_tokens:
            break
        if device.type == "cpu" or (t + 1) % LOOK_EVERY == 0:
            still = (lengths[alive] > t + 1).nonzero()[:, 0]
            if len(still) == 0:
                break
            if 2 * len(still) <= len(alive):
                cache.reorder_cache(still)
                alive, token, mask, position = alive[still], token[still], mask[still], position[still]
        logits = model(input_ids=token, attention_mask=mask[:, : width + t + 1], position_ids=position + t,
                       past_key_values=cache, use_cache=True, logits_to_keep=1).logits  # fmt: skip
    model.train(training)
    ids, logps = ids[:, : lengths.max()], logps[:, : lengths.max()]
    completion_mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    return Samples(prompt_ids, prompt_mask, ids, completion_mask, logps, ended)


def sample_all(model, prompts: list[list[int]], num_samples: int, args, temperature: float, *key: int | str,
               eos: list[int] | None = None) -> Samples:  # fmt: skip
    """The same for any number of prompts, in batches of --sample-batch-size completions of whole prompts, each with a
    stream of its own: `key` and its first prompt. Or the server of --sampler draws in the model's place. eos: tokens
    that end a completion, where they are not the model's."""
    longest = getattr(args, "max_completion_length", 0) or args.eval_max_new_tokens
    eos = eos or model.generation_config.eos_token_id
    if args.sampler:
        from utils.vllm import sample_by_server  # eject.py leaves it out

        return sample_by_server(model, prompts, num_samples, longest, eos, temperature, args, save_model, *key)
    at_once, parts = max(1, args.sample_batch_size // num_samples), []
    with unsharded(model), autocast(model, args.precision):
        for i in range(0, len(prompts), at_once):
            ids, mask = pad_left(prompts[i : i + at_once], model.device)
            random = stream(model.device, args.seed, *key, i)
            parts.append(sample(model, ids, mask, num_samples, longest, eos, temperature, random))
    return join(parts)


def completion_logps(model, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor,
                     temperature: float = 1.0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probabilities of completion tokens at `temperature`, (B, T) with gradient, and entropies, (B, T) without; 0
    in padding. There may be fewer prompts than completions: then each is that of the next B / P."""
    hidden = completion_states(model, prompt_ids, prompt_mask, completion_ids, completion_mask)
    weights = [p for p in model.get_output_embeddings().parameters() if p.requires_grad]
    found = TokenLogps.apply(hidden, completion_ids[completion_mask], temperature, model, *weights)
    empty = torch.zeros(completion_ids.shape, dtype=found[0].dtype, device=completion_ids.device)
    logps, entropies = (empty.masked_scatter(completion_mask, values) for values in found)
    return logps, entropies


def completion_states(model, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor,
                      completion_mask: Tensor) -> Tensor:  # fmt: skip
    """The hidden states that predict the N completion tokens, (N, D). A prompt of several completions is run once and
    its cache shared, gradient included; not with gradient checkpointing, which excludes a cache, nor with shards."""
    repeats = completion_ids.shape[0] // prompt_ids.shape[0]
    checkpointed = model.training and any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    if repeats == 1 or checkpointed or sharded(model):
        prompts = prompt_ids.repeat_interleave(repeats, 0), prompt_mask.repeat_interleave(repeats, 0)
        return after_own_prompts(model, *prompts, completion_ids, completion_mask)
    group = torch.arange(len(completion_ids), device=prompt_ids.device) // repeats
    mask = torch.cat([prompt_mask[group], completion_mask], 1)[:, :-1].long()
    hidden, cache = body(model, input_ids=prompt_ids, attention_mask=prompt_mask.long(),
                         position_ids=positions(prompt_mask), use_cache=True)  # fmt: skip
    parts = [hidden[:, -1:][group]]
    if completion_ids.shape[1] > 1:
        cache.reorder_cache(group)
        parts += body(model, input_ids=completion_ids[:, :-1], attention_mask=mask, past_key_values=cache,
                      position_ids=positions(mask)[:, prompt_ids.shape[1] :], use_cache=True)[:1]  # fmt: skip
    return torch.cat(parts, 1)[completion_mask]


def after_own_prompts(model, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor,
                      completion_mask: Tensor) -> Tensor:  # fmt: skip
    """The same for one prompt per completion. Rows are moved to the left, so that all padding is on the right, where a
    causal model does not see it: no attention mask is needed, and fast kernels take no other."""
    starts = prompt_mask.sum(1, keepdim=True)
    width = max(1, int((starts + completion_mask.sum(1, keepdim=True)).max()) - 1)
    ids = torch.cat([prompt_ids, completion_ids], 1)
    columns = torch.arange(width, device=ids.device) + prompt_ids.shape[1] - starts
    hidden, _ = body(model, input_ids=ids.gather(1, columns.clamp(max=ids.shape[1] - 1)), use_cache=False)
    rows, tokens = completion_mask.nonzero(as_tuple=True)
    return hidden[rows, starts[rows, 0] - 1 + tokens]


def body(model, **inputs) -> tuple[Tensor, Any]:
    """Hidden states as the output layer gets them, and the cache."""
    if sharded(model):  # FSDP gathers what the whole model's own forward pass needs
        out = model(**inputs, output_hidden_states=True, logits_to_keep=1)
        return out.hidden_states[-1], out.past_key_values
    out = model.get_decoder()(**inputs)
    return out.last_hidden_state, out.past_key_values


def head(model, hidden: Tensor) -> Tensor:
    """Logits of hidden states."""
    config = model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    logits = model.get_output_embeddings().forward(hidden)  # FSDP's hooks there would end the pass of the whole
    logits = logits if scale == 1 else logits * scale  # Cohere; Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    return cap * torch.tanh(logits / cap) if cap else logits


class TokenLogps(torch.autograd.Function):
    """log softmax(head(hidden) / temperature) at `ids`, and entropies without gradient: (N, D), (N,) -> (N,), (N,).

    The output layer runs on chunks of tokens, and once more in the backward pass: logits of all tokens are never held
    at once. Autograd alone would keep several copies of a chunk, and allocate each anew. Chunks add their gradients of
    the weights in float32, where autocast or weights are bfloat16, too."""

    @staticmethod
    def chunks(hidden: Tensor, temperature: float, model) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yields rows, their hidden states, their logits, and these over `temperature` in a buffer that all share."""
        size, buffer = max(1, CHUNK // model.config.get_text_config().vocab_size), None
        for start in range(0, max(1, len(hidden)), size):
            rows = slice(start, start + size)
            states = hidden[rows].detach().requires_grad_()
            logits = head(model, states)
            if buffer is None:
                dtype = torch.promote_types(logits.dtype, torch.float32)
                buffer = torch.empty(logits.shape, dtype=dtype, device=logits.device)
            yield rows, states, logits, buffer[: len(logits)].copy_(logits.detach()).div_(temperature)

    @staticmethod
    def forward(ctx, hidden, ids, temperature, model, *weights):
        device, results, spare = hidden.device.type, [], None
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        with torch.autocast(*ctx.autocast, cache_enabled=False):  # no gradient could go through what is kept here
            for rows, _, _, logits in TokenLogps.chunks(hidden, temperature, model):
                spare = torch.empty_like(logits) if spare is None else spare
                chosen, top = logits.gather(1, ids[rows, None])[:, 0], logits.amax(1, keepdim=True)
                odds = torch.sub(logits, top, out=spare[: len(logits)]).exp_()
                normaliser = odds.sum(1).log() + top[:, 0]
                entropy = normaliser - odds.mul_(logits).sum(1) / (normaliser - top[:, 0]).exp()
                results.append((chosen - normaliser, entropy, normaliser))
        logps, entropies, normalisers = (torch.cat(parts) for parts in zip(*results))
        ctx.save_for_backward(hidden, ids, normalisers, *weights)
        ctx.mark_non_differentiable(entropies)
        ctx.settings = temperature, model
        return logps, entropies

    @staticmethod
    def backward(ctx, gradient, _):
        hidden, ids, normalisers, *weights = ctx.saved_tensors
        sums = [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights]
        grad_hidden = torch.empty_like(hidden)
        with torch.autocast(*ctx.autocast), torch.enable_grad():
            for rows, states, logits, work in TokenLogps.chunks(hidden, *ctx.settings):
                slope = gradient[rows, None].to(work.dtype) / ctx.settings[0]  # times one-hot minus softmax
                work.sub_(normalisers[rows, None]).exp_().mul_(-slope).scatter_add_(1, ids[rows, None], slope)
                grad_hidden[rows], *grads = torch.autograd.grad(logits, [states, *weights], work.to(logits.dtype))
                sums = [amount.add_(grad) for amount, grad in zip(sums, grads)]
        return grad_hidden, None, None, None, *(amount.to(w.dtype) for amount, w in zip(sums, weights))


def alarm(gap: float | None, run, args) -> None:
    """Stops a run whose tokens are not scored as they were sampled. gap: the column sampler_gap, None where no token
    was trained. A server is warned of, and may be wrong in two steps running."""
    limit = LARGEST_GAP["server" if args.sampler else args.precision]
    if gap is None or gap <= limit:
        return
    wrong = f"sampler_gap is {gap:.2g} nats a token, and {limit:g} is the limit: "
    if not args.sampler:
        raise UserError(wrong + "tokens are not scored as they were sampled, so give another model or --precision")
    if [row.get("sampler_gap", math.inf) > limit for row in run.history if row["step"] > 0][-2:] == [True, True]:
        raise UserError(wrong + f"{args.sampler} does not follow the model, so restart it and --resume the run")
    run.print(f"warning: {wrong}the server may have kept old weights")
