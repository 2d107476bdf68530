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
    r_t     = -beta log(pi_old(y_t | .) / pi_ref(y_t | .)), plus the reward of the completion at its last token
    A_t     = sum_k (gamma lambda)^k (r_t+k + gamma V_old,t+k+1 - V_old,t+k)    V after the last token is 0; whitened
    R_t     = A_t + V_old,t                                      return, before whitening
    eps, eps_high, eps_v, c_vf   --epsilon, --epsilon-high, --clip-value, --vf-coef
    beta, gamma, lambda          --beta, --gamma, --gae-lambda; pi_ref: the policy before the first step

At rho = 1 and gamma = 1, without whitening and with a constant denominator, lambda = 1 gives exactly the gradient of
E[reward] - beta KL(pi_theta || pi_ref), over --max-completion-length. Whitening and the mean over tokens bias it.

Run
    python algos/ppo_lm.py                                                 the embedded model learns countdown
    python algos/ppo_lm.py --critic shared --task sort --max-steps 40      one model, with a head for the value
    python algos/ppo_lm.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k
    Stiennon et al.'s settings, and RLVR of Tulu 3: algos/README.md.

Expect
    The default run takes 3.4 minutes on 2 CPU cores. Held-out countdown goes from greedy 0.01, pass@1 0.09, pass@8
    0.45 to greedy 0.56, pass@1 0.52, pass@8 0.66. grpo.py gets to 0.56, 0.51, 0.69.
    --task sort --max-steps 16: greedy 0.23 to 0.98, pass@1 0.40 to 0.96, in about a minute on a CPU.

Metrics
    reward              without the penalty; rises. kl: nats per completion against the reference; grows slowly
    explained_variance  of R_t by V_old,t over tokens; rises towards 1, below 0 is worse than a constant
    The others as in grpo.py.

Differences
    - The KL penalty is log(pi_old / pi_ref) per token, in the reward, as in the papers. beta is not adaptive.
    - --critic separate: the model once more, with a scalar head that starts at zero. Stiennon et al. start it from the
      reward model. --critic shared: the head alone, on the policy's own last hidden states (Ziegler et al.).
    - Whitening is over the whole batch, before it is cut into minibatches. V after a completion without EOS is 0, too.
    - verl also cuts ratios above 3 where A < 0 (dual clip, arXiv 1912.09729). The papers and this script do not.
    - A sample whose reward functions all return None is left out.
"""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.core import Run, main, prepare
from utils.data import encode_prompt, load_task, usable
from utils.dist import (
    Means,
    Samples,
    Trained,
    averaged,
    clip_gradients,
    micro_batches,
    moments,
    positions,
    set_rate,
    shard,
    share,
    start,
    stream,
    total,
)
from utils.lm import PolicyArgs, alarm, autocast, body, completion_logps, load_model, resolve, sample_all, save_model
from utils.rewards import decode, evaluate, make_scorer, sample_rows, shown

NAME, TITLE = "ppo_lm", "PPO"
LARGE = dict(learning_rate=1e-6, critic_learning_rate=1e-5, sample_batch_size=32, micro_batch_size=64,
             micro_batch_tokens=4096, max_completion_length=512, precision="bfloat16")  # fmt: skip
PRESETS = {  # defaults that depend on the model, for arguments left at None
    "tiny": dict(learning_rate=1e-4, critic_learning_rate=1e-3, sample_batch_size=512, micro_batch_size=256,
                 micro_batch_tokens=0, max_completion_length=20, precision="float32"),
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
    max_steps: int = 75
    """steps: each samples, then updates"""
    num_prompts: int = 512
    """prompts per step, of all processes"""
    num_generations: int = 1
    """completions per prompt: G"""
    sample_batch_size: int | None = None
    """completions sampled at once, rounded to whole prompts; limits the cache's memory"""
    log_samples: int = 0
    """prompts per step whose completions RUN/samples.jsonl keeps, besides those of evaluations"""
    max_completion_length: int | None = None
    """most new tokens per completion"""
    max_prompt_length: int | None = None
    """longer prompts are dropped; None: those that leave --max-completion-length no room in the model's context"""
    temperature: float = 1.0
    """divides the logits, in sampling and in training"""
    micro_batch_size: int | None = None
    """completions in one forward and backward pass; changes memory, not the result"""
    num_iterations: int = 2
    """update epochs per batch of completions"""
    num_minibatches: int = 2
    """optimizer steps per update epoch, each on a share of the prompts"""
    epsilon: float = 0.2
    """lower clip of the ratio: 1 - epsilon"""
    epsilon_high: float | None = None
    """upper clip of the ratio: 1 + epsilon_high; None: epsilon"""
    beta: float = 0.05
    """weight of the KL penalty in the reward; 0 loads no reference model"""
    critic: Literal["separate", "shared"] = "separate"
    """separate: a second model for the value; shared: a head on the policy's hidden states"""
    critic_learning_rate: float | None = None
    """peak learning rate of the critic"""
    vf_coef: float = 0.1
    """weight of the value loss: c_vf"""
    clip_value: float = 0.2
    """clip of the change of the value: eps_v"""
    gamma: float = 1.0
    """discount"""
    gae_lambda: float = 0.95
    """lambda of the advantages"""
    whiten_advantages: bool = True
    """bring the advantages of the batch's tokens to mean 0 and standard deviation 1"""
    aggregation: Literal["token", "constant"] = "token"
    """mean over a minibatch's tokens; sum over its number of completions * max_completion_length"""
    learning_rate: float | None = None
    """peak learning rate of the policy"""
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
    values: Tensor  # (B, T): V_old before each token


