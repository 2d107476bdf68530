"""HER for continuous actions: algos/her_sac.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
no-hindsight: the flag is lost
- others = [relabel(episode, infos, later, goals) for later in future(len(rows), args.her_k, generator)]
+ others = []
"""
REACH = dict(total_timesteps=3000, learning_starts=500, gamma=0.95, learning_rate=1e-3, batch_size=64, hidden_size=64,
             eval_every=0, eval_episodes=100)  # fmt: skip

SPEC = Spec(
    "HER for continuous actions, arXiv 1707.01495",
    tests="exact_her_sac exact_sac "
          "command_line_control resume_control wiring",
    curves={
        "her_sac-reach": Curve(
            REACH | dict(env_id="PointReach-v0", eval_every=600), "eval/success",
            numbers={"mean eval/success": "share"},
        ),
        "her_sac-fetchreach": Curve(
            dict(env_id="gymnasium_robotics:FetchReach-v4", total_timesteps=10_000, learning_starts=1000,
            hidden_size=256, batch_size=256, eval_every=2000, eval_episodes=20), "eval/success", numbers={}, slow=True,
        ),
    },
    effects={"sac-reach": Effect(
        {"hindsight": ("her_sac", REACH | dict(env_id="PointReach-v0", her_k=4)),
         "sac": ("sac", REACH | dict(env_id="algos.her_sac:PointReach-v0"))},
        "last eval/success", {"hindsight > 0.9": 9, "sac < 0.5": 9},
    )},
    no_recipe="the paper's table is of DDPG on a robot that Gymnasium does not have",
    flags=dict(env_id="environments:Reach-v0"),
    special={"env_id": ({"env_kwargs": ()}, "PointReach-v0")},
    walk="environments:Reach-v0",
    noise=dict(env_id="environments:Reach-v0", env_kwargs=("label=noisy",)),
)  # fmt: skip
