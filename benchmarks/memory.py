"""Memory and time of one update beside TRL, and which models fit which card.

    python benchmarks/memory.py trl --threads 2     -> results/memory_trl.json (TRL 1.16)
    python benchmarks/memory.py table               -> results/memory_table.json, and the table in README.md

trl. One GRPO and one DPO update (forward, backward, clipping, AdamW) of a random model, on the CPU, under bfloat16
autocast, of 8 completions (DPO: 4 pairs) behind prompts of 64 tokens in one micro-batch; nothing is sampled, and the
reference's log-probabilities are given. TRL: its trainer's `compute_loss` on the same inputs, backward, and the same
clipping and AdamW. A side runs in a fresh process, and sides take turns. Real: Qwen2.5-0.5B's shape, 256 tokens in each
completion. Narrow: two layers of 64, the same 151,936 words, 1,024 tokens.
    update   the largest resident size less that before the update, when weights and Adam's state are there, and less
             gradients, which are computed (4 bytes a weight): what the update itself holds. GB = 1e9 bytes
    seconds  of the one update; cpu_seconds: of all threads, which other work on the machine changes less
    grad_norm  before clipping, to show that both did the same

table. Computed by utils/memory.py, never run: layers of the real width are measured on this machine, one and two of
them with few words, and the rest is extrapolated. Settings are grpo.py's own for such models, prompts of 200 tokens.
"""

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results"
ROWS, PROMPT = 8, 64
QWEN = dict(num_key_value_heads=2, tie_word_embeddings=True)
CASES = {  # name -> completion tokens, and the model's settings
    "real": (256, dict(num_hidden_layers=24, hidden_size=896, intermediate_size=4864, num_attention_heads=14)),
    "narrow": (1024, dict(num_hidden_layers=2, hidden_size=64, intermediate_size=256, num_attention_heads=4)),
}
MODELS = {  # from their config.json
    "Qwen2.5-0.5B": QWEN | CASES["real"][1] | dict(vocab_size=151_936),
    "Qwen2.5-1.5B": QWEN | dict(num_hidden_layers=28, hidden_size=1536, intermediate_size=8960, num_attention_heads=12,
                                vocab_size=151_936),
    "Qwen2.5-3B": QWEN | dict(num_hidden_layers=36, hidden_size=2048, intermediate_size=11_008, num_attention_heads=16,
                              vocab_size=151_936),
    "Qwen2.5-7B": dict(num_hidden_layers=28, hidden_size=3584, intermediate_size=18_944, num_attention_heads=28,
                       num_key_value_heads=4, tie_word_embeddings=False, vocab_size=152_064),
    "Llama-3.1-8B": dict(num_hidden_layers=32, hidden_size=4096, intermediate_size=14_336, num_attention_heads=32,
                         num_key_value_heads=8, tie_word_embeddings=False, vocab_size=128_256),
}  # Llama: as a Qwen2, which differs in the biases of three layers  # fmt: skip
CARDS, TABLE_PROMPT = (24, 48, 80), 200
README = ROOT / "benchmarks" / "README.md"
START, END = "<!-- memory: python benchmarks/memory.py table -->\n", "<!-- end of memory -->"
Algo = Literal["grpo", "dpo"]
Side = Literal["ours", "trl"]


