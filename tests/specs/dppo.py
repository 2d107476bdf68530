"""DPPO: algos/dppo.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
density-without-the-floor: sampling has one already
- return Normal(mean, std.clamp(min=self.min_std)).log_prob
+ return Normal(mean, std.clamp(min=1e-3)).log_prob

discount-towards-the-plan: k falls from K' to 1, and discounts grow with time
- later = torch.arange(agent.learned - 1, -1, -1, device=obs.device)
+ later = torch.arange(agent.learned, device=obs.device)

ratio-of-the-whole-chain: ReinFlow's
- logps, values = agent.log_prob(obs, chains), agent.value(obs)
+ logps, values = agent.log_prob(obs, chains).sum(-1, keepdim=True).expand_as(old_logps), agent.value(obs)

executes-the-past:dppo: a plan begins with its first action
- self.executed = slice(args.n_obs_steps - 1, args.n_obs_steps - 1 + args.n_action_steps)
+ self.executed = slice(0, args.n_action_steps)

newest-weights-taken-over: a run has two denoisers
- name.startswith("average.")}
+ name.startswith("actor.")}

start-not-taken-over: only the copy that learns is loaded
-         agent.start.load_state_dict(start)

history-of-the-episode-before: one step is added at a time
- self.past.extend([obs.copy()] * self.past.maxlen)
+ self.past.append(obs.copy())
"""

START = "diffusion_policy", dict(dataset="algos/environments/detour.hdf5", diffusion_steps=20, max_steps=600,
                                 eval_episodes=0)  # fmt: skip
PLANS = (LAST := dict(eval_every=0, eval_episodes=100)) | dict(init=START)

SPEC = Spec(
    "DPPO, arXiv 2409.00588", tests="exact_dppo parity_diffusion_policy command_line_control resume_control wiring",
    small="--num-steps 8 --diffusion-steps 3 --num-finetuned-steps 2 --horizon 4 --n-action-steps 2 --denoiser-size 16",
    curves={"dppo-detour": Curve(PLANS | dict(eval_every=25_000, threads=1), "eval/return",
                                 {"mean eval/return": "share"})},
    effects={
        "dppo-detour": Effect(  # shares of walks that arrive; of one the last step alone learns
            runs={"dppo": ("dppo", PLANS), "start": ("dppo", PLANS | dict(learning_rate=0.0, total_timesteps=2048)),
                  "one": ("dppo", PLANS | dict(num_finetuned_steps=1)), "scratch": ("dppo", LAST),
                  "ppo": ("ppo", LAST | dict(env_id="algos.environments.detour:Detour-v0", total_timesteps=100_000))},
            statistic="last eval/return", seeds=5, claims={"dppo > 0.9": 5, "dppo > start + 0.3": 5,
                "start < 0.6": 5, "one < 0.7": 5, "scratch < 0.85": 5, "ppo < 0.7": 5})},
    flags=dict(env_id="environments:Walk-v0", diffusion_steps=5, num_finetuned_steps=2, horizon=6, n_obs_steps=2,
               n_action_steps=2, denoiser_size=8),
    special={"env_id": ({}, "Heavy-v0")},
    no_recipe="the paper's networks, tasks and starts are others",
)  # fmt: skip
