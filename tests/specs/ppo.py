"""PPO: algos/ppo.py."""

from tests.flags import PPO, WALK
from tests.specs import Curve, Recipe, Spec

BUGS = """
clip-without-min:ppo: clipping the ratio looks like all that the clip does; it also kills gradients that would bring
it back
- -torch.min(ratio * advantages, clipped * advantages)
+ -(clipped * advantages)

gradients-never-cleared:ppo: torch adds gradients up
-             optimizer.zero_grad(set_to_none=True)

schedule-off-by-one:ppo: iterations count from 1 here and from 0 there; the last iteration then has a rate of 0
- args.learning_rate * (1 - step / run.total)
+ args.learning_rate * (1 - (step + rollout) / run.total)

bootstrap-through-termination: the mask is forgotten: the end of an episode costs nothing
- next_values * ~terminated - values
+ next_values - values

no-bootstrap-at-truncation: one flag `done` of the old interface: time limits look like failures (vwxyzjn/cleanrl#198
(open since 2022); Stable-Baselines3#633 and #651, where it was mended)
- next_values * ~terminated - values
+ next_values * ~done - values

recursion-not-cut: truncation is mended in the bootstrap and in the recursion at once (Gymnasium's vector_a2c.py
tutorial masks terminated only)
- decay = gamma * gae_lambda * (~done).to(deltas)
+ decay = gamma * gae_lambda * (~terminated).to(deltas)

next-observation-of-the-reset: what a vector returns is the first observation of the next episode
(google-deepmind/mujoco_playground#305 and #320, google/brax#641: terminal observation discarded)
- next_obs[t] = statistics.observe(true_obs) if ended else current
+ next_obs[t] = current

minibatches-in-order: nothing fails: minibatches are of one moment, and the same in every epoch
- torch.randperm(len(rows[0]), generator=generator, device=rows[0].device)
+ torch.arange(len(rows[0]), device=rows[0].device)

clipped-action-trained: what is executed is stored, with the density of what was drawn
- return out + self.log_std.exp() * noise
+ return (out + self.log_std.exp() * noise).clamp(-1, 1)

variance-for-deviation: variances and deviations are both called sigma; at 1 nothing shows
- z = (actions - out) * (-self.log_std).exp()
+ z = (actions - out) * (-2 * self.log_std).exp()

rewards-centred: observations are; of rewards it changes the problem where episodes end early
- np.clip(rewards / np.sqrt(
+ np.clip((rewards - self.returns.mean) / np.sqrt(

return-goes-on-after-the-end: the running return that scales rewards is not reset (Farama-Foundation/Gymnasium#760,
#761, #1507: NormalizeReward never resets on truncation)
-         self.discounted = self.discounted * ~done

first-choice-for-all: written for one choice, and then put in a loop
- actions[..., i : i + 1].long()
+ actions[..., :1].long()

policy-head-of-gain-1: one gain for all layers: the first policies are far from uniform
- sum(self.parts), 0.01)
+ sum(self.parts), 1.0)

binary-actions-in-one-choice: a MultiBinary of n is n coins, not one of n
- self.parts = [2] * int(np.prod(space.shape))
+ self.parts = [int(np.prod(space.shape)) * 2]

evaluation-updates-the-statistics: wrappers that normalise go on counting unless they are told to stop
- statistics.observe(obs)).to(generator.device)
+ statistics.observe(obs, count=True)).to(generator.device)

evaluated-without-the-statistics: weights are saved, the statistics that they were trained with are not
(vwxyzjn/cleanrl#532, #425 and PR#556)
- score_saved(args, score_agent, agent=agent, statistics=statistics)
+ score_saved(args, score_agent, agent=agent)

generator-not-restored:ppo: weights and optimizer are what people think of (Stable-Baselines3#1526, open)
- statistics=statistics, generator=generator)
+ statistics=statistics)

statistics-not-restored: statistics are not parameters (vwxyzjn/cleanrl#532, #425; DLR-RM/rl-baselines3-zoo#278)
- statistics=statistics, generator=generator)
+ generator=generator)
"""
DOORKEY = dict(env_id="algos.environments.minigrid:Grid-v0", env_kwargs=("name=MiniGrid-DoorKey-5x5-v0",),
               total_timesteps=199_680, eval_every=39_936)  # fmt: skip

