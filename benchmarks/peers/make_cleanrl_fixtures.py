"""Records what CleanRL's c51.py and rainbow_atari.py compute on fixed inputs, for tests/test_parity_cleanrl.py.

    python benchmarks/peers/make_cleanrl_fixtures.py CLEANRL      a checkout

writes tests/fixtures/cleanrl.safetensors: the inputs, and for each script the parameters after each of five updates; of
rainbow_atari.py also what its buffer stores of a stream, draws and renews. Their classes and the statement that learns
run unchanged, cut out of their files, in float64. The layers of their networks are smaller here, and linear in place of
convolutions, and noise is given: the factors' products, where rainbow_atari.py draws each number. Adam has torch's
epsilon. Recorded with CleanRL fe8d8a0.
"""

import ast
import collections
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.peers import make_tianshou_fixtures as given  # noqa: E402
from benchmarks.peers.make_tianshou_fixtures import ALPHA, BETA, GAMMA, RATE, V_MAX, V_MIN, A, B, D, H, N, T  # noqa: E402

PATH = given.PATH.with_name("cleanrl.safetensors")
N_STEP = 3
LENGTHS = 4, 3, 7, 5, 3, 6, 3, 4, 5  # of episodes: none is shorter than N_STEP
ARGS = SimpleNamespace(learning_starts=0, train_frequency=1, batch_size=B, gamma=GAMMA, v_min=V_MIN, v_max=V_MAX,
                       n_atoms=N, n_step=N_STEP, tau=1.0, target_network_frequency=given.EVERY)  # fmt: skip
ENVS = SimpleNamespace(single_action_space=SimpleNamespace(n=A), single_observation_space=SimpleNamespace(shape=(D,)))

PLAIN = {"weight": "weight", "bias": "bias"}  # our parameters -> CleanRL's
NOISY = {"weight": "weight_mu", "bias": "bias_mu", "sigma": "weight_sigma", "sigma_bias": "bias_sigma"}


def make_inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """Observations are bytes, some probabilities so small that CleanRL clips them, and the target network another one
    at the start."""
    inputs = given.make_inputs(seed, LENGTHS, high=256)
    inputs["weights/net.0.weight"] *= 6
    weights = [name for name in inputs if name.startswith("weights/")]
    return inputs | {name.replace("weights", "target"): inputs[name].flip(0) for name in weights}


def cut_out(path: Path):
    """What a script defines beside its arguments, and the statement of its loop that learns."""
    scope = dict(torch=torch, nn=nn, F=F, np=np, math=math, time=time, collections=collections, args=ARGS,
                 deque=collections.deque, writer=mock.Mock(), start_time=time.time())  # fmt: skip
    *body, main = ast.parse(path.read_text()).body
    imports = ast.Import, ast.ImportFrom
    kept = [node for node in body if not isinstance(node, imports) and getattr(node, "name", "") != "Args"]
    exec(compile(ast.Module(kept, []), path, "exec"), scope)
    loop = next(node for node in main.body if isinstance(node, ast.For))
    (learn,) = [node for node in loop.body if isinstance(node, ast.If) and "learning_starts" in ast.unparse(node.test)]
    return scope, compile(ast.Module([learn], []), path, "exec")


def load(layers: dict[str, nn.Module], kinds: dict, inputs: dict, which: str) -> dict[str, nn.Parameter]:
    """Gives layers our weights. Returns their parameters by our names."""
    found = {f"{name}.{ours}": getattr(layer, theirs) for name, layer in layers.items()
             for ours, theirs in kinds.items() if hasattr(layer, theirs)}  # fmt: skip
    for name, parameter in found.items():
        parameter.data.copy_(inputs[f"{which}/{name}"])
    return found


