"""Flow-GRPO: algos/flow_grpo.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
schedule-upside-down: the paper's time is 1 at the noise; its formula copied as it stands grows towards the data
- (1 - t) / t.clamp(min=1 / args.num_steps)
+ t.clamp(min=1 / args.num_steps) / (1 - t)

own-time-in-the-denominator: any floor avoids the division by 0 at the noise, and gives another first step
- t.clamp(min=1 / args.num_steps)
+ t.clamp(min=1e-2)

deviation-over-the-step: white noise of a step has the variance, not the deviation, in proportion to it
- (variance / args.num_steps).sqrt())
+ variance.sqrt() / args.num_steps)

old-density-of-the-last-epoch:flow_grpo: the ratio is 1 in every epoch, and nothing is clipped
- loss, numbers = ddpo_loss(logps_of(steps, batch), old_logps, scores, args.clip_coef)
+ loss, numbers = ddpo_loss(logps_of(steps, batch), logps_of(steps, batch).detach(), scores, args.clip_coef)

divergence-to-itself: the reference is a reference to the model that trains
- reference_steps = chain_steps(reference, batch, args)
+ reference_steps = chain_steps(model, batch, args)

ode-at-the-end-of-each-step: times from 1 / K to 1
- torch.full_like(x[:, 0], k / num_steps)
+ torch.full_like(x[:, 0], (k + 1) / num_steps)
"""

SPEC = Spec(
    "Flow-GRPO, arXiv 2505.05470",
    small="--eval-every 3",
    tests="exact_flow_grpo parity_ddpo exact_ddpo wiring command_line::test_seen_before_the_run "
          "load_elsewhere::test_a_saved_generator_draws_the_same_without_our_code",
    curves={"flow_grpo-ring": Curve(dict(max_steps=80, eval_every=4), "eval/reward",
                                    numbers={"mean eval/reward": "plain"})},
    effects={
        # ddpo.py cannot get above 0.7353. Controls: noise too small to explore, and a penalty that holds the flow back
        "flow_grpo-ring": Effect(
            {"start": ("flow_grpo", dict(max_steps=1)), "idea": ("flow_grpo", dict(max_steps=80)),
             "quiet": ("flow_grpo", dict(max_steps=80, noise_level=0.05)),
             "firm": ("flow_grpo", dict(max_steps=80, beta=1.0))}, "last eval/reward",
            {"start < 0.28": 5, "0.92 < idea": 5, "quiet < 0.35": 5, "firm < 0.45": 5}, seeds=5),
        "flow_grpo-kl": Effect(  # to draw one of eight modes costs log 8 = 2.08 at least
            {"free": ("flow_grpo", dict(max_steps=80)), "firm": ("flow_grpo", dict(max_steps=80, beta=1.0))},
            "last kl", {"2.08 < free": 5, "firm < 0.5": 5}, seeds=5),
    },
    no_recipe="the paper's tables are for Stable Diffusion 3.5",
    flags=dict(beta=0.1, eval_every=1),
)  # fmt: skip
