r"""REINFORCE with discrete actions.

Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning" (Machine
Learning 8, pages 229-256), with the leave-one-out baseline of Kool, van Hoof and Welling 2019, "Buy 4 REINFORCE
Samples, Get a Baseline for Free!", which rloo.py gives a language model (arXiv 2402.14740).

The policy plays whole episodes. It makes each action likelier by how much better it went from there than in the other
episodes at the same step. This is the gradient of the expected return and nothing else: no value network, no ratio, no
replay. Maximises

    J(theta)      = E  1/N sum_i sum_t r_it
    grad J(theta) = E  1/N sum_i sum_t (G_it - b_it) grad log pi_theta(a_it | s_it)

    s_it, a_it, r_it   observation, action and reward in step t of episode i of N: --num-episodes
    G_it    sum_k gamma^k r_i,t+k: the return from step t on; gamma: --gamma
    b_it    1/(N - 1) sum_j!=i G_jt, where an episode that is over has G = 0; 0 with --no-baseline

Earlier rewards do not depend on a_it, so G_it leaves them out. b_it comes from other episodes, so it does not depend on
a_it either: the gradient's mean stays as it is. Its noise falls where all episodes have much of their return in common,
and may rise a little elsewhere. All this is exact at gamma = 1. Below 1, later steps count as much as early ones, as
everywhere in practice, and the gradient is that of no objective.

Run
    python algos/reinforce.py                                                           CartPole-v1
    python algos/reinforce.py --no-baseline
    python algos/reinforce.py --env-id package.module:Name-v0 --env-kwargs size=5       your own environment
    python algos/reinforce.py --evaluate RUN --eval-episodes 100 --capture-video        scores a saved agent

Expect
    CartPole-v1: returns of training episodes rise from 30 to about 440 within 30,000 steps, and the greedy one is 500,
    the most there is, from 40,000 steps on (seed 1, 15 seconds). After 40,000 steps 30 seeds have 461 with a standard
    deviation of 72; 17 of them have 500. There --no-baseline learns as fast. Where all rewards are negative it does
    not: on BitFlip-v0 with four bits, returns of the last half of 40,000 steps are -2.4 +- 0.2, without a baseline -3.4
    +- 0.2. The baseline is ahead in all ten seeds, by 0.8 in 7 of them, where 9 were asked before (10 seeds, 95 %
    intervals; benchmarks/effects.py, reinforce-baseline).

Metrics
    return, length      mean over the step's episodes; the return rises
    eval/return         mean over --eval-episodes, the likeliest action; eval/return_stochastic: sampled ones
    entropy             nats per action; falls, should not reach 0
    advantage_std       standard deviation of G - b; at 0 all episodes were alike, and with a baseline nothing is learnt
    grad_norm           of the loss

Differences
    - Adam for plain gradient ascent. The paper's example of a baseline is a running mean of rewards.
    - An episode that a limit of time cuts off counts as if it had ended. Without a value network there is nothing to
      go on with: ppo.py has one.
    - Spinning Up's vpg.py learns a value network for the baseline. Many tutorials divide G by its standard deviation
      over the batch, which scales the gradient.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.control import (
    LONGEST,
    EnvArgs,
    episode_columns,
    evaluate,
    make_env,
    make_vector,
    score_saved,
    step_vector,
    try_out,
)
from utils.core import Run, UserError, main, prepare

NAME, TITLE = "reinforce", "REINFORCE"


@dataclass
class Args(EnvArgs):
    num_envs = 1
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs);
    # env_kwargs, eval_every, eval_episodes, evaluate, capture_video (EnvArgs)
    env_id: str = "CartPole-v1"
    """a Gymnasium environment with discrete actions, or MODULE:NAME of one that MODULE registers"""
    total_timesteps: int = 100_000
    """environment steps; the last episodes are played to their end, uncounted"""
    num_episodes: int = 8
    """episodes per update"""
    learning_rate: float = 1e-2
    """learning rate of Adam"""
    gamma: float = 0.99
    """discount"""
    baseline: bool = True
    """subtract what the other episodes got from the same step on"""
    hidden_size: int = 64
    """units of the hidden layer"""
    save_every: int = 10_000
    """environment steps between checkpoints"""


class Batch(NamedTuple):
    """What one update learns from: N episodes of at most T steps, zeros behind their ends."""

    obs: Tensor  # (N, T, D) float32
    actions: Tensor  # (N, T), numbers from 0
    rewards: Tensor  # (N, T) float32
    mask: Tensor  # (N, T) bool: steps of the episode


def returns_to_go(rewards: Tensor, gamma: float) -> Tensor:
    """G: discounted sums of the rewards from each step on. (N, T) -> (N, T)"""
    returns, following = torch.empty_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        returns[:, t] = following = rewards[:, t] + gamma * following
    return returns


def advantages(returns: Tensor, baseline: bool) -> Tensor:
    """G - b: returns minus the mean of the other episodes' at the same step. (N, T) -> (N, T)"""
    return returns - (returns.sum(0) - returns) / (len(returns) - 1) if baseline else returns


