r"""VinePPO: a value for each step of reasoning, by sampling on from there.

Kazemnejad et al. 2024, "VinePPO: Refining Credit Assignment in RL Training of LLMs" (arXiv 2410.01679, section 4).

Parent: grpo.py. Each step of a completion has its own advantage, by fresh continuations of the states before and behind
it.

A text can be continued from anywhere, so the value of half an answer needs no critic: sample it to the end K times and
take the mean reward. A step is reinforced by how much it raised that value. Maximises

    J(theta) = E  1/(G L_max) sum_i sum_t { min[ rho_it A_it, clip(rho_it, 1 - eps, 1 + eps_high) A_it ] - beta k3_it }

    s_0, s_1, ...  states of y_i: x, and x with y_i up to where each step ends
    V(s)     = 1/K sum_j R(s, z_j)      mean reward of K fresh completions z_j that pi_old samples from s
    A_it     = V(s_k+1) - V(s_k)        for all tokens t of step k; R_i takes the place of V behind the last step
    L_max    --max-completion-length, for y_i and for a state with its continuation alike
    K, steps --num-continuations, --step-separator: a step ends behind each token that holds one of these strings
    x, y_i, R_i, G, rho_it, eps, eps_high, beta, k3_it, pi_old   as in grpo.py

At rho = 1 and beta = 0 the expected gradient is exactly that of E[R], divided by L_max, for every K from 1 on: a
continuation knows nothing of the completion but its state. The advantages of a completion's steps add up to R - V(x).
With one step, this is REINFORCE with K more samples for a baseline. Whitening, the mean over tokens and more than one
update on a batch add a bias.

Run
    python algos/vineppo.py                                                          the embedded model learns countdown
    python algos/vineppo.py --num-continuations 3 --max-steps 20                     a smaller one
    python algos/vineppo.py --step-separator ,                                       coarser steps: the two equations
    python algos/vineppo.py --model realtreetune/rho-1b-sft-GSM8K --task gsm8k --num-iterations 2 --num-minibatches 8 \
        --temperature 0.6 --beta 1e-4 --aggregation token --whiten-advantages --max-completion-length 1024 \
        --max-steps 650 --warmup-steps 20
                                                                                     the authors' settings (their code;
                                                                                     it adds top-p 0.9)
    python algos/vineppo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing

Expect
    The default run: held-out countdown goes from greedy 0.01, pass@1 0.08, pass@8 0.43 to greedy 0.43, pass@1 0.33,
    pass@8 0.75 after 20 steps and 0.47, 0.41, 0.69 after 60 (seed 1, 128 prompts), in 130 CPU seconds. A step trains on
    128 completions and samples 2,300 at first, 1,500 at the end, as states repeat: 108,000 in all. grpo.py reaches
    0.58, 0.53, 0.69 with half as many, 51,200. It trains on all of them, and vineppo.py on 7,680: where sampling is all
    that costs, step values do not pay here.
    `python benchmarks/credit.py`: correlation with the true advantages of steps (by 256 continuations) of a fixed
    policy, mean of three sets of prompts with Student's 95 % interval: K = 9 0.85 +- 0.03, K = 3 0.74 +- 0.08, GRPO's
    advantage 0.45 +- 0.06, the critic of ppo_lm.py after 20 batches 0.21 +- 0.21 (GAE: 0.38 +- 0.10). Continuations of
    other states: 0.02 +- 0.08.
    Better credit is no faster learning here. With K = 3, 25 steps: mean reward of the last half 0.34 +- 0.02, grpo.py
    0.35 +- 0.01, with the whole completion as one step 0.33 +- 0.01, grpo.py with as many samples 0.44 +- 0.005.
    VinePPO is ahead of grpo.py in 6 of 10 seeds and of one step in 8, where 9 were asked before (10 seeds, 95 %
    intervals; benchmarks/effects.py, vineppo-credit).

Metrics
    As in grpo.py, without frac_zero_std, and
    reward_std     over the batch
    steps          of a completion, mean. 1: no separator was found, and V(x) is but a baseline
    sampled        completions and continuations of the step: what it cost. sampled_tokens: their tokens

Differences
    - The advantages are not whitened, and the denominator is constant: both identities hold. The authors' code whitens
      over the tokens of all processes' micro-batches, and takes the mean over those of one (McGill-NLP/VinePPO,
      src/treetune/trainers/ppo_trainer.py). nano-aha-moment (nano_r1_script.py) does not whiten either.
    - A step ends behind a token, and what comes later does not move that end. The authors cut the text where a sentence
      or line ends, which they see in what follows, and merge short parts; V there is then not quite the expected
      reward (src/treetune/tasks/math_extract_steps_inplace.py). nano-aha-moment cuts behind every 100 tokens.
    - Continuations have the tokens that the completion had left, as in nano-aha-moment. One that is cut off keeps its
      reward, less --missing-eos-penalty, as a completion does; the authors give all of these a fixed one.
    - Tokens are never encoded anew: a state is the sampled tokens. The authors send text.
    - A state that several completions of a prompt pass is estimated once, as in the authors' code.
    - The authors sample with top-p 0.9 and score without it; here there is none.
    - beta is 0 for the embedded model, 0.04 for others, as in grpo.py. The authors: 1e-4. Their k3 is clipped to 0 to
      10 and summed over a completion, where --aggregation token takes the mean over tokens. So the penalty of the
      command above is theirs divided by the mean length.
    - Their configuration for GSM8K estimates the values of 25 steps of a completion at most, ours of all.
    - A completion whose reward functions all return None has advantage 0 in its last step; the others have theirs.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.checkpoint import rng_state
from utils.checks import check_model
from utils.cli import main, prepare
from utils.distributed import clip_gradients, deal, share, total, unsharded
from utils.errors import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UserError
from utils.evaluation import advice, decode, evaluate, show_samples
from utils.lm import Means, Samples, completion_logps, micro_batches, sample_all
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
from utils.rewards import Scored, lowered, make_scorer
from utils.run import Run
from utils.schedule import set_learning_rate
from utils.tasks import Task, load_task
from utils.text import encode_prompt, present, usable_prompts
from utils.turns import stop_ids

NAME, TITLE = "vineppo", "VinePPO"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, adam_beta2=0.999, num_prompts=16, num_generations=8, sample_batch_size=512,
                 micro_batch_size=256, micro_batch_tokens=0, max_completion_length=20, beta=0.0, precision="float32"),
    "full": dict(learning_rate=1e-6, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, beta=0.04,
                 precision="bfloat16"),
    "lora": dict(learning_rate=1e-5, adam_beta2=0.999, num_prompts=64, num_generations=8, sample_batch_size=32,
                 micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512, beta=0.04,
                 precision="bfloat16"),
}  # fmt: skip


@dataclass
class Args(PolicyArgs):  # and --model --precision --lora-rank --seed --device ...: utils/models.py, utils/cli.py
    task: str = "countdown"
    """countdown, sort, gsm8k, a .jsonl or .parquet file, or a hub dataset"""
    prompt_column: str = "prompt"
    """column of a dataset with the prompt: text or chat messages"""
    reward: tuple[str, ...] = ()
    """reward functions (FILE.py:NAME or PACKAGE.MODULE:NAME, called as by TRL) and reward models (folder or hub name;
    ensembles: append :mean, :worst-case or :uncertainty=L); none: the task's own score"""
    reward_weights: tuple[float, ...] = ()
    """one weight per reward function; none: all 1"""
    combine: Literal["sum", "min", "mean-std"] = "sum"
    """several reward models as one: the least of their raw scores, or mean minus deviation. It has no weight"""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """subtracted from the reward of a completion that was cut off, in training"""
    max_steps: PositiveInt = 60
    """steps: each samples, then updates"""
    num_prompts: PositiveInt | None = None
    """prompts per step"""
    num_generations: PositiveInt | None = None
    """completions per prompt: G"""
    step_separator: tuple[str, ...] | None = None
    """a step ends behind each token that holds one of these strings; None: a line's end, or, where the tokenizer has
    none, = and ,"""
    num_continuations: PositiveInt = 9
    """fresh continuations of each state: K"""
    sample_batch_size: PositiveInt | None = None
    """completions sampled at once, in training and evaluation, rounded to whole prompts; limits the cache's memory"""
    max_completion_length: PositiveInt | None = None
    """most new tokens per completion"""
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
    whiten_advantages: bool = False
    """bring the advantages of the batch's tokens to mean 0 and standard deviation 1"""
    aggregation: Literal["sequence", "token", "constant"] = "constant"
    """mean over each completion's tokens, then completions; mean over all tokens; sum over B * max_completion_length"""
    mask_truncated_completions: bool = False
    """leave truncated completions out of the loss"""
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


