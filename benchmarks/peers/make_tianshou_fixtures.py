"""Records what Tianshou's C51, RainbowDQN and Reinforce compute on fixed inputs, for tests/test_parity_tianshou.py.

    pip install tianshou==2.0.1 safetensors && python benchmarks/peers/make_tianshou_fixtures.py

writes tests/fixtures/tianshou.safetensors: the inputs, and for each case of CASES the returns of n steps of a whole
buffer and five of Tianshou's own updates, from drawing rows to renewing priorities. Of Reinforce the gradients of one
update with the whole buffer. Its code runs in float64: its cast of observations to float32 is left out. Uniform numbers
and noise are given: one number for each of B equal parts of the priorities' sum, where Tianshou draws all of them from
the whole.
"""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import torch

PATH = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "tianshou.safetensors"
D, A, H, N, B, T, UPDATES = 3, 3, 6, 5, 16, 40, 5  # sizes; N atoms, B rows of a minibatch, T steps in the buffer
GAMMA, RATE, EVERY = 0.75, 1e-2, 2  # EVERY: updates between renewals of the target network
ALPHA, BETA, V_MIN, V_MAX = 0.6, 0.7, -2.0, 2.0
CASES = [dict(script="c51", n_step=1), dict(script="rainbow", n_step=1), dict(script="rainbow", n_step=3)]
LENGTHS = 4, 1, 7, 2, 5, 3, 1, 6, 2, 4, 5  # of episodes: T in all
COLUMNS = "obs", "actions", "rewards", "terminated", "truncated", "next_obs"
NAMES = {  # our layers -> Tianshou's
    "c51": {"net.0": "model.model.0", "net.2": "model.model.2", "net.4": "model.model.4"},
    "rainbow": {"net.0": "model.model.0", "net.2": "Q.model.0", "net.4": "Q.model.2", "value.2": "V.model.0",
                "value.4": "V.model.2"},
}  # fmt: skip
KINDS = {"weight": "mu_W", "bias": "mu_bias", "sigma": "sigma_W", "sigma_bias": "sigma_bias"}  # of noisy layers
WIDTHS = {"net.0": (D, H), "net.2": (H, H), "net.4": (H, A * N), "value.2": (H, H), "value.4": (H, N)}


def make_stream(seed: int, lengths: tuple[int, ...], high: int) -> dict[str, np.ndarray]:
    """T steps of episodes of these lengths, which terminate, are cut off, or both, in turn. Observations are numbers
    below `high`. Those, and discounted sums of rewards, are exact in float32. Some rewards are too large for the atoms.
    """
    rng, ends = np.random.default_rng(seed), np.cumsum(lengths) - 1
    terminated, truncated = np.zeros((2, T), bool)
    terminated[ends[0::3]] = truncated[ends[1::3]] = terminated[ends[2::3]] = truncated[ends[2::3]] = True
    obs, next_obs = rng.integers(high, size=(2, T, D)).astype(float)
    done = terminated | truncated
    next_obs[:-1][~done[:-1]] = obs[1:][~done[:-1]]
    return dict(obs=obs, actions=rng.integers(A, size=T), rewards=rng.integers(-12, 13, T) / 8, terminated=terminated,
                truncated=truncated, next_obs=next_obs)  # fmt: skip


