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
    python algos/c51.py --total-timesteps 500000 --learning-rate 2.5e-4 --batch-size 128 --buffer-size 10000 \
        --learning-starts 10000 --train-frequency 10 --gradient-steps 1 --target-network-frequency 50 \
        --exploration-fraction 0.5 --end-e 0.05 --hidden-size 120 --num-atoms 101 --v-min -100 --v-max 100
                                                                                        CleanRL's settings
    python algos/c51.py --env-id package.module:Name-v0 --env-kwargs size=5             your own environment
    python algos/c51.py --evaluate RUN --eval-episodes 100 --capture-video              scores a saved agent

Expect
    CartPole-v1: greedy returns rise from 118 after 10,000 steps to 460 at the end (seed 1, 54 seconds on two cores).
    In 20,000 steps with the settings of the recorded curve the mean of ten evaluations is 203 with a standard
    deviation of 26, of dqn.py 175 with 31 (30 seeds each).
    With CleanRL's settings (8 to 19 minutes on one busy core) the return in the last 50,000 steps is 384, 500 and 500
    (3 seeds), where CleanRL has 481 +- 21.
    That the distribution is learned and not only its mean is shown by a test with known probabilities
    (test_exact_c51.py). That this helps, as the paper finds on Atari, is not shown here.

Metrics
    return, length      of the training episodes that ended since the row before; absent where none did
    eval/return         mean over --eval-episodes, greedy actions; eval/return_stochastic: random ones with probability
                        --end-e
    epsilon             probability of a random action
    Of the newest update:
    q                   mean of Q(s, a) over the batch; cannot leave [--v-min, --v-max]: near a bound, widen them
    td_error            mean of |Q(s, a) - mean of the target distribution|
    grad_norm           of the loss

Differences
    - Adam's epsilon is torch's, 1e-8; the paper's is 0.01 / 32, CleanRL's 0.01 / --batch-size. With the latter, the
      seed that reaches 384 with CleanRL's settings reaches 496.
    - Settings for CartPole: atoms from 0 to 100, the range of its discounted return. The paper's are for Atari, from
      -10 to 10 with clipped rewards; its wrappers and network are not here. CleanRL's network for CartPole has layers
      of 120 and 84.
    - Where a value falls on an atom, equation 7 gives it all of the probability. Codes that take floor and ceiling
      need a case for that, without which the probability is lost; CleanRL has it.
    - The target network is renewed by counting updates, as in dqn.py; CleanRL counts environment steps.
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
from utils.cli import main, prepare
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
from utils.replay import ReplayBuffer
from utils.rollouts import evaluate, score_saved
from utils.run import Run, crosses

