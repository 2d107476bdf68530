r"""ReBRAC.

Tarasov et al. 2023, "Revisiting the Minimalist Approach to Offline Reinforcement Learning" (arXiv 2305.09836).

Parent: td3_bc.py. Leaving the data costs in the target, too; critics have LayerNorm, networks a third layer.

The critics of TD3+BC count on what the policy does at the next state, however far that is from the data. ReBRAC takes
the distance from the data's next action off the target. On minibatches minimises

    L_Q   = E sum_i (y - Q_i(s, a))^2,    i, j in {1, 2}
    y     = r + gamma (1 - terminated) (min_j Qbar_j(s', a') - b2 f |a' - a'_data|^2)
    a'    = clip(mubar(s') + clip(eps, -c, c), -1, 1),    eps ~ N(0, sigma^2)
    L_mu  = b1 E |mu(s) - a|^2 - E min_i Q_i(s, mu(s)) / E |min_i Q_i(s, mu(s))|

    b1, b2       --actor-bc, --critic-bc; |.|^2 is a sum over the numbers of an action
    a'_data, f   the action of the trajectory's next row; f = 0 in its last row, which has none
    E |min Q|    a constant in the gradient: b1 means the same for rewards of any scale
    Qbar, mubar  targets; policy and targets move at every --policy-frequency-th update of the critics
    sigma, c     --policy-noise, --noise-clip

Run
    python algos/rebrac.py                                                       a tenth of the collection that ships
    python algos/rebrac.py --critic-bc 0                                         without the penalty in the target
    python algos/rebrac.py --dataset hopper_medium_replay-v2.hdf5 --max-steps 1000000 --batch-size 1024 \
        --learning-rate 1e-3 --actor-bc 0.05 --critic-bc 0.5 --no-normalize --eval-every 5000    the authors' recipe
    python algos/rebrac.py --evaluate RUN --eval-episodes 100 --capture-video    scores a saved agent

Expect
    A tenth of Hopper-v5's collection, whose trajectories return 1,882 on average: 1,320 +- 240 as the mean of all
    evaluations (8 seeds; benchmarks/curves.py, rebrac-hopper), in half a minute on one core. On the same rows td3_bc.py
    has 1,890 +- 350, with twice the updates and minibatch: we claim no order of returns.
    In 1,000 updates of 64 rows (5 seeds; benchmarks/effects.py) the penalty lowers values: the critics promise 9.1 at
    b2 = 0.5 and 10.2 at 0 (rebrac-values). It does not narrow the gap, as we had claimed: 0.11 and 0.09 (rebrac-gap).
    LayerNorm does not hold values down in so short a run, without either penalty: 10.8 with it, 6.7 without
    (rebrac-layer-norm). It bounds those of actions far out, which a test shows.

Metrics
    q, q_policy         means of min_i Q_i over the data's actions and over the policy's
    gap                 mean min_i Q_i(s', mu(s')) - min_i Q_i(s', a'_data) over the last minibatch's rows where f = 1
    distance, td_error  mean |mu(s) - a|, of actions in [-1, 1]; mean |min_i Q_i(s, a) - y|; eval/... as in td3_bc.py

Differences
    - The authors' biases begin at 0.1 and their last layers near 0; here all begin as in td3_bc.py. Their target actor
      moves towards the actor as it was before its step; here, as in TD3, towards the new one.
    - The authors leave time-outs out, so only terminal rows lack a next action, and they need none. The collection that
      ships knows what was observed at a time-out: there the row stays, without the penalty.
    - The defaults suit two cores and a narrow dataset: 128 rows (authors 1,024), learning rate 3e-4 (1e-3), normalised
      observations (raw), b1 = 0.5 (at most 0.1 on locomotion). The paper tunes b1 and b2 for each dataset.
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

NAME, TITLE = "rebrac", "ReBRAC"


@dataclass
class Args(OfflineArgs):
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs); env_kwargs, eval_every,
    # eval_episodes, evaluate, capture_video (EnvArgs); dataset, env_id (OfflineArgs)
    max_steps: int = 2_000
    """updates of the critics"""
    learning_rate: float = 3e-4
    """learning rate of Adam, for actor and critics"""
    gamma: float = 0.99
    """discount"""
    tau: float = 0.005
    """step of the targets towards actor and critics"""
    actor_bc: float = 0.5
    """weight of the squared error to the data's actions: b1"""
    critic_bc: float = 0.01
    """weight of the squared error to the data's next actions, in the target: b2"""
    layer_norm: bool = True
    """LayerNorm behind each hidden layer of the critics"""
    policy_noise: float = 0.2
    """standard deviation of the noise on the target's actions in [-1, 1]"""
    noise_clip: float = 0.5
    """bound of that noise"""
    policy_frequency: int = 2
    """updates of the critics for one of actor and targets"""
    normalize: bool = True
    """subtract the dataset's mean from observations and divide them by its standard deviation"""
    batch_size: int = 128
    """transitions per update"""
    hidden_size: int = 256
    """units of the three hidden layers"""
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
    next_actions: Tensor  # (B, A), those of the data; meaningless where not `followed`
    followed: Tensor  # (B, 1), 0 or 1; 0 in the last row of a trajectory


