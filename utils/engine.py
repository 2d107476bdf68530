"""Sampling by vLLM servers: --sampler http://HOST:PORT; several URLs share the prompts.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --generation-config vllm

serves the model of --model, from any environment. Its developer mode executes what it is sent: bind it to 127.0.0.1 or
to a network that you trust. It reads weights from a folder in --output-dir, which it must see under the same path.
With --lora-rank it gets the adapters: VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and --max-lora-rank RANK, too.

A server may answer that it has loaded weights and sample with old ones, or with one old tensor. Two rules stop the run:

- Nearer. For each sampled token the server gives a log-probability, and so do the right weights and other weights. The
  server's is nearer to one of them; tokens at which these two differ by less than half of the noise are left out. A
  completion votes between 1 (the server was nearer to the right weights at all tokens) and -1; tokens weigh by the
  difference. A server with the right weights and noise of any kind, as likely upwards as downwards, gives a vote at
  most an even chance to be negative. The sum of votes over the root of the sum of their squares is then below -Z with a
  chance of at most exp(-Z^2 / 2), 2e-8: that stops the run.
- Far. The mean distance from the right weights may be LIMIT at the start, and later FAR times what it was there.

At the start the servers get weights that are perturbed in every tensor, in each by as much as alone moves the
log-probabilities by SHIFT, or by twice the noise. The other weights are these without the perturbation of one tensor,
for each tensor in turn. Later they are the weights of the load before: so weights that are one step old are seen.
"""

import contextlib
import copy
import http.client
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from utils.distributed import is_sharded, on_rank_0, rank
from utils.errors import UserError
from utils.lm import Samples, completion_logps, stream
from utils.models import autocast

SLOWEST = 1800  # seconds until a server must have answered
AT_ONCE = 128  # prompts that a server has under way
ROWS = 64  # completions of a step that are compared
VOTES = 256  # of a server, the newest
Z, FAR = 6.0, 10.0
LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.2}  # nats, by what weights are sent in
SHIFT, ROUNDING = 0.2, 1e-4  # nats; a distance is never far below FAR * ROUNDING
CPU = torch.device("cpu")
REMEDY = "restart the server, or use a version of vLLM that README names, and --resume the run"
Weights = dict[str, Tensor]  # trained tensors by name


@dataclass
class Server:
    url: str
    name: str = ""  # of what it serves
    room: int = 0  # tokens of a prompt and its completion
    noise: float = 0.0  # nats: mean distance from the model at the start
    votes: Tensor = field(default_factory=lambda: torch.zeros(0))

    def ask(self, path: str, body: dict | None = None) -> dict:
        """The JSON that the server answers. Raises UserError where it does not, or refuses."""
        data, opener = body and json.dumps(body).encode(), urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with opener.open(request, timeout=SLOWEST) as reply:
                text = reply.read()
                return json.loads(text) if text.startswith(b"{") else {}
        except urllib.error.HTTPError as error:
            raise self.error(f"refuses {path} ({error.code} {error.read(300).decode(errors='replace')}): does it serve "
                             "--model, in developer mode, and see --output-dir?") from error  # fmt: skip
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self.error(f"does not answer ({error}): start it and --resume the run") from error

    def error(self, text: str) -> UserError:
        return UserError(f"the engine --sampler {self.url} {text}")


