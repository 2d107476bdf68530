"""Records what TRL's GKDTrainer computes on fixed logits, for tests/test_parity_trl_gkd.py.

    pip install trl==1.16.0 && python benchmarks/peers/make_trl_gkd_fixtures.py

writes tests/fixtures/trl_gkd.safetensors: the inputs, and for every case the loss of GKDTrainer.generalized_jsd_loss
with its gradient with respect to the student's logits. TRL's own function runs, unchanged. The test calls it live where
TRL is installed.
"""

import json
import os
import sys
from itertools import product
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

PATH = ROOT / "tests" / "fixtures" / "trl_gkd.safetensors"
CASES = list(product((0.0, 0.1, 0.5, 0.9, 1.0), (1.0, 0.7)))  # TRL's beta, the temperature
B, T, V = 3, 5, 7


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """Logits (B, T, V) of student and teacher for ragged completions, float64."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([T, 1, 3])
    student, teacher = 2 * torch.randn(2, B, T, V, generator=g, dtype=torch.float64)
    return dict(mask=torch.arange(T) < lengths[:, None], ids=torch.randint(0, V, (B, T), generator=g), student=student,
                teacher=teacher)  # fmt: skip


def by_trl(data: dict, beta: float, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient (B, T, V)."""
    from trl.experimental.gkd import GKDTrainer

    student = data["student"].clone().requires_grad_()
    labels = data["ids"].masked_fill(~data["mask"], -100)
    loss = GKDTrainer.generalized_jsd_loss(student, data["teacher"], labels, beta, temperature)
    return loss.detach(), torch.autograd.grad(loss, student)[0]


def main() -> None:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import trl
    from safetensors.torch import save_file

    tensors = dict(data := inputs())
    for case in CASES:
        tensors[f"{case}.loss"], tensors[f"{case}.gradient"] = by_trl(data, *case)
    about = {"trl": trl.__version__, "torch": torch.__version__}
    save_file(tensors, PATH, metadata={"about": json.dumps(about)})
    print(f"{PATH}: {len(CASES)} cases")


if __name__ == "__main__":
    main()
