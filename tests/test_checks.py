"""utils/checks.py: which models a run refuses before its first step, and that to ask leaves no trace."""

import pytest
import torch

import utils.lm
from benchmarks.architectures import make
from utils.checks import check_model
from utils.errors import UserError


@pytest.mark.parametrize("name", ["Llama", "Qwen3-MoE", "Jamba"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "pure-bfloat16"])
def test_plain_models_pass_and_stay_as_they_are(name, precision):
    model, state = make(name).train(), torch.get_rng_state()
    if precision == "pure-bfloat16":
        model.to(torch.bfloat16)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    check_model(model, precision)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name, noise", [("PhiMoE", {}), ("Mixtral", {"router_jitter_noise": 0.1})])
def test_noise_in_training_is_refused(name, noise, precision):
    """Experts are drawn, or routers have jitter: what is trained is not what sampled."""
    model, state = make(name, **noise), torch.get_rng_state()
    with pytest.raises(UserError, match=f"a {name.lower()}, which scores .* nats apart in training and"):
        check_model(model, precision)
    assert not model.training and torch.equal(torch.get_rng_state(), state)
    check_model(model, precision, noise_allowed=True)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_wrong_cache_is_refused(monkeypatch, precision):
    """Jamba's layers go on from a cached prompt without complaint, and wrongly."""
    monkeypatch.setattr(utils.lm, "shares_cache", lambda model: True)
    with pytest.raises(UserError, match="a jamba, whose tokens are scored 0.0.* where float32 allows 0.001"):
        check_model(make("Jamba"), precision)
