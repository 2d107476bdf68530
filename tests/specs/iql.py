"""IQL: algos/iql.py."""

from tests.specs import Curve, Recipe, Spec

BUGS = """
unknown-next-observation: D4RL's files lack the observation after a time-out, and the row after it is another
episode's
- rows, (factor, summand) = data.known, reward_map(
+ rows, (factor, summand) = np.ones_like(data.known), reward_map(

expectile-turned-round: the error may be target minus value or value minus target
- torch.where(errors > 0, expectile, 1 - expectile)
+ torch.where(errors < 0, expectile, 1 - expectile)

temperature-not-inverted: AWR divides by its temperature, IQL multiplies
- (temperature * advantages).exp()
+ (advantages / temperature).exp()

advantage-of-the-online-critics: the authors' policy leans on the target critics, which surprises (fql's IQL)
- q - values,
+ torch.min(*agent.critics(batch.obs, batch.actions)).detach() - values,

advantage-of-the-old-value: losses first, steps later: the authors' order is another (CORL's IQL)
-     descend(optimizers.value, value_loss(q - agent.value(batch.obs), args.expectile, args.value_loss))
-     with torch.no_grad():
-         values, next_values = agent.value(torch.cat([batch.obs, batch.next_obs])).chunk(2)
+     with torch.no_grad():
+         values, next_values = agent.value(torch.cat([batch.obs, batch.next_obs])).chunk(2)
+     descend(optimizers.value, value_loss(q - agent.value(batch.obs), args.expectile, args.value_loss))

online-rewards-as-they-are: rewards are treated where the dataset is read
- actions, factor * rewards[:, None] + summand,
+ actions, rewards[:, None],

return-range-without-the-thousand: a range that is divided by looks complete
- return 1000 / (returns.max() - returns.min()), 0.0
+ return 1 / (returns.max() - returns.min()), 0.0
"""

SPEC = Spec(
    "IQL, arXiv 2110.06169",
    tests="exact_iql parity_updates command_line_control resume_control wiring",
    known=True,
    curves={"iql-hopper": Curve(
        dict(max_steps=5000, hidden_size=128, batch_size=128, learning_rate=0.002, tau=0.02, eval_every=0,
        eval_episodes=20), "eval/return",
        numbers={"eval/return_stochastic": "log"},
    )},
    recipes=(
        Recipe(
            "hopper_medium_replay-v2.hdf5 --max-steps 1000000 --eval-every",
            "arXiv 2110.06169, appendix B", preset="mujoco",
            paper=dict(learning_rate=3e-4, batch_size=256, hidden_size=256, tau=0.005, gamma=0.99,
                       max_steps=1_000_000, expectile=0.7, temperature=3.0, anneal_actor=True),
        ),
        Recipe(
            "--domain antmaze", "arXiv 2110.06169, appendix B", preset="antmaze",
            paper=dict(learning_rate=3e-4, batch_size=256, hidden_size=256, expectile=0.9, temperature=10.0,
                       max_steps=1_000_000),
        ),
    ),
    special={"online_steps": ({}, 4)},
)  # fmt: skip