class Batch(NamedTuple):
    """What one step learns from. P prompts, G completions of each, B = P * G rows."""

    samples: Samples
    rewards: Tensor  # (B,) float32, NaN: skipped
    ref_logps: Tensor | None  # (B, T), None where beta is 0
    ends: Tensor  # (B, T) bool: `step_ends`
    values: Tensor  # (B, S) float32: V before each step


def step_ends(ids: Tensor, mask: Tensor, separators: Tensor) -> Tensor:
    """Behind which tokens of completions a step ends and another one begins, (B, T) bool: behind each separator that
    another token follows. ids, mask (B, T), separators: token ids.

    What comes later never moves an end that was passed: else V there would not be the expected reward.
    """
    return torch.isin(ids, separators) & pad(mask[:, 1:], (0, 1))


def advantages(rewards: Tensor, values: Tensor, ends: Tensor) -> Tensor:
    """V behind a token's step minus V before it, R for V behind the last step: arXiv 2410.01679, section 4.

    rewards (B,), values (B, S), ends (B, T) -> (B, T). Tokens of a step share it. 0 where one of the two is NaN.
    """
    step, last = ends.cumsum(1) - ends.long(), ends.sum(1, keepdim=True)
    behind = pad(values[:, 1:], (0, 1)).scatter(1, last, rewards[:, None].to(values))
    return (behind - values).gather(1, step).nan_to_num(0.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and unbiased standard deviation 1 over the tokens of `mask`, 0 elsewhere."""
    kept = values[mask]
    if len(kept) < 2:  # all are masked
        return torch.zeros_like(values)
    return (values - kept.mean()) * (kept.var() + 1e-8).rsqrt() * mask


def token_weights(mask: Tensor, aggregation: str, max_completion_length: int) -> Tensor:
    """Weight of each token's loss in the step's loss, over all B rows. mask (B, T) of 0 and 1 -> (B, T).

    constant: 1 / (B L_max): at rho = 1 and beta = 0 exactly the policy gradient in expectation, divided by L_max.
    token: 1 / sum of all T_i of the step, as the authors' code. sequence: 1 / (B T_i). Both are biased.
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


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of completions. Returns metrics."""
    samples, advantage = batch.samples, advantages(batch.rewards, batch.values, batch.ends)
    mask = samples.completion_mask
    if args.mask_truncated_completions:
        mask = mask & samples.ended[:, None]
    if args.whiten_advantages:
        advantage = whiten(advantage, mask)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    norms: list[Tensor] = []
    for _ in range(args.num_iterations):
        means = Means(mask.sum().clamp(min=1))
        for minibatch, here in minibatches(samples, args.num_minibatches):
            if not norms:
                first = Means(mask[here].sum().clamp(min=1))
            weights = token_weights(mask[here].to(samples.logps.dtype), args.aggregation, args.max_completion_length)
            optimizer.zero_grad(set_to_none=True)
            parts = micro_batches(minibatch, args.micro_batch_size, args.micro_batch_tokens)
            for (part, inputs), counts in deal(parts, model):  # to this process, of perhaps several
                with autocast(model.device, args.precision):
                    logps, entropy = completion_logps(model, *inputs, args.temperature)
                rows, width = part + here.start, logps.shape[1]
                old_logps, valid = samples.logps[rows, :width], counts * mask[rows, :width]
                loss, clipped = policy_loss(logps, old_logps, advantage[rows, :width], args.epsilon, high)
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


def collect(model, tokenizer, task: Task, score: Callable, step: int, args: Args) -> tuple[Samples, Scored]:
    """Samples and scores G completions for each of the step's P prompts."""
    first = (step - 1) * args.num_prompts
    rows = [task.train(first + i, args.seed) for i in range(args.num_prompts)]
    prompts = [present(row, tokenizer) for row in rows]
    tokens = [encode_prompt(row, tokenizer) for row in rows]
    with autocast(model.device, args.precision):
        samples = sample_all(model, tokens, args.num_generations, args.max_completion_length,
                             eos_ids(model, tokenizer), args.temperature, args.sample_batch_size,
                             (args.seed, "train", step))  # fmt: skip
    texts, token_lists = decode(samples, tokenizer)
    repeated, shown = ([x for x in xs for _ in range(args.num_generations)] for xs in (rows, prompts))
    return samples, lowered(score(repeated, shown, texts, token_lists, step), samples.ended, args.missing_eos_penalty)


def state_values(model, tokenizer, task: Task, score: Callable, samples: Samples, ends: Tensor, step: int,
                 args: Args) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """V before each step of the completions, (B, S): the mean reward of K continuations of the state, which are prompt
    and tokens so far. A state that several completions pass has one estimate. A continuation may have as many tokens as
    the completion had left. And what was sampled, as columns."""
    group, first, kept = args.num_generations, (step - 1) * args.num_prompts, args.num_continuations
    rows = [task.train(first + i, args.seed) for i in range(args.num_prompts)]
    starts = [[0, *(1 + end.nonzero()[:, 0]).tolist()] for end in ends]
    passed = [[(i // group, tuple(ids[:t])) for t in starts[i]]
              for i, ids in enumerate(samples.completion_ids.tolist())]  # fmt: skip
    # alike long ones together, which need less padding; those of a prompt together
    states = sorted({state for path in passed for state in path}, key=lambda state: (len(state[1]), state))
    with autocast(model.device, args.precision):
        drawn = sample_all(model, [encode_prompt(rows[p], tokenizer) + list(prefix) for p, prefix in states], kept,
                           [args.max_completion_length - len(prefix) for _, prefix in states],
                           eos_ids(model, tokenizer), args.temperature, args.sample_batch_size,
                           (args.seed, "values", step))  # fmt: skip
    _, rest = decode(drawn, tokenizer)
    repeated = [state for state in states for _ in range(kept)]
    token_lists = [[*prefix, *ids] for (_, prefix), ids in zip(repeated, rest)]
    texts = tokenizer.batch_decode(token_lists, skip_special_tokens=True)
    of_states = [rows[p] for p, _ in repeated]
    shown = [present(row, tokenizer) for row in of_states]
    scored = lowered(score(of_states, shown, texts, token_lists, step), drawn.ended, args.missing_eos_penalty)
    value = dict(zip(states, scored.rewards.view(-1, kept).nanmean(1)))
    values = pad_sequence([torch.stack([value[state] for state in path]) for path in passed], batch_first=True)
    columns = {"steps": sum(map(len, starts)) / len(starts), "sampled": len(ends) + len(rest),
               "sampled_tokens": (samples.completion_mask.sum() + drawn.completion_mask.sum()).item()}  # fmt: skip
    return values.to(model.device), columns


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


def separator_ids(tokenizer, args: Args) -> list[int]:
    """The tokens that end a step. Fills in --step-separator. Raises UserError for a string that no token holds."""
    args.step_separator = args.step_separator or (("\n",) if stop_ids(tokenizer, ("\n",)) else ("=", ","))
    if missing := [text for text in args.step_separator if not stop_ids(tokenizer, (text,))]:
        raise UserError(f"--step-separator {missing[0]!r}: no token of --model holds it, so it would never end a step")
    return stop_ids(tokenizer, args.step_separator)


def check_groups(args: Args) -> None:
    """Raises UserError for batches that cannot be split, and for a reference that cannot be reset."""
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
    task = load_task(args.task, args.prompt_column)
    score = make_scorer(task, args.reward, args.reward_weights, args.max_steps, device, args.trust_remote_code)
    model, tokenizer = load_policy(args, device)
    settings = resolve_for(model, args, PRESETS)
    without_dropout(model)
    check_groups(args)
    separators = torch.tensor(separator_ids(tokenizer, args), device=device)
    settings += f"\nsteps end behind {', '.join(map(repr, args.step_separator))}"
    check_model(model, args.precision)
    task = usable_prompts(task, model, tokenizer, args)
    ref_model = load_reference(args, device) if args.beta > 0 else None
    moving = ref_model if args.reset_reference_every else None  # is reset below, and so belongs to the run's state
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=args.learning_rate, betas=(0.9, args.adam_beta2),
                                  weight_decay=args.weight_decay, fused=True)  # fmt: skip
    prompts = [encode_prompt(row, tokenizer) for row in task.heldout]
    settings += check_memory(model, args, prompt=max(map(len, prompts)), reference=True)
    evaluation = partial(evaluate, model, tokenizer, task, score, args.eval_prompts, args.eval_samples,
                         args.max_completion_length, args.temperature, args.seed,
                         rows_at_once=args.sample_batch_size, precision=args.precision)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"),
              schedule_depends_on_budget=args.lr_schedule != "constant")  # fmt: skip
    run.print(settings)

    def state() -> dict:
        return {"model": trained_state(model), "optimizer": optimizer.state_dict(),
                "reference": [moving.state_dict()] if moving else []}  # fmt: skip

    if not run.restore(model=model, optimizer=optimizer, reference=(moving,)):
        run.log(0, **evaluation())
        run.save(0, state())
    model.train()
    while run.step < args.max_steps:
        start, before = time.perf_counter(), (run.step, state, rng_state())
        step = run.step + 1
        rate = set_learning_rate(optimizer, step, args)

        # collect
        with run.saving(*before):
            samples, scored = collect(model, tokenizer, task, score, step, args)
            ends = step_ends(samples.completion_ids, samples.completion_mask, separators)
            values, cost = state_values(model, tokenizer, task, score, samples, ends, step, args)
        sampled, due = time.perf_counter(), run.due(step, args.eval_every)
        if step == 1 or due:
            run.print(show_samples(tokenizer, samples, scored.rewards.tolist(), scored.extra))
        batch = Batch(samples, scored.rewards.to(device), None, ends, values)
        if args.beta > 0:
            batch = batch._replace(ref_logps=reference_logps(model, ref_model, batch, args))

        # update
        columns = update(model, optimizer, batch, args)
        if moving and step % args.reset_reference_every == 0:
            moving.load_state_dict(trained_state(model), strict=False)  # not strict: tied weights have one name
            optimizer.state.clear()

        # evaluate
        rewards, lengths = batch.rewards[~batch.rewards.isnan()], samples.completion_mask.sum(1).float()
        columns |= {
            "reward": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            **cost,
            "length": lengths.mean().item(),
            "truncated": 1 - samples.ended.float().mean().item(),
            "learning_rate": rate,
            **scored.columns,
            **model.sampler_columns,
            "time/sample": sampled - start,
            "time/step": time.perf_counter() - start,
        }
        columns["time/tokens_per_second"] = lengths.sum().item() / columns["time/step"]
        if due:
            with run.saving(step, state, columns=columns):
                columns |= evaluation(step=step)
        run.log(step, **columns)
        if line := advice(run.history):
            run.print(f"step {step}: {line}")
        run.end_step(step, state)

    curves = {"reward": ("reward",), "held-out": ("eval/[!d]*",), "entropy per token": ("entropy",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train)
