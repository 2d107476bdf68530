"""What a language model must satisfy before a run trains it, tried on a few tokens."""

import torch

from utils.checkpoint import rng_state, set_rng_state
from utils.engine import connect
from utils.errors import UserError
from utils.lm import completion_logps, pad_left, sample
from utils.models import autocast

# Nats, mean over tokens. The models of benchmarks/architectures.py reach 5e-7 in float32. In bfloat16 they reach 0.03,
# where a router that rounds the other way takes another expert, so only gross faults show in bfloat16 alone.
LARGEST_GAP = {"float32": 1e-3, "bfloat16": 0.1, "pure-bfloat16": 0.1}
# They reach 0 in all; routers that draw reach 0.008 and more.
LARGEST_NOISE = {"float32": 1e-3, "bfloat16": 5e-3, "pure-bfloat16": 5e-3}


def check_model(model, precision: str, noise_allowed: bool = False) -> None:
    """Samples a few tokens and scores them as the run will; float32 weights are tried in float32 as well.

    Raises UserError where a prompt's cache cannot be repeated for its group (Mamba), where sampler and scorer disagree,
    and, unless `noise_allowed`, where training mode scores otherwise than evaluation mode (PhiMoE draws experts, some
    routers have jitter). Leaves random streams, mode and gradients as they were. Connects the servers of --sampler."""
    kind, training, before = model.config.model_type, model.training, rng_state()
    exact = all(p.dtype == torch.float32 for p in model.parameters())
    try:
        found = {used: gap_and_noise(model, used) for used in {precision, "float32" if exact else precision}}
    except Exception as error:  # each architecture fails in its own way
        wrong = f"--model is a {kind}, whose cache cannot be shared by several completions ({error})"
        raise UserError(f"{wrong}: give a model with attention, such as Llama, Qwen or Gemma") from error
    finally:
        model.train(training)
        set_rng_state(before)
    for used, (gap, noise) in found.items():
        if not gap <= LARGEST_GAP[used]:
            wrong = f"--model is a {kind}, whose tokens are scored {gap:.2g} nats away from how they were sampled"
            raise UserError(f"{wrong}, where {used} allows {LARGEST_GAP[used]:g}: give another model")
        if not noise_allowed and not noise <= LARGEST_NOISE[used]:
            wrong = f"--model is a {kind}, which scores {noise:.2g} nats apart in training and in evaluation mode"
            right = "turn off what it draws in training, such as router_jitter_noise in its config.json"
            raise UserError(f"{wrong}, where {used} allows {LARGEST_NOISE[used]:g}: {right}, or give another model")
    if getattr(getattr(model, "flags", None), "sampler", ()):
        connect(model, model.flags)


@torch.no_grad()
def gap_and_noise(model, precision: str) -> tuple[float, float]:
    """Nats, means over sampled tokens: |scorer - sampler|, the larger one of prompts shared and repeated, and what
    training mode changes in the scorer."""
    generator = torch.Generator(model.device).manual_seed(0)
    with autocast(model.device, precision):
        samples = sample(model, *pad_left([[0], [1, 2, 3]], model.device), 8, 8, [], 1.0, generator)
        rows = torch.arange(2, device=model.device).repeat_interleave(8)
        repeated = samples.prompt_ids[rows], samples.prompt_mask[rows], *samples[2:4]
        ways = (False, samples[:4]), (False, repeated), (True, repeated)
        shared, plain, trained = (completion_logps(model.train(mode), *inputs)[0] for mode, inputs in ways)
    gap = max((scores - samples.logps).abs().mean().item() for scores in (shared, plain))
    return gap, (trained - plain).abs().mean().item()
