"""ProRL: algos/prorl.py."""

from tests.specs import Effect, Spec

BUGS = """
reference-stays: the reset is written for the policy's copy that is no longer used
- reference.load_state_dict(model.state_dict())
+ reference.load_state_dict(reference.state_dict())

reset-in-every-other-step: the remainder itself is the condition
- if step % args.reset_reference_every == 0:
+ if step % args.reset_reference_every:

count-stays: the moments are cleared by name, and bias correction goes on
- for tensor in moments.values():
+ for tensor in (moments["exp_avg"], moments["exp_avg_sq"]):

reference-not-saved: --model loads it again, as where it never moves
- "reference": Trained(reference)}
+ }
"""

BOUND = dict(task="sort", max_steps=40, num_prompts=32, beta=1.0, eval_every=0, eval_prompts=128)

SPEC = Spec(
    "ProRL, arXiv 2505.24864",
    small="--reset-reference-every 2",
    tests="exact_prorl exact_grpo wiring",
    effects={"prorl-reset": Effect(  # where the KL penalty holds learning back, a new reference lets it go on
        {"reset": ("prorl", BOUND | dict(reset_reference_every=10)), "still": ("grpo", BOUND),
         "free": ("grpo", BOUND | dict(beta=0.0))},
        "last eval/pass@1", {"reset > still + 0.1": 9, "still < free - 0.1": 9, "reset > free - 0.1": 9},
    )},
    no_recipe="the paper's run of 1.5 billion weights and 136,000 problems has no single table of settings",
    flags=dict(reset_reference_every=1),
    special={"lora_rank": [], "lora_modules": []},  # refused
)  # fmt: skip
