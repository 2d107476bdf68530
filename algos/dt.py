r"""Decision Transformer (DT).

Chen et al. 2021, "Decision Transformer: Reinforcement Learning via Sequence Modeling" (arXiv 2106.01345, algorithm 1).

It imitates trajectories, told at each step how much return was still to come. It is then asked for a high return.
Windows of K steps

    R_1 s_1 a_1  R_2 s_2 a_2  ...  R_K s_K a_K        R_t = r_t + r_t+1 + ... + r_T, the return-to-go, undiscounted

are 3K tokens of a causal transformer; the output at the token of s_t predicts a_t. Minimises

    L = mean over real steps t and action dimensions of (a_t - pi(R_1 s_1 a_1 ... R_t s_t))^2

In the environment R_1 is a target return (--target-returns), and R_t+1 = R_t - r_t. K is --context-length.

Run
    python algos/dt.py                                                           the collection that ships: Hopper-v5
    python algos/dt.py --dataset hopper_medium_replay-v2.hdf5 --context-length 20 --batch-size 64 --max-steps 100000 \
        --learning-rate 1e-4 --warmup-steps 10000 --eval-every 10000 --eval-episodes 100 --target-returns 3600 1800 \
        --rtg-scale 1000
                                                                                 the paper's recipe
    python algos/dt.py --dataset mujoco/hopper/medium-v0                         Minari
    python algos/dt.py --evaluate RUN --eval-episodes 100 --target-returns 500 1000 2000
                                                                                 scores a saved agent

Expect
    The default run, Hopper-v5's collection, takes 1.7 minutes on 2 CPU cores. Asked for the collection's best return,
    2,485, it gets 813, and eval/slope is 0.28 (seed 1, two threads). With one thread and 10 episodes it gets 766, asked
    for a quarter of the way there from the lowest 243, and the slope is 0.26. After 500 updates it still ignores the
    target (0.06). After 3,000 updates one run got 926, 339 and the slope 0.28. Evaluations of one run, and seeds,
    differ by hundreds: the learning rate does not fall.

Metrics
    loss                mean squared error of actions in [-1, 1]; falls
    grad_norm           before clipping
    eval/return         mean over --eval-episodes, for the first target; eval/return_at_R: for each target return R
    eval/slope          of achieved over target return, all episodes; 1: it does as told, 0: it ignores the target
    eval/score          100 (R - random) / (expert - random) with the returns recorded beside the data; R is eval/return
    eval/d4rl_score     the same with D4RL's constants: D4RL's files on its -v4 environments only
    eval/best_return    in the last row: the best of all evaluations. It is picked by test score; eval/return is not

Differences
    - None in network, loss, sampling and optimiser: GPT-2's blocks without its positions, a learned embedding of the
      time step added to the three tokens of a step, LayerNorm over them, weight decay on all parameters.
    - Returns-to-go are computed once, and windows are gathered on the device.
    - Actions are stretched from the environment's bounds to [-1, 1], where the tanh of the output lives.
    - Warm-up in the paper's recipe is 10,000 updates, as in the authors' code; the paper's table has 100,000.
    - The paper reports the best of two targets; ours are all reported.
    - The default has shorter windows, a higher learning rate and fewer updates than the paper's recipe, for a CPU.
"""

import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere
from utils.control import is_bounded, make_env, rollouts, score_saved, to_env, to_unit, try_out
from utils.core import Run, UserError, main, prepare
from utils.offline import Dataset, OfflineArgs, check_spaces, compared, load_dataset

NAME, TITLE = "dt", "Decision Transformer"
TARGETS = (1.0, 0.75, 0.5, 0.25)  # default target returns: from the lowest (0) to the highest (1) of the dataset


