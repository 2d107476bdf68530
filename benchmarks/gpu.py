"""What plainrl does on one GPU: whether it is right there, how fast it is, and that a real model learns.

    python benchmarks/gpu.py check --out benchmarks/results/gpu      150 s: gradients, every script, resume, torchrun
    python benchmarks/gpu.py speed --out benchmarks/results/gpu      300 s: beside TRL and CleanRL, and what costs most
    python benchmarks/gpu.py learn --out benchmarks/results/gpu --chat-model FOLDER      240 s: sums, beside TRL
    python benchmarks/page.py write                                  the pages, from what these wrote

FOLDER holds a chat model: python benchmarks/chat_model.py makes one, and prints its folder. `speed --cleanrl CLONE`
also times CleanRL's SAC, from a git clone of it; without CLONE these items are "not run". `speed` and `learn` need TRL.
Without git the variable PLAINRL_COMMIT names the commit.

A part writes OUT/PART.json after each item. An item that fails is recorded with its error, one without time left as not
run, and the next one goes on. The same command again runs these alone, `learn` whole. Remove PART.json to run all.
--smoke does the same on any machine with tiny sizes.
"""

import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SECONDS = {"check": 150, "speed": 300, "learn": 240}
HALF_A_BILLION = dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                      num_attention_heads=14, num_key_value_heads=2)  # fmt: skip
TINY = dict(vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2)  # fmt: skip
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWARDS = """
def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]
def graded(completions, **_):
    return [sum(map(ord, text_of(c))) % 7 / 7 for c in completions]
def right(completions, answer, **_):
    numbers = [[word for word in text_of(c).replace(".", " ").split() if word.isdigit()] for c in completions]
    return [float(bool(found) and found[-1] == a) for found, a in zip(numbers, answer)]
"""


class Record:
    """PART.json and its items."""

    def __init__(self, part: str, out: Path, smoke: bool):
        self.path, self.lock, self.smoke = out / f"{part}.json", threading.Lock(), smoke
        self.deadline = time.monotonic() + SECONDS[part]
        self.data = {"part": part, "smoke": smoke, "date": time.strftime("%Y-%m-%d"), "items": {}, "ratios": {}}
        out.mkdir(parents=True, exist_ok=True)
        old = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.done = old.get("items", {}) if old.get("smoke") == smoke else {}
        self.last = self.done.pop("machine", {})

    def on(self, machine: dict) -> dict:
        """Forgets what another card has done: figures of two are not mixed. Other items keep their commit."""
        self.done = self.done if self.last.get("gpu") == machine.get("gpu") else {}
        for found in self.done.values():
            found.setdefault("commit", self.last.get("commit"))
        return machine

    def item(self, name: str, limit: float, work: Callable[..., dict]) -> dict:
        """What `work` finds in `limit` seconds, with which it is called; empty where it fails or less time is left."""
        start = time.monotonic()
        left = self.deadline - start
        if name in self.done and not {"error", "not run"} & self.done[name].keys():
            self.data["items"][name] = self.done[name]
            return self.done[name]
        try:
            found = work(limit=limit) if left >= limit else {"not run": "the part's time was over"}
        except Exception as error:  # whatever it is, the next item runs
            found = {"error": f"{type(error).__name__}: {error}"[-2000:]}
        found["seconds"] = round(time.monotonic() - start, 1)
        self.write(name, found)
        return {} if {"error", "not run"} & found.keys() else found

    def write(self, name: str, found: dict) -> None:
        with self.lock:
            self.data["items"][name] = found
            self.path.write_text(json.dumps(self.data, indent=1) + "\n")
        print(f"{name}: {json.dumps(found)[:300]}", flush=True)

    def ratio(self, name: str, above: float | None, below: float | None) -> None:
        """Of two figures of this run, where both are there."""
        if above and below:
            self.data["ratios"][name] = round(above / below, 3)


