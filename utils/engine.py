"""Sampling by vLLM servers: --sampler http://HOST:PORT; several URLs share the prompts.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --generation-config vllm

serves the model of --model, from any environment. Its developer mode executes what it is sent: bind it to 127.0.0.1 or
to a network that you trust. It reads weights from a folder in --output-dir, which it must see under the same path.
With --lora-rank it gets the adapters: VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and --max-lora-rank RANK, too.

A server may answer that it has loaded weights and sample with old ones, or with one old tensor. Two rules stop the run:

- Share of the way. A load should move the log-probability of each sampled token from what the old weights give to what
  the new ones give. Which share of these ways has the server gone? With the new weights 1, with the old ones 0, up to
  noise. Weights are old where the share is below one half and surely below 1. Surely: noise moves each completion as
  likely forth as back; then their sum exceeds Z times the root of the sum of their squares with a chance of at most
  exp(-Z^2 / 2), 2e-8.
- Distance. The mean distance from the model may be LIMIT at the start, and later FAR times what it was there.

At the start the servers get weights that are perturbed in every tensor, in each by as much as alone moves the
log-probabilities by SHIFT, or by twice the noise. The old weights are then these without the perturbation of one
tensor, each in turn. Later they are those of the load before: so weights that are one step old are seen.
"""

import contextlib
import http.client
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import add
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from utils.distributed import is_sharded, on_rank_0, rank, unsharded
from utils.errors import UserError
from utils.lm import Samples, completion_logps, stream
from utils.models import autocast, unsharded_copy

SLOWEST = 1800  # seconds until a server must have answered
AT_ONCE = 128  # prompts that a server has under way
ROWS, NEWEST = 64, 256  # completions that are compared: of a step, and of a server, over steps
Z, FAR = 6.0, 10.0
LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.2}  # nats, by what weights are sent in
SHIFT, ROUNDING = 0.2, 1e-4  # nats; a distance is never far below FAR * ROUNDING
REMEDY = "restart the server, or use a version of vLLM that README names, and --resume the run"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
CPU = torch.device("cpu")
Weights = dict[str, Tensor]  # trained tensors by name


@dataclass
class Server:
    url: str
    name: str = ""  # of what it serves
    room: int = 0  # tokens of a prompt and its completion
    noise: float = 0.0  # nats: mean distance from the model at the start
    ways: Tensor = torch.zeros(0, 2)  # `ways` of the newest completions

    def ask(self, path: str, body: dict | None = None) -> dict:
        """The JSON that the server answers. Raises UserError where it does not, or refuses."""
        data = body and json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
            with DIRECT.open(request, timeout=SLOWEST) as reply:
                text = reply.read()
                return json.loads(text) if text.startswith(b"{") else {}
        except urllib.error.HTTPError as error:
            why = f"refuses {path} ({error.code} {error.read(300).decode(errors='replace')})"
            raise self.error(f"{why}: does it serve --model, in developer mode, and see --output-dir?") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self.error(f"does not answer ({error}): start it and --resume the run") from error

    def error(self, text: str) -> UserError:
        return UserError(f"the engine --sampler {self.url} {text}")

    def check_share(self, ways: Tensor, what: str) -> None:
        gone, whole = ways.unbind(1)
        if gone.sum() < whole.sum() / 2 and sure(whole - gone):
            raise self.error(f"has {what} and not what it was given: {REMEDY}")

    def check_distance(self, distance: float, limit: float) -> None:
        if not distance <= limit:
            why = f"{distance:.2g} nats a token from the model where {limit:.2g} is the limit"
            raise self.error(f"samples with other weights than it was given, {why}: {REMEDY}")


