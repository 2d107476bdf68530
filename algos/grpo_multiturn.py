r"""Group Relative Policy Optimization with an environment in the loop.

Parent: grpo.py. A completion becomes an episode: turns of the policy, and between them observations, text that an
environment answers. The loss is GRPO's, on the policy's own tokens alone. Agents of this kind: Search-R1 (Jin et al.
2025, arXiv 2503.09516) with a search engine, ReTool (Feng et al. 2025, arXiv 2504.11536) with an interpreter, StarPO of
RAGEN (Wang et al. 2025, arXiv 2504.20073) with games.

The policy answers each prompt with several episodes. An episode is reinforced by how much better its reward is than the
rewards of the other episodes of the same prompt. Maximises

    J(theta) = E  1/G sum_i 1/T_i sum_t own_it { min[ rho_it A_i, clip(rho_it, 1 - eps, 1 + eps_high) A_i ]
                                                 - beta k3_it }

    own_it   1 where the policy sampled token t of episode y_i, 0 where the environment wrote it
    A_i      = (R_i - mean(R_1..R_G)) / std(R_1..R_G)                 R_i: the sum of the rewards of its turns
    rho_it   = pi_theta(y_it | x, y_i,<t) / pi_old(y_it | x, y_i,<t)  probability ratio; observations are in y_i,<t
    T_i      number of own tokens of y_i; k3_it, G, eps, eps_high, beta: as in grpo.py

Run
    python algos/grpo_multiturn.py                                learns to guess a digit by asking higher or lower
    python algos/grpo_multiturn.py --blank-observations           the control: answers say nothing
    python algos/grpo_multiturn.py --environment calculator --max-turns 2 --num-prompts 64 --num-generations 8
    python algos/grpo_multiturn.py --model ORG/NAME --environment search:corpus.jsonl --task questions.jsonl
    A Python interpreter, and your own environment: algos/README.md.

Expect
    The default run takes about 50 CPU seconds. Without the answers nobody finds more than four digits of ten, 0.40.
    Success of samples goes from 0.04 to 0.70 +- 0.11 (30 seeds), with --blank-observations it ends at 0.40 +- 0.02
    (benchmarks/effects.py). Groups become deterministic on a tree of guesses that misses some digits.

Metrics
    turns               the policy's, in an episode. observation_tokens: what the environment wrote. length: own tokens
    truncated           share of episodes that the environment did not end. cut/turn: a turn reached
                        --max-completion-length; cut/total: no room for another; cut/turns: --max-turns; cut/fault: 0
    eval/pass@1         held-out share of episodes with reward 1. The others as in grpo.py

Differences
    - Own tokens are never decoded and encoded again: an episode is its ids. The environment gets text. Search-R1's and
      RAGEN's code tokenise the text anew, so they train tokens that were not sampled.
    - Two masks: attention sees all tokens, the loss only own ones, with the EOS or stop token that ends a turn. What
      the chat template writes around an observation is not trained.
    - A turn begins only if it has room for --max-completion-length. An observation that is too long ends the episode.
    - A step that raises, hangs or floods ends its episode with the rewards so far. A reset that raises ends the run.
    - Each turn reads the whole episode anew. With one turn this is grpo.py bit for bit.
"""

import bisect
import importlib
import math
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.core import Run, UserError, main, prepare, rng_state, set_rng_state
from utils.data import Task, encode_prompt, load_task, present, template_kwargs, usable
from utils.dist import (
    Means,
    Samples,
    Trained,
    averaged,
    clip_gradients,
    gathered,
    mean,
    micro_batches,
    moments,
    pad_left,
    set_rate,
    share,
    start,
    stream,
    total,
)
from utils.lm import PolicyArgs, alarm, autocast, completion_logps, load_model, resolve, sample_all, save_model
from utils.rewards import load_function, pass_at_k, sample_rows

