"""Hindsight (Andrychowicz et al. 2017, arXiv 1707.01495): steps of an episode as if it had gone for what it reached."""

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from utils.errors import UserError


class Goals(NamedTuple):
    """Where flattened observations hold goals of G numbers, and what the environment says of pairs of them."""

    achieved: slice
    desired: slice
    reward: Callable  # achieved (n, G), desired (n, G) -> (n,)
    terminated: Callable  # achieved (G,), desired (G,) -> bool: Gymnasium-Robotics' PointMaze takes no more than one


def find_goals(env_id: str, make: Callable, title: str) -> Goals:
    """Raises UserError where the environment has none. Warns where a wrapper changes rewards."""
    wrapped = make()
    env = wrapped.unwrapped
    parts = getattr(env.observation_space, "spaces", {})
    computes = hasattr(env, "compute_reward") and hasattr(env, "compute_terminated")
    if set(parts) != {"achieved_goal", "desired_goal", "observation"} or not computes:
        needed = "a dictionary of observation, achieved_goal and desired_goal, compute_reward and compute_terminated"
        raise UserError(f"--env-id {env_id} has no goals: {title} needs {needed}")
    ends = np.cumsum([gym.spaces.flatdim(part) for part in parts.values()])
    places = {name: slice(end - gym.spaces.flatdim(part), end) for (name, part), end in zip(parts.items(), ends)}
    if len(shape := parts["desired_goal"].shape) != 1:
        raise UserError(f"--env-id {env_id} has goals of shape {shape}: {title} needs vectors, so flatten them")
    wrapped.reset(seed=0)
    obs, reward, _, _, info = wrapped.step(wrapped.action_space.sample())
    computed = env.compute_reward(obs[None, places["achieved_goal"]], obs[None, places["desired_goal"]], info)
    if not np.allclose(reward, computed, rtol=1e-3, atol=1e-3):
        wrong = f"warning: --env-id {env_id} gave the reward {reward} where compute_reward says {np.ravel(computed)[0]}"
        print(f"{wrong}: played and relabelled steps would have rewards of two kinds", file=sys.stderr)
    return Goals(places["achieved_goal"], places["desired_goal"], partial(env.compute_reward, info={}),
                 partial(env.compute_terminated, info={}))  # fmt: skip


def future(length: int, k: int, generator: torch.Generator) -> Tensor:
    """For each step t of an episode k steps j of t .. length - 1, uniformly: (k, length), on the CPU."""
    drawn = torch.rand(k, length, dtype=torch.float64, generator=generator, device=generator.device).cpu()
    return torch.arange(length) + (drawn * torch.arange(length, 0, -1)).long()


def relabel(episode, later: Tensor, goals: Goals):
    """The T steps of an episode, on the CPU, as if step t had gone for what step later[t] achieved. episode: a named
    tuple with obs, actions, rewards, terminated, next_obs."""
    achieved = episode.next_obs[:, goals.achieved]
    goal, obs, next_obs = achieved[later], episode.obs.clone(), episode.next_obs.clone()
    obs[:, goals.desired] = next_obs[:, goals.desired] = goal
    pairs = achieved.numpy(), goal.numpy()
    rewards = torch.tensor(np.broadcast_to(goals.reward(*pairs), len(goal)))[:, None]
    terminated = torch.tensor([bool(goals.terminated(*pair)) for pair in zip(*pairs)])[:, None]
    return episode._replace(obs=obs, rewards=rewards, terminated=terminated, next_obs=next_obs)
