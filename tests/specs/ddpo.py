"""DDPO and LOOP: algos/ddpo.py."""

from tests.specs import Curve, Effect, Spec, parse_bugs

BUGS = """
time-grid-to-the-end: linspace holds both ends; steps are too long, and no plot shows it
- t = torch.full_like(normals[:, 0, 0], k / args.num_steps)
+ t = torch.full_like(normals[:, 0, 0], k / max(args.num_steps - 1, 1))

density-of-the-next-time: the time of a step is that of the point that it begins at
- t = torch.arange(args.num_steps, dtype=before.dtype, device=before.device) / args.num_steps
+ t = torch.arange(1, args.num_steps + 1, dtype=before.dtype, device=before.device) / args.num_steps

density-averaged-over-dimensions: as the authors' code has it; the ratio is another, and so is what the clip means
- .sum(1).view(len(before), args.num_steps)
+ .mean(1).view(len(before), args.num_steps)

prompts-of-other-chains: rows of chains and steps are flattened, so each prompt must be repeated K times in a row
- prompts = batch.prompts.repeat_interleave(args.num_steps)
+ prompts = batch.prompts.repeat(args.num_steps)

ratio-of-the-chain: one ratio for all steps; ReinFlow has it, DDPO does not
- ratio = log_ratio.exp()
-     clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
+ ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio).exp()
+     clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)

max-for-min:ddpo: the paper maximises a minimum, losses are minimised
- loss = -torch.min(ratio * advantages[:, None],
+ loss = -torch.max(ratio * advantages[:, None],

clip-without-min:ddpo: the clip also kills gradients that would bring the ratio back
- loss = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None]).sum(1)
+ loss = -(clipped * advantages[:, None]).sum(1)

mean-over-the-steps: of K steps the gradient is K times as small
- clipped * advantages[:, None]).sum(1).mean()
+ clipped * advantages[:, None]).mean()

old-density-of-the-last-epoch: the ratio is 1 in every epoch, and nothing is clipped
- loss, numbers = ddpo_loss(step_logps(model, batch, args), old_logps, scores, args.clip_coef)
+ loss, numbers = ddpo_loss(logps := step_logps(model, batch, args), logps.detach(), scores, args.clip_coef)

baseline-with-itself: the mean of the group holds the sample's own reward: (G-1) / G of the gradient
- others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
+ others = rewards.mean(1, keepdim=True)

deviation-of-the-sample:prompt: torch's default; NumPy's, which the authors use, is the population's
- (rewards.std(1, correction=0, keepdim=True) + 1e-6)
+ (rewards.std(1, keepdim=True) + 1e-6)

mean-of-the-batch-for-prompts: only the deviation is the prompt's
- return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1,
+ return (rewards - rewards.mean()) / (rewards.std(1,

groups-across-prompts: which of the two numbers comes first
- batch.rewards.view(-1, args.num_generations), args.advantage).flatten()
+ batch.rewards.view(args.num_generations, -1).T, args.advantage).T.flatten()

offset-of-each-row: an offset for each sample is noise, not a constant of the prompt
- batch.rewards + offsets[batch.prompts]
+ batch.rewards + offsets.repeat(len(batch.rewards) // MODES + 1)[: len(batch.rewards)]

line-from-data-to-noise: half of the field runs time the other way
- x = (1 - t[:, None]) * start + t[:, None] * data
+ x = t[:, None] * start + (1 - t[:, None]) * data

velocity-to-the-noise: the sign goes with the direction of time
- (model(x, t, prompts) - (data - start))
+ (model(x, t, prompts) - (start - data))

step-of-length-one: an Euler step is a K-th of the velocity
- Normal(x + model(x, t, prompts) / args.num_steps, args.noise)
+ Normal(x + model(x, t, prompts), args.noise)

variance-for-deviation:ddpo: at 1 nothing shows
- chain.append(step.mean + step.stddev * normals[:, k + 1])
+ chain.append(step.mean + step.variance * normals[:, k + 1])

same-noise-in-every-step: one draw for all steps; steps are then not independent
- step.stddev * normals[:, k + 1])
+ step.stddev * normals[:, 1])

reward-of-the-noise: chains begin with the noise and end with the sample
- reward(chains[:, -1].clone(), prompts.clone())
+ reward(chains[:, 0].clone(), prompts.clone())

the-user-s-function-writes-into-the-chain: a view of it is given away
- reward(chains[:, -1].clone(), prompts.clone())
+ reward(chains[:, -1], prompts.clone())

same-prompts-in-every-update: without the generator's device and state in `how` nothing is lost but variety
- prompts = torch.randint(MODES, (args.num_prompts,), **how)
+ prompts = (torch.arange(args.num_prompts, device=generator.device) % MODES)

generator-not-restored:ddpo: weights and optimizer are what people think of
- parts = dict(model=model, optimizer=optimizer, generator=generator)
-     if not run.restore(**parts):
+ parts = dict(model=model, optimizer=optimizer)
+     if not run.restore(**parts):

optimizer-not-restored:ddpo: the weights are back, the moments of Adam are not
- parts = dict(model=model, optimizer=optimizer, generator=generator)
-     if not run.restore(**parts):
+ parts = dict(model=model, generator=generator)
+     if not run.restore(**parts):

pretrained-on-one-mode: the number of a mode is drawn once for all points
- numbers = torch.randint(MODES, (count,), generator=generator, device=generator.device)
+ numbers = torch.randint(MODES, (1,), generator=generator, device=generator.device).expand(count)

gradients-never-cleared:ddpo: torch adds gradients up
-         optimizer.zero_grad(set_to_none=True)
-         loss.backward()
-         norms.append(
+         loss.backward()
+         norms.append(
"""

