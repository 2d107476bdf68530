"""Diffusion Policy: algos/diffusion_policy.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
last-step-keeps-nothing: the cosine is 0 there
- .clip(min=0.001)
+ .clip(min=0)

deviation-of-the-forward-step: beta is the other choice of DDPM's paper (fixed_large)
- (beta * (1 - before) / (1 - now)).sqrt()
+ beta.sqrt()

one-level-for-all-rows: a batch has one step
- k = torch.randint(1, agent.actor.steps + 1, shape, generator=generator, device=device)
+ k = torch.randint(1, agent.actor.steps + 1, (1, 1), generator=generator, device=device).expand(shape)

newest-weights-act: one network is trained, and it acts
- act_in_evaluation(agent.average, space, args)
+ act_in_evaluation(agent.actor, space, args)

windows-across-episodes: rows follow each other
- + 1 - n_obs_steps).clip(first, last)
+ + 1 - n_obs_steps).clip(0, len(data.obs) - 1)

executes-the-past: a plan begins with its first action
- first = args.n_obs_steps - 1
+ first = 0

forgets-what-was-seen-within-a-plan: the network sees only where plans begin
- past[:] = ([*past
+ past[:] = past if plans else ([*past

oldest-observations-seen: a history grows at its end
- * args.n_obs_steps)[-args.n_obs_steps :]
+ * args.n_obs_steps)[: args.n_obs_steps]
"""

DETOUR = dict(dataset="algos/environments/detour.hdf5", max_steps=3000, eval_every=500, eval_episodes=100)
PLACE = dict(dataset="algos/environments/detour_place.hdf5")  # the place is seen
SINGLE = dict(horizon=1, n_obs_steps=1, n_action_steps=1)  # a policy of single actions

SPEC = Spec(
    "Diffusion Policy, arXiv 2303.04137",
    small="--diffusion-steps 3 --horizon 4 --n-action-steps 2",
    tests="exact_diffusion_policy parity_diffusion_policy command_line_control resume_control wiring",
    curves={"diffusion_policy-detour": Curve(DETOUR | dict(threads=1), "eval/return", {"mean eval/return": "share"})},
    effects={  # shares of walks that arrive
        "diffusion_policy-modes": Effect(
            runs={"plan": ("diffusion_policy", DETOUR), "one": ("diffusion_policy", DETOUR | dict(diffusion_steps=1)),
                  "bc": ("bc", DETOUR)},
            statistic="last eval/return_stochastic", claims={"plan > 0.8": 5, "one < 0.3": 5, "bc < 0.3": 5}, seeds=5,
        ),
        "diffusion_policy-plans": Effect(  # executed to their end, to the half, for one step; controls see the place
            runs={name: ("diffusion_policy", DETOUR | more) for name, more in {
                "plan": {}, "half": dict(n_action_steps=4), "step": dict(n_action_steps=1), "single": SINGLE,
                "step_seen": PLACE | dict(n_action_steps=1), "single_seen": PLACE | SINGLE}.items()},
            statistic="last eval/return_stochastic", seeds=5,
            claims={"plan > 0.8": 5, "half > 0.3": 5, "half < 0.7": 5, "step < 0.2": 5, "step_seen > 0.2": 5,
                    "single < 0.2": 5, "single_seen > 0.7": 5},
        ),
    },
    no_recipe="the paper's networks and tasks are others",
    flags=dict(diffusion_steps=3, horizon=5, n_action_steps=2, n_obs_steps=2),
)  # fmt: skip
