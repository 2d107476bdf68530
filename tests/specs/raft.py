"""RAFT, RAFT++ and Reinforce-Rej: algos/raft.py."""

from tests.specs import Effect, Recipe, Spec
from tests.specs.grpo import SORT

BUGS = """
best-of-the-batch: the maximum of all prompts
- best = rewards == rewards.nan_to_num(-torch.inf).amax(1, keepdim=True)
+ best = rewards == rewards.nan_to_num(-torch.inf).amax()

rejects-the-mixed-groups: the mask is of what is kept elsewhere
- rewards.isnan() | (flat & reject), 0.0)
+ rewards.isnan() | (~flat & reject), 0.0)

ratio-in-raft: the surrogate for the likelihood, which is the same in the first update alone
- return -advantages * logps, torch.zeros_like(logps, dtype=torch.bool)
+ return -advantages * (logps - old_logps).exp(), torch.zeros_like(logps, dtype=torch.bool)
"""
SMALL = dict(num_prompts=8, num_minibatches=1, max_steps=100, eval_every=0, eval_prompts=128)

SPEC = Spec(
    "RAFT, arXiv 2304.06767; Reinforce-Rej, arXiv 2504.11343",
    tests="exact_raft exact_grpo expected_gradients parity_verl wiring",
    curves={"raft-sort": SORT.but(max_steps=6, learning_rate=1e-4)},
    effects={"raft-small": Effect(
        # eight prompts a step, one update: right answers alone make the policy narrower, sooner
        {"raft": ("raft", SMALL), "grpo": ("grpo", SMALL), "reinforce": ("raft", SMALL | dict(select="all"))},
        "mean entropy", {"raft < grpo": 9, "raft < reinforce - 0.01": 9},
    )},
    recipes=(Recipe(
        "Qwen/Qwen2.5-Math-1.5B", "RLHFlow/Minimal-RL, run_raftpp.sh", preset="full",
        paper=dict(num_prompts=1024, num_generations=4, num_minibatches=4, learning_rate=1e-6, beta=0.001,
                   epsilon=0.2, aggregation="token", select="right", plusplus=True, max_completion_length=3072,
                   num_iterations=1),
    ),),
    flags=dict(num_minibatches=2),
    special={
        "num_minibatches": ({}, 1), "reject": ({"select": "all", "reward": ("@rewards.py:sparse",)}, True),
        "plusplus": ({"learning_rate": 0.1}, True),
        "epsilon": ({"plusplus": True}, 0.01), "epsilon_high": ({"plusplus": True}, 0.01),
    },
)  # fmt: skip
