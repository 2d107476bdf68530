r"""Categorical DQN (C51).

Bellemare, Dabney and Munos 2017, "A Distributional Perspective on Reinforcement Learning" (arXiv 1707.06887,
algorithm 1).

Parent: dqn.py. The network learns the whole distribution of the return, not only its mean: probabilities of N fixed
values, 51 in the paper.

Actions are still chosen by the mean. What is learned is how often each return comes: a classification, whose gradients
do not grow with the error. Minimises over minibatches

    L(theta) = mean over the batch of - sum_i m_i log p_i(s, a)                          cross-entropy, algorithm 1
    m_i      = sum_j pbar_j(s', a*) max(0, 1 - |clip(r + gamma (1 - terminated) z_j) - z_i| / dz)           equation 7
    Q(s, a)  = sum_i z_i p_i(s, a),    a* = argmax_a' Qbar(s', a')                                by Q with --double

    z_i      the N atoms, from --v-min to --v-max in steps of dz; clip: to these bounds
    p, pbar  softmax of the network and of the target network, which is renewed as in dqn.py
    m        the target: each value of the return is shared by the two atoms beside it, by nearness

Run
    python algos/c51.py                                                                 CartPole-v1
    python algos/c51.py --double
    python algos/c51.py --env-id package.module:Name-v0 --env-kwargs size=5             your own environment
    python algos/c51.py --evaluate RUN --eval-episodes 100 --capture-video              scores a saved agent

Expect
    CartPole-v1: greedy returns rise from 118 after 10,000 steps to 460 at the end (seed 1, 54 seconds on two cores).
    20,000 steps: 203 in the mean of ten evaluations, of dqn.py 175 (30 seeds). That the distribution is learned is
    shown by a test with known probabilities. That this helps, as on Atari in the paper, is not shown here.

Metrics
    q                   mean of Q(s, a) over the newest batch; cannot leave [--v-min, --v-max]: near a bound, widen them
    td_error            mean of |Q(s, a) - mean of the target distribution|
    clipped             share of targets whose mean lies outside [--v-min, --v-max]; 0, else widen them

Differences
    - Adam's epsilon is torch's, 1e-8; the paper's is 0.01 / 32, CleanRL's 0.01 / --batch-size. With the latter, the
      seed that reaches 384 with CleanRL's settings reaches 496.
    - Settings for CartPole: atoms from 0 to 100, the range of its discounted return. The paper's are for Atari.
    - Where a value falls on an atom, equation 7 gives it all of the probability. Codes that take floor and ceiling
      need a case for that, without which the probability is lost; CleanRL has it.
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

NAME, TITLE = "c51", "C51"


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
    num_atoms: int = 51
    """values of the return whose probabilities are learned"""
    v_min: float = 0.0
    """the smallest of them"""
    v_max: float = 100.0
    """the largest; discounted returns outside are clipped"""
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


class QNetwork(nn.Module):
    atoms: Tensor

    def __init__(self, obs_size: int, num_actions: int, args: Args):
        super().__init__()
        self.net = network(obs_size, args.hidden_size, num_actions * args.num_atoms)
        self.register_buffer("atoms", torch.linspace(args.v_min, args.v_max, args.num_atoms))

    def log_probs(self, obs: Tensor) -> Tensor:
        """Of each action's returns, (B, A, N) for N atoms."""
        return self.net(obs).unflatten(1, (-1, len(self.atoms))).log_softmax(-1)

    def forward(self, obs: Tensor) -> Tensor:
        """Q, the mean return (B, A)."""
        return self.log_probs(obs).exp() @ self.atoms


class Agent(nn.Module):
    """What is saved: Q and its target network."""

    def __init__(self, obs_size: int, num_actions: int, args: Args):
        super().__init__()
        self.num_actions = num_actions
        self.q = QNetwork(obs_size, num_actions, args)
        self.target = copy.deepcopy(self.q).requires_grad_(False)


def project(probs: Tensor, values: Tensor, atoms: Tensor) -> Tensor:
    """Probabilities (B, N) of `values` (B, N), as probabilities of the atoms (N): equation 7."""
    values = values.clamp(atoms[0], atoms[-1])
    nearness = (1 - (values[:, :, None] - atoms).abs() / (atoms[1] - atoms[0])).clamp(min=0)
    return (probs[:, :, None] * nearness).sum(1)


def c51_loss(agent: Agent, batch: Transitions, args: Args) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, Q(s, a) and the mean of the target before it is clipped, (B, 1) each without gradient."""
    atoms, row = agent.q.atoms, torch.arange(len(batch.obs), device=batch.obs.device)
    with torch.no_grad():
        next_probs = agent.target.log_probs(batch.next_obs).exp()
        chosen = (agent.q(batch.next_obs) if args.double else next_probs @ atoms).argmax(1)
        values = batch.rewards + args.gamma * (1 - batch.terminated) * atoms
        target = project(next_probs[row, chosen], values, atoms)
        mean = (next_probs[row, chosen] * values).sum(1, keepdim=True)
    log_probs = agent.q.log_probs(batch.obs)[row, batch.actions[:, 0].long()]
    q = log_probs.detach().exp() @ atoms
    return -(target * log_probs).sum(1).mean(), q[:, None], mean


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Transitions, number: int, args: Args,
           loss_function: Callable = c51_loss) -> tuple[Tensor, Tensor]:  # fmt: skip
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
    middle, half_width = agent.q.atoms[[0, -1]].mean(), (agent.q.atoms[-1] - agent.q.atoms[0]) / 2
    clipped = ((target - middle).abs() > 1.001 * half_width).float().mean()
    return {"q": q.mean().item(), "td_error": (q - target).abs().mean().item(), "grad_norm": grad_norm.item(),
            "clipped": clipped.item()}  # fmt: skip


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
    if args.v_min >= args.v_max or args.num_atoms < 2:
        found = f"--num-atoms {args.num_atoms} from --v-min {args.v_min} to --v-max {args.v_max}"
        raise UserError(f"{found}: there must be at least 2, and --v-min below --v-max")
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
    loss_function = torch.compile(c51_loss) if args.compile else c51_loss
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
            # said once
            if columns.get("clipped", 0) > 0.05 >= max((row.get("clipped", 0) for row in run.history), default=0):
                run.print(f"warning: {columns['clipped']:.0%} of the targets lie outside --v-min {args.v_min:g} and "
                          f"--v-max {args.v_max:g}, which must hold all discounted returns")  # fmt: skip
            if logs:  # an evaluation in between leaves the episodes to the row that is due
                columns, episodes = columns | episode_columns(episodes), []
            run.log(step, **columns, **(score_agent() if due else {}))
        run.end_step(step, parts | dict(episodes=episodes))

    envs.close()
    curves = {"return": ("return", "eval/return"), "q": ("q",), "epsilon": ("epsilon",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train, NAME)
