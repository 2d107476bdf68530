"""RND: algos/rnd.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
bonus-of-what-was-left: the batch's observations are at hand, the next ones are the point
- agent.novelty(torch.from_numpy(next_obs)
+ agent.novelty(torch.from_numpy(seen)

bonus-ends-with-the-episode: both streams go through one function, with the same ends
- following, never, never,
+ following, batch.terminated, done,

bonus-recursion-is-cut: the bootstrap is mended and the recursion is not
- following, never, never,
+ following, never, done,

bonus-goes-on-from-the-last-observation: what follows an end is another episode's observation
- following = torch.cat([values[1:, :, 1], agent.value(batch.last_obs)[None, :, 1]])
+ following = agent.value(batch.next_obs)[..., 1]

rollout-ends-where-it-began: the next observation of the last step is not in the batch's observations
- agent.value(batch.last_obs)[None, :, 1]
+ values[-1:, :, 1]

targets-exchanged: the order of two streams is written down in two places
- torch.stack([extrinsic, intrinsic], -1)
+ torch.stack([intrinsic, extrinsic], -1)

weights-exchanged: CleanRL's docstrings of the two are
- args.ext_coef * extrinsic + args.int_coef * intrinsic
+ args.int_coef * extrinsic + args.ext_coef * intrinsic

divided-by-the-deviation-of-the-bonus: not of its discounted sums
- self.returns.update(sums.flatten())
+ self.returns.update(novelty.flatten())

bonus-centred: statistics have a mean, too
- return novelty / np.sqrt(
+ return (novelty - self.returns.mean) / np.sqrt(

sums-begin-anew: the filter is made where it is used
-         sums = np.empty(novelty.shape)
+         sums, self.discounted = np.empty(novelty.shape), np.zeros(novelty.shape[1])

target-knows: two networks, and one is called twice
- (self.predictor(obs) - self.target(obs)) ** 2
+ (self.predictor(obs) - self.predictor(obs.flip(-1))) ** 2

novelty-not-clipped: the policy's clip at 10 looks like the clip
-         obs = obs.clamp(-CLIP_NOVELTY, CLIP_NOVELTY)

all-rows-teach: the mask is drawn and not used
- (novelty * chosen).sum() / chosen.sum().clamp(min=1)
+ novelty.mean()

mean-over-rows-that-do-not-teach: a mean is taken where a masked mean is due
- (novelty * chosen).sum() / chosen.sum().clamp(min=1)
+ (novelty * chosen).mean()

value-of-the-bonus-does-not-learn: the mean of two losses becomes one of them
- 0.5 * errors.sum(-1).mean()
+ 0.5 * errors[..., 0].mean()
"""

SEA = dict(env_id="DeepSea-v0", total_timesteps=65_536, num_envs=16, num_steps=64, num_minibatches=4, update_epochs=4,
           learning_rate=1e-3, ent_coef=0.01, eval_every=0)  # fmt: skip

SPEC = Spec(
    "RND, arXiv 1810.12894",
    tests="exact_rnd parity_cleanrl_rnd environments resume_control wiring "
          "command_line_control::test_evaluate_gives_the_last_row",
    no_recipe="the paper's experiments are of Atari's frames, and rnd.py takes vectors",
    curves={"rnd-deepsea": Curve(
        dict(total_timesteps=49_152, eval_every=4096), "eval/return", numbers={"mean eval/return": "plain"},
    )},
    effects={"rnd-deepsea": Effect(
        dict(rnd=("rnd", SEA), ppo=("ppo", SEA | dict(env_id="algos.rnd:DeepSea-v0")),
             control=("rnd", SEA | dict(update_proportion=0.0))),
        "last eval/return_stochastic",
        claims={"rnd > 0.9": 9, "ppo < 0.05": 9, "control < 0.05": 9},
    )},
)  # fmt: skip
