r"""TD3+BC.

Fujimoto and Gu 2021, "A Minimalist Approach to Offline Reinforcement Learning" (arXiv 2106.06860), with the critics of
TD3 (arXiv 1802.09477).

Parent: bc.py. The policy also climbs the values that TD3's critics learn.

TD3 on a dataset fails: its policy moves to actions that the data lacks, where nothing corrects what the critics
believe. A term of behaviour cloning keeps it near the data. On minibatches minimises

    L_Q   = E sum_i (r + gamma (1 - terminated) min_j Qbar_j(s', a') - Q_i(s, a))^2,   i, j in {1, 2}
    a'    = clip(mubar(s') + clip(eps, -c, c), -1, 1),    eps ~ N(0, sigma^2)
    L_mu  = -lambda E Q_1(s, mu(s)) + w E |mu(s) - a|^2 / A,    lambda = alpha / E |Q_1(s, mu(s))|

    lambda       a constant in the gradient: it makes alpha mean the same for rewards of any scale
    A            numbers of an action; w: --bc-weight, 0 is TD3 with scaled gradients; alpha: --alpha, 0 clones
    Qbar, mubar  targets; policy and targets move at every --policy-frequency-th update of the critics
    sigma, c     --policy-noise, --noise-clip

Run
    python algos/td3_bc.py                                                       a tenth of the collection that ships
    python algos/td3_bc.py --bc-weight 0                                         without the idea: TD3
    python algos/td3_bc.py --dataset hopper_medium_replay-v2.hdf5 --max-steps 1000000 --eval-every 5000
                                                                                 the paper's recipe
    python algos/td3_bc.py --evaluate RUN --eval-episodes 100 --capture-video    scores a saved agent

Expect
    A tenth of Hopper-v5's collection, whose trajectories return 1,882 on average and 2,485 at best: 2,330 +- 590 in
    the last half of the evaluations (5 seeds; benchmarks/effects.py, td3_bc-hopper), in half a minute on one core. TD3,
    which is --bc-weight 0, gets -1 +- 3, and bc.py 937 (seed 1) on the same rows. Its critics promise its actions 43 on
    average, those of TD3+BC 26. We had claimed twice as much: one seed of five has that.

Metrics
    q, q_policy         means of Q_1 over the data's actions and over the policy's; the second one far above the first
                        says that the critics believe in actions that nobody tried
    distance            mean |mu(s) - a|, of actions in [-1, 1]
    td_error            mean |Q_1(s, a) - y|
    eval/return         eval/return_stochastic: the same from other starts, for nothing is drawn
    eval/score, eval/d4rl_score and eval/best_return: as in bc.py

Differences
    - None to the authors' code, the source of every constant. The paper's lambda has Q of the data's actions.
    - --top-fraction is ours (see bc.py): on the whole collection that ships TD3 does not fail, for it was recorded by
      agents of all kinds. Your own dataset is taken whole.
    - ReBRAC sums the squared errors of an action's numbers where this code, the authors' and CORL take their mean.
"""

import copy
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.control import ReplayBuffer, evaluate, is_bounded, make_env, score_saved, to_env, to_unit, try_out
from utils.core import Run, UserError, main, prepare
from utils.offline import OfflineArgs, check_spaces, compared, load_dataset

NAME, TITLE = "td3_bc", "TD3+BC"


