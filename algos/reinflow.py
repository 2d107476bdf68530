r"""ReinFlow: PPO improves a policy that follows a flow, by noise in each step of the flow.

Zhang et al. 2025, "ReinFlow: Fine-tuning Flow Matching Policy with Online Reinforcement Learning" (arXiv 2505.22094).

Parent: dppo.py. The policy is the flow of a flow_bc.py run, of single actions, and the ratio is that of all its steps.

A flow moves noise to an action without chance, so the density of an action is costly to compute. ReinFlow adds learned
noise to each step. Then the flow is a chain of Gaussians, and PPO takes the whole chain as its action. Maximises

    J(theta) = E { min[ rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t ] + c_ent H_t - c_vf (V(s_t) - R_t)^2 / 2 }

    x_k+1   = x_k + v(s_t, x_k, k / K) / K + sigma(s_t, k / K) z_k,    k = 0 .. K - 1;    x_0 and z_k ~ N(0, I)
    rho_t   = prod_k pi_theta(x_k+1 | x_k, s_t) / pi_old(x_k+1 | x_k, s_t);    x_0 has the same density in both
    H_t     sum of the entropies of the K Gaussians, in nats
    a_t     x_K, clipped to [-1, 1] when it is executed
    v       velocity, of flow_bc.py;    sigma: another network, from --min-std to --max-std
    K, c_ent    --flow-steps, --ent-coef;    A_t, eps, c_vf, V, R_t: as in ppo.py

Run
    python algos/reinflow.py --init RUN                             a finished run of flow_bc.py
    python algos/reinflow.py                                        from an untrained flow: throws through a gate
    python algos/reinflow.py --evaluate RUN --eval-episodes 100     scores a saved agent
    RUN: python algos/flow_bc.py --dataset algos/environments/gates.hdf5 --max-steps 2000 --eval-every 500

Expect
    Throws through one of two gates, with the noise of training: a cloned flow of four steps hits with 0.50 +- 0.04,
    after 60,000 throws with 0.94 +- 0.02, through either gate. A flow of two steps gets from 0.07 to 0.90; ppo.py, one
    Gaussian, has 0.16 +- 0.02 (5 seeds; benchmarks/effects.py, reinflow-gates). Learning the noise shows no gain: where
    it is fixed at 0.05, 0.1 or 0.2 they hit with 0.94, 0.67 and 0.38, but without noise all with 0.99, as the learned
    one does, from 0.65. We had claimed that it is ahead by 0.01 in four of five seeds: in one, none and one
    (reinflow-noise). 15 seconds each; the default run, from an untrained flow, ends at 0.88 without noise (seed 1).
    At --learning-rate 1e-3 the first update went too far (KL 26), and two of five runs lost a gate.
    Hopper-v5 shows no gain: from a cloned flow of 311 it is 327 in 200,000 steps, ppo.py has 873 (one seed).

Metrics
    return, length      of the training episodes that ended; absent if none did
    eval/return         without noise in the steps; eval/return_stochastic: with it, as in training
    explained_variance, approx_kl, clip_fraction, entropy: as in ppo.py, of whole chains

Differences
    - Log-densities and entropies are sums. The authors' code (aed2819) divides them by the numbers of a chain, x_0's
      among them, and clamps log-densities to [-1, 1]. So their clip, 0.01, and bonus, 0.03, are of other sizes.
    - When they act, the K times go from 0 to 1; in get_logprobs to 1 - 1 / K. So their first ratios are not 1.
    - They clip means to [-1, 1], in the density too. They also clip actions, and noise at 3 deviations, which the
      density does not know. We clip what is executed.
    - Their --max-std falls in the second part of a run. Their sigma sees an embedding of time, ours time itself.
    - One learning rate; for Hopper they have 4.5e-5 for the flow and 6.5e-4 for V. They execute plans of 4 actions.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributions import Normal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.control import (
    EnvArgs,
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
from utils.core import Run, UserError, main, prepare, preset, saved_args

NAME, TITLE = "reinflow", "ReinFlow"
PRESETS = {  # for arguments left at None: without --init; with it they are the run's
    "an untrained flow": dict(env_id="algos.environments.gates:Gates-v0", flow_steps=4, actor_size=256),
}
CLIP_NORMALIZED = 10.0  # bounds of normalised rewards, as in baselines


@dataclass
class Args(EnvArgs):
    # inherited: seed, device, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, evaluate, capture_video (EnvArgs)
    init: str = ""
    """folder of a finished run of flow_bc.py, whose flow is improved; empty: from an untrained flow"""
    env_id: str | None = None
    """a Gymnasium environment, or MODULE:NAME of one that MODULE registers; None: the run's, or gates"""
    flow_steps: int | None = None
    """Euler steps from noise to an action: K; None: the run's, or 4"""
    actor_size: int | None = None
    """units of the two hidden layers of the velocity; None: the run's, or 256"""
    min_std: float = 0.05
    """the noise of a step has at least this standard deviation"""
    max_std: float = 0.2
    """and at most this"""
    total_timesteps: int = 60_000
    """environment steps, over all environments"""
    num_envs: int = 32
    """environments that are stepped together: N"""
    num_steps: int = 32
    """steps of each environment between updates: T"""
    vector: Literal["sync", "async"] = "sync"
    """one process, or one for each environment: async pays where a step takes longer than about 1 ms"""
    learning_rate: float = 3e-4
    """learning rate of Adam, at the start"""
    anneal_lr: bool = True
    """let the learning rate fall linearly to 0"""
    gamma: float = 0.99
    """discount"""
    gae_lambda: float = 0.95
    """lambda of the advantages"""
    num_minibatches: int = 4
    """minibatches per epoch"""
    update_epochs: int = 5
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
    scale_rewards: bool = True
    """divide rewards by the running standard deviation of returns"""
    normalize_advantages: bool = True
    """normalise advantages in every minibatch"""
    hidden_size: int = 64
    """units of the two hidden layers of the networks of value and noise"""
    threads: int = 1
    """CPU threads: a second makes networks this small a tenth faster; 0: OMP_NUM_THREADS where set, else two"""
    eval_episodes: int = 100
    """evaluation episodes, once without noise in the steps and once with it; 0: no evaluation"""
    save_every: int = 20_000
    """environment steps between checkpoints"""


