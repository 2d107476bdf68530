"""PPO against numbers from its formulas: advantages, rollouts, the update, and the parts that they are made of.

tests/reference/ppo.py has the whole update once more. Networks are replaced by linear tables. A test names the
functions that it tests, and runs on every child that has them, with the agent of ppo.py (of rnd.py where that adds to
it) and the statistics of ppo.py.
"""

import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import close, float64
from every_script import sharing, stand_in, with_function
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from scipy import stats
from torch import nn

from algos import ppo, ppo_atari
from algos import ppo as root
from tests.reference import ppo as reference
from utils.control import Plain, make_vector

script = stand_in("ppo")
UPDATE, COLLECT, AGENT = (with_function("ppo", *x) for x in (["update", "ppo_loss"], ["collect"], ["Agent"]))
DISCRETE, MULTI = Discrete(3, start=5), MultiDiscrete([2, 3], start=[7, 1])
GAUSSIAN = Box(np.array([-0.75, 2], np.float32), np.array([0.75, 3], np.float32))  # the second one is stretched
BINARY = MultiBinary(3)
SPACES = pytest.mark.parametrize(
    "space", [DISCRETE, MULTI, BINARY, GAUSSIAN], ids=["discrete", "multi", "binary", "gaussian"]
)


def tensors(*arrays) -> list[torch.Tensor]:
    return [torch.as_tensor(x) for x in arrays]


def own(name: str, module=None) -> type:
    """The script's class where it has the parameters of ppo.py's, else that of ppo.py."""
    module = module or ppo
    return getattr(module if module.NAME in sharing("ppo", name) else root, name)


def linear_agent(obs_size: int, space: gym.Space, seed: int = 0, module=None) -> nn.Module:
    """An agent in float64 whose networks are matrices: on one-hot observations, tables of logits (means) and values.
    What ppo_atari.py and ppo_lstm.py have before these shows observations as they are."""
    with torch.random.fork_rng():
        kind = own("Agent", module)
        agent = kind((1, 1, 3) if kind is ppo_atari.Agent else obs_size, space, 4)
        for name, net in list(agent.named_children()):
            last = net[-1] if name in ("actor", "critic", "target", "predictor") and hasattr(net, "__len__") else net
            setattr(agent, name, nn.Identity())
            if isinstance(last, nn.Linear):
                table = nn.Linear(obs_size, last.out_features, bias=False)
                setattr(agent, name, table.requires_grad_(last.weight.requires_grad))
        torch.manual_seed(seed)
        for parameter in agent.parameters():
            nn.init.normal_(parameter, 0.0, 0.5)
    if hasattr(agent, "lstm"):
        agent.features = lambda obs, state, begins: (obs, state)
        agent.act = lambda obs, noise: kind.act(agent, obs, torch.empty(0), torch.empty(0), noise)[0]
    elif hasattr(agent, "features"):
        agent.features = lambda obs: obs
    return agent.double()


def weights(agent: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().double().numpy().copy() for name, p in agent.named_parameters()}


def tables(agent, batch):
    """The hooks of tests/reference/ppo.py: policy, and values of what follows."""
    obs, actions = batch.obs.flatten(0, 1), batch.actions.flatten(0, 1)

    def policy(p, rows):
        out = obs[rows] @ p["actor.weight"].T
        chosen = reference.policy_of(out, agent.parts, actions[rows], p.get("log_std"))
        return *chosen, obs[rows] @ p["critic.weight"][0]

    return policy, lambda p: batch.next_obs @ p["critic.weight"][0]


def settings(**changes) -> ppo.Args:
    defaults = dict(num_minibatches=1, update_epochs=1, ent_coef=0.0, max_grad_norm=1e9, normalize_advantages=False,
                    clip_coef=0.2)  # fmt: skip
    return ppo.Args(**defaults | changes)


def run_update(agent, batch, args, rate=1.0, loss_function=None) -> tuple[dict, dict]:
    """Weights and metrics after `update` with plain gradient descent; the agent stays as it was."""
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    optimizer, generator = torch.optim.SGD(agent.parameters(), rate), torch.Generator().manual_seed(0)
    metrics = ppo.update(agent, optimizer, batch, generator, args, loss_function or ppo.ppo_loss)
    after = weights(agent)
    agent.load_state_dict(before)
    return after, metrics


