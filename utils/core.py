"""A run: its arguments, and its folder with config.json, metrics.jsonl, checkpoint.pt, curve.png and model/."""

import contextlib
import dataclasses
import json
import math
import os
import random
import re
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from fnmatch import fnmatch
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from signal import SIGINT, SIGTERM, signal
from typing import Annotated, Any, ClassVar, get_type_hints

import numpy as np
import torch
import tyro

VERSION = "0.3.0.dev0"  # as in pyproject.toml, which a copied file does not have
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe, Ito: for all eyes


class UserError(Exception):
    """Wrong input. One sentence: what was wrong, and what to type instead (exit code 2, no traceback)."""


@dataclasses.dataclass
class RunArgs:
    most_threads = 64  # that --threads 0 takes
    moved: ClassVar[dict[str, tuple]] = {}  # a flag that the script had -> the file that has it now, its default then
    # a run beyond these would fail late, or train in silence, wrongly; other whole numbers: 0 or more
    limits = {**dict.fromkeys(("gamma", "gae_lambda", "tau", "start_e", "end_e", "top_fraction", "expectile"), (0, 1)),
              **dict.fromkeys(("beta", "epsilon", "max_grad_norm"), (0, math.inf)),
              **dict.fromkeys(("num_minibatches", "update_epochs", "policy_frequency", "num_critics", "subset_size",
                               "num_samples", "num_heads", "flow_steps"), (1, math.inf))}  # fmt: skip
    seed: int = 1
    """seed of every generator"""
    device: str = "auto"
    """cpu, cuda, mps, or auto: cuda where there is one"""
    threads: int = 0
    """CPU threads; 0: OMP_NUM_THREADS where set, else one per core"""
    output_dir: str = "runs"
    """the run's folder is made in here"""
    save_every: int = 50
    """steps between checkpoints"""
    resume: str = ""
    """folder of a run to continue, with its arguments"""
    track: bool = False
    """also log to Weights & Biases"""


def main(args_class: type[RunArgs], train: Callable, algo: str) -> None:
    """The command line of a script. With --resume or --evaluate the defaults are the saved run's arguments."""
    early = dataclasses.make_dataclass("Early", [("resume", str, ""), ("evaluate", str, "")])
    try:
        given, typed = tyro.cli(early, return_unknown_args=True, add_help=False)
        for flag in (word.partition("=")[0] for word in typed if word.startswith("--")):
            if there := args_class.moved.get(flag[2:].replace("-", "_").removeprefix("no_")):
                raise UserError(f"{flag} moved to {there[0]}: give it to that script")
        if given.resume and given.evaluate:
            raise UserError("--resume goes on with a run and --evaluate scores one: give one of the two")
        folder = given.resume or given.evaluate
        default = args_class(**saved_args(folder, algo, args_class)) if folder else args_class()
        title, _, text = str(sys.modules[args_class.__module__].__doc__).partition("\n\n")
        try:
            args = tyro.cli(with_presets(args_class), default=default, description=title)
        finally:
            print(text if {"-h", "--help"} & {*sys.argv} else "", end="")  # the options first
        changed = {k: v for k, v in vars(args).items() if v != getattr(default, k) and k != "evaluate"}
        train(args)
        if given.evaluate and changed:
            print(f"changed on --evaluate: {changed}", file=sys.stderr)  # on stdout stands the score alone
        if given.evaluate and args.track and args.capture_video:  # type: ignore[attr-defined]
            import wandb

            videos = Path(given.evaluate).glob("video/*.mp4")
            start_wandb(Path(given.evaluate), args).log({path.stem: wandb.Video(str(path)) for path in videos})
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def with_presets(args_class: type[RunArgs]) -> type[RunArgs]:
    """Adds what PRESETS of the script give in place of None to its --help. Returns the class."""
    presets = getattr(sys.modules[args_class.__module__], "PRESETS", {})
    for name in {name for row in presets.values() for name in row}:
        values = "; ".join(f"{row.get(name)} {kind}" for kind, row in presets.items())
        hint = tyro.conf.arg(help_behavior_hint=f"(default: {values})")
        args_class.__annotations__[name] = Annotated[get_type_hints(args_class)[name], hint]
    return args_class