NAME, TITLE = "grpo_multiturn", "GRPO with an environment"
LARGE = dict(learning_rate=1e-6, num_prompts=64, num_generations=8, sample_batch_size=32, micro_batch_size=64,
             micro_batch_tokens=4096, max_completion_length=512, beta=0.04, precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=3e-4, num_prompts=10, num_generations=32, sample_batch_size=512, micro_batch_size=320,
                 micro_batch_tokens=0, max_completion_length=8, beta=0.0, precision="float32"),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=1e-5),
}  # fmt: skip
STD_EPSILON = 1e-4  # the paper names none; 1e-4 as in most code
FLOOD = 100  # characters; no tokenizer's tokens hold that many on average
ASIDE = "7f3aQ", "x91Zk", "W5rt2"  # texts of the dummy conversations, which no template contains


@dataclass
class Args(PolicyArgs):  # and --model --precision --lora-rank --seed --device ...: utils/lm.py, utils/core.py
    environment: str = "guess"
    """guess, a file of algos/environments (calculator, python, search:CORPUS.jsonl, from_trl:FILE.py:CLASS for a class
    for TRL's environment_factory), FILE.py:CLASS or PACKAGE.MODULE:CLASS. `load_environment` says what it must have"""
    environment_seconds: float = 10.0
    """an environment that takes longer to answer has failed"""
    max_turns: int = 4
    """most turns of an episode"""
    max_total_length: int | None = None
    """most tokens of an episode with its prompt; None: the model's context, 4096 at most"""
    stop: tuple[str, ...] = ()
    """strings that end a turn besides EOS; none: the environment's own"""
    blank_observations: bool = False
    """a control: every token of an observation becomes EOS, which says nothing"""
    task: str = ""
    """countdown, sort, gsm8k, reasoning_gym:NAME, a .jsonl file, or a hub dataset; none: the environment's own"""
    prompt_column: str = "prompt"
    """column of a dataset with the prompt: text or chat messages"""
    missing_eos_penalty: float = 0.0
    """subtracted from the reward of an episode that was cut off, in training"""
    max_steps: int = 60
    """steps: each samples, then updates"""
    num_prompts: int | None = None
    """prompts per step, of all processes"""
    num_generations: int | None = None
    """episodes per prompt: G"""
    sample_batch_size: int | None = None
    """episodes sampled at once, rounded to whole prompts; limits the cache's memory"""
    log_samples: int = 0
    """prompts per step whose episodes RUN/samples.jsonl keeps, besides those of evaluations"""
    max_completion_length: int | None = None
    """most new tokens per turn"""
    max_prompt_length: int | None = None
    """longer prompts are dropped; None: those that leave --max-completion-length no room"""
    temperature: float = 1.0
    """divides the logits, in sampling and in training"""
    micro_batch_size: int | None = None
    """completions in one forward and backward pass; changes memory, not the result"""
    num_iterations: int = 1
    """update epochs per batch of completions (mu in the paper)"""
    num_minibatches: int = 1
    """optimizer steps per update epoch, each on a share of the prompts: from the second on, pi_old is stale"""
    epsilon: float = 0.2
    """lower clip of the ratio: 1 - epsilon"""
    epsilon_high: float | None = None
    """upper clip of the ratio: 1 + epsilon_high; None: epsilon"""
    beta: float | None = None
    """weight of the KL penalty; 0 loads no reference model"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """divide advantages by the standard deviation of their group or of the batch, or not at all"""
    aggregation: Literal["sequence", "token", "constant"] = "sequence"
    """mean over each episode's own tokens, then episodes; mean over all own tokens; sum over B * max_turns *
    max_completion_length"""
    mask_truncated_completions: bool = False
    """leave truncated episodes, and those whose environment failed, out of the loss"""
    learning_rate: float | None = None
    """peak learning rate of AdamW"""
    adam_beta2: float = 0.999
    """second-moment decay of AdamW (the first is 0.9)"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """decay after the warm-up"""
    warmup_steps: int = 0
    """steps of linear warm-up"""
    weight_decay: float = 0.0
    """decoupled weight decay"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this norm"""
    eval_every: int = 20
    """steps between evaluations; 0: at the start and the end only"""
    eval_prompts: int = 128
    """held-out prompts per evaluation"""
    eval_samples: int = 8
    """sampled answers per held-out prompt"""


