"""DPO: algos/dpo.py."""

from tests.flags import JITTER, PAIRS
from tests.specs import Curve, Recipe, Spec

BUGS = """
micro-batch-mean:dpo: the mean at hand is right while there is one micro-batch (huggingface/trl#2617)
- (loss.sum() / count).backward()
+ loss.mean().backward()

labels-swapped: chosen and rejected are two tensors of one shape
-         chosen, rejected = ratios.unbind(1)
+         rejected, chosen = ratios.unbind(1)

beta-missing: a log-ratio is taken for the reward, which is beta times it
- args.beta * (chosen - rejected), args.label_smoothing
-     return -(1 - e) * logsigmoid(logits) - e
+ chosen - rejected, args.label_smoothing
+     return -(1 - e) * logsigmoid(logits) - e

beta-missing:hinge: SLiC has a margin of its own, and one of the two is forgotten
- return relu(1 - args.beta * (chosen - rejected))
+ return relu(1 - (chosen - rejected))

sigmoid-without-log: both are minimised where chosen wins
- return -(1 - e) * logsigmoid(logits) - e * logsigmoid(-logits)
+ return -(1 - e) * sigmoid(logits) - e * sigmoid(-logits)

reference-forgotten: a difference of log-probabilities also ranks
- ratios = (logps - ref_logps[:, :width]).sum(1)
+ ratios = logps.sum(1)

reference-is-the-policy:dpo: one name for two models of the same kind: every log-ratio then is 0 in value
- completion_logps(scorer, *inputs)
+ completion_logps(model, *inputs)

pairs-are-torn: rows are sorted by length and dealt out, and two of them are a pair
-     for rows, inputs in micro_batches(samples, args, together=2):
-         ratios, likelihood =
+     for rows, inputs in micro_batches(samples, args):
+         ratios, likelihood =

mean-for-sum-of-log-probabilities: means per token are what losses of language models are; some losses want them, DPO
does not (huggingface/trl#1033, #1265, #1581, #1677: the averaging of IPO)
- ratios = (logps - ref_logps[:, :width]).sum(1)
+ ratios = (logps - ref_logps[:, :width]).sum(1) / lengths

margin-of-ipo: the half of the paper's 1/(2 tau) is lost when tau becomes beta
- return (chosen - rejected - 1 / (2 * args.beta)) ** 2
+ return (chosen - rejected - 1 / args.beta) ** 2

robust-is-conservative: two losses with label smoothing differ by one sign
- return (-(1 - e) * logsigmoid(logits) + e * logsigmoid(-logits)) / (1 - 2 * e)
+ return (-(1 - e) * logsigmoid(logits) - e * logsigmoid(-logits)) / (1 - 2 * e)

both-completions-down: APO has two losses of nearly the same text
- return 1 - sigmoid(args.beta * chosen) + sigmoid(args.beta * rejected)
+ return sigmoid(args.beta * chosen) + sigmoid(args.beta * rejected)

rejected-is-imitated: an index instead of a name
- loss = loss - args.sft_coef * likelihood[:, 0]
+ loss = loss - args.sft_coef * likelihood[:, 1]

sigmoid-without-log:reward_model: both are minimised where chosen wins
- return -logsigmoid(chosen
+ return -torch.sigmoid(chosen

last-micro-batch-only:dpo: zero_grad stands before backward everywhere else
-         loss = LOSSES[args.loss](
+         optimizer.zero_grad(set_to_none=True)
+         loss = LOSSES[args.loss](

last-micro-batch-only:preferences: zero_grad stands before backward everywhere else
-         (loss.sum() / count).backward()
+         optimizer.zero_grad(set_to_none=True)
+         (loss.sum() / count).backward()
"""

SORT = Curve(dict(task="sort", max_steps=40, eval_every=0, eval_prompts=256), "margin", {"eval/greedy": "share"})

SPEC = Spec(
    "DPO, arXiv 2305.18290, ten more losses",
    "Language models: preferences and demonstrations",
    aliases=("IPO",),
    small="--device cpu --task sort --num-pairs 20 --batch-size 8 --max-steps 6 --eval-prompts 4 --eval-every 2 "
          "--save-every 2",
    tests="exact_dpo parity_trl_preferences wiring dpo_runs",
    known=True,
    curves={"dpo-sort": Curve(
        dict(task="sort", max_steps=40, eval_every=0, eval_prompts=256), "margin",
        numbers={"eval/greedy": "share", "eval/pass@1": "share"},
    )},
    recipes=(Recipe(
        "Anthropic/hh-rlhf", "arXiv 2305.18290, appendix B", preset="full",
        paper=dict(beta=0.1, batch_size=64, learning_rate=1e-6, warmup_steps=150, loss="sigmoid",
                   lr_schedule="constant", label_smoothing=0.0, sft_coef=0.0, average_logps=False),
    ),),
    flags=PAIRS, noise=JITTER,
    special={
        "loss": [({}, ["ipo", "hinge", "apo-zero", "apo-down", "sppo-hard", "dpop", "nca", "discopop"]),
                 ({"label_smoothing": 0.1}, ["robust", "exo"])],
        "dpop_lambda": ({"loss": "dpop"}, 20.0),
        "discopop_tau": ({"loss": "discopop"}, 0.1),
    },
)  # fmt: skip