class Critic(torch.nn.Module):
    """Expected return before each completion token: the hidden states of a transformer, and a scalar head."""

    def __init__(self, model, shared: bool):
        super().__init__()
        self.shared, self.device, self._no_split_modules = shared, model.device, model._no_split_modules  # for `shard`
        self.model = [model] if shared else torch.nn.ModuleList([model.get_decoder()])  # a list hides weights
        self.head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor
    ) -> Tensor:
        """(P, L), (P, L), (B, T), (B, T) -> (B, T), 0 where padded."""
        repeats = len(completion_ids) // len(prompt_ids)
        ids = torch.cat([prompt_ids.repeat_interleave(repeats, 0), completion_ids], 1)
        mask = torch.cat([prompt_mask.repeat_interleave(repeats, 0), completion_mask], 1)
        inputs = dict(input_ids=ids, attention_mask=mask.long(), position_ids=positions(mask), use_cache=False)
        hidden = body(self.model[0], **inputs)[0] if self.shared else self.model[0](**inputs).last_hidden_state
        hidden = hidden[:, prompt_ids.shape[1] - 1 : -1].float()
        values = (hidden * self.head.weight.float()).sum(-1) + self.head.bias  # float32 also under autocast
        return values.masked_fill(~completion_mask, 0.0)


def load_critic(model, args: Args, device: torch.device | str = "cpu") -> Critic:
    """On the policy's hidden states, or on those of --model once more, which is trained whole."""
    shared = args.critic == "shared"
    own = model if shared else load_model(replace(args, lora_rank=0, fsdp=False, precision="float32"), device)[0]
    critic = Critic(own, shared)
    return shard(critic, args.precision == "bfloat16") if args.fsdp else critic


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
    """Mean 0 and unbiased standard deviation 1 over the tokens of `mask`, of all processes; 0 elsewhere."""
    mean, deviation = moments(values[mask])
    return (values - mean) * (deviation.square() + 1e-8).rsqrt() * mask


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half the larger of two squared errors: the value's, and with its change clipped (as in OpenAI's baselines)."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.max((values - returns).square(), (near - returns).square())


def token_weights(mask: Tensor, aggregation: str, max_completion_length: int) -> Tensor:
    """Weight of each token's loss in the step's loss, over the B rows of all processes. mask of 0 and 1, (B, T).

    token: 1 / sum of all T_i. constant: 1 / (B L_max), with which lambda = 1 and no whitening give the policy gradient.
    """
    rows = total(torch.tensor(len(mask), device=mask.device))
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
    """Estimate of KL(pi_theta || pi_ref) at tokens of pi_theta: non-negative, unbiased in value. A metric here."""
    difference = ref_logps - logps
    return difference.exp() - difference - 1