def call(command: list, limit: float, **environment: str) -> str:
    """What a command prints. Raises RuntimeError where it fails or takes longer: it ends then, and what it started."""
    given = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    given |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "2") | environment
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=given | os.environ | environment, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise RuntimeError(f"took longer than {limit:.0f} s: {process.communicate()[1][-1000:]}") from None
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {err[-1500:]}")
    return out


def worker(job: str, limit: float, before: tuple = (sys.executable,), **settings) -> dict:
    """What the function of that name in WORKERS returns in a process of its own."""
    return json.loads(call([*before, __file__, "worker", job, json.dumps(settings)], limit).splitlines()[-1])


def rows_of(folder: Path) -> list[dict]:
    """The metrics of the one run in it."""
    (path,) = folder.glob("*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines_in(folder: Path) -> int:
    return sum(path.read_text().count("\n") for path in folder.glob("*/metrics.jsonl"))


def apart(rows: list[dict], others: list[dict]) -> float:
    """The largest difference of two runs' metrics, relative for those above 1. Raises where the runs differ in rows."""
    names = [[sorted(name for name in row if not name.startswith("time/")) for row in run] for run in (rows, others)]
    if names[0] != names[1]:
        raise ValueError(f"the runs have {len(rows)} and {len(others)} rows, or other columns")
    return max(abs(a[k] - b[k]) / max(1, abs(b[k])) for a, b, some in zip(rows, others, names[0]) for k in some)


def within(difference: float, bound: float) -> dict:
    return {"largest difference": difference, "ok": difference <= bound}  # NaN is not


# Parts


def check(record: Record, device: str, compiles: bool) -> None:
    from tests.specs import SPECS, parent_of

    def small(script: str, *more: str) -> list[str]:
        return [*SPECS[script].small.replace("--device cpu", f"--device {device}").split(), *more]

    def gradients(script: str, limit: float) -> dict:
        found = worker("gradients", limit, script=script, words=small(script), device=device)
        return found | within(found["largest difference"], 1e-4)

    def small_run(script: str, *more: str, limit: float) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            call([sys.executable, ROOT / f"algos/{script}.py", *small(script, *more), "--output-dir", folder], limit)
            rows = rows_of(Path(folder))
            gaps = [row["sampler_gap"] for row in rows if "sampler_gap" in row]
            return {"step": rows[-1]["step"]} | ({"sampler_gap": max(gaps)} if gaps else {})

    def long_run(limit: float, stop: int = 0, kill: bool = False, bound: float = 0.0, before: tuple = (sys.executable,),
                 more: tuple = ()) -> dict:  # fmt: skip
        """Twenty steps of grpo.py; with `stop` in two parts, compared with those in one."""
        words = [*small("grpo"), *"--precision float32 --eval-every 10 --save-every 5".split(), *more]
        with tempfile.TemporaryDirectory() as name:
            folder, script = Path(name), ROOT / "algos/grpo.py"
            command = [*before, script, *words, "--output-dir", folder]
            if kill:
                process = subprocess.Popen([*map(str, command), "--max-steps", "20"], cwd=ROOT,
                                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
                while process.poll() is None and lines_in(folder) < stop:
                    time.sleep(0.002)
                process.kill()
                process.wait()
            else:
                call([*command, "--max-steps", stop or 20], limit)
            run, at = next(folder.iterdir()), lines_in(folder)
            if stop:
                call([*before, script, "--resume", run, "--max-steps", "20"], limit)
            rows = rows_of(folder)
        if not whole:
            whole.extend(rows)
        return {"rows before the stop": at} | within(apart(rows, whole), bound)

    whole: list[dict] = []
    record.item("grpo, whole", 60, long_run)
    roots = [script for script in SPECS if parent_of(script) is None]
    jobs = [(f"gradients, {script}", partial(gradients, script)) for script in (("sac",) if record.smoke else roots)]
    for name, more in (("torchrun", ()), ("torchrun, fsdp", ("--fsdp",))):
        jobs.append((name, partial(long_run, stop=10, bound=1e-4, before=TORCHRUN, more=more)))
    jobs.append(("killed and resumed", partial(long_run, stop=8, kill=True, bound=1e-3)))
    if not record.smoke:
        more = {"bfloat16": "--precision bfloat16", "LoRA": "--lora-rank 4 --max-completion-length 20"}
        jobs += [(f"grpo, {name}", partial(small_run, "grpo", *words.split())) for name, words in more.items()]
    jobs += [(script, partial(small_run, script)) for script in (("dqn",) if record.smoke else SPECS)]
    if compiles and not record.smoke:
        jobs += [(f"{script}, compiled", partial(small_run, script, "--compile")) for script in ("ppo", "sac", "dqn")]
    with ThreadPoolExecutor(2 if record.smoke else 8) as pool:
        list(pool.map(lambda job: record.item(job[0], 90, job[1]), jobs))


def speed(record: Record, device: str, compiles: bool, clone: Path | None) -> None:
    smoke, teraflops = record.smoke, record.data["machine"]["teraflops"]
    prompts, group, warm, short, long = (2, 2, 2, 3, 4) if smoke else (64, 8, 16, 128, 512)
    with tempfile.TemporaryDirectory() as name:
        model, task = f"{name}/0.5B", f"{name}/rows.jsonl"
        worker("random_models", 60, folder=name, shapes={"0.5B": TINY if smoke else HALF_A_BILLION})
        online = {"reward": f"{name}/rewards.py:graded", "num-prompts": prompts, "num-generations": group, "beta": 0,
                  "sample-batch-size": prompts * group, "max-completion-length": warm}  # fmt: skip
        offline = {"batch-size": prompts, "max-length": 512, "eval-max-new-tokens": 2}

        def language(script: str, flags: dict, *lengths: int, limit: float, steps: int = 2, **more) -> dict:
            """Figures of the last update, and of the sampling before it, whose length is the last of `lengths`."""
            flags = flags | {"model": model, "task": task, "device": device, "precision": "bfloat16", "eval-every": 0,
                             "eval-prompts": 1, "eval-samples": 1, "output-dir": f"{name}/runs"}  # fmt: skip
            found = worker("train", limit, script=script, flags=flags, lengths=lengths, steps=steps, **more)
            waited, took, tokens = found.pop("updates")[-1]
            flops = 6 * found["parameters"] * tokens / took  # without attention's, and without the prompts of grpo
            found |= {"step, s": waited + took, "learning, tokens/s": tokens / took,
                      "share of the product's FLOPs": flops / teraflops / 1e12}  # fmt: skip
            return found | ({"sampling, s": waited, "sampling, tokens/s": tokens / waited} if lengths else {})

        def trl(limit: float) -> dict:
            found = worker("trl", limit, model=model, task=task, reward=online["reward"], prompts=prompts,
                           group=group, lengths=[warm, long], rate=1e-6, device=device, steps=2)  # fmt: skip
            return {"step, s": found["steps"][-1], "peak, GB": found["peak, GB"]}

        def control(script: str, where: str = device, limit: float = 0.0, **more) -> dict:
            """Steps a second from update `begin` to update `steps`; how long the first ones took stands beside it."""
            if script == "ppo":
                begin, steps, rows, flags = 1, 3, 2048, {"num-steps": 2048, "num-minibatches": 32}
            else:
                begin, steps = (5, 20) if smoke else (200, 1000)
                rows, flags = 1, {"learning-starts": 300}
            flags |= {"env-id": "HalfCheetah-v5", "num-envs": 1, "total-timesteps": 1_024_000, "eval-every": 0,
                      "eval-episodes": 1, "save-every": 10**6, "device": where,
                      "output-dir": f"{name}/runs"}  # fmt: skip
            steps = more.get("profile", [steps])[-1]
            found = worker("train", limit, script=script, flags=flags, steps=steps, begin=begin, **more)
            del found["updates"]
            return {"environment steps/s": found.pop("rate") * rows} | found

        grpo = partial(language, "grpo", online)
        record.item("0.5B, sampling", 60, partial(grpo, short))
        for cache in ("dynamic", "static"):
            more = dict(model=model, prompts=prompts * group, tokens=short, cache=cache, device=device)
            record.item(f"0.5B, transformers' generate, {cache} cache", 90, partial(worker, "generate", **more))
        ours = record.item("0.5B, grpo", 90, partial(grpo, long))
        theirs = record.item("0.5B, grpo, TRL", 90, trl)
        record.ratio("0.5B, grpo: TRL's seconds over ours", theirs.get("step, s"), ours.get("step, s"))
        record.item("0.5B, grpo, kernels", 90, partial(grpo, 2 * warm, profile=[1, 2]))
        record.item("sac, kernels", 40, partial(control, "sac", profile=[5, 10] if smoke else [200, 300]))
        ours = record.item("sac", 40, partial(control, "sac"))
        if compiles and not smoke:
            record.item("sac, --compile", 60, partial(control, "sac", words=["--compile"]))
            record.item("sac, update compiled", 60, partial(control, "sac", compiled=True))
        cpu = record.item("sac, CPU", 40, partial(control, "sac", "cpu"))
        for where, run in {device: ours, "cpu": cpu}.items():
            theirs = record.item(f"sac, CleanRL, {where}", 100, partial(cleanrl_sac, clone, where)) if not smoke else {}
            rates = [side.get("environment steps/s") for side in (run, theirs)]
            record.ratio(f"sac, {where}: our steps/s over CleanRL's", *rates)
        for script in ("dpo", "sft"):
            record.item(f"0.5B, {script}", 45, partial(language, script, offline, steps=3))
        if not smoke:
            record.item("0.5B, rloo", 90, partial(language, "rloo", online, long))
            record.item("ppo", 40, partial(control, "ppo"))
            record.item("ppo, CPU", 40, partial(control, "ppo", "cpu"))


def cleanrl_sac(clone: Path | None, where: str, limit: float) -> dict:
    """CleanRL's SAC by control_speed.py, whose runner says --no-cuda: for the GPU the script does not look."""
    if clone is None:
        return {"not run": "without --cleanrl CLONE"}
    (runner,) = (ROOT / "benchmarks").rglob("control_speed.py")
    with tempfile.TemporaryDirectory() as used:
        for part in ("cleanrl", "cleanrl_utils"):
            shutil.copytree(clone / part, Path(used, part))
        script, asks = Path(used, "cleanrl/sac_continuous_action.py"), "torch.cuda.is_available() and args.cuda"
        if where == "cuda":
            script.write_text(script.read_text().replace(asks, "torch.cuda.is_available()"))
        words = ["--side", "cleanrl", "--name", "sac-halfcheetah", "--seed", 1, "--threads", 2, "--cleanrl", used]
        out = call([sys.executable, runner, "worker", *words], limit)
    return {"environment steps/s": json.loads(out.splitlines()[-1])["rate"]}


def learn(record: Record, device: str, compiles: bool, chat: Path | None) -> None:
    smoke, record.done = record.smoke, {}  # its items need what others leave on the disk
    prompts, group, length, seconds = (2, 2, 4, 1) if smoke else (32, 8, 32, 20)
    with tempfile.TemporaryDirectory() as name:
        reward, places = f"{name}/rewards.py:right", {"before": str(chat or f"{name}/chat")}
        write_rows(name)
        random = partial(worker, "random_models", folder=name, shapes={"chat": TINY})
        record.item("model", 90, lambda limit: {"folder": chat.name} if chat else random(limit=limit))

        def ours(limit: float) -> dict:
            flags = {"num-prompts": prompts, "num-generations": group, "sample-batch-size": prompts * group, "beta": 0,
                     "learning-rate": 2e-5, "max-steps": 100_000, "eval-prompts": 1, "eval-samples": 1}  # fmt: skip
            found = grpo("sums", "before", flags, limit, "ours", seconds=seconds)
            (run,) = Path(name, "ours").iterdir()
            places["ours"] = str(run / "model")
            rewards = [row["reward"] for row in rows_of(run.parent) if "reward" in row]
            return {"steps": len(rewards), "reward, first five steps": rewards[:5], "last five": rewards[-5:],
                    "peak, GB": found["peak, GB"]}  # fmt: skip

        def grpo(task: str, model: str, flags: dict, limit: float, output: str, **more) -> dict:
            flags |= {"model": places[model], "task": f"{name}/{task}.jsonl", "reward": reward, "device": device,
                      "max-completion-length": length, "eval-every": 0, "output-dir": f"{name}/{output}",
                      "precision": "bfloat16", "save-every": 10**6}  # fmt: skip
            return worker("train", limit, script="grpo", flags=flags, **more)

        def trl(limit: float) -> dict:
            found = worker("trl", limit, model=places["before"], task=f"{name}/sums.jsonl", reward=reward,
                           prompts=prompts, group=group, lengths=[length], rate=2e-5, device=device, steps=100_000,
                           seconds=seconds, save=f"{name}/trl")  # fmt: skip
            places["TRL"] = f"{name}/trl"
            return {"steps": len(found["steps"]), "peak, GB": found["peak, GB"]}

        def accuracy(model: str, limit: float) -> dict:
            """Of the likeliest answers to sums that no run trains on, by the evaluation before a run's first step."""
            flags = {"num-prompts": 2, "num-generations": 2, "sample-batch-size": 64, "eval-samples": 1,
                     "eval-prompts": 4 if smoke else 64}  # fmt: skip
            grpo("others", model, flags, limit, f"eval {model}", steps=1)
            return {"greedy accuracy": rows_of(Path(name, f"eval {model}"))[0]["eval/greedy"]}

        record.item("grpo", 100, ours)
        record.item("grpo, TRL", 100, trl)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda model: record.item(f"greedy, {model}", 60, partial(accuracy, model)), places))


