"""online DPO: algos/online_dpo.py."""

from tests.specs import Recipe, Spec
from tests.specs.grpo import SORT

BUGS = """
ties-prefer-the-first: argmax always answers: equal ones are noise with the weight of a preference (TRL's online DPO
trainer)
- return (first - second).nan_to_num(0.0).sign()
+ return 1 - 2 * (first < second).to(first.dtype)

skipped-reward-is-zero:online_dpo: NaN is silenced where it first hurts (TRL's online DPO trainer)
- first, second = rewards.view(-1, 2).unbind(1)
+ first, second = rewards.nan_to_num(0.0).view(-1, 2).unbind(1)

denominator-without-ties: a mean over what is trained: steps grow as ranked pairs become few
- (loss.sum() / count).backward()
+ (loss.sum() / (label != 0).sum().clamp(min=1)).backward()

micro-batch-mean:online_dpo: the mean at hand is right while there is one micro-batch (huggingface/trl#2617)
- (loss.sum() / count).backward()
+ loss.mean().backward()

mean-for-sum-of-log-probabilities:online_dpo: means per token are what losses of language models are; some losses want
them, DPO does not
- log_ratio = ((logps - batch.ref_logps[rows, :width]) * valid).sum(1)
+ log_ratio = ((logps - batch.ref_logps[rows, :width]) * valid).sum(1) / valid.sum(1)

temperature-in-scoring-only:online_dpo: the sampler has its own default
- return sample_all(model, prompts, args.num_generations, args, args.temperature,
+ return sample_all(model, prompts, args.num_generations, args, 1.0,

temperature-in-scoring-only:reference: the temperature is thought of as a setting of the policy's sampler
- replace(args, sampler=""), args.temperature,
+ replace(args, sampler=""), 1.0,

exploration-term-of-the-policy-s-sample: two completions a prompt, in an order that is written down elsewhere
- (logps * valid).sum(1)[1::2]
+ (logps * valid).sum(1)[::2]

groups-interleaved:xpo: two batches are joined one behind the other: pairs then are of two prompts
- device=model.device).view(2, -1).T.flatten()
+ device=model.device).view(2, -1).flatten()

divergence-of-the-wrong-sign: log pi - log pi_ref and its negative are both called the log-ratio
- kl=from_policy(log_ratio, args)
+ kl=-from_policy(log_ratio, args)

divergence-over-the-reference-s-samples: an estimate of a divergence is a mean over the policy's samples, not over all
- means.add(torch.ones_like(from_policy(log_ratio, args)), kl=from_policy(log_ratio, args))
+ means.add(torch.ones_like(log_ratio), kl=log_ratio)

last-micro-batch-only:online_dpo: zero_grad stands before backward everywhere else
-         (loss.sum() / count).backward()
+         optimizer.zero_grad(set_to_none=True)
+         (loss.sum() / count).backward()
"""

SPEC = Spec(
    "online DPO, arXiv 2402.04792; XPO, arXiv 2405.21046",
    small="--xpo-alpha 1e-3",
    tests="exact_online_dpo parity_trl_online_dpo wiring",
    curves={"online_dpo-sort": SORT.but(max_steps=16)},
    recipes=(Recipe(
        "5e-7", "arXiv 2402.04792", preset="full",
        paper=dict(learning_rate=5e-7, num_prompts=128, num_generations=2, warmup_steps=150,
                   temperature=0.9, beta=0.1, loss="sigmoid", xpo_alpha=0.0),
    ),),
)  # fmt: skip
