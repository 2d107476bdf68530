"""AWAC and CRR: algos/awac.py."""

from tests.specs import Curve, Effect, Recipe, Spec

BUGS = """
bootstrap-by-the-critics: four networks of one kind
- policy_value(agent.targets, agent.actor, batch.next_obs, 1
+ policy_value(agent.critics, agent.actor, batch.next_obs, 1

advantage-of-the-target-critics: IQL, the parent, has them there
- q = torch.min(*agent.critics(batch.obs
+ q = torch.min(*agent.targets(batch.obs

neighbours-of-a-state: the K actions of a state lie B rows apart
- q.view(count, -1, 1).mean(0)
+ q.view(-1, count, 1).mean(1)

gradient-through-the-value: the value is a function of the policy that is trained
- @torch.no_grad()
- def policy_value(
+ def policy_value(

optimizers-exchanged: two of one kind in a tuple
- for part in (agent.actor, agent.critics)))
+ for part in (agent.critics, agent.actor)))
"""

SHORT = dict(max_steps=6000, hidden_size=128, batch_size=128, learning_rate=0.001, eval_every=1200, threads=1)
AWAC = SHORT | dict(tau=0.01)

SPEC = Spec(
    "AWAC, arXiv 2006.09359; CRR, arXiv 2006.15134",
    tests="exact_awac parity_updates command_line_control resume_control wiring",
    curves={
        "awac-hopper": Curve(AWAC | dict(max_steps=5000, eval_every=0, eval_episodes=20), "eval/return",
                             numbers={"eval/return_stochastic": "log"}),
    },
    effects={"awac-hopper": Effect(
        runs={"awac": ("awac", AWAC), "bc": ("bc", SHORT), "flat": ("awac", AWAC | dict(temperature=1e9)),
              "crr": ("awac", AWAC | dict(weights="binary", num_action_samples=4))},
        statistic="late eval/return", claims={"awac > bc + 150": 5, "flat < bc + 150": 5}, seeds=5,
    )},
    recipes=(Recipe(
        "--temperature 0.3333", "corl-team/CORL, configs/offline/awac/hopper/medium_replay_v2.yaml",
        paper=dict(learning_rate=3e-4, batch_size=256, hidden_size=256, tau=0.005, gamma=0.99, weights="exp",
                   temperature=0.3333, num_action_samples=1, max_steps=1_000_000, normalize=True),
    ),),
)  # fmt: skip