def main(part: tyro.conf.Positional[Literal["check", "speed", "learn"]], out: Path, smoke: bool = False,
         cleanrl: Path | None = None, chat_model: Path | None = None) -> None:  # fmt: skip
    """Runs the items of a part. Exit code 1 where one failed or was not right.

    Args:
        part: its items run
        out: folder for PART.json
        smoke: tiny sizes, on any machine
        cleanrl: for speed: a git clone of CleanRL
        chat_model: for learn: the folder of a chat model; needed without --smoke
    """
    if part == "learn" and not smoke and not chat_model:
        sys.exit("error: learn needs --chat-model FOLDER: python benchmarks/chat_model.py makes one")
    for folder, file in (cleanrl, "cleanrl/sac_continuous_action.py"), (chat_model, "config.json"):
        if folder and not (folder / file).is_file():
            sys.exit(f"error: there is no {file} in {folder}")
    record = Record(part, out, smoke)
    machine = record.on(record.item("machine", 60, partial(worker, "machine", smoke=smoke)))
    device = machine.get("device", "cpu")
    if device == "cpu" and not smoke:
        sys.exit("error: there is no CUDA GPU here: add --smoke to try the command without one")
    if machine.pop("egl", False):
        os.environ["MUJOCO_GL"] = "egl"
    record.data["machine"] = machine
    more = {"check": (), "speed": (cleanrl,), "learn": (chat_model and chat_model.resolve(),)}[part]
    {"check": check, "speed": speed, "learn": learn}[part](record, device, machine.get("compiles", False), *more)
    record.write("end", {"seconds": round(SECONDS[part] - record.deadline + time.monotonic(), 1)})
    wrong = [name for name, found in record.data["items"].items() if "error" in found or not found.get("ok", True)]
    sys.exit(f"{len(wrong)} items failed: {', '.join(wrong)}" if wrong else None)


