"""Records what Stable-Baselines3's DQN computes on fixed inputs, for tests/test_parity_updates.py.

    pip install stable-baselines3==2.9.0 && python benchmarks/peers/make_sb3_dqn_fixtures.py

writes tests/fixtures/sb3_dqn.safetensors: the inputs, and every parameter after each of five updates of DQN.train and
DQN._on_step, which renews the target network. SB3's own code runs, in float64: minibatches are given, and its cast of
observations to float32 is left out. The test calls the same functions live where SB3 is installed.
"""

import json
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "tests" / "fixtures" / "sb3_dqn.safetensors"
D, A, H, B, UPDATES = 3, 4, 8, 16, 5  # observations, actions, hidden units, rows of a minibatch
GAMMA, RATE, EVERY = 0.97, 1e-2, 2  # EVERY: updates between renewals of the target network
CASES = [dict(tau=1.0), dict(tau=0.3)]


def make_inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """Fixed random inputs, float64: weights under our names and UPDATES minibatches."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tensors, widths = {}, (D, H, H, A)
    for name in ("q", "target"):
        for layer, (fan_in, fan_out) in enumerate(zip(widths, widths[1:])):
            tensors[f"weights/{name}.{2 * layer}.weight"] = normal(fan_out, fan_in) / fan_in**0.5
            tensors[f"weights/{name}.{2 * layer}.bias"] = 0.1 * normal(fan_out)
    n = (UPDATES, B)
    actions, terminated = torch.randint(A, (*n, 1), generator=g), torch.rand(*n, 1, generator=g) < 0.3
    return tensors | dict(obs=normal(*n, D), actions=actions.double(), rewards=2 * normal(*n, 1),
                          terminated=terminated.double(), next_obs=normal(*n, D))  # fmt: skip


def make_model(tau: float):
    """SB3's DQN on an environment that is never stepped."""
    from stable_baselines3 import DQN
    from stable_baselines3.common.logger import Logger

    class Spaces(gym.Env):
        observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (D,)), gym.spaces.Discrete(A)

    model = DQN("MlpPolicy", Spaces(), learning_rate=RATE, gamma=GAMMA, tau=tau, target_update_interval=EVERY,
                buffer_size=1, device="cpu", policy_kwargs=dict(net_arch=[H, H]))  # fmt: skip
    model.set_logger(Logger(None, []))
    model.policy.double()
    for module in (model.q_net, model.q_net_target):  # instead of a cast to float32
        module.extract_features = lambda obs, extractor: obs
    return model


def named(model):
    """Our name of every parameter, and SB3's."""
    for name, net in (("q", model.q_net.q_net), ("target", model.q_net_target.q_net)):
        for layer, kind in ((layer, kind) for layer in (0, 2, 4) for kind in ("weight", "bias")):
            yield f"{name}.{layer}.{kind}", getattr(net[layer], kind)


def run_updates(inputs: dict[str, torch.Tensor], case: dict) -> dict[str, torch.Tensor]:
    """Every parameter after each update, (UPDATES, ...) each."""
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    model, states = make_model(**case), []
    for name, part in named(model):
        part.data.copy_(inputs[f"weights/{name}"])
    for i in range(UPDATES):
        columns = {k: inputs[k][i] for k in ("obs", "actions", "next_obs", "terminated", "rewards")}
        batch = ReplayBufferSamples(*(columns | {"actions": columns["actions"].long()}).values())
        with (
            mock.patch.object(model.replay_buffer, "sample", lambda *_, batch=batch, **__: batch),
            mock.patch.object(model, "_update_learning_rate", lambda _: None),  # needs the progress of a learn()
        ):
            model.train(1, B)
        model._on_step()
        states.append({name: part.detach().clone() for name, part in named(model)})
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def results(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {}
    for i, case in enumerate(CASES):
        tensors |= {f"update/{i}/{name}": value for name, value in run_updates(inputs, case).items()}
    return tensors


def main() -> None:
    import safetensors.torch
    import stable_baselines3

    inputs = make_inputs()
    tensors = {f"input/{name}": value for name, value in inputs.items()} | results(inputs)
    about = {"stable_baselines3": stable_baselines3.__version__, "torch": torch.__version__,
             "command": "python benchmarks/peers/make_sb3_dqn_fixtures.py", "cases": json.dumps(CASES)}  # fmt: skip
    PATH.write_bytes(safetensors.torch.save(tensors, about))
    print(f"{len(CASES)} cases, {PATH.stat().st_size / 1024:.0f} KB in {PATH}")


if __name__ == "__main__":
    main()
