r"""Deep deterministic policy gradient (DDPG).

Lillicrap et al. 2015, "Continuous control with deep reinforcement learning" (arXiv 1509.02971, algorithm 1).

Parent: sac.py. The policy is a function instead of a distribution: noise added to its actions explores, and there is no
entropy in the objective.

The critic learns the value of the policy's own actions from a replay buffer, by bootstrapping from slowly following
copies. The actor follows the critic's slope with respect to the action. On minibatches minimises

    J_Q(theta) = E (Q(s, a) - y)^2,    y = r + gamma (1 - terminated) Qbar(s', mubar(s'))
    J_mu(phi)  = E -Q(s, mu(s))

    mu            the policy: actions in [-1, 1] by a tanh
    mubar, Qbar   target actor and target critic: after each update mubar <- (1 - tau) mubar + tau mu, and so for Q
    a             clip(mu(s) + sigma N(0, 1), -1, 1) where it was collected; sigma: --exploration-noise
    s'            the true next observation, never that of a reset; truncation does not end the bootstrap
    gamma, tau    --gamma, --tau

Run
    python algos/ddpg.py                                                                Pendulum-v1
    python algos/ddpg.py --env-id HalfCheetah-v5 --total-timesteps 1000000 --learning-starts 25000 \
        --learning-rate 3e-4                                                            never run at length
    python algos/ddpg.py --env-id package.module:Name-v0 --env-kwargs size=5            your own environment
    python algos/ddpg.py --evaluate RUN --eval-episodes 100 --capture-video             scores a saved agent

Expect
    Pendulum-v1: -170 (seed 1, 48 seconds on two cores). With the settings of the recorded curve 12 of 30 seeds drop by
    more than 100 between two evaluations. Hopper-v5, 300,000 steps with the authors' settings: 1,304 (3 seeds, 40
    minutes each on one core); td3.py has 1,785: three seeds do not tell the two apart.

Metrics
    eval/return         without noise; eval/return_stochastic: with that of exploration
    q                   mean of Q over the newest batch; should stay near the discounted return
    q_policy            mean of Q(s, mu(s)); far above q, the actor has found errors of the critic
    td_error            mean |Q(s, a) - y|

Differences
    - Noise is normal and independent at each step, as TD3's authors have it. The paper's is an Ornstein-Uhlenbeck
      process. It is drawn in units of [-1, 1], before stretching to the environment's bounds.
    - No batch normalisation, no weight decay of the critic, no small initial weights of the output layers, and the
      action enters the critic's first layer. The command for HalfCheetah takes the settings of TD3's authors
      (sfujim/TD3, OurDDPG.py and main.py, for HalfCheetah-v2), which they call re-tuned; we have not read the paper's.
    - The default is for Pendulum and starts learning earlier than the authors.
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

NAME, TITLE = "ddpg", "DDPG"


@dataclass
class Args(EnvArgs):
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
    learning_rate: float = 1e-3
    """learning rate of Adam, for actor and critic"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.005
    """step of the targets towards actor and critic"""
    exploration_noise: float = 0.1
    """standard deviation of the noise that is added to actions in [-1, 1]"""
    utd_ratio: int = 1
    """updates per environment step"""
    batch_size: int = 256
    """transitions per update"""
    buffer_size: int = 1_000_000
    """newest transitions that are kept, on the device"""
    learning_starts: int = 1_000
    """steps with uniformly random actions before the first update"""
    hidden_size: int = 256
    """units of the two hidden layers of actor and critic"""
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
        self.net = network(obs_size, hidden_size, action_size)

    def forward(self, obs: Tensor) -> Tensor:
        """Actions in [-1, 1]: (B, A)."""
        return self.net(obs).tanh()


