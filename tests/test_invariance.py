"""What must not matter does not: padding, order, micro-batches, the sampler's cache, chunks of the softmax.

Two models: a random Llama in float64, whose gradients must agree to 1e-10, and the shipped model in float32 (1e-5).
"""

import copy
import importlib
import inspect
import random
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers
from every_script import options
from helpers import LANGUAGE, ONLINE, SMALL, command_line
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import utils.lm
from algos import dapo, grpo
from utils.errors import UserError
from utils.lm import Samples, compare, completion_logps, pad_left, positions, sample, sample_all, split_rows
from utils.models import TINY_MODEL, eos_ids, load_model, with_float32_head, without_dropout
from utils.rewards import make_scorer
from utils.tasks import load_task

G, T = 4, 6
PROMPTS = [[5, 6, 7], [4, 8, 9, 10, 11, 12], [3], [13, 5]]
P, B = len(PROMPTS), len(PROMPTS) * G
SIZES = [1, 2, 4, 8, 12, B]
AGGREGATIONS = ["sequence", "token", "constant"]


def llama() -> LlamaForCausalLM:
    """Random weights, float64 throughout: the norms of transformers would round to float32."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, initializer_range=0.3, tie_word_embeddings=False)  # fmt: skip
    model = LlamaForCausalLM(config).double()
    for parent in [model.model, *model.model.layers]:
        for name, module in parent.named_children():
            if "norm" in name:
                norm = torch.nn.RMSNorm(32, module.variance_epsilon, dtype=torch.float64)
                setattr(parent, name, norm)
    return model.eval()


@pytest.fixture(params=["float64", "float32"])
def case(request):
    """A model, and the relative difference that its gradients may have."""
    if request.param == "float32":
        yield load_model(TINY_MODEL)[0].eval(), 1e-5
    else:
        torch.set_default_dtype(torch.float64)
        yield llama(), 1e-10
        torch.set_default_dtype(torch.float32)


def make_batch(model, seed: int = 0) -> grpo.Batch:
    """Random completions, ragged, some cut off, one reward skipped; old and reference policies a little off."""
    generator = torch.Generator().manual_seed(seed)
    prompts = pad_left(PROMPTS, "cpu")
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    lengths[0] = T
    ids = torch.randint(2, 16, (B, T), generator=generator)
    mask = torch.arange(T) < lengths[:, None]
    ended = torch.rand(B, generator=generator) < 0.7
    ids[ended, lengths[ended] - 1] = 1
    with torch.no_grad():
        logps, _ = completion_logps(model, *prompts, ids, mask)
    old, ref = (logps + 0.3 * torch.randn(B, T, generator=generator, dtype=logps.dtype) for _ in range(2))
    rewards = torch.randn(B, generator=generator, dtype=logps.dtype)
    rewards[3] = torch.nan
    return grpo.Batch(Samples(*prompts, ids * mask, mask, old, ended), rewards, ref)


def gradient(model, batch: grpo.Batch, **settings) -> torch.Tensor:
    """The gradient that one update leaves, as one vector."""
    defaults = dict(num_generations=G, micro_batch_size=B, max_completion_length=T, precision="float32", beta=0.1,
                    max_grad_norm=1e9)  # fmt: skip
    grpo.update(model, torch.optim.SGD(model.parameters(), 0.0), batch, grpo.Args(**defaults | settings))
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    assert b.norm() > 0
    return ((a - b).norm() / b.norm()).item()


def junk(like: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, 16, like.shape, generator=torch.Generator().manual_seed(7))


def more_left_padding(batch):
    s, extra = batch.samples, torch.ones(P, 3, dtype=torch.long)
    ids, mask = torch.cat([extra, s.prompt_ids], 1), torch.cat([extra < 0, s.prompt_mask], 1)
    return batch._replace(samples=s._replace(prompt_ids=ids, prompt_mask=mask))


def junk_under_padding(batch):
    s = batch.samples
    prompt_ids = torch.where(s.prompt_mask, s.prompt_ids, junk(s.prompt_ids))
    completion_ids = torch.where(s.completion_mask, s.completion_ids, junk(s.completion_ids))
    logps, ref = (torch.where(s.completion_mask, x, -2.5) for x in (s.logps, batch.ref_logps))
    return batch._replace(samples=s._replace(prompt_ids=prompt_ids, completion_ids=completion_ids, logps=logps),
                          ref_logps=ref)  # fmt: skip


def more_right_padding(batch):
    s, extra = batch.samples, torch.ones(B, 3, dtype=torch.long)
    ids, mask = torch.cat([s.completion_ids, extra], 1), torch.cat([s.completion_mask, extra < 0], 1)
    logps, ref = (torch.cat([x, -extra.to(x.dtype)], 1) for x in (s.logps, batch.ref_logps))
    return grpo.Batch(s._replace(completion_ids=ids, completion_mask=mask, logps=logps), batch.rewards, ref)


def reordered(batch, groups, rows):
    s = batch.samples
    completions = [x[rows] for x in (s.completion_ids, s.completion_mask, s.logps, s.ended)]
    samples = Samples(s.prompt_ids[groups], s.prompt_mask[groups], *completions)
    return grpo.Batch(samples, batch.rewards[rows], batch.ref_logps[rows])


def groups_reversed(batch):
    return reordered(batch, torch.arange(P).flip(0), torch.arange(B).view(P, G).flip(0).flatten())


def rows_rotated_within_groups(batch):
    return reordered(batch, torch.arange(P), torch.arange(B).view(P, G).roll(1, 1).flatten())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_does_not_depend_on_the_layout_of_the_batch(case, aggregation):
    """Micro-batches by rows and by tokens, padding on either side, ids under it, order of groups and of completions."""
    model, tolerance = case
    batch = make_batch(model)
    base = gradient(model, batch, aggregation=aggregation)
    for size in SIZES:
        assert relative(gradient(model, batch, aggregation=aggregation, micro_batch_size=size), base) < tolerance, size
    for tokens in (20, 40):
        other = gradient(model, batch, aggregation=aggregation, micro_batch_size=7, micro_batch_tokens=tokens)
        assert relative(other, base) < tolerance, tokens
    for change in (
        more_left_padding, junk_under_padding, more_right_padding, groups_reversed, rows_rotated_within_groups
    ):  # fmt: skip
        for size in (2, B):
            other = gradient(model, change(batch), aggregation=aggregation, micro_batch_size=size)
            assert relative(other, base) < tolerance, (change.__name__, size)


def test_metrics_do_not_depend_on_micro_batches(case):
    """Every metric of update is a mean over the whole step's tokens."""
    model, tolerance = case
    batch = make_batch(model)
    args = dict(num_generations=G, max_completion_length=T, precision="float32", beta=0.1)
    results = [
        grpo.update(model, torch.optim.SGD(model.parameters(), 0.0), batch, grpo.Args(micro_batch_size=size, **args))
        for size in (1, B)
    ]
    assert results[0] == pytest.approx(results[1], rel=10 * tolerance)


