"""Some of the bugs of tests/planted.py in Stable-Baselines3 2.9 and TRL 1.9, one at a time, under their own unit tests.

    git clone https://github.com/DLR-RM/stable-baselines3 SB3       (and check out the commit in the result)
    git clone --branch v1.9.0 https://github.com/huggingface/trl TRL
    python benchmarks/peer_bugs.py run --sb3 SB3     edits a copy in a temporary folder; 6 minutes of one core
    python benchmarks/peer_bugs.py run --trl TRL     the same; only the tests that need no network
    python benchmarks/peer_bugs.py show              bug by bug, beside ours of benchmarks/results/planted_bugs.json

How not to read the result: as a ranking. Those tests were written to find breakage, in a library of many algorithms and
environments, and not for this catalogue; ours were written with such mistakes in mind. The authors of SB3 also
benchmark learning curves by hand, which no row shows. We chose the bugs, before the first run, among those that
fit in the same form, so that the comparison is in our favour by construction. What it shows is which of these mistakes
unit tests of such a library catch, and which they let pass.

Before the bugs, the tests of each group run unedited, and those that pass are the ones that count. A bug is caught when
one of them fails within LIMIT seconds. It is unreached, and is not run, when none of them executes the statement that
it edits. Left out, to save time, are test files about other things than these algorithms' numbers (callbacks, logging,
saving, spaces, images, dictionaries), which could still fail. Entries without a counterpart are left out as well: the
loss of clipped values, for one, takes no maximum in SB3.

In SB3 all tests must pass unedited. tests/test_identity.py asks that an agent learns, at one seed;
at other seeds the unedited library, too, falls short of some of its thresholds, so that a bug that it catches may be
caught by chance; it counts.

Nearly all tests of TRL that train download tiny models and data sets from the hub. Here they cannot, and fail unedited;
TRL's own CI has the hub and runs them. So the rows of TRL are about the part of its tests that needs no hub, and say
nothing about TRL's tests as a whole: an unreached bug may well be caught there. Of its tests of CPO (SimPO), ORPO,
online DPO and XPO none passes without the hub, so nothing was planted in those. Some other tests fail here because they
need an accelerator or packages that are not installed. Each entry of the catalogue stands in one place, the counterpart
of the first of its files that has one.

benchmarks/results/peer_bugs.json and peer_bugs_trl.json are rewritten by each run.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from planted import BUGS, Edit  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
LIMIT = 180  # seconds of one edit
FILES = "gae identity distributions train_eval_mode deterministic run"
TESTS = {  # of each group: test files, and which of their tests, in pytest's words
    "ppo": (FILES, "PPO"),
    "rollout": (f"{FILES} buffers", "PPO or A2C or buffers"),
    "sac": (f"{FILES} n_step_replay vec_normalize", "SAC or n_critics or train_freq"),
    "density": (FILES, "SAC or n_critics or train_freq or distributions"),
    "replay": (f"{FILES} buffers n_step_replay vec_normalize", "SAC or n_critics or train_freq or buffers or n_step"),
    "statistics": ("vec_normalize buffers vec_envs", "normalize or buffers or (terminal_obs and not Subproc)"),
}
PPO, SAC = "ppo/ppo.py", "sac/sac.py"
ROLLOUT, BUFFERS, VECNORMALIZE = "common/on_policy_algorithm.py", "common/buffers.py", "common/vec_env/vec_normalize.py"
STEP = "                self.policy.optimizer.step()\n"
CLIP = "                th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)\n"
PAIRS = {  # by group: an entry of tests/planted.py by its name, and the peer's text; `why` says how the form differs
    "ppo": [
        Edit(
            "ratio-turned-round:ppo",
            (PPO,),
            "ratio = th.exp(log_prob - rollout_data.old_log_prob)",
            "ratio = th.exp(rollout_data.old_log_prob - log_prob)",
        ),
        Edit(
            "max-for-min:ppo",
            (PPO,),
            "-th.min(policy_loss_1, policy_loss_2).mean()",
            "-th.max(policy_loss_1, policy_loss_2).mean()",
        ),
        Edit(
            "clip-without-min:ppo",
            (PPO,),
            "-th.min(policy_loss_1, policy_loss_2).mean()",
            "-policy_loss_2.mean()",
        ),
        Edit(
            "not-centred:ppo",
            (PPO,),
            "(advantages - advantages.mean()) / (advantages.std() + 1e-8)",
            "advantages / (advantages.std() + 1e-8)",
        ),
        Edit("gradients-never-cleared:ppo", (PPO,), "                self.policy.optimizer.zero_grad()\n", ""),
        Edit("clipped-after-the-step:ppo", (PPO,), CLIP + STEP, STEP + CLIP),
        Edit(
            "entropy-is-a-penalty",
            (PPO,),
            "policy_loss + self.ent_coef * entropy_loss",
            "policy_loss - self.ent_coef * entropy_loss",
        ),
    ],
    "rollout": [
        Edit(
            "bootstrap-through-termination",
            (BUFFERS,),
            "self.gamma * next_values * next_non_terminal - self.values[step]",
            "self.gamma * next_values - self.values[step]",
            "truncated steps lose the mask too: this buffer has one flag for both ends",
        ),
        Edit(
            "recursion-not-cut",
            (BUFFERS,),
            "self.gae_lambda * next_non_terminal * last_gae_lam",
            "self.gae_lambda * last_gae_lam",
            "not cut at terminations either: this buffer has one flag for both ends",
        ),
        Edit(
            "no-bootstrap-at-truncation",
            (ROLLOUT,),
            "                    rewards[idx] += self.gamma * terminal_value\n",
            "",
            "the bootstrap is added to the reward, and here it is not",
        ),
        Edit(
            "next-observation-of-the-reset",
            (ROLLOUT,),
            'self.policy.obs_to_tensor(infos[idx]["terminal_observation"])[0]',
            "self.policy.obs_to_tensor(new_obs[idx])[0]",
        ),
    ],
    "sac": [
        Edit(
            "bootstrap-through-termination:sac",
            (SAC,),
            "(1 - replay_data.dones) * discounts * next_q_values",
            "discounts * next_q_values",
        ),
        Edit(
            "next-observation-of-the-reset:sac",
            ("common/off_policy_algorithm.py",),
            "            next_obs,  # type: ignore[arg-type]\n            buffer_action,\n",
            "            deepcopy(new_obs_),\n            buffer_action,\n",
        ),
        Edit(
            "max-of-the-twins",
            (SAC,),
            "next_q_values, _ = th.min(next_q_values, ",
            "next_q_values, _ = th.max(next_q_values, ",
        ),
        Edit(
            "entropy-left-out-of-the-target",
            (SAC,),
            "next_q_values - ent_coef * next_log_prob.reshape(-1, 1)",
            "next_q_values",
        ),
        Edit(
            "temperature-falls-when-it-should-rise",
            (SAC,),
            "ent_coef_loss = -(self.log_ent_coef * ",
            "ent_coef_loss = (self.log_ent_coef * ",
        ),
        Edit(
            "target-entropy-positive",
            (SAC,),
            "self.target_entropy = float(-np.prod(",
            "self.target_entropy = float(np.prod(",
        ),
        Edit(
            "target-critics-follow-at-once",
            (SAC,),
            "self.critic_target.parameters(), self.tau)",
            "self.critic_target.parameters(), 1 - self.tau)",
        ),
    ],
    "density": [
        Edit(
            "tanh-forgotten-in-the-density",
            ("common/distributions.py",),
            "        log_prob -= th.sum(th.log(1 - actions**2 + self.epsilon), dim=1)\n        return log_prob\n",
            "        return log_prob\n",
        ),
    ],
    "replay": [
        Edit(
            "rows-that-were-never-written",
            (BUFFERS,),
            "upper_bound = self.buffer_size if self.full else self.pos",
            "upper_bound = self.buffer_size",
        ),
    ],
    "statistics": [
        Edit(
            "variance-for-deviation:statistics",
            (VECNORMALIZE,),
            "(obs - obs_rms.mean) / np.sqrt(obs_rms.var + self.epsilon)",
            "(obs - obs_rms.mean) / (obs_rms.var + self.epsilon)",
        ),
        Edit(
            "rewards-centred",
            (VECNORMALIZE,),
            "np.clip(reward / np.sqrt(",
            "np.clip((reward - self.ret_rms.mean) / np.sqrt(",
        ),
        Edit("return-goes-on-after-the-end", (VECNORMALIZE,), "        self.returns[dones] = 0\n", ""),
        Edit(
            "variance-without-the-means",
            ("common/running_mean_std.py",),
            " + np.square(delta) * self.count * batch_count / (self.count + batch_count)",
            "",
        ),
        Edit(
            "evaluation-updates-the-statistics",
            (VECNORMALIZE,),
            "if self.training and self.norm_obs:",
            "if self.norm_obs:",
            count=2,
        ),
    ],
}

GRPO, RLOO, SFT, DPO, KTO, REWARD = (
    f"trainer/{name}_trainer.py" for name in ("grpo", "rloo", "sft", "dpo", "kto", "reward")
)
PPO_LM = "experimental/ppo/ppo_trainer.py"
UTILS, DATA = "trainer/utils.py", "data_utils.py"
CHOSEN = (
    "chosen_logits, _ = shift_logits.chunk(2, dim=0)\n"
    "                chosen_labels, _ = shift_labels.chunk(2, dim=0)\n"
    "                chosen_mask, _ = "
)
COMPLETION = (
    'per_token_logps[batch["completion_mask"][:, 1:] == 0] = 0.0\n        completion_logps = per_token_logps.sum(-1)'
)
TRL_TESTS = {
    "grpo": ("grpo_trainer", ""),
    "utils": ("utils", ""),
    "rloo": ("rloo_trainer", ""),
    "ppo_lm": ("experimental/ppo_trainer", ""),
    "sft": ("sft_trainer", ""),
    "dpo": ("dpo_trainer", ""),
    "kto": ("kto_trainer", ""),
    "reward_model": ("reward_trainer", ""),
    "data": ("data_utils", "Unpair or ExtractPrompt"),
}
TRL_PAIRS = {  # each entry once, in the counterpart of the first of its files that has one
    "grpo": [
        Edit(
            "ratio-turned-round",
            (GRPO,),
            "log_ratio = per_token_logps - old_per_token_logps",
            "log_ratio = old_per_token_logps - per_token_logps",
        ),
        Edit(
            "max-for-min",
            (GRPO,),
            "-torch.min(per_token_loss1, per_token_loss2)",
            "-torch.max(per_token_loss1, per_token_loss2)",
        ),
        Edit("clip-without-min", (GRPO,), "-torch.min(per_token_loss1, per_token_loss2)", "-per_token_loss2"),
        Edit(
            "clip-bounds-swapped",
            (GRPO,),
            "torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)",
            "torch.clamp(coef_1, 1 - self.epsilon_high, 1 + self.epsilon_low)",
        ),
        Edit(
            "ratio-always-one",
            (GRPO,),
            "per_token_logps.detach() if old_per_token_logps is None else old_per_token_logps",
            "per_token_logps.detach()",
        ),
        Edit(
            "k3-turned-round",
            (GRPO,),
            "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1",
            "torch.exp(per_token_logps - ref_per_token_logps) - (per_token_logps - ref_per_token_logps) - 1",
        ),
        Edit(
            "divergence-rewarded",
            (GRPO,),
            "per_token_loss + self.beta * per_token_kl",
            "per_token_loss - self.beta * per_token_kl",
        ),
        Edit(
            "reference-at-another-temperature",
            (GRPO,),
            "logits.div_(self.temperature)",
            "logits.div_(self.temperature if model is not self.ref_model else 1.0)",
            "one function reads the temperature for both models",
        ),
        Edit(
            "reference-is-the-policy",
            (GRPO,),
            "self.ref_model,\n                        prompt_completion_ids",
            "self.model,\n                        prompt_completion_ids",
        ),
        Edit("not-centred", (GRPO,), "advantages = rewards - mean_grouped_rewards", "advantages = rewards"),
        Edit(
            "baseline-of-the-batch",
            (GRPO,),
            "advantages = rewards - mean_grouped_rewards",
            "advantages = rewards - torch.nanmean(rewards)",
        ),
        Edit(
            "batch-scale-of-groups",
            (GRPO,),
            "std_rewards = nanstd(rewards).expand_as(rewards)\n",
            "std_rewards = nanstd(rewards - mean_grouped_rewards).expand_as(rewards)\n",
        ),
        Edit(
            "skipped-reward-is-zero",
            (GRPO,),
            "torch.nanmean(rewards.view(-1, num_generations), dim=1)",
            "rewards.nan_to_num(0.0).view(-1, num_generations).mean(dim=1)",
        ),
        Edit(
            "skipped-reward-is-zero:utils",
            (GRPO,),
            "            rewards[unscorable_mask] = torch.nan\n            mean_grouped_rewards",
            "            mean_grouped_rewards",
        ),
        Edit(
            "reward-weights-ignored",
            (GRPO,),
            "(rewards_per_func * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)",
            "rewards_per_func.nansum(dim=1)",
        ),
        Edit(
            "mean-over-padding",
            (GRPO,),
            "((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()",
            "(per_token_loss * mask).mean()",
        ),
        Edit(
            "length-bias-stays",
            (GRPO,),
            "(per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)",
            "((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()",
        ),
        Edit(
            "constant-is-the-longest",
            (GRPO,),
            "(per_token_loss.size(0) * self.max_completion_length)",
            "(per_token_loss.size(0) * mask.size(1))",
        ),
        Edit(
            "micro-batch-mean",
            (GRPO,),
            'normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
            "normalizer = mask.sum().clamp(min=1.0) * self.current_gradient_accumulation_steps",
        ),
        Edit(
            "truncated-are-trained",
            (GRPO,),
            "            completion_mask = completion_mask * (~is_truncated).unsqueeze(1).int()\n",
            "",
        ),
        Edit("temperature-in-sampling-only", (GRPO,), "            logits.div_(self.temperature)\n", ""),
        Edit("temperature-in-scoring-only", (GRPO,), '"temperature": self.temperature,', '"temperature": 1.0,'),
        Edit("temperature-multiplies", (GRPO,), "logits.div_(self.temperature)", "logits.mul_(self.temperature)"),
        Edit(
            "eos-not-trained",
            (GRPO,),
            "(sequence_indices <= eos_idx.unsqueeze(1))",
            "(sequence_indices < eos_idx.unsqueeze(1))",
        ),
        Edit(
            "trained-behind-eos",
            (GRPO,),
            "(sequence_indices <= eos_idx.unsqueeze(1))",
            "torch.ones_like(completion_ids)",
        ),
        Edit(
            "padding-by-id",
            (GRPO,),
            "completion_mask = [torch.ones_like(ids, dtype=torch.long) for ids in completion_ids]",
            "completion_mask = [(ids != self._tokenizer.pad_token_id).long() for ids in completion_ids]",
        ),
        Edit(
            "padding-attended",
            (GRPO,),
            '"attention_mask": attention_mask_batch}',
            '"attention_mask": torch.ones_like(attention_mask_batch)}',
        ),
        Edit(
            "shifted-by-one",
            (GRPO,),
            "logits = logits[:, :-1, :]  # (B, L-1, H)",
            "logits = logits[:, 1:, :]  # (B, L-1, H)",
        ),
        Edit("sampled-from-the-top", (GRPO,), '"top_k": self.top_k,', '"top_k": 3,'),
        Edit(
            "dropout-in-the-ratio",
            (GRPO,),
            "            disable_dropout_in_model(model)\n",
            "            pass\n",
            "an option here, and off unless asked for",
        ),
    ],
    "utils": [
        Edit("group-std-of-a-population", (UTILS,), "    variance *= correction  # Bessel's correction\n", ""),
        Edit(
            "groups-interleaved",
            (UTILS,),
            "for index in chunk:\n                    for _ in range(self.mini_repeat_count):\n",
            "for _ in range(self.mini_repeat_count):\n                    for index in chunk:\n",
        ),
    ],
    "rloo": [
        Edit(
            "ratio-of-mean-tokens",
            (RLOO,),
            "log_ratio = logps - old_logps",
            "log_ratio = (logps - old_logps) / completion_mask.size(1)",
        ),
        Edit(
            "divergence-rewarded:rloo",
            (RLOO,),
            "rewards = rewards - self.beta * kl",
            "rewards = rewards + self.beta * kl",
        ),
        Edit(
            "own-reward-in-the-baseline",
            (RLOO,),
            "(grouped_sum - grouped_rewards) / (scorable_counts - 1)",
            "torch.nanmean(grouped_rewards, dim=1, keepdim=True).repeat(1, num_generations)",
        ),
        Edit(
            "leave-one-out-over-all",
            (RLOO,),
            "(grouped_sum - grouped_rewards) / (scorable_counts - 1)",
            "(grouped_sum - grouped_rewards) / scorable_counts",
        ),
    ],
    "ppo_lm": [
        Edit(
            "ratio-always-one:ppo_lm",
            (PPO_LM,),
            "logprobs_diff = new_logprobs - mb_logprobs",
            "logprobs_diff = new_logprobs - new_logprobs.detach()",
        ),
        Edit(
            "divergence-rewarded:ppo_lm",
            (PPO_LM,),
            "non_score_reward = -args.kl_coef * kl",
            "non_score_reward = args.kl_coef * kl",
        ),
        Edit(
            "not-centred:ppo_lm",
            (PPO_LM,),
            "(values - mean) * torch.rsqrt(var + 1e-8)",
            "values * torch.rsqrt(var + 1e-8)",
        ),
        Edit(
            "whitened-over-padding",
            (PPO_LM,),
            "masked_mean(values, mask), masked_var(values, mask)",
            "values.mean(), values.var()",
        ),
        Edit(
            "returns-of-whitened-advantages",
            (PPO_LM,),
            "returns = advantages + values",
            "returns = masked_whiten(advantages, ~padding_mask) + values",
        ),
        Edit("reward-on-padding", (PPO_LM,), "rewards[actual_start, actual_end] += scores", "rewards[:, -1] += scores"),
        Edit(
            "value-sees-its-token",
            (PPO_LM,),
            "full_value[:, context_length - 1 : -1]",
            "full_value[:, context_length:]",
        ),
        Edit(
            "value-clip-takes-the-smaller",
            (PPO_LM,),
            "torch.max(vf_losses1, vf_losses2)",
            "torch.min(vf_losses1, vf_losses2)",
        ),
        Edit(
            "bootstrap-through-termination:ppo_lm",
            (PPO_LM,),
            "if t < gen_length - 1 else 0.0",
            "if t < gen_length - 1 else values[:, t]",
        ),
        Edit(
            "minibatches-in-order:ppo_lm",
            (PPO_LM,),
            "np.random.permutation(args.local_batch_size)",
            "np.arange(args.local_batch_size)",
        ),
        Edit(
            "gradients-never-cleared",
            (PPO_LM,),
            "                            optimizer.zero_grad()\n",
            "",
            "the other trainers leave it to transformers",
        ),
    ],
    "sft": [
        Edit(
            "mean-over-padding:sft",
            (SFT,),
            "loss = loss / n_valid_tensor",
            "loss = loss / valid.numel()",
            "in the chunked loss; the other one belongs to transformers",
        ),
        Edit(
            "micro-batch-mean:sft",
            (SFT,),
            "loss = loss / num_items_in_batch",
            "loss = loss / n_valid_tensor",
            "in the chunked loss; the other one belongs to transformers",
        ),
        Edit(
            "likelihood-minimised:sft",
            (SFT,),
            "loss = loss + chunk_loss",
            "loss = loss - chunk_loss",
            "in the chunked loss; the other one belongs to transformers",
        ),
        Edit(
            "eos-not-trained:sft",
            (SFT,),
            "[1] * (len(prompt_completion_ids) - len(prompt_ids))",
            "[1] * (len(prompt_completion_ids) - len(prompt_ids) - 1) + [0]",
        ),
    ],
    "dpo": [
        Edit(
            "labels-swapped",
            (DPO,),
            "delta_score = chosen_scores - rejected_scores",
            "delta_score = rejected_scores - chosen_scores",
        ),
        Edit(
            "beta-missing",
            (DPO,),
            "per_sequence_loss = -F.logsigmoid(self.beta * delta_score)",
            "per_sequence_loss = -F.logsigmoid(delta_score)",
        ),
        Edit("beta-missing:hinge", (DPO,), "torch.relu(1 - self.beta * delta_score)", "torch.relu(1 - delta_score)"),
        Edit(
            "sigmoid-without-log",
            (DPO,),
            "per_sequence_loss = -F.logsigmoid(self.beta * delta_score)",
            "per_sequence_loss = -torch.sigmoid(self.beta * delta_score)",
        ),
        Edit(
            "reference-forgotten",
            (DPO,),
            "chosen_logps - ref_chosen_logps\n        rejected_logratios = rejected_logps - ref_rejected_logps\n",
            "chosen_logps\n        rejected_logratios = rejected_logps\n",
        ),
        Edit(
            "mean-for-sum-of-log-probabilities",
            (DPO,),
            "            logps = per_token_logps.sum(dim=1)",
            "            logps = per_token_logps.sum(dim=1) / shift_completion_mask.sum(dim=1)",
        ),
        Edit("margin-of-ipo", (DPO,), "(ipo_delta - 1 / (2 * self.beta)) ** 2", "(ipo_delta - 1 / self.beta) ** 2"),
        Edit(
            "robust-is-conservative",
            (DPO,),
            "(clean_loss_term - flipped_loss_term)",
            "(clean_loss_term + flipped_loss_term)",
        ),
        Edit(
            "both-completions-down",
            (DPO,),
            "losses_chosen = 1 - torch.sigmoid(self.beta * chosen_logratios)",
            "losses_chosen = torch.sigmoid(self.beta * chosen_logratios)",
        ),
        Edit(
            "rejected-is-imitated",
            (DPO,),
            CHOSEN,
            CHOSEN.replace("chosen_logits, _", "_, chosen_logits")
            .replace("chosen_labels, _", "_, chosen_labels")
            .replace("chosen_mask, _", "_, chosen_mask"),
        ),
        Edit(
            "padding-by-id:dpo",
            (DPO,),
            '[1] * len(example["chosen_ids"]) for example in examples]',
            '[int(i != self.pad_token_id) for i in example["chosen_ids"]] for example in examples]',
            "of the chosen answers only",
        ),
    ],
    "kto": [
        Edit(
            "labels-swapped:kto",
            (KTO,),
            'output["label"] = torch.tensor([example["label"] for',
            'output["label"] = torch.tensor([not example["label"] for',
            count=2,
        ),
        Edit(
            "undesirable-is-learnt-too",
            (KTO,),
            "F.sigmoid(self.beta * (kl - rejected_logratios))",
            "F.sigmoid(self.beta * (rejected_logratios - kl))",
        ),
        Edit(
            "reference-point-subtracted-twice",
            (KTO,),
            "F.sigmoid(self.beta * (kl - rejected_logratios))",
            "F.sigmoid(self.beta * (-rejected_logratios - kl))",
        ),
        Edit(
            "reference-point-not-detached",
            (KTO,),
            "kl = (KL_logps - ref_KL_logps).mean().detach()",
            "kl = (KL_logps - ref_KL_logps).mean()",
            count=2,
        ),
        Edit(
            "reference-point-not-clamped",
            (KTO,),
            "gather_for_metrics(kl).mean().clamp(min=0)",
            "gather_for_metrics(kl).mean()",
            count=2,
        ),
        Edit(
            "reference-point-of-matched-pairs",
            (KTO,),
            '[examples["completion_ids"][-1]] + examples["completion_ids"][:-1]',
            'examples["completion_ids"]',
        ),
        Edit(
            "reference-is-the-policy:kto",
            (KTO,),
            "ref_outputs = self.ref_model(**ref_model_kwargs)",
            "ref_outputs = self.model(**ref_model_kwargs)",
        ),
        Edit(
            "reference-is-the-policy:mismatched",
            (KTO,),
            "self._compute_kl_logps(self.ref_model, batch)",
            "self._compute_kl_logps(self.model, batch)",
            count=2,
        ),
        Edit(
            "reference-forgotten:kto",
            (KTO,),
            "ref_completion_logps = ref_per_token_logps.sum(-1)",
            "ref_completion_logps = torch.zeros_like(completion_logps)",
        ),
        Edit(
            "weights-of-labels-swapped",
            (KTO,),
            "(self.desirable_weight * chosen_losses, self.undesirable_weight * rejected_losses)",
            "(self.undesirable_weight * chosen_losses, self.desirable_weight * rejected_losses)",
        ),
        Edit(
            "beta-missing:kto",
            (KTO,),
            "1 - F.sigmoid(self.beta * (chosen_logratios - kl))",
            "1 - F.sigmoid(chosen_logratios - kl)",
            "of the desirable answers only",
        ),
        Edit(
            "log-sigmoid-for-the-value",
            (KTO,),
            "1 - F.sigmoid(self.beta * (chosen_logratios - kl))",
            "-F.logsigmoid(self.beta * (chosen_logratios - kl))",
            "of the desirable answers only",
        ),
        Edit(
            "mean-for-sum-of-log-probabilities:kto",
            (KTO,),
            COMPLETION,
            COMPLETION + ' / batch["completion_mask"][:, 1:].sum(-1)',
            "not of the reference",
        ),
        Edit(
            "padding-by-id:preferences",
            (KTO,),
            "[0] * len(prompt_ids) + [1] * len(answer_ids)",
            "[0] * len(prompt_ids) + [int(i != self.pad_token_id) for i in answer_ids]",
        ),
    ],
    "reward_model": [
        Edit(
            "labels-swapped:reward_model",
            (REWARD,),
            "-nn.functional.logsigmoid(rewards_chosen - rewards_rejected).mean()",
            "-nn.functional.logsigmoid(rewards_rejected - rewards_chosen).mean()",
            "where no margin is given",
        ),
        Edit(
            "sigmoid-without-log:reward_model",
            (REWARD,),
            "-nn.functional.logsigmoid(rewards_chosen - rewards_rejected).mean()",
            "-nn.functional.sigmoid(rewards_chosen - rewards_rejected).mean()",
            "where no margin is given",
        ),
        Edit(
            "margin-of-the-wrong-sign",
            (REWARD,),
            'rewards_rejected - inputs["margin"]',
            'rewards_rejected + inputs["margin"]',
        ),
        Edit(
            "differences-centred",
            (REWARD,),
            "torch.mean((rewards_chosen + rewards_rejected) ** 2)",
            "torch.mean((rewards_chosen - rewards_rejected) ** 2)",
        ),
        Edit(
            "centring-rewarded",
            (REWARD,),
            "loss += self.args.center_rewards_coefficient",
            "loss -= self.args.center_rewards_coefficient",
        ),
        Edit(
            "groups-interleaved:reward_model",
            (REWARD,),
            "torch.chunk(outputs.logits.squeeze(-1), chunks=2)",
            "outputs.logits.squeeze(-1).view(-1, 2).unbind(1)",
        ),
        Edit(
            "padding-attended:reward_models",
            (REWARD,),
            "            attention_mask,\n            padding_value=0,",
            "            attention_mask,\n            padding_value=1,",
        ),
        Edit(
            "mask-of-the-other-side",
            (REWARD,),
            '            padding_value=self.pad_token_id,\n            padding_side="right",',
            '            padding_value=self.pad_token_id,\n            padding_side="left",',
        ),
    ],
    "data": [
        Edit(
            "labels-swapped:data",
            (DATA,),
            '"chosen": example["chosen"][idx:],\n        "rejected": example["rejected"][idx:],',
            '"chosen": example["rejected"][idx:],\n        "rejected": example["chosen"][idx:],',
        ),
        Edit(
            "labels-swapped:unpaired",
            (DATA,),
            "[True] * batch_size + [False] * batch_size",
            "[False] * batch_size + [True] * batch_size",
        ),
    ],
}


@dataclass(frozen=True)
class Peer:
    name: str
    package: str  # the folder with its sources
    tests: dict[str, tuple[str, str]]
    pairs: dict[str, list[Edit]]
    results: str
    offline: bool  # whether tests may fail unedited, for want of the hub


PEERS = {
    "sb3": Peer("SB3", "stable_baselines3", TESTS, PAIRS, "peer_bugs.json", offline=False),
    "trl": Peer("TRL", "trl", TRL_TESTS, TRL_PAIRS, "peer_bugs_trl.json", offline=True),
}
# conftest.py of TRL collects garbage after each test: what was imported need not be walked again each time
FREEZE = "\n\ndef pytest_collection_finish():\n    import gc\n\n    gc.freeze()\n"


def run_tests(copy: Path, chosen: list[str]) -> tuple[dict, list[str]]:
    """pytest with the arguments `chosen` in `copy`: how it ended, the first failure, the last line; what passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-o", "norecursedirs=",
               "-rfEp", *chosen]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0",
                        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(copy / "hub")}  # fmt: skip
    begun, used = time.time(), cpu_seconds()
    process = subprocess.Popen(command, cwd=copy, env=env, text=True, start_new_session=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT)
        outcome = {0: "passed", 1: "failed"}.get(process.returncode, "broken")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, outcome = process.communicate()[0], "late"
    failure = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
    if outcome == "failed" and failure is None:
        outcome = "broken"  # not a test that failed, but its set-up
    row = {"outcome": outcome} | ({"test": failure[1]} if failure else {})
    last = output.strip().splitlines()[-1] if output.strip() else ""
    seconds = {"seconds": round(time.time() - begun), "cpu_seconds": round(cpu_seconds() - used)}
    passed = re.findall(r"^PASSED (.+)$", output, re.MULTILINE)
    return row | seconds | {"pytest": re.sub(r" in .*", "", last)}, passed


