"""Records what verl and the authors of seven algorithms compute, for tests/test_parity_verl.py.

    python benchmarks/peers/make_verl_fixtures.py FOLDER      checkouts: FOLDER/verl, FOLDER/NFT, ...

writes tests/fixtures/verl.safetensors: the inputs, and the gradients and rewards of each project. Their functions run
unchanged, cut out of their files; where the loss stands in the middle of a loop, those of its lines. Recorded with
verl b178a3c (ppo_lm, reinforce_lm), NFT b358fae, Minimal-RL e3b49f0 (raft), RLVR-Decomposed a5d4e7c (nsr), TBA c6075e2,
VinePPO efe7228, ROLL 8eb27cc (topr) and TTRL 3e2cc93, which needs latex2sympy2, pylatexenc and word2number.
"""

import ast
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Optional

import numpy as np
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.peers.make_reinforce_pp_fixtures import cut_out  # noqa: E402

PATH = ROOT / "tests" / "fixtures" / "verl.safetensors"
P, G, T, BETA, BASELINE = 4, 4, 6, 0.3, -0.4
B, EPSILON, HIGH = P * G, 0.2, 0.3
PPO = [(1.0, 0.95, "token-mean", 1e9), (0.9, 0.7, "seq-mean-token-sum-norm", 1e9), (1.0, 0.95, "token-mean", 3.0)]
NFT = [(1, 1.0, 1.0), (2, 0.5, 0.7)]  # weight of prompts, weight of wrong answers, bound
RAFT = [("raft", "right", "plain"), ("raft", "right", "plusplus"), ("reinforce_rej", "right", "plusplus"),
        ("reinforce_rej", "all", "plusplus")]  # fmt: skip
RAFT = [(*case, mode) for case in RAFT for mode in ("token-mean", "seq-mean-token-mean")]
NSR = {"positive": (1.0, 0.0), "negative": (0.0, 1.0), "weighted": (0.1, 1.0)}
VOTES = [  # four answers to each prompt, of which two are trained, and what is right
    (r"\boxed{3} \boxed{4} \boxed{4} \boxed{6}", "4"),
    (r"\boxed{2} \boxed{5} \boxed{2} \boxed{5}", "5"),  # of two with as many votes the first
    (r"\boxed{1} \boxed{\frac{1}{3}} \boxed{7} \boxed{7}", "1"),
    (r"no \boxed{8} \boxed{8} \boxed{8}", "7"),
    (r"no yes well \boxed{8}", "8"),  # from here on theirs are others: three that say nothing,
    (r"so:9 then:9 \boxed{8} no", "9"),  # two numbers without a box,
    (r"\boxed{0.5} \boxed{\frac{1}{2}} \boxed{0.5} no", "0.5"),  # two ways to say one thing,
    (r"\boxed{\frac{1}{3}} \boxed{6} \boxed{\frac{1}{3}} no", r"\frac{1}{3}"),  # a label that is no number,
    ("no yes well no", "8"),  # and silence
]


