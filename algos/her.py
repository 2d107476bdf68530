r"""Hindsight Experience Replay (HER), with DQN.

Andrychowicz et al. 2017, "Hindsight Experience Replay" (arXiv 1707.01495, algorithm 1), strategy "future".

Parent: dqn.py. The network is told a goal, and each step is stored again with goals that its episode reached later.

Where a reward comes only at the goal, and a goal is never met by chance, there is nothing to learn from. But an episode
that misses its goal has reached other states: it is learned from as if these had been its goals.

    Q(s || g, a)   the value of an action on the way to goal g, learned by the loss of dqn.py
    stored         at the end of an episode of T steps, for each step t: (s_t || g, a_t, r_t, s_t+1 || g), and --her-k
                   times (s_t || g', a_t, r(s_t+1, g'), s_t+1 || g')
    g'             what step j achieved, j uniform in t .. T - 1: with j = t the step itself reaches it
    r(s, g)        the environment's compute_reward; its compute_terminated, if any, says whether g' would have ended it

The environment observes a dictionary of observation, achieved_goal and desired_goal, as in Gymnasium-Robotics. In
BitFlip-v0 of n bits action i flips bit i, and the goal is a pattern of bits: one of 2^n.

Run
    python algos/her.py                                                                 BitFlip-v0, 12 bits
    python algos/her.py --her-k 0                                                       without hindsight: DQN
    python algos/her.py --env-id package.module:Name-v0 --env-kwargs size=5             your own environment
    python algos/her.py --evaluate RUN --eval-episodes 100                              scores a saved agent

Expect
    BitFlip-v0, 12 bits, 6,000 steps: HER reaches 99 to 100 of 100 goals, dqn.py and HER without hindsight at most one
    (10 seeds; benchmarks/effects.py, her-bitflip). 10,000 steps take 12 seconds.

Metrics
    eval/success        share of --eval-episodes that reach their goal by greedy actions
    q                   mean of Q(s || g, a) over the newest batch; with rewards of -1 and 0 between -1 / (1 - gamma)
                        and 0

Differences
    - Reaching a goal ends the episode, and an episode that would have ended is stored as one. SB3's HerReplayBuffer
      keeps the `done` of the original goal, so that a step that reaches g' bootstraps.
    - Relabelled steps are stored with their goals, as in the paper's algorithm. OpenAI Baselines and SB3 draw goals
      with the minibatch, and SB3 fixes the share of relabelled rows in each minibatch.
    - An episode is stored when it has ended. Give an environment without an end a limit, such as --env-kwargs
      max_episode_steps=200. A resumed run forgets the steps of episodes that had not ended.
"""

import copy
import sys
from collections.abc import Callable, Sequence
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

NAME, TITLE = "her", "HER"


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "BitFlip-v0"
    """an environment with discrete actions and goals (see above), or MODULE:NAME of one that MODULE registers"""
    total_timesteps: int = 10_000
    """environment steps, over all environments"""
    num_envs: int = 1
    """environments that are stepped together"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: float = 1e-3
    """learning rate of Adam"""
    gamma: float = 0.98
    """discount"""
    double: bool = False
    """Double DQN: the online network chooses the action that the target network values"""
    her_k: int = 4
    """further goals for each step, reached later in its episode; 0: none, which is DQN"""
    huber: bool = True
    """the Nature paper's loss, where rewards are clipped and Q is small; --no-huber: the squared error"""
    target_network_frequency: int = 100
    """updates between renewals of the target network"""
    tau: float = 1.0
    """step of the target network towards the network at a renewal; 1: a copy"""
    start_e: float = 1.0
    """probability of a random action at the start"""
    end_e: float = 0.1
    """and after --exploration-fraction of the run, towards which it falls linearly"""
    exploration_fraction: float = 0.2
    """share of --total-timesteps"""
    train_frequency: int = 4
    """environment steps for each round of updates"""
    gradient_steps: int = 2
    """updates in a round"""
    batch_size: int = 64
    """transitions per update"""
    buffer_size: int = 100_000
    """newest transitions that are kept, on the device, those with further goals included"""
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


