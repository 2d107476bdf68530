"""FQL: algos/fql.py."""

from tests.specs import Curve, Effect, Spec
from tests.specs.flow_bc import GATES

BUGS = """
policy-learns-other-noise: each part draws its own
- agent.actor.flow(batch.obs, noise, args.flow_steps)
+ agent.actor.flow(batch.obs, torch.randn_like(noise), args.flow_steps)

policy-s-smaller-critic: as in TD3 and SAC
- q = torch.stack(agent.critics(batch.obs, actions.clamp(-1, 1))).mean(0)
+ q = torch.stack(agent.critics(batch.obs, actions.clamp(-1, 1))).amin(0)

target-s-smaller-critic: as in TD3 and SAC
- next_q = torch.stack(agent.target_critics(batch.next_obs, next_actions)).mean(0)
+ next_q = torch.stack(agent.target_critics(batch.next_obs, next_actions)).amin(0)

target-of-the-flow: the flow is a policy, too
- next_actions = agent.policy(batch.next_obs, noise).clamp(-1, 1)
+ next_actions = agent.actor.flow(batch.next_obs, noise, 10).clamp(-1, 1)

alpha-on-the-values: a weight belongs to either
- return args.alpha * distill - scale * q.mean()
+ return distill - args.alpha * scale * q.mean()

policy-s-gradient-in-the-flow: no_grad forgotten
- with torch.no_grad():
-         flow = agent
+ with torch.enable_grad():
+         flow = agent

one-noise-for-both-states: one draw is enough
- next_noise, start, noise = (draw(batch.actions.shape) for _ in range(3))
+ next_noise = start = noise = draw(batch.actions.shape)

policy-acts-on-half-the-noise: less noise is safer
- .to(generator.device), noise).clamp(-1, 1)
+ .to(generator.device), noise / 2).clamp(-1, 1)

the-optimizer-forgets-the-policy: it is one of four networks
- (p for p in agent.parameters() if p.requires_grad)
+ (p for n, p in agent.named_parameters() if "policy" not in n)
"""

SPEC = Spec(
    "FQL, arXiv 2502.02538",
    tests="exact_fql exact_flow_bc exact_iql command_line_control offline_data resume_control wiring",
    curves={"fql-gates": Curve(GATES | dict(threads=1), "eval/return", numbers={"mean eval/return": "share"})},
    effects={"fql-gates": Effect(  # throws through one of two gates, sampled: shares that hit
        runs={"idea": ("fql", GATES), "one": ("fql", GATES | dict(flow_steps=1)),
              "zero": ("fql", GATES | dict(alpha=0.0))},
        statistic="last eval/return_stochastic", claims={"idea > 0.6": 5, "one < 0.2": 5, "zero < 0.1": 5}, seeds=5,
    )},
    no_recipe="the paper's tasks are OGBench's, with networks of four layers",
    flags=dict(normalize_q=True),
)  # fmt: skip
