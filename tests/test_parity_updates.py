"""Updates of off-policy and offline scripts compute what their authors, CORL or Stable-Baselines3 compute, from
the same weights, minibatches and random numbers: every parameter after each update, to 1e-9 in float64.

Against the numbers that benchmarks/peers/ recorded, and SB3 itself where it is installed. What differs:
    - iql, bc, rlpd: the authors' JAX code (commits 09d7002 and c90fd4b). RLPD's critics minimise a mean over them where
      ours minimise half a sum, a factor that Adam's epsilon alone sees, and flax's LayerNorm has another epsilon.
    - riql: the authors' critics minimise a mean, ours a sum.
    - dqn: SB3 clips gradients at norm 10, which none of these reaches, and it has no Double DQN. her's are dqn's.
    - awac (CORL, eeeeef2), td3_bc (76cdd14), rebrac (694385b), ddpg and td3 (SB3): nothing.
"""

import importlib

import pytest
import torch
from parity import below, follow, recorded, states, updates
from torch import Tensor, nn

from algos import awac, bc, ddpg, dqn, her, iql, rebrac, riql, rlpd, td3, td3_bc
from benchmarks.peers import make_authors_fixtures as authors

pytestmark = pytest.mark.usefixtures("float64")

DENSE = [f"MLP_0/Dense_{i}" for i in range(3)]
IQL = {"actor.net": [f"actor/{place}" for place in (*DENSE[:2], "Dense_0")], "value": [f"value/{d}" for d in DENSE]}
IQL |= {f"{ours}.q{i + 1}": [f"{theirs}/Critic_{i}/{place}" for place in DENSE]
        for ours, theirs in (("critics", "critic"), ("targets", "target_critic")) for i in range(2)}  # fmt: skip
NORMED = DENSE[0], "MLP_0/LayerNorm_0", DENSE[1], "MLP_0/LayerNorm_1", "Dense_0"
RLPD = {"actor.net": [f"actor/{place}" for place in (*DENSE[:2], "OutputDenseMean OutputDenseLogStd")]}
RLPD |= {f"{ours}.q{i + 1}": [f"{theirs}/VmapStateActionValue_0/{place}#{i}" for place in NORMED]
         for ours, theirs in (("critics", "critic"), ("targets", "target_critic"))
         for i in range(authors.CRITICS)}  # fmt: skip


def layer(theirs: dict, place: str, kind: str) -> Tensor:
    """The authors' weight or bias, ours in shape, at the start and after each update. `#i`: of the ensemble's member i.
    Two names: the two halves of one layer of ours."""
    first, *second = place.split()
    first, _, member = first.partition("#")
    kinds = {"bias": ["bias"], "weight": ["kernel", "scale"]}[kind]
    (name,) = [name for k in kinds if (name := f"{first}/{k}") in theirs]
    found = theirs[name][:, int(member)] if member else theirs[name]
    found = found.mT if name.endswith("kernel") else found
    return torch.cat([found, *(layer(theirs, f"{first.rpartition('/')[0]}/{name}", kind) for name in second)], 1)


def by_our_names(theirs: dict, agent: nn.Module, table: dict[str, list[str]]) -> dict[str, Tensor]:
    found = {}
    for prefix, places in table.items():
        layers = sorted({int(name.split(".")[-2]) for name in agent.state_dict() if name.startswith(f"{prefix}.")})
        for number, place in zip(layers, places, strict=True):
            found |= {f"{prefix}.{number}.{kind}": layer(theirs, place, kind) for kind in ("weight", "bias")}
    return found


def adam(*parts: nn.Module, rate: float = 1e-2) -> list[torch.optim.Adam]:
    return [torch.optim.Adam(part.parameters(), rate) for part in parts]


def given(patch, name: str, draws) -> None:
    """What torch draws."""
    draws = iter(draws)
    patch.setattr(torch, name, lambda *_, **__: next(draws))