def inputs() -> dict[str, torch.Tensor]:
    """Ragged completions (B, T), the even ones with an EOS. Groups: all right, all wrong, one right, three right.
    ends: behind which tokens a step ends. The seed is one with which ratios, penalties and lengths reach every branch
    (the first test)."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, T + 1, (B, 1), generator=g)
    lengths[::2] = lengths[::2].clamp(min=2)  # of an EOS alone there is no text
    mask = torch.arange(T) < lengths
    logps, ref = -5 * torch.rand(2, B, T, generator=g, dtype=torch.float64)
    noise, values, old_values = torch.randn(3, B, T, generator=g, dtype=torch.float64)
    more = torch.arange(1, T + 1) < lengths - (torch.arange(B)[:, None] % 2 == 0).long()
    return dict(mask=mask, logps=logps * mask, old=(logps + 0.8 * noise) * mask, ref=ref * mask, values=values * mask,
                old_values=old_values * mask, ends=(torch.rand(B, T, generator=g, dtype=torch.float64) < 0.5) & more,
                rewards=torch.tensor([1.0] * 4 + [0.0] * 4 + [1.0, 0, 0, 0, 0, 1, 1, 1], dtype=torch.float64),
                graded=torch.rand(B, generator=g, dtype=torch.float64))  # fmt: skip


def cut_lines(path: Path, function: str, first: str, last: str, scope: dict) -> dict:
    """Runs the lines of a function from the one that assigns `first` to the one that assigns `last` in `scope`."""

    def assigns(line: ast.stmt, name: str) -> bool:
        return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(line))

    (method,) = [n for n in ast.walk(ast.parse(path.read_text())) if getattr(n, "name", None) == function]
    blocks = [block for node in ast.walk(method) for _, block in ast.iter_fields(node) if isinstance(block, list)]
    lines = [b for b in blocks if any(isinstance(line, ast.Assign) and assigns(line, first) for line in b)][-1]
    start = next(i for i, line in enumerate(lines) if assigns(line, first))
    end = next(i for i, line in enumerate(lines) if i >= start and assigns(line, last))
    exec(compile(ast.Module(lines[start : end + 1], []), path, "exec"), scope)
    return scope[last]


def leaf(data: dict, name: str = "logps") -> torch.Tensor:
    return data[name].clone().requires_grad_()


def slope(loss: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, at)[0]


def at_the_end(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B,) -> (B, T): each at its completion's last token."""
    return torch.zeros(mask.shape).scatter(1, mask.sum(1, keepdim=True).long() - 1, rewards[:, None])


def tools(path: Path, *more: str) -> dict:
    """A scope with a project's verl_F."""
    scope = {"torch": torch, "defaultdict": defaultdict}
    cut_out(path, ("masked_mean", "masked_var", "masked_whiten", *more), scope)
    return scope | {"verl_F": SimpleNamespace(**scope)}


def by_verl(folder: Path, data: dict) -> dict[str, torch.Tensor]:
    names = "rewards", "gae_advantage_return", "policy_loss_vanilla", "value_loss", "rloo_outcome_advantage"
    scope = tools(folder / "verl/utils/torch_functional.py", "masked_sum", "clip_by_value")
    scope |= {"AlgoConfig": ModuleType, "Optional": Optional, "np": np}
    core = folder / "verl/trainer/ppo/core_algos.py"
    cut_out(core, ("agg_loss",), scope)
    penalise, gae, policy, value, leave_one_out = cut_out(core, tuple(f"compute_{name}" for name in names), scope)
    mask, found = data["mask"].double(), {}

    def gradient(old: torch.Tensor, advantages: torch.Tensor, mode: str, bound: float) -> torch.Tensor:
        settings = dict(clip_ratio=None, clip_ratio_low=EPSILON, clip_ratio_high=HIGH, global_batch_info={})
        config, logps = SimpleNamespace(**settings, get={"clip_ratio_c": bound}.get), leaf(data)
        return slope(policy(old, logps, advantages, mask, mode, config)[0], logps)

    for i, (gamma, gae_lambda, mode, bound) in enumerate(PPO):
        rewards = penalise(at_the_end(data["rewards"], mask), data["old"], data["ref"], BETA) * mask
        advantages, returns = gae(rewards, data["old_values"], mask, gamma, gae_lambda)
        values = leaf(data, "values")
        error = value(values, returns, data["old_values"], mask, EPSILON, mode)[0]
        found |= {f"ppo_lm/{i}": gradient(data["old"], advantages, mode, bound),
                  f"ppo_lm/{i}/values": slope(error, values)}  # fmt: skip
    advantages = leave_one_out(at_the_end(data["graded"], mask), mask, [0] * B)[0]  # as if all had one prompt
    return found | {"reinforce_lm": gradient(data["logps"], advantages, "seq-mean-token-sum", 3.0)}


