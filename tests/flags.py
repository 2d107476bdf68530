"""For every script, settings of a run of a fraction of a second in which its flags act, and how a flag is changed that
cannot simply be another number or choice. tests/test_flags.py changes one flag at a time.

BASE: script -> settings; those that a script does not have are left out.
SPECIAL: flag -> (more settings, changed value, or a list of them); "script flag" goes before "flag".
NOISE: script -> more settings, in which Python's, NumPy's or torch's global generator acts.
Text that begins with @ is a path in the folder that tiny_runs.py fills.
"""

EXEMPT = {
    "device": "this machine has one",
    "threads": "results are equal at equal counts only",
    "output_dir": "a path",
    "save_every": "when the run is saved",
    "keep": "how many checkpoints stay",
    "resume": "a path; tests of their own",
    "track": "logging",
    "evaluate": "does not train; tests of its own",
    "capture_video": "goes with --evaluate",
    "trust_remote_code": "needs a model that brings code; tests of its own",
    "record_dataset": "a path; tests of its own",
    "record_steps": "size of what --record-dataset writes",
}
MEMORY = {  # flags that must leave results equal -> what shows that they act (tiny_runs.Counts)
    "micro_batch_size": "passes",
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
PAIRS = TRAINING | ANSWERS | dict(num_pairs=12, batch_size=8, eval_max_new_tokens=4)
ONLINE = TRAINING | ANSWERS | dict(
    reward=("@rewards.py:graded",), num_prompts=2, num_generations=4, max_completion_length=6, num_iterations=2,
    beta=0.1, temperature=0.9,
)  # fmt: skip
PPO = dict(num_envs=2, num_minibatches=2, update_epochs=2, learning_rate=0.03, ent_coef=0.01, hidden_size=8,
           max_grad_norm=0.05, eval_every=0, eval_episodes=1)  # fmt: skip
OFFLINE = dict(dataset="@pendulum.hdf5", max_steps=8, log_every=4, batch_size=8, eval_every=0, eval_episodes=1)
BASE = {
    "grpo": ONLINE,
    "rloo": ONLINE,
    "online_dpo": ONLINE,
    "ppo_lm": ONLINE | dict(num_minibatches=2),
    "dpo": PAIRS,
    "simpo": PAIRS,
    "orpo": PAIRS,
    "kto": PAIRS,
    "reward_model": TRAINING | dict(num_pairs=12, batch_size=8),
    "sft": PAIRS | dict(task=("sort",)),
    "ppo": PPO | dict(env_id="CartPole-v1", num_steps=8, total_timesteps=64),
    "ppo_atari": PPO
    | dict(
        env_id="NoisyPong-v0",
        env_kwargs=("max_num_frames_per_episode=80",),
        num_steps=4,
        total_timesteps=16,
        learning_rate=1e-3,
    ),
    "sac": dict(
        env_kwargs=("max_episode_steps=20",),
        num_envs=2,
        total_timesteps=48,
        learning_starts=16,
        batch_size=8,
        hidden_size=8,
        buffer_size=1000,
        log_every=16,
        eval_every=0,
        eval_episodes=1,
    ),  # fmt: skip
    "bc": OFFLINE | dict(hidden_size=8),
    "iql": OFFLINE | dict(hidden_size=8),
    "dt": OFFLINE | dict(embed_dim=8, num_layers=1, context_length=3, max_grad_norm=0.01, warmup_steps=4),
}

RIGHT = dict(model="@tiny", learning_rate=1e-5, eval_max_new_tokens=20)  # the shipped model gives some right answers
CLIPPED = dict(epsilon=0.02, num_prompts=4, num_iterations=3)  # ratios of whole answers: beyond the clip after one step
SPECIAL = {
    "model": ({}, "@other"),
    "task": ({}, "countdown"),
    "sft task": ({}, ("countdown",)),
    "prompt_column": ({"task": "@rows.jsonl"}, "question"),
    "sft prompt_column": ({"task": ("@rows.jsonl",)}, "question"),
    "reward": ({}, ("@rewards.py:sparse",)),
    "reward_weights": ({}, (0.5,)),
    "epsilon_high": ({}, 0.01),
    "mask_truncated_completions": ({"max_completion_length": 16}, True),
    "dynamic_sampling": ({"reward": ("@rewards.py:sparse",)}, True),
    "max_sampling_rounds": ({"reward": ("@rewards.py:sparse",), "dynamic_sampling": True}, 1),
    "lr_schedule": ({"max_steps": 3, "warmup_steps": 0}, ["constant", "cosine"]),  # of 2 steps linear and cosine agree
    "warmup_steps": ({}, 2),
    "lora_rank": ({}, 2),
    "max_length": ({}, 14),
    "use_margin": ({"task": "@margins.jsonl"}, True),
    "dpo loss": [({}, ["ipo", "hinge", "apo-zero", "apo-down", "sppo-hard", "dpop", "nca", "discopop"]),
                 ({"label_smoothing": 0.1}, ["robust", "exo"])],  # fmt: skip
    "dpop_lambda": ({"loss": "dpop"}, 20.0),
    "discopop_tau": ({"loss": "discopop"}, 0.1),
    "env_id": ({}, "environments:Walk-v0"),
    "ppo_atari env_id": ({}, "ALE/Breakout-v5"),
    "bc env_id": ({}, "Heavy-v0"),
    "iql env_id": ({}, "Heavy-v0"),
    "dt env_id": ({}, "Heavy-v0"),
    "env_kwargs": ({}, ("max_episode_steps=10",)),
    "ppo_atari env_kwargs": ({}, ("max_num_frames_per_episode=40",)),
    "dataset": ({}, "@other.hdf5"),
    "target_returns": ({}, (-100.0, -200.0)),
    "target_kl": ({}, 1e-9),
    "ppo_atari clip_coef": ({"clip_coef": 0.01}, 0.005),
    "rloo epsilon": (CLIPPED, 0.01),
    "rloo epsilon_high": (CLIPPED, 0.001),
    "ppo_atari vector": ({"env_id": "ALE/Pong-v5"}, "async"),  # processes have generators of their own
    "clip_vloss": ({"clip_coef": 0.01}, True),
    "log_std_init": ({"env_id": "environments:Walk-v0"}, -1.0),
    "alpha": ({}, 0.5),
    "buffer_size": ({}, 16),
    "online_steps": ({}, 4),
    "gradient_checkpointing": ({"learning_rate": 1e-3}, True),
    "sample_batch_size": ({"temperature": 1e-3}, 4),  # so cold that the draws cannot differ
    "eval_prompts": (RIGHT | {"eval_prompts": 4}, 8),
    "reward_model eval_prompts": ({}, 4),
    "eval_max_new_tokens": (RIGHT | {"eval_prompts": 8, "eval_max_new_tokens": 1}, 20),
    "ppo_lm num_minibatches": ({}, 1),
    "clip_value": ({"clip_value": 0.01}, 0.005),
    "weight_decay": ({}, 0.2),
}  # fmt: skip

JITTER = dict(model="@jitter", learning_rate=1e-3)
NOISY_REWARD = JITTER | dict(reward=("@rewards.py:noisy",))
# episodes end before the checkpoint: a resume that only replays the last one draws less
WALK = dict(env_id="environments:Walk-v0", env_kwargs=("label=noisy", "size=1"))
NOISE = {
    **dict.fromkeys(("grpo", "rloo", "online_dpo", "ppo_lm"), NOISY_REWARD),
    **dict.fromkeys(("dpo", "simpo", "orpo", "kto", "reward_model", "sft"), JITTER),
    **dict.fromkeys(("ppo", "sac"), WALK),
    "ppo_atari": dict(env_kwargs=("max_num_frames_per_episode=40",), total_timesteps=32),
    **dict.fromkeys(("bc", "iql", "dt"), dict(dropout=0.5)),
}
