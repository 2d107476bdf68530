r"""Proximal Policy Optimization with action masks (maskable PPO).

Huang and Ontanon 2020, "A Closer Look at Invalid Action Masking in Policy Gradient Algorithms" (arXiv 2006.14171).

Parent: ppo.py. The policy chooses among the actions that the environment allows in a state.

A logit of an action that is not allowed becomes minus infinity. So it has probability 0, is never drawn, and gets no
gradient; those that are allowed share the whole probability. The rest is PPO, of this policy:

    pi_theta(a | s) = m(s, a) exp l_theta(s, a) / sum_b m(s, b) exp l_theta(s, b)
    rho_t           = pi_theta(a_t | s_t) / pi_old(a_t | s_t)      both with the mask of s_t
    H_t             = - sum over allowed a of pi_theta(a | s_t) log pi_theta(a | s_t)

    m, l_theta        mask, 1 where an action is allowed, and the logits; J, A_t and R_t as in ppo.py
    MultiDiscrete     one softmax for each choice; the mask holds those of all choices, one after the other

The environment has a method action_masks(), as for sb3-contrib, or gives info["action_mask"] in reset and step, as
Gymnasium's Taxi does. `pi_theta` is a policy like any other, so its gradient is the policy gradient (their section 3).

Run
    python algos/ppo_mask.py                                                     Board-v0, 2 to 4 of 100 actions
    python algos/ppo_mask.py --env-kwargs mask=false --total-timesteps 40960     the same without its masks
    python algos/ppo_mask.py --env-id Taxi-v4 --total-timesteps 300000           Gymnasium's, from 1.3 on

Expect
    Board-v0: sampled actions get -4.6 after 8,192 steps, in about 5 seconds (30 seeds, standard deviation 0.8). The
    best policy gets -4.2 on average. Without masks, which is ppo.py bit for bit, they get -94 (10 seeds;
    benchmarks/effects.py).

Metrics
    As in ppo.py. entropy is that over allowed actions, so it may rise where more of them are allowed.

Differences
    - sb3-contrib sets logits to -1e8 where the mask is 0; minus infinity makes the probability exactly 0.
    - Observations are flattened, images too. The mask is not shown to the networks, and not normalised.
    - A mask may allow nothing where an episode is over; anywhere else that ends the run with an error.
    - Evaluation uses masks. The paper also takes them away after training, which is not done here.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.control import (
    EnvArgs,
    episode_columns,
    evaluate,
    make_env,
    make_vector,
    score_saved,
    step_vector,
    try_out,
)
from utils.core import Run, UserError, main, prepare, preset

NAME, TITLE = "ppo_mask", "Maskable PPO"
PRESETS = {  # defaults, for arguments left at None
    "discrete": dict(total_timesteps=20_480, num_envs=8, num_steps=128, learning_rate=1e-3, num_minibatches=4,
                     update_epochs=8),
}  # fmt: skip
CLIP_NORMALIZED = 10.0  # bounds of normalised observations and rewards, as in baselines


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "Board-v0"
    """a Gymnasium environment, or MODULE:NAME of one that MODULE registers"""
    total_timesteps: int | None = None
    """environment steps, over all environments"""
    num_envs: int | None = None
    """environments that are stepped together: N"""
    num_steps: int | None = None
    """steps of each environment between updates: T"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: float | None = None
    """learning rate of Adam, at the start"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of the advantages"""
    num_minibatches: int | None = None
    """minibatches per epoch"""
    update_epochs: int | None = None
    """epochs over each rollout"""
    clip_coef: float = 0.2
    """clip of the ratio: epsilon"""
    clip_vloss: bool = False
    """clip the change of the value by clip_coef, too"""
    ent_coef: float = 0.0
    """weight of the entropy bonus: c_ent"""
    vf_coef: float = 0.5
    """weight of the value loss: c_vf"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""
    target_kl: float | None = None
    """end the epochs of a rollout when approx_kl exceeds this"""
    normalize: bool = True
    """normalise observations and rewards by running statistics"""
    normalize_advantages: bool = True
    """normalise advantages in every minibatch"""
    hidden_size: int = 64
    """units of the two hidden layers of policy and value network"""
    compile: bool = False
    """compile the loss (half a minute at the start)"""
    threads: int = 1
    """CPU threads: a second makes networks this small a tenth faster; 0: OMP_NUM_THREADS where set, else two"""
    save_every: int = 20_000
    """environment steps between checkpoints"""


class Board(gym.Env):
    """A piece on a board of n x n cells is to go to the last cell, in a corner. An action names a cell and a direction,
    4 n^2 in all; 2 to 4 are valid: those that name the piece's cell and keep it on the board. The others do nothing. So
    do orders to units in a game of strategy (Huang and Ontanon 2020). The reward is -1; the corner ends the episode,
    100 steps cut it off. The best return is minus the distance, rows and columns together.

    mask: what action_masks() allows, the valid actions or all.
    """

    MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])

    def __init__(self, n: int = 5, mask: bool = True):
        self.n, self.mask, self.action_space = n, mask, gym.spaces.Discrete(4 * n * n)
        self.observation_space = gym.spaces.Box(0, 1, (n * n,))

    def targets(self) -> np.ndarray:
        """The cells beside the piece in the four directions, (4,); -1 for those that are not there."""
        cells = np.array(divmod(self.piece, self.n)) + self.MOVES
        return np.where(((cells >= 0) & (cells < self.n)).all(1), cells @ [self.n, 1], -1)

    def action_masks(self) -> np.ndarray:
        valid = np.full((self.n**2, 4), not self.mask)
        valid[self.piece] |= self.targets() >= 0
        return valid.flatten()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.piece = 0, int(self.np_random.integers(self.n**2 - 1))
        return np.eye(self.n**2, dtype=np.float32)[self.piece], {}

    def step(self, action):
        cell, direction = divmod(int(action), 4)
        if cell == self.piece and self.targets()[direction] >= 0:
            self.piece = int(self.targets()[direction])
        self.time += 1
        obs = np.eye(self.n**2, dtype=np.float32)[self.piece]
        return obs, -1.0, self.piece == self.n**2 - 1, self.time == 100, {}


gym.register("Board-v0", Board)


class Masked(gym.Wrapper):
    """Puts the mask of an observation in front of it: K numbers, 1 where an action is allowed. So the mask goes where
    the observation goes: into the rollout, through processes, to evaluation."""

    time = 0  # steps of the episode

    def __init__(self, env: gym.Env):
        super().__init__(env)
        space: Any = env.observation_space
        self.parts = choices(env.action_space)
        self.starts = np.cumsum([0, *self.parts[:-1]])
        low, high = (np.append(np.full(sum(self.parts), i), bound) for i, bound in enumerate((space.low, space.high)))
        self.observation_space = gym.spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype)

    def with_mask(self, obs: np.ndarray, info: dict, over: bool = False) -> np.ndarray:
        """(D,) -> (K + D,). Raises UserError where no mask came, or one that does not fit or allows nothing. After the
        last observation of an episode (`over`) nothing is done, so its mask may."""
        who = f"the environment {self.env.unwrapped}, step {self.time} of an episode:"
        if "action_mask" in info:
            mask = info["action_mask"]
        elif self.env.has_wrapper_attr("action_masks"):
            mask = self.env.get_wrapper_attr("action_masks")()
        else:
            wanted = "it must have action_masks() or give info['action_mask'] in reset and step; ppo.py needs no masks"
            raise UserError(f"{who} there is no mask of the actions: {wanted}")
        mask = np.hstack(mask).astype(bool)  # of several choices: one array, or one for each
        if mask.shape != (sum(self.parts),):
            right = f"its actions {self.action_space} need {sum(self.parts)}, one after the other"
            raise UserError(f"{who} the action mask has {mask.size} entries: {right}")
        if not over and not np.logical_or.reduceat(mask, self.starts).all():
            right = "it must allow an action, or end the episode"
            raise UserError(f"{who} the action mask {mask.astype(int).tolist()} leaves no choice: {right}")
        return np.append(mask, obs).astype(self.observation_space.dtype)

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        self.time = 0
        return self.with_mask(obs, info), info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.time += 1
        obs = self.with_mask(obs, info, terminated or truncated)
        rest = {name: value for name, value in info.items() if name != "action_mask"}  # a vector would gather it
        return obs, reward, terminated, truncated, rest


def make_masked(args: Args) -> gym.Env:
    """As `make_env`, with masks. Raises UserError for actions that are no choices."""
    env = make_env(args)
    if not isinstance(env.action_space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)):
        wanted = "masks need Discrete, MultiDiscrete or MultiBinary"
        raise UserError(f"--env-id {args.env_id} has the action space {env.action_space}: {wanted}")
    return Masked(env)


def choices(space) -> list[int]:
    """The number of actions of each choice; K is their sum."""
    if isinstance(space, gym.spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    return [int(space.n)] if isinstance(space, gym.spaces.Discrete) else space.nvec.flatten().tolist()


class Agent(nn.Module):
    """Separate networks for policy and value, two tanh layers each, which do not see the mask. Orthogonal weights (gain
    sqrt 2; policy head 0.01, value head 1), zero biases. Actions are categorical, `parts` the number of choices of
    each."""

    def __init__(self, obs_size: int, space: gym.Space, hidden_size: int):
        super().__init__()
        self.space, self.parts = space, choices(space)
        self.actor = network(obs_size - sum(self.parts), hidden_size, sum(self.parts), 0.01)
        self.critic = network(obs_size - sum(self.parts), hidden_size, 1, 1.0)

    def logits(self, obs: Tensor) -> Tensor:
        """(..., K + D) -> (..., K): minus infinity, hence probability 0 and no gradient, where the mask is 0."""
        return self.actor(obs[..., sum(self.parts) :]).masked_fill(obs[..., : sum(self.parts)] == 0, -torch.inf)

    def value(self, obs: Tensor) -> Tensor:
        """(..., K + D) -> (...)"""
        return self.critic(obs[..., sum(self.parts) :])[..., 0]

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """What makes `act` a sample. It is drawn for a whole rollout at once, which is twice as fast as at each step.
        Gumbel noise: the largest of logits plus Gumbel noise is a draw from the softmax. With noise 0, `act` gives the
        likeliest action."""
        noise = torch.empty(*shape, sum(self.parts), device=generator.device)
        return -noise.exponential_(generator=generator).log()

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Actions (N, A), the index of each choice, of observations (N, K + D)."""
        out = self.logits(obs)
        return torch.stack([part.argmax(-1) for part in (out + noise).split(self.parts, -1)], -1)

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, entropy and value, each (...)."""
        return *self.log_prob(obs, actions), self.value(obs)

    def log_prob(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of actions (..., A) among those allowed, and entropy over these in nats, each (...)."""
        out = self.logits(obs)
        logp = entropy = out.new_zeros(())
        for i, part in enumerate(out.split(self.parts, -1)):
            logps = part.log_softmax(-1)
            logp = logp + logps.gather(-1, actions[..., i : i + 1].long())[..., 0]
            entropy = entropy - (logps.exp() * logps.masked_fill(logps == -torch.inf, 0.0)).sum(-1)  # 0 log 0 is 0
        return logp, entropy

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Actions (N, A) as the vector environment takes them."""
        return actions.reshape(-1, *self.space.shape) + getattr(self.space, "start", 0)


def orthogonal(layers: list, gains: list[float]) -> None:
    for layer, gain in zip(layers, gains):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)


def network(size_in: int, hidden_size: int, size_out: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(size_in, hidden_size), nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, size_out)]
    orthogonal(layers, [2**0.5, 2**0.5, gain])
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class RunningMeanStd:
    """Mean and (population) variance over all rows seen so far, in float64 (Chan et al. 1979, parallel variance). The
    first rows weigh as if 1e-4 rows of mean 0 and variance 1 had come before, as in OpenAI's baselines."""

    def __init__(self, shape: tuple[int, ...] = ()):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, batch: np.ndarray) -> None:
        """batch: (rows, *shape)."""
        rows = len(batch)
        mean = np.add.reduce(batch, 0, dtype=np.float64) / rows
        deviations = batch - mean
        squares, delta, total = np.add.reduce(deviations * deviations, 0), mean - self.mean, self.count + rows
        self.var = (self.var * self.count + squares + delta * delta * (self.count * rows / total)) / total
        self.mean = self.mean + delta * (rows / total)
        self.count = total

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.mean, self.var, self.count = state["mean"].numpy(), state["var"].numpy(), state["count"].item()


