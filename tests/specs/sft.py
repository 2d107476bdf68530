"""supervised fine-tuning: algos/sft.py."""

from tests.flags import JITTER, PAIRS
from tests.specs import Curve, Recipe, Spec

BUGS = """
mean-over-padding:sft: .mean() of a padded tensor
- return -(logps * mask).sum() / tokens
+ return -(logps * mask).mean()

micro-batch-mean:sft: the mean over the tokens at hand is right while there is one micro-batch (huggingface/trl#2617)
- sft_loss(logps, inputs[-1], tokens).backward()
+ sft_loss(logps, inputs[-1], inputs[-1].sum()).backward()

eos-not-trained:sft: the text is what is to be learnt: models then never learn to stop (huggingface/trl#6357; rasbt
drops EOS, too)
- return encode_answers(row, [row["completion"]], tokenizer, eos)
+ return [ids[: len(ids) - i] for i, ids in enumerate(encode_answers(row, [row["completion"]], tokenizer, eos))]

first-batch-left-out: steps count from 1, rows from 0
- share(range((step - 1) * args.batch_size, step * args.batch_size))
+ share(range(step * args.batch_size, (step + 1) * args.batch_size))

held-out-by-another-task: each file holds out for itself
- held = {prompt(row) for task in tasks.values() for row in task.heldout}
+ held = set()

gradients-never-cleared:sft: torch adds gradients up
-     optimizer.zero_grad(set_to_none=True)

clipped-after-the-step:sft: two lines, in either order of which nothing fails
-     grad_norm = clip_gradients(model, args.max_grad_norm)
-     optimizer.step()
+     optimizer.step()
+     grad_norm = clip_gradients(model, args.max_grad_norm)
"""

SPEC = Spec(
    "SFT, arXiv 2203.02155",
    "Language models: preferences and demonstrations",
    small="--device cpu --task sort --batch-size 8 --max-steps 6 --eval-prompts 4 --eval-every 2 --save-every 2",
    tests="sft parity_transformers wiring runs "
          "resume::test_killed_at_any_moment",
    curves={"sft-sort": Curve(
        dict(task=("sort",), max_steps=100, batch_size=64, eval_every=0, eval_prompts=16), "loss",
        numbers={"negative final loss": "plain"},
    )},
    recipes=(Recipe(
        "9.65e-6", "arXiv 2203.02155, appendix C.1 (1.3B)", preset="full",
        paper=dict(learning_rate=9.65e-6, batch_size=32, lr_schedule="cosine", warmup_steps=0,
                   max_steps=6500),
    ),),
    flags=PAIRS | dict(task=("sort",)), noise=JITTER,
    special={"task": ({}, ("countdown",)), "prompt_column": ({"task": ("@rows.jsonl",)}, "question"),
             "max_prompt_length": ({"task": ("@lengths.jsonl",)}, 4)},
)  # fmt: skip
