"""ReinFlow: algos/reinflow.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
times-from-0-to-1: the authors' slip when they act: linspace holds both ends
- torch.full_like(obs[:, :1], k / self.steps))
+ torch.full_like(obs[:, :1], k / max(self.steps - 1, 1)))

density-of-the-last-step: the action is what the environment sees
- return steps.log_prob(chains[..., 1:, :]).sum((-2, -1)), steps
+ return steps.log_prob(chains[..., 1:, :])[..., -1, :].sum(-1), steps

entropy-of-one-step: PPO's is of one Gaussian
- steps.entropy().sum((-2, -1))
+ steps.entropy()[..., -1, :].sum(-1)

deviations-between-the-bounds: the authors' bounds are those of logarithms
- return x + self.actor(obs, x, time) / self.steps, (low + (high - low) * share).exp()
+ return x + self.actor(torch.cat([obs, x, time], -1)) / self.steps, math.exp(low) + share * math.exp(high)

no-noise-at-the-start-of-evaluation: noise 0 gives the likeliest action in ppo.py
- chain = [noise[0]]
+ chain = [scale * noise[0]]

noise-in-evaluation:reinflow: one function samples in both
- return agent.to_env(agent.sample(obs, scale, generator))
+ return agent.to_env(agent.sample(obs, 1.0, generator))

first-point-executed: chains of dppo.py end there
- to_env(chains[:, -1].clamp(-1, 1)
+ to_env(chains[:, 0].clamp(-1, 1)

clipped-chain-trained: what is executed is stored
- return torch.stack(chain, 1)
+ return torch.stack(chain, 1).clamp(-1, 1)
"""

START = "flow_bc", dict(dataset="algos/environments/gates.hdf5", max_steps=2000, eval_episodes=0)
LAST = dict(eval_every=0, eval_episodes=200)
FLOW = LAST | dict(init=START, flow_steps=4)
SMALL, MIDDLE = (dict(min_std=std, max_std=std) for std in (0.05, 0.1))
ALONE = dict(learning_rate=0.0, total_timesteps=1024)

SPEC = Spec(
    "ReinFlow, arXiv 2505.22094", tests="exact_reinflow command_line_control resume_control wiring",
    small="--num-steps 16 --flow-steps 2 --actor-size 16",
    curves={"reinflow-gates": Curve(FLOW | dict(eval_every=15_000, threads=1), "eval/return_stochastic",
                                    {"mean eval/return_stochastic": "share"})},
    effects={
        "reinflow-gates": Effect(  # shares of throws that hit, with the noise of training; flows of four steps and two
            runs={"learned": ("reinflow", FLOW), "start": ("reinflow", FLOW | ALONE),
                  "large": ("reinflow", FLOW | dict(min_std=0.2)), "small": ("reinflow", FLOW | SMALL),
                  "middle": ("reinflow", FLOW | MIDDLE),
                  "two": ("reinflow", FLOW | dict(flow_steps=2)),
                  "two_start": ("reinflow", FLOW | ALONE | dict(flow_steps=2)),
                  "ppo": ("ppo", LAST | dict(env_id="algos.environments.gates:Gates-v0", num_envs=32, num_steps=32,
                          num_minibatches=4, update_epochs=5, learning_rate=3e-4, total_timesteps=60_000))},
            statistic="last eval/return_stochastic", seeds=5, claims={"learned > 0.85": 5, "learned > start + 0.3": 5,
                "large < 0.6": 5, "two > 0.7": 5, "two_start < 0.2": 5, "ppo < 0.5": 5}),
        "reinflow-noise": Effect(  # the same flows without noise: what was learned, and not the noise itself. One seed
            # of each was seen before: start 0.66, the others 0.985 to 1
            runs={"learned": ("reinflow", FLOW), "start": ("reinflow", FLOW | ALONE),
                  "small": ("reinflow", FLOW | SMALL), "middle": ("reinflow", FLOW | MIDDLE),
                  "large": ("reinflow", FLOW | dict(min_std=0.2))},
            statistic="last eval/return", seeds=5, claims={"learned > start + 0.2": 5, "learned > small + 0.01": 4,
                "learned > middle + 0.01": 4, "learned > large + 0.01": 4})},
    flags=dict(flow_steps=2, actor_size=8),
    no_recipe="the paper's networks, tasks and starts are others",
)  # fmt: skip
