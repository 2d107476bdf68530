r"""Proximal Policy Optimization (PPO) on Atari.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv 1707.06347, table 5 for Atari), with the network
and the frames of Mnih et al. 2015, "Human-level control through deep reinforcement learning".

Parent: ppo.py. Policy and value share a convolutional network, as in the paper, and rewards are reduced to their sign.

The preprocessing of frames is what makes the games learnable: see make_game. As ppo.py, maximises

    J(theta) = E { min[ rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t ] + c_ent H_t - c_vf (V(s_t) - R_t)^2 / 2 }

    rho_t, A_t, R_t, H_t   probability ratio, advantage, target of the critic and entropy, as in ppo.py
    eps, c_ent, c_vf       --clip-coef, --ent-coef, --vf-coef

Run
    python algos/ppo_atari.py                                                     Pong, 10M steps: for a GPU
    python algos/ppo_atari.py --env-id ALE/KungFuMaster-v5 --total-timesteps 61440 --eval-episodes 5   a short budget
    python algos/ppo_atari.py --env-kwargs repeat_action_probability=0.25         sticky actions, ALE v5's default
    python algos/ppo_atari.py --env-id package.module:Name-v0                     your own environment of images
    python algos/ppo_atari.py --evaluate RUN --capture-video

Expect
    Pong's 10M steps take half a day on a CPU: we never ran them.
    ALE/KungFuMaster-v5 --total-timesteps 61440: sampled actions score 100 to 380 after the first 1,024 steps (3 seeds)
    and 2,965 at the end (8 seeds, standard deviation 511), in 6 minutes on a busy core. The likeliest actions always
    play the same game, and score 0.

Metrics
    as in ppo.py; return is the score of the game, though training sees only the sign of rewards

Differences
    - A lost life ends bootstrapping and the advantage recursion, not the game. A game's score is over all its lives.
      Gymnasium's terminal_on_life_loss would start a new game at every lost life.
    - After a lost life we press FIRE, and what that earns counts. SB3 plays a no-op, FIRE and the third action, without
      their rewards. At a game's start it plays FIRE and the third action, we FIRE alone.
    - From CleanRL and baselines: 4 epochs of 4 minibatches, entropy 0.01, value loss 0.5 of half squares. Both also
      clip the change of the value (--clip-vloss). From the paper: learning rate and clip. The paper anneals both, makes
      3 epochs and weighs the value loss by 1. It names the network of Mnih et al. 2016; that of 2015 is from baselines.
    - Images of fewer than 36 pixels go through two small convolutions.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    number,
    score_saved,
    step_vector,
    try_out,
)
from utils.core import Run, UserError, main, prepare

NAME, TITLE = "ppo_atari", "PPO"
CLIP_NORMALIZED = 10.0  # bounds of normalised rewards, as in baselines


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    most_threads = 64
    env_id: str = "ALE/Pong-v5"
    """a game of the Arcade Learning Environment, or another environment of images"""
    total_timesteps: int = 10_000_000
    """environment steps, over all environments"""
    num_envs: int = 8
    """environments that are stepped together: N"""
    num_steps: int = 128
    """steps of each environment between updates: T"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: float = 2.5e-4
    """learning rate of Adam, at the start"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of the advantages"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 4
    """epochs over each rollout"""
    clip_coef: float = 0.1
    """clip of the ratio: epsilon"""
    clip_vloss: bool = False
    """clip the change of the value by clip_coef, too"""
    ent_coef: float = 0.01
    """weight of the entropy bonus: c_ent"""
    vf_coef: float = 0.5
    """weight of the value loss: c_vf"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""
    target_kl: float | None = None
    """end the epochs of a rollout when approx_kl exceeds this"""
    normalize: bool = True
    """train on the sign of a game's rewards, and on other rewards normalised by running statistics"""
    normalize_advantages: bool = True
    """normalise advantages in every minibatch"""
    hidden_size: int = 512
    """units of the layer between convolutions and heads"""
    log_std_init: float = 0.0
    """log of the standard deviation of Gaussian actions at the start"""
    compile: bool = False
    """compile the network and the loss (half a minute at the start)"""
    save_every: int = 50_000
    """environment steps between checkpoints"""


