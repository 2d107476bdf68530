"""What the tests of the control and offline scripts share."""

import contextlib
import importlib
import inspect
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from environments import Probe
from helpers import command_line

from tests.specs import SPECS
from utils.control import make_env

CONTROL = {algo: importlib.import_module(f"algos.{algo}") for algo, spec in SPECS.items()
           if spec.family in ("Control", "Offline")}  # fmt: skip
OFFLINE = [algo for algo, module in CONTROL.items() if hasattr(module.Args, "dataset")]
WALK = ["--env-id", "environments:Walk-v0"]
BANDIT = "--env-id environments:Bandit-v0 --env-kwargs"


def walk(algo: str) -> list[str]:
    """The environment of tests/environments.py for this script."""
    return ["--env-id", SPECS[algo].walk]


@contextlib.contextmanager
def float64():
    """New tensors are doubles: in a with statement, or as the decorator of a test."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def close(actual, expected, atol=1e-10) -> None:
    actual, expected = (x.detach() if isinstance(x, torch.Tensor) else x for x in (actual, expected))
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=0, atol=atol)


def env_of(env_id: str, *env_kwargs: str):
    """The environment as a script makes it."""
    return make_env(SimpleNamespace(env_id=env_id, env_kwargs=env_kwargs, capture_video=False))


def checkpoint(folder) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def stored_rows(folder) -> np.ndarray:
    """The replay buffer of a run's checkpoint."""
    return checkpoint(folder)["replay"]["rows"].numpy()


def without(rows: list[dict], start: str = "eval/") -> list[dict]:
    """Rows of metrics without the columns whose names start so."""
    return [{name: value for name, value in row.items() if not name.startswith(start)} for row in rows]


def score(module, folder, capsys, *args) -> dict:
    """What --evaluate prints, without the number of episodes and the standard deviation."""
    capsys.readouterr()
    command_line(module, "--evaluate", folder, *args)
    (line,) = capsys.readouterr().out.splitlines()
    return {name: value for name, value in json.loads(line).items() if name not in ("episodes", "eval/return_std")}


# a second implementation of a step: parameters by name, own forward pass, own Adam; derivatives are autograd's


def named(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in module.state_dict().items()}


def mlp(p: dict, name: str, x: torch.Tensor) -> torch.Tensor:
    layers = sorted({int(key.split(".")[-2]) for key in p if key.startswith(f"{name}.") and key.endswith("weight")})
    for layer in layers:
        x = x @ p[f"{name}.{layer}.weight"].T + p[f"{name}.{layer}.bias"]
        x = x * (x > 0) if layer < layers[-1] else x
    return x


def twins(p: dict, name: str, obs, actions) -> list[torch.Tensor]:
    return [mlp(p, f"{name}.{q}", torch.hstack([obs, actions])) for q in ("q1", "q2")]


def adam(p: dict, moments: dict, part: str, loss, rate: float, decay: float = 0, max_norm: float = math.inf) -> dict:
    """Moves the parameters whose names start with `part`; weight decay is off the parameter itself. Returns their
    gradients, of which those that are taken have a norm of at most `max_norm`."""
    names = [name for name in p if name.startswith(part)]
    gradients = dict(zip(names, torch.autograd.grad(loss, [p[name] for name in names])))
    norm = math.sqrt(sum((g**2).sum().item() for g in gradients.values()))
    for name, g in gradients.items():
        g = g * min(1.0, max_norm / (norm + 1e-6))
        m, v, t = moments.get(name, (0.0, 0.0, 0))
        m, v, t = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2, t + 1
        moments[name] = m, v, t
        moved = rate * m / (1 - 0.9**t) / (torch.sqrt(v / (1 - 0.999**t)) + 1e-8)
        p[name] = (p[name] * (1 - rate * decay) - moved).detach().requires_grad_()
    return gradients


INDUCTOR = pytest.param("inductor", 1e-5, marks=pytest.mark.slow)
BACKENDS = pytest.mark.parametrize("backend, tolerance", [("eager", 1e-6), INDUCTOR])


