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

Run
    python algos/sac.py                                                               Pendulum-v1
    python algos/sac.py --env-id HalfCheetah-v5 --total-timesteps 1000000 --learning-starts 10000 --eval-every 20000
                                                                                      the paper's recipe for MuJoCo
    python algos/sac.py --env-id package.module:Name-v0 --env-kwargs size=5           your own environment
    python algos/sac.py --evaluate RUN --eval-episodes 100 --capture-video            scores a saved agent
    redq.py learns from fewer steps: REDQ's and DroQ's ensembles, with many updates for each step.

Expect
    Pendulum-v1: from -1,608 in training to -172 with the likeliest actions (seed 1), in 1.5 minutes on 2 CPU cores.
    Hopper-v5, 20,000 steps: 264 (median of 8 seeds) in 4 minutes; 1M steps: 3,285 (3 seeds) in 3 hours on one core.

Metrics
    return, length      of the training episodes that ended since the row before; absent where none did
    eval/return         likeliest action; eval/return_stochastic: sampled actions
    q                   mean of Q_1 over the newest batch; should stay near the discounted return
    td_error            mean |Q_1(s, a) - y|
    entropy             mean of -log pi in nats of the [-1, 1] box; comes down to the target H
    alpha               temperature; settles

Differences
    - Densities are of actions in [-1, 1], before stretching to the environment's bounds, so the target entropy means
      the same in every environment, as in the authors' code and SB3. CleanRL's density includes the bounds.
    - One actor update for every critic update, as in the paper; CleanRL makes two every second step.
    - The default is for Pendulum and starts learning earlier than the paper.
"""

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.control import (
    EnvArgs,
    ReplayBuffer,
    episode_columns,
    evaluate,
    is_bounded,
    make_env,
    make_vector,
    score_saved,
    step_vector,
    to_env,
    try_out,
)
from utils.core import Run, UserError, main, prepare

NAME, TITLE = "sac", "SAC"
LOG_STD_BOUNDS = (-20.0, 2.0)  # the authors' code clamps to them; CleanRL squashes into [-5, 2] by another tanh


@dataclass
class Args(EnvArgs):
    # flags of earlier versions: the script that has them now, and their defaults then
    moved = {"utd_ratio": ("redq.py", 1), "policy_frequency": ("redq.py", 1), "num_critics": ("redq.py", 2),
             "subset_size": ("redq.py", None), "actor_q": ("redq.py", "min"), "layer_norm": ("redq.py", False),
             "dropout": ("redq.py", 0.0)}  # fmt: skip
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "Pendulum-v1"
    """a Gymnasium environment with bounded continuous actions, or MODULE:NAME of one that MODULE registers"""
    total_timesteps: int = 10_000
    """environment steps, over all environments"""
    num_envs: int = 1
    """environments that are stepped together"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: float = 3e-4
    """learning rate of Adam, for actor, critics and temperature"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.005
    """step of the target critics towards the critics"""
    alpha: float | None = None
    """a fixed temperature; None: learned"""
    target_entropy: float | None = None
    """target entropy in nats; None: -(action size)"""
    batch_size: int = 256
    """transitions per update"""
    buffer_size: int = 1_000_000
    """newest transitions that are kept, on the device"""
    learning_starts: int = 1_000
    """steps with uniformly random actions before the first update"""
    hidden_size: int = 256
    """units of the two hidden layers of actor and critics"""
    compile: bool = False
    """compile the losses: meant for a GPU"""
    log_every: int = 500
    """environment steps between rows of metrics"""
    save_every: int = 10_000
    """environment steps between checkpoints"""


class Transitions(NamedTuple):
    """A minibatch of B rows, all float32."""

    obs: Tensor  # (B, D)
    actions: Tensor  # (B, A) in [-1, 1]
    rewards: Tensor  # (B, 1)
    terminated: Tensor  # (B, 1), 0 or 1; 0 where an episode was only cut off
    next_obs: Tensor  # (B, D)


def network(size_in: int, hidden_size: int, size_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in (size_in, hidden_size):
        layers += [nn.Linear(size, hidden_size), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden_size, size_out))


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
    """The twins: q1 and q2."""

    def __init__(self, obs_size: int, action_size: int, hidden_size: int):
        super().__init__({name: network(obs_size + action_size, hidden_size, 1) for name in ("q1", "q2")})

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Q_1 and Q_2: (2, B, 1)."""
        both = torch.cat([obs, actions], -1)
        return torch.stack([q(both) for q in self.values()])


class Agent(nn.Module):
    """What is saved: actor, critics, target critics and log alpha."""

    def __init__(self, obs_size: int, action_size: int, hidden_size: int, alpha: float | None):
        super().__init__()
        self.actor = Actor(obs_size, action_size, hidden_size)
        self.critics = Critics(obs_size, action_size, hidden_size)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(1.0 if alpha is None else alpha).log())


