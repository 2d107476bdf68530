"""ReBRAC: algos/rebrac.py."""

from tests.specs import Curve, Effect, Recipe, Spec

BUGS = """
first-critic-for-the-actor: TD3+BC has it
- q = torch.min(*agent.critics(batch.obs, actions))
+ q = agent.critics(batch.obs, actions)[0]

layer-norm-before-the-relu: the usual order
- nn.ReLU(), *[nn.LayerNorm(hidden_size, eps=1e-6)] * layer_norm]
+ *[nn.LayerNorm(hidden_size, eps=1e-6)] * layer_norm, nn.ReLU()]
"""
SHORT = dict(max_steps=1000, eval_episodes=0, log_every=100, batch_size=64, learning_rate=1e-3, actor_bc=0.1)
FREE = SHORT | dict(actor_bc=0.0, critic_bc=0.0)
PENALTIES = {"none": 0.0, "little": 0.01, "much": 0.5}

SPEC = Spec(
    "ReBRAC, arXiv 2305.09836",
    tests="exact_rebrac exact_td3_bc parity_updates command_line_control resume_control wiring",
    curves={
        "rebrac-hopper": Curve(dict(max_steps=2000, eval_every=400, threads=1), "eval/return",
                               {"mean eval/return": "log"})
    },
    effects={
        "rebrac-gap": Effect(
            runs={name: ("rebrac", SHORT | dict(critic_bc=bc)) for name, bc in PENALTIES.items()},
            statistic="late gap", claims={"little < none": 5, "much < little": 5}, seeds=5,
        ),
        "rebrac-values": Effect(
            runs={name: ("rebrac", SHORT | dict(critic_bc=PENALTIES[name])) for name in ("none", "much")},
            statistic="late q_policy", claims={"much < 0.97 * none": 5}, seeds=5,
        ),
        "rebrac-layer-norm": Effect(  # without either penalty
            runs={"idea": ("rebrac", FREE), "without": ("rebrac", FREE | dict(layer_norm=False))},
            statistic="late q_policy", claims={"without < 0.9 * idea": 5}, seeds=5,
        ),
    },
    recipes=(Recipe(
        "hopper_medium_replay-v2.hdf5 --max-steps 1000000",
        "tinkoff-ai/ReBRAC, configs/rebrac/hopper/hopper_medium_replay.yaml",
        paper=dict(learning_rate=1e-3, batch_size=1024, hidden_size=256, tau=0.005, gamma=0.99, actor_bc=0.05,
                   critic_bc=0.5, layer_norm=True, policy_noise=0.2, noise_clip=0.5, policy_frequency=2,
                   max_steps=1_000_000, normalize=False),
    ),),
)  # fmt: skip
