"""SimPO, ORPO and KTO compute what TRL's CPOTrainer, ORPOTrainer and KTOTrainer compute: the same loss and gradient on
the same log-probabilities, and whole steps on the embedded model from the same rows of text.

The differences that remain, each of them named in the scripts and pinned here:
    - TRL's likelihood terms (ORPO's, and cpo_alpha beside SimPO) average over all tokens of the batch, ORPO's over the
      prompt's, too; ours over each completion's tokens, then over pairs.
    - TRL's ORPO gives NaN where a completion is certain.
    - TRL's KTO takes z over a micro-batch.
"""

import pytest
import torch
from safetensors.torch import load_file

from algos import kto, orpo, simpo
from benchmarks.peers.make_trl_preferences_fixtures import (
    BETA,
    CASES,
    GAMMA,
    PATH,
    SFT,
    WEIGHTS,
    B,
    by_trl,
    equal_lengths,
    inputs,
)
from utils.data import encode_answers, load_pairs
from utils.dist import as_samples
from utils.lm import TINY_MODEL, load_model

live = pytest.mark.usefixtures("needs_trl")
cases = pytest.mark.parametrize("case", CASES)


def by_script(case: str, data: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `update` composes it, in micro-batches of four, with a model that is these log-probabilities: row i
    has the prompt [i] and a completion of tokens i."""
    if case in ("simpo-sft", "orpo-equal"):
        data = equal_lengths(data)
    name = case.partition("-")[0]
    module = {"simpo": simpo, "orpo": orpo, "kto": kto}[name]
    args = module.Args(beta=BETA[name], micro_batch_size=4, max_length=99, max_grad_norm=1e9, precision="float32")
    model = torch.nn.Module()
    model.device = torch.device("cpu")
    model.table = torch.nn.Parameter(data["logps"].clone())
    sizes = data["mask"].sum(1).tolist()

    def completion_logps(_, prompt_ids, __, ids, mask):
        prompts = prompt_ids[:, -1].repeat_interleave(len(ids) // len(prompt_ids))
        own = model.table[ids[:, 0]]
        if name == "kto":
            assert ((prompts == ids[:, 0]) | ((prompts - 1) % (2 * B) == ids[:, 0])).all()
            own = torch.where((prompts == ids[:, 0])[:, None], own, data["kl_logps"][prompts])
        return own[:, : ids.shape[1]] * mask, None

    if name == "kto":
        args.desirable_weight, args.undesirable_weight = WEIGHTS
        own, others = ([([i], [i - shift] * sizes[i - shift]) for i in range(2 * B)] for shift in (0, 1))
        own, others = (as_samples([(p, [x % (2 * B) for x in c]) for p, c in rows], args.max_length, "cpu")
                       for rows in (own, others))  # fmt: skip
        ref, kl_ref = (data[name][:, : own.completion_ids.shape[1]] for name in ("ref", "kl_ref"))
        labels = data["labels"].bool()
        batch = kto.Batch(own, ref * own.completion_mask, labels, others, kl_ref * others.completion_mask)
    else:
        batch = as_samples([([i], [i] * sizes[i], [B + i] * sizes[B + i]) for i in range(B)], args.max_length, "cpu")
    if name == "simpo":
        args.gamma, args.sft_coef = GAMMA, SFT if case == "simpo-sft" else 0.0
    losses, loss = [], getattr(module, f"{name}_loss")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "completion_logps", completion_logps)
        patch.setattr(module, f"{name}_loss", lambda *x: losses.append(loss(*x)) or losses[-1])
        module.update(model, torch.optim.SGD(model.parameters(), 0.0), batch, args)
    total = torch.cat(losses).detach().sum() / (2 * B if name == "kto" else B)
    if case == "simpo-sft":
        total -= SFT * (data["logps"][:B].sum(1) / data["mask"][:B].sum(1)).mean()
    return total, model.table.grad


def compare(case, data, their_loss, their_gradient) -> None:
    loss, gradient = by_script(case, data)
    if case == "orpo":  # ragged: the likelihood's weights differ, so TRL's are put in the place of ours
        mask, logps = data["mask"][:B], data["logps"][:B]
        lengths = mask.sum(1)
        loss = loss + (logps.sum(1) / lengths).mean() - logps.sum() / mask.sum()
        gradient[:B] += mask * (1 / (B * lengths[:, None]) - 1 / mask.sum())
    assert their_gradient.abs().max() > 5e-3
    torch.testing.assert_close(loss, their_loss.to(loss.dtype), rtol=0, atol=1e-6)  # TRL's odds are float32
    torch.testing.assert_close(gradient, their_gradient, rtol=0, atol=1e-6)


@cases
def test_recorded_loss_and_gradient(case):
    """What TRL 1.16 gave, as tests/fixtures/trl_preferences.safetensors keeps it; always run."""
    recorded, data = load_file(PATH), inputs()
    assert all(torch.equal(recorded[key], value) for key, value in data.items()), "the fixture is of other inputs"
    compare(case, data, recorded[f"{case}.loss"], recorded[f"{case}.gradient"])


@cases
@live
def test_loss_and_gradient(case):
    data = inputs()
    compare(case, data, *by_trl(case, data))


def test_the_reference_point_matters_here():
    data = inputs()
    assert (data["kl_logps"] - data["kl_ref"]).sum(1).mean() > 0.3 and 0 < data["labels"].sum() < 2 * B


@live
def test_the_likelihood_term_differs():
    """Where lengths differ; the cases above that end in -sft and -equal are where they do not."""
    data = inputs()
    assert (by_script("orpo", data)[0] - by_trl("orpo", data)[0]).abs() > 1e-3


@live
def test_certain_completions():
    data = inputs()
    data["logps"][0] = 0.0
    assert by_script("orpo", data)[1].isfinite().all() and not by_trl("orpo", data)[1].isfinite().all()


# whole steps: rows of text to loss and gradient, TRL's tokens, collator and forward pass against ours


def two_models():
    """The embedded model, and another as reference, for else every log-ratio would be 0."""
    from transformers import AutoModelForCausalLM

    model, ref = (AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32) for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for p in ref.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return model, ref


def config(config_class, tmp_path, **settings):
    return config_class(
        output_dir=str(tmp_path), report_to="none", logging_strategy="no", use_cpu=True, bf16=False, max_length=64,
        gradient_checkpointing=False, dataloader_pin_memory=False, save_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@live
def test_a_whole_step_of_simpo(tmp_path):
    import datasets
    from transformers import AutoTokenizer
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    rows = [{k: row[k] for k in ("prompt", "chosen", "rejected")} for row in load_pairs("countdown", 6, 0).train]
    model, _ = two_models()
    settings = config(CPOConfig, tmp_path, per_device_train_batch_size=6, beta=2.0, simpo_gamma=0.7, cpo_alpha=0.0,
                      loss_type="simpo")  # fmt: skip
    trainer = CPOTrainer(model, settings, train_dataset=datasets.Dataset.from_list(rows),
                         processing_class=AutoTokenizer.from_pretrained(TINY_MODEL))  # fmt: skip
    loss = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    loss.backward()
    theirs = gradient(trainer.model)

    args = simpo.Args(beta=2.0, gamma=0.7, micro_batch_size=8, max_length=64, precision="float32", max_grad_norm=1e9)
    ours, tokenizer = load_model(args)
    eos = ours.generation_config.eos_token_id
    pairs = [encode_answers(row, [row["chosen"], row["rejected"]], tokenizer, eos) for row in rows]
    samples = as_samples(pairs, args.max_length, "cpu")
    metrics = simpo.update(ours, torch.optim.SGD(ours.parameters(), 0.0), samples, args)
    assert ((gradient(ours) - theirs).norm() / theirs.norm()).item() < 1e-5
    (margin,) = trainer._stored_metrics["train"]["rewards/margins"]
    assert metrics["margin"] == pytest.approx(margin, rel=1e-4)


@pytest.mark.parametrize("size", [7, 3])
@live
def test_a_whole_step_of_kto(size, tmp_path):
    """TRL mismatches within its micro-batch: with one of all seven rows that is ours, with a smaller one not."""
    import datasets
    from transformers import AutoTokenizer
    from trl import KTOConfig, KTOTrainer

    rows = (rows := kto.load_unpaired("countdown", 9, 0).train)[::3] + rows[1:2]  # both labels
    rows = [{k: row[k] for k in ("prompt", "completion", "label")} for row in rows]
    ref, model = two_models()
    settings = config(KTOConfig, tmp_path, per_device_train_batch_size=size, beta=0.5, undesirable_weight=0.8,
                      disable_dropout=True)  # fmt: skip
    trainer = KTOTrainer(model, ref, settings, train_dataset=datasets.Dataset.from_list(rows),
                         processing_class=AutoTokenizer.from_pretrained(TINY_MODEL))  # fmt: skip
    trainer.compute_loss(trainer.model, batch := next(iter(trainer.get_train_dataloader()))).backward()
    theirs, (z,) = gradient(trainer.model), trainer._metrics["train" if trainer.model.training else "eval"]["kl"]

    from transformers import AutoModelForCausalLM

    ours = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    ours.load_state_dict(two_models()[1].state_dict())
    args = kto.Args(beta=0.5, undesirable_weight=0.8, micro_batch_size=4, max_length=64, precision="float32",
                    max_grad_norm=1e9)  # fmt: skip
    loaded, tokenizer = load_model(args)
    eos = loaded.generation_config.eos_token_id
    tokens = [encode_answers(row, [row["completion"]], tokenizer, eos) for row in rows]
    others = [(prompt, before[1]) for (prompt, _), before in zip(tokens, tokens[-1:] + tokens[:-1])]
    own, others = (as_samples(some, args.max_length, "cpu") for some in (tokens, others))
    labels = torch.tensor([row["label"] for row in rows])
    ref_logps, kl_logps = (kto.reference_logps(ours, ref, some, args) for some in (own, others))
    batch_of_ours = kto.Batch(own, ref_logps, labels, others, kl_logps)
    metrics = kto.update(ours, torch.optim.SGD(ours.parameters(), 0.0), batch_of_ours, args)
    same = size == 7
    assert len(batch["label"]) == size
    assert (((gradient(ours) - theirs).norm() / theirs.norm()).item() < 1e-5) == same
    assert metrics["z"] > 0.05 and (abs(metrics["z"] - z) < 1e-4 * z) == same
