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
from helpers import LANGUAGE
from test_invariance import llama
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from algos import dapo, grpo
from utils.dist import Samples, Trained, as_samples, full_weights, gathered, join, pad_left, rank, shard, start
from utils.lm import load_model
from utils.rewards import make_scorer

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
    "vineppo": dict(whiten_advantages=True),
}
WAYS = ["alone", "replicas", "shards"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def batch_of(module, model) -> tuple:
    """What the script's `update` takes behind the optimizer. Random completions, ragged, some cut off, one reward
    skipped; old and reference policies a little off. Or random rows of preferences and demonstrations."""
    generator, name = torch.Generator().manual_seed(0), module.NAME
    rows, dtype = G * len(PROMPTS), next(model.parameters()).dtype

    def tokens() -> list[int]:
        length = int(torch.randint(1, 9, (1,), generator=generator))
        return torch.randint(2, 16, (length,), generator=generator).tolist()

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    if name == "reward_model":
        return ([module.Pair(tokens(), tokens(), 0.3 * i) for i in range(5)],)
    if "max_length" in options(name):
        texts = [[tokens() for _ in range(2 if name in ("kto", "sft") else 3)] for _ in PROMPTS]

        def scored(some) -> tuple:
            samples = as_samples(some, arguments(module).max_length, "cpu")
            return samples, (-2.5 + noise(*samples.logps.shape).abs()) * samples.completion_mask

        if name == "kto":
            others = [[prompt, before[1]] for (prompt, _), before in zip(texts, texts[-1:] + texts[:-1])]
            mismatched, ref = scored(others)
            labels = torch.arange(len(texts)) % 2 == 0
            return (module.Batch(*scored(texts), labels, mismatched, ref - 2.0 * mismatched.completion_mask),)  # z > 0
        return (module.Batch(*scored(texts)) if hasattr(module, "Batch") else scored(texts)[0],)
    lengths = torch.randint(1, T + 1, (rows,), generator=generator)
    lengths[0], lengths[2 * FIRST :] = T, lengths[2 * FIRST :].clamp(max=4)
    mask = torch.arange(T) < lengths[:, None]
    ids = torch.randint(2, 16, (rows, T), generator=generator) * mask
    old, ref = (-2.5 + noise(rows, T).abs() for _ in range(2))
    rewards = noise(rows).tanh()
    rewards = (rewards > 0).to(dtype) if name in ("nft", "nsr") else rewards
    rewards[3] = torch.nan
    ended = torch.rand(rows, generator=generator) < 0.7
    samples = Samples(*pad_left(PROMPTS, "cpu"), ids, mask, old * mask, ended)
    own = {"ref_logps": (ref * mask).sum(1) if name == "tba" else ref * mask, "beta": 0.5}
    if name == "vineppo":
        own["ends"] = module.step_ends(ids, mask, torch.arange(2, 6))
    own["values"] = noise(rows, T) * mask
    batch = module.Batch(samples, rewards, *(own[field] for field in module.Batch._fields[2:]))
    more = {"ppo_lm": torch.Generator(), "grpo_multiturn": mask & (ids > 4)}
    return (batch, more[name]) if name in more else (batch,)


def part_of(batch, rank: int):
    """What one process of two has: groups or rows, whole."""
    if isinstance(batch, list | torch.Tensor):
        cut = FIRST * len(batch) // len(PROMPTS)
        return batch[:cut] if rank == 0 else batch[cut:]
    if isinstance(batch, tuple):
        parts = [part_of(part, rank) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)
    return batch


def arguments(module, **more):
    settings = dict(num_generations=G, micro_batch_size=2, max_completion_length=T, max_length=32, precision="float32",
                    beta=0.1, max_grad_norm=1e9, batch_size=5, num_prompts=5, num_minibatches=1)  # fmt: skip
    settings |= SETTINGS.get(module.NAME, {}) | more
    return module.Args(**{name: value for name, value in settings.items() if name in options(module.NAME)})


def models_of(module, base, shards: bool) -> list:
    """The policy, and the critic or the teacher that the script's `update` takes beside it."""
    models = [copy.deepcopy(base)]
    if module.NAME == "ppo_lm":
        models.append(module.Critic(copy.deepcopy(base), False))
        torch.nn.init.normal_(models[1].head.weight, generator=torch.Generator().manual_seed(0))
    if module.NAME == "gkd":
        models.append(copy.deepcopy(base).eval().requires_grad_(False))
        models[1].lm_head.weight.mul_(0.5)
    return [shard(model, False) if shards else model for model in models]


def updated(module, base, batch: tuple, rounds: int = 2, **more) -> dict:
    """Two updates: metrics of each, the last gradient, and the weights."""
    args = arguments(module, **more)
    models = models_of(module, base, more.get("fsdp", False))
    trained = torch.nn.ModuleList(model for model in models if next(model.parameters()).requires_grad)
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)
    rows = [module.update(*models, optimizer, *batch, args) for _ in range(rounds)]
    gradients = [whole(p.grad).flatten() for p in trained.parameters()]
    return {"metrics": rows, "gradient": torch.cat(gradients), "weights": full_weights(trained)}


