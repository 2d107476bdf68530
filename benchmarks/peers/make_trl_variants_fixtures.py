"""Records what TRL computes for GRPO's relatives on fixed inputs, for tests/test_parity_trl_variants.py.

    pip install trl==1.16.0 && python benchmarks/peers/make_trl_variants_fixtures.py

writes tests/fixtures/trl_variants.safetensors: the inputs of make_trl_fixtures.py, and for every case of CASES the
advantages of _generate_and_score_completions, and the gradient of _compute_loss with respect to the per-token
log-probabilities: of GRPOTrainer for GSPO, CISPO, DAPO and tools, of RLOOTrainer for RLOO. And what TRL's
get_soft_overlong_punishment gives for each length. Their code runs unchanged, in float64; completions and
log-probabilities are given. The test calls the same functions live where TRL is installed.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.peers.make_trl_fixtures import MAX_LENGTH, TRL, G, P, make_inputs, make_trainer  # noqa: E402

PATH = ROOT / "tests" / "fixtures" / "trl_variants.safetensors"
BUFFER = 5  # of the penalty of overlong completions
SAME = dict(scale="group", off_policy=True, truncated=False)
CASES = [
    *(dict(SAME, algo="gspo", aggregation="grpo", level="sequence", epsilon=low, epsilon_high=high, beta=beta)
      for low, high in ((3e-4, 4e-4), (0.1, 0.15)) for beta in (0.0, 0.04)),
    *(dict(SAME, algo="cispo", aggregation="cispo", epsilon=0.2, epsilon_high=high, beta=beta)
      for high in (5.0, 1.1) for beta in (0.0, 0.04)),
    *(dict(SAME, algo="dapo", aggregation="dapo", epsilon=0.2, epsilon_high=high, beta=0.0, truncated=cut)
      for high in (0.2, 0.5) for cut in (False, True)),
    *(dict(SAME, algo="grpo_multiturn", aggregation="grpo", own=True, epsilon=0.2, epsilon_high=0.2, beta=beta)
      for beta in (0.0, 0.04)),
    *(dict(algo="rloo", epsilon=low, epsilon_high=high, beta=beta)
      for low, high in ((0.2, 0.2), (0.1, 0.6)) for beta in (0.0, 0.05)),
]  # epsilon_high of CISPO: the largest ratio; own: with tokens of tools  # fmt: skip


class RLOO:
    """TRL's own advantages and gradient of RLOO on given inputs."""

    def __init__(self, inputs: dict[str, torch.Tensor], directory: str):
        lengths, ids, self.inputs = inputs["mask"].sum(1).tolist(), inputs["ids"].tolist(), inputs
        completions = [row[:n] for row, n in zip(ids, lengths)]
        rewards = [None if r != r else r for r in inputs["rewards"].flatten().tolist()]
        self.trainer = make_trainer(lambda **_: rewards, P * G, directory, kind="RLOO", num_generations=G,
                                    max_completion_length=MAX_LENGTH, beta=0.05)  # fmt: skip
        self.trainer._generate = lambda prompts: ([[3]] * len(prompts), completions, [""] * len(prompts))
        self.trainer.model.train()

    def __call__(self, case: dict) -> dict[str, torch.Tensor]:
        """`advantages` (B,) and `gradient` (B, T) of one case, in float64."""
        trainer, logps = self.trainer, self.inputs["logps"].clone().requires_grad_()
        trainer.epsilon_low, trainer.epsilon_high, trainer.beta = case["epsilon"], case["epsilon_high"], case["beta"]
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        given = [self.inputs["old_logps"], *[self.inputs["ref_logps"]] * (case["beta"] > 0), logps]
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (x := given.pop(0), torch.zeros_like(x), None)
        try:
            batch = trainer._generate_and_score_completions([{"prompt": "S312:"}] * (P * G))
            loss = trainer._compute_loss(None, batch)
        finally:
            torch.set_default_dtype(before)
        (gradient,) = torch.autograd.grad(loss, logps)
        return dict(advantages=batch["advantages"], gradient=gradient)


def results(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of all cases, one after the other, and the penalty of each length up to MAX_LENGTH + 2."""
    from trl.rewards import get_soft_overlong_punishment

    with tempfile.TemporaryDirectory() as directory:
        peers = {"rloo": RLOO(inputs, directory), "grpo": TRL(inputs, directory)}
        found = [peers.get(case["algo"], peers["grpo"])(case) for case in CASES]
    penalties = get_soft_overlong_punishment(MAX_LENGTH, BUFFER)([[3] * n for n in range(MAX_LENGTH + 3)])
    tensors = {name: torch.stack([one[name] for one in found]) for name in ("advantages", "gradient")}
    return tensors | {"penalties": torch.tensor(penalties, dtype=torch.float64)}


def main() -> None:
    import safetensors.torch
    import transformers
    import trl

    inputs = make_inputs()
    tensors = {f"input/{k}": v for k, v in inputs.items()} | {f"trl/{k}": v for k, v in results(inputs).items()}
    about = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
             "command": "make_trl_variants_fixtures.py", "cases": json.dumps(CASES)}  # fmt: skip
    PATH.write_bytes(safetensors.torch.save(tensors, about))
    print(f"{len(CASES)} cases, {PATH.stat().st_size / 1024:.0f} KB in {PATH}")


if __name__ == "__main__":
    main()