class BitFlip(gym.Env):
    """Action i flips bit i of n; the goal is another pattern of bits (Andrychowicz et al. 2017, section 3.1). The
    reward is -1, and 0 where the goal is reached, which ends the episode; n steps cut it off. At Hamming distance h
    from the goal the best return is 1 - h, undiscounted.
    """

    def __init__(self, n: int = 12):
        bits, self.n = gym.spaces.Box(0, 1, (n,)), n
        names = "achieved_goal", "desired_goal", "observation"
        self.observation_space, self.action_space = gym.spaces.Dict(dict.fromkeys(names, bits)), gym.spaces.Discrete(n)

    def observe(self) -> dict[str, np.ndarray]:
        return {"achieved_goal": self.bits.copy(), "desired_goal": self.goal, "observation": self.bits.copy()}

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info) -> np.ndarray:
        """Of goals (..., n), as Gymnasium-Robotics names it."""
        return self.compute_terminated(achieved_goal, desired_goal, info) - 1.0

    def compute_terminated(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info) -> np.ndarray:
        return (achieved_goal == desired_goal).all(-1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.goal = 0, self.np_random.integers(2, size=self.n).astype(np.float32)
        self.bits = self.goal.copy()
        while (self.bits == self.goal).all():
            self.bits = self.np_random.integers(2, size=self.n).astype(np.float32)
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        self.bits[action] = 1 - self.bits[action]
        reward = float(self.compute_reward(self.bits, self.goal, {}))
        return self.observe(), reward, reward == 0, self.time == self.n, {"is_success": reward == 0}


gym.register("BitFlip-v0", BitFlip)


class Transitions(NamedTuple):
    """A minibatch of B rows, all float32."""

    obs: Tensor  # (B, D), with achieved and desired goal
    actions: Tensor  # (B, 1), numbers from 0
    rewards: Tensor  # (B, 1)
    terminated: Tensor  # (B, 1), 0 or 1; 0 where an episode was only cut off
    next_obs: Tensor  # (B, D)


class Goals(NamedTuple):
    """Where flattened observations hold goals of G numbers, and what the environment says of pairs of them."""

    achieved: slice
    desired: slice
    reward: Callable  # achieved (G,), desired (G,), the step's info -> number
    terminated: Callable | None  # the same -> bool; None: the environment does not say


def find_goals(env_id: str, make: Callable) -> Goals:
    """Raises UserError where the environment has none. Warns where a wrapper changes rewards."""
    wrapped = make()
    env = wrapped.unwrapped
    parts = getattr(env.observation_space, "spaces", {})
    if set(parts) != {"achieved_goal", "desired_goal", "observation"} or not hasattr(env, "compute_reward"):
        needed = "a dictionary of observation, achieved_goal and desired_goal, and compute_reward"
        raise UserError(f"--env-id {env_id} has no goals: {TITLE} needs {needed}")
    ends = np.cumsum([gym.spaces.flatdim(part) for part in parts.values()])
    places = {name: slice(end - gym.spaces.flatdim(part), end) for (name, part), end in zip(parts.items(), ends)}
    if len(shape := parts["desired_goal"].shape) != 1:
        raise UserError(f"--env-id {env_id} has goals of shape {shape}: {TITLE} needs vectors, so flatten them")
    wrapped.reset(seed=0)
    obs, reward, _, _, info = wrapped.step(wrapped.action_space.sample())
    computed = env.compute_reward(obs[places["achieved_goal"]], obs[places["desired_goal"]], info)
    if not np.allclose(reward, computed, rtol=1e-3, atol=1e-3):
        wrong = f"warning: --env-id {env_id} gave the reward {reward} where compute_reward says {np.ravel(computed)[0]}"
        print(f"{wrong}: played and relabelled steps would have rewards of two kinds", file=sys.stderr)
    return Goals(places["achieved_goal"], places["desired_goal"], env.compute_reward,
                 getattr(env, "compute_terminated", None))  # fmt: skip


def future(length: int, k: int, generator: torch.Generator) -> Tensor:
    """For each step t of an episode k steps j of t .. length - 1, uniformly: (k, length), on the CPU."""
    drawn = torch.rand(k, length, dtype=torch.float64, generator=generator, device=generator.device).cpu()
    return torch.arange(length) + (drawn * torch.arange(length, 0, -1)).long()


def relabel(episode, infos: Sequence[dict], later: Tensor, goals: Goals):
    """The T steps of an episode, on the CPU, as if step t had gone for what step later[t] achieved. episode: a named
    tuple with obs, actions, rewards, terminated, next_obs. infos: of each step. What the environment does not say of
    an end stays: a step ends the episode where it did."""
    achieved = episode.next_obs[:, goals.achieved]
    goal, obs, next_obs = achieved[later], episode.obs.clone(), episode.next_obs.clone()
    obs[:, goals.desired] = next_obs[:, goals.desired] = goal
    steps, terminated = [*zip(achieved.numpy(), goal.numpy(), infos)], episode.terminated
    rewards = torch.tensor([np.asarray(goals.reward(*step)).item() for step in steps])[:, None]
    if goals.terminated is not None:
        terminated = torch.tensor([bool(goals.terminated(*step)) for step in steps])[:, None]
    return episode._replace(obs=obs, rewards=rewards, terminated=terminated, next_obs=next_obs)


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
    goals = find_goals(args.env_id, make)
    agent = Agent(obs_size, int(space.n), args).to(device)
    score_agent = partial(evaluate, eval_envs, lambda obs, scale, generator: space.start + act(
        agent, obs, args.end_e * scale.cpu().numpy(), generator)[:, 0], args, device)  # fmt: skip
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    optimizer = torch.optim.Adam(agent.q.parameters(), lr=args.learning_rate, fused=True)
    loss_function = torch.compile(q_loss) if args.compile else q_loss
    generator = torch.Generator(device).manual_seed(args.seed)
    replay = ReplayBuffer(args.buffer_size, (obs_size, 1, 1, 1, obs_size), device)
    run = Run(args, NAME, args.env_id, args.total_timesteps, ("return", "eval/success", "q"))
    envs, obs = make_vector(make, args, run.step, infos=("whole",))
    parts = dict(agent=agent, optimizer=optimizer, generator=generator, replay=replay)
    run.restore(**parts)
    step, episodes = run.step, run.state.get("episodes", [])
    paths: list[list] = [[] for _ in range(args.num_envs)]  # rows and infos of episodes that have not ended yet
    while step < run.total:
        # collect
        epsilon = exploration(step, args)
        actions = act(agent, obs, epsilon, generator)
        next_obs, true_obs, rewards, terminated, truncated, ended = step_vector(envs, space.start + actions[:, 0])
        taken = np.concatenate([obs, actions, rewards[:, None], terminated[:, None], true_obs], 1, dtype=np.float32)
        for i, end in enumerate(terminated | truncated):  # where an episode ends, infos are those of the next one
            paths[i].append((taken[i], (envs.infos["final_info"] if end else envs.infos)["whole"][i][0]))
        before, step, obs, episodes = step, step + args.num_envs, next_obs, episodes + ended

        # hindsight
        for i in np.flatnonzero(terminated | truncated):
            rows, infos = zip(*paths[i])
            episode = Transitions(*torch.from_numpy(np.stack(rows)).split(replay.sizes, 1))
            others = [relabel(episode, infos, later, goals) for later in future(len(rows), args.her_k, generator)]
            for transitions in (episode, *others):
                replay.add(*(part.numpy() for part in transitions))
            paths[i] = []

        # update
        newest = None
        if step > args.learning_starts and replay.total:
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
    curves = {"success": ("eval/success",), "return": ("return", "eval/return"), "q": ("q",), "epsilon": ("epsilon",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train, NAME)
