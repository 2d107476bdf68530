"""Recurrent PPO: the LSTM step by step in NumPy, what it may remember and what not, and whole updates by a second
implementation that walks through each environment's steps alone."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import close, float64
from helpers import SMALL, command_line, metrics, new_run, user_error
from test_exact_ppo import BINARY, DISCRETE, GAUSSIAN, MULTI, NEXT, OBS, REWARDS, SCRIPTS, TERMINATED, TRUNCATED, Script

from algos import ppo, ppo_atari, ppo_lstm
from algos.ppo import Statistics
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


def own_step(agent, obs: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of Hochreiter and Schmidhuber's cell with a forget gate, of one environment; gates i, f, g, o."""
    p = dict(agent.named_parameters())
    x = torch.tanh(p["encoder.0.weight"] @ obs + p["encoder.0.bias"])
    gates = p["lstm.weight_ih_l0"] @ x + p["lstm.bias_ih_l0"] + p["lstm.weight_hh_l0"] @ h + p["lstm.bias_hh_l0"]
    i, f, g, o = gates.view(4, H)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def own_features(agent, obs, state, begins) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, N, H) and the states after each step, (T, 2, N, H): each environment alone, step by step."""
    out, after = [], []
    for n in range(obs.shape[1]):
        h, c, rows, states = state[0, n], state[1, n], [], []
        for t in range(obs.shape[0]):
            if begins[t, n]:
                h, c = torch.zeros_like(h), torch.zeros_like(c)
            h, c = own_step(agent, obs[t, n], h, c)
            rows.append(h)
            states.append(torch.stack([h, c]))
        out.append(torch.stack(rows))
        after.append(torch.stack(states))
    return torch.stack(out, 1), torch.stack(after, 2)


BEGINS = torch.zeros(T, N, dtype=torch.bool)
BEGINS[[2, 3, 3, 5, 6], [0, 1, 0, 2, 2]] = True


@float64()
def test_a_sequence_is_its_steps_one_by_one():
    """Also with episodes that begin inside it, at different steps in each environment, and from any state before."""
    agent, obs, state = make_agent(), drawn(T, N, D), drawn(2, N, H, seed=1)
    out, last = agent.features(obs, state, BEGINS)
    expected, after = own_features(agent, obs, state, BEGINS)
    close(out, expected.detach())
    close(last, after[-1].detach())
    for t in range(T):  # as when acting
        one, state = agent.features(obs[t : t + 1], state, BEGINS[t : t + 1])
        close(one[0], out[t].detach())
    close(state, last.detach())


@float64()
def test_nothing_crosses_the_end_of_an_episode():
    """Neither forward nor backward: two episodes in one sequence are two sequences. Within one, all reaches all."""
    agent, obs, state = make_agent(), drawn(T, N, D).requires_grad_(), drawn(2, N, H, seed=1).requires_grad_()
    out, _ = agent.features(obs, state, BEGINS)
    for n in range(N):
        episode = BEGINS[:, n].cumsum(0)
        for t in range(T):
            from_obs, from_state = torch.autograd.grad(out[t, n].sum(), (obs, state), retain_graph=True)
            reached = from_obs[:, n].abs().sum(1) > 0
            assert torch.equal(reached, (episode == episode[t]) & (torch.arange(T) <= t))
            assert (from_state[:, n].abs().sum() > 0) == (episode[t] == 0)
            assert from_obs[:, np.arange(N) != n].abs().sum() == 0  # nor from another environment
    with torch.no_grad():
        changed = obs.clone()
        changed[2, 1] += 9.0  # before environment 1 begins at step 3
        after = agent.features(changed, state, BEGINS)[0]
    assert torch.equal(after[3:, 1], out[3:, 1]) and not torch.equal(after[2, 1], out[2, 1])


def rollout(space, memory: bool = True, rounds: int = 1):
    """Batches of six steps of the two scripts of test_exact_ppo.py, whose episodes end in every way."""
    scripts = iter(SCRIPTS)
    sizes = dict(num_envs=2, num_steps=6, num_minibatches=1, update_epochs=1, ent_coef=0.0)
    args = ppo_lstm.Args(**sizes, memory=memory)
    envs, obs = make_vector(lambda: Plain(Script(next(scripts), space)), args, 0)
    agent, statistics = make_agent(space, 2).float(), Statistics(2, 2, 0.99, False)
    state, generator, batches = agent.empty(2), torch.Generator().manual_seed(0), []
    for _ in range(rounds):
        batch, obs, state, episodes = ppo_lstm.collect(agent, envs, obs, state, statistics, generator, args)
        batches.append(batch)
    return agent, batches, state, episodes, args


@SPACES
def test_rollout_by_hand(space):
    """As ppo.py's, and beside it where episodes begin and what was remembered after each step."""
    agent, (batch,), state, episodes, _ = rollout(space)
    for ours, expected in zip(batch, (OBS, None, REWARDS, NEXT, TERMINATED, TRUNCATED)):
        assert expected is None or np.array_equal(ours, expected)
    assert episodes == [(3.0, 2), (10.0, 4), (36.0, 3)]
    done = torch.as_tensor(TERMINATED | TRUNCATED)
    assert torch.equal(batch.begins[1:], done[:-1]) and not batch.begins[0].any() and not batch.state.any()
    _, after = own_features(agent, batch.obs, batch.state, batch.begins)
    close(batch.after, after.detach(), 1e-6)
    close(state, (after[-1] * ~done[-1][:, None]).detach(), 1e-6)


