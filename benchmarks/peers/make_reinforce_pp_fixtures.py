"""Records the advantages that verl and OpenRLHF compute for REINFORCE++, for tests/test_parity_verl.py.

    python benchmarks/peers/make_reinforce_pp_fixtures.py VERL OPENRLHF      checkouts of both

writes tests/fixtures/reinforce_pp.safetensors: the inputs, and each project's advantages. Their functions run
unchanged, cut out of their files: both packages import much else. Recorded with verl b178a3c and OpenRLHF 3c3be62.
"""

import ast
import itertools
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file

PATH = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "reinforce_pp.safetensors"
P, G, T, BETA = 4, 3, 6, 0.3
VERL = "compute_reinforce_plus_plus_outcome_advantage", "compute_reinforce_plus_plus_baseline_outcome_advantage"
OPENRLHF = "compute_advantages_and_returns", "get_cumulative_returns"


def inputs() -> dict[str, torch.Tensor]:
    """Log-probabilities (B, T) of ragged completions under policy and reference, in float64, and rewards (B,)."""
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(T) < torch.randint(1, T + 1, (P * G, 1), generator=g)
    mask[0] = True
    logps, ref = (-2 * torch.rand(2, P * G, T, generator=g, dtype=torch.float64)).unbind()
    return dict(mask=mask, logps=logps * mask, ref=ref * mask,
                rewards=torch.rand(P * G, generator=g, dtype=torch.float64).round(decimals=1))  # fmt: skip


def cut_out(path: Path, names: tuple[str, ...], scope: dict) -> list:
    """Functions or methods of a file by their names, without decorators and annotations, run in `scope`."""
    found = {node.name: node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    for name in names:
        node = found[name]
        node.decorator_list, node.returns = [], None
        for arg in node.args.args:
            arg.annotation = None
        exec(compile(ast.Module([node], []), path, "exec"), scope)
    return [scope[name] for name in names]


def by_verl(folder: Path, data: dict) -> dict[str, torch.Tensor]:
    scope = {"torch": torch}
    cut_out(
        folder / "verl/utils/torch_functional.py", ("masked_sum", "masked_mean", "masked_var", "masked_whiten"), scope
    )
    scope |= {"verl_F": SimpleNamespace(**scope), "defaultdict": defaultdict}
    plain, group = cut_out(folder / "verl/trainer/ppo/core_algos.py", VERL, scope)
    mask, last = data["mask"], data["mask"].sum(1) - 1
    score = torch.zeros_like(data["logps"])
    score[torch.arange(P * G), last] = data["rewards"]
    rewards = score - BETA * (data["logps"] - data["ref"]) * mask
    index = torch.arange(P).repeat_interleave(G).tolist()
    return {
        "verl": plain(rewards, mask.double(), config=SimpleNamespace(gamma=1.0))[0],
        "verl group": group(score, mask.double(), index)[0],
    }


def by_openrlhf(folder: Path, data: dict) -> dict[str, torch.Tensor]:
    scope = {"torch": torch, "itertools": itertools, "apply_length_penalties": lambda *_: None}
    cut_out(folder / "openrlhf/models/utils.py", ("compute_reward",), scope)
    run, cumulate = cut_out(folder / "openrlhf/trainer/ppo_utils/experience_maker.py", OPENRLHF, scope)
    found = {}
    for name, estimator, beta in (("openrlhf", "reinforce", BETA), ("openrlhf group", "reinforce_baseline", 0.0)):
        one = SimpleNamespace(index=list(range(P * G)), rewards=data["rewards"], kl=(data["logps"] - data["ref"]),
                              action_mask=data["mask"].double(), info={})  # fmt: skip
        algo = SimpleNamespace(advantage=SimpleNamespace(estimator=estimator, gamma=1.0, no_std_norm=False))
        args = SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=G), algo=algo,
                               reward=SimpleNamespace(clip_range=None))  # fmt: skip
        maker = SimpleNamespace(strategy=SimpleNamespace(args=args), kl_ctl=SimpleNamespace(value=beta),
                                advantage_estimator=estimator,
                                get_cumulative_returns=lambda *inputs: cumulate(None, *inputs))  # fmt: skip
        found[name] = run(maker, [one])[0].advantages.double() * data["mask"]
    return found


if __name__ == "__main__":
    verl, openrlhf = map(Path, sys.argv[1:])
    data = inputs()
    save_file(data | by_verl(verl, data) | by_openrlhf(openrlhf, data), PATH)
    print(PATH)
