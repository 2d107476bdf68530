"""Records what Stable-Baselines3's A2C computes on the stream of make_sb3_fixtures.py, for tests/test_parity_sb3.py.

    pip install stable-baselines3==2.9.0 && python benchmarks/peers/make_sb3_a2c_fixtures.py

writes tests/fixtures/sb3_a2c.safetensors. Its optimizer is A2C's default: torch's RMSprop.
"""

import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.peers import make_sb3_fixtures as sb3  # noqa: E402

PATH = sb3.PATH.with_name("sb3_a2c.safetensors")
SETTINGS = [  # names and meaning of a2c.Args
    dict(normalize=False, normalize_advantages=False, gamma=0.99, gae_lambda=1.0, ent_coef=0.0, vf_coef=1.0,
         max_grad_norm=0.5, learning_rate=3e-3),
    dict(normalize=True, normalize_advantages=True, gamma=0.9, gae_lambda=0.8, ent_coef=0.3, vf_coef=0.5,
         max_grad_norm=100.0, learning_rate=3e-3),
]  # fmt: skip
CASES = [dict(space=space, **settings) for space, settings in itertools.product(sb3.SPACES, SETTINGS)]


def run_a2c(stream: dict, case: dict, hidden_size: int) -> dict[str, torch.Tensor]:
    """ROUNDS of SB3's A2C, which lacks some of PPO's arguments."""
    from stable_baselines3 import A2C

    def algorithm(*args, batch_size, n_epochs, clip_range, **settings):
        return A2C(*args, **settings)

    return sb3.run_sb3(stream, dict(update_epochs=1, clip_coef=0.2) | case, hidden_size, algorithm)


if __name__ == "__main__":
    sb3.main(PATH, CASES, run_a2c, __file__)