SPEC = Spec(
    "PPO, arXiv 1707.06347",
    "Control",
    small="--device cpu --num-envs 2 --num-steps 16 --total-timesteps 160 --num-minibatches 2 --update-epochs 2 "
          "--eval-every 64 --eval-episodes 2 --save-every 32",
    tests="exact_ppo parity_sb3 command_line_control envs resume_control wiring",
    known=True,
    curves={
        "ppo-cartpole": Curve(
            dict(total_timesteps=24_576, eval_every=4096), "eval/return",
            numbers={"mean eval/return": "plain"},
        ),
        "ppo-pendulum": Curve(
            dict(env_id="Pendulum-v1", total_timesteps=61_440, num_envs=8, num_steps=256, learning_rate=0.001,
            gamma=0.9, eval_every=12_288), "eval/return",
            numbers={"mean eval/return": "plain", "last eval/return": "plain"},
        ),
        "ppo-halfcheetah": Curve(
            dict(env_id="HalfCheetah-v5", total_timesteps=204_800, eval_every=40_960), "eval/return",
            numbers={"eval/return_stochastic": "log"}, slow=True,
        ),
        "ppo-halfcheetah-tuned": Curve(
            dict(env_id="HalfCheetah-v5", total_timesteps=1_000_000, num_envs=1, num_steps=512, num_minibatches=8,
            update_epochs=20, gamma=0.98, gae_lambda=0.92, clip_coef=0.1, learning_rate=2.0633e-05, anneal_lr=False,
            log_std_init=-2.0, hidden_size=256, max_grad_norm=0.8, vf_coef=0.58, ent_coef=0.0004,
            eval_every=100_000), "eval/return",
            numbers={"mean eval/return": "plain", "last eval/return": "plain"}, slow=True,
        ),
        **{
            f"ppo-{task.lower()}-1m": Curve(  # 1M steps, the default; benchmarks/published.py
                dict(env_id=f"{task}-v5", clip_vloss=True, eval_every=0), "return",
                numbers={"late return": "log"}, slow=True,
            )
            for task in ("HalfCheetah", "Hopper", "InvertedDoublePendulum", "Swimmer", "Walker2d")
        },
        "ppo-lunarlander": Curve(  # RL Baselines3 Zoo's settings
            dict(env_id="LunarLander-v3", total_timesteps=999_424, num_envs=16, num_steps=1024, num_minibatches=256,
            update_epochs=4, learning_rate=3e-4, gamma=0.999, gae_lambda=0.98, ent_coef=0.01, eval_every=50_000),
            "eval/return", numbers={}, slow=True,
        ),
        "ppo-doorkey": Curve(
            DOORKEY | dict(num_envs=8, num_steps=128, num_minibatches=16, update_epochs=10, learning_rate=2.5e-4),
            "eval/return", numbers={}, slow=True,
        ),
        "ppo-hopper": Curve(
            dict(env_id="Hopper-v5", total_timesteps=204_800, eval_every=40_960), "eval/return",
            numbers={"eval/return_stochastic": "log"}, slow=True,
        ),
    },
    recipes=(
        Recipe(
            "HalfCheetah-v5  ", "arXiv 1707.06347, table 3", preset="continuous",
            paper=dict(num_steps=2048, learning_rate=3e-4, update_epochs=10, num_minibatches=2048 // 64,
                       gamma=0.99, gae_lambda=0.95, clip_coef=0.2, total_timesteps=1_000_000, num_envs=1,
                       hidden_size=64, anneal_lr=False, normalize=False, normalize_advantages=False,
                       clip_vloss=False, ent_coef=0.0),
            differs=dict(anneal_lr=(True, "(table 3), annealed"), normalize=(True,
                         "Observations and rewards are normalised by running statistics"), normalize_advantages=(True,
                         "per minibatch, as CleanRL and SB3; the paper does not")),
        ),
        Recipe(
            "--num-steps 512", "RL Baselines3 Zoo, hyperparams/ppo.yml, HalfCheetah", preset="continuous",
            paper=dict(total_timesteps=1_000_000, num_envs=1, num_steps=512, num_minibatches=512 // 64,
                       update_epochs=20, gamma=0.98, gae_lambda=0.92, clip_coef=0.1, learning_rate=2.0633e-5,
                       ent_coef=0.000401762, vf_coef=0.58096, max_grad_norm=0.8, log_std_init=-2.0,
                       hidden_size=256, anneal_lr=False, normalize=True),
            differs=dict(ent_coef=(0.0004, "RL Baselines3 Zoo's"),  # rounded; the others are not arguments
                   vf_coef=(0.58, "half the value loss, which SB3 does not halve"),
                   hidden_size=(256, "tanh for its ReLU, orthogonal weights for its ortho_init=False")),
        ),
    ),
    flags=PPO | dict(env_id="CartPole-v1", num_steps=8, total_timesteps=64), noise=WALK,
    special={"log_std_init": ({"env_id": "environments:Walk-v0"}, -1.0), "vector": ({}, "async"),
             "learning_rate": [({}, 7e-4), ({"anneal_lr": False}, 7e-4)]},
)  # fmt: skip