def test_merged_groups_keep_their_gradient(case):
    """Groups of several samplings with other widths, put together by refill, give the gradient of one batch."""
    model, tolerance = case
    batch = make_batch(model)._replace(ref_logps=None)
    scored = grpo.Scored(batch.rewards, {}, {})
    args = dapo.Args(num_prompts=P, num_generations=G, max_sampling_rounds=P)
    samples, merged, *_ = dapo.refill(lambda first: (batch.samples, scored), 0, args)
    assert relative(gradient(model, grpo.Batch(samples, merged.rewards, None)), gradient(model, batch)) < tolerance
    parts = []
    for g in range(P):  # each group alone, without the padding that the others caused
        s, rows = batch.samples, slice(g * G, (g + 1) * G)
        left, right = T - len(PROMPTS[g]), int(s.completion_mask[rows].sum(1).max())
        completions = [x[rows, :right] for x in (s.completion_ids, s.completion_mask, s.logps)]
        prompt = s.prompt_ids[g : g + 1, left:], s.prompt_mask[g : g + 1, left:]
        alone = Samples(*prompt, *completions, s.ended[rows])
        parts.append((alone, grpo.Scored(batch.rewards[rows], {}, {})))
    samples, merged, *_ = dapo.refill(lambda first: parts.pop(0), 0, args)
    assert not parts
    assert relative(gradient(model, grpo.Batch(samples, merged.rewards, None)), gradient(model, batch)) < tolerance


