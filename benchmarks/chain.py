"""The whole chain on an embedded task: every script starts from the model that another one wrote.

    python benchmarks/chain.py                      sft, then a reward model and DPO on pairs, then PPO, RLOO, GRPO and
                                                    online DPO on that reward model; one table, results/chain.json
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
from utils.lm import completion_logps, eos_ids, load_model, pad_left, sample  # noqa: E402
from utils.machine import environment  # noqa: E402
from utils.tasks import encode_prompt, load_task, present  # noqa: E402

RESULT = ROOT / "benchmarks/results/chain.json"
STEPS = {  # task -> optimizer steps of sft, of scripts on pairs, of scripts that sample
    "sort": (250, 40, 16),
    "countdown": (600, 200, 40),
}


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
    settings |= dict(task=(args.task,) if script == "sft" else args.task, seed=args.seed, eval_every=0)
    settings |= dict(eval_prompts=4 if args.tiny else 256, output_dir=str(folder), save_every=10**6)
    start, known = time.perf_counter(), set(folder.glob("*"))
    print(f"{script}: ", end="", flush=True)
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        last = module.train(module.Args(**settings))[-1]
    (made,) = set(folder.glob("*")) - known
    print(f"{time.perf_counter() - start:.0f} s, {made}", flush=True)
    return {"model": made / "model", "last": last, "seconds": time.perf_counter() - start}


@torch.no_grad()
def kl(path: Path, start: Path, args: Args) -> float:
    """Nats per completion, on answers sampled for held-out prompts."""
    (model, tokenizer), (reference, _) = (load_model(str(folder)) for folder in (path, start))
    rows = load_task(args.task).heldout[: 4 if args.tiny else 256]
    prompts = pad_left([encode_prompt(present(row, tokenizer), tokenizer) for row in rows], "cpu")
    generator = torch.Generator().manual_seed(args.seed)
    samples = sample(model, *prompts, 2 if args.tiny else 8, 20, eos_ids(model, tokenizer), generator=generator)
    reference_logps, _ = completion_logps(reference.eval(), *samples[:4])
    return ((samples.logps - reference_logps) * samples.completion_mask).sum(1).mean().item()


def chain(folder: Path, args: Args) -> list[dict]:
    steps = (2, 2, 2) if args.tiny else STEPS[args.task]
    sft = run("sft", folder, args, max_steps=steps[0], **(dict(batch_size=4) if args.tiny else {}))
    on_pairs = dict(model=str(sft["model"]), max_steps=steps[1], **(dict(num_pairs=16) if args.tiny else {}))
    sampling = dict(model=str(sft["model"]), max_steps=steps[2], **(dict(num_prompts=4) if args.tiny else {}))
    reward = run("reward_model", folder, args, **on_pairs)
    rows = {"sft": sft, "dpo, pairs": run("dpo", folder, args, **on_pairs)}
    for script in ("ppo_lm", "rloo", "grpo", "online_dpo"):
        rows[f"{script}, reward model"] = run(script, folder, args, **sampling, reward=(str(reward["model"]),))
    rows["grpo, task's score"] = run("grpo", folder, args, **sampling)
    table = [{"run": "reward_model", "pairs ranked right": reward["last"]["eval/pair_accuracy"],
              "seconds": round(reward["seconds"])}]  # fmt: skip
    for name, row in rows.items():
        last = row["last"]
        table.append({"run": name, **{k.removeprefix("eval/"): v for k, v in last.items() if k.startswith("eval/")
                                      and "pair" not in k}, "reward": last.get("reward"),
                      "kl": kl(row["model"], sft["model"], args), "seconds": round(row["seconds"])})  # fmt: skip
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
        about = {key: environment()[key] for key in ("versions", "commit", "machine")}
        known[args.task] = {"rows": table, "seconds": seconds, **about}
        RESULT.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
