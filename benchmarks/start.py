"""CPU seconds from a file to step 1: 20,000 rows of JSON Lines through what reads and filters them, without imports and
the model's load, at the first start and at the second.

    python benchmarks/start.py MODEL                    a chat model's folder, of which the tokenizer is used
    python benchmarks/start.py MODEL --root CHECKOUT    the same of another version
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import tyro

ROOT = Path(__file__).resolve().parents[1]
WORDS = "the model learns sums from its own answers and a reward that tells which of them are right".split()
RUN = """
import importlib, sys, time
root, algo, model, rows = sys.argv[1:]
sys.path.insert(0, root)
import datasets, torch, transformers
module = importlib.import_module(f"algos.{algo}")
tokenizer = transformers.AutoTokenizer.from_pretrained(model)
config = transformers.LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                  num_attention_heads=1, max_position_embeddings=4096)
net = transformers.LlamaForCausalLM(config)
net.generation_config.eos_token_id = [tokenizer.eos_token_id]
tokenizer.system_prompt, tokenizer.template_kwargs = "", {}
class Reached(Exception): pass
def stop(*_): raise Reached(time.process_time() - begun)
module.load_model, module.Run = lambda *_, **__: (net, tokenizer), stop
module.make_scorer = lambda *_: None
about = dict(max_completion_length=256) if algo == "grpo" else dict(max_length=2048)
args = module.Args(task=(rows,) if algo == "sft" else rows, device="cpu", threads=1, **about)
begun = time.process_time()
try: module.train(args)
except Reached as seconds: print(seconds)
"""


def row(i: int) -> dict:
    """About 300 bytes a text."""
    texts = [" ".join(WORDS[(i * k + j) % len(WORDS)] for j in range(55)) for k in (1, 3, 5)]
    return {"prompt": f"{i}: {texts[0]}", "completion": texts[1], "chosen": texts[1], "rejected": texts[2]}


def main(model: tyro.conf.Positional[Path], root: Path = ROOT, rows: int = 20_000) -> None:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "rows.jsonl")
        file.write_text("".join(json.dumps(row(i)) + "\n" for i in range(rows)))
        for algo in ("grpo", "sft", "dpo"):
            with mock.patch.dict(os.environ, HF_DATASETS_CACHE=f"{name}/{algo}", OMP_NUM_THREADS="1"):
                command = [sys.executable, "-c", RUN, root.resolve(), algo, model.expanduser().resolve(), file]
                found = [subprocess.run(command, capture_output=True, text=True) for _ in ("first", "second")]
                print(algo, *(x.stdout.splitlines()[-1][:5] if x.returncode == 0 else x.stderr[-500:] for x in found))


if __name__ == "__main__":
    tyro.cli(main)