class SeededGame(gym.Wrapper):
    """A reset with a seed draws from it what Gymnasium draws (the number of no-ops). ALE itself is seeded only for
    sticky actions: without them it draws nothing, and a seed makes it load the game anew."""

    def __init__(self, env, sticky: bool):
        super().__init__(env)
        self.sticky = sticky

    def reset(self, *, seed=None, options=None):
        if self.sticky:
            return self.env.reset(seed=seed, options=options)
        if seed is not None:
            self.env.unwrapped.np_random = np.random.default_rng(seed)
        return self.env.reset(options=options)


class Lives(gym.Wrapper):
    """Reports a lost life as info["life_lost"], and presses FIRE where the game waits for it: at its
    start and after each lost life."""

    def __init__(self, env):
        super().__init__(env)
        self.fire = "FIRE" in env.unwrapped.get_action_meanings()[1:2]

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        self.lives = self.env.unwrapped.ale.lives()
        return self.env.step(1)[0] if self.fire else obs, info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        lives, before = self.env.unwrapped.ale.lives(), self.lives
        self.lives = lives
        if lives < before and not (terminated or truncated):
            info["life_lost"] = True
            if self.fire:
                obs, more, terminated, truncated, _ = self.env.step(1)
                reward += more
        return obs, reward, terminated, truncated, info


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


