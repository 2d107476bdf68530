"""GRPO with an environment: algos/grpo_multiturn.py."""

from tests.specs import Curve, Effect, Spec

BUGS = """
observations-are-trained: one mask serves attention and loss (IGPO's code; no curve shows it)
- mask, longest = own,
+ mask, longest = samples.completion_mask,

observations-in-the-denominator: the loss has its mask, its weights have the other one
- token_weights(mask[within], args.aggregation, longest)
+ token_weights(samples.completion_mask[within], args.aggregation, longest)

own-shifted-by-one: a mask of positions is applied to what predicts them (RAGEN's ctx_manager)
- return Episodes(samples, padded(own, torch.bool),
+ return Episodes(samples, padded(own, torch.bool).roll(1, 1) & mask,

turns-encoded-again: text is what environments, logs and templates speak (Search-R1's generation.py; trl#5224)
-             ids[i] += tokens
+             ids[i] += tokenizer(tokenizer.decode(tokens), add_special_tokens=False)["input_ids"]

the-turn-that-is-kept-is-not-cut: what was sampled behind a stop string was sampled, after all
- tokens, whole[i] = tokens[: stopped or len(tokens)],
+ tokens, whole[i] = tokens,

eos-of-the-turn-dropped: the harness ends turns, so the policy's own end looks like a duplicate
- texts[i] = tokenizer.decode([token for token in tokens if token not in hidden])
+ own[i][-1] = False
+             texts[i] = tokenizer.decode([token for token in tokens if token not in hidden])

last-turn-s-reward-only: the reward of an outcome is that of the last turn
- rewards[i] += step.reward
+ rewards[i] = step.reward

answers-of-other-episodes: rows of a batch are counted from 0, and those that ended have left it
- contexts = [prompts[i // num_samples] + ids[i] for i in alive]
+ contexts = [prompts[row // num_samples] + ids[i] for row, i in enumerate(alive)]

turns-draw-the-same-numbers: the stream is that of the step
- *[turn] * (turn > 0), eos=ends)
+ eos=ends)

cut-turns-are-whole: a turn that the environment could read looks finished
- elif not whole[i]:
+ elif not whole[i] and not step.done:

groups-with-different-games: each episode has a seed of its own (RAGEN seeds by group)
- game.reset(rows[i // num_samples], seeds[i // num_samples])
+ game.reset(rows[i // num_samples], seeds[i // num_samples] + i)

hung-calls-go-on: a thread that wakes up goes on with its list
-             if left_behind.is_set():
+             if False:
"""
# success that no policy without observations passes, and three standard errors of 10 digits with 64 samples each
BOUND = "0.40 + 3 * (0.40 * 0.60 / 640) ** 0.5"
GUESS = dict(eval_every=0, eval_samples=64)

SPEC = Spec(
    "GRPO with an environment in the loop",
    "Language models: environments",
    small="--device cpu --num-prompts 4 --num-generations 4 --max-steps 6 --eval-prompts 4 --eval-every 2 "
          "--save-every 2",
    tests="exact_multiturn exact_grpo parity_trl_variants wiring",
    curves={"grpo_multiturn-guess": Curve(dict(GUESS), "reward", numbers={"eval/pass@1": "share"})},
    effects={
        # over the 30 seeds the mean of guess must be at least 0.75, too
        "grpo_multiturn-observations": Effect(
            {"guess": ("grpo_multiturn", GUESS),
             "blank": ("grpo_multiturn", GUESS | dict(blank_observations=True))},
            "last eval/pass@1", {"guess > 0.55": 28, f"blank < {BOUND}": 30}, seeds=30,
        ),
    },
    no_recipe="Search-R1 and ReTool are recipes of an environment: their search engine and interpreter are not shipped",
    flags=dict(environment="@turns.py:Graded", max_turns=2, max_completion_length=3),
    special={
        "task": ({}, "countdown"),
        "environment": ({"task": "countdown"}, "calculator"),
        "environment_seconds": ({"environment": "@turns.py:Slow"}, 1e-3),
        "max_turns": ({}, 1),
        "max_total_length": ({"stop": tuple("0123456789")}, 13),
        "stop": ({}, ("1",)),
        "blank_observations": ({}, True),
    },
)  # fmt: skip