def critic_loss(agent: Agent, batch: Transitions, noise: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of both critics' losses (equation 5 with a sample of the soft value), Q_1 and the target y. noise (B, A)."""
    with torch.no_grad():
        next_actions, next_logps = agent.actor(batch.next_obs, noise)
        next_q = agent.targets(batch.next_obs, next_actions)
        soft_value = next_q.amin(0) - agent.log_alpha.exp() * next_logps
        target = batch.rewards + gamma * (1 - batch.terminated) * soft_value
    q = agent.critics(batch.obs, batch.actions)
    return 0.5 * (q - target).square().mean((1, 2)).sum(), q[0].detach(), target


def actor_loss(agent: Agent, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 9, and the log-densities (B, 1) of the actions without gradient. noise (B, A)."""
    actions, logps = agent.actor(obs, noise)
    q = agent.critics(obs, actions).amin(0)
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
           critic_loss: Callable = critic_loss, actor_loss: Callable = actor_loss) -> dict[str, Tensor]:  # fmt: skip
    """One step of critics, actor, temperature and target critics, in this order. Returns metrics, as tensors: reading
    them would make the CPU wait for the device at every update."""
    noise, next_noise = torch.randn(2, *batch.actions.shape, generator=generator, device=batch.obs.device)
    loss, q, target = critic_loss(agent, batch, next_noise, args.gamma)
    optimizers.critics.zero_grad(set_to_none=True)
    loss.backward()
    optimizers.critics.step()
    grad_norm = torch.nn.utils.get_total_norm([p.grad for p in agent.critics.parameters()])
    metrics = {"q": q.mean(), "td_error": (q - target).abs().mean(), "grad_norm": grad_norm}

    agent.critics.requires_grad_(False)  # the actor's gradient passes through them; theirs would be thrown away
    loss, logps = actor_loss(agent, batch.obs, noise)
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
        raise UserError(f"--env-id {args.env_id} has the action space {space}: {TITLE} needs {wanted}")
    if args.total_timesteps % args.num_envs:
        raise UserError(f"--total-timesteps {args.total_timesteps} must be a multiple of --num-envs {args.num_envs}")


@torch.no_grad()
def act(actor: Actor, space: gym.spaces.Box, obs: np.ndarray, scale: Tensor | float,
        generator: torch.Generator) -> np.ndarray:  # fmt: skip
    """Actions (N, A) in [-1, 1] of observations (N, D); `scale` 0: the likeliest, 1: samples."""
    noise = torch.randn(len(obs), math.prod(space.shape), generator=generator, device=generator.device)
    return actor(torch.from_numpy(obs.astype(np.float32)).to(generator.device), noise * scale)[0].cpu().numpy()


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape[0], env.action_space
    check(args, space)
    action_size = math.prod(space.shape)
    if args.target_entropy is None:
        args.target_entropy = -float(action_size)
    agent = Agent(obs_size, action_size, args.hidden_size, args.alpha).to(device)
    score_agent = partial(evaluate, eval_envs, lambda *x: to_env(act(agent.actor, space, *x), space), args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
    optimizers = Optimizers(adam(agent.actor.parameters()), adam(agent.critics.parameters()),
                            adam([agent.log_alpha]) if args.alpha is None else None)  # fmt: skip
    losses = [torch.compile(loss) if args.compile else loss for loss in (critic_loss, actor_loss)]
    generator = torch.Generator(device).manual_seed(args.seed)
    replay = ReplayBuffer(args.buffer_size, (obs_size, action_size, 1, 1, obs_size), device)
    run = Run(args, NAME, args.env_id, args.total_timesteps, ("return", "eval/return", "alpha"))
    envs, obs = make_vector(make, args, run.step)
    parts = {name: optimizer for name, optimizer in optimizers._asdict().items() if optimizer}
    parts |= dict(agent=agent, generator=generator, replay=replay)
    run.restore(**parts)
    step, episodes, metrics = run.step, run.state.get("episodes", []), {}
    while step < run.total:
        # collect
        if step < args.learning_starts:
            actions = torch.rand(len(obs), action_size, generator=generator, device=device).cpu().numpy() * 2 - 1
        else:
            actions = act(agent.actor, space, obs, 1.0, generator)
        next_obs, true_obs, rewards, terminated, _, ended = step_vector(envs, to_env(actions, space))
        replay.add(obs, actions, rewards[:, None], terminated[:, None], true_obs)
        obs, step, episodes = next_obs, step + args.num_envs, episodes + ended

        # update
        if step > args.learning_starts:
            for _ in range(args.num_envs):
                batch = Transitions(*replay.sample(args.batch_size, generator))
                metrics = update(agent, optimizers, batch, generator, args, *losses)

        # evaluate
        due, logs = run.due(step, args.eval_every), run.due(step, args.log_every)
        if due or logs:
            columns = {name: value.item() for name, value in metrics.items()}
            columns["time/steps_per_second"] = run.speed(step)
            if logs:  # an evaluation in between leaves the episodes to the row that is due
                columns, episodes = columns | episode_columns(episodes), []
            run.log(step, **columns, **(score_agent() if due else {}))
        run.end_step(step, parts | dict(episodes=episodes))

    envs.close()
    curves = {"return": ("return", "eval/return"), "entropy": ("entropy",), "alpha": ("alpha",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train, NAME)
