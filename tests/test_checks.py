"""utils/checks.py: which models a run refuses before its first step, and that to ask leaves no trace."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import utils.lm
from benchmarks.architectures import make, plain_logps
from utils.checks import check_model
from utils.errors import UserError
from utils.lm import pad_left, sample
from utils.models import resolve_for


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


def test_lengths_beyond_learned_positions():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=14, n_embd=8, n_layer=1, n_head=1))
    settings = {"max_length": 14, "lora_rank": 0, "precision": "float32"}
    resolve_for(model, SimpleNamespace(**settings), {"tiny": {}})
    with pytest.raises(UserError, match="--max-length is 15, and --model has 14 positions: lower it to 14"):
        resolve_for(model, SimpleNamespace(**settings | {"max_length": 15}), {"tiny": {}})


LONGROPE = dict(original_max_position_embeddings=14, rope_parameters=dict(
    rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
    original_max_position_embeddings=14))  # fmt: skip
DYNAMIC = dict(max_position_embeddings=14, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0))


@pytest.mark.parametrize("name, rope", [("Phi 3", LONGROPE), ("Llama", DYNAMIC)], ids=["longrope", "dynamic"])
def test_lengths_beyond_which_rotary_embeddings_change(name, rope):
    """Up to there a row's scores do not depend on its neighbour; one token more is refused, sampled or scored."""
    model = make(name, **rope)
    prompts = pad_left([[5], list(range(2, 8))], "cpu")
    samples = sample(model, *prompts, 2, 8, [], 1.0, torch.Generator().manual_seed(0))
    torch.testing.assert_close(samples.logps, plain_logps(model, samples), rtol=0, atol=1e-4)
    with pytest.raises(UserError, match="takes 14 in all: allow fewer"):
        sample(model, *prompts, 2, 9, [], 1.0)
    settings = {"max_length": 14, "lora_rank": 0, "precision": "float32"}
    resolve_for(model, SimpleNamespace(**settings), {"tiny": {}})
    with pytest.raises(UserError, match="--max-length is 15, .* lower --max-length to 14"):
        resolve_for(model, SimpleNamespace(**settings | {"max_length": 15}), {"tiny": {}})
