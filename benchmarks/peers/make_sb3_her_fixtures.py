"""Records what Stable-Baselines3's HerReplayBuffer makes of episodes of its BitFlippingEnv, for
tests/test_parity_sb3_her.py.

    pip install stable-baselines3==2.9.0 && python benchmarks/peers/make_sb3_her_fixtures.py

writes tests/fixtures/sb3_her.safetensors: first states, actions and uniform numbers; what DQN.collect_rollouts stores
of them, and K times every step with a goal that its episode reached later. SB3's own code runs; only actions and what
numpy.random.randint draws are given. The test calls the same functions live where SB3 is installed.
"""

from pathlib import Path
from unittest import mock

import numpy as np
import torch

PATH = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "sb3_her.safetensors"
N, K, EPISODES = 5, 3, 12  # bits, further goals of each step


def make_inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """Episodes that go for the goal, all ones, by the shortest way, by one with a detour, or by chance."""
    rng = np.random.default_rng(seed)
    states, actions = rng.integers(2, size=(EPISODES, N)), rng.integers(N, size=(EPISODES, N))
    for i, state in enumerate(states):
        way = np.flatnonzero(state == 0)
        if i % 3 == 0:
            states[i, 0] = 0  # somewhere to go
            way = np.flatnonzero(states[i] == 0)
            actions[i, : len(way)] = way
        elif i % 3 == 1 and len(way) <= N - 2:
            actions[i, : len(way) + 2] = [0, 0, *way]
    uniform = rng.random((K, EPISODES * N))
    return {name: torch.from_numpy(value) for name, value in
            dict(states=states, actions=actions, uniform=uniform).items()}  # fmt: skip


def joined(obs: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([obs[name] for name in ("achieved_goal", "desired_goal", "observation")], 1)


def results(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """(1 + K, T, 6 N + 3): what is stored of T steps, and K times each with a further goal; observation, action,
    reward, done, next observation."""
    from stable_baselines3 import DQN, HerReplayBuffer
    from stable_baselines3.common.envs import BitFlippingEnv
    from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
    from stable_baselines3.common.vec_env import DummyVecEnv

    env, taken = BitFlippingEnv(N), [0, 0]  # episodes that have begun, steps of the newest

    def first_state() -> np.ndarray:
        taken[:] = taken[0] + 1, 0
        return inputs["states"][(taken[0] - 1) % EPISODES].numpy().astype(np.int8)

    def action(*_) -> tuple[np.ndarray, np.ndarray]:
        taken[1] += 1
        chosen = inputs["actions"][taken[0] - 1, taken[1] - 1 : taken[1]].numpy()
        return chosen, chosen

    env._obs_space.sample = first_state
    model = DQN("MultiInputPolicy", DummyVecEnv([lambda: env]), replay_buffer_class=HerReplayBuffer, device="cpu",
                replay_buffer_kwargs=dict(n_sampled_goal=K, copy_info_dict=False), buffer_size=1000)  # fmt: skip
    _, callback = model._setup_learn(1000)
    taken[:] = 1, 0
    with mock.patch.object(model, "_sample_action", action):
        model.collect_rollouts(model.env, callback, TrainFreq(EPISODES, TrainFrequencyUnit.EPISODE),
                               model.replay_buffer)  # fmt: skip
    buffer = model.replay_buffer
    rows = np.arange(buffer.pos)
    samples = [buffer._get_real_samples(rows, 0 * rows)]
    for uniform in inputs["uniform"].numpy():
        with mock.patch(
            "numpy.random.randint", lambda low, high, u=uniform: low + (u[rows] * (high - low)).astype(int)
        ):
            samples.append(buffer._get_virtual_samples(rows, 0 * rows))
    parts = [[joined(sample.observations), sample.actions, sample.rewards, sample.dones,
              joined(sample.next_observations)] for sample in samples]  # fmt: skip
    return torch.stack([torch.cat(columns, 1) for columns in parts])


def main() -> None:
    import safetensors.torch
    import stable_baselines3

    inputs = make_inputs()
    tensors = {f"input/{name}": value for name, value in inputs.items()} | {"rows": results(inputs)}
    about = {"stable_baselines3": stable_baselines3.__version__, "torch": torch.__version__,
             "command": "python benchmarks/peers/make_sb3_her_fixtures.py"}  # fmt: skip
    PATH.write_bytes(safetensors.torch.save(tensors, about))
    print(f"{tensors['rows'].shape[1]} steps, {PATH.stat().st_size / 1024:.0f} KB in {PATH}")


if __name__ == "__main__":
    main()
