r"""Soft Actor-Critic (SAC).

Haarnoja et al. 2018, "Soft Actor-Critic: Off-Policy Maximum Entropy Deep Reinforcement Learning with a Stochastic
Actor" (arXiv 1801.01290) in the form of "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905, algorithm
1): twin critics, no value network, learned temperature.

The policy learns from a replay buffer of everything it has done. It is rewarded for entropy, too, so it keeps
exploring. The temperature alpha weighs entropy and adjusts itself until the entropy meets a target. On minibatches
minimises

    J_Q(theta_i) = E 1/2 (Q_i(s, a) - y)^2                                                     equation 5, i = 1, 2
               y = r + gamma (1 - terminated) [ min_i Qbar_i(s', a') - alpha log pi(a' | s') ],  a' ~ pi(. | s')
    J_pi(phi)    = E alpha log pi(a | s) - min_i Q_i(s, a),                         a ~ pi(. | s)    equation 9
    J(alpha)     = E -alpha (log pi(a | s) + H)                                                equation 18

    pi     a = tanh(u), u ~ N(mean(s), std(s)^2), by reparameterisation; H = -(action size), the target entropy
    Qbar   target critics: after each update Qbar <- (1 - tau) Qbar + tau Q
    s'     the true next observation, never that of a reset; truncation does not end the bootstrap
    gamma, tau, alpha, H   --gamma, --tau, --alpha (none: learned), --target-entropy

REDQ (Chen et al. 2021, arXiv 2101.05982) and DroQ (Hiraoka et al. 2021, arXiv 2110.02034) are SAC with other critics
and many updates per step. In REDQ the minimum is over M random critics of N, drawn anew for each update (--subset-size,
--num-critics); the actor moves once per step and maximises the mean of all N. In DroQ each of two critics has dropout
and LayerNorm in its hidden layers: Linear, dropout, LayerNorm, ReLU. Its target critics drop out, too.

gSDE (Raffin, Kober, Stulp 2020, arXiv 2005.05719) explores smoothly: --sde N keeps a matrix theta for N steps, entries
N(0, sigma^2), and u = mean(s) + theta^T phi(s), where phi is the last hidden layer. The losses use the density of one
such step, u ~ N(mean, phi^2 sigma^2 + 1e-6), and sigma is learned.

HER (Andrychowicz et al. 2017, arXiv 1707.01495) is for environments that observe a dictionary of observation,
achieved_goal and desired_goal, as Gymnasium-Robotics' do. When an episode has ended, each of its steps is stored, and
--her-k times again with a goal that was achieved at that step or later; compute_reward and compute_terminated say what
would have come of it.

Run
    python algos/sac.py                                                                 Pendulum-v1
    python algos/sac.py --env-id HalfCheetah-v5 --total-timesteps 1000000 --learning-starts 10000 --eval-every 20000
                                                                                        the paper's recipe for MuJoCo
    python algos/sac.py --env-id HalfCheetah-v5 --utd-ratio 4 --num-envs 4
    python algos/sac.py --env-id Hopper-v5 --total-timesteps 125000 --learning-starts 5000 --num-critics 10 \
        --subset-size 2 --actor-q mean --utd-ratio 20 --policy-frequency 20 --target-entropy -1
                                                                                        REDQ; never run at length
    python algos/sac.py --env-id Hopper-v5 --total-timesteps 100000 --learning-starts 5000 --layer-norm \
        --dropout 0.01 --actor-q mean --utd-ratio 20 --policy-frequency 20 --target-entropy -1
                                                                                        DroQ; never run at length
    python algos/sac.py --env-id MountainCarContinuous-v0 --total-timesteps 50000 --learning-starts 0 --gamma 0.9999 \
        --tau 0.01 --alpha 0.1 --batch-size 512 --buffer-size 50000 --hidden-size 64 --sde 32 --log-std-init -3.67
                                                                                        gSDE; three seeds were run
    python algos/sac.py --env-id package.module:Name-v0 --env-kwargs size=5             your own environment; with goals
                                                                                        also --her-k 4
    python algos/sac.py --env-id Hopper-v5 --total-timesteps 1000000 --eval-every 10000 --record-dataset data/hopper
                                                                                        collections for offline scripts
    python algos/sac.py --evaluate RUN --eval-episodes 100 --capture-video              scores a saved agent

Expect
    Pendulum-v1: from -1,608 in training to -172 with the likeliest actions (seed 1), in 1.5 minutes on 2 CPU cores.
    MountainCarContinuous-v0 with gSDE, the command above: 93 to 94 with the likeliest actions after 10,000 steps, 95 to
    96 after 50,000 (seeds 1 to 3). Its matrices reach the goal by chance in the first 1,000 steps.
    Hopper-v5, 20,000 steps: from about 20 to 264 with the likeliest actions (median of 8 seeds), in 4 minutes. 1M
    steps: 3,082, 3,461 and 3,312 in the mean of the last five evaluations (seeds 1 to 3), in 2.5 to 3.2 hours on one
    core.
    PointReach-v0 with --her-k 4, 3,000 steps: 0.96 +- 0.02 of the episodes reach their goal; without hindsight 0.04 +-
    0.02 (10 seeds; benchmarks/effects.py, sac-reach).

Metrics
    return, length      of the training episodes that ended since the row before; absent where none did
    eval/return         mean over --eval-episodes, likeliest action; eval/return_stochastic: sampled actions
    eval/success        share of these episodes that reach a success; where the environment reports it
    Of the newest update (entropy and alpha: of the newest that moved the actor):
    q                   mean of Q_1 over the batch; should stay near the discounted return, runaway growth is divergence
    td_error            mean |Q_1(s, a) - y|
    entropy             mean of -log pi in nats of the [-1, 1] box; comes down to the target H
    alpha               temperature; settles
    grad_norm           of the critics

Differences
    - Densities are of actions in [-1, 1], before stretching to the environment's bounds, so the target entropy means
      the same in every environment, as in the authors' code and SB3. CleanRL's density includes the bounds.
    - One actor update for every critic update, as in the paper; CleanRL makes two every second step.
    - REDQ's and DroQ's settings are those of the authors' code (watchernyu/REDQ, redq_sac.py; TakuyaHiraoka/
      Dropout-Q-Functions..., KUCodebase), on Hopper-v5 for their Hopper-v2; we have not read the papers' tables. REDQ's
      code moves the actor by the critics from before the update, ours by those after it. DroQ's repository has two
      bases with other rates of dropout for the same results: 0.01 on Hopper in one, 0.0001 in the other.
    - gSDE's settings for MountainCarContinuous are rl-baselines3-zoo's, but for its 32 updates after every 32 steps:
      ours come one by one. As in SB3, phi is learned by the noise, too; SB3 also clips the mean to [-2, 2]. Its losses
      take one matrix for a whole minibatch, ours new noise for each row, which has the same distribution in each row.
      Evaluation draws new noise in each step, and so do recorded collections.
    - HER stores relabelled steps, as in the paper's algorithm; SB3 draws goals when it draws a minibatch. An episode
      that would have ended at the new goal is stored as one. Gymnasium-Robotics' environments were never run.
    - Swimmer needs a longer horizon than MuJoCo's other tasks: rl-baselines3-zoo takes gamma 0.999 there with SAC,
      and 0.99 elsewhere. We have not run it.
    - The default is for Pendulum and starts learning earlier than the paper.
"""

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.cli import main, prepare
from utils.collection import check_recording, record, snapshot
from utils.envs import (
    EnvArgs,
    episode_columns,
    make_vector,
    open_env,
    reset_vector,
    restore_vector,
    step_vector,
)
from utils.errors import NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval, UserError
from utils.goals import find_goals, future, relabel
from utils.replay import ReplayBuffer
from utils.rollouts import evaluate, score_saved
from utils.run import Run
from utils.spaces import is_bounded, to_env

