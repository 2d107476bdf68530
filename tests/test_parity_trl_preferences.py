"""DPO, SimPO, ORPO and KTO compute what TRL's DPOTrainer, CPOTrainer, ORPOTrainer and KTOTrainer compute: the same loss
and gradient on the same log-probabilities, and whole steps on the embedded model from the same rows of text.

The differences that remain, each of them named in the scripts and pinned here:
    - TRL's likelihood terms (DPO's sft, ORPO's, and cpo_alpha beside SimPO) average over all tokens of the batch,
      ORPO's over the prompt's, too; ours over each completion's tokens, then over pairs.
    - TRL's ipo averages log-probabilities over tokens; ours sums, and --average-logps makes it TRL's.
    - TRL's sigmoid knows no label smoothing.
    - TRL has no dpop; we have no bco_pair, aot, aot_unpaired.
    - TRL's ORPO gives NaN where a completion is certain.
    - TRL's KTO takes z over a micro-batch.
"""

import math

import pytest
import torch
from parity import recorded

from algos import dpo, kto, orpo, simpo
from benchmarks.peers import make_trl_dpo_fixtures as of_dpo
from benchmarks.peers import make_trl_preferences_fixtures as peer
from utils.data import as_pair, encode_answers, load_pairs
from utils.dist import as_samples
from utils.lm import TINY_MODEL, load_model

SCRIPTS = {"dpo": dpo, "simpo": simpo, "orpo": orpo, "kto": kto}
CASES = [(case.partition("-")[0], case) for case in peer.CASES] + [("dpo", name) for name in of_dpo.NAMES]
live = pytest.mark.usefixtures("needs_trl")
alone = {script: pytest.mark.parametrize("script", [script]) for script in SCRIPTS}


