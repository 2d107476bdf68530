r"""Soft Actor-Critic (SAC).

Haarnoja et al. 2018, "Soft Actor-Critic: Off-Policy Maximum Entropy Deep Reinforcement Learning with a Stochastic
Actor" (arXiv 1801.01290) in the form of "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905, algorithm
1): twin critics, no value network, learned temperature. On minibatches of a replay buffer minimises

    J_Q(theta_i) = E 1/2 (Q_i(s, a) - y)^2                                                     equation 5, i = 1, 2
               y = r + gamma (1 - terminated) [ min_i Qbar_i(s', a') - alpha log pi(a' | s') ],  a' ~ pi(. | s')
    J_pi(phi)    = E alpha log pi(a | s) - min_i Q_i(s, a),                         a ~ pi(. | s)    equation 9
    J(alpha)     = E -alpha (log pi(a | s) + H)                                                equation 18

    pi     a = tanh(u), u ~ N(mean(s), std(s)^2), by reparameterisation; H = -(number of actions), the target entropy
    Qbar   target critics: after each update Qbar <- (1 - tau) Qbar + tau Q
    s'     the true next observation, never that of a reset; truncation does not end the bootstrap

Differences
    - Actions live in [-1, 1] and are stretched to the environment's bounds outside of the density, so the target
      entropy means the same in every environment, as in the authors' code and SB3. CleanRL's density includes the
      bounds.
    - log pi in the stable form: log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), with no constant added inside.
    - log std is clamped to [-20, 2] as in the authors' code; CleanRL squashes it into [-5, 2] by another tanh.
    - J(alpha) is minimised over log alpha, which starts at 0. SB3, and the authors' code until 2020, minimise
      -log(alpha) (log pi + H). On HalfCheetah's first 30,000 steps 8 seeds showed no difference.
    - One actor update for every critic update, as in the paper; CleanRL makes two every second step.
    - The paper's 1M-step settings are HalfCheetah's below; the default is for Pendulum and starts learning earlier.
    - Where the environment raises, the checkpoint is from before that step, but for the global generators (Python's,
      NumPy's, torch's): what the failed step drew from them is not drawn again. A copy at each step would cost time.

Metrics
    return, length      of the training episodes that ended since the row before; absent where none did
    eval/return         mean over --eval-episodes, likeliest action; eval/return_stochastic: sampled actions
    q                   mean of Q_1 over the batch; should stay near the discounted return, runaway growth is divergence
    td_error            mean |Q_1 - y|
    entropy             mean of -log pi in nats of the [-1, 1] box; comes down to the target -(number of actions)
    alpha               temperature; settles
    grad_norm           of the critics
    (q to grad_norm: of the newest update)

Run
    python algos/sac.py                                                                 Pendulum-v1
    python algos/sac.py --env-id HalfCheetah-v5 --total-timesteps 1000000 --learning-starts 10000 --eval-every 20000
                                                                                        the paper's recipe for MuJoCo
    python algos/sac.py --env-id HalfCheetah-v5 --utd-ratio 4 --num-envs 4
    python algos/sac.py --env-id package.module:Name-v0 --env-kwargs size=5             your own environment
    python algos/sac.py --env-id Hopper-v5 --total-timesteps 1000000 --record-dataset data/hopper
                                                                                        collections for offline scripts
    python algos/sac.py --evaluate RUN --eval-episodes 100 --capture-video              scores a saved agent

Expect
    The default run: Pendulum-v1 goes from about -1,300 to -170 with the likeliest actions in about 2 minutes on a CPU
    (80 to 100 steps a second; measured once, not recorded). In 20,000 steps of Hopper-v5 (--learning-starts 1000) it
    comes from about 20 to 264 with the likeliest actions (median of 8 seeds), in 4 minutes.
"""

import copy
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.checkpoint import saving
from utils.collection import save_collection
from utils.envs import EnvArgs, evaluate, make_env, make_vector, reset_vector, restore_vector, saved_agent, step_vector
from utils.errors import UserError, check_numbers
from utils.replay import ReplayBuffer
from utils.run import Run, crosses, main, prepare
from utils.spaces import to_env

LOG_STD_BOUNDS = (-20.0, 2.0)
RANGES = {  # what numbers must be
    "at least 1": "total_timesteps num_envs utd_ratio batch_size buffer_size hidden_size log_every eval_episodes "
    "record_steps",
    "at least 0": "learning_starts eval_every",
    "above 0": "learning_rate alpha",
    "from 0 to 1": "gamma tau",
    "finite": "target_entropy",
}


