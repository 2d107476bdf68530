"""TD3: algos/td3.py."""

from tests.specs import Curve, Effect, Recipe, Spec
from tests.specs.ddpg import AUTHORS, HOPPER, PENDULUM

BUGS = """
first-of-the-twins: the actor's loss takes the first one
- agent.target_critics(batch.next_obs, next_actions).amin(0)
+ agent.target_critics(batch.next_obs, next_actions)[0]

target-of-the-online-critics:td3: two networks of one kind
- agent.target_critics(batch.next_obs, next_actions).amin(0)
+ agent.critics(batch.next_obs, next_actions).amin(0)

target-actor-forgotten:td3: SAC has none
- next_actions = (agent.target_actor(batch.next_obs) + noise).clamp(-1, 1)
+ next_actions = (agent.actor(batch.next_obs) + noise).clamp(-1, 1)

noise-clip-forgotten: actions are clipped afterwards
- noise = noise.clamp(-args.noise_clip, args.noise_clip)
+ noise = noise + 0.0

noise-clipped-before-its-scale: the bound is then of standard normal noise
- noise = noise.clamp(-args.noise_clip, args.noise_clip)
+ noise = noise.clamp(-args.noise_clip * args.policy_noise, args.noise_clip * args.policy_noise)

noise-uniform: rand for randn
- noise = torch.randn(batch.actions.shape, generator=generator, device=batch.obs.device) * args.policy_noise
+ noise = torch.rand(batch.actions.shape, generator=generator, device=batch.obs.device) * args.policy_noise

one-noise-for-the-whole-batch: it is broadcast
- noise = torch.randn(batch.actions.shape, generator=generator
+ noise = torch.randn(batch.actions.shape[1], generator=generator

actor-by-the-minimum: SAC's actor has it
- return -agent.critics["q1"](torch.cat([obs, agent.actor(obs)], -1)).mean()
+ return -agent.critics(obs, agent.actor(obs)).amin(0).mean()

mean-over-the-twins-losses: half of the gradient; Adam hides it, but for its epsilon
- return (q - target).square().mean((1, 2)).sum(), q[0].detach(), target
+ return (q - target).square().mean(), q[0].detach(), target

actor-moves-in-the-other-updates:td3: a delay that counts the wrong ones
- if number % args.policy_frequency == 0:
+ if number % args.policy_frequency == args.policy_frequency - 1:

twins-alike: one network twice: their minimum is each of them
- super().__init__({f"q{i}": network(*sizes) for i in range(1, count + 1)})
+ super().__init__(dict.fromkeys([f"q{i}" for i in range(1, count + 1)], network(*sizes)))

updates-are-counted-anew-in-each-step:td3: a delay longer than a step's updates would never end
- metrics |= update(agent, optimizers, batch, generator, args, number + 1, *losses)
+ metrics |= update(agent, optimizers, batch, generator, args, number % args.utd_ratio + 1, *losses)
"""

# Where every Q is 0 (NoiseMDP): 3,000 updates on about 1,000 rows, whose noise a critic can learn by heart and an actor
# can exploit. Chosen, with the claims, after one run of ddpg and one of td3 with seed 101. The control makes as many
# updates, each after a new step, so there is less to learn by heart.
BIAS = dict(env_id="algos.environments.noise_mdp:NoiseMDP-v0", env_kwargs=("actions=0",), tau=0.01,
            batch_size=32, hidden_size=64,
            learning_starts=1000, total_timesteps=1150, utd_ratio=20, log_every=5, eval_every=0,
            eval_episodes=1, threads=1)  # fmt: skip
OFF = dict(num_critics=1, policy_frequency=1, policy_noise=0.0)
FRESH = dict(total_timesteps=4000, utd_ratio=1, log_every=100)

SPEC = Spec(
    "TD3, arXiv 1802.09477",
    tests="exact_td3 exact_ddpg exact_sac parity_updates command_line_control resume_control wiring",
    curves={
        "td3-pendulum": Curve(PENDULUM, "eval/return",
                              numbers={"mean eval/return": "plain", "last eval/return": "plain"}),
        "td3-hopper-300k": Curve(HOPPER, "eval/return", numbers={}, slow=True),
    },
    effects={"td3-bias": Effect(
        runs={
            "ddpg": ("ddpg", BIAS),
            "td3": ("td3", BIAS),
            "twins": ("td3", BIAS | OFF | dict(num_critics=2)),
            "delay": ("td3", BIAS | OFF | dict(policy_frequency=2)),
            "smoothing": ("td3", BIAS | OFF | dict(policy_noise=0.2)),
            "control": ("ddpg", BIAS | FRESH),
        },
        statistic="late q_policy",
        claims={"td3 < 2 * ddpg / 3": 9, "twins < ddpg": 9, "delay < ddpg": 9, "smoothing < ddpg": 9,
                "abs(control) < ddpg / 2": 9},
    )},
    recipes=(Recipe(
        "HalfCheetah-v5 --total-timesteps 1000000",
        "sfujim/TD3, TD3.py and main.py (not the paper's table of settings)",
        paper=AUTHORS | dict(num_critics=2, policy_noise=0.2, noise_clip=0.5, policy_frequency=2),
    ),),
    special={"noise_clip": ({}, 0.05)},
)  # fmt: skip
