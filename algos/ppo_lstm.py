r"""Proximal Policy Optimization with an LSTM (recurrent PPO).

PPO: Schulman et al. 2017 (arXiv 1707.06347). LSTM: Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al.
2000. How to put them together is told by Huang et al. 2022, "The 37 Implementation Details of PPO" (LSTM, 5 details).

Parent: ppo.py. The policy and the value depend on what was seen before, by the state of an LSTM.

Some environments do not show all that matters: of a pole, its angle but not where it is falling. The state (h, c) sums
up what an episode has shown so far. It is empty at the start of every episode, so nothing passes from one to the next:

    x_t         = tanh(W s_t + b)                                    of images: an encoder
    h_t, c_t    = LSTM(x_t, (h_t-1, c_t-1) (1 - done_t-1))           pi(. | s_1..t) and V(s_1..t) are heads on h_t
    delta_t     = r_t + gamma V(s_1..t, s'_t) (1 - terminated_t) - V(s_1..t)
                                                                     s'_t is taken in after (h_t, c_t), before any reset
    J, A_t, R_t   as in ppo.py; done, gamma, rho_t, eps, too

In an update the LSTM goes through the T steps of a rollout again, from the state that it had before the first of them.
So a minibatch is a set of environments with all their steps, and gradients go back to the start of the episode or of
the rollout, whichever is later.

Run
    python algos/ppo_lstm.py                                                     CartPole-v1 without its velocities
    python algos/ppo_lstm.py --no-memory                                         the state is empty at each step
    python algos/ppo_lstm.py --env-id algos.environments.recall:Recall-v0        names a cue after 10 steps
    python algos/ppo_lstm.py --env-id package.module:Name-v0 --env-kwargs size=5  your own environment
    python algos/ppo_lstm.py --evaluate RUN --eval-episodes 100                  scores a saved agent

Expect
    CartPole without velocities, 24,576 steps with the rate annealed to 0: 500, the maximum, in 20 of 30 seeds, 457 on
    average. ppo.py, which sees one moment at a time, 39 to 46; --no-memory 37 to 46 (10 seeds; benchmarks/effects.py,
    ppo_lstm-cartpole).

Metrics
    As in ppo.py.

Differences
    - One LSTM for policy and value, as in CleanRL's ppo_atari_lstm.py. sb3-contrib has one for each by default; where
      it shares one, the value loss does not train it. It cuts rollouts into padded sequences.
    - The state before a rollout is not renewed in later epochs, though the weights that made it have changed; nor in
      CleanRL or sb3-contrib.
    - CleanRL treats truncation as termination. Here the last observation is bootstrapped from, with the state of its
      own episode.
    - There is no --compile: an update has another length of sequences each time.
"""

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
    episode_columns,
    evaluate,
    make_env,
    make_vector,
    score_saved,
    step_vector,
    try_out,
)
from utils.core import Run, UserError, main, prepare, preset

NAME, TITLE = "ppo_lstm", "Recurrent PPO"
PRESETS = {  # defaults that depend on the kind of actions and observations, for arguments left at None
    "discrete": dict(total_timesteps=51_200, num_envs=8, num_steps=32, learning_rate=1e-3, num_minibatches=2,
                     update_epochs=8, ent_coef=0.0, hidden_size=64),
    "continuous": dict(total_timesteps=1_000_000, num_envs=8, num_steps=128, learning_rate=3e-4, num_minibatches=4,
                       update_epochs=10, ent_coef=0.0, hidden_size=64),
    "images": dict(total_timesteps=10_000_000, num_envs=8, num_steps=128, learning_rate=2.5e-4, num_minibatches=4,
                   update_epochs=4, ent_coef=0.01, hidden_size=512),
}  # fmt: skip
CLIP_NORMALIZED = 10.0  # bounds of normalised observations and rewards, as in baselines


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "CartPoleNoVelocity-v0"
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
    """minibatches per epoch: each holds whole sequences, of N / num_minibatches environments"""
    update_epochs: int | None = None
    """epochs over each rollout"""
    clip_coef: float = 0.2
    """clip of the ratio: epsilon"""
    clip_vloss: bool = False
    """clip the change of the value by clip_coef, too"""
    ent_coef: float | None = None
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
    hidden_size: int | None = None
    """units of the layer before the LSTM, and of the LSTM: H"""
    memory: bool = True
    """carry the LSTM's state from step to step; --no-memory: it is zero at every step, for comparison"""
    log_std_init: float = 0.0
    """log of the standard deviation of Gaussian actions at the start"""
    threads: int = 1
    """CPU threads: a second makes networks this small a tenth faster; 0: OMP_NUM_THREADS where set, else two"""
    save_every: int = 20_000
    """environment steps between checkpoints"""


