"""gSDE: algos/gsde.py."""

from tests.specs import Effect, Recipe, Spec

BUGS = """
noise-matrix-of-every-step: what makes gSDE is that it is kept
- if matrices is None or step // args.num_envs % args.sde_sample_freq == 0:
+ if True:

one-noise-matrix-for-all-environments: it is broadcast
- matrices = torch.randn(args.num_envs, args.hidden_size
+ matrices = torch.randn(1, args.hidden_size
"""
CAR = dict(env_id="MountainCarContinuous-v0", total_timesteps=10_000, learning_starts=0, gamma=0.9999, tau=0.01,
           alpha=0.1, batch_size=512, buffer_size=50_000, hidden_size=64)  # fmt: skip

SPEC = Spec(
    "gSDE, arXiv 2005.05719",
    tests="exact_gsde exact_sac command_line_control resume_control wiring",
    effects={
        # chosen after three seeds of gsde alone, 1 to 3; control draws its matrices anew in each step
        "gsde-car": Effect(
            {"gsde": ("gsde", CAR), "sac": ("sac", CAR), "control": ("gsde", CAR | dict(sde_sample_freq=1))},
            "last eval/return", {"gsde > 90": 9, "sac < 45": 9, "control < 45": 9},
        ),
    },
    recipes=(Recipe(
        "--total-timesteps 50000", "DLR-RM/rl-baselines3-zoo, hyperparams/sac.yml (the paper's table was not read)",
        paper=dict(learning_rate=3e-4, total_timesteps=50_000, alpha=0.1, gamma=0.9999, tau=0.01, batch_size=512,
                   buffer_size=50_000, hidden_size=64, sde_sample_freq=32, log_std_init=-3.67, learning_starts=0),
    ),),
    special={"sde_sample_freq": ({}, 5), "log_std_init": ({}, -1.0)},
)  # fmt: skip
