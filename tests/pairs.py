"""What the exact tests of dpo.py and its children share: pairs of completions of the tabular model, and one step."""

import numpy as np
import pytest
import torch
from tabular import COMPLETIONS, OUTSIDE, PROMPTS, TabularLM, log_probs, random_table

from utils.dist import as_samples

P, N = len(PROMPTS), len(COMPLETIONS)
REF, TABLE = random_table(0), random_table(1)
# (prompt, chosen, rejected): one and two tokens on either side, a pair of equal ones, a pair twice
PICKS = [(0, 0, 3), (1, 4, 0), (0, 5, 2), (1, 6, 1), (1, 2, 2), (0, 5, 2), (0, 3, 6)]
SIZES = [dict(micro_batch_size=size, micro_batch_tokens=tokens)
         for size, tokens in ((100, 0), (1, 8), (2, 16), (3, 0), (4, 8), (5, 16), (6, 0), (14, 16))]  # fmt: skip


def items_of(picks, sides: int = 2) -> list[tuple]:
    """As the reference takes them. sides: completions of each."""
    return [(p, tuple(COMPLETIONS[i] for i in more[:sides]), *more[sides:]) for p, *more in picks]


def samples_of(picks, sides: int = 2):
    return as_samples([(PROMPTS[p], *map(list, some)) for p, some, *_ in items_of(picks, sides)], 64, "cpu")


def logps_of(picks, table, sides: int = 2) -> torch.Tensor:
    """Of each token by numpy, (B, T)."""
    rows = [log_probs(table, p, c) for p, some, *_ in items_of(picks, sides) for c in some]
    return torch.tensor(np.array([np.pad(row, (0, max(map(len, rows)) - len(row))) for row in rows]))


def descends(module, batch, expected, make=lambda: TabularLM(TABLE), **settings) -> dict[str, float]:
    """A step of plain gradient descent subtracts `expected` from the table, whatever shares a micro-batch, and less
    where the norm is limited. Returns its metrics."""
    norm, moves, first = np.linalg.norm(expected), [], {}
    for more in (*SIZES, SIZES[0] | dict(max_grad_norm=1e-3)):
        model, args = make(), module.Args(**dict(max_grad_norm=1e9, precision="float32") | more | settings)
        before = model.table.detach().numpy().copy()
        metrics = module.update(model, torch.optim.SGD(model.parameters(), 1.0), batch, args)
        moves.append((before - model.table.detach().numpy()) / min(1, args.max_grad_norm / (norm + 1e-6)))
        first = metrics if len(moves) == 1 else first
        assert metrics == pytest.approx(first, abs=1e-10) and metrics["grad_norm"] == pytest.approx(norm, abs=1e-7)
        np.testing.assert_allclose(moves[-1], moves[0], atol=1e-6 if "max_grad_norm" in more else 1e-10)
    np.testing.assert_allclose(moves[0], expected, atol=1e-7)
    assert norm > 1e-2 and not (before.shape == TABLE.shape and moves[0][:, OUTSIDE].any())
    return metrics


def probabilities(table) -> np.ndarray:
    """pi(y | x) of every completion, (P, N)."""
    return np.exp([[log_probs(table, p, c).sum() for c in COMPLETIONS] for p in range(P)])
