"""--sampler http://HOST:PORT: a vLLM server samples in place of the model. It reads new weights from a folder.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --generation-config vllm

serves the model of --model, from any environment. Its developer mode executes what it is sent: bind it to 127.0.0.1 or
to a network that you trust. It must see --output-dir under the same path. pi_old is what the server says, so the ratio
corrects what its weights or precision differ. One that keeps old weights drifts away: `alarm` of utils/lm.py.
"""

import json
import tempfile
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from utils.core import UserError
from utils.dist import Samples, pad_left, rank, stream, total

AT_ONCE = 128  # prompts that the server has under way
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(args, path: str, body: dict | None = None) -> dict:
    """The JSON that the server answers. Raises UserError where it does not, or refuses."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(args.sampler.rstrip("/") + path, data, {"Content-Type": "application/json"})
        with DIRECT.open(request, timeout=1800) as reply:
            return json.loads(reply.read() or b"{}")
    except (OSError, ValueError) as error:
        why = f"{error} {error.read(300).decode() if hasattr(error, 'read') else ''}"
        right = "start it as utils/vllm.py says and --resume the run"
        raise UserError(f"the server --sampler {args.sampler} does not answer {path} ({why}): {right}") from error


def send_weights(model, args, save: Callable) -> None:
    """The server loads the model's weights, if they have changed. All processes call it, `save` writes on process 0."""
    now = [p.detach().double().sum().item() for p in model.parameters() if p.requires_grad and not args.fsdp]
    if now and getattr(model, "sent", None) == now:
        return
    model.sent = now
    folder = Path(args.output_dir).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weights-", dir=folder) as path:
        save(model, None, Path(path), args)
        if rank() == 0:
            ask(args, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
            ask(args, "/reset_prefix_cache", {})
    total(torch.zeros(1))  # the others wait


def sample_by_server(model, prompts: list[list[int]], num_samples: int, longest: int, eos: list[int],
                     temperature: float, args, save: Callable, *key: int | str) -> Samples:  # fmt: skip
    """As `sample_all` of utils/lm.py. Each prompt has a seed of its own, for equal seeds draw alike for all prompts."""
    send_weights(model, args, save)
    how = dict(model=ask(args, "/v1/models")["data"][0]["id"], n=num_samples, temperature=temperature, top_p=1.0,
               top_k=0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
               max_tokens=longest, ignore_eos=True, stop_token_ids=eos, logprobs=0, return_token_ids=True)  # fmt: skip

    def complete(i: int) -> list[dict]:
        seed = stream("cpu", args.seed, *key, i).initial_seed() % 2**31
        choices = ask(args, "/v1/completions", how | {"prompt": prompts[i], "seed": seed})["choices"]
        return sorted(choices, key=lambda one: one["index"])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        choices = [one for found in pool.map(complete, range(len(prompts))) for one in found]
    ids = pad_sequence([torch.tensor(one["token_ids"]) for one in choices], True)
    logps = pad_sequence([torch.tensor(one["logprobs"]["token_logprobs"]) for one in choices], True)
    lengths, ended = torch.tensor([[len(one["token_ids"]), one["token_ids"][-1] in eos] for one in choices]).T
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    samples = Samples(*pad_left(prompts, "cpu"), ids, mask, logps, ended.bool())
    return Samples(*(x.to(model.device) for x in samples))
