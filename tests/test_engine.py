"""The sampling engine: what it asks of a server and makes of its replies, and that old weights stop the run.

By default against a stand-in, and against replies recorded from vLLM (tests/fixtures/vllm.json has version and date).
The slow tests need a real server: `python benchmarks/engine.py check --folder FOLDER`.
"""

import contextlib
import copy
import gc
import importlib
import json
import os
import random
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.engine_server import NEUTRAL, RECORDED, StandIn, make_model, serving
from tests.helpers import ONLINE, command_line, metrics, new_run, runs_in, weights
from tests.helpers import SMALL as RUNS
from utils import engine as engine_module
from utils.engine import Engine, Server, distance, sure, trained, ways
from utils.errors import UserError
from utils.lm import Samples, completion_logps, pad_left, sample, stream
from utils.lm import TINY_MODEL

CPU = torch.device("cpu")
PROMPTS = pad_left([[3, 4, 5], [6, 7], [8, 9, 10, 11], [3, 4, 5]], "cpu")
SMALL = dict(vocab_size=22, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
             num_key_value_heads=1, max_position_embeddings=64, eos_token_id=1, bos_token_id=None)  # fmt: skip
NAMES = [name for name, _ in make_model(config=Qwen2Config(tie_word_embeddings=False, **SMALL)).named_parameters()]


def make_small(tied: bool = False):
    return make_model(config=Qwen2Config(tie_word_embeddings=tied, **SMALL))


def make_engine(folder, *urls: str, precision: str = "float32", temperature: float = 0.7) -> Engine:
    args = SimpleNamespace(
        sampler=urls, precision=precision, micro_batch_tokens=0, temperature=temperature, output_dir=folder
    )
    return Engine(args)


def step(model, size: float, seed: int) -> None:
    """Moves every weight by about `size` of its tensor's own, as an optimizer does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += size * p.abs().mean() * torch.randn(p.shape, generator=generator)


def one_step(engine: Engine, model, k: int, temperature: float = 0.7) -> dict[str, float]:
    """What a training step does with an engine."""
    if not engine.now:
        engine.prove(model)
    engine.load(model)
    engine.sample(*PROMPTS, 8, 10, [1], temperature, stream(CPU, k))
    return engine.check(model, temperature)


@pytest.fixture
def server():
    with serving(StandIn(make_small())) as server:
        yield server


# what is asked, and what is made of replies


class Replay(StandIn):
    """Says what the real server said to the same question, each once and in their order."""

    def __init__(self, exchanges: list[dict]):
        super().__init__(torch.nn.Module())
        self.exchanges = list(exchanges)

    def answer(self, path: str, body: dict | None) -> tuple[int, dict]:
        if path == "/collective_rpc":
            body = body | {"kwargs": {"weights_path": "FOLDER"}}
        for k, exchange in enumerate(self.exchanges):
            if (exchange["path"], exchange["body"]) == (path, body):
                return exchange["status"], self.exchanges.pop(k)["reply"]
        return 404, {"nobody": "asked vLLM that"}


def recorded() -> list[dict]:
    return json.loads(RECORDED.read_text())["exchanges"]


def test_what_vllm_has_said_is_read_and_is_what_the_model_says(tmp_path):
    """Its log-probabilities of the tokens that it drew are our scorer's, at temperature 0.7."""
    with serving(Replay(recorded())) as server:
        engine, model = make_engine(tmp_path, server.url), make_model()
        engine.send(model, {})
        samples = engine.sample(*pad_left([[3, 4, 5], [6, 7]], "cpu"), 4, 6, [1, 8], 0.7, stream(CPU, "record"))
        greedy = engine.sample(*pad_left([[3, 4, 5], [6, 7]], "cpu"), 1, 12, [1, 8], 0.0, stream(CPU, "record"))
    assert distance(samples, engine.score(model, samples, 0.7)) < 1e-5
    assert 0 < samples.ended.sum() < len(samples.ended)  # both kinds are among them
    last = samples.completion_mask.sum(1) - 1
    ends = samples.completion_ids[torch.arange(8), last]
    assert (((ends == 1) | (ends == 8)) == samples.ended).all() and (last[~samples.ended] == 5).all()
    own = sample(model, *pad_left([[3, 4, 5], [6, 7]], "cpu"), 1, 12, [1, 8], 0.0)
    assert torch.equal(own.completion_ids, greedy.completion_ids)