# In processes of their own


def machine(smoke: bool) -> dict:
    import torch

    from benchmarks.machine import environment

    cuda = torch.cuda.is_available()
    size, count = (256 if smoke else 8192), 10
    a, b = torch.randn(2, size, size, device="cuda" if cuda else "cpu", dtype=torch.bfloat16)
    seconds = []
    for _ in range(2):  # the first warms up
        start = time.perf_counter()
        for _ in range(count):
            a @ b
        torch.cuda.synchronize() if cuda else None
        seconds.append(time.perf_counter() - start)
    about = environment()
    mujoco = ["env", "MUJOCO_GL=egl", sys.executable, "-c", "import mujoco"]
    egl = subprocess.run(mujoco, capture_output=True).returncode == 0
    return {
        "gpu": torch.cuda.get_device_name() if cuda else "none", "device": "cuda" if cuda else "cpu",
        "GB": torch.cuda.get_device_properties(0).total_memory / 1e9 if cuda else 0, "cores": os.cpu_count(),
        "teraflops": 2 * size**3 * count / seconds[1] / 1e12, "egl": egl,
        "versions": about["versions"] | {"cuda": torch.version.cuda},
        "compiles": bool(shutil.which("g++")) and Path(sysconfig.get_path("include"), "Python.h").exists(),
        "commit": os.environ.get("PLAINRL_COMMIT") or about["commit"],
    }  # fmt: skip


