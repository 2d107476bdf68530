r"""Proximal Policy Optimization (PPO) for language models.

Schulman et al. 2017 (arXiv 1707.06347, equations 7 and 9) as in Ziegler et al. 2019, "Fine-Tuning Language Models from
Human Preferences" (arXiv 1909.08593, section 2) and Stiennon et al. 2020, "Learning to summarize from human feedback"
(arXiv 2009.01325, section 3.4).

Parent: grpo.py. A learned critic gives each token its baseline, in place of the other answers of a group.

Each token is an action. Before it, a critic V predicts the return that is still to come. A token is reinforced by how
much better the return was than predicted. Maximises

    J = mean over tokens of  min[ rho_t A_t, clip(rho_t, 1 - eps, 1 + eps_high) A_t ]
                             - c_vf/2 max[ (V_t - R_t)^2, (clip(V_t, V_old,t +- eps_v) - R_t)^2 ]

    rho_t   = pi_theta(y_t | x, y_<t) / pi_old(y_t | x, y_<t)    probability ratio, old = as sampled
    pi_ref  = the policy before the first step
    r_t     = -beta log(pi_old(y_t | .) / pi_ref(y_t | .)), plus the reward of the completion at its last token
    A_t     = sum_k (gamma lambda)^k (r_t+k + gamma V_old,t+k+1 - V_old,t+k)    V after the last token is 0; whitened
    R_t     = A_t + V_old,t                                      return, before whitening
    eps, eps_high, eps_v, c_vf   --epsilon, --epsilon-high, --clip-value, --vf-coef
    beta, gamma, lambda          --beta, --gamma, --gae-lambda

At rho = 1 and gamma = 1, without whitening and with a constant denominator, lambda = 1 gives exactly the gradient of
E[reward] - beta KL(pi_theta || pi_ref) over whole completions, divided by --max-completion-length, for any V. So does a
smaller lambda if V is exact. Whitening and the mean over tokens, the defaults, rescale it, and bias it by each
completion's own part in their numbers. That part vanishes as the batch grows.

Run
    python algos/ppo_lm.py                                                          the embedded model learns countdown
    python algos/ppo_lm.py --task sort --max-steps 40                               a smaller task
    python algos/ppo_lm.py --critic shared --task sort                              one model, with a head for the value
    python algos/ppo_lm.py --model ORG/NAME --task prompts.jsonl --reward rewards.py:accuracy --num-prompts 512 \
        --num-iterations 4 --num-minibatches 1 --learning-rate 1.5e-5 --critic-learning-rate 1.5e-5 \
        --lr-schedule linear --max-steps 1953
                                                                                    Stiennon et al.'s settings (appendix
                                                                                    B.1, 1.3B model, a million episodes)
    python algos/ppo_lm.py --model allenai/Llama-3.1-Tulu-3-8B-DPO --task prompts.jsonl --reward rewards.py:accuracy \
        --reward-weights 10 --missing-eos-penalty 10 --num-prompts 224 --num-iterations 4 --num-minibatches 1 \
        --learning-rate 3e-7 --critic-learning-rate 3e-7 --lr-schedule linear --max-completion-length 2048 \
        --max-steps 446
                                                                                    RLVR of Tulu 3 (arXiv 2411.15124, 8B
                                                                                    model); never run. The authors'
                                                                                    command has 10M episodes, not the
                                                                                    paper's 100,000
    python algos/ppo_lm.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k          a real model, on a GPU

Expect
    The default run takes 3 minutes on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.08, pass@8 0.43
    to greedy 0.57, pass@1 0.54, pass@8 0.74 (seed 1, 128 prompts). Nearly all of the greedy gain comes in the first 20
    steps. grpo.py gets to 0.58, 0.53, 0.69.
    --task sort --max-steps 16: greedy 0.23 to 0.98, pass@1 0.40 to 0.96 (seed 1), in about a minute on a CPU.

Metrics
    reward              mean over the batch, without the penalty; rises. reward_std: over the batch
    reward/task         the task's own score, where --reward is given. A fall while reward rises is over-optimisation
    eval/greedy, eval/pass@1, eval/pass@8   held-out accuracy: the likeliest answer, a sample, the best of eight. If
                        pass@1 rises and greedy stays, the policy only sharpens. A rise of greedy does not rule that out
    eval/distinct       different right texts among a prompt's --eval-samples; falls as the policy sharpens
    explained_variance  of R_t by V_old,t over tokens; rises towards 1, below 0 is worse than a constant
    grad_norm           before clipping, mean over optimizer steps; steady
    kl                  nats per completion against the reference (beta > 0 only); grows slowly
    approx_kl           mean of rho - 1 - log rho over tokens in the last update epoch; 0.001 to 0.03
    clip_fraction       share of tokens whose gradient is cut in the last update epoch; below 0.3
    sampler_gap         mean |log pi_theta - log pi_old| before the first optimizer step; 1e-6 in float32
    engine/weight, engine/above_2, engine/ess   with --sampler, over tokens: mean of pi_theta / pi_engine, its share
                   above 2, effective sample size over the number of tokens; about 1, 0 and 1
    entropy             nats per token; falls, should not reach 0. length: tokens. truncated: share without EOS

Differences
    - The KL penalty is log(pi_old / pi_ref) per token, in the reward, as in the papers. beta is not adaptive.
    - --critic separate: a copy of the model with a scalar head that starts at zero. Stiennon et al. start it from the
      reward model. --critic shared: the head alone, on the policy's own last hidden states (Ziegler et al.).
    - Whitening is over the tokens of the whole batch, before it is cut into minibatches, as TRL's PPOTrainer did.
    - A minibatch is one optimizer step, and denominators are those of a minibatch, so micro-batches do not change the
      result. TRL's masked means depend on the split.
    - pi_old is the sampler's own log-probability. That corrects a gap between sampler and scorer (bfloat16), as far as
      the clip lets it.
    - Tulu 3's critic starts from a reward model, and a completion without EOS has the reward -10, right or wrong.
    - V after a completion without EOS is 0, as after any other.
    - verl also cuts ratios above 3 where A < 0 (dual clip, arXiv 1912.09729). The papers and this script do not.
    - Dropout is off, so that the updated policy is the one that sampled.
    - Sampling and scoring both divide logits by --temperature. There is no top-k or top-p.
    - A sample whose reward functions all return None is left out.
"""

