"""Some of the bugs of tests/planted.py in Stable-Baselines3 2.9, one at a time, under its own unit tests.

    git clone https://github.com/DLR-RM/stable-baselines3 SB3       (and check out the commit in the result)
    python benchmarks/peer_bugs.py run --sb3 SB3     edits a copy in a temporary folder; 6 minutes of one core
    python benchmarks/peer_bugs.py show              bug by bug, beside ours of benchmarks/results/planted_bugs.json

How not to read the result: as a ranking. Those tests were written to find breakage, in a library of many algorithms and
environments, and not for this catalogue; ours were written with such mistakes in mind. The authors of the library also
benchmark learning curves by hand, which no row shows. We chose the bugs, before the first run, among those that
fit in the same form, so that the comparison is in our favour by construction. What it shows is which of these mistakes
unit tests of such a library catch, and which they let pass.

Before the bugs, the tests of each group pass unedited. A bug is caught when one of its group's tests fails within LIMIT
seconds. Left out, to save time, are test files about other things than these algorithms' numbers (callbacks, logging,
saving, spaces, images, dictionaries), which could still fail. Entries without a counterpart are left out as well: the
loss of clipped values, for one, takes no maximum there. tests/test_identity.py asks that an agent learns, at one seed;
at other seeds the unedited library, too, falls short of some of its thresholds, so that a bug that it catches may be
caught by chance; it counts. benchmarks/results/peer_bugs.json is rewritten by each run.
"""

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


def run_tests(copy: Path, group: str) -> dict:
    """The group's tests in `copy`, until the first failure: how they ended, which failed, and pytest's last line."""
    names, chosen = TESTS[group]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", chosen]
    command += [f"tests/test_{name}.py" for name in names.split()]
    env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0",
                        "OMP_NUM_THREADS": "1"}  # fmt: skip
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
    return row | seconds | {"pytest": re.sub(r" in .*", "", last)}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def installed_version(package: Path) -> str | None:
    """The release whose installed sources equal those of `package`; None where they differ or none is installed."""
    spec = importlib.util.find_spec("stable_baselines3")
    if spec is None:
        return None
    theirs, here = ({path.relative_to(folder): path.read_text() for path in folder.rglob("*.py")}
                    for folder in (package, Path(spec.origin).parent))  # fmt: skip
    return importlib.metadata.version("stable-baselines3") if theirs == here else None


def run(sb3: Path) -> None:
    """Plants every pair into a copy and writes what its tests say.

    Args:
        sb3: a clone of the repository of Stable-Baselines3; it is not changed.
    """
    names = [edit.name for edits in PAIRS.values() for edit in edits]
    if unknown := set(names) - {edit.name for edit in BUGS}:
        sys.exit(f"error: tests/planted.py has no entry {', '.join(sorted(unknown))}")
    if not (sb3 / "stable_baselines3").is_dir() or not (sb3 / "tests").is_dir():
        sys.exit(f"error: {sb3} has no folders stable_baselines3 and tests; give a clone of the repository")
    commit = subprocess.run(["git", "-C", sb3, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    unedited, bugs = {}, {}
    result = {"peer": "stable_baselines3", "commit": commit,
              "release": installed_version(sb3 / "stable_baselines3"), "unedited": unedited, "bugs": bugs}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "sb3"
        shutil.copytree(sb3, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", "docs"))
        for edits in PAIRS.values():
            for edit in edits:  # every text fits before any time is spent
                edit.apply((copy / "stable_baselines3" / edit.files[0]).read_text(), edit.files[0])
        for group, (files, chosen) in TESTS.items():
            row = run_tests(copy, group)
            print(f"{row['outcome']:7} {row['cpu_seconds']:4d} s  unedited: {group}  {row['pytest']}", flush=True)
            if row["outcome"] != "passed":
                sys.exit(f"error: the unedited copy does not pass: {row}")
            unedited[group] = {"files": files.split(), "chosen": chosen} | row
        for group, edits in PAIRS.items():
            for edit in edits:
                path = copy / "stable_baselines3" / edit.files[0]
                original = path.read_text()
                path.write_text(edit.apply(original, edit.files[0]))
                row = run_tests(copy, group)
                path.write_text(original)
                bugs[edit.name] = {"file": edit.files[0], "old": edit.old, "new": edit.new, "form": edit.why,
                                   "tests": group} | row  # fmt: skip
                print(f"{row['outcome']:7} {row['cpu_seconds']:4d} s  {edit.name}  {row.get('test', '')}", flush=True)
                (RESULTS / "peer_bugs.json").write_text(json.dumps(result, indent=1) + "\n")


def show() -> None:
    """Prints, bug by bug, whether our fast tests and the peer's unit tests catch it."""
    result = json.loads((RESULTS / "peer_bugs.json").read_text())
    path = RESULTS / "planted_bugs.json"
    ours = json.loads(path.read_text())["bugs"] if path.exists() else {}
    words = {"failed": "caught", "passed": "missed"}
    print(f"SB3 {result['release']}, commit {result['commit'][:8]}; the bugs were chosen by us: see --help")
    print(f"{'bug':38} {'plainrl':8} {'SB3':8} the test of SB3 that fails")
    for name, bug in result["bugs"].items():
        own = ours.get(name, {"outcome": "not run"})["outcome"]
        print(f"{name:38} {words.get(own, own):8} {words.get(bug['outcome'], bug['outcome']):8} {bug.get('test', '')}")
    caught = [bug["outcome"] == "failed" for bug in result["bugs"].values()]
    print(f"SB3's tests catch {sum(caught)} of {len(caught)}")
    if here := [ours[name]["outcome"] == "failed" for name in result["bugs"] if name in ours]:
        print(f"plainrl's tests catch {sum(here)} of {len(here)} of them that have run")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "show": show}, description=__doc__)
