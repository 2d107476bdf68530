"""Updates of the authors' TD3+BC, for tests/test_parity_updates.py.

    git clone https://github.com/sfujim/TD3_BC, commit 76cdd14
    python benchmarks/peers/make_td3_bc_fixtures.py TD3_BC

In float64, with networks of H units, and with the noise of the fixture in place of torch's.
"""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file

PATH = Path(__file__).resolve().parents[2] / "tests/fixtures/td3_bc.safetensors"
D, A, H, B, UPDATES = 3, 2, 8, 16, 4
SETTINGS = dict(tau=0.1, policy_noise=0.4, noise_clip=0.5, alpha=2.5)
FIELDS = {"obs": (D,), "actions": (A,), "rewards": (1,), "terminated": (1,), "next_obs": (D,), "noise": (A,)}


def make_inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = {name: rng.normal(size=(UPDATES, B, *shape)) for name, shape in FIELDS.items()}
    inputs["actions"], inputs["terminated"] = np.tanh(inputs["actions"]), (inputs["terminated"] > 1) * 1.0
    return inputs


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    torch.set_default_dtype(torch.float64)
    import TD3_BC

    linear = torch.nn.Linear
    with mock.patch.object(TD3_BC.nn, "Linear", lambda i, o: linear(H if i == 256 else i, H if o == 256 else o)):
        torch.manual_seed(0)
        agent = TD3_BC.TD3_BC(D, A, 1.0, **SETTINGS)
    for optimizer in agent.actor_optimizer, agent.critic_optimizer:
        optimizer.param_groups[0]["lr"] = 1e-2
    inputs = {name: torch.from_numpy(column) for name, column in make_inputs().items()}

    def state() -> dict[str, torch.Tensor]:
        parts = {name: getattr(agent, name) for name in ("actor", "critic", "actor_target", "critic_target")}
        return {f"{part}.{name}": x.clone() for part, net in parts.items() for name, x in net.state_dict().items()}

    states = [state()]
    for i in range(UPDATES):
        obs, actions, rewards, terminated, next_obs, noise = (inputs[name][i] for name in FIELDS)
        buffer = mock.Mock(sample=lambda _, rows=(obs, actions, next_obs, rewards, 1 - terminated): rows)
        with mock.patch.object(torch, "randn_like", lambda _, noise=noise: noise):
            agent.train(buffer)
        states.append(state())
    save_file(inputs | {name: torch.stack([s[name] for s in states]) for name in states[0]}, PATH)


if __name__ == "__main__":
    main(sys.argv[1])
