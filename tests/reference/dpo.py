"""A second implementation of dpo.py's `update`, in NumPy, on the tabular policy of tests/tabular.py.

It knows nothing of algos/ and utils/. A script of the family gives the formula of its loss, and what that sees of a
completion (`log_ratio`, or a function like it). `descends` in tests/pairs.py compares the two.
"""

import numpy as np
from tabular import gradients, log_probs


def log_ratio(ref=None, average=False):
    """table, prompt, completion -> log pi less that of the table `ref`, the sum or mean over tokens; its gradient."""

    def score(table, p, c) -> tuple[float, np.ndarray]:
        size = len(c) if average else 1
        values = log_probs(table, p, c) - (0.0 if ref is None else log_probs(ref, p, c))
        return values.sum() / size, gradients(table, p, c).sum(0) / size

    return score


def update(table, items, loss, score, step=1e-5) -> tuple[np.ndarray, float, np.ndarray]:
    """Gradient of the mean loss over items (prompt, completions, what else the loss takes), loss(*scores, *more), by
    central differences in the scores; the mean loss; and the scores, a row for each item."""
    total, losses, seen = np.zeros_like(table), [], []
    for p, completions, *more in items:
        scores, slopes = map(np.array, zip(*(score(table, p, c) for c in completions)))
        losses.append(loss(*scores, *more))
        seen.append(scores)
        for shift, slope in zip(step * np.eye(len(scores)), slopes):
            difference = loss(*scores + shift, *more) - loss(*scores - shift, *more)
            total += difference / (2 * step) * slope / len(items)
    return total, float(np.mean(losses)), np.array(seen)


def preferences(scores, margins, kind: str) -> dict[str, float]:
    """The metrics of pairs with these scores, (N, 2). kind: what the script calls a score."""
    chosen, rejected = scores.T
    right = np.where(chosen == rejected, 0.5, chosen > rejected)
    return {"accuracy": right.mean(), "margin": np.mean(margins), f"chosen_{kind}": chosen.mean(),
            f"rejected_{kind}": rejected.mean()}  # fmt: skip
