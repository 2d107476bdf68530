"""PPO with action masks: probabilities and gradients of what is allowed, against NumPy, and whole updates by
tests/reference/ppo.py; where masks come from; that they reach every action that is taken."""

import itertools
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import close, float64
from gymnasium.spaces import Discrete, MultiDiscrete
from helpers import SMALL, assert_same_result, command_line, metrics, new_run, user_error, weights
from scipy import stats
from torch import nn

from algos import ppo, ppo_mask
from tests.reference import ppo as reference
from utils.control import make_vector, step_vector

MULTI = MultiDiscrete([2, 3])
TOLL = ["--env-id", "environments:Toll-v0", "--env-kwargs"]


def linear_agent(obs_size: int, space) -> ppo_mask.Agent:
    """In float64, with matrices for networks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        agent = ppo_mask.Agent(sum(ppo_mask.choices(space)) + obs_size, space, 4)
        agent.actor = nn.Linear(obs_size, sum(agent.parts), bias=False)
        agent.critic = nn.Linear(obs_size, 1, bias=False)
        for parameter in agent.parameters():
            nn.init.normal_(parameter, 0.0, 0.7)
    return agent.double()


@float64()
@pytest.mark.parametrize("mask", itertools.product([0, 1], repeat=5), ids=lambda m: "".join(map(str, m)))
def test_every_mask(mask):
    """Of choices of 2 and 3: probabilities are exactly 0 or those of the softmax of what is allowed; entropy is theirs;
    no gradient reaches a logit that is not allowed, and none is NaN, also where one action is left."""
    mask = np.array(mask)
    if not (mask[:2].any() and mask[2:].any()):
        return  # no action: the wrapper refuses it
    agent, obs = linear_agent(2, MULTI), torch.tensor([[*map(float, mask), 0.3, -1.2]])
    logits = (agent.actor.weight.detach().numpy() @ [0.3, -1.2]).copy()
    entropy, logps = 0.0, []
    for part in (slice(0, 2), slice(2, 5)):
        weight = np.exp(logits[part]) * mask[part]
        pi = weight / weight.sum()
        entropy -= sum(p * np.log(p) for p in pi if p)
        logps.append(pi)
    for a, b in itertools.product(range(2), range(3)):
        logp, own_entropy = agent.log_prob(obs, torch.tensor([[a, b]]))
        close(own_entropy, [entropy])
        expected = logps[0][a] * logps[1][b]
        assert logp.exp().item() == 0 if expected == 0 else abs(logp.exp().item() - expected) < 1e-12
        if expected:
            (gradient,) = torch.autograd.grad((logp + 0.3 * own_entropy).sum(), agent.actor.weight)
            assert gradient.isfinite().all() and (gradient[mask == 0] == 0).all()
            assert (gradient[mask == 1].abs().sum() > 0) == (mask[:2].all() or mask[2:].sum() > 1)


def test_samples_are_of_the_masked_policy():
    """Chi-square of what is allowed; nothing else in 20,000 draws; without noise the likeliest that is allowed."""
    agent = linear_agent(1, Discrete(4))
    obs = torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0]]).double().expand(20_000, -1)
    logits = agent.actor.weight.detach().numpy()[:, 0]
    pi = np.exp(logits) * [1, 0, 1, 1]
    with torch.no_grad():
        actions = agent.act(obs, agent.noise((20_000,), torch.Generator().manual_seed(0)))[:, 0].numpy()
        likeliest = agent.act(obs[:1], torch.zeros(1, 4)).item()
    counts = np.bincount(actions, minlength=4)
    assert counts[1] == 0 and likeliest == pi.argmax()
    assert stats.chisquare(counts[[0, 2, 3]], 20_000 * pi[[0, 2, 3]] / pi.sum()).pvalue > 1e-3


@float64()
@pytest.mark.parametrize("space", [Discrete(5), MULTI], ids=["discrete", "multi"])
def test_update_is_the_reference_s(space):
    """A mask of its own in each row: weights, ratios, KL, entropy are those of what is allowed."""
    agent, rng, shape = linear_agent(4, space), np.random.default_rng(0), (6, 4)
    masks = rng.random((*shape, 5)) < 0.5
    actions = np.stack([rng.integers(n, size=shape) for n in agent.parts], -1)
    for action, start in zip(np.moveaxis(actions, -1, 0), np.cumsum([0, *agent.parts])):
        np.put_along_axis(masks, (start + action)[..., None], True, -1)
    states, after = np.eye(4)[rng.integers(4, size=(2, *shape))]
    masks, states, after, rewards = map(torch.tensor, (1.0 * masks, states, after, rng.normal(size=shape)))
    batch = ppo_mask.Batch(torch.cat([masks, states], -1), torch.tensor(actions), rewards,
                           torch.cat([masks, after], -1), *torch.tensor(rng.random((2, *shape)) < 0.2))  # fmt: skip

    def policy(p, rows):
        x, mask, chosen = (x.flatten(0, 1)[rows] for x in (states, masks, batch.actions))
        out = x @ p["actor.weight"].T - 1e9 * (1 - mask)
        return *reference.policy_of(out, agent.parts, chosen), x @ p["critic.weight"][0]

    args = ppo_mask.Args(num_minibatches=2, update_epochs=3, ent_coef=0.1, max_grad_norm=1e9, clip_vloss=True)
    metrics = reference.check(ppo_mask, agent, batch, args, 2.0, policy, lambda p: after @ p["critic.weight"][0])
    assert metrics["clip_fraction"] > 0.1


def test_masks_that_allow_everything_change_nothing(tmp_path):
    """The run is that of ppo.py, bit for bit."""
    common = [*SMALL["ppo"], "--env-id", "Board-v0", "--env-kwargs", "n=3"]
    ours, theirs = new_run(ppo_mask, tmp_path, *common, "mask=false"), new_run(ppo, tmp_path, *common)
    assert_same_result(ours, theirs)
    masked = new_run(ppo_mask, tmp_path, *common)
    assert metrics(masked) != metrics(ours)
    assert weights(masked)["obs_mean"].shape == (9,)


@pytest.mark.parametrize("action", ["discrete", "multidiscrete", "multibinary"])
@pytest.mark.parametrize("more", [["gives=info"], ["gives=method"], ["gives=both", "--vector", "async"]], ids=str)
def test_only_allowed_actions_are_taken(action, more, tmp_path):
    """In training and in evaluation, likeliest and sampled: the environment fails at any other. Info goes before the
    method. At its end an episode allows nothing."""
    run = new_run(ppo_mask, tmp_path, *SMALL["ppo"], *TOLL, f"action={action}", *more)
    assert metrics(run)[-1]["eval/length"] == 40


def test_the_mask_stands_before_its_observation():
    """Also where a vector resets: there it is the new episode's; the last observation of the old one keeps its own."""
    args = ppo_mask.Args(env_id="environments:Toll-v0", env_kwargs=("action=multidiscrete",), num_envs=2)
    envs, obs = make_vector(lambda: ppo_mask.make_masked(args), args, 0, ("action_mask",))
    inner = [env.unwrapped for env in envs.envs]
    assert obs.shape == (2, 7)
    for _ in range(85):
        masks = np.stack([np.concatenate(env.masks) for env in inner])
        assert np.array_equal(obs[:, :5], masks) and (obs[:, 6] == [env.time for env in inner]).all()
        actions = np.stack([[m.argmax() for m in env.masks] for env in inner])
        obs, true_obs, *_, ended = step_vector(envs, actions)
        assert (true_obs[:, 4] == 0).all() and (true_obs[:, 6] == 40).all() if ended else (obs == true_obs).all()


