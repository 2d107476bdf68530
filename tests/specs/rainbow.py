"""Rainbow: algos/rainbow.py."""

from tests.specs import Curve, Effect, Spec
from tests.specs.c51 import SPEC as PARENT

BUGS = """
softmax-over-actions:rainbow: three dimensions, and the last but one is taken
- return logits.log_softmax(-1)
+ return logits.log_softmax(1)

bootstrap-by-one-discount: the discount of one step is kept for n of them
- args.gamma**batch.steps * (1 - batch.terminated) * atoms
+ args.gamma * (1 - batch.terminated) * atoms

bootstrap-through-termination:rainbow: the mask is forgotten: the end of an episode costs nothing
- args.gamma**batch.steps * (1 - batch.terminated) * atoms
+ args.gamma**batch.steps * atoms

rewards-not-discounted: a plain sum
- total = gamma ** np.arange(len(window)) @ window[:, reward]
+ total = window[:, reward].sum()

window-across-the-end: only its length is looked at (CleanRL's rainbow_atari.py, where an episode is cut off)
- while len(window) == args.n_step or (end and window):
+ while len(window) == args.n_step:

window-cleared-at-the-end: its last n - 1 steps are never learned from (CleanRL's rainbow_atari.py)
- while len(window) == args.n_step or (end and window):
+ while len(window) == args.n_step or (end and window.clear()):

truncation-does-not-end-the-window: of two words for an end one is forgotten
- zip(windows, taken, terminated | truncated):
+ zip(windows, taken, terminated):

ends-by-the-first-step: of two rows the wrong one
- last[reward + 1 :]
+ first[reward + 1 :]

noise-of-each-weight-its-own: a matrix of noise is drawn, as without factors (CleanRL's rainbow_atari.py)
- f_out * F.linear(f_in * x, self.sigma, self.sigma_bias)
+ F.linear(x, self.sigma * torch.randn_like(self.sigma), self.sigma_bias * f_out[0])

noise-without-its-root: f is forgotten
- (x.sign() * x.abs().sqrt() for x in normal)
+ (x for x in normal)

noise-without-its-sign: a root of what is positive
- (x.sign() * x.abs().sqrt() for x in normal)
+ (x.abs().sqrt() for x in normal)

noise-drawn-for-one-network: the target network keeps the noise that it was born with, which is none
- for net in (agent.q, agent.target):
+ for net in (agent.q,):

noise-in-greedy-evaluation: the scale is not passed on
- self.noise = f_in, f_out * scale
+ self.noise = f_in, f_out

noise-and-epsilon: both explore
-     if args.noisy:
-         return 0.0
+     if False:
+         return 0.0

advantages-not-centred: what is value and what is advantage stays open
- self.value(features)[:, None] + logits - logits.mean(1, keepdim=True)
+ self.value(features)[:, None] + logits

advantages-centred-over-atoms: three dimensions, and the last is taken
- logits - logits.mean(1, keepdim=True)
+ logits - logits.mean(2, keepdim=True)

weights-forgotten: what is drawn more often counts more
- (batch.weights[:, 0] * losses).mean()
+ losses.mean()

weights-by-the-wrong-shape: (B, 1) times (B,) is (B, B)
- (batch.weights[:, 0] * losses).mean()
+ (batch.weights * losses).mean()

weights-turned-round: the exponent's sign
- ends[-1]) ** -beta
+ ends[-1]) ** beta

weights-not-scaled: the largest is not 1
- (weights / weights.max()).float()
+ weights.float()

beta-stays: it is to rise to 1
- (1 - args.prioritized_replay_beta) * step / args.total_timesteps
+ 0

priority-without-exponent: alpha is lost
- (divergence.double() + 1e-6) ** alpha
+ (divergence.double() + 1e-6)

priority-by-cross-entropy: which is not 0 where all is learned (Kaixhin/Rainbow, agent.py)
- (losses.detach() + torch.xlogy(target, target).sum(1)).clamp(min=0)
+ losses.detach()

new-rows-have-no-priority: they are never drawn
- self.values[places] = torch.where(largest > 0, largest, 1.0)
+ self.values[places] = torch.where(largest > 0, 0.0, 1.0)

priorities-not-renewed: every row keeps that of a new one
-                     priorities.renew(index, divergence, args.prioritized_replay_alpha)
+                     pass

priorities-not-restored: they are no tensor of the agent's (any code that saves networks alone)
- replay=replay, priorities=priorities)
+ replay=replay)

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
