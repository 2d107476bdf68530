"""Losses and gradients of CORL's CQL, and EDAC's term there, for tests/test_parity_cql.py.

    git clone https://github.com/corl-team/CORL, commit eeeeef2
    python benchmarks/peers/make_cql_fixtures.py CORL

In float64, with our networks of H units in place of CORL's, and with the noise of the fixture in place of torch's. What
of its files is not used here is imported as empty modules.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from algos import cql  # noqa: E402
from benchmarks.peers.offline_corl import corl_module  # noqa: E402

PATH = ROOT / "tests/fixtures/cql.safetensors"
D, A, H, B, K, N, ALPHA = 3, 2, 8, 16, 5, 3, 0.3
SETTINGS = dict(gamma=0.9, cql_weight=5.0, num_samples=K, hidden_size=H)
FIELDS = {"obs": (B, D), "actions": (B, A), "rewards": (B, 1), "terminated": (B, 1), "next_obs": (B, D),
          "noise": (B, A), "next_noise": (B, A), "uniform": (B, K, A), "policy_noise": (2, B, K, A)}  # fmt: skip


def make_inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = {name: rng.normal(size=shape) for name, shape in FIELDS.items()}
    inputs |= {name: np.tanh(inputs[name]) for name in ("actions", "uniform")}
    return inputs | {"terminated": (inputs["terminated"] > 1) * 1.0}


def main(folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    corl, edac = (corl_module(Path(folder), name) for name in ("cql", "edac"))
    x = {name: torch.from_numpy(column) for name, column in make_inputs().items()}
    torch.manual_seed(0)
    agent = cql.Agent(D, A, cql.Args(num_critics=N, hidden_size=H))
    for parameter in agent.parameters():
        nn.init.normal_(parameter, std=0.4) if parameter.dim() else nn.init.constant_(parameter, np.log(ALPHA))
    actor, recorded = corl.TanhGaussianPolicy(D, A, 1.0, log_std_offset=0.0), dict(agent.state_dict())
    actor.base_network = agent.actor.net
    critics = [corl.FullyConnectedQFunction(D, A) for _ in range(2)]
    trainer = corl.ContinuousCQL(critics[0], None, critics[1], None, actor, None, -A, 0.9, bc_steps=-1, cql_n_actions=K)
    for i, critic in enumerate(critics, 1):
        critic.network = agent.critics[f"q{i}"]
        getattr(trainer, f"target_critic_{i}").network = agent.targets[f"q{i}"]

    def record(name: str, loss: Tensor, part: nn.Module) -> None:
        names, parameters = zip(*part.named_parameters())
        slopes = dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True)))
        recorded.update({f"{name}/{key}": x for key, x in {"loss": loss.detach(), **slopes}.items() if x is not None})

    def drawn(*noises: Tensor):
        return mock.patch("torch.distributions.normal._standard_normal", mock.Mock(side_effect=noises))

    Tensor.uniform_ = lambda *_: x["uniform"]

    rows, alpha = (x["obs"], x["actions"], x["next_obs"], x["rewards"], x["terminated"]), torch.tensor(ALPHA)
    with drawn(x["noise"]):
        record("policy", trainer._policy_loss(*rows[:2], *(new := actor(x["obs"]))[:1], alpha, new[1]), agent.actor)
    for entropy in (False, True):
        trainer.backup_entropy = entropy
        for weight in (0.0, 5.0):
            trainer.cql_alpha = weight
            with drawn(x["next_noise"], *x["policy_noise"]):
                record(f"q {entropy} {weight}", trainer._q_loss(*rows, alpha, {})[0], agent.critics)

    ensemble = mock.Mock(num_critics=N, side_effect=lambda obs, actions: torch.stack(
        [q(torch.cat([s, a], -1))[:, 0] for q, s, a in zip(agent.critics.values(), obs, actions)]))  # fmt: skip
    term = edac.EDAC._critic_diversity_loss(SimpleNamespace(critic=ensemble, device="cpu"), x["obs"], x["actions"])
    record("diversity", term, agent.critics)
    save_file(x | {name: tensor.clone().contiguous() for name, tensor in recorded.items()}, PATH)


if __name__ == "__main__":
    main(sys.argv[1])
