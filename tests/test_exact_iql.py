"""iql.py and bc.py against numbers computed another way: the fixed point of the expectile backup by root finding, whole
updates by tests/reference/iql.py, and what train() does by an environment that tells what happened."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from control import CONTROL, assert_in_order, assert_probed, close, float64, minibatch, mlp, named, randomise
from every_script import sharing
from helpers import metrics, new_run, weights
from scipy import optimize, stats
from torch import nn

from algos import awac, bc, cfgrl, flow_bc, fql, iql, riql, xql
from benchmarks.record_suite import save
from tests.reference import iql as reference
from utils.control import ReplayBuffer
from utils.core import UserError
from utils.offline import Dataset

D, A, H, B = 3, 2, 8, 16  # observations, actions, hidden units, rows of a minibatch
GAMMA, EXPECTILE = 0.9, 0.8
SETTINGS = dict(gamma=GAMMA, tau=0.1, temperature=3.0, hidden_size=H, dropout=0.0)


# --- a finite MDP, whose best in-support behaviour no trajectory shows

STATES, END = 6, 5
POINTS = np.array([[-0.8, -0.5], [0.7, -0.2], [0.1, 0.9]])  # the three actions
TRAJECTORIES = [  # how often; steps of (state, action, reward, next state, terminated)
    (4, [(0, 0, 0.0, 1, 0), (1, 0, 2.5, END, 1)]),  # what is mostly done in state 0
    (3, [(0, 1, 0.0, 2, 0), (2, 0, 2.0, END, 1)]),  # the good first action, then the bad one
    (2, [(3, 2, 0.5, 2, 0), (2, 1, 0.0, 4, 0), (4, 0, 0.3, 4, 0)]),  # the good second one; cut off in state 4
    (1, [(3, 2, 0.0, END, 1)]),  # the same action may also end it: Q is a mean over outcomes
]
ROWS = np.array([step for count, steps in TRAJECTORIES for step in steps * count])
STATE, ACTION, NEXT = (ROWS[:, i].astype(int) for i in (0, 1, 3))
REWARD, TERMINATED = ROWS[:, 2], ROWS[:, 4]
PAIRS = sorted(set(zip(STATE, ACTION)))
MAJORITY = {state: np.bincount(ACTION[STATE == state]).argmax() for state in range(END)}


def mdp_batch() -> iql.Transitions:
    one_hot, column = np.eye(STATES), [x[:, None] for x in (REWARD, TERMINATED)]
    return iql.Transitions(*map(torch.tensor, (one_hot[STATE], POINTS[ACTION], *column, one_hot[NEXT])))


def expectile_of(values: np.ndarray, expectile: float) -> float:

    def slope(v):
        return (np.where(values > v, expectile, 1 - expectile) * (values - v)).sum()

    low, high = values.min(), values.max()
    return low if low == high else optimize.brentq(slope, low, high, xtol=1e-14)


def fixed_point(summary) -> tuple[np.ndarray, dict]:
    """V (states,) and Q by pair: Q the mean of r + gamma V(s') where it did not end, V summary(Q of the rows of s)."""
    v = np.zeros(STATES)
    for _ in range(300):
        y = np.where(TERMINATED == 1, REWARD, REWARD + GAMMA * v[NEXT])
        q = {pair: y[(STATE == pair[0]) & (ACTION == pair[1])].mean() for pair in PAIRS}
        rows = np.array([q[pair] for pair in zip(STATE, ACTION)])
        v = np.array([summary(rows[state == STATE]) for state in range(END)] + [0.0])
    return v, q


def expectile_fixed_point(expectile: float):
    return fixed_point(lambda values: expectile_of(values, expectile))


class Tables(nn.Module):
    """Two Q's, one number for each state and action. They begin below what is learnt, as V does: from above, V would
    come down at the pace of 1 - expectile."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.q1, self.q2 = (nn.Parameter(-torch.rand(STATES, len(POINTS), generator=generator)) for _ in range(2))

    def forward(self, obs, actions):
        pair = obs.argmax(1), torch.cdist(actions, torch.tensor(POINTS)).argmin(1)
        return self.q1[pair][:, None], self.q2[pair][:, None]


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.tensor([0.0] * END + [7.0]))  # END keeps it: a bootstrap from it would show

    def forward(self, obs):
        return self.v[obs.argmax(1)][:, None]


@pytest.fixture(scope="module")
@float64()
def learnt():
    """Expectile -> agent after 350 updates with tables as critics and value. Plain gradient steps, each cell's times
    rows / (2 rows of the cell): then a step of a Q table is the mean of its targets."""
    agents, batch = {}, mdp_batch()
    counts = torch.zeros(STATES, len(POINTS))
    for pair in zip(STATE, ACTION):
        counts[pair] += 1
    for expectile in (0.5, 0.7, 0.9, 0.99):
        torch.manual_seed(0)
        args = iql.Args(gamma=GAMMA, tau=1.0, expectile=expectile, temperature=10.0, dropout=0.0, hidden_size=16)
        agents[expectile] = agent = iql.Agent(STATES, A, args)
        agent.critics, agent.targets, agent.value = Tables(1), Tables(2).requires_grad_(False), Table()
        for table in agent.critics.parameters():
            table.register_hook(lambda g: g * len(ROWS) / 2 / counts.clamp(min=1))
        scale = len(ROWS) / 2 / counts.sum(1).clamp(min=1) / max(expectile, 1 - expectile)
        agent.value.v.register_hook(lambda g, scale=scale: g * scale)
        optimizers = iql.Optimizers(torch.optim.Adam(agent.actor.parameters(), 2e-2),
                                    torch.optim.SGD(agent.critics.parameters(), 1.0),
                                    torch.optim.SGD(agent.value.parameters(), 1.0))  # fmt: skip
        for _ in range(350):
            iql.update(agent, optimizers, batch, args)
    return agents


@float64()
@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.9, 0.99])
def test_update_converges_to_the_expectile_fixed_point(learnt, expectile):
    """V and both Q's; ended steps do not look at V(END), the cut off one in state 4 is worth 0.3 / (1 - gamma)."""
    agent, (v, q) = learnt[expectile], expectile_fixed_point(expectile)
    close(agent.value.v[:END], v[:END], 1e-6)
    close(agent.value.v[END], 7.0)
    for table in (*agent.critics.parameters(), *agent.targets.parameters()):
        close([table[pair].item() for pair in PAIRS], [q[pair] for pair in PAIRS], 1e-6)
    close(v[4], 3.0, 1e-6)


def greedy(q: dict) -> dict:
    return {s: max((a for state, a in PAIRS if state == s), key=lambda a: q[s, a]) for s in range(END)}


def test_value_approaches_in_support_value_iteration(learnt):
    """The distance falls with the expectile, from far off at 1/2, where V is that of the behaviour, to below 1 %. The
    best first step pays only with the second step of another trajectory: expectile 1/2 does not find it."""
    best, best_q = fixed_point(np.max)
    distances = []
    for expectile, agent in learnt.items():
        v = np.append(agent.value.v.detach()[:END], 0)
        distances.append(np.abs(v - best).max() / best.max())
        assert expectile > 0.5 or distances[-1] > 0.05
    assert distances == sorted(distances, reverse=True) and distances[-1] < 0.01
    assert expectile_fixed_point(0.9999)[0] == pytest.approx(best, rel=1e-4)

    mean, mean_q = fixed_point(np.mean)
    close(learnt[0.5].value.v[:END], mean[:END], 1e-6)
    assert greedy(best_q)[0] == greedy(best_q)[2] == 1 and MAJORITY[0] == MAJORITY[2] == 0
    chosen = {e: greedy({p: agent.critics.q1[p].item() for p in PAIRS}) for e, agent in learnt.items()}
    assert chosen[0.5] == greedy(mean_q) and chosen[0.5][0] == 0
    assert chosen[0.9] == chosen[0.99] == greedy(best_q)


# --- whole updates


def updated(module, args, *extra, own=reference.update, **hooks) -> list[dict]:
    """Asserts that five updates of a script are those of tests/reference/iql.py, where weights are on both sides of
    100 if it is IQL's."""
    found = reference.check(
        randomise(module.Agent(D, A, args), 50, 0.5, 0.2),
        lambda p, batch, rate: own(p, batch, args, rate, **hooks),
        lambda agent, optimizers, batch: module.update(agent, module.Optimizers(**optimizers), batch, *extra, args),
        [minibatch(module.Transitions, step) for step in range(5)],
    )
    assert 0 < sum(row["clipped"] for row in found) < 5 or own != reference.update
    return found


def quantile(errors, args) -> np.ndarray:
    return abs(args.expectile - (errors < 0)) * np.sign(errors)


@float64()
@pytest.mark.parametrize("kind", ["expectile", "quantile"])
def test_update_is_the_reference_s(kind):
    updated(iql, iql.Args(**SETTINGS, expectile=EXPECTILE, value_loss=kind), value=getattr(reference, kind, quantile))


@float64()
def test_the_quantile_is_that_of_f_dvl():
    """Least at the quantile, and at lambda's V of f-DVL with total variation: lambda max(u, 0) - (1 - lambda) u."""
    values, weight = torch.tensor([-3.0, 0.0, 1.0, 2.0, 9.0]), 0.7
    losses = [iql.value_loss(values - v, 2 - 1 / weight, "quantile") for v in values]
    theirs = [(weight * (values - v).clamp(min=0) - (1 - weight) * (values - v)).mean() for v in values]
    close(torch.stack(losses) * weight, torch.stack(theirs))
    assert np.argmin(losses) == 2 and values[2] == np.quantile(values, 2 - 1 / weight, method="inverted_cdf")


# --- temperature 0 is behaviour cloning


def test_temperature_0_is_behaviour_cloning():
    """Bit for bit, whatever the advantages: the metrics, and the actor after three updates."""
    args, adam = iql.Args(**SETTINGS | dict(temperature=0.0), expectile=0.7), partial(torch.optim.Adam, lr=1e-2)
    agent, cloner = randomise(iql.Agent(D, A, args), 50, 0.5, 0.2), bc.Agent(D, A, bc.Args(hidden_size=H))
    cloner.actor.load_state_dict(agent.actor.state_dict())
    optimizers = iql.Optimizers(*(adam(part.parameters()) for part in (agent.actor, agent.critics, agent.value)))
    optimizer, before = adam(cloner.actor.parameters()), copy.deepcopy(agent.actor.state_dict())
    for step in range(3):
        numbers = iql.update(agent, optimizers, minibatch(iql.Transitions, step), args)
        own = bc.update(cloner, optimizer, bc.Transitions(*minibatch(iql.Transitions, step)))
        assert {name: numbers[name] for name in own} == own
    for name, tensor in cloner.actor.state_dict().items():
        assert torch.equal(agent.actor.state_dict()[name], tensor) and not torch.equal(before[name], tensor)


# --- the policy


def on(root: str, *functions: str):
    """The scripts that have functions of these names and parameters, as `module`."""
    scripts = sharing(root, *functions)
    return pytest.mark.parametrize("module", [CONTROL[script] for script in scripts], ids=scripts)


modules, learners, takers = on("bc", "act"), on("iql", "update"), on("bc", "top_rows")
cloners = pytest.mark.parametrize("module", [bc, flow_bc], ids=["bc", "flow_bc"])
every_module = pytest.mark.parametrize(
    "module", [iql, bc, flow_bc, cfgrl, fql, xql, riql], ids=["iql", "bc", "flow_bc", "cfgrl", "fql", "xql", "riql"]
)


def make_actor(module, log_std, dropout: float = 0.0):
    torch.manual_seed(5)
    actor = module.Actor(D, A, H, *[dropout] * (module is not awac))
    with torch.no_grad():
        actor.log_std.copy_(torch.tensor(log_std))
        actor.net[-1].bias.copy_(torch.tensor([0.3, -0.8]))
    return actor


@float64()
@modules
@pytest.mark.parametrize(
    "raw, bounded", [((-0.5, 0.4), (-0.5, 0.4)), ((-9.0, 1.9), (-5.0, 1.9)), ((-4.9, 3.0), (-4.9, 2.0))]
)
def test_density_is_normal_with_a_bounded_std(module, raw, bounded):
    """Mean tanh of the network, for any state the same log std; one beyond [-5, 2] counts as the bound."""
    actor, batch = make_actor(module, raw), minibatch(iql.Transitions)
    mean, log_std = actor(batch.obs)
    close(log_std, bounded, 1e-15)
    close(mean, torch.tanh(mlp(named(actor), "net", batch.obs)))
    expected = torch.distributions.Normal(mean, torch.tensor(bounded).exp()).log_prob(batch.actions).sum(1)
    assert actor.log_prob(batch.obs, batch.actions).shape == (B, 1)
    close(actor.log_prob(batch.obs, batch.actions)[:, 0], expected)


@modules
def test_act_samples_the_policy(module):
    """Scale 0: the mean; scale 1: mean + std x noise, clipped to [-1, 1]. No unit is dropped, as it is in training."""
    actor, generator = make_actor(module, [-2.5, 2.0], dropout=0.5), torch.Generator().manual_seed(0)
    obs = np.tile([[0.3, -1.0, 0.5]], (4000, 1))  # float64, as MuJoCo's
    mean = torch.tanh(mlp(named(actor), "net", torch.tensor(obs[0]).float())).detach().numpy()
    close(module.act(actor, None, obs, 0.0, generator), np.tile(mean, (4000, 1)), 1e-6)
    assert module is awac or actor.training and len(actor(torch.tensor(obs).float())[0].unique(dim=0)) > 10
    actions = module.act(actor, None, obs, 1.0, generator)
    assert actions.dtype == np.float32 and np.abs(actions).max() == 1
    assert stats.kstest(actions[:, 0], stats.norm(mean[0], math.exp(-2.5)).cdf).pvalue > 0.01
    below = stats.norm(mean[1], math.exp(2.0)).cdf([-1, 1])
    close([(actions[:, 1] == -1).mean(), (actions[:, 1] < 1).mean()], below, 0.03)
    close(module.act(actor, None, obs[:2], torch.tensor([[0.0], [1.0]]), generator)[0], mean, 1e-6)


# --- the rows and rewards that are taken


def dataset(lengths, rewards, known=None) -> Dataset:
    n = len(rewards)
    obs, starts = np.zeros((n, 1), np.float32), np.cumsum([0, *lengths[:-1]])
    rewards = np.array(rewards, np.float32)
    known = np.ones(n, bool) if known is None else np.array(known)
    return Dataset(obs, obs, rewards, np.zeros(n, bool), obs, known, starts, name="test")


def test_reward_map_by_hand():
    """Factor and summand of the three treatments. The range of returns is that of the rows that are trained on."""
    data = dataset([2, 3, 1], [1, 2, -1, -1, 0, 5])  # returns 3, -2, 5
    assert iql.reward_map(data, "raw") == (1, 0)
    assert iql.reward_map(data, "minus-one") == (1, -1)
    assert iql.reward_map(data, "return-range") == (pytest.approx(1000 / 7), 0)
    cut = dataset([2, 3, 1], [1, 2, -1, -1, 0, 5], [1, 1, 1, 1, 1, 0] > np.zeros(6))  # returns 3, -2, 0
    assert iql.reward_map(cut, "return-range") == (pytest.approx(1000 / 5), 0)
    with pytest.raises(UserError, match="--rewards raw"):
        iql.reward_map(dataset([1, 2], [3, 1, 2]), "return-range")


@pytest.mark.parametrize(
    "fraction, kept",
    [
        (1.0, [0, 1, 2, 3]),
        (0.95, [1, 3, 0]),  # 9 rows would be all of the 9.5 allowed; the last trajectory has one more
        (0.9, [1, 3]),  # 9 rows are not below 9
        (0.51, [1, 3]),  # 5 rows are below 5.1
        (0.5, [1]),  # but not below 5
        (0.31, [1]),
        (0.01, [1]),  # the best one is always kept, however long
    ],
)
def test_top_rows_by_hand(fraction, kept):
    """10 rows in trajectories of 4, 3, 1, 2 rows with returns 2, 9, -1, 3: a share of the rows, not of trajectories."""
    data = dataset([4, 3, 1, 2], [2, 0, 0, 0, 10, 0, -1, -1, 3, 0])
    rows = data.top_rows(fraction)
    assert rows.dtype == bool
    assert rows.tolist() == [number in kept for number in [0, 0, 0, 0, 1, 1, 1, 2, 3, 3]]


def test_top_rows_do_not_skip_a_long_trajectory():
    """The first that does not fit ends it, though shorter and worse ones would."""
    data = dataset([2, 5, 1, 2], [9, 0, 8, 0, 0, 0, 0, 7, 6, 0])
    assert data.top_rows(0.45).tolist() == [True] * 2 + [False] * 8


def test_top_rows_of_equal_returns():
    data = dataset([1] * 200, [1.0] * 100 + [2.0] * 100)
    assert np.flatnonzero(data.top_rows(0.255)).tolist() == list(range(100, 150))


# --- train()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    env, rows = gym.make("environments:Probe-v0"), []
    env.action_space.seed(0)
    for episode in range(12):
        obs, over = env.reset(seed=episode)[0], False
        while not over:
            action = env.action_space.sample()
            next_obs, reward, terminated, truncated, _ = env.step(action)
            rows.append((obs, action, np.float32(reward), terminated, truncated, next_obs))
            obs, over = next_obs, terminated or truncated
    obs, actions, rewards, terminals, timeouts, next_obs = (np.array(column) for column in zip(*rows))
    columns = [obs, actions, rewards, terminals, next_obs, terminals | timeouts]
    path = tmp_path_factory.mktemp("data") / "probe.hdf5"
    save(path, {"env_id": "environments:Probe-v0"}, rows)
    assert 0 < columns[3].sum() < 12  # some terminated, some were cut off
    return path, columns


def trained(module, folder, path, *flags):
    """A run with everything it added to its buffer, the calls of `update` and the learning rates at each."""
    added, calls, rates, update = [], [], [], module.update

    class Spy(ReplayBuffer):
        def add(self, *parts):
            added.append([np.array(part, np.float64) for part in parts])
            super().add(*parts)

    def recording(agent, optimizers, batch, *others):
        calls.append((agent, optimizers, batch, *others))
        several = optimizers if isinstance(optimizers, tuple) else [optimizers]
        rates.append([group["lr"] for optimizer in several for group in optimizer.param_groups])
        return update(agent, optimizers, batch, *others)

    flags = [*["--no-normalize"][: module is riql], *flags]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "update", recording)
        patch.setattr(module, "ReplayBuffer", Spy)
        run = new_run(module, folder, *SMALL_RUN, "--dataset", path, *flags)
    return SimpleNamespace(folder=run, added=added, calls=calls, rates=np.array(rates))


