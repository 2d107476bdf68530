"""Many processes: `torchrun --nproc-per-node=N algos/X.py`. The only file that knows torch.distributed.

Every rank holds the whole batch, works on its share of it, and the shares are summed: what is computed from all samples
(advantages, denominators, statistics) is computed by every rank from all of them, so nothing depends on how many ranks
there are. Without torchrun there is one rank, 0, and everything here gives back what it got.

Weights are whole on every rank (replicas), or, with --fsdp, shards of PyTorch's FSDP2, put there by transformers.
"""

import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from utils.errors import UserError

T = TypeVar("T")
TIMEOUT = timedelta(hours=6)  # of a collective: rewards and saves may be slow, and torchrun ends all ranks if one dies
PATIENCE = 20  # seconds in which torchrun ends the other ranks, once one has failed


class OtherRankError(Exception):
    """Another rank has raised, and shows its error itself."""


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def world() -> int:
    """How many ranks there are."""
    return int(os.environ.get("WORLD_SIZE", 1))


def start(device: str) -> torch.device:
    """Joins the other ranks. Returns the device of this one. Raises UserError where there is none for it."""
    if world() == 1:
        return torch.device(device)
    local = int(os.environ["LOCAL_RANK"])
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device} is one device for {world()} processes: give cpu or cuda")
    if device == "cuda":
        if local >= (gpus := torch.cuda.device_count()):
            raise UserError(f"torchrun starts more processes here than there are GPUs: give --nproc-per-node={gpus}")
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    return torch.device(device, local) if device == "cuda" else torch.device(device)


def stop(code: int = 0) -> None:
    """One rank of many leaves the others, and ends here: gloo's threads may abort a process that takes Python's way out
    (https://github.com/pytorch/pytorch/issues/190489)."""
    if dist.is_initialized():
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def let_rank_0_speak() -> None:
    """Called before an error is shown: what all ranks found, rank 0 shows, and torchrun then ends the others here."""
    if rank() > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PATIENCE)


def together(work: Callable[[], T]) -> list[T]:
    """What `work` returns on each rank, in their order. Where it raises on one of them, it raises on all: UserError as
    it is, others as OtherRankError elsewhere. So all can save, and the error is shown once."""
    if world() == 1:
        return [work()]
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    everybody: list[Any] = [None] * world()
    dist.all_gather_object(everybody, (result, failure and (isinstance(failure, UserError), str(failure))))
    failed = [(k, *why) for k, (_, why) in enumerate(everybody) if why]
    if failed:
        first, is_users, why = failed[0]
        if failure and first == rank():
            raise failure
        raise UserError(why) if is_users else OtherRankError(why)
    return [result for result, _ in everybody]


def on_rank_0(work: Callable[[], T]) -> T:
    """What `work` returns on rank 0, which alone calls it; the others wait."""
    return together(lambda: work() if rank() == 0 else None)[0]  # type: ignore[return-value]


def share(items: Iterable[T]) -> Iterator[T]:
    """This rank's items. They are dealt forth and back (0 1 2 2 1 0 0 ...), so that ranks get alike where items become
    smaller."""
    for k, item in enumerate(items):
        place = k % (2 * world())
        if rank() == min(place, 2 * world() - 1 - place):
            yield item