@dataclass
class Args(EnvArgs):
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
    """target entropy in nats; None: -(number of actions)"""
    utd_ratio: int = 1
    """updates per environment step"""
    batch_size: int = 256
    """transitions per update"""
    buffer_size: int = 1_000_000
    """newest transitions that are kept, on the device"""
    learning_starts: int = 1_000
    """steps with uniformly random actions before the first update"""
    hidden_size: int = 256
    """units of the two hidden layers of actor and critics"""
    record_dataset: str = ""
    """write collections to this folder at the end, as D4RL does: random, medium, expert, medium- and full-replay.
    Time-outs are guessed: where the next row does not begin in the observation that a row led to"""
    record_steps: int = 100_000
    """transitions in each of random, medium and expert"""
    compile: bool = False
    """compile the losses: meant for a GPU"""
    log_every: int = 500
    """environment steps between rows of metrics"""
    eval_every: int = 2_000
    """environment steps between evaluations; 0: at the end only"""
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
    return nn.Sequential(nn.Linear(size_in, hidden_size), nn.ReLU(), nn.Linear(hidden_size, hidden_size), nn.ReLU(),
                         nn.Linear(hidden_size, size_out))  # fmt: skip


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
        log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))  # log d tanh(u) / du
        return u.tanh(), (log_normal - log_slope).sum(-1, keepdim=True)


class Critics(nn.Module):
    def __init__(self, obs_size: int, action_size: int, hidden_size: int):
        super().__init__()
        self.q1, self.q2 = (network(obs_size + action_size, hidden_size, 1) for _ in range(2))

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Q_1 and Q_2, each (B, 1)."""
        both = torch.cat([obs, actions], -1)
        return self.q1(both), self.q2(both)


class Agent(nn.Module):
    """What is saved: actor, critics, target critics and log alpha."""

    def __init__(self, obs_size: int, action_size: int, hidden_size: int, alpha: float):
        super().__init__()
        self.actor = Actor(obs_size, action_size, hidden_size)
        self.critics = Critics(obs_size, action_size, hidden_size)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(alpha)))


def critic_loss(agent: Agent, batch: Transitions, noise: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of both critics' losses (equation 5 with a sample of the soft value), Q_1 and the target y. noise (B, A)."""
    with torch.no_grad():
        next_actions, next_logps = agent.actor(batch.next_obs, noise)
        soft_value = torch.min(*agent.targets(batch.next_obs, next_actions)) - agent.log_alpha.exp() * next_logps
        target = batch.rewards + gamma * (1 - batch.terminated) * soft_value
    q1, q2 = agent.critics(batch.obs, batch.actions)
    return 0.5 * ((q1 - target).square().mean() + (q2 - target).square().mean()), q1.detach(), target


