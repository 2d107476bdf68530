"""crossq.py against numbers computed another way: BatchRenorm by NumPy and by torch's BatchNorm, whole updates by a
second implementation. What its train() shares with sac.py is tested in test_exact_sac.py.

The second implementation has its own forward pass, statistics, density, losses and Adam; derivatives are autograd's.
"""

import math

import numpy as np
import pytest
import torch
from control import adam, close, float64, minibatch, randomise
from test_exact_sac import ENTROPY, GAMMA, RATE, A, B, D, H

from algos import crossq, sac

EPSILON, MOMENTUM = 1e-3, 0.01


def make_args(**flags) -> crossq.Args:
    settings = dict(gamma=GAMMA, target_entropy=ENTROPY, hidden_size=H, critic_size=H, alpha=0.3, policy_frequency=2)
    return crossq.Args(**settings | flags)


def make_agent(args: crossq.Args) -> crossq.Agent:
    return randomise(crossq.Agent(D, A, args), 4, 0.4, 0.1)


def make_optimizers(agent, module=crossq):
    parts = agent.actor.parameters(), agent.critics.parameters(), [agent.log_alpha]
    return module.Optimizers(*(torch.optim.Adam(part, RATE, fused=True) for part in parts))


def buffers(module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.named_buffers()}


# --- BatchRenorm


def batches(count: int) -> list[np.ndarray]:
    """Of 16 rows and 4 columns: the first stays, the second's mean goes far up, the third's spread far up, the fourth's
    far down."""
    rng = np.random.default_rng(0)
    scales = [(np.array([0, 30 * i, 0, 0]), np.array([1, 1, 20.0**i, 0.05**i])) for i in range(count)]
    return [mean + spread * rng.normal(size=(16, 4)) for mean, spread in scales]


@float64()
def test_batch_renorm_equals_numpy():
    """Two passes of warm-up and two after it, in which r is clipped at 3 and 1/3 and d at 5, each in a column; running
    statistics are those from before the pass; then evaluation, which moves nothing."""
    layer = randomise(crossq.BatchRenorm(4, warmup=2), 3, 1.0, 1.0)
    weight, bias = (x.detach().numpy() for x in (layer.weight, layer.bias))
    mean, variance, clipped = np.zeros(4), np.ones(4), set()
    for number, x in enumerate(batches(4)):
        own, square = x.sum(0) / 16, (x**2).sum(0) / 16
        spread, std = np.sqrt(square - own**2 + EPSILON), np.sqrt(variance + EPSILON)
        r, d = np.ones(4), np.zeros(4)
        if number >= 2:
            r, d = spread / std, (own - mean) / std
            reached = {"up": r > 3, "down": r < 1 / 3, "far": d > 5}
            clipped |= {name for name, columns in reached.items() if columns.any()}
            r, d = np.minimum(np.maximum(r, 1 / 3), 3), np.minimum(np.maximum(d, -5), 5)
        close(layer(torch.from_numpy(x)), weight * ((x - own) / spread * r + d) + bias, 1e-9)
        mean = mean * (1 - MOMENTUM) + own * MOMENTUM
        variance = variance * (1 - MOMENTUM) + (square - own**2) * MOMENTUM
        close(layer.mean, mean)
        close(layer.variance, variance, 1e-9)
        assert layer.passes == number + 1
    assert clipped == {"up", "down", "far"}
    layer.eval()
    before, x = buffers(layer), batches(1)[0]
    close(layer(torch.from_numpy(x)), weight * (x - mean) / np.sqrt(variance + EPSILON) + bias)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.named_buffers())


@float64()
def test_batch_renorm_is_batch_norm_until_it_is_warm():
    """Outputs, running means and gradients; torch's running variance is the one of n - 1."""
    layer, theirs = crossq.BatchRenorm(4, warmup=9), torch.nn.BatchNorm1d(4, EPSILON, MOMENTUM)
    for x in batches(3):
        outputs, slopes = [], []
        for one in (layer, theirs):
            given = torch.from_numpy(x).requires_grad_()
            outputs.append(one(given))
            slopes.append(torch.autograd.grad((outputs[-1] ** 3).sum(), given)[0])
        close(outputs[0], outputs[1], 1e-9)
        close(slopes[0], slopes[1], 1e-9)
        close(layer.mean, theirs.running_mean)