def by_script(script: str, data: dict, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient as `update` composes them, in micro-batches of four, with a model that is these
    log-probabilities: row i has the prompt [i] and a completion of tokens i."""
    module, size, mask, losses = SCRIPTS[script], len(data["mask"]) // 2, data["mask"], []
    args = module.Args(**dict(beta=peer.BETA.get(script, of_dpo.BETA), micro_batch_size=4, max_length=99,
                              max_grad_norm=1e9, precision="float32") | settings)  # fmt: skip
    model, sizes = torch.nn.Module(), mask.sum(1).tolist()
    model.table, model.device = torch.nn.Parameter(data["logps"].clone()), torch.device("cpu")

    def completion_logps(_, prompt_ids, __, ids, mask):
        own = model.table[ids[:, 0]]
        if script == "kto":
            prompts = prompt_ids[:, -1]
            assert ((prompts == ids[:, 0]) | ((prompts - 1) % (2 * size) == ids[:, 0])).all()
            own = torch.where((prompts == ids[:, 0])[:, None], own, data["kl_logps"][prompts])
        return own[:, : ids.shape[1]] * mask, None

    def answers(*numbers: int) -> list[list[int]]:
        return [[i] * sizes[i] for i in numbers]

    if script == "kto":
        own, others = (as_samples([([i], *answers((i - shift) % (2 * size))) for i in range(2 * size)], 99, "cpu")
                       for shift in (0, 1))  # fmt: skip
        ref, kl_ref = (data[name][:, : own.completion_ids.shape[1]] for name in ("ref", "kl_ref"))
        labels = data["labels"].bool()
        batch = kto.Batch(own, ref * own.completion_mask, labels, others, kl_ref * others.completion_mask)
    else:
        batch = as_samples([([i], *answers(i, size + i)) for i in range(size)], 99, "cpu")
    if script == "dpo":
        ref = data["ref"][batch.completion_ids[:, 0], : batch.completion_ids.shape[1]]
        batch = dpo.Batch(batch, ref * batch.completion_mask)
    loss = dpo.LOSSES[args.loss] if script == "dpo" else getattr(module, f"{script}_loss")
    counted = lambda *inputs: losses.append(loss(*inputs)) or losses[-1]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "completion_logps", completion_logps)
        if script == "dpo":
            patch.setitem(dpo.LOSSES, args.loss, counted)
        else:
            patch.setattr(module, f"{script}_loss", counted)
        module.update(model, torch.optim.SGD(model.parameters(), 0.0), batch, args)
    total = torch.cat(losses).detach().sum() / (2 * size if script == "kto" else size)
    likelihood = (data["logps"][:size].sum(1) / mask[:size].sum(1)).mean()
    return total - getattr(args, "sft_coef", 0.0) * likelihood, model.table.grad


def compare(script: str, case: str, data: dict, their_loss, their_gradient) -> None:
    size, settings, atol = len(data["mask"]) // 2, {}, 1e-7 if script == "dpo" else 1e-6  # parts of TRL's are float32
    if script == "dpo":
        settings = dict(loss=case, label_smoothing=0.0 if case == "sigmoid" else of_dpo.SMOOTHING)
        settings |= dict(average_logps=case == "ipo")
        their_gradient = their_gradient * data["mask"]
    elif script == "simpo":
        settings = dict(gamma=peer.GAMMA, sft_coef=peer.SFT if case == "simpo-sft" else 0.0)
    elif script == "kto":
        settings = dict(zip(("desirable_weight", "undesirable_weight"), peer.WEIGHTS))
    of = peer.equal_lengths(data) if case in ("simpo-sft", "orpo-equal") else data
    loss, gradient = by_script(script, of, **settings)
    if case == "orpo":  # ragged: the likelihood's weights differ, so TRL's are put in the place of ours
        mask, logps = data["mask"][:size], data["logps"][:size]
        lengths = mask.sum(1)
        loss = loss + (logps.sum(1) / lengths).mean() - logps.sum() / mask.sum()
        gradient[:size] += mask * (1 / (size * lengths[:, None]) - 1 / mask.sum())
    assert their_gradient.abs().max() > 1e-3
    torch.testing.assert_close(loss, their_loss.to(loss.dtype), rtol=0, atol=atol)
    torch.testing.assert_close(gradient, their_gradient, rtol=0, atol=atol)


@pytest.mark.parametrize("script, case", CASES)
def test_recorded(script, case):
    """What TRL 1.16 gave; always run."""
    inputs, theirs = recorded(of_dpo if script == "dpo" else peer)
    name = of_dpo.NAMES[case] if script == "dpo" else case
    compare(script, case, inputs, theirs[f"{name}.loss"], theirs[f"{name}.gradient"])


@pytest.mark.parametrize("script, case", CASES)
@live
def test_live(script, case):
    data = (of_dpo if script == "dpo" else peer).inputs()
    compare(script, case, data, *(of_dpo.by_trl([of_dpo.NAMES[case]], data) if script == "dpo" else
                                  peer.by_trl(case, data)))  # fmt: skip


@alone["dpo"]
@live
def test_length_normalised_dpo(script):
    data = of_dpo.inputs()
    loss, gradient = by_script("dpo", data, average_logps=True)
    their_loss, their_gradient = of_dpo.by_trl(["sigmoid_norm"], data)
    torch.testing.assert_close(loss, their_loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, their_gradient * data["mask"], rtol=0, atol=1e-12)


@alone["dpo"]
@live
def test_named_differences(script):
    """Summed IPO, smoothed DPO and the SFT term are not TRL's; the last is where all completions are as long."""
    data, smoothing = of_dpo.inputs(), of_dpo.SMOOTHING
    for name in ("ipo", "sigmoid"):
        ours = by_script("dpo", data, loss=name, label_smoothing=smoothing)[0]
        assert not torch.isclose(ours, of_dpo.by_trl([name], data)[0], rtol=1e-2)
    for equal in (False, True):
        if equal:
            data = dict(data, mask=torch.ones_like(data["mask"]), logps=data["logps"] - 0.1)
        ours = by_script("dpo", data, sft_coef=0.7)
        theirs = of_dpo.by_trl(["sigmoid", "sft"], data, [1.0, 0.7])
        assert torch.isclose(ours[0], theirs[0], rtol=1e-9) == equal
        assert torch.allclose(ours[1], theirs[1] * data["mask"], atol=1e-9) == equal


@alone["dpo"]
@live
def test_what_each_has(script):
    for name in (*of_dpo.NAMES.values(), "bco_pair", "aot", "aot_unpaired"):
        assert of_dpo.by_trl([name], of_dpo.inputs())[0].isfinite(), name
    with pytest.raises(ValueError, match="Unknown loss type"):
        of_dpo.by_trl(["dpop"], of_dpo.inputs())
    assert dpo.LOSSES.keys() - of_dpo.NAMES.keys() == {"dpop"}


@alone["kto"]
def test_the_reference_point_matters_here(script):
    data = peer.inputs()
    assert (data["kl_logps"] - data["kl_ref"]).sum(1).mean() > 0.3 and 0 < data["labels"].sum() < 2 * peer.B


@alone["orpo"]
@live
def test_the_likelihood_term_differs_and_certain_completions(script):
    """Where lengths differ; the cases above that end in -sft and -equal are where they do not."""
    data = peer.inputs()
    assert (by_script("orpo", data)[0] - peer.by_trl("orpo", data)[0]).abs() > 1e-3
    data["logps"][0] = 0.0
    assert by_script("orpo", data)[1].isfinite().all() and not peer.by_trl("orpo", data)[1].isfinite().all()


@alone["dpo"]
@live
def test_prompts_from_what_both_begin_with(script):
    """TRL's extract_prompt and ours agree on conversations, and on texts that first differ in whole words."""
    from trl import extract_prompt

    ask, yes, no = ({"role": r, "content": c} for r, c in (("user", "Is it?"), ("assistant", "Yes"), ("user", "No")))
    for chosen, rejected in (([ask, yes], [ask, no]), ([ask, yes, ask, no], [ask, yes, ask, yes]),
                             ("Q: sky? A: blue", "Q: sky? A: green")):  # fmt: skip
        row = dict(chosen=chosen, rejected=rejected)
        assert as_pair(row) == extract_prompt(row)
    row = dict(chosen="A: catnip", rejected="A: cats")  # here TRL's prompt is "A: cat"
    assert as_pair(row) == dict(prompt="A:", chosen=" catnip", rejected=" cats") != extract_prompt(row)


# whole steps: rows of text to loss and gradient, TRL's tokens, collator and forward pass against ours


def two_models():
    """The embedded model, and another as reference, for else every loss would be at its simplest point."""
    from transformers import AutoModelForCausalLM

    model, ref = (AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32) for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():
        for p in ref.parameters():
            p.add_(0.02 * torch.randn_like(p))
    return model, ref


def trained(name: str, models: tuple, rows: list[dict], size: int, tmp_path, **settings):
    """A trainer of TRL, its first batch, the loss, and the gradient of one step."""
    import datasets
    import trl
    from transformers import AutoTokenizer
    from trl.experimental import cpo

    found = cpo if name == "CPO" else trl
    config = getattr(found, f"{name}Config")(
        output_dir=str(tmp_path), report_to="none", logging_strategy="no", use_cpu=True, bf16=False, max_length=64,
        gradient_checkpointing=False, dataloader_pin_memory=False, save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=size, **settings,
    )  # fmt: skip
    trainer = getattr(found, f"{name}Trainer")(*models, config, train_dataset=datasets.Dataset.from_list(rows),
                                               processing_class=AutoTokenizer.from_pretrained(TINY_MODEL))  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return trainer, batch, loss, gradient(trainer.model)


def gradient(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def metric(trainer, name: str) -> float:
    found = getattr(trainer, "_stored_metrics", None) or trainer._metrics
    ((value,),) = [kind[name] for kind in found.values() if kind.get(name)]
    return value


@pytest.mark.parametrize("script", ["dpo", "simpo"])
@live
def test_a_whole_step_of_pairs(script, tmp_path):
    module, (model, ref) = SCRIPTS[script], two_models()
    task = "sort" if script == "dpo" else "countdown"
    rows = [{k: row[k] for k in ("prompt", "chosen", "rejected")} for row in load_pairs(task, 6, 0).train]
    if script == "dpo":
        settings = dict(beta=of_dpo.BETA)
        trainer, _, loss, theirs = trained("DPO", (model, ref), rows, 6, tmp_path, **settings)
        assert abs(loss.item() - math.log(2)) > 0.01
    else:
        settings = dict(beta=2.0, gamma=0.7)
        trainer, *_, theirs = trained("CPO", (model,), rows, 6, tmp_path, beta=2.0, simpo_gamma=0.7, cpo_alpha=0.0,
                                      loss_type="simpo")  # fmt: skip
    args = module.Args(micro_batch_size=8, max_length=64, precision="float32", max_grad_norm=1e9, **settings)
    ours, tokenizer = load_model(args)
    eos = ours.generation_config.eos_token_id
    pairs = [encode_answers(row, [row["chosen"], row["rejected"]], tokenizer, eos) for row in rows]
    batch = as_samples(pairs, args.max_length, "cpu")
    if script == "dpo":
        batch = dpo.Batch(batch, dpo.reference_logps(ours, ref, batch, args))
    metrics = module.update(ours, torch.optim.SGD(ours.parameters(), 0.0), batch, args)
    assert ((gradient(ours) - theirs).norm() / theirs.norm()).item() < 1e-5
    assert metrics["margin"] == pytest.approx(metric(trainer, "rewards/margins"), rel=1e-4)


@pytest.mark.parametrize("size", [7, 3])
@alone["kto"]
@live
def test_a_whole_step_of_kto(script, size, tmp_path):
    """TRL mismatches within its micro-batch: with one of all seven rows that is ours, with a smaller one not."""
    rows = (rows := kto.load_unpaired("countdown", 9, 0).train)[::3] + rows[1:2]  # both labels
    rows = [{k: row[k] for k in ("prompt", "completion", "label")} for row in rows]
    ref, model = two_models()
    trainer, batch, _, theirs = trained("KTO", (model, ref), rows, size, tmp_path, beta=0.5, undesirable_weight=0.8,
                                        disable_dropout=True)  # fmt: skip
    ours, z = two_models()[1], metric(trainer, "kl")
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
