"""dt.py against numbers computed another way: returns-to-go and windows by hand, one update by AdamW written out, the
episodes of an evaluation by an environment whose rewards are known. The network: tests/test_parity_transformers.py.
"""

import json
import math
from types import SimpleNamespace

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from control import adam, close, float64
from helpers import metrics, new_run
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call

from algos import dt
from benchmarks.record_suite import save
from utils.control import to_env
from utils.offline import Dataset

D, A, W, K, B = 3, 2, 8, 5, 6  # observations, actions, width, steps in a window, windows
LONGEST = 12  # time steps with an embedding of their own


def make_model(seed: int = 0, **settings) -> dt.DecisionTransformer:
    """Random weights everywhere, large enough that every part of the network counts."""
    args = dt.Args(**{"embed_dim": W, "num_layers": 2, "num_heads": 2, "max_episode_length": LONGEST} | settings)
    model, generator = dt.DecisionTransformer(D, A, args), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
            if "norm" in name and name.endswith("weight"):
                parameter += 1
    return model.eval()


def make_windows(seed: int = 0, real=(K, 1, 3, K, 2, 4), length: int = K) -> dt.Windows:
    """Windows of so many real steps, with zeros in the padding on the left."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(length) >= length - torch.tensor(real)[:, None]
    rows = len(real)
    first = torch.randint(0, LONGEST - length, (rows, 1), generator=g)
    timesteps = first + torch.arange(length) - (length - torch.tensor(real)[:, None])
    obs, rtg = torch.randn(rows, length, D, generator=g), 2 * torch.randn(rows, length, 1, generator=g)
    actions = torch.rand(rows, length, A, generator=g) * 2 - 1
    return dt.Windows(*(x * mask[..., None] for x in (obs, actions, rtg)), timesteps * mask, mask)


# --- what the windows hold

LENGTHS, STARTS = [4, 1, 7, 2], np.array([0, 4, 5, 12])
REWARDS = np.array([1, 2, 3, 4, -5, 1, 1, 1, 1, 1, 1, 1, 0.5, 0.25], np.float32)
TO_GO = [10, 9, 7, 4, -5, 7, 6, 5, 4, 3, 2, 1, 0.75, 0.25]


def test_returns_to_go_by_hand():
    """Sums to the end of each trajectory, the step's own reward included; precise over a long one."""
    close(dt.returns_to_go(REWARDS, STARTS), TO_GO, 0)
    close(dt.returns_to_go(REWARDS[:4], STARTS[:1]), TO_GO[:4], 0)
    long = np.full(100_000, 0.1, np.float32)
    close(dt.returns_to_go(long, np.array([0]))[0], 100_000 * float(np.float32(0.1)), 1e-6)


def collection() -> Dataset:
    generator = np.random.default_rng(0)
    obs = generator.normal(3.0, 2.0, (14, D)).astype(np.float32)
    obs[:, 2] = 7  # which has no spread
    actions = (generator.uniform(0, 1, (14, A)) * [4, 0.5] + [-1, 2]).astype(np.float32)
    return Dataset(obs, actions, REWARDS, np.zeros(14, bool), obs, np.ones(14, bool), STARTS)


SPACE = gym.spaces.Box(np.array([-1, 2], np.float32), np.array([3, 2.5], np.float32))


def test_sequences_by_hand():
    """Normalised by the model's statistics, stretched to [-1, 1], scaled; time and what is left, from the starts."""
    data, model = collection(), make_model()
    model.obs_mean.copy_(torch.tensor([3.0, 2.0, 7.0]))
    model.obs_std.copy_(torch.tensor([2.0, 0.5, 1e-6]))
    rows = dt.sequences(data, SPACE, model, 4.0, torch.device("cpu"))
    close(rows.obs, (data.obs - [3, 2, 7]) / [2, 0.5, 1e-6], 1e-5)
    close([-1, 2] + (rows.actions.numpy() + 1) / 2 * [4, 0.5], data.actions, 1e-6)
    close(rows.rtg[:, 0], np.array(TO_GO) / 4, 1e-7)
    assert rows.timesteps.tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert rows.left.tolist() == [4, 3, 2, 1, 1, 7, 6, 5, 4, 3, 2, 1, 2, 1]
    assert all(x.dtype == torch.float32 for x in rows[:3])


