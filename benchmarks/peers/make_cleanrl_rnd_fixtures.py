"""Records what CleanRL's ppo_rnd_envpool.py computes on fixed inputs, for tests/test_parity_cleanrl_rnd.py.

    python benchmarks/peers/make_cleanrl_rnd_fixtures.py CLEANRL      a checkout

writes tests/fixtures/cleanrl_rnd.safetensors: the inputs, novelty, its discounted sums, and all parameters after each
of two updates. Its classes, its statements from the advantages to the last step of the optimizer, and those of the
novelty run unchanged, cut out of the file, in float64. Its networks are as ours here: vectors stand in the first row of
its images, one for the policy in the first frame of four, one for the predictor in the last, and nothing is normalised.
Recorded with CleanRL fe8d8a0.
"""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

PATH = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "cleanrl_rnd.safetensors"
D, A, H, FEATURES, T, N, UPDATES = 3, 4, 6, 4, 12, 3, 2  # T steps of N environments in each update
CASES = dict(plain=dict(clip_vloss=False, norm_adv=False), all=dict(clip_vloss=True, norm_adv=True))
SETTINGS = dict(num_envs=N, num_steps=T, num_minibatches=3, update_epochs=3, gamma=0.9, int_gamma=0.8, gae_lambda=0.7,
                ext_coef=2.0, int_coef=0.5, clip_coef=0.1, ent_coef=0.03, vf_coef=0.4, max_grad_norm=1.0,
                update_proportion=0.4, target_kl=None)  # fmt: skip
RATE = 1e-2
NETS = dict(actor=A, critic=2, target=FEATURES, predictor=FEATURES)  # and what they give


def make_inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights under our names; for each update a rollout of episodes that terminate; for each epoch an order of its
    rows, and a uniform number for each row."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float32).double()  # CleanRL casts observations

    tensors = {}
    for name, out in NETS.items():
        for layer, (fan_in, fan_out) in enumerate([(D, H), (H, H), (H, out)]):
            tensors[f"weights/{name}.{2 * layer}.weight"] = normal(fan_out, fan_in) / fan_in**0.5
            tensors[f"weights/{name}.{2 * layer}.bias"] = 0.1 * normal(fan_out)
    rollouts = (UPDATES, T, N)
    obs, terminated = 4 * normal(UPDATES, T + 1, N, D), torch.rand(*rollouts, generator=g) < 0.2
    next_obs = torch.where(terminated[..., None], normal(*rollouts, D), obs[:, 1:])
    orders = torch.stack([torch.randperm(T * N, generator=g) for _ in range(UPDATES * SETTINGS["update_epochs"])])
    # the predictor learns from 4, 8 and none of the 12 rows of a minibatch: CleanRL divides by these numbers in float32
    learned = torch.arange(T * N) % 12 < torch.tensor([4, 8, 0]).repeat_interleave(12)
    share, part = SETTINGS["update_proportion"], torch.rand(orders.shape, generator=g, dtype=torch.float64)
    uniform = torch.zeros_like(part).scatter(1, orders, torch.where(learned, share * part, share + (1 - share) * part))
    return tensors | {"obs": obs, "next_obs": next_obs, "terminated": terminated, "rewards": normal(*rollouts),
                      "bonus": normal(*rollouts).abs(), "actions": torch.randint(A, rollouts, generator=g),
                      "orders": orders, "uniform": uniform}  # fmt: skip