class Guess:
    """A hidden digit. A turn names a digit, and the answer is + (it is higher) or - (it is lower). Reward 1 for the
    digit, which ends the episode; so does a turn that is no digit, with 0. Within four turns binary search always finds
    the digit; whoever ignores the answers names at most four digits of ten: 0.40."""

    stop = tuple("0123456789")

    @staticmethod
    def task() -> Task:
        """The ten digits in turn. There is nothing to hold out: the game is the same."""
        words = "Guess my digit, 0 to 9. Say one digit at a time: I answer + if mine is higher, - if it is lower."
        rows = [{"prompt": "S:", "plain_prompt": words, "digit": digit} for digit in range(10)]
        return Task("guess", lambda i, seed: rows[i % 10], rows)

    def reset(self, row: dict, seed: int) -> None:
        if "digit" not in row:
            raise UserError("--environment guess has prompts of its own: leave --task out")
        self.digit = row["digit"]

    def step(self, text: str) -> tuple[str, float, bool]:
        guess = text.strip()
        if len(guess) != 1 or guess not in self.stop or int(guess) == self.digit:
            return "", float(guess == str(self.digit)), True
        return "+" if self.digit > int(guess) else "-", 0.0, False


class Step(NamedTuple):
    """The answer to one turn."""

    observation: str
    reward: float
    done: bool
    fault: str = ""  # why the episode ends, where the environment failed


class Episodes(NamedTuple):
    """P prompts, G episodes of each, B = P * G rows of T tokens: own ones and observations as they followed."""

    samples: Samples  # completion_mask is for attention; logps are 0 at observations; ended: the environment ended it
    own: Tensor  # (B, T) bool, for the loss: what the policy sampled
    rewards: Tensor  # (B,) float32, sums over turns
    turns: list[int]  # (B,)
    cut: list[str]  # (B,) "", or what cut the episode: turn, total, turns, fault


class Batch(NamedTuple):
    """What this process learns from in one step. P prompts, G episodes of each, B = P * G rows."""

    samples: Samples
    rewards: Tensor  # (B,) float32, NaN: skipped
    ref_logps: Tensor | None  # (B, T), None where beta is 0


def advantages(rewards: Tensor, scale: str) -> Tensor:
    """Rewards minus their group's mean, divided by the group's or batch's std + STD_EPSILON. (P, G) -> (P, G).

    NaN rewards are left out of means and deviations and get 0. DeepSeekMath section 4.1.2; "none": arXiv 2503.20783.
    """
    above_least = rewards - rewards.nan_to_num(torch.inf).amin(1, keepdim=True)  # equal rewards get 0, not a rounding
    centred = above_least - above_least.nanmean(1, keepdim=True)
    if scale == "group":  # the paper does not say which deviation: the unbiased one here, as in most code
        known = (~rewards.isnan()).sum(1, keepdim=True)
        variance = centred.square().nansum(1, keepdim=True) / (known - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + STD_EPSILON)
    elif scale == "batch":
        centred = centred / (moments(rewards)[1] + STD_EPSILON)
    return centred.nan_to_num(0.0)


def token_weights(mask: Tensor, aggregation: str, max_completion_length: int) -> Tensor:
    """Weight of each token's loss in the step's loss, over the B rows of all processes. mask of 0 and 1, (B, T).

    sequence: 1 / (B T_i), the paper's. Not the policy gradient: tokens of long completions count less than others.
    token: 1 / sum of all T_i of the step, as TRL and verl; DAPO's formula takes each group's own sum.
    constant: 1 / (B L_max), Dr. GRPO: all tokens count alike, so lengths bias nothing.
    """
    rows = total(torch.tensor(len(mask), device=mask.device))
    if aggregation == "sequence":
        return mask / (rows * mask.sum(1, keepdim=True).clamp(min=1))
    if aggregation == "token":
        return mask / total(mask.sum()).clamp(min=1)
    return mask / (rows * max_completion_length)


def policy_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Clipped surrogate per token, to be minimised, and where the clip cuts the gradient. arXiv 2402.03300,
    equation 3, first term. logps, old_logps (B, T), advantages (B, 1) or (B, T) -> (B, T), (B, T) bool."""
    ratio = (logps - old_logps).exp()
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.min(unclipped, clipped), clipped < unclipped


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Estimate of KL(pi_theta || pi_ref) at tokens of pi_theta: non-negative, unbiased in value. Its gradient is that
    of KL(pi_ref || pi_theta) instead. arXiv 2402.03300, equation 4."""
    difference = ref_logps - logps
    return difference.exp() - difference - 1


