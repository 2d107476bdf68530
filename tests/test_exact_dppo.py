"""dppo.py: densities of chains from the noise that made them, whole updates by tests/reference/ppo.py, and what plans
see, execute and earn. Of reinflow.py what both have alike. The authors' formulas: test_parity_diffusion_policy.py."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from control import checkpoint, close, float64, mlp, named, randomise
from helpers import SMALL, command_line, new_run, user_error
from small_data import pendulum
from test_exact_diffusion_policy import shares

from algos import diffusion_policy, dppo, flow_bc, ppo, reinflow
from tests.reference import ppo as reference
from utils.control import make_vector

D, A, H, K, LEARNED, T, N = 3, 2, 3, 4, 3, 4, 6
SIZES = dict(horizon=H, n_obs_steps=1, n_action_steps=2, diffusion_steps=K, num_finetuned_steps=LEARNED,
             denoiser_size=8, min_std=0.15, num_minibatches=1, max_grad_norm=1e9)  # fmt: skip


def make_agent(args, seed: int = 0) -> dppo.Agent:
    """In which the steps before the last K' are another's, and values are linear."""
    agent = dppo.Agent(D, A, args)
    agent.critic = torch.nn.Linear(D, 1)
    return randomise(agent, seed, 0.3, 0.1)


def own_step(p: dict, part: str, obs, x, k: int, steps: int = K) -> tuple[torch.Tensor, float]:
    """Bayes' rule: x_k-1 has a prior around the predicted plan and is seen through x_k; the precisions add up."""
    now, before = shares(steps)[k], shares(steps)[k - 1]
    noise = mlp(p, f"{part}.net", torch.cat([obs, x, torch.full((len(x), 1), k / steps)], -1))
    plan, kept = ((x - (1 - now) ** 0.5 * noise) / now**0.5).clip(-1, 1), now / before
    if k == 1:
        return plan, 0.0
    variance = 1 / (1 / (1 - before) + kept / (1 - kept))
    return variance * (before**0.5 * plan / (1 - before) + kept**0.5 * x / (1 - kept)), variance.item() ** 0.5


def own_logps(p: dict, obs, chains, min_std: float) -> torch.Tensor:
    steps = [own_step(p, "actor", obs, chains[:, LEARNED - k], k) for k in range(LEARNED, 0, -1)]
    z = [((x - mean) / max(std, min_std), max(std, min_std)) for x, (mean, std) in zip(chains[:, 1:].unbind(1), steps)]
    return torch.stack([(-(z**2) / 2 - np.log(std * (2 * np.pi) ** 0.5)).sum(1) for z, std in z], 1)


@float64()
@pytest.mark.parametrize("steps, learned, min_std", [(4, 3, 0.01), (4, 3, 0.15), (4, 4, 0.5), (1, 1, 0.1)])
def test_chains_and_their_densities_come_from_the_noise(steps, learned, min_std):
    """The chain is the second implementation's of the same noise; its log-densities, computed anew, are those of the
    noise: so the first ratio is 1. K' steps are kept, those before are the start's. The floor is in both. With one step
    it is PPO's Gaussian of a fixed deviation, around the plan."""
    args = dppo.Args(**SIZES | dict(diffusion_steps=steps, num_finetuned_steps=learned, min_std=min_std))
    agent, obs = make_agent(args), torch.randn(N, D)
    chains, twin = agent.sample(obs, min_std, torch.Generator().manual_seed(2)), torch.Generator().manual_seed(2)
    p, kept, logps = named(agent), [torch.randn(N, H * A, generator=twin)], []
    for k in range(steps, 0, -1):
        mean, std = own_step(p, "actor" if k <= learned else "start", obs, kept[-1], k, steps)
        noise, std = torch.randn(N, H * A, generator=twin), max(std, min_std)
        kept.append(mean + std * noise)
        logps.append((-(noise**2) / 2 - np.log(std * (2 * np.pi) ** 0.5)).sum(1))
    close(chains, torch.stack(kept[-learned - 1 :], 1))
    close(agent.log_prob(obs, chains), torch.stack(logps[-learned:], 1))


