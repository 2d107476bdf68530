"""Updates of C51 with --double, of Rainbow and of REINFORCE compute what Tianshou's C51, RainbowDQN and Reinforce do:
rows and weights that are drawn, returns, parameters, priorities, from the same steps, weights and random numbers.

Against recorded numbers (peers/make_tianshou_fixtures.py). Tianshou 2.0.1 differs in what follows. Each difference
is put into ours here, and then the numbers are the same. Tianshou

- adds 1e-8 to a probability before its logarithm;
- takes the next distribution one step after the first of a window, not n: its `_target_dist` reads `batch.obs_next`;
- copies the noise with the weights where the target network is renewed, so that in this update both have the same;
- renews a priority with the cross-entropy plus 1.2e-7, not with the divergence plus 1e-6;
- gives a new row the largest priority that there ever was, not the largest that there is;
- has no C51 without Double;
- has no baseline in Reinforce, and takes the mean over steps, which is our sum / N times N / T.
"""

from itertools import pairwise
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import new_run
from parity import EXACT, recorded

from algos import c51, rainbow, reinforce
from benchmarks.peers import make_tianshou_fixtures as tianshou
from benchmarks.peers.make_tianshou_fixtures import CASES, EVERY, GAMMA, UPDATES, V_MAX, V_MIN, A, B, D, H, N, T, given
from utils.control import ReplayBuffer

EPSILON = np.finfo(np.float32).eps.item()

pytestmark = pytest.mark.usefixtures("float64")


INPUTS, RESULTS = recorded(tianshou)


def close(ours: torch.Tensor, theirs: torch.Tensor, atol: float = EXACT) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


class Played(gym.Env):
    """The recorded steps of a stream, whatever the actions are."""

    observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (D,)), gym.spaces.Discrete(A)

    def __init__(self, inputs: dict):
        self.t, self.stream = 0, {name: t.numpy() for name, t in inputs.items() if name.startswith("stream/")}

    def reset(self, *, seed=None, options=None):
        return self.stream["stream/obs"][self.t % T], {}

    def step(self, action):
        found = [self.stream[f"stream/{name}"][self.t] for name in ("next_obs", "rewards", "terminated", "truncated")]
        self.t += 1
        return *found, {}