def update(model, optimizer, batch: Batch, own: Tensor, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of episodes, of whose tokens `own`
    (B, T) were sampled. Returns metrics."""
    samples, groups = batch.samples, batch.rewards.view(-1, args.num_generations)
    advantage = advantages(groups, args.scale_rewards).view(-1, 1)
    mask, longest = own, args.max_turns * args.max_completion_length
    if args.mask_truncated_completions:
        mask = mask & samples.ended[:, None]
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    numbers = torch.arange(len(mask)).view(-1, args.num_generations)  # of the rows
    gap, norms = Means(), []
    for _ in range(args.num_iterations):
        means = Means()
        for minibatch in numbers.tensor_split(args.num_minibatches):  # the order of the prompts is random
            within, weights = minibatch.flatten(), torch.zeros_like(samples.logps)
            weights[within] = token_weights(mask[within], args.aggregation, longest)
            optimizer.zero_grad(set_to_none=True)
            for rows, inputs in micro_batches(samples, args, within):
                with autocast(model, args.precision):
                    logps, entropy = completion_logps(model, *inputs, args.temperature)
                width = logps.shape[1]
                old_logps, valid = samples.logps[rows, :width], mask[rows, :width]
                loss, clipped = policy_loss(logps, old_logps, advantage[rows], args.epsilon, high)
                if batch.ref_logps is not None:
                    kl = k3(logps, batch.ref_logps[rows, :width])
                    loss = loss + args.beta * kl
                    means.add(valid, kl=kl)
                (loss * weights[rows, :width]).sum().backward()
                logps = logps.detach()
                means.add(valid, clip_fraction=clipped, approx_kl=k3(old_logps, logps), entropy=entropy)
                if not norms:  # before the first optimizer step
                    gap.add(valid, sampler_gap=(logps - old_logps).abs())
            norms.append(clip_gradients(model, args.max_grad_norm))
            optimizer.step()
    return gap.read() | means.read() | {"grad_norm": torch.stack(norms).mean().item()}


def load_environment(spec: str) -> Any:
    """The class of --environment. Each episode has an object of its own:

    reset(row, seed) -> str or None     what is appended to the prompt; depends on row and seed alone, which all
                                        episodes of a group share
    step(text) -> (str, float, bool)    the observation behind the model's turn, its reward, whether the episode is over
    stop = ("=",)                       optional: a turn ends behind each of these strings, besides at EOS
    role = "tool"                       optional: whose message an observation is, for chat templates; else "user"
    tools = [schema]                    optional: what the chat template tells the model that it can call
    task()                              optional, static: the Task of a run without --task
    """
    name, _, argument = spec.partition(":")
    if spec == "guess":
        found: Any = Guess
    elif (Path(__file__).parent / "environments" / f"{name}.py").is_file():
        module = importlib.import_module(f"algos.environments.{name}")
        found = module.load(argument) if hasattr(module, "load") else module
    else:
        found = load_function(spec)
    if not all(callable(getattr(found, name, None)) for name in ("reset", "step")):
        raise UserError(f"--environment {spec} must have the methods reset(row, seed) and step(text); one for TRL's "
                        f"environment_factory: --environment from_trl:{spec}")  # fmt: skip
    stop = getattr(found, "stop", ())
    if isinstance(stop, str) or not all(isinstance(string, str) and string for string in stop):
        raise UserError(f"stop of --environment {spec} is {stop!r}: it must be texts in a tuple, as in ('</search>',)")
    return found


def show_tools(environment: Any, tokenizer) -> None:
    """The chat template is told of the environment's tools. Raises UserError where the model would not see them."""
    if tools := getattr(environment, "tools", []):
        if getattr(tokenizer, "raw_prompt", False) or "tools" not in str(tokenizer.chat_template):
            raise UserError("--environment has tools, and the chat template of --model does not show them: give a "
                            "model whose template knows tools, without --raw-prompt")  # fmt: skip
        tokenizer.template_kwargs = getattr(tokenizer, "template_kwargs", {}) | {"tools": tools}


def judged(answer: Any, longest: int) -> Step:
    """What `step` of an environment gave. Raises UserError where it is no answer at all."""
    if isinstance(answer, BaseException):
        return Step("", 0.0, True, "".join(traceback.format_exception(answer)))
    try:
        observation, reward, done = answer
        step = Step(observation or "", float(reward), bool(done))
        assert isinstance(step.observation, str) and abs(step.reward) < float("inf")
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"step of --environment returned {answer!r:.200}: it must return text, a finite number and "
                        "True or False") from error  # fmt: skip
    if len(step.observation) > longest:
        return Step("", 0.0, True, f"an observation of {len(step.observation)} characters\n")
    return step


