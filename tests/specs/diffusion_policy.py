"""Diffusion Policy: algos/diffusion_policy.py."""

from tests.specs import Curve, Effect, Spec, parse_bugs
from tests.specs.flow_bc import SPEC as PARENT

BUGS = """
linear-schedule: DDPM's first paper has one
- np.cos((np.arange(steps + 1) / steps + 0.008) / 1.008 * np.pi / 2) ** 2
+ 1 - np.arange(steps + 1) / steps

last-step-keeps-nothing: the cosine is 0 there
- .clip(min=0.001)
+ .clip(min=0)

plan-not-clipped: actions are clipped by the environment anyway
- (x - (1 - now).sqrt() * self(obs, x, k)) / now.sqrt()).clamp(-1, 1)
+ (x - (1 - now).sqrt() * self(obs, x, k)) / now.sqrt())

deviation-of-the-forward-step: beta is the other choice of DDPM's paper (fixed_large)
- (beta * (1 - before) / (1 - now)).sqrt()
+ beta.sqrt()

weights-of-the-mean-exchanged: two products of a root and a share
- before.sqrt() * beta * plan + (1 - beta).sqrt() * (1 - before) * x
+ (1 - beta).sqrt() * (1 - before) * plan + before.sqrt() * beta * x

last-denoising-step-left-out: ranges end before their end
- for k in range(self.steps, 0, -1):
+ for k in range(self.steps, 1, -1):

noise-weighted-as-the-plan: alpha and 1 - alpha
- x = kept.sqrt() * batch.actions + (1 - kept).sqrt() * noise
+ x = (1 - kept).sqrt() * batch.actions + kept.sqrt() * noise

variances-for-roots: the shares are of variances
- x = kept.sqrt() * batch.actions + (1 - kept).sqrt() * noise
+ x = kept * batch.actions + (1 - kept) * noise

last-noise-level-never-trained: randint leaves its end out
- torch.randint(1, agent.actor.steps + 1, shape
+ torch.randint(1, max(agent.actor.steps, 2), shape

one-level-for-all-rows: a batch has one step
- k = torch.randint(1, agent.actor.steps + 1, shape, generator=generator, device=device)
+ k = torch.randint(1, agent.actor.steps + 1, (1, 1), generator=generator, device=device).expand(shape)

the-average-does-not-move: a copy, one thinks, follows
- list(agent.actor.parameters()), 1 - decay)
+ list(agent.actor.parameters()), 0.0)

share-that-is-kept-exchanged: a decay of 0.999 and a rate of 0.001
- list(agent.actor.parameters()), 1 - decay)
+ list(agent.actor.parameters()), decay)

average-never-forgets-the-start: without the warm-up random weights act for long
- return min(1 - max(updates, 1) ** -power, 0.9999)
+ return 0.9999

newest-weights-act: one network is trained, and it acts
- act_in_evaluation(agent.average, space, args)
+ act_in_evaluation(agent.actor, space, args)

windows-across-episodes: rows follow each other
- + 1 - n_obs_steps).clip(first, last)
+ + 1 - n_obs_steps).clip(0, len(data.obs) - 1)

plan-begins-now: no action of it is past
- np.arange(horizon) + 1 - n_obs_steps).clip
+ np.arange(horizon)).clip

executes-the-past: a plan begins with its first action
- first = args.n_obs_steps - 1
+ first = 0

forgets-what-was-seen-within-a-plan: the network sees only where plans begin
- past[:] = ([*past
+ past[:] = past if plans else ([*past

oldest-observations-seen: a history grows at its end
- * args.n_obs_steps)[-args.n_obs_steps :]
+ * args.n_obs_steps)[: args.n_obs_steps]

observations-not-copied: the environments write into one array
- ([*past, obs.copy()] if past
+ ([*past, obs] if past

history-of-other-rows: all rows or those that are taken
- windows(data, args.n_obs_steps, args.horizon)[rows]
+ windows(data, args.n_obs_steps, args.horizon)[: rows.sum()]

observations-of-the-plan-s-end: the newest come last
- data.obs[plans[:, : args.n_obs_steps]]
+ data.obs[plans[:, -args.n_obs_steps :]]

units-of-the-environment:diffusion_policy: in MuJoCo most bounds are -1 and 1
- to_unit(data.actions, space)[plans]
+ data.actions[plans]
"""

DETOUR = dict(dataset="algos/environments/detour.hdf5", max_steps=3000, eval_every=500, eval_episodes=100)
PLACE = DETOUR | dict(dataset="algos/environments/detour_place.hdf5")  # the place is seen
SINGLE = dict(horizon=1, n_obs_steps=1, n_action_steps=1)  # a policy of single actions

SPEC = Spec(
    "Diffusion Policy, arXiv 2303.04137",
    PARENT.family,
    small=PARENT.small + " --diffusion-steps 3 --horizon 4 --n-action-steps 2",
    tests="exact_diffusion_policy parity_diffusion_policy command_line_control resume_control wiring",
    curves={
        "diffusion_policy-detour": Curve(
            DETOUR | dict(threads=1), "eval/return", numbers={"mean eval/return": "share"},
        ),
    },
    effects={  # shares of walks that arrive
        "diffusion_policy-modes": Effect(
            runs={"plan": ("diffusion_policy", DETOUR), "one": ("diffusion_policy", DETOUR | dict(diffusion_steps=1)),
                  "bc": ("bc", DETOUR)},
            statistic="last eval/return_stochastic", claims={"plan > 0.8": 5, "one < 0.3": 5, "bc < 0.3": 5}, seeds=5,
        ),
        "diffusion_policy-plans": Effect(  # executed to their end, to the half, for one step; controls see the place
            runs={"plan": ("diffusion_policy", DETOUR), "half": ("diffusion_policy", DETOUR | dict(n_action_steps=4)),
                  "step": ("diffusion_policy", DETOUR | dict(n_action_steps=1)),
                  "step_seen": ("diffusion_policy", PLACE | dict(n_action_steps=1)),
                  "single": ("diffusion_policy", DETOUR | SINGLE),
                  "single_seen": ("diffusion_policy", PLACE | SINGLE)},
            statistic="last eval/return_stochastic",
            claims={"plan > 0.8": 5, "half > 0.3": 5, "half < 0.7": 5, "step < 0.2": 5, "step_seen > 0.2": 5,
                    "single < 0.2": 5, "single_seen > 0.7": 5}, seeds=5,
        ),
    },
    no_recipe="the paper's networks and tasks are others",
    flags=PARENT.flags | dict(diffusion_steps=3, horizon=5, n_action_steps=2, n_obs_steps=2),
    special=PARENT.special,
    walk=PARENT.walk,
    bugs=parse_bugs(BUGS),
)  # fmt: skip
