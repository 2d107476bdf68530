"""Decision-Pretrained Transformer: algos/dpt.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
query-at-the-end: row j then knows pull j + 1, and the last one nothing of its own
- pulls = F.pad(pulls, (0, 0, 1, 0))
+ pulls = F.pad(pulls, (0, 0, 0, 1))

positions-from-the-end: all contexts of training are equally long
- self.embed_timestep.weight[: pulls.shape[1]]
+ self.embed_timestep.weight[-pulls.shape[1] :]

variance-for-deviation:dpt: the authors call their deviation var
- + args.noise * normals
+ + args.noise**0.5 * normals

realised-regret: rewards are what an agent sees
- means.amax(1, keepdim=True) - means.gather(1, context.actions)
+ means.amax(1, keepdim=True) - context.rewards

plays-by-the-empty-context: the query comes first, and its row is the first
- model(context)[:, -1].softmax(1)
+ model(context)[:, 0].softmax(1)

dropout-in-evaluation:dpt: no eval() before an evaluation
-     model.eval()
-     *_, regret =
+     *_, regret =

training-mode-lost:dpt: eval() before an evaluation, and no train() after it
-     model.train()
-     best, random
+     best, random

contexts-shorter-than-deployment: half of the horizon is long enough to learn from
- behave(means, args.horizon - 1, args, generator)
+ behave(means, args.horizon // 2, args, generator)
"""

SPEC = Spec(
    "Decision-Pretrained Transformer, arXiv 2306.14892",
    "In context",
    small="--device cpu --max-steps 8 --log-every 2 --eval-every 4 --eval-tasks 4 --horizon 6 --embed-dim 8 "
          "--num-heads 2 --batch-size 4 --save-every 2",
    tests="exact_dpt parity_transformers wiring command_line::test_seen_before_the_run",
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
)  # fmt: skip
