r"""Conservative Q-Learning (CQL), SAC-N and EDAC.

Kumar, Zhou, Tucker and Levine 2020, "Conservative Q-Learning for Offline Reinforcement Learning" (arXiv 2006.04779).

Parent: td3_bc.py. Actor, temperature and soft target are those of sac.py; a term of the critics' loss keeps them low.

On a dataset nothing corrects critics that overrate an action which the data lacks. CQL lowers the values of all actions
and raises those of the data's actions, so the policy finds high values only near the data. On minibatches minimises

    L_Q  = sum_i E (Q_i(s, a) - y)^2 + w E [log int exp Q_i(s, a') da' - Q_i(s, a)],    i = 1 .. N
    y    = r + gamma (1 - terminated) [min_i Qbar_i(s', a') - alpha log pi(a' | s')],   a' ~ pi(. | s')
    L_pi = E alpha log pi(a | s) - min_i Q_i(s, a),    a ~ pi(. | s);     J(alpha) = E -alpha (log pi(a | s) - A)

    int    over [-1, 1]^A: log of the mean of exp Q_i(s, a') / q(a') over 3 K samples, K uniform, K of pi(. | s) and K
           of pi(. | s'), where q is the density from which a' was drawn; K: --num-samples, w: --cql-weight
    A      numbers of an action; -A is the target entropy; Qbar: targets, which lag by --tau

SAC-N (An, Moon, Kim and Song 2021, arXiv 2110.01548) has w = 0 and many critics, whose minimum is low where they
disagree. EDAC adds eta / (N - 1) E sum_{i != j} cos(grad_a Q_i(s, a), grad_a Q_j(s, a)): fewer critics suffice.

Run
    python algos/cql.py                                                       a tenth of the collection that ships
    python algos/cql.py --cql-weight 0                                        without the idea: SAC on a dataset
    python algos/cql.py --cql-weight 0 --num-critics 10 --diversity 1         EDAC's term, 3 minutes; SAC-N lacks it
    python algos/cql.py --dataset hopper_medium_replay-v2.hdf5 --max-steps 1000000 --cql-weight 10 --num-samples 10 \
        --policy-learning-rate 3e-5 --no-backup-entropy --eval-every 5000     CORL's recipe
    python algos/cql.py --evaluate RUN --eval-episodes 100 --capture-video    scores a saved agent

Expect
    A tenth of Hopper-v5's collection, 2,000 updates in 1.5 minutes on one core: Q_1 of the data's actions is 5.3 +- 0.1
    above that of uniform ones, in the second half of the run; with --cql-weight 0 it is 0.0 +- 0.1 (5 seeds;
    benchmarks/effects.py, cql-gap). In 1,000 updates its return is 873 +- 185, as the mean of five evaluations (8
    seeds; cql-hopper): we claim nothing of it. Values grow more slowly with more critics: with --cql-weight 0, in the
    second half of 1,000 updates, Q_1 is 18.7 with two, 18.0 with ten (SAC-N) and 17.1 with four and --diversity 1
    (EDAC; at most +- 0.2; 5 seeds; cql-edac). Their returns are not measured: CORL takes 3 million updates.

Metrics
    q, td_error, gap    means of Q_1(s, a) and |Q_1(s, a) - y|, and of Q_1(s, a) - Q_1(s, a') for uniform a'
    entropy, alpha      mean of -log pi, which comes down to -A; temperature.    eval/...: as in bc.py

Differences
    - No Lagrange multiplier for w, no maximum over actions in the target, no start by cloning (the authors' code has
      40,000 such steps). Two hidden layers, for speed; the authors and CORL have three.
    - The paper's squared error has a factor 1/2. The authors' code, d3rlpy, CORL (also of EDAC) and ours have none.
    - The authors by default, CORL and d3rlpy leave the entropy out of y: --no-backup-entropy. d3rlpy's a' is the mean.
    - CORL also begins with orthogonal critics and log std lower by 1, takes alpha's loss in log alpha, and moves the
      actor before the critics. Its TrainConfig defines reward_scale twice: 5 is its default, its files say 1 or 10.
    - For Hopper, CORL has EDAC with N = 50 and SAC-N with 200 or 500, three hidden layers, 3e-4 for actor and
      temperature, raw observations, log std from -5, and the order temperature, actor, critics. We ran none of it.
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
from utils.offline import OfflineArgs, check_spaces, compared, load_dataset

NAME, TITLE = "cql", "CQL"
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
    gamma: float = 0.99
    """discount"""
    tau: float = 0.005
    """step of the target critics towards the critics"""
    cql_weight: float = 5.0
    """weight of the conservative term: w; 0: SAC on a dataset"""
    num_samples: int = 4
    """actions per state that are drawn uniformly, as many of pi(. | s) and of pi(. | s'): K"""
    num_critics: int = 2
    """critics in the ensemble: N"""
    diversity: float = 0.0
    """weight of EDAC's term, which turns the critics' slopes apart: eta"""
    backup_entropy: bool = True
    """SAC's target, which has the entropy of the next action"""
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


def conservative_penalty(agent: Agent, batch: Transitions, q: Tensor, uniform: Tensor, noise: Tensor) -> Tensor:
    """Sum over critics of E log int exp Q(s, a') da' - Q(s, a). q (N, B, 1): of the data's actions. uniform (B, K, A):
    actions in [-1, 1]; noise (2, B, K, A): of K actions of pi(. | s) and of K of pi(. | s')."""
    samples, action_size = uniform.shape[1:]
    obs, next_obs = (x[:, None].expand(-1, samples, -1) for x in (batch.obs, batch.next_obs))
    ratios = [agent.critics(obs, uniform) + action_size * math.log(2)]  # logs of exp Q over the density
    for states, eps in zip((obs, next_obs), noise):  # all samples in one call take a tenth longer on a CPU
        with torch.no_grad():  # the penalty moves the critics alone
            actions, logps = agent.actor(states, eps)
        ratios.append(agent.critics(obs, actions) - logps)  # at s, also where the action is one for s'
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
    conservative_penalty."""
    with torch.no_grad():
        next_actions, next_logps = agent.actor(batch.next_obs, noise)
        next_q = agent.targets(batch.next_obs, next_actions).amin(0)
        if args.backup_entropy:
            next_q = next_q - agent.log_alpha.exp() * next_logps
        target = batch.rewards + args.gamma * (1 - batch.terminated) * next_q
    q = agent.critics(batch.obs, batch.actions)
    loss = (q - target).square().mean((1, 2)).sum()
    if args.cql_weight:
        loss = loss + args.cql_weight * conservative_penalty(agent, batch, q, uniform, policy_noise)
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
            "entropy": -logps.mean(), "alpha": agent.log_alpha.detach().exp()}  # fmt: skip


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
    replay = ReplayBuffer(rows.sum(), (obs_size, action_size, 1, 1, obs_size), device)
    replay.add(agent.normalized(data.obs[rows]), to_unit(data.actions[rows], space), data.rewards[rows, None],
               data.terminated[rows, None], agent.normalized(data.next_obs[rows]))  # fmt: skip
    adam, rate = partial(torch.optim.Adam, fused=True), args.policy_learning_rate
    optimizers = Optimizers(adam(agent.actor.parameters(), rate),
                            adam(agent.critics.parameters(), args.learning_rate),
                            adam([agent.log_alpha], rate))  # fmt: skip
    generator = torch.Generator(device).manual_seed(args.seed)
    run = Run(args, NAME, data.name, args.max_steps, ("q", "gap", "eval/return"))
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

    curves = {"return": ("eval/return",), "value": ("q", "gap"), "alpha": ("alpha",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {data.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
