"""A stand-in for a vLLM server: the same paths and replies, over a model of transformers and our own `sample`.

Its replies have the fields of those that tests/fixtures/vllm.json recorded from the real server; a test compares them.
"""

import contextlib
import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from utils.dist import pad_left
from utils.lm import sample

CONFIG = dict(vocab_size=22, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=1, max_position_embeddings=256, eos_token_id=1, bos_token_id=None)  # fmt: skip
NEUTRAL = dict(top_p=1.0, top_k=0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)


def make_model():
    """A model of head size 64, which vLLM's CPU kernels need, whose weights are a formula and not random numbers."""
    model = Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=False, **CONFIG)).float()
    with torch.no_grad():
        for k, (_, p) in enumerate(model.named_parameters()):
            wave = torch.sin(1.7 * torch.arange(p.numel(), dtype=torch.float64) ** 1.1 + k)
            p.copy_((0.15 * wave).view(p.shape) + (1.0 if p.dim() == 1 else 0.0))
    return model


class StandIn(ThreadingHTTPServer):
    """One server on a free port of this machine. `model` is what it samples with; `loads`, whether it takes new
    weights."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, model):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.model, self.lock, self.asked, self.loads = copy.deepcopy(model).eval(), threading.Lock(), [], True

    def answer(self, path: str, body: dict | None) -> tuple[int, dict]:
        self.asked.append((path, body))
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy"}]}
        if path == "/reset_prefix_cache":
            return 200, {"success": True}
        if path == "/collective_rpc" and body["method"] == "reload_weights":
            if self.loads:
                arrived = AutoModelForCausalLM.from_pretrained(body["kwargs"]["weights_path"])
                self.model.load_state_dict(arrived.state_dict())
            return 200, {"results": [None]}
        if path == "/v1/completions" and body["model"] == "policy":
            return 200, {"choices": self.complete(body)[::-1]}  # the order is the server's
        return 404, {"error": {"message": f"there is no {path} for {body}"}}

    def complete(self, body: dict) -> list[dict]:
        """Fields that are left out have what a model's generation settings might say."""
        temperature = body.get("temperature", 0.6) * (1.0 if body | NEUTRAL == body else 0.6)
        ends = body["stop_token_ids"] + ([] if body.get("ignore_eos") else [1])
        prompt, most, count = pad_left([body["prompt"]], "cpu"), body.get("max_tokens", 16), body.get("n", 1)
        with self.lock:
            generator = torch.Generator().manual_seed(body["seed"])
            drawn = sample(self.model, *prompt, count, most, ends, temperature, generator)
        choices = []
        for i, (ids, mask, logps, ended) in enumerate(zip(*drawn[2:])):
            ids, logps = ids[mask].tolist(), logps[mask].tolist()
            choices.append({
                "index": i, "text": "", "finish_reason": "stop" if ended else "length",
                "stop_reason": ids[-1] if ended else None, "token_ids": ids, "prompt_token_ids": body["prompt"],
                "prompt_logprobs": None, "routed_experts": None,
                "logprobs": {"token_logprobs": logps, "tokens": [f"token_id:{token}" for token in ids],
                             "text_offset": [0] * len(ids),
                             "top_logprobs": [{f"token_id:{t}": logp} for t, logp in zip(ids, logps)]},
            })  # fmt: skip
        return choices


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        status, reply = self.server.answer(self.path, json.loads(self.rfile.read(length)) if length else None)
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, *_) -> None:
        """Not to the terminal."""


@contextlib.contextmanager
def serving(server: ThreadingHTTPServer):
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
