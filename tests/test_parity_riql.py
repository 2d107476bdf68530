"""Updates of riql.py are those of the authors' code, commit cc07d81, from the same weights and rows.
Recorded by benchmarks/peers/make_riql_fixtures.py."""

import pytest
import torch
from safetensors.torch import load_file

from algos import riql
from benchmarks.peers import make_riql_fixtures as authors

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("learner", authors.RATES)
def test_updates(learner):
    """All parameters; some errors lie on the parabola of Huber's loss, some on its lines."""
    recorded = load_file(authors.PATH)
    for name, column in authors.make_inputs().items():
        assert (recorded[name].numpy() == column).all(), "the fixture is of other inputs"
    args = riql.Args(gamma=authors.GAMMA, tau=authors.TAU, quantile=authors.QUANTILE, expectile=authors.EXPECTILE,
                     temperature=3.0, huber_delta=1 / authors.SIGMA**2, hidden_size=authors.H, dropout=0.0)  # fmt: skip
    agent = riql.Agent(authors.D, authors.A, args)
    names = [name for name in agent.state_dict() if "obs_" not in name]
    agent.load_state_dict({name: recorded[f"{learner}/{name}"][0] for name in names}, strict=False)
    parts = zip((agent.actor, agent.critics, agent.value), authors.RATES[learner])
    optimizers = riql.Optimizers(*(torch.optim.Adam(part.parameters(), rate) for part, rate in parts))
    optimizers.critics.param_groups[0]["eps"] *= authors.K  # their loss is a mean over critics, ours a sum
    for i in range(authors.UPDATES):
        batch = riql.Transitions(*(recorded[name][i] for name in riql.Transitions._fields))
        with torch.no_grad():
            target = batch.rewards + args.gamma * (1 - batch.terminated) * agent.value(batch.next_obs)
            small = (agent.critics(batch.obs, batch.actions) - target).abs() < args.huber_delta
        assert 0 < small.float().mean() < 1
        riql.update(agent, optimizers, batch, args)
        for name in names:
            torch.testing.assert_close(
                agent.state_dict()[name], recorded[f"{learner}/{name}"][i + 1], rtol=0, atol=1e-9
            )
