r"""RLPD: reinforcement learning with prior data.

Ball, Smith, Kostrikov, Levine 2023, "Efficient Online Reinforcement Learning with Offline Data" (arXiv 2302.02948).

Parent: redq.py. Half of each minibatch comes from a dataset; without data and with equal settings it is redq.py.

SAC starts from scratch, with a dataset beside its replay buffer and no training before. It draws as many rows from the
one as from the other (symmetric sampling), makes many updates per step, and has LayerNorm in its critics, which
bounds what they say of actions that no data shows. On minibatches minimises

    J_Q(theta_i) = E 1/2 (Q_i(s, a) - y)^2,    i = 1..N,    half of the rows (s, a, r, s') new, half of the dataset
               y = r + gamma (1 - terminated) [ min_{i in M} Qbar_i(s', a') - alpha log pi(a' | s') ],  a' ~ pi(. | s')
    J_pi(phi)    = E alpha log pi(a | s) - mean_i Q_i(s, a),    a ~ pi(. | s),    after the last update of a step

    N, M    --num-critics, --subset-size: M random critics, drawn anew for each update; none: all
    half    --offline-ratio
    Qbar, pi, alpha, J(alpha), s', gamma, tau as in sac.py; the target entropy is -(action size) / 2

Run
    python algos/rlpd.py                                                         the collection that ships: Hopper-v5
    python algos/rlpd.py --dataset hopper_medium_replay-v2.hdf5 --total-timesteps 250000 --learning-starts 5000 \
        --num-critics 10 --subset-size 2 --utd-ratio 20                          the authors' for locomotion; never run
    python algos/rlpd.py --offline-ratio 0                                       the same without the data
    python algos/rlpd.py --init RUN --no-layer-norm                              goes on from cql.py --no-normalize
    python algos/rlpd.py --evaluate RUN --eval-episodes 100 --capture-video      scores a saved agent

Expect
    The default run, Hopper-v5's collection: from 84 to 282 with the likeliest actions (seed 1), in two minutes on two
    cores. sac.py has 264 after 20,000 steps. Pendulum-v1, mean return after 400 to 700 steps: -440; without the data
    -910, without LayerNorm -740, drawn uniformly from one buffer -426 (10 seeds; benchmarks/effects.py, rlpd-pendulum).
    After 2,000 updates of cql.py on a tenth of Hopper-v5's collection, --init --actor-q min, with networks of 128: the
    evaluations at 4,000 to 6,000 steps return 415 +- 140 with all of the data, 247 +- 56 without. Where the loaded
    actor fills the buffer first, without data (--learning-starts 3000): 306 +- 140. From scratch, after 3,000 random
    steps: 263 +- 110. We had claimed that this warm-up, which is all we have of WSRL, gains a fifth in four of five
    seeds, and found it in two (5 seeds; benchmarks/effects.py, rlpd-warm-up).

Metrics
    As in sac.py. eval/score, eval/d4rl_score and eval/best_return: as in bc.py.

Differences
    - The loss of the critics is half a sum over them, the authors' a mean (ikostrikov/rlpd,
      rlpd/agents/sac/sac_learner.py): Adam hides the factor. LayerNorm's epsilon is PyTorch's 1e-5, theirs 1e-6.
    - The authors draw one large minibatch per step and split it. They clip the dataset's actions to 1 - 1e-5.
    - For AntMaze and Adroit the authors take three hidden layers, leave entropy out of the target, and pay AntMaze 1
      less per step. These are not offered. We have not read the paper's tables.
    - WSRL (arXiv 2412.07762) is more than a warm-up. Its authors have LayerNorm in critics and actor, offline too
      (cql.py has none), ten critics of which two make the target, no entropy there, target entropy -(action size),
      1e-4 for the actor, 250,000 offline steps or more, whose optimizers go on, and 5,000 steps of warm-up.
    - Rewards are the dataset's own and the environment's own: they must agree.
"""

