"""Decision Transformer: algos/dt.py."""

from tests.flags import OFFLINE
from tests.specs import Curve, Recipe, Spec

BUGS = """
groups-interleaved:dt: repeat and repeat_interleave give the same shape
- batch.mask.repeat_interleave(3, 1)
+ batch.mask.repeat(1, 3)

mean-over-padding:dt: .mean() of a masked tensor divides by what is masked, too (tinkoff-ai/CORL#21)
- return (errors * batch.mask).sum() / batch.mask.sum()
+ return (errors * batch.mask).mean()

loss-on-padding: padding is zeros, which look harmless
- return (errors * batch.mask).sum() / batch.mask.sum()
+ return errors.mean()

padding-attended:dt: padding is zeros, which look harmless; their embeddings are not zero
- visible = causal & batch.mask.repeat_interleave(3, 1)[:, None, None]
+ visible = causal[None, None]

training-mode-lost:dt: eval() before an evaluation, and no train() after it
-     model.train()
-     return returns
+     return returns

dropout-in-evaluation:dt: no eval() before an evaluation
-     model.eval()
-     returns, *_ =
+     returns, *_ =

clipped-after-the-step:dt: two lines, in either order of which nothing fails
-     grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
-     optimizer.step()
+     optimizer.step()
+     grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)

returns-to-go-off-by-one: the reward of the step itself is left out
- [part[::-1].cumsum(dtype=np.float64)[::-1] for part in
+ [part[::-1].cumsum(dtype=np.float64)[::-1] - part for part in

returns-to-go-of-the-next-trajectory-too: one sum over all rows
- in np.split(rewards, starts[1:])]
+ in [rewards]]

return-to-go-never-falls: the target is taken for a constant of the episode
-         to_go = to_go - torch.from_numpy(rewards).to(to_go)
+         to_go = to_go * 1

time-counts-from-the-window: positions of ordinary transformers count from 0 in each window
- return Windows(obs, actions, rtg, data.timesteps[index] * mask, mask)
+ return Windows(obs, actions, rtg, position.clamp(min=0), mask)

time-counts-from-the-window:evaluation: positions of ordinary transformers count from 0 in each window
- seen.actions[:, -1] = time_step, True, 0
+ seen.actions[:, -1] = min(time_step, length - 1), True, 0

action-sees-itself:mask: a causal mask that is off by one shows the next token, which is the answer
- device=tokens.device).tril()
+ device=tokens.device).tril(1)

evaluated-on-raw-observations: training normalises in one place, evaluation in another
- (torch.from_numpy(obs.astype(np.float32)).to(device) - model.obs_mean) / model.obs_std
+ torch.from_numpy(obs.astype(np.float32)).to(device)

last-step-never-trained: lengths and last indices differ by one
- np.repeat(lengths, lengths) - timesteps)
+ np.repeat(lengths, lengths) - timesteps - 1)
"""

SPEC = Spec(
    "Decision Transformer, arXiv 2106.01345",
    "Offline",
    small="--device cpu --max-steps 160 --log-every 16 --eval-every 64 --eval-episodes 2 --save-every 32 "
          "--embed-dim 8 --num-layers 2 --num-heads 2 --context-length 4 --batch-size 4",
    tests="exact_dt parity_transformers properties::test_windows command_line_control resume_control wiring",
    known=True,
    curves={
        "dt-hopper-small": Curve(
            dict(max_steps=1200, context_length=3, batch_size=128, embed_dim=64, num_layers=2, learning_rate=0.002,
            dropout=0.0, warmup_steps=100, eval_every=200, eval_episodes=8, target_returns=(2400.0, 300.0)),
            "eval/slope", numbers={"mean eval/slope": "plain"},
        ),
        "dt-hopper": Curve(
            dict(max_steps=1200, context_length=3, batch_size=192, dropout=0.0, warmup_steps=100, eval_every=200,
            eval_episodes=8, target_returns=(2400.0, 300.0), precision="bfloat16"), "eval/slope",
            numbers={"mean eval/slope": "plain"}, slow=True,
        ),
        "dt-hopper-float32": Curve(
            dict(max_steps=1200, context_length=3, batch_size=192, dropout=0.0, warmup_steps=100, eval_every=200,
            eval_episodes=8, target_returns=(2400.0, 300.0)), "eval/slope",
            numbers={"mean eval/slope": "plain"}, slow=True,
        ),
    },
    recipes=(Recipe(
        "hopper_medium_replay", "arXiv 2106.01345, table 9",
        paper=dict(num_layers=3, num_heads=1, embed_dim=128, batch_size=64, context_length=20, dropout=0.1,
                   learning_rate=1e-4, max_grad_norm=0.25, weight_decay=1e-4, warmup_steps=100_000,
                   max_steps=100_000, target_returns=(3600.0, 1800.0), rtg_scale=1000.0),
        differs=dict(warmup_steps=(10_000, "table has 100,000")),
    ),),
    flags=OFFLINE | dict(embed_dim=8, num_layers=1, context_length=3, max_grad_norm=0.01, warmup_steps=4),
    noise=dict(dropout=0.5),
    special={"env_id": ({}, "Heavy-v0"), "target_returns": ({}, (-100.0, -200.0))},
)  # fmt: skip
