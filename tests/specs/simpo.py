"""SimPO: algos/simpo.py."""

from tests.specs import Recipe, Spec
from tests.specs.dpo import SORT

BUGS = """
target-margin-times-beta: gamma and the ratio gamma / beta go by one name (rlhf-book's gamma is the ratio)
- return -logsigmoid(args.beta * (chosen - rejected) - args.gamma)
+ return -logsigmoid(args.beta * (chosen - rejected - args.gamma))

labels-swapped:simpo: chosen and rejected are two tensors of one shape
-         chosen, rejected = logps.unbind(1)
+         rejected, chosen = logps.unbind(1)

sigmoid-without-log:simpo: both are minimised where chosen wins
- -logsigmoid(args.beta * (chosen - rejected) - args.gamma)
+ -torch.sigmoid(args.beta * (chosen - rejected) - args.gamma)

mean-over-padding:likelihoods: .mean() of a padded tensor: divided by the width of the micro-batch
- return (logps.sum(1) / lengths).view(-1, 2)
+ return logps.mean(1).view(-1, 2)

length-without-eos: the length of the text is taken for that of the completion
- return (logps.sum(1) / lengths).view(-1, 2)
+ return (logps.sum(1) / (lengths - 1).clamp(min=1)).view(-1, 2)

groups-interleaved:likelihoods: other code puts all chosen ones first; both give the same shape
- return (logps.sum(1) / lengths).view(-1, 2)
+ return (logps.sum(1) / lengths).view(2, -1).T
"""

SPEC = Spec(
    "SimPO, arXiv 2405.14734",
    small="--gamma 1.375",
    tests="exact_simpo_orpo parity_trl_preferences wiring dpo_runs",
    curves={"simpo-sort": SORT.but(max_steps=40)},
    recipes=(Recipe(
        "llama3-ultrafeedback", "arXiv 2405.14734 and the authors' llama-3-8b-instruct-simpo.yaml", preset="full",
        paper=dict(beta=2.5, gamma=1.375, batch_size=128, max_length=2048, learning_rate=1e-6,
                   lr_schedule="cosine", sft_coef=0.0),
    ),),
)  # fmt: skip