SMALL_RUN = "--device cpu --hidden-size 8 --batch-size 16 --eval-episodes 1 --eval-every 0 --max-steps 8".split()
ONLINE = 40


def episodes_of(ends: np.ndarray) -> np.ndarray:
    return np.cumsum(np.append(0, ends[:-1]))


def own_treatment(columns, treatment: str) -> tuple[float, float]:
    returns = np.bincount(episodes_of(columns[5]), weights=columns[2].astype(np.float64))
    return {"raw": (1, 0), "minus-one": (1, -1), "return-range": (1000 / (returns.max() - returns.min()), 0)}[treatment]


@pytest.mark.parametrize("module, treatment, normalize", [
    *[(module, *how) for module in (iql, xql, riql) for how in (("raw", 0), ("minus-one", 0), ("return-range", 1))],
    (awac, "raw", 0), (awac, "raw", 1)], ids=lambda x: x.NAME if hasattr(x, "NAME") else None)  # fmt: skip
def test_train_stores_the_dataset_and_then_what_it_lives(recorded, tmp_path, monkeypatch, module, treatment, normalize):
    """The dataset's rows with actions in [-1, 1]; then, online, one row a step as the environment went: the last
    observation of an episode and not the next one's first, terminated but not cut off, rewards like the dataset's.
    With --normalize all observations, also those that it acts on, are less the dataset's mean, over its deviation. Each
    optimizer is Adam on exactly its part."""
    (path, columns), acted, act = recorded, [], module.act
    monkeypatch.setattr(module, "act", lambda actor, space, *rest: acted.append(rest) or act(actor, space, *rest))
    flags = ["--normalize"] * normalize + ["--rewards", treatment] * (module is not awac)
    run = trained(module, tmp_path, path, "--online-steps", ONLINE, *flags)
    mean, std = (columns[0].mean(0), columns[0].std(0) + 1e-3) if normalize else (np.zeros(4), np.ones(4))
    factor, summand = own_treatment(columns, treatment)
    obs, actions, rewards, terminated, next_obs = run.added[0]
    close(obs, (columns[0] - mean) / std, 1e-5)
    close([-1, 2] + (actions + 1) / 2 * [4, 0.5], columns[1], 1e-6)
    assert np.abs(actions).max() <= 1
    close(rewards[:, 0], factor * columns[2] + summand, 1e-6 * factor * 100)
    close(terminated[:, 0], columns[3])
    close(next_obs, (columns[4] - mean) / std, 1e-5)

    assert len(run.added) == 1 + ONLINE and len(run.calls) == 8 + ONLINE
    online = [np.concatenate(column) for column in zip(*run.added[1:])]
    close(np.concatenate([obs for obs, scale, _ in acted if isinstance(scale, float)]), online[0], 1e-6)
    steps = np.concatenate([obs for obs, scale, _ in acted if not isinstance(scale, float)])[:, 0] * std[0] + mean[0]
    close(steps, steps.round(), 1e-5)  # of the evaluations' episodes
    online[0], online[4] = ((part * std + mean).round(5) for part in (online[0], online[4]))
    assert len(np.unique(online[1])) > ONLINE
    assert_probed(*online, factor, summand)
    assert_in_order(*online)
    rows = {tuple(np.float32(np.concatenate(row))): i for i, row in enumerate(
        row for parts in run.added for row in zip(*parts))}  # fmt: skip
    agent, optimizers, batch, *_ = run.calls[0]
    assert torch.cat(batch, 1).shape == (16, 4 + 2 + 1 + 1 + 4)
    seen = [rows[tuple(row.tolist())] for _, _, batch, *_ in run.calls for row in torch.cat(batch, 1)]
    assert max(seen[: 8 * 16]) < len(columns[0]) <= max(seen) and min(seen[-10 * 16 :]) < 20  # the oldest stay
    for name, optimizer in optimizers._asdict().items():
        (group,) = optimizer.param_groups
        assert [id(x) for x in group["params"]] == [id(x) for x in getattr(agent, name).parameters()]
        assert type(optimizer) is torch.optim.Adam
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-8, 0)
    for target, critic in zip(agent.targets.parameters(), agent.critics.parameters()):
        assert not torch.equal(target, critic)


