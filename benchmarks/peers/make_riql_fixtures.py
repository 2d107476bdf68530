"""Updates of the authors' RIQL, for tests/test_parity_updates.py.

    git clone https://github.com/YangRui2015/RIQL, commit cc07d81
    python benchmarks/peers/make_riql_fixtures.py RIQL

In float64, with networks of H units and a Gaussian policy with a tanh behind its mean. The authors' policy and critics
use the value as it was before the update, ours the new one. So either the value learns and the others stand still, or
the other way round.
"""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file

PATH = Path(__file__).resolve().parents[2] / "tests/fixtures/riql.safetensors"
D, A, H, B, K, UPDATES = 3, 2, 8, 16, 5, 4
SIGMA, QUANTILE, TAU = 0.8, 0.3, 0.1
GAMMA, EXPECTILE = 0.875, 0.75  # their products with flags are single precision, where these are exact
FIELDS = {"obs": (D,), "actions": (A,), "rewards": (1,), "terminated": (1,), "next_obs": (D,)}
RATES = {"value": (0.0, 0.0, 1e-2), "others": (1e-2, 1e-2, 0.0)}  # who learns -> of actor, critics and value


def make_inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = {name: rng.normal(size=(UPDATES, B, *shape)) for name, shape in FIELDS.items()}
    inputs["actions"], inputs["terminated"] = np.tanh(inputs["actions"]), (inputs["terminated"] > 1) * 1.0
    return inputs


def state(agent) -> dict[str, torch.Tensor]:
    """Parameters under our names."""
    found = {"actor.log_std": agent.actor.log_std}
    for layer, kind in [(layer, kind) for layer in (0, 2, 4) for kind in ("weight", "bias")]:
        place = f"{layer // 2 * 3}.{kind}"
        for name, net in (("actor.net", agent.actor.net.net), ("value", agent.vf.v.net)):
            found[f"{name}.{place}"] = getattr(net[layer], kind)
        for name, net in (("critics", agent.qf.critic), ("targets", agent.q_target.critic)):
            for k, x in enumerate(getattr(net[layer], kind), 1):
                found[f"{name}.q{k}.{place}"] = x.mT if kind == "weight" else x[0]
    return {name: x.detach().clone() for name, x in found.items()}


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    torch.set_default_dtype(torch.float64)
    absent = {name: mock.MagicMock() for name in ("d4rl", "gym", "pyrallis", "wandb", "tqdm")}
    with mock.patch.dict(sys.modules, absent):
        import RIQL
    RIQL.TrainConfig.sigma, RIQL.TrainConfig.quantile = SIGMA, QUANTILE
    inputs, recorded = {name: torch.from_numpy(column) for name, column in make_inputs().items()}, {}
    for learner, rates in RATES.items():
        torch.manual_seed(0)
        parts = [RIQL.GaussianPolicy(D, A, 1.0, H), RIQL.VectorizedQ(D, A, H, num_critics=K), RIQL.ValueFunction(D, H)]
        parts[0].double().net.net.append(torch.nn.Tanh())
        pairs = [x for part, rate in zip(parts, rates) for x in (part, torch.optim.Adam(part.parameters(), rate))]
        agent = RIQL.ImplicitQLearning(1.0, *pairs, beta=3.0, max_steps=10**12, discount=GAMMA, iql_tau=EXPECTILE,
                                       soft_target_update_rate=TAU)  # fmt: skip
        with torch.no_grad():  # the last layers begin near 0, where the critics are one
            for parameter in [p for net in (agent.qf, agent.q_target, agent.vf) for p in net.parameters()]:
                parameter += 0.3 * torch.randn(parameter.shape)
        states = [state(agent)]
        for i in range(UPDATES):
            obs, actions, rewards, terminated, next_obs = (inputs[name][i] for name in FIELDS)
            agent.train([obs, actions, rewards, next_obs, terminated, torch.arange(B) % 2])
            states.append(state(agent))
        recorded |= {f"{learner}/{name}": torch.stack([s[name] for s in states]) for name in states[0]}
    save_file(inputs | recorded, PATH)


if __name__ == "__main__":
    main(sys.argv[1])
