"""TRL's GRPOTrainer beside algos/grpo.py on the embedded model: speed and learning curves. Needs trl==1.16.0.

    python benchmarks/peers/trl_grpo.py speed --threads 2      -> results/speed_grpo.json
    python benchmarks/peers/trl_grpo.py curve --seeds 5        -> curves/trl-grpo-sort.jsonl, one row per seed

speed. A step samples 32 prompts x 8 completions and makes one AdamW update, on the CPU, in float32, with beta 0.
Prompts have 12 tokens, all completions 16: no EOS ends a completion on either side, which each run asserts. Both score
with the same cheap function and train on the same prompts. A side runs in a fresh process; sides alternate (A B B A
...), and the ratio is taken within each pair. What is timed:
    ours   `collect` (rows, tokenisation, sampling, decoding, scoring) and `update` (forward, backward, clipping, AdamW,
           metrics), one after the other in a loop; shares of both are given. No logging, evaluation or checkpoint.
    trl    from one on_step_end to the next within GRPOTrainer.train: data loader, generation, decoding, scoring, its
           metrics, and the update. Logging, saving, evaluation, gradient checkpointing and bfloat16 are off, 256
           completions per forward pass as in ours, the same fused AdamW: what a user who wants speed sets.
Imports, loading and the first (warm-up) steps are not timed on either side.

curve. GRPOTrainer learns `sort` from the same model, on the same prompts in the same order (`task.train(i, seed)`),
with the settings of `python algos/grpo.py --task sort --max-steps 16 --learning-rate 1e-4` (64 prompts x 8, at most 20
tokens, sequence aggregation, group scaling, plain sampling at temperature 1). Recorded: the mean reward of every step,
and utils.rewards.evaluate of the final weights on 128 held-out prompts, 8 samples each. Samples are drawn by TRL, so
seeds do not match ours one to one: distributions are to be compared.
"""

import hashlib
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
HERE = ROOT / "benchmarks"
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 32, 8, 12, 16  # of the speed comparison