OFFSETS = {f"{kind}{name}": ("ddpo", dict(max_steps=80, advantage=kind, reward_offset=offset))
           for name, offset in {"": 0.0, "_offset": 5.0}.items() for kind in ("prompt", "loo", "batch")}  # fmt: skip

SPEC = Spec(
    "DDPO, arXiv 2305.13301; LOOP, arXiv 2503.00897",
    "Generators",
    small="--device cpu --max-steps 6 --pretrain-steps 20 --num-prompts 4 --num-generations 4 --hidden-size 16 "
          "--save-every 2",
    tests="exact_ddpo parity_ddpo wiring command_line::test_seen_before_the_run resume::test_killed_at_any_moment "
          "resume::test_signals load_elsewhere::test_a_saved_generator_draws_the_same_without_our_code",
    curves={"ddpo-ring": Curve(dict(max_steps=80), "reward", numbers={"mean reward": "plain"})},
    effects={
        "ddpo-ring": Effect(
            {"start": ("ddpo", dict(max_steps=1)), "idea": ("ddpo", dict(max_steps=80))},
            "last reward", {"start < 0.26": 5, "0.62 < idea < 0.8": 5}, seeds=5,
        ),
        "ddpo-ceiling": Effect(  # no policy gets above 1 / (1 + 4 sigma^2): the noise of the last step stays
            {"less": ("ddpo", dict(max_steps=200, noise=0.15)), "idea": ("ddpo", dict(max_steps=200)),
             "more": ("ddpo", dict(max_steps=200, noise=0.6))},
            "late reward",
            {"0.88 < less < 0.9174": 5, "0.69 < idea < 0.7353": 5, "0.37 < more < 0.4098": 5}, seeds=5,
        ),
        "ddpo-offset": Effect(  # without an offset, the control, all three learn
            OFFSETS, "late reward",
            {"abs(prompt_offset - prompt) < 0.001": 5, "abs(loo_offset - loo) < 0.001": 5, "batch_offset < 0.3": 5,
             "abs(batch - prompt) < 0.05": 5, "abs(loo - prompt) < 0.05": 5}, seeds=5,
        ),
    },
    no_recipe="the papers' tables are for Stable Diffusion",
    aliases=("diffusion RL", "flow RL"),
    flags=dict(max_steps=3, pretrain_steps=8, num_prompts=4, num_generations=4, hidden_size=8, learning_rate=0.05,
               clip_coef=0.05, update_epochs=3),
    special={"reward": ({}, "@rewards.py:far"), "reward_offset": ({"advantage": "batch"}, 3.0)},
    noise=dict(reward="@rewards.py:jittered"),
    bugs=parse_bugs(BUGS),
)  # fmt: skip
