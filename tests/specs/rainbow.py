"""Rainbow: algos/rainbow.py."""

from tests.specs import Curve, Effect, Spec
from tests.specs.c51 import SPEC as PARENT

BUGS = """
rewards-not-discounted: a plain sum
- total = gamma ** np.arange(len(window)) @ window[:, reward]
+ total = window[:, reward].sum()

window-cleared-at-the-end: its last n - 1 steps are never learned from (CleanRL's rainbow_atari.py)
- while len(window) == args.n_step or (end and window):
+ while len(window) == args.n_step or (end and window.clear()):

ends-by-the-first-step: of two rows the wrong one
- last[reward + 1 :]
+ first[reward + 1 :]

noise-of-each-weight-its-own: a matrix of noise is drawn, as without factors (CleanRL's rainbow_atari.py)
- f_out * F.linear(f_in * x, self.sigma, self.sigma_bias)
+ F.linear(x, self.sigma * torch.randn_like(self.sigma), self.sigma_bias * f_out[0])

noise-without-its-root: f is forgotten
- (x.sign() * x.abs().sqrt() for x in normal)
+ (x for x in normal)

noise-drawn-for-one-network: the target network keeps the noise that it was born with, which is none
- for net in (agent.q, agent.target):
+ for net in (agent.q,):

noise-and-epsilon: both explore
-     if args.noisy:
-         return 0.0
+     if False:
+         return 0.0

weights-by-the-wrong-shape: (B, 1) times (B,) is (B, B)
- (batch.weights[:, 0] * losses).mean()
+ (batch.weights * losses).mean()

beta-stays: it is to rise to 1
- (1 - args.prioritized_replay_beta) * step / args.total_timesteps
+ 0

priority-by-cross-entropy: which is not 0 where all is learned (Kaixhin/Rainbow, agent.py)
- (losses.detach() + torch.xlogy(target, target).sum(1)).clamp(min=0)
+ losses.detach()

new-rows-have-no-priority: they are never drawn
- self.values[places] = torch.where(largest > 0, largest, 1.0)
+ self.values[places] = torch.where(largest > 0, 0.0, 1.0)

one-row-for-each-environment: a window that ends sheds several
- priorities.add(min(len(rows), args.buffer_size), replay.total)
+ priorities.add(min(args.num_envs, args.buffer_size), replay.total)
"""
PARTS = {"no_double": dict(double=False), "no_dueling": dict(dueling=False), "one_step": dict(n_step=1),
         "uniform": dict(prioritized=False), "not_noisy": dict(noisy=False)}  # fmt: skip
FAST = PARENT.curves["c51-cartpole"].settings | dict(total_timesteps=5_000, eval_every=1000)

SPEC = Spec(
    "Rainbow, arXiv 1710.02298",
    tests="exact_rainbow parity_tianshou parity_cleanrl command_line_control resume_control wiring",
    curves={"rainbow-cartpole": Curve(FAST, "eval/return", numbers={"mean eval/return": "plain"})},
    effects={"rainbow-cartpole": Effect(
        {"rainbow": ("rainbow", FAST), "c51": ("c51", FAST), "dqn": ("dqn", FAST)}
        | {name: ("rainbow", FAST | less) for name, less in PARTS.items()},
        "mean eval/return", {"rainbow > dqn + 40": 9},
    )},
    no_recipe="the paper's table is of Atari, whose wrappers and network are not here",
    special={
        "double": ({"target_network_frequency": 20, "total_timesteps": 96}, False),
        "start_e": ({"learning_starts": 2, "noisy": False}, 0.5), "end_e": ({"noisy": False}, 0.5),
        "exploration_fraction": ({"noisy": False}, 0.4),
    },
)  # fmt: skip
