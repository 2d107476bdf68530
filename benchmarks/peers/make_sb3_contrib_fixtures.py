"""Records what sb3-contrib computes on fixed inputs, for tests/test_parity_sb3.py.

    pip install stable-baselines3==2.9.0 sb3-contrib==2.9.0 && python benchmarks/peers/make_sb3_contrib_fixtures.py

writes tests/fixtures, as make_sb3_fixtures.py does for PPO:
    sb3_ppo_mask.safetensors    MaskablePPO, with masks in the stream
    sb3_ppo_lstm.safetensors    RecurrentPPO with our layer before one LSTM for both heads. There it keeps the value
                                loss from the LSTM, and we do not: so the value loss has the weight 0. It cuts a rollout
                                at a random place and shuffles the parts: here it cuts at 0.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.peers.make_sb3_fixtures import CASES as PPO_CASES  # noqa: E402
from benchmarks.peers.make_sb3_fixtures import PATH as PPO_PATH  # noqa: E402
from benchmarks.peers.make_sb3_fixtures import Played, make_stream, run_sb3  # noqa: E402

PATH = PPO_PATH.with_name("sb3_ppo_mask.safetensors")
CASES = [case for case in PPO_CASES if case["space"] != "continuous"]
LSTM_PATH = PPO_PATH.with_name("sb3_ppo_lstm.safetensors")
LSTM_CASES = [case | {"vf_coef": 0.0} for case in PPO_CASES if case["space"] != "multi_discrete"]
LSTM_NAMES = {  # sb3-contrib's parameters -> ours
    "log_std": "log_std",
    "action_net": "actor",
    "value_net": "critic",
    **{f"{part}features_extractor.layer": "encoder.0" for part in ("", "pi_", "vf_")},
    **{f"lstm_actor.{part}_l0": f"lstm.{part}_l0" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")},
}
PARTS = {"discrete": [4], "multi_discrete": [2, 3]}


def with_masks(stream: dict[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """The stream and, for each of SPACES, masks that allow an action of each choice, and most of the others."""
    rng, shape = np.random.default_rng(seed), stream["obs"].shape[:2]
    masks = {}
    for space, parts in PARTS.items():
        columns = []
        for size in parts:
            allowed = rng.random((*shape, size)) < 0.7
            np.put_along_axis(allowed, rng.integers(size, size=(*shape, 1)), True, -1)
            columns.append(allowed)
        masks[f"masks_{space}"] = np.concatenate(columns, -1)
    return stream | masks


class PlayedWithMasks(Played):
    """sb3-contrib asks after the reset that follows an end."""

    def action_masks(self) -> np.ndarray:
        kind = "discrete" if isinstance(self.action_space, gym.spaces.Discrete) else "multi_discrete"
        return self.stream[f"masks_{kind}"][self.t, self.n]


def run_contrib(stream: dict, case: dict, hidden_size: int) -> dict[str, torch.Tensor]:
    from sb3_contrib import MaskablePPO

    return run_sb3(stream, case, hidden_size, MaskablePPO, PlayedWithMasks)


def run_recurrent(stream: dict, case: dict, hidden_size: int) -> dict[str, torch.Tensor]:
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Layer(BaseFeaturesExtractor):
        def __init__(self, space):
            super().__init__(space, hidden_size)
            self.layer = nn.Linear(space.shape[0], hidden_size)

        def forward(self, obs):
            return self.layer(obs).tanh()

    def make(_, envs, **settings):
        policy = dict(net_arch=[], shared_lstm=True, enable_critic_lstm=False, lstm_hidden_size=hidden_size,
                      features_extractor_class=Layer)  # fmt: skip
        return RecurrentPPO("MlpLstmPolicy", envs, **settings | {"policy_kwargs": policy})

    with mock.patch("numpy.random.randint", return_value=0):  # where the buffer cuts
        return run_sb3(stream, case, hidden_size, make, names=LSTM_NAMES)


def main() -> None:
    import safetensors.torch
    import sb3_contrib

    for path, stream, cases, run in ((PATH, with_masks(make_stream()), CASES, run_contrib),
                                     (LSTM_PATH, make_stream(), LSTM_CASES, run_recurrent)):  # fmt: skip
        tensors = {f"stream/{name}": torch.from_numpy(value) for name, value in stream.items()}
        for i, case in enumerate(cases):
            tensors |= {f"case{i}/{name}": value for name, value in run(stream, case, hidden_size=8).items()}
        about = {"sb3_contrib": sb3_contrib.__version__, "torch": torch.__version__, "gymnasium": gym.__version__,
                 "command": "make_sb3_contrib_fixtures.py", "cases": json.dumps(cases)}  # fmt: skip
        path.write_bytes(safetensors.torch.save({k: v.contiguous() for k, v in tensors.items()}, about))
        print(f"{len(cases)} cases, {path.stat().st_size / 1024:.0f} KB in {path}")


if __name__ == "__main__":
    main()