# --- the network


def gradients(model, batch) -> tuple[torch.Tensor, dict]:
    model.zero_grad()
    loss = dt.dt_loss(model(batch), batch)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def with_padding(batch: dt.Windows, more: int, fill: float = 0.0) -> dt.Windows:
    padded = dt.Windows(*(torch.cat([x.new_zeros(len(x), more, *x.shape[2:]), x], 1) for x in batch))
    for x in padded[:3]:
        x[~padded.mask] = fill
    padded.timesteps[~padded.mask] = int(abs(fill)) % LONGEST
    return padded


@float64()
@pytest.mark.parametrize("more, fill", [(0, -10.0), (3, 0.0), (7, 1e3)])
def test_padding_changes_nothing(more, fill):
    model, batch = make_model(), make_windows()
    padded = with_padding(batch, more, fill)
    close(model(padded)[:, more:][batch.mask], model(batch)[batch.mask])
    (loss, slopes), (padded_loss, padded_slopes) = gradients(model, batch), gradients(model, padded)
    close(padded_loss, loss)
    for name, slope in slopes.items():
        close(padded_slopes[name], slope)
        assert slope.any(), name


def test_a_new_model_begins_as_gpt2():
    """Weights of the blocks from N(0, 0.02), biases 0; the rest as PyTorch makes it."""
    torch.manual_seed(0)
    model = dt.DecisionTransformer(D, A, dt.Args(embed_dim=64))
    assert len(model.blocks) == 3
    for block in model.blocks:
        for layer in (block.qkv, block.out, block.up, block.down):
            assert not layer.bias.any() and layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.embed_timestep.weight.shape == (1000, 64)
    assert model.embed_timestep.weight.std().item() == pytest.approx(1, rel=0.05)


def test_dropout_is_for_training():
    torch.manual_seed(0)
    model, batch = make_model(dropout=0.5), make_windows()
    assert torch.equal(model(batch), model(batch))
    plain = model(batch)
    model.train()
    assert not torch.equal(model(batch), model(batch))
    parts = [model.dropout, *(block.dropout for block in model.blocks)]
    assert all(part.p == 0.5 for part in parts)
    for part in parts:
        part.eval()
    assert not torch.equal(model(batch), plain)  # attention is left
    model.eval()
    for part in parts:  # all of it dropped: a block adds nothing, without embeddings the windows do not differ
        part.p = 1.0
        part.train()
    assert len(model(batch)[batch.mask].unique(dim=0)) == 1
    parts[0].eval()
    without, model.blocks = model(batch), nn.ModuleList()
    assert torch.equal(without, model(batch)) and not torch.equal(without, plain)


# --- update

RATE, DECAY = 1e-2, 0.1


@float64()
def test_update_equals_adamw_by_hand():
    """Four updates at learning rates that change, as in a warm-up: all parameters; loss and norm as reported."""
    model, args = make_model(), dt.Args()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY, fused=True)
    p, moments, norms = {name: x.detach().clone().requires_grad_() for name, x in model.named_parameters()}, {}, []
    for step in range(4):
        batch, rate = make_windows(step), RATE * (step + 1) / 4
        if step == 3:  # a small gradient: nearly the actions that are predicted when they are in the window
            for _ in range(2 * K):
                batch = batch._replace(actions=functional_call(model, p, (batch,)).detach())
            batch = batch._replace(actions=0.98 * batch.actions)
        optimizer.param_groups[0]["lr"] = rate
        loss = ((functional_call(model, p, (batch,)) - batch.actions) ** 2)[batch.mask].mean()
        slopes = adam(p, moments, "", loss, rate, DECAY, 0.25)
        numbers = dt.update(model, optimizer, batch, args)
        for name, x in model.named_parameters():
            close(x, p[name])
        norms.append(math.sqrt(sum((g**2).sum().item() for g in slopes.values())))
        close(numbers["loss"], loss)
        close(numbers["grad_norm"], norms[-1])
    assert max(norms) > 0.25 > min(norms)


