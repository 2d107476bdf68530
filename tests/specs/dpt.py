"""Decision-Pretrained Transformer: algos/dpt.py."""

from tests.specs import Curve, Effect, Spec, parse_bugs

BUGS = """
TODO-what-the-mistake-is: TODO why people make it; one block for each line of the idea that can be wrong
- TODO a line of algos/dpt.py that dt.py lacks
+ TODO the same line with the mistake
"""

SPEC = Spec(
    "Decision-Pretrained Transformer, arXiv 2306.14892",
    "In context",
    small="--device cpu --max-steps 8 --log-every 2 --eval-every 4 --eval-tasks 4 --horizon 6 --embed-dim 8 "
          "--num-heads 2 --batch-size 4 --save-every 2",
    tests="exact_dpt parity_dpt wiring command_line::test_seen_before_the_run",
    curves={"dpt-bandits": Curve(dict(max_steps=1000, eval_every=200), "eval/score",
                                 numbers={"mean eval/score": "plain"})},
    effects={
        "dpt-thompson": Effect(  # Thompson sampling knows the prior; the authors' network has one head
            {"idea": ("dpt", dict(max_steps=1500)), "one_head": ("dpt", dict(max_steps=1500, num_heads=1))},
            "last eval/over_thompson", {"idea < 1.3": 5, "idea < 0.8 * one_head": 5}, seeds=5),
        "dpt-contexts": Effect(  # the control learns from contexts of other bandits: random arms, a score of 0
            {"idea": ("dpt", dict(max_steps=500)), "shuffled": ("dpt", dict(max_steps=500, shuffle_contexts=True))},
            "last eval/score", {"40 < idea": 5, "abs(shuffled) < 3": 5}, seeds=5),
        "dpt-argmax": Effect(  # stays with an arm that is good, not the best
            {"idea": ("dpt", dict(max_steps=1000)), "argmax": ("dpt", dict(max_steps=1000, act="argmax"))},
            "last eval/regret_std", {"1.3 * idea < argmax": 5}, seeds=5),
    },
    no_recipe="the authors' contexts of 500 pulls are too long for a CPU",
    flags=dict(max_steps=4, log_every=2, eval_every=0, eval_tasks=8, horizon=6, embed_dim=8, num_layers=1, num_heads=2,
               batch_size=4, learning_rate=1e-2, max_grad_norm=0.01),
    noise=dict(dropout=0.5),
    bugs=parse_bugs(BUGS),
)  # fmt: skip
