"""Updates of the authors' ReBRAC, for tests/test_parity_updates.py.

    git clone https://github.com/tinkoff-ai/ReBRAC, commit 694385b
    pip install jax flax optax chex tqdm          recorded with jax 0.10.2, flax 0.12.8 and optax 0.2.8
    python benchmarks/peers/make_rebrac_fixtures.py ReBRAC

In float64, with networks of H units, and with the noise of the fixture in place of jax's. What is not used here is
imported as empty modules. The authors move their target actor towards the actor before its step; here it moves towards
the new one, as in TD3.
"""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

PATH = Path(__file__).resolve().parents[2] / "tests/fixtures/rebrac.safetensors"
D, A, H, B, UPDATES = 3, 2, 8, 16, 4
SETTINGS = dict(tau=0.1, policy_noise=0.4, noise_clip=0.5, actor_bc=0.3, critic_bc=0.2)
FIELDS = {"obs": (D,), "actions": (A,), "rewards": (1,), "terminated": (1,), "next_obs": (D,), "next_actions": (A,),
          "noise": (A,)}  # fmt: skip


def make_inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = {name: rng.normal(size=(UPDATES, B, *shape)) for name, shape in FIELDS.items()}
    inputs |= {name: np.tanh(inputs[name]) for name in ("actions", "next_actions")}
    return inputs | {"terminated": (inputs["terminated"] > 1) * 1.0}


def by_our_names(parts: dict) -> dict[str, np.ndarray]:
    found = {}
    for (part, *_, layer, kind), x in parts.items():
        kind, x = ("bias", x) if kind == "bias" else ("weight", np.swapaxes(x, -1, -2) if kind == "kernel" else x)
        name, number = layer.split("_")
        place = f"{int(number) * (2 if 'actor' in part else 3) + 2 * (name == 'LayerNorm')}.{kind}"
        nets = {"net": x} if "actor" in part else {"q1": x[0], "q2": x[1]}
        found |= {f"{part}.{net}.{place}": np.ascontiguousarray(y) for net, y in nets.items()}
    return found


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    for name in ("wandb", "pyrallis", "gym", "d4rl", "distrax", "src.utils.buffer"):
        sys.modules[name] = mock.MagicMock(Transformed=object)
    import jax
    import optax
    from flax.traverse_util import flatten_dict

    jax.config.update("jax_enable_x64", True)
    from src.algorithms import rebrac

    inputs, states, metrics, key = make_inputs(), [], mock.MagicMock(), jax.random.PRNGKey(0)
    nets = {rebrac.DetActor(A, H, False, 3): (D,), rebrac.EnsembleCritic(H, 2, True, 3): (D, A)}
    actor, critic = (
        rebrac.CriticTrainState.create(apply_fn=net.apply, params=params, target_params=params, tx=optax.adam(1e-2))
        for net, sizes in nets.items()
        for params in [jax.tree_util.tree_map(np.float64, net.init(key, *(np.zeros((1, size)) for size in sizes)))]
    )
    bc = [SETTINGS[name] for name in ("actor_bc", "critic_bc", "tau", "policy_noise", "noise_clip")]
    for i in range(UPDATES + 1):
        parts = {"actor": actor.params, "target_actor": actor.target_params, "critics": critic.params,
                 "target_critics": critic.target_params}  # fmt: skip
        states.append(by_our_names(flatten_dict(parts)))
        if i == UPDATES:
            break
        names = ("states", "actions", "rewards", "dones", "next_states", "next_actions")
        batch = {theirs: inputs[ours][i].squeeze() for theirs, ours in zip(names, FIELDS)}
        with mock.patch.object(jax.random, "normal", lambda *_, i=i: inputs["noise"][i]):
            _, critic, _ = rebrac.update_critic(key, actor, critic, batch, 0.99, *bc[1:], metrics)
        if i % 2:
            lagging = actor.target_params
            _, actor, critic, _ = rebrac.update_actor(key, actor, critic, batch, bc[0], bc[2], True, metrics)
            actor = actor.replace(target_params=optax.incremental_update(actor.params, lagging, bc[2]))
    save_file(inputs | {name: np.stack([s[name] for s in states]) for name in states[0]}, PATH)


if __name__ == "__main__":
    main(sys.argv[1])