import copy
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.checkpoint import rng_state
from utils.checks import check_model
from utils.cli import main, prepare
from utils.distributed import clip_gradients, deal, is_sharded, share, total, unsharded
from utils.errors import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval, UserError
from utils.evaluation import advice, decode, evaluate, show_samples
from utils.lm import Means, Samples, completion_logps, micro_batches, positions, sample_all, stream
from utils.memory import check_memory
from utils.models import (
    PolicyArgs,
    autocast,
    eos_ids,
    load_critic,
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
from utils.schedule import learning_rate
from utils.tasks import Task, load_task
from utils.text import encode_prompt, present, usable_prompts

NAME, TITLE = "ppo_lm", "PPO"
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, critic_learning_rate=1e-3, adam_beta2=0.999, num_prompts=512,
                 sample_batch_size=512, micro_batch_size=256, micro_batch_tokens=0, max_completion_length=20,
                 precision="float32"),
    "full": dict(learning_rate=1e-6, critic_learning_rate=1e-5, adam_beta2=0.999, num_prompts=512,
                 sample_batch_size=32, micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512,
                 precision="bfloat16"),
    "lora": dict(learning_rate=1e-5, critic_learning_rate=1e-5, adam_beta2=0.999, num_prompts=512,
                 sample_batch_size=32, micro_batch_size=64, micro_batch_tokens=4096, max_completion_length=512,
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
    missing_eos_penalty: NonNegativeFloat = 0.0
    """subtracted from the reward of a completion that was cut off, in training"""
    max_steps: PositiveInt = 75
    """steps: each samples, then updates"""
    num_prompts: PositiveInt | None = None
    """prompts per step"""
    num_generations: PositiveInt = 1
    """completions per prompt: G"""
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
    num_iterations: PositiveInt = 2
    """update epochs per batch of completions"""
    num_minibatches: PositiveInt = 2
    """optimizer steps per update epoch"""
    epsilon: PositiveFloat = 0.2
    """lower clip of the ratio: 1 - epsilon"""
    epsilon_high: PositiveFloat | None = None
    """upper clip of the ratio: 1 + epsilon_high; None: epsilon"""
    beta: NonNegativeFloat = 0.05
    """weight of the KL penalty in the reward; 0 loads no reference model"""
    critic: Literal["separate", "shared"] = "separate"
    """separate: a second model for the value; shared: a head on the policy's hidden states"""
    critic_learning_rate: PositiveFloat | None = None
    """peak learning rate of the critic"""
    vf_coef: NonNegativeFloat = 0.1
    """weight of the value loss: c_vf"""
    clip_value: PositiveFloat = 0.2
    """clip of the change of the value: eps_v"""
    gamma: UnitInterval = 1.0
    """discount"""
    gae_lambda: UnitInterval = 0.95
    """lambda of the advantages"""
    whiten_advantages: bool = True
    """bring the advantages of the batch's tokens to mean 0 and standard deviation 1"""
    aggregation: Literal["token", "constant"] = "token"
    """mean over a minibatch's tokens; sum over its number of completions * max_completion_length"""
    learning_rate: PositiveFloat | None = None
    """peak learning rate of the policy"""
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
    values: Tensor  # (B, T): V_old before each token


class Critic(torch.nn.Module):
    """Expected return before each completion token: a transformer without its output layer, and a scalar head."""

    def __init__(self, model, shared: bool):
        super().__init__()
        self.sharded = is_sharded(model)  # then the whole model is run, for that is what gathers its shards
        backbone = model.get_base_model().base_model if hasattr(model, "get_base_model") else model.base_model
        if not shared and not self.sharded:
            backbone = copy.deepcopy(backbone).requires_grad_(True).float()
        backbone = model if self.sharded else backbone
        self.backbone = [backbone] if shared else torch.nn.ModuleList([backbone])  # a list hides the policy's weights
        self.head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor
    ) -> Tensor:
        """(P, L), (P, L), (B, T), (B, T) -> (B, T), 0 where padded."""
        repeats = len(completion_ids) // len(prompt_ids)
        ids = torch.cat([prompt_ids.repeat_interleave(repeats, 0), completion_ids], 1)[:, :-1]
        mask = torch.cat([prompt_mask.repeat_interleave(repeats, 0), completion_mask], 1)[:, :-1]
        more = dict(output_hidden_states=True, logits_to_keep=1) if self.sharded else {}
        out = self.backbone[0](input_ids=ids, attention_mask=mask.long(), position_ids=positions(mask),
                               use_cache=False, **more)  # fmt: skip
        hidden = out.hidden_states[-1] if self.sharded else out.last_hidden_state
        hidden = hidden[:, -completion_ids.shape[1] :].to(self.head.weight.dtype)
        values = (hidden * self.head.weight).sum(-1) + self.head.bias  # float32 also under autocast
        return values.masked_fill(~completion_mask, 0.0)


