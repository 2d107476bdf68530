"""A run: its folder, its numbers, its checkpoints, its end. Knows no algorithm.

RUN/config.json       arguments as resolved, versions, commit, machine
RUN/metrics.jsonl     one row a step; columns that start with time/ are the only ones that a resume may change
RUN/checkpoints/      what --resume continues from
RUN/curve.png, RUN/model/
"""

import contextlib
import fcntl  # not on Windows, which is not supported
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import torch
from safetensors.torch import save_file

from utils.checkpoint import load_newest, restore, rng_state, save_checkpoint, set_rng_state, write_atomically
from utils.cli import LOGGING_FLAGS, MEMORY_FLAGS, check_unchanged
from utils.distributed import check_equal, gathered, on_rank_0, rank, stop, together
from utils.errors import UserError
from utils.machine import environment
from utils.plot import plot

EARLY = 60  # seconds between saves of unfinished work before the first step


class Run:
    """Made when all input has been checked, so that wrong input leaves no folder behind.

    budget: the argument that says how long to train. schedule_depends_on_budget: then it cannot change on resume.
    headline: the columns of the progress bar. total: steps in the budget.
    """

    def __init__(self, args, algo: str, task: str, total: int, headline: tuple[str, ...], budget: str = "max_steps",
                 schedule_depends_on_budget: bool = False):  # fmt: skip
        if getattr(args, "eval_every", 0) is None:
            args.eval_every = min(max(total // 5, 1), args.longest_gap)
        if args.track:
            try:
                import wandb  # an extra, and never needed for anything but --track
            except ImportError as error:
                raise UserError("--track needs wandb: pip install wandb") from error
        self.args, self.total, self.headline, self.writes = args, total, headline, rank() == 0
        self.shown: dict[str, str] = {}  # the newest value of each headline column
        self.signal: int | None = None
        self.state = self.wandb = None
        self.saved_step = -1
        self.early = time.monotonic()
        config = json.dumps({"algo": algo, "task": task, "args": vars(args), **environment()}, indent=1)
        if args.resume:
            self.dir = Path(args.resume).resolve()
            free = LOGGING_FLAGS + MEMORY_FLAGS + ("sampler",) + (() if schedule_depends_on_budget else (budget,))
            check_unchanged(args, self.dir, free, "on --resume", {budget: " because a schedule depends on it"})
        else:
            name = f"{algo}-{task}-{args.seed}-{datetime.now().strftime('%Y%m%d-%H%M%S-%f')}"
            name = re.sub(r"[^A-Za-z0-9_.-]", "_", name)  # wandb's ids and other people's file systems take no more
            self.dir = Path(args.output_dir).expanduser().resolve() / name
        self.dir, self.history, state = on_rank_0(lambda: self.open(config, total, budget))
        self.state = self.state or state
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.on_signal)
        if args.track and self.writes:
            name = self.dir.name  # also the id, so that a resumed run goes on where it was
            self.wandb = wandb.init(
                project="plainrl", name=name, id=name, resume="allow", dir=self.dir, config=vars(args)
            )
        from tqdm import tqdm

        self.step = self.state["step"] if self.state is not None else 0  # where the last iteration ended
        self.logged = self.step  # the last row's
        off = None if self.writes else True  # None: where there is no terminal
        self.bar = tqdm(total=total, initial=self.step, unit="step", dynamic_ncols=True, disable=off)
        self.print(f"run folder: {self.dir}")

    def open(self, config: str, total: int, budget: str) -> tuple:
        """What rank 0 does alone: makes the run's folder, or takes up what is in it. Returns the folder, the rows of
        the metrics, and the checkpoint without weights and optimizers, which can be large and which `restore` brings to
        the other ranks."""
        if self.args.resume:
            self.lock()
            self.state = load_newest(self.dir / "checkpoints")
            if self.state["step"] > total:
                flag = f"--{budget.replace('_', '-')} is {total}"
                raise UserError(f"{flag} but the run is at step {self.state['step']}: give no less")
        else:
            try:
                self.dir.mkdir(parents=True)
            except OSError as error:
                wrong = f"cannot write to --output-dir {self.args.output_dir} ({error.strerror})"
                raise UserError(f"{wrong}: name a writable folder") from error
            self.lock()
        write_atomically(self.dir / "config.json", lambda path: path.write_text(config))
        self.metrics = open(self.dir / "metrics.jsonl", "a+b")
        if self.state is None:
            return self.dir, [], None
        self.rewind_metrics(self.state["metrics_bytes"])
        small = {name: x for name, x in self.state.items() if name == "rng" or not isinstance(x, dict | list)}
        return self.dir, self.history, small

    def lock(self) -> None:
        self.lock_file = open(self.dir / ".lock", "w")
        try:
            fcntl.flock(self.lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"another process is running in {self.dir}: wait for it or stop it") from error

    def rewind_metrics(self, size: int) -> None:
        """Drops the rows behind the checkpoint, which are computed again. Raises UserError where rows are missing."""
        if self.metrics.seek(0, os.SEEK_END) < size:
            lost = f"{self.dir / 'metrics.jsonl'} has lost rows that the checkpoint counts"
            raise UserError(f"{lost}: put it back as it was, or start afresh without --resume")
        self.metrics.truncate(size)
        self.metrics.seek(0)
        self.history = [json.loads(line) for line in self.metrics]

    def on_signal(self, number: int, _frame) -> None:
        if self.signal is not None:  # asked twice: stop at once
            sys.exit(128 + number)
        self.signal = number
        with contextlib.suppress(RuntimeError):  # it came in the middle of another print, and there it is not possible
            self.print(f"{signal.Signals(number).name}: finishing this step, then saving (again: stop at once)")

    def print(self, text: str) -> None:
        self.bar.write(text) if hasattr(self, "bar") else print(text, flush=True)

    def log(self, step: int, **columns: float) -> None:
        """Appends one row to metrics.jsonl and moves the progress bar. A number that is not finite, which JSON does not
        have (a mean over nothing, a run that diverged), is left out of the row and named in the terminal."""
        if left_out := [name for name, value in columns.items() if not math.isfinite(value)]:
            self.print(f"step {step}: not finite, so not logged: {', '.join(left_out)}")
        columns = {name: value for name, value in columns.items() if name not in left_out}
        row = {"step": step, **columns}
        self.history.append(row)
        if self.writes:
            self.metrics.write((json.dumps(row) + "\n").encode())
            self.metrics.flush()
        if self.wandb is not None:
            self.wandb.log(columns, step=step)
        self.shown |= {name: f"{columns[name]:.3g}" for name in self.headline if name in columns}
        self.bar.set_postfix(self.shown, refresh=False)
        if self.bar.disable and (step == self.total or crosses(step, self.logged, max(1, self.total // 10))):
            print(f"step {step}/{self.total}  " + "  ".join(f"{k} {v}" for k, v in self.shown.items()), flush=True)
        self.bar.update(step - self.logged)
        self.logged, self.begun = step, time.perf_counter()

    def speed(self, step: int) -> float:
        """Steps a second since the row before."""
        return (step - self.logged) / (time.perf_counter() - self.begun)

    def save(self, step: int, state: dict, rng: dict | None = None) -> None:
        """One checkpoint: the script's own state, the generators (`rng` where they are to be those of an earlier
        moment) and how long the metrics file is. All ranks call it, rank 0 writes."""
        if step == self.saved_step:
            return
        state = gathered(state) | {"step": step, "rng": rng or rng_state()}

        def write() -> None:
            os.fsync(self.metrics.fileno())
            size = self.metrics.seek(0, os.SEEK_END)
            save_checkpoint(self.dir / "checkpoints", step, state | {"metrics_bytes": size}, self.args.keep)

        on_rank_0(write)
        self.saved_step = step

    @contextlib.contextmanager
    def saving(self, step: int, state: dict | Callable[[], dict], rng: dict | None = None, columns: dict | None = None):
        """Around code of the user's (an environment, a reward): where it raises, `state` is saved, so that --resume
        loses nothing. Around collecting, give the state and `rng` from before the step: a resumed run repeats it.
        Around an evaluation, give the state after the update and the step's `columns`, which are logged: a resumed run
        goes on after it. Never around an update: half-trained weights are not saved."""
        try:
            yield
        except Exception:
            together(lambda: None)  # raises if another rank was killed: what is lost then is computed again, not saved
            if columns is not None:
                self.log(step, **columns)
            self.save(step, state() if callable(state) else state, rng)
            raise

    def due(self, step: int, every: int) -> bool:
        """Whether something is due after this iteration: at the end, and every `every` steps (0: at the end only)."""
        return step >= self.total or (every > 0 and crosses(step, self.step, every))

    def end_step(self, step: int, state: Callable[[], dict]) -> None:
        """At the end of an iteration: saves if it is due, and exits if a signal asked any rank for it."""
        asked = max(number or 0 for number in together(lambda: self.signal))
        if self.due(step, self.args.save_every) or asked:
            self.save(step, state())
        self.step = step
        if asked and step < self.total:
            self.leave(asked, f"after step {step}")

    def leave(self, number: int, when: str) -> NoReturn:
        self.bar.close()
        print(f"stopped {when}; continue with --resume {self.dir}", flush=True)
        if self.wandb is not None:
            self.wandb.finish(exit_code=128 + number)
        stop(128 + number)
        sys.exit(128 + number)

    def save_early(self, state: dict) -> None:
        """Called in the middle of long work before the first step: once in EARLY seconds, and when a signal asks to
        leave, saves `state`, what is known so far. Resumed from there, a run starts from the beginning with it."""
        found = together(lambda: (self.signal or 0, time.monotonic() >= self.early + EARLY))
        asked, due = max(number for number, _ in found), found[0][1]
        if not asked and not due:
            return
        if self.state is None or "early" in self.state:  # else a larger budget made the work, and all is saved
            self.save(0, state | {"early": True})
            self.saved_step = -1
        self.early = time.monotonic()
        if asked:
            self.leave(asked, "before the first step")

    def restore(self, **parts) -> bool:
        """With --resume: brings `parts` (modules, optimizers, generators) and the global generators back to the
        checkpoint. Else returns False. Call it last, behind everything that draws random numbers before the loop."""
        self.begun = time.perf_counter()
        state = self.state if self.state is not None and "early" not in self.state else None
        if state is not None:
            restore(state, **parts)
            set_rng_state(state["rng"])
        check_equal(*parts.values())
        return state is not None

    def finish(self, model: Callable[[Path], None] | dict[str, torch.Tensor], curves: dict, title: str) -> list[dict]:
        """Writes RUN/model and RUN/curve.png. Returns the history. model: a function that fills the folder, or the
        weights. curves: title of a panel -> its columns, `eval/*` for all that begin so, or {x: column} for the last
        row's numbers over x."""
        self.bar.close()
        part, folder = self.dir / "model.tmp", self.dir / "model"

        def publish() -> None:
            if folder.exists():  # a resumed run that had already finished
                folder.rename(self.dir / f"model.{time.time_ns()}.old")
            part.rename(folder)
            plot(self.history, curves, title, self.dir / "curve.png")

        on_rank_0(lambda: part.mkdir(exist_ok=True))
        model(part) if callable(model) else save_file(model, part / "model.safetensors")
        on_rank_0(publish)
        if self.wandb is not None:
            self.wandb.finish()
        print(f"model: {folder}\ncurve: {self.dir / 'curve.png'}", flush=True)
        if self.writes:
            self.metrics.close()
            self.lock_file.close()
        for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            signal.signal(number, handler)
        return self.history


def crosses(step: int, before: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (before, step]: an iteration may be more than one step."""
    return step // every > before // every
