"""her_sac.py: the tests of her.py's hindsight, what train() stores, and that without hindsight it is sac.py. Its update
is compared with that of sac.py in test_exact_sac.py."""

import numpy as np
import pytest
import test_exact_her
import torch
from control import close, stored_rows
from helpers import metrics, new_run, weights
from test_exact_her import (  # noqa: F401  # they run here with her_sac.py
    test_goals_are_of_the_future_uniformly,
    test_goals_that_cannot_be_relabelled_are_told,
    test_relabelling_by_hand,
    test_where_goals_are,
)

from algos import her_sac, sac

REACH = ("--device cpu --env-id environments:Reach-v0 --num-envs 2 --hidden-size 8 --batch-size 8 --eval-every 0 "
         "--eval-episodes 2").split()  # fmt: skip


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(test_exact_her, "her", her_sac)


def test_train_stores_each_episode_and_its_hindsight(tmp_path):
    """Episodes that terminate and that are cut off, each followed by three copies for places that were reached later in
    it, with the rewards that are due there."""
    folder = new_run(her_sac, tmp_path, *REACH, "--env-kwargs", "max_episode_steps=6", "--total-timesteps", 240,
                     "--learning-starts", 4, "--her-k", 3)  # fmt: skip
    rows = stored_rows(folder)
    waiting = 240 - len(rows) / 4
    assert waiting == int(waiting) and 0 <= waiting < 12
    blocks = np.split(rows, np.flatnonzero(rows[:, 3] == 0)[1:])  # the place in column 0, the goal in 1, the time in 3
    lengths, exchanged = set(), 0
    for episode, *copies in zip(*(blocks[i::4] for i in range(4)), strict=True):
        close(episode[1:, :4], episode[:-1, 7:])
        assert len(set(episode[:, 1])) == 1 and episode[-1, 6] == (abs(episode[-1, 9]) > 3) and len(episode) <= 6
        close(episode[:, 5], -np.abs(episode[:, 9]) + (episode[:, 7] == episode[:, 1]) - 1, 1e-5)
        lengths.add((len(episode), bool(episode[-1, 6])))
        for copy in copies:
            close(np.delete(copy, [1, 5, 6, 8], 1), np.delete(episode, [1, 5, 6, 8], 1))
            close(copy[:, 1], copy[:, 8])
            close(copy[:, 5], (copy[:, 7] == copy[:, 1]) - 1.0)
            assert (copy[:, 6] == 0).all()
            assert all(goal in episode[t:, 7] for t, goal in enumerate(copy[:, 1]))
            exchanged += (copy[:, 1] != episode[:, 1]).sum()
    assert {ended for _, ended in lengths} == {False, True} and exchanged


def test_without_hindsight_a_run_is_that_of_sac(tmp_path):
    """In episodes of one step, which are stored at once: all weights and all metrics, bit for bit; with it, others."""
    args = [*REACH, "--env-kwargs", "max_episode_steps=1", "--total-timesteps", 160, "--learning-starts", 32,
            "--log-every", 32]  # fmt: skip
    same = ["--learning-rate", 3e-4, "--gamma", 0.99]
    expected = new_run(sac, tmp_path, *args, *same)
    for k in (0, 2):
        run = new_run(her_sac, tmp_path / str(k), *args, *same, "--her-k", k)
        equal = [torch.equal(tensor, weights(expected)[name]) for name, tensor in weights(run).items()]
        assert all(equal) and metrics(run) == metrics(expected) if k == 0 else not any(equal)
