r"""Deep Q-Network (DQN), with Double DQN by a flag.

Mnih et al. 2013, "Playing Atari with Deep Reinforcement Learning" (arXiv 1312.5602), in the form of "Human-level
control through deep reinforcement learning" (Nature 518, 2015): a replay buffer and a target network that stands still
between copies. Van Hasselt, Guez and Silver 2015, "Deep Reinforcement Learning with Double Q-learning" (arXiv
1509.06461): --double.

The network learns the value of every action from a replay buffer of everything it has done. Targets come from a copy of
it that is renewed now and then, so that they do not move with every step. Minimises over minibatches

    L(theta) = mean huber(y - Q(s, a))                                              Nature, equation of algorithm 1
    y        = r + gamma (1 - terminated) max_a' Qbar(s', a')                                                   DQN
    y        = r + gamma (1 - terminated) Qbar(s', argmax_a' Q(s', a'))                          Double DQN: --double

    huber(x)  x^2 / 2 for |x| < 1, |x| - 1/2 beyond: the paper clips the error that multiplies the gradient to [-1, 1].
              --no-huber: x^2
    Qbar      target network: every --target-network-frequency updates Qbar <- (1 - tau) Qbar + tau Q; tau 1 copies
    a         while it explores, uniform with probability epsilon, else argmax_a Q(s, a); epsilon falls linearly
    s'        the true next observation, never that of a reset; truncation does not end the bootstrap
    gamma     --gamma, the discount

A maximum over noisy estimates is too large on average. Double DQN takes the action from one network and its value from
the other, which makes other errors.

Run
    python algos/dqn.py                                                                 CartPole-v1
    python algos/dqn.py --double
    python algos/dqn.py --env-id package.module:Name-v0 --env-kwargs size=5             your own environment
    python algos/dqn.py --evaluate RUN --eval-episodes 100 --capture-video              scores a saved agent
    algos/README.md has CleanRL's settings.

Expect
    CartPole-v1: greedy returns rise from 204 after 10,000 steps to 500, the most there is, at the end (seed 1, 41
    seconds on two cores), and fall again on the way. Where every Q is 0, the mean estimate is 0.49 by DQN and 0.05 by
    Double DQN (10 seeds; benchmarks/effects.py, dqn-bias).

Metrics
    eval/return         greedy actions; eval/return_stochastic: random ones with probability --end-e
    epsilon             probability of a random action
    q                   mean of Q(s, a) over the newest batch; should stay near the discounted return, which CartPole
                        bounds by 1 / (1 - gamma) = 100
    td_error            mean |Q(s, a) - y|

Differences
    - Adam for the paper's RMSProp, and settings for CartPole. The paper's are for Atari, whose wrappers and network are
      not here.
    - The loss is the paper's, also in SB3; CleanRL's dqn.py takes the squared error (--no-huber). SB3 clips gradients
      at norm 10, the paper does not.
    - The target network is renewed by counting updates, as in the paper; CleanRL and SB3 count environment steps.
"""

import copy
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
    make_env,
    make_vector,
    score_saved,
    step_vector,
    try_out,
)
from utils.core import Run, UserError, main, prepare

NAME, TITLE = "dqn", "DQN"


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "CartPole-v1"
    """a Gymnasium environment with discrete actions, or MODULE:NAME of one that MODULE registers"""
    total_timesteps: int = 50_000
    """environment steps, over all environments"""
    num_envs: int = 1
    """environments that are stepped together"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: float = 1e-3
    """learning rate of Adam"""
    gamma: float = 0.99
    """discount"""
    double: bool = False
    """Double DQN: the online network chooses the action that the target network values"""
    huber: bool = True
    """the Nature paper's loss, where rewards are clipped and Q is small; --no-huber: the squared error"""
    target_network_frequency: int = 100
    """updates between renewals of the target network"""
    tau: float = 1.0
    """step of the target network towards the network at a renewal; 1: a copy"""
    start_e: float = 1.0
    """probability of a random action at the start"""
    end_e: float = 0.05
    """and after --exploration-fraction of the run, towards which it falls linearly"""
    exploration_fraction: float = 0.2
    """share of --total-timesteps"""
    train_frequency: int = 4
    """environment steps for each round of updates"""
    gradient_steps: int = 2
    """updates in a round"""
    batch_size: int = 64
    """transitions per update"""
    buffer_size: int = 50_000
    """newest transitions that are kept, on the device"""
    learning_starts: int = 1_000
    """steps with uniformly random actions before the first update"""
    hidden_size: int = 128
    """units of the two hidden layers"""
    compile: bool = False
    """compile the loss: meant for a GPU"""
    log_every: int = 1_000
    """environment steps between rows of metrics"""
    save_every: int = 10_000
    """environment steps between checkpoints"""


class Transitions(NamedTuple):
    """A minibatch of B rows, all float32."""

    obs: Tensor  # (B, D)
    actions: Tensor  # (B, 1), numbers from 0
    rewards: Tensor  # (B, 1)
    terminated: Tensor  # (B, 1), 0 or 1; 0 where an episode was only cut off
    next_obs: Tensor  # (B, D)


def network(size_in: int, hidden_size: int, size_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size_in, hidden_size), nn.ReLU(), nn.Linear(hidden_size, hidden_size), nn.ReLU(),
                         nn.Linear(hidden_size, size_out))  # fmt: skip