NAME, TITLE = "sac", "SAC"
LOG_STD_BOUNDS = (-20.0, 2.0)  # the authors' code clamps to them; CleanRL squashes into [-5, 2] by another tanh


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, threads, output_dir, keep, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "Pendulum-v1"
    """a Gymnasium environment with bounded continuous actions, or MODULE:NAME of one that MODULE registers"""
    total_timesteps: PositiveInt = 10_000
    """environment steps, over all environments"""
    num_envs: PositiveInt = 1
    """environments that are stepped together"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: PositiveFloat = 3e-4
    """learning rate of Adam, for actor, critics and temperature"""
    gamma: UnitInterval = 0.99
    """discount"""
    tau: UnitInterval = 0.005
    """step of the target critics towards the critics"""
    alpha: PositiveFloat | None = None
    """a fixed temperature; None: learned"""
    target_entropy: float | None = None
    """target entropy in nats; None: -(action size)"""
    utd_ratio: PositiveInt = 1
    """updates per environment step"""
    policy_frequency: PositiveInt = 1
    """updates of the critics for one of actor and temperature"""
    num_critics: PositiveInt = 2
    """critics in the ensemble"""
    subset_size: PositiveInt | None = None
    """critics, drawn anew for each update, whose minimum makes the target; None: all"""
    actor_q: Literal["min", "mean"] = "min"
    """what the actor maximises of all critics"""
    layer_norm: bool = False
    """LayerNorm in each hidden layer of the critics"""
    dropout: Annotated[float, "at least 0 and below 1"] = 0.0
    """dropout in each hidden layer of the critics and target critics, before LayerNorm"""
    sde: NonNegativeInt = 0
    """gSDE: steps for which an environment keeps its matrix of noise; 0: plain SAC, new noise in each step"""
    log_std_init: float = -3.0
    """gSDE: initial log standard deviation of the matrix's entries"""
    her_k: NonNegativeInt = 0
    """HER: further goals for each step, reached later in its episode, in an environment with goals; 0: plain SAC"""
    batch_size: PositiveInt = 256
    """transitions per update"""
    buffer_size: PositiveInt = 1_000_000
    """newest transitions that are kept, on the device"""
    learning_starts: NonNegativeInt = 1_000
    """steps with uniformly random actions before the first update"""
    hidden_size: PositiveInt = 256
    """units of the two hidden layers of actor and critics"""
    record_dataset: str = ""
    """at the end write collections to this folder, as D4RL does: random, medium, expert, medium- and full-replay"""
    record_steps: PositiveInt = 100_000
    """transitions in each of random, medium and expert"""
    compile: bool = False
    """compile the losses: meant for a GPU"""
    log_every: PositiveInt = 500
    """environment steps between rows of metrics"""
    save_every: PositiveInt = 10_000
    """environment steps between checkpoints"""