def test_target_critics_begin_as_the_critics():
    agent = iql.Agent(D, A, iql.Args(hidden_size=H, dropout=0.0))
    pairs = list(zip(agent.targets.parameters(), agent.critics.parameters()))
    assert all(torch.equal(target, critic) and target is not critic for target, critic in pairs)
    assert not torch.equal(agent.critics.q1[0].weight, agent.critics.q2[0].weight)


AUTHORS = {  # expectile, temperature, dropout, rewards of the authors' configurations
    "mujoco": (0.7, 3.0, 0.0, "return-range"),
    "antmaze": (0.9, 10.0, 0.0, "minus-one"),
    "kitchen": (0.7, 0.5, 0.1, "raw"),
    "adroit": (0.7, 0.5, 0.1, "raw"),
}


@learners
@pytest.mark.parametrize("domain", AUTHORS)
def test_domain_fills_in_what_is_not_given(recorded, tmp_path, domain, module):
    chosen = lambda args: (args.temperature, args.dropout, args.rewards)  # noqa: E731
    run = trained(module, tmp_path, recorded[0], "--domain", domain)
    agent, *_, args = run.calls[0]
    *others, rewards = AUTHORS[domain]
    rewards = "raw" if (module, domain) == (riql, "mujoco") else rewards
    assert (getattr(args, "expectile", AUTHORS[domain][0]), *chosen(args)) == (*others, rewards)
    assert [m.p for m in agent.actor.modules() if isinstance(m, nn.Dropout)] == [args.dropout]
    assert not any(isinstance(m, nn.Dropout) and m.p for part in (agent.critics, agent.value) for m in part.modules())
    given = ["--temperature", 0, "--dropout", 0, "--rewards", "raw", *["--expectile", 0.6][: 2 * (module is not xql)]]
    args = trained(module, tmp_path, recorded[0], "--domain", domain, *given).calls[0][-1]
    assert (getattr(args, "expectile", 0.6), *chosen(args)) == (0.6, 0, 0, "raw")