def ascent(agent, batch, args) -> dict:
    before = weights(agent)
    return {name: p - before[name] for name, p in run_update(agent, batch, args)[0].items()}


def random_batch(agent, steps=6, envs=4, seed=0) -> ppo.Batch:
    """Every row in a state of its own, whose next observation is the next row's but where an episode or the rollout
    ends: there it is a state that no row starts from. All four ways to end or not to, also at the rollout's end."""
    rng, rows = np.random.default_rng(seed), steps * envs
    states = np.arange(rows).reshape(steps, envs)
    terminated, truncated = rng.random((2, steps, envs)) < 0.25
    terminated[-1], truncated[-1] = [True, False, True, False], [False, True, True, False]
    last = terminated | truncated
    last[-1] = True
    after = np.where(last, states + rows, np.roll(states, -1, 0))
    one_hot = np.eye(2 * rows)
    if agent.continuous:
        p = weights(agent)
        actions = p["actor.weight"].T[states] + np.exp(p["log_std"]) * rng.normal(size=(steps, envs, *agent.parts))
    else:
        actions = np.stack([rng.integers(0, n, (steps, envs)) for n in agent.parts], -1)
    return ppo.Batch(*tensors(one_hot[states], actions, rng.normal(size=(steps, envs)), one_hot[after],
                              terminated, truncated))  # fmt: skip


@with_function("ppo", "gae")
@float64()
@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 1.0])
def test_advantages_of_every_pattern_of_ends(gae_lambda):
    patterns = np.array(list(itertools.product(range(4), repeat=4))).T
    terminated, truncated = patterns % 2 == 1, patterns >= 2
    rewards, values, next_values = np.random.default_rng(0).normal(size=(3, *patterns.shape))
    inputs = rewards, values, next_values, terminated
    ours = ppo.gae(*tensors(*inputs, terminated | truncated), 0.9, gae_lambda)
    close(ours, reference.gae(*inputs, truncated, 0.9, gae_lambda))
    if gae_lambda == 0:
        close(ours, rewards + 0.9 * next_values * (1 - terminated) - values)


@UPDATE
@float64()
@SPACES
@pytest.mark.parametrize("changes", [
    dict(update_epochs=4),
    dict(update_epochs=3, num_minibatches=4, normalize_advantages=True),
    dict(update_epochs=3, num_minibatches=2, ent_coef=0.3, clip_vloss=True, vf_coef=7.6, gae_lambda=0.6),
    dict(update_epochs=2, num_minibatches=2, max_grad_norm=0.05, normalize_advantages=True, gamma=0.8),
    dict(update_epochs=5, target_kl=1e-4)])  # fmt: skip
def test_update_is_the_reference_s(space, changes):
    """Weights after several epochs and minibatches, clips in force, and every metric: ratios to the policy before the
    first epoch, targets from the values before it, advantages normalised within each minibatch. In one minibatch the
    first approx_kl is 0, so --target-kl ends the second epoch at the earliest. With a --vf-coef this large, values
    move beyond their targets."""
    agent, args = linear_agent(48, space, 8), settings(**changes)
    rate = 0.5 if space is GAUSSIAN else 1.0 if space is BINARY else 3.0
    batch = random_batch(agent)
    metrics = reference.check(ppo, agent, batch, args, rate, *tables(agent, batch))
    assert args.max_grad_norm < 1 or args.target_kl or 0.1 < metrics["clip_fraction"] < 0.9
    assert metrics["epochs"] == (2 if args.target_kl else args.update_epochs)


# expected gradients on problems that can be enumerated


def one_row(state, action, reward, next_state, states, terminated=True, truncated=False) -> list:
    return [np.eye(states)[state], action, reward, np.eye(states)[next_state], terminated, truncated]


