r"""Cal-QL: Calibrated Q-Learning.

Nakamoto et al. 2023, "Cal-QL: Calibrated Offline RL Pre-Training for Efficient Online Fine-Tuning" (arXiv 2303.05479).

Parent: cql.py. The penalty does not press the policy's values below the returns of the data.

CQL can put all values far below the true ones. When training goes on online, poor actions with true values then look
good. Cal-QL presses down on the value of an action of the policy only while it is above the return of the data's
trajectory from there. On minibatches minimises cql.py's losses, but for the integral in the critics' one:

    L_Q  = sum_i E (Q_i(s, a) - y)^2 + w E [log I_i(s) - Q_i(s, a)],    i = 1 .. N
    I_i  = mean over 3 K actions a' of exp V_i(s, a') / q(a'),    q: the density from which a' was drawn
    V_i  = Q_i(s, a') for the K uniform actions, max(Q_i(s, a'), R(s, a)) for the K of pi(. | s) and the K of pi(. | s')
    R    return-to-go: r_t + gamma r_{t+1} + ... to the end of the trajectory that (s, a) = (s_t, a_t) is of
    y    = r + gamma (1 - terminated) min_i Qbar_i(s', a'),    a' ~ pi(. | s')

    The losses of actor and temperature are those of cql.py. Where R is the larger one, that sample gives no gradient.
    N: --num-critics, w: --cql-weight, K: --num-samples; Qbar: targets, which lag by --tau.

Run
    python algos/cal_ql.py                                                     a tenth of the collection that ships
    python algos/cal_ql.py --no-calibrate                                      without the idea: CQL
    python algos/cal_ql.py --dataset hopper_medium_replay-v2.hdf5 --max-steps 1000000 --gamma 0.99 --tau 0.005 \
        --eval-every 5000                                                      a long run, a dataset of D4RL
    python algos/cal_ql.py --evaluate RUN --eval-episodes 100 --capture-video  scores a saved agent

Expect
    A tenth of Hopper-v5's collection, whose returns-to-go have a mean of 28; 2,000 updates take 1.7 minutes of a core.
    With --batch-size 64, in the second half of 1,500 updates, Q_1 of the policy's actions is 0.7 +- 0.2 above the
    returns. It is 9.7 +- 0.4 below them with --no-calibrate, CQL, and 49 +- 11 above with --cql-weight 0 (5 seeds;
    benchmarks/effects.py, cal_ql-excess). The mean return of five evaluations is 314 +- 80 (8 seeds; cal_ql-hopper).
    We do not claim a better policy than CQL's. The paper's claim, no dip when fine-tuning begins, is not shown here.

Metrics
    q, td_error, gap    as in cql.py; so are entropy and alpha.    eval/...: as in bc.py
    q_policy            mean of Q_1(s, a') for a' of pi(. | s)
    excess, below       mean of Q_1(s, a') - R(s, a), and share of rows where it is negative

Differences
    - No online phase. As in cql.py no maximum over actions in the target, which the authors have, and no Lagrange
      multiplier, which they have on AntMaze. --backup-entropy is off, as theirs is: returns hold no entropy.
    - The authors have --gamma 0.99 and --tau 0.005. Values then grow for much longer than a default run.
    - Where time cut a trajectory off, R ends there, as in the code of the authors and CORL: too low if later rewards
      are positive, too high if they are negative. For sparse rewards both have a rule that we leave out. With r the
      reward of failure, R = r / (1 - gamma): in the authors' code where all rewards of a trajectory are r, in CORL's
      where the last one is. The authors leave out a trajectory's last row where time cut it off; we keep its reward.
    - Both subtract log q after the maximum, as we do. Online the authors keep the maximum, for which new trajectories
      have returns, too; CORL switches it off.
"""

import copy
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.control import ReplayBuffer, evaluate, is_bounded, make_env, score_saved, to_env, to_unit, try_out
from utils.core import Run, UserError, main, prepare
from utils.offline import Dataset, OfflineArgs, check_spaces, compared, load_dataset

NAME, TITLE = "cal_ql", "Cal-QL"
LOG_STD_BOUNDS = (-20.0, 2.0)  # as in sac.py, the code of CQL's authors and CORL's CQL; EDAC's has (-5, 2)