def saved_args(folder: str, algo: str, known: type | None = None) -> dict:
    """The arguments of the run in `folder`. Those that `known`, the script's Args, lacks today are left out where they
    had their default. Raises UserError where there is no such run, or none that can be read."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
        saved, by, then = config["args"], config["algo"], config.get("defaults", {})
    except (OSError, KeyError) as error:
        raise UserError(f"{folder} is not the folder of a run: it has no config.json of one") from error
    except ValueError as error:
        raise UserError(f"{folder}/config.json is damaged ({error}): put a copy back, or start afresh") from error
    if by != algo:
        raise UserError(f"{folder} is a run of {by}.py, not of {algo}.py: give it to that script")
    gone, moved = {name for name in saved if known and not hasattr(known, name)}, getattr(known, "moved", {})
    if lost := {name: saved[name] for name in gone if saved[name] != moved.get(name, ("", then.get(name)))[1]}:
        wrote = f"version {config.get('version', '0.2')} wrote {folder} with {lost}"
        where = next((f"moved to {moved[name][0]}" for name in lost if name in moved), f"version {VERSION} lacks")
        raise UserError(f"{wrote}, which {where}: use the version that wrote it")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k not in {"resume", *gone}}


def prepare(args: RunArgs) -> torch.device:
    """Seeds every global generator and chooses threads and device. Raises UserError for a number out of its bounds."""
    if os.environ.get("WORLD_SIZE", "1") != "1" and not hasattr(args, "fsdp"):
        raise UserError("this script runs in one process: start it without torchrun")
    for name, value in vars(args).items():
        least, most = args.limits.get(name, (0, math.inf if type(value) is int else None))
        if None not in (value, most) and not least <= value <= most:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be from {least} to {most}")
    args.threads = args.threads or min(torch.get_num_threads(), args.most_threads)
    torch.set_num_threads(args.threads)
    random.seed(args.seed)
    np.random.seed(args.seed % 2**32)
    torch.manual_seed(args.seed)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(args.device)


def preset(args: RunArgs, presets: dict[str, dict], row: str) -> str:
    """Fills in every argument that was left at None from that row of `presets`. Returns a line for the terminal."""
    filled = {name: value for name, value in presets[row].items() if getattr(args, name) is None}
    vars(args).update(filled)
    return f"settings for {row}: {filled}" if filled else ""


def choose_precision(args, device: torch.device | str, frozen: bool = False) -> bool:
    """Fills in --precision where FSDP or the processor decide. Returns whether the loaded weights are bfloat16."""
    flags = torch.cpu.get_capabilities()
    slow = torch.device(device).type == "cpu" and not (flags.get("amx_bf16") or flags.get("avx512_bf16"))
    if slow and not (args.precision or args.fsdp) and os.environ.get("RANK", "0") == "0":
        print("float32: this processor has no bfloat16 products")
    args.precision = args.precision or ("bfloat16" if args.fsdp else "float32" if slow else None)
    return args.precision == "pure-bfloat16" or bool(frozen or args.lora_rank) and args.precision != "float32"


def find_users_code(folder: Path) -> None:
    """Lets `import` find what is in `folder`. A package `utils` there takes the name: all of ours is loaded."""
    sys.path[:] = [str(folder), *(path for path in sys.path if path != str(folder))]
    in_the_way = __name__.startswith("utils.") and any(folder.glob("utils*"))  # a copied file is in no package
    if in_the_way and str(folder) != (ours := str(Path(__file__).resolve().parents[1])):
        sys.path[:] = [path for path in sys.path if path != ours]
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "utils" and str(module.__file__).startswith(ours):
                del sys.modules[name]


def as_kwargs(pairs) -> dict:
    """NAME=VALUE texts as a dictionary: a VALUE is read as JSON, or Python's True, False, None; else it stays text."""
    found: dict = dict(pair.partition("=")[::2] for pair in pairs)
    for name, value in found.items():
        with contextlib.suppress(ValueError):
            found[name] = json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    return found