class Engine:
    """Servers that sample for the policy. Its methods raise UserError, in one sentence, where a server is gone or slow,
    is not set up as it must be, or samples with other weights than it was given."""

    def __init__(self, args):
        """args: of the script. Weights are written to --output-dir, each time in a new folder that is removed again."""
        self.args, self.servers = args, [Server(url.rstrip("/")) for url in args.sampler]
        self.dtype = torch.float32 if args.precision == "float32" else torch.bfloat16
        self.now: Weights = {}  # what the servers were given last
        self.before: Weights = {}  # and before that
        self.turn = rank()  # the server that gets the next prompt
        self.drawn: tuple[Samples, Tensor] | None = None  # the first samples since a load, and their rows' servers

    def load(self, model) -> list[tuple[str, int]]:
        """Gives the servers the model's weights, if they have changed. Called on one rank; all must `know` what it
        returns."""
        model.zero_grad(set_to_none=True)  # makes room for a second copy of the weights
        weights = {name: self.rounded(p) for name, p in trained(model)}
        if not self.now or any(not torch.equal(weights[name], self.now[name]) for name in weights):
            self.send(model, weights)
        return [(server.name, server.room) for server in self.servers]

    def know(self, loaded: list[tuple[str, int]]) -> None:
        self.drawn = None
        for server, (name, room) in zip(self.servers, loaded):
            server.name, server.room = name, room

    def rounded(self, weight: Tensor) -> Tensor:
        return weight.detach().to("cpu", self.dtype, copy=True)  # and no view of it, which would follow training

    def send(self, model, weights: Weights) -> None:
        """Has every server load the model with these weights."""
        folder = Path(self.args.output_dir).expanduser().resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="weights-", dir=folder) as path:
            if adapters := hasattr(model, "peft_config"):
                with having(model, weights):
                    model.save_pretrained(path, save_embedding_layers=False)
            else:
                state = {name: weights.get(name, value) for name, value in model.state_dict().items()}
                once = dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()  # of tied ones, one
                model.save_pretrained(path, state_dict={name: state[name] for name in state if name in once})
            for server in self.servers:
                config = server.ask("/server_info?config_format=json")["vllm_config"]["model_config"]
                if config["logprobs_mode"] != "processed_logprobs":
                    raise server.error("was started without --logprobs-mode processed_logprobs")
                server.name, server.room = "adapter", config["max_model_len"]
                if adapters:
                    server.ask("/v1/load_lora_adapter", dict(lora_name="adapter", lora_path=path, load_inplace=True))
                else:
                    server.name = server.ask("/v1/models")["data"][0]["id"]
                    server.ask("/collective_rpc", dict(method="reload_weights", kwargs={"weights_path": path}))
                if not server.ask("/reset_prefix_cache", {"reset": True})["success"]:
                    raise server.error("cannot drop its cache of prompts: let nobody else use it")
        self.before, self.now = self.now, weights

    def sample(self, prompt_ids: Tensor, prompt_mask: Tensor, num_samples: int, max_new_tokens: int, eos: list[int],
               temperature: float = 1.0, generator: torch.Generator | None = None) -> Samples:  # fmt: skip
        """As `sample` of utils/lm.py, with the servers' log-probabilities. Servers take turns at prompts. Each
        completion has a seed of its own, for equal seeds draw alike for all prompts."""
        seed = generator.initial_seed() if generator else 0
        longest = int(prompt_mask.sum(1).max()) + max_new_tokens
        least = min(self.servers, key=lambda server: server.room)
        if longest > least.room:
            raise least.error(f"takes {least.room} tokens: start it with --max-model-len {longest} or more")
        sampling = dict(n=num_samples, max_tokens=max_new_tokens, min_tokens=0, temperature=temperature, top_p=1.0,
                        top_k=0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0,
                        ignore_eos=True, stop_token_ids=eos, stop=[], logprobs=0, return_token_ids=True,
                        return_tokens_as_token_ids=True)  # fmt: skip  # ignore_eos: the server's own; ours stop

        turns = [(self.turn + i) % len(self.servers) for i in range(len(prompt_ids))]
        self.turn += len(turns)

        def complete(i: int) -> list[tuple[list[int], list[float]]]:
            server, prompt = self.servers[turns[i]], prompt_ids[i][prompt_mask[i]].tolist()
            body = sampling | {"model": server.name, "prompt": prompt, "seed": seed + i * num_samples}
            choices = sorted(server.ask("/v1/completions", body)["choices"], key=lambda one: one["index"])
            found = [(one["token_ids"], one["logprobs"]["token_logprobs"]) for one in choices]
            for ids, logps in found:
                full = len(ids) == max_new_tokens or ids[-1:] in [[end] for end in eos]
                if not full or len(ids) != len(logps) or set(ids[:-1]) & set(eos):
                    raise server.error(f"gave {ids}, which neither ends with its only EOS nor is {max_new_tokens} long")
            if len(found) != num_samples:
                raise server.error(f"gave {len(found)} completions where {num_samples} were asked for")
            return found

        with ThreadPoolExecutor(AT_ONCE * len(self.servers)) as pool:
            found = [row for rows in pool.map(complete, range(len(prompt_ids))) for row in rows]
        device, width = prompt_ids.device, max(len(ids) for ids, _ in found)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in found], device=device)
        logps = torch.tensor([logps + [0.0] * (width - len(logps)) for _, logps in found], device=device)
        lengths = torch.tensor([[len(ids)] for ids, _ in found], device=device)
        ended = torch.tensor([ids[-1] in eos for ids, _ in found], device=device)
        samples = Samples(prompt_ids, prompt_mask, ids, torch.arange(width, device=device) < lengths, logps, ended)
        self.drawn = self.drawn or (samples, torch.tensor(turns).repeat_interleave(num_samples))
        return samples

    def prove(self, model) -> str:
        """At the start: gives the servers the model's weights, then perturbed ones, and looks for each tensor in what
        each of them samples. Returns a line for the terminal."""
        self.load(model)
        temperature = getattr(self.args, "temperature", 1.0)
        prompts = torch.randint(model.config.get_text_config().vocab_size, (16, 4), generator=stream(CPU, "engine"))
        prompts = prompts.to(model.device)

        def probe(server: Server) -> Samples:
            """128 completions of 8 tokens, by this server."""
            alone = copy.copy(self)
            alone.servers = [server]
            return alone.sample(prompts, torch.ones_like(prompts, dtype=torch.bool), 8, 8, [], temperature)

        for server in self.servers:
            samples = probe(server)
            score = self.score(model, samples, temperature)
            server.noise = distance(samples, score)
            refuse_far(server, server.noise, LIMIT[self.dtype])
        perturbed, wanted = {}, max(SHIFT, 2 * max(server.noise for server in self.servers))
        for name, p in trained(model):
            noise = torch.randn(p.shape, generator=stream(p.device, name), device=p.device)
            noise *= (p.detach().square().mean().sqrt() or 1.0) / 50
            with having(model, {name: p + noise}):
                moved = distance(samples._replace(logps=score), self.score(model, samples, temperature))
            perturbed[name] = self.rounded(p + noise * min(50.0, wanted / max(moved, 1e-9)))
        self.send(model, perturbed)
        seen: dict[str, float] = {}  # by part of the model, how surely it arrived
        for server in self.servers:
            samples = probe(server)
            with having(model, perturbed) as own:
                right = self.score(model, samples, temperature)
                found = {
                    part: votes(samples, right, self.score(model, samples, temperature))
                    for part in old_parts(model, own)
                }
            oldest = min(found, key=lambda part: significance(found[part]))
            refuse_old(server, found[oldest], f"has an old {oldest}")
            refuse_far(server, distance(samples, right), FAR * max(server.noise, ROUNDING))
            seen = {part: min(significance(found[part]), seen.get(part, Z)) for part in found}
        hidden = [part for part in seen if seen[part] < Z]
        return (f"engine: {server.noise:.2g} nats from the model; {len(seen) - len(hidden)} of its {len(seen)} tensors "
                f"were seen to arrive{', not ' if hidden else ''}{', '.join(hidden)}")  # fmt: skip

    def check(self, model, temperature: float) -> dict[str, float]:
        """Compares servers and model on up to ROWS completions since the last load. Returns columns over their tokens:
        the mean importance weight pi_theta / pi_engine, the share of weights above 2, and the effective sample size
        (sum w)^2 / (N sum w^2)."""
        assert self.drawn is not None, "nothing was sampled since the last load"
        samples, turns = self.drawn
        group = len(samples.completion_ids) // len(samples.prompt_ids)
        count = min(len(samples.prompt_ids), max(1, ROWS // group))
        part = Samples(*(t[:count] for t in samples[:2]), *(t[: count * group] for t in samples[2:]))
        score = self.score(model, part, temperature)
        with having(model, self.now):
            right = self.score(model, part, temperature)
        with having(model, self.before):
            new = votes(part, right, self.score(model, part, temperature))
        for i, server in enumerate(self.servers):
            rows = turns[: count * group] == i
            server.votes = torch.cat([server.votes, new[rows]])[-VOTES:]
            refuse_old(server, server.votes, "has older weights")
            if rows.any():
                mine = part._replace(logps=part.logps[rows], completion_mask=part.completion_mask[rows])
                refuse_far(server, distance(mine, score[rows]), FAR * max(server.noise, ROUNDING))
        weights = (score - part.logps)[part.completion_mask].double().exp()
        return {"engine/weight": weights.mean().item(), "engine/above_2": (weights > 2).double().mean().item(),
                "engine/ess": (weights.sum() ** 2 / weights.square().sum() / len(weights)).item()}  # fmt: skip

    @torch.no_grad()
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
    """Has `sample_all` use the servers of --sampler, once they have shown that they follow the model. Raises UserError
    for a model in shards, too."""
    if is_sharded(model):
        raise UserError("--sampler does not go with --fsdp: leave one of them")
    engine = Engine(args)
    print(on_rank_0(lambda: engine.prove(model)))
    model.engine = engine


def trained(model) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


@contextlib.contextmanager
def having(model, weights: Weights) -> Iterator[Weights]:
    """With these weights for the model's own, which are yielded."""
    held = {name: p.data for name, p in trained(model) if name in weights}
    try:
        for name, p in trained(model):
            if name in weights:
                p.data = weights[name].detach().to(p.device, p.dtype)
        yield held
    finally:
        for name, p in trained(model):
            p.data = held.get(name, p.data)


def old_parts(model, old: Weights) -> Iterator[str]:
    """Puts old weights into the model, one at a time, and yields their names. One that embedding and output layer share
    is also put into each of the two alone."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    for name, p in trained(model):
        new, p.data = p.data, old[name]
        yield name
        p.data = new
        for layer in ends if all(layer is not None and layer.weight is p for layer in ends) else ():
            layer.weight = torch.nn.Parameter(old[name])
            yield f"{name} in its {type(layer).__name__} layer"
            layer.weight = p


def distance(samples: Samples, score: Tensor) -> float:
    """Mean over tokens of |score - what the sampler said|, nats."""
    return (score - samples.logps).abs()[samples.completion_mask].mean().item()


def votes(samples: Samples, right: Tensor, other: Tensor) -> Tensor:
    """Whether the sampler was nearer to `right` (1) or to `other` (-1), (B, T) both, for each completion, (B,)."""
    near, far = (samples.logps - right).abs(), (samples.logps - other).abs()
    noise = min(distance(samples, right), distance(samples, other))
    apart = (right - other).abs() * samples.completion_mask
    apart = apart * (apart > noise / 2)
    return (((far - near).sign() * apart).sum(1) / apart.sum(1).clamp(min=1e-30)).cpu()


def significance(votes: Tensor) -> float:
    """The sum of votes over the root of the sum of their squares."""
    return (votes.sum() / votes.square().sum().sqrt().clamp(min=1e-30)).item()


def refuse_old(server: Server, votes: Tensor, what: str) -> None:
    if significance(votes) < -Z:
        raise server.error(f"{what} and not what it was given: {REMEDY}")


def refuse_far(server: Server, gap: float, limit: float) -> None:
    if not gap <= limit:
        raise server.error(f"samples with other weights than it was given, {gap:.2g} nats a token from the model where "
                           f"{limit:.2g} is the limit: {REMEDY}")  # fmt: skip