@pytest.mark.parametrize("script", [script for script in ONLINE if "beta" in options(script)])
def test_reference_logps_are_the_scorers(script, case):
    """The reference's log-probabilities, gathered over micro-batches, are those of one pass of the reference model."""
    module, (model, tolerance) = importlib.import_module(f"algos.{script}"), case
    batch, reference = make_batch(model), copy.deepcopy(model)
    with torch.no_grad():
        reference.lm_head.weight.mul_(0.5)
        expected, _ = completion_logps(reference, *batch.samples[:4], 1.3)
    mask = batch.samples.completion_mask
    for size in SIZES:
        args = module.Args(num_generations=G, micro_batch_size=size, precision="float32", temperature=1.3)
        assert relative(module.reference_logps(model, reference, batch, args)[mask], expected[mask]) < tolerance


def scores_and_gradient(model, *inputs) -> tuple[torch.Tensor, torch.Tensor]:
    mask = inputs[3]
    logps, entropies = completion_logps(model, *inputs, 0.7)
    weights = torch.linspace(-1, 1, mask.sum())
    model.zero_grad()
    (logps[mask] * weights).sum().backward()
    return torch.cat([logps[mask], entropies[mask]]).detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("other_path", ["repeated prompts", "gradient checkpointing", "small chunks"])
def test_scores_do_not_depend_on_how_they_are_computed(case, other_path, monkeypatch):
    """Prompts run once with a shared cache = prompts repeated = recomputed activations = log-softmax in pieces."""
    model, tolerance = case
    prompt_ids, prompt_mask, ids, mask = make_batch(model).samples[:4]
    expected = scores_and_gradient(model, prompt_ids, prompt_mask, ids, mask)
    if other_path == "repeated prompts":
        prompt_ids, prompt_mask = prompt_ids.repeat_interleave(G, 0), prompt_mask.repeat_interleave(G, 0)
    elif other_path == "gradient checkpointing":
        model = copy.deepcopy(model).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        monkeypatch.setattr(utils.lm, "CHUNK_ELEMENTS", 1)
    actual = scores_and_gradient(model, prompt_ids, prompt_mask, ids, mask)
    for a, e in zip(actual, expected):
        assert relative(a, e) < tolerance


def test_what_lies_under_padding_cannot_overflow():
    """A sharp policy finds some token all but impossible; where such a token is padding, its k3 against a flat
    reference would be infinite, and 0 times infinity is no number."""
    flat, sharp = llama().float(), llama().float()
    with torch.no_grad():
        sharp.lm_head.weight.mul_(300)
    samples = sample(sharp, *pad_left(PROMPTS, "cpu"), G, T, [int(x) for x in range(8)], 1.0,
                     torch.Generator().manual_seed(0))  # fmt: skip
    mask = samples.completion_mask
    finite = []
    for token in range(16):  # one of them is impossible there
        batch = grpo.Batch(samples._replace(completion_ids=torch.where(mask, samples.completion_ids, token)),
                           torch.arange(float(B)), None)  # fmt: skip
        args = grpo.Args(num_generations=G, micro_batch_size=B, max_completion_length=T, precision="float32", beta=0.1)
        batch = batch._replace(ref_logps=grpo.reference_logps(sharp, flat, batch, args))
        metrics = grpo.update(sharp, torch.optim.SGD(sharp.parameters(), 0.0), batch, args)
        finite.append(all(torch.tensor(list(metrics.values())).isfinite()))
    assert not mask.all() and all(finite)


def test_a_long_completion_is_normalised_in_pieces(monkeypatch):
    """What is normalised at once is limited however long a row is, up to one position's vocabulary."""
    model, sizes = llama(), []
    model.lm_head.register_forward_hook(lambda module, inputs, logits: sizes.append(logits.numel()))
    inputs = *pad_left(PROMPTS, "cpu"), torch.ones(P, 10, dtype=torch.long), torch.ones(P, 10) > 0
    monkeypatch.setattr(utils.lm, "CHUNK_ELEMENTS", 4 * 16)
    with torch.no_grad():
        completion_logps(model, *inputs)
        sizes.clear()  # of the first look at the model
        completion_logps(model, *inputs)
    assert max(sizes) == 4 * 16 and sum(sizes) == P * 10 * 16