def of_iql(script: str, their, inputs, theirs, patch) -> None:
    """Some weights of iql are clipped, and one standard deviation is, also bc's: it stands still below its bound."""
    theirs, settings = below(f"{script}/", theirs), dict(hidden_size=authors.H, dropout=0.0)
    if script == "iql":
        settings |= dict(gamma=authors.GAMMA, tau=authors.TAU, expectile=authors.EXPECTILE,
                         temperature=authors.TEMPERATURE)  # fmt: skip
    module = {"iql": iql, "bc": bc}[script]
    agent = module.Agent(authors.D, authors.A, args := module.Args(**settings))
    table = IQL if script == "iql" else {"actor.net": IQL["actor.net"]}
    log_stds, clipped = theirs["actor/log_stds"], []
    adams = adam(agent.actor, *([agent.critics, agent.value] if script == "iql" else []))
    update = updates(module, inputs, agent, iql.Optimizers(*adams) if script == "iql" else adams[0], args)
    follow(agent, by_our_names(theirs, agent, table) | {"actor.log_std": log_stds}, lambda i: clipped.append(update(i)))
    assert script == "bc" or 0 < max(found["clipped"] for found in clipped) < 1
    assert log_stds[-1, 1] == log_stds[0, 1] < -5


def of_rlpd(script: str, their, inputs, theirs, patch) -> None:
    """Critics with LayerNorm and a random subset of targets, then actor, temperature and targets."""
    theirs, factor = below("rlpd/", theirs), authors.CRITICS / 2
    args = rlpd.Args(gamma=authors.GAMMA, tau=authors.TAU, num_critics=authors.CRITICS, subset_size=authors.SUBSET,
                     hidden_size=authors.H, target_entropy=-authors.A / 2, policy_frequency=1)  # fmt: skip
    agent = rlpd.Agent(authors.D, authors.A, authors.H, authors.ALPHA, count=authors.CRITICS, layer_norm=True)
    for module in agent.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-6
    optimizers = rlpd.Optimizers(*adam(agent.actor, agent.critics), torch.optim.Adam([agent.log_alpha], authors.RATE))
    optimizers.critics.param_groups[0]["eps"] *= factor
    given(patch, "randn", inputs["noise"])
    given(patch, "randperm", inputs["subset"])
    found = by_our_names(theirs, agent, RLPD) | {"log_alpha": theirs["temp/log_temp"]}
    follow(agent, found, updates(rlpd, inputs, agent, optimizers, args))


def of_awac(script: str, their, inputs, theirs, patch) -> None:
    agent = awac.Agent(3, 2, args := awac.Args(hidden_size=8, **their.SETTINGS))
    given(patch, "randn", (x for noise in inputs["noise"] for x in noise.unbind(1)))
    update, largest = updates(awac, inputs, agent, awac.Optimizers(*adam(agent.actor, agent.critics)), args), []
    follow(agent, theirs, lambda i: largest.append(update(i)["largest"].item()))
    assert min(largest) < max(largest) == 100


def of_td3_bc(script: str, their, inputs, theirs, patch) -> None:
    agent = td3_bc.Agent(3, 2, args := td3_bc.Args(hidden_size=8, **their.SETTINGS))
    parts = {"actor": "actor", "target_actor": "actor_target", "critics": "critic", "target_critics": "critic_target"}
    layers = {"net": "l1 l2 l3", "q1": "l1 l2 l3", "q2": "l4 l5 l6"}
    names = {f"{ours}.{net}.{2 * i}.{kind}": f"{parts[ours]}.{layer}.{kind}"
             for ours in parts for net in (["net"] if "actor" in ours else ["q1", "q2"])
             for i, layer in enumerate(layers[net].split()) for kind in ("weight", "bias")}  # fmt: skip
    given(patch, "randn", inputs["noise"])
    update = updates(td3_bc, inputs, agent, td3_bc.Optimizers(*adam(agent.actor, agent.critics)), args)
    follow(agent, {ours: theirs[name] for ours, name in names.items()}, update)


def of_rebrac(script: str, their, inputs, theirs, patch) -> None:
    agent = rebrac.Agent(3, 2, args := rebrac.Args(hidden_size=8, **their.SETTINGS))
    given(patch, "randn", inputs["noise"])
    optimizers, inputs = rebrac.Optimizers(*adam(agent.actor, agent.critics)), inputs | {
        "followed": torch.ones_like(inputs["rewards"])}  # fmt: skip
    follow(agent, theirs, updates(rebrac, inputs, agent, optimizers, args))


