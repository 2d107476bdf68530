r"""Rainbow: six extensions of DQN in one agent, each a flag.

Hessel et al. 2017, "Rainbow: Combining Improvements in Deep Reinforcement Learning" (arXiv 1710.02298).

Parent: c51.py. Double DQN, dueling streams, windows of n steps, prioritised replay and noisy layers are added to it.
Without them it is c51.py bit for bit: --no-double --no-dueling --no-noisy --no-prioritized --n-step 1.

Minimises over minibatches

    L(theta) = mean of w (- sum_i m_i log p_i(s_t, a_t))                                                     as c51.py
    m        = projection of  sum_k<n gamma^k r_t+k + gamma^n (1 - terminated) z  with pbar(s_t+n, a*)
    a*       = argmax_a Q(s_t+n, a),  Q = sum_i z_i p_i                               Double DQN, arXiv 1509.06461
    p        = softmax over atoms of  v_i(s) + a_i(s, a) - mean_a' a_i(s, a')            dueling, arXiv 1511.06581
    P(row)   = d^alpha / sum d^alpha,  d = KL(m || p) + 1e-6, alpha = --prioritized-replay-alpha  arXiv 1511.05952
    w        = (N P)^-beta / its maximum in the minibatch; N rows, beta from --prioritized-replay-beta to 1
    y        = (mu + sigma * f(e_out) f(e_in)^T) x + mu_b + sigma_b * f(e_out)        a noisy layer, arXiv 1706.10295

    n           --n-step; fewer where the episode ends before. What was cut off is bootstrapped from its last state
    z, p, pbar  atoms, probabilities by the network and by the target network, as in c51.py
    mu, sigma   learned; e normal, f(x) = sign(x) sqrt|x|; one noise for a minibatch, another one for each action taken

Run
    python algos/rainbow.py                                                             CartPole-v1
    python algos/rainbow.py --no-noisy                                                  less one part: also --no-double,
                                                            --no-dueling, --no-prioritized, --n-step 1
    python algos/rainbow.py --env-id package.module:Name-v0 --env-kwargs size=5         your own environment
    python algos/rainbow.py --evaluate RUN --eval-episodes 100 --capture-video          scores a saved agent

Expect
    CartPole-v1: greedy returns of 175, 372, 389, 389 and 435 after 4,000, 8,000, ..., 20,000 steps (seed 1; 55
    seconds on two cores). Rainbow's advantage on Atari does not show here: in 5,000 steps the mean of five evaluations
    is 166, of c51.py 181, of dqn.py 118 (10 seeds; benchmarks/effects.py, rainbow-cartpole).

Metrics
    eval/return         by the mean weights; eval/return_stochastic: with noise
    epsilon             probability of a random action; 0 with --noisy once learning has started
    q                   mean of Q(s, a) over the newest batch; cannot leave [--v-min, --v-max]: near a bound, widen them
    clipped             share of targets whose mean lies outside [--v-min, --v-max]; 0, else widen them

Differences
    - Settings for CartPole; the paper's are for Atari (alpha, beta, n and sigma are the paper's).
    - d is the divergence itself. Kaixhin/Rainbow takes the cross-entropy, which is above 0 where all is learned.
    - Q(s_t+n) and p(s_t) have the same noise in an update, as in Kaixhin/Rainbow; the paper of noisy networks draws one
      for each. CleanRL's rainbow_atari.py draws noise for each weight, though its comment says factorised.
    - Every step of an episode starts a window. In CleanRL's rainbow_atari.py the last n - 1 before a termination start
      none, and where an episode is cut off windows reach into the next one.
    - The sum of priorities is taken anew for each minibatch instead of kept in a tree. A new row has the largest
      priority that there is; other code keeps the largest that there ever was.
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

NAME, TITLE = "rainbow", "Rainbow"


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "CartPole-v1"
    """a Gymnasium environment with discrete actions, or MODULE:NAME of one that MODULE registers"""
    total_timesteps: int = 20_000
    """environment steps, over all environments"""
    num_envs: int = 1
    """environments that are stepped together"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: float = 1e-3
    """learning rate of Adam"""
    gamma: float = 0.99
    """discount"""
    double: bool = True
    """Double DQN: the online network chooses the action that the target network values"""
    dueling: bool = True
    """a stream for the value of the state and one for the advantages of the actions"""
    noisy: bool = True
    """noise in the layers of both streams explores, in place of epsilon"""
    n_step: int = 3
    """steps whose rewards are summed before the bootstrap"""
    prioritized: bool = True
    """transitions are drawn by how wrong they were; else uniformly"""
    prioritized_replay_alpha: float = 0.5
    """exponent of the priorities; 0: uniform"""
    prioritized_replay_beta: float = 0.4
    """exponent of the importance weights at the start; it rises linearly to 1 at the end"""
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
    rewards: Tensor  # (B, 1), the discounted sum of those of the steps between
    terminated: Tensor  # (B, 1), 0 or 1; 0 where an episode was only cut off
    next_obs: Tensor  # (B, D)
    steps: Tensor  # (B, 1), how many lie between: n, fewer before the end of an episode
    weights: Tensor  # (B, 1), of importance