def updates(scope: dict, learn, target: nn.Module, net: nn.Module, named: dict, watch=dict) -> dict[str, torch.Tensor]:
    """The parameters, and what `watch` sees, after each update."""
    scope |= dict(q_network=net, target_network=target, optimizer=torch.optim.Adam(net.parameters(), RATE))
    states = []
    for scope["global_step"] in range(1, given.UPDATES + 1):
        exec(learn, scope)
        states.append({name: part.detach().clone() for name, part in named.items()} | watch())
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def c51(folder: Path, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    scope, learn = cut_out(folder / "cleanrl/c51.py")
    nets = [scope["QNetwork"](ENVS, N, V_MIN, V_MAX) for _ in range(2)]
    for net, which in zip(nets, ("target", "weights")):
        net.network = nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, H), nn.ReLU(), nn.Linear(H, A * N))
        named = load({f"net.{i}": net.network[i] for i in (0, 2, 4)}, PLAIN, inputs, which)

    def sample(_):
        obs, actions, rewards, terminated, _, next_obs = (
            inputs[f"stream/{name}"][inputs["rows"][scope["global_step"] - 1]] for name in given.COLUMNS
        )
        return SimpleNamespace(observations=obs / 255, actions=actions[:, None], rewards=rewards[:, None],
                               dones=terminated[:, None].double(), next_observations=next_obs / 255)  # fmt: skip

    scope["rb"] = SimpleNamespace(sample=sample)
    return updates(scope, learn, *nets, named)


def rainbow(folder: Path, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    scope, learn = cut_out(folder / "cleanrl/rainbow_atari.py")
    noisy, network = scope["NoisyLinear"], scope["NoisyDuelingDistributionalNetwork"]
    nets = [network(ENVS, N, V_MIN, V_MAX) for _ in range(2)]
    for net, which in zip(nets, ("target", "weights")):
        net.network = nn.Sequential(nn.Linear(D, H), nn.ReLU())
        net.advantage_head = nn.Sequential(noisy(H, H), nn.ReLU(), noisy(H, A * N))
        net.value_head = nn.Sequential(noisy(H, H), nn.ReLU(), noisy(H, N))
        layers = {"net.2": net.advantage_head[0], "net.4": net.advantage_head[2], "value.2": net.value_head[0],
                  "value.4": net.value_head[2]}  # fmt: skip

        def reset_noise(layers=layers, which=which):
            left = iter(inputs["noise"][scope["global_step"] - 1, int(which == "target")])
            for layer in layers.values():
                sizes = layer.in_features, layer.out_features
                normal = [torch.stack([next(left) for _ in range(size)]) for size in sizes]
                f_in, f_out = (x.sign() * x.abs().sqrt() for x in normal)
                layer.weight_epsilon, layer.bias_epsilon = torch.outer(f_out, f_in), f_out

        net.reset_noise = reset_noise
        net.double()
        named = load({"net.0": net.network[0]}, PLAIN, inputs, which) | load(layers, NOISY, inputs, which)
    buffer = scope["rb"] = scope["PrioritizedReplayBuffer"](64, (D,), "cpu", N_STEP, GAMMA, ALPHA, BETA)
    steps = [[inputs[f"stream/{name}"][t].numpy() for name in ("obs", "actions", "rewards", "next_obs", "terminated")]
             for t in range(T)]  # fmt: skip
    for step in steps:
        buffer.add(*step)
    rows = {f"stored/{name}": torch.tensor(getattr(buffer, f"buffer_{name}")[: buffer.size])
            for name in ("obs", "actions", "rewards", "dones", "next_obs")}  # fmt: skip
    priorities, numbers = buffer.sum_tree.tree[buffer.capacity - 1 :], iter(inputs["uniform"].flatten().tolist())

    def watch() -> dict[str, torch.Tensor]:
        drawn, new = scope["data"], torch.tensor(scope["new_priorities"])
        return {"rows": torch.tensor(drawn.indices), "weights": drawn.weights[:, 0], "new": new,
                "priorities": torch.tensor(priorities[: buffer.size])}  # fmt: skip

    with mock.patch("numpy.random.uniform", lambda low, high: low + next(numbers) * (high - low)):
        found = updates(scope, learn, *nets, named, watch)
    for step in steps[:N_STEP]:
        buffer.add(*step)
    return found | rows | {"priority of a new row": torch.tensor([priorities[buffer.size - 1]])}


def main() -> None:
    import safetensors.torch

    torch.set_default_dtype(torch.float64)
    folder, inputs = Path(sys.argv[1]), make_inputs()
    tensors = {f"input/{name}": value for name, value in inputs.items()}
    for script in (c51, rainbow):
        tensors |= {f"{script.__name__}/{name}": value for name, value in script(folder, inputs).items()}
    PATH.write_bytes(safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}))
    print(f"{PATH.stat().st_size / 1024:.0f} KB in {PATH}")


if __name__ == "__main__":
    main()