def make_batch(rows, copies=1) -> ppo.Batch:
    """Rows of one environment one after another; `copies` environments alike leave the mean over rows as it is."""
    return ppo.Batch(*tensors(*(np.stack([np.stack([x] * copies) for x in column]) for column in zip(*rows))))


@UPDATE
@float64()
@pytest.mark.parametrize("gae_lambda, exact_values, cut", [(1.0, False, False), (0.6, True, False), (0.6, True, True)])
def test_expected_movement_is_the_policy_gradient(gae_lambda, exact_values, cut):
    """Two decisions, or one where action 2 is taken first: over all episodes, each a batch, the mean of length times
    movement is the gradient of the expected return. With lambda 1 whatever the critic says; with any lambda where the
    critic is exact, and then also for the first decision alone where a time limit cuts every episode after it."""
    rewards = np.random.default_rng(0).normal(size=(4, 3))  # state 0, then state 1 + action; state 3 is the end
    agent = linear_agent(4, DISCRETE, seed=1)
    logits = weights(agent)["actor.weight"].T
    pi = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    later = (pi * rewards).sum(1) * [0, 1, 1, 0]  # values of states 1 and 2
    first = rewards[0] + later[[1, 2, 3]]  # expected return of each first action
    if exact_values:
        agent.critic.weight.data[0] = torch.from_numpy(later)
        agent.critic.weight.data[0, 0] = pi[0] @ first
    args = settings(gamma=1.0, gae_lambda=gae_lambda)
    moved = 0.0
    for a in range(3):
        if a == 2 or cut:
            rows = [one_row(0, [a], rewards[0, a], 1 + a, 4, terminated=a == 2, truncated=cut and a < 2)]
            moved += pi[0, a] * ascent(agent, make_batch(rows, 2), args)["actor.weight"].T
            continue
        for b in range(3):
            rows = [one_row(0, [a], rewards[0, a], 1 + a, 4, terminated=False)]
            rows += [one_row(1 + a, [b], rewards[1 + a, b], 3, 4)]
            moved += 2 * pi[0, a] * pi[1 + a, b] * ascent(agent, make_batch(rows, 2), args)["actor.weight"].T
    gradient = np.zeros((4, 3))
    gradient[0] = pi[0] * (first - pi[0] @ first)
    if not cut:
        for s in (1, 2):
            gradient[s] = pi[0, s - 1] * pi[s] * (rewards[s] - later[s])
    assert abs(gradient[0]).max() > 0.05
    close(moved, gradient)


@UPDATE
def test_expected_movement_of_a_gaussian_is_the_policy_gradient():
    """E over actions by Gauss-Hermite quadrature of the noise that `act` takes, exact for these polynomial rewards
    r = (c . a) - a1^2 / 2 + a0^3 / 3 + a0 a1; gradient of E r by means and log standard deviations in closed form."""
    agent, c = linear_agent(1, GAUSSIAN), np.array([0.7, -0.4])
    p = weights(agent)
    (m0, m1), (s0, s1) = p["actor.weight"][:, 0], np.exp(p["log_std"])
    nodes, mass = np.polynomial.hermite_e.hermegauss(6)
    moved = {"actor.weight": 0.0, "log_std": 0.0}
    for (x, wx), (y, wy) in itertools.product(zip(nodes, mass / mass.sum()), repeat=2):
        with torch.no_grad():
            action = agent.act(torch.ones(1, 1).double(), torch.tensor([[x, y]]).double())[0].numpy()
        reward = c @ action - action[1] ** 2 / 2 + action[0] ** 3 / 3 + action[0] * action[1]
        change = ascent(agent, make_batch([one_row(0, action, reward, 0, 1)], 2), settings())
        moved = {name: total + wx * wy * change[name] for name, total in moved.items()}
    close(moved["actor.weight"][:, 0], [c[0] + m0**2 + s0**2 + m1, c[1] - m1 + m0])
    close(moved["log_std"], [2 * m0 * s0**2, -(s1**2)])


# rollouts