class NoisyLinear(nn.Linear):
    """Weights mu + sigma * f(e_out) f(e_in)^T, biases mu + sigma * f(e_out), f(x) = sign(x) sqrt|x|, e standard normal
    (arXiv 1706.10295, equations 10 and 11). mu is torch's weight and bias, which begin as in the paper."""

    def __init__(self, size_in: int, size_out: int):
        super().__init__(size_in, size_out)
        self.sigma = nn.Parameter(torch.full((size_out, size_in), 0.5 / size_in**0.5))
        self.sigma_bias = nn.Parameter(torch.full((size_out,), 0.5 / size_in**0.5))
        self.noise: tuple[Tensor | float, Tensor | float] = 0.0, 0.0

    def draw(self, rows: int, generator: torch.Generator, scale: Tensor | float) -> None:
        """Noise for each of `rows` rows, or one for all of a minibatch; `scale` multiplies it."""
        sizes = (rows, self.in_features), (rows, self.out_features)
        normal = [torch.randn(size, generator=generator, device=generator.device) for size in sizes]
        f_in, f_out = (x.sign() * x.abs().sqrt() for x in normal)
        self.noise = f_in, f_out * scale

    def forward(self, x: Tensor) -> Tensor:
        f_in, f_out = self.noise
        return super().forward(x) + f_out * F.linear(f_in * x, self.sigma, self.sigma_bias)


def network(size_in: int, hidden_size: int, size_out: int, linear: type[nn.Linear]) -> nn.Sequential:
    """The first layer, which stands where the paper has convolutions, is never noisy."""
    return nn.Sequential(nn.Linear(size_in, hidden_size), nn.ReLU(), linear(hidden_size, hidden_size), nn.ReLU(),
                         linear(hidden_size, size_out))  # fmt: skip


class QNetwork(nn.Module):
    atoms: Tensor

    def __init__(self, obs_size: int, num_actions: int, args: Args):
        super().__init__()
        linear = NoisyLinear if args.noisy else nn.Linear
        self.net, self.value = network(obs_size, args.hidden_size, num_actions * args.num_atoms, linear), None
        if args.dueling:  # it shares the first layer
            self.value = network(obs_size, args.hidden_size, args.num_atoms, linear)[2:]
        self.register_buffer("atoms", torch.linspace(args.v_min, args.v_max, args.num_atoms))

    def log_probs(self, obs: Tensor) -> Tensor:
        """Of each action's returns, (B, A, N) for N atoms."""
        features = self.net[:2](obs)
        logits = self.net[2:](features).unflatten(1, (-1, len(self.atoms)))
        if self.value is not None:
            logits = self.value(features)[:, None] + logits - logits.mean(1, keepdim=True)
        return logits.log_softmax(-1)

    def forward(self, obs: Tensor) -> Tensor:
        """Q, the mean return (B, A)."""
        return self.log_probs(obs).exp() @ self.atoms

    def draw_noise(self, rows: int, generator: torch.Generator, scale: Tensor | float = 1.0) -> None:
        for layer in self.modules():
            if isinstance(layer, NoisyLinear):
                layer.draw(rows, generator, scale)


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