def random_model(**settings):
    """A Qwen2 with random weights, without the seconds of transformers' own initialisation."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config
    from transformers.initialization import no_init_weights

    torch.manual_seed(0)
    config = Qwen2Config(pad_token_id=0, bos_token_id=None, eos_token_id=1, **dict(vocab_size=151_936) | settings)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, std=0.02) if p.dim() > 1 else torch.nn.init.constant_(p, float("norm" in name))
    return model.train()


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ours(algo: Algo, model, optimizer, prompts, completions):
    """A function that makes one update, and returns the gradient's norm."""
    import torch

    from algos import dpo, grpo
    from utils.dist import as_samples
    from utils.lm import Samples, completion_logps
    from utils.models import autocast

    settings = dict(precision="bfloat16", micro_batch_size=ROWS, micro_batch_tokens=ROWS * 2048, beta=0.1)
    if algo == "dpo":
        lists, prompt = completions.tolist(), prompts[0].tolist()
        pairs = [(prompt, lists[i], lists[i + ROWS // 2]) for i in range(ROWS // 2)]
        samples = as_samples(pairs, 2048, model.device)
        batch = dpo.Batch(samples, torch.zeros_like(samples.logps))
        return lambda: dpo.update(model, optimizer, batch, dpo.Args(**settings))["grad_norm"]
    mask = torch.ones_like(completions, dtype=torch.bool)
    with torch.no_grad(), autocast(model.device, "bfloat16"):  # TRL takes pi_old for the policy, too
        old, _ = completion_logps(model, prompts, mask[:, :PROMPT], completions, mask)
    samples = Samples(prompts[:1], mask[:1, :PROMPT], completions, mask, old, mask[:, 0])
    batch = grpo.Batch(samples, torch.arange(ROWS) / ROWS, None)
    args = grpo.Args(num_prompts=1, num_generations=ROWS, max_completion_length=len(mask[0]), **settings)
    return lambda: grpo.update(model, optimizer, batch, args)["grad_norm"]


def trl(algo: Algo, model, optimizer, prompts, completions, directory: str):
    """The same by TRL's trainers."""
    import datasets
    import torch
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

    from algos import grpo
    from utils.models import TINY_MODEL, load_model

    tokenizer = load_model(TINY_MODEL)[1]
    quiet = dict(output_dir=directory, report_to="none", use_cpu=True, bf16=True, gradient_checkpointing=False,
                 disable_tqdm=True, beta=0.0 if algo == "grpo" else 0.1)  # fmt: skip
    mask = torch.ones_like(completions)
    prompt_mask = torch.ones_like(prompts)
    if algo == "grpo":
        config = GRPOConfig(per_device_train_batch_size=ROWS, num_generations=ROWS, loss_type="grpo", **quiet)
        rows = datasets.Dataset.from_list([{"prompt": "S312:"}])
        trainer = GRPOTrainer(model, lambda **_: [], config, rows, processing_class=tokenizer)
        inputs = dict(
            prompt_ids=prompts, prompt_mask=prompt_mask, completion_ids=completions, completion_mask=mask,
            advantages=grpo.advantages((torch.arange(ROWS) / ROWS).view(1, -1), "group")[0],
            num_items_in_batch=mask.sum(),
        )  # fmt: skip
    else:
        config = DPOConfig(per_device_train_batch_size=ROWS // 2, precompute_ref_log_probs=True, **quiet)
        rows = datasets.Dataset.from_list([{"prompt": "S312:", "chosen": "1", "rejected": "2"}])
        trainer = DPOTrainer(model, None, config, train_dataset=rows, processing_class=tokenizer)
        reference = torch.zeros(ROWS // 2)
        inputs = dict(
            input_ids=torch.cat([prompts, completions], 1), attention_mask=torch.cat([prompt_mask, mask], 1),
            completion_mask=torch.cat([0 * prompt_mask, mask], 1), ref_chosen_logps=reference,
            ref_rejected_logps=reference,
        )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    model.train()

    def update() -> float:
        with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
            loss = trainer.compute_loss(model, inputs)
        trainer.accelerator.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return norm.item()

    return update


def worker(case: str, algo: Algo, side: Side) -> None:
    """One update in this process; prints one line of JSON. For `trl`."""
    import torch

    length, settings = CASES[case]
    model = random_model(**QWEN | settings)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0.0, fused=True)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # makes its state
    optimizer.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, model.config.vocab_size, (1, PROMPT), generator=generator).repeat(ROWS, 1)
    completions = torch.randint(2, model.config.vocab_size, (ROWS, length), generator=generator)
    with tempfile.TemporaryDirectory() as directory:
        inputs = (algo, model, optimizer, prompts, completions)
        update = ours(*inputs) if side == "ours" else trl(*inputs, directory)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process still has would be used again, unseen
        before, start, cpu = resident(), time.perf_counter(), time.process_time()
        norm = update()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gradients = 4 * sum(p.numel() for p in model.parameters())
    told = dict(
        peak=peak / 1e9, update=(peak - before - gradients) / 1e9, seconds=seconds, cpu_seconds=cpu, grad_norm=norm
    )
    print(json.dumps({name: round(value, 4) for name, value in told.items()}))


def compare(cases: Sequence[str] = tuple(CASES), algos: Sequence[Algo] = ("grpo", "dpo"), threads: int = 2,
            rounds: int = 2, output: Path = RESULTS / "memory_trl.json") -> None:  # fmt: skip
    """Runs both sides in turn, `rounds` times each; writes every run, and the least of each number."""
    from benchmarks.peers.trl_grpo import machine, versions

    environment = os.environ | {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    result: dict = {"threads": threads, "versions": versions(), "machine": machine()}
    for name in [f"{case} {algo}" for case in cases for algo in algos]:
        case, algo = name.split()
        runs: dict[str, list] = {"ours": [], "trl": []}
        for i in range(rounds):
            for side in ("ours", "trl")[:: 1 if i % 2 == 0 else -1]:
                command = [sys.executable, __file__, "worker", "--case", case, "--algo", algo, "--side", side]
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
                runs[side].append(json.loads(done.stdout.splitlines()[-1]))
        best = {side: {key: min(run[key] for run in runs[side]) for key in runs[side][0]} for side in runs}
        ratios = {key: round(best["ours"][key] / best["trl"][key], 3) for key in ("update", "seconds", "cpu_seconds")}
        result[name] = {"best": best, "ours_over_trl": ratios, "runs": runs}
        print(name, json.dumps({"ours_over_trl": ratios} | best), flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")


def sizes_of(settings: dict, rank: int):
    """What utils/memory.py would measure of a whole model, from one and two of its layers with few words. With LoRA
    frozen weights are bfloat16."""
    import torch

    from utils.lora import for_training
    from utils.memory import measure

    def some(layers: int):
        model = random_model(**settings | dict(num_hidden_layers=layers, vocab_size=128))
        model = model.to(torch.bfloat16 if rank else torch.float32)
        return measure(for_training(model, rank, False, "CAUSAL_LM"), "bfloat16")

    one, two = some(1), some(2)
    layers, head = settings["num_hidden_layers"], settings["hidden_size"] * settings["vocab_size"]
    more = (head - one.head) * (1 if settings["tie_word_embeddings"] else 2)
    grown = {
        name: getattr(one, name) + (layers - 1) * (getattr(two, name) - getattr(one, name))
        for name in ("weights", "trained", "count", "adapters", "cast", "token", "square")
    }
    grown |= {"count": grown["count"] + more, "weights": grown["weights"] + (2 if rank else 4) * more}
    if not rank:
        grown |= {"trained": grown["weights"], "cast": grown["cast"] + 2 * (head - one.head)}
    whole = dict(head=head, layers=layers, vocab=settings["vocab_size"], cache=two.cache[:1] * layers)
    return SimpleNamespace(**vars(two) | grown | whole)


def table(output: Path = RESULTS / "memory_table.json") -> None:
    """Writes what grpo.py needs for each model, in full and with LoRA, and what makes it fit each card."""
    from algos import grpo
    from utils.memory import ADAPTERS, flags, predict, remedies

    shapes: dict = dict(prompt=TABLE_PROMPT, reference=True)
    heads = [f"{how}{card} GB" for how in ("", "LoRA, ") for card in CARDS]
    lines = [f"| | full, GB | {' | '.join(heads[:3])} | LoRA, GB | {' | '.join(heads[3:])} | on disk, full, LoRA |"]
    lines.append("|---" * 10 + "|")
    results = {}
    for name, settings in MODELS.items():
        cells, result = [], {}
        for preset, rank in (("full", 0), ("lora", ADAPTERS)):
            sizes = sizes_of(settings, rank)
            args = grpo.Args(**grpo.PRESETS[preset], lora_rank=rank, device="cuda")
            needs = predict(sizes, args, **shapes)
            result[preset] = {part: round(size / 1e9, 2) for part, size in needs.items()}
            cells.append(f"{needs['all'] / 1e9:.0f}")
            for card in CARDS:
                changes = {} if needs["all"] <= card * 1e9 else remedies(sizes, args, card * 1e9, **shapes)
                full = needs["all"] > card * 1e9 and not changes or "lora_rank" in changes
                cells.append("no" if full else f"`{flags(changes)}`" if changes else "yes")
                result[f"{preset}, {card} GB"] = None if full else changes
        disk = ", ".join(f"{result[preset]['disk']:.1f}" for preset in ("full", "lora"))
        lines.append(f"| {name} | {' | '.join(cells)} | {disk} |")
        results[name] = result
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")
    before, _, rest = README.read_text().partition(START)
    README.write_text(before + START + "\n".join(lines) + "\n" + END + rest.partition(END)[2])
    print("\n".join(lines))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"trl": compare, "table": table, "worker": worker})
