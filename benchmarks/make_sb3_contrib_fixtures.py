"""Records what sb3-contrib's MaskablePPO computes on fixed inputs, for tests/test_parity_sb3_contrib.py.

    pip install stable-baselines3==2.9.0 sb3-contrib==2.9.0 && python benchmarks/make_sb3_contrib_fixtures.py

writes tests/fixtures/sb3_ppo_mask.safetensors, as make_sb3_fixtures.py does for PPO, with masks in the stream.
"""

import json
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.make_sb3_fixtures import CASES as PPO_CASES  # noqa: E402
from benchmarks.make_sb3_fixtures import PATH as PPO_PATH  # noqa: E402
from benchmarks.make_sb3_fixtures import Played, make_stream, run_sb3  # noqa: E402

PATH = PPO_PATH.with_name("sb3_ppo_mask.safetensors")
CASES = [case for case in PPO_CASES if case["space"] != "continuous"]
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


def main() -> None:
    import safetensors.torch
    import sb3_contrib

    stream = with_masks(make_stream())
    tensors = {f"stream/{name}": torch.from_numpy(value) for name, value in stream.items()}
    for i, case in enumerate(CASES):
        tensors |= {f"case{i}/{name}": value for name, value in run_contrib(stream, case, hidden_size=8).items()}
    about = {"sb3_contrib": sb3_contrib.__version__, "torch": torch.__version__, "gymnasium": gym.__version__,
             "command": "python benchmarks/make_sb3_contrib_fixtures.py", "cases": json.dumps(CASES)}  # fmt: skip
    PATH.write_bytes(safetensors.torch.save({k: v.contiguous() for k, v in tensors.items()}, about))
    print(f"{len(CASES)} cases, {PATH.stat().st_size / 1024:.0f} KB in {PATH}")


if __name__ == "__main__":
    main()