class Statistics:
    """Running statistics of observations and of discounted returns, one set for all environments, frozen in
    evaluation. Without --normalize they change nothing; masks, the first `masks` numbers, stay 0 and 1 in any case."""

    def __init__(self, obs_size: int, masks: int, num_envs: int, gamma: float, enabled: bool):
        self.masks, self.obs, self.returns = masks, RunningMeanStd((obs_size,)), RunningMeanStd()
        self.enabled, self.gamma, self.discounted = enabled, gamma, np.zeros(num_envs)

    def observe(self, obs: np.ndarray, count: bool = False) -> np.ndarray:
        """Normalises observations (N, K + D). Only training counts them, and only those that it acts on."""
        if not self.enabled:
            return obs.astype(np.float32)
        if count:
            self.obs.update(obs)
        scaled = (obs - self.obs.mean) / np.sqrt(self.obs.var + 1e-8)
        scaled[:, : self.masks] = obs[:, : self.masks]
        return scaled.clip(-CLIP_NORMALIZED, CLIP_NORMALIZED).astype(np.float32)

    def reward(self, rewards: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Counts rewards (N,) and divides them by the standard deviation of the discounted return so far."""
        if not self.enabled:
            return rewards
        self.discounted = self.discounted * self.gamma + rewards
        self.returns.update(self.discounted)
        self.discounted = self.discounted * ~done
        return np.clip(rewards / np.sqrt(self.returns.var + 1e-8), -CLIP_NORMALIZED, CLIP_NORMALIZED)

    def weights(self) -> dict[str, Tensor]:
        """For RUN/model: the networks take (obs - obs_mean) / sqrt(obs_var + 1e-8), clipped."""
        state = self.obs.state_dict()
        return {f"obs_{name}": state[name][self.masks :] for name in ("mean", "var")} if self.enabled else {}

    def state_dict(self) -> dict:
        """Without the discounted returns so far: a resumed run begins new episodes."""
        return {"obs": self.obs.state_dict(), "returns": self.returns.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.obs.load_state_dict(state["obs"])
        self.returns.load_state_dict(state["returns"])


class Batch(NamedTuple):
    """What one iteration learns from: T steps of N environments."""

    obs: Tensor  # (T, N, K + D), masks and normalised observations
    actions: Tensor  # (T, N, A), before clipping
    rewards: Tensor  # (T, N) float32, normalised
    next_obs: Tensor  # like obs: what the step led to, before any reset
    terminated: Tensor  # (T, N) bool
    truncated: Tensor  # (T, N) bool


def gae(rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, done: Tensor, gamma: float,
        gae_lambda: float) -> Tensor:  # fmt: skip
    """Generalised advantages (arXiv 1506.02438, equation 16), all (T, N). Termination ends the bootstrap from
    `next_values`, truncation does not; the recursion ends at both, because the next row is another episode."""
    deltas = rewards + gamma * next_values * ~terminated - values
    decay = gamma * gae_lambda * (~done).to(deltas)
    advantages, last = torch.empty_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = last = deltas[t] + decay[t] * last
    return advantages


def ppo_loss(agent: Agent, obs: Tensor, actions: Tensor, old_logps: Tensor, advantages: Tensor, returns: Tensor,
             old_values: Tensor, args: Args) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss of one minibatch, to be minimised (equation 9 with the sign turned), and (approx_kl, clip_fraction,
    entropy). obs (B, D), actions (B, A), the others (B,)."""
    logps, entropy, values = agent(obs, actions)
    log_ratio = logps - old_logps
    ratio = log_ratio.exp()
    if args.normalize_advantages:  # per minibatch, as CleanRL and SB3; the paper does not, and gradients scale with it
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    errors = (values - returns) ** 2
    if args.clip_vloss:  # as baselines; arXiv 2006.05990 found that it hurts
        near = old_values + (values - old_values).clamp(-args.clip_coef, args.clip_coef)
        errors = torch.max(errors, (near - returns) ** 2)
    loss = policy_loss - args.ent_coef * entropy.mean() + args.vf_coef * 0.5 * errors.mean()
    with torch.no_grad():
        outside = ((ratio - 1).abs() > args.clip_coef).float()
        metrics = torch.stack([(ratio - 1 - log_ratio).mean(), outside.mean(), entropy.mean()])
    return loss, metrics


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Batch, generator: torch.Generator, args: Args,
           loss_function: Callable = ppo_loss) -> dict[str, float]:  # fmt: skip
    """`update_epochs` passes over one rollout in minibatches. Returns metrics."""
    with torch.no_grad():  # of the whole rollout at once, before the first epoch
        old_logps, _, values = agent(batch.obs, batch.actions)
        next_values = agent.value(batch.next_obs)  # truncated episodes, too; CleanRL treats truncation as termination
        done = batch.terminated | batch.truncated
        advantages = gae(batch.rewards, values, next_values, batch.terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + values
    rows = [x.flatten(0, 1) for x in (batch.obs, batch.actions, old_logps, advantages, returns, values)]
    norms, epochs = [], 0
    while epochs < args.update_epochs:
        epochs += 1
        order, metrics = torch.randperm(len(rows[0]), generator=generator, device=rows[0].device), []
        for minibatch in zip(*(x[order].tensor_split(args.num_minibatches) for x in rows)):
            loss, numbers = loss_function(agent, *minibatch, args)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm))
            optimizer.step()
            metrics.append(numbers)
        approx_kl, clip_fraction, entropy = torch.stack(metrics).mean(0).tolist()
        if args.target_kl is not None and approx_kl > args.target_kl:
            break  # SB3 stops between minibatches, at 1.5 times --target-kl
    unexplained = ((returns - values).var() / returns.var().clamp(min=1e-12)).item()
    return {"explained_variance": 1 - unexplained, "approx_kl": approx_kl, "clip_fraction": clip_fraction,
            "entropy": entropy, "grad_norm": torch.stack(norms).mean().item(), "epochs": epochs}  # fmt: skip


