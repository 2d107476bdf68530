"""RND: whole updates by a second implementation in NumPy, the bonus' sums and rollouts by hand, and how the novelty of
a state falls with its visits, in closed form."""

import itertools

import numpy as np
import pytest
import torch
from control import close, float64
from helpers import SMALL, metrics, new_run
from test_exact_ppo import (
    BINARY,
    DISCRETE,
    GAUSSIAN,
    MULTI,
    NEXT,
    OBS,
    RETURNED,
    REWARDS,
    SCRIPTS,
    TERMINATED,
    TRUNCATED,
    Script,
    executed,
    moments,
    own_advantages,
    own_policy,
    random_batch,
    weights,
)
from torch import nn

from algos import ppo, rnd
from utils.control import Plain, make_vector

K = 3  # features
SPACES = pytest.mark.parametrize(
    "space", [DISCRETE, MULTI, BINARY, GAUSSIAN], ids=["discrete", "multi", "binary", "gaussian"]
)


def linear_agent(obs_size: int, space=DISCRETE, seed: int = 0) -> rnd.Agent:
    """In float64, with matrices for networks: on one-hot observations all four are tables."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        agent = rnd.Agent(obs_size, space, 4)
        frozen = [p.requires_grad for p in agent.target.parameters()]
        for name, size in dict(actor=sum(agent.parts), critic=2, target=K, predictor=K).items():
            setattr(agent, name, nn.Linear(obs_size, size, bias=False))
        agent.target.requires_grad_(any(frozen))
        for parameter in agent.parameters():
            nn.init.normal_(parameter, 0.0, 0.5)
    return agent.double()


def settings(**changes) -> rnd.Args:
    defaults = dict(num_minibatches=1, update_epochs=1, ent_coef=0.0, max_grad_norm=1e9, normalize_advantages=False,
                    gamma=0.8, int_gamma=0.95, gae_lambda=0.7)  # fmt: skip
    return rnd.Args(**defaults | changes)


def make_batch(agent, steps: int = 6, envs: int = 4) -> rnd.Batch:
    """ppo.py's batch, and a bonus; the last observation is the reset's where an episode ended, in states of their own,
    so no two values are equal by chance."""
    batch, rng = random_batch(agent, steps, envs), np.random.default_rng(5)
    last_obs = np.eye(batch.obs.shape[-1])[-envs - 2 : -2]
    return rnd.Batch(*batch, *map(torch.as_tensor, (rng.random((steps, envs)), last_obs)))


def run_update(module, agent, batch, args, rate: float = 1.0) -> tuple[dict, dict]:
    """Weights and metrics after `update` with plain gradient descent; the agent stays as it was."""
    before = {name: value.clone() for name, value in agent.state_dict().items()}
    optimizer, generator = torch.optim.SGD(agent.parameters(), rate), torch.Generator().manual_seed(0)
    found = module.update(agent, optimizer, batch, generator, args)
    after = weights(agent)
    agent.load_state_dict(before)
    return after, found


def own_update(agent, batch, rate: float, args) -> tuple[dict, dict]:
    p, generator, n = weights(agent), torch.Generator().manual_seed(0), args.num_minibatches
    target = agent.target.weight.detach().numpy()
    obs, actions, rewards, next_obs, terminated, truncated, bonus, last = (x.double().numpy() for x in batch)
    steps, critic = len(obs), p["critic.weight"].T
    extrinsic = own_advantages(rewards, (obs @ critic)[..., 0], (next_obs @ critic)[..., 0], terminated, truncated,
                               args.gamma, args.gae_lambda)  # fmt: skip
    along, intrinsic = np.concatenate([obs, last[None]]) @ critic[:, 1], np.zeros(bonus.shape)
    for t, k in itertools.combinations_with_replacement(range(steps), 2):  # what the agent saw, whatever ended
        delta = bonus[k] + args.int_gamma * along[k + 1] - along[k]
        intrinsic[t] += (args.int_gamma * args.gae_lambda) ** (k - t) * delta
    advantages = (args.ext_coef * extrinsic + args.int_coef * intrinsic).flatten()
    values = (obs @ critic).reshape(-1, 2)
    returns = values + np.stack([extrinsic.flatten(), intrinsic.flatten()], -1)
    obs, next_obs, actions = (x.reshape(-1, x.shape[-1]) for x in (obs, next_obs, actions))
    old_logps, eps, numbers = own_policy(p, agent.parts, obs, actions)[0], args.clip_coef, []
    norms: list[float] = []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(obs), generator=generator).numpy()
        chosen = (torch.rand(len(obs), generator=generator) < args.update_proportion).numpy()
        numbers = []
        for rows in np.split(order, n):
            logps, entropy, score, slope, score_std = own_policy(p, agent.parts, obs[rows], actions[rows])
            ratio, a = np.exp(logps - old_logps[rows]), advantages[rows]
            if args.normalize_advantages:
                a = (a - a.mean()) / (a.std(ddof=1) + 1e-8)
            cut = np.where(a > 0, ratio > 1 + eps, ratio < 1 - eps)
            pull = (np.where(cut, 0.0, ratio * a) / len(rows))[:, None]
            errors = obs[rows] @ p["critic.weight"].T - returns[rows]
            if args.clip_vloss:  # each value by itself
                near = values[rows] + np.clip(errors + returns[rows] - values[rows], -eps, eps) - returns[rows]
                errors = np.where(near**2 > errors**2, 0.0, errors)
            wrong = next_obs[rows] @ (p["predictor.weight"] - target).T
            teach = chosen[rows]
            gradient = {
                "actor.weight": -(pull * score + args.ent_coef * slope / len(rows)).T @ obs[rows],
                "critic.weight": args.vf_coef * errors.T @ obs[rows] / len(rows),
                "predictor.weight": 2 / K * (wrong * teach[:, None]).T @ next_obs[rows] / max(teach.sum(), 1),
            }
            if score_std is not None:
                gradient["log_std"] = -(pull * score_std).sum(0) - args.ent_coef
            norms.append(np.sqrt(sum((g**2).sum() for g in gradient.values())))
            step = rate * min(1.0, args.max_grad_norm / (norms[-1] + 1e-6))
            p = {name: value - step * gradient.get(name, 0.0) for name, value in p.items()}
            divergence, outside = (ratio - 1 - np.log(ratio)).mean(), (abs(ratio - 1) > eps).mean()
            numbers.append([divergence, outside, entropy.mean(), (wrong**2).mean()])
    left = 1 - (returns - values).var(0) / returns.var(0)
    names = "approx_kl", "clip_fraction", "entropy", "novelty"
    return p, dict(zip(names, np.mean(numbers, 0)), explained_variance=left[0], explained_variance_int=left[1],
                   grad_norm=np.mean(norms), epochs=args.update_epochs)  # fmt: skip


@float64()
@SPACES
@pytest.mark.parametrize(
    "changes",
    [
        dict(update_epochs=3),
        dict(update_epochs=2, num_minibatches=4, update_proportion=0.6, int_coef=0.3, ext_coef=1.5),
        dict(update_epochs=2, num_minibatches=2, ent_coef=0.3, vf_coef=0.8, gae_lambda=0.9, int_gamma=0.5),
        dict(update_epochs=2, update_proportion=0.0),
        dict(update_proportion=1.0, int_coef=0.0, num_minibatches=2, normalize_advantages=True, max_grad_norm=0.05),
        dict(update_epochs=3, num_minibatches=2, clip_vloss=True, clip_coef=0.05),
    ],
    ids=str,
)
def test_update_equals_numpy(space, changes):
    """Weights of policy, both values and predictor, and every metric. The target stays."""
    agent, args = linear_agent(48, space), settings(**changes)
    batch = make_batch(agent)
    assert (batch.terminated | batch.truncated)[:-1].any()
    expected, numbers = own_update(agent, batch, 0.5, args)
    after, found = run_update(rnd, agent, batch, args, 0.5)
    assert after.keys() == expected.keys()
    for name, value in after.items():
        close(value, expected[name], 1e-9)
        moves = name != "target.weight" and (name != "predictor.weight" or args.update_proportion)
        assert (abs(value - weights(agent)[name]).max() > 1e-4) == bool(moves)
    assert found.keys() == numbers.keys()
    for name, value in numbers.items():
        close(found[name], value, 1e-7)  # shares are float32


@float64()
@SPACES
def test_without_weight_on_the_bonus_it_is_ppo(space):
    """Policy and value of the rewards move as in ppo.py with twice the advantages (--ext-coef), whatever the bonus."""
    agent, args = linear_agent(48, space), settings(int_coef=0.0, update_epochs=3, num_minibatches=1, ent_coef=0.1)
    batch = make_batch(agent)
    parent = ppo.Agent(48, space, 4)
    parent.actor, parent.critic = nn.Linear(48, sum(parent.parts), bias=False), nn.Linear(48, 1, bias=False)
    state = {name: value for name, value in agent.state_dict().items() if name.split(".")[0] in ("actor", "log_std")}
    parent.double().load_state_dict(state | {"critic.weight": agent.critic.weight[:1]})
    shared = {name: value for name, value in vars(args).items() if hasattr(ppo.Args, name)}

    def twice(agent, obs, actions, logps, advantages, *others):
        return ppo.ppo_loss(agent, obs, actions, logps, 2 * advantages, *others)

    after, ours = run_update(rnd, agent, batch, args)  # --ext-coef 2
    optimizer, generator = torch.optim.SGD(parent.parameters(), 1.0), torch.Generator().manual_seed(0)
    theirs = ppo.update(parent, optimizer, ppo.Batch(*batch[:6]), generator, ppo.Args(**shared), twice)
    for name in ("approx_kl", "clip_fraction", "entropy", "explained_variance"):
        close(ours[name], theirs[name])
    close(after["actor.weight"], parent.actor.weight)
    close(after["critic.weight"][:1], parent.critic.weight)
    assert ours["clip_fraction"] > 0.1


@SPACES
def test_the_policy_is_the_parent_s(space):
    """Actions, what is executed, log-probabilities and entropies of the same weights, and the noise that is drawn."""
    torch.manual_seed(0)
    ours, theirs = rnd.Agent(5, space, 8), ppo.Agent(5, space, 8)
    theirs.load_state_dict(
        {name: value for name, value in ours.state_dict().items() if name in theirs.state_dict()}
        | {f"critic.4.{name}": getattr(ours.critic[4], name)[:1] for name in ("weight", "bias")}
    )
    obs = 9 * torch.randn(200, 5)
    noise, expected = (agent.noise((200,), torch.Generator().manual_seed(1)) for agent in (ours, theirs))
    assert torch.equal(noise, expected)
    with torch.no_grad():
        actions = ours.act(obs, noise)
        assert torch.equal(actions, theirs.act(obs, noise)) and len(actions.unique(dim=0)) > 2
        for found, wanted in zip(ours(obs, actions)[:2], theirs(obs, actions)[:2]):
            assert torch.equal(found, wanted)
        close(ours.value(obs)[:, 0], theirs.value(obs), 1e-5)
        assert np.array_equal(ours.to_env(actions.numpy()), theirs.to_env(actions.numpy()))


def test_networks_at_the_start():
    """Orthogonal, both value heads with gain 1, the policy head with 0.01. Predictor and target differ, and see
    observations up to 5."""
    agent, obs = rnd.Agent(40, DISCRETE, 16), torch.randn(7, 40)
    gains = dict(actor=0.01, critic=1.0, target=2**0.5, predictor=2**0.5)
    for name, gain in gains.items():
        head = getattr(agent, name)[-1].weight.detach()
        head = head if len(head) <= 16 else head.T
        close(head @ head.T, gain**2 * np.eye(len(head)), 1e-5)
    assert agent.critic[-1].out_features == 2 and agent.target[-1].out_features == rnd.FEATURES
    with torch.no_grad():
        error = agent.predictor(obs) - agent.target(obs)
        close(agent.novelty(obs), (error**2).sum(-1) / rnd.FEATURES, 1e-6)
        assert agent.novelty(obs).min() > 0.1
        assert torch.equal(agent.novelty(3 * obs), agent.novelty((3 * obs).clip(-5, 5)))
        assert not torch.equal(agent.novelty(1.2 * obs), agent.novelty(obs))


@float64()
def test_novelty_falls_with_visits():
    """Tables, plain gradient descent with rate a on all rows: a state that is a share q of the rows has its error times
    (1 - 2 a q / K) in each step, so its novelty after m steps is known. A state never seen stays as new as it was."""
    agent, visits, rate, steps = linear_agent(4), [0] * 5 + [1] * 2 + [2], 0.4, 7
    states = torch.eye(4)[visits][:, None]
    before = agent.novelty(torch.eye(4)).detach().numpy()
    zeros, ends = torch.zeros(8, 1), torch.ones(8, 1, dtype=torch.bool)
    batch = rnd.Batch(torch.eye(4)[[3] * 8][:, None], zeros[..., None], zeros, states, ends, ~ends, zeros, states[-1])
    args = settings(update_proportion=1.0, update_epochs=steps)
    optimizer = torch.optim.SGD(agent.parameters(), rate)
    rnd.update(agent, optimizer, batch, torch.Generator().manual_seed(0), args)
    share = np.bincount(visits, minlength=4) / 8
    close(agent.novelty(torch.eye(4)), before * (1 - 2 * rate * share / K) ** (2 * steps))


# the bonus


def test_the_bonus_is_divided_by_the_deviation_of_its_discounted_sums():
    """Of all steps so far in all environments, those of this rollout among them; sums go on from rollout to rollout,
    and after a resume."""
    statistics, rng = rnd.Statistics(2, 3, 0.9, True), np.random.default_rng(0)
    rounds, sums, total = rng.random((3, 5, 3)), [], np.zeros(3)
    for novelty in rounds:
        for row in novelty:
            total = 0.9 * total + row
            sums += total.tolist()
        close(statistics.bonus(novelty), novelty / np.sqrt(moments(sums)[1] + 1e-8), 1e-9)
        state, statistics = statistics.state_dict(), rnd.Statistics(2, 3, 0.9, False)
        statistics.load_state_dict(state)


def rollout(space=DISCRETE, normalize: bool = False, rounds: int = 1, steps: int = 6):
    """Steps of the two scripts of test_exact_ppo.py, whose episodes end in every way."""
    scripts = iter(SCRIPTS)
    args = rnd.Args(num_envs=2, num_steps=steps)
    envs, obs = make_vector(lambda: Plain(Script(next(scripts), space)), args, 0)
    statistics, agent = rnd.Statistics(2, 2, 0.9, normalize), linear_agent(2, space).float()
    statistics.observe(obs, count=True)
    for _ in range(rounds):
        batch, obs, episodes = rnd.collect(agent, envs, obs, statistics, torch.Generator().manual_seed(0), args)
    return agent, batch, obs, episodes, statistics


@pytest.mark.parametrize("space", [DISCRETE, GAUSSIAN], ids=["discrete", "gaussian"])
def test_rollout_by_hand(space):
    """As ppo.py's, with rewards as they are; the bonus is that of the true next observations, the last of an episode
    among them; what follows the rollout is the reset's observation where an episode ended."""
    agent, batch, obs, episodes, _ = rollout(space)
    for ours, expected in zip(batch, (OBS, None, REWARDS, NEXT, TERMINATED, TRUNCATED)):
        assert expected is None or np.array_equal(ours, expected)
    assert episodes == [(3.0, 2), (10.0, 4), (36.0, 3)] and np.array_equal(obs, [[2, 1], [1, 2]])
    assert np.array_equal(batch.last_obs, RETURNED[-1]) and batch.bonus.dtype == torch.float32
    assert np.array_equal(rollout(space, steps=5)[1].last_obs, RETURNED[4])  # an episode ends in the last step
    wrong = (agent.predictor.weight - agent.target.weight).detach().numpy()
    novelty, sums, total = ((NEXT @ wrong.T) ** 2).mean(-1), [], np.zeros(2)
    for row in novelty:
        total = 0.9 * total + row
        sums += total.tolist()
    close(batch.bonus, novelty / np.sqrt(moments(sums)[1] + 1e-8), 1e-4)
    assert len(batch.actions.unique()) > 1


