"""IQL's update, written again for its family: the steps of value, policy and critics, each with its slope by hand in
NumPy, and target critics that lag behind. Autograd only carries the slopes to the parameters.

A script that differs gives a hook of `update`, or puts the steps in its own order.
"""

import numpy as np
import torch


def mlp(p: dict, name: str, *inputs) -> torch.Tensor:
    x, layers = torch.cat(inputs, -1), [key.removesuffix(".weight") for key in p if key.startswith(f"{name}.")]
    for layer in layers[::2]:
        x = x @ p[f"{layer}.weight"].T + p[f"{layer}.bias"]
        x = x.clamp(min=0) if layer != layers[-2] else x
    return x


def critics(p: dict, kind: str, *inputs) -> list[torch.Tensor]:
    return [
        mlp(p, name, *inputs) for name in sorted({".".join(key.split(".")[:2]) for key in p if key.startswith(kind)})
    ]


def policy(p: dict, obs) -> torch.distributions.Normal:
    return torch.distributions.Normal(mlp(p, "actor.net", obs).tanh(), p["actor.log_std"].clamp(-5, 2).exp())


def step(p: dict, part: str, outputs, slopes: np.ndarray, rate: float) -> dict:
    """Moves the parameters of a part against the slopes of a loss in its outputs (rows, 1)."""
    names = [name for name in p if name.startswith(part)]
    gradients = torch.autograd.grad((outputs * torch.tensor(slopes)).sum(), [p[name] for name in names])
    return p | {name: (p[name] - rate * g).detach().requires_grad_() for name, g in zip(names, gradients)}


def expectile(errors, args) -> np.ndarray:
    """The slope of |tau - 1(u < 0)| u^2."""
    return 2 * abs(args.expectile - (errors < 0)) * errors


def clipped_exp(advantages, args) -> np.ndarray:
    return np.minimum(np.exp(args.temperature * advantages), 100)


def value_step(p: dict, batch, q, args, rate: float, slope=expectile) -> dict:
    v = mlp(p, "value", batch.obs)
    return step(p, "value", v, -slope(q - v.detach().numpy(), args) / len(q), rate)


def policy_step(p: dict, batch, q, v, args, rate: float, weights=clipped_exp) -> tuple[dict, dict]:
    w, logps = weights(q - v, args), policy(p, batch.obs).log_prob(batch.actions).sum(1, keepdim=True)
    told = {"q": q.mean(), "v": v.mean(), "lift": (v - q).mean(), "weight": w.mean(), "largest": w.max(),
            "clipped": (w == 100).mean(), "nll": -logps.mean().item()}  # fmt: skip
    p = step(p, "actor", logps, -w / len(w), rate)
    return p, told | {"std": p["actor.log_std"].exp().mean().item()}


def td_step(p: dict, batch, next_v, args, rate: float, slope=lambda errors, args: 2 * errors) -> tuple[dict, dict]:
    rewards = batch.rewards.numpy()
    y = np.where(batch.terminated.numpy() == 1, rewards, rewards + args.gamma * next_v)
    online = torch.stack(critics(p, "critics", batch.obs, batch.actions))
    errors, spread = online.detach().numpy() - y, y - y.mean()
    told = {"td_error": abs(errors[0]).mean(), "kurtosis": (spread**4).mean() / (spread**2).mean() ** 2}
    return step(p, "critics", online, slope(errors, args) / len(y), rate), told


def lag(p: dict, args) -> dict:
    targets = {name: name.replace("targets", "critics") for name in p if name.startswith("targets")}
    return p | {old: ((1 - args.tau) * p[old] + args.tau * p[new]).detach() for old, new in targets.items()}


def update(p: dict, batch, args, rate: float, q_of=lambda q, args: q.min(0), value=expectile,
           td=lambda errors, args: 2 * errors) -> tuple[dict, dict]:  # fmt: skip
    """The value moves first, by the target critics; the policy's weights are those of the target critics less the new
    value; the critics' target has the new value; the targets come last. Returns parameters and metrics."""
    with torch.no_grad():
        q = q_of(torch.stack(critics(p, "targets", batch.obs, batch.actions)).numpy(), args)
    p = value_step(p, batch, q, args, rate, value)
    v, next_v = (mlp(p, "value", obs).detach().numpy() for obs in (batch.obs, batch.next_obs))
    p, told = policy_step(p, batch, q, v, args, rate)
    p, more = td_step(p, batch, next_v, args, rate, td)
    return lag(p, args), told | more


def check(agent, own, theirs, batches, rate: float = 0.02) -> list[dict]:
    """Parameters and metrics after each update are those of `own`, which takes (p, batch, rate); theirs takes
    (agent, optimizers by part, batch). Target critics have no gradient. Returns all metrics."""
    frozen = {id(x) for x in agent.targets.parameters()}
    p = {name: x.detach().clone().requires_grad_(id(x) not in frozen) for name, x in agent.named_parameters()}
    optimizers = {
        name: torch.optim.SGD(part.parameters(), rate) for name, part in agent.named_children() if name != "targets"
    }
    found = []
    for batch in batches:
        for kind in ("critics", "targets"):  # the smaller one is not always the same
            q = torch.stack(critics(p, kind, batch.obs, batch.actions)).argmin(0)
            assert len(q.unique()) > 1
        before, numbers = p, theirs(agent, optimizers, batch)
        p, expected = own(p, batch, rate)
        for name, x in agent.named_parameters():
            np.testing.assert_allclose(x.detach(), p[name].detach(), rtol=0, atol=1e-10, err_msg=name)
            assert (p[name] - before[name]).abs().max() > 1e-6, name
        for name, number in numbers.items():
            np.testing.assert_allclose(number, expected[name], rtol=0, atol=1e-7, err_msg=name)
        assert not any(x.requires_grad or x.grad is not None for x in agent.targets.parameters())
        found.append(numbers)
    return found