class Agent(nn.Module):
    """What is saved: Q and its target network."""

    def __init__(self, obs_size: int, num_actions: int, args: Args):
        super().__init__()
        self.num_actions = num_actions
        self.q = network(obs_size, args.hidden_size, num_actions)
        self.target = copy.deepcopy(self.q).requires_grad_(False)


def q_loss(agent: Agent, batch: Transitions, args: Args) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, Q(s, a) and the target y, (B, 1) each without gradient."""
    with torch.no_grad():
        next_values = agent.target(batch.next_obs)
        chosen = (agent.q(batch.next_obs) if args.double else next_values).argmax(1, keepdim=True)
        target = batch.rewards + args.gamma * (1 - batch.terminated) * next_values.gather(1, chosen)
    q = agent.q(batch.obs).gather(1, batch.actions.long())
    loss = F.huber_loss(q, target) if args.huber else F.mse_loss(q, target)
    return loss, q.detach(), target


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Transitions, number: int, args: Args,
           loss_function: Callable = q_loss) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One step of the network, and of the target network where the update's number says so. Returns Q(s, a) and the
    target y, (B, 1) each."""
    loss, q, target = loss_function(agent, batch, args)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if number % args.target_network_frequency == 0:
        with torch.no_grad():
            torch._foreach_lerp_(list(agent.target.parameters()), list(agent.q.parameters()), args.tau)
    return q, target


def metrics(agent: Agent, q: Tensor, target: Tensor) -> dict[str, float]:
    """Of the newest update, whose gradients are still there."""
    grad_norm = torch.nn.utils.get_total_norm([p.grad for p in agent.q.parameters() if p.grad is not None])
    return {"q": q.mean().item(), "td_error": (q - target).abs().mean().item(), "grad_norm": grad_norm.item()}


def exploration(step: int, args: Args) -> float:
    """The probability of a random action: 1 until learning starts, as in the paper, then on the line from --start-e at
    step 0 to --end-e."""
    if step < args.learning_starts:
        return 1.0
    share = min(1.0, step / max(1.0, args.exploration_fraction * args.total_timesteps))
    return args.start_e + share * (args.end_e - args.start_e)


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    if not isinstance(space, gym.spaces.Discrete):
        raise UserError(f"--env-id {args.env_id} has the action space {space}: {TITLE} needs a Discrete one")
    if args.total_timesteps % args.num_envs:
        raise UserError(f"--total-timesteps {args.total_timesteps} must be a multiple of --num-envs {args.num_envs}")


def act(agent: Agent, obs: np.ndarray, epsilon: np.ndarray | float, generator: torch.Generator) -> np.ndarray:
    """Actions (N, 1), numbers from 0, of observations (N, D): random ones with probability `epsilon`, one for all or
    (N, 1), else those of the largest Q."""
    explore, choice = torch.rand(2, len(obs), 1, generator=generator, device=generator.device).cpu().numpy()
    explores, actions = explore < epsilon, (choice * agent.num_actions).astype(np.int64)
    if not explores.all():  # else nobody asks the network
        with torch.no_grad():
            values = agent.q(torch.from_numpy(obs.astype(np.float32)).to(generator.device))
        actions = np.where(explores, actions, values.argmax(1, keepdim=True).cpu().numpy())
    return actions


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape[0], env.action_space
    check(args, space)
    agent = Agent(obs_size, int(space.n), args).to(device)
    score_agent = partial(evaluate, eval_envs, lambda obs, scale, generator: space.start + act(
        agent, obs, args.end_e * scale.cpu().numpy(), generator)[:, 0], args, device)  # fmt: skip
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    optimizer = torch.optim.Adam(agent.q.parameters(), lr=args.learning_rate, fused=True)
    loss_function = torch.compile(q_loss) if args.compile else q_loss
    generator = torch.Generator(device).manual_seed(args.seed)
    replay = ReplayBuffer(args.buffer_size, (obs_size, 1, 1, 1, obs_size), device)
    run = Run(args, NAME, args.env_id, args.total_timesteps, ("return", "eval/return", "q"))
    envs, obs = make_vector(make, args, run.step)
    parts = dict(agent=agent, optimizer=optimizer, generator=generator, replay=replay)
    run.restore(**parts)
    step, episodes = run.step, run.state.get("episodes", [])
    while step < run.total:
        # collect
        epsilon = exploration(step, args)
        actions = act(agent, obs, epsilon, generator)
        next_obs, true_obs, rewards, terminated, _, ended = step_vector(envs, space.start + actions[:, 0])
        replay.add(obs, actions, rewards[:, None], terminated[:, None], true_obs)
        before, step, obs, episodes = step, step + args.num_envs, next_obs, episodes + ended

        # update
        newest = None
        if step > args.learning_starts:
            rounds = (args.gradient_steps * (n // args.train_frequency) for n in (before, step))
            for number in range(*rounds):
                batch = Transitions(*replay.sample(args.batch_size, generator))
                newest = update(agent, optimizer, batch, number + 1, args, loss_function)

        # evaluate
        due, logs = run.due(step, args.eval_every), run.due(step, args.log_every)
        if due or logs:
            columns = {"epsilon": epsilon, "time/steps_per_second": run.speed(step)}
            columns |= metrics(agent, *newest) if newest else {}
            if logs:  # an evaluation in between leaves the episodes to the row that is due
                columns, episodes = columns | episode_columns(episodes), []
            run.log(step, **columns, **(score_agent() if due else {}))
        run.end_step(step, parts | dict(episodes=episodes))

    envs.close()
    curves = {"return": ("return", "eval/return"), "q": ("q",), "epsilon": ("epsilon",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train, NAME)