@dataclass
class Args(OfflineArgs):
    # inherited: seed, device, threads, output_dir, resume, track (RunArgs); env_kwargs, eval_every,
    # eval_episodes, evaluate, capture_video (EnvArgs); dataset, env_id (OfflineArgs)
    max_steps: int = 1_000
    """updates"""
    eval_episodes: int = 7
    """evaluation episodes for each of --target-returns"""
    target_returns: tuple[float, ...] = ()
    """returns to ask for; none: the dataset's highest, and 3/4, 1/2, 1/4 of the way there from its lowest"""
    rtg_scale: float | None = None
    """returns-to-go are divided by this; None: the largest return of the dataset, either sign; 1,000 for what ships"""
    context_length: int = 5
    """steps in a window: K"""
    embed_dim: int = 128
    """width of the transformer"""
    num_layers: int = 3
    """blocks"""
    num_heads: int = 1
    """attention heads"""
    dropout: float = 0.1
    """dropout of embeddings, attention and residuals"""
    max_episode_length: int = 1_000
    """time steps that have an embedding of their own; later ones share the last"""
    batch_size: int = 128
    """windows per update"""
    learning_rate: float = 1e-3
    """learning rate of AdamW, after the warm-up"""
    warmup_steps: int = 500
    """updates over which the learning rate rises linearly"""
    weight_decay: float = 1e-4
    """weight decay of AdamW, on all parameters"""
    max_grad_norm: float = 0.25
    """gradients are clipped to this norm"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """precision of the forward pass (autocast); weights and optimizer stay float32"""
    log_every: int = 100
    """updates between rows of metrics"""
    save_every: int = 500
    """updates between checkpoints"""


class Windows(NamedTuple):
    """B windows of K steps, padded on the left."""

    obs: Tensor  # (B, K, D), normalised
    actions: Tensor  # (B, K, A) in [-1, 1]
    rtg: Tensor  # (B, K, 1), scaled returns-to-go
    timesteps: Tensor  # (B, K) int64
    mask: Tensor  # (B, K) bool: a real step


class Block(nn.Module):
    """GPT-2's, with ReLU."""

    def __init__(self, width: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads, self.dropout = num_heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for layer in (self.qkv, self.out, self.up, self.down):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """x (B, L, W); visible (B, 1, L, L) bool: the row's token may look at the column's."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        dropped = self.dropout.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, visible, dropped)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.relu(self.up(self.norm2(x)))))


class DecisionTransformer(nn.Module):
    def __init__(self, obs_size: int, action_size: int, args: Args):
        super().__init__()
        width = args.embed_dim
        self.embed_rtg, self.embed_obs = nn.Linear(1, width), nn.Linear(obs_size, width)
        self.embed_action = nn.Linear(action_size, width)
        self.embed_timestep = nn.Embedding(args.max_episode_length, width)
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.ModuleList(Block(width, args.num_heads, args.dropout) for _ in range(args.num_layers))
        self.predict_action = nn.Linear(width, action_size)
        self.obs_mean = nn.Buffer(torch.zeros(obs_size))  # statistics of the dataset, saved with the weights
        self.obs_std = nn.Buffer(torch.ones(obs_size))

    def forward(self, batch: Windows) -> Tensor:
        """Predicted actions (B, K, A) in [-1, 1]; each depends on the tokens up to its state, not on padding."""
        parts = (self.embed_rtg(batch.rtg), self.embed_obs(batch.obs), self.embed_action(batch.actions))
        time_embedding = self.embed_timestep(batch.timesteps.clamp(max=self.embed_timestep.num_embeddings - 1))
        tokens = torch.stack([part + time_embedding for part in parts], 2).flatten(1, 2)  # (B, 3K, W)
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        visible = causal & batch.mask.repeat_interleave(3, 1)[:, None, None]
        visible = visible | torch.eye(length, dtype=torch.bool, device=tokens.device)  # padding sees itself: no NaN
        x = self.dropout(self.norm_in(tokens))
        for block in self.blocks:
            x = block(x, visible)
        return self.predict_action(self.norm_out(x[:, 1::3])).tanh()


class Sequences(NamedTuple):
    """All trajectories one after the other, n rows, on the device."""

    obs: Tensor  # (n, D), normalised
    actions: Tensor  # (n, A) in [-1, 1]
    rtg: Tensor  # (n, 1), scaled
    timesteps: Tensor  # (n,) int64, from 0 in each trajectory
    left: Tensor  # (n,) int64: rows of the trajectory from this one on, itself included


def returns_to_go(rewards: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(n,) sums of rewards from each row to the end of its trajectory; starts (k,) first rows."""
    return np.concatenate([part[::-1].cumsum(dtype=np.float64)[::-1] for part in np.split(rewards, starts[1:])])


def sequences(data: Dataset, space: gym.spaces.Box, model: DecisionTransformer, rtg_scale: float,
              device: torch.device) -> Sequences:  # fmt: skip
    lengths = data.lengths()
    timesteps = np.arange(len(data.obs)) - np.repeat(data.starts, lengths)
    obs = (torch.from_numpy(data.obs).to(device) - model.obs_mean) / model.obs_std
    actions = torch.from_numpy(to_unit(data.actions, space).astype(np.float32))
    rtg = torch.from_numpy(returns_to_go(data.rewards, data.starts) / rtg_scale).float()
    left = torch.from_numpy(np.repeat(lengths, lengths) - timesteps)
    return Sequences(obs, *(x.to(device) for x in (actions, rtg[:, None], torch.from_numpy(timesteps), left)))


def windows(data: Sequences, rows: Tensor, length: int) -> Windows:
    """Windows of `length` steps that begin at `rows` (B,), shorter where the trajectory ends: padded on the left, as in
    the authors' code."""
    steps = data.left[rows].clamp(max=length)  # real steps of each window
    position = torch.arange(length, device=rows.device) - (length - steps)[:, None]
    mask, index = position >= 0, rows[:, None] + position.clamp(min=0)
    obs, actions, rtg = (x[index] * mask[..., None] for x in (data.obs, data.actions, data.rtg))
    return Windows(obs, actions, rtg, data.timesteps[index] * mask, mask)


def dt_loss(predicted: Tensor, batch: Windows) -> Tensor:
    """Mean squared error over real steps and action dimensions. predicted (B, K, A). CORL divides by padded steps, too,
    and pads on the right."""
    errors = (predicted - batch.actions).square().mean(-1)
    return (errors * batch.mask).sum() / batch.mask.sum()


def update(model: DecisionTransformer, optimizer: torch.optim.Optimizer, batch: Windows,
           args: Args) -> dict[str, Tensor]:  # fmt: skip
    """One step. Returns metrics, as tensors: reading them would make the CPU wait for the device at every update."""
    with torch.autocast(batch.obs.device.type, torch.bfloat16, enabled=args.precision == "bfloat16"):
        predicted = model(batch)
    loss = dt_loss(predicted.to(batch.actions.dtype), batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    return {"loss": loss.detach(), "grad_norm": grad_norm}


def whole(data: Dataset) -> Dataset:
    """Without a last trajectory that the file cuts off. Raises UserError where nothing is left."""
    if not data.cut_off:
        return data
    if len(data.starts) == 1:
        raise UserError(f"--dataset {data.name} has no trajectory that ends: there must be terminals or timeouts")
    columns = ("obs", "actions", "rewards", "terminated", "next_obs", "known")
    rows = {name: getattr(data, name)[: data.starts[-1]] for name in columns}
    return replace(data, **rows, starts=data.starts[:-1], cut_off=False)


def check(args: Args, space: gym.Space) -> None:
    """Raises UserError for impossible settings."""
    if not is_bounded(space):
        wanted = "a Box of floats with finite bounds"
        raise UserError(f"--env-id {args.env_id} has the action space {space}: {TITLE} needs {wanted}")
    if args.rtg_scale is not None and args.rtg_scale <= 0:
        raise UserError(f"--rtg-scale is {args.rtg_scale}: it must be above 0")
    if args.embed_dim % args.num_heads:
        raise UserError(f"--embed-dim {args.embed_dim} must be a multiple of --num-heads {args.num_heads}")


@torch.no_grad()
def achieved(model: DecisionTransformer, envs: list[gym.Env], space: gym.spaces.Box, args: Args, device: torch.device,
             video: Path | None = None) -> np.ndarray:  # fmt: skip
    """Returns (targets, episodes), one for each environment. Each of --target-returns gets the same start states, so a
    policy that ignores the target gets the same returns."""
    count, length = len(envs), args.context_length
    to_go = torch.tensor(args.target_returns, dtype=torch.float32, device=device).repeat_interleave(args.eval_episodes)
    empty = partial(torch.zeros, count, length, device=device)
    seen = Windows(empty(len(model.obs_mean)), empty(math.prod(space.shape)), empty(1), empty().long(), empty().bool())
    time_step = 0

    def act(obs: np.ndarray, rewards: np.ndarray, running: np.ndarray) -> np.ndarray:
        nonlocal seen, to_go, time_step
        to_go = to_go - torch.from_numpy(rewards).to(to_go)
        seen = Windows(*(x.roll(-1, 1) for x in seen))
        seen.obs[:, -1] = (torch.from_numpy(obs.astype(np.float32)).to(device) - model.obs_mean) / model.obs_std
        seen.rtg[:, -1, 0] = to_go / args.rtg_scale
        seen.timesteps[:, -1], seen.mask[:, -1], seen.actions[:, -1] = time_step, True, 0
        time_step += 1
        rows = torch.from_numpy(running).to(device)
        seen.actions[rows, -1] = model(Windows(*(x[rows] for x in seen)))[:, -1]
        return to_env(seen.actions[:, -1].cpu().numpy(), space)

    model.eval()
    returns, *_ = rollouts(envs, act, args.seed, video, args.eval_episodes)
    model.train()
    return returns.reshape(len(args.target_returns), args.eval_episodes)


def scores(returns: np.ndarray, targets: tuple[float, ...]) -> dict[str, float]:
    """Columns of one evaluation: returns (targets, episodes)."""
    means, asked = returns.mean(1), np.repeat(targets, returns.shape[1])
    columns = {"eval/return": means[0].item()}
    columns |= {f"eval/return_at_{target:g}": mean.item() for target, mean in zip(targets, means)}
    if len(set(targets)) > 1:
        columns["eval/slope"] = np.polyfit(asked, returns.ravel(), 1)[0].item()
    return columns


def train(args: Args) -> list[dict]:
    device, make = prepare(args), partial(make_env, args)
    data = None if args.evaluate else whole(load_dataset(args))  # as the authors' download script
    env, eval_envs = try_out(make, args, len(args.target_returns or TARGETS) * args.eval_episodes)
    obs_size, space = env.observation_space.shape[0], env.action_space
    check(args, space)
    model = DecisionTransformer(obs_size, math.prod(space.shape), args).to(device)

    def score_agent(video: Path | None = None) -> dict[str, float]:
        if not eval_envs:
            return {}
        returns = achieved(model, eval_envs, space, args, device, video)
        first = {"episodes": args.eval_episodes, "eval/return_std": returns[0].std().item()}  # as in `evaluate`
        return scores(returns, args.target_returns) | (first if args.evaluate else {})

    if args.evaluate:
        return score_saved(args, score_agent, model=model)
    check_spaces(data, obs_size, space)
    returns = data.trajectory_returns()
    lowest, highest = returns.min().item(), returns.max().item()
    if not args.target_returns:
        args.target_returns = tuple(float(f"{lowest + share * (highest - lowest):.4g}") for share in TARGETS)
    if args.rtg_scale is None:
        args.rtg_scale = (max(abs(lowest), abs(highest)) or 1.0) if args.dataset else 1_000.0
    model.obs_mean.copy_(torch.from_numpy(data.obs.mean(0, np.float64)))
    model.obs_std.copy_(torch.from_numpy(data.obs.std(0, np.float64) + 1e-6))
    rows = sequences(data, space, model, args.rtg_scale, device)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=args.weight_decay, fused=True)
    generator = torch.Generator(device).manual_seed(args.seed)
    run = Run(args, NAME, data.name, args.max_steps, ("loss", "eval/return", "eval/slope"))
    run.print(f"{data.name}: {len(data.starts)} trajectories, {len(data.obs)} steps, returns up to {highest:.0f}; "
              f"target returns: {', '.join(f'{target:g}' for target in args.target_returns)}; "
              f"returns-to-go are divided by {args.rtg_scale:g}")  # fmt: skip
    parts = dict(model=model, optimizer=optimizer, generator=generator)
    run.restore(**parts)
    step = run.step
    while step < run.total:
        # update
        optimizer.param_groups[0]["lr"] = args.learning_rate * min((step + 1) / max(args.warmup_steps, 1), 1)
        first = torch.randint(len(rows.obs), (args.batch_size,), generator=generator, device=device)
        metrics = update(model, optimizer, windows(rows, first, args.context_length), args)
        step += 1

        # evaluate
        due = run.due(step, args.eval_every)
        if due or run.due(step, args.log_every):
            columns = {name: value.item() for name, value in metrics.items()}
            columns["time/updates_per_second"] = run.speed(step)
            if due and eval_envs:
                columns |= compared(score_agent(), data, run, step)
            run.log(step, **columns)
        run.end_step(step, parts)

    curves = {"return": ("eval/return_at_*",), "loss": ("loss",), "slope": ("eval/slope",)}
    return run.finish(model.state_dict(), curves, f"{TITLE} on {data.name}")


if __name__ == "__main__":
    main(Args, train, NAME)