class Engine:
    """Servers that sample for the policy. Its methods raise UserError, in one sentence, where a server is gone or slow,
    is not set up as it must be, or samples with other weights than it was given. Under FSDP they are called where all
    weights are gathered."""

    def __init__(self, args):
        """args: of the script. Weights are written to --output-dir, each time in a new folder that is removed again."""
        self.args, self.servers = args, [Server(url.rstrip("/")) for url in args.sampler]
        self.dtype = torch.float32 if args.precision == "float32" else torch.bfloat16
        self.now: Weights = {}  # what the servers were given last
        self.before: Weights = {}  # and before that
        self.turn = rank()  # the server that gets the next prompt
        self.drawn: Samples | None = None  # the first samples since a load
        self.turns = torch.zeros(0)  # the servers of their rows

    def load(self, model) -> list[Server]:
        """Gives the servers the model's weights, if they have changed. Called on rank 0; other ranks must get what it
        returns as `servers`."""
        self.drawn, self.turn = None, self.turn + 1  # each server is the first at times, and compared
        model.zero_grad(set_to_none=True)  # makes room for a second copy of the weights
        weights = {name: self.rounded(p) for name, p in trained(model)}
        if not self.now or any(not torch.equal(weights[name], self.now[name]) for name in weights):
            self.send(model, weights)
        return self.servers

    def rounded(self, weight: Tensor) -> Tensor:
        return weight.detach().to("cpu", self.dtype, copy=True)  # and no view of it, which would follow training

    def send(self, model, weights: Weights) -> None:
        """Has every server load the model with these weights."""
        folder, adapters = Path(self.args.output_dir).expanduser().resolve(), hasattr(model, "peft_config")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="weights-", dir=folder) as path:
            if adapters:
                model.save_pretrained(path, state_dict=weights, save_embedding_layers=False)
            else:
                own = unsharded_copy(model, weights) if is_sharded(model) else model
                once = dict(own.named_parameters()).keys() | dict(own.named_buffers()).keys()  # of tied ones, one
                state = {name: weights.get(name, value) for name, value in own.state_dict().items() if name in once}
                own.save_pretrained(path, state_dict=state)
            for server in self.servers:
                config = server.ask("/server_info?config_format=json")["vllm_config"]["model_config"]
                if config["logprobs_mode"] != "processed_logprobs":
                    raise server.error("was started without --logprobs-mode processed_logprobs")
                server.room = config["max_model_len"]
                if adapters:  # under a new name: what is loaded in place of another is read again for each token
                    server.name = Path(path).name
                    server.ask("/v1/load_lora_adapter", {"lora_name": server.name, "lora_path": path})
                else:
                    server.name = server.ask("/v1/models")["data"][0]["id"]
                    server.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
                if not server.ask("/reset_prefix_cache", {"reset": True})["success"]:
                    raise server.error("cannot drop its cache of prompts: let nobody else use it")
        self.before, self.now, self.drawn = self.now, weights, None

    def sample(self, prompt_ids: Tensor, prompt_mask: Tensor, num_samples: int, max_new_tokens: int | list[int],
               eos: list[int], temperature: float = 1.0,
               generator: torch.Generator | None = None) -> Samples:  # fmt: skip
        """As `sample` of utils/lm.py, with the servers' log-probabilities. Servers take turns at prompts. Each
        completion has a seed of its own, for equal seeds draw alike for all prompts."""
        prompts = [ids[mask].tolist() for ids, mask in zip(prompt_ids, prompt_mask)]
        most = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        longest, least = max(map(add, map(len, prompts), most)), min(self.servers, key=lambda server: server.room)
        if longest > least.room:
            raise least.error(f"takes {least.room} tokens: start it with --max-model-len {longest} or more")
        sampling = dict(n=num_samples, min_tokens=0, temperature=temperature, top_p=1.0,
                        top_k=0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
                        ignore_eos=True, stop_token_ids=eos, stop=[], logprobs=0, return_token_ids=True,
                        return_tokens_as_token_ids=True)  # fmt: skip  # ignore_eos: the server's own; ours stop
        seed, turns = generator.initial_seed() if generator else 0, torch.arange(len(prompts)) + self.turn
        self.turn, turns = self.turn + len(prompts), turns % len(self.servers)

        def complete(i: int) -> list[tuple[list[int], list[float]]]:
            server = self.servers[turns[i]]
            body = sampling | {"model": server.name, "prompt": prompts[i], "seed": seed + i * num_samples,
                               "max_tokens": most[i]}  # fmt: skip
            choices = sorted(server.ask("/v1/completions", body)["choices"], key=lambda one: one["index"])
            found = [(one["token_ids"], one["logprobs"]["token_logprobs"]) for one in choices]
            for ids, logps in found:
                ends = [k for k, token in enumerate(ids) if token in eos] or [most[i] - 1]
                if ends != [len(ids) - 1] or len(ids) != len(logps):
                    raise server.error(f"gave {ids}, which neither ends with its only EOS nor is {most[i]} long")
            if len(found) != num_samples:
                raise server.error(f"gave {len(found)} completions where {num_samples} were asked for")
            return found

        with ThreadPoolExecutor(AT_ONCE * len(self.servers)) as pool:
            rows = [row for found in pool.map(complete, range(len(prompts))) for row in found]
        padded = [pad_sequence([torch.tensor(x) for x in column], True).to(prompt_ids.device) for column in zip(*rows)]
        lengths, ended = torch.tensor([[len(ids), ids[-1] in eos] for ids, _ in rows], device=prompt_ids.device).T
        mask = torch.arange(padded[0].shape[1], device=prompt_ids.device) < lengths[:, None]
        samples = Samples(prompt_ids, prompt_mask, padded[0], mask, padded[1], ended.bool())
        if self.drawn is None:
            self.drawn, self.turns = samples, turns.repeat_interleave(num_samples)
        return samples

    @torch.no_grad()
    def prove(self, model) -> str:
        """At the start: gives the servers the model's weights, then perturbed ones, and looks for each tensor in what
        each of them samples. Returns a line for the terminal."""
        temperature, shape = getattr(self.args, "temperature", 1.0), (16 * len(self.servers), 4)
        prompts = torch.randint(model.config.get_text_config().vocab_size, shape, generator=stream(CPU, "engine"))
        prompts, true = prompts.to(model.device), {name: self.rounded(p) for name, p in trained(model)}

        def probe(weights: Weights) -> Samples:
            """128 completions of 8 tokens by each server with these weights."""
            self.send(model, weights)
            return self.sample(prompts, torch.ones_like(prompts, dtype=torch.bool), 8, 8, [], temperature)

        samples = probe(true)
        score = self.score(model, samples, temperature)
        for server, rows in self.by_server(score):
            server.noise = distance(samples, score, rows)
            server.check_distance(server.noise, LIMIT[self.dtype])
        perturbed, wanted = {}, max(SHIFT, 2 * max(server.noise for server in self.servers))
        for name, p in trained(model):
            noise = torch.randn(p.shape, generator=stream(p.device, name), device=p.device)
            noise *= (p.square().mean().sqrt() or 1.0) / 50
            with having(model, {name: p + noise}):
                moved = (self.score(model, samples, temperature) - score).abs().mean()
            perturbed[name] = self.rounded(p + noise * (wanted / moved).clamp(max=50.0))
        samples = probe(perturbed)
        with having(model, perturbed):
            new = self.score(model, samples, temperature)
            found = {part: self.score(model, samples, temperature) for part in parts(model, true)}
        for server, rows in self.by_server(new):
            nearest = min(found, key=lambda part: distance(samples, found[part], rows))  # noqa: B023
            server.check_share(ways(samples, found[nearest], new)[rows], f"an old {nearest}")
            server.check_distance(distance(samples, new, rows), FAR * max(server.noise, ROUNDING))
        gone = {part: ways(samples, old, new)[:, 0] for part, old in found.items()}
        hidden = [part for part in gone if not all(sure(gone[part][rows]) for _, rows in self.by_server(new))]
        return (f"engine: {server.noise:.2g} nats from the model; {len(found) - len(hidden)} of its {len(found)} "
                f"tensors were seen to arrive{', not ' if hidden else ''}{', '.join(hidden)}")  # fmt: skip

    @torch.no_grad()
    def check(self, model, temperature: float) -> dict[str, float]:
        """Compares servers and model on up to ROWS completions since the last load. Returns columns over their tokens:
        the mean importance weight pi_theta / pi_engine, the share of weights above 2, and the effective sample size
        (sum w)^2 / (N sum w^2)."""
        assert self.drawn is not None, "nothing was sampled since the last load"
        group = len(self.drawn.completion_ids) // len(self.drawn.prompt_ids)
        prompts = max(1, ROWS // group)
        part = Samples(*(x[:prompts] for x in self.drawn[:2]), *(x[: prompts * group] for x in self.drawn[2:]))
        score = self.score(model, part, temperature)
        with having(model, self.now):
            new = self.score(model, part, temperature)
        with having(model, self.before):
            found = ways(part, self.score(model, part, temperature), new)
        for server, rows in self.by_server(score):
            unit = found[rows, 1:].clamp(min=max(server.noise, 1e-9))  # ways count alike, those below the noise less
            server.ways = torch.cat([server.ways, found[rows] / unit])[-NEWEST:]
            server.check_share(server.ways, "older weights")
            server.check_distance(distance(part, score, rows), FAR * max(server.noise, ROUNDING))
        weights = (score - part.logps)[part.completion_mask].double().exp()
        return {"engine/weight": weights.mean().item(), "engine/above_2": (weights > 2).double().mean().item(),
                "engine/ess": (weights.sum() ** 2 / weights.square().sum() / len(weights)).item()}  # fmt: skip

    def by_server(self, score: Tensor) -> Iterator[tuple[Server, Tensor]]:
        """Servers, and which rows of `score`, the first ones of `drawn`, are theirs."""
        turns = self.turns[: len(score)]
        yield from ((self.servers[i], turns == i) for i in turns.unique().tolist())

    def score(self, model, samples: Samples, temperature: float) -> Tensor:
        """The model's own log-probabilities, (B, T)."""
        out, training = torch.zeros_like(samples.logps), model.training
        group, width = len(out) // len(samples.prompt_ids), samples.prompt_ids.shape[1] + out.shape[1]
        model.eval()
        with autocast(model.device, self.args.precision):
            for rows in torch.arange(len(out), device=out.device).split(max(1, 4096 // width)):  # tokens in one pass
                prompts = samples.prompt_ids[rows // group], samples.prompt_mask[rows // group]
                completions = samples.completion_ids[rows], samples.completion_mask[rows]
                out[rows] = completion_logps(model, *prompts, *completions, temperature)[0].to(out.dtype)
        model.train(training)
        return out


def connect(model, args) -> None:
    """Has `sample_all` use the servers of --sampler, once they have shown that they follow the model."""
    engine = Engine(args)
    with unsharded(model):
        print(on_rank_0(lambda: engine.prove(model)))
    model.engine = engine


def trained(model) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


@contextlib.contextmanager
def having(model, weights: Weights) -> Iterator[None]:
    """With these weights for the model's own."""
    own = {name: p.data for name, p in trained(model) if name in weights}
    try:
        for name, p in trained(model):
            p.data = weights[name].to(p.device, p.dtype) if name in weights else p.data
        yield
    finally:
        for name, p in trained(model):
            p.data = own.get(name, p.data)


def parts(model, old: Weights) -> Iterator[str]:
    """Puts old weights into the model, one at a time, and yields their names. One that embedding and output layer share
    is also put into each of the two alone."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    for name, p in trained(model):
        with having(model, {name: old[name]}):
            yield name
        for layer in ends if all(layer is not None and layer.weight is p for layer in ends) else ():
            layer.weight = torch.nn.Parameter(old[name].to(p.device, p.dtype))
            yield f"{name} in its {type(layer).__name__} layer"
            layer.weight = p


def distance(samples: Samples, score: Tensor, rows: Tensor | slice = slice(None)) -> float:
    """Mean over the tokens of these rows of |score - what the sampler said|, nats."""
    return (score - samples.logps).abs()[rows][samples.completion_mask[rows]].mean().item()


def ways(samples: Samples, old: Tensor, new: Tensor) -> Tensor:
    """How far the sampler's log-probabilities went from `old` to `new`, (B, T) both, and how far that is: means over
    the tokens of each completion, nats, (B, 2)."""
    whole = (new - old) * samples.completion_mask
    sums = torch.stack([((samples.logps - old) * whole.sign()).sum(1), whole.abs().sum(1)], 1)
    return (sums / samples.completion_mask.sum(1, keepdim=True)).cpu()


def sure(values: Tensor) -> bool:
    """Whether their sum is too large for noise, which gives each of them either sign as likely."""
    return bool(values.sum() > Z * values.square().sum().sqrt())