@dataclass
class Args(OfflineArgs):
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs); env_kwargs, eval_every,
    # eval_episodes, evaluate, capture_video (EnvArgs); dataset, env_id (OfflineArgs)
    max_steps: int = 4_000
    """updates of the critics"""
    learning_rate: float = 3e-4
    """learning rate of Adam, for actor and critics"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.005
    """step of the targets towards actor and critics"""
    alpha: float = 2.5
    """weight of the values: alpha"""
    bc_weight: float = 1.0
    """weight of the squared error to the data's actions: w"""
    policy_noise: float = 0.2
    """standard deviation of the noise on the target's actions in [-1, 1]"""
    noise_clip: float = 0.5
    """bound of that noise"""
    policy_frequency: int = 2
    """updates of the critics for one of actor and targets"""
    normalize: bool = True
    """subtract the dataset's mean from observations and divide them by its standard deviation"""
    batch_size: int = 256
    """transitions per update"""
    hidden_size: int = 256
    """units of the two hidden layers"""
    top_fraction: float | None = None
    """train on the trajectories of highest return, up to this fraction of all steps; None: 0.1 of the collection that
    ships, all of another dataset"""
    log_every: int = 500
    """updates between rows of metrics"""
    save_every: int = 5_000
    """updates between checkpoints"""


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
        self.net = network(obs_size, hidden_size, action_size)

    def forward(self, obs: Tensor) -> Tensor:
        """Actions in [-1, 1]: (B, A)."""
        return self.net(obs).tanh()


class Critics(nn.Module):
    def __init__(self, obs_size: int, action_size: int, hidden_size: int):
        super().__init__()
        self.q1, self.q2 = (network(obs_size + action_size, hidden_size, 1) for _ in range(2))

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Q_1 and Q_2, each (B, 1)."""
        both = torch.cat([obs, actions], -1)
        return self.q1(both), self.q2(both)


class Agent(nn.Module):
    """What is saved: actor, critics, the targets of both, and the statistics of --normalize."""

    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        self.actor = Actor(obs_size, action_size, args.hidden_size)
        self.critics = Critics(obs_size, action_size, args.hidden_size)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.obs_mean, self.obs_std = nn.Buffer(torch.zeros(obs_size)), nn.Buffer(torch.ones(obs_size))

    def normalized(self, obs: np.ndarray) -> np.ndarray:
        """Observations (N, D) as the networks see them: the same ones with --no-normalize."""
        return (obs - self.obs_mean.cpu().numpy()) / self.obs_std.cpu().numpy()


def critic_loss(agent: Agent, batch: Transitions, noise: Tensor,
                gamma: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """L_Q, Q_1 and the target y. noise (B, A), clipped: what smooths the target's actions."""
    with torch.no_grad():
        next_actions = (agent.target_actor(batch.next_obs) + noise).clamp(-1, 1)
        next_q = torch.min(*agent.target_critics(batch.next_obs, next_actions))
        target = batch.rewards + gamma * (1 - batch.terminated) * next_q
    q1, q2 = agent.critics(batch.obs, batch.actions)
    return ((q1 - target).square() + (q2 - target).square()).mean(), q1.detach(), target


