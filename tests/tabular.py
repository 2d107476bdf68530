"""A language model that is a table of logits, small enough to enumerate every completion, and its numpy mathematics.

The torch module stands where a Hugging Face model stands in utils/lm.py (cache, left padding, positions, kept logits).
The numpy functions share no code with it: they index the table by prompt and prefix.
"""

import math
from functools import cache
from itertools import product
from types import SimpleNamespace

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig

EOS, VOCAB, T_MAX = 1, 3, 2
PROMPTS = [[7], [8, 9]]  # ids that no completion holds; the shorter one is padded on the left
PREFIXES = [p for n in range(T_MAX) for p in product([v for v in range(VOCAB) if v != EOS], repeat=n)]
OUTSIDE = len(PREFIXES)  # row of the table for whatever follows an EOS: nothing may ever train it
IDS = max(map(max, PROMPTS)) + 1
COMPLETIONS = [prefix + (v,) for prefix in PREFIXES for v in range(VOCAB) if v == EOS or len(prefix) + 1 == T_MAX]


def random_table(seed: int) -> np.ndarray:
    """Logits (prompts, prefixes and OUTSIDE, VOCAB), float64."""
    return np.random.default_rng(seed).normal(size=(len(PROMPTS), len(PREFIXES) + 1, VOCAB))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def log_probs(table: np.ndarray, prompt: int, completion: tuple) -> np.ndarray:
    """log pi of each token of a completion, (T,)."""
    rows = [PREFIXES.index(completion[:t]) for t in range(len(completion))]
    return log_softmax(table)[prompt, rows, list(completion)]


def probability(table: np.ndarray, prompt: int, completion: tuple) -> float:
    return float(np.exp(log_probs(table, prompt, completion).sum()))


def gradients(table: np.ndarray, prompt: int, completion: tuple) -> np.ndarray:
    """Gradient of log pi of each token with respect to the table, (T, *table.shape): one-hot minus softmax."""
    result = np.zeros((len(completion), *table.shape))
    for t, token in enumerate(completion):
        row = PREFIXES.index(completion[:t])
        result[t, prompt, row] = np.eye(VOCAB)[token] - np.exp(log_softmax(table[prompt, row]))
    return result


def sigma(x):
    return 1 / (1 + np.exp(-x))


def slope(function, at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Gradient of function(array) by central differences in every entry."""
    result = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        shift = np.zeros_like(at)
        shift[index] = step
        result[index] = (function(at + shift) - function(at - shift)) / (2 * step)
    return result


class States:
    """Cache: where in the tree of prompts and completions each row stands, and how many real tokens it has read."""

    def __init__(self, state: torch.Tensor, count: torch.Tensor):
        self.state, self.count = state, count

    def reorder_cache(self, rows: torch.Tensor) -> None:
        self.state, self.count = self.state[rows], self.count[rows]


@cache
def tree() -> tuple[torch.Tensor, torch.Tensor]:
    """next state (states, IDS), and row of the flattened table (states,). State 0 has read nothing; 1 is lost."""
    names = [(), "lost"] + [tuple(prompt[:n]) for prompt in PROMPTS for n in range(1, len(prompt))]
    names += [(*prompt, *prefix) for prompt in PROMPTS for prefix in PREFIXES]
    following = torch.ones(len(names), IDS, dtype=torch.long)
    for i, name in enumerate(names):
        for token in range(IDS):
            if name != "lost" and (*name, token) in names:
                following[i, token] = names.index((*name, token))
    rows = torch.full((len(names),), OUTSIDE)
    for p, prompt in enumerate(PROMPTS):
        for i, prefix in enumerate(PREFIXES):
            rows[names.index((*prompt, *prefix))] = p * (OUTSIDE + 1) + i
    return following, rows


class TabularLM(torch.nn.Module):
    """Logits are looked up by (prompt, completion so far) in `table`. Also checks the position ids that it is given."""

    config = PreTrainedConfig(vocab_size=VOCAB)
    generation_config = GenerationConfig(eos_token_id=[EOS])

    def __init__(self, table: np.ndarray):
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(table))
        self.following, self.rows = tree()

    @property
    def device(self) -> torch.device:
        return self.table.device

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=True,
                logits_to_keep=0):  # fmt: skip
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
            position_ids = attention_mask.cumsum(1) - 1
        start = torch.zeros(len(input_ids), dtype=torch.long)
        cache = past_key_values or States(start, start)
        mask = attention_mask[:, -input_ids.shape[1] :].bool()
        assert torch.equal(attention_mask[:, : -input_ids.shape[1]].sum(1), cache.count), "the mask forgets the past"
        states = []
        for t in range(input_ids.shape[1]):
            assert (position_ids[:, t] == cache.count)[mask[:, t]].all(), "position ids must count real tokens"
            cache.state = torch.where(mask[:, t], self.following[cache.state, input_ids[:, t]], cache.state)
            cache.count = cache.count + mask[:, t]
            states.append(cache.state)
        rows = self.rows[torch.stack(states, 1)[:, -logits_to_keep:]]
        logits = self.table.flatten(0, 1)[rows]  # they stand for the hidden states of a model whose head does nothing
        return SimpleNamespace(logits=logits, last_hidden_state=logits, past_key_values=cache if use_cache else None)

    def get_decoder(self):
        return self

    def get_output_embeddings(self):
        return torch.nn.Identity()


def minimised(update, model, batch, args, steps: int, rate: float) -> np.ndarray:
    """The table after updates by Adam, its rate falling to 0."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        update(model, optimizer, batch, args)
    return model.table.detach().numpy()
