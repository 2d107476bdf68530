"""What HER stores of episodes of BitFlip-v0, and its hindsight, are what Stable-Baselines3 stores of its BitFlippingEnv
and makes of that, from the same first states, actions and uniform numbers. Updates: test_parity_updates.py.

Against recorded numbers (peers/make_sb3_her_fixtures.py) always, against the installed SB3 where there is one. SB3
relabels what it samples, and we what we store: here it relabels every step as often as we do. It differs in the end of
an episode, which it leaves where the original goal had it; ours is where the further goal is reached.
"""

import gymnasium as gym
import numpy as np
import torch
from helpers import new_run
from parity import recorded

from algos import her
from algos.her import BitFlip
from benchmarks.peers import make_sb3_her_fixtures as sb3
from benchmarks.peers.make_sb3_her_fixtures import EPISODES, K, N
from utils.control import ReplayBuffer

SIZES = (3 * N, 1, 1, 1, 3 * N)


def ours(inputs: dict, steps: int, tmp_path, patch) -> torch.Tensor:
    """(1 + K, steps, size): what train() stores of the same steps, and of their hindsight."""
    begun, lengths, buffers, find_goals = [], [], [], her.find_goals

    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        begun.append(self)
        self.time, self.goal = 0, np.ones(N, np.float32)
        self.bits = inputs["states"][(len(begun) - 1) % EPISODES].numpy().astype(np.float32)
        return self.observe(), {}

    def found(*args):
        goals = find_goals(*args)
        begun.clear()  # it plays a step
        return goals

    def kept(*args):
        buffers.append(ReplayBuffer(*args))
        return buffers[0]

    def rand(k, length, **_):
        lengths.append(length)
        return inputs["uniform"][:k, sum(lengths) - length : sum(lengths)]

    patch.setattr(BitFlip, "reset", reset)
    patch.setattr(her, "find_goals", found)
    patch.setattr(her, "ReplayBuffer", kept)
    patch.setattr(her, "act", lambda *_: inputs["actions"][len(begun) - 1, begun[-1].time].numpy().reshape(1, 1))
    patch.setattr(her, "evaluate", lambda *_: {})
    patch.setattr(torch, "rand", rand)
    new_run(her, tmp_path, "--device", "cpu", "--env-kwargs", f"n={N}", "--her-k", K, "--total-timesteps", steps,
            "--learning-starts", steps)  # fmt: skip
    assert buffers[0].total == (1 + K) * steps and len(lengths) == EPISODES and min(lengths) < max(lengths) == N
    episodes = buffers[0].rows[: buffers[0].total].split([(1 + K) * length for length in lengths])
    return torch.cat([rows.unflatten(0, (1 + K, -1)) for rows in episodes], 1)


def compare(inputs: dict, theirs: torch.Tensor, tmp_path, patch) -> None:
    found = ours(inputs, theirs.shape[1], tmp_path, patch)
    (*mine, ends, after), (*their, kept, then) = found.split(SIZES, 2), theirs.split(SIZES, 2)
    for part, other in zip((*mine, after), (*their, then)):
        assert torch.equal(part, other)
    assert torch.equal(ends[0], kept[0]), "without hindsight"
    assert torch.equal(kept[1:], kept[:1].expand(K, -1, -1)), "SB3's, of the original goal"
    assert torch.equal(ends, (after[..., :N] == after[..., N : 2 * N]).all(-1, keepdim=True).float())
    assert (ends[1:] > kept[1:]).any() and (ends[1:] < kept[1:]).sum() == 0
    assert not torch.equal(mine[0][1:], mine[0][:1].expand(K, -1, -1)), "no goal was changed"


def test_recorded(tmp_path, monkeypatch):
    inputs, theirs = recorded(sb3)
    compare(inputs, theirs["rows"], tmp_path, monkeypatch)


def test_live(needs_sb3, tmp_path, monkeypatch):
    """The same against the installed SB3, on inputs other than the recorded ones."""
    inputs = sb3.make_inputs(seed=1)
    compare(inputs, sb3.results(inputs), tmp_path, monkeypatch)
