"""Records what Stable-Baselines3's SAC computes on fixed inputs, for tests/test_parity_sb3_sac.py.

    pip install stable-baselines3==2.9.0 && python benchmarks/peers/make_sb3_sac_fixtures.py

writes tests/fixtures/sb3_sac.safetensors: the inputs, every parameter after each of three updates of SAC.train, the
gradient of log alpha, and actions and log-densities of its actor. SB3's own code runs, in float64: minibatches and
standard normal numbers are given, and its cast of observations to float32 is left out. The test calls the same
functions live where SB3 is installed.
"""

import itertools
import json
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "tests" / "fixtures" / "sb3_sac.safetensors"
D, A, H, B, UPDATES = 3, 2, 8, 16, 3  # observations, actions, hidden units, rows of a minibatch
GAMMA, TAU, ALPHA, RATE = 0.97, 0.1, 0.2, 1e-2
LOW, HIGH = np.array([-1.0, 2.0]), np.array([3.0, 2.5])  # bounds of the environment's actions
CASES = [dict(learned=learned, epsilon=epsilon) for learned in (False, True) for epsilon in (0.0, 1e-6)]
# epsilon: what SB3 adds inside log(1 - a^2); 1e-6 is its own value


def make_inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """Fixed random inputs, float64: weights under our names, UPDATES minibatches and their noise."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    sizes = {"actor.net": (D, H, H, 2 * A)}
    sizes |= {f"{name}.{q}": (D + A, H, H, 1) for name in ("critics", "targets") for q in ("q1", "q2")}
    tensors = {"weights/log_alpha": torch.tensor(ALPHA, dtype=torch.float64).log()}
    for name, widths in sizes.items():
        for layer, (fan_in, fan_out) in enumerate(zip(widths, widths[1:])):
            tensors[f"weights/{name}.{2 * layer}.weight"] = normal(fan_out, fan_in) / fan_in**0.5
            tensors[f"weights/{name}.{2 * layer}.bias"] = 0.1 * normal(fan_out)
    for name in ("actor.net.4.weight", "actor.net.4.bias"):  # moderate u, where SB3's epsilon is small beside 1 - a^2
        tensors[f"weights/{name}"] *= 0.4
    n = (UPDATES, B)
    tensors |= dict(obs=normal(*n, D), actions=normal(*n, A).tanh(), rewards=normal(*n, 1), next_obs=normal(*n, D),
                    terminated=(torch.rand(*n, 1, generator=g) < 0.3).double(),
                    noise=normal(*n, A).clamp(-1.5, 1.5), next_noise=normal(*n, A).clamp(-1.5, 1.5))  # fmt: skip
    return tensors


def widened(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with an actor whose log std lies around its upper bound for one action, its lower for the other."""
    name, shift = "weights/actor.net.4.bias", torch.tensor([0.0, 0.0, 2.0, -20.0], dtype=torch.float64)
    return inputs | {name: inputs[name] + shift}


def make_model(learned: bool = True):
    """SB3's SAC on an environment that is never stepped."""
    from stable_baselines3 import SAC
    from stable_baselines3.common.logger import Logger

    class Spaces(gym.Env):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (D,))
        action_space = gym.spaces.Box(LOW.astype(np.float32), HIGH.astype(np.float32))

    model = SAC("MlpPolicy", Spaces(), learning_rate=RATE, gamma=GAMMA, tau=TAU, buffer_size=1, device="cpu",
                ent_coef=f"auto_{ALPHA}" if learned else ALPHA, policy_kwargs=dict(net_arch=[H, H]))  # fmt: skip
    model.set_logger(Logger(None, []))
    model.policy.double()
    for module in (model.actor, model.critic, model.critic_target):  # instead of a cast to float32
        module.extract_features = lambda obs, extractor: obs
    if learned:
        model.log_ent_coef.data = model.log_ent_coef.data.double()
    return model