def gradients(script: str, words: list[str], device: str) -> dict:
    """The gradients of all steps of a run's first update, at rate 0, on the CPU and on the device."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torch.overrides import TorchFunctionMode

    class DrawnOnTheCPU(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if kwargs.get("generator") is None or "device" not in kwargs:
                return function(*args, **kwargs)
            return function(*args, **kwargs | {"device": "cpu"}).to(kwargs["device"])

    def moved(value):
        if isinstance(value, torch.Tensor | torch.nn.Module):
            return value.to(device)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(moved, value))
        return type(value)(map(moved, value)) if isinstance(value, list | tuple) else value

    def parts(kind: type, values) -> list:
        flat = [x for value in values for x in (value if isinstance(value, list | tuple) else [value])]
        return [value for value in flat if isinstance(value, kind)]

    class Seen(Exception):
        pass

    def update(*inputs):
        register_optimizer_step_pre_hook(note)  # from here on: what trains before is no part of it
        modules, generators = parts(torch.nn.Module, inputs), parts(torch.Generator, inputs)
        for module in modules:
            for part in module.modules():
                part.p = 0.0 if isinstance(part, torch.nn.Dropout) else getattr(part, "p", None)
        weights = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
        states = [generator.get_state() for generator in generators]
        for optimizer in parts(torch.optim.Optimizer, inputs):
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        original(*inputs)
        sides.append([])
        for module, state in zip(modules, weights):
            module.load_state_dict(state)
        for generator, state in zip(generators, states):
            generator.set_state(state)
        for optimizer in parts(torch.optim.Optimizer, inputs):
            optimizer.state.clear()
        with DrawnOnTheCPU():
            original(*map(moved, inputs))
        raise Seen

    def note(optimizer, *_):
        found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        sides[-1] += [grad.detach().cpu().clone() for grad in found]

    torch.backends.fp32_precision = "ieee"
    module, sides = importlib.import_module(f"algos.{script}"), [[]]
    original, module.update = module.update, update
    with tempfile.TemporaryDirectory() as folder:
        words = [*words, "--output-dir", folder]
        words += ["--precision", "float32"] if hasattr(module.Args, "precision") else []
        try:
            module.train(tyro.cli(module.Args, args=[word.replace("cuda", "cpu") for word in words]))
        except Seen:
            pass
    return {"tensors": len(sides[0]), "largest difference": largest_difference(*sides)}


def largest_difference(ours: list, others: list) -> float:
    """Of tensors in pairs, as a share of each one's largest entry. Below a thousandth of the largest tensor's there is
    rounding alone: then as a share of that."""
    if len(ours) != len(others) or not any(tensor.any() for tensor in ours):
        raise ValueError(f"{len(ours)} and {len(others)} gradients, or all of them 0")
    sizes = [tensor.abs().max().item() for tensor in ours]
    return max((a - b).abs().max().item() / max(size, max(sizes) / 1000) for a, b, size in zip(ours, others, sizes))


def train(script: str, flags: dict, words: tuple = (), lengths: tuple = (), steps: int = 0, seconds: float = 0.0,
          begin: int = 1, profile: tuple = (), compiled: bool = False) -> dict:  # fmt: skip
    """A run of which each update is timed. It ends after update `steps`, or with its curve and model `seconds` after
    the first one. After update k a completion has at most lengths[k - 1] tokens. profile: from the end of
    which update to which other one. Returned updates: seconds since the one before (sampling), its own, its tokens."""
    import torch

    class Done(Exception):
        pass

    def tokens_of(batch) -> int:
        if isinstance(batch, list):
            return sum(len(part) for row in batch for part in row if isinstance(part, list))
        mask = getattr(getattr(batch, "samples", batch), "completion_mask", None)
        return 0 if mask is None else int(mask.sum())

    def update(*inputs, **more):
        start = time.perf_counter()
        result = function(*inputs, **more)
        updates.append((start - ends[-1], time.perf_counter() - start, tokens_of(inputs[2])))
        ends.append(time.perf_counter())
        count = len(updates)
        found["parameters"] = sum(p.numel() for p in inputs[0].parameters())
        if count <= len(lengths):
            args.max_completion_length = lengths[count - 1]
        if profile and count == profile[0]:
            profiler.start()
            marks.append(time.perf_counter())
        if profile and count == profile[1]:
            torch.cuda.synchronize() if cuda else None
            marks.append(time.perf_counter())
            profiler.stop()
        if seconds and ends[-1] - ends[1] > seconds:
            args.max_steps = count
        if count == steps:
            raise Done
        return result

    module, updates, ends, marks, found = importlib.import_module(f"algos.{script}"), [], [time.perf_counter()], [], {}
    given = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    args = tyro.cli(module.Args, args=[*given, *words])
    cuda = args.device == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    profiler = torch.profiler.profile(activities=[activity]) if profile else None
    function = torch.compile(module.update, mode="reduce-overhead") if compiled else module.update
    module.update = update
    try:
        module.train(args)
    except Done:
        pass
    if profile:
        found |= kernels(profiler, marks[1] - marks[0], cuda)
    rate = (len(ends) - 1 - begin) / (ends[-1] - ends[begin]) if len(ends) > begin + 1 else None
    return found | {"updates": updates[-3:], "first update, s": updates[0][1], "rate": rate, "peak, GB": peak()}


def generate(model: str, prompts: int, tokens: int, cache: str, device: str) -> dict:
    """Sampling by transformers' generate in bfloat16. A static cache makes it compile the model, with CUDA graphs."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device)
    ids, seconds = torch.randint(300, 390, (prompts, 64), device=device), []
    for _ in range(2):
        start = time.perf_counter()
        out = policy.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=tokens,
                              min_new_tokens=tokens, cache_implementation=cache)  # fmt: skip
        assert out.shape[1] == 64 + tokens, out.shape
        torch.cuda.synchronize() if device == "cuda" else None
        seconds.append(time.perf_counter() - start)
    return {"first, s": seconds[0], "sampling, tokens/s": prompts * tokens / seconds[1], "peak, GB": peak()}


