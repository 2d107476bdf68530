"""KTO: algos/kto.py."""

from tests.specs import Recipe, Spec
from tests.specs.dpo import SORT

BUGS = """
labels-swapped:unpaired: a label may say that a completion is good or that it is harmful
- sides = (("chosen", True), ("rejected", False))
+ sides = (("chosen", False), ("rejected", True))

labels-swapped:kto: a label may say that a completion is good or that it is harmful
- labels = torch.tensor([row["label"] for row in rows]
+ labels = torch.tensor([not row["label"] for row in rows]

undesirable-is-learnt-too: one formula for both kinds, told apart by their weights only
- args.beta * torch.where(labels, ratios - z, z - ratios)
+ args.beta * (ratios - z)

reference-point-subtracted-twice: the sign is turned before the reference point is taken off; at z = 0 nothing shows
- args.beta * torch.where(labels, ratios - z, z - ratios)
+ args.beta * (torch.where(labels, ratios, -ratios) - z)

reference-point-not-detached: z is a function of the policy, and where its gradient stops is said in a sentence
- @torch.no_grad()
- def score_examples
+ def score_examples

reference-point-of-matched-pairs: the log-ratios are there, and a second forward pass is dear (huggingface/trl#1380,
#1402, #1911, #2153 and #2554 are about these pairs)
- score_examples(model, *mismatched, args)
+ score_examples(model, samples, ref_logps, args)

reference-point-of-the-micro-batch: the rows at hand are right while there is one micro-batch (TRL and HALOs)
- labels[rows], z, args)
+ labels[rows], score_examples(model, *mismatched, args)[rows].mean().clamp(min=0), args)

mismatched-within-the-micro-batch: rows are rolled where they are collated; one alone is compared with itself (TRL and
HALOs; huggingface/trl#1911)
- rows[-1:] + rows[:-1])
+ (lambda m: [rows[i - 1 if i % m else min(i + m, len(rows)) - 1] for i in range(len(rows))])(args.micro_batch_size))

reference-of-another-prompt: the completion comes with the log-probability that it has after its own prompt
- mismatched, other_logps)
+ mismatched, ref_logps.roll(1, 0))

reference-is-the-policy:kto: log-probabilities from before the step are taken for those from before training
- return (logps[:rows] - ref_logps[:, :width]).sum(1)
+ return (logps[:rows] - logps[:rows].detach()).sum(1)

reference-is-the-policy:mismatched: mismatched rows change every step, so their reference is computed when they come
up: z then is always 0
- mismatched, other_logps)
+ mismatched, reference_logps(model, model, mismatched, args))

mean-for-sum-of-log-probabilities:kto: means per token are what losses of language models are; some losses want them,
KTO does not
- return (logps[:rows] - ref_logps[:, :width]).sum(1)
+ return (logps[:rows] - ref_logps[:, :width]).sum(1) / inputs[-1][:rows].sum(1)

log-sigmoid-for-the-value: DPO's loss has a logarithm there
- args.undesirable_weight) * (1 - value)
+ args.undesirable_weight) * -value.log()
"""

SPEC = Spec(
    "KTO, arXiv 2402.01306",
    tests="exact_kto unpaired parity_trl_preferences wiring dpo_runs",
    curves={"kto-sort": SORT.but(max_steps=40)},
    recipes=(Recipe(
        "trl-lib/ultrafeedback_binarized", "arXiv 2402.01306 and HALOs", preset="full",
        paper=dict(beta=0.1, batch_size=32, learning_rate=5e-6, desirable_weight=1.0,
                   undesirable_weight=1.0),
    ),),
)  # fmt: skip
