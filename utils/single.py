"""One process that samples itself: what stands for utils/distributed.py and utils/engine.py in copies that
`utils/eject.py --single` writes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from utils.errors import UserError

T = TypeVar("T")


class OtherRankError(Exception):
    """Never raised: there is no other rank."""


def rank() -> int:
    return 0


def world() -> int:
    return 1


def start(device: str) -> torch.device:
    return torch.device(device)


def together(work: Callable[[], T]) -> list[T]:
    return [work()]


def on_rank_0(work: Callable[[], T]) -> T:
    return work()


def share(items: Iterable[T]) -> Iterable[T]:
    return items


def deal(items: Iterable[T], model) -> Iterator[tuple[T, bool]]:
    return ((item, True) for item in items)


def total(sums: T) -> T:
    return sums


def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(parameters, limit)


def is_sharded(model) -> bool:
    return False


def shard_settings(device: torch.device, precision: str | None) -> dict:
    raise UserError("--fsdp shards a model over processes, which this copy leaves out")


def unsharded(*models) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


def placed(value: Tensor, like: Tensor) -> Tensor:
    return value


def load_module(module: torch.nn.Module, saved: dict[str, Tensor]) -> None:
    own = module.state_dict()
    if foreign := [name for name, x in saved.items() if name not in own or own[name].shape != x.shape]:
        raise UserError(f"the checkpoint's weights {foreign[0]} do not fit: is --model another one than at the start?")
    module.load_state_dict(saved, strict=False)


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    optimizer.load_state_dict(saved)


def nothing(*parts: Any) -> None:
    """There are no shards to care for, no other ranks to wait for or to compare with."""


total_numbers = gathered = total
stop = let_rank_0_speak = keep_shards = at_rest = check_equal = nothing


def connect(model, args) -> None:
    raise UserError("--sampler has engines sample, which this copy leaves out")