def make_game(args: Args) -> gym.Env:
    """Of ALE a game with Gymnasium's AtariPreprocessing: up to 30 no-ops at the start, each action for 4 frames, the
    maximum of the last two, grey, 84 x 84, and 4 of those stacked: observations (4, 84, 84) uint8. Actions are not
    sticky, as in CleanRL and unlike ALE v5's default: `repeat_action_probability=0.25` makes them so (Machado et al.
    2018, arXiv 1709.06009). `frameskip` is another number of frames. Other environments as they are. Raises UserError
    where a package for games is missing, and where there are no images."""
    if not args.env_id.startswith("ALE/"):
        env = make_image_env(args)
        if len(env.observation_space.shape) != 3:
            raise UserError(f"--env-id {args.env_id} has no images but {env.observation_space}: use ppo.py")
        return env
    try:
        import ale_py
        import cv2
    except ImportError as error:
        right = "pip install ale-py opencv-python-headless"
        raise UserError(f"Atari needs ale-py and opencv-python ({error}): {right}") from error

    cv2.setNumThreads(1)
    gym.register_envs(ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    asked = dict(pair.split("=", 1) for pair in args.env_kwargs)
    frameskip, sticky = int(asked.get("frameskip", 4)), float(asked.get("repeat_action_probability", 0))
    kwargs = (*args.env_kwargs, "frameskip=1", f"repeat_action_probability={sticky}")  # the wrapper skips the frames
    game = SeededGame(make_env(replace(args, env_kwargs=kwargs), flatten=False), sticky > 0)
    return gym.wrappers.FrameStackObservation(Lives(gym.wrappers.AtariPreprocessing(game, frame_skip=frameskip)), 4)


class Agent(nn.Module):
    """One encoder of images (`obs_size` their C, H, W) for policy and value. Orthogonal weights (gain sqrt 2; policy
    head 0.01, value head 1), zero biases. Box actions: diagonal Gaussian with a state-independent log_std. Other
    actions: categorical, `parts` the number of choices of each."""

    def __init__(self, obs_size: tuple, space: gym.Space, hidden_size: int, log_std_init: float = 0.0):
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
        self.actor, self.critic, self.encoder = image_networks(obs_size, hidden_size, sum(self.parts))

    def features(self, obs: Tensor) -> Tensor:
        """What the heads take: images (..., C, H, W) uint8 -> (..., hidden_size)."""
        flat = self.encoder(obs.flatten(0, -4).float() / 255)
        return flat.view(*obs.shape[:-3], -1)

    def value(self, obs: Tensor) -> Tensor:
        """(..., C, H, W) -> (...)"""
        return self.critic(self.features(obs))[..., 0]

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """What makes `act` a sample. It is drawn for a whole rollout at once, which is twice as fast as at each step.
        Normal noise for Gaussian actions, Gumbel noise for categorical ones (the largest of logits plus Gumbel noise is
        a draw from the softmax). With noise 0, `act` gives the likeliest action."""
        noise = torch.empty(*shape, sum(self.parts), device=generator.device)
        return noise.normal_(generator=generator) if self.continuous else -noise.exponential_(generator=generator).log()

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Actions (N, A) of images (N, C, H, W): floats, or the index of each choice."""
        out = self.actor(self.features(obs))
        if self.continuous:
            return out + self.log_std.exp() * noise
        return torch.stack([part.argmax(-1) for part in (out + noise).split(self.parts, -1)], -1)

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, entropy and value, each (...)."""
        features = self.features(obs)
        return *self.log_prob(features, actions), self.critic(features)[..., 0]

    def log_prob(self, features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability (of continuous actions: density) of actions (..., A), and entropy in nats, each (...)."""
        out = self.actor(features)
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
    """Running statistics of discounted returns, one set for all environments. Of games the sign of rewards is taken,
    and without --normalize they stay as they are. Images stay bytes: the network divides them by 255."""

    def __init__(self, games: bool, num_envs: int, gamma: float, enabled: bool):
        self.games, self.returns = games, RunningMeanStd()
        self.enabled, self.gamma, self.discounted = enabled, gamma, np.zeros(num_envs)

    def observe(self, obs: np.ndarray, count: bool = False) -> np.ndarray:
        return obs

    def reward(self, rewards: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Counts rewards (N,) and divides them by the standard deviation of the discounted return so far."""
        if not self.enabled:
            return rewards
        if self.games:
            return np.sign(rewards)
        self.discounted = self.discounted * self.gamma + rewards
        self.returns.update(self.discounted)
        self.discounted = self.discounted * ~done
        return np.clip(rewards / np.sqrt(self.returns.var + 1e-8), -CLIP_NORMALIZED, CLIP_NORMALIZED)

    def weights(self) -> dict[str, Tensor]:
        return {}

    def state_dict(self) -> dict:
        """Without the discounted returns so far: a resumed run begins new episodes."""
        return {"returns": self.returns.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.returns.load_state_dict(state["returns"])


class Batch(NamedTuple):
    """What one iteration learns from: T steps of N environments."""

    obs: Tensor  # (T, N, D), normalised
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
    *_, returns, values = rows
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
        terminated[t] |= [number(lost) > 0 for lost in envs.infos.get("life_lost", [False] * args.num_envs)]
        rewards[t] = statistics.reward(reward, terminated[t] | truncated[t])
        current = statistics.observe(obs, count=True)
        next_obs[t] = statistics.observe(true_obs) if ended else current
        episodes += ended
    arrays = (seen, rewards, next_obs, terminated, truncated)
    seen, *others = (torch.from_numpy(array).to(device) for array in arrays)
    return Batch(seen, torch.stack(actions), *others), obs, episodes


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    kinds = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
    if not isinstance(space, kinds) or isinstance(space, gym.spaces.Box) and space.dtype.kind != "f":
        wanted = "a Box of floats, Discrete, MultiDiscrete or MultiBinary"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: PPO needs {wanted}")
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
    device, make = prepare(args), partial(make_game, args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape, env.action_space
    if args.eval_every is None:
        args.eval_every = min(max(args.total_timesteps // 5, 1), 250_000)
    check(args, space)
    agent = Agent(obs_size, space, args.hidden_size, args.log_std_init).to(device)
    statistics = Statistics(args.env_id.startswith("ALE/"), args.num_envs, args.gamma, args.normalize)
    score_agent = partial(evaluate, eval_envs, partial(act_in_evaluation, agent, statistics), args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent, statistics=statistics)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    loss_function = torch.compile(ppo_loss) if args.compile else ppo_loss
    if args.compile:
        agent.encoder.compile()
    rollout = args.num_envs * args.num_steps
    run = Run(args, NAME, args.env_id, args.total_timesteps // rollout * rollout, ("return", "eval/return"))
    envs, obs = make_vector(make, args, run.step, infos=("life_lost",))
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
