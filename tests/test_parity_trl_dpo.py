"""DPO computes what TRL's DPOTrainer computes: every loss that both have, on the same log-probabilities, and a whole
step on the embedded model from the same rows of text.

The differences that remain, each of them named in algos/dpo.py and pinned here:
    - TRL's ipo averages log-probabilities over tokens; ours sums, and --average-logps makes it TRL's.
    - TRL's sigmoid knows no label smoothing.
    - TRL's sft averages over all tokens of the batch; ours over each completion's, then over pairs.
    - TRL has no dpop; we have no bco_pair, aot, aot_unpaired.
"""

import math

import pytest
import torch
from safetensors.torch import load_file

from algos import dpo
from benchmarks.peers.make_trl_dpo_fixtures import BETA, NAMES, PATH, SMOOTHING, B, by_trl, inputs
from utils.data import encode_answers, load_pairs
from utils.dist import as_samples
from utils.lm import TINY_MODEL, load_model

live = pytest.mark.usefixtures("needs_trl")


def by_script(name: str, data: dict, sft_coef: float = 0.0, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `update` composes it, in micro-batches, with a model that is these log-probabilities: completions of
    row i are tokens i."""
    settings = dict(beta=BETA, label_smoothing=SMOOTHING) | settings
    args = dpo.Args(loss=name, sft_coef=sft_coef, micro_batch_size=8, max_length=99, max_grad_norm=1e9, **settings)
    model, sizes = torch.nn.Module(), data["mask"].sum(1).tolist()
    model.table, model.device = torch.nn.Parameter(data["logps"].clone()), torch.device("cpu")
    samples = as_samples([([0], [i] * sizes[i], [B + i] * sizes[B + i]) for i in range(B)], args.max_length, "cpu")
    ref_logps = data["ref"][samples.completion_ids[:, 0], : samples.completion_ids.shape[1]]
    total = torch.zeros((), dtype=torch.float64)

    def completion_logps(_, __, ___, ids, mask):
        return model.table[ids[:, 0], : ids.shape[1]] * mask, None

    def counted(*inputs):
        losses = LOSSES[name](*inputs)
        nonlocal total
        total += losses.detach().sum() / B
        return losses

    LOSSES = dict(dpo.LOSSES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dpo, "completion_logps", completion_logps)
        patch.setitem(dpo.LOSSES, name, counted)
        batch = dpo.Batch(samples, ref_logps * samples.completion_mask)
        dpo.update(model, torch.optim.SGD(model.parameters(), 0.0), batch, args)
    if sft_coef:
        logps, mask = data["logps"][:B], data["mask"][:B]
        total -= sft_coef * (logps.sum(1) / mask.sum(1)).mean()
    return total, model.table.grad * data["mask"]


def masked(pair, data):
    return pair[0], pair[1] * data["mask"]


def compare(name, data, their_loss, their_gradient) -> None:
    settings = dict(average_logps=True) if name == "ipo" else dict(label_smoothing=0.0) if name == "sigmoid" else {}
    loss, gradient = by_script(name, data, **settings)
    their_gradient = their_gradient * data["mask"]
    assert their_gradient.abs().max() > 1e-3
    torch.testing.assert_close(loss, their_loss, rtol=0, atol=1e-7)  # TRL's smoothing in exo_pair is float32
    torch.testing.assert_close(gradient, their_gradient, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_loss_and_gradient(name):
    """What TRL 1.16 gave, as tests/fixtures/trl_dpo.safetensors keeps it; always run."""
    recorded, data = load_file(PATH), inputs()
    assert all(torch.equal(recorded[key], value) for key, value in data.items()), "the fixture is of other inputs"
    compare(name, data, recorded[f"{NAMES[name]}.loss"], recorded[f"{NAMES[name]}.gradient"])


@pytest.mark.parametrize("name", NAMES)
@live
def test_loss_and_gradient(name):
    data = inputs()
    compare(name, data, *by_trl([NAMES[name]], data))


@live
def test_length_normalised_dpo():
    data = inputs()
    loss, gradient = by_script("sigmoid", data, label_smoothing=0.0, average_logps=True)
    their_loss, their_gradient = masked(by_trl(["sigmoid_norm"], data), data)
    torch.testing.assert_close(loss, their_loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, their_gradient, rtol=0, atol=1e-12)


@live
def test_named_differences():
    """Summed IPO, smoothed DPO and the SFT term are not TRL's; the last is where all completions are as long."""
    data = inputs()
    assert not torch.isclose(by_script("ipo", data)[0], by_trl(["ipo"], data)[0], rtol=1e-2)
    assert not torch.isclose(by_script("sigmoid", data)[0], by_trl(["sigmoid"], data)[0], rtol=1e-2)
    for equal in (False, True):
        if equal:
            data = dict(
                mask=torch.ones(2 * B, data["mask"].shape[1], dtype=torch.bool),
                logps=data["logps"] - 0.1,
                ref=data["ref"],
            )
        ours = by_script("sigmoid", data, sft_coef=0.7, label_smoothing=0.0)
        theirs = masked(by_trl(["sigmoid", "sft"], data, [1.0, 0.7]), data)
        assert torch.isclose(ours[0], theirs[0], rtol=1e-9) == equal
        assert torch.allclose(ours[1], theirs[1], atol=1e-9) == equal


@live
def test_what_each_has():
    from trl import DPOTrainer

    for name in (*NAMES.values(), "bco_pair", "aot", "aot_unpaired"):
        assert by_trl([name], inputs())[0].isfinite(), name
    with pytest.raises(ValueError, match="Unknown loss type"):
        by_trl(["dpop"], inputs())
    assert DPOTrainer is not None and dpo.LOSSES.keys() - NAMES.keys() == {"dpop"}


@live
def test_a_whole_step(tmp_path):
    """Rows of text to loss and gradient: TRL's tokens, collator, forward pass and reference against ours. The reference
    is another model than the policy, for else every loss would be at its simplest point."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    rows = [{k: row[k] for k in ("prompt", "chosen", "rejected")} for row in load_pairs("sort", 6, 0).train]
    model, ref = (AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32) for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for p in ref.parameters():
            p.add_(0.02 * torch.randn_like(p))
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    config = DPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=6, report_to="none", logging_strategy="no", use_cpu=True,
        bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False, beta=BETA, max_length=64,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = DPOTrainer(model, ref, config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    theirs = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])

    args = dpo.Args(beta=BETA, micro_batch_size=8, max_length=64, precision="float32", max_grad_norm=1e9)
    ours, our_tokenizer = load_model(args)
    eos = ours.generation_config.eos_token_id
    pairs = [encode_answers(row, [row["chosen"], row["rejected"]], our_tokenizer, eos) for row in rows]
    samples = as_samples(pairs, args.max_length, "cpu")
    batch = dpo.Batch(samples, dpo.reference_logps(ours, ref, samples, args))
    metrics = dpo.update(ours, torch.optim.SGD(ours.parameters(), 0.0), batch, args)
    gradient = torch.cat([p.grad.flatten() for p in ours.parameters()])
    assert abs(loss.item() - math.log(2)) > 0.01
    assert ((gradient - theirs).norm() / theirs.norm()).item() < 1e-5
    (margin,) = trainer._metrics["eval" if not trainer.model.training else "train"]["rewards/margins"]
    assert metrics["margin"] == pytest.approx(margin, rel=1e-4)


@live
def test_prompts_from_what_both_begin_with():
    """TRL's extract_prompt and ours agree on conversations, and on texts that first differ in whole words."""
    from trl import extract_prompt

    from utils.data import as_pair

    ask, yes, no = ({"role": r, "content": c} for r, c in (("user", "Is it?"), ("assistant", "Yes"), ("user", "No")))
    for chosen, rejected in (([ask, yes], [ask, no]), ([ask, yes, ask, no], [ask, yes, ask, yes]),
                             ("Q: sky? A: blue", "Q: sky? A: green")):  # fmt: skip
        row = dict(chosen=chosen, rejected=rejected)
        assert as_pair(row) == extract_prompt(row)
    row = dict(chosen="A: catnip", rejected="A: cats")  # here TRL's prompt is "A: cat"
    assert as_pair(row) == dict(prompt="A:", chosen=" catnip", rejected=" cats") != extract_prompt(row)