def actor_loss(agent: Agent, batch: Transitions, alpha: float, bc_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """L_mu; without gradient mu(s) (B, A) and Q_1(s, mu(s)) (B, 1)."""
    actions = agent.actor(batch.obs)
    q = agent.critics(batch.obs, actions)[0]
    scale = alpha / q.detach().abs().mean()
    return -scale * q.mean() + bc_weight * (actions - batch.actions).square().mean(), actions.detach(), q.detach()


class Optimizers(NamedTuple):
    actor: torch.optim.Optimizer
    critics: torch.optim.Optimizer


def update(agent: Agent, optimizers: Optimizers, batch: Transitions, generator: torch.Generator, args: Args,
           number: int) -> dict[str, Tensor]:  # fmt: skip
    """One step of critics, actor and targets, in this order; of actor and targets only where the update's number is a
    multiple of --policy-frequency. Returns metrics, as tensors: reading them would make the CPU wait for the device at
    every update."""
    noise = torch.randn(batch.actions.shape, generator=generator, device=batch.obs.device) * args.policy_noise
    loss, q, target = critic_loss(agent, batch, noise.clamp(-args.noise_clip, args.noise_clip), args.gamma)
    optimizers.critics.zero_grad(set_to_none=True)
    loss.backward()
    optimizers.critics.step()
    metrics = {"q": q.mean(), "td_error": (q - target).abs().mean()}

    if number % args.policy_frequency == 0:
        agent.critics.requires_grad_(False)  # the actor's gradient passes through them; theirs would be thrown away
        loss, actions, q_policy = actor_loss(agent, batch, args.alpha, args.bc_weight)
        optimizers.actor.zero_grad(set_to_none=True)
        loss.backward()
        optimizers.actor.step()
        agent.critics.requires_grad_(True)
        metrics |= {"q_policy": q_policy.mean(), "distance": (actions - batch.actions).abs().mean()}
        with torch.no_grad():
            for lagging, network in ((agent.target_actor, agent.actor), (agent.target_critics, agent.critics)):
                torch._foreach_lerp_(list(lagging.parameters()), list(network.parameters()), args.tau)
    return metrics


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    if not is_bounded(space):
        wanted = "a Box of floats with finite bounds"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: {TITLE} needs {wanted}")


@torch.no_grad()
def act(agent: Agent, obs: np.ndarray, device: torch.device) -> np.ndarray:
    """Actions (N, A) in [-1, 1] of raw observations (N, D)."""
    return agent.actor(torch.from_numpy(agent.normalized(obs).astype(np.float32)).to(device)).cpu().numpy()


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
    data = None if args.evaluate else load_dataset(args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape[0], env.action_space
    check(args, space)
    action_size = math.prod(space.shape)
    agent = Agent(obs_size, action_size, args).to(device)
    score_agent = partial(evaluate, eval_envs, lambda obs, *_: to_env(act(agent, obs, device), space), args, device)
    if args.evaluate:
        return score_saved(args, score_agent, agent=agent)
    check_spaces(data, obs_size, space)
    if args.top_fraction is None:
        args.top_fraction = 1.0 if args.dataset else 0.1
    rows = data.known & data.top_rows(args.top_fraction)
    if not rows.any():
        raise UserError(f"--top-fraction {args.top_fraction} leaves no transition of {data.name}: raise it")
    if args.normalize:
        agent.obs_mean.copy_(torch.from_numpy(data.obs[rows].mean(0, np.float64)))
        agent.obs_std.copy_(torch.from_numpy(data.obs[rows].std(0, np.float64) + 1e-3))
    replay = ReplayBuffer(rows.sum(), (obs_size, action_size, 1, 1, obs_size), device)
    replay.add(agent.normalized(data.obs[rows]), to_unit(data.actions[rows], space), data.rewards[rows, None],
               data.terminated[rows, None], agent.normalized(data.next_obs[rows]))  # fmt: skip
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
    optimizers = Optimizers(adam(agent.actor.parameters()), adam(agent.critics.parameters()))
    generator = torch.Generator(device).manual_seed(args.seed)
    run = Run(args, NAME, data.name, args.max_steps, ("q", "q_policy", "eval/return"))
    run.print(f"{data.name}: {len(data.starts)} trajectories, {rows.sum()} transitions taken of {len(data.obs)}")
    parts = optimizers._asdict() | dict(agent=agent, generator=generator)
    run.restore(**parts)
    step, metrics = run.step, run.state.get("metrics", {})
    while step < run.total:
        # update
        batch = Transitions(*replay.sample(args.batch_size, generator))
        step += 1
        metrics |= update(agent, optimizers, batch, generator, args, step)

        # evaluate
        due = run.due(step, args.eval_every)
        if due or run.due(step, args.log_every):
            columns = {name: value.item() for name, value in metrics.items()}
            columns["time/updates_per_second"] = run.speed(step)
            if due and eval_envs:
                columns |= compared(score_agent(), data, run, step)
            run.log(step, **columns)
        run.end_step(step, parts | dict(metrics=metrics))

    curves = {"return": ("eval/return",), "value": ("q", "q_policy"), "distance": ("distance",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {data.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
