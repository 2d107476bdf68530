"""dpt.py against numbers computed another way: the posterior by quadrature and by drawn bandits, the gradient of a
table, the numbers of an evaluation, and what train() hands on. The network: tests/test_parity_transformers.py."""

import numpy as np
import pytest
import torch
from control import close, float64
from scipy import integrate, stats
from tiny_runs import train
from torch.nn import functional as F

from algos import dpt

A, H = 3, 5
ARGS = dict(num_arms=A, horizon=H, embed_dim=8, num_heads=2, noise=0.4)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bandits(count: int, pulls: int, args: dpt.Args) -> tuple[torch.Tensor, dpt.Context]:
    means = dpt.draw_tasks(count, args, generator := seeded())
    return means, dpt.behave(means, pulls, args, generator)


# --- bandits, contexts and their posterior


def test_bandits_and_contexts():
    """Means from U[0, 1], rewards with Gaussian noise, a posterior that is right on average. The chance of the same arm
    twice is E sum p^2 with p = (1 - w) Dirichlet + w one arm, w = 0, .1, ..., 1: E w^2 = .35, E w(1 - w) = .15."""
    args = dpt.Args(**ARGS)
    means, context = bandits(40_000, 2, args)
    (first, second), noise = context.actions.T, (context.rewards - means.gather(1, context.actions)) / 0.4
    assert stats.kstest(means.flatten(), "uniform").pvalue > 1e-3 < stats.kstest(noise.flatten(), "norm").pvalue
    close(first.bincount() / len(first), np.full(A, 1 / A), 0.01)
    close((first == second).float().mean(), 0.35 * 2 / (A + 1) + 2 * 0.15 / A + 0.35, 0.01)
    context, best = dpt.Context(*(x[:16_000] for x in context)), F.one_hot(means[:16_000].argmax(1), A)
    rows = ((context.actions == 1) & (context.rewards > 0.8)).any(1)  # where arm 1 was pulled and paid well
    close((best - dpt.posterior(context, args))[rows].mean(0), np.zeros(A), 0.03)


def test_the_posterior_by_quadrature():
    """Arms are independent; an arm's mean is a normal of its rewards, truncated to [0, 1]. The order says nothing."""
    args = dpt.Args(**ARGS)
    context = dpt.Context(torch.tensor([[0, 0, 1, 0]]), torch.tensor([[0.9, 0.2, 0.7, 1.6]]))
    a, b, c = truncated(0.9, 0.4 / 3**0.5), truncated(0.7, 0.4), stats.uniform()
    wanted = [integrate.quad(lambda x: one.pdf(x) * two.cdf(x) * three.cdf(x), 0, 1)[0]  # noqa: B023
              for one, two, three in ((a, b, c), (b, a, c), (c, a, b))]  # fmt: skip
    close(dpt.posterior(context, args)[0], wanted, 1e-4)
    close(dpt.posterior(dpt.Context(*(x.flip(1) for x in context)), args)[0], wanted, 1e-4)
    close(dpt.posterior(dpt.Context(*(x[:, :0] for x in context)), args)[0], np.full(A, 1 / A), 1e-6)


def truncated(mean: float, scale: float):
    return stats.truncnorm((0 - mean) / scale, (1 - mean) / scale, mean, scale)


def test_deploy_shows_the_policy_what_it_did():
    """Each context is the last one, the arm that the probabilities name and its reward. Regret is of means."""
    args, means, given = dpt.Args(**ARGS), torch.tensor([[0.1, 0.9, 0.4], [0.5, 0.2, 0.3]]), []
    arms = torch.tensor([[0, 2, 1, 1, 2], [2, 0, 0, 1, 1]])
    policy = lambda context: given.append(context) or F.one_hot(arms[:, len(given) - 1], A).double()  # noqa: E731
    context, told, regret = dpt.deploy(policy, means, args, seeded())
    assert torch.equal(context.actions, arms) and torch.equal(told.argmax(2), arms) and told.shape == (2, H, A)
    assert all(torch.equal(x, y[:, :j]) for j, seen in enumerate(given) for x, y in zip(seen, context))
    close(regret, [0.8 + 0.5 + 0 + 0 + 0.5, 0.2 + 0 + 0 + 0.3 + 0.3], 1e-6)


# --- learning