NAME, TITLE = "c51", "C51"


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, threads, output_dir, keep, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "CartPole-v1"
    """a Gymnasium environment with discrete actions, or MODULE:NAME of one that MODULE registers"""
    total_timesteps: PositiveInt = 50_000
    """environment steps, over all environments"""
    num_envs: PositiveInt = 1
    """environments that are stepped together"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: PositiveFloat = 1e-3
    """learning rate of Adam"""
    gamma: UnitInterval = 0.99
    """discount"""
    double: bool = False
    """Double DQN: the online network chooses the action that the target network values"""
    target_network_frequency: PositiveInt = 100
    """updates between renewals of the target network"""
    tau: UnitInterval = 1.0
    """step of the target network towards the network at a renewal; 1: a copy"""
    start_e: UnitInterval = 1.0
    """probability of a random action at the start"""
    end_e: UnitInterval = 0.05
    """and after --exploration-fraction of the run, towards which it falls linearly"""
    exploration_fraction: UnitInterval = 0.2
    """share of --total-timesteps"""
    train_frequency: PositiveInt = 4
    """environment steps between rounds of updates"""
    gradient_steps: PositiveInt = 2
    """updates in a round"""
    batch_size: PositiveInt = 64
    """transitions per update"""
    buffer_size: PositiveInt = 50_000
    """newest transitions that are kept, on the device"""
    learning_starts: NonNegativeInt = 1_000
    """steps with uniformly random actions before the first update"""
    num_atoms: PositiveInt = 51
    """values of the return whose probabilities are learned"""
    v_min: float = 0.0
    """the smallest of them"""
    v_max: float = 100.0
    """the largest; discounted returns outside are clipped"""
    hidden_size: PositiveInt = 128
    """units of the two hidden layers"""
    compile: bool = False
    """compile the loss: meant for a GPU"""
    log_every: PositiveInt = 1_000
    """environment steps between rows of metrics"""
    save_every: PositiveInt = 10_000
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
    """The loss, Q(s, a) and the mean of the target, (B, 1) each without gradient."""
    atoms, row = agent.q.atoms, torch.arange(len(batch.obs), device=batch.obs.device)
    with torch.no_grad():
        next_probs = agent.target.log_probs(batch.next_obs).exp()
        chosen = (agent.q(batch.next_obs) if args.double else next_probs @ atoms).argmax(1)
        values = batch.rewards + args.gamma * (1 - batch.terminated) * atoms
        target = project(next_probs[row, chosen], values, atoms)
    log_probs = agent.q.log_probs(batch.obs)[row, batch.actions[:, 0].long()]
    q = log_probs.detach().exp() @ atoms
    return -(target * log_probs).sum(1).mean(), q[:, None], (target @ atoms)[:, None]


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Transitions, count: int, args: Args,
           loss_function: Callable = c51_loss) -> dict[str, Tensor]:  # fmt: skip
    """One step of the network, and of the target network where `count`, the number of updates with this one, says so.
    Returns metrics, as tensors: reading them would make the CPU wait for the device at every update."""
    loss, q, target = loss_function(agent, batch, args)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if count % args.target_network_frequency == 0:
        with torch.no_grad():
            torch._foreach_lerp_(list(agent.target.parameters()), list(agent.q.parameters()), args.tau)
    return {"q": q.mean(), "td_error": (q - target).abs().mean(),
            "grad_norm": torch.nn.utils.get_total_norm([p.grad for p in agent.q.parameters()])}  # fmt: skip


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


@torch.no_grad()
def act(agent: Agent, obs: np.ndarray, epsilon: Tensor | float, generator: torch.Generator) -> np.ndarray:
    """Actions (N, 1), numbers from 0, of observations (N, D): random ones with probability `epsilon`, one for all or
    (N, 1), else those of the largest Q."""
    random = torch.randint(agent.num_actions, (len(obs), 1), generator=generator, device=generator.device)
    explores = torch.rand(len(obs), 1, generator=generator, device=generator.device) < epsilon
    if explores.all():  # then nobody asks the network
        return random.cpu().numpy()
    values = agent.q(torch.from_numpy(obs.astype(np.float32)).to(generator.device))
    return torch.where(explores, random, values.argmax(1, keepdim=True)).cpu().numpy()


def train(args: Args) -> list[dict]:
    device = prepare(args)
    make, obs_size, space = open_env(args)
    check(args, space)
    agent = Agent(obs_size, int(space.n), args).to(device)
    score_agent = partial(evaluate, make, lambda obs, scale, generator: space.start + act(
        agent, obs, args.end_e * scale, generator)[:, 0], args.eval_episodes, args.seed, device)  # fmt: skip
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    optimizer = torch.optim.Adam(agent.q.parameters(), lr=args.learning_rate, fused=True)
    loss_function = torch.compile(c51_loss) if args.compile else c51_loss
    generator = torch.Generator(device).manual_seed(args.seed)
    replay = ReplayBuffer(args.buffer_size, (obs_size, 1, 1, 1, obs_size), device)
    run = Run(args, NAME, args.env_id, args.total_timesteps, ("return", "eval/return", "q"), "total_timesteps",
              schedule_depends_on_budget=True)  # fmt: skip
    envs = make_vector(make, args.num_envs, args.seed, args.vector)

    def state(drawn: Tensor | None = None) -> dict:
        """If a step fails, `drawn` is the generator's state before it, so a resumed run repeats the step. The
        environment's draws from global generators are not repeated: copying those at each step would cost time."""
        return {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "updates": updates,
                "generator": generator.get_state() if drawn is None else drawn, "envs": envs.log.state(obs),
                "metrics": metrics, "episodes": episodes, "replay": replay.save(run.dir / "replay", args.keep)
                }  # fmt: skip

    step, updates, episodes, metrics = run.step, 0, [], {}
    if run.state is not None:
        updates, metrics, episodes = (run.state[name] for name in ("updates", "metrics", "episodes"))
        replay.load(run.dir / "replay", run.state["replay"])
        obs = restore_vector(envs, run.state["envs"])
    else:
        obs = reset_vector(envs)
    run.restore(agent=agent, optimizer=optimizer, generator=generator)
    while step < run.total:
        # collect
        before, after, epsilon = step, step + args.num_envs, exploration(step, args)
        with run.saving(step, partial(state, generator.get_state())):
            actions = act(agent, obs, epsilon, generator)
            next_obs, true_obs, rewards, terminated, _, ended = step_vector(envs, space.start + actions[:, 0], after)
        replay.add(obs, actions, rewards[:, None], terminated[:, None], true_obs)
        obs, step, episodes = next_obs.copy(), after, episodes + ended

        # update
        if step > args.learning_starts and crosses(step, before, args.train_frequency):
            for _ in range(args.gradient_steps):
                batch, updates = Transitions(*replay.sample(args.batch_size, generator)), updates + 1
                metrics = update(agent, optimizer, batch, updates, args, loss_function)

        # evaluate
        due, logs = run.due(step, args.eval_every), run.due(step, args.log_every)
        if due or logs:
            columns = {name: value.item() for name, value in metrics.items()}
            columns |= {"epsilon": epsilon, "time/steps_per_second": run.speed(step)}
            if logs:  # an evaluation in between leaves the episodes to the row that is due
                columns, episodes = columns | episode_columns(episodes), []
            if due:
                with run.saving(step, state, columns=columns):
                    columns |= score_agent()
            run.log(step, **columns)
        run.end_step(step, state)

    envs.close()
    curves = {"return": ("return", "eval/return"), "q": ("q",), "epsilon": ("epsilon",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train)
