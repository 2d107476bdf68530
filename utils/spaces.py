"""Actions between [-1, 1], where policies live, and the bounds of an environment."""

import gymnasium as gym
import numpy as np


def is_bounded(space: gym.Space) -> bool:
    """Whether it is a Box of floats that [-1, 1] can be stretched to: its bounds and their difference are finite."""
    with np.errstate(over="ignore"):
        return (
            isinstance(space, gym.spaces.Box) and space.dtype.kind == "f" and np.isfinite(space.high - space.low).all()
        )


def to_env(actions: np.ndarray, space: gym.spaces.Box) -> np.ndarray:
    """Actions (N, A) in [-1, 1] stretched to the bounds of the environment."""
    actions = actions.reshape(-1, *space.shape)
    stretched = space.low + (actions + 1) / 2 * (space.high - space.low)
    return stretched.clip(space.low, space.high)  # rounding can lead one unit in the last place outside


def to_unit(actions: np.ndarray, space: gym.spaces.Box) -> np.ndarray:
    """Actions (n, A) in the bounds of the environment, brought to [-1, 1]."""
    low, high = np.ravel(space.low), np.ravel(space.high)
    return (2 * (actions - low) / (high - low) - 1).clip(-1, 1)
