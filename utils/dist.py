"""Batches of completions, and how work is divided: over micro-batches, and over processes, which `torchrun
--nproc-per-node=N algos/X.py` starts. Each has its own share of the prompts; sums over all of them make denominators,
gradients and means those of the whole batch. Without torchrun everything here gives back what it got.

Weights are whole in every process (replicas), or, with --fsdp, shards of PyTorch's FSDP2.
"""

import contextlib
import hashlib
import math
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict as states

from utils.core import UserError


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world() -> int:
    """How many processes there are."""
    return int(os.environ.get("WORLD_SIZE", 1))


def start(device: torch.device) -> torch.device:
    """Joins the other processes, or a group of one. Returns this one's device."""
    if "RANK" not in os.environ:
        return device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():  # rewards and saves may be slow
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=6))
    return device


def total(tensor: Tensor, how=dist.ReduceOp.SUM) -> Tensor:
    """The sum over processes, in place; or what else `how` says."""
    if dist.is_initialized():
        dist.all_reduce(tensor, how)
    return tensor


def gathered(items: list) -> list:
    """The items of all processes, in their order."""
    if not dist.is_initialized():
        return items
    parts: list = [None] * world()
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def share(items):
    """This process's items."""
    return items[rank() :: world()]


def mean(values: list[float]) -> float:
    """Without NaN (skipped samples); NaN where nothing is left."""
    kept = [value for value in values if not math.isnan(value)]
    return sum(kept) / len(kept) if kept else math.nan


def averaged(columns: dict[str, float]) -> dict[str, float]:
    """The mean over processes of each number, of those that have it."""
    parts = gathered([columns])
    return {name: mean([part[name] for part in parts if name in part]) for part in parts for name in part}


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased deviation of the numbers of all processes. NaN is left out."""
    known = values[~values.isnan()]
    count, amount = total(torch.stack([known.new_tensor(len(known)), known.sum()]))
    mean = amount / count.clamp(min=1)
    return mean, (total((known - mean).square().sum()) / (count - 1).clamp(min=1)).sqrt()


def stream(device, *key: int | str) -> torch.Generator:
    """The random numbers of one batch: a function of `key` (seed, purpose, step, ...) and of the process alone, so that
    no checkpoint keeps their state."""
    digest = hashlib.blake2b(repr((*key, rank())).encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest))


class Means:
    """Means over tokens, of those of all processes. Sums stay on the device until the end: to read them earlier would
    make the CPU wait."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, mask: Tensor, **values: Tensor) -> None:
        """The values of one micro-batch where `mask` is true, (B, T) or what both broadcast to."""
        for name, value in values.items():
            found = torch.stack([(value * mask).sum(), (torch.ones_like(value) * mask).sum()])
            self.sums[name] = self.sums.get(name, 0.0) + found

    def read(self) -> dict[str, float]:
        """Without those of no token. A process may lack some, if it had no work."""
        sums: dict[str, list[float]] = {}
        for name, found in gathered([(name, found.tolist()) for name, found in self.sums.items()]):
            sums[name] = [a + b for a, b in zip(sums.get(name, (0.0, 0.0)), found)]
        return {name: amount / count for name, (amount, count) in sums.items() if count}


class Samples(NamedTuple):
    """Completions of a batch of prompts. A completion's mask covers its first EOS and nothing after."""

    prompt_ids: Tensor  # (P, L) int64
    prompt_mask: Tensor  # (P, L) bool
    completion_ids: Tensor  # (B, T) int64
    completion_mask: Tensor  # (B, T) bool
    logps: Tensor  # (B, T) float32: log-probability of each token when it was sampled, at the sampling temperature
    ended: Tensor  # (B,) bool: whether EOS was reached; False where the length limit cut the completion off


