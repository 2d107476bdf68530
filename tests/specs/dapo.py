"""DAPO: algos/dapo.py."""

from tests.specs import Spec

SPEC = Spec(
    "DAPO, arXiv 2503.14476",
    "Language models: rewards",
    small="--device cpu --task sort --num-prompts 4 --num-generations 4 --max-steps 6 --eval-prompts 4 --eval-every "
          "2 --save-every 2",
    tests="exact_dapo resume::test_from_a_checkpoint_in_the_middle",
)  # fmt: skip