@torch.no_grad()
def collect(agent: Agent, envs, obs: np.ndarray, statistics: Statistics,
            generator: torch.Generator, args: Args) -> tuple[Batch, np.ndarray, list]:  # fmt: skip
    """T steps of N environments from observations `obs` (N, D), which the statistics have counted.

    Returns a Batch, the observations to go on from, and (return, length) of the episodes that ended.
    """
    device, shape = generator.device, (args.num_steps, args.num_envs)
    noise = agent.noise(shape, generator)
    actions, episodes, current = [], [], statistics.observe(obs)
    seen, next_obs = (np.empty((args.num_steps, *current.shape), current.dtype) for _ in range(2))
    rewards, (terminated, truncated) = np.empty(shape, np.float32), np.empty((2, *shape), bool)
    for t in range(args.num_steps):
        seen[t] = current
        actions.append(agent.act(torch.from_numpy(seen[t]).to(device), noise[t]))
        executed = agent.to_env(actions[t].cpu().numpy())
        obs, true_obs, reward, terminated[t], truncated[t], ended = step_vector(envs, executed)
        rewards[t] = statistics.reward(reward, terminated[t] | truncated[t])
        current = statistics.observe(obs, count=True)
        next_obs[t] = statistics.observe(true_obs) if ended else current
        episodes += ended
    arrays = (seen, rewards, next_obs, terminated, truncated)
    seen, *others = (torch.from_numpy(array).to(device) for array in arrays)
    return Batch(seen, torch.stack(actions), *others), obs, episodes


