"""Denoising steps, averages and windows of Diffusion Policy's authors, for tests/test_parity_diffusion_policy.py.

    git clone https://github.com/real-stanford/diffusion_policy, commit 5ba07ac
    pip install diffusers                         recorded with 0.42.1, whose scheduler theirs is
    python benchmarks/peers/make_diffusion_fixtures.py diffusion_policy

Settings of their config train_diffusion_unet_lowdim_workspace.yaml. What is not used here is imported as empty modules.
"""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.numpy import save_file

PATH = Path(__file__).resolve().parents[2] / "tests/fixtures/diffusion_policy.safetensors"
LEVELS, B, SIZE = {1: [0], 10: [0, 1, 5, 9], 100: [0, 1, 50, 98, 99]}, 4, 6  # diffusion steps -> theirs, from 0
LENGTHS, H, T_O, T_A = [20, 10, 5], 16, 2, 8


def make_inputs(steps: int) -> dict[str, np.ndarray]:
    rng, shape = np.random.default_rng(steps), (len(LEVELS[steps]), B, SIZE)
    drawn = {name: rng.normal(size=shape).astype(np.float32) for name in ("x", "predicted", "noise")}
    return drawn | {"plan": rng.uniform(-1, 1, shape).astype(np.float32)}


def denoised(steps: int) -> dict[str, np.ndarray]:
    from diffusers.schedulers import scheduling_ddpm

    scheduler = scheduling_ddpm.DDPMScheduler(
        num_train_timesteps=steps, beta_start=0.0001, beta_end=0.02, beta_schedule="squaredcos_cap_v2",
        variance_type="fixed_small", clip_sample=True, prediction_type="epsilon",
    )  # fmt: skip
    scheduler.set_timesteps(steps)
    inputs, found = {name: torch.from_numpy(column) for name, column in make_inputs(steps).items()}, []
    for i, t in enumerate(LEVELS[steps]):
        x, predicted, noise, plan = (column[i] for column in inputs.values())
        with mock.patch.object(scheduling_ddpm, "randn_tensor", lambda *_, noise=noise, **__: noise):
            found.append(
                (scheduler.step(predicted, t, x).prev_sample, scheduler.add_noise(plan, noise, torch.tensor([t])))
            )
    before, noisy = (torch.stack(column).numpy() for column in zip(*found))
    return make_inputs(steps) | {"before": before, "noisy": noisy}


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    sys.modules |= {"numba": mock.MagicMock(jit=lambda **_: lambda function: function),
                    "diffusion_policy.common.replay_buffer": mock.MagicMock()}  # fmt: skip
    from diffusion_policy.common.sampler import SequenceSampler
    from diffusion_policy.model.diffusion.ema_model import EMAModel

    rows = {f"{name}_{steps}": column for steps in LEVELS for name, column in denoised(steps).items()}
    ema = EMAModel(torch.nn.Linear(1, 1), inv_gamma=1.0, power=0.75, min_value=0.0, max_value=0.9999)
    rows["decays"] = np.array([ema.get_decay(n) for n in range(40)])

    class Stored(dict):
        episode_ends = np.cumsum(LENGTHS)

    sampler = SequenceSampler(Stored(row=np.arange(sum(LENGTHS))), H, pad_before=T_O - 1, pad_after=T_A - 1)
    rows["windows"] = np.stack([sampler.sample_sequence(i)["row"] for i in range(len(sampler))])
    save_file(rows, PATH)


if __name__ == "__main__":
    main(sys.argv[1])
