"""PPO's update, written again for the whole family: advantages as sums over each episode, all epochs and minibatches,
and by hand in NumPy the slopes of the loss in log-probabilities, entropies and values. Autograd only carries them to
the parameters, through a forward pass of the script's test.

A script that differs gives a hook (`update`). For a loss -A log pi the slope is `lambda ratio, a, args: a`.
"""

from types import SimpleNamespace

import numpy as np
import torch

LACKING = dict(num_minibatches=1, update_epochs=1, clip_coef=0.0, clip_vloss=False, ent_coef=0.0, target_kl=None,
               normalize_advantages=False)  # fmt: skip


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda) -> np.ndarray:
    result = np.zeros(rewards.shape)
    for t, n in np.ndindex(rewards.shape):
        for k in range(t, len(rewards)):
            bootstrap = 0.0 if terminated[k, n] else gamma * next_values[k, n]
            result[t, n] += (gamma * gae_lambda) ** (k - t) * (rewards[k, n] + bootstrap - values[k, n])
            if terminated[k, n] or truncated[k, n]:
                break
    return result


def advantages(values, next_values, batch, args) -> tuple[np.ndarray, np.ndarray]:
    """(T, N), and the targets of `values`."""
    rewards, *ends = (x.numpy() for x in (batch.rewards, batch.terminated, batch.truncated))
    found = gae(rewards, values, next_values, *ends, args.gamma, args.gae_lambda)
    return found, found + values


def clipped(ratio, a, args) -> np.ndarray:
    """The slope of min[ratio A, clip(ratio) A] in log pi."""
    cut = np.where(a > 0, ratio > 1 + args.clip_coef, ratio < 1 - args.clip_coef)
    return np.where(cut, 0.0, ratio * a)


def policy_of(out, parts: list[int], actions, log_std=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and entropy of choices with logits `out`, or of a Gaussian with means `out`."""
    if log_std is not None:
        policies, actions = [torch.distributions.Normal(out, log_std.exp())], [actions]
    else:
        policies = [torch.distributions.Categorical(logits=part) for part in out.split(parts, -1)]
        actions = actions.unbind(-1)
    found = [torch.stack([p.log_prob(a), p.entropy()]) for p, a in zip(policies, actions)]
    return sum(x.sum(-1) if log_std is not None else x for x in found).unbind(0)


def each(steps: int, envs: int) -> np.ndarray:
    return np.arange(steps * envs)


def update(p, batch, args, rate, policy, ahead, slope=clipped, weights=lambda a: a, advantages=advantages, units=each,
           extra=lambda generator: None) -> tuple[dict, dict]:  # fmt: skip
    """Parameters `p` after plain gradient descent, and the metrics.

    policy(p, rows)   log-probabilities, entropies and values of the rollout's rows, row t N + n of step t: tensors
    ahead(p)          (T, N): values of what each step led to; or whatever else `advantages` takes
    slope, weights    of the surrogate in log pi; what a minibatch's advantages become behind their normalisation
    units             what is shuffled: one row each, or as (N, T) the rows of an environment
    extra             called at the start of an epoch; its answer, called with (p, rows), gives a loss and metrics
    """
    args, shape = SimpleNamespace(**LACKING | vars(args)), batch.rewards.shape
    generator = torch.Generator().manual_seed(0)
    units = units(*shape)
    with torch.no_grad():
        back = np.argsort(units.flatten())
        old_logps, _, values = (x.flatten(0, units.ndim - 1).numpy()[back] for x in policy(p, units))
        found = advantages(values.reshape(*shape, *values.shape[1:]), np.asarray(ahead(p)), batch, args)
    all_advantages, returns = (x.reshape(-1, *x.shape[2:]) for x in found)
    norms, epochs = [], 0
    while epochs < args.update_epochs:
        epochs += 1
        order, term, numbers = torch.randperm(len(units), generator=generator).numpy(), extra(generator), []
        for part in np.array_split(order, args.num_minibatches):
            rows = units[part]
            outputs = logps, entropy, now = policy(p, rows)
            a, (ratio, _, error) = all_advantages[rows], (x.detach().numpy().copy() for x in outputs)
            ratio, error, moved = np.exp(ratio - old_logps[rows]), error - returns[rows], error - values[rows]
            if args.normalize_advantages:
                a = (a - a.mean()) / (a.std(ddof=1) + 1e-8)
            if args.clip_vloss:
                near = values[rows] + np.clip(moved, -args.clip_coef, args.clip_coef) - returns[rows]
                error = np.where((abs(moved) > args.clip_coef) & (near**2 > error**2), 0.0, error)
            push = slope(ratio, weights(a), args) / ratio.size
            loss = (args.vf_coef / a.size * torch.tensor(error) * now).sum() - (torch.tensor(push) * logps).sum()
            loss = loss - args.ent_coef * entropy.mean()
            more, told = term(p, rows) if term else (0.0, {})
            gradients = torch.autograd.grad(loss + more, list(p.values()), materialize_grads=True)
            norms.append(np.sqrt(sum((g**2).sum().item() for g in gradients)))
            step = rate * min(1.0, args.max_grad_norm / (norms[-1] + 1e-6))
            p = {name: (w - step * g).detach().requires_grad_() for (name, w), g in zip(p.items(), gradients)}
            told["approx_kl"] = (ratio - 1 - np.log(ratio)).mean()
            told["clip_fraction"] = (abs(ratio - 1) > args.clip_coef).mean()
            numbers.append(told | {"entropy": entropy.mean().item()})
        metrics = {name: np.mean([told[name] for told in numbers]) for name in numbers[0]}
        if args.target_kl is not None and metrics["approx_kl"] > args.target_kl:
            break
    left = 1 - (returns - values).var(0) / returns.var(0)
    metrics |= dict(zip(("explained_variance", "explained_variance_int"), np.atleast_1d(left)))
    return p, metrics | {"grad_norm": np.mean(norms), "epochs": epochs}


def check(script, agent, batch, args, rate, *hooks, **more) -> dict[str, float]:
    """Weights and all metrics after `update` of a script are those of this file's. What has no gradient stays. Returns
    the metrics; the agent stays as it was."""
    before = {name: w.clone() for name, w in agent.state_dict().items()}
    p = {name: w.detach().clone().requires_grad_() for name, w in agent.named_parameters() if w.requires_grad}
    optimizer, generator = torch.optim.SGD(agent.parameters(), rate), torch.Generator().manual_seed(0)
    found = script.update(agent, optimizer, batch, generator, args)
    expected, metrics = update(p, batch, args, rate, *hooks, **more)
    for name, w in agent.named_parameters():
        wanted = expected.get(name, before[name])
        moved = (wanted - before[name]).abs().max()
        assert torch.equal(w, before[name]) if moved == 0 else moved > 1e-7, name
        np.testing.assert_allclose(w.detach(), wanted.detach(), rtol=0, atol=1e-10, err_msg=name)
    for name, number in found.items():
        np.testing.assert_allclose(number, metrics[name], rtol=0, atol=1e-7, err_msg=name)  # some means are float32
    agent.load_state_dict(before)
    return found
