r"""CrossQ.

Bhatt, Palenicek, Belousov, Argus, Amiranashvili, Brox, Peters 2024, "CrossQ: Batch Normalization in Deep Reinforcement
Learning for Greater Sample Efficiency and Simplicity" (arXiv 1902.05605).

Parent: sac.py. Batch normalisation in actor and critics takes the place of the target networks.

SAC bootstraps from slow copies of its critics, since critics that chase themselves diverge. CrossQ drops the copies and
normalises each layer. Old and new pairs of state and action go through the critics in one pass: in passes of their own,
statistics would hide how they differ. On minibatches minimises

    J_Q(theta_i) = E 1/2 (Q_i(s, a) - y)^2,    i = 1, 2,    with    Q_i(s, a), Q_i(s', a') = Q_i([s; s'], [a; a'])
               y = r + gamma (1 - terminated) [ min_i Q_i(s', a') - alpha log pi(a' | s') ],  a' ~ pi(. | s')
    J_pi(phi)    = E alpha log pi(a | s) - min_i Q_i(s, a),    a ~ pi(. | s)
    BN(x)        = gain ((x - mean) / std r + d) + shift,    mean, std of the batch    before each layer

    y      has no gradient; the statistics that Q_i(s, a) shares with Q_i(s', a') have one
    r, d   std / std* in [1/3, 3] and (mean - mean*) / std* in [-5, 5], constants: batch renormalisation. They are 1
           and 0 in the first --renorm-warmup passes
    *      running statistics. They stand alone (mean = mean*, std = std*, r = 1, d = 0) where a network is not trained:
           in the policy that acts, in the policy of y, and in the critics of J_pi
    pi, alpha, J(alpha), s', gamma as in sac.py; the actor moves in every third update (--policy-frequency)

Run
    python algos/crossq.py                                                              Pendulum-v1
    python algos/crossq.py --env-id HalfCheetah-v5 --total-timesteps 5000000 --learning-starts 5000 --critic-size 2048
                                                                                        never run at length
    python algos/crossq.py --no-batch-norm                                              SAC without target networks
    python algos/crossq.py --env-id package.module:Name-v0 --env-kwargs size=5          your own environment
    python algos/crossq.py --evaluate RUN --eval-episodes 100 --capture-video           scores a saved agent

Expect
    Pendulum-v1: from -1,430 to -167 with the likeliest actions (seed 1), in 88 CPU seconds on one thread. On narrow
    networks the mean return over 4,000 steps is -638; by sac.py at equal settings -969, without batch norm -967 (10
    seeds; benchmarks/effects.py, crossq-pendulum). With tau 0.01 and no waiting SAC is as good from 3,000 steps on.

Metrics
    As in sac.py.

Differences
    - The command for HalfCheetah takes the settings of the authors' code (adityab/CrossQ, train.py); we have not read
      the paper's table. The default is for Pendulum: narrow critics, and training ends within the warm-up.
    - After the warm-up the authors' BatchRenorm (sbx/sac/policies.py) divides by sqrt(variance / r^2 + epsilon). Ours
      is the formula of batch renormalisation. r and d have their bounds at once, as there.
    - Stable-Baselines3-contrib 2.9 (common/torch_layers.py) divides the batch's variance by n - 1.
    - TorchRL (torchrl/modules/models/batchrenorm.py) discards the result of `num_batches_tracked.clamp_max`: r - 1 and
      d are doubled after two warm-ups, tripled after three.
    - CrossQ with --no-batch-norm is sac.py --tau 1, but for Adam.
"""

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

