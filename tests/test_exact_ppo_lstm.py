"""Recurrent PPO: the LSTM step by step in NumPy, what it may remember and what not, and whole updates by
tests/reference/ppo.py, which walk through each environment's steps alone. What it shares with ppo.py:
test_exact_ppo.py."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import close, float64
from helpers import SMALL, command_line, new_run, user_error
from test_exact_ppo import DISCRETE, GAUSSIAN, MULTI, NEXT, OBS, REWARDS, SCRIPTS, TERMINATED, TRUNCATED, Script

from algos import ppo_atari, ppo_lstm
from algos.ppo import Statistics
from tests.reference import ppo as reference
from utils.control import Plain, make_vector

H, T, N, D = 5, 7, 4, 3
SPACES = pytest.mark.parametrize("space", [DISCRETE, MULTI, GAUSSIAN], ids=["discrete", "multi", "gaussian"])


def make_agent(space=DISCRETE, obs_size=D, seed: int = 0) -> ppo_lstm.Agent:
    """In float64, with large weights: what is remembered matters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        agent = ppo_lstm.Agent(obs_size, space, H)
        for parameter in agent.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.7)
    return agent.double()


def drawn(*shape, seed: int = 0) -> torch.Tensor:
    return torch.as_tensor(np.random.default_rng(seed).normal(size=shape))