@dataclass
class Args(OfflineArgs):
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs); env_kwargs, eval_every,
    # eval_episodes, evaluate, capture_video (EnvArgs); dataset, env_id (OfflineArgs)
    max_steps: int = 2_000
    """updates"""
    learning_rate: float = 3e-4
    """learning rate of Adam, for the critics"""
    policy_learning_rate: float = 1e-4
    """learning rate of Adam, for actor and temperature"""
    gamma: float = 0.9
    """discount; with 0.99 values are ten times as high, and a default run ends long before they are there"""
    tau: float = 0.02
    """step of the target critics towards the critics"""
    cql_weight: float = 5.0
    """weight of the conservative term: w; 0: SAC on a dataset, here without entropy in its target"""
    num_samples: int = 4
    """actions per state that are drawn uniformly, as many of pi(. | s) and of pi(. | s'): K"""
    num_critics: int = 2
    """critics in the ensemble: N"""
    diversity: float = 0.0
    """weight of EDAC's term, which turns the critics' slopes apart: eta"""
    calibrate: bool = True
    """hold the policy's samples up to the returns in the penalty; --no-calibrate: CQL"""
    backup_entropy: bool = False
    """SAC's target, which has the entropy of the next action; returns have none"""
    normalize: bool = True
    """subtract the dataset's mean from observations and divide them by its standard deviation"""
    batch_size: int = 256
    """transitions per update"""
    hidden_size: int = 256
    """units of the two hidden layers"""
    top_fraction: float | None = None
    """train on the trajectories of highest return, up to this fraction of all steps; None: 0.1 of the collection that
    ships, all of another dataset"""
    log_every: int = 500
    """updates between rows of metrics"""
    save_every: int = 5_000
    """updates between checkpoints"""


class Transitions(NamedTuple):
    """A minibatch of B rows, all float32."""

    obs: Tensor  # (B, D)
    actions: Tensor  # (B, A) in [-1, 1]
    rewards: Tensor  # (B, 1)
    terminated: Tensor  # (B, 1), 0 or 1; 0 where an episode was only cut off
    next_obs: Tensor  # (B, D)
    returns: Tensor  # (B, 1): R(s, a), discounted


def network(size_in: int, hidden_size: int, size_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size_in, hidden_size), nn.ReLU(), nn.Linear(hidden_size, hidden_size), nn.ReLU(),
                         nn.Linear(hidden_size, size_out))  # fmt: skip