def update(policy: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """One step up the gradient. Returns metrics."""
    mask, advantage = batch.mask, advantages(returns_to_go(batch.rewards, args.gamma), args.baseline)
    log_probs = policy(batch.obs).log_softmax(-1)  # (N, T, number of actions)
    chosen = log_probs.gather(-1, batch.actions[..., None])[..., 0]
    loss = -(mask * advantage * chosen).sum() / len(mask)  # a sum over steps: their mean would favour short episodes
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    grad_norm = nn.utils.get_total_norm([p.grad for p in policy.parameters()])
    optimizer.step()
    entropy = -(log_probs.exp() * log_probs).sum(-1)[mask].mean()
    return {"entropy": entropy.item(), "advantage_std": advantage[mask].std().item(), "grad_norm": grad_norm.item()}


@torch.no_grad()
def act(policy: nn.Module, obs: np.ndarray, scale: Tensor | float, generator: torch.Generator) -> np.ndarray:
    """Actions (N,), numbers from 0, of observations (N, D): the largest of logits plus Gumbel noise, which is a draw
    from their softmax. `scale`, one for all or (N, 1), multiplies the noise; 0 gives the likeliest action."""
    logits = policy(torch.from_numpy(obs.astype(np.float32)).to(generator.device))
    noise = -torch.empty_like(logits).exponential_(generator=generator).log()
    return (logits + scale * noise).argmax(-1).cpu().numpy()


def collect(policy: nn.Module, envs, obs: np.ndarray, start: int, generator: torch.Generator,
            args: Args) -> tuple[Batch, np.ndarray, list]:  # fmt: skip
    """`num_episodes` whole episodes, one after the other, from the first observation `obs` (1, D). The environment's
    actions count from `start`.

    Returns a Batch, the next first observation, and (return, length) of the episodes. Raises UserError where one goes
    on for LONGEST steps.
    """
    episodes: list[tuple[float, int]] = []
    rows: list[list[tuple]] = []
    while len(episodes) < args.num_episodes:
        rows.append([])
        ended: list = []
        while not ended:
            if len(rows[-1]) == LONGEST:
                wrong = f"an episode of --env-id {args.env_id} has not ended after {LONGEST} steps"
                raise UserError(f"{wrong}: --env-kwargs max_episode_steps=1000 sets a limit")
            action = act(policy, obs, 1.0, generator)
            following, _, reward, _, _, ended = step_vector(envs, start + action)
            rows[-1].append((obs[0], action[0], reward[0]))
            obs = following
        episodes += ended
    columns = [[torch.tensor(np.array(column)) for column in zip(*episode)] for episode in rows]
    seen, actions, rewards = (pad_sequence(list(column), batch_first=True) for column in zip(*columns))
    lengths = torch.tensor([length for _, length in episodes])
    mask = torch.arange(seen.shape[1]) < lengths[:, None]
    batch = Batch(*(x.to(generator.device) for x in (seen.float(), actions, rewards.float(), mask)))
    return batch, obs, episodes


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    if not isinstance(space, gym.spaces.Discrete):
        raise UserError(f"--env-id {args.env_id} has the action space {space}: {TITLE} needs a Discrete one")
    if args.baseline and args.num_episodes < 2:
        raise UserError("--num-episodes must be at least 2: the baseline of an episode is the mean of the others")


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
    env, eval_envs = try_out(make, args)
    obs_size, space = env.observation_space.shape[0], env.action_space
    check(args, space)
    policy = nn.Sequential(nn.Linear(obs_size, args.hidden_size), nn.Tanh(), nn.Linear(args.hidden_size, int(space.n)))
    policy.to(device)
    score_agent = partial(evaluate, eval_envs, lambda obs, scale, generator: space.start + act(
        policy, obs, scale, generator), args, device)  # fmt: skip
    if args.evaluate:
        return score_saved(args, score_agent, policy=policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate)
    generator = torch.Generator(device).manual_seed(args.seed)
    run = Run(args, NAME, args.env_id, args.total_timesteps, ("return", "eval/return", "entropy"))
    envs, obs = make_vector(make, args, run.step)
    parts = dict(policy=policy, optimizer=optimizer, generator=generator)
    run.restore(**parts)
    step = run.step
    while step < run.total:
        # collect
        batch, obs, episodes = collect(policy, envs, obs, space.start, generator, args)
        step = min(step + int(batch.mask.sum()), run.total)

        # update
        columns = episode_columns(episodes) | update(policy, optimizer, batch, args)
        columns["time/steps_per_second"] = run.speed(step)

        # evaluate
        if run.due(step, args.eval_every):
            columns |= score_agent()
        run.log(step, **columns)
        run.end_step(step, parts)

    envs.close()
    curves = {"return": ("return", "eval/return"), "entropy": ("entropy",), "advantage std": ("advantage_std",)}
    return run.finish(policy.state_dict(), curves, f"{TITLE} on {args.env_id}")


if __name__ == "__main__":
    main(Args, train, NAME)