def own_step(p: dict, obs: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of Hochreiter and Schmidhuber's cell with a forget gate, of one environment; gates i, f, g, o."""
    x = torch.tanh(p["encoder.0.weight"] @ obs + p["encoder.0.bias"])
    gates = p["lstm.weight_ih_l0"] @ x + p["lstm.bias_ih_l0"] + p["lstm.weight_hh_l0"] @ h + p["lstm.bias_hh_l0"]
    i, f, g, o = gates.view(4, H)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def own_features(p, obs, state, begins) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, N, H) and the states after each step, (T, 2, N, H): each environment alone, step by step."""
    out, after = [], []
    for n in range(obs.shape[1]):
        h, c, rows, states = state[0, n], state[1, n], [], []
        for t in range(obs.shape[0]):
            if begins[t, n]:
                h, c = torch.zeros_like(h), torch.zeros_like(c)
            h, c = own_step(p, obs[t, n], h, c)
            rows.append(h)
            states.append(torch.stack([h, c]))
        out.append(torch.stack(rows))
        after.append(torch.stack(states))
    return torch.stack(out, 1), torch.stack(after, 2)


@SPACES
@pytest.mark.parametrize("memory", [True, False])
def test_rollout_by_hand(space, memory):
    """As ppo.py's, and beside it where episodes begin and what was remembered after each step. A second one goes on
    inside episodes. Without noise each action is the likeliest of what was remembered."""
    scripts, episodes = iter(SCRIPTS), []
    args = ppo_lstm.Args(num_envs=2, num_steps=6, memory=memory)
    envs, obs = make_vector(lambda: Plain(Script(next(scripts), space)), args, 0)
    agent, generator = make_agent(space, 2).float(), torch.Generator().manual_seed(0)
    agent.noise, state = lambda shape, generator: torch.zeros(*shape, sum(agent.parts)), agent.empty(2)
    for i in range(2):
        before, rest = state, (Statistics(2, 2, 0.99, False), generator, args)
        batch, obs, state, ended = ppo_lstm.collect(agent, envs, obs, before, *rest)
        for ours, expected in zip(batch, (OBS, None, REWARDS, NEXT, TERMINATED, TRUNCATED)):
            assert i or expected is None or np.array_equal(ours, expected)
        episodes += ended
        done = batch.terminated | batch.truncated
        assert torch.equal(batch.begins[1:], done[:-1] | (not memory)) and batch.begins[0].all() != memory
        assert torch.equal(batch.state, before) and before.any() == (i == 1)
        out, after = own_features(dict(agent.named_parameters()), batch.obs, before, batch.begins)
        close(batch.after, after.detach() * memory, 1e-6)
        close(state, (after[-1] * ~done[-1][:, None]).detach(), 1e-6)
        out = agent.actor(out)
        likeliest = out if agent.continuous else torch.stack([x.argmax(-1) for x in out.split(agent.parts, -1)], -1)
        close(batch.actions, likeliest, 1e-5)
    assert episodes[:3] == [(3.0, 2), (10.0, 4), (36.0, 3)]


def random_batch(agent, memory: bool = True) -> ppo_lstm.Batch:
    rng = np.random.default_rng(0)
    terminated, truncated = torch.as_tensor(rng.random((2, T, N)) < 0.2)
    begins = torch.zeros(T, N, dtype=torch.bool) if memory else torch.ones(T, N, dtype=torch.bool)
    begins[1:] |= (terminated | truncated)[:-1]
    obs, state = drawn(T, N, D), drawn(2, N, H, seed=1) * memory
    actions = torch.as_tensor(np.stack([rng.integers(0, n, (T, N)) for n in agent.parts], -1))
    if agent.continuous:
        actions = drawn(T, N, *agent.parts, seed=4)
    with torch.no_grad():
        _, after = own_features(dict(agent.named_parameters()), obs, state, begins)
    rewards = drawn(T, N, seed=2)
    return ppo_lstm.Batch(obs, actions, rewards, drawn(T, N, D, seed=3), terminated, truncated, begins, state,
                          after * memory)  # fmt: skip


@float64()
@SPACES
@pytest.mark.parametrize("memory", [True, False])
def test_update_is_the_reference_s(space, memory):
    """Each of two minibatches holds two environments whole, replayed from the state before the rollout. V of a last
    observation is that after the steps of its own episode, not of an empty state."""
    agent, rate = make_agent(space), 0.02 if space is GAUSSIAN else 0.3
    args = ppo_lstm.Args(num_minibatches=2, update_epochs=2, ent_coef=0.1, clip_vloss=True, max_grad_norm=1e9)
    batch = random_batch(agent, memory)

    def policy(p, rows):  # (envs, T)
        one = [x[..., rows[:, 0], :] for x in (batch.obs, batch.state, batch.begins[..., None])]
        features = own_features(p, *one[:2], one[2][..., 0])[0].transpose(0, 1)
        out, value = (features @ p[f"{x}.weight"].T + p[f"{x}.bias"] for x in ("actor", "critic"))
        actions = batch.actions[:, rows[:, 0]].transpose(0, 1)
        return *reference.policy_of(out, agent.parts, actions, p.get("log_std")), value[..., 0]

    def ahead(p):
        after = torch.stack([own_step(p, batch.next_obs[t, n], *batch.after[t, :, n])[0] for t, n in np.ndindex(T, N)])
        return (after @ p["critic.weight"][0] + p["critic.bias"]).view(T, N)

    metrics = reference.check(ppo_lstm, agent, batch, args, rate, policy, ahead,
                              units=lambda steps, envs: np.arange(steps * envs).reshape(steps, envs).T)  # fmt: skip
    assert metrics["clip_fraction"] > 0.05


@pytest.mark.parametrize("memory", [True, False])
def test_evaluation_remembers_and_begins_with_nothing(memory):
    agent, statistics = make_agent(GAUSSIAN).float(), Statistics(D, 1, 0.99, True)
    agent.space, agent.middle, agent.half_width = gym.spaces.Box(-9, 9, (2,)), 0, 1
    obs, scale, generator = drawn(3, 2, D).numpy(), torch.zeros(2, 1), torch.Generator()
    for _ in range(2):  # each evaluation has a memory of its own
        act = ppo_lstm.act_in_evaluation(agent, statistics, memory)
        taken = [act(obs[t], scale, generator) for t in range(3)]
        begins = torch.full((3, 2), not memory)
        out, _ = own_features(dict(agent.named_parameters()), torch.tensor(obs).float(), agent.empty(2), begins)
        close(np.stack(taken), agent.actor(out).detach(), 1e-5)
    assert statistics.obs.count == 1e-4  # nothing was counted, so nothing is scaled


@pytest.mark.parametrize("number, words", [(3, "the 2 environments"), (4, "the 2 environments")])
def test_minibatches_hold_whole_sequences(number, words, tmp_path, capsys):
    with user_error(capsys, f"--num-minibatches {number}", words):
        command_line(ppo_lstm, *SMALL["ppo_lstm"], "--num-minibatches", number, "--output-dir", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("shape", [(3, 8, 10), (4, 84, 84)], ids=str)
def test_images_go_through_the_encoder_of_ppo_atari(shape):
    """Bytes, divided by 255, through networks with the same first weights; then through the LSTM."""
    agents = []
    for module in (ppo_lstm, ppo_atari):
        torch.manual_seed(0)
        agents.append(module.Agent(shape, DISCRETE, 8))
    ours, theirs = agents
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter), name
    obs = torch.randint(0, 256, (5, 2, *shape), dtype=torch.uint8)
    features, _ = ours.features(obs, ours.empty(2), torch.zeros(5, 2, dtype=torch.bool))
    close(features, ours.lstm(theirs.features(obs))[0].detach(), 1e-6)
    statistics = ppo_lstm.Statistics(shape, 2, 0.99, True)
    assert np.array_equal(statistics.observe(obs[0].numpy(), count=True), obs[0]) and not statistics.weights()


def test_without_memory_nothing_is_remembered(tmp_path, monkeypatch):
    """In rollouts and evaluation: each step begins with an empty state."""
    begins, act = [], ppo_lstm.Agent.act
    monkeypatch.setattr(ppo_lstm.Agent, "act", lambda *inputs: begins.append(inputs[3]) or act(*inputs))
    new_run(ppo_lstm, tmp_path, *SMALL["ppo_lstm"], "--no-memory")
    assert all(x.all() for x in begins)
    begins.clear()
    new_run(ppo_lstm, tmp_path, *SMALL["ppo_lstm"])
    assert not all(x.all() for x in begins)