def rng_state() -> list:
    """The states of Python's, NumPy's and torch's global generators, in types that weights_only loading accepts."""
    kind, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [[version, list(words), gauss], [kind, np.asarray(keys).tolist(), *rest], torch.get_rng_state(), cuda]


def set_rng_state(state: list) -> None:
    (version, words, gauss), (kind, keys, *rest), cpu, cuda = state
    random.setstate((version, tuple(words), gauss))
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(cpu)
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(cuda)


def crosses(step: int, before: int, every: int) -> bool:
    """Whether a multiple of `every` lies in (before, step]: an iteration may be more than one step."""
    return every > 0 and step // every > before // every


def start_wandb(folder: Path, args):
    import wandb

    project = os.environ.get("WANDB_PROJECT", "plainrl")  # entity, group and tags it reads itself
    how = dict(name=folder.name, id=folder.name, dir=folder, config=vars(args))
    return wandb.init(project=project, resume="allow", **how)


class Run:
    """Made when all input has been checked. What fails before its first row changes no file. total: steps in the
    budget. headline: the columns of the progress bar. `state`: with --resume what was saved, else {}."""

    def __init__(self, args, algo: str, task: str, total: int, headline: tuple[str, ...]):
        from tqdm import tqdm

        if getattr(args, "eval_every", 0) is None:
            args.eval_every = min(max(total // 5, 1), 50_000)
        self.args, self.total, self.headline, self.shown, self.signal, self.wandb = args, total, headline, {}, 0, None
        self.about = {"algo": algo, "task": task}
        self.writes = os.environ.get("RANK", "0") == "0"  # of several processes the first one
        self.budget = "--total-timesteps" if hasattr(args, "total_timesteps") else "--max-steps"
        self.metrics: Any = None
        self.state, self.history, self.rows, self.told, self.kept, changed = {}, [], [], False, 0, {}
        if args.resume:
            self.dir = Path(args.resume).resolve()
            self.state, before = read_checkpoint(self.dir), saved_args(args.resume, algo)
            changed = {k: v for k, v in vars(args).items() if k != "resume" and before.get(k, v) != v}
            if (done := self.state["step"]) > total or done == total and (self.dir / "curve.png").exists():
                raise UserError(f"{args.resume} is at its end, step {done:,}: raise {self.budget}, or drop --resume")
            if (path := self.dir / "metrics.jsonl").exists():  # rows behind the checkpoint are computed again
                rows = path.read_bytes()[: self.state["metrics_size"]]
                self.history, self.kept = [json.loads(row) for row in rows.splitlines()], len(rows)
        else:
            name = f"{algo}-{task[:100]}-{args.seed}-{datetime.now():%Y%m%d-%H%M%S-%f}"
            self.dir = Path(args.output_dir).expanduser().resolve() / re.sub(r"[^\w.-]", "_", name)
        self.samples = self.dir / "samples.jsonl"
        if args.track and not find_spec("wandb"):
            raise UserError("--track needs wandb: pip install wandb")
        for number in (SIGINT, SIGTERM):  # the first one ends the run after its step
            signal(number, self.on_signal)
        self.step = self.logged = self.state.get("step", 0)  # where the last iteration ended; the step of the last row
        self.begun = time.perf_counter()
        how = dict(unit="step", dynamic_ncols=True, disable=None if self.writes else True)  # None: without a terminal
        self.bar = tqdm(total=total, initial=self.step, **how)
        self.print(f"run folder: {self.dir}" + (f"\nchanged on --resume: {changed}" if changed else ""))

    def open(self) -> None:
        """Makes the folder, or writes to it again, where that was not done yet."""
        if not self.writes or self.metrics:
            return
        self.dir.mkdir(parents=True, exist_ok=True)
        if self.args.track:
            self.wandb = start_wandb(self.dir, self.args)
        versions = {name: version(name) for name in ("torch", "numpy", "transformers", "gymnasium")}
        config = {**self.about, "version": VERSION, "args": vars(self.args), "defaults": vars(type(self.args)()),
                  "versions": versions, "command": sys.argv}  # fmt: skip
        write_atomically(self.dir / "config.json", lambda file: file.write(json.dumps(config, indent=1).encode()))
        self.metrics = open(self.dir / "metrics.jsonl", "a")
        self.metrics.seek(self.metrics.truncate(self.kept))
        if self.samples.exists():
            os.truncate(self.samples, self.state.get("samples_size", 0))
        (self.dir / "curve.png").unlink(missing_ok=True)  # it tells a run that is at its end

    def on_signal(self, number: int, _frame) -> None:
        if self.signal:
            sys.exit(128 + number)
        self.signal = number

    def print(self, text: str) -> None:
        if self.writes and text:
            self.bar.write(text)

    def keep(self, rows: list[dict], text: str = "") -> None:
        """Prints `text`, and writes `rows` to samples.jsonl with the next row of metrics."""
        self.rows += rows
        self.print(text)

    def log(self, step: int, **columns: float) -> None:
        """Appends one row to metrics.jsonl. A number that is not finite, which JSON does not have, is left out."""
        self.open()
        if self.rows and self.writes:
            rows = [{"step": step} | {k: v if v == v else None for k, v in row.items()} for row in self.rows]
            with open(self.samples, "a") as file:
                file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
            if self.wandb:
                import wandb

                names = list(dict.fromkeys(name for row in rows for name in row))
                table = wandb.Table(names, [[row.get(name) for name in names] for row in rows])
                self.wandb.log({"samples": table}, step=step)
        self.rows = []
        if left_out := [name for name, value in columns.items() if not math.isfinite(value)]:
            self.print(f"step {step}: not finite, so not logged: {', '.join(left_out)}")
        row = {"step": step, **{name: value for name, value in columns.items() if name not in left_out}}
        self.history.append(row)
        if self.metrics:
            print(json.dumps(row), file=self.metrics, flush=True)
        if self.wandb:
            self.wandb.log(row, step=step)
        self.shown |= {name: f"{row[name]:.3g}" for name in (*self.headline, "eval/success") if name in row}
        self.bar.set_postfix(self.shown, refresh=False)
        if self.bar.disable and (step >= self.total or crosses(step, self.logged, max(1, self.total // 10))):
            self.print(f"step {step}/{self.total}  " + "  ".join(f"{k} {v}" for k, v in self.shown.items()))
        since = max(self.state.get("step", 0), getattr(self.args, "learning_starts", 0))
        if not self.told and since < self.logged < step < self.total:  # the first row behind it is slower
            self.told, speed, tokens = True, self.speed(step), row.get("time/tokens_per_second")
            rate = f"{float(f'{speed:.3g}'):,g} steps a second" if speed >= 1 else f"{1 / speed:.3g} s a step"
            rate += f", {tokens:,.0f} tokens a second" if tokens else ""
            self.print(f"{rate}, about {timedelta(seconds=round((self.total - step) / speed))} to go")
        self.bar.update(step - self.logged)
        self.logged, self.begun = step, time.perf_counter()

    def speed(self, step: int) -> float:
        return (step - self.logged) / (time.perf_counter() - self.begun)

    def due(self, step: int, every: int) -> bool:
        """Whether something is due after this iteration: at the end, and every `every` steps (0: at the end only)."""
        return step >= self.total or crosses(step, self.step, every)

    def end_step(self, step: int, parts: dict) -> None:
        """At the end of an iteration: saves if it is due, and exits if a signal asked any process to. parts: by name
        modules, optimizers, generators, all that has a state_dict; numbers, lists and tensors are saved as they are."""
        asked = torch.tensor(self.signal)  # read once: it may come below
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
        if asked or self.due(step, self.args.save_every):
            state = {}
            for name, part in parts.items():
                read = getattr(part, "state_dict", None) or getattr(part, "get_state", None)
                state[name] = read() if read else part
            if self.writes:
                self.open()
                state |= {"step": step, "rng": rng_state(), "metrics_size": self.metrics.tell()}
                state["samples_size"] = self.samples.stat().st_size if self.samples.exists() else 0
                write_atomically(self.dir / "checkpoint.pt", lambda file: torch.save(state, file))
        self.step = step
        if asked and step < self.total:
            self.print(f"stopped after step {step}; continue with --resume {self.dir}")
            sys.exit(128 + int(asked))

    def restore(self, **parts) -> bool:
        """With --resume: `parts` and the global generators as saved; else False. Draw nothing before the loop."""
        if self.state:
            load(self.dir, self.state, parts)
            set_rng_state(self.state["rng"])
        return bool(self.state)

    def finish(self, weights: dict | Callable, curves: dict, title: str) -> list:
        """Writes RUN/model, or has `weights` fill that folder, and RUN/curve.png (see `plot`). Returns the history."""
        from safetensors.torch import save_file

        self.bar.close()
        self.open()  # where no step was to be done
        if self.writes:
            (self.dir / "model").mkdir(exist_ok=True)
        weights(self.dir / "model") if callable(weights) else save_file(weights, self.dir / "model/model.safetensors")
        if self.writes:
            unit = "environment steps" if hasattr(self.args, "total_timesteps") else "training steps"
            plot(self.history, curves, title, unit, self.dir / "curve.png")
            print(f"model: {self.dir / 'model'}\ncurve: {self.dir / 'curve.png'}", flush=True)
            if getattr(sys.modules["__main__"], "NAME", "") == self.about["algo"]:  # not where others call train
                script, run = f"next: python {sys.argv[0]}", os.path.relpath(self.dir)
                see = f"{script} --evaluate {run} --capture-video\n" if hasattr(self.args, "evaluate") else ""
                print(f"{see}{script} --resume {run} {self.budget} {2 * self.total}", flush=True)
                if __name__ != "__main__":  # a copied file has no benchmarks/
                    print(f"next: python benchmarks/compare.py {run} ANOTHER-RUN", flush=True)
        return self.history


def write_atomically(path: Path, write: Callable) -> None:
    """`write(file)`, flushed to the disk, then renamed: a kill leaves the old file or the new."""
    with open(path.with_name(path.name + ".tmp"), "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def read_checkpoint(folder: Path) -> dict:
    try:
        return torch.load(folder / "checkpoint.pt", "cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"{folder} has no checkpoint yet: start afresh without --resume") from error
    except Exception as error:  # of zip, pickle or torch
        raise UserError(f"{folder}/checkpoint.pt is damaged: put a copy back, or start afresh") from error


def load(folder: Path, state: dict, parts: dict) -> None:
    """Gives `parts` what the run in `folder` saved. Raises UserError where one does not fit."""
    for name, part in parts.items():
        try:
            (part.set_state if isinstance(part, torch.Generator) else part.load_state_dict)(state.pop(name))
        except (KeyError, ValueError, RuntimeError) as error:
            text = " ".join(str(error).split())
            why = re.sub(r".*?mismatch for (\S+): .*?\[(.*?)\].*?\[(.*?)\].*", r"\1 is \2 there and \3 here", text)
            raise UserError(f"{folder} was trained with another environment or other sizes than these ({name}: "
                            f"{why:.200}): give those of the run") from error  # fmt: skip


def plot(history: list[dict], curves: dict, title: str, unit: str, path: Path) -> None:
    """One panel for each entry of `curves`: its title and its columns, `eval/*` for all that begin so, but for
    eval/distinct, a count beside shares. unit: what steps are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(curves), 3.4), layout="constrained")
    for axis, (panel, names) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items()):
        axis.set_prop_cycle(color=COLOURS)
        found = dict.fromkeys(c for row in history for c in row if any(fnmatch(c, name) for name in names))
        for column in [column for column in found if column != "eval/distinct"]:
            points = [(row["step"], row[column]) for row in history if column in row]
            axis.plot(*zip(*points), marker="." if len(points) < 30 else "", label=column)
            axis.legend(fontsize=8)
        axis.set(title=panel, xlabel=unit)
        axis.locator_params(axis="x", nbins=5, integer=True)  # numbers of six digits do not touch
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
