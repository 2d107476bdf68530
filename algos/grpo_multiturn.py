r"""Group Relative Policy Optimization with an environment in the loop.

Parent: grpo.py. A completion becomes an episode: turns of the policy, and between them observations, text that an
environment answers. The loss is GRPO's, on the policy's own tokens alone. Agents of this kind: Search-R1 (Jin et al.
2025, arXiv 2503.09516) with a search engine, ReTool (Feng et al. 2025, arXiv 2504.11536) with an interpreter, StarPO of
RAGEN (Wang et al. 2025, arXiv 2504.20073) with games.

The policy answers each prompt with several episodes. An episode is reinforced by how much better its reward is than the
rewards of the other episodes of the same prompt. Maximises

    J(theta) = E  1/G sum_i 1/T_i sum_t own_it { min[ rho_it A_i, clip(rho_it, 1 - eps, 1 + eps_high) A_i ]
                                                 - beta k3_it }

    x, y_i   a prompt, and the i-th of G episodes that pi_old and the environment make of it, with reward R_i, the sum
             over its turns
    own_it   1 where the policy sampled token t of y_i, 0 where the environment wrote it
    A_i      = (R_i - mean(R_1..R_G)) / std(R_1..R_G)                 advantage, the same for every own token of y_i
    rho_it   = pi_theta(y_it | x, y_i,<t) / pi_old(y_it | x, y_i,<t)  probability ratio; observations are in y_i,<t
    k3_it    = pi_ref / pi_theta - log(pi_ref / pi_theta) - 1         estimate of KL(pi_theta || pi_ref) at the token
    T_i      number of own tokens of y_i
    G, eps, eps_high, beta   --num-generations, --epsilon, --epsilon-high, --beta

Run
    python algos/grpo_multiturn.py                                                  the embedded model learns to guess a
                                                                                    digit by asking higher or lower
    python algos/grpo_multiturn.py --blank-observations                             the control: answers say nothing
    python algos/grpo_multiturn.py --environment calculator --max-turns 2 --num-prompts 64 --num-generations 8 \
        --learning-rate 1e-4                                                        countdown with a calculator
    python algos/grpo_multiturn.py --model Qwen/Qwen2.5-3B-Instruct --environment search:corpus.jsonl \
        --task questions.jsonl --lora-rank 32                                       a search engine: utils/tools.py
    python algos/grpo_multiturn.py --model Qwen/Qwen2.5-3B-Instruct --environment python --task questions.jsonl \
        --lora-rank 32                                                              a Python interpreter
    python algos/grpo_multiturn.py --model Qwen/Qwen2.5-3B-Instruct --environment game.py:Game --task prompts.jsonl \
        --lora-rank 32                                                              your own, or one that was written
                                                                                    for TRL's environment_factory

Expect
    The default run takes about 50 CPU seconds. The policy guesses a hidden digit, 0 to 9, within four turns. Without
    the answers nobody finds more than four digits of ten, 0.40. So success above that shows that the loop works.
    Success of samples goes from 0.04 to 0.70 +- 0.11 (30 seeds, standard deviation; 28 of them above 0.55). With
    --blank-observations it ends at 0.40 +- 0.02, at most 0.43, the noise of 640 samples (benchmarks/effects.py,
    grpo_multiturn-observations). In the first ten steps the policy mostly ends at once, and learns that a digit pays.
    Groups become deterministic on a tree of guesses that misses some digits, so runs stop at different levels below 1.
    Countdown with the calculator goes from greedy 0.47, pass@1 0.35, pass@8 0.83 to 0.55, 0.50, 0.69 in 60 steps (seed
    1, one thread). It starts ahead of grpo.py's 0.01, because it does the sums that the embedded model gets wrong.

Metrics
    reward         mean over the batch; rises. reward_std: mean within groups
    frac_zero_std  share of groups with equal rewards, which teach nothing; below 0.9
    turns          the policy's turns in an episode. observation_tokens: tokens that the environment wrote in it
    length         own tokens of an episode
    truncated      share of episodes that the environment did not end. cut/turn: a turn reached --max-completion-length;
                   cut/total: no room for another turn within --max-total-length; cut/turns: --max-turns
    cut/fault      share of episodes in which the environment failed; 0
    eval/greedy, eval/pass@1, eval/pass@8   held-out share of episodes with reward 1: the likeliest turns, a sample, the
                   best of eight. eval/reward: mean reward of samples
    grad_norm      before clipping, mean over the step's updates; steady
    kl             mean k3 (beta > 0 only); grows slowly
    approx_kl      mean of rho - 1 - log rho in the last update epoch; near 0 with one epoch
    clip_fraction  share of own tokens whose gradient is cut; below 0.3
    sampler_gap    mean |log pi_theta - log pi_old| before the first update; 1e-6 in float32, more means a bug
    engine/weight, engine/above_2, engine/ess   with --sampler, as in grpo.py
    entropy        nats per own token; falls, should not reach 0

Differences
    - Own tokens are never decoded and encoded again: an episode is its ids, concatenated. The environment gets decoded
      text. Search-R1's and RAGEN's code tokenise the decoded text anew, so they train tokens that were not sampled.
    - Two masks: attention sees all tokens, the loss only own ones. A mask that serves both trains observations. No
      curve shows that; tests/test_exact_multiturn.py does.
    - The EOS or stop token that ends a turn was sampled, and is trained. What the chat template writes around an
      observation is not; an EOS that it writes behind a turn without one is not, either.
    - A turn begins only if it has room for --max-completion-length tokens within --max-total-length. So an observation
      that is too long ends the episode and is left out of it, as in TRL. Here the episode counts as truncated.
    - The environment sees a turn that was cut off, too, and its reward counts; the episode ends there.
    - A chat template's text around an observation is the difference of dummy conversations (utils/turns.py). Thinking
      stays in earlier turns, which some templates drop: sampled tokens are what the next turn is conditioned on.
    - A step that raises, hangs (--environment-seconds) or floods ends its episode. Its reward is 0. The run goes on,
      shows the first such error, and counts them in cut/fault. A reset that raises ends the run.
    - Each turn reads the whole episode anew, without the cache of the turn before: exact, and slower.
    - Everything else is as in grpo.py, whose Differences hold here, too. With one turn the two are equal bit for bit.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.checkpoint import rng_state, set_rng_state
from utils.checks import check_model
from utils.cli import main, prepare
from utils.distributed import clip_gradients, deal, share, total, unsharded
from utils.errors import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UserError
from utils.evaluation import advice, mean, pass_at_k
from utils.lm import Means, Samples, completion_logps, micro_batches, pad_left, sample_all
from utils.memory import check_memory
from utils.models import (
    PolicyArgs,
    autocast,
    eos_ids,
    load_policy,
    load_reference,
    resolve_for,
    save_model,
    trained_parameters,
    trained_state,
    without_dropout,
)
from utils.run import Run
from utils.schedule import set_learning_rate
from utils.tasks import Task, load_task
from utils.text import encode_prompt, usable_task
from utils.turns import (
    Environments,
    around,
    check_tools,
    encode_observation,
    load_environment,
    opened,
    stop_ids,
    transcript,
    until_stop,
)

NAME, TITLE = "grpo_multiturn", "GRPO with an environment"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=3e-4, adam_beta2=0.999, num_prompts=10, num_generations=32, sample_batch_size=512,
                 micro_batch_size=320, micro_batch_tokens=0, max_completion_length=8, beta=0.0, precision="float32"),
    "full": dict(learning_rate=1e-6, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, beta=0.04,
                 precision="bfloat16"),
    "lora": dict(learning_rate=1e-5, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, beta=0.04,
                 precision="bfloat16"),
}  # fmt: skip
STD_EPSILON = 1e-4  # the paper names none; 1e-4 as in most code


@dataclass
class Args(PolicyArgs):  # and --model --precision --lora-rank --seed --device ...: utils/models.py, utils/cli.py
    environment: str = "guess"
    """guess, calculator, python, search:CORPUS.jsonl, FILE.py:CLASS or PACKAGE.MODULE:CLASS; utils/turns.py says what a
    class must have. One for TRL's environment_factory works, too (utils/tools.py)"""
    environment_seconds: PositiveFloat = 10.0
    """an environment that takes longer to answer has failed"""
    max_turns: PositiveInt = 4
    """most turns of an episode"""
    max_total_length: PositiveInt | None = None
    """most tokens of an episode with its prompt; None: the model's context, 4096 at most"""
    stop: tuple[str, ...] = ()
    """strings that end a turn besides EOS; none: the environment's own"""
    blank_observations: bool = False
    """a control: every token of an observation becomes EOS, which says nothing"""
    task: str = ""
    """countdown, sort, gsm8k, a .jsonl or .parquet file, or a hub dataset; none: the environment's own"""
    prompt_column: str = "prompt"
    """column of a dataset with the prompt: text or chat messages"""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """subtracted from the reward of an episode that was cut off, in training"""
    max_steps: PositiveInt = 60
    """steps: each samples, then updates"""
    num_prompts: PositiveInt | None = None
    """prompts per step"""
    num_generations: PositiveInt | None = None
    """episodes per prompt: G"""
    sample_batch_size: PositiveInt | None = None
    """episodes sampled at once, in training and evaluation, rounded to whole prompts; limits the cache's memory"""
    max_completion_length: PositiveInt | None = None
    """most new tokens per turn"""
    max_prompt_length: PositiveInt | None = None
    """longer prompts are dropped; None: those that leave --max-completion-length no room in the model's context, and
    more than 5 % stop the run"""
    temperature: PositiveFloat = 1.0
    """divides the logits, in sampling and in training"""
    micro_batch_size: PositiveInt | None = None
    """completions in one forward and backward pass: a multiple or a divisor of G; changes memory, not the result"""
    num_iterations: PositiveInt = 1
    """update epochs per batch of completions (mu in the paper)"""
    num_minibatches: PositiveInt = 1
    """optimizer steps per update epoch, each on an equal share of the prompts: from the second on, pi_old is stale"""
    epsilon: PositiveFloat = 0.2
    """lower clip of the ratio: 1 - epsilon"""
    epsilon_high: PositiveFloat | None = None
    """upper clip of the ratio: 1 + epsilon_high; None: epsilon"""
    beta: NonNegativeFloat | None = None
    """weight of the KL penalty; 0 loads no reference model"""
    reset_reference_every: NonNegativeInt = 0
    """steps after which the reference becomes the policy, and the optimizer begins anew (ProRL); 0: never"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """divide advantages by the standard deviation of their group or of the batch, or not at all"""
    aggregation: Literal["sequence", "token", "constant"] = "sequence"
    """mean over each episode's own tokens, then episodes; mean over all own tokens; sum over B * max_turns *
    max_completion_length"""
    mask_truncated_completions: bool = False
    """leave truncated episodes, and those whose environment failed, out of the loss"""
    learning_rate: PositiveFloat | None = None
    """peak learning rate of AdamW"""
    adam_beta2: Annotated[float, "at least 0 and below 1"] | None = None
    """second-moment decay of AdamW (the first is 0.9)"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """decay after the warm-up"""
    warmup_steps: NonNegativeInt = 0
    """steps of linear warm-up"""
    weight_decay: NonNegativeFloat = 0.0
    """decoupled weight decay"""
    max_grad_norm: PositiveFloat = 1.0
    """gradients are clipped to this norm"""
    eval_every: NonNegativeInt = 20
    """steps between evaluations; 0: at the start and the end only"""
    eval_prompts: PositiveInt = 128
    """held-out prompts per evaluation"""
    eval_samples: PositiveInt = 8
    """sampled answers per held-out prompt"""


class Episodes(NamedTuple):
    """P prompts, G episodes of each, B = P * G rows of T tokens: own ones and observations as they followed."""

    samples: Samples  # completion_mask is for attention; logps are 0 at observations; ended: the environment ended it
    own: Tensor  # (B, T) bool, for the loss: what the policy sampled
    rewards: Tensor  # (B,) float32, sums over turns
    turns: list[int]  # (B,)
    cut: list[str]  # (B,) "", or what cut the episode: turn, total, turns, fault


class Batch(NamedTuple):
    """What one step learns from. P prompts, G completions of each, B = P * G rows."""

    samples: Samples
    rewards: Tensor  # (B,) float32, NaN: skipped
    ref_logps: Tensor | None  # (B, T), None where beta is 0


def advantages(rewards: Tensor, scale: str) -> Tensor:
    """Rewards minus their group's mean, divided by the group's or batch's std + STD_EPSILON. (P, G) -> (P, G).

    NaN rewards are left out of means and deviations and get 0. A group of equal rewards gets 0, too, even if rounding
    moves its mean. DeepSeekMath section 4.1.2; "none": arXiv 2503.20783.
    """

    def std(values: Tensor) -> Tensor:
        known = values[~values.isnan()]
        # the paper does not say which deviation: the unbiased one here, as in most code
        return known.std(correction=1) if len(known) > 1 else values.new_zeros(())

    centred = rewards - rewards.nanmean(1, keepdim=True)
    if scale == "group":
        centred = centred / (torch.stack([std(group) for group in rewards])[:, None] + STD_EPSILON)
    elif scale == "batch":
        centred = centred / (std(rewards) + STD_EPSILON)
    return centred.nan_to_num(0.0).masked_fill(zero_std(rewards)[:, None], 0.0)


def token_weights(mask: Tensor, aggregation: str, max_completion_length: int) -> Tensor:
    """Weight of each token's loss in the step's loss, over all B rows. mask (B, T) of 0 and 1 -> (B, T).

    sequence: 1 / (B T_i), the paper's. Not the policy gradient: tokens of long completions count less than others.
    token: 1 / sum of all T_i of the step, as TRL and verl; DAPO's formula takes each group's own sum.
    constant: 1 / (B L_max), Dr. GRPO: all tokens count alike, so lengths bias nothing.
    """
    if aggregation == "sequence":
        return mask / (len(mask) * mask.sum(1, keepdim=True).clamp(min=1))
    if aggregation == "token":
        return mask / mask.sum().clamp(min=1)
    return mask / (len(mask) * max_completion_length)


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


def minibatches(samples: Samples, number: int) -> Iterator[tuple[Samples, slice]]:
    """Equal shares of the prompts with their completions, and the rows of these."""
    prompts, size = len(samples.prompt_ids) // number, len(samples.completion_ids) // number
    for i in range(number):
        these, rows = slice(i * prompts, (i + 1) * prompts), slice(i * size, (i + 1) * size)
        yield Samples(*(x[these] for x in samples[:2]), *(x[rows] for x in samples[2:])), rows


def update(model, optimizer, batch: Batch, own: Tensor, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of episodes, of whose tokens `own`
    (B, T) were sampled. Returns metrics."""
    samples, groups = batch.samples, batch.rewards.view(-1, args.num_generations)
    advantage = advantages(groups, args.scale_rewards).view(-1, 1)
    mask = own
    if args.mask_truncated_completions:
        mask = mask & samples.ended[:, None]
    longest = args.max_turns * args.max_completion_length
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    norms: list[Tensor] = []
    for _ in range(args.num_iterations):
        means = Means(mask.sum().clamp(min=1))
        for minibatch, here in minibatches(samples, args.num_minibatches):
            if not norms:
                first = Means(mask[here].sum().clamp(min=1))
            weights = token_weights(mask[here].to(samples.logps.dtype), args.aggregation, longest)
            optimizer.zero_grad(set_to_none=True)
            parts = micro_batches(minibatch, args.micro_batch_size, args.micro_batch_tokens)
            for (part, inputs), counts in deal(parts, model):  # to this process, of perhaps several
                with autocast(model.device, args.precision):
                    logps, entropy = completion_logps(model, *inputs, args.temperature)
                rows, width = part + here.start, logps.shape[1]
                old_logps, valid = samples.logps[rows, :width], counts * mask[rows, :width]
                loss, clipped = policy_loss(logps, old_logps, advantage[rows], args.epsilon, high)
                if batch.ref_logps is not None:
                    kl = k3(logps, batch.ref_logps[rows, :width])
                    loss = loss + args.beta * kl
                    means.add(valid, kl=kl)
                (counts * loss * weights[part, :width]).sum().backward()
                logps = logps.detach()
                means.add(valid, clip_fraction=clipped, approx_kl=k3(old_logps, logps), entropy=entropy)
                if not norms:
                    first.add(valid, sampler_gap=(logps - old_logps).abs())
            norms.append(clip_gradients(model.parameters(), args.max_grad_norm))
            optimizer.step()
    return first.read() | means.read() | {"grad_norm": torch.stack(norms).mean().item()}