def test_bfloat16_is_of_the_forward_pass_only():
    """Near float32, not equal to it; weights, gradients and the loss stay float32."""
    results, casts = [], []
    for precision in ("float32", "bfloat16"):
        model = make_model()
        model.register_forward_hook(lambda *_: casts.append(torch.is_autocast_enabled("cpu")))
        optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
        numbers = dt.update(model, optimizer, make_windows(), dt.Args(precision=precision))
        assert {x.dtype for p in model.parameters() for x in (p, p.grad)} == {numbers["loss"].dtype} == {torch.float32}
        results.append(numbers["loss"].item())
    assert results[0] != results[1] and results[0] == pytest.approx(results[1], rel=0.02) and casts == [False, True]


# --- evaluation


class Toy(gym.Env):
    """Episode i begins at place i / 10 and lasts 4 + 3 i steps. Observes (place, steps so far, episode); the reward
    follows from the steps and the action."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (D,))
    action_space = SPACE

    def __init__(self, index: int = 0):
        self.index = index

    def observe(self):
        return np.array([self.place, self.time, self.index])  # float64, as MuJoCo's

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = self.index / 10, 0
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        self.place += float(action[0]) / 10
        over = self.time == 4 + 3 * self.index
        return self.observe(), self.time + float(action[1]), over, False, {}


def replayed(model, index: int, target: float, length: int):
    """One episode step by step, with all that was seen kept: the windows given to the model, and the return."""
    env, seen, given, total, over = Toy(index), [], [], 0.0, False
    (obs, _), to_go = env.reset(), target
    while not over:
        seen.append([(obs - model.obs_mean.numpy()) / model.obs_std.numpy(), np.zeros(A), [to_go / 50], len(seen)])
        newest = seen[-length:]
        *parts, time = (torch.tensor(np.array(column)) for column in zip(*newest))
        batch = dt.Windows(*(x.float()[None] for x in parts), time[None], torch.ones(1, len(newest)).bool())
        given.append(batch)
        action = model(batch)[0, -1].detach().numpy()
        seen[-1][1] = action
        obs, reward, over, _, _ = env.step(to_env(action, SPACE)[0])
        total, to_go = total + reward, to_go - reward
    return given, total


TARGETS = (60.0, 20.0)


def evaluate(targets: tuple[float, ...]):
    """What `achieved` returns for these targets and three episodes each, and what it gave to the model."""
    model, given = make_model(max_episode_length=6).train(), []
    model.obs_mean.copy_(torch.tensor([0.5, 3.0, 1.0]))
    model.obs_std.copy_(torch.tensor([0.4, 2.0, 0.9]))
    args = dt.Args(target_returns=targets, eval_episodes=3, context_length=3, rtg_scale=50.0)
    spy = model.register_forward_pre_hook(lambda module, inputs: given.append((module.training, inputs[0])))
    returns = dt.achieved(model, [Toy(i % 3) for i in range(3 * len(targets))], SPACE, args, torch.device("cpu"))
    assert model.training
    spy.remove()
    return returns, given, model.eval()


@pytest.fixture(scope="module")
def evaluated():
    returns, given, model = evaluate(TARGETS)
    episodes = {}
    with torch.no_grad():
        for i, target in enumerate(TARGETS):
            for index in range(3):
                episodes[i, index] = replayed(model, index, target, 3)
    return SimpleNamespace(returns=returns, given=given, episodes=episodes)


def test_whole_targets_are_numbers_like_others(evaluated):
    """As train() makes them from the dataset's returns: rewards are not rounded on their way into the returns-to-go."""
    returns, given, _ = evaluate(tuple(map(int, TARGETS)))
    for (_, batch), (_, expected) in zip(given, evaluated.given):
        close(batch.rtg, expected.rtg, 1e-6)
    close(returns, evaluated.returns, 1e-6)