import copy
import json
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
from safetensors.torch import load_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.control import (
    ReplayBuffer,
    episode_columns,
    evaluate,
    is_bounded,
    make_env,
    make_vector,
    score_saved,
    step_vector,
    to_env,
    to_unit,
    try_out,
)
from utils.core import Run, UserError, main, prepare
from utils.offline import OfflineArgs, check_spaces, compared, load_dataset

NAME, TITLE = "rlpd", "RLPD"
LOG_STD_BOUNDS = (-20.0, 2.0)  # as in the authors' code


@dataclass
class Args(OfflineArgs):
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs); dataset, env_id (OfflineArgs)
    total_timesteps: int = 3_000
    """environment steps, over all environments"""
    init: str = ""
    """a finished run of cql.py or cal_ql.py with --no-normalize: start from its actor, critics and temperature; --gamma
    and the environment must be those of that run; cal_ql.py has 0.9"""
    offline_ratio: float | None = 0.5
    """share of each minibatch that comes from the dataset; None: its share of all transitions, as from one buffer"""
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
    """target entropy in nats; None: -(action size) / 2"""
    utd_ratio: int = 4
    """updates per environment step"""
    policy_frequency: int | None = None
    """updates of the critics for one of actor and temperature; None: --utd-ratio"""
    num_critics: int = 2
    """critics in the ensemble; the authors have 10"""
    subset_size: int | None = None
    """critics, drawn anew for each update, whose minimum makes the target; None: all"""
    actor_q: Literal["min", "mean"] = "mean"
    """what the actor maximises of all critics"""
    layer_norm: bool = True
    """LayerNorm in each hidden layer of the critics"""
    batch_size: int = 256
    """transitions per update"""
    buffer_size: int = 1_000_000
    """newest transitions that are kept, on the device"""
    learning_starts: int = 500
    """steps before the first update; their actions are uniformly random, with --init those of its actor"""
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