def apart(one: dict, other: dict) -> dict[str, float]:
    names = set().union(*one["metrics"], *other["metrics"])
    pairs = [(a.get(n, 0.0), b.get(n, 0.0)) for a, b in zip(one["metrics"], other["metrics"]) for n in names]
    moved = [(a - other["weights"][name]).abs().max().item() for name, a in one["weights"].items()]
    gap = (one["gradient"] - other["gradient"]).norm() / one["gradient"].norm()
    return {"gradient": gap.item(), "metrics": max(abs(a - b) / (1 + abs(a)) for a, b in pairs), "weights": max(moved)}


def note(results: dict, name: str, found) -> None:
    if rank() == 0:
        results[name] = found
        (FOLDER / "results.json").write_text(json.dumps(results))


@contextlib.contextmanager
def alone():
    """As if there were no other process. Process 0 alone may do something in here."""
    with mock.patch.dict(os.environ), mock.patch("torch.distributed.is_initialized", lambda: False):
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
        yield


def compared(results: dict, case: str, module, base, batch: tuple, mine: tuple, **more) -> None:
    """The update on the whole batch by process 0 alone, and on what each of the two processes has of it."""
    with alone():
        expected = updated(module, base, batch, **more)
    for way in WAYS[1:]:
        found = updated(module, base, mine, fsdp=way == "shards", **more)
        if rank() == 0:
            note(results, f"{module.NAME}, {case}, {way}", apart(expected, found))


def split(results: dict, case: str, module, base, **more) -> None:
    batch = batch_of(module, base)
    compared(results, case, module, base, batch, part_of(batch, rank()), **more)


