"""Updates of CORL's AWAC, for tests/test_parity_updates.py.

    git clone https://github.com/corl-team/CORL, commit eeeeef2
    python benchmarks/peers/make_awac_fixtures.py CORL

In float64, with the noise of the fixture in place of torch's. Losses, density, steps and their order are CORL's. Its
networks are replaced by two hidden layers of H units, and its actor's mean by tanh of the output, as in ours.
"""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "tests/fixtures/awac.safetensors"
D, A, H, B, UPDATES = 3, 2, 8, 16, 4
SETTINGS = dict(tau=0.1, gamma=0.9, temperature=0.02)
FIELDS = {"obs": (D,), "actions": (A,), "rewards": (1,), "terminated": (1,), "next_obs": (D,), "noise": (2, A)}


def make_inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = {name: rng.normal(size=(UPDATES, B, *shape)) for name, shape in FIELDS.items()}
    inputs["actions"], inputs["terminated"] = np.tanh(inputs["actions"]), (inputs["terminated"] > 1) * 1.0
    return inputs


def network(size_in: int, size_out: int, *last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size_in, H), nn.ReLU(), nn.Linear(H, H), nn.ReLU(), nn.Linear(H, size_out), *last)


def main(folder: str) -> None:
    sys.path.insert(0, str(ROOT))
    torch.set_default_dtype(torch.float64)
    from benchmarks.peers.offline_corl import corl_module

    corl = corl_module(Path(folder), "awac")
    torch.manual_seed(0)
    actor, *critics = corl.Actor(D, A, H).double(), corl.Critic(D, A, H), corl.Critic(D, A, H)
    actor._mlp = network(D, A, nn.Tanh())
    for critic in critics:
        critic._mlp = network(D + A, 1)
    pairs = [x for net in (actor, *critics) for x in (net, torch.optim.Adam(net.parameters(), 1e-2))]
    settings = dict(tau=SETTINGS["tau"], gamma=SETTINGS["gamma"], awac_lambda=SETTINGS["temperature"])
    trainer = corl.AdvantageWeightedActorCritic(*pairs, **settings)
    nets = {"actor.net": actor, "critics.q1": critics[0], "critics.q2": critics[1],
            "targets.q1": trainer._target_critic_1, "targets.q2": trainer._target_critic_2}  # fmt: skip

    def state() -> dict[str, torch.Tensor]:
        found = {f"{part}.{name}": x for part, net in nets.items() for name, x in net._mlp.state_dict().items()}
        return {name: x.detach().clone() for name, x in (found | {"actor.log_std": actor._log_std}).items()}

    states, inputs = [state()], {name: torch.from_numpy(column) for name, column in make_inputs().items()}
    for i in range(UPDATES):
        obs, actions, rewards, terminated, next_obs, noise = (inputs[name][i] for name in FIELDS)
        drawn = mock.Mock(side_effect=noise.unbind(1))
        with mock.patch.object(torch.distributions.normal, "_standard_normal", drawn):
            trainer.update([obs, actions, rewards, next_obs, terminated])
        states.append(state())
    save_file(inputs | {name: torch.stack([s[name] for s in states]) for name in states[0]}, PATH)


if __name__ == "__main__":
    main(sys.argv[1])
