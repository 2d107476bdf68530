"""utils/memory.py: predicted bytes against counted ones, also on layers of real width; what is refused or warned of,
and that the flags it names help; and the end of a run that runs out of memory."""

import dataclasses
import gc
import importlib
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers import LANGUAGE, SMALL, checkpoints, command_line, metrics, new_run, runs_in, user_error
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.initialization import no_init_weights

import utils.lm
from algos import grpo, ppo_lm
from benchmarks.architectures import make
from utils import memory
from utils.errors import UserError
from utils.lm import completion_logps, sample
from utils.lora import for_training
from utils.models import autocast, trained_parameters

CPU = torch.device("cpu")
SHAPES = {  # name -> class, settings; two layers of the real width each, and few words
    "Qwen2.5-0.5B": ("Qwen2", dict(hidden_size=896, intermediate_size=4864, num_attention_heads=14,
                                   num_key_value_heads=2)),
    "Llama-3.2-1B": ("Llama", dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
                                   num_key_value_heads=8, head_dim=64)),
    "Gemma-3-270M": ("Gemma3Text", dict(hidden_size=640, intermediate_size=2048, num_attention_heads=4,
                                        num_key_value_heads=1, head_dim=256)),
    "OLMo-2-1B, eager": ("Olmo2", dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=16,
                                       num_key_value_heads=16, attn_implementation="eager")),
}  # fmt: skip


def real_width(name: str):
    kind, settings = SHAPES[name]
    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=2, vocab_size=512, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, **settings,
    )  # fmt: skip
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        p.data.fill_(0.01)
    return model


def arguments(**changes) -> grpo.Args:
    settings = grpo.PRESETS["full"] | dict(micro_batch_size=4, micro_batch_tokens=0, device="cpu") | changes
    return grpo.Args(**settings)


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that live."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self.seen = 0, 0, set()

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return out


@pytest.mark.parametrize("name", SHAPES)
def test_activations_and_cache_on_real_shapes(name):
    """Within 15 % of the bytes that autograd saves and that a cache holds."""
    model, rows, tokens = real_width(name), 2, 80
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes, saved = memory.measure(model, "bfloat16"), {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage

    ids = torch.arange(rows * tokens).view(rows, tokens) % 512
    for checkpointed in (False, True):
        saved.clear()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda _: None), autocast(CPU, "bfloat16"):
            model.train().model(input_ids=ids, use_cache=False)
        args = arguments(micro_batch_size=rows, max_completion_length=tokens - 20, gradient_checkpointing=checkpointed)
        needs = memory.predict(sizes, args, prompt=20)
        expected = needs["activations"]
        if checkpointed:  # one layer runs again later; the head's input and a gradient are not here yet
            expected -= rows * tokens * ((sizes.token + sizes.square * tokens) / 2 + 2 * sizes.hidden)
        else:  # the head is not run
            expected += needs["copies in bfloat16"] - 2 * model.lm_head.weight.numel()
        assert sum(storage.nbytes() for storage in saved.values()) == pytest.approx(expected, rel=0.15)
    with torch.no_grad(), autocast(CPU, "bfloat16"):
        cache = model.eval()(input_ids=ids, use_cache=True).past_key_values
    held = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values))
    args = arguments(sample_batch_size=rows, num_generations=1, max_completion_length=tokens - 20)
    assert held == pytest.approx(memory.predict(sizes, args, prompt=20)["cache"], rel=0.15)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "pure-bfloat16"])