def by_nft(folder: Path, data: dict) -> dict[str, torch.Tensor]:
    """Of the mixed groups, as theirs draws no others. `far`: ratios beyond e^10. `rare`: one answer in 100 is right."""
    scope = {"torch": torch, "defaultdict": defaultdict}
    (advantage,) = cut_out(folder / "ray_nft_trainer.py", ("compute_dapo_nft_outcome_advantage",), scope)
    scope |= tools(folder.parent / "verl/verl/utils/torch_functional.py", "masked_sum")  # for a metric
    cut_out(folder / "dp_actor.py", ("clamp_preserve_grad",), scope)
    mixed = {name: tensor[2 * G :] for name, tensor in data.items()}
    mask, found = mixed["mask"].double(), {}
    far = mixed["old"].clone()
    far[:, 0] -= 12.0
    signs = at_the_end(2 * mixed["rewards"] - 1, mask)
    rate = advantage(signs, mask, torch.arange(2).repeat_interleave(G).tolist())[2]
    cases = [(*case, mixed["old"], rate) for case in NFT]
    cases += [(*NFT[0], far, rate), (*NFT[0], mixed["old"], torch.full_like(rate, 0.01))]
    for name, (normalize, neg_weight, bound, old, rate) in zip([*range(len(NFT)), "far", "rare"], cases):
        config = SimpleNamespace(ratio_type="token", normalize=normalize, neg_weight=neg_weight, clamp_positive=0.0,
                                 clamp_negative=bound)  # fmt: skip
        logps = leaf(mixed)
        scope |= dict(self=SimpleNamespace(config=config), log_prob=logps, old_log_prob=old, response_mask=mask,
                      correct_rate=rate, correct_mask=(signs.sum(1) + 1) / 2)  # fmt: skip
        loss = cut_lines(folder / "dp_actor.py", "update_policy", "negative_approx_kl", "pg_loss", scope)
        found[f"nft/{name}"] = slope(loss, logps)
    return found


def by_minimal_rl(folder: Path, data: dict) -> dict[str, torch.Tensor]:
    """With rewards of 1 and -1, but for `right` of Reinforce-Rej, whose advantages the dual clip would cut."""
    scope = tools(folder / "verl/utils/torch_functional.py")
    core = folder / "verl/trainer/ppo/core_algos.py"
    cut_out(core, ("agg_loss",), scope)
    policy, vanilla = cut_out(core, ("compute_policy_loss", "compute_policy_loss_vanilla"), scope)
    mask, found, groups = data["mask"].double(), {}, torch.arange(P).repeat_interleave(G).tolist()
    for i, (name, select, form, mode) in enumerate(RAFT):
        (advantage,) = cut_out(core, (f"compute_{name}_outcome_advantage",), scope)
        signed = data["rewards"] if (name, select) == ("reinforce_rej", "right") else 2 * data["rewards"] - 1
        advantages = advantage(at_the_end(signed, mask), mask, *[groups] * (name != "raft"))[0]
        logps, bound = leaf(data), 1e9 if select == "all" else 3.0
        loss = (policy if form == "plusplus" else vanilla)(data["old"], logps, advantages, mask, None, EPSILON, HIGH,
                                                           bound, mode)[0]  # fmt: skip
        found[f"raft/{i}"] = slope(loss, logps)
    return found


def by_rlvr_decomposed(folder: Path, data: dict) -> dict[str, torch.Tensor]:
    """On the rows that their trainer's `fit` keeps: the right ones for PSR, the wrong ones for NSR, else all."""
    scope = tools(folder / "verl/utils/torch_functional.py")
    names = "compute_psr_nsr_outcome_advantage", "compute_policy_loss"
    advantage, policy = cut_out(folder / "verl/trainer/ppo/core_algos.py", names, scope)
    found, right = {}, data["rewards"] == 1
    for name, kept in (("positive", right), ("negative", ~right), ("weighted", right | ~right)):
        mask, logps = data["mask"][kept].double(), leaf(data)
        scores = at_the_end(data["rewards"][kept], mask)
        advantages = advantage(scores, scores, mask, 1.0, name, NSR["weighted"][0])[0]
        loss = policy(data["old"][kept], logps[kept], advantages, mask, EPSILON, scores)[0]
        found[f"nsr/{name}"] = slope(loss, logps)
    return found


