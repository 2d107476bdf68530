"""What must not matter does not: padding, order, micro-batches, the sampler's cache, chunks of the softmax.

Two models: a random Llama in float64, whose gradients must agree to 1e-10, and the shipped model in float32 (1e-5).
"""

import copy
import importlib
import random

import pytest
import torch
import transformers
from every_script import options
from helpers import ONLINE
from transformers import LlamaConfig, LlamaForCausalLM

import utils.lm
from algos import grpo, reward_model
from utils.data import encode_prompt, load_task
from utils.dist import Samples, join, micro_batches, pad_left, split_rows
from utils.lm import completion_logps, load_model, sample, with_flags

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
        yield load_model(grpo.Args())[0].eval(), 1e-5
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


LAYOUTS = more_left_padding, junk_under_padding, more_right_padding, groups_reversed, rows_rotated_within_groups


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
    for change in LAYOUTS:
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
    """Groups that were sampled alone, with other widths, give the gradient of one batch."""
    model, tolerance = case
    batch, parts = make_batch(model)._replace(ref_logps=None), []
    for g in range(P):  # each group alone, without the padding that the others caused
        s, rows = batch.samples, slice(g * G, (g + 1) * G)
        left, right = T - len(PROMPTS[g]), int(s.completion_mask[rows].sum(1).max())
        prompts = [x[g : g + 1, left:] for x in (s.prompt_ids, s.prompt_mask)]
        completions = [x[rows, :right] for x in (s.completion_ids, s.completion_mask, s.logps)]
        parts.append(Samples(*prompts, *completions, s.ended[rows]))
    merged = batch._replace(samples=join(parts))
    assert len({part.completion_ids.shape[1] for part in parts}) > 1
    assert relative(gradient(model, merged), gradient(model, batch)) < tolerance


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
        found = module.reference_logps(model, reference, batch.samples, args)
        assert relative(found[mask], expected[mask]) < tolerance


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
        monkeypatch.setattr(utils.lm, "CHUNK", 1)
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
        batch = batch._replace(ref_logps=grpo.reference_logps(sharp, flat, batch.samples, args))
        metrics = grpo.update(sharp, torch.optim.SGD(sharp.parameters(), 0.0), batch, args)
        finite.append(all(torch.tensor(list(metrics.values())).isfinite()))
    assert not mask.all() and all(finite)


def test_a_long_completion_is_normalised_in_pieces(monkeypatch):
    """What is normalised at once is limited however long a row is, up to one position's vocabulary. No hook of the
    output layer runs: FSDP's would end the pass of the whole model at the first piece."""
    model, sizes = llama(), []
    forward = model.lm_head.forward
    model.lm_head.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    monkeypatch.setattr(model.lm_head, "forward", lambda states: sizes.append(16 * len(states)) or forward(states))
    monkeypatch.setattr(utils.lm, "CHUNK", 4 * 16)
    with torch.no_grad():
        completion_logps(model, *pad_left(PROMPTS, "cpu"), torch.ones(P, 10, dtype=torch.long), torch.ones(P, 10) > 0)
    assert max(sizes) == 4 * 16 and sum(sizes) == P * 10 * 16