class Script(gym.Env):
    """Plays episodes of given (length, how it ends), again and again. Its observation is (episode, step), its reward 10
    episode + step, and it returns the same array each time, as many environments do. Keeps the actions."""

    def __init__(self, script, action_space=DISCRETE):
        self.script, self.action_space, self.observation_space = script, action_space, Box(-np.inf, np.inf, (2,))
        self.place, self.actions = np.array([-1.0, 0.0], np.float32), []

    def reset(self, *, seed=None, options=None):
        self.place += [1 - 0, -self.place[1]]
        return self.place, {}

    def step(self, action):
        self.actions.append(np.array(action))
        self.place[1] += 1
        length, end = self.script[int(self.place[0]) % len(self.script)]
        over = self.place[1] == length
        reward = 10 * self.place[0] + self.place[1]
        return self.place, reward, over and end in ("terminated", "both"), over and end in ("truncated", "both"), {}


SCRIPTS = [[(2, "terminated"), (3, "truncated")], [(4, "both"), (9, "terminated")]]
OBS = np.array([[[0, 0], [0, 1], [1, 0], [1, 1], [1, 2], [2, 0]], [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]]])
NEXT = np.array([[[0, 1], [0, 2], [1, 1], [1, 2], [1, 3], [2, 1]], [[0, 1], [0, 2], [0, 3], [0, 4], [1, 1], [1, 2]]])
OBS, NEXT = OBS.swapaxes(0, 1).astype(float), NEXT.swapaxes(0, 1).astype(float)
RETURNED = np.concatenate([OBS[1:], [[[2, 1], [1, 2]]]])  # what the agent acts on next
REWARDS = np.array([[1, 2, 11, 12, 13, 21], [1, 2, 3, 4, 11, 12]], float).T
TERMINATED, TRUNCATED = np.zeros((2, 6, 2), bool)
TERMINATED[[1, 3], [0, 1]] = TRUNCATED[[4, 3], [0, 1]] = True


def rollout(space, agent=None, normalize=False, rounds=1, steps=6, module=None):
    """The last of `rounds` batches of six steps of the two scripts, and what else there is to look at."""
    module, scripts = module or ppo, iter(SCRIPTS)
    args = module.Args(num_envs=2, num_steps=steps, gamma=0.9)
    envs, obs = make_vector(lambda: Plain(Script(next(scripts), space)), args, 0)
    statistics = own("Statistics", module)(2, 2, 0.9, normalize)
    statistics.observe(obs, count=True)
    agent = agent or linear_agent(2, space, module=module).float()
    generator = torch.Generator().manual_seed(0)
    for _ in range(rounds):
        batch, obs, episodes = module.collect(agent, envs, obs, statistics, generator, args)
    return batch, obs, episodes, statistics, [np.stack(env.unwrapped.actions) for env in envs.envs]


@COLLECT
@SPACES
def test_rollout_by_hand(space):
    """Every row of two scripted environments: next_obs is the old episode's last observation where one ends, also where
    the environment reuses its array; a second rollout goes on where the first ended."""
    batch, obs, episodes, _, _ = rollout(space)
    for ours, expected in zip(batch, (OBS, None, REWARDS, NEXT, TERMINATED, TRUNCATED)):
        assert expected is None or np.array_equal(ours, expected)
    assert batch.obs.dtype == batch.next_obs.dtype == batch.rewards.dtype == torch.float32
    assert episodes == [(3.0, 2), (10.0, 4), (36.0, 3)] and np.array_equal(obs, [[2, 1], [1, 2]])
    batch, _, episodes, _, _ = rollout(space, rounds=2)
    assert batch.obs[:3].tolist() == [[[2, 1], [1, 2]], [[3, 0], [1, 3]], [[3, 1], [1, 4]]]
    assert batch.terminated[0].tolist() == [True, False] and episodes[0] == (21.0 + 22.0, 2)


def executed(actions: np.ndarray) -> np.ndarray:
    """What GAUSSIAN's environment gets: clipped, and first stretched to bounds that exclude most of N(0, 1)."""
    return np.stack([actions[..., 0].clip(-0.75, 0.75), (2.5 + 0.5 * actions[..., 1]).clip(2, 3)], -1)