def update(model, critic, optimizer, batch: Batch, generator: torch.Generator, args: Args) -> dict[str, float]:
    """`num_iterations` epochs of `num_minibatches` optimizer steps on one batch of completions. Returns metrics."""
    samples, known = batch.samples, batch.samples.completion_mask & ~batch.rewards.isnan()[:, None]
    advantage = gae(token_rewards(batch, args.beta), batch.values, known, args.gamma, args.gae_lambda)
    returns = advantage + batch.values
    if args.whiten_advantages:
        advantage = whiten(advantage, known)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    numbers = torch.arange(len(known)).view(-1, args.num_generations)  # of the rows
    both, gap, norms = torch.nn.ModuleList([model, critic]), Means(), []
    for _ in range(args.num_iterations):
        means, order = Means(), torch.randperm(len(numbers), generator=generator)
        for minibatch in numbers[order].tensor_split(args.num_minibatches):
            within, weights = minibatch.flatten(), torch.zeros_like(samples.logps)
            weights[within] = token_weights(known[within], args.aggregation, args.max_completion_length)
            optimizer.zero_grad(set_to_none=True)
            for rows, inputs in micro_batches(samples, args, within):
                with autocast(model, args.precision):
                    logps, entropy = completion_logps(model, *inputs, args.temperature)
                    values = critic(*inputs)
                width = logps.shape[1]
                old_logps, valid = samples.logps[rows, :width], known[rows, :width]
                loss, clipped = policy_loss(logps, old_logps, advantage[rows, :width], args.epsilon, high)
                errors = value_loss(values, batch.values[rows, :width], returns[rows, :width], args.clip_value)
                ((loss + args.vf_coef * errors) * weights[rows, :width]).sum().backward()
                logps = logps.detach()
                means.add(valid, clip_fraction=clipped, approx_kl=k3(old_logps, logps), entropy=entropy)
                if not norms:  # before the first optimizer step
                    gap.add(valid, sampler_gap=(logps - old_logps).abs())
            norms.append(clip_gradients(both, args.max_grad_norm))
            optimizer.step()
    unexplained, spread = (moments(x[known])[1].square() for x in (returns - batch.values, returns))
    if batch.ref_logps is not None:
        kl = ((samples.logps - batch.ref_logps) * samples.completion_mask).sum(1)
        gap.add(torch.ones_like(kl), kl=kl)
    metrics = gap.read() | means.read() | {"grad_norm": torch.stack(norms).mean().item()}
    return metrics | {"explained_variance": 1 - (unexplained / spread.clamp(min=1e-12)).item()}


def collect(model, tokenizer, task, score, step: int, args: Args) -> tuple[Samples, Tensor, dict[str, float]]:
    """Samples and scores G completions for each of this process's prompts of the step. Returns rewards and columns."""
    rows = [task.train(i, args.seed) for i in share(range((step - 1) * args.num_prompts, step * args.num_prompts))]
    prompts = [encode_prompt(row, tokenizer) for row in rows]
    samples = sample_all(model, prompts, args.num_generations, args, args.temperature, "train", step)
    rows = [row for row in rows for _ in range(args.num_generations)]
    rewards, columns = score(rows, *decode(samples, tokenizer), step)
    return samples, rewards - args.missing_eos_penalty * ~samples.ended.cpu(), columns


@torch.no_grad()
def old_values(model, critic: Critic, samples: Samples, args: Args) -> Tensor:
    """V_old (B, T)."""
    out = torch.zeros_like(samples.logps)
    with autocast(model, args.precision):
        for rows, inputs in micro_batches(samples, args):
            out[rows, : inputs[2].shape[1]] = critic(*inputs)
    return out


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
    task = load_task(args.task, args.prompt_column)
    model, tokenizer = load_model(args, device)
    settings = resolve(model, args, PRESETS)
    task = usable(task, model, tokenizer, args)
    score = make_scorer(task, args, tokenizer, device)
    reference = load_model(args, device, frozen=True)[0] if args.beta and not args.lora_rank else None
    critic = load_critic(model, args, device)
    trained = [{"params": [p for p in part.parameters() if p.requires_grad]} for part in (model, critic)]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, betas=(0.9, args.adam_beta2),
                                  weight_decay=args.weight_decay, fused=True)  # fmt: skip
    run = Run(args, NAME, task.name, args.max_steps, ("reward", "eval/greedy", "eval/pass@1", "grad_norm"))
    run.print(settings)
    parts = {"trained": Trained(torch.nn.ModuleList([model, critic]), optimizer)}
    if not run.restore(**parts):
        run.log(0, **evaluate(model, tokenizer, task, score, args, 0, run.keep))
    model.train()
    critic.train()  # gradient checkpointing does nothing in evaluation mode
    while run.step < args.max_steps:
        step, begun = run.step + 1, time.perf_counter()
        critic_rate = set_rate(optimizer, step, replace(args, learning_rate=args.critic_learning_rate))
        rate, optimizer.param_groups[1]["lr"] = set_rate(optimizer, step, args), critic_rate

        # collect
        samples, rewards, columns = collect(model, tokenizer, task, score, step, args)
        sampled, due = time.perf_counter(), run.due(step, args.eval_every)
        if step == 1:
            run.print(shown(samples, tokenizer, rewards.tolist()))
        ref_logps = reference_logps(model, reference, samples, args) if args.beta else None

        # update
        batch = Batch(samples, rewards.to(device), ref_logps, old_values(model, critic, samples, args))
        columns |= update(model, critic, optimizer, batch, stream("cpu", args.seed, "minibatches", step), args)
        alarm(columns.get("sampler_gap"), run, args)

        # evaluate
        run.keep(sample_rows(args.log_samples, samples, tokenizer, {"reward": rewards, **score.each}))
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

    curves: dict = {"reward": ("reward",), "held-out": ("eval/*",), "explained variance": ("explained_variance",)}
    return run.finish(lambda folder: save_model(model, tokenizer, folder, args), curves, f"{TITLE} on {task.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