@float64()
def test_warm_and_not_clipped_training_is_evaluation():
    """Values are those of the running statistics. The slope is that of the batch's: a shift of the whole batch changes
    d, which is a constant, and so does nothing to the loss."""
    layer, g = randomise(crossq.BatchRenorm(4, warmup=0), 3, 1.0, 1.0), torch.Generator().manual_seed(0)
    for _ in range(5):
        x = (torch.randn(16, 4, generator=g) + 0.3).requires_grad_()
        wanted = layer.eval()(x)
        found = layer.train()(x)
        close(found, wanted)
        close(torch.autograd.grad((found**3).sum(), x)[0].sum(0), 0.0)
        assert (torch.autograd.grad((wanted**3).sum(), x)[0].sum(0).abs() > 1e-3).all()


# --- a second implementation of the step


def own_network(p: dict, stats: dict | None, name: str, x, running: dict | None = None):
    """Rows through a network: with `running` statistics, or by those of the rows, which are then added to `stats`."""
    norm = 0
    while f"{name}.{norm}.weight" in p:
        if p[f"{name}.{norm}.weight"].dim() == 1:
            if running is None:
                mean = x.sum(0) / len(x)
                variance = ((x - mean) ** 2).sum(0) / len(x)
                for kind, value in (("mean", mean), ("variance", variance)):
                    key = f"{name}.{norm}.{kind}"
                    stats[key] = 0.99 * stats[key] + 0.01 * value.detach()
                stats[f"{name}.{norm}.passes"] = stats[f"{name}.{norm}.passes"] + 1
            else:
                mean, variance = running[f"{name}.{norm}.mean"], running[f"{name}.{norm}.variance"]
            x = p[f"{name}.{norm}.weight"] * (x - mean) / (variance + EPSILON) ** 0.5 + p[f"{name}.{norm}.bias"]
            norm += 1
        x = x @ p[f"{name}.{norm}.weight"].T + p[f"{name}.{norm}.bias"]
        last = f"{name}.{norm + 2}.weight" not in p
        x = x if last else x * (x > 0)
        norm += 2
    return x


def own_act(p: dict, obs, noise, **how):
    """As SAC's policy, from the outputs of this network."""
    outputs = own_network(p, name="actor.net", x=obs, **how)
    mean, log_std = outputs[:, :A], outputs[:, A:]
    u = mean + torch.exp(log_std) * noise
    logps = torch.distributions.Normal(mean, torch.exp(log_std)).log_prob(u) - torch.log(1 - torch.tanh(u) ** 2)
    return torch.tanh(u), logps.sum(1)[:, None]


@float64()
@pytest.mark.parametrize("batch_norm", [True, False])
def test_update_equals_a_second_implementation(batch_norm):
    """Four updates: all parameters, statistics and metrics. The critics' statistics are those of both kinds of rows,
    and the actor's pass leaves them; the actor's are those of its own pass, and the target leaves them. The target has
    no gradient, but the statistics that it shares with Q do."""
    args = make_args(batch_norm=batch_norm)
    agent, given = make_agent(args), []
    optimizers, moments, generator = make_optimizers(agent), {}, torch.Generator().manual_seed(0)
    p = {name: x.detach().clone().requires_grad_() for name, x in agent.named_parameters()}
    stats = buffers(agent)
    assert (len(stats) > 0) == batch_norm

    def listened(loss, position):
        def listening(*inputs):
            given.append(inputs[position].clone())
            return loss(*inputs)

        return listening

    losses = listened(crossq.critic_loss, 2), listened(crossq.actor_loss, 2)
    for number in (1, 2, 3, 4):
        batch = minibatch(crossq.Transitions, number)
        numbers = crossq.update(agent, optimizers, batch, generator, args, number, *losses)
        moves = number % 2 == 0
        next_actions, next_logps = own_act(p, batch.next_obs, given[-1 - moves], stats=None, running=stats)
        rows = torch.vstack([torch.hstack([batch.obs, batch.actions]), torch.hstack([batch.next_obs, next_actions])])
        rows = rows.detach()
        q = [own_network(p, stats, f"critics.{name}", rows) for name in ("q1", "q2")]
        assert 0 < (q[0][B:] < q[1][B:]).sum() < B  # each of the two is the smaller one somewhere
        value = torch.minimum(q[0][B:], q[1][B:]) - p["log_alpha"].exp() * next_logps
        target = (batch.rewards + GAMMA * (1 - batch.terminated) * value).detach()
        wanted = {"q": q[0][:B].mean(), "td_error": (q[0][:B] - target).abs().mean()}
        loss = sum(((x[:B] - target) ** 2).sum() / (2 * B) for x in q)
        gradients = adam(p, moments, "critics", loss, RATE)
        wanted["grad_norm"] = math.sqrt(sum((g**2).sum() for g in gradients.values()))
        if moves:
            running = dict(stats)
            actions, logps = own_act(p, batch.obs, given[-1], stats=stats)
            both = torch.hstack([batch.obs, actions])
            smaller = torch.minimum(*(own_network(p, None, f"critics.{name}", both, running) for name in ("q1", "q2")))
            adam(p, moments, "actor", (p["log_alpha"].exp().item() * logps - smaller).sum() / B, RATE)
            adam(p, moments, "log_alpha", -torch.exp(p["log_alpha"]) * (logps.detach() + ENTROPY).mean(), RATE)
            wanted |= {"entropy": -logps.mean(), "alpha": p["log_alpha"].exp()}
        for name, tensor in agent.state_dict().items():
            close(tensor, (p | stats)[name].detach(), 1e-8)  # Adam magnifies the smallest gradients
        assert numbers.keys() == wanted.keys()
        for name, value in wanted.items():
            close(numbers[name], value)
        assert not any(module.training for module in agent.modules())
        assert all(x.requires_grad for x in agent.parameters())
    if batch_norm:
        assert {x.item() for name, x in stats.items() if name.endswith("passes")} == {2, 4}