def positions(mask: Tensor) -> Tensor:
    """Position ids that count real tokens only, so that left padding shifts nothing. (B, L) -> (B, L)."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def pad_left(prompts: list[list[int]], device) -> tuple[Tensor, Tensor]:
    """Token lists -> ids and mask (P, L). Padding is id 0: the mask, never the id, tells what is padding."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[False] * (length - len(p)) + [True] * len(p) for p in prompts], device=device)
    return ids, mask


def as_samples(rows: list[tuple], max_length: int, device) -> Samples:
    """Rows of token ids, a prompt and its completions, which nobody sampled: `logps` is 0. Prompt and completion have
    `max_length` tokens at most; the end of a longer completion is cut off, and `ended` is False."""
    prompts = [prompt for prompt, *_ in rows]
    whole = [(tokens, max_length - len(prompt)) for prompt, *completions in rows for tokens in completions]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(tokens[:room]) for tokens, room in whole], True).to(device)
    lengths, room = torch.tensor([(len(tokens), room) for tokens, room in whole], device=device).T
    mask = torch.arange(ids.shape[1], device=device) < lengths.minimum(room)[:, None]
    return Samples(*pad_left(prompts, device), ids, mask, torch.zeros(ids.shape, device=device), lengths <= room)


def join(parts: list[Samples]) -> Samples:
    """The samples of several batches of prompts as one, prompts padded to the widest, completions to the longest."""

    def cat(name: str, left: bool = False) -> Tensor:
        tensors = [getattr(part, name) for part in parts]
        gaps = [max(t.shape[1] for t in tensors) - t.shape[1] for t in tensors]
        return torch.cat([torch.nn.functional.pad(t, (gap, 0) if left else (0, gap)) for t, gap in zip(tensors, gaps)])

    return Samples(cat("prompt_ids", True), cat("prompt_mask", True), cat("completion_ids"), cat("completion_mask"),
                   cat("logps"), torch.cat([part.ended for part in parts]))  # fmt: skip