def peak() -> float:
    import torch

    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


def kernels(profiler, seconds: float, cuda: bool) -> dict:
    """Share of the time in which the device does nothing, what takes most of the rest, and most of the host's time: ms,
    calls."""
    spent = {event.key[:100]: (event.self_device_time_total if cuda else event.self_cpu_time_total, event.count)
             for event in profiler.key_averages()}  # fmt: skip
    most = sorted(spent.items(), key=lambda item: -item[1][0])[:10]
    waits = sorted((event.self_cpu_time_total / 1000, event.count, event.key) for event in profiler.key_averages())[-5:]
    idle = 1 - sum(micro for micro, _ in spent.values()) / 1e6 / seconds
    return {"profiled, s": seconds, "idle share": idle, "kernels": {name: [t / 1000, n] for name, (t, n) in most},
            "host": {name: [t, n] for t, n, name in waits}}  # fmt: skip


def trl(model: str, task: str, reward: str, prompts: int, group: int, lengths: list[int], rate: float, device: str,
        steps: int, seconds: float = 0.0, save: str = "") -> dict:  # fmt: skip
    """TRL's GRPO. It ends after `steps`, or `seconds` after its first step, from which on completions have at most
    lengths[-1] tokens. Settings are those of grpo.py in the same part."""
    import runpy

    import datasets
    import torch
    import trl as peer
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    ends, rows, cuda = [], prompts * group, device == "cuda"

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            torch.cuda.synchronize() if cuda else None
            ends.append(time.perf_counter())
            trainer.generation_config.max_new_tokens = trainer.generation_kwargs["max_new_tokens"] = lengths[-1]
            control.should_training_stop |= bool(seconds) and ends[-1] - ends[0] > seconds

    file, _, function = reward.rpartition(":")
    micro = 8 if rows % 8 == 0 else rows
    config = peer.GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=micro, gradient_accumulation_steps=rows // micro,
        num_generations=group, max_completion_length=lengths[0], beta=0.0, num_iterations=1, loss_type="grpo",
        scale_rewards="group", temperature=1.0, top_k=0, top_p=1.0, learning_rate=rate, optim="adamw_torch_fused",
        weight_decay=0.0, max_grad_norm=1.0, lr_scheduler_type="constant", warmup_steps=0, max_steps=steps, bf16=True,
        use_cpu=not cuda, gradient_checkpointing=False, report_to="none", logging_strategy="no", save_strategy="no",
        disable_tqdm=True, shuffle_dataset=False,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    table = datasets.load_dataset("json", data_files=task, split="train")
    trainer = peer.GRPOTrainer(policy, runpy.run_path(file)[function], config, table, processing_class=tokenizer)
    trainer.add_callback(Clock())
    start = time.perf_counter()
    trainer.train()
    if save:
        trainer.save_model(save)
        tokenizer.save_pretrained(save)
    return {"steps": [b - a for a, b in zip([start, *ends], ends)], "peak, GB": peak()}


