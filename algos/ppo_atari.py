r"""Proximal Policy Optimization (PPO) on Atari.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv 1707.06347, table 5 for Atari), with the network
and the frames of Mnih et al. 2015, "Human-level control through deep reinforcement learning".

Parent: ppo.py. Policy and value share a convolutional network, as in the paper, and rewards are reduced to their sign.

The preprocessing of frames is what makes the games learnable: see make_atari. As ppo.py, maximises

    J(theta) = E { min[ rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t ] + c_ent H_t - c_vf (V(s_t) - R_t)^2 / 2 }

    rho_t, A_t, R_t, H_t   probability ratio, advantage, target of the critic and entropy, as in ppo.py
    eps, c_ent, c_vf       --clip-coef, --ent-coef, --vf-coef

Run
    python algos/ppo_atari.py                                                     Pong, 10M steps: for a GPU
    python algos/ppo_atari.py --env-id ALE/KungFuMaster-v5 --total-timesteps 61440 --eval-episodes 5   a short budget
    python algos/ppo_atari.py --env-kwargs repeat_action_probability=0.25         sticky actions, ALE v5's default
    python algos/ppo_atari.py --vector async                                      a process for each game
    python algos/ppo_atari.py --vector native                                     ALE's own vector, in threads
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
    - --vector native presses FIRE at the start of a game alone, not after each lost life as we do. Evaluation is ours.
      On resume its games begin anew.
    - On resume, a game is replayed from its actions, as in ppo.py. That is exact: only the no-ops and sticky actions
      are random, and the episode's seed fixes them.
"""

import sys
import time
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
from utils.checkpoint import rng_state
from utils.cli import main, prepare, resolve
from utils.envs import (
    EnvArgs,
    Vector,
    episode_columns,
    make_env,
    make_vector,
    open_env,
    reset_vector,
    restore_vector,
    step_vector,
)
from utils.errors import NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval, UserError, parse_pairs
from utils.rollouts import evaluate, score_saved
from utils.run import Run