def by_tba(folder: Path, data: dict) -> dict[str, torch.Tensor]:
    """One prompt in each micro-batch, as in their configurations. Two logits stand for a vocabulary: those of the token
    and of all others."""
    logps, padding, total = leaf(data), ~data["mask"], 0.0
    safe = logps.masked_fill(padding, -1.0)
    logits = torch.nn.functional.pad(torch.stack([safe, (-safe.exp()).log1p()], -1), (0, 0, 0, 1))
    for start in range(0, B, G):
        rows = np.arange(start, start + G)
        scope = dict(torch=torch, F=torch.nn.functional, model=None, tokenizer=SimpleNamespace(pad_token_id=0),
                     forward=lambda _, rows, __: SimpleNamespace(logits=logits[rows].clone()), context_length=1,
                     args=SimpleNamespace(temperature=1 - 1e-7, rloo_k=G, kl_coef=BETA), logZ_k_size=G,
                     mb_query_responses=rows, mb_responses=torch.zeros(G, T, dtype=torch.long),
                     micro_batch_inds=rows, micro_batch_start=start, micro_batch_end=start + G, INVALID_LOGPROB=1.0,
                     padding_mask=padding, ref_logprobs=data["ref"].masked_fill(padding, 1.0),
                     scores=data["graded"])  # fmt: skip
        total += cut_lines(folder / "src/tba_trainer_gsm8k.py", "trainer_loop", "output", "tb_loss", scope)
    return {"tba": slope(total / P, logps)}  # accelerate divides by the number of micro-batches


def by_roll(folder: Path, data: dict) -> dict[str, torch.Tensor]:
    """Summed over tokens. Their trainer hands over the ratios of single tokens; here those of completions, too."""
    (topr,) = cut_out(folder / "roll/pipeline/rlvr/actor_pg_worker.py", ("_compute_topr_loss",), {"torch": torch})
    worker = SimpleNamespace(_get_or_cache_config=lambda _, value: value, _topr_sample_logged=True, _cached_metrics={})
    scores, found = 2 * data["rewards"] - 1, {}
    for name in ("completion", "token"):
        logps = leaf(data)
        ratio = (logps - data["old"] if name == "token" else (logps - data["old"]).sum(1, keepdim=True)).exp()
        loss = topr(worker, ratio.expand(B, T), logps, data["old"], (scores - BASELINE)[:, None],
                    SimpleNamespace(batch={"scores": scores}))  # fmt: skip
        found[f"topr/{name}"] = slope((loss * data["mask"]).sum(), logps)
    return found


def by_vineppo(folder: Path, data: dict) -> dict[str, torch.Tensor]:
    """A token is a letter here, the query one more; values stand in `old_values`."""
    path, scope = folder / "src/treetune", {"torch": torch, "np": np}
    sys.modules["deepspeed"] = SimpleNamespace(comm=SimpleNamespace(is_initialized=lambda: False))
    names = "masked_mean", "masked_var", "masked_whiten", "monitor_tensor_anomalies"
    whiten = cut_out(path / "trainers/utils.py", names, scope)[2]
    loss_of, penalty = cut_out(path / "trainers/ppo_trainer.py", ("_compute_actor_loss", "_compute_kl_penalty"), scope)
    generator = path / "episode_generators/math_episode_generator_with_mc_advantages.py"
    of_tokens, of_steps = cut_out(generator, ("_compute_token_advantages", "_compute_step_advantages"), scope)
    maker = SimpleNamespace(reasoning_step_delimiter="", tokenizer=SimpleNamespace(eos_token_id=1, bos_token_id=2),
                            _compute_step_advantages=lambda trajectory: of_steps(None, trajectory))  # fmt: skip
    mask, advantages = data["mask"], torch.zeros(B, T)
    for i, n in enumerate(mask.sum(1).tolist()):
        text, ended = "x" * (n - (i % 2 == 0)), i % 2 == 0
        cuts = [0, *(1 + data["ends"][i].nonzero()[:, 0]).tolist(), len(text)]
        steps = [text[a:b] for a, b in zip(cuts, cuts[1:])]
        trajectory = dict(query_text="q", response_text=text, steps=steps, step_indices=cuts, query_token_ids=[5],
                          response_token_ids=[5] * len(text) + [1] * ended,
                          offsets=[(j, j + 1) for j in range(1 + len(text))],
                          step_rewards=[0.0] * (len(steps) - 1) + [data["rewards"][i].item()],
                          values=[*data["old_values"][i, : len(steps)].tolist(), None])  # fmt: skip
        advantages[i, :n] = torch.tensor(of_tokens(maker, trajectory))
    found, settings = {"vineppo/advantages": advantages}, SimpleNamespace(
        cliprange=EPSILON, kl_penalty_loss_type="control_variate", kl_penalty_loss_clip_min=0,
        kl_penalty_loss_clip_max=10, ratio_threshold=10.0)  # fmt: skip
    for name, used in (("plain", advantages), ("whitened", whiten(advantages, mask, True, True, True))):
        logps = leaf(data)
        trainer = SimpleNamespace(_forward_pass_actor=lambda *_, found=logps, **__: {"all_logps": found},
                                  _compute_kl_penalty=lambda *inputs, **more: penalty(None, *inputs, **more),
                                  report_entropy=False, ppo_hparams=settings,
                                  kl_ctl=SimpleNamespace(value=BETA))  # fmt: skip
        found[f"vineppo/{name}"] = slope(loss_of(trainer, None, {}, mask, data["old"], data["ref"], used)[0], logps)
    return found