class Transitions(NamedTuple):
    """A minibatch of B rows, all float32."""

    obs: Tensor  # (B, D)
    actions: Tensor  # (B, A) in [-1, 1]
    rewards: Tensor  # (B, 1)
    terminated: Tensor  # (B, 1), 0 or 1; 0 where an episode was only cut off
    next_obs: Tensor  # (B, D)


def network(size_in: int, hidden_size: int, size_out: int, layer_norm: bool = False,
            dropout: float = 0.0) -> nn.Sequential:  # fmt: skip
    layers: list[nn.Module] = []
    for size in (size_in, hidden_size):
        layers.append(nn.Linear(size, hidden_size))
        if dropout:
            layers.append(nn.Dropout(dropout))
        if layer_norm:
            layers.append(nn.LayerNorm(hidden_size))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(hidden_size, size_out))


class Actor(nn.Module):
    """sde: the last hidden layer's features phi (F) make the noise: std(s)^2 = phi^2 sigma^2 + 1e-6, sigma (F, A)."""

    def __init__(self, obs_size: int, action_size: int, hidden_size: int, sde: bool = False, log_std_init: float = 0.0):
        super().__init__()
        self.net = network(obs_size, hidden_size, action_size if sde else 2 * action_size)
        self.log_sigma = nn.Parameter(torch.full((hidden_size, action_size), log_std_init)) if sde else None

    def normal(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and log standard deviation of u, and phi: (B, A), (B, A), (B, F)."""
        features = self.net[:-1](obs)
        if self.log_sigma is None:
            mean, log_std = self.net[-1](features).chunk(2, -1)
            return mean, log_std.clamp(*LOG_STD_BOUNDS), features
        variance = features.square() @ (2 * self.log_sigma).exp() + 1e-6  # where all features are 0, so is the noise
        return self.net[-1](features), 0.5 * variance.log(), features

    def kept_noise(self, obs: Tensor, matrices: Tensor) -> Tensor:
        """The noise (B, A) that gSDE's standard normal matrices (B, F, A) come to in these states, as a number of
        standard deviations: theta^T phi / std(s), with theta = sigma times a matrix."""
        _, log_std, features = self.normal(obs)
        return torch.einsum("bf,bfa->ba", features, matrices * self.log_sigma.exp()) / log_std.exp()

    def forward(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions in [-1, 1] from standard normal noise (B, A), and their log-density there: (B, A), (B, 1). Noise 0
        gives the likeliest u, hence the deterministic action."""
        mean, log_std, _ = self.normal(obs)
        u = mean + log_std.exp() * noise
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))  # log(1 - tanh(u)^2), stable: no constant added inside
        return u.tanh(), (log_normal - log_slope).sum(-1, keepdim=True)