@SPACES
@pytest.mark.parametrize("memory", [True, False])
def test_the_update_replays_what_acted(space, memory, monkeypatch):
    """In the first epoch every ratio is 1: the second rollout begins inside episodes, with the state they had."""
    agent, batches, _, _, args = rollout(space, memory, rounds=2)
    batch = batches[1]
    assert batch.begins[1:].any() and (batch.state.any() if memory else batch.begins.all())
    acted, state = [], batch.state
    with torch.no_grad():
        for t in range(6):
            action, state = agent.act(batch.obs[t], state, batch.begins[t], torch.zeros(2, sum(agent.parts)))
            acted.append(action)
        features, _ = agent.features(batch.obs, batch.state, batch.begins)
        mean = agent.actor(features)
        likeliest = mean if agent.continuous else torch.stack([p.argmax(-1) for p in mean.split(agent.parts, -1)], -1)
    close(torch.stack(acted), likeliest, 1e-6)
    args.num_minibatches = 2
    optimizer = torch.optim.SGD(agent.parameters(), 0.0)
    assert abs(ppo_lstm.update(agent, optimizer, batch, torch.Generator(), args)["approx_kl"]) < 1e-7


@pytest.mark.parametrize("memory", [True, False])
def test_the_bootstrap_remembers_the_episode_that_was_cut_off(memory, monkeypatch):
    """V of a last observation is that after the steps of its own episode, not of an empty state. Also at the end of the
    rollout."""
    agent, (batch,), _, _, args = rollout(DISCRETE, memory)
    found = {}
    gae = ppo_lstm.gae
    monkeypatch.setattr(ppo_lstm, "gae", lambda r, v, nv, *rest: found.update(v=v, nv=nv) or gae(r, v, nv, *rest))
    ppo_lstm.update(agent, torch.optim.SGD(agent.parameters(), 0.0), batch, torch.Generator(), args)
    out, after = own_features(agent, batch.obs, batch.state, batch.begins)
    expected = torch.empty(6, 2)
    for t, n in np.ndindex(6, 2):
        h, c = after[t, :, n] if memory else torch.zeros(2, H)
        expected[t, n] = agent.critic(own_step(agent, batch.next_obs[t, n], h, c)[0])[0]
    close(found["nv"], expected.detach(), 1e-6)
    close(found["v"], agent.critic(out)[..., 0].detach(), 1e-6)
    inside = ~(batch.terminated | batch.truncated)[:-1]
    close(found["nv"][:-1][inside], found["v"][1:][inside], 1e-6)  # as the next row has it


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
        _, after = own_features(agent, obs, state, begins)
    rewards = drawn(T, N, seed=2)
    return ppo_lstm.Batch(obs, actions, rewards, drawn(T, N, D, seed=3), terminated, truncated, begins, state,
                          after * memory)  # fmt: skip


