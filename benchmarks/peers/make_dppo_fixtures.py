"""Log-densities and losses of DPPO's authors, for tests/test_parity_diffusion_policy.py.

    git clone https://github.com/irom-princeton/dppo, commit cc7234a
    python benchmarks/peers/make_dppo_fixtures.py dppo

Their losses take means of log-densities over the numbers of a plan, so plans of one number are recorded for them: there
mean and sum are equal. No log-density lies outside of their clamp.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

PATH = Path(__file__).resolve().parents[2] / "tests/fixtures/dppo.safetensors"
SIZES, B, D, K, LEARNED = (1, 6), 8, 3, 5, 3  # numbers of a plan; plans; numbers of an observation; K and K'
GAMMA, CLIP, MIN_STD = 0.8, 0.2, 0.1


def make_inputs(size: int) -> dict[str, np.ndarray]:
    """A network of one layer, observations, chains of small steps, and what PPO has of each plan."""
    rng = np.random.default_rng(size)
    chains = np.cumsum(0.2 * rng.normal(size=(B, LEARNED + 1, size)), 1)
    drawn = {"weight": rng.normal(size=(size, D + size + 1)) / 3, "obs": rng.normal(size=(B, D)), "chains": chains,
             "old_logps": 0.3 * rng.normal(size=(B, LEARNED)), "advantages": rng.normal(size=B),
             "returns": rng.normal(size=B), "values": rng.normal(size=B)}  # fmt: skip
    return {name: column.astype(np.float32) for name, column in drawn.items()}


def recorded(size: int) -> dict[str, np.ndarray]:
    from model.diffusion.diffusion_ppo import PPODiffusion

    inputs = {name: torch.from_numpy(column) for name, column in make_inputs(size).items()}

    class Actor(torch.nn.Module):
        def forward(self, x, t, cond):
            now = torch.cat([cond["state"].flatten(1), x.flatten(1), (t[:, None] + 1) / K], 1)
            return (now @ inputs["weight"].T).tanh()[:, None]

    class Critic(torch.nn.Module):
        def forward(self, cond):
            return inputs["values"].repeat_interleave(LEARNED)

    theirs = PPODiffusion(
        actor=Actor(), critic=Critic(), horizon_steps=1, obs_dim=D, action_dim=size, device="cpu", denoising_steps=K,
        ft_denoising_steps=LEARNED, gamma_denoising=GAMMA, clip_ploss_coef=CLIP, clip_ploss_coef_base=CLIP,
        min_sampling_denoising_std=MIN_STD, min_logprob_denoising_std=MIN_STD, norm_adv=False,
    )  # fmt: skip
    cond, chains = {"state": inputs["obs"][:, None]}, inputs["chains"][:, :, None]
    logps = theirs.get_logprobs(cond, chains).view(B, LEARNED, size)
    if size > 1:
        return {"logps": logps.numpy()}
    assert (logps > -5).all() and (logps < 2).all()
    plans, steps = (x.flatten() for x in torch.meshgrid(torch.arange(B), torch.arange(LEARNED), indexing="ij"))
    old_logps = (logps[..., 0] + inputs["old_logps"])[plans, steps, None, None]
    rest = (inputs[name][plans] for name in ("returns", "values", "advantages"))
    states = {"state": cond["state"][plans]}
    numbers = theirs.loss(states, chains[plans, steps], chains[plans, steps + 1], steps, *rest, old_logps)
    names = {"policy_loss": 0, "value_loss": 2, "clip_fraction": 3, "approx_kl": 4}
    return {"logps": logps.numpy()} | {name: np.float32(float(numbers[i])) for name, i in names.items()}


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    save_file({f"{name}_{size}": np.asarray(column) for size in SIZES
               for name, column in {**make_inputs(size), **recorded(size)}.items()}, PATH)  # fmt: skip
