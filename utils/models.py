"""Language models: loading them for training, saving them, and the flags that say how."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from utils.errors import NonNegativeInt, UserError, parse_pairs
from utils.lm import rope_limit
from utils.run import RunArgs, resolve
from utils.text import ChatSettings

TINY_MODEL = str(Path(__file__).resolve().parent / "tiny_model")


@dataclass
class ModelArgs(RunArgs):
    model: str = TINY_MODEL
    """folder or hub name of a causal language model"""
    precision: Literal["float32", "bfloat16", "pure-bfloat16"] | None = None
    """bfloat16: autocast over float32 weights; pure-bfloat16: bfloat16 weights, in which small updates round away"""
    lora_rank: NonNegativeInt = 0
    """train LoRA adapters of this rank instead of all weights (needs peft)"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, more time"""
    micro_batch_tokens: NonNegativeInt | None = None
    """most tokens, with padding, in one forward and backward pass: rows are sorted by length; 0: micro_batch_size rows
    in their order. Changes memory and speed, not the result"""
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
    cuda_graphs: bool = False
    """sample with a static cache and, on a GPU, one CUDA graph for each batch size (never run by us on a GPU)"""


def load_model(path: str, device: torch.device | str = "cpu", precision: str = "float32", lora_rank: int = 0,
               gradient_checkpointing: bool = False, trust_remote_code: bool = False):  # fmt: skip
    """Any causal language model and its tokenizer, from a folder or the hub: float32 weights (pure-bfloat16: bfloat16
    ones), LoRA adapters on all linear layers where lora_rank > 0. Raises UserError for what cannot be loaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = locate(path, "--model")
    dtype = torch.bfloat16 if precision == "pure-bfloat16" else torch.float32
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        model, loading = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code,
                                                              output_loading_info=True)  # fmt: skip
    except Exception as error:  # network, cache, format and architecture errors, each of its own type
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"cannot load --model {path} ({reason[0]}): give a model folder or a reachable hub name"
        ) from error
    if missing := sorted(loading["missing_keys"]):  # transformers fills them with random numbers
        raise UserError(
            f"--model {path} lacks {len(missing)} of its weights ({missing[0]}, ...): give a folder with all of a "
            "causal language model"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of --model {path} has no EOS token: completions could never end")
    return for_training(model, lora_rank, gradient_checkpointing, "CAUSAL_LM").to(device), tokenizer


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
        raise UserError(
            f"there is no model folder {flag} {path}: give a folder with config.json or a hub name ORG/NAME"
        )
    return path


def for_training(model, lora_rank: int, gradient_checkpointing: bool, task_type: str):
    """The model with LoRA adapters on all linear layers, where lora_rank > 0, and gradient checkpointing."""
    if lora_rank:
        try:
            import peft
        except ImportError as error:
            raise UserError("--lora-rank needs peft: pip install peft") from error
        config = peft.LoraConfig(
            r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear", task_type=task_type
        )
        model = peft.get_peft_model(model, config)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora_rank:
            model.enable_input_require_grads()
    return model


def load_policy(args, device: torch.device):
    """The model to train and its tokenizer, by the flags of `args`. Weights are float32 unless --precision says
    pure-bfloat16, so --precision may still be None here."""
    model, tokenizer = load_model(args.model, device, args.precision or "float32", args.lora_rank,
                                  args.gradient_checkpointing, args.trust_remote_code)  # fmt: skip
    model.cuda_graphs = args.cuda_graphs  # for `sample`
    return model, with_chat_settings(model, tokenizer, args)


def with_chat_settings(model, tokenizer, args):
    """The tokenizer with the flags of PolicyArgs, which utils/text.py reads there. Raises UserError for what the chat
    template or the vocabulary does not know."""
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
    tokenizer.chat_settings = ChatSettings(args.system_prompt, kwargs, args.raw_prompt)
    return tokenizer


def load_reference(args, device: torch.device):
    """The frozen starting policy. None with LoRA: there it is the policy without its adapters."""
    if args.lora_rank:
        return None
    model, _ = load_model(args.model, device, args.precision, trust_remote_code=args.trust_remote_code)
    return model.eval().requires_grad_(False)


def resolve_for(model, args, presets: dict[str, dict]) -> str:
    """Fills in every argument that was left at None from the row of `presets` for this model: lora, tiny (below 10
    million parameters) or full. Returns what to print. Raises UserError where --max-length is beyond `rope_limit`."""
    size = sum(p.numel() for p in model.parameters())
    settings = resolve(args, presets, "lora" if args.lora_rank else "tiny" if size < 10e6 else "full")
    if getattr(args, "max_length", 0) > (limit := rope_limit(model.config)):
        raise UserError(
            f"--max-length is {args.max_length}, and the rotary embeddings of --model change with the length beyond "
            f"{limit} tokens, for shorter rows of a batch too: lower --max-length to {limit}"
        )
    if args.precision == "pure-bfloat16" and not args.lora_rank:  # adapters are float32
        settings += "\nwarning: small updates round to nothing in bfloat16 weights: raise the learning rate or use "
        settings += "--precision bfloat16"
    return f"{size / 1e6:.2f}M parameters, {settings}"


def save_model(model, tokenizer, folder: Path) -> None:
    """The folder that anyone's `from_pretrained` loads."""
    if hasattr(model, "merge_and_unload"):  # LoRA: the next script, and anyone, loads an ordinary model
        model = model.merge_and_unload()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def trained_parameters(model) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def autocast(device: torch.device, precision: str):
    """bfloat16 matrix products over float32 weights where `precision` is bfloat16, else nothing."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else contextlib.nullcontext()


def eos_ids(model, tokenizer) -> list[int]:
    """All ids that end a completion: the tokenizer's, and what the model's generation settings add."""
    more = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    more = more if isinstance(more, list) else [more]
    return sorted({tokenizer.eos_token_id, *more} - {None})