class Actor(nn.Module):
    def __init__(self, obs_size: int, action_size: int, hidden_size: int):
        super().__init__()
        self.net = network(obs_size, hidden_size, 2 * action_size)

    def forward(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions in [-1, 1] from standard normal noise (B, A), and their log-density there: (B, A), (B, 1). Noise 0
        gives the likeliest u, hence the deterministic action."""
        mean, log_std = self.net(obs).chunk(2, -1)
        log_std = log_std.clamp(*LOG_STD_BOUNDS)
        u = mean + log_std.exp() * noise
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))  # log(1 - tanh(u)^2), stable: no constant added inside
        return u.tanh(), (log_normal - log_slope).sum(-1, keepdim=True)


class Critics(nn.ModuleDict):
    """An ensemble: q1, q2, ..."""

    def __init__(self, obs_size: int, action_size: int, hidden_size: int, count: int):
        sizes = obs_size + action_size, hidden_size, 1
        super().__init__({f"q{i}": network(*sizes) for i in range(1, count + 1)})

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Q_1, ..., Q_N: (N, ..., 1) of observations (..., D) and actions (..., A)."""
        both = torch.cat([obs, actions], -1)
        return torch.stack([q(both) for q in self.values()])


class Agent(nn.Module):
    """What is saved: actor, critics, target critics, log alpha, and the statistics of --normalize."""

    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        self.actor = Actor(obs_size, action_size, args.hidden_size)
        self.critics = Critics(obs_size, action_size, args.hidden_size, args.num_critics)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.obs_mean, self.obs_std = nn.Buffer(torch.zeros(obs_size)), nn.Buffer(torch.ones(obs_size))

    def normalized(self, obs: np.ndarray) -> np.ndarray:
        """Observations (N, D) as the networks see them: the same ones with --no-normalize."""
        return (obs - self.obs_mean.cpu().numpy()) / self.obs_std.cpu().numpy()


def returns_to_go(data: Dataset, gamma: float) -> np.ndarray:
    """(n,): discounted sums of the rewards from each row to the last one of its trajectory."""
    returns, starts = data.rewards.astype(np.float64), set(data.lengths().cumsum())
    for row in reversed(range(len(returns) - 1)):
        if row + 1 not in starts:
            returns[row] += gamma * returns[row + 1]
    return returns


def calibrated_penalty(agent: Agent, batch: Transitions, q: Tensor, uniform: Tensor, noise: Tensor,
                       floor: Tensor) -> Tensor:  # fmt: skip
    """Sum over critics of the penalty of L_Q. q (N, B, 1): of the data's actions. uniform (B, K, A): actions in
    [-1, 1]; noise (2, B, K, A): of K actions of pi(. | s) and of K of pi(. | s'); floor (B, 1): the least value of
    these 2 K in the integral, R(s, a) or -inf."""
    samples, action_size = uniform.shape[1:]
    obs, next_obs = (x[:, None].expand(-1, samples, -1) for x in (batch.obs, batch.next_obs))
    ratios = [agent.critics(obs, uniform) + action_size * math.log(2)]  # logs of exp Q over the density
    for states, eps in zip((obs, next_obs), noise):  # all samples in one call take a tenth longer on a CPU
        with torch.no_grad():  # the penalty moves the critics alone
            actions, logps = agent.actor(states, eps)
        values = agent.critics(obs, actions)  # at s, also where the action is one for s'
        ratios.append(values.clamp(min=floor[:, None]) - logps)  # no gradient where the floor holds
    integral = torch.cat(ratios, 2).logsumexp(2) - math.log(3 * samples)
    return (integral - q).mean((1, 2)).sum()


def diversity(critics: Critics, obs: Tensor, actions: Tensor) -> Tensor:
    """EDAC's term: mean over the batch of the sum of cosines between two critics' slopes in the action, over N - 1."""
    copies = [actions.detach().requires_grad_() for _ in critics]  # of one, each slope would pass all networks
    total = sum(q(torch.cat([obs, own], -1)).sum() for q, own in zip(critics.values(), copies))
    slopes = torch.autograd.grad(total, copies, create_graph=True)
    normals = F.normalize(torch.stack(slopes), dim=2)
    cosines = normals.sum(0).square().sum(1) - normals.square().sum((0, 2))  # (B,): without those with themselves
    return cosines.mean() / (len(slopes) - 1)


def critic_loss(agent: Agent, batch: Transitions, noise: Tensor, uniform: Tensor, policy_noise: Tensor,
                args: Args) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """L_Q, Q_1 and the target y. noise (B, A): of the target's action; uniform, policy_noise: see
    calibrated_penalty."""
    with torch.no_grad():
        next_actions, next_logps = agent.actor(batch.next_obs, noise)
        next_q = agent.targets(batch.next_obs, next_actions).amin(0)
        if args.backup_entropy:
            next_q = next_q - agent.log_alpha.exp() * next_logps
        target = batch.rewards + args.gamma * (1 - batch.terminated) * next_q
    q = agent.critics(batch.obs, batch.actions)
    loss = (q - target).square().mean((1, 2)).sum()
    if args.cql_weight:
        floor = batch.returns if args.calibrate else torch.full_like(batch.returns, -math.inf)
        loss = loss + args.cql_weight * calibrated_penalty(agent, batch, q, uniform, policy_noise, floor)
    if args.diversity:
        loss = loss + args.diversity * diversity(agent.critics, batch.obs, batch.actions)
    return loss, q[0].detach(), target


def actor_loss(agent: Agent, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """L_pi, and the log-densities (B, 1) of the actions without gradient. noise (B, A)."""
    actions, logps = agent.actor(obs, noise)
    q = agent.critics(obs, actions).amin(0)
    return (agent.log_alpha.detach().exp() * logps - q).mean(), logps.detach()


def alpha_loss(log_alpha: Tensor, logps: Tensor, target_entropy: float) -> Tensor:
    """J(alpha), a function of log alpha."""
    return -(log_alpha.exp() * (logps + target_entropy)).mean()


class Optimizers(NamedTuple):
    actor: torch.optim.Optimizer
    critics: torch.optim.Optimizer
    alpha: torch.optim.Optimizer


def update(agent: Agent, optimizers: Optimizers, batch: Transitions, generator: torch.Generator,
           args: Args) -> dict[str, Tensor]:  # fmt: skip
    """One step of critics, actor, temperature and target critics, in this order. Returns metrics, as tensors: reading
    them would make the CPU wait for the device at every update."""
    rows, size = batch.actions.shape
    draws: dict = dict(generator=generator, device=batch.obs.device)
    noise, next_noise = torch.randn(2, rows, size, **draws)
    uniform = torch.rand(rows, args.num_samples, size, **draws) * 2 - 1
    policy_noise = torch.randn(2, *uniform.shape, **draws)
    with torch.no_grad():
        q_uniform = agent.critics(batch.obs, uniform[:, 0])[0]
        q_policy = agent.critics(batch.obs, agent.actor(batch.obs, noise)[0])[0]
    loss, q, target = critic_loss(agent, batch, next_noise, uniform, policy_noise, args)
    optimizers.critics.zero_grad(set_to_none=True)
    loss.backward()
    optimizers.critics.step()

    agent.critics.requires_grad_(False)  # the actor's gradient passes through them; theirs would be thrown away
    loss, logps = actor_loss(agent, batch.obs, noise)
    optimizers.actor.zero_grad(set_to_none=True)
    loss.backward()
    optimizers.actor.step()
    agent.critics.requires_grad_(True)
    optimizers.alpha.zero_grad(set_to_none=True)
    alpha_loss(agent.log_alpha, logps, -float(size)).backward()
    optimizers.alpha.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(agent.targets.parameters()), list(agent.critics.parameters()), args.tau)
    return {"q": q.mean(), "gap": (q - q_uniform).mean(), "td_error": (q - target).abs().mean(),
            "entropy": -logps.mean(), "alpha": agent.log_alpha.detach().exp(), "q_policy": q_policy.mean(),
            "excess": (q_policy - batch.returns).mean(),
            "below": (q_policy < batch.returns).float().mean()}  # fmt: skip


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    if not is_bounded(space):
        wanted = "a Box of floats with finite bounds"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: {TITLE} needs {wanted}")
    if args.diversity and args.num_critics < 2:
        raise UserError(f"--num-critics is {args.num_critics}: with --diversity it must be at least 2")


@torch.no_grad()
def act(agent: Agent, space: gym.spaces.Box, obs: np.ndarray, scale: Tensor | float,
        generator: torch.Generator) -> np.ndarray:  # fmt: skip
    """Actions (N, A) in [-1, 1] of raw observations (N, D); `scale` 0: the likeliest, 1: samples."""
    states = torch.from_numpy(agent.normalized(obs).astype(np.float32)).to(generator.device)
    noise = torch.randn(len(obs), math.prod(space.shape), generator=generator, device=generator.device)
    return agent.actor(states, noise * scale)[0].cpu().numpy()


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
    data = None if args.evaluate else load_dataset(args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape[0], env.action_space
    check(args, space)
    action_size = math.prod(space.shape)
    agent = Agent(obs_size, action_size, args).to(device)
    score_agent = partial(evaluate, eval_envs, lambda *x: to_env(act(agent, space, *x), space), args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    check_spaces(data, obs_size, space)
    if args.top_fraction is None:
        args.top_fraction = 1.0 if args.dataset else 0.1
    rows = data.known & data.top_rows(args.top_fraction)
    if not rows.any():
        raise UserError(f"--top-fraction {args.top_fraction} leaves no transition of {data.name}: raise it")
    if args.normalize:
        agent.obs_mean.copy_(torch.from_numpy(data.obs[rows].mean(0, np.float64)))
        agent.obs_std.copy_(torch.from_numpy(data.obs[rows].std(0, np.float64) + 1e-3))
    replay = ReplayBuffer(rows.sum(), (obs_size, action_size, 1, 1, obs_size, 1), device)
    replay.add(agent.normalized(data.obs[rows]), to_unit(data.actions[rows], space), data.rewards[rows, None],
               data.terminated[rows, None], agent.normalized(data.next_obs[rows]),
               returns_to_go(data, args.gamma)[rows, None])  # fmt: skip
    adam, rate = partial(torch.optim.Adam, fused=True), args.policy_learning_rate
    optimizers = Optimizers(adam(agent.actor.parameters(), rate),
                            adam(agent.critics.parameters(), args.learning_rate),
                            adam([agent.log_alpha], rate))  # fmt: skip
    generator = torch.Generator(device).manual_seed(args.seed)
    run = Run(args, NAME, data.name, args.max_steps, ("q_policy", "excess", "below", "eval/return"))
    run.print(f"{data.name}: {len(data.starts)} trajectories, {rows.sum()} transitions taken of {len(data.obs)}")
    parts = optimizers._asdict() | dict(agent=agent, generator=generator)
    run.restore(**parts)
    step = run.step
    while step < run.total:
        # update
        batch = Transitions(*replay.sample(args.batch_size, generator))
        step += 1
        metrics = update(agent, optimizers, batch, generator, args)

        # evaluate
        due = run.due(step, args.eval_every)
        if due or run.due(step, args.log_every):
            columns = {name: value.item() for name, value in metrics.items()}
            columns["time/updates_per_second"] = run.speed(step)
            if due and eval_envs:
                columns |= compared(score_agent(), data, run, step)
            run.log(step, **columns)
        run.end_step(step, parts)

    curves = {"return": ("eval/return",), "value": ("q", "q_policy", "excess"), "alpha": ("alpha",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {data.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
