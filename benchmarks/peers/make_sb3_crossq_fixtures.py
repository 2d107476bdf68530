"""Records what sb3-contrib's CrossQ computes on fixed inputs, for tests/test_parity_sb3_crossq.py.

    pip install stable-baselines3==2.9.0 sb3-contrib==2.9.0 && python benchmarks/peers/make_sb3_crossq_fixtures.py

writes tests/fixtures/sb3_crossq.safetensors: the inputs, and all parameters and running statistics after each of three
updates of CrossQ.train, of which the second moves the actor. As in make_sb3_sac_fixtures.py, its own code runs in
float64 with given minibatches and noise. In all cases but the last one, two things of its BatchRenorm are changed:
its variance of a batch, which divides by n - 1, and its epsilon, which it adds in another place after the warm-up.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.peers.make_sb3_sac_fixtures import ALPHA, GAMMA, RATE, UPDATES, A, B, D, H  # noqa: E402
from benchmarks.peers.make_sb3_sac_fixtures import PATH as SAC_PATH  # noqa: E402

PATH = SAC_PATH.with_name("sb3_crossq.safetensors")
CASES = [  # theirs is warm after one pass more than `warmup`
    dict(warmup=100_000, epsilon=1e-3, correction=0),
    dict(warmup=0, epsilon=1e-12, correction=0),
    dict(warmup=0, epsilon=1e-3, correction=1),
]
NETS = ("actor.net", "critics.q1", "critics.q2")
KINDS = {"weight": "scale", "bias": "bias", "mean": "ra_mean", "variance": "ra_var", "passes": "steps"}


def make_inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """Fixed random inputs, float64: parameters under our names, UPDATES minibatches and their noise."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tensors = {}
    for name in NETS:
        sizes = (D, H, H, 2 * A) if name == "actor.net" else (D + A, H, H, 1)
        for i, (size, after) in enumerate(zip(sizes, sizes[1:])):
            tensors[f"weights/{name}.{3 * i}.weight"] = 1 + 0.2 * normal(size)
            tensors[f"weights/{name}.{3 * i}.bias"] = 0.2 * normal(size)
            tensors[f"weights/{name}.{3 * i + 1}.weight"] = 0.6 * normal(after, size) / size**0.5
            tensors[f"weights/{name}.{3 * i + 1}.bias"] = (i < 2) + 0.1 * normal(after)
    n = (UPDATES, B)
    return tensors | dict(obs=2 + 2 * normal(*n, D), actions=normal(*n, A).tanh(), rewards=normal(*n, 1),
                          next_obs=2 + 2 * normal(*n, D), terminated=(torch.rand(*n, 1, generator=g) < 0.3).double(),
                          noise=normal(*n, A).clamp(-1.5, 1.5), next_noise=normal(*n, A).clamp(-1.5, 1.5))  # fmt: skip


def make_model(case: dict):
    """CrossQ on an environment that is never stepped."""
    from sb3_contrib import CrossQ
    from stable_baselines3.common.logger import Logger

    class Spaces(gym.Env):
        observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (D,)), gym.spaces.Box(-1, 1, (A,))

    policy = dict(net_arch=[H, H], batch_norm_eps=case["epsilon"], renorm_warmup_steps=case["warmup"])
    model = CrossQ("MlpPolicy", Spaces(), learning_rate=RATE, gamma=GAMMA, buffer_size=1, device="cpu",
                   ent_coef=ALPHA, policy_delay=2, policy_kwargs=policy)  # fmt: skip
    model.set_logger(Logger(None, []))
    model.policy.double()
    for module in (model.actor, model.critic):  # instead of a cast to float32
        module.extract_features = lambda obs, extractor: obs
    model.actor.action_dist.epsilon = 0.0  # in log(1 - a^2): see make_sb3_sac_fixtures.py
    return model


def named(model):
    """Our name of each parameter and statistic, and sb3-contrib's tensors that are stacked in it."""
    actor, first, second = model.actor, *model.critic.q_networks
    for name, net in zip(NETS, ([*actor.latent_pi, (actor.mu, actor.log_std)], first, second)):
        for i in (0, 3, 6):
            for kind, theirs in KINDS.items():
                yield f"{name}.{i}.{kind}", [getattr(net[i], theirs)]
            for kind in ("weight", "bias"):
                layer = net[i + 1]
                yield f"{name}.{i + 1}.{kind}", [getattr(part, kind) for part in
                                                 (layer if isinstance(layer, tuple) else (layer,))]  # fmt: skip


def run_updates(inputs: dict[str, torch.Tensor], case: dict) -> dict[str, torch.Tensor]:
    """Every parameter and statistic after each update: (UPDATES, ...) each."""
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    model, states, variance = make_model(case), [], torch.Tensor.var
    for name, parts in named(model):
        if f"weights/{name}" in inputs:
            for part, value in zip(parts, inputs[f"weights/{name}"].split([len(part) for part in parts])):
                part.data.copy_(value)
    for i in range(UPDATES):
        batch = ReplayBufferSamples(*(inputs[k][i] for k in ("obs", "actions", "next_obs", "terminated", "rewards")))
        draws = [inputs["next_noise"][i], inputs["noise"][i]]  # in the order in which it draws
        with (
            mock.patch.object(model.replay_buffer, "sample", lambda *_, batch=batch, **__: batch),
            mock.patch("torch.distributions.normal._standard_normal", lambda *_, draws=draws, **__: draws.pop(0)),
            mock.patch.object(model, "_update_learning_rate", lambda _: None),
            mock.patch.object(torch.Tensor, "var", lambda x, dim: variance(x, dim, correction=case["correction"])),
        ):
            model.train(1, B)
        assert len(draws) == (i + 1) % 2
        stacked = {name: [torch.atleast_1d(part.detach()) for part in parts] for name, parts in named(model)}
        states.append({name: torch.cat(parts) for name, parts in stacked.items()})
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def results(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"update/{i}/{name}": value for i, case in enumerate(CASES)
            for name, value in run_updates(inputs, case).items()}  # fmt: skip


def main() -> None:
    import safetensors.torch
    import sb3_contrib

    torch.set_default_dtype(torch.float64)
    inputs = make_inputs()
    tensors = {f"input/{name}": value for name, value in inputs.items()} | results(inputs)
    about = {"sb3_contrib": sb3_contrib.__version__, "torch": torch.__version__,
             "command": "python benchmarks/peers/make_sb3_crossq_fixtures.py", "cases": json.dumps(CASES)}  # fmt: skip
    PATH.write_bytes(safetensors.torch.save(tensors, about))
    print(f"{len(CASES)} cases, {PATH.stat().st_size / 1024:.0f} KB in {PATH}")


if __name__ == "__main__":
    main()
