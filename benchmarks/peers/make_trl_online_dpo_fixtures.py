"""Records what TRL's OnlineDPOTrainer computes on fixed inputs, for tests/test_parity_trl_online_dpo.py.

    pip install trl==1.16.0 && python benchmarks/peers/make_trl_online_dpo_fixtures.py

writes tests/fixtures/trl_online_dpo.safetensors: the inputs, and for both losses that of
OnlineDPOTrainer.training_step with its gradient with respect to the per-token log-probabilities, and the metrics that
both have. TRL's own code runs, unchanged, from rewards to loss; completions and log-probabilities are given. The test
calls the same function live where TRL is installed. There is no XPO in TRL 1.16.
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

PATH = ROOT / "tests" / "fixtures" / "trl_online_dpo.safetensors"
LOSSES, BETA = ("sigmoid", "ipo"), 0.3
P, T = 6, 5
METRICS = {"rewards/accuracies": "accuracy", "rewards/margins": "margin", "objective/kl": "kl"}  # TRL's name: ours


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two ragged completions for each of P prompts, those of a prompt beside each other: masks and log-probabilities
    (2P, T), float64, and rewards (2P,), float32, none equal."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, T + 1, (2 * P,), generator=g)
    mask = torch.arange(T) < lengths[:, None]
    logps = -2 * torch.rand(2 * P, T, generator=g, dtype=torch.float64) * mask
    ref = (logps + torch.randn(2 * P, T, generator=g, dtype=torch.float64)) * mask
    return dict(mask=mask, logps=logps, ref=ref, rewards=torch.randn(2 * P, generator=g))


def halves(x: torch.Tensor) -> torch.Tensor:
    """From our order to TRL's: the first completions of all prompts, then the second ones."""
    return torch.cat([x[::2], x[1::2]])


def pairs(x: torch.Tensor) -> torch.Tensor:
    """And back."""
    return torch.stack(x.chunk(2), 1).flatten(0, 1)


def bare_trainer(loss_type: str, rewards: torch.Tensor, **more):
    """An OnlineDPOTrainer with no more than training_step needs, whose reward function knows the answers."""
    from trl.experimental.online_dpo import OnlineDPOTrainer

    def backward(loss, **_):
        loss.backward()

    trainer = object.__new__(OnlineDPOTrainer)
    trainer.__dict__ |= dict(
        _beta=BETA, eos_token_ids=[1], max_length=512, model=None, stats=defaultdict(list), state=None,
        reward_funcs=[lambda **_: rewards.tolist()], reward_processing_classes=[None], reward_weights=None,
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, backward=backward),
        args=SimpleNamespace(use_vllm=False, missing_eos_penalty=None, loss_type=loss_type, n_gpu=1,
                             torch_empty_cache_steps=None, optim="adamw_torch", gradient_accumulation_steps=1),
        **more,
    )  # fmt: skip
    return trainer


def by_trl(loss_type: str, data: dict) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Loss, gradient (2P, T) in our order, and metrics, of OnlineDPOTrainer.training_step."""
    logps = data["logps"].clone().requires_grad_()
    policy, reference = torch.nn.Identity(), torch.nn.Identity()
    trainer = bare_trainer(loss_type, halves(data["rewards"]), ref_model=reference)
    ids, mask = torch.ones(2 * P, T, dtype=torch.long), halves(data["mask"]).long()
    trainer._generate = lambda *_: (ids[:, :1], mask[:, :1], ids, mask, None)
    trainer._forward = lambda model, *_: halves(logps if model is policy else data["ref"])
    loss = trainer.training_step(policy, {"prompt": [""] * P})
    return loss, logps.grad, {ours: trainer.stats[name][0] for name, ours in METRICS.items()}


def main() -> None:
    import trl
    from safetensors.torch import save_file

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    data = inputs()
    tensors = dict(data)
    for name in LOSSES:
        tensors[f"{name}.loss"], tensors[f"{name}.gradient"], metrics = by_trl(name, data)
        tensors |= {f"{name}.{key}": torch.tensor(value, dtype=torch.float64) for key, value in metrics.items()}
    about = {"trl": trl.__version__, "torch": torch.__version__, "beta": BETA}
    save_file(tensors, PATH, metadata={"about": json.dumps(about)})
    print(f"{PATH}: {len(LOSSES)} losses")


if __name__ == "__main__":
    main()