def test_the_stand_in_replies_as_vllm_does(server):
    for exchange in recorded():
        path, body, status, reply = (exchange[key] for key in ("path", "body", "status", "reply"))
        if status == 200 and path != "/collective_rpc":
            assert has_fields_of(server.answer(path, body and body | {"model": "policy"})[1], reply), path


def has_fields_of(mine, theirs) -> bool:
    """A choice has all fields of theirs, other objects some; what stands there is of the same kind."""
    if isinstance(mine, dict):
        enough = mine.keys() == theirs.keys() if "token_ids" in mine else mine.keys() <= theirs.keys()
        return enough and all("top_logprobs" in mine or has_fields_of(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list) and mine and theirs:
        return has_fields_of(mine[0], theirs[0])
    return mine is None or theirs is None or isinstance(mine, type(theirs))


def test_a_refusal_of_vllm_is_one_sentence():
    errors = [exchange for exchange in recorded() if exchange["status"] != 200]
    with serving(Replay(errors)) as server:
        for exchange in errors:
            with pytest.raises(UserError, match=f"refuses {exchange['path']}.*{exchange['status']}.*developer mode"):
                Server(server.url).ask(exchange["path"], exchange["body"])
    assert {exchange["status"] for exchange in errors} == {400, 404, 500}


@pytest.mark.parametrize("servers", [1, 3])
def test_samples_are_those_of_the_model(tmp_path, servers):
    """With the seeds of each prompt, at the temperature asked for, wherever a prompt went."""
    model = make_small()
    step(model, 0.1, 0)  # the servers start with others
    with serving(StandIn(make_small())) as a, serving(StandIn(make_small())) as b, serving(StandIn(make_small())) as c:
        used = [a, b, c][:servers]
        engine = make_engine(tmp_path, *(server.url for server in used))
        engine.send(model, {})
        samples = engine.sample(*PROMPTS, 5, 9, [1, 8], 0.7, stream(CPU, 7))
        for k, server in enumerate(used):
            prompts = [body["prompt"] for path, body in server.asked if path == "/v1/completions"]
            assert sorted(prompts) == sorted([[3, 4, 5], [6, 7], [8, 9, 10, 11], [3, 4, 5]][k::servers])
    for i in range(4):
        prompt = PROMPTS[0][i][PROMPTS[1][i]].tolist()
        generator = torch.Generator().manual_seed(stream(CPU, 7).initial_seed() + 5 * i)
        alone = sample(model, *pad_left([prompt], "cpu"), 5, 9, [1, 8], 0.7, generator)
        rows, width = slice(5 * i, 5 * i + 5), alone.completion_ids.shape[1]
        for mine, theirs in zip(samples[2:5], alone[2:5]):
            assert torch.equal(mine[rows, :width], theirs) and not mine[rows, width:].any()
        assert torch.equal(samples.ended[rows], alone.ended)
    assert not torch.equal(samples.completion_ids[:5], samples.completion_ids[15:])  # the same prompt, other draws
    assert torch.equal(samples.prompt_ids, PROMPTS[0]) and torch.equal(samples.prompt_mask, PROMPTS[1])


def test_every_sampling_field_is_named(server, tmp_path):
    """A server fills in what a model's generation settings say for fields that are left out."""
    engine = make_engine(tmp_path, server.url)
    engine.send(server.model, {})
    engine.sample(*PROMPTS, 5, 9, [1, 8], 0.7, stream(CPU, 7))
    for body in (body for path, body in server.asked if path == "/v1/completions"):
        assert body | NEUTRAL == body
        assert (body["temperature"], body["n"], body["max_tokens"]) == (0.7, 5, 9)
        assert (body["ignore_eos"], body["stop_token_ids"], body["logprobs"]) == (True, [1, 8], 0)


def test_each_prompt_may_have_its_own_limit(server, tmp_path):
    engine, limits = make_engine(tmp_path, server.url), [9, 1, 4, 2]
    engine.send(server.model, {})
    samples = engine.sample(*PROMPTS, 5, limits, [1], 0.7, stream(CPU, 7))
    asked = {tuple(body["prompt"]): body["max_tokens"] for path, body in server.asked if path == "/v1/completions"}
    assert asked[6, 7] == 1 and asked[8, 9, 10, 11] == 4
    for limit, mask, ended in zip(limits, samples.completion_mask.view(4, 5, -1), samples.ended.view(4, 5)):
        assert ((mask.sum(1) == limit) | ended).all() and mask.sum(1).max() <= limit
    server.config["max_model_len"] = 12
    engine.load(make_small())
    engine.sample(*PROMPTS, 1, [9, 10, 8, 9], [1])
    with pytest.raises(UserError, match="takes 12 tokens: start it with --max-model-len 13"):
        engine.sample(*PROMPTS, 1, [9, 11, 1, 1], [1])


def test_completions_that_arrive_in_another_order_are_put_in_theirs(server, tmp_path):
    engine = make_engine(tmp_path, server.url)
    engine.send(server.model, {})
    before = engine.sample(*PROMPTS, 5, 9, [1], 0.7, stream(CPU, 7))
    server.reply = lambda choices: random.Random(1).sample(choices, len(choices))
    after = engine.sample(*PROMPTS, 5, 9, [1], 0.7, stream(CPU, 7))
    assert all(torch.equal(a, b) for a, b in zip(before, after))


FAULTS = {
    "EOS is left out": lambda one: {"token_ids": one["token_ids"][:-1]},
    "it goes on after EOS": lambda one: {"token_ids": [1, *one["token_ids"][1:]]},
    "a log-probability is missing": lambda one: {"logprobs": {"token_logprobs": one["logprobs"]["token_logprobs"][1:]}},
    "nothing": lambda one: {"token_ids": [], "logprobs": {"token_logprobs": []}},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reply_that_is_no_completion_is_refused(server, tmp_path, fault):
    engine = make_engine(tmp_path, server.url)
    engine.send(server.model, {})
    server.reply = lambda choices: [one | FAULTS[fault](one) for one in choices]
    with pytest.raises(UserError, match="neither ends with its only EOS"):
        engine.sample(*PROMPTS, 5, 9, [1, 8], 0.7, stream(CPU, 7))


def test_too_few_completions_are_refused(server, tmp_path):
    engine = make_engine(tmp_path, server.url)
    engine.send(server.model, {})
    server.reply = lambda choices: choices[1:]
    with pytest.raises(UserError, match="gave 4 completions where 5"):
        engine.sample(*PROMPTS, 5, 9, [1], 0.7, stream(CPU, 7))


# old weights


@pytest.mark.parametrize("kept", NAMES)
def test_a_server_that_keeps_one_tensor_is_named_at_the_start(server, tmp_path, kept):
    server.loading = lambda tensors: {name: value for name, value in tensors.items() if name != kept}
    with pytest.raises(UserError, match=f"old {kept} and not what it was given"):
        make_engine(tmp_path, server.url).prove(make_small())


@pytest.mark.parametrize("kept", ["Embedding", "Linear"])
def test_an_old_half_of_tied_embeddings_is_named(tmp_path, kept):
    """vLLM 0.32 on a CPU keeps the old output layer where it is tied, and answers 200 (seen with the real server)."""
    standing = make_small()  # not tied: it may have two
    standing.lm_head.weight.data = standing.model.embed_tokens.weight.data.clone()

    old = "lm_head.weight" if kept == "Linear" else "model.embed_tokens.weight"
    with serving(StandIn(standing)) as server:
        server.loading = lambda tensors: {name: value for name, value in tensors.items() if name != old}
        with pytest.raises(UserError, match=f"embed_tokens.weight in its {kept} layer"):
            make_engine(tmp_path, server.url).prove(make_small(tied=True))


@pytest.mark.parametrize("behind", ["never loads", "one load late", "stops later"])
def test_a_server_with_all_weights_old_stops_the_run(server, tmp_path, behind):
    held, loads = [], []

    def loading(tensors):
        loads.append(1)
        held.append(copy.deepcopy(tensors))
        late = behind == "one load late" and held[max(0, len(held) - 2)]
        return late if late else {} if behind == "never loads" or len(loads) > 5 else tensors

    server.loading = loading
    engine, model = make_engine(tmp_path, server.url), make_small()
    with pytest.raises(UserError, match="not what it was given|other weights than it was given"):
        for k in range(6):
            one_step(engine, model, k)
            step(model, 1e-3, k)
    assert (len(loads) > 3) == (behind == "stops later")  # else at the start


def moe():
    """A mixture of experts: a stand-in that computes in bfloat16 takes others than ours where two are close."""
    config = Qwen3MoeConfig(**(SMALL | dict(num_hidden_layers=2)), num_experts=8, num_experts_per_tok=2, head_dim=8,
                            moe_intermediate_size=16, tie_word_embeddings=False)  # fmt: skip
    return make_model(config=config, kind=Qwen3MoeForCausalLM)


class Rounding(StandIn):
    """Computes in bfloat16, from first to last."""

    def __init__(self, model):
        super().__init__(model)
        self.model.bfloat16()


def test_a_mixture_of_experts_that_is_merely_noisy_goes_on(tmp_path):
    """Steps of all sizes, from none to some that are smaller than the noise to large ones."""
    model, gaps = moe(), []
    with serving(Rounding(model)) as server:
        engine = make_engine(tmp_path, server.url, precision="bfloat16")
        for k in range(25):
            columns = one_step(engine, model, k)
            gaps.append(engine.servers[0].noise)
            step(model, [0.0, 1e-6, 1e-4, 1e-3, 1e-2][k % 5], k)
    assert gaps[0] > 0.003  # there is noise: a hundred times that of float32
    assert 0.9 < columns["engine/weight"] < 1.1 and columns["engine/ess"] > 0.9


def test_weights_that_are_one_step_old_are_seen_below_the_noise(tmp_path):
    """A fixed limit of the distance would let them pass: the step moves log-probabilities by less than the noise."""
    model, held, distances = moe(), [], []

    def loading(tensors):
        held.append(copy.deepcopy(tensors))
        return held[-1] if len(held) <= 4 else held[-2]

    with serving(Rounding(model)) as server:
        server.loading = loading
        engine = make_engine(tmp_path, server.url, precision="bfloat16")
        with pytest.raises(UserError, match="has older weights"):
            for k in range(40):
                if k == 0:
                    engine.prove(model)
                engine.load(model)
                samples = engine.sample(*PROMPTS, 16, 10, [1], 0.7, stream(CPU, k))
                distances.append(distance(samples, engine.score(model, samples, 0.7)))
                engine.check(model, 0.7)
                step(model, 0.003, k)
    assert len(held) > 4 and max(distances) < 3 * engine.servers[0].noise


def test_small_steps_count_as_large_ones_before_them(server, tmp_path):
    """The start has moved everything far, and that has arrived; of a small step after it nothing does."""
    engine, model = make_engine(tmp_path, server.url), make_small()
    one_step(engine, model, 0)
    step(model, 1e-4, 0)
    server.loading = lambda tensors: {}
    with pytest.raises(UserError, match="has older weights"):
        for k in range(1, 3):
            engine.before, engine.now = engine.now, {name: engine.rounded(p) for name, p in trained(model)}
            engine.drawn = None
            engine.sample(*PROMPTS, 16, 10, [1], 0.7, stream(CPU, k))
            engine.check(model, 0.7)
            step(model, 1e-4, k)


def test_each_server_is_compared_though_a_batch_has_one_prompt(server, tmp_path):
    model, prompt = make_small(), pad_left([[3, 4, 5]], "cpu")
    with serving(StandIn(model)) as other:
        engine = make_engine(tmp_path, server.url, other.url)
        engine.prove(model)
        for k in range(4):
            engine.load(model)
            for _ in range(2):  # as many batches a step as there are servers
                engine.sample(*prompt, 8, 10, [1], 0.7, stream(CPU, k))
            engine.check(model, 0.7)
            step(model, 1e-3, k)
    assert [len(one.ways) for one in engine.servers] == [16, 16]


def test_a_restarted_server_with_its_first_weights_is_seen(server, tmp_path):
    first = copy.deepcopy(server.model.state_dict())
    engine, model = make_engine(tmp_path, server.url), make_small()
    for k in range(3):
        one_step(engine, model, k)
        step(model, 0.05, k)
    engine.load(model)
    server.model.load_state_dict(first)
    engine.sample(*PROMPTS, 8, 10, [1], 0.7, stream(CPU, 9))
    with pytest.raises(UserError, match="given"):
        engine.check(model, 0.7)


def test_one_old_server_of_three_is_named(tmp_path):
    model = make_small()
    with serving(StandIn(model)) as a, serving(StandIn(model)) as b, serving(StandIn(model)) as c:
        engine = make_engine(tmp_path, a.url, b.url, c.url)
        one_step(engine, model, 0)
        step(model, 1e-3, 0)
        b.loading = lambda tensors: {}
        with pytest.raises(UserError, match=b.url):
            for k in range(1, 9):
                one_step(engine, model, k)
                step(model, 1e-3, k)


@pytest.mark.parametrize("lora", [0, 2])
def test_the_start_leaves_the_model_as_it_was(tmp_path, lora):
    """So does a comparison, with the old weights. And the server has its weights: to the bit in the same precision."""
    model = make_small()
    if lora:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=lora, task_type="CAUSAL_LM", target_modules="all-linear"))
    before = copy.deepcopy(model.state_dict())
    with serving(StandIn(model)) as server:
        engine = make_engine(tmp_path, server.url)
        said = engine.prove(model)
        engine.load(model)
        engine.sample(*PROMPTS, 8, 10, [1], 0.7, stream(CPU, 1))
        engine.check(model, 0.7)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(torch.equal(value, before[name]) for name, value in server.model.state_dict().items())
        assert f"{len(trained(model))} of its {len(trained(model))} tensors were seen" in said
        assert not list(tmp_path.iterdir())  # no folder of weights is left