def deal(items: Iterable[T], model) -> Iterator[tuple[T, bool]]:
    """This rank's items for a pass with gradients, and whether each counts. Under FSDP all ranks must run equally many
    passes: who has fewer items runs the first one again, which then counts nothing."""
    items = list(items)
    mine = list(share(items))
    yield from ((item, True) for item in mine)
    if is_sharded(model):
        yield from ((items[0], False) for _ in range(-(-len(items) // world()) - len(mine)))


def total(tensor: Tensor) -> Tensor:
    """The sum over ranks, in place."""
    if world() > 1:
        dist.all_reduce(tensor)
    return tensor


def total_numbers(numbers: dict[str, float]) -> dict[str, float]:
    """The sums over ranks by name. A rank may lack some, if it had no work."""
    sums: dict[str, float] = {}
    for part in together(lambda: numbers):
        for name, number in part.items():
            sums[name] = sums[name] + number if name in sums else number
    return sums


def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Sums the gradients over ranks, which FSDP has done with those of shards, and clips them together to the norm
    `limit`. Returns the norm before."""
    parameters = list(parameters)
    if world() > 1:
        plain = [p for p in parameters if p.requires_grad and not is_shard(p)]
        reached = total(torch.tensor([float(p.grad is not None) for p in plain]))  # by the work of any rank
        used = [p for p, ranks in zip(plain, reached.tolist()) if ranks]
        for p in used:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for work in [dist.all_reduce(p.grad, async_op=True) for p in used]:
            work.wait()
    kinds = [[p for p in parameters if is_shard(p) == sharded] for sharded in (False, True)]
    if not kinds[1]:
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
    norms = [whole(torch.nn.utils.get_total_norm([p.grad for p in some if p.grad is not None])) for some in kinds]
    norm = torch.linalg.vector_norm(torch.stack([n.to(norms[1].device) for n in norms]))
    for some in kinds:
        torch.nn.utils.clip_grads_with_norm_(some, limit, norm)
    return norm


def is_shard(tensor: Tensor) -> bool:
    """Whether it is a DTensor. (Its module is not imported where nobody needs it.)"""
    return hasattr(tensor, "full_tensor")


def sharded_parts(*models) -> list[tuple[str, Any]]:
    """The modules that FSDP gathers as one, with their names. None has no parts. (peft's wrapper has all attributes of
    what it wraps, its class has not.)"""
    return [x for model in models if model is not None for x in model.named_modules() if hasattr(type(x[1]), "unshard")]


def is_sharded(model) -> bool:
    return world() > 1 and bool(sharded_parts(model))


def shard_settings(device: torch.device, precision: str | None) -> dict:
    """What `from_pretrained` needs to shard a model over all ranks. Raises UserError where that cannot be."""
    if world() == 1:
        raise UserError(
            "--fsdp shards a model over processes: start them with torchrun --nproc-per-node=N, or leave it"
        )
    try:
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(fsdp_size=world(), fsdp_mixed_precision=precision == "bfloat16")
    except (ImportError, TypeError) as error:
        raise UserError("--fsdp needs transformers 5.14 or newer: pip install -U transformers") from error
    if device.type == "cpu" and torch.cuda.is_available():
        raise UserError(
            "--fsdp shards over the GPUs of this machine: give --device cuda, or hide them by CUDA_VISIBLE_DEVICES="
        )
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing of ours is done in place
    return {"distributed_config": config}


def keep_shards(*models) -> None:
    """How FSDP treats the shards in training: layers are gathered when they run, the rest stays gathered
    until the backward pass. Gradients are added up where FSDP would average them: our denominators are those of all
    ranks. (The second setting: gloo cannot divide in a sum, and NCCL of torch 2.13 loses bfloat16 there.) The backward
    pass gathers the part before in advance: which one that is FSDP would guess from the passes so far, those without
    gradients, too, of which ranks may have run different numbers."""
    for model in models:
        parts = sharded_parts(model)
        for (_, before), (name, module) in zip([("", None), *parts], parts):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_forward(name.rpartition(".")[2].isdigit(), recurse=False)
            module.set_modules_to_backward_prefetch([before] if before else [])


def at_rest(model) -> None:
    """Gives up what FSDP has gathered, so that the parameters of `model` are its shards, which are trained and saved,
    and not the passing whole ones that take their place in between."""
    for _, module in sharded_parts(model):
        module.reshard()


@contextlib.contextmanager
def unsharded(*models) -> Iterator[None]:
    """Inside, every rank has all weights, and no forward pass talks to other ranks: they may run as many as they like.
    Without gradients only."""
    parts = [module for _, module in sharded_parts(*models)]
    for module in parts:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    for root in (module for module in parts if hasattr(module, "tie_weights")):
        root.tie_weights()  # FSDP has gathered them twice
    try:
        yield
    finally:
        for module in parts:
            module.reshard()
        keep_shards(*models)


def whole(tensor: Any) -> Tensor:
    """All of a tensor of which ranks hold shards; others as they are. All ranks must call it."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def gathered(state: Any) -> Any:
    """A state (nested dicts and lists) with its shards made whole on rank 0, in the CPU's memory. The other ranks must
    call it, too, and get no tensors."""
    if world() == 1:
        return state
    if isinstance(state, dict):
        return {name: gathered(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(gathered(value) for value in state)
    if not isinstance(state, Tensor):
        return state
    tensor = whole(state.detach())
    return (tensor.cpu() if is_shard(state) else tensor) if rank() == 0 else None


def placed(value: Tensor | None, like: Any) -> Tensor:
    """What rank 0 has as `value`, on every rank, on the device and with the dtype and the shards of `like`."""
    full = (
        torch.empty(like.shape, dtype=like.dtype, device=like.device)
        if value is None
        else value.to(like.device, like.dtype)
    )
    if is_shard(like):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(full, like.device_mesh, like.placements)
    if world() > 1:
        dist.broadcast(full, 0)
    return full


def load_module(module: torch.nn.Module, saved: dict[str, Tensor]) -> None:
    """Brings the weights that rank 0 has in `saved` into `module`; those it lacks stay as they are. Raises UserError
    where the module has no such weights."""
    at_rest(module)
    own = module.state_dict(keep_vars=True)
    kept = on_rank_0(lambda: {name: tensor.shape for name, tensor in saved.items()})
    if foreign := [name for name, shape in kept.items() if name not in own or own[name].shape != shape]:
        raise UserError(f"the checkpoint's weights {foreign[0]} do not fit: is --model another one than at the start?")
    with torch.no_grad():
        for name in kept:
            own[name].copy_(placed(saved.get(name), own[name]))


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """The same for an optimizer's state_dict."""
    if world() == 1:
        return optimizer.load_state_dict(saved)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept, groups = on_rank_0(lambda: (shapes(saved["state"]), saved["param_groups"]))
    for i, entry in kept.items():
        for name, like in entry.items():
            like = parameters[i] if like.dim() else torch.empty_like(like, device="cpu")  # a count of steps
            entry[name] = placed(saved["state"][i][name] if rank() == 0 else None, like)
    optimizer.load_state_dict({"state": kept, "param_groups": groups})


def shapes(state: dict) -> dict:
    """The state of an optimizer without its numbers."""
    return {i: {name: tensor.to("meta") for name, tensor in entry.items()} for i, entry in state.items()}


def check_equal(*parts) -> None:
    """Raises UserError where ranks do not hold the same weights. parts: modules, others are passed over, and tuples."""
    weights = [p for part in parts if isinstance(part, torch.nn.Module) for p in part.parameters() if not is_shard(p)]
    if world() > 1 and len(set(together(lambda: sum(p.detach().double().sum().item() for p in weights)))) > 1:
        raise UserError("the processes hold different weights: give all nodes the same files of --model")