NAME, TITLE = "ppo_atari", "PPO"
PRESETS = {  # defaults, for arguments left at None
    "images": dict(total_timesteps=10_000_000, num_envs=8, num_steps=128, learning_rate=2.5e-4, num_minibatches=4,
                   update_epochs=4, ent_coef=0.01, hidden_size=512),
}  # fmt: skip


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, threads, output_dir, keep, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    most_threads, longest_gap = sys.maxsize, 250_000
    env_id: str = "ALE/Pong-v5"
    """a game of the Arcade Learning Environment"""
    total_timesteps: PositiveInt | None = None
    """environment steps, over all environments"""
    num_envs: PositiveInt | None = None
    """environments that are stepped together: N"""
    num_steps: PositiveInt | None = None
    """steps of each environment between updates: T"""
    vector: Literal["sync", "async", "native"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms. native: the
    environment's own vector (gym.make_vec), where it has one"""
    learning_rate: PositiveFloat | None = None
    """learning rate of Adam, at the start"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0"""
    gamma: UnitInterval = 0.99
    """discount"""
    gae_lambda: UnitInterval = 0.95
    """lambda of the advantages"""
    num_minibatches: PositiveInt | None = None
    """minibatches per epoch"""
    update_epochs: PositiveInt | None = None
    """epochs over each rollout"""
    clip_coef: PositiveFloat = 0.1
    """clip of the ratio: epsilon"""
    clip_vloss: bool = False
    """clip the change of the value by clip_coef, too"""
    ent_coef: NonNegativeFloat | None = None
    """weight of the entropy bonus: c_ent"""
    vf_coef: NonNegativeFloat = 0.5
    """weight of the value loss: c_vf"""
    max_grad_norm: PositiveFloat = 0.5
    """gradients are clipped to this norm"""
    target_kl: PositiveFloat | None = None
    """end the epochs of a rollout when approx_kl exceeds this"""
    normalize: bool = True
    """train on the sign of rewards"""
    normalize_advantages: bool = True
    """normalise advantages in every minibatch"""
    hidden_size: PositiveInt | None = None
    """units of the layer between convolutions and heads"""
    compile: bool = False
    """compile the network and the loss (half a minute at the start)"""
    save_every: PositiveInt = 50_000
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


class LivesOfVector(gym.vector.VectorWrapper):
    """Lives of ALE's own vector, which presses FIRE at the start of a game alone."""

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        self.lives = info["lives"]
        return obs, info

    def step(self, actions):
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        lost, self.lives = info["lives"] < self.lives, info["lives"]
        return obs, rewards, terminated, truncated, info | {"life_lost": lost}


def make_atari(env_id: str, env_kwargs: tuple[str, ...] = (), render_mode: str | None = None, num_envs: int = 0) -> Any:
    """A game with Gymnasium's AtariPreprocessing: up to 30 no-ops at the start, each action for 4 frames, the maximum
    of the last two, grey, 84 x 84, and 4 of those stacked: observations (4, 84, 84) uint8. Actions are not sticky, as
    in CleanRL and unlike ALE v5's default: `repeat_action_probability=0.25` makes them so (Machado et al. 2018, arXiv
    1709.06009). `frameskip` is another number of frames. With `num_envs`, ALE's own vector of as many games. Raises
    UserError where the game, or a package for it, is missing, and for a frameskip that is no number."""
    try:
        import ale_py
        import cv2
    except ImportError as error:
        right = "pip install ale-py opencv-python-headless"
        raise UserError(f"Atari needs ale-py and opencv-python ({error}): {right}") from error

    cv2.setNumThreads(1)
    gym.register_envs(ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    asked = parse_pairs(("frameskip=4", "repeat_action_probability=0.0", *env_kwargs), "--env-kwargs")
    frameskip, sticky = asked["frameskip"], asked["repeat_action_probability"]
    if type(frameskip) is not int or frameskip < 1 or not isinstance(sticky, (int, float)) or not 0 <= sticky < 1:
        right = "frameskip must be a whole number from 1, repeat_action_probability a number from 0 and below 1"
        raise UserError(f"--env-kwargs has frameskip={frameskip} and repeat_action_probability={sticky}: {right}")
    if num_envs:
        kwargs = (*env_kwargs, f"frameskip={frameskip}", f"repeat_action_probability={sticky}",
                  "autoreset_mode=SameStep", "reward_clipping=false")  # fmt: skip
        return LivesOfVector(make_env(env_id, kwargs, num_envs=num_envs))
    kwargs = (*env_kwargs, "frameskip=1", f"repeat_action_probability={sticky}")  # the wrapper skips the frames
    game = SeededGame(make_env(env_id, kwargs, render_mode, flatten=False), sticky > 0)
    return gym.wrappers.FrameStackObservation(Lives(gym.wrappers.AtariPreprocessing(game, frame_skip=frameskip)), 4)


class Agent(nn.Module):
    """One encoder of images (`obs_size` their C, H, W) for policy and value. Orthogonal weights (gain sqrt 2; policy
    head 0.01, value head 1), zero biases. Actions are categorical, `parts` the number of choices."""

    continuous = False

    def __init__(self, obs_size, space, hidden_size: int):
        super().__init__()
        self.space, self.parts = space, [int(space.n)]
        self.actor, self.critic, self.encoder = image_networks(obs_size, hidden_size, sum(self.parts))

    def features(self, obs: Tensor) -> Tensor:
        """What the heads take: images (..., C, H, W) uint8 -> (..., hidden_size)."""
        flat = self.encoder(obs.flatten(0, -4).float() / 255)
        return flat.view(*obs.shape[:-3], -1)

    def value(self, obs: Tensor) -> Tensor:
        """(..., C, H, W) -> (...)"""
        return self.critic(self.features(obs))[..., 0]

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """What makes `act` a sample: normal noise for Gaussian actions, Gumbel noise for categorical ones (the largest
        of logits plus Gumbel noise is a draw from the softmax). With noise 0, `act` gives the likeliest action."""
        # drawn for a whole rollout at once: Categorical.sample() at each step takes twice the time of the network
        noise = torch.empty(*shape, sum(self.parts), device=generator.device)
        return noise.normal_(generator=generator) if self.continuous else -noise.exponential_(generator=generator).log()

    def act(self, obs: Tensor, noise: Tensor) -> Tensor:
        """Actions (N, 1), the index of each choice, of observations (N, C, H, W)."""
        out = self.actor(self.features(obs))
        return (out + noise).argmax(-1, keepdim=True)

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability, entropy and value, each (...)."""
        features = self.features(obs)
        return *self.log_prob(features, actions), self.critic(features)[..., 0]

    def log_prob(self, features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of actions (..., 1), and entropy in nats, each (...)."""
        logps = self.actor(features).log_softmax(-1)
        return logps.gather(-1, actions)[..., 0], -(logps.exp() * logps).sum(-1)

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Actions (N, 1) as the vector environment takes them."""
        return actions[:, 0]


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


class Statistics:
    """Stands for ppo.py's running statistics. Atari needs none."""

    def __init__(self, obs_size: int, num_envs: int, gamma: float, enabled: bool):
        self.enabled = enabled

    def observe(self, obs: np.ndarray, count: bool = False) -> np.ndarray:
        """Images as they are: the network divides them by 255."""
        return obs

    def reward(self, rewards: np.ndarray, done: np.ndarray) -> np.ndarray:
        """The sign of rewards (N,), so that one learning rate fits all games."""
        return np.sign(rewards) if self.enabled else rewards

    def weights(self) -> dict[str, Tensor]:
        return {}

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class Batch(NamedTuple):
    """What one iteration learns from: T steps of N environments."""

    obs: Tensor  # (T, N, D), normalised; images (T, N, C, H, W), uint8
    actions: Tensor  # (T, N, A), before clipping
    rewards: Tensor  # (T, N) float32, normalised
    next_obs: Tensor  # like obs: what the step led to, before any reset
    terminated: Tensor  # (T, N) bool
    truncated: Tensor  # (T, N) bool
    idle: Tensor | None = None  # (T, N) bool: steps of a native vector that only begin an episode; nothing to learn


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
    entropy). obs (B, ...), actions (B, A), the others (B,)."""
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
    used = slice(None) if batch.idle is None else ~batch.idle.flatten()
    rows = [x.flatten(0, 1)[used] for x in (batch.obs, batch.actions, old_logps, advantages, returns, values)]
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
def collect(agent: Agent, envs: Vector, obs: np.ndarray, statistics: Statistics,
            generator: torch.Generator, step: int, args: Args) -> tuple[Batch, np.ndarray, list]:  # fmt: skip
    """T steps of N environments from observations `obs` (N, ...), which the statistics have counted.

    Returns a Batch, the observations to go on from, and (return, length) of the episodes that ended.
    """
    device, shape = generator.device, (args.num_steps, args.num_envs)
    noise = agent.noise(shape, generator)
    actions, episodes, current = [], [], statistics.observe(obs)
    seen, next_obs = (np.empty((args.num_steps, *current.shape), current.dtype) for _ in range(2))
    rewards, (terminated, truncated, idle) = np.empty(shape, np.float32), np.empty((3, *shape), bool)
    for t in range(args.num_steps):
        seen[t], idle[t] = current, envs.log.idle
        actions.append(agent.act(torch.from_numpy(seen[t]).to(device), noise[t]))
        executed, now = agent.to_env(actions[t].cpu().numpy()), step + (t + 1) * args.num_envs
        obs, true_obs, reward, terminated[t], truncated[t], ended = step_vector(envs, executed, now, lives=True)
        rewards[t] = statistics.reward(reward, terminated[t] | truncated[t])
        current = statistics.observe(obs, count=True)
        next_obs[t] = statistics.observe(true_obs) if ended else current
        episodes += ended
    arrays = (seen, rewards, next_obs, terminated, truncated, idle)
    seen, *others = (torch.from_numpy(array).to(device) for array in arrays)
    return Batch(seen, torch.stack(actions), *others), obs.copy(), episodes


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    kinds = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
    if not isinstance(space, kinds) or isinstance(space, gym.spaces.Box) and space.dtype.kind != "f":
        wanted = "a Box of floats, Discrete, MultiDiscrete or MultiBinary"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: PPO needs {wanted}")
    rows = args.num_envs * args.num_steps
    least = 4 if args.vector == "native" else 2  # up to half of its rows are idle
    if rows % args.num_minibatches or rows // args.num_minibatches < least:
        parts = f"the {rows} rows of a rollout (num_envs * num_steps) into parts of at least {least}"
        raise UserError(f"--num-minibatches {args.num_minibatches} must divide {parts}")
    if args.total_timesteps < rows:
        raise UserError(f"--total-timesteps {args.total_timesteps} is less than one rollout of {rows} steps")


@torch.no_grad()
def act_in_evaluation(agent: Agent, statistics: Statistics, obs: np.ndarray, scale: Tensor,
                      generator: torch.Generator) -> np.ndarray:  # fmt: skip
    """What utils.rollouts.evaluate calls: actions (N, A) of raw observations (N, ...)."""
    normalized = torch.from_numpy(statistics.observe(obs)).to(generator.device)
    return agent.to_env(agent.act(normalized, agent.noise((len(obs),), generator) * scale).cpu().numpy())


def train(args: Args) -> list[dict]:
    device = prepare(args)
    make, obs_size, space = open_env(args, make_atari)
    settings = resolve(args, PRESETS, "images")
    check(args, space)
    agent = Agent(obs_size, space, args.hidden_size).to(device)
    statistics = Statistics(obs_size, args.num_envs, args.gamma, args.normalize)
    act = partial(act_in_evaluation, agent, statistics)
    score_agent = partial(evaluate, make, act, args.eval_episodes, args.seed, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent, statistics=statistics)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    loss_function = torch.compile(ppo_loss) if args.compile else ppo_loss
    if args.compile:
        agent.encoder.compile()
    rollout = args.num_envs * args.num_steps
    total = args.total_timesteps // rollout * rollout
    run = Run(args, NAME, args.env_id, total, ("return", "eval/return", "explained_variance"), "total_timesteps",
              schedule_depends_on_budget=args.anneal_lr)  # fmt: skip
    run.print(settings)
    envs = make_vector(make, args.num_envs, args.seed, args.vector)

    def state() -> dict:
        return {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "envs": envs.log.state(obs),
                "statistics": statistics.state_dict(), "generator": generator.get_state()}  # fmt: skip

    step, obs = run.step, restore_vector(envs, run.state["envs"]) if run.state else reset_vector(envs)
    if not run.restore(agent=agent, optimizer=optimizer, statistics=statistics, generator=generator):
        statistics.observe(obs, count=True)
    while step < run.total:
        start = time.perf_counter()
        if args.anneal_lr:  # everywhere; the paper anneals for Atari only
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / run.total)

        # collect
        with run.saving(step, state(), rng_state()):
            batch, obs, episodes = collect(agent, envs, obs, statistics, generator, step, args)
        collected, step = time.perf_counter(), step + rollout

        # update
        columns = update(agent, optimizer, batch, generator, args, loss_function) | episode_columns(episodes)
        columns |= {"learning_rate": optimizer.param_groups[0]["lr"], "time/steps_per_second": run.speed(step),
                    "time/collect": collected - start, "time/iteration": time.perf_counter() - start}  # fmt: skip

        # evaluate
        if run.due(step, args.eval_every):
            with run.saving(step, state, columns=columns):
                columns |= score_agent()
        run.log(step, **columns)
        run.end_step(step, state)

    envs.close()
    curves = {"return": ("return", "eval/return"), "explained variance": ("explained_variance",),
              "entropy": ("entropy",)}  # fmt: skip
    return run.finish(agent.state_dict() | statistics.weights(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train)