@pytest.mark.parametrize(
    "kind, more, width",
    [
        ("Llama", {}, 32),
        ("Qwen2", {}, 32),
        ("Gemma2", dict(final_logit_softcapping=2.0, head_dim=8), 32),
        ("Cohere", dict(logit_scale=0.3), 32),
        ("Granite", dict(logits_scaling=4.0), 32),
        ("Odd", {}, 16),
    ],
)
def test_the_output_layer_is_run_on_its_own(kind, more, width):
    """With all that an architecture does to its logits. Where that is not known, logits are computed whole."""
    config = getattr(transformers, f"{kind.replace('Odd', 'Llama')}Config")(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.3, bos_token_id=1, eos_token_id=1, pad_token_id=0, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    model = (Odd(config) if kind == "Odd" else transformers.AutoModelForCausalLM.from_config(config)).eval()
    ids = torch.randint(0, 16, (2, 5))
    with torch.no_grad():
        body, head, _ = utils.lm.body_and_head(model)
        hidden, _ = body(input_ids=ids)
        torch.testing.assert_close(head(hidden), model(ids).logits, rtol=1e-4, atol=1e-5)
    assert hidden.shape[-1] == width


class Odd(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits.flip(-1)
        return out


@pytest.mark.parametrize("elements", [1, 10**6])
def test_compared_logits_are_those_of_whole_passes(elements, monkeypatch):
    """Of two models, in chunks of one token or in one: the value at each token and the gradient, of the first alone."""
    monkeypatch.setattr(utils.lm, "CHUNK_ELEMENTS", elements)
    models = llama(), llama()
    with torch.no_grad():
        models[1].lm_head.weight.mul_(-2)
    models[1].requires_grad_(False)
    samples = make_batch(models[0]).samples
    prompts = (x.repeat_interleave(G, 0) for x in samples[:2])
    ids, mask = (torch.cat(pair, 1) for pair in zip(prompts, samples[2:4]))
    own = samples.completion_mask

    def function(ids, first, second):
        one, other = first.log_softmax(-1), second.softmax(-1)
        return one.gather(1, ids[:, None])[:, 0], (one * other).sum(-1)

    def whole(model):
        logits = model(ids, attention_mask=mask.long(), position_ids=positions(mask)).logits
        return logits[:, -own.shape[1] - 1 : -1][own]

    weights = torch.linspace(-1, 1, 2 * own.sum()).view(2, -1)
    slopes, values = [], []
    for found in ([x[own] for x in compare(function, models, *samples[:4])],
                  function(samples.completion_ids[own], *map(whole, models))):  # fmt: skip
        models[0].zero_grad()
        (torch.stack(found) * weights).sum().backward()
        slopes.append(torch.cat([p.grad.flatten() for p in models[0].parameters()]))
        values.append(torch.stack(found).detach())
    torch.testing.assert_close(*values, rtol=0, atol=1e-10)
    assert relative(*slopes) < 1e-10
    assert not compare(function, models, *samples[:4])[0][~own].any()


class Logits(TorchDispatchMode):
    """Counts the elements of the living tensors as wide as a vocabulary, but for weights, which have `other` rows."""

    def __init__(self, width: int, other: int):
        super().__init__()
        self.width, self.other, self.now, self.most, self.seen = width, other, 0, 0, set()

    def drop(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            shape = tuple(getattr(tensor, "shape", ()))
            if len(shape) == 2 and shape[1] == self.width and shape[0] != self.other:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.seen:
                    self.seen.add(storage._cdata)
                    self.now += tensor.numel()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self.drop, storage._cdata, tensor.numel())
        return out


def test_compared_logits_are_held_in_chunks(monkeypatch):
    """However many tokens there are: CHUNK_ELEMENTS / 4 of each model, times the copies that the function makes."""
    config = llama().config
    config.vocab_size = 1000
    models, peaks = [type(llama())(config), type(llama())(config).requires_grad_(False)], []
    monkeypatch.setattr(utils.lm, "CHUNK_ELEMENTS", 16 * 1000)  # four tokens
    for length in 8, 64:
        ids = torch.zeros(2, length, dtype=torch.long)
        inputs = *pad_left([[1, 2], [3]], "cpu"), ids, ids == 0
        for model in models:
            utils.lm.body_and_head(model)
        with Logits(1000, config.hidden_size) as counted:
            (found,) = compare(lambda _, one, other: [(one.log_softmax(-1) - other).square().sum(-1)], models, *inputs)
            found.sum().backward()
        peaks.append(counted.most)
    assert 2 * 4 * 1000 <= peaks[0] == peaks[1] <= 12 * 4 * 1000


@pytest.mark.parametrize("compared", [False, True])
def test_gradients_of_the_output_layer_are_added_in_float32(compared, monkeypatch):
    """Under bfloat16, chunks of one token give the gradient of one chunk, but for the rounding of each of them."""
    model, ids, slopes = llama().float(), junk(torch.empty(4 * P, 32)), []
    inputs = *pad_left(PROMPTS * 4, "cpu"), ids, ids >= 0

    def chosen(ids, logits):
        return [logits.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]]

    for elements in 1, 10**6:
        monkeypatch.setattr(utils.lm, "CHUNK_ELEMENTS", elements)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logps = compare(chosen, [model], *inputs)[0] if compared else completion_logps(model, *inputs)[0]
        logps.sum().backward()
        slopes.append(model.lm_head.weight.grad.clone())
    assert relative(*slopes) < 0.005


def test_rows_share_a_budget_of_tokens():
    """Every row once, the longest first, with little padding."""
    lengths = torch.empty(1024).log_normal_(5.46, 0.7, generator=torch.Generator().manual_seed(0))  # mean 300
    lengths = lengths.clamp(1, 1024).long().tolist()
    batches = split_rows(lengths, 1024, 16_384)
    longest = [max(lengths[row] for row in rows) for rows in batches]
    held = [len(rows) * length for rows, length in zip(batches, longest)]
    assert longest == sorted(longest, reverse=True) and max(held) <= 16_384 and sum(lengths) > 0.9 * sum(held)
    assert sorted(row for rows in batches for row in rows) == list(range(1024))
    assert split_rows([5, 9, 2], 8, 4) == [[1], [0], [2]] and split_rows([1] * 5, 2, 99) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("script", [script for script in LANGUAGE if "num_pairs" in options(script)])
def test_scores_are_in_the_order_of_the_rows(script):
    """Whatever rows share a micro-batch with them."""
    module, draw = importlib.import_module(f"algos.{script}"), random.Random(0)
    model = llama().float()
    if script == "reward_model":
        model.config.num_labels, model.config.pad_token_id = 1, 0
        model = transformers.LlamaForSequenceClassification(model.config)
    kind, score = (module.Example, module.score_examples) if script == "kto" else (module.Pair, module.score_pairs)
    parts = {"prompt", "completion", "chosen", "rejected"} & {*kind._fields}
    rows = [kind(**{part: draw.choices(range(2, 16), k=draw.randint(1, 20)) for part in sorted(parts)},
                 **{"label": True} if script == "kto" else {}) for _ in range(12)]  # fmt: skip
    args = module.Args(micro_batch_size=4, micro_batch_tokens=90, precision="float32")
    together, *alone = ((x if isinstance(x := score(model, some, args), torch.Tensor) else x[0])
                        for some in (rows, *([row] for row in rows)))  # fmt: skip
    torch.testing.assert_close(together, torch.cat(alone))


EOS_IDS = [1, 9]


def text_prompts(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of the shipped model's own task, with different lengths; random ones for the random model."""
    if model.config.vocab_size == 16:
        return pad_left(PROMPTS, "cpu")
    from utils.tasks import load_task
    from utils.text import encode_prompt

    tokenizer, task = load_model(TINY_MODEL)[1], load_task("countdown")
    prompts = [encode_prompt(task.train(i, 1), tokenizer) for i in range(12)]
    assert len(set(map(len, prompts))) > 1
    return pad_left(prompts, "cpu")


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampler_and_scorer_agree(case, temperature):
    """The log-probability noted at sampling is what the scorer finds, also in rows that left the batch early."""
    model, tolerance = case
    prompts = text_prompts(model)
    eos = EOS_IDS if model.config.vocab_size == 16 else [1]
    samples = sample(model, *prompts, 8, 20, eos, temperature, torch.Generator().manual_seed(0))
    lengths = samples.completion_mask.sum(1)
    assert (lengths < lengths.max()).float().mean() > 0.5  # rows were dropped
    with torch.no_grad():
        logps, _ = completion_logps(model, *samples[:4], temperature)
    mask = samples.completion_mask
    torch.testing.assert_close(samples.logps[mask], logps[mask], rtol=0, atol=10 * tolerance)
    assert samples.logps[mask].min() < -1.0 and not samples.logps[~mask].any()


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_static_cache_gives_equal_samples(case, temperature, monkeypatch):
    """The path that a GPU captures as a graph, here without capture; also when rows leave the batch."""
    model, tolerance = case
    prompts, steps = text_prompts(model), []
    eos = EOS_IDS if model.config.vocab_size == 16 else [1]
    inputs = (model, *prompts, 8, 20, eos, temperature)
    plain = sample(*inputs, torch.Generator().manual_seed(0))
    inner = utils.lm.StaticDecoder.__call__
    monkeypatch.setattr(utils.lm.StaticDecoder, "__call__", lambda *x: steps.append(len(x[1])) or inner(*x))
    monkeypatch.setattr(model, "cuda_graphs", True, raising=False)
    static = sample(*inputs, torch.Generator().manual_seed(0))
    assert len(steps) == plain.completion_ids.shape[1] - 1 and len(set(steps)) > 1
    assert torch.equal(static.completion_ids, plain.completion_ids) and torch.equal(static.ended, plain.ended)
    torch.testing.assert_close(static.logps, plain.logps, rtol=0, atol=10 * tolerance)


def test_a_float32_head_narrows_the_gap_of_bfloat16():
    """Between the sampler's and the scorer's log-probabilities, which differ by rounding."""
    gaps = []
    for wanted in False, True:
        model, _ = load_model(TINY_MODEL)
        if wanted:
            with_float32_head(model)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            samples = sample(model, *text_prompts(model), 16, 20, [1], 1.0, torch.Generator().manual_seed(0))
            logps, _ = completion_logps(model, *samples[:4])
        gaps.append((logps - samples.logps)[samples.completion_mask].abs().mean().item())
    assert gaps[1] < 0.8 * gaps[0], gaps


@pytest.mark.parametrize("script", ONLINE)
def test_completions_are_sampled_at_the_temperature_that_scores_them(script):
    """And judged beside their own prompts."""
    module = importlib.import_module(f"algos.{script}")
    model, tokenizer = load_model(TINY_MODEL)
    group = {"num_generations": 2} if hasattr(module.Args, "num_generations") else {}
    args = module.Args(task="sort", num_prompts=3, sample_batch_size=6, temperature=2.0, max_completion_length=8,
                       precision="float32", **group)  # fmt: skip
    task, more = load_task("sort"), (None,) if script == "online_dpo" else ()
    first, judge, seen = (0,) if script == "dapo" else (), make_scorer(task, (), (), 1), []
    score = lambda *columns: seen.append(columns) or judge(*columns)  # noqa: E731
    samples, _ = module.collect(model, *more, tokenizer, task, score, 1, args, *first)
    ((rows, prompts, texts, *_),) = seen
    assert (
        prompts
        == [row["prompt"] for row in rows]
        == [tokenizer.decode(ids[mask]) for ids, mask in zip(*samples[:2]) for _ in range(2 if group else 1)]
    )
    assert texts == [tokenizer.decode(ids[mask], skip_special_tokens=True) for ids, mask in zip(*samples[2:4])]
    logps, _ = completion_logps(model, *samples[:4], 2.0)
    assert (logps - samples.logps).abs().max() < 1e-4


def test_the_model_s_own_eos_ends_a_completion_too():
    """Chat models end their turns with another token than their tokenizer's EOS."""

    def model(ids):
        return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ids))

    tokenizer = SimpleNamespace(eos_token_id=7)
    assert [eos_ids(model(ids), tokenizer) for ids in ([5, 9], 9, None)] == [[5, 7, 9], [7, 9], [7]]


