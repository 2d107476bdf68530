"""Updates of C51 and Rainbow compute what CleanRL's c51.py and rainbow_atari.py do: rows and weights that are drawn,
parameters, priorities, from the same rows, weights and random numbers.

Against recorded numbers (peers/make_cleanrl_fixtures.py), as in test_parity_tianshou.py. CleanRL differs in what
follows. Each difference is shown, or put into ours here, and then the numbers are the same. CleanRL

- clips probabilities to [1e-5, 1 - 1e-5] before their logarithm, so that smaller ones have no gradient;
- starts no window in the last n - 1 steps before a termination, and lets windows reach across a cut-off;
- renews a priority with the cross-entropy, not with the divergence: both add 1e-6. It keeps them in float32;
- gives a new row the largest priority that there ever was, not the largest that there is;
- has no C51 with Double.
"""

import pytest
import torch
from parity import recorded
from test_parity_tianshou import EXACT, c51_updates, close, compare, rainbow_updates, stored

from algos import c51, rainbow
from benchmarks.peers import make_cleanrl_fixtures as cleanrl
from benchmarks.peers.make_tianshou_fixtures import GAMMA

N = cleanrl.N_STEP
INPUTS, RESULTS = recorded(cleanrl)
ROWS = [RESULTS[f"rainbow/stored/{name}"].double() for name in ("obs", "actions", "rewards", "dones", "next_obs")]
ROWS = [rows.reshape(len(rows), -1) for rows in ROWS]

pytestmark = pytest.mark.usefixtures("float64")


def theirs(p: torch.Tensor) -> torch.Tensor:
    return p.clamp(1e-5, 1 - 1e-5).log()


def scaled(columns: list[torch.Tensor]) -> list[torch.Tensor]:
    """Observations are bytes, which the network divides by 255."""
    return [column / 255 if i in (0, 4) else column for i, column in enumerate(columns)]


def test_c51(tmp_path):
    columns = scaled(stored(c51, INPUTS, tmp_path))
    compare(c51_updates(INPUTS, columns, theirs), RESULTS, "c51", INPUTS, EXACT)
    found = c51_updates(INPUTS, columns, torch.log)[-1]  # without their clip
    assert all((tensor - RESULTS[f"c51/{name}"][-1]).abs().max() > 1e4 * EXACT for name, tensor in found.items())


def test_rainbow():
    """Of the rows that CleanRL stores, all of N steps or terminated."""
    columns = [*scaled(ROWS), torch.full((len(ROWS[0]), 1), float(N))]
    states = rainbow_updates(INPUTS, columns, RESULTS["rainbow/weights"], theirs, 1e-6)
    compare(states, RESULTS, "rainbow", INPUTS, 1e-5)


def test_windows(tmp_path):
    """Ours of N steps are CleanRL's. Only we have the shorter ones before each end, and only CleanRL those of the last
    N - 1 steps before each cut-off, which go on in the next episode."""
    ours = torch.cat(stored(rainbow, INPUTS, tmp_path, "--n-step", N), 1)
    assert len(ours) == len(INPUTS["stream/obs"])
    terminated, truncated, next_obs = (INPUTS[f"stream/{name}"] for name in ("terminated", "truncated", "next_obs"))
    expected = []
    for t, row in enumerate(ours):
        end = t + int((terminated | truncated)[t:].int().argmax())  # of the episode
        if end - t >= N - 1:
            assert row[-1] == N
            expected.append(row[:-1])
        elif not terminated[end]:
            rewards = INPUTS["stream/rewards"][t : t + N]
            total, last = rewards @ GAMMA ** torch.arange(float(N)), t + N - 1
            expected.append(torch.cat([row[:4], total[None], terminated[last, None], next_obs[last]]))
    assert len(expected) < len(ours)
    close(torch.stack(expected), torch.cat(ROWS, 1))