def make_inputs(seed: int = 0, lengths=LENGTHS, high: int = 5) -> dict[str, torch.Tensor]:
    """A stream, weights of a network with every layer under our names, uniform numbers, rows, and normal noise for two
    networks in each update: of each noisy layer in their order, its inputs, then its outputs."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tensors = {f"stream/{name}": torch.from_numpy(value) for name, value in make_stream(seed, lengths, high).items()}
    for name, (fan_in, fan_out) in WIDTHS.items():
        tensors[f"weights/{name}.weight"] = 2 * normal(fan_out, fan_in) / fan_in**0.5
        tensors[f"weights/{name}.bias"] = 0.3 * normal(fan_out)
        if name != "net.0":
            tensors[f"weights/{name}.sigma"] = 0.5 * normal(fan_out, fan_in) / fan_in**0.5
            tensors[f"weights/{name}.sigma_bias"] = 0.2 * normal(fan_out)
    count = sum(sum(widths) for name, widths in WIDTHS.items() if name != "net.0")
    return tensors | {"uniform": torch.rand(UPDATES, B, generator=g, dtype=torch.float64),
                      "rows": torch.randint(T, (UPDATES, B), generator=g),
                      "noise": normal(UPDATES, 2, count)}  # fmt: skip


@contextlib.contextmanager
def given(noise: torch.Tensor):
    """torch.randn hands out `noise`, in order."""
    left = list(noise.flatten())

    def take(size, **_):
        return torch.stack([left.pop(0) for _ in range(int(np.prod(size)))]).reshape(size)

    with mock.patch.object(torch, "randn", take):
        yield
    assert not left


def make_algorithm(script: str, n_step: int):
    from tianshou.algorithm.modelfree.c51 import C51, C51Policy
    from tianshou.algorithm.modelfree.rainbow import RainbowDQN
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import NoisyLinear

    plain, stream = script == "c51", dict(hidden_sizes=[H], linear_layer=NoisyLinear)
    net = Net(state_shape=D, action_shape=A, hidden_sizes=[H, H] if plain else [H], num_atoms=N, softmax=True,
              dueling_param=None if plain else (stream, stream))  # fmt: skip
    policy = C51Policy(model=net.double(), action_space=gym.spaces.Discrete(A), num_atoms=N, v_min=V_MIN, v_max=V_MAX)
    return (C51 if plain else RainbowDQN)(policy=policy, optim=AdamOptimizerFactory(lr=RATE), gamma=GAMMA,
                                          n_step_return_horizon=n_step, target_update_freq=EVERY)  # fmt: skip


def named(net, script: str):
    """Our name of every parameter, and Tianshou's."""
    for ours, theirs in NAMES[script].items():
        layer = net.get_submodule(theirs)
        for kind in KINDS if hasattr(layer, "mu_W") else ("weight", "bias"):
            yield f"{ours}.{kind}", getattr(layer, KINDS[kind] if hasattr(layer, "mu_W") else kind)


def steps_of(inputs: dict[str, torch.Tensor]) -> list:
    """The stream as Tianshou's batches of one step."""
    from tianshou.data import Batch

    obs, actions, rewards, terminated, truncated, next_obs = (inputs[f"stream/{name}"].numpy() for name in COLUMNS)
    return [Batch(obs=obs[t], act=actions[t], rew=rewards[t], terminated=terminated[t], truncated=truncated[t],
                  done=terminated[t] or truncated[t], obs_next=next_obs[t], info={}) for t in range(T)]  # fmt: skip