def marked(text: str, edits: list[Edit], log: Path) -> str:
    """`text` with a line before each statement that an edit begins in, which appends the edit's name to `log`."""
    lines = text.splitlines(keepends=True)
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    marks = []
    for edit in edits:
        for found in re.finditer(re.escape(edit.old), text):
            line = text.count("\n", 0, found.end() - len(edit.old.lstrip())) + 1
            marks.append((max(s.lineno for s in statements if s.lineno <= line <= s.end_lineno), edit.name))
    for line, name in sorted(marks, reverse=True):
        indent = re.match(r" *", lines[line - 1])[0]
        lines.insert(line - 1, f"{indent}open({str(log)!r}, 'a').write({name + chr(10)!r})\n")
    return "".join(lines)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def installed_version(package: Path) -> str | None:
    """The release whose installed sources equal those of `package`; None where they differ or none is installed."""
    spec = importlib.util.find_spec(package.name)
    if spec is None:
        return None
    theirs, here = ({path.relative_to(folder): path.read_text() for path in folder.rglob("*.py")}
                    for folder in (package, Path(spec.origin).parent))  # fmt: skip
    return importlib.metadata.version(package.name.replace("_", "-")) if theirs == here else None


def plant(peer: Peer, clone: Path) -> None:
    """Plants every pair of `peer` into a copy of `clone` and writes what its tests say."""
    names = [edit.name for edits in peer.pairs.values() for edit in edits]
    if unknown := set(names) - {edit.name for edit in BUGS}:
        sys.exit(f"error: tests/planted.py has no entry {', '.join(sorted(unknown))}")
    if not (clone / peer.package).is_dir() or not (clone / "tests").is_dir():
        sys.exit(f"error: {clone} has no folders {peer.package} and tests; give a clone of the repository")
    commit, tag = (subprocess.run(["git", "-C", clone, *words], capture_output=True, text=True).stdout.strip()
                   for words in (("rev-parse", "HEAD"), ("describe", "--tags", "--exact-match")))  # fmt: skip
    unedited, bugs = {}, {}
    result = {"peer": peer.package, "commit": commit,
              "release": installed_version(clone / peer.package) or tag.removeprefix("v") or None,
              "unedited": unedited, "bugs": bugs}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / clone.name
        shutil.copytree(clone, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", "docs"))
        sources = {edit.files[0]: (copy / peer.package / edit.files[0]).read_text()
                   for edits in peer.pairs.values() for edit in edits}  # fmt: skip
        for edits in peer.pairs.values():
            for edit in edits:  # every text fits before any time is spent
                edit.apply(sources[edit.files[0]], edit.files[0])
        with (copy / "tests" / "conftest.py").open("a") as conftest:
            conftest.write(FREEZE)
        passing, log = {}, Path(folder) / "reached"
        log.touch()
        for group, (files, chosen) in peer.tests.items():
            paths = [str(Path("tests", name).with_name(f"test_{Path(name).name}.py")) for name in files.split()]
            row, passing[group] = run_tests(copy, paths + (["-k", chosen] if chosen else []))
            print(f"{row['outcome']:7} {row['cpu_seconds']:4d} s  unedited: {group}  {row['pytest']}", flush=True)
            if row["outcome"] not in ("passed", "failed") or row["outcome"] == "failed" and not peer.offline:
                sys.exit(f"error: the unedited copy does not pass: {row}")
            unedited[group] = {"files": files.split(), "chosen": chosen, "passing": len(passing[group])} | row
            if passing[group]:
                here = {edit.files[0] for edit in peer.pairs[group]}
                for file in here:
                    edits = [edit for edit in peer.pairs[group] if edit.files[0] == file]
                    (copy / peer.package / file).write_text(marked(sources[file], edits, log))
                row, _ = run_tests(copy, passing[group])
                if row["outcome"] != "passed":
                    sys.exit(f"error: the copy with marks does not pass: {row}")
                for file in here:
                    (copy / peer.package / file).write_text(sources[file])
        reached = set(log.read_text().split())
        for group, edits in peer.pairs.items():
            for edit in edits:
                row = {"outcome": "unreached", "cpu_seconds": 0}
                if edit.name in reached:
                    path = copy / peer.package / edit.files[0]
                    path.write_text(edit.apply(sources[edit.files[0]], edit.files[0]))
                    row, _ = run_tests(copy, ["-x", *passing[group]])
                    path.write_text(sources[edit.files[0]])
                bugs[edit.name] = {"file": edit.files[0], "old": edit.old, "new": edit.new, "form": edit.why,
                                   "tests": group} | row  # fmt: skip
                print(f"{row['outcome']:9} {row['cpu_seconds']:4d} s  {edit.name}  {row.get('test', '')}", flush=True)
                (RESULTS / peer.results).write_text(json.dumps(result, indent=1) + "\n")


def run(sb3: Path | None = None, trl: Path | None = None) -> None:
    """Plants the bugs into copies and writes what the peers' tests say.

    Args:
        sb3: a clone of the repository of Stable-Baselines3; it is not changed.
        trl: a clone of the repository of TRL; it is not changed.
    """
    if sb3 is None and trl is None:
        sys.exit("error: nothing to run; give --sb3 or --trl, a clone of that repository")
    for name, clone in (("sb3", sb3), ("trl", trl)):
        if clone is not None:
            plant(PEERS[name], clone.resolve())


def show() -> None:
    """Prints, bug by bug, whether our fast tests and the peers' unit tests catch it."""
    path = RESULTS / "planted_bugs.json"
    ours = json.loads(path.read_text())["bugs"] if path.exists() else {}
    words = {"failed": "caught", "passed": "missed"}
    for peer in PEERS.values():
        if not (RESULTS / peer.results).exists():
            continue
        result = json.loads((RESULTS / peer.results).read_text())
        bugs = result["bugs"]
        print(f"{peer.name} {result['release']}, commit {result['commit'][:8]}; bugs chosen by us: see --help")
        print(f"{'bug':42} {'plainrl':8} {peer.name:9} the test of {peer.name} that fails")
        for name, bug in bugs.items():
            own = ours.get(name, {"outcome": "not run"})["outcome"]
            theirs = words.get(bug["outcome"], bug["outcome"])
            print(f"{name:42} {words.get(own, own):8} {theirs:9} {bug.get('test', '')}")
        caught = [bug["outcome"] == "failed" for bug in bugs.values() if bug["outcome"] != "unreached"]
        print(f"{peer.name}'s tests catch {sum(caught)} of {len(caught)}")
        if unreached := len(bugs) - len(caught):
            print(f"and execute nothing of {unreached} more, without the hub, which {peer.name}'s own CI has")
        if here := [ours[name]["outcome"] == "failed" for name in bugs if name in ours]:
            print(f"plainrl's tests catch {sum(here)} of {len(here)} of them that have run\n")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "show": show}, description=__doc__)