def merge(window: np.ndarray, gamma: float) -> np.ndarray:
    """m successive steps (m, 2 D + 3) as one row (2 D + 4) of the replay buffer: the first observation and action, the
    discounted sum of rewards, how and where the last step ended, and m."""
    first, last, reward = window[0], window[-1], window.shape[1] // 2
    total = gamma ** np.arange(len(window)) @ window[:, reward]
    return np.concatenate([first[:reward], [total], last[reward + 1 :], [len(window)]], dtype=np.float32)


class Priorities:
    """p, by which rows of the replay buffer are drawn (arXiv 1511.05952, algorithm 1). 0 where there is no row yet."""

    def __init__(self, capacity: int, device: torch.device):
        self.values = torch.zeros(capacity, dtype=torch.float64, device=device)

    def add(self, count: int, total: int) -> None:
        """The newest `count` of `total` rows get the largest priority that there is, so that each is soon drawn."""
        places = torch.arange(total - count, total, device=self.values.device) % len(self.values)
        largest = self.values.max()
        self.values[places] = torch.where(largest > 0, largest, 1.0)

    def draw(self, batch_size: int, beta: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Numbers of rows (B,), one from each of B equal parts of the sum of p, and weights (B, 1): (N P)^-beta over
        their maximum."""
        ends, held = self.values.cumsum(0), self.values.count_nonzero()
        parts = torch.rand(batch_size, generator=generator, dtype=torch.float64, device=ends.device)
        parts += torch.arange(batch_size, device=ends.device)
        index = torch.searchsorted(ends, parts / batch_size * ends[-1], right=True).clamp(max=held - 1)
        weights = (held * self.values[index] / ends[-1]) ** -beta
        return index, (weights / weights.max()).float()[:, None]

    def renew(self, index: Tensor, divergence: Tensor, alpha: float) -> None:
        self.values[index] = (divergence.double() + 1e-6) ** alpha

    def state_dict(self) -> dict[str, Tensor]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.values.copy_(state["values"])


def rainbow_loss(agent: Agent, batch: Transitions, args: Args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss; without gradient Q(s, a) and the mean of the target before it is clipped, (B, 1) each, and the
    divergence of the target from what is learned (B,)."""
    atoms, row = agent.q.atoms, torch.arange(len(batch.obs), device=batch.obs.device)
    with torch.no_grad():
        next_probs = agent.target.log_probs(batch.next_obs).exp()
        chosen = (agent.q(batch.next_obs) if args.double else next_probs @ atoms).argmax(1)
        values = batch.rewards + args.gamma**batch.steps * (1 - batch.terminated) * atoms
        target = project(next_probs[row, chosen], values, atoms)
        mean = (next_probs[row, chosen] * values).sum(1, keepdim=True)
    log_probs = agent.q.log_probs(batch.obs)[row, batch.actions[:, 0].long()]
    q = log_probs.detach().exp() @ atoms
    losses = -(target * log_probs).sum(1)
    divergence = (losses.detach() + torch.xlogy(target, target).sum(1)).clamp(min=0)
    return (batch.weights[:, 0] * losses).mean(), q[:, None], mean, divergence


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Transitions, number: int, args: Args,
           generator: torch.Generator, loss_function: Callable = rainbow_loss
           ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One step of the network, and of the target network where the update's number says so. Returns Q(s, a) and the
    target y, (B, 1) each, and divergences (B,), for the priorities."""
    for net in (agent.q, agent.target):
        net.draw_noise(1, generator)
    loss, q, target, divergence = loss_function(agent, batch, args)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if number % args.target_network_frequency == 0:
        with torch.no_grad():
            torch._foreach_lerp_(list(agent.target.parameters()), list(agent.q.parameters()), args.tau)
    return q, target, divergence


def metrics(agent: Agent, q: Tensor, target: Tensor) -> dict[str, float]:
    """Of the newest update, whose gradients are still there."""
    grad_norm = torch.nn.utils.get_total_norm([p.grad for p in agent.q.parameters() if p.grad is not None])
    middle, half_width = agent.q.atoms[[0, -1]].mean(), (agent.q.atoms[-1] - agent.q.atoms[0]) / 2
    clipped = ((target - middle).abs() > 1.001 * half_width).float().mean()
    return {"q": q.mean().item(), "td_error": (q - target).abs().mean().item(), "grad_norm": grad_norm.item(),
            "clipped": clipped.item()}  # fmt: skip


def exploration(step: int, args: Args) -> float:
    """The probability of a random action: 1 until learning starts, then 0 with --noisy, else on the line from --start-e
    at step 0 to --end-e."""
    if step < args.learning_starts:
        return 1.0
    if args.noisy:
        return 0.0
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


def act(agent: Agent, obs: np.ndarray, epsilon: np.ndarray | float, generator: torch.Generator,
        scale: Tensor | float = 1.0) -> np.ndarray:  # fmt: skip
    """Actions (N, 1), numbers from 0, of observations (N, D): random ones with probability `epsilon`, else those of the
    largest Q, whose noise, new for each row, is multiplied by `scale`. Both are one number or (N, 1)."""
    agent.q.draw_noise(len(obs), generator, scale)
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
    end_e = 0.0 if args.noisy else args.end_e
    score_agent = partial(evaluate, eval_envs, lambda obs, scale, generator: space.start + act(
        agent, obs, end_e * scale.cpu().numpy(), generator, scale)[:, 0], args, device)  # fmt: skip
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    optimizer = torch.optim.Adam(agent.q.parameters(), lr=args.learning_rate, fused=True)
    loss_function = torch.compile(rainbow_loss) if args.compile else rainbow_loss
    generator = torch.Generator(device).manual_seed(args.seed)
    replay = ReplayBuffer(args.buffer_size, (obs_size, 1, 1, 1, obs_size, 1), device)
    priorities = Priorities(args.buffer_size, device)
    run = Run(args, NAME, args.env_id, args.total_timesteps, ("return", "eval/return", "q"))
    envs, obs = make_vector(make, args, run.step)
    parts = dict(agent=agent, optimizer=optimizer, generator=generator, replay=replay, priorities=priorities)
    run.restore(**parts)
    step, episodes = run.step, run.state.get("episodes", [])
    windows: list[list[np.ndarray]] = [[] for _ in range(args.num_envs)]  # the newest steps, fewer than n
    while step < run.total:
        # collect
        epsilon = exploration(step, args)
        actions = act(agent, obs, epsilon, generator)
        next_obs, true_obs, rewards, terminated, truncated, ended = step_vector(envs, space.start + actions[:, 0])
        taken = np.concatenate([obs, actions, rewards[:, None], terminated[:, None], true_obs], 1, dtype=np.float32)
        rows = []
        for window, row, end in zip(windows, taken, terminated | truncated):
            window.append(row)
            while len(window) == args.n_step or (end and window):
                rows.append(merge(np.stack(window), args.gamma))
                window.pop(0)
        if rows:
            replay.add(np.stack(rows))
            priorities.add(min(len(rows), args.buffer_size), replay.total)
        before, step, obs, episodes = step, step + args.num_envs, next_obs, episodes + ended

        # update
        newest = None
        if step > args.learning_starts and replay.total:
            beta = args.prioritized_replay_beta + (1 - args.prioritized_replay_beta) * step / args.total_timesteps
            rounds = (args.gradient_steps * (n // args.train_frequency) for n in (before, step))
            for number in range(*rounds):
                if args.prioritized:
                    index, weights = priorities.draw(args.batch_size, beta, generator)
                    drawn = [*replay.rows[index].split(replay.sizes, 1), weights]
                else:
                    drawn = [*replay.sample(args.batch_size, generator), torch.ones(args.batch_size, 1, device=device)]
                batch = Transitions(*drawn)
                *newest, divergence = update(agent, optimizer, batch, number + 1, args, generator, loss_function)
                if args.prioritized:
                    priorities.renew(index, divergence, args.prioritized_replay_alpha)

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
