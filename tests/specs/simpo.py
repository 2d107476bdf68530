"""SimPO: algos/simpo.py."""

from tests.specs import Recipe, Spec
from tests.specs.dpo import SORT

BUGS = """
target-margin-of-the-wrong-sign: a margin to be reached is taken off what is there, and people add bonuses
- return -logsigmoid(args.beta * (chosen - rejected) - args.gamma)
+ return -logsigmoid(args.beta * (chosen - rejected) + args.gamma)

target-margin-times-beta: gamma and the ratio gamma / beta go by one name (rlhf-book's gamma is the ratio)
- return -logsigmoid(args.beta * (chosen - rejected) - args.gamma)
+ return -logsigmoid(args.beta * (chosen - rejected - args.gamma))

target-margin-forgotten: what is left is DPO without a reference, which looks complete
- return -logsigmoid(args.beta * (chosen - rejected) - args.gamma)
+ return -logsigmoid(args.beta * (chosen - rejected))

labels-swapped:simpo: chosen and rejected are two tensors of one shape
-         chosen, rejected = logps.unbind(1)
+         rejected, chosen = logps.unbind(1)

beta-missing:simpo: a log-probability is taken for the reward, which is beta times it
- return -logsigmoid(args.beta * (chosen - rejected) - args.gamma)
+ return -logsigmoid(chosen - rejected - args.gamma)

sigmoid-without-log:simpo: both are minimised where chosen wins
- -logsigmoid(args.beta * (chosen - rejected) - args.gamma)
+ -torch.sigmoid(args.beta * (chosen - rejected) - args.gamma)

rejected-is-imitated:simpo: an index instead of a name
- loss = loss - args.sft_coef * logps[:, 0]
+ loss = loss - args.sft_coef * logps[:, 1]

likelihood-minimised:simpo: log-likelihoods are maximised, losses minimised, and terms of a loss are added
- loss = loss - args.sft_coef * logps[:, 0]
+ loss = loss + args.sft_coef * logps[:, 0]

sum-for-mean-of-log-probabilities: DPO has sums, and its code is where these begin
- return (logps.sum(1) / lengths).view(-1, 2)
+ return logps.sum(1).view(-1, 2)

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
