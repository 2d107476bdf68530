"""GSPO: algos/gspo.py."""

from tests.specs import Effect, Recipe, Spec
from tests.specs.grpo import SORT

BUGS = """
mean-over-padding:gspo: mean(1) is shorter, and padding has the difference 0
- (((logps - old_logps) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()
+ ((logps - old_logps) * mask).mean(1, keepdim=True).exp()

mean-of-ratios: exp and mean are exchanged
- (((logps - old_logps) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).exp()
+ ((logps - old_logps).exp() * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)

weighed-by-length: TRL with a loss_type other than grpo: the loss of a completion is counted once for each token
- weights = mask / (lengths * total(torch.tensor(len(within), device=mask.device)))
+ weights = mask / total(mask[within].sum()).clamp(min=1)

minibatches-forgotten-in-the-mean: with one minibatch it is the same
- weights = mask / (lengths * total(torch.tensor(len(within), device=mask.device)))
+ weights = mask / (lengths * total(torch.tensor(len(mask), device=mask.device)))

old-policy-is-the-sampler: grpo.py takes what the sampler said
- old_logps = reference_logps(model, model, samples, args)
+ old_logps = samples.logps

old-policy-follows: the pass stands inside the loop
- old, valid = old_logps[rows, :width], mask[rows, :width]
+ old, valid = logps.detach(), mask[rows, :width]
"""
STALE = dict(task="sort", max_steps=10, num_iterations=8, num_minibatches=1, learning_rate=1e-4, eval_every=0,
             eval_prompts=128)  # fmt: skip

SPEC = Spec(
    "GSPO, arXiv 2507.18071",
    tests="exact_gspo parity_trl_variants exact_grpo wiring",
    curves={"gspo-sort": SORT.but(max_steps=6, learning_rate=1e-4)},
    effects={"gspo-stale": Effect(  # eight epochs on each batch; the control has a clip that never cuts
        {"gspo": ("gspo", STALE), "grpo": ("grpo", STALE),
         "unclipped": ("gspo", STALE | dict(epsilon=1.0, epsilon_high=1e9)),
         "one_epoch": ("gspo", STALE | dict(num_iterations=1))},
        "last eval/pass@1", {"gspo > grpo": 9, "gspo > unclipped": 9, "gspo > one_epoch - 0.03": 9},
    )},
    recipes=(Recipe(
        "Qwen/Qwen2.5-0.5B-Instruct", "arXiv 2507.18071, section 5.1", preset="lora",
        paper=dict(epsilon=3e-4, epsilon_high=4e-4, num_minibatches=4, beta=0.0),
        differs=dict(beta=(0.04, "0.04 for others, as in grpo.py")),
    ),),
    flags=dict(num_minibatches=2),
    special={"epsilon": ({}, 0.9), "epsilon_high": ({}, 50.0),
             "num_minibatches": ({}, 1)},
)  # fmt: skip
