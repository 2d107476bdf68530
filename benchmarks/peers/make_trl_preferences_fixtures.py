"""Records what TRL's CPOTrainer (SimPO), ORPOTrainer and KTOTrainer compute on fixed inputs, for
tests/test_parity_trl_preferences.py.

    pip install trl==1.16.0 && python benchmarks/peers/make_trl_preferences_fixtures.py

writes tests/fixtures/trl_preferences.safetensors: the inputs, and for every case the trainer's loss with its gradient
with respect to the per-token log-probabilities. TRL's own code runs, unchanged; only the model's outputs are given. The
test calls the same functions live where TRL is installed.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PATH = ROOT / "tests" / "fixtures" / "trl_preferences.safetensors"
CASES = ("simpo", "simpo-sft", "orpo", "orpo-equal", "kto")
BETA = {"simpo": 2.0, "orpo": 0.4, "kto": 0.3}
GAMMA, SFT, WEIGHTS = 0.9, 0.7, (1.2, 0.8)
B, T = 6, 5


def inputs() -> dict[str, torch.Tensor]:
    """Log-probabilities (2B, T) of ragged completions in float64: for pairs, chosen ones first as TRL has them; for KTO
    rows with labels, and beside them those of the completion of the row before."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, T + 1, (2 * B,), generator=g)
    mask = torch.arange(T) < lengths[:, None]
    logps, ref, kl_logps, kl_ref = (-2 * torch.rand(4, 2 * B, T, generator=g, dtype=torch.float64) - 0.01).unbind()
    return dict(mask=mask, logps=logps * mask, ref=ref * mask, kl_logps=(kl_logps + 0.3) * mask.roll(1, 0),
                kl_ref=(kl_ref - 0.3) * mask.roll(1, 0), labels=torch.rand(2 * B, generator=g) < 0.6)  # fmt: skip


def equal_lengths(data: dict) -> dict:
    """The same with all completions as long as the longest, where means over tokens and means of means are the same."""
    g = torch.Generator().manual_seed(1)
    logps = -2 * torch.rand(2 * B, T, generator=g, dtype=torch.float64) - 0.01
    return data | dict(mask=torch.ones(2 * B, T, dtype=torch.bool), logps=logps)


def by_trl(case: str, data: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient (2B, T) of the trainer that `case` begins with."""
    if case == "kto":
        return kto_by_trl(data)
    if case in ("simpo-sft", "orpo-equal"):
        data = equal_lengths(data)
    if case.startswith("simpo"):
        from trl.experimental.cpo import CPOTrainer as Trainer

        settings = dict(beta=BETA["simpo"], loss_type="simpo", simpo_gamma=GAMMA, alpha=0.0, label_smoothing=0.0,
                        cpo_alpha=SFT if case == "simpo-sft" else 0, pad_token_id=0)  # fmt: skip
    else:
        from trl.experimental.orpo import ORPOTrainer as Trainer

        settings = dict(beta=BETA["orpo"], padding_value=0)
    logps = data["logps"].clone().requires_grad_()
    # two tokens, of which the first is in every place: its log-probability is what is given
    logits = torch.stack([logps, torch.log1p(-logps.exp().clamp(max=1 - 1e-9))], -1)
    logits = torch.cat([logits, torch.zeros(2 * B, 1, 2, dtype=torch.float64)], 1)
    trainer = object.__new__(Trainer)
    accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x)
    trainer.__dict__ |= dict(is_encoder_decoder=False, aux_loss_enabled=False, accelerator=accelerator, **settings)
    mask = torch.cat([torch.ones(2 * B, 1, dtype=torch.bool), data["mask"]], 1)  # one token of prompt
    labels = torch.where(mask, 0, -100)
    labels[:, 0] = -100
    batch = {}
    for n, side in enumerate(("chosen", "rejected")):
        rows = slice(n * B, (n + 1) * B)
        batch |= {f"{side}_input_ids": torch.zeros_like(labels[rows]), f"{side}_attention_mask": mask[rows].long(),
                  f"{side}_labels": labels[rows]}  # fmt: skip
    loss, _ = trainer.get_batch_loss_metrics(lambda *_, **__: SimpleNamespace(logits=logits), batch)
    return loss.detach(), torch.autograd.grad(loss, logps)[0] * data["mask"]


def kto_by_trl(data: dict) -> tuple[torch.Tensor, torch.Tensor]:
    from trl import KTOTrainer

    logps = data["logps"].clone().requires_grad_()
    zeros = torch.zeros_like(logps)
    prompt = torch.zeros(2 * B, 1, dtype=torch.bool)
    mask, kl_mask = (torch.cat([prompt, m], 1).long() for m in (data["mask"], data["mask"].roll(1, 0)))

    def model(input_ids, **_):
        log_probs = logps if input_ids is mask else data["kl_logps"]
        return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros)

    trainer = object.__new__(KTOTrainer)
    trainer.__dict__ |= dict(
        model=SimpleNamespace(training=True), beta=BETA["kto"], desirable_weight=WEIGHTS[0], loss_type="kto",
        undesirable_weight=WEIGHTS[1], calculate_KL=True, precompute_ref_logps=True, aux_loss_enabled=False,
        _tp_size=1, _total_train_tokens=0, _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
    )  # fmt: skip
    batch = dict(input_ids=mask, attention_mask=mask, completion_mask=mask, KL_input_ids=kl_mask, label=data["labels"],
                 KL_attention_mask=kl_mask, KL_completion_mask=kl_mask, ref_logps=data["ref"].sum(1),
                 ref_KL_logps=data["kl_ref"].sum(1))  # fmt: skip
    loss = trainer._compute_loss(model, batch, False)
    return loss.detach(), torch.autograd.grad(loss, logps)[0] * data["mask"]


def main() -> None:
    import trl
    from safetensors.torch import save_file

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    data = inputs()
    tensors = {name: value.contiguous() for name, value in data.items()}
    for case in CASES:
        tensors[f"{case}.loss"], tensors[f"{case}.gradient"] = by_trl(case, data)
    about = dict(trl=trl.__version__, torch=torch.__version__, beta=BETA, gamma=GAMMA, sft=SFT, weights=WEIGHTS)
    save_file(tensors, PATH, metadata={"about": json.dumps(about)})
    print(f"{PATH}: {', '.join(CASES)}")


if __name__ == "__main__":
    main()
