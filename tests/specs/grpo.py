"""GRPO: algos/grpo.py."""

from tests.flags import NOISY_REWARD, ONLINE
from tests.specs import Curve, Recipe, Spec

BUGS = """
ratio-turned-round: which policy stands in the numerator is easy to mix up, and at ratio 1 the values are equal
- ratio = (logps - old_logps).exp()
+ ratio = (old_logps - logps).exp()

clip-without-min: clipping the ratio looks like all that the clip does; it also kills gradients that would bring it
back
- -torch.min(unclipped, clipped),
+ -clipped,

clip-bounds-swapped: two clips of nearly equal size, of which only one is ever changed
- ratio.clamp(1 - low, 1 + high)
+ ratio.clamp(1 - high, 1 + low)

ratio-always-one: right for one update epoch, and kept when there are more (TRL takes the ratio as 1 by design where
it updates once per batch)
- old_logps, valid = samples.logps[rows, :width], mask[rows, :width]
+ old_logps, valid = logps.detach(), mask[rows, :width]

k3-turned-round: all estimators of a divergence look alike but for the order of their two policies (rlhf-book
policy_gradients/loss.py:23-57, whose test pins the wrong value (natolambert/rlhf-book#489))
- difference = ref_logps - logps
+ difference = logps - ref_logps

reference-at-another-temperature: the temperature is thought of as a setting of the sampler (huggingface/trl#4159:
temperature not applied to log-probabilities)
- completion_logps(scorer, *inputs, args.temperature)
+ completion_logps(scorer, *inputs)

reference-is-the-policy: one name for two models of the same kind: the penalty then is 0 in value
- completion_logps(scorer, *inputs, args.temperature)
+ completion_logps(model, *inputs, args.temperature)

baseline-of-the-batch: the mean over all axes is the default of every library
- centred = above_least - above_least.nanmean(1, keepdim=True)
+ centred = rewards - rewards.nanmean()

batch-scale-of-groups: the deviation of what is being divided, instead of the rewards'
- (moments(rewards)[1] + STD_EPSILON)
+ (moments(centred)[1] + STD_EPSILON)

skipped-reward-is-zero: NaN is silenced where it first hurts
- above_least.nanmean(1, keepdim=True)
+ above_least.nan_to_num(0.0).mean(1, keepdim=True)

groups-interleaved: repeating a list and repeating its elements give the same length
- rows = [row for row in rows for _ in range(args.num_generations)]
+ rows = [row for _ in range(args.num_generations) for row in rows]

mean-over-padding: .mean() of a padded tensor (TRL's LUSPO with beta averages padding (trl grpo_trainer:3143))
- return mask / (rows * mask.sum(1, keepdim=True).clamp(min=1))
+ return mask / mask.numel()

length-bias-stays: Dr. GRPO is taken for GRPO without the division by the deviation (rlhf-book routes drgrpo to a loss
with means per sequence)
- return mask / (rows * max_completion_length)
+ return mask / (rows * mask.sum(1, keepdim=True).clamp(min=1))

constant-is-the-longest: the width of the tensor is at hand; it changes with the batch
- return mask / (rows * max_completion_length)
+ return mask / (rows * mask.shape[1])

micro-batch-mean: the mean over the tokens at hand is right while there is one micro-batch (huggingface/trl#2617 (18
trainers), volcengine/verl#906, nanochat's chat_rl)
- (loss * weights[rows, :width]).sum().backward()
+ ((loss * valid).sum() / valid.sum().clamp(min=1) * len(valid) / len(weights)).backward()

truncated-are-trained: a second mask is made, and the first goes on being used (huggingface/trl#6369 and #6439: a
denominator that ignored the truncation mask)
- token_weights(mask[within]
+ token_weights(samples.completion_mask[within]

temperature-in-sampling-only: the temperature is thought of as a setting of the sampler (huggingface/trl#4159;
minimind (0.8), rasbt (0.8), simple_GRPO (0.9))
- logps, entropy = completion_logps(model, *inputs, args.temperature)
+ logps, entropy = completion_logps(model, *inputs)

temperature-in-scoring-only: the sampler has its own default
- args.num_generations, args, args.temperature,
+ args.num_generations, args, 1.0,

last-micro-batch-only: zero_grad stands before backward everywhere else
-                 width = logps.shape[1]
+                 width = logps.shape[1]
+                 optimizer.zero_grad(set_to_none=True)

all-minibatches-at-once: the rows of the minibatch are drawn, and all of them are run
- in micro_batches(samples, args, within):
+ in micro_batches(samples, args):

rows-of-the-first-minibatch: rows are counted within the minibatch here and within the batch there
- weights[within] =
+ weights[: len(within)] =

denominator-of-the-whole-batch: the weights stood before the loop when a step was one update
- weights[within] = token_weights(mask[within], args.aggregation, args.max_completion_length)
+ weights = token_weights(mask, args.aggregation, args.max_completion_length)
"""

SORT = Curve(dict(task="sort", max_steps=16, eval_every=0, eval_prompts=256), "reward",
             {"mean reward": "plain", "eval/greedy": "share"})  # fmt: skip

SPEC = Spec(
    "GRPO, arXiv 2402.03300",
    "Language models: rewards",
    small="--device cpu --task sort --num-prompts 4 --num-generations 4 --max-steps 6 --eval-prompts 4 --eval-every "
          "2 --save-every 2",
    aliases=("RLVR",),
    tests="exact_grpo parity_trl invariance wiring rewards runs "
          "resume::test_killed_at_any_moment",
    known=True,
    curves={
        "grpo-sort": SORT.but(learning_rate=1e-4),
        "grpo-countdown": Curve(
            dict(task="countdown", eval_every=0, eval_prompts=256), "reward",
            numbers={"mean reward": "plain", "eval/greedy": "share"}, slow=True,
        ),
    },
    recipes=(Recipe(
        "deepseek-math-7b", "arXiv 2402.03300, section 4.2", preset="full",
        paper=dict(learning_rate=1e-6, beta=0.04, num_generations=64, max_completion_length=1024,
                   num_iterations=1, num_prompts=16, aggregation="sequence", scale_rewards="group"),
    ),),
    flags=ONLINE, noise=NOISY_REWARD,
)  # fmt: skip