def refilled(results: dict, base) -> None:
    """dapo.py's rounds, in which few groups have different rewards: the processes end with one group and four, or with
    none and five."""
    ((samples, rewards, _),) = part_of(batch_of(dapo, base), rank())
    known = rewards.nan_to_num(0.9).view(-1, G)
    for case, rounds in ("1 and 4", [[3, 4], [1, 3, 4]]), ("0 and 5", [[3, 4], [3, 4], [4]]):

        def more(first: int, rounds: list = rounds) -> tuple:
            flat = torch.ones(len(PROMPTS), 1, dtype=torch.bool)
            flat[rounds[first // len(PROMPTS)]] = False
            return samples, known.masked_fill(part_of(flat, rank()), 0.5).flatten(), {}

        kept, values, *_ = dapo.refill(more, 0, arguments(dapo, max_sampling_rounds=9))
        parts = gathered([(kept, values)])
        note(results, f"refill, {case}", [len(some.prompt_ids) for some, _ in parts])
        everything = dapo.Batch(join([some for some, _ in parts]), torch.cat([some for _, some in parts]), None)
        compared(results, case, dapo, base, (everything,), (dapo.Batch(kept, values, None),), beta=0.0)


def carried_over(results: dict, base) -> None:
    """What one way saves, every way loads: the same state, and the same next update."""
    (batch,) = batch_of(grpo, base)

    def run(way: str, path: Path | None = None, rounds: int = 1) -> dict | None:
        """Updates, from scratch or from what is in `path`; what it has then."""
        if way == "alone" and rank() > 0:
            return None
        with alone() if way == "alone" else contextlib.nullcontext():
            model = copy.deepcopy(base)
            model = shard(model, False) if way == "shards" else model
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            trained = Trained(model, optimizer)
            if path is not None:
                trained.load_state_dict(torch.load(path, weights_only=True))
            mine = batch if way == "alone" else part_of(batch, rank())
            for _ in range(rounds):
                grpo.update(model, optimizer, mine, arguments(grpo, fsdp=way == "shards"))
            return trained.state_dict()

    def numbers(state: dict) -> list[torch.Tensor]:
        moments = [tensor for entry in state["optimizer"]["state"].values() for tensor in entry.values()]
        return [*state["model"].values(), *moments]

    expected = run("alone", rounds=2)
    for began in WAYS:
        saved = run(began)
        if rank() == 0:
            torch.save(saved, FOLDER / f"{began}.pt")
        torch.distributed.barrier()
        for went_on in WAYS:
            after = run(went_on, FOLDER / f"{began}.pt")
            if rank() == 0:
                pairs = list(zip(numbers(after), numbers(expected), strict=True))
                far = max((a - b).abs().max().item() for a, b in pairs)
                note(results, f"{began} to {went_on}", [far, len(pairs)])


def whole_runs(results: dict) -> None:
    """grpo.py, which shards LoRA too, and dapo.py, where no group of process 1 is of use. They learn, save, and go on;
    the replicas as one process, and as two again."""
    how = dict(task="sort", num_prompts=5, num_generations=4, max_steps=2, eval_prompts=3, device="cpu", threads=1,
               precision="float32", micro_batch_size=4, sample_batch_size=8, max_completion_length=16)  # fmt: skip

    def scorer(*inputs):
        score = make_scorer(*inputs)
        return score if rank() == 0 else lambda rows, *_: (torch.zeros(len(rows)), {})

    def went(name: str, module, **more) -> None:
        settings = how | more | {"output_dir": str(FOLDER / "runs" / name)}
        module.train(module.Args(**settings))
        torch.distributed.barrier()
        (run,) = (FOLDER / "runs" / name).iterdir()
        settings |= {"resume": str(run), "max_steps": 3}
        if name == "replicas":
            if rank() == 0:
                with alone():
                    module.train(module.Args(**settings))
            torch.distributed.barrier()
            settings["max_steps"] = 4
        history = module.train(module.Args(**settings))
        if rank() == 0:
            first = load_model(grpo.Args())[0]
            last = AutoModelForCausalLM.from_pretrained(run / "model")
            moved = [(a - b).abs().max().item() for a, b in zip(first.parameters(), last.parameters(), strict=True)]
            note(results, f"run, {name}", {"steps": [row["step"] for row in history], "moved": max(moved),
                                           "gap": max(row.get("sampler_gap", 0.0) for row in history),
                                           "adapter": (run / "model/adapter").is_dir()})  # fmt: skip

    with mock.patch("utils.core.plot", lambda *_: None), mock.patch("algos.dapo.make_scorer", scorer):
        went("shards", grpo, fsdp=True)
        went("lora", grpo, fsdp=True, lora_rank=2, beta=0.1)
        went("replicas", grpo, lora_rank=2)
        went("dapo", dapo, fsdp=True)


def main(chosen: list[str]) -> None:
    results: dict = {}
    start(torch.device("cpu"))
    split(results, "float32", grpo, load_model(grpo.Args())[0].train())
    torch.set_default_dtype(torch.float64)
    base = llama().train()
    for script in chosen:
        model = base
        if script == "reward_model":
            base.config.num_labels, base.config.pad_token_id = 1, 0
            model = LlamaForSequenceClassification(base.config).train()
            model.model = copy.deepcopy(base.model)
        split(results, "float64", importlib.import_module(f"algos.{script}"), model)
    split(results, "by tokens", grpo, base, micro_batch_tokens=20, micro_batch_size=12)
    for aggregation, scale in (("token", "batch"), ("constant", "none")):
        split(results, aggregation, grpo, base, aggregation=aggregation, scale_rewards=scale)
    refilled(results, base)
    carried_over(results, base)
    torch.set_default_dtype(torch.float32)
    whole_runs(results)


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
    main(sys.argv[2:] or LANGUAGE)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stderr.flush()
    if not child:
        os._exit(0)
    os._exit(os.waitpid(child, 0)[1] and 1)
