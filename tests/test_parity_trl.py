"""GRPO computes what TRL's GRPOTrainer computes: advantages, loss and gradient for every setting both have.

Against recorded numbers (peers/make_trl_fixtures.py) always, against the installed TRL where there is one. The
differences that remain, each of them named in algos/grpo.py or here:
    - TRL's default use_bias_correction_kl=True multiplies k3 by the ratio; both papers and we do not. Off here.
    - The old log-probabilities are the sampler's here, recomputed or those of the loss itself in TRL. Given here.
    - Under mask_truncated_completions TRL also hides cut completions from attention. That changes no trained token.
    - TRL's defaults: dapo aggregation and beta 0. Each of its loss types is compared under its own name.
"""

import pytest
import torch
from parity import recorded

from algos import grpo
from benchmarks.peers import make_trl_fixtures as peer
from benchmarks.peers.make_trl_fixtures import CASES, LOSS_TYPES, MAX_LENGTH, G, P, make_inputs, make_trainer
from utils.data import encode_prompt, load_task
from utils.dist import pad_left
from utils.lm import completion_logps, load_model, sample
from utils.rewards import decode

TOLERANCE = 1e-10  # float64


def ours(inputs: dict, case: dict) -> dict[str, torch.Tensor]:
    """Advantages (B,), loss () and gradient (B, T) as `update` composes them from the functions of algos/grpo.py."""
    advantage = grpo.advantages(inputs["rewards"], case["scale"]).view(-1, 1)
    mask = inputs["mask"] & inputs["ended"][:, None] if case["truncated"] else inputs["mask"]
    weights = grpo.token_weights(mask.to(inputs["logps"].dtype), case["aggregation"], MAX_LENGTH)
    logps = inputs["logps"].clone().requires_grad_()
    old = inputs["old_logps"] if case["off_policy"] else logps.detach()
    loss, _ = grpo.policy_loss(logps, old, advantage, case["epsilon"], case["epsilon_high"])
    if case["beta"]:
        loss = loss + case["beta"] * grpo.k3(logps, inputs["ref_logps"])
    loss = (loss * weights).sum()
    (gradient,) = torch.autograd.grad(loss, logps)
    return dict(advantages=advantage[:, 0], loss=loss.detach(), gradient=gradient)


def assert_equal(mine: dict, theirs: dict, case: dict) -> None:
    for name in mine:
        difference = (mine[name] - theirs[name]).abs().max().item()
        assert difference < TOLERANCE, f"{name} differs by {difference:.1e} from TRL's for {case}"


def test_recorded():
    """All settings against TRL's recorded numbers. Its gradients tell the settings apart, so that one that does nothing
    cannot pass."""
    inputs, results = recorded(peer)
    gradients = results["trl/gradient"].flatten(1)
    assert (torch.cdist(gradients, gradients) + torch.eye(len(CASES))).min() > 1e-4  # a million tolerances
    for i, case in enumerate(CASES):
        theirs = {name: results[f"trl/{name}"][i] for name in ("advantages", "loss", "gradient")}
        assert theirs["gradient"].abs().max() > 1e-3
        assert_equal(ours(inputs, case), theirs, case)


def test_live(needs_trl, tmp_path):
    inputs = make_inputs(seed=1)
    trl = peer.TRL(inputs, str(tmp_path))
    for case in CASES:
        assert_equal(ours(inputs, case), trl(case), case)


def tiny_samples(temperature: float):
    """Model, tokenizer and samples of the embedded model for prompts of different lengths."""
    model, tokenizer = load_model(grpo.Args())
    rows = [load_task("sort").train(i, 0) for i in range(P)]
    prompts = pad_left([encode_prompt(row, tokenizer) for row in rows], "cpu")
    generator = torch.Generator().manual_seed(0)
    samples = sample(model, *prompts, G, MAX_LENGTH, model.generation_config.eos_token_id, temperature, generator)
    return model, tokenizer, rows, samples


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logps(needs_trl, tmp_path, temperature):
    """completion_logps and sample give the log-probabilities and entropies of TRL's forward pass, left-padded."""
    model, _, _, samples = tiny_samples(temperature)
    trainer = make_trainer(lambda **_: [], P * G, str(tmp_path), num_generations=G, temperature=temperature)
    prompt_ids, prompt_mask = (t.repeat_interleave(G, 0) for t in samples[:2])
    ids, mask = (torch.cat(pair, 1) for pair in ((prompt_ids, samples[2]), (prompt_mask, samples[3])))
    with torch.no_grad():
        logps, entropy = completion_logps(model, *samples[:4], temperature)
        theirs, their_entropy, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask.long(), samples.completion_ids.shape[1], compute_entropy=True
        )
    for mine in (logps, samples.logps):
        assert ((mine - theirs) * samples.completion_mask).abs().max() < 2e-5  # float32, 4 layers
    assert ((entropy - their_entropy) * samples.completion_mask).abs().max() < 2e-5


@pytest.mark.parametrize("aggregation, max_grad_norm", [("sequence", 1e9), ("token", 0.05), ("constant", 1e9)])
def test_one_step(needs_trl, tmp_path, aggregation, max_grad_norm):
    """`update` moves the weights as one step of GRPOTrainer.train does on the same completions and rewards: with plain
    gradient descent the movement is the gradient, clipped where the norm is below 1e9. Hot samples, so
    that they differ."""
    model, tokenizer, rows, samples = tiny_samples(2.0)
    _, tokens = decode(samples, tokenizer)
    rewards = make_inputs(3)["rewards"].float()

    def rollout(prompts, trainer):
        assert prompts == [row["prompt"] for row in rows for _ in range(G)]
        return dict(prompt_ids=tokenizer(prompts)["input_ids"], completion_ids=tokens, logprobs=None)

    trainer = make_trainer(
        lambda **_: [None if r != r else r for r in rewards.flatten().tolist()], P * G, str(tmp_path), rollout,
        prompts=[{"prompt": row["prompt"]} for row in rows], num_generations=G, max_completion_length=MAX_LENGTH,
        temperature=2.0, max_steps=1, loss_type=LOSS_TYPES[aggregation], max_grad_norm=max_grad_norm,
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1.0)
    trainer.train()
    args = grpo.Args(num_generations=G, max_completion_length=MAX_LENGTH, micro_batch_size=2 * G, beta=0.0,
                     temperature=2.0, aggregation=aggregation, max_grad_norm=max_grad_norm,
                     precision="float32")  # fmt: skip
    grpo.update(model, torch.optim.SGD(model.parameters(), lr=1.0), grpo.Batch(samples, rewards.flatten(), None), args)
    theirs = dict(trainer.model.named_parameters())
    size = max((p - before[name]).abs().max().item() for name, p in model.named_parameters())
    gap = max((p - theirs[name]).abs().max().item() for name, p in model.named_parameters())
    assert size > 1e-3 and gap < 1e-4 * size, f"weights differ by {gap:.1e} after a step of {size:.1e}"