class Critics(nn.ModuleDict):
    """An ensemble: q1, q2, ..."""

    def __init__(self, obs_size: int, action_size: int, hidden_size: int, count: int = 2, layer_norm: bool = False,
                 dropout: float = 0.0):  # fmt: skip
        sizes = obs_size + action_size, hidden_size, 1
        super().__init__({f"q{i}": network(*sizes, layer_norm, dropout) for i in range(1, count + 1)})

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Q_1, ..., Q_N: (N, B, 1)."""
        both = torch.cat([obs, actions], -1)
        return torch.stack([q(both) for q in self.values()])


class Agent(nn.Module):
    """What is saved: actor, critics, target critics and log alpha. `actor`: sde, log_std_init; `critics`: count,
    layer_norm, dropout."""

    def __init__(self, obs_size: int, action_size: int, hidden_size: int, alpha: float, actor: dict | None = None,
                 **critics):  # fmt: skip
        super().__init__()
        self.actor = Actor(obs_size, action_size, hidden_size, **(actor or {}))
        self.critics = Critics(obs_size, action_size, hidden_size, **critics)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(alpha)))


def critic_loss(agent: Agent, batch: Transitions, noise: Tensor, gamma: float,
                subset: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Sum of all critics' losses (equation 5 with a sample of the soft value), Q_1 and the target y. noise (B, A);
    subset: numbers of the target critics, from 0, of which the minimum is taken; None: all."""
    with torch.no_grad():
        next_actions, next_logps = agent.actor(batch.next_obs, noise)
        next_q = agent.targets(batch.next_obs, next_actions)
        smallest = (next_q if subset is None else next_q[subset]).amin(0)
        soft_value = smallest - agent.log_alpha.exp() * next_logps
        target = batch.rewards + gamma * (1 - batch.terminated) * soft_value
    q = agent.critics(batch.obs, batch.actions)
    return 0.5 * (q - target).square().mean((1, 2)).sum(), q[0].detach(), target


def actor_loss(agent: Agent, obs: Tensor, noise: Tensor, actor_q: str = "min") -> tuple[Tensor, Tensor]:
    """Equation 9, and the log-densities (B, 1) of the actions without gradient. noise (B, A)."""
    actions, logps = agent.actor(obs, noise)
    q = agent.critics(obs, actions)
    q = q.mean(0) if actor_q == "mean" else q.amin(0)
    return (agent.log_alpha.detach().exp() * logps - q).mean(), logps.detach()


def alpha_loss(log_alpha: Tensor, logps: Tensor, target_entropy: float) -> Tensor:
    """Equation 18, a function of log alpha. SB3, and the authors' code until 2020, minimise -log(alpha) (log pi + H):
    on HalfCheetah's first 30,000 steps 8 seeds showed no difference."""
    return -(log_alpha.exp() * (logps + target_entropy)).mean()


class Optimizers(NamedTuple):
    actor: torch.optim.Optimizer
    critics: torch.optim.Optimizer
    alpha: torch.optim.Optimizer | None  # None: the temperature is fixed