def assert_compiled_is_equal(make, loss, inputs, backend: str, tolerance: float) -> None:
    """A loss of agents that `make` makes is one graph: same outputs, gradients and statistics."""
    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        outputs = function(agent := make(), *inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outputs[0].backward()
        gradients = [x.grad for x in agent.parameters() if x.grad is not None]
        results.append(torch.cat([x.detach().flatten() for x in [*outputs, *gradients, *agent.buffers()]]))
    assert (results[0] - results[1]).abs().max() < tolerance * results[0].abs().max()


DRAWN = ("noise", "subset")  # arguments of losses


def assert_update_is(reference: type, module, agent, args, rate=1e-2, learned=True, updates=4, atol=1e-9):
    """Parameters and metrics after some updates of `module` are those of `reference` (tests/reference/sac.py), which
    is given what the losses were. Returns that, call by call, and the reference."""
    parts = [[agent.log_alpha] if name == "alpha" else getattr(agent, name).parameters()
             for name in module.Optimizers._fields]  # fmt: skip
    optimizers = [torch.optim.Adam(part, rate, fused=True) for part in parts]
    optimizers = module.Optimizers(*optimizers) if learned else module.Optimizers(*optimizers[:2], None)
    own = reference({name: tensor.numpy() for name, tensor in agent.state_dict().items()}, args, rate, learned)
    unused, drawn, everything = torch.get_rng_state(), {}, []

    def listening(name: str):
        def listens(*given):
            named = zip(inspect.signature(getattr(module, name)).parameters, given)
            drawn[name] = {k: x.clone().numpy() if isinstance(x, torch.Tensor) else x for k, x in named if k in DRAWN}
            everything.append(drawn[name])
            return getattr(module, name)(*given)

        return listens

    losses = {name: listening(name) for name in ("critic_loss", "actor_loss")}
    own.generator = torch.Generator().manual_seed(0)
    given = dict(agent=agent, optimizers=optimizers, generator=own.generator, args=args, **losses)
    for number in range(1, updates + 1):
        given |= dict(batch=minibatch(module.Transitions, number), number=number)
        drawn.clear()
        found = module.update(**{name: given[name] for name in inspect.signature(module.update).parameters})
        wanted = own.update(type(given["batch"])(*(x.numpy() for x in given["batch"])), number, drawn)
        assert found.keys() == wanted.keys() and agent.state_dict().keys() == own.p.keys()
        for name, value in {**agent.state_dict(), **found}.items():
            close(value, own.p.get(name, wanted.get(name)), atol)
        of_critics = torch.cat([x.grad.flatten() for x in getattr(agent, own.critics).parameters()])
        close(of_critics.norm(), wanted["grad_norm"])  # not the actor's
        for name, x in agent.named_parameters():
            assert x.requires_grad or (name.startswith("target") and x.grad is None), name
    assert torch.equal(torch.get_rng_state(), unused)  # the generator it is given, and no other
    return everything, own


def lag(p: dict, tau: float) -> None:
    """Moves the target critics."""
    for name in p:
        if name.startswith("targets"):
            p[name] = ((1 - tau) * p[name] + tau * p[name.replace("targets", "critics")]).detach()


def randomise(module, seed: int, weight: float, bias: float):
    """Random parameters, other ones in the target critics; numbers without a dimension stay."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (p for p in module.parameters() if p.dim()):
            scale = weight if parameter.dim() > 1 else bias
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return module


def minibatch(kind, seed: int = 0, rows: int = 16, obs: int = 3, actions: int = 2):
    """Random transitions, of which every third one terminates."""
    g = torch.Generator().manual_seed(seed)
    terminated = (torch.arange(rows) % 3 == 0).view(rows, 1).to(torch.get_default_dtype())
    return kind(torch.randn(rows, obs, generator=g), torch.rand(rows, actions, generator=g) * 2 - 1,
                3 * torch.randn(rows, 1, generator=g), terminated, torch.randn(rows, obs, generator=g))  # fmt: skip


# what Probe tells


def assert_probed(obs, actions, rewards, terminated, next_obs, factor: float = 1, summand: float = 0) -> None:
    """Each row is a transition of Probe: its own true end, and the action that arrived stretched to the bounds."""
    assert (np.abs(actions) <= 1).all()
    close(next_obs[:, 2:], [-1, 2] + (actions + 1) / 2 * [4, 0.5], 1e-5)
    close(rewards[:, 0], factor * (100 + next_obs[:, 2]) + summand, 1e-4 * factor)
    close(next_obs[:, 0], obs[:, 0] + 1)  # a reset's would be 0
    close(next_obs[:, 1], obs[:, 1])
    close(terminated[:, 0], next_obs[:, 0] == next_obs[:, 1])


def assert_in_order(obs, actions, rewards, terminated, next_obs) -> set:
    """One episode after the other, terminated and cut off. Returns (terminated, cut off) of their ends."""
    cut_off = next_obs[:, 0] == Probe.LIMIT
    ended = (terminated[:, 0] == 1) | cut_off
    kinds = set(zip(terminated[ended, 0], cut_off[ended]))
    assert {(1, False), (0, True)} <= kinds
    close(obs[1:][~ended[:-1]], next_obs[:-1][~ended[:-1]])
    close(obs[1:][ended[:-1]][:, [0, 2, 3]], 0.0)
    return kinds


PROJECT = """
import gymnasium as gym
from utils.shapes import SIZE  # the project's, not ours

class Mine(gym.Env):
    observation_space = gym.spaces.Box(-9, 9, (SIZE,))

    def __init__(self, choices=0):
        self.action_space = gym.spaces.Discrete(choices) if choices else gym.spaces.Box(-1, 1, (2,))

    def reset(self, seed=None, options=None):
        from utils.late import start  # also when it is imported later
        super().reset(seed=seed)
        return start(self), {}

    def step(self, action):
        return self.np_random.normal(size=SIZE), float(action.sum()), bool(self.np_random.random() < 0.1), False, {}
"""
REGISTER = {
    "class": "import gymnasium\nfrom project.envs import Mine\ngymnasium.register('Mine-v0', Mine)\n",
    "text": "import gymnasium\ngymnasium.register('Mine-v0', 'project.envs:Mine')\n",  # imported when it is made
}


def write_project(folder, register="class", marker=True):
    """A project with a package of environments and, beside it, one called utils."""
    for name, text in {
        "project/__init__.py": REGISTER[register],
        "project/envs.py": PROJECT,
        "utils/shapes.py": "SIZE = 4\n",
        "utils/late.py": "def start(env):\n    return env.np_random.normal(size=env.observation_space.shape)\n",
        **({"utils/__init__.py": ""} if marker else {}),
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
