"""DAPO: algos/dapo.py."""

from tests.specs import Recipe, Spec
from tests.specs.grpo import SORT

BUGS = """
buffer-off-by-one: the limit itself is counted as a token of the buffer
- (max_completion_length - buffer - lengths)
+ (max_completion_length - buffer - lengths + 1)

penalty-only-logged: a number that is computed, shown in the curves, and not used
- rewards.to(device) + penalty
+ rewards.to(device)

short-answers-rewarded: the middle case of equation 13 is written down for all lengths
- .clamp(-1, 0)
+ .clamp(min=-1)

groups-not-judged: P groups were sampled, so the batch looks full
- total((~flat).sum()) < args.num_prompts
+ len(flat) < args.num_prompts

flat-groups-kept: True sorts behind False, and a mask may mean what is kept or what is dropped
- (no, i, rank())
+ (not no, i, rank())

same-prompts-in-every-round: the rows of a step were a function of the step alone
-         first += args.num_prompts

rewards-of-the-first-round: one round is the common case, in which nothing shows
- torch.cat([rewards for _, rewards, _ in rounds])
+ torch.cat([rewards for _, rewards, _ in rounds[:1]])

rewards-of-other-answers: what is chosen by groups has to be chosen by rows, too
- *(x[groups] for x in samples[:2]), *(x[rows] for x in samples[2:])
+ *(x[groups] for x in samples[:2]), *(x[: len(rows)] for x in samples[2:])

reward-of-the-kept-groups: what is at hand is the batch that is trained, which was chosen by its rewards
- "reward": sampled_rewards.nanmean().item(),
+ "reward": rewards.nanmean().item(),

data-begin-again: the place in the data is nobody's state (open-instruct#651 and #1823; volcengine/verl#5725 and
#7401; huggingface/trl#3179 and #3247 lost data, too)
- next_row = run.state.get("next_row", 0)
+ next_row = 0
"""

SPEC = Spec(
    "DAPO, arXiv 2503.14476",
    small="--overlong-buffer 14",
    tests="exact_dapo parity_trl_variants exact_grpo wiring",
    curves={"dapo-sort": SORT.but(max_steps=16)},
    recipes=(Recipe(
        "Qwen/Qwen2.5-32B", "arXiv 2503.14476, section 4.1", preset="full",
        paper=dict(learning_rate=1e-6, lr_schedule="constant", warmup_steps=20, num_prompts=512, num_minibatches=16,
                   num_generations=16, max_completion_length=16_384 + 4_096, overlong_buffer=4_096, epsilon=0.2,
                   epsilon_high=0.28, beta=0.0, aggregation="token", scale_rewards="group"),
    ),),
    flags=dict(overlong_buffer=4),
    special={
        "keep_accuracy": ({}, (0.5, 1.0)),
        "overlong_buffer": ({}, 2),
        "max_sampling_rounds": ({"reward": ("@rewards.py:sparse",)}, 1),
    },
)  # fmt: skip
