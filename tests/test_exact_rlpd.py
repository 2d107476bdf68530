"""What rlpd.py adds to redq.py: minibatches of new rows and of the dataset's, in `draw`, in `update` and in whole runs.
Its update is tested in test_exact_redq.py; without data its run is redq.py's."""

import h5py
import numpy as np
import pytest
import torch
from control import assert_probed, without
from helpers import SMALL, command_line, metrics, new_run, user_error, weights
from scipy import stats
from small_data import pendulum
from test_exact_sac import rows_of

from algos import cql, redq, rlpd
from utils.control import ReplayBuffer


def buffer(first: int, count: int, capacity: int = 1000) -> ReplayBuffer:
    """Rows whose numbers are all the row's own."""
    made = ReplayBuffer(capacity, (2, 1, 1, 1, 2), torch.device("cpu"))
    for number in range(first, first + count):
        made.add(*(np.full((1, size), float(number)) for size in made.sizes))
    return made


def origins(online: ReplayBuffer, offline: ReplayBuffer, batches: int = 400, **flags) -> torch.Tensor:
    """The rows' numbers (batches, B); each minibatch is of whole rows."""
    args, generator = rlpd.Args(**flags), torch.Generator().manual_seed(0)
    found = []
    for _ in range(batches):
        batch = rlpd.draw(online, offline, generator, args)
        assert all((column == batch.rewards).all() for column in batch)
        found.append(batch.rewards[:, 0])
    return torch.stack(found)


@pytest.mark.parametrize("ratio, rows", [(0.5, 5), (0.2, 2), (0.0, 0), (1.0, 10)])
def test_a_minibatch_has_its_share_of_the_dataset(ratio, rows):
    """Always, however few or many rows either has; and each row of either equally often."""
    found = origins(buffer(0, 7), buffer(100, 40), batch_size=10, offline_ratio=ratio).long()
    assert ((found >= 100).sum(1) == rows).all()
    for first, count, part in ((0, 7, found[found < 100]), (100, 40, found[found >= 100])):
        if len(part):
            assert stats.chisquare(torch.bincount(part - first, minlength=count)).pvalue > 1e-3


def test_without_a_ratio_it_is_one_buffer():
    """The dataset's share is that of its rows: of 10 rows with 30 of its own and 60, then 10 that are held, new."""
    for held, rows in ((60, 3), (10, 8)):
        found = origins(buffer(0, 60, capacity=held), buffer(100, 30), batch_size=10, offline_ratio=None)
        assert ((found >= 100).sum(1) == rows).all()
        assert found[found < 100].min() >= 60 - held


def test_without_data_a_run_is_that_of_redq(tmp_path):
    """--offline-ratio 0: all weights and all metrics, bit for bit; with data, others."""
    data = pendulum(tmp_path / "data.hdf5")
    common = ("--device cpu --num-envs 2 --total-timesteps 160 --learning-starts 32 --batch-size 8 --hidden-size 8 "
              "--log-every 32 --eval-every 64 --eval-episodes 2 --num-critics 3 --subset-size 2 --utd-ratio 3 "
              "--env-id Pendulum-v1 --env-kwargs max_episode_steps=40").split()  # fmt: skip
    expected = new_run(redq, tmp_path, *common, "--target-entropy", -0.5, "--layer-norm")
    for ratio in (0, 0.5):
        run = new_run(rlpd, tmp_path / str(ratio), *common, "--dataset", data, "--offline-ratio", ratio)
        ours = without(without(metrics(run), "eval/score"), "eval/best")
        assert (ours == without(without(metrics(expected), "eval/score"), "eval/best")) == (ratio == 0)
        same = [torch.equal(tensor, weights(expected)[name]) for name, tensor in weights(run).items()]
        assert all(same) if ratio == 0 else not any(same)