def by_ttrl(folder: Path, data: dict) -> dict[str, torch.Tensor]:
    """Rewards (rows, T) of their manager, its metrics of each prompt, and which rows are trained."""
    root, scope = folder / "verl/verl", {"torch": torch, "np": np, "defaultdict": defaultdict}
    for name in ("verl", "verl.utils", "verl.utils.reward_score"):  # without their __init__.py, which import much else
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    from verl.utils.reward_score.ttrl.ttt_metrics import test_time_train_metrics

    scope["test_time_train_metrics"] = test_time_train_metrics
    names = "_compute_ttrl_reward", "_data_source_to_task"
    reward, task = cut_out(root / "workers/reward_manager/ttrl.py", names, scope)
    (select,) = cut_out(root / "trainer/ppo/ray_trainer.py", ("_select_top_k_per_prompt",), {})
    rewards, metrics = [], []
    for texts, truth in VOTES:
        texts = texts.split()
        rows = [SimpleNamespace(batch=dict(prompts=torch.tensor([9]), responses=torch.full((T,), i),
                                           attention_mask=torch.arange(T + 1) < 2 + i),
                                non_tensor_batch=dict(reward_model=dict(ground_truth=truth), extra_info=None,
                                                      source="MATH-TTT")) for i in range(4)]  # fmt: skip
        batch = {name: torch.stack([row.batch[name] for row in rows]) for name in ("prompts", "responses")}
        votes = type("Rows", (list,), {"batch": batch})(rows)
        manager = SimpleNamespace(
            n_votes_per_prompt=4, n_samples_per_prompt=2, num_examine=0, reward_fn_key="source",
            _data_source_to_task=lambda source: task(None, source),
            tokenizer=SimpleNamespace(decode=lambda ids, texts=texts, **_: texts[ids[0] % 4]))  # fmt: skip
        found, _, info = reward(manager, votes)
        rewards.append(found.double())
        metrics.append([float(info[name]) for name in ("label_accuracy", "majority_ratio", "ground_truth_ratio")])
    kept = select(None, torch.arange(4 * len(VOTES)), 4, 2)
    return {"ttrl/rewards": torch.cat(rewards), "ttrl/metrics": torch.tensor(metrics), "ttrl/kept": kept}


PROJECTS = {"verl": by_verl, "NFT": by_nft, "Minimal-RL": by_minimal_rl, "RLVR-Decomposed": by_rlvr_decomposed,
            "TBA": by_tba, "ROLL": by_roll, "VinePPO": by_vineppo, "TTRL": by_ttrl}  # fmt: skip

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    recorded = inputs()
    for name, compute in PROJECTS.items():
        recorded |= compute(Path(sys.argv[1]) / name, inputs())
    save_file(recorded, PATH)
    print(PATH)
