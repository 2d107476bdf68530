"""Short runs of one process and of two, compared: tests/test_distributed.py starts this once.

    python tests/two_processes.py FOLDER

A case is a run of three steps in up to three ways: alone (by one of the processes, as if there were no other), with two
replicas, with two shards. FOLDER/results.json gets how far the ways are apart, case by case as soon as it is known.
The second process is forked from the first one, which saves torchrun's start and the imports.
"""

import contextlib
import importlib
import json
import os
import shutil
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import utils.distributed
import utils.lm
from tests.engine_server import StandIn
from utils.cli import saved_args
from utils.distributed import on_rank_0, share, start, together, whole
from utils.lm import TINY_MODEL

FOLDER = Path(sys.argv[1] if __name__ == "__main__" else "")
RANK = "0"  # of this process, also where a run believes to be alone
URL = ""  # of a sampling engine
ALONE = {"RANK": "0", "WORLD_SIZE": "1"}
REWARDS = """
def graded(completions, log_extra, log_metric, **_):
    log_metric("length", sum(map(len, completions)) / len(completions))
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
def odd(completions, **_):
    return [float(sum(map(ord, text)) % 2) for text in completions]
def unsure(prompts, completions, **_):
    return [None if sum(map(ord, x + y)) % 3 else len(y) / 20 for x, y in zip(prompts, completions)]
"""
ONLINE = dict(task="sort", num_prompts=10, sample_batch_size=4, max_completion_length=6, temperature=1.3,
              reward=(str(FOLDER / "rewards.py") + ":graded",), eval_every=0)  # fmt: skip
OFFLINE = dict(task="sort", num_pairs=20, batch_size=6, micro_batch_size=2, max_length=32, eval_every=0)
ANSWERS = dict(eval_max_new_tokens=5, sample_batch_size=4)
SMALL = {  # batches and micro-batches are three or five: one process has one more of them than the other
    "grpo": ONLINE | dict(num_generations=2, micro_batch_size=4, beta=0.1),
    "dapo": ONLINE | dict(num_generations=2, micro_batch_size=4, overlong_buffer=2, max_sampling_rounds=2),
    "gspo": ONLINE | dict(num_generations=2, micro_batch_size=4, num_minibatches=2, epsilon=0.02, epsilon_high=0.02),
    "gkd": ONLINE
    | dict(num_generations=2, micro_batch_size=4, teacher=str(FOLDER / "untied"), reward_weight=0.5, divergence="jsd"),
    "cispo": ONLINE | dict(num_generations=2, micro_batch_size=4, num_minibatches=2, bounds="gppo"),
    "nft": ONLINE | dict(num_generations=2, micro_batch_size=4, num_minibatches=2),
    "raft": ONLINE | dict(num_generations=2, micro_batch_size=4, num_minibatches=2, select="best"),
    "nsr": ONLINE
    | dict(
        num_generations=2,
        micro_batch_size=4,
        num_minibatches=2,
        denominator="subset",
        positive_weight=0.0,
        reward=(str(FOLDER / "rewards.py") + ":odd",),
    ),
    "topr": ONLINE | dict(num_generations=2, micro_batch_size=4, num_minibatches=2),
    "ttrl": ONLINE | dict(num_generations=2, num_votes=4, micro_batch_size=4, num_minibatches=2),
    "reinforce_pp": ONLINE | dict(num_generations=1, sample_batch_size=2, micro_batch_size=2, beta=0.1),
    "vineppo": ONLINE | dict(num_generations=2, micro_batch_size=4, num_minibatches=2, num_continuations=3),
    "grpo_multiturn": {key: value for key, value in ONLINE.items() if key not in ("task", "reward")}
    | dict(num_generations=2, micro_batch_size=4, beta=0.1, max_turns=3),
    "rloo": ONLINE | dict(num_generations=2, micro_batch_size=4, beta=0.1, num_iterations=2),
    "reinforce_lm": ONLINE | dict(micro_batch_size=2),
    "tba": ONLINE | dict(num_generations=2, micro_batch_size=4, sync_every=2, on_policy_share=0.5, beta=0.1),
    "ppo_lm": ONLINE | dict(num_generations=2, micro_batch_size=2, num_minibatches=2, sample_batch_size=4),
    "online_dpo": ONLINE | dict(num_generations=2, micro_batch_size=4, beta=0.1),
    "sft": dict(
        model="untied",
        task=("sort",),
        batch_size=6,
        micro_batch_size=2,
        max_length=32,
        warmup_steps=0,
        eval_every=2,
        eval_max_new_tokens=5,
        sample_batch_size=16,  # one process evaluates, and a step follows
    ),  # fmt: skip
    "dpo": OFFLINE | ANSWERS,
    "simpo": OFFLINE | ANSWERS,
    "orpo": OFFLINE | ANSWERS,
    "kto": OFFLINE | ANSWERS,
    "reward_model": OFFLINE | dict(ensemble=2),
}
BOTH = ("replicas", "shards")
# Of whose own lines none knows of shards.
LIKE_GRPO = "cispo nft raft nsr topr ttrl reinforce_pp vineppo reinforce_lm tba grpo_multiturn".split()
CASES = {script: (script, {}, BOTH[: 1 if script in LIKE_GRPO else 2]) for script in SMALL} | {
    "reinforce_pp, groups": (
        "reinforce_pp",
        dict(baseline="group", num_generations=2, sample_batch_size=4),
        ("replicas",),
    ),
    "untied": ("grpo", dict(model="untied"), BOTH),
    "gkd sampled": ("gkd", dict(estimator="sampled", divergence="reverse", teacher_beta_end=0.1), BOTH),
    "gkd on data": ("gkd", dict(student_share=0.0, reward_weight=0.0), ("replicas",)),
    "lora": ("grpo", dict(lora_rank=2), BOTH),
    "checkpointing": ("grpo", dict(gradient_checkpointing=True), BOTH),
    "by tokens": ("grpo", dict(micro_batch_tokens=40, micro_batch_size=12), BOTH),
    "no reference": ("grpo", dict(beta=0.0, num_iterations=2), BOTH),
    "skipped rewards": (
        "rloo",
        dict(
            reward=(str(FOLDER / "rewards.py") + ":unsure",), num_generations=4, sample_batch_size=8, micro_batch_size=8
        ),
        ("replicas",),
    ),
    "xpo": ("online_dpo", dict(num_generations=4, xpo_alpha=0.1, sample_batch_size=8), BOTH),
    "shared critic": ("ppo_lm", dict(critic="shared"), BOTH),
    "float32 grpo": ("grpo", {}, BOTH),
    "float32 engine": ("grpo", dict(sampler=True), BOTH),
    "float32 dpo": ("dpo", {}, BOTH),
}
# FSDP adds in another order. Equal completions then have an advantage of 0 but for rounding, whose sign decides what
# counts as cut.
NOISY = {"rloo, shards": "clip_fraction"}
RESUMED = {  # name -> how it began, how it went on
    "two to two": ("replicas", "replicas"),
    "two to one": ("replicas", "alone"),
    "one to two": ("alone", "replicas"),
    "shards to one": ("shards", "alone"),
    "one to shards": ("alone", "shards"),
    "shards to shards": ("shards", "shards"),
}


