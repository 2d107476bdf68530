"""PPO with masks and recurrent PPO compute what sb3-contrib's MaskablePPO and RecurrentPPO do: rollout, advantages, and
trained weights.

As test_parity_sb3.py, whose differences stay; peers/make_sb3_contrib_fixtures.py recorded the numbers and names
what it changed. One more difference: sb3-contrib sets masked logits to -1e8, and we to minus infinity, which no number
here shows.
"""

import json

import pytest
import torch
from helpers import recorded
from test_parity_sb3 import assert_same

from algos import ppo_lstm, ppo_mask
from benchmarks.peers.make_sb3_contrib_fixtures import (
    CASES,
    LSTM_CASES,
    LSTM_PATH,
    PARTS,
    PATH,
    PlayedWithMasks,
    run_contrib,
    run_recurrent,
    with_masks,
)
from benchmarks.peers.make_sb3_fixtures import ROUNDS, SPACES, D, N, Played, make_stream
from utils.control import make_vector


def compare(stream: dict, case: dict, theirs: dict[str, torch.Tensor]) -> None:
    make = lambda *args: ppo_mask.Masked(PlayedWithMasks(*args))  # noqa: E731
    assert_same(stream, case, theirs, ppo_mask, make, sum(PARTS[case["space"]]))


def compare_recurrent(stream: dict, case: dict, theirs: dict[str, torch.Tensor]) -> None:
    """As assert_same of test_parity_sb3.py, with a state that goes from step to step."""

    def close(name: str, mine: torch.Tensor) -> None:
        gap, size = (mine - theirs[name]).abs().max().item(), max(1.0, theirs[name].abs().max().item())
        assert gap <= 1e-5 * size, f"{name} differs by {gap:.1e} of {size:.1e} from sb3-contrib's for {case}"

    settings = {name: value for name, value in case.items() if name != "space"}
    args = ppo_lstm.Args(num_envs=N, num_steps=16, num_minibatches=1, **settings)
    agent = ppo_lstm.Agent(D, SPACES[case["space"]], len(theirs["before/encoder.0.bias"]))
    before = {name.removeprefix("before/"): value for name, value in theirs.items() if name.startswith("before/")}
    agent.load_state_dict(before)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    generator = torch.Generator().manual_seed(0)
    statistics = ppo_lstm.Statistics(D, N, args.gamma, args.normalize)
    columns = iter(range(N))
    envs, obs = make_vector(lambda: Played(stream, next(columns), SPACES[case["space"]]), args, 0)
    state = agent.empty(N)
    statistics.observe(obs, count=True)
    for i in range(ROUNDS):
        batch, obs, state, _ = ppo_lstm.collect(agent, envs, obs, state, statistics, generator, args)
        batch = batch._replace(actions=theirs[f"{i}/actions"])
        with torch.no_grad():
            logps, _, values = agent(batch.obs, batch.actions, batch.state, batch.begins)
            after = batch.after.transpose(0, 1).flatten(1, 2)
            next_values = agent.value(batch.next_obs.flatten(0, 1), after).view_as(values)
        done = batch.terminated | batch.truncated
        advantages = ppo_lstm.gae(
            batch.rewards, values, next_values, batch.terminated, done, args.gamma, args.gae_lambda
        )
        bootstrap = args.gamma * next_values * (batch.truncated & ~batch.terminated)
        ours = dict(observations=batch.obs, rewards=batch.rewards + bootstrap, values=values, log_probs=logps)
        for name, mine in (ours | dict(advantages=advantages, returns=advantages + values)).items():
            close(f"{i}/{name}", mine)
        metrics = ppo_lstm.update(agent, optimizer, batch, generator, args)
        close(f"{i}/approx_kl", torch.tensor(metrics["approx_kl"]))
        for name, parameter in agent.named_parameters():
            close(f"{i}/{name}", parameter.detach())
    for name, parameter in agent.named_parameters():  # a hundred tolerances
        assert (parameter - before[name]).abs().max() > 1e-3 or name.startswith("critic")


SCRIPTS = {"ppo_mask": (PATH, CASES, compare), "ppo_lstm": (LSTM_PATH, LSTM_CASES, compare_recurrent)}


@pytest.mark.parametrize("script", SCRIPTS)
def test_recorded(script):
    path, cases, compare = SCRIPTS[script]
    stream, results, about = recorded(path, "stream/")
    assert json.loads(about["cases"]) == cases and about["sb3_contrib"].startswith("2.9.")
    stream = {name: tensor.numpy() for name, tensor in stream.items()}
    for i, case in enumerate(cases):
        start = f"case{i}/"
        theirs = {name.removeprefix(start): t for name, t in results.items() if name.startswith(start)}
        compare(stream, case, theirs)


@pytest.mark.parametrize("case", range(len(LSTM_CASES)))
@pytest.mark.parametrize("script", SCRIPTS)
def test_live(script, case):
    why = "sb3-contrib cannot be imported: pip install sb3-contrib==2.9.0"
    contrib = pytest.importorskip("sb3_contrib", reason=f"not run: {why}", exc_type=ImportError)
    if not contrib.__version__.startswith("2.9."):
        pytest.skip(f"not run: sb3-contrib is {contrib.__version__}: the comparison is with 2.9")
    stream, (_, cases, compare) = with_masks(make_stream(seed=1), seed=1), SCRIPTS[script]
    run = run_contrib if script == "ppo_mask" else run_recurrent
    with torch.random.fork_rng():
        theirs = run(stream, cases[case], hidden_size=16)
    compare(stream, cases[case], theirs)
