"""LoRA: which weights are held in which precision, and that what is saved is what was trained."""

import copy
import json
import sys

import pytest
import torch
from architectures import make
from helpers import SMALL, command_line, metrics, new_run, user_error
from transformers import AutoModelForCausalLM

from algos import grpo, reward_model
from utils.core import UserError
from utils.lm import load_model, save_model
from utils.rewards import RewardModel

peft = pytest.importorskip("peft", reason="not run: peft is not installed")
IDS = torch.arange(2, 22)[None]


@pytest.fixture
def folder(tmp_path) -> str:
    """A model whose weights were published in bfloat16."""
    make("Llama").bfloat16().float().save_pretrained(tmp_path / "base")
    load_model(grpo.Args())[1].save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def dtypes(model, trained: bool) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters() if p.requires_grad is trained}


@pytest.mark.parametrize("precision, products, base", [
    (None, True, torch.bfloat16), (None, False, torch.float32),
    ("bfloat16", False, torch.bfloat16), ("float32", True, torch.float32),
])  # fmt: skip
@torch.no_grad()
def test_what_is_saved_is_what_was_trained(folder, precision, products, base, tmp_path, processor, capsys):
    """The frozen base has the bytes that autocast would make anew for every token, adapters are float32, and the merged
    model and the adapters on the base give the logits of the trained one. All are float32 here, so only the order of
    sums differs: 1e-5; merged in bfloat16 they would differ by 1e-2."""
    processor(products)
    args = grpo.Args(model=folder, precision=precision, lora_rank=2)
    model, tokenizer = load_model(args)
    said = "float32: this processor has no bfloat16 products" in capsys.readouterr().out
    assert said == (precision is None and not products)
    assert dtypes(model, False) == {base} and dtypes(model, True) == {torch.float32}
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.copy_(0.02 * torch.randn_like(p))
    expected = copy.deepcopy(model).float()(IDS).logits
    save_model(model, tokenizer, tmp_path / "model", args)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert (plain(IDS).logits - expected).abs().max() > 0.1
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "model" / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for other in (adapted, merged):
        torch.testing.assert_close(other(IDS).logits, expected, rtol=0, atol=1e-5)
    args.save_dtype = "bfloat16"
    save_model(model, tokenizer, tmp_path / "half", args)
    for name, p in AutoModelForCausalLM.from_pretrained(tmp_path / "half").named_parameters():
        assert torch.equal(p, merged.get_parameter(name).bfloat16())
    assert dtypes(model, False) == {base} and dtypes(model, True) == {torch.float32}, "saving changed the model"


def test_the_reference_is_held_in_bfloat16(folder):
    def reference(precision):
        args = grpo.Args(model=folder, precision=precision, attn_implementation="eager")
        model = load_model(args, frozen=True)[0]
        assert model.config._attn_implementation == "eager" and not dtypes(model, True)
        return dtypes(model, False)

    assert reference("float32") == {torch.float32} and reference("bfloat16") == {torch.bfloat16}
    for precision in "bfloat16", None:  # what is trained
        assert dtypes(load_model(grpo.Args(model=folder, precision=precision))[0], True) == {torch.float32}
    assert dtypes(load_model(grpo.Args(model=folder, precision="pure-bfloat16"))[0], True) == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")
def test_adapters_of_chosen_layers(folder):
    model = load_model(grpo.Args(model=folder, lora_rank=2, lora_modules=("q_proj", "v_proj")))[0]
    trained = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj"}


@pytest.mark.parametrize("modules, words", [
    (("q_proj", "lm_head"), "leave lm_head out of --lora-modules"),
    (("embed_tokens",), "leave embed_tokens out"),
    (("qkv",), "qkv"),
])  # fmt: skip
def test_layers_that_cannot_have_adapters(modules, words):
    """The shipped model has one weight for both ends: adapters of the head, merged, would move the embeddings."""
    with pytest.raises(UserError, match=words):
        load_model(grpo.Args(lora_rank=2, lora_modules=modules))


def test_a_reward_model_s_adapters_are_not_left_out(tmp_path):
    """Their folder loads as if they were there."""
    args = reward_model.Args(lora_rank=2)
    model, tokenizer = reward_model.load_member(1, "cpu", args)
    reward_model.save_model(model, tokenizer, tmp_path / "model", args)
    adapter = tmp_path / "model" / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": str(tmp_path / "model")}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(adapter)
    with pytest.raises(UserError, match="holds LoRA adapters"):
        RewardModel(str(adapter), "cpu")


@pytest.mark.parametrize("begun, then", [
    (["--lora-rank", 2], ["--lora-rank", 0]),  # ended in a segmentation fault
    (["--lora-rank", 2], ["--lora-rank", 4]),
    (["--lora-rank", 2, "--lora-modules", "q_proj"], ["--lora-modules", "q_proj", "v_proj"]),
    (["--lora-rank", 2, "--lora-modules", "q_proj", "v_proj"], ["--lora-modules", "q_proj"]),
    ([], ["--lora-rank", 2]),
    ([], ["--model", "other"]), (["--lora-rank", 2], ["--model", "other"]), (["--lora-rank", 2], ["--model", "moved"]),
], ids=str)  # fmt: skip
def test_what_would_lose_what_was_learned_is_refused_on_resume(begun, then, tmp_path, monkeypatch, capsys):
    """Another path of the same model is no other model."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer = load_model(grpo.Args())
    for name in "first", "other":
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
        model.model.layers[1].mlp.down_proj.weight.data.mul_(1.5)  # for the other one
    short = ["--max-steps", 1, "--max-completion-length", 8]
    run = new_run(grpo, tmp_path / "runs", *SMALL["grpo"], *short, "--model", "first", *begun)
    (tmp_path / "first").rename("moved")
    again = ["--resume", run, "--max-steps", 2, *([] if "--model" in then else ["--model", "moved"]), *then]
    if then == ["--model", "moved"]:
        command_line(grpo, *again)
        assert metrics(run)[-1]["step"] == 2
        return
    with user_error(capsys, "other weights"):
        command_line(grpo, *again)


def test_without_peft_the_run_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="--lora-rank needs peft: pip install peft"):
        load_model(grpo.Args(model=folder, lora_rank=2))
