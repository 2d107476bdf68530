"""IQL, TD3+BC, CQL, AWAC and Decision Transformer beside CORL's on the same file: updates per second, and scores.

    git clone https://github.com/corl-team/CORL /tmp/corl
    python benchmarks/peers/offline_corl.py speed --corl /tmp/corl --rounds 5         -> results/speed_ALGO.json
    python benchmarks/peers/offline_corl.py score --corl /tmp/corl --seeds 3          -> results/score_offline.json
    python benchmarks/peers/offline_corl.py score --corl /tmp/corl --seeds 5 --algos iql --iql-steps 100000 --cloning \
        --jobs 2 --datasets data/Hopper-v5/medium-replay.hdf5 data/Hopper-v5/medium-expert.hdf5
    python benchmarks/peers/offline_corl.py table --corl /tmp/corl --jobs 2           -> results/table_offline.jsonl

CORL's files algorithms/offline/iql.py, td3_bc.py, cql.py, awac.py and dt.py are imported as they are, with empty
modules in place of d4rl, gym, pyrallis and wandb, of which only what is not used here is needed. Its networks, data and
updates are its own; the loops around them are those of its `train`, without what they log (which is in its favour).

speed: batch 256, two hidden layers of 256 for IQL, TD3+BC and CQL, which has 4 sampled actions, three for ReBRAC; batch
64, K = 20, three layers of 128, dropout 0.1 for DT. CORL reads DT's windows in the four processes of its data loader.
Its ReBRAC is JAX (pip install jax flax optax chex), for information. Each run is a fresh process; sides take turns.
score: the same file, number of updates, batch and network sizes, learning rate and reward treatment; everything else is
as each code has it. CORL normalises observations for IQL; the side "normalized" is ours with --normalize. Evaluation is
ours for all: the same environments, start states and episodes. --cloning adds 10 %-BC (bc.py) with as many updates. The
intervals are Student's for the mean of the seeds' differences, which are taken as normal: a bootstrap of three seeds
cannot leave the range from their smallest difference to their largest.
table: 100,000 updates of 256 rows on data/Hopper-v5/medium-replay.hdf5 and medium-expert.hdf5, the mean of the last 10
of 20 evaluations with 10 episodes each. Two hidden layers of 256 (ReBRAC's three), learning rate 3e-4, normalised
observations (ReBRAC, FQL and the cloning: raw). TABLE has the rest: what the authors of ReBRAC and CORL's
configurations set for these datasets, with 4 sampled actions for CQL, and for FQL, which has none there, the middle of
what its authors try. IQL is as in `score`. A stopped table goes on; --algos and --sides pick a part. About 30 hours of
one core.
"""

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.peers.trl_grpo import machine  # noqa: E402
from utils.control import evaluate, make_env, rollouts, to_env, to_unit  # noqa: E402
from utils.offline import load_dataset  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
Algo = Literal["iql", "td3_bc", "cql", "rebrac", "dt"]
TABLE: dict[str, dict] = {
    "bc": {"top_fraction": 0.1}, "iql": {"normalize": True}, "td3_bc": {},
    "awac": {"normalize": True, "temperature": 1 / 3},
    "rebrac": {"normalize": False, "batch_size": 256}, "fql": {"normalize_q": True, "alpha": 1.0},
    "cql": {"cql_weight": 10.0, "policy_learning_rate": 3e-5, "backup_entropy": False},
}  # fmt: skip
REBRAC = {"medium-replay": {"actor_bc": 0.05, "critic_bc": 0.5}, "medium-expert": {"actor_bc": 0.1, "critic_bc": 0.01}}
SIDES = dict.fromkeys(("iql", "td3_bc", "cql", "rebrac"), ("ours", "corl")) | {"dt": ("ours", "bfloat16", "corl")}
AIMS = {"iql": (1.0, 1.4), "td3_bc": (1.1, 1.1), "cql": (1.1, 1.1), "rebrac": None, "dt": (1.1, 1.8)}
PAPER_DT = dict(embed_dim=128, num_layers=3, num_heads=1, context_length=20, batch_size=64, dropout=0.1,
                learning_rate=1e-4, warmup_steps=10_000)  # fmt: skip

