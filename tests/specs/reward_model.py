"""reward model (Bradley-Terry): algos/reward_model.py."""

from tests.specs import Curve, Recipe, Spec

BUGS = """
groups-interleaved:reward_model: other code puts all chosen ones first; both give the same shape
- return scores[: len(sequences)].view(-1, 2)
+ return scores[: len(sequences)].view(2, -1).T

noise-on-heldout-pairs: labels are flipped where data are read: no model then gets more right than the labels are
- heldout_pairs = [encode(heldout[i]) for
+ heldout_pairs = [encode(with_noise(heldout, args.label_noise, args.seed)(i)) for

flipped-pairs-are-equal: an exchange in two assignments, the second of which is lost on the first
- {"chosen": row["rejected"], "rejected": row["chosen"]}
+ {"chosen": row["rejected"]}

members-all-alike:heads: one seed for everything
- loaded = [load_member(seed, device, args) for seed in seeds]
+ loaded = [load_member(args.seed, device, args) for seed in seeds]

members-all-alike:order: one data loader for all members
- encode(labelled(stream(number, seed)))
+ encode(labelled(stream(number, args.seed)))

eos-cut-off: tokenizers cut at the end, where scores are read
- ids[: max_length - 1] + ids[-1:] if len(ids) > max_length
+ ids[:max_length] if len(ids) > max_length

calibration-errors-cancel: bins that are too sure and bins that are not sure enough make up for each other
- "ece": gaps.abs().sum().item() / len(scores)
+ "ece": gaps.sum().abs().item() / len(scores)

optimizer-not-restored:reward_model: the weights are back, the moments of Adam are not
- Trained(*member) for
+ Trained(member[0]) for
"""

SPEC = Spec(
    "reward models, arXiv 2009.01325",
    tests="exact_reward_model parity_transformers wiring reward_models",
    curves={"reward_model-sort": Curve(
        dict(task="sort", max_steps=20, eval_every=0), "accuracy",
        numbers={"eval/pair_accuracy": "share"},
    )},
    recipes=(Recipe(
        "meta-llama/Llama-2-7b-chat-hf", "arXiv 2307.09288, section 3.2.2", preset="full",
        paper=dict(batch_size=512, learning_rate=1e-5, lr_schedule="cosine", weight_decay=0.1,
                   warmup_steps=30, use_margin=True, center_coef=0.0),
        differs=dict(use_margin=(False, "`--use-margin` if the data has margins")),
    ),),
    special={"use_margin": ({"task": "@margins.jsonl"}, True), "eval_prompts": ({}, 4)},
)  # fmt: skip