def make_inputs() -> None:
    (FOLDER / "rewards.py").write_text(REWARDS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_MODEL)
    for name in ("tied", "untied"):
        config = transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=name == "tied", bos_token_id=None,
            eos_token_id=1, pad_token_id=0, initializer_range=0.2,
        )  # fmt: skip
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(FOLDER / name)
        tokenizer.save_pretrained(FOLDER / name)


def norm(layer: LlamaRMSNorm, hidden: torch.Tensor) -> torch.Tensor:
    """RMSNorm in the precision of its input; theirs is always float32."""
    scale = (hidden.square().mean(-1, keepdim=True) + layer.variance_epsilon).rsqrt()
    return layer.weight * hidden * scale


@contextlib.contextmanager
def in_float64():
    torch.set_default_dtype(torch.float64)
    kept = lambda *_: torch.float64  # noqa: E731
    with (mock.patch("utils.models.weights_dtype", kept), mock.patch("algos.reward_model.weights_dtype", kept),
          mock.patch.object(torch.nn.Module, "float", lambda module: module),
          mock.patch.object(LlamaRMSNorm, "forward", norm)):  # fmt: skip
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def train(script: str, way: str, settings: dict) -> dict:
    """One run: rows of metrics, gradients of all optimizer steps, sampled tokens, final weights, the run's folder."""
    module = importlib.import_module(f"algos.{script}")
    gradients, tokens = [], []
    step, join = torch.optim.AdamW.step, utils.lm.join

    def noting_step(optimizer, *inputs):
        parts = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
        gradients.append(torch.cat([torch.zeros(p.numel()) if g is None else whole(g).flatten() for p, g in parts]))
        return step(optimizer, *inputs)

    def noting_join(parts):
        joined = join(parts)
        tokens.append([joined.prompt_ids.tolist(), joined.completion_ids.tolist()])
        return joined

    folder = FOLDER / f"{way}-{RANK if way == 'alone' else 'both'}-{time.time_ns()}"
    given = settings | dict(fsdp=way == "shards", output_dir=str(folder), threads=1, device="cpu")
    seen = ALONE if way == "alone" else {}
    with (mock.patch.dict(os.environ, seen), mock.patch("utils.run.plot", lambda *_: None),
          mock.patch.object(torch.optim.AdamW, "step", noting_step),
          mock.patch("utils.lm.join", noting_join)):  # fmt: skip
        history = module.train(module.Args(**given))
    found = {"rows": [{k: v for k, v in row.items() if not k.startswith("time/")} for row in history],
             "gradients": gradients, "tokens": tokens}  # fmt: skip
    if RANK == "0" or way == "alone":
        run = Path(given.get("resume") or next(folder.glob("*")))
        found |= {"run": run, "weights": {
            f"{path.parent.name}/{name}": tensor
            for path in sorted((run / "model").rglob("*.safetensors")) for name, tensor in load_file(path).items()
        }}  # fmt: skip
    return found


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def compared(one: dict, two: dict, noisy: str = "") -> dict:
    """How far two runs are apart, but for the metric `noisy`. A resumed one has the gradients of the last steps only,
    and one evaluation more."""
    count = len(two["gradients"])
    rows = [(a, {name: b[name] for name in a}) for a, b in zip(one["rows"], two["rows"], strict=True)]
    if noisy:
        rows = [({name: a[name] for name in a if name != noisy}, b) for a, b in rows]
    return {
        "steps": count,
        "gradients": [apart(b, a) for a, b in zip(one["gradients"][-count:], two["gradients"])],
        "metrics": [max(abs(a[name] - b[name]) / (1 + abs(a[name])) for name in a) for a, b in rows],
        "equal rows": all(a == b for a, b in rows),
        "sampled": sum(len(ids) for _, ids in two["tokens"]),
        "tokens": one["tokens"][len(one["tokens"]) - len(two["tokens"]) :] == two["tokens"],
        "weights": max(apart(two["weights"][name], tensor) for name, tensor in one["weights"].items()),
        "equal weights": all(torch.equal(two["weights"][name], tensor) for name, tensor in one["weights"].items()),
        "names": one["weights"].keys() == two["weights"].keys(),
    }


