"""One batch on one process and on two, compared: tests/test_distributed.py starts this once.

    python tests/two_processes.py FOLDER [SCRIPT ...]

A batch of five groups is given to one process, then split over two, three groups and two of unequal lengths, as
replicas and as shards. FOLDER/results.json gets how far the ways are apart, case by case as soon as it is known. The
second process is forked from the first one, which saves torchrun's start and the imports.
"""

import contextlib
import copy
import importlib
import json
import os
import shutil
import socket
import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import torch
from every_script import options
from helpers import LANGUAGE, SMALL
from test_invariance import llama
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from algos import grpo
from utils.dist import Samples, Trained, as_samples, full_weights, pad_left, shard, start
from utils.lm import load_model

FOLDER = Path(sys.argv[1] if __name__ == "__main__" else "")
FIRST = 3  # groups, or rows, of process 0; the others are those of process 1
G, T = 2, 6
PROMPTS = [[5, 6, 7], [4, 8, 9, 10, 11, 12], [3], [13, 5], [2, 2, 3, 9]]
SETTINGS = {  # of the update, beside those of every script
    "gspo": dict(epsilon=0.02, epsilon_high=0.02),
    "cispo": dict(bounds="gppo"),
    "raft": dict(select="all"),
    "nsr": dict(positive_weight=0.5),
    "reinforce_pp": dict(baseline="group"),
    "kto": dict(beta=0.5),
}
WAYS = ["alone", "replicas", "shards"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def batch_of(module, model):
    """Random completions, ragged, some cut off, one reward skipped; old and reference policies a little off. Or random
    rows of preferences and demonstrations."""
    generator = torch.Generator().manual_seed(0)
    rows = G * len(PROMPTS)

    def tokens() -> list[int]:
        return torch.randint(
            2, 16, (int(torch.randint(1, 9, (1,), generator=generator)),), generator=generator
        ).tolist()

    if hasattr(module, "as_samples"):
        texts = [[tokens() for _ in range(2 if module.NAME in ("kto", "sft") else 3)] for _ in PROMPTS]
        dtype, args = next(model.parameters()).dtype, arguments(module)

        def scored(some) -> tuple:
            samples = as_samples(some, args.max_length, "cpu")
            noise = torch.randn(samples.logps.shape, generator=generator, dtype=dtype).abs()
            return samples, (-2.5 + noise) * samples.completion_mask

        if module.NAME == "kto":
            others = [[prompt, before[1]] for (prompt, _), before in zip(texts, texts[-1:] + texts[:-1])]
            return module.Batch(*scored(texts), torch.arange(len(texts)) % 2 == 0, *scored(others))
        return module.Batch(*scored(texts)) if hasattr(module, "Batch") else scored(texts)[0]
    if module.NAME == "reward_model":
        return [module.Pair(tokens(), tokens(), 0.3 * i) for i in range(5)]
    lengths = torch.randint(1, T + 1, (rows,), generator=generator)
    lengths[0], lengths[2 * FIRST :] = T, lengths[2 * FIRST :].clamp(max=4)
    mask = torch.arange(T) < lengths[:, None]
    ids = torch.randint(2, 16, (rows, T), generator=generator) * mask
    dtype = next(model.parameters()).dtype
    old, ref = (-2.5 + torch.randn(rows, T, generator=generator, dtype=dtype).abs() for _ in range(2))
    rewards = torch.randn(rows, generator=generator, dtype=dtype)
    rewards[3] = torch.nan
    ended = torch.rand(rows, generator=generator) < 0.7
    samples = Samples(*pad_left(PROMPTS, "cpu"), ids, mask, old * mask, ended)
    ref = (ref * mask).sum(1) if module.NAME == "tba" else ref * mask
    return module.Batch(*(samples, rewards, ref)[: len(module.Batch._fields)])


def part_of(batch, rank: int):
    """What one process of two has: groups or rows, whole."""
    if isinstance(batch, list | torch.Tensor):
        cut = FIRST * len(batch) // len(PROMPTS)
        return batch[:cut] if rank == 0 else batch[cut:]
    return type(batch)(*(part_of(part, rank) for part in batch))


def arguments(module, **more):
    settings = dict(num_generations=G, micro_batch_size=2, max_completion_length=T, max_length=32, precision="float32",
                    beta=0.1, max_grad_norm=1e9, batch_size=5, num_prompts=5, num_minibatches=1)  # fmt: skip
    settings |= SETTINGS.get(module.NAME, {}) | more
    return module.Args(**{name: value for name, value in settings.items() if name in options(module.NAME)})


def updated(module, model, batch, rounds: int = 2, **more) -> dict:
    """Two updates: metrics of each, the last gradient, and the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rows = [module.update(model, optimizer, batch, arguments(module, **more)) for _ in range(rounds)]
    gradients = [whole(p.grad).flatten() for p in model.parameters()]
    return {"metrics": rows, "gradient": torch.cat(gradients), "weights": full_weights(model), "optimizer": optimizer}


def apart(one: dict, other: dict) -> dict[str, float]:
    names = set().union(*one["metrics"], *other["metrics"])
    pairs = [(a.get(n, 0.0), b.get(n, 0.0)) for a, b in zip(one["metrics"], other["metrics"]) for n in names]
    moved = [(a - other["weights"][name]).abs().max().item() for name, a in one["weights"].items()]
    gap = (one["gradient"] - other["gradient"]).norm() / one["gradient"].norm()
    return {"gradient": gap.item(), "metrics": max(abs(a - b) / (1 + abs(a)) for a, b in pairs), "weights": max(moved)}


def note(results: dict, name: str, found) -> None:
    if os.environ["RANK"] == "0":
        results[name] = found
        (FOLDER / "results.json").write_text(json.dumps(results))


@contextlib.contextmanager
def alone():
    """As if there were no other process. Process 0 alone may do something in here."""
    with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1"}), mock.patch("torch.distributed.is_initialized",
                                                                                   lambda: False):  # fmt: skip
        yield


def compared(results: dict, script: str, base, case: str, **more) -> None:
    module, rank = importlib.import_module(f"algos.{script}"), int(os.environ["RANK"])
    batch = batch_of(module, base)
    with alone():
        expected = updated(module, copy.deepcopy(base), batch, **more)
    for way in WAYS[1:]:
        model = copy.deepcopy(base)
        model = shard(model, False) if way == "shards" else model
        found = updated(module, model, part_of(batch, rank), fsdp=way == "shards", **more)
        if rank == 0:
            note(results, f"{script}, {case}, {way}", apart(expected, found))


def carried_over(results: dict, base) -> None:
    """What one way saves, every way loads: the same state, and the same next update."""
    rank, batch, saved = int(os.environ["RANK"]), batch_of(grpo, base), {}

    def run(way: str, path: Path | None) -> dict | None:
        """One update, from scratch or from what is in `path`; what it has then."""
        inner = alone() if way == "alone" else contextlib.nullcontext()
        if way == "alone" and rank > 0:
            return None
        with inner:
            model = copy.deepcopy(base)
            model = shard(model, False) if way == "shards" else model
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            trained = Trained(model, optimizer)
            if path is not None:
                trained.load_state_dict(torch.load(path, weights_only=True))
            mine = batch if way == "alone" else part_of(batch, rank)
            grpo.update(model, optimizer, mine, arguments(grpo, fsdp=way == "shards"))
            return trained.state_dict()

    def numbers(state: dict) -> list[torch.Tensor]:
        moments = [tensor for entry in state["optimizer"]["state"].values() for tensor in entry.values()]
        return [*state["model"].values(), *moments]

    for way in WAYS:
        saved[way] = run(way, None)
        if rank == 0:
            torch.save(saved[way], FOLDER / f"{way}.pt")
    for began in WAYS:
        torch.distributed.barrier()
        for went_on in WAYS:
            after, expected = run(went_on, FOLDER / f"{began}.pt"), run("alone", FOLDER / "alone.pt")
            if rank == 0:
                pairs = list(zip(numbers(after), numbers(expected), strict=True))
                far = max((a - b).abs().max().item() for a, b in pairs)
                note(results, f"{began} to {went_on}", [far, len(pairs)])


def whole_runs(results: dict) -> None:
    """grpo.py itself, which shards LoRA too: it learns, saves, and goes on."""
    folder = FOLDER / "runs"
    cases = {"shards": {}, "lora": dict(lora_rank=2, beta=0.1), "lora replicas": dict(lora_rank=2)}
    for name, more in cases.items():
        how = dict(task="sort", num_prompts=5, num_generations=4, max_steps=2, eval_prompts=3, device="cpu", threads=1,
                   precision="float32", micro_batch_size=4, sample_batch_size=8,
                   fsdp="replicas" not in name)  # fmt: skip
        args = grpo.Args(**how | more, output_dir=str(folder / name))
        with mock.patch("utils.core.plot", lambda *_: None):
            grpo.train(args)
            torch.distributed.barrier()
            (run,) = (folder / name).iterdir()
            history = grpo.train(grpo.Args(**vars(args) | dict(resume=str(run), max_steps=3)))
        if os.environ["RANK"] == "0":
            first = load_model(grpo.Args())[0]
            last = AutoModelForCausalLM.from_pretrained(run / "model")
            moved = [(a - b).abs().max().item() for a, b in zip(first.parameters(), last.parameters(), strict=True)]
            note(results, f"run, {name}", {"steps": [row["step"] for row in history], "moved": max(moved),
                                           "gap": max(row.get("sampler_gap", 0.0) for row in history),
                                           "adapter": (run / "model/adapter").is_dir()})  # fmt: skip


def main(chosen: list[str]) -> None:
    results: dict = {}
    start(torch.device("cpu"))
    for script in [script for script in chosen if script in SMALL]:
        torch.set_default_dtype(torch.float64)
        base = llama()
        if script == "reward_model":
            base.config.num_labels, base.config.pad_token_id = 1, 0
            scorer = LlamaForSequenceClassification(base.config)
            scorer.model, base = base.model, scorer
        compared(results, script, base.train(), "float64")
        torch.set_default_dtype(torch.float32)
    if "grpo" in chosen:
        compared(results, "grpo", load_model(grpo.Args())[0].train(), "float32")
        torch.set_default_dtype(torch.float64)
        compared(results, "grpo", llama().train(), "by tokens", micro_batch_tokens=20, micro_batch_size=12)
        for aggregation, scale in (("token", "batch"), ("constant", "none")):
            compared(results, "grpo", llama().train(), aggregation, aggregation=aggregation, scale_rewards=scale)
        carried_over(results, llama().train())
        torch.set_default_dtype(torch.float32)
        whole_runs(results)


def scripts() -> list[str]:
    """Those whose batch is one of `batch_of`."""
    modules = {name: importlib.import_module(f"algos.{name}") for name in LANGUAGE}
    plain = ("samples", "rewards", "ref_logps")
    return [name for name, module in modules.items() if hasattr(module, "Pair") or hasattr(module, "as_samples")
            or getattr(getattr(module, "Batch", None), "_fields", ()) in (plain, plain[:2])]  # fmt: skip


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads that a fork would lose
    torch.set_num_threads(1)
    shutil.rmtree(FOLDER / "runs", ignore_errors=True)
    sys.stdout = open(os.devnull, "w")
    child = os.fork()
    os.environ["RANK"] = "0" if child else "1"
    main(sys.argv[2:] or scripts())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stderr.flush()
    if not child:
        os._exit(0)
    os._exit(os.waitpid(child, 0)[1] and 1)