def results(calls: list[Callable], seconds: float) -> list[Any]:
    """What each call returns, or the exception that it raises; TimeoutError after `seconds`. UserError is raised. One
    thread makes all calls in their order; one that hangs is left behind, and another thread makes the rest."""
    found: list[Any] = []

    def work(rest: list[Callable], queue: SimpleQueue, left_behind: threading.Event) -> None:
        for call in rest:
            if left_behind.is_set():
                return
            try:
                queue.put(call())
            except (Exception, SystemExit) as error:
                queue.put(error)

    while len(found) < len(calls):
        queue, left_behind = SimpleQueue(), threading.Event()
        threading.Thread(target=work, args=(calls[len(found) :], queue, left_behind), daemon=True).start()
        try:
            while len(found) < len(calls):
                found.append(queue.get(timeout=seconds))
        except Empty:
            left_behind.set()
            found.append(TimeoutError(f"step of --environment took longer than {seconds:g} seconds"))
    for result in found:
        if isinstance(result, UserError):
            raise result
    return found


def opened(row: dict, text: str) -> dict:
    """The row with `text` behind its prompt: behind the last message's content, where it has messages."""
    if not text:
        return row
    if isinstance(row["prompt"], str):
        return row | {name: row[name] + text for name in ("prompt", "plain_prompt") if name in row}
    *before, last = row["prompt"]
    content = last.get("content") or ""
    content = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return row | {"prompt": [*before, last | {"content": content}]}


