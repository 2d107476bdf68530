"""GRPO with LoRA on a real model and GSM8K: speed of sampling, memory, and a curve, on a machine with one GPU.

    python benchmarks/real_model.py                 Qwen2.5-0.5B-Instruct; then `python benchmarks/page.py write`

The settings are those of verl's record of the same model and task (LoRA of rank 32, 64 prompts x 5 completions of up to
1,024 tokens, rate 3e-5, KL 0.001, 116 steps), which reached 0.543. It writes benchmarks/results/real_model.json, from
which README.md says what we have run. The tests run it with --smoke on a model of two layers.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos import grpo  # noqa: E402
from utils.data import encode_prompt, load_task  # noqa: E402
from utils.dist import pad_left, stream  # noqa: E402
from utils.lm import autocast, load_model, sample  # noqa: E402
from utils.machine import environment  # noqa: E402

SETTINGS = dict(lora_rank=32, gradient_checkpointing=True, precision="bfloat16", num_prompts=64, num_generations=5,
                max_completion_length=1024, learning_rate=3e-5, beta=0.001, max_steps=116, sample_batch_size=320,
                micro_batch_tokens=16384, eval_every=29, eval_prompts=1319, eval_samples=1)  # fmt: skip
SMOKE = dict(lora_rank=2, num_prompts=2, num_generations=2, max_completion_length=4, max_steps=2, sample_batch_size=4,
             eval_every=1, eval_prompts=3)  # fmt: skip


def waited(device: torch.device) -> float:
    """The time when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def bandwidth(device: torch.device) -> float:
    """Bytes a second that the device reads and writes, by copying 256 MiB twenty times."""
    source = torch.zeros(2**26, device=device)
    target = source.clone()
    start = waited(device)
    for _ in range(20):
        target.copy_(source)
    return 20 * 2 * source.nbytes / (waited(device) - start)


def sampling(args: grpo.Args, tokens: int) -> dict[str, float]:
    """Speed of sampling one step's completions, none of which ends before `tokens`. `share`: of the speed at which each
    weight is read once a token, in two bytes, and the cache once."""
    device = torch.device(args.device)
    model, tokenizer = load_model(args, device)
    task = load_task(args.task)
    prompts = [encode_prompt(task.train(i, args.seed), tokenizer) for i in range(args.num_prompts)]
    rows = args.num_prompts * args.num_generations
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head  # bytes of keys and values
    length = statistics.mean(map(len, prompts)) + tokens / 2
    ideal = (2 * sum(p.numel() for p in model.parameters()) + rows * length * per_token) / bandwidth(device)
    seconds = []
    for turn in range(3):  # the first warms up
        start = waited(device)
        with autocast(model, args.precision):
            sample(model, *pad_left(prompts, device), args.num_generations, tokens, [], 1.0,
                   stream(device, args.seed, turn))  # fmt: skip
        seconds.append(waited(device) - start)
    best = min(seconds[1:])
    return {"tokens_per_second": round(rows * tokens / best), "share": round(ideal * tokens / best, 4)}


def main(
    model: str = "Qwen/Qwen2.5-0.5B-Instruct",
    task: str = "gsm8k",
    smoke: Annotated[bool, tyro.conf.arg(help="a few tokens of everything, on any machine")] = False,
    output: Path = ROOT / "benchmarks/results/real_model.json",
) -> None:
    start = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not smoke:
        sys.exit("error: there is no CUDA GPU here: add --smoke to try the command without one")
    with tempfile.TemporaryDirectory() as folder:
        runs = str(ROOT / "runs") if not smoke else folder  # a real run is kept, and can be resumed by hand
        args = grpo.Args(model=model, task=task, device=device, output_dir=runs, **SETTINGS | (SMOKE if smoke else {}))
        speed = sampling(args, 4 if smoke else 256)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        history = grpo.train(args)
    steps = [row for row in history if "time/step" in row]
    names = ("step", "eval/greedy", "eval/pass@1")
    result = {
        "model": model,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "none",
        "hours": round((time.perf_counter() - start) / 3600, 4),
        "sampling": speed,
        "seconds": {part: statistics.median(row[f"time/{part}"] for row in steps) for part in ("sample", "step")},
        "peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None,
        "curve": [{name: row[name] for name in names} for row in history if "eval/greedy" in row],
        "smoke": smoke,
        **{key: environment()[key] for key in ("versions", "commit", "machine")},
    }
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    tyro.cli(main)