@cloners
def test_cloning_takes_the_best_trajectories(recorded, tmp_path, module):
    """The rows of the highest returns; a constant learning rate; only the policy is trained."""
    path, columns = recorded
    starts = np.append(0, np.flatnonzero(columns[5])[:-1] + 1)
    rows = dataset(np.diff(np.append(starts, len(columns[5]))), columns[2]).top_rows(0.4)
    assert rows.any() and not rows.all()
    run = trained(module, tmp_path, path, "--top-fraction", 0.4)
    (added,) = run.added
    close(added[0], columns[0][rows])
    close([-1, 2] + (added[1] + 1) / 2 * [4, 0.5], columns[1][rows], 1e-6)
    close(run.rates, 3e-4, 1e-15)
    assert all(name.startswith("actor.") for name in weights(run.folder))


@every_module
def test_rows_without_a_next_observation_are_left_out(recorded, tmp_path, module):
    """In files with D4RL's columns: where time ran out. What terminated stays."""
    path, columns = recorded
    theirs = tmp_path / "d4rl.hdf5"
    with h5py.File(path) as old, h5py.File(theirs, "w") as new:
        for key in ("observations", "actions", "rewards", "terminals", "timeouts"):
            new[key] = old[key][:]
    run = trained(module, tmp_path, theirs, "--env-id", "environments:Probe-v0")
    cut_off = columns[5] & ~columns[3]
    close(run.added[0][0], columns[0][~cut_off])
    close([-1, 2] + (run.added[0][1] + 1) / 2 * [4, 0.5], columns[1][~cut_off], 1e-6)
    assert module in (iql, xql) or (run.added[0][2][:, 0] == columns[2][~cut_off]).all()  # iql.py scales them
    close(run.added[0][3][:, 0], columns[3][~cut_off])
    following = ~columns[3][~cut_off]
    close(run.added[0][4][following], columns[4][~cut_off][following])


@every_module
def test_evaluation_stretches_actions(recorded, tmp_path, monkeypatch, module):
    scales = []

    def quarter(actor, space, obs, scale, generator, **steps):
        scales.append(np.ravel(scale).tolist())
        return np.full((len(obs), 2), 0.25, np.float32)

    monkeypatch.setattr(module, "act", quarter)
    online = ["--online-steps", 3] if module is iql else []
    run = trained(module, tmp_path, recorded[0], *online)
    row = metrics(run.folder)[-1]
    close(row["eval/return"], row["eval/length"] * (100 - 1 + 1.25 / 2 * 4), 1e-3)
    assert {tuple(x) for x in scales} == {(0, 1), *([(1,)] if online else [])}
    assert scales.count([1.0]) == len(run.added) - 1