class Table(torch.nn.Module):
    """Logits that depend on the length of the context alone."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(H, A, generator=seeded()))

    def forward(self, context):
        self.modes = {*getattr(self, "modes", ()), self.training}
        return self.table[: context.actions.shape[1] + 1].expand(len(context.actions), -1, -1)


@float64()
def test_the_gradient_of_update():
    """Softmax less the share of each best arm, a mean over lengths. The longer gradient is cut."""
    best, args = torch.tensor([0, 2, 2, 1]), dpt.Args(**ARGS)
    context, table = bandits(4, H - 1, args)[1], Table().table.detach().numpy()
    chances = np.exp(table) / np.exp(table).sum(1, keepdims=True)
    slope = (chances - [0.25, 0.25, 0.5]) / H
    for args.max_grad_norm in 1e9, 0.1:
        model = Table()
        metrics = dpt.update(model, torch.optim.SGD(model.parameters(), 1.0), context, best, args)
        norm = np.linalg.norm(slope)
        close(table - model.table.detach().numpy(), slope * min(1, args.max_grad_norm / norm), 1e-6)
        close([metrics["loss"], metrics["grad_norm"]], [-np.log(chances[:, best]).mean(), norm])


# --- evaluation and train()


@pytest.mark.parametrize("act", ["sample", "argmax"])
def test_evaluation_by_hand(act, monkeypatch):
    """Of the means that were drawn; each time the same, and in evaluation mode."""
    played, deploy = [], dpt.deploy
    monkeypatch.setattr(dpt, "deploy", lambda *inputs: played.append((inputs[1], *deploy(*inputs))) or played[-1][1:])
    args, model = dpt.Args(**ARGS, eval_tasks=300, act=act), Table()
    found = dpt.evaluate(model, args, torch.device("cpu"))
    assert dpt.evaluate(model, args, torch.device("cpu")) == found and model.modes == {False} and model.training
    (means, context, told, regret), (same, theirs, exact, thompson) = played[:2]
    assert means is same and not torch.equal(means, dpt.draw_tasks(300, args, seeded(args.seed)))
    logps = model.table.detach().log_softmax(1)
    chances = F.one_hot(logps.argmax(1), A) if act == "argmax" else logps.exp()
    close(told, chances.expand(told.shape), 1e-6)
    best, taken = means.amax(1), means.gather(1, context.actions).mean(1)
    wanted = dict(reward=taken.mean(), regret=H * (best - taken).mean(), regret_std=(H * (best - taken)).std(),
                  over_thompson=regret.mean() / thompson.mean(), kl=(exact * (exact.log() - logps)).sum(2).mean(),
                  score=100 * (taken - means.mean()).mean() / (best - means.mean()).mean())  # fmt: skip
    assert found == pytest.approx({f"eval/{name}": x.item() for name, x in wanted.items()}, rel=1e-4)
    close(exact[:, 3], dpt.posterior(dpt.Context(*(x[:, :3] for x in theirs)), args), 1e-6)


@pytest.mark.parametrize("shuffled", [False, True])
def test_train_hands_on_new_bandits(shuffled, tmp_path, monkeypatch):
    """In each update H - 1 pulls of other bandits and their best arms; of the next bandit's pulls where shuffled."""
    drawn, calls, behave, update = [], [], dpt.behave, dpt.update
    monkeypatch.setattr(dpt, "behave", lambda *inputs: drawn.append((inputs[0], behave(*inputs))) or drawn[-1][1])
    monkeypatch.setattr(dpt, "update", lambda *inputs: calls.append((*inputs, inputs[0].training)) or update(*inputs))
    settings = dict(max_steps=4, batch_size=8, eval_tasks=4, shuffle_contexts=shuffled, eval_every=2, dropout=0.5)
    train("dpt", ARGS | settings, tmp_path)
    for (means, context), (*_, given, best, _, training) in zip(drawn, calls, strict=True):
        assert torch.equal(best, means.argmax(1)) and given.actions.shape == (8, H - 1) and training
        assert all(torch.equal(x, y.roll(int(shuffled), 0)) for x, y in zip(given, context))
    assert len({means.sum().item() for means, _ in drawn}) == 4
    model, optimizer, *_ = calls[0]
    (group,) = optimizer.param_groups
    found = type(optimizer), group["lr"], group["weight_decay"], len(group["params"])
    assert found == (torch.optim.AdamW, 1e-3, 1e-4, len([*model.parameters()]))
