"""utils/decode.py under autocast: weights are cast once, and the logits are those of the model itself."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.architectures import make
from utils.decode import StaticDecoder
from utils.lm import prefill
from utils.lora import for_training
from utils.models import with_float32_head


class Casts(TorchDispatchMode):
    """Counts the numbers of a model's weights that are cast from float32 to bfloat16."""

    def __init__(self, model):
        super().__init__()
        self.numbers, self.weights = 0, {p.data_ptr() for p in model.parameters()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        if function is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            self.numbers += out.numel() * (args[0].data_ptr() in self.weights)
        return out


@pytest.mark.parametrize("kind", ["plain", "tied", "float32 head", "lora"])
def test_weights_are_cast_once(kind):
    """Bit for bit what the model gives with the same cache, which casts all its layers' weights for each token."""
    if kind == "lora":
        pytest.importorskip("peft", reason="not run: peft is not installed")
    torch.manual_seed(0)
    model = make("Llama", tie_word_embeddings=kind == "tied").eval()
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    if kind == "float32 head":
        with_float32_head(model)
    model = for_training(model, 4 if kind == "lora" else 0, False, "CAUSAL_LM").eval()
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    mask, position = torch.ones(2, 9, dtype=torch.long), torch.full((2, 1), 3)
    tokens = torch.tensor([[[4], [9]], [[5], [2]], [[8], [3]]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # as where a graph is captured
        cache, _ = prefill(model, ids, mask[:, :3].bool(), 1)
        ours, theirs = (StaticDecoder(model, copy.deepcopy(cache), mask, position) for _ in range(2))
        theirs.weights = {}
        for token in tokens:
            with Casts(model) as once:
                logits = ours(token)
            with Casts(model) as each:
                expected = theirs(token)
            assert torch.equal(logits, expected)
            in_float32 = model.get_output_embeddings().weight.numel() if kind == "float32 head" else 0
            assert once.numbers == 0 and each.numbers >= weights - in_float32
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_without_autocast_there_is_no_copy():
    model = make("Llama").eval()
    mask = torch.ones(1, 5, dtype=torch.long)
    with torch.no_grad():
        cache, _ = prefill(model, mask[:, :2], mask[:, :2].bool(), 1)
        decoder = StaticDecoder(model, cache, mask, torch.full((1, 1), 2))
    assert decoder.weights == {}