def update(agent: Agent, optimizers: Optimizers, batch: Transitions, generator: torch.Generator, args: Args,
           number: int, critic_loss: Callable = critic_loss, actor_loss: Callable = actor_loss
           ) -> dict[str, Tensor]:  # fmt: skip
    """One step of critics, actor, temperature and target critics, in this order; of actor and temperature only where
    the update's number is a multiple of --policy-frequency. Returns metrics, as tensors: reading them would make the
    CPU wait for the device at every update."""
    noise, next_noise = torch.randn(2, *batch.actions.shape, generator=generator, device=batch.obs.device)
    subset = None
    if args.subset_size not in (None, args.num_critics):
        subset = torch.randperm(args.num_critics, generator=generator, device=batch.obs.device)[: args.subset_size]
    loss, q, target = critic_loss(agent, batch, next_noise, args.gamma, subset)
    optimizers.critics.zero_grad(set_to_none=True)
    loss.backward()
    optimizers.critics.step()
    grad_norm = torch.nn.utils.get_total_norm([p.grad for p in agent.critics.parameters()])
    metrics = {"q": q.mean(), "td_error": (q - target).abs().mean(), "grad_norm": grad_norm}

    if number % args.policy_frequency == 0:
        agent.critics.requires_grad_(False)  # the actor's gradient passes through them; theirs would be thrown away
        loss, logps = actor_loss(agent, batch.obs, noise, args.actor_q)
        optimizers.actor.zero_grad(set_to_none=True)
        loss.backward()
        optimizers.actor.step()
        agent.critics.requires_grad_(True)
        if optimizers.alpha is not None:
            optimizers.alpha.zero_grad(set_to_none=True)
            alpha_loss(agent.log_alpha, logps, args.target_entropy).backward()
            optimizers.alpha.step()
        metrics |= {"entropy": -logps.mean(), "alpha": agent.log_alpha.detach().exp()}
    with torch.no_grad():
        torch._foreach_lerp_(list(agent.targets.parameters()), list(agent.critics.parameters()), args.tau)
    return metrics


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    if not is_bounded(space):
        wanted = "a Box of floats with finite bounds"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: SAC needs {wanted}")
    if args.total_timesteps % args.num_envs:
        raise UserError(f"--total-timesteps {args.total_timesteps} must be a multiple of --num-envs {args.num_envs}")
    if args.subset_size and args.subset_size > args.num_critics:
        raise UserError(f"--subset-size {args.subset_size} must be at most --num-critics {args.num_critics}")
    if args.record_dataset and args.her_k:
        raise UserError("--record-dataset writes what was seen, and --her-k adds what was not: give one of them")
    if args.record_dataset:
        check_recording(args)


@torch.no_grad()
def act(actor: Actor, space: gym.spaces.Box, obs: np.ndarray, scale: Tensor | float, generator: torch.Generator,
        matrices: Tensor | None = None) -> np.ndarray:  # fmt: skip
    """Actions (N, A) in [-1, 1] of observations (N, D); `scale` 0: the likeliest, 1: samples. matrices (N, F, A): of
    gSDE; None: new noise."""
    inputs = torch.from_numpy(obs.astype(np.float32)).to(generator.device)
    if matrices is None:
        noise = torch.randn(len(obs), math.prod(space.shape), generator=generator, device=generator.device)
    else:
        noise = actor.kept_noise(inputs, matrices)
    return actor(inputs, noise * scale)[0].cpu().numpy()