@COLLECT
@SPACES
def test_actions_of_a_rollout(space):
    """The environment gets the batch's actions shifted by `start`, or `executed`; the batch keeps what was sampled,
    with new noise for each step and environment."""
    batch, _, _, _, taken = rollout(space)
    sampled, taken = batch.actions.numpy(), np.stack(taken, 1).reshape(6, 2, -1)
    if space is GAUSSIAN:
        assert abs(sampled).max() > 0.6 and len(np.unique(sampled)) == sampled.size
        assert np.array_equal(taken, executed(sampled))
        agent = linear_agent(2, space).float()
        agent.log_std.data.fill_(-20)  # hardly any noise: the action is the mean at the observation in the same row
        batch = rollout(space, agent)[0]
        close(batch.actions, agent.actor(batch.obs).detach(), 1e-5)
    else:
        assert np.array_equal(taken, sampled + getattr(space, "start", 0)) and sampled.min() == 0
        assert len(np.unique(sampled.reshape(12, -1), axis=0)) > 2


def moments(rows) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of rows and of 1e-4 rows of mean 0 and variance 1 before them."""
    rows, total = np.asarray(rows, float), len(rows) + 1e-4
    mean = rows.sum(0) / total
    return mean, ((rows**2).sum(0) + 1e-4) / total - mean**2


@COLLECT
def test_rollout_is_normalised_by_all_that_was_acted_on():
    """Observations: by all that the agent acts on up to then, in both environments; an episode's last observation is
    normalised but not counted. Rewards: by all discounted returns up to then, which start again with each episode."""
    batch, _, _, statistics, _ = rollout(DISCRETE, normalize=True)
    discounted, returns = np.zeros(2), []
    for t in range(6):
        counted = np.concatenate([OBS[0], *RETURNED[:t]])
        mean, var = moments(counted)
        close(batch.obs[t], (OBS[t] - mean) / np.sqrt(var + 1e-8), 1e-5)
        counted = np.concatenate([counted, RETURNED[t]])
        mean, var = moments(counted)
        close(batch.next_obs[t], (NEXT[t] - mean) / np.sqrt(var + 1e-8), 1e-5)
        discounted = discounted * 0.9 + REWARDS[t]
        returns += discounted.tolist()
        discounted = np.where(TERMINATED[t] | TRUNCATED[t], 0.0, discounted)
        if hasattr(statistics, "reward"):  # rnd.py leaves rewards as they are
            close(batch.rewards[t], np.clip(REWARDS[t] / np.sqrt(moments(returns)[1] + 1e-8), -10, 10), 1e-5)
    assert 2 < abs(batch.next_obs[4, 0, 1]) < 10  # the reset observation's would be below
    close(statistics.obs.mean, mean)
    close(statistics.obs.var, var)


@with_function("ppo", "act_in_evaluation")
def test_evaluation_acts_on_frozen_statistics():
    """Observations are normalised and not counted; scale 0 is the likeliest action, scale 1 a sample."""
    agent, statistics = linear_agent(2, GAUSSIAN).float(), own("Statistics")(2, 1, 0.9, True)
    statistics.observe(np.array([[0.0, 1.0], [2.0, 5.0]]), count=True)
    before, obs = statistics.state_dict(), np.array([[0.5, 2.0], [0.5, 2.0]])
    scale, generator = torch.tensor([[0.0], [1.0]]), torch.Generator().manual_seed(0)
    actions = ppo.act_in_evaluation(agent, statistics, obs, scale, generator)
    mean, var = moments([[0.0, 1.0], [2.0, 5.0]])
    likeliest = weights(agent)["actor.weight"] @ ((obs[0] - mean) / np.sqrt(var))
    close(actions[0], executed(likeliest), 1e-5)
    assert abs(likeliest).min() < 0.5 and not np.allclose(actions[0], actions[1])
    for name in ("mean", "var", "count"):
        assert torch.equal(statistics.state_dict()["obs"][name], before["obs"][name])


@AGENT
def test_first_weights():
    """Orthogonal: of hidden layers sqrt 2, of the LSTM and of the value's head 1, of the policy's head 0.01. All else
    is zero."""
    gains = {"lstm.w": 1, "actor.w": 0.01, "actor.4.w": 0.01, "critic.w": 1, "critic.4.w": 1}
    for shape in {"ppo_atari": [(3, 8, 10), (4, 84, 84), (5, 35, 90)]}.get(ppo.NAME, [3]):
        agent = ppo.Agent(shape, Box(-1, 1, (2,)), 16)
        for name, parameter in agent.named_parameters():
            if "weight" in name:
                w, gain = parameter.detach().flatten(1), gains.get(name[: name.index("weight") + 1], 2**0.5)
                close(torch.linalg.svdvals(w), [gain] * min(w.shape), 1e-4)
            else:
                assert not parameter.any()


@AGENT
@pytest.mark.parametrize("space", [
    Discrete(5), MultiDiscrete([2, 3, 4]), MultiDiscrete([[2, 3], [4, 2]]), MultiBinary(4), MultiBinary((2, 3)),
    Box(-1, 1, (1,)), Box(-1, 1, (2, 2))])  # fmt: skip
def test_log_probabilities_equal_torch(space):
    agent = linear_agent(3, space)
    obs, generator = torch.randn(4, 2, 3).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        actions = agent.act(obs, agent.noise((4, 2), generator))
        expected = reference.policy_of(agent.actor(obs), agent.parts, actions, getattr(agent, "log_std", None))
        for ours, theirs in zip(agent.log_prob(obs, actions), expected):
            assert ours.shape == (4, 2)
            close(ours, theirs, 1e-6)  # the noise is float32
    assert actions.shape == (4, 2, space.nvec.size if isinstance(space, MultiDiscrete) else np.prod(space.shape))
    assert agent.to_env(actions.reshape(8, -1).numpy()).shape == (8, *space.shape)


@AGENT
def test_actions_are_samples_of_the_policy():
    """Without noise the likeliest action. With noise: as often as the softmax says, jointly (chi-square)."""
    agent, generator = linear_agent(1, MULTI), torch.Generator().manual_seed(0)
    obs, out = torch.ones(20_000, 1).double(), weights(agent)["actor.weight"][:, 0]
    with torch.no_grad():
        noise = agent.noise((20_000,), generator)
        actions = agent.act(obs, noise).numpy()
        likeliest = agent.act(obs, 0 * noise).numpy()
    assert (likeliest == [out[:2].argmax(), out[2:].argmax()]).all()
    first, second = (np.exp(part) / np.exp(part).sum() for part in (out[:2], out[2:]))
    counts = np.bincount(actions @ [3, 1], minlength=6)
    assert stats.chisquare(counts, 20_000 * np.outer(first, second).flatten()).pvalue > 1e-3


@AGENT
def test_gaussian_actions_are_samples_of_the_policy():
    """By their distribution function (Kolmogorov-Smirnov)."""
    generator, obs = torch.Generator().manual_seed(0), torch.ones(20_000, 1).double()
    agent = linear_agent(1, GAUSSIAN)
    mean, std = weights(agent)["actor.weight"][:, 0], np.exp(weights(agent)["log_std"])
    with torch.no_grad():
        noise = agent.noise((20_000,), generator)
        close(agent.act(obs, 0 * noise), np.tile(mean, (20_000, 1)))
        actions = agent.act(obs, noise).numpy()
    assert stats.kstest(((actions - mean) / std).flatten(), "norm").pvalue > 1e-3
    assert abs(np.corrcoef(actions.T)[0, 1]) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("space", [DISCRETE, GAUSSIAN], ids=["discrete", "gaussian"])
def test_compiled_loss_equals_eager(space):
    agent = linear_agent(48, space)
    batch = random_batch(agent)
    args = settings(update_epochs=3, num_minibatches=2, normalize_advantages=True, ent_coef=0.1, clip_vloss=True)
    (eager, metrics), (compiled, their_metrics) = (
        run_update(agent, batch, args, 0.5, loss) for loss in (ppo.ppo_loss, torch.compile(ppo.ppo_loss))
    )
    for name in eager:
        close(compiled[name], eager[name])
    close(list(their_metrics.values()), list(metrics.values()), 1e-6)