@lru_cache
def stop_ids(tokenizer, stop: tuple[str, ...]) -> list[int]:
    """All tokens that hold one of the strings. Such a token stays whole: a turn is never cut inside a token."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))]) if stop else []
    return [i for i, text in enumerate(texts) if any(string in text for string in stop)]


def until_stop(tokens: list[int], tokenizer, stop: tuple[str, ...]) -> int:
    """How many tokens there are up to the one that completes a stop string; 0 where none does. Strings that several
    tokens make are found here: what was sampled behind them is dropped."""

    def holds(n: int) -> bool:
        text = tokenizer.decode(tokens[:n])
        return any(string in text for string in stop)

    whole = stop and holds(len(tokens))
    return 1 + bisect.bisect_left(range(1, len(tokens)), True, key=holds) if whole else 0


def around(row: dict, tokenizer, role: str) -> tuple[str, str]:
    """The text that the chat template puts before an observation, from the end of the model's turn on, and behind it,
    up to where the next turn begins: what a dummy conversation has there. Two empty texts where prompts are text.

    The model's own turns stay as they were sampled: thinking that a template would drop from earlier turns stays, too.
    Raises UserError where the difference is ambiguous: the template drops or repeats the texts, or surrounds the second
    observation otherwise than the first.
    """
    prompt = present(row, tokenizer)
    if isinstance(prompt, str):
        return "", ""
    own, observation, later = ASIDE
    turn = [{"role": "assistant", "content": own}, {"role": role, "content": observation}]
    more = [{"role": "assistant", "content": later}, {"role": role, "content": later}]
    kwargs = template_kwargs(row, tokenizer)

    def rendered(messages: list[dict]) -> str:
        try:
            return tokenizer.apply_chat_template([*prompt, *messages], tokenize=False, add_generation_prompt=True,
                                                 **kwargs)  # fmt: skip
        except Exception as error:  # a template raises what it likes
            raise UserError(f"the chat template refuses an observation as a message of {role} ({error}): set role of "
                            "--environment to one that it takes") from error  # fmt: skip

    one, two = rendered(turn), rendered(turn + more)
    pattern = f"{own}(.*?){observation}(.*)"
    first = re.search(pattern, one, re.DOTALL)
    second = re.search(f"{later}(.*?){later}(.*)", two, re.DOTALL)
    once = one.count(own) == one.count(observation) == 1
    if not once or first is None or second is None or first.groups() != second.groups():
        raise UserError("the chat template does not say what stands around an observation: it drops or changes earlier "
                        "turns; give a model with another template, or --raw-prompt")  # fmt: skip
    return first[1], first[2]


def encode_observation(text: str, last: int, ends: list[int], tokenizer, frame: tuple[str, str]) -> list[int]:
    """Token ids between two of the model's turns, encoded alone, so that nothing merges with the model's own. A turn
    that ended with an EOS (`last` is one of `ends`) has what the template would write there."""
    before, behind = frame
    if last in ends:  # perhaps with another EOS than the template's
        written = [eos for eos in map(tokenizer.decode, ends) if before.startswith(eos)]
        before = before.removeprefix(written[0]) if written else before
    return tokenizer(before + text + behind, add_special_tokens=False)["input_ids"]


def play(model, tokenizer, make: Any, rows: Sequence[dict], num_samples: int, temperature: float, args: Args,
         *key: int | str) -> Episodes:  # fmt: skip
    """`num_samples` episodes of each row's prompt, with environments that `make` makes. Those of all rows advance
    together, turn by turn. key: as in `sample_all`."""
    size = len(rows) * num_samples
    games = [make() for _ in range(size)]
    seeds = [stream("cpu", args.seed, *key, "reset", p).initial_seed() % 2**32 for p in range(len(rows))]
    openings = [game.reset(rows[i // num_samples], seeds[i // num_samples]) or "" for i, game in enumerate(games)]
    if wrong := [text for text in openings if not isinstance(text, str)]:
        raise UserError(f"reset of --environment returned {wrong[0]!r:.200}: it must return a text or None")
    if any(text != openings[i - i % num_samples] for i, text in enumerate(openings)):
        raise UserError("reset of --environment answers equal rows and seeds differently: it must not")
    rows = [opened(row, text) for row, text in zip(rows, openings[::num_samples])]
    prompts = [encode_prompt(row, tokenizer) for row in rows]
    if (longest := max(map(len, prompts))) + args.max_completion_length > args.max_total_length:
        raise UserError(f"with what reset of --environment adds, a prompt has {longest} tokens: raise "
                        "--max-total-length, or lower --max-completion-length")  # fmt: skip
    frames = [around(row, tokenizer, getattr(make, "role", "user")) for row in rows]
    stop, eos = tuple(args.stop or getattr(make, "stop", ())), model.generation_config.eos_token_id
    ends, hidden = sorted({*eos, *stop_ids(tokenizer, stop)}), {*eos, tokenizer.pad_token_id}
    ids, own, logps = ([[] for _ in range(size)] for _ in range(3))
    rewards, turns, cut = [0.0] * size, [0] * size, ["turns"] * size
    alive = list(range(size))
    for turn in range(args.max_turns):
        if turn and not total(torch.tensor(len(alive))):  # in any process
            break
        # the first turns of a group share their prompt; who has no episode left samples what does not count
        contexts = [prompts[i // num_samples] + ids[i] for i in alive] or prompts[:1] if turn else prompts
        sampled = sample_all(model, contexts, 1 if turn else num_samples, args, temperature, *key,
                             *[turn] * (turn > 0), eos=ends)  # fmt: skip
        lengths, whole, texts = sampled.completion_mask.sum(1).tolist(), {}, {}
        for row, i in enumerate(alive):
            tokens = sampled.completion_ids[row, : lengths[row]].tolist()
            stopped = until_stop(tokens, tokenizer, stop)
            tokens, whole[i] = tokens[: stopped or len(tokens)], stopped > 0 or bool(sampled.ended[row])
            ids[i] += tokens
            own[i] += [True] * len(tokens)
            logps[i] += sampled.logps[row, : len(tokens)].tolist()
            texts[i] = tokenizer.decode([token for token in tokens if token not in hidden])  # tool tags are seen

        going, failures = [], []
        answers = results([partial(games[i].step, texts[i]) for i in alive], args.environment_seconds)
        for i, step in zip(alive, [judged(answer, FLOOD * args.max_total_length) for answer in answers]):
            rewards[i] += step.reward
            turns[i] += 1
            observation = encode_observation(step.observation, ids[i][-1], eos, tokenizer, frames[i // num_samples])
            length = len(prompts[i // num_samples]) + len(ids[i]) + len(observation)
            if step.fault:
                cut[i] = "fault"
                failures.append(step.fault)
            elif not whole[i]:
                cut[i] = "turn"
            elif step.done:
                cut[i] = ""
            elif turn + 1 < args.max_turns and length + args.max_completion_length > args.max_total_length:
                cut[i] = "total"
            elif turn + 1 < args.max_turns:
                if args.blank_observations:
                    observation = [tokenizer.eos_token_id] * len(observation)
                ids[i] += observation
                own[i] += [False] * len(observation)
                logps[i] += [0.0] * len(observation)
                going.append(i)
        if failures:
            print(f"the environment failed in {len(failures)} episodes, first: {failures[0]}", end="", file=sys.stderr)
        alive = going
    device = model.device

    def padded(values: list[list], dtype: torch.dtype) -> Tensor:
        rows = [torch.tensor(value, dtype=dtype, device=device) for value in values]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    mask = padded([[True] * len(row) for row in ids], torch.bool)
    samples = Samples(*pad_left(prompts, device), padded(ids, torch.long), mask, padded(logps, sampled.logps.dtype),
                      torch.tensor([reason == "" for reason in cut], device=device))  # fmt: skip
    return Episodes(samples, padded(own, torch.bool), torch.tensor(rewards), turns, cut)


def collect(model, tokenizer, make: Any, task: Task, step: int, args: Args) -> Episodes:
    """Plays G episodes of each of this process's prompts of the step. --missing-eos-penalty is off the rewards."""
    rows = [task.train(i, args.seed) for i in share(range((step - 1) * args.num_prompts, step * args.num_prompts))]
    episodes = play(model, tokenizer, make, rows, args.num_generations, args.temperature, args, "train", step)
    return episodes._replace(rewards=episodes.rewards - args.missing_eos_penalty * ~episodes.samples.ended.cpu())