def cartpole_without_velocities(**kwargs) -> gym.Env:
    """CartPole-v1 of which place and angle are seen, but not where they go: that must be remembered."""
    env = gym.make("CartPole-v1", disable_env_checker=True, **kwargs)
    low, high = (getattr(env.observation_space, bound)[[0, 2]] for bound in ("low", "high"))
    return gym.wrappers.TransformObservation(env, lambda obs: obs[[0, 2]], gym.spaces.Box(low, high))


gym.register("CartPoleNoVelocity-v0", cartpole_without_velocities)


def make_image_env(args: Args) -> gym.Env:
    """As `make_env`, but images (bytes with three dimensions) stay, and come as C x H x W: the smaller one of the first
    and the last dimension is taken for the channels."""
    env = make_env(args, flatten=False)
    space = env.observation_space
    if space.dtype != np.uint8 or len(space.shape or ()) != 3:
        return make_env(args)
    if space.shape[0] < space.shape[2]:
        return env
    moved = gym.spaces.Box(0, 255, (space.shape[2], *space.shape[:2]), np.uint8)
    return gym.wrappers.TransformObservation(env, lambda obs: np.moveaxis(obs, 2, 0), moved)


class Agent(nn.Module):
    """A tanh layer (of images: an encoder), an LSTM, and heads for policy and value. Orthogonal weights (gain sqrt 2;
    LSTM 1, policy head 0.01, value head 1), zero biases. Actions as in ppo.py.

    A state is the LSTM's h and c, (2, N, H). Time comes first: T steps of N environments."""

    def __init__(self, obs_size, space: gym.Space, hidden_size: int, log_std_init: float = 0.0):
        super().__init__()
        self.space, self.continuous = space, isinstance(space, gym.spaces.Box)
        if self.continuous:
            self.parts = [int(np.prod(space.shape))]
            low, high = torch.from_numpy(np.stack([space.low, space.high])).double()
            far = (torch.special.ndtr(high) - torch.special.ndtr(low) <= 0.5) & (high - low).isfinite()
            self.middle = torch.where(far, (low + high) / 2, 0.0).numpy().astype(space.dtype)
            self.half_width = torch.where(far, (high - low) / 2, 1.0).numpy().astype(space.dtype)
            if far.any():
                print("half of N(0, 1) lies outside the bounds of actions: it is stretched to them", file=sys.stderr)
            self.log_std = nn.Parameter(torch.full((self.parts[0],), log_std_init))
        elif isinstance(space, gym.spaces.MultiBinary):
            self.parts = [2] * int(np.prod(space.shape))
        else:
            self.parts = [int(space.n)] if isinstance(space, gym.spaces.Discrete) else space.nvec.flatten().tolist()
        self.images = isinstance(obs_size, tuple)
        if isinstance(obs_size, tuple):
            self.actor, self.critic, self.encoder = image_networks(obs_size, hidden_size, sum(self.parts))
        else:
            self.actor, self.critic = nn.Linear(hidden_size, sum(self.parts)), nn.Linear(hidden_size, 1)
            self.encoder = nn.Sequential(nn.Linear(obs_size, hidden_size), nn.Tanh())
            orthogonal([self.encoder[0], self.actor, self.critic], [2**0.5, 0.01, 1.0])
        self.lstm = nn.LSTM(hidden_size, hidden_size)
        for name, parameter in self.lstm.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)

    def empty(self, num_envs: int) -> Tensor:
        """The state in which every episode begins."""
        return torch.zeros(2, num_envs, self.lstm.hidden_size, device=self.actor.weight.device)

    def features(self, obs: Tensor, state: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
        """Observations (T, N, ...) -> (T, N, H), and the state after the last of them. `begins` (T, N): where a step is
        the first of an episode, the state is emptied before it, so nothing crosses, forward or backward."""
        flat = self.encoder(obs.flatten(0, 1).float() / 255 if self.images else obs.flatten(0, 1))
        inputs, outputs = flat.unflatten(0, obs.shape[:2]), []
        cuts = [0, *(begins[1:].any(1).nonzero()[:, 0] + 1).tolist(), len(obs)]
        for first, last in zip(cuts, cuts[1:]):  # torch's LSTM knows no resets: it takes the steps between two of them
            state = state * ~begins[first][:, None]
            out, (h, c) = self.lstm(inputs[first:last], (state[:1], state[1:]))
            outputs.append(out)
            state = torch.cat([h, c])
        return torch.cat(outputs), state

    def value(self, obs: Tensor, state: Tensor) -> Tensor:
        """Of one step after `state` (2, N, H): (N, ...) -> (N,)"""
        begins = torch.zeros(1, len(obs), dtype=torch.bool, device=obs.device)
        return self.critic(self.features(obs[None], state, begins)[0])[0, :, 0]

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """What makes `act` a sample. It is drawn for a whole rollout at once, which is twice as fast as at each step.
        Normal noise for Gaussian actions, Gumbel noise for categorical ones (the largest of logits plus Gumbel noise is
        a draw from the softmax). With noise 0, `act` gives the likeliest action."""
        noise = torch.empty(*shape, sum(self.parts), device=generator.device)
        return noise.normal_(generator=generator) if self.continuous else -noise.exponential_(generator=generator).log()

    def act(self, obs: Tensor, state: Tensor, begins: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions (N, A) of observations (N, ...), floats or the index of each choice; and the state after them."""
        features, state = self.features(obs[None], state, begins[None])
        out = self.actor(features[0])
        if self.continuous:
            return out + self.log_std.exp() * noise, state
        return torch.stack([part.argmax(-1) for part in (out + noise).split(self.parts, -1)], -1), state

    def forward(self, obs: Tensor, actions: Tensor, state: Tensor, begins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, entropy and value, each (T, N), replayed from the state before the first step."""
        features, _ = self.features(obs, state, begins)
        return *self.log_prob(features, actions), self.critic(features)[..., 0]

    def log_prob(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability (of continuous actions: density) of actions (..., A), and entropy in nats, each (...)."""
        out = self.actor(obs)
        if self.continuous:
            z = (actions - out) * (-self.log_std).exp()
            log_norm = self.log_std + 0.5 * np.log(2 * np.pi)
            return -(0.5 * z * z + log_norm).sum(-1), (0.5 + log_norm).sum().expand(out.shape[:-1])
        logp = entropy = out.new_zeros(())
        for i, part in enumerate(out.split(self.parts, -1)):
            logps = part.log_softmax(-1)
            logp = logp + logps.gather(-1, actions[..., i : i + 1].long())[..., 0]
            entropy = entropy - (logps.exp() * logps).sum(-1)
        return logp, entropy

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Actions (N, A) as the vector environment takes them: Gaussian ones clipped to the bounds, but only when they
        are executed. Their log-probability is that of the action before clipping. Where half of N(0, 1) or more
        lies outside the bounds, [-1, 1] is stretched to them: else it would begin at an edge, and see no difference."""
        if self.continuous:
            actions = self.middle + self.half_width * actions.reshape(-1, *self.space.shape)
            return actions.clip(self.space.low, self.space.high)
        return actions.reshape(-1, *self.space.shape) + getattr(self.space, "start", 0)


def orthogonal(layers: list, gains: list[float]) -> None:
    for layer, gain in zip(layers, gains):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)


def image_networks(shape: tuple[int, int, int], hidden_size: int, actions: int) -> tuple:
    """The heads of policy and value, and the encoder of images (B, C, H, W). From 36 pixels on, the convolutions of
    Mnih et al. 2015 (channels, kernel, stride); below, as for boards, two of 3 x 3 that reach over the border."""
    large, channels = min(shape[1:]) >= 36, shape[0]
    body: list[nn.Module] = []
    for size, kernel, stride in [(32, 8, 4), (64, 4, 2), (64, 3, 1)] if large else [(32, 3, 1), (64, 3, 2)]:
        body += [nn.Conv2d(channels, size, kernel, stride, padding=0 if large else 1), nn.ReLU()]
        channels = size
    body.append(nn.Flatten())
    units = nn.Sequential(*body)(torch.zeros(1, *shape)).shape[1]
    last, actor, critic = nn.Linear(units, hidden_size), nn.Linear(hidden_size, actions), nn.Linear(hidden_size, 1)
    hidden = [*body[:-1:2], last]
    orthogonal([*hidden, actor, critic], [2**0.5] * len(hidden) + [0.01, 1.0])
    return actor, critic, nn.Sequential(*body, last, nn.ReLU())


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
    evaluation. Without --normalize they change nothing; images stay bytes in any case."""

    def __init__(self, obs_size, num_envs: int, gamma: float, enabled: bool):
        self.images = isinstance(obs_size, tuple)
        self.obs, self.returns = RunningMeanStd(() if self.images else (obs_size,)), RunningMeanStd()
        self.enabled, self.gamma, self.discounted = enabled, gamma, np.zeros(num_envs)

    def observe(self, obs: np.ndarray, count: bool = False) -> np.ndarray:
        """Normalises observations (N, D). Only training counts them, and only those that it acts on."""
        if self.images:
            return obs
        if not self.enabled:
            return obs.astype(np.float32)
        if count:
            self.obs.update(obs)
        scaled = (obs - self.obs.mean) / np.sqrt(self.obs.var + 1e-8)
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
        used = self.enabled and not self.images
        return {f"obs_{name}": self.obs.state_dict()[name] for name in ("mean", "var")} if used else {}

    def state_dict(self) -> dict:
        """Without the discounted returns so far: a resumed run begins new episodes."""
        return {"obs": self.obs.state_dict(), "returns": self.returns.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.obs.load_state_dict(state["obs"])
        self.returns.load_state_dict(state["returns"])


class Batch(NamedTuple):
    """What one iteration learns from: T steps of N environments."""

    obs: Tensor  # (T, N, D), normalised
    actions: Tensor  # (T, N, A), before clipping
    rewards: Tensor  # (T, N) float32, normalised
    next_obs: Tensor  # like obs: what the step led to, before any reset
    terminated: Tensor  # (T, N) bool
    truncated: Tensor  # (T, N) bool
    begins: Tensor  # (T, N) bool: the step is the first of an episode
    state: Tensor  # (2, N, H), before the first step
    after: Tensor  # (T, 2, N, H): after each step, before any reset


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


def ppo_loss(agent: Agent, obs: Tensor, actions: Tensor, state: Tensor, begins: Tensor, old_logps: Tensor,
             advantages: Tensor, returns: Tensor, old_values: Tensor, args: Args) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss of one minibatch, to be minimised (equation 9 with the sign turned), and (approx_kl, clip_fraction,
    entropy). obs (T, B, ...), actions (T, B, A), state (2, B, H), the others (T, B)."""
    logps, entropy, values = agent(obs, actions, state, begins)
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
        old_logps, _, values = agent(batch.obs, batch.actions, batch.state, batch.begins)
        after = batch.after.transpose(0, 1).flatten(1, 2)  # (2, T N, H): what was remembered, not the reset's nothing
        next_values = agent.value(batch.next_obs.flatten(0, 1), after).view_as(values)
        done = batch.terminated | batch.truncated
        advantages = gae(batch.rewards, values, next_values, batch.terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + values
    rows = [batch.obs, batch.actions, batch.state, batch.begins, old_logps, advantages, returns, values]
    size = values.shape[1] // args.num_minibatches
    norms, epochs = [], 0
    while epochs < args.update_epochs:
        epochs += 1
        order, metrics = torch.randperm(values.shape[1], generator=generator, device=values.device), []
        for envs in order.split(size):  # whole sequences, from the state before them; later epochs do not renew it
            loss, numbers = loss_function(agent, *(x[:, envs] for x in rows), args)
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
def collect(agent: Agent, envs, obs: np.ndarray, state: Tensor, statistics: Statistics,
            generator: torch.Generator, args: Args) -> tuple[Batch, np.ndarray, Tensor, list]:  # fmt: skip
    """T steps of N environments from observations `obs` (N, ...), which the statistics have counted, and the state
    (2, N, H) before them, empty where an episode begins.

    Returns a Batch, the observations and the state to go on from, and (return, length) of the episodes that ended.
    """
    device, shape = generator.device, (args.num_steps, args.num_envs)
    noise = agent.noise(shape, generator)
    actions, episodes, current = [], [], statistics.observe(obs)
    seen, next_obs = (np.empty((args.num_steps, *current.shape), current.dtype) for _ in range(2))
    rewards, (terminated, truncated) = np.empty(shape, np.float32), np.empty((2, *shape), bool)
    before, after, begins = state, [], torch.full(shape, not args.memory, device=device)
    for t in range(args.num_steps):
        seen[t] = current
        action, state = agent.act(torch.from_numpy(seen[t]).to(device), state, begins[t], noise[t])
        actions.append(action)
        after.append(state * args.memory)
        executed = agent.to_env(actions[t].cpu().numpy())
        obs, true_obs, reward, terminated[t], truncated[t], ended = step_vector(envs, executed)
        done = torch.from_numpy(terminated[t] | truncated[t]).to(device)
        if t + 1 < args.num_steps:
            begins[t + 1] |= done
        rewards[t] = statistics.reward(reward, terminated[t] | truncated[t])
        current = statistics.observe(obs, count=True)
        next_obs[t] = statistics.observe(true_obs) if ended else current
        episodes += ended
    arrays = (seen, rewards, next_obs, terminated, truncated)
    seen, *others = (torch.from_numpy(array).to(device) for array in arrays)
    batch = Batch(*(seen, torch.stack(actions), *others, begins, before, torch.stack(after)))
    return batch, obs, state * ~done[:, None], episodes


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    kinds = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
    if not isinstance(space, kinds) or isinstance(space, gym.spaces.Box) and space.dtype.kind != "f":
        wanted = "a Box of floats, Discrete, MultiDiscrete or MultiBinary"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: PPO needs {wanted}")
    rows = args.num_envs * args.num_steps
    if args.num_envs % args.num_minibatches or rows // args.num_minibatches < 2:
        parts = f"the {args.num_envs} environments (num_envs), whose sequences of {args.num_steps} steps stay whole"
        raise UserError(f"--num-minibatches {args.num_minibatches} must divide {parts}, into parts of at least 2 rows")
    if args.total_timesteps < rows:
        raise UserError(f"--total-timesteps {args.total_timesteps} is less than one rollout of {rows} steps")


def act_in_evaluation(agent: Agent, statistics: Statistics, memory: bool) -> Callable:
    """What `evaluate` calls in one evaluation: actions (N, A) of raw observations (N, ...). It remembers
    from call to call, and begins with nothing; each environment plays one episode."""
    state = None

    @torch.no_grad()
    def act(obs: np.ndarray, scale: Tensor, generator: torch.Generator) -> np.ndarray:
        nonlocal state
        normalized = torch.from_numpy(statistics.observe(obs)).to(generator.device)
        begins = torch.full((len(obs),), state is None or not memory, device=generator.device)
        state = agent.empty(len(obs)) if state is None else state
        actions, state = agent.act(normalized, state, begins, agent.noise((len(obs),), generator) * scale)
        return agent.to_env(actions.cpu().numpy())

    return act


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_image_env, args)
    env, eval_envs = try_out(make, args)
    shape, space = env.observation_space.shape, env.action_space
    obs_size = shape if len(shape) == 3 else shape[0]
    kind = "continuous" if isinstance(space, gym.spaces.Box) else "discrete"
    settings = preset(args, PRESETS, "images" if len(shape) == 3 else kind)
    check(args, space)
    agent = Agent(obs_size, space, args.hidden_size, args.log_std_init).to(device)
    statistics = Statistics(obs_size, args.num_envs, args.gamma, args.normalize)

    def score_agent(video: Path | None = None) -> dict[str, float]:
        return evaluate(eval_envs, act_in_evaluation(agent, statistics, args.memory), args, device, video)

    if args.evaluate:
        return score_saved(args, score_agent, agent=agent, statistics=statistics)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    rollout = args.num_envs * args.num_steps
    run = Run(args, NAME, args.env_id, args.total_timesteps // rollout * rollout, ("return", "eval/return"))
    run.print(settings)
    envs, obs = make_vector(make, args, run.step)
    parts = dict(agent=agent, optimizer=optimizer, statistics=statistics, generator=generator)
    if not run.restore(**parts):
        statistics.observe(obs, count=True)
    step, memory = run.step, agent.empty(args.num_envs)
    while step < run.total:
        if args.anneal_lr:  # everywhere; the paper anneals for Atari only
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / run.total)

        # collect
        batch, obs, memory, episodes = collect(agent, envs, obs, memory, statistics, generator, args)
        step += rollout

        # update
        columns = update(agent, optimizer, batch, generator, args) | episode_columns(episodes)
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