@float64()
def test_one_pass_is_not_two():
    """Rows and next rows that differ much: Q of one pass is not that of two passes with statistics of their own, which
    hide the difference; with running statistics both are the same."""
    agent = make_agent(make_args())
    batch = minibatch(crossq.Transitions)
    batch = batch._replace(next_obs=batch.next_obs + 5)
    for mode in (True, False):
        agent.critics.train(mode)
        _, q, _ = crossq.critic_loss(agent, batch, torch.zeros(B, A), GAMMA)
        alone = agent.critics(batch.obs, batch.actions)[0]
        assert ((q - alone).abs().max() > 0.1) == mode
        if not mode:
            close(q, alone)


@float64()
def test_without_batch_norm_it_is_sac_whose_targets_follow_at_once():
    """crossq.py --no-batch-norm and sac.py --tau 1, from the same weights and random numbers."""
    args = make_args(batch_norm=False)
    ours, theirs = make_agent(args), sac.Agent(D, A, H, 0.3)
    state = ours.state_dict()
    theirs.load_state_dict(state | {n.replace("critics", "targets"): x for n, x in state.items() if "critics" in n})
    first, second = make_optimizers(ours), make_optimizers(theirs, sac)
    sac_args = sac.Args(gamma=GAMMA, tau=1.0, target_entropy=ENTROPY, policy_frequency=2)
    for number in (1, 2, 3, 4):
        generators = [torch.Generator().manual_seed(number) for _ in range(2)]
        numbers = crossq.update(ours, first, minibatch(crossq.Transitions, number), generators[0], args, number)
        expected = sac.update(theirs, second, minibatch(sac.Transitions, number), generators[1], sac_args, number)
        for name, tensor in ours.state_dict().items():
            close(tensor, theirs.state_dict()[name])
        assert numbers.keys() == expected.keys()


def test_an_action_does_not_depend_on_the_other_environments():
    """The policy acts by running statistics: a row alone gets the action that it gets among others."""
    agent, space = make_agent(make_args()), crossq.gym.spaces.Box(-1, 1, (A,))
    obs = np.random.default_rng(0).normal(size=(6, D))
    together = crossq.act(agent.actor, space, obs, 0.0, torch.Generator())
    alone = [crossq.act(agent.actor, space, row[None], 0.0, torch.Generator())[0] for row in obs]
    close(together, alone, 1e-6)


def test_the_compiled_losses_are_one_graph_with_equal_gradients():
    """In the modes in which `update` calls them, statistics too."""
    noise = torch.randn(B, A, generator=torch.Generator().manual_seed(1))
    batch = minibatch(crossq.Transitions)
    for part, loss, inputs in [("critics", crossq.critic_loss, (batch, noise, GAMMA)),
                               ("actor", crossq.actor_loss, (batch.obs, noise))]:  # fmt: skip
        results = []
        for function in (loss, torch.compile(loss, fullgraph=True, backend="eager")):
            agent = make_agent(make_args())
            getattr(agent, part).train()
            function(agent, *inputs)[0].backward()
            gradients = [x.grad for x in agent.parameters() if x.grad is not None]
            results.append(torch.cat([x.flatten() for x in [*gradients, *buffers(agent).values()]]))
        assert (results[0] - results[1]).abs().max() < 1e-6 * results[0].abs().max()
