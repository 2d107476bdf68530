r"""Hindsight Experience Replay (HER), with SAC: for continuous actions.

Andrychowicz et al. 2017, "Hindsight Experience Replay" (arXiv 1707.01495, algorithm 1), strategy "future".

Parent: sac.py. Actor and critics are told a goal, and each step is stored again with goals that its episode reached
later. her.py is the same for numbered actions.

Where a reward comes only at the goal, and a goal is rarely met by chance, there is little to learn from. But an episode
that misses its goal has reached other states: it is learned from as if these had been its goals. The losses are those
of sac.py, of states s || g.

    stored         at the end of an episode of T steps, for each step t: (s_t || g, a_t, r_t, s_t+1 || g), and --her-k
                   times (s_t || g', a_t, r(s_t+1, g'), s_t+1 || g')
    g'             what step j achieved, j uniform in t .. T - 1: with j = t the step itself reaches it
    r(s, g)        the environment's compute_reward; its compute_terminated, if any, says whether g' would have ended it

The environment observes a dictionary of observation, achieved_goal and desired_goal, as in Gymnasium-Robotics. In
PointReach-v0 a point moves to a goal in a square.

Run
    python algos/her_sac.py                                                           PointReach-v0
    python algos/her_sac.py --her-k 0                                                 without hindsight: SAC
    python algos/her_sac.py --env-id package.module:Name-v0 --env-kwargs size=5       your own environment
    python algos/her_sac.py --evaluate RUN --eval-episodes 100                        scores a saved agent

Expect
    PointReach-v0: 0.96 +- 0.02 of the episodes reach their goal; without hindsight 0.04 +- 0.02 (10 seeds;
    benchmarks/effects.py, sac-reach). 15 seconds on one core. FetchReach-v4 in 10,000 steps: 1.00 (3 seeds, 3 minutes
    each; algos/README.md).

Metrics
    eval/success        share of --eval-episodes that reach their goal by the likeliest actions
    q                   mean of Q_1(s || g, a) over the newest batch; with rewards of -1 and 0 and small alpha between
                        -1 / (1 - gamma) and 0
    entropy             mean of -log pi in nats of the [-1, 1] box; comes down to --target-entropy
    alpha               temperature; settles

Differences
    - An episode that would have ended at the new goal is stored as one. SB3's HerReplayBuffer keeps the `done` of the
      original goal, so that a step that reaches g' bootstraps.
    - Relabelled steps are stored with their goals, as in the paper's algorithm. OpenAI Baselines and SB3 draw goals
      with the minibatch, and SB3 fixes the share of relabelled rows in each minibatch.
    - An episode is stored when it has ended. Give an environment without an end a limit, such as --env-kwargs
      max_episode_steps=200. A resumed run forgets the steps of episodes that had not ended.
    - The paper has DDPG in place of SAC.
"""

import copy
import math
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
    is_bounded,
    make_env,
    make_vector,
    score_saved,
    step_vector,
    to_env,
    try_out,
)
from utils.core import Run, UserError, main, prepare

NAME, TITLE = "her_sac", "HER"
LOG_STD_BOUNDS = (-20.0, 2.0)  # the authors' code clamps to them; CleanRL squashes into [-5, 2] by another tanh


