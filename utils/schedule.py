"""Learning-rate schedules."""

import math


def learning_rate(step: int, base: float, schedule: str, warmup_steps: int, total: int) -> float:
    """The rate of optimizer step `step`, which counts from 1: a linear warm-up, then constant, or linear or cosine
    decay that would reach zero one step after the last."""
    if step <= warmup_steps:
        return base * step / warmup_steps
    done = (step - 1 - warmup_steps) / max(1, total - warmup_steps)
    return base * {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]
