"""HER: algos/her.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
original-goals-not-stored: only hindsight is learned from
- for transitions in (episode, *others):
+ for transitions in others:

episodes-mixed: the list of rows is not emptied: goals of another episode
-             paths[i] = []

next-observation-of-the-reset:her: what a vector returns is the first observation of the next episode
- terminated[:, None], true_obs], 1, dtype
+ terminated[:, None], next_obs], 1, dtype

goal-of-the-past: which end of an episode a range begins at
- return torch.arange(length) + (drawn * torch.arange(length, 0, -1)).long()
+ return (drawn * torch.arange(1, length + 1)).long()

goal-of-the-last-step: strategy "final" of the paper
- return torch.arange(length) + (drawn * torch.arange(length, 0, -1)).long()
+ return torch.full((k, length), length - 1)

goal-in-one-observation-only: two places, one is forgotten; the target then asks for the value of another goal
- obs[:, goals.desired] = next_obs[:, goals.desired] = goal
+ obs[:, goals.desired] = goal

copies-share-their-array: a view is written to, and the original loses its goal
- episode.obs.clone(), episode.next_obs.clone()
+ episode.obs, episode.next_obs
"""
FLIP = dict(env_id="BitFlip-v0", total_timesteps=6000, gamma=0.98, end_e=0.1, learning_starts=500, log_every=1200,
            buffer_size=100_000, eval_every=1200, eval_episodes=100)  # fmt: skip

SPEC = Spec(
    "HER, arXiv 1707.01495",
    tests="exact_her exact_dqn parity_sb3_her parity_updates environments command_line_control resume_control wiring",
    curves={"her-bitflip": Curve(FLIP, "eval/success", numbers={"mean eval/success": "share"})},
    effects={"her-bitflip": Effect(
        {"her": ("her", FLIP), "dqn": ("dqn", FLIP | dict(env_id="algos.her:BitFlip-v0")),
         "no_hindsight": ("her", FLIP | dict(her_k=0))},
        "last eval/success", {"her > dqn + 0.5": 9, "no_hindsight < 0.2": 9},
    )},
    no_recipe="the paper's table is of DDPG on a robot; of BitFlip it gives no table",
    flags=dict(env_kwargs=("n=4",)),
    special={"env_id": ({"env_kwargs": ()}, "environments:Goal-v0"), "env_kwargs": ({}, ("n=5",)),
             "eval_episodes": ({}, 20)},
    walk="environments:Goal-v0",
    noise=dict(env_id="environments:Goal-v0", env_kwargs=("label=noisy",)),
)  # fmt: skip
