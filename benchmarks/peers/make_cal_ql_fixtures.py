"""Losses, gradients and returns-to-go of CORL's Cal-QL, for tests/test_parity_cql.py.

    git clone https://github.com/corl-team/CORL, commit eeeeef2
    python benchmarks/peers/make_cal_ql_fixtures.py CORL

In float64, with weights, rows and noise of the fixture of cql.py (make_cql_fixtures.py), and one return for each row.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from algos import cal_ql  # noqa: E402
from benchmarks.peers import make_cql_fixtures as base  # noqa: E402
from benchmarks.peers.offline_corl import corl_module  # noqa: E402

PATH = ROOT / "tests/fixtures/cal_ql.safetensors"
SMALL = SimpleNamespace(rewards=np.array([5.0, 1, 2, 3, 0, 4]), starts=np.array([0, 1, 3]),
                        lengths=lambda: np.array([1, 2, 3]))  # fmt: skip  # the second is cut off


def make_returns() -> np.ndarray:
    """(B, 1): between the values of the policy's samples."""
    return np.random.default_rng(1).normal(size=(base.B, 1))


def main(folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    corl, x = corl_module(Path(folder), "../finetune/cal_ql"), load_file(base.PATH)
    agent = cal_ql.Agent(base.D, base.A, cal_ql.Args(num_critics=2, hidden_size=base.H))
    agent.load_state_dict({name: x[name] for name in agent.state_dict()})
    actor, critics = corl.TanhGaussianPolicy(base.D, base.A, 1.0, log_std_offset=0.0), [
        corl.FullyConnectedQFunction(base.D, base.A) for _ in range(2)]  # fmt: skip
    actor.base_network = agent.actor.net
    trainer = corl.CalQL(critics[0], None, critics[1], None, actor, None, -base.A, 0.9, cql_n_actions=base.K)
    for i, critic in enumerate(critics, 1):
        critic.network, getattr(trainer, f"target_critic_{i}").network = agent.critics[f"q{i}"], agent.targets[f"q{i}"]
    Tensor.uniform_ = lambda *_: x["uniform"]
    rows = [x[name] for name in ("obs", "actions", "next_obs", "rewards", "terminated")]
    noises = mock.Mock(side_effect=[x["next_noise"], *x["policy_noise"]])
    with mock.patch("torch.distributions.normal._standard_normal", noises):
        loss = trainer._q_loss(*rows, torch.from_numpy(make_returns()), torch.tensor(base.ALPHA), {})
    names, parameters = zip(*agent.critics.named_parameters())
    recorded = {"loss": loss.detach()} | dict(zip(names, torch.autograd.grad(loss, parameters)))
    numbers = np.array([[0.0], [10], [11], [20], [21], [22]])  # of observations: they tell where a trajectory ends
    rows = {"rewards": SMALL.rewards, "terminals": np.array([1.0, 0, 0, 0, 0, 1]), "observations": numbers,
            "next_observations": numbers + 1}  # fmt: skip
    settings = SimpleNamespace(is_sparse_reward=False, discount=0.5)
    returns = corl.get_return_to_go(rows, SimpleNamespace(_max_episode_steps=1000), settings)
    save_file(recorded | {"returns": torch.tensor(returns)}, PATH)


if __name__ == "__main__":
    main(sys.argv[1])