def run_updates(inputs: dict[str, torch.Tensor], case: dict) -> dict[str, torch.Tensor]:
    """The returns of all rows (T, N); after each update the parameters; of rainbow also the rows that it drew, their
    weights, what it renews their priorities with, all priorities, and at the end that of a new row."""
    from tianshou.algorithm.algorithm_base import policy_within_training_step
    from tianshou.data import PrioritizedReplayBuffer, ReplayBuffer
    from tianshou.utils.net.common import MLP

    algorithm, prioritized = make_algorithm(**case), case["script"] == "rainbow"
    with torch.no_grad():
        for net in (algorithm.policy.model, algorithm._lagged_networks._lagged_network_pairs[0].target):
            for name, part in named(net, case["script"]):
                part.copy_(inputs[f"weights/{name}"])
    buffer = PrioritizedReplayBuffer(T + 1, ALPHA, BETA) if prioritized else ReplayBuffer(T + 1)
    steps = steps_of(inputs)
    for step in steps:
        buffer.add(step)
    every, states, drawn, sample = np.arange(T), [], {}, buffer.sample
    returns = algorithm.compute_nstep_return(buffer[every], buffer, every, algorithm._target_q, GAMMA, case["n_step"])

    def watched(size: int):
        batch, rows = sample(size)
        drawn.update(batch=batch, rows=rows, weights=batch.get("weight"))
        return batch, rows

    buffer._random_state = SimpleNamespace(choice=lambda *_: inputs["rows"][len(states)].numpy())
    with (
        mock.patch("numpy.random.rand", lambda n: (np.arange(n) + inputs["uniform"][len(states)].numpy()) / n),
        mock.patch.object(buffer, "sample", watched),
        mock.patch.object(MLP, "forward", lambda self, obs: self.model(torch.as_tensor(obs))),  # no cast
        policy_within_training_step(algorithm.policy),
    ):
        for noise in inputs["noise"]:
            with given(noise if prioritized else torch.empty(0)):
                algorithm.update(buffer, B)
            state = {name: part.detach().clone() for name, part in named(algorithm.policy.model, case["script"])}
            if prioritized:
                state |= {"rows": torch.tensor(drawn["rows"]), "weights": torch.tensor(drawn["weights"]),
                          "new": drawn["batch"].weight, "priorities": torch.tensor(buffer.weight[every])}  # fmt: skip
            states.append(state)
    buffer.add(steps[0])
    tensors = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    if prioritized:
        tensors["priority of a new row"] = torch.tensor(buffer.weight[np.array([T])])
    return tensors | {"returns": returns.returns}


def policy_weights(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Weight and bias of a hidden layer (D -> H) and of a layer of logits (H -> A)."""
    names = [f"weights/{layer}.{kind}" for layer in ("net.0", "value.4") for kind in ("weight", "bias")]
    return [inputs[name] if "net.0" in name else inputs[name][:A] for name in names]


def reinforce_gradients(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of the mean over all T steps of -G log pi, in the order of `policy_weights`."""
    from tianshou.algorithm.algorithm_base import policy_within_training_step
    from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, Reinforce
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import ReplayBuffer
    from tianshou.utils.net.common import MLP, Net

    net = Net(state_shape=D, action_shape=A, hidden_sizes=[H], activation=torch.nn.Tanh)
    policy = DiscreteActorPolicy(actor=net, action_space=gym.spaces.Discrete(A),
                                 dist_fn=lambda logits: torch.distributions.Categorical(logits=logits))  # fmt: skip
    with torch.no_grad():
        for part, value in zip(net.parameters(), policy_weights(inputs), strict=True):
            part.copy_(value)
    algorithm, buffer = Reinforce(policy=policy, optim=AdamOptimizerFactory(lr=RATE), gamma=GAMMA), ReplayBuffer(T)
    for step in steps_of(inputs):
        buffer.add(step)
    with (
        mock.patch.object(MLP, "forward", lambda self, obs: self.model(torch.as_tensor(obs))),  # no cast
        policy_within_training_step(policy),
    ):
        algorithm.update(buffer, None, 1)
    return [part.grad for part in net.parameters()]


def results(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.set_default_dtype(torch.float64)
    tensors = {f"reinforce/{i}": gradient for i, gradient in enumerate(reinforce_gradients(inputs))}
    for i, case in enumerate(CASES):
        tensors |= {f"case{i}/{name}": value for name, value in run_updates(inputs, case).items()}
    return tensors


def main() -> None:
    import safetensors.torch
    import tianshou

    inputs = make_inputs()
    tensors = {f"input/{name}": value for name, value in inputs.items()} | results(inputs)
    about = {"tianshou": tianshou.__version__, "torch": torch.__version__, "cases": json.dumps(CASES),
             "command": "python benchmarks/peers/make_tianshou_fixtures.py"}  # fmt: skip
    PATH.write_bytes(safetensors.torch.save(tensors, about))
    print(f"{len(CASES)} cases, {PATH.stat().st_size / 1024:.0f} KB in {PATH}")


if __name__ == "__main__":
    main()
