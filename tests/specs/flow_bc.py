"""Flow-matching behaviour cloning: algos/flow_bc.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
path-turned-round: at 0 there is noise, in other papers data
- x = (1 - time) * noise + time * batch.actions
+ x = time * noise + (1 - time) * batch.actions

one-time-for-all-rows: a batch has one step, and one time, one thinks
- torch.rand(batch.rewards.shape, generator=generator, device=batch.obs.device)
+ torch.rand(1, generator=generator, device=batch.obs.device).expand(batch.rewards.shape)

noise-of-actions-s-bounds: uniform in the box
- noise = torch.randn(batch.actions.shape
+ noise = torch.rand(batch.actions.shape

grid-that-reaches-1: linspace(0, 1, K) has K times as well (ReinFlow before its repair)
- torch.full_like(x[:, :1], k / steps)
+ torch.full_like(x[:, :1], k / max(steps - 1, 1))

sum-over-the-numbers:flow_bc: a norm is a sum
- (batch.actions - noise)).square().mean()
+ (batch.actions - noise)).square().sum(-1).mean()

the-likeliest-action: evaluation takes the mean of the noise
- actor.flow(obs, noise, steps)
+ actor.flow(obs, noise * scale, steps)

ten-steps-for-all: the default is a number
- steps=args.flow_steps)
+ steps=10)
"""

GATES = dict(dataset="algos/environments/gates.hdf5", max_steps=2000, eval_every=500, eval_episodes=100)

SPEC = Spec(
    "Flow-matching behaviour cloning, arXiv 2210.02747 and 2502.02538",
    tests="exact_flow_bc exact_iql command_line_control offline_data resume_control wiring",
    curves={"flow_bc-gates": Curve(GATES | dict(threads=1), "eval/return", numbers={"mean eval/return": "share"})},
    effects={"flow_bc-gates": Effect(  # throws through one of two gates, sampled: shares that hit
        runs={"flow": ("flow_bc", GATES), "one": ("flow_bc", GATES | dict(flow_steps=1)), "bc": ("bc", GATES)},
        statistic="last eval/return_stochastic", claims={"flow > 0.7": 5, "bc < 0.4": 5, "one < 0.2": 5}, seeds=5,
    )},
    no_recipe="its papers clone with networks of other sizes on data of their own",
    flags=dict(flow_steps=3),
)  # fmt: skip