def settings_of(script: str, more: dict) -> dict:
    settings = dict(model="tied", max_steps=3, eval_prompts=3, precision="float32", learning_rate=1e-2, seed=3)
    settings |= {} if script == "reward_model" else dict(eval_samples=2)
    settings |= SMALL[script] | dict(micro_batch_tokens=0) | more
    settings |= dict(sampler=(URL,)) if "sampler" in settings else {}
    return settings | dict(model=str(FOLDER / settings["model"]))


def main(chosen: list[str]) -> None:
    results, names, wholes = {}, [name for name in CASES if name in chosen or name == "grpo"], {}

    def note(name: str, result: dict) -> None:
        results[name] = result
        if RANK == "0":
            (FOLDER / "results.json").write_text(json.dumps(results))

    def run(name: str, way: str) -> dict:
        with contextlib.nullcontext() if "float32" in name else in_float64():
            return train(CASES[name][0], way, settings_of(*CASES[name][:2]))

    alone = {name: run(name, "alone") for name in share(names)}
    utils.distributed.TIMEOUT = timedelta(seconds=60)  # ranks that wait for each other are soon found out
    start("cpu")
    alone = {name: one for part in together(lambda: alone) for name, one in part.items()}
    for name in names:
        found = {way: run(name, way) for way in CASES[name][2]}
        wholes = wholes or found | {"alone": alone[name]}  # of grpo, the first
        if RANK == "0":
            for way in found:
                note(f"{name}, {way}", compared(alone[name], found[way], NOISY.get(f"{name}, {way}", "")))
    with in_float64():
        began = {}
        for way in {way for name, (way, _) in RESUMED.items() if name in chosen}:
            if way != "alone" or RANK == "0":
                began[way] = train("grpo", way, settings_of("grpo", dict(max_steps=2))).get("run")
        for name in (name for name in RESUMED if name in chosen):
            way, went_on = RESUMED[name]
            resumed = FOLDER / name
            on_rank_0(lambda: shutil.copytree(began[way], resumed))  # noqa: B023
            if went_on != "alone" or RANK == "0":
                after = train("grpo", went_on, saved_args(resumed) | dict(resume=str(resumed), max_steps=3))
            if RANK == "0":
                note(name, compared(wholes[went_on], after) | {"beside one": compared(wholes["alone"], after)})


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads that a fork would lose
    make_inputs()
    sys.stdout, parent = open(os.devnull, "w"), os.getpid()
    server = StandIn(transformers.AutoModelForCausalLM.from_pretrained(FOLDER / "tied"))
    server.timeout, URL = 0.5, server.url
    if os.fork() == 0:  # two models in one process cannot be loaded at a time
        while os.getppid() == parent:
            server.handle_request()
        os._exit(0)
    child = os.fork()
    os.environ["RANK"] = RANK = "0" if child else "1"
    main(sys.argv[2:] or [*CASES, *RESUMED])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.exit(os.waitpid(child, 0)[1] if child else 0)
