"""REINFORCE++'s advantages beside verl's and OpenRLHF's, which peers/make_reinforce_pp_fixtures.py recorded."""

import pytest
import torch
from parity import recorded

from algos import reinforce_pp
from benchmarks.peers import make_reinforce_pp_fixtures as peers
from utils.dist import Samples


def ours(data: dict, baseline: str) -> torch.Tensor:
    """With the penalty in the reward where there is no baseline of groups, as all have it here."""
    mask, none = data["mask"], torch.zeros(0)
    samples = Samples(none, none, none, mask, data["logps"], none)
    batch = reinforce_pp.Batch(samples, data["rewards"], data["ref"])
    args = reinforce_pp.Args(num_generations=peers.G, baseline=baseline, beta=peers.BETA)
    return reinforce_pp.advantages(batch, mask, args)


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_advantages_are_verl_s_and_openrlhf_s(baseline):
    """verl's to rounding of its 1e-8 per token. OpenRLHF's variance is biased, and its numbers are float32."""
    data, theirs = recorded(peers)
    suffix, n = " group" if baseline == "group" else "", data["mask"].sum()
    found = ours(data, baseline)
    torch.testing.assert_close(found, theirs[f"verl{suffix}"], rtol=0, atol=1e-7)
    biased = found * (n / (n - 1)).sqrt()
    torch.testing.assert_close(biased, theirs[f"openrlhf{suffix}"], rtol=0, atol=1e-5)
    assert (biased - found).abs().max() > 1e-3