class Vector(nn.Module):
    """The vector in the first row of an image's first frame."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images[:, 0, 0, :D].double()


def images(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """With these vectors in the first frame, which will be divided by 255, and in the last."""
    found = torch.zeros(*first.shape[:-1], 4, 84, 84)
    found[..., 0, 0, :D], found[..., 3, 0, :D] = 255 * first, last
    return found


def mlp(inputs: dict, name: str) -> nn.Sequential:
    layers = [nn.Linear(D, H), nn.Linear(H, H), nn.Linear(H, len(inputs[f"weights/{name}.4.bias"]))]
    net = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    prefix = f"weights/{name}."
    net.load_state_dict({key.removeprefix(prefix): t for key, t in inputs.items() if key.startswith(prefix)})
    return net


def cut_out(path: Path, scope: dict) -> tuple:
    """Defines the classes in `scope`. Returns what computes the novelty of a step, and what learns from a rollout."""
    *body, main = ast.parse(path.read_text()).body
    loop = next(node.body for node in main.body if ast.unparse(node).startswith("for update "))
    names = [ast.unparse(node).split("\n")[0] for node in loop]
    first, last = names.index("with torch.no_grad():"), names.index("for epoch in range(args.update_epochs):")
    steps = loop[names.index("for step in range(0, args.num_steps):")].body
    starts = "rnd_next_obs =", "target_next_feature =", "predict_next_feature =", "curiosity_rewards[step] ="
    kept = "Agent", "RNDModel", "RewardForwardFilter", "layer_init"
    parts = ([node for node in body if getattr(node, "name", "") in kept],
             [node for node in steps if ast.unparse(node).startswith(starts)], loop[first : last + 1])  # fmt: skip
    classes, novelty, learn = (compile(ast.Module(part, []), path, "exec") for part in parts)
    exec(classes, scope)
    return novelty, learn


def run_updates(folder: Path, inputs: dict[str, torch.Tensor], case: dict) -> dict[str, torch.Tensor]:
    sizes = dict(batch_size=T * N, minibatch_size=T * N // SETTINGS["num_minibatches"])
    args = SimpleNamespace(**SETTINGS, **case, **sizes)
    scope = dict(torch=torch, nn=nn, F=F, np=np, Categorical=Categorical, args=args, device="cpu")
    novelty, learn = cut_out(folder / "cleanrl/ppo_rnd_envpool.py", scope)
    spaces = dict(single_observation_space=SimpleNamespace(shape=(4, 84, 84)),
                  single_action_space=SimpleNamespace(n=A, shape=()))  # fmt: skip
    envs, nets = SimpleNamespace(**spaces), {name: mlp(inputs, name) for name in NETS}
    agent, rnd_model = scope["Agent"](envs), scope["RNDModel"](4, A)
    agent.network, agent.actor, agent.extra_layer = Vector(), nets["actor"], nn.Linear(D, D).requires_grad_(False)
    agent.extra_layer.weight.zero_(), agent.extra_layer.bias.zero_()
    heads = [nn.Linear(H, 1), nn.Linear(H, 1)]
    for head, weight, bias in zip(heads, nets["critic"][4].weight, nets["critic"][4].bias):
        head.weight.data.copy_(weight[None]), head.bias.data.copy_(bias)
    agent.critic_ext, agent.critic_int = (nn.Sequential(*nets["critic"][:4], head) for head in heads)
    rnd_model.predictor, rnd_model.target = (nn.Sequential(Vector(), nets[name]) for name in ("predictor", "target"))
    parameters = list(agent.parameters()) + list(rnd_model.predictor.parameters())
    zeros = SimpleNamespace(mean=np.zeros((1, 1, 84, 84)), var=np.ones((1, 1, 84, 84)), update=lambda _: None)
    scope |= dict(envs=envs, agent=agent, rnd_model=rnd_model, combined_parameters=parameters, obs_rms=zeros,
                  optimizer=torch.optim.Adam(parameters, RATE, eps=1e-5))  # fmt: skip
    discounted, states = scope["RewardForwardFilter"](args.int_gamma), []
    orders, uniform = iter(inputs["orders"].numpy()), iter(inputs["uniform"].gather(1, inputs["orders"]).flatten())
    for i in range(UPDATES):
        found = dict(novelty=torch.zeros(T, N))
        scope |= dict(curiosity_rewards=found["novelty"])
        for scope["step"], next_obs in enumerate(inputs["next_obs"][i]):
            scope["next_obs"] = images(next_obs, next_obs)
            exec(novelty, scope)
        found["sums"] = torch.stack([discounted.update(row) for row in found["novelty"]])
        obs, ends = images(inputs["obs"][i, :-1], inputs["next_obs"][i]), inputs["terminated"][i].double()
        last, actions = inputs["obs"][i, -1], inputs["actions"][i]
        with torch.no_grad():
            _, logprobs, _, *values = agent.get_action_and_value(obs.flatten(0, 1), actions.flatten())
        scope |= dict(obs=obs, actions=actions, rewards=inputs["rewards"][i], curiosity_rewards=inputs["bonus"][i],
                      dones=torch.cat([torch.zeros(1, N), ends[:-1]]), next_done=ends[-1], next_obs=images(last, last),
                      logprobs=logprobs.view(T, N), ext_values=values[0].view(T, N), int_values=values[1].view(T, N)
                      )  # fmt: skip
        with (
            mock.patch("numpy.random.shuffle", lambda rows: np.copyto(rows, next(orders))),
            mock.patch.object(torch, "rand", lambda count, **_: torch.stack([next(uniform) for _ in range(count)])),
        ):
            exec(learn, scope)
        for name in ("weight", "bias"):
            getattr(nets["critic"][4], name).data.copy_(torch.cat([getattr(head, name) for head in heads]))
        found |= {f"{name}.{key}": t for name, net in nets.items() for key, t in net.state_dict().items()}
        states.append({name: tensor.detach().clone() for name, tensor in found.items()})
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def main() -> None:
    import safetensors.torch

    torch.set_default_dtype(torch.float64)
    inputs = make_inputs()
    tensors = {f"input/{name}": value for name, value in inputs.items()}
    for name, case in CASES.items():
        found = run_updates(Path(sys.argv[1]), inputs, case)
        tensors |= {f"{name}/{key}": value for key, value in found.items()}
    PATH.write_bytes(safetensors.torch.save(tensors))
    print(f"{PATH.stat().st_size / 1024:.0f} KB in {PATH}")


if __name__ == "__main__":
    main()