def network(size_in: int, hidden_size: int, size_out: int, layer_norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in (size_in, hidden_size):
        layers += [nn.Linear(size, hidden_size)]
        layers += [nn.LayerNorm(hidden_size)] if layer_norm else []
        layers += [nn.ReLU()]
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
    """An ensemble: q1, q2, ..."""

    def __init__(self, obs_size: int, action_size: int, hidden_size: int, count: int = 2, layer_norm: bool = False):
        sizes = obs_size + action_size, hidden_size, 1
        super().__init__({f"q{i}": network(*sizes, layer_norm) for i in range(1, count + 1)})

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Q_1, ..., Q_N: (N, B, 1)."""
        both = torch.cat([obs, actions], -1)
        return torch.stack([q(both) for q in self.values()])


class Agent(nn.Module):
    """What is saved: actor, critics, target critics and log alpha. `critics`: count, layer_norm."""

    def __init__(self, obs_size: int, action_size: int, hidden_size: int, alpha: float | None, **critics):
        super().__init__()
        self.actor = Actor(obs_size, action_size, hidden_size)
        self.critics = Critics(obs_size, action_size, hidden_size, **critics)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(1.0 if alpha is None else alpha).log())


def critic_loss(agent: Agent, batch: Transitions, noise: Tensor, gamma: float,
                subset: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Sum of all critics' losses, Q_1 and the target y. noise (B, A); subset: numbers of the target critics, from 0, of
    which the minimum is taken; None: all."""
    with torch.no_grad():
        next_actions, next_logps = agent.actor(batch.next_obs, noise)
        next_q = agent.targets(batch.next_obs, next_actions)
        smallest = (next_q if subset is None else next_q[subset]).amin(0)
        soft_value = smallest - agent.log_alpha.exp() * next_logps
        target = batch.rewards + gamma * (1 - batch.terminated) * soft_value
    q = agent.critics(batch.obs, batch.actions)
    return 0.5 * (q - target).square().mean((1, 2)).sum(), q[0].detach(), target


def actor_loss(agent: Agent, obs: Tensor, noise: Tensor, actor_q: str = "min") -> tuple[Tensor, Tensor]:
    """Of SAC, and the log-densities (B, 1) of the actions without gradient. noise (B, A)."""
    actions, logps = agent.actor(obs, noise)
    q = agent.critics(obs, actions)
    q = q.mean(0) if actor_q == "mean" else q.amin(0)
    return (agent.log_alpha.detach().exp() * logps - q).mean(), logps.detach()


def alpha_loss(log_alpha: Tensor, logps: Tensor, target_entropy: float) -> Tensor:
    """Of SAC, a function of log alpha."""
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
        raise UserError(f"--env-id {args.env_id} has the action space {space}: {TITLE} needs {wanted}")
    if args.total_timesteps % args.num_envs:
        raise UserError(f"--total-timesteps {args.total_timesteps} must be a multiple of --num-envs {args.num_envs}")
    if args.subset_size and args.subset_size > args.num_critics:
        raise UserError(f"--subset-size {args.subset_size} must be at most --num-critics {args.num_critics}")
    rows = (args.offline_ratio or 0) * args.batch_size
    if abs(rows - round(rows)) > 1e-6 or not 0 <= rows <= args.batch_size:
        wrong = f"--offline-ratio {args.offline_ratio} of --batch-size {args.batch_size} is no whole number of rows"
        raise UserError(f"{wrong} from 0 to all: --batch-size must be even for a half")


def offline_rows(args: Args, offline: int, online: int) -> int:
    """How many rows of a minibatch come from the dataset, of which there are `offline`, where `online` are new."""
    share = offline / (offline + online) if args.offline_ratio is None else args.offline_ratio
    return round(share * args.batch_size)


def draw(replay: ReplayBuffer, offline: ReplayBuffer, generator: torch.Generator, args: Args) -> Transitions:
    """A minibatch: first new rows, then those of the dataset, each kind uniformly."""
    count = offline_rows(args, offline.total, min(replay.total, replay.capacity))
    parts = [buffer.sample(rows, generator) for buffer, rows in ((replay, args.batch_size - count), (offline, count))]
    return Transitions(*(torch.cat(columns) for columns in zip(*parts)))


def take_over(agent: Agent, args: Args) -> None:
    """Gives the agent what the run --init learned. Raises UserError where there is no such run, or none that fits."""
    path = Path(args.init) / "model" / "model.safetensors"
    if not path.is_file():
        raise UserError(f"--init {args.init} has no model: give a finished run of cql.py --no-normalize")
    run, saved = json.loads((Path(args.init) / "config.json").read_text())["args"], load_file(path)
    for name in ("env_id", "env_kwargs", "gamma"):  # what the critics' values rest on; env_kwargs may scale rewards
        if (asked := json.loads(json.dumps(vars(args)[name]))) != run[name]:
            right = f"it must be {run[name]}, as in the run --init {args.init}"
            raise UserError(f"--{name.replace('_', '-')} is {asked}: {right}")
    if (saved.pop("obs_mean", torch.zeros(1)) != 0).any():
        raise UserError(f"--init {args.init} has scaled observations: train it with --no-normalize")
    saved.pop("obs_std", None)
    if args.alpha is not None:
        saved["log_alpha"] = agent.log_alpha.detach()
    wanted = {name: weight.shape for name, weight in agent.state_dict().items()}
    if wanted != {name: weight.shape for name, weight in saved.items()}:
        flags = "--dataset, --no-layer-norm, --num-critics and --hidden-size"
        raise UserError(f"--init {args.init} has other networks: give {flags} as that run has them")
    agent.load_state_dict(saved)


@torch.no_grad()
def act(actor: Actor, space: gym.spaces.Box, obs: np.ndarray, scale: Tensor | float,
        generator: torch.Generator) -> np.ndarray:  # fmt: skip
    """Actions (N, A) in [-1, 1] of observations (N, D); `scale` 0: the likeliest, 1: samples."""
    noise = torch.randn(len(obs), math.prod(space.shape), generator=generator, device=generator.device)
    return actor(torch.from_numpy(obs.astype(np.float32)).to(generator.device), noise * scale)[0].cpu().numpy()


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
    data = None if args.evaluate else load_dataset(args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape[0], env.action_space
    check(args, space)
    action_size = math.prod(space.shape)
    if args.target_entropy is None:
        args.target_entropy = -action_size / 2
    if args.policy_frequency is None:
        args.policy_frequency = args.utd_ratio
    agent = Agent(obs_size, action_size, args.hidden_size, args.alpha, count=args.num_critics,
                  layer_norm=args.layer_norm).to(device)  # fmt: skip
    score_agent = partial(evaluate, eval_envs, lambda *x: to_env(act(agent.actor, space, *x), space), args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    check_spaces(data, obs_size, space)
    if args.init and not args.resume:
        take_over(agent, args)
    rows, sizes = data.known, (obs_size, action_size, 1, 1, obs_size)
    offline = ReplayBuffer(rows.sum(), sizes, device)
    offline.add(data.obs[rows], to_unit(data.actions[rows], space), data.rewards[rows, None],
                data.terminated[rows, None], data.next_obs[rows])  # fmt: skip
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
    optimizers = Optimizers(adam(agent.actor.parameters()), adam(agent.critics.parameters()),
                            adam([agent.log_alpha]) if args.alpha is None else None)  # fmt: skip
    losses = [torch.compile(loss) if args.compile else loss for loss in (critic_loss, actor_loss)]
    generator = torch.Generator(device).manual_seed(args.seed)
    replay = ReplayBuffer(args.buffer_size, sizes, device)
    run = Run(args, NAME, data.name, args.total_timesteps, ("return", "eval/return", "alpha"))
    run.print(f"{data.name}: {len(data.starts)} trajectories, {rows.sum()} transitions taken of {len(data.obs)}")
    envs, obs = make_vector(make, args, run.step)
    parts = {name: optimizer for name, optimizer in optimizers._asdict().items() if optimizer}
    parts |= dict(agent=agent, generator=generator, replay=replay)
    run.restore(**parts)
    step, episodes, metrics = run.step, run.state.get("episodes", []), run.state.get("metrics", {})
    while step < run.total:
        # collect
        if step < args.learning_starts and not args.init:
            actions = torch.rand(len(obs), action_size, generator=generator, device=device).cpu().numpy() * 2 - 1
        else:
            actions = act(agent.actor, space, obs, 1.0, generator)
        next_obs, true_obs, rewards, terminated, _, ended = step_vector(envs, to_env(actions, space))
        replay.add(obs, actions, rewards[:, None], terminated[:, None], true_obs)
        obs, step, episodes = next_obs, step + args.num_envs, episodes + ended

        # update
        if step > args.learning_starts:
            for number in range(args.utd_ratio * (step - args.num_envs), args.utd_ratio * step):
                batch = draw(replay, offline, generator, args)
                metrics |= update(agent, optimizers, batch, generator, args, number + 1, *losses)

        # evaluate
        due, logs = run.due(step, args.eval_every), run.due(step, args.log_every)
        if due or logs:
            columns = {name: value.item() for name, value in metrics.items()}
            columns["time/steps_per_second"] = run.speed(step)
            if logs:  # an evaluation in between leaves the episodes to the row that is due
                columns, episodes = columns | episode_columns(episodes), []
            if due and eval_envs:
                columns |= compared(score_agent(), data, run, step)
            run.log(step, **columns)
        run.end_step(step, parts | dict(episodes=episodes, metrics=metrics))

    envs.close()
    curves = {"return": ("return", "eval/return"), "entropy": ("entropy",), "alpha": ("alpha",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train, NAME)