class Actor(nn.Module):
    """The velocity, as in flow_bc.py."""

    def __init__(self, obs_size: int, action_size: int, hidden: int):
        super().__init__()
        layers = [nn.Linear(obs_size + action_size + 1, hidden), nn.Linear(hidden, hidden),
                  nn.Linear(hidden, action_size)]  # fmt: skip
        orthogonal(layers, [2**0.5] * 3)
        self.net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    def forward(self, obs: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """v(s, x, t): (..., A). time (..., 1)."""
        return self.net(torch.cat([obs, x, time], -1))


class Agent(nn.Module):
    """What is saved."""

    def __init__(self, obs_size: int, space: gym.spaces.Box, args: Args):
        super().__init__()
        self.space, self.size, self.steps = space, math.prod(space.shape), args.flow_steps
        self.log_bounds = math.log(args.min_std), math.log(args.max_std)
        self.actor = Actor(obs_size, self.size, args.actor_size)
        self.noise = network(obs_size + 1, args.hidden_size, self.size, 0.01)
        self.critic = network(obs_size, args.hidden_size, 1, 1.0)

    def value(self, obs: Tensor) -> Tensor:
        """(..., D) -> (...)"""
        return self.critic(obs)[..., 0]

    def step(self, obs: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, both (..., A), of x_k+1, given x_k = x. time (..., 1): k / K."""
        low, high = self.log_bounds
        share = (self.noise(torch.cat([obs, time], -1)).tanh() + 1) / 2
        return x + self.actor(obs, x, time) / self.steps, (low + (high - low) * share).exp()

    def sample(self, obs: Tensor, scale: Tensor | float, generator: torch.Generator) -> Tensor:
        """Chains (N, K + 1, A): x_0 .. x_K, of observations (N, D). `scale` multiplies the noise of the steps."""
        noise = torch.randn(self.steps + 1, len(obs), self.size, generator=generator, device=obs.device)
        chain = [noise[0]]
        for k in range(self.steps):  # never at time 1: the last step begins at 1 - 1 / K
            mean, std = self.step(obs, chain[-1], torch.full_like(obs[:, :1], k / self.steps))
            chain.append(mean + scale * std * noise[k + 1])
        return torch.stack(chain, 1)

    def log_prob(self, obs: Tensor, chains: Tensor) -> tuple[Tensor, Tensor]:
        """Log-densities of chains (..., K + 1, A), given x_0, and their entropies, each (...)."""
        time = (torch.arange(self.steps, device=obs.device) / self.steps).expand(*obs.shape[:-1], -1)[..., None]
        obs = obs[..., None, :].expand(*time.shape[:-1], -1)
        steps = Normal(*self.step(obs, chains[..., :-1, :], time))
        return steps.log_prob(chains[..., 1:, :]).sum((-2, -1)), steps.entropy().sum((-2, -1))

    def to_env(self, chains: Tensor) -> np.ndarray:
        """The actions x_K (N, ...) of chains, clipped, as the environment takes them."""
        return to_env(chains[:, -1].clamp(-1, 1).cpu().numpy(), self.space)


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
    """Running statistics of discounted returns, one set for all environments. Without --scale-rewards they change
    nothing."""

    def __init__(self, num_envs: int, gamma: float, enabled: bool):
        self.returns = RunningMeanStd()
        self.enabled, self.gamma, self.discounted = enabled, gamma, np.zeros(num_envs)

    def reward(self, rewards: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Counts rewards (N,) and divides them by the standard deviation of the discounted return so far."""
        if not self.enabled:
            return rewards
        self.discounted = self.discounted * self.gamma + rewards
        self.returns.update(self.discounted)
        self.discounted = self.discounted * ~done
        return np.clip(rewards / np.sqrt(self.returns.var + 1e-8), -CLIP_NORMALIZED, CLIP_NORMALIZED)

    def state_dict(self) -> dict:
        """Without the discounted returns so far: a resumed run begins new episodes."""
        return {"returns": self.returns.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.returns.load_state_dict(state["returns"])


class Batch(NamedTuple):
    """What one iteration learns from: T steps of N environments."""

    obs: Tensor  # (T, N, D)
    chains: Tensor  # (T, N, K + 1, A): x_0 .. x_K
    rewards: Tensor  # (T, N) float32, scaled
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


def reinflow_loss(agent: Agent, args: Args, obs: Tensor, chains: Tensor, old_logps: Tensor, advantages: Tensor,
                  returns: Tensor, old_values: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Loss of one minibatch, to be minimised, and (approx_kl, clip_fraction, entropy). obs (B, D), chains
    (B, K + 1, A), the others (B,)."""
    (logps, entropy), values = agent.log_prob(obs, chains), agent.value(obs)
    log_ratio = logps - old_logps
    ratio = log_ratio.exp()
    if args.normalize_advantages:  # per minibatch, as in the authors' code
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


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: Batch, generator: torch.Generator,
           args: Args) -> dict[str, float]:  # fmt: skip
    """`update_epochs` passes over one rollout in minibatches. Returns metrics."""
    with torch.no_grad():  # of the whole rollout at once, before the first epoch
        (old_logps, _), values = agent.log_prob(batch.obs, batch.chains), agent.value(batch.obs)
        next_values = agent.value(batch.next_obs)  # truncated episodes, too; CleanRL treats truncation as termination
        done = batch.terminated | batch.truncated
        advantages = gae(batch.rewards, values, next_values, batch.terminated, done, args.gamma, args.gae_lambda)
        returns = advantages + values
    rows = [x.flatten(0, 1) for x in (batch.obs, batch.chains, old_logps, advantages, returns, values)]
    norms, epochs = [], 0
    while epochs < args.update_epochs:
        epochs += 1
        order, metrics = torch.randperm(len(rows[0]), generator=generator, device=rows[0].device), []
        for minibatch in zip(*(x[order].tensor_split(args.num_minibatches) for x in rows)):
            loss, numbers = reinflow_loss(agent, args, *minibatch)
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
def collect(agent: Agent, envs, obs: np.ndarray, generator: torch.Generator, statistics: Statistics,
            args: Args) -> tuple[Batch, np.ndarray, list]:  # fmt: skip
    """T steps of N environments from observations `obs` (N, D).

    Returns a Batch, the observations to go on from, and (return, length) of the episodes that ended.
    """
    device, shape = generator.device, (args.num_steps, args.num_envs)
    chains, episodes = [], []
    seen, next_obs = (np.empty((args.num_steps, *obs.shape), np.float32) for _ in range(2))
    rewards, (terminated, truncated) = np.empty(shape, np.float32), np.empty((2, *shape), bool)
    for t in range(args.num_steps):
        seen[t] = obs
        chains.append(agent.sample(torch.from_numpy(seen[t]).to(device), 1.0, generator))
        obs, next_obs[t], reward, terminated[t], truncated[t], ended = step_vector(envs, agent.to_env(chains[t]))
        rewards[t] = statistics.reward(reward, terminated[t] | truncated[t])
        episodes += ended
    arrays = (seen, rewards, next_obs, terminated, truncated)
    seen, *others = (torch.from_numpy(array).to(device) for array in arrays)
    return Batch(seen, torch.stack(chains), *others), obs, episodes


def take_over(args: Args) -> dict[str, Tensor]:
    """The velocity of the run --init, whose settings fill in what `args` leave at None. Raises UserError where there is
    no finished run of flow_bc.py, or `args` ask for another network."""
    saved, path = saved_args(args.init, "flow_bc"), Path(args.init) / "model" / "model.safetensors"
    if not path.is_file():
        raise UserError(f"--init {args.init} has no model: give a run of flow_bc.py that is finished")
    saved |= {"actor_size": saved["hidden_size"]}
    args.env_kwargs = args.env_kwargs or (() if args.env_id else saved["env_kwargs"])
    preset(args, {"the run": {name: saved[name] for name in PRESETS["an untrained flow"]}}, "the run")
    if args.actor_size != saved["actor_size"]:
        raise UserError(f"--actor-size {args.actor_size}: the run --init {args.init} has {saved['actor_size']}")
    return {name.removeprefix("actor."): weight for name, weight in load_file(path).items()}


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    if not is_bounded(space):
        wanted = "a Box of floats with finite bounds"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: {TITLE} needs {wanted}")
    if not 0 < args.min_std <= args.max_std:
        raise UserError(f"--min-std {args.min_std}: it must be above 0, and at most --max-std {args.max_std}")
    rows = args.num_envs * args.num_steps
    if rows % args.num_minibatches or rows // args.num_minibatches < 2:
        parts = f"the {rows} rows of a rollout (num_envs * num_steps) into parts of at least 2"
        raise UserError(f"--num-minibatches {args.num_minibatches} must divide {parts}")
    if args.total_timesteps < rows:
        raise UserError(f"--total-timesteps {args.total_timesteps} is less than one rollout of {rows} steps")


@torch.no_grad()
def act_in_evaluation(agent: Agent, obs: np.ndarray, scale: Tensor, generator: torch.Generator) -> np.ndarray:
    """What `evaluate` calls: actions of observations (N, D). Where `scale` is 0, steps have no noise."""
    obs = torch.from_numpy(obs.astype(np.float32)).to(generator.device)
    return agent.to_env(agent.sample(obs, scale, generator))


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
    start = take_over(args) if args.init and not (args.resume or args.evaluate) else {}
    settings = preset(args, PRESETS, "an untrained flow")
    env, eval_envs = try_out(make, args)
    check(args, env.action_space)
    agent = Agent(env.observation_space.shape[0], env.action_space, args).to(device)
    score_agent = partial(evaluate, eval_envs, partial(act_in_evaluation, agent), args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    if start:
        wanted = {name: w.shape for name, w in agent.actor.state_dict().items()}
        if wanted != {name: w.shape for name, w in start.items()}:
            raise UserError(f"--init {args.init} has other observations or actions than --env-id {args.env_id}")
        agent.actor.load_state_dict(start)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    rollout = args.num_envs * args.num_steps
    run = Run(args, NAME, args.env_id, args.total_timesteps // rollout * rollout, ("return", "eval/return"))
    run.print(settings)
    envs, obs = make_vector(make, args, run.step)
    statistics = Statistics(args.num_envs, args.gamma, args.scale_rewards)
    parts = dict(agent=agent, optimizer=optimizer, statistics=statistics, generator=generator)
    run.restore(**parts)
    step = run.step
    while step < run.total:
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / run.total)

        # collect
        batch, obs, episodes = collect(agent, envs, obs, generator, statistics, args)
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
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train, NAME)