def named(model):
    """Our name of every parameter, and SB3's parameters that are stacked in it."""
    actor, nets = model.actor, {}
    nets["actor.net"] = [[actor.latent_pi[0]], [actor.latent_pi[2]], [actor.mu, actor.log_std]]
    for name, critic in (("critics", model.critic), ("targets", model.critic_target)):
        nets |= {f"{name}.q{i + 1}": [[net[0]], [net[2]], [net[4]]] for i, net in enumerate(critic.q_networks)}
    for (name, layers), kind in itertools.product(nets.items(), ("weight", "bias")):
        for i, modules in enumerate(layers):
            yield f"{name}.{2 * i}.{kind}", [getattr(module, kind) for module in modules]


def set_weights(model, inputs: dict[str, torch.Tensor]) -> None:
    for name, parts in named(model):
        for part, value in zip(parts, inputs[f"weights/{name}"].split([len(part) for part in parts])):
            part.data.copy_(value)


def run_updates(inputs: dict[str, torch.Tensor], case: dict) -> dict[str, torch.Tensor]:
    """Every parameter after each update, (UPDATES, ...) each; where alpha is learned log alpha and its gradient too."""
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    model, states = make_model(case["learned"]), []
    set_weights(model, inputs)
    model.actor.action_dist.epsilon = case["epsilon"]
    for i in range(UPDATES):
        batch = ReplayBufferSamples(*(inputs[k][i] for k in ("obs", "actions", "next_obs", "terminated", "rewards")))
        draws = [inputs["noise"][i], inputs["next_noise"][i]]  # in the order in which SB3 draws
        with (
            mock.patch.object(model.replay_buffer, "sample", lambda *_, batch=batch, **__: batch),
            mock.patch("torch.distributions.normal._standard_normal", lambda *_, draws=draws, **__: draws.pop(0)),
            mock.patch.object(model, "_update_learning_rate", lambda _: None),  # needs the progress of a learn()
        ):
            model.train(1, B)
        assert not draws
        state = {name: torch.cat(parts).detach().clone() for name, parts in named(model)}
        if case["learned"]:
            state["log_alpha"] = model.log_ent_coef.detach()[0].clone()
            state["log_alpha_gradient"] = model.log_ent_coef.grad[0].clone()
        states.append(state)
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


@torch.no_grad()
def run_density(inputs: dict[str, torch.Tensor], scale: float, epsilon: float) -> dict[str, torch.Tensor]:
    """SB3's actions (UPDATES, B, A) and log-densities (UPDATES, B, 1) for `scale` times the noise."""
    model = make_model()
    set_weights(model, inputs)
    model.actor.action_dist.epsilon = epsilon
    noise = scale * inputs["noise"].flatten(0, 1)
    with mock.patch("torch.distributions.normal._standard_normal", lambda *_, **__: noise):
        actions, logps = model.actor.action_log_prob(inputs["obs"].flatten(0, 1))
    return dict(actions=actions.view(UPDATES, B, A), logps=logps.view(UPDATES, B, 1))


def results(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {}
    for i, case in enumerate(CASES):
        tensors |= {f"update/{i}/{name}": value for name, value in run_updates(inputs, case).items()}
    return tensors | {f"density/{name}": value for name, value in run_density(widened(inputs), 0.1, 0.0).items()}


def main() -> None:
    import safetensors.torch
    import stable_baselines3

    torch.set_default_dtype(torch.float64)  # SB3 makes alpha of the default type
    inputs = make_inputs()
    tensors = {f"input/{name}": value for name, value in inputs.items()} | results(inputs)
    about = {"stable_baselines3": stable_baselines3.__version__, "torch": torch.__version__,
             "command": "python benchmarks/peers/make_sb3_sac_fixtures.py", "cases": json.dumps(CASES)}  # fmt: skip
    PATH.write_bytes(safetensors.torch.save(tensors, about))
    print(f"{len(CASES)} cases, {PATH.stat().st_size / 1024:.0f} KB in {PATH}")


if __name__ == "__main__":
    main()