def test_greedy_is_the_argmax_of_plain_forward_passes(case):
    """Temperature 0, from a padded batch with cache = the likeliest token, one prompt at a time, without either."""
    model, _ = case
    ids, mask = text_prompts(model)
    samples = sample(model, ids, mask, 1, 12, [1], 0.0)
    for row in range(len(ids)):
        sequence, new = ids[row][mask[row]].tolist(), []
        while len(new) < 12 and 1 not in new:
            with torch.no_grad():
                new.append(int(model(torch.tensor([sequence + new])).logits[0, -1].argmax()))
        assert samples.completion_ids[row][samples.completion_mask[row]].tolist() == new


def test_sampling_uses_only_its_own_generator():
    """Equal seeds give equal samples, another seed others; the global generator and the training mode stay."""
    model = llama().train()
    state = torch.get_rng_state()
    first, again, other = (
        sample(model, *pad_left(PROMPTS, "cpu"), 4, 10, [1], 1.0, torch.Generator().manual_seed(seed))
        for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert (
        first.completion_ids.shape != other.completion_ids.shape or (first.completion_ids != other.completion_ids).any()
    )


def test_sampling_follows_the_model():
    """Frequencies of first tokens are the model's probabilities at the temperature, for every padded prompt."""
    model = llama()
    prompts, count = pad_left(PROMPTS, "cpu"), 4000
    first = sample(model, *prompts, count, 1, [1], 1.5, torch.Generator().manual_seed(0)).completion_ids.view(P, count)
    for row, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            expected = (model(torch.tensor([prompt])).logits[0, -1] / 1.5).softmax(-1)
        found = torch.bincount(first[row], minlength=16) / count
        assert ((found - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt() + 1e-3).all()


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=2, attn_implementation="eager"),
        transformers.GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=2, attn_implementation="sdpa"),
        transformers.OPTConfig(vocab_size=16, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2,
                               word_embed_proj_dim=32, attention_dropout=0.1),
        LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                    attention_dropout=0.1),
    ],
    ids=["GPT-2", "GPT-2 sdpa", "OPT", "Llama"],
)  # fmt: skip
def test_without_dropout_training_mode_is_evaluation_mode(config):
    """Whatever an architecture calls it, and wherever it keeps the number: the scorer's policy is the sampler's."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    inputs = [*pad_left(PROMPTS, "cpu"), torch.randint(0, 16, (P, T)), torch.ones(P, T, dtype=torch.bool)]
    with torch.no_grad():
        expected = completion_logps(model.eval(), *inputs)[0]
        assert not torch.equal(completion_logps(model.train(), *inputs)[0], expected)
        without_dropout(model)
        assert torch.equal(completion_logps(model, *inputs)[0], expected) and model.training


@pytest.mark.parametrize("eos", [[1], EOS_IDS, [0]])
def test_masks_end_at_the_first_eos(eos):
    """Any of several EOS ids ends a completion, also one that is the padding id; without EOS it is cut off in full."""
    limit = 12
    samples = sample(llama(), *pad_left(PROMPTS, "cpu"), 8, limit, eos, 2.0, torch.Generator().manual_seed(0))
    for ids, mask, ended in zip(samples.completion_ids.tolist(), samples.completion_mask.tolist(), samples.ended):
        length = sum(mask)
        assert mask == [True] * length + [False] * (len(mask) - length)
        assert not set(ids[: length - 1]) & set(eos)
        assert ended == (ids[length - 1] in eos)
        assert ended or length == limit
    assert 0 < samples.ended.float().mean() < 1


@pytest.mark.parametrize("static", [False, True])
def test_each_prompt_may_have_its_own_limit(case, static, monkeypatch):
    """Then each is answered as it would be alone, also where prompts are sampled in several batches."""
    model, tolerance = case
    ids, mask = text_prompts(model)
    prompts, limits = [row[kept].tolist() for row, kept in zip(ids, mask)], [1, 20, 3, 7] * 3
    limits = limits[: len(prompts)]
    eos = EOS_IDS if model.config.vocab_size == 16 else [1]
    monkeypatch.setattr(model, "cuda_graphs", static, raising=False)
    together = sample(model, ids, mask, 2, limits, eos, 0.0)
    in_parts = sample_all(model, prompts, 2, limits, eos, 0.0, 6, ())
    for row, (prompt, limit) in enumerate(zip(prompts, limits)):
        alone = sample(model, *pad_left([prompt], "cpu"), 1, limit, eos, 0.0)
        length = int(alone.completion_mask.sum())
        for found in (together, in_parts):
            assert found.completion_mask[2 * row].sum() == length and found.ended[2 * row + 1] == alone.ended[0]
            assert torch.equal(found.completion_ids[2 * row, :length], alone.completion_ids[0])
            assert not found.completion_ids[2 * row, length:].any() and not found.logps[2 * row, length:].any()
            torch.testing.assert_close(found.logps[2 * row, :length], alone.logps[0], rtol=0, atol=10 * tolerance)
    lengths = together.completion_mask.sum(1)[::2].tolist()
    assert 0 < together.ended.float().mean() < 1 and any(n == limit > 1 for n, limit in zip(lengths, limits))


def test_equal_limits_are_one_limit():
    """Bit for bit."""
    prompts = pad_left(PROMPTS, "cpu")
    one, each = (sample(llama(), *prompts, 8, most, EOS_IDS, 1.0, torch.Generator().manual_seed(0))
                 for most in (9, [9] * P))  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(one, each))


def share_of_weights_moved(dtype: torch.dtype) -> float:
    """After 100 updates at rate 1e-6 on one group: which weights with a gradient are no longer what they were."""
    model = load_model(TINY_MODEL)[0].to(dtype)
    samples, rewards, _ = make_batch(model)
    samples = Samples(*(x[:1] for x in samples[:2]), *(x[:G] for x in samples[2:]))
    batch = grpo.Batch(samples._replace(logps=samples.logps.float()), rewards[:G].float(), None)
    before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0.0, fused=True)
    args = grpo.Args(num_generations=G, micro_batch_size=G, max_completion_length=T, precision="float32")
    for step in range(100):
        grpo.update(model, optimizer, batch, args)
        if step == 0:
            touched = torch.cat([p.grad.flatten() for p in model.parameters()]) != 0
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return (before != after)[touched].float().mean().item()


def test_small_steps_move_float32_weights():
    """At learning rate 1e-6 float32 weights move; bfloat16 ones mostly round back, which is why we keep float32."""
    assert share_of_weights_moved(torch.float32) > 0.99
    assert share_of_weights_moved(torch.bfloat16) < 0.3


@pytest.mark.parametrize("script", ONLINE)
def test_trust_remote_code_is_passed_on_to_rewards(script, tmp_path, monkeypatch):
    module, seen = importlib.import_module(f"algos.{script}"), []

    def scorer(*args):
        seen.append(inspect.signature(make_scorer).bind(*args).arguments.get("trust_remote_code"))
        raise UserError("seen")

    monkeypatch.setattr(module, "make_scorer", scorer)
    for flags in (), ("--trust-remote-code",):
        with pytest.raises(SystemExit):
            command_line(module, *SMALL[script], "--output-dir", tmp_path, *flags)
    assert seen == [False, True]


def test_a_prompt_and_completion_beyond_the_context():
    model, prompts = llama(), pad_left(PROMPTS, "cpu")  # the longest has 6 tokens
    model.config.max_position_embeddings = 10
    assert sample(model, *prompts, 1, 4, [], 0.0).completion_ids.shape == (P, 4)
    with pytest.raises(UserError, match="a prompt has 6 tokens, its completion up to 5, --model takes 10 in all"):
        sample(model, *prompts, 1, 5, [], 0.0)
    limits = [10 - len(prompt) for prompt in PROMPTS]  # beside the longest prompt, the shortest has more room
    assert sample(model, *prompts, 1, limits, [], 0.0).completion_mask.sum(1).tolist() == limits
    with pytest.raises(UserError, match=f"has {len(PROMPTS[1])} tokens, its completion up to {limits[1] + 1}, "):
        sample(model, *prompts, 1, [limits[0], limits[1] + 1, *limits[2:]], [], 0.0)