def token_rewards(batch: Batch, beta: float) -> Tensor:
    """(B, T): the KL penalty of every token, and the completion's reward at its last one (arXiv 2009.01325, section
    3.4). Skipped rewards count 0."""
    mask = batch.samples.completion_mask
    rewards = torch.zeros_like(batch.samples.logps)
    if batch.ref_logps is not None:
        rewards = -beta * (batch.samples.logps - batch.ref_logps) * mask
    last = mask.sum(1, keepdim=True) - 1
    return rewards.scatter_add(1, last, batch.rewards[:, None].to(rewards).nan_to_num(0.0))


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantages (arXiv 1506.02438, equation 16) of completion tokens, all (B, T). The value after the last
    token is 0: `values` are 0 in padding."""
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    deltas = (rewards + gamma * next_values - values) * mask
    advantages, last = torch.zeros_like(deltas), torch.zeros_like(deltas[:, 0])
    for t in reversed(range(deltas.shape[1])):
        advantages[:, t] = last = deltas[:, t] + gamma * gae_lambda * last
    return advantages


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and unbiased standard deviation 1 over the tokens of `mask`, 0 elsewhere."""
    kept = values[mask]
    if len(kept) < 2:  # all rewards were skipped
        return torch.zeros_like(values)
    return (values - kept.mean()) * (kept.var() + 1e-8).rsqrt() * mask


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half the larger of two squared errors: the value's, and with its change clipped (as in OpenAI's baselines)."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.max((values - returns).square(), (near - returns).square())