def actor_loss(agent: Agent, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 9, and the log-densities (B, 1) of the actions without gradient. noise (B, A)."""
    actions, logps = agent.actor(obs, noise)
    return (agent.log_alpha.detach().exp() * logps - torch.min(*agent.critics(obs, actions))).mean(), logps.detach()


def alpha_loss(log_alpha: Tensor, logps: Tensor, target_entropy: float) -> Tensor:
    """Equation 18."""
    return -(log_alpha.exp() * (logps + target_entropy)).mean()


class Optimizers(NamedTuple):
    actor: torch.optim.Optimizer
    critics: torch.optim.Optimizer
    alpha: torch.optim.Optimizer | None  # None: the temperature is fixed


def update(agent: Agent, optimizers: Optimizers, batch: Transitions, generator: torch.Generator, args: Args,
           losses=(critic_loss, actor_loss)) -> dict[str, Tensor]:  # fmt: skip
    """One step of critics, actor, temperature and target critics, in this order. Returns metrics, as tensors: reading
    them would make the CPU wait for the device at every update."""
    noise, next_noise = torch.randn(2, *batch.actions.shape, generator=generator, device=batch.obs.device)
    loss, q, target = losses[0](agent, batch, next_noise, args.gamma)
    optimizers.critics.zero_grad(set_to_none=True)
    loss.backward()
    optimizers.critics.step()
    grad_norm = torch.nn.utils.get_total_norm([p.grad for p in agent.critics.parameters()])

    agent.critics.requires_grad_(False)  # the actor's gradient passes through them, theirs would be thrown away
    loss, logps = losses[1](agent, batch.obs, noise)
    optimizers.actor.zero_grad(set_to_none=True)
    loss.backward()
    optimizers.actor.step()
    agent.critics.requires_grad_(True)

    if optimizers.alpha is not None:
        optimizers.alpha.zero_grad(set_to_none=True)
        alpha_loss(agent.log_alpha, logps, args.target_entropy).backward()
        optimizers.alpha.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(agent.targets.parameters()), list(agent.critics.parameters()), args.tau)
    return {"q": q.mean(), "td_error": (q - target).abs().mean(), "entropy": -logps.mean(),
            "alpha": agent.log_alpha.detach().exp(), "grad_norm": grad_norm}  # fmt: skip


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for settings that no run can have."""
    if not isinstance(space, gym.spaces.Box) or not space.is_bounded() or space.dtype.kind != "f":
        raise UserError(f"--env-id {args.env_id} has the action space {space}: SAC needs a Box of floats with finite "
                        "bounds")  # fmt: skip
    check_numbers(args, RANGES)
    if args.capture_video and not args.evaluate:
        raise UserError("--capture-video works with --evaluate RUN: it records a saved agent")
    if args.total_timesteps % args.num_envs:
        raise UserError(f"--total-timesteps {args.total_timesteps} must be a multiple of --num-envs {args.num_envs}")
    if args.record_dataset:
        if (
            min(args.buffer_size, args.record_steps) < 10
            or args.buffer_size < args.total_timesteps
            or args.record_steps % 10
        ):
            raise UserError("--record-dataset needs a --buffer-size of --total-timesteps, and --record-steps in tens")
        try:
            Path(args.record_dataset).mkdir(parents=True, exist_ok=True)
            import h5py  # noqa: F401
        except (OSError, ImportError) as error:
            raise UserError(f"cannot record to --record-dataset {args.record_dataset} ({error}): it must be a writable "
                            "folder, and h5py must be installed") from error  # fmt: skip


@torch.no_grad()
def act(actor: Actor, space: gym.spaces.Box, obs: np.ndarray, scale: Tensor | float, generator) -> np.ndarray:
    """Actions (N, A) in [-1, 1] of observations (N, D); `scale` 0: the likeliest, 1: samples."""
    noise = torch.randn(len(obs), math.prod(space.shape), generator=generator, device=generator.device)
    return actor(torch.from_numpy(obs.astype(np.float32)).to(generator.device), noise * scale)[0].cpu().numpy()


def record(actor: Actor, snapshots: list, replay: ReplayBuffer, make: Callable, space: gym.spaces.Box, generator,
           args: Args) -> None:  # fmt: skip
    """Collections by D4RL's protocol (arXiv 2004.07219, appendix C). `snapshots` are (step, eval/return, weights of the
    actor) from before the first update on. random, expert: sampled actions of the first and of the last actor; medium:
    of the first that had come a third of the way between their returns; medium-replay: all that had been in the replay
    buffer by then; full-replay: all that is in it at the end. The buffer does not say where time ran out: a row that
    does not begin where the one before led to does, so that a cut between two equal observations is missed."""
    (_, low, _), (_, high, _) = snapshots[0], snapshots[-1]
    medium = next((one for one in snapshots[1:] if one[1] >= low + (high - low) / 3), snapshots[-1])
    for name, (step, score, weights) in {"random": snapshots[0], "medium-replay": medium, "medium": medium,
                                         "full-replay": snapshots[-1], "expert": snapshots[-1]}.items():  # fmt: skip
        if name.endswith("-replay"):
            rows, count = replay.newest(replay.total)[:step], args.num_envs
        else:
            actor.load_state_dict(weights)
            envs, count = make_vector(make, 10, args.seed + 2**30), 10
            rollouts, obs = ReplayBuffer(args.record_steps, replay.sizes, torch.device("cpu")), reset_vector(envs)
            while rollouts.total < args.record_steps:
                actions = act(actor, space, obs, 1.0, generator)
                next_obs, true_obs, rewards, terminated, _, _ = step_vector(
                    envs, to_env(actions, space), rollouts.total
                )
                rollouts.add(obs, actions, rewards[:, None], terminated[:, None], true_obs)
                obs = next_obs.copy()
            rows = rollouts.newest(args.record_steps)
        rows = torch.cat([rows[i::count] for i in range(count)])  # each environment's episodes one after the other
        obs, actions, rewards, terminals, next_obs = (part.numpy() for part in rows.split(replay.sizes, 1))
        about = {"env_id": args.env_id, "env_kwargs": json.dumps(args.env_kwargs), "seed": args.seed,
                 "policy_step": step, "policy_return": score, "random_return": low, "expert_return": high}  # fmt: skip
        save_collection(Path(args.record_dataset) / f"{name}.hdf5", obs, to_env(actions, space).reshape(len(obs), -1),
                        rewards[:, 0], terminals[:, 0] > 0, next_obs, about)  # fmt: skip


def train(args: Args) -> list[dict]:
    device = prepare(args)
    make = partial(make_env, args.env_id, args.env_kwargs)
    env = make()
    obs_size, space = env.observation_space.shape[0], env.action_space
    env.close()
    check(args, space)
    action_size = math.prod(space.shape)
    if args.target_entropy is None:
        args.target_entropy = -float(action_size)
    agent = Agent(obs_size, action_size, args.hidden_size, args.alpha or 1.0).to(device)
    scored = partial(evaluate, make, lambda *inputs: to_env(act(agent.actor, space, *inputs), space),
                     args.eval_episodes, args.seed, device)  # fmt: skip
    if args.evaluate:
        agent.load_state_dict(saved_agent(args)["agent"])
        print(json.dumps(scored(Path(args.evaluate) / "video" if args.capture_video else None)))
        return []
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
    optimizers = Optimizers(adam(agent.actor.parameters()), adam(agent.critics.parameters()),
                            adam([agent.log_alpha]) if args.alpha is None else None)  # fmt: skip
    generator = torch.Generator(device).manual_seed(args.seed)
    sizes = (obs_size, action_size, 1, 1, obs_size)
    try:
        replay = ReplayBuffer(args.buffer_size, sizes, device)
    except RuntimeError as error:
        raise UserError(f"--buffer-size {args.buffer_size} needs {args.buffer_size * sum(sizes) * 4e-9:,.1f} GB of "
                        f"memory on {device}, which cannot be had: give less") from error  # fmt: skip
    run = Run(args, "sac", args.env_id, args.total_timesteps, ("return", "eval/return", "alpha"), "total_timesteps")
    losses = (critic_loss, actor_loss)
    if args.compile:
        losses = tuple(torch.compile(loss) for loss in losses)
    envs = make_vector(make, args.num_envs, args.seed, args.vector)

    def state() -> dict:
        return {"agent": agent.state_dict(), "optimizers": [o.state_dict() for o in optimizers if o is not None],
                "generator": generator.get_state(), "obs": torch.from_numpy(obs), "envs": envs.log.state(obs),
                "episodes": episodes, "snapshots": snapshots,
                "replay": replay.save(run.dir / "replay.bin")}  # fmt: skip

    def snapshot(score: float) -> list:
        return [(step, score, {name: value.clone() for name, value in agent.actor.state_dict().items()})]

    step, episodes, snapshots = 0, [], []
    if run.state is not None:
        agent.load_state_dict(run.state["agent"])
        for optimizer, saved in zip((o for o in optimizers if o is not None), run.state["optimizers"]):
            optimizer.load_state_dict(saved)
        generator.set_state(run.state["generator"].cpu())
        replay.load(run.dir / "replay.bin", run.state["replay"])
        step, episodes, snapshots = run.state["step"], run.state["episodes"], run.state["snapshots"]
        obs = restore_vector(envs, run.state["envs"])
    else:
        obs = reset_vector(envs)
        if args.record_dataset:
            snapshots = snapshot(scored()["eval/return"])
    run.restore_rng()
    logged, columns, begun = step, {}, time.perf_counter()
    while step < run.total:
        # collect
        before = generator.get_state()
        if step < args.learning_starts:
            actions = torch.rand(args.num_envs, action_size, generator=generator, device=device).cpu().numpy() * 2 - 1
        else:
            actions = act(agent.actor, space, obs, 1.0, generator)
        try:
            next_obs, true_obs, rewards, terminated, _, ended = step_vector(
                envs, to_env(actions, space), step + args.num_envs
            )
        except UserError:
            raise
        except Exception:
            run.save(step, state() | {"generator": before})  # a resumed run repeats this step
            raise
        replay.add(obs, actions, rewards[:, None], terminated[:, None], true_obs)
        obs, step, episodes = next_obs.copy(), step + args.num_envs, episodes + ended

        # update
        if step > args.learning_starts:
            for _ in range(args.utd_ratio * args.num_envs):
                batch = Transitions(*replay.sample(args.batch_size, generator))
                metrics = update(agent, optimizers, batch, generator, args, losses)
            columns = metrics

        # evaluate
        row = step == run.total or crosses(step, step - args.num_envs, args.log_every)
        due = step == run.total or (args.eval_every and crosses(step, step - args.num_envs, args.eval_every))
        if row or due:
            now = time.perf_counter()
            numbers = {name: value.item() for name, value in columns.items()}
            if episodes:
                numbers |= dict(zip(("return", "length"), np.mean(episodes, 0).tolist()))
                episodes = []
            if due:
                with saving(run, step, state, numbers):
                    numbers |= scored()
                if args.record_dataset:
                    snapshots = snapshots + snapshot(numbers["eval/return"])
            run.log(step, **numbers, **{"time/steps_per_second": (step - logged) / (now - begun)})
            logged, begun = step, time.perf_counter()
        run.end_step(step, state)

    envs.close()
    if args.record_dataset:
        record(copy.deepcopy(agent.actor), snapshots, replay, make, space, generator, args)
        run.print(f"collections: {args.record_dataset}")
    curves = {"return": ("return", "eval/return"), "entropy": ("entropy",), "alpha": ("alpha",)}
    return run.finish(lambda folder: save_file(agent.state_dict(), folder / "model.safetensors"), curves,
                      f"SAC on {args.env_id}")  # fmt: skip


if __name__ == "__main__":
    main(Args, train)
