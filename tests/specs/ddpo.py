"""DDPO and LOOP: algos/ddpo.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
time-grid-to-the-end: linspace holds both ends; steps are too long, and no plot shows it
- t = torch.full_like(normals[:, 0, 0], k / args.num_steps)
+ t = torch.full_like(normals[:, 0, 0], k / max(args.num_steps - 1, 1))

clip-without-min:ddpo: the clip also kills gradients that would bring the ratio back
- loss = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None]).sum(1)
+ loss = -(clipped * advantages[:, None]).sum(1)

old-density-of-the-last-epoch: the ratio is 1 in every epoch, and nothing is clipped
- loss, numbers = ddpo_loss(step_logps(model, batch, args), old_logps, scores, args.clip_coef)
+ loss, numbers = ddpo_loss(logps := step_logps(model, batch, args), logps.detach(), scores, args.clip_coef)

baseline-with-itself: the mean of the group holds the sample's own reward: (G-1) / G of the gradient
- others = (rewards.sum(1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
+ others = rewards.mean(1, keepdim=True)

groups-across-prompts: which of the two numbers comes first
- batch.rewards.view(-1, args.num_generations), args.advantage).flatten()
+ batch.rewards.view(args.num_generations, -1).T, args.advantage).T.flatten()

offset-of-each-row: an offset for each sample is noise, not a constant of the prompt
- batch.rewards + offsets[batch.prompts]
+ batch.rewards + offsets.repeat(len(batch.rewards) // MODES + 1)[: len(batch.rewards)]
"""

OFFSETS = {f"{kind}{name}": ("ddpo", dict(max_steps=80, advantage=kind, reward_offset=offset))
           for name, offset in {"": 0.0, "_offset": 5.0}.items() for kind in ("prompt", "loo", "batch")}  # fmt: skip

SPEC = Spec(
    "DDPO, arXiv 2305.13301; LOOP, arXiv 2503.00897",
    "Generators",
    small="--device cpu --max-steps 6 --pretrain-steps 20 --num-prompts 4 --hidden-size 16 --save-every 2",
    tests="exact_ddpo parity_ddpo wiring command_line::test_seen_before_the_run resume::test_killed_at_any_moment "
          "resume::test_signals load_elsewhere::test_a_saved_generator_draws_the_same_without_our_code",
    curves={"ddpo-ring": Curve(dict(max_steps=80), "reward", numbers={"mean reward": "plain"})},
    effects={
        "ddpo-ring": Effect(
            {"start": ("ddpo", dict(max_steps=1)), "idea": ("ddpo", dict(max_steps=80))}, "last reward",
            {"start < 0.26": 5, "0.62 < idea < 0.8": 5}, seeds=5),
        "ddpo-ceiling": Effect(  # no policy gets above 1 / (1 + 4 sigma^2): the noise of the last step stays
            {"less": ("ddpo", dict(max_steps=200, noise=0.15)), "idea": ("ddpo", dict(max_steps=200)),
             "more": ("ddpo", dict(max_steps=200, noise=0.6))}, "late reward",
            {"0.88 < less < 0.9174": 5, "0.69 < idea < 0.7353": 5, "0.37 < more < 0.4098": 5}, seeds=5),
        "ddpo-offset": Effect(  # without an offset, the control, all three learn
            OFFSETS, "late reward",
            {"abs(prompt_offset - prompt) < 0.001": 5, "abs(loo_offset - loo) < 0.001": 5, "batch_offset < 0.3": 5,
             "abs(batch - prompt) < 0.05": 5, "abs(loo - prompt) < 0.05": 5}, seeds=5),
    },
    no_recipe="the papers' tables are for Stable Diffusion",
    flags=dict(max_steps=3, pretrain_steps=8, hidden_size=8, learning_rate=0.05, clip_coef=0.05, update_epochs=3),
    special={"reward": ({}, "@rewards.py:jittered"), "reward_offset": ({"advantage": "batch"}, 3.0)},
    noise=dict(reward="@rewards.py:jittered"),
)  # fmt: skip