def evaluate(model, tokenizer, make: Any, task: Task, args: Args, keep: Callable) -> dict[str, float]:
    """Success, a reward of 1, of greedy and sampled episodes of held-out rows. keep: gets all episodes as rows."""
    n, own = args.eval_samples, share(task.heldout[: args.eval_prompts])

    def rewards(count: int, temperature: float) -> Tensor:
        played = play(model, tokenizer, make, own or task.heldout[:1], count, temperature, args, "evaluation")
        rows = sample_rows(len(own), played.samples, tokenizer, {"reward": played.rewards, "cut": played.cut})
        keep([row | {"greedy": temperature == 0} for row in gathered(rows)])
        return torch.tensor(gathered(played.rewards.view(-1, count).tolist()[: len(own)]))

    before = rng_state()  # environments may draw from the global generators
    greedy, sampled = rewards(1, 0.0), rewards(n, args.temperature)
    set_rng_state(before)
    right = (sampled == 1).sum(1).tolist()
    chances = {f"eval/pass@{k}": mean([pass_at_k(n, c, k) for c in right]) for k in sorted({1, n})}
    return {"eval/greedy": mean((greedy == 1).double().flatten().tolist()), **chances,
            "eval/reward": sampled.mean().item()}  # fmt: skip


def shown(tokenizer, episodes: Episodes, count: int = 2) -> str:
    """The first episodes, a line for each turn and observation, with every special token visible."""
    samples = episodes.samples
    lines = [f"prompt       {tokenizer.decode(samples.prompt_ids[0][samples.prompt_mask[0]])!r}"]
    for i in range(min(count, len(episodes.own))):
        tokens, own = (x[i][samples.completion_mask[i]].tolist() for x in (samples.completion_ids, episodes.own))
        begin = 0
        for end in range(1, len(tokens) + 1):
            if end == len(tokens) or own[end] != own[begin]:
                who = "turn       " if own[begin] else "observation"
                lines.append(f"{who}  {tokenizer.decode(tokens[begin:end])!r}")
                begin = end
        lines.append(f"reward       {episodes.rewards[i]:g}" + (f", cut: {episodes.cut[i]}" if episodes.cut[i] else ""))
    return "\n".join(lines)