def network(size_in: int, hidden_size: int, size_out: int, layer_norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []  # eps of LayerNorm is flax's
    for size in (size_in, hidden_size, hidden_size):
        layers += [nn.Linear(size, hidden_size), nn.ReLU(), *[nn.LayerNorm(hidden_size, eps=1e-6)] * layer_norm]
    return nn.Sequential(*layers, nn.Linear(hidden_size, size_out))


class Actor(nn.Module):
    def __init__(self, obs_size: int, action_size: int, hidden_size: int):
        super().__init__()
        self.net = network(obs_size, hidden_size, action_size)

    def forward(self, obs: Tensor) -> Tensor:
        """Actions in [-1, 1]: (B, A)."""
        return self.net(obs).tanh()


class Critics(nn.Module):
    def __init__(self, obs_size: int, action_size: int, hidden_size: int, layer_norm: bool):
        super().__init__()
        self.q1, self.q2 = (network(obs_size + action_size, hidden_size, 1, layer_norm) for _ in range(2))

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Q_1 and Q_2, each (B, 1)."""
        both = torch.cat([obs, actions], -1)
        return self.q1(both), self.q2(both)


class Agent(nn.Module):
    """What is saved: actor, critics, the targets of both, and the statistics of --normalize."""

    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        self.actor = Actor(obs_size, action_size, args.hidden_size)
        self.critics = Critics(obs_size, action_size, args.hidden_size, args.layer_norm)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.obs_mean, self.obs_std = nn.Buffer(torch.zeros(obs_size)), nn.Buffer(torch.ones(obs_size))

    def normalized(self, obs: np.ndarray) -> np.ndarray:
        """Observations (N, D) as the networks see them: the same ones with --no-normalize."""
        return (obs - self.obs_mean.cpu().numpy()) / self.obs_std.cpu().numpy()


def critic_loss(agent: Agent, batch: Transitions, noise: Tensor, gamma: float,
                critic_bc: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """L_Q, min_i Q_i and the target y. noise (B, A), clipped: what smooths the target's actions."""
    with torch.no_grad():
        next_actions = (agent.target_actor(batch.next_obs) + noise).clamp(-1, 1)
        next_q = torch.min(*agent.target_critics(batch.next_obs, next_actions))
        penalty = batch.followed * (next_actions - batch.next_actions).square().sum(1, keepdim=True)
        target = batch.rewards + gamma * (1 - batch.terminated) * (next_q - critic_bc * penalty)
    q1, q2 = agent.critics(batch.obs, batch.actions)
    return ((q1 - target).square() + (q2 - target).square()).mean(), torch.min(q1, q2).detach(), target


def actor_loss(agent: Agent, batch: Transitions, actor_bc: float) -> tuple[Tensor, Tensor, Tensor]:
    """L_mu; without gradient mu(s) (B, A) and min_i Q_i(s, mu(s)) (B, 1)."""
    actions = agent.actor(batch.obs)
    q = torch.min(*agent.critics(batch.obs, actions))
    penalty = (actions - batch.actions).square().sum(1).mean()
    return actor_bc * penalty - q.mean() / q.detach().abs().mean(), actions.detach(), q.detach()


@torch.no_grad()
def gap_of(agent: Agent, batch: Transitions) -> Tensor:
    """Mean of min_i Q_i(s', mu(s')) - min_i Q_i(s', a'_data) over rows that have a next action."""
    own = torch.min(*agent.critics(batch.next_obs, agent.actor(batch.next_obs)))
    data = torch.min(*agent.critics(batch.next_obs, batch.next_actions))
    return ((own - data) * batch.followed).sum() / batch.followed.sum().clamp(min=1)


class Optimizers(NamedTuple):
    actor: torch.optim.Optimizer
    critics: torch.optim.Optimizer


def update(agent: Agent, optimizers: Optimizers, batch: Transitions, generator: torch.Generator, args: Args,
           number: int) -> dict[str, Tensor]:  # fmt: skip
    """One step of critics, actor and targets, in this order; of actor and targets only where the update's number is a
    multiple of --policy-frequency. Returns metrics, as tensors: reading them would make the CPU wait for the device at
    every update."""
    noise = torch.randn(batch.actions.shape, generator=generator, device=batch.obs.device) * args.policy_noise
    loss, q, target = critic_loss(agent, batch, noise.clamp(-args.noise_clip, args.noise_clip), args.gamma,
                                  args.critic_bc)  # fmt: skip
    optimizers.critics.zero_grad(set_to_none=True)
    loss.backward()
    optimizers.critics.step()
    metrics = {"q": q.mean(), "td_error": (q - target).abs().mean()}

    if number % args.policy_frequency == 0:
        agent.critics.requires_grad_(False)  # the actor's gradient passes through them; theirs would be thrown away
        loss, actions, q_policy = actor_loss(agent, batch, args.actor_bc)
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
    next_actions, followed = np.roll(to_unit(data.actions, space), -1, 0), np.ones((len(data.obs), 1), bool)
    followed[data.starts - 1] = False  # of starts[0] = 0 this is the last row of all
    replay = ReplayBuffer(rows.sum(), (obs_size, action_size, 1, 1, obs_size, action_size, 1), device)
    replay.add(agent.normalized(data.obs[rows]), to_unit(data.actions[rows], space), data.rewards[rows, None],
               data.terminated[rows, None], agent.normalized(data.next_obs[rows]),
               next_actions[rows], followed[rows])  # fmt: skip
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
            columns["gap"] = gap_of(agent, batch).item()
            columns["time/updates_per_second"] = run.speed(step)
            if due and eval_envs:
                columns |= compared(score_agent(), data, run, step)
            run.log(step, **columns)
        run.end_step(step, parts | dict(metrics=metrics))

    curves = {"return": ("eval/return",), "value": ("q", "q_policy"), "distance": ("distance",)}
    return run.finish(agent.state_dict(), curves, f"{TITLE} on {data.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
