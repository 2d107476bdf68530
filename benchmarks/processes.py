"""Two processes of one thread against one process of two threads; and, on paper, 8 GPUs and 2 nodes.

    python benchmarks/processes.py measure          -> results/processes.json and the table in README.md; 4 minutes
    python benchmarks/processes.py measure --smoke  the same with tiny sizes; nothing is written
    python benchmarks/processes.py paper            the computed table in README.md

measure. Steps of grpo.py, sampling and update, without evaluations and files. Default: the default run, but sampled in
two batches. Wide: six layers of the width and the vocabulary of Qwen2.5-0.5B with random weights and random rewards,
float32, 16 completions of 16 tokens. Both sides do the same work, which their gradient norms show, and take turns in
fresh processes; the first step of a process does not count. The numbers are medians of the others. memory: the largest
resident size, of all processes together.

paper. Never run. N weights, d width, Ly layers, V words, W GPUs; bytes of one GPU under --fsdp (README.md has the
settings):
    16 N / W                       weights, gradients and Adam's two moments in float32
    2 N / W                        the reference in bfloat16
    sampling   2 N + rows (L + T) kv + 20 rows V     all weights in bfloat16, the cache, the logits
    update     4 N / Ly + 2 V d + tokens (4 d Ly + 75 d) + 0.5e9    two layers and the output layer gathered, the
                                   activations of a micro-batch with gradient checkpointing, a chunk of logits
Rank 0 also holds 16 N in the CPU's memory: a checkpoint of 12 N, and at the end the model of 4 N. Times: sampling
takes, for each token, the longer of 25 ms (launching kernels one by one) and of reading weights and half the final
cache at 3.35 TB/s; the update 8 N operations a token, the reference 2 N, at 0.4 of 989e12 a second; communication
8 N (W - 1) / W bytes for each micro-batch (two gathers in bfloat16, one sum in float32) and 2 N once a step to sample,
at 300 GB/s within a node and 50 GB/s between two.
"""

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos import grpo  # noqa: E402
from benchmarks.memory import MODELS, QWEN  # noqa: E402
from utils.cli import prepare  # noqa: E402
from utils.machine import environment  # noqa: E402
from utils.models import load_model, resolve_for, trained_parameters, without_dropout  # noqa: E402
from utils.rewards import make_scorer  # noqa: E402
from utils.tasks import load_task  # noqa: E402

README, RESULT = ROOT / "benchmarks/README.md", ROOT / "benchmarks/results/processes.json"
WIDE = QWEN | dict(hidden_size=896, intermediate_size=4864, num_attention_heads=14, vocab_size=151_936)
SETTINGS: dict = {
    "default": dict(sample_batch_size=256),  # two batches: its own 512 would be one, and work for one process
    "wide": dict(task="sort", num_prompts=4, num_generations=4, sample_batch_size=8, micro_batch_size=4, beta=0.0,
                 micro_batch_tokens=0, max_completion_length=16, precision="float32", learning_rate=1e-6),
}  # fmt: skip
SMOKE = dict(num_prompts=4, num_generations=2, sample_batch_size=4, micro_batch_size=2)
SIDES = {"1 process of 2 threads": (1, 2), "2 processes of 1 thread": (2, 1)}
COUNTS = {"default": (3, 5), "wide": (2, 3)}  # rounds, and steps in each with the one that does not count
Case = Literal["default", "wide"]
CLUSTERS = {"8 GPUs": (8, 300e9), "2 nodes of 8": (16, 50e9)}
PROMPTS, GROUP, PROMPT, NEW, ROWS, MICRO = 64, 8, 200, 512, 32, 4096  # of a step on paper: grpo.py's own