def updated(module, agent, logps, rate: float, changes: dict, **hooks) -> None:
    """Asserts that an update on random chains is that of tests/reference/ppo.py. logps(p, obs, chains) gives
    log-probabilities and entropies."""
    args, rows = module.Args(**changes), torch.Generator().manual_seed(3)
    obs, next_obs = torch.randn(2, T, N, D, generator=rows)
    chains = agent.sample(obs.flatten(0, 1), args.min_std if module is dppo else 1.0, rows).detach()
    rewards, ends = torch.randn(T, N, generator=rows), torch.rand(2, T, N, generator=rows) < 0.2
    batch = module.Batch(obs, chains.unflatten(0, (T, N)), rewards, next_obs, *ends)
    value = lambda p, x: x @ p["critic.weight"][0] + p["critic.bias"]  # noqa: E731
    policy = lambda p, i: (*logps(p, obs.flatten(0, 1)[i], chains[i]), value(p, obs.flatten(0, 1)[i]))  # noqa: E731
    ahead = lambda p: value(p, next_obs)  # noqa: E731
    metrics = reference.check(module, agent, batch, args, rate, policy, ahead, **hooks)
    assert args.clip_coef > 0.1 or metrics["clip_fraction"] > 0
    assert metrics["epochs"] == (2 if args.target_kl else args.update_epochs)


CHANGES = pytest.mark.parametrize("changes", [
    dict(update_epochs=3),
    dict(update_epochs=2, num_minibatches=3, clip_coef=0.05, gamma=0.7, clip_vloss=True, vf_coef=60),
    dict(update_epochs=2, normalize_advantages=False, max_grad_norm=1.0, clip_vloss=True, clip_coef=0.02),
    dict(update_epochs=9, target_kl=1e-6, vf_coef=0.8)])  # fmt: skip


@float64()
@CHANGES
@pytest.mark.parametrize("discount", [0.6, 1.0])
def test_update_is_the_reference_s(changes, discount):
    """The advantages of a plan's denoising steps are discounted behind their normalisation: later ones less."""
    changes = SIZES | changes | {"gamma_denoising": discount}
    agent = make_agent(dppo.Args(**changes))
    updated(dppo, agent, lambda p, *x: (logps := own_logps(p, *x, 0.15), 0 * logps), 0.05, changes,
            weights=lambda a: np.outer(a, discount ** np.arange(LEARNED)[::-1]))  # fmt: skip


class Count(gym.Env):
    """Observes how many steps were taken in this episode, and earns twice the action. In the second step there is a
    success. It writes into one array."""

    action_space, observation_space = (gym.spaces.Box(-x, x, (1,), np.float32) for x in (2, 9))
    length = 5

    def reset(self, *, seed=None, options=None):
        self.obs = np.zeros(1, self.observation_space.dtype)
        return self.obs, {}

    def step(self, action):
        self.obs += 1
        return self.obs, 2 * float(action[0]), bool(self.obs == self.length), False, {"success": bool(self.obs == 2)}


