"""PPO computes what Stable-Baselines3's PPO computes behind its VecNormalize: rollout, advantages, and trained weights.

Against recorded numbers (peers/make_sb3_fixtures.py) always, against the installed SB3 where there is one. One
stream of observations and rewards goes through both, twice, with training between; SB3's actions are given to ours. The
differences, each converted here or named in algos/ppo.py:
    - SB3 adds gamma V(last observation) to the reward where an episode is truncated; we bootstrap in delta.
    - SB3's value loss is not halved: its vf_coef is half of ours.
    - SB3 stops between minibatches at 1.5 times target_kl, and its clip_range_vf clips the value without baselines'
      maximum. Not compared.
"""

import json

import pytest
import torch
from helpers import recorded

from algos import ppo
from benchmarks.peers.make_sb3_fixtures import CASES, PATH, ROUNDS, SPACES, D, N, Played, T, make_stream, run_sb3
from utils.control import make_vector

IDS = [f"{case['space']}-{i % 3}" for i, case in enumerate(CASES)]


def assert_same(
    stream: dict, case: dict, theirs: dict[str, torch.Tensor], module=ppo, make=Played, masks: int = 0
) -> None:
    """Runs our rounds of a script on the stream and compares whatever SB3 has, in float32. `masks`: how many numbers of
    our observations stand before theirs."""

    def close(name: str, mine, tolerance: float = 1e-5) -> None:
        expected = theirs[name]
        gap, size = (torch.as_tensor(mine) - expected).abs().max().item(), max(1.0, expected.abs().max().item())
        assert gap <= tolerance * size, f"{name} differs by {gap:.1e} of {size:.1e} from SB3's for {case}"

    settings = {name: value for name, value in case.items() if name != "space"}
    args = module.Args(num_envs=N, num_steps=T, num_minibatches=1, **settings)
    agent = module.Agent(masks + D, SPACES[case["space"]], len(theirs["before/actor.0.bias"]))
    before = {name.removeprefix("before/"): value for name, value in theirs.items() if name.startswith("before/")}
    agent.load_state_dict(before)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    generator, statistics = (
        torch.Generator().manual_seed(0),
        module.Statistics(*([masks + D, masks] if masks else [D]), N, args.gamma, args.normalize),
    )
    columns = iter(range(N))
    envs, obs = make_vector(lambda: make(stream, next(columns), SPACES[case["space"]]), args, 0)
    statistics.observe(obs, count=True)
    for i in range(ROUNDS):
        # rollout
        batch, obs, _ = module.collect(agent, envs, obs, statistics, generator, args)
        batch = batch._replace(actions=theirs[f"{i}/actions"])
        with torch.no_grad():
            logps, _ = agent.log_prob(batch.obs, batch.actions)
            values, next_values = agent.value(batch.obs), agent.value(batch.next_obs)
        cut = batch.truncated & ~batch.terminated
        close(f"{i}/observations", batch.obs[..., masks:])
        close(f"{i}/rewards", batch.rewards + args.gamma * next_values * cut)
        close(f"{i}/values", values)
        close(f"{i}/log_probs", logps)
        if args.normalize:
            assert i == 0 or (batch.obs[..., masks:].abs().max() == 10 and batch.rewards.min() == -10)
            for name, mine in (("obs_mean", statistics.obs.mean[masks:]), ("obs_var", statistics.obs.var[masks:]),
                               ("return_var", statistics.returns.var)):  # fmt: skip
                close(f"{i}/{name}", mine, 1e-6)  # SB3 keeps them in float64, but adds up float32
        # advantages
        done = batch.terminated | batch.truncated
        advantages = module.gae(batch.rewards, values, next_values, batch.terminated, done, args.gamma, args.gae_lambda)
        close(f"{i}/advantages", advantages)
        close(f"{i}/returns", advantages + values)
        # training
        metrics = module.update(agent, optimizer, batch, generator, args)
        close(f"{i}/approx_kl", metrics["approx_kl"])
        close(f"{i}/explained_variance", metrics["explained_variance"])
        if args.update_epochs == 1:  # SB3 averages these over all epochs, we report the last
            close(f"{i}/entropy_loss", -metrics["entropy"])
        for name, parameter in agent.named_parameters():
            close(f"{i}/{name}", parameter.detach())
    moved = min((parameter - before[name]).abs().max().item() for name, parameter in agent.named_parameters())
    assert moved > 1e-3  # a hundred tolerances
    assert args.update_epochs == 1 or (0.001 if masks else 0.02) < theirs["1/clip_fraction"] < 0.9


def test_recorded():
    """All cases against SB3's recorded numbers, which were made for the cases and the stream of today's script."""
    stream, results, about = recorded(PATH, "stream/")
    assert json.loads(about["cases"]) == CASES and about["stable_baselines3"].startswith("2.9.")
    stream = {name: tensor.numpy() for name, tensor in stream.items()}
    for i, case in enumerate(CASES):
        start = f"case{i}/"
        assert_same(
            stream, case, {name.removeprefix(start): t for name, t in results.items() if name.startswith(start)}
        )


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_live(case):
    """All cases against the installed SB3, on another stream and with wider networks. Of 16 units: of 64, five epochs
    of Adam at these learning rates make a rounding of 1e-7 a difference of 1e-5, and other machines round otherwise."""
    why = "stable-baselines3 cannot be imported: pip install stable-baselines3==2.9.0"
    sb3 = pytest.importorskip("stable_baselines3", reason=why, exc_type=ImportError)
    if not sb3.__version__.startswith("2.9."):
        pytest.skip(f"stable-baselines3 is {sb3.__version__}: the comparison is with 2.9")
    stream = make_stream(seed=1)
    with torch.random.fork_rng():
        theirs = run_sb3(stream, case, hidden_size=16)
    assert_same(stream, case, theirs)
