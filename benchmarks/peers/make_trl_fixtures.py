"""Records what TRL's GRPOTrainer computes on fixed inputs, for tests/test_parity_trl.py.

    pip install trl==1.16.0 && python benchmarks/peers/make_trl_fixtures.py

writes tests/fixtures/trl_grpo.safetensors: the inputs, and for every case of CASES the advantages and the loss mask of
GRPOTrainer._generate_and_score_completions, and the loss of GRPOTrainer._compute_loss with its gradient with respect to
the per-token log-probabilities. TRL's own code runs, unchanged, in a trainer on the embedded model, in float64: only
the completions (its `rollout_func`) and the log-probabilities of the policy are given. The test calls the same
functions live where TRL is installed.
"""

import itertools
import json
import logging
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from utils.lm import TINY_MODEL  # noqa: E402

PATH = ROOT / "tests" / "fixtures" / "trl_grpo.safetensors"
P, G, T, MAX_LENGTH, EOS = 5, 4, 6, 8, 1  # MAX_LENGTH: of the constant aggregation; no completion is as long
LOSS_TYPES = {"sequence": "grpo", "token": "dapo", "constant": "dr_grpo"}  # our aggregation: TRL's loss_type
CASES = [
    dict(aggregation=aggregation, scale=scale, beta=beta, epsilon=low, epsilon_high=high, off_policy=off, truncated=cut)
    for aggregation, scale, beta, (low, high, off), cut in itertools.product(
        LOSS_TYPES, ("group", "batch", "none"), (0.0, 0.04),
        ((0.2, 0.2, False), (0.2, 0.2, True), (0.1, 0.28, True)), (False, True),
    )
]  # off_policy: old log-probabilities given (num_iterations > 1); truncated: mask_truncated_completions  # fmt: skip


def make_inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """Fixed random inputs, float64: P groups of G completions, one group of equal rewards, one without any reward, one
    with a skipped sample. Rewards are multiples of 1/8, which float32 holds exactly: TRL rounds them to it."""
    g = torch.Generator().manual_seed(seed)
    rows = P * G
    rewards = torch.randint(0, 9, (P, G), generator=g).double() / 8
    rewards[1], rewards[2], rewards[3, 0] = 0.5, torch.nan, torch.nan
    lengths = torch.randint(1, T + 1, (rows,), generator=g)
    lengths[0] = T
    ended = torch.rand(rows, generator=g) < 0.6
    mask = torch.arange(T) < lengths[:, None]
    ids = torch.randint(3, 22, (rows, T), generator=g) * mask
    ids[ended, lengths[ended] - 1] = EOS
    logps = -3 * torch.rand(rows, T, generator=g, dtype=torch.float64)
    old, ref = (logps + 0.3 * torch.randn(rows, T, generator=g, dtype=torch.float64) for _ in range(2))
    return dict(rewards=rewards, mask=mask, ended=ended, ids=ids, logps=logps, old_logps=old, ref_logps=ref)


def own_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Those of the mask (B, T) that are the policy's own, if every third token is a tool's."""
    return mask & (torch.arange(mask.shape[1]) % 3 != 1)


def make_trainer(reward, rows: int, directory: str, rollout=None, kind: str = "GRPO", **settings):
    """A trainer of TRL's on the embedded model with one update of `rows` completions per step, on the CPU."""
    import datasets
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    prompts = settings.pop("prompts", [{"prompt": "S312:"}] * rows)
    config = getattr(trl, f"{kind}Config")(
        output_dir=directory, per_device_train_batch_size=rows, report_to="none", logging_strategy="no",
        save_strategy="no", disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=False,
        dataloader_pin_memory=False, shuffle_dataset=False, **settings,
    )  # fmt: skip
    more = {"rollout_func": rollout} if kind == "GRPO" else {}
    table = datasets.Dataset.from_list(prompts)
    return getattr(trl, f"{kind}Trainer")(model, reward, config, table, processing_class=tokenizer, **more)


class TRL:
    """TRL's own advantages, loss and gradient on given inputs."""

    def __init__(self, inputs: dict[str, torch.Tensor], directory: str):
        logging.getLogger("trl").setLevel(logging.ERROR)  # it warns of every sample without a reward
        lengths, ids, self.inputs = inputs["mask"].sum(1).tolist(), inputs["ids"].tolist(), inputs
        completions = [row[:n] for row, n in zip(ids, lengths)]
        rewards = [None if r != r else r for r in inputs["rewards"].flatten().tolist()]
        self.trainer = make_trainer(
            lambda **_: rewards, P * G, directory, num_generations=G, max_completion_length=MAX_LENGTH,
            rollout=lambda prompts, trainer: dict(prompt_ids=[[3]] * len(prompts), completion_ids=completions,
                                                  logprobs=None),
        )  # fmt: skip
        self.batches = {}
        self.trainer.model.train()
        self.trainer.current_gradient_accumulation_steps = 1

    def __call__(self, case: dict) -> dict[str, torch.Tensor]:
        """`advantages` (B,), `mask` (B, T), `loss` () and `gradient` (B, T) of one case, in float64."""
        trainer, logps = self.trainer, self.inputs["logps"].clone().requires_grad_()
        trainer.loss_type, trainer.scale_rewards = (
            LOSS_TYPES.get(case["aggregation"], case["aggregation"]),
            case["scale"],
        )
        trainer.importance_sampling_level = case.get("level", "token")
        trainer.epsilon_low, trainer.epsilon_high = case["epsilon"], case["epsilon_high"]
        trainer.mask_truncated_completions, trainer.args.use_bias_correction_kl = case["truncated"], False
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            trainer.beta = 0.0  # no reference model is run: its log-probabilities are given below
            key = case["scale"], case["truncated"]  # nothing else changes what this function returns
            if key not in self.batches:
                self.batches[key] = trainer._generate_and_score_completions([{"prompt": "S312:"}] * (P * G))
            batch = dict(self.batches[key])
            trainer.beta, batch["ref_per_token_logps"] = case["beta"], self.inputs["ref_logps"]
            if case["off_policy"]:
                batch["old_per_token_logps"] = self.inputs["old_logps"]
            if case.get("own"):
                batch["tool_mask"] = own_tokens(self.inputs["mask"]).long()
            trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, torch.zeros_like(logps), None)
            loss = trainer._compute_loss(None, batch)
        finally:
            torch.set_default_dtype(before)
            del trainer._get_per_token_logps_and_entropies
        (gradient,) = torch.autograd.grad(loss, logps)
        return dict(advantages=batch["advantages"], mask=batch["completion_mask"].bool(), loss=loss.detach(),
                    gradient=gradient)  # fmt: skip


def main() -> None:
    import safetensors.torch
    import transformers
    import trl

    inputs = make_inputs()
    with tempfile.TemporaryDirectory() as directory:
        run = TRL(inputs, directory)
        results = [run(case) for case in CASES]
    tensors = {f"input/{k}": v for k, v in inputs.items()}
    tensors |= {f"trl/{k}": torch.stack([r[k] for r in results]) for k in ("advantages", "loss", "gradient")}
    about = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
             "command": "python benchmarks/peers/make_trl_fixtures.py", "cases": json.dumps(CASES)}  # fmt: skip
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_bytes(safetensors.torch.save(tensors, about))
    print(f"{len(CASES)} cases, {PATH.stat().st_size / 1024:.0f} KB in {PATH}")


if __name__ == "__main__":
    main()