def play(model, tokenizer, make: Any, rows: Sequence[dict], num_samples: int, temperature: float, key: tuple,
         args: Args) -> Episodes:  # fmt: skip
    """`num_samples` episodes of each row's prompt, with environments that `make` makes. key: as in `sample_all`."""
    size = len(rows) * num_samples
    games = Environments(make, rows, num_samples, key, args.environment_seconds, args.max_total_length)
    rows = [opened(row, text, getattr(make, "tools", [])) for row, text in zip(rows, games.openings)]
    prompts = [encode_prompt(row, tokenizer) for row in rows]
    if (longest := max(map(len, prompts))) + args.max_completion_length > args.max_total_length:
        raise UserError(f"with what reset of --environment adds, a prompt has {longest} tokens: raise "
                        "--max-total-length, or lower --max-completion-length")  # fmt: skip
    frames = [around(row, tokenizer, getattr(make, "role", "user")) for row in rows]
    stop = args.stop or getattr(make, "stop", ())
    eos = eos_ids(model, tokenizer)
    ends = sorted({*eos, *stop_ids(tokenizer, tuple(stop))})
    ids, own, logps = ([[] for _ in range(size)] for _ in range(3))
    rewards, turns, cut = [0.0] * size, [0] * size, ["turns"] * size
    alive = list(range(size))
    for turn in range(args.max_turns):
        # the first turns of a group share their prompt
        contexts = [prompts[i // num_samples] + ids[i] for i in alive] if turn else prompts
        with autocast(model.device, args.precision):
            sampled = sample_all(model, contexts, 1 if turn else num_samples, args.max_completion_length, ends,
                                 temperature, args.sample_batch_size, (*key, turn) if turn else key)  # fmt: skip
        lengths, whole, texts = sampled.completion_mask.sum(1).tolist(), {}, {}
        for row, i in enumerate(alive):
            tokens = sampled.completion_ids[row, : lengths[row]].tolist()
            stopped = until_stop(tokens, tokenizer, tuple(stop))
            tokens, whole[i] = tokens[: stopped or len(tokens)], stopped > 0 or bool(sampled.ended[row])
            ids[i] += tokens
            own[i] += [True] * len(tokens)
            logps[i] += sampled.logps[row, : len(tokens)].tolist()
            texts[i] = tokenizer.decode(tokens, skip_special_tokens=True)

        going, failures = [], []
        for i, step in games.step(texts).items():
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
        alive = sorted(going)
        if not alive:
            break
    device, kind = model.device, sampled.logps.dtype

    def padded(values: list[list], dtype: torch.dtype) -> Tensor:
        rows = [torch.tensor(value, dtype=dtype, device=device) for value in values]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    mask = padded([[True] * len(row) for row in ids], torch.bool)
    samples = Samples(*pad_left(prompts, device), padded(ids, torch.long), mask, padded(logps, kind),
                      torch.tensor([reason == "" for reason in cut], device=device))  # fmt: skip
    return Episodes(samples, padded(own, torch.bool), torch.tensor(rewards), turns, cut)


def collect(model, tokenizer, make: Any, task: Task, step: int, args: Args) -> Episodes:
    """Plays G episodes of each of the step's P prompts. --missing-eos-penalty is off the rewards."""
    first = (step - 1) * args.num_prompts
    rows = [task.train(first + i, args.seed) for i in range(args.num_prompts)]
    episodes = play(model, tokenizer, make, rows, args.num_generations, args.temperature,
                    (args.seed, "train", step), args)  # fmt: skip
    return episodes._replace(rewards=episodes.rewards - args.missing_eos_penalty * ~episodes.samples.ended.cpu())


def evaluate(model, tokenizer, make: Any, task: Task, args: Args) -> dict[str, float]:
    """Success, a reward of 1, of greedy and sampled episodes of held-out rows. Leaves the global generators as they
    were: environments may draw from them."""
    rows, n, before = task.heldout[: args.eval_prompts], args.eval_samples, rng_state()
    key = (args.seed, "evaluation")
    try:
        greedy = play(model, tokenizer, make, rows, 1, 0.0, key, args).rewards
        sampled = play(model, tokenizer, make, rows, n, args.temperature, key, args).rewards
    finally:
        set_rng_state(before)
    right = (sampled == 1).view(-1, n).sum(1).tolist()
    chances = {f"eval/pass@{k}": mean([pass_at_k(n, c, k) for c in right]) for k in sorted({1, n})}
    return {"eval/greedy": mean((greedy == 1).double().tolist()), **chances, "eval/reward": mean(sampled.tolist())}


def shown(tokenizer, episodes: Episodes, count: int = 2) -> str:
    """The first episodes, turn by turn."""
    samples, texts = episodes.samples, []
    prompt = samples.prompt_ids[0][samples.prompt_mask[0]].tolist()
    for i in range(min(count, len(episodes.own))):
        tokens, own = (x[i][samples.completion_mask[i]].tolist() for x in (samples.completion_ids, episodes.own))
        texts.append(transcript(tokenizer, prompt, tokens, own, episodes.rewards[i].item(), episodes.cut[i]))
    return "\n".join(texts)


def zero_std(groups: Tensor) -> Tensor:
    """Which groups have equal rewards, or none that is known. NaN is left out. (P, G) -> (P,) bool."""
    low, high = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
    return ~(high > low)


@torch.no_grad()
def reference_logps(model, ref_model, batch: Batch, args: Args) -> Tensor:
    """Log-probabilities (B, T) under the reference: `ref_model`, or the policy without its LoRA adapters."""
    out = torch.zeros_like(batch.samples.logps)
    with autocast(model.device, args.precision), nullcontext() if ref_model else model.disable_adapter():
        with unsharded(model, ref_model):
            for rows, inputs in share(micro_batches(batch.samples, args.micro_batch_size, args.micro_batch_tokens)):
                logps, _ = completion_logps(ref_model or model, *inputs, args.temperature)
                out[rows, : logps.shape[1]] = logps
    return total(out)


def check_groups(args: Args) -> None:
    """Raises UserError for groups that cannot be compared or split, and for a reference that cannot be reset."""
    if args.num_generations < 2:
        raise UserError("--num-generations must be at least 2: a group of one has no other reward to compare with")
    if "" in args.stop:
        raise UserError("--stop has an empty text, which would end every turn: leave it out")
    if args.num_prompts % args.num_minibatches:
        raise UserError(f"--num-minibatches {args.num_minibatches} must divide --num-prompts {args.num_prompts}")
    if args.reset_reference_every and (args.lora_rank or args.beta == 0):
        right = "leave out --lora-rank" if args.lora_rank else "give a --beta above 0"
        raise UserError(f"--reset-reference-every needs a reference model of its own: {right}")
    size, group = args.micro_batch_size, args.num_generations
    if not args.micro_batch_tokens and size % group and group % size:
        raise UserError(f"--micro-batch-size {size} must be a multiple or a divisor of --num-generations {group}")


def train(args: Args) -> list[dict]:
    device = prepare(args)
    make = load_environment(args.environment)
    if not args.task and not hasattr(make, "task"):
        raise UserError(f"--environment {args.environment} has no prompts of its own: give --task")
    task = load_task(args.task, args.prompt_column) if args.task else make.task()
    model, tokenizer = load_policy(args, device)
    check_tools(make, tokenizer)
    settings = resolve_for(model, args, PRESETS)
    without_dropout(model)
    check_groups(args)
    check_model(model, args.precision)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if (args.max_total_length or 0) > context:
        raise UserError(f"--max-total-length {args.max_total_length} is beyond the {context} tokens that --model takes")
    args.max_total_length = args.max_total_length or int(min(context, 4096))
    task = usable_task(task, lambda row: (encode_prompt(opened(row, "", getattr(make, "tools", [])), tokenizer),),
                       args.max_total_length - args.max_completion_length, args.max_prompt_length,
                       "lower --max-completion-length")  # fmt: skip
    ref_model = load_reference(args, device) if args.beta > 0 else None
    moving = ref_model if args.reset_reference_every else None  # is reset below, and so belongs to the run's state
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=args.learning_rate, betas=(0.9, args.adam_beta2),
                                  weight_decay=args.weight_decay, fused=True)  # fmt: skip
    # memory is that of whole episodes
    settings += check_memory(model, args, prompt=args.max_total_length - args.max_completion_length, reference=True)
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"),
              schedule_depends_on_budget=args.lr_schedule != "constant")  # fmt: skip
    run.print(settings)

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict(),
                "reference": [moving.state_dict()] if moving else []}  # fmt: skip

    if not run.restore(model=model, optimizer=optimizer, reference=(moving,)):
        run.log(0, **evaluate(model, tokenizer, make, task, args))
        run.save(0, state())
    model.train()
    while run.step < args.max_steps:
        start, before = time.perf_counter(), (run.step, state, rng_state())
        step = run.step + 1
        rate = set_learning_rate(optimizer, step, args)

        # collect
        with run.saving(*before):
            episodes = collect(model, tokenizer, make, task, step, args)
        samples = episodes.samples
        sampled, due = time.perf_counter(), run.due(step, args.eval_every)
        if step == 1 or due:
            run.print(shown(tokenizer, episodes))
        batch = Batch(samples, episodes.rewards.to(device), None)
        if args.beta > 0:
            batch = batch._replace(ref_logps=reference_logps(model, ref_model, batch, args))

        # update
        columns = update(model, optimizer, batch, episodes.own, args)
        if moving and step % args.reset_reference_every == 0:
            moving.load_state_dict(trained_state(model), strict=False)  # not strict: tied weights have one name
            optimizer.state.clear()

        # evaluate
        groups, lengths = batch.rewards.view(-1, args.num_generations), episodes.own.sum(1).float()
        columns |= {
            "reward": batch.rewards.nanmean().item(),
            "reward_std": (groups - groups.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().nanmean().item(),
            "frac_zero_std": zero_std(groups).float().mean().item(),
            "length": lengths.mean().item(),
            "truncated": 1 - samples.ended.float().mean().item(),
            "turns": sum(episodes.turns) / len(episodes.turns),
            "observation_tokens": (samples.completion_mask & ~episodes.own).sum().item() / len(episodes.own),
            **{
                f"cut/{why}": mean([float(c == why) for c in episodes.cut])
                for why in ("turn", "total", "turns", "fault")
            },
            "learning_rate": rate,
            **model.sampler_columns,
            "time/sample": sampled - start,
            "time/step": time.perf_counter() - start,
        }
        columns["time/tokens_per_second"] = lengths.sum().item() / columns["time/step"]
        if due:
            with run.saving(step, state, columns=columns):
                columns |= evaluate(model, tokenizer, make, task, args)
        run.log(step, **columns)
        if line := advice(run.history):
            run.print(f"step {step}: {line}")
        run.end_step(step, state)

    curves = {"reward": ("reward",), "held-out": ("eval/[!d]*",), "entropy per token": ("entropy",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train)