def of_riql(script: str, their, inputs, theirs, patch) -> None:
    """Either the value learns or the others; some errors lie on the parabola of Huber's loss, some on its lines."""
    args = riql.Args(gamma=their.GAMMA, tau=their.TAU, quantile=their.QUANTILE, expectile=their.EXPECTILE,
                     temperature=3.0, huber_delta=1 / their.SIGMA**2, hidden_size=their.H, dropout=0.0)  # fmt: skip
    for learner, rates in their.RATES.items():
        agent = riql.Agent(their.D, their.A, args)
        parts = zip((agent.actor, agent.critics, agent.value), rates)
        optimizers = riql.Optimizers(*(adam(part, rate=rate)[0] for part, rate in parts))
        optimizers.critics.param_groups[0]["eps"] *= their.K
        update = updates(riql, inputs, agent, optimizers, args)

        def checked(i: int, agent=agent, update=update) -> None:
            with torch.no_grad():
                target = inputs["rewards"][i] + args.gamma * (1 - inputs["terminated"][i]) * agent.value(
                    inputs["next_obs"][i])  # fmt: skip
                small = (agent.critics(inputs["obs"][i], inputs["actions"][i]) - target).abs() < args.huber_delta
            assert 0 < small.float().mean() < 1
            update(i)

        still = ("actor", "critics") if learner == "value" else ("value",)
        follow(agent, below(f"{learner}/", theirs), checked, still)


def of_dqn(script: str, their, inputs, theirs, patch) -> None:
    module = {"dqn": dqn, "her": her}[script]
    for number, case in enumerate(their.CASES):
        args = module.Args(gamma=their.GAMMA, target_network_frequency=their.EVERY, hidden_size=their.H, **case)
        agent = module.Agent(their.D, their.A, args)
        update = updates(module, inputs, agent, *adam(agent.q), args)

        def unclipped(i: int, agent=agent, update=update) -> None:
            assert module.metrics(agent, *update(i))["grad_norm"] < 10

        follow(agent, states(inputs, theirs, f"update/{number}/"), unclipped)


def of_td3(script: str, their, inputs, theirs, patch) -> None:
    """The noise is given through the loss. ddpg.py has one critic under another name."""
    module = {"ddpg": ddpg, "td3": td3}[script]
    for number, case in enumerate(their.CASES[: 1 if script == "ddpg" else None]):
        expected, ideas = states(inputs, theirs, f"update/{number}/"), {k: x for k, x in case.items() if k != "algo"}
        assert len(expected) == 12 + 12 * case["num_critics"]

        def losses(i: int, case=case) -> dict:
            noise = (case["policy_noise"] * inputs["noise"][i]).clamp(-case["noise_clip"], case["noise_clip"])

            def with_noise(agents, batch, unused, gamma):
                assert isinstance(unused, float) == (case["policy_noise"] == 0)
                return td3.critic_loss(agents, batch, noise, gamma)

            return dict(critic_loss=with_noise)

        if script == "ddpg":
            agent, ideas, losses = ddpg.Agent(their.D, their.A, their.H), {}, None
            expected = {name.replace("critics.q1", "critic.net"): x for name, x in expected.items()}
        else:
            agent = td3.Agent(their.D, their.A, their.H, case["num_critics"])
        args = module.Args(gamma=their.GAMMA, tau=their.TAU, **ideas)
        optimizers = module.Optimizers(*adam(agent.actor, getattr(agent, "critics", None) or agent.critic))
        follow(agent, expected, updates(module, inputs, agent, optimizers, args, losses))


TABLE = {  # script -> benchmarks/peers/make_NAME_fixtures.py, and what follows the peer
    "awac": ("awac", of_awac), "td3_bc": ("td3_bc", of_td3_bc), "rebrac": ("rebrac", of_rebrac),
    "riql": ("riql", of_riql), "iql": ("authors", of_iql), "bc": ("authors", of_iql), "rlpd": ("authors", of_rlpd),
    "dqn": ("sb3_dqn", of_dqn), "her": ("sb3_dqn", of_dqn), "ddpg": ("sb3_td3", of_td3), "td3": ("sb3_td3", of_td3),
}  # fmt: skip


def maker_of(script: str):
    return importlib.import_module(f"benchmarks.peers.make_{TABLE[script][0]}_fixtures")


@pytest.mark.parametrize("script", TABLE)
def test_recorded(script, monkeypatch):
    TABLE[script][1](script, maker := maker_of(script), *recorded(maker), monkeypatch)


@pytest.mark.parametrize("script", ["dqn", "her", "ddpg", "td3"])
def test_live(needs_sb3, script, monkeypatch):
    """The same against the installed SB3, on inputs other than the recorded ones."""
    inputs = (maker := maker_of(script)).make_inputs(seed=1)
    TABLE[script][1](script, maker, inputs, maker.results(inputs), monkeypatch)