def test_evaluation_asks_for_each_target(evaluated):
    """The returns of the episodes run one by one; a row for each target, in which all episodes ask for it."""
    assert evaluated.returns.shape == (2, 3)
    close(evaluated.returns, [[evaluated.episodes[i, index][1] for index in range(3)] for i in range(2)], 1e-4)
    assert np.abs(evaluated.returns[0] - evaluated.returns[1]).min() > 1e-3  # the target matters


def test_each_target_gets_the_same_start_states(monkeypatch):
    seeds, reset = [], Toy.reset
    monkeypatch.setattr(Toy, "reset", lambda self, seed=None, **_: seeds.append(seed) or reset(self, seed=seed))
    evaluate(TARGETS)
    assert seeds[:3] == seeds[3:] and len(set(seeds)) == 3


def test_evaluation_shows_the_newest_steps(evaluated):
    """Normalised observations, own actions of the past and 0 for the one to come, the target less the rewards so far,
    time steps, at most as many as the context, padded on the left; only episodes that go on."""
    for step, (training, batch) in enumerate(evaluated.given):
        assert not training
        alone = [given[step] for given, _ in evaluated.episodes.values() if step < len(given)]
        assert len(batch.mask) == len(alone) and batch.mask.shape[1] == 3
        for row, expected in enumerate(alone):
            mask = batch.mask[row]
            assert mask.tolist() == [i >= 3 - expected.mask.shape[1] for i in range(3)]
            assert batch.timesteps[row, mask].tolist() == expected.timesteps[0].tolist()
            for name in ("obs", "actions", "rtg"):
                close(getattr(batch, name)[row, mask], getattr(expected, name)[0], 1e-5)
    assert len(evaluated.given) == 10 and evaluated.given[-1][1].timesteps.max() == 9  # beyond the embeddings


def test_scores_by_hand():
    """eval/return is of the first target; the slope is that of least squares over all episodes."""
    returns = np.array([[10.0, 14.0], [5.0, 7.0]])
    columns = dt.scores(returns, (20.0, 10.0))
    assert columns == {"eval/return": 12.0, "eval/return_at_20": 12.0, "eval/return_at_10": 6.0,
                       "eval/slope": pytest.approx(0.6)}  # fmt: skip
    assert "eval/slope" not in dt.scores(returns[:1], (20.0,))


# --- train()

gym.register("PlainrlDtToy-v0", lambda **kwargs: Toy(1))
SETTINGS = ("--device cpu --embed-dim 8 --num-layers 1 --context-length 3 --batch-size 16 --eval-episodes 1 "
            "--rtg-scale 5 --max-episode-length 6 --max-steps 40 --warmup-steps 10 --eval-every 0").split()  # fmt: skip


