"""Records what TRL's DPOTrainer computes on fixed inputs, for tests/test_parity_trl_preferences.py.

    pip install trl==1.16.0 && python benchmarks/peers/make_trl_dpo_fixtures.py

writes tests/fixtures/trl_dpo.safetensors: the inputs, and for every loss that both have the loss of
DPOTrainer._compute_loss with its gradient with respect to the per-token log-probabilities. TRL's own code runs,
unchanged; only the log-probabilities are given. The test calls the same function live where TRL is installed.
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

PATH = ROOT / "tests" / "fixtures" / "trl_dpo.safetensors"
NAMES = {  # ours: TRL's
    "sigmoid": "sigmoid", "robust": "robust", "ipo": "ipo", "hinge": "hinge", "apo-zero": "apo_zero",
    "apo-down": "apo_down", "sppo-hard": "sppo_hard", "nca": "nca_pair", "exo": "exo_pair", "discopop": "discopop",
}  # fmt: skip
BETA, SMOOTHING = 0.3, 0.1
B, T = 6, 5


def inputs() -> dict[str, torch.Tensor]:
    """Log-probabilities (2B, T) of ragged completions, chosen ones first as TRL has them, float64."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, T + 1, (2 * B,), generator=g)
    mask = torch.arange(T) < lengths[:, None]
    logps = -2 * torch.rand(2 * B, T, generator=g, dtype=torch.float64) * mask
    ref = (logps + torch.randn(2 * B, T, generator=g, dtype=torch.float64)) * mask
    return dict(mask=mask, logps=logps, ref=ref)


def by_trl(loss_types: list[str], data: dict, weights=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient (2B, T) of DPOTrainer._compute_loss, which gets its log-probabilities from here."""
    from trl import DPOTrainer

    logps = data["logps"].clone().requires_grad_()
    zeros = torch.zeros_like(logps)

    def model(**_):
        return SimpleNamespace(log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    trainer = object.__new__(DPOTrainer)
    trainer.__dict__ |= dict(
        model=SimpleNamespace(training=True), beta=BETA, label_smoothing=SMOOTHING, loss_types=loss_types,
        loss_weights=weights or [1.0] * len(loss_types), ld_alpha=None, precompute_ref_logps=True, use_weighting=False,
        f_divergence_type="reverse_kl", aux_loss_enabled=False, args=SimpleNamespace(discopop_tau=0.05), _tp_size=1,
        _total_train_tokens=0, _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
    )  # fmt: skip
    prompt = torch.zeros(2 * B, 1, dtype=torch.bool)  # one token of prompt: TRL shifts by one
    chosen, rejected = data["ref"].sum(1).chunk(2)
    mask = torch.cat([prompt, data["mask"]], 1).long()
    batch = dict(input_ids=mask, attention_mask=mask, completion_mask=mask, ref_chosen_logps=chosen,
                 ref_rejected_logps=rejected)  # fmt: skip
    loss = trainer._compute_loss(model, batch, False)
    return loss.detach(), torch.autograd.grad(loss, logps)[0]


def main() -> None:
    import trl
    from safetensors.torch import save_file

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    data = inputs()
    tensors = dict(data)
    for name in NAMES.values():
        tensors[f"{name}.loss"], tensors[f"{name}.gradient"] = by_trl([name], data)
    about = {"trl": trl.__version__, "torch": torch.__version__, "beta": BETA, "label_smoothing": SMOOTHING}
    save_file(tensors, PATH, metadata={"about": json.dumps(about)})
    print(f"{PATH}: {len(NAMES)} losses")


if __name__ == "__main__":
    main()
