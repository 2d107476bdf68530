"""Language models: loading them for training, saving them, and the flags that say how."""

import contextlib
import copy
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from utils.cli import RunArgs, resolve
from utils.distributed import at_rest, gathered, is_sharded, keep_shards, on_rank_0, shard_settings, world
from utils.errors import NonNegativeInt, UserError, parse_pairs
from utils.lm import rope_limit
from utils.lora import adapted, for_training
from utils.text import ChatSettings

TINY_MODEL = str(Path(__file__).resolve().parent / "tiny_model")


@dataclass
class ModelArgs(RunArgs):
    model: str = TINY_MODEL
    """folder or hub name of a causal language model"""
    precision: Literal["float32", "bfloat16", "pure-bfloat16"] | None = None
    """bfloat16: autocast over float32 weights, while weights that are not trained (of the reference, under LoRA) are
    bfloat16; pure-bfloat16: all weights are, and small updates round away"""
    lora_rank: NonNegativeInt = 0
    """train float32 LoRA adapters of this rank instead of all weights (needs peft)"""
    lora_modules: tuple[str, ...] = ()
    """names of the layers that get adapters, such as q_proj v_proj; none: all linear layers"""
    save_dtype: Literal["float32", "bfloat16"] | None = None
    """of the weights in RUN/model; none: as they were trained, merged LoRA in float32"""
    attn_implementation: str | None = None
    """sdpa, eager, flash_attention_2, ...; none: what transformers chooses"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    micro_batch_tokens: NonNegativeInt | None = None
    """most tokens, with padding, in one forward and backward pass: rows are sorted by length; 0: micro_batch_size rows
    in their order. Changes memory and speed, not the result"""
    fsdp: bool = False
    """under torchrun: shard weights, gradients and optimizer over the processes (FSDP2), for models that one device
    cannot hold whole; --precision is bfloat16 where it is not given"""
    trust_remote_code: bool = False
    """run code that comes with the model, and with models of --reward"""

    def __post_init__(self):
        if "/" in (self.attn_implementation or "") and not self.trust_remote_code:
            kernel = f"--attn-implementation {self.attn_implementation} names a kernel of the hub, whose code would run"
            raise UserError(f"{kernel}: give --trust-remote-code too, or sdpa or eager")


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
    float32_head: bool = False
    """compute logits in float32 under bfloat16, too: a smaller sampler_gap, a slower output layer"""
    cuda_graphs: bool = False
    """sample with a static cache and, on a GPU, one CUDA graph for each batch size (never run by us on a GPU)"""
    sampler: tuple[str, ...] = ()
    """http://HOST:PORT of vLLM servers that sample in place of the model, in training and evaluation; they share the
    prompts. algos/README.md says how to start one"""


def load_model(path: str, device: torch.device | str = "cpu", precision: str | None = "float32", lora_rank: int = 0,
               gradient_checkpointing: bool = False, trust_remote_code: bool = False,
               lora_modules: tuple[str, ...] = (), attn_implementation: str | None = None,
               fsdp: bool = False, flag: str = "--model"):  # fmt: skip
    """Any causal language model and its tokenizer, from a folder or the hub, with LoRA adapters where lora_rank > 0.
    Weights are as `weights_dtype` says. Raises UserError, which names `flag`, for what cannot be loaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shards = shard_settings(torch.device(device), precision) if fsdp else {}
    tokenizer = loaded(AutoTokenizer, path, flag, trust_remote_code=trust_remote_code)
    model, loading = loaded(AutoModelForCausalLM, path, flag, dtype=weights_dtype(precision, lora_rank),
                            trust_remote_code=trust_remote_code, attn_implementation=attn_implementation,
                            output_loading_info=True, **shards)  # fmt: skip
    keep_shards(model)
    if getattr(config := model.config.get_text_config(), "output_router_logits", False):
        config.output_router_logits = False  # they do not go with a cache
    if missing := sorted(loading["missing_keys"]):  # transformers fills them with random numbers
        raise UserError(f"{flag} {path} lacks {len(missing)} of its weights ({missing[0]}, ...): give a whole model")
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {flag} {path} has no EOS token: completions could never end")
    return for_training(model, lora_rank, gradient_checkpointing, "CAUSAL_LM", lora_modules).to(device), tokenizer


def weights_dtype(precision: str | None, lora_rank: int) -> torch.dtype:
    """Of the weights that are loaded: float32 where they are trained, for small updates round away in bfloat16, and
    bfloat16 where they are frozen, for autocast would cast them anew in every pass (it keeps only casts of weights that
    are trained)."""
    frozen = lora_rank > 0 and precision != "float32"
    return torch.bfloat16 if frozen or precision == "pure-bfloat16" else torch.float32


