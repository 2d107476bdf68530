"""SmolLM2-135M-Instruct (chat_model.py) learns sums of two numbers up to 99, beside TRL's trainers. Needs trl and
reasoning-gym (requirements-test.txt).

    python benchmarks/chat_curves.py pairs              right and wrong answers of the model's own, which dpo needs
    python benchmarks/chat_curves.py run grpo 1 ours    a row of curves/grpo-smollm2-sums.jsonl; trl: TRL's side
    python benchmarks/chat_curves.py run grpo 1 trl --steps 5     seconds of a step and peak memory alone, a row of
                                                        results/speed_smollm2.jsonl: both sides in turn, nothing else
    python benchmarks/chat_curves.py run grpo_multiturn 1 ours --model RUN/model    RUN: of sft.py

Both sides have the same rows in the same order, batch, rate, lengths and bfloat16, and the same evaluation of 128
held-out questions. TRL draws its own samples. rloo, ppo_lm and grpo_multiturn have no other side here. The last one's
task is countdown with the calculator; it starts from 150 steps of sft.py: --task countdown --raw-prompt --batch-size 16
--learning-rate 3e-5 --lr-schedule constant --warmup-steps 0 --max-steps 150.
"""

import importlib
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.chat_model import FOLDER  # noqa: E402
from benchmarks.machine import environment  # noqa: E402
from utils.core import Run  # noqa: E402
from utils.data import encode_prompt, epochs, load_pairs, load_task  # noqa: E402
from utils.lm import load_model, sample_all  # noqa: E402
from utils.rewards import decode, evaluate  # noqa: E402

TASK = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=2"
PAIRS = FOLDER.parent / "smollm2-sums-pairs.jsonl"
ONLINE = dict(task=TASK, max_steps=24, num_prompts=8, num_generations=8, max_completion_length=16, beta=0.0,
              learning_rate=1e-5)  # fmt: skip
CASES = {
    "sft": dict(task=(TASK,), max_steps=20, batch_size=16, learning_rate=1e-5, lr_schedule="constant", warmup_steps=0),
    "grpo": ONLINE, "rloo": ONLINE, "ppo_lm": ONLINE,
    "grpo_multiturn": ONLINE | dict(task="", environment="calculator", max_turns=2, raw_prompt=True,
                                    max_completion_length=12, eval_prompts=128, eval_samples=4),
    "dpo": dict(task=PAIRS.name, max_steps=12, batch_size=16, learning_rate=2e-6, lr_schedule="constant"),
}  # fmt: skip
Case, Side = Literal["sft", "grpo", "rloo", "ppo_lm", "grpo_multiturn", "dpo"], Literal["ours", "trl"]


def arguments(case: str, seed: int, **more):
    """Those of the script. Its own evaluations are as short as they can be."""
    args = dict(model=str(FOLDER), seed=seed, device="cpu", precision="bfloat16", eval_every=0, save_every=10**6,
                eval_prompts=1, eval_samples=1, sample_batch_size=256, eval_max_new_tokens=16,
                max_length=1024)  # fmt: skip
    task = str(PAIRS) if case == "dpo" else CASES[case]["task"]
    kind, args = importlib.import_module(f"algos.{case}").Args, args | CASES[case] | {"task": task} | more
    return kind(**{name: x for name, x in args.items() if name in kind.__dataclass_fields__})


def said(role: str, text: str) -> list[dict]:
    return [{"role": role, "content": text}]


def ours(case: str, args, ends: list[float]) -> list[dict]:
    """Trains, and leaves the model in --output-dir. Returns rows of metrics; `ends`: when each was written."""
    log = Run.log
    Run.log = lambda run, *step, **columns: ends.append(time.perf_counter()) or log(run, *step, **columns)
    history = importlib.import_module(f"algos.{case}").train(args)
    next(Path(args.output_dir).glob("*/model")).rename(f"{args.output_dir}/model")
    return history