def random_model(smoke: bool):
    """Random weights in that shape, equal in all processes; and the embedded model's tokenizer."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    tokenizer = load_model(grpo.Args().model)[1]
    sizes = dict(num_hidden_layers=1, hidden_size=28, intermediate_size=32) if smoke else dict(num_hidden_layers=6)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen2Config(**WIDE | sizes, eos_token_id=1), dtype=torch.float32), tokenizer


def worker(case: tyro.conf.Positional[Case], steps: int, smoke: bool = False) -> None:
    """One side: prints the seconds of each step and what shows that both sides did the same."""
    args = grpo.Args(device="cpu", **SETTINGS[case] | (SMOKE if smoke else {}))
    device = prepare(args)
    model, tokenizer = random_model(smoke) if case == "wide" else load_model(args.model, device)
    resolve_for(model, args, grpo.PRESETS)
    without_dropout(model)
    task = load_task(args.task)
    score = make_scorer(task, (), (), steps, device)
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=args.learning_rate, fused=True)
    model.train()
    rows = []
    for step in range(1, steps + 1):
        start = time.perf_counter()
        samples, scored = grpo.collect(model, tokenizer, task, score, step, args)
        rewards = scored.rewards
        if case == "wide":  # its answers are all wrong, and equal rewards have no gradient
            rewards = torch.rand(len(rewards), generator=torch.Generator().manual_seed(step))
        sampled = time.perf_counter()
        columns = grpo.update(model, optimizer, grpo.Batch(samples, rewards, None), args)
        end = time.perf_counter()
        rows.append({"step": end - start, "sample": sampled - start, "update": end - sampled,
                     "reward": rewards.mean().item(), "grad_norm": columns["grad_norm"]})  # fmt: skip
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("RESULT" + json.dumps({"rows": rows, "memory": memory}), flush=True)


def run(case: Case, processes: int, threads: int, steps: int, smoke: bool) -> list[dict]:
    """What each process of one side prints."""
    words = [__file__, "worker", case, "--steps", str(steps), *(["--smoke"] if smoke else [])]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    done = subprocess.run([sys.executable, *launcher, *words], capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": str(threads)})  # fmt: skip
    # two processes may print at the same moment, without a line's end between
    results = [json.JSONDecoder().raw_decode(part)[0] for part in done.stdout.split("RESULT")[1:]]
    if done.returncode or len(results) != processes:
        sys.exit(f"{' '.join(words)} with {processes} processes failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return results


def measure(smoke: bool = False) -> None:
    """Both sides of both cases, in turns."""
    results: dict = {}
    for case, (rounds, steps) in COUNTS.items():
        found: dict = {side: [] for side in SIDES}
        for k in range(1 if smoke else rounds):
            for side in list(SIDES)[:: 1 if k % 2 == 0 else -1]:
                found[side].append(run(case, *SIDES[side], steps=2 if smoke else steps, smoke=smoke))
                print(case, side, [round(row["step"], 3) for row in found[side][-1][0]["rows"]], flush=True)
        first = [found[side][0][0]["rows"][0] for side in SIDES]
        assert all(math.isclose(row["grad_norm"], first[0]["grad_norm"], rel_tol=1e-3) for row in first), first
        results[case] = {}
        for side in SIDES:
            rows = [row for processes in found[side] for row in processes[0]["rows"][1:]]
            results[case][side] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            results[case][side]["memory"] = max(sum(part["memory"] for part in parts) for parts in found[side])
            results[case][side]["steps"] = [row["step"] for row in rows]
    print(json.dumps(results, indent=1))
    if not smoke:
        RESULT.write_text(json.dumps(results | environment(), indent=1) + "\n")
        write("processes", measured(results))


def measured(results: dict) -> list[str]:
    sides = list(SIDES)
    lines = [f"| seconds a step | {sides[0]} | {sides[1]} | ratio | sampling | update | GB in all |", "|---" * 7 + "|"]
    for case, found in results.items():
        one, two = (found[side] for side in sides)
        ratios = [f"{two[key] / one[key]:.2f}" for key in ("step", "sample", "update")]
        gigabytes = f"{one['memory'] / 1e9:.1f}, {two['memory'] / 1e9:.1f}"
        lines.append(f"| {case} | {one['step']:.2f} | {two['step']:.2f} | {' | '.join(ratios)} | {gigabytes} |")
    return lines


def paper() -> None:
    write("paper", computed())


def computed() -> list[str]:
    """Memory and time of a step with 8 and with 16 GPUs of 80 GB, by the formulas above."""
    columns = ["GB on a GPU: sampling, update", "GB of RAM, rank 0", "sampling, s", "update, s", "talk, s", "step, s"]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in ("Qwen2.5-1.5B", "Qwen2.5-7B", "Llama-3.1-8B"):
        for cluster, (world, bandwidth) in CLUSTERS.items():
            lines.append(f"| {name}, {cluster} | {' | '.join(on_paper(MODELS[name], world, bandwidth))} |")
    return lines


def on_paper(shape: dict, world: int, bandwidth: float) -> list[str]:
    d, layers, words = shape["hidden_size"], shape["num_hidden_layers"], shape["vocab_size"]
    keys = d // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * d * d + 2 * d * keys + 3 * d * shape["intermediate_size"]
    weights = layers * layer + words * d * (1 if shape["tie_word_embeddings"] else 2)
    fixed = 18 * weights / world
    cache = ROWS * (PROMPT + NEW) * 2 * layers * keys * 2
    sampling = fixed + 2 * weights + cache + 20 * ROWS * words
    update = fixed + 4 * layer + 2 * words * d + MICRO * (4 * d * layers + 75 * d) + 0.5e9

    tokens = PROMPTS * GROUP * (PROMPT + NEW)
    chunks = math.ceil(PROMPTS * GROUP / ROWS / world)
    seconds = chunks * NEW * max(0.025, (2 * weights + cache / 2) / 3.35e12)
    compute = 10 * weights * tokens / world / (0.4 * 989e12)
    passes = math.ceil(tokens / MICRO / world)
    talk = (passes * 8 + 2) * weights * (world - 1) / world / bandwidth
    total = seconds + compute + talk
    memory = [f"{sampling / 1e9:.0f}, {update / 1e9:.0f}", f"{16 * weights / 1e9:.0f}"]
    return memory + [f"{x:.1f}" for x in (seconds, compute, talk, total)]


def write(name: str, lines: list[str]) -> None:
    """Into README.md, between the marks of that table."""
    start, end = f"<!-- {name}: python benchmarks/processes.py -->\n", f"<!-- end of {name} -->"
    before, _, rest = README.read_text().partition(start)
    README.write_text(before + start + "\n".join(lines) + "\n" + end + rest.partition(end)[2])
    print("\n".join(lines))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"measure": measure, "paper": paper, "worker": worker})