def train(args: Args) -> list[dict]:
    device = prepare(args)
    make, obs_size, space = open_env(args)
    check(args, space)
    action_size = math.prod(space.shape)
    goals = find_goals(args.env_id, make, "--her-k") if args.her_k else None
    if args.target_entropy is None:
        args.target_entropy = -float(action_size)
    agent = Agent(obs_size, action_size, args.hidden_size, args.alpha or 1.0,
                  dict(sde=args.sde > 0, log_std_init=args.log_std_init), count=args.num_critics,
                  layer_norm=args.layer_norm, dropout=args.dropout).to(device)  # fmt: skip
    score_agent = partial(evaluate, make, lambda *inputs: to_env(act(agent.actor, space, *inputs), space),
                          args.eval_episodes, args.seed, device)  # fmt: skip
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
    optimizers = Optimizers(adam(agent.actor.parameters()), adam(agent.critics.parameters()),
                            adam([agent.log_alpha]) if args.alpha is None else None)  # fmt: skip
    losses = [torch.compile(loss) if args.compile else loss for loss in (critic_loss, actor_loss)]
    generator = torch.Generator(device).manual_seed(args.seed)
    replay = ReplayBuffer(args.buffer_size, (obs_size, action_size, 1, 1, obs_size), device)
    run = Run(args, NAME, args.env_id, args.total_timesteps, ("return", "eval/return", "alpha"), "total_timesteps")
    envs = make_vector(make, args.num_envs, args.seed, args.vector)

    def state(drawn: Tensor | None = None) -> dict:
        """If a step fails, `drawn` is the generator's state before it, so a resumed run repeats the step. The
        environment's draws from global generators are not repeated: copying those at each step would cost time."""
        return {"agent": agent.state_dict(), "optimizers": [o.state_dict() for o in optimizers if o is not None],
                "generator": generator.get_state() if drawn is None else drawn, "envs": envs.log.state(obs),
                "metrics": metrics, "episodes": episodes, "snapshots": snapshots, "matrices": matrices,
                "paths": [torch.tensor(np.array(path)) for path in paths],
                "replay": replay.save(run.dir / "replay", args.keep)}  # fmt: skip

    paths: list[list[np.ndarray]] = [[] for _ in range(args.num_envs)]  # HER: of episodes that have not ended yet
    step, episodes, snapshots, metrics, matrices = run.step, [], [], {}, None
    if run.state is not None:
        names = "metrics", "episodes", "snapshots", "matrices"
        metrics, episodes, snapshots, matrices = (run.state[name] for name in names)
        matrices = matrices if matrices is None else matrices.to(device)
        replay.load(run.dir / "replay", run.state["replay"])
        obs = restore_vector(envs, run.state["envs"])
        paths = [list(rows.numpy()) if envs.log.length[i] else [] for i, rows in enumerate(run.state["paths"])]
    else:
        obs = reset_vector(envs)
        if args.record_dataset:
            snapshots = [snapshot(step, score_agent(), agent.actor)]
    run.restore(agent=agent, optimizers=optimizers, generator=generator)
    while step < run.total:
        # collect
        after = step + args.num_envs
        with run.saving(step, partial(state, generator.get_state())):
            if args.sde and step // args.num_envs % args.sde == 0:
                size = args.num_envs, args.hidden_size, action_size
                matrices = torch.randn(size, generator=generator, device=device)
            if step < args.learning_starts:
                actions = torch.rand(len(obs), action_size, generator=generator, device=device).cpu().numpy() * 2 - 1
            else:
                actions = act(agent.actor, space, obs, 1.0, generator, matrices)
            next_obs, true_obs, rewards, terminated, truncated, ended = step_vector(
                envs, to_env(actions, space), after)  # fmt: skip
        if goals is None:
            replay.add(obs, actions, rewards[:, None], terminated[:, None], true_obs)
        else:  # hindsight: an episode is stored when it has ended, and again for goals that it reached
            taken = np.concatenate([obs, actions, rewards[:, None], terminated[:, None], true_obs], 1, dtype=np.float32)
            for path, row in zip(paths, taken):
                path.append(row)
            for i in np.flatnonzero(terminated | truncated):
                episode = Transitions(*torch.from_numpy(np.stack(paths[i])).split(replay.sizes, 1))
                others = [relabel(episode, later, goals) for later in future(len(paths[i]), args.her_k, generator)]
                for rows in (episode, *others):
                    replay.add(*(part.numpy() for part in rows))
                paths[i] = []
        obs, step, episodes = next_obs.copy(), after, episodes + ended

        # update
        if step > args.learning_starts and replay.total:
            for number in range(args.utd_ratio * (step - args.num_envs), args.utd_ratio * step):
                batch = Transitions(*replay.sample(args.batch_size, generator))
                metrics |= update(agent, optimizers, batch, generator, args, number + 1, *losses)

        # evaluate
        due, logs = run.due(step, args.eval_every), run.due(step, args.log_every)
        if due or logs:
            columns = {name: value.item() for name, value in metrics.items()}
            columns["time/steps_per_second"] = run.speed(step)
            if logs:  # an evaluation in between leaves the episodes to the row that is due
                columns, episodes = columns | episode_columns(episodes), []
            if due:
                with run.saving(step, state, columns=columns):
                    columns |= score_agent()
            if due and args.record_dataset:
                snapshots = [*snapshots, snapshot(step, columns, agent.actor)]
            run.log(step, **columns)
        run.end_step(step, state)

    envs.close()
    if args.record_dataset:
        sample = partial(act, scale=1.0, generator=generator)
        record(args, copy.deepcopy(agent.actor), sample, snapshots, replay, make, space)
    curves = {"return": ("return", "eval/return"), "entropy": ("entropy",), "alpha": ("alpha",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train)