def versions() -> dict[str, str]:
    """Of everything that the numbers depend on, the embedded model's weights included."""
    import torch
    import transformers
    import trl

    from utils.lm import TINY_MODEL

    model = hashlib.sha256((Path(TINY_MODEL) / "model.safetensors").read_bytes()).hexdigest()[:12]
    return {"model": model, "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__, "trl": trl.__version__}  # fmt: skip


def machine() -> dict[str, str | int | float]:
    """Processor, cores, load average and date at this moment."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"processor": names[0] if names else platform.processor(), "cores": os.cpu_count() or 0,
            "load": round(os.getloadavg()[0], 2), "system": platform.system(),
            "date": date.today().isoformat()}  # fmt: skip


def trl_trainer(rows: list[dict], reward, prompts: int, group: int, directory: str, **settings):
    """GRPOTrainer on the embedded model: `prompts` x `group` completions and one update per step, all quiet."""
    from benchmarks.peers.make_trl_fixtures import make_trainer

    return make_trainer(
        reward, prompts * group, directory, prompts=rows, num_generations=group, beta=0.0, num_iterations=1,
        loss_type="grpo", scale_rewards="group", temperature=1.0, top_k=0, top_p=1.0, optim="adamw_torch_fused",
        adam_beta1=0.9, adam_beta2=0.999, weight_decay=0.0, max_grad_norm=1.0, lr_scheduler_type="constant",
        warmup_steps=0, **settings,
    )  # fmt: skip


def without_eos(trainer) -> None:
    """Neither generation nor the mask stops at EOS; no logits processor is added, which would cost time."""
    trainer.eos_token_ids = [-1]
    trainer.generation_config.eos_token_id = trainer.generation_kwargs["eos_token_id"] = None


def speed_task():
    """Prompts of PROMPT_TOKENS tokens, and a reward that varies within groups and costs next to nothing."""
    from utils.data import Task

    def train(index: int, seed: int) -> dict:
        return {"prompt": f"S{(index * 7919 + seed) % 10 ** (PROMPT_TOKENS - 2):0{PROMPT_TOKENS - 2}d}:"}

    return Task("speed", train, [], lambda row, text: len(set(text)) / NEW_TOKENS)


def time_ours(warmup: int, steps: int, script: str = "grpo", beta: float = 0.0) -> dict:
    """Seconds of each timed step, of its sampling and, with beta, of the reference's log-probabilities."""
    import torch

    from utils.lm import load_model
    from utils.rewards import make_scorer

    algo = importlib.import_module(f"algos.{script}")
    task, args = speed_task(), algo.Args(
        num_prompts=PROMPTS, num_generations=GROUP, sample_batch_size=PROMPTS * GROUP, micro_batch_size=PROMPTS * GROUP,
        beta=beta, precision="float32", max_completion_length=NEW_TOKENS, learning_rate=1e-4,
    )  # fmt: skip
    model, tokenizer = load_model(args)
    model.generation_config.eos_token_id = [-1]  # no token ends a completion
    score = make_scorer(task, args, tokenizer, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    ref_model = load_model(args, frozen=True)[0] if beta else None
    spent = {name: [] for name in ("seconds", "sampling", *(("reference",) if beta else ()))}
    model.train()
    end = time.perf_counter()
    for step in range(1, warmup + steps + 1):
        start = end
        samples, rewards, _ = algo.collect(model, tokenizer, task, score, step, args)
        sampled = time.perf_counter()
        batch = algo.Batch(samples, rewards, None)
        spent["sampling"].append(sampled - start)
        if beta:
            batch = batch._replace(ref_logps=algo.reference_logps(model, ref_model, samples, args))
            spent["reference"].append(time.perf_counter() - sampled)
        algo.update(model, optimizer, batch, args)
        end = time.perf_counter()
        spent["seconds"].append(end - start)
        assert samples.prompt_ids.shape[1] == PROMPT_TOKENS
        assert samples.completion_mask.sum() == PROMPTS * GROUP * NEW_TOKENS
    return {name: values[warmup:] for name, values in spent.items()}


def time_trl(warmup: int, steps: int, make: Callable = trl_trainer) -> dict:
    """Seconds of each timed step of the trainer that `make` returns."""
    from transformers import TrainerCallback

    task, ends, lengths = speed_task(), [], set()

    class Clock(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            model.generation_config.eos_token_id = None  # transformers has just set it to the tokenizer's

        def on_step_end(self, *args, **kwargs):
            ends.append(time.perf_counter())

    def reward(prompts, completions, completion_ids, **_):
        lengths.update(map(len, completion_ids))
        return [task.score({}, text) for text in completions]

    rows = [task.train(i, 0) for i in range(PROMPTS * (warmup + steps))]
    with tempfile.TemporaryDirectory() as directory:
        trainer = make(rows, reward, PROMPTS, GROUP, directory, learning_rate=1e-4, max_completion_length=NEW_TOKENS,
                       max_steps=warmup + steps)  # fmt: skip
        without_eos(trainer)
        assert set(map(len, trainer.processing_class([row["prompt"] for row in rows])["input_ids"])) == {PROMPT_TOKENS}
        trainer.add_callback(Clock)
        trainer.train()
    assert lengths == {NEW_TOKENS}, f"completions of {lengths} tokens"
    return {"seconds": [b - a for a, b in zip(ends, ends[1:])][-steps:]}


def speed_worker(side: Literal["ours", "trl"], warmup: int, steps: int) -> None:
    """One side in this process; prints one line of JSON. For `speed`."""
    print(json.dumps((time_ours if side == "ours" else time_trl)(warmup, steps)))


def measure(worker: list[str], work: str, tokens: int, output: Path, threads: int, rounds: int, steps: int,
            warmup: int) -> None:  # fmt: skip
    """Runs the command `worker` for both sides in turn, `rounds` times each; prints and writes medians and the ratio of
    each pair. work: one step in words; tokens: the completion tokens that it trains on."""
    environment = os.environ | {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    before, pairs, parts = machine(), [], []
    for i in range(rounds):
        told = {}
        for side in ("ours", "trl")[:: 1 if i % 2 == 0 else -1]:
            command = [sys.executable, *worker, "--side", side, "--warmup", str(warmup), "--steps", str(steps)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
            told[side] = json.loads(done.stdout.splitlines()[-1])
        pair = {side: statistics.median(told[side]["seconds"]) for side in ("ours", "trl")}
        parts = [name for name in told["ours"] if name != "seconds"]
        pair |= {f"{name}_share": sum(told["ours"][name]) / sum(told["ours"]["seconds"]) for name in parts}
        pairs.append(pair | {"ratio": pair["trl"] / pair["ours"]})
        print(
            "round {}: ours {ours:.3f} s, trl {trl:.3f} s per step, ratio {ratio:.2f}".format(i + 1, **pairs[-1]),
            flush=True,
        )
    median = {name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]}
    shares = {name: median[f"{name}_share"] for name in parts}
    shares["update"] = 1 - sum(shares.values())
    result = {
        "work": work,
        "seconds_per_step": {side: round(median[side], 4) for side in ("ours", "trl")},
        "completion_tokens_per_second": {side: round(tokens / median[side]) for side in ("ours", "trl")},
        "trl_over_ours": {"median": round(median["ratio"], 3), "pairs": [round(p["ratio"], 3) for p in pairs]},
        "share_in_ours": {name: round(share, 3) for name, share in shares.items()},
        "pairs": pairs, "threads": threads, "steps": steps, "warmup": warmup, "versions": versions(),
        "machine": before, "load_after": machine()["load"],
    }  # fmt: skip
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "pairs"}, indent=1))


def speed(threads: int = 2, rounds: int = 5, steps: int = 10, warmup: int = 3,
          output: Path = HERE / "results" / "speed_grpo.json") -> None:  # fmt: skip
    """Times both sides in turn, `rounds` times each; prints and writes medians and the ratio of each pair."""
    work = f"{PROMPTS} prompts x {GROUP} completions, {PROMPT_TOKENS} + {NEW_TOKENS} tokens, one update, float32"
    measure([__file__, "speed-worker"], work, PROMPTS * GROUP * NEW_TOKENS, output, threads, rounds, steps, warmup)


def train_trl(seed: int, steps: int, make: Callable = trl_trainer, prompts: int = 64, group: int = 8, length: int = 20,
              learning_rate: float = 1e-4, eval_prompts: int = 128) -> dict:  # fmt: skip
    """One run on `sort` of the trainer that `make` returns: the row of the curve file."""
    from algos import grpo
    from utils.data import load_task
    from utils.lm import load_model
    from utils.rewards import evaluate

    task, rewards, seen = load_task("sort"), [], []
    rows = [task.train(i, seed) for i in range(prompts * steps)]

    def reward(prompts, completions, digits, **_):
        assert not any("<" in text for text in completions), "special tokens reach the scorer"
        scores = [task.score({"digits": d}, text) for d, text in zip(digits, completions)]
        rewards.append(round(statistics.mean(scores), 5))
        seen.extend(prompts[::group])
        return scores

    start, about = time.perf_counter(), versions()
    with tempfile.TemporaryDirectory() as directory:
        trainer = make(rows, reward, prompts, group, directory, learning_rate=learning_rate, max_steps=steps,
                       max_completion_length=length, seed=seed)  # fmt: skip
        trainer.train()
    seconds = time.perf_counter() - start
    assert seen == [row["prompt"] for row in rows] and len(rewards) == steps
    args = grpo.Args(seed=seed, eval_prompts=eval_prompts, max_completion_length=length, sample_batch_size=512,
                     precision="float32")  # fmt: skip
    model, tokenizer = load_model(args)  # a fresh one: TRL patches the forward pass of its own
    model.load_state_dict(trainer.model.state_dict())
    final = evaluate(model, tokenizer, task, None, args)
    return {"seed": seed, "reward": rewards, "final": {k: round(v, 5) for k, v in final.items()},
            "seconds": round(seconds, 1), "versions": about}  # fmt: skip


def record(output: Path, seeds: Iterable[int], train: Callable[[int], dict]) -> Iterator[dict]:
    """Appends the row `train(seed)` of each seed that `output` does not hold yet, and yields it."""
    rows = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    now = versions()
    if any(row["versions"] | {"python": now["python"]} != now for row in rows):  # no number depends on Python's
        sys.exit(f"{output} was recorded with other versions or another embedded model: move it away first")
    output.parent.mkdir(parents=True, exist_ok=True)
    for seed in sorted(set(seeds) - {row["seed"] for row in rows}):
        row = train(seed)
        with output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        yield row


def curve(seeds: int = 5, steps: int = 16, output: Path = HERE / "curves" / "trl-grpo-sort.jsonl") -> None:
    """Trains seeds 0, 1, ... that `output` does not hold yet and appends a row for each."""
    for row in record(output, range(seeds), lambda seed: train_trl(seed, steps)):
        print(
            f"seed {row['seed']}: reward {row['reward'][0]:.3f} -> {row['reward'][-1]:.3f}, {row['final']}", flush=True
        )


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"speed": speed, "curve": curve, "speed-worker": speed_worker})
