"""DDPG: algos/ddpg.py."""

from tests.specs import Curve, Recipe, Spec

BUGS = """
target-actor-forgotten: the online actor is at hand (SAC has no target actor)
- agent.target_critic(batch.next_obs, agent.target_actor(batch.next_obs))
+ agent.target_critic(batch.next_obs, agent.actor(batch.next_obs))

target-critic-forgotten: two networks of one kind
- agent.target_critic(batch.next_obs, agent.target_actor(batch.next_obs))
+ agent.critic(batch.next_obs, agent.target_actor(batch.next_obs))

actor-without-a-gradient: the action is detached, as in the target
- return -agent.critic(obs, agent.actor(obs)).mean()
+ return -agent.critic(obs, agent.actor(obs).detach()).mean() + 0 * agent.actor(obs).mean()

tanh-forgotten: networks end in a linear layer
- return self.net(obs).tanh()
+ return self.net(obs).clamp(-1, 1)

target-actor-stands-still: SAC has none, so the loop over targets is copied without it
- for lagging, network in ((agent.target_actor, agent.actor), (agent.target_critic, agent.critic)):
+ for lagging, network in ((agent.target_critic, agent.critic),):

targets-follow-at-once: tau is the share of the new in some papers and of the old in others
- torch._foreach_lerp_(list(lagging.parameters()), list(network.parameters()), args.tau)
+ torch._foreach_lerp_(list(lagging.parameters()), list(network.parameters()), 1 - args.tau)

noise-shared-by-all-environments: one draw is broadcast (CleanRL's td3_continuous_action.py)
- noise = torch.randn(actions.shape, generator=generator
+ noise = torch.randn(actions.shape[1], generator=generator

exploration-without-noise: the actor is deterministic, as in evaluation
- actions = act(agent.actor, obs, args.exploration_noise, generator)
+ actions = act(agent.actor, obs, 0.0, generator)
"""

AUTHORS = dict(learning_rate=3e-4, gamma=0.99, tau=0.005, batch_size=256, buffer_size=1_000_000, hidden_size=256,
               utd_ratio=1, learning_starts=25_000, total_timesteps=1_000_000, exploration_noise=0.1)  # fmt: skip
PENDULUM = dict(total_timesteps=6000, learning_starts=500, learning_rate=0.002, tau=0.01, batch_size=64,
                hidden_size=64, eval_every=1000)  # fmt: skip
HOPPER = dict(env_id="Hopper-v5", total_timesteps=300_000, learning_starts=25_000, learning_rate=3e-4,
              eval_every=10_000)  # fmt: skip

SPEC = Spec(
    "DDPG, arXiv 1509.02971",
    tests="exact_ddpg exact_sac parity_updates command_line_control resume_control wiring",
    curves={
        "ddpg-pendulum": Curve(PENDULUM, "eval/return",
                               numbers={"mean eval/return": "plain", "last eval/return": "plain"}),
        "ddpg-hopper-300k": Curve(HOPPER, "eval/return", numbers={}, slow=True),
    },
    recipes=(Recipe(
        "HalfCheetah-v5 --total-timesteps 1000000",
        "sfujim/TD3, OurDDPG.py and main.py (not the paper's table of settings)", paper=AUTHORS,
    ),),
)  # fmt: skip