NAME, TITLE = "crossq", "CrossQ"
LOG_STD_BOUNDS = (-20.0, 2.0)  # as in the authors' code
EPSILON, MOMENTUM, R_MAX, D_MAX = 1e-3, 0.01, 3.0, 5.0  # of BatchRenorm
BETAS = (0.5, 0.999)  # of Adam, for actor and critics; the temperature has Adam's own 0.9


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "Pendulum-v1"
    """a Gymnasium environment with bounded continuous actions, or MODULE:NAME of one that MODULE registers"""
    total_timesteps: int = 5_000
    """environment steps, over all environments"""
    num_envs: int = 1
    """environments that are stepped together"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: float = 1e-3
    """learning rate of Adam, for actor, critics and temperature"""
    gamma: float = 0.99
    """discount"""
    alpha: float | None = None
    """a fixed temperature; None: learned"""
    target_entropy: float | None = None
    """target entropy in nats; None: -(action size)"""
    utd_ratio: int = 1
    """updates per environment step"""
    policy_frequency: int = 3
    """updates of the critics for one of actor and temperature"""
    batch_norm: bool = True
    """BatchRenorm before each layer of actor and critics; without it, SAC without target networks"""
    renorm_warmup: int = 100_000
    """training passes in which BatchRenorm is BatchNorm"""
    batch_size: int = 256
    """transitions per update"""
    buffer_size: int = 1_000_000
    """newest transitions that are kept, on the device"""
    learning_starts: int = 500
    """steps with uniformly random actions before the first update"""
    hidden_size: int = 256
    """units of the two hidden layers of the actor"""
    critic_size: int = 256
    """units of the two hidden layers of each critic; the authors have 2048"""
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


class BatchRenorm(nn.Module):
    """Batch renormalisation (Ioffe 2017, arXiv 1702.03275, algorithm 1) of rows (B, F). A pass in training mode moves
    the running statistics, one in evaluation mode uses them alone."""

    mean: Tensor  # (F,), running, as is the variance
    variance: Tensor
    passes: Tensor  # in training mode, so far

    def __init__(self, size: int, warmup: int):
        super().__init__()
        self.warmup, self.weight, self.bias = warmup, nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        std = (self.variance + EPSILON).sqrt()
        if not self.training:
            return self.weight * (x - self.mean) / std + self.bias
        mean, variance = x.mean(0), x.var(0, correction=0)
        batch_std = (variance + EPSILON).sqrt()
        with torch.no_grad():  # r and d are constants: with them, x is normalised as in evaluation
            warm = self.passes >= self.warmup
            r = torch.where(warm, (batch_std / std).clamp(1 / R_MAX, R_MAX), 1.0)
            d = torch.where(warm, ((mean - self.mean) / std).clamp(-D_MAX, D_MAX), 0.0)
            self.mean.lerp_(mean, MOMENTUM)
            self.variance.lerp_(variance, MOMENTUM)
            self.passes.add_(1)
        return self.weight * ((x - mean) / batch_std * r + d) + self.bias


def network(size_in: int, hidden_size: int, size_out: int, args: Args) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size, after in ((size_in, hidden_size), (hidden_size, hidden_size), (hidden_size, size_out)):
        layers += [BatchRenorm(size, args.renorm_warmup)] if args.batch_norm else []
        layers += [nn.Linear(size, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Actor(nn.Module):
    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        self.net = network(obs_size, args.hidden_size, 2 * action_size, args)

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
    """q1 and q2."""

    def __init__(self, obs_size: int, action_size: int, args: Args):
        sizes = obs_size + action_size, args.critic_size, 1
        super().__init__({f"q{i}": network(*sizes, args) for i in (1, 2)})

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Q_1, Q_2: (2, B, 1)."""
        both = torch.cat([obs, actions], -1)
        return torch.stack([q(both) for q in self.values()])


class Agent(nn.Module):
    """What is saved: actor, critics and log alpha. It is in evaluation mode outside of the losses."""

    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        self.actor = Actor(obs_size, action_size, args)
        self.critics = Critics(obs_size, action_size, args)
        self.log_alpha = nn.Parameter(torch.tensor(1.0 if args.alpha is None else args.alpha).log())
        self.eval()