def loaded(kind, path: str, flag: str, **how):
    """What kind.from_pretrained(path, **how) returns. Raises UserError, which names `flag`, where it raises, and as
    `locate` does."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = locate(path, flag)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers would warn of missing weights; our errors say it
    try:
        return kind.from_pretrained(place, **how)
    except Exception as error:  # network, cache, format and architecture errors, each of its own type
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "give a model folder or a reachable hub name"
        if attention := how.get("attn_implementation"):
            remedy = f"leave --attn-implementation {attention} away, or give sdpa or eager"
        raise UserError(f"cannot load {flag} {path} ({reason}): {remedy}") from error
    finally:
        logging.set_verbosity(verbosity)


def locate(path: str, flag: str) -> str:
    """The model folder `path`, expanded, or a hub name. Raises UserError, which names `flag`, where it is neither."""
    folder = Path(path).expanduser()
    if folder.exists():
        inside = " (a run's model is in RUN/model)" if (folder / "model").is_dir() else ""
        for name, what in (("config.json", "model"), ("tokenizer_config.json", "tokenizer")):
            if not (folder / name).is_file():
                raise UserError(f"{flag} {path} has no {name}: give a folder with a saved {what}{inside}")
        return str(folder)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(f"there is no model folder {flag} {path}: give one with config.json, or a hub name ORG/NAME")
    return path


def load_policy(args, device: torch.device):
    """The model to train and its tokenizer, by the flags of `args`. --precision may still be None: what it becomes,
    float32 or bfloat16 without LoRA and bfloat16 with it, does not change `weights_dtype`."""
    if args.fsdp and args.precision is None:  # the precision of what is gathered is settled when it is loaded
        args.precision = "bfloat16"
    model, tokenizer = load_model(args.model, device, args.precision, args.lora_rank, args.gradient_checkpointing,
                                  args.trust_remote_code, args.lora_modules, args.attn_implementation,
                                  args.fsdp)  # fmt: skip
    return model, with_policy_flags(model, tokenizer, args)


def with_policy_flags(model, tokenizer, args):
    """The tokenizer with the flags of PolicyArgs, which utils/text.py reads there; the model gets them for `sample` and
    `check_model`, and its head. Raises UserError for what the chat template or the vocabulary does not know."""
    model.cuda_graphs, model.flags, model.sampler_columns = args.cuda_graphs, args, {}
    if args.float32_head:
        with_float32_head(model)
    kwargs, template = parse_pairs(args.chat_template_kwargs, "--chat-template-kwargs"), tokenizer.chat_template
    if args.system_prompt and template is None:
        raise UserError("--system-prompt needs a chat template, and --model has none: write it into the prompts")
    if unknown := [name for name in kwargs if name not in str(template)]:
        raise UserError(f"--chat-template-kwargs {unknown[0]}: the chat template of --model does not know that name")
    if args.eos_token:
        if args.eos_token not in tokenizer.get_vocab():
            raise UserError(f"--eos-token {args.eos_token} is no token of --model: its EOS is {tokenizer.eos_token}")
        tokenizer.eos_token = args.eos_token
        model.generation_config.eos_token_id = eos_ids(model, tokenizer)
    embeddings = model.get_input_embeddings().weight.shape[0]
    tokenizer.chat_settings = ChatSettings(args.system_prompt, kwargs, args.raw_prompt, embeddings)
    return tokenizer


def load_reference(args, device: torch.device):
    """The frozen starting policy, in bfloat16 weights unless --precision is float32. None with LoRA: there it is the
    policy without its adapters."""
    return None if args.lora_rank else load_frozen(args.model, "--model", args, device)[0]


def load_frozen(path: str, flag: str, args, device: torch.device):
    """A model that is only asked, in bfloat16 weights unless --precision is float32, and its tokenizer."""
    precision = "float32" if args.precision == "float32" else "pure-bfloat16"
    model, tokenizer = load_model(path, device, precision, trust_remote_code=args.trust_remote_code, flag=flag,
                                  attn_implementation=args.attn_implementation, fsdp=args.fsdp)  # fmt: skip
    if args.float32_head:
        with_float32_head(model)
    return model.eval().requires_grad_(False), tokenizer


def load_critic(args, device: torch.device):
    """The model once more, to be trained whole, as a shard of which no copy can be made."""
    precision = "float32" if args.precision == "float32" else "bfloat16"
    return load_model(args.model, device, precision, gradient_checkpointing=args.gradient_checkpointing,
                      trust_remote_code=args.trust_remote_code, attn_implementation=args.attn_implementation,
                      fsdp=True)[0]  # fmt: skip


def with_float32_head(model) -> None:
    """The output layer computes in float32 from now on, whatever its weights and autocast say."""
    layer = model.get_output_embeddings()

    def forward(hidden: Tensor) -> Tensor:
        bias = layer.bias if layer.bias is None else layer.bias.float()
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.float(), layer.weight.float(), bias)

    layer.forward = forward


def resolve_for(model, args, presets: dict[str, dict]) -> str:
    """Fills in every argument that was left at None from the row of `presets` for this model: lora, tiny (below 10
    million parameters) or full. Returns what to print. Raises UserError where --max-length is beyond `rope_limit`, or
    beyond the learned positions of a model without rotary embeddings."""
    size = sum(p.numel() for p in model.parameters())
    size_is_open = getattr(args, "micro_batch_size", 0) is None
    settings = resolve(args, presets, "lora" if args.lora_rank else "tiny" if size < 10e6 else "full")
    settings += share_work(args, size_is_open) if world() > 1 else ""
    config, length = model.config.get_text_config(), getattr(args, "max_length", 0)
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    if length > positions and not hasattr(config, "rope_parameters"):
        raise UserError(f"--max-length is {length}, and --model has {positions} positions: lower it to {positions}")
    if length > (limit := rope_limit(config)):
        why = f"rotary embeddings of --model change beyond {limit} tokens, for shorter rows of a batch too"
        raise UserError(f"--max-length is {args.max_length}, and {why}: lower --max-length to {limit}")
    if args.precision == "pure-bfloat16" and not args.lora_rank:  # adapters are float32
        settings += "\nwarning: small updates round to nothing in bfloat16 weights: raise the learning rate or use "
        settings += "--precision bfloat16"
    if names := Counter(adapted(model)):
        settings += f"\nLoRA on {names.total()} layers: {', '.join(f'{count} {name}' for name, count in names.items())}"
    if coefficient := getattr(model.config.get_text_config(), "router_aux_loss_coef", 0):
        settings += f"\nwarning: the router's balancing loss (router_aux_loss_coef {coefficient}) is not applied"
    return f"{size / 1e6:.2f}M parameters, {settings}"


def share_work(args, size_is_open: bool) -> str:
    """For many processes: lowers the micro-batch size of the presets, which does not change the result, so that each
    has work; returns what to print. Raises UserError where a step is sampled in fewer batches than there are processes:
    other batches would be other samples, so that is for the user to change."""
    online, group = hasattr(args, "num_prompts"), getattr(args, "num_generations", 1)
    prompts = args.num_prompts if online else args.batch_size
    if online and prompts < world():
        raise UserError(f"--num-prompts {prompts} is too few for {world()} processes: give at least {world()}")
    if online and math.ceil(prompts / max(1, args.sample_batch_size // group)) < world():
        wrong = f"--sample-batch-size {args.sample_batch_size} makes fewer batches of a step than there are processes"
        raise UserError(f"{wrong}: give --sample-batch-size {prompts // world() * group}")
    most = max(1, prompts // (world() * getattr(args, "num_minibatches", 1))) * group
    if not size_is_open or args.micro_batch_size <= most:
        return ""
    args.micro_batch_size = most
    return f"\nmicro_batch_size is {most}, so that each of {world()} processes has work"


def save_model(model, tokenizer, folder: Path, args: ModelArgs) -> None:
    """The folder that anyone's `from_pretrained` loads. LoRA: merged in float32, on the CPU, for in bfloat16 small
    changes would round away; and the adapters alone in folder/adapter, as peft saves them. Changes `model`. All ranks
    call it, rank 0 writes."""
    at_rest(model)
    weights = gathered(dict(model.named_parameters())) if is_sharded(model) else {}

    def write() -> None:
        own = unsharded_copy(model, weights) if weights else model
        if hasattr(own, "merge_and_unload"):
            own.save_pretrained(folder / "adapter", save_embedding_layers=False)
            own = own.to("cpu", torch.float32).merge_and_unload()
        if args.save_dtype:
            own = own.to(getattr(torch, args.save_dtype))
        own.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    on_rank_0(write)


def unsharded_copy(model, weights: dict[str, Tensor]):
    """A model like the sharded one, in the CPU's memory, with these weights."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = next(cls for cls in type(base).__mro__ if not hasattr(cls, "unshard"))  # FSDP puts a class before it
    config = copy.deepcopy(base.config)
    del config.distributed_config
    with torch.device("meta"):
        plain = kind(config)
        if base is not model:
            import peft

            plain = peft.get_peft_model(plain, model.peft_config["default"])
    plain.to_empty(device="cpu").load_state_dict(weights, strict=False, assign=True)
    plain.tie_weights()
    if hasattr(base, "generation_config"):
        plain.generation_config = base.generation_config
    return plain


def without_dropout(model) -> None:
    """Turns dropout off even in training mode, which gradient checkpointing needs. The saved configuration keeps it."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:  # of functional dropout
                setattr(module, name, 0.0)


def trained_state(model) -> dict[str, Tensor]:
    """What a checkpoint keeps of a model: the parameters that are trained. The frozen rest comes from --model again."""
    at_rest(model)
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def trained_parameters(model) -> list[torch.nn.Parameter]:
    at_rest(model)
    return [p for p in model.parameters() if p.requires_grad]


def autocast(device: torch.device, precision: str):
    """bfloat16 matrix products over float32 weights where `precision` is bfloat16, else nothing."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else contextlib.nullcontext()


def eos_ids(model, tokenizer) -> list[int]:
    """All ids that end a completion: the tokenizer's, and what the model's generation settings add."""
    more = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    more = more if isinstance(more, list) else [more]
    return sorted({tokenizer.eos_token_id, *more} - {None})
