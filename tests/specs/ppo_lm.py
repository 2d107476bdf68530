"""PPO for language models: algos/ppo_lm.py."""

from tests.specs import Recipe, Spec
from tests.specs.grpo import SORT

BUGS = """
ratio-always-one:ppo_lm: right for one update epoch, and kept when there are more
- old_logps, valid = samples.logps[rows, :width], known[rows, :width]
+ old_logps, valid = logps.detach(), known[rows, :width]

reward-on-padding: the last column is the last token of the longest completion only (huggingface/trl#3750 and #5338)
- last = mask.sum(1, keepdim=True) - 1
+ last = torch.full_like(mask[:, :1], mask.shape[1] - 1, dtype=torch.long)

value-sees-its-token: the hidden state at a token knows the token, and is no baseline of it
- hidden[:, prompt_ids.shape[1] - 1 : -1]
+ hidden[:, prompt_ids.shape[1] :]

whitened-over-padding: mean and deviation of a padded tensor
- moments(values[mask])
+ moments(values)

returns-of-whitened-advantages: the critic's target is made after the advantages were normalised
- returns = advantage + batch.values
+ returns = whiten(advantage, known) + batch.values

learning-rates-swapped: two groups of parameters, in an order that is written down elsewhere
- set_rate(optimizer, step, args), critic_rate
+ critic_rate, set_rate(optimizer, step, args)

bootstrap-through-termination:ppo_lm: a value is put where there is none, to keep the shape
- torch.zeros_like(values[:, :1])], 1)
+ values[:, -1:]], 1)

minibatches-in-order:ppo_lm: nothing fails: minibatches are the same in every epoch
- torch.randperm(len(numbers), generator=generator)
+ torch.arange(len(numbers))

critic-not-restored: one of two models
- Trained(torch.nn.ModuleList([model, critic]), optimizer)
+ Trained(model, optimizer)
"""

SPEC = Spec(
    "PPO, arXiv 1909.08593",
    aliases=("RLHF",),
    tests="exact_ppo_lm exact_grpo parity_verl wiring",
    curves={"ppo_lm-sort": SORT.but(max_steps=8)},
    recipes=(
        Recipe(
            "1.5e-5", "arXiv 2009.01325, appendix B.1 (1.3B)", preset="full",
            paper=dict(learning_rate=1.5e-5, lr_schedule="linear", beta=0.05, gamma=1.0, gae_lambda=0.95,
                       num_prompts=512, num_generations=1, num_iterations=4, num_minibatches=1,
                       critic_learning_rate=1.5e-5, max_steps=1953, critic="separate"),
        ),
        Recipe(
            "Tulu-3-8B", "arXiv 2411.15124; allenai/open-instruct, docs/tulu3.md", preset="full",
            paper=dict(learning_rate=3e-7, beta=0.05, temperature=1.0, missing_eos_penalty=10.0, reward_weights=(10.0,),
                       num_prompts=224, num_generations=1, num_minibatches=1, max_completion_length=2048,
                       num_iterations=4, critic_learning_rate=3e-7, lr_schedule="linear", gamma=1.0, gae_lambda=0.95,
                       vf_coef=0.1, epsilon=0.2, max_steps=100_000 // 224),
        ),
    ),
    flags=dict(num_minibatches=2),
    special={"num_minibatches": ({}, 1), "clip_value": ({"clip_value": 0.01}, 0.005)},
)  # fmt: skip