def stored(module, inputs: dict, tmp_path, *args) -> list[torch.Tensor]:
    """The columns of what train() stores of the recorded steps, (rows, size) each."""
    actions, buffers = iter(inputs["stream/actions"][:, None, None].numpy()), []

    def kept(*args):
        buffers.append(ReplayBuffer(*args))
        return buffers[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make_env", lambda args, **_: Played(inputs))
        patch.setattr(module, "try_out", lambda make, args: (make(), []))
        patch.setattr(module, "act", lambda *_: next(actions))
        patch.setattr(module, "ReplayBuffer", kept)
        new_run(module, tmp_path, "--device", "cpu", "--total-timesteps", T, "--learning-starts", T, "--gamma", GAMMA,
                "--hidden-size", 2, *args)  # fmt: skip
    return list(buffers[0].rows[: buffers[0].total].split(buffers[0].sizes, 1))


def make(module, inputs: dict, log, **settings):
    """An agent with the recorded weights, its optimizer and arguments. It learns `log` of its probabilities, the peer's
    logarithm, and chooses actions by the probabilities themselves."""
    args = module.Args(gamma=GAMMA, hidden_size=H, num_atoms=N, v_min=V_MIN, v_max=V_MAX,
                       target_network_frequency=EVERY, **settings)  # fmt: skip
    agent = module.Agent(D, A, args)
    for net, which in ((agent.q, "weights"), (agent.target, "target" if "target/net.0.bias" in inputs else "weights")):
        names = [name for name, _ in net.named_parameters()]
        net.load_state_dict({"atoms": net.atoms} | {name: inputs[f"{which}/{name}"] for name in names})
    log_probs = agent.q.log_probs
    agent.q.log_probs = lambda obs: log(log_probs(obs).exp()) if torch.is_grad_enabled() else log_probs(obs)
    return agent, torch.optim.Adam(agent.q.parameters(), tianshou.RATE, fused=True), args


def state(agent) -> dict[str, torch.Tensor]:
    return {name: part.detach().clone() for name, part in agent.q.named_parameters()}


def c51_updates(inputs: dict, columns: list, log, **settings) -> list[dict]:
    """Our parameters after each update."""
    (agent, optimizer, args), states = make(c51, inputs, log, **settings), []
    for i in range(UPDATES):
        batch = c51.Transitions(*(column[inputs["rows"][i]] for column in columns))
        c51.update(agent, optimizer, batch, i + 1, args)
        states.append(state(agent))
    return states


def rainbow_updates(inputs: dict, columns: list, weights: torch.Tensor, log, epsilon: float, copied=()) -> list[dict]:
    """The same, and what is drawn and renewed. Learns with the peer's weights, because ours are float32. A priority is
    renewed with the cross-entropy and `epsilon`. In updates of `copied` both networks have the same noise."""
    agent, optimizer, args = make(rainbow, inputs, log)
    count, generator, project, states = len(columns[0]), SimpleNamespace(device="cpu"), rainbow.project, []
    priorities, largest = rainbow.Priorities(count + 1, "cpu"), 1.0
    priorities.add(count, count)
    for i in range(UPDATES):
        targets, noise = [], inputs["noise"][i]
        with pytest.MonkeyPatch.context() as patch, given(noise[:1].repeat(2, 1) if i in copied else noise):
            patch.setattr(torch, "rand", lambda *_, i=i, **__: inputs["uniform"][i].clone())
            patch.setattr(rainbow, "project", lambda *inputs, kept=targets: kept.append(project(*inputs)) or kept[-1])
            index, own = priorities.draw(B, tianshou.BETA, generator)
            batch = rainbow.Transitions(*(column[index] for column in columns), weights[i].double()[:, None])
            *_, divergence = rainbow.update(agent, optimizer, batch, i + 1, args, generator)
        entropy = divergence - torch.xlogy(targets[0], targets[0]).sum(1)  # of the target and what is learned
        priorities.renew(index, entropy + epsilon - 1e-6, tianshou.ALPHA)
        largest = max(largest, entropy.max().item() + epsilon)
        states.append(state(agent) | {"rows": index, "weights": own[:, 0].double(), "new": entropy,
                                      "priorities": priorities.values[:count].clone()})  # fmt: skip
    priorities.add(1, count + 1)
    assert priorities.values[count] == priorities.values[:count].max() < largest**tianshou.ALPHA - 0.01
    states[-1]["largest"] = torch.tensor([largest**tianshou.ALPHA])
    return states


def compare(states: list[dict], results: dict, prefix: str, inputs: dict, float32: float) -> None:
    """Every number after each update, and that each update moves all parameters by far more than the tolerance.
    `float32`: the tolerance of priorities and what depends on them."""
    assert len(states) == UPDATES
    for i, found in enumerate(states):
        for name, tensor in found.items():
            if name == "largest":
                close(tensor, results[f"{prefix}/priority of a new row"].double(), float32)
            else:
                atol = {"weights": 1e-6, "priorities": float32}.get(name, EXACT)
                close(tensor, results[f"{prefix}/{name}"][i].double().to(tensor), atol)
    start = {name.removeprefix("weights/"): tensor for name, tensor in inputs.items() if "weights/" in name}
    moving = [name for name in start if name in states[0]]
    for before, after in pairwise([start, *states]):
        assert all((after[name] - before[name]).abs().max() > 1e4 * EXACT for name in moving)


def theirs(p: torch.Tensor) -> torch.Tensor:
    return (p + 1e-8).log()


def test_c51(tmp_path):
    columns = stored(c51, INPUTS, tmp_path)
    states = c51_updates(INPUTS, columns, theirs, double=True)
    compare(states, RESULTS, "case0", INPUTS, EXACT)


@pytest.mark.parametrize("case", (1, 2))
def test_rainbow(case, tmp_path):
    """The returns of all windows, also of the shorter ones before an end, and the updates."""
    columns = stored(rainbow, INPUTS, tmp_path, "--n-step", CASES[case]["n_step"])
    _, _, rewards, terminated, _, steps = columns
    assert set(steps.flatten().tolist()) == set(range(1, CASES[case]["n_step"] + 1))
    atoms = torch.linspace(V_MIN, V_MAX, N)
    close(rewards + GAMMA**steps * (1 - terminated) * atoms, RESULTS[f"case{case}/returns"])
    columns[4] = INPUTS["stream/next_obs"]  # one step after the first
    copied = range(0, UPDATES, EVERY)  # where the target network has just been renewed
    states = rainbow_updates(INPUTS, columns, RESULTS[f"case{case}/weights"], theirs, EPSILON, copied)
    compare(states, RESULTS, f"case{case}", INPUTS, EXACT)


def test_reinforce():
    """Discounted returns to go, where episodes terminate and where they are cut off, and the gradients of a policy."""
    columns = zip(*(INPUTS[f"stream/{name}"].split(tianshou.LENGTHS) for name in ("obs", "actions", "rewards")))
    obs, actions, rewards = (torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True) for rows in zip(*columns))
    mask = torch.arange(obs.shape[1]) < torch.tensor(tianshou.LENGTHS)[:, None]
    policy = torch.nn.Sequential(torch.nn.Linear(D, H), torch.nn.Tanh(), torch.nn.Linear(H, A))
    for part, value in zip(policy.parameters(), tianshou.policy_weights(INPUTS), strict=True):
        part.data.copy_(value)
    args = reinforce.Args(gamma=GAMMA, baseline=False)
    reinforce.update(policy, torch.optim.Adam(policy.parameters()), reinforce.Batch(obs, actions, rewards, mask), args)
    for i, part in enumerate(policy.parameters()):
        assert RESULTS[f"reinforce/{i}"].abs().max() > 1e6 * EXACT
        close(part.grad * len(mask) / T, RESULTS[f"reinforce/{i}"])