@torch.no_grad()
def reference_logps(model, reference, samples: Samples, args: Args) -> Tensor:
    """Log-probabilities (B, T) under the reference: a model, or the policy without its LoRA adapters."""
    out, scorer = torch.zeros_like(samples.logps), reference or model
    without_adapters = nullcontext() if reference else model.disable_adapter()
    with without_adapters, autocast(model, args.precision):
        for rows, inputs in micro_batches(samples, args):
            logps, _ = completion_logps(scorer, *inputs, args.temperature)
            out[rows, : logps.shape[1]] = logps
    return out


def train(args: Args) -> list[dict]:
    device = start(prepare(args))
    make = load_environment(args.environment)
    if not args.task and not hasattr(make, "task"):
        raise UserError(f"--environment {args.environment} has no prompts of its own: give --task")
    task = load_task(args.task, args.prompt_column) if args.task else make.task()
    model, tokenizer = load_model(args, device)
    show_tools(make, tokenizer)
    settings = resolve(model, args, PRESETS)
    if args.num_generations < 2:
        raise UserError("--num-generations must be at least 2: a group of one has no other reward to compare with")
    if "" in args.stop:
        raise UserError("--stop has an empty text, which would end every turn: leave it out")
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if args.max_total_length is None:
        args.max_total_length = int(min(context, 4096))
    if args.max_total_length > context:
        raise UserError(f"--max-total-length {args.max_total_length} is beyond the {context} tokens that --model takes")
    room = args.max_total_length - args.max_completion_length
    longest = min(n for n in (args.max_prompt_length, room) if n is not None)
    task = usable(task, model, tokenizer, replace(args, max_prompt_length=longest))
    reference = load_model(args, device, frozen=True)[0] if args.beta and not args.lora_rank else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  betas=(0.9, args.adam_beta2), weight_decay=args.weight_decay, fused=True)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"))
    run.print(settings)
    parts = {"trained": Trained(model, optimizer)}
    if not run.restore(**parts):
        run.log(0, **evaluate(model, tokenizer, make, task, args, run.keep))
    model.train()
    while run.step < args.max_steps:
        step, begun = run.step + 1, time.perf_counter()
        rate = set_rate(optimizer, step, args)

        # collect
        episodes = collect(model, tokenizer, make, task, step, args)
        samples, rewards, own = episodes.samples, episodes.rewards, episodes.own
        sampled, due = time.perf_counter(), run.due(step, args.eval_every)
        if step == 1:
            run.print(shown(tokenizer, episodes))
        ref_logps = reference_logps(model, reference, samples, args) if args.beta else None

        # update
        columns = update(model, optimizer, Batch(samples, rewards.to(device), ref_logps), own, args)
        alarm(columns.get("sampler_gap"), run, args)

        # evaluate
        groups, lengths = rewards.view(-1, args.num_generations), own.sum(1).float()
        each = {"reward": rewards, "advantage": advantages(groups, args.scale_rewards).flatten(), "cut": episodes.cut}
        run.keep(sample_rows(args.log_samples, samples, tokenizer, each))
        columns |= {
            "reward": rewards.nanmean().item(),
            "reward_std": (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean().item(),
            "frac_zero_std": (advantages(groups, "none") == 0).all(1).float().mean().item(),
            "length": lengths.mean().item(),
            "truncated": 1 - samples.ended.float().mean().item(),
            "turns": sum(episodes.turns) / len(episodes.turns),
            "observation_tokens": (samples.completion_mask & ~own).sum().item() / len(own),
            **{f"cut/{why}": episodes.cut.count(why) / len(own) for why in ("turn", "total", "turns", "fault")},
            "learning_rate": rate,
            "time/sample": sampled - begun,
            "time/step": time.perf_counter() - begun,
        }
        columns["time/tokens_per_second"] = total(lengths.sum()).item() / columns["time/step"]
        if due:
            columns |= evaluate(model, tokenizer, make, task, args, run.keep)
        run.log(step, **averaged(columns))
        run.end_step(step, parts)

    curves: dict = {"reward": ("reward",), "held-out": ("eval/*",), "entropy per token": ("entropy",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
