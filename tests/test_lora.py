"""LoRA: which weights are held in which precision, what is adapted, and that what is saved is what was trained."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.architectures import make
from utils.checks import check_model
from utils.errors import UserError
from utils.lora import for_training
from utils.models import TINY_MODEL, load_model, load_reference, resolve_for, save_model, weights_dtype

peft = pytest.importorskip("peft", reason="not run: peft is not installed")
IDS = torch.arange(2, 22)[None]


@pytest.fixture
def folder(tmp_path) -> str:
    """A model whose weights were published in bfloat16."""
    make("Llama").bfloat16().float().save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.mark.parametrize("precision, base", [(None, torch.bfloat16), ("bfloat16", torch.bfloat16),
                                             ("float32", torch.float32)])  # fmt: skip
@torch.no_grad()
def test_what_is_saved_is_what_was_trained(folder, precision, base, tmp_path):
    """The frozen base has the bytes that autocast would make anew for every token, adapters are float32, and the merged
    model and the adapters on the base give the logits of the trained one. All are float32 here, so only the order of
    sums differs: 1e-5; merged in bfloat16 they would differ by 1e-2."""
    model, tokenizer = load_model(folder, precision=precision, lora_rank=2)
    frozen, trained = ({p.dtype for p in model.parameters() if p.requires_grad is wanted} for wanted in (False, True))
    assert frozen == {base} and trained == {torch.float32}
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.copy_(0.02 * torch.randn_like(p))
    expected = copy.deepcopy(model).float()(IDS).logits
    save_model(copy.deepcopy(model), tokenizer, tmp_path / "model", SimpleNamespace(save_dtype=None))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert (plain(IDS).logits - expected).abs().max() > 0.1
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "model" / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for other in (adapted, merged):
        torch.testing.assert_close(other(IDS).logits, expected, rtol=0, atol=1e-5)
    save_model(model, tokenizer, tmp_path / "half", SimpleNamespace(save_dtype="bfloat16"))
    for name, p in AutoModelForCausalLM.from_pretrained(tmp_path / "half").named_parameters():
        assert torch.equal(p, merged.get_parameter(name).bfloat16())


def test_the_reference_is_held_in_bfloat16(folder):
    def dtypes(precision):
        args = SimpleNamespace(model=folder, lora_rank=0, precision=precision, trust_remote_code=False,
                               attn_implementation="eager", float32_head=False, fsdp=False)  # fmt: skip
        model = load_reference(args, "cpu")
        assert model.config._attn_implementation == "eager"
        return {p.dtype for p in model.parameters()}

    assert dtypes("float32") == {torch.float32} and dtypes("bfloat16") == {torch.bfloat16}
    assert weights_dtype("bfloat16", 0) == weights_dtype(None, 0) == torch.float32  # what is trained


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")
@pytest.mark.parametrize("name, words", [("gpt-oss", "miss .*experts.gate_up_proj"), ("Qwen3-MoE", "routes .*gate")])
def test_experts_and_routers(name, words):
    """Adapters on all linear layers are refused where experts are none, or where what routes to them is one."""
    with pytest.raises(UserError, match=f"would .*{words}.* --lora-modules, some of k_proj, lm_head, o_proj"):
        for_training(make(name), 2, False, "CAUSAL_LM")
    model = for_training(make(name), 2, False, "CAUSAL_LM", ("q_proj", "v_proj"))
    trained = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj"}
    text = resolve_for(model, SimpleNamespace(lora_rank=2, precision="float32"), {"lora": {}})
    assert "LoRA on 4 layers: 2 q_proj, 2 v_proj\n" in text and "router_aux_loss_coef 0.001) is not applied" in text


def test_a_configuration_that_asks_for_router_logits(tmp_path):
    """With a cache transformers' own balancing loss, which they are for, fails; we do not apply it."""
    make("Mixtral", output_router_logits=True).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(tmp_path)
    check_model(load_model(str(tmp_path))[0], "float32")
