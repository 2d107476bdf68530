"""ORPO: algos/orpo.py."""

from tests.specs import Recipe, Spec
from tests.specs.dpo import SORT

BUGS = """
sigmoid-without-log:orpo: both are minimised where chosen wins
- args.beta * logsigmoid(
+ args.beta * torch.sigmoid(

rejected-is-imitated:orpo: two tensors of one shape, one of which is needed twice
- return -chosen - args.beta
+ return -rejected - args.beta

likelihood-forgotten: the other losses of preferences have no such term
- return -chosen - args.beta
+ return -args.beta

complement-from-the-probability: the formula as it is printed; near p = 1 the difference has few digits
- torch.log(-torch.expm1(logps))
+ torch.log(1 - logps.exp())
"""

SPEC = Spec(
    "ORPO, arXiv 2403.07691",
    tests="exact_simpo_orpo parity_trl_preferences wiring dpo_runs",
    curves={"orpo-sort": SORT.but(max_steps=20)},
    recipes=(Recipe(
        "ultrafeedback-binarized-preferences-cleaned",
        "the authors' run_mistral_orpo_beta.sh (lambda: arXiv 2403.07691, section 6.1)", preset="full",
        paper=dict(beta=0.1, batch_size=32, learning_rate=5e-6, warmup_steps=200, max_length=2048,
                   lr_schedule="inverse_sqrt"),
        differs=dict(lr_schedule=("linear", "here with a linear decay")),
    ),),
)  # fmt: skip