def own_policy(agent, features, actions) -> tuple[torch.Tensor, torch.Tensor]:
    out = agent.actor(features)
    if agent.continuous:
        policy = torch.distributions.Independent(torch.distributions.Normal(out, agent.log_std.exp()), 1)
        return policy.log_prob(actions), policy.entropy()
    parts = [torch.distributions.Categorical(logits=part) for part in out.split(agent.parts, -1)]
    return sum(p.log_prob(a) for p, a in zip(parts, actions.unbind(-1))), sum(p.entropy() for p in parts)


@float64()
@SPACES
def test_whole_updates_by_a_second_implementation(space):
    """Two epochs of two minibatches: each holds two environments whole, replayed from the state before the rollout."""
    agent, orders, rate = make_agent(space), [], 0.02 if space is GAUSSIAN else 0.3
    args = ppo_lstm.Args(num_minibatches=2, update_epochs=2, ent_coef=0.1, clip_vloss=True, max_grad_norm=1e9)
    batch = random_batch(agent)
    start = {name: p.detach().clone() for name, p in agent.named_parameters()}
    before = torch.arange(N)

    def recorded(agent, obs, *others):
        orders.append([next(n for n in before if torch.equal(batch.obs[:, n], obs[:, i])) for i in range(obs.shape[1])])
        return ppo_lstm.ppo_loss(agent, obs, *others)

    numbers = ppo_lstm.update(
        agent, torch.optim.SGD(agent.parameters(), rate), batch, torch.Generator(), args, recorded
    )
    after = {name: p.detach().clone() for name, p in agent.named_parameters()}
    assert [len(order) for order in orders] == [2] * 4
    assert [sorted(int(n) for n in orders[i] + orders[i + 1]) for i in (0, 2)] == [[0, 1, 2, 3]] * 2

    agent.load_state_dict(start, strict=False)
    with torch.no_grad():
        out, _ = own_features(agent, batch.obs, batch.state, batch.begins)
        old, values = own_policy(agent, out, batch.actions)[0], agent.critic(out)[..., 0]
        next_values = torch.empty(T, N)
        for t, n in np.ndindex(T, N):
            next_values[t, n] = agent.critic(own_step(agent, batch.next_obs[t, n], *batch.after[t, :, n])[0])[0]
        done = batch.terminated | batch.truncated
        advantages = ppo.gae(batch.rewards, values, next_values, batch.terminated, done, 0.99, 0.95)
        returns = advantages + values
    kls = []
    for order in orders:
        rows = torch.stack(order)
        part = lambda x, rows=rows: x[:, rows]  # noqa: E731
        out, _ = own_features(agent, part(batch.obs), part(batch.state), part(batch.begins))
        logps, entropy = own_policy(agent, out, part(batch.actions))
        now, a = agent.critic(out)[..., 0], part(advantages)
        a = (a - a.mean()) / (a.std() + 1e-8)
        ratio = (logps - part(old)).exp()
        near = part(values) + (now - part(values)).clamp(-0.2, 0.2)
        errors = torch.maximum((now - part(returns)) ** 2, (near - part(returns)) ** 2)
        gain = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) + 0.1 * entropy
        kls.append((ratio - 1 - ratio.log()).mean().item())
        gradients = torch.autograd.grad((0.25 * errors - gain).mean(), list(agent.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(agent.parameters(), gradients):
                parameter -= rate * gradient
    for name, parameter in agent.named_parameters():
        close(after[name], parameter.detach())
        assert (after[name] - start[name]).abs().max() > 1e-4, f"{name} did not move"
    close(numbers["approx_kl"], np.mean(kls[2:]), 1e-7)
    assert numbers["clip_fraction"] > 0.05


class Head(torch.nn.Module):
    """A head of a recurrent agent whose state is empty at each step: a network of observations (..., D)."""

    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, obs):
        flat = obs.reshape(1, -1, D)
        begins = torch.ones(flat.shape[:2], dtype=torch.bool)
        features, _ = self.body.features(flat, self.body.empty(flat.shape[1]).double(), begins)
        return self.head(features).view(*obs.shape[:-1], -1)


class Feedforward(ppo.Agent):
    """The networks of a recurrent agent on an empty state, as ppo.py's agent."""

    def __init__(self, recurrent):
        super().__init__(D, recurrent.space, 2)
        self.actor, self.critic = Head(recurrent, recurrent.actor), Head(recurrent, recurrent.critic)
        if self.continuous:
            self.log_std = recurrent.log_std


@float64()
@SPACES
def test_without_memory_it_is_ppo(space):
    """Where every step begins an episode for the LSTM, an update in one minibatch is ppo.py's of the same networks."""
    args = ppo.Args(num_minibatches=1, update_epochs=3, ent_coef=0.1, max_grad_norm=0.5)
    ours, copy = make_agent(space), make_agent(space)
    batch, theirs = random_batch(ours, memory=False), Feedforward(copy)
    parameters = list(copy.parameters())
    first = ppo_lstm.update(ours, torch.optim.SGD(ours.parameters(), 0.1), batch, torch.Generator(), args)
    second = ppo.update(theirs, torch.optim.SGD(parameters, 0.1), ppo.Batch(*batch[:6]), torch.Generator(), args)
    close([first[name] for name in second], list(second.values()), 1e-7)
    moved = 0.0
    for mine, other, start in zip(ours.parameters(), parameters, make_agent(space).parameters()):
        close(mine, other.detach())
        moved = max(moved, (mine - start).abs().max().item())
    assert moved > 0.01


@pytest.mark.parametrize("space", [DISCRETE, MULTI, BINARY, GAUSSIAN], ids=["discrete", "multi", "binary", "gaussian"])
def test_actions_are_those_of_ppo(space):
    """Of the same features: noise, actions, what is executed, log-probabilities and entropies."""
    ours, theirs = make_agent(space).float(), ppo.Agent(H, space, 2)
    obs, begins = drawn(1, 50, D).float(), torch.zeros(1, 50, dtype=torch.bool)
    theirs.actor = ours.actor
    if ours.continuous:
        theirs.log_std = ours.log_std
    noise, expected = (agent.noise((50,), torch.Generator().manual_seed(1)) for agent in (ours, theirs))
    assert torch.equal(noise, expected)
    with torch.no_grad():
        features, _ = ours.features(obs, ours.empty(50), begins)
        actions, _ = ours.act(obs[0], ours.empty(50), begins[0], noise)
        assert torch.equal(actions, theirs.act(features[0], noise)) and len(actions.unique(dim=0)) > 1
        for found, wanted in zip(ours.log_prob(features[0], actions), theirs.log_prob(features[0], actions)):
            assert torch.equal(found, wanted)
    assert np.array_equal(ours.to_env(actions.numpy()), theirs.to_env(actions.numpy()))


def test_the_learning_rate_falls_to_zero(tmp_path):
    args = [*SMALL["ppo_lstm"], "--learning-rate", 0.006, "--total-timesteps", 96, "--eval-every", 0]
    close([row["learning_rate"] for row in metrics(new_run(ppo_lstm, tmp_path, *args))], [0.006, 0.004, 0.002])


def test_first_weights():
    torch.manual_seed(0)
    agent = ppo_lstm.Agent(3, DISCRETE, 8)
    gains = {"encoder.0.weight": 2**0.5, "lstm.weight_ih_l0": 1, "lstm.weight_hh_l0": 1, "actor.weight": 0.01,
             "critic.weight": 1}  # fmt: skip
    for name, parameter in agent.named_parameters():
        if "bias" in name:
            assert not parameter.any()
        else:
            close(torch.linalg.svdvals(parameter.detach()), [gains[name]] * min(parameter.shape), 1e-5)


@pytest.mark.parametrize("memory", [True, False])
def test_evaluation_remembers_and_begins_with_nothing(memory):
    agent, statistics = make_agent(GAUSSIAN).float(), Statistics(D, 1, 0.99, True)
    agent.space, agent.middle, agent.half_width = gym.spaces.Box(-9, 9, (2,)), 0, 1
    obs, scale, generator = drawn(3, 2, D).numpy(), torch.zeros(2, 1), torch.Generator()
    for _ in range(2):  # each evaluation has a memory of its own
        act = ppo_lstm.act_in_evaluation(agent, statistics, memory)
        taken = [act(obs[t], scale, generator) for t in range(3)]
        begins = torch.full((3, 2), not memory)
        out, _ = own_features(agent, torch.as_tensor(obs).float(), agent.empty(2), begins)
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