def check(args: Args) -> None:
    """Raises UserError for impossible settings."""
    rows = args.num_envs * args.num_steps
    if rows % args.num_minibatches or rows // args.num_minibatches < 2:
        parts = f"the {rows} rows of a rollout (num_envs * num_steps) into parts of at least 2"
        raise UserError(f"--num-minibatches {args.num_minibatches} must divide {parts}")
    if args.total_timesteps < rows:
        raise UserError(f"--total-timesteps {args.total_timesteps} is less than one rollout of {rows} steps")


@torch.no_grad()
def act_in_evaluation(agent: Agent, statistics: Statistics, obs: np.ndarray, scale: Tensor,
                      generator: torch.Generator) -> np.ndarray:  # fmt: skip
    """What `evaluate` calls: actions (N, A) of raw observations (N, D)."""
    normalized = torch.from_numpy(statistics.observe(obs)).to(generator.device)
    return agent.to_env(agent.act(normalized, agent.noise((len(obs),), generator) * scale).cpu().numpy())


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_masked, args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape[0], env.action_space
    settings = preset(args, PRESETS, "discrete")
    check(args)
    agent = Agent(obs_size, space, args.hidden_size).to(device)
    statistics = Statistics(obs_size, sum(agent.parts), args.num_envs, args.gamma, args.normalize)
    score_agent = partial(evaluate, eval_envs, partial(act_in_evaluation, agent, statistics), args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent, statistics=statistics)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    loss_function = torch.compile(ppo_loss) if args.compile else ppo_loss
    rollout = args.num_envs * args.num_steps
    run = Run(args, NAME, args.env_id, args.total_timesteps // rollout * rollout, ("return", "eval/return"))
    run.print(settings)
    envs, obs = make_vector(make, args, run.step, infos=("action_mask",))
    parts = dict(agent=agent, optimizer=optimizer, statistics=statistics, generator=generator)
    if not run.restore(**parts):
        statistics.observe(obs, count=True)
    step = run.step
    while step < run.total:
        if args.anneal_lr:  # everywhere; the paper anneals for Atari only
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / run.total)

        # collect
        batch, obs, episodes = collect(agent, envs, obs, statistics, generator, args)
        step += rollout

        # update
        columns = update(agent, optimizer, batch, generator, args, loss_function) | episode_columns(episodes)
        columns |= {"learning_rate": optimizer.param_groups[0]["lr"], "time/steps_per_second": run.speed(step)}

        # evaluate
        if run.due(step, args.eval_every):
            columns |= score_agent()
        run.log(step, **columns)
        run.end_step(step, parts)

    envs.close()
    curves = {"return": ("return", "eval/return"), "explained variance": ("explained_variance",),
              "entropy": ("entropy",)}  # fmt: skip
    return run.finish(agent.state_dict() | statistics.weights(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train, NAME)