def split_rows(lengths: list[int], size: int, tokens: int | None) -> list[list[int]]:
    """Which rows make each micro-batch: `size` of them, in their order. Where `tokens` is given, rows are sorted by
    length, and a micro-batch has at most that many tokens with its padding (one row may have more). Then the longest
    come first, so that memory that is too small shows at once."""
    if not tokens:
        return [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batches and len(batches[-1]) < min(size, tokens // lengths[batches[-1][0]]):
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def equal_passes(batches: list[list[int]], args) -> list[list[int]]:
    """Under FSDP all processes must make equally many passes, as many as the busiest needs: the others get empty ones,
    which run one token and have no rows."""
    most = int(total(torch.tensor(len(batches)), dist.ReduceOp.MAX)) if args.fsdp else 0
    return batches + [[]] * (most - len(batches))


def micro_batches(samples: Samples, args, within: Tensor | None = None,
                  together: int = 1) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]]:  # fmt: skip
    """Yields (rows, arguments of completion_logps) of --micro-batch-size completions, trimmed to their own longest;
    whole groups share their prompt. With --micro-batch-tokens as `split_rows` has it, with a prompt for each, and
    `together` completions that stand together stay so. within: these rows of the samples alone."""
    prompt_ids, prompt_mask, ids, mask, _, _ = samples
    within = torch.arange(len(ids)) if within is None else within
    group, size, tokens = len(ids) // max(1, len(prompt_ids)), args.micro_batch_size, args.micro_batch_tokens
    lengths = (prompt_mask.sum(1).repeat_interleave(group) + mask.sum(1)).cpu()[within].view(-1, together).amax(1)
    units = split_rows(lengths.tolist(), max(1, size // together), tokens and tokens // together)
    for some in equal_passes(units, args):
        if not some:
            one = torch.zeros(1, 1, dtype=torch.long, device=ids.device)
            yield within[:0].to(ids.device), (one, one == 0, one[:, :0], one[:, :0] == 0)
            continue
        rows = within.view(-1, together)[some].flatten().to(ids.device)
        prompts = rows // group
        if not tokens and (size % group == 0 or group % size == 0):
            prompts = prompts.unique_consecutive()
        left = prompt_mask.shape[1] - int(prompt_mask[prompts].sum(1).max())
        right = int(mask[rows].sum(1).max())
        yield rows, (prompt_ids[prompts, left:], prompt_mask[prompts, left:], ids[rows, :right], mask[rows, :right])


def sharded(model) -> list:
    """The modules whose weights FSDP gathers as one."""
    return [module for module in model.modules() if hasattr(type(module), "unshard")]


def shard(model, bfloat16: bool):
    """FSDP2: each layer's weights lie on all processes in parts, and are gathered when the layer runs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing of ours is done in place
    mesh = init_device_mesh(model.device.type, (world(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else MixedPrecisionPolicy()
    layers = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    for part in [*layers, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
        part.set_gradient_divide_factor(1.0)  # sums, as of replicas: our denominators are those of all processes
        part.set_force_sum_reduction_for_comms(True)  # gloo cannot divide in a sum, NCCL of torch 2.13 errs in bfloat16
    return model


@contextlib.contextmanager
def unsharded(model) -> Iterator[None]:
    """Inside, every process has all weights and may run as many passes without gradients as it likes."""
    for module in sharded(model):
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    yield
    for module in sharded(model):
        module.set_reshard_after_forward(module is not model, recurse=False)
        module.reshard()


def clip_gradients(model, limit: float) -> Tensor:
    """Sums gradients over processes (FSDP has done so) and clips them to the norm `limit`. Returns the norm before."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    if dist.is_initialized() and not sharded(model):
        for work in [dist.all_reduce(p.grad, async_op=True) for p in trained]:
            work.wait()
    norm = torch.nn.utils.clip_grad_norm_(trained, limit)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def set_rate(optimizer, step: int, args) -> float:
    """The rate of step `step`, from 1 on: a linear warm-up, then constant, or linear or cosine decay that would reach
    zero one step after the last."""
    done = max(0, step - 1 - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    decayed = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[args.lr_schedule]
    optimizer.param_groups[0]["lr"] = args.learning_rate * decayed * min(1.0, step / max(1, args.warmup_steps))
    return optimizer.param_groups[0]["lr"]


def full_weights(model) -> dict:
    """All weights, in the CPU's memory: of a sharded model on process 0 alone. All processes call it."""
    return states.get_model_state_dict(model, options=states.StateDictOptions(full_state_dict=True, cpu_offload=True))


class Trained:
    """A model's trained weights and their optimizer, or a frozen model's weights: saved whole by process 0, loaded by
    any number of processes. Raises UserError where others were trained, or on another model."""

    def __init__(self, model, *optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict:
        trained = any(p.requires_grad for p in self.model.parameters())
        how = states.StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained)
        model, optimizer = states.get_state_dict(self.model, self.optimizer, options=how)
        for name, p in self.model.named_parameters(remove_duplicate=False):  # a head that is tied to frozen embeddings
            if trained and not p.requires_grad:
                model.pop(name, None)
        return {"model": model, "optimizer": optimizer, "base": self.base()}

    def base(self) -> list[str]:
        """Of which weights the model was made."""
        return [module.fingerprint for module in self.model.modules() if hasattr(module, "fingerprint")]

    def load_state_dict(self, state: dict) -> None:
        saved = {name: weight.shape for name, weight in state["model"].items()}
        own = {name: p.shape for name, p in self.model.named_parameters() if p.requires_grad or not self.optimizer}
        if other := (own.items() - saved.items()) | {x for x in saved.items() if x[0] not in self.model.state_dict()}:
            wrong = f"the run trained other weights than these flags do ({min(other)[0]})"
            raise UserError(f"{wrong}: leave out --model, --lora-rank and --lora-modules")
        if state.get("base", self.base()) != self.base():
            raise UserError("the model has other weights than that with which the run began: give that one as --model")
        how = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized(), strict=False)
        own = dict(model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        states.set_state_dict(self.model, self.optimizer, **own, options=how)
