"""Steps per second of the control and offline scripts by the number of threads, and what evaluation costs of a run.

    python benchmarks/threads.py                              each script with 1, 2, 4, ... threads: for an idle machine
    python benchmarks/threads.py --scripts ppo sac --threads 1

Each script runs with its defaults, shortened, in a fresh process. `evaluation` is the share of its default run's time
that goes into evaluations: the mean of those measured here times their number there. Seconds of the processor are
given beside those of the clock: with one thread they agree on an idle machine.
"""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SHORT = {  # script -> settings of the run, and steps of its default run over those of this one
    "ppo": (dict(), 1),
    "sac": (dict(total_timesteps=2_500), 4),
    "bc": (dict(max_steps=2_500), 4),
    "iql": (dict(max_steps=2_500), 4),
    "dt": (dict(max_steps=250), 4),
}


@dataclass
class Args:
    scripts: tuple[str, ...] = tuple(SHORT)
    """of ppo, sac, bc, iql, dt"""
    threads: tuple[int, ...] = tuple(n for n in (1, 2, 4, 8, 16) if n <= (os.cpu_count() or 1))
    """numbers of threads"""


def measure(script: str, threads: int) -> dict[str, float]:
    """Runs in a process of its own."""
    module, (settings, longer) = importlib.import_module(f"algos.{script}"), SHORT[script]
    name, seconds = ("achieved" if script == "dt" else "evaluate"), []
    evaluate = getattr(module, name)

    def timed(*args, **kwargs):
        start = time.perf_counter(), time.process_time()
        result = evaluate(*args, **kwargs)
        seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
        return result

    setattr(module, name, timed)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        start = time.perf_counter(), time.process_time()
        args = module.Args(threads=threads, device="cpu", output_dir=folder, save_every=10**9, **settings)
        steps = module.train(args)[-1]["step"]
    both = {}
    for i, (clock, end) in enumerate((("clock", time.perf_counter()), ("processor", time.process_time()))):
        evaluating = sum(pair[i] for pair in seconds)
        training = end - start[i] - evaluating
        both[f"steps per second of the {clock}"] = steps / training
        both[f"evaluation, {clock}"] = evaluating / (evaluating + longer * training)
    return both


def main(args: Args) -> None:
    for script in args.scripts:
        for threads in args.threads:
            command = [sys.executable, __file__, "--measure", script, str(threads)]
            environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            print(script, threads, {name: round(x, 3) for name, x in json.loads(done.stdout).items()}, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        main(tyro.cli(Args, description=__doc__))
