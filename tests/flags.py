"""What the specs share about flags: tests/test_flags.py changes one flag at a time, in a run of a fraction of a second.

SPECIAL: as in a spec, for flags that several scripts have.
"""

EXEMPT = {
    "device": "this machine has one",
    "threads": "results are equal at equal counts only",
    "output_dir": "a path",
    "save_every": "when the run is saved",
    "resume": "a path; tests of their own",
    "init": "a path; tests of its own",
    "track": "logging",
    "log_samples": "writes samples.jsonl; test_wiring.py reads it",
    "evaluate": "does not train; tests of its own",
    "capture_video": "goes with --evaluate",
    "trust_remote_code": "needs a model that brings code; tests of its own",
    "fsdp": "needs several processes; test_distributed.py shows that it acts",
    "sampler": "needs a server; test_engine.py shows that it acts",
}
DEFAULT = {  # flags whose None is not resolved in args -> what it stands for
    "epsilon_high": lambda args: args["epsilon"],
    "ratio_low": lambda args: {"cispo": 0.0, "gppo": 0.8}[args["bounds"]],
    "ratio_high": lambda args: {"cispo": 5.0, "gppo": 1.28}[args["bounds"]],
    "num_votes": lambda args: args["num_generations"],
    "teacher_beta_end": lambda args: args["teacher_beta"],
}
MEMORY = {  # flags that must leave results equal -> what shows that they act (tiny_runs.Counts)
    "micro_batch_size": "passes",
    "micro_batch_tokens": "passes",
    "sample_batch_size": "passes",
    "gradient_checkpointing": "recomputed",
    "compile": "compiled",
    "vector": "processes",
}

TRAINING = dict(
    model="@model", task="sort", max_steps=2, learning_rate=1e-2, lr_schedule="linear", weight_decay=0.1,
    max_grad_norm=0.05, eval_every=0, eval_prompts=2, micro_batch_size=4,
)  # fmt: skip
ANSWERS = dict(eval_samples=2, sample_batch_size=8)
PAIRS = TRAINING | ANSWERS | dict(num_pairs=12, batch_size=8, eval_max_new_tokens=2)
ONLINE = TRAINING | ANSWERS | dict(
    reward=("@rewards.py:graded",), num_prompts=2, num_generations=4, max_completion_length=6, num_iterations=2,
    beta=0.1, temperature=0.9,
)  # fmt: skip
PPO = dict(num_envs=2, num_minibatches=2, update_epochs=2, learning_rate=0.03, ent_coef=0.01, hidden_size=8,
           max_grad_norm=0.05, eval_every=0, eval_episodes=1)  # fmt: skip
OFFLINE = dict(dataset="@pendulum.hdf5", max_steps=8, log_every=4, batch_size=8, eval_every=0, eval_episodes=1)

JITTER = dict(model="@jitter", learning_rate=1e-3)
NOISY_REWARD = JITTER | dict(reward=("@rewards.py:noisy",))
# episodes end before the checkpoint: a resume that only replays the last one draws less
WALK = dict(env_id="environments:Walk-v0", env_kwargs=("label=noisy", "size=1"))
HOP = WALK | dict(env_id="environments:Hop-v0")  # the same with numbered actions

# the shipped model gives some right answers
RIGHT = dict(model="@tiny", max_steps=1, learning_rate=1e-5, eval_max_new_tokens=20)
SPECIAL = {
    "model": ({}, "@other"),
    "task": ({}, "countdown"),
    "prompt_column": ({"task": "@rows.jsonl"}, "question"),
    "reward": ({}, ("@rewards.py:sparse",)),
    "reward_weights": ({}, (0.5,)),
    "combine": ({"reward": ("@classifier", "@other-classifier")}, ["min", "mean-std"]),
    "epsilon_high": ({}, 0.01),
    "mask_truncated_completions": ({"max_completion_length": 16}, True),
    "lr_schedule": ({"max_steps": 3, "warmup_steps": 0}, ["constant", "cosine"]),  # of 2 steps linear and cosine agree
    "warmup_steps": ({}, 2),
    "lora_rank": ({}, 2),
    "lora_modules": ({"lora_rank": 2}, ("q_proj",)),
    "save_dtype": ({}, "bfloat16"),
    "attn_implementation": ({}, "eager"),
    "micro_batch_tokens": ({"micro_batch_size": 8}, 40),
    "max_length": ({}, 14),
    "system_prompt": ({"model": "@chat"}, "12"),
    "chat_template_kwargs": ({"model": "@chat"}, ("mark=7",)),
    "raw_prompt": ({"model": "@chat"}, True),
    "eos_token": ({"max_completion_length": 16}, "7"),
    "max_prompt_length": ({"task": "@lengths.jsonl"}, 4),
    "env_id": ({}, "environments:Walk-v0"),
    "env_kwargs": ({}, ("max_episode_steps=10",)),
    "dataset": ({}, "@other.hdf5"),
    "target_kl": ({}, 1e-9),
    "clip_vloss": ({"clip_coef": 0.01}, True),
    "gradient_checkpointing": ({"learning_rate": 1e-3}, True),
    "sample_batch_size": ({"temperature": 1e-3}, 2),  # so cold that the draws cannot differ
    "eval_prompts": (RIGHT | {"eval_prompts": 12}, 24),
    "eval_max_new_tokens": (RIGHT | {"eval_prompts": 8, "eval_max_new_tokens": 1}, 20),
    "weight_decay": ({}, 0.2),
}  # fmt: skip