class Critic(nn.Module):
    def __init__(self, obs_size: int, action_size: int, hidden_size: int):
        super().__init__()
        self.net = network(obs_size + action_size, hidden_size, 1)

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Q: (B, 1)."""
        return self.net(torch.cat([obs, actions], -1))


class Agent(nn.Module):
    """What is saved: actor, critic and the targets of both."""

    def __init__(self, obs_size: int, action_size: int, hidden_size: int):
        super().__init__()
        self.actor = Actor(obs_size, action_size, hidden_size)
        self.critic = Critic(obs_size, action_size, hidden_size)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)


def critic_loss(agent: Agent, batch: Transitions, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """J_Q, Q and the target y."""
    with torch.no_grad():
        next_q = agent.target_critic(batch.next_obs, agent.target_actor(batch.next_obs))
        target = batch.rewards + gamma * (1 - batch.terminated) * next_q
    q = agent.critic(batch.obs, batch.actions)
    return (q - target).square().mean(), q.detach(), target


def actor_loss(agent: Agent, obs: Tensor) -> Tensor:
    """J_mu, whose gradient is the deterministic policy gradient."""
    return -agent.critic(obs, agent.actor(obs)).mean()


class Optimizers(NamedTuple):
    actor: torch.optim.Optimizer
    critic: torch.optim.Optimizer


def update(agent: Agent, optimizers: Optimizers, batch: Transitions, args: Args,
           critic_loss: Callable = critic_loss, actor_loss: Callable = actor_loss) -> dict[str, Tensor]:  # fmt: skip
    """One step of critic, actor and targets, in this order. Returns metrics, as tensors: reading them would make the
    CPU wait for the device at every update."""
    loss, q, target = critic_loss(agent, batch, args.gamma)
    optimizers.critic.zero_grad(set_to_none=True)
    loss.backward()
    optimizers.critic.step()
    grad_norm = torch.nn.utils.get_total_norm([p.grad for p in agent.critic.parameters()])
    metrics = {"q": q.mean(), "td_error": (q - target).abs().mean(), "grad_norm": grad_norm}

    agent.critic.requires_grad_(False)  # the actor's gradient passes through it; its own would be thrown away
    loss = actor_loss(agent, batch.obs)
    optimizers.actor.zero_grad(set_to_none=True)
    loss.backward()
    optimizers.actor.step()
    agent.critic.requires_grad_(True)
    metrics["q_policy"] = -loss.detach()
    with torch.no_grad():
        for lagging, network in ((agent.target_actor, agent.actor), (agent.target_critic, agent.critic)):
            torch._foreach_lerp_(list(lagging.parameters()), list(network.parameters()), args.tau)
    return metrics


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    if not is_bounded(space):
        wanted = "a Box of floats with finite bounds"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: {TITLE} needs {wanted}")
    if args.total_timesteps % args.num_envs:
        raise UserError(f"--total-timesteps {args.total_timesteps} must be a multiple of --num-envs {args.num_envs}")


@torch.no_grad()
def act(actor: Actor, obs: np.ndarray, scale: Tensor | float, generator: torch.Generator) -> np.ndarray:
    """Actions (N, A) in [-1, 1] of observations (N, D), with normal noise of standard deviation `scale`, clipped."""
    actions = actor(torch.from_numpy(obs.astype(np.float32)).to(generator.device))
    noise = torch.randn(actions.shape, generator=generator, device=generator.device)
    return (actions + scale * noise).clamp(-1, 1).cpu().numpy()


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape[0], env.action_space
    check(args, space)
    action_size = math.prod(space.shape)
    agent = Agent(obs_size, action_size, args.hidden_size).to(device)

    def act_in_evaluation(obs: np.ndarray, scale: Tensor, generator: torch.Generator) -> np.ndarray:
        return to_env(act(agent.actor, obs, scale * args.exploration_noise, generator), space)

    score_agent = partial(evaluate, eval_envs, act_in_evaluation, args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
    optimizers = Optimizers(adam(agent.actor.parameters()), adam(agent.critic.parameters()))
    losses = [torch.compile(loss) if args.compile else loss for loss in (critic_loss, actor_loss)]
    generator = torch.Generator(device).manual_seed(args.seed)
    replay = ReplayBuffer(args.buffer_size, (obs_size, action_size, 1, 1, obs_size), device)
    run = Run(args, NAME, args.env_id, args.total_timesteps, ("return", "eval/return", "q"))
    envs, obs = make_vector(make, args, run.step)
    parts = optimizers._asdict() | dict(agent=agent, generator=generator, replay=replay)
    run.restore(**parts)
    step, episodes, metrics = run.step, run.state.get("episodes", []), {}
    while step < run.total:
        # collect
        if step < args.learning_starts:
            actions = torch.rand(len(obs), action_size, generator=generator, device=device).cpu().numpy() * 2 - 1
        else:
            actions = act(agent.actor, obs, args.exploration_noise, generator)
        next_obs, true_obs, rewards, terminated, _, ended = step_vector(envs, to_env(actions, space))
        replay.add(obs, actions, rewards[:, None], terminated[:, None], true_obs)
        obs, step, episodes = next_obs, step + args.num_envs, episodes + ended

        # update
        if step > args.learning_starts:
            for _ in range(args.utd_ratio * args.num_envs):
                batch = Transitions(*replay.sample(args.batch_size, generator))
                metrics = update(agent, optimizers, batch, args, *losses)

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
    curves = {"return": ("return", "eval/return"), "value": ("q", "q_policy")}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train, NAME)
