"""RND: whole updates by tests/reference/ppo.py, and the bonus' sums and rollouts by hand. What it shares with ppo.py:
test_exact_ppo.py."""

import numpy as np
import pytest
import torch
from control import close, float64
from helpers import SMALL, new_run
from test_exact_ppo import DISCRETE, OBS, RETURNED, SPACES, linear_agent, moments, random_batch, rollout

from algos import rnd
from tests.reference import ppo as reference


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


def hooks(agent, batch, args) -> dict:
    """Of tests/reference/ppo.py: two values and advantages, and the predictor's loss."""
    obs, actions, after = (x.flatten(0, 1) for x in (batch.obs, batch.actions, batch.next_obs))
    features, head = len(agent.target.weight), lambda p, x: x @ p["critic.weight"].T

    def policy(p, rows):
        out = obs[rows] @ p["actor.weight"].T
        chosen = reference.policy_of(out, agent.parts, actions[rows], p.get("log_std"))
        return *chosen, head(p, obs[rows])

    def advantages(values, ahead, batch, args):  # the bonus: of what the agent saw, whatever ended
        outer, _ = reference.advantages(values[..., 0], ahead[:-1, :, 0], batch, args)
        along = np.concatenate([values[1:, :, 1], ahead[-1:, :, 1]]), *np.zeros((2, *values.shape[:2]))
        inner = reference.gae(batch.bonus.numpy(), values[..., 1], *along, args.int_gamma, args.gae_lambda)
        return args.ext_coef * outer + args.int_coef * inner, values + np.stack([outer, inner], -1)

    def extra(generator):
        chosen = (torch.rand(len(obs), generator=generator) < args.update_proportion).double()

        def loss(p, rows):
            novelty = ((after[rows] @ (p["predictor.weight"] - agent.target.weight.detach()).T) ** 2).sum(1) / features
            return novelty @ chosen[rows] / max(chosen[rows].sum(), 1), {"novelty": novelty.mean().item()}

        return loss

    ahead = lambda p: head(p, torch.cat([batch.next_obs, batch.last_obs[None]]))  # noqa: E731
    return dict(policy=policy, ahead=ahead, advantages=advantages, extra=extra)


@float64()
@SPACES
@pytest.mark.parametrize("changes", [
    dict(update_epochs=3),
    dict(update_epochs=2, num_minibatches=4, update_proportion=0.6, int_coef=0.3, ext_coef=1.5),
    dict(update_epochs=2, num_minibatches=2, ent_coef=0.3, vf_coef=0.8, gae_lambda=0.9, int_gamma=0.5),
    dict(update_epochs=2, update_proportion=0.0),
    dict(update_proportion=1.0, int_coef=0.0, num_minibatches=2, normalize_advantages=True, max_grad_norm=0.05),
    dict(update_epochs=3, num_minibatches=2, clip_vloss=True, clip_coef=0.05, vf_coef=45)], ids=str)  # fmt: skip
def test_update_is_the_reference_s(space, changes):
    """Weights of policy, both values and predictor, and every metric. The target stays."""
    agent, args = linear_agent(48, space, module=rnd), settings(**changes)
    batch = make_batch(agent)
    assert (batch.terminated | batch.truncated)[:-1].any()
    reference.check(rnd, agent, batch, args, 0.5, **hooks(agent, batch, args))


def test_networks_at_the_start():
    """Predictor and target differ, and see observations up to 5."""
    agent, obs = rnd.Agent(40, DISCRETE, 16), torch.randn(7, 40)
    assert agent.critic[-1].out_features == 2 and agent.target[-1].out_features == rnd.FEATURES
    with torch.no_grad():
        error = agent.predictor(obs) - agent.target(obs)
        close(agent.novelty(obs), (error**2).sum(-1) / rnd.FEATURES, 1e-6)
        assert agent.novelty(obs).min() > 0.1
        assert torch.equal(agent.novelty(3 * obs), agent.novelty((3 * obs).clip(-5, 5)))
        assert not torch.equal(agent.novelty(1.2 * obs), agent.novelty(obs))


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


def test_the_bonus_of_a_rollout():
    """That of the true next observations, the last of an episode among them, all normalised; what follows the rollout
    is the reset's observation where an episode ended."""
    agent = linear_agent(2, DISCRETE, module=rnd).float()
    batch, _, _, statistics, _ = rollout(DISCRETE, agent, normalize=True, module=rnd)
    wrong = (agent.predictor.weight - agent.target.weight).detach().numpy()
    novelty = ((batch.next_obs.numpy().clip(-5, 5) @ wrong.T) ** 2).mean(-1)
    close(batch.bonus, rnd.Statistics(2, 2, 0.9, True).bonus(novelty), 1e-4)
    assert batch.bonus.dtype == torch.float32
    for steps in 5, 6:  # an episode ends in the fifth step
        batch, _, _, statistics, _ = rollout(DISCRETE, normalize=True, steps=steps, module=rnd)
        mean, var = moments(np.concatenate([OBS[0], *RETURNED[:steps]]))
        close(batch.last_obs, (RETURNED[steps - 1] - mean) / np.sqrt(var + 1e-8), 1e-5)
        close(statistics.weights()["obs_mean"], mean)


def test_a_run_has_one_target_and_two_discounts(tmp_path, monkeypatch):
    """The target never moves, the predictor does; the bonus' sums use --int-gamma."""
    collect, seen = rnd.collect, []

    def watched(agent, envs, obs, statistics, *others):
        seen.append([getattr(agent, name)[0].weight.detach().clone() for name in ("target", "predictor")])
        assert statistics.gamma == 0.7
        return collect(agent, envs, obs, statistics, *others)

    monkeypatch.setattr(rnd, "collect", watched)
    new_run(rnd, tmp_path, *SMALL["rnd"], "--gamma", 0.5, "--int-gamma", 0.7)
    (first, before), (last, after) = seen[0], seen[-1]
    assert torch.equal(first, last) and not torch.equal(before, after)
