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

sigmoid-without-log: both are minimised where chosen wins
- return -(1 - e) * logsigmoid(logits) - e * logsigmoid(-logits)
+ return -(1 - e) * sigmoid(logits) - e * sigmoid(-logits)

reference-is-the-policy:dpo: one name for two models of the same kind: every log-ratio then is 0 in value
- completion_logps(scorer, *inputs)
+ completion_logps(model, *inputs)

mean-for-sum-of-log-probabilities: means per token are what losses of language models are; some losses want them, DPO
does not (huggingface/trl#1033, #1265, #1581, #1677: the averaging of IPO)
- ratios = (logps - ref_logps[:, :width]).sum(1)
+ ratios = (logps - ref_logps[:, :width]).sum(1) / lengths

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
