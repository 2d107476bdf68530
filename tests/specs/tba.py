"""TBA: algos/tba.py."""

from tests.specs import Effect, Recipe, Spec
from tests.specs.grpo import SORT

BUGS = """
log-z-of-the-batch: one mean for all prompts
- log_z = -error.detach().nanmean(1, keepdim=True)
+ log_z = -error.detach().nanmean()

unknown-spoils-the-group: a mean that is NaN, and is silenced below
- log_z = -error.detach().nanmean(1, keepdim=True)
+ log_z = -error.detach().mean(1, keepdim=True).nan_to_num(0.0)

unknown-is-wrong: a reward of 0 in place of none
- error = logps - ref_logps - rewards / beta
+ error = logps - ref_logps - rewards.nan_to_num(0.0) / beta

mean-over-tokens:tba: a mean keeps long completions near short ones, but it is no log-probability of theirs
- columns = (logps * valid).sum(1), batch
+ columns = (logps * valid).sum(1) / valid.sum(1), batch

oldest-are-kept: a slice from the wrong end
- return these_groups(new, list(range(max(0, count - most), count)))
+ return these_groups(new, list(range(min(count, most))))

newest-stand-in-front: what draws takes them from the end
- new = Batch(join([buffer.samples, new.samples]), *rest)
+ new = Batch(join([new.samples, buffer.samples]), *rest)

share-turned-round: the chance of the old ones
- generator.random() < args.on_policy_share
+ generator.random() >= args.on_policy_share

one-draw-for-the-run: a generator is made anew for each step
- generator, count = random.Random(f"{args.seed}/{step}"),
+ generator, count = random.Random(args.seed),

drawn-twice: the rest is drawn from all
- others = [group for group in range(count) if group not in chosen]
+ others = [*range(count)]

renewed-a-step-late: steps count from 1
- if (step - 1) % args.sync_every == 0:
+ if step % args.sync_every == 0 or buffer is None:

prompts-of-one-step: the line is the parent's
- for i in share(range(first, first + number))]
+ for i in share(range(first, first + args.num_prompts))] * args.sync_every

buffer-outside-the-checkpoint: weights and optimizer are what others keep
- {"buffer": (*buffer.samples, *buffer[1:])}
+ {"buffer": None}
"""

TASK = dict(task="sort", eval_every=0, eval_prompts=128)
START = TASK | dict(max_steps=20, sync_every=20, buffer_size=1280, on_policy_share=1.0)  # samples of the first policy
CLIPPED = TASK | dict(max_steps=1, num_prompts=1280, num_minibatches=20, scale_rewards="none", aggregation="constant",
                      max_grad_norm=0.05)  # fmt: skip

SPEC = Spec(
    "TBA, arXiv 2503.18929",
    small="--sync-every 4 --on-policy-share 0.5",
    tests="exact_tba exact_grpo parity_verl wiring",
    curves={"tba-sort": SORT.but(max_steps=10)},
    effects={"tba-stale": Effect(  # without the divergence ("plain") TBA is REINFORCE; "clipped" has the same samples
        {"tba": ("tba", START | dict(beta=0.2)), "plain": ("tba", START | dict(beta=1e-6)),
         "clipped": ("grpo", CLIPPED), "fresh": ("rloo", TASK | dict(max_steps=20))},
        "last eval/pass@1",
        {"tba > plain + 0.4": 10, "plain < 0.3": 9, "tba > clipped": 9, "tba > fresh - 0.15": 9},
    )},
    recipes=(Recipe(
        "realtreetune/rho-1b-sft-GSM8K", "bbartoldson/TBA, launch_training_gsm8k.sh", preset="full",
        paper=dict(num_prompts=7, num_generations=20, learning_rate=1e-5, warmup_steps=50, max_steps=700,
                   beta=0.014, sync_every=2, on_policy_share=0.95, max_completion_length=512,
                   lr_schedule="warmup_stable_decay", temperature=0.7),
        differs=dict(lr_schedule=("constant", "The authors' learning rate falls in the end")),
    ),),
    flags=dict(sync_every=1, on_policy_share=1.0),
    special={
        "num_generations": ({"micro_batch_size": 8}, 8),
        "sync_every": ({}, 2),
        "on_policy_share": ({"max_steps": 4}, 0.0),
        "buffer_size": ({"on_policy_share": 0.0, "max_steps": 6}, 2),
    },
)  # fmt: skip
