"""Online DPO computes what TRL's OnlineDPOTrainer computes: ranks, both losses, gradients and metrics on the same
log-probabilities, and a whole step on the embedded model from the same completions.

The differences that remain, each of them named in algos/online_dpo.py and pinned here:
    - Of equal rewards TRL prefers the first completion; here the pair teaches nothing.
    - A reward that no function knows is 0 in TRL; here the pair is left out.
    - At a temperature other than 1 TRL's log-probabilities are still those at 1.
There is no XPO in TRL 1.16: tests/test_exact_online_dpo.py has its gradient.
"""

import math

import pytest
import torch
from parity import recorded

from algos import online_dpo
from benchmarks.peers import make_trl_online_dpo_fixtures as peer
from benchmarks.peers.make_trl_online_dpo_fixtures import BETA, LOSSES, METRICS, P, T, by_trl, halves, inputs
from utils.data import encode_prompt, load_task
from utils.dist import Samples, pad_left
from utils.lm import load_model, sample

live = pytest.mark.usefixtures("needs_trl")


def by_script(name: str, data: dict) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Loss, gradient and metrics of `update`, whose model is these log-probabilities; two pairs at a time."""
    table, losses = torch.nn.Parameter(data["logps"].clone()), []
    zeros, mask = torch.zeros(2 * P, T, dtype=torch.float64), data["mask"]
    numbers = torch.arange(2 * P)[:, None].expand(2 * P, T)  # the ids tell the rows of a micro-batch

    def completion_logps(_, __, ___, ids, mask, ____):
        return table[ids[:, 0], : ids.shape[1]].masked_fill(~mask, 0.0), zeros[ids[:, 0], : ids.shape[1]]

    def counted(difference, args):
        losses.append(preference_loss(difference, args))
        return losses[-1]

    preference_loss = online_dpo.preference_loss
    model = torch.nn.Module()
    model.table, model.device = table, torch.device("cpu")
    prompts = torch.zeros(P, 1, dtype=torch.long)
    samples = Samples(prompts, prompts == 0, numbers, mask, data["logps"], mask[:, 0])
    args = online_dpo.Args(loss=name, beta=BETA, micro_batch_size=4, max_grad_norm=1e9, precision="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online_dpo, "completion_logps", completion_logps)
        patch.setattr(online_dpo, "preference_loss", counted)
        batch = online_dpo.Batch(samples, data["rewards"], data["ref"])
        metrics = online_dpo.update(model, torch.optim.SGD([table], 0.0), batch, args)
    return torch.cat(losses).detach().mean(), table.grad, metrics


def compare(name: str, data: dict, loss, gradient, metrics) -> None:
    ours = by_script(name, data)
    assert gradient.abs().max() > 1e-3
    torch.testing.assert_close(ours[0], loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours[1], gradient, rtol=0, atol=1e-12)
    for key in METRICS.values():
        assert ours[2][key] == pytest.approx(float(metrics[key]), rel=1e-6), key


@pytest.mark.parametrize("name", LOSSES)
def test_recorded(name):
    """What TRL 1.16 gave; always run."""
    data, theirs = recorded(peer)
    metrics = {key: theirs[f"{name}.{key}"] for key in METRICS.values()}
    assert 0 < metrics["accuracy"] < 1
    compare(name, data, theirs[f"{name}.loss"], theirs[f"{name}.gradient"], metrics)


@pytest.mark.parametrize("name", LOSSES)
@live
def test_live(name):
    compare(name, inputs(1), *by_trl(name, inputs(1)))


@live
def test_named_differences():
    """Equal and unknown rewards, alone in a batch of pairs that agree."""
    for rewards in ((1.0, 1.0), (math.nan, -1.0)):
        data = inputs()
        data["rewards"][:2] = torch.tensor(rewards)
        ours, (_, theirs, _) = by_script("sigmoid", data)[1], by_trl("sigmoid", data)
        torch.testing.assert_close(ours[2:], theirs[2:], rtol=0, atol=1e-12)
        assert not ours[:2].any()
        assert theirs[0, 0] < 0 < theirs[1, 0], "TRL makes the first more likely, the second less"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@live
def test_a_whole_step(temperature):
    """Prompts of different lengths and sampled completions to loss and gradient of all weights: TRL's forward pass,
    mask, ranks and sums against ours. The reference is another model than the policy, for else every loss would be at
    its simplest point."""
    task = load_task("countdown")
    args = online_dpo.Args(beta=BETA, micro_batch_size=4, precision="float32", temperature=temperature,
                           max_grad_norm=1e9)  # fmt: skip
    model, tokenizer = load_model(args)
    some = sorted((encode_prompt(task.train(i, 0), tokenizer) for i in range(8 * P)), key=len)
    prompts = pad_left(some[::8], "cpu")
    eos, generator = model.generation_config.eos_token_id, torch.Generator().manual_seed(0)
    samples = sample(model, *prompts, 2, 20, eos, temperature, generator)
    assert not prompts[1].all() and not samples.completion_mask.all()
    (ours, _), (theirs, _), (ref, _) = (load_model(args) for _ in range(3))
    torch.manual_seed(0)
    with torch.no_grad():
        for p in ref.parameters():
            p.add_(0.02 * torch.randn_like(p))
    rewards = inputs()["rewards"]
    batch = online_dpo.Batch(samples, rewards, online_dpo.reference_logps(ours, ref.eval(), samples, args))
    metrics = online_dpo.update(ours, torch.optim.SGD(ours.parameters(), 0.0), batch, args)

    trainer = peer.bare_trainer("sigmoid", halves(rewards), ref_model=ref)
    ids, mask = (halves(x) for x in samples[2:4])
    trainer._generate = lambda *_: (*(torch.cat([x, x]) for x in prompts), ids, mask.long(), None)
    trainer.training_step(theirs, {"prompt": [""] * P})
    gradients = [torch.cat([p.grad.flatten() for p in model.parameters()]) for model in (ours, theirs)]
    gap = ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item()
    if temperature == 1.0:
        assert gap < 1e-4 and metrics["margin"] == pytest.approx(trainer.stats["rewards/margins"][0], rel=1e-3)
        assert metrics["accuracy"] == pytest.approx(trainer.stats["rewards/accuracies"][0], rel=1e-6)  # TRL: float32
    else:
        assert gap > 0.1