@pytest.mark.parametrize("rank", [0, 4])
def test_what_stays_all_the_time(precision, rank):
    """Weights, gradients and optimizer after a step, and the checkpoint, of the policy and a critic."""
    model = make("Llama").to(torch.bfloat16 if precision == "pure-bfloat16" else torch.float32)
    proposed = memory.measure(model, precision, [torch.nn.Linear(9, 9)])
    model, critic = for_training(model, rank, False, "CAUSAL_LM"), torch.nn.Linear(9, 9)
    parameters = trained_parameters(model) + trained_parameters(critic)
    optimizer = torch.optim.AdamW(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    held = {
        "weights": sum(p.nbytes for part in (model, critic) for p in part.parameters()),
        "gradients": sum(p.grad.nbytes for p in parameters),
        "Adam": sum(value.nbytes for state in optimizer.state.values() for value in state.values()),
    }
    held |= {"fixed": sum(held.values()), "disk": sum(p.nbytes for p in parameters) + held["Adam"]}
    args = arguments(precision=precision, lora_rank=rank)
    needs = memory.predict(memory.measure(model, precision, [critic]), args, prompt=2, reference=rank > 0)
    assert {name: needs[name] for name in held} == pytest.approx(held, rel=0.01)
    if precision != "bfloat16":  # there frozen weights are loaded in bfloat16
        needs = memory.predict(proposed, args, prompt=2)
        assert {name: needs[name] for name in held} == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("hidden, checkpointing", [(16, False), (64, False), (64, True)])
def test_peak_of_an_update_and_of_sampling(hidden, checkpointing, precision, monkeypatch):
    """All bytes that live at the worst moment, within 15 %: of a chunk of logits, of the output layer's gradient."""
    monkeypatch.setattr(memory, "CHUNK_ELEMENTS", 2**20)
    monkeypatch.setattr(utils.lm, "CHUNK_ELEMENTS", 2**20)
    model = make("Llama", vocab_size=20_000, hidden_size=hidden, intermediate_size=2 * hidden).train()
    args = arguments(precision=precision, max_completion_length=60, sample_batch_size=4, num_generations=4)
    args.gradient_checkpointing = checkpointing
    needs = memory.predict(memory.measure(model, precision), args, prompt=4)
    for_training(model, 0, checkpointing, "CAUSAL_LM")
    live, prompts = Live(), torch.ones(4, 4, dtype=torch.long)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
        live.count(p)
        live.count(p.grad)
    ids = torch.ones(4, 60, dtype=torch.long)
    with live:
        with autocast(CPU, precision):
            logps, _ = completion_logps(model, prompts, prompts.bool(), ids, ids.bool())
        logps.sum().backward()
    assert live.most == pytest.approx(needs["all"] - needs["Adam"], rel=0.15)
    live.most = live.now
    with live, autocast(CPU, precision):
        sample(model, prompts[:1], prompts[:1].bool(), 4, 60, [])
    parts = ("weights", "gradients", "copies in bfloat16", "cache", "sampled logits")
    assert live.most == pytest.approx(sum(needs[name] for name in parts), rel=0.15)


def test_measuring_leaves_nothing_behind():
    """No memory, no random number, no gradient, and the mode as it was."""
    model, live, state = make("Gemma 2").train(), Live(), torch.get_rng_state()
    memory.measure(model, "bfloat16")  # what libraries keep once is not counted
    for tensor in [*model.parameters(), *model.buffers()]:
        live.count(tensor)
    before = live.now
    with live:
        memory.measure(model, "bfloat16")
    gc.collect()
    assert live.now == before < live.most
    assert (
        model.training and torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    )


def told(monkeypatch, capacity: float, model, args, **shapes) -> str:
    monkeypatch.setattr(memory, "SMALL", 0)
    monkeypatch.setattr(memory, "device_memory", lambda device: capacity)
    try:
        return memory.check_memory(model, args, **shapes)
    except UserError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("share", [1.01, 0.9, 0.6, 0.4])
def test_the_flags_that_are_named_make_it_fit(share, monkeypatch):
    """Each of them is needed."""
    model = make("Llama", hidden_size=64, intermediate_size=512, num_hidden_layers=4)
    args, shapes = arguments(micro_batch_size=8, max_completion_length=400), dict(prompt=16, reference=True)
    sizes = memory.measure(model, "bfloat16")
    needs = memory.predict(sizes, args, **shapes)
    line = told(monkeypatch, share * needs["all"], model, args, **shapes)
    assert ("warning" in line) == (share < 1) and line.count("\n") == 1 + (share < 1)
    named = dict(re.findall(r"--([a-z-]+)(?: ([0-9.]+|[a-z-]+16))?", line))
    assert bool(named) == (share < 1)
    kinds = {name: type(getattr(args, name.replace("-", "_"))) for name in named}
    changes = {name.replace("-", "_"): kinds[name](named[name] or True) for name in named}
    for name in [None, *changes]:
        fewer = {other: value for other, value in changes.items() if other != name}
        need = memory.predict(sizes, dataclasses.replace(args, **fewer), **shapes)["all"]
        assert (need <= share * needs["all"]) == (name is None)


def test_what_cannot_fit_is_refused(monkeypatch):
    model = make("Llama", hidden_size=64, intermediate_size=512)
    assert not memory.check_memory(model, arguments(), prompt=9)  # nothing is said of small models
    needs = memory.predict(memory.measure(model, "bfloat16"), arguments(), prompt=9)
    line = told(monkeypatch, 0.99 * needs["fixed"], model, arguments(), prompt=9)
    assert re.match(r"refused: weights, gradients and optimizer need .* --device cpu has .*: ", line)
    assert "no flags make it fit" in told(monkeypatch, 1, model, arguments(), prompt=9)


@pytest.mark.parametrize("algo", LANGUAGE)
def test_every_script_is_refused_before_it_has_a_folder(algo, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "SMALL", 0)
    monkeypatch.setattr(memory, "device_memory", lambda device: 1e3)
    module = importlib.import_module(f"algos.{algo}")
    with user_error(capsys, "weights, gradients and optimizer need", "no flags"):
        command_line(module, *SMALL[algo], "--output-dir", tmp_path / "runs")
    assert not runs_in(tmp_path / "runs")


def test_a_separate_critic_counts(monkeypatch):
    """Weights, gradients, Adam and a second forward pass."""
    monkeypatch.setattr(ppo_lm, "check_memory", lambda *args, **shapes: seen.append((args, shapes)) or "")
    monkeypatch.setattr(ppo_lm, "Run", lambda *args, **_: 1 / 0)
    seen = []
    for critic in ("shared", "separate"):
        with pytest.raises(ZeroDivisionError):
            ppo_lm.train(ppo_lm.Args(task="sort", critic=critic, device="cpu"))
    shared, separate = (
        memory.predict(memory.measure(model, args.precision, others), args, **shapes)
        for (model, args, others), shapes in seen
    )
    for name in ("weights", "gradients", "Adam"):
        assert separate[name] == pytest.approx(2 * shared[name], rel=0.01)
    assert all(shapes["passes"] == 2 for _, shapes in seen)


@pytest.mark.parametrize("gpu", [True, False])
def test_out_of_memory_in_the_middle_of_a_run(gpu, tmp_path, monkeypatch, capsys):
    """One sentence that names what to type; the run goes on from its last checkpoint with it, to the same numbers."""
    flags, step = [*SMALL["grpo"], *"--max-steps 6 --save-every 2 --keep 9".split()], torch.optim.AdamW.step
    calls = []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            if gpu:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            torch.empty(2**50)
        return step(*args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", full)
    with user_error(capsys, "memory", "--resume", "--micro-batch-tokens", "--gradient-checkpointing", "--lora-rank"):
        command_line(grpo, *flags, "--output-dir", tmp_path / "runs")
    (folder,) = runs_in(tmp_path / "runs")
    assert checkpoints(folder) == [0, 2]
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    command_line(grpo, "--resume", folder, "--micro-batch-tokens", "64", "--gradient-checkpointing")
    whole = metrics(new_run(grpo, tmp_path / "whole", *flags))
    assert [row["step"] for row in metrics(folder)] == list(range(7))
    assert [row.get("reward") for row in metrics(folder)] == pytest.approx([row.get("reward") for row in whole])


def test_other_errors_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(grpo, "prepare", lambda args: torch.zeros(2) + torch.zeros(3))
    with pytest.raises(RuntimeError, match="size of tensor"):
        command_line(grpo)


def test_memory_of_the_device(monkeypatch):
    """What other processes hold on a GPU is not there; what this one has reserved is."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 20)
    assert memory.device_memory(SimpleNamespace(type="cuda")) == 70
    assert 2**28 < memory.device_memory(CPU) < 2**46