def test_a_run_of_cql_goes_on(tmp_path, monkeypatch, capsys):
    """--init: its actor makes the first --learning-starts steps, and all weights are still that run's, bit for
    bit. Who resumes needs that run no longer."""
    small = *SMALL["rlpd"], "--env-id", "Pendulum-v1", "--dataset", pendulum(tmp_path / "data.hdf5"), "--eval-every", 0
    scaled, start = (
        new_run(cql, tmp_path / "start", *SMALL["cql"], *small[-6:], *raw) for raw in ((), ["--no-normalize"])
    )
    scales, act = [], rlpd.act
    monkeypatch.setattr(rlpd, "act", lambda *x: scales.append(x[3]) or act(*x))
    here = *small, "--init", start, "--no-layer-norm", "--total-timesteps", 20, "--learning-starts"
    same = weights(new_run(rlpd, tmp_path / "same", *here, 20))
    assert all(
        torch.equal(tensor, same[name]) for name, tensor in weights(start).items() if not name.startswith("obs_")
    )
    assert sum(isinstance(scale, float) for scale in scales) == 10  # of two environments
    run = new_run(rlpd, tmp_path / "fixed", *here, 10, "--alpha", 0.5)
    fixed = weights(run)
    assert fixed["log_alpha"].exp() == pytest.approx(0.5)
    assert not torch.equal(fixed["critics.q1.0.weight"], same["critics.q1.0.weight"])
    for flags, *said in ((["--init", scaled], "--no-normalize"), (["--layer-norm"], "other networks"),
                         (["--gamma", 0.9], "is 0.9:", "0.99"),
                         (["--env-id", "gymnasium:Pendulum-v1"], "is gymnasium:", "be Pendulum-v1"),
                         (["--env-kwargs", "g=5"], "g=5", "[]")):  # fmt: skip
        with user_error(capsys, "--init", *said):
            new_run(rlpd, tmp_path / "wrong", *here, 10, *flags)
    start.rename(tmp_path / "moved")
    command_line(rlpd, "--resume", run, "--total-timesteps", 24)
    assert metrics(run)[-1]["step"] == 24


@pytest.mark.parametrize("last", [True, False])
def test_train_learns_from_both(last, tmp_path, monkeypatch):
    """Each update has as many rows of the dataset as new ones, true transitions all of them, in units of [-1, 1], and
    never terminated where the time was up. Without the last observations, time-outs are left out, and what follows a
    row that terminated is not to be known."""
    path, calls, update = pendulum(tmp_path / "data.hdf5", "environments:Probe-v0", length=5), [], rlpd.update
    with h5py.File(path, "a") as file:
        known = np.ones(len(file["rewards"]), bool) if last else ~file["timeouts"][()]
        known[-1] &= last
        if not last:
            del file["last_observations"]
        obs = file["observations"][()][known]
        assert file["timeouts"][()].any() and file["terminals"][()].any()

    def recording(agent, optimizers, batch, generator, args, *others):
        calls.append((batch, args))
        return update(agent, optimizers, batch, generator, args, *others)

    monkeypatch.setattr(rlpd, "update", recording)
    folder = new_run(rlpd, tmp_path, *("--device cpu --env-id environments:Probe-v0 --total-timesteps 160 --num-envs 2 "
                     "--learning-starts 41 --hidden-size 8 --batch-size 16 --eval-episodes 2 --eval-every 0 "
                     "--utd-ratio 3").split(), "--dataset", path)  # fmt: skip
    columns = rows_of(folder)
    new, seen = {tuple(row) for row in np.concatenate(columns, 1)}, []
    assert len(calls) == 3 * 120
    for batch, args in calls:
        assert args.target_entropy == -1 and args.policy_frequency == 3
        followed = (batch.terminated[:, 0] == 0) | last
        assert_probed(*(x[followed].numpy() for x in batch))
        assert all(tuple(row) in new for row in torch.cat(batch, 1)[:8].numpy())
        seen += [tuple(row) for row in batch.obs[8:].tolist()]
    assert set(seen) == {tuple(row) for row in obs.tolist()}
