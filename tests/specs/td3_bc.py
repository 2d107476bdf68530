"""TD3+BC: algos/td3_bc.py."""

from tests.specs import Curve, Effect, Recipe, Spec

BUGS = """
sum-over-the-numbers-of-an-action: ReBRAC's term, which is A times as large
- (actions - batch.actions).square().mean()
+ (actions - batch.actions).square().sum(1).mean()

lambda-of-the-mean: large values of both signs cancel
- q.detach().abs().mean()
+ q.detach().mean().abs()

second-critic-for-the-actor: either would do, but not both
- q = agent.critics(batch.obs, actions)[0]
+ q = torch.min(*agent.critics(batch.obs, actions))

target-action-of-the-online-actor: two actors of one kind
- next_actions = (agent.target_actor(batch.next_obs)
+ next_actions = (agent.actor(batch.next_obs)

actor-in-every-update: the delay is one of TD3's three ideas
- if number % args.policy_frequency == 0:
+ if number:

statistics-of-all-rows: the dataset has a mean, and so have the rows that are taken
- torch.from_numpy(data.obs[rows].mean(0, np.float64))
+ torch.from_numpy(data.obs.mean(0, np.float64))
"""
SHORT = dict(max_steps=4000, eval_every=800)

SPEC = Spec(
    "TD3+BC, arXiv 2106.06860",
    tests="exact_td3_bc parity_updates command_line_control resume_control wiring",
    curves={"td3_bc-hopper": Curve(SHORT | dict(threads=1), "eval/return", numbers={"mean eval/return": "log"})},
    effects={
        "td3_bc-hopper": Effect(
            runs={"idea": ("td3_bc", SHORT), "td3": ("td3_bc", SHORT | dict(bc_weight=0.0))},
            statistic="late eval/return", claims={"idea > 500": 5, "td3 < 50": 5}, seeds=5,
        ),
        "td3_bc-belief": Effect(  # in actions that nobody tried
            runs={"idea": ("td3_bc", SHORT), "td3": ("td3_bc", SHORT | dict(bc_weight=0.0))},
            statistic="last q_policy", claims={"td3 > 2 * idea": 5}, seeds=5,
        ),
        "td3_bc-alpha": Effect(
            runs={str(name): ("td3_bc", SHORT | dict(alpha=alpha))
                  for name, alpha in {"little": 0.5, "idea": 2.5, "much": 12.5}.items()},
            statistic="last distance", claims={"little < idea": 5, "idea < much": 5}, seeds=5,
        ),
    },
    recipes=(Recipe(
        "hopper_medium_replay-v2.hdf5 --max-steps 1000000 --eval-every",
        "sfujim/TD3_BC, main.py and TD3_BC.py",
        paper=dict(learning_rate=3e-4, batch_size=256, hidden_size=256, tau=0.005, gamma=0.99, alpha=2.5,
                   policy_noise=0.2, noise_clip=0.5, policy_frequency=2, max_steps=1_000_000, normalize=True),
    ),),
    flags=dict(policy_frequency=1, top_fraction=0.5),
    special={"top_fraction": ({}, 0.9)},
)  # fmt: skip
