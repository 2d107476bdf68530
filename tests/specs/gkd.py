"""GKD: algos/gkd.py."""

from tests.specs import Curve, Effect, Spec
from utils.lm import TINY_MODEL

BUGS = """
mixture-of-exchanged-shares: b is the teacher's share here, the student's elsewhere
- torch.logaddexp(teacher_logps + math.log(b), logps + math.log1p(-b))
+ torch.logaddexp(teacher_logps + math.log1p(-b), logps + math.log(b))

weights-of-jsd-exchanged: two terms that look alike
- return b * kl(teacher_logps, mixture) + (1 - b) * kl(logps, mixture)
+ return (1 - b) * kl(teacher_logps, mixture) + b * kl(logps, mixture)

teacher-at-another-temperature: its pass stands beside the student's
- teacher_logps = teacher and completion_logps(teacher, *inputs, args.temperature)[0]
+ teacher_logps = teacher and completion_logps(teacher, *inputs)[0]

normalised-before-the-cut: logits of a padded vocabulary are cut after the softmax
- (x[:, :width].to(torch.promote_types(x.dtype, torch.float32)) / args.temperature).log_softmax(-1)
+ (x.to(torch.promote_types(x.dtype, torch.float32)) / args.temperature).log_softmax(-1)[:, :width]

k3-for-k2-of-the-teacher: the estimator at hand; its gradient is another divergence's
- loss = loss + batch.beta * (gap if args.estimator == "full" else k2(logps, teacher_logps))
+ loss = loss + batch.beta * (gap if args.estimator == "full" else k3(logps, teacher_logps))

log-ratio-for-k2: its value is the divergence, and its gradient has mean 0
- loss = loss + batch.beta * (gap if args.estimator == "full" else k2(logps, teacher_logps))
+ loss = loss + batch.beta * (gap if args.estimator == "full" else logps - teacher_logps)

unknown-is-zero: a tensor of zeros is made for log-probabilities that nobody has
- torch.full_like(samples.logps, torch.nan)
+ torch.zeros_like(samples.logps)

cut-off-counts-as-ended: the end of a given answer is its last token
- [len(answer) <= limit for _, answer in pairs]
+ [True for _ in pairs]

coin-turned-round: a chance of one or of the other
- if random.Random(f"{args.seed}/{step}").random() < args.student_share:
+ if random.Random(f"{args.seed}/{step}").random() >= args.student_share:

one-coin-for-the-run: a generator is made anew for each step
- if random.Random(f"{args.seed}/{step}").random() < args.student_share:
+ if random.Random(args.seed).random() < args.student_share:

demonstrations-for-solutions: the column of every other task
- samples = given(rows, "solution", tokenizer,
+ samples = given(rows, "completion", tokenizer,

weight-ends-a-step-late: steps count from 1
- (end - args.teacher_beta) * (step - 1) / max(1, args.max_steps - 1)
+ (end - args.teacher_beta) * step / args.max_steps
"""

FEW = dict(task="sort", num_prompts=8, num_generations=2, learning_rate=1e-4, eval_every=0, eval_prompts=256)
HALF = FEW | dict(max_steps=30, teacher_steps=3)

SPEC = Spec(
    "GKD, arXiv 2306.13649; KDRL, arXiv 2506.02208",
    small="--teacher-steps 2",
    tests="exact_gkd exact_grpo parity_trl_gkd wiring",
    curves={"gkd-sort": Curve(
        FEW | dict(max_steps=8), "reward", numbers={"mean reward": "plain", "eval/pass@1": "share"},
    )},
    effects={
        "gkd-sort": Effect(  # GRPO has three times the steps and answers; the last one's teacher is the start itself
            {"gkd": ("gkd", FEW | dict(max_steps=20)), "grpo": ("grpo", FEW | dict(max_steps=60)),
             "data": ("gkd", FEW | dict(max_steps=20, student_share=0.0)),
             "itself": ("gkd", FEW | dict(max_steps=20, teacher_steps=0))},
            "last eval/pass@1", {"gkd > grpo": 9, "gkd > itself + 0.3": 10, "data > itself + 0.3": 9},
        ),
        "kdrl-sort": Effect(  # the teacher is half trained
            {"kdrl": ("gkd", HALF | dict(reward_weight=1.0, teacher_beta_end=0.0)), "gkd": ("gkd", HALF),
             "grpo": ("grpo", FEW | dict(max_steps=30))},
            "last eval/pass@1", {"kdrl > gkd + 0.05": 9, "kdrl > grpo - 0.1": 9},
        ),
    },
    no_recipe="neither paper's whole table could be read",
    flags=dict(teacher="@other", reward_weight=0.5),
    special={
        "teacher": ({}, "@model"),
        "teacher_steps": ({"model": TINY_MODEL, "teacher": "", "teacher_steps": 1}, 2),
        "jsd_beta": ({"divergence": "jsd"}, 0.3),
        "student_share": ({"reward_weight": 0.0}, 0.0),
        "teacher_beta_end": [({}, 0.2), ({"teacher_beta": 0.0}, 0.2)],  # also where no teacher is wanted at first
    },
)  # fmt: skip
