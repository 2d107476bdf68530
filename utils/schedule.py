"""Learning-rate schedules."""

import math

import torch


def learning_rate(step: int, base: float, schedule: str, warmup_steps: int, total: int) -> float:
    """The rate of optimizer step `step`, which counts from 1: a linear warm-up, then constant, or linear or cosine
    decay that would reach zero one step after the last."""
    if step <= warmup_steps:
        return base * step / warmup_steps
    done = (step - 1 - warmup_steps) / max(1, total - warmup_steps)
    return base * {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, args) -> float:
    """Gives the optimizer the rate of optimizer step `step` by the flags of `args`, and returns it."""
    rate = learning_rate(step, args.learning_rate, args.lr_schedule, args.warmup_steps, args.max_steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate
