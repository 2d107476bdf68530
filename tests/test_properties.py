"""Properties of the pure functions that hold for every input: finite results, invariances that mathematics demands, or
an error that names what is wrong. A function is found by its name and parameters in all scripts, and equal copies are
tested once, so that a new script needs no row here. A function of a known name with other parameters fails. Values are
compared with closed forms in test_exact_*.py.

Hypothesis draws the same examples in every run and keeps no database.
"""

import ast
import importlib
import inspect
import json
import math
import random
import tempfile
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import REPO
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.extra import numpy as hnp
from torch import Tensor
from torch.testing import assert_close

from algos import dpo, dt, ppo
from utils import builtin
from utils import data as data_of
from utils.control import ReplayBuffer, to_env, to_unit
from utils.core import UserError, crosses
from utils.data import RowFault, as_pair, epochs, load_rows
from utils.dist import pad_left, positions
from utils.lm import TokenLogps
from utils.offline import Dataset
from utils.rewards import make_scorer

set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "plainrl-hypothesis")  # not into the repository
quick = settings(derandomize=True, database=None, deadline=None, max_examples=25, suppress_health_check=[*HealthCheck])
MODULES = [importlib.import_module(f"algos.{path.stem}") for path in sorted((REPO / "algos").glob("*.py"))]
NAN = float("nan")


OWN_ADVANTAGES = "rloo raft nsr topr reinforce_pp vineppo reinforce reinforce_lm ddpo flow_grpo".split()
ELSEWHERE = {("advantages", algo) for algo in OWN_ADVANTAGES}  # in test_exact_ALGO.py
MATCHED = {}  # name of a function -> the parameter lists under which it is tested


def in_scripts(name: str) -> list[tuple]:
    """(script, function, names of its parameters) of each script that defines a function of this name."""
    functions = [(module.__name__.removeprefix("algos."), vars(module).get(name)) for module in MODULES]
    own = [(script, f) for script, f in functions if f is not None and f.__module__ == f"algos.{script}"]
    return [(script, f, tuple(inspect.signature(f).parameters)) for script, f in own]


def every(name: str, *parameters: str):
    """Parametrises a test over the functions of this name and parameters in algos/, one of each that are equal."""
    found = {}
    MATCHED.setdefault(name, set()).add(parameters)
    for script, function, theirs in in_scripts(name):
        if theirs == parameters:
            tree = ast.parse(inspect.getsource(function)).body[0]
            tree.body = tree.body[ast.get_docstring(tree) is not None :]
            found.setdefault(ast.dump(tree), pytest.param(function, id=script))
    assert found, f"no script has a function {name}({', '.join(parameters)})"
    return pytest.mark.parametrize(name, found.values())


def test_no_function_escapes_by_a_renamed_parameter():
    for name, lists in MATCHED.items():
        for script, _, parameters in in_scripts(name):
            assert parameters in lists or (name, script) in ELSEWHERE, (
                f"{name}({', '.join(parameters)}) of algos/{script}.py has no test here: name its parameters as in "
                f"{sorted(lists)}, or write a test"
            )


# --- what is drawn ---


def floats(low: float, high: float):
    return st.floats(low, high, allow_subnormal=False)


@st.composite
def tensors(draw, *shape: int, low: float = -100.0, high: float = 100.0, dtype=torch.float64):
    return torch.from_numpy(draw(hnp.arrays(np.float64, shape, elements=floats(low, high)))).to(dtype)


@st.composite
def groups(draw, low: float = -1e3, high: float = 1e3, unknown: bool = True, at_least: int = 2):
    """Rewards (P, G): one prompt or several, often equal, some unknown."""
    shape = draw(st.integers(1, 4)), draw(st.integers(at_least, 6))
    values = [floats(low, high), st.sampled_from([0.0, 1.0])] + [st.just(NAN)] * unknown
    return torch.from_numpy(draw(hnp.arrays(np.float64, shape, elements=st.one_of(values))))


@st.composite
def masks(draw, empty: bool = True):
    """Completions (B, T) that end somewhere: no token, one, or more."""
    width = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0 if empty else 1, width), min_size=1, max_size=5))
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def permutation(draw, n: int) -> Tensor:
    return torch.tensor(draw(st.permutations(range(n))))


data = st.data()


# --- rewards and advantages of groups ---

SCALES = st.sampled_from(["group", "batch", "none"])


@every("advantages", "rewards", "scale")
@quick
@given(groups(), SCALES, data)
def test_group_advantages(advantages, rewards, scale, data):
    """Finite, 0 where unknown, 0 on average in every group, equivariant to the order of groups and within them,
    unchanged by a constant that is added to a group; unknown rewards are as if they had not been there."""
    out = advantages(rewards, scale)
    assert out.shape == rewards.shape and out.isfinite().all() and not out[rewards.isnan()].any()
    assert_close(out.sum(1), torch.zeros(len(out)).double(), rtol=0, atol=1e-6)
    rows, columns = (permutation(data.draw, n) for n in rewards.shape)
    assert_close(advantages(rewards[rows][:, columns], scale), out[rows][:, columns], rtol=1e-6, atol=1e-6)
    shift = data.draw(tensors(len(rewards), 1)) if scale != "batch" else 7.0
    assert_close(advantages(rewards + shift, scale), out, rtol=1e-6, atol=1e-6)
    if scale == "none":
        assert_close(advantages(-3 * rewards, scale), -3 * out)
    assert advantages(1e12 * rewards.float(), scale).isfinite().all()
    if scale == "group":
        known = ~rewards[0].isnan()
        assert_close(advantages(rewards[:1, known], scale)[0] if known.any() else out[0, known], out[0, known])
        assert out.abs().max() <= (rewards.shape[1] - 1) / rewards.shape[1] ** 0.5


@every("advantages", "rewards", "scale")
@quick
@given(st.integers(1, 9), floats(-1e30, 1e30), SCALES)
def test_equal_rewards_teach_nothing(advantages, size, value, scale):
    """Exactly nothing, in the precision of training, however large they are."""
    rewards = torch.full((2, size), value, dtype=torch.float32)
    rewards[1, 0] = NAN
    assert not advantages(rewards, scale).any()


@quick
@given(
    st.lists(st.sampled_from([None, 0.0, 1, 2.5, 1e39, 3e38, NAN, math.inf, -math.inf]), min_size=1, max_size=4),
    st.sampled_from([1.0, -1.0]),
)
def test_rewards_are_finite_unknown_or_refused(values, weight):
    """Whatever a function returns, in the float32 that advantages are computed in."""
    task = SimpleNamespace(name="any", score=None)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.py").write_text(f"inf, nan = float('inf'), float('nan')\ndef f(**_): return {values!r}\n")
        args = SimpleNamespace(reward=(f"{folder}/mine.py:f",), reward_weights=(weight,), combine="sum", max_steps=1)
        score = make_scorer(task, args, SimpleNamespace(chat_template="any"), "cpu")
    inputs = [{"prompt": [{"role": "user", "content": "p"}]}] * len(values), ["t"] * len(values), [[1]] * len(values), 1
    if all(x is None or abs(x) < 3.4e38 for x in values):
        rewards, _ = score(*inputs)
        wanted = [NAN if x is None else x * weight for x in values]
        assert rewards.tolist() == pytest.approx(wanted, nan_ok=True)
    else:
        with pytest.raises(UserError, match="reward"):
            score(*inputs)


# --- losses of tokens ---


@every("whiten", "values", "mask")
@quick
@given(masks(), data)
def test_whiten(whiten, mask, data):
    """Mean 0 and deviation 1 over the tokens, 0 elsewhere; unchanged by shift, positive scale, and what lies elsewhere;
    0 where there are fewer than two tokens."""
    values = data.draw(tensors(*mask.shape))
    out, kept = whiten(values, mask), values[mask]
    assert out.isfinite().all() and not out[~mask].any() and (len(kept) > 1 or not out.any())
    if len(kept) > 1:
        assert abs(out[mask].mean()) < 1e-6
        assert torch.equal(whiten(torch.where(mask, values, 1e9), mask), out)
        assert_close(whiten(values + 5, mask), out, rtol=1e-5, atol=1e-5)
    if len(kept) > 1 and kept.std() > 0.1:
        assert_close(out[mask].std(), torch.tensor(1.0).double(), rtol=1e-5, atol=0)
        assert_close(whiten(3 * values, mask), out, rtol=1e-5, atol=1e-5)


# --- what language models work on ---


@quick
@given(tensors(4, 5), floats(-100, 100), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([1.0, 1e4]))
def test_token_logps(logits, shift, temperature, scale):
    """Log-probabilities of all tokens sum to 1; a constant on the logits changes nothing; the entropy lies between 0
    and that of the uniform distribution; finite also for logits of 1e6."""
    config = SimpleNamespace(vocab_size=5)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    model.get_output_embeddings = torch.nn.Identity

    def token_logps(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return TokenLogps.apply(logits, ids, temperature, model)

    each = [token_logps(scale * logits, torch.full((4,), i), temperature) for i in range(5)]
    logps, entropy = torch.stack([logp for logp, _ in each]), each[0][1]
    assert logps.isfinite().all() and (logps <= 0).all()
    assert_close(logps.exp().sum(0), torch.ones(4).double())
    rounding = 1e-15 * (100 * scale / temperature) ** 2
    assert (entropy > -rounding).all() and (entropy < math.log(5) + rounding).all()
    zeros = torch.zeros(4).long()
    assert_close(token_logps(scale * logits + shift, zeros, temperature)[0], logps[0], rtol=0, atol=1e-7)
    assert all(x.isfinite().all() for x in token_logps(scale * logits.float(), zeros, temperature))


TOKENS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=4)


@quick
@given(TOKENS)
def test_padding_on_the_left(prompts):
    """The mask gives every prompt back, token 0 included, and positions count its tokens from 0."""
    ids, mask = pad_left(prompts, "cpu")
    assert [row[kept].tolist() for row, kept in zip(ids, mask)] == prompts
    assert [row[kept].tolist() for row, kept in zip(positions(mask), mask)] == [list(range(len(p))) for p in prompts]
    assert ids.shape[1] == max(map(len, prompts)) and mask[:, -1].all()


# --- preferences ---

OF_THE_MARGIN = ("sigmoid", "robust", "ipo", "hinge", "exo", "discopop")


@pytest.mark.parametrize("loss", dpo.LOSSES)
@quick
@given(tensors(2, 5, low=-1e3, high=1e3), floats(0.01, 2), data)
def test_preference_losses(loss, ratios, beta, data):
    """Finite values and gradients for log-ratios of 1,000 nats; each pair by itself; those of the margin do not see
    what both log-ratios share; beta and the log-ratios matter by their product (squared ones: but for a factor)."""

    def losses(ratios: Tensor, beta: float) -> Tensor:
        return dpo.LOSSES[loss](*ratios, dpo.Args(loss=loss, beta=beta, label_smoothing=0.1))

    inputs = ratios.clone().requires_grad_()
    value = losses(inputs, beta)
    (gradient,) = torch.autograd.grad(value.sum(), inputs)
    assert value.shape == (5,) and value.isfinite().all() and gradient.isfinite().all()
    single = ratios.float().requires_grad_()
    value_in_float32 = losses(single, beta)
    value_in_float32.sum().backward()
    assert value_in_float32.isfinite().all() and single.grad.isfinite().all()
    order = permutation(data.draw, 5)
    assert_close(losses(ratios[:, order], beta), value[order])
    if loss in OF_THE_MARGIN:
        assert_close(losses(ratios + data.draw(tensors(5)), beta), value, rtol=1e-6, atol=1e-6)
        assert_close(gradient.sum(0), torch.zeros(5).double(), rtol=0, atol=1e-6)
    factor = 4 if loss in ("ipo", "sppo-hard") else 1
    assert_close(losses(ratios * 2, beta / 2), value * factor, rtol=1e-6, atol=1e-6)


@quick
@given(st.text("ab ", min_size=1, max_size=8), st.text("ab ", min_size=1, max_size=8))
def test_shared_prefix(chosen, rejected):
    """What both begin with, whichever comes first; something is left of each; words stay whole."""

    def pair(chosen, rejected) -> tuple | None:
        try:
            row = as_pair({"chosen": chosen, "rejected": rejected})
        except RowFault:  # no prompt
            return None
        assert row["chosen"] and row["rejected"]
        assert (row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]) == (chosen, rejected)
        return row["prompt"], row["chosen"], row["rejected"]

    texts, turned = pair(chosen, rejected), pair(rejected, chosen)
    assert turned == (texts and (texts[0], texts[2], texts[1]))
    assert texts is None or texts[1][0] == texts[2][0] == " "
    pair(*([{"role": "user", "content": c} for c in text] for text in (chosen, rejected)))


# --- control ---


@quick
@given(st.lists(hnp.arrays(np.float64, st.tuples(st.integers(1, 4), st.just(2)), elements=floats(-1e6, 1e6)),
                min_size=1, max_size=5), data)  # fmt: skip
def test_running_statistics(batches, data):
    """Mean and variance of all rows however they are split and ordered, and none ever negative."""
    rows = np.concatenate(batches)
    shuffled = rows[list(data.draw(st.permutations(range(len(rows)))))]
    split, whole = ppo.RunningMeanStd((2,)), ppo.RunningMeanStd((2,))
    for batch in batches:
        split.update(batch)
        assert (split.var >= 0).all() and np.isfinite(split.mean).all()
    whole.update(shuffled)
    scale = 1 + np.abs(rows).max()
    for name in ("mean", "var"):
        order = {"mean": 1, "var": 2}[name]
        found, wanted = getattr(split, name), getattr(whole, name)
        np.testing.assert_allclose(found, wanted, rtol=1e-7, atol=1e-10 * scale**order, err_msg=name)
    np.testing.assert_allclose(split.mean, rows.mean(0), rtol=0, atol=1.1e-4 / len(rows) * scale)
    again = ppo.RunningMeanStd((2,))
    again.load_state_dict(split.state_dict())
    assert again.count == split.count and (again.mean == split.mean).all() and (again.var == split.var).all()


@quick
@given(st.lists(hnp.arrays(np.float64, (2, 3), elements=floats(-1e8, 1e8)), min_size=1, max_size=4), st.booleans())
def test_normalised_observations_and_rewards(observations, enabled):
    """Finite and within the clip, whatever comes; looking does not count."""
    statistics = ppo.Statistics(3, 2, 0.99, enabled)
    for obs in observations:
        shown = statistics.observe(obs, count=True)
        reward = statistics.reward(obs[:, 0], obs[:, 1] > 0)
        assert np.isfinite(shown).all() and np.isfinite(reward).all()
        assert not enabled or max(np.abs(shown).max(), np.abs(reward).max()) <= ppo.CLIP_NORMALIZED
        assert enabled or (np.array_equal(reward, obs[:, 0]) and np.array_equal(shown, obs.astype(np.float32)))
    before = json.dumps(statistics.state_dict(), default=Tensor.tolist)
    statistics.observe(observations[0] * 2)
    assert json.dumps(statistics.state_dict(), default=Tensor.tolist) == before


SPACES = {
    "box": gym.spaces.Box(-1, 1, (2,)),
    "discrete": gym.spaces.Discrete(4),
    "multidiscrete": gym.spaces.MultiDiscrete([2, 3]),
    "multibinary": gym.spaces.MultiBinary(3),
}


@pytest.mark.parametrize("space", SPACES)
@quick
@given(tensors(3, 2, low=-1e3, high=1e3, dtype=torch.float32), st.integers(0, 99), floats(1, 100))
def test_policies_of_ppo(space, obs, seed, scale):
    """Finite for large observations and weights; categorical probabilities sum to 1, and their entropy lies between 0
    and that of the uniform distribution; without noise the likeliest action is taken."""
    torch.manual_seed(seed)
    agent = ppo.Agent(2, SPACES[space], 8)
    with torch.no_grad():
        agent.actor[-1].weight.mul_(scale)
        likeliest = agent.act(obs, agent.noise((3,), torch.Generator()) * 0)
        logp, entropy = agent.log_prob(obs, likeliest)
        assert logp.isfinite().all() and entropy.isfinite().all() and agent.value(obs).isfinite().all()
        noisy = agent.act(obs, agent.noise((3,), torch.Generator().manual_seed(seed)))
        assert (agent.log_prob(obs, noisy)[0] <= logp + 1e-4).all()
        if space != "box":
            choices = torch.cartesian_prod(*(torch.arange(n) for n in agent.parts)).view(-1, len(agent.parts))
            each = torch.stack([agent.log_prob(obs, choice.expand(3, -1))[0] for choice in choices])
            assert_close(each.exp().sum(0), torch.ones(3))
            assert (entropy >= -1e-5).all() and (entropy <= math.log(len(choices)) + 1e-5).all()


@quick
@given(st.data())
def test_actions_reach_the_bounds_and_never_leave_them(data):
    """Of the environment, in the precision that it checks them in; and back again."""
    size = data.draw(st.integers(1, 3))
    bounds = data.draw(hnp.arrays(np.float32, (2, size), elements=st.floats(-1e3, 1e3, width=32)))
    space = gym.spaces.Box(bounds.min(0), bounds.max(0) + np.float32(0.1), dtype=np.float32)
    width = (space.high - space.low).min()
    units = st.one_of(st.sampled_from([-1.0, 0.0, 1.0]), st.floats(-1, 1, width=32))
    actions = data.draw(hnp.arrays(np.float32, (4, size), elements=units))
    stretched = to_env(actions, space)
    assert stretched.shape == (4, size) and all(space.contains(action) for action in stretched)
    np.testing.assert_allclose(to_unit(stretched, space), actions, rtol=0, atol=1e-6 + 4e-7 * 2e3 / width)
    ends = to_env(np.array([[-1.0] * size, [1.0] * size], np.float32), space)
    np.testing.assert_allclose(ends, [space.low, space.high], rtol=1e-6, atol=1e-4)
    assert (np.abs(to_unit(3 * stretched, space)) <= 1).all()


@quick
@given(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=9))
def test_replay_buffer(capacity, adds):
    """As a list of which the newest rows are kept, whatever is added at once, through saves and loads at any time."""
    rows, replay = [], ReplayBuffer(capacity, (1, 2), torch.device("cpu"))
    for time, (count, saved) in enumerate(adds):
        new = 100 * time + np.arange(count, dtype=np.float32)[:, None]
        replay.add(new, np.concatenate([-new, new * 2], 1))
        rows += new[:, 0].tolist()
        kept = rows[-capacity:]
        held = np.roll(replay.rows[: len(kept), 0].tolist(), -(len(rows) % capacity) * (len(rows) > capacity))
        assert replay.total == len(rows) and held.tolist() == kept
        if kept:
            a, b = replay.sample(5, torch.Generator().manual_seed(time))
            assert a.shape == (5, 1) and set(a[:, 0].tolist()) <= set(kept)
            assert torch.equal(b, a * torch.tensor([-1, 2]))
        if saved:
            state, replay = replay.state_dict(), ReplayBuffer(capacity, (1, 2), torch.device("cpu"))
            assert len(state["rows"]) == len(kept)
            assert state["rows"].untyped_storage().size() == state["rows"].nbytes  # what was never written is not saved
            replay.load_state_dict(state)


# --- offline ---


@st.composite
def trajectories(draw):
    """Rewards (n,) and the first rows of trajectories, of one step or more."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    rewards = draw(hnp.arrays(np.float32, sum(lengths), elements=st.floats(-1e3, 1e3, width=32)))
    return rewards, np.cumsum([0, *lengths[:-1]])


def dataset(rewards: np.ndarray, starts: np.ndarray) -> Dataset:
    rows = np.arange(len(rewards), dtype=np.float32)[:, None]
    return Dataset(rows, np.tanh(rows), rewards, np.zeros(len(rows), bool), rows + 1, np.ones(len(rows), bool), starts)


@every("windows", "data", "rows", "length")
@quick
@given(trajectories(), st.integers(1, 7))
def test_windows(windows, trajectories, length):
    """The steps from a row on, of its own trajectory alone, in order, as many as there are up to the length, at the
    right; zeros under the padding."""
    rewards, starts = trajectories
    n = len(rewards)
    model = SimpleNamespace(obs_mean=torch.zeros(1), obs_std=torch.ones(1))
    space = gym.spaces.Box(-1, 1, (1,))
    rows = dt.sequences(dataset(*trajectories), space, model, 1.0, "cpu")
    batch = windows(rows, torch.arange(n), length)
    ends = np.append(starts[1:], n)
    for row in range(n):
        end = min(ends[ends > row][0], row + length)
        kept = batch.mask[row]
        assert kept.tolist() == [False] * (length - (end - row)) + [True] * (end - row)
        assert batch.obs[row, kept, 0].tolist() == list(range(row, end))
        assert all(torch.equal(shown[row, kept], held[row:end]) for shown, held in zip(batch[:3], rows[:3]))
        first = starts[starts <= row][-1]
        assert batch.timesteps[row, kept].tolist() == list(range(row - first, end - first))
        assert not any(x[row][~kept].any() for x in (batch.obs, batch.actions, batch.rtg, batch.timesteps))


# --- datasets, tasks, evaluation, runs ---

ROWS = st.lists(st.integers(0, 30).map(lambda i: {"prompt": f"prompt {i}"}), min_size=1, max_size=40)


@quick
@given(ROWS, data)
def test_held_out_rows(rows, data):
    """Each row on one side, in its order; equal prompts together; which, is a matter of the prompts alone; one prompt
    is an error."""
    datasets = pytest.importorskip("datasets", reason="not run: datasets is not installed")
    rows = [row | {"number": i} for i, row in enumerate(rows)]

    def parts(rows: list[dict]) -> list[list[dict]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(data_of, "read_splits", lambda spec: {"train": datasets.Dataset.from_list(rows)})
            return [list(part) for part in load_rows("mine.jsonl")]

    prompts = {row["prompt"] for row in rows}
    if len(prompts) < 2:
        with pytest.raises(UserError, match="no prompt to train on"):
            parts(rows)
        return
    train, heldout = parts(rows)
    assert train and heldout and sorted(train + heldout, key=lambda row: row["number"]) == rows
    assert all(part == sorted(part, key=lambda row: row["number"]) for part in (train, heldout))
    held = {row["prompt"] for row in heldout}
    assert not held & {row["prompt"] for row in train} and len(held) == max(1, len(prompts) // 20)
    assert {row["prompt"] for row in parts(data.draw(st.permutations(rows)))[1]} == held


@pytest.mark.parametrize("name", ["countdown", "sort"])
@quick
@given(st.text("0123456789+-*/=, <answer>\n#٣", max_size=25), st.integers(0, 999))
def test_any_text_has_a_score(name, text, seed):
    """0 or 1, never an exception; a right answer stays right within answer tags and blanks."""
    row, _ = getattr(builtin, f"{name}_row")(random.Random(seed))
    score = getattr(builtin, f"{name}_score")
    assert score(row, text) in (0.0, 1.0)
    right = row["completion"]
    right = "".join(sorted(row["digits"])) if name == "sort" else f"{right.rpartition('=')[0]}={row['target']}"
    assert score(row, right) == 1 == score(row, f"{text}<answer> {right} </answer>")
    assert builtin.gsm8k_score({"answer": "so\n#### 7"}, text) in (0.0, 1.0)
    assert builtin.gsm8k_score({"answer": "so\n#### 1,234"}, f"{text}\n#### 1234") == 1


@quick
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 25))
def test_crosses(iterations, every):
    """It tells of every multiple, once for each iteration that passes one or more, whatever the iterations' sizes.
    0 is never."""
    before, told = 0, 0
    for size in iterations:
        passed = every > 0 and any(step % every == 0 for step in range(before + 1, before + size + 1))
        assert crosses(before + size, before, every) == passed
        before, told = before + size, told + passed


@quick
@given(st.integers(1, 40), st.integers(0, 3))
def test_epochs(rows, seed):
    """Every epoch takes each row once, in an order of its own. Any row can be asked for at any time, as a resumed run
    does."""
    stream = epochs(range(rows))
    orders = [[stream(i, seed) for i in range(epoch * rows, (epoch + 1) * rows)] for epoch in range(3)]
    assert all(sorted(order) == list(range(rows)) for order in orders)
    assert rows < 10 or len(set(map(tuple, orders))) == 3
    assert [epochs(range(rows))(i, seed) for i in reversed(range(3 * rows))][::-1] == sum(orders, [])
    assert rows < 10 or [stream(i, seed + 1) for i in range(rows)] != orders[0]
