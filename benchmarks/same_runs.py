"""Whether a change left the numbers alone: seed 1 of every default curve in two checkouts, compared bit for bit.

    python benchmarks/same_runs.py record FOLDER --checkout ../old    one file per curve: metrics and a hash of weights
    python benchmarks/same_runs.py compare OLD NEW                    what differs; exit code 1 where anything does

Runs use one thread. Columns that measure time are left out. Both checkouts must run on the same machine.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.specs import SPECS  # noqa: E402

RUN = """
import contextlib, hashlib, importlib, json, os, sys, tempfile
from pathlib import Path
from safetensors.torch import load_file
sys.path.insert(0, os.getcwd())

def train(script, settings, folder):
    module = importlib.import_module(f"algos.{script}")
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    common = dict(seed=1, output_dir=folder, save_every=10**6, threads=1, device="cpu")
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        return module.train(module.Args(**settings | common))

script, settings, flipped = json.loads(sys.argv[1])
with tempfile.TemporaryDirectory() as folder:
    if flipped is not None:
        pairs = dict(task="sort", max_steps=20, eval_every=0, label_noise=flipped)
        train("reward_model", pairs, f"{folder}/reward")
        settings["reward"] = [str(path) for path in Path(folder).glob("reward/*/model")]
    history = train(script, settings, f"{folder}/run")
    digests = {}
    for path in sorted(Path(folder).glob("run/*/model/**/*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            digests[name] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in history]
print("RESULT" + json.dumps({"rows": rows, "weights": digests}))
"""
MORE = {  # of scripts whose recorded curves are long
    "ppo_atari-short": dict(env_id="ALE/KungFuMaster-v5", total_timesteps=2_048, eval_every=0, eval_episodes=1),
    "dt-short": dict(max_steps=120, context_length=3, batch_size=64, eval_episodes=2, target_returns=[2_400.0, 300.0]),
}


def record(folder: tyro.conf.Positional[Path], checkout: Path = ROOT, only: tuple[str, ...] = ()) -> None:
    """Runs seed 1 of the recorded default curves (or of `only`) with the sources of `checkout`."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = {name: ("ppo_atari", settings, None) for name, settings in MORE.items()}
    for script, spec in SPECS.items():
        alone = {
            name: c for name, c in spec.curves.items() if not c.slow and not isinstance(c.settings.get("model"), tuple)
        }
        jobs |= {name: (script, c.settings, c.label_noise) for name, c in alone.items()}
    for name, job in jobs.items():
        target = folder / f"{name}.json"
        if target.exists() or only and name not in only:
            continue
        command = [sys.executable, "-c", RUN, json.dumps(job)]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
        target.write_text(done.stdout.split("RESULT")[1])
        print(name, hashlib.sha256(target.read_bytes()).hexdigest()[:12], flush=True)


def compare(old: tyro.conf.Positional[Path], new: tyro.conf.Positional[Path]) -> None:
    """Names every curve, row, column and weight that differs."""
    different = 0
    for path in sorted(old.glob("*.json")):
        if not (new / path.name).exists():
            print(f"{path.stem}: not run")
            continue
        a, b = json.loads(path.read_text()), json.loads((new / path.name).read_text())
        found = [f"weight {name}" for name in a["weights"].keys() | b["weights"].keys()
                 if a["weights"].get(name) != b["weights"].get(name)]  # fmt: skip
        found += [f"{len(a['rows'])} rows, now {len(b['rows'])}"] if len(a["rows"]) != len(b["rows"]) else []
        found += [f"step {x['step']} {key}: {x.get(key)}, now {y.get(key)}" for x, y in zip(a["rows"], b["rows"])
                  for key in x.keys() | y.keys() if x.get(key) != y.get(key)]  # fmt: skip
        different += bool(found)
        print(f"{path.stem}: {'; '.join(found[:3]) or 'equal'}{' ...' if len(found) > 3 else ''}")
    sys.exit(bool(different))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"record": record, "compare": compare})
