"""REINFORCE: algos/reinforce.py."""

from tests.flags import HOP
from tests.specs import Curve, Effect, Spec

BUGS = """
return-of-the-whole-episode: the first form in most textbooks; the rewards before an action only add noise
- returns[:, t] = following = rewards[:, t] + gamma * following
+ returns[:, t] = following = rewards.sum(1)

reward-of-the-step-alone: the sum is lost
- returns[:, t] = following = rewards[:, t] + gamma * following
+ returns[:, t] = rewards[:, t]

baseline-holds-the-episode-itself: the mean of the batch; the gradient shrinks by (N - 1) / N
- return returns - (returns.sum(0) - returns) / (len(returns) - 1) if baseline else returns
+ return returns - returns.mean(0) if baseline else returns

baseline-of-another-step: the mean over the steps of an episode depends on the actions
- return returns - (returns.sum(0) - returns) / (len(returns) - 1) if baseline else returns
+ return returns - returns.mean(1, keepdim=True) if baseline else returns

mean-over-steps: what a loss usually is; short episodes then count more for each step
- loss = -(mask * advantage * chosen).sum() / len(mask)
+ loss = -(mask * advantage * chosen).sum() / mask.sum()

entropy-of-the-padding: a metric alone
- entropy = -(log_probs.exp() * log_probs).sum(-1)[mask].mean()
+ entropy = -(log_probs.exp() * log_probs).sum(-1).mean()

normal-noise: Gumbel noise looks like any other
- noise = -torch.empty_like(logits).exponential_(generator=generator).log()
+ noise = torch.empty_like(logits).normal_(generator=generator)

last-observation-of-the-old-episode: the vector resets itself, and hands out both
- following, _, reward, _, _, ended
+ _, following, reward, _, _, ended

generator-not-restored:reinforce: weights and optimizer are what people think of (Stable-Baselines3#1526, open)
- optimizer=optimizer, generator=generator)
+ optimizer=optimizer)
"""
FLIP = dict(env_id="algos.her:BitFlip-v0", env_kwargs=("n=4",), num_episodes=16, total_timesteps=40_000, eval_every=0)

SPEC = Spec(
    "REINFORCE, Machine Learning 8 (1992)",
    "Control",
    small="--device cpu --total-timesteps 240 --num-episodes 3 --hidden-size 16 --eval-every 64 --eval-episodes 2 "
          "--save-every 32",
    tests="exact_reinforce parity_tianshou command_line_control resume_control wiring",
    curves={"reinforce-cartpole": Curve(
        dict(total_timesteps=40_000, eval_every=0), "return", numbers={"mean return": "plain"},
    )},
    effects={"reinforce-baseline": Effect(
        # every reward is negative: without a baseline every action becomes less likely
        {"baseline": ("reinforce", FLIP), "none": ("reinforce", FLIP | dict(baseline=False))},
        "late return", {"baseline > none + 0.8": 9},
    )},
    no_recipe="the paper has no table of settings",
    flags=dict(env_kwargs=("max_episode_steps=20",), total_timesteps=200, num_episodes=3, hidden_size=8,
               eval_every=0, eval_episodes=1, learning_rate=0.03),
    noise=HOP,
    walk=HOP["env_id"],
    special={"env_id": ({}, "environments:Hop-v0"), "baseline": ({}, False)},
)  # fmt: skip