@dataclass
class Args(EnvArgs):
    # flags of earlier versions: the script that has them now, and their defaults then
    moved = {"utd_ratio": ("redq.py", 1), "policy_frequency": ("redq.py", 1), "num_critics": ("redq.py", 2),
             "subset_size": ("redq.py", None), "actor_q": ("redq.py", "min"), "layer_norm": ("redq.py", False),
             "dropout": ("redq.py", 0.0)}  # fmt: skip
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "PointReach-v0"
    """a goal environment (see above) with bounded continuous actions, or MODULE:NAME of one that MODULE registers"""
    total_timesteps: int = 3_000
    """environment steps, over all environments"""
    num_envs: int = 1
    """environments that are stepped together"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: float = 1e-3
    """learning rate of Adam, for actor, critics and temperature"""
    gamma: float = 0.95
    """discount"""
    tau: float = 0.005
    """step of the target critics towards the critics"""
    alpha: float | None = None
    """a fixed temperature; None: learned"""
    target_entropy: float | None = None
    """target entropy in nats; None: -(action size)"""
    her_k: int = 4
    """further goals for each step, reached later in its episode; 0: none, which is SAC"""
    batch_size: int = 64
    """transitions per update"""
    buffer_size: int = 1_000_000
    """newest transitions that are kept, on the device, those with further goals included"""
    learning_starts: int = 500
    """steps with uniformly random actions before the first update"""
    hidden_size: int = 64
    """units of the two hidden layers of actor and critics"""
    compile: bool = False
    """compile the losses: meant for a GPU"""
    log_every: int = 500
    """environment steps between rows of metrics"""
    save_every: int = 10_000
    """environment steps between checkpoints"""


class PointReach(gym.Env):
    """A point in the square [-1, 1]^2 moves by up to 0.2 a step in each direction, to within 0.1 of a goal; both places
    are uniform at the start. As in Fetch's environments the reward is -1, and 0 at the goal, which does not end the
    episode; 20 steps cut it off.
    """

    action_space = gym.spaces.Box(-1, 1, (2,))
    observation_space = gym.spaces.Dict(dict.fromkeys(("achieved_goal", "desired_goal", "observation"), action_space))

    def observe(self) -> dict[str, np.ndarray]:
        return {"achieved_goal": self.place, "desired_goal": self.goal, "observation": self.place}

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info) -> np.ndarray:
        """Of goals (..., 2), as Gymnasium-Robotics names it."""
        return (np.linalg.norm(achieved_goal - desired_goal, axis=-1) < 0.1) - 1.0

    def compute_terminated(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info) -> bool:
        return False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.place, self.goal = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        return self.observe(), {}

    def step(self, action):
        self.time += 1
        self.place = (self.place + 0.2 * np.clip(action, -1, 1)).clip(-1, 1).astype(np.float32)
        reward = float(self.compute_reward(self.place, self.goal, {}))
        return self.observe(), reward, False, self.time == 20, {"is_success": reward == 0}


gym.register("PointReach-v0", PointReach)


class Transitions(NamedTuple):
    """A minibatch of B rows, all float32."""

    obs: Tensor  # (B, D), with achieved and desired goal
    actions: Tensor  # (B, A) in [-1, 1]
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
    goals = find_goals(args.env_id, make)
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
    run = Run(args, NAME, args.env_id, args.total_timesteps, ("return", "eval/success", "alpha"))
    envs, obs = make_vector(make, args, run.step, infos=("whole",))
    parts = {name: optimizer for name, optimizer in optimizers._asdict().items() if optimizer}
    parts |= dict(agent=agent, generator=generator, replay=replay)
    run.restore(**parts)
    step, episodes, metrics = run.step, run.state.get("episodes", []), {}
    paths: list[list] = [[] for _ in range(args.num_envs)]  # rows and infos of episodes that have not ended yet
    while step < run.total:
        # collect
        if step < args.learning_starts:
            actions = torch.rand(len(obs), action_size, generator=generator, device=device).cpu().numpy() * 2 - 1
        else:
            actions = act(agent.actor, space, obs, 1.0, generator)
        next_obs, true_obs, rewards, terminated, truncated, ended = step_vector(envs, to_env(actions, space))
        taken = np.concatenate([obs, actions, rewards[:, None], terminated[:, None], true_obs], 1, dtype=np.float32)
        for i, end in enumerate(terminated | truncated):  # where an episode ends, infos are those of the next one
            paths[i].append((taken[i], (envs.infos["final_info"] if end else envs.infos)["whole"][i][0]))
        obs, step, episodes = next_obs, step + args.num_envs, episodes + ended

        # hindsight
        for i in np.flatnonzero(terminated | truncated):
            rows, infos = zip(*paths[i])
            episode = Transitions(*torch.from_numpy(np.stack(rows)).split(replay.sizes, 1))
            others = [relabel(episode, infos, later, goals) for later in future(len(rows), args.her_k, generator)]
            for transitions in (episode, *others):
                replay.add(*(part.numpy() for part in transitions))
            paths[i] = []

        # update
        if step > args.learning_starts and replay.total:
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
    curves = {
        "success": ("eval/success",),
        "return": ("return", "eval/return"),
        "entropy": ("entropy",),
        "alpha": ("alpha",),
    }
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train, NAME)