def critic_loss(agent: Agent, batch: Transitions, noise: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of both critics' losses, Q_1 and the target y. noise (B, A). One pass of both kinds of rows through the
    critics, so that they share the statistics of the batch."""
    with torch.no_grad():
        next_actions, next_logps = agent.actor(batch.next_obs, noise)
    obs, actions = torch.cat([batch.obs, batch.next_obs]), torch.cat([batch.actions, next_actions])
    q, next_q = agent.critics(obs, actions).chunk(2, 1)
    with torch.no_grad():
        soft_value = next_q.amin(0) - agent.log_alpha.exp() * next_logps
        target = batch.rewards + gamma * (1 - batch.terminated) * soft_value
    return 0.5 * (q - target).square().mean((1, 2)).sum(), q[0].detach(), target


def actor_loss(agent: Agent, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Of SAC, and the log-densities (B, 1) of the actions without gradient. noise (B, A)."""
    actions, logps = agent.actor(obs, noise)
    q = agent.critics(obs, actions).amin(0)
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
    """One step of critics, actor and temperature, in this order; of the last two only where the update's number is a
    multiple of --policy-frequency. Each loss has the statistics of the batch in the network that it trains, and running
    ones in the other. Returns metrics, as tensors: reading them would make the CPU wait for the device at every
    update."""
    noise, next_noise = torch.randn(2, *batch.actions.shape, generator=generator, device=batch.obs.device)
    agent.critics.train()
    loss, q, target = critic_loss(agent, batch, next_noise, args.gamma)
    agent.critics.eval()
    optimizers.critics.zero_grad(set_to_none=True)
    loss.backward()
    optimizers.critics.step()
    grad_norm = torch.nn.utils.get_total_norm([p.grad for p in agent.critics.parameters()])
    metrics = {"q": q.mean(), "td_error": (q - target).abs().mean(), "grad_norm": grad_norm}

    if number % args.policy_frequency == 0:
        agent.critics.requires_grad_(False)  # the actor's gradient passes through them; theirs would be thrown away
        agent.actor.train()
        loss, logps = actor_loss(agent, batch.obs, noise)
        agent.actor.eval()
        optimizers.actor.zero_grad(set_to_none=True)
        loss.backward()
        optimizers.actor.step()
        agent.critics.requires_grad_(True)
        if optimizers.alpha is not None:
            optimizers.alpha.zero_grad(set_to_none=True)
            alpha_loss(agent.log_alpha, logps, args.target_entropy).backward()
            optimizers.alpha.step()
        metrics |= {"entropy": -logps.mean(), "alpha": agent.log_alpha.detach().exp()}
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
    agent = Agent(obs_size, action_size, args).to(device)
    score_agent = partial(evaluate, eval_envs, lambda *x: to_env(act(agent.actor, space, *x), space), args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
    optimizers = Optimizers(adam(agent.actor.parameters(), betas=BETAS), adam(agent.critics.parameters(), betas=BETAS),
                            adam([agent.log_alpha]) if args.alpha is None else None)  # fmt: skip
    losses = [torch.compile(loss) if args.compile else loss for loss in (critic_loss, actor_loss)]
    generator = torch.Generator(device).manual_seed(args.seed)
    replay = ReplayBuffer(args.buffer_size, (obs_size, action_size, 1, 1, obs_size), device)
    run = Run(args, NAME, args.env_id, args.total_timesteps, ("return", "eval/return", "alpha"))
    envs, obs = make_vector(make, args, run.step)
    parts = {name: optimizer for name, optimizer in optimizers._asdict().items() if optimizer}
    parts |= dict(agent=agent, generator=generator, replay=replay)
    run.restore(**parts)
    step, episodes, metrics = run.step, run.state.get("episodes", []), run.state.get("metrics", {})
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
            for number in range(args.utd_ratio * (step - args.num_envs), args.utd_ratio * step):
                batch = Transitions(*replay.sample(args.batch_size, generator))
                metrics |= update(agent, optimizers, batch, generator, args, number + 1, *losses)

        # evaluate
        due, logs = run.due(step, args.eval_every), run.due(step, args.log_every)
        if due or logs:
            columns = {name: value.item() for name, value in metrics.items()}
            columns["time/steps_per_second"] = run.speed(step)
            if logs:  # an evaluation in between leaves the episodes to the row that is due
                columns, episodes = columns | episode_columns(episodes), []
            run.log(step, **columns, **(score_agent() if due else {}))
        run.end_step(step, parts | dict(episodes=episodes, metrics=metrics))

    envs.close()
    curves = {"return": ("return", "eval/return"), "entropy": ("entropy",), "alpha": ("alpha",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train, NAME)