def theirs(case: str, args, ends: list[float]) -> list[dict]:
    """The same with TRL's trainer."""
    import datasets
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    task, each, size = load_task(TASK), getattr(args, "num_generations", 1), getattr(args, "num_prompts", 16)
    rows = [task.train(i, args.seed) for i in range(args.max_steps * size)]
    asked, more = {row["prompt"]: row for row in rows}, {}
    how = dict(train_sampling_strategy="sequential", max_length=1024)
    rows = [{"prompt": said("user", row["prompt"]), "completion": said("assistant", row["completion"])} for row in rows]
    if case == "dpo":
        order, more = epochs(load_pairs(str(PAIRS), 0, 1).train), {"ref_model": None}
        rows = [{x: order(i, args.seed)[x] for x in ("prompt", "chosen", "rejected")} for i in range(len(rows))]
        how |= dict(beta=0.1, precompute_ref_log_probs=True)
    if case == "grpo":
        rows = [{"prompt": row["prompt"]} for row in rows]
        how = dict(num_generations=each, max_completion_length=args.max_completion_length, beta=0.0, top_p=1.0,
                   scale_rewards="group", loss_type="grpo", top_k=0, shuffle_dataset=False)  # fmt: skip

        def reward(prompts, completions, **_):
            return [task.score(asked[p[-1]["content"]], c[0]["content"]) for p, c in zip(prompts, completions)]

        more = {"reward_funcs": reward}
    clock = type("Clock", (TrainerCallback,), {"on_step_end": lambda *_, **__: ends.append(time.perf_counter())})
    config = getattr(trl, f"{case.upper()}Config")(
        output_dir=args.output_dir, max_steps=args.max_steps, per_device_train_batch_size=size * each, bf16=True,
        learning_rate=args.learning_rate, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, use_cpu=True,
        optim="adamw_torch_fused", gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=1,
        disable_tqdm=True, dataloader_pin_memory=False, seed=args.seed, **how)  # fmt: skip
    trainer = getattr(trl, f"{case.upper()}Trainer")(
        AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32), args=config, callbacks=[clock()],
        processing_class=AutoTokenizer.from_pretrained(FOLDER), train_dataset=datasets.Dataset.from_list(rows),
        **more)  # fmt: skip
    trainer.train()
    trainer.save_model(f"{args.output_dir}/model")
    return trainer.state.log_history


def run(case: tyro.conf.Positional[Case], seed: tyro.conf.Positional[int], side: tyro.conf.Positional[Side],
        steps: int = 0, model: Path = FOLDER) -> None:  # fmt: skip
    """One run. steps: so many alone, for their seconds. model: what it starts from."""
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(case, seed, output_dir=folder, model=str(model), **{"max_steps": steps} if steps else {})
        begun = time.perf_counter()
        history = (ours if side == "ours" else theirs)(case, args, ends)
        row = {"seed": seed, "seconds": round(time.perf_counter() - begun, 1), "threads": torch.get_num_threads()}
        row["step, s"] = round(statistics.median(b - a for a, b in zip(ends, ends[1:])), 2)
        row["peak, GB"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
        scored = arguments("grpo", 1, model=f"{folder}/model", eval_prompts=128, eval_samples=4)
        if case == "grpo_multiturn":  # its own score, of whole episodes
            row |= {"eval/greedy": history[-1]["eval/greedy"], "eval/sampled": history[-1]["eval/pass@1"]}
        elif not steps:
            row |= evaluate(*load_model(scored), load_task(TASK), None, scored)
    kept = {"reward", "loss", "rewards/margins", "margin"} & {*history[1]}
    row |= {name: [round(x[name], 4) for x in history if name in x] for name in kept}
    row |= {"settings": CASES[case], **environment()}
    path = f"curves/{'trl-' * (side == 'trl')}{case}-smollm2-{'sums' if args.task else 'countdown'}.jsonl"
    with open(ROOT / "benchmarks" / ("results/speed_smollm2.jsonl" if steps else path), "a") as file:
        print(json.dumps({"case": case, "side": side} | row), file=file)


def pairs(prompts: int = 480) -> None:
    """One right and one wrong answer to each prompt that the model answers in both ways within 16 samples."""
    args, task, rows = arguments("grpo", 1), load_task(TASK), []
    model, tokenizer = load_model(args)
    for row in (task.train(i, 10**6) for i in range(prompts)):
        samples = sample_all(model, [encode_prompt(row, tokenizer)], 16, args, 1.0, "pairs", row["prompt"])
        kinds = {task.score(row, text) == 1: text for text in decode(samples, tokenizer)[0] if text}
        if len(kinds) == 2:
            answers = {name: said("assistant", kinds[name == "chosen"]) for name in ("chosen", "rejected")}
            rows.append({"prompt": said("user", row["prompt"])} | answers)
    PAIRS.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "pairs": pairs})
