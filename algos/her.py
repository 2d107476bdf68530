r"""Hindsight Experience Replay (HER), with DQN.

Andrychowicz et al. 2017, "Hindsight Experience Replay" (arXiv 1707.01495, algorithm 1), strategy "future".

Parent: dqn.py. The network is told a goal, and each step is stored again with goals that its episode reached later.

Where a reward comes only at the goal, and a goal is never met by chance, there is nothing to learn from. But an episode
that misses its goal has reached other states: it is learned from as if these had been its goals.

    Q(s || g, a)   the value of an action on the way to goal g, learned by the loss of dqn.py
    stored         at the end of an episode of T steps, for each step t: (s_t || g, a_t, r_t, s_t+1 || g), and --her-k
                   times (s_t || g', a_t, r(s_t+1, g'), s_t+1 || g')
    g'             what step j achieved, j uniform in t .. T - 1: with j = t the step itself reaches it
    r(s, g)        the environment's compute_reward; compute_terminated says whether reaching g' would have ended it

The environment observes a dictionary of observation, achieved_goal and desired_goal, as in Gymnasium-Robotics. In
BitFlip-v0 of n bits action i flips bit i, and the goal is a pattern of bits: one of 2^n.

Run
    python algos/her.py                                                                 BitFlip-v0, 12 bits
    python algos/her.py --her-k 0                                                       without hindsight: DQN
    python algos/her.py --env-kwargs n=8
    python algos/her.py --env-id package.module:Name-v0 --env-kwargs size=5             your own environment
    python algos/her.py --evaluate RUN --eval-episodes 100                              scores a saved agent

Expect
    BitFlip-v0, 12 bits, 6,000 steps: HER reaches 99 to 100 of 100 goals, dqn.py and HER without hindsight at most one
    (10 seeds; benchmarks/effects.py, her-bitflip).

Metrics
    return, length      of the training episodes that ended since the row before; absent where none did
    eval/success        share of --eval-episodes that reach their goal by greedy actions
    eval/return         their mean return; eval/return_stochastic: random actions with probability --end-e
    epsilon             probability of a random action
    Of the newest update:
    q                   mean of Q(s || g, a) over the batch; with rewards of -1 and 0 between -1 / (1 - gamma) and 0
    td_error            mean |Q(s || g, a) - y|
    grad_norm           of the loss

Differences
    - The paper's BitFlip experiment uses DQN, too; the optimiser, exploration and sizes here are those of dqn.py.
    - Reaching a goal ends the episode, and an episode that would have ended is stored as one. SB3's HerReplayBuffer
      keeps the `done` of the original goal, so that a step that reaches g' bootstraps.
    - Relabelled steps are stored with their goals, as in the paper's algorithm. OpenAI Baselines and SB3 draw goals
      with the minibatch. A single row has the same distribution, but there a step gets a new goal whenever it is drawn.
      SB3 also fixes the share of relabelled rows in each minibatch.
    - An episode is stored when it has ended. Give an environment without an end a limit, such as --env-kwargs
      max_episode_steps=200.
    - The paper clips targets to [-1 / (1 - gamma), 0] in its experiments with DDPG. Nothing is clipped here.
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
from utils.goals import find_goals, future, relabel
from utils.replay import ReplayBuffer
from utils.rollouts import evaluate, score_saved
from utils.run import Run, crosses

NAME, TITLE = "her", "HER"


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, threads, output_dir, keep, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "BitFlip-v0"
    """an environment with discrete actions and goals (see above), or MODULE:NAME of one that MODULE registers"""
    total_timesteps: PositiveInt = 10_000
    """environment steps, over all environments"""
    num_envs: PositiveInt = 1
    """environments that are stepped together"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: PositiveFloat = 1e-3
    """learning rate of Adam"""
    gamma: UnitInterval = 0.98
    """discount"""
    double: bool = False
    """Double DQN: the online network chooses the action that the target network values"""
    her_k: NonNegativeInt = 4
    """further goals for each step, reached later in its episode; 0: none, which is DQN"""
    huber: bool = True
    """the Nature paper's loss, where rewards are clipped and Q is small; --no-huber: the squared error"""
    target_network_frequency: PositiveInt = 100
    """updates between renewals of the target network"""
    tau: UnitInterval = 1.0
    """step of the target network towards the network at a renewal; 1: a copy"""
    start_e: UnitInterval = 1.0
    """probability of a random action at the start"""
    end_e: UnitInterval = 0.1
    """and after --exploration-fraction of the run, towards which it falls linearly"""
    exploration_fraction: UnitInterval = 0.2
    """share of --total-timesteps"""
    train_frequency: PositiveInt = 4
    """environment steps between rounds of updates"""
    gradient_steps: PositiveInt = 2
    """updates in a round"""
    batch_size: PositiveInt = 64
    """transitions per update"""
    buffer_size: PositiveInt = 100_000
    """newest transitions that are kept, on the device, those with further goals included"""
    learning_starts: NonNegativeInt = 1_000
    """steps with uniformly random actions before the first update"""
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

    obs: Tensor  # (B, D), with achieved and desired goal
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


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Transitions, count: int, args: Args,
           loss_function: Callable = q_loss) -> dict[str, Tensor]:  # fmt: skip
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
    goals = find_goals(args.env_id, make, TITLE)
    agent = Agent(obs_size, int(space.n), args).to(device)
    score_agent = partial(evaluate, make, lambda obs, scale, generator: space.start + act(
        agent, obs, args.end_e * scale, generator)[:, 0], args.eval_episodes, args.seed, device)  # fmt: skip
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    optimizer = torch.optim.Adam(agent.q.parameters(), lr=args.learning_rate, fused=True)
    loss_function = torch.compile(q_loss) if args.compile else q_loss
    generator = torch.Generator(device).manual_seed(args.seed)
    replay = ReplayBuffer(args.buffer_size, (obs_size, 1, 1, 1, obs_size), device)
    run = Run(args, NAME, args.env_id, args.total_timesteps, ("return", "eval/success", "q"), "total_timesteps",
              schedule_depends_on_budget=True)  # fmt: skip
    envs = make_vector(make, args.num_envs, args.seed, args.vector)

    def state(drawn: Tensor | None = None) -> dict:
        """If a step fails, `drawn` is the generator's state before it, so a resumed run repeats the step. The
        environment's draws from global generators are not repeated: copying those at each step would cost time."""
        return {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "updates": updates,
                "generator": generator.get_state() if drawn is None else drawn, "envs": envs.log.state(obs),
                "metrics": metrics, "episodes": episodes, "paths": [torch.tensor(np.array(path)) for path in paths],
                "replay": replay.save(run.dir / "replay", args.keep)}  # fmt: skip

    paths: list[list[np.ndarray]] = [[] for _ in range(args.num_envs)]  # the rows of episodes that have not ended yet
    step, updates, episodes, metrics = run.step, 0, [], {}
    if run.state is not None:
        updates, metrics, episodes = (run.state[name] for name in ("updates", "metrics", "episodes"))
        replay.load(run.dir / "replay", run.state["replay"])
        obs = restore_vector(envs, run.state["envs"])
        paths = [list(rows.numpy()) if envs.log.length[i] else [] for i, rows in enumerate(run.state["paths"])]
    else:
        obs = reset_vector(envs)
    run.restore(agent=agent, optimizer=optimizer, generator=generator)
    while step < run.total:
        # collect
        before, after, epsilon = step, step + args.num_envs, exploration(step, args)
        with run.saving(step, partial(state, generator.get_state())):
            actions = act(agent, obs, epsilon, generator)
            next_obs, true_obs, rewards, terminated, truncated, ended = step_vector(
                envs, space.start + actions[:, 0], after)  # fmt: skip
        taken = np.concatenate([obs, actions, rewards[:, None], terminated[:, None], true_obs], 1, dtype=np.float32)
        for path, row in zip(paths, taken):
            path.append(row)

        # hindsight
        for i in np.flatnonzero(terminated | truncated):
            episode = Transitions(*torch.from_numpy(np.stack(paths[i])).split(replay.sizes, 1))
            others = [relabel(episode, later, goals) for later in future(len(paths[i]), args.her_k, generator)]
            for rows in (episode, *others):
                replay.add(*(part.numpy() for part in rows))
            paths[i] = []
        obs, step, episodes = next_obs.copy(), after, episodes + ended

        # update
        if step > args.learning_starts and replay.total and crosses(step, before, args.train_frequency):
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
    curves = {"success": ("eval/success",), "return": ("return", "eval/return"), "q": ("q",), "epsilon": ("epsilon",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train)
