"""C51: algos/c51.py."""

from dataclasses import replace

from tests.specs import Curve, Spec
from tests.specs.dqn import CLEANRL, LIKE_CLEANRL
from tests.specs.dqn import SPEC as PARENT

BUGS = """
not-clipped-to-the-atoms: beyond the last atom all nearness is 0: the probability is lost
-     values = values.clamp(atoms[0], atoms[-1])

width-of-an-atom: N atoms have N - 1 gaps
- (atoms[1] - atoms[0])).clamp(min=0)
+ ((atoms[-1] - atoms[0]) / len(atoms))).clamp(min=0)

reward-discounted: the brackets are set wrongly
- values = batch.rewards + args.gamma * (1 - batch.terminated) * atoms
+ values = args.gamma * (batch.rewards + (1 - batch.terminated) * atoms)

likeliest-return-chooses: the mode is taken for the mean
- else next_probs @ atoms).argmax(1)
+ else next_probs.amax(2)).argmax(1)

target-of-the-online-network:c51: two networks of one kind
- next_probs = agent.target.log_probs(
+ next_probs = agent.q.log_probs(

cross-entropy-turned-round: a divergence has a direction
- return -(target * log_probs).sum(1).mean()
+ return -(log_probs.exp() * target.clamp(min=1e-6).log()).sum(1).mean()

clipped-below-alone: returns below 0 are what one had in mind
- ((target - middle).abs() > 1.001 * half_width)
+ ((middle - target) > 1.001 * half_width)
"""
ATOMS = dict(num_atoms=101, v_min=-100.0, v_max=100.0)  # CleanRL's

SPEC = Spec(
    "C51, arXiv 1707.06887",
    small="--num-atoms 11",
    tests="exact_c51 exact_dqn parity_tianshou parity_cleanrl command_line_control resume_control wiring",
    curves={
        "c51-cartpole": PARENT.curves["dqn-cartpole"],
        "c51-cartpole-500k": Curve(LIKE_CLEANRL | ATOMS, "return", numbers={"late return": "plain"}, slow=True),
    },
    recipes=(replace(PARENT.recipes[0], source="CleanRL, cleanrl/c51.py (its arguments)", paper=CLEANRL | ATOMS),),
    flags=dict(num_atoms=11),
    special={"v_min": ({}, -10.0)},
)  # fmt: skip