def test_observations_are_normalised_by_all_that_was_acted_on():
    _, batch, _, _, statistics = rollout(normalize=True)
    for t in range(6):
        counted = np.concatenate([OBS[0], *RETURNED[:t]])
        mean, var = moments(counted)
        close(batch.obs[t], (OBS[t] - mean) / np.sqrt(var + 1e-8), 1e-5)
        mean, var = moments(np.concatenate([counted, RETURNED[t]]))
        close(batch.next_obs[t], (NEXT[t] - mean) / np.sqrt(var + 1e-8), 1e-5)
    close(batch.last_obs, (RETURNED[-1] - mean) / np.sqrt(var + 1e-8), 1e-5)
    close(statistics.weights()["obs_mean"], mean)


def test_evaluation_acts_on_frozen_statistics():
    agent, _, _, _, statistics = rollout(GAUSSIAN, normalize=True)
    before, obs = statistics.state_dict(), np.array([[0.5, 2.0], [0.5, 2.0]])
    scale = torch.tensor([[0.0], [1.0]])
    actions = rnd.act_in_evaluation(agent, statistics, obs, scale, torch.Generator().manual_seed(0))
    shown = (obs[0] - before["obs"]["mean"].numpy()) / np.sqrt(before["obs"]["var"].numpy())
    close(actions[0], executed(weights(agent)["actor.weight"] @ shown), 1e-5)
    assert not np.allclose(actions[0], actions[1])
    assert torch.equal(statistics.state_dict()["obs"]["count"], before["obs"]["count"])


def test_a_run_has_one_target_and_two_discounts(tmp_path, monkeypatch):
    """The target never moves, the predictor does; the bonus' sums use --int-gamma; the rate falls linearly to 0."""
    collect, seen = rnd.collect, []

    def watched(agent, envs, obs, statistics, *others):
        seen.append([getattr(agent, name)[0].weight.detach().clone() for name in ("target", "predictor")])
        assert statistics.gamma == 0.7
        return collect(agent, envs, obs, statistics, *others)

    monkeypatch.setattr(rnd, "collect", watched)
    args = [*SMALL["rnd"], "--learning-rate", 0.006, "--total-timesteps", 96, "--num-steps", 16]
    run = new_run(rnd, tmp_path, *args, "--gamma", 0.5, "--int-gamma", 0.7)
    close([row["learning_rate"] for row in metrics(run)], 0.002 * np.array([3, 2, 1]))
    (first, before), (last, after) = seen[0], seen[-1]
    assert torch.equal(first, last) and not torch.equal(before, after)
