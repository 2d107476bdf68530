"""Records what Stable-Baselines3's TD3 and DDPG compute on fixed inputs, for tests/test_parity_updates.py.

    pip install stable-baselines3==2.9.0 && python benchmarks/peers/make_sb3_td3_fixtures.py

writes tests/fixtures/sb3_td3.safetensors: the inputs and every parameter after each of four updates of TD3.train and
DDPG.train. SB3's own code runs, in float64: minibatches and standard normal numbers are given, and its cast of
observations to float32 is left out. The test calls the same functions live where SB3 is installed.
"""

import itertools
import json
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "tests" / "fixtures" / "sb3_td3.safetensors"
D, A, H, B, UPDATES = 3, 2, 8, 16, 4  # observations, actions, hidden units, rows of a minibatch
GAMMA, TAU, RATE = 0.97, 0.1, 1e-2
CASES = [  # in our names; DDPG is SB3's class of that name
    dict(algo="DDPG", num_critics=1, policy_frequency=1, policy_noise=0.0, noise_clip=0.0),
    dict(algo="TD3", num_critics=2, policy_frequency=2, policy_noise=0.2, noise_clip=0.5),
    dict(algo="TD3", num_critics=1, policy_frequency=1, policy_noise=0.6, noise_clip=0.3),  # the smoothing alone
    dict(algo="TD3", num_critics=3, policy_frequency=3, policy_noise=0.0, noise_clip=0.5),
]


def make_inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """Fixed random inputs, float64: weights under td3.py's names, UPDATES minibatches and their noise."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    sizes = {f"{name}.net": (D, H, H, A) for name in ("actor", "target_actor")}
    sizes |= {f"{name}.q{i}": (D + A, H, H, 1) for name in ("critics", "target_critics") for i in (1, 2, 3)}
    tensors = {}
    for name, widths in sizes.items():
        for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
            tensors[f"weights/{name}.{2 * layer}.weight"] = normal(fan_out, fan_in) / fan_in**0.5
            tensors[f"weights/{name}.{2 * layer}.bias"] = 0.1 * normal(fan_out)
    n = (UPDATES, B)
    tensors |= dict(obs=normal(*n, D), actions=normal(*n, A).tanh(), rewards=normal(*n, 1), next_obs=normal(*n, D),
                    terminated=(torch.rand(*n, 1, generator=g) < 0.3).double(), noise=normal(*n, A))  # fmt: skip
    return tensors


def make_model(case: dict):
    """SB3's class on an environment that is never stepped."""
    import stable_baselines3
    from stable_baselines3.common.logger import Logger

    class Spaces(gym.Env):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (D,))
        action_space = gym.spaces.Box(np.array([-1, 2], np.float32), np.array([3, 2.5], np.float32))

    ideas = dict(policy_delay=case["policy_frequency"], target_policy_noise=case["policy_noise"],
                 target_noise_clip=case["noise_clip"])  # fmt: skip
    critics = {} if case["algo"] == "DDPG" else dict(n_critics=case["num_critics"])
    model = getattr(stable_baselines3, case["algo"])(
        "MlpPolicy", Spaces(), learning_rate=RATE, gamma=GAMMA, tau=TAU, buffer_size=1, device="cpu",
        policy_kwargs=dict(net_arch=[H, H], **critics), **({} if case["algo"] == "DDPG" else ideas))  # fmt: skip
    model.set_logger(Logger(None, []))
    model.policy.double()
    for module in (model.actor, model.actor_target, model.critic, model.critic_target):  # instead of a cast to float32
        module.extract_features = lambda obs, extractor: obs
    return model


def named(model):
    """Our name of every parameter, and SB3's."""
    nets = {"actor.net": model.actor.mu, "target_actor.net": model.actor_target.mu}
    for name, critic in (("critics", model.critic), ("target_critics", model.critic_target)):
        nets |= {f"{name}.q{i + 1}": net for i, net in enumerate(critic.q_networks)}
    for (name, net), layer, kind in itertools.product(nets.items(), (0, 2, 4), ("weight", "bias")):
        yield f"{name}.{layer}.{kind}", getattr(net[layer], kind)


def run_updates(inputs: dict[str, torch.Tensor], case: dict) -> dict[str, torch.Tensor]:
    """Every parameter after each update, (UPDATES, ...) each."""
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    model, states = make_model(case), []
    for name, parameter in named(model):
        parameter.data.copy_(inputs[f"weights/{name}"])
    for i in range(UPDATES):
        batch = ReplayBufferSamples(*(inputs[k][i] for k in ("obs", "actions", "next_obs", "terminated", "rewards")))
        draws = [inputs["noise"][i]]
        with (
            mock.patch.object(model.replay_buffer, "sample", lambda *_, batch=batch, **__: batch),
            mock.patch.object(torch.Tensor, "normal_", lambda x, mean, std, draws=draws: x.copy_(draws.pop() * std)),
            mock.patch.object(model, "_update_learning_rate", lambda _: None),  # needs the progress of a learn()
        ):
            model.train(1, B)
        assert not draws
        states.append({name: parameter.detach().clone() for name, parameter in named(model)})
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def results(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for i, case in enumerate(CASES):
        found |= {f"update/{i}/{name}": value for name, value in run_updates(inputs, case).items()}
    return found


def main() -> None:
    import safetensors.torch
    import stable_baselines3

    torch.set_default_dtype(torch.float64)
    inputs = make_inputs()
    tensors = {f"input/{name}": value for name, value in inputs.items()} | results(inputs)
    about = {"stable_baselines3": stable_baselines3.__version__, "torch": torch.__version__,
             "command": "python benchmarks/peers/make_sb3_td3_fixtures.py", "cases": json.dumps(CASES)}  # fmt: skip
    PATH.write_bytes(safetensors.torch.save(tensors, about))
    print(f"{len(CASES)} cases, {PATH.stat().st_size / 1024:.0f} KB in {PATH}")


if __name__ == "__main__":
    main()