def token_weights(mask: Tensor, aggregation: str, max_completion_length: int) -> Tensor:
    """Weight of each token's loss in the step's loss, over all B rows. mask (B, T) of 0 and 1 -> (B, T).

    token: 1 / sum of all T_i. constant: 1 / (B L_max), with which lambda = 1 and no whitening give the policy gradient.
    """
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
    """Estimate of KL(pi_theta || pi_ref) at tokens of pi_theta: non-negative, unbiased in value. A metric here."""
    difference = ref_logps - logps
    return difference.exp() - difference - 1


def select(batch: Batch, prompts: Tensor, group_size: int) -> tuple[Batch, Tensor]:
    """The part of a batch that belongs to `prompts` (indices), and its rows."""
    rows = (prompts[:, None] * group_size + torch.arange(group_size, device=prompts.device)).flatten()
    samples = Samples(*(x[prompts] for x in batch.samples[:2]), *(x[rows] for x in batch.samples[2:]))
    return Batch(samples, *(x if x is None else x[rows] for x in batch[1:])), rows


def update(model, critic, optimizer, batch: Batch, generator: torch.Generator, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of completions. Returns metrics."""
    known = batch.samples.completion_mask & ~batch.rewards.isnan()[:, None]
    advantages = gae(token_rewards(batch, args.beta), batch.values, known, args.gamma, args.gae_lambda)
    returns = advantages + batch.values
    if args.whiten_advantages:
        advantages = whiten(advantages, known)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tokens = known.sum().clamp(min=1)
    prompts, norms = len(batch.samples.prompt_ids), []
    for _ in range(args.num_iterations):
        means = Means(tokens)
        for part in torch.randperm(prompts, generator=generator, device=known.device).chunk(args.num_minibatches):
            minibatch, chosen = select(batch, part, args.num_generations)
            mask = known[chosen]
            if not norms:
                first = Means(mask.sum().clamp(min=1))
            weights = token_weights(mask.to(returns.dtype), args.aggregation, args.max_completion_length)
            optimizer.zero_grad(set_to_none=True)
            parts = micro_batches(minibatch.samples, args.micro_batch_size, args.micro_batch_tokens)
            for (rows, inputs), counts in deal(parts, model):  # to this process, of perhaps several
                with autocast(model.device, args.precision):
                    logps, entropy = completion_logps(model, *inputs, args.temperature)
                    values = critic(*inputs)
                here, width = chosen[rows], logps.shape[1]
                old_logps, valid = batch.samples.logps[here, :width], counts * mask[rows, :width]
                loss, clipped = policy_loss(logps, old_logps, advantages[here, :width], args.epsilon, high)
                errors = value_loss(values, batch.values[here, :width], returns[here, :width], args.clip_value)
                (counts * (loss + args.vf_coef * errors) * weights[rows, :width]).sum().backward()
                logps = logps.detach()
                means.add(valid, clip_fraction=clipped, approx_kl=k3(old_logps, logps), entropy=entropy)
                if not norms:
                    first.add(valid, sampler_gap=(logps - old_logps).abs())
            norms.append(clip_gradients(parameters, args.max_grad_norm))
            optimizer.step()
    unexplained = (returns - batch.values)[known].var() / returns[known].var().clamp(min=1e-12)
    metrics = first.read() | means.read()
    metrics |= {"explained_variance": 1 - unexplained.item(), "grad_norm": torch.stack(norms).mean().item()}
    if batch.ref_logps is not None:
        metrics["kl"] = ((batch.samples.logps - batch.ref_logps) * batch.samples.completion_mask).sum(1).mean().item()
    return metrics


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


@torch.no_grad()
def old_values(model, critic: Critic, batch: Batch, args: Args) -> Tensor:
    """V_old (B, T)."""
    out = torch.zeros_like(batch.samples.logps)
    with autocast(model.device, args.precision), unsharded(model, critic):
        for rows, inputs in share(micro_batches(batch.samples, args.micro_batch_size, args.micro_batch_tokens)):
            out[rows, : inputs[2].shape[1]] = critic(*inputs)
    return total(out)


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
    """Raises UserError for batches that cannot be split."""
    if args.num_prompts % args.num_minibatches:
        raise UserError(f"--num-minibatches {args.num_minibatches} must divide --num-prompts {args.num_prompts}")
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
    check_model(model, args.precision)
    task = usable_prompts(task, model, tokenizer, args)
    ref_model = load_reference(args, device) if args.beta > 0 else None
    shared = args.critic == "shared"
    started = load_critic(args, device) if args.fsdp and not shared else model
    critic = Critic(started, shared).to(device)
    *backbone, weight, bias = trained_parameters(critic)  # the head apart: an optimizer takes shards or whole tensors
    parts = [{"params": some} for some in (trained_parameters(model), backbone, [weight, bias])]
    optimizer = torch.optim.AdamW(parts, lr=args.learning_rate, betas=(0.9, args.adam_beta2),
                                  weight_decay=args.weight_decay, fused=True)  # fmt: skip
    prompts = [encode_prompt(row, tokenizer) for row in task.heldout]
    settings += check_memory(model, args, [critic], prompt=max(map(len, prompts)), reference=True, passes=2)
    evaluation = partial(evaluate, model, tokenizer, task, score, args.eval_prompts, args.eval_samples,
                         args.max_completion_length, args.temperature, args.seed,
                         rows_at_once=args.sample_batch_size, precision=args.precision)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"),
              schedule_depends_on_budget=args.lr_schedule != "constant")  # fmt: skip
    run.print(settings)

    def state() -> dict:
        return {"model": trained_state(model), "critic": critic.state_dict(), "optimizer": optimizer.state_dict()}

    if not run.restore(model=model, critic=critic, optimizer=optimizer):
        run.log(0, **evaluation())
        run.save(0, state())
    model.train()
    critic.train()  # a copy of a model in evaluation mode, in which gradient checkpointing does nothing
    while run.step < args.max_steps:
        start, before = time.perf_counter(), (run.step, state, rng_state())
        step = run.step + 1
        peaks = args.learning_rate, args.critic_learning_rate, args.critic_learning_rate
        for group, peak in zip(optimizer.param_groups, peaks):
            group["lr"] = learning_rate(step, peak, args.lr_schedule, args.warmup_steps, args.max_steps)

        # collect
        with run.saving(*before):
            samples, scored = collect(model, tokenizer, task, score, step, args)
        sampled, due = time.perf_counter(), run.due(step, args.eval_every)
        if step == 1 or due:
            run.print(show_samples(tokenizer, samples, scored.rewards.tolist(), scored.extra))
        batch = Batch(samples, scored.rewards.to(device), None, samples.logps)
        batch = batch._replace(values=old_values(model, critic, batch, args))
        if args.beta > 0:
            batch = batch._replace(ref_logps=reference_logps(model, ref_model, batch, args))

        # update
        generator = stream(device, args.seed, "minibatches", step)
        columns = update(model, critic, optimizer, batch, generator, args)

        # evaluate
        rewards, lengths = batch.rewards[~batch.rewards.isnan()], samples.completion_mask.sum(1).float()
        columns |= {
            "reward": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "length": lengths.mean().item(),
            "truncated": 1 - samples.ended.float().mean().item(),
            "learning_rate": optimizer.param_groups[0]["lr"],
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

    curves = {"reward": ("reward",), "held-out": ("eval/[!d]*",), "explained variance": ("explained_variance",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train)