def test_statistics_leave_masks_alone():
    statistics = ppo_mask.Statistics(4, 2, 3, 0.99, True)
    rng = np.random.default_rng(0)
    obs = np.hstack([rng.integers(2, size=(3, 2)), rng.normal(5, 3, (3, 2))])
    shown = statistics.observe(obs, count=True)
    assert np.array_equal(shown[:, :2], obs[:, :2])
    expected = ppo.Statistics(2, 3, 0.99, True).observe(obs[:, 2:], count=True)
    close(shown[:, 2:], expected)
    assert np.array_equal(statistics.weights()["obs_mean"], statistics.obs.mean[2:])
    assert np.array_equal(ppo_mask.Statistics(4, 2, 3, 0.99, False).observe(obs), obs.astype(np.float32))


@pytest.mark.parametrize(
    "args, words",
    [
        ([*TOLL, "gives=none"], ["no mask", "action_masks()", "info['action_mask']"]),
        ([*TOLL, "gives=short"], ["1 entries", "need 3"]),
        (["--env-id", "Pendulum-v1"], ["action space", "Discrete, MultiDiscrete or MultiBinary"]),
    ],
    ids=str,
)
def test_wrong_masks_are_seen_before_the_run(args, words, tmp_path, capsys):
    with user_error(capsys, *words):
        command_line(ppo_mask, *SMALL["ppo"], *args, "--output-dir", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("vector", ["sync", "async"])
@pytest.mark.parametrize("action, mask", [("discrete", "[0, 0, 0]"), ("multidiscrete", "0, 0, 0]")])
def test_a_mask_that_allows_nothing_is_one_clear_error(action, mask, vector, tmp_path, capsys):
    with user_error(capsys, "Toll-v0", "step 3 of", mask, "no choice", "end the episode"):
        args = [*TOLL, "gives=empty", f"action={action}", "--vector", vector, "--output-dir", tmp_path]
        command_line(ppo_mask, *SMALL["ppo"], *args)


def test_a_mask_may_be_a_list_for_each_choice():
    env = SimpleNamespace(action_space=MULTI, observation_space=gym.spaces.Box(0, 1, (1,)), unwrapped="")
    masked = ppo_mask.Masked.__new__(ppo_mask.Masked)
    masked.env, masked.parts, masked.starts = env, [2, 3], [0, 2]
    masked._observation_space, masked._action_space = env.observation_space, MULTI
    for mask in ([[1, 0], [0, 1, 1]], ([True, False], np.array([0, 1, 1])), np.array([1, 0, 0, 1, 1])):
        assert masked.with_mask(np.array([0.5]), {"action_mask": mask}).tolist() == [1, 0, 0, 1, 1, 0.5]