def test_a_trajectory_that_the_file_cuts_off_is_left_out(run, tmp_path, monkeypatch):
    """Of what is learned, of the statistics and of the returns that are asked for: the best one is cut off here."""
    with h5py.File(tmp_path / "data.hdf5", "w") as file:
        columns = dict(observations=run.data.obs, actions=run.data.actions, rewards=np.arange(14.0) ** 4,
                       terminals=np.zeros(14), timeouts=np.isin(np.arange(14), STARTS[1:] - 1))  # fmt: skip
        for key, column in columns.items():
            file[key] = column
    seen, sequences = [], dt.sequences
    monkeypatch.setattr(dt, "sequences", lambda *args: seen.append((args, sequences(*args))) or seen[-1][1])
    args = [*SETTINGS, "--dataset", tmp_path / "data.hdf5", "--env-id", "PlainrlDtToy-v0", "--max-steps", 1]
    folder = new_run(dt, tmp_path / "runs", *args)
    kept = STARTS[-1]
    ((data, _, model, *_), rows) = seen[0]
    assert len(rows.obs) == len(data.obs) == kept < 14
    close(model.obs_mean, run.data.obs[:kept].mean(0), 1e-6)
    asked = json.loads((folder / "config.json").read_text())["args"]["target_returns"]
    returns = [part.sum() for part in np.split(np.arange(14.0) ** 4, STARTS[1:])]
    assert asked[0] == max(returns[:-1]) < returns[-1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run on `collection`: its folder, the data, and what `update` was called with each time."""
    folder, data, calls, update = tmp_path_factory.mktemp("dt"), collection(), [], dt.update

    def recording(model, optimizer, batch, args):
        calls.append(SimpleNamespace(model=model, optimizer=optimizer, batch=batch, args=args,
                                     training=model.training, rate=optimizer.param_groups[0]["lr"]))  # fmt: skip
        return update(model, optimizer, batch, args)

    ends = np.isin(np.arange(14), STARTS[1:] - 1)
    next_obs = np.roll(data.obs, -1, 0)
    next_obs[ends] = next_obs[-1] = 99
    rows = list(zip(data.obs, data.actions, data.rewards, data.terminated, ends, next_obs))
    save(folder / "data.hdf5", {"env_id": "PlainrlDtToy-v0"}, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dt, "update", recording)
        out = new_run(dt, folder / "runs", *SETTINGS, "--dataset", folder / "data.hdf5")
    return SimpleNamespace(folder=out, data=data, calls=calls)


def test_train_normalises_by_the_dataset(run):
    """Mean and standard deviation + 1e-6 over all rows, in the model that is saved, and in the windows."""
    saved = load_file(run.folder / "model" / "model.safetensors")
    mean, std = run.data.obs.astype(np.float64).mean(0), run.data.obs.astype(np.float64).std(0) + 1e-6
    close(saved["obs_mean"], mean, 1e-5)
    close(saved["obs_std"], std, 1e-7 * 20)
    assert saved["obs_std"][2].item() == pytest.approx(1e-6)
    rows = (run.data.obs[:, :2] - mean[:2]) / std[:2]
    shown = torch.cat([call.batch.obs[call.batch.mask][:, :2] for call in run.calls]).unique(dim=0).numpy()
    close(shown[np.lexsort(shown.T)], rows[np.lexsort(rows.T)], 1e-5)


def test_train_begins_windows_everywhere(run):
    """At every row equally often, with returns-to-go over the scale; dropout is on."""
    first = torch.cat([torch.stack([row[mask][0] for row, mask in zip(call.batch.rtg[..., 0], call.batch.mask)])
                       for call in run.calls])  # fmt: skip
    counts = {value: TO_GO.count(value) for value in TO_GO}
    assert {round(x * 5, 4) for x in first.tolist()} == set(counts)
    for value, count in counts.items():
        share = ((first * 5 - value).abs() < 1e-4).double().mean().item()
        expected = count / 14
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / len(first))
    assert all(call.batch.mask.shape == (16, 3) and call.training for call in run.calls)


def test_train_warms_up(run):
    """Linearly from 1/10 of the learning rate to all of it, then constant; AdamW on all parameters alike."""
    close([call.rate for call in run.calls], [1e-3 * min((k + 1) / 10, 1) for k in range(40)], 1e-15)
    model, optimizer = run.calls[0].model, run.calls[0].optimizer
    (group,) = optimizer.param_groups
    assert type(optimizer) is torch.optim.AdamW
    assert {id(x) for x in group["params"]} == {id(x) for x in model.parameters()}
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-8, 1e-4)
    assert run.calls[0].args.max_grad_norm == 0.25


def test_train_asks_for_returns_of_the_dataset(run):
    assert run.calls[0].args.target_returns == (10, 6.25, 2.5, -1.25)
    (row,) = [row for row in metrics(run.folder) if "eval/return" in row]
    assert row["eval/return"] == row["eval/return_at_10"] == row["eval/best_return"]
    assert {"eval/return_at_6.25", "eval/return_at_2.5", "eval/return_at_-1.25", "eval/slope"} <= row.keys()
