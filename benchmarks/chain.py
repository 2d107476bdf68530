"""The whole chain on an embedded task: every script starts from the model that another one wrote.

    python benchmarks/chain.py                      sft, pairs of its answers, a reward model and DPO on them, then PPO,
                                                    RLOO, GRPO and online DPO on that reward model; results/chain.json
    python benchmarks/chain.py --task countdown     the larger task

Columns: held-out greedy, pass@1 and pass@8 by the task's own score, which only the last row was trained on; KL of the
model against the chain's SFT model, nats per completion, the mean of log pi - log pi_sft over answers that the model
samples for held-out prompts; seconds of the whole command. Reward is that of the last step, of the reward model where
the row names it: far above the others' accuracy it has been over-optimised.
"""

import contextlib
import importlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from algos import grpo  # noqa: E402
from benchmarks.machine import environment  # noqa: E402
from utils.data import encode_prompt, load_task  # noqa: E402
from utils.dist import Samples, pad_left  # noqa: E402
from utils.lm import completion_logps, load_model, sample  # noqa: E402
from utils.rewards import decode, evaluate  # noqa: E402

RESULT = ROOT / "benchmarks/results/chain.json"
STEPS = {  # task -> optimizer steps of sft, of scripts on pairs, of scripts that sample
    "sort": (250, 40, 12),
    "countdown": (600, 200, 40),
}
PROMPTS, ANSWERS = 1024, 8  # from which pairs are made
BETA = 0.2  # of the scripts that sample: reward models are right where the SFT model's answers are


@dataclass
class Args:
    task: str = "sort"
    """sort or countdown"""
    output_dir: str = "runs/chain"
    """the runs' folder"""
    seed: int = 1
    """of all scripts"""
    tiny: bool = False
    """two steps of everything, for tests: writes no result"""


def run(script: str, folder: Path, args: Args, **settings) -> dict:
    """Trains with a script; the folder of its model, its last row of metrics, seconds."""
    module = importlib.import_module(f"algos.{script}")
    settings |= dict(seed=args.seed, eval_every=0, eval_prompts=4 if args.tiny else 64, output_dir=str(folder),
                     save_every=10**6)  # fmt: skip
    start, known = time.perf_counter(), set(folder.glob("*"))
    print(f"{script}: ", end="", flush=True)
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        last = module.train(module.Args(**settings))[-1]
    (made,) = set(folder.glob("*")) - known
    print(f"{time.perf_counter() - start:.0f} s, {made}", flush=True)
    return {"model": made / "model", "last": last, "seconds": time.perf_counter() - start}


@torch.no_grad()
def make_pairs(start: Path, folder: Path, args: Args) -> Path:
    """Preference data as people make it: answers of the SFT model to training prompts, of each prompt a right one and a
    wrong one, by the task's score, which stands for the people."""
    model, tokenizer = load_model(grpo.Args(model=str(start)))
    task, generator = load_task(args.task), torch.Generator().manual_seed(args.seed)
    rows = [task.train(10**6 + i, args.seed) for i in range(32 if args.tiny else PROMPTS)]
    samples = answers(model, tokenizer, rows, ANSWERS, generator)
    texts, pairs = decode(samples, tokenizer)[0], []
    for i, row in enumerate(rows):
        scored = [(task.score(row, text), text) for text in texts[i * ANSWERS : (i + 1) * ANSWERS] if text]
        if scored and (best := max(scored))[0] > (worst := min(scored))[0]:
            pairs.append({"prompt": row["prompt"], "chosen": best[1], "rejected": worst[1]})
    if args.tiny:  # a model of two steps is never right
        pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "0"} for row in rows]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def answers(model, tokenizer, rows: list[dict], count: int, generator: torch.Generator) -> Samples:
    prompts = pad_left([encode_prompt(row, tokenizer) for row in rows], "cpu")
    return sample(model, *prompts, count, 20, model.generation_config.eos_token_id, generator=generator)


@torch.no_grad()
def held_out(path: Path, start: Path, args: Args) -> dict[str, float]:
    """The task's own score of greedy and sampled answers, and the KL from the SFT model in nats per completion."""
    (model, tokenizer), (reference, _) = (load_model(grpo.Args(model=str(x))) for x in (path, start))
    task, size, count = load_task(args.task), 4 if args.tiny else 256, 8
    about = grpo.Args(seed=args.seed, eval_prompts=size, eval_samples=count, max_completion_length=20,
                      sample_batch_size=512, precision="float32")  # fmt: skip
    scores = evaluate(model, tokenizer, task, None, about)
    samples = answers(model, tokenizer, task.heldout[:size], count, torch.Generator().manual_seed(args.seed))
    reference_logps, _ = completion_logps(reference.eval(), *samples[:4])
    kl = ((samples.logps - reference_logps) * samples.completion_mask).sum(1).mean().item()
    return {name.removeprefix("eval/"): value for name, value in scores.items()} | {"kl": kl}


def chain(folder: Path, args: Args) -> list[dict]:
    steps = (2, 2, 2) if args.tiny else STEPS[args.task]
    small = dict(batch_size=4) if args.tiny else {}
    sft = run("sft", folder, args, max_steps=steps[0], task=(args.task,), **small)
    on_pairs = dict(model=str(sft["model"]), max_steps=steps[1], **small)
    on_pairs["task"] = str(make_pairs(sft["model"], folder, args))
    sampling = dict(model=str(sft["model"]), max_steps=steps[2], task=args.task, beta=BETA)
    sampling |= dict(num_prompts=4) if args.tiny else {}
    reward = run("reward_model", folder, args, **on_pairs)
    rows = {"sft": sft, "dpo, pairs": run("dpo", folder, args, **on_pairs)}
    for script in ("ppo_lm", "rloo", "grpo", "online_dpo"):
        rows[f"{script}, reward model"] = run(script, folder, args, **sampling, reward=(str(reward["model"]),))
    rows["grpo, task's score"] = run("grpo", folder, args, **sampling)
    table = [{"run": "reward_model", "pairs ranked right": reward["last"]["eval/pair_accuracy"],
              "seconds": round(reward["seconds"])}]  # fmt: skip
    for name, row in rows.items():
        table.append({"run": name, **held_out(row["model"], sft["model"], args), "reward": row["last"].get("reward"),
                      "seconds": round(row["seconds"])})  # fmt: skip
    return table


def main(args: Args) -> None:
    start, folder = time.perf_counter(), Path(args.output_dir).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    table = chain(folder, args)
    seconds = round(time.perf_counter() - start)
    ks = [key for key in table[1] if key.startswith("pass@")]
    columns = ["greedy", *ks, "reward", "kl", "seconds"]
    print(f"{'':24}" + "".join(f"{column:>9}" for column in columns))
    for row in table:
        cells = [row.get(column) for column in columns]
        print(f"{row['run']:24}" + "".join(f"{'' if c is None else f'{c:.3g}':>9}" for c in cells))
    print(f"reward model: {table[0]['pairs ranked right']:.2f} of held-out pairs ranked right; {seconds} s in all")
    if not args.tiny:
        known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        known[args.task] = {"rows": table, "seconds": seconds, **environment()}
        RESULT.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