def test_what_plans_see_execute_and_earn(monkeypatch):
    """The first T_o - 1 actions of a plan are past; an episode's end ends the plan. Observations before the first are
    the first again, and a new episode sees nothing of the last one. Actions in [-1, 1] are stretched to the bounds.
    Evaluation has no floor where scale is 0. The five actions of plan n are here n/100, n/100 + 0.1, ..."""
    args = dppo.Args(**SIZES | dict(horizon=5, n_obs_steps=2, n_action_steps=3, num_envs=2, num_steps=3))
    agent, given = dppo.Agent(2, 1, args), []
    plan = lambda obs: (len(given) / 100 + torch.arange(5.0) / 10).expand(len(obs), 2, 5)  # noqa: E731
    monkeypatch.setattr(agent, "sample", lambda *x: given.append((x[0].tolist(), x[1])) or plan(x[0]))
    envs, obs = make_vector(lambda: dppo.Plans(Count(), args), args, 0)
    batch, obs, episodes = dppo.collect(agent, envs, obs, torch.Generator(), dppo.Statistics(2, 0.9, False), args)
    assert batch.obs[:, 1].tolist() == [[0, 0], [2, 3], [0, 0]] and obs[1].tolist() == [2, 3]
    assert batch.next_obs[:, 0].tolist() == [[2, 3], [4, 5], [2, 3]] and episodes[1] == (pytest.approx(4 * 0.97), 2)
    assert batch.terminated[:, 0].tolist() == [False, True, False] and not batch.truncated.any()
    close(batch.rewards[:, 0] + batch.chains[:, 0, 1, 0], [4 * 0.63 + 0.01, 4 * 0.34 + 0.02, 4 * 0.69 + 0.03], 1e-6)
    assert [seen for seen, _ in given] == batch.obs.tolist() and {std for _, std in given} == {0.15}
    (env := dppo.Plans(Count(), args)).reset()
    assert [env.step(np.zeros((3, 1)))[4]["success"] for _ in range(2)] == [1, 0]
    inputs = np.ones((2, 4), np.float32), torch.tensor([[0.0], [1.0]]), torch.Generator()
    close(dppo.act_in_evaluation(agent, *inputs)[:, 1, 0], [0.24] * 2, 1e-6)
    close(given[-1][1], [[0.0], [0.15]], 1e-6)


@pytest.mark.parametrize("module", [dppo, reinflow], ids=["dppo", "reinflow"])
def test_rewards_are_scaled_as_in_ppo(module):
    ours, theirs, rows = module.Statistics(2, 0.9, True), ppo.Statistics(1, 2, 0.9, True), np.random.default_rng(0)
    for reward, done in zip(rows.normal(5, 1, (9, 2)), rows.random((9, 2)) < 0.3):
        close(ours.reward(reward, done), theirs.reward(reward, done))


CLONED = {  # what a run begins with: script, actor there and here, and what does not fit
    "dppo": (dppo, diffusion_policy, "average", ["actor", "start"],
             {"has 4": ["--horizon", 9], "has 3": ["--diffusion-steps", 9]}),
    "reinflow": (reinflow, flow_bc, "actor", ["actor"], {"has 16": ["--actor-size", 9]}),
}  # fmt: skip


@pytest.mark.parametrize("algo", CLONED)
def test_a_run_begins_with_the_actor_of_another(algo, tmp_path, monkeypatch, capsys):
    """Of Pendulum, and with its sizes. Of dppo.py's two copies only the one that learns moves. A resumed run does not
    need the other any more. What does not fit is said before anything is written."""
    (module, other, part, parts, wrong), ours = CLONED[algo], [*SMALL["ppo"], "--num-steps", 8]
    start = new_run(other, tmp_path, *SMALL[other.NAME], "--dataset", pendulum(tmp_path / "d.hdf5"))
    before, update = [], module.update
    monkeypatch.setattr(module, "update", lambda agent, *x: before.append(named(agent)) or update(agent, *x))
    run = new_run(module, tmp_path / "runs", *ours, "--init", start)
    command_line(module, "--resume", run, "--total-timesteps", 192, "--init", "gone")
    theirs, now = (checkpoint(folder)["agent"] for folder in (start, run))
    names = [name.removeprefix(part) for name in theirs if name.startswith(f"{part}.")]
    for name in names:
        for copy in parts:
            assert torch.equal(before[0][f"{copy}{name}"], theirs[f"{part}{name}"])
            assert torch.equal(now[f"{copy}{name}"], theirs[f"{part}{name}"]) == (copy == "start")
        assert part == "actor" or not torch.equal(theirs[f"actor{name}"], theirs[f"{part}{name}"])
    assert names
    wrong = {"nowhere is not": ["nowhere"], f"a run of {algo}.py, not of {other.NAME}.py": [run],
             "other observations": [start, "--env-id", "MountainCarContinuous-v0"],
             **{words: [start, *flags] for words, flags in wrong.items()}, "has no model": [start]}  # fmt: skip
    for words, args in wrong.items():
        if "model" in words:
            (start / "model/model.safetensors").unlink()
        with user_error(capsys, words):
            command_line(module, *ours, "--output-dir", tmp_path / "no", "--init", *args)
    assert not (tmp_path / "no").exists()
