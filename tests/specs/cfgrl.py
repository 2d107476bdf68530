"""CFGRL: algos/cfgrl.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
guided-from-the-bad: the other label is at hand
- none, good = obs.new_zeros(len(obs), 2), obs.new_tensor
+ none, good = obs.new_tensor([[0.0, 1.0]]).expand(len(obs), 2), obs.new_tensor

guided-towards-the-bad: labels have two inputs
- obs.new_tensor([[1.0, 0.0]])
+ obs.new_tensor([[0.0, 1.0]])

guidance-beyond-the-good-flow: in images the weight often counts what is added to the conditional
- self(obs, x, time, good), guidance)
+ self(obs, x, time, good), 1 + guidance)

one-draw-for-the-batch: a coin is a coin
- kept = torch.rand(batch.rewards.shape, generator=generator, device=batch.obs.device) >= label_dropout
+ kept = torch.rand(1, generator=generator, device=batch.obs.device).expand(len(batch.obs), 1) >= label_dropout

kept-and-dropped-exchanged: a probability of 0.1 is 0.9 from the other side
- device=batch.obs.device) >= label_dropout
+ device=batch.obs.device) < label_dropout

good-and-bad-exchanged: two columns
- np.stack([good, ~good], 1)[rows])
+ np.stack([~good, good], 1)[rows])

labels-of-other-rows: rows without a known next observation are left out everywhere else
- np.stack([good, ~good], 1)[rows])
+ np.stack([good, ~good], 1)[: rows.sum()])

critics-of-raw-observations: the run's statistics are in its model
- obs = (torch.from_numpy(data.obs) - w["obs_mean"]) / w["obs_std"]
+ obs = torch.from_numpy(data.obs)

critics-of-raw-actions: in MuJoCo most bounds are -1 and 1
- torch.from_numpy(to_unit(data.actions, space)).float()
+ torch.from_numpy(data.actions.reshape(len(data.actions), -1))
"""
SHORT = dict(threads=1, eval_every=2500, eval_episodes=50)
ADVANTAGE = SHORT | dict(label="advantage", critic=("iql", dict(expectile=0.9, eval_episodes=0)))

SPEC = Spec(
    "CFGRL, arXiv 2505.23458",
    tests="exact_cfgrl exact_iql command_line_control offline_data resume_control wiring",
    curves={"cfgrl-hopper": Curve(SHORT | dict(eval_episodes=20), "eval/return", {"mean eval/return": "log"})},
    effects={
        "cfgrl-hopper": Effect(  # one training, three guidances
            runs={"all": ("cfgrl", SHORT | dict(guidance=0.0)), "good": ("cfgrl", SHORT | dict(guidance=1.0)),
                  "guided": ("cfgrl", SHORT)},
            statistic="late eval/return", claims={"all < good": 5, "good < guided": 5}, seeds=5,
        ),
        # the paper's label. In pilots, a seed each, critics of 5,000 updates helped little (expectile 0.7) or not
        # (0.9); those of 10,000 did, and guidance 2 no more than 1
        "cfgrl-advantage": Effect(
            runs={"all": ("cfgrl", SHORT | dict(guidance=0.0)), "good": ("cfgrl", ADVANTAGE | dict(guidance=1.0)),
                  "guided": ("cfgrl", ADVANTAGE)},
            statistic="late eval/return", claims={"all < good": 5, "good < guided": 5}, seeds=5,
        ),
    },
    aliases=("classifier-free guidance",),
    no_recipe="the paper's are for ExORL and OGBench, with their networks",
    flags=dict(label_dropout=0.5),
    special={"top_fraction": ({}, 0.9), "label": ({"critic": "@iql"}, "advantage"),
             "critic": ({"label": "advantage", "critic": "@iql"}, "@iql2")},
)  # fmt: skip
