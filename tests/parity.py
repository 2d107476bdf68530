"""What comparisons with peers share: a fixture, our updates on its minibatches, and parameters side by side."""

import inspect
import json
from types import ModuleType

import torch
from safetensors import safe_open
from torch import Tensor, nn

VERSIONS = {"stable_baselines3": "2.9.", "sb3_contrib": "2.9.", "trl": "1.16.", "tianshou": "2.0."}
EXACT = 1e-9  # float64, a few steps of Adam


def recorded(maker: ModuleType, *args, start: str = "input/") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs and the peer's results of the fixture that `maker`, of benchmarks/peers, wrote. Its cases, version and
    inputs are today's: these have names that begin with `start`, or are maker.make_inputs(*args)."""
    with safe_open(str(maker.PATH), "pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    about |= json.loads(about.get("about", "{}"))
    assert all(about[peer].startswith(version) for peer, version in VERSIONS.items() if peer in about), about
    assert "cases" not in about or json.loads(about["cases"]) == maker.CASES, "the fixture is of other cases"
    inputs = {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
    if not inputs and (make := getattr(maker, "make_inputs", None) or getattr(maker, "inputs", None)):
        end = "".join(f"_{arg}" for arg in args)
        inputs = {name: torch.as_tensor(x) for name, x in make(*args).items()}
        assert all(torch.equal(tensors.pop(name + end), x) for name, x in inputs.items()), "of other inputs"
    return inputs, {name: x for name, x in tensors.items() if not name.startswith(start)}


def below(start: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin so, without that."""
    return {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}


def states(inputs: dict, theirs: dict, start: str) -> dict[str, Tensor]:
    """A peer's parameters at the beginning and after each update."""
    return {name: torch.cat([inputs[f"weights/{name}"][None], x]) for name, x in below(start, theirs).items()}


def updates(module: ModuleType, inputs: dict, agent: nn.Module, optimizers, args=None, losses=None):
    """A function of i: our update on minibatch i. losses(i): arguments that stand for losses of ours."""

    def update(i: int):
        batch = module.Transitions(*(inputs[name][i] for name in module.Transitions._fields))
        given = dict(agent=agent, optimizer=optimizers, optimizers=optimizers, batch=batch, args=args, number=i + 1,
                     generator=torch.Generator()) | (losses(i) if losses else {})  # fmt: skip
        return module.update(**{name: given[name] for name in inspect.signature(module.update).parameters
                                if name in given})  # fmt: skip

    return update


def given_noise(module: ModuleType, inputs: dict):
    """The losses of sac.py and its children, with the peer's noise."""
    return lambda i: dict(
        critic_loss=lambda agent, batch, _, gamma, *__: module.critic_loss(
            agent, batch, inputs["next_noise"][i], gamma
        ),
        actor_loss=lambda agent, obs, *_: module.actor_loss(agent, obs, inputs["noise"][i]),
    )


def follow(agent: nn.Module, theirs: dict[str, Tensor], update, still: tuple[str, ...] = (), atol=EXACT) -> None:
    """The agent goes through updates as the peer's parameters did, of which all that do not begin with `still` move by
    far more than the tolerance."""
    assert {name for name, _ in agent.named_parameters()} <= theirs.keys()
    agent.load_state_dict({name: x[0] for name, x in theirs.items()}, strict=False)
    for i in range(len(next(iter(theirs.values()))) - 1):
        update(i)
        for name, x in theirs.items():
            gap = (agent.state_dict()[name] - x[i + 1]).abs().max().item()
            assert gap < atol, f"{name} differs by {gap:.1e} after update {i + 1}"
    standing = {name for name, x in theirs.items() if (x[-1] - x[0]).abs().max() < max(100 * atol, 1e-5)}
    assert standing == {name for name in theirs if name.startswith(still)}