def test_gradients_of_the_output_layer_are_added_in_float32(monkeypatch):
    """Under bfloat16, chunks of one token give the gradient of one chunk, but for the rounding of each of them."""
    model, ids, slopes = llama().float(), junk(torch.empty(4 * P, 32)), []
    inputs = *pad_left(PROMPTS * 4, "cpu"), ids, ids >= 0

    for elements in 1, 10**6:
        monkeypatch.setattr(utils.lm, "CHUNK", elements)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            completion_logps(model, *inputs)[0].sum().backward()
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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 7, 9])
def test_a_completion_keeps_its_prompt(size):
    """Also where a micro-batch ends within a group of three: prompts are dealt out evenly to its rows."""
    ones = torch.ones(9, 2, dtype=torch.long)
    samples = Samples(torch.tensor([[5], [6], [7]]), ones[:3, :1], ones, ones, None, None)
    args, found = grpo.Args(micro_batch_size=size), []
    for rows, (prompts, *_) in micro_batches(samples, args):
        found += prompts.repeat_interleave(len(rows) // len(prompts)).tolist()
    assert found == [5] * 3 + [6] * 3 + [7] * 3


def test_scores_are_in_the_order_of_the_rows():
    """Whatever rows share a micro-batch with them."""
    draw, model = random.Random(0), llama().float()
    model.config.num_labels, model.config.pad_token_id = 1, 0
    model = transformers.LlamaForSequenceClassification(model.config)
    sides = [[draw.choices(range(2, 16), k=draw.randint(1, 20)) for _ in range(2)] for _ in range(12)]
    rows = [reward_model.Pair(*side) for side in sides]
    args = reward_model.Args(micro_batch_size=4, micro_batch_tokens=90, precision="float32")
    together, *alone = (reward_model.score_pairs(model, some, args) for some in (rows, *([row] for row in rows)))
    torch.testing.assert_close(together, torch.cat(alone))


EOS_IDS = [1, 9]


def text_prompts(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of the shipped model's own task, with different lengths; random ones for the random model."""
    if model.config.vocab_size == 16:
        return pad_left(PROMPTS, "cpu")
    tokenizer, task = load_model(grpo.Args())[1], load_task("countdown")
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


def test_the_model_s_own_eos_ends_a_completion_too():
    """Chat models end their turns with another token than their tokenizer's EOS, or with the one of --eos-token."""
    model, tokenizer = load_model(grpo.Args())
    eos, other = tokenizer.eos_token_id, tokenizer.get_vocab()["="]
    for own, flag, expected in (([5, 9], "", {5, 9, eos}), (9, "", {9, eos}), (None, "", {eos}), (9, "=", {9, other})):
        model.generation_config.eos_token_id = own
        _, again = load_model(grpo.Args())
        with_flags(again, model, grpo.Args(eos_token=flag))
        assert model.generation_config.eos_token_id == sorted(expected) and again.eos_token == (flag or "<eos>")


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
def test_without_dropout_training_mode_is_evaluation_mode(config, tmp_path):
    """Whatever an architecture calls it, and wherever it keeps the number: the scorer's policy is the sampler's."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    inputs = [*pad_left(PROMPTS, "cpu"), torch.randint(0, 16, (P, T)), torch.ones(P, T, dtype=torch.bool)]
    with torch.no_grad():
        expected = completion_logps(model.eval(), *inputs)[0]
        assert not torch.equal(completion_logps(model.train(), *inputs)[0], expected)
        model.save_pretrained(tmp_path)
        load_model(grpo.Args())[1].save_pretrained(tmp_path)
        model = load_model(grpo.Args(model=str(tmp_path), attn_implementation=config._attn_implementation))[0].train()
        assert torch.equal(completion_logps(model, *inputs)[0], expected)


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


def share_of_weights_moved(dtype: torch.dtype, updates: int) -> float:
    """After updates at rate 1e-6 on one group: which weights with a gradient are no longer what they were."""
    model = load_model(grpo.Args())[0].to(dtype)
    samples, rewards, _ = make_batch(model)
    samples = Samples(*(x[:1] for x in samples[:2]), *(x[:G] for x in samples[2:]))
    batch = grpo.Batch(samples._replace(logps=samples.logps.float()), rewards[:G].float(), None)
    before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, weight_decay=0.0, fused=True)
    args = grpo.Args(num_generations=G, micro_batch_size=G, max_completion_length=T, precision="float32")
    for step in range(updates):
        grpo.update(model, optimizer, batch, args)
        if step == 0:
            touched = torch.cat([p.grad.flatten() for p in model.parameters()]) != 0
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return (before != after)[touched].float().mean().item()


def test_small_steps_move_float32_weights():
    """At learning rate 1e-6 float32 weights move; bfloat16 ones mostly round back, which is why we keep float32."""
    assert share_of_weights_moved(torch.float32, 10) > 0.99
    assert share_of_weights_moved(torch.bfloat16, 100) < 0.3
