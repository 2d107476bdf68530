"""LoRA: which layers of a model get adapters, and gradient checkpointing beside them."""

import torch

from utils.errors import UserError


def for_training(model, lora_rank: int, gradient_checkpointing: bool, task_type: str,
                 lora_modules: tuple[str, ...] = ()):  # fmt: skip
    """The model with LoRA adapters, where lora_rank > 0, and gradient checkpointing. Raises UserError where adapters on
    all linear layers would miss experts or change what routes to them, unless lora_modules names the layers."""
    if lora_modules and not lora_rank:
        raise UserError("--lora-modules names layers for adapters: give --lora-rank too")
    if lora_rank:
        try:
            import peft
        except ImportError as error:
            raise UserError("--lora-rank needs peft: pip install peft") from error
        linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        how = f"name the layers to adapt with --lora-modules, some of {', '.join(sorted(linear))}"
        config = peft.LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, task_type=task_type,
                                 target_modules=list(lora_modules) or "all-linear")  # fmt: skip
        try:
            model = peft.get_peft_model(model, config)
        except ValueError as error:  # no such layers, or some that peft cannot adapt
            raise UserError(f"LoRA does not fit --model ({error}): {how}") from error
        routers = {"gate", "router"} & set(adapted(model))
        experts = [name for name, p in model.named_parameters()
                   if "experts" in name.split(".") and p.dim() > 2 and "base_layer" not in name]  # fmt: skip
        if not lora_modules and (routers or experts):
            fault = f"change what routes to experts ({', '.join(routers)})" if routers else f"miss {experts[0]}"
            raise UserError(f"LoRA on all linear layers of --model would {fault}: {how}")
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora_rank:
            model.enable_input_require_grads()
    return model


def adapted(model) -> list[str]:
    """The last name of every module that has a LoRA adapter."""
    names = [name.split(".lora_A")[0] for name, _ in model.named_modules() if name.endswith(".lora_A")]
    return [name.replace(".base_layer", "").rpartition(".")[2] for name in names]
