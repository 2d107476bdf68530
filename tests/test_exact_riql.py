"""riql.py: whole updates by tests/reference/iql.py, and what is spoilt in the data. The authors' updates:
test_parity_updates.py; what it shares with iql.py: test_exact_iql.py."""

import numpy as np
import pytest
import torch
from control import close, float64
from scipy import stats
from test_exact_iql import EXPECTILE, ONLINE, SETTINGS, recorded, trained, updated  # noqa: F401

from algos import riql
from utils.offline import Dataset


@float64()
@pytest.mark.parametrize("delta, quantile, count", [(0.0, 0.0, 2), (0.5, 0.3, 4), (2.0, 0.25, 5)])
def test_update_is_the_reference_s(delta, quantile, count):
    """Huber's loss is a parabola up to delta, and lines of slope 1 beyond. Without it, and of the smaller of two
    critics, it is iql.py's."""
    own = dict(num_critics=count, quantile=quantile, huber_delta=delta, temperature=9.0 if delta else 3.0)
    args = riql.Args(**SETTINGS | own, expectile=EXPECTILE)
    hooks = dict(q_of=lambda q, args: np.quantile(q, quantile, 0), td=lambda e, args: np.clip(e / delta, -1, 1))
    updated(riql, args, **hooks if delta else {})


def test_kurtosis_of_the_normal_distribution():
    close(riql.kurtosis(torch.tensor(stats.norm.ppf((np.arange(100_000) + 0.5) / 100_000))), 3.0, 0.01)


def small_data(n: int = 20_000) -> Dataset:
    """Observations of unlike spread; every fourth row has no next one, but a large number in its place."""
    rng = np.random.default_rng(0)
    obs, next_obs = (rng.normal(5, [1, 10], (n, 2)).astype(np.float32) for _ in range(2))
    known = np.arange(n) % 4 > 0
    next_obs[~known] = 1e4
    return Dataset(obs, obs[:, :1], obs[:, 0].copy(), obs[:, 0] > 5, next_obs, known, np.array([0]))


@pytest.mark.parametrize("corruption", ["none", "next-observations", "rewards"])
def test_corruption_changes_one_column_of_a_share_of_the_rows(corruption):
    """Next observations move by uniform noise, up to 0.5 deviations of the known ones either way, on its own in each
    number; rewards become uniform between -15 and 15. Another seed takes other rows."""
    data, before = small_data(), small_data()
    riql.corrupt(data, args := riql.Args(corruption=corruption, corruption_rate=0.2, corruption_scale=0.5, seed=3))
    spoilt = {"none": [], "next-observations": ["next_obs"], "rewards": ["rewards"]}[corruption]
    for name in ("obs", "actions", "rewards", "terminated", "next_obs", "known"):
        assert np.array_equal(getattr(data, name), getattr(before, name)) == (name not in spoilt)
    for name in spoilt:
        old, new = (getattr(x, name).reshape(len(data.obs), -1) for x in (before, data))
        rows = (old != new).any(1)
        assert abs(rows.mean() - 0.2) < 0.01
        noise = new[rows] / 15 if name == "rewards" else (new - old)[rows] / before.next_obs[before.known].std(0) / 0.5
        for column in noise[before.known[rows]].T:
            assert stats.kstest(column, stats.uniform(-1, 2).cdf).pvalue > 0.01
        assert noise.shape[1] == 1 or abs(np.corrcoef(noise[before.known[rows]].T)[0, 1]) < 0.1
        args.seed, again = 4, small_data()
        riql.corrupt(again, args)
        assert ((getattr(again, name).reshape(old.shape) != old).any(1) != rows).any()


def test_train_takes_the_spoilt_data(recorded, tmp_path, monkeypatch):  # noqa: F811
    """Before observations are scaled, and not what comes online. As many critics as were asked for."""
    path, columns = recorded
    run = trained(riql, tmp_path, path, "--corruption", "next-observations", "--corruption-rate", 1, "--num-critics", 3,
                  "--normalize", "--online-steps", ONLINE)  # fmt: skip
    mean, std = columns[0].mean(0), columns[0].std(0) + 1e-3
    close(run.added[0][0], (columns[0] - mean) / std, 1e-5)
    moved = np.abs(run.added[0][4] * std + mean - columns[4])
    assert (moved.max(0) > 0.5 * columns[4].std(0)).all() and (moved <= columns[4].std(0) * 1.001 + 1e-5).all()
    online = np.concatenate([part[4] for part in run.added[1:]])[:, 0] * std[0] + mean[0]
    close(online, online.round(), 1e-5)
    assert list(run.calls[0][0].critics) == ["q1", "q2", "q3"]
