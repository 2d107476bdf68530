"""A model that is a table of log-probabilities, one for each token of a batch, for the `update` of online scripts."""

import torch
from torch import Tensor

from utils.lm import Samples


class Table(torch.nn.Module):
    """Log-probabilities and values by row, which the completions' ids are."""

    device = torch.device("cpu")

    def __init__(self, data: dict[str, Tensor]):
        super().__init__()
        self.logps = torch.nn.Parameter(data["logps"].masked_fill(~data["mask"], -7.0))  # in padding: none may count
        self.values = torch.nn.Parameter(data.get("values", data["logps"]).clone())
        self.critic = Critic(self.values)


class Critic(torch.nn.Module):
    def __init__(self, values: torch.nn.Parameter):
        super().__init__()
        self.values = values

    def forward(self, prompt_ids, prompt_mask, ids, mask):
        return self.values[ids[:, 0], : ids.shape[1]]


def updated(monkeypatch, module, data: dict[str, Tensor], *batch, group: int, call=None, first=None,
            **settings) -> Table:  # fmt: skip
    """The table after an `update` of the script `module`, for the gradients of its last step; it does not move.

    data: what a table needs, `mask` (B, T), `ended` (B,), and `old`, the sampler's log-probabilities. batch: what
    follows the samples in a Batch. call(table, optimizer, batch, args): another order of arguments than that. first:
    what the model says in a first epoch, before that of which the gradients are.
    """
    mask, rows, seen = data["mask"], torch.arange(len(data["mask"])), 0

    def scored(model, prompt_ids, prompt_mask, ids, mask, temperature):
        nonlocal seen
        source = first if first is not None and seen < len(rows) else model.logps
        seen += len(ids)
        logps = source[ids[:, 0], : ids.shape[1]]
        return (logps if source is model.logps else logps + 0 * model.logps.sum()), torch.zeros_like(logps)

    monkeypatch.setattr(module, "completion_logps", scored)
    table, prompts = Table(data), torch.zeros(len(rows) // group, 1, dtype=torch.long)
    samples = Samples(prompts, prompts == 0, rows[:, None].expand(mask.shape), mask, data["old"], data["ended"])
    defaults = dict(num_generations=group, micro_batch_size=2 * group, num_minibatches=1, precision="float32",
                    num_iterations=1 if first is None else 2, max_grad_norm=1e9, beta=0.0)  # fmt: skip
    known = module.Args.__dataclass_fields__
    args = module.Args(**{name: value for name, value in (defaults | settings).items() if name in known})
    (call or module.update)(table, torch.optim.SGD(table.parameters(), 0.0), module.Batch(samples, *batch), args)
    return table