SMALL_DT = dict(embed_dim=128, num_layers=3, num_heads=1, context_length=3, batch_size=192, dropout=0.1,
                learning_rate=1e-3, warmup_steps=100)  # fmt: skip


def corl_module(folder: Path, algo: str):
    """CORL's script as a module."""
    for name in ("d4rl", "gym", "pyrallis", "wandb"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["gym"].Env = object
    sys.modules["pyrallis"].wrap = lambda: lambda function: function
    spec = importlib.util.spec_from_file_location(f"corl_{algo}", folder / "algorithms" / "offline" / f"{algo}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


def read(dataset: str):
    """The dataset, a function that makes its environment, and its action space."""
    from algos import bc

    args = bc.Args(dataset=dataset)
    data = load_dataset(args)
    make = partial(make_env, args)
    env = make()
    env.close()
    return data, make, env.action_space


def corl_iql(folder: Path, dataset: str, seed: int, steps: int):
    """(update, score(episodes)) of CORL's IQL with its defaults and rewards divided by the range of returns."""
    corl, (data, make, space) = corl_module(folder, "iql"), read(dataset)
    corl.set_seed(seed)
    config = corl.TrainConfig(max_timesteps=steps)
    rewards = data.rewards.copy()
    returns = data.trajectory_returns()
    rewards *= 1000 / (returns.max() - returns.min())
    mean, std = corl.compute_mean_std(data.obs, eps=1e-3)
    columns = {"observations": corl.normalize_states(data.obs, mean, std), "actions": to_unit(data.actions, space),
               "next_observations": corl.normalize_states(data.next_obs, mean, std), "rewards": rewards,
               "terminals": data.terminated}  # fmt: skip
    buffer = corl.ReplayBuffer(data.obs.shape[1], data.actions.shape[1], len(rewards))
    buffer.load_d4rl_dataset({name: column[data.known] for name, column in columns.items()})
    sizes = data.obs.shape[1], data.actions.shape[1]
    q, v, actor = corl.TwinQ(*sizes), corl.ValueFunction(sizes[0]), corl.GaussianPolicy(*sizes, 1.0)
    adam = partial(torch.optim.Adam, lr=3e-4)
    trainer = corl.ImplicitQLearning(
        max_action=1.0, actor=actor, actor_optimizer=adam(actor.parameters()), q_network=q,
        q_optimizer=adam(q.parameters()), v_network=v, v_optimizer=adam(v.parameters()), iql_tau=config.iql_tau,
        beta=config.beta, max_steps=steps, discount=config.discount, tau=config.tau,
    )  # fmt: skip

    def update():
        trainer.train([part.to("cpu") for part in buffer.sample(256)])

    return update, scorer(actor, lambda states: actor(states).mean, make, seed, mean, std, space)


def scorer(actor, policy, make, seed: int, mean, std, space):
    """score(episodes): the mean return of policy(normalised observations), in our evaluation."""

    @torch.no_grad()
    def act(obs, scale, generator):
        states = torch.from_numpy(((obs - mean) / std).astype(np.float32))
        return to_env(policy(states).clamp(-1, 1).numpy(), space)

    def score(episodes: int) -> float:
        actor.eval()
        envs = [make() for _ in range(2 * episodes)]
        result = evaluate(envs, act, types.SimpleNamespace(seed=seed, evaluate=""), torch.device("cpu"))["eval/return"]
        actor.train()
        return result

    return score


def corl_actor_critic(folder: Path, dataset: str, seed: int, algo: str):
    """(update, score(episodes)) of CORL's TD3+BC with its defaults, or of its CQL or AWAC with the settings of ours and
    without the third of its layers."""
    corl, (data, make, space), own = corl_module(folder, algo), read(dataset), TABLE[algo]
    torch.manual_seed(seed)
    np.random.seed(seed)
    mean, std = corl.compute_mean_std(data.obs, eps=1e-3)
    columns = {"observations": (data.obs - mean) / std, "actions": to_unit(data.actions, space),
               "next_observations": (data.next_obs - mean) / std, "rewards": data.rewards,
               "terminals": data.terminated}  # fmt: skip
    sizes = data.obs.shape[1], data.actions.shape[1]
    buffer = corl.ReplayBuffer(*sizes, len(data.obs))
    buffer.load_d4rl_dataset(columns)
    if algo == "cql":
        layers = dict(orthogonal_init=False, n_hidden_layers=2)
        parts = {f"critic_{i}": corl.FullyConnectedQFunction(*sizes, **layers) for i in (1, 2)}
        parts["actor"] = actor = corl.TanhGaussianPolicy(*sizes, 1.0, orthogonal_init=False)
        actor.base_network[4] = actor.base_network[5] = torch.nn.Identity()
        trainer = partial(corl.ContinuousCQL, target_entropy=-sizes[1], bc_steps=0, cql_n_actions=4,
                          policy_lr=own["policy_learning_rate"], cql_alpha=own["cql_weight"])  # fmt: skip
        policy = lambda states: actor(states, deterministic=True)[0]  # noqa: E731
    elif algo == "awac":
        parts = {name: make_one(*sizes, 256) for name, make_one in
                 (("actor", corl.Actor), ("critic_1", corl.Critic), ("critic_2", corl.Critic))}  # fmt: skip
        for part in parts.values():
            part._mlp[4] = part._mlp[5] = torch.nn.Identity()
        trainer = partial(corl.AdvantageWeightedActorCritic, awac_lambda=own["temperature"])
        policy = lambda states: parts["actor"]._get_policy(states).mean  # noqa: E731
    else:
        parts = dict(actor=corl.Actor(*sizes, 1.0), critic_1=corl.Critic(*sizes), critic_2=corl.Critic(*sizes))
        trainer, policy = partial(corl.TD3_BC, 1.0), parts["actor"]
    rates = {"actor": own.get("policy_learning_rate", 3e-4)}
    optimizers = {f"{name}_optimizer": torch.optim.Adam(part.parameters(), lr=rates.get(name, 3e-4))
                  for name, part in parts.items()}  # fmt: skip
    made = trainer(**parts, **optimizers)
    step = made.update if algo == "awac" else made.train
    return lambda: step(buffer.sample(256)), scorer(parts["actor"], policy, make, seed, mean, std, space)


def corl_rebrac(folder: Path, dataset: str):
    """updates(n): n updates of 256 rows of CORL's ReBRAC, which is JAX, in one compiled loop as in its `train`."""
    import jax
    import optax

    jax.tree_map = jax.tree.map  # JAX no longer has it
    corl, (data, _, space) = corl_module(folder, "rebrac"), read(dataset)
    actions = to_unit(data.actions, space)
    columns = dict(states=data.obs, actions=actions, rewards=data.rewards, next_states=data.next_obs,
                   next_actions=np.roll(actions, -1, 0), dones=data.terminated)  # fmt: skip
    config, buffer = corl.Config(), corl.ReplayBuffer(data={k: jax.numpy.float32(x) for k, x in columns.items()})
    key, keys = jax.random.PRNGKey(0), jax.random.split(jax.random.PRNGKey(1))
    one, learned = (data.obs[:1], actions[:1]), {}
    shape = dict(hidden_dim=config.hidden_dim, n_hiddens=config.actor_n_hiddens)
    for name, module, state, given in (
        ("actor", corl.DetActor(actions.shape[1], layernorm=config.actor_ln, **shape), corl.ActorTrainState, one[:1]),
        ("critic", corl.EnsembleCritic(num_critics=2, layernorm=config.critic_ln, **shape), corl.CriticTrainState, one),
    ):
        start = module.init(keys[len(learned)], *given)
        learned[name] = state.create(apply_fn=module.apply, params=start, target_params=start, tx=optax.adam(1e-3))
    both = dict(gamma=config.gamma, actor_bc_coef=config.actor_bc_coef, critic_bc_coef=config.critic_bc_coef,
                tau=config.tau, policy_noise=config.policy_noise, noise_clip=config.noise_clip)  # fmt: skip

    def step(i, carry):
        key, batch_key = jax.random.split(carry["key"])
        how = carry | both | dict(key=key, batch=buffer.sample_batch(batch_key, 256))
        parts = jax.lax.cond(i % config.policy_freq == 0, partial(corl.update_td3, normalize_q=True, **how),
                             partial(corl.update_td3_no_targets, **how))  # fmt: skip
        return dict(zip(("key", "actor", "critic", "metrics"), parts))

    names = ("critic_loss", "q_min", "actor_loss", "bc_mse_policy", "bc_mse_random", "action_mse")
    carry = learned | dict(key=key, metrics=corl.Metrics.create(names))
    loop = jax.jit(lambda count, carry: jax.lax.fori_loop(0, count, step, carry))
    return lambda count: jax.block_until_ready(loop(count, carry))


def corl_dt(folder: Path, dataset: str, seed: int, settings: dict):
    """(update, score(episodes)) of CORL's Decision Transformer; the score asks for the best return in the data."""
    corl, (data, make, space) = corl_module(folder, "dt"), read(dataset)
    corl.set_seed(seed)
    parts = np.split(np.arange(len(data.obs)), data.starts[1:])
    trajectories = [{"observations": data.obs[rows], "actions": to_unit(data.actions[rows], space).astype(np.float32),
                     "rewards": data.rewards[rows], "returns": corl.discounted_cumsum(data.rewards[rows], 1.0)}
                    for rows in parts]  # fmt: skip
    info = {"obs_mean": data.obs.mean(0, keepdims=True), "obs_std": data.obs.std(0, keepdims=True) + 1e-6,
            "traj_lens": np.array([len(rows) for rows in parts])}  # fmt: skip
    corl.load_d4rl_trajectories = lambda *_, **__: (trajectories, info)
    length, target = settings["context_length"], data.trajectory_returns().max()
    sequences = corl.SequenceDataset("", seq_len=length, reward_scale=0.001)
    loader = iter(torch.utils.data.DataLoader(sequences, batch_size=settings["batch_size"], num_workers=4))
    drop = settings["dropout"]
    model = corl.DecisionTransformer(data.obs.shape[1], data.actions.shape[1], length, 1000, settings["embed_dim"],
                                     settings["num_layers"], settings["num_heads"], drop, drop, drop)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), settings["learning_rate"], weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / settings["warmup_steps"], 1))

    def update():
        states, actions, returns, time_steps, mask = next(loader)
        predicted = model(states, actions, returns.float(), time_steps, ~mask.to(torch.bool))
        loss = (torch.nn.functional.mse_loss(predicted, actions, reduction="none") * mask.unsqueeze(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        scheduler.step()

    @torch.no_grad()
    def score(episodes: int) -> float:
        model.eval()
        sizes = data.obs.shape[1], data.actions.shape[1]
        states, actions = torch.zeros(episodes, 1001, sizes[0]), torch.zeros(episodes, 1000, sizes[1])
        to_go, times, step = torch.zeros(episodes, 1001), torch.arange(1000).expand(episodes, -1), 0
        to_go[:, 0] = target * 0.001

        def act(obs, rewards, running):
            nonlocal step
            states[:, step] = torch.from_numpy((obs - info["obs_mean"]) / info["obs_std"])
            if step:
                to_go[:, step] = to_go[:, step - 1] - torch.from_numpy(rewards * 0.001)
            seen = [x[running, : step + 1][:, -length:] for x in (states, actions, to_go, times)]
            actions[torch.from_numpy(running), step] = model(*seen)[:, -1]
            step += 1
            return to_env(actions[:, step - 1].numpy(), space)

        return rollouts([make() for _ in range(episodes)], act, seed)[0].mean().item()

    return update, score


def ours(algo: str, dataset: str, seed: int, steps: int, settings: dict) -> list[dict]:
    """The history of our script, started as a user would."""
    script = importlib.import_module(f"algos.{algo}")
    settings = {"save_every": 10**9, "eval_every": 0, "threads": torch.get_num_threads()} | settings
    return script.train(script.Args(dataset=dataset, seed=seed, max_steps=steps, **settings))


def worker(algo: Algo, side: str, corl: Path, dataset: str, threads: int, steps: int) -> None:
    """Updates per second of one side after a warm-up, in this process; a line of JSON last."""
    torch.set_num_threads(threads)
    warm = max(10, steps // 10)
    if side == "corl" and algo == "rebrac":
        updates = corl_rebrac(corl, dataset)
        updates(warm)
        start = time.perf_counter()
        updates(steps)
        rate = steps / (time.perf_counter() - start)
    elif side == "corl":
        peer, settings = {
            "iql": (corl_iql, steps),
            "td3_bc": (corl_actor_critic, "td3_bc"),
            "cql": (corl_actor_critic, "cql"),
            "dt": (corl_dt, PAPER_DT),
        }[algo]
        update, _ = peer(corl, dataset, 1, settings)
        for _ in range(warm):
            update()
        start = time.perf_counter()
        for _ in range(steps):
            update()
        rate = steps / (time.perf_counter() - start)
    else:
        settings = dict(eval_episodes=1, log_every=warm) | (PAPER_DT | {
            "precision": "bfloat16" if side == "bfloat16" else "float32", "target_returns": (1.0,)} if algo == "dt"
            else {"top_fraction": 1.0, "batch_size": 256} if algo in ("td3_bc", "rebrac")
            else {"top_fraction": 1.0, "backup_entropy": False} if algo == "cql" else {})  # fmt: skip
        history = ours(algo, dataset, 1, warm * (1 + -(-steps // warm)), settings)
        rate = statistics.harmonic_mean([row["time/updates_per_second"] for row in history[1:]])
    print()
    print(json.dumps(rate))


def measure(threads: int, *words) -> object:
    """What a command of this script prints last, run in a fresh process."""
    environment = os.environ | {variable: str(threads) for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, str(Path(__file__).resolve()), *map(str, words)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def speed(corl: Path, dataset: str = "", rounds: int = 5, threads: int = 2,
          algos: tuple[Algo, ...] = ("iql", "td3_bc", "cql", "dt")) -> None:  # fmt: skip
    """Times all sides in turn, and writes results/speed_ALGO.json where there were at least 3 rounds."""
    corl, dataset = corl.resolve(), dataset and str(Path(dataset).resolve())
    for algo in algos:
        steps, runs = {"iql": 1000, "td3_bc": 2000, "cql": 200, "rebrac": 1000, "dt": 60}[algo], []
        for i in range(rounds):
            order = SIDES[algo][:: 1 if i % 2 == 0 else -1]
            runs.append({side: measure(threads, "worker", "--algo", algo, "--side", side, "--corl", corl, "--dataset",
                                       dataset, "--threads", threads, "--steps", steps) for side in order})  # fmt: skip
            print(algo, f"round {i + 1}:", {side: round(rate, 1) for side, rate in runs[-1].items()}, flush=True)
        ratios = {side: [run[side] / run["corl"] for run in runs] for side in SIDES[algo] if side != "corl"}
        result = {
            "updates_per_second": {side: round(statistics.median(run[side] for run in runs), 1) for side in runs[0]},
            "over_corl": {side: {"median": round(statistics.median(r), 2), "min": round(min(r), 2),
                                 "max": round(max(r), 2)} for side, r in ratios.items()},
            "floor_and_aim": AIMS[algo], "rounds": runs,
        }  # fmt: skip
        print(algo, result["over_corl"])
        if rounds >= 3:
            result = {algo: result, "threads": threads, "machine": machine()}
            (RESULTS / f"speed_{algo}.json").write_text(json.dumps(result, indent=1) + "\n")


def score_worker(algo: str, side: str, corl: Path, dataset: str, seed: int, steps: int, episodes: int) -> None:
    """The return of one run of one side at its end, as a line of JSON."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if side == "corl":
        update, score = (
            corl_iql(corl, dataset, seed, steps) if algo == "iql" else corl_dt(corl, dataset, seed, SMALL_DT)
        )
        for _ in range(steps):
            update()
        result = score(episodes)
    else:
        settings: dict = {"eval_episodes": episodes}
        if side == "cloning":
            algo, settings = "bc", settings | {"top_fraction": 0.1}
        elif side == "normalized":
            settings["normalize"] = True
        elif algo == "dt":
            settings |= SMALL_DT | {"target_returns": (float(read(dataset)[0].trajectory_returns().max()),)}
        result = ours(algo, dataset, seed, steps, settings)[-1]["eval/return"]
    print()
    print(json.dumps(result))


def difference(ours: list[float], theirs: list[float]) -> dict:
    """The mean of ours less theirs, paired by seed, and Student's 95 % interval for it."""
    pairs = np.subtract(ours, theirs)
    half = stats.t.ppf(0.975, len(pairs) - 1) * stats.sem(pairs)
    return {"mean": pairs.mean().item(), "t_95_percent": [pairs.mean() - half, pairs.mean() + half]}


def differences(row: dict) -> dict:
    """Per side of ours with two seeds or more: its difference from CORL."""
    return {side: difference(row[side], row["corl"]) for side in ("ours", "normalized")
            if len(row.get(side, ())) == len(row.get("corl", ())) > 1}  # fmt: skip


def score(corl: Path, datasets: tuple[str, ...] = ("",), algos: tuple[Algo, ...] = ("iql", "dt"), seeds: int = 3,
          iql_steps: int = 10_000, dt_steps: int = 1_200, episodes: int = 20, threads: int = 1, jobs: int = 1,
          cloning: bool = False) -> None:  # fmt: skip
    """Trains all sides on each dataset ("": the one that ships), `jobs` runs side by side, and adds to
    results/score_offline.json the seeds that each lacks."""
    path = RESULTS / "score_offline.json"
    results = json.loads(path.read_text())["results"] if path.exists() else []
    for dataset, algo in itertools.product(datasets, algos):
        sides = ("ours", "corl", *(("cloning",) if cloning else ()), *(("normalized",) if algo == "iql" else ()))
        about: dict = {"algo": algo, "dataset": "/".join(Path(dataset).parts[-2:]) or "shipped",
                       "updates": {"iql": iql_steps, "dt": dt_steps}[algo], "episodes": episodes}  # fmt: skip
        row = next((row for row in results if row | about == row), None)
        if row is None:
            results.append(row := about)
        row["steps"] = len(read(dataset)[0].obs)
        missing = [(seed, side) for side, seed in itertools.product(sides, range(1, seeds + 1))
                   if seed > len(row.setdefault(side, []))]  # fmt: skip
        where = dataset and Path(dataset).resolve()
        words = ("score-worker", "--algo", algo, "--corl", corl.resolve(), "--dataset", where, "--steps",
                 about["updates"], "--episodes", episodes)  # fmt: skip
        calls = [partial(measure, threads, *words, "--side", side, "--seed", seed) for seed, side in missing]
        with ThreadPoolExecutor(jobs) as pool:
            for (seed, side), value in zip(missing, pool.map(lambda call: call(), calls)):
                row[side].append(value)
                row["over_corl"] = differences(row)
                path.write_text(json.dumps({"results": results, "machine": machine()}, indent=1) + "\n")
                print(algo, about["dataset"], f"seed {seed}:", side, round(value), flush=True)


def table_worker(algo: str, side: str, corl: Path, dataset: str, seed: int, steps: int) -> None:
    """The last 10 of 20 evaluations of one run of the table, as a line of JSON."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    every = steps // 20
    if side == "corl":
        update, score = (corl_iql(corl, dataset, seed, steps) if algo == "iql" else
                         corl_actor_critic(corl, dataset, seed, algo))  # fmt: skip
        returns = []
        for step in range(1, steps + 1):
            update()
            if step % every == 0 and step > steps // 2:
                returns.append(score(10))
    else:
        settings = TABLE[algo] | (REBRAC[Path(dataset).stem] if algo == "rebrac" else {})
        history = ours(algo, dataset, seed, steps, {"eval_every": every, "eval_episodes": 10} | settings)
        returns = [row["eval/return"] for row in history if "eval/return" in row][-10:]
    print()
    print(json.dumps([round(value, 1) for value in returns]))


def table(corl: Path, data: Path = Path("data/Hopper-v5"), names: tuple[str, ...] = ("medium-replay", "medium-expert"),
          algos: tuple[str, ...] = tuple(TABLE), sides: tuple[str, ...] = ("ours", "corl"), seeds: int = 5,
          steps: int = 100_000, jobs: int = 1) -> None:  # fmt: skip
    """Runs what results/table_offline.jsonl lacks, `jobs` runs side by side: seed by seed, the quickest first."""
    path = RESULTS / "table_offline.jsonl"
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    runs = [
        {"data": name, "algo": algo, "side": side, "seed": seed, "updates": steps}
        for seed, name, algo, side in itertools.product(range(1, seeds + 1), names, algos, sides)
        if (side == "ours" or algo not in ("bc", "rebrac", "fql")) and (algo != "fql" or name == "medium-expert")
    ]
    missing = [about for about in runs if not any(row | about == row for row in done)]

    def run(about: dict) -> None:
        words = [part for key in ("algo", "side", "seed") for part in (f"--{key}", about[key])]
        start = time.perf_counter()
        returns = measure(1, "table-worker", *words, "--corl", corl.resolve(), "--dataset",
                          (data / f"{about['data']}.hdf5").resolve(), "--steps", steps)  # fmt: skip
        with open(path, "a") as file:
            file.write(json.dumps(about | {"returns": returns, "seconds": round(time.perf_counter() - start)}) + "\n")
        print(*about.values(), round(statistics.mean(returns)), flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, missing))


def offline_table() -> str:
    """For benchmarks/README.md: the table at 100,000 updates."""
    path = RESULTS / "table_offline.jsonl"
    found: dict[tuple, dict[int, float]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        found.setdefault((row["data"], row["algo"], row["side"]), {})[row["seed"]] = statistics.mean(row["returns"])

    def returns(key: tuple) -> str:
        return ", ".join(f"{found[key][seed]:,.0f}" for seed in sorted(found.get(key, ())))

    def less(key: tuple, other: tuple) -> str:
        seeds = sorted(found.get(key, {}).keys() & found.get(other, {}).keys())
        if key == other or len(seeds) < 2:
            return ""
        result = difference(*([found[side][seed] for seed in seeds] for side in (key, other)))
        low, high = result["t_95_percent"]
        return f"{result['mean']:,.0f} ({low:,.0f} to {high:,.0f})"

    rows = ["| | plainrl | CORL | plainrl less CORL | less IQL | less 10 %-BC |", "|---" * 6 + "|"]
    for name, algo in dict.fromkeys(key[:2] for key in found):
        key, title = (name, algo, "ours"), "10 %-BC" if algo == "bc" else importlib.import_module(f"algos.{algo}").TITLE
        cells = [returns(key), returns((name, algo, "corl")), less(key, (name, algo, "corl")),
                 less(key, (name, "iql", "ours")), less(key, (name, "bc", "ours"))]  # fmt: skip
        rows.append(f"| {title}, {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    commands = {"speed": speed, "score": score, "table": table, "worker": worker, "score-worker": score_worker,
                "table-worker": table_worker}  # fmt: skip
    tyro.extras.subcommand_cli_from_dict(commands)