def test_an_adapter_that_stays_old_is_named(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_small(), peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear"))
    kept = next(name for name, _ in trained(model) if "v_proj.lora_B" in name)
    with serving(StandIn(model)) as server:
        server.loading = lambda tensors: {
            name: value for name, value in tensors.items() if name.removesuffix(".weight") not in kept
        }
        with pytest.raises(UserError, match=f"old {kept}"):
            make_engine(tmp_path, server.url).prove(model)


# the rule


def samples_of(logps: torch.Tensor, mask: torch.Tensor | None = None) -> Samples:
    mask = torch.ones_like(logps, dtype=torch.bool) if mask is None else mask
    return Samples(torch.zeros(1, 1).long(), torch.ones(1, 1).bool(), mask.long(), mask, logps, mask[:, 0])


def test_ways_by_hand():
    old = torch.tensor([[-1.0, -1.0, -1.0], [-2.0, 0.0, 0.0]])
    new = torch.tensor([[-1.4, -0.8, -1.4], [-2.12, 0.0, 0.0]])
    said = torch.tensor([[-1.4, -0.7, -0.9], [-2.0, 0.0, 9.0]])  # there; too far; back; still where it was
    mask = torch.tensor([[True, True, True], [True, False, False]])
    found = ways(samples_of(said, mask), old, new)
    assert found.flatten().tolist() == pytest.approx(
        [(0.4 + 0.3 - 0.1) / 3, (0.4 + 0.2 + 0.4) / 3, 0.0, 0.12], abs=1e-6
    )


def test_sure_by_hand():
    """Six times the root of the sum of squares: 37 equal values are enough, 36 are not, and one large value is not."""
    assert sure(torch.ones(37)) and not sure(torch.ones(36)) and not sure(-torch.ones(99))
    assert not sure(torch.tensor([1000.0] + 37 * [1.0])) and not sure(torch.zeros(99))


@pytest.mark.parametrize("share, stops", [(0.0, True), (0.4, True), (0.6, False), (1.0, False)])
def test_less_than_half_of_the_way_stops_a_run(share, stops):
    whole = torch.rand(256, generator=torch.Generator().manual_seed(1))
    with pytest.raises(UserError, match="has old ones and not") if stops else contextlib.nullcontext():
        Server("").check_share(torch.stack([share * whole, whole], 1), "old ones")


@pytest.mark.parametrize("noise", ["normal", "cauchy", "rare"])
def test_noise_alone_does_not_stop_a_run(noise):
    """The right weights and symmetric noise: in none of 2,000 tries of 64 completions, where 3 in 10^5 were allowed.
    Weights that stay old are seen each time, where noise has a mean and is not larger than the step."""
    generator, seen = torch.Generator().manual_seed(1), 0
    draw = {
        "normal": lambda: torch.randn(64, 8, generator=generator),
        "cauchy": lambda: torch.empty(64, 8).cauchy_(generator=generator),
        "rare": lambda: torch.randn(64, 8, generator=generator) * (torch.rand(64, 8, generator=generator) < 0.05),
    }[noise]
    for _ in range(2000):
        drawn, old = draw(), 0.3 * torch.randn(64, 8, generator=generator)
        gone, whole = ways(samples_of(drawn), old, torch.zeros(64, 8)).T
        assert not sure(whole - gone)
        gone, whole = ways(samples_of(old + 0.1 * drawn), old, torch.zeros(64, 8)).T
        seen += sure(whole - gone) and gone.sum() < whole.sum() / 2
    assert seen == 2000 or noise == "cauchy"


def test_columns_by_hand(server, tmp_path):
    """Of a server that says log-probabilities that are too low at half of the tokens, by log 3."""
    engine, model = make_engine(tmp_path, server.url), make_small()
    engine.prove(model)
    engine.load(model)
    engine.servers[0].noise = 1.0
    engine.sample(*PROMPTS, 4, 10, [], 0.7, stream(CPU, 1))
    lower = torch.zeros(16, 10)
    lower[:, ::2] = torch.log(torch.tensor(3.0))
    engine.drawn = engine.drawn._replace(logps=engine.drawn.logps - lower)
    columns = engine.check(model, 0.7)
    assert columns["engine/weight"] == pytest.approx(2.0, abs=1e-4)  # mean of 3 and 1
    assert columns["engine/above_2"] == 0.5
    assert columns["engine/ess"] == pytest.approx(16 / 20, abs=1e-4)  # (3 + 1)^2 / (2 (9 + 1))


# servers that are not as they must be


def test_a_server_that_is_gone_is_one_sentence(server, tmp_path):
    engine = make_engine(tmp_path, server.url)
    engine.send(server.model, {})
    server.shutdown()
    server.server_close()
    for ask in (lambda: engine.load(make_small()), lambda: engine.sample(*PROMPTS, 2, 4, [1])):
        with pytest.raises(UserError, match=f"{server.url} does not answer .*refused.*--resume"):
            ask()


def test_a_slow_server_is_one_sentence(server, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "SLOWEST", 0.3)
    engine = make_engine(tmp_path, server.url)
    engine.send(server.model, {})
    with server.lock, pytest.raises(UserError, match="does not answer .*timed out"):
        engine.sample(*PROMPTS, 2, 4, [1])


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "ftp://127.0.0.1", "http://127.0.0.1:1"])
def test_a_url_that_leads_nowhere_is_one_sentence(tmp_path, url):
    with pytest.raises(UserError, match=f"--sampler {url.rstrip('/')} does not answer"):
        make_engine(tmp_path, url).prove(make_small())


