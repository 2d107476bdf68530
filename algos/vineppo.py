r"""VinePPO: a value for each step of reasoning, by sampling on from there.

Kazemnejad et al. 2024, "VinePPO: Refining Credit Assignment in RL Training of LLMs" (arXiv 2410.01679, section 4).

Parent: grpo.py. Each step has its own advantage, by fresh continuations of the states before and behind it.

The value of half an answer needs no critic: sample it to the end K times and take the mean reward. A step is reinforced
by how much it raised that value. Maximises

    J(theta) = E  1/(G L_max) sum_i sum_t { min[ rho_it A_it, clip(rho_it, 1 - eps, 1 + eps_high) A_it ] - beta k3_it }

    s_0, s_1, ...  states of y_i: x, and x with y_i up to where each step ends
    V(s)     = 1/K sum_j R(s, z_j)      mean reward of K fresh completions z_j that pi_old samples from s
    A_it     = V(s_k+1) - V(s_k)        for all tokens t of step k; R_i takes the place of V behind the last step
    L_max    --max-completion-length, for y_i and for a state with its continuation alike
    K, steps --num-continuations, --step-separator: a step ends behind each token that holds one of these strings
    x, y_i, R_i, G, rho_it, eps, eps_high, beta, k3_it, pi_old   as in grpo.py

At rho = 1 and beta = 0 the expected gradient is exactly that of E[R], divided by L_max, for every K from 1 on. A
completion's advantages add up to R - V(x). Whitening, the mean over tokens and several updates on a batch add a bias.

Run
    python algos/vineppo.py                                                          the tiny model learns countdown
    python algos/vineppo.py --step-separator ,                                       coarser steps: the two equations
    python algos/vineppo.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --lora-rank 32 --gradient-checkpointing
    The authors' settings: algos/README.md.

Expect
    The default run takes 0.7 minutes on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.09, pass@8 0.45
    to greedy 0.48, pass@1 0.41, pass@8 0.64 (seed 1, 128 prompts). A step trains on 128 completions and samples 2,300
    at first, 1,500 at the end. grpo.py reaches 0.56, 0.51, 0.69 with half as many.
    Correlation with the true advantages of steps of a fixed policy (benchmarks/README.md, Credit), with 95 % intervals
    over prompts: K = 9 0.85 +- 0.03, K = 3 0.74 +- 0.08, GRPO's advantage 0.45 +- 0.06, the critic of ppo_lm.py after
    20 batches 0.21 +- 0.21 (GAE: 0.38 +- 0.10). Continuations of other states: 0.02 +- 0.08.
    Better credit is no faster learning here: with K = 3, 25 steps, the mean reward of the last half is 0.34 +- 0.02,
    grpo.py 0.35 +- 0.01, one step 0.33 +- 0.01, grpo.py with as many samples 0.44 +- 0.005 (10 seeds; vineppo-credit).

Metrics
    As in grpo.py, without frac_zero_std, and
    reward_std     over the batch
    steps          of a completion, mean. 1: V(x) is but a baseline
    sampled        completions and continuations of the step: what it cost. sampled_tokens: their tokens

Differences
    - The advantages are not whitened, and the denominator is constant: both identities hold. The authors' code whitens
      over all processes' micro-batches, and takes the mean over the tokens of one (McGill-NLP/VinePPO, ppo_trainer.py).
    - A step ends behind a token. The authors see in what follows where a sentence ends, which biases V a little.
    - A continuation that is cut off keeps its reward, less --missing-eos-penalty; the authors give a fixed one.
    - The authors sample with top-p 0.9 and score without it; here there is none. Their beta is 1e-4.
"""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.core import Run, UserError, main, prepare
from utils.data import encode_prompt, load_task, usable
from utils.dist import (
    Means,
    Samples,
    Trained,
    averaged,
    clip_gradients,
    micro_batches,
    moments,
    set_rate,
    share,
    start,
    total,
)
from utils.lm import PolicyArgs, alarm, autocast, completion_logps, load_model, resolve, sample_all, save_model
from utils.rewards import decode, evaluate, make_scorer, sample_rows, shown

NAME, TITLE = "vineppo", "VinePPO"
LARGE = dict(learning_rate=1e-6, sample_batch_size=32, micro_batch_size=64, micro_batch_tokens=4096,
             max_completion_length=512, num_prompts=64, beta=0.04, precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, sample_batch_size=512, micro_batch_size=256, micro_batch_tokens=0,
                 max_completion_length=20, num_prompts=16, beta=0.0, precision="float32"),
    "full": LARGE,
    "lora": LARGE | dict(learning_rate=1e-5),
}  # fmt: skip


@dataclass
class Args(PolicyArgs):  # and --model --precision --lora-rank --seed --device ...: utils/lm.py, utils/core.py
    task: str = "countdown"
    """countdown, sort, gsm8k, reasoning_gym:NAME, a .jsonl or .parquet file, or a hub dataset"""
    prompt_column: str = "prompt"
    """column of a dataset with the prompt: text or chat messages"""
    reward: tuple[str, ...] = ()
    """FILE.py:NAME or PACKAGE.MODULE:NAME, called as by TRL, and reward models; none: the task's own score"""
    reward_weights: tuple[float, ...] = ()
    """one weight per reward function; none: all 1"""
    combine: Literal["sum", "min", "mean-std"] = "sum"
    """several reward models as one: the least of their raw scores, or mean minus deviation. It has no weight"""
    missing_eos_penalty: float = 0.0
    """subtracted from the reward of a completion that was cut off, in training"""
    max_steps: int = 60
    """steps: each samples, then updates"""
    num_prompts: int | None = None
    """prompts per step, of all processes"""
    num_generations: int = 8
    """completions per prompt: G"""
    step_separator: tuple[str, ...] | None = None
    """a step ends behind each token that holds one of these strings; None: a line's end, or, where the tokenizer has
    none, = and ,"""
    num_continuations: int = 9
    """fresh continuations of each state: K"""
    sample_batch_size: int | None = None
    """completions sampled at once, rounded to whole prompts; limits the cache's memory"""
    log_samples: int = 0
    """prompts per step whose completions RUN/samples.jsonl keeps, besides those of evaluations"""
    max_completion_length: int | None = None
    """most new tokens per completion"""
    max_prompt_length: int | None = None
    """longer prompts are dropped; None: those that leave no room for twice --max-completion-length in the context"""
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
    whiten_advantages: bool = False
    """bring the advantages of the batch's tokens to mean 0 and standard deviation 1"""
    aggregation: Literal["sequence", "token", "constant"] = "constant"
    """mean over each completion's tokens, then completions; mean over all tokens; sum over B * max_completion_length"""
    mask_truncated_completions: bool = False
    """leave truncated completions out of the loss"""
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


class Batch(NamedTuple):
    """What this process learns from in one step. P prompts, G completions of each, B = P * G rows."""

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

    rewards (B,), values (B, S), ends (B, T) -> (B, T). Tokens of a step share it. NaN where one of the two is.
    """
    step, last = ends.cumsum(1) - ends.long(), ends.sum(1, keepdim=True)
    behind = pad(values[:, 1:], (0, 1)).scatter(1, last, rewards[:, None].to(values))
    return (behind - values).gather(1, step)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and unbiased standard deviation 1 over the tokens of `mask` of all processes, 0 elsewhere."""
    mean, deviation = moments(values[mask])
    return (values - mean) * (deviation.square() + 1e-8).rsqrt() * mask


def token_weights(mask: Tensor, aggregation: str, max_completion_length: int) -> Tensor:
    """Weight of each token's loss in the step's loss, over the B rows of all processes. mask of 0 and 1, (B, T).

    constant: 1 / (B L_max): at rho = 1 and beta = 0 exactly the policy gradient in expectation, divided by L_max.
    token: 1 / sum of all T_i of the step, as the authors' code. sequence: 1 / (B T_i). Both are biased.
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


def update(model, optimizer, batch: Batch, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of completions. Returns metrics."""
    samples, advantage = batch.samples, advantages(batch.rewards, batch.values, batch.ends)
    mask = samples.completion_mask
    if args.mask_truncated_completions:
        mask = mask & samples.ended[:, None]
    if args.whiten_advantages:
        advantage = whiten(advantage, mask & ~advantage.isnan())
    advantage = advantage.nan_to_num(0.0)  # what is unknown teaches nothing
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    numbers = torch.arange(len(mask)).view(-1, args.num_generations)  # of the rows
    gap, norms = Means(), []
    for _ in range(args.num_iterations):
        means = Means()
        for minibatch in numbers.tensor_split(args.num_minibatches):  # the order of the prompts is random
            within, weights = minibatch.flatten(), torch.zeros_like(samples.logps)
            weights[within] = token_weights(mask[within], args.aggregation, args.max_completion_length)
            optimizer.zero_grad(set_to_none=True)
            for rows, inputs in micro_batches(samples, args, within):
                with autocast(model, args.precision):
                    logps, entropy = completion_logps(model, *inputs, args.temperature)
                width = logps.shape[1]
                old_logps, valid = samples.logps[rows, :width], mask[rows, :width]
                loss, clipped = policy_loss(logps, old_logps, advantage[rows, :width], args.epsilon, high)
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


def collect(model, tokenizer, task, score, step: int, args: Args) -> tuple[Samples, Tensor, dict[str, float]]:
    """Samples and scores G completions for each of this process's prompts of the step. Returns rewards and columns."""
    rows = [task.train(i, args.seed) for i in share(range((step - 1) * args.num_prompts, step * args.num_prompts))]
    prompts = [encode_prompt(row, tokenizer) for row in rows]
    samples = sample_all(model, prompts, args.num_generations, args, args.temperature, "train", step)
    rows = [row for row in rows for _ in range(args.num_generations)]
    rewards, columns = score(rows, *decode(samples, tokenizer), step)
    return samples, rewards - args.missing_eos_penalty * ~samples.ended.cpu(), columns


def state_values(model, tokenizer, task, score, samples: Samples, ends: Tensor, step: int,
                 args: Args) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """V before each step of the completions, (B, S): the mean reward of K continuations of the state, which are prompt
    and tokens so far. A state that several completions pass has one estimate. A continuation may have as many tokens as
    the completion had left. And what was sampled, as columns."""
    group, kept = args.num_generations, args.num_continuations
    rows = [task.train(i, args.seed) for i in share(range((step - 1) * args.num_prompts, step * args.num_prompts))]
    starts = [[0, *(1 + end.nonzero()[:, 0]).tolist()] for end in ends]
    passed = [[(i // group, tuple(ids[:t])) for t in starts[i]]
              for i, ids in enumerate(samples.completion_ids.tolist())]  # fmt: skip
    # alike long ones together, which need less padding; those of a prompt together
    states = sorted({state for path in passed for state in path}, key=lambda state: (len(state[1]), state))
    prompts = [encode_prompt(rows[p], tokenizer) + list(prefix) for p, prefix in states]
    drawn = sample_all(model, prompts, kept, args, args.temperature, "values", step)
    repeated = [state for state in states for _ in range(kept)]
    left = torch.tensor([[args.max_completion_length - len(prefix)] for _, prefix in repeated], device=model.device)
    mask, lengths = drawn.completion_mask, drawn.completion_mask.sum(1, keepdim=True)
    count = total(torch.tensor([len(ends) + len(repeated), int(samples.completion_mask.sum() + mask.sum())]))
    drawn = drawn._replace(completion_mask=mask & (torch.arange(mask.shape[1], device=model.device) < left),
                           ended=drawn.ended & (lengths <= left)[:, 0])  # fmt: skip
    token_lists = [[*prefix, *ids] for (_, prefix), ids in zip(repeated, decode(drawn, tokenizer)[1])]
    texts = tokenizer.batch_decode(token_lists, skip_special_tokens=True)
    rewards = score([rows[p] for p, _ in repeated], texts, token_lists, step)[0]
    rewards = rewards - args.missing_eos_penalty * ~drawn.ended.cpu()
    value = dict(zip(states, rewards.view(-1, kept).nanmean(1)))
    values = pad_sequence([torch.stack([value[state] for state in path]) for path in passed], batch_first=True)
    sampled, tokens = count.tolist()
    columns = {"steps": sum(map(len, starts)) / len(starts), "sampled": sampled, "sampled_tokens": tokens}
    return values.to(model.device), columns


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


def separator_ids(tokenizer, args: Args) -> list[int]:
    """The tokens that end a step. Fills in --step-separator. Raises UserError for a string that no token holds."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])

    def holding(string: str) -> list[int]:
        return [i for i, text in enumerate(texts) if string in text]

    args.step_separator = args.step_separator or (("\n",) if holding("\n") else ("=", ","))
    if missing := [text for text in args.step_separator if not holding(text)]:
        raise UserError(f"--step-separator {missing[0]!r}: no token of --model holds it, so it would never end a step")
    return sorted({i for string in args.step_separator for i in holding(string)})


def train(args: Args) -> list[dict]:
    device = start(prepare(args))
    task = load_task(args.task, args.prompt_column)
    model, tokenizer = load_model(args, device)
    settings = resolve(model, args, PRESETS)
    separators = torch.tensor(separator_ids(tokenizer, args), device=device)
    settings += f"\nsteps end behind {', '.join(map(repr, args.step_separator))}"
    # a state is a prompt and up to a whole completion, and gets a continuation as long
    task = usable(task, model, tokenizer, replace(args, max_completion_length=2 * args.max_completion_length))
    score = make_scorer(task, args, tokenizer, device)
    reference = load_model(args, device, frozen=True)[0] if args.beta and not args.lora_rank else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate,
                                  betas=(0.9, args.adam_beta2), weight_decay=args.weight_decay, fused=True)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"))
    run.print(settings)
    parts = {"trained": Trained(model, optimizer)}
    if not run.restore(**parts):
        run.log(0, **evaluate(model, tokenizer, task, score, args, 0, run.keep))
    model.train()
    while run.step < args.max_steps:
        step, begun = run.step + 1, time.perf_counter()
        rate = set_rate(optimizer, step, args)

        # collect
        samples, rewards, columns = collect(model, tokenizer, task, score, step, args)
        ends = step_ends(samples.completion_ids, samples.completion_mask, separators)
        values, cost = state_values(model, tokenizer, task, score, samples, ends, step, args)
        sampled, due = time.perf_counter(), run.due(step, args.eval_every)
        if step == 1:
            run.print(shown(samples, tokenizer, rewards.tolist()))
        ref_logps = reference_logps(model, reference, samples, args) if args.beta else None

        # update
        columns |= cost | update(model, optimizer, Batch(samples, rewards.to(device), ref_logps, ends, values), args)
        alarm(columns.get("sampler_gap"), run, args)

        # evaluate
        run.keep(sample_rows(args.log_samples, samples, tokenizer, {"reward": rewards}))
        lengths = samples.completion_mask.sum(1).float()
        columns |= {
            "reward": rewards.nanmean().item(),
            "reward_std": moments(rewards)[1].item(),
            "length": lengths.mean().item(),
            "truncated": 1 - samples.ended.float().mean().item(),
            "learning_rate": rate,
            "time/sample": sampled - begun,
            "time/step": time.perf_counter() - begun,
        }
        columns["time/tokens_per_second"] = total(lengths.sum()).item() / columns["time/step"]
        if due:
            columns |= evaluate(model, tokenizer, task, score, args, step, run.keep)
        run.log(step, **averaged(columns))
        run.end_step(step, parts)

    curves: dict = {"reward": ("reward",), "held-out": ("eval/*",), "entropy per token": ("entropy",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