def write_rows(folder: str) -> None:
    """Prompts of 64 characters with a chosen and a rejected answer; sums, and others to be asked afterwards."""
    Path(folder, "rewards.py").write_text(REWARDS)
    rows = []
    for i in range(2000):
        answers = {name: (f"{name} {i} " + "ab" * 128)[:256] for name in ("chosen", "rejected", "completion")}
        rows.append({"prompt": f"{i * 7919:064d}"} | answers)
    pairs = [(a, b) for a in range(10, 60) for b in range(10, 60)]
    text = "What is {} + {}? Give the number alone."
    asked = [{"prompt": [{"role": "user", "content": text.format(a, b)}], "answer": str(a + b)} for a, b in pairs]
    asked.sort(key=lambda row: hashlib.sha256(json.dumps(row).encode()).digest())  # an order without a pattern
    for name, some in {"rows": rows, "sums": asked[:-500], "others": asked[-500:]}.items():
        Path(folder, f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


def random_models(folder: str, shapes: dict) -> dict:
    """Models with random weights, and bytes as tokens; one that is called chat has a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    write_rows(folder)
    for name, shape in shapes.items():
        words = sorted(pre_tokenizers.ByteLevel.alphabet())
        words += [f"<{i}>" for i in range(shape["vocab_size"] - len(words) - 3)]
        tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                       additional_special_tokens=["<|im_start|>"],
                                       chat_template=CHATML if name == "chat" else None)  # fmt: skip
        config = AutoConfig.for_model("qwen2", **shape, tie_word_embeddings=True, max_position_embeddings=2048,
                                      eos_token_id=fast.eos_token_id)  # fmt: skip
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(Path(folder, name))
        fast.save_pretrained(Path(folder, name))
    return {"models": list(shapes)}


WORKERS = {f.__name__: f for f in (machine, gradients, train, generate, trl, random_models)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        print(json.dumps(WORKERS[sys.argv[2]](**json.loads(sys.argv[3]))))
    else:
        tyro.cli(main)