def test_logprobs_of_another_mode_are_refused(server, tmp_path):
    server.config["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(UserError, match="--logprobs-mode processed_logprobs"):
        make_engine(tmp_path, server.url).prove(make_small())


def test_a_server_of_too_short_a_context_is_refused(server, tmp_path):
    """vLLM would cut completions off without a word."""
    server.config["max_model_len"] = 23
    engine = make_engine(tmp_path, server.url)
    engine.load(make_small())
    engine.sample(*PROMPTS, 1, 19, [1])
    with pytest.raises(UserError, match="takes 23 tokens: start it with --max-model-len 24"):
        engine.sample(*PROMPTS, 1, 20, [1])


def test_the_shortest_of_several_servers_counts(server, tmp_path):
    with serving(StandIn(server.model)) as longer:
        server.config["max_model_len"] = 23
        engine = make_engine(tmp_path, server.url, longer.url)
        engine.load(make_small())
        with pytest.raises(UserError, match=f"{server.url} takes 23 tokens"):
            engine.sample(*PROMPTS, 1, 20, [1])


def test_a_server_of_another_model_is_refused(tmp_path):
    """Of another shape it refuses our weights; of the same shape but another function its samples tell."""
    with serving(StandIn(make_model())) as server, pytest.raises(UserError, match="does it serve --model"):
        make_engine(tmp_path, server.url).prove(make_small())
    other, model = make_model(config=Qwen2Config(tie_word_embeddings=False, hidden_act="relu", **SMALL)), make_small()
    with serving(StandIn(other)) as server, pytest.raises(UserError, match="other weights"):
        make_engine(tmp_path, server.url).prove(model)


# runs


@pytest.fixture
def small_run(tmp_path_factory):
    """Arguments of a run on a small model, whose rewards always differ, by script."""
    folder = tmp_path_factory.mktemp("model")
    make_small().save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(folder)
    reward = folder / "rewards.py"
    reward.write_text("def tokens(completion_ids, **_):\n    return [sum(ids) % 97 / 97 for ids in completion_ids]\n"
                      "def odd(completion_ids, **_):\n    return [sum(i) % 2 for i in completion_ids]\n")  # fmt: skip
    sizes = ["--max-steps", "3", "--save-every", "1", "--eval-every", "2", "--eval-prompts", "4", "--eval-samples", "2"]
    more = ["--model", str(folder), "--reward", f"{reward}:tokens", "--learning-rate", "1e-2", *sizes]
    # only the shipped model brings its own teacher; the tests count one collection a step, of which the step learns
    own = {"gkd": ["--teacher", str(folder)], "nsr": ["--reward", f"{reward}:odd"],
           "tba": ["--sync-every", "1", "--on-policy-share", "1"]}  # fmt: skip
    return lambda algo, *last: [*RUNS[algo], *more, *own.get(algo, ()), *last]


@pytest.mark.parametrize("algo", ONLINE)
def test_a_run_samples_from_the_server_and_learns_from_its_own_weights(algo, server, small_run, tmp_path):
    """Training and evaluation ask the server; what it says is what the policy says, at every step."""
    module = importlib.import_module(f"algos.{algo}")
    rows = metrics(new_run(module, tmp_path, *small_run(algo, "--sampler", server.url)))
    bodies = [body for path, body in server.asked if path == "/v1/completions"]
    assert {0.0, module.Args().temperature} == {body["temperature"] for body in bodies}  # evaluated, too
    loads = [path for path, _ in server.asked if path == "/collective_rpc"]
    assert len(loads) == 6  # own, perturbed and own ones at the start, and after each step
    for row in rows[1:]:
        assert row["sampler_gap"] < 1e-5
        assert row["engine/weight"] == pytest.approx(1, abs=1e-4) and row["engine/ess"] == pytest.approx(1, abs=1e-4)
        assert row["engine/above_2"] == 0
    assert not any(path.name.startswith("weights-") for path in tmp_path.iterdir())


def test_without_a_server_there_are_no_columns_of_it(small_run, tmp_path):
    rows = metrics(new_run(importlib.import_module("algos.grpo"), tmp_path, *small_run("grpo")))
    assert not any(name.startswith("engine/") for row in rows for name in row)


@pytest.mark.parametrize("where", ["collecting", "evaluating"])
def test_a_server_that_goes_away_ends_the_run_and_another_one_continues_it(where, server, small_run, tmp_path, capsys):
    """With the numbers of the run that nothing has interrupted, bit for bit; an evaluation that failed is left out."""
    module = importlib.import_module("algos.grpo")
    whole = new_run(module, tmp_path / "a", *small_run("grpo", "--sampler", server.url))
    with serving(StandIn(server.model)) as other:
        left = {"collecting": 3, "evaluating": 4}[where]  # loads until it goes

        def loading(tensors):
            nonlocal left
            left -= 1
            if left < 0:
                raise RuntimeError("killed")
            return tensors

        other.config, other.loading = server.config, loading
        with pytest.raises(SystemExit, match="2") as leaving:
            new_run(module, tmp_path / "b", *small_run("grpo", "--sampler", other.url))
    del leaving  # it holds the run, which holds its lock
    gc.collect()
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: the engine --sampler http") and "killed" in error
    (folder,) = runs_in(tmp_path / "b")
    command_line(module, "--resume", folder, "--sampler", server.url)
    for row, wanted in zip(metrics(folder), metrics(whole), strict=True):
        assert row.items() <= wanted.items()
        assert all(name.startswith("eval/") and where == "evaluating" for name in wanted.keys() - row.keys())
    theirs = weights(whole)
    assert all(torch.equal(value, theirs[name]) for name, value in weights(folder).items())


def test_a_server_that_is_not_there_leaves_no_run_behind(small_run, tmp_path, capsys):
    with pytest.raises(SystemExit) as leaving:
        new_run(importlib.import_module("algos.grpo"), tmp_path, *small_run("grpo", "--sampler", "http://127.0.0.1:9"))
    assert leaving.value.code == 2 and not list(tmp_path.iterdir())
    assert (
        capsys.readouterr().err.strip().splitlines()[-1].startswith("error: the engine --sampler http://127.0.0.1:9 ")
    )


# the real one


@pytest.fixture
def vllm():
    if not (url := os.environ.get("PLAINRL_ENGINE")):
        pytest.skip("not run: no vLLM server (python benchmarks/engine.py check)")
    return url, os.environ["PLAINRL_ENGINE_MODEL"]


@pytest.mark.slow
def test_vllm_samples_with_the_weights_that_it_was_given(vllm, tmp_path):
    """From the start and after every change, each tensor; its log-probabilities are ours to 1e-5."""
    url, kind = vllm
    model = make_model(kind == "tied")
    if kind == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, task_type="CAUSAL_LM", target_modules="all-linear"))
    engine = make_engine(tmp_path, url)
    if kind == "tied":  # vLLM 0.32 on a CPU
        with pytest.raises(UserError, match="old model.embed_tokens.weight in its Linear layer"):
            engine.prove(model)
        return
    said = engine.prove(model)
    print(said)
    assert f"{len(trained(model))} of its {len(trained(model))} tensors were seen" in said
    for k in range(5):
        engine.load(model)
        samples = engine.sample(*PROMPTS, 16, 20, [1, 8], 0.7, stream(CPU, k))
        gap = distance(samples, engine.score(model, samples, 0.7))
        print(k, gap, engine.check(model, 0.7))
        assert gap < 1e-5 and 0 < samples.ended.float().mean() < 1
        with torch.no_grad():
            for _, p in trained(model):
                p += 1e-3 * torch.randn(p.shape, generator=stream(CPU, k))


