"""The command line of a script: flags that all have, wrong input in one sentence, seeds, threads and the device."""

import contextlib
import dataclasses
import json
import math
import os
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import tyro

from utils.distributed import OtherRankError, let_rank_0_speak, rank, start, stop, world
from utils.errors import NonNegativeInt, PositiveInt, Seed, UserError, check_numbers
from utils.machine import cores

LOGGING_FLAGS = ("resume", "track", "save_every", "keep", "output_dir")  # none of them changes what is computed
# nor these, but for rounding
MEMORY_FLAGS = ("gradient_checkpointing", "micro_batch_tokens", "micro_batch_size", "fsdp")
SMALLER_FLAGS = ("lora_rank", "sample_batch_size", "max_completion_length", "batch_size", "num_envs", "buffer_size")


@dataclasses.dataclass
class RunArgs:
    most_threads = math.inf  # that --threads 0 takes
    seed: Seed = 1
    """seed of every generator"""
    device: str = "auto"
    """cpu, cuda, mps, or auto: cuda where there is one, else cpu"""
    threads: NonNegativeInt = 0
    """CPU threads; 0: OMP_NUM_THREADS where set, else one per core. Results are bit for bit equal at equal counts"""
    output_dir: str = "runs"
    """the run's folder is made in here"""
    save_every: PositiveInt = 50
    """steps between checkpoints"""
    keep: PositiveInt = 2
    """checkpoints kept"""
    resume: str = ""
    """folder of a run to continue; keep all flags but those of logging, --gradient-checkpointing, --micro-batch-... and
    --fsdp, and the budget if a schedule depends on it"""
    track: bool = False
    """also log to Weights & Biases (WANDB_MODE=offline works)"""


def main(args_class: type, train: Callable) -> None:
    """The command line of a script. Wrong input and too little memory end with one sentence and exit code 2; with
    --resume or --evaluate the defaults are the saved run's arguments, so that only what is typed can differ. Of many
    ranks only rank 0 prints."""
    if rank() > 0:
        sys.stdout = open(os.devnull, "w")
    try:
        early = dataclasses.make_dataclass("Early", [("resume", str, ""), ("evaluate", str, "")])
        given = tyro.cli(early, return_unknown_args=True, add_help=False, args=sys.argv[1:])[0]
        default = args_class()
        if folder := given.resume or given.evaluate:
            saved = saved_args(Path(folder), train.__globals__.get("NAME"))
            if foreign := saved.keys() - {field.name for field in dataclasses.fields(args_class)}:
                raise UserError(f"{folder} is a run of another script or version: it has {', '.join(sorted(foreign))}")
            default = args_class(**saved)
        try:
            with contextlib.redirect_stderr(sys.stdout if rank() > 0 else sys.stderr):
                args = tyro.cli(args_class, default=default, description=sys.modules["__main__"].__doc__)
        except SystemExit as leaving:
            let_rank_0_speak() if leaving.code else None
            raise
        train(args)
        stop()
    except OtherRankError:
        let_rank_0_speak()
        sys.exit(1)
    except (UserError, RuntimeError) as error:
        full = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)  # a GPU's, a CPU's
        if not full and not isinstance(error, UserError):
            raise
        let_rank_0_speak()
        sentence = out_of_memory(args_class) if full else " ".join(str(error).split())
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(2)


def out_of_memory(args_class: type) -> str:
    flags = [[f"--{name.replace('_', '-')}" for name in names if hasattr(args_class, name)]
             for names in (MEMORY_FLAGS, SMALLER_FLAGS)]  # fmt: skip
    go_on, afresh = map(", ".join, flags)
    go_on = f"--resume the run, whose last checkpoint stays, with less by {go_on}, or " if go_on else ""
    return f"the memory of the device is full: {go_on}start afresh with less by {afresh}"


def saved_args(folder: Path, script: str | None = None) -> dict:
    """The arguments of the run in `folder`. Raises UserError where there is none, or another script's than `script`."""
    try:
        config = json.loads((folder / "config.json").read_text())
        algo, args = config["algo"], config["args"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder} is not the folder of a run: it has no readable config.json") from error
    if script is not None and script != algo:
        raise UserError(f"{folder} is a run of {algo}.py, not of {script}.py: give it to that script")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in args.items() if k != "resume"}  # the folder may move


def check_unchanged(args, folder: Path, free: tuple[str, ...], how: str, why: Mapping[str, str] = {}) -> None:
    """Raises UserError where an argument that is not `free` differs from that of the run in `folder`. why: by name."""
    for name, saved in saved_args(folder).items():
        if name not in free and (value := getattr(args, name, saved)) != saved:
            flag = f"--{name.replace('_', '-')} is {value}"
            raise UserError(f"{flag} but the run in {folder} has {saved}: it cannot change {how}{why.get(name, '')}")


def prepare(args: RunArgs) -> torch.device:
    """Checks every number, seeds every global generator, pins the thread count, and chooses the device. Raises
    UserError for a number out of its bounds and for a device that this machine does not have."""
    check_numbers(args)
    saved = saved_args(Path(args.resume))["threads"] if args.resume else 0
    args.threads = args.threads or saved or int(os.environ.get("OMP_NUM_THREADS") or min(cores(), args.most_threads))
    torch.set_num_threads(args.threads)
    random.seed(args.seed)
    np.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not found.get(args.device.partition(":")[0], False):
        names = ", ".join(name for name, there in found.items() if there)
        raise UserError(f"--device {args.device} is not available on this machine: use {names}")
    if world() > 1 and not hasattr(args, "fsdp"):
        raise UserError("this script runs in one process: start it without torchrun")
    return start(args.device)


def resolve(args: RunArgs, presets: dict[str, dict], row: str) -> str:
    """Fills in every argument that was left at None from that row of `presets`. Returns a line for the terminal."""
    resolved = {name: value for name, value in presets[row].items() if getattr(args, name) is None}
    for name, value in resolved.items():
        setattr(args, name, value)
    return f"settings for {row}: {resolved}"