@pytest.mark.slow
def test_vllm_draws_from_the_distribution(vllm, tmp_path):
    """First tokens of one prompt, 1,024 draws with seeds of their own: chi-squared against our probabilities."""
    url, kind = vllm
    if kind != "untied":
        pytest.skip("not run: once, with the untied model, is enough")
    engine, model = make_engine(tmp_path, url), make_model()
    engine.send(model, {name: engine.rounded(p) for name, p in trained(model)})
    ids, mask = pad_left([[3, 4, 5]] * 64, "cpu")
    drawn = engine.sample(ids, mask, 16, 1, [], 0.7, stream(CPU, "chi")).completion_ids[:, 0]
    every = torch.arange(22)[:, None]
    logps, _ = completion_logps(
        model, *pad_left([[3, 4, 5]], "cpu"), every, torch.ones_like(every, dtype=torch.bool), 0.7
    )
    expected = 1024 * logps[:, 0].detach().exp()
    counts = torch.bincount(drawn, minlength=22)
    assert expected.sum() == pytest.approx(1024, rel=1e-4)
    assert ((counts - expected) ** 2 / expected).sum() < 60  # 21 degrees of freedom: 1e-5


@pytest.mark.slow
def test_vllm_that_keeps_its_weights_is_seen(vllm, tmp_path):
    """The real server, which is not told of some loads."""
    url, kind = vllm
    if kind != "untied":
        pytest.skip("not run: once, with the untied model, is enough")
    engine, model = make_engine(tmp_path, url), make_model()
    one_step(engine, model, 0)
    step(model, 1e-4, 0)
    engine.before, engine.now = engine.now, {name: engine.rounded(p) for name, p in trained(model)}
    with pytest.raises(UserError, match="has older weights"):
        for k in range(1, 4):
            engine.drawn = None
            engine.sample(*PROMPTS, 16, 10, [1], 0.7, stream(CPU, k))
            engine.check(model, 0.7)
